//! Copies between devices and memory that is not pinned, by threads: each has two pinned buffers, of which one is copied
//! from or to a device while the other is emptied or filled.
//!
//! A mirror that is pinned has to be unpinned while the job is paused. On an H200 that takes 16 ms for each GiB, by one
//! thread or by several, and waits for copies that are under way. Twelve threads copy at 47 GB/s in this way, a device to
//! pinned memory at 55 GB/s: for 50 GB this is faster by more than half a second (docs/measurements.md).

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

use ckpt_protocol::agent::COPY_BUFFERS_BYTES;
use cuda_abi::types::{CUcontext, CUdeviceptr};
use memmap2::{Advice, MmapOptions, MmapRaw};

use super::copy::{Direction, Stream};
use super::error::CaptureError;
use super::pinning;
use crate::cuda::context;
use crate::cuda::driver::DriverError;
use crate::cuda::stream_capture::Relaxed;
use crate::fork;

/// As much as the agent's thread has: the driver's own code runs on it.
const STACK_BYTES: usize = 2 << 20;
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
    /// The context in which they are pinned.
    context: CUcontext,
    /// By thread.
    workers: Vec<Worker>,
    /// How many of the threads copy.
    threads: usize,
    /// [`context::removals`] before the streams were made.
    removals: u64,
}

impl BounceBuffers {
    /// Pins buffers for so many threads, for the devices of all contexts, with streams in each of them.
    ///
    /// # Errors
    /// What the system or the driver says.
    pub fn new(threads: NonZeroUsize, contexts: &[CUcontext]) -> Result<Self, CaptureError> {
        let removals = context::removals();
        let bytes = threads.get() * BUFFERS * BUFFER_BYTES;
        let mapped = fork::while_none(|| {
            let map = MmapRaw::from(MmapOptions::new().len(bytes).map_anon()?);
            map.advise(Advice::DontFork)?;
            Ok(map)
        });
        let map = mapped.map_err(CaptureError::MapBuffers)?;
        let start = map.as_mut_ptr();
        let worker = |thread| Worker::new(start.wrapping_add(thread * BUFFERS * BUFFER_BYTES), contexts);
        let workers = (0..threads.get()).map(worker).collect::<Result<_, _>>()?;
        let context = pinning::pin(start.cast(), bytes, contexts)?;
        Ok(Self { map, context, workers, threads: threads.get(), removals })
    }

    /// Has so many threads copy, or as many as there are buffers for.
    pub fn set_threads(&mut self, threads: NonZeroUsize) {
        self.threads = threads.get().min(self.workers.len());
    }

    /// Makes copies, and waits for them. The calling thread makes some of them, and all if there cannot be more threads.
    ///
    /// # Errors
    /// A driver call failed. Nothing is under way then.
    pub fn copy(&mut self, parts: &[Part]) -> Result<(), DriverError> {
        self.forget_removed();
        let queue = Queue { parts, next: AtomicUsize::new(0) };
        let threads = self.threads.min(parts.len());
        std::thread::scope(|scope| {
            let mut workers = self.workers.iter_mut().take(threads);
            let own = workers.next();
            let queue = &queue;
            let others: Vec<_> = workers
                .map_while(|worker| {
                    // With a size: without one, the standard library reads the environment.
                    let thread = std::thread::Builder::new().name("ckpt-copy".into()).stack_size(STACK_BYTES);
                    thread.spawn_scoped(scope, move || worker.work(queue)).ok()
                })
                .collect();
            let own = own.map_or(Ok(()), |worker| worker.work(queue));
            let ends = others.into_iter().map(|other| match other.join() {
                Ok(end) => end,
                Err(panicked) => std::panic::resume_unwind(panicked),
            });
            ends.fold(own, Result::and)
        })
    }

    /// The streams of a context that was destroyed or reset are gone with it, and must not be used.
    fn forget_removed(&mut self) {
        let removals = context::removals();
        if self.removals != removals {
            self.workers.iter_mut().for_each(Worker::forget_streams);
            self.removals = removals;
        }
    }

    /// Unpins the buffers. They are not used any more.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn unpin(&mut self) -> Result<(), DriverError> {
        self.forget_removed();
        self.workers.clear();
        pinning::unpin(self.map.as_mut_ptr().cast(), self.context)
    }
}

/// The copies that have to be made.
struct Queue<'a> {
    parts: &'a [Part],
    /// The number of the first part that no thread has taken.
    next: AtomicUsize,
}

impl Queue<'_> {
    fn take(&self) -> Option<Part> {
        self.parts.get(self.next.fetch_add(1, Ordering::Relaxed)).copied()
    }

    /// The threads end.
    fn stop(&self) {
        self.next.store(self.parts.len(), Ordering::Relaxed);
    }
}

/// What one thread copies with.
struct Worker {
    buffers: [Buffer; BUFFERS],
}

impl Worker {
    fn new(start: *mut u8, contexts: &[CUcontext]) -> Result<Self, DriverError> {
        let buffer = |number: usize| Buffer::new(start.wrapping_add(number * BUFFER_BYTES), contexts);
        Ok(Self { buffers: [buffer(0)?, buffer(1)?] })
    }

    fn forget_streams(&mut self) {
        self.buffers.iter_mut().for_each(|buffer| std::mem::forget(std::mem::take(&mut buffer.streams)));
    }

    fn work(&mut self, queue: &Queue<'_>) -> Result<(), DriverError> {
        let _relaxed = Relaxed::begin();
        self.copy(queue).inspect_err(|_| {
            queue.stop();
            self.buffers.iter_mut().for_each(Buffer::abandon);
        })
    }

    fn copy(&mut self, queue: &Queue<'_>) -> Result<(), DriverError> {
        while let Some(part) = queue.take() {
            let [buffer, _] = &mut self.buffers;
            buffer.finish()?;
            buffer.begin(part)?;
            self.buffers.reverse();
        }
        self.buffers.iter_mut().try_for_each(Buffer::finish)
    }
}

struct Buffer {
    start: *mut u8,
    /// One for each context. Dropping it waits for what is under way.
    streams: Vec<Stream>,
    /// The copy that was begun last, and the number of its stream.
    under_way: Option<(Part, usize)>,
}

// SAFETY: the memory is only this buffer's, and any thread may use streams.
unsafe impl Send for Buffer {}

impl Buffer {
    fn new(start: *mut u8, contexts: &[CUcontext]) -> Result<Self, DriverError> {
        let streams = contexts.iter().map(|context| Stream::new(*context)).collect::<Result<_, _>>()?;
        Ok(Self { start, streams, under_way: None })
    }

    /// The buffer must not be in use.
    fn begin(&mut self, part: Part) -> Result<(), DriverError> {
        let known = self.streams.iter().position(|stream| stream.context() == part.context);
        let number = match known {
            Some(number) => number,
            // A context that came to be after the buffers.
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

    /// Waits for what is under way, and drops what it has copied.
    fn abandon(&mut self) {
        self.under_way = None;
        let _ = self.streams.iter().try_for_each(Stream::finish);
    }
}
