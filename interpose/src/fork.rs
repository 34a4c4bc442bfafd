//! `fork`, and what it may not copy.
//!
//! A descriptor that the agent has just got and not yet noted down would be copied into a child that knows
//! nothing of it. So the agent makes and notes down descriptors only while no `fork` is on its way, and a
//! `fork` waits for an agent that is at it (some microseconds). Forks do not wait for each other, and never
//! for long: the agent's part takes no lock, and past [`MOST_WAITS`] the fork goes ahead regardless.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::Duration;

/// How many forks are between their beginning and their end in the parent.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// Whether the agent holds descriptors that are not noted down.
static BUSY: AtomicBool = AtomicBool::new(false);

const FORK_WAIT: Duration = Duration::from_micros(50);
const MOST_WAITS: u32 = 2000;
const AGENT_WAIT: Duration = Duration::from_millis(1);

/// Runs `make` while no fork is on its way. For the agent's thread only; `make` must not wait for anything.
pub fn while_none<T>(make: impl FnOnce() -> T) -> T {
    struct Busy;
    impl Drop for Busy {
        fn drop(&mut self) {
            BUSY.store(false, SeqCst);
        }
    }
    loop {
        let busy = Busy;
        BUSY.store(true, SeqCst);
        if FORKS.load(SeqCst) == 0 {
            let made = make();
            drop(busy);
            return made;
        }
        drop(busy);
        std::thread::sleep(AGENT_WAIT);
    }
}

/// Has every later `fork` of this process looked after. Children made by `vfork`, `_Fork` or a bare system
/// call are not; those are for an `exec`, which closes the agent's descriptors.
pub fn install() -> bool {
    // SAFETY: the handlers are functions of this library, which stays mapped for the life of the process.
    unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) == 0 }
}

extern "C" fn before() {
    FORKS.fetch_add(1, SeqCst);
    for _ in 0..MOST_WAITS {
        if !BUSY.load(SeqCst) {
            break;
        }
        // Sleeping and not yielding: the agent may have a lower priority than this thread.
        std::thread::sleep(FORK_WAIT);
    }
}

extern "C" fn after_in_parent() {
    FORKS.fetch_sub(1, SeqCst);
}

extern "C" fn after_in_child() {
    FORKS.store(0, SeqCst);
    BUSY.store(false, SeqCst);
    // A panic may not leave a function that C calls.
    let _ = std::panic::catch_unwind(crate::agent::restart_in_child);
}
