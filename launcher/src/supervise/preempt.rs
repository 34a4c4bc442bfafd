//! Preemption triggers besides signals and calls: a file that appears, and a shell command that exits with 0.

use super::events::Event;
use crate::sys::secrets;
use anyhow::{Context, Result};
use crossbeam_channel::Sender;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Preempts the job when the file `path` appears (`--preempt-file`).
///
/// # Errors
/// When the thread cannot be started.
pub fn watch_file(path: Option<PathBuf>, every: Duration, events: Sender<Event>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let before = identity(&path);
    if before.is_some() {
        tracing::warn!(
            "{} (--preempt-file) exists already and is ignored: delete and create it again to preempt the job",
            path.display()
        );
    }
    let watch = move || {
        let mut known = before;
        loop {
            std::thread::sleep(every);
            let now = identity(&path);
            if now.is_some() && now != known {
                let why = format!("{} has appeared (--preempt-file)", path.display());
                if events.send(Event::Preempt(why, None)).is_err() {
                    return;
                }
            }
            known = now;
        }
    };
    let thread = std::thread::Builder::new().name("preempt-file".to_owned()).spawn(watch);
    thread.map(drop).context("cannot watch for --preempt-file")
}

/// Tells a file from its replacement at the same path.
fn identity(path: &Path) -> Option<(u64, u64, i64, i64)> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec()))
}

/// Runs a shell command repeatedly until it exits with 0 (`--preempt-probe`). The command is killed when this is dropped.
pub struct Probe {
    running: Arc<Mutex<Running>>,
}

#[derive(Default)]
struct Running {
    /// The process group of the running command.
    group: Option<Pid>,
    is_over: bool,
}

impl Probe {
    /// Starts the probe, if there is a command.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn begin(command: Option<String>, every: Duration, events: Sender<Event>) -> Result<Option<Self>> {
        let Some(command) = command else { return Ok(None) };
        let said = secrets::hidden_in_text(&command);
        let running = Arc::new(Mutex::new(Running::default()));
        let shared = Arc::clone(&running);
        let probe = move || watch_calls(|| call(&command, &shared), &said, every, &events);
        let thread = std::thread::Builder::new().name("preempt-probe".to_owned()).spawn(probe);
        thread.context("cannot call --preempt-probe")?;
        Ok(Some(Self { running }))
    }
}

/// The result of one call.
enum Call {
    /// The probe was dropped.
    Cancelled,
    /// The command ended, with this exit code unless it was killed.
    Ended(Option<i32>),
}

/// Runs the command until it exits with 0. A command that cannot be started for the moment (no process, no memory) is
/// retried.
fn watch_calls(
    mut call: impl FnMut() -> io::Result<Call>,
    said: &str,
    every: Duration,
    events: &Sender<Event>,
) {
    let mut reported_code = None;
    let mut is_failure_reported = false;
    loop {
        match call() {
            Ok(Call::Cancelled) => return,
            Ok(Call::Ended(Some(0))) => {
                let why = format!("`{said}` has ended with 0 (--preempt-probe)");
                let _ = events.send(Event::Preempt(why, None));
                return;
            }
            Ok(Call::Ended(Some(code @ (126 | 127)))) if reported_code != Some(code) => {
                tracing::warn!(
                    "`{said}` (--preempt-probe) exits with {code}: it cannot be executed, so it will never preempt the job. ckpt-run keeps trying"
                );
                reported_code = Some(code);
            }
            Ok(Call::Ended(_)) => {}
            Err(error) if !is_failure_reported => {
                tracing::warn!(
                    "`{said}` (--preempt-probe) cannot be started at the moment: {error}. ckpt-run keeps trying"
                );
                is_failure_reported = true;
            }
            Err(_) => {}
        }
        std::thread::sleep(every);
    }
}

