//! The calls of stream-ordered allocation.

use std::ffi::c_void;

use cuda_abi::layout::{Access, POSIX_DESCRIPTOR, PoolProperties};
use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{CUdevice, CUdeviceptr, CUmemLocation, CUmemPool_attribute, CUmemoryPool, CUstream};

use super::layout::{Location, device, read_array, read_structure};
use super::pool::{Gauge, Pool};
use super::space::Right;
use super::state::{AllocationKind, STATE};
use super::vmm::ALL_HANDLE_TYPES;
use crate::error::{Result, write_out};
use crate::stream::{self, Work};
use crate::{context, dispatch, process};

const PINNED: u32 = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32;
const CAPTURING: u32 = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

// ---- allocations ----

/// Whether work on the stream becomes part of a graph; errors of the stream are reported when work is submitted.
fn is_capturing(stream: CUstream) -> bool {
    let mut status: u32 = 0;
    // SAFETY: `status` is a local variable of the out parameter's size.
    let result = unsafe { dispatch::cuStreamIsCapturing(stream, (&raw mut status).cast()) };
    result.is_ok() && status == CAPTURING
}

fn allocate(out: *mut CUdeviceptr, size_bytes: usize, pool: Option<usize>, stream: CUstream) -> Result {
    let context = context::current()?;
    if out.is_null() || size_bytes == 0 {
        return Err(INVALID);
    }
    let device = stream::target_device(stream)?;
    let is_graphs = is_capturing(stream);
    let reserve = || {
        let mut state = STATE.write();
        let pool = pool.unwrap_or_else(|| state.pools.current_of(device));
        state.reserve_pool_block(pool, size_bytes as u64, context.handle, is_graphs)
    };
    let mut start = reserve();
    if start == Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY) && !is_graphs {
        // What has been freed in some stream's order may be there when its work has run.
        stream::synchronize_context(&context)?;
        start = reserve();
    }
    let start = start?;
    if let Err(error) = stream::submit(stream, Work::Allocate(start)) {
        STATE.write().forget_pool_block(start);
        return Err(error);
    }
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, start) }
}

pub(crate) unsafe fn cuMemAllocAsync(out: *mut CUdeviceptr, size_bytes: usize, stream: CUstream) -> Result {
    allocate(out, size_bytes, None, stream)
}

pub(crate) unsafe fn cuMemAllocFromPoolAsync(
    out: *mut CUdeviceptr,
    size_bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> Result {
    allocate(out, size_bytes, Some(pool as usize), stream)
}

/// Takes memory of cuMemAlloc as well as of a pool.
pub(crate) unsafe fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) -> Result {
    context::current()?;
    if is_capturing(stream) {
        // Nothing is freed now; making the node finds out whether it may be.
        return stream::submit(stream, Work::Free(address));
    }
    let mut state = STATE.write();
    // It cannot be freed again from now on, whenever its place in the order comes.
    let taken = match state.allocations.get(&address).map(|found| found.kind) {
        Some(AllocationKind::Pool { .. }) => state.take_pool_block(address)?,
        Some(AllocationKind::Device | AllocationKind::PoolImport { .. }) => {
            let allocation = state.allocations.remove(&address).ok_or(INVALID)?;
            state.freed_in_order.insert(address, allocation.clone());
            Some(allocation)
        }
        _ => return Err(INVALID),
    };
    drop(state);
    let result = stream::submit(stream, Work::Free(address));
    if result.is_err() {
        let mut state = STATE.write();
        state.freed_in_order.remove(&address);
        state.untake_pool_block(address, taken);
    }
    result
}

// ---- pools ----

