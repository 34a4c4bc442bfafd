//! The entry points of stream-ordered allocation. Calls for other pools, and invalid ones, are left to the driver.

use std::ffi::{c_int, c_ulonglong, c_void};
use std::ptr::null_mut;

use cuda_abi::sys;
use cuda_abi::types::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUmemAccessDesc, CUmemAllocationHandleType,
    CUmemAllocationType, CUmemLocation, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUresult,
    CUstream,
};

use super::super::graph;
use super::state::{Id, Pool, pools};
use super::stream;
use super::{after_synchronization, allocate, free, freed, is_allocation, poll_frees, set_access, trim};
use crate::cuda::activation::is_started;
use crate::cuda::entry_points::Index;
use crate::cuda::result::{OUT_OF_MEMORY, SUCCESS};
use crate::cuda::stream_capture::relaxed;
use crate::cuda::{context, driver, gate, taint};
use cuda_abi::layout::{Access, PoolProperties};

const FOLLOW_EVENTS: CUmemPool_attribute =
    sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES as CUmemPool_attribute;
const OPPORTUNISTIC: CUmemPool_attribute =
    sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC as CUmemPool_attribute;
const INTERNAL: CUmemPool_attribute =
    sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES as CUmemPool_attribute;
const THRESHOLD: CUmemPool_attribute =
    sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as CUmemPool_attribute;
const RESERVED: CUmemPool_attribute =
    sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT as CUmemPool_attribute;
const RESERVED_HIGH: CUmemPool_attribute =
    sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH as CUmemPool_attribute;
const USED: CUmemPool_attribute =
    sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT as CUmemPool_attribute;
const USED_HIGH: CUmemPool_attribute =
    sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH as CUmemPool_attribute;

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
    let mut pool: CUmemoryPool = null_mut();
    // SAFETY: `pool` is a local variable.
    let result = unsafe { driver::cuDeviceGetMemPool(&raw mut pool, device) };
    if result == SUCCESS { meet(pool, device) } else { None }
}

/// Looks a pool up by its handle; a device's default pool is recorded here first.
fn meet(pool: CUmemoryPool, device: c_int) -> Option<Id> {
    let known = pools().id_of(pool as usize);
    if known.is_some() {
        return known;
    }
    let mut default: CUmemoryPool = null_mut();
    // SAFETY: `default` is a local variable.
    let result = unsafe { driver::cuDeviceGetDefaultMemPool(&raw mut default, device) };
    if result != SUCCESS || default != pool {
        return None;
    }
    let mut pools = pools();
    // Another thread may have recorded it meanwhile.
    let known = pools.id_of(pool as usize);
    Some(known.unwrap_or_else(|| pools.add(pool as usize, device, 0)))
}

type AllocAsync = unsafe extern "C" fn(*mut CUdeviceptr, usize, CUstream) -> CUresult;

/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuMemAllocAsync(
    real: AllocAsync,
    out: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let meant = stream::of_call(stream, real as usize, Index::cuMemAllocAsync_ptsz);
    // SAFETY: the parameters are those of our own caller.
    match unsafe { serve(out, bytes, None, meant) } {
        Some(result) => result,
        // SAFETY: as above.
        None => by_the_driver(meant, || unsafe { real(out, bytes, stream) }),
    }
}

type AllocFromPoolAsync = unsafe extern "C" fn(*mut CUdeviceptr, usize, CUmemoryPool, CUstream) -> CUresult;

