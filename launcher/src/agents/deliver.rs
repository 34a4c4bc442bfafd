//! What a process needs to put its state back on its GPUs: its mirror, and its parked memory.

use std::io::{self, ErrorKind};
use std::os::fd::AsFd;

use ckpt_protocol::agent::{FromAgent, Hello, ToAgent};
use ckpt_protocol::descriptors;
use ckpt_protocol::frame::FrameError;
use ckpt_snapshot::faults;
use tracing::debug;

use super::attend::{hear, say};
use super::line::Line;
use super::{Shared, broker};

impl Shared {
    /// Hears what an agent says that was away, after giving its process what that needs. Putting the state back takes
    /// as long as it takes.
    pub(super) fn hear_back(&self, id: u64, stream: &Line, hello: &Hello) -> Result<FromAgent, FrameError> {
        if hello.is_detached {
            stream.limit_wait(None)?;
            self.deliver(id, stream, hello.pid)?;
        }
        loop {
            match hear(stream)? {
                FromAgent::Unpark { first, count } => self.unpark(stream, hello.pid, first, count)?,
                message if broker::sender(&message).is_some() => self.broker(id, stream, &message)?,
                message => return Ok(message),
            }
        }
    }

    fn deliver(&self, id: u64, stream: &Line, pid: u32) -> Result<(), FrameError> {
        let mut state = self.lock();
        if let Some(life) = state.connections.get(&id).map(|connection| connection.life.clone()) {
            state.holdings.is_back(pid, &life);
        }
        let mirror = state.holdings.mirror(pid).cloned();
        let parked = state.holdings.parked_count(pid);
        drop(state);
        let (number, bytes) = mirror.as_ref().map_or((0, 0), |mirror| (mirror.number, mirror.bytes));
        debug!(id, pid, bytes, parked, "an agent gets what it needs to put its state back");
        let files: Vec<_> = mirror.iter().map(|mirror| mirror.file.as_fd()).collect();
        stream.say_with(&ToAgent::Deliver { mirror: number, bytes, parked }, &files)?;
        faults::hit("delivered").map_err(|source| FrameError::Io { step: "go on", source })
    }

    fn unpark(&self, stream: &Line, pid: u32, first: usize, count: usize) -> Result<(), FrameError> {
        let given = match count {
            0..=descriptors::MOST => self.lock().holdings.unpark(pid, first, count),
            _ => Vec::new(),
        };
        let files: Vec<_> = given.iter().map(AsFd::as_fd).collect();
        stream.say_with(&ToAgent::Unparked { count: files.len() }, &files)
    }

    /// Gives an agent back what it has parked in the attempt that is under way.
    pub(super) fn take_back(
        &self,
        id: u64,
        stream: &Line,
        first: usize,
        count: usize,
    ) -> Result<(), FrameError> {
        let pid = self.lock().connections.get(&id).and_then(|connection| connection.process.pid);
        self.unpark(stream, pid.ok_or(FrameError::Closed)?, first, count)
    }

    /// Keeps what a process parks.
    pub(super) fn park(&self, id: u64, stream: &Line, count: usize) -> Result<(), FrameError> {
        if count > descriptors::MOST {
            let source = io::Error::new(ErrorKind::InvalidData, format!("{count} are too many"));
            return Err(FrameError::Io { step: "take open files", source });
        }
        let descriptors = match stream.receive(count) {
            Ok(descriptors) => Some(descriptors),
            // Not all came: this process has as many open as it may.
            Err(error) if error.kind() == ErrorKind::InvalidData => {
                debug!(id, count, "parked memory cannot be kept: there are too many open files");
                None
            }
            Err(source) => return Err(FrameError::Io { step: "take open files", source }),
        };
        let mut state = self.lock();
        let connection = state.connections.get(&id);
        let known = connection.and_then(|one| Some((one.process.pid?, one.life.clone())));
        let Some((pid, life)) = known else { return Err(FrameError::Closed) };
        let (is_kept, dropped) = state.holdings.park(pid, &life, descriptors);
        drop(state);
        drop(dropped);
        say(stream, &ToAgent::Parked { is_kept })
    }
}
