//! The launcher's side of the agents: who is there, sending them away for a dump, and seeing them come back.
//!
//! ```text
//!               quiesce: path removed,                  all connections closed
//!               listener drained and closed
//!   Listening ------------------------------> Quiescing ---------------------> Deaf
//!     ^   ^                                       |                              |
//!     |   |  deadline: listening again            |                              |
//!     |   +---------------------------------------+                              |
//!     |                          resume_listening                                |
//!     +--------------------------------------------------------------------------+
//! ```
//!
//! Deaf is when the job may be dumped: no process of it has a connection to the launcher, and none can get
//! one. The order in `quiesce` sees to that. The path goes first, so that nobody finds it any more. Then the
//! listening socket is shut down: a connect that is under way is refused by the kernel from then on, and what
//! was accepted by the kernel before that is still handed out, so that every connection that ever came to be
//! is known here. Only then is everyone asked, those too who have not got as far as saying hello.
//!
//! A process that exits, or executes another program, closes its connection and is no more waited for.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, mem};

use ckpt_protocol::agent::{FromAgent, Hello, ToAgent};
use ckpt_protocol::frame::{self, FrameError};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};
use thiserror::Error;
use tracing::{debug, warn};

/// How long a connection may take to say hello. One that is too slow is closed, and the agent tries again.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a write to an agent may take. An agent always reads, so this is for stopped processes only.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a connection may outlive the agent's farewell: a child that was just made may still hold it.
const CLOSE_GRACE: Duration = Duration::from_millis(200);
/// How often to look whether a process that is waited for still exists.
const LIFE_CHECK: Duration = Duration::from_millis(20);
/// How long to wait when there is no descriptor or no thread for one more connection.
const SHORTAGE_WAIT: Duration = Duration::from_millis(50);
const STACK_BYTES: usize = 256 * 1024;

/// A process of the job, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its ID in its own PID namespace, which stays the same over a restore. `None` before it said hello.
    pub pid: Option<u32>,
    /// Its ID as the launcher sees it. `None` for a process that is only known from a snapshot.
    pub host_pid: Option<u32>,
    /// Its program, or nothing.
    pub exe: String,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.pid, self.host_pid) {
            (Some(pid), Some(host_pid)) if pid != host_pid => {
                write!(f, "process {pid} of the job ({host_pid} outside)")?;
            }
            (Some(pid), _) | (None, Some(pid)) => write!(f, "process {pid}")?,
            (None, None) => f.write_str("a process")?,
        }
        if self.exe.is_empty() { Ok(()) } else { write!(f, " ({})", self.exe) }
    }
}

/// Who has gone away for a dump, and for which attempt.
#[derive(Debug)]
pub struct Quiesced {
    attempt: u64,
    away: Vec<Away>,
}

impl Quiesced {
    /// What a launcher that restores a snapshot waits for: the IDs, in the job's PID namespace, of the
    /// processes that had gone away when it was taken.
    pub fn expected(attempt: u64, pids: impl IntoIterator<Item = u32>) -> Self {
        let process = |pid| Process { pid: Some(pid), host_pid: None, exe: String::new() };
        let away = pids.into_iter().map(|pid| Away { process: process(pid), life: None }).collect();
        Self { attempt, away }
    }

    /// The attempt that was given to [`Agents::quiesce`].
    pub fn attempt(&self) -> u64 {
        self.attempt
    }

    /// The processes that have gone away.
    pub fn processes(&self) -> impl ExactSizeIterator<Item = &Process> {
        self.away.iter().map(|away| &away.process)
    }
}

/// Who came back after a dump or a restore.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Back {
    /// How many processes were let go on.
    pub continued: usize,
    /// How many processes were made anew from images.
    pub restored: usize,
    /// Who is still not back, and did not exit or execute another program either.
    pub missing: Vec<Process>,
}

