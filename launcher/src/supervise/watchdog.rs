//! Hang detection: of the whole job, here, and of single ranks of NCCL (`late.rs`). A job hangs if, for `--hang-timeout`, no
//! process has used the CPU or called its GPU, or if one process has been stopped for that long. A part of a job on several
//! nodes that does nothing may wait for another one: node 0 is told, and the job hangs if all parts do nothing.
//!
//! CPU time is no progress in a process that waits for its GPU, since drivers spin. A process waits while one of its
//! threads stays in the same waiting call, or polls in vain whether the GPU is done, and no thread submits work. Other
//! threads do not count meanwhile, since NCCL spins for the network. The process's interposer reports all that. Without an
//! interposer, there is only CPU time.
//!
//! An idle process still uses some CPU time: threads of libraries wake up from time to time. A process counts as idle
//! while it uses less than 1% of one CPU. CPU time that a checkpoint costs is not counted: a hung job that is saved
//! repeatedly still hangs.

mod late;
mod observe;

use super::events::{Event, Hang};
use super::stacks;
use crate::agents::{ActivityProbe, GpuActivity};
use crate::cli::config::HangTimeout;
use crate::cluster::RankReports;
use crate::job::journal::{Entry, EventKind, Journal};
use crate::job::status::SharedStatus;
use crate::namespace::Tree;
use crate::sys::deadline::{AUTO_HANG_TIMEOUT, LATE_RANK_TIMEOUT};
use anyhow::{Context, Result};
use ckpt_protocol::control::LateRank;
use ckpt_snapshot::JobDir;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use late::{CallId, Late, LateRanks};
use observe::{Gpu, Key, Process, Seen, TICK};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Polls at least this many times within the limit.
const POLLS: u32 = 8;
/// Share of one CPU below which a process is idle in the long run.
const IDLE_SHARE: f64 = 0.01;
/// CPU time between two polls that counts as progress at once, however long the job was idle before.
const BURST: Duration = Duration::from_millis(100);
/// How late a poll may be on a busy machine.
const SLACK: Duration = Duration::from_secs(2);

/// What is watched.
pub struct Watched {
    /// The job's processes.
    pub tree: Tree,
    /// Asks their interposers, if they have any.
    pub activity_probe: Option<ActivityProbe>,
    /// What the other nodes of the job report, if it is on several: what does nothing here may wait for another node.
    pub nodes: Option<RankReports>,
    /// When a job that makes no progress is ended; `None` is never.
    pub timeout: Option<HangTimeout>,
    /// The polling interval with a timeout; several polls fit into each limit in any case.
    pub every: Duration,
    /// Where the stacks of a hung job are saved.
    pub dir: JobDir,
    /// Tells when checkpoints are taken, and receives the time of the last progress.
    pub status: Arc<SharedStatus>,
    /// Late ranks are recorded here.
    pub journal: Arc<Journal>,
}

impl Watched {
    /// For how long no process of the job may do anything.
    fn idle_limit(&self) -> Option<Duration> {
        self.timeout.map(|timeout| match timeout {
            HangTimeout::Auto => AUTO_HANG_TIMEOUT,
            HangTimeout::After(limit) => limit,
        })
    }

    /// The late ranks of the job. Of several nodes, node 0 knows them.
    fn late_ranks(&self, ranks: &mut LateRanks, seen: &Seen, now: Instant, is_disturbed: bool) -> Vec<Late> {
        let Some(nodes) = &self.nodes else { return ranks.update(seen, Vec::new(), now, is_disturbed) };
        if nodes.compares() {
            return ranks.update(seen, nodes.of_others(), now, is_disturbed);
        }
        ranks.update(seen, Vec::new(), now, is_disturbed);
        if ranks.has_ranks() {
            nodes.tell(ranks.reports(seen));
        }
        Vec::new()
    }

    fn polling_interval(&self, late_limit: Duration) -> Duration {
        let idle = self.idle_limit().map(|limit| self.every.min(limit / POLLS));
        idle.unwrap_or(late_limit).min(late_limit / POLLS)
    }
}

/// For how long a rank may let others wait.
fn late_limit() -> Duration {
    #[cfg(feature = "faults")]
    if let Ok(text) = std::env::var("CKPT_FAULT_LATE_RANK_MS") {
        return Duration::from_millis(text.parse().expect("milliseconds"));
    }
    LATE_RANK_TIMEOUT
}

/// Watches one job session; ends when it is dropped.
pub struct Watchdog {
    _stop: Sender<()>,
}

