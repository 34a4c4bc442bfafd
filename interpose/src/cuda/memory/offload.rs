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
use cuda_abi::layout::Access;

/// How long memory that somebody else has taken meanwhile is waited for.
const OUT_OF_MEMORY_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// What parking came to.
#[derive(Default)]
pub(crate) struct Parked {
    pub bytes: u64,
    /// Why nothing is parked, if it is not.
    pub refusal: Option<ParkError>,
}

/// Hands the memory of physical allocations to the launcher, which keeps it alive: all that the driver exports. Where
/// the launcher has not room for all, it keeps none.
pub(crate) fn park(ids: &[Id], link: &mut dyn Link) -> Parked {
    let mut parked = Parked::default();
    let mut count = 0;
    for ids in ids.chunks(MOST) {
        let (handed_over, refusal) = fork::while_none(|| {
            let (exported, refusal) = export(ids);
            let handed_over = hand_over(&exported, link);
            let known: Vec<_> = exported.iter().map(|one| (one.id, one.bytes)).collect();
            (handed_over.map(|()| known), refusal)
        });
        parked.refusal = parked.refusal.or(refusal);
        let known = match handed_over {
            Ok(known) => known,
            Err(refusal) => {
                registry().allocations.values_mut().for_each(|allocation| allocation.parked = None);
                return Parked { bytes: 0, refusal: Some(refusal) };
            }
        };
        for (id, bytes) in known {
            note(id, |allocation| allocation.parked = Some(count));
            count += 1;
            parked.bytes += bytes;
        }
    }
    parked
}

struct Exported {
    id: Id,
    bytes: u64,
    descriptor: OwnedFd,
}

