//! Copies device memory to the mirror and back.
//!
//! | module | does |
//! |---|---|
//! | `allocation` | an allocation to copy, and work in its context |
//! | `error` | why that fails |
//! | `mirror` | the launcher's memory, mapped |
//! | `pinning` | pins memory of the host |
//! | `copy` | copies, over several streams |
//! | `bounce` | copies of what is not pinned, by threads through pinned buffers |
//! | `hash` | a hash of each chunk, computed on the device |
//! | `changed` | finds and copies the chunks that have changed |
//! | `hashing_policy` | whether hashing is faster than copying |
//! | `ranges` | ranges of the mirror |
//!
//! Nothing here allocates device memory. All calls are made with the calling thread's capture mode relaxed, so that
//! no stream capture is disturbed while the program runs.

mod allocation;
mod bounce;
mod changed;
mod copy;
mod error;
mod hash;
mod hashing_policy;
mod mirror;
mod pinning;
mod ranges;
#[cfg(test)]
mod tests;

use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::OwnedFd;

use cuda_abi::types::CUcontext;

use super::driver::DriverError;
use super::stream_capture::Relaxed;
use crate::link::{Piece, describe};
use crate::process;
pub(crate) use allocation::{Hash, MappedAllocation, used_chunks};
use copy::{Copies, Direction};
pub use error::CaptureError;
use hash::Hasher;
pub(crate) use hash::forget;
pub(crate) use hashing_policy::{activate, is_unwanted};
use mirror::Memory;
pub(crate) use ranges::{bounded, joined, total_bytes, within, without};

/// How much memory a mirror may have.
#[derive(Clone, Default)]
pub(crate) struct Room {
    /// What is allocated, and pinned unless threads copy, before the capture: sorted, without overlaps.
    pub used: Vec<Range<u64>>,
    /// What the capture may allocate in addition, in bytes.
    pub more_bytes: u64,
    /// The mirror has content beyond `used` too.
    pub is_partial: bool,
    /// How many threads copy through pinned buffers; 0: the mirror is pinned.
    pub copy_threads: u64,
}

/// Hashes the chunks of allocations; those that cannot be hashed have none. Nothing may run on the devices meanwhile.
///
/// # Errors
/// A driver call failed.
pub(crate) fn hash(allocations: &[MappedAllocation]) -> Result<Vec<Vec<Hash>>, DriverError> {
    let _relaxed = Relaxed::begin();
    let mut hashers: Vec<Hasher> = Vec::new();
    for allocation in allocations {
        if !hashers.iter().any(|hasher| hasher.context == allocation.context) {
            hashers.push(Hasher::new(allocation.context)?);
        }
    }
    changed::hash(&mut hashers, allocations)
}

/// The parts of the mirror that hold anything but zeroes, by the hashes of allocations: sorted, without overlaps.
pub(crate) fn used_parts(allocations: &[MappedAllocation]) -> Vec<Range<u64>> {
    let used_by = |one: &MappedAllocation| {
        let offset = one.offset;
        one.used_and_zeroes().0.into_iter().map(move |part| offset + part.start..offset + part.end)
    };
    joined(allocations.iter().flat_map(used_by).collect())
}

/// How many threads copy, of those that the launcher allows: no more than this process has CPUs. `None` if it has less than half
/// of what the launcher has reckoned with: the mirror is pinned then.
fn threads_here(copy_threads: u64) -> Option<NonZeroUsize> {
    let threads = (copy_threads as usize).min(process::cpus());
    NonZeroUsize::new(threads).filter(|threads| threads.get() as u64 >= copy_threads / 2)
}

/// A process's mirror, mapped. The child of a fork does not have it and must not drop it.
pub(crate) struct Mirror {
    memory: Memory,
    hashers: Vec<Hasher>,
    /// The reasons why copies are slower than possible, for the report.
    pub shortcomings: Vec<String>,
}

// SAFETY: what it points to is memory of its own, and handles of the driver, which any thread may use.
unsafe impl Send for Mirror {}

