//! The structures of programs that hold enums, with integers in their place: a program may have put any number
//! there. They are read through these, and laid out like those of the same name in `cuda.h`.

use cuda_abi::sys::{self, CUresult};

use crate::error::Result;

/// Reads a program's structure.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if there is none.
///
/// # Safety
/// `from` is NULL or valid for a read of `T`, of which any bits are one.
pub(crate) unsafe fn read<T: Copy>(from: *const T) -> Result<T> {
    if from.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    Ok(unsafe { from.read() })
}

/// A program's array; NULL will do for one of no elements.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if there is none.
///
/// # Safety
/// `from` is NULL or has `count` elements of `T`, of which any bits are one, and which do not change as long
/// as the result is in use.
pub(crate) unsafe fn array<'a, T: Copy>(from: *const T, count: usize) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if from.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    Ok(unsafe { std::slice::from_raw_parts(from, count) })
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Memcpy2D {
    pub(super) from: Operand2D,
    pub(super) to: Operand2D,
    pub(super) width_bytes: usize,
    pub(super) height: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Operand2D {
    pub(super) x_bytes: usize,
    pub(super) y: usize,
    pub(super) memory_type: u32,
    pub(super) host: u64,
    pub(super) device: u64,
    pub(super) array: u64,
    pub(super) pitch_bytes: usize,
}

/// `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Memcpy3D {
    pub(super) from: Operand3D,
    pub(super) to: Operand3D,
    pub(super) width_bytes: usize,
    pub(super) height: usize,
    pub(super) depth: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Operand3D {
    pub(super) x_bytes: usize,
    pub(super) y: usize,
    pub(super) z: usize,
    pub(super) level_of_detail: usize,
    pub(super) memory_type: u32,
    pub(super) host: u64,
    pub(super) device: u64,
    pub(super) array: u64,
    /// The context of a peer copy; reserved otherwise.
    pub(super) context: usize,
    pub(super) pitch_bytes: usize,
    pub(super) height: usize,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Attributes {
    pub(super) source_access_order: u32,
    pub(super) source_location_hint: [u32; LOCATION_WORDS],
    pub(super) target_location_hint: [u32; LOCATION_WORDS],
    pub(super) flags: u32,
}

const LOCATION_WORDS: usize = size_of::<sys::CUmemLocation>() / 4;

/// `CUDA_MEMCPY3D_BATCH_OP`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct BatchOperation {
    pub(super) from: BatchOperand,
    pub(super) to: BatchOperand,
    pub(super) extent: [usize; 3],
    pub(super) source_access_order: u32,
    pub(super) flags: u32,
}

/// `CUmemcpy3DOperand`, of which the pointer's member is used.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct BatchOperand {
    pub(super) kind: u32,
    pub(super) address: u64,
    pub(super) row_len: usize,
    pub(super) layer_height: usize,
    pub(super) location_hint: [u32; LOCATION_WORDS],
}

const _: () = {
    assert!(size_of::<Memcpy2D>() == size_of::<sys::CUDA_MEMCPY2D>());
    assert!(size_of::<Memcpy3D>() == size_of::<sys::CUDA_MEMCPY3D>());
    assert!(size_of::<Memcpy3D>() == size_of::<sys::CUDA_MEMCPY3D_PEER>());
    assert!(size_of::<Attributes>() == size_of::<sys::CUmemcpyAttributes>());
    assert!(size_of::<BatchOperation>() == size_of::<sys::CUDA_MEMCPY3D_BATCH_OP>());
    assert!(
        std::mem::offset_of!(BatchOperation, extent)
            == std::mem::offset_of!(sys::CUDA_MEMCPY3D_BATCH_OP, extent)
    );
};