/// Why the agents could not all be sent away.
#[derive(Debug, Error)]
pub enum QuiesceError {
    /// Some did not answer. The launcher listens again; those who went away come back by themselves.
    #[error("no answer within {}s from {}", .deadline.as_secs_f32(), listed(.unanswered))]
    Deadline {
        /// How long they were given.
        deadline: Duration,
        /// Who did not answer.
        unanswered: Vec<Process>,
    },
    /// The launcher could not listen again after some did not answer, so those who went away cannot come back.
    #[error("no answer from {}, and the launcher cannot listen again", listed(.unanswered))]
    Resume {
        /// Who did not answer.
        unanswered: Vec<Process>,
        /// Why the launcher cannot listen.
        source: io::Error,
    },
    /// The agents are being sent away already, or have gone.
    #[error("the agents have already been sent away")]
    NotListening,
}

fn listed(processes: &[Process]) -> String {
    processes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The agents of a job.
pub struct Agents {
    shared: Arc<Shared>,
    acceptor: Mutex<Option<Acceptor>>,
}

struct Shared {
    path: PathBuf,
    state: Mutex<State>,
    /// Told whenever somebody comes or goes.
    changed: Condvar,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Listening,
    Quiescing { attempt: u64 },
    Deaf,
}

struct State {
    phase: Phase,
    next_id: u64,
    connections: BTreeMap<u64, Connection>,
    /// Who has gone away and is not back, unless [`Agents::quiesce`] has handed it out.
    away: Vec<Away>,
    /// Who said hello since the last quiesce began.
    arrivals: Vec<Arrival>,
}

struct Connection {
    stream: Arc<UnixStream>,
    process: Process,
    life: Option<OwnedFd>,
    /// The agent has said hello and all that belongs to it.
    is_greeted: bool,
    /// The agent was sent a Quiesce.
    is_asked: bool,
}

#[derive(Debug)]
struct Away {
    process: Process,
    /// A pidfd of the process.
    life: Option<OwnedFd>,
}

impl Away {
    fn has_exited(&self) -> bool {
        self.life.as_ref().is_some_and(|life| {
            let mut fds = [PollFd::new(life, PollFlags::IN)];
            matches!(rustix::event::poll(&mut fds, Some(&Timespec::default())), Ok(1))
        })
    }
}

struct Arrival {
    connection: u64,
    process: Process,
    /// What a Back said: whether the process was restored. `None` for an agent that begins.
    restored: Option<bool>,
}

impl Arrival {
    /// Whether this is the process that went away, be it let go on, restored, or with another program.
    fn is(&self, gone: &Process) -> bool {
        let elsewhere = self.restored == Some(true) || gone.host_pid.is_none();
        self.process.pid == gone.pid && (elsewhere || self.process.host_pid == gone.host_pid)
    }
}

struct Acceptor {
    listener: Arc<UnixListener>,
    is_stopping: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Agents {
    /// Listens at `path` for the agents of a job. The socket is for the launcher's own user only.
    ///
    /// # Errors
    /// What the system says to making the socket, and `AlreadyExists` if something else than a socket is
    /// there. A socket that is there is replaced.
    pub fn listen(path: &Path) -> io::Result<Self> {
        let state = State {
            phase: Phase::Listening,
            next_id: 0,
            connections: BTreeMap::new(),
            away: Vec::new(),
            arrivals: Vec::new(),
        };
        let shared =
            Arc::new(Shared { path: path.into(), state: Mutex::new(state), changed: Condvar::new() });
        let acceptor = Acceptor::start(&shared)?;
        Ok(Self { shared, acceptor: Mutex::new(Some(acceptor)) })
    }

    /// How many agents are connected and have said hello.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.shared.lock().connections.values().filter(|connection| connection.is_greeted).count()
    }

    /// Sends all agents away and stops listening, so that the job can be dumped.
    ///
    /// # Errors
    /// [`QuiesceError::Deadline`] if one does not answer in time; the launcher then listens again.
    pub fn quiesce(&self, attempt: u64, deadline: Duration) -> Result<Quiesced, QuiesceError> {
        let end = Instant::now() + deadline;
        {
            let mut state = self.shared.lock();
            if state.phase != Phase::Listening {
                return Err(QuiesceError::NotListening);
            }
            state.phase = Phase::Quiescing { attempt };
            state.arrivals.clear();
        }
        self.stop_listening();
        let unasked = self.shared.lock().unasked();
        for stream in &unasked {
            ask(stream, attempt);
        }
        drop(unasked);
        let mut state = self.shared.lock();
        loop {
            if state.connections.is_empty() {
                state.phase = Phase::Deaf;
                return Ok(Quiesced { attempt, away: mem::take(&mut state.away) });
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.shared.wait(state, left);
        }
        let unanswered = state.connections.values().map(|connection| connection.process.clone()).collect();
        state.phase = Phase::Deaf;
        drop(state);
        match self.resume_listening() {
            Ok(()) => Err(QuiesceError::Deadline { deadline, unanswered }),
            Err(source) => Err(QuiesceError::Resume { unanswered, source }),
        }
    }

    /// Listens again after [`Agents::quiesce`]. Does nothing if the launcher is listening.
    ///
    /// # Errors
    /// As for [`Agents::listen`]; this can then be tried again.
    ///
    /// # Panics
    /// If called while [`Agents::quiesce`] is at work in another thread.
    pub fn resume_listening(&self) -> io::Result<()> {
        let mut acceptor = lock(&self.acceptor);
        let phase = self.shared.lock().phase;
        assert!(!matches!(phase, Phase::Quiescing { .. }), "agents are being sent away");
        if acceptor.is_none() {
            *acceptor = Some(Acceptor::start(&self.shared)?);
        }
        self.shared.lock().phase = Phase::Listening;
        Ok(())
    }

    /// Waits until all who went away are back, have exited, or have executed another program.
    ///
    /// For processes that were killed after the dump and restored by this same launcher, `quiesced` has to be
    /// made by [`Quiesced::expected`]: they count as exited otherwise.
    pub fn await_back(&self, quiesced: &Quiesced, deadline: Duration) -> Back {
        let end = Instant::now() + deadline;
        let mut state = self.shared.lock();
        loop {
            let mut back = state.who_is_back(&quiesced.away);
            if back.missing.is_empty() {
                return back;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                back.missing.sort_by_key(|process| process.pid);
                return back;
            }
            state = self.shared.wait(state, left.min(LIFE_CHECK));
        }
    }

    /// Returns when no new connection can come and all that came are known.
    fn stop_listening(&self) {
        if let Err(error) = fs::remove_file(&self.shared.path)
            && error.kind() != ErrorKind::NotFound
        {
            warn!(path = %self.shared.path.display(), %error, "the agents' socket cannot be removed");
        }
        let acceptor = lock(&self.acceptor).take();
        if let Some(acceptor) = acceptor {
            acceptor.stop();
        }
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        self.stop_listening();
        for connection in self.shared.lock().connections.values() {
            // Its thread wakes and ends; a connection that is gone already is no loss.
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, most: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Takes up a connection and gives it a thread.
    fn take_up(self: &Arc<Self>, stream: UnixStream) -> io::Result<()> {
        let peer = peer(&stream)?;
        if peer.uid != rustix::process::geteuid().as_raw() {
            warn!(pid = peer.pid, uid = peer.uid, "a stranger was turned away");
            return Ok(());
        }
        stream.set_read_timeout(Some(GREETING_TIMEOUT))?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        let stream = Arc::new(stream);
        let connection = Connection {
            stream: Arc::clone(&stream),
            process: Process {
                pid: None,
                host_pid: u32::try_from(peer.pid).ok().filter(|&pid| pid != 0),
                exe: String::new(),
            },
            life: Pid::from_raw(peer.pid).and_then(pidfd),
            is_greeted: false,
            is_asked: false,
        };
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.connections.insert(id, connection);
        drop(state);
        let shared = Arc::clone(self);
        let attend = move || {
            let is_quiesced = shared.attend(id, &stream);
            shared.part(id, is_quiesced);
        };
        let thread = thread::Builder::new().name(format!("agent-{id}")).stack_size(STACK_BYTES);
        thread.spawn(attend).map(drop).inspect_err(|_| self.part(id, false))
    }

    /// The life of a connection. Returns whether the agent said farewell, rather than just being gone.
    fn attend(&self, id: u64, stream: &UnixStream) -> bool {
        match self.greet(id, stream) {
            Ok(true) => {}
            Ok(false) => return false,
            Err(error) => {
                debug!(id, error = &error as &dyn std::error::Error, "an agent did not get past its hello");
                return false;
            }
        }
        match hear(stream) {
            Ok(FromAgent::Quiesced { attempt }) => {
                debug!(id, attempt, "an agent has gone away");
                wait_for_close(id, stream);
                true
            }
            Ok(message) => {
                warn!(id, ?message, "an agent spoke out of turn");
                false
            }
            Err(FrameError::Closed) => false,
            Err(error) => {
                debug!(id, error = &error as &dyn std::error::Error, "an agent was lost");
                false
            }
        }
    }

    /// Hears the hello and what belongs to it; says whether the agent is one to go on with.
    fn greet(&self, id: u64, stream: &UnixStream) -> Result<bool, FrameError> {
        let hello = match hear(stream)? {
            FromAgent::Hello(hello) => hello,
            message => {
                warn!(id, ?message, "an agent did not begin with a hello");
                return Ok(false);
            }
        };
        let answer = ToAgent::answer(&hello);
        say(stream, &answer)?;
        if let ToAgent::Refused { reason } = answer {
            warn!(pid = hello.pid, exe = hello.exe, reason, "an agent was refused");
            return Ok(false);
        }
        let restored = match hello.away {
            None => None,
            Some(_) => match hear(stream)? {
                FromAgent::Back { attempt, restored } => {
                    debug!(id, pid = hello.pid, attempt, restored, "an agent is back");
                    Some(restored)
                }
                message => {
                    warn!(id, ?message, "an agent that was away did not say that it is back");
                    return Ok(false);
                }
            },
        };
        let timeout = stream.set_read_timeout(None);
        timeout.map_err(|source| FrameError::Io { step: "lift its time limit", source })?;
        if let Some(attempt) = self.arrive(id, hello, restored) {
            ask(stream, attempt);
        }
        Ok(true)
    }

    /// Notes an agent down; returns the attempt that it has to be sent away for, if one is under way.
    fn arrive(&self, id: u64, hello: Hello, restored: Option<bool>) -> Option<u64> {
        let mut state = self.lock();
        let phase = state.phase;
        let connection = state.connections.get_mut(&id)?;
        connection.process.pid = Some(hello.pid);
        connection.process.exe = hello.exe;
        connection.is_greeted = true;
        let attempt = match phase {
            Phase::Quiescing { attempt } if !mem::replace(&mut connection.is_asked, true) => Some(attempt),
            _ => None,
        };
        let arrival = Arrival { connection: id, process: connection.process.clone(), restored };
        debug!(id, process = %arrival.process, "an agent is here");
        state.away.retain(|away| !arrival.is(&away.process));
        state.arrivals.push(arrival);
        self.changed.notify_all();
        attempt
    }

    /// Forgets a connection.
    fn part(&self, id: u64, is_quiesced: bool) {
        let mut state = self.lock();
        if let Some(Connection { stream, process, life, .. }) = state.connections.remove(&id) {
            // Somebody may still hold the other end, who is to learn that it leads nowhere.
            let _ = stream.shutdown(Shutdown::Both);
            if is_quiesced {
                state.away.push(Away { process, life });
            }
        }
        // What came back has come back, and may exit; of the others there may be any number over a job's life.
        state.arrivals.retain(|arrival| arrival.connection != id || arrival.restored.is_some());
        self.changed.notify_all();
    }
}

impl State {
    /// Those who have said hello and were not asked to go yet. They count as asked from now on.
    fn unasked(&mut self) -> Vec<Arc<UnixStream>> {
        let mut streams = Vec::new();
        for connection in self.connections.values_mut() {
            if connection.is_greeted && !mem::replace(&mut connection.is_asked, true) {
                streams.push(Arc::clone(&connection.stream));
            }
        }
        streams
    }

    fn who_is_back(&self, expected: &[Away]) -> Back {
        let mut back = Back::default();
        let mut arrivals: Vec<_> = self.arrivals.iter().collect();
        for away in expected {
            let arrival = arrivals.iter().position(|arrival| arrival.is(&away.process));
            match arrival.map(|place| arrivals.swap_remove(place).restored) {
                Some(Some(true)) => back.restored += 1,
                Some(Some(false)) => back.continued += 1,
                // Another program in the same process: what went away will not come back.
                Some(None) => {}
                None if away.has_exited() => {}
                None => back.missing.push(away.process.clone()),
            }
        }
        back
    }
}

impl Acceptor {
    fn start(shared: &Arc<Shared>) -> io::Result<Self> {
        let listener = Arc::new(bind(&shared.path)?);
        let is_stopping = Arc::new(AtomicBool::new(false));
        let (shared, theirs, stop) = (Arc::clone(shared), Arc::clone(&listener), Arc::clone(&is_stopping));
        let thread = thread::Builder::new().name("agents".into()).stack_size(STACK_BYTES);
        let thread = thread.spawn(move || accept(&shared, &theirs, &stop))?;
        Ok(Self { listener, is_stopping, thread })
    }

    fn stop(self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        if let Err(error) = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both) {
            warn!(%error, "the agents' socket cannot be shut down");
        }
        if self.thread.join().is_err() {
            warn!("the thread that accepts agents had failed");
        }
    }
}

/// Accepts until the listener is shut down and everything from before that is accepted.
fn accept(shared: &Arc<Shared>, listener: &UnixListener, is_stopping: &AtomicBool) {
    loop {
        let taken = listener.accept().and_then(|(stream, _)| shared.take_up(stream));
        match taken {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::InvalidInput && is_stopping.load(Ordering::SeqCst) => {
                return;
            }
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
            Err(error) => {
                warn!(%error, "an agent cannot be accepted");
                thread::sleep(SHORTAGE_WAIT);
            }
        }
    }
}

/// A listener at `path` that the launcher's user alone can connect to. It is there all at once, listening.
fn bind(path: &Path) -> io::Result<UnixListener> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::new(ErrorKind::AlreadyExists, "there is something else than a socket"));
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let mut new = OsString::from(path);
    new.push("~");
    let new = PathBuf::from(new);
    match fs::symlink_metadata(&new) {
        Ok(found) if found.file_type().is_socket() => fs::remove_file(&new)?,
        _ => {}
    }
    let listener = UnixListener::bind(&new)?;
    fs::set_permissions(&new, Permissions::from_mode(0o600))
        .and_then(|()| fs::rename(&new, path))
        .inspect_err(|_| drop(fs::remove_file(&new)))?;
    Ok(listener)
}

/// Who connected. The process ID is 0 for a process that the launcher's PID namespace does not show, which
/// rustix's type for the same has no room for.
fn peer(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: libc::uid_t::MAX, gid: libc::gid_t::MAX };
    let mut bytes = libc::socklen_t::try_from(size_of_val(&peer)).map_err(io::Error::other)?;
    let to = (&raw mut peer).cast();
    // SAFETY: `to` has room for the `bytes` bytes that SO_PEERCRED writes at most, and any bytes make a ucred.
    let result = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut bytes)
    };
    if result == 0 { Ok(peer) } else { Err(io::Error::last_os_error()) }
}

