//! Physical memory, address ranges and mappings, as the checks of several areas use them.

use std::os::fd::{FromRawFd, OwnedFd};

use cuda_abi::sys;
use cuda_abi::types::*;

use crate::check::{Result, Stop};
use crate::helper::Helper;
use crate::{gpu, ok};

/// Both kinds of access.
pub const READ_WRITE: sys::CUmemAccess_flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

/// A device as a place of memory, as calls take it.
pub fn place(device: CUdevice) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32, id: device }
}

/// The same as a part of structures.
pub fn location(device: CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        __bindgen_anon_1: CUmemLocation_st__bindgen_ty_1 { id: device },
    }
}

/// Properties of pinned memory on a device.
pub fn properties(device: CUdevice, exportable: bool) -> CUmemAllocationProp {
    use sys::CUmemAllocationHandleType as Handle;
    // SAFETY: integers, a pointer and enums that have a value 0; all enums are set below.
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(device);
    properties.requestedHandleTypes = if exportable {
        Handle::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    } else {
        Handle::CU_MEM_HANDLE_TYPE_NONE
    };
    properties
}

/// Properties of pinned memory of the host.
pub fn host_properties(place: sys::CUmemLocation, exportable: bool) -> CUmemAllocationProp {
    CUmemAllocationProp { location: place, ..properties(0, exportable) }
}

/// The host's NUMA node that is nearest to device 0, as a part of structures.
pub fn node() -> Result<sys::CUmemLocation> {
    use sys::CUdevice_attribute as A;
    if gpu::device_attribute(A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? == 0 {
        return crate::check::skipped("no memory of the host from cuMemCreate");
    }
    let id = gpu::device_attribute(A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID)?.max(0);
    Ok(sys::CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA,
        __bindgen_anon_1: CUmemLocation_st__bindgen_ty_1 { id },
    })
}

/// The smallest unit of physical memory on device 0.
pub fn granularity() -> Result<usize> {
    let properties = properties(0, false);
    let mut size_bytes = 0;
    ok!(cuMemGetAllocationGranularity(&raw mut size_bytes, &raw const properties, 0));
    Ok(size_bytes)
}

/// Reserves addresses anywhere.
pub fn reserve(size_bytes: usize) -> Result<u64> {
    let mut address = 0;
    ok!(cuMemAddressReserve(&raw mut address, size_bytes, 0, 0, 0));
    Ok(address)
}

/// Physical memory on device 0.
pub fn create(size_bytes: usize, exportable: bool) -> Result<u64> {
    create_with(size_bytes, &properties(0, exportable))
}

/// Physical memory with these properties.
pub fn create_with(size_bytes: usize, properties: &CUmemAllocationProp) -> Result<u64> {
    let mut handle = 0;
    ok!(cuMemCreate(&raw mut handle, size_bytes, properties, 0));
    Ok(handle)
}

/// Maps memory, without access.
pub fn map(address: u64, size_bytes: usize, handle: u64) -> Result {
    ok!(cuMemMap(address, size_bytes, 0, handle, 0));
    Ok(())
}

/// What cuMemSetAccess takes.
pub fn access(device: CUdevice, flags: sys::CUmemAccess_flags) -> CUmemAccessDesc {
    CUmemAccessDesc { location: location(device), flags }
}

/// Lets device 0 access mapped memory.
pub fn allow(address: u64, size_bytes: usize, flags: sys::CUmemAccess_flags) -> Result {
    let access = access(0, flags);
    ok!(cuMemSetAccess(address, size_bytes, &raw const access, 1));
    Ok(())
}

/// Addresses with memory of their own that device 0 can read and write, and the memory's handle.
pub fn mapped(size_bytes: usize, exportable: bool) -> Result<(u64, u64)> {
    let (address, handle) = (reserve(size_bytes)?, create(size_bytes, exportable)?);
    map(address, size_bytes, handle)?;
    allow(address, size_bytes, READ_WRITE)?;
    Ok((address, handle))
}

/// Ways of using a handle, for [`use_released`].
pub const WAYS: [&str; 4] = ["map", "release", "export", "ask"];

/// Uses the handle of memory that was released.
pub fn use_released(way: &str) -> Result {
    let size_bytes = granularity()?;
    let (address, handle) = (reserve(size_bytes)?, create(size_bytes, true)?);
    ok!(cuMemRelease(handle));
    match way {
        "map" => map(address, size_bytes, handle)?,
        "release" => ok!(cuMemRelease(handle)),
        "export" => drop(export(handle)?),
        _ => {
            let mut properties = properties(0, true);
            ok!(cuMemGetAllocationPropertiesFromHandle(&raw mut properties, handle));
        }
    }
    Ok(())
}

/// What becomes of a process that does so: the signal that ends it, or the call's outcome.
pub fn end_of_using_released(way: &str) -> Result<(Option<i32>, String)> {
    let mut helper = Helper::start()?;
    match helper.ask(&format!("use-released {way}")) {
        Ok(_) => Ok((None, "CUDA_SUCCESS".to_owned())),
        Err(Stop::Failed(text)) if text.ends_with(Helper::ENDED) => Ok((helper.end_signal()?, text)),
        Err(Stop::Failed(text)) => Ok((None, text)),
        Err(skipped) => Err(skipped),
    }
}

/// Undoes [`mapped`].
pub fn unmap(address: u64, size_bytes: usize, handle: u64) -> Result {
    ok!(cuMemUnmap(address, size_bytes));
    ok!(cuMemRelease(handle));
    ok!(cuMemAddressFree(address, size_bytes));
    Ok(())
}

/// The memory as a descriptor.
pub fn export(handle: u64) -> Result<OwnedFd> {
    let mut descriptor: i32 = -1;
    let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    ok!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, kind, 0));
    // SAFETY: the driver gave this process a fresh descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// The memory of a descriptor, which stays open.
pub fn import(descriptor: i32) -> Result<u64> {
    let mut handle = 0;
    let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let as_pointer = usize::try_from(descriptor).unwrap_or(usize::MAX) as *mut c_void;
    ok!(cuMemImportFromShareableHandle(&raw mut handle, as_pointer, kind));
    Ok(handle)
}
