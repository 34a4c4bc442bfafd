//! Descriptors of the job's processes, found while the job is frozen.

use super::survey::numbers_in;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

/// Sockets by their inodes, each with a process that has it and the descriptor there.
pub(super) type OpenSockets = BTreeMap<u64, (i32, i32)>;

/// What is looked at.
#[derive(Debug, Default)]
pub(super) struct OpenDescriptors {
    pub(super) sockets: OpenSockets,
    /// Processes and their descriptors of eventfds.
    pub(super) eventfds: Vec<(i32, i32)>,
}

impl OpenDescriptors {
    /// Those of all processes but the init and those in `except`.
    pub(super) fn find(except: &[i32]) -> io::Result<Self> {
        let mut found = Self::default();
        let pids = numbers_in("/proc")?.into_iter().filter(|pid| *pid != 1 && !except.contains(pid));
        for pid in pids {
            let dir = format!("/proc/{pid}/fd");
            // A process that has ended has none.
            for fd in numbers_in(&dir).unwrap_or_default() {
                let Ok(target) = std::fs::read_link(format!("{dir}/{fd}")) else { continue };
                let Some(target) = target.to_str() else { continue };
                if let Some(inode) = target.strip_prefix("socket:[").and_then(|it| it.strip_suffix(']')) {
                    let inode = inode.parse().map_err(io::Error::other)?;
                    found.sockets.entry(inode).or_insert((pid, fd));
                } else if target == "anon_inode:[eventfd]" {
                    found.eventfds.push((pid, fd));
                }
            }
        }
        Ok(found)
    }
}

/// A process's descriptor; `None` if the process has ended, or may not be asked: CRIU needs the same right for each process
/// that it dumps.
pub(super) fn open(pid: i32, fd: i32) -> io::Result<Option<OwnedFd>> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    let opened = pidfd_open(pid, PidfdFlags::empty())
        .and_then(|process| pidfd_getfd(&process, fd, PidfdGetfdFlags::empty()));
    match opened {
        Err(Errno::SRCH | Errno::BADF | Errno::PERM) => Ok(None),
        other => Ok(Some(other?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_process_that_has_the_descriptor_is_found() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let counter = eventfd(5, EventfdFlags::CLOEXEC).unwrap();
        let pid = std::process::id().cast_signed();
        let inode = rustix::fs::fstat(&socket).unwrap().st_ino;
        let found = OpenDescriptors::find(&[]).unwrap();
        // Another test may have a process of its own that was forked a moment ago.
        assert!(found.sockets.contains_key(&inode));
        assert!(found.eventfds.contains(&(pid, counter.as_raw_fd())));
        let opened = open(pid, socket.as_raw_fd()).unwrap().unwrap();
        assert_eq!(rustix::fs::fstat(&opened).unwrap().st_ino, inode);
        let found = OpenDescriptors::find(&[pid]).unwrap();
        assert!(!found.eventfds.iter().any(|(of, _)| *of == pid));
    }
}