pub(crate) unsafe fn cuMemPoolCreate(
    out: *mut CUmemoryPool,
    properties: *const sys::CUmemPoolProps,
) -> Result {
    process::machine()?;
    // SAFETY: `properties` is the caller's structure or NULL.
    let properties = unsafe { read_structure(properties.cast::<PoolProperties>()) }?;
    if out.is_null() || properties.kind != PINNED || properties.reserved.iter().any(|byte| *byte != 0) {
        return Err(INVALID);
    }
    if properties.handle_types & !ALL_HANDLE_TYPES != 0 {
        return Err(INVALID);
    }
    let device = device(properties.location)?;
    if properties.handle_types & !POSIX_DESCRIPTOR.0 != 0 || properties.usage != 0 {
        // CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES says that there are no others.
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    let (most_bytes, handle_types) = (properties.most_bytes as u64, properties.handle_types);
    let handle = STATE.write().pools.create(device, most_bytes, handle_types);
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, handle as CUmemoryPool) }
}

pub(crate) unsafe fn cuMemPoolDestroy(pool: CUmemoryPool) -> Result {
    process::machine()?;
    let removed = STATE.write().pools.destroy(pool as usize)?;
    drop(removed);
    Ok(())
}

pub(crate) unsafe fn cuMemPoolTrimTo(pool: CUmemoryPool, keep_bytes: usize) -> Result {
    process::machine()?;
    let removed = STATE.write().pools.trim(pool as usize, keep_bytes as u64)?;
    drop(removed);
    Ok(())
}

fn current_pool(out: *mut CUmemoryPool, device: i32, is_default: bool) -> Result {
    process::device(device)?;
    let mut state = STATE.write();
    let pool = if is_default { state.pools.default_of(device) } else { state.pools.current_of(device) };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, pool as CUmemoryPool) }
}

pub(crate) unsafe fn cuDeviceGetDefaultMemPool(out: *mut CUmemoryPool, device: CUdevice) -> Result {
    current_pool(out, device, true)
}

pub(crate) unsafe fn cuDeviceGetMemPool(out: *mut CUmemoryPool, device: CUdevice) -> Result {
    current_pool(out, device, false)
}

pub(crate) unsafe fn cuDeviceSetMemPool(device: CUdevice, pool: CUmemoryPool) -> Result {
    process::device(device)?;
    STATE.write().pools.set_current(device, pool as usize)
}

/// The device of a location, for what only a device's pinned memory has.
///
/// # Safety
/// `location` is NULL or valid for a read.
unsafe fn pool_device(location: *mut CUmemLocation, kind: u32) -> Result<i32> {
    process::machine()?;
    // SAFETY: the caller of this function vouches for it.
    let location = unsafe { read_structure(location) }?;
    match kind {
        PINNED => device(location),
        2 => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        _ => Err(INVALID),
    }
}

pub(crate) unsafe fn cuMemGetDefaultMemPool(
    out: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    kind: u32,
) -> Result {
    // SAFETY: `location` is the caller's structure or NULL.
    current_pool(out, unsafe { pool_device(location, kind) }?, true)
}

pub(crate) unsafe fn cuMemGetMemPool(
    out: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    kind: u32,
) -> Result {
    // SAFETY: `location` is the caller's structure or NULL.
    current_pool(out, unsafe { pool_device(location, kind) }?, false)
}

pub(crate) unsafe fn cuMemSetMemPool(location: *mut CUmemLocation, kind: u32, pool: CUmemoryPool) -> Result {
    // SAFETY: `location` is the caller's structure or NULL.
    let device = unsafe { pool_device(location, kind) }?;
    STATE.write().pools.set_current(device, pool as usize)
}

// ---- access and attributes ----

pub(crate) unsafe fn cuMemPoolSetAccess(
    pool: CUmemoryPool,
    descriptions: *const sys::CUmemAccessDesc,
    count: usize,
) -> Result {
    process::machine()?;
    // SAFETY: the caller passes an array of `count` descriptions or NULL.
    let descriptions = unsafe { read_array(descriptions.cast::<Access>(), count) }?;
    let mut state = STATE.write();
    let known = state.pools.get(pool as usize)?;
    let (device, mut rights) = (known.device, known.rights);
    let memory = Location::Device(device);
    descriptions.iter().try_for_each(|description| rights.apply(*description, memory))?;
    // The device that the memory is on always has access.
    if rights.right(device) != Right::ReadWrite {
        return Err(INVALID);
    }
    state.set_pool_rights(pool as usize, rights)
}

