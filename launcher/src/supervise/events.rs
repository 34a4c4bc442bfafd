//! The events that the supervisor serves, and the thread that turns signals into events.

use crate::agents::Loss;
use crate::checkpoint::attempt::{AfterDump, AttemptError};
use crate::cluster::Notice;
use crate::namespace::InitEvent;
use crate::namespace::stdio;
use crate::observe::control_server::Answer;
use crate::sys::error::EXIT_PREEMPTED;
use anyhow::{Context, Result};
use ckpt_protocol::control::Saved;
use crossbeam_channel::Sender;
use parking_lot::Mutex;
use procfs_core::FromRead as _;
use procfs_core::process::Status;
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// Signals with which people and schedulers end a job.
const STOPPING: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

/// An event.
pub enum Event {
    /// A message from the job's init.
    Init(InitEvent),
    /// ckpt-run received a signal.
    Signal(i32),
    /// A command requests a snapshot.
    CheckpointRequested(Answer),
    /// A command has deleted snapshots, and requests their space.
    ReclaimRequested(Answer),
    /// The job is preempted or stopped: the reason, and the caller that waits for it.
    Preempt(String, Option<StopCall>),
    /// A process has lost its GPU state.
    Lost(Loss),
    /// The job hangs.
    Hung(Hang),
    /// The part here of a job on several nodes does nothing, for as long as a job would hang.
    Idle(Hang),
    /// It works again.
    Works {
        /// The init of its session.
        init_pid: i32,
    },
    /// News from the other nodes of the job.
    Nodes(Notice),
    /// A checkpoint is over.
    Attempted {
        /// The snapshot, or why there is none.
        result: Result<Saved, AttemptError>,
        /// The caller that waits for it.
        answer: Option<Answer>,
        /// What happened to the job.
        after_dump: AfterDump,
    },
}

/// A call of `ckpt-run stop`.
pub struct StopCall {
    /// The caller.
    pub answer: Answer,
    /// Whether the job is ended even if it cannot be saved.
    pub force: bool,
}

/// A job that makes no progress.
#[derive(Debug)]
pub struct Hang {
    /// The init of the session that hangs: another session may have begun since.
    pub init_pid: i32,
    /// What hangs, for people.
    pub what: String,
    /// The last progress.
    pub since: SystemTime,
    /// Where the stacks are saved, if that succeeded.
    pub stacks: Option<PathBuf>,
}

impl Hang {
    /// What hangs, and where its stacks are.
    #[must_use]
    pub fn describe(&self) -> String {
        let stacks = self.stacks.as_ref().map(|at| format!("; stacks are in {}", at.display()));
        format!("{}{}", self.what, stacks.unwrap_or_default())
    }
}

/// Whether a signal asks the job to end.
#[must_use]
pub fn is_stopping(signal: i32) -> bool {
    STOPPING.contains(&signal)
}

/// The name of a signal, for messages.
#[must_use]
pub fn name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

/// Receives signals.
pub struct Signals {
    /// ckpt-run is starting or resuming the job, and serves no events.
    busy: Arc<AtomicBool>,
    served: Arc<Mutex<Option<Served>>>,
}

/// What signals are for, once the job is claimed.
struct Served {
    /// `None` while nobody serves them.
    events: Option<Sender<Event>>,
    /// Runs before a signal ends ckpt-run at once.
    last_act: Box<dyn Fn() + Send>,
}

impl Signals {
    /// Receives signals from now on. Those that were ignored at the start stay ignored, in ckpt-run and in the job (nohup).
    /// `preempting` are the signals of `--on-signal`. Until [`Self::serve`], a signal that asks the job to end ends ckpt-run
    /// at once, and others have no effect.
    ///
    /// # Errors
    /// When the signal handlers or the thread cannot be set up.
    pub fn listen(preempting: Vec<i32>) -> Result<Self> {
        let passed_on = [SIGUSR1, SIGUSR2, SIGCONT, SIGWINCH];
        let wanted: BTreeSet<i32> =
            STOPPING.into_iter().chain(passed_on).chain(preempting.iter().copied()).collect();
        let wanted = wanted.into_iter().filter(|&signal| !is_ignored(signal));
        let mut signals = signal_hook::iterator::Signals::new(wanted).context("cannot listen for signals")?;
        let (busy, served) = (Arc::new(AtomicBool::new(true)), Arc::new(Mutex::new(None::<Served>)));
        let (is_busy, server) = (Arc::clone(&busy), Arc::clone(&served));
        let listen = move || {
            for signal in signals.forever() {
                let server = server.lock();
                if is_busy.load(Ordering::SeqCst) && (is_stopping(signal) || preempting.contains(&signal)) {
                    end_at_once(signal, &preempting, server.as_ref());
                }
                let events = server.as_ref().and_then(|server| server.events.as_ref());
                if events.is_some_and(|events| events.send(Event::Signal(signal)).is_err()) {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("signals".to_owned()).spawn(listen);
        thread.context("cannot listen for signals")?;
        Ok(Self { busy, served })
    }

    /// Has `last_act` run before a signal ends ckpt-run at once.
    pub fn before_end(&self, last_act: impl Fn() + Send + 'static) {
        *self.served.lock() = Some(Served { events: None, last_act: Box::new(last_act) });
    }

    /// Turns signals into events from now on. `last_act` runs before a signal ends ckpt-run at once.
    pub fn serve(&self, events: Sender<Event>, last_act: impl Fn() + Send + 'static) {
        *self.served.lock() = Some(Served { events: Some(events), last_act: Box::new(last_act) });
        self.busy.store(false, Ordering::SeqCst);
    }

    /// Serves no events any more: from now on, a signal that asks the job to end ends ckpt-run at once.
    pub fn serve_no_more(&self) {
        self.busy.store(true, Ordering::SeqCst);
    }

    /// Runs `work`, during which no events are served. A signal that asks the job to end then ends ckpt-run at once: the
    /// job has not run since its last snapshot.
    pub fn while_busy<T>(&self, work: impl FnOnce() -> T) -> T {
        self.busy.store(true, Ordering::SeqCst);
        let result = work();
        self.busy.store(false, Ordering::SeqCst);
        result
    }
}

fn end_at_once(signal: i32, preempting: &[i32], server: Option<&Served>) -> ! {
    let code = if preempting.contains(&signal) { EXIT_PREEMPTED } else { 128 + signal };
    tracing::info!(
        "received {} while the job was being started or resumed: ckpt-run ends at once. Run the same command again to resume",
        name(signal)
    );
    if let Some(server) = server {
        (server.last_act)();
    }
    stdio::restore_terminal();
    // The job's namespace ends with this process.
    std::process::exit(code)
}

fn is_ignored(signal: i32) -> bool {
    let status = Status::from_file("/proc/self/status");
    status.is_ok_and(|status| status.sigign >> (signal - 1) & 1 == 1)
}
