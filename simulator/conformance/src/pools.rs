//! Pools of stream-ordered memory that are shared, as checks and their second process use them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cuda_abi::layout::{Access, POSIX_DESCRIPTOR, PoolProperties};
use cuda_abi::sys::CUmemPool_attribute;
use cuda_abi::types::*;

use crate::check::{Result, failed};
use crate::{gpu, ok};

/// What is passed for an allocation.
pub type Data = CUmemPoolPtrExportData;

/// A pool on device 0.
pub fn create(is_exportable: bool) -> Result<CUmemoryPool> {
    let handle_types = if is_exportable { POSIX_DESCRIPTOR.0 } else { 0 };
    let properties = PoolProperties { handle_types, ..PoolProperties::of(0) };
    let mut pool = std::ptr::null_mut();
    ok!(cuMemPoolCreate(&raw mut pool, (&raw const properties).cast()));
    Ok(pool)
}

/// A descriptor of a pool.
pub fn export(pool: CUmemoryPool) -> Result<OwnedFd> {
    let mut descriptor = -1_i32;
    ok!(cuMemPoolExportToShareableHandle((&raw mut descriptor).cast(), pool, POSIX_DESCRIPTOR, 0));
    // SAFETY: the driver has made it for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// The pool of a descriptor.
pub fn import(descriptor: &OwnedFd) -> Result<CUmemoryPool> {
    let (mut pool, handle) = (std::ptr::null_mut(), descriptor.as_raw_fd() as usize as *mut c_void);
    ok!(cuMemPoolImportFromShareableHandle(&raw mut pool, handle, POSIX_DESCRIPTOR, 0));
    Ok(pool)
}

/// The data of an allocation, as text.
pub fn export_pointer(address: u64) -> Result<String> {
    let mut data = Data { reserved: [0; 64] };
    ok!(cuMemPoolExportPointer(&raw mut data, address));
    Ok(data.reserved.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The data of an allocation from their text.
pub fn data_of(hex: &str) -> Result<Data> {
    let mut data = Data { reserved: [0; 64] };
    for (at, byte) in data.reserved.iter_mut().enumerate() {
        let digits = hex.get(2 * at..2 * at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        *byte = digits.map_or_else(|| failed("data of 64 bytes"), Ok)?;
    }
    Ok(data)
}

/// The address of another process's allocation.
pub fn open(pool: CUmemoryPool, data: &mut Data) -> Result<u64> {
    let mut address = 0;
    ok!(cuMemPoolImportPointer(&raw mut address, pool, data));
    Ok(address)
}

/// Lets a device read and write a pool.
pub fn allow(pool: CUmemoryPool, device: CUdevice) -> Result {
    let access = Access::of(device);
    ok!(cuMemPoolSetAccess(pool, (&raw const access).cast(), 1));
    Ok(())
}

/// An attribute of a pool.
pub fn number(pool: CUmemoryPool, attribute: CUmemPool_attribute) -> Result<u64> {
    let mut value = 0_u64;
    ok!(cuMemPoolGetAttribute(pool, attribute as u32, (&raw mut value).cast()));
    Ok(value)
}

/// A pool that this process exports, and the stream that it allocates in.
#[derive(Clone, Copy)]
pub struct Exporter {
    pool: CUmemoryPool,
    stream: CUstream,
}

impl Exporter {
    /// With a descriptor of the pool.
    pub fn start() -> Result<(Self, OwnedFd)> {
        let (pool, stream) = (create(true)?, gpu::stream()?);
        Ok((Self { pool, stream }, export(pool)?))
    }

    /// An allocation: its address and its data.
    pub fn allocate(&self, bytes: usize, is_waited_for: bool) -> Result<String> {
        let mut address = 0;
        ok!(cuMemAllocFromPoolAsync(&raw mut address, bytes, self.pool, self.stream));
        if is_waited_for {
            self.synchronize()?;
        }
        Ok(format!("{address} {}", export_pointer(address)?))
    }

    /// Waits for the stream.
    pub fn synchronize(&self) -> Result {
        ok!(cuStreamSynchronize(self.stream));
        Ok(())
    }

    /// Frees an allocation.
    pub fn free(&self, address: u64) -> Result {
        ok!(cuMemFreeAsync(address, self.stream));
        self.synchronize()
    }

    /// Lets a device read and write the pool.
    pub fn allow(&self, device: CUdevice) -> Result {
        allow(self.pool, device)
    }
}
