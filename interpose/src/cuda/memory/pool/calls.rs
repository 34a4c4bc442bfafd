//! The entry points of stream-ordered allocation. Calls for other pools, and invalid ones, are left to the driver.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use cuda_abi::sys::CUmemPool_attribute as Attribute;
use cuda_abi::types::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUmemAccessDesc, CUmemAllocationType, CUmemLocation,
    CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUresult, CUstream,
};

use super::super::graph;
use super::state::{Id, POOLS, Pool};
use super::stream;
use super::{after_synchronization, allocate, free, freed, is_allocation, poll_and_trim, set_access, shared};
use crate::cuda::activation::is_started;
use crate::cuda::entry_points::Index;
use crate::cuda::handler::handlers;
use crate::cuda::result::{INVALID_VALUE, OUT_OF_MEMORY, SUCCESS};
use crate::cuda::stream_capture::relaxed;
use crate::cuda::{context, driver, gate};
use cuda_abi::layout::{Access, PoolProperties};

const FOLLOW_EVENTS: u32 = Attribute::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES as u32;
const OPPORTUNISTIC: u32 = Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC as u32;
const INTERNAL: u32 = Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES as u32;
const THRESHOLD: u32 = Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as u32;
const HANDLE_TYPES: u32 = Attribute::CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES as u32;
pub(super) const RESERVED: u32 = Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT as u32;
pub(super) const RESERVED_HIGH: u32 = Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH as u32;
pub(super) const USED: u32 = Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT as u32;
pub(super) const USED_HIGH: u32 = Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH as u32;

// ---- allocations ----

/// Serves an allocation; `None` if it is for the driver.
///
/// # Safety
/// `out` is NULL or the caller's out parameter.
unsafe fn serve(
    out: *mut CUdeviceptr,
    bytes: usize,
    pool: Option<CUmemoryPool>,
    stream: CUstream,
) -> Option<CUresult> {
    if !is_started() || out.is_null() || bytes == 0 || context::current().is_none() {
        return None;
    }
    let served = relaxed(|| {
        if stream::is_captured(stream) {
            return None;
        }
        let stream_id = stream::id(stream)?;
        let pool = match pool {
            Some(pool) => known(pool)?,
            None => current_pool(stream::device(stream)?)?,
        };
        Some(allocate(pool, bytes as u64, stream, stream_id))
    });
    match served? {
        Ok(address) => {
            // SAFETY: `out` is not NULL, so it is the caller's out parameter.
            unsafe { out.write(address) };
            Some(SUCCESS)
        }
        Err(OUT_OF_MEMORY) => Some(OUT_OF_MEMORY),
        // The driver may serve the program's own call where ours failed.
        Err(_) => None,
    }
}

/// The pool from which a device's allocations are taken, if it is one of ours.
fn current_pool(device: c_int) -> Option<Id> {
    // SAFETY: the call writes to a local variable.
    let pool = driver::ask(null_mut(), |pool| unsafe { driver::cuDeviceGetMemPool(pool, device) });
    meet(pool.ok()?, device)
}

/// Looks a pool up by its handle; a device's default pool is recorded here first.
fn meet(pool: CUmemoryPool, device: c_int) -> Option<Id> {
    let known = POOLS.lock().id_of(pool as usize);
    if known.is_some() {
        return known;
    }
    // SAFETY: the call writes to a local variable.
    let default = driver::ask(null_mut(), |pool| unsafe { driver::cuDeviceGetDefaultMemPool(pool, device) });
    if default != Ok(pool) {
        return None;
    }
    let mut pools = POOLS.lock();
    // Another thread may have recorded it meanwhile.
    let known = pools.id_of(pool as usize);
    Some(known.unwrap_or_else(|| pools.add(pool as usize, device, 0)))
}

/// In a capture it becomes a node of the graph.
fn by_the_driver(stream: CUstream, allocate: impl Fn() -> CUresult) -> CUresult {
    graph::capturing(stream, || stream::device(stream), allocate)
}

