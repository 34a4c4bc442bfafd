//! Virtual memory management: address ranges, physical memory and mappings apart (cuMemAddressReserve,
//! cuMemCreate, cuMemMap and their kin). Rules without another source are those of the CUDA driver API
//! reference, "Virtual Memory Management".

use std::ffi::c_void;
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use cuda_abi::layout::{self, Properties};
use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{
    CUdeviceptr, CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemGenericAllocationHandle,
    CUmemLocation, CUmemRangeHandleType,
};

use super::layout::{DeviceRights, Location, read_array, read_structure};
use super::ledger;
use super::multicast::Multicast;
use super::segment::Segment;
use super::space::{Access, Mapping, PAGE_BYTES, Reserved, Right, Target, hide_from_host, show_to_host};
use super::state::{STATE, State};
use crate::error::{Result, write_out};
use crate::{handle, process};

const PINNED: u32 = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32;
const POSIX_DESCRIPTOR: u32 = layout::POSIX_DESCRIPTOR.0;
const FABRIC: u32 = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC.0;
pub(super) const ALL_HANDLE_TYPES: u32 = 2 * FABRIC - 1;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
/// The answer to an address that is not aligned, and to more than the memory has (seen with 580.159.04).
const BAD_PLACE: CUresult = CUresult::CUDA_ERROR_NOT_SUPPORTED;

/// A handle of cuMemCreate, cuMemImportFromShareableHandle or cuMemRetainAllocationHandle. The memory behind
/// it lives until the last reference is released and it is mapped nowhere.
pub(super) struct Handle {
    object: Physical,
    /// How often it must still be released.
    references: u32,
}

/// What a handle stands for.
#[derive(Clone)]
pub(super) enum Physical {
    Memory(Arc<Segment>),
    Multicast(Arc<Multicast>),
}

impl Physical {
    /// The value of the handles that stand for it.
    fn handle(&self) -> u64 {
        match self {
            Self::Memory(segment) => segment.handle,
            Self::Multicast(object) => object.handle,
        }
    }

    fn handle_types(&self) -> u32 {
        match self {
            Self::Memory(segment) => segment.handle_types,
            Self::Multicast(object) => object.handle_types,
        }
    }

    fn size_bytes(&self) -> u64 {
        match self {
            Self::Memory(segment) => segment.size_bytes,
            Self::Multicast(object) => object.size_bytes,
        }
    }

    /// Whether it came by a descriptor, also one of this process.
    fn is_imported(&self) -> bool {
        match self {
            Self::Memory(segment) => segment.is_imported,
            Self::Multicast(object) => object.is_imported,
        }
    }

    fn export(&self) -> Result<OwnedFd> {
        match self {
            Self::Memory(segment) => segment.export(),
            Self::Multicast(object) => object.export(),
        }
    }
}

impl Handle {
    pub(super) fn segment(&self) -> Option<&Arc<Segment>> {
        match &self.object {
            Physical::Memory(segment) => Some(segment),
            Physical::Multicast(_) => None,
        }
    }

    pub(super) fn multicast(&self) -> Option<&Arc<Multicast>> {
        match &self.object {
            Physical::Memory(_) => None,
            Physical::Multicast(object) => Some(object),
        }
    }
}

impl State {
    /// The reservation around an address.
    pub(super) fn reservation_at(&self, address: u64) -> Option<&Reserved> {
        let (&start, reserved) = self.reservations.range(..=address).next_back()?;
        (address - start < reserved.len).then_some(reserved)
    }

    /// The reservation that the range lies in.
    fn reservation_around(&self, start: u64, len: u64) -> Result<&Reserved> {
        let reserved = self.reservation_at(start).ok_or(INVALID)?;
        if len > reserved.start + reserved.len - start { Err(INVALID) } else { Ok(reserved) }
    }

    /// The starts of the mappings that make up the range, which must be whole, without gaps and inside one
    /// reservation.
    fn whole_mappings(&self, start: u64, len: u64) -> Result<Vec<u64>> {
        if len == 0 || !len.is_multiple_of(PAGE_BYTES) {
            return Err(INVALID);
        }
        self.reservation_around(start, len)?;
        let mut starts = Vec::new();
        let mut at = start;
        while at < start + len {
            let mapping = self.mappings.get(&at).ok_or(INVALID)?;
            starts.push(at);
            at += mapping.len;
        }
        if at == start + len { Ok(starts) } else { Err(INVALID) }
    }

