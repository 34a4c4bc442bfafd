//! Claiming a job, and the claim, which is released if the job never gets to run.

use crate::job::handover::Handover;
use crate::job::ownership::Ownership;
use crate::job::resume_point::{Decision, Resume, decide, rebuilt};
use crate::store::tiers;
use crate::sys::deadline::{STORE_RETRY_TIMEOUT, within};
use anyhow::Result;
use ckpt_snapshot::{JobDir, JobIdentity, JobRecord, SnapshotId, Tiers};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Claims the job and decides where it starts: with which of the returned snapshots, oldest first; with none, from the
/// beginning. `newer` is the record of another machine that has claimed the job since it ran here.
///
/// # Errors
/// Bad input: nothing to resume, or no such snapshot. Nothing was changed then. Or the record cannot be written.
pub fn claim_and_decide(
    resume: &Resume,
    dir: &JobDir,
    store: &Tiers,
    identity: &JobIdentity,
    newer: Option<&JobRecord>,
) -> Result<(Ownership, Vec<SnapshotId>)> {
    decide(resume, dir, store, identity, newer.cloned())?;
    // From now on, a launcher that ran the job until now reserves no number and deletes nothing. So what is listed now
    // counts.
    let ownership = Ownership::claim(dir, || anyhow::Ok(rebuilt(&tiers::list_local(store)?)))?;
    let begin = || -> Result<Vec<SnapshotId>> {
        for swept in tiers::sweep_local(store)? {
            tracing::info!("removed the leftovers of an interrupted save of snapshot {swept}");
        }
        let Decision { record, candidates } = decide(resume, dir, store, identity, newer.cloned())?;
        ownership.change(|present| {
            let launcher = std::mem::take(&mut present.launcher);
            *present = JobRecord { launcher, ..record };
        })?;
        Ok(candidates)
    };
    let candidates = begin().inspect_err(|_| ownership.release())?;
    Ok((ownership, candidates))
}

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
