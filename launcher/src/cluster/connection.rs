//! A connection between two launchers: mutual authentication by a shared key, then messages that nobody else can make,
//! change, repeat or leave out.
//!
//! ```text
//! node                                   coordinator
//!   magic, version, nonce  ------------->
//!                         <-------------  magic, version, nonce
//!     (both derive two keys, one for each direction, from the shared key and both nonces)
//!   length, message, code  ------------->   a wrong code: refused, the connection is closed
//!                         <-------------  length, message, code
//! ```
//!
//! The code is keyed BLAKE3 over the number of the message, its length and its content. The first message of each side
//! proves that it has the key. The key itself is never sent. Messages are not encrypted. Those between launchers hold no content of
//! the job; replicas do (`replicas/`), which their node encrypts with `--encrypt-key-file`, as in its store.

use super::messages::{Message, VERSION};
use crate::sys::deadline::NODE_SILENCE_TIMEOUT;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv, sockopt};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

const MAGIC: &[u8; 16] = b"ckpt-run nodes\r\n";
const NONCE_BYTES: usize = 32;
const HELLO_BYTES: usize = MAGIC.len() + 4 + NONCE_BYTES;
const CODE_BYTES: usize = 32;
/// Of a first message, whose sender has not proved that it has the key.
pub(super) const MOST_BYTES_AT_FIRST: u32 = 1 << 20;
/// The report of a rank has some 150 bytes for each communicator and for each rank to which it sends or from which it receives.
const MOST_BYTES: u32 = 16 << 20;
/// Instead of the length of a message, without a code: the first message of the other side had a wrong one.
const WRONG_KEY: u32 = u32::MAX;
const TO_COORDINATOR: &str = "ckpt-run nodes 1: messages to the coordinator";
const FROM_COORDINATOR: &str = "ckpt-run nodes 1: messages from the coordinator";

/// The key that all nodes of a job share. Never sent, never printed.
#[derive(Clone)]
pub struct ClusterKey(pub(super) [u8; 32]);

impl std::fmt::Debug for ClusterKey {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("ClusterKey")
    }
}

/// Why there is no connection, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The network.
    #[error("{}", text_of(.0))]
    Io(io::Error),
    /// The other end has closed it.
    #[error("it was closed")]
    Closed,
    /// Something else listens, or connects, at this port.
    #[error("the other end is no ckpt-run with --nodes")]
    Stranger,
    /// Another version of ckpt-run.
    #[error(
        "the other end has version {0} of the connection and this one version {VERSION}: install the same version of ckpt-run on all nodes"
    )]
    Version(u32),
    /// The code of a message is wrong.
    #[error(
        "the other end has another key: --cluster-key-file has to be the same on all nodes, or without it the store"
    )]
    WrongKey,
    /// A message that this version does not know.
    #[error("a message cannot be read: {0}")]
    Malformed(String),
}

impl From<io::Error> for ConnectionError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// A timeout of a socket has the text "Resource temporarily unavailable".
fn text_of(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            "the other end does not answer: it may be stopped, its machine overloaded, or the network broken"
                .to_owned()
        }
        _ => error.to_string(),
    }
}

impl ConnectionError {
    /// Whether another try cannot help: somebody has to change something.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Version(_) | Self::WrongKey)
    }
}

/// The side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The node that has connected.
    Node,
    /// The coordinator, which has accepted.
    Coordinator,
}

/// Writes messages.
#[derive(Debug)]
pub struct Sender {
    stream: Arc<TcpStream>,
    codes: Codes,
}

/// Reads messages.
#[derive(Debug)]
pub struct Receiver {
    stream: Arc<TcpStream>,
    codes: Codes,
    /// Until when the first message has to be there, as a whole, of an end that has proved nothing yet.
    until: Option<Instant>,
}

/// The codes of one direction.
struct Codes {
    key: [u8; 32],
    next: u64,
}

impl std::fmt::Debug for Codes {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}", self.next)
    }
}

impl Codes {
    /// The longest message that may be next.
    fn most_bytes(&self) -> u32 {
        if self.next == 0 { MOST_BYTES_AT_FIRST } else { MOST_BYTES }
    }

