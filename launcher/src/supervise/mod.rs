//! `ckpt-run run`: starts or resumes the job, keeps it alive, and ends as it ends. This module owns the states:
//!
//! ```text
//!              ┌──────────── the newest snapshot, or an older one, or the beginning ──────────────┐
//!              ▼                                                                                  │
//!   decide ──► beginning ──► running ──► ended with 0 ──────────────────► over: 0, complete       │
//!              │    │        (life.rs)│                                                           │
//!              │    │                 ├─► its user asked it to end ───────► over: its exit code   │
//!              │    │                 ├─► preempted, stopped ─────────────► over: 75              │
//!              │    │                 └─► failed, or its GPU state lost ─┐                        │
//!              │    └─ cannot be restarted ──────────────────────────────┴─► waiting ─────────────┘
//!              │                                                             │  (policy.rs)
//!              └─ cannot be started or resumed the first time                ├─► gave up ─► over: its exit code, or
//!                   └─► over: 2, 125, 126, 127                               │              125
//!                                                                            └─► ended by a signal or a call ─► over
//! ```
//!
//! Whatever ends it: as long as the job has not ended with 0, the next run of the same command resumes it. The
//! launcher's death, by whatever means, ends the job (its namespace goes with the init).

mod checkpoints;
mod events;
mod life;
mod pace;
mod policy;
mod preempt;
mod stacks;
mod start;
mod watchdog;

