//! Managed memory: plain host memory that devices access at the same address. Nothing migrates; advice and
//! prefetches are checked and remembered for the whole allocation, and have no other effect.

use std::ffi::c_void;

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{CUdevice, CUdeviceptr, CUmem_advise, CUmem_range_attribute, CUmemLocation, CUstream};

use super::host;
use super::layout::{Location, read_array};
use super::space::HostRange;
use super::state::{AllocationKind, STATE, State};
use crate::error::{Result, write_out};
use crate::stream::{self, Work};
use crate::{context, process};

const ATTACH_GLOBAL: u32 = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
const ATTACH_HOST: u32 = sys::CUmemAttach_flags::CU_MEM_ATTACH_HOST as u32;
/// `CU_DEVICE_CPU` and `CU_DEVICE_INVALID`.
const CPU: i32 = -1;
const NO_DEVICE: i32 = -2;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// What the program has said about a managed allocation.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Advice {
    is_read_mostly: bool,
    preferred: Option<Location>,
    /// Bit set of devices.
    accessed_by: u64,
    is_accessed_by_host: bool,
    prefetched_to: Option<Location>,
}

pub(crate) unsafe fn cuMemAllocManaged(out: *mut CUdeviceptr, size_bytes: usize, flags: u32) -> Result {
    let context = context::current()?;
    if out.is_null() || size_bytes == 0 || !matches!(flags, ATTACH_GLOBAL | ATTACH_HOST) {
        return Err(INVALID);
    }
    stream::forbid_in_capture()?;
    let size_bytes = size_bytes as u64;
    let range = HostRange::allocate(size_bytes)?;
    let start = host::add(&context, range, size_bytes, AllocationKind::Managed(Advice::default()))?;
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, start) }
}

/// Changes the advice of the managed allocation that the range lies in.
fn change(start: u64, len: usize, change: impl FnOnce(&mut Advice)) -> Result {
    let mut state = STATE.write();
    let base = state.managed_around(start, len)?.0;
    if let Some(AllocationKind::Managed(advice)) =
        state.allocations.get_mut(&base).map(|found| &mut found.kind)
    {
        change(advice);
    }
    Ok(())
}

impl State {
    fn managed_around(&self, start: u64, len: usize) -> Result<(u64, Advice)> {
        let (base, allocation) = self.allocation_at(start).ok_or(INVALID)?;
        let AllocationKind::Managed(advice) = allocation.kind else { return Err(INVALID) };
        let is_within = len > 0 && len as u64 <= base + allocation.size_bytes - start;
        if is_within { Ok((base, advice)) } else { Err(INVALID) }
    }
}

fn location_of_device(device: CUdevice) -> Result<Location> {
    if device == CPU { Ok(Location::Host) } else { Location::of(CUmemLocation::of(device)) }
}

fn advise(start: u64, len: usize, advice: u32, location: impl FnOnce() -> Result<Location>) -> Result {
    use sys::CUmem_advise as Known;
    process::machine()?;
    let known = |value: Known| advice == value as u32;
    if known(Known::CU_MEM_ADVISE_SET_READ_MOSTLY) || known(Known::CU_MEM_ADVISE_UNSET_READ_MOSTLY) {
        let is_set = known(Known::CU_MEM_ADVISE_SET_READ_MOSTLY);
        return change(start, len, |advice| advice.is_read_mostly = is_set);
    }
    if known(Known::CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION) {
        return change(start, len, |advice| advice.preferred = None);
    }
    if known(Known::CU_MEM_ADVISE_SET_PREFERRED_LOCATION) {
        let location = location()?;
        return change(start, len, |advice| advice.preferred = Some(location));
    }
    let is_set = known(Known::CU_MEM_ADVISE_SET_ACCESSED_BY);
    if !is_set && !known(Known::CU_MEM_ADVISE_UNSET_ACCESSED_BY) {
        return Err(INVALID);
    }
    let location = location()?;
    change(start, len, |advice| match location {
        Location::Host | Location::HostNode => advice.is_accessed_by_host = is_set,
        Location::Device(ordinal) if is_set => advice.accessed_by |= 1 << ordinal,
        Location::Device(ordinal) => advice.accessed_by &= !(1 << ordinal),
    })
}

pub(crate) unsafe fn cuMemAdvise(
    start: CUdeviceptr,
    len: usize,
    advice: CUmem_advise,
    device: CUdevice,
) -> Result {
    advise(start, len, advice, || location_of_device(device))
}

