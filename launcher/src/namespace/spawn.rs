//! Starting the init as PID 1 of new namespaces.

use super::INIT_ARGUMENT;
use super::messages::Network;
use crate::sys::privileges::{self, Privileges};
use rustix::fs::{Mode, OFlags};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, Signal};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;

/// The number of the init's control socket.
pub(super) const CONTROL_FD: i32 = 3;

/// The init's second argument when it has a network namespace to set up.
pub(super) const PRIVATE_NETWORK: &str = "private-network";

/// A started init.
pub(super) struct Spawned {
    /// Its PID in the launcher's namespace.
    pub(super) pid: Pid,
    /// Refers to the init even if its PID is reused.
    pub(super) pidfd: OwnedFd,
}

/// The files that a process in a new user namespace writes to keep its user and group ID: (file, content).
struct Identity([(CString, CString); 3]);

impl Identity {
    fn of_this_process() -> Self {
        let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let file =
            |name: &str, content: String| (CString::new(format!("/proc/self/{name}")), CString::new(content));
        let files = [
            // The kernel requires this before an unprivileged user may write gid_map.
            file("setgroups", "deny".to_owned()),
            file("gid_map", format!("{group} {group} 1")),
            file("uid_map", format!("{user} {user} 1")),
        ];
        Self(files.map(|(path, content)| (path.expect("no NUL"), content.expect("no NUL"))))
    }

    /// Writes the files; returns whether that succeeded. Makes system calls only.
    fn apply(&self) -> bool {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        self.0.iter().all(|(path, content)| {
            let file = retry_on_intr(|| rustix::fs::open(path.as_c_str(), flags, Mode::empty()));
            file.and_then(|file| retry_on_intr(|| rustix::io::write(&file, content.as_bytes()))).is_ok()
        })
    }
}

/// Starts `ckpt-run __init` in new PID and mount namespaces, with `control` as its descriptor 3. If this process has no
/// capability to create them, they are in a new user namespace, in which the init has all capabilities. Without root there
/// is also a new IPC namespace; for root the job's first process creates it.
///
/// The calling thread has to live as long as the init: the init ends with it.
pub(super) fn spawn_init(
    control: &UnixStream,
    network: Network,
    private_dir: Option<&str>,
) -> io::Result<Spawned> {
    let path = CString::new("/proc/self/exe").expect("no NUL");
    let kind = if network == Network::Private { PRIVATE_NETWORK } else { "host-network" };
    let private = private_dir.unwrap_or_default();
    let arguments =
        ["ckpt-run", INIT_ARGUMENT, kind, private].map(|text| CString::new(text).expect("no NUL"));
    let argv: Vec<_> = arguments.iter().map(|one| one.as_ptr()).chain([std::ptr::null()]).collect();
    let environment: Vec<CString> = std::env::vars_os()
        .filter_map(|(name, value)| {
            let mut entry = name.into_vec();
            entry.push(b'=');
            entry.extend(value.into_vec());
            CString::new(entry).ok()
        })
        .collect();
    let mut envp: Vec<_> = environment.iter().map(|entry| entry.as_ptr()).collect();
    envp.push(std::ptr::null());
    let rights = Privileges::detect();
    let identity = rights.wants_user_namespace().then(Identity::of_this_process);
    let mut pidfd: i32 = -1;
    let mut flags = libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_PIDFD;
    if identity.is_some() {
        flags |= libc::CLONE_NEWUSER;
    }
    if !rights.is_root() {
        flags |= libc::CLONE_NEWIPC;
    }
    flags |= match network {
        Network::Host => 0,
        Network::Private => libc::CLONE_NEWNET,
        Network::Job => libc::CLONE_NEWUTS,
    };
    let args = libc::clone_args {
        flags: u64::from(flags.cast_unsigned()),
        pidfd: (&raw mut pidfd) as u64,
        exit_signal: u64::from(libc::SIGCHLD.cast_unsigned()),
        // SAFETY: all fields are integers.
        ..unsafe { std::mem::zeroed() }
    };
    // SAFETY: without CLONE_VM this is a fork: the child runs on a copy of this stack. `args` has the layout and
    // size that are passed, and `pidfd` outlives the call.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) };
    match pid {
        ..0 => Err(io::Error::last_os_error()),
        // SAFETY: this is the child of a fork; only async-signal-safe calls follow, on memory prepared before.
        0 => unsafe {
            child(control.as_raw_fd(), identity.as_ref(), path.as_ptr(), argv.as_ptr(), envp.as_ptr())
        },
        _ => {
            // SAFETY: the kernel has stored a new descriptor there, which nothing else owns.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::Other)?;
            Ok(Spawned { pid, pidfd })
        }
    }
}

/// Runs in the child of the fork: keeps user ID and capabilities, gives the socket its number and executes the init.
///
/// # Safety
/// To be called in the child of a fork only; the pointers are NUL-terminated strings and NULL-terminated arrays.
unsafe fn child(
    control: i32,
    identity: Option<&Identity>,
    path: *const libc::c_char,
    argv: *const *const libc::c_char,
    envp: *const *const libc::c_char,
) -> ! {
    // Not SIGKILL: the init records what the job has written when its launcher has died (`init::end_by`).
    // SAFETY: plain system calls on integers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) };
    // If this fails, the init's set-up fails later and reports the error.
    let _ = identity.is_none_or(Identity::apply);
    let _ = privileges::hand_on();
    if control == CONTROL_FD {
        // SAFETY: as above; dup2 onto itself would leave the close-on-exec flag set.
        unsafe { libc::fcntl(control, libc::F_SETFD, 0) };
    } else {
        // SAFETY: as above.
        unsafe { libc::dup2(control, CONTROL_FD) };
    }
    // SAFETY: the caller vouches for the pointers.
    unsafe { libc::execve(path, argv, envp) };
    // SAFETY: ends this process only.
    unsafe { libc::_exit(127) }
}

/// Kills the init, and with it all processes in its namespace.
pub(super) fn kill(spawned: &Spawned) {
    // It may have ended already.
    let _ = rustix::process::pidfd_send_signal(&spawned.pidfd, Signal::KILL);
}
