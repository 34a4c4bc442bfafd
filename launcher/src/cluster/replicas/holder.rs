//! The replicas of another node, in the memory of this launcher.

use super::super::connection::{self, ClusterKey, Side};
use super::super::links::{self, Stranger};
use super::super::messages::HeldParts;
use super::wire::{Answer, Channel, PIECE_BYTES, Request, into_io};
use crate::persist::memory::Memory;
use crate::sys::deadline::NODE_CONNECTION_TIMEOUT;
use ckpt_snapshot::medium::{BLOCK_ALIGN, DirMedium, Medium, ObjectWriter};
use ckpt_snapshot::{RelPath, faults};
use std::fs;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

/// The longest small object: the manifest of a snapshot of many terabytes.
const MOST_BYTES: u64 = 4 << 30;

/// Connections that have not proved yet that they have the key. More are closed at once.
const MOST_STRANGERS: usize = 64;

/// What this launcher holds.
#[derive(Debug)]
pub struct Holder {
    /// The node whose replicas they are.
    owner: u32,
    medium: DirMedium,
    /// Which parts they are, for a launcher that starts again in this one's place.
    parts: PathBuf,
    /// See [`super::super::messages::Welcome::number`]; 0 before all nodes have joined.
    number: AtomicU64,
}

impl Holder {
    /// The replicas in this memory, which a launcher before may have left.
    ///
    /// # Errors
    /// When what it was writing cannot be removed.
    pub fn new(memory: &Memory, owner: u32) -> io::Result<Self> {
        let (medium, parts) = (memory.medium("replicas"), memory.directory("parts.json"));
        medium.sweep(Duration::ZERO)?;
        Ok(Self { owner, medium, parts, number: AtomicU64::new(0) })
    }

