//! The launcher's side of the agents: who is connected, detaching them for a dump, and awaiting their return.
//!
//! ```text
//!               quiesce: all have returned,
//!               path removed,                           all connections closed
//!               listener drained and closed
//!   Listening ------------------------------> Quiescing ---------------------> NotListening
//!     ^   ^                                       |                                 |
//!     |   |  deadline, or all have answered and   |                                 |
//!     |   |  one has refused: listening again     |                                 |
//!     |   +---------------------------------------+                                 |
//!     |                          resume_listening                                   |
//!     +-----------------------------------------------------------------------------+
//! ```
//!
//! The job may be dumped in the phase NotListening: no process of the job has a connection to the launcher, and none can
//! get one. `quiesce` ensures that by its order:
//!
//! 1. It removes the path, so that no process finds the socket.
//! 2. It shuts the listening socket down. The kernel refuses pending connects from then on, and still hands out the
//!    connections that it had accepted before. So every connection ever made is known here.
//! 3. It asks all agents to detach, including those that have not sent their hello yet.
//!
//! A process that exits or executes another program closes its connection and is not waited for.
//!
//! An agent that had detached restores its process's GPU state as soon as it sees the path. That takes time and must not
//! be interrupted by a dump. So no agent is asked to detach before all detached agents have returned.
//!
//! | module | does |
//! |---|---|
//! | `acceptor.rs` | the listening socket |
//! | `stream.rs` | messages and open files over a connection |
//! | `serve.rs` | one thread per connection: handles what the agent sends |
//! | `state.rs` | the state that all connections share |
//! | `prepare.rs` | before a dump, while the job runs: every process with device memory gets a mirror |
//! | `cut.rs` | before a dump: all ranks of NCCL stop at the same step |
//! | `deliver.rs` | after a dump: gives processes what they need to restore their GPU state |
//! | `mirrors.rs` | mirrors |
//! | `copy_threads.rs` | whether a mirror is pinned, or threads copy to it |
//! | `unchanged.rs` | which parts of a mirror need not be read again for the store |
//! | `partial.rs` | mirrors that hold only what the store lacks |
//! | `window.rs` | instead of a mirror: memory that goes to the store while its process is being detached |
//! | `broker.rs` | device memory that processes share or have parked |
//! | `lease.rs` | whether a file is open elsewhere |
//! | `device_files.rs` | keeps the GPUs open while no process of the job does |
//! | `restore_memory.rs` | how much device memory the restores take, and the wait for it |
//! | `release.rs` | before a kill: takes the processes off their GPUs |
//! | `activity.rs` | GPU activity, for the watchdog |
//! | `stuck.rs` | agents whose GPU driver does not come back |
//! | `process.rs` | process handles, the results of quiesce and return, errors |

mod acceptor;
mod activity;
mod broker;
mod copy_threads;
mod cut;
mod deliver;
mod device_files;
#[allow(unsafe_code)]
mod lease;
mod mirrors;
mod partial;
mod prepare;
mod process;
mod refill;
mod release;
mod restore_memory;
mod serve;
mod state;
mod stream;
mod stuck;
mod unchanged;
mod window;

use crate::sys::deadline::{AGENT_CLOSE_TIMEOUT, PROCESS_POLL_INTERVAL};
use crate::sys::gpus::{GpuProbe, Gpus};
use ckpt_snapshot::{FailedProcess, ReadError};
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
pub use activity::{Activity, ActivityProbe, GpuActivity};
use broker::Broker;
pub use cut::{CutCost, HeldCut, JobLead, SETTINGS as CUT_SETTINGS};
use device_files::DeviceFiles;
pub use mirrors::Mirror;
#[cfg(test)]
pub use partial::Present;
pub use partial::{MirrorMode, StoredContent};
pub use prepare::Prepared;
pub use process::{GpuState, Loss, Process, QuiesceError, Quiesced, ReturnSummary};
pub use refill::Refill;
pub use restore_memory::Placement;
use restore_memory::{Migrations, RestoreMemory};
use state::{Phase, State};
pub use unchanged::{ChunkTable, ContentLost, UnchangedChunks, clipped, merge_ranges};
pub use window::{Offer, Reader};

/// Stack of each thread.
const STACK_BYTES: usize = 256 * 1024;

/// The agents of a job.
pub struct Agents {
    shared: Arc<Shared>,
    acceptor: Mutex<Option<Acceptor>>,
    /// Receives every loss of GPU state that an agent reports.
    pub losses: Receiver<Loss>,
}

