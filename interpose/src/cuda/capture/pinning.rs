//! Pins memory of the host for the devices of all contexts.

use std::ffi::c_void;

use cuda_abi::sys;
use cuda_abi::types::{CUcontext, CUresult};

use super::allocation::in_context;
use super::error::CaptureError;
use crate::cuda::context;
use crate::cuda::driver::{self, DriverError, check};

const NOT_PINNED: CUresult = sys::CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED as CUresult;
const NO_CONTEXT: CUresult = sys::CUresult::CUDA_ERROR_INVALID_CONTEXT as CUresult;
const DESTROYED: CUresult = sys::CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED as CUresult;

/// Pins mapped memory, which stays mapped until it is unpinned. Returns the context in which it is pinned, the first that
/// can.
///
/// # Errors
/// Why no context can.
pub(super) fn pin(
    start: *mut c_void,
    bytes: usize,
    contexts: &[CUcontext],
) -> Result<CUcontext, CaptureError> {
    let mut last = CaptureError::NoContext;
    for context in contexts {
        let pinned = in_context(*context, || {
            // SAFETY: the memory is mapped, and stays so until it is unpinned.
            let result =
                unsafe { driver::cuMemHostRegister_v2(start, bytes, sys::CU_MEMHOSTREGISTER_PORTABLE) };
            Ok(check("cuMemHostRegister", result)?)
        });
        match pinned {
            Ok(()) => return Ok(*context),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Unpins memory that was pinned by one call, once no copy is under way.
///
/// # Errors
/// A driver call failed.
pub(super) fn unpin(start: *mut c_void, context: CUcontext) -> Result<(), DriverError> {
    // SAFETY: it was pinned, and no copy is under way.
    match context::within(context, || unsafe { driver::cuMemHostUnregister(start) }) {
        // The context has been reset or destroyed, with what was pinned in it.
        Ok(NOT_PINNED) | Err(NO_CONTEXT | DESTROYED) => Ok(()),
        Ok(result) => check("cuMemHostUnregister", result),
        Err(result) => check("cuCtxPushCurrent", result),
    }
}