    fn code(&mut self, content: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&self.next.to_le_bytes()).update(&(content.len() as u64).to_le_bytes()).update(content);
        self.next += 1;
        hasher.finalize()
    }
}

/// Exchanges nonces. The other end has proved nothing yet: its first message does.
///
/// # Errors
/// See [`ConnectionError`].
pub fn open(
    mut stream: TcpStream,
    key: &ClusterKey,
    side: Side,
    timeout: Duration,
) -> Result<(Sender, Receiver), ConnectionError> {
    stream.set_nodelay(true)?;
    keep_alive(&stream)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    let mut nonce = [0; NONCE_BYTES];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut nonce)?;
    let own = [&MAGIC[..], &VERSION.to_le_bytes(), &nonce].concat();
    let mut theirs = [0; HELLO_BYTES];
    // Anybody can connect to a coordinator.
    let until = (side == Side::Coordinator).then(|| Instant::now() + timeout);
    match side {
        Side::Node => {
            stream.write_all(&own)?;
            read_exact(&stream, &mut theirs, until)?;
        }
        Side::Coordinator => {
            read_exact(&stream, &mut theirs, until)?;
            stream.write_all(&own)?;
        }
    }
    let (magic, rest) = theirs.split_at(MAGIC.len());
    let (version, their_nonce) = rest.split_at(4);
    if magic != MAGIC {
        return Err(ConnectionError::Stranger);
    }
    let version = u32::from_le_bytes(version.try_into().expect("four bytes"));
    if version != VERSION {
        return Err(ConnectionError::Version(version));
    }
    let (first, second) =
        if side == Side::Node { (&nonce[..], their_nonce) } else { (their_nonce, &nonce[..]) };
    let codes = |context: &str| {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        hasher.update(&key.0).update(first).update(second);
        Codes { key: *hasher.finalize().as_bytes(), next: 0 }
    };
    let (to, from) = (codes(TO_COORDINATOR), codes(FROM_COORDINATOR));
    let (sending, receiving) = if side == Side::Node { (to, from) } else { (from, to) };
    // One descriptor for both: node 0 has as many connections as the job has nodes.
    let stream = Arc::new(stream);
    let sender = Sender { stream: Arc::clone(&stream), codes: sending };
    Ok((sender, Receiver { stream, codes: receiving, until }))
}

/// A machine that dies while nodes wait for others is noticed.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, NODE_SILENCE_TIMEOUT / 2)?;
    sockopt::set_tcp_keepintvl(stream, NODE_SILENCE_TIMEOUT / 6)?;
    Ok(sockopt::set_tcp_keepcnt(stream, 3)?)
}

impl Sender {
    /// Sends a message.
    ///
    /// # Errors
    /// When the connection is broken, or the other end does not read for the time of [`open`].
    ///
    /// # Panics
    /// Never: each message has a JSON form.
    pub fn send(&mut self, message: &Message) -> io::Result<()> {
        self.send_bytes(&serde_json::to_vec(message).expect("messages have a JSON form"))
    }

    /// Sends something that is no [`Message`].
    ///
    /// # Errors
    /// As [`Self::send`].
    pub fn send_bytes(&mut self, content: &[u8]) -> io::Result<()> {
        let most_bytes = self.codes.most_bytes();
        let length = u32::try_from(content.len()).ok().filter(|length| *length <= most_bytes);
        let length = length.ok_or_else(|| io::Error::other("a message is too long"))?;
        let code = self.codes.code(content);
        let bytes = [&length.to_le_bytes()[..], content, code.as_bytes()].concat();
        (&*self.stream).write_all(&bytes)
    }

    /// The connection, as long as it is used.
    pub fn stream(&self) -> Weak<TcpStream> {
        Arc::downgrade(&self.stream)
    }

