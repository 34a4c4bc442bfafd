//! Pinned host memory, allocated or registered: devices access it at the address that the host uses.

use std::ffi::c_void;
use std::sync::Arc;

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::CUdeviceptr;

use super::space::{Access, HostRange, Mapping, Target};
use super::state::{Allocation, AllocationKind, STATE};
use crate::context::{self, Context};
use crate::error::{Result, write_out};
use crate::stream;

const PORTABLE: u32 = sys::CU_MEMHOSTALLOC_PORTABLE;
const DEVICEMAP: u32 = sys::CU_MEMHOSTALLOC_DEVICEMAP;
const WRITECOMBINED: u32 = sys::CU_MEMHOSTALLOC_WRITECOMBINED;
const REGISTER_IOMEMORY: u32 = sys::CU_MEMHOSTREGISTER_IOMEMORY;
const REGISTER_READ_ONLY: u32 = sys::CU_MEMHOSTREGISTER_READ_ONLY;

/// Makes a range of host memory known, under the context, as memory of `kind`.
pub(super) fn add(
    context: &Context,
    range: Arc<HostRange>,
    size_bytes: u64,
    kind: AllocationKind,
) -> Result<u64> {
    let start = range.start;
    let mut state = STATE.write();
    if context.is_destroyed() {
        return Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
    }
    if let Some(known) = state.allocation_in(start, size_bytes) {
        let is_host = known.is_host();
        let registered = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        return Err(if is_host { registered } else { CUresult::CUDA_ERROR_INVALID_VALUE });
    }
    if state.reservation_at(start).is_some() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let mapping = Mapping { len: size_bytes, target: Target::Host(range), access: Access::All };
    state.mappings.insert(start, mapping);
    let allocation = Allocation::new(size_bytes, context.handle, context.device.ordinal, kind);
    state.allocations.insert(start, allocation);
    Ok(start)
}

fn allocate(out: *mut *mut c_void, size_bytes: usize, flags: u32) -> Result {
    let context = context::current()?;
    if out.is_null() || size_bytes == 0 || flags & !(PORTABLE | DEVICEMAP | WRITECOMBINED) != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    stream::forbid_in_capture()?;
    let size_bytes = size_bytes as u64;
    let range = HostRange::allocate(size_bytes)?;
    // With unified addressing all of it is portable and mapped, asked for or not.
    let kind = AllocationKind::Host { flags: flags | PORTABLE | DEVICEMAP };
    let start = add(&context, range, size_bytes, kind)?;
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, start as *mut c_void) }
}

pub(crate) unsafe fn cuMemHostAlloc(out: *mut *mut c_void, size_bytes: usize, flags: u32) -> Result {
    allocate(out, size_bytes, flags)
}

pub(crate) unsafe fn cuMemAllocHost_v2(out: *mut *mut c_void, size_bytes: usize) -> Result {
    allocate(out, size_bytes, 0)
}

/// Takes the pinned range that starts at `address` away, once the context's work is done.
///
/// # Errors
/// `error` if `is_kind` says that it is none of the kind.
fn remove(address: u64, error: CUresult, is_kind: fn(&AllocationKind) -> bool) -> Result {
    let current = context::current()?;
    if address == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    stream::forbid_in_capture()?;
    let found = STATE.read().allocations.get(&address).filter(|found| is_kind(&found.kind)).cloned();
    let allocation = found.ok_or(error)?;
    let owner = context::by_handle(allocation.context as _).unwrap_or(current);
    stream::synchronize_context(&owner)?;
    let mut state = STATE.write();
    // Another thread may have been faster.
    if state.allocations.get(&address).map(|now| now.id) != Some(allocation.id) {
        return Err(error);
    }
    state.allocations.remove(&address);
    let mapping = state.mappings.remove(&address);
    drop(state);
    drop(mapping);
    Ok(())
}

pub(crate) unsafe fn cuMemFreeHost(address: *mut c_void) -> Result {
    remove(address as u64, CUresult::CUDA_ERROR_INVALID_VALUE, |kind| {
        matches!(kind, AllocationKind::Host { .. })
    })
}

pub(crate) unsafe fn cuMemHostRegister_v2(address: *mut c_void, size_bytes: usize, flags: u32) -> Result {
    let context = context::current()?;
    let known = PORTABLE | DEVICEMAP | REGISTER_IOMEMORY | REGISTER_READ_ONLY;
    if address.is_null() || size_bytes == 0 || flags & !known != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if flags & REGISTER_IOMEMORY != 0 {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    stream::forbid_in_capture()?;
    let (start, size_bytes) = (address as u64, size_bytes as u64);
    let range = HostRange::of_program(start, size_bytes)?;
    let kind = AllocationKind::Registered { flags: flags | PORTABLE | DEVICEMAP };
    add(&context, range, size_bytes, kind).map(|_| ())
}

pub(crate) unsafe fn cuMemHostUnregister(address: *mut c_void) -> Result {
    let error = CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    remove(address as u64, error, |kind| matches!(kind, AllocationKind::Registered { .. }))
}

pub(crate) unsafe fn cuMemHostGetDevicePointer_v2(
    out: *mut CUdeviceptr,
    address: *mut c_void,
    flags: u32,
) -> Result {
    context::current()?;
    let address = address as u64;
    let state = STATE.read();
    if flags != 0 || !state.allocation_at(address).is_some_and(|(_, found)| found.is_host()) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, address) }
}

pub(crate) unsafe fn cuMemHostGetFlags(out: *mut u32, address: *mut c_void) -> Result {
    context::current()?;
    let state = STATE.read();
    let (_, allocation) = state.allocation_at(address as u64).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let (AllocationKind::Host { flags } | AllocationKind::Registered { flags }) = allocation.kind else {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, flags) }
}
