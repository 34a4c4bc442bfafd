//! Physical device memory that is ours to take off the device and to bring back under the same addresses.
//!
//! Everything that the program gets from us as device memory is a piece of physical memory (cuMemCreate) that is
//! mapped into addresses which the process keeps (cuMemAddressReserve): allocations, slabs of small ones, pools, and
//! what the program makes itself by the same calls. This module knows each piece, where it is mapped and who may
//! access it; its users know what it is for.
//!
//! The lock is held to look and to note, never over a call of the driver: what a call is about belongs to its caller,
//! and while the process is being saved nobody is inside.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ckpt_protocol::agent::RegionKind;
use cuda_abi::sys;
use cuda_abi::types::{CUdeviceptr, CUmemGenericAllocationHandle, CUresult};

use super::ipc::Key;
use super::layout::{Access, POSIX_DESCRIPTOR, Properties};
use crate::cuda::{SUCCESS, driver};

/// Names a piece of physical memory for the life of the process; never 0, never used again.
pub(in crate::cuda) type Id = u64;

/// Where the physical memory comes from when it is made anew.
#[derive(Clone)]
pub(in crate::cuda) enum Source {
    /// cuMemCreate with these properties.
    Created(Properties),
    /// Another process of the job, which has shared it under this key.
    Shared(Key),
}

/// A range of addresses that shows the beginning of a piece.
#[derive(Clone)]
pub(in crate::cuda) struct Mapping {
    pub address: CUdeviceptr,
    pub bytes: u64,
    /// Who may access it, one entry for each location.
    pub access: Vec<Access>,
}

/// A piece of physical memory.
pub(in crate::cuda) struct Physical {
    pub kind: RegionKind,
    pub device: c_int,
    pub bytes: u64,
    pub source: Source,
    /// The driver's handle; 0 while the memory is off the device.
    pub handle: CUmemGenericAllocationHandle,
    pub mappings: Vec<Mapping>,
    /// Its owner has let go of it: it lives until it is mapped nowhere.
    pub is_released: bool,
    /// What the mirror has of it.
    pub mirrored: Mirrored,
    /// Its number among the parked ones, while it is off the device.
    pub parked: Option<usize>,
}

/// Where a piece's content is in the mirror, and what is known of that content.
#[derive(Default, Clone)]
pub(in crate::cuda) struct Mirrored {
    /// In bytes; `None` if the mirror has no place for it.
    pub offset: Option<u64>,
    /// A hash of each chunk in the mirror; empty if it is not known.
    pub hashes: Vec<[u64; 2]>,
}

#[derive(Default)]
pub(in crate::cuda) struct Registry {
    pub pieces: BTreeMap<Id, Physical>,
    /// Which piece is mapped at an address, and how far.
    by_address: BTreeMap<CUdeviceptr, (u64, Id)>,
    last_id: Id,
}

static REGISTRY: Mutex<Registry> =
    Mutex::new(Registry { pieces: BTreeMap::new(), by_address: BTreeMap::new(), last_id: 0 });

/// For a look or a note; not to be held over a call of the driver.
pub(in crate::cuda) fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

fn checked(result: CUresult) -> Result<(), CUresult> {
    if result == SUCCESS { Ok(()) } else { Err(result) }
}

impl Registry {
    fn add(&mut self, piece: Physical) -> Id {
        self.last_id += 1;
        self.pieces.insert(self.last_id, piece);
        self.last_id
    }

    /// The piece that is mapped at an address, and the start and length of that mapping.
    pub fn at(&self, address: CUdeviceptr) -> Option<(Id, CUdeviceptr, u64)> {
        let (&start, &(bytes, id)) = self.by_address.range(..=address).next_back()?;
        (address - start < bytes).then_some((id, start, bytes))
    }

    /// The starts of the mappings that begin in a range.
    fn starts(&self, address: CUdeviceptr, bytes: u64) -> Vec<CUdeviceptr> {
        self.by_address.range(address..address.saturating_add(bytes)).map(|(start, _)| *start).collect()
    }

    /// Takes a piece out that is neither owned nor mapped; returns its handle, which is to be released.
    fn take_dead(&mut self, id: Id) -> Option<CUmemGenericAllocationHandle> {
        let is_dead =
            self.pieces.get(&id).is_some_and(|piece| piece.is_released && piece.mappings.is_empty());
        is_dead.then(|| self.pieces.remove(&id))?.map(|piece| piece.handle)
    }
}

/// Makes physical memory. It can be exported in any case.
///
/// # Errors
/// The driver's.
pub(in crate::cuda) fn create(kind: RegionKind, bytes: u64, properties: &Properties) -> Result<Id, CUresult> {
    let mut properties = *properties;
    properties.handle_types |= POSIX_DESCRIPTOR.0;
    let handle = create_handle(bytes, &properties)?;
    Ok(registry().add(Physical {
        kind,
        device: properties.location.id,
        bytes,
        source: Source::Created(properties),
        handle,
        mappings: Vec::new(),
        is_released: false,
        mirrored: Mirrored::default(),
        parked: None,
    }))
}

