//! The status of a running launcher and its job, shared between its threads.

use crate::namespace::stdio::Tail;
use ckpt_protocol::control::{DeviceMemory, InMemory, JobStatus, LateRank, Phase, Progress, Saved, Uploads};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970 UTC.
#[must_use]
pub fn unix_ms(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis().try_into().unwrap_or(u64::MAX)
}

/// What the consistent cut has taken, in words.
#[must_use]
pub fn cut_text(duration_s: f64, attempts: u32) -> String {
    let plural = if attempts == 1 { "" } else { "s" };
    format!("all ranks of NCCL at the same step after {duration_s:.2} s and {attempts} attempt{plural}")
}

/// The status. Every thread updates its part.
pub struct SharedStatus {
    status: Mutex<JobStatus>,
    next_checkpoint: Mutex<Option<Instant>>,
    restart: Mutex<Option<Instant>>,
    /// Counts the begins and ends of checkpoints: odd while one works on the job.
    disturbances: AtomicU64,
    /// 0 without a watchdog.
    last_progress_unix_ms: AtomicU64,
    /// 0 on one machine.
    progress_elsewhere_unix_ms: AtomicU64,
    /// Not part of `status`, since it changes with every chunk.
    done_bytes: AtomicU64,
    /// What the job of the current session writes.
    output: Mutex<Option<Arc<Tail>>>,
}

impl SharedStatus {
    /// The status of a launcher that starts now.
    #[must_use]
    pub fn new(job: String) -> Self {
        let status = JobStatus {
            job,
            launcher_pid: std::process::id(),
            started_unix_ms: unix_ms(SystemTime::now()),
            ..JobStatus::default()
        };
        Self {
            status: Mutex::new(status),
            next_checkpoint: Mutex::default(),
            restart: Mutex::default(),
            disturbances: AtomicU64::new(0),
            last_progress_unix_ms: AtomicU64::new(0),
            progress_elsewhere_unix_ms: AtomicU64::new(0),
            done_bytes: AtomicU64::new(0),
            output: Mutex::default(),
        }
    }

    /// From now on, the job writes to `tail`.
    pub fn writes_to(&self, tail: &Arc<Tail>) {
        *self.output.lock() = Some(Arc::clone(tail));
    }

    /// The last lines that the job has written.
    #[must_use]
    pub fn output(&self) -> String {
        self.output.lock().as_ref().map(|tail| tail.text()).unwrap_or_default()
    }

    /// Where the job's snapshots are: the path or address of the store.
    pub fn is_in(&self, store: String) {
        self.status.lock().store = store;
    }

    /// The job runs, from its beginning or resumed from a snapshot (its ID, and when it was taken in milliseconds since
    /// 1970 UTC).
    pub fn runs(&self, resumed_from: Option<(String, u64)>) {
        let (resumed_from, taken_unix_ms) = resumed_from.unzip();
        *self.restart.lock() = None;
        let mut status = self.status.lock();
        // A snapshot that was abandoned by a step back is not the newest any more.
        status.last_snapshot =
            status.last_snapshot.take().filter(|saved| Some(&saved.id) == resumed_from.as_ref());
        status.resumed_from = resumed_from;
        status.newest_unix_ms = taken_unix_ms;
    }

    /// The job has failed and is restarted after some time.
    pub fn waits(&self, failure: &str, after: Duration, restarts: u32) {
        *self.restart.lock() = Some(Instant::now() + after);
        let mut status = self.status.lock();
        status.last_job_failure = Some(failure.to_owned());
        status.restarts = restarts;
        status.late_ranks.clear();
    }

    /// The ranks of NCCL for which others wait now.
    pub fn late_ranks(&self, late: Vec<LateRank>) {
        self.status.lock().late_ranks = late;
    }

    /// A copy of the status.
    #[must_use]
    pub fn snapshot(&self) -> JobStatus {
        let mut status = self.status.lock().clone();
        status.progress = self.progress();
        let left = |at: Instant| at.saturating_duration_since(Instant::now()).as_secs_f64();
        status.next_checkpoint_s = self.next_checkpoint.lock().map(left);
        status.restart_s = self.restart.lock().map(left);
        status.last_progress_unix_ms = self.last_progress_unix_ms();
        status
    }

