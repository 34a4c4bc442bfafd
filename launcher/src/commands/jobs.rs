//! Commands about jobs: `checkpoint`, `stop`, `status`.

use super::print;
use super::report::effective;
use crate::cli::args::StopArgs;
use crate::cli::config::Config;
use crate::job::handover::Handover;
use crate::job::journal::{EventKind, Journal};
use crate::job::resume_point;
use crate::job::status::cut_text;
use crate::job::times::{self, Class};
use crate::observe::control_server::{all_sockets, socket_path};
use crate::report::failure::{is_closed_output, with_remedy};
use crate::store::root::{Root, present};
use crate::store::tiers::{self, REMOTE};
use crate::sys::deadline::{
    CALL_TIMEOUT, LAUNCHER_END_TIMEOUT, START_POLL_INTERVAL, START_WAIT_LIMIT, STOPPED_AFTER,
};
use crate::sys::error::{EXIT_NEGATIVE, EXIT_PREEMPTED, bad_input};
use crate::sys::progress::Bar;
use anyhow::{Context, Result, anyhow, bail};
use ckpt_protocol::control::{
    CONTROL_VERSION, Call, DeviceMemory, Held, JobStatus, Phase, Progress, Reply, Request, Saved, Stopped,
    Uploads,
};
use ckpt_protocol::frame;
use ckpt_snapshot::{JobDir, JobOutcome, JobRecord, Listed, ReadError, Store, Tiers};
use procfs_core::FromRead as _;
use procfs_core::process::Stat;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A launcher of another version, or a bug.
const UNEXPECTED_REPLY: &str =
    "the launcher sent an unexpected reply: use the same version of ckpt-run for the job and its commands";

/// The jobs that match `named` or `--job`; all jobs without a name.
///
/// # Errors
/// Bad input: no such job.
pub fn jobs(config: &Config, root: &Root, named: Option<&str>) -> Result<Vec<JobDir>> {
    let all = root.all_jobs()?;
    let Some(name) = named.or(config.job.as_ref().map(ckpt_snapshot::JobKey::as_str)) else {
        return Ok(present(all));
    };
    // A variable of a script that is not set.
    if name.is_empty() {
        bail!(bad_input(anyhow!("the name of a job is empty; leave it out for all jobs")));
    }
    let of = |is_wanted: &dyn Fn(&str) -> bool| {
        present(all.iter().filter(|job| is_wanted(job.key().as_str())).cloned().collect())
    };
    // Of a job that was deleted, the name is not the beginning of another one's.
    let is_exact = all.iter().any(|job| job.key().as_str() == name);
    let matching = of(&|key| if is_exact { key == name } else { key.starts_with(name) });
    if matching.is_empty() {
        let names = present(all);
        let names = names.iter().map(|job| job.key().to_string()).collect::<Vec<_>>().join(", ");
        let names = if names.is_empty() { "none".to_owned() } else { names };
        bail!(bad_input(anyhow!("there is no job {name:?} in {}; the jobs are: {names}", root.name())));
    }
    Ok(matching)
}

/// Calls `work` for each of several jobs. A job that fails is reported, and does not keep the others from being served:
/// another user may have closed it, or one of its records is damaged. Also returns the exit code.
///
/// # Errors
/// The error of the only job, and that the output is closed.
pub fn each<T>(jobs: &[JobDir], mut work: impl FnMut(&JobDir) -> Result<T>) -> Result<(Vec<T>, i32)> {
    let (mut done, mut code) = (Vec::new(), 0);
    for job in jobs {
        match work(job) {
            Ok(result) => done.push(result),
            Err(error) if jobs.len() == 1 || is_closed_output(&error) => return Err(error),
            Err(error) => {
                tracing::error!("the job {} is left out: {}", job.key(), with_remedy(&error));
                code = EXIT_NEGATIVE;
            }
        }
    }
    Ok((done, code))
}

