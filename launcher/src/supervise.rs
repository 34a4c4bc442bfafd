//! `ckpt-run run`: starts or resumes the job, checkpoints it, and ends as it ends. This module owns the states:
//!
//! ```text
//!            ┌─ nothing to resume ──► start ──┐
//!   decide ──┤                                ├──► running ──► ended (0: complete, next run starts afresh;
//!            └─ a whole snapshot ──► resume ──┘    │    ▲             otherwise the next run resumes)
//!                                                  ▼    │
//!                                               checkpointing (in a thread of its own; the job's end, signals and
//!                                               calls are served meanwhile)
//! ```
//!
//! A job that has lost its state on the GPU cannot run on: it is ended, and the next run resumes.
//! The launcher's death, by whatever means, ends the job (its namespace goes with the init); the next run resumes.

use crate::agents::Loss;
use crate::checkpoint::{AttemptError, Checkpointer, RunningJob};
use crate::commands::open_store;
use crate::config::{Config, Resume};
use crate::control_server::{Answer, ControlServer};
use crate::criu::Criu;
use crate::decide::{Decision, abandon_after, decide};
use crate::failure::{EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, bad_input};
use crate::interpose;
use crate::namespace::{InitEvent, Namespace, StartError};
use crate::restore::{Resumed, Resumer};
use crate::status::SharedStatus;
use crate::stdio::Stdio;
use anyhow::{Context, Result, anyhow, bail};
use ckpt_protocol::control::{Reply, Saved};
use ckpt_snapshot::{JobDir, JobIdentity, JobKey, JobOutcome, JobRecord, Store, StoreRoot};
use crossbeam_channel::{Receiver, Sender, unbounded};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// After a failed checkpoint the next try comes this soon, then twice as late each time, up to the interval.
const FIRST_RETRY: Duration = Duration::from_secs(10);
/// How long what the job left running may take to end when it is asked to.
const LEFTOVER_LIMIT: Duration = Duration::from_secs(5);
/// How long the job's last output may take.
const OUTPUT_LIMIT: Duration = Duration::from_secs(30);

enum Event {
    Init(InitEvent),
    Signal(i32),
    Wanted(Answer),
    Lost(Loss),
    Attempted { result: Result<Saved, AttemptError>, answer: Option<Answer> },
}

/// Runs `argv` until it ends; returns its exit code.
///
/// # Errors
/// When the job could not be started or resumed; nothing of it runs then.
pub fn run(config: &Config, argv: &[OsString]) -> Result<i32> {
    let cwd = std::env::current_dir().context("cannot tell the working directory")?;
    if let Err(code) = find_command(&argv[0]) {
        return Ok(code);
    }
    let criu = Criu::find(config.criu.as_deref());
    // One that was named is the user's to mend; a machine without one is not.
    let criu = criu.map_err(|error| if config.criu.is_some() { bad_input(error) } else { error.into() })?;
    let key = config.job.clone().unwrap_or_else(|| JobKey::derived(&cwd, argv));
    // What has to resume needs a store that is there: making one would only hide a mistyped path.
    let root = match config.resume {
        Resume::Auto | Resume::Never => StoreRoot::open_or_create(&config.store)?,
        Resume::Required | Resume::Snapshot(_) => open_store(config)?,
    };
    let dir = root.job(&key);
    let _lock = dir.lock()?;
    for swept in dir.store().sweep()? {
        tracing::info!("removed what an interrupted save of snapshot {swept} had left");
    }
    let text = |value: &OsString| value.to_string_lossy().into_owned();
    let cwd = cwd.to_string_lossy().into_owned();
    let identity = JobIdentity { key: key.to_string(), cwd, argv: argv.iter().map(text).collect() };
    let Decision { mut record, candidates } = decide(config, &dir, &identity)?;
    dir.set_record(&record)?;
    discard_staging(&dir)?;
    let (events, inbox) = unbounded();
    let job = match &candidates[..] {
        [] => start(config, argv, &dir)?,
        some => {
            let resumer = Resumer { dir: &dir, config, criu: &criu };
            let resumed = resumer.newest_of(some)?;
            if let Resume::Snapshot(_) = config.resume {
                abandon_after(&mut record, &resumed.manifest.id);
                dir.set_record(&record)?;
            }
            Started::Resumed(Box::new(resumed))
        }
    };
    let job = match job {
        Started::NotExecuted(code) => return Ok(code),
        other => other,
    };
    Supervisor::new(config, criu, dir, identity, record, job, events)?.supervise(&inbox)
}

