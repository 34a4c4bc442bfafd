//! Threads that take second place to the job, until there is no job to be spared any more.

use std::sync::atomic::{AtomicI32, Ordering};

/// How much less than the job such a thread gets (nice).
const NICE: i32 = 10;

/// One such thread.
#[derive(Default)]
pub struct Background {
    /// The thread's number; 0 until it runs.
    tid: AtomicI32,
}

impl Background {
    /// The calling thread takes second place from now on.
    pub fn enter(&self) {
        let _ = rustix::process::setpriority_process(None, NICE);
        self.tid.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Relaxed);
    }

    /// It takes second place no more. To be called while it runs, if it ever did.
    pub fn hurry(&self) {
        if let Some(tid) = rustix::process::Pid::from_raw(self.tid.load(Ordering::Relaxed)) {
            // The kernel does not let everybody do this; it goes on as slowly as before then.
            let _ = rustix::process::setpriority_process(Some(tid), 0);
        }
    }
}
