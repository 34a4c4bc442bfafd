//! The launcher's side of the agents: who is there, sending them away for a dump, and seeing them come back.
//!
//! ```text
//!               quiesce: all are back,
//!               path removed,                           all connections closed
//!               listener drained and closed
//!   Listening ------------------------------> Quiescing ---------------------> Deaf
//!     ^   ^                                       |                              |
//!     |   |  deadline, or all have answered and   |                              |
//!     |   |  one has refused: listening again     |                              |
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
//!
//! An agent that was away puts its process's state back on the GPU as soon as it sees the path, which takes its
//! time and may not be interrupted by a dump. So nobody is sent away before all who were away are back.
//!
//! Before they are sent away, while the job runs, they are prepared (`prepare.rs`): whoever has device memory gets a
//! mirror for it. Coming back, they are given what they need to put their state back (`deliver.rs`).

mod acceptor;
mod broker;
mod deliver;
mod line;
mod mirrors;
mod prepare;
mod process;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::mem;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ckpt_protocol::agent::{FromAgent, GpuReport, Hello, ToAgent};
use ckpt_protocol::frame::FrameError;
use crossbeam_channel::{Receiver, Sender};
use rustix::process::Pid;
use tracing::{debug, warn};

use acceptor::Acceptor;
use broker::{Broker, Party};
use line::Line;
use mirrors::Holdings;
pub use mirrors::Mirror;
pub use prepare::Prepared;
use prepare::{Preparation, Step};
use process::{Away, Life, pidfd};
pub use process::{Back, GpuState, Loss, Process, QuiesceError, Quiesced};

/// How long a connection may take to say hello. One that is too slow is closed, and the agent tries again.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a write to an agent may take. An agent always reads, so this is for stopped processes only.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a connection may outlive the agent's farewell: a child that was just made may still hold it.
const CLOSE_GRACE: Duration = Duration::from_millis(200);
/// How long a process may take to exit after it has closed its files.
const EXIT_GRACE: Duration = Duration::from_secs(1);
/// How often to look whether a process that is waited for still exists.
const LIFE_CHECK: Duration = Duration::from_millis(20);
/// Of each thread.
const STACK_BYTES: usize = 256 * 1024;

/// The agents of a job.
pub struct Agents {
    shared: Arc<Shared>,
    acceptor: Mutex<Option<Acceptor>>,
    losses: Receiver<Loss>,
}

struct Shared {
    path: PathBuf,
    losses: Sender<Loss>,
    broker: Broker,
    state: Mutex<State>,
    /// Told whenever somebody comes or goes.
    changed: Condvar,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Listening,
    Quiescing { attempt: u64, end: Instant },
    Deaf,
}

struct State {
    phase: Phase,
    next_id: u64,
    connections: BTreeMap<u64, Connection>,
    /// Who has gone away and is not back, unless [`Agents::quiesce`] has handed it out.
    away: Vec<Away>,
    /// Who has device memory, and whose connection was lost since the last quiesce began: nobody knows what it has
    /// done with that memory.
    torn: Vec<Away>,
    /// Who said hello since the last quiesce began.
    arrivals: Vec<Arrival>,
    holdings: Holdings,
}

struct Connection {
    stream: Arc<Line>,
    process: Process,
    life: Arc<Life>,
    /// The agent has said hello and all that belongs to it.
    is_greeted: bool,
    /// The attempt of a Quiesce that the agent has not answered, or has refused in the present attempt.
    asked: Option<u64>,
    /// How far it is in an attempt that has not begun to send agents away.
    preparation: Option<Preparation>,
    /// What the agent said when it refused the present attempt.
    refusal: Option<String>,
}

struct Arrival {
    connection: u64,
    process: Process,
    /// What a Back said; `None` for an agent that begins.
    back: Option<Returned>,
}

/// What an agent says of its return.
struct Returned {
    restored: bool,
    copied_bytes: u64,
    lost: Option<String>,
}

/// How a connection ended.
enum Parting {
    /// The agent is gone.
    Lost,
    /// It has gone away for a dump, and has told what was on its process's GPUs.
    Farewell(Option<GpuReport>),
}

impl Arrival {
    /// Whether this is the process that went away, be it let go on, restored, or with another program.
    fn is(&self, gone: &Process) -> bool {
        let restored = self.back.as_ref().is_some_and(|back| back.restored);
        let elsewhere = restored || gone.host_pid.is_none();
        self.process.pid == gone.pid && (elsewhere || self.process.host_pid == gone.host_pid)
    }