/// Images of the job's memory that a killed launcher left on disk.
fn discard_staging(dir: &JobDir) -> Result<()> {
    let staging = dir.path().join("staging");
    match std::fs::remove_dir_all(&staging) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", staging.display()))
        }
        _ => Ok(()),
    }
}

/// Says so when the command does not exist, before anything is touched.
fn find_command(program: &OsString) -> Result<(), i32> {
    let is_file = |path: &Path| path.is_file();
    let found = match Path::new(program).components().count() {
        1 => {
            let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
            std::env::split_paths(&path).any(|dir| is_file(&dir.join(program)))
        }
        _ => is_file(Path::new(program)),
    };
    if found {
        return Ok(());
    }
    tracing::error!("there is no command {program:?}");
    Err(EXIT_NOT_FOUND)
}

enum Started {
    Fresh(Box<RunningJob>),
    Resumed(Box<Resumed>),
    NotExecuted(i32),
}

fn start(config: &Config, argv: &[OsString], dir: &JobDir) -> Result<Started> {
    let stdio = Stdio::prepare(None).context("cannot make the job's standard streams")?;
    let namespace = Namespace::create(config.network)?;
    let wanted = config.interpose.library().is_some();
    let agents = wanted.then(|| interpose::listen(dir)).transpose()?;
    let started = {
        let (sources, fds) = stdio.for_start();
        namespace.start_job(argv, interpose::variables(config, dir)?, stdio.terminal_path(), sources, &fds)
    };
    match started {
        Ok((root_pid, command_pid)) => {
            Ok(Started::Fresh(Box::new(RunningJob { namespace, stdio, root_pid, command_pid, agents })))
        }
        Err(StartError::Command(error)) => {
            tracing::error!("cannot run {:?}: {error}", argv[0]);
            let missing = error.kind() == io::ErrorKind::NotFound;
            Ok(Started::NotExecuted(if missing { EXIT_NOT_FOUND } else { EXIT_NOT_EXECUTABLE }))
        }
        Err(StartError::Namespace(error)) => Err(error.into()),
    }
}

struct Supervisor {
    job: Arc<RunningJob>,
    dir: JobDir,
    record: Arc<Mutex<JobRecord>>,
    interval: Option<Duration>,
    next: Option<Instant>,
    failures_in_a_row: u32,
    status: Arc<SharedStatus>,
    cancelled: Arc<AtomicBool>,
    attempts: Sender<Option<Answer>>,
    /// Checkpoints that have been asked of the checkpointer and not been answered.
    under_way: u32,
    losses: Receiver<Loss>,
    /// The first of them: the job is being ended for it.
    lost: Option<Loss>,
    _control: Option<ControlServer>,
}

impl Supervisor {
    fn new(
        config: &Config,
        criu: Criu,
        dir: JobDir,
        identity: JobIdentity,
        record: JobRecord,
        started: Started,
        events: Sender<Event>,
    ) -> Result<Self> {
        let (mut job, resumed_from) = match started {
            Started::Fresh(job) => (*job, None),
            Started::Resumed(resumed) => (resumed.job, Some(resumed.manifest)),
            Started::NotExecuted(_) => unreachable!("handled before"),
        };
        job.stdio
            .start(resumed_from.as_ref().map(|manifest| &manifest.stdio[..]))
            .context("cannot relay the job's output")?;
        let losses =
            job.agents.as_ref().map_or_else(crossbeam_channel::never, |agents| agents.losses().clone());
        let job = Arc::new(job);
        let status =
            SharedStatus::new(dir.key().to_string(), resumed_from.map(|manifest| manifest.id.to_string()));
        let status = Arc::new(status);
        let record = Arc::new(Mutex::new(record));
        let cancelled = Arc::new(AtomicBool::new(false));
        let wanted = events.clone();
        let control =
            ControlServer::listen(&dir, &status, move |answer| drop(wanted.send(Event::Wanted(answer))));
        let control = control
            .inspect_err(|error| tracing::warn!("other ckpt-run commands cannot reach this job: {error}"))
            .ok();
        forward_signals(events.clone())?;
        let checkpointer = Checkpointer {
            job: Arc::clone(&job),
            dir: dir.clone(),
            record: Arc::clone(&record),
            identity,
            criu,
            freeze_timeout: config.freeze_timeout,
            keep: config.keep,
            status: Arc::clone(&status),
            cancelled: Arc::clone(&cancelled),
            attempts: 0,
            told_outside: HashSet::new(),
        };
        let (attempts, requests) = unbounded();
        std::thread::Builder::new()
            .name("checkpointer".to_owned())
            .spawn(move || checkpoint_loop(checkpointer, &requests, &events))
            .context("cannot start the checkpointing thread")?;
        let mut supervisor = Self {
            job,
            dir,
            record,
            interval: config.interval,
            next: None,
            failures_in_a_row: 0,
            status,
            cancelled,
            attempts,
            under_way: 0,
            losses,
            lost: None,
            _control: control,
        };
        supervisor.schedule(supervisor.interval);
        Ok(supervisor)
    }

