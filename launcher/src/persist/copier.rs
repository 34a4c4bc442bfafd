//! A low-priority thread that copies snapshots from one tier of the store to another while the job runs. No checkpoint
//! waits for it: if snapshots are taken faster than they are copied, only the newest one is copied next. The thread runs
//! through all sessions of the job.

use crate::job::ownership::Ownership;
use crate::job::status::SharedStatus;
use crate::sys::background::Background;
use crate::sys::deadline::COPIER_END_TIMEOUT;
use anyhow::{Context, Result};
use ckpt_snapshot::{JobDir, Retention, SnapshotId, Tiers};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The thread. It stops when this is dropped; an unfinished copy is not committed.
pub struct Copier {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

/// What a copy needs to know of the job.
#[derive(Clone)]
pub struct CopyParts {
    /// The job's store.
    pub store: Arc<Tiers>,
    /// The job.
    pub dir: JobDir,
    /// Snapshots to keep where they are copied to.
    pub retention: Retention,
    /// Receives progress and results.
    pub status: Arc<SharedStatus>,
    /// Who owns the job.
    pub ownership: Arc<Ownership>,
}

/// Flags that a copy checks while it runs.
#[derive(Default)]
pub struct CopyControl {
    /// The copy is not needed any more.
    pub cancelled: AtomicBool,
    /// ckpt-run is ending, or the copy was cancelled: pruning after a copy is skipped.
    pub is_ending: AtomicBool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    control: CopyControl,
    background: Background,
}

#[derive(Default)]
struct State {
    /// The snapshot to copy next.
    next: Option<SnapshotId>,
    /// The snapshot that is being copied.
    current: Option<SnapshotId>,
}

impl Shared {
    /// Waits for the next snapshot to copy; `None` when the thread has to end.
    fn next(&self) -> Option<SnapshotId> {
        let has_nothing =
            |state: &mut State| state.next.is_none() && !self.control.cancelled.load(Ordering::Relaxed);
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, has_nothing);
        if self.control.cancelled.load(Ordering::Relaxed) {
            return None;
        }
        state.current = state.next.take();
        state.current.clone()
    }
}

impl Copier {
    /// Starts the thread `name`. It calls `copy` with each snapshot in turn; `copy` reports its errors itself.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(name: &str, copy: impl Fn(&SnapshotId, &CopyControl) + Send + 'static) -> Result<Self> {
        let shared = Arc::<Shared>::default();
        let its = Arc::clone(&shared);
        let work = move || {
            its.background.enter();
            while let Some(id) = its.next() {
                // A bug in ckpt-run costs this one copy.
                let copy = std::panic::AssertUnwindSafe(|| copy(&id, &its.control));
                let _ = std::panic::catch_unwind(copy);
                its.state.lock().current = None;
                its.changed.notify_all();
            }
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        let thread = thread.context("cannot start the thread that copies snapshots")?;
        Ok(Self { shared, thread })
    }

    /// Copies the snapshot `id` next, unless it is being copied. It replaces a snapshot that is waiting.
    pub fn request(&self, id: &SnapshotId) {
        let mut state = self.shared.state.lock();
        if state.current.as_ref() != Some(id) {
            state.next = Some(id.clone());
            self.shared.changed.notify_all();
        }
    }

    /// ckpt-run is ending: copies get normal priority, and pruning is skipped.
    pub fn hurry(&self) {
        self.shared.control.is_ending.store(true, Ordering::Relaxed);
        if !self.thread.is_finished() {
            self.shared.background.hurry();
        }
    }

    /// ckpt-run goes on after all: undoes [`Self::hurry`].
    pub fn relax(&self) {
        self.shared.control.is_ending.store(false, Ordering::Relaxed);
        if !self.thread.is_finished() {
            self.shared.background.relax();
        }
    }

    /// Whether a snapshot is waiting to be copied.
    #[must_use]
    pub fn has_next(&self) -> bool {
        self.shared.state.lock().next.is_some()
    }

