//! Pools that processes share.
//!
//! To the driver they are pools without handles: nothing of ours is shared by the driver, whose checkpoint could not
//! save it. An exported pool is one of ours whose segments others may open. An imported pool is an empty pool of the
//! driver's for its handle and its checks; what is imported from it is memory of another process, see
//! [`ipc::pools`](super::super::ipc::pools).

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::ptr::null_mut;

use cuda_abi::types::{CUdeviceptr, CUmemPool_attribute, CUmemPoolPtrExportData, CUmemoryPool, CUresult};

use super::super::ipc::pools::{self, Origin, PoolAllocation};
use super::super::ipc::{self, Opener};
use super::super::physical::{self, Id as PhysicalId};
use super::calls::{RESERVED, RESERVED_HIGH, USED, USED_HIGH};
use super::state::{Gauge, Id, POOLS};
use super::{GRANULE_BYTES, make_segment};
use crate::cuda::driver;
use crate::cuda::driver::checked;
use crate::cuda::result::{INVALID_VALUE, OUT_OF_MEMORY, SUCCESS};
use crate::cuda::shared::Shared;
use crate::cuda::stream_capture::relaxed;
use cuda_abi::layout::{Access, POSIX_DESCRIPTOR, PoolProperties};

/// A pool of another process.
struct Imported {
    origin: Origin,
    device: c_int,
    number: u64,
    access: Vec<Access>,
    /// Counts changes of `access`.
    access_changes: u64,
    reserved: Gauge,
    used: Gauge,
}

impl Imported {
    fn opener(&self) -> Opener {
        Opener::Pool(self.number)
    }

    fn measure(&mut self) {
        let (used, reserved) = pools::bytes_of(self.opener());
        self.used.set(used);
        self.reserved.set(reserved);
    }
}

#[derive(Default)]
struct Table {
    by_handle: BTreeMap<usize, Imported>,
    last_number: u64,
}

static IMPORTED: Shared<Table> = Shared::new(Table { by_handle: BTreeMap::new(), last_number: 0 });

/// An imported pool whose handle is being removed.
pub(super) struct Unnamed(Imported);

// ---- exported ----

/// A pool of the driver's in the place of one that can be exported; the same pool if it cannot. `None`: it is left to the
/// driver.
pub(super) fn without_handles(pool: CUmemoryPool, properties: &PoolProperties) -> Option<CUmemoryPool> {
    if properties.handle_types == 0 {
        return Some(pool);
    }
    // Nobody could pass the memory on.
    crate::launcher::address()?;
    let plain = create(&PoolProperties { handle_types: 0, ..*properties }).ok()?;
    destroy(pool);
    Some(plain)
}

fn create(properties: &PoolProperties) -> Result<CUmemoryPool, CUresult> {
    let properties = (&raw const *properties).cast();
    // SAFETY: the call writes to a local variable, the properties are a whole structure.
    driver::ask(null_mut(), |pool| unsafe { driver::cuMemPoolCreate(pool, properties) })
}

fn destroy(pool: CUmemoryPool) {
    // SAFETY: the pool is new, and nobody has its handle. There is nothing to do about a failure.
    let _ = checked(unsafe { driver::cuMemPoolDestroy(pool) });
}

/// A descriptor of a pool; `None` if it is none of ours that can be exported.
pub(super) fn export(pool: CUmemoryPool) -> Option<Result<OwnedFd, CUresult>> {
    let mut pools_now = POOLS.lock();
    let id = pools_now.id_of(pool as usize)?;
    let pool = pools_now.pool(id).filter(|pool| pool.handle_types & POSIX_DESCRIPTOR.0 != 0)?;
    // From now on its segments stay.
    pool.is_exported = true;
    drop(pools_now);
    Some(segment_of(id).and_then(|segment| pools::export(segment, id)))
}

/// A segment of a pool, which it gets if it has none.
fn segment_of(id: Id) -> Result<PhysicalId, CUresult> {
    let first = || {
        let mut pools_now = POOLS.lock();
        let (start, _) = pools_now.pool(id)?.heap.segments().next()?;
        drop(pools_now);
        Some(physical::registry().at(start)?.0)
    };
    if let Some(segment) = first() {
        return Ok(segment);
    }
    relaxed(|| make_segment(id, GRANULE_BYTES).map(drop))?;
    first().ok_or(OUT_OF_MEMORY)
}

/// The data of an allocation; `None` if none begins there of a pool of ours that can be exported.
pub(super) fn export_pointer(address: CUdeviceptr) -> Option<Result<[u8; DATA_BYTES], CUresult>> {
    let mut pools_now = POOLS.lock();
    let (id, pool) = pools_now.pool_of_allocation(address)?;
    if pool.handle_types & POSIX_DESCRIPTOR.0 == 0 {
        return None;
    }
    pool.is_exported = true;
    let (_, bytes, _) = pool.heap.allocation_at(address)?;
    drop(pools_now);
    let (segment, start, _) = physical::registry().at(address)?;
    let allocation = PoolAllocation { segment, offset: address - start, bytes, pool: id };
    Some(pools::export_pointer(&allocation))
}

const DATA_BYTES: usize = size_of::<CUmemPoolPtrExportData>();

// ---- imported ----

