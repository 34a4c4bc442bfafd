//! Access of one device to another's memory.

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{CUcontext, CUdevice, CUdevice_P2PAttribute};

use super::state::STATE;
use crate::error::{Result, write_out};
use crate::{context, process};

/// All devices of the machine reach each other.
pub(crate) unsafe fn cuDeviceCanAccessPeer(out: *mut i32, device: CUdevice, peer: CUdevice) -> Result {
    process::device(device)?;
    process::device(peer)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, i32::from(device != peer)) }
}

pub(crate) unsafe fn cuDeviceGetP2PAttribute(
    out: *mut i32,
    attribute: CUdevice_P2PAttribute,
    from: CUdevice,
    to: CUdevice,
) -> Result {
    use sys::CUdevice_P2PAttribute as Known;
    process::device(from)?;
    process::device(to)?;
    if from == to {
        return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
    }
    let known = |value: Known| attribute == value as u32;
    let value = if known(Known::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)
        || known(Known::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)
    {
        1
    } else if known(Known::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)
        || known(Known::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_ACCESS_SUPPORTED)
        || known(Known::CU_DEVICE_P2P_ATTRIBUTE_ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED)
    {
        // All pairs are equally fast; there are no arrays; all atomics are native.
        0
    } else {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, value) }
}

/// From then on, the current context's device may access what has been and will be allocated in the other
/// context; not the other way round, and not memory of the VMM calls and of pools.
pub(crate) unsafe fn cuCtxEnablePeerAccess(peer: CUcontext, flags: u32) -> Result {
    let context = context::current()?;
    if flags != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let peer = context::by_handle(peer)?;
    if peer.handle == context.handle {
        return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
    let devices = (context.device.ordinal, peer.device.ordinal);
    if devices.0 == devices.1 {
        return Err(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    }
    match STATE.write().peers.insert((context.handle, peer.handle), devices) {
        None => Ok(()),
        Some(_) => Err(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED),
    }
}

pub(crate) unsafe fn cuCtxDisablePeerAccess(peer: CUcontext) -> Result {
    let context = context::current()?;
    let peer = context::by_handle(peer)?;
    match STATE.write().peers.remove(&(context.handle, peer.handle)) {
        Some(_) => Ok(()),
        None => Err(CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED),
    }
}
