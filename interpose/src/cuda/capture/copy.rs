//! Copies between devices and the mirror: directly over several streams where it is pinned, else through bounce buffers.

use std::ffi::c_void;
use std::ptr::null_mut;

use cuda_abi::sys;
use cuda_abi::types::{CUcontext, CUdeviceptr, CUstream};

use super::allocation::in_context;
use super::bounce::Part;
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

    pub fn context(&self) -> CUcontext {
        self.context
    }

    /// Begins to copy between device memory and memory of the host. Both have so many bytes, live until the copy is
    /// finished, and are used by nobody else.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn begin(
        &self,
        direction: Direction,
        address: CUdeviceptr,
        host: *mut c_void,
        bytes: usize,
    ) -> Result<(), DriverError> {
        in_context(self.context, || match direction {
            Direction::ToMirror => check("cuMemcpyDtoHAsync", {
                // SAFETY: as the caller promises.
                unsafe { driver::cuMemcpyDtoHAsync_v2(host, address, bytes, self.handle) }
            }),
            Direction::ToDevice => check("cuMemcpyHtoDAsync", {
                // SAFETY: as above.
                unsafe { driver::cuMemcpyHtoDAsync_v2(address, host, bytes, self.handle) }
            }),
        })
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

/// Copies that belong together, of all contexts.
#[derive(Default)]
pub(super) struct Copies {
    contexts: Vec<OfContext>,
}

/// The copies of one context.
struct OfContext {
    context: CUcontext,
    streams: Vec<Stream>,
    next: usize,
    /// What is copied through bounce buffers.
    bounced: Vec<Part>,
}

impl OfContext {
    fn next_stream(&mut self) -> Result<&Stream, DriverError> {
        let number = self.next % STREAMS;
        self.next = self.next.wrapping_add(1);
        if number == self.streams.len() {
            self.streams.push(Stream::new(self.context)?);
        }
        Ok(&self.streams[number])
    }
}

impl Copies {
    fn of(&mut self, context: CUcontext) -> &mut OfContext {
        let index = match self.contexts.iter().position(|one| one.context == context) {
            Some(index) => index,
            None => {
                self.contexts.push(OfContext { context, streams: Vec::new(), next: 0, bounced: Vec::new() });
                self.contexts.len() - 1
            }
        };
        &mut self.contexts[index]
    }

    /// Begins to copy `bytes` bytes between device memory and an offset of the mirror, which has them. What is copied through
    /// bounce buffers is only noted: [`Self::finish`] copies it.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn begin(
        &mut self,
        direction: Direction,
        memory: &Memory,
        context: CUcontext,
        mut address: CUdeviceptr,
        mut offset: u64,
        mut bytes: u64,
    ) -> Result<(), DriverError> {
        let copies = self.of(context);
        while bytes > 0 {
            let (end, bounces) = memory.next_copy(offset);
            let most = if bounces { Part::MOST_BYTES } else { MOST_BYTES };
            let part = bytes.min(most).min(end.saturating_sub(offset).max(1));
            let host = memory.at(offset);
            if bounces {
                let (host, bytes) = (host.cast(), part as usize);
                copies.bounced.push(Part { direction, context, address, host, bytes });
            } else {
                copies.next_stream()?.begin(direction, address, host, part as usize)?;
            }
            (address, offset, bytes) = (address + part, offset + part, bytes - part);
        }
        Ok(())
    }

    /// Makes the streams of a context, so that no copy has to wait for that.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn prepare(&mut self, context: CUcontext) -> Result<(), DriverError> {
        (0..STREAMS).try_for_each(|_| self.of(context).next_stream().map(drop))
    }

    /// Begins to fill device memory with zeroes.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn begin_zeroes(
        &mut self,
        context: CUcontext,
        address: CUdeviceptr,
        bytes: u64,
    ) -> Result<(), DriverError> {
        let stream = self.of(context).next_stream()?;
        in_context(context, || {
            // SAFETY: the device memory is the caller's to write.
            let result = unsafe { driver::cuMemsetD8Async(address, 0, bytes as usize, stream.handle) };
            check("cuMemsetD8Async", result)
        })
    }

    /// Waits until everything is copied that was begun, to or from `memory`.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn finish(mut self, memory: &mut Memory) -> Result<(), DriverError> {
        let noted: Vec<_> = self.contexts.iter_mut().map(|one| std::mem::take(&mut one.bounced)).collect();
        let parts = by_turns(noted);
        match memory.buffers() {
            Some(buffers) => buffers.copy(&parts)?,
            // They were unpinned meanwhile.
            None => parts.into_iter().try_for_each(|Part { direction, context, address, host, bytes }| {
                self.of(context).next_stream()?.begin(direction, address, host.cast(), bytes)
            })?,
        }
        self.wait()
    }

    /// Waits until device memory is filled, where nothing but that was begun.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn finish_zeroes(self) -> Result<(), DriverError> {
        self.wait()
    }

    fn wait(&self) -> Result<(), DriverError> {
        self.contexts.iter().flat_map(|one| &one.streams).try_for_each(Stream::finish)
    }
}

/// All parts, those of different devices by turns: these copy at the same time.
fn by_turns(noted: Vec<Vec<Part>>) -> Vec<Part> {
    let longest = noted.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest).flat_map(|turn| noted.iter().filter_map(move |of_one| of_one.get(turn).copied())).collect()
}
