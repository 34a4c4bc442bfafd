//! An allocation that is captured, and work in its context.

use std::ops::Range;

use cuda_abi::types::{CUcontext, CUdeviceptr};

use super::hash::{CHUNK_BYTES, hash_of_zeroes};
use super::ranges::{joined, without};
use crate::cuda::context;
use crate::cuda::driver::DriverError;

/// The hash of a chunk.
pub(crate) type Hash = [u64; 2];

/// Device memory that is to be captured or brought back.
pub(crate) struct MappedAllocation {
    /// Of the device that has it.
    pub context: CUcontext,
    /// Where it is mapped: to be read there, and to be written if it is brought back.
    pub address: CUdeviceptr,
    pub bytes: u64,
    /// Where its place in the mirror begins, in bytes.
    pub offset: u64,
    /// A hash of each of its chunks in the mirror; empty if they are not known.
    pub hashes: Vec<Hash>,
}

impl MappedAllocation {
    /// Its place in the mirror.
    pub(super) fn place(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.bytes)
    }

    /// Those of its chunks that hold anything but zeroes, and the others, from its beginning. All count as used if they
    /// have no hashes.
    pub(super) fn used_and_zeroes(&self) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
        let used = used_chunks(self.bytes, &self.hashes);
        let zeroes = without(&[0..self.bytes], &used);
        (used, zeroes)
    }
}

/// The chunks of an allocation that need memory in the mirror: those that are not known to hold zeroes only. `hashes` has
/// one for each chunk, or none.
pub(crate) fn used_chunks(bytes: u64, hashes: &[Hash]) -> Vec<Range<u64>> {
    if hashes.len() as u64 * CHUNK_BYTES != bytes {
        return vec![0..bytes];
    }
    let zeroes = hash_of_zeroes();
    let starts = (0..).step_by(CHUNK_BYTES as usize);
    let used = starts.zip(hashes).filter(|(_, hash)| **hash != zeroes);
    joined(used.map(|(start, _)| start..start + CHUNK_BYTES).collect())
}

/// Runs `work` in a context, on any thread.
pub(super) fn in_context<T, E: From<DriverError>>(
    context: CUcontext,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let failed = |result| Err(DriverError::new("cuCtxPushCurrent", result).into());
    context::within(context, work).unwrap_or_else(failed)
}
