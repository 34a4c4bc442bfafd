//! A launcher that is played by a test: agents, and what is kept of their processes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use ckpt_cut::Report;
use ckpt_protocol::agent::{FromAgent, GpuReport, Hello, ShareKey, ToAgent};
use ckpt_protocol::frame::FrameError;
use ckpt_protocol::{descriptors, frame};

use super::{TEST_TIMEOUT, until};

pub fn listen(path: &Path) -> UnixListener {
    let listener = UnixListener::bind(path).expect("a listener");
    listener.set_nonblocking(true).expect("set");
    listener
}

/// A connection, if somebody has made one.
pub fn accept(listener: &UnixListener) -> Option<UnixStream> {
    match listener.accept() {
        Ok((stream, _)) => {
            stream.set_nonblocking(false).expect("set");
            stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("set");
            Some(stream)
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            None
        }
    }
}

/// Where agents find their launcher, and a directory for what their job needs.
pub struct Launcher {
    pub directory: tempfile::TempDir,
    listener: Option<UnixListener>,
}

impl Launcher {
    /// Listens.
    pub fn new() -> Self {
        let mut launcher = Self { directory: tempfile::tempdir().expect("a directory"), listener: None };
        launcher.listen();
        launcher
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn socket(&self) -> PathBuf {
        self.path("socket")
    }

    pub fn listen(&mut self) {
        self.listener = Some(listen(&self.socket()));
    }

    /// Agents do not come back before it listens again.
    pub fn stop_listening(&mut self) {
        fs::remove_file(self.socket()).expect("removed");
        self.listener = None;
    }

    pub fn try_accept(&self) -> Option<UnixStream> {
        accept(self.listener.as_ref().expect("listening"))
    }

    /// The next agent to get through its greeting. One whose process executes another program meanwhile, or exits,
    /// does not.
    pub fn next(&self) -> Agent {
        until("an agent", || Agent::greet(self.try_accept()?))
    }

    /// The next agent that is like that; others are let go, but not before the end of the search.
    pub fn next_that(&self, what: &str, is: impl Fn(&Hello) -> bool) -> Agent {
        let mut others = Vec::new();
        until(what, || {
            let agent = Agent::greet(self.try_accept()?)?;
            if is(&agent.hello) {
                return Some(agent);
            }
            others.push(agent);
            None
        })
    }
}

/// An agent that is connected.
pub struct Agent {
    pub stream: UnixStream,
    pub hello: Hello,
}

impl Agent {
    /// Hears its greeting and welcomes it, unless it has gone.
    pub fn greet(stream: UnixStream) -> Option<Self> {
        let FromAgent::Hello(hello) = frame::read(&mut &stream).ok()? else { panic!("not a hello") };
        frame::write(&mut &stream, &ToAgent::answer(&hello)).ok()?;
        Some(Self { stream, hello })
    }

    pub fn say(&self, message: &ToAgent) {
        frame::write(&mut &self.stream, message).expect("said");
    }

    /// The next message but reports of steps, which may come at any time.
    pub fn hear(&self) -> FromAgent {
        loop {
            match self.try_hear().expect("an answer") {
                FromAgent::Steps { .. } => {}
                message => return message,
            }
        }
    }

