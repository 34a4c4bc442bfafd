//! Snapshots are copied from the disk to the object store while the job runs.

use crate::job::handover::Handover;
use crate::job::ownership::{Ownership, OwnershipError};
use crate::job::status::SharedStatus;
use crate::persist::copier::{Copier, Wanted};
use crate::store::tiers::{self, DISK, REMOTE};
use anyhow::Result;
use ckpt_snapshot::{JobDir, Retention, SnapshotId, Tiers};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Uploads in the background. Dropped, it stops; what was not finished is not there.
pub struct Uploader {
    copier: Copier,
    every: u64,
    /// Snapshots that were taken.
    taken: AtomicU64,
}

struct Work {
    store: Arc<Tiers>,
    dir: JobDir,
    retention: Retention,
    status: Arc<SharedStatus>,
    ownership: Arc<Ownership>,
    handover: Option<Arc<Handover>>,
    /// What uploads have left that were killed, those of other machines too, was looked for.
    is_swept: AtomicBool,
}

impl Uploader {
    /// Uploads each `every`-th snapshot; in the object store `retention` holds too. `status` is told of
    /// everything; `handover` gets the job's record with each of them.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn start(
        store: &Arc<Tiers>,
        dir: &JobDir,
        retention: Retention,
        every: u64,
        status: Arc<SharedStatus>,
        ownership: Arc<Ownership>,
        handover: Option<Arc<Handover>>,
    ) -> Result<Self> {
        // From now on there are uploads, even if none has begun.
        status.uploads(|_| {});
        let is_swept = AtomicBool::new(false);
        let (store, dir) = (Arc::clone(store), dir.clone());
        let work = Work { store, dir, retention, status, ownership, handover, is_swept };
        let copier = Copier::start("upload", move |id, wanted| work.perform(id, wanted))?;
        Ok(Self { copier, every, taken: AtomicU64::new(0) })
    }

    /// A snapshot is safe on disk. The last one of a job that is ended is uploaded in any case.
    pub fn committed(&self, id: &SnapshotId, is_last: bool) {
        // The first one is uploaded: something is better than nothing.
        if is_last | self.taken.fetch_add(1, Ordering::Relaxed).is_multiple_of(self.every) {
            self.copier.want(id);
        }
    }

    /// The end is near: only uploads count from now on.
    pub fn hurry(&self) {
        self.copier.hurry();
    }

    /// Waits until nothing is left to upload, for `limit` at most; says whether that is so.
    #[must_use]
    pub fn is_idle_within(&self, limit: Duration) -> bool {
        self.copier.is_idle_within(limit)
    }
}

impl Work {
    fn perform(&self, id: &SnapshotId, wanted: &Wanted) {
        self.status.uploads(|uploads| uploads.uploading = Some(id.to_string()));
        let result = self.upload(id, wanted);
        self.status.uploads(|uploads| uploads.uploading = None);
        if let Err(error) = result
            && !wanted.not.load(Ordering::Relaxed)
        {
            self.status.uploads(|uploads| {
                uploads.failed += 1;
                uploads.last_failure = Some(error.to_string());
            });
            tracing::warn!("the snapshot {id} is safe on disk, but was not uploaded: {error}");
        }
    }

    fn upload(&self, id: &SnapshotId, wanted: &Wanted) -> Result<()> {
        let begun = Instant::now();
        let checked = self.handover.as_deref().map(Handover::check);
        // What is wrong with the object store, the upload finds out, which has more patience.
        if let Some(Err(OwnershipError::ClaimedElsewhere(claim))) = checked {
            return Err(claim.into());
        }
        let manifest = self.store.copy(id, DISK, REMOTE, &|_| {}, &wanted.not)?;
        tracing::info!(
            "snapshot {id} uploaded: {:.1} MB were new there, in {:.1} s",
            manifest.stored_bytes.unwrap_or(0) as f64 / 1e6,
            begun.elapsed().as_secs_f64()
        );
        self.status.uploads(|uploads| {
            uploads.uploaded += 1;
            uploads.stored_bytes += manifest.stored_bytes.unwrap_or(0);
            uploads.newest = Some(id.to_string());
            uploads.last_failure = None;
        });
        if let Some(handover) = &self.handover {
            handover.publish(&self.ownership);
        }
        if !wanted.bare.load(Ordering::Relaxed)
            && let Err(error) = self.tidy(id, &wanted.bare)
        {
            tracing::warn!("older snapshots stay in the object store: {error:#}");
        }
        if !wanted.bare.load(Ordering::Relaxed) && !self.is_swept.swap(true, Ordering::Relaxed) {
            match self.store.tier(REMOTE)?.store().sweep() {
                Ok(swept) => swept.iter().for_each(|one| {
                    tracing::info!(
                        "removed {one} from the object store, which an interrupted upload had left"
                    );
                }),
                Err(error) => tracing::warn!("what interrupted uploads have left stays: {error}"),
            }
        }
        Ok(())
    }

    /// Lets older ones go, now that `id` is there.
    fn tidy(&self, id: &SnapshotId, cancel: &AtomicBool) -> Result<()> {
        let history = tiers::history(&self.dir, self.status.last_progress_unix_ms())?;
        let mut prunable = self.store.prunable(&[REMOTE], &self.retention, &self.dir.marks()?, &history)?;
        // Another machine may have brought others with higher numbers.
        prunable.retain(|old| old != id);
        for old in &prunable {
            self.store.remove_from(old, REMOTE)?;
            tracing::debug!("removed the snapshot {old} from the object store");
        }
        if !prunable.is_empty() {
            self.store.tier(REMOTE)?.store().reclaim_until(cancel)?;
        }
        Ok(())
    }
}
