//! Pointer attributes.
//!
//! Where the driver's answer for mapped memory differs from that for its own allocations, we answer instead. An
//! unallocated part of our memory is reported like an address that the driver does not know.

use std::ffi::{c_uint, c_void};
use std::slice;

use ckpt_protocol::agent::RegionKind;
use cuda_abi::sys::{self, CUpointer_attribute as Attribute};
use cuda_abi::types::{CUdeviceptr, CUpointer_attribute, CUresult};

use super::arena::{self, Allocation};
use super::{ipc, physical, pool, vmm};
use crate::cuda::activation::is_started;
use crate::cuda::handler::handlers;
use crate::cuda::result::SUCCESS;

const START: u32 = Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as u32;
const MAPPING_START: u32 = Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR as u32;
const BYTES: u32 = Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE as u32;
const MAPPING_BYTES: u32 = Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE as u32;
const BUFFER: u32 = Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID as u32;
const BLOCK: u32 = Attribute::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID as u32;
const CONTEXT: u32 = Attribute::CU_POINTER_ATTRIBUTE_CONTEXT as u32;
const POOL: u32 = Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE as u32;
const HANDLE_TYPES: u32 = Attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES as u32;
const SYNC_MEMOPS: u32 = Attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS as u32;
const IPC_CAPABLE: u32 = Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE as u32;

/// An address at which no memory is ever allocated.
const NOWHERE: CUdeviceptr = 0;

/// An allocation for which the driver's answers would differ.
struct AllocationAttributes {
    start: CUdeviceptr,
    bytes: u64,
    context: usize,
    number: u64,
    pool: usize,
    is_sync_memops: bool,
    is_ipc_capable: bool,
}

impl AllocationAttributes {
    fn of_arena(found: &Allocation) -> Self {
        let Allocation { address, bytes, context, id, is_sync_memops, .. } = *found;
        Self { start: address, bytes, context, number: id, pool: 0, is_sync_memops, is_ipc_capable: true }
    }

    /// It belongs to no context.
    fn of_pool(found: &pool::Found) -> Self {
        let pool::Found { start, bytes, number, pool, .. } = *found;
        let pool = pool as usize;
        Self { start, bytes, context: 0, number, pool, is_sync_memops: false, is_ipc_capable: false }
    }

    /// What was opened cannot be passed on.
    fn of_another_process(found: &ipc::OpenedAllocation) -> Self {
        let ipc::OpenedAllocation { address, bytes, opener, id } = *found;
        Self {
            start: address,
            bytes,
            context: if let ipc::Opener::Context(context) = opener { context } else { 0 },
            number: id,
            pool: pool::shared::pool_of(found),
            is_sync_memops: false,
            is_ipc_capable: false,
        }
    }

    fn at(address: CUdeviceptr) -> Option<Self> {
        let of_arena = arena::find(address).as_ref().map(Self::of_arena);
        let of_pool = || pool::find(address).as_ref().map(Self::of_pool);
        let opened = || ipc::find_opened(address).as_ref().map(Self::of_another_process);
        of_arena.or_else(of_pool).or_else(opened)
    }
}

/// The allocation that an address lies in, and the address to ask the driver about: another one where the driver
/// would report memory that the program has not allocated.
fn inspect(address: CUdeviceptr) -> (Option<AllocationAttributes>, CUdeviceptr) {
    if !is_started() {
        return (None, address);
    }
    let known = AllocationAttributes::at(address);
    let is_idle = known.is_none() && is_shared_out(address);
    (known, if is_idle { NOWHERE } else { address })
}

/// Whether an address lies in memory out of which allocations are served, by us or by another process.
fn is_shared_out(address: CUdeviceptr) -> bool {
    let registry = physical::registry();
    registry.at(address).and_then(|(id, ..)| registry.allocations.get(&id)).is_some_and(|allocation| {
        matches!(allocation.kind, RegionKind::Allocation | RegionKind::Slab | RegionKind::Pool)
    })
}

/// An attribute's value and, by the variant, its size.
enum Value {
    /// The driver has written the value, and only its first byte may have to be another: the driver defines the size
    /// of a boolean.
    Bool(bool),
    Long(u64),
}

/// A pointer attribute of the program's own memory as it was when the program created the memory. The driver would answer
/// for the recreated memory: other handle types, another buffer ID.
pub(super) fn program_attribute(address: CUdeviceptr, attribute: CUpointer_attribute) -> Option<u64> {
    let id = vmm::program_allocation_at(address).flatten()?;
    match attribute {
        HANDLE_TYPES => vmm::asked_handle_types(id).map(u64::from),
        BUFFER | BLOCK => Some(vmm::handle_of(id)),
        _ => None,
    }
}