/// Runs the command and waits for its end.
fn call(command: &str, running: &Mutex<Running>) -> io::Result<Call> {
    let Some(mut child) = spawn(command, running)? else { return Ok(Call::Cancelled) };
    let pid = Pid::from_child(&child);
    // The process is not reaped yet: while `running` has its PID, no other process can have it.
    let until_ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), until_ended) {}
    let is_over = finished(running);
    let code = child.wait()?.code();
    Ok(if is_over { Call::Cancelled } else { Call::Ended(code) })
}

/// Starts the command in a process group of its own, so that Ctrl-C does not reach it; `None` if the probe was dropped.
fn spawn(command: &str, running: &Mutex<Running>) -> io::Result<Option<Child>> {
    let mut running = running.lock();
    if running.is_over {
        return Ok(None);
    }
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = shell.process_group(0).spawn()?;
    running.group = Some(Pid::from_child(&child));
    Ok(Some(child))
}

/// Records that the command has ended. Returns whether the probe was dropped.
fn finished(running: &Mutex<Running>) -> bool {
    let mut running = running.lock();
    running.group = None;
    running.is_over
}

impl Drop for Probe {
    fn drop(&mut self) {
        let mut running = self.running.lock();
        running.is_over = true;
        if let Some(group) = running.group {
            // The command may have ended, but it is reaped only after `finished`: the PID is still its own.
            let _ = rustix::process::kill_process_group(group, Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam_channel::unbounded;

    const LIMIT: Duration = Duration::from_secs(300);
    const EVERY: Duration = Duration::from_millis(5);

    fn why(event: Event) -> String {
        match event {
            Event::Preempt(why, None) => why,
            _ => panic!("another event"),
        }
    }

    #[test]
    fn a_file_counts_when_it_is_created() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("leave");
        std::fs::write(&path, "").unwrap();
        let (events, inbox) = unbounded();
        watch_file(Some(path.clone()), EVERY, events).unwrap();
        assert!(inbox.recv_timeout(20 * EVERY).is_err(), "it was there before");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(why(inbox.recv_timeout(LIMIT).unwrap()).contains("has appeared"));
    }

    #[test]
    fn a_command_is_called_until_it_ends_with_0() {
        let dir = tempfile::tempdir().unwrap();
        let calls = dir.path().join("calls");
        let command = format!("echo x >> {0}; [ $(wc -l < {0}) -ge 3 ]", calls.display());
        let (events, inbox) = unbounded();
        let _probe = Probe::begin(Some(command), EVERY, events).unwrap();
        assert!(why(inbox.recv_timeout(LIMIT).unwrap()).contains("has ended with 0"));
        assert_eq!(std::fs::read_to_string(calls).unwrap(), "x\nx\nx\n");
    }

    /// As when a machine has no process to spare for a moment.
    #[test]
    fn a_call_that_fails_is_made_again() {
        let (events, inbox) = unbounded();
        let shortage = || Err(io::Error::from_raw_os_error(libc::EAGAIN));
        let mut calls =
            [shortage(), shortage(), Ok(Call::Ended(Some(1))), shortage(), Ok(Call::Ended(Some(0)))];
        let mut next = calls.iter_mut();
        let calls = || std::mem::replace(next.next().unwrap(), Ok(Call::Cancelled));
        watch_calls(calls, "look", EVERY, &events);
        assert!(why(inbox.try_recv().unwrap()).contains("`look` has ended with 0"));
        // A command that can never be started does not end the watch either.
        let running = Mutex::new(Running::default());
        assert!(call(&"x".repeat(1 << 20), &running).is_err(), "an argument may not have so many bytes");
        running.lock().is_over = true;
        assert!(matches!(call("true", &running), Ok(Call::Cancelled)));
    }

    #[test]
    fn a_command_that_waits_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let begun = dir.path().join("begun");
        let (events, inbox) = unbounded();
        let probe = Probe::begin(Some(format!("echo x > {}; sleep 600", begun.display())), EVERY, events);
        while !begun.exists() {
            std::thread::yield_now();
        }
        drop(probe);
        // The thread ends with its sender, and without an event.
        assert_eq!(inbox.recv_timeout(LIMIT).err(), Some(crossbeam_channel::RecvTimeoutError::Disconnected));
    }
}
