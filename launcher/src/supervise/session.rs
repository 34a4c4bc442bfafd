//! One job session: one process tree of the job, from its start or resume to its end.
//!
//! ```text
//!               ┌─────────── checkpointing (in a separate thread) ◄── timer, call
//!               ▼                                                │
//!   begun ──► running ──────────────────────────────────────────►│ the job ends ──► stored ──► over
//!               │ preempted, stopped                             │                    ▲
//!               ▼                                                │                    │
//!             saving (the dump ends the job) ── is dumped ───────┘                    │
//!               │ cannot be saved                                                     │
//!               ▼                                                                     │
//!             terminating (SIGTERM), for the rest of the grace period ────────────────┤
//!               │ the grace period is over, or a second signal, from any state above  │
//!               ▼                                                                     │
//!             killed ─────────────────────────────────────────────────────────────────┘
//! ```
//!
//! A checkpoint that is in progress when the job fails is stored first: the restart needs it. A job that has lost its
//! GPU state cannot continue and is killed. The states from "saving" on are in `session/ending.rs`.

mod ending;
mod nodes;

use super::checkpoints::Checkpoints;
use super::events::{self, Event, Hang};
use super::pace::{Pace, PaceOptions};
use super::services::RunContext;
use super::watchdog::{Watchdog, Watched};
use crate::agents::{Agents, Loss};
use crate::checkpoint::attempt::{AfterDump, AttemptError};
use crate::checkpoint::running_job::RunningJob;
use crate::checkpoint::stall::stall_us;
use crate::cluster::{Cluster, EndedPart};
use crate::job::alive::Heartbeat;
use crate::job::journal::{Entry, EventKind, Measured};
use crate::job::status::cut_text;
use crate::namespace::InitEvent;
use crate::namespace::processes;
use crate::observe::control_server::Answer;
use crate::report::failure::with_remedy;
use crate::restore::huge_pages;
use crate::sys::deadline::{CHECKPOINT_FIRST_RETRY, REPEATED_KEY_WINDOW, REPEATED_SIGNAL_WINDOW};
use crate::sys::error::EXIT_OWN;
use anyhow::{Context, Result};
use ckpt_protocol::control::{Reply, Saved};
use ckpt_snapshot::Manifest;
use crossbeam_channel::Receiver;
use ending::Ending;
pub(super) use ending::{SessionEnd, SessionOutcome};
use signal_hook::consts::{SIGINT, SIGQUIT, SIGWINCH};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A running job and its checkpoints.
pub(super) struct JobSession<'a> {
    shared: &'a RunContext<'a>,
    job: Arc<RunningJob>,
    begun: Instant,
    begun_at: SystemTime,
    _watchdog: Option<Watchdog>,
    pace: Pace,
    next_checkpoint: Option<Instant>,
    failures_in_a_row: u32,
    /// When its snapshots were taken, without those of a job that may be about to fail.
    snapshot_times: Vec<SystemTime>,
    checkpoints: Checkpoints,
    /// Checkpoints that were requested and have not been answered.
    pending_checkpoints: u32,
    losses: Receiver<Loss>,
    /// The first loss of GPU state: the job is killed because of it.
    loss: Option<Loss>,
    /// The hang because of which the job is killed.
    hang: Option<Hang>,
    /// All processes of the job have been killed.
    is_killed: bool,
    /// When the user last asked the job to end.
    user_stop: Option<Instant>,
    /// The signal that began the ending, and when it came.
    ending_signal: Option<(i32, Instant)>,
    ending: Option<Ending>,
    /// The job's exit code, once it has ended.
    exit_code: Option<i32>,
    /// When that was.
    ended_at: Option<SystemTime>,
    /// Of a job on several nodes.
    nodes: nodes::Nodes,
    _heartbeat: Heartbeat,
}

