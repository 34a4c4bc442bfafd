//! One life of the job, from its start or resume to its end. This module owns what happens in between:
//!
//! ```text
//!               ┌─────────── checkpointing (in a thread of its own) ◄── timer, call
//!               ▼                                                │
//!   begun ──► running ──────────────────────────────────────────►│ the job ends ──► stored ──► over
//!               │ preempted, stopped                             │                    ▲
//!               ▼                                                │                    │
//!             saving (the dump ends the job) ── is dumped ───────┘                    │
//!               │ cannot be saved                                                     │
//!               ▼                                                                     │
//!             asked to end (SIGTERM), what is left of the grace ──────────────────────┤
//!               │ grace is over, or a second signal, from anywhere in here            │
//!               ▼                                                                     │
//!             killed ─────────────────────────────────────────────────────────────────┘
//! ```
//!
//! A checkpoint that was under way when the job failed is stored first: it is needed then. A job that has lost its
//! state on the GPU cannot run on: it is killed.

use super::checkpoints::Checkpoints;
use super::events::{self, Event, Hang};
use super::pace::{Pace, Wanted};
use super::services::RunContext;
use super::stacks::Tree;
use super::watchdog::{Watchdog, Watched};
use crate::agents::{Agents, Loss};
use crate::checkpoint::attempt::{AfterDump, AttemptError};
use crate::checkpoint::running_job::RunningJob;
use crate::job::journal::{Entry, Kind};
use crate::job::ownership::OwnershipError;
use crate::namespace::InitEvent;
use crate::observe::control_server::Answer;
use crate::report::failure::with_remedy;
use crate::sys::deadline::STORE_RETRY_TIMEOUT;
use crate::sys::deadline::within;
use crate::sys::deadline::{
    CANCELLED_CHECKPOINT_TIMEOUT, CHECKPOINT_FIRST_RETRY, KILLED_JOB_REPORT_TIMEOUT, LAST_OUTPUT_TIMEOUT,
    LEFTOVER_EXIT_TIMEOUT, OUTCOME_WRITE_TIMEOUT, USER_STOP_WINDOW,
};
use crate::sys::error::{EXIT_OWN, EXIT_PREEMPTED};
use anyhow::{Context, Result, anyhow};
use ckpt_protocol::control::{Reply, Saved, Stopped};
use ckpt_snapshot::{JobOutcome, Manifest};
use crossbeam_channel::Receiver;
use signal_hook::consts::{SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGWINCH};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
/// How a life ended.
#[derive(Debug)]
pub enum How {
    /// The command ended with 0.
    Complete,
    /// It failed.
    Failed {
        /// The exit code of ckpt-run if nothing follows.
        code: i32,
        /// What happened.
        what: String,
        /// What is said at the end if nothing follows, where that is our own error.
        error: Option<anyhow::Error>,
        /// When it began to hang, if it did: later snapshots are of a job that hangs.
        hung_since: Option<SystemTime>,
    },
    /// Its user asked it to end.
    Asked {
        /// Its exit code.
        code: i32,
    },
    /// The machine was wanted, or it was stopped: exit code 75.
    Preempted {
        /// The end of the grace.
        until: Instant,
        /// A signal asked for it: another one ends everything at once.
        signalled: bool,
    },
}

impl How {
    fn hung(hang: &Hang, code: i32) -> Self {
        let stacks = hang.stacks.as_ref().map(|at| format!("; stacks are in {}", at.display()));
        let what = format!("it hung: {}{}", hang.what, stacks.unwrap_or_default());
        Self::Failed { code, what, error: None, hung_since: Some(hang.since) }
    }
}

/// The end of a life.
pub struct Ended {
    /// How.
    pub how: How,
    /// How long it lasted.
    pub lived: Duration,
    /// When its last snapshot was taken, after it had begun; of a job that hung, the last before that.
    pub saved_after: Option<Duration>,
}

/// The job is being ended, with a snapshot if that works.
struct Ending {
    deadline: Instant,
    /// When the job is asked to end by itself if its last snapshot has not begun by then.
    ask_at: Instant,
    /// A signal asked for it: another one ends the job at once.
    signalled: bool,
    /// Who waits for it.
    answers: Vec<Answer>,
    saved: Option<Saved>,
    /// Why there is no snapshot.
    problem: Option<String>,
    /// The job was asked to end by itself.
    asked: bool,
    /// It was killed; nothing is waited for any more.
    killed: bool,
}