    fn loss(&self) -> Option<Loss> {
        let reason = self.back.as_ref()?.lost.clone()?;
        Some(Loss { process: self.process.clone(), reason })
    }
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
            torn: Vec::new(),
            holdings: Holdings::default(),
        };
        let (tell, losses) = crossbeam_channel::unbounded();
        let shared = Arc::new(Shared {
            path: path.into(),
            losses: tell,
            broker: Broker::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let acceptor = shared.acceptor()?;
        Ok(Self { shared, acceptor: Mutex::new(Some(acceptor)), losses })
    }

    /// Every loss that an agent tells of, whenever that is.
    pub fn losses(&self) -> &Receiver<Loss> {
        &self.losses
    }

    /// How many agents are connected and have said hello.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.shared.lock().connections.values().filter(|connection| connection.is_greeted).count()
    }

    /// Sends all agents away and stops listening, so that the job can be dumped.
    ///
    /// # Errors
    /// [`QuiesceError::Refused`] if one says that its process cannot be dumped, [`QuiesceError::Deadline`] if
    /// one does not answer in time or is not back from the time before. The launcher then listens again.
    pub fn quiesce(&self, attempt: u64, deadline: Duration) -> Result<Quiesced, QuiesceError> {
        let end = Instant::now() + deadline;
        if let Some(orphan) = self.shared.broker.orphan(|_| true) {
            return Err(orphan.into());
        }
        self.begin(attempt, deadline, end)?;
        self.shared.broker.begin(attempt);
        self.stop_listening();
        let unasked = self.shared.lock().unasked(attempt);
        for stream in &unasked {
            ask(stream, attempt, end);
        }
        drop(unasked);
        let mut orphan = None;
        let mut torn_since = None;
        let mut state = self.shared.lock();
        loop {
            state.torn.retain(|torn| !torn.life.is_over());
            if state.connections.is_empty() && !state.torn.is_empty() {
                // One that exits has closed its connection a moment earlier.
                if torn_since.get_or_insert_with(Instant::now).elapsed() >= CLOSE_GRACE {
                    break;
                }
                state = self.shared.wait(state, LIFE_CHECK);
                continue;
            }
            if state.connections.is_empty() {
                // Now that nobody can free anything any more.
                orphan = self.shared.broker.orphan(|owner| state.is_away(owner));
                if orphan.is_some() {
                    break;
                }
                state.phase = Phase::Deaf;
                return Ok(state.quiesced(attempt));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || state.connections.values().all(|one| one.refusal.is_some()) {
                break;
            }
            state = self.shared.wait(state, left);
        }
        self.shared.broker.give_up();
        let given_up = state.refused().or(orphan.map(QuiesceError::from)).unwrap_or_else(|| {
            let torn = mem::take(&mut state.torn).into_iter().map(|torn| torn.process);
            let silent = state.connections.values().map(|one| one.process.clone());
            let unanswered = torn.chain(silent).collect();
            QuiesceError::Deadline { deadline, unanswered }
        });
        state.phase = Phase::Deaf;
        drop(state);
        match self.resume_listening() {
            Ok(()) => Err(given_up),
            Err(source) => Err(QuiesceError::Resume { given_up: Box::new(given_up), source }),
        }
    }

    /// Waits for those who are still away, and begins an attempt.
    fn begin(&self, attempt: u64, deadline: Duration, end: Instant) -> Result<(), QuiesceError> {
        let mut state = self.all_back(deadline, end)?;
        state.phase = Phase::Quiescing { attempt, end };
        state.arrivals.clear();
        state.torn.clear();
        Ok(())
    }

    /// Waits for those who are still away.
    fn all_back(&self, deadline: Duration, end: Instant) -> Result<MutexGuard<'_, State>, QuiesceError> {
        let mut state = self.shared.lock();
        loop {
            if state.phase != Phase::Listening {
                return Err(QuiesceError::NotListening);
            }
            state.away.retain(|away| !away.life.is_over());
            if state.away.is_empty() {
                return Ok(state);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let unanswered = state.away.iter().map(|away| away.process.clone()).collect();
                return Err(QuiesceError::Deadline { deadline, unanswered });
            }
            state = self.shared.wait(state, left.min(LIFE_CHECK));
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
            *acceptor = Some(self.shared.acceptor()?);
        }
        self.shared.lock().phase = Phase::Listening;
        Ok(())
    }

    /// Waits until all who went away are back, have exited, or have executed another program.
    ///
    /// For processes that were killed after the dump and restored by this same launcher, `quiesced` has to be
    /// made by [`Quiesced::expected`]: they count as exited otherwise. Who is missing at the end is waited for
    /// again before the next dump.
    pub fn await_back(&self, quiesced: &Quiesced, deadline: Duration) -> Back {
        let back = self.await_all(quiesced, deadline);
        let over = self.shared.lock().holdings.sweep();
        drop(over);
        back
    }

    fn await_all(&self, quiesced: &Quiesced, deadline: Duration) -> Back {
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
                let missing = quiesced.away.iter().filter(|away| back.missing.contains(&away.process));
                state.away.extend(missing.cloned());
                return back;
            }
            state = self.shared.wait(state, left.min(LIFE_CHECK));
        }
    }

    /// Takes over the mirrors of processes that are about to be restored, by their IDs in the job's PID namespace.
    pub fn adopt(&self, mirrors: impl IntoIterator<Item = (u32, Mirror)>) {
        let mut state = self.shared.lock();
        mirrors.into_iter().for_each(|(pid, mirror)| state.holdings.adopt(pid, mirror));
    }

    /// Lets go of what was taken over for processes that are not among those that are expected: they have exited.
    pub fn settle(&self, expected: &Quiesced) {
        let of = |pid| expected.away.iter().find(|away| away.process.pid == Some(pid));
        let exited = self.shared.lock().holdings.settle(|pid| of(pid).map(|away| &away.life));
        drop(exited);
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
            // Its thread wakes and ends.
            connection.stream.cut();
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

    fn acceptor(self: &Arc<Self>) -> io::Result<Acceptor> {
        let shared = Arc::clone(self);
        Acceptor::start(&self.path, move |stream| shared.take_up(stream))
    }

    /// Takes up a connection and gives it a thread.
    fn take_up(self: &Arc<Self>, stream: UnixStream) -> io::Result<()> {
        let peer = line::peer(&stream)?;
        if peer.uid != rustix::process::geteuid().as_raw() {
            warn!(pid = peer.pid, uid = peer.uid, "a stranger was turned away");
            return Ok(());
        }
        stream.set_read_timeout(Some(GREETING_TIMEOUT))?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        let stream = Arc::new(Line::new(stream));
        let life =
            Life::of(Pid::from_raw(peer.pid).and_then(pidfd), Path::new("/proc").join(peer.pid.to_string()));
        let life = Arc::new(life);
        let connection = Connection {
            stream: Arc::clone(&stream),
            process: Process {
                pid: None,
                host_pid: u32::try_from(peer.pid).ok().filter(|&pid| pid != 0),
                exe: String::new(),
            },
            life: Arc::clone(&life),
            is_greeted: false,
            asked: None,
            preparation: None,
            refusal: None,
        };
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.connections.insert(id, connection);
        drop(state);
        let shared = Arc::clone(self);
        let attend = move || match shared.attend(id, &stream) {
            Parting::Lost => {
                shared.part(id, Parting::Lost);
                life.wait_for_exit(EXIT_GRACE);
                let over = shared.lock().holdings.sweep();
                drop(over);
            }
            farewell => shared.part(id, farewell),
        };
        let thread = thread::Builder::new().name(format!("agent-{id}")).stack_size(STACK_BYTES);
        thread.spawn(attend).map(drop).inspect_err(|_| self.part(id, Parting::Lost))
    }

    /// The life of a connection.
    fn attend(&self, id: u64, stream: &Line) -> Parting {
        match self.greet(id, stream) {
            Ok(true) => {}
            Ok(false) => return Parting::Lost,
            Err(error) => {
                debug!(id, error = &error as &dyn std::error::Error, "an agent did not get past its hello");
                return Parting::Lost;
            }
        }
        loop {
            match hear(stream) {
                Ok(FromAgent::Quiesced { attempt, gpu }) => {
                    debug!(id, attempt, "an agent has gone away");
                    wait_for_close(id, stream);
                    return Parting::Farewell(gpu);
                }
                Ok(FromAgent::Needs { attempt, mirror_bytes }) => {
                    self.advance(id, attempt, Step::Needs(mirror_bytes));
                }
                Ok(FromAgent::Staged { attempt }) => self.advance(id, attempt, Step::Staged),
                Ok(FromAgent::Park { count }) => {
                    if let Err(error) = self.park(id, stream, count) {
                        debug!(id, error = &error as &dyn std::error::Error, "an agent was lost");
                        return Parting::Lost;
                    }
                }
                // An attempt that fails after memory was parked takes it back before it says so.
                Ok(FromAgent::Unpark { first, count }) => {
                    if let Err(error) = self.take_back(id, stream, first, count) {
                        debug!(id, error = &error as &dyn std::error::Error, "an agent was lost");
                        return Parting::Lost;
                    }
                }
                Ok(FromAgent::Failed { attempt, reason, is_lost }) => {
                    debug!(id, attempt, reason, is_lost, "an agent has refused");
                    if is_lost {
                        self.lose(id, &reason);
                    }
                    if let Some((attempt, end)) = self.refuse(id, attempt, reason) {
                        ask(stream, attempt, end);
                    }
                }
                Ok(message) if broker::sender(&message).is_some() => {
                    if let Err(error) = self.broker(id, stream, &message) {
                        debug!(id, error = &error as &dyn std::error::Error, "an agent was lost");
                        return Parting::Lost;
                    }
                }
                Ok(message) => {
                    warn!(id, ?message, "an agent spoke out of turn");
                    return Parting::Lost;
                }
                Err(FrameError::Closed) => return Parting::Lost,
                Err(error) => {
                    debug!(id, error = &error as &dyn std::error::Error, "an agent was lost");
                    return Parting::Lost;
                }
            }
        }
    }

    /// A process has lost its state on the GPU while it was to be taken off it.
    fn lose(&self, id: u64, reason: &str) {
        let process = self.lock().connections.get(&id).map(|connection| connection.process.clone());
        if let Some(process) = process {
            // Nobody listens only if nobody is left to act on it.
            let _ = self.losses.send(Loss { process, reason: reason.to_owned() });
        }
    }

    /// Has the broker answer a message.
    fn broker(&self, id: u64, stream: &Line, message: &FromAgent) -> Result<(), FrameError> {
        let state = self.lock();
        let Some(connection) = state.connections.get(&id) else { return Ok(()) };
        let sender = broker::sender(message);
        // A connection for this message alone does not say which program it is of.
        let agent = state.connections.values().find(|one| one.process.pid == sender);
        let process = Process { pid: sender, ..agent.unwrap_or(connection).process.clone() };
        let party = Party { process, life: Arc::clone(&connection.life) };
        let end = match state.phase {
            Phase::Quiescing { end, .. } => end,
            Phase::Listening | Phase::Deaf => Instant::now(),
        };
        drop(state);
        self.broker.serve(stream, party, message, |pid| self.lock().is_here(pid), end)
    }

    /// Notes that an agent has refused; returns the attempt that it has to be asked about if it is another one.
    fn refuse(&self, id: u64, attempt: u64, reason: String) -> Option<(u64, Instant)> {
        let mut state = self.lock();
        let phase = state.phase;
        // It runs on with all its memory.
        let pid = state.connections.get(&id)?.process.pid;
        let parked = pid.map(|pid| state.holdings.take_parked(pid));
        let connection = state.connections.get_mut(&id)?;
        let again = match phase {
            Phase::Quiescing { attempt: now, .. } if now == attempt => {
                connection.refusal = Some(reason);
                self.broker.give_up();
                None
            }
            Phase::Quiescing { attempt: now, end } if connection.asked == Some(attempt) => {
                connection.asked = Some(now);
                Some((now, end))
            }
            // It has refused to be prepared for an attempt that was given up since, and is asked about this one.
            Phase::Quiescing { .. } => None,
            Phase::Listening | Phase::Deaf => {
                connection.asked = None;
                connection.advance(attempt, Step::Refused(reason));
                None
            }
        };
        self.changed.notify_all();
        drop(state);
        drop(parked);
        again
    }

    /// Hears the hello and what belongs to it; says whether the agent is one to go on with.
    fn greet(&self, id: u64, stream: &Line) -> Result<bool, FrameError> {
        let hello = match hear(stream)? {
            FromAgent::Hello(hello) => hello,
            message if broker::sender(&message).is_some() => {
                self.broker(id, stream, &message)?;
                return Ok(false);
            }
            message => {
                warn!(id, ?message, "an agent did not begin with a hello");
                return Ok(false);
            }
        };
        let answer = ToAgent::answer(&hello);
        say(stream, &answer)?;
        if let ToAgent::Refused { reason } = answer {
            warn!(pid = hello.pid, exe = hello.exe, reason, "an agent was refused");
            if hello.is_detached {
                // Nobody else can give it what it needs.
                let reason = format!("{reason}: resume the job with the ckpt-run that took the snapshot");
                let lost = Returned { restored: true, copied_bytes: 0, lost: Some(reason) };
                self.arrive(id, hello, Some(lost));
            }
            return Ok(false);
        }
        let back = match hello.away {
            None => None,
            Some(_) => match self
                .hear_back(id, stream, &hello)
                .inspect_err(|_| self.drop_parked(hello.pid))?
            {
                FromAgent::Back { attempt, restored, copied_bytes, lost } => {
                    debug!(id, pid = hello.pid, attempt, restored, copied_bytes, lost, "an agent is back");
                    Some(Returned { restored, copied_bytes, lost })
                }
                message => {
                    warn!(id, ?message, "an agent that was away did not say that it is back");
                    return Ok(false);
                }
            },
        };
        stream.limit_wait(None)?;
        if let Some((attempt, end)) = self.arrive(id, hello, back) {
            ask(stream, attempt, end);
        }
        Ok(true)
    }

    /// Nobody will ask for it any more: the process makes its memory anew, for which the device needs room.
    fn drop_parked(&self, pid: u32) {
        let parked = self.lock().holdings.take_parked(pid);
        drop(parked);
    }

    /// Notes an agent down; returns the attempt that it has to be sent away for, if one is under way.
    fn arrive(&self, id: u64, hello: Hello, back: Option<Returned>) -> Option<(u64, Instant)> {
        let mut state = self.lock();
        let phase = state.phase;
        let connection = state.connections.get_mut(&id)?;
        connection.process.pid = Some(hello.pid);
        connection.process.exe = hello.exe;
        connection.is_greeted = true;
        let attempt = match phase {
            Phase::Quiescing { attempt, end } if connection.asked.is_none() => {
                connection.asked = Some(attempt);
                Some((attempt, end))
            }
            _ => None,
        };
        let arrival = Arrival { connection: id, process: connection.process.clone(), back };
        let parked = state.holdings.take_parked(hello.pid);
        let begun_anew = arrival.back.is_none().then(|| state.holdings.forget(hello.pid));
        debug!(id, process = %arrival.process, "an agent is here");
        if let Some(loss) = arrival.loss() {
            // Nobody listens only if nobody is left to act on it.
            let _ = self.losses.send(loss);
        }
        state.away.retain(|away| !arrival.is(&away.process));
        state.arrivals.push(arrival);
        self.changed.notify_all();
        drop(state);
        drop((parked, begun_anew));
        attempt
    }

    /// Forgets a connection.
    fn part(&self, id: u64, parting: Parting) {
        let mut state = self.lock();
        let mut ended = None;
        if let Some(Connection { stream, process, life, is_greeted, .. }) = state.connections.remove(&id) {
            // Somebody may still hold the other end, who is to learn that it leads nowhere.
            stream.cut();
            let has_mirror = process.pid.is_some_and(|pid| state.holdings.mirror(pid).is_some());
            if let Parting::Farewell(report) = parting {
                state.away.push(Away { process, life, report });
            } else if is_greeted {
                if has_mirror && matches!(state.phase, Phase::Quiescing { .. }) {
                    state.torn.push(Away { process, life: Arc::clone(&life), report: None });
                }
                ended = Some(life);
            }
        }
        // What came back has come back, and may exit; of the others there may be any number over a job's life.
        state.arrivals.retain(|arrival| arrival.connection != id || arrival.back.is_some());
        self.changed.notify_all();
        drop(state);
        if let Some(life) = ended {
            self.broker.outlive(&life);
        }
    }
}