impl Watchdog {
    /// Starts to watch the processes of a job.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn begin(watched: Watched, events: Sender<Event>) -> Result<Self> {
        let (stop, stopped) = bounded(0);
        let work = move || {
            let hang = |(what, since): (String, SystemTime)| {
                let stacks = stacks::keep(&watched.dir, watched.tree, &what);
                let stacks = stacks
                    .inspect_err(|error| tracing::warn!("cannot save the stacks of the hung job: {error:#}"))
                    .ok();
                Hang { init_pid: watched.tree.init_pid, what, since, stacks }
            };
            let of_part = |found: Option<(String, SystemTime)>| {
                let _ = events.send(match found {
                    Some(found) => Event::Idle(hang(found)),
                    None => Event::Works { init_pid: watched.tree.init_pid },
                });
            };
            if let Some(found) = watch(&watched, &stopped, &of_part) {
                let _ = events.send(Event::Hung(hang(found)));
            }
        };
        let thread = std::thread::Builder::new().name("watchdog".to_owned()).spawn(work);
        thread.context("cannot start the watchdog")?;
        Ok(Self { _stop: stop })
    }
}

/// Watches until the job hangs, or until the [`Watchdog`] is dropped. Tells when a part of a job does nothing, and when it works
/// again.
fn watch(
    watched: &Watched,
    stopped: &Receiver<()>,
    of_part: &dyn Fn(Option<(String, SystemTime)>),
) -> Option<(String, SystemTime)> {
    let status = &watched.status;
    let late_limit = late_limit();
    let every = watched.polling_interval(late_limit);
    let mut progress: Option<Progress> = None;
    let node = watched.nodes.as_ref().map(RankReports::node);
    let mut late_ranks = LateRanks::new(late_limit, node, Instant::now());
    let mut alarms = Alarms::default();
    let mut disturbances = status.disturbances();
    let mut polled = Instant::now();
    let mut is_told = false;
    loop {
        if stopped.recv_timeout(every) != Err(RecvTimeoutError::Timeout) {
            return None;
        }
        let seen =
            observe::poll(watched, watched.timeout.is_some() || late_ranks.has_ranks()).unwrap_or_default();
        let now = Instant::now();
        // Odd: a checkpoint is in progress.
        let before = std::mem::replace(&mut disturbances, status.disturbances());
        let is_disturbed = before != disturbances || disturbances % 2 == 1;
        // After `docker pause` or a suspend, the watchdog has slept with the job and has seen nothing.
        let was_asleep =
            now.saturating_duration_since(std::mem::replace(&mut polled, now)) > every * 3 + SLACK;
        let is_disturbed = is_disturbed || was_asleep;
        let late = watched.late_ranks(&mut late_ranks, &seen, now, is_disturbed);
        status.late_ranks(late.iter().map(|late| late.rank.clone()).collect());
        if let Some(hang) = alarms.update(&late, &watched.journal)
            && watched.timeout == Some(HangTimeout::Auto)
        {
            return Some(hang);
        }
        let Some(limit) = watched.idle_limit() else { continue };
        let Some(progress) = &mut progress else {
            progress = Some(Progress::new(seen, now));
            continue;
        };
        progress.update(seen, now, is_disturbed);
        status.worked(SystemTime::now() - now.saturating_duration_since(progress.worked_until()));
        match progress.hang(now, limit) {
            Some(Found { what, idle, is_stopped }) => {
                let found = (what, SystemTime::now() - idle);
                if watched.nodes.is_none() || is_stopped {
                    return Some(found);
                }
                if !std::mem::replace(&mut is_told, true) {
                    of_part(Some(found));
                }
            }
            None if std::mem::take(&mut is_told) => of_part(None),
            None => {}
        }
    }
}

/// Late ranks that do nothing, as they were last seen.
#[derive(Default)]
struct Alarms(BTreeMap<CallId, LateRank>);