    fn schedule(&mut self, after: Option<Duration>) {
        self.next = after.map(|after| Instant::now() + after);
        self.status.set_next(after);
    }

    /// Serves events until the job has ended.
    fn supervise(mut self, inbox: &Receiver<Event>) -> Result<i32> {
        loop {
            match self.next_event(inbox) {
                Some(Event::Init(InitEvent::Exited { pid, code })) if pid == self.job.root_pid => {
                    return self.finish(inbox, code);
                }
                Some(Event::Init(InitEvent::Exited { .. })) => {}
                Some(Event::Init(InitEvent::Gone)) => bail!("the job's namespace was ended from outside"),
                Some(Event::Signal(signal)) => self.pass_on(signal),
                Some(Event::Wanted(answer)) => self.want(Some(answer)),
                Some(Event::Lost(loss)) => self.end_for(loss),
                Some(Event::Attempted { result, answer }) => self.attempted(result, answer),
                // The interval is over. One that is over while a checkpoint is being stored waits for it.
                None if self.under_way == 0 => self.want(None),
                None => self.schedule(None),
            }
        }
    }

    fn next_event(&self, inbox: &Receiver<Event>) -> Option<Event> {
        let timer = self.next.map_or_else(crossbeam_channel::never, crossbeam_channel::at);
        crossbeam_channel::select! {
            recv(inbox) -> event => event.ok(),
            recv(self.losses) -> loss => loss.ok().map(Event::Lost),
            recv(self.job.namespace.news()) -> event => Some(Event::Init(event.unwrap_or(InitEvent::Gone))),
            recv(timer) -> _ => None,
        }
    }

    fn want(&mut self, answer: Option<Answer>) {
        self.under_way += 1;
        self.schedule(None);
        let _ = self.attempts.send(answer);
    }

    fn attempted(&mut self, result: Result<Saved, AttemptError>, answer: Option<Answer>) {
        self.under_way -= 1;
        let reply = match result {
            Ok(saved) => {
                self.failures_in_a_row = 0;
                tracing::info!(
                    "snapshot {} saved: {:.1} MB, the job stood still for {:.2} s, durable after {:.1} s",
                    saved.id,
                    saved.bytes as f64 / 1e6,
                    saved.stall_s,
                    saved.durable_s
                );
                Reply::Checkpointed(saved)
            }
            Err(AttemptError::JobEnded) => Reply::Error("the job has ended".to_owned()),
            // It was told to give up.
            Err(_) if self.cancelled.load(Ordering::Relaxed) => Reply::Error("the job has ended".to_owned()),
            Err(error) => {
                self.failures_in_a_row += 1;
                self.failed(&error)
            }
        };
        if let Some(answer) = answer {
            let _ = answer.send(reply);
        }
        let retry = FIRST_RETRY.saturating_mul(1 << (self.failures_in_a_row.max(1) - 1).min(16));
        let after = self
            .interval
            .map(|interval| if self.failures_in_a_row > 0 { retry.min(interval) } else { interval });
        self.schedule(after);
    }

    /// The same reason is told once, not every ten minutes for three weeks.
    fn failed(&self, error: &AttemptError) -> Reply {
        let said = error.to_string();
        // Names of logs differ from one attempt to the next; the reason is what comes before.
        let reason = said.split(" CRIU's log is in").next().unwrap_or(&said).to_owned();
        if self.status.failed(&reason) {
            tracing::warn!("no snapshot this time; the job runs on: {said}");
        } else {
            tracing::debug!("no snapshot again: {said}");
        }
        Reply::Error(said)
    }

    fn pass_on(&self, signal: i32) {
        if signal == SIGWINCH {
            return self.job.stdio.resize();
        }
        // As a terminal would: these go to everything that the command runs in its process group.
        let group = signal == SIGINT || signal == SIGQUIT;
        if let Err(error) = self.job.namespace.signal(self.job.command_pid, group, signal) {
            tracing::debug!("signal {signal} was not passed on: {error}");
        }
    }