    /// Ends the connection if the other end does not acknowledge something for this long.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn end_without_acknowledgement(&self, timeout: Duration) -> io::Result<()> {
        let timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        Ok(sockopt::set_tcp_user_timeout(&*self.stream, timeout_ms)?)
    }

    /// Tells an end that has not proved that it has the key.
    pub fn refuse_key(&mut self) {
        let _ = (&*self.stream).write_all(&WRONG_KEY.to_le_bytes());
    }

    /// Closes the connection in both directions.
    pub fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Receiver {
    /// Whether something arrives within `timeout`, or the connection ends.
    ///
    /// # Errors
    /// See [`ConnectionError`].
    pub fn is_ready(&self, timeout: Duration) -> Result<bool, ConnectionError> {
        self.stream.set_read_timeout(Some(timeout))?;
        let end = Instant::now() + timeout;
        let mut peeked = self.stream.peek(&mut [0]);
        // A signal ends the call, whatever its handler.
        while peeked.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::Interrupted)
            && Instant::now() < end
        {
            peeked = self.stream.peek(&mut [0]);
        }
        match peeked {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
                ) =>
            {
                Ok(false)
            }
            result => Ok(result.map(|_| true)?),
        }
    }

    /// Whether the connection is open and nothing has come that was not received.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        let peeked = recv(&*self.stream, &mut [0_u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        matches!(peeked, Err(Errno::AGAIN | Errno::INTR))
    }

    /// Sets how long [`Self::receive`] waits; `None` is for ever.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.stream.set_read_timeout(timeout)
    }

    /// Waits for the next message.
    ///
    /// # Errors
    /// See [`ConnectionError`].
    pub fn receive(&mut self) -> Result<Message, ConnectionError> {
        let content = self.receive_bytes()?;
        serde_json::from_slice(&content).map_err(|error| ConnectionError::Malformed(error.to_string()))
    }

    /// Waits for something that is no [`Message`].
    ///
    /// # Errors
    /// See [`ConnectionError`].
    pub fn receive_bytes(&mut self) -> Result<Vec<u8>, ConnectionError> {
        let mut length = [0; 4];
        read_exact(&self.stream, &mut length, self.until)?;
        let length = u32::from_le_bytes(length);
        if length > self.codes.most_bytes() {
            // Nobody has proved anything with that: only a hint while the connection is new.
            let is_new = self.codes.next == 0 && length == WRONG_KEY;
            return Err(if is_new {
                ConnectionError::WrongKey
            } else {
                ConnectionError::Malformed("too long".into())
            });
        }
        let mut content = vec![0; length as usize];
        read_exact(&self.stream, &mut content, self.until)?;
        let mut code = [0; CODE_BYTES];
        read_exact(&self.stream, &mut code, self.until)?;
        // The comparison takes the same time wherever they differ.
        if blake3::Hash::from(code) != self.codes.code(&content) {
            return Err(ConnectionError::WrongKey);
        }
        self.until = None;
        Ok(content)
    }
}