use crate::checkpoint::running_job::RunningJob;
use crate::cli::config::Config;
use crate::criu::Criu;
use crate::job::claim::Start;
use crate::job::handover::Handover;
use crate::job::journal::{Entry, Journal, Kind};
use crate::job::ownership::{Ownership, OwnershipError};
use crate::job::resume_point::Resume;
use crate::job::resume_point::{Decision, decide, of_present_run};
use crate::job::status::{SharedStatus, unix_ms};
use crate::namespace::{self, Namespace};
use crate::observe::control_server::{ControlServer, Demand};
use crate::observe::metrics;
use crate::persist::memory::{Memory, Parts, Persister};
use crate::persist::upload::Uploader;
use crate::report::failure::{in_one_line, log_error, with_remedy};
use crate::restore::resume::{Resumed, Resumer};
use crate::store::root::Root;
use crate::store::tiers;
use crate::sys::deadline::STORE_RETRY_TIMEOUT;
use crate::sys::deadline::within;
use crate::sys::deadline::{KILLED_JOB_POLL_INTERVAL, LAST_COPY_POLL_INTERVAL};
use crate::sys::error::{EXIT_OWN, EXIT_PREEMPTED, bad_input};
use crate::sys::privileges::Privileges;
use crate::sys::secrets;
use anyhow::{Context as _, Result};
use ckpt_object_medium::Pace;
use ckpt_protocol::control::{Reply, Stopped};
use ckpt_snapshot::{JobDir, JobIdentity, JobKey, JobRecord, Manifest, SnapshotId, Store, Tiers};
use crossbeam_channel::{Receiver, Sender, unbounded};
use events::{Event, Signals};
use life::{Ended, How, Life};
use policy::{Failure, Next, Policy};
use std::cell::Cell;
use std::ffi::OsString;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
/// Runs `argv` until it ends for good; returns the exit code.
///
/// # Errors
/// When the job could not be started or resumed, or was given up for a reason of ours; nothing of it runs then.
pub fn run(config: &Config, argv: &[OsString]) -> Result<i32> {
    let cwd = std::env::current_dir().context("cannot tell the working directory")?;
    if let Err(code) = start::find_command(&argv[0]) {
        return Ok(code);
    }
    check_rights(config)?;
    let metrics = config.metrics.map(metrics::listen).transpose()?;
    let criu = Criu::find(config.criu.as_deref());
    // One that was named is the user's to mend; a machine without one is not.
    let criu = criu.map_err(|error| if config.criu.is_some() { bad_input(error) } else { error.into() })?;
    let key = config.job.clone().unwrap_or_else(|| JobKey::derived(&cwd, argv));
    // What has to resume needs a store that is there: making one would only hide a mistyped path.
    let pace = config.store.pace();
    if matches!(config.resume, Resume::Required | Resume::Snapshot(_)) && config.store.url.is_none() {
        Root::open(&config.store)?;
    }
    let root = Root::open_or_create(&config.store, &pace)?;
    let dir = root.job(&key);
    let waits = |pid: &str| {
        tracing::info!("job {key}: waiting for `ckpt-run prune` or `ckpt-run rm` to end (process {pid})");
    };
    let _lock = dir.lock_to_run(waits)?;
    let memory = (config.persist_every > 1).then(Memory::new).transpose()?;
    let (memory, staged_bytes) = memory.map(|memory| (memory.medium, memory.staged_bytes)).unzip();
    let store = tiers::open_at(&config.store, &dir, &pace, memory)?;
    for swept in tiers::sweep_local(&store)? {
        tracing::info!("removed what an interrupted save of snapshot {swept} had left");
    }
    let text = |value: &OsString| value.to_string_lossy().into_owned();
    let cwd = cwd.to_string_lossy().into_owned();
    let identity = JobIdentity { key: key.to_string(), cwd, argv: argv.iter().map(text).collect() };
    let mut handover = Handover::of(&config.store, &dir)?;
    let ours = dir.record()?;
    let theirs = handover.as_mut().map(|handover| handover.taken_up_elsewhere(ours.as_ref()));
    let theirs = theirs.transpose().inspect_err(|error| {
        tracing::warn!(
            "whether the job has gone on on another machine cannot be told: {error}. It goes on from what is here"
        );
    });
    // Who does not answer is not asked again at once.
    let is_reached = theirs.is_ok();
    let theirs = theirs.ok().flatten().flatten();
    if ours.is_some() && theirs.is_some() {
        tracing::info!("job {key}: it has gone on on another machine since it ran here");
    }
    let before: Vec<_> = ours.iter().chain(&theirs).cloned().collect();
    let Decision { record, candidates } = decide(&config.resume, &dir, &store, &identity, theirs)?;
    let was = before.first().unwrap_or(&record).clone();
    let ownership = Arc::new(Ownership::begin(&dir, record, was)?);
    if let Some(handover) = &mut handover {
        let record = ownership.record();
        let launchers = before.iter().chain([&record]).map(|one| one.launcher.clone());
        handover.begin(launchers.collect());
        if is_reached {
            handover.claim(&record);
        }
    }
    let handover = handover.map(Arc::new);
    let start = Arc::new(Start::new(&ownership, handover.as_ref()));
    let _at_the_end = GiveBack(Arc::clone(&start));
    let journal = Arc::new(Journal::of(&dir));
    if let Some(id) = candidates.last() {
        tell_what_memory_had(&journal, id);
        tracing::info!("job {key}: resuming from snapshot {id}");
    }
    let status = Arc::new(SharedStatus::new(key.to_string()));
    let upload = || {
        let (retention, every) = (config.retention(), config.upload_every);
        let (status, ownership) = (Arc::clone(&status), Arc::clone(&ownership));
        Uploader::start(&store, &dir, retention, every, status, ownership, handover.clone())
    };
    let uploader = config.store.upload.as_ref().map(|_| upload()).transpose()?.map(Arc::new);
    let persister = staged_bytes.map(|staged_bytes| {
        let parts = Parts {
            store: Arc::clone(&store),
            dir: dir.clone(),
            retention: config.retention(),
            status: Arc::clone(&status),
            journal: Arc::clone(&journal),
            ownership: Arc::clone(&ownership),
            uploader: uploader.clone(),
        };
        Persister::start(parts, config.persist_every, staged_bytes)
    });
    let persister = persister.transpose()?.map(Arc::new);
    let (events, inbox) = unbounded();
    preempt::watch_file(config.preempt_file.clone(), config.monitor_interval, events.clone())?;
    let _probe =
        preempt::Probe::begin(config.preempt_probe.clone(), config.monitor_interval, events.clone())?;
    let context = Context {
        config,
        argv,
        criu,
        journal,
        identity,
        ownership,
        start: Arc::clone(&start),
        status,
        signals: Signals::listen(
            events.clone(),
            config.on_signal,
            last_act(&persister, &start, config.grace),
        )?,
        events,
        inbox,
        dir,
        store,
        pace,
        uploader,
        handover,
        persister,
    };
    let _metrics = metrics.map(|listener| metrics::serve(listener, &context.status)).transpose()?;
    Supervisor {
        context: &context,
        policy: Policy::new(config.max_restarts),
        is_first: true,
        began_from: None,
        older_than: None,
        ends_by: None,
        is_signalled: Cell::new(true),
        control: None,
    }
    .supervise(candidates)
}

