//! The driver's checkpoint API: lock, checkpoint, restore, unlock, by the process itself or another one.
//!
//! `api` holds the handlers, [`lock`] the gate that every other call passes, `state` the states of this process
//! and its way from one to the next, [`simcuda_machine::DumpBlockers`] makes CRIU refuse the process while it holds driver state. Another
//! process finds a process of ours and asks it for an operation by `remote`; `control` answers it, and `wire`
//! is the format that both use.

mod api;
mod control;
mod fork;
pub(crate) mod lock;
mod nvml;
mod pairs;
mod remote;
mod restored;
mod state;
mod tools;
mod wire;

use cuda_abi::sys::CUresult;
use simcuda_machine::Gpu;
use simcuda_machine::config::Config;

use crate::error::Result;

pub(crate) use tools::inject;

pub(crate) use api::{
    cuCheckpointOperationComplete, cuCheckpointProcessCheckpoint, cuCheckpointProcessGetRestoreThreadId,
    cuCheckpointProcessGetState, cuCheckpointProcessLock, cuCheckpointProcessRestore,
    cuCheckpointProcessUnlock,
};

/// Starts the thread that answers other processes, and takes hold of the driver's state on a machine with these GPUs; part
/// of cuInit.
///
/// # Errors
/// `CUDA_ERROR_OPERATING_SYSTEM` if the kernel refuses a descriptor, a mapping or a thread; the reason is printed to
/// standard error.
pub(crate) fn start(config: &Config, gpus: Vec<Gpu>) -> Result {
    pairs::record(gpus);
    let started = state::take_hold(config).and_then(|()| control::start());
    started.map_err(|error| {
        eprintln!("simcuda: {error}");
        state::let_go();
        CUresult::CUDA_ERROR_OPERATING_SYSTEM
    })?;
    fork::watch();
    Ok(())
}
