//! Keeps `fork` from copying descriptors that the child would not know of.
//!
//! A descriptor that a thread has just opened and not yet recorded would leak into a forked child. So the agent opens
//! and records descriptors only while no `fork` is in progress, and a `fork` waits for an agent that does so (some
//! microseconds). The same holds for the descriptors of shared device memory, in any thread. Forks do not wait for
//! each other, nor for what their own thread does, and never for long: after [`MAX_WAITS`] the fork proceeds. Only for an
//! agent that initialises the driver, once, they wait for longer ([`LONGEST_WAITS`]).
//!
//! What a forked child runs is registered by the agent ([`install`]).

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

/// The number of forks in progress.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// The number of threads that hold descriptors that are not recorded yet.
static BUSY: AtomicU32 = AtomicU32::new(0);
/// The number of those that take long.
static SLOW: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// Whether this thread is one of them: the driver starts a program while it is initialised (nvidia-modprobe).
    static IS_BUSY: Cell<bool> = const { Cell::new(false) };
}

/// What a forked child runs before its `fork` returns.
static IN_CHILD: OnceLock<fn()> = OnceLock::new();

const FORK_WAIT: Duration = Duration::from_micros(50);
const MAX_WAITS: u32 = 2000;
const LONGEST_WAITS: u32 = 200_000;
const BUSY_WAIT: Duration = Duration::from_millis(1);

/// Runs `make` while no fork is in progress. `make` must not wait for the program.
pub fn while_none<T>(make: impl FnOnce() -> T) -> T {
    struct Busy {
        was_busy: bool,
    }
    impl Drop for Busy {
        fn drop(&mut self) {
            IS_BUSY.set(self.was_busy);
            BUSY.fetch_sub(1, SeqCst);
        }
    }
    loop {
        BUSY.fetch_add(1, SeqCst);
        let busy = Busy { was_busy: IS_BUSY.replace(true) };
        // A fork that waits for this thread already would wait for what it does inside, too.
        if FORKS.load(SeqCst) == 0 || busy.was_busy {
            let made = make();
            drop(busy);
            return made;
        }
        drop(busy);
        std::thread::sleep(BUSY_WAIT);
    }
}

/// The same for something that takes up to seconds.
pub fn while_none_for_long<T>(make: impl FnOnce() -> T) -> T {
    struct Slow;
    impl Drop for Slow {
        fn drop(&mut self) {
            SLOW.fetch_sub(1, SeqCst);
        }
    }
    SLOW.fetch_add(1, SeqCst);
    let _slow = Slow;
    while_none(make)
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
    for waits in 0..LONGEST_WAITS {
        let is_over = waits >= MAX_WAITS && SLOW.load(SeqCst) == 0;
        if is_over || BUSY.load(SeqCst) == 0 || IS_BUSY.get() {
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
    SLOW.store(0, SeqCst);
    IS_BUSY.set(false);
    // A panic may not leave a function that C calls.
    if let Some(in_child) = IN_CHILD.get() {
        let _ = std::panic::catch_unwind(in_child);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    use super::*;

    /// One after the other: what they look at is of the process.
    #[test]
    fn a_fork_waits_for_another_thread_and_not_for_its_own() {
        static IS_STARTED: AtomicBool = AtomicBool::new(false);
        static IS_OVER: AtomicBool = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while_none_for_long(|| {
                    IS_STARTED.store(true, SeqCst);
                    std::thread::sleep(Duration::from_millis(500));
                    // The fork waits already.
                    while_none(|| IS_OVER.store(true, SeqCst));
                });
            });
            while !IS_STARTED.load(SeqCst) {
                std::thread::yield_now();
            }
            before();
            assert!(IS_OVER.load(SeqCst), "the fork did not wait");
            after_in_parent();
        });

        let begun = Instant::now();
        while_none_for_long(|| {
            before();
            after_in_parent();
        });
        assert!(begun.elapsed() < FORK_WAIT * LONGEST_WAITS / 2, "the fork waited for its own thread");
        assert!(
            !IS_BUSY.get() && SLOW.load(SeqCst) == 0 && BUSY.load(SeqCst) == 0 && FORKS.load(SeqCst) == 0
        );
    }
}