fn pidfd(pid: Pid) -> Option<OwnedFd> {
    let opened = rustix::process::pidfd_open(pid, PidfdFlags::empty());
    opened.inspect_err(|error| debug!(%error, "no pidfd for an agent's process")).ok()
}

/// Waits until nobody holds the other end any more, within reason.
fn wait_for_close(id: u64, mut stream: &UnixStream) {
    if stream.set_read_timeout(Some(CLOSE_GRACE)).is_err() {
        return;
    }
    match frame::read::<FromAgent>(&mut stream) {
        Err(error) if error.is_timeout() => {
            debug!(id, "somebody holds an agent's connection after its farewell");
        }
        Ok(message) => warn!(id, ?message, "an agent spoke after its farewell"),
        Err(_) => {}
    }
}

/// Asks an agent to go away. One that cannot be asked is gone, or shows up as one that did not answer.
fn ask(stream: &UnixStream, attempt: u64) {
    if let Err(error) = say(stream, &ToAgent::Quiesce { attempt }) {
        debug!(error = &error as &dyn std::error::Error, "an agent cannot be asked to go away");
    }
}

fn say(mut stream: &UnixStream, message: &ToAgent) -> Result<(), FrameError> {
    frame::write(&mut stream, message)
}

fn hear(mut stream: &UnixStream) -> Result<FromAgent, FrameError> {
    frame::read(&mut stream)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use ckpt_protocol::agent::PROTOCOL_VERSION;

    use super::*;

    /// Long enough for anything that is to happen.
    const LONG: Duration = Duration::from_secs(20);
    /// Short enough to wait for what is not to happen.
    const SHORT: Duration = Duration::from_millis(60);

    fn place() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("agents");
        (directory, path)
    }

    fn until<T>(what: &str, attempt: impl Fn() -> Option<T>) -> T {
        let end = Instant::now() + LONG;
        loop {
            if let Some(done) = attempt() {
                return done;
            }
            assert!(Instant::now() < end, "waited in vain for {what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn until_count(agents: &Agents, count: usize) {
        until("agents", || (agents.count() == count).then_some(()));
    }

    fn hello(pid: u32, away: Option<u64>) -> FromAgent {
        let exe = format!("/bin/{pid}");
        FromAgent::Hello(Hello { version: PROTOCOL_VERSION, pid, start_time_ticks: 1, exe, away })
    }

    fn tell(mut stream: &UnixStream, message: &FromAgent) {
        frame::write(&mut stream, message).expect("told");
    }

    fn told(mut stream: &UnixStream) -> Result<ToAgent, FrameError> {
        frame::read(&mut stream)
    }

    /// An agent that has just connected and been welcomed, once the launcher listens.
    fn agent(path: &Path, pid: u32, away: Option<u64>) -> UnixStream {
        let stream = until("the launcher", || UnixStream::connect(path).ok());
        tell(&stream, &hello(pid, away));
        assert_eq!(told(&stream).expect("an answer"), ToAgent::Welcome { version: PROTOCOL_VERSION });
        stream
    }

    fn back(path: &Path, pid: u32, attempt: u64, restored: bool) -> UnixStream {
        let stream = agent(path, pid, Some(attempt));
        tell(&stream, &FromAgent::Back { attempt, restored });
        stream
    }

    fn go_away(stream: &UnixStream, attempt: u64) {
        assert_eq!(told(stream).expect("a request"), ToAgent::Quiesce { attempt });
        tell(stream, &FromAgent::Quiesced { attempt });
    }

    /// An agent that goes away when it is asked to, and only that.
    fn obedient(path: &Path, pid: u32, attempt: u64) -> JoinHandle<()> {
        let stream = agent(path, pid, None);
        thread::spawn(move || go_away(&stream, attempt))
    }

    fn pids(processes: &[Process]) -> Vec<Option<u32>> {
        let mut pids: Vec<_> = processes.iter().map(|process| process.pid).collect();
        pids.sort();
        pids
    }

    /// Sends agents 1 to `count` away for attempt 1.
    fn all_away(agents: &Agents, path: &Path, count: u32) -> Quiesced {
        let threads: Vec<_> = (1..=count).map(|pid| obedient(path, pid, 1)).collect();
        let quiesced = agents.quiesce(1, LONG).expect("quiesced");
        threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
        quiesced
    }

    #[test]
    fn all_go_away_and_come_back() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let quiesced = all_away(&agents, &path, 3);
        assert_eq!(quiesced.attempt(), 1);
        let gone: Vec<_> = quiesced.processes().cloned().collect();
        assert_eq!(pids(&gone), [Some(1), Some(2), Some(3)]);
        assert_eq!(gone[0].host_pid, Some(std::process::id()));
        assert_eq!(agents.count(), 0);
        assert!(!path.exists());

        agents.resume_listening().expect("listening again");
        let streams = [back(&path, 1, 1, false), back(&path, 2, 1, true), back(&path, 3, 1, false)];
        let returned = agents.await_back(&quiesced, LONG);
        assert_eq!(returned, Back { continued: 2, restored: 1, missing: Vec::new() });
        assert_eq!(agents.count(), 3);

        // And again.
        let threads = streams.map(|stream| thread::spawn(move || go_away(&stream, 2)));
        assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 3);
        threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
    }

    #[test]
    fn nobody_there_is_no_obstacle() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let quiesced = agents.quiesce(1, Duration::ZERO).expect("quiesced");
        assert!(matches!(agents.quiesce(2, LONG), Err(QuiesceError::NotListening)));
        agents.resume_listening().expect("listening again");
        agents.resume_listening().expect("still listening");
        assert_eq!(agents.await_back(&quiesced, Duration::ZERO), Back::default());
    }

    #[test]
    fn whoever_does_not_answer_is_named_and_all_stay_in_touch() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let deaf = agent(&path, 7, None);
        let obedient = obedient(&path, 8, 1);
        let error = agents.quiesce(1, SHORT).expect_err("one does not answer");
        let QuiesceError::Deadline { unanswered, .. } = &error else { panic!("{error:?}") };
        assert_eq!(pids(unanswered), [Some(7)]);
        let text = error.to_string();
        assert!(text.contains("process 7 of the job") && text.contains("/bin/7"), "{text}");
        obedient.join().expect("an agent");
        assert_eq!(agents.count(), 1);

        // The first one wakes up at last, for an attempt that has been given up; the other one is back.
        let other = back(&path, 8, 1, false);
        until_count(&agents, 2);
        let late = thread::spawn(move || go_away(&deaf, 1));
        late.join().expect("an agent");
        until_count(&agents, 1);
        let other = thread::spawn(move || go_away(&other, 2));
        let quiesced = agents.quiesce(2, LONG).expect("quiesced");
        other.join().expect("an agent");
        let gone: Vec<_> = quiesced.processes().cloned().collect();
        assert_eq!(pids(&gone), [Some(7), Some(8)]);
    }

    #[test]
    fn a_connection_without_a_hello_is_waited_for() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let shy = UnixStream::connect(&path).expect("connected");
        let error = agents.quiesce(1, SHORT).expect_err("nobody knows who that is");
        let QuiesceError::Deadline { unanswered, .. } = &error else { panic!("{error:?}") };
        assert_eq!(pids(unanswered), [None]);
        assert_eq!(unanswered[0].host_pid, Some(std::process::id()));

        let shy = thread::spawn(move || {
            thread::sleep(SHORT);
            tell(&shy, &hello(5, None));
            assert!(matches!(told(&shy), Ok(ToAgent::Welcome { .. })));
            go_away(&shy, 2);
        });
        assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 1);
        shy.join().expect("an agent");
    }

    #[test]
    fn connections_that_race_with_the_end_of_listening_are_known_or_never_come_to_be() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        for attempt in 0..30 {
            let is_over = AtomicBool::new(false);
            thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        while !is_over.load(Ordering::SeqCst) {
                            let Ok(stream) = UnixStream::connect(&path) else { continue };
                            tell(&stream, &hello(1, None));
                            assert!(matches!(told(&stream), Ok(ToAgent::Welcome { .. })));
                            go_away(&stream, attempt);
                            return;
                        }
                    });
                }
                let quiesced = agents.quiesce(attempt, LONG).expect("quiesced");
                is_over.store(true, Ordering::SeqCst);
                assert!(quiesced.processes().len() <= 4);
            });
            agents.resume_listening().expect("listening again");
        }
    }

    #[test]
    fn whoever_exits_is_not_waited_for() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let exits = agent(&path, 1, None);
        let exits = thread::spawn(move || {
            assert_eq!(told(&exits).expect("a request"), ToAgent::Quiesce { attempt: 1 });
        });
        assert_eq!(agents.quiesce(1, LONG).expect("quiesced").processes().len(), 0);
        exits.join().expect("an agent");
    }

    /// A process that does nothing, in the place of one of the job.
    fn other_process() -> Child {
        Command::new("sleep").arg("1000").spawn().expect("a process")
    }

    fn away(child: &Child) -> Away {
        let host_pid = Some(child.id());
        let life = Pid::from_raw(i32::try_from(child.id()).expect("fits")).and_then(pidfd);
        Away { process: Process { pid: Some(9), host_pid, exe: String::new() }, life }
    }

    #[test]
    fn whoever_exits_while_away_is_not_waited_for() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let mut child = other_process();
        let quiesced = Quiesced { attempt: 1, away: vec![away(&child)] };
        let returned = agents.await_back(&quiesced, SHORT);
        assert_eq!(pids(&returned.missing), [Some(9)]);
        child.kill().expect("killed");
        assert_eq!(agents.await_back(&quiesced, LONG), Back::default());
        child.wait().expect("reaped");
    }

    #[test]
    fn another_program_in_the_same_process_is_not_the_agent_that_went_away() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let quiesced = all_away(&agents, &path, 1);
        agents.resume_listening().expect("listening again");
        let _new_program = agent(&path, 1, None);
        assert_eq!(agents.await_back(&quiesced, LONG), Back::default());
    }

    #[test]
    fn a_restoring_launcher_knows_whom_to_expect() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let quiesced = Quiesced::expected(6, [1, 2, 3]);
        let streams = [back(&path, 3, 6, true), back(&path, 1, 6, true)];
        let returned = agents.await_back(&quiesced, SHORT);
        assert_eq!((returned.restored, returned.continued), (2, 0));
        assert_eq!(pids(&returned.missing), [Some(2)]);
        // What is back may exit before it is asked for.
        drop(streams);
        until_count(&agents, 0);
        assert_eq!(agents.await_back(&quiesced, Duration::ZERO).restored, 2);
    }

    #[test]
    fn a_held_connection_is_cut_off_after_the_farewell() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let stream = agent(&path, 1, None);
        let mut copy = stream.try_clone().expect("a copy");
        let leaves = thread::spawn(move || go_away(&stream, 1));
        assert_eq!(agents.quiesce(1, LONG).expect("quiesced").processes().len(), 1);
        leaves.join().expect("an agent");
        assert!(matches!(frame::read::<ToAgent>(&mut copy), Err(FrameError::Closed)));
    }

    #[test]
    fn another_version_is_refused_and_nonsense_ends_the_connection() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let stream = UnixStream::connect(&path).expect("connected");
        let FromAgent::Hello(mut hello) = hello(1, None) else { unreachable!() };
        hello.version = PROTOCOL_VERSION + 1;
        tell(&stream, &FromAgent::Hello(hello));
        assert!(matches!(told(&stream), Ok(ToAgent::Refused { .. })));
        assert!(matches!(told(&stream), Err(FrameError::Closed)));

        let stream = UnixStream::connect(&path).expect("connected");
        tell(&stream, &FromAgent::Quiesced { attempt: 1 });
        assert!(told(&stream).is_err());
        let stream = agent(&path, 1, None);
        tell(&stream, &FromAgent::Back { attempt: 1, restored: true });
        assert!(told(&stream).is_err());
        until_count(&agents, 0);
    }

    #[test]
    fn the_socket_is_private_and_replaces_only_sockets() {
        let (_directory, path) = place();
        fs::write(&path, "mine").expect("a file");
        assert_eq!(Agents::listen(&path).err().map(|error| error.kind()), Some(ErrorKind::AlreadyExists));
        assert_eq!(fs::read(&path).expect("still there"), b"mine");
        fs::remove_file(&path).expect("removed");

        drop(UnixListener::bind(&path).expect("a stale socket"));
        let agents = Agents::listen(&path).expect("listening");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        drop(agent(&path, 1, None));
        drop(agents);
        assert_eq!(fs::read_dir(path.parent().expect("a parent")).expect("a directory").count(), 0);
    }

    #[test]
    fn processes_are_told_apart_in_words() {
        let process = |pid, host_pid, exe: &str| Process { pid, host_pid, exe: exe.into() }.to_string();
        assert_eq!(process(Some(4), Some(4), "/bin/x"), "process 4 (/bin/x)");
        assert_eq!(process(Some(4), Some(9), ""), "process 4 of the job (9 outside)");
        assert_eq!(process(None, Some(9), ""), "process 9");
        assert_eq!(process(Some(4), None, ""), "process 4");
    }
}
