//! Physical device memory that is ours to take off the device and to bring back under the same addresses.
//!
//! Everything that the program gets from us as device memory is a physical allocation (cuMemCreate) that is mapped
//! into addresses which the process keeps (cuMemAddressReserve): allocations, slabs of small ones, pools, and what
//! the program makes itself by the same calls. This module knows each physical allocation, where it is mapped and who
//! may access it; its users know what it is for.
//!
//! The lock is held to look and to note, never over a call of the driver: what a call is about belongs to its caller,
//! and while the process is being saved no thread is inside.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{MutexGuard, OnceLock};

use ckpt_protocol::agent::{RegionKind, ShareKey as Key};
use cuda_abi::types::{
    CUdeviceptr, CUmemGenericAllocationHandle, CUmemLocation, CUmulticastObjectProp, CUresult,
};

use super::backtrace::Backtrace;
use crate::cuda::context;
use crate::cuda::driver::{self, checked};
use crate::cuda::result::{INVALID_VALUE, OUT_OF_MEMORY};
use crate::cuda::shared::Shared;
use crate::cuda::taint;
use cuda_abi::layout::{Access, POSIX_DESCRIPTOR, Properties};

/// The ID of a physical allocation: unique for the life of the process and never 0.
pub(crate) type Id = u64;

/// Where physical memory comes from when it is recreated.
#[derive(Clone)]
pub(crate) enum Source {
    /// cuMemCreate with the requested properties.
    Created(Properties),
    /// cuMulticastCreate with the requested properties.
    Multicast(CUmulticastObjectProp),
    /// Another process of the job has shared it under this key.
    Shared(Key),
    /// A descriptor of unknown origin: it cannot be recreated and has an obstacle.
    Unknown,
}

/// An address range to which the beginning of a physical allocation is mapped.
#[derive(Clone)]
pub(crate) struct Mapping {
    pub address: CUdeviceptr,
    pub bytes: u64,
    /// Who may access it, one entry for each location.
    pub access: Vec<Access>,
    /// Whether it is mapped; not while the memory is off the device.
    pub is_mapped: bool,
}

/// Memory that is bound to a part of a multicast object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Binding {
    /// The memory; it lives at least as long as it is bound.
    pub memory: Id,
    /// Where the bound part begins in it, in bytes.
    pub memory_offset: u64,
    /// Where that is in the object, in bytes.
    pub offset: u64,
    pub bytes: u64,
    /// Of the team.
    pub device: c_int,
    /// Whether the program has named the device (the second versions of the calls).
    pub is_for_device: bool,
    /// Whether it is bound; not while the object is off the devices.
    pub is_bound: bool,
}

impl Binding {
    /// Whether it is at this place of the object.
    pub fn is_at(&self, device: c_int, offset: u64, bytes: u64) -> bool {
        (self.device, self.offset, self.bytes) == (device, offset, bytes)
    }
}

/// What this process has done with a multicast object.
#[derive(Clone, Default)]
pub(crate) struct Team {
    /// The devices that it has added.
    pub devices: Vec<c_int>,
    pub bindings: Vec<Binding>,
}

/// A physical allocation, or a multicast object, which has a handle, mappings and descriptors in the same way.
pub(crate) struct PhysicalAllocation {
    pub kind: RegionKind,
    /// For memory of the host, the one by which it is copied.
    pub device: c_int,
    pub bytes: u64,
    pub source: Source,
    /// The driver's handle; 0 while the memory is off the device.
    pub handle: CUmemGenericAllocationHandle,
    pub mappings: Vec<Mapping>,
    /// The number of references that its owner has yet to release. Without references it lives until it is unmapped
    /// everywhere.
    pub references: u32,
    /// Whether a descriptor of it may exist: it then lives without references and mappings too, see `ipc::exchanged`.
    pub is_exported: bool,
    /// Of a multicast object.
    pub team: Option<Team>,
    /// How often it is bound to multicast objects.
    pub bound: u32,
    /// The call because of which it cannot be saved: an obstacle while the physical allocation lives.
    pub obstacle: Option<&'static str>,
    /// What the mirror has of it.
    pub mirrored: Mirrored,
    /// The key under which the launcher keeps a descriptor of it, since it was first parked.
    pub parked: Option<Key>,
    /// The program's call stack when it was created.
    pub origin: Backtrace,
}

