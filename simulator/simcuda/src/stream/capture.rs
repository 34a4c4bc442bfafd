//! Stream capture: work becomes nodes of a graph instead of being run.
//!
//! ```text
//! (none) ── begin ──> active ── end by its stream and thread ──> (none), with a graph
//!                       │ a call that a capture does not allow
//!                       v
//!                  invalidated ── end ──> (none), without a graph
//! ```
//!
//! The rules are those of the CUDA programming guide, "Stream Capture", and of the driver API reference,
//! cuStreamBeginCapture and cuThreadExchangeStreamCaptureMode. All captures of the process are under one lock,
//! which is not taken while no capture is open.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::ThreadId;
use std::time::Instant;

use cuda_abi::sys::{CUresult, CUstreamCaptureMode};
use cuda_abi::types::{CUgraphEdgeData, CUgraphNode};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::event::{Event, Last};
use super::object::{Stream, StreamKind};
use super::work::Work;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};

/// What a capture forbids to whom (`CUstreamCaptureMode`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl Mode {
    pub(super) fn new(mode: u32) -> Result<Self> {
        const GLOBAL: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL as u32;
        const THREAD_LOCAL: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as u32;
        const RELAXED: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        match mode {
            GLOBAL => Ok(Self::Global),
            THREAD_LOCAL => Ok(Self::ThreadLocal),
            RELAXED => Ok(Self::Relaxed),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// Whether a capture of this mode, by the same thread or another, forbids unsafe calls to a thread of mode
    /// `asking` (CUDA driver API reference, cuThreadExchangeStreamCaptureMode).
    pub(super) fn forbids(self, asking: Self, is_own: bool) -> bool {
        match asking {
            Self::Relaxed => false,
            _ if is_own => self != Self::Relaxed,
            Self::ThreadLocal => false,
            Self::Global => self == Self::Global,
        }
    }
}

/// Where an event was recorded in a capture.
#[derive(Clone)]
pub(super) struct Mark {
    capture: u64,
    nodes: Vec<NodeId>,
}

pub(super) struct Capture {
    pub(super) id: u64,
    mode: Mode,
    thread: ThreadId,
    /// Where it began and has to end.
    origin: Arc<Stream>,
    pub(super) graph: Arc<Graph>,
    /// The program's own graph outlives a capture that fails.
    graph_is_given: bool,
    pub(super) is_invalid: bool,
    /// The streams that take part, and what their next node comes after.
    ends: Vec<End>,
    /// What each node that was captured comes after.
    before: HashMap<NodeId, Vec<NodeId>>,
}

/// A stream's place in its capture.
struct End {
    stream: Arc<Stream>,
    nodes: Vec<NodeId>,
    /// What the program saw last of `nodes`, as handles and edges without data: it holds on to them until its
    /// next call about the stream.
    shown: (Vec<usize>, Vec<[u8; size_of::<CUgraphEdgeData>()]>),
}

impl End {
    fn new(stream: &Arc<Stream>, nodes: Vec<NodeId>) -> Self {
        Self { stream: Arc::clone(stream), nodes, shown: (Vec::new(), Vec::new()) }
    }

    fn come_after(&mut self, nodes: &[NodeId]) {
        for node in nodes {
            if !self.nodes.contains(node) {
                self.nodes.push(*node);
            }
        }
    }
}

/// All open captures, by ID.
pub(super) struct Captures(BTreeMap<u64, Capture>);

static CAPTURES: Mutex<Captures> = Mutex::new(Captures(BTreeMap::new()));
/// How many there are: most calls see 0 here and take no lock.
static OPEN: AtomicUsize = AtomicUsize::new(0);
static CLOSED: Condvar = Condvar::new();
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static THREAD_MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// The open captures, or `None` if there are none.
pub(super) fn open() -> Option<MutexGuard<'static, Captures>> {
    (OPEN.load(Ordering::Acquire) > 0).then(|| CAPTURES.lock())
}

pub(super) fn exchange_thread_mode(mode: Mode) -> Mode {
    THREAD_MODE.replace(mode)
}

impl Captures {
    /// The capture that the stream takes part in.
    pub(super) fn of(&mut self, stream: &Stream) -> Option<&mut Capture> {
        self.0.get_mut(&stream.capture.load(Ordering::Relaxed))
    }

