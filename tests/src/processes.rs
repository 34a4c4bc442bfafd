//! What `/proc` says about processes.

use procfs_core::process::Stat;
use procfs_core::{FromRead, ProcError};
use std::fs;

/// The state of a process, the letter in `/proc/PID/stat`; `None` if there is no such process.
///
/// # Panics
/// When the file cannot be read for another reason.
#[must_use]
pub fn state(pid: i32) -> Option<char> {
    match Stat::from_file(format!("/proc/{pid}/stat")) {
        Ok(stat) => Some(stat.state),
        Err(ProcError::NotFound(_)) => None,
        // ESRCH: the process ended between the opening and the reading.
        Err(ProcError::Io(error, _)) if error.raw_os_error() == Some(3) => None,
        Err(error) => panic!("/proc/{pid}/stat: {error}"),
    }
}

/// Whether a process has ended; a zombie has.
#[must_use]
pub fn has_ended(pid: i32) -> bool {
    matches!(state(pid), None | Some('Z' | 'X'))
}

/// PIDs of all processes below `pid`.
#[must_use]
pub fn descendants(pid: i32) -> Vec<i32> {
    let mut found = Vec::new();
    let mut open = vec![pid];
    while let Some(pid) = open.pop() {
        for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            let children: Vec<i32> = children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
            open.extend(&children);
            found.extend(children);
        }
    }
    found
}
