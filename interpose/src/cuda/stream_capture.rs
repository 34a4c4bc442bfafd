//! Stream captures that are open, and the capture mode of the calling thread.

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::Path;

use cuda_abi::sys::{self, CUgraphEdgeData, CUgraphRecaptureCallback};
use cuda_abi::types::{CUgraph, CUgraphNode, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};

use super::driver;
use super::handler::handlers;
use super::nccl::graphs::{self, Recording};
use crate::cuda::result::SUCCESS;
use crate::cuda::shared::Shared;

/// `CU_STREAM_PER_THREAD` (CUDA driver API reference, "Stream synchronization behavior").
const PER_THREAD: usize = 2;

/// A stream that captures. The handle of the per-thread default stream means another stream in each thread.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Capture {
    Of(usize),
    OfThread(libc::pid_t),
}

impl Capture {
    fn of(stream: CUstream) -> Self {
        // The legacy default stream cannot be captured: where 0 names one that can, it is the thread's own.
        if stream.is_null() || stream as usize == PER_THREAD {
            // SAFETY: gettid has no preconditions.
            Self::OfThread(unsafe { libc::gettid() })
        } else {
            Self::Of(stream as usize)
        }
    }

    /// Whether the driver, asked from another thread, has it still. If it does not answer, the capture counts as
    /// open.
    fn is_open(self) -> bool {
        match self {
            Self::Of(stream) => is_capturing(stream as CUstream),
            // No other thread can ask for it.
            Self::OfThread(thread) => Path::new(&format!("/proc/self/task/{thread}")).exists(),
        }
    }
}

/// The captures that this library knows of, and what is recorded of them for the consistent cut.
static CAPTURES: Shared<Option<HashMap<Capture, Option<Recording>>>> = Shared::new(None);

/// The number of open captures. A capture that was dropped with its stream does not count.
pub(super) fn open_captures() -> usize {
    let noted: Vec<Capture> = CAPTURES.lock().iter().flat_map(HashMap::keys).copied().collect();
    let (open, ended): (Vec<_>, Vec<_>) = noted.into_iter().partition(|capture| capture.is_open());
    ended.into_iter().for_each(|capture| drop(ends(capture)));
    open.len()
}

/// Begins a capture, which waits before that if a consistent cut is wanted.
fn beginning(stream: CUstream, begin: impl FnOnce() -> CUresult) -> CUresult {
    let in_call = graphs::begin_capture();
    let result = begin();
    if result == SUCCESS {
        let recording = in_call.and_then(|in_call| graphs::capture_begun(stream, in_call));
        let before = CAPTURES.lock().get_or_insert_default().insert(Capture::of(stream), recording);
        drop(before);
    }
    result
}

fn ends(capture: Capture) -> Option<Recording> {
    CAPTURES.lock().as_mut()?.remove(&capture)?
}

/// Removes the capture of a stream that is being destroyed; returns it if there was one.
pub(super) fn take_capture(stream: CUstream) -> Option<(Capture, Option<Recording>)> {
    CAPTURES.lock().as_mut()?.remove_entry(&Capture::of(stream))
}

/// Records a capture again whose stream was not destroyed.
pub(super) fn put_back((capture, recording): (Capture, Option<Recording>)) {
    let before = CAPTURES.lock().get_or_insert_default().insert(capture, recording);
    drop(before);
}

/// Asks the driver. A stream that was destroyed, with its context or without, captures no more.
fn is_capturing(stream: CUstream) -> bool {
    const REMOVED: [sys::CUresult; 4] = [
        sys::CUresult::CUDA_ERROR_INVALID_HANDLE,
        sys::CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        sys::CUresult::CUDA_ERROR_INVALID_CONTEXT,
        sys::CUresult::CUDA_ERROR_INVALID_VALUE,
    ];
    let none = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as CUstreamCaptureStatus;
    // SAFETY: the call writes to a local variable; a stream that was destroyed only gives an error.
    match driver::ask(none, |status| unsafe { driver::cuStreamIsCapturing(stream, status) }) {
        Ok(status) => status != none,
        Err(error) => !REMOVED.iter().any(|removed| *removed as CUresult == error),
    }
}

/// Sets the relaxed capture mode while it lives: the thread may make calls that a capture would otherwise forbid or
/// be invalidated by. Restores the mode on drop.
pub(super) struct Relaxed {
    before: Option<CUstreamCaptureMode>,
}

impl Relaxed {
    pub fn begin() -> Self {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as CUstreamCaptureMode;
        // SAFETY: `mode` is a local variable.
        let result = unsafe { driver::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        Self { before: (result == SUCCESS).then_some(mode) }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        if let Some(mode) = &mut self.before {
            // SAFETY: the mode is ours.
            let _ = unsafe { driver::cuThreadExchangeStreamCaptureMode(&raw mut *mode) };
        }
    }
}

/// Runs `work` in the relaxed capture mode.
pub(super) fn relaxed<T>(work: impl FnOnce() -> T) -> T {
    let _relaxed = Relaxed::begin();
    work()
}

handlers! {
    fn cuStreamBeginCapture(stream: CUstream) |call| {
        beginning(stream, call)
    }

    fn cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode) |call| {
        beginning(stream, call)
    }

    fn cuStreamBeginCaptureToGraph(
        stream: CUstream, graph: CUgraph, dependencies: *const CUgraphNode, edges: *const CUgraphEdgeData,
        count: usize, mode: CUstreamCaptureMode
    ) |call| {
        beginning(stream, call)
    }

    fn cuStreamBeginRecaptureToGraph(
        stream: CUstream, mode: CUstreamCaptureMode, graph: CUgraph, callback: CUgraphRecaptureCallback,
        data: *mut c_void
    ) |call| {
        beginning(stream, call)
    }
}

/// Updates the record of a capture after a call that was to end it.
///
/// # Safety
/// `graph` is what the driver has written if the call succeeded, or NULL.
pub(super) unsafe fn end_called(stream: CUstream, result: CUresult, graph: *const CUgraph) {
    // An invalid capture ends with an error, and a call for another stream than the capture's does not end it.
    let capture = Capture::of(stream);
    if result == SUCCESS || matches!(capture, Capture::OfThread(_)) || !is_capturing(stream) {
        let recording = ends(capture);
        if let Some(recording) = recording.filter(|_| result == SUCCESS && !graph.is_null()) {
            // SAFETY: the driver has written it.
            graphs::captured(&recording, unsafe { graph.read() });
        }
    }
}
