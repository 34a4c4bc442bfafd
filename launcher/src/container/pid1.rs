//! PID 1 of a container: a process that forwards signals and reaps, with the launcher as its child.
//!
//! The kernel treats PID 1 specially: signals without a handler are ignored, and orphans become its children (those of
//! processes that entered the container; orphans of the job stay in its namespace). With a separate process for these
//! tasks, the launcher is an ordinary process.

use rustix::process::{WaitOptions, wait};
use std::io;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

/// If this process is PID 1, forks and returns in the child only. The parent serves as the init of the container and exits
/// with the code of the child. To be called while there is one thread.
pub fn fork_if_pid1() {
    if std::process::id() != 1 {
        return;
    }
    let mask = block_signals();
    // SAFETY: this process has one thread, so the child may call any function.
    match unsafe { libc::fork() } {
        // The launcher runs as PID 1 itself.
        -1 => set_mask(&mask),
        0 => {
            // SAFETY: a plain system call on integers. The launcher must not outlive PID 1 of the container.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            set_mask(&mask);
        }
        child => serve(child),
    }
}

fn serve(child: i32) -> ! {
    loop {
        if let Some(code) = reap(child) {
            std::process::exit(code);
        }
        if let Some(signal) = next_signal_to_forward() {
            // SAFETY: a plain system call on integers; the child has not been reaped yet.
            unsafe { libc::kill(child, signal) };
        }
    }
}

/// Reaps all processes that have exited; the exit code if `child` is among them.
fn reap(child: i32) -> Option<i32> {
    let mut ended = None;
    while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
        if pid.as_raw_nonzero().get() == child {
            ended = status.exit_status().or_else(|| status.terminating_signal().map(|signal| 128 + signal));
        }
    }
    ended
}

/// Waits for a signal; `None` if the child need not get it. Signals of a terminal, which the kernel sends, have reached the
/// child already: it is in the same process group.
fn next_signal_to_forward() -> Option<i32> {
    let all = all_signals();
    let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
    // SAFETY: the set is initialised, and `info` has room for what is written.
    let number = unsafe { libc::sigwaitinfo(&raw const all, info.as_mut_ptr()) };
    if number < 0 {
        return None;
    }
    // SAFETY: sigwaitinfo succeeded, so it has filled `info`.
    let info = unsafe { info.assume_init() };
    // Up to SI_USER: kill, sigqueue and similar calls; above: the kernel (sigaction(2), si_code).
    (info.si_code <= libc::SI_USER && number != libc::SIGCHLD).then_some(number)
}

fn all_signals() -> libc::sigset_t {
    let mut all = MaybeUninit::uninit();
    // SAFETY: initialises the set that it is given.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: sigfillset has initialised it.
    unsafe { all.assume_init() }
}

/// Blocks all signals and returns those that were blocked before.
fn block_signals() -> libc::sigset_t {
    let all = all_signals();
    let mut before = MaybeUninit::uninit();
    // SAFETY: the set is initialised, and there is room for the old one.
    let result = unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const all, before.as_mut_ptr()) };
    debug_assert_eq!(result, 0, "sigprocmask: {}", io::Error::last_os_error());
    // SAFETY: sigprocmask fails for a bad first argument only, so it has written the old set.
    unsafe { before.assume_init() }
}

fn set_mask(mask: &libc::sigset_t) {
    // SAFETY: the set came from the kernel; no old one is asked for.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, mask, null_mut()) };
}
