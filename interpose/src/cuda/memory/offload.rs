//! Takes device memory off the device and restores it at the same addresses.
//!
//! Offloaded memory is unmapped and released; its addresses stay reserved. It is restored from the launcher, which
//! has kept it alive (parked), or is recreated and copied back from the mirror.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::sleep;
use std::time::{Duration, Instant};

use ckpt_protocol::agent::{FromAgent, ShareKey as Key, ToAgent};
use ckpt_protocol::descriptors::MOST;
use cuda_abi::sys;
use cuda_abi::types::{CUdeviceptr, CUmemGenericAllocationHandle, CUresult};

use super::error::{MemoryError, ParkError};
use super::ipc::{self, published};
use super::physical::{self, Id, Mapping, PhysicalAllocation, Source, registry};
use crate::cuda::driver::{self, DriverError, check};
use crate::fork;
use crate::link::Link;
use crate::process;
use cuda_abi::layout::Access;

/// The timeout for device memory that another process has allocated meanwhile.
const OUT_OF_MEMORY_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The result of parking.
#[derive(Default)]
pub(crate) struct Parked {
    pub bytes: u64,
    /// The reason if nothing, or not everything, is parked.
    pub refusal: Option<ParkError>,
}

/// Parks physical allocations: hands them to the launcher, which keeps them alive until they end. Only those are parked that
/// the driver exports and for which the launcher has room.
pub(crate) fn park(ids: &[Id], link: &mut dyn Link) -> Parked {
    let mut parked = Parked::default();
    let mut new = Vec::new();
    for id in ids {
        match registry().allocations.get(id) {
            Some(allocation) if allocation.parked.is_some() => parked.bytes += allocation.bytes,
            _ => new.push(*id),
        }
    }
    for ids in new.chunks(MOST) {
        let (handed_over, refusal) = fork::while_none(|| {
            let (exported, refusal) = export(ids);
            (hand_over(exported, link), refusal)
        });
        parked.refusal = parked.refusal.or(refusal);
        match handed_over {
            Ok(known) => {
                for (id, bytes, key) in known {
                    note(id, |allocation| allocation.parked = Some(key));
                    parked.bytes += bytes;
                }
            }
            Err(refusal) => {
                parked.refusal = Some(refusal);
                break;
            }
        }
    }
    parked
}

struct Exported {
    id: Id,
    bytes: u64,
    descriptor: OwnedFd,
}

/// The descriptors that the driver exports, and the reason if it does not export all.
fn export(ids: &[Id]) -> (Vec<Exported>, Option<ParkError>) {
    let (mut exported, mut refusal) = (Vec::with_capacity(ids.len()), None);
    for id in ids {
        let Some((handle, bytes)) = physical::handle_and_bytes(*id) else { continue };
        match physical::export(handle) {
            Ok(descriptor) => exported.push(Exported { id: *id, bytes, descriptor }),
            Err(result) if refusal.is_none() => {
                refusal = Some(DriverError::new("cuMemExportToShareableHandle", result).into());
            }
            Err(_) => {}
        }
    }
    (exported, refusal)
}

/// Returns the size of each, and the key that it has from now on.
fn hand_over(exported: Vec<Exported>, link: &mut dyn Link) -> Result<Vec<(Id, u64, Key)>, ParkError> {
    if exported.is_empty() {
        return Ok(Vec::new());
    }
    let keys: Option<Vec<Key>> = exported.iter().map(|_| ipc::random_key()).collect();
    let keys = keys.ok_or(ParkError::NoKey)?;
    let descriptors: Vec<BorrowedFd<'_>> = exported.iter().map(|one| one.descriptor.as_fd()).collect();
    let (pid, instance) = (std::process::id(), process::instance());
    match link.ask(&FromAgent::Park { pid, keys: keys.clone(), instance }, &descriptors) {
        Some((ToAgent::Parked { is_kept: true }, _)) => {
            Ok(exported.iter().zip(keys).map(|(one, key)| (one.id, one.bytes, key)).collect())
        }
        Some((ToAgent::Parked { is_kept: false }, _)) => Err(ParkError::TooManyDescriptors),
        _ => {
            // It may have them.
            published::withdraw_keys(&keys, link);
            Err(ParkError::LauncherLost)
        }
    }
}

