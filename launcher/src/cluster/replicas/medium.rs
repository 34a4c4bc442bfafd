//! The objects at the holder, as the store of the replicas sees them.

use super::super::connection::{self, ClusterKey, Side};
use super::super::messages::HeldParts;
use super::ports;
use super::wire::{Answer, Channel, PIECE_BYTES, Request, into_io};
use crate::sys::deadline::{NODE_CONNECTION_TIMEOUT, NODE_RETRY_INTERVAL};
use ckpt_snapshot::RelPath;
use ckpt_snapshot::medium::{BLOCK_ALIGN, Block, Medium, ObjectReader, ObjectWriter};
use parking_lot::Mutex;
use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// See the module. Before [`Client::connect`] there are no objects.
#[derive(Debug)]
pub struct HolderMedium(pub Arc<Client>);

/// The connections to the holder.
#[derive(Debug)]
pub struct Client {
    key: ClusterKey,
    /// This node.
    owner: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Where the holder is, and the number of the start.
    holder: Option<(SocketAddr, u64)>,
    /// Connections without a request.
    idle: Vec<Channel>,
    /// All connections, to close them.
    streams: Vec<Weak<TcpStream>>,
    is_closed: bool,
}

impl Client {
    pub fn new(key: ClusterKey, owner: u32) -> Self {
        Self { key, owner, state: Mutex::default() }
    }

    pub fn connect(&self, address: SocketAddr, number: u64) {
        self.state.lock().holder = Some((address, number));
    }

    pub fn address(&self) -> Option<SocketAddr> {
        self.state.lock().holder.map(|(address, _)| address)
    }

    /// Ends all requests, now and from now on.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        state.idle.clear();
        for stream in state.streams.drain(..).filter_map(|stream| stream.upgrade()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    pub fn publish(&self, parts: &HeldParts) -> io::Result<()> {
        self.ask(&Request::Publish(parts.clone())).map(drop)
    }

    /// A connection without a request; `None` if there is no holder.
    fn channel(&self) -> io::Result<Option<Channel>> {
        let (address, number) = {
            let mut state = self.state.lock();
            if state.is_closed {
                return Err(io::Error::new(ErrorKind::ConnectionAborted, "the job has ended on all nodes"));
            }
            if let Some(idle) = state.idle.pop() {
                return Ok(Some(idle));
            }
            match state.holder {
                Some(holder) => holder,
                None => return Ok(None),
            }
        };
        let end = Instant::now() + NODE_CONNECTION_TIMEOUT;
        loop {
            match self.open(address, number)? {
                Some(channel) => return Ok(Some(channel)),
                None if Instant::now() >= end => return Err(ErrorKind::TimedOut.into()),
                // It has not heard yet that all nodes have joined.
                None => std::thread::sleep(NODE_RETRY_INTERVAL),
            }
        }
    }

    fn open(&self, address: SocketAddr, number: u64) -> io::Result<Option<Channel>> {
        let stream = ports::connect(address, NODE_CONNECTION_TIMEOUT)?;
        let opened = connection::open(stream, &self.key, Side::Node, NODE_CONNECTION_TIMEOUT);
        let (sender, receiver) = opened.map_err(into_io)?;
        {
            let mut state = self.state.lock();
            if state.is_closed {
                return Err(ErrorKind::ConnectionAborted.into());
            }
            state.streams.retain(|stream| stream.strong_count() > 0);
            state.streams.push(sender.stream());
        }
        let mut channel = Channel { sender, receiver };
        channel.say(&Request::Hello { number, owner: self.owner })?;
        match channel.hear::<Answer>()?.checked()? {
            Answer::NotYet => Ok(None),
            _ => Ok(Some(channel)),
        }
    }

    /// Keeps a connection for the next request.
    fn keep(&self, channel: Channel) {
        let mut state = self.state.lock();
        if !state.is_closed {
            state.idle.push(channel);
        }
    }

    /// Asks the holder. Without one, the error is [`ErrorKind::NotFound`].
    fn ask(&self, request: &Request) -> io::Result<Answer> {
        self.with_channel(|channel| {
            channel.say(request)?;
            channel.hear::<Answer>()
        })
    }

    /// Names with numbers; none without a holder.
    fn objects(&self, request: &Request) -> io::Result<Vec<(String, u64)>> {
        match or_none(self.ask(request), Answer::Objects { objects: Vec::new() })? {
            Answer::Objects { objects } => Ok(objects),
            _ => Err(unexpected()),
        }
    }

    /// The checked answer to what `talk` says. The connection is kept if it is in order.
    fn with_channel(&self, talk: impl FnOnce(&mut Channel) -> io::Result<Answer>) -> io::Result<Answer> {
        let mut channel = self.channel()?.ok_or_else(no_holder)?;
        let answer = talk(&mut channel).map_err(|error| self.named(error))?;
        self.keep(channel);
        answer.checked()
    }

    fn named(&self, error: io::Error) -> io::Error {
        let text = match error.kind() {
            ErrorKind::TimedOut => "it does not answer".to_owned(),
            _ => error.to_string(),
        };
        let holder = self.address().map_or_else(|| "no node".to_owned(), |address| address.to_string());
        io::Error::new(error.kind(), format!("the launcher at {holder}, which holds the replicas: {text}"))
    }
}

fn no_holder() -> io::Error {
    io::Error::new(ErrorKind::NotFound, "no node holds replicas of this one yet")
}

fn unexpected() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "the holder of the replicas answers something else")
}

