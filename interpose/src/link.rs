//! Conversations with the launcher: the agent's, and what others may ask in it.

use std::os::fd::{BorrowedFd, OwnedFd};

use ckpt_protocol::agent::{FromAgent, ToAgent};
use ckpt_protocol::frame::{self, FrameError};

use crate::socket::Socket;

/// A conversation with the launcher.
pub trait Link {
    /// Says something, with the descriptors that it announces, and hears the answer with the descriptors that follow
    /// it. `None` once the launcher is gone.
    fn ask(&mut self, message: &FromAgent, with: &[BorrowedFd<'_>]) -> Option<(ToAgent, Vec<OwnedFd>)>;
}

/// One over a socket that is connected.
pub struct Conversation<'a>(pub &'a Socket);

impl Link for Conversation<'_> {
    fn ask(&mut self, message: &FromAgent, with: &[BorrowedFd<'_>]) -> Option<(ToAgent, Vec<OwnedFd>)> {
        say(self.0, message).ok()?;
        self.0.send(with).ok()?;
        let answer = hear(self.0).ok()?;
        let descriptors = self.0.receive(answer.descriptors()).ok()?;
        Some((answer, descriptors))
    }
}

/// Says something.
///
/// # Errors
/// See [`frame::write`].
pub fn say(mut socket: &Socket, message: &FromAgent) -> Result<(), FrameError> {
    frame::write(&mut socket, message)
}

/// Waits for something to be said.
///
/// # Errors
/// See [`frame::read`].
pub fn hear(mut socket: &Socket) -> Result<ToAgent, FrameError> {
    frame::read(&mut socket)
}