/// Releases physical allocations from the device. All work on them has ended.
///
/// # Errors
/// A driver call failed; the functions below restore what was released so far.
pub(crate) fn release(ids: &[Id]) -> Result<(), DriverError> {
    for id in ids {
        let (handle, mappings) = {
            let registry = registry();
            // A multicast object may be off already.
            let Some(allocation) = registry.allocations.get(id).filter(|one| one.handle != 0) else {
                continue;
            };
            let mapped = allocation.mappings.iter().filter(|mapping| mapping.is_mapped);
            let ranges: Vec<_> = mapped.map(|mapping| (mapping.address, mapping.bytes)).collect();
            (allocation.handle, ranges)
        };
        for (address, bytes) in mappings {
            // SAFETY: the range is one whole mapping of ours, and nothing runs on the device.
            check("cuMemUnmap", unsafe { driver::cuMemUnmap(address, bytes as usize) })?;
            note(*id, |allocation| set_mapped(allocation, address, false));
        }
        // SAFETY: the handle is the registry's; it is not used while the process is being saved.
        check("cuMemRelease", unsafe { driver::cuMemRelease(handle) })?;
        note(*id, |allocation| allocation.handle = 0);
    }
    Ok(())
}

pub(crate) fn note(id: Id, change: impl FnOnce(&mut PhysicalAllocation)) {
    if let Some(allocation) = registry().allocations.get_mut(&id) {
        change(allocation);
    }
}

pub(super) fn set_mapped(allocation: &mut PhysicalAllocation, address: CUdeviceptr, is_mapped: bool) {
    for mapping in allocation.mappings.iter_mut().filter(|mapping| mapping.address == address) {
        mapping.is_mapped = is_mapped;
    }
}

/// Imports parked memory again. What the launcher or the driver refuses is not parked any more, and left to be recreated.
pub(crate) fn unpark(link: &mut dyn Link) {
    let waiting: Vec<(Id, Key)> = registry()
        .allocations
        .iter()
        .filter(|(_, allocation)| allocation.handle == 0)
        .filter_map(|(id, allocation)| Some((*id, allocation.parked?)))
        .collect();
    let pid = std::process::id();
    for batch in waiting.chunks(MOST) {
        let keys: Vec<Key> = batch.iter().map(|(_, key)| *key).collect();
        let mut handles = fork::while_none(|| {
            let answer = link.ask(&FromAgent::Unpark { pid, keys }, &[]);
            let descriptors = answer.map(|(_, descriptors)| descriptors).unwrap_or_default();
            let imported = descriptors.iter().map(|one| physical::import_handle(one.as_fd()));
            imported.collect::<Vec<_>>().into_iter()
        });
        let mut lost = Vec::new();
        for (id, key) in batch {
            match handles.next() {
                Some(Ok(handle)) => note(*id, |allocation| allocation.handle = handle),
                _ => {
                    note(*id, |allocation| allocation.parked = None);
                    lost.push(*key);
                }
            }
        }
        // Before the memory is made again, which needs the room.
        published::withdraw_keys(&lost, link);
    }
}

/// The owner of memory that is shared with other processes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    Own,
    Others,
}

/// Claims memory that is shared with other processes from the launcher. Memory of this process that the launcher does
/// not have is left to be recreated; memory of others is waited for.
///
/// # Errors
/// Memory of others is not delivered, or a driver call failed.
pub(crate) fn claim_shared(owner: Owner, link: &mut dyn Link) -> Result<(), MemoryError> {
    let missing: Vec<(Id, Key)> = registry()
        .allocations
        .iter()
        .filter(|(_, allocation)| allocation.handle == 0 && allocation.team.is_none())
        .filter_map(|(id, allocation)| match (&allocation.source, owner) {
            (Source::Shared(key), Owner::Others) => Some((*id, *key)),
            (Source::Created(_), Owner::Own) => Some((*id, published::key_of(*id)?)),
            _ => None,
        })
        .collect();
    for (id, key) in missing {
        let mut take_up = || -> Result<_, MemoryError> {
            let Some(descriptor) = ipc::fetch(link, key)? else { return Ok(None) };
            // It cannot be recreated: others may have claimed it already.
            let handle = driver::retry(|| physical::import_handle(descriptor.as_fd()));
            handle
                .map(Some)
                .map_err(|result| DriverError::new("cuMemImportFromShareableHandle", result).into())
        };
        // The fetch may take long, and a fork must not wait for it.
        let handle = if owner == Owner::Own { fork::while_none(&mut take_up) } else { take_up() };
        if let Some(handle) = handle? {
            note(id, |allocation| allocation.handle = handle);
        }
    }
    Ok(())
}