impl Alarms {
    /// Records new alarms, and which are over: the rank works, nobody waits for it, or it has ended. Returns the first rank that hangs, and since when.
    fn update(&mut self, late: &[Late], journal: &Journal) -> Option<(String, SystemTime)> {
        let hanging: BTreeMap<_, _> =
            late.iter().filter(|late| late.rank.hangs()).map(|late| (late.id, late)).collect();
        self.0.retain(|id, was| {
            let still_hangs = hanging.contains_key(id);
            if !still_hangs {
                let what = format!("rank {} does not hang any more, after {:.0} s", was.rank, was.late_s);
                tracing::info!("{what}");
                journal.add(&Entry::new(EventKind::Noted, what));
            }
            still_hangs
        });
        for (id, late) in &hanging {
            if self.0.insert(*id, late.rank.clone()).is_none() {
                let what = late.rank.describe();
                tracing::warn!("{what}");
                let remedy = "look at what the rank waits for, for example with `py-spy dump`. With `--hang-timeout auto`, the job is restarted from its newest snapshot";
                journal.add(&Entry::new(EventKind::RankLate, what).remedy(Some(remedy)));
            }
        }
        let first = hanging.into_values().min_by_key(|late| late.since)?;
        Some((format!("{} (--hang-timeout auto)", first.rank.describe()), first.since))
    }
}

/// What a process had done when the job last made progress.
#[derive(Default)]
struct Done {
    cpu: Duration,
    /// Calls to its GPUs; `None` if unknown.
    calls: Option<u64>,
}

/// What a process has done since the job last made progress.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Since {
    Nothing,
    /// It has used the CPU while it waited for its GPU.
    Waited,
    /// It has used the CPU for an unknown purpose.
    Unclear,
    Progress,
}

/// A job, or a part of one, that does nothing.
struct Found {
    what: String,
    idle: Duration,
    /// A process is stopped, for as long as that.
    is_stopped: bool,
}

/// Observations since the last progress.
struct Progress {
    seen: Seen,
    polled: Instant,
    /// When the job last made progress.
    last: Instant,
    /// The same, plus the time that checkpoints have taken; and what the processes had done then.
    since: Instant,
    then: BTreeMap<Key, Done>,
    /// Since when processes have been stopped.
    stopped: BTreeMap<Key, Instant>,
    /// A process that has waited for its GPU since then.
    waited: Option<Key>,
    /// Whether the activity of some process is unknown.
    is_unclear: bool,
}

impl Progress {
    fn new(seen: Seen, now: Instant) -> Self {
        let mut progress = Self {
            then: BTreeMap::new(),
            stopped: BTreeMap::new(),
            polled: now,
            last: now,
            since: now,
            seen: Seen::new(),
            waited: None,
            is_unclear: false,
        };
        progress.update(seen, now, false);
        progress
    }

    /// Adds an observation. While the job `is_disturbed` by a checkpoint, time does not count.
    fn update(&mut self, seen: Seen, now: Instant, is_disturbed: bool) {
        let passed = now.saturating_duration_since(self.polled);
        let before = std::mem::replace(&mut self.seen, seen);
        self.polled = now;
        self.stopped.retain(|key, _| self.seen.get(key).is_some_and(|process| process.is_stopped));
        for (key, _) in self.seen.iter().filter(|(_, process)| process.is_stopped) {
            self.stopped.entry(*key).or_insert(now);
        }
        let same = before.len() == self.seen.len() && before.keys().all(|key| self.seen.contains_key(key));
        let used = |key: &Key, process: &Process| {
            before.get(key).map_or(process.cpu, |before| process.cpu.saturating_sub(before.cpu))
        };
        if is_disturbed && same && !self.seen.iter().any(|(key, process)| self.has_called(key, process)) {
            self.since += passed;
            self.stopped.values_mut().for_each(|since| *since = (*since + passed).min(now));
            for (key, process) in &self.seen {
                self.then.entry(*key).or_default().cpu += used(key, process);
            }
            return;
        }
        let idle_most = TICK + now.saturating_duration_since(self.since).mul_f64(IDLE_SHARE);
        let burst = BURST.max(passed.mul_f64(IDLE_SHARE * 5.0));
        let mut is_progress = !same;
        (self.waited, self.is_unclear) = (None, false);
        for (key, process) in &self.seen {
            let in_all =
                process.cpu.saturating_sub(self.then.get(key).map_or(Duration::ZERO, |done| done.cpu));
            match self.since_then(key, process, in_all > idle_most || used(key, process) > burst) {
                Since::Nothing => {}
                Since::Waited => self.waited = Some(*key),
                Since::Unclear => self.is_unclear = true,
                Since::Progress => is_progress = true,
            }
        }
        // Processes that start or end are progress too.
        if is_progress {
            (self.last, self.since) = (now, now);
            let done = |process: &Process| Done { cpu: process.cpu, calls: process.gpu.calls() };
            self.then = self.seen.iter().map(|(key, process)| (*key, done(process))).collect();
        }
    }