    /// What a VMM mapping at this address shows.
    fn vmm_object_at(&self, address: u64) -> Option<Physical> {
        self.reservation_at(address)?;
        match &self.mapping_at(address)?.1.target {
            Target::Device { segment, .. } => Some(Physical::Memory(Arc::clone(segment))),
            Target::Multicast(object) => Some(Physical::Multicast(Arc::clone(object))),
            Target::Host(_) => None,
        }
    }

    pub(super) fn handle(&self, handle: u64) -> Result<&Handle> {
        self.handles.get(&handle).ok_or_else(|| self.no_handle(handle))
    }

    /// The answer to a value that is not the handle of physical memory. The handle of memory that is gone kills the process
    /// (seen with 580.159.04); that of memory which is still mapped was seen to be an error.
    fn no_handle(&self, value: u64) -> CUresult {
        let mut mapped = self.mappings.values().filter_map(|mapping| mapping.target.handle());
        let mut bound = self.bindings.iter().map(|binding| &binding.segment);
        let lives = mapped.any(|handle| handle == value) || bound.any(|segment| segment.handle == value);
        if !lives && usize::try_from(value).is_ok_and(handle::was_given) {
            eprintln!("simcuda: a handle of physical memory is used that is gone: {value:#x}");
            std::process::abort();
        }
        INVALID
    }

    pub(super) fn add_handle(&mut self, object: Physical) -> u64 {
        let value = object.handle();
        self.handles.entry(value).or_insert(Handle { object, references: 0 }).references += 1;
        value
    }
}

/// Where memory with these properties is to be.
fn check_properties(properties: &Properties) -> Result<Location> {
    if properties.kind != PINNED || properties.handle_types & !ALL_HANDLE_TYPES != 0 {
        return Err(INVALID);
    }
    let location = Location::of_memory(properties.location)?;
    if location == Location::Host && properties.handle_types != 0 {
        // Memory of no particular NUMA node cannot be shared (reference, cuMemCreate).
        return Err(INVALID);
    }
    let asks_for_more = properties.usage != 0 || properties.is_rdma_capable != 0;
    if properties.handle_types & !POSIX_DESCRIPTOR != 0 || asks_for_more {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    Ok(location)
}

pub(crate) unsafe fn cuMemGetAllocationGranularity(
    out: *mut usize,
    properties: *const sys::CUmemAllocationProp,
    option: CUmemAllocationGranularity_flags,
) -> Result {
    process::machine()?;
    // SAFETY: `properties` is the caller's structure or NULL.
    let properties = unsafe { read_structure(properties.cast::<Properties>()) }?;
    check_properties(&properties)?;
    if option > sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED as u32 {
        return Err(INVALID);
    }
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, PAGE_BYTES as usize) }
}

// ---- addresses ----

pub(crate) unsafe fn cuMemAddressReserve(
    out: *mut CUdeviceptr,
    size_bytes: usize,
    align: usize,
    hint: CUdeviceptr,
    flags: u64,
) -> Result {
    process::machine()?;
    let (size_bytes, align) = (size_bytes as u64, align as u64);
    let is_valid = size_bytes > 0 && size_bytes.is_multiple_of(PAGE_BYTES) && flags == 0;
    if out.is_null() || !is_valid || align != 0 && !align.is_power_of_two() {
        return Err(INVALID);
    }
    let reserved = Reserved::new(size_bytes, align.max(PAGE_BYTES), hint)?;
    let start = reserved.start;
    STATE.write().reservations.insert(start, reserved);
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, start) }
}

pub(crate) unsafe fn cuMemAddressFree(start: CUdeviceptr, size_bytes: usize) -> Result {
    process::machine()?;
    let mut state = STATE.write();
    let is_whole = state.reservations.get(&start).is_some_and(|reserved| reserved.len == size_bytes as u64);
    if !is_whole || state.mappings.range(start..start + size_bytes as u64).next().is_some() {
        return Err(INVALID);
    }
    let removed = state.reservations.remove(&start);
    // Dropped under the lock, so that the addresses are not reused before they are free.
    drop(removed);
    Ok(())
}

// ---- physical memory ----

pub(crate) unsafe fn cuMemCreate(
    out: *mut CUmemGenericAllocationHandle,
    size_bytes: usize,
    properties: *const sys::CUmemAllocationProp,
    flags: u64,
) -> Result {
    process::machine()?;
    // SAFETY: `properties` is the caller's structure or NULL.
    let properties = unsafe { read_structure(properties.cast::<Properties>()) }?;
    let size_bytes = size_bytes as u64;
    if out.is_null() || size_bytes == 0 || !size_bytes.is_multiple_of(PAGE_BYTES) || flags != 0 {
        return Err(INVALID);
    }
    let location = check_properties(&properties)?;
    let mut state = STATE.write();
    let segment = state.trimming_pools(|_| Segment::create(location, size_bytes, properties.handle_types))?;
    let handle = state.add_handle(Physical::Memory(segment));
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, handle) }
}

