//! What a node and the holder of its replicas say: one request, one answer. Content follows in messages of its own.

use super::super::connection::{ConnectionError, Receiver, Sender};
use super::super::messages::HeldParts;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind};

/// The longest piece of content in one message.
pub const PIECE_BYTES: usize = 8 << 20;

/// From the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Request {
    /// The first one: these are the replicas of the node `owner`.
    Hello {
        /// See [`super::super::messages::Welcome::number`].
        number: u64,
        /// The node rank.
        owner: u32,
    },
    /// Begins an object. The connection takes only [`Self::Append`] and [`Self::Finish`] until it is finished.
    Create {
        /// Its name.
        name: String,
    },
    /// A piece of the object follows.
    Append,
    /// The object is complete.
    Finish,
    /// Creates an object unless there is one. Its content follows.
    PutNew {
        /// Its name.
        name: String,
        /// The length of its content.
        bytes: u64,
    },
    /// The length of an object.
    Open {
        /// Its name.
        name: String,
    },
    /// A piece of an object.
    Read {
        /// Its name.
        name: String,
        /// Where the piece begins.
        offset: u64,
        /// Its length, at most [`PIECE_BYTES`].
        bytes: u64,
    },
    /// The objects of a directory, with their lengths.
    List {
        /// Its name.
        dir: String,
    },
    /// The objects of a directory, with their times.
    ListTimes {
        /// Its name.
        dir: String,
    },
    /// Removes an object.
    Remove {
        /// Its name.
        name: String,
    },
    /// Removes what interrupted writers have left.
    Sweep {
        /// Of this age at least, in milliseconds.
        age_ms: u64,
    },
    /// How much room there is.
    FreeBytes,
    /// Which parts the replicas are.
    Publish(HeldParts),
}

/// From the holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Answer {
    /// It is done.
    Done,
    /// To a first request: not all nodes have joined yet, as far as this one knows.
    NotYet,
    /// A number of bytes, if there is one.
    Bytes {
        /// The number.
        bytes: Option<u64>,
    },
    /// Names with lengths, or with times in milliseconds since 1970.
    Objects {
        /// Each object.
        objects: Vec<(String, u64)>,
    },
    /// Names.
    Names {
        /// Each name.
        names: Vec<String>,
    },
    /// The piece follows.
    Piece,
    /// It has failed.
    Failed {
        /// Which kind of error it is.
        failure: Failure,
        /// What is said of it.
        what: String,
    },
}

/// The kinds of errors that the store tells from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// There is no such object.
    Missing,
    /// There is one already.
    Exists,
    /// It is shorter than was asked for.
    Short,
    /// It cannot be what it is said to be.
    Invalid,
    /// There is no room.
    Full,
    /// Anything else.
    Other,
}

const KINDS: [(Failure, ErrorKind); 5] = [
    (Failure::Missing, ErrorKind::NotFound),
    (Failure::Exists, ErrorKind::AlreadyExists),
    (Failure::Short, ErrorKind::UnexpectedEof),
    (Failure::Invalid, ErrorKind::InvalidData),
    (Failure::Full, ErrorKind::StorageFull),
];

impl Answer {
    /// Of an error.
    pub fn failed(error: &io::Error) -> Self {
        let known = KINDS.iter().find(|(_, kind)| *kind == error.kind());
        let failure = known.map_or(Failure::Other, |(failure, _)| *failure);
        Self::Failed { failure, what: error.to_string() }
    }

    /// The answer, or the error that it tells.
    pub fn checked(self) -> io::Result<Self> {
        let Self::Failed { failure, what } = self else { return Ok(self) };
        let known = KINDS.iter().find(|(one, _)| *one == failure);
        Err(io::Error::new(known.map_or(ErrorKind::Other, |(_, kind)| *kind), what))
    }
}

/// A connection of requests, at either end.
#[derive(Debug)]
pub struct Channel {
    pub sender: Sender,
    pub receiver: Receiver,
}

impl Channel {
    /// Sends a request or an answer.
    ///
    /// # Panics
    /// Never: each has a JSON form.
    pub fn say(&mut self, what: &impl Serialize) -> io::Result<()> {
        self.sender.send_bytes(&serde_json::to_vec(what).expect("it has a JSON form"))
    }

    /// Waits for a request or an answer.
    pub fn hear<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let bytes = self.receiver.receive_bytes().map_err(into_io)?;
        serde_json::from_slice(&bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
    }

    /// Sends content in pieces.
    pub fn send_content(&mut self, content: &[u8]) -> io::Result<()> {
        content.chunks(PIECE_BYTES).try_for_each(|piece| self.sender.send_bytes(piece))
    }

    /// Takes content of this length.
    pub fn take_content(&mut self, bytes: u64) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        while (content.len() as u64) < bytes {
            content.extend(self.take_piece()?);
        }
        if content.len() as u64 > bytes {
            return Err(io::Error::new(ErrorKind::InvalidData, "more content follows than was said"));
        }
        Ok(content)
    }

    /// Takes one piece.
    pub fn take_piece(&mut self) -> io::Result<Vec<u8>> {
        let piece = self.receiver.receive_bytes().map_err(into_io)?;
        if piece.is_empty() || piece.len() > PIECE_BYTES {
            return Err(io::Error::new(ErrorKind::InvalidData, "a piece has an impossible length"));
        }
        Ok(piece)
    }
}

/// As the store's errors.
pub fn into_io(error: ConnectionError) -> io::Error {
    match error {
        ConnectionError::Io(error) if error.kind() == ErrorKind::WouldBlock => ErrorKind::TimedOut.into(),
        ConnectionError::Io(error) => error,
        other => io::Error::new(ErrorKind::ConnectionAborted, other.to_string()),
    }
}
