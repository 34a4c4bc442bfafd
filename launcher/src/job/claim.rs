//! A start of the job that may fail after it has claimed the job.

use crate::job::handover::Handover;
use crate::job::ownership::Ownership;
use crate::sys::deadline::{STORE_RETRY_TIMEOUT, within};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A start of the job that may come to nothing. Then the job is whose it was before, who may be at work.
pub struct Start {
    ownership: Arc<Ownership>,
    handover: Option<Arc<Handover>>,
    is_open: AtomicBool,
}

impl Start {
    /// It has claimed the job.
    #[must_use]
    pub fn new(ownership: &Arc<Ownership>, handover: Option<&Arc<Handover>>) -> Self {
        let (ownership, handover) = (Arc::clone(ownership), handover.map(Arc::clone));
        Self { ownership, handover, is_open: AtomicBool::new(true) }
    }

    /// The job runs.
    pub fn has_succeeded(&self) {
        self.is_open.store(false, Ordering::SeqCst);
    }

    /// Gives the job back unless it runs, or has been given back. Waits for the store, but not for long.
    pub fn give_back(&self) {
        if !self.is_open.swap(false, Ordering::SeqCst) {
            return;
        }
        let (ownership, handover) = (Arc::clone(&self.ownership), self.handover.clone());
        let work = move || {
            if let Some(handover) = handover {
                handover.give_back(&ownership.record().launcher);
            }
            ownership.give_back();
        };
        let _ = within(Instant::now() + STORE_RETRY_TIMEOUT, work);
    }
}
