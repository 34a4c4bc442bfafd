//! Device memory: physical segments, the address space, allocations, pools, IPC, pinned host memory.
//!
//! Physical memory is a file per segment in a device's directory, limited and shared by all processes
//! ([`ledger`], [`segment`]). The addresses that programs see are reserved and cannot be touched; the library
//! maps the segments elsewhere and looks addresses up in a page table ([`space`], [`state`]).

mod alloc;
mod detach;
mod device_file;
mod heap;
mod host;
mod ipc;
mod layout;
mod ledger;
mod managed;
mod multicast;
mod multicast_calls;
mod peer;
mod pointer;
mod pool;
mod pool_calls;
mod pool_share;
mod segment;
mod space;
mod state;
mod trailer;
mod vmm;

use std::any::Any;
use std::sync::Arc;

use space::{Right, Target};
use state::STATE;

use simcuda_machine::Gpu;
use simcuda_machine::config::Config;

use crate::error::Result;

pub(crate) use alloc::{
    allocate_internal, context_created, context_destroyed, cuMemAlloc_v2, cuMemAllocPitch_v2, cuMemFree_v2,
    cuMemGetAddressRange_v2, cuMemGetInfo_v2, free_internal,
};
pub(crate) use detach::{attach, detach, has_managed};
pub(crate) use device_file::DeviceFiles;
pub(crate) use host::{
    cuMemAllocHost_v2, cuMemFreeHost, cuMemHostAlloc, cuMemHostGetDevicePointer_v2, cuMemHostGetFlags,
    cuMemHostRegister_v2, cuMemHostUnregister,
};
pub(crate) use ipc::{cuIpcCloseMemHandle, cuIpcGetMemHandle, cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2};
pub(crate) use ledger::{begin_turns, take_turn};
pub(crate) use managed::{
    cuMemAdvise, cuMemAdvise_v2, cuMemAllocManaged, cuMemPrefetchAsync, cuMemPrefetchAsync_v2,
    cuMemRangeGetAttribute, cuMemRangeGetAttributes,
};
pub(crate) use multicast_calls::{
    cuMulticastAddDevice, cuMulticastBindAddr, cuMulticastBindAddr_v2, cuMulticastBindMem,
    cuMulticastBindMem_v2, cuMulticastCreate, cuMulticastGetGranularity, cuMulticastUnbind, has_multicast,
    team,
};
pub(crate) use peer::{
    cuCtxDisablePeerAccess, cuCtxEnablePeerAccess, cuDeviceCanAccessPeer, cuDeviceGetP2PAttribute,
};
pub(crate) use pointer::{cuPointerGetAttribute, cuPointerGetAttributes, cuPointerSetAttribute};
pub(crate) use pool::{
    after_synchronization, graph_allocate, graph_forget, graph_is_left, graph_set_left, pool_activate,
    pool_release,
};
pub(crate) use pool_calls::{
    cuDeviceGetDefaultMemPool, cuDeviceGetMemPool, cuDeviceSetMemPool, cuMemAllocAsync,
    cuMemAllocFromPoolAsync, cuMemFreeAsync, cuMemGetDefaultMemPool, cuMemGetMemPool, cuMemPoolCreate,
    cuMemPoolDestroy, cuMemPoolGetAccess, cuMemPoolGetAttribute, cuMemPoolSetAccess, cuMemPoolSetAttribute,
    cuMemPoolTrimTo, cuMemSetMemPool,
};
pub(crate) use pool_share::{
    cuMemPoolExportPointer, cuMemPoolExportToShareableHandle, cuMemPoolImportFromShareableHandle,
    cuMemPoolImportPointer,
};
pub(crate) use vmm::{
    cuMemAddressFree, cuMemAddressReserve, cuMemCreate, cuMemExportToShareableHandle, cuMemGetAccess,
    cuMemGetAllocationGranularity, cuMemGetAllocationPropertiesFromHandle, cuMemGetHandleForAddressRange,
    cuMemImportFromShareableHandle, cuMemMap, cuMemRelease, cuMemRetainAllocationHandle, cuMemSetAccess,
    cuMemUnmap,
};

