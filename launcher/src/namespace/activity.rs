//! What the processes in a namespace do, as far as it shows from outside.

use super::survey::numbers_in;
use procfs_core::FromRead as _;
use procfs_core::process::Stat;
use std::path::Path;

/// The processes in a namespace at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activity {
    /// Some process runs or waits for a disk.
    pub is_busy: bool,
    /// CPU time that the processes have used since their start (ticks of the kernel's clock).
    pub cpu_ticks: u64,
    /// How many processes there are, those included that have ended and were not waited for.
    pub processes: usize,
}

impl Activity {
    /// Reads the processes below `proc`, a directory of procfs. `None` if it cannot be read.
    pub(super) fn read(proc: impl AsRef<Path>) -> Option<Self> {
        let proc = proc.as_ref();
        let stat = |pid: &i32| Stat::from_file(proc.join(format!("{pid}/stat"))).ok();
        let all: Vec<Stat> = numbers_in(proc).ok()?.iter().filter_map(stat).collect();
        Some(Self {
            is_busy: all.iter().any(|stat| matches!(stat.state, 'R' | 'D')),
            cpu_ticks: all.iter().map(|stat| stat.utime.saturating_add(stat.stime)).sum(),
            processes: all.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A procfs with these processes: PID, state, ticks.
    fn activity(processes: &[(i32, char, u64)]) -> Option<Activity> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("uptime"), "1 1").unwrap();
        for (pid, state, ticks) in processes {
            fs::create_dir(dir.path().join(pid.to_string())).unwrap();
            let rest = "0 ".repeat(37);
            let stat = format!("{pid} (a (b) c) {state} 1 1 1 0 -1 0 0 0 0 0 {ticks} {ticks} {rest}");
            fs::write(dir.path().join(format!("{pid}/stat")), stat).unwrap();
        }
        Activity::read(dir.path())
    }

    #[test]
    fn sums_what_processes_have_used() {
        let idle = activity(&[(1, 'S', 3), (20, 'Z', 4)]).unwrap();
        assert_eq!(idle, Activity { is_busy: false, cpu_ticks: 14, processes: 2 });
        assert!(activity(&[(1, 'S', 3), (20, 'R', 4)]).unwrap().is_busy);
        assert!(activity(&[(1, 'D', 3)]).unwrap().is_busy, "a slow disk is no reason to give up");
        assert_eq!(Activity::read("/nonexistent"), None);
    }
}