/// A running job.
pub struct Life<'a> {
    shared: &'a RunContext<'a>,
    job: Arc<RunningJob>,
    begun: Instant,
    begun_at: SystemTime,
    _watchdog: Option<Watchdog>,
    pace: Pace,
    next: Option<Instant>,
    failures_in_a_row: u32,
    /// When its snapshots were taken.
    taken: Vec<SystemTime>,
    checkpoints: Checkpoints,
    /// Those that were asked for and not been answered.
    under_way: u32,
    losses: Receiver<Loss>,
    /// The first of them: the job is being ended for it.
    lost: Option<Loss>,
    /// It hangs: it is being ended for it.
    hung: Option<Hang>,
    /// When its user asked the job to end.
    asked: Option<Instant>,
    ending: Option<Ending>,
    /// The job's exit code, once it has ended.
    code: Option<i32>,
}

impl<'a> Life<'a> {
    /// Begins to serve a job that runs, `resumed_from` a snapshot or from its beginning.
    ///
    /// # Errors
    /// When its output cannot be relayed, or a thread cannot be started.
    pub fn begin(
        shared: &'a RunContext<'a>,
        mut job: RunningJob,
        resumed_from: Option<&Manifest>,
    ) -> Result<Self> {
        job.stdio
            .start(resumed_from.map(|manifest| &manifest.stdio[..]))
            .context("cannot relay the job's output")?;
        let losses =
            job.agents.as_ref().map_or_else(crossbeam_channel::never, |agents| agents.losses().clone());
        let job = Arc::new(job);
        let config = shared.config;
        let watchdog = config.hang_timeout.map(|limit| {
            let (dir, status, events) =
                (shared.opened.dir.clone(), Arc::clone(&shared.status), shared.events.clone());
            let tree = Tree { init_pid: job.namespace.init_pid(), root_pid: job.root_pid };
            let watched = Watched { tree, onlooker: job.agents.as_ref().map(Agents::onlooker) };
            Watchdog::begin(watched, limit, config.monitor_interval, dir, status, events)
        });
        let mut life = Self {
            shared,
            _watchdog: watchdog.transpose()?,
            begun: Instant::now(),
            begun_at: SystemTime::now(),
            pace: Pace::new(Wanted {
                interval: config.interval,
                overhead: config.overhead,
                mtbf: config.mtbf,
            }),
            next: None,
            failures_in_a_row: 0,
            taken: Vec::new(),
            checkpoints: Checkpoints::begin(shared, &job)?,
            job,
            under_way: 0,
            losses,
            lost: None,
            hung: None,
            asked: None,
            ending: None,
            code: None,
        };
        if let Some(manifest) = resumed_from {
            let stall = Duration::try_from_secs_f64(manifest.stall_s).unwrap_or_default();
            life.pace.measure(stall, Duration::ZERO);
        }
        life.schedule(life.pace.interval());
        Ok(life)
    }

    fn schedule(&mut self, after: Option<Duration>) {
        let after = after.filter(|_| self.ending.is_none() && self.code.is_none());
        self.next = after.map(|after| Instant::now() + after);
        self.shared.status.set_next(after);
    }

    /// Serves events until the job has ended and what is being stored is stored.
    #[must_use]
    pub fn serve(mut self) -> Ended {
        loop {
            match self.next_event() {
                Some(Event::Init(InitEvent::Exited { pid, code })) if pid == self.job.root_pid => {
                    self.job_ended(code);
                }
                Some(Event::Init(InitEvent::Exited { .. })) => {}
                Some(Event::Init(InitEvent::Gone)) => {
                    tracing::error!("the job's namespace was ended from outside");
                    self.code = Some(EXIT_OWN);
                }
                Some(Event::Signal(signal)) => self.signal(signal),
                Some(Event::Wanted(answer)) => self.want(Some(answer), AfterDump::KeepRunning),
                Some(Event::Preempt(why, answer)) => self.preempt(&why, answer, false),
                Some(Event::Lost(loss)) => self.end_for(loss),
                Some(Event::Hung(hang)) => self.end_hung(hang),
                Some(Event::Attempted { result, answer, after_dump }) => {
                    self.attempted(result, answer, after_dump);
                }
                None => self.time_is_over(),
            }
            if self.is_over() {
                return self.finish();
            }
        }
    }

