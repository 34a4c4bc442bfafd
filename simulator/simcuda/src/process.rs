//! What is true of the whole process: initialised, forked, which machine.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use cuda_abi::sys::CUresult;

use crate::device::Device;
use simcuda_machine::config::Config;

use crate::error::Result;
use crate::memory;

/// The simulated machine as this process sees it.
pub(crate) struct Machine {
    pub(crate) config: Config,
    pub(crate) devices: Vec<Device>,
}

static MACHINE: OnceLock<std::result::Result<Machine, CUresult>> = OnceLock::new();
static FORKED: AtomicBool = AtomicBool::new(false);

/// The machine, once cuInit has succeeded.
///
/// # Errors
/// `CUDA_ERROR_NOT_INITIALIZED` before that, and for good in the child of a fork: the driver's threads and
/// its device are not there (CUDA programming guide, "Initialization"). `CUDA_ERROR_OPERATING_SYSTEM` once a
/// restore of the process has failed.
pub(crate) fn machine() -> Result<&'static Machine> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(CUresult::CUDA_ERROR_NOT_INITIALIZED);
    }
    crate::checkpoint::lock::check()?;
    match MACHINE.get() {
        Some(Ok(machine)) => Ok(machine),
        Some(Err(error)) => Err(*error),
        None => Err(CUresult::CUDA_ERROR_NOT_INITIALIZED),
    }
}

/// A device of the machine.
///
/// # Errors
/// `CUDA_ERROR_INVALID_DEVICE` for an ordinal that does not exist.
pub(crate) fn device(ordinal: i32) -> Result<&'static Device> {
    let devices = &machine()?.devices;
    usize::try_from(ordinal)
        .ok()
        .and_then(|index| devices.get(index))
        .ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
}

/// cuInit.
pub(crate) unsafe fn cuInit(flags: u32) -> Result {
    if flags != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if FORKED.load(Ordering::Relaxed) {
        return Err(CUresult::CUDA_ERROR_NOT_INITIALIZED);
    }
    MACHINE.get_or_init(start).as_ref().map(|_| ()).map_err(|error| *error)
}

fn start() -> Result<Machine> {
    let config = Config::from_environment().map_err(|message| {
        eprintln!("simcuda: {message}");
        CUresult::CUDA_ERROR_INVALID_VALUE
    })?;
    if config.devices == 0 {
        return Err(CUresult::CUDA_ERROR_NO_DEVICE);
    }
    memory::start(&config)?;
    let devices = (0..config.devices).map(|ordinal| Device::new(ordinal, &config)).collect();
    // SAFETY: the handler only stores to an atomic, which is allowed in the child of a fork.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
    crate::checkpoint::start(&config)?;
    Ok(Machine { config, devices })
}

extern "C" fn after_fork_in_child() {
    FORKED.store(true, Ordering::Relaxed);
}
