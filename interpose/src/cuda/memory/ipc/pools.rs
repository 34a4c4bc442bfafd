//! Pools that processes share: cuMemPoolExportToShareableHandle and its kin.
//!
//! A pool's memory is segments, each a physical allocation. A segment is published as memory of [CUDA IPC](super) is, once
//! one of its allocations is exported. The pool itself is known by a descriptor with the key of one segment, which says to
//! the importer, whenever it asks, which device that is.
//!
//! CUDA asks the program to free an allocation in all importing processes first. The pool that exports gives no segment
//! back before its end, as the driver's.

use std::ffi::c_int;
use std::os::fd::{AsFd, OwnedFd};

use cuda_abi::types::{CUdeviceptr, CUmemGenericAllocationHandle, CUresult};

use super::capability::{Capability, Kind};
use super::handle::{HANDLE_BYTES, Handle};
use super::launcher::{NOTICES, ShareError, connect, tried};
use super::opened::{Closed, IMPORTS, Import, Opener};
use super::published::send_notices;
use super::{give_back, is_own, open_for, share};
use crate::cuda::driver;
use crate::cuda::memory::physical::{self, Id};
use crate::cuda::result::{INVALID_VALUE, OPERATING_SYSTEM, OUT_OF_MEMORY};
use crate::cuda::stream_capture::relaxed;
use crate::fork;
use cuda_abi::layout::Access;

/// A pool of another process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Origin {
    owner: u32,
    number: u64,
}

impl From<ShareError> for CUresult {
    fn from(error: ShareError) -> Self {
        match error {
            ShareError::Failed(result) => result,
            ShareError::Away => OPERATING_SYSTEM,
            ShareError::NotYet => INVALID_VALUE,
        }
    }
}

/// A descriptor of the pool of this number, which has this segment.
///
/// # Errors
/// The driver's code for it.
pub(crate) fn export(segment: Id, number: u64) -> Result<OwnedFd, CUresult> {
    let key = tried(|| share(segment))?;
    let capability = Capability { key, bytes: number, owner: std::process::id(), kind: Kind::Pool };
    let created = fork::while_none(|| capability.create().map(|(descriptor, _)| descriptor));
    created.map_err(|_| OUT_OF_MEMORY)
}

/// The pool of a descriptor, and the device that it is on; `None` if the descriptor is not ours.
pub(crate) fn import(descriptor: c_int) -> Option<Result<(Origin, c_int), CUresult>> {
    let found = Capability::read(descriptor)?;
    if found.kind != Kind::Pool || found.owner == std::process::id() {
        return Some(Err(INVALID_VALUE));
    }
    let origin = Origin { owner: found.owner, number: found.bytes };
    Some(tried(|| device_of(&found)).map(|device| (origin, device)).map_err(CUresult::from))
}

/// Takes the memory of the key up to learn where it is.
fn device_of(found: &Capability) -> Result<c_int, ShareError> {
    let device = fork::while_none(|| {
        let mut launcher = connect()?;
        let fetched = NOTICES.lock().fetch(&mut launcher, found.key, found.owner)?;
        let (memory, _) = fetched.ok_or(INVALID_VALUE)?;
        drop(launcher);
        let imported = relaxed(|| physical::import_handle(memory.as_fd()));
        let device = imported.map(|handle| {
            let device = physical::device_of(handle);
            release(handle);
            device
        });
        NOTICES.lock().unmapped(found.key);
        Ok::<_, ShareError>(device?.ok_or(INVALID_VALUE)?)
    });
    send_notices();
    device
}

fn release(handle: CUmemGenericAllocationHandle) {
    // SAFETY: the handle was made by our own caller, and is used nowhere else. There is nothing to do about a failure.
    let _ = unsafe { driver::cuMemRelease(handle) };
}

/// An allocation of a pool of this process.
pub(crate) struct PoolAllocation {
    pub segment: Id,
    /// In the segment, in bytes.
    pub offset: u64,
    pub bytes: u64,
    /// The number of the pool.
    pub pool: u64,
}

/// The data that another process imports an allocation with.
///
/// # Errors
/// The driver's code for it.
pub(crate) fn export_pointer(allocation: &PoolAllocation) -> Result<[u8; HANDLE_BYTES], CUresult> {
    let PoolAllocation { segment, offset, bytes, pool } = *allocation;
    let key = tried(|| share(segment))?;
    Ok(Handle { key, offset, bytes, owner: std::process::id(), pool }.encode())
}

/// Opens an allocation of a pool that was imported as this opener; returns its address.
///
/// # Errors
/// The driver's code for it: also for an allocation of another pool.
pub(crate) fn import_pointer(
    data: &[u8; HANDLE_BYTES],
    origin: Origin,
    (opener, device): (Opener, c_int),
    access: &[Access],
) -> Result<CUdeviceptr, CUresult> {
    let handle = Handle::decode(data).ok_or(INVALID_VALUE)?;
    let of = Origin { owner: handle.owner, number: handle.pool };
    if handle.pool == 0 || of != origin || is_own(handle.key) {
        return Err(INVALID_VALUE);
    }
    let opened = tried(|| {
        open_for(opener, &handle, device, |block| physical::set_access(block.address, block.bytes, access))
    });
    opened.map_err(CUresult::from)
}

/// Sets who may access all that an opener has open.
///
/// # Errors
/// A driver call failed.
pub(crate) fn set_access(opener: Opener, access: &[Access]) -> Result<(), CUresult> {
    let ranges = IMPORTS.lock().ranges_of(opener);
    let is_there = |address| IMPORTS.lock().ranges_of(opener).iter().any(|(start, _)| *start == address);
    for (address, bytes) in ranges {
        let result = relaxed(|| physical::set_access(address, bytes, access));
        // It may have been given back meanwhile.
        if result.is_err() && is_there(address) {
            return result;
        }
    }
    Ok(())
}

/// The bytes of the allocations that an opener has open, and of the segments that they are in.
pub(crate) fn bytes_of(opener: Opener) -> (u64, u64) {
    let imports = IMPORTS.lock();
    (imports.opened_bytes(opener), imports.ranges_of(opener).iter().map(|(_, bytes)| bytes).sum())
}

/// Whether an allocation of an imported pool begins at an address.
pub(crate) fn is_allocation(address: CUdeviceptr) -> bool {
    let found = IMPORTS.lock().find(address);
    found.is_some_and(|found| found.address == address && matches!(found.opener, Opener::Pool(_)))
}

/// What is left of an allocation that was freed: it is to be given back when no work uses it any more.
pub(crate) struct Freed(Option<Import>);

impl Freed {
    /// Gives the memory back.
    pub fn give_back(self) {
        self.0.into_iter().for_each(give_back);
    }
}

/// Frees an allocation of an imported pool, once; `None` if none begins at the address.
pub(crate) fn free(address: CUdeviceptr) -> Option<Freed> {
    let closed = IMPORTS.lock().close_of_pool(address)?;
    Some(Freed(match closed {
        Closed::Unused(import) => Some(import),
        Closed::Open => None,
    }))
}
