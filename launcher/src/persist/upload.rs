//! Uploads: copies of snapshots from the disk to the object store while the job runs.

use crate::job::handover::Handover;
use crate::job::ownership::OwnershipError;
use crate::persist::copier::{Copier, CopyControl, CopyParts};
use crate::store::marks;
use crate::store::tiers::{self, DISK, REMOTE};
use anyhow::Result;
use ckpt_snapshot::{SnapshotId, faults};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Uploads in the background until it is dropped. An unfinished upload is not committed.
pub struct Uploader {
    copier: Copier,
    every: u64,
    /// Number of snapshots taken.
    taken: AtomicU64,
}

struct Work {
    parts: CopyParts,
    handover: Option<Arc<Handover>>,
    /// Leftovers of interrupted uploads, of other machines too, were removed.
    is_swept: AtomicBool,
}

impl Uploader {
    /// Uploads every `every`th snapshot. `handover` publishes the job's record after each upload.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(parts: CopyParts, every: u64, handover: Option<Arc<Handover>>) -> Result<Self> {
        // From now on the status has uploads, even before the first one.
        parts.status.uploads(|_| {});
        let work = Work { parts, handover, is_swept: AtomicBool::new(false) };
        let copier = Copier::start("upload", move |id, control| work.perform(id, control))?;
        Ok(Self { copier, every, taken: AtomicU64::new(0) })
    }

    /// A snapshot is durable on disk. The last snapshot of a job that is being ended is always uploaded.
    pub fn committed(&self, id: &SnapshotId, is_last: bool) {
        // The first snapshot is always uploaded.
        if is_last | self.taken.fetch_add(1, Ordering::Relaxed).is_multiple_of(self.every) {
            self.copier.request(id);
        }
    }

    /// ckpt-run is ending: uploads get normal priority, and pruning is skipped.
    pub fn hurry(&self) {
        self.copier.hurry();
    }

    /// ckpt-run goes on after all: undoes [`Self::hurry`].
    pub fn relax(&self) {
        self.copier.relax();
    }

    /// Waits until nothing is left to upload, for `limit` at most. Returns whether that was reached.
    #[must_use]
    pub fn is_idle_within(&self, limit: Duration) -> bool {
        self.copier.is_idle_within(limit)
    }
}

impl Work {
    fn perform(&self, id: &SnapshotId, control: &CopyControl) {
        let status = &self.parts.status;
        status.uploads(|uploads| uploads.uploading = Some(id.to_string()));
        let result = self.upload(id, control);
        status.uploads(|uploads| uploads.uploading = None);
        if let Err(error) = result
            && !control.cancelled.load(Ordering::Relaxed)
        {
            status.uploads(|uploads| {
                uploads.failed += 1;
                uploads.last_failure = Some(error.to_string());
            });
            tracing::warn!("the snapshot {id} is durable on disk, but was not uploaded: {error}");
        }
    }

    fn upload(&self, id: &SnapshotId, control: &CopyControl) -> Result<()> {
        let CopyParts { store, status, ownership, .. } = &self.parts;
        let begun = Instant::now();
        let checked = self.handover.as_deref().map(Handover::check);
        // Other errors of the object store are left to the upload, which retries for longer.
        if let Some(Err(OwnershipError::ClaimedElsewhere(claim))) = checked {
            return Err(claim.into());
        }
        let manifest = store.copy(id, DISK, REMOTE, &|_| {}, &control.cancelled)?;
        tracing::info!(
            "snapshot {id} uploaded: {:.1} MB were new there, in {:.1} s",
            manifest.stored_bytes.unwrap_or(0) as f64 / 1e6,
            begun.elapsed().as_secs_f64()
        );
        status.uploads(|uploads| {
            uploads.uploaded += 1;
            uploads.stored_bytes += manifest.stored_bytes.unwrap_or(0);
            uploads.newest = Some(id.to_string());
            uploads.last_failure = None;
        });
        if let Some(handover) = &self.handover {
            handover.publish(ownership);
        }
        if !control.is_ending.load(Ordering::Relaxed)
            && let Err(error) = self.prune(id, &control.is_ending)
        {
            tracing::warn!("cannot prune the snapshots in the object store: {error:#}");
        }
        if !control.is_ending.load(Ordering::Relaxed) && !self.is_swept.swap(true, Ordering::Relaxed) {
            match store.tier(REMOTE)?.store().sweep() {
                Ok(swept) => swept.iter().for_each(|one| {
                    tracing::info!(
                        "removed {one} from the object store, a leftover of an interrupted upload"
                    );
                }),
                Err(error) => tracing::warn!("cannot remove the leftovers of interrupted uploads: {error}"),
            }
        }
        Ok(())
    }

    /// Prunes the object store after the upload of `id`.
    fn prune(&self, id: &SnapshotId, cancel: &AtomicBool) -> Result<()> {
        let CopyParts { store, dir, retention, status, ownership } = &self.parts;
        let history = tiers::history(dir, status.last_progress_unix_ms())?;
        let (marks, remote) = (dir.marks()?, store.tier(REMOTE)?.store());
        // Other machines prune the object store too. A snapshot may have been marked while it could not be reached.
        marks::tell_kept(remote, dir, &marks)?;
        let mut prunable = store.prunable(&[REMOTE], retention, &marks, &history)?;
        // Another machine may have uploaded snapshots with higher numbers.
        prunable.retain(|old| old != id);
        if let Some(handover) = self.handover.as_deref().filter(|_| !prunable.is_empty()) {
            handover.before_deletion(&ownership.record(), &prunable)?;
            faults::hit("upload-deletion-recorded")?;
            // As in `tiers::prune`.
            let (marks, pins) = (dir.marks()?, remote.pins()?);
            let before = prunable.len();
            prunable.retain(|old| !marks.is_kept(old) && !pins.contains_key(old));
            if prunable.len() < before {
                handover.before_deletion(&ownership.record(), &prunable)?;
            }
        }
        for old in &prunable {
            store.remove_from(old, REMOTE)?;
            tracing::debug!("removed the snapshot {old} from the object store");
        }
        if !prunable.is_empty() {
            remote.reclaim_until(cancel)?;
            if let Some(handover) = &self.handover {
                marks::forget(handover.records(), &prunable)?;
            }
        }
        Ok(())
    }
}
