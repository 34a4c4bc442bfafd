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
pub(crate) use hashing_policy::activate;
use mirror::Memory;
pub(crate) use written::joined;

/// A process's mirror, mapped. The child of a fork has it not: there, it may not even be dropped.
pub(crate) struct Mirror {
    memory: Memory,
    hashers: Vec<Hasher>,
    shortcomings: Vec<String>,
}

// SAFETY: what it points to is memory of its own, and handles of the driver, which any thread may use.
unsafe impl Send for Mirror {}

impl Mirror {
    /// Maps the launcher's file and pins it for the devices of the contexts. One that cannot be pinned is used as it
    /// is.
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

    /// As [`Self::map`], and gets everything ready that a capture needs, while the program runs.
    ///
    /// # Errors
    /// Why it cannot be mapped.
    pub fn stage(file: OwnedFd, bytes: u64, contexts: &[CUcontext]) -> Result<Self, CaptureError> {
        let mut mirror = Self::map(file, bytes, contexts)?;
        mirror.get_ready(contexts);
        Ok(mirror)
    }

    /// Gets ready again what an attempt has given up.
    pub fn get_ready(&mut self, contexts: &[CUcontext]) {
        let _relaxed = Relaxed::begin();
        self.hashers.retain(Hasher::is_alive);
        for context in contexts {
            if hashing_policy::is_ruled_out()
                || self.hashers.iter().any(|hasher| hasher.context() == *context)
            {
                continue;
            }
            match Hasher::new(*context) {
                Ok(hasher) => self.hashers.push(hasher),
                Err(error) => self.shortcomings.push(format!("what has changed is not known: {error}")),
            }
        }
    }

    /// What is slower than it could be and why, for people who look for the reason.
    pub fn shortcomings(&self) -> &[String] {
        &self.shortcomings
    }

    /// Copies what has changed to the mirror, and notes each allocation's hashes; says of each where in the mirror it
    /// was copied to. Nothing may run on the devices meanwhile. Allocations that were copied without being hashed
    /// have no hashes then, nor has any after an error: the mirror may have anything of them.
    ///
    /// # Errors
    /// The driver's, and a allocation that the mirror has no place for.
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
            // What cannot be hashed can still be copied.
            Err(error) => {
                self.shortcomings.push(format!("cannot tell which device memory has changed: {error}"));
            }
        }
        self.copy(Direction::ToMirror, allocations)?;
        Ok(allocations.iter().map(|allocation| vec![allocation.place()]).collect())
    }

    /// `None` if it is not worth the while.
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
    /// The driver's, and a allocation that the mirror has no place for.
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

    /// Whether copies go as fast as they can.
    pub fn is_pinned(&self) -> bool {
        self.memory.is_pinned()
    }

    /// Its size, in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Has nothing to do with the driver any more; copies still work, more slowly. Before the driver's checkpoint.
    ///
    /// # Errors
    /// The driver's.
    pub fn unpin(&mut self) -> Result<(), DriverError> {
        let _relaxed = Relaxed::begin();
        self.hashers.clear();
        self.memory.unpin()
    }
}

/// To be called before a context goes (destroyed, or reset if it is a primary one): nothing of ours in it is used
/// again, nor taken for that of another context that comes to have its place.
pub(crate) fn forget(context: CUcontext) {
    hash::forget(context);
}