/// The one job that matches: the named one, the only one, the only running one, or the only one that runs on this machine.
///
/// # Errors
/// Bad input: no such job, or several.
pub fn one_job(config: &Config, named: Option<&str>) -> Result<JobDir> {
    let root = Root::open(&config.store)?;
    let found = jobs(config, &root, named)?;
    let mut running: Vec<_> = found.iter().filter(|job| job.is_locked()).collect();
    // Machines may share a store.
    if running.len() > 1 {
        running.retain(|job| job.launcher_here().is_some());
    }
    match (&found[..], &running[..]) {
        ([job], _) => Ok(job.clone()),
        (_, [job]) => Ok((*job).clone()),
        ([], _) => bail!(bad_input(anyhow!("there is no job in {}", root.name()))),
        (several, _) => {
            let names = several.iter().map(|job| job.key().to_string()).collect::<Vec<_>>().join(", ");
            bail!(bad_input(anyhow!("name one of the jobs {names}")))
        }
    }
}

/// The connection to the launcher of a job; `None` if nobody listens.
fn connect(job: &JobDir) -> Result<Option<UnixStream>> {
    match UnixStream::connect(socket_path(job)?) {
        Ok(stream) => Ok(Some(stream)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            Ok(None)
        }
        Err(error) => bail!("cannot reach the launcher of the job {}: {error}", job.key()),
    }
}

/// Asks a launcher for what it knows or does at once. `None` if it does not answer.
fn ask(stream: &mut UnixStream, request: Request) -> Option<Reply> {
    // It may be stopped, or wait for a store.
    stream.set_read_timeout(Some(CALL_TIMEOUT)).ok()?;
    frame::write(stream, &Call { version: CONTROL_VERSION, request }).ok()?;
    frame::read(stream).ok()
}

/// Waits while the job is being started or resumed: its launcher listens once it runs.
fn connect_once_it_runs(job: &JobDir) -> Result<UnixStream> {
    let (begun, mut is_reported) = (Instant::now(), false);
    loop {
        if let Some(stream) = connect(job)? {
            return Ok(stream);
        }
        if !has_launcher_here(job) {
            bail!("the job {} is not running (on this machine, under this user)", job.key());
        }
        if begun.elapsed() >= START_WAIT_LIMIT {
            let why = waits_for(job).unwrap_or_else(|| "or its launcher cannot be reached".to_owned());
            bail!("the job {} is still being started or resumed, {why}", job.key());
        }
        if !is_reported {
            let why = waits_for(job).map_or_else(String::new, |what| format!(" ({what})"));
            tracing::info!("the job {} is being started or resumed{why}: waiting until it runs", job.key());
            is_reported = true;
        }
        std::thread::sleep(START_POLL_INTERVAL);
    }
}

/// Whether the job's launcher is a process of this user on this machine, as far as its PID tells.
fn has_launcher_here(job: &JobDir) -> bool {
    let Some(pid) = job.launcher_here() else { return false };
    let owner = std::fs::metadata(format!("/proc/{pid}")).map(|meta| meta.uid());
    owner.is_ok_and(|owner| owner == rustix::process::geteuid().as_raw())
}

/// Says that the launcher is stopped, if it is, and sends nothing within [`STOPPED_AFTER`].
fn tell_if_stopped(job: &JobDir, launcher: &UnixStream) -> Result<()> {
    let timeout = Timespec::try_from(STOPPED_AFTER)?;
    let mut answer = [PollFd::new(launcher, PollFlags::IN)];
    if retry_on_intr(|| rustix::event::poll(&mut answer, Some(&timeout)))? > 0 {
        return Ok(());
    }
    let Some(pid) = job.launcher_here() else { return Ok(()) };
    if Stat::from_file(format!("/proc/{pid}/stat")).is_ok_and(|stat| matches!(stat.state, 'T' | 't')) {
        tracing::warn!(
            "the launcher of the job {} is stopped: waiting until `kill -CONT {pid}` lets it go on",
            job.key()
        );
    }
    Ok(())
}