    /// The next report of the rank's steps, if there is one.
    pub fn report(&self) -> Option<Report> {
        let mut wanted = libc::pollfd { fd: self.stream.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: poll writes to the one structure that it is given.
        if unsafe { libc::poll(&raw mut wanted, 1, 0) } <= 0 {
            return None;
        }
        match self.try_hear().expect("a report") {
            FromAgent::Steps { report } => Some(report),
            message => panic!("{message:?}"),
        }
    }

    pub fn try_hear(&self) -> Result<FromAgent, FrameError> {
        frame::read(&mut &self.stream)
    }

    /// Asks it to go away; its answer. Nothing is kept of its process.
    pub fn quiesce(&self, attempt: u64) -> FromAgent {
        Kept::new(0).quiesce(self, attempt, false)
    }

    /// Sends the agent away and sees to it that nobody holds the connection any more.
    pub fn goes_away(self, attempt: u64) -> Option<GpuReport> {
        Kept::new(0).sends_away(&self, attempt, false)
    }

    /// It has come back, to a launcher that has kept nothing.
    pub fn is_back(&self, attempt: u64) {
        assert_eq!(self.hello.away, Some(attempt));
        let back = FromAgent::Reconnected { attempt, restored: false, copied_bytes: 0, lost: None };
        assert_eq!(Kept::new(0).bring_back(self), back);
    }
}

pub fn quiesce(attempt: u64, park: bool) -> ToAgent {
    ToAgent::Quiesce {
        attempt,
        timeout_ms: u64::try_from(TEST_TIMEOUT.as_millis()).expect("fits"),
        park: false,
        park_by_key: park,
        measures: false,
    }
}

/// What the launcher has of one process: the mirror of its device memory, and what is parked.
pub struct Kept {
    id: u64,
    mirror: Option<File>,
    bytes: u64,
    parked: BTreeMap<ShareKey, OwnedFd>,
    /// What other processes could have.
    pub published: BTreeMap<ShareKey, OwnedFd>,
    /// Whether the process is told that its mirror may stay pinned.
    pub may_stay: bool,
    /// How many threads of the process copy; 0: the mirror is pinned.
    pub copy_threads: u64,
    /// Through which the content of the mirror is loaded, instead of it.
    window: Option<File>,
}

const WINDOW_BYTES: u64 = 8 << 20;

impl Kept {
    /// Nothing, until it is staged.
    pub fn new(id: u64) -> Self {
        Self {
            id,
            mirror: None,
            bytes: 0,
            parked: BTreeMap::new(),
            published: BTreeMap::new(),
            may_stay: true,
            copy_threads: 0,
            window: None,
        }
    }

    /// Announces a checkpoint and stages the mirror, as large as the process says.
    pub fn stage(&mut self, agent: &Agent, attempt: u64) {
        agent.say(&ToAgent::Prepare { attempt });
        let FromAgent::Needs { attempt: of, mirror_bytes, .. } = agent.hear() else { panic!("no needs") };
        assert_eq!(of, attempt);
        self.bytes = self.bytes.max(mirror_bytes);
        if mirror_bytes > 0 {
            let file = self.mirror.get_or_insert_with(memory_file);
            file.set_len(self.bytes).expect("room");
            let (mirror, bytes, more_bytes) = (self.id, self.bytes, Some(self.bytes));
            let (is_partial, copy_threads) = (false, self.copy_threads);
            agent.say(&ToAgent::Stage { attempt, mirror, bytes, more_bytes, is_partial, copy_threads });
            descriptors::send(agent.stream.as_fd(), &[file.as_fd()]).expect("sent");
            assert_eq!(agent.hear(), FromAgent::Staged { attempt });
        }
    }

    /// What is in the mirror.
    pub fn content(&self) -> Vec<u8> {
        let mut content = vec![0; usize::try_from(self.bytes).expect("it fits")];
        if let Some(mirror) = &self.mirror {
            mirror.read_exact_at(&mut content, 0).expect("read");
        }
        content
    }

    /// Has the process go away; returns what it answers.
    pub fn quiesce(&mut self, agent: &Agent, attempt: u64, park: bool) -> FromAgent {
        agent.say(&quiesce(attempt, park));
        self.serve(agent)
    }

    /// As [`Kept::quiesce`], for a process that is to succeed; what it had on its GPUs.
    pub fn sends_away(&mut self, agent: &Agent, attempt: u64, park: bool) -> Option<GpuReport> {
        let gpu = match self.quiesce(agent, attempt, park) {
            FromAgent::Quiesced { attempt: of, gpu } if of == attempt => gpu,
            answer => panic!("{answer:?}"),
        };
        let end = agent.try_hear().expect_err("the end");
        assert!(matches!(end, FrameError::Closed), "{end}");
        gpu
    }

    /// Gives a process that has come back its mirror.
    pub fn deliver(&self, agent: &Agent) {
        if agent.hello.is_detached {
            agent.say(&ToAgent::Deliver {
                mirror: self.id,
                bytes: self.bytes,
                parked: 0,
                pairs: Vec::new(),
                is_partial: false,
                may_stay: self.may_stay,
                copy_threads: self.copy_threads,
            });
            if let Some(mirror) = &self.mirror {
                descriptors::send(agent.stream.as_fd(), &[mirror.as_fd()]).expect("sent");
            }
        }
    }

