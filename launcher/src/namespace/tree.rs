//! The processes of a job, as the launcher sees them.

use super::survey::{numbers_in, pid_namespace_of};
use crate::sys::path_text::read_text;
use procfs_core::FromRead as _;
use procfs_core::process::Status;
use std::collections::BTreeMap;

/// Identifies the process tree of a job.
#[derive(Clone, Copy, Debug)]
pub struct Tree {
    /// PID of the namespace's init, in the launcher's PID namespace.
    pub init_pid: i32,
    /// PID of the tree's root, in the job's PID namespace. Processes outside of the tree are ckpt-run's, such as CRIU.
    pub root_pid: i32,
}

/// All processes of a PID namespace, by its init: (PID in the launcher's namespace, PID in that namespace).
pub fn processes_of_namespace(init_pid: i32) -> Vec<(i32, i32)> {
    numbers_in_namespace(init_pid).into_iter().map(|(pid, (inside, _))| (pid, inside)).collect()
}

/// The processes of a job: (PID in the launcher's namespace, PID in the job's namespace).
pub fn processes(tree: Tree) -> Vec<(i32, i32)> {
    let all = numbers_in_namespace(tree.init_pid);
    let is_below = |mut pid: i32| loop {
        match all.get(&pid) {
            Some(&(inside, _)) if inside == tree.root_pid => return true,
            Some(&(_, parent)) if parent != pid => pid = parent,
            _ => return false,
        }
    };
    all.iter().filter(|(pid, _)| is_below(**pid)).map(|(&pid, &(inside, _))| (pid, inside)).collect()
}

/// By PID in the launcher's namespace.
fn numbers_in_namespace(init_pid: i32) -> BTreeMap<i32, (i32, i32)> {
    let Some(wanted) = pid_namespace_of(init_pid) else { return BTreeMap::new() };
    let all = numbers_in("/proc").unwrap_or_default().into_iter();
    all.filter(|&pid| pid_namespace_of(pid) == Some(wanted))
        .filter_map(|pid| Some((pid, numbers_of(pid)?)))
        .collect()
}

/// A process's PID in its own namespace, and its parent's PID in the launcher's namespace.
fn numbers_of(pid: i32) -> Option<(i32, i32)> {
    let status = Status::from_read(read_text(format!("/proc/{pid}/status")).ok()?.as_bytes()).ok()?;
    Some((*status.nspid?.last()?, status.ppid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn processes_are_those_below_the_root() {
        let own = std::process::id().cast_signed();
        let inside = numbers_of(own).unwrap().0;
        let mut child =
            Command::new("sleep").arg("600").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let found = processes(Tree { init_pid: own, root_pid: inside });
        let pids: Vec<i32> = found.iter().map(|one| one.0).collect();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(pids.contains(&own) && pids.contains(&child.id().cast_signed()), "{pids:?}");
        assert!(!pids.contains(&std::os::unix::process::parent_id().cast_signed()), "{pids:?}");
    }
}
