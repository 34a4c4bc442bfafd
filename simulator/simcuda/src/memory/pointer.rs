//! What can be asked about an address. Where the meaning has no other source, it is that of the CUDA driver
//! API reference, cuPointerGetAttribute.

use std::ffi::c_void;

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{CUdeviceptr, CUpointer_attribute};

use super::layout::{read_array, read_structure};
use super::segment::Segment;
use super::space::{Mapping, Reserved, Right, Target};
use super::state::{Allocation, AllocationKind, STATE, State};
use crate::error::{Result, write_out};
use crate::{context, process};

const MEMORY_TYPE_HOST: u32 = sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32;
const MEMORY_TYPE_DEVICE: u32 = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32;
const SYNC_MEMOPS: u32 = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS as u32;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// An attribute's value and, by the variant, its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Int(u32),
    Long(u64),
}

/// What an address is in.
enum Found<'a> {
    Allocation(u64, &'a Allocation),
    Mapped {
        reserved: &'a Reserved,
        start: u64,
        mapping: &'a Mapping,
        segment: &'a Segment,
    },
    /// A reservation, where nothing is mapped.
    Unmapped(&'a Reserved),
}

impl State {
    fn find(&self, address: u64) -> Option<Found<'_>> {
        if let Some((start, allocation)) = self.allocation_at(address) {
            return Some(Found::Allocation(start, allocation));
        }
        let reserved = self.reservation_at(address)?;
        Some(match self.mapping_at(address) {
            Some((start, mapping @ Mapping { target: Target::Device { segment, .. }, .. })) => {
                Found::Mapped { reserved, start, mapping, segment }
            }
            _ => Found::Unmapped(reserved),
        })
    }

    /// `CU_MEM_ACCESS_FLAGS_…` of the current context's device.
    fn access_flags(&self, address: u64) -> u32 {
        let Some(context) = context::top() else { return 0 };
        let right = self.mapping_at(address).map(|(_, mapping)| self.right(mapping, context.device.ordinal));
        match right {
            Some(Right::ReadWrite) => 3,
            Some(Right::Read) => 1,
            Some(Right::None) | None => 0,
        }
    }

    fn attribute(&self, address: u64, attribute: Attribute) -> Result<Value> {
        let found = self.find(address).ok_or(INVALID)?;
        if attribute == Attribute::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS {
            return Ok(Value::Int(self.access_flags(address)));
        }
        match found {
            Found::Allocation(start, allocation) => of_allocation(address, start, allocation, attribute),
            Found::Mapped { reserved, start, mapping, segment } => of_segment(address, segment, attribute)
                .or_else(|error| match attribute {
                    Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => Ok(Value::Long(start)),
                    Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE => Ok(Value::Long(mapping.len)),
                    Attribute::CU_POINTER_ATTRIBUTE_MAPPED => Ok(Value::Int(1)),
                    _ => of_reservation(reserved, attribute).ok_or(error),
                }),
            Found::Unmapped(reserved) => match attribute {
                Attribute::CU_POINTER_ATTRIBUTE_MAPPED => Ok(Value::Int(0)),
                _ => of_reservation(reserved, attribute).ok_or(INVALID),
            },
        }
    }
}

use sys::CUpointer_attribute as Attribute;

/// Of VMM memory, the range is what was reserved, not what is mapped.
fn of_reservation(reserved: &Reserved, attribute: Attribute) -> Option<Value> {
    match attribute {
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => Some(Value::Long(reserved.start)),
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE => Some(Value::Long(reserved.len)),
        _ => None,
    }
}

fn of_segment(address: u64, segment: &Segment, attribute: Attribute) -> Result<Value> {
    let device = segment.location.device();
    Ok(match attribute {
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE if device.is_none() => Value::Int(MEMORY_TYPE_HOST),
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => Value::Int(MEMORY_TYPE_DEVICE),
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER => Value::Long(address),
        Attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER if device.is_none() => Value::Long(address),
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => Value::Int(device.ok_or(INVALID)?.cast_unsigned()),
        Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID | Attribute::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => {
            Value::Long(segment.handle)
        }
        Attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => Value::Long(u64::from(segment.handle_types)),
        // The memory belongs to no context and no pool.
        Attribute::CU_POINTER_ATTRIBUTE_CONTEXT | Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => {
            Value::Long(0)
        }
        Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED
        | Attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        | Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        | Attribute::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
        | Attribute::CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE => Value::Int(0),
        Attribute::CU_POINTER_ATTRIBUTE_P2P_TOKENS => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        _ => return Err(INVALID),
    })
}

/// The pool that an allocation belongs to.
fn pool_of(kind: AllocationKind) -> Option<usize> {
    match kind {
        AllocationKind::Pool { pool } | AllocationKind::PoolImport { pool } => Some(pool),
        _ => None,
    }
}

