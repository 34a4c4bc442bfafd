//! cuInit: the process takes part in checkpoints from its first call on.

use std::ffi::c_uint;

use super::handler::handlers;
use super::{activation, address_space};
use crate::cuda::result::SUCCESS;

handlers! {
    fn cuInit(flags: c_uint) |call| {
        if activation::is_active() {
            // Before the driver maps anything.
            address_space::prepare();
        }
        let result = call();
        if result == SUCCESS {
            activation::driver_started();
        }
        result
    }
}
