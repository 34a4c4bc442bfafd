//! Starting the command below its reaper, from the single-threaded init.

use super::init::close_from;
use super::messages::{Reply, StdioSource};
use super::{reaper, seccomp, written_files};
use crate::sys::privileges::{self, Privileges};
use rustix::process::{Pid, WaitOptions};
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The report of the forked process: the command's PID, the `errno` of its exec, or the `errno` of another failure.
#[derive(Clone, Copy, Serialize, Deserialize)]
enum Report {
    Command(i32),
    NotStarted(i32),
    Failed(i32),
}

impl Report {
    fn send(self, mut to: &io::PipeWriter) -> io::Result<()> {
        to.write_all(&serde_json::to_vec(&self)?)
    }
}

/// The command to execute, with its environment and streams.
pub(super) struct JobCommand {
    pub(super) argv: Vec<OsString>,
    /// In addition to the variables of this process.
    pub(super) variables: Vec<(String, OsString)>,
    pub(super) stdio: [StdioSource; 3],
    /// The descriptors that `stdio` refers to.
    pub(super) fds: Vec<OwnedFd>,
}

/// Starts the command and returns [`Reply::Started`] or [`Reply::NotStarted`].
pub(super) fn start(
    command: &JobCommand,
    terminal: Option<OwnedFd>,
    private_dir: &Path,
) -> io::Result<Reply> {
    let program = reaper_path(private_dir);
    let (mut reports, report_to) = io::pipe()?;
    // SAFETY: this process has one thread, so the child may do whatever a process may do.
    let root_pid = unsafe { libc::fork() };
    if root_pid < 0 {
        return Err(io::Error::last_os_error());
    }
    if root_pid == 0 {
        drop(reports);
        let Err(error) = become_reaper(command, terminal, &program, &report_to);
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        let _ = Report::Failed(errno).send(&report_to);
        std::process::exit(255);
    }
    drop(report_to);
    // The other end closes when the reaper's program is executed, or the process ends.
    let mut bytes = Vec::new();
    reports.read_to_end(&mut bytes)?;
    let reports = serde_json::Deserializer::from_slice(&bytes).into_iter::<Report>();
    match reports.map_while(Result::ok).last() {
        Some(Report::Command(command_pid)) => {
            // The program is not executed after this point. Without real rights CRIU cannot save a removed file, so it stays
            // then. A snapshot with the other state could not be restored.
            if Privileges::detect().has_real_rights() {
                std::fs::remove_file(&program)?;
            }
            Ok(Reply::Started { root_pid, command_pid })
        }
        Some(Report::NotStarted(errno)) => {
            // The job has no root: the process is reaped here, and its end is not reported.
            let _ =
                Pid::from_raw(root_pid).map(|pid| rustix::process::waitpid(Some(pid), WaitOptions::empty()));
            Ok(Reply::NotStarted { errno })
        }
        Some(Report::Failed(errno)) => Err(io::Error::from_raw_os_error(errno)),
        None => Err(io::Error::other("the job's first process ended without a report")),
    }
}

fn reaper_path(private_dir: &Path) -> PathBuf {
    private_dir.join("ckpt-reaper")
}

/// Writes the reaper's program to its path in the snapshot, unless it was removed there.
pub(super) fn restore_reaper_program(private_dir: &Path, command_pid: i32) -> io::Result<()> {
    if Privileges::detect().has_real_rights() {
        return Ok(());
    }
    reaper::write_program(&reaper_path(private_dir), command_pid)
}

/// In the forked process: starts the command, reports, and executes the reaper's program.
fn become_reaper(
    command: &JobCommand,
    terminal: Option<OwnedFd>,
    program: &Path,
    report_to: &io::PipeWriter,
) -> io::Result<Infallible> {
    rustix::process::setsid()?;
    // SysV shared memory and message queues can be dumped only in a separate namespace, and only by root.
    if Privileges::detect().is_root() {
        // SAFETY: this process is the child of a fork, and has one thread.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWIPC) }?;
    }
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    close_from(3, libc::CLOSE_RANGE_CLOEXEC);
    let command_pid = match spawn_command(command, terminal) {
        Ok(pid) => pid,
        Err(error) => {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            Report::NotStarted(errno).send(report_to)?;
            std::process::exit(0);
        }
    };
    reaper::write_program(program, command_pid)?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    // The job may signal every process in the namespace; the reaper ignores all signals.
    block_all_signals()?;
    privileges::keep_back()?;
    Report::Command(command_pid).send(report_to)?;
    let path = CString::new(program.as_os_str().as_bytes())?;
    let argv = [path.as_ptr(), std::ptr::null()];
    let envp = [std::ptr::null()];
    // SAFETY: a NUL-terminated path and NULL-terminated arrays, all live across the call.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr()) };
    Err(io::Error::last_os_error())
}

fn spawn_command(job: &JobCommand, terminal: Option<OwnedFd>) -> io::Result<i32> {
    let (program, arguments) = job.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command.args(arguments).envs(job.variables.iter().map(|(name, value)| (name, value)));
    let source = |which: usize| -> io::Result<Stdio> {
        let fd = match job.stdio[which] {
            StdioSource::Sent(index) => job.fds.get(index),
            StdioSource::Terminal => terminal.as_ref(),
        };
        Ok(Stdio::from(fd.ok_or(io::ErrorKind::InvalidInput)?.try_clone()?))
    };
    command.stdin(source(0)?).stdout(source(1)?).stderr(source(2)?);
    // CRIU can save a filter only with capabilities in the initial user namespace.
    let filters = Privileges::detect().has_real_rights();
    let prepare = move || {
        written_files::stop_hurrying();
        rustix::process::setsid()?;
        if let Some(terminal) = &terminal {
            rustix::process::ioctl_tiocsctty(terminal)?;
        }
        if filters {
            seccomp::deny_unsavable_features()?;
        }
        privileges::keep_back()
    };
    // SAFETY: the closure makes system calls only; it runs in a child of a process with one thread.
    unsafe { command.pre_exec(prepare) };
    let child = command.spawn()?;
    i32::try_from(child.id()).map_err(io::Error::other)
}

fn block_all_signals() -> io::Result<()> {
    let mut all = std::mem::MaybeUninit::uninit();
    // SAFETY: initialises the set that it is given.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: the set is initialised; no old set is asked for.
    match unsafe { libc::sigprocmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
