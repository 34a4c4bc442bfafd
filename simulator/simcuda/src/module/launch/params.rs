//! The two ways to pass parameters to a kernel (CUDA driver API reference, cuLaunchKernel).

use std::ffi::c_void;

use cuda_abi::sys::CUresult;
use simcuda_ptx as ptx;

use crate::error::Result;

const END: usize = 0;
const BUFFER_POINTER: usize = 1;
const BUFFER_SIZE: usize = 2;

/// Copies the parameters, laid out as the function expects them.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if both ways are used, or none although there are parameters, or if the buffer is
/// too small.
///
/// # Safety
/// `kernel_params` is NULL or has one pointer to each parameter's value; `extra` is NULL or a list that ends with
/// `CU_LAUNCH_PARAM_END`, with a buffer as large as it says.
pub(super) unsafe fn read(
    function: &ptx::Function,
    kernel_params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result<Vec<u8>> {
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    match (kernel_params.is_null(), extra.is_null()) {
        (false, false) => invalid,
        _ if function.params.is_empty() => Ok(Vec::new()),
        (true, true) => invalid,
        // SAFETY: the caller vouches for the pointers.
        (false, true) => unsafe { from_pointers(function, kernel_params) },
        // SAFETY: the caller vouches for the list.
        (true, false) => unsafe { from_buffer(function, extra) },
    }
}

/// # Safety
/// As `kernel_params` of [`read`], and not NULL.
unsafe fn from_pointers(function: &ptx::Function, kernel_params: *mut *mut c_void) -> Result<Vec<u8>> {
    let mut params = vec![0; function.param_bytes];
    for (index, param) in function.params.iter().enumerate() {
        // SAFETY: there is a pointer for each parameter.
        let value = unsafe { kernel_params.add(index) };
        // SAFETY: as above.
        let value = unsafe { value.read() };
        if value.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: it points to a value of the parameter's size.
        let value = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), param.size) };
        params[param.offset..param.offset + param.size].copy_from_slice(value);
    }
    Ok(params)
}

/// # Safety
/// As `extra` of [`read`], and not NULL.
unsafe fn from_buffer(function: &ptx::Function, extra: *mut *mut c_void) -> Result<Vec<u8>> {
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    let mut buffer = std::ptr::null::<u8>();
    let mut size_bytes = 0;
    for pair in (0..).step_by(2) {
        // SAFETY: the list has not ended yet.
        let name = unsafe { extra.add(pair) };
        // SAFETY: as above.
        let name = unsafe { name.read() }.addr();
        if name == END {
            break;
        }
        if name != BUFFER_POINTER && name != BUFFER_SIZE {
            return invalid;
        }
        // SAFETY: each name has a value.
        let value = unsafe { extra.add(pair + 1) };
        // SAFETY: as above.
        let value = unsafe { value.read() };
        if value.is_null() {
            return invalid;
        }
        if name == BUFFER_POINTER {
            buffer = value.cast();
        } else {
            // SAFETY: the value of this name points to a size.
            size_bytes = unsafe { value.cast::<usize>().read() };
        }
    }
    // The buffer may have padding behind the last parameter.
    if buffer.is_null() || size_bytes < function.param_bytes {
        return invalid;
    }
    // SAFETY: the buffer is as large as the list says.
    Ok(unsafe { std::slice::from_raw_parts(buffer, function.param_bytes) }.to_vec())
}