impl State {
    /// Those who have said hello and were not asked to go yet. They count as asked from now on.
    fn unasked(&mut self, attempt: u64) -> Vec<Arc<Line>> {
        let mut streams = Vec::new();
        for connection in self.connections.values_mut() {
            if connection.is_greeted && connection.asked.is_none() {
                connection.asked = Some(attempt);
                streams.push(Arc::clone(&connection.stream));
            }
        }
        streams
    }

    /// Hands out those who have gone away, with what they had on their GPUs.
    fn quiesced(&mut self, attempt: u64) -> Quiesced {
        let mut away = mem::take(&mut self.away);
        let state = |away: &mut Away| {
            let report = away.report.take()?;
            let mirror = away.process.pid.and_then(|pid| self.holdings.mirror(pid)).cloned();
            Some(GpuState { process: away.process.clone(), mirror, report })
        };
        let gpu = away.iter_mut().filter_map(state).collect();
        Quiesced { attempt, away, gpu }
    }

    fn is_away(&self, pid: u32) -> bool {
        self.away.iter().any(|away| away.process.pid == Some(pid))
    }

    /// Whether an agent is there, and has put back what its process had on the GPU.
    fn is_here(&self, pid: u32) -> bool {
        self.connections.values().any(|one| one.is_greeted && one.process.pid == Some(pid))
    }

