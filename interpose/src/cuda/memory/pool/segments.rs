//! A pool's memory, as it comes from the device and goes back to it.

use ckpt_protocol::agent::RegionKind;
use cuda_abi::types::{CUdeviceptr, CUresult};

use super::super::layout::{Access, Properties};
use super::super::physical;
use crate::cuda::{SUCCESS, driver};

/// What the device gives memory out in, in bytes (cuMemGetAllocationGranularity on every part so far).
pub(super) const GRANULE_BYTES: u64 = 2 << 20;

/// A piece of memory at an address of its own, which these may access.
///
/// # Errors
/// The driver's.
pub(super) fn make(device: i32, bytes: u64, access: &[Access]) -> Result<CUdeviceptr, CUresult> {
    let mut address: CUdeviceptr = 0;
    // SAFETY: `address` is a local variable.
    let result = unsafe {
        driver::cuMemAddressReserve(&raw mut address, bytes as usize, GRANULE_BYTES as usize, 0, 0)
    };
    if result != SUCCESS {
        return Err(result);
    }
    fill(device, address, bytes, access).inspect_err(|_| free_addresses(address, bytes))?;
    Ok(address)
}

fn fill(device: i32, address: CUdeviceptr, bytes: u64, access: &[Access]) -> Result<(), CUresult> {
    let piece = physical::create(RegionKind::Pool, bytes, &Properties::of(device))?;
    let mapped = physical::map(piece, address, bytes);
    // From now on it lives as long as it is mapped.
    physical::release(piece);
    mapped?;
    let allowed = physical::set_access(address, bytes, access);
    if allowed.is_err() {
        let _ = physical::unmap(address, bytes);
    }
    allowed
}

/// Gives memory back that nobody uses. If the driver refuses, it stays where it is, of no use to anybody.
pub(super) fn give_back(address: CUdeviceptr, bytes: u64) {
    if physical::unmap(address, bytes).is_ok() {
        free_addresses(address, bytes);
    }
}

fn free_addresses(address: CUdeviceptr, bytes: u64) {
    // SAFETY: the range was reserved by `make`, and nothing is mapped there.
    let _ = unsafe { driver::cuMemAddressFree(address, bytes as usize) };
}
