//! cuInit: the process takes part in checkpoints from its first call on.

use std::ffi::c_uint;

use cuda_abi::types::CUresult;

use super::{activation, address_space};
use crate::cuda::result::SUCCESS;

/// # Safety
/// As for the driver's.
pub(super) unsafe fn cuInit(real: unsafe extern "C" fn(c_uint) -> CUresult, flags: c_uint) -> CUresult {
    if activation::is_active() {
        // Before the driver maps anything.
        address_space::prepare();
    }
    // SAFETY: the parameters are those of our own caller.
    let result = unsafe { real(flags) };
    if result == SUCCESS {
        activation::driver_started();
    }
    result
}
