//! `--mirror none`: device memory goes to the store through a window while its process is being detached.
//!
//! ```text
//!   agent: work has ended, changes are known ── Readable ──► launcher: the attempt stores the memory
//!                                            ◄── Read ──────   a thread of the store needs a chunk
//!                    copies it to the window ── Content ────►   the thread takes it from there
//!                                            ◄── Stored ────   all chunks are in packs, which are not committed yet
//!   agent: parks the memory, detaches
//! ```
//!
//! Until the process is detached, its memory stays on the GPU, so a failure of the store changes nothing for the job. After
//! that the memory is parked: nothing is copied back. So no content is ever read from a snapshot that is not committed.
//!
//! What has changed is known as for a mirror: [`CaptureHistory`](super::unchanged::CaptureHistory). Nothing reads the window
//! later, and any chunk can be read that the store lacks.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::mem;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use ckpt_protocol::agent::{Capture, FromAgent, GpuReport, Region, ToAgent};
use ckpt_protocol::frame::FrameError;
use ckpt_snapshot::chunk::CHUNK_BYTES;
use ckpt_snapshot::faults;
use crossbeam_channel::Sender;
use parking_lot::{Condvar, Mutex};

use super::Shared;
use super::process::GpuState;
use super::state::Phase;
use super::stream::AgentStream;

/// The size of a window: a chunk for each thread of the store, of which there are 8 at most. A larger one would stay empty.
const WINDOW_BYTES: u64 = 8 * CHUNK_BYTES as u64;

/// The size of the window of a process with so much device memory, in bytes: at most a quarter of it, and at least a chunk.
pub(super) fn window_bytes(device_bytes: u64) -> u64 {
    let chunk = CHUNK_BYTES as u64;
    (device_bytes / 4 / chunk * chunk).clamp(chunk, WINDOW_BYTES)
}

/// What is known of the memory that was last read through a window.
#[derive(Debug, Default)]
pub struct Window {
    /// What does not hold zeroes only, in bytes from the mirror's beginning: sorted, without overlaps.
    used: Mutex<Vec<Range<u64>>>,
    /// How much was read, or known to be zeroes.
    read_bytes: AtomicU64,
}

impl Window {
    /// What does not hold zeroes only, in bytes from the mirror's beginning: sorted, without overlaps.
    pub fn used(&self) -> Vec<Range<u64>> {
        self.used.lock().clone()
    }

    /// How much was read, or known to be zeroes, bytes.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Records how much was read.
    pub fn set_read_bytes(&self, bytes: u64) {
        self.read_bytes.store(bytes, Ordering::Relaxed);
    }
}

/// Device memory that can be read until this is finished or dropped.
#[derive(Debug)]
pub struct Offer {
    /// The process, its mirror without content, and the memory.
    pub state: GpuState,
    /// Reads the memory.
    pub reader: Arc<Reader>,
    done: Sender<Option<String>>,
}

impl Offer {
    /// The memory is stored, or is not, for this reason.
    pub fn finish(self, problem: Option<String>) {
        // The receiver waits, unless its thread has ended.
        let _ = self.done.send(problem);
    }
}

/// Reads device memory through a window, for several threads.
#[derive(Debug)]
pub struct Reader {
    stream: Arc<AgentStream>,
    file: Arc<File>,
    end: Instant,
    /// The store has not taken the memory in time.
    is_given_up: AtomicBool,
    /// Places in the window that are not in use, each for a chunk.
    free: Mutex<Vec<u64>>,
    /// Notified when a place is free again.
    freed: Condvar,
    /// Held while the agent is asked.
    exchange: Mutex<Exchange>,
}

#[derive(Debug, Default)]
struct Exchange {
    /// The agent has not answered, or with another message: it is not asked again.
    is_over: bool,
    unexpected: VecDeque<FromAgent>,
}

impl Reader {
    fn new(stream: Arc<AgentStream>, file: Arc<File>, end: Instant) -> io::Result<Self> {
        let places = file.metadata()?.len() / CHUNK_BYTES as u64;
        let free = (0..places).map(|place| place * CHUNK_BYTES as u64).collect();
        let (freed, exchange) = (Condvar::new(), Mutex::default());
        let is_given_up = AtomicBool::new(false);
        Ok(Self { stream, file, end, is_given_up, free: Mutex::new(free), freed, exchange })
    }

