//! A claim of the job that is released if the job never gets to run.

use crate::job::handover::Handover;
use crate::job::ownership::Ownership;
use crate::sys::deadline::{STORE_RETRY_TIMEOUT, within};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A claim of the job. A start that fails releases the claim: the job belongs to its previous launcher again, which may
/// still be running it.
pub struct Claim {
    ownership: Arc<Ownership>,
    handover: Option<Arc<Handover>>,
    is_provisional: AtomicBool,
}

impl Claim {
    /// A provisional claim: the record already names this launcher.
    #[must_use]
    pub fn new(ownership: &Arc<Ownership>, handover: Option<&Arc<Handover>>) -> Self {
        let (ownership, handover) = (Arc::clone(ownership), handover.map(Arc::clone));
        Self { ownership, handover, is_provisional: AtomicBool::new(true) }
    }

    /// Makes the claim permanent: the job is running.
    pub fn confirm(&self) {
        self.is_provisional.store(false, Ordering::SeqCst);
    }

    /// Releases the claim, unless it was confirmed or released before. Waits for the store at most
    /// [`STORE_RETRY_TIMEOUT`].
    pub fn release(&self) {
        if !self.is_provisional.swap(false, Ordering::SeqCst) {
            return;
        }
        let (ownership, handover) = (Arc::clone(&self.ownership), self.handover.clone());
        let work = move || {
            if let Some(handover) = handover {
                handover.release(&ownership.record().launcher);
            }
            ownership.release();
        };
        let _ = within(Instant::now() + STORE_RETRY_TIMEOUT, work);
    }
}
