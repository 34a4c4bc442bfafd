//! How copies go to streams: what waits for what (CUDA driver API reference, "API synchronization behavior").

use cuda_abi::sys::CUstreamCaptureStatus;
use cuda_abi::types::CUstream;

use super::check::{self, MemoryKind};
use super::{Copy, Fill, run};
use crate::error::Result;
use crate::stream::{self, Work};
use crate::{context, memory};

/// The default stream, which is the thread's own for the `_ptds` entry points.
const DEFAULT_STREAM: CUstream = std::ptr::null_mut();

/// Up to this size the bytes of pageable memory are taken at the call; a longer copy waits for its turn, as the
/// real driver's does when its staging buffers are full.
const STAGED_BYTES: usize = 16 << 20;

/// When an asynchronous copy reads its source.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SourceAccess {
    /// In the stream's order.
    Stream,
    /// Before the call returns.
    DuringCall,
}

/// As [`check::copy`]; a copy of nothing may name anything.
pub(super) fn checked(copy: &Copy, device: i32) -> Result {
    if copy.is_empty() { Ok(()) } else { check::copy(copy, device) }
}

/// Copies over the default stream. Waits, unless both sides are device memory.
pub(super) fn synchronous(copy: Copy) -> Result {
    let device = context::current()?.device.ordinal;
    if copy.is_empty() {
        return Ok(());
    }
    check::copy(&copy, device)?;
    if check::kind(&copy.to, device) == MemoryKind::Device
        && check::kind(&copy.from, device) == MemoryKind::Device
    {
        return stream::submit(DEFAULT_STREAM, Work::Copy(copy));
    }
    stream::submit_and_wait(DEFAULT_STREAM, Work::Copy(copy))
}

/// Copies in a stream's order. Returns at once, but for copies into pageable memory and within the host, which
/// wait, and copies from pageable memory, whose bytes are taken first. A capturing stream takes any copy as it
/// is, and the memory is read when its graph runs.
pub(super) fn asynchronous(mut copy: Copy, stream: CUstream, access: SourceAccess) -> Result {
    let device = context::current()?.device.ordinal;
    if copy.is_empty() {
        return Ok(());
    }
    check::copy(&copy, device)?;
    // Errors of a stream are reported when work is submitted.
    if is_capturing(stream) != Ok(false) {
        return stream::submit(stream, Work::Copy(copy));
    }
    let (to, from) = (check::kind(&copy.to, device), check::kind(&copy.from, device));
    let small = copy.width_bytes * copy.height * copy.depth <= STAGED_BYTES;
    let early =
        from == MemoryKind::Pageable || (from == MemoryKind::Pinned && access == SourceAccess::DuringCall);
    if early && small && to == MemoryKind::Device {
        run::stage(&mut copy);
        return stream::submit(stream, Work::Copy(copy));
    }
    let has_no_pageable = matches!(
        (to, from),
        (MemoryKind::Device, MemoryKind::Device | MemoryKind::Pinned)
            | (MemoryKind::Pinned, MemoryKind::Device)
    );
    if has_no_pageable && access == SourceAccess::Stream {
        return stream::submit(stream, Work::Copy(copy));
    }
    stream::submit_and_wait(stream, Work::Copy(copy))
}

/// Whether the stream's work becomes a graph's nodes.
///
/// # Errors
/// As cuStreamIsCapturing.
pub(super) fn is_capturing(stream: CUstream) -> Result<bool> {
    let mut status = 0;
    // SAFETY: `status` is a local variable.
    unsafe { stream::cuStreamIsCapturing(stream, &raw mut status) }?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32)
}

/// Fills device memory over the default stream. Waits only if it is host memory that a device can access.
pub(super) fn synchronous_fill(fill: Fill) -> Result {
    let device = context::current()?.device.ordinal;
    if fill.width == 0 || fill.height == 0 {
        return Ok(());
    }
    check::fill(&fill, device)?;
    if memory::device_of(fill.address).is_some() {
        return stream::submit(DEFAULT_STREAM, Work::Fill(fill));
    }
    stream::submit_and_wait(DEFAULT_STREAM, Work::Fill(fill))
}

/// Fills device memory in a stream's order.
pub(super) fn asynchronous_fill(fill: Fill, stream: CUstream) -> Result {
    let device = context::current()?.device.ordinal;
    if fill.width == 0 || fill.height == 0 {
        return Ok(());
    }
    check::fill(&fill, device)?;
    stream::submit(stream, Work::Fill(fill))
}
