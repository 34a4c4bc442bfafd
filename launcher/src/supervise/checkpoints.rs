//! The thread that takes the snapshots of one job session, one after another.

use super::events::Event;
use super::services::RunContext;
use crate::checkpoint::attempt::{AfterDump, AttemptError, Destination};
use crate::checkpoint::checkpointer::{AttemptHistory, Checkpointer, CheckpointerParts, GIVES_WAY};
use crate::checkpoint::nodes::PartAttempt;
use crate::checkpoint::running_job::RunningJob;
use crate::files::history::FileHistory;
use crate::observe::control_server::Answer;
use crate::sys::background::Background;
use anyhow::{Context, Result};
use ckpt_cluster::Blame;
use ckpt_protocol::control::Reply;
use ckpt_snapshot::FailedProcess;
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A request to the thread.
enum Request {
    Checkpoint(CheckpointRequest),
    /// The space of deleted snapshots.
    Reclaim(Answer),
    /// The job session ends.
    End,
}

struct CheckpointRequest {
    answer: Option<Answer>,
    after_dump: AfterDump,
    part: Option<PartAttempt>,
}

/// State of the final snapshot, with which the job ends.
mod final_snapshot {
    /// Not begun: an earlier request is still being served.
    pub const PENDING: u8 = 0;
    /// In progress, or complete.
    pub const BEGUN: u8 = 1;
    /// Not wanted any more.
    pub const WITHDRAWN: u8 = 2;
}

/// The thread.
pub struct Checkpoints {
    requests: Sender<Request>,
    thread: JoinHandle<()>,
    background: Arc<Background>,
    cancelled: Arc<AtomicBool>,
    is_ending: Arc<AtomicBool>,
    gives_way: Arc<AtomicBool>,
    /// See [`final_snapshot`].
    final_snapshot: Arc<AtomicU8>,
}

