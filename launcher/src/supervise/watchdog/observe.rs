//! What is seen of the job's processes at one moment.

use super::Watched;
use crate::agents::{Activity, GpuActivity};
use crate::namespace::processes;
use crate::sys::deadline::ACTIVITY_ANSWER_TIMEOUT;
use ckpt_cut::MemberReport;
use procfs_core::FromRead as _;
use procfs_core::process::{Io, Stat};
use std::collections::BTreeMap;
use std::time::Duration;

/// Resolution of the kernel's CPU times (USER_HZ is 100 on x86-64).
pub(super) const TICK: Duration = Duration::from_millis(10);

/// One process at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Process {
    /// In the job's PID namespace.
    pub pid: i32,
    /// PID of its parent, in the launcher's PID namespace.
    pub parent: i32,
    pub name: String,
    pub cpu: Duration,
    pub is_stopped: bool,
    /// Whether it waits for a disk or a network file system.
    pub is_in_io: bool,
    /// Bytes that it has read and written so far; 0 if that is not known.
    pub io_bytes: u64,
    pub gpu: Gpu,
    /// How far it is on each of its communicators of NCCL; `None` if its interposer has not answered.
    pub members: Option<Vec<MemberReport>>,
}

/// What is known about a process and its GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) enum Gpu {
    /// Nothing: the process has no interposer.
    #[default]
    Unseen,
    /// Nothing this time: the interposer has not answered.
    Unanswered,
    Reported(GpuActivity),
}

impl Gpu {
    pub fn calls(self) -> Option<u64> {
        match self {
            Self::Reported(activity) => Some(activity.calls),
            Self::Unseen | Self::Unanswered => None,
        }
    }
}

/// A PID in the launcher's namespace and a start time: unique even if PIDs are reused.
pub(super) type Key = (i32, u64);
pub(super) type Seen = BTreeMap<Key, Process>;

/// The job's processes now. `None` if nothing has to be known of them: no process has a communicator, and `is_needed` is
/// not set.
pub(super) fn poll(watched: &Watched, is_needed: bool) -> Option<Seen> {
    // Before the CPU times are read, so that the reports are not newer.
    let mut reports =
        watched.activity_probe.as_ref().map(|probe| probe.poll(ACTIVITY_ANSWER_TIMEOUT)).unwrap_or_default();
    let has_members = |report: &Option<Activity>| report.as_ref().is_some_and(|one| !one.members.is_empty());
    if !is_needed && !reports.values().any(has_members) {
        return None;
    }
    let processes = processes(watched.tree).into_iter();
    let read = |(host_pid, pid)| {
        let (gpu, members) = match reports.remove(&host_pid) {
            None => (Gpu::Unseen, None),
            Some(None) => (Gpu::Unanswered, None),
            Some(Some(Activity { gpu, members })) => (Gpu::Reported(gpu), Some(members)),
        };
        let (key, process) = read(host_pid, pid)?;
        Some((key, Process { gpu, members, ..process }))
    };
    Some(processes.filter_map(read).collect())
}

/// A process without what its interposer knows.
pub(super) fn read(host_pid: i32, pid: i32) -> Option<(Key, Process)> {
    let stat = Stat::from_file(format!("/proc/{host_pid}/stat")).ok()?;
    let ticks = stat.utime.saturating_add(stat.stime);
    let process = Process {
        pid,
        parent: stat.ppid,
        cpu: TICK.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX)),
        is_stopped: stat.state == 'T',
        is_in_io: stat.state == 'D',
        io_bytes: Io::from_file(format!("/proc/{host_pid}/io"))
            .map_or(0, |io| io.rchar.saturating_add(io.wchar)),
        name: stat.comm,
        ..Process::default()
    };
    Some(((host_pid, stat.starttime), process))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_its_own_process() {
        let own = std::process::id().cast_signed();
        let (_, process) = read(own, 7).unwrap();
        assert!(process.pid == 7 && !process.is_stopped && !process.name.is_empty());
        assert_eq!(process.parent, std::os::unix::process::parent_id().cast_signed());
        let begun = process.cpu;
        let used = |more: Duration| read(own, 7).unwrap().1.cpu >= begun + more;
        while !used(Duration::from_millis(50)) {}
        let text = std::fs::read("/proc/self/cmdline").unwrap();
        assert!(read(own, 7).unwrap().1.io_bytes >= process.io_bytes + text.len() as u64);
    }
}
