//! `ckpt-run run`: starts or resumes the job, restarts it after failures, and exits with its exit code. This module owns
//! the states:
//!
//! ```text
//!              ┌──────────── the newest snapshot, or an older one, or the beginning ──────────────┐
//!              ▼                                                                                  │
//!   decide ──► beginning ──► running ──► ended with 0 ──────────────────► over: 0, complete       │
//!              │    │      (session.rs)                                                           │
//!              │    │                 ├─► stopped by its user ────────────► over: its exit code   │
//!              │    │                 ├─► preempted, stopped ─────────────► over: 75              │
//!              │    │                 └─► failed, or its GPU state lost ─┐                        │
//!              │    └─ cannot be restarted ──────────────────────────────┴─► waiting ─────────────┘
//!              │                                                             │  (policy.rs)
//!              └─ cannot be started or resumed the first time                ├─► gave up ─► over: its exit code, or
//!                   └─► over: 2, 125, 126, 127                               │              125
//!                                                                            └─► ended by a signal or a call ─► over
//! ```
//!
//! Until the job has ended with 0, the next run of the same command resumes it. If the launcher dies, the job ends too,
//! since its namespace ends with the init.

mod checkpoints;
mod events;
mod moved;
mod nodes;
mod pace;
mod policy;
mod preempt;
mod services;
mod session;
mod stacks;
mod start;
mod startup;
mod watchdog;

use crate::checkpoint::running_job::RunningJob;
use crate::cli::config::Config;
use crate::job::journal::{Entry, EventKind, Measured};
use crate::job::ownership::OwnershipError;
use crate::job::resume_point::{Decision, OlderSnapshot, Resume, decide, of_present_run, older_one};
use crate::job::started_with;
use crate::job::status::unix_ms;
use crate::job::times::{self, Class};
use crate::namespace;
use crate::observe::control_server::{ControlServer, Demand};
use crate::observe::metrics;
use crate::observe::notify::{Address, Notifier};
use crate::report::failure::{in_one_line, log_error, with_remedy};
use crate::restore::resume::{Resumed, Resumer};
use crate::sys::deadline::{KILLED_JOB_POLL_INTERVAL, LAST_COPY_POLL_INTERVAL, STORE_RETRY_TIMEOUT};
use crate::sys::error::{EXIT_OWN, EXIT_PREEMPTED};
use crate::sys::secrets;
use crate::sys::span::span;
use anyhow::Result;
use ckpt_protocol::control::{Reply, Stopped};
use ckpt_snapshot::{FAILURE_LATENCY, JobRecord, Manifest, SnapshotId, Store};
use events::{Event, StopCall};
use pace::{Pace, PaceOptions};
use policy::{Failure, Next, Policy};
use services::RunContext;
use session::{JobSession, SessionEnd, SessionOutcome};
use start::NotExecuted;
use startup::OpenedJob;
use std::cell::Cell;
use std::cell::RefCell;
use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// The configuration, completed by what an engine says of the nodes; `None` if it says nothing.
///
/// # Errors
/// Bad input: what it says cannot be used.
pub fn with_nodes(config: &Config) -> Result<Option<Config>> {
    nodes::found(config)
}

/// Runs `argv` until it ends for good, on the nodes of [`with_nodes`]; returns the exit code.
///
/// # Errors
/// When the job could not be started or resumed, or ckpt-run gave up on it; nothing of the job is running then.
pub fn run(config: &Config, argv: &[OsString]) -> Result<i32> {
    if config.nodes.several().is_some() {
        return nodes::run(config, argv);
    }
    nodes::check_alone(config)?;
    if let Err(code) = start::find_command(&argv[0]) {
        return Ok(code);
    }
    let begun_at = SystemTime::now();
    start::nccl_variables(config)?;
    let metrics = config.metrics.map(metrics::listen).transpose()?;
    let mut opened = startup::open(config, argv)?;
    let (claimed, candidates) = startup::claim(config, &mut opened, &config.resume)?;
    let address = config.notify.clone();
    let notifier = address.map(|to| notifier(to, config, &opened)).transpose()?;
    let recorded = startup::record(config, &opened, &claimed, begun_at);
    let supervise = || {
        let context = RunContext::start(config, argv, &opened, &claimed, None)?;
        let serve = |listener| metrics::serve(listener, &context.status, &opened.dir);
        let _metrics = metrics.map(serve).transpose()?;
        Supervisor::new(&context).supervise(candidates)
    };
    let result = supervise();
    drop(recorded);
    drop(notifier);
    result
}