    fn next_event(&self) -> Option<Event> {
        let deadline = self.ending.as_ref().map(|ending| {
            if ending.is_asked_in_time() { ending.deadline } else { ending.ask_at.min(ending.deadline) }
        });
        let next = self.next.into_iter().chain(deadline).min();
        let timer = next.map_or_else(crossbeam_channel::never, crossbeam_channel::at);
        let news = match self.code {
            None => self.job.namespace.news().clone(),
            Some(_) => crossbeam_channel::never(),
        };
        crossbeam_channel::select! {
            recv(self.shared.inbox) -> event => event.ok(),
            recv(self.losses) -> loss => loss.ok().map(Event::Lost),
            recv(news) -> event => Some(Event::Init(event.unwrap_or(InitEvent::Gone))),
            recv(timer) -> _ => None,
        }
    }

    fn is_over(&self) -> bool {
        let is_killed = self.ending.as_ref().is_some_and(|ending| ending.killed);
        let is_late = || self.ending.as_ref().is_some_and(|ending| ending.deadline <= Instant::now());
        match self.code {
            Some(_) => self.under_way == 0 || is_killed,
            None => is_killed && is_late(),
        }
    }

    /// The interval is over, or the grace.
    fn time_is_over(&mut self) {
        match &self.ending {
            Some(ending) if !ending.killed && ending.deadline <= Instant::now() => {
                let grace = humantime::format_duration(self.shared.config.grace);
                self.kill(format!("it was not durable within {grace} (--grace)"));
            }
            Some(ending) if !ending.is_asked_in_time() && ending.ask_at <= Instant::now() => {
                self.ask_in_time();
            }
            Some(_) => {}
            // An interval that is over while a checkpoint is being stored waits for it.
            None if self.under_way == 0 && self.code.is_none() => self.want(None, AfterDump::KeepRunning),
            None => self.schedule(None),
        }
    }

    fn want(&mut self, answer: Option<Answer>, after_dump: AfterDump) {
        if self.ending.is_some() && after_dump == AfterDump::KeepRunning {
            if let Some(answer) = answer {
                let _ = answer.send(Reply::Error("the job is being ended, with a last snapshot".to_owned()));
            }
            return;
        }
        self.under_way += 1;
        self.schedule(None);
        self.checkpoints.request(answer, after_dump);
    }

    fn attempted(
        &mut self,
        result: Result<Saved, AttemptError>,
        answer: Option<Answer>,
        after_dump: AfterDump,
    ) {
        self.under_way -= 1;
        let ended = || Reply::Error("the job has ended".to_owned());
        let reply = match result {
            Ok(saved) => {
                self.saved(&saved, after_dump);
                Reply::Checkpointed(saved)
            }
            Err(AttemptError::JobEnded | AttemptError::Withdrawn) => ended(),
            // It was told to give up.
            Err(_) if self.checkpoints.is_cancelled() => ended(),
            Err(error) => {
                self.failures_in_a_row += 1;
                let said = with_remedy(&error.into());
                if after_dump == AfterDump::KeepRunning {
                    self.failed(&said);
                } else {
                    self.not_saved(&said);
                }
                Reply::Error(said)
            }
        };
        if let Some(answer) = answer {
            let _ = answer.send(reply);
        }
        let retry = CHECKPOINT_FIRST_RETRY.saturating_mul(1 << (self.failures_in_a_row.max(1) - 1).min(16));
        let interval = self.pace.interval();
        let after =
            interval.map(|interval| if self.failures_in_a_row > 0 { retry.min(interval) } else { interval });
        self.schedule(after);
    }

    fn saved(&mut self, saved: &Saved, after_dump: AfterDump) {
        self.failures_in_a_row = 0;
        let taken = UNIX_EPOCH + Duration::from_millis(saved.taken_unix_ms);
        self.taken.push(taken);
        let seconds = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        self.pace.measure(seconds(saved.stall_s), seconds(saved.durable_s));
        let (kind, safe) =
            if saved.in_memory { (Kind::InMemory, "in memory") } else { (Kind::Saved, "durable") };
        let what = format!(
            "{:.1} MB, the job stood still for {:.2} s, {safe} after {:.1} s",
            saved.bytes as f64 / 1e6,
            saved.stall_s,
            saved.durable_s
        );
        let next =
            self.pace.interval().filter(|_| self.pace.is_measured() && after_dump == AfterDump::KeepRunning);
        let next = next.map(|next| format!("; the next in {:.0} s", next.as_secs_f64()));
        let how = if saved.in_memory { "kept in memory" } else { "saved" };
        tracing::info!("snapshot {} {how}: {what}{}", saved.id, next.unwrap_or_default());
        self.shared.opened.journal.add(&Entry::new(kind, what).snapshot(Some(&saved.id)));
        if let (AfterDump::End(_), Some(ending)) = (after_dump, &mut self.ending) {
            ending.saved = Some(saved.clone());
        }
    }

