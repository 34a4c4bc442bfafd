//! The rank's side, in a process of the job.

mod attempt;
mod clock;
mod counts;
mod thread;

pub(crate) use attempt::Attempt;
pub use clock::{Clock, Entry, InCall};
pub use counts::Counts;
pub use thread::Thread;

/// What `clock` synchronises with. The model of loom compiles the same file with loom's.
mod sync {
    pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
    pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
}

#[cfg(test)]
mod model;
