//! The processes of the agents: handles to them, and the results of detaching and returning.

use std::fmt;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ckpt_protocol::agent::{GpuReport, WANTS_MORE_ROOM};
use ckpt_snapshot::{GpuRecord, size_text};
use procfs_core::FromRead as _;
use procfs_core::process::Stat;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags};
use thiserror::Error;
use tracing::debug;

use super::mirrors::Mirror;
use crate::sys::exit_status;

/// What is known about a process of the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its ID in its own PID namespace, which a restore preserves. `None` before the hello.
    pub pid: Option<u32>,
    /// Its ID in the launcher's PID namespace. `None` for a process that is known from a snapshot only.
    pub host_pid: Option<u32>,
    /// The path of its program; empty if unknown.
    pub exe: String,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.pid, self.host_pid) {
            (Some(pid), Some(host_pid)) if pid != host_pid => {
                write!(f, "process {pid} of the job ({host_pid} outside)")?;
            }
            (Some(pid), _) | (None, Some(pid)) => write!(f, "process {pid}")?,
            (None, None) => f.write_str("a process")?,
        }
        if self.exe.is_empty() { Ok(()) } else { write!(f, " ({})", self.exe) }
    }
}

/// The processes that have detached for a dump.
#[derive(Debug)]
pub struct Quiesced {
    pub(super) attempt: u64,
    pub(super) detached: Vec<DetachedProcess>,
    pub(super) gpu: Vec<GpuState>,
}

/// What a process had on its GPUs when it detached.
#[derive(Debug, Clone)]
pub struct GpuState {
    /// The process.
    pub process: Process,
    /// Holds the content of its device memory, unchanged until the next checkpoint.
    pub mirror: Option<Mirror>,
    /// The agent's description of that content.
    pub report: GpuReport,
    /// The GPUs that the driver knows in the process; empty if they are not known.
    pub gpus: Vec<GpuRecord>,
    /// Whether the restored process can load its memory through a window.
    pub supports_loads: bool,
}

impl Quiesced {
    /// The processes that a launcher waits for after it has restored a snapshot. `pids` are the processes that had
    /// detached when the snapshot was taken, by their IDs in the job's PID namespace.
    ///
    /// `proc` is the job's own `/proc`. A process that is not there has exited since the restore.
    pub fn expected(attempt: u64, pids: impl IntoIterator<Item = u32>, proc: &Path) -> Self {
        let detached = |pid: u32| {
            let handle = ProcessHandle::new(None, proc.join(pid.to_string()));
            let process = Process { pid: Some(pid), host_pid: None, exe: String::new() };
            let is_there = handle.program.is_some();
            is_there.then(|| DetachedProcess {
                process,
                handle: Arc::new(handle),
                report: None,
                supports_loads: false,
            })
        };
        Self { attempt, detached: pids.into_iter().filter_map(detached).collect(), gpu: Vec::new() }
    }

    /// The attempt that was passed to `Agents::quiesce`.
    pub fn attempt(&self) -> u64 {
        self.attempt
    }

    /// The processes that have detached.
    pub fn processes(&self) -> impl ExactSizeIterator<Item = &Process> {
        self.detached.iter().map(|one| &one.process)
    }

    /// The processes that had GPU state and have ended since, or executed another program.
    pub(super) fn ended(&self) -> impl Iterator<Item = &DetachedProcess> {
        let had_state = |one: &&DetachedProcess| self.gpu.iter().any(|state| state.process == one.process);
        self.detached.iter().filter(had_state).filter(|one| one.handle.has_ended())
    }

    /// The GPU state of those processes that had any.
    pub fn gpu(&self) -> &[GpuState] {
        &self.gpu
    }
}

/// Which processes returned after a dump or a restore.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ReturnSummary {
    /// Number of processes that continued after the dump.
    pub continued: usize,
    /// Number of processes that were restored from images.
    pub restored: usize,
    /// Device memory that was copied back because it was not parked, bytes.
    pub copied_bytes: u64,
    /// Processes that have not returned, although they did not exit or execute another program.
    pub missing: Vec<Process>,
    /// Processes whose GPU state could not be restored.
    pub lost: Vec<Loss>,
}

/// A process whose GPU state could not be restored. The process and its job are unusable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// The process.
    pub process: Process,
    /// The reason that its agent gives.
    pub reason: String,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.process, self.reason)
    }
}