    /// The same reason is told once, not every ten minutes for three weeks.
    fn failed(&self, said: &str) {
        // Names of logs differ from one attempt to the next; the reason is what comes before.
        let reason = said.split(" CRIU's log is in").next().unwrap_or(said);
        if self.shared.status.failed(reason) {
            tracing::warn!("no snapshot this time; the job runs on: {said}");
            let remedy = "mend what it names; the job runs on, and the next snapshot is tried by itself";
            self.shared.opened.journal.add(&Entry::new(Kind::NotSaved, said).remedy(Some(remedy)));
        } else {
            tracing::debug!("no snapshot again: {said}");
        }
    }

    fn signal(&mut self, signal: i32) {
        let is_preempting = self.shared.config.on_signal == Some(signal);
        let is_ending = is_preempting || events::is_stopping(signal);
        if let Some(ending) = self.ending.as_mut().filter(|_| is_ending) {
            // What wanted the machine (a file, a probe) and the scheduler that then ends everything on it are two.
            if !std::mem::replace(&mut ending.signalled, true) {
                let name = events::name(signal);
                return tracing::info!(
                    "{name} came: the job is being ended with a snapshot already. Another signal ends it at once"
                );
            }
            return self.kill(format!("a second signal ({}) came", events::name(signal)));
        }
        if is_preempting {
            return self.preempt(&format!("{} came", events::name(signal)), None, true);
        }
        if signal == SIGWINCH {
            return self.job.stdio.resize();
        }
        if events::is_stopping(signal) {
            self.asked = Some(Instant::now());
        }
        self.pass_on(signal);
    }

    fn pass_on(&self, signal: i32) {
        // As a terminal would: these go to everything that the command runs in its process group.
        let group = signal == SIGINT || signal == SIGQUIT;
        if let Err(error) = self.job.namespace.signal(self.job.command_pid, group, signal) {
            tracing::debug!("signal {signal} was not passed on: {error}");
        }
    }

    /// Takes a last snapshot, with which the job ends.
    fn preempt(&mut self, why: &str, answer: Option<Answer>, signalled: bool) {
        if let Some(ending) = &mut self.ending {
            return ending.answers.extend(answer);
        }
        let grace = self.shared.config.grace;
        let said = humantime::format_duration(grace);
        tracing::info!(
            "{why}: the job is ended with a snapshot, which has to be durable within {said} (--grace). {} signal ends it at once",
            if signalled { "Another" } else { "A second" }
        );
        self.shared.opened.journal.add(&Entry::new(Kind::Preempted, why));
        self.ending = Some(Ending {
            deadline: Instant::now() + grace,
            ask_at: Instant::now() + grace / 2,
            signalled,
            answers: answer.into_iter().collect(),
            saved: None,
            problem: None,
            asked: false,
            killed: false,
        });
        self.schedule(None);
        self.checkpoints.hurry();
        self.shared.opened.pace.hurry();
        if let Some(uploader) = &self.shared.uploader {
            uploader.hurry();
        }
        if let Some(persister) = &self.shared.persister {
            persister.hurry();
        }
        if self.code.is_none() {
            self.want(None, AfterDump::End(grace));
        }
    }

    /// Half of the grace is over. What is left is the job's own if its last snapshot still waits for an earlier one to
    /// be stored, which is nearly as good.
    fn ask_in_time(&mut self) {
        let is_waiting = self.code.is_none() && self.checkpoints.withdraw_final();
        match &mut self.ending {
            Some(_) if is_waiting => self.not_saved("an earlier snapshot is still being stored"),
            // It is under way.
            Some(ending) => ending.ask_at = ending.deadline,
            None => {}
        }
    }

    /// The last snapshot failed: the job may use what is left of the grace in its own way.
    fn not_saved(&mut self, reason: &str) {
        let Some(ending) = &mut self.ending else { return };
        ending.problem = Some(reason.to_owned());
        // While the job uses its time.
        if let Some(persister) = &self.shared.persister {
            persister.begin_rest();
        }
        if self.code.is_none() {
            ending.asked = true;
            tracing::warn!("the job cannot be saved: {reason}. It is asked to end by itself (SIGTERM)");
            self.pass_on(SIGTERM);
        }
    }