impl<'a> JobSession<'a> {
    /// Begins the session of a running job, which was `resumed_from` a snapshot or started from the beginning.
    ///
    /// # Errors
    /// When the job's output cannot be relayed, or a thread cannot be started.
    pub(super) fn begin(
        shared: &'a RunContext<'a>,
        mut job: RunningJob,
        resumed_from: Option<&Manifest>,
    ) -> Result<Self> {
        let events = shared.events.clone();
        let interrupt = move || drop(events.send(Event::Signal(SIGINT)));
        let saves = shared.config.on_signal.contains(&SIGINT);
        job.stdio
            .start(resumed_from.map(|manifest| &manifest.stdio[..]), saves.then(|| Box::new(interrupt) as _))
            .context("cannot relay the job's output")?;
        shared.status.writes_to(job.stdio.tail());
        let losses =
            job.agents.as_ref().map_or_else(crossbeam_channel::never, |agents| agents.losses.clone());
        let files = std::mem::take(&mut job.files);
        let is_tracked = files.is_tracked();
        let job = Arc::new(job);
        if resumed_from.is_some() {
            let tree = job.tree();
            huge_pages::merge_in_background(move || {
                processes(tree).into_iter().map(|(pid, _)| pid).collect()
            });
        }
        let config = shared.config;
        let options = PaceOptions { interval: config.interval, overhead: config.overhead, mtbf: config.mtbf };
        let mut session = Self {
            shared,
            _watchdog: start_watchdog(shared, &job)?,
            begun: Instant::now(),
            begun_at: SystemTime::now(),
            pace: Pace::new(options),
            next_checkpoint: None,
            failures_in_a_row: 0,
            snapshot_times: Vec::new(),
            checkpoints: Checkpoints::begin(shared, &job, files)?,
            job,
            pending_checkpoints: 0,
            losses,
            loss: None,
            hang: None,
            is_killed: false,
            user_stop: None,
            ending_signal: None,
            ending: None,
            exit_code: None,
            ended_at: None,
            nodes: nodes::Nodes::default(),
            _heartbeat: Heartbeat::begin(&shared.opened.dir, is_tracked)?,
        };
        if let Some(manifest) = resumed_from {
            let stall = Duration::try_from_secs_f64(manifest.stall_s).unwrap_or_default();
            session.pace.measure(stall, Duration::ZERO);
        }
        let pace = &session.pace;
        session.schedule(if resumed_from.is_some() { pace.interval() } else { pace.first() });
        Ok(session)
    }

    fn schedule(&mut self, after: Option<Duration>) {
        let after = after.filter(|_| self.ending.is_none() && self.exit_code.is_none() && self.decides());
        self.next_checkpoint = after.map(|after| Instant::now() + after);
        self.shared.status.set_next(after);
    }

    /// Serves events until the job has ended and its last snapshot is stored.
    #[must_use]
    pub(super) fn serve(mut self) -> SessionEnd {
        loop {
            match self.next_event() {
                Some(Event::Init(InitEvent::Exited { pid, code })) if pid == self.job.root_pid => {
                    self.job_ended(code);
                }
                Some(Event::Init(InitEvent::Exited { .. })) => {}
                Some(Event::Init(InitEvent::Ended)) => {
                    tracing::error!("the job's namespace was ended by another process");
                    self.exit_code = Some(EXIT_OWN);
                    if let Some(cluster) = self.shared.nodes {
                        let why = "its namespace was ended by another process".to_owned();
                        cluster.part_ended(EndedPart { why: Some(why), ..EndedPart::own(EXIT_OWN) });
                    }
                }
                Some(Event::Signal(signal)) => self.signal(signal),
                Some(Event::CheckpointRequested(answer)) => {
                    self.request_checkpoint(Some(answer), AfterDump::KeepRunning);
                }
                Some(Event::ReclaimRequested(answer)) => self.checkpoints.reclaim(answer),
                Some(Event::Preempt(why, call)) => self.preempt(&why, call, None),
                Some(Event::Lost(loss)) => self.end_after_loss(loss),
                Some(Event::Hung(hang)) => self.end_hung(hang),
                Some(Event::Idle(hang)) => self.part_is_idle(&hang),
                Some(Event::Works { init_pid }) => self.part_works(init_pid),
                Some(Event::Nodes(notice)) => self.node_notice(notice),
                Some(Event::Attempted { result, answer, after_dump }) => {
                    self.attempted(result, answer, after_dump);
                }
                None => self.timer_expired(),
            }
            if self.is_over() {
                return self.finish();
            }
        }
    }

