//! Ending a namespace. When its init is killed, the kernel kills all processes in the namespace, and the init ends after
//! all others. A process that waits for an unresponsive device or file system (state D) cannot be killed. The launcher
//! must not wait for such a process without a limit: it would not handle signals meanwhile.

use super::spawn::{self, Spawned};
use super::survey::{numbers_in, pid_namespace_of};
use crate::sys::deadline::{INIT_END_TIMEOUT, NAMESPACE_END_TIMEOUT};
use crate::sys::path_text::read_text;
use parking_lot::Mutex;
use procfs_core::FromRead as _;
use procfs_core::process::Stat;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{WaitOptions, waitpid};
use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most processes that the warning names.
const MAX_NAMED_PROCESSES: usize = 5;

/// Namespaces that were killed and have not ended.
static ENDING: Mutex<Vec<Arc<Spawned>>> = Mutex::new(Vec::new());

/// Whether processes of a dropped namespace still exist. They no longer run, but may hold resources: GPUs, ports, files
/// that are being written.
#[must_use]
pub fn is_ending() -> bool {
    let mut ending = ENDING.lock();
    ending.retain(|spawned| !reap(spawned, Duration::ZERO));
    !ending.is_empty()
}

/// Kills the namespace and waits for its end for some seconds. If processes remain, it logs them, and [`is_ending`] holds.
pub(super) fn end(spawned: Arc<Spawned>) {
    let pid = spawned.pid.as_raw_nonzero().get();
    if reap(&spawned, INIT_END_TIMEOUT) {
        return;
    }
    spawn::kill(&spawned);
    if reap(&spawned, NAMESPACE_END_TIMEOUT) {
        return;
    }
    tracing::warn!(
        "the job was killed {} s ago and has not ended: {}. A process that waits for an unresponsive device or file system cannot be killed: check `dmesg`, GPUs and network file systems",
        NAMESPACE_END_TIMEOUT.as_secs(),
        remaining_processes(pid).join(", ")
    );
    ENDING.lock().push(spawned);
}

/// Waits at most `limit` for the init's end; returns whether it has ended.
fn reap(spawned: &Spawned, limit: Duration) -> bool {
    if !has_ended(spawned.pidfd.as_fd(), limit) {
        return false;
    }
    // This does not block. Another thread may have reaped the process.
    let _ = waitpid(Some(spawned.pid), WaitOptions::NOHANG);
    true
}

/// Waits until the process of `pidfd` has ended, at most for `limit`.
fn has_ended(pidfd: BorrowedFd, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    let ready = retry_on_intr(|| {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&left))
    });
    ready
        .inspect_err(|error| tracing::warn!("cannot wait for the end of the job: {error}"))
        .is_ok_and(|count| count > 0)
}

/// Descriptions of the remaining processes of the namespace of this init. The init is described only if no other process
/// remains.
pub fn remaining_processes(init: i32) -> Vec<String> {
    let inside = pid_namespace_of(init);
    let mut left = numbers_in("/proc").unwrap_or_default();
    left.retain(|&pid| pid != init && inside.is_some() && pid_namespace_of(pid) == inside);
    if left.is_empty() {
        left.push(init);
    }
    let more = left.len().saturating_sub(MAX_NAMED_PROCESSES);
    let mut descriptions: Vec<_> = left.iter().take(MAX_NAMED_PROCESSES).map(|&pid| describe(pid)).collect();
    descriptions.extend((more > 0).then(|| format!("and {more} more")));
    descriptions
}

/// Describes a process by its thread that cannot end.
fn describe(pid: i32) -> String {
    let of = format!("/proc/{pid}");
    let threads =
        fs::read_dir(format!("{of}/task")).into_iter().flatten().flatten().map(|entry| entry.path());
    let threads_with_state: Vec<_> = threads.filter_map(|thread| Some((state(&thread)?, thread))).collect();
    let found = threads_with_state
        .iter()
        .find(|(state, _)| *state == 'D')
        .or_else(|| threads_with_state.iter().find(|(state, _)| *state != 'Z'));
    let line = |path: String| read_text(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let comm = line(format!("{of}/comm"));
    match found {
        Some((state, thread)) => {
            let wchan = line(thread.join("wchan").display().to_string());
            let function =
                if wchan.is_empty() || wchan == "0" { String::new() } else { format!(" in {wchan}") };
            format!("process {pid} ({comm}) is in state {state}{function}")
        }
        None => format!("process {pid} ({comm})"),
    }
}

/// The state letter of a thread, as in /proc/PID/stat.
fn state(thread: &Path) -> Option<char> {
    Stat::from_file(thread.join("stat")).ok().map(|stat| stat.state)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::process::{Child, Command, Stdio};

    fn sleeper() -> (Child, Spawned) {
        let child =
            Command::new("sleep").arg("600").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        (child, Spawned { pid, pidfd })
    }

    #[test]
    fn waiting_for_a_process_that_does_not_end_times_out() {
        let (mut child, spawned) = sleeper();
        let started = Instant::now();
        // The process has to execute its program first.
        while state(Path::new(&format!("/proc/{}", spawned.pid.as_raw_nonzero()))) != Some('S') {
            assert!(started.elapsed() < Duration::from_secs(300), "the process does not sleep");
            std::thread::sleep(Duration::from_millis(1));
        }
        let begun = Instant::now();
        assert!(!reap(&spawned, Duration::from_millis(50)));
        assert!(begun.elapsed() >= Duration::from_millis(50) && begun.elapsed() < NAMESPACE_END_TIMEOUT);
        let pid = spawned.pid.as_raw_nonzero().get();
        let text = describe(pid);
        assert!(text.starts_with(&format!("process {pid} (sleep) is in state S")), "{text}");
        let here = pid_namespace_of(pid);
        assert!(here.is_some() && here == pid_namespace_of(std::process::id().cast_signed()));
        assert!(remaining_processes(pid).len() <= MAX_NAMED_PROCESSES + 1);
        assert_eq!(remaining_processes(i32::MAX), [describe(i32::MAX)]);
        child.kill().unwrap();
        assert!(reap(&spawned, NAMESPACE_END_TIMEOUT) && reap(&spawned, NAMESPACE_END_TIMEOUT));
    }

    #[test]
    fn an_ended_process_is_reaped() {
        let (_child, spawned) = sleeper();
        let path = format!("/proc/{}", spawned.pid.as_raw_nonzero());
        end(Arc::new(spawned));
        assert!(!Path::new(&path).exists(), "a zombie is left");
        assert!(!is_ending());
    }
}
