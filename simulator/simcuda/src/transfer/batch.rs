//! Batches of copies, and copies with attributes. The copies of a batch go to the stream one after the other.

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{CUdeviceptr, CUstream};

use super::layout::{Attributes, BatchOperand, BatchOperation, array, read};
use super::shaped::{Operand, build};
use super::submit::{SourceAccess, asynchronous, checked, is_capturing};
use super::{Copy, Side};
use crate::error::{Result, write_if_wanted};
use crate::{context, entry};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// CU_STREAM_LEGACY.
const LEGACY_STREAM: usize = 1;

/// A copy of a batch and how it reads its source.
type Item = (Copy, SourceAccess);

/// Before CUDA 13, `fail_index` named the copy at fault; the largest number is for none of them in
/// particular.
pub(crate) unsafe fn cuMemcpyBatchAsync(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    sizes_bytes: *mut usize,
    count: usize,
    attributes: *mut sys::CUmemcpyAttributes,
    attribute_starts: *mut usize,
    attribute_count: usize,
    fail_index: *mut usize,
    stream: CUstream,
) -> Result {
    // SAFETY: all are the caller's arrays of the lengths that it says.
    let items =
        unsafe { linear_items(to, from, sizes_bytes, count, attributes, attribute_starts, attribute_count) };
    let result = items.map_err(|error| (error, usize::MAX)).and_then(|items| submit(items, stream));
    // SAFETY: `fail_index` is NULL or the caller's out parameter.
    unsafe { report_failure(result, fail_index) }
}

pub(crate) unsafe fn cuMemcpyBatchAsync_v2(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    sizes_bytes: *mut usize,
    count: usize,
    attributes: *mut sys::CUmemcpyAttributes,
    attribute_starts: *mut usize,
    attribute_count: usize,
    stream: CUstream,
) -> Result {
    let no_index = std::ptr::null_mut();
    // SAFETY: the caller vouches for its arrays.
    unsafe {
        cuMemcpyBatchAsync(
            to,
            from,
            sizes_bytes,
            count,
            attributes,
            attribute_starts,
            attribute_count,
            no_index,
            stream,
        )
    }
}

pub(crate) unsafe fn cuMemcpyWithAttributesAsync(
    to: CUdeviceptr,
    from: CUdeviceptr,
    size_bytes: usize,
    attributes: *mut sys::CUmemcpyAttributes,
    stream: CUstream,
) -> Result {
    // SAFETY: NULL or the caller's structure.
    let attributes = unsafe { read(attributes.cast::<Attributes>()) }?;
    let access = access(attributes.source_access_order, attributes.flags)?;
    asynchronous(Copy::linear((to, Side::Unified), (from, Side::Unified), size_bytes), stream, access)
}

pub(crate) unsafe fn cuMemcpy3DBatchAsync(
    count: usize,
    operations: *mut sys::CUDA_MEMCPY3D_BATCH_OP,
    fail_index: *mut usize,
    flags: u64,
    stream: CUstream,
) -> Result {
    // SAFETY: the caller's array of the length that it says.
    let items = unsafe { shaped_items(operations, count, flags) };
    let result = items.and_then(|items| submit(items, stream));
    // SAFETY: `fail_index` is NULL or the caller's out parameter.
    unsafe { report_failure(result, fail_index) }
}

pub(crate) unsafe fn cuMemcpy3DBatchAsync_v2(
    count: usize,
    operations: *mut sys::CUDA_MEMCPY3D_BATCH_OP,
    flags: u64,
    stream: CUstream,
) -> Result {
    // SAFETY: the caller vouches for its array.
    unsafe { cuMemcpy3DBatchAsync(count, operations, std::ptr::null_mut(), flags, stream) }
}

pub(crate) unsafe fn cuMemcpy3DWithAttributesAsync(
    operation: *mut sys::CUDA_MEMCPY3D_BATCH_OP,
    flags: u64,
    stream: CUstream,
) -> Result {
    // SAFETY: NULL or the caller's structure.
    let operation = unsafe { read(operation.cast::<BatchOperation>()) }?;
    if flags != 0 {
        return Err(INVALID);
    }
    let (copy, access) = shaped_item(&operation)?;
    asynchronous(copy, stream, access)
}

/// An error and the index of the copy that it is about.
type Failure = (CUresult, usize);

/// # Safety
/// `fail_index` is NULL or valid for a write.
unsafe fn report_failure(result: std::result::Result<(), Failure>, fail_index: *mut usize) -> Result {
    result.map_err(|(error, index)| {
        // SAFETY: the caller vouches for it.
        unsafe { write_if_wanted(fail_index, index) };
        error
    })
}

