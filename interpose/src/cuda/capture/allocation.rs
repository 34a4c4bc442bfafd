//! An allocation that is captured, and work in its context.

use std::ops::Range;

use cuda_abi::types::{CUcontext, CUdeviceptr};

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
}

/// Runs `work` in a context, on any thread.
pub(super) fn in_context<T, E: From<DriverError>>(
    context: CUcontext,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let failed = |result| Err(DriverError::new("cuCtxPushCurrent", result).into());
    context::within(context, work).unwrap_or_else(failed)
}