    /// As [`Kept::bring_back`], through a window.
    pub fn bring_back_by_window(&mut self, agent: &Agent) -> FromAgent {
        let (mirror, bytes, window_bytes) = (self.id, self.bytes, WINDOW_BYTES);
        agent.say(&ToAgent::DeliverWindow { mirror, bytes, window_bytes, pairs: Vec::new() });
        let window = memory_file();
        window.set_len(WINDOW_BYTES).expect("room");
        descriptors::send(agent.stream.as_fd(), &[window.as_fd()]).expect("sent");
        self.window = Some(window);
        let back = self.serve(agent);
        self.window = None;
        back
    }

    /// How much memory its mirror has, in bytes.
    pub fn allocated_bytes(&self) -> u64 {
        self.mirror.as_ref().map_or(0, |mirror| mirror.metadata().expect("facts").blocks() * 512)
    }

    /// Gives a process that has come back what it needs; returns its Back.
    pub fn bring_back(&mut self, agent: &Agent) -> FromAgent {
        self.deliver(agent);
        self.serve(agent)
    }

    /// What was parked is lost.
    pub fn forget_parked(&mut self) {
        self.parked.clear();
    }

    /// How many physical allocations are parked.
    pub fn parked_count(&self) -> usize {
        self.parked.len()
    }

    /// Answers the one message of a connection that the process has made for it.
    pub fn answer(&mut self, stream: &UnixStream) {
        let message = frame::read(&mut &*stream).expect("a message");
        assert!(self.serve_message(stream, &message), "{message:?}");
    }

    /// Does what the process asks for, until it says something else.
    fn serve(&mut self, agent: &Agent) -> FromAgent {
        loop {
            let message = agent.hear();
            if !self.serve_message(&agent.stream, &message) {
                return message;
            }
        }
    }

    /// Does what the process asks for in a message; false for what is not a request.
    fn serve_message(&mut self, stream: &UnixStream, message: &FromAgent) -> bool {
        let mut given = Vec::new();
        let answer = match message {
            FromAgent::Drained { .. } => {
                ToAgent::AllDrained { is_complete: true, cycle: None, problem: None }
            }
            FromAgent::Withdraw { keys, .. } => {
                keys.iter().for_each(|key| drop(self.parked.remove(key)));
                ToAgent::Withdrawn
            }
            FromAgent::Publish { key, .. } => {
                let received = descriptors::receive(stream.as_fd(), message.descriptors()).expect("received");
                self.published.extend(received.into_iter().next().map(|memory| (*key, memory)));
                ToAgent::Published { is_kept: true }
            }
            FromAgent::Fetch { key, .. } => {
                given.extend(self.published.get(key));
                match given.len() {
                    1 => ToAgent::Shared { bytes: 2 * 1024 * 1024 },
                    _ => ToAgent::NotShared { is_final: true },
                }
            }
            FromAgent::Park { keys, .. } => {
                let received = descriptors::receive(stream.as_fd(), keys.len()).expect("received");
                self.parked.extend(keys.iter().copied().zip(received));
                ToAgent::Parked { is_kept: true }
            }
            FromAgent::Unpark { keys, .. } => {
                let all: Option<Vec<_>> = keys.iter().map(|key| self.parked.get(key)).collect();
                given.extend(all.into_iter().flatten());
                ToAgent::Unparked { count: given.len() }
            }
            FromAgent::Load { ranges, at } => {
                let (content, window) = (self.content(), self.window.as_ref().expect("a window"));
                let mut at = *at;
                for range in ranges {
                    let range = range.start as usize..range.end as usize;
                    window.write_all_at(&content[range.clone()], at).expect("written");
                    at += range.len() as u64;
                }
                ToAgent::Loaded { problem: None }
            }
            _ => return false,
        };
        frame::write(&mut &*stream, &answer).expect("said");
        let given: Vec<_> = given.into_iter().map(AsFd::as_fd).collect();
        descriptors::send(stream.as_fd(), &given).expect("sent");
        true
    }
}

fn memory_file() -> File {
    // SAFETY: the name is a NUL-terminated string.
    let descriptor = unsafe { libc::memfd_create(c"mirror".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(descriptor >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: it was made just now, and has no other owner.
    unsafe { File::from_raw_fd(descriptor) }
}
