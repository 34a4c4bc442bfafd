//! Conversations with the launcher: the agent's, and what others may ask in it.

use std::collections::VecDeque;
use std::error::Error;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ckpt_protocol::agent::{FromAgent, ToAgent};
use ckpt_protocol::frame::{self, FrameError};

use crate::socket::Socket;

/// A conversation with the launcher.
pub trait Link {
    /// Sends a message with the descriptors that it announces; returns the answer with its descriptors. `None` if the
    /// connection is lost.
    fn ask(&mut self, message: &FromAgent, with: &[BorrowedFd<'_>]) -> Option<(ToAgent, Vec<OwnedFd>)>;

    /// Sends a message that has no answer. A lost connection shows at the next one.
    fn tell(&mut self, _message: &FromAgent) {}

    /// Waits for the answer to a message without descriptors that was sent by [`Link::tell`]. `None` if the connection is
    /// lost.
    fn answer(&mut self) -> Option<(ToAgent, Vec<OwnedFd>)> {
        None
    }

    /// Sends [`FromAgent::Readable`], and has `read` fill the window as the launcher requests until it has stored the memory;
    /// `read` returns the reason if it cannot.
    ///
    /// # Errors
    /// Why it has not been stored, for the user.
    fn hand_out(
        &mut self,
        _readable: &FromAgent,
        _deadline: Instant,
        _read: &mut dyn FnMut(Piece) -> Option<String>,
    ) -> Result<(), String> {
        Err(LOST.to_owned())
    }
}

/// A part of the device memory that is to be copied to the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Where it begins in the mirror that there would be, in bytes.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
    /// Where in the window, in bytes.
    pub at: u64,
}

const LOST: &str = "the connection to the launcher was lost while it stored the memory of the GPU";
const TOO_LATE: &str = "this request comes after the deadline of its attempt";
const TOO_SLOW: &str = "the store has not taken the memory of the GPU in time. With --mirror none the job is paused meanwhile: raise --freeze-timeout, use a faster store, or free host memory for --mirror changed";

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
        self.answer()
    }

    fn tell(&mut self, message: &FromAgent) {
        let _ = say(self.socket, message);
    }

    fn answer(&mut self) -> Option<(ToAgent, Vec<OwnedFd>)> {
        loop {
            match hear(self.socket).ok()? {
                unasked if is_unasked(&unasked) => self.unheard.push_back(unasked),
                late @ (ToAgent::Read { .. } | ToAgent::Stored { .. }) => {
                    late_answer(&late).map_or(Ok(()), |answer| say(self.socket, &answer)).ok()?;
                }
                answer => {
                    let descriptors = self.socket.receive(answer.descriptors()).ok()?;
                    return Some((answer, descriptors));
                }
            }
        }
    }

    fn hand_out(
        &mut self,
        readable: &FromAgent,
        deadline: Instant,
        read: &mut dyn FnMut(Piece) -> Option<String>,
    ) -> Result<(), String> {
        let lost = |_| LOST.to_owned();
        say(self.socket, readable).map_err(lost)?;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            // A failure shows again where the socket is read.
            if !self.socket.is_readable(left).unwrap_or(true) {
                return Err(TOO_SLOW.to_owned());
            }
            match hear(self.socket).map_err(lost)? {
                ToAgent::Read { offset, bytes, at } => {
                    let problem = read(Piece { offset, bytes, at });
                    say(self.socket, &FromAgent::Content { problem }).map_err(lost)?;
                }
                ToAgent::Stored { problem } => return problem.map_or(Ok(()), Err),
                unasked if is_unasked(&unasked) => self.unheard.push_back(unasked),
                _ => return Err(LOST.to_owned()),
            }
        }
    }
}

/// Whether the launcher sends such a message at any time.
fn is_unasked(message: &ToAgent) -> bool {
    matches!(
        message,
        ToAgent::Prepare { .. }
            | ToAgent::Unstage { .. }
            | ToAgent::Quiesce { .. }
            | ToAgent::Cut { .. }
            | ToAgent::Release { .. }
            | ToAgent::QueryActivity
    )
}

/// The answer to a [`ToAgent::Read`] after the deadline; none to [`ToAgent::Stored`].
pub fn late_answer(message: &ToAgent) -> Option<FromAgent> {
    let is_read = matches!(message, ToAgent::Read { .. });
    is_read.then(|| FromAgent::Content { problem: Some(TOO_LATE.to_owned()) })
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