    /// The end of an attempt that somebody refused. Whoever did can be asked again.
    fn refused(&mut self) -> Option<QuiesceError> {
        let mut refusals = Vec::new();
        for connection in self.connections.values_mut() {
            if let Some(reason) = connection.refusal.take() {
                connection.asked = None;
                refusals.push((connection.process.clone(), reason));
            }
        }
        let others = refusals.len().saturating_sub(1);
        let (process, reason) = refusals.into_iter().next()?;
        Some(QuiesceError::Refused { process, reason, others })
    }

    fn who_is_back(&self, expected: &[Away]) -> Back {
        let lost = self.arrivals.iter().filter_map(Arrival::loss).collect();
        let mut back = Back { lost, ..Back::default() };
        let mut arrivals: Vec<_> = self.arrivals.iter().collect();
        for away in expected {
            let arrival = arrivals.iter().position(|arrival| arrival.is(&away.process));
            match arrival.map(|place| arrivals.swap_remove(place).back.as_ref()) {
                Some(Some(returned)) => {
                    let count = if returned.restored { &mut back.restored } else { &mut back.continued };
                    *count += 1;
                    back.copied_bytes = back.copied_bytes.saturating_add(returned.copied_bytes);
                }
                // Another program in the same process: what went away will not come back.
                Some(None) => {}
                None if away.life.is_over() => {}
                None => back.missing.push(away.process.clone()),
            }
        }
        back
    }
}

