//! Whether a memfd is open elsewhere, which the kernel tells by a lease.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};

/// Whether nobody but its owner has a memfd open. The owner has what memfd_create has returned, `file`, which the kernel
/// does not count. False if the system does not tell.
///
/// A lease for writing (fcntl(2), F_SETLEASE) is granted only then. While this process has it, an open of the file would
/// send it a signal: that takes a descriptor of it, and then there is no lease.
pub fn is_open_nowhere_else(file: &OwnedFd) -> bool {
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    // The first one if the kernel counts the owner's after all.
    is_open_once(file) || File::options().write(true).open(name).is_ok_and(|counted| is_open_once(&counted))
}

fn is_open_once(file: &impl AsRawFd) -> bool {
    // SAFETY: F_SETLEASE takes numbers and writes no memory.
    let lease = |kind: libc::c_int| unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) };
    let is_granted = lease(libc::F_WRLCK) == 0;
    if is_granted {
        lease(libc::F_UNLCK);
    }
    is_granted
}
