//! Whether the library stands in front of the driver, and whether the program has initialised the driver.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

/// Whether there is a launcher to work for.
static IS_ACTIVE: AtomicBool = AtomicBool::new(false);
/// Whether the program has initialised the driver.
static IS_STARTED: AtomicBool = AtomicBool::new(false);
/// How many threads are initialising it.
static STARTING: AtomicU32 = AtomicU32::new(0);

/// Whether only a checkpoint has initialised the driver, and not the program.
static IS_STARTED_FOR_NVML: AtomicBool = AtomicBool::new(false);

/// There is a launcher to work for.
pub(crate) fn activate() {
    IS_ACTIVE.store(true, Relaxed);
}

/// Whether there is a launcher to work for.
pub(crate) fn is_active() -> bool {
    IS_ACTIVE.load(Relaxed)
}

/// Initialises the driver. A child that is forked meanwhile may have its device files.
pub(crate) fn while_starting<T>(start: impl FnOnce() -> T) -> T {
    STARTING.fetch_add(1, Relaxed);
    let started = start();
    STARTING.fetch_sub(1, Relaxed);
    started
}

/// Whether the driver may have device files open.
pub(crate) fn may_have_files() -> bool {
    is_started() || is_active() && STARTING.load(Relaxed) > 0
}

/// The program has initialised the driver.
pub(crate) fn driver_started() {
    IS_STARTED.store(is_active(), Relaxed);
    IS_STARTED_FOR_NVML.store(false, Relaxed);
}

/// A checkpoint has initialised the driver in a program that uses NVML.
pub(crate) fn driver_started_for_nvml() {
    driver_started();
    IS_STARTED_FOR_NVML.store(true, Relaxed);
}

/// What that means for the program, for a log.
pub(crate) fn remark() -> Option<String> {
    IS_STARTED_FOR_NVML.load(Relaxed).then(|| {
        "it uses NVML, and ckpt-run has initialised the CUDA driver to save it: CUDA does not work in processes that it forks from now on, unless they execute another program"
            .to_owned()
    })
}

/// In the child of a fork. A driver that the parent had initialised does not work in the child, so there is
/// nothing to save in it.
pub(crate) fn after_fork_in_child() {
    IS_STARTED.store(false, Relaxed);
    IS_STARTED_FOR_NVML.store(false, Relaxed);
    STARTING.store(0, Relaxed);
}

/// Whether the program uses the driver and a launcher may want to save it. Otherwise calls are only passed on.
pub(crate) fn is_started() -> bool {
    IS_STARTED.load(Relaxed)
}