impl PhysicalAllocation {
    /// Whether the process has neither references nor mappings nor bindings of it. Through another process's multicast
    /// object, that process reaches what is bound to it.
    pub fn is_unused(&self) -> bool {
        let is_used_by_others = matches!(self.source, Source::Shared(_))
            && self.team.as_ref().is_some_and(|team| !team.bindings.is_empty());
        self.references == 0 && self.mappings.is_empty() && self.bound == 0 && !is_used_by_others
    }
}

/// The place of a physical allocation in the mirror, and the hashes of its content there.
#[derive(Default, Clone)]
pub(crate) struct Mirrored {
    /// In bytes; `None` if it has no place in the mirror.
    pub offset: Option<u64>,
    /// A hash of each chunk in the mirror; empty if unknown.
    pub hashes: Vec<[u64; 2]>,
    /// A hash of each chunk as it was on the device once, while `hashes` are not known: from it follows how much memory
    /// the mirror will need, and nothing else.
    pub seen: Vec<[u64; 2]>,
}

impl Mirrored {
    /// Its content is not in the mirror any more.
    pub fn forget_content(&mut self) {
        let hashes = std::mem::take(&mut self.hashes);
        if !hashes.is_empty() {
            self.seen = hashes;
        }
    }
}

#[derive(Default)]
pub(crate) struct Registry {
    pub allocations: BTreeMap<Id, PhysicalAllocation>,
    /// Which physical allocation is mapped at an address, and how far.
    by_address: BTreeMap<CUdeviceptr, (u64, Id)>,
    /// Those that were unused once while there were descriptors of them.
    kept: BTreeSet<Id>,
    last_id: Id,
}

static REGISTRY: Shared<Registry> = Shared::new(Registry {
    allocations: BTreeMap::new(),
    by_address: BTreeMap::new(),
    kept: BTreeSet::new(),
    last_id: 0,
});

/// The lock must not be held across a driver call.
pub(crate) fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock()
}

impl Registry {
    fn add(&mut self, allocation: PhysicalAllocation) -> Id {
        self.last_id += 1;
        self.allocations.insert(self.last_id, allocation);
        self.last_id
    }

    /// The physical allocation that is mapped at an address, and the start and length of that mapping.
    pub fn at(&self, address: CUdeviceptr) -> Option<(Id, CUdeviceptr, u64)> {
        let (&start, &(bytes, id)) = self.by_address.range(..=address).next_back()?;
        (address - start < bytes).then_some((id, start, bytes))
    }

    /// The physical allocations of which something is mapped in a range, each once for each mapping.
    pub fn allocations_in(
        &self,
        address: CUdeviceptr,
        bytes: u64,
    ) -> impl Iterator<Item = (Id, &PhysicalAllocation)> {
        let end = address.saturating_add(bytes);
        let before = self.by_address.range(..address).next_back();
        let before = before.filter(move |(start, (bytes, _))| address - **start < *bytes && address < end);
        let inside = self.by_address.range(address..end.max(address));
        before.into_iter().chain(inside).filter_map(|(_, (_, id))| Some((*id, self.allocations.get(id)?)))
    }

    /// The starts of the mappings that begin in a range.
    fn starts(&self, address: CUdeviceptr, bytes: u64) -> Vec<CUdeviceptr> {
        self.by_address.range(address..address.saturating_add(bytes)).map(|(start, _)| *start).collect()
    }

    /// Adds a reference; returns the driver's handle.
    fn retain(&mut self, id: Id) -> Option<CUmemGenericAllocationHandle> {
        let allocation = self.allocations.get_mut(&id)?;
        allocation.references += 1;
        Some(allocation.handle)
    }

    /// Removes a reference, if there is one.
    fn release(&mut self, id: Id) -> bool {
        let Some(allocation) = self.allocations.get_mut(&id).filter(|allocation| allocation.references > 0)
        else {
            return false;
        };
        allocation.references -= 1;
        true
    }

    fn note_mapping(&mut self, id: Id, mapping: Mapping) {
        if let Some(allocation) = self.allocations.get_mut(&id) {
            self.by_address.insert(mapping.address, (mapping.bytes, id));
            allocation.mappings.push(mapping);
        }
    }