struct Shared {
    path: PathBuf,
    losses: Sender<Loss>,
    gpu_timeout: Duration,
    broker: Broker,
    /// Whether the job runs on after the dump, so that parking device memory is worthwhile.
    parks_memory: AtomicBool,
    mirror_mode: Mutex<MirrorMode>,
    devices: Mutex<DeviceFiles>,
    gpus: GpuProbe,
    restore_memory: Mutex<RestoreMemory>,
    /// Why device memory could not be read from the store in a resume.
    read_error: Mutex<Option<ReadError>>,
    migrations: Mutex<Migrations>,
    /// Processes with device memory that have failed.
    failed: Mutex<Vec<FailedProcess>>,
    /// The job session has ended.
    is_closed: AtomicBool,
    state: Mutex<State>,
    /// Held while orders of the cut are sent, so that each agent gets them in their order.
    sending_orders: Mutex<()>,
    /// Notified whenever the state changes.
    changed: Condvar,
}

impl Agents {
    /// Listens at `path` for the agents of a job. The socket is for the launcher's own user only. An agent that has not
    /// answered `gpu_timeout` after its deadline is lost: its GPU driver hangs.
    ///
    /// # Errors
    /// When the socket cannot be created, and `AlreadyExists` if the path exists and is not a socket. An existing socket
    /// is replaced.
    pub fn listen(path: &Path, gpu_timeout: Duration) -> io::Result<Self> {
        let (loss_sender, losses) = crossbeam_channel::unbounded();
        let shared = Arc::new(Shared {
            path: path.into(),
            losses: loss_sender,
            gpu_timeout,
            broker: Broker::default(),
            parks_memory: AtomicBool::new(true),
            mirror_mode: Mutex::default(),
            devices: Mutex::default(),
            gpus: GpuProbe::default(),
            restore_memory: Mutex::default(),
            read_error: Mutex::default(),
            migrations: Mutex::default(),
            failed: Mutex::default(),
            is_closed: AtomicBool::new(false),
            state: Mutex::default(),
            sending_orders: Mutex::default(),
            changed: Condvar::new(),
        });
        let acceptor = shared.acceptor()?;
        Ok(Self { shared, acceptor: Mutex::new(Some(acceptor)), losses })
    }

    /// The path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// Whether an agent has connected and is not registered yet: it restores its process's GPU state.
    #[must_use]
    pub fn is_restoring(&self) -> bool {
        self.shared.lock().connections.values().any(|one| !one.is_registered)
    }

    /// The processes with device memory that have failed since the last call.
    pub fn take_failed(&self) -> Vec<FailedProcess> {
        mem::take(&mut self.shared.failed.lock())
    }