/// Recreates memory that is off the device and was not claimed; returns these physical allocations, whose content has
/// to be copied back.
///
/// # Errors
/// The device is still out of memory after the timeout.
pub(crate) fn recreate() -> Result<Vec<Id>, DriverError> {
    let missing: Vec<_> = registry()
        .allocations
        .iter()
        .filter(|(_, allocation)| allocation.handle == 0)
        .filter_map(|(id, allocation)| match &allocation.source {
            Source::Created(properties) => Some((*id, allocation.bytes, *properties)),
            Source::Multicast(_) | Source::Shared(_) | Source::Unknown => None,
        })
        .collect();
    let deadline = Instant::now() + OUT_OF_MEMORY_TIMEOUT;
    let mut made = Vec::with_capacity(missing.len());
    for (id, bytes, properties) in missing {
        let handle = loop {
            match driver::retry(|| physical::create_handle(bytes, &properties)) {
                Ok(handle) => break handle,
                Err(result) if is_out_of_memory(result) && Instant::now() < deadline => sleep(POLL_INTERVAL),
                Err(result) => return Err(DriverError::new("cuMemCreate", result)),
            }
        };
        note(id, |allocation| allocation.handle = handle);
        made.push(id);
    }
    Ok(made)
}

fn is_out_of_memory(result: CUresult) -> bool {
    result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as CUresult
}

/// Maps physical allocations that have a handle again. With `for_copies`, their own device may read and write them
/// until [`restrict`] is called.
///
/// # Errors
/// A driver call failed.
pub(crate) fn remap(for_copies: &[Id]) -> Result<(), DriverError> {
    let waiting: Vec<_> = {
        let registry = registry();
        let of = |(id, allocation): (&Id, &PhysicalAllocation)| {
            let unmapped = allocation.mappings.iter().filter(|mapping| !mapping.is_mapped).cloned();
            (*id, allocation.handle, allocation.device, unmapped.collect::<Vec<Mapping>>())
        };
        let is_there = |allocation: &PhysicalAllocation| allocation.handle != 0 && allocation.team.is_none();
        registry.allocations.iter().filter(|(_, allocation)| is_there(allocation)).map(of).collect()
    };
    for (id, handle, device, mappings) in waiting {
        for mut mapping in mappings {
            if for_copies.binary_search(&id).is_ok() {
                mapping.access.retain(|one| !one.is_of_same(&Access::of(device)));
                mapping.access.push(Access::of(device));
            }
            map_again(id, handle, &mapping)?;
        }
    }
    Ok(())
}

/// Maps a driver's handle where a physical allocation or multicast object was mapped. The host gets its access later, by
/// [`host_access::grant`](super::host_access::grant).
///
/// # Errors
/// A driver call failed.
pub(crate) fn map_again(
    id: Id,
    handle: CUmemGenericAllocationHandle,
    mapping: &Mapping,
) -> Result<(), DriverError> {
    let Mapping { address, bytes, access, .. } = mapping;
    driver::retry(|| {
        // SAFETY: the range is reserved for this mapping, and nothing is mapped in it.
        check("cuMemMap", unsafe { driver::cuMemMap(*address, *bytes as usize, 0, handle, 0) })
    })?;
    note(id, |allocation| set_mapped(allocation, *address, true));
    set_access(*address, *bytes, access)
}