/// Sends to this address what happens to the job from now on, until nobody listens to the journal any more.
fn notifier(to: Address, config: &Config, opened: &OpenedJob) -> Result<Notifier> {
    let notifier = Notifier::start(to, opened.dir.key().to_string(), config.store.name())?;
    notifier.entries().into_iter().for_each(|entries| opened.journal.listen(entries));
    Ok(notifier)
}

/// The state of a job that is not running. A running job is a [`JobSession`].
enum State {
    /// The job is started, or resumed from the newest of these snapshots that is intact.
    Beginning(Vec<SnapshotId>),
    /// The job is restarted at this time.
    Waiting(Instant),
    /// The run is over, with this exit code or error.
    Over(Result<i32>),
}

struct Supervisor<'a> {
    context: &'a RunContext<'a>,
    policy: Policy,
    /// The job has not run under this launcher yet.
    is_first: bool,
    /// When the latest start or resume began.
    begun_at: SystemTime,
    /// The snapshot from which the current session was resumed.
    began_from: Option<Manifest>,
    /// The next session is resumed from a snapshot older than this one.
    older_than: Option<SnapshotId>,
    /// The end of the grace period, if the job was preempted.
    ends_by: Option<Instant>,
    /// The next signal ends everything at once.
    is_signalled: Cell<bool>,
    control: Option<ControlServer>,
}

impl<'a> Supervisor<'a> {
    fn new(context: &'a RunContext<'a>) -> Self {
        Self {
            context,
            policy: Policy::new(context.config.max_restarts, context.config.resume_policy),
            is_first: true,
            begun_at: SystemTime::now(),
            began_from: None,
            older_than: None,
            ends_by: None,
            is_signalled: Cell::new(true),
            control: None,
        }
    }

    fn supervise(mut self, candidates: Vec<SnapshotId>) -> Result<i32> {
        let mut state = State::Beginning(candidates);
        loop {
            state = match state {
                State::Beginning(candidates) => self.begin(&candidates),
                State::Waiting(until) => self.wait(until),
                State::Over(result) => {
                    self.save_rest(&result);
                    self.summarize();
                    let until = self.ends_by.unwrap_or_else(|| Instant::now() + STORE_RETRY_TIMEOUT);
                    self.context.claimed.publish(until);
                    return result;
                }
            };
        }
    }

    /// Copies the last snapshot from memory to the store, and to the object store, within the rest of the grace period.
    /// A job that is complete needs no snapshot.
    fn save_rest(&self, result: &Result<i32>) {
        if matches!(result, Ok(0)) {
            return;
        }
        let until = self.ends_by.unwrap_or_else(|| Instant::now() + self.context.config.grace);
        if let Some(persister) = &self.context.persister {
            persister.complete_last_copy(until, || self.has_second_signal().then_some("a second signal"));
        }
        if self.ends_by.is_some() {
            self.upload_last(until);
        }
    }

    /// Says what the snapshots have cost, and what was done again.
    fn summarize(&self) {
        let (context, restarts) = (self.context, self.policy.restarts);
        let status = context.status.snapshot();
        if status.saved == 0 && restarts == 0 {
            return;
        }
        let times = times::of_job(&context.opened.dir, false).ok().flatten();
        let redone_ms = times.map_or(0, |times| times.of(Class::Redone));
        let plural = |number: u64, one: &str| format!("{number} {one}{}", if number == 1 { "" } else { "s" });
        tracing::info!(
            "job {}: {} (paused for {:.1} s), {}, {} of work done again; `ckpt-run report` shows more",
            context.opened.dir.key(),
            plural(status.saved, "snapshot"),
            status.totals.stall_s,
            plural(restarts.into(), "restart"),
            span(Duration::from_millis(redone_ms))
        );
    }

    fn has_second_signal(&self) -> bool {
        let preempting = &self.context.config.on_signal;
        let is_ending = |signal| events::is_stopping(signal) || preempting.contains(&signal);
        let is_signal = |event: &Event| matches!(event, Event::Signal(signal) if is_ending(*signal));
        self.context.inbox.try_iter().filter(is_signal).any(|_| self.is_signalled.replace(true))
    }

