//! Conversations with the launcher: the agent's, and what others may ask in it.

use std::collections::VecDeque;
use std::error::Error;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use ckpt_protocol::agent::{FromAgent, ToAgent};
use ckpt_protocol::frame::{self, FrameError};

use crate::socket::Socket;

/// A conversation with the launcher.
pub trait Link {
    /// Sends a message with the descriptors that it announces; returns the answer with its descriptors. `None` if the
    /// connection is lost.
    fn ask(&mut self, message: &FromAgent, with: &[BorrowedFd<'_>]) -> Option<(ToAgent, Vec<OwnedFd>)>;
}

/// A conversation over a connected socket. The launcher may send a request at any time, even while an answer is
/// expected; such requests are queued.
pub struct Conversation<'a> {
    socket: &'a Socket,
    unheard: VecDeque<ToAgent>,
}

impl<'a> Conversation<'a> {
    /// A new conversation.
    pub fn new(socket: &'a Socket) -> Self {
        Self { socket, unheard: VecDeque::new() }
    }

    /// The socket that it goes over.
    pub fn socket(&self) -> &'a Socket {
        self.socket
    }

    /// Waits for the next request of the launcher.
    ///
    /// # Errors
    /// See [`frame::read`].
    pub fn hear(&mut self) -> Result<ToAgent, FrameError> {
        self.unheard.pop_front().map_or_else(|| hear(self.socket), Ok)
    }

    /// As [`Conversation::hear`], but for no longer than `limit`, if there is one: `None` after that.
    ///
    /// # Errors
    /// See [`frame::read`].
    pub fn hear_within(&mut self, limit: Option<Duration>) -> Result<Option<ToAgent>, FrameError> {
        let is_there = !self.unheard.is_empty();
        match limit {
            // A failure shows again where the socket is read.
            Some(limit) if !is_there && !self.socket.is_readable(limit).unwrap_or(true) => Ok(None),
            _ => self.hear().map(Some),
        }
    }
}

impl Link for Conversation<'_> {
    fn ask(&mut self, message: &FromAgent, with: &[BorrowedFd<'_>]) -> Option<(ToAgent, Vec<OwnedFd>)> {
        say(self.socket, message).ok()?;
        self.socket.send(with).ok()?;
        loop {
            match hear(self.socket).ok()? {
                unasked @ (ToAgent::Prepare { .. }
                | ToAgent::Unstage { .. }
                | ToAgent::Quiesce { .. }
                | ToAgent::Cut { .. }
                | ToAgent::QueryActivity) => self.unheard.push_back(unasked),
                answer => {
                    let descriptors = self.socket.receive(answer.descriptors()).ok()?;
                    return Some((answer, descriptors));
                }
            }
        }
    }
}

/// Sends a message.
///
/// # Errors
/// See [`frame::write`].
pub fn say(mut socket: &Socket, message: &FromAgent) -> Result<(), FrameError> {
    frame::write(&mut socket, message)
}

/// Waits for a message.
///
/// # Errors
/// See [`frame::read`].
pub fn hear(mut socket: &Socket) -> Result<ToAgent, FrameError> {
    frame::read(&mut socket)
}

/// The text of an error with its causes, for a message to the launcher.
pub fn describe(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