/// The time-out of the connection is that of each byte; `until` is for all of them.
fn read_exact(
    mut stream: &TcpStream,
    mut to: &mut [u8],
    until: Option<Instant>,
) -> Result<(), ConnectionError> {
    let Some(until) = until else {
        return stream.read_exact(to).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => ConnectionError::Closed,
            _ => error.into(),
        });
    };
    while !to.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(to) {
            Ok(0) => return Err(ConnectionError::Closed),
            Ok(count) => to = &mut to[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::messages::EndedPart;
    use std::net::TcpListener;

    const TIMEOUT: Duration = Duration::from_secs(300);

    type Ends = Result<(Sender, Receiver), ConnectionError>;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let node = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (node, listener.accept().unwrap().0)
    }

    fn connected(keys: [u8; 2]) -> (Ends, Ends) {
        let (node, coordinator) = pair();
        let other = std::thread::spawn(move || {
            open(coordinator, &ClusterKey([keys[1]; 32]), Side::Coordinator, TIMEOUT)
        });
        let node = open(node, &ClusterKey([keys[0]; 32]), Side::Node, TIMEOUT);
        (node, other.join().unwrap())
    }

    #[test]
    fn the_same_key_connects_both_ways() {
        let (node, coordinator) = connected([1, 1]);
        let ((mut to, mut from), (mut back, mut inbox)) = (node.unwrap(), coordinator.unwrap());
        for code in 0..3 {
            to.send(&Message::PartEnded(EndedPart::own(code))).unwrap();
            assert_eq!(inbox.receive().unwrap(), Message::PartEnded(EndedPart::own(code)));
            back.send(&Message::Complete).unwrap();
            assert_eq!(from.receive().unwrap(), Message::Complete);
        }
        drop((to, from));
        assert!(matches!(inbox.receive(), Err(ConnectionError::Closed)));
    }

    #[test]
    fn another_key_is_refused_on_both_sides() {
        let (node, coordinator) = connected([1, 2]);
        let ((mut to, mut from), (mut back, mut inbox)) = (node.unwrap(), coordinator.unwrap());
        to.send(&Message::Complete).unwrap();
        assert!(matches!(inbox.receive(), Err(ConnectionError::WrongKey)));
        back.refuse_key();
        assert!(matches!(from.receive(), Err(ConnectionError::WrongKey)));
    }

    #[test]
    fn messages_cannot_be_changed_repeated_left_out_or_sent_back() {
        let mut codes = Codes { key: [1; 32], next: 0 };
        let framed = |codes: &mut Codes, message: &Message| {
            let content = serde_json::to_vec(message).unwrap();
            let code = codes.code(&content);
            [&u32::try_from(content.len()).unwrap().to_le_bytes()[..], &content, code.as_bytes()].concat()
        };
        let first = framed(&mut codes, &Message::Complete);
        let second = framed(&mut codes, &Message::PartEnded(EndedPart::own(7)));
        let received = |frames: &[&[u8]]| {
            let (mut node, coordinator) = pair();
            node.write_all(&frames.concat()).unwrap();
            drop(node);
            let mut receiver = Receiver {
                stream: Arc::new(coordinator),
                codes: Codes { key: [1; 32], next: 0 },
                until: None,
            };
            let all: Vec<_> = std::iter::from_fn(|| receiver.receive().ok()).collect();
            all.len()
        };
        assert_eq!(received(&[&first, &second]), 2);
        assert_eq!(received(&[&first, &first]), 1, "repeated");
        assert_eq!(received(&[&second]), 0, "the first is left out");
        let mut other = Codes { key: [2; 32], next: 0 };
        assert_eq!(received(&[&framed(&mut other, &Message::Complete)]), 0, "of the other direction");
        for place in 0..first.len() {
            let mut changed = first.clone();
            changed[place] ^= 1;
            assert_eq!(received(&[&changed]), 0, "byte {place}");
        }
    }

    /// Whoever sends a byte now and then must not have a place for ever.
    #[test]
    fn an_end_that_proves_nothing_has_one_time_for_all_it_sends() {
        const SHORT: Duration = Duration::from_millis(300);
        let hello = [&MAGIC[..], &VERSION.to_le_bytes(), &[0; NONCE_BYTES]].concat();
        // Within the first lines, and within the first message.
        for at_once in [&hello[..1], &[&hello[..], &1000_u32.to_le_bytes()].concat()] {
            let (mut stranger, coordinator) = pair();
            stranger.write_all(at_once).unwrap();
            let begun = Instant::now();
            let drip = std::thread::spawn(move || {
                while stranger.write_all(&[0]).is_ok() && begun.elapsed() < TIMEOUT {
                    std::thread::sleep(SHORT / 10);
                }
            });
            let opened = open(coordinator, &ClusterKey([1; 32]), Side::Coordinator, SHORT);
            let error = opened.and_then(|(_, mut receiver)| receiver.receive()).unwrap_err();
            let is_late = matches!(&error, ConnectionError::Io(error)
                if matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock));
            assert!(is_late && begun.elapsed() >= SHORT, "{error}");
            drip.join().unwrap();
        }
    }

    #[test]
    fn a_stranger_and_another_version_are_named() {
        let newer = VERSION + 1;
        let said = format!("version {newer}");
        for (hello, expected) in [(&b"GET / HTTP/1.1\r\n"[..], "no ckpt-run"), (&MAGIC[..], &said)] {
            let (mut stranger, coordinator) = pair();
            let rest = [&newer.to_le_bytes()[..], &[0; NONCE_BYTES]].concat();
            stranger.write_all(&[hello, &rest].concat()).unwrap();
            let error = open(coordinator, &ClusterKey([1; 32]), Side::Coordinator, TIMEOUT).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
