//! The consistent cut over NCCL's collectives: before a dump, all ranks of the job stop at the same step
//! (`docs/design/collectives.md`). A rank is a connection whose agent supports it.
//!
//! ```text
//!            reach_cut            the cut, and all connections are known
//!   free ----------------> wanted --------------------------------------> held: detach, dump, return
//!    ^                       | no cut, or not in time                       |        ^
//!    +-----------------------+----------------------------------------------+        | hold_cut: before a
//!         HeldCut is dropped, and all detached processes are back: Release           | restore
//! ```
//!
//! While a cut is wanted, the coordinator decides what each rank is told. While it is held, ranks disconnect and return
//! and stay parked. An agent that returns later than the release is released when it registers.
//!
//! The cut counts only when no process is unknown: the launcher stops listening, waits for the hello of every connection,
//! and looks again. The listener stays off until the agents are detached.
//!
//! No rank is released before all detached processes are back: it would use memory that its peers still restore.
//! Orders go through one queue, so that each agent gets them in their order. An agent that cannot be told loses its
//! connection, and then releases its process itself.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use ckpt_cut::{Coordinator, Order, RankId, Report, Settings, State as CutState};
use ckpt_protocol::agent::ToAgent;
use tracing::{debug, warn};

use super::process::QuiesceError;
use super::state::{Phase, State};
use super::{Agents, STACK_BYTES, Shared};
use crate::sys::deadline::{CUT_ATTEMPTS, CUT_BACK_OFF, CUT_TIMEOUT, PROCESS_POLL_INTERVAL};

/// The state of the cut.
pub(super) struct Cut {
    coordinator: Coordinator,
    ranks: BTreeSet<u64>,
    /// The zero of the coordinator's clock.
    epoch: Instant,
    /// The number of the request or hold that has not been released.
    hold: Option<u64>,
    /// The number of the newest one.
    newest: u64,
    /// Orders that have not been sent, by connection.
    orders: VecDeque<(u64, Order)>,
}

impl Default for Cut {
    fn default() -> Self {
        Self::new(Settings { timeout: CUT_TIMEOUT, attempts: CUT_ATTEMPTS, back_off: CUT_BACK_OFF })
    }
}

impl Cut {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            coordinator: Coordinator::new(settings),
            ranks: BTreeSet::new(),
            epoch: Instant::now(),
            hold: None,
            newest: 0,
            orders: VecDeque::new(),
        }
    }

    /// An agent that supports the cut has registered; `is_back` if it had been away.
    pub(super) fn join(&mut self, connection: u64, is_back: bool) {
        self.ranks.insert(connection);
        self.coordinator.join(RankId(connection), self.epoch.elapsed());
        if is_back && self.hold.is_none() {
            self.orders.push_back((connection, Order::Release));
        }
        self.queue_orders();
    }

    /// A connection has ended.
    pub(super) fn leave(&mut self, connection: u64) {
        if self.ranks.remove(&connection) {
            self.coordinator.leave(RankId(connection));
            self.queue_orders();
        }
    }

    fn queue_orders(&mut self) {
        self.orders.extend(self.coordinator.take_orders().into_iter().map(|(rank, order)| (rank.0, order)));
    }

    fn hold(&mut self) -> u64 {
        // All processes of an earlier hold are back.
        self.release();
        self.newest += 1;
        self.hold = Some(self.newest);
        self.newest
    }

    fn request(&mut self) -> u64 {
        let hold = self.hold();
        self.coordinator.request(self.epoch.elapsed());
        self.queue_orders();
        hold
    }

    fn tick(&mut self) {
        self.coordinator.tick(self.epoch.elapsed());
        self.queue_orders();
    }

    /// The cut is reached: the ranks stay parked, whatever connections come and go.
    fn keep(&mut self) {
        self.coordinator.release();
        drop(self.coordinator.take_orders());
    }

    fn release(&mut self) {
        if self.hold.take().is_some() {
            if *self.coordinator.state() == CutState::Idle {
                self.orders.extend(self.ranks.iter().map(|rank| (*rank, Order::Release)));
            }
            // After a failure, or during a back-off, the ranks run already.
            self.coordinator.release();
            self.queue_orders();
        }
    }
}