/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuMemAllocFromPoolAsync(
    real: AllocFromPoolAsync,
    out: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> CUresult {
    let meant = stream::of_call(stream, real as usize, Index::cuMemAllocFromPoolAsync_ptsz);
    // SAFETY: the parameters are those of our own caller.
    match unsafe { serve(out, bytes, Some(pool), meant) } {
        Some(result) => result,
        // SAFETY: as above.
        None => by_the_driver(meant, || unsafe { real(out, bytes, pool, stream) }),
    }
}

/// In a capture it becomes a node of the graph.
fn by_the_driver(stream: CUstream, allocate: impl Fn() -> CUresult) -> CUresult {
    graph::capturing(stream, || stream::device(stream), allocate)
}

/// What is freed in a capture becomes a node of its graph, which can be only what a graph has allocated: memory of
/// ours the driver does not know, and refuses (CUDA driver API reference, cuMemFreeAsync).
///
/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuMemFreeAsync(
    real: unsafe extern "C" fn(CUdeviceptr, CUstream) -> CUresult,
    address: CUdeviceptr,
    stream: CUstream,
) -> CUresult {
    let meant = stream::of_call(stream, real as usize, Index::cuMemFreeAsync_ptsz);
    match serve_free(address, meant) {
        Some(result) => result,
        // SAFETY: the parameters are those of our own caller.
        None => unsafe { real(address, stream) },
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

/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuMemPoolCreate(
    real: unsafe extern "C" fn(*mut CUmemoryPool, *const CUmemPoolProps) -> CUresult,
    out: *mut CUmemoryPool,
    properties: *const CUmemPoolProps,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    let result = unsafe { real(out, properties) };
    if result != SUCCESS || !is_started() || out.is_null() || properties.is_null() {
        return result;
    }
    // SAFETY: the driver has read it; ours has the same layout, with plain numbers.
    let properties = unsafe { properties.cast::<PoolProperties>().read() };
    if properties.is_plain() {
        // SAFETY: the driver has written it.
        let pool = unsafe { *out };
        pools().add(pool as usize, properties.location.id, properties.most_bytes as u64);
    }
    result
}

/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuMemPoolDestroy(
    real: unsafe extern "C" fn(CUmemoryPool) -> CUresult,
    pool: CUmemoryPool,
) -> CUresult {
    // Before the call: the driver may reuse the handle at once.
    let id = if is_started() { pools().unname(pool as usize) } else { None };
    // SAFETY: the parameters are those of our own caller.
    let result = unsafe { real(pool) };
    let Some(id) = id else { return result };
    if result == SUCCESS {
        pools().destroy(id);
        relaxed(|| {
            poll_frees(id);
            trim(id, Pool::kept_bytes);
        });
    } else {
        pools().name(pool as usize, id);
    }
    result
}

/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuMemPoolTrimTo(
    real: unsafe extern "C" fn(CUmemoryPool, usize) -> CUresult,
    pool: CUmemoryPool,
    keep_bytes: usize,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    let result = unsafe { real(pool, keep_bytes) };
    if result == SUCCESS
        && is_started()
        && let Some(id) = known(pool)
    {
        relaxed(|| {
            poll_frees(id);
            trim(id, |_| keep_bytes as u64);
        });
    }
    result
}

fn known(pool: CUmemoryPool) -> Option<Id> {
    pools().id_of(pool as usize)
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

type DevicePool = unsafe extern "C" fn(*mut CUmemoryPool, CUdevice) -> CUresult;

/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuDeviceGetDefaultMemPool(
    real: DevicePool,
    out: *mut CUmemoryPool,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    let result = unsafe { real(out, device) };
    // SAFETY: as above.
    unsafe { handed_out(result, out, device) }
}

/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuDeviceGetMemPool(
    real: DevicePool,
    out: *mut CUmemoryPool,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    let result = unsafe { real(out, device) };
    // SAFETY: as above.
    unsafe { handed_out(result, out, device) }
}

type LocationPool =
    unsafe extern "C" fn(*mut CUmemoryPool, *mut CUmemLocation, CUmemAllocationType) -> CUresult;

/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuMemGetDefaultMemPool(
    real: LocationPool,
    out: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    kind: CUmemAllocationType,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    let result = unsafe { real(out, location, kind) };
    // SAFETY: as above; the driver has read the location.
    unsafe { handed_out_for(result, out, location) }
}

/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuMemGetMemPool(
    real: LocationPool,
    out: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    kind: CUmemAllocationType,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    let result = unsafe { real(out, location, kind) };
    // SAFETY: as above; the driver has read the location.
    unsafe { handed_out_for(result, out, location) }
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

/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuMemPoolSetAccess(
    real: unsafe extern "C" fn(CUmemoryPool, *const CUmemAccessDesc, usize) -> CUresult,
    pool: CUmemoryPool,
    access: *const CUmemAccessDesc,
    count: usize,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    let result = unsafe { real(pool, access, count) };
    if result != SUCCESS || !is_started() || access.is_null() || count == 0 {
        return result;
    }
    // SAFETY: the driver has read that many; ours have the same layout, with plain numbers.
    let access = unsafe { std::slice::from_raw_parts(access.cast::<Access>(), count) };
    relaxed(|| set_access(pool as usize, access))
}

/// What the driver's own pool has is what graphs have allocated.
///
/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuMemPoolGetAttribute(
    real: unsafe extern "C" fn(CUmemoryPool, CUmemPool_attribute, *mut c_void) -> CUresult,
    pool: CUmemoryPool,
    attribute: CUmemPool_attribute,
    value: *mut c_void,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    let result = unsafe { real(pool, attribute, value) };
    if result != SUCCESS || !is_started() || value.is_null() {
        return result;
    }
    let ours = pools().named(pool as usize).and_then(|pool| match attribute {
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

/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuMemPoolSetAttribute(
    real: unsafe extern "C" fn(CUmemoryPool, CUmemPool_attribute, *mut c_void) -> CUresult,
    pool: CUmemoryPool,
    attribute: CUmemPool_attribute,
    value: *mut c_void,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    let result = unsafe { real(pool, attribute, value) };
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
    if let Some(pool) = pools().named(pool as usize) {
        pool.set_attribute(attribute, number);
    }
    result
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

// ---- other processes ----

/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuMemPoolExportToShareableHandle(
    real: unsafe extern "C" fn(*mut c_void, CUmemoryPool, CUmemAllocationHandleType, c_ulonglong) -> CUresult,
    out: *mut c_void,
    pool: CUmemoryPool,
    kind: CUmemAllocationHandleType,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    let result = unsafe { real(out, pool, kind, flags) };
    taint::mark("cuMemPoolExportToShareableHandle", result);
    result
}

/// # Safety
/// As for the driver's.
pub(crate) unsafe fn cuMemPoolImportFromShareableHandle(
    real: unsafe extern "C" fn(
        *mut CUmemoryPool,
        *mut c_void,
        CUmemAllocationHandleType,
        c_ulonglong,
    ) -> CUresult,
    out: *mut CUmemoryPool,
    handle: *mut c_void,
    kind: CUmemAllocationHandleType,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    let result = unsafe { real(out, handle, kind, flags) };
    taint::mark("cuMemPoolImportFromShareableHandle", result);
    result
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

/// # Safety
/// As for the driver's.
#[inline]
pub(crate) unsafe fn cuStreamSynchronize(
    real: unsafe extern "C" fn(CUstream) -> CUresult,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    synchronized(|| unsafe { real(stream) })
}

/// # Safety
/// As for the driver's.
#[inline]
pub(crate) unsafe fn cuEventSynchronize(
    real: unsafe extern "C" fn(CUevent) -> CUresult,
    event: CUevent,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    synchronized(|| unsafe { real(event) })
}

/// # Safety
/// As for the driver's.
#[inline]
pub(crate) unsafe fn cuCtxSynchronize(real: unsafe extern "C" fn() -> CUresult) -> CUresult {
    // SAFETY: as for our own caller.
    synchronized(|| unsafe { real() })
}

/// # Safety
/// As for the driver's.
#[inline]
pub(crate) unsafe fn cuCtxSynchronize_v2(
    real: unsafe extern "C" fn(CUcontext) -> CUresult,
    context: CUcontext,
) -> CUresult {
    // SAFETY: the parameters are those of our own caller.
    synchronized(|| unsafe { real(context) })
}
