//! Copies of rows and slices.

use cuda_abi::sys::{self, CUmemorytype, CUresult};
use cuda_abi::types::{CUcontext, CUstream};

use super::layout::{Memcpy2D, Memcpy3D, Operand2D, Operand3D, read};
use super::submit::{SourceAccess, asynchronous, synchronous};
use super::{Copy, Endpoint, Side};
use crate::context;
use crate::error::Result;

/// CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device.
const MAX_PITCH_BYTES: usize = i32::MAX as usize;

/// One side of a copy, by whichever structure.
pub(super) struct Operand {
    pub(super) memory_type: u32,
    pub(super) host: u64,
    pub(super) device: u64,
    /// Offset in bytes, rows and slices.
    pub(super) origin: [usize; 3],
    pub(super) pitch_bytes: usize,
    pub(super) slice_rows: usize,
}

impl From<Operand2D> for Operand {
    fn from(side: Operand2D) -> Self {
        let Operand2D { x_bytes, y, memory_type, host, device, pitch_bytes, .. } = side;
        Self { memory_type, host, device, origin: [x_bytes, y, 0], pitch_bytes, slice_rows: 0 }
    }
}

impl From<Operand3D> for Operand {
    fn from(side: Operand3D) -> Self {
        let Operand3D { x_bytes, y, z, memory_type, host, device, pitch_bytes, height, .. } = side;
        Self { memory_type, host, device, origin: [x_bytes, y, z], pitch_bytes, slice_rows: height }
    }
}

/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for a NULL structure, an unknown kind of memory, a pitch that is less than a row
/// or more than the device can do; `CUDA_ERROR_NOT_SUPPORTED` for arrays.
///
/// # Safety
/// `params` is NULL or points to a structure.
unsafe fn from_2d(params: *const sys::CUDA_MEMCPY2D) -> Result<Copy> {
    // SAFETY: NULL or the caller's structure.
    let params = unsafe { read(params.cast::<Memcpy2D>()) }?;
    build(&params.to.into(), &params.from.into(), [params.width_bytes, params.height, 1])
}

/// As [`from_2d`]; also for a level of detail or a reserved field that is not 0.
///
/// # Errors
/// As [`from_2d`].
///
/// # Safety
/// `params` is NULL or points to a structure.
pub(crate) unsafe fn from_3d(params: *const sys::CUDA_MEMCPY3D) -> Result<Copy> {
    // SAFETY: NULL or the caller's structure.
    let params = unsafe { read(params.cast::<Memcpy3D>()) }?;
    if params.to.context != 0 || params.from.context != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    build_3d(&params)
}

/// The copy and the contexts of target and source.
///
/// # Errors
/// As [`from_3d`].
///
/// # Safety
/// `params` is NULL or points to a structure.
pub(super) unsafe fn from_3d_peer(params: *const sys::CUDA_MEMCPY3D_PEER) -> Result<(Copy, [CUcontext; 2])> {
    // SAFETY: NULL or the caller's structure.
    let params = unsafe { read(params.cast::<Memcpy3D>()) }?;
    let contexts = [params.to.context as CUcontext, params.from.context as CUcontext];
    Ok((build_3d(&params)?, contexts))
}

fn build_3d(params: &Memcpy3D) -> Result<Copy> {
    if params.to.level_of_detail != 0 || params.from.level_of_detail != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    build(&params.to.into(), &params.from.into(), [params.width_bytes, params.height, params.depth])
}

pub(super) fn build(to: &Operand, from: &Operand, extent: [usize; 3]) -> Result<Copy> {
    let [width_bytes, height, depth] = extent;
    let (to, from) = (to.endpoint(extent)?, from.endpoint(extent)?);
    Ok(Copy { to, from, width_bytes, height, depth, staged: None })
}

impl Operand {
    /// A pitch of 0 means rows without gaps; a slice height may be 0 if there is one slice only (CUDA driver
    /// API reference, cuMemcpy3D).
    fn endpoint(&self, [width_bytes, height, depth]: [usize; 3]) -> Result<Endpoint> {
        let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
        let is = |kind: CUmemorytype| self.memory_type == kind as u32;
        let (base, side) = if is(CUmemorytype::CU_MEMORYTYPE_HOST) {
            (self.host, Side::Host)
        } else if is(CUmemorytype::CU_MEMORYTYPE_DEVICE) {
            (self.device, Side::Device)
        } else if is(CUmemorytype::CU_MEMORYTYPE_UNIFIED) {
            (self.device, Side::Unified)
        } else if is(CUmemorytype::CU_MEMORYTYPE_ARRAY) {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        } else {
            return Err(invalid);
        };
        if width_bytes == 0 || height == 0 || depth == 0 {
            return Ok(Endpoint { address: base, side, pitch_bytes: 0, slice_rows: 0 });
        }
        let [x, y, z] = self.origin;
        let row_bytes = x.checked_add(width_bytes).ok_or(invalid)?;
        let rows = y.checked_add(height).ok_or(invalid)?;
        let pitch_bytes = if self.pitch_bytes == 0 { row_bytes } else { self.pitch_bytes };
        let slice_rows = if self.slice_rows == 0 && depth == 1 { rows } else { self.slice_rows };
        if base == 0 || pitch_bytes < row_bytes || pitch_bytes > MAX_PITCH_BYTES || slice_rows < rows {
            return Err(invalid);
        }
        let offset = z
            .checked_mul(slice_rows)
            .and_then(|rows| rows.checked_add(y)?.checked_mul(pitch_bytes)?.checked_add(x))
            .ok_or(invalid)?;
        let address = base.checked_add(offset as u64).ok_or(invalid)?;
        Ok(Endpoint { address, side, pitch_bytes, slice_rows })
    }
}

pub(crate) unsafe fn cuMemcpy2D_v2(params: *const sys::CUDA_MEMCPY2D) -> Result {
    context::current()?;
    // SAFETY: `params` is NULL or the caller's structure.
    synchronous(unsafe { from_2d(params) }?)
}

/// The devices here copy any pitch that is not too large, so this is cuMemcpy2D.
pub(crate) unsafe fn cuMemcpy2DUnaligned_v2(params: *const sys::CUDA_MEMCPY2D) -> Result {
    context::current()?;
    // SAFETY: `params` is NULL or the caller's structure.
    synchronous(unsafe { from_2d(params) }?)
}

pub(crate) unsafe fn cuMemcpy2DAsync_v2(params: *const sys::CUDA_MEMCPY2D, stream: CUstream) -> Result {
    context::current()?;
    // SAFETY: `params` is NULL or the caller's structure.
    asynchronous(unsafe { from_2d(params) }?, stream, SourceAccess::Stream)
}

pub(crate) unsafe fn cuMemcpy3D_v2(params: *const sys::CUDA_MEMCPY3D) -> Result {
    context::current()?;
    // SAFETY: `params` is NULL or the caller's structure.
    synchronous(unsafe { from_3d(params) }?)
}

pub(crate) unsafe fn cuMemcpy3DAsync_v2(params: *const sys::CUDA_MEMCPY3D, stream: CUstream) -> Result {
    context::current()?;
    // SAFETY: `params` is NULL or the caller's structure.
    asynchronous(unsafe { from_3d(params) }?, stream, SourceAccess::Stream)
}