    /// The parts, as their node has told.
    pub fn held(&self) -> HeldParts {
        let text = match fs::read(&self.parts) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return HeldParts::default(),
            Err(error) => {
                tracing::warn!("the replicas of node {} are lost: {error}", self.owner);
                return HeldParts::default();
            }
        };
        serde_json::from_slice(&text).unwrap_or_else(|error| {
            tracing::warn!("the replicas of node {} are lost: {error}", self.owner);
            HeldParts::default()
        })
    }

    /// From now on, launchers of this start are served, and no others.
    pub fn begin(&self, number: u64) {
        self.number.store(number, Ordering::SeqCst);
    }

    fn greet(&self, request: &Request) -> Answer {
        let own = self.number.load(Ordering::SeqCst);
        match request {
            _ if own == 0 => Answer::NotYet,
            Request::Hello { number, owner } if (*number, *owner) == (own, self.owner) => Answer::Done,
            _ => Answer::failed(&io::Error::other(
                "this launcher holds no replicas of that node: the launchers have started again since",
            )),
        }
    }

    fn answer(&self, request: Request) -> io::Result<Answer> {
        faults::hit("replica-request")?;
        let medium = &self.medium;
        Ok(match request {
            Request::Open { name } => Answer::Bytes { bytes: Some(medium.open(&named(name)?)?.bytes()) },
            Request::List { dir } => Answer::Objects { objects: medium.list(&named(dir)?)? },
            Request::ListTimes { dir } => {
                let times = medium.list_times(&named(dir)?)?;
                let since = |time: std::time::SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default();
                let ms = |time| u64::try_from(since(time).as_millis()).unwrap_or(u64::MAX);
                Answer::Objects { objects: times.into_iter().map(|(name, time)| (name, ms(time))).collect() }
            }
            Request::Remove { name } => {
                medium.remove(&named(name)?)?;
                Answer::Done
            }
            Request::Sweep { age_ms } => {
                Answer::Names { names: medium.sweep(Duration::from_millis(age_ms))? }
            }
            Request::FreeBytes => Answer::Bytes { bytes: medium.free_bytes()? },
            Request::Publish(parts) => {
                let unfinished = self.parts.with_extension("new");
                fs::write(&unfinished, serde_json::to_vec(&parts).map_err(io::Error::other)?)?;
                fs::rename(&unfinished, &self.parts)?;
                Answer::Done
            }
            _ => return Err(io::Error::new(ErrorKind::InvalidData, "this request cannot come now")),
        })
    }

    /// Reads a piece of an object, and sends it.
    fn send_piece(&self, channel: &mut Channel, name: String, offset: u64, bytes: u64) -> io::Result<()> {
        let read = || {
            faults::hit("replica-request")?;
            let bytes = usize::try_from(bytes).ok().filter(|bytes| (1..=PIECE_BYTES).contains(bytes));
            let mut piece = vec![0; bytes.ok_or(ErrorKind::InvalidInput)?];
            self.medium.open(&named(name)?)?.read_at(offset, &mut piece)?;
            Ok(piece)
        };
        match read() {
            Ok(piece) => {
                channel.say(&Answer::Piece)?;
                channel.sender.send_bytes(&piece)
            }
            Err(error) => channel.say(&Answer::failed(&error)),
        }
    }

    /// Takes an object, until it is finished or the connection ends.
    fn take_object(&self, channel: &mut Channel, name: String) -> io::Result<()> {
        let begin = || self.medium.create(&named(name)?, 2, PIECE_BYTES);
        let mut writer = match begin() {
            Ok(writer) => writer,
            Err(error) => return channel.say(&Answer::failed(&error)),
        };
        channel.say(&Answer::Done)?;
        loop {
            let appended = match channel.hear()? {
                Request::Append => {
                    let piece = channel.take_piece()?;
                    faults::hit("replica-request")
                        .and_then(|()| self.check_room())
                        .and_then(|()| append(&mut *writer, &piece))
                }
                Request::Finish => {
                    let done = writer.finish().map_or_else(|error| Answer::failed(&error), |()| Answer::Done);
                    return channel.say(&done);
                }
                _ => return Err(io::Error::new(ErrorKind::InvalidData, "an object was not finished")),
            };
            match appended {
                Ok(()) => channel.say(&Answer::Done)?,
                // The object is discarded.
                Err(error) => return channel.say(&Answer::failed(&error)),
            }
        }
    }

    /// The job needs what is left.
    fn check_room(&self) -> io::Result<()> {
        match self.medium.free_bytes()? {
            Some(0) => Err(io::Error::new(ErrorKind::StorageFull, "too little memory is left there")),
            _ => Ok(()),
        }
    }

    fn serve(&self, stream: TcpStream, key: &ClusterKey, stranger: Stranger) -> io::Result<()> {
        let opened = connection::open(stream, key, Side::Coordinator, NODE_CONNECTION_TIMEOUT);
        let (sender, receiver) = opened.map_err(into_io)?;
        let mut channel = Channel { sender, receiver };
        let hello = channel.hear()?;
        drop(stranger);
        let greeting = self.greet(&hello);
        channel.say(&greeting)?;
        if greeting != Answer::Done {
            return Ok(());
        }
        channel.receiver.set_timeout(None)?;
        loop {
            match channel.hear()? {
                Request::Create { name } => self.take_object(&mut channel, name)?,
                Request::Read { name, offset, bytes } => {
                    self.send_piece(&mut channel, name, offset, bytes)?;
                }
                Request::PutNew { name, bytes } if bytes <= MOST_BYTES => {
                    let content = channel.take_content(bytes)?;
                    let put = named(name).and_then(|name| self.medium.put_new(&name, &content));
                    channel.say(&put.map_or_else(|error| Answer::failed(&error), |()| Answer::Done))?;
                }
                request => {
                    let answer = self.answer(request);
                    channel.say(&answer.unwrap_or_else(|error| Answer::failed(&error)))?;
                }
            }
        }
    }
}

fn append(writer: &mut dyn ObjectWriter, piece: &[u8]) -> io::Result<()> {
    let mut block = writer.block()?;
    let room = block.get_mut(..piece.len()).ok_or(ErrorKind::InvalidData)?;
    room.copy_from_slice(piece);
    block.set_filled(piece.len());
    writer.append(block)
}

fn named(name: String) -> io::Result<RelPath> {
    RelPath::new(name).map_err(|error| io::Error::new(ErrorKind::InvalidInput, error.to_string()))
}

/// Serves the node whose replicas these are.
///
/// # Errors
/// When the thread cannot be started.
pub fn serve(holder: &Arc<Holder>, listener: TcpListener, key: &ClusterKey) -> io::Result<()> {
    let (holder, key) = (Arc::clone(holder), key.clone());
    let serve = move |stream: TcpStream, from: SocketAddr, stranger: Stranger| {
        if let Err(error) = holder.serve(stream, &key, stranger) {
            tracing::debug!("a connection for replicas from {from} has ended: {error}");
        }
    };
    links::accept(("replica-accept", "replica-server"), listener, MOST_STRANGERS, serve)
}

const _: () = assert!(PIECE_BYTES.is_multiple_of(BLOCK_ALIGN));
