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
//! mirror for it. Coming back, they are given what they need to put their state back (`deliver.rs`). What each connection
//! says is heard by a thread of its own (`attend.rs`), which notes it in the state that all share (`state.rs`). What of a
//! mirror need not be read for the store is in `known.rs`.

mod acceptor;
mod activity;
mod attend;
mod broker;
mod deliver;
mod known;
mod line;
mod mirrors;
mod prepare;
mod process;
mod state;

use crate::sys::deadline::{AGENT_CLOSE_TIMEOUT, PROCESS_POLL_INTERVAL};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use tracing::warn;

use acceptor::Acceptor;
pub use activity::{GpuActivity, Onlooker};
use broker::Broker;
pub use known::{Known, joined};
use mirrors::Holdings;
pub use mirrors::Mirror;
pub use prepare::Prepared;
pub use process::{Back, GpuState, Loss, Process, QuiesceError, Quiesced};
use state::{Phase, State};
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
    /// Whether those who are asked to go away run on afterwards, so that their memory is worth parking.
    parks: AtomicBool,
    state: Mutex<State>,
    /// Told whenever somebody comes or goes.
    changed: Condvar,
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
            parks: AtomicBool::new(true),
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

    /// Says whether the job runs on after the dumps to come: it does, unless this says otherwise.
    pub fn will_run_on(&self, will: bool) {
        self.shared.parks.store(will, Ordering::Relaxed);
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
            self.shared.ask(stream, attempt, end);
        }
        drop(unasked);
        let mut orphan = None;
        let mut torn_since = None;
        let mut state = self.shared.lock();
        loop {
            state.torn.retain(|torn| !torn.life.is_over());
            if state.connections.is_empty() && !state.torn.is_empty() {
                // One that exits has closed its connection a moment earlier.
                if torn_since.get_or_insert_with(Instant::now).elapsed() >= AGENT_CLOSE_TIMEOUT {
                    break;
                }
                self.shared.wait(&mut state, PROCESS_POLL_INTERVAL);
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
            self.shared.wait(&mut state, left);
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
            self.shared.wait(&mut state, left.min(PROCESS_POLL_INTERVAL));
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
        let mut acceptor = self.acceptor.lock();
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
            self.shared.wait(&mut state, left.min(PROCESS_POLL_INTERVAL));
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
        let acceptor = self.acceptor.lock().take();
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
        self.state.lock()
    }

    fn wait(&self, state: &mut MutexGuard<'_, State>, timeout: Duration) {
        let _ = self.changed.wait_for(state, timeout);
    }

    fn acceptor(self: &Arc<Self>) -> io::Result<Acceptor> {
        let shared = Arc::clone(self);
        Acceptor::start(&self.path, move |stream| shared.take_up(stream))
    }
}

#[cfg(test)]
mod tests;
