//! What a copy's or fill's addresses are, and whether the call may name them.

use cuda_abi::sys::CUresult;

use super::{Copy, Endpoint, Fill, Side};
use crate::error::Result;
use crate::memory::{self, Span};

/// The memory type of one side of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryKind {
    Device,
    /// Host memory that a device can access: allocated or registered through the driver, or managed.
    Pinned,
    /// Any other host memory.
    Pageable,
}

/// The span around an address for a copy by `device`. A copy, unlike a kernel, reaches the memory of every
/// device, with or without peer access (CUDA driver API reference, cuMemcpyPeer).
pub(super) fn span(address: u64, device: i32) -> Option<Span> {
    memory::span(address, device).or_else(|| memory::span(address, memory::device_of(address)?))
}

/// The device that holds an address; none for host memory, pinned or not.
pub(super) fn device_of(address: u64) -> Option<i32> {
    memory::device_of(address)
}

/// Whether an address counts as device or host memory, where the call leaves it open.
pub(super) fn resolved(side: Side, address: u64) -> Side {
    match side {
        Side::Unified if device_of(address).is_some() => Side::Device,
        Side::Unified => Side::Host,
        said => said,
    }
}

/// What kind of memory a side of a copy is that has passed [`copy`].
pub(super) fn kind(endpoint: &Endpoint, device: i32) -> MemoryKind {
    if device_of(endpoint.address).is_some() {
        MemoryKind::Device
    } else if memory::span(endpoint.address, device).is_some() {
        MemoryKind::Pinned
    } else {
        MemoryKind::Pageable
    }
}

/// Whether the call may name these operands.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for a NULL address, for one that is not in the memory that the call says, and for
/// a range that ends outside it.
pub(crate) fn copy(copy: &Copy, device: i32) -> Result {
    endpoint(&copy.to, copy, device)?;
    endpoint(&copy.from, copy, device)
}

fn endpoint(endpoint: &Endpoint, copy: &Copy, device: i32) -> Result {
    let rows = Rows {
        address: endpoint.address,
        width_bytes: copy.width_bytes,
        pitch_bytes: endpoint.pitch_bytes,
        height: copy.height,
        slice_rows: endpoint.slice_rows,
        depth: copy.depth,
    };
    let len = rows.len().ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let fits = match resolved(endpoint.side, endpoint.address) {
        Side::Device => is_accessible(endpoint.address, len, device),
        Side::Host | Side::Unified => {
            endpoint.address != 0
                && device_of(endpoint.address).is_none()
                && device_of(endpoint.address + len - 1).is_none()
        }
    };
    if fits { Ok(()) } else { Err(CUresult::CUDA_ERROR_INVALID_VALUE) }
}

/// As [`copy`], and the address and pitch must be multiples of the element.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE`, also for a pitch that is less than a row.
pub(crate) fn fill(fill: &Fill, device: i32) -> Result {
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    let element_bytes = fill.element_bytes as u64;
    let width_bytes = fill.width.checked_mul(fill.element_bytes).ok_or(invalid)?;
    if !matches!(element_bytes, 1 | 2 | 4) || !fill.address.is_multiple_of(element_bytes) {
        return Err(invalid);
    }
    if fill.height > 1
        && (!fill.pitch_bytes.is_multiple_of(fill.element_bytes) || fill.pitch_bytes < width_bytes)
    {
        return Err(invalid);
    }
    let rows = Rows {
        address: fill.address,
        width_bytes,
        pitch_bytes: fill.pitch_bytes,
        height: fill.height,
        slice_rows: fill.height,
        depth: 1,
    };
    let len = rows.len().ok_or(invalid)?;
    if is_accessible(fill.address, len, device) { Ok(()) } else { Err(invalid) }
}

/// The rows of one side.
struct Rows {
    address: u64,
    width_bytes: usize,
    pitch_bytes: usize,
    height: usize,
    slice_rows: usize,
    depth: usize,
}

impl Rows {
    /// From the first byte to the last one, gaps included; none if that does not fit an address space.
    fn len(&self) -> Option<u64> {
        let rows = (self.depth - 1).checked_mul(self.slice_rows)?.checked_add(self.height - 1)?;
        let len = rows.checked_mul(self.pitch_bytes)?.checked_add(self.width_bytes)? as u64;
        self.address.checked_add(len)?;
        Some(len)
    }
}

fn is_accessible(address: u64, len: u64, device: i32) -> bool {
    memory::is_accessible(address, len, device)
        || memory::device_of(address).is_some_and(|owner| memory::is_accessible(address, len, owner))
}