/// What the last launcher had in memory only is gone with it: that is to be known.
fn tell_what_memory_had(journal: &Journal, resumed: &SnapshotId) {
    if let Some(id) = journal.newest_in_memory_only().filter(|id| id > resumed) {
        tracing::warn!(
            "newer snapshots, up to {id}, were in memory only (--persist-every) and are gone with the ckpt-run that had them"
        );
    }
}

/// What is done before a signal ends everything while the job is being started or resumed.
fn last_act(
    persister: &Option<Arc<Persister>>,
    start: &Arc<Start>,
    grace: Duration,
) -> impl Fn() + Send + use<> {
    let (persister, start) = (persister.clone(), Arc::clone(start));
    move || {
        start.give_back();
        if let Some(persister) = &persister {
            persister.save_rest(Instant::now() + grace, || None);
        }
    }
}

/// Nothing more can come of the start.
struct GiveBack(Arc<Start>);

impl Drop for GiveBack {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

/// Tries out whether a user that is not root can have what a job needs, before anything is touched.
fn check_rights(config: &Config) -> Result<()> {
    let rights = Privileges::look();
    if !rights.is_limited() && rights.missing().is_empty() {
        return Ok(());
    }
    // It ends at once: nothing runs in it.
    Namespace::create(config.network)?;
    if rights.wants_user_namespace() {
        tracing::info!(
            "without CAP_SYS_ADMIN the job runs in a user namespace of its own. Not every job can be saved there: docs/privileges.md says which"
        );
    }
    Ok(())
}

/// What stays the same over all lives of the job.
pub struct Context<'a> {
    config: &'a Config,
    argv: &'a [OsString],
    criu: Criu,
    dir: JobDir,
    store: Arc<Tiers>,
    pace: Arc<Pace>,
    uploader: Option<Arc<Uploader>>,
    handover: Option<Arc<Handover>>,
    persister: Option<Arc<Persister>>,
    identity: JobIdentity,
    ownership: Arc<Ownership>,
    start: Arc<Start>,
    status: Arc<SharedStatus>,
    journal: Arc<Journal>,
    signals: Signals,
    events: Sender<Event>,
    inbox: Receiver<Event>,
}

impl Context<'_> {
    /// The snapshot from which the next run would go on, as far as this one knows.
    fn good_snapshot(&self) -> Option<String> {
        let status = self.status.snapshot();
        status.last_snapshot.map(|saved| saved.id).or(status.resumed_from)
    }

    /// Images of the job's memory that a killed launcher, or a life before this one, left on disk.
    fn discard_staging(&self) -> Result<()> {
        let staging = self.dir.path().join("staging");
        match std::fs::remove_dir_all(&staging) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", staging.display()))
            }
            _ => Ok(()),
        }
    }
}

/// Where a job stands, apart from running: then there is a [`Life`].
enum State {
    /// It is started, or resumed from the newest of these that is whole.
    Beginning(Vec<SnapshotId>),
    /// It is restarted when this time has come.
    Waiting(Instant),
    /// Nothing runs any more.
    Over(Result<i32>),
}

/// A failure, with what is said and returned if nothing follows.
struct Failed {
    failure: Failure,
    what: String,
    code: i32,
    error: Option<anyhow::Error>,
}

struct Supervisor<'a> {
    context: &'a Context<'a>,
    policy: Policy,
    /// Nothing of the job has run under this launcher.
    is_first: bool,
    /// What the present life was resumed from.
    began_from: Option<Manifest>,
    /// The next life is resumed from a snapshot older than this one.
    older_than: Option<SnapshotId>,
    /// By when everything has to be over, if there is such a time.
    ends_by: Option<Instant>,
    /// The next signal ends everything at once.
    is_signalled: Cell<bool>,
    control: Option<ControlServer>,
}

