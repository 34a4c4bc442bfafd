//! The calls of multicast objects. Rules without another source are those of the CUDA driver API reference, "Multicast
//! Object Management".

use std::sync::Arc;

use cuda_abi::layout;
use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{
    CUdevice, CUdeviceptr, CUmemGenericAllocationHandle, CUmulticastGranularity_flags, CUmulticastObjectProp,
};

use super::Span;
use super::layout::read_structure;
use super::ledger;
use super::multicast::{Binding, Bound, Multicast};
use super::segment::Segment;
use super::space::{PAGE_BYTES, Right, Target};
use super::state::{AllocationKind, STATE, State};
use super::vmm::{ALL_HANDLE_TYPES, Physical};
use crate::error::{Result, write_out};
use crate::process;

const RECOMMENDED: u32 = sys::CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_RECOMMENDED as u32;
/// A team's devices are bits of a word.
const MAX_TEAM: u32 = 64;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

impl State {
    fn multicast(&self, handle: u64) -> Result<Arc<Multicast>> {
        self.handle(handle)?.multicast().cloned().ok_or(INVALID)
    }
}

/// The sizes are apart from what only cuMulticastCreate asks for.
fn check_properties(properties: &CUmulticastObjectProp) -> Result {
    if !process::machine()?.has_multicast() {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    let types = u32::try_from(properties.handleTypes).map_err(|_| INVALID)?;
    if properties.size == 0
        || !(1..=MAX_TEAM).contains(&properties.numDevices)
        || types & !ALL_HANDLE_TYPES != 0
    {
        return Err(INVALID);
    }
    if properties.flags != 0 {
        return Err(INVALID);
    }
    if types & !layout::POSIX_DESCRIPTOR.0 != 0 {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    Ok(())
}

pub(crate) unsafe fn cuMulticastGetGranularity(
    out: *mut usize,
    properties: *const CUmulticastObjectProp,
    option: CUmulticastGranularity_flags,
) -> Result {
    process::machine()?;
    // SAFETY: `properties` is the caller's structure or NULL; it has integers only.
    check_properties(&unsafe { read_structure(properties) }?)?;
    if option > RECOMMENDED {
        return Err(INVALID);
    }
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, PAGE_BYTES as usize) }
}

pub(crate) unsafe fn cuMulticastCreate(
    out: *mut CUmemGenericAllocationHandle,
    properties: *const CUmulticastObjectProp,
) -> Result {
    process::machine()?;
    // SAFETY: `properties` is the caller's structure or NULL; it has integers only.
    let properties = unsafe { read_structure(properties) }?;
    check_properties(&properties)?;
    let size_bytes = properties.size as u64;
    if out.is_null() || !size_bytes.is_multiple_of(PAGE_BYTES) {
        return Err(INVALID);
    }
    let types = u32::try_from(properties.handleTypes).map_err(|_| INVALID)?;
    let object = Multicast::create(size_bytes, types, properties.numDevices)?;
    let handle = STATE.write().add_handle(Physical::Multicast(object));
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, handle) }
}

pub(crate) unsafe fn cuMulticastAddDevice(handle: CUmemGenericAllocationHandle, device: CUdevice) -> Result {
    process::machine()?;
    let object = STATE.read().multicast(handle)?;
    let device = process::device(device)?.ordinal;
    object.add_device(ledger::device(device)?.gpu())
}

/// A part of an object, and the memory that is to be bound to it.
struct Wanted {
    object: Arc<Multicast>,
    offset: u64,
    size_bytes: u64,
    segment: Arc<Segment>,
    segment_offset: u64,
    /// As the second version of the calls names it.
    device: Option<CUdevice>,
}