/// The ranks of the job are parked, or have been told to park. Dropping this releases them, once all detached processes are
/// back.
#[must_use = "the ranks are released when this is dropped"]
pub struct HeldCut<'a> {
    agents: &'a Agents,
    hold: u64,
    /// Since when ranks are parked without a break.
    pub parked_since: Instant,
    /// What the cut has taken; `None` if no process has a communicator.
    pub cost: Option<CutCost>,
}

/// What it took to reach a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CutCost {
    /// From the request to the cut.
    pub duration: Duration,
    /// Number of attempts.
    pub attempts: u32,
}

impl Agents {
    /// Has all ranks stop at a consistent cut, for `limit` at most. Then no connection can be made until the agents are
    /// detached, or the cut is dropped. Ends early if `is_over`: the checkpoint is not wanted any more.
    ///
    /// # Errors
    /// [`QuiesceError::NoCut`] if the attempts are used up, [`QuiesceError::Withdrawn`] if it is over,
    /// [`QuiesceError::Deadline`] if an agent has not said hello or not returned, and [`QuiesceError::NotListening`]. All
    /// ranks run on.
    pub fn reach_cut(
        &self,
        limit: Duration,
        is_over: &dyn Fn() -> bool,
    ) -> Result<HeldCut<'_>, QuiesceError> {
        let called = Instant::now();
        let end = called + limit;
        let hold = self.await_all_returned(limit, end)?.cut.request();
        let begun = Instant::now();
        let mut held = HeldCut { agents: self, hold, parked_since: begun, cost: None };
        let mut attempts = 1;
        let mut is_listening = true;
        loop {
            self.shared.send_orders();
            let mut state = self.shared.lock();
            state.cut.tick();
            if state.cut.coordinator.tries() > attempts {
                attempts = state.cut.coordinator.tries();
                held.parked_since = Instant::now();
            }
            match state.cut_progress(is_listening) {
                Progress::Reached => {
                    let has_communicators = state.cut.coordinator.has_communicators();
                    held.cost = has_communicators.then(|| CutCost { duration: begun.elapsed(), attempts });
                    state.cut.keep();
                    return Ok(held);
                }
                Progress::Failed(reason) => {
                    return Err(QuiesceError::NoCut { reason, after: called.elapsed() });
                }
                Progress::Confirm => {
                    drop(state);
                    self.stop_listening();
                    is_listening = false;
                }
                Progress::Undone => {
                    drop(state);
                    self.listen_for_ranks();
                    is_listening = true;
                }
                Progress::Waiting if is_over() => return Err(QuiesceError::Withdrawn),
                Progress::Waiting if Instant::now() >= end => {
                    if *state.cut.coordinator.state() == CutState::Cut {
                        return Err(QuiesceError::Deadline {
                            deadline: limit,
                            unanswered: state.unsettled(),
                        });
                    }
                    state.cut.coordinator.give_up();
                    state.cut.queue_orders();
                }
                Progress::Waiting => self.shared.wait(&mut state, PROCESS_POLL_INTERVAL),
            }
        }
    }

    /// Keeps the ranks parked that a restore brings back, until this is dropped.
    pub fn hold_cut(&self) -> HeldCut<'_> {
        let hold = self.shared.lock().cut.hold();
        HeldCut { agents: self, hold, parked_since: Instant::now(), cost: None }
    }

    /// Listens again if the cut has stopped that. Otherwise tried again when the next cut ends.
    fn listen_for_ranks(&self) {
        let phase = self.shared.lock().phase;
        if phase == Phase::Listening
            && let Err(error) = self.resume_listening()
        {
            warn!("the interposer in new processes cannot connect until the next checkpoint: {error}");
        }
    }
}