impl Supervisor<'_> {
    fn supervise(mut self, candidates: Vec<SnapshotId>) -> Result<i32> {
        let mut state = State::Beginning(candidates);
        loop {
            state = match state {
                State::Beginning(candidates) => self.begin(&candidates),
                State::Waiting(until) => self.wait(until),
                State::Over(result) => {
                    self.save_rest(&result);
                    if let Some(handover) = &self.context.handover {
                        let ownership = Arc::clone(&self.context.ownership);
                        let until = self.ends_by.unwrap_or_else(|| Instant::now() + STORE_RETRY_TIMEOUT);
                        let handover = Arc::clone(handover);
                        let _ = within(until, move || handover.leave(&ownership));
                    }
                    return result;
                }
            };
        }
    }

    /// What is in this process or on this machine only may be lost with it: the last snapshot goes on its way, in what
    /// is left of the grace. A job that is complete needs none.
    fn save_rest(&self, result: &Result<i32>) {
        if matches!(result, Ok(0)) {
            return;
        }
        let until = self.ends_by.unwrap_or_else(|| Instant::now() + self.context.config.grace);
        if let Some(persister) = &self.context.persister {
            persister.save_rest(until, || self.is_ended_again().then_some("a second signal"));
        }
        if self.ends_by.is_some() {
            self.upload_last(until);
        }
    }

    fn is_ended_again(&self) -> bool {
        let preempting = self.context.config.on_signal;
        let is_ending = |signal| events::is_stopping(signal) || preempting == Some(signal);
        let is_signal = |event| matches!(event, Event::Signal(signal) if is_ending(signal));
        self.context
            .inbox
            .try_iter()
            .filter_map(|event| is_signal(event).then_some(()))
            .any(|()| self.is_signalled.replace(true))
    }

    /// Starts or resumes the job, and serves it until its end.
    fn begin(&mut self, candidates: &[SnapshotId]) -> State {
        let context = self.context;
        let started = context.signals.while_busy(|| self.start(candidates));
        let job = match started {
            Ok(Ok(job)) => job,
            Ok(Err(code)) if self.is_first => return State::Over(Ok(code)),
            Ok(Err(code)) => {
                return self.cannot_begin(code, "its command cannot be executed any more".into(), None);
            }
            Err(error) => return self.not_begun(error),
        };
        let life = match Life::begin(context, job, self.began_from.as_ref()) {
            Ok(life) => life,
            Err(error) => return self.not_begun(error),
        };
        context.start.has_succeeded();
        let id = self.began_from.as_ref().map(|manifest| manifest.id.to_string());
        context
            .status
            .runs(self.began_from.as_ref().map(|manifest| (manifest.id.to_string(), manifest.taken_unix_ms)));
        if !self.is_first {
            // A resume cuts what was said before off a log that the job's output is appended to.
            let failure = context.status.snapshot().last_job_failure.unwrap_or_default();
            tracing::info!("restart {} of the job, which had failed: {failure}", self.policy.restarts());
        }
        let kind = if id.is_some() { Kind::Resumed } else { Kind::Started };
        let command = secrets::hidden_in(&context.identity.argv).join(" ");
        context.journal.add(&Entry::new(kind, command).snapshot(id));
        self.listen();
        let ended = life.serve();
        self.ended(ended)
    }

    /// Starts the job or resumes it; the exit code if its command cannot be executed.
    fn start(&mut self, candidates: &[SnapshotId]) -> Result<Result<RunningJob, i32>> {
        let context = self.context;
        context.discard_staging()?;
        self.began_from = None;
        if candidates.is_empty() {
            return start::start(context.config, context.argv, &context.dir);
        }
        let resumer = Resumer {
            dir: &context.dir,
            store: &context.store,
            network: context.config.network,
            interposer: &context.config.interpose,
            agents_timeout: context.config.freeze_timeout,
            criu: &context.criu,
            ownership: &context.ownership,
        };
        let Resumed { job, manifest } = resumer.newest_of(candidates)?;
        self.older_than = None;
        self.began_from = Some(manifest);
        Ok(Ok(job))
    }

    /// Listens for other commands, once there is a job.
    fn listen(&mut self) {
        if self.control.is_some() {
            return;
        }
        let events = self.context.events.clone();
        let on_demand = move |demand, answer| {
            let event = match demand {
                Demand::Checkpoint => Event::Wanted(answer),
                Demand::Stop => Event::Preempt("`ckpt-run stop` was called".to_owned(), Some(answer)),
            };
            let _ = events.send(event);
        };
        let control = ControlServer::listen(&self.context.dir, &self.context.status, on_demand);
        self.control = control
            .inspect_err(|error| tracing::warn!("other ckpt-run commands cannot reach this job: {error}"))
            .ok();
    }

    fn ended(&mut self, ended: Ended) -> State {
        let Ended { how, lived, saved_after } = ended;
        let journal = &self.context.journal;
        match how {
            How::Complete => {
                journal.add(&Entry::new(Kind::Complete, "the job ended with 0"));
                State::Over(Ok(0))
            }
            How::Asked { code } => {
                let what = format!("the job was asked to end, and ended with exit code {code}");
                journal.add(&Entry::new(Kind::Ended, what));
                State::Over(Ok(code))
            }
            How::Preempted { until, signalled } => {
                self.ends_by = Some(until);
                self.is_signalled.set(signalled);
                State::Over(Ok(EXIT_PREEMPTED))
            }
            How::Failed { code, what, error, hung_since } => {
                let failure = Failure {
                    // One that hung had begun to work.
                    is_first_start: self.is_first && self.began_from.is_none() && hung_since.is_none(),
                    is_resumed: self.began_from.is_some(),
                    has_run: true,
                    lived,
                    saved_after,
                    next_older_by: self.next_older_by(),
                };
                self.is_first = false;
                self.older_than = hung_since.and_then(|since| self.first_taken_after(since));
                self.failed(Failed { failure, what, code, error })
            }
        }
    }

    fn upload_last(&self, until: Instant) {
        let Some(uploader) = &self.context.uploader else { return };
        uploader.hurry();
        while !uploader.is_idle_within(LAST_COPY_POLL_INTERVAL) {
            let is_ended = self.is_ended_again();
            if is_ended || Instant::now() >= until {
                let why = if is_ended { "a second signal" } else { "the end of the grace (--grace)" };
                tracing::warn!(
                    "the last snapshot is safe in the store on this machine, but {why} came before it was uploaded: the next run here uploads its next one"
                );
                return;
            }
        }
    }

    /// A start or resume failed for a reason of ours. The first one's user is there to see it.
    fn not_begun(&mut self, error: anyhow::Error) -> State {
        if self.is_first {
            self.context.journal.add(&Entry::new(Kind::NotStarted, with_remedy(&error)));
            return State::Over(Err(error));
        }
        self.cannot_begin(EXIT_OWN, in_one_line(&error), Some(error))
    }

    /// A restart failed.
    fn cannot_begin(&mut self, code: i32, what: String, error: Option<anyhow::Error>) -> State {
        let failure = Failure {
            is_first_start: false,
            is_resumed: self.began_from.is_some(),
            has_run: false,
            lived: Duration::ZERO,
            saved_after: None,
            next_older_by: None,
        };
        self.failed(Failed { failure, what: format!("it cannot be restarted: {what}"), code, error })
    }

    fn failed(&mut self, failed: Failed) -> State {
        let Failed { failure, what, code, error } = failed;
        let journal = &self.context.journal;
        let kind = if failure.has_run { Kind::Failed } else { Kind::NotStarted };
        journal.add(&Entry::new(kind, &what).remedy(remedy(code)));
        let next = self.policy.after(&failure);
        let wait = match next {
            Next::GiveUp(reason) => return self.give_up(reason, &what, code, error),
            Next::Again(wait) => wait,
            Next::StepBack(wait) => {
                self.older_than = self.began_from.as_ref().map(|manifest| manifest.id.clone());
                wait
            }
        };
        let from = match &self.older_than {
            Some(id) => format!("from a snapshot older than {id}, which may hold what makes it fail"),
            None => "from its newest snapshot, or from the beginning if there is none".to_owned(),
        };
        let after = wait.as_secs_f64();
        let restarts = self.policy.restarts();
        tracing::warn!("the job failed: {what}. Restart {restarts} in {after:.1} s, {from}");
        journal.add(&Entry::new(Kind::Restarting, format!("restart {restarts} in {after:.1} s, {from}")));
        self.context.status.waits(&what, wait, restarts);
        State::Waiting(Instant::now() + wait)
    }

    fn give_up(&self, reason: Option<String>, what: &str, code: i32, error: Option<anyhow::Error>) -> State {
        if let Some(reason) = reason {
            let next = match self.context.good_snapshot() {
                Some(_) => {
                    "When the reason is mended, run the same command again: it goes on from its newest snapshot"
                }
                None => "When the reason is mended, run the same command again",
            };
            tracing::error!("the job failed: {what}. It is not restarted: {reason}. {next}");
            self.context.journal.add(&Entry::new(Kind::GaveUp, reason).remedy(Some(next)));
        }
        // It has run by now: whatever the error is, it is no bad input with which nothing was touched.
        if let Some(error) = error {
            log_error(&error);
        }
        State::Over(Ok(code))
    }

    /// How much older the next older snapshot of the run is than the one that the present life began from.
    fn next_older_by(&self) -> Option<Duration> {
        let began_from = self.began_from.as_ref()?;
        let candidates = of_present_run(&self.context.dir, &self.context.store).ok()?;
        let marks = self.context.dir.marks().ok()?;
        let is_older = |id: &&SnapshotId| id.sequence() < began_from.id.sequence() && !marks.is_bad(id);
        let mut older = candidates.iter().rev().filter(is_older);
        let older = older.find_map(|id| self.context.store.manifest(id).ok())?;
        Some(Duration::from_millis(began_from.taken_unix_ms.saturating_sub(older.taken_unix_ms)))
    }

    /// The oldest snapshot of the run that was taken when the job hung already.
    fn first_taken_after(&self, since: SystemTime) -> Option<SnapshotId> {
        let store = &self.context.store;
        let since_ms = unix_ms(since);
        let is_later =
            |id: &SnapshotId| store.manifest(id).is_ok_and(|manifest| manifest.taken_unix_ms >= since_ms);
        of_present_run(&self.context.dir, &self.context.store).ok()?.into_iter().find(is_later)
    }

    /// Waits for the time of the restart, and until nothing is left of the life before; signals and calls are served
    /// meanwhile.
    fn wait(&mut self, mut until: Instant) -> State {
        let mut told = false;
        let over = loop {
            match self.context.inbox.recv_deadline(until) {
                Ok(Event::Signal(signal)) if self.context.config.on_signal == Some(signal) => {
                    break EXIT_PREEMPTED;
                }
                Ok(Event::Signal(signal)) if events::is_stopping(signal) => break 128 + signal,
                Ok(Event::Preempt(_, answer)) => {
                    let problem =
                        Some("the job was not running: it had failed, and was to be restarted".to_owned());
                    if let Some(answer) = answer {
                        let _ = answer.send(Reply::Stopped(Stopped { snapshot: None, problem }));
                    }
                    break EXIT_PREEMPTED;
                }
                Ok(Event::Wanted(answer)) => {
                    let reply = "the job does not run at the moment: it failed, and is being restarted";
                    let _ = answer.send(Reply::Error(reply.to_owned()));
                }
                Ok(_) => {}
                Err(_) if namespace::is_ending() => {
                    if !told {
                        tracing::warn!(
                            "the restart waits until the processes of the job that was killed have ended"
                        );
                        told = true;
                    }
                    until = Instant::now() + KILLED_JOB_POLL_INTERVAL;
                }
                Err(_) => return self.restart(),
            }
        };
        tracing::info!("the job is not restarted, as wanted. Run the same command again to go on");
        self.context.journal.add(&Entry::new(Kind::Ended, "ended while it waited for a restart"));
        State::Over(Ok(over))
    }

    fn restart(&mut self) -> State {
        let context = self.context;
        let decided = context.signals.while_busy(|| {
            context.ownership.check()?;
            let elsewhere = context.handover.as_ref().map(|handover| handover.check());
            if let Some(Err(taken @ OwnershipError::TakenUp(_))) = elsewhere {
                return Err(taken.into());
            }
            let Decision { record, candidates } =
                decide(&Resume::Auto, &context.dir, &context.store, &context.identity, None)?;
            context.ownership.change(|present| {
                let launcher = std::mem::take(&mut present.launcher);
                *present = JobRecord { launcher, ..record };
            })?;
            anyhow::Ok(candidates)
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
            // It is at work elsewhere.
            Err(error) if matches!(error.downcast_ref(), Some(OwnershipError::TakenUp(_))) => {
                let why = in_one_line(&error);
                tracing::error!("the job is not restarted here: {why}");
                context.journal.add(&Entry::new(Kind::GaveUp, why));
                State::Over(Ok(EXIT_OWN))
            }
            Err(error) => self.cannot_begin(EXIT_OWN, in_one_line(&error), Some(error)),
        }
    }
}

/// What to look at after an exit code, where it says something.
fn remedy(code: i32) -> Option<&'static str> {
    match code {
        126 | 127 => {
            Some("the command, or one that it calls, is missing or cannot be executed: look at its output")
        }
        134 => Some("it has aborted: its own output says why"),
        135 => Some("a bus error: often a full /dev/shm or a truncated file"),
        137 => Some(
            "somebody sent SIGKILL, often the kernel for want of memory: look at `dmesg` and at the job's memory limit",
        ),
        139 => Some(
            "a segmentation fault: a bug in the program, a library or the hardware. Its own output may say more",
        ),
        143 => Some("somebody sent SIGTERM to it: the machine's administrator, or another program"),
        _ => None,
    }
}