fn of_allocation(address: u64, start: u64, allocation: &Allocation, attribute: Attribute) -> Result<Value> {
    let kind = allocation.kind;
    Ok(match attribute {
        Attribute::CU_POINTER_ATTRIBUTE_CONTEXT if pool_of(kind).is_some() => Value::Long(0),
        Attribute::CU_POINTER_ATTRIBUTE_CONTEXT => Value::Long(allocation.context as u64),
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE if allocation.is_host() => Value::Int(MEMORY_TYPE_HOST),
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => Value::Int(MEMORY_TYPE_DEVICE),
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER => Value::Long(address),
        // The host cannot touch device memory.
        Attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER if allocation.is_device() => return Err(INVALID),
        Attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER => Value::Long(address),
        Attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => Value::Int(u32::from(allocation.sync_memops)),
        Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID | Attribute::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => {
            Value::Long(allocation.id)
        }
        Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED => {
            Value::Int(u32::from(matches!(kind, AllocationKind::Managed(_))))
        }
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => Value::Int(allocation.device.cast_unsigned()),
        Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => {
            Value::Int(u32::from(kind == AllocationKind::Device))
        }
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
        | Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => Value::Long(start),
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE | Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE => {
            Value::Long(allocation.size_bytes)
        }
        Attribute::CU_POINTER_ATTRIBUTE_MAPPED => Value::Int(1),
        Attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => Value::Long(0),
        Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => Value::Long(pool_of(kind).unwrap_or(0) as u64),
        Attribute::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
        | Attribute::CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE => Value::Int(0),
        Attribute::CU_POINTER_ATTRIBUTE_P2P_TOKENS => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        _ => return Err(INVALID),
    })
}

/// Every attribute that is known, and the size of its value.
const ATTRIBUTES: [(Attribute, Value); 21] = {
    use Attribute::*;
    const INT: Value = Value::Int(0);
    const LONG: Value = Value::Long(0);
    [
        (CU_POINTER_ATTRIBUTE_CONTEXT, LONG),
        (CU_POINTER_ATTRIBUTE_MEMORY_TYPE, INT),
        (CU_POINTER_ATTRIBUTE_DEVICE_POINTER, LONG),
        (CU_POINTER_ATTRIBUTE_HOST_POINTER, LONG),
        (CU_POINTER_ATTRIBUTE_P2P_TOKENS, LONG),
        (CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, INT),
        (CU_POINTER_ATTRIBUTE_BUFFER_ID, LONG),
        (CU_POINTER_ATTRIBUTE_IS_MANAGED, INT),
        (CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, INT),
        (CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, INT),
        (CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, LONG),
        (CU_POINTER_ATTRIBUTE_RANGE_SIZE, LONG),
        (CU_POINTER_ATTRIBUTE_MAPPED, INT),
        (CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, LONG),
        (CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, INT),
        (CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, INT),
        (CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, LONG),
        (CU_POINTER_ATTRIBUTE_MAPPING_SIZE, LONG),
        (CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, LONG),
        (CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID, LONG),
        (CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE, INT),
    ]
};

/// The attribute of a number, and zero in its size.
fn known(attribute: u32) -> Result<(Attribute, Value)> {
    ATTRIBUTES.iter().find(|(known, _)| *known as u32 == attribute).copied().ok_or(INVALID)
}

/// # Safety
/// `data` is NULL or valid for a write of the value.
unsafe fn write_value(data: *mut c_void, value: Value) -> Result {
    match value {
        // SAFETY: the caller of this function vouches for `data`.
        Value::Int(value) => unsafe { write_out(data.cast(), value) },
        // SAFETY: as above.
        Value::Long(value) => unsafe { write_out(data.cast(), value) },
    }
}

pub(crate) unsafe fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: CUpointer_attribute,
    address: CUdeviceptr,
) -> Result {
    process::machine()?;
    let (attribute, _) = known(attribute)?;
    let value = STATE.read().attribute(address, attribute)?;
    // SAFETY: `data` is the caller's out parameter for this attribute.
    unsafe { write_value(data, value) }
}

/// What does not apply to the address is zero, and for an address that is nothing everything is.
pub(crate) unsafe fn cuPointerGetAttributes(
    count: u32,
    attributes: *mut CUpointer_attribute,
    data: *mut *mut c_void,
    address: CUdeviceptr,
) -> Result {
    process::machine()?;
    // SAFETY: the caller passes an array of `count` attributes.
    let attributes = unsafe { read_array(attributes, count as usize) }?;
    // SAFETY: the caller passes an array of `count` pointers.
    let data = unsafe { read_array(data, count as usize) }?;
    let attributes = attributes.into_iter().map(known).collect::<Result<Vec<_>>>()?;
    let state = STATE.read();
    for ((attribute, zero), data) in attributes.into_iter().zip(data) {
        let value = state.attribute(address, attribute).unwrap_or(zero);
        // SAFETY: `data` is the caller's out parameter for this attribute.
        unsafe { write_value(data, value) }?;
    }
    Ok(())
}

/// Copies of simcuda are as synchronous as the call says; the flag is only remembered.
pub(crate) unsafe fn cuPointerSetAttribute(
    value: *const c_void,
    attribute: CUpointer_attribute,
    address: CUdeviceptr,
) -> Result {
    process::machine()?;
    if attribute != SYNC_MEMOPS {
        return Err(INVALID);
    }
    // SAFETY: the caller passes the address of an unsigned int.
    let is_set = unsafe { read_structure(value.cast::<u32>()) }? != 0;
    let mut state = STATE.write();
    match state.find(address).ok_or(INVALID)? {
        Found::Allocation(start, allocation) if allocation.is_device() => {
            if let Some(allocation) = state.allocations.get_mut(&start) {
                allocation.sync_memops = is_set;
            }
            Ok(())
        }
        // Observed of real drivers with VMM memory.
        Found::Mapped { .. } => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        _ => Err(INVALID),
    }
}
