//! What preempts besides a signal and a call: a file that appears, a shell command that ends with 0.

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

/// Watches for a file; `None` watches for none.
///
/// # Errors
/// When there is no thread for it.
pub fn watch_file(path: Option<PathBuf>, every: Duration, events: Sender<Event>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let before = identity(&path);
    if before.is_some() {
        tracing::warn!(
            "{} (--preempt-file) is there already, and counts as an old one: make it anew to preempt the job",
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
    std::thread::Builder::new()
        .name("preempt-file".to_owned())
        .spawn(watch)
        .map(drop)
        .context("cannot watch for --preempt-file")
}

/// What tells one making of a file from the next.
fn identity(path: &Path) -> Option<(u64, u64, i64, i64)> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec()))
}

/// Calls a shell command until it ends with 0. It is ended when this is dropped.
pub struct Probe {
    running: Arc<Mutex<Running>>,
}

#[derive(Default)]
struct Running {
    /// The process group of the command that runs.
    group: Option<Pid>,
    is_over: bool,
}

impl Probe {
    /// Begins; `None` calls nothing.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub fn begin(command: Option<String>, every: Duration, events: Sender<Event>) -> Result<Option<Self>> {
        let Some(command) = command else { return Ok(None) };
        let said = secrets::hidden_in_text(&command);
        let running = Arc::new(Mutex::new(Running::default()));
        let shared = Arc::clone(&running);
        let probe = move || watch_calls(|| call(&command, &shared), &said, every, &events);
        std::thread::Builder::new()
            .name("preempt-probe".to_owned())
            .spawn(probe)
            .context("cannot call --preempt-probe")?;
        Ok(Some(Self { running }))
    }
}

/// What became of one call.
enum Call {
    /// Nobody wants it any more.
    Unwanted,
    /// It ended, with this code if it was not killed.
    Ended(Option<i32>),
}

/// Calls until one ends with 0. What cannot be called for the moment (no process, no memory) is called again.
fn watch_calls(
    mut call: impl FnMut() -> io::Result<Call>,
    said: &str,
    every: Duration,
    events: &Sender<Event>,
) {
    let mut told = None;
    let mut told_failure = false;
    loop {
        match call() {
            Ok(Call::Unwanted) => return,
            Ok(Call::Ended(Some(0))) => {
                let why = format!("`{said}` has ended with 0 (--preempt-probe)");
                let _ = events.send(Event::Preempt(why, None));
                return;
            }
            Ok(Call::Ended(Some(code @ (126 | 127)))) if told != Some(code) => {
                tracing::warn!(
                    "`{said}` (--preempt-probe) ends with {code}: it cannot be executed, so it will never preempt the job. It is called again all the same"
                );
                told = Some(code);
            }
            Ok(Call::Ended(_)) => {}
            Err(error) if !told_failure => {
                tracing::warn!(
                    "`{said}` (--preempt-probe) cannot be called at the moment: {error}. It is tried again"
                );
                told_failure = true;
            }
            Err(_) => {}
        }
        std::thread::sleep(every);
    }
}

/// Calls the command and waits for its end.
fn call(command: &str, running: &Mutex<Running>) -> io::Result<Call> {
    let Some(mut child) = spawn(command, running)? else { return Ok(Call::Unwanted) };
    let pid = Pid::from_child(&child);
    // Not reaped yet: as long as `running` has its number, that is its own.
    let until_ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), until_ended) {}
    let is_over = finished(running);
    let code = child.wait()?.code();
    Ok(if is_over { Call::Unwanted } else { Call::Ended(code) })
}

/// Starts the command in a process group of its own, so that Ctrl-C is not for it; `None` when nobody wants it.
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

/// Notes that the command has ended; says whether nobody wants it any more.
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
            // It may have ended by now; it is reaped only after `finished`, so the number is its own.
            let _ = rustix::process::kill_process_group(group, Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam_channel::unbounded;

    const LIMIT: Duration = Duration::from_secs(20);
    const EVERY: Duration = Duration::from_millis(5);

    fn why(event: Event) -> String {
        match event {
            Event::Preempt(why, None) => why,
            _ => panic!("another event"),
        }
    }

    #[test]
    fn a_file_counts_when_it_is_made() {
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
        let calls = || std::mem::replace(next.next().unwrap(), Ok(Call::Unwanted));
        watch_calls(calls, "look", EVERY, &events);
        assert!(why(inbox.try_recv().unwrap()).contains("`look` has ended with 0"));
        // One that can never be called is no end of the watch either.
        let running = Mutex::new(Running::default());
        assert!(call(&"x".repeat(1 << 20), &running).is_err(), "an argument may not have so many bytes");
        running.lock().is_over = true;
        assert!(matches!(call("true", &running), Ok(Call::Unwanted)));
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