impl Mirror {
    /// Maps the launcher's file to copy back the sorted ranges `used` of it to the devices of the contexts: it is pinned, or
    /// `copy_threads` threads copy through pinned buffers. What cannot be pinned is used unpinned.
    ///
    /// # Errors
    /// Why it cannot be mapped.
    pub fn map(
        file: OwnedFd,
        bytes: u64,
        contexts: &[CUcontext],
        used: &[Range<u64>],
        copy_threads: u64,
    ) -> Result<Self, CaptureError> {
        let _relaxed = Relaxed::begin();
        let memory = Memory::map(file, bytes)?;
        let mut mirror = Self { memory, hashers: Vec::new(), shortcomings: Vec::new() };
        mirror.memory.allocate(used, 0)?;
        mirror.pin(used, contexts, copy_threads);
        Ok(mirror)
    }

    /// Maps the launcher's file, and prepares what a capture needs, while the program runs.
    ///
    /// # Errors
    /// Why it cannot be mapped.
    pub fn stage(
        file: OwnedFd,
        bytes: u64,
        contexts: &[CUcontext],
        room: &Room,
    ) -> Result<Self, CaptureError> {
        let memory =
            if room.is_partial { Memory::map_partial(file, bytes)? } else { Memory::map(file, bytes)? };
        let mut mirror = Self { memory, hashers: Vec::new(), shortcomings: Vec::new() };
        mirror.get_ready(contexts, room)?;
        Ok(mirror)
    }

    /// Whether all memory that is pinned, or was allocated to be pinned, is needed for `room`.
    pub fn is_needed(&self, room: &Room) -> bool {
        room.is_partial || self.memory.is_within(&room.used)
    }

    /// Makes its memory inaccessible to threads until [`Self::get_ready`]: a write by mistake is a fault, and does not change
    /// what the next capture takes for captured. Returns whether that is possible.
    pub fn protect(&self) -> bool {
        self.memory.set_accessible(false).is_ok()
    }

    /// Prepares again what an earlier attempt has released. Frees the rest of the file, if all that is pinned is needed.
    ///
    /// # Errors
    /// There is no memory.
    pub fn get_ready(&mut self, contexts: &[CUcontext], room: &Room) -> Result<(), CaptureError> {
        let _relaxed = Relaxed::begin();
        self.memory.set_accessible(true)?;
        if !room.is_partial && self.is_needed(room) {
            self.memory.free_all_but(&room.used)?;
        }
        self.memory.allocate(&room.used, room.more_bytes)?;
        self.pin(&room.used, contexts, room.copy_threads);
        self.hashers.retain(Hasher::is_alive);
        for context in contexts {
            if hashing_policy::is_ruled_out() || self.hashers.iter().any(|hasher| hasher.context == *context)
            {
                continue;
            }
            match Hasher::new(*context) {
                Ok(hasher) => self.hashers.push(hasher),
                Err(error) => self.shortcomings.push(format!("what has changed is not known: {error}")),
            }
        }
        Ok(())
    }

    fn pin(&mut self, used: &[Range<u64>], contexts: &[CUcontext], copy_threads: u64) {
        if let Some(threads) = threads_here(copy_threads) {
            match self.memory.add_buffers(threads, contexts) {
                Ok(()) => return,
                Err(CaptureError::NotPopulated) => {}
                Err(error) => self.shortcomings.push(format!("threads cannot copy: {}", describe(&error))),
            }
        }
        if let Err(error) = self.memory.pin(used, contexts) {
            self.shortcomings.push(format!("the mirror is not pinned: {}", describe(&error)));
        }
    }

