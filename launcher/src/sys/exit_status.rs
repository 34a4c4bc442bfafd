//! How a process has ended that is not a child of this one.

#![allow(unsafe_code)]

use procfs_core::FromRead as _;
use procfs_core::process::Stat;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// A bit of `pidfd_info::mask`: how the process has ended, once its parent has waited for it (Linux 6.15, pidfd.h).
const PIDFD_INFO_EXIT: u64 = 1 << 3;

/// The exit code of a process, or 128 and the signal that killed it; `status` is as wait(2) has it.
pub fn exit_code(status: u32) -> i32 {
    let (code, signal) = ((status >> 8) & 0xff, status & 0x7f);
    (if signal == 0 { code } else { 128 + signal }).cast_signed()
}

/// How a process has ended, as wait(2) has it; `dir` is its directory in `/proc`. `None` if it runs, or if that is not
/// known: kernels before 6.15 tell it only until its parent has waited for it.
pub fn of_process(pidfd: &OwnedFd, dir: &Path) -> Option<u32> {
    // First, since a parent may wait for it at any time.
    zombie(dir).or_else(|| waited_for(pidfd))
}

fn zombie(dir: &Path) -> Option<u32> {
    let stat = Stat::from_file(dir.join("stat")).ok()?;
    stat.exit_code.filter(|_| stat.state == 'Z').map(i32::cast_unsigned)
}

fn waited_for(pidfd: &OwnedFd) -> Option<u32> {
    // SAFETY: all fields are integers.
    let mut info: libc::pidfd_info = unsafe { std::mem::zeroed() };
    info.mask = PIDFD_INFO_EXIT;
    // SAFETY: the kernel writes no more than the size that the request has, which is that of `info`.
    let result = unsafe { libc::ioctl(pidfd.as_raw_fd(), libc::PIDFD_GET_INFO, &raw mut info) };
    (result == 0 && info.mask & PIDFD_INFO_EXIT != 0).then_some(info.exit_code.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::process::Command;

    /// The status of a process, before and after its parent has waited for it. The latter needs Linux 6.15.
    fn statuses(script: &str) -> [Option<u32>; 2] {
        let mut child = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let dir = Path::new("/proc").join(child.id().to_string());
        let status = loop {
            match of_process(&pidfd, &dir) {
                None => std::thread::sleep(std::time::Duration::from_millis(1)),
                status => break status,
            }
        };
        child.wait().unwrap();
        [status, of_process(&pidfd, &dir)]
    }

    #[test]
    fn the_status_of_another_process_is_known() {
        for (script, code) in [("exit 3", 3), ("kill -9 $$", 137), ("exit 0", 0)] {
            let [before, after] = statuses(script);
            assert_eq!(before.map(exit_code), Some(code), "{script}");
            assert!(after.is_none_or(|status| exit_code(status) == code), "{script}: {after:?}");
        }
    }
}