/// Sends a request that takes a snapshot, shows its progress, and returns the reply.
fn call_for_snapshot(job: &JobDir, request: Request) -> Result<Reply> {
    let mut stream = connect_once_it_runs(job)?;
    frame::write(&mut stream, &Call { version: CONTROL_VERSION, request })?;
    tell_if_stopped(job, &stream)?;
    let bar = Bar::new("saving", 0);
    loop {
        match frame::read(&mut stream).context("the launcher closed the connection")? {
            Reply::Progress(progress) if progress.phase == Phase::Persist => {
                bar.set(progress.done_bytes, progress.total_bytes);
            }
            Reply::Progress(_) => {}
            Reply::Error(reason) => bail!(reason),
            answer => return Ok(answer),
        }
    }
}

/// `ckpt-run checkpoint`.
///
/// # Errors
/// When the job is not running, or cannot be saved.
pub fn checkpoint(config: &Config, named: Option<&str>, json: bool) -> Result<i32> {
    let job = one_job(config, named)?;
    let Reply::Checkpointed(saved) = call_for_snapshot(&job, Request::Checkpoint)? else {
        bail!(UNEXPECTED_REPLY);
    };
    if json {
        return print::json(&saved);
    }
    writeln!(io::stdout(), "{}", saved.id)?;
    Ok(0)
}

/// `ckpt-run stop`.
///
/// # Errors
/// When the job is not running, runs on because it cannot be saved, or ended without a snapshot.
pub fn stop(config: &Config, args: &StopArgs) -> Result<i32> {
    let job = one_job(config, args.job.name())?;
    if let Some(what) = end_waiting(&job)? {
        tracing::info!(
            "the job {} did not run, and nothing is lost: its launcher, which was {what}, is ended",
            job.key()
        );
        let problem = Some(format!("it did not run: its launcher was {what}"));
        return if args.output.json { print::json(&Stopped { snapshot: None, problem }) } else { Ok(0) };
    }
    let request = if args.force { Request::ForceStop } else { Request::Stop };
    let Reply::Stopped(stopped) = call_for_snapshot(&job, request)? else { bail!(UNEXPECTED_REPLY) };
    await_end(&job);
    if args.output.json {
        print::json(&stopped)?;
    } else if let Some(id) = &stopped.snapshot {
        writeln!(io::stdout(), "{id}")?;
    }
    if stopped.snapshot.is_some() {
        return Ok(0);
    }
    let problem = stopped.problem.unwrap_or_else(|| "it ended before the snapshot".to_owned());
    bail!("the job {} ended without a final snapshot: {problem}", job.key())
}

