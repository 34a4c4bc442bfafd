//! Loads the content of device memory from the store, through a window that the launcher fills part by part.
//!
//! The window has two halves: while one is copied to the devices, the launcher fills the other.

use std::ops::Range;

use ckpt_protocol::agent::{FromAgent, ToAgent};

use super::error::AttachError;
use super::transfer;
use crate::cuda::capture::{self, CaptureError, Mirror};
use crate::cuda::driver;
use crate::cuda::memory::physical::Id;
use crate::link::{Link, Piece};

/// The store's chunks begin at multiples of this, in bytes. It decodes a chunk once if it is requested as a whole.
const CHUNK_BYTES: u64 = 4 << 20;

/// What is loaded together.
#[derive(Debug, Default, PartialEq, Eq)]
struct Batch {
    /// In the mirror that there would be.
    ranges: Vec<Range<u64>>,
    /// Where the first one goes in the window.
    at: u64,
}

impl Batch {
    fn request(&self) -> FromAgent {
        FromAgent::Load { ranges: self.ranges.clone(), at: self.at }
    }

    fn bytes(&self) -> u64 {
        capture::total_bytes(&self.ranges)
    }

    fn pieces(&self) -> Vec<Piece> {
        let mut at = self.at;
        let piece = |range: &Range<u64>| {
            let piece = Piece { offset: range.start, bytes: range.end - range.start, at };
            at += piece.bytes;
            piece
        };
        self.ranges.iter().map(piece).collect()
    }
}

/// Divides sorted ranges among the halves of a window, which take turns.
fn batches(used: &[Range<u64>], window_bytes: u64) -> Vec<Batch> {
    let half_bytes = window_bytes / 2;
    let step_bytes = half_bytes.min(CHUNK_BYTES);
    let mut batches: Vec<Batch> = Vec::new();
    if step_bytes == 0 {
        return batches;
    }
    for range in used {
        let mut start = range.start;
        while start < range.end {
            let part = start..range.end.min((start / step_bytes + 1) * step_bytes);
            start = part.end;
            match batches.last_mut() {
                Some(last) if last.bytes() + (part.end - part.start) <= half_bytes => last.ranges.push(part),
                _ => {
                    let at = if batches.len().is_multiple_of(2) { 0 } else { half_bytes };
                    batches.push(Batch { ranges: vec![part], at });
                }
            }
        }
    }
    batches
}

/// Loads physical allocations, and fills chunks with zeroes where these are all that they had; returns how many bytes were
/// loaded.
///
/// # Errors
/// A driver call failed, or the launcher cannot read the store.
pub(super) fn load(window: &mut Mirror, ids: &[Id], link: &mut dyn Link) -> Result<u64, AttachError> {
    if ids.is_empty() {
        return Ok(0);
    }
    let mapped = transfer::map_to_copy_back(ids)?;
    driver::retry(|| Mirror::fill_zeroes(&mapped.allocations))?;
    let used = capture::used_parts(&mapped.allocations);
    let batches = batches(&used, window.bytes());
    if batches.is_empty() && !used.is_empty() {
        let (found_bytes, bytes) = (window.bytes(), CHUNK_BYTES);
        return Err(CaptureError::MirrorTooShort { found_bytes, bytes }.into());
    }
    if let Some(first) = batches.first() {
        link.tell(&first.request());
    }
    for (number, batch) in batches.iter().enumerate() {
        await_loaded(link)?;
        // Into the half from which nothing is copied any more.
        if let Some(next) = batches.get(number + 1) {
            link.tell(&next.request());
        }
        driver::retry(|| window.write(&mapped.allocations, &batch.pieces()))?;
    }
    Ok(capture::total_bytes(&used))
}

fn await_loaded(link: &mut dyn Link) -> Result<(), AttachError> {
    match link.answer() {
        Some((ToAgent::Loaded { problem: None }, _)) => Ok(()),
        Some((ToAgent::Loaded { problem: Some(problem) }, _)) => Err(AttachError::NotFilled(problem)),
        _ => Err(AttachError::MirrorMissing),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn batch(ranges: &[Range<u64>], at: u64) -> Batch {
        let mib = |range: &Range<u64>| range.start * MIB..range.end * MIB;
        Batch { ranges: ranges.iter().map(mib).collect(), at: at * MIB }
    }

    #[test]
    fn halves_take_turns_and_chunks_stay_whole() {
        let used = [2 * MIB..14 * MIB, 20 * MIB..22 * MIB];
        let found = batches(&used, 16 * MIB);
        assert_eq!(found, [batch(&[2..4, 4..8], 0), batch(&[8..12, 12..14, 20..22], 8)]);
        let piece = |offset, bytes, at| Piece { offset: offset * MIB, bytes: bytes * MIB, at: at * MIB };
        assert_eq!(found[1].pieces(), [piece(8, 4, 8), piece(12, 2, 12), piece(20, 2, 14)]);
        assert_eq!(batches(&[], 16 * MIB), []);
    }

    #[test]
    fn a_small_window_gets_parts_of_chunks() {
        let found = batches(&[0..6 * MIB], 4 * MIB);
        assert_eq!(found, [batch(&[0..2], 0), batch(&[2..4], 2), batch(&[4..6], 0)]);
        assert_eq!(batches(&[0..6 * MIB], 1), []);
    }
}