/// Takes up physical memory of another process.
///
/// # Errors
/// The driver's.
pub(in crate::cuda) fn import(
    kind: RegionKind,
    bytes: u64,
    device: c_int,
    key: Key,
    descriptor: BorrowedFd<'_>,
) -> Result<Id, CUresult> {
    let handle = import_handle(descriptor)?;
    Ok(registry().add(Physical {
        kind,
        device,
        bytes,
        source: Source::Shared(key),
        handle,
        mappings: Vec::new(),
        is_released: false,
        mirrored: Mirrored::default(),
        parked: None,
    }))
}

pub(in crate::cuda) fn create_handle(
    bytes: u64,
    properties: &Properties,
) -> Result<CUmemGenericAllocationHandle, CUresult> {
    let mut handle = 0;
    // SAFETY: `handle` is a local variable, the properties are a whole structure.
    checked(unsafe {
        driver::cuMemCreate(&raw mut handle, bytes as usize, (&raw const *properties).cast(), 0)
    })?;
    Ok(handle)
}

pub(in crate::cuda) fn import_handle(
    descriptor: BorrowedFd<'_>,
) -> Result<CUmemGenericAllocationHandle, CUresult> {
    let mut handle = 0;
    // The descriptor itself takes the pointer's place (CUDA driver API reference, cuMemImportFromShareableHandle).
    let value = descriptor.as_raw_fd() as usize as *mut std::ffi::c_void;
    // SAFETY: `handle` is a local variable; the descriptor is open for the length of the call.
    checked(unsafe { driver::cuMemImportFromShareableHandle(&raw mut handle, value, POSIX_DESCRIPTOR) })?;
    Ok(handle)
}

/// A descriptor by which another process can take physical memory up, and which keeps it alive.
///
/// # Errors
/// The driver's.
pub(in crate::cuda) fn export(handle: CUmemGenericAllocationHandle) -> Result<OwnedFd, CUresult> {
    let mut descriptor: c_int = -1;
    // SAFETY: `descriptor` is a local variable, of the type that this kind of handle is written as.
    checked(unsafe {
        driver::cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, POSIX_DESCRIPTOR, 0)
    })?;
    // SAFETY: the driver has made it for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Maps the first `bytes` bytes of a piece at an address inside a reservation. Nobody may access it yet.
///
/// # Errors
/// The driver's.
pub(in crate::cuda) fn map(id: Id, address: CUdeviceptr, bytes: u64) -> Result<(), CUresult> {
    let handle = registry().pieces.get(&id).map(|piece| piece.handle);
    let handle = handle.ok_or(sys::CUresult::CUDA_ERROR_INVALID_VALUE as CUresult)?;
    // SAFETY: mapping touches no memory in use; the driver checks the range.
    checked(unsafe { driver::cuMemMap(address, bytes as usize, 0, handle, 0) })?;
    let mut registry = registry();
    registry.by_address.insert(address, (bytes, id));
    if let Some(piece) = registry.pieces.get_mut(&id) {
        piece.mappings.push(Mapping { address, bytes, access: Vec::new() });
    }
    Ok(())
}

/// Unmaps a range that is made up of whole mappings. What is then owned by nobody and mapped nowhere is released.
///
/// # Errors
/// The driver's.
pub(in crate::cuda) fn unmap(address: CUdeviceptr, bytes: u64) -> Result<(), CUresult> {
    // SAFETY: the caller owns what is mapped there; the driver checks the range.
    checked(unsafe { driver::cuMemUnmap(address, bytes as usize) })?;
    let mut dead = Vec::new();
    let mut registry = registry();
    for start in registry.starts(address, bytes) {
        let Some((_, id)) = registry.by_address.remove(&start) else { continue };
        if let Some(piece) = registry.pieces.get_mut(&id) {
            piece.mappings.retain(|mapping| mapping.address != start);
        }
        dead.extend(registry.take_dead(id));
    }
    drop(registry);
    dead.into_iter().for_each(release_handle);
    Ok(())
}

/// Sets who may access a range that is made up of whole mappings; other locations keep what they have.
///
/// # Errors
/// The driver's.
pub(in crate::cuda) fn set_access(
    address: CUdeviceptr,
    bytes: u64,
    access: &[Access],
) -> Result<(), CUresult> {
    // SAFETY: the descriptions are a slice; the driver checks the range.
    checked(unsafe {
        driver::cuMemSetAccess(address, bytes as usize, access.as_ptr().cast(), access.len())
    })?;
    let mut registry = registry();
    for start in registry.starts(address, bytes) {
        let Some(&(_, id)) = registry.by_address.get(&start) else { continue };
        let Some(piece) = registry.pieces.get_mut(&id) else { continue };
        for mapping in piece.mappings.iter_mut().filter(|mapping| mapping.address == start) {
            for one in access {
                mapping.access.retain(|known| !known.is_of_same(one));
                mapping.access.push(*one);
            }
        }
    }
    Ok(())
}

/// The owner lets go of a piece: its memory lives on as long as it is mapped.
pub(in crate::cuda) fn release(id: Id) {
    let mut registry = registry();
    if let Some(piece) = registry.pieces.get_mut(&id) {
        piece.is_released = true;
    }
    let dead = registry.take_dead(id);
    drop(registry);
    dead.into_iter().for_each(release_handle);
}

fn release_handle(handle: CUmemGenericAllocationHandle) {
    if handle != 0 {
        // SAFETY: the handle is ours, and nobody has it any more. There is nothing to do about a failure.
        let _ = unsafe { driver::cuMemRelease(handle) };
    }
}
