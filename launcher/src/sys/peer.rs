//! The credentials of a connecting process.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// The process at the other end. The process ID is 0 for a process that is not visible in the launcher's PID namespace, such as
/// one outside of its container; rustix's type for credentials cannot represent that.
///
/// # Errors
/// The error of `getsockopt`.
pub fn credentials(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: libc::uid_t::MAX, gid: libc::gid_t::MAX };
    let mut bytes = libc::socklen_t::try_from(size_of_val(&peer)).map_err(io::Error::other)?;
    let to = (&raw mut peer).cast();
    // SAFETY: `to` has room for the `bytes` bytes that SO_PEERCRED writes at most, and any bytes make a ucred.
    let result = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut bytes)
    };
    if result == 0 { Ok(peer) } else { Err(io::Error::last_os_error()) }
}
