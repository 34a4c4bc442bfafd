//! The program's contexts: which there are, and one to work in on each device.

use std::ffi::c_int;
use std::ptr::null_mut;

use cuda_abi::types::{CUcontext, CUresult};

use super::{SUCCESS, driver};

/// The calling thread's context and its device; `None` without one.
pub(in crate::cuda) fn current() -> Option<(CUcontext, c_int)> {
    let mut context: CUcontext = null_mut();
    // SAFETY: `context` is a local variable.
    if unsafe { driver::cuCtxGetCurrent(&raw mut context) } != SUCCESS || context.is_null() {
        return None;
    }
    let mut device = 0;
    // SAFETY: `device` is a local variable.
    (unsafe { driver::cuCtxGetDevice(&raw mut device) } == SUCCESS).then_some((context, device))
}

/// Does something in a context, on any thread; the thread's own is current again afterwards.
///
/// # Errors
/// The driver's, if the context is not one.
pub(in crate::cuda) fn within<T>(context: CUcontext, work: impl FnOnce() -> T) -> Result<T, CUresult> {
    // SAFETY: a context that is gone is an error and not more.
    let result = unsafe { driver::cuCtxPushCurrent_v2(context) };
    if result != SUCCESS {
        return Err(result);
    }
    let done = work();
    let mut popped: CUcontext = null_mut();
    // SAFETY: `popped` is a local variable. The context was pushed above, so there is one to pop.
    let _ = unsafe { driver::cuCtxPopCurrent_v2(&raw mut popped) };
    Ok(done)
}
