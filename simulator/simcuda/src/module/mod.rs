//! Modules, libraries, functions and launches.
//!
//! [`image`] finds the PTX in what a program passes and has it parsed; [`loaded`] is a module in one context, with
//! memory for its variables; a [`library`] is loaded into each context when that first asks for it; [`function`]
//! is a kernel of a loaded module; [`launch`] checks a launch and makes a [`Kernel`] of it, which a stream runs.

mod fatbin;
mod function;
mod image;
mod jit;
mod launch;
mod legacy;
mod library;
mod link;
mod loaded;
mod occupancy;
mod settings;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_char};
use std::sync::Arc;

use cuda_abi::sys::CUresult;

use crate::context::Context;
use crate::error::Result;

pub(crate) use function::{
    cuFuncGetAttribute, cuFuncGetModule, cuFuncGetName, cuFuncGetParamCount, cuFuncGetParamInfo,
    cuFuncIsLoaded, cuFuncLoad, cuFuncSetAttribute, cuFuncSetCacheConfig, cuFuncSetSharedMemConfig,
};
pub(crate) use launch::{Kernel, cuLaunchCooperativeKernel, cuLaunchKernel, cuLaunchKernelEx};
pub(crate) use legacy::{
    cuFuncSetBlockShape, cuFuncSetSharedSize, cuLaunch, cuLaunchGrid, cuLaunchGridAsync, cuParamSetSize,
    cuParamSetf, cuParamSeti, cuParamSetv,
};
pub(crate) use library::{
    cuKernelGetAttribute, cuKernelGetFunction, cuKernelGetLibrary, cuKernelGetName, cuKernelGetParamCount,
    cuKernelGetParamInfo, cuKernelSetAttribute, cuKernelSetCacheConfig, cuLibraryEnumerateKernels,
    cuLibraryGetGlobal, cuLibraryGetKernel, cuLibraryGetKernelCount, cuLibraryGetManaged, cuLibraryGetModule,
    cuLibraryGetUnifiedFunction, cuLibraryLoadData, cuLibraryLoadFromFile, cuLibraryUnload,
};
pub(crate) use link::{cuLinkAddData_v2, cuLinkAddFile_v2, cuLinkComplete, cuLinkCreate_v2, cuLinkDestroy};
pub(crate) use loaded::{
    cuModuleEnumerateFunctions, cuModuleGetFunction, cuModuleGetFunctionCount, cuModuleGetGlobal_v2,
    cuModuleGetLoadingMode, cuModuleGetSurfRef, cuModuleGetTexRef, cuModuleLoad, cuModuleLoadData,
    cuModuleLoadDataEx, cuModuleLoadFatBinary, cuModuleUnload,
};
pub(crate) use occupancy::{
    cuOccupancyAvailableDynamicSMemPerBlock, cuOccupancyMaxActiveBlocksPerMultiprocessor,
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, cuOccupancyMaxActiveClusters,
    cuOccupancyMaxPotentialBlockSize, cuOccupancyMaxPotentialBlockSizeWithFlags,
    cuOccupancyMaxPotentialClusterSize,
};

/// Unloads the modules of a context.
pub(crate) fn context_destroyed(context: &Arc<Context>) {
    library::forget_context(context);
    loaded::unload_all(context);
}

/// A name that the program passed.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for NULL and for what is not UTF-8, in which no symbol is written.
///
/// # Safety
/// `text` is NULL or a NUL-terminated text that outlives the result.
unsafe fn text<'a>(text: *const c_char) -> Result<&'a str> {
    if text.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)
}

/// A file that the program names.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for NULL, `CUDA_ERROR_FILE_NOT_FOUND` if it cannot be read.
///
/// # Safety
/// `path` is NULL or a NUL-terminated text.
unsafe fn file(path: *const c_char) -> Result<Vec<u8>> {
    use std::os::unix::ffi::OsStrExt;
    if path.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    let path = unsafe { CStr::from_ptr(path) };
    std::fs::read(std::ffi::OsStr::from_bytes(path.to_bytes()))
        .map_err(|_| CUresult::CUDA_ERROR_FILE_NOT_FOUND)
}