impl Checkpoints {
    /// Starts the thread for a running job.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn begin(shared: &RunContext, job: &Arc<RunningJob>, files: FileHistory) -> Result<Self> {
        if let Some(agents) = &job.agents {
            agents.set_mirror_mode(shared.config.mirror);
        }
        let [cancelled, is_ending, gives_way] = std::array::from_fn(|_| Arc::<AtomicBool>::default());
        let background = Arc::<Background>::default();
        let checkpointer = Checkpointer::new(CheckpointerParts {
            job: Arc::clone(job),
            dir: shared.opened.dir.clone(),
            lock: Arc::clone(&shared.opened.lock),
            staging_dir: shared.config.store.staging_dir(&shared.opened.dir),
            store: Arc::clone(&shared.opened.store),
            store_name: shared.config.store.name(),
            ownership: Arc::clone(&shared.claimed.ownership),
            identity: shared.opened.identity.clone(),
            criu: shared.opened.criu.clone(),
            precopy: shared.config.precopy,
            freeze_timeout: shared.config.freeze_timeout,
            mirror: shared.config.mirror,
            file_rules: Arc::clone(&shared.file_rules),
            retention: shared.config.retention(),
            status: Arc::clone(&shared.status),
            uploader: shared.uploader.clone(),
            persister: shared.persister.clone(),
            cancelled: Arc::clone(&cancelled),
            is_ending: Arc::clone(&is_ending),
            gives_way: Arc::clone(&gives_way),
            priority: Arc::clone(&background),
        });
        let (requests, inbox) = unbounded();
        let garbage = Arc::clone(&gives_way);
        let final_snapshot = Arc::new(AtomicU8::new(final_snapshot::PENDING));
        let failed = job.failed_process.clone();
        let (priority, state, events) =
            (Arc::clone(&background), Arc::clone(&final_snapshot), shared.events.clone());
        let work = move || {
            // The job has priority over storing its snapshots.
            priority.enter();
            let inbox = Inbox { requests: inbox, gives_way: garbage };
            serve(&checkpointer, files, failed, &inbox, &events, &state);
        };
        let thread = std::thread::Builder::new().name("checkpointer".to_owned()).spawn(work);
        let thread = thread.context("cannot start the checkpointing thread")?;
        Ok(Self { requests, thread, background, cancelled, is_ending, gives_way, final_snapshot })
    }

    /// Requests a snapshot; the result arrives as an [`Event::Attempted`].
    pub fn request(&self, answer: Option<Answer>, after_dump: AfterDump) {
        self.send(Request::Checkpoint(CheckpointRequest { answer, after_dump, part: None }));
    }

    /// Requests the space of deleted snapshots, once the checkpoint in progress is over.
    pub fn reclaim(&self, answer: Answer) {
        self.send(Request::Reclaim(answer));
    }

    fn send(&self, request: Request) {
        let is_last = match &request {
            Request::Checkpoint(request) => request.after_dump != AfterDump::KeepRunning,
            Request::Reclaim(_) => false,
            Request::End => true,
        };
        // The thread runs until this is dropped.
        let _ = self.requests.send(request);
        // In this order: see `Inbox::is_idle`.
        if is_last {
            self.gives_way.store(true, Ordering::SeqCst);
        }
    }

    /// Requests this node's part of a snapshot; the result arrives as an [`Event::Attempted`].
    pub fn request_part(&self, part: PartAttempt) {
        let after_dump = AfterDump::KeepRunning;
        self.send(Request::Checkpoint(CheckpointRequest { answer: None, after_dump, part: Some(part) }));
    }

    /// Withdraws the request for the final snapshot. Returns false if that snapshot has already begun.
    #[must_use]
    pub fn withdraw_final(&self) -> bool {
        let (from, to) = (final_snapshot::PENDING, final_snapshot::WITHDRAWN);
        self.final_snapshot.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Gives up the snapshot that is being stored: it is not needed any more.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether [`Self::cancel`] was called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// The job is ending, and storing is all that is left to do: raises the thread's priority to normal, and ends the wait
    /// for a consistent cut, except for the final snapshot.
    pub fn hurry(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
        self.background.hurry();
    }

    /// The job is being stopped on all its nodes: raises the thread's priority. The attempt in progress may be the last one.
    pub fn hurry_part(&self) {
        self.background.hurry();
    }

    /// The job runs on after all: undoes [`Self::hurry`].
    pub fn relax(&self) {
        self.is_ending.store(false, Ordering::Relaxed);
        self.background.relax();
    }

    /// Ends the thread once all requests are served, and waits for that, for `limit` at most.
    pub fn end(self, limit: Option<Duration>) {
        self.send(Request::End);
        let deadline = limit.map(|limit| Instant::now() + limit);
        while !self.thread.is_finished() && deadline.is_none_or(|deadline| Instant::now() < deadline) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The requests, as the thread sees them.
struct Inbox {
    requests: Receiver<Request>,
    /// Garbage collection stops.
    gives_way: Arc<AtomicBool>,
}

impl Inbox {
    /// Whether nothing is requested, so that garbage collection may begin. The request for the last snapshot of the session,
    /// and its end, stop it from now on.
    fn is_idle(&self) -> bool {
        self.gives_way.store(false, Ordering::SeqCst);
        self.requests.is_empty()
    }
}

/// Garbage collection has time. It begins while nothing is requested, and gives way to the last snapshot.
fn collect(
    checkpointer: &Checkpointer,
    history: &mut AttemptHistory,
    inbox: &Inbox,
    is_saved: bool,
) -> Result<(), String> {
    if !inbox.is_idle() {
        return Err(GIVES_WAY.to_owned());
    }
    let collect = std::panic::AssertUnwindSafe(|| checkpointer.collect_garbage(history, is_saved));
    std::panic::catch_unwind(collect).unwrap_or_else(|_| Err("garbage collection has crashed".to_owned()))
}

fn serve(
    checkpointer: &Checkpointer,
    files: FileHistory,
    failed: Option<FailedProcess>,
    inbox: &Inbox,
    events: &Sender<Event>,
    final_snapshot: &AtomicU8,
) {
    let mut history = AttemptHistory::new(files, failed);
    let mut is_saved = false;
    while let Ok(request) = inbox.requests.recv() {
        let CheckpointRequest { answer, after_dump, part } = match request {
            Request::Checkpoint(request) => request,
            Request::Reclaim(answer) => {
                history.has_garbage = true;
                let collected = collect(checkpointer, &mut history, inbox, is_saved);
                let _ = answer.send(collected.map_or_else(Reply::Error, |()| Reply::Reclaimed));
                continue;
            }
            Request::End => return,
        };
        let is_final = after_dump != AfterDump::KeepRunning;
        let is_wanted = !is_final
            || final_snapshot.swap(final_snapshot::BEGUN, Ordering::SeqCst) != final_snapshot::WITHDRAWN;
        let gate = part.as_ref().map(|part| Arc::clone(&part.gate));
        let destination = match &gate {
            Some(gate) if !gate.is_durable() => Destination::Memory,
            None if answer.is_none() && !is_final => Destination::MemoryOrStore,
            _ => Destination::Store,
        };
        let result = if is_wanted {
            // A bug in ckpt-run costs this one checkpoint, neither the job nor the next checkpoint.
            let attempt = std::panic::AssertUnwindSafe(|| {
                checkpointer.attempt(&mut history, after_dump, destination, part)
            });
            std::panic::catch_unwind(attempt).unwrap_or(Err(AttemptError::Crashed))
        } else {
            Err(AttemptError::Withdrawn)
        };
        if is_final && result.is_err() {
            // The job may run on, and be ended later.
            final_snapshot.store(final_snapshot::PENDING, Ordering::SeqCst);
        }
        if let (Some(gate), Err(error)) = (gate, &result) {
            let lacks_memory = destination == Destination::Memory && error.is_of_memory();
            gate.fail(&error.to_string(), if lacks_memory { Blame::Memory } else { Blame::Node });
        }
        is_saved = result.is_ok();
        if events.send(Event::Attempted { result, answer, after_dump }).is_err() {
            return;
        }
        if !is_final
            && !checkpointer.is_cancelled()
            && let Err(why) = collect(checkpointer, &mut history, inbox, is_saved)
        {
            tracing::debug!("garbage is left in the store: {why}");
        }
    }
}
