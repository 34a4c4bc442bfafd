//! Properties of the stream of a call.

use std::ffi::c_int;
use std::ptr::null_mut;

use cuda_abi::sys;
use cuda_abi::types::{CUcontext, CUresult, CUstream, CUstreamCaptureStatus};

use super::heap::StreamId;
use crate::cuda::entry_points::Index;
use crate::cuda::{driver, real};

/// `CU_STREAM_PER_THREAD` (CUDA driver API reference, "Stream synchronization behavior").
const PER_THREAD: usize = 2;

const NOT_CAPTURING: CUstreamCaptureStatus =
    sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as CUstreamCaptureStatus;

const FORBIDDEN: CUresult = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as CUresult;

/// A handle that means the same stream whichever symbol it is passed to: 0 is the calling thread's own default stream
/// if `called`, the driver's function for the call, is that of the per-thread symbol.
pub(super) fn of_call(stream: CUstream, called: usize, per_thread: Index) -> CUstream {
    if stream.is_null() && called == real::address(per_thread as usize) as usize {
        PER_THREAD as CUstream
    } else {
        stream
    }
}

/// Whether work on a stream becomes part of a graph. Also so for the legacy default stream while a capture forbids to
/// use it: the driver knows what to say, and asking does not end that capture (CUDA driver API reference,
/// cuStreamIsCapturing).
pub(super) fn is_captured(stream: CUstream) -> bool {
    // SAFETY: the call writes to a local variable; the stream is that of our caller's caller.
    match driver::ask(NOT_CAPTURING, |status| unsafe { driver::cuStreamIsCapturing(stream, status) }) {
        Ok(status) => status != NOT_CAPTURING,
        Err(error) => error == FORBIDDEN,
    }
}

/// The unique ID of a stream, which is never reused.
pub(super) fn id(stream: CUstream) -> Option<StreamId> {
    // SAFETY: the call writes to a local variable; the stream is that of our caller's caller.
    driver::ask(0, |id| unsafe { driver::cuStreamGetId(stream, id) }).ok()
}

pub(super) fn device(stream: CUstream) -> Option<c_int> {
    // SAFETY: as in `id`.
    driver::ask(0, |device| unsafe { driver::cuStreamGetDevice(stream, device) }).ok()
}

/// The stream's context; `None` for a stream of a green context.
pub(super) fn context(stream: CUstream) -> Option<CUcontext> {
    // SAFETY: as in `id`.
    let context = driver::ask(null_mut(), |context| unsafe { driver::cuStreamGetCtx(stream, context) });
    context.ok().filter(|context| !context.is_null())
}
