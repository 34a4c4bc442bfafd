//! The entry points for pools that processes share.

use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::IntoRawFd;

use cuda_abi::types::{
    CUdevice, CUdeviceptr, CUmemAllocationHandleType, CUmemAllocationType, CUmemLocation,
    CUmemPoolPtrExportData, CUmemoryPool,
};

use super::shared;
use crate::cuda::activation::is_started;
use crate::cuda::handler::handlers;
use crate::cuda::result::{INVALID_VALUE, SUCCESS};
use crate::cuda::taint;
use cuda_abi::layout::POSIX_DESCRIPTOR;

const DATA_BYTES: usize = size_of::<CUmemPoolPtrExportData>();

handlers! {
    fn cuMemPoolExportToShareableHandle(
        out: *mut c_void, pool: CUmemoryPool, kind: CUmemAllocationHandleType, flags: c_ulonglong
    ) |call| {
        let is_meant = is_started() && !out.is_null() && kind == POSIX_DESCRIPTOR && flags == 0;
        match if is_meant { shared::export(pool) } else { None } {
            Some(Ok(descriptor)) => {
                // SAFETY: the caller passes the address of an int for a descriptor, which is not NULL.
                unsafe { out.cast::<c_int>().write_unaligned(descriptor.into_raw_fd()) };
                SUCCESS
            }
            Some(Err(error)) => error,
            None => {
                let result = call();
                taint::mark("cuMemPoolExportToShareableHandle", result);
                result
            }
        }
    }

    /// The descriptor itself takes the pointer's place (CUDA driver API reference, cuMemPoolImportFromShareableHandle).
    fn cuMemPoolImportFromShareableHandle(
        out: *mut CUmemoryPool, handle: *mut c_void, kind: CUmemAllocationHandleType, flags: c_ulonglong
    ) |call| {
        let is_meant = is_started() && !out.is_null() && kind == POSIX_DESCRIPTOR && flags == 0;
        let descriptor = c_int::try_from(handle as usize).ok().filter(|_| is_meant);
        match descriptor.and_then(shared::import) {
            Some(Ok(pool)) => {
                // SAFETY: the parameter is the caller's, of that type, and not null.
                unsafe { out.write_unaligned(pool) };
                SUCCESS
            }
            Some(Err(error)) => error,
            None => {
                let result = call();
                taint::mark("cuMemPoolImportFromShareableHandle", result);
                result
            }
        }
    }

    fn cuMemPoolExportPointer(out: *mut CUmemPoolPtrExportData, address: CUdeviceptr) |call| {
        let is_meant = is_started() && !out.is_null();
        match if is_meant { shared::export_pointer(address) } else { None } {
            Some(Ok(data)) => {
                // SAFETY: the parameter is the caller's, of as many bytes, and not null.
                unsafe { out.cast::<[u8; DATA_BYTES]>().write(data) };
                SUCCESS
            }
            Some(Err(error)) => error,
            None => call(),
        }
    }

    fn cuMemPoolImportPointer(
        out: *mut CUdeviceptr, pool: CUmemoryPool, data: *mut CUmemPoolPtrExportData
    ) |call| {
        if !is_started() || out.is_null() || data.is_null() || !shared::is_imported(pool) {
            return call();
        }
        // SAFETY: the caller passes a structure of as many bytes, which is not NULL.
        let data = unsafe { data.cast::<[u8; DATA_BYTES]>().read() };
        match shared::import_pointer(pool, &data) {
            Ok(address) => {
                // SAFETY: the parameter is the caller's, of that type, and not null.
                unsafe { out.write_unaligned(address) };
                SUCCESS
            }
            Err(error) => error,
        }
    }

    /// An imported pool cannot be a device's current one (CUDA driver API reference,
    /// cuMemPoolImportFromShareableHandle). The driver's own pool behind it could.
    fn cuDeviceSetMemPool(device: CUdevice, pool: CUmemoryPool) |call| {
        if shared::is_imported(pool) { INVALID_VALUE } else { call() }
    }

    fn cuMemSetMemPool(location: *mut CUmemLocation, kind: CUmemAllocationType, pool: CUmemoryPool) |call| {
        if shared::is_imported(pool) { INVALID_VALUE } else { call() }
    }
}
