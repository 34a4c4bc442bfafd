//! The objects at the holder, as the store of the replicas sees them.

use super::super::connection::{self, ClusterKey, Side};
use super::super::messages::HeldParts;
use super::ports;
use super::wire::{Answer, Channel, PIECE_BYTES, Request, into_io};
use crate::sys::deadline::{
    FIRST_REPLICA_PAUSE, LONGEST_REPLICA_PAUSE, NODE_CONNECTION_TIMEOUT, NODE_RETRY_INTERVAL,
    REPLICA_ANSWER_TIMEOUT,
};
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
    failure: Option<Failure>,
    is_closed: bool,
}

/// The last request could not be asked. None is, until a pause is over: each would wait for its timeout.
#[derive(Debug)]
struct Failure {
    kind: ErrorKind,
    what: String,
    pause: Duration,
    until: Instant,
}

impl State {
    fn shut_down(&mut self) {
        self.idle.clear();
        for stream in self.streams.drain(..).filter_map(|stream| stream.upgrade()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
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
        state.shut_down();
    }

    /// Ends the requests in progress. What follows on them is not asked either.
    pub fn interrupt(&self) {
        let mut state = self.state.lock();
        state.shut_down();
        let until = Instant::now() + FIRST_REPLICA_PAUSE;
        let what = "the snapshot was given up".to_owned();
        state.failure =
            Some(Failure { kind: ErrorKind::ConnectionAborted, what, pause: FIRST_REPLICA_PAUSE, until });
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
            // The holder's machine may have been cut off meanwhile.
            while let Some(idle) = state.idle.pop() {
                if idle.receiver.is_quiet() {
                    return Ok(Some(idle));
                }
            }
            let Some(holder) = state.holder else { return Ok(None) };
            match state.failure.as_ref().filter(|failure| Instant::now() < failure.until) {
                Some(failure) => return Err(io::Error::new(failure.kind, failure.what.clone())),
                None => holder,
            }
        };
        self.connected(address, number).map(Some).map_err(|error| self.failed(error))
    }

    /// A new connection. The holder may not have heard yet that all nodes have joined.
    fn connected(&self, address: SocketAddr, number: u64) -> io::Result<Channel> {
        let end = Instant::now() + NODE_CONNECTION_TIMEOUT;
        loop {
            match self.open(address, number)? {
                Some(channel) => return Ok(channel),
                None if Instant::now() >= end => return Err(ErrorKind::TimedOut.into()),
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
            _ => {
                channel.receiver.set_timeout(Some(REPLICA_ANSWER_TIMEOUT))?;
                Ok(Some(channel))
            }
        }
    }

    /// Keeps a connection for the next request.
    fn keep(&self, channel: Channel) {
        let mut state = self.state.lock();
        state.failure = None;
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
        let answer = talk(&mut channel).map_err(|error| self.failed(error))?;
        self.keep(channel);
        answer.checked()
    }

    /// The holder cannot be asked, for this reason: other connections to it are of no use either.
    fn failed(&self, error: io::Error) -> io::Error {
        let text = match error.kind() {
            ErrorKind::TimedOut => "it does not answer".to_owned(),
            _ => error.to_string(),
        };
        let holder = self.address().map_or_else(|| "no node".to_owned(), |address| address.to_string());
        let (kind, what) =
            (error.kind(), format!("the launcher at {holder}, which holds the replicas: {text}"));
        let mut state = self.state.lock();
        state.idle.clear();
        let pause = match &state.failure {
            // Of another thread.
            Some(before) if Instant::now() < before.until => before.pause,
            Some(before) => (before.pause * 2).min(LONGEST_REPLICA_PAUSE),
            None => FIRST_REPLICA_PAUSE,
        };
        state.failure = Some(Failure { kind, what: what.clone(), pause, until: Instant::now() + pause });
        io::Error::new(kind, what)
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
        begin(&mut channel).map_err(|error| self.0.failed(error))?.checked()?;
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
        talk().map_err(|error| self.client.failed(error))?.checked().map(drop)
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

#[cfg(test)]
mod tests {
    use super::super::tests::{connect, name, pair_with_memory};
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_holder_that_could_not_be_asked_is_asked_again_after_a_while() {
        let Some((nodes, _memory)) = pair_with_memory() else { return };
        connect(&nodes, 1);
        let client = &nodes[1].client;
        let medium = nodes[1].medium();
        medium.put_new(&name("small/a"), b"a").unwrap();
        // One that has ended meanwhile is not used again.
        client.state.lock().idle.iter().for_each(|channel| channel.sender.close());
        medium.put_new(&name("small/b"), b"b").unwrap();

        let mut writer = medium.create(&name("packs/a"), 4, 8 << 20).unwrap();
        let mut block = writer.block().unwrap();
        block.set_filled(4096);
        client.interrupt();
        let why = writer.append(block).unwrap_err().to_string();
        assert!(why.contains("which holds the replicas"), "{why}");
        assert_eq!(medium.list(&name("small")).unwrap_err().to_string(), why, "it is not asked");
        let pause = || client.state.lock().failure.as_ref().map(|failure| failure.pause);
        let is_over = || client.state.lock().failure.as_mut().unwrap().until = Instant::now();
        assert_eq!(pause(), Some(FIRST_REPLICA_PAUSE));
        is_over();
        assert_eq!(medium.list(&name("small")).unwrap().len(), 2);
        assert_eq!(pause(), None);
        client.failed(ErrorKind::TimedOut.into());
        client.failed(ErrorKind::TimedOut.into());
        assert_eq!(pause(), Some(FIRST_REPLICA_PAUSE), "two requests at the same time");
        for _ in 0..10 {
            is_over();
            client.failed(ErrorKind::TimedOut.into());
        }
        assert_eq!(pause(), Some(LONGEST_REPLICA_PAUSE));
    }

    #[test]
    fn a_holder_whose_job_needs_its_memory_takes_no_content() {
        let Some((nodes, memory)) = pair_with_memory() else { return };
        connect(&nodes, 1);
        let medium = nodes[1].medium();
        let mut writer = medium.create(&name("packs/a"), 4, 8 << 20).unwrap();
        let mut append = || {
            let mut block = writer.block().unwrap();
            block.set_filled(4096);
            writer.append(block)
        };
        append().unwrap();
        memory[0].staged_bytes.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(append().unwrap_err().kind(), ErrorKind::StorageFull);
    }
}