    /// Ends the job, and whatever is being stored, at once.
    fn kill(&mut self, because: String) {
        self.checkpoints.cancel();
        self.kill_job();
        if let Some(ending) = &mut self.ending {
            ending.problem.get_or_insert(because);
            ending.killed = true;
            ending.deadline = Instant::now() + KILLED_JOB_REPORT_TIMEOUT;
        }
    }

    fn kill_job(&self) {
        if self.code.is_none()
            && let Err(error) = self.job.namespace.signal(-1, false, SIGKILL)
        {
            tracing::warn!("the job cannot be ended: {error}");
        }
    }

    /// The job cannot run on without what it had on the GPU, and would wait for it for ever.
    fn end_for(&mut self, loss: Loss) {
        if self.lost.is_some() || self.code.is_some() {
            return tracing::debug!("GPU state is lost in another process: {loss}");
        }
        tracing::error!("{loss}. The job cannot run on, and is ended");
        self.kill_job();
        self.lost = Some(loss);
    }

    /// It will not come to its end by itself.
    fn end_hung(&mut self, hang: Hang) {
        // What is being ended has its own deadline.
        if hang.init_pid != self.job.namespace.init_pid()
            || self.code.is_some()
            || self.ending.is_some()
            || self.hung.is_some()
        {
            return;
        }
        let stacks =
            hang.stacks.as_ref().map(|at| format!(" The stacks of its threads are in {}.", at.display()));
        tracing::error!("the job hangs: {}.{} It is ended", hang.what, stacks.unwrap_or_default());
        self.kill_job();
        self.hung = Some(hang);
    }

    /// What is said at the end of a job that was ended by [`Self::end_for`].
    fn ended_for(&self, loss: &Loss) -> anyhow::Error {
        let next = match self.shared.good_snapshot() {
            Some(id) => {
                format!("The snapshot {id} is good: run the same command again, and the job goes on from it")
            }
            None => {
                "There is no snapshot of it yet: the same command starts it from the beginning".to_owned()
            }
        };
        anyhow!("the job was ended because its GPU state was lost ({loss}). {next}")
    }

    fn job_ended(&mut self, code: i32) {
        self.code = Some(code);
        self.schedule(None);
        self.checkpoints.hurry();
        // CRIU may be about to end them, and must not be ended with them.
        if self.ending.is_none() {
            self.end_leftovers();
        }
        if code != 0 && self.lost.is_none() {
            // It may have ended of that before it was ended for it.
            self.lost = self.losses.try_recv().ok();
        }
        let was_asked = self.ending.as_ref().is_some_and(|ending| ending.asked);
        if code == 0 && !was_asked {
            // What is being stored is needed if the job failed, and gives up at once if it did not.
            self.checkpoints.cancel();
        } else if self.under_way > 0 && self.ending.is_none() {
            tracing::info!("the job has ended with {code}; its last snapshot is still being stored");
        }
    }

