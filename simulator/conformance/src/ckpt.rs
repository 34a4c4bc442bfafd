//! The checkpoint API, as checks and questions use it.

use cuda_abi::types::*;

use crate::check::{Result, expect_equal, failed};
use crate::{cu, gpu, ok};

/// How long a lock may take before the check fails.
const LOCK_TIMEOUT_MS: u32 = 10_000;

/// This process.
pub fn me() -> i32 {
    i32::try_from(std::process::id()).expect("process IDs are positive and small")
}

/// Locks a process; gives the result of the call.
pub fn try_lock(pid: i32, timeout_ms: u32) -> Result<u32> {
    let mut args = CUcheckpointLockArgs { timeoutMs: timeout_ms, reserved0: 0, reserved1: [0; 7] };
    Ok(cu!(cuCheckpointProcessLock(pid, &raw mut args)))
}

/// Locks a process.
pub fn lock(pid: i32) -> Result {
    expect_equal("lock", gpu::name_of(try_lock(pid, LOCK_TIMEOUT_MS)?), "CUDA_SUCCESS".into())
}

/// Takes a locked process off the device.
pub fn checkpoint(pid: i32) -> Result {
    ok!(cuCheckpointProcessCheckpoint(pid, std::ptr::null_mut()));
    Ok(())
}

/// Brings it back.
pub fn restore(pid: i32) -> Result {
    ok!(cuCheckpointProcessRestore(pid, std::ptr::null_mut()));
    Ok(())
}

/// Lets the process resume.
pub fn unlock(pid: i32) -> Result {
    ok!(cuCheckpointProcessUnlock(pid, std::ptr::null_mut()));
    Ok(())
}

/// All four steps.
pub fn cycle(pid: i32) -> Result {
    lock(pid)?;
    checkpoint(pid)?;
    restore(pid)?;
    unlock(pid)
}

/// The state in words.
pub fn state(pid: i32) -> Result<&'static str> {
    let mut state = 77;
    ok!(cuCheckpointProcessGetState(pid, &raw mut state));
    match state {
        0 => Ok("running"),
        1 => Ok("locked"),
        2 => Ok("checkpointed"),
        3 => Ok("failed"),
        _ => failed(format!("no known state: {state}")),
    }
}