    fn next_event(&self) -> Option<Event> {
        let deadline = self.ending.as_ref().map(Ending::next_deadline);
        let next = self.next_checkpoint.into_iter().chain(deadline).min();
        let timer = next.map_or_else(crossbeam_channel::never, crossbeam_channel::at);
        let news = match self.exit_code {
            None => self.job.namespace.events().clone(),
            Some(_) => crossbeam_channel::never(),
        };
        let never = crossbeam_channel::never();
        let nodes = self.shared.nodes.filter(|_| self.nodes.end.is_none());
        let nodes = nodes.map_or(&never, Cluster::notices);
        crossbeam_channel::select! {
            recv(nodes) -> notice => notice.ok().map(Event::Nodes),
            recv(self.shared.inbox) -> event => event.ok(),
            recv(self.losses) -> loss => loss.ok().map(Event::Lost),
            recv(news) -> event => Some(Event::Init(event.unwrap_or(InitEvent::Ended))),
            recv(timer) -> _ => None,
        }
    }

    /// The interval is over, or a deadline of the ending has passed.
    fn timer_expired(&mut self) {
        if self.ending.is_some() {
            return self.ending_timer_expired();
        }
        // While a checkpoint is being stored, the next one waits for it.
        if self.pending_checkpoints == 0 && self.exit_code.is_none() {
            self.request_checkpoint(None, AfterDump::KeepRunning);
        } else {
            self.schedule(None);
        }
    }

    fn request_checkpoint(&mut self, answer: Option<Answer>, after_dump: AfterDump) {
        if let Some(cluster) = self.shared.nodes {
            return self.request_of_all(cluster, answer);
        }
        if self.ending.is_some() && after_dump == AfterDump::KeepRunning {
            let reply = Reply::Error("the job is being ended, with a last snapshot".to_owned());
            let _ = answer.map(|answer| answer.send(reply));
            return;
        }
        self.pending_checkpoints += 1;
        self.schedule(None);
        self.checkpoints.request(answer, after_dump);
    }

    fn attempted(
        &mut self,
        result: Result<Saved, AttemptError>,
        answer: Option<Answer>,
        after_dump: AfterDump,
    ) {
        self.pending_checkpoints -= 1;
        let ended = || Reply::Error("the job has ended".to_owned());
        let reply = match result {
            Ok(saved) => {
                self.saved(&saved, after_dump);
                Reply::Checkpointed(Box::new(saved))
            }
            Err(AttemptError::JobEnded | AttemptError::Withdrawn) => ended(),
            Err(_) if self.checkpoints.is_cancelled() => ended(),
            Err(error) => {
                self.failures_in_a_row += 1;
                let message = with_remedy(&error.into());
                if after_dump == AfterDump::KeepRunning {
                    self.report_failure(&message);
                } else {
                    self.final_snapshot_failed(&message);
                }
                Reply::Error(message)
            }
        };
        self.attempt_ended(&reply);
        let _ = answer.map(|answer| answer.send(reply));
        let retry = CHECKPOINT_FIRST_RETRY.saturating_mul(1 << (self.failures_in_a_row.max(1) - 1).min(16));
        let interval = self.pace.interval();
        let after =
            interval.map(|interval| if self.failures_in_a_row > 0 { retry.min(interval) } else { interval });
        self.schedule(after);
    }

    fn saved(&mut self, saved: &Saved, after_dump: AfterDump) {
        self.failures_in_a_row = 0;
        if !saved.is_doubtful {
            self.snapshot_times.push(UNIX_EPOCH + Duration::from_millis(saved.taken_unix_ms));
        }
        let seconds = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        self.pace.measure(seconds(saved.stall_s), seconds(saved.durable_s));
        let cut = saved.cut.as_ref().map(|cut| format!(" ({})", cut_text(cut.duration_s, cut.attempts)));
        let what = format!(
            "{:.1} MB, the job was paused for {:.2} s{}, stored in {:.1} s",
            saved.bytes as f64 / 1e6,
            saved.stall_s,
            cut.unwrap_or_default(),
            saved.durable_s
        );
        let keeps_running = after_dump == AfterDump::KeepRunning;
        let next = self.pace.interval().filter(|_| self.pace.is_measured() && keeps_running);
        let next = next.map(|next| format!("; the next in {:.0} s", next.as_secs_f64()));
        let (kind, how) = match saved.in_memory {
            true => (EventKind::InMemory, "kept in memory"),
            false => (EventKind::Saved, "saved"),
        };
        tracing::info!("snapshot {} {how}: {what}{}", saved.id, next.unwrap_or_default());
        let measured = Measured {
            taken_unix_ms: Some(saved.taken_unix_ms),
            stall_us: Some(stall_us(saved.stall_s)),
            stall_phases: saved.stall_phases.as_deref().copied(),
            durable_ms: Some(seconds(saved.durable_s).as_millis() as u64),
            bytes: Some(saved.bytes),
            stored_bytes: saved.stored_bytes,
            changed_bytes: saved.changed_bytes,
            ..Measured::default()
        };
        let entry = Entry::new(kind, what).snapshot(Some(&saved.id)).measured(measured);
        self.shared.opened.journal.add(&entry);
        if let (AfterDump::End(_), Some(ending)) = (after_dump, &mut self.ending) {
            ending.saved = Some(saved.clone());
        }
    }

