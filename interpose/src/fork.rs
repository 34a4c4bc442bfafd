//! Keeps `fork` from copying descriptors that the child would not know of.
//!
//! A descriptor that a thread has just opened and not yet recorded would leak into a forked child. So the agent opens
//! and records descriptors only while no `fork` is in progress, and a `fork` waits for an agent that does so (some
//! microseconds). The same holds for the descriptors of shared device memory, in any thread. Forks do not wait for
//! each other, and never for long: after [`MAX_WAITS`] the fork proceeds.
//!
//! What a forked child runs is registered by the agent ([`install`]).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

/// The number of forks in progress.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// The number of threads that hold descriptors that are not recorded yet.
static BUSY: AtomicU32 = AtomicU32::new(0);

/// What a forked child runs before its `fork` returns.
static IN_CHILD: OnceLock<fn()> = OnceLock::new();

const FORK_WAIT: Duration = Duration::from_micros(50);
const MAX_WAITS: u32 = 2000;
const BUSY_WAIT: Duration = Duration::from_millis(1);

/// Runs `make` while no fork is in progress. `make` must not wait for long.
pub fn while_none<T>(make: impl FnOnce() -> T) -> T {
    struct Busy;
    impl Drop for Busy {
        fn drop(&mut self) {
            BUSY.fetch_sub(1, SeqCst);
        }
    }
    loop {
        BUSY.fetch_add(1, SeqCst);
        let busy = Busy;
        if FORKS.load(SeqCst) == 0 {
            let made = make();
            drop(busy);
            return made;
        }
        drop(busy);
        std::thread::sleep(BUSY_WAIT);
    }
}

/// Handles every later `fork` of this process and runs `in_child` in each child. Children made by `vfork`, `_Fork` or
/// a bare system call are not handled: those are for an `exec`, which closes the agent's descriptors.
pub fn install(in_child: fn()) -> bool {
    if IN_CHILD.set(in_child).is_err() {
        return false;
    }
    // SAFETY: the handlers are functions of this library, which stays mapped for the life of the process.
    unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) == 0 }
}

extern "C" fn before() {
    FORKS.fetch_add(1, SeqCst);
    for _ in 0..MAX_WAITS {
        if BUSY.load(SeqCst) == 0 {
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
    BUSY.store(0, SeqCst);
    // A panic may not leave a function that C calls.
    if let Some(in_child) = IN_CHILD.get() {
        let _ = std::panic::catch_unwind(in_child);
    }
}
