//! A launcher that is played by a test: it keeps the mirror and the parked memory of one process.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use ckpt_protocol::agent::{FromAgent, GpuReport, Hello, ToAgent};
use ckpt_protocol::{descriptors, frame};

/// What the launcher has of a process.
pub struct Kept {
    pub mirror: File,
    pub id: u64,
    pub bytes: u64,
    parked: Vec<Option<OwnedFd>>,
}

impl Kept {
    pub fn new(id: u64) -> Self {
        // SAFETY: the name is a NUL-terminated string.
        let descriptor = unsafe { libc::memfd_create(c"mirror".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(descriptor >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: it was made just now, and has no other owner.
        let mirror = unsafe { File::from_raw_fd(descriptor) };
        Self { mirror, id, bytes: 0, parked: Vec::new() }
    }

    /// Announces a checkpoint and stages the mirror, as large as the process says.
    pub fn stage(&mut self, stream: &UnixStream, attempt: u64) {
        say(stream, &ToAgent::Prepare { attempt });
        let FromAgent::Needs { attempt: of, mirror_bytes } = hear(stream) else { panic!("no needs") };
        assert_eq!(of, attempt);
        self.bytes = self.bytes.max(mirror_bytes);
        if mirror_bytes > 0 {
            self.mirror.set_len(self.bytes).expect("room");
            say(stream, &ToAgent::Stage { attempt, mirror: self.id, bytes: self.bytes });
            descriptors::send(stream.as_fd(), &[self.mirror.as_fd()]).expect("sent");
            assert_eq!(hear(stream), FromAgent::Staged { attempt });
        }
    }

    /// Has the process go away; returns what it answers.
    pub fn quiesce(&mut self, stream: &UnixStream, attempt: u64, park: bool) -> FromAgent {
        say(stream, &ToAgent::Quiesce { attempt, timeout_ms: 20_000, park });
        loop {
            match hear(stream) {
                FromAgent::Park { count } => {
                    let received = descriptors::receive(stream.as_fd(), count).expect("received");
                    self.parked.extend(received.into_iter().map(Some));
                    say(stream, &ToAgent::Parked { is_kept: true });
                }
                answer => {
                    self.serve_unpark_of(&answer, stream);
                    if !matches!(answer, FromAgent::Unpark { .. }) {
                        return answer;
                    }
                }
            }
        }
    }

    /// As [`Kept::quiesce`], for a process that is to succeed.
    pub fn sends_away(&mut self, stream: &UnixStream, attempt: u64, park: bool) -> GpuReport {
        match self.quiesce(stream, attempt, park) {
            FromAgent::Quiesced { attempt: of, gpu: Some(report) } if of == attempt => report,
            answer => panic!("{answer:?}"),
        }
    }

    /// Gives a process that has said hello what it needs; returns its Back.
    pub fn bring_back(&mut self, stream: &UnixStream, hello: &Hello) -> FromAgent {
        if hello.is_detached {
            let parked = self.parked.len();
            say(stream, &ToAgent::Deliver { mirror: self.id, bytes: self.bytes, parked });
            if self.bytes > 0 {
                descriptors::send(stream.as_fd(), &[self.mirror.as_fd()]).expect("sent");
            }
        }
        let back = loop {
            let answer = hear(stream);
            self.serve_unpark_of(&answer, stream);
            if !matches!(answer, FromAgent::Unpark { .. }) {
                break answer;
            }
        };
        self.parked.clear();
        back
    }

    /// What was parked is lost.
    pub fn forget_parked(&mut self) {
        self.parked.clear();
    }

    fn serve_unpark_of(&mut self, message: &FromAgent, stream: &UnixStream) {
        let FromAgent::Unpark { first, count } = message else { return };
        let wanted = self.parked.get_mut(*first..first + count).unwrap_or_default();
        let given: Vec<OwnedFd> = wanted.iter_mut().filter_map(Option::take).collect();
        say(stream, &ToAgent::Unparked { count: given.len() });
        let borrowed: Vec<_> = given.iter().map(AsFd::as_fd).collect();
        descriptors::send(stream.as_fd(), &borrowed).expect("sent");
    }
}

/// So that a test can look into the mirror.
impl AsRawFd for Kept {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.mirror.as_raw_fd()
    }
}

pub fn say(mut stream: &UnixStream, message: &ToAgent) {
    frame::write(&mut stream, message).expect("said");
}

pub fn hear(mut stream: &UnixStream) -> FromAgent {
    frame::read(&mut stream).expect("an answer")
}