    /// Whether a process has submitted work to its GPUs.
    fn has_called(&self, key: &Key, process: &Process) -> bool {
        let then = self.then.get(key).and_then(|done| done.calls);
        then.zip(process.gpu.calls()).is_some_and(|(then, now)| then != now)
    }

    /// What a process has done; `is_busy` is whether it has used the CPU.
    fn since_then(&self, key: &Key, process: &Process, is_busy: bool) -> Since {
        let then = self.then.get(key).and_then(|done| done.calls);
        match process.gpu {
            _ if self.has_called(key, process) => Since::Progress,
            _ if !is_busy => Since::Nothing,
            Gpu::Reported(GpuActivity { calls, is_waiting: true }) if then == Some(calls) => Since::Waited,
            Gpu::Unanswered => Since::Unclear,
            Gpu::Unseen | Gpu::Reported(_) => Since::Progress,
        }
    }

    /// When every process was last seen to work: if the job hangs, snapshots until then are good.
    fn worked_until(&self) -> Instant {
        self.stopped.values().copied().fold(self.last, Instant::min)
    }

    /// What hangs.
    fn hang(&self, now: Instant, limit: Duration) -> Option<Found> {
        let ago = |at: Instant| now.saturating_duration_since(at);
        let is_idle = ago(self.since) >= limit && !self.is_unclear;
        let longest = self.stopped.iter().min_by_key(|(_, since)| **since);
        let longest = longest.filter(|(_, since)| is_idle || ago(**since) >= limit);
        let said = humantime::format_duration(limit);
        let named = |key| {
            let Process { pid, name, .. } = &self.seen[key];
            format!("process {pid} ({name})")
        };
        match longest {
            Some((key, since)) => {
                let what = format!(
                    "{} has been stopped (SIGSTOP or the like), for about {said} (--hang-timeout)",
                    named(key)
                );
                Some(Found { what, idle: ago(*since), is_stopped: ago(*since) >= limit })
            }
            None if is_idle => {
                let what = match &self.waited {
                    Some(key) => format!(
                        "{} has waited for its GPU for {said} and submitted nothing to it, and no other process has done anything (--hang-timeout)",
                        named(key)
                    ),
                    None => {
                        format!(
                            "none of its processes has done anything for about {said}: together they used less than 1% of a CPU (--hang-timeout)"
                        )
                    }
                };
                Some(Found { what, idle: ago(self.last), is_stopped: false })
            }
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const LIMIT: Duration = Duration::from_secs(20);

    fn job(cpu_ms: &[u64]) -> Seen {
        let process = |(pid, &ms): (i32, &u64)| {
            let cpu = Duration::from_millis(ms);
            ((pid, 1), Process { pid, name: "p".into(), cpu, ..Process::default() })
        };
        (10..).zip(cpu_ms).map(process).collect()
    }

    /// Polls the state `at` each second. Returns the second in which the job was found to hang.
    fn hangs_after(at: impl Fn(u64) -> (Seen, bool)) -> Option<u64> {
        let begun = Instant::now();
        let mut progress = Progress::new(at(0).0, begun);
        (1..120).find(|&second| {
            let now = begun + SECOND * u32::try_from(second).unwrap();
            let (seen, is_disturbed) = at(second);
            progress.update(seen, now, is_disturbed);
            progress.hang(now, LIMIT).is_some()
        })
    }

    #[test]
    fn an_idle_job_hangs_and_a_busy_one_does_not() {
        assert_eq!(hangs_after(|_| (job(&[5000, 70]), false)), Some(20));
        assert_eq!(hangs_after(|second| (job(&[5000, second * 900]), false)), None);
        // A heartbeat of half a percent is no progress, five percent is.
        assert_eq!(hangs_after(|second| (job(&[second * 5]), false)), Some(20));
        assert_eq!(hangs_after(|second| (job(&[second * 50]), false)), None);
        // A burst every 15 seconds is.
        assert_eq!(hangs_after(|second| (job(&[second / 15 * 200]), false)), None);
    }

    #[test]
    fn processes_that_come_and_go_are_progress() {
        assert_eq!(
            hangs_after(|second| (job(if second / 10 % 2 == 0 { &[1] } else { &[1, 1] }), false)),
            None
        );
    }

    #[test]
    fn checkpoints_neither_hide_a_hang_nor_make_one() {
        // Every tenth second a checkpoint costs the process a second of CPU time.
        let hung = |second: u64| (job(&[second.div_ceil(10) * 1000]), second % 10 == 1);
        assert_eq!(hangs_after(hung), Some(23), "three of the seconds were the checkpoints'");
        // One long dump.
        assert_eq!(
            hangs_after(|second| (job(&[second.saturating_sub(100) * 500]), (1..=100).contains(&second))),
            None
        );
    }

    #[test]
    fn a_stopped_process_hangs_beside_busy_ones() {
        let one_stopped = |second: u64| {
            let mut seen = job(&[100, second * 900]);
            seen.get_mut(&(10, 1)).unwrap().is_stopped = second >= 5;
            (seen, false)
        };
        assert_eq!(hangs_after(one_stopped), Some(25));
    }

    /// Two processes; the first uses a CPU, and its interposer reports `gpu`.
    fn with_gpu(second: u64, gpu: Gpu) -> Seen {
        let mut seen = job(&[second * 900, 70]);
        seen.get_mut(&(10, 1)).unwrap().gpu = gpu;
        seen
    }

    fn reported(calls: u64, is_waiting: bool) -> Gpu {
        Gpu::Reported(GpuActivity { calls, is_waiting })
    }

    #[test]
    fn cpu_time_of_a_process_that_waits_for_its_gpu_is_no_progress() {
        let waits = |second| (with_gpu(second, reported(5, true)), false);
        assert_eq!(hangs_after(waits), Some(20));
        // Waiting begins after ten seconds, in a call that counts as one.
        let begins = |second| (with_gpu(second, reported(5 + u64::from(second > 10), second > 10)), false);
        assert_eq!(hangs_after(begins), Some(31));
        // What is computed without the GPU is progress, whatever was done with it before.
        assert_eq!(hangs_after(|second| (with_gpu(second, reported(5, false)), false)), None);
        // So is what is computed between two waits, and what a process beside it does.
        assert_eq!(hangs_after(|second| (with_gpu(second, reported(5, second % 15 != 0)), false)), None);
        let beside = |second| {
            let mut seen = with_gpu(second, reported(5, true));
            seen.get_mut(&(11, 1)).unwrap().cpu = SECOND * u32::try_from(second).unwrap();
            (seen, false)
        };
        assert_eq!(hangs_after(beside), None);
    }

    #[test]
    fn submitted_work_is_progress() {
        let submits = |second: u64| (with_gpu(second, reported(second / 15, true)), false);
        assert_eq!(hangs_after(submits), None);
        // Also by a process that hardly uses the CPU, and during checkpoints.
        let sleeps = |second: u64| {
            let mut seen = job(&[70]);
            seen.get_mut(&(10, 1)).unwrap().gpu = reported(second / 15, false);
            (seen, second % 2 == 1)
        };
        assert_eq!(hangs_after(sleeps), None);
    }

    #[test]
    fn a_process_without_an_answer_is_not_hung() {
        let silent =
            |second| (with_gpu(second, if second < 5 { reported(5, true) } else { Gpu::Unanswered }), false);
        assert_eq!(hangs_after(silent), None);
        // The answer comes late, and says that it has waited all the time.
        let late = |second| {
            (with_gpu(second, if second % 30 == 0 { reported(5, true) } else { Gpu::Unanswered }), false)
        };
        assert_eq!(hangs_after(late), Some(30));
        // Or that it has not.
        let late = |second| {
            let report = reported(5 + second / 30, true);
            (with_gpu(second, if second % 30 == 0 { report } else { Gpu::Unanswered }), false)
        };
        assert_eq!(hangs_after(late), None);
        // One that is idle needs no answer.
        let mut idle = job(&[70]);
        idle.get_mut(&(10, 1)).unwrap().gpu = Gpu::Unanswered;
        assert_eq!(hangs_after(|_| (idle.clone(), false)), Some(20));
        // Agents are away during a checkpoint.
        let saved = |second: u64| {
            let is_away = second % 10 == 1;
            (with_gpu(second, if is_away { Gpu::Unseen } else { reported(5, true) }), is_away)
        };
        assert_eq!(hangs_after(saved), Some(23), "three of the seconds were the checkpoints'");
    }

    #[test]
    fn the_message_names_the_waiting_process() {
        let begun = Instant::now();
        let mut progress = Progress::new(with_gpu(0, reported(5, true)), begun);
        progress.update(with_gpu(20, reported(5, true)), begun + LIMIT, false);
        let Found { what, idle, .. } = progress.hang(begun + LIMIT, LIMIT).unwrap();
        assert!(what.starts_with("process 10 (p) has waited for its GPU for 20s"), "{what}");
        assert_eq!(idle, LIMIT);
    }
}
