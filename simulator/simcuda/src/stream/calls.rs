//! Entry points for streams and for waiting.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cuda_abi::sys::{CUmemAttach_flags, CUpointer_attribute, CUresult, CUstream_flags};
use cuda_abi::types::{CUcontext, CUdevice, CUdeviceptr, CUgreenCtx, CUstream};

use super::object::{self, StreamKind, enqueue, find};
use super::queue::is_worker;
use super::work::{Task, Work};
use super::{capture, synchronize_context};
use crate::context;
use crate::error::{Result, write_both, write_if_wanted, write_out};
use crate::{memory, process};

/// What compute capability 9.0 has; lower numbers are more urgent.
const LEAST_PRIORITY: i32 = 0;
const GREATEST_PRIORITY: i32 = -5;

/// Priorities out of range are brought into it (CUDA driver API reference, cuStreamCreateWithPriority).
pub(super) fn clamp_priority(priority: i32) -> i32 {
    priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY)
}

pub(crate) unsafe fn cuStreamCreate(out: *mut CUstream, flags: u32) -> Result {
    // SAFETY: `out` is the caller's out parameter.
    unsafe { cuStreamCreateWithPriority(out, flags, LEAST_PRIORITY) }
}

pub(crate) unsafe fn cuStreamCreateWithPriority(out: *mut CUstream, flags: u32, priority: i32) -> Result {
    const BLOCKING: u32 = CUstream_flags::CU_STREAM_DEFAULT as u32;
    const NON_BLOCKING: u32 = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    let context = context::current()?;
    let kind = match flags {
        BLOCKING => StreamKind::Blocking,
        NON_BLOCKING => StreamKind::NonBlocking,
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    };
    if out.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let stream = object::create(&context, kind, clamp_priority(priority))?;
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, stream.handle as CUstream) }
}

/// Returns at once; work that is queued is still done.
pub(crate) unsafe fn cuStreamDestroy_v2(handle: CUstream) -> Result {
    process::machine()?;
    let stream = object::remove(handle)?;
    capture::stream_destroyed(&stream);
    stream.close();
    Ok(())
}

pub(crate) unsafe fn cuStreamSynchronize(handle: CUstream) -> Result {
    let stream = find(handle)?;
    capture::refuse(&stream)?;
    if is_worker() {
        return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
    }
    for point in stream.pending() {
        point.wait_for_program(&stream.context);
    }
    memory::after_synchronization();
    stream.context.check()
}

pub(crate) unsafe fn cuStreamQuery(handle: CUstream) -> Result {
    let stream = find(handle)?;
    capture::refuse(&stream)?;
    let is_idle = stream.pending().is_empty();
    stream.context.check()?;
    if is_idle { Ok(()) } else { Err(CUresult::CUDA_ERROR_NOT_READY) }
}

/// Managed memory needs no migration here: it is memory of the host.
pub(crate) unsafe fn cuStreamAttachMemAsync(
    handle: CUstream,
    address: CUdeviceptr,
    size_bytes: usize,
    flags: u32,
) -> Result {
    const GLOBAL: u32 = CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
    const HOST: u32 = CUmemAttach_flags::CU_MEM_ATTACH_HOST as u32;
    const SINGLE: u32 = CUmemAttach_flags::CU_MEM_ATTACH_SINGLE as u32;
    let stream = find(handle)?;
    let is_default = stream.handle == 0;
    if !matches!(flags, GLOBAL | HOST | SINGLE) || (flags == SINGLE && is_default) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    capture::refuse(&stream)?;
    let is_managed = pointer_attribute(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED)? != 0;
    let whole_bytes = pointer_attribute(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE)?;
    if !is_managed || (size_bytes != 0 && size_bytes as u64 != whole_bytes) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    enqueue(&stream, Task::Work(Work::Empty), Vec::new()).map(|_| ())
}

/// An attribute of at most 8 bytes.
fn pointer_attribute(address: CUdeviceptr, attribute: CUpointer_attribute) -> Result<u64> {
    let mut value = 0_u64;
    // SAFETY: `value` is a local variable, as large as any attribute that is asked for here.
    unsafe { memory::cuPointerGetAttribute((&raw mut value).cast(), attribute as u32, address) }?;
    Ok(value)
}

// ---- properties ----

pub(crate) unsafe fn cuStreamGetFlags(handle: CUstream, out: *mut u32) -> Result {
    let stream = find(handle)?;
    let flags = match stream.kind {
        StreamKind::NonBlocking => CUstream_flags::CU_STREAM_NON_BLOCKING,
        StreamKind::Legacy | StreamKind::Blocking => CUstream_flags::CU_STREAM_DEFAULT,
    };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, flags as u32) }
}

pub(crate) unsafe fn cuStreamGetPriority(handle: CUstream, out: *mut i32) -> Result {
    let stream = find(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, stream.priority.load(Ordering::Relaxed)) }
}

pub(crate) unsafe fn cuStreamGetId(handle: CUstream, out: *mut u64) -> Result {
    let stream = find(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, stream.id) }
}

pub(crate) unsafe fn cuStreamGetDevice(handle: CUstream, out: *mut CUdevice) -> Result {
    let stream = find(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, stream.context.device.ordinal) }
}

pub(crate) unsafe fn cuStreamGetCtx(handle: CUstream, out: *mut CUcontext) -> Result {
    let stream = find(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, stream.context.handle as CUcontext) }
}

/// There are no green contexts here.
pub(crate) unsafe fn cuStreamGetCtx_v2(
    handle: CUstream,
    out: *mut CUcontext,
    green: *mut CUgreenCtx,
) -> Result {
    let stream = find(handle)?;
    // SAFETY: both are the caller's out parameters.
    unsafe { write_both(out, green, (stream.context.handle as CUcontext, std::ptr::null_mut())) }
}

pub(crate) unsafe fn cuStreamGetGreenCtx(handle: CUstream, out: *mut CUgreenCtx) -> Result {
    find(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, std::ptr::null_mut()) }
}

pub(crate) unsafe fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) -> Result {
    context::current()?;
    // SAFETY: `least` is the caller's out parameter; NULL means that it is not wanted.
    unsafe { write_if_wanted(least, LEAST_PRIORITY) };
    // SAFETY: `greatest` is the caller's out parameter; NULL means that it is not wanted.
    unsafe { write_if_wanted(greatest, GREATEST_PRIORITY) };
    Ok(())
}

// ---- contexts ----

pub(crate) unsafe fn cuCtxSynchronize() -> Result {
    synchronize_for_program(&context::current()?)
}

pub(crate) unsafe fn cuCtxSynchronize_v2(handle: CUcontext) -> Result {
    synchronize_for_program(&context::given_or_current(handle)?)
}

fn synchronize_for_program(context: &Arc<context::Context>) -> Result {
    capture::refuse_context(context)?;
    synchronize_context(context)
}
