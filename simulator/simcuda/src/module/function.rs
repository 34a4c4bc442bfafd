//! Functions: kernels of a loaded module.

use std::ffi::{CString, c_char};
use std::sync::Arc;

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{
    CUfunc_cache, CUfunction, CUfunction_attribute, CUfunctionLoadingState, CUmodule, CUsharedconfig,
};
use parking_lot::Mutex;
use simcuda_ptx as ptx;

use super::library;
use super::loaded::LoadedModule;
use super::settings::Settings;
use crate::context;
use crate::error::{Result, write_if_wanted, write_out};
use crate::handle::Table;
use crate::process;

/// A kernel in a context.
pub(super) struct Function {
    pub(super) handle: usize,
    pub(super) name: CString,
    pub(super) module: Arc<LoadedModule>,
    settings: Mutex<Settings>,
    /// Block, parameters and shared memory as the calls before CUDA 4 set them.
    pub(super) legacy: Mutex<super::legacy::LaunchState>,
}

static FUNCTIONS: Table<Function> = Table::new();

impl Function {
    pub(super) fn name(&self) -> &str {
        self.name.to_str().expect("names of functions come out of a text")
    }

    pub(super) fn code(&self) -> &ptx::Function {
        self.module.code().function(self.name()).expect("a handle is only made for a function that is there")
    }

    /// What was set for this function, else what was set for the kernel of its library on this device.
    pub(super) fn settings(&self) -> Settings {
        let own = *self.settings.lock();
        match self.module.library {
            Some(library) => {
                own.or(&library::settings(library, self.name(), self.module.context.device.ordinal))
            }
            None => own,
        }
    }
}

/// Makes a handle for a function of a module.
pub(super) fn add(module: &Arc<LoadedModule>, name: &str) -> Arc<Function> {
    FUNCTIONS.insert_with(|handle| Function {
        handle,
        name: CString::new(name).expect("PTX has no NUL in a name"),
        module: Arc::clone(module),
        settings: Mutex::default(),
        legacy: Mutex::default(),
    })
}

pub(super) fn remove(handle: usize) {
    FUNCTIONS.remove(handle);
}

/// The function of a handle that is a function's own.
pub(super) fn by_own_handle(handle: usize) -> Option<Arc<Function>> {
    FUNCTIONS.get(handle)
}

/// The function of a handle, which may also be a kernel's: that means its function in the current context
/// (CUDA driver API reference, cuLaunchKernel).
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE`; for a kernel also what loading its library into the context fails with.
pub(super) fn by_handle(handle: CUfunction) -> Result<Arc<Function>> {
    match FUNCTIONS.get(handle as usize) {
        Some(function) => Ok(function),
        None => library::function_of_kernel(handle as usize),
    }
}

pub(crate) unsafe fn cuFuncGetAttribute(
    out: *mut i32,
    attribute: CUfunction_attribute,
    handle: CUfunction,
) -> Result {
    context::current()?;
    let function = by_handle(handle)?;
    let value = function.settings().get(function.module.code(), function.code(), attribute)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, value) }
}

pub(crate) unsafe fn cuFuncSetAttribute(
    handle: CUfunction,
    attribute: CUfunction_attribute,
    value: i32,
) -> Result {
    context::current()?;
    let function = by_handle(handle)?;
    function.settings.lock().set(function.code(), attribute, value)
}

/// A preference without effect: shared memory here takes nothing from a cache.
pub(crate) unsafe fn cuFuncSetCacheConfig(handle: CUfunction, config: CUfunc_cache) -> Result {
    context::current()?;
    by_handle(handle)?;
    check_cache_config(config)
}

/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for an unknown preference.
pub(super) fn check_cache_config(config: CUfunc_cache) -> Result {
    if config > sys::CUfunc_cache::CU_FUNC_CACHE_PREFER_EQUAL as u32 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(())
}

/// Without effect on sm_90, whose banks have one width.
pub(crate) unsafe fn cuFuncSetSharedMemConfig(handle: CUfunction, config: CUsharedconfig) -> Result {
    context::current()?;
    by_handle(handle)?;
    if config > sys::CUsharedconfig::CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE as u32 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(())
}

pub(crate) unsafe fn cuFuncGetModule(out: *mut CUmodule, handle: CUfunction) -> Result {
    context::current()?;
    let function = by_handle(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, function.module.handle as CUmodule) }
}

/// The name lives as long as the handle.
pub(crate) unsafe fn cuFuncGetName(out: *mut *const c_char, handle: CUfunction) -> Result {
    process::machine()?;
    if handle.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let function = by_handle(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, function.name.as_ptr()) }
}

pub(crate) unsafe fn cuFuncGetParamInfo(
    handle: CUfunction,
    index: usize,
    offset: *mut usize,
    size_bytes: *mut usize,
) -> Result {
    process::machine()?;
    let function = by_handle(handle)?;
    // SAFETY: both are the caller's out parameters.
    unsafe { write_param_info(function.code(), index, offset, size_bytes) }
}

/// Where a parameter lies in the block of parameters.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if there is no such parameter or nowhere to write the offset to.
///
/// # Safety
/// Each pointer is NULL or valid for a write.
pub(super) unsafe fn write_param_info(
    function: &ptx::Function,
    index: usize,
    offset: *mut usize,
    size_bytes: *mut usize,
) -> Result {
    let param = function.params.get(index).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    // SAFETY: the caller vouches for the pointer.
    unsafe { write_out(offset, param.offset) }?;
    // SAFETY: the caller vouches for the pointer.
    unsafe { write_if_wanted(size_bytes, param.size) };
    Ok(())
}

pub(crate) unsafe fn cuFuncGetParamCount(handle: CUfunction, out: *mut usize) -> Result {
    process::machine()?;
    let function = by_handle(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, function.code().params.len()) }
}

/// Functions are loaded with their module.
pub(crate) unsafe fn cuFuncIsLoaded(out: *mut CUfunctionLoadingState, handle: CUfunction) -> Result {
    process::machine()?;
    by_handle(handle)?;
    let state = sys::CUfunctionLoadingState::CU_FUNCTION_LOADING_STATE_LOADED;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, state as CUfunctionLoadingState) }
}

pub(crate) unsafe fn cuFuncLoad(handle: CUfunction) -> Result {
    process::machine()?;
    by_handle(handle).map(|_| ())
}
