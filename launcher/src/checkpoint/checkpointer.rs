//! Takes the snapshots of one job session, one attempt after another.
//!
//! [`Checkpointer`] holds what stays the same for the session and never changes. [`AttemptHistory`] holds what later
//! attempts have to know of earlier ones. Everything else belongs to one `Attempt`.

use crate::agents::MirrorMode;
use crate::checkpoint::attempt::{AfterDump, Attempt, AttemptError, Destination};
use crate::checkpoint::failed_processes::FailedProcesses;
use crate::checkpoint::nodes::PartAttempt;
use crate::checkpoint::precopy::{Precopy, Trials};
use crate::checkpoint::running_job::RunningJob;
use crate::criu::Criu;
use crate::files::history::FileHistory;
use crate::files::rules::FileRules;
use crate::job::ownership::Ownership;
use crate::job::status::SharedStatus;
use crate::persist::memory::Persister;
use crate::persist::upload::Uploader;
use crate::store::tiers;
use crate::sys::background::Background;
use ckpt_protocol::control::Saved;
use ckpt_snapshot::{FailedProcess, JobDir, JobIdentity, JobLock, Listed, Retention, SnapshotId, Tiers};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Why garbage is not collected.
pub const GIVES_WAY: &str = "a checkpoint comes first";

/// What a [`Checkpointer`] works with.
pub struct CheckpointerParts {
    /// The job.
    pub job: Arc<RunningJob>,
    /// The job's directory in the store.
    pub dir: JobDir,
    /// Its lock.
    pub lock: Arc<Mutex<JobLock>>,
    /// Where images that do not fit into memory may be.
    pub staging_dir: Option<PathBuf>,
    /// The job's snapshots.
    pub store: Arc<Tiers>,
    /// The store's path or address, for messages.
    pub store_name: String,
    /// The job's record, which holds the highest snapshot number.
    pub ownership: Arc<Ownership>,
    /// The job's key, command and working directory.
    pub identity: JobIdentity,
    /// The CRIU to use.
    pub criu: Criu,
    /// Whether memory is copied while the job runs.
    pub precopy: Precopy,
    /// The longest that the job may be paused.
    pub freeze_timeout: Duration,
    /// What the mirrors of device memory hold between checkpoints.
    pub mirror: MirrorMode,
    /// Which files are the job's.
    pub file_rules: Arc<FileRules>,
    /// Snapshots to keep.
    pub retention: Retention,
    /// Receives progress and results.
    pub status: Arc<SharedStatus>,
    /// Copies snapshots to the object store, if there is one.
    pub uploader: Option<Arc<Uploader>>,
    /// Keeps snapshots in memory (`--persist-every`).
    pub persister: Option<Arc<Persister>>,
    /// Set when the job has succeeded: the snapshot that is being stored is not needed any more.
    pub cancelled: Arc<AtomicBool>,
    /// Set when the job has ended or is being ended with a last snapshot: another one is not waited for.
    pub is_ending: Arc<AtomicBool>,
    /// Set when the last snapshot is requested, or the job session ends: garbage collection stops.
    pub gives_way: Arc<AtomicBool>,
    /// The priority of the thread that takes the snapshots.
    pub priority: Arc<Background>,
}

/// What attempts of one job session leave for later ones.
pub struct AttemptHistory {
    attempts: u64,
    /// The job's files at the last committed snapshot.
    pub(super) files: FileHistory,
    /// Snapshots were removed, and the data that only they needed is still in the store.
    pub has_garbage: bool,
    /// The snapshots in the store after the last commit.
    stored: HashSet<SnapshotId>,
    /// Whether copying memory before the dump has paid.
    pub(super) precopy: Trials,
    /// Processes of the job that have failed.
    pub(super) failures: FailedProcesses,
    /// Remote ends of connections out of the job that were reported.
    reported_peers: HashSet<SocketAddr>,
}

impl AttemptHistory {
    /// Before the first attempt. `failed` is that of the snapshot from which the job was resumed. An earlier session may
    /// have left garbage.
    #[must_use]
    pub fn new(files: FileHistory, failed: Option<FailedProcess>) -> Self {
        Self {
            attempts: 0,
            files,
            has_garbage: true,
            stored: HashSet::new(),
            precopy: Trials::default(),
            failures: FailedProcesses::resumed(failed, Instant::now()),
            reported_peers: HashSet::new(),
        }
    }

    /// Notes which snapshots are stored. Returns whether any are gone that were there before.
    pub(super) fn note_stored(&mut self, listed: &[Listed]) -> bool {
        let stored = listed.iter().map(|listed| listed.id.clone()).collect();
        let before = std::mem::replace(&mut self.stored, stored);
        !before.is_subset(&self.stored)
    }

    /// Reports each connection that a resume will not restore, once.
    pub(super) fn warn_of_outside_connections(&mut self, peers: &[SocketAddr]) {
        for peer in peers {
            if self.reported_peers.insert(*peer) {
                tracing::warn!(
                    "the job has a TCP connection to {peer}, outside of it: after a resume that connection is broken, and the job has to reconnect"
                );
            }
        }
    }
}

/// Takes snapshots of one running job.
pub struct Checkpointer {
    parts: CheckpointerParts,
}

impl Checkpointer {
    /// A checkpointer for the job in `parts`.
    #[must_use]
    pub fn new(parts: CheckpointerParts) -> Self {
        Self { parts }
    }

    /// Takes one snapshot, which may be a part of one of several nodes.
    ///
    /// # Errors
    /// See [`AttemptError`]. Older snapshots are unchanged, and the job continues, unless `after_dump` ended the job and
    /// the dump could not be stored.
    pub fn attempt(
        &self,
        history: &mut AttemptHistory,
        after_dump: AfterDump,
        destination: Destination,
        part: Option<PartAttempt>,
    ) -> Result<Saved, AttemptError> {
        history.attempts += 1;
        let freeze_timeout = match after_dump {
            AfterDump::KeepRunning => self.parts.freeze_timeout,
            AfterDump::End(limit) => self.parts.freeze_timeout.min(limit),
        };
        let (parts, number, begun) = (&self.parts, history.attempts, Instant::now());
        let preparations = AtomicU64::new(0);
        let attempt =
            Attempt { parts, number, preparations, after_dump, destination, freeze_timeout, begun, part };
        attempt.run(history)
    }

    /// Whether the snapshot that is being stored is not needed any more.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.parts.cancelled.load(Ordering::Relaxed)
    }

    /// Collects garbage that earlier attempts or commands have left. `is_saved` is whether the last attempt succeeded. Between
    /// two attempts: during one, the copy of device memory may be in the packs of the newest snapshot.
    ///
    /// # Errors
    /// Why there is some left, for people.
    pub fn collect_garbage(&self, history: &mut AttemptHistory, is_saved: bool) -> Result<(), String> {
        if !history.has_garbage {
            return Ok(());
        }
        self.may_collect(is_saved)?;
        let CheckpointerParts { store, gives_way, .. } = &self.parts;
        let collected = tiers::reclaim_and_report(store, gives_way);
        if gives_way.load(Ordering::SeqCst) {
            return Err(GIVES_WAY.to_owned());
        }
        history.has_garbage = false;
        collected.map_err(|error| error.to_string())
    }

    fn may_collect(&self, is_saved: bool) -> Result<(), String> {
        if !is_saved && !tiers::is_on_disk(&self.parts.store) {
            return Err("the next checkpoint may use what the last one has uploaded".to_owned());
        }
        self.parts.ownership.check().map_err(|error| error.to_string())
    }
}