    /// The progress of the current checkpoint.
    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress { done_bytes: self.done_bytes.load(Ordering::Relaxed), ..self.status.lock().progress }
    }

    /// A checkpoint begins to work on the job, or has finished that: meanwhile, CPU time is not only the job's own.
    pub fn disturb(&self, begins: bool) {
        let now = self.disturbances.load(Ordering::SeqCst);
        if (now % 2 == 1) != begins {
            self.disturbances.store(now + 1, Ordering::SeqCst);
        }
    }

    /// A number that is odd while a checkpoint works on the job, and changes with each checkpoint.
    #[must_use]
    pub fn disturbances(&self) -> u64 {
        self.disturbances.load(Ordering::SeqCst)
    }

    /// The watchdog saw the job work at that time.
    pub fn worked(&self, at: SystemTime) {
        self.last_progress_unix_ms.store(unix_ms(at), Ordering::Relaxed);
    }

    /// When a part of the job was seen to work at another node, milliseconds since 1970 UTC.
    pub fn progressed_elsewhere(&self, at_unix_ms: u64) {
        self.progress_elsewhere_unix_ms.fetch_max(at_unix_ms, Ordering::Relaxed);
    }

    /// When the job was last seen to work here, milliseconds since 1970 UTC; `None` without a watchdog.
    #[must_use]
    pub fn own_progress_unix_ms(&self) -> Option<u64> {
        Some(self.last_progress_unix_ms.load(Ordering::Relaxed)).filter(|at| *at > 0)
    }

    /// The same of the job on all its nodes, as far as it is known here.
    #[must_use]
    pub fn last_progress_unix_ms(&self) -> Option<u64> {
        let elsewhere = self.progress_elsewhere_unix_ms.load(Ordering::Relaxed);
        self.own_progress_unix_ms().map(|own| own.max(elsewhere))
    }

    /// A phase begins, with `total_bytes` to process.
    pub fn enter(&self, phase: Phase, total_bytes: u64) {
        self.done_bytes.store(0, Ordering::Relaxed);
        self.status.lock().progress = Progress { phase, done_bytes: 0, total_bytes };
    }

    /// More bytes are stored.
    pub fn advance(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A snapshot was taken.
    pub fn saved(&self, saved: &Saved) {
        let mut status = self.status.lock();
        status.saved += 1;
        status.last_failure = None;
        status.last_snapshot = Some(saved.clone());
        status.newest_unix_ms = Some(saved.taken_unix_ms);
        let totals = &mut status.totals;
        totals.stall_s += saved.stall_s;
        totals.durable_s += saved.durable_s;
        totals.bytes += saved.bytes;
        totals.stored_bytes += saved.stored_bytes.unwrap_or(0);
        totals.unread_bytes += saved.unread_bytes;
    }

    /// Updates the status of uploads.
    pub fn uploads(&self, change: impl FnOnce(&mut Uploads)) {
        change(self.status.lock().uploads.get_or_insert_default());
    }

    /// Updates the status of snapshots in memory.
    pub fn in_memory(&self, change: impl FnOnce(&mut InMemory)) {
        change(self.status.lock().in_memory.get_or_insert_default());
    }

    /// How a checkpoint saved device memory; `None` if the job has none.
    pub fn device_memory(&self, outcome: Option<DeviceMemory>) {
        self.status.lock().device_memory = outcome;
    }

    /// How much host memory the copies of device memory take now, bytes.
    pub fn mirror_bytes(&self, bytes: u64) {
        if let Some(memory) = &mut self.status.lock().device_memory {
            memory.mirror_bytes = bytes;
        }
    }

    /// A checkpoint failed. Returns whether the reason is new.
    pub fn failed(&self, reason: &str) -> bool {
        let mut status = self.status.lock();
        status.failed += 1;
        let new = status.last_failure.as_deref().is_none_or(|last| !is_same_reason(last, reason));
        status.last_failure = Some(reason.to_owned());
        new
    }

    /// When the next checkpoint is due.
    pub fn set_next(&self, after: Option<Duration>) {
        *self.next_checkpoint.lock() = after.map(|after| Instant::now() + after);
    }
}

/// Whether two reasons differ in numbers at most, such as those of free bytes.
#[must_use]
pub fn is_same_reason(one: &str, other: &str) -> bool {
    let letters = |text: &str| text.replace(|letter: char| letter.is_ascii_digit() || letter == '.', "");
    letters(one) == letters(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_number_is_no_other_reason() {
        let status = SharedStatus::new("job".to_owned());
        for (reason, is_new) in [
            ("12.5 GB are free", true),
            ("9 GB are free", false),
            ("the disk is gone", true),
            ("7.25 GB are free", true),
        ] {
            assert_eq!(status.failed(reason), is_new, "{reason}");
        }
        assert_eq!(status.snapshot().last_failure.as_deref(), Some("7.25 GB are free"));
    }

    #[test]
    fn an_abandoned_snapshot_is_not_the_newest() {
        let status = SharedStatus::new("job".to_owned());
        let saved = Saved {
            id: "000002-x".to_owned(),
            bytes: 1,
            stored_bytes: None,
            changed_bytes: None,
            unread_bytes: 0,
            stall_s: 0.0,
            stall_phases: None,
            cut: None,
            durable_s: 0.0,
            taken_unix_ms: 5,
            in_memory: false,
            is_doubtful: false,
            uncovered_files: std::collections::BTreeMap::new(),
        };
        status.saved(&saved);
        status.runs(Some(("000002-x".to_owned(), 5)));
        assert_eq!(status.snapshot().last_snapshot, Some(saved));
        status.runs(Some(("000001-x".to_owned(), 3)));
        let now = status.snapshot();
        assert_eq!((now.last_snapshot, now.newest_unix_ms), (None, Some(3)));
    }

    #[test]
    fn a_disturbance_is_odd_while_it_lasts() {
        let status = SharedStatus::new("job".to_owned());
        let numbers = [true, true, false, false, true].map(|begins| {
            status.disturb(begins);
            status.disturbances()
        });
        assert_eq!(numbers, [1, 1, 2, 2, 3]);
    }
}