/// Waits until nobody holds the other end any more, within reason.
fn wait_for_close(id: u64, stream: &Line) {
    if stream.limit_wait(Some(CLOSE_GRACE)).is_err() {
        return;
    }
    match hear(stream) {
        Err(error) if error.is_timeout() => {
            debug!(id, "somebody holds an agent's connection after its farewell");
        }
        Ok(message) => warn!(id, ?message, "an agent spoke after its farewell"),
        Err(_) => {}
    }
}

/// Asks an agent to go away. One that cannot be asked is gone, or shows up as one that did not answer.
///
/// The agent gets a little less time than there is until `end`, so that its own reason comes first. Every dump leaves
/// the job running, so memory is always worth parking.
fn ask(stream: &Line, attempt: u64, end: Instant) {
    let timeout = end.saturating_duration_since(Instant::now()) / 8 * 7;
    let timeout_ms = timeout.as_millis().try_into().unwrap_or(u64::MAX);
    if let Err(error) = say(stream, &ToAgent::Quiesce { attempt, timeout_ms, park: true }) {
        debug!(error = &error as &dyn std::error::Error, "an agent cannot be asked to go away");
    }
}

fn say(stream: &Line, message: &ToAgent) -> Result<(), FrameError> {
    stream.say(message)
}

fn hear(stream: &Line) -> Result<FromAgent, FrameError> {
    stream.hear()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;
    use std::process::{Child, Command};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread::JoinHandle;

    use ckpt_protocol::agent::PROTOCOL_VERSION;
    use ckpt_protocol::frame;

    use super::*;

    /// Long enough for anything that is to happen.
    pub(super) const LONG: Duration = Duration::from_secs(20);
    /// Short enough to wait for what is not to happen.
    pub(super) const SHORT: Duration = Duration::from_millis(60);

    pub(super) fn place() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("agents");
        (directory, path)
    }

    pub(super) fn until<T>(what: &str, attempt: impl Fn() -> Option<T>) -> T {
        let end = Instant::now() + LONG;
        loop {
            if let Some(done) = attempt() {
                return done;
            }
            assert!(Instant::now() < end, "waited in vain for {what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub(super) fn until_count(agents: &Agents, count: usize) {
        until("agents", || (agents.count() == count).then_some(()));
    }

    pub(super) fn hello(pid: u32, away: Option<u64>) -> FromAgent {
        let exe = format!("/bin/{pid}");
        FromAgent::Hello(Hello {
            version: PROTOCOL_VERSION,
            pid,
            start_time_ticks: 1,
            exe,
            away,
            is_detached: false,
        })
    }

    pub(super) fn tell(mut stream: &UnixStream, message: &FromAgent) {
        frame::write(&mut stream, message).expect("told");
    }

    pub(super) fn told(mut stream: &UnixStream) -> Result<ToAgent, FrameError> {
        frame::read(&mut stream)
    }

    /// A connection, once the launcher listens, on which nothing is waited for in vain.
    pub(super) fn connected(path: &Path) -> UnixStream {
        let stream = until("the launcher", || UnixStream::connect(path).ok());
        stream.set_read_timeout(Some(LONG)).expect("set");
        stream
    }

    /// An agent that has just connected and been welcomed, once the launcher listens.
    pub(super) fn agent(path: &Path, pid: u32, away: Option<u64>) -> UnixStream {
        let stream = connected(path);
        tell(&stream, &hello(pid, away));
        assert_eq!(told(&stream).expect("an answer"), ToAgent::Welcome { version: PROTOCOL_VERSION });
        stream
    }

    pub(super) fn back(path: &Path, pid: u32, attempt: u64, restored: bool) -> UnixStream {
        let stream = agent(path, pid, Some(attempt));
        tell(&stream, &FromAgent::Back { attempt, restored, copied_bytes: 0, lost: None });
        stream
    }

    /// Hears a request; returns how long the agent has for it.
    pub(super) fn is_asked(stream: &UnixStream, wanted: u64) -> Duration {
        let ToAgent::Quiesce { attempt, timeout_ms, .. } = told(stream).expect("a request") else {
            panic!("not a request");
        };
        assert_eq!(attempt, wanted);
        Duration::from_millis(timeout_ms)
    }

    fn go_away(stream: &UnixStream, attempt: u64) {
        is_asked(stream, attempt);
        tell(stream, &FromAgent::Quiesced { attempt, gpu: None });
    }

    fn refuse(stream: &UnixStream, attempt: u64) {
        is_asked(stream, attempt);
        tell(
            stream,
            &FromAgent::Failed { attempt, reason: format!("managed memory {attempt}"), is_lost: false },
        );
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
        assert_eq!(returned, Back { continued: 2, restored: 1, ..Back::default() });
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
        let deaf = back(&path, 7, 1, false);
        until_count(&agents, 2);
        let deaf = thread::spawn(move || go_away(&deaf, 2));
        let other = thread::spawn(move || go_away(&other, 2));
        let quiesced = agents.quiesce(2, LONG).expect("quiesced");
        [deaf, other].into_iter().for_each(|thread| thread.join().expect("an agent"));
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
            is_asked(&exits, 1);
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
        let life = Life::of(life, format!("/proc/{}", child.id()).into());
        let process = Process { pid: Some(9), host_pid, exe: String::new() };
        Away { process, life: Arc::new(life), report: None }
    }

    #[test]
    fn whoever_exits_while_away_is_not_waited_for() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let mut child = other_process();
        let quiesced = Quiesced { attempt: 1, away: vec![away(&child)], gpu: Vec::new() };
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
        let proc = tempfile::tempdir().expect("a directory");
        for pid in ["1", "2", "3"] {
            fs::create_dir(proc.path().join(pid)).expect("a directory");
            fs::write(proc.path().join(pid).join("exe"), pid).expect("a program");
        }
        let quiesced = Quiesced::expected(6, [1, 2, 3, 4], proc.path());
        assert_eq!(quiesced.processes().len(), 3, "one has exited already");
        let streams = [back(&path, 3, 6, true), back(&path, 1, 6, true)];
        let returned = agents.await_back(&quiesced, SHORT);
        assert_eq!((returned.restored, returned.continued), (2, 0));
        assert_eq!(pids(&returned.missing), [Some(2)]);
        // What is back may exit before it is asked for.
        drop(streams);
        until_count(&agents, 0);
        assert_eq!(agents.await_back(&quiesced, Duration::ZERO).restored, 2);
        // And what is not back may do so too.
        fs::remove_file(proc.path().join("2/exe")).expect("removed");
        let returned = agents.await_back(&quiesced, LONG);
        assert_eq!((returned.restored, returned.missing), (2, Vec::new()));
        assert!(agents.quiesce(7, SHORT).is_ok());
    }

    #[test]
    fn a_refusal_ends_the_attempt_when_all_have_answered_and_is_forgotten_then() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let tainted = [agent(&path, 1, None), agent(&path, 2, None)];
        let obedient = obedient(&path, 3, 1);
        let refuses = thread::spawn(move || {
            tainted.iter().for_each(|stream| refuse(stream, 1));
            tainted
        });
        let begun = Instant::now();
        let error = agents.quiesce(1, LONG).expect_err("refused");
        assert!(begun.elapsed() < LONG / 2, "nobody else was to be waited for");
        let QuiesceError::Refused { process, reason, others } = &error else { panic!("{error:?}") };
        assert_eq!((process.pid, reason.as_str(), *others), (Some(1), "managed memory 1", 1));
        assert!(error.to_string().ends_with("(/bin/1): managed memory 1 (and 1 more processes)"), "{error}");
        obedient.join().expect("an agent");

        // The connections are the same, who went away is back, and all may go the next time.
        let [first, second] = refuses.join().expect("an agent");
        let third = back(&path, 3, 1, false);
        until_count(&agents, 3);
        let threads = [first, second, third].map(|stream| thread::spawn(move || go_away(&stream, 2)));
        assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 3);
        threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
    }

    #[test]
    fn a_refusal_is_told_rather_than_the_deadline() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let deaf = agent(&path, 1, None);
        let tainted = agent(&path, 2, None);
        let refuses = thread::spawn(move || {
            refuse(&tainted, 1);
            tainted
        });
        let error = agents.quiesce(1, SHORT).expect_err("refused");
        assert!(matches!(&error, QuiesceError::Refused { others: 0, .. }), "{error:?}");
        drop(refuses.join().expect("an agent"));

        // It answers at last, to the attempt before, and is asked again.
        let late = thread::spawn(move || {
            refuse(&deaf, 1);
            go_away(&deaf, 2);
        });
        assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 1);
        late.join().expect("an agent");
    }

    #[test]
    fn agents_have_a_little_less_time_than_the_launcher() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let stream = agent(&path, 1, None);
        let asked = thread::spawn(move || is_asked(&stream, 1));
        agents.quiesce(1, Duration::from_secs(8)).expect("gone");
        let timeout = asked.join().expect("an agent");
        assert!(timeout <= Duration::from_secs(7) && timeout > Duration::from_secs(5), "{timeout:?}");
    }

    #[test]
    fn nobody_is_sent_away_before_all_are_back() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let quiesced = all_away(&agents, &path, 2);
        agents.resume_listening().expect("listening again");
        let first = back(&path, 1, 1, false);
        let returned = agents.await_back(&quiesced, SHORT);
        assert_eq!(pids(&returned.missing), [Some(2)]);

        let error = agents.quiesce(2, SHORT).expect_err("one is not back");
        let QuiesceError::Deadline { unanswered, .. } = &error else { panic!("{error:?}") };
        assert_eq!(pids(unanswered), [Some(2)]);
        assert!(path.exists(), "so that it can come back");
        first.set_nonblocking(true).expect("set");
        assert!(told(&first).is_err(), "the others were not asked");
        first.set_nonblocking(false).expect("set");

        let threads = [first, back(&path, 2, 1, false)];
        let threads = threads.map(|stream| thread::spawn(move || go_away(&stream, 3)));
        assert_eq!(agents.quiesce(3, LONG).expect("quiesced").processes().len(), 2);
        threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
    }

    #[test]
    fn another_program_is_not_waited_for() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "read line; exec sleep 1000"]).stdin(std::process::Stdio::piped());
        let mut child = command.spawn().expect("a process");
        let exe = format!("/proc/{}/exe", child.id());
        let is_shell = || fs::read_link(&exe).is_ok_and(|exe| !exe.ends_with("sleep"));
        until("the shell", || is_shell().then_some(()));
        let away = away(&child);
        assert!(!away.life.is_over());
        drop(child.stdin.take());
        until("the exec", || away.life.is_over().then_some(()));
        assert!(!is_shell());
        child.kill().expect("killed");
        child.wait().expect("reaped");
    }

    #[test]
    fn a_loss_is_told_whenever_it_comes() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let quiesced = all_away(&agents, &path, 1);
        agents.resume_listening().expect("listening again");
        let stream = agent(&path, 1, Some(1));
        let lost = Some("GPU state is gone".to_owned());
        tell(&stream, &FromAgent::Back { attempt: 1, restored: false, copied_bytes: 0, lost });
        let returned = agents.await_back(&quiesced, LONG);
        assert_eq!(returned.lost.len(), 1);
        assert!(
            returned.lost[0].to_string().ends_with("(/bin/1): GPU state is gone"),
            "{}",
            returned.lost[0]
        );
        assert_eq!(agents.losses().recv_timeout(LONG).expect("told"), returned.lost[0]);
        assert!(agents.losses().is_empty());
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
        tell(&stream, &FromAgent::Quiesced { attempt: 1, gpu: None });
        assert!(told(&stream).is_err());
        let stream = agent(&path, 1, None);
        tell(&stream, &FromAgent::Back { attempt: 1, restored: true, copied_bytes: 0, lost: None });
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

    /// Says one thing about shared memory on a connection of its own; only its end follows the answer.
    fn about_memory(path: &Path, message: &FromAgent) -> ToAgent {
        let stream = UnixStream::connect(path).expect("connected");
        tell(&stream, message);
        if matches!(message, FromAgent::Publish { .. }) {
            let memory = tempfile::tempfile().expect("a file");
            ckpt_protocol::descriptors::send(stream.as_fd(), &[memory.as_fd()]).expect("sent");
        }
        let answer = told(&stream).expect("an answer");
        if matches!(answer, ToAgent::Shared { .. }) {
            assert_eq!(ckpt_protocol::descriptors::receive(stream.as_fd(), 1).expect("memory").len(), 1);
        }
        assert!(told(&stream).is_err());
        answer
    }

    #[test]
    fn an_agent_of_another_version_that_waits_for_its_state_is_a_loss() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let stream = UnixStream::connect(&path).expect("connected");
        let exe = "/bin/7".to_owned();
        let version = PROTOCOL_VERSION + 1;
        let hello = Hello { version, pid: 7, start_time_ticks: 1, exe, away: Some(4), is_detached: true };
        tell(&stream, &FromAgent::Hello(hello));
        assert!(matches!(told(&stream).expect("an answer"), ToAgent::Refused { .. }));
        let loss = agents.losses().recv_timeout(LONG).expect("a loss");
        assert_eq!(loss.process.pid, Some(7));
        assert!(loss.reason.contains("the ckpt-run that took the snapshot"), "{loss}");
    }

    #[test]
    fn memory_is_shared_over_connections_of_its_own_and_an_agents_own() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let key = ckpt_protocol::agent::ShareKey(7);
        let fetch = FromAgent::Fetch { pid: 2, key, owner: 1 };
        assert_eq!(about_memory(&path, &fetch), ToAgent::NotShared { is_final: false });
        let stream = agent(&path, 1, None);
        until_count(&agents, 1);
        assert_eq!(about_memory(&path, &fetch), ToAgent::NotShared { is_final: true });
        let publish = FromAgent::Publish { pid: 1, key, bytes: 9 };
        assert_eq!(about_memory(&path, &publish), ToAgent::Published { is_kept: true });
        assert_eq!(about_memory(&path, &fetch), ToAgent::Shared { bytes: 9 });
        assert_eq!(agents.count(), 1);

        // Memory that the owner has freed and process 2 has still open is in nobody's image.
        tell(&stream, &FromAgent::Withdraw { pid: 1, keys: vec![key] });
        assert_eq!(told(&stream).expect("an answer"), ToAgent::Withdrawn);
        let error = agents.quiesce(1, LONG).expect_err("refused, and nobody was asked");
        let QuiesceError::Refused { process, reason, others: 0 } = &error else { panic!("{error:?}") };
        assert_eq!(process.pid, Some(2));
        assert!(reason.contains("cuIpcOpenMemHandle"), "{reason}");

        // Freed at the last moment.
        assert_eq!(about_memory(&path, &publish), ToAgent::Published { is_kept: true });
        let importer = agent(&path, 2, None);
        let owner = thread::spawn(move || {
            is_asked(&stream, 1);
            tell(&stream, &FromAgent::Withdraw { pid: 1, keys: vec![key] });
            assert_eq!(told(&stream).expect("an answer"), ToAgent::Withdrawn);
            tell(&stream, &FromAgent::Quiesced { attempt: 1, gpu: None });
        });
        let threads = [owner, thread::spawn(move || go_away(&importer, 1))];
        let error = agents.quiesce(1, LONG).expect_err("refused");
        assert!(
            matches!(&error, QuiesceError::Refused { process, .. } if process.pid == Some(2)),
            "{error:?}"
        );
        threads.into_iter().for_each(|thread| thread.join().expect("an agent"));

        // On their way back.
        let [first, second] = [1, 2].map(|pid| agent(&path, pid, Some(1)));
        tell(&second, &FromAgent::Withdraw { pid: 2, keys: vec![key] });
        assert_eq!(told(&second).expect("an answer"), ToAgent::Withdrawn);
        let streams = [first, second].map(|stream| {
            tell(&stream, &FromAgent::Back { attempt: 1, restored: false, copied_bytes: 0, lost: None });
            stream
        });
        until_count(&agents, 2);
        let threads = streams.map(|stream| thread::spawn(move || go_away(&stream, 2)));
        assert_eq!(agents.quiesce(2, LONG).expect("quiesced").processes().len(), 2);
        threads.into_iter().for_each(|thread| thread.join().expect("an agent"));
    }
}
