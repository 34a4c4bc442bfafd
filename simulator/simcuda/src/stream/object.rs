//! Streams, the default ones included, and what orders work between the streams of a context.
//!
//! The rules of the legacy default stream (CUDA programming guide, "Default Stream") are dependencies that are
//! decided when work is submitted, under one lock of the context: work on the legacy stream comes after all
//! earlier work on the context's blocking streams, and before all later work on them.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use cuda_abi::sys::CUresult;
use cuda_abi::types::CUstream;
use parking_lot::Mutex;

use super::attributes::Attributes;
use super::capture;
use super::queue::{self, Point, Queue};
use super::work::Task;
use crate::context::{self, Context};
use crate::error::Result;
use crate::handle::Table;
use crate::{entry, process};

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`, handles that every context knows (`cuda.h`).
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// How a stream synchronises with the legacy default stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StreamKind {
    Legacy,
    Blocking,
    NonBlocking,
}

pub(crate) struct Stream {
    /// 0 for default streams and the context's own, which programs do not name by a handle of their own.
    pub(super) handle: usize,
    /// Never the same twice (cuStreamGetId).
    pub(super) id: u64,
    /// Counted within the context; 0 is the legacy stream.
    pub(super) number: u64,
    pub(super) kind: StreamKind,
    pub(super) priority: AtomicI32,
    pub(super) context: Arc<Context>,
    pub(super) queue: Queue,
    /// The capture that the stream takes part in, or 0. It changes under the lock of all captures only.
    pub(super) capture: AtomicU64,
    pub(super) attributes: Mutex<Attributes>,
}

static STREAMS: Table<Stream> = Table::new();
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Stream {
    fn new(context: &Arc<Context>, handle: usize, number: u64, kind: StreamKind, priority: i32) -> Self {
        Self {
            handle,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            number,
            kind,
            priority: AtomicI32::new(priority),
            context: Arc::clone(context),
            queue: Queue::new(),
            capture: AtomicU64::new(0),
            attributes: Mutex::new(Attributes::default()),
        }
    }

    /// What has to be done before the stream counts as idle: its own work, and for the legacy stream the work
    /// that any piece of work on it would wait for.
    pub(super) fn pending(&self) -> Vec<Point> {
        let order = self.context.streams.order.lock();
        let mut points: Vec<_> = self.queue.pending_end().into_iter().collect();
        if self.kind == StreamKind::Legacy {
            points.extend(order.pending_on(|stream| stream.kind == StreamKind::Blocking));
        }
        points
    }

    /// Takes no more work. What is queued is still done.
    pub(super) fn close(&self) {
        if !self.queue.close() {
            self.context.streams.forget(self);
        }
    }
}

/// A context's streams and what orders work between them.
pub(crate) struct PerContext {
    order: Mutex<Order>,
    /// Handles of the context's events, which go with it.
    pub(super) events: Mutex<HashSet<usize>>,
}

struct Order {
    /// Every stream that takes work or still has some, by number.
    streams: BTreeMap<u64, Arc<Stream>>,
    legacy: Option<Arc<Stream>>,
    /// Runs what belongs to the context rather than to one of its streams.
    own: Option<Arc<Stream>>,
    next_number: u64,
    /// What all work on any stream has to wait for (cuCtxWaitEvent).
    gates: Vec<Point>,
    closed: bool,
}

impl Order {
    fn pending_on(&self, which: impl Fn(&Stream) -> bool) -> impl Iterator<Item = Point> {
        self.streams
            .values()
            .filter(move |stream| which(stream))
            .filter_map(|stream| stream.queue.pending_end())
    }

    fn add(
        &mut self,
        context: &Arc<Context>,
        handle: usize,
        kind: StreamKind,
        priority: i32,
    ) -> Result<Arc<Stream>> {
        if self.closed {
            return Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
        }
        let number = if kind == StreamKind::Legacy { 0 } else { self.next_number };
        self.next_number += u64::from(kind != StreamKind::Legacy);
        let stream = Arc::new(Stream::new(context, handle, number, kind, priority));
        self.streams.insert(number, Arc::clone(&stream));
        Ok(stream)
    }
}

impl PerContext {
    pub(crate) fn new() -> Self {
        let order = Order {
            streams: BTreeMap::new(),
            legacy: None,
            own: None,
            next_number: 1,
            gates: Vec::new(),
            closed: false,
        };
        Self { order: Mutex::new(order), events: Mutex::new(HashSet::new()) }
    }

    /// The last work of the stream is done, and it takes no more.
    pub(super) fn forget(&self, stream: &Stream) {
        self.order.lock().streams.remove(&stream.number);
    }

    /// All work of the context that is not done.
    pub(super) fn pending(&self) -> Vec<Point> {
        self.order.lock().pending_on(|_| true).collect()
    }

    /// Makes all later work of the context wait for the point.
    pub(super) fn gate(&self, point: Point) {
        self.order.lock().gates.push(point);
    }

    /// Takes no more work on any stream.
    pub(super) fn close(&self) {
        let mut order = self.order.lock();
        order.closed = true;
        order.legacy = None;
        order.own = None;
        let streams: Vec<_> = order.streams.values().cloned().collect();
        drop(order);
        for stream in streams {
            STREAMS.remove(stream.handle);
            stream.close();
        }
    }
}

/// Queues a task behind everything that the rules of the default streams put before it, and behind `after`.
///
/// # Errors
/// As [`queue::push`].
pub(super) fn enqueue(stream: &Arc<Stream>, task: Task, mut after: Vec<Point>) -> Result<Point> {
    let mut order = stream.context.streams.order.lock();
    order.gates.retain(|point| !point.is_reached());
    after.extend(order.gates.iter().cloned());
    match stream.kind {
        StreamKind::Legacy => after.extend(order.pending_on(|other| other.kind == StreamKind::Blocking)),
        StreamKind::Blocking => {
            after.extend(order.legacy.as_ref().and_then(|legacy| legacy.queue.pending_end()));
        }
        StreamKind::NonBlocking => {}
    }
    queue::push(stream, task, after)
}

// ---- finding streams ----

/// The stream of a handle; the current context's for the default streams.
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE` for an invalid or destroyed stream, `CUDA_ERROR_INVALID_CONTEXT` for a
/// default stream of no context, and the sticky error of the stream's context.
pub(super) fn find(handle: CUstream) -> Result<Arc<Stream>> {
    process::machine()?;
    match handle as usize {
        0 if entry::per_thread_default_stream() => per_thread(&context::current()?),
        PER_THREAD => per_thread(&context::current()?),
        0 | LEGACY => legacy(&context::current()?),
        handle => {
            let stream = STREAMS.get(handle).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
            stream.context.check()?;
            Ok(stream)
        }
    }
}