/// Checks all copies, then submits them: none of them runs if one cannot.
fn submit(items: Vec<Item>, stream: CUstream) -> std::result::Result<(), Failure> {
    let general = |error| (error, usize::MAX);
    let device = context::current().map_err(general)?.device.ordinal;
    let legacy =
        if stream.is_null() { !entry::per_thread_default_stream() } else { stream as usize == LEGACY_STREAM };
    if legacy {
        return Err(general(INVALID));
    }
    // There is no kind of node for a batch.
    if is_capturing(stream).map_err(general)? {
        return Err(general(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    }
    for (index, (copy, _)) in items.iter().enumerate() {
        checked(copy, device).map_err(|error| (error, index))?;
    }
    for (index, (copy, access)) in items.into_iter().enumerate() {
        asynchronous(copy, stream, access).map_err(|error| (error, index))?;
    }
    Ok(())
}

/// # Safety
/// The arrays are NULL or of the lengths given.
unsafe fn linear_items(
    to: *const CUdeviceptr,
    from: *const CUdeviceptr,
    sizes_bytes: *const usize,
    count: usize,
    attributes: *const sys::CUmemcpyAttributes,
    attribute_starts: *const usize,
    attribute_count: usize,
) -> Result<Vec<Item>> {
    if count == 0 || attribute_count == 0 || attribute_count > count {
        return Err(INVALID);
    }
    // SAFETY: the caller vouches for the length of this array and those below.
    let starts = unsafe { array(attribute_starts, attribute_count) }?;
    // SAFETY: as above.
    let attributes = unsafe { array(attributes.cast::<Attributes>(), attribute_count) }?;
    // SAFETY: as above.
    let to = unsafe { array(to, count) }?;
    // SAFETY: as above.
    let from = unsafe { array(from, count) }?;
    // SAFETY: as above.
    let sizes_bytes = unsafe { array(sizes_bytes, count) }?;
    let is_rising = starts.is_sorted_by(|earlier, later| earlier < later);
    if starts[0] != 0 || !is_rising || starts[attribute_count - 1] >= count {
        return Err(INVALID);
    }
    let accesses = attributes
        .iter()
        .map(|attributes| access(attributes.source_access_order, attributes.flags))
        .collect::<Result<Vec<_>>>()?;
    let item = |index: usize| {
        let attribute = starts.partition_point(|start| *start <= index) - 1;
        let copy = Copy::linear((to[index], Side::Unified), (from[index], Side::Unified), sizes_bytes[index]);
        (copy, accesses[attribute])
    };
    Ok((0..count).map(item).collect())
}

/// # Safety
/// `operations` is NULL or an array of `count` structures.
unsafe fn shaped_items(
    operations: *const sys::CUDA_MEMCPY3D_BATCH_OP,
    count: usize,
    flags: u64,
) -> std::result::Result<Vec<Item>, Failure> {
    // SAFETY: the caller vouches for the length.
    let operations = unsafe { array(operations.cast::<BatchOperation>(), count) };
    let operations = operations.map_err(|error| (error, usize::MAX))?;
    if operations.is_empty() || flags != 0 {
        return Err((INVALID, usize::MAX));
    }
    let items = operations.iter().enumerate();
    items.map(|(index, operation)| shaped_item(operation).map_err(|error| (error, index))).collect()
}

fn shaped_item(operation: &BatchOperation) -> Result<Item> {
    let access = access(operation.source_access_order, operation.flags)?;
    if operation.extent.contains(&0) {
        return Err(INVALID);
    }
    let to = operand(&operation.to, operation.extent)?;
    let from = operand(&operation.from, operation.extent)?;
    Ok((build(&to, &from, operation.extent)?, access))
}

/// The hint about the location is not looked at: the devices here do not share pageable memory.
fn operand(operand: &BatchOperand, extent: [usize; 3]) -> Result<Operand> {
    use sys::CUmemcpy3DOperandType as Kind;
    if operand.kind == Kind::CU_MEMCPY_OPERAND_TYPE_ARRAY as u32 {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    if operand.kind != Kind::CU_MEMCPY_OPERAND_TYPE_POINTER as u32 {
        return Err(INVALID);
    }
    Ok(Operand {
        memory_type: sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED as u32,
        host: 0,
        device: operand.address,
        origin: [0; 3],
        // Elements of a plain pointer are bytes. 0 means rows and slices without gaps.
        pitch_bytes: operand.row_len,
        slice_rows: if operand.layer_height == 0 { extent[1] } else { operand.layer_height },
    })
}

/// A source that may be read at any time is read in the stream's order, which is one of the times.
fn access(order: u32, flags: u32) -> Result<SourceAccess> {
    use sys::CUmemcpySrcAccessOrder as Order;
    if flags & !(sys::CUmemcpyFlags::CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE as u32) != 0 {
        return Err(INVALID);
    }
    match order {
        order if order == Order::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM as u32 => Ok(SourceAccess::Stream),
        order if order == Order::CU_MEMCPY_SRC_ACCESS_ORDER_ANY as u32 => Ok(SourceAccess::Stream),
        order if order == Order::CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL as u32 => {
            Ok(SourceAccess::DuringCall)
        }
        _ => Err(INVALID),
    }
}