/// What the driver exports; and why not all of it.
fn export(ids: &[Id]) -> (Vec<Exported>, Option<ParkError>) {
    let (mut exported, mut refusal) = (Vec::with_capacity(ids.len()), None);
    for id in ids {
        let known = registry().allocations.get(id).map(|allocation| (allocation.handle, allocation.bytes));
        let Some((handle, bytes)) = known else { continue };
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

fn hand_over(exported: &[Exported], link: &mut dyn Link) -> Result<(), ParkError> {
    if exported.is_empty() {
        return Ok(());
    }
    let descriptors: Vec<BorrowedFd<'_>> = exported.iter().map(|one| one.descriptor.as_fd()).collect();
    match link.ask(&FromAgent::Park { count: descriptors.len() }, &descriptors) {
        Some((ToAgent::Parked { is_kept: true }, _)) => Ok(()),
        Some((ToAgent::Parked { is_kept: false }, _)) => Err(ParkError::TooManyDescriptors),
        _ => Err(ParkError::LauncherLost),
    }
}

/// Takes physical allocations off the device. All work on them has ended.
///
/// # Errors
/// The driver refuses; what was taken off so far is brought back by the functions below.
pub(crate) fn release(ids: &[Id]) -> Result<(), DriverError> {
    for id in ids {
        let (handle, mappings) = {
            let registry = registry();
            let Some(allocation) = registry.allocations.get(id) else { continue };
            let ranges: Vec<_> =
                allocation.mappings.iter().map(|mapping| (mapping.address, mapping.bytes)).collect();
            (allocation.handle, ranges)
        };
        for (address, bytes) in mappings {
            // SAFETY: the range is one whole mapping of ours, and nothing runs on the device.
            check("cuMemUnmap", unsafe { driver::cuMemUnmap(address, bytes as usize) })?;
            note(*id, |allocation| set_mapped(allocation, address, false));
        }
        // SAFETY: the handle is the registry's; nobody uses it while the process is being saved.
        check("cuMemRelease", unsafe { driver::cuMemRelease(handle) })?;
        note(*id, |allocation| allocation.handle = 0);
    }
    Ok(())
}

fn note(id: Id, change: impl FnOnce(&mut PhysicalAllocation)) {
    if let Some(allocation) = registry().allocations.get_mut(&id) {
        change(allocation);
    }
}

fn set_mapped(allocation: &mut PhysicalAllocation, address: CUdeviceptr, is_mapped: bool) {
    for mapping in allocation.mappings.iter_mut().filter(|mapping| mapping.address == address) {
        mapping.is_mapped = is_mapped;
    }
}

/// Takes parked memory up again; what the launcher or the driver refuses stays to be made anew.
pub(crate) fn unpark(link: &mut dyn Link) {
    let mut waiting: Vec<(usize, Id)> = registry()
        .allocations
        .iter()
        .filter(|(_, allocation)| allocation.handle == 0)
        .filter_map(|(id, allocation)| Some((allocation.parked?, *id)))
        .collect();
    waiting.sort_unstable();
    for batch in waiting.chunks(MOST) {
        let Some(&(first, _)) = batch.first() else { continue };
        let handles: Vec<_> = fork::while_none(|| {
            let answer = link.ask(&FromAgent::Unpark { first, count: batch.len() }, &[]);
            let descriptors = answer.map(|(_, descriptors)| descriptors).unwrap_or_default();
            descriptors.iter().map(|descriptor| physical::import_handle(descriptor.as_fd())).collect()
        });
        if handles.is_empty() {
            // The launcher has nothing, or is gone.
            break;
        }
        for ((_, id), handle) in batch.iter().zip(handles) {
            if let Ok(handle) = handle {
                note(*id, |allocation| allocation.handle = handle);
            }
        }
    }
}

/// Owner memory that is shared with other processes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    Own,
    Others,
}

/// Takes memory up again that is shared with other processes, and which the launcher has. What it has not of this
/// process's own stays to be made anew; that of others is waited for.
///
/// # Errors
/// What belongs to others does not come, or the driver refuses it.
pub(crate) fn claim_shared(owner: Owner, link: &mut dyn Link) -> Result<(), MemoryError> {
    let missing: Vec<(Id, Key)> = registry()
        .allocations
        .iter()
        .filter(|(_, allocation)| allocation.handle == 0)
        .filter_map(|(id, allocation)| match (&allocation.source, owner) {
            (Source::Shared(key), Owner::Others) => Some((*id, *key)),
            (Source::Created(_), Owner::Own) => Some((*id, published::key_of(*id)?)),
            _ => None,
        })
        .collect();
    for (id, key) in missing {
        let mut take_up = || -> Result<_, MemoryError> {
            let Some(descriptor) = ipc::fetch(link, key)? else { return Ok(None) };
            // Not to be made anew: others may have taken it up already.
            let handle = driver::retry(|| physical::import_handle(descriptor.as_fd()));
            handle
                .map(Some)
                .map_err(|result| DriverError::new("cuMemImportFromShareableHandle", result).into())
        };
        // What is waited for may take long, which no fork is to wait for.
        let handle = if owner == Owner::Own { fork::while_none(&mut take_up) } else { take_up() };
        if let Some(handle) = handle? {
            note(id, |allocation| allocation.handle = handle);
        }
    }
    Ok(())
}

/// Makes anew what is off the device and was not taken up; returns which physical allocations that are: their content
/// is to be copied.
///
/// # Errors
/// There is not enough memory on the device, for a while.
pub(crate) fn recreate() -> Result<Vec<Id>, DriverError> {
    let missing: Vec<_> = registry()
        .allocations
        .iter()
        .filter(|(_, allocation)| allocation.handle == 0)
        .filter_map(|(id, allocation)| match &allocation.source {
            Source::Created(properties) => Some((*id, allocation.bytes, *properties)),
            Source::Shared(_) | Source::Unknown => None,
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
/// The driver's.
pub(crate) fn remap(for_copies: &[Id]) -> Result<(), DriverError> {
    let waiting: Vec<_> = {
        let registry = registry();
        let of = |(id, allocation): (&Id, &PhysicalAllocation)| {
            let unmapped = allocation.mappings.iter().filter(|mapping| !mapping.is_mapped).cloned();
            (*id, allocation.handle, allocation.device, unmapped.collect::<Vec<Mapping>>())
        };
        registry.allocations.iter().filter(|(_, allocation)| allocation.handle != 0).map(of).collect()
    };
    for (id, handle, device, mappings) in waiting {
        for Mapping { address, bytes, mut access, .. } in mappings {
            driver::retry(|| {
                // SAFETY: the range is reserved for this mapping, and nothing is mapped in it.
                check("cuMemMap", unsafe { driver::cuMemMap(address, bytes as usize, 0, handle, 0) })
            })?;
            note(id, |allocation| set_mapped(allocation, address, true));
            if for_copies.binary_search(&id).is_ok() {
                access.retain(|one| !one.is_of_same(&Access::of(device)));
                access.push(Access::of(device));
            }
            set_access(address, bytes, &access)?;
        }
    }
    Ok(())
}

/// Takes back what [`remap`] has allowed for copies.
///
/// # Errors
/// The driver's.
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

fn set_access(address: CUdeviceptr, bytes: u64, access: &[Access]) -> Result<(), DriverError> {
    if access.is_empty() {
        return Ok(());
    }
    let (first, count) = (access.as_ptr().cast(), access.len());
    driver::retry(|| {
        // SAFETY: the range is one whole mapping of ours; the descriptions are a slice.
        check("cuMemSetAccess", unsafe { driver::cuMemSetAccess(address, bytes as usize, first, count) })
    })
}

/// A physical allocation where its own device can read and write all of it.
pub(crate) struct MappedView {
    pub address: CUdeviceptr,
    bytes: u64,
    /// It was made for this.
    is_temporary: bool,
}

impl MappedView {
    /// Finds the mapping, or makes one for the time being.
    ///
    /// # Errors
    /// The driver's.
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

/// What has to be known of a physical allocation to look at it.
pub(crate) struct AllocationInfo {
    pub id: Id,
    pub bytes: u64,
    pub device: i32,
    pub handle: CUmemGenericAllocationHandle,
    /// Where all of it is mapped for its own device to read and write.
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
