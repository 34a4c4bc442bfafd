//! Background threads: they run at a lower priority than the job, until the job has ended.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// The nice value of background threads.
const NICE: i32 = 10;

/// A background thread.
#[derive(Default)]
pub struct Background {
    /// The ID of the thread; 0 before it runs.
    tid: AtomicI32,
    is_hurried: AtomicBool,
}

/// The thread has the normal priority until this is dropped.
#[must_use]
pub struct Raised<'a>(&'a Background);

impl Background {
    /// Lowers the priority of the calling thread.
    pub fn enter(&self) {
        self.tid.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::SeqCst);
        self.lower();
    }

    /// Restores the normal priority. To be called while the thread runs, or before it has started.
    pub fn hurry(&self) {
        self.is_hurried.store(true, Ordering::SeqCst);
        self.set(0);
    }

    /// Undoes [`Self::hurry`].
    pub fn relax(&self) {
        self.is_hurried.store(false, Ordering::SeqCst);
        self.lower();
    }

    /// Restores the normal priority for a while: the job waits for the thread.
    pub fn raise(&self) -> Raised<'_> {
        self.set(0);
        Raised(self)
    }

    fn lower(&self) {
        self.set(NICE);
        // It may have been hurried in between.
        if self.is_hurried.load(Ordering::SeqCst) {
            self.set(0);
        }
    }

    fn set(&self, nice: i32) {
        if let Some(tid) = rustix::process::Pid::from_raw(self.tid.load(Ordering::SeqCst)) {
            // To raise it needs CAP_SYS_NICE or a limit; otherwise the priority stays low.
            let _ = rustix::process::setpriority_process(Some(tid), nice);
        }
    }
}

impl Drop for Raised<'_> {
    fn drop(&mut self) {
        self.0.lower();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> i32 {
        rustix::process::getpriority_process(None).unwrap()
    }

    /// Runs in a thread of its own, whose priority is lowered.
    fn in_background(check: impl FnOnce(&Background) + Send + 'static) {
        let work = move || {
            let background = Background::default();
            background.enter();
            check(&background);
        };
        std::thread::spawn(work).join().unwrap();
    }

    #[test]
    fn the_priority_is_raised_for_a_while_and_for_good() {
        in_background(|background| {
            assert_eq!(own(), NICE);
            let raised = background.raise();
            let is_allowed = own() == 0;
            drop(raised);
            assert_eq!(own(), NICE);
            let raised = background.raise();
            background.hurry();
            drop(raised);
            assert_eq!(own() == 0, is_allowed);
            background.relax();
            assert_eq!(own(), NICE);
        });
    }
}
