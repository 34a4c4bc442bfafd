//! Copies between devices and memory that is not pinned, by threads: each has two pinned buffers, of which one is copied
//! from or to a device while the other is emptied or filled.
//!
//! A mirror that is pinned has to be unpinned while the job is paused. On an H200 that takes 16 ms for each GiB, by one
//! thread or by several, and waits for copies that are under way. Eight threads copy at 44 GB/s in this way, a device to
//! pinned memory at 55 GB/s: for 50 GB this is faster by more than half a second (docs/measurements.md).

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

use ckpt_protocol::agent::COPY_BUFFERS_BYTES;
use cuda_abi::types::{CUcontext, CUdeviceptr};
use memmap2::{Advice, MmapOptions, MmapRaw};

use super::copy::{Direction, Stream};
use super::error::CaptureError;
use super::pinning;
use crate::cuda::driver::DriverError;
use crate::cuda::stream_capture::Relaxed;
use crate::fork;

/// A thread's buffers.
const BUFFERS: usize = 2;
/// The size of one.
const BUFFER_BYTES: usize = COPY_BUFFERS_BYTES as usize / BUFFERS;

/// A copy between device memory and a place of the mirror.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub direction: Direction,
    pub context: CUcontext,
    pub address: CUdeviceptr,
    pub host: *mut u8,
    /// At most [`Part::MOST_BYTES`].
    pub bytes: usize,
}

// SAFETY: a handle and an address that any thread may use; each part is given to one thread.
unsafe impl Send for Part {}
// SAFETY: as above.
unsafe impl Sync for Part {}

impl Part {
    /// The largest that there may be, in bytes.
    pub const MOST_BYTES: u64 = BUFFER_BYTES as u64;
}

/// The pinned buffers of all threads.
pub(super) struct BounceBuffers {
    map: MmapRaw,
    threads: usize,
    /// The context in which they are pinned.
    context: CUcontext,
}

impl BounceBuffers {
    /// Pins buffers for so many threads, for the devices of all contexts.
    ///
    /// # Errors
    /// What the system says, or why no context can pin them.
    pub fn new(threads: NonZeroUsize, contexts: &[CUcontext]) -> Result<Self, CaptureError> {
        let bytes = threads.get() * BUFFERS * BUFFER_BYTES;
        let mapped = fork::while_none(|| {
            let map = MmapRaw::from(MmapOptions::new().len(bytes).map_anon()?);
            map.advise(Advice::DontFork)?;
            Ok(map)
        });
        let map = mapped.map_err(CaptureError::MapBuffers)?;
        let context = pinning::pin(map.as_mut_ptr().cast(), bytes, contexts)?;
        Ok(Self { map, threads: threads.get(), context })
    }

    /// Makes copies, and waits for them. The calling thread makes some of them, and all if there cannot be more threads.
    ///
    /// # Errors
    /// A driver call failed. Nothing is under way then.
    pub fn copy(&mut self, parts: &[Part]) -> Result<(), DriverError> {
        let next = AtomicUsize::new(0);
        let start = self.map.as_mut_ptr();
        let worker = |thread| Worker::new(start.wrapping_add(thread * BUFFERS * BUFFER_BYTES), parts, &next);
        let threads = self.threads.min(parts.len());
        std::thread::scope(|scope| {
            let begin = |thread| {
                let worker = worker(thread);
                let named = std::thread::Builder::new().name("ckpt-copy".into());
                named.spawn_scoped(scope, move || worker.work())
            };
            let others: Vec<_> = (1..threads).map_while(|thread| begin(thread).ok()).collect();
            let own = worker(0).work();
            let ends = others.into_iter().map(|other| match other.join() {
                Ok(end) => end,
                Err(panicked) => std::panic::resume_unwind(panicked),
            });
            ends.fold(own, Result::and)
        })
    }

    /// Unpins the buffers. They are not used any more.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn unpin(&mut self) -> Result<(), DriverError> {
        pinning::unpin(self.map.as_mut_ptr().cast(), self.context)
    }
}

/// What one thread copies with.
struct Worker<'a> {
    buffers: [Buffer; BUFFERS],
    parts: &'a [Part],
    /// The number of the first part that no thread has taken.
    next: &'a AtomicUsize,
}

impl<'a> Worker<'a> {
    fn new(start: *mut u8, parts: &'a [Part], next: &'a AtomicUsize) -> Self {
        let buffers = [0, 1].map(|number| Buffer::new(start.wrapping_add(number * BUFFER_BYTES)));
        Self { buffers, parts, next }
    }

    fn work(mut self) -> Result<(), DriverError> {
        let _relaxed = Relaxed::begin();
        let done = self.copy();
        if done.is_err() {
            // The other threads end too.
            self.next.store(self.parts.len(), Ordering::Relaxed);
        }
        done
    }

    fn copy(&mut self) -> Result<(), DriverError> {
        while let Some(part) = self.parts.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            let [buffer, _] = &mut self.buffers;
            buffer.finish()?;
            buffer.begin(*part)?;
            self.buffers.reverse();
        }
        self.buffers.iter_mut().try_for_each(Buffer::finish)
    }
}

struct Buffer {
    start: *mut u8,
    /// One for each context that it was used in. Dropping it waits for what is under way.
    streams: Vec<Stream>,
    /// The copy that was begun last, and the number of its stream.
    under_way: Option<(Part, usize)>,
}

// SAFETY: the memory is only this buffer's, and any thread may use streams.
unsafe impl Send for Buffer {}

impl Buffer {
    fn new(start: *mut u8) -> Self {
        Self { start, streams: Vec::new(), under_way: None }
    }

    /// The buffer must not be in use.
    fn begin(&mut self, part: Part) -> Result<(), DriverError> {
        let known = self.streams.iter().position(|stream| stream.context() == part.context);
        let number = match known {
            Some(number) => number,
            None => {
                self.streams.push(Stream::new(part.context)?);
                self.streams.len() - 1
            }
        };
        if part.direction == Direction::ToDevice {
            // SAFETY: both are mapped; the buffer is not in use, and nobody writes to the mirror.
            unsafe { std::ptr::copy_nonoverlapping(part.host, self.start, part.bytes) };
        }
        self.streams[number].begin(part.direction, part.address, self.start.cast(), part.bytes)?;
        self.under_way = Some((part, number));
        Ok(())
    }

    /// Waits until it is not in use.
    fn finish(&mut self) -> Result<(), DriverError> {
        let Some((part, number)) = self.under_way.take() else { return Ok(()) };
        self.streams[number].finish()?;
        if part.direction == Direction::ToMirror {
            // SAFETY: both are mapped; the buffer is not in use, and no other thread has this part of the mirror.
            unsafe { std::ptr::copy_nonoverlapping(self.start, part.host, part.bytes) };
        }
        Ok(())
    }
}