    /// Starts or resumes the job, and serves its session until the end.
    fn begin(&mut self, candidates: &[SnapshotId]) -> State {
        let context = self.context;
        self.begun_at = SystemTime::now();
        if self.is_first && candidates.is_empty() {
            announce(context, true);
        }
        let started = context.opened.signals.while_busy(|| self.start(candidates));
        let job = match started {
            Ok(Ok(job)) => job,
            Ok(Err(NotExecuted { code, entry })) if self.is_first => {
                context.opened.journal.add(&entry.measured(self.begin_measured()));
                return State::Over(Ok(code));
            }
            Ok(Err(NotExecuted { code, entry })) => return self.restart_failed(code, entry.what, None),
            Err(error) => return self.start_failed(error),
        };
        let session = match JobSession::begin(context, job, self.began_from.as_ref()) {
            Ok(session) => session,
            Err(error) => return self.start_failed(error),
        };
        self.began();
        self.ended(session.serve())
    }

    /// The job runs.
    fn began(&mut self) {
        let context = self.context;
        context.claimed.claim.confirm();
        if self.began_from.is_some() {
            if self.is_first {
                // Not before: it may be refused.
                announce(context, false);
            }
            // Other machines must not resume from what the job has left behind.
            context.claimed.publish(Instant::now());
        }
        let id = self.began_from.as_ref().map(|manifest| manifest.id.to_string());
        context.status.runs(id.clone().zip(self.began_from.as_ref().map(|manifest| manifest.taken_unix_ms)));
        if !self.is_first {
            // A resume cuts a log that is not opened for appending, and removes the earlier message.
            let failure = context.status.snapshot().last_job_failure.unwrap_or_default();
            tracing::info!("restart {} of the job, which had failed: {failure}", self.policy.restarts);
        }
        let kind = if id.is_some() { EventKind::Resumed } else { EventKind::Started };
        if id.is_none() {
            started_with::record(&context.opened.dir, context.argv);
        }
        let command = secrets::hidden_in(&context.opened.identity.argv).join(" ");
        let is_anew = self.is_first && context.config.resume == Resume::Never;
        let measured = Measured { is_anew, ..self.begin_measured() };
        context.opened.journal.add(&Entry::new(kind, command).snapshot(id).measured(measured));
        self.listen();
    }

    /// When the latest start or resume began.
    fn begin_measured(&self) -> Measured {
        Measured { begun_unix_ms: Some(unix_ms(self.begun_at)), ..Measured::default() }
    }

    /// Starts or resumes the job, unless its command cannot be executed.
    fn start(&mut self, candidates: &[SnapshotId]) -> Result<Result<RunningJob, NotExecuted>> {
        let context = self.context;
        context.discard_staging()?;
        self.began_from = None;
        if candidates.is_empty() {
            let config = (context.config, None);
            return start::start(config, context.argv, context.opened, &context.file_rules);
        }
        let staging_dir = context.config.store.staging_dir(&context.opened.dir);
        let Resumed { job, manifest, why_older } =
            self.resumer(staging_dir.as_deref()).newest_of(candidates)?;
        if let Some(why) = why_older {
            let note = Entry::new(EventKind::Noted, format!("resumed from an older snapshot: {why}"));
            context.opened.journal.add(&note.snapshot(Some(&manifest.id)));
        }
        self.older_than = None;
        self.began_from = Some(manifest);
        Ok(Ok(job))
    }

    fn resumer<'b>(&'b self, staging_dir: Option<&'b Path>) -> Resumer<'b> {
        let context = self.context;
        Resumer {
            dir: &context.opened.dir,
            journal: &context.opened.journal,
            store: &context.opened.store,
            answers: &context.opened.answers,
            network: context.config.network,
            interposer: &context.config.interpose,
            agents_timeout: context.config.freeze_timeout,
            gpu_timeout: context.config.gpu_timeout,
            gpu_map: &context.config.gpu_map,
            mirror: context.config.mirror,
            criu: &context.opened.criu,
            ownership: &context.claimed.ownership,
            file_rules: &context.file_rules,
            staging_dir,
            policy: context.config.resume_policy,
            gate: None,
            job_network: None,
            put_back: RefCell::default(),
        }
    }