/// Withdraws the access that [`remap`] has granted for copies.
///
/// # Errors
/// A driver call failed.
pub(crate) fn restrict(ids: &[Id]) -> Result<(), DriverError> {
    let restricted: Vec<_> = {
        let registry = registry();
        let of = |id: &Id| {
            registry.allocations.get(id).map(|allocation| (allocation.device, allocation.mappings.clone()))
        };
        ids.iter().filter_map(of).collect()
    };
    for (device, mappings) in restricted {
        for Mapping { address, bytes, mut access, .. } in mappings {
            if access.iter().any(|one| one.is_all_for(device)) {
                continue;
            }
            if !access.iter().any(|one| one.is_of_same(&Access::of(device))) {
                access.push(Access { flags: 0, ..Access::of(device) });
            }
            set_access(address, bytes, &access)?;
        }
    }
    Ok(())
}

/// Sets the access rights of devices.
fn set_access(address: CUdeviceptr, bytes: u64, access: &[Access]) -> Result<(), DriverError> {
    let access: Vec<Access> = access.iter().filter(|one| !one.location.is_host()).copied().collect();
    set_exactly(address, bytes, &access)
}

/// Sets access rights.
///
/// # Errors
/// The driver call failed.
pub(super) fn set_exactly(address: CUdeviceptr, bytes: u64, access: &[Access]) -> Result<(), DriverError> {
    if access.is_empty() {
        return Ok(());
    }
    let (first, count) = (access.as_ptr().cast(), access.len());
    driver::retry(|| {
        // SAFETY: the range is one whole mapping of ours; the descriptions are a slice.
        check("cuMemSetAccess", unsafe { driver::cuMemSetAccess(address, bytes as usize, first, count) })
    })
}

/// A mapping of a whole physical allocation that its own device can read and write.
pub(crate) struct MappedView {
    pub address: CUdeviceptr,
    bytes: u64,
    /// Whether it was created for this purpose.
    is_temporary: bool,
}

impl MappedView {
    /// Finds the mapping, or creates a temporary one.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn of(allocation: &AllocationInfo) -> Result<Self, DriverError> {
        let bytes = allocation.bytes;
        if let Some(address) = allocation.address {
            return Ok(Self { address, bytes, is_temporary: false });
        }
        let mut address = 0;
        // SAFETY: `address` is a local variable.
        let reserved = unsafe { driver::cuMemAddressReserve(&raw mut address, bytes as usize, 0, 0, 0) };
        check("cuMemAddressReserve", reserved)?;
        // SAFETY: the range was reserved just now.
        let mapped = unsafe { driver::cuMemMap(address, bytes as usize, 0, allocation.handle, 0) };
        if let Err(error) = check("cuMemMap", mapped) {
            // SAFETY: as above; nothing is mapped in it.
            unsafe { driver::cuMemAddressFree(address, bytes as usize) };
            return Err(error);
        }
        let view = Self { address, bytes, is_temporary: true };
        set_access(address, bytes, &[Access::of(allocation.device)])?;
        Ok(view)
    }
}

impl Drop for MappedView {
    fn drop(&mut self) {
        if self.is_temporary {
            let (address, bytes) = (self.address, self.bytes as usize);
            // What stays mapped stays on the device.
            let _ = driver::retry(|| {
                // SAFETY: the mapping is the view's own, and what used it has ended.
                check("cuMemUnmap", unsafe { driver::cuMemUnmap(address, bytes) })
            });
            // SAFETY: the reservation is the view's own, and empty now.
            unsafe { driver::cuMemAddressFree(address, bytes) };
        }
    }
}

/// What is needed of a physical allocation to copy it.
pub(crate) struct AllocationInfo {
    pub id: Id,
    pub bytes: u64,
    pub device: i32,
    pub handle: CUmemGenericAllocationHandle,
    /// The address at which all of it is mapped for its own device to read and write.
    pub address: Option<CUdeviceptr>,
}

impl AllocationInfo {
    /// Of a physical allocation that is on the device.
    pub fn of(id: Id, allocation: &PhysicalAllocation, is_for_copies: bool) -> Self {
        let is_whole = |mapping: &&Mapping| {
            mapping.is_mapped
                && mapping.bytes == allocation.bytes
                && (is_for_copies || mapping.access.iter().any(|access| access.is_all_for(allocation.device)))
        };
        let address = allocation.mappings.iter().find(is_whole).map(|mapping| mapping.address);
        Self { id, bytes: allocation.bytes, device: allocation.device, handle: allocation.handle, address }
    }
}