impl Wanted {
    /// Binds the memory. Waits for the devices that have not been added yet.
    fn bind(self) -> Result {
        let Self { object, offset, size_bytes, segment, segment_offset, .. } = self;
        let device = segment.location.device().ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?;
        let gpu = segment.gpu()?;
        let numbers = [offset, size_bytes, segment_offset];
        let fits = |offset: u64, whole: u64| offset.checked_add(size_bytes).is_some_and(|end| end <= whole);
        if size_bytes == 0
            || numbers.iter().any(|number| !number.is_multiple_of(PAGE_BYTES))
            || !fits(segment_offset, segment.size_bytes)
            || !fits(offset, object.size_bytes)
        {
            return Err(INVALID);
        }
        // An object that other processes have, or may get, takes memory only that they may get too.
        if (object.is_imported || object.handle_types != 0) && segment.handle_types == 0 {
            return Err(INVALID);
        }
        let record = object.wait_for_team()?;
        if !record.has(gpu) || self.device.is_some_and(|named| named != device) {
            return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        let bound = Bound {
            gpu,
            offset,
            size_bytes,
            segment: segment.id()?,
            segment_bytes: segment.size_bytes,
            segment_offset,
        };
        object.change(|record| {
            record.prune();
            if record.bound.iter().any(|other| other.gpu == gpu && other.overlaps(offset, size_bytes)) {
                return Err(INVALID);
            }
            record.bound.push(bound);
            Ok(())
        })?;
        STATE.write().bindings.push(Binding { object, gpu, offset, size_bytes, segment });
        Ok(())
    }
}

/// A place in an object.
type Place = (CUmemGenericAllocationHandle, usize);

/// `source` finds the memory, and the place in it.
fn bind(
    (handle, offset): Place,
    source: impl FnOnce(&State) -> Result<(Arc<Segment>, u64)>,
    size_bytes: usize,
    device: Option<CUdevice>,
    flags: u64,
) -> Result {
    process::machine()?;
    let state = STATE.read();
    let object = state.multicast(handle)?;
    let (segment, segment_offset) = source(&state)?;
    drop(state);
    if flags != 0 {
        return Err(INVALID);
    }
    let (offset, size_bytes) = (offset as u64, size_bytes as u64);
    Wanted { object, offset, size_bytes, segment, segment_offset, device }.bind()
}

fn memory_at(handle: u64, offset: usize) -> impl FnOnce(&State) -> Result<(Arc<Segment>, u64)> {
    move |state| {
        let segment = state.handle(handle)?.segment().ok_or(INVALID)?;
        Ok((Arc::clone(segment), offset as u64))
    }
}

pub(crate) unsafe fn cuMulticastBindMem(
    handle: CUmemGenericAllocationHandle,
    offset: usize,
    memory: CUmemGenericAllocationHandle,
    memory_offset: usize,
    size_bytes: usize,
    flags: u64,
) -> Result {
    bind((handle, offset), memory_at(memory, memory_offset), size_bytes, None, flags)
}

pub(crate) unsafe fn cuMulticastBindMem_v2(
    handle: CUmemGenericAllocationHandle,
    device: CUdevice,
    offset: usize,
    memory: CUmemGenericAllocationHandle,
    memory_offset: usize,
    size_bytes: usize,
    flags: u64,
) -> Result {
    process::device(device)?;
    bind((handle, offset), memory_at(memory, memory_offset), size_bytes, Some(device), flags)
}

impl State {
    /// The memory at an address, and the place in it: only memory of cuMemCreate and of pools.
    fn bindable_at(&self, address: u64) -> Option<(Arc<Segment>, u64)> {
        let (start, mapping) = self.mapping_at(address)?;
        let is_of_pool = || {
            let allocation = self.allocation_at(address).map(|(_, allocation)| allocation.kind);
            matches!(allocation, Some(AllocationKind::Pool { .. }))
        };
        let Target::Device { segment, offset } = &mapping.target else { return None };
        let is_bindable = self.reservation_at(address).is_some() || is_of_pool();
        is_bindable.then(|| (Arc::clone(segment), offset + (address - start)))
    }
}

pub(crate) unsafe fn cuMulticastBindAddr(
    handle: CUmemGenericAllocationHandle,
    offset: usize,
    address: CUdeviceptr,
    size_bytes: usize,
    flags: u64,
) -> Result {
    bind((handle, offset), |state| state.bindable_at(address).ok_or(INVALID), size_bytes, None, flags)
}

pub(crate) unsafe fn cuMulticastBindAddr_v2(
    handle: CUmemGenericAllocationHandle,
    device: CUdevice,
    offset: usize,
    address: CUdeviceptr,
    size_bytes: usize,
    flags: u64,
) -> Result {
    process::device(device)?;
    bind((handle, offset), |state| state.bindable_at(address).ok_or(INVALID), size_bytes, Some(device), flags)
}

/// Offset and size have to be those of the binding: the reference calls anything else undefined, here it is an error.
pub(crate) unsafe fn cuMulticastUnbind(
    handle: CUmemGenericAllocationHandle,
    device: CUdevice,
    offset: usize,
    size_bytes: usize,
) -> Result {
    let gpu = ledger::device(process::device(device)?.ordinal)?.gpu();
    let mut state = STATE.write();
    let object = state.multicast(handle)?;
    let (offset, size_bytes) = (offset as u64, size_bytes as u64);
    let is_it = |binding: &Binding| {
        binding.object.handle == object.handle
            && (binding.gpu, binding.offset, binding.size_bytes) == (gpu, offset, size_bytes)
    };
    let index = state.bindings.iter().position(is_it).ok_or(INVALID)?;
    object.change(|record| {
        record.bound.retain(|bound| (bound.gpu, bound.offset) != (gpu, offset));
        Ok(())
    })?;
    let removed = state.bindings.swap_remove(index);
    drop(state);
    drop(removed);
    Ok(())
}

/// Whether the process holds a multicast object, bound or not: the driver's checkpoint never returns then (nccl pull
/// request 2340).
pub(crate) fn has_multicast() -> bool {
    let state = STATE.read();
    let is_mapped = || state.mappings.values().any(|mapping| matches!(mapping.target, Target::Multicast(_)));
    !state.bindings.is_empty()
        || state.handles.values().any(|handle| handle.multicast().is_some())
        || is_mapped()
}

/// The memory of all devices of a team behind a multicast address, in the order of the devices: spans of the same
/// range. None if the address is no such, if device `ordinal` may not access it, or if a device has nothing bound there.
pub(crate) fn team(address: u64, ordinal: i32) -> Option<Vec<Span>> {
    let state = STATE.read();
    let (start, mapping) = state.mapping_at(address)?;
    let Target::Multicast(object) = &mapping.target else { return None };
    let (object, len, right) = (Arc::clone(object), mapping.len, state.right(mapping, ordinal));
    drop(state);
    if right == Right::None {
        return None;
    }
    let record = object.record().ok()?;
    let at = address - start;
    let of_device = |gpu: i32| record.bound.iter().find(|bound| bound.gpu == gpu && bound.overlaps(at, 1));
    let parts: Option<Vec<&Bound>> = (0..64).filter(|gpu| record.has(*gpu)).map(of_device).collect();
    let parts = parts?;
    let first = parts.iter().map(|bound| bound.offset).max()?;
    let end = parts.iter().map(|bound| bound.offset + bound.size_bytes).min()?.min(len);
    let span = |bound: &&Bound| {
        let segment = bound_segment(&object, bound)?;
        let backing = segment.backing().ok()?;
        let place = bound.segment_offset + (first - bound.offset);
        // SAFETY: a binding lies within its segment, which is mapped whole.
        let host = unsafe { backing.host.add(usize::try_from(place).ok()?) };
        Some(Span {
            start: start + first,
            len: end - first,
            host,
            writable: right == Right::ReadWrite,
            keep: backing,
        })
    };
    parts.iter().map(span).collect()
}

/// The memory of a binding, of this process or of another.
fn bound_segment(object: &Multicast, bound: &Bound) -> Option<Arc<Segment>> {
    let state = STATE.read();
    let is_it = |binding: &&Binding| {
        binding.object.handle == object.handle && (binding.gpu, binding.offset) == (bound.gpu, bound.offset)
    };
    let own = state.bindings.iter().find(is_it).map(|binding| Arc::clone(&binding.segment));
    own.or_else(|| Segment::open(bound.gpu, bound.segment, bound.segment_bytes).ok())
}