/// Why not all agents could be detached.
#[derive(Debug, Error)]
pub enum QuiesceError {
    /// A process cannot be dumped. The launcher listens again; processes that have detached return by themselves.
    #[error("{process}: {reason}{}", and_others(*.others))]
    Refused {
        /// The first process that refused.
        process: Process,
        /// The reason that its agent gives.
        reason: String,
        /// Number of other processes that refused.
        others: usize,
    },
    /// Some agents did not answer, or have not returned from the previous attempt. The launcher listens again; processes
    /// that have detached return by themselves.
    #[error("the interposer did not answer within {}s in {}", .deadline.as_secs_f32(), listed(.unanswered))]
    Deadline {
        /// How long the agents had.
        deadline: Duration,
        /// Processes whose agents did not answer.
        unanswered: Vec<Process>,
    },
    /// The launcher could not listen again after a failed attempt, so processes that have detached cannot return.
    #[error("{given_up}; and the launcher cannot listen for the interposer any more: {source}")]
    Resume {
        /// Why the attempt failed.
        given_up: Box<QuiesceError>,
        /// Why the launcher cannot listen.
        source: io::Error,
    },
    /// The ranks did not reach a consistent cut. All of them run on.
    #[error("{reason} (given up after {:.1}s)", .after.as_secs_f64())]
    NoCut {
        /// What the last attempt waited for, by processes and calls of NCCL.
        reason: String,
        /// How long it took to find that out, all attempts and the wait for processes that were detached included.
        after: Duration,
    },
    /// The checkpoint is not wanted any more: the job is being ended. All ranks run on.
    #[error("the job is being ended")]
    Withdrawn,
    /// The agents are being detached already, or have detached.
    #[error("the agents have already been detached")]
    NotListening,
    /// There is not enough memory for the content of device memory.
    #[error(
        "{needed} of memory is needed to hold what the job has on its GPUs, {available} is free: let the job use less, or give it a machine or a container with more memory",
        needed = size_text(*needed_bytes),
        available = size_text(*available_bytes)
    )]
    NoMemory {
        /// Additional memory that is needed.
        needed_bytes: u64,
        /// Memory that is free.
        available_bytes: u64,
    },
    /// Memory for the content of a process's device memory could not be allocated.
    #[error("cannot allocate memory for what {process} has on its GPUs: {source}")]
    Mirror {
        /// The process.
        process: Process,
        /// The error of the system.
        source: io::Error,
    },
}

impl QuiesceError {
    /// Whether another try, which is prepared again, may have the room that this one lacked.
    pub fn wants_more_room(&self) -> bool {
        matches!(self, Self::Refused { reason, .. } if reason.contains(WANTS_MORE_ROOM))
    }
}

fn listed(processes: &[Process]) -> String {
    processes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn and_others(others: usize) -> String {
    if others == 0 { String::new() } else { format!(" (and {others} more processes)") }
}

/// A process whose agent has detached.
#[derive(Debug, Clone)]
pub struct DetachedProcess {
    /// The process.
    pub process: Process,
    /// Tells whether the process still runs the same program.
    pub handle: Arc<ProcessHandle>,
    /// What the process had on its GPUs.
    pub report: Option<Box<GpuReport>>,
    /// Whether the restored process can load its memory through a window.
    pub supports_loads: bool,
}

/// A handle to a process: tells whether the process still runs, and still runs the same program.
#[derive(Debug)]
pub struct ProcessHandle {
    pidfd: Option<OwnedFd>,
    /// The link to its program in `/proc`.
    exe: PathBuf,
    /// Device and inode of the program; `None` if they could not be read.
    program: Option<(u64, u64)>,
}

impl ProcessHandle {
    /// `dir` is the process's directory in a `/proc` that shows the process.
    pub fn new(pidfd: Option<OwnedFd>, dir: PathBuf) -> Self {
        let exe = dir.join("exe");
        let program = fs::metadata(&exe).ok().map(|program| (program.dev(), program.ino()));
        Self { pidfd, exe, program }
    }

    /// Waits for the process's exit, at most for `timeout`: a process closes its files a moment before it exits.
    pub fn wait_for_exit(&self, timeout: Duration) {
        self.has_exited(Timespec::try_from(timeout).unwrap_or_default());
    }

    /// How the process has ended, as wait(2) has it; `None` if it runs, or if that is not known.
    pub fn exit_status(&self) -> Option<u32> {
        exit_status::of_process(self.pidfd.as_ref()?, self.exe.parent()?)
    }

    fn has_exited(&self, within: Timespec) -> bool {
        self.pidfd.as_ref().is_some_and(|pidfd| {
            let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
            matches!(retry_on_intr(|| rustix::event::poll(&mut fds, Some(&within))), Ok(1))
        })
    }

    /// Whether a signal or a debugger has stopped the process.
    pub fn is_stopped(&self) -> bool {
        let stat = Stat::from_file(self.exe.with_file_name("stat"));
        stat.is_ok_and(|stat| matches!(stat.state, 'T' | 't'))
    }

    /// Whether the process has loaded a CUDA library. The agent of another process calls no driver.
    pub fn has_driver(&self) -> bool {
        let maps = fs::read(self.exe.with_file_name("maps")).unwrap_or_default();
        let mut lines = maps.split(|&byte| byte == b'\n');
        lines.any(|line| {
            let name = line.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
            name.windows(4).any(|part| part == b"cuda")
        })
    }

    /// Whether the process has exited or executed another program: its agent will not return.
    pub fn has_ended(&self) -> bool {
        self.has_exited(Timespec::default())
            || match (fs::metadata(&self.exe), self.program) {
                (Ok(now), Some(before)) => (now.dev(), now.ino()) != before,
                // The program of a zombie cannot be read.
                (Err(error), Some(_)) => error.kind() == ErrorKind::NotFound,
                (_, None) => false,
            }
    }
}

/// A descriptor that becomes readable when the process exits, even if its ID is reused.
pub fn pidfd(pid: Pid) -> Option<OwnedFd> {
    let opened = rustix::process::pidfd_open(pid, PidfdFlags::empty());
    opened.inspect_err(|error| debug!(%error, "no pidfd for an agent's process")).ok()
}