    /// Starts to listen for other commands, when the job runs for the first time.
    fn listen(&mut self) {
        if self.control.is_some() {
            return;
        }
        let events = self.context.events.clone();
        let on_demand = move |demand, answer| {
            let event = match demand {
                Demand::Reclaim => Event::ReclaimRequested(answer),
                Demand::Checkpoint => Event::CheckpointRequested(answer),
                Demand::Stop { force } => {
                    Event::Preempt("`ckpt-run stop` was called".to_owned(), Some(StopCall { answer, force }))
                }
            };
            let _ = events.send(event);
        };
        let control = ControlServer::listen(&self.context.opened.dir, &self.context.status, on_demand);
        self.control = control
            .inspect_err(|error| tracing::warn!("other ckpt-run commands cannot reach this job: {error}"))
            .ok();
    }

    fn ended(&mut self, end: SessionEnd) -> State {
        let SessionEnd { outcome, duration, saved_after, ended_at } = end;
        let journal = &self.context.opened.journal;
        let measured = Measured { ended_unix_ms: Some(unix_ms(ended_at)), ..Measured::default() };
        match outcome {
            SessionOutcome::Complete => {
                journal.add(&Entry::new(EventKind::Complete, "the job ended with 0").measured(measured));
                State::Over(Ok(0))
            }
            SessionOutcome::StoppedByUser { code } => {
                let what = format!("the job was stopped by its user, and ended with exit code {code}");
                journal.add(&Entry::new(EventKind::Ended, what).measured(measured));
                State::Over(Ok(code))
            }
            // Of a job on several nodes, which has its own supervisor.
            SessionOutcome::OverOnNodes(end) => State::Over(Ok(end.code)),
            SessionOutcome::Preempted { entry, until, signalled } => {
                journal.add(&entry.measured(measured));
                self.ends_by = Some(until);
                self.is_signalled.set(signalled);
                State::Over(Ok(EXIT_PREEMPTED))
            }
            SessionOutcome::Failed { code, what, error, hung_since } => {
                let older = self.older_one();
                let failure = Failure {
                    // A job that hung had begun to work.
                    is_first_start: self.is_first && self.began_from.is_none() && hung_since.is_none(),
                    is_resumed: self.began_from.is_some(),
                    has_run: true,
                    ran_for: duration,
                    saved_after,
                    is_doubtful: self.began_from.as_ref().is_some_and(Manifest::is_doubtful)
                        && older.as_ref().is_some_and(|older| !older.is_doubtful),
                    next_older_by: older.as_ref().map(|older| older.older_by),
                };
                self.is_first = false;
                self.older_than = hung_since.and_then(|since| self.first_taken_after(since));
                // ckpt-run itself ends a job that hangs.
                let remedy = if hung_since.is_some() { None } else { remedy(code) };
                let measured = Measured { begun_unix_ms: hung_since.map(unix_ms), ..measured };
                let entry = Entry::new(EventKind::Failed, what).remedy(remedy).measured(measured);
                self.failed(&failure, older, entry, code, error)
            }
        }
    }

    fn upload_last(&self, until: Instant) {
        let Some(uploader) = &self.context.uploader else { return };
        uploader.hurry();
        while !uploader.is_idle_within(LAST_COPY_POLL_INTERVAL) {
            let is_signalled = self.has_second_signal();
            if is_signalled || Instant::now() >= until {
                let why =
                    if is_signalled { "a second signal" } else { "the end of the grace period (--grace)" };
                tracing::warn!(
                    "the last snapshot is durable in the store on this machine, but was not uploaded before {why}: the next run here uploads its next snapshot"
                );
                return;
            }
        }
    }

    /// A start or resume failed with an error. The first failure ends the run: the user is there to see it.
    fn start_failed(&mut self, error: anyhow::Error) -> State {
        if self.is_first {
            let entry = Entry::new(EventKind::NotStarted, with_remedy(&error));
            self.context.opened.journal.add(&entry.measured(self.begin_measured()));
            return State::Over(Err(error));
        }
        self.restart_failed(EXIT_OWN, in_one_line(&error), Some(error))
    }

    /// A restart failed.
    fn restart_failed(&mut self, code: i32, what: String, error: Option<anyhow::Error>) -> State {
        let failure = Failure { is_resumed: self.began_from.is_some(), ..Failure::default() };
        let what = format!("it cannot be restarted: {what}");
        let entry = Entry::new(EventKind::NotStarted, what).remedy(remedy(code));
        self.failed(&failure, None, entry.measured(self.begin_measured()), code, error)
    }