    /// Whether use of the stream would depend on a capture: the legacy stream waits for blocking streams.
    pub(super) fn is_implied(&self, stream: &Stream) -> bool {
        stream.kind == StreamKind::Legacy
            && self.0.values().any(|capture| capture.has_blocking(&stream.context))
    }

    /// The stream's capture, for work on it.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT` on the legacy stream while a blocking stream captures, which ends
    /// that capture, `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED` after an earlier error.
    fn for_work(&mut self, stream: &Stream) -> Result<Option<&mut Capture>> {
        if self.is_implied(stream) {
            for capture in self.0.values_mut().filter(|capture| capture.has_blocking(&stream.context)) {
                capture.is_invalid = true;
            }
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        self.of(stream).map(Capture::checked).transpose()
    }

    fn begin(&mut self, capture: Capture) {
        capture.origin.capture.store(capture.id, Ordering::Relaxed);
        self.0.insert(capture.id, capture);
        OPEN.store(self.0.len(), Ordering::Release);
    }

    /// Takes a capture out and its streams with it.
    fn close(&mut self, id: u64) -> Option<Capture> {
        let capture = self.0.remove(&id)?;
        for end in &capture.ends {
            end.stream.capture.store(0, Ordering::Relaxed);
        }
        OPEN.store(self.0.len(), Ordering::Release);
        CLOSED.notify_all();
        Some(capture)
    }
}

impl Capture {
    fn has_blocking(&self, context: &Arc<Context>) -> bool {
        self.ends
            .iter()
            .any(|end| end.stream.kind == StreamKind::Blocking && Arc::ptr_eq(&end.stream.context, context))
    }

    pub(super) fn checked(&mut self) -> Result<&mut Self> {
        if self.is_invalid { Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) } else { Ok(self) }
    }

    /// The first error is reported as it is, later ones as its consequences.
    fn invalidate(&mut self, error: Error) -> Error {
        let was_invalid = std::mem::replace(&mut self.is_invalid, true);
        if was_invalid { CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED } else { error }
    }

    /// The place of a stream that takes part.
    fn end_of(&mut self, stream: &Stream) -> &mut End {
        let found = self.ends.iter_mut().find(|end| std::ptr::eq(&*end.stream, stream));
        found.expect("a stream that names this capture takes part in it")
    }

    fn add(&mut self, stream: &Stream, work: Work) -> Result {
        let after = self.end_of(stream).nodes.clone();
        let node = match self.graph.add(work, &after) {
            Ok(node) => node,
            Err(error) => return Err(self.invalidate(error)),
        };
        self.end_of(stream).nodes = vec![node];
        self.before.insert(node, after);
        Ok(())
    }

    /// Makes the stream's next node come after `nodes` too; a stream that took no part joins.
    fn join(&mut self, stream: &Arc<Stream>, nodes: &[NodeId]) {
        if stream.capture.swap(self.id, Ordering::Relaxed) != self.id {
            self.ends.push(End::new(stream, Vec::new()));
        }
        self.end_of(stream).come_after(nodes);
    }

    /// Adds to what the stream's next node comes after, or replaces it.
    pub(super) fn come_after(&mut self, stream: &Stream, nodes: &[NodeId], replace: bool) {
        let end = self.end_of(stream);
        if replace {
            end.nodes.clear();
        }
        end.come_after(nodes);
    }

    /// What the stream's next node comes after, as the program sees it: nodes, edges, how many.
    pub(super) fn show(&mut self, stream: &Stream) -> (*const CUgraphNode, *const CUgraphEdgeData, usize) {
        let end = self.end_of(stream);
        let handles = end.nodes.iter().map(|node| node.0).collect();
        end.shown = (handles, vec![[0; size_of::<CUgraphEdgeData>()]; end.nodes.len()]);
        (end.shown.0.as_ptr().cast(), end.shown.1.as_ptr().cast(), end.nodes.len())
    }

    /// Whether everything that other streams captured comes before the origin's end.
    fn is_joined(&self) -> bool {
        let mut seen = HashSet::new();
        let mut open: Vec<NodeId> = self.ends[0].nodes.clone();
        while let Some(node) = open.pop() {
            if seen.insert(node) {
                open.extend(self.before.get(&node).into_iter().flatten());
            }
        }
        self.ends.iter().all(|end| end.nodes.iter().all(|node| seen.contains(node)))
    }
}

// ---- beginning and ending ----