    /// The job cannot run on without what it had on the GPU, and would wait for it for ever.
    fn end_for(&mut self, loss: Loss) {
        if self.lost.is_some() {
            return tracing::debug!("GPU state is lost in another process: {loss}");
        }
        tracing::error!("{loss}. The job cannot run on, and is ended");
        if let Err(error) = self.job.namespace.signal(-1, false, SIGKILL) {
            tracing::warn!("the job cannot be ended: {error}");
        }
        self.lost = Some(loss);
    }

    /// What is said at the end of a job that was ended by [`Self::end_for`].
    fn ended_for(&self, loss: &Loss) -> anyhow::Error {
        let status = self.status.snapshot();
        let good = status.last_snapshot.map(|saved| saved.id).or(status.resumed_from);
        let next = match good {
            Some(id) => {
                format!("The snapshot {id} is good: run the same command again, and the job goes on from it")
            }
            None => {
                "There is no snapshot of it yet: the same command starts it from the beginning".to_owned()
            }
        };
        anyhow!("the job was ended because its GPU state was lost ({loss}). {next}")
    }

    fn finish(mut self, inbox: &Receiver<Event>, code: i32) -> Result<i32> {
        self.end_leftovers();
        if code != 0 && self.lost.is_none() {
            // It may have ended of that before it was ended for it.
            self.lost = self.losses.try_recv().ok();
        }
        let outcome = if code == 0 { JobOutcome::Complete } else { JobOutcome::Failed { code } };
        if code == 0 {
            self.cancelled.store(true, Ordering::Relaxed);
        } else if self.under_way > 0 {
            tracing::info!("the job has ended with {code}; its last snapshot is still being stored");
        }
        // What is being stored is needed if the job failed, and gives up at once if it did not.
        while self.under_way > 0 {
            match inbox.recv() {
                Ok(Event::Attempted { result, answer }) => self.attempted(result, answer),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        let record = self.record.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Err(error) = self.dir.set_record(&JobRecord { outcome, ..record }) {
            // The job's result is what counts. The next run takes it for one that died.
            tracing::error!(
                "the end of the job cannot be noted: {error}. Before the next run: --resume never if it was complete"
            );
        }
        let lost = self.lost.as_ref().map(|loss| self.ended_for(loss));
        // The checkpointer may not have let go yet; its thread ends when its channel does.
        drop(self.attempts);
        let job = wait_for_only_owner(self.job);
        if let Some(job) = job {
            let RunningJob { namespace, stdio, .. } = job;
            drop(namespace);
            stdio.finish(OUTPUT_LIMIT);
        }
        lost.map_or(Ok(code), Err)
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
        let deadline = Instant::now() + LEFTOVER_LIMIT;
        while left() > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn wait_for_only_owner(mut job: Arc<RunningJob>) -> Option<RunningJob> {
    let deadline = Instant::now() + LEFTOVER_LIMIT;
    loop {
        job = match Arc::try_unwrap(job) {
            Ok(job) => return Some(job),
            Err(shared) => shared,
        };
        if Instant::now() > deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn checkpoint_loop(
    mut checkpointer: Checkpointer,
    requests: &Receiver<Option<Answer>>,
    events: &Sender<Event>,
) {
    // Storing a snapshot takes second place to the job.
    let _ = rustix::process::setpriority_process(None, 10);
    while let Ok(answer) = requests.recv() {
        // A fault of ours costs this one checkpoint, neither the job nor the next one.
        let attempt = std::panic::AssertUnwindSafe(|| checkpointer.attempt());
        let result = std::panic::catch_unwind(attempt).unwrap_or(Err(AttemptError::Crashed));
        if events.send(Event::Attempted { result, answer }).is_err() {
            return;
        }
    }
}

/// Signals that were ignored when we started stay ignored, in us and in the job (nohup).
fn forward_signals(events: Sender<Event>) -> Result<()> {
    let wanted = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGCONT, SIGWINCH];
    let wanted = wanted.into_iter().filter(|&signal| !is_ignored(signal));
    let mut signals = signal_hook::iterator::Signals::new(wanted).context("cannot listen for signals")?;
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            for signal in signals.forever() {
                if events.send(Event::Signal(signal)).is_err() {
                    return;
                }
            }
        })
        .context("cannot listen for signals")?;
    Ok(())
}

fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    ignored >> (signal - 1) & 1 == 1
}