pub(crate) unsafe fn cuMemRelease(handle: CUmemGenericAllocationHandle) -> Result {
    process::machine()?;
    let mut state = STATE.write();
    state.handle(handle)?;
    let known = state.handles.get_mut(&handle).ok_or(INVALID)?;
    known.references -= 1;
    let removed = if known.references == 0 { state.handles.remove(&handle) } else { None };
    drop(state);
    drop(removed);
    Ok(())
}

pub(crate) unsafe fn cuMemRetainAllocationHandle(
    out: *mut CUmemGenericAllocationHandle,
    address: *mut c_void,
) -> Result {
    process::machine()?;
    let mut state = STATE.write();
    let object = state.vmm_object_at(address as u64).ok_or(INVALID)?;
    if out.is_null() {
        return Err(INVALID);
    }
    let handle = state.add_handle(object);
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, handle) }
}

pub(crate) unsafe fn cuMemGetAllocationPropertiesFromHandle(
    out: *mut sys::CUmemAllocationProp,
    handle: CUmemGenericAllocationHandle,
) -> Result {
    process::machine()?;
    let state = STATE.read();
    let segment = state.handle(handle)?.segment().ok_or(INVALID)?;
    let (handle_types, location) = (segment.handle_types, segment.location.location());
    let properties = Properties { handle_types, location, ..Properties::of(0) };
    // SAFETY: `out` is the caller's out parameter, of the same layout.
    unsafe { write_out(out.cast::<Properties>(), properties) }
}

/// Only descriptors, and only of memory that was created for it, by this process: what was imported is not exported again
/// (seen with 580.159.04).
pub(crate) unsafe fn cuMemExportToShareableHandle(
    out: *mut c_void,
    handle: CUmemGenericAllocationHandle,
    kind: CUmemAllocationHandleType,
    flags: u64,
) -> Result {
    process::machine()?;
    let object = STATE.read().handle(handle)?.object.clone();
    let is_descriptor = kind.0 == POSIX_DESCRIPTOR && object.handle_types() & kind.0 != 0;
    if out.is_null() || flags != 0 || !is_descriptor || object.is_imported() {
        return Err(INVALID);
    }
    let descriptor = object.export()?;
    // SAFETY: the caller passes the address of an int for a descriptor.
    unsafe { write_out(out.cast::<RawFd>(), descriptor.into_raw_fd()) }
}

/// The descriptor itself is passed instead of a pointer, and stays the caller's.
pub(crate) unsafe fn cuMemImportFromShareableHandle(
    out: *mut CUmemGenericAllocationHandle,
    os_handle: *mut c_void,
    kind: CUmemAllocationHandleType,
) -> Result {
    process::machine()?;
    if out.is_null() || kind.0 != POSIX_DESCRIPTOR {
        return Err(INVALID);
    }
    let object = match Multicast::import(duplicate(os_handle as usize)?) {
        Some(object) => Physical::Multicast(object),
        None => Physical::Memory(Segment::import(duplicate(os_handle as usize)?)?),
    };
    let handle = STATE.write().add_handle(object);
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, handle) }
}

pub(super) fn duplicate(descriptor: usize) -> Result<OwnedFd> {
    let descriptor = RawFd::try_from(descriptor).map_err(|_| INVALID)?;
    // SAFETY: fcntl looks the number up and fails for one that is no open descriptor.
    if unsafe { libc::fcntl(descriptor, libc::F_GETFD) } < 0 {
        return Err(INVALID);
    }
    // SAFETY: it is open, as the caller promises for the length of the call.
    let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
    descriptor.try_clone_to_owned().map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
}

pub(crate) unsafe fn cuMemGetHandleForAddressRange(
    _out: *mut c_void,
    _start: CUdeviceptr,
    _size_bytes: usize,
    kind: CUmemRangeHandleType,
    _flags: u64,
) -> Result {
    process::machine()?;
    if kind != sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as u32 {
        return Err(INVALID);
    }
    // The device says so too (CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED).
    Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
}

// ---- mappings ----