/// Begins a capture on the stream, into a new graph or behind `after` in a given one.
///
/// # Errors
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` on the legacy stream, `CUDA_ERROR_ILLEGAL_STATE` if the stream
/// captures already.
pub(super) fn begin(stream: &Arc<Stream>, mode: Mode, given: Option<(Arc<Graph>, Vec<NodeId>)>) -> Result {
    if stream.kind == StreamKind::Legacy {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut captures = CAPTURES.lock();
    if captures.of(stream).is_some() {
        return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
    }
    let graph_is_given = given.is_some();
    let (graph, nodes) = given.unwrap_or_else(|| (Graph::create(), Vec::new()));
    captures.begin(Capture {
        id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        mode,
        thread: std::thread::current().id(),
        origin: Arc::clone(stream),
        graph,
        graph_is_given,
        is_invalid: false,
        ends: vec![End::new(stream, nodes)],
        before: HashMap::new(),
    });
    Ok(())
}

/// Ends the capture that began on the stream and gives its graph.
///
/// # Errors
/// See the rules at the top; but for the wrong stream or thread, the capture is over nevertheless.
pub(super) fn end(stream: &Arc<Stream>) -> Result<Arc<Graph>> {
    let mut captures = CAPTURES.lock();
    let capture = captures.of(stream).ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
    if !Arc::ptr_eq(&capture.origin, stream) {
        return Err(capture.invalidate(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED));
    }
    if capture.mode != Mode::Relaxed && capture.thread != std::thread::current().id() {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    }
    let id = capture.id;
    let capture = captures.close(id).expect("it was found above");
    drop(captures);
    let result = if capture.is_invalid {
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
    } else if !capture.is_joined() {
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
    } else {
        Ok(Arc::clone(&capture.graph))
    };
    if result.is_err() {
        discard(&capture);
    }
    result
}

/// The graph of a capture that gave none.
fn discard(capture: &Capture) {
    if !capture.graph_is_given {
        capture.graph.destroy();
    }
}

/// The stream is destroyed: a capture that it takes part in cannot end well, and one that began on it is over.
pub(super) fn stream_destroyed(stream: &Stream) {
    let Some(mut captures) = open() else { return };
    let Some(capture) = captures.of(stream) else { return };
    capture.is_invalid = true;
    if std::ptr::eq(&*capture.origin, stream) {
        let id = capture.id;
        let capture = captures.close(id);
        drop(captures);
        if let Some(capture) = capture {
            discard(&capture);
        }
    }
}

/// The context is destroyed: its captures are over.
pub(super) fn context_destroyed(context: &Arc<Context>) {
    let Some(mut captures) = open() else { return };
    let is_of_context =
        |capture: &&Capture| capture.ends.iter().any(|end| Arc::ptr_eq(&end.stream.context, context));
    let ids: Vec<u64> = captures.0.values().filter(is_of_context).map(|capture| capture.id).collect();
    let closed: Vec<Capture> = ids.into_iter().filter_map(|id| captures.close(id)).collect();
    drop(captures);
    for capture in &closed {
        discard(capture);
    }
}

/// Whether all captures are over before the deadline (`None`: wait for ever).
pub(super) fn wait_for_none(deadline: Option<Instant>) -> bool {
    let mut captures = CAPTURES.lock();
    while !captures.0.is_empty() {
        match deadline {
            None => CLOSED.wait(&mut captures),
            Some(deadline) => {
                if CLOSED.wait_until(&mut captures, deadline).timed_out() {
                    return captures.0.is_empty();
                }
            }
        }
    }
    true
}

// ---- what other calls do to captures ----

/// Captures the work if the stream captures; else hands it back.
///
/// # Errors
/// As [`Captures::for_work`], or what the graph says.
pub(super) fn take(stream: &Stream, work: Work) -> Result<Option<Work>> {
    let Some(mut captures) = open() else { return Ok(Some(work)) };
    let Some(capture) = captures.for_work(stream)? else { return Ok(Some(work)) };
    capture.add(stream, work).map(|()| None)
}

/// A call that no capture can take: it waits, asks how far work is, or has no kind of node.
///
/// # Errors
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` if the stream captures, which ends it, else as
/// [`Captures::for_work`].
pub(super) fn refuse(stream: &Stream) -> Result {
    let Some(mut captures) = open() else { return Ok(()) };
    match captures.for_work(stream)? {
        Some(capture) => Err(capture.invalidate(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)),
        None => Ok(()),
    }
}