    /// Removes the mappings that begin in a range. Their physical allocations get a reference each.
    fn take_mappings(&mut self, address: CUdeviceptr, bytes: u64) -> Vec<(Id, Mapping)> {
        let mut taken = Vec::new();
        for start in self.starts(address, bytes) {
            let Some((_, id)) = self.by_address.remove(&start) else { continue };
            let Some(allocation) = self.allocations.get_mut(&id) else { continue };
            let Some(at) = allocation.mappings.iter().position(|mapping| mapping.address == start) else {
                continue;
            };
            allocation.references += 1;
            taken.push((id, allocation.mappings.swap_remove(at)));
        }
        taken
    }

    /// Removes a physical allocation that is neither referenced nor mapped, and has no descriptors.
    fn take_dead(&mut self, id: Id) -> Option<PhysicalAllocation> {
        let allocation = self.allocations.get(&id)?;
        let (is_unused, is_exported) = (allocation.is_unused(), allocation.is_exported);
        if is_unused && is_exported {
            self.kept.insert(id);
        }
        (is_unused && !is_exported).then(|| self.allocations.remove(&id))?
    }

    /// The physical allocations that only descriptors keep.
    fn kept(&mut self) -> Vec<Id> {
        let Self { allocations, kept, .. } = self;
        kept.retain(|id| {
            allocations.get(id).is_some_and(|allocation| allocation.is_unused() && allocation.is_exported)
        });
        kept.iter().copied().collect()
    }
}

/// Creates physical memory with one reference.
///
/// # Errors
/// A driver call failed.
pub(crate) fn create(kind: RegionKind, bytes: u64, properties: &Properties) -> Result<Id, CUresult> {
    let handle = create_handle(bytes, properties)?;
    let origin = Backtrace::here();
    let device = device_for(properties.location);
    let id = adopt(kind, bytes, device, Source::Created(*properties), handle);
    if let Some(allocation) = registry().allocations.get_mut(&id) {
        allocation.origin = origin;
    }
    Ok(id)
}

/// Adds the physical memory of a driver's handle to the registry, which then owns the handle.
pub(crate) fn adopt(
    kind: RegionKind,
    bytes: u64,
    device: c_int,
    source: Source,
    handle: CUmemGenericAllocationHandle,
) -> Id {
    registry().add(PhysicalAllocation {
        kind,
        device,
        bytes,
        source,
        handle,
        mappings: Vec::new(),
        references: 1,
        is_exported: false,
        team: None,
        bound: 0,
        obstacle: None,
        mirrored: Mirrored::default(),
        parked: None,
        origin: Backtrace::default(),
    })
}

/// Adds a multicast object to the registry, as [`adopt`] does.
pub(crate) fn adopt_object(bytes: u64, source: Source, handle: CUmemGenericAllocationHandle) -> Id {
    let id = adopt(RegionKind::Program, bytes, 0, source, handle);
    if let Some(object) = registry().allocations.get_mut(&id) {
        object.team = Some(Team::default());
    }
    id
}

/// Whether it is a multicast object.
pub(crate) fn is_object(id: Id) -> bool {
    registry().allocations.get(&id).is_some_and(|allocation| allocation.team.is_some())
}

/// Records that a multicast object is about to be bound to physical memory, which lives on for that. Returns its device.
pub(crate) fn hold_bound(memory: Id) -> Option<c_int> {
    let mut registry = registry();
    let allocation = registry.allocations.get_mut(&memory)?;
    allocation.bound += 1;
    Some(allocation.device)
}

/// Removes such a record.
pub(crate) fn let_go_bound(memory: Id) {
    let mut registry = registry();
    if let Some(allocation) = registry.allocations.get_mut(&memory) {
        allocation.bound = allocation.bound.saturating_sub(1);
    }
    let dead = registry.take_dead(memory);
    drop(registry);
    dead.into_iter().for_each(|allocation| bury(memory, allocation));
}

/// Unbinds memory from a multicast object.
///
/// # Errors
/// The driver call failed.
pub(crate) fn unbind(object: CUmemGenericAllocationHandle, binding: &Binding) -> Result<(), CUresult> {
    let (offset, bytes) = (binding.offset as usize, binding.bytes as usize);
    // SAFETY: unbinding touches no memory; the driver checks the parameters.
    checked(unsafe { driver::cuMulticastUnbind(object, binding.device, offset, bytes) })
}

