//! Hang detection. A job hangs if, for `--hang-timeout`, no process has used the CPU or called its GPU, or if one process
//! has been stopped for that long.
//!
//! CPU time is no progress in a process that waits for its GPU, since drivers spin. A process waits while one of its
//! threads stays in the same waiting call, or polls in vain whether the GPU is done, and no thread submits work. Other
//! threads do not count meanwhile, since NCCL spins for the network. The process's interposer reports all that. Without an
//! interposer, there is only CPU time.
//!
//! An idle process still uses some CPU time: threads of libraries wake up from time to time. A process counts as idle
//! while it uses less than 1% of one CPU. CPU time that a checkpoint costs is not counted: a hung job that is saved
//! repeatedly still hangs.

use super::events::{Event, Hang};
use super::stacks::{self, Tree};
use crate::agents::{ActivityProbe, GpuActivity};
use crate::job::status::SharedStatus;
use crate::sys::deadline::ACTIVITY_ANSWER_TIMEOUT;
use anyhow::{Context, Result};
use ckpt_snapshot::JobDir;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use procfs_core::FromRead as _;
use procfs_core::process::Stat;
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
/// Resolution of the kernel's CPU times (USER_HZ is 100 on x86-64).
const TICK: Duration = Duration::from_millis(10);

/// What is watched.
pub struct Watched {
    /// The job's processes.
    pub tree: Tree,
    /// Asks their interposers, if they have any.
    pub activity_probe: Option<ActivityProbe>,
    /// The job hangs after this time without progress.
    pub limit: Duration,
    /// The polling interval; several polls fit into the limit in any case.
    pub every: Duration,
    /// Where the stacks of a hung job are saved.
    pub dir: JobDir,
    /// Tells when checkpoints are taken, and receives the time of the last progress.
    pub status: Arc<SharedStatus>,
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
            let Some((what, since)) = watch(&watched, &stopped) else { return };
            let stacks = stacks::keep(&watched.dir, watched.tree, &what);
            let stacks = stacks
                .inspect_err(|error| tracing::warn!("cannot save the stacks of the hung job: {error:#}"))
                .ok();
            let _ = events.send(Event::Hung(Hang { init_pid: watched.tree.init_pid, what, since, stacks }));
        };
        let thread = std::thread::Builder::new().name("watchdog".to_owned()).spawn(work);
        thread.context("cannot start the watchdog")?;
        Ok(Self { _stop: stop })
    }
}

/// Watches until the job hangs, or until the [`Watchdog`] is dropped.
fn watch(watched: &Watched, stopped: &Receiver<()>) -> Option<(String, SystemTime)> {
    let Watched { limit, status, .. } = watched;
    let every = watched.every.min(*limit / POLLS);
    let mut progress: Option<Progress> = None;
    let mut disturbances = status.disturbances();
    let mut polled = Instant::now();
    loop {
        if stopped.recv_timeout(every) != Err(RecvTimeoutError::Timeout) {
            return None;
        }
        let seen = poll(watched);
        let now = Instant::now();
        // Odd: a checkpoint is in progress.
        let before = std::mem::replace(&mut disturbances, status.disturbances());
        let is_disturbed = before != disturbances || disturbances % 2 == 1;
        // After `docker pause` or a suspend, the watchdog has slept with the job and has seen nothing.
        let was_asleep =
            now.saturating_duration_since(std::mem::replace(&mut polled, now)) > every * 3 + SLACK;
        let Some(progress) = &mut progress else {
            progress = Some(Progress::new(seen, now));
            continue;
        };
        progress.update(seen, now, is_disturbed || was_asleep);
        status.worked(SystemTime::now() - now.saturating_duration_since(progress.worked_until()));
        if let Some((what, idle)) = progress.hang(now, *limit) {
            return Some((what, SystemTime::now() - idle));
        }
    }
}

/// One process at one moment.
#[derive(Clone, Debug, PartialEq)]
struct Process {
    /// In the job's PID namespace.
    pid: i32,
    name: String,
    cpu: Duration,
    is_stopped: bool,
    gpu: Gpu,
}

/// What is known about a process and its GPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Gpu {
    /// Nothing: the process has no interposer.
    Unseen,
    /// Nothing this time: the interposer has not answered.
    Unanswered,
    Reported(GpuActivity),
}

impl Gpu {
    fn calls(self) -> Option<u64> {
        match self {
            Self::Reported(activity) => Some(activity.calls),
            Self::Unseen | Self::Unanswered => None,
        }
    }
}

/// A PID in the launcher's namespace and a start time: unique even if PIDs are reused.
type Key = (i32, u64);
type Seen = BTreeMap<Key, Process>;

fn poll(watched: &Watched) -> Seen {
    // Before the CPU times are read, so that the reports are not newer.
    let reports =
        watched.activity_probe.as_ref().map(|probe| probe.poll(ACTIVITY_ANSWER_TIMEOUT)).unwrap_or_default();
    let gpu = |host_pid| match reports.get(&host_pid) {
        None => Gpu::Unseen,
        Some(None) => Gpu::Unanswered,
        Some(Some(activity)) => Gpu::Reported(*activity),
    };
    let processes = stacks::processes(watched.tree).into_iter();
    processes.filter_map(|(host_pid, pid)| read(host_pid, pid, gpu(host_pid))).collect()
}

fn read(host_pid: i32, pid: i32, gpu: Gpu) -> Option<(Key, Process)> {
    let stat = Stat::from_file(format!("/proc/{host_pid}/stat")).ok()?;
    let ticks = stat.utime.saturating_add(stat.stime);
    let cpu = TICK.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX));
    let process = Process { pid, name: stat.comm, cpu, is_stopped: stat.state == 'T', gpu };
    Some(((host_pid, stat.starttime), process))
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

    /// What hangs, and for how long.
    fn hang(&self, now: Instant, limit: Duration) -> Option<(String, Duration)> {
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
                Some((what, ago(*since)))
            }
            None if is_idle => {
                let what = match &self.waited {
                    Some(key) => format!(
                        "{} has waited for its GPU for {said} and submitted nothing to it, and no other process has done anything (--hang-timeout)",
                        named(key)
                    ),
                    None => {
                        format!("none of its processes has done anything for {said} (--hang-timeout)")
                    }
                };
                Some((what, ago(self.last)))
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
            ((pid, 1), Process { pid, name: "p".into(), cpu, is_stopped: false, gpu: Gpu::Unseen })
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
        let (what, idle) = progress.hang(begun + LIMIT, LIMIT).unwrap();
        assert!(what.starts_with("process 10 (p) has waited for its GPU for 20s"), "{what}");
        assert_eq!(idle, LIMIT);
    }

    #[test]
    fn reads_its_own_process() {
        let own = std::process::id().cast_signed();
        let (_, process) = read(own, 7, Gpu::Unseen).unwrap();
        assert!(process.pid == 7 && !process.is_stopped && !process.name.is_empty());
        let begun = process.cpu;
        let used = |more: Duration| read(own, 7, Gpu::Unseen).unwrap().1.cpu >= begun + more;
        while !used(Duration::from_millis(50)) {}
    }
}