pub(crate) unsafe fn cuMemPoolGetAccess(
    out: *mut u32,
    pool: CUmemoryPool,
    location: *mut CUmemLocation,
) -> Result {
    process::machine()?;
    // SAFETY: `location` is the caller's structure or NULL.
    let device = device(unsafe { read_structure(location) }?)?;
    let flags = STATE.write().pools.get(pool as usize)?.rights.flags(device);
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, flags) }
}

/// An attribute's value and size.
enum Value {
    Int(i32),
    Bytes(u64),
}

/// The driver API with which the attributes from 9 on came: CUDA 13.2's cuda.h is the first to have them. CUDA 13.0's driver
/// refuses them (seen with 580.159.04).
const FIRST_WITH_PROPERTIES: i32 = 13020;

impl Pool {
    /// What an imported pool has, the driver does not say (seen with 580.159.04, of `USED_MEM_CURRENT`).
    fn attribute(&self, attribute: CUmemPool_attribute, driver: i32) -> Option<Value> {
        Some(match attribute {
            9.. if driver < FIRST_WITH_PROPERTIES => return None,
            5..=8 if self.origin.is_some() => return None,
            1..=3 => Value::Int(self.reuse[attribute as usize - 1]),
            4 => Value::Bytes(self.release_threshold_bytes),
            5 => Value::Bytes(self.reserved.current_bytes),
            6 => Value::Bytes(self.reserved.high_bytes),
            7 => Value::Bytes(self.used.current_bytes),
            8 => Value::Bytes(self.used.high_bytes),
            // What it was created with.
            9 => Value::Int(PINNED.cast_signed()),
            10 => Value::Int(self.handle_types.cast_signed()),
            11 => Value::Int(self.device),
            12 => Value::Int(CUmemLocation::of(self.device).type_.cast_signed()),
            13 => Value::Bytes(self.max_size_bytes),
            14 => Value::Int(0),
            _ => return None,
        })
    }
}

pub(crate) unsafe fn cuMemPoolGetAttribute(
    pool: CUmemoryPool,
    attribute: CUmemPool_attribute,
    out: *mut c_void,
) -> Result {
    process::machine()?;
    let driver = process::release()?.cuda_version;
    let value = STATE.write().pools.get(pool as usize)?.attribute(attribute, driver).ok_or(INVALID)?;
    match value {
        // SAFETY: the caller's out parameter is of the attribute's type.
        Value::Int(value) => unsafe { write_out(out.cast(), value) },
        // SAFETY: as above.
        Value::Bytes(value) => unsafe { write_out(out.cast(), value) },
    }
}

/// High-water marks can only be set back.
pub(crate) unsafe fn cuMemPoolSetAttribute(
    pool: CUmemoryPool,
    attribute: CUmemPool_attribute,
    value: *mut c_void,
) -> Result {
    process::machine()?;
    let mut state = STATE.write();
    let pool = state.pools.get(pool as usize)?;
    match attribute {
        1..=3 => {
            // SAFETY: the caller's value is of the attribute's type.
            pool.reuse[attribute as usize - 1] = unsafe { read_structure(value.cast::<i32>()) }?;
        }
        4 => {
            // SAFETY: as above.
            pool.release_threshold_bytes = unsafe { read_structure(value.cast::<u64>()) }?;
        }
        6 | 8 => {
            // SAFETY: as above.
            if unsafe { read_structure(value.cast::<u64>()) }? != 0 {
                return Err(INVALID);
            }
            let gauge: &mut Gauge = if attribute == 6 { &mut pool.reserved } else { &mut pool.used };
            gauge.high_bytes = gauge.current_bytes;
        }
        _ => return Err(INVALID),
    }
    Ok(())
}