/// Nothing is found without a holder.
fn or_none<T>(found: io::Result<T>, none: T) -> io::Result<T> {
    match found {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(none),
        found => found,
    }
}

impl Medium for HolderMedium {
    fn describe(&self, name: &RelPath) -> String {
        let holder = self.0.address().map_or_else(|| "no node".to_owned(), |address| address.to_string());
        format!("{name} in the memory of the launcher at {holder}")
    }

    fn create(&self, name: &RelPath, _: usize, block_bytes: usize) -> io::Result<Box<dyn ObjectWriter>> {
        if block_bytes > PIECE_BYTES {
            return Err(ErrorKind::InvalidInput.into());
        }
        let mut channel = self.0.channel()?.ok_or_else(no_holder)?;
        let begin = |channel: &mut Channel| {
            channel.say(&Request::Create { name: name.to_string() })?;
            channel.hear::<Answer>()
        };
        begin(&mut channel).map_err(|error| self.0.named(error))?.checked()?;
        Ok(Box::new(Writer { client: Arc::clone(&self.0), channel, free: None, block_bytes }))
    }

    fn put_new(&self, name: &RelPath, content: &[u8]) -> io::Result<()> {
        let request = Request::PutNew { name: name.to_string(), bytes: content.len() as u64 };
        self.0
            .with_channel(|channel| {
                channel.say(&request)?;
                channel.send_content(content)?;
                channel.hear()
            })
            .map(drop)
    }

    fn open(&self, name: &RelPath) -> io::Result<Box<dyn ObjectReader>> {
        match self.0.ask(&Request::Open { name: name.to_string() })? {
            Answer::Bytes { bytes: Some(bytes) } => {
                Ok(Box::new(Reader { client: Arc::clone(&self.0), name: name.to_string(), bytes }))
            }
            _ => Err(unexpected()),
        }
    }

    fn list(&self, dir: &RelPath) -> io::Result<Vec<(String, u64)>> {
        self.0.objects(&Request::List { dir: dir.to_string() })
    }

    fn list_times(&self, dir: &RelPath) -> io::Result<Vec<(String, SystemTime)>> {
        let objects = self.0.objects(&Request::ListTimes { dir: dir.to_string() })?;
        let at = |ms| UNIX_EPOCH + Duration::from_millis(ms);
        Ok(objects.into_iter().map(|(name, ms)| (name, at(ms))).collect())
    }

    fn remove(&self, name: &RelPath) -> io::Result<()> {
        or_none(self.0.ask(&Request::Remove { name: name.to_string() }), Answer::Done).map(drop)
    }

    fn sweep(&self, age: Duration) -> io::Result<Vec<String>> {
        let age_ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
        match or_none(self.0.ask(&Request::Sweep { age_ms }), Answer::Names { names: Vec::new() })? {
            Answer::Names { names } => Ok(names),
            _ => Err(unexpected()),
        }
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        match or_none(self.0.ask(&Request::FreeBytes), Answer::Bytes { bytes: Some(0) })? {
            Answer::Bytes { bytes } => Ok(bytes),
            _ => Err(unexpected()),
        }
    }
}

/// An object that is being written. If it is dropped before it is finished, its connection ends, and the holder discards it.
struct Writer {
    client: Arc<Client>,
    channel: Channel,
    free: Option<Block>,
    block_bytes: usize,
}

impl Writer {
    fn ask(&mut self, request: &Request, content: &[u8]) -> io::Result<()> {
        let mut talk = || {
            self.channel.say(request)?;
            self.channel.send_content(content)?;
            self.channel.hear::<Answer>()
        };
        talk().map_err(|error| self.client.named(error))?.checked().map(drop)
    }
}

impl ObjectWriter for Writer {
    fn block(&mut self) -> io::Result<Block> {
        Ok(self.free.take().unwrap_or_else(|| Block::new(self.block_bytes)))
    }

    fn append(&mut self, mut block: Block) -> io::Result<()> {
        if block.filled() > 0 {
            self.ask(&Request::Append, block.content())?;
        }
        block.set_filled(0);
        self.free = Some(block);
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> io::Result<()> {
        self.ask(&Request::Finish, &[])?;
        let Self { client, channel, .. } = *self;
        client.keep(channel);
        Ok(())
    }
}

/// An object that is being read.
struct Reader {
    client: Arc<Client>,
    name: String,
    bytes: u64,
}

impl ObjectReader for Reader {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, mut offset: u64, into: &mut [u8]) -> io::Result<()> {
        for piece in into.chunks_mut(PIECE_BYTES) {
            let bytes = piece.len() as u64;
            let request = Request::Read { name: self.name.clone(), offset, bytes };
            let answer = self.client.with_channel(|channel| {
                channel.say(&request)?;
                let answer = channel.hear::<Answer>()?;
                if answer == Answer::Piece {
                    let content = channel.take_piece()?;
                    if content.len() != piece.len() {
                        return Err(unexpected());
                    }
                    piece.copy_from_slice(&content);
                }
                Ok(answer)
            })?;
            if answer != Answer::Piece {
                return Err(unexpected());
            }
            offset += bytes;
        }
        Ok(())
    }
}

const _: () = assert!(PIECE_BYTES.is_multiple_of(BLOCK_ALIGN));