    /// The command has ended; whatever it left running in the background ends too.
    fn end_leftovers(&self) {
        let left = || self.job.namespace.survey().map(|survey| survey.pids.len()).unwrap_or(0);
        let count = left();
        if count == 0 {
            return;
        }
        tracing::info!("the command has ended; {count} processes that it left running are ended too");
        let _ = self.job.namespace.signal(-1, false, SIGTERM);
        let deadline = Instant::now() + LEFTOVER_EXIT_TIMEOUT;
        while left() > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn finish(mut self) -> Ended {
        let lived = self.begun.elapsed();
        let is_good = |taken: &&SystemTime| self.hung.as_ref().is_none_or(|hang| **taken < hang.since);
        let last = self.taken.iter().filter(is_good).max();
        let saved_after = last.map(|taken| taken.duration_since(self.begun_at).unwrap_or_default());
        let ending = self.ending.take();
        let is_killed = ending.as_ref().is_some_and(|ending| ending.killed);
        let how = self.how(ending);
        self.note_outcome(&how, if is_killed { STORE_RETRY_TIMEOUT } else { OUTCOME_WRITE_TIMEOUT });
        // One that was told to give up at once may be writing still.
        self.checkpoints.end(is_killed.then_some(CANCELLED_CHECKPOINT_TIMEOUT));
        if let Some(RunningJob { namespace, stdio, .. }) = Arc::into_inner(self.job) {
            drop(namespace);
            stdio.finish(match how {
                _ if is_killed => Duration::ZERO,
                How::Preempted { until, .. } => {
                    LAST_OUTPUT_TIMEOUT.min(until.saturating_duration_since(Instant::now()))
                }
                _ => LAST_OUTPUT_TIMEOUT,
            });
        }
        Ended { how, lived, saved_after }
    }

    fn how(&self, ending: Option<Ending>) -> How {
        let code = self.code.unwrap_or(128 + SIGKILL);
        let is_recent = |at: Instant| at.elapsed() < USER_STOP_WINDOW;
        let asked = self.asked.into_iter().chain(self.job.stdio.interrupted()).any(is_recent);
        match (ending, &self.lost) {
            // It got to its end before the snapshot did.
            (Some(ending), _) if code == 0 && !ending.asked => {
                ending.tell(&Stopped { snapshot: None, problem: Some("the job came to its end".to_owned()) });
                How::Complete
            }
            (Some(ending), _) => self.preempted(ending),
            (None, _) if code == 0 => How::Complete,
            (None, Some(loss)) => {
                let what = format!("its state on the GPU was lost ({loss})");
                How::Failed { code: EXIT_OWN, what, error: Some(self.ended_for(loss)), hung_since: None }
            }
            (None, None) if let Some(hang) = &self.hung => How::hung(hang, code),
            (None, None) if asked || code == 128 + SIGINT => How::Asked { code },
            (None, None) => How::Failed { code, what: describe(code), error: None, hung_since: None },
        }
    }

    fn preempted(&self, ending: Ending) -> How {
        let saved = ending.saved.as_ref().map(|saved| saved.id.clone());
        let because = ending.problem.as_deref().unwrap_or("it ended by itself before");
        let again = "run the same command again, and it goes on from there";
        let (what, remedy) = match (&saved, self.shared.good_snapshot()) {
            (Some(id), _) => (format!("the job was ended with the snapshot {id}"), again),
            (None, Some(id)) => (
                format!(
                    "the job was ended without a last snapshot: {because}. The newest one is {id}; what came after it is lost"
                ),
                again,
            ),
            (None, None) => (
                format!("the job was ended without a snapshot: {because}. There is none of it yet"),
                "run the same command again: it starts from the beginning",
            ),
        };
        match &saved {
            Some(_) => tracing::info!("{what}. To go on: {remedy}"),
            None => tracing::warn!("{what}. To go on: {remedy}"),
        }
        self.shared
            .opened
            .journal
            .add(&Entry::new(Kind::Ended, what).remedy(Some(remedy)).snapshot(saved.as_ref()));
        let problem = ending.problem.clone().filter(|_| saved.is_none());
        // Nothing is waited for once it was told to end at once.
        let until = if ending.killed { Instant::now() } else { ending.deadline };
        ending.tell(&Stopped { snapshot: saved, problem });
        How::Preempted { until, signalled: ending.signalled }
    }

    fn note_outcome(&self, how: &How, limit: Duration) {
        let outcome = match how {
            How::Complete => JobOutcome::Complete,
            How::Failed { code, .. } | How::Asked { code } => JobOutcome::Failed { code: *code },
            How::Preempted { .. } => JobOutcome::Failed { code: EXIT_PREEMPTED },
        };
        let ownership = Arc::clone(&self.shared.claimed.ownership);
        let note = move || ownership.change(|record| record.outcome = outcome);
        let error = match within(Instant::now() + limit, note) {
            Some(Ok(())) => return,
            Some(Err(OwnershipError::TakenUp(taken))) => {
                return tracing::warn!("the end of the job is not noted: {taken}");
            }
            Some(Err(OwnershipError::Store(error))) => error.to_string(),
            None => "the store does not answer".to_owned(),
        };
        // The job's result is what counts. The next run takes it for one that died.
        tracing::error!(
            "the end of the job cannot be noted: {error}. Before the next run: --resume never if it was complete"
        );
    }
}

impl Ending {
    /// Whether the job has been asked to end, or need not be before the deadline.
    fn is_asked_in_time(&self) -> bool {
        self.asked || self.killed || self.ask_at >= self.deadline
    }

    fn tell(&self, stopped: &Stopped) {
        for answer in &self.answers {
            let _ = answer.send(Reply::Stopped(stopped.clone()));
        }
    }
}

/// An exit code in plain words.
fn describe(code: i32) -> String {
    match code {
        129.. if signal_hook::low_level::signal_name(code - 128).is_some() => {
            format!("it died of {} (exit code {code})", events::name(code - 128))
        }
        _ => format!("it ended with exit code {code}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_told_in_words() {
        assert_eq!(describe(3), "it ended with exit code 3");
        assert_eq!(describe(137), "it died of SIGKILL (exit code 137)");
        assert_eq!(describe(255), "it ended with exit code 255");
    }
}
