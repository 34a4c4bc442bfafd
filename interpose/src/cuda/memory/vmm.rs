//! Programs that manage virtual memory themselves.
//!
//! Their physical memory is recreated when the process is restored and then has another driver handle. So programs
//! get handles of ours, which stay valid: the ID of the physical allocation and a mark that no driver handle has.
//! Other handles are passed on. As with the driver, a physical allocation has one handle, however often it is
//! created, retained or imported, and each of these needs a release of its own.
//!
//! Invalid calls are left to the driver, and so is memory that is not ours, which the driver saves itself. Memory of
//! cuMemAlloc is mapped in the same way, but the program may not use these calls on it.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::mem::MaybeUninit;
use std::os::fd::IntoRawFd;

use ckpt_protocol::agent::RegionKind;
use cuda_abi::types::*;

use super::ipc::descriptors;
use super::physical::{self, Id, PhysicalAllocation, Source};
use super::reclaim::make_room;
use crate::cuda::activation::is_started;
use crate::cuda::handler::handlers;
use crate::cuda::result::{INVALID_VALUE, OUT_OF_MEMORY, SUCCESS};
use crate::cuda::taint;
use cuda_abi::layout::{Access, POSIX_DESCRIPTOR, Properties};

/// The prefix of our handles: an invalid pointer on this machine, and larger than any counter.
const MARK: u64 = 0x436b << 48;
/// Of a handle by which a process has imported its own memory: the driver does not export it again (seen with
/// 580.159.04), as it does the one by which the memory was created. Otherwise both are the same.
const REIMPORTED: u64 = 1 << ID_BITS;
const ID_BITS: u32 = 47;

pub(super) fn handle_of(id: Id) -> CUmemGenericAllocationHandle {
    MARK | id
}

/// The physical allocation that a handle of ours names, whether it exists or not.
fn id_of(handle: CUmemGenericAllocationHandle) -> Option<Id> {
    let id = (handle ^ MARK) & !REIMPORTED;
    (id >> ID_BITS == 0).then_some(id)
}

/// The handle for a physical allocation that the program has imported.
fn imported_handle_of(id: Id) -> CUmemGenericAllocationHandle {
    let registry = physical::registry();
    let is_own = registry
        .allocations
        .get(&id)
        .is_some_and(|allocation| matches!(allocation.source, Source::Created(_) | Source::Multicast(_)));
    handle_of(id) | if is_own { REIMPORTED } else { 0 }
}

/// Whether a physical allocation is the program's own to map and to release.
fn is_program(allocation: &PhysicalAllocation) -> bool {
    allocation.kind == RegionKind::Program
}

/// The meaning of a handle of the program.
pub(super) enum Named {
    MappedAllocation {
        id: Id,
        handle: CUmemGenericAllocationHandle,
    },
    /// A handle of the driver, or an invalid one.
    Other,
    /// A handle of ours that is no longer valid.
    Gone,
}

pub(super) fn named(handle: CUmemGenericAllocationHandle) -> Named {
    let Some(id) = id_of(handle).filter(|_| is_started()) else { return Named::Other };
    let registry = physical::registry();
    let allocation = registry
        .allocations
        .get(&id)
        .filter(|allocation| is_program(allocation) && allocation.references > 0);
    allocation.map_or(Named::Gone, |allocation| Named::MappedAllocation { id, handle: allocation.handle })
}

/// The driver's handle for one that a program passes.
fn to_driver(handle: CUmemGenericAllocationHandle) -> Result<CUmemGenericAllocationHandle, CUresult> {
    match named(handle) {
        Named::MappedAllocation { handle, .. } => Ok(handle),
        Named::Other => Ok(handle),
        Named::Gone => Err(INVALID_VALUE),
    }
}

/// Whether a range has memory of ours that the program did not map itself.
fn touches_allocations(address: CUdeviceptr, bytes: usize) -> bool {
    is_started()
        && physical::registry()
            .allocations_in(address, bytes as u64)
            .any(|(_, allocation)| !is_program(allocation))
}

