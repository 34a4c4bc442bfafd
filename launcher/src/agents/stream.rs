//! The byte stream to an agent: messages, and the open files that follow some of them.

use parking_lot::Mutex;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ckpt_protocol::agent::{FromAgent, ToAgent};
use ckpt_protocol::descriptors;
use ckpt_protocol::frame::{self, FrameError};
use rustix::event::{PollFd, PollFlags, Timespec};
use tracing::debug;

/// A stream to an agent. One thread reads from it; any thread may write.
#[derive(Debug)]
pub struct AgentStream {
    stream: UnixStream,
    /// Held while a message and its files are written, so that no other message comes between them.
    writing: Mutex<()>,
}

impl AgentStream {
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, writing: Mutex::default() }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// See [`frame::write`].
    pub fn send(&self, message: &ToAgent) -> Result<(), FrameError> {
        self.send_with_files(message, &[])
    }

    /// Sends a message and the open files that the message announces.
    ///
    /// # Errors
    /// See [`frame::write`] and [`descriptors::send`]. The connection is unusable then.
    pub fn send_with_files(&self, message: &ToAgent, files: &[BorrowedFd<'_>]) -> Result<(), FrameError> {
        let _writing = self.writing.lock();
        frame::write(&mut &self.stream, message)?;
        descriptors::send(self.stream.as_fd(), files)
            .map_err(|source| FrameError::Io { step: "send open files", source })
    }

    /// Sends a message; an error is logged as `failure`. An agent that cannot be reached has ended, or its thread will find
    /// the connection broken.
    pub fn send_or_log(&self, message: &ToAgent, files: &[BorrowedFd<'_>], failure: &str) {
        if let Err(error) = self.send_with_files(message, files) {
            debug!(error = &error as &dyn std::error::Error, "{failure}");
        }
    }

    /// Waits for a message.
    ///
    /// # Errors
    /// See [`frame::read`].
    pub fn receive(&self) -> Result<FromAgent, FrameError> {
        frame::read(&mut &self.stream)
    }

    /// Receives the open files that a message has announced, for `step`. `None` if some were dropped, because the launcher
    /// has reached its limit of open files.
    ///
    /// # Errors
    /// See [`descriptors::receive`].
    pub fn receive_files_if_room(
        &self,
        count: usize,
        step: &'static str,
    ) -> Result<Option<Vec<OwnedFd>>, FrameError> {
        match descriptors::receive(self.stream.as_fd(), count) {
            Ok(files) => Ok(Some(files)),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(None),
            Err(source) => Err(FrameError::Io { step, source }),
        }
    }

    /// Waits until a message begins to arrive, or the connection ends. Returns whether that was so in this time.
    ///
    /// # Errors
    /// The error of `poll`.
    pub fn is_readable_within(&self, timeout: Duration) -> io::Result<bool> {
        let end = Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            let mut polled = [PollFd::new(&self.stream, PollFlags::IN)];
            match rustix::event::poll(&mut polled, Some(&left)) {
                Err(rustix::io::Errno::INTR) => {}
                polled => return Ok(polled? > 0),
            }
        }
    }

    /// Limits how long [`AgentStream::receive`] may wait.
    ///
    /// # Errors
    /// The error of `setsockopt`.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> Result<(), FrameError> {
        let set = self.stream.set_read_timeout(timeout);
        set.map_err(|source| FrameError::Io { step: "change its time limit", source })
    }

    /// Ends the connection, even if other processes hold the other end.
    pub fn shut_down(&self) {
        // This fails only if the connection has already ended.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
