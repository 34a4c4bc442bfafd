//! Copies between a device and the mirror, over several streams.

use std::ptr::null_mut;

use cuda_abi::sys;
use cuda_abi::types::{CUcontext, CUdeviceptr, CUstream};

use super::allocation::in_context;
use super::mirror::Memory;
use crate::cuda::driver::{self, DriverError, check};

/// Enough to keep a copy engine busy: while one copy ends, the other runs.
const STREAMS: usize = 2;
/// A longer copy is dealt out to the streams in parts.
const MOST_BYTES: u64 = 64 << 20;

/// Which direction to copy.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    ToMirror,
    ToDevice,
}

/// A stream of ours. What was begun on it is over before it is dropped.
pub(super) struct Stream {
    context: CUcontext,
    pub handle: CUstream,
}

impl Stream {
    /// # Errors
    /// A driver call failed.
    pub fn new(context: CUcontext) -> Result<Self, DriverError> {
        let mut handle: CUstream = null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        in_context(context, || {
            // SAFETY: `handle` is a local variable.
            check("cuStreamCreate", unsafe { driver::cuStreamCreate(&raw mut handle, flags) })
        })?;
        Ok(Self { context, handle })
    }

    #[cfg(test)]
    pub fn context(&self) -> CUcontext {
        self.context
    }

    /// Waits until everything is done that was begun.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn finish(&self) -> Result<(), DriverError> {
        in_context(self.context, || {
            // SAFETY: the stream is ours.
            check("cuStreamSynchronize", unsafe { driver::cuStreamSynchronize(self.handle) })
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // After an error, copies that were begun before still use memory that its owner is about to give away.
        let _ = self.finish();
        let _ = in_context(self.context, || {
            // SAFETY: the stream is ours, and no longer used.
            check("cuStreamDestroy", unsafe { driver::cuStreamDestroy_v2(self.handle) })
        });
    }
}

/// Copies of one context.
pub(super) struct Copies {
    context: CUcontext,
    streams: Vec<Stream>,
    next: usize,
}

impl Copies {
    /// # Errors
    /// A driver call failed.
    pub fn new(context: CUcontext) -> Result<Self, DriverError> {
        let streams = (0..STREAMS).map(|_| Stream::new(context)).collect::<Result<_, _>>()?;
        Ok(Self { context, streams, next: 0 })
    }

    /// Those of a context, among those that there are.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn of(all: &mut Vec<Self>, context: CUcontext) -> Result<&mut Self, DriverError> {
        let index = match all.iter().position(|copies| copies.context == context) {
            Some(index) => index,
            None => {
                all.push(Self::new(context)?);
                all.len() - 1
            }
        };
        Ok(&mut all[index])
    }

    /// Begins to copy `bytes` bytes between device memory and an offset of the mirror, which has them.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn begin(
        &mut self,
        direction: Direction,
        memory: &Memory,
        mut address: CUdeviceptr,
        mut offset: u64,
        mut bytes: u64,
    ) -> Result<(), DriverError> {
        in_context(self.context, || {
            while bytes > 0 {
                let part = bytes.min(MOST_BYTES).min(memory.copy_end(offset).saturating_sub(offset).max(1));
                self.begin_part(direction, memory, address, offset, part)?;
                (address, offset, bytes) = (address + part, offset + part, bytes - part);
            }
            Ok(())
        })
    }

    fn begin_part(
        &mut self,
        direction: Direction,
        memory: &Memory,
        address: CUdeviceptr,
        offset: u64,
        bytes: u64,
    ) -> Result<(), DriverError> {
        let Some(stream) = self.streams.get(self.next % STREAMS) else { return Ok(()) };
        self.next = self.next.wrapping_add(1);
        let (host, count) = (memory.at(offset), bytes as usize);
        match direction {
            Direction::ToMirror => check("cuMemcpyDtoHAsync", {
                // SAFETY: the mirror has that many bytes there and lives until the stream is done; nobody else
                // uses them.
                unsafe { driver::cuMemcpyDtoHAsync_v2(host, address, count, stream.handle) }
            }),
            Direction::ToDevice => check("cuMemcpyHtoDAsync", {
                // SAFETY: as above; the device memory is the caller's to write.
                unsafe { driver::cuMemcpyHtoDAsync_v2(address, host, count, stream.handle) }
            }),
        }
    }

    /// Begins to fill device memory with zeroes.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn begin_zeroes(&mut self, address: CUdeviceptr, bytes: u64) -> Result<(), DriverError> {
        let Some(stream) = self.streams.get(self.next % STREAMS) else { return Ok(()) };
        self.next = self.next.wrapping_add(1);
        in_context(self.context, || {
            // SAFETY: the device memory is the caller's to write.
            let result = unsafe { driver::cuMemsetD8Async(address, 0, bytes as usize, stream.handle) };
            check("cuMemsetD8Async", result)
        })
    }

    /// Waits until everything is copied that was begun.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn finish(&self) -> Result<(), DriverError> {
        self.streams.iter().try_for_each(Stream::finish)
    }
}
