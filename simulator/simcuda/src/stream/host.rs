//! Functions of the program that run on a worker, in a stream's order.

use std::ffi::c_void;

use cuda_abi::sys::{CUhostTaskSyncMode, CUresult};
use cuda_abi::types::{CUhostFn, CUstream, CUstreamCallback};

use super::object::{enqueue, find};
use super::work::{Task, Work};
use super::{capture, submit};
use crate::entry;
use crate::error::Result;

/// A host function with its argument.
#[derive(Clone, Copy)]
pub(crate) struct HostFunction {
    function: unsafe extern "C" fn(*mut c_void),
    /// The program's pointer, which only the program follows.
    data: usize,
}

impl HostFunction {
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if there is no function.
    pub(crate) fn new(function: CUhostFn, data: *mut c_void) -> Result<Self> {
        let function = function.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        Ok(Self { function, data: data as usize })
    }

    /// The function and its argument, as the program gave them.
    pub(crate) fn parts(&self) -> (CUhostFn, *mut c_void) {
        (Some(self.function), self.data as *mut c_void)
    }

    pub(super) fn call(&self) {
        // SAFETY: the program asked for this call, with this argument, on a thread of the driver.
        entry::in_host_function(|| unsafe { (self.function)(self.data as *mut c_void) });
    }
}

/// A callback of cuStreamAddCallback, which also learns how the work before it went.
pub(super) struct Callback {
    function: unsafe extern "C" fn(CUstream, CUresult, *mut c_void),
    stream: usize,
    data: usize,
}

impl Callback {
    pub(super) fn call(&self, result: Result) {
        let status = result.err().unwrap_or(CUresult::CUDA_SUCCESS);
        let call = || {
            // SAFETY: the program asked for this call, with this argument, on a thread of the driver.
            unsafe { (self.function)(self.stream as CUstream, status, self.data as *mut c_void) }
        };
        entry::in_host_function(call);
    }
}

pub(crate) unsafe fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void) -> Result {
    submit(stream, Work::Host(HostFunction::new(function, data)?))
}

/// How the host waits for the function is a matter of speed only.
pub(crate) unsafe fn cuLaunchHostFunc_v2(
    stream: CUstream,
    function: CUhostFn,
    data: *mut c_void,
    sync_mode: u32,
) -> Result {
    if sync_mode > CUhostTaskSyncMode::CU_HOST_TASK_SPINWAIT as u32 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    submit(stream, Work::Host(HostFunction::new(function, data)?))
}

pub(crate) unsafe fn cuStreamAddCallback(
    handle: CUstream,
    function: CUstreamCallback,
    data: *mut c_void,
    flags: u32,
) -> Result {
    let function = function.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    if flags != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let stream = find(handle)?;
    capture::refuse(&stream)?;
    stream.queue.wait_for_room();
    let callback = Callback { function, stream: handle as usize, data: data as usize };
    enqueue(&stream, Task::Callback(callback), Vec::new()).map(|_| ())
}
