//! Taking the driver's state off the GPU for a dump, and bringing it back.
//!
//! ```text
//!            detach: gate closed, no capture open, driver locked and checkpointed
//!   Running ----------------------------------------------------------------------> Detached
//!    ^ ^ |  any step fails: it is undone, the process runs on                       |  |
//!    | | +---> Running                                                              |  |
//!    | |                    attach: driver restored and unlocked, gate opened       |  |
//!    | +----------------------------------------------------------------------------+  |
//!    |                                                       restore or unlock fails   |
//!    | attach: driver unlocked, gate opened                                            v
//!    +------------------------------ Stuck --------------------------------------> Lost, for good
//!                                             unlock fails again
//! ```
//!
//! Stuck is a driver that was locked, could not be checkpointed and does not let itself be unlocked. The process
//! cannot go on like that, which only who is away can tell the launcher: so detach says that all is well, the dump
//! fails for what the driver holds, and attach tries once more.
//!
//! Device memory goes the driver's own way so far: the driver copies it to host memory, which the dump takes.

use std::ffi::{CStr, c_char, c_int};
use std::ptr::null;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::time::{Duration, Instant};

use cuda_abi::sys::{
    self, CUcheckpointCheckpointArgs, CUcheckpointLockArgs, CUcheckpointRestoreArgs, CUcheckpointUnlockArgs,
};
use cuda_abi::types::CUresult;

use super::{SUCCESS, bypass, driver, faults, gate, is_started, taint, track};

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Phase {
    Running,
    Detached,
    Stuck,
    Lost,
}

/// Only the agent's thread moves it. No mutex: a fork may come at any time, and the child has an agent too.
static PHASE: AtomicU8 = AtomicU8::new(Phase::Running as u8);

fn phase() -> Phase {
    let code = PHASE.load(SeqCst);
    let phases = [Phase::Running, Phase::Detached, Phase::Stuck];
    phases.into_iter().find(|phase| *phase as u8 == code).unwrap_or(Phase::Lost)
}

fn enter(phase: Phase) {
    PHASE.store(phase as u8, SeqCst);
}

/// How often to look whether a stream capture has ended.
const LOOK: Duration = Duration::from_millis(1);
/// How often an unlock is tried, and the pause between two tries: there is no other way on.
const UNLOCK_TRIES: u32 = 5;
const UNLOCK_PAUSE: Duration = Duration::from_millis(20);

const LOST: &str = "its GPU state was lost in an earlier restore";

/// Takes the driver's state off the GPU. A process that has none is done at once.
///
/// # Errors
/// Says why the process cannot be dumped now; it runs on as before.
pub fn detach(timeout: Duration) -> Result<(), String> {
    bypass::refuse()?;
    if !is_started() {
        return Ok(());
    }
    match phase() {
        Phase::Running => {}
        Phase::Detached | Phase::Stuck => return Ok(()),
        Phase::Lost => return Err(LOST.into()),
    }
    let deadline = Instant::now() + timeout;
    close_between_captures(deadline)?;
    // Behind the closed gate, so that no call that taints is under way.
    if let Some(call) = taint::what() {
        gate::open();
        return Err(format!("it has called {call}, whose effect cannot be saved"));
    }
    faults::hit("detach-gate");
    let result = lock(deadline);
    if result.is_err() {
        gate::open();
        return result;
    }
    faults::hit("detach-locked");
    match checkpoint(deadline) {
        Ok(()) => {
            enter(Phase::Detached);
            faults::hit("detach-checkpointed");
            Ok(())
        }
        Err(_) if unlock().is_err() => {
            enter(Phase::Stuck);
            Ok(())
        }
        Err(error) => {
            gate::open();
            Err(error)
        }
    }
}

/// Brings the driver's state back, in the process that was detached or in one restored from its image.
///
/// # Errors
/// The process's GPU state is lost.
pub fn attach() -> Result<(), String> {
    let attached = match phase() {
        Phase::Running => return Ok(()),
        Phase::Detached => {
            faults::hit("attach-begun");
            restore().and_then(|()| {
                faults::hit("attach-restored");
                unlock()
            })
        }
        Phase::Stuck => unlock(),
        Phase::Lost => return Err(LOST.into()),
    };
    if attached.is_ok() {
        faults::hit("attach-unlocked");
        enter(Phase::Running);
        gate::open();
    } else {
        // The gate stays closed: the launcher ends the job, which is not to meet the driver's errors before.
        enter(Phase::Lost);
    }
    attached
}

