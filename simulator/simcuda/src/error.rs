//! Results of handlers, and the names and texts of the driver's error codes.

use cuda_abi::sys::CUresult;

/// The driver's own error codes, never `CUDA_SUCCESS`.
pub(crate) type Error = CUresult;

/// What a handler returns; the entry prologue turns it into a `CUresult`.
pub(crate) type Result<T = ()> = std::result::Result<T, Error>;

/// Writes `value` to a caller's out parameter.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if the pointer is NULL.
///
/// # Safety
/// `out` is NULL or valid for one write of `T`.
pub(crate) unsafe fn write_out<T>(out: *mut T, value: T) -> Result {
    if out.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not NULL, and the caller of this function vouches for the rest.
    unsafe { out.write(value) };
    Ok(())
}

/// Writes to two of a caller's out parameters, or to none.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if a pointer is NULL.
///
/// # Safety
/// Each pointer is NULL or valid for one write.
pub(crate) unsafe fn write_both<A, B>(first: *mut A, second: *mut B, values: (A, B)) -> Result {
    if second.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller of this function vouches for it.
    unsafe { write_out(first, values.0) }?;
    // SAFETY: as above.
    unsafe { write_out(second, values.1) }
}

/// Like [`write_out`], where the caller may pass NULL for what it does not want to know.
///
/// # Safety
/// `out` is NULL or valid for one write of `T`.
pub(crate) unsafe fn write_if_wanted<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: not NULL, and the caller of this function vouches for the rest.
        unsafe { out.write(value) };
    }
}