/// The caller may start the job again immediately: the launcher must have exited by then.
fn await_end(job: &JobDir) {
    let deadline = Instant::now() + LAUNCHER_END_TIMEOUT;
    while job.is_locked() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Ends a launcher that waits before its job runs, such as for other nodes. Returns for what it has waited; `None` if it does
/// something else.
fn end_waiting(job: &JobDir) -> Result<Option<String>> {
    let Some(what) = waits_for(job) else { return Ok(None) };
    if connect(job)?.is_some() || !has_launcher_here(job) {
        return Ok(None);
    }
    let Some(pid) = job.launcher_here().and_then(|pid| Pid::from_raw(pid.cast_signed())) else {
        return Ok(None);
    };
    let ended = rustix::process::pidfd_open(pid, PidfdFlags::empty()).and_then(|launcher| {
        // The number may be that of another process: the launcher may be in a container.
        match holds_lock(job, pid) {
            true => rustix::process::pidfd_send_signal(launcher, Signal::TERM).map(|()| true),
            false => Ok(false),
        }
    });
    if !ended.with_context(|| format!("cannot end the launcher of the job {}", job.key()))? {
        return Ok(None);
    }
    await_end(job);
    if job.is_locked() {
        bail!("the launcher of the job {} (process {pid}), which was {what}, does not end", job.key());
    }
    Ok(Some(what))
}

/// Whether the process holds the job's lock.
fn holds_lock(job: &JobDir, pid: Pid) -> bool {
    let Ok(inode) = std::fs::metadata(job.path().join("lock")).map(|meta| meta.ino()) else { return false };
    // `1: FLOCK  ADVISORY  WRITE 1234 00:2a:5678 0 EOF` (proc_locks(5)).
    let is_it = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let file = words.get(5).and_then(|file| file.rsplit(':').next());
        words.get(1) == Some(&"FLOCK")
            && words.get(4) == Some(&&*pid.to_string())
            && file == Some(&*inode.to_string())
    };
    std::fs::read_to_string("/proc/locks").is_ok_and(|locks| locks.lines().any(is_it))
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum Ending {
    /// It runs, or its launcher was killed.
    Unfinished,
    /// It ended with 0.
    Complete,
    /// It failed.
    Failed {
        /// Its exit code, 128 + n for signal n.
        code: i32,
    },
    /// It was preempted, or stopped by its user.
    Stopped {
        /// The exit code of ckpt-run.
        code: i32,
    },
    /// The last start or resume failed.
    NotStarted,
}

impl Ending {
    /// From the record, and the last turn in the journal, which knows more.
    fn of(outcome: JobOutcome, last: Option<EventKind>) -> Self {
        match (outcome, last) {
            (JobOutcome::Complete, _) => Self::Complete,
            (_, Some(EventKind::NotStarted)) => Self::NotStarted,
            (JobOutcome::Unfinished, _) => Self::Unfinished,
            (JobOutcome::Failed { code }, Some(EventKind::Ended)) => Self::Stopped { code },
            (JobOutcome::Failed { code: EXIT_PREEMPTED }, None) => Self::Stopped { code: EXIT_PREEMPTED },
            (JobOutcome::Failed { code }, _) => Self::Failed { code },
        }
    }
}

/// The launcher's report without the job's name, which [`Status`] has already.
fn without_job<S: serde::Serializer>(launcher: &Option<JobStatus>, to: S) -> Result<S::Ok, S::Error> {
    let Some(launcher) = launcher else { return to.serialize_none() };
    let mut report = serde_json::to_value(launcher).map_err(serde::ser::Error::custom)?;
    if let Some(fields) = report.as_object_mut() {
        fields.remove("job");
    }
    report.serialize(to)
}

/// The state of a job.
#[derive(Serialize)]
pub struct Status {
    /// The name of the job.
    pub job: String,
    /// Whether a launcher holds the job.
    pub running: bool,
    /// How the last run ended.
    pub outcome: Ending,
    /// The number of snapshots.
    pub snapshots: usize,
    /// Whether the next run starts from one of them.
    #[serde(skip)]
    pub can_be_resumed: bool,
    /// Milliseconds in each class of time, since the first start; empty if nothing is recorded.
    pub time_ms: BTreeMap<Class, u64>,
    /// The report of the launcher.
    #[serde(flatten, serialize_with = "without_job")]
    pub launcher: Option<JobStatus>,
    /// For what it waits, if it is being started or resumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting: Option<String>,
    /// Why nothing else is known of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The store is an object store: other machines may run the job.
    #[serde(skip)]
    pub is_remote: bool,
}

impl Status {
    /// That of a job of which nothing is known.
    fn unknown(job: &JobDir) -> Self {
        Self {
            job: job.key().to_string(),
            running: job.is_locked(),
            outcome: Ending::Unfinished,
            snapshots: 0,
            can_be_resumed: false,
            time_ms: BTreeMap::new(),
            launcher: None,
            waiting: None,
            error: None,
            is_remote: false,
        }
    }
}

/// `ckpt-run status`: one job, or all.
///
/// # Errors
/// Bad input.
pub fn status(config: &Config, named: Option<&str>, json: bool) -> Result<i32> {
    let root = Root::open(&config.store)?;
    let all = read(config, &root, named, Store::list)?;
    let code = if all.iter().any(|status| status.error.is_some()) { EXIT_NEGATIVE } else { 0 };
    if json {
        print::json(&all)?;
        return Ok(code);
    }
    let mut out = io::stdout().lock();
    if all.is_empty() {
        writeln!(out, "there is no job in {}", root.name())?;
    }
    for status in &all {
        writeln!(out, "{}", print::plain(&headline(status)))?;
        report(status).iter().try_for_each(|line| writeln!(out, "{}", print::plain(line)))?;
    }
    Ok(code)
}

/// The job, its state, and the number of its snapshots.
#[must_use]
pub fn headline(status: &Status) -> String {
    let Status { job, snapshots, .. } = status;
    match &status.error {
        Some(error) => format!("{job}: cannot be read: {error}"),
        None => format!("{job}: {}, {}", state(status), print::count(*snapshots as u64, "snapshot")),
    }
}

/// The states of jobs; `list` selects the snapshots that are counted.
///
/// # Errors
/// Bad input.
pub fn read(
    config: &Config,
    root: &Root,
    named: Option<&str>,
    list: impl Fn(&Tiers) -> Result<Vec<Listed>, ReadError>,
) -> Result<Vec<Status>> {
    let mut all = Vec::new();
    let jobs = jobs(config, root, named)?;
    for job in &jobs {
        match read_one(config, job, &list) {
            Ok(status) => all.extend(status),
            Err(error) if jobs.len() == 1 => return Err(error),
            // The others are shown all the same.
            Err(error) => {
                all.push(Status { error: Some(with_remedy(&error)), ..Status::unknown(job) });
            }
        }
    }
    Ok(all)
}

/// The record of another machine that has continued the job; `None` also if the object store does not say.
pub(super) fn newer_claim(config: &Config, job: &JobDir, record: &JobRecord) -> Option<JobRecord> {
    let mut handover = Handover::of(&config.store, job).ok()??;
    let newer = handover.newer_claim(Some(record));
    newer
        .inspect_err(|error| {
            tracing::warn!("cannot find out whether the job has continued on another machine: {error}");
        })
        .ok()?
}

/// The state of one job; `None` if it has no record yet, and no launcher.
fn read_one(
    config: &Config,
    job: &JobDir,
    list: &impl Fn(&Tiers) -> Result<Vec<Listed>, ReadError>,
) -> Result<Option<Status>> {
    let running = job.is_locked();
    // A job on several nodes is claimed once all of them are there.
    let Some(record) = job.record()? else {
        return Ok(running.then(|| Status { waiting: waits_for(job), ..Status::unknown(job) }));
    };
    let store = tiers::open(&config.store, job)?;
    let listed = list(&store)?;
    let launcher = running.then(|| ask_status(job)).flatten();
    let waiting = Some(job).filter(|_| running && launcher.is_none()).and_then(waits_for);
    // Another machine may have continued a job with uploads.
    let newer = if running { None } else { newer_claim(config, job, &record) };
    let is_remote = job.records_medium().is_some() || newer.is_some();
    let time_ms = times::of_job(job, running).ok().flatten().map(|times| times.time_ms);
    let last = Journal::of(job).last_turn().filter(|_| !running && newer.is_none()).map(|entry| entry.kind);
    let outcome = newer.map_or(record.outcome, |newer| newer.outcome);
    Ok(Some(Status {
        job: job.key().to_string(),
        running,
        outcome: Ending::of(outcome, last),
        snapshots: listed.len(),
        // Uploads may not be listed.
        can_be_resumed: listed.is_empty() && store.tier(REMOTE).is_ok()
            || !resume_point::of_next_run(job, &store, &listed)?.is_empty(),
        time_ms: time_ms.unwrap_or_default(),
        launcher,
        waiting,
        error: None,
        is_remote,
    }))
}

/// `ckpt-run ps`: the running jobs of this user on this machine, in whatever store.
///
/// # Errors
/// When stdout cannot be written.
pub fn running(json: bool) -> Result<i32> {
    let of_socket = |path: &PathBuf| {
        let mut launcher = UnixStream::connect(path).ok()?;
        let status = status_from(&mut launcher);
        if status.is_none() {
            tracing::warn!(
                "the launcher at {} does not answer: it is stopped, waits for its store, or has just ended. Its job is left out here",
                path.display()
            );
        }
        status
    };
    let all: Vec<_> = all_sockets().iter().filter_map(of_socket).collect();
    if json {
        return print::json(&all);
    }
    let row = |one: &JobStatus| {
        let newest = one.newest_unix_ms.map_or_else(|| "-".to_owned(), print::ago);
        let state = if one.restart_s.is_some() { "waiting for its restart" } else { "running" };
        let pid = one.launcher_pid.to_string();
        vec![
            one.job.clone(),
            pid,
            state.to_owned(),
            print::ago(one.started_unix_ms),
            newest,
            one.store.clone(),
        ]
    };
    let head = ["JOB", "PROCESS", "STATE", "STARTED", "NEWEST SNAPSHOT", "STORE"];
    print::table(&head, all.iter().map(row).collect())
}

/// The last lines that the running job has written. `None` if its launcher cannot say.
#[must_use]
pub fn output(job: &JobDir) -> Option<String> {
    match ask(&mut connect(job).ok()??, Request::Output)? {
        Reply::Output(text) => Some(text),
        _ => None,
    }
}

/// Has the launcher of a running job free the space of deleted snapshots, or says when that will be.
pub fn reclaim(job: &JobDir) {
    let reply = connect(job).ok().flatten().and_then(|mut launcher| ask(&mut launcher, Request::Reclaim));
    let when = match reply {
        Some(Reply::Reclaimed) => return,
        Some(Reply::Progress(_)) => "once the checkpoint in progress is over".to_owned(),
        Some(Reply::Error(why)) => format!("after the next checkpoint ({why})"),
        _ => "after the next checkpoint: its launcher does not answer".to_owned(),
    };
    tracing::info!("the space of deleted snapshots of the job {} is free {when}", job.key());
}

/// For what the launcher of a job waits before the job runs.
fn waits_for(job: &JobDir) -> Option<String> {
    Journal::of(job).waits_for(job.launcher_here()?)
}

fn ask_status(job: &JobDir) -> Option<JobStatus> {
    status_from(&mut connect(job).ok()??)
}

fn status_from(stream: &mut UnixStream) -> Option<JobStatus> {
    match ask(stream, Request::Status)? {
        Reply::Status(status) => Some(*status),
        _ => None,
    }
}

/// When the watchdog last saw a running job work, milliseconds since 1970 UTC; `None` without a watchdog. If its launcher
/// does not answer, that may be any time ago.
#[must_use]
pub fn last_progress_unix_ms(job: &JobDir) -> Option<u64> {
    ask_status(job).map_or(Some(0), |status| status.last_progress_unix_ms)
}

/// The snapshots in the memory of the job's launcher, oldest first.
#[must_use]
pub fn held(job: &JobDir) -> Vec<Held> {
    let status = job.is_locked().then(|| ask_status(job)).flatten();
    status.and_then(|status| status.in_memory).map(|memory| memory.snapshots).unwrap_or_default()
}

/// Whether the job is running, and how it ended.
#[must_use]
pub fn state(status: &Status) -> String {
    let again = match status.can_be_resumed {
        true => "run it again to resume",
        false => "run it again to start from the beginning: there is no snapshot to resume from",
    };
    match (status.running, status.outcome) {
        (true, _) if status.launcher.as_ref().is_some_and(|launcher| launcher.restart_s.is_some()) => {
            "waiting for its restart".to_owned()
        }
        (true, _) if status.waiting.is_some() => "waiting".to_owned(),
        (true, _) => "running".to_owned(),
        (false, Ending::Complete) => "complete".to_owned(),
        (false, Ending::Failed { code }) => format!("ended with {code}; {again}"),
        (false, Ending::Stopped { code: EXIT_PREEMPTED }) => format!("stopped; {again}"),
        (false, Ending::Stopped { code }) => format!("stopped by its user, with {code}; {again}"),
        (false, Ending::NotStarted) => {
            "could not be started or resumed; `ckpt-run explain` says why".to_owned()
        }
        (false, Ending::Unfinished) if status.is_remote => {
            format!("runs on another machine, or died with its launcher; if it died, {again}")
        }
        (false, Ending::Unfinished) => format!("died with its launcher; {again}"),
    }
}

fn unread(bytes: u64) -> String {
    if bytes == 0 { String::new() } else { format!(" ({} unchanged and not read)", print::bytes(bytes)) }
}

/// The report of the job's launcher, one line per fact.
#[must_use]
pub fn report(status: &Status) -> Vec<String> {
    let time = effective(&status.time_ms).map(|time| format!("  time             {time}"));
    let Some(launcher) = &status.launcher else {
        if !status.running {
            // Of a job that may have gone on elsewhere, the journal here does not tell all.
            return time.into_iter().filter(|_| !status.is_remote).collect();
        }
        let silent = "  launcher         does not answer: it is starting or resuming the job, is stopped, or belongs to another machine or user";
        let why = status
            .waiting
            .as_ref()
            .map_or_else(|| silent.to_owned(), |what| format!("  launcher         {what}"));
        return vec![why];
    };
    let started = print::ago(launcher.started_unix_ms);
    let mut lines = vec![format!("  launcher         process {}, started {started}", launcher.launcher_pid)];
    if let Some(failure) = &launcher.last_job_failure {
        let when = launcher.restart_s.map_or_else(String::new, |left| format!("; the next in {left:.0} s"));
        lines.push(format!("  restarts         {}{when}; last failure: {failure}", launcher.restarts));
    }
    lines.extend(launcher.late_ranks.iter().map(|late| format!("  late rank        {}", late.describe())));
    lines.extend(time);
    lines.extend(launcher.resumed_from.iter().map(|id| format!("  resumed from     {id}")));
    lines.extend(report_newest(launcher));
    lines.extend(report_activity(launcher));
    lines.push(format!("  snapshots        {} saved, {} failed", launcher.saved, launcher.failed));
    lines.extend(launcher.last_failure.iter().map(|failure| format!("  last failure     {failure}")));
    lines.extend(launcher.uploads.iter().flat_map(report_uploads));
    lines
}

/// The newest snapshot, snapshots in memory, and device memory.
fn report_newest(launcher: &JobStatus) -> Vec<String> {
    let mut lines = vec![match &launcher.last_snapshot {
        Some(saved) => format!(
            "  newest snapshot  {} ({}{}), {}{}, job paused for {:.2} s",
            saved.id,
            print::ago(saved.taken_unix_ms),
            if is_in_memory_only(launcher, saved) { ", in memory only" } else { "" },
            print::bytes(saved.bytes),
            unread(saved.unread_bytes),
            saved.stall_s
        ),
        None => "  newest snapshot  none since the start".to_owned(),
    }];
    let cut = launcher.last_snapshot.iter().flat_map(|saved| &saved.cut);
    lines.extend(cut.map(|cut| format!("  cut              {}", cut_text(cut.duration_s, cut.attempts))));
    let uncovered = launcher.last_snapshot.iter().flat_map(|saved| &saved.uncovered_files);
    lines.extend(uncovered.map(|(path, reason)| format!("  not covered      {path}: {reason}")));
    if let Some(memory) = &launcher.in_memory {
        let newest = memory.newest_in_store.as_deref().unwrap_or("none since the start");
        let count = print::count(memory.snapshots.len() as u64, "snapshot");
        lines.push(format!("  in memory        {count}; in the store: {newest}"));
        lines.extend(memory.newest_replica.iter().map(|id| format!("  newest replica   {id}")));
        lines.extend(memory.last_failure.iter().map(|why| format!("  last copy        failed: {why}")));
    }
    lines.extend(launcher.device_memory.iter().map(|it| format!("  device memory    {}", device_memory(it))));
    lines
}

/// The checkpoint under way, and the time of the next.
fn report_activity(launcher: &JobStatus) -> impl Iterator<Item = String> {
    let Progress { phase, done_bytes, total_bytes } = launcher.progress;
    let now = match phase {
        Phase::Idle => None,
        Phase::Dump => Some("  now              saving: the job is paused".to_owned()),
        Phase::Persist => {
            let (done, total) = (print::bytes(done_bytes), print::bytes(total_bytes));
            Some(format!("  now              storing a snapshot: {done} of {total}"))
        }
    };
    now.into_iter().chain(launcher.next_checkpoint_s.map(|next| format!("  next snapshot    in {next:.0} s")))
}

fn report_uploads(uploads: &Uploads) -> Vec<String> {
    let newest = uploads.newest.as_ref().map_or_else(String::new, |id| format!("; newest {id}"));
    let (uploaded, failed) = (uploads.uploaded, uploads.failed);
    let mut lines = vec![format!("  uploads          {uploaded} uploaded, {failed} failed{newest}")];
    lines.extend(uploads.uploading.iter().map(|id| format!("  uploading        {id}")));
    lines.extend(uploads.last_failure.iter().map(|why| format!("  last upload      failed: {why}")));
    lines
}

fn is_in_memory_only(launcher: &JobStatus, saved: &Saved) -> bool {
    let newest = launcher.in_memory.as_ref().and_then(|memory| memory.newest_in_store.as_ref());
    saved.in_memory && newest != Some(&saved.id)
}

/// What the last checkpoint did with device memory.
fn device_memory(memory: &DeviceMemory) -> String {
    let size = print::sizes(memory.bytes, memory.changed_bytes, &print::count(memory.processes, "process"));
    let stayed = match (memory.parked_bytes, memory.copied_back_bytes) {
        // No process has put its memory back yet.
        (0, 0) => String::new(),
        (_, 0) => "; it stayed on the GPU meanwhile".to_owned(),
        (0, copied) => format!("; {} were copied back", print::bytes(copied)),
        (parked, copied) => format!(
            "; {} stayed on the GPU meanwhile, {} were copied back",
            print::bytes(parked),
            print::bytes(copied)
        ),
    };
    let why = memory.not_parked_because.as_ref().map_or_else(String::new, |why| format!(" ({why})"));
    let held = match (memory.mirror.as_str(), memory.mirror_bytes) {
        // A launcher of an earlier version.
        ("", 0) => String::new(),
        ("", bytes) => format!("; its copy takes {} of host memory", print::bytes(bytes)),
        (mode, bytes) => format!("; its copy takes {} of host memory (--mirror {mode})", print::bytes(bytes)),
    };
    format!("{size}{stayed}{why}{held}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_for_the_copy_is_shown() {
        let memory = DeviceMemory { bytes: 4_000_000, mirror_bytes: 1_000_000, ..DeviceMemory::default() };
        assert!(device_memory(&memory).ends_with("; its copy takes 1.0 MB of host memory"));
        let partial = DeviceMemory { mirror: "changed".into(), mirror_bytes: 0, ..memory };
        let said = device_memory(&partial);
        assert!(said.ends_with("; its copy takes 0 B of host memory (--mirror changed)"), "{said}");
        let all = DeviceMemory { mirror: "all".into(), mirror_bytes: 1_000_000, ..partial };
        let said = device_memory(&all);
        assert!(said.ends_with("; its copy takes 1.0 MB of host memory (--mirror all)"), "{said}");
    }

    #[test]
    fn memory_that_was_copied_back_is_shown_with_the_reason() {
        let parked = DeviceMemory { processes: 2, bytes: 4_000_000, ..DeviceMemory::default() };
        let parked = DeviceMemory { changed_bytes: Some(5000), parked_bytes: 4_000_000, ..parked };
        assert_eq!(
            device_memory(&parked),
            "4.0 MB in 2 processes, 5.0 kB changed since the previous checkpoint; it stayed on the GPU meanwhile"
        );
        let part = DeviceMemory { parked_bytes: 3_000_000, copied_back_bytes: 1_000_000, ..parked.clone() };
        assert!(
            device_memory(&part).ends_with("; 3.0 MB stayed on the GPU meanwhile, 1.0 MB were copied back"),
            "{}",
            device_memory(&part)
        );
        let not_parked_because = Some("process 7: the driver exports nothing".to_owned());
        let none = DeviceMemory { parked_bytes: 0, copied_back_bytes: 1, not_parked_because, ..parked };
        assert!(
            device_memory(&none).ends_with("; 1 B were copied back (process 7: the driver exports nothing)"),
            "{}",
            device_memory(&none)
        );
    }
}