    /// Reports each reason once, not at every attempt for weeks.
    fn report_failure(&self, message: &str) {
        // Names of logs differ from one attempt to the next; the reason comes before them.
        let reason = message.split(" CRIU's log is in").next().unwrap_or(message);
        if self.shared.status.failed(reason) {
            tracing::warn!("no snapshot this time; the job runs on: {message}");
            let remedy = "fix the named cause; the job continues, and ckpt-run retries at the next interval";
            let entry = Entry::new(EventKind::NotSaved, message).remedy(Some(remedy));
            self.shared.opened.journal.add(&entry);
        } else {
            tracing::debug!("no snapshot again: {message}");
        }
    }

    fn signal(&mut self, signal: i32) {
        let is_preempting = self.shared.config.on_signal.contains(&signal);
        let is_ending = is_preempting || events::is_stopping(signal);
        if let Some(cluster) = self.shared.nodes.filter(|_| is_preempting) {
            return self.signal_to_all(cluster, signal);
        }
        if let Some(ending) = self.ending.as_mut().filter(|_| is_ending) {
            if self.ending_signal.is_some_and(|before| repeats(before, signal)) {
                return tracing::debug!("{} has come again", events::name(signal));
            }
            ending.terminate_within(self.shared.config.grace);
            // A file or a probe may have begun the ending; the scheduler's signal is then the first one.
            if !std::mem::replace(&mut ending.signalled, true) {
                self.ending_signal = Some((signal, Instant::now()));
                let name = events::name(signal);
                return tracing::info!(
                    "received {name}: the job is being ended with a snapshot already. Another signal ends it at once"
                );
            }
            return self.kill(format!("received a second signal ({})", events::name(signal)));
        }
        if is_preempting {
            self.ending_signal = Some((signal, Instant::now()));
            return self.preempt(&format!("received {}", events::name(signal)), None, Some(signal));
        }
        if signal == SIGWINCH {
            return self.job.stdio.resize();
        }
        if events::is_stopping(signal) {
            self.user_stop = Some(Instant::now());
        }
        self.forward_signal(signal);
    }

    fn forward_signal(&self, signal: i32) {
        // As a terminal does: these two go to the whole process group of the command.
        let group = signal == SIGINT || signal == SIGQUIT;
        if let Err(error) = self.job.namespace.signal(self.job.command_pid, group, signal) {
            tracing::debug!("signal {signal} was not forwarded: {error}");
        }
    }
}

/// Whether a signal is that of `before` once more: `timeout` and some schedulers signal the process and then its group. A
/// key is pressed again on purpose.
fn repeats((first, at): (i32, Instant), signal: i32) -> bool {
    let is_key = signal == SIGINT || signal == SIGQUIT;
    first == signal && at.elapsed() < if is_key { REPEATED_KEY_WINDOW } else { REPEATED_SIGNAL_WINDOW }
}

/// Starts the watchdog, if there is something that it can watch.
fn start_watchdog(shared: &RunContext, job: &RunningJob) -> Result<Option<Watchdog>> {
    let config = shared.config;
    if config.hang_timeout.is_none() && job.agents.is_none() {
        return Ok(None);
    }
    let watched = Watched {
        tree: job.tree(),
        activity_probe: job.agents.as_ref().map(Agents::activity_probe),
        nodes: shared.nodes.map(Cluster::rank_reports),
        timeout: config.hang_timeout,
        every: config.monitor_interval,
        dir: shared.opened.dir.clone(),
        status: Arc::clone(&shared.status),
        journal: Arc::clone(&shared.opened.journal),
    };
    Watchdog::begin(watched, shared.events.clone()).map(Some)
}
