//! Copies between the memory of two contexts.

use cuda_abi::sys;
use cuda_abi::types::{CUcontext, CUdeviceptr, CUstream};

use super::submit::{SourceAccess, asynchronous, synchronous};
use super::{Copy, Side, shaped};
use crate::error::Result;
use crate::{context, stream};

pub(crate) unsafe fn cuMemcpyPeer(
    to: CUdeviceptr,
    to_context: CUcontext,
    from: CUdeviceptr,
    from_context: CUcontext,
    size_bytes: usize,
) -> Result {
    after_all_work(&[to_context, from_context])?;
    synchronous(Copy::linear((to, Side::Device), (from, Side::Device), size_bytes))
}

pub(crate) unsafe fn cuMemcpyPeerAsync(
    to: CUdeviceptr,
    to_context: CUcontext,
    from: CUdeviceptr,
    from_context: CUcontext,
    size_bytes: usize,
    stream: CUstream,
) -> Result {
    check(&[to_context, from_context])?;
    let copy = Copy::linear((to, Side::Device), (from, Side::Device), size_bytes);
    asynchronous(copy, stream, SourceAccess::Stream)
}

pub(crate) unsafe fn cuMemcpy3DPeer(params: *const sys::CUDA_MEMCPY3D_PEER) -> Result {
    // SAFETY: `params` is NULL or the caller's structure.
    let (copy, contexts) = unsafe { shaped::from_3d_peer(params) }?;
    after_all_work(&contexts)?;
    synchronous(copy)
}

pub(crate) unsafe fn cuMemcpy3DPeerAsync(params: *const sys::CUDA_MEMCPY3D_PEER, stream: CUstream) -> Result {
    // SAFETY: `params` is NULL or the caller's structure.
    let (copy, contexts) = unsafe { shaped::from_3d_peer(params) }?;
    check(&contexts)?;
    asynchronous(copy, stream, SourceAccess::Stream)
}

/// # Errors
/// `CUDA_ERROR_INVALID_CONTEXT` for an invalid handle, or the sticky error of the context.
fn check(contexts: &[CUcontext]) -> Result {
    contexts.iter().try_for_each(|handle| context::by_handle(*handle)?.check())
}

/// A synchronous copy between contexts comes after all their work (CUDA driver API reference, cuMemcpyPeer).
fn after_all_work(contexts: &[CUcontext]) -> Result {
    check(contexts)?;
    contexts.iter().try_for_each(|handle| stream::synchronize_context(&context::by_handle(*handle)?))
}