/// The driver's handle of a physical allocation, and its size.
pub(crate) fn handle_and_bytes(id: Id) -> Option<(CUmemGenericAllocationHandle, u64)> {
    registry().allocations.get(&id).map(|allocation| (allocation.handle, allocation.bytes))
}

/// The device by which memory at a location is copied: for memory of the host, that of the current context.
fn device_for(location: CUmemLocation) -> c_int {
    let of_context = || context::current().map(|(_, device)| device);
    location.device().or_else(of_context).or_else(|| context::devices().first().copied()).unwrap_or(0)
}

/// The device by which the memory of a driver's handle is copied, if the driver reports where it is.
pub(crate) fn device_of(handle: CUmemGenericAllocationHandle) -> Option<c_int> {
    let properties = driver::ask(Properties::of(0), |properties| {
        // SAFETY: the call writes to a local variable of the structure's layout, whose fields may have any value.
        unsafe { driver::cuMemGetAllocationPropertiesFromHandle(properties.cast(), handle) }
    });
    Some(device_for(properties.ok()?.location))
}

/// A driver's handle of physical memory, which can be exported wherever the device can do that.
///
/// # Errors
/// A driver call failed.
pub(crate) fn create_handle(
    bytes: u64,
    properties: &Properties,
) -> Result<CUmemGenericAllocationHandle, CUresult> {
    let handle_types = properties.handle_types | POSIX_DESCRIPTOR.0;
    match create_handle_exactly(bytes, &Properties { handle_types, ..*properties }) {
        // What a driver answers to a kind of memory that cannot be exported is not documented.
        Err(error) if error != OUT_OF_MEMORY => create_handle_exactly(bytes, properties),
        result => result,
    }
}

fn create_handle_exactly(
    bytes: u64,
    properties: &Properties,
) -> Result<CUmemGenericAllocationHandle, CUresult> {
    let properties = (&raw const *properties).cast();
    // SAFETY: the call writes to a local variable, the properties are a whole structure.
    driver::ask(0, |handle| unsafe { driver::cuMemCreate(handle, bytes as usize, properties, 0) })
}

pub(crate) fn import_handle(descriptor: BorrowedFd<'_>) -> Result<CUmemGenericAllocationHandle, CUresult> {
    // The descriptor itself takes the pointer's place (CUDA driver API reference, cuMemImportFromShareableHandle).
    let value = descriptor.as_raw_fd() as usize as *mut std::ffi::c_void;
    // SAFETY: the call writes to a local variable; the descriptor is open for the length of the call.
    let import = |handle| unsafe { driver::cuMemImportFromShareableHandle(handle, value, POSIX_DESCRIPTOR) };
    driver::ask(0, import)
}

