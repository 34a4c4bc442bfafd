//! The states of this process and the operations that lead from one to the next.
//!
//! ```text
//!            lock              checkpoint
//!  running ───────► locked ──────────────► checkpointed
//!     ▲  ▲            │ ▲                    │     │
//!     │  └────────────┘ └────────────────────┘     │ restore without its GPUs or enough memory
//!     │     unlock             restore             ▼
//!   cuInit                                       failed (for good)
//! ```
//!
//! A lock that times out leaves the process running, a checkpoint that is refused leaves it locked. Some checkpoints succeed of
//! which the restore fails ([`memory::detach`]). The names are
//! those of `CUprocessState` (CUDA driver API reference, "CUDA Checkpointing").

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cuda_abi::sys::{CUprocessState, CUresult};
use parking_lot::Mutex;
use simcuda_machine::config::Config;
use simcuda_machine::{DumpBlockers, device_file};

use super::lock::GATE;
use super::restored::{self, Restored};
use super::wire::{Operation, Pair};
use super::{control, nvml, pairs, tools};
use crate::error::Result;
use crate::memory::DeviceFiles;
use crate::{context, memory, process, stream};

/// The state of the process; the numbers are `CUprocessState`'s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum State {
    Running = CUprocessState::CU_PROCESS_STATE_RUNNING as u32,
    Locked = CUprocessState::CU_PROCESS_STATE_LOCKED as u32,
    Checkpointed = CUprocessState::CU_PROCESS_STATE_CHECKPOINTED as u32,
    Failed = CUprocessState::CU_PROCESS_STATE_FAILED as u32,
}

impl State {
    pub(super) fn from_code(code: u32) -> Option<Self> {
        [Self::Running, Self::Locked, Self::Checkpointed, Self::Failed]
            .into_iter()
            .find(|state| *state as u32 == code)
    }
}

/// What a process with driver state holds, released when dropped.
struct Hold {
    _devices: DeviceFiles,
    _capabilities: [File; 2],
    _blockers: DumpBlockers,
    _restored: Option<Restored>,
}

/// Held by one operation from beginning to end.
static OPERATION: Mutex<Option<Hold>> = Mutex::new(None);
/// Beside the lock, so that an operation that takes its time does not block queries.
static STATE: AtomicU32 = AtomicU32::new(State::Running as u32);

/// A checkpoint was refused for managed memory: later ones fail too, also without any (seen with 580.159.04).
static REFUSED_MANAGED: AtomicBool = AtomicBool::new(false);
/// What the next restore fails with.
static DOOM: Mutex<Option<CUresult>> = Mutex::new(None);

/// Polling interval of a waiting lock for the end of its caller.
const CALLER_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The process has driver state from now on: it opens the devices and gets dump blockers.
///
/// # Errors
/// As [`restored::check`], [`DeviceFiles::open`] and [`DumpBlockers::acquire`].
pub(super) fn take_hold(config: &Config) -> io::Result<()> {
    acquire(&mut OPERATION.lock(), config, false)
}

/// The process has no driver state after all.
pub(super) fn let_go() {
    release(&mut OPERATION.lock());
}

pub(super) fn current() -> State {
    State::from_code(STATE.load(Ordering::Acquire)).expect("only states are stored")
}

/// Carries out an operation on this process, on behalf of a caller of which `wanted` says whether it still waits.
///
/// # Errors
/// `CUDA_ERROR_ILLEGAL_STATE` if it does not suit the state, and the operation's own.
pub(super) fn carry_out(operation: &Operation, wanted: &dyn Fn() -> bool) -> Result {
    let hold = &mut *OPERATION.lock();
    match operation {
        Operation::Lock { timeout_ms } => lock_process(*timeout_ms, wanted),
        Operation::Checkpoint => checkpoint(hold),
        Operation::Restore { pairs } => restore(hold, pairs),
        Operation::Unlock => unlock(),
    }
}

