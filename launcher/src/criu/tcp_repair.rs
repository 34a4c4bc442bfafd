//! The end of TCP's repair mode. CRIU puts the connections of a job that it dumps into this mode, in which they neither send
//! nor receive. A CRIU that is killed leaves them so, and each call of the job on them would fail with EPERM.

use crate::namespace::{numbers_in, pid_namespace_of};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Ends it for all TCP connections in the PID namespace of a process, as far as the launcher may. CRIU must not run
/// meanwhile. Returns the number of connections.
pub fn end_tcp_repair(init_pid: i32) -> usize {
    let Some(of_job) = pid_namespace_of(init_pid) else { return 0 };
    let pids = numbers_in("/proc").unwrap_or_default().into_iter();
    pids.filter(|&pid| pid_namespace_of(pid) == Some(of_job)).map(end_for_process).sum()
}

fn end_for_process(pid: i32) -> usize {
    let process = Pid::from_raw(pid).map(|pid| pidfd_open(pid, PidfdFlags::empty()));
    let Some(Ok(process)) = process else { return 0 };
    let dir = format!("/proc/{pid}/fd");
    let is_socket = |fd: &RawFd| {
        fs::read_link(format!("{dir}/{fd}")).is_ok_and(|link| link.to_string_lossy().starts_with("socket:"))
    };
    let numbers = numbers_in(&dir).unwrap_or_default().into_iter().filter(is_socket);
    let sockets = numbers.filter_map(|fd| pidfd_getfd(&process, fd, PidfdGetfdFlags::empty()).ok());
    sockets.filter(|socket| end_for(socket).is_ok_and(|was_on| was_on)).count()
}

/// Returns whether it was on. An error for what is no TCP socket.
fn end_for(socket: &OwnedFd) -> io::Result<bool> {
    let mut is_on: libc::c_int = 0;
    let mut bytes = libc::socklen_t::try_from(size_of_val(&is_on)).map_err(io::Error::other)?;
    let fd = socket.as_raw_fd();
    let to = (&raw mut is_on).cast();
    // SAFETY: `to` has room for the `bytes` bytes that TCP_REPAIR writes at most, and any bytes make an integer.
    let result = unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_REPAIR, to, &raw mut bytes) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if is_on == 0 {
        return Ok(false);
    }
    let off: libc::c_int = 0;
    // SAFETY: the kernel reads the `bytes` bytes of an integer at the address of `off`, which lives until after the call.
    let result =
        unsafe { libc::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_REPAIR, (&raw const off).cast(), bytes) };
    if result == 0 { Ok(true) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    #[test]
    fn only_tcp_sockets_have_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!end_for(&stream.into()).unwrap());
        assert!(end_for(&UnixStream::pair().unwrap().0.into()).is_err());
    }
}