/// As [`refuse`], for a call about all streams of a context.
///
/// # Errors
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` if one of them captures, which ends it.
pub(super) fn refuse_context(context: &Arc<Context>) -> Result {
    let Some(mut captures) = open() else { return Ok(()) };
    let mut result = Ok(());
    for capture in captures.0.values_mut() {
        if capture.ends.iter().any(|end| Arc::ptr_eq(&end.stream.context, context)) {
            result = Err(capture.invalidate(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
        }
    }
    result
}

/// As [`refuse`], for a call about an event.
///
/// # Errors
/// `CUDA_ERROR_CAPTURED_EVENT` if it was recorded in a capture, which ends if it is still open.
pub(super) fn refuse_event(event: &Event) -> Result {
    let Last::Captured(mark) = event.last() else { return Ok(()) };
    if let Some(capture) = open().as_mut().and_then(|captures| captures.0.get_mut(&mark.capture)) {
        capture.is_invalid = true;
    }
    Err(CUresult::CUDA_ERROR_CAPTURED_EVENT)
}

/// A call that is unsafe while a capture may depend on it, such as an allocation.
///
/// # Errors
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` if a capture forbids it to this thread; that capture ends.
pub(super) fn forbid() -> Result {
    let Some(mut captures) = open() else { return Ok(()) };
    let thread = std::thread::current().id();
    let thread_mode = THREAD_MODE.get();
    let forbids = |capture: &Capture| capture.mode.forbids(thread_mode, capture.thread == thread);
    let mut result = Ok(());
    for capture in captures.0.values_mut().filter(|capture| forbids(capture)) {
        capture.is_invalid = true;
        result = Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    result
}

/// Records an event in the stream's capture; false if it does not capture. An external record is a node, any
/// other one marks a place in the graph.
///
/// # Errors
/// As [`take`].
pub(super) fn record(stream: &Stream, event: &Arc<Event>, is_external: bool) -> Result<bool> {
    let Some(mut captures) = open() else { return Ok(false) };
    let Some(capture) = captures.for_work(stream)? else { return Ok(false) };
    if is_external {
        capture.add(stream, Work::Record(Arc::clone(event)))?;
    } else {
        let nodes = capture.end_of(stream).nodes.clone();
        event.mark_captured(Mark { capture: capture.id, nodes });
    }
    Ok(true)
}

/// Makes a stream wait for an event as far as captures are concerned; false if neither is captured. A stream
/// that waits for a captured event joins the event's capture.
///
/// # Errors
/// `CUDA_ERROR_STREAM_CAPTURE_MERGE` if both are captured apart, `CUDA_ERROR_STREAM_CAPTURE_ISOLATION` if the
/// stream captures and the event represents real work, `CUDA_ERROR_CAPTURED_EVENT` if the event's capture is
/// over.
pub(super) fn wait(stream: &Arc<Stream>, event: &Arc<Event>, is_external: bool) -> Result<bool> {
    let Some(mut captures) = open() else { return Ok(false) };
    let own = captures.for_work(stream)?.map(|capture| capture.id);
    let last = event.last();
    if let (Some(own), true) = (own, is_external) {
        let capture = captures.0.get_mut(&own).expect("it was found above");
        return capture.add(stream, Work::Wait(Arc::clone(event))).map(|()| true);
    }
    let Last::Captured(mark) = &last else {
        return match (own, last) {
            (None, _) => Ok(false),
            (Some(_), Last::Never) => Ok(true),
            (Some(own), _) => Err(captures.invalidate(own, CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION)),
        };
    };
    if !captures.0.contains_key(&mark.capture) {
        let error = CUresult::CUDA_ERROR_CAPTURED_EVENT;
        return Err(own.map_or(error, |own| captures.invalidate(own, error)));
    }
    match own {
        Some(own) if own != mark.capture => {
            captures.invalidate(mark.capture, CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE);
            Err(captures.invalidate(own, CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE))
        }
        None if stream.kind == StreamKind::Legacy => {
            Err(captures.invalidate(mark.capture, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED))
        }
        _ => {
            let capture = captures.0.get_mut(&mark.capture).expect("it was looked up above");
            capture.checked()?.join(stream, &mark.nodes);
            Ok(true)
        }
    }
}

impl Captures {
    fn invalidate(&mut self, id: u64, error: Error) -> Error {
        self.0.get_mut(&id).map_or(error, |capture| capture.invalidate(error))
    }
}
