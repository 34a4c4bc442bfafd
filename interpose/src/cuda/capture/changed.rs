//! Finds chunks that have changed, and copies them: to a pinned mirror while the next ones are hashed, else at the end, which
//! for an H200 is some milliseconds for 50 GB. Chunks of zeroes are not copied where
//! the mirror has no memory, and so reads as zeroes.

use std::ops::Range;

use super::allocation::{Hash, MappedAllocation, in_context};
use super::copy::{Copies, Direction, Stream};
use super::error::CaptureError;
use super::hash::{CHUNK_BYTES, Hasher, hash_of_zeroes};
use super::mirror::Memory;
use super::ranges::joined;
use crate::cuda::driver::DriverError;
use crate::cuda::faults;

/// What an allocation is found to hold, and what of it is new in the mirror.
#[derive(Default, Clone)]
pub(super) struct Found {
    /// Empty if it was not hashed.
    pub hashes: Vec<Hash>,
    /// Where the mirror may have other content than before.
    pub written: Vec<Range<u64>>,
}

/// Copies what is not known to be in the mirror already, and waits for it.
///
/// # Errors
/// A driver call failed, or there is no memory for what has to be copied.
pub(super) fn copy(
    memory: &mut Memory,
    hashers: &mut [Hasher],
    allocations: &[MappedAllocation],
    known: &[Vec<Hash>],
) -> Result<Vec<Found>, CaptureError> {
    let mut found = vec![Found::default(); allocations.len()];
    let mut copies = Copies::default();
    let mut searches = Vec::new();
    for hasher in hashers {
        searches.push(Search::begin(hasher, allocations)?);
    }
    // Allocations that no hasher can hash.
    for (allocation, found) in allocations.iter().zip(&mut found) {
        let is_searched = searches.iter().any(|search| search.hasher.can_hash(allocation));
        if !is_searched {
            begin_copy(memory, &mut copies, allocation, allocation.place())?;
            found.written.push(allocation.place());
        }
    }
    // All devices at a time: none waits for another's hashes.
    while !searches.is_empty() {
        for search in &mut searches {
            let (chunks, hashes) = search.next()?;
            let runs = note(&chunks, &hashes, known, &mut found);
            if !runs.is_empty() {
                faults::hit("capture-hashed");
            }
            for run in runs {
                let (Some(allocation), Some(found)) =
                    (allocations.get(run.allocation), found.get_mut(run.allocation))
                else {
                    continue;
                };
                let place = run.place(allocation);
                found.written.push(place.clone());
                let parts = if run.is_zeroes { memory.allocated_in(place) } else { vec![place] };
                for part in parts {
                    begin_copy(memory, &mut copies, allocation, part)?;
                }
            }
        }
        searches.retain(|search| !search.is_over());
    }
    copies.finish(memory)?;
    Ok(found)
}

/// Begins to copy a part of an allocation's place in the mirror.
fn begin_copy(
    memory: &mut Memory,
    copies: &mut Copies,
    allocation: &MappedAllocation,
    part: Range<u64>,
) -> Result<(), CaptureError> {
    let (address, bytes) = (allocation.address + (part.start - allocation.offset), part.end - part.start);
    memory.grow(part.clone())?;
    Ok(copies.begin(Direction::ToMirror, memory, allocation.context, address, part.start, bytes)?)
}

/// The hashes of the chunks of each allocation; none of those that no hasher can hash.
///
/// # Errors
/// A driver call failed.
pub(super) fn hash(
    hashers: &mut [Hasher],
    allocations: &[MappedAllocation],
) -> Result<Vec<Vec<Hash>>, DriverError> {
    let mut found = vec![Vec::new(); allocations.len()];
    for hasher in hashers {
        let mut search = Search::begin(hasher, allocations)?;
        while !search.is_over() {
            let (chunks, hashes) = search.next()?;
            for (chunk, hash) in chunks.iter().zip(hashes) {
                found[chunk.allocation].push(hash);
            }
        }
    }
    Ok(found)
}

/// The places in the mirror of the chunks that have other hashes than the `known` ones; all if it has no hashes.
pub(super) fn between(allocation: &MappedAllocation, known: &[Hash]) -> Vec<Range<u64>> {
    if allocation.hashes.is_empty() {
        return vec![allocation.place()];
    }
    let starts = (allocation.offset..).step_by(CHUNK_BYTES as usize);
    let chunks = starts.zip(&allocation.hashes).enumerate();
    let changed = chunks.filter(|(index, (_, hash))| known.get(*index) != Some(*hash));
    joined(changed.map(|(_, (start, _))| start..start + CHUNK_BYTES).collect())
}

/// The chunk with number `index` of an allocation.
#[derive(Clone, Copy)]
struct Chunk {
    allocation: usize,
    index: u64,
    address: u64,
}

/// Adjacent chunks of an allocation.
struct Run {
    allocation: usize,
    chunks: Range<u64>,
    /// All of them hold zeroes only; otherwise none does.
    is_zeroes: bool,
}

impl Run {
    /// Its place in the mirror.
    fn place(&self, allocation: &MappedAllocation) -> Range<u64> {
        allocation.offset + self.chunks.start * CHUNK_BYTES..allocation.offset + self.chunks.end * CHUNK_BYTES
    }
}

/// Notes hashes, and finds what has changed.
fn note(chunks: &[Chunk], hashes: &[Hash], known: &[Vec<Hash>], found: &mut [Found]) -> Vec<Run> {
    let zeroes = hash_of_zeroes();
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
        let is_zeroes = *hash == zeroes;
        match runs.last_mut() {
            Some(run)
                if run.allocation == chunk.allocation
                    && run.chunks.end == chunk.index
                    && run.is_zeroes == is_zeroes =>
            {
                run.chunks.end += 1;
            }
            _ => runs.push(Run {
                allocation: chunk.allocation,
                chunks: chunk.index..chunk.index + 1,
                is_zeroes,
            }),
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
