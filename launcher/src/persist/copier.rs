//! A thread that copies snapshots from one tier of the store to another while the job runs. No checkpoint waits for
//! it; where it is slower than snapshots come, the newest one is next. It goes on over all lives of the job.

use crate::sys::background::Background;
use crate::sys::deadline::COPIER_END_TIMEOUT;
use anyhow::{Context, Result};
use ckpt_snapshot::SnapshotId;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
/// The thread. Dropped, it stops; what was not finished is not there.
pub struct Copier {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

/// What a copy looks at while it is made.
#[derive(Default)]
pub struct Wanted {
    /// Nobody needs the copy any more.
    pub not: AtomicBool,
    /// What comes with a copy, as tidying, is not worth its time: the end is near, or nobody needs the copy.
    pub bare: AtomicBool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    wanted: Wanted,
    background: Background,
}

#[derive(Default)]
struct State {
    /// What is copied next.
    next: Option<SnapshotId>,
    /// What is being copied.
    present: Option<SnapshotId>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// What to copy; `None` when nothing is to be any more.
    fn next(&self) -> Option<SnapshotId> {
        let has_nothing =
            |state: &mut State| state.next.is_none() && !self.wanted.not.load(Ordering::Relaxed);
        let mut state = self.lock();
        self.changed.wait_while(&mut state, has_nothing);
        if self.wanted.not.load(Ordering::Relaxed) {
            return None;
        }
        state.present = state.next.take();
        state.present.clone()
    }
}

impl Copier {
    /// Begins the thread `name`. `copy` is called with each snapshot in turn; it tells by itself what came of it.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn start(name: &str, copy: impl Fn(&SnapshotId, &Wanted) + Send + 'static) -> Result<Self> {
        let shared = Arc::<Shared>::default();
        let its = Arc::clone(&shared);
        let work = move || {
            its.background.enter();
            while let Some(id) = its.next() {
                // A fault of ours costs this one copy.
                let copy = std::panic::AssertUnwindSafe(|| copy(&id, &its.wanted));
                let _ = std::panic::catch_unwind(copy);
                its.lock().present = None;
                its.changed.notify_all();
            }
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        let thread = thread.context("cannot start to copy snapshots")?;
        Ok(Self { shared, thread })
    }

    /// Copies the snapshot `id` next, unless it is being copied; one that waits already is passed over for it.
    pub fn want(&self, id: &SnapshotId) {
        let mut state = self.shared.lock();
        if state.present.as_ref() != Some(id) {
            state.next = Some(id.clone());
            self.shared.changed.notify_all();
        }
    }

    /// The end is near: only copies count from now on, and the job is not to be spared any more.
    pub fn hurry(&self) {
        self.shared.wanted.bare.store(true, Ordering::Relaxed);
        if !self.thread.is_finished() {
            self.shared.background.hurry();
        }
    }

    /// Whether a snapshot waits to be copied.
    #[must_use]
    pub fn has_next(&self) -> bool {
        self.shared.lock().next.is_some()
    }

    /// Waits until nothing is left to copy, for `limit` at most; says whether that is so.
    #[must_use]
    pub fn is_idle_within(&self, limit: Duration) -> bool {
        let is_at_it = |state: &mut State| state.present.is_some() || state.next.is_some();
        let mut state = self.shared.lock();
        let _ = self.shared.changed.wait_while_for(&mut state, is_at_it, limit);
        !is_at_it(&mut state)
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.shared.wanted.bare.store(true, Ordering::Relaxed);
        self.shared.wanted.not.store(true, Ordering::Relaxed);
        // Under the lock: the thread either sees it or waits already.
        drop(self.shared.lock());
        self.shared.changed.notify_all();
        // What waits for a disk or a network ends with the process.
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
    fn of_those_that_wait_the_newest_is_copied() {
        let (begun, begins) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel();
        let copier = Copier::start("test", move |id, _| {
            begun.send(id.sequence()).unwrap();
            may_go_on.recv().unwrap();
        })
        .unwrap();
        copier.want(&id(1));
        assert_eq!(begins.recv().unwrap(), 1);
        assert!(!copier.has_next());
        copier.want(&id(2));
        copier.want(&id(3));
        assert!(copier.has_next() && !copier.is_idle_within(Duration::from_millis(1)));
        go_on.send(()).unwrap();
        go_on.send(()).unwrap();
        assert!(copier.is_idle_within(Duration::from_secs(60)));
        assert_eq!(begins.try_iter().collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn a_copy_is_told_when_nobody_needs_it_and_a_fault_costs_one() {
        let (ended, ends) = mpsc::channel();
        let copier = Copier::start("test", move |id, wanted| {
            assert_ne!(id.sequence(), 1, "a fault of ours");
            while !wanted.not.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            ended.send(id.sequence()).unwrap();
        })
        .unwrap();
        copier.want(&id(1));
        assert!(copier.is_idle_within(Duration::from_secs(60)));
        copier.want(&id(2));
        while copier.has_next() {
            std::thread::yield_now();
        }
        drop(copier);
        assert_eq!(ends.recv().unwrap(), 2);
    }

    #[test]
    fn what_is_being_copied_is_not_copied_again_and_a_hurry_is_told() {
        let (begun, begins) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel();
        let copier = Copier::start("test", move |id, wanted| {
            let priority = rustix::process::getpriority_process(None).unwrap();
            begun.send((id.sequence(), wanted.bare.load(Ordering::Relaxed), priority)).unwrap();
            may_go_on.recv().unwrap();
        })
        .unwrap();
        copier.want(&id(1));
        let (number, bare, priority) = begins.recv().unwrap();
        assert!(number == 1 && !bare && priority >= 10);
        copier.want(&id(1));
        assert!(!copier.has_next());
        copier.hurry();
        copier.want(&id(2));
        go_on.send(()).unwrap();
        let (number, bare, priority) = begins.recv().unwrap();
        assert!(number == 2 && bare);
        // Not everybody may have more than before.
        let may = std::thread::spawn(|| {
            let set = |nice| rustix::process::setpriority_process(None, nice);
            set(10).and_then(|()| set(0)).is_ok()
        });
        assert_eq!(priority == 0, may.join().unwrap());
        go_on.send(()).unwrap();
        assert!(copier.is_idle_within(Duration::from_secs(60)));
        // One that failed may be tried again.
        copier.want(&id(2));
        go_on.send(()).unwrap();
        assert!(copier.is_idle_within(Duration::from_secs(60)));
        assert_eq!(begins.try_iter().map(|(number, ..)| number).collect::<Vec<_>>(), [2]);
    }
}