    /// Copies changed memory to the mirror and stores each allocation's hashes. Returns the ranges of the mirror that
    /// were written, for each allocation. Nothing may run on the devices meanwhile. Allocations that were copied
    /// without hashing have no hashes afterwards, and after an error none has: the mirror's content is undefined
    /// then.
    ///
    /// # Errors
    /// A driver call failed, or an allocation does not fit into the mirror.
    pub fn capture(
        &mut self,
        allocations: &mut [MappedAllocation],
    ) -> Result<Vec<Vec<Range<u64>>>, CaptureError> {
        let _relaxed = Relaxed::begin();
        self.check(allocations)?;
        let known: Vec<Vec<Hash>> =
            allocations.iter_mut().map(|allocation| std::mem::take(&mut allocation.hashes)).collect();
        let mut failed = None;
        match self.capture_changed(allocations, &known) {
            Ok(Some(found)) => {
                let note = |(allocation, found): (&mut MappedAllocation, changed::Found)| {
                    allocation.hashes = found.hashes;
                    found.written
                };
                return Ok(allocations.iter_mut().zip(found).map(note).collect());
            }
            Ok(None) => {}
            // Memory that cannot be hashed can still be copied.
            Err(CaptureError::Driver(error)) => {
                self.shortcomings.push(format!("cannot tell which device memory has changed: {error}"));
                failed = Some(error.into());
            }
            Err(error) => return Err(error),
        }
        for allocation in allocations.iter() {
            // Without room for all of it, the first error is the reason.
            self.memory.grow(allocation.place()).map_err(|error| failed.take().unwrap_or(error))?;
        }
        self.copy(allocations)?;
        Ok(allocations.iter().map(|allocation| vec![allocation.place()]).collect())
    }

    /// Finds what has changed, as [`Self::capture`] does, and copies nothing.
    pub fn find_changed(&mut self, allocations: &mut [MappedAllocation]) -> Vec<Vec<Range<u64>>> {
        let _relaxed = Relaxed::begin();
        self.hashers.retain(Hasher::is_alive);
        let found = changed::hash(&mut self.hashers, allocations).unwrap_or_else(|error| {
            self.shortcomings.push(format!("cannot tell which device memory has changed: {error}"));
            vec![Vec::new(); allocations.len()]
        });
        let note = |(allocation, hashes): (&mut MappedAllocation, Vec<Hash>)| {
            let known = std::mem::replace(&mut allocation.hashes, hashes);
            changed::between(allocation, &known)
        };
        allocations.iter_mut().zip(found).map(note).collect()
    }

    /// Copies a part of the device memory to the window, which this is instead of a mirror.
    ///
    /// # Errors
    /// A driver call failed, the allocations do not have all of the part, or the window is too small.
    pub fn read(&mut self, allocations: &[MappedAllocation], piece: Piece) -> Result<(), CaptureError> {
        self.copy_pieces(Direction::ToMirror, allocations, &[piece])
    }