    /// The job failed: `entry` says how. `code` and `error` end the run if the job is not restarted. A step back leads
    /// to `older`.
    fn failed(
        &mut self,
        failure: &Failure,
        older: Option<OlderSnapshot>,
        entry: Entry,
        code: i32,
        error: Option<anyhow::Error>,
    ) -> State {
        let journal = &self.context.opened.journal;
        journal.add(&entry);
        let what = &*entry.what;
        let wait = match self.policy.after(failure) {
            Next::GiveUp(reason) => return self.give_up(reason, what, code, error),
            Next::Again(wait) => wait,
            Next::StepBack(wait) => {
                self.older_than = older.map(|older| older.left_out);
                wait
            }
        };
        let lost = self.context.lost();
        let from = match (&self.older_than, lost) {
            (Some(id), _) if self.is_first_of_run(id) => {
                format!("from {id}, which may hold what makes it fail: there is no older snapshot")
            }
            (Some(id), _) => format!("from a snapshot older than {id}, which may hold what makes it fail"),
            (None, Some(lost)) => format!("from its newest snapshot: {} of work are done again", span(lost)),
            (None, None) => "from its newest snapshot, or from the beginning if there is none".to_owned(),
        };
        let after = wait.as_secs_f64();
        let restarts = self.policy.restarts;
        tracing::warn!("the job failed: {what}. Restart {restarts} in {after:.1} s, {from}");
        let next = format!("restart {restarts} in {after:.1} s, {from}");
        journal.add(&Entry::new(EventKind::Restarting, next));
        self.context.status.waits(what, wait, restarts);
        State::Waiting(Instant::now() + wait)
    }

    fn give_up(&self, reason: Option<String>, what: &str, code: i32, error: Option<anyhow::Error>) -> State {
        if let Some(reason) = reason {
            let next = match self.context.good_snapshot() {
                Some(_) => {
                    "Fix the cause, then run the same command again to resume from the newest snapshot"
                }
                None => "Fix the cause, then run the same command again",
            };
            tracing::error!("the job failed: {what}. It is not restarted: {reason}. {next}");
            self.context.opened.journal.add(&Entry::new(EventKind::GaveUp, reason).remedy(Some(next)));
        }
        // The job has run: the error is only logged, since its exit code would mean that nothing was changed.
        if let Some(error) = error {
            log_error(&error);
        }
        State::Over(Ok(code))
    }

    /// Where a step back leads from the snapshot from which the session was resumed.
    fn older_one(&self) -> Option<OlderSnapshot> {
        let OpenedJob { dir, store, .. } = &self.context.opened;
        let is_second = self.policy.has_stepped_back();
        older_one(
            &of_present_run(dir, store).ok()?,
            self.began_from.as_ref()?,
            &dir.marks().unwrap_or_default(),
            if is_second { FAILURE_LATENCY } else { Duration::ZERO },
            |id| store.manifest(id).ok(),
        )
    }

    /// The oldest snapshot of the run that was taken after the job began to hang.
    fn first_taken_after(&self, since: SystemTime) -> Option<SnapshotId> {
        let store = &self.context.opened.store;
        let since_ms = unix_ms(since);
        let is_later =
            |id: &SnapshotId| store.manifest(id).is_ok_and(|manifest| manifest.taken_unix_ms >= since_ms);
        of_present_run(&self.context.opened.dir, &self.context.opened.store).ok()?.into_iter().find(is_later)
    }

    fn is_first_of_run(&self, id: &SnapshotId) -> bool {
        let OpenedJob { dir, store, .. } = &self.context.opened;
        of_present_run(dir, store).is_ok_and(|all| all.first() == Some(id))
    }