/// Mapped memory is not accessible before cuMemSetAccess.
pub(crate) unsafe fn cuMemMap(
    start: CUdeviceptr,
    size_bytes: usize,
    offset: usize,
    handle: CUmemGenericAllocationHandle,
    flags: u64,
) -> Result {
    process::machine()?;
    let len = size_bytes as u64;
    if len == 0 || offset != 0 || flags != 0 {
        return Err(INVALID);
    }
    if !start.is_multiple_of(PAGE_BYTES) || !len.is_multiple_of(PAGE_BYTES) {
        return Err(BAD_PLACE);
    }
    let object = STATE.read().handle(handle)?.object.clone();
    if let Physical::Multicast(object) = &object {
        object.wait_for_team()?;
    }
    let mut state = STATE.write();
    // It may have been released meanwhile.
    state.handle(handle)?;
    state.reservation_around(start, len)?;
    let is_taken =
        state.mapping_at(start).is_some() || state.mappings.range(start..start + len).next().is_some();
    if is_taken {
        return Err(INVALID);
    }
    if len > object.size_bytes() {
        return Err(BAD_PLACE);
    }
    let target = match object {
        Physical::Memory(segment) => Target::Device { segment, offset: 0 },
        Physical::Multicast(object) => Target::Multicast(object),
    };
    let access = Access::Devices(DeviceRights::default());
    state.mappings.insert(start, Mapping { len, target, access });
    Ok(())
}

/// Does not wait for work: a kernel that still uses the memory meets an illegal address, or not.
pub(crate) unsafe fn cuMemUnmap(start: CUdeviceptr, size_bytes: usize) -> Result {
    process::machine()?;
    let mut state = STATE.write();
    let starts = state.whole_mappings(start, size_bytes as u64)?;
    let mut removed = Vec::with_capacity(starts.len());
    for start in starts {
        if let Some(mapping) = state.mappings.remove(&start) {
            if matches!(mapping.access, Access::Devices(rights) if rights.host != Right::None) {
                hide_from_host(start, mapping.len)?;
            }
            removed.push(mapping);
        }
    }
    drop(state);
    drop(removed);
    Ok(())
}

pub(crate) unsafe fn cuMemSetAccess(
    start: CUdeviceptr,
    size_bytes: usize,
    descriptions: *const sys::CUmemAccessDesc,
    count: usize,
) -> Result {
    process::machine()?;
    // SAFETY: the caller passes an array of `count` descriptions or NULL.
    let descriptions = unsafe { read_array(descriptions.cast::<layout::Access>(), count) }?;
    let mut state = STATE.write();
    let starts = state.whole_mappings(start, size_bytes as u64)?;
    // All descriptions are checked before the first mapping changes.
    let mut changed = Vec::with_capacity(starts.len());
    for start in starts {
        let mapping = state.mappings.get(&start).ok_or(INVALID)?;
        changed.push((start, changed_rights(mapping, &descriptions)?));
    }
    for (start, rights) in changed {
        let Some(mapping) = state.mappings.get_mut(&start) else { continue };
        let before = std::mem::replace(&mut mapping.access, Access::Devices(rights));
        if let (Access::Devices(before), Some(segment)) = (before, mapping.target.segment())
            && before.host != rights.host
        {
            show_to_host(start, mapping.len, segment, rights.host)?;
        }
    }
    Ok(())
}

/// The rights to a mapping once the descriptions are applied.
fn changed_rights(mapping: &Mapping, descriptions: &[layout::Access]) -> Result<DeviceRights> {
    let Access::Devices(mut rights) = mapping.access else { return Err(INVALID) };
    let memory = match &mapping.target {
        Target::Device { segment, .. } => segment.location,
        Target::Host(_) => return Err(INVALID),
        Target::Multicast(object) => {
            let record = object.record()?;
            let is_in_team = |access: &layout::Access| {
                ledger::device(access.location.id).is_ok_and(|memory| record.has(memory.gpu()))
            };
            if !descriptions.iter().all(is_in_team) {
                return Err(INVALID);
            }
            // The host is refused below, as with any device's memory.
            Location::Device(0)
        }
    };
    descriptions.iter().try_for_each(|description| rights.apply(*description, memory))?;
    Ok(rights)
}

pub(crate) unsafe fn cuMemGetAccess(
    out: *mut u64,
    location: *const CUmemLocation,
    address: CUdeviceptr,
) -> Result {
    process::machine()?;
    // SAFETY: `location` is the caller's structure or NULL.
    let location = unsafe { read_structure(location) }?;
    let state = STATE.read();
    let (_, mapping) = state.mapping_at(address).ok_or(INVALID)?;
    let Access::Devices(rights) = mapping.access else { return Err(INVALID) };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, u64::from(rights.flags_of(location)?)) }
}
