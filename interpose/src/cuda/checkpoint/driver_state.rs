//! The driver's own checkpoint of this process: lock, checkpoint, restore, unlock.
//!
//! ```text
//!            lock            checkpoint
//!   Running -----> Locked -----------------> Checkpointed ---> Displaced (its addresses were taken meanwhile)
//!      ^           |    ^                     |
//!      |  unlock   |    |      restore        |
//!      +-----------+    +---------------------+
//! ```

use std::ffi::c_int;
use std::time::Instant;

use cuda_abi::sys::{
    self, CUcheckpointCheckpointArgs, CUcheckpointLockArgs, CUcheckpointRestoreArgs, CUcheckpointUnlockArgs,
};
use cuda_abi::types::CUresult;

use super::error::{AttachError, DetachError};
use crate::cuda::driver::{self, DriverError, check};
use crate::cuda::driver_support::UnsupportedDriver;
use crate::cuda::faults;
use crate::cuda::gpus::UuidPair;
use crate::cuda::libraries::cupti;

#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum DriverState {
    #[default]
    Running,
    Locked,
    Checkpointed,
    /// Checkpointed, and a restore would overwrite memory that others have mapped at the driver's addresses.
    Displaced,
}

impl DriverState {
    /// Waits for submitted work, host functions included, and locks the driver.
    pub fn lock(&mut self, deadline: Instant) -> Result<(), DetachError> {
        const NOT_READY: CUresult = sys::CUresult::CUDA_ERROR_NOT_READY as CUresult;
        let left_ms = deadline.saturating_duration_since(Instant::now()).as_millis();
        // SAFETY: all zeros is a valid value of a structure of numbers.
        let mut args: CUcheckpointLockArgs = unsafe { std::mem::zeroed() };
        // 0 would mean no timeout.
        args.timeoutMs = u32::try_from(left_ms).unwrap_or(u32::MAX).max(1);
        // SAFETY: `args` is a local variable.
        let result = unsafe { driver::cuCheckpointProcessLock(pid(), &raw mut args) };
        check("cuCheckpointProcessLock", result).map_err(|error| match result {
            NOT_READY => DetachError::WorkPending(error),
            _ => refused(error),
        })?;
        *self = Self::Locked;
        Ok(())
    }

    /// Leaves the process locked if it fails.
    pub fn checkpoint(&mut self, deadline: Instant) -> Result<(), DetachError> {
        // The launcher may have given the attempt up.
        if Instant::now() >= deadline {
            return Err(DetachError::LockTimeout);
        }
        // SAFETY: all zeros is a valid value: no storage of our own.
        let mut args: CUcheckpointCheckpointArgs = unsafe { std::mem::zeroed() };
        // SAFETY: `args` is a local variable.
        let result = unsafe { driver::cuCheckpointProcessCheckpoint(pid(), &raw mut args) };
        check("cuCheckpointProcessCheckpoint", result).map_err(refused)?;
        *self = Self::Checkpointed;
        Ok(())
    }

    /// Brings a driver that is checkpointed or locked back to running. The pairs name the GPUs that take the places of
    /// others; without any, all are the same.
    pub fn bring_back(&mut self, pairs: &[UuidPair]) -> Result<(), AttachError> {
        if *self == Self::Displaced {
            return Err(AttachError::AddressesTaken);
        }
        if *self == Self::Checkpointed {
            self.restore(pairs)?;
            faults::hit("attach-restored");
        }
        if *self == Self::Locked {
            self.unlock()?;
            faults::hit("attach-unlocked");
        }
        Ok(())
    }

    fn restore(&mut self, pairs: &[UuidPair]) -> Result<(), DriverError> {
        driver::retry(|| {
            // SAFETY: all zeros is a valid value: the same GPUs.
            let mut args: CUcheckpointRestoreArgs = unsafe { std::mem::zeroed() };
            if !pairs.is_empty() {
                args.gpuPairs = pairs.as_ptr().cast_mut().cast();
                args.gpuPairsCount = u32::try_from(pairs.len()).unwrap_or(u32::MAX);
            }
            // SAFETY: `args` is a local variable, and the driver reads the pairs, which are as many as it says.
            let result = unsafe { driver::cuCheckpointProcessRestore(pid(), &raw mut args) };
            check("cuCheckpointProcessRestore", result)
        })?;
        *self = Self::Locked;
        Ok(())
    }

    pub fn unlock(&mut self) -> Result<(), DriverError> {
        driver::retry(|| {
            // SAFETY: all zeros is what the structure has to be.
            let mut args: CUcheckpointUnlockArgs = unsafe { std::mem::zeroed() };
            // SAFETY: `args` is a local variable.
            let result = unsafe { driver::cuCheckpointProcessUnlock(pid(), &raw mut args) };
            check("cuCheckpointProcessUnlock", result)
        })?;
        *self = Self::Running;
        Ok(())
    }
}

/// Why the driver does not lock or checkpoint the process.
fn refused(error: DriverError) -> DetachError {
    const NOT_SUPPORTED: CUresult = sys::CUresult::CUDA_ERROR_NOT_SUPPORTED as CUresult;
    if error.result != NOT_SUPPORTED {
        return error.into();
    }
    DetachError::DriverRefuses { error, reason: UnsupportedDriver::refused(), hint: cupti::hint() }
}

fn pid() -> c_int {
    // SAFETY: getpid has no preconditions.
    unsafe { libc::getpid() }
}
