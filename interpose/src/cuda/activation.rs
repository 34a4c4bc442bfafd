//! Whether the library stands in front of the driver, and whether the program has initialised the driver.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Whether there is a launcher to work for.
static IS_ACTIVE: AtomicBool = AtomicBool::new(false);
/// Whether the program has initialised the driver.
static IS_STARTED: AtomicBool = AtomicBool::new(false);

/// There is a launcher to work for.
pub(crate) fn activate() {
    IS_ACTIVE.store(true, Relaxed);
}

/// Whether there is a launcher to work for.
pub(crate) fn is_active() -> bool {
    IS_ACTIVE.load(Relaxed)
}

/// The program has initialised the driver.
pub(crate) fn driver_started() {
    IS_STARTED.store(is_active(), Relaxed);
}

/// In the child of a fork. A driver that the parent had initialised does not work in the child, so there is
/// nothing to save in it.
pub(crate) fn after_fork_in_child() {
    IS_STARTED.store(false, Relaxed);
}

/// Whether the program uses the driver and a launcher may want to save it. Otherwise calls are only passed on.
pub(crate) fn is_started() -> bool {
    IS_STARTED.load(Relaxed)
}
