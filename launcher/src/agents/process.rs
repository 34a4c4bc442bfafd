//! The processes whose agents the launcher knows: who is away, who is back, and whether one still is the one it was.

use std::fmt;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ckpt_protocol::agent::GpuReport;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};
use thiserror::Error;
use tracing::debug;

use super::mirrors::Mirror;

/// A process of the job, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its ID in its own PID namespace, which stays the same over a restore. `None` before it said hello.
    pub pid: Option<u32>,
    /// Its ID as the launcher sees it. `None` for a process that is only known from a snapshot.
    pub host_pid: Option<u32>,
    /// Its program, or nothing.
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

/// Who has gone away for a dump, and for which attempt.
#[derive(Debug)]
pub struct Quiesced {
    pub(super) attempt: u64,
    pub(super) away: Vec<Away>,
    pub(super) gpu: Vec<GpuState>,
}

/// What a process had on its GPUs when it went away.
#[derive(Debug, Clone)]
pub struct GpuState {
    /// The process.
    pub process: Process,
    /// Where the content of its device memory is. It stays as it is until the next checkpoint.
    pub mirror: Option<Mirror>,
    /// What was there.
    pub report: GpuReport,
}

impl Quiesced {
    /// What a launcher that restores a snapshot waits for: the IDs, in the job's PID namespace, of the
    /// processes that had gone away when it was taken.
    ///
    /// `proc` is the job's own `/proc`, in which they are by now. Who is not there has exited since.
    pub fn expected(attempt: u64, pids: impl IntoIterator<Item = u32>, proc: &Path) -> Self {
        let away = |pid: u32| {
            let life = Life::of(None, proc.join(pid.to_string()));
            let process = Process { pid: Some(pid), host_pid: None, exe: String::new() };
            life.program.is_some().then(|| Away { process, life: Arc::new(life), report: None })
        };
        Self { attempt, away: pids.into_iter().filter_map(away).collect(), gpu: Vec::new() }
    }

    /// The attempt that was given to `Agents::quiesce`.
    pub fn attempt(&self) -> u64 {
        self.attempt
    }

    /// The processes that have gone away.
    pub fn processes(&self) -> impl ExactSizeIterator<Item = &Process> {
        self.away.iter().map(|away| &away.process)
    }

    /// Those of them that had something on their GPUs.
    pub fn gpu(&self) -> &[GpuState] {
        &self.gpu
    }
}

/// Who came back after a dump or a restore.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Back {
    /// How many processes were let go on.
    pub continued: usize,
    /// How many processes were made anew from images.
    pub restored: usize,
    /// How much device memory was copied back rather than having been parked, bytes.
    pub copied_bytes: u64,
    /// Who is still not back, and did not exit or execute another program either.
    pub missing: Vec<Process>,
    /// Whose state on the GPU could not be brought back.
    pub lost: Vec<Loss>,
}

/// A process whose state on the GPU could not be brought back. It is of no use any more, nor is its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// The process.
    pub process: Process,
    /// Why, in the words of its agent.
    pub reason: String,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.process, self.reason)
    }
}

/// Why the agents could not all be sent away.
#[derive(Debug, Error)]
pub enum QuiesceError {
    /// One process cannot be dumped. The launcher listens again; those who went away come back by themselves.
    #[error("{process}: {reason}{}", and_others(*.others))]
    Refused {
        /// The first one to say so.
        process: Process,
        /// Why, in the words of its agent.
        reason: String,
        /// How many others refused.
        others: usize,
    },
    /// Some did not answer, or are not back from the attempt before. The launcher listens again; those who went
    /// away come back by themselves.
    #[error("the interposer did not answer within {}s in {}", .deadline.as_secs_f32(), listed(.unanswered))]
    Deadline {
        /// How long they were given.
        deadline: Duration,
        /// Who did not answer.
        unanswered: Vec<Process>,
    },
    /// The launcher could not listen again after some did not answer, so those who went away cannot come back.
    #[error("{given_up}; and the launcher cannot listen for the interposer any more: {source}")]
    Resume {
        /// Why the attempt was given up.
        given_up: Box<QuiesceError>,
        /// Why the launcher cannot listen.
        source: io::Error,
    },
    /// The agents are being sent away already, or have gone.
    #[error("the agents have already been sent away")]
    NotListening,
    /// There is not enough memory for what is on the GPUs.
    #[error(
        "{needed_bytes} bytes of memory are needed to hold what the job has on its GPUs, {available_bytes} are free: let the job use less, or give it a machine or a container with more memory"
    )]
    NoMemory {
        /// How much more is needed.
        needed_bytes: u64,
        /// How much there is.
        available_bytes: u64,
    },
    /// Memory for what a process has on its GPUs could not be had.
    #[error("memory for what {process} has on its GPUs cannot be had: {source}")]
    Mirror {
        /// The process.
        process: Process,
        /// What the system said.
        source: io::Error,
    },
}

fn listed(processes: &[Process]) -> String {
    processes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn and_others(others: usize) -> String {
    if others == 0 { String::new() } else { format!(" (and {others} more processes)") }
}

/// A process whose agent has gone away.
#[derive(Debug, Clone)]
pub struct Away {
    /// The process.
    pub process: Process,
    /// Whether it still is that process.
    pub life: Arc<Life>,
    /// What it had on its GPUs.
    pub report: Option<GpuReport>,
}

/// Tells whether a process still is the one that it was.
#[derive(Debug)]
pub struct Life {
    pidfd: Option<OwnedFd>,
    /// Its program's link in `/proc`.
    exe: PathBuf,
    /// Device and inode of the program; `None` if that could not be read.
    program: Option<(u64, u64)>,
}

impl Life {
    /// `dir` is the process's directory in a `/proc` that shows it.
    pub fn of(pidfd: Option<OwnedFd>, dir: PathBuf) -> Self {
        let exe = dir.join("exe");
        let program = fs::metadata(&exe).ok().map(|program| (program.dev(), program.ino()));
        Self { pidfd, exe, program }
    }

    /// Waits for the process's exit, within reason: one that has closed its files is not quite gone.
    pub fn wait_for_exit(&self, most: Duration) {
        self.has_exited(Timespec::try_from(most).unwrap_or_default());
    }

    fn has_exited(&self, within: Timespec) -> bool {
        self.pidfd.as_ref().is_some_and(|pidfd| {
            let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
            matches!(rustix::event::poll(&mut fds, Some(&within)), Ok(1))
        })
    }

    /// Whether the process has exited, or executed another program: its agent will not come back.
    pub fn is_over(&self) -> bool {
        self.has_exited(Timespec::default())
            || match (fs::metadata(&self.exe), self.program) {
                (Ok(now), Some(before)) => (now.dev(), now.ino()) != before,
                // A zombie has no program.
                (Err(error), Some(_)) => error.kind() == ErrorKind::NotFound,
                (_, None) => false,
            }
    }
}

/// A descriptor that tells when the process has exited, whoever gets its ID next.
pub fn pidfd(pid: Pid) -> Option<OwnedFd> {
    let opened = rustix::process::pidfd_open(pid, PidfdFlags::empty());
    opened.inspect_err(|error| debug!(%error, "no pidfd for an agent's process")).ok()
}
