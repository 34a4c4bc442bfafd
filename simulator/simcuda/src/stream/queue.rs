//! What waits on a stream, the thread that runs it, and how far it has come.
//!
//! Every piece of work has a ticket, counted from 1 on its stream, and a list of points on other streams that
//! come first. A stream's worker takes its work in the order of tickets, waits for those points, runs it and
//! publishes the ticket. Points name only work that was submitted before, so that waiting cannot go in circles.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cuda_abi::sys::CUresult;
use parking_lot::{Condvar, Mutex};

use super::object::Stream;
use super::work::Task;
use crate::context::Context;
use crate::error::Result;
use crate::process;

/// Polling interval of waiting work for the end of its context.
pub(crate) const CONTEXT_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How far a stream has come.
pub(super) struct Progress {
    done: AtomicU64,
    /// Held while `done` grows, so that a waiter cannot miss it.
    growing: Mutex<()>,
    grown: Condvar,
}

impl Progress {
    fn publish(&self, ticket: u64) {
        let guard = self.growing.lock();
        self.done.store(ticket, Ordering::Release);
        drop(guard);
        self.grown.notify_all();
    }
}

/// A place in a stream's order. It is reached once the stream's work up to it is done.
#[derive(Clone)]
pub(crate) struct Point {
    progress: Arc<Progress>,
    ticket: u64,
}

impl Point {
    pub(super) fn is_reached(&self) -> bool {
        self.progress.done.load(Ordering::Acquire) >= self.ticket
    }

    pub(super) fn wait(&self) {
        self.wait_until(None);
    }

    /// As [`Self::wait`], in the way that the program has chosen for the context.
    pub(super) fn wait_for_program(&self, context: &Context) {
        if context.is_spinning() {
            while !self.is_reached() {
                std::hint::spin_loop();
            }
        }
        self.wait();
    }

    /// Whether the point is reached before the deadline; `None` waits for ever.
    pub(super) fn wait_until(&self, deadline: Option<Instant>) -> bool {
        if self.is_reached() {
            return true;
        }
        let mut guard = self.progress.growing.lock();
        while !self.is_reached() {
            match deadline {
                None => self.progress.grown.wait(&mut guard),
                Some(deadline) => {
                    if self.progress.grown.wait_until(&mut guard, deadline).timed_out() {
                        return self.is_reached();
                    }
                }
            }
        }
        true
    }

    /// As [`Self::wait`], for work of a context: it gives up when the context is destroyed, whatever the work of
    /// another context does.
    fn wait_for(&self, context: &Context) {
        while !context.is_destroyed() && !self.wait_until(Some(Instant::now() + CONTEXT_POLL_INTERVAL)) {}
    }

    /// Whether the point lies on this stream, whose own order keeps it.
    fn is_on(&self, queue: &Queue) -> bool {
        Arc::ptr_eq(&self.progress, &queue.progress)
    }
}

struct Job {
    ticket: u64,
    task: Task,
    after: Vec<Point>,
}

/// The work that waits on one stream.
pub(super) struct Queue {
    progress: Arc<Progress>,
    /// The last ticket. It grows under the context's order only.
    submitted: AtomicU64,
    waiting: Mutex<Waiting>,
    filled: Condvar,
    has_room: Condvar,
}

/// How much work waits on a stream before submissions wait for room, as they do for a GPU's queues. It may be
/// exceeded by as many as submit at once.
pub(super) const DEPTH: usize = 1024;

struct Waiting {
    jobs: VecDeque<Job>,
    has_worker: bool,
    closed: bool,
}

impl Queue {
    pub(super) fn new() -> Self {
        let progress = Progress { done: AtomicU64::new(0), growing: Mutex::new(()), grown: Condvar::new() };
        Self {
            progress: Arc::new(progress),
            submitted: AtomicU64::new(0),
            waiting: Mutex::new(Waiting { jobs: VecDeque::new(), has_worker: false, closed: false }),
            filled: Condvar::new(),
            has_room: Condvar::new(),
        }
    }

    /// The point behind all work so far, unless it is reached already.
    pub(super) fn pending_end(&self) -> Option<Point> {
        let submitted = self.submitted.load(Ordering::Acquire);
        let is_pending = self.progress.done.load(Ordering::Acquire) < submitted;
        is_pending.then(|| Point { progress: Arc::clone(&self.progress), ticket: submitted })
    }

    /// Refuses further work. The worker does what is there and ends; false if there is no worker.
    pub(super) fn close(&self) -> bool {
        let mut waiting = self.waiting.lock();
        waiting.closed = true;
        self.filled.notify_one();
        self.has_room.notify_all();
        waiting.has_worker
    }

