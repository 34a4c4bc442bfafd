//! GPU activity of the program, for the hang detection: whether it submits work, and whether it waits. A process that
//! spins until its GPU is done uses as much CPU as one that works.
//!
//! Submitting work costs nothing extra: the slots of the gate count calls anyway, and a "not ready" answer is
//! recorded where unsuccessful results are inspected. Reading the activity visits each slot.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::gate::{self, Tally};

/// Whether the driver has answered the program "not ready" since the last reading.
static WAS_NOT_READY: AtomicBool = AtomicBool::new(false);

/// The driver has answered cuStreamQuery or cuEventQuery that what was submitted is not done yet.
pub(super) fn not_ready() {
    WAS_NOT_READY.store(true, Relaxed);
}

/// What the program does with the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// A number that changes with each call that submits work, changes the device's state or waits for the GPU.
    pub calls: u64,
    /// Whether a thread is in a call that waits for the GPU, or got the answer "not ready" since the last reading.
    pub is_waiting: bool,
}

/// Reads the activity since the last reading.
pub fn read() -> Activity {
    let was_not_ready = WAS_NOT_READY.swap(false, Relaxed);
    let Tally { begun, is_waiting } = gate::tally();
    Activity { calls: begun, is_waiting: is_waiting || was_not_ready }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_in_vain_waits() {
        read();
        not_ready();
        assert!(read().is_waiting);
    }
}