    /// Waits until nothing is left to copy, for `limit` at most. Returns whether that was reached.
    #[must_use]
    pub fn is_idle_within(&self, limit: Duration) -> bool {
        let is_busy = |state: &mut State| state.current.is_some() || state.next.is_some();
        let mut state = self.shared.state.lock();
        let _ = self.shared.changed.wait_while_for(&mut state, is_busy, limit);
        !is_busy(&mut state)
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.shared.control.is_ending.store(true, Ordering::Relaxed);
        self.shared.control.cancelled.store(true, Ordering::Relaxed);
        // The lock ensures that the thread either sees the flag or is waiting already.
        drop(self.shared.state.lock());
        self.shared.changed.notify_all();
        // A copy that waits for a disk or a network ends with the process.
        let deadline = Instant::now() + COPIER_END_TIMEOUT;
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::SystemTime;

    fn id(number: u64) -> SnapshotId {
        SnapshotId::new(number, SystemTime::UNIX_EPOCH)
    }

    #[test]
    fn the_newest_waiting_snapshot_is_copied() {
        let (begun, begins) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel();
        let copier = Copier::start("test", move |id, _| {
            begun.send(id.sequence()).unwrap();
            may_go_on.recv().unwrap();
        })
        .unwrap();
        copier.request(&id(1));
        assert_eq!(begins.recv().unwrap(), 1);
        assert!(!copier.has_next());
        copier.request(&id(2));
        copier.request(&id(3));
        assert!(copier.has_next() && !copier.is_idle_within(Duration::from_millis(1)));
        go_on.send(()).unwrap();
        go_on.send(()).unwrap();
        assert!(copier.is_idle_within(Duration::from_secs(300)));
        assert_eq!(begins.try_iter().collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn a_copy_can_be_cancelled_and_a_panic_costs_one_copy() {
        let (ended, ends) = mpsc::channel();
        let copier = Copier::start("test", move |id, control| {
            assert_ne!(id.sequence(), 1, "a bug");
            while !control.cancelled.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            ended.send(id.sequence()).unwrap();
        })
        .unwrap();
        copier.request(&id(1));
        assert!(copier.is_idle_within(Duration::from_secs(300)));
        copier.request(&id(2));
        while copier.has_next() {
            std::thread::yield_now();
        }
        drop(copier);
        assert_eq!(ends.recv().unwrap(), 2);
    }

    #[test]
    fn a_snapshot_is_not_copied_twice_at_once_and_a_hurry_is_seen() {
        let (begun, begins) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel();
        let copier = Copier::start("test", move |id, control| {
            let priority = rustix::process::getpriority_process(None).unwrap();
            begun.send((id.sequence(), control.is_ending.load(Ordering::Relaxed), priority)).unwrap();
            may_go_on.recv().unwrap();
        })
        .unwrap();
        copier.request(&id(1));
        let (number, is_ending, priority) = begins.recv().unwrap();
        assert!(number == 1 && !is_ending && priority >= 10);
        copier.request(&id(1));
        assert!(!copier.has_next());
        copier.hurry();
        copier.request(&id(2));
        go_on.send(()).unwrap();
        let (number, is_ending, priority) = begins.recv().unwrap();
        assert!(number == 2 && is_ending);
        // Not every user may raise a priority again.
        let may = std::thread::spawn(|| {
            let set = |nice| rustix::process::setpriority_process(None, nice);
            set(10).and_then(|()| set(0)).is_ok()
        });
        assert_eq!(priority == 0, may.join().unwrap());
        go_on.send(()).unwrap();
        assert!(copier.is_idle_within(Duration::from_secs(300)));
        // A failed copy may be requested again.
        copier.request(&id(2));
        go_on.send(()).unwrap();
        assert!(copier.is_idle_within(Duration::from_secs(300)));
        assert_eq!(begins.try_iter().map(|(number, ..)| number).collect::<Vec<_>>(), [2]);
    }
}