    /// Copies parts of the content from the window, which this is instead of a mirror, to the devices.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn write(&mut self, allocations: &[MappedAllocation], pieces: &[Piece]) -> Result<(), CaptureError> {
        self.copy_pieces(Direction::ToDevice, allocations, pieces)
    }

    fn copy_pieces(
        &mut self,
        direction: Direction,
        allocations: &[MappedAllocation],
        pieces: &[Piece],
    ) -> Result<(), CaptureError> {
        let _relaxed = Relaxed::begin();
        let mut copies = Copies::default();
        for &Piece { offset, bytes, at } in pieces {
            if at.checked_add(bytes).is_none_or(|end| end > self.memory.bytes()) {
                let mirror_bytes = self.memory.bytes();
                return Err(CaptureError::BeyondMirror { bytes, offset: at, mirror_bytes });
            }
            let (part, mut copied_bytes) = (offset..offset.saturating_add(bytes), 0);
            for allocation in allocations {
                let place = allocation.place();
                let (start, end) = (part.start.max(place.start), part.end.min(place.end));
                if start >= end {
                    continue;
                }
                let (address, to) = (allocation.address + (start - place.start), at + (start - part.start));
                copies.begin(direction, &self.memory, allocation.context, address, to, end - start)?;
                copied_bytes += end - start;
            }
            if copied_bytes != bytes {
                return Err(CaptureError::NotThere { bytes, offset });
            }
        }
        Ok(copies.finish(&mut self.memory)?)
    }

    /// `None` if copying everything is faster, and there is memory for it.
    fn capture_changed(
        &mut self,
        allocations: &[MappedAllocation],
        known: &[Vec<Hash>],
    ) -> Result<Option<Vec<changed::Found>>, CaptureError> {
        self.hashers.retain(Hasher::is_alive);
        let is_allocated = allocations.iter().all(|one| self.memory.is_allocated(one.place()));
        if (is_allocated || hashing_policy::is_ruled_out())
            && !hashing_policy::should_hash(&mut self.memory, &mut self.hashers, allocations)?
        {
            return Ok(None);
        }
        changed::copy(&mut self.memory, &mut self.hashers, allocations, known).map(Some)
    }

    /// Copies allocations back to the devices, and fills chunks with zeroes where these are all that they had; returns how
    /// many bytes were copied.
    ///
    /// # Errors
    /// A driver call failed, or an allocation does not fit into the mirror.
    pub fn copy_back(&mut self, allocations: &[MappedAllocation]) -> Result<u64, CaptureError> {
        let _relaxed = Relaxed::begin();
        self.check(allocations)?;
        let mut copied_bytes = 0;
        let mut copies = Copies::default();
        for allocation in allocations {
            let context = allocation.context;
            let (used, zeroes) = allocation.used_and_zeroes();
            for part in zeroes {
                copies.begin_zeroes(context, allocation.address + part.start, part.end - part.start)?;
            }
            for part in used {
                let (address, offset) = (allocation.address + part.start, allocation.offset + part.start);
                let bytes = part.end - part.start;
                copies.begin(Direction::ToDevice, &self.memory, context, address, offset, bytes)?;
                copied_bytes += bytes;
            }
        }
        copies.finish(&mut self.memory)?;
        Ok(copied_bytes)
    }

    /// Fills the chunks of allocations with zeroes where these are all that they had.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn fill_zeroes(allocations: &[MappedAllocation]) -> Result<(), CaptureError> {
        let _relaxed = Relaxed::begin();
        let mut copies = Copies::default();
        for allocation in allocations {
            for part in allocation.used_and_zeroes().1 {
                let (address, bytes) = (allocation.address + part.start, part.end - part.start);
                copies.begin_zeroes(allocation.context, address, bytes)?;
            }
        }
        Ok(copies.finish_zeroes()?)
    }

    /// Copies whole allocations to the mirror.
    fn copy(&mut self, allocations: &[MappedAllocation]) -> Result<(), DriverError> {
        let mut copies = Copies::default();
        for allocation in allocations {
            let MappedAllocation { context, address, offset, bytes, .. } = *allocation;
            copies.begin(Direction::ToMirror, &self.memory, context, address, offset, bytes)?;
        }
        copies.finish(&mut self.memory)
    }

    fn check(&self, allocations: &[MappedAllocation]) -> Result<(), CaptureError> {
        let fits = |allocation: &MappedAllocation| {
            allocation.offset.checked_add(allocation.bytes).is_some_and(|end| end <= self.memory.bytes())
        };
        match allocations.iter().find(|allocation| !fits(allocation)) {
            None => Ok(()),
            Some(MappedAllocation { bytes, offset, .. }) => Err(CaptureError::BeyondMirror {
                bytes: *bytes,
                offset: *offset,
                mirror_bytes: self.memory.bytes(),
            }),
        }
    }

    /// Whether the mirror is pinned.
    pub fn is_pinned(&self) -> bool {
        self.memory.is_pinned()
    }

    /// Whether the mirror is pinned or has pinned buffers, so that copies are fast.
    pub fn is_ready(&self) -> bool {
        self.memory.is_pinned() || self.memory.has_buffers()
    }

    /// Its size, in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Releases the driver's resources, before the driver's checkpoint. Copies still work, but are slower.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn unpin(&mut self) -> Result<(), DriverError> {
        let _relaxed = Relaxed::begin();
        self.hashers.clear();
        self.memory.unpin()
    }
}