    /// Whether the store had not taken the memory in time, so that the process runs on.
    pub fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Relaxed)
    }

    /// The agent is not asked any more.
    fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
        self.exchange.lock().is_over = true;
    }

    /// Reads memory that belongs to the process's regions, at most a chunk.
    ///
    /// # Errors
    /// The agent does not answer in time, or cannot read it.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        faults::hit("window-read")?;
        let at = self.take_place()?;
        let content = self
            .ask(&ToAgent::Read { offset, bytes: into.len() as u64, at })
            .and_then(|()| self.file.read_exact_at(into, at));
        self.free.lock().push(at);
        self.freed.notify_one();
        content
    }

    fn take_place(&self) -> io::Result<u64> {
        let mut free = self.free.lock();
        loop {
            if let Some(at) = free.pop() {
                return Ok(at);
            }
            if self.freed.wait_until(&mut free, self.end).timed_out() {
                return Err(late());
            }
        }
    }

    fn ask(&self, request: &ToAgent) -> io::Result<()> {
        let mut exchange = self.exchange.lock();
        if exchange.is_over {
            return Err(late());
        }
        exchange.is_over = true;
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(late());
        }
        self.stream.send(request).map_err(io::Error::other)?;
        if !self.stream.is_readable_within(left)? {
            return Err(late());
        }
        match self.stream.receive().map_err(io::Error::other)? {
            FromAgent::Content { problem } => {
                exchange.is_over = false;
                problem.map_or(Ok(()), |problem| Err(io::Error::other(problem)))
            }
            other => {
                exchange.unexpected.push_back(other);
                Err(late())
            }
        }
    }
}

const TOO_SLOW: &str = "the store has not taken the memory of the GPU in time (--freeze-timeout)";

/// When a store that has not taken the memory of a process is given up, so that the process can still report that before the
/// attempt's end.
fn stored_by(end: Instant) -> Instant {
    let now = Instant::now();
    now + end.saturating_duration_since(now) / 8 * 7
}

fn late() -> io::Error {
    io::Error::new(
        ErrorKind::TimedOut,
        "the process has not handed out its device memory in time (--freeze-timeout)",
    )
}

impl Shared {
    /// Has the current attempt store the memory of a process, and answers when that is done. Returns messages of the agent
    /// that came in between.
    pub(super) fn hand_in(
        &self,
        id: u64,
        stream: &AgentStream,
        (attempt, regions, capture, used): (u64, Vec<Region>, Capture, Vec<Range<u64>>),
    ) -> Result<VecDeque<FromAgent>, FrameError> {
        let (done, outcome) = crossbeam_channel::bounded(1);
        let reader = self.offer(id, attempt, (regions, capture, used), done);
        let problem = match &reader {
            Ok(reader) => outcome.recv_deadline(stored_by(reader.end)).unwrap_or_else(|error| {
                Some(if error.is_timeout() {
                    reader.give_up();
                    TOO_SLOW.to_owned()
                } else {
                    "the checkpoint was given up".to_owned()
                })
            }),
            Err(problem) => Some(problem.clone()),
        };
        stream.send(&ToAgent::Stored { problem })?;
        let unexpected = reader.map(|reader| mem::take(&mut reader.exchange.lock().unexpected));
        Ok(unexpected.unwrap_or_default())
    }

