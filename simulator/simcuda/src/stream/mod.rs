//! Streams, events, and the order of asynchronous work.
//!
//! Each stream runs its work on a thread of its own ([`queue`]); what has to come before a piece of work is
//! decided when it is submitted ([`object`]), so that nothing but the rules of CUDA keeps two streams in step.
//! While a stream captures, its work becomes nodes of a graph ([`capture`]).

mod attributes;
mod calls;
mod capture;
mod capture_calls;
mod event;
mod host;
mod memop;
mod object;
mod queue;
#[cfg(test)]
mod tests;
mod work;

use std::sync::Arc;
use std::time::Instant;

use cuda_abi::sys::CUresult;
use cuda_abi::types::CUstream;

pub(crate) use attributes::{cuStreamCopyAttributes, cuStreamGetAttribute, cuStreamSetAttribute};
pub(crate) use calls::{
    cuCtxGetStreamPriorityRange, cuCtxSynchronize, cuCtxSynchronize_v2, cuStreamAttachMemAsync,
    cuStreamCreate, cuStreamCreateWithPriority, cuStreamDestroy_v2, cuStreamGetCtx, cuStreamGetCtx_v2,
    cuStreamGetDevice, cuStreamGetFlags, cuStreamGetGreenCtx, cuStreamGetId, cuStreamGetPriority,
    cuStreamQuery, cuStreamSynchronize,
};
pub(crate) use capture_calls::{
    cuStreamBeginCapture, cuStreamBeginCapture_v2, cuStreamBeginCaptureToGraph, cuStreamEndCapture,
    cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v3, cuStreamIsCapturing,
    cuStreamUpdateCaptureDependencies, cuStreamUpdateCaptureDependencies_v2,
    cuThreadExchangeStreamCaptureMode,
};
pub(crate) use event::{
    Event, cuCtxRecordEvent, cuCtxWaitEvent, cuEventCreate, cuEventDestroy_v2, cuEventElapsedTime,
    cuEventElapsedTime_v2, cuEventQuery, cuEventRecord, cuEventRecordWithFlags, cuEventSynchronize,
    cuIpcGetEventHandle, cuIpcOpenEventHandle, cuStreamWaitEvent, event_by_handle,
};
pub(crate) use host::{HostFunction, cuLaunchHostFunc, cuLaunchHostFunc_v2, cuStreamAddCallback};
pub(crate) use memop::{
    MemoryOp, cuStreamBatchMemOp, cuStreamBatchMemOp_v2, cuStreamWaitValue32, cuStreamWaitValue32_v2,
    cuStreamWaitValue64, cuStreamWaitValue64_v2, cuStreamWriteValue32, cuStreamWriteValue32_v2,
    cuStreamWriteValue64, cuStreamWriteValue64_v2,
};
pub(crate) use object::PerContext;
pub(crate) use work::Work;

use crate::context::{self, Context};
use crate::error::Result;
use crate::memory;
use object::{Stream, enqueue, find};
pub(crate) use queue::CONTEXT_POLL_INTERVAL;
use queue::{Point, is_worker};
use work::Task;

/// Puts work onto a stream of the current context (0, `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD` included)
/// or, while that stream captures, into its graph. Returns as soon as it is queued.
///
/// # Errors
/// `CUDA_ERROR_INVALID_CONTEXT` without a current context, `CUDA_ERROR_INVALID_HANDLE` for a stream that does
/// not exist, or for a kernel on another context's stream; the sticky error of the context; the rules of captures.
pub(crate) fn submit(handle: CUstream, work: Work) -> Result {
    let stream = for_work(handle, &work)?;
    match capture::take(&stream, work)? {
        Some(work) => {
            stream.queue.wait_for_room();
            queue_work(&stream, work).map(|_| ())
        }
        None => Ok(()),
    }
}

/// As [`submit`], and waits until the work is done: what the synchronous calls do.
///
/// # Errors
/// As [`submit`], or how the work failed; `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` if the stream captures.
pub(crate) fn submit_and_wait(handle: CUstream, work: Work) -> Result {
    let stream = for_work(handle, &work)?;
    capture::refuse(&stream)?;
    if is_worker() {
        return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
    }
    stream.queue.wait_for_room();
    queue_work(&stream, work)?.wait_for_program(&stream.context);
    stream.context.check()
}

/// The stream that a program names for this work. Copies may go over another context's stream, kernels may
/// not (CUDA programming guide, "Stream and Event Behavior" of several devices).
fn for_work(handle: CUstream, work: &Work) -> Result<Arc<Stream>> {
    let current = context::current()?;
    let stream = find(handle)?;
    if matches!(work, Work::Kernel(_)) && !Arc::ptr_eq(&stream.context, &current) {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    Ok(stream)
}

/// Queues work. The launch of a graph as a whole comes after the events that its nodes wait for, and is what
/// the events that its nodes record stand for from now on.
fn queue_work(stream: &Arc<Stream>, work: Work) -> Result<Point> {
    let Work::Graph(run) = &work else { return enqueue(stream, Task::Work(work), Vec::new()) };
    let run = Arc::clone(run);
    let after = run.waits().filter_map(|event| event.point().transpose()).collect::<Result<_>>()?;
    let point = enqueue(stream, Task::Work(work), after)?;
    for event in run.records() {
        event.expect_at(point.clone());
    }
    Ok(point)
}

/// The device of a stream, as its handle names it.
///
/// # Errors
/// As [`submit`].
pub(crate) fn target_device(handle: CUstream) -> Result<i32> {
    Ok(find(handle)?.context.device.ordinal)
}

/// Waits until all work of the context is done: cuCtxSynchronize, and calls that synchronise implicitly.
///
/// # Errors
/// How the work failed.
pub(crate) fn synchronize_context(context: &Arc<Context>) -> Result {
    if is_worker() {
        return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
    }
    for point in context.streams.pending() {
        point.wait_for_program(context);
    }
    memory::after_synchronization();
    context.check()
}

/// Whether all work of all contexts is done, host functions included, and no stream captures any more, before
/// the deadline (`None`: wait for ever).
pub(crate) fn drain(deadline: Option<Instant>) -> bool {
    capture::wait_for_none(deadline)
        && context::all()
            .iter()
            .flat_map(|context| context.streams.pending())
            .all(|point| point.wait_until(deadline))
}

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`, and the capture is invalid, if a call that is unsafe during a
/// capture (CUDA driver API reference, cuStreamBeginCapture: cuMemAlloc, …) comes while one forbids it to
/// this thread (cuThreadExchangeStreamCaptureMode).
///
/// # Errors
/// That one.
pub(crate) fn forbid_in_capture() -> Result {
    capture::forbid()
}

/// Destroys the streams of a context that counts as destroyed already, and waits until their work is given up.
pub(crate) fn finish_context(context: &Arc<Context>) {
    capture::context_destroyed(context);
    // First, so that nothing comes after what is waited for.
    context.streams.close();
    for point in context.streams.pending() {
        point.wait();
    }
}

/// Destroys the events of a context.
pub(crate) fn context_destroyed(context: &Arc<Context>) {
    event::context_destroyed(context);
}