handlers! {
    fn cuMemAllocAsync(out: *mut CUdeviceptr, bytes: usize, stream: CUstream) |call, real| {
        let meant = stream::of_call(stream, real as usize, Index::cuMemAllocAsync_ptsz);
        // SAFETY: the caller's out parameter.
        unsafe { serve(out, bytes, None, meant) }.unwrap_or_else(|| by_the_driver(meant, call))
    }

    fn cuMemAllocFromPoolAsync(
        out: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream
    ) |call, real| {
        let meant = stream::of_call(stream, real as usize, Index::cuMemAllocFromPoolAsync_ptsz);
        // SAFETY: the caller's out parameter.
        unsafe { serve(out, bytes, Some(pool), meant) }.unwrap_or_else(|| {
            // The driver's own pool behind it would allocate.
            if shared::is_imported(pool) { INVALID_VALUE } else { by_the_driver(meant, call) }
        })
    }

    /// What is freed in a capture becomes a node of its graph, which can be only what a graph has allocated: memory of
    /// ours the driver does not know, and refuses (CUDA driver API reference, cuMemFreeAsync).
    fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) |call, real| {
        let meant = stream::of_call(stream, real as usize, Index::cuMemFreeAsync_ptsz);
        serve_free(address, meant).unwrap_or_else(call)
    }
}

fn serve_free(address: CUdeviceptr, stream: CUstream) -> Option<CUresult> {
    // No driver call for pools that are not ours.
    let is_ours = || is_allocation(address) || freed::is_allocation(address);
    if !is_started() || !is_ours() || context::current().is_none() {
        return None;
    }
    relaxed(|| {
        if stream::is_captured(stream) {
            return None;
        }
        free(address, stream).or_else(|| freed::free(address, stream))
    })
}

// ---- pools ----

handlers! {
    fn cuMemPoolCreate(out: *mut CUmemoryPool, properties: *const CUmemPoolProps) |call| {
        let result = call();
        if result != SUCCESS || !is_started() || out.is_null() || properties.is_null() {
            return result;
        }
        // SAFETY: the driver has read it; ours has the same layout, with plain numbers.
        let properties = unsafe { properties.cast::<PoolProperties>().read() };
        if properties.is_plain() {
            // SAFETY: the driver has written it.
            let pool = unsafe { *out };
            let Some(pool) = shared::without_handles(pool, &properties) else { return result };
            let mut pools = POOLS.lock();
            let id = pools.add(pool as usize, properties.location.id, properties.most_bytes as u64);
            if let Some(pool) = pools.pool(id) {
                pool.handle_types = properties.handle_types;
            }
            drop(pools);
            // SAFETY: as above; it is the caller's out parameter.
            unsafe { *out = pool };
        }
        result
    }

    fn cuMemPoolDestroy(pool: CUmemoryPool) |call| {
        // Before the call: the driver may reuse the handle at once.
        let id = if is_started() { POOLS.lock().unname(pool as usize) } else { None };
        let imported = shared::unname(pool);
        let result = call();
        let Some(id) = id else {
            if result != SUCCESS {
                shared::name(pool, imported);
            }
            return result;
        };
        if result == SUCCESS {
            POOLS.lock().destroy(id);
            poll_and_trim(id, Pool::kept_bytes);
        } else {
            POOLS.lock().name(pool as usize, id);
        }
        result
    }

    fn cuMemPoolTrimTo(pool: CUmemoryPool, keep_bytes: usize) |call| {
        let result = call();
        if result == SUCCESS
            && is_started()
            && let Some(id) = known(pool)
        {
            poll_and_trim(id, |_| keep_bytes as u64);
        }
        result
    }

    fn cuDeviceGetMemPool(out: *mut CUmemoryPool, device: CUdevice) |call| {
        // SAFETY: the caller's out parameter.
        unsafe { handed_out(call(), out, device) }
    }

    fn cuMemGetMemPool(
        out: *mut CUmemoryPool, location: *mut CUmemLocation, kind: CUmemAllocationType
    ) |call| {
        // SAFETY: the caller's out parameter; the driver has read the location.
        unsafe { handed_out_for(call(), out, location) }
    }
}

/// What is done with a device's default pool is the same.
pub(crate) use {cuDeviceGetMemPool as cuDeviceGetDefaultMemPool, cuMemGetMemPool as cuMemGetDefaultMemPool};

fn known(pool: CUmemoryPool) -> Option<Id> {
    POOLS.lock().id_of(pool as usize)
}

/// Notes a pool that the driver has handed out.
///
/// # Safety
/// `out` is what the driver has written if the call succeeded, or NULL.
unsafe fn handed_out(result: CUresult, out: *mut CUmemoryPool, device: c_int) -> CUresult {
    if result == SUCCESS && is_started() && !out.is_null() {
        // SAFETY: the driver has written it.
        let pool = unsafe { *out };
        relaxed(|| meet(pool, device));
    }
    result
}

