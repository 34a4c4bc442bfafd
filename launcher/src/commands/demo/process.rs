//! A command that the demo starts. It ends with the demo.

use anyhow::{Context, Result, bail};
use procfs_core::FromRead as _;
use procfs_core::process::Stat;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

/// A running command. When dropped, it and all its descendants are killed.
pub struct Process {
    child: Child,
    output: PathBuf,
}

impl Process {
    /// Starts a command in a process group of its own, so that Ctrl-C reaches the demo only. Its output goes to `output`.
    pub fn start(command: &mut Command, output: PathBuf) -> Result<Self> {
        let file = File::create(&output).with_context(|| format!("cannot create {}", output.display()))?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).process_group(0);
        let program = command.get_program().to_owned();
        let child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Self { child, output })
    }

    /// The exit status, once it has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// What it has printed.
    pub fn said(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.output).unwrap_or_default()).into_owned()
    }

    /// Sends SIGKILL to it and to all its descendants. Returns handles that become readable when each has ended.
    pub fn kill(&mut self) -> Result<Vec<OwnedFd>> {
        let handles: Vec<_> =
            descendants(self.child.id().cast_signed())?.into_iter().filter_map(open).collect();
        self.child.kill()?;
        for handle in &handles {
            // An error means that it has ended: with PID 1 of a namespace, all others end.
            let _ = pidfd_send_signal(handle, Signal::KILL);
        }
        self.child.wait()?;
        Ok(handles)
    }

    /// An error with the end of what it has printed.
    pub fn fail<T>(&self, what: &str) -> Result<T> {
        let said = self.said();
        let lines: Vec<_> = said.lines().collect();
        bail!("{what}; the last lines of its output:\n{}", lines[lines.len().saturating_sub(8)..].join("\n"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let _ = self.kill();
        }
    }
}

/// Whether the process has ended.
pub fn has_ended(handle: &OwnedFd) -> Result<bool> {
    let mut poll = [PollFd::new(handle, PollFlags::IN)];
    Ok(rustix::event::poll(&mut poll, Some(&rustix::event::Timespec::default()))? > 0)
}

fn open(pid: i32) -> Option<OwnedFd> {
    pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()
}

/// PIDs of all descendants of a process.
fn descendants(of: i32) -> Result<Vec<i32>> {
    let mut children = BTreeMap::<i32, Vec<i32>>::new();
    for entry in fs::read_dir("/proc").context("cannot read /proc")? {
        let path = entry?.path();
        // A process that has ended meanwhile has no descendants.
        if let Ok(stat) = Stat::from_file(path.join("stat")) {
            children.entry(stat.ppid).or_default().push(stat.pid);
        }
    }
    let mut found = Vec::new();
    let mut next = vec![of];
    while let Some(pid) = next.pop() {
        let below = children.remove(&pid).unwrap_or_default();
        found.extend(&below);
        next.extend(below);
    }
    Ok(found)
}
