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
