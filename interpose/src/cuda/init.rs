//! cuInit: the process takes part in checkpoints from its first call on.

use std::ffi::c_uint;

use thiserror::Error;

use super::driver::{self, DriverError};
use super::handler::handlers;
use super::{activation, address_space, faults, real};
use crate::cuda::result::SUCCESS;
use crate::fork;

/// A process has a GPU's device files open, and the driver cannot take them away.
#[derive(Debug, Error)]
pub enum NotStarted {
    #[error(
        "it has device files of a GPU open, by NVML perhaps, and libcuda.so.1, which could release them, cannot be loaded"
    )]
    NotLoaded,
    #[error(
        "it has device files of a GPU open, by NVML perhaps, and the CUDA driver, which could release them: {0}"
    )]
    Refused(#[from] DriverError),
}

/// Initialises the driver in a process that has not done so itself.
///
/// # Errors
/// There is no driver, or it cannot be initialised.
pub(super) fn start_driver() -> Result<(), NotStarted> {
    // A child that is forked meanwhile would have half a driver, with locks of a thread that it does not have, those of the
    // dynamic linker included. The program does not know that its driver starts now, so its forks wait.
    fork::while_none_for_long(|| {
        if !real::load() {
            return Err(NotStarted::NotLoaded);
        }
        address_space::prepare();
        activation::while_starting(|| {
            // SAFETY: the call takes a number.
            driver::check("cuInit", unsafe { driver::cuInit(0) })?;
            faults::hit("init-returned");
            activation::driver_started_for_nvml();
            Ok(())
        })
    })
}

handlers! {
    fn cuInit(flags: c_uint) |call| {
        if activation::is_active() {
            // Before the driver maps anything.
            address_space::prepare();
        }
        activation::while_starting(|| {
            let result = call();
            faults::hit("init-returned");
            if result == SUCCESS {
                activation::driver_started();
            }
            result
        })
    }
}
