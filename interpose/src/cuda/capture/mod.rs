//! Copies device memory to the mirror and back.
//!
//! | module | does |
//! |---|---|
//! | `allocation` | an allocation to copy, and work in its context |
//! | `error` | why that fails |
//! | `mirror` | the launcher's memory, mapped and pinned |
//! | `copy` | copies, over several streams |
//! | `hash` | a hash of each chunk, computed on the device |
//! | `changed` | finds and copies the chunks that have changed |
//! | `hashing_policy` | whether hashing is faster than copying |
//! | `written` | the ranges of the mirror that a capture has written |
//!
//! Nothing here allocates device memory. All calls are made with the calling thread's capture mode relaxed, so that
//! no stream capture is disturbed while the program runs.

mod allocation;
mod changed;
mod copy;
mod error;
mod hash;
mod hashing_policy;
mod mirror;
#[cfg(test)]
mod tests;
mod written;

use std::ops::Range;
use std::os::fd::OwnedFd;

use cuda_abi::types::CUcontext;

use super::driver::DriverError;
use super::stream_capture::Relaxed;
use crate::link::describe;
use allocation::Hash;
pub(crate) use allocation::MappedAllocation;
use copy::{Copies, Direction};
pub use error::CaptureError;
use hash::Hasher;
pub(crate) use hash::forget;
pub(crate) use hashing_policy::activate;
use mirror::Memory;
pub(crate) use written::joined;

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
    /// Maps the launcher's file and pins it for the devices of the contexts. A mirror that cannot be pinned is used
    /// unpinned.
    ///
    /// # Errors
    /// Why it cannot be mapped.
    pub fn map(file: OwnedFd, bytes: u64, contexts: &[CUcontext]) -> Result<Self, CaptureError> {
        let _relaxed = Relaxed::begin();
        let mut memory = Memory::map(file, bytes)?;
        let not_pinned = memory.pin(contexts).err();
        let shortcomings = not_pinned.map(|error| format!("the mirror is not pinned: {}", describe(&error)));
        Ok(Self { memory, hashers: Vec::new(), shortcomings: shortcomings.into_iter().collect() })
    }

    /// As [`Self::map`], and prepares what a capture needs, while the program runs.
    ///
    /// # Errors
    /// Why it cannot be mapped.
    pub fn stage(file: OwnedFd, bytes: u64, contexts: &[CUcontext]) -> Result<Self, CaptureError> {
        let mut mirror = Self::map(file, bytes, contexts)?;
        mirror.get_ready(contexts);
        Ok(mirror)
    }

    /// Prepares again what an earlier attempt has released.
    pub fn get_ready(&mut self, contexts: &[CUcontext]) {
        let _relaxed = Relaxed::begin();
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
            Err(error) => {
                self.shortcomings.push(format!("cannot tell which device memory has changed: {error}"));
            }
        }
        self.copy(Direction::ToMirror, allocations)?;
        Ok(allocations.iter().map(|allocation| vec![allocation.place()]).collect())
    }

    /// `None` if copying everything is faster.
    fn capture_changed(
        &mut self,
        allocations: &[MappedAllocation],
        known: &[Vec<Hash>],
    ) -> Result<Option<Vec<changed::Found>>, DriverError> {
        self.hashers.retain(Hasher::is_alive);
        if !hashing_policy::should_hash(&self.memory, &mut self.hashers, allocations)? {
            return Ok(None);
        }
        changed::copy(&self.memory, &mut self.hashers, allocations, known).map(Some)
    }

    /// Copies allocations back to the devices.
    ///
    /// # Errors
    /// A driver call failed, or an allocation does not fit into the mirror.
    pub fn copy_back(&mut self, allocations: &[MappedAllocation]) -> Result<(), CaptureError> {
        let _relaxed = Relaxed::begin();
        self.check(allocations)?;
        Ok(self.copy(Direction::ToDevice, allocations)?)
    }

    /// Copies whole allocations.
    fn copy(&self, direction: Direction, allocations: &[MappedAllocation]) -> Result<(), DriverError> {
        let mut copies = Vec::new();
        for allocation in allocations {
            let copies = Copies::of(&mut copies, allocation.context)?;
            copies.begin(direction, &self.memory, allocation.address, allocation.offset, allocation.bytes)?;
        }
        copies.iter().try_for_each(Copies::finish)
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

    /// Whether the mirror is pinned, so that copies are fast.
    pub fn is_pinned(&self) -> bool {
        self.memory.is_pinned()
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