    fn offer(
        &self,
        id: u64,
        attempt: u64,
        (regions, capture, used): (Vec<Region>, Capture, Vec<Range<u64>>),
        done: Sender<Option<String>>,
    ) -> Result<Arc<Reader>, String> {
        let mut state = self.lock();
        let end = match state.phase {
            Phase::Quiescing { attempt: current, end } if current == attempt => end,
            _ => return Err("the checkpoint is over".to_owned()),
        };
        let connection = state.connections.get(&id).ok_or("the connection has ended")?;
        let (process, stream) = (connection.process.clone(), Arc::clone(&connection.stream));
        let mirror = process.pid.and_then(|pid| state.holdings.mirror(pid)).cloned();
        let mirror = mirror.filter(|mirror| mirror.number == capture.mirror);
        let Some((window, mirror)) = mirror.and_then(|mirror| Some((mirror.window.clone()?, mirror))) else {
            return Err("the launcher has no window for it".to_owned());
        };
        *window.used.lock() = used;
        mirror.history.lock().record_capture(Some(&capture));
        let reader = Reader::new(stream, Arc::clone(&mirror.file), end).map_err(|error| error.to_string())?;
        let reader = Arc::new(reader);
        let capture = Some(Box::new(Capture { written: Vec::new(), ..capture }));
        let report = GpuReport { regions, capture, ..GpuReport::default() };
        let (mirror, gpus) = (Some(mirror), Vec::new());
        // Only what is stored of it matters here.
        let state_of = GpuState { process, mirror, report, gpus, supports_loads: false };
        state.offers.push(Offer { state: state_of, reader: Arc::clone(&reader), done });
        self.changed.notify_all();
        Ok(reader)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::thread::{self, JoinHandle};
    use std::time::Duration;

    use ckpt_protocol::agent::{RegionFlags, RegionKind};
    use ckpt_protocol::descriptors;

    use super::super::tests::{LONG, connect, expect_quiesce, hello, receive, send, socket_dir, until_count};
    use super::super::{Agents, MirrorMode, QuiesceError, Quiesced};
    use super::*;

    const MIB: u64 = 1 << 20;

    /// An agent with a window, and the thread that detaches it. The launcher reads `offset..offset + 4` of the memory.
    struct Windowed {
        agents: Arc<Agents>,
        stream: UnixStream,
        window: File,
        mirror: u64,
        _directory: tempfile::TempDir,
    }

    fn windowed() -> Windowed {
        let (directory, path) = socket_dir();
        let agents = Arc::new(Agents::listen(&path, LONG).expect("listening"));
        agents.set_mirror_mode(MirrorMode::None);
        let stream = connect(&path);
        let FromAgent::Hello(plain) = hello(1, None) else { unreachable!("a hello") };
        send(&stream, &FromAgent::Hello(ckpt_protocol::agent::Hello { supports_reads: true, ..plain }));
        assert!(matches!(receive(&stream), Ok(ToAgent::Welcome { .. })));
        until_count(&agents, 1);
        let preparing = {
            let agents = Arc::clone(&agents);
            thread::spawn(move || agents.prepare(1, LONG, 0))
        };
        assert_eq!(receive(&stream).expect("a message"), ToAgent::Prepare { attempt: 1 });
        let (mirror_bytes, used_bytes) = (64 * MIB, Some(64 * MIB));
        send(
            &stream,
            &FromAgent::Needs { attempt: 1, mirror_bytes, used_bytes, changes: None, ranks_on: Vec::new() },
        );
        let message = receive(&stream).expect("a message");
        let ToAgent::StageWindow { mirror, bytes, window_bytes, .. } = message else { panic!("{message:?}") };
        assert_eq!((bytes, window_bytes), (64 * MIB, 16 * MIB));
        let window = descriptors::receive(stream.as_fd(), 1).expect("a file").pop().expect("one");
        send(&stream, &FromAgent::Staged { attempt: 1 });
        let prepared = preparing.join().expect("no panic").expect("prepared");
        assert!(prepared.has_windows());
        // The agent is asked to detach, not to release the window.
        mem::forget(prepared);
        Windowed { agents, stream, window: window.into(), mirror, _directory: directory }
    }

    impl Windowed {
        fn detach(&self, limit: Duration) -> JoinHandle<(Result<Quiesced, QuiesceError>, Option<String>)> {
            let agents = Arc::clone(&self.agents);
            thread::spawn(move || {
                let mut read = None;
                let away = agents.detach_all(1, limit, &mut |offer| {
                    let mut content = [0; 4];
                    let outcome = offer.reader.read_at(8, &mut content);
                    read = Some(outcome.map_or_else(|error| error.to_string(), |()| format!("{content:?}")));
                    offer.finish(None);
                });
                (away, read)
            })
        }

        fn is_readable(&self) {
            expect_quiesce(&self.stream, 1);
            let region = Region {
                address: 1,
                bytes: 16,
                device: 0,
                kind: RegionKind::Allocation,
                allocations: 1,
                offset: 0,
                changed_bytes: None,
                flags: RegionFlags::default(),
                origin: None,
            };
            let capture = Capture { mirror: self.mirror, number: 1, written: Vec::new() };
            let (regions, used) = (vec![region], Vec::new());
            send(&self.stream, &FromAgent::Readable { attempt: 1, regions, capture, used });
        }

        fn expect_read(&self) -> u64 {
            let message = receive(&self.stream).expect("a message");
            let ToAgent::Read { offset: 8, bytes: 4, at } = message else { panic!("{message:?}") };
            at
        }
    }

    #[test]
    fn memory_is_read_through_the_window() {
        let agent = windowed();
        let detaching = agent.detach(LONG);
        agent.is_readable();
        agent.window.write_all_at(&[1, 2, 3, 4], agent.expect_read()).expect("written");
        send(&agent.stream, &FromAgent::Content { problem: None });
        assert_eq!(receive(&agent.stream).expect("a message"), ToAgent::Stored { problem: None });
        send(&agent.stream, &FromAgent::Quiesced { attempt: 1, gpu: None });
        drop(agent.stream);
        let (away, read) = detaching.join().expect("no panic");
        assert_eq!(away.expect("detached").processes().len(), 1);
        assert_eq!(read.as_deref(), Some("[1, 2, 3, 4]"));
    }

    /// The agent gives up while a chunk is read: its message is not lost, and the reader fails.
    #[test]
    fn an_agent_that_gives_up_is_heard() {
        let agent = windowed();
        let detaching = agent.detach(LONG);
        agent.is_readable();
        agent.expect_read();
        send(&agent.stream, &FromAgent::Failed { attempt: 1, reason: "too slow".into(), is_lost: false });
        let (away, read) = detaching.join().expect("no panic");
        let error = away.expect_err("refused").to_string();
        assert!(error.ends_with("too slow"), "{error}");
        assert!(read.expect("a try").contains("--freeze-timeout"));
        assert_eq!(receive(&agent.stream).expect("a message"), ToAgent::Stored { problem: None });
        // What it answers now belongs to nothing, and does no harm.
        send(&agent.stream, &FromAgent::Content { problem: None });
        send(&agent.stream, &FromAgent::Activity { calls: 1, is_waiting: false, members: Vec::new() });
        assert_eq!(agent.agents.count(), 1);
    }

    /// The store never answers: the agent is told so in time, and runs on.
    #[test]
    fn a_store_that_does_not_answer_is_not_waited_for() {
        let agent = windowed();
        let (agents, mut kept) = (Arc::clone(&agent.agents), Vec::new());
        let detaching = thread::spawn(move || {
            let away = agents.detach_all(1, Duration::from_secs(8), &mut |offer| kept.push(offer));
            let offer = kept.pop().expect("an offer");
            (
                away,
                offer.reader.is_given_up(),
                offer.reader.read_at(0, &mut [0]).map_err(|error| error.kind()),
            )
        });
        agent.is_readable();
        assert_eq!(
            receive(&agent.stream).expect("a message"),
            ToAgent::Stored { problem: Some(TOO_SLOW.into()) }
        );
        let reason = "not stored".to_owned();
        send(&agent.stream, &FromAgent::Failed { attempt: 1, reason, is_lost: false });
        let (away, is_given_up, read) = detaching.join().expect("no panic");
        assert!(matches!(away, Err(QuiesceError::Refused { .. })), "{away:?}");
        assert!(is_given_up);
        assert_eq!(read, Err(ErrorKind::TimedOut), "a late request does not reach the process");
    }

    #[test]
    fn an_agent_that_does_not_answer_is_not_waited_for() {
        let agent = windowed();
        let detaching = agent.detach(Duration::from_secs(5));
        agent.is_readable();
        agent.expect_read();
        let (away, read) = detaching.join().expect("no panic");
        assert!(matches!(away, Err(QuiesceError::Deadline { .. })), "{away:?}");
        assert!(read.expect("a try").contains("--freeze-timeout"));
    }

    #[test]
    fn a_window_takes_at_most_a_quarter_of_the_device_memory() {
        let mib = |mib: u64| mib << 20;
        assert_eq!(window_bytes(mib(1)), mib(4), "at least a chunk");
        assert_eq!(window_bytes(mib(31)), mib(4));
        assert_eq!(window_bytes(mib(64)), mib(16));
        assert_eq!(window_bytes(mib(80 << 10)), mib(32));
    }
}
