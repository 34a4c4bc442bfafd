//! What a running launcher knows about its job, shared between its threads.

use ckpt_protocol::control::{DeviceMemory, JobStatus, Phase, Progress, Saved};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970 UTC.
#[must_use]
pub fn unix_ms(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis().try_into().unwrap_or(u64::MAX)
}

/// The status, kept up to date by whoever does something.
pub struct SharedStatus {
    status: Mutex<JobStatus>,
    next_checkpoint: Mutex<Option<Instant>>,
    /// Apart from the rest: it changes with every chunk.
    done_bytes: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedStatus {
    /// A job that starts now.
    #[must_use]
    pub fn new(job: String, resumed_from: Option<String>) -> Self {
        let status = JobStatus {
            job,
            launcher_pid: std::process::id(),
            started_unix_ms: unix_ms(SystemTime::now()),
            resumed_from,
            ..JobStatus::default()
        };
        Self { status: Mutex::new(status), next_checkpoint: Mutex::default(), done_bytes: AtomicU64::new(0) }
    }

    /// A copy for somebody who asks.
    #[must_use]
    pub fn snapshot(&self) -> JobStatus {
        let mut status = lock(&self.status).clone();
        status.progress = self.progress();
        let next = *lock(&self.next_checkpoint);
        status.next_checkpoint_s = next.map(|at| at.saturating_duration_since(Instant::now()).as_secs_f64());
        status
    }

    /// How far the present checkpoint is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress { done_bytes: self.done_bytes.load(Ordering::Relaxed), ..lock(&self.status).progress }
    }

    /// A phase begins, with so many bytes ahead.
    pub fn enter(&self, phase: Phase, total_bytes: u64) {
        self.done_bytes.store(0, Ordering::Relaxed);
        lock(&self.status).progress = Progress { phase, done_bytes: 0, total_bytes };
    }

    /// So many more bytes are stored.
    pub fn advance(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A snapshot is durable.
    pub fn saved(&self, saved: &Saved) {
        let mut status = lock(&self.status);
        status.saved += 1;
        status.last_failure = None;
        status.last_snapshot = Some(saved.clone());
    }

    /// What a checkpoint did with device memory; `None` if the job has none.
    pub fn device_memory(&self, outcome: Option<DeviceMemory>) {
        lock(&self.status).device_memory = outcome;
    }

    /// A checkpoint failed. Returns whether the reason is a new one.
    pub fn failed(&self, reason: &str) -> bool {
        let mut status = lock(&self.status);
        status.failed += 1;
        let new = status.last_failure.as_deref() != Some(reason);
        status.last_failure = Some(reason.to_owned());
        new
    }

    /// When the next checkpoint is due.
    pub fn set_next(&self, after: Option<Duration>) {
        *lock(&self.next_checkpoint) = after.map(|after| Instant::now() + after);
    }
}
