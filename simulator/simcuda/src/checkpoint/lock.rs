//! The lock of the checkpoint API: calls wait outside while it is held.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use cuda_abi::sys::CUresult;
use parking_lot::{Condvar, Mutex};

use crate::error::Result;

/// The gate is closed: new callers wait.
const CLOSED: u32 = 1 << 31;
/// A restore has failed: all callers are refused, permanently.
const FAILED: u32 = 1 << 30;

/// What every call passes on its way in and out. Passing an open gate takes one atomic addition each way.
pub(super) struct Gate {
    /// The two flags, and below them how many calls are inside.
    inside: AtomicU32,
    /// Held by the thread that closes or opens the gate, and while deciding to sleep in front of it or behind it.
    doorkeeper: Mutex<()>,
    let_in: Condvar,
    one_left: Condvar,
}

/// The gate of this process.
pub(super) static GATE: Gate = Gate::new();

/// Proof that a call is inside; the lock waits until all have left.
pub(crate) struct Passage {
    gate: &'static Gate,
}

impl Drop for Passage {
    fn drop(&mut self) {
        self.gate.leave();
    }
}

/// Waits while the process is locked, then counts the calling thread as inside.
///
/// # Errors
/// `CUDA_ERROR_OPERATING_SYSTEM` for good once a restore of the process has failed.
pub(crate) fn pass() -> Result<Passage> {
    GATE.pass()
}

/// Refuses what does not pass the gate either, once a restore of the process has failed.
///
/// # Errors
/// `CUDA_ERROR_OPERATING_SYSTEM`, for good.
pub(crate) fn check() -> Result {
    if GATE.inside.load(Ordering::Acquire) & FAILED == 0 {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_OPERATING_SYSTEM)
    }
}

impl Gate {
    const fn new() -> Self {
        Self {
            inside: AtomicU32::new(0),
            doorkeeper: Mutex::new(()),
            let_in: Condvar::new(),
            one_left: Condvar::new(),
        }
    }

    fn pass(&'static self) -> Result<Passage> {
        if self.inside.fetch_add(1, Ordering::Acquire) & (CLOSED | FAILED) != 0 {
            self.leave();
            self.wait_outside()?;
        }
        Ok(Passage { gate: self })
    }

    /// Waits until the gate opens, and goes in.
    #[cold]
    fn wait_outside(&self) -> Result {
        let mut doorkeeper = self.doorkeeper.lock();
        loop {
            let inside = self.inside.load(Ordering::Acquire);
            if inside & FAILED != 0 {
                return Err(CUresult::CUDA_ERROR_OPERATING_SYSTEM);
            }
            if inside & CLOSED == 0 {
                // No thread can close it before the doorkeeper's lock is released.
                self.inside.fetch_add(1, Ordering::Acquire);
                return Ok(());
            }
            self.let_in.wait(&mut doorkeeper);
        }
    }

    fn leave(&self) {
        if self.inside.fetch_sub(1, Ordering::Release) & CLOSED != 0 {
            // Once this thread has the lock, a counting thread has either seen this or sleeps already.
            drop(self.doorkeeper.lock());
            self.one_left.notify_all();
        }
    }

    /// Calls that come from now on wait.
    pub(super) fn close(&self) {
        let _doorkeeper = self.doorkeeper.lock();
        self.inside.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Waits behind the closed gate until the last call has left; whether it has before the deadline.
    pub(super) fn wait_until_empty(&self, deadline: Instant) -> bool {
        let mut doorkeeper = self.doorkeeper.lock();
        while !self.is_empty() {
            if self.one_left.wait_until(&mut doorkeeper, deadline).timed_out() {
                return self.is_empty();
            }
        }
        true
    }

    fn is_empty(&self) -> bool {
        self.inside.load(Ordering::Acquire) & !(CLOSED | FAILED) == 0
    }

    /// Lets waiting callers in.
    pub(super) fn open(&self) {
        let _doorkeeper = self.doorkeeper.lock();
        self.inside.fetch_and(!CLOSED, Ordering::AcqRel);
        self.let_in.notify_all();
    }

    /// Refuses waiting and future callers.
    pub(super) fn fail(&self) {
        let _doorkeeper = self.doorkeeper.lock();
        self.inside.fetch_or(FAILED, Ordering::AcqRel);
        self.let_in.notify_all();
    }

    /// In the child of a fork: the lock and the calls inside are those of the parent. Only a store, as a child may.
    pub(super) fn forget_in_child(&self) {
        self.inside.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    fn late() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn the_last_call_inside_is_waited_for() {
        static GATE: Gate = Gate::new();
        let first = GATE.pass().unwrap();
        let second = GATE.pass().unwrap();
        GATE.close();
        assert!(!GATE.wait_until_empty(soon()));
        drop(first);
        assert!(!GATE.wait_until_empty(soon()));
        std::thread::scope(|scope| {
            scope.spawn(move || drop(second));
            assert!(GATE.wait_until_empty(late()));
        });
    }

    #[test]
    fn nobody_goes_in_while_it_is_closed() {
        static GATE: Gate = Gate::new();
        static OPENED: AtomicBool = AtomicBool::new(false);
        GATE.close();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let _inside = GATE.pass().unwrap();
                    assert!(OPENED.load(Ordering::Acquire), "went in through a closed gate");
                });
            }
            assert!(GATE.wait_until_empty(late()));
            OPENED.store(true, Ordering::Release);
            GATE.open();
        });
        assert!(GATE.is_empty());
    }

    #[test]
    fn who_waits_is_sent_away_when_it_fails() {
        static GATE: Gate = Gate::new();
        GATE.close();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| GATE.pass().err());
            GATE.fail();
            assert_eq!(waiting.join().unwrap(), Some(CUresult::CUDA_ERROR_OPERATING_SYSTEM));
        });
        GATE.open();
        assert!(GATE.pass().is_err(), "for good");
        assert!(GATE.is_empty());
    }

    #[test]
    fn closing_and_passing_at_once() {
        static GATE: Gate = Gate::new();
        static CLOSED_NOW: AtomicBool = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let inside = GATE.pass().unwrap();
                        assert!(!CLOSED_NOW.load(Ordering::SeqCst), "inside while all should have left");
                        drop(inside);
                    }
                });
            }
            for _ in 0..200 {
                GATE.close();
                assert!(GATE.wait_until_empty(late()));
                CLOSED_NOW.store(true, Ordering::SeqCst);
                std::hint::spin_loop();
                CLOSED_NOW.store(false, Ordering::SeqCst);
                GATE.open();
            }
        });
    }
}