fn legacy(context: &Arc<Context>) -> Result<Arc<Stream>> {
    let mut order = context.streams.order.lock();
    if let Some(stream) = &order.legacy {
        return Ok(Arc::clone(stream));
    }
    let stream = order.add(context, 0, StreamKind::Legacy, 0)?;
    order.legacy = Some(Arc::clone(&stream));
    Ok(stream)
}

/// The context's own stream, which no program knows.
pub(super) fn own(context: &Arc<Context>) -> Result<Arc<Stream>> {
    let mut order = context.streams.order.lock();
    if let Some(stream) = &order.own {
        return Ok(Arc::clone(stream));
    }
    let stream = order.add(context, 0, StreamKind::NonBlocking, 0)?;
    order.own = Some(Arc::clone(&stream));
    Ok(stream)
}

/// A thread's default streams, one for each context in which it used one. They end with the thread.
struct PerThread(Vec<Arc<Stream>>);

impl Drop for PerThread {
    fn drop(&mut self) {
        // In the child of a fork the workers do not exist, and may have left locks held.
        if process::machine().is_err() {
            return;
        }
        for stream in &self.0 {
            capture::stream_destroyed(stream);
            stream.close();
        }
    }
}

thread_local! {
    static DEFAULT_STREAMS: RefCell<PerThread> = const { RefCell::new(PerThread(Vec::new())) };
}

fn per_thread(context: &Arc<Context>) -> Result<Arc<Stream>> {
    let find = |streams: &RefCell<PerThread>| {
        let mut streams = streams.borrow_mut();
        if let Some(stream) = streams.0.iter().find(|stream| Arc::ptr_eq(&stream.context, context)) {
            return Ok(Arc::clone(stream));
        }
        streams.0.retain(|stream| !stream.context.is_destroyed());
        let stream = context.streams.order.lock().add(context, 0, StreamKind::Blocking, 0)?;
        streams.0.push(Arc::clone(&stream));
        Ok(stream)
    };
    // A thread that is on its way out has no streams any more.
    DEFAULT_STREAMS.try_with(find).unwrap_or(Err(CUresult::CUDA_ERROR_INVALID_CONTEXT))
}

/// Creates a stream of the context.
///
/// # Errors
/// `CUDA_ERROR_CONTEXT_IS_DESTROYED` if the context goes away at this moment.
pub(super) fn create(context: &Arc<Context>, kind: StreamKind, priority: i32) -> Result<Arc<Stream>> {
    let handle = crate::handle::fresh();
    let stream = context.streams.order.lock().add(context, handle, kind, priority)?;
    STREAMS.insert(handle, Arc::clone(&stream));
    Ok(stream)
}

/// Takes the stream of a handle out of the table.
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE` if there is none; default streams cannot be destroyed.
pub(super) fn remove(handle: CUstream) -> Result<Arc<Stream>> {
    STREAMS.remove(handle as usize).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}
