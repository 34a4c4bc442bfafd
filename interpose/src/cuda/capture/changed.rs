//! Finds chunks that have changed, and copies them while the next ones are hashed.

use std::ops::Range;

use super::allocation::{Hash, MappedAllocation, in_context};
use super::copy::{Copies, Direction, Stream};
use super::hash::{CHUNK_BYTES, Hasher};
use super::mirror::Memory;
use crate::cuda::driver::DriverError;

/// What a allocation is found to hold, and what was copied of it.
#[derive(Default, Clone)]
pub(super) struct Found {
    /// Empty if it was not hashed.
    pub hashes: Vec<Hash>,
    /// Where the mirror was written to.
    pub written: Vec<Range<u64>>,
}

/// Copies what is not known to be in the mirror already, and waits for it.
///
/// # Errors
/// A driver call failed.
pub(super) fn copy(
    memory: &Memory,
    hashers: &mut [Hasher],
    allocations: &[MappedAllocation],
    known: &[Vec<Hash>],
) -> Result<Vec<Found>, DriverError> {
    let mut found = vec![Found::default(); allocations.len()];
    let mut copies = Vec::new();
    let mut searches = Vec::new();
    for hasher in hashers {
        searches.push(Search::begin(hasher, allocations)?);
    }
    // Allocations that no hasher can hash.
    for (allocation, found) in allocations.iter().zip(&mut found) {
        let is_searched = searches.iter().any(|search| search.hasher.can_hash(allocation));
        if !is_searched {
            let copies = Copies::of(&mut copies, allocation.context)?;
            copies.begin(
                Direction::ToMirror,
                memory,
                allocation.address,
                allocation.offset,
                allocation.bytes,
            )?;
            found.written.push(allocation.place());
        }
    }
    // All devices at a time: none waits for another's hashes.
    while !searches.is_empty() {
        for search in &mut searches {
            let (chunks, hashes) = search.next()?;
            for run in note(&chunks, &hashes, known, &mut found) {
                let (Some(allocation), Some(found)) =
                    (allocations.get(run.allocation), found.get_mut(run.allocation))
                else {
                    continue;
                };
                let (skipped, bytes) = (run.chunks.start * CHUNK_BYTES, run.bytes());
                found.written.push(allocation.offset + skipped..allocation.offset + skipped + bytes);
                let copies = Copies::of(&mut copies, allocation.context)?;
                copies.begin(
                    Direction::ToMirror,
                    memory,
                    allocation.address + skipped,
                    allocation.offset + skipped,
                    bytes,
                )?;
            }
        }
        searches.retain(|search| !search.is_over());
    }
    copies.iter().try_for_each(Copies::finish)?;
    Ok(found)
}

/// The chunk with number `index` of a allocation.
#[derive(Clone, Copy)]
struct Chunk {
    allocation: usize,
    index: u64,
    address: u64,
}

/// Adjacent chunks of a allocation.
struct Run {
    allocation: usize,
    chunks: Range<u64>,
}

impl Run {
    fn bytes(&self) -> u64 {
        (self.chunks.end - self.chunks.start) * CHUNK_BYTES
    }
}

/// Notes hashes, and finds what has changed.
fn note(chunks: &[Chunk], hashes: &[Hash], known: &[Vec<Hash>], found: &mut [Found]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (chunk, hash) in chunks.iter().zip(hashes) {
        let (Some(known), Some(found)) = (known.get(chunk.allocation), found.get_mut(chunk.allocation))
        else {
            continue;
        };
        found.hashes.push(*hash);
        if known.get(chunk.index as usize) == Some(hash) {
            continue;
        }
        match runs.last_mut() {
            Some(run) if run.allocation == chunk.allocation && run.chunks.end == chunk.index => {
                run.chunks.end += 1;
            }
            _ => runs.push(Run { allocation: chunk.allocation, chunks: chunk.index..chunk.index + 1 }),
        }
    }
    runs
}

/// The chunks of one context, hashed a part at a time.
struct Search<'a> {
    hasher: &'a mut Hasher,
    stream: Stream,
    chunks: Vec<Chunk>,
    /// Those that are being hashed.
    begun: Range<usize>,
}

impl<'a> Search<'a> {
    fn begin(hasher: &'a mut Hasher, allocations: &[MappedAllocation]) -> Result<Self, DriverError> {
        let stream = Stream::new(hasher.context)?;
        let mut search = Self { hasher, stream, chunks: Vec::new(), begun: 0..0 };
        for (number, allocation) in allocations.iter().enumerate() {
            if search.hasher.can_hash(allocation) {
                let chunk = |index| Chunk {
                    allocation: number,
                    index,
                    address: allocation.address + index * CHUNK_BYTES,
                };
                search.chunks.extend((0..allocation.bytes / CHUNK_BYTES).map(chunk));
            }
        }
        search.begin_more()?;
        Ok(search)
    }

    fn begin_more(&mut self) -> Result<(), DriverError> {
        let start = self.begun.end;
        self.begun = start..self.chunks.len().min(start + self.hasher.part);
        let addresses: Vec<u64> = self
            .chunks
            .get(self.begun.clone())
            .unwrap_or_default()
            .iter()
            .map(|chunk| chunk.address)
            .collect();
        if addresses.is_empty() {
            return Ok(());
        }
        let (hasher, stream) = (&mut *self.hasher, &self.stream);
        in_context(hasher.context, || hasher.begin(&addresses, stream.handle))
    }

    /// Waits for the part that was begun, and begins the next.
    fn next(&mut self) -> Result<(Vec<Chunk>, Vec<Hash>), DriverError> {
        self.stream.finish()?;
        let chunks = self.chunks.get(self.begun.clone()).unwrap_or_default().to_vec();
        let hashes = self.hasher.hashes(chunks.len());
        self.begin_more()?;
        Ok((chunks, hashes))
    }

    fn is_over(&self) -> bool {
        self.begun.is_empty()
    }
}
