//! Processes and what is below them, from `/proc`.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use procfs_core::FromRead as _;
use procfs_core::process::Stat;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A process, told from a later one with the same number by the time of its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proc {
    /// Its process ID, as seen from here.
    pub pid: u32,
    /// Its parent's.
    pub parent: u32,
    start_ticks: u64,
    name: String,
    state: char,
}

/// A process held by descriptor.
pub struct Handle(OwnedFd);

impl Handle {
    /// Sends SIGKILL. That the process has ended by itself is no error.
    pub fn kill(&self) -> Result<()> {
        match pidfd_send_signal(&self.0, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error).context("sending SIGKILL"),
        }
    }
}

impl Proc {
    fn read(pid: u32) -> Option<Self> {
        let stat = Stat::from_file(format!("/proc/{pid}/stat")).ok()?;
        let parent = stat.ppid.try_into().ok()?;
        Some(Self { pid, parent, start_ticks: stat.starttime, name: stat.comm, state: stat.state })
    }

    /// Holds the process by descriptor, if it is still there.
    pub fn open(&self) -> Option<Handle> {
        let pid = Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        let handle = Handle(pidfd_open(pid, PidfdFlags::empty()).ok()?);
        // Looked at after opening: the descriptor cannot be that of a later process with the same number.
        self.is_alive().then_some(handle)
    }

    /// Whether the process still runs. One that only waits for its parent to take notice of its end does not.
    pub fn is_alive(&self) -> bool {
        Self::read(self.pid)
            .is_some_and(|now| now.start_ticks == self.start_ticks && !matches!(now.state, 'Z' | 'X'))
    }
}

impl fmt::Display for Proc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (PID {})", self.name, self.pid)
    }
}

/// Every process below `root`, which itself is not among them.
pub fn descendants(root: u32) -> Result<Vec<Proc>> {
    let mut rest = Vec::new();
    for entry in fs::read_dir("/proc").context("reading /proc")? {
        let pid = entry?.file_name().to_str().and_then(|name| name.parse().ok());
        rest.extend(pid.and_then(Proc::read));
    }
    let mut found: Vec<Proc> = Vec::new();
    let mut parents = HashSet::from([root]);
    loop {
        let (below, others): (Vec<_>, Vec<_>) =
            rest.into_iter().partition(|proc| parents.contains(&proc.parent));
        if below.is_empty() {
            return Ok(found);
        }
        parents.extend(below.iter().map(|proc| proc.pid));
        found.extend(below);
        rest = others;
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn reads_a_name_with_brackets() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("a) b (c");
        fs::copy("/bin/sleep", &program).unwrap();
        // A thread of this process that forks meanwhile may hold the copy open for writing.
        let mut child = loop {
            match Command::new(&program).arg("60").spawn() {
                Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {}
                spawned => break spawned.unwrap(),
            }
        };
        let proc = Proc::read(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((proc.parent, proc.name.as_str()), (std::process::id(), "a) b (c"));
    }

    #[test]
    fn finds_and_kills_what_is_below() {
        let mut shell =
            Command::new("sh").args(["-c", "sleep 60 & wait"]).stdin(Stdio::null()).spawn().unwrap();
        let below = loop {
            let below = descendants(shell.id()).unwrap();
            if below.iter().any(|proc| proc.name == "sleep") {
                break below;
            }
        };
        assert_eq!(below.len(), 1);
        assert!(below[0].is_alive());
        below[0].open().unwrap().kill().unwrap();
        shell.wait().unwrap();
        assert!(!below[0].is_alive());
    }
}
