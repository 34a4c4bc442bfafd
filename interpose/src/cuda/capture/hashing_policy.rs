//! Decides whether to hash device memory before copying it.
//!
//! Hashing pays where memory is read much faster than it is copied. By its data sheet an H200 reads sixty times
//! faster; this is measured and not assumed. `CKPT_CAPTURE` overrides the measurement: `changed` always hashes, `all`
//! never does; any other value is ignored.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::allocation::{MappedAllocation, in_context};
use super::copy::{Copies, Direction, Stream};
use super::hash::{CHUNK_BYTES, Hasher};
use super::mirror::Memory;
use crate::cuda::driver::DriverError;
use crate::cuda::shared::Shared;
use crate::process;

const VARIABLE: &[u8] = b"CKPT_CAPTURE";

const TRY: u8 = 0;
const CHANGED: u8 = 1;
const ALL: u8 = 2;

static RULE: AtomicU8 = AtomicU8::new(TRY);

/// As many chunks are tried, if there are as many: a GPU hashes them at a time, and copies one or a few at a time.
const TRIED_CHUNKS: usize = 8;
/// How many captures go by what one of them has found out.
const CAPTURES: u32 = 16;

/// What was found out.
struct Decision {
    should_hash: bool,
    /// By trying so many chunks.
    chunks: usize,
    captures_left: u32,
}

static DECISION: Shared<Option<Decision>> = Shared::new(None);

/// Reads the environment: from the constructor only.
pub(crate) fn activate() {
    let rule = match process::variable(VARIABLE) {
        Some(b"changed") => CHANGED,
        Some(b"all") => ALL,
        _ => TRY,
    };
    RULE.store(rule, Relaxed);
}

/// Whether nothing is hashed in any case.
pub(super) fn is_ruled_out() -> bool {
    RULE.load(Relaxed) == ALL
}

/// Whether nothing is hashed in any case, or hashing was found to be slower than copying.
pub(crate) fn is_unwanted() -> bool {
    match RULE.load(Relaxed) {
        ALL => true,
        CHANGED => false,
        _ => DECISION.lock().as_ref().is_some_and(|known| !known.should_hash),
    }
}

/// Whether to hash the allocations, which the mirror has memory for. To find it out, some of them are copied to the mirror, unless it is known.
///
/// # Errors
/// A driver call failed.
pub(super) fn should_hash(
    memory: &mut Memory,
    hashers: &mut [Hasher],
    allocations: &[MappedAllocation],
) -> Result<bool, DriverError> {
    match RULE.load(Relaxed) {
        ALL => return Ok(false),
        CHANGED => return Ok(!hashers.is_empty()),
        _ => {}
    }
    // The one with the most to tell.
    let samples = hashers.iter_mut().map(|hasher| (sample(hasher, allocations), hasher));
    let Some((sample, hasher)) = samples.max_by_key(|(sample, _)| sample.len()) else { return Ok(false) };
    if sample.is_empty() {
        return Ok(false);
    }
    if let Some(known) = &mut *DECISION.lock()
        && known.captures_left > 0
        && known.chunks >= sample.len()
    {
        known.captures_left -= 1;
        return Ok(known.should_hash);
    }
    // The first time is not like any other.
    times(memory, hasher, sample.get(..1).unwrap_or_default())?;
    let (hashing, copying) = times(memory, hasher, &sample)?;
    let should_hash = hashing < copying;
    *DECISION.lock() = Some(Decision { should_hash, chunks: sample.len(), captures_left: CAPTURES });
    Ok(should_hash)
}

/// A chunk: its address and its offset in the mirror.
type Sample = (u64, u64);

/// Some chunks that can be hashed.
fn sample(hasher: &Hasher, allocations: &[MappedAllocation]) -> Vec<Sample> {
    let chunks_of = |allocation: &MappedAllocation| {
        let (address, offset) = (allocation.address, allocation.offset);
        (0..allocation.bytes / CHUNK_BYTES)
            .map(move |index| (address + index * CHUNK_BYTES, offset + index * CHUNK_BYTES))
    };
    allocations
        .iter()
        .filter(|allocation| hasher.can_hash(allocation))
        .flat_map(chunks_of)
        .take(TRIED_CHUNKS)
        .collect()
}

/// How long it takes to hash chunks, and to copy them.
fn times(
    memory: &mut Memory,
    hasher: &mut Hasher,
    sample: &[Sample],
) -> Result<(Duration, Duration), DriverError> {
    let addresses: Vec<u64> = sample.iter().map(|(address, _)| *address).collect();
    let stream = Stream::new(hasher.context)?;
    let mut copies = Copies::default();
    copies.prepare(hasher.context)?;
    let begun = Instant::now();
    in_context(hasher.context, || hasher.begin(&addresses, stream.handle))?;
    stream.finish()?;
    let hashing = begun.elapsed();
    let begun = Instant::now();
    for (address, offset) in sample {
        copies.begin(Direction::ToMirror, memory, hasher.context, *address, *offset, CHUNK_BYTES)?;
    }
    copies.finish(memory)?;
    Ok((hashing, begun.elapsed()))
}

/// What is remembered: whether it is worth it, by how many chunks, for how many captures more.
#[cfg(test)]
pub(super) fn remembered() -> Option<(bool, usize, u32)> {
    DECISION.lock().as_ref().map(|known| (known.should_hash, known.chunks, known.captures_left))
}
