//! Launches as before CUDA 4: block, shared memory and parameters are set at the function, one by one.

use std::ffi::c_void;

use cuda_abi::sys::CUresult;
use cuda_abi::types::{CUfunction, CUstream};

use super::function;
use super::image::PARAM_BYTES_MAX;
use super::launch::{Kernel, Shape};
use crate::context;
use crate::error::Result;
use crate::stream::{self, Work};

/// What was set so far.
#[derive(Clone, Default)]
pub(super) struct LaunchState {
    block: [u32; 3],
    shared_bytes: u32,
    params: Vec<u8>,
}

fn change(handle: CUfunction, change: impl FnOnce(&mut LaunchState) -> Result) -> Result {
    context::current()?;
    change(&mut function::by_handle(handle)?.legacy.lock())
}

fn dimension(size: i32) -> Result<u32> {
    u32::try_from(size).ok().filter(|size| *size > 0).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

pub(crate) unsafe fn cuFuncSetBlockShape(f: CUfunction, x: i32, y: i32, z: i32) -> Result {
    let block = [dimension(x)?, dimension(y)?, dimension(z)?];
    change(f, |state| {
        state.block = block;
        Ok(())
    })
}

pub(crate) unsafe fn cuFuncSetSharedSize(f: CUfunction, size_bytes: u32) -> Result {
    change(f, |state| {
        state.shared_bytes = size_bytes;
        Ok(())
    })
}

pub(crate) unsafe fn cuParamSetSize(f: CUfunction, size_bytes: u32) -> Result {
    change(f, |state| {
        if size_bytes as usize > PARAM_BYTES_MAX {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        state.params.resize(size_bytes as usize, 0);
        Ok(())
    })
}

fn set_param(f: CUfunction, offset: i32, value: &[u8]) -> Result {
    let offset = usize::try_from(offset).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
    change(f, |state| {
        let end = offset.checked_add(value.len()).filter(|end| *end <= PARAM_BYTES_MAX);
        let end = end.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        if state.params.len() < end {
            state.params.resize(end, 0);
        }
        state.params[offset..end].copy_from_slice(value);
        Ok(())
    })
}

pub(crate) unsafe fn cuParamSeti(f: CUfunction, offset: i32, value: u32) -> Result {
    set_param(f, offset, &value.to_ne_bytes())
}

pub(crate) unsafe fn cuParamSetf(f: CUfunction, offset: i32, value: f32) -> Result {
    set_param(f, offset, &value.to_ne_bytes())
}

pub(crate) unsafe fn cuParamSetv(f: CUfunction, offset: i32, value: *mut c_void, size_bytes: u32) -> Result {
    if value.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller passes a value of this size.
    let value = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), size_bytes as usize) };
    set_param(f, offset, value)
}

fn launch(f: CUfunction, grid: [u32; 3], stream: CUstream) -> Result {
    let context = context::current()?;
    let function = function::by_handle(f)?;
    if !std::sync::Arc::ptr_eq(&function.module.context, &context) {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    let LaunchState { block, shared_bytes, mut params } = function.legacy.lock().clone();
    let needed = function.code().param_bytes;
    if params.len() < needed {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    params.truncate(needed);
    let kernel = Kernel::new(function, Shape::plain(grid, block, shared_bytes), params)?;
    stream::submit(stream, Work::Kernel(std::sync::Arc::new(kernel)))
}

pub(crate) unsafe fn cuLaunch(f: CUfunction) -> Result {
    launch(f, [1; 3], std::ptr::null_mut())
}

pub(crate) unsafe fn cuLaunchGrid(f: CUfunction, width: i32, height: i32) -> Result {
    launch(f, [dimension(width)?, dimension(height)?, 1], std::ptr::null_mut())
}

pub(crate) unsafe fn cuLaunchGridAsync(f: CUfunction, width: i32, height: i32, stream: CUstream) -> Result {
    launch(f, [dimension(width)?, dimension(height)?, 1], stream)
}