/// A piece of the address space that is backed by host memory of ours.
#[derive(Clone)]
pub(crate) struct Span {
    /// Where the piece begins, in the address space that programs see.
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// The same bytes as this library sees them. For device memory this is another address than `start`: the
    /// one that the program holds cannot be touched by the host.
    pub(crate) host: *mut u8,
    pub(crate) writable: bool,
    /// Keeps the backing memory alive while a copy or a kernel still uses it.
    pub(crate) keep: Arc<dyn Any + Send + Sync>,
}

/// Opens the shared memory of these GPUs, which are the process's devices from now on.
///
/// # Errors
/// `CUDA_ERROR_OPERATING_SYSTEM` if the directory cannot be used; the reason is printed to standard error.
pub(crate) fn use_gpus<'a>(config: &Config, gpus: impl Iterator<Item = &'a Gpu>) -> Result {
    ledger::use_gpus(config, gpus)
}

/// The span around an address as the device `ordinal` may access it now, if it may: device memory with its
/// access rights, pinned host memory, managed memory. As on a GPU, rights are those of whole pages: what an
/// access beyond the end of a small allocation meets is its neighbour's memory.
pub(crate) fn span(address: u64, ordinal: i32) -> Option<Span> {
    let state = STATE.read();
    let (start, mapping) = state.mapping_at(address)?;
    let right = state.right(mapping, ordinal);
    if right == Right::None {
        return None;
    }
    let (host, keep): (_, Arc<dyn Any + Send + Sync>) = match &mapping.target {
        Target::Device { segment, offset } => {
            let backing = segment.backing().ok()?;
            // SAFETY: a mapping lies within its segment, which is mapped whole.
            let host = unsafe { backing.host.add(*offset as usize) };
            (host, backing)
        }
        Target::Multicast(_) => return None,
        Target::Host(range) => {
            let keep: Arc<dyn Any + Send + Sync> = Arc::clone(range) as _;
            (start as *mut u8, keep)
        }
    };
    Some(Span { start, len: mapping.len, host, writable: right == Right::ReadWrite, keep })
}

/// Whether every byte of the range lies in memory that device `ordinal` can access once the work that is
/// queued already has run: an asynchronous allocation counts from the call on. A range within an allocation
/// must not leave it, even where its last page extends further; the rest of such a page belongs to no allocation.
pub(crate) fn is_accessible(address: u64, len: u64, ordinal: i32) -> bool {
    let state = STATE.read();
    let Some(end) = address.checked_add(len) else { return false };
    if let Some((start, allocation)) = state.allocation_at(address) {
        return end <= start + allocation.size_bytes && state.can_access(allocation, ordinal);
    }
    let accessible_to = |at| match state.mapping_at(at) {
        Some((start, mapping))
            if state.reservation_at(at).is_some()
                && !matches!(mapping.target, Target::Multicast(_))
                && state.right(mapping, ordinal) > Right::None =>
        {
            Some(start + mapping.len)
        }
        _ => None,
    };
    covers(address, end, accessible_to)
}

/// Whether pieces reach from `start` to `end` without a gap; `piece_end` says where the piece around an
/// address ends. An empty range lies in the piece around its start.
fn covers(start: u64, end: u64, piece_end: impl Fn(u64) -> Option<u64>) -> bool {
    let mut at = start;
    while let Some(next) = piece_end(at) {
        if next >= end {
            return true;
        }
        at = next;
    }
    false
}

/// The device whose memory an address is in: `None` for host memory, pinned and managed memory included.
pub(crate) fn device_of(address: u64) -> Option<i32> {
    let state = STATE.read();
    if let Some((_, allocation)) = state.allocation_at(address) {
        return allocation.is_device().then_some(allocation.device);
    }
    match &state.mapping_at(address)?.1.target {
        Target::Device { segment, .. } => segment.location.device(),
        Target::Host(_) | Target::Multicast(_) => None,
    }
}

#[cfg(test)]
mod tests;