pub(crate) unsafe fn cuMemAdvise_v2(
    start: CUdeviceptr,
    len: usize,
    advice: CUmem_advise,
    location: CUmemLocation,
) -> Result {
    advise(start, len, advice, || Location::of(location))
}

fn prefetch(start: u64, len: usize, location: Location, stream: CUstream) -> Result {
    STATE.read().managed_around(start, len)?;
    stream::submit(stream, Work::Empty)?;
    change(start, len, |advice| advice.prefetched_to = Some(location))
}

pub(crate) unsafe fn cuMemPrefetchAsync(
    start: CUdeviceptr,
    len: usize,
    device: CUdevice,
    stream: CUstream,
) -> Result {
    process::machine()?;
    prefetch(start, len, location_of_device(device)?, stream)
}

pub(crate) unsafe fn cuMemPrefetchAsync_v2(
    start: CUdeviceptr,
    len: usize,
    location: CUmemLocation,
    flags: u32,
    stream: CUstream,
) -> Result {
    process::machine()?;
    if flags != 0 {
        return Err(INVALID);
    }
    prefetch(start, len, Location::of(location)?, stream)
}

fn ordinal_or(location: Option<Location>, none: i32) -> i32 {
    match location {
        None => none,
        Some(Location::Host | Location::HostNode) => CPU,
        Some(Location::Device(ordinal)) => ordinal,
    }
}

fn location_of(location: Option<Location>) -> CUmemLocation {
    location.map_or(CUmemLocation { type_: 0, id: 0 }, Location::location)
}

impl Advice {
    /// What cuMemRangeGetAttribute answers, for `count` numbers of room.
    fn attribute(&self, attribute: CUmem_range_attribute, count: usize) -> Result<Vec<i32>> {
        let one = match attribute {
            1 => i32::from(self.is_read_mostly),
            2 => ordinal_or(self.preferred, NO_DEVICE),
            3 => return Ok(self.accessors(count)),
            4 => ordinal_or(self.prefetched_to, NO_DEVICE),
            5 => location_of(self.preferred).type_.cast_signed(),
            6 => location_of(self.preferred).id,
            7 => location_of(self.prefetched_to).type_.cast_signed(),
            8 => location_of(self.prefetched_to).id,
            _ => return Err(INVALID),
        };
        if count == 1 { Ok(vec![one]) } else { Err(INVALID) }
    }

    fn accessors(&self, count: usize) -> Vec<i32> {
        let host = self.is_accessed_by_host.then_some(CPU);
        let devices = (0..64).filter(|ordinal| self.accessed_by >> ordinal & 1 == 1);
        host.into_iter().chain(devices).chain(std::iter::repeat(NO_DEVICE)).take(count).collect()
    }
}

/// # Safety
/// `data` is NULL or valid for writes of `data_bytes`.
unsafe fn write_attribute(data: *mut c_void, data_bytes: usize, attribute: u32, advice: Advice) -> Result {
    if data.is_null() || data_bytes == 0 || !data_bytes.is_multiple_of(size_of::<i32>()) {
        return Err(INVALID);
    }
    let values = advice.attribute(attribute, data_bytes / size_of::<i32>())?;
    // SAFETY: `values` has as many elements as the caller has room for.
    unsafe { data.cast::<i32>().copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    Ok(())
}

pub(crate) unsafe fn cuMemRangeGetAttribute(
    data: *mut c_void,
    data_bytes: usize,
    attribute: CUmem_range_attribute,
    start: CUdeviceptr,
    len: usize,
) -> Result {
    process::machine()?;
    let (_, advice) = STATE.read().managed_around(start, len)?;
    // SAFETY: `data` is the caller's out parameter.
    unsafe { write_attribute(data, data_bytes, attribute, advice) }
}

pub(crate) unsafe fn cuMemRangeGetAttributes(
    data: *mut *mut c_void,
    data_bytes: *mut usize,
    attributes: *mut CUmem_range_attribute,
    count: usize,
    start: CUdeviceptr,
    len: usize,
) -> Result {
    process::machine()?;
    let (_, advice) = STATE.read().managed_around(start, len)?;
    // SAFETY: the caller passes three arrays of `count` elements.
    let data = unsafe { read_array(data, count) }?;
    // SAFETY: as above.
    let data_bytes = unsafe { read_array(data_bytes, count) }?;
    // SAFETY: as above.
    let attributes = unsafe { read_array(attributes, count) }?;
    for ((data, data_bytes), attribute) in data.into_iter().zip(data_bytes).zip(attributes) {
        // SAFETY: each is an out parameter of the caller's.
        unsafe { write_attribute(data, data_bytes, attribute, advice) }?;
    }
    Ok(())
}
