//! Stacks of a hung job: the kernel's view of each thread, and Python stacks where py-spy is installed.

use crate::job::attempt_logs::prune_attempt_logs;
use crate::job::status::unix_ms;
use crate::namespace::{Tree, numbers_in, processes};
use crate::sys::deadline::PY_SPY_TIMEOUT;
use crate::sys::path_text::read_text;
use anyhow::{Context, Result};
use ckpt_snapshot::{JobDir, write_atomically};
use procfs_core::FromRead as _;
use procfs_core::process::Stat;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// Saves the stacks of all threads under the job's `attempts/`. Returns the directory.
///
/// # Errors
/// When they cannot be written.
pub(super) fn keep(dir: &JobDir, tree: Tree, what: &str) -> Result<PathBuf> {
    let sequence = dir.record()?.map_or(0, |record| record.last_sequence);
    let kept = dir.attempt_dir(&format!("{sequence:06}-hang-{}", unix_ms(SystemTime::now())))?;
    let processes = processes(tree);
    let path = kept.join("stacks.txt");
    let text = describe(&processes, what);
    write_atomically(&path, text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))?;
    if let Some(py_spy) = find_py_spy() {
        for &(host_pid, pid) in processes.iter().filter(|&&(host_pid, _)| is_python(host_pid)) {
            if let Err(error) = keep_python(&py_spy, host_pid, &kept.join(format!("python-{pid}.txt"))) {
                tracing::warn!("py-spy cannot read process {pid}: {error:#}");
            }
        }
    }
    prune_attempt_logs(dir);
    Ok(kept)
}

fn describe(processes: &[(i32, i32)], what: &str) -> String {
    let mut text = format!("{what}\n");
    for &(host_pid, pid) in processes {
        let exe = fs::read_link(format!("/proc/{host_pid}/exe")).unwrap_or_default();
        let _ = writeln!(text, "\nprocess {pid} ({host_pid} outside of the job): {}", exe.display());
        let tasks = PathBuf::from(format!("/proc/{host_pid}/task"));
        let mut tids = numbers_in(&tasks).unwrap_or_default();
        tids.sort_unstable();
        for tid in tids {
            let read = |name: &str| read_text(tasks.join(tid.to_string()).join(name)).unwrap_or_default();
            let state = Stat::from_file(tasks.join(format!("{tid}/stat"))).map_or('?', |stat| stat.state);
            let (name, waits, call) = (read("comm"), read("wchan"), read("syscall"));
            let (name, call) = (name.trim(), call.trim());
            let _ =
                writeln!(text, "  thread {tid} {name}: state {state}, waits in {waits}, system call {call}");
            for frame in read("stack").lines() {
                let _ = writeln!(text, "    {frame}");
            }
        }
    }
    text
}

fn is_python(host_pid: i32) -> bool {
    let exe = fs::read_link(format!("/proc/{host_pid}/exe")).unwrap_or_default();
    exe.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python"))
}

fn find_py_spy() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join("py-spy")).find(|path| path.is_file())
}

/// Runs py-spy without pausing the process: a hung process does not change.
fn keep_python(py_spy: &Path, host_pid: i32, path: &Path) -> Result<()> {
    let output = fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    let mut command = Command::new(py_spy);
    command.args(["dump", "--nonblocking", "--pid", &host_pid.to_string()]).env_remove("LD_PRELOAD");
    command.stdin(Stdio::null()).stdout(output).stderr(Stdio::null());
    let mut child = command.spawn().context("it cannot be executed")?;
    let deadline = Instant::now() + PY_SPY_TIMEOUT;
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            anyhow::bail!("it did not end within {} s", PY_SPY_TIMEOUT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_listed_with_what_they_wait_for() {
        let own = std::process::id().cast_signed();
        let text = describe(&[(own, 5)], "it hangs");
        assert!(text.starts_with("it hangs\n\nprocess 5 ("), "{text}");
        assert!(text.contains(&format!("thread {own} ")) && text.contains("state "), "{text}");
    }
}