    /// Waits until there is room for more work. The caller holds nothing that work could need.
    pub(super) fn wait_for_room(&self) {
        let mut waiting = self.waiting.lock();
        while waiting.jobs.len() >= DEPTH && !waiting.closed {
            self.has_room.wait(&mut waiting);
        }
    }

    /// The next job, or `None` once the queue is closed and empty.
    fn next(&self) -> Option<Job> {
        let mut waiting = self.waiting.lock();
        loop {
            if let Some(job) = waiting.jobs.pop_front() {
                if waiting.jobs.len() + 1 == DEPTH {
                    self.has_room.notify_all();
                }
                return Some(job);
            }
            if waiting.closed {
                return None;
            }
            self.filled.wait(&mut waiting);
        }
    }
}

/// Appends to a stream's queue. The caller holds the order of the stream's context.
///
/// # Errors
/// `CUDA_ERROR_CONTEXT_IS_DESTROYED` if the stream went away meanwhile, `CUDA_ERROR_OPERATING_SYSTEM` if no
/// thread can be had.
pub(super) fn push(stream: &Arc<Stream>, task: Task, mut after: Vec<Point>) -> Result<Point> {
    let queue = &stream.queue;
    after.retain(|point| !point.is_on(queue));
    let mut waiting = queue.waiting.lock();
    if waiting.closed {
        return Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
    }
    if !waiting.has_worker {
        start_worker(Arc::clone(stream))?;
        waiting.has_worker = true;
    }
    let ticket = queue.submitted.load(Ordering::Relaxed) + 1;
    queue.submitted.store(ticket, Ordering::Release);
    waiting.jobs.push_back(Job { ticket, task, after });
    drop(waiting);
    queue.filled.notify_one();
    Ok(Point { progress: Arc::clone(&queue.progress), ticket })
}

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread runs a stream's work; then it must not wait for any.
pub(super) fn is_worker() -> bool {
    IS_WORKER.get()
}

fn start_worker(stream: Arc<Stream>) -> Result {
    let body = move || {
        IS_WORKER.set(true);
        while let Some(job) = stream.queue.next() {
            run(&stream, job);
        }
        stream.context.streams.forget(&stream);
    };
    let builder = std::thread::Builder::new().name("simcuda-stream".into());
    without_signals(|| builder.spawn(body)).map(|_| ()).map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
}

fn run(stream: &Arc<Stream>, job: Job) {
    for point in &job.after {
        point.wait_for(&stream.context);
    }
    if let Some(seed) = process::machine().ok().and_then(|machine| machine.config.jitter) {
        std::thread::sleep(jitter(seed, stream.number, job.ticket));
    }
    // Work that panics makes the context fail like a kernel that crashes; its locks recover or refuse. It
    // releases its resources before it counts as done.
    let result = catch_unwind(AssertUnwindSafe(|| job.task.run(&stream.context)));
    match result {
        Ok(Ok(())) => {}
        Ok(Err(error)) => stream.context.fail(error),
        Err(_) => stream.context.fail(CUresult::CUDA_ERROR_LAUNCH_FAILED),
    }
    stream.queue.progress.publish(job.ticket);
}

/// A delay of less than 2 ms that depends on the arguments only.
fn jitter(seed: u64, stream_number: u64, ticket: u64) -> Duration {
    let mut numbers = fastrand::Rng::with_seed(seed ^ stream_number.rotate_left(40) ^ ticket);
    Duration::from_nanos(numbers.u64(..2_000_000))
}

/// Runs `start` with all signals blocked, which a thread that it starts inherits: a program's signals must
/// not land on a thread of ours.
fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    // SAFETY: a signal set is plain data, for which zero is a value.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    let mut before = all;
    // SAFETY: `all` is a local variable.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: both are local variables.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
    let result = start();
    // SAFETY: `before` was filled in above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    result
}

#[cfg(test)]
mod tests {
    use super::jitter;

    #[test]
    fn jitter_depends_on_every_argument_and_on_nothing_else() {
        let delay = jitter(7, 1, 1);
        assert_eq!(jitter(7, 1, 1), delay);
        for other in [jitter(8, 1, 1), jitter(7, 2, 1), jitter(7, 1, 2)] {
            assert_ne!(other, delay);
        }
        let longest = (0..1000).map(|ticket| jitter(7, 1, ticket)).max().unwrap();
        assert!((1_500_000..2_000_000).contains(&longest.as_nanos()), "{longest:?}");
    }
}
