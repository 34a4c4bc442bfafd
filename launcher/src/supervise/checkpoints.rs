//! The thread that takes the snapshots of one life of the job, one after the other.

use super::Context as Shared;
use super::events::Event;
use crate::checkpoint::attempt::{After, AttemptError, Checkpointer, Goes, RunningJob};
use crate::observe::control_server::Answer;
use crate::sys::background::Background;
use anyhow::{Context, Result};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the thread is asked for.
struct Wish {
    answer: Option<Answer>,
    after: After,
}

/// How far the snapshot is with which the job ends.
mod last {
    /// It has not begun: something else is being done.
    pub const AHEAD: u8 = 0;
    /// It is under way, or over.
    pub const BEGUN: u8 = 1;
    /// It is not wanted any more.
    pub const WITHDRAWN: u8 = 2;
}

/// The thread.
pub struct Checkpoints {
    wishes: Sender<Wish>,
    thread: JoinHandle<()>,
    background: Arc<Background>,
    cancelled: Arc<AtomicBool>,
    is_over: Arc<AtomicBool>,
    /// See [`last`].
    last: Arc<AtomicU8>,
}

impl Checkpoints {
    /// Begins for a job that runs.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub fn begin(shared: &Shared, job: &Arc<RunningJob>) -> Result<Self> {
        let (cancelled, is_over) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let checkpointer = Checkpointer {
            job: Arc::clone(job),
            dir: shared.dir.clone(),
            store: Arc::clone(&shared.store),
            ownership: Arc::clone(&shared.ownership),
            identity: shared.identity.clone(),
            criu: shared.criu.clone(),
            freeze_timeout: shared.config.freeze_timeout,
            after: After::RunsOn,
            retention: shared.config.retention(),
            status: Arc::clone(&shared.status),
            cancelled: Arc::clone(&cancelled),
            is_over: Arc::clone(&is_over),
            attempts: 0,
            is_to_reclaim: true,
            uploader: shared.uploader.clone(),
            persister: shared.persister.clone(),
            goes_to: Goes::ToStore,
            told_outside: HashSet::new(),
        };
        let (wishes, wished) = unbounded();
        let background = Arc::<Background>::default();
        let last = Arc::new(AtomicU8::new(last::AHEAD));
        let (its_own, events, its_last) = (Arc::clone(&background), shared.events.clone(), Arc::clone(&last));
        let work = move || {
            // Storing a snapshot takes second place to the job.
            its_own.enter();
            serve(checkpointer, &wished, &events, &its_last);
        };
        let thread = std::thread::Builder::new().name("checkpointer".to_owned()).spawn(work);
        let thread = thread.context("cannot start the checkpointing thread")?;
        Ok(Self { wishes, thread, background, cancelled, is_over, last })
    }

    /// Asks for a snapshot; an [`Event::Attempted`] tells what came of it.
    pub fn want(&self, answer: Option<Answer>, after: After) {
        // The thread is there until this is dropped.
        let _ = self.wishes.send(Wish { answer, after });
    }

    /// The snapshot with which the job ends is not to be taken any more; says whether that was in time.
    #[must_use]
    pub fn withdraw_last(&self) -> bool {
        let (from, to) = (last::AHEAD, last::WITHDRAWN);
        self.last.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Nobody needs what is being stored any more.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether [`Self::cancel`] was called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// The job is not to be spared any more: storing is all that is left to do.
    pub fn hurry(&self) {
        self.background.hurry();
    }

    /// Ends the thread once it has done what it was asked for, and waits for that, at most for `limit` if there is one.
    pub fn end(self, limit: Option<Duration>) {
        self.is_over.store(true, Ordering::Relaxed);
        drop(self.wishes);
        let deadline = limit.map(|limit| Instant::now() + limit);
        while !self.thread.is_finished() && deadline.is_none_or(|deadline| Instant::now() < deadline) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn serve(mut checkpointer: Checkpointer, wishes: &Receiver<Wish>, events: &Sender<Event>, last: &AtomicU8) {
    while let Ok(Wish { answer, after }) = wishes.recv() {
        let is_last = after != After::RunsOn;
        let is_wanted = !is_last || last.swap(last::BEGUN, Ordering::SeqCst) != last::WITHDRAWN;
        let goes_to = if answer.is_some() || is_last { Goes::ToStore } else { Goes::AsItsTurn };
        // A fault of ours costs this one checkpoint, neither the job nor the next one.
        let attempt = std::panic::AssertUnwindSafe(|| checkpointer.attempt(after, goes_to));
        let attempt = || std::panic::catch_unwind(attempt).unwrap_or(Err(AttemptError::Crashed));
        let result = if is_wanted { attempt() } else { Err(AttemptError::Withdrawn) };
        let is_saved = result.is_ok();
        if events.send(Event::Attempted { result, answer, after }).is_err() {
            return;
        }
        // Nobody waits for it, and it makes nobody wait.
        if wishes.is_empty() && !is_last && !checkpointer.cancelled.load(Ordering::Relaxed) {
            let reclaim = std::panic::AssertUnwindSafe(|| checkpointer.reclaim(is_saved));
            let _ = std::panic::catch_unwind(reclaim);
        }
    }
}