    /// Waits until the restart is due and the processes of the earlier session have ended. Signals and calls are served
    /// meanwhile.
    fn wait(&mut self, mut until: Instant) -> State {
        let mut is_reported = false;
        let over = loop {
            match self.context.inbox.recv_deadline(until) {
                Ok(Event::Signal(signal)) if self.context.config.on_signal.contains(&signal) => {
                    break EXIT_PREEMPTED;
                }
                Ok(Event::Signal(signal)) if events::is_stopping(signal) => break 128 + signal,
                Ok(Event::Preempt(_, call)) => {
                    let problem = "the job was not running: it had failed, and was to be restarted";
                    let stopped = Stopped { snapshot: None, problem: Some(problem.to_owned()) };
                    let _ = call.map(|call| call.answer.send(Reply::Stopped(stopped)));
                    break EXIT_PREEMPTED;
                }
                Ok(Event::CheckpointRequested(answer) | Event::ReclaimRequested(answer)) => {
                    let reply = "the job is not running: it failed, and is being restarted";
                    let _ = answer.send(Reply::Error(reply.to_owned()));
                }
                Ok(_) => {}
                Err(_) if namespace::is_ending() => {
                    if !is_reported {
                        tracing::warn!("the restart waits until the processes of the killed job have ended");
                        is_reported = true;
                    }
                    until = Instant::now() + KILLED_JOB_POLL_INTERVAL;
                }
                Err(_) => return self.restart(),
            }
        };
        tracing::info!("the job is not restarted, as requested. Run the same command again to resume it");
        self.context.opened.journal.add(&Entry::new(EventKind::Ended, "ended while it waited for a restart"));
        State::Over(Ok(over))
    }

    fn restart(&mut self) -> State {
        let context = self.context;
        if context.opened.staged_bytes.is_some() {
            context.opened.answers.has_memory();
        }
        let decided = context.opened.signals.while_busy(|| {
            let OpenedJob { dir, store, identity, answers, .. } = context.opened;
            answers.during("its snapshots were being listed", || {
                context.claimed.ownership.check()?;
                let elsewhere = context.claimed.handover.as_ref().map(|handover| handover.check());
                if let Some(Err(claim @ OwnershipError::ClaimedElsewhere(_))) = elsewhere {
                    return Err(claim.into());
                }
                let Decision { record, candidates } = decide(&Resume::Auto, dir, store, identity, None)?;
                context.claimed.ownership.change(|present| {
                    let launcher = std::mem::take(&mut present.launcher);
                    *present = JobRecord { launcher, ..record };
                })?;
                anyhow::Ok(candidates)
            })
        });
        match decided {
            Ok(mut candidates) => {
                if let Some(newest) = &self.older_than {
                    let first = candidates.partition_point(|id| id.sequence() < newest.sequence());
                    // Without an older one, the oldest is better than none.
                    candidates.truncate(first.max(1));
                }
                State::Beginning(candidates)
            }
            // Another launcher is running the job.
            Err(error) if matches!(error.downcast_ref(), Some(OwnershipError::ClaimedElsewhere(_))) => {
                let why = in_one_line(&error);
                tracing::error!("the job is not restarted here: {why}");
                context.opened.journal.add(&Entry::new(EventKind::GaveUp, why));
                State::Over(Ok(EXIT_OWN))
            }
            Err(error) => self.restart_failed(EXIT_OWN, in_one_line(&error), Some(error)),
        }
    }
}

/// Tells the user what runs, and how it is resumed.
fn announce(context: &RunContext, is_begun: bool) {
    let config = context.config;
    let options = PaceOptions { interval: config.interval, overhead: config.overhead, mtbf: config.mtbf };
    let pace = Pace::new(options);
    let first = if is_begun { pace.first() } else { pace.interval() };
    let then = if pace.is_measured() {
        "then as their cost allows".to_owned()
    } else {
        pace.interval()
            .map(|next| format!("then every {}", humantime::format_duration(next)))
            .unwrap_or_default()
    };
    let when = match first {
        Some(first) => format!("the first in {}, {then}", humantime::format_duration(first)),
        None => "only by `ckpt-run checkpoint` (--interval off)".to_owned(),
    };
    tracing::info!(
        "job {}: snapshots in {}, {when}. After a failure, the same command resumes it",
        context.opened.dir.key(),
        config.store.name()
    );
}

/// What to check after an exit code, where the code has a known meaning.
fn remedy(code: i32) -> Option<&'static str> {
    match code {
        126 | 127 => {
            Some("the command, or one that it calls, is missing or cannot be executed: look at its output")
        }
        134 => Some("it aborted: its own output says why"),
        135 => Some("a bus error: often a full /dev/shm or a truncated file"),
        137 => Some(
            "killed by SIGKILL, often by the kernel when out of memory: look at `dmesg` and at the job's memory limit",
        ),
        139 => Some(
            "a segmentation fault: a bug in the program, a library or the hardware. Its own output may say more",
        ),
        143 => Some("killed by SIGTERM, from the machine's administrator or another program"),
        _ => None,
    }
}