/// Imports a pool; `None` if the descriptor is not ours.
pub(super) fn import(descriptor: c_int) -> Option<Result<CUmemoryPool, CUresult>> {
    let imported = pools::import(descriptor)?;
    Some(imported.and_then(|(origin, device)| {
        let pool = create(&PoolProperties::of(device))?;
        let mut table = IMPORTED.lock();
        table.last_number += 1;
        let imported = Imported {
            origin,
            device,
            number: table.last_number,
            // Whatever the owner has set (CUDA programming guide, "Stream-Ordered Memory Allocator").
            access: vec![Access::of(device)],
            access_changes: 0,
            reserved: Gauge::default(),
            used: Gauge::default(),
        };
        table.by_handle.insert(pool as usize, imported);
        Ok(pool)
    }))
}

/// Whether a pool is another process's.
pub(super) fn is_imported(pool: CUmemoryPool) -> bool {
    IMPORTED.lock().by_handle.contains_key(&(pool as usize))
}

/// The handle of the pool that memory was imported by; NULL if that was destroyed.
fn handle_of(number: u64) -> usize {
    let table = IMPORTED.lock();
    let mut all = table.by_handle.iter();
    all.find(|(_, imported)| imported.number == number).map_or(0, |(handle, _)| *handle)
}

/// Imports an allocation; returns its address.
pub(super) fn import_pointer(pool: CUmemoryPool, data: &[u8; DATA_BYTES]) -> Result<CUdeviceptr, CUresult> {
    let now = || -> Result<_, CUresult> {
        let table = IMPORTED.lock();
        let imported = table.by_handle.get(&(pool as usize)).ok_or(INVALID_VALUE)?;
        let to = (imported.opener(), imported.device);
        Ok((imported.origin, to, imported.access.clone(), imported.access_changes))
    };
    let (origin, to, access, mut changes) = now()?;
    let address = pools::import_pointer(data, origin, to, &access)?;
    // A thread that changes the access meanwhile may not have seen this mapping.
    while let Ok((_, _, access, latest)) = now()
        && latest != changes
    {
        changes = latest;
        if let Err(error) = pools::set_access(to.0, &access) {
            pools::free(address).into_iter().for_each(pools::Freed::give_back);
            return Err(error);
        }
    }
    if let Some(imported) = IMPORTED.lock().by_handle.get_mut(&(pool as usize)) {
        imported.measure();
    }
    Ok(address)
}

/// The handle is being removed, unless the driver refuses. What was imported stays until it is freed.
pub(super) fn unname(pool: CUmemoryPool) -> Option<Unnamed> {
    IMPORTED.lock().by_handle.remove(&(pool as usize)).map(Unnamed)
}

pub(super) fn name(pool: CUmemoryPool, imported: Option<Unnamed>) {
    if let Some(Unnamed(imported)) = imported {
        IMPORTED.lock().by_handle.insert(pool as usize, imported);
    }
}

/// Sets who may access an imported pool's memory, what there is now and what will be imported.
pub(super) fn set_access(pool: CUmemoryPool, access: &[Access]) -> CUresult {
    let mut table = IMPORTED.lock();
    let Some(imported) = table.by_handle.get_mut(&(pool as usize)) else { return SUCCESS };
    for one in access {
        imported.access.retain(|known| !known.is_of_same(one));
        imported.access.push(*one);
    }
    imported.access_changes += 1;
    let opener = imported.opener();
    drop(table);
    pools::set_access(opener, access).err().unwrap_or(SUCCESS)
}

// ---- attributes ----

/// The handle types of a pool of ours: to the driver it has none.
pub(super) fn handle_types(pool: CUmemoryPool) -> Option<u32> {
    let own = POOLS.lock().named(pool as usize).map(|pool| pool.handle_types);
    own.or_else(|| is_imported(pool).then_some(POSIX_DESCRIPTOR.0))
}

/// What an imported pool has: what this process has imported (CUDA programming guide, "Stream-Ordered Memory Allocator").
pub(super) fn gauge(pool: CUmemoryPool, attribute: CUmemPool_attribute) -> Option<u64> {
    let mut table = IMPORTED.lock();
    let imported = table.by_handle.get_mut(&(pool as usize))?;
    imported.measure();
    Some(match attribute {
        RESERVED => imported.reserved.current_bytes,
        RESERVED_HIGH => imported.reserved.high_bytes,
        USED => imported.used.current_bytes,
        USED_HIGH => imported.used.high_bytes,
        _ => return None,
    })
}

/// Sets a high-water mark back, if the attribute is one.
pub(super) fn reset_gauge(pool: CUmemoryPool, attribute: CUmemPool_attribute) {
    let mut table = IMPORTED.lock();
    let Some(imported) = table.by_handle.get_mut(&(pool as usize)) else { return };
    imported.measure();
    match attribute {
        RESERVED_HIGH => imported.reserved.high_bytes = imported.reserved.current_bytes,
        USED_HIGH => imported.used.high_bytes = imported.used.current_bytes,
        _ => {}
    }
}

/// What is imported by [`ipc`] belongs to the pool of this handle; 0 for none.
pub(crate) fn pool_of(opened: &ipc::OpenedAllocation) -> usize {
    match opened.opener {
        Opener::Pool(number) => handle_of(number),
        Opener::Context(_) => 0,
    }
}
