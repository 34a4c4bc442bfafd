//! A connection to an agent: messages, and the open files that follow some of them.

use parking_lot::Mutex;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ckpt_protocol::agent::{FromAgent, ToAgent};
use ckpt_protocol::descriptors;
use ckpt_protocol::frame::{self, FrameError};

/// A connection. One thread reads from it; any may write.
pub struct Line {
    stream: UnixStream,
    /// Held while a message and what follows it are written, so that nothing comes in between.
    writing: Mutex<()>,
}

impl Line {
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, writing: Mutex::default() }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// See [`frame::write`].
    pub fn say(&self, message: &ToAgent) -> Result<(), FrameError> {
        self.say_with(message, &[])
    }

    /// Sends a message and the open files that it announces.
    ///
    /// # Errors
    /// See [`frame::write`] and [`descriptors::send`]. The connection is of no more use then.
    pub fn say_with(&self, message: &ToAgent, files: &[BorrowedFd<'_>]) -> Result<(), FrameError> {
        let _writing = self.writing.lock();
        frame::write(&mut &self.stream, message)?;
        descriptors::send(self.stream.as_fd(), files)
            .map_err(|source| FrameError::Io { step: "send open files", source })
    }

    /// Waits for a message.
    ///
    /// # Errors
    /// See [`frame::read`].
    pub fn hear(&self) -> Result<FromAgent, FrameError> {
        frame::read(&mut &self.stream)
    }

    /// Takes the open files that a message has announced.
    ///
    /// # Errors
    /// See [`descriptors::receive`].
    pub fn receive(&self, count: usize) -> io::Result<Vec<OwnedFd>> {
        descriptors::receive(self.stream.as_fd(), count)
    }

    /// Limits how long [`Line::hear`] may wait.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn limit_wait(&self, limit: Option<Duration>) -> Result<(), FrameError> {
        let set = self.stream.set_read_timeout(limit);
        set.map_err(|source| FrameError::Io { step: "change its time limit", source })
    }

    /// Ends the connection, whoever else holds the other end.
    pub fn cut(&self) {
        // One that is gone already is no loss.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Who has connected. The process ID is 0 for a process that the launcher's PID namespace does not show, which
/// rustix's type for the same has no room for.
///
/// # Errors
/// What the kernel says.
pub fn peer(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: libc::uid_t::MAX, gid: libc::gid_t::MAX };
    let mut bytes = libc::socklen_t::try_from(size_of_val(&peer)).map_err(io::Error::other)?;
    let to = (&raw mut peer).cast();
    // SAFETY: `to` has room for the `bytes` bytes that SO_PEERCRED writes at most, and any bytes make a ucred.
    let result = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut bytes)
    };
    if result == 0 { Ok(peer) } else { Err(io::Error::last_os_error()) }
}