    /// How many agents are registered.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.shared.lock().connections.values().filter(|connection| connection.is_registered).count()
    }

    /// Sets whether the job runs on after the next dumps; the default is `true`.
    pub fn set_continues_after_dump(&self, continues: bool) {
        self.shared.parks_memory.store(continues, Ordering::Relaxed);
    }

    /// [`Agents::detach_all`] for agents that have mirrors.
    #[cfg(test)]
    pub fn quiesce(&self, attempt: u64, deadline: Duration) -> Result<Quiesced, QuiesceError> {
        self.detach_all(attempt, deadline, &mut drop)
    }

    /// Detaches all agents and stops listening, so that the job can be dumped. `store` is called with the memory of each
    /// process that has a window.
    ///
    /// # Errors
    /// [`QuiesceError::Refused`] if an agent reports that its process cannot be dumped, [`QuiesceError::Deadline`] if an
    /// agent does not answer in time or has not returned from the previous dump. The launcher then listens again.
    pub fn detach_all(
        &self,
        attempt: u64,
        deadline: Duration,
        store: &mut dyn FnMut(Offer),
    ) -> Result<Quiesced, QuiesceError> {
        let end = Instant::now() + deadline;
        if let Some(orphan) = self.shared.broker.orphan(|_| true) {
            return Err(orphan.into());
        }
        self.begin(attempt, deadline, end)?;
        let machine = self.hold_gpus_of_job();
        self.shared.broker.begin(attempt);
        self.stop_listening();
        let unasked = self.shared.lock().mark_asked(attempt);
        for stream in &unasked {
            self.shared.send_quiesce(stream, attempt, end);
        }
        drop(unasked);
        let mut orphan = None;
        let mut disconnected_since = None;
        let mut state = self.shared.lock();
        loop {
            state = self.store_offers(state, store);
            state.disconnected.retain(|disconnected| !disconnected.handle.has_ended());
            if state.connections.is_empty() && !state.disconnected.is_empty() {
                // A process that exits closes its connection a moment earlier.
                if disconnected_since.get_or_insert_with(Instant::now).elapsed() >= AGENT_CLOSE_TIMEOUT {
                    break;
                }
                self.shared.wait(&mut state, PROCESS_POLL_INTERVAL);
                continue;
            }
            if state.connections.is_empty() {
                // No process can free memory any more.
                orphan = self.shared.broker.orphan(|owner| state.is_detached(owner));
                if orphan.is_some() {
                    break;
                }
                state.phase = Phase::NotListening;
                let quiesced = state.take_quiesced(attempt);
                drop(state);
                self.shared.broker.end_attempt();
                return Ok(self.with_gpus(quiesced, machine.as_ref()));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || state.connections.values().all(|one| one.refusal.is_some()) {
                break;
            }
            self.shared.wait(&mut state, left);
        }
        Err(self.give_up(state, attempt, deadline, orphan.map(QuiesceError::from)))
    }

    /// Stores the memory that processes offer, unless the attempt has failed.
    fn store_offers<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        store: &mut dyn FnMut(Offer),
    ) -> MutexGuard<'a, State> {
        while let Some(offer) = state.offers.pop() {
            let is_refused = state.connections.values().any(|one| one.refusal.is_some());
            drop(state);
            if is_refused {
                drop(offer);
            } else {
                store(offer);
            }
            state = self.shared.lock();
        }
        state
    }

    /// Ends an attempt that has failed, and listens again. Returns the error.
    fn give_up(
        &self,
        mut state: MutexGuard<'_, State>,
        attempt: u64,
        deadline: Duration,
        orphan: Option<QuiesceError>,
    ) -> QuiesceError {
        // One process may have failed and run on while another one captured memory that both can write.
        for pid in self.shared.broker.capturing(attempt) {
            state.holdings.distrust_mirror(pid);
        }
        self.shared.broker.end_attempt();
        self.shared.watch_silent(&state, attempt);
        let given_up = state.take_refusals().or(orphan).unwrap_or_else(|| {
            let disconnected =
                mem::take(&mut state.disconnected).into_iter().map(|disconnected| disconnected.process);
            let silent = state.connections.values().map(|one| one.process.clone());
            let unanswered = disconnected.chain(silent).collect();
            QuiesceError::Deadline { deadline, unanswered }
        });
        state.phase = Phase::NotListening;
        state.offers.clear();
        drop(state);
        match self.resume_listening() {
            Ok(()) => given_up,
            Err(source) => QuiesceError::Resume { given_up: Box::new(given_up), source },
        }
    }

    /// Keeps the GPUs of the job's processes initialised while these are detached. Returns the machine's GPUs, if the job uses
    /// any and NVML says which there are.
    fn hold_gpus_of_job(&self) -> Option<Gpus> {
        let pids: Vec<_> =
            self.shared.lock().connections.values().filter_map(|one| one.process.host_pid).collect();
        let mut devices = self.shared.devices.lock();
        pids.into_iter().for_each(|pid| devices.hold_those_of(pid));
        if devices.is_empty() { None } else { self.shared.gpus.look() }
    }

    /// Waits until all detached agents have returned, and begins an attempt.
    fn begin(&self, attempt: u64, deadline: Duration, end: Instant) -> Result<(), QuiesceError> {
        let mut state = self.await_all_returned(deadline, end)?;
        self.shared.forget_needs();
        state.phase = Phase::Quiescing { attempt, end };
        state.arrivals.clear();
        state.disconnected.clear();
        Ok(())
    }

    /// Waits until all detached agents have returned.
    fn await_all_returned(
        &self,
        deadline: Duration,
        end: Instant,
    ) -> Result<MutexGuard<'_, State>, QuiesceError> {
        let mut state = self.shared.lock();
        loop {
            if state.phase != Phase::Listening {
                return Err(QuiesceError::NotListening);
            }
            state.detached.retain(|one| !one.handle.has_ended());
            if state.detached.is_empty() {
                return Ok(state);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let unanswered = state.detached.iter().map(|one| one.process.clone()).collect();
                return Err(QuiesceError::Deadline { deadline, unanswered });
            }
            self.shared.wait(&mut state, left.min(PROCESS_POLL_INTERVAL));
        }
    }

    /// Listens again after [`Agents::detach_all`]. Does nothing if the launcher is listening.
    ///
    /// # Errors
    /// As for [`Agents::listen`]; this can then be tried again.
    ///
    /// # Panics
    /// If called while [`Agents::detach_all`] is at work in another thread.
    pub fn resume_listening(&self) -> io::Result<()> {
        let mut acceptor = self.acceptor.lock();
        let phase = self.shared.lock().phase;
        assert!(!matches!(phase, Phase::Quiescing { .. }), "agents are being detached");
        if acceptor.is_none() {
            *acceptor = Some(self.shared.acceptor()?);
        }
        self.shared.lock().phase = Phase::Listening;
        Ok(())
    }

    /// Why a snapshot without those processes that have ended since they were detached could not be resumed: others have
    /// their device memory.
    pub fn missed_by_others(&self, away: &Quiesced) -> Option<String> {
        let ended: Vec<_> = away.ended().filter_map(|one| one.process.pid).collect();
        if ended.is_empty() {
            return None;
        }
        let is_there = |owner: u32| {
            !ended.contains(&owner) && away.processes().any(|process| process.pid == Some(owner))
        };
        self.shared.broker.orphan(is_there).map(|orphan| format!("{}: {}", orphan.process, orphan.reason))
    }

    /// Notes the failures of processes that have ended since they were detached: nobody else may hear of these.
    pub fn note_ended(&self, away: &Quiesced) {
        away.ended().for_each(|one| self.shared.note_failure(Some(one.process.clone()), &one.handle));
    }

    /// Waits until every detached process has returned, exited, or executed another program.
    ///
    /// For processes that were killed after the dump and restored by this same launcher, `quiesced` has to be made by
    /// [`Quiesced::expected`]: they count as exited otherwise. The next dump waits for the processes that are still
    /// missing at the end. The time begins anew with each part of device memory that is loaded from the store. A process is
    /// lost for which the store has not answered for that time and the GPU timeout.
    pub fn await_return(&self, quiesced: &Quiesced, deadline: Duration) -> ReturnSummary {
        self.await_return_unless(&|| false, quiesced, deadline)
    }

    /// The same, until nobody wants to know any more.
    pub fn await_return_unless(
        &self,
        is_over: &dyn Fn() -> bool,
        quiesced: &Quiesced,
        deadline: Duration,
    ) -> ReturnSummary {
        let summary = self.await_all(is_over, quiesced, deadline);
        let ended = self.shared.lock().holdings.remove_ended();
        drop(ended);
        self.shared.broker.forget_ended();
        summary
    }

    fn await_all(
        &self,
        is_over: &dyn Fn() -> bool,
        quiesced: &Quiesced,
        deadline: Duration,
    ) -> ReturnSummary {
        let end = Instant::now() + deadline;
        let mut state = self.shared.lock();
        loop {
            let mut summary = state.summarize_return(&quiesced.detached);
            if summary.missing.is_empty() || is_over() {
                return summary;
            }
            let load_limit = deadline + self.shared.gpu_timeout;
            let end = state.holdings.last_load().map_or(end, |(last, is_loading)| {
                end.max(last + if is_loading { load_limit } else { deadline })
            });
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                summary.missing.sort_by_key(|process| process.pid);
                let missing = quiesced.detached.iter().filter(|one| summary.missing.contains(&one.process));
                for missing in missing {
                    self.shared.watch_missing(missing);
                    state.detached.push(missing.clone());
                }
                summary.lost.extend(state.without_an_answer(&summary.missing, load_limit));
                return summary;
            }
            self.shared.wait(&mut state, left.min(PROCESS_POLL_INTERVAL));
        }
    }

    /// Frees the memory that detached processes have parked: they were killed.
    pub fn forget_parked(&self) {
        self.shared.broker.forget_parked();
    }

    /// Takes over the mirrors of processes that are about to be restored, and where these are restored, by their IDs in the
    /// job's PID namespace. The machine's GPUs stay initialised until the job session ends.
    pub fn adopt(
        &self,
        mirrors: impl IntoIterator<Item = (u32, Mirror)>,
        placements: BTreeMap<u32, Placement>,
    ) {
        self.shared.devices.lock().hold_all();
        self.place(placements);
        let mut state = self.shared.lock();
        mirrors.into_iter().for_each(|(pid, mirror)| state.holdings.adopt(pid, mirror));
    }

    /// Drops adopted mirrors of processes that are not expected: those processes have exited.
    pub fn drop_unexpected_mirrors(&self, expected: &Quiesced) {
        let of = |pid| expected.detached.iter().find(|one| one.process.pid == Some(pid));
        let exited = self.shared.lock().holdings.remove_unexpected(|pid| of(pid).map(|one| &one.handle));
        drop(exited);
    }

    /// Returns when no new connection can be made and all existing ones are known.
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
        self.shared.is_closed.store(true, Ordering::Relaxed);
        self.stop_listening();
        for connection in self.shared.lock().connections.values() {
            // Its thread wakes and ends.
            connection.stream.shut_down();
        }
        // The next start needs the memory, which those threads would hold until they have ended.
        self.shared.broker.close();
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
        Acceptor::start(&self.path, move |stream| shared.accept_connection(stream))
    }
}

#[cfg(test)]
mod tests;