fn code(result: Result<(), CUresult>) -> CUresult {
    result.err().unwrap_or(SUCCESS)
}

/// Whether memory of ours is mapped at an address, and which physical allocation it is if it is the program's own.
pub(super) fn program_allocation_at(address: CUdeviceptr) -> Option<Option<Id>> {
    let registry = physical::registry();
    let (id, allocation) = registry.allocations_in(address, 1).next()?;
    Some(is_program(allocation).then_some(id))
}

/// The kinds of handles that the program has asked for when it created a physical allocation or a multicast object,
/// without the one that was added.
pub(super) fn asked_handle_types(id: Id) -> Option<u32> {
    match physical::registry().allocations.get(&id)?.source {
        Source::Created(properties) => Some(properties.handle_types),
        Source::Multicast(properties) => u32::try_from(properties.handleTypes).ok(),
        Source::Shared(_) | Source::Unknown => None,
    }
}

handlers! {
    fn cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle, bytes: usize, properties: *const CUmemAllocationProp,
        flags: c_ulonglong
    ) |call| {
        if !is_started() || handle.is_null() || properties.is_null() || flags != 0 {
            return call();
        }
        // SAFETY: the program passes such a structure; any bytes are a valid value of ours.
        let properties = unsafe { properties.cast::<Properties>().read_unaligned() };
        descriptors::sweep();
        let create = || physical::create(RegionKind::Program, bytes as u64, &properties);
        let created = match create() {
            Err(OUT_OF_MEMORY) if properties.location.device().is_some_and(make_room) => create(),
            result => result,
        };
        match created {
            Ok(id) => {
                if !properties.is_of_device() && !properties.is_of_host() {
                    physical::hinder(id, "cuMemCreate");
                }
                // SAFETY: the program passes the address of a handle, which is not null.
                unsafe { handle.write_unaligned(handle_of(id)) };
                SUCCESS
            }
            Err(error) => error,
        }
    }

    fn cuMemRelease(handle: CUmemGenericAllocationHandle) |call| {
        match named(handle) {
            Named::MappedAllocation { id, .. } if physical::try_release(id) => {
                descriptors::sweep();
                SUCCESS
            }
            Named::MappedAllocation { .. } | Named::Gone => INVALID_VALUE,
            Named::Other => call(),
        }
    }

    fn cuMemMap(
        address: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle,
        flags: c_ulonglong
    ) |call, real| {
        match named(handle) {
            Named::MappedAllocation { id, .. } if offset == 0 && flags == 0 => {
                code(physical::map(id, address, bytes as u64))
            }
            Named::MappedAllocation { id, handle } => {
                // SAFETY: the parameters are those of our own caller, but for the handle, which is the driver's of it.
                let result = unsafe { real(address, bytes, offset, handle, flags) };
                if result == SUCCESS {
                    physical::hinder(id, "cuMemMap");
                }
                result
            }
            Named::Gone => INVALID_VALUE,
            Named::Other => call(),
        }
    }

    fn cuMemUnmap(address: CUdeviceptr, bytes: usize) |call| {
        if !is_started() {
            return call();
        }
        if touches_allocations(address, bytes) {
            return INVALID_VALUE;
        }
        let result = code(physical::unmap(address, bytes as u64));
        descriptors::sweep();
        result
    }

    fn cuMemSetAccess(
        address: CUdeviceptr, bytes: usize, descriptions: *const CUmemAccessDesc, count: usize
    ) |call| {
        let access = descriptions.cast::<Access>();
        // A slice has an address and a length that an array of any program's has.
        let is_array =
            !access.is_null() && access.is_aligned() && count <= isize::MAX as usize / size_of::<Access>();
        if !is_started() || !is_array {
            return call();
        }
        if touches_allocations(address, bytes) {
            return INVALID_VALUE;
        }
        // SAFETY: the program passes an array of that many descriptions, which no other thread changes meanwhile; any
        // bytes are a valid value of ours.
        let access = unsafe { std::slice::from_raw_parts(access, count) };
        code(physical::set_access(address, bytes as u64, access))
    }

    fn cuMemGetAccess(flags: *mut c_ulonglong, location: *const CUmemLocation, address: CUdeviceptr) |call| {
        if touches_allocations(address, 1) {
            return INVALID_VALUE;
        }
        call()
    }

    fn cuMemRetainAllocationHandle(handle: *mut CUmemGenericAllocationHandle, address: *mut c_void) |call| {
        if !is_started() || handle.is_null() {
            return call();
        }
        match program_allocation_at(address as CUdeviceptr) {
            Some(Some(id)) if physical::retain(id) => {
                // SAFETY: the program passes the address of a handle, which is not null.
                unsafe { handle.write_unaligned(handle_of(id)) };
                SUCCESS
            }
            Some(_) => INVALID_VALUE,
            None => call(),
        }
    }

    fn cuMemGetAllocationPropertiesFromHandle(
        properties: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle
    ) |_, real| {
        let translated = match to_driver(handle) {
            Ok(handle) => handle,
            Err(error) => return error,
        };
        // SAFETY: the parameters are those of our own caller, but for the handle, which is the driver's of it.
        let result = unsafe { real(properties, translated) };
        if result == SUCCESS
            && !properties.is_null()
            && let Some(asked) = id_of(handle).and_then(asked_handle_types)
        {
            // SAFETY: the field of a structure that the driver has just written.
            let handle_types = unsafe { &raw mut (*properties.cast::<Properties>()).handle_types };
            // SAFETY: as above.
            unsafe { handle_types.write_unaligned(asked) };
        }
        result
    }

    /// If the driver exports it, which other processes hold the memory from then on is unknown.
    fn cuMemExportToShareableHandle(
        shareable: *mut c_void, handle: CUmemGenericAllocationHandle, kind: CUmemAllocationHandleType,
        flags: c_ulonglong
    ) |call, real| {
        match named(handle) {
            Named::MappedAllocation { id, .. } => {
                let is_asked = asked_handle_types(id).is_none_or(|types| types & POSIX_DESCRIPTOR.0 != 0);
                if kind == POSIX_DESCRIPTOR && (!is_asked || handle & REIMPORTED != 0) {
                    return INVALID_VALUE;
                }
                if kind == POSIX_DESCRIPTOR && flags == 0 && !shareable.is_null() {
                    match descriptors::export(id) {
                        Ok(Some(descriptor)) => {
                            // SAFETY: the program passes the address of an int for a descriptor, which is not null.
                            unsafe { shareable.cast::<c_int>().write_unaligned(descriptor.into_raw_fd()) };
                            return SUCCESS;
                        }
                        Ok(None) => {}
                        Err(result) => return result,
                    }
                }
                // It may have another one meanwhile.
                let Ok(handle) = to_driver(handle) else { return INVALID_VALUE };
                // SAFETY: the parameters are those of our own caller, but for the handle, which is the driver's of it.
                let result = unsafe { real(shareable, handle, kind, flags) };
                if result == SUCCESS {
                    physical::hinder(id, "cuMemExportToShareableHandle");
                }
                result
            }
            Named::Gone => INVALID_VALUE,
            Named::Other => call(),
        }
    }

    fn cuMemImportFromShareableHandle(
        handle: *mut CUmemGenericAllocationHandle, shareable: *mut c_void, kind: CUmemAllocationHandleType
    ) |call| {
        // The descriptor itself takes the pointer's place.
        let descriptor = c_int::try_from(shareable as usize).ok();
        let descriptor = descriptor.filter(|_| is_started() && !handle.is_null() && kind == POSIX_DESCRIPTOR);
        match descriptor.and_then(descriptors::import) {
            Some(Ok(id)) => {
                // SAFETY: the program passes the address of a handle, which is not null.
                unsafe { handle.write_unaligned(imported_handle_of(id)) };
                return SUCCESS;
            }
            Some(Err(result)) => return result,
            None => {}
        }
        let result = call();
        if result != SUCCESS || !is_started() || handle.is_null() {
            return result;
        }
        // SAFETY: the driver has just written it.
        let imported = unsafe { handle.read_unaligned() };
        // Its size is unknown.
        let device = physical::device_of(imported).unwrap_or(0);
        let id = physical::adopt(RegionKind::Program, 0, device, Source::Unknown, imported);
        physical::hinder(id, "cuMemImportFromShareableHandle");
        // SAFETY: as above.
        unsafe { handle.write_unaligned(handle_of(id)) };
        result
    }

    fn cuMemMapArrayAsync(list: *mut CUarrayMapInfo, count: c_uint, stream: CUstream) |call, real| {
        /// Any bytes are a valid value.
        type Info = MaybeUninit<CUarrayMapInfo>;
        let mut infos: Vec<Info> = Vec::new();
        if !is_started() || list.is_null() || infos.try_reserve_exact(count as usize).is_err() {
            return call();
        }
        let mut ids = Vec::new();
        for index in 0..count as usize {
            // SAFETY: the program passes an array of `count` of them.
            let place = unsafe { list.add(index) };
            // SAFETY: as above.
            let mut info = unsafe { place.cast::<Info>().read_unaligned() };
            // SAFETY: the field of a local variable.
            let handle =
                unsafe { &raw mut (*info.as_mut_ptr()).memHandle }.cast::<CUmemGenericAllocationHandle>();
            // SAFETY: the program has filled it in, with any number.
            match named(unsafe { handle.read_unaligned() }) {
                Named::MappedAllocation { id, handle: translated } => {
                    // SAFETY: as above.
                    unsafe { handle.write_unaligned(translated) };
                    ids.push(id);
                }
                Named::Gone => return INVALID_VALUE,
                Named::Other => {}
            }
            infos.push(info);
        }
        // SAFETY: the parameters are those of our own caller, with the driver's handles.
        let result = unsafe { real(infos.as_mut_ptr().cast(), count, stream) };
        if result == SUCCESS {
            ids.into_iter().for_each(|id| physical::hinder(id, "cuMemMapArrayAsync"));
        }
        result
    }

    fn cuMemGetHandleForAddressRange(
        handle: *mut c_void, address: CUdeviceptr, bytes: usize, kind: CUmemRangeHandleType,
        flags: c_ulonglong
    ) |call| {
        let result = call();
        if result == SUCCESS && is_started() {
            let ids: Vec<Id> =
                physical::registry().allocations_in(address, bytes as u64).map(|(id, _)| id).collect();
            if ids.is_empty() {
                // Not ours: when it is freed is not seen.
                taint::mark("cuMemGetHandleForAddressRange", result);
            }
            ids.into_iter().for_each(|id| physical::hinder(id, "cuMemGetHandleForAddressRange"));
        }
        result
    }
}

/// Handlers of calls that take handles and are passed on with the driver's in their place.
macro_rules! translated {
    ($( fn $name:ident ( $($arg:ident : $ty:ty),* ) with $($handle:ident),+ ; )*) => {
        $(
            /// # Safety
            /// As for the driver's.
            pub(crate) unsafe fn $name(
                real: unsafe extern "C" fn($($ty),*) -> CUresult,
                $($arg: $ty),*
            ) -> CUresult {
                $(
                    let $handle = match to_driver($handle) {
                        Ok(handle) => handle,
                        Err(error) => return error,
                    };
                )+
                // SAFETY: the parameters are those of our own caller, with the driver's handles.
                unsafe { real($($arg),*) }
            }
        )*
    };
}

translated! {
    fn cuLogicalEndpointBindMem(
        endpoint: CUlogicalEndpointId, device: CUdevice, endpoint_offset: cuuint64_t,
        memory: CUmemGenericAllocationHandle, offset: cuuint64_t, bytes: cuuint64_t, flags: c_ulonglong
    ) with memory;
}

#[cfg(test)]
mod tests;
