//! Claiming a job, and the claim, which is released if the job never gets to run.

use crate::job::handover::Handover;
use crate::job::ownership::Ownership;
use crate::job::resume_point::{Decision, Resume, decide, rebuilt};
use crate::store::options::StoreOptions;
use crate::store::tiers;
use crate::sys::deadline::{STORE_RETRY_TIMEOUT, within};
use anyhow::Result;
use ckpt_snapshot::{JobDir, JobIdentity, JobRecord, OpenError, SnapshotId, Tiers};
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

/// A job whose record names this launcher. Dropped, the claim is released unless the job was running.
pub struct ClaimedJob {
    /// The job's record.
    pub ownership: Arc<Ownership>,
    /// The record beside uploaded snapshots, if there are uploads.
    pub handover: Option<Arc<Handover>>,
    /// The job's record before, of this machine or of another one.
    pub before: JobRecord,
    /// The claim.
    pub claim: Arc<Claim>,
}

impl ClaimedJob {
    /// Claims the job, also in the object store of its uploads if that answers, and decides where it starts: with which
    /// of the returned snapshots, oldest first; with none, from the beginning.
    ///
    /// # Errors
    /// As [`claim_and_decide`].
    pub fn claim(
        resume: &Resume,
        options: &StoreOptions,
        dir: &JobDir,
        store: &Tiers,
        identity: &JobIdentity,
    ) -> Result<(Self, Vec<SnapshotId>)> {
        let mut handover = Handover::of(options, dir)?;
        let local = dir.record()?;
        let newer = handover.as_mut().map(|handover| handover.newer_claim(local.as_ref())).transpose();
        if let Err(
            error @ (OpenError::Unauthentic { .. } | OpenError::Replayed { .. } | OpenError::NeedsKey(_)),
        ) = newer
        {
            return Err(error.into());
        }
        let newer = newer.inspect_err(|error| {
            tracing::warn!(
                "cannot find out whether the job has continued on another machine: {error}. It resumes from the snapshots of this machine; if there are none, it waits for the object store, for up to 5 minutes"
            );
        });
        // An object store that has not answered is not tried again at once.
        let is_reached = newer.is_ok();
        let newer = newer.ok().flatten().flatten();
        if local.is_some() && newer.is_some() {
            tracing::info!("job {}: it has continued on another machine since it ran here", dir.key());
        }
        let (ownership, candidates) = claim_and_decide(resume, dir, store, identity, newer.as_ref())?;
        let ownership = Arc::new(ownership);
        let launchers = [ownership.previous().launcher.clone(), ownership.record().launcher];
        let others = newer.as_ref().map(|newer| newer.launcher.clone());
        let before = newer.unwrap_or_else(|| ownership.previous().clone());
        if let Some(handover) = &mut handover {
            handover.begin(launchers.into_iter().chain(others).collect());
            if is_reached {
                handover.claim(&ownership.record());
            }
        }
        let handover = handover.map(Arc::new);
        let claim = Arc::new(Claim::new(&ownership, handover.as_ref()));
        Ok((Self { ownership, handover, before, claim }, candidates))
    }

    /// Publishes the record for other machines: which snapshots the job has left behind, for example. Waits for that no
    /// longer than until then.
    pub fn publish(&self, until: Instant) {
        if let Some(handover) = &self.handover {
            let (handover, ownership) = (Arc::clone(handover), Arc::clone(&self.ownership));
            let _ = within(until, move || handover.publish(&ownership));
        }
    }
}

impl Drop for ClaimedJob {
    fn drop(&mut self) {
        self.claim.release();
    }
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
