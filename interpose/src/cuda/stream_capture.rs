//! Stream captures that are open, and the capture mode of the calling thread.

use std::collections::HashSet;
use std::ffi::c_void;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda_abi::sys::{self, CUgraphEdgeData, CUgraphRecaptureCallback};
use cuda_abi::types::{CUgraph, CUgraphNode, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};

use super::driver;
use crate::cuda::result::SUCCESS;

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

    /// Whether the driver, asked from another thread, has it still. What it does not answer counts as open.
    fn is_open(self) -> bool {
        match self {
            Self::Of(stream) => is_capturing(stream as CUstream),
            // No other thread can ask for it.
            Self::OfThread(thread) => Path::new(&format!("/proc/self/task/{thread}")).exists(),
        }
    }
}

/// Streams that capture, as far as this library has seen.
static CAPTURES: Mutex<Option<HashSet<Capture>>> = Mutex::new(None);

fn captures() -> MutexGuard<'static, Option<HashSet<Capture>>> {
    CAPTURES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many streams are being captured. A capture that was dropped with its stream does not count.
pub(super) fn open_captures() -> usize {
    let noted: Vec<Capture> = captures().iter().flatten().copied().collect();
    let (open, ended): (Vec<_>, Vec<_>) = noted.into_iter().partition(|capture| capture.is_open());
    ended.into_iter().for_each(ends);
    open.len()
}

fn begins(stream: CUstream, result: CUresult) -> CUresult {
    if result == SUCCESS {
        captures().get_or_insert_default().insert(Capture::of(stream));
    }
    result
}

fn ends(capture: Capture) {
    captures().as_mut().map(|captures| captures.remove(&capture));
}

/// Forgets the capture of a stream that is about to go, or is gone; returns it if there was one.
pub(super) fn take_capture(stream: CUstream) -> Option<Capture> {
    let capture = Capture::of(stream);
    captures().as_mut().is_some_and(|captures| captures.remove(&capture)).then_some(capture)
}

/// The stream has stayed.
pub(super) fn put_back(capture: Capture) {
    captures().get_or_insert_default().insert(capture);
}

/// Asks the driver. A stream that is gone, with its context or without, captures no more.
fn is_capturing(stream: CUstream) -> bool {
    const GONE: [sys::CUresult; 4] = [
        sys::CUresult::CUDA_ERROR_INVALID_HANDLE,
        sys::CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        sys::CUresult::CUDA_ERROR_INVALID_CONTEXT,
        sys::CUresult::CUDA_ERROR_INVALID_VALUE,
    ];
    let mut status: CUstreamCaptureStatus = 0;
    // SAFETY: `status` is a local variable; a stream that is gone is an error and not more.
    let result = unsafe { driver::cuStreamIsCapturing(stream, &raw mut status) };
    let none = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as CUstreamCaptureStatus;
    if result == SUCCESS { status != none } else { !GONE.iter().any(|gone| *gone as CUresult == result) }
}

/// While it lives, its thread may do what a capture in this or another thread would otherwise forbid, and be broken by;
/// the thread's mode is what it was again afterwards.
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

/// Does something as [`Relaxed`] lets it.
pub(super) fn relaxed<T>(work: impl FnOnce() -> T) -> T {
    let _relaxed = Relaxed::begin();
    work()
}

/// # Safety
/// As for the driver's.
pub(super) unsafe fn cuStreamBeginCapture(
    real: unsafe extern "C" fn(CUstream) -> CUresult,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    begins(stream, unsafe { real(stream) })
}

/// # Safety
/// As for the driver's.
pub(super) unsafe fn cuStreamBeginCapture_v2(
    real: unsafe extern "C" fn(CUstream, CUstreamCaptureMode) -> CUresult,
    stream: CUstream,
    mode: CUstreamCaptureMode,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    begins(stream, unsafe { real(stream, mode) })
}

type BeginCaptureToGraph = unsafe extern "C" fn(
    CUstream,
    CUgraph,
    *const CUgraphNode,
    *const CUgraphEdgeData,
    usize,
    CUstreamCaptureMode,
) -> CUresult;

/// # Safety
/// As for the driver's.
pub(super) unsafe fn cuStreamBeginCaptureToGraph(
    real: BeginCaptureToGraph,
    stream: CUstream,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    edges: *const CUgraphEdgeData,
    count: usize,
    mode: CUstreamCaptureMode,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    begins(stream, unsafe { real(stream, graph, dependencies, edges, count, mode) })
}

/// # Safety
/// As for the driver's.
pub(super) unsafe fn cuStreamBeginRecaptureToGraph(
    real: unsafe extern "C" fn(
        CUstream,
        CUstreamCaptureMode,
        CUgraph,
        CUgraphRecaptureCallback,
        *mut c_void,
    ) -> CUresult,
    stream: CUstream,
    mode: CUstreamCaptureMode,
    graph: CUgraph,
    callback: CUgraphRecaptureCallback,
    data: *mut c_void,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    begins(stream, unsafe { real(stream, mode, graph, callback, data) })
}

/// Notes what has become of a capture after a call that was to end it.
pub(super) fn end_called(stream: CUstream, result: CUresult) {
    // An invalid capture ends with an error, and a call for another stream than the capture's does not end it.
    let capture = Capture::of(stream);
    if result == SUCCESS || matches!(capture, Capture::OfThread(_)) || !is_capturing(stream) {
        ends(capture);
    }
}