fn lock_process(timeout_ms: u32, wanted: &dyn Fn() -> bool) -> Result {
    expect(State::Running)?;
    // "initialization error" (llm-d-rl-time-slicing issue 148).
    if !process::release()?.is_as_seen() && context::all().is_empty() {
        return Err(CUresult::CUDA_ERROR_NOT_INITIALIZED);
    }
    // Which error the driver has for these is not known; that it has one is (cuda-checkpoint issue 15; CRIU's plugin).
    if tools::cupti_is_attached() || process::machine()?.config.is_mps {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    let limit = (timeout_ms != 0).then(|| Instant::now() + Duration::from_millis(timeout_ms.into()));
    GATE.close();
    while !is_idle_by(limit) {
        if limit.is_some_and(|limit| Instant::now() >= limit) || !wanted() {
            GATE.open();
            return Err(CUresult::CUDA_ERROR_NOT_READY);
        }
    }
    advance(State::Locked);
    Ok(())
}

/// Waits a while until no call is inside and all submitted work is done, host functions included.
fn is_idle_by(limit: Option<Instant>) -> bool {
    let next_poll = Instant::now() + CALLER_POLL_INTERVAL;
    let until = limit.map_or(next_poll, |limit| limit.min(next_poll));
    GATE.wait_until_empty(until) && stream::drain(Some(until))
}

fn checkpoint(hold: &mut Option<Hold>) -> Result {
    expect(State::Locked)?;
    if memory::has_multicast() {
        // The real one never returns, whether memory is bound or not (nccl pull request 2340).
        loop {
            std::thread::park();
        }
    }
    // cuda-checkpoint issue 42: the lock succeeds on an instance of a GPU in MIG mode, and the checkpoint says this.
    if process::machine()?.config.is_mig {
        return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    }
    if memory::has_managed() {
        REFUSED_MANAGED.store(true, Ordering::Relaxed);
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    if REFUSED_MANAGED.load(Ordering::Relaxed) {
        return Err(CUresult::CUDA_ERROR_UNKNOWN);
    }
    *DOOM.lock() = memory::detach()?;
    release(hold);
    nvml::let_go();
    advance(State::Checkpointed);
    Ok(())
}

fn restore(hold: &mut Option<Hold>, map: &[Pair]) -> Result {
    if current() == State::Failed {
        // Also once there is enough memory (cuda-checkpoint issue 44).
        return Err(CUresult::CUDA_ERROR_OPERATING_SYSTEM);
    }
    expect(State::Checkpointed)?;
    let plan = pairs::plan(map)?;
    let config = &process::machine()?.config;
    let doom = DOOM.lock().map_or(Ok(()), Err);
    let attached = doom
        .and_then(|()| plan.carry_out())
        .and_then(|()| {
            acquire(hold, config, true).map_err(|error| {
                eprintln!("simcuda: {error}");
                CUresult::CUDA_ERROR_OPERATING_SYSTEM
            })
        })
        .and_then(|()| memory::attach())
        .and_then(|()| {
            context::all().iter().try_for_each(|context| memory::begin_turns(context.device.ordinal))
        });
    if let Err(error) = attached {
        // The real driver does not recover from this either: every call fails from now on, and the process holds
        // on to what it has of the device.
        context::lose_all(CUresult::CUDA_ERROR_OPERATING_SYSTEM);
        advance(State::Failed);
        GATE.fail();
        return Err(error);
    }
    nvml::take_hold();
    // The real driver makes them anew in each cycle (nvcf issue 437: 2.7 s for a process on one node).
    std::thread::sleep(config.context_time * u32::try_from(context::all().len()).unwrap_or(u32::MAX));
    advance(State::Locked);
    Ok(())
}

fn unlock() -> Result {
    expect(State::Locked)?;
    advance(State::Running);
    GATE.open();
    Ok(())
}

fn acquire(hold: &mut Option<Hold>, config: &Config, is_restored: bool) -> io::Result<()> {
    restored::check(&config.directory)?;
    *hold = Some(Hold {
        _devices: DeviceFiles::open()?,
        _capabilities: device_file::open_capabilities(&config.directory)?,
        _blockers: DumpBlockers::acquire()?,
        _restored: if is_restored { Restored::mark(config)? } else { None },
    });
    Ok(())
}

fn release(hold: &mut Option<Hold>) {
    *hold = None;
}

fn expect(state: State) -> Result {
    if current() == state { Ok(()) } else { Err(CUresult::CUDA_ERROR_ILLEGAL_STATE) }
}

/// Called with the operation's lock held.
fn advance(to: State) {
    let from = current();
    assert!(
        matches!(
            (from, to),
            (State::Running | State::Checkpointed, State::Locked)
                | (State::Locked, State::Running | State::Checkpointed)
                | (State::Checkpointed, State::Failed)
        ),
        "no way leads from {from:?} to {to:?}"
    );
    STATE.store(to as u32, Ordering::Release);
    control::publish(to);
}
