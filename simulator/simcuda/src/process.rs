//! What is true of the whole process: initialised, forked, which machine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Once, OnceLock};

use cuda_abi::sys::CUresult;

use crate::device::Device;
use simcuda_machine::config::Config;
use simcuda_machine::{Gpu, Release};

use crate::error::Result;
use crate::memory;

/// The simulated machine as this process sees it.
pub(crate) struct Machine {
    pub(crate) config: Config,
    pub(crate) devices: Vec<Device>,
}

impl Machine {
    /// Whether the devices are joined by a switch that multicasts.
    pub(crate) fn has_multicast(&self) -> bool {
        self.devices.iter().any(|device| device.has_multicast)
    }
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

/// The driver's release, which programs ask for before cuInit.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if `SIMCUDA_DRIVER` is none; cuInit prints the reason to standard error.
pub(crate) fn release() -> Result<&'static Release> {
    static RELEASE: LazyLock<std::result::Result<&'static Release, String>> =
        LazyLock::new(Release::from_environment);
    RELEASE.as_ref().copied().map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)
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
    static INJECTED: Once = Once::new();
    let started = MACHINE.get_or_init(start).as_ref().map(|_| ()).map_err(|error| *error);
    if started.is_ok() {
        INJECTED.call_once(crate::checkpoint::inject);
    }
    started
}

fn start() -> Result<Machine> {
    let config = Release::from_environment().and_then(|_| Config::from_environment()).map_err(|message| {
        eprintln!("simcuda: {message}");
        CUresult::CUDA_ERROR_INVALID_VALUE
    })?;
    let gpus = gpus_of(&config)?;
    let listed = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let visible = simcuda_machine::visible(&gpus, listed.as_deref());
    if visible.is_empty() {
        return Err(CUresult::CUDA_ERROR_NO_DEVICE);
    }
    let visible = || visible.iter().map(|position| &gpus[*position]);
    memory::use_gpus(&config, visible())?;
    let has_multicast = gpus.len() > 1;
    let devices =
        visible().enumerate().map(|(ordinal, gpu)| Device::new(ordinal, gpu, has_multicast)).collect();
    // SAFETY: the handler only stores to an atomic, which is allowed in the child of a fork.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
    crate::checkpoint::start(&config, gpus)?;
    Ok(Machine { config, devices })
}

/// The machine's GPUs, as they are now.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if they are not described well; the reason is printed to standard error.
pub(crate) fn gpus_of(config: &Config) -> Result<Vec<Gpu>> {
    config.gpus().map_err(|message| {
        eprintln!("simcuda: {message}");
        CUresult::CUDA_ERROR_INVALID_VALUE
    })
}

extern "C" fn after_fork_in_child() {
    FORKED.store(true, Ordering::Relaxed);
}