/// # Safety
/// As for [`handed_out`]; the location can be read if the call succeeded.
unsafe fn handed_out_for(result: CUresult, out: *mut CUmemoryPool, location: *mut CUmemLocation) -> CUresult {
    if result != SUCCESS || location.is_null() {
        return result;
    }
    // SAFETY: the caller vouches for it.
    let location = unsafe { location.read() };
    // For another place than a device its number is none of a device with that pool.
    // SAFETY: as above.
    unsafe { handed_out(result, out, location.id) }
}

// ---- access and attributes ----

handlers! {
    fn cuMemPoolSetAccess(pool: CUmemoryPool, access: *const CUmemAccessDesc, count: usize) |call| {
        let result = call();
        if result != SUCCESS || !is_started() || access.is_null() || count == 0 {
            return result;
        }
        // SAFETY: the driver has read that many; ours have the same layout, with plain numbers.
        let access = unsafe { std::slice::from_raw_parts(access.cast::<Access>(), count) };
        relaxed(|| match set_access(pool as usize, access) {
            SUCCESS => shared::set_access(pool, access),
            error => error,
        })
    }

    /// What the driver's own pool has is what graphs have allocated.
    fn cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void) |call| {
        let result = call();
        if result != SUCCESS || !is_started() || value.is_null() {
            return result;
        }
        if attribute == HANDLE_TYPES {
            if let Some(types) = shared::handle_types(pool) {
                // SAFETY: the driver has written a number of this size.
                unsafe { value.cast::<c_uint>().write_unaligned(types) };
            }
            return result;
        }
        if let Some(ours) = shared::gauge(pool, attribute) {
            // SAFETY: the driver has written a number of this size.
            unsafe { value.cast::<u64>().write_unaligned(ours) };
            return result;
        }
        let ours = POOLS.lock().named(pool as usize).and_then(|pool| match attribute {
            RESERVED => Some(pool.reserved.current_bytes),
            RESERVED_HIGH => Some(pool.reserved.high_bytes),
            USED => Some(pool.used.current_bytes),
            USED_HIGH => Some(pool.used.high_bytes),
            _ => None,
        });
        if let Some(ours) = ours {
            let value = value.cast::<u64>();
            // SAFETY: the driver has written a number of this size.
            let drivers = unsafe { value.read_unaligned() };
            // SAFETY: as above.
            unsafe { value.write_unaligned(drivers + ours) };
        }
        result
    }

    fn cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void) |call| {
        let result = call();
        if result != SUCCESS || !is_started() || value.is_null() {
            return result;
        }
        let number = match attribute {
            FOLLOW_EVENTS | OPPORTUNISTIC | INTERNAL => {
                // SAFETY: the driver has read a number of this size.
                let is_on = unsafe { value.cast::<c_int>().read_unaligned() };
                u64::from(is_on != 0)
            }
            // SAFETY: as above.
            _ => unsafe { value.cast::<u64>().read_unaligned() },
        };
        if let Some(pool) = POOLS.lock().named(pool as usize) {
            pool.set_attribute(attribute, number);
        }
        shared::reset_gauge(pool, attribute);
        result
    }
}

impl Pool {
    fn set_attribute(&mut self, attribute: CUmemPool_attribute, value: u64) {
        match attribute {
            OPPORTUNISTIC => self.is_opportunistic = value != 0,
            INTERNAL => self.may_make_streams_wait = value != 0,
            THRESHOLD => self.release_threshold_bytes = value,
            RESERVED_HIGH => self.reserved.high_bytes = self.reserved.current_bytes,
            USED_HIGH => self.used.high_bytes = self.used.current_bytes,
            _ => {}
        }
    }
}

// ---- synchronisation ----

#[inline(always)]
fn synchronized(wait: impl FnOnce() -> CUresult) -> CUresult {
    let result = {
        let _waiting = gate::wait_for_gpu();
        wait()
    };
    if result == SUCCESS {
        after_synchronization();
    }
    result
}

handlers! {
    #[inline]
    fn cuStreamSynchronize(stream: CUstream) |call| {
        synchronized(call)
    }

    #[inline]
    fn cuEventSynchronize(event: CUevent) |call| {
        synchronized(call)
    }

    #[inline]
    fn cuCtxSynchronize() |call| {
        synchronized(call)
    }

    #[inline]
    fn cuCtxSynchronize_v2(context: CUcontext) |call| {
        synchronized(call)
    }
}