/// A descriptor by which another process can import physical memory, and which keeps it alive.
///
/// # Errors
/// A driver call failed.
pub(crate) fn export(handle: CUmemGenericAllocationHandle) -> Result<OwnedFd, CUresult> {
    let export = |descriptor: *mut c_int| {
        // SAFETY: the call writes to a local variable, of the type that this kind of handle is written as.
        unsafe { driver::cuMemExportToShareableHandle(descriptor.cast(), handle, POSIX_DESCRIPTOR, 0) }
    };
    let descriptor = driver::ask(-1, export)?;
    // SAFETY: the driver has made it for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Maps the first `bytes` bytes of a physical allocation at an address inside a reservation. No device has access
/// yet.
///
/// # Errors
/// A driver call failed.
pub(crate) fn map(id: Id, address: CUdeviceptr, bytes: u64) -> Result<(), CUresult> {
    // With a reference it is the physical allocation's own handle until the end of the call.
    let handle = registry().retain(id).ok_or(INVALID_VALUE)?;
    // SAFETY: mapping touches no memory in use; the driver checks the range.
    let result = checked(unsafe { driver::cuMemMap(address, bytes as usize, 0, handle, 0) });
    if result.is_ok() {
        registry().note_mapping(id, Mapping { address, bytes, access: Vec::new(), is_mapped: true });
    }
    release(id);
    result
}

/// Unmaps a range that is made up of whole mappings. Physical memory that is then neither referenced nor mapped is
/// released.
///
/// # Errors
/// A driver call failed.
pub(crate) fn unmap(address: CUdeviceptr, bytes: u64) -> Result<(), CUresult> {
    // Before the call: at its end the addresses may already be another mapping's.
    let mappings = registry().take_mappings(address, bytes);
    // SAFETY: the caller owns what is mapped there; the driver checks the range.
    let result = checked(unsafe { driver::cuMemUnmap(address, bytes as usize) });
    for (id, mapping) in mappings {
        if result.is_err() {
            registry().note_mapping(id, mapping);
        }
        release(id);
    }
    result
}

/// Sets the access rights of a range of whole mappings; other locations keep theirs.
///
/// # Errors
/// A driver call failed.
pub(crate) fn set_access(address: CUdeviceptr, bytes: u64, access: &[Access]) -> Result<(), CUresult> {
    // SAFETY: the descriptions are a slice; the driver checks the range.
    checked(unsafe {
        driver::cuMemSetAccess(address, bytes as usize, access.as_ptr().cast(), access.len())
    })?;
    let mut registry = registry();
    for start in registry.starts(address, bytes) {
        let Some(&(_, id)) = registry.by_address.get(&start) else { continue };
        let Some(allocation) = registry.allocations.get_mut(&id) else { continue };
        for mapping in allocation.mappings.iter_mut().filter(|mapping| mapping.address == start) {
            for one in access {
                mapping.access.retain(|known| !known.is_of_same(one));
                mapping.access.push(*one);
            }
        }
    }
    Ok(())
}

/// Adds a reference to a physical allocation, which needs one more release.
pub(crate) fn retain(id: Id) -> bool {
    registry().retain(id).is_some()
}

/// Notes that there is a descriptor of a physical allocation. False if the allocation has ended.
pub(crate) fn keep(id: Id) -> bool {
    registry().allocations.get_mut(&id).map(|allocation| allocation.is_exported = true).is_some()
}

/// Notes that there are no more descriptors of a physical allocation: if it is unused, it ends.
pub(crate) fn stop_keeping(id: Id) {
    let mut registry = registry();
    if let Some(allocation) = registry.allocations.get_mut(&id) {
        allocation.is_exported = false;
    }
    let dead = registry.take_dead(id);
    drop(registry);
    dead.into_iter().for_each(|allocation| bury(id, allocation));
}

/// The physical allocations that only descriptors keep.
pub(crate) fn kept() -> Vec<Id> {
    registry().kept()
}

/// What is done for a physical allocation that has ended.
type AtEnd = fn(Id, &PhysicalAllocation);

static AT_END: OnceLock<AtEnd> = OnceLock::new();

/// Registers what is done for each physical allocation that has ended; the first registration stays.
pub(super) fn register(at_end: AtEnd) {
    let _ = AT_END.set(at_end);
}

/// Releases a reference: the memory lives on as long as there are others, or it is mapped.
pub(crate) fn release(id: Id) {
    let _ = try_release(id);
}

/// The same; returns whether there was a reference to be released.
pub(crate) fn try_release(id: Id) -> bool {
    let mut registry = registry();
    let was_there = registry.release(id);
    let dead = registry.take_dead(id);
    drop(registry);
    dead.into_iter().for_each(|allocation| bury(id, allocation));
    was_there
}

/// Notes that a physical allocation cannot be saved because of a call.
pub(crate) fn hinder(id: Id, call: &'static str) {
    let mut registry = registry();
    // The first one stays.
    if let Some(allocation) =
        registry.allocations.get_mut(&id).filter(|allocation| allocation.obstacle.is_none())
    {
        allocation.obstacle = Some(call);
        taint::begin(call);
    }
}

/// The remaining work for a physical allocation that was removed.
fn bury(id: Id, allocation: PhysicalAllocation) {
    for binding in allocation.team.iter().flat_map(|team| &team.bindings) {
        // Nobody can unbind it any more. There is nothing to do about a failure.
        let _ = unbind(allocation.handle, binding);
        let_go_bound(binding.memory);
    }
    if let Some(at_end) = AT_END.get() {
        at_end(id, &allocation);
    }
    if allocation.handle != 0 {
        // SAFETY: the handle is ours, and no longer used.
        let release = || checked(unsafe { driver::cuMemRelease(allocation.handle) });
        // There is nothing to do about a failure, but the driver's checkpoint would hang while there is an object.
        if allocation.team.is_none() {
            let _ = release();
        } else if driver::retry(release).is_err() {
            taint::mark_untyped("cuMemRelease");
        }
    }
    if let Some(call) = allocation.obstacle {
        taint::end(call);
    }
}

#[cfg(test)]
mod tests;