/// In the child of a fork, which has no driver's state: neither has what its parent was in the middle of.
pub(super) fn after_fork_in_child() {
    enter(Phase::Running);
}

/// Closes the gate at a moment at which no stream is being captured: a capture may not be kept waiting, since
/// what it waits for may be its own end.
fn close_between_captures(deadline: Instant) -> Result<(), String> {
    loop {
        while track::open_captures() > 0 {
            if Instant::now() >= deadline {
                return Err("a stream capture (cuStreamBeginCapture) did not end".into());
            }
            std::thread::sleep(LOOK);
        }
        gate::close(deadline).map_err(|inside| match inside {
            0 => "membarrier(2) failed".to_owned(),
            1 => "a call of the CUDA driver did not return".to_owned(),
            _ => format!("calls of the CUDA driver in {inside} threads did not return"),
        })?;
        if track::open_captures() == 0 {
            return Ok(());
        }
        gate::open();
    }
}

fn pid() -> c_int {
    // SAFETY: getpid has no preconditions.
    unsafe { libc::getpid() }
}

/// Waits for submitted work, host functions included.
fn lock(deadline: Instant) -> Result<(), String> {
    let left_ms = deadline.saturating_duration_since(Instant::now()).as_millis();
    // SAFETY: all zeros is a valid value of a structure of numbers.
    let mut args: CUcheckpointLockArgs = unsafe { std::mem::zeroed() };
    // 0 would mean for ever.
    args.timeoutMs = u32::try_from(left_ms).unwrap_or(u32::MAX).max(1);
    // SAFETY: `args` is a local variable.
    let result = unsafe { driver::cuCheckpointProcessLock(pid(), &raw mut args) };
    told("cuCheckpointProcessLock", result).map_err(|error| {
        if result == sys::CUresult::CUDA_ERROR_NOT_READY as CUresult {
            format!("work on the GPU did not end in time ({error})")
        } else {
            error
        }
    })
}

/// Leaves the process locked if it fails.
fn checkpoint(deadline: Instant) -> Result<(), String> {
    // Nobody may be waiting for it any more.
    if Instant::now() >= deadline {
        return Err("cuCheckpointProcessLock took longer than it was given".into());
    }
    // SAFETY: all zeros is a valid value: no storage of our own.
    let mut args: CUcheckpointCheckpointArgs = unsafe { std::mem::zeroed() };
    // SAFETY: `args` is a local variable.
    let result = unsafe { driver::cuCheckpointProcessCheckpoint(pid(), &raw mut args) };
    told("cuCheckpointProcessCheckpoint", result)
}

fn restore() -> Result<(), String> {
    // SAFETY: all zeros is a valid value: the same GPUs.
    let mut args: CUcheckpointRestoreArgs = unsafe { std::mem::zeroed() };
    // SAFETY: `args` is a local variable.
    let result = unsafe { driver::cuCheckpointProcessRestore(pid(), &raw mut args) };
    told("cuCheckpointProcessRestore", result)
}

fn unlock() -> Result<(), String> {
    let mut unlocked = Ok(());
    for tries in 0..UNLOCK_TRIES {
        if tries > 0 {
            std::thread::sleep(UNLOCK_PAUSE);
        }
        // SAFETY: all zeros is what the structure has to be.
        let mut args: CUcheckpointUnlockArgs = unsafe { std::mem::zeroed() };
        // SAFETY: `args` is a local variable.
        let result = unsafe { driver::cuCheckpointProcessUnlock(pid(), &raw mut args) };
        unlocked = told("cuCheckpointProcessUnlock", result);
        if unlocked.is_ok() {
            break;
        }
    }
    unlocked
}

/// A failed call with its error's name.
fn told(call: &str, result: CUresult) -> Result<(), String> {
    if result == SUCCESS {
        return Ok(());
    }
    let mut name: *const c_char = null();
    // SAFETY: `name` is a local variable.
    unsafe { driver::cuGetErrorName(result, &raw mut name) };
    if name.is_null() {
        return Err(format!("{call} failed with error {result}"));
    }
    // SAFETY: the driver's names are NUL-terminated and live as long as the driver.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    Err(format!("{call} failed with {name} ({result})"))
}
