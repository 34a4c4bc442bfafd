//! Background threads: they run at a lower priority than the job, until the job has ended.

use std::sync::atomic::{AtomicI32, Ordering};

/// The nice value of background threads.
const NICE: i32 = 10;

/// A background thread.
#[derive(Default)]
pub struct Background {
    /// The ID of the thread; 0 before it runs.
    tid: AtomicI32,
}

impl Background {
    /// Lowers the priority of the calling thread.
    pub fn enter(&self) {
        let _ = rustix::process::setpriority_process(None, NICE);
        self.tid.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Relaxed);
    }

    /// Restores the normal priority. To be called while the thread runs, or before it has started.
    pub fn hurry(&self) {
        if let Some(tid) = rustix::process::Pid::from_raw(self.tid.load(Ordering::Relaxed)) {
            // Needs CAP_SYS_NICE or a limit; otherwise the priority stays low.
            let _ = rustix::process::setpriority_process(Some(tid), 0);
        }
    }
}