/// Our answer; `None` if the driver's is the same as for its own memory.
fn value_of(
    address: CUdeviceptr,
    known: Option<&AllocationAttributes>,
    attribute: CUpointer_attribute,
) -> Option<Value> {
    if !is_started() {
        return None;
    }
    let Some(known) = known else { return program_attribute(address, attribute).map(Value::Long) };
    Some(match attribute {
        START | MAPPING_START => Value::Long(known.start),
        BYTES | MAPPING_BYTES => Value::Long(known.bytes),
        BUFFER | BLOCK => Value::Long(known.number),
        CONTEXT => Value::Long(known.context as u64),
        POOL => Value::Long(known.pool as u64),
        HANDLE_TYPES => Value::Long(0),
        SYNC_MEMOPS => Value::Bool(known.is_sync_memops),
        IPC_CAPABLE => Value::Bool(known.is_ipc_capable),
        _ => return None,
    })
}

/// Replaces the driver's answer by ours.
///
/// # Safety
/// `data` is valid for a write of the value.
unsafe fn overwrite(data: *mut c_void, value: &Value) {
    match value {
        // SAFETY: the caller vouches for `data`.
        Value::Bool(value) => unsafe { data.cast::<u8>().write(u8::from(*value)) },
        // SAFETY: as above; C has it aligned, but that is not checked.
        Value::Long(value) => unsafe { data.cast::<u64>().write_unaligned(*value) },
    }
}

handlers! {
    fn cuPointerGetAttribute(
        data: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr
    ) |_, real| {
        let (known, asked) = inspect(address);
        let value = value_of(address, known.as_ref(), attribute);
        if let Some(value @ Value::Long(_)) = &value
            && !data.is_null()
        {
            // SAFETY: the caller's out parameter for this attribute.
            unsafe { overwrite(data, value) };
            return SUCCESS;
        }
        // SAFETY: the parameters are those of our own caller, or an address that is none.
        let result = unsafe { real(data, attribute, asked) };
        if let (SUCCESS, Some(value)) = (result, &value) {
            // SAFETY: the driver has just written to it.
            unsafe { overwrite(data, value) };
        }
        result
    }

    fn cuPointerGetAttributes(
        count: c_uint, attributes: *mut CUpointer_attribute, data: *mut *mut c_void, address: CUdeviceptr
    ) |_, real| {
        let (known, asked) = inspect(address);
        // SAFETY: the parameters are those of our own caller, or an address that is none.
        let result = unsafe { real(count, attributes, data, asked) };
        if result != SUCCESS || count == 0 {
            return result;
        }
        // SAFETY: the driver has read the array just now.
        let attributes = unsafe { slice::from_raw_parts(attributes, count as usize) };
        // SAFETY: as above.
        let data = unsafe { slice::from_raw_parts(data, count as usize) };
        for (attribute, data) in attributes.iter().zip(data) {
            if let Some(value) = value_of(address, known.as_ref(), *attribute) {
                // SAFETY: the driver has written to it just now.
                unsafe { overwrite(*data, &value) };
            }
        }
        result
    }

    /// SYNC_MEMOPS is recorded here, since drivers refuse it for mapped memory.
    fn cuPointerSetAttribute(
        value: *const c_void, attribute: CUpointer_attribute, address: CUdeviceptr
    ) |_, real| {
        const REFUSED: CUresult = sys::CUresult::CUDA_ERROR_NOT_SUPPORTED as CUresult;
        const INVALID_VALUE: CUresult = sys::CUresult::CUDA_ERROR_INVALID_VALUE as CUresult;
        let (known, asked) = inspect(address);
        // SAFETY: the parameters are those of our own caller, or an address that is none.
        let result = unsafe { real(value, attribute, asked) };
        // What other processes may open is the arena's.
        if !known.is_some_and(|known| known.is_ipc_capable)
            || value.is_null()
            || !matches!(result, SUCCESS | REFUSED)
        {
            return result;
        }
        if attribute != SYNC_MEMOPS {
            // None that can be set: of mapped memory the driver says first that nothing can.
            return if result == REFUSED { INVALID_VALUE } else { result };
        }
        // SAFETY: the caller passes the address of a boolean, of which the first byte is there at any size.
        let is_set = unsafe { value.cast::<u8>().read() } != 0;
        arena::set_sync_memops(address, is_set);
        SUCCESS
    }

    fn cuMemGetAddressRange_v2(
        base_out: *mut CUdeviceptr, bytes_out: *mut usize, address: CUdeviceptr
    ) |_, real| {
        let (known, asked) = inspect(address);
        // SAFETY: the parameters are those of our own caller, or an address that is none.
        let result = unsafe { real(base_out, bytes_out, asked) };
        let Some((start, bytes)) =
            known.filter(|_| result == SUCCESS).map(|known| (known.start, known.bytes))
        else {
            return result;
        };
        if !base_out.is_null() {
            // SAFETY: the caller's out parameter, which the driver has written to.
            unsafe { base_out.write(start) };
        }
        if !bytes_out.is_null() {
            // SAFETY: as above.
            unsafe { bytes_out.write(bytes as usize) };
        }
        result
    }
}