impl Drop for HeldCut<'_> {
    fn drop(&mut self) {
        self.agents.listen_for_ranks();
        let (shared, hold) = (Arc::clone(&self.agents.shared), self.hold);
        if shared.release_cut(hold) {
            return;
        }
        let release_when_back = move || {
            while !shared.release_cut(hold) && !shared.is_closed.load(Ordering::Relaxed) {
                thread::sleep(PROCESS_POLL_INTERVAL);
            }
        };
        let thread = thread::Builder::new().name("cut-release".to_owned()).stack_size(STACK_BYTES);
        if thread.spawn(release_when_back.clone()).is_err() {
            release_when_back();
        }
    }
}

/// What the loop of [`Agents::reach_cut`] does next.
enum Progress {
    /// The ranks have reached the cut: stop listening, to find out whether any process is unknown.
    Confirm,
    /// It is a cut of all processes.
    Reached,
    /// It is not one any more: new ranks have to be able to connect.
    Undone,
    /// Why there is none, for the user.
    Failed(String),
    Waiting,
}

impl State {
    fn cut_progress(&mut self, is_listening: bool) -> Progress {
        self.detached.retain(|one| !one.handle.has_ended());
        if let CutState::Failed(failure) = self.cut.coordinator.state() {
            return Progress::Failed(failure.describe(|rank| self.name_of_rank(rank)));
        }
        // A process that detaches late, for an earlier attempt, has to return.
        let is_cut = *self.cut.coordinator.state() == CutState::Cut && self.detached.is_empty();
        match (is_cut, is_listening) {
            (true, true) => Progress::Confirm,
            (true, false) if self.unsettled().is_empty() => Progress::Reached,
            (false, false) => Progress::Undone,
            _ => Progress::Waiting,
        }
    }

    fn name_of_rank(&self, rank: RankId) -> String {
        let connection = self.connections.get(&rank.0);
        connection.map_or_else(|| "a process that has ended".to_owned(), |one| one.process.to_string())
    }

    /// Processes that may be ranks, and those that have not answered an earlier request to detach.
    fn unsettled(&self) -> Vec<super::Process> {
        let is_settled = |one: &super::state::Connection| one.is_registered && one.asked.is_none();
        self.connections.values().filter(|one| !is_settled(one)).map(|one| one.process.clone()).collect()
    }
}

impl Shared {
    /// Releases the ranks, unless a later request has. Returns false if a detached process is not back yet.
    fn release_cut(&self, hold: u64) -> bool {
        let mut state = self.lock();
        state.detached.retain(|one| !one.handle.has_ended());
        if state.cut.hold == Some(hold) {
            if !state.detached.is_empty() {
                return false;
            }
            state.cut.release();
        }
        drop(state);
        self.send_orders();
        true
    }

    /// Takes a rank's report.
    pub(super) fn receive_steps(&self, id: u64, report: Report) {
        let mut state = self.lock();
        state.cut.coordinator.receive(RankId(id), report);
        state.cut.queue_orders();
        self.changed.notify_all();
        drop(state);
        self.send_orders();
    }

    /// Sends the orders that are waiting, also those of other threads.
    pub(super) fn send_orders(&self) {
        let _sending = self.sending_orders.lock();
        loop {
            let mut state = self.lock();
            let Some((id, order)) = state.cut.orders.pop_front() else { return };
            let stream = state.connections.get(&id).map(|connection| Arc::clone(&connection.stream));
            drop(state);
            let Some(stream) = stream else { continue };
            if let Err(error) = stream.send(&ToAgent::Cut { order }) {
                debug!(id, error = &error as &dyn std::error::Error, "a rank cannot be told about the cut");
                stream.shut_down();
            }
        }
    }
}

#[cfg(test)]
mod tests;
