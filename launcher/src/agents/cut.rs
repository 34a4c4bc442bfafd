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
//! and says so. The listener stays off until the agents are detached.
//!
//! The coordinator is here ([`JobCut`] with one launcher), or serves the launchers of all nodes ([`JobLead`]).
//!
//! No rank is released before all detached processes are back: it would use memory that its peers still restore.
//! Orders go through one queue, so that each agent gets them in their order. An agent that cannot be told loses its
//! connection, and then releases its process itself.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use ckpt_cut::{FromLauncher, JobCut, NamedRank, Order, Report, Settings, ToLauncher};
use ckpt_protocol::agent::ToAgent;
use tracing::{debug, warn};

use super::process::QuiesceError;
use super::state::{Phase, State};
use super::{Agents, STACK_BYTES, Shared};
use crate::sys::deadline::{CUT_ATTEMPTS, CUT_BACK_OFF, CUT_TIMEOUT, PROCESS_POLL_INTERVAL};

/// Times and tries of a cut.
pub const SETTINGS: Settings =
    Settings { timeout: CUT_TIMEOUT, attempts: CUT_ATTEMPTS, back_off: CUT_BACK_OFF };

/// The way to the coordinator of a job on several nodes, for one cut.
pub trait JobLead: Send + Sync {
    /// Has `take` called with what the coordinator tells this launcher.
    fn listen(&self, take: Arc<dyn Fn(ToLauncher) + Send + Sync>);

    /// Tells the coordinator. Must not block.
    fn tell(&self, message: FromLauncher);
}

/// The state of the cut.
pub(super) struct Cut {
    /// The coordinator, unless there is a lead.
    own: JobCut,
    lead: Option<Arc<dyn JobLead>>,
    /// Names of the ranks, by connection.
    ranks: BTreeMap<u64, String>,
    /// The zero of the coordinator's clock.
    epoch: Instant,
    /// The number of the request or hold that has not been released.
    hold: Option<u64>,
    /// The number of the newest one.
    newest: u64,
    /// The coordinator has been asked for a cut, and has not answered.
    is_wanted: bool,
    /// No connection is to be accepted: the number of the coordinator's message.
    close: Option<u64>,
    /// What the coordinator has answered.
    answer: Option<Result<CutAnswer, String>>,
    /// There is no cut, and no rank of this launcher is parked.
    has_failed: bool,
    /// Since when ranks are parked without a break.
    parked_since: Option<Instant>,
    /// Orders that have not been sent, by connection.
    orders: VecDeque<(u64, Order)>,
}

/// A cut.
#[derive(Clone, Copy)]
struct CutAnswer {
    has_communicators: bool,
    attempts: u32,
}

impl Default for Cut {
    fn default() -> Self {
        Self::new(SETTINGS)
    }
}

impl Cut {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            own: JobCut::new(settings, 1),
            lead: None,
            ranks: BTreeMap::new(),
            epoch: Instant::now(),
            hold: None,
            newest: 0,
            is_wanted: false,
            close: None,
            answer: None,
            has_failed: false,
            parked_since: None,
            orders: VecDeque::new(),
        }
    }

    /// An agent that supports the cut has registered; `is_back` if it had been away.
    pub(super) fn join(&mut self, connection: u64, name: String, is_back: bool) {
        self.ranks.insert(connection, name.clone());
        // Also after a failure, of which the rank has not heard.
        if is_back && (self.hold.is_none() || self.has_failed) {
            self.orders.push_back((connection, Order::Release));
        }
        self.tell(FromLauncher::Joined { rank: NamedRank { connection, name } });
    }

    /// A connection has ended.
    pub(super) fn leave(&mut self, connection: u64) {
        if self.ranks.remove(&connection).is_some() {
            self.tell(FromLauncher::Left { connection });
        }
    }

    /// Tells the coordinator, if a cut is wanted.
    fn tell(&mut self, message: FromLauncher) {
        match &self.lead {
            _ if !self.is_wanted => {}
            Some(lead) => lead.tell(message),
            None => {
                self.own.receive(self.epoch.elapsed(), 0, message);
                self.take_own();
            }
        }
    }

    fn take_own(&mut self) {
        self.own.take_messages().into_iter().for_each(|(_, message)| self.take(message));
    }

    /// The coordinator says something.
    fn take(&mut self, message: ToLauncher) {
        match message {
            _ if !self.is_wanted => {}
            ToLauncher::Order { connection, order } => {
                match &order {
                    Order::Count { .. } => {
                        self.parked_since.get_or_insert_with(Instant::now);
                    }
                    Order::Release => self.parked_since = None,
                    Order::Reach { .. } => {}
                }
                self.orders.push_back((connection, order));
            }
            ToLauncher::Close { round } => self.close = Some(round),
            ToLauncher::Open => self.close = None,
            ToLauncher::Reached { has_communicators, attempts } => {
                self.is_wanted = false;
                self.answer = Some(Ok(CutAnswer { has_communicators, attempts }));
            }
            ToLauncher::Failed { why } => {
                (self.is_wanted, self.has_failed) = (false, true);
                self.answer = Some(Err(why));
            }
        }
    }

    fn hold(&mut self) -> u64 {
        // All processes of an earlier hold are back.
        self.release();
        self.newest += 1;
        self.hold = Some(self.newest);
        self.newest
    }

    fn request(&mut self, lead: Option<Arc<dyn JobLead>>) -> u64 {
        let hold = self.hold();
        (self.is_wanted, self.close, self.answer, self.lead) = (true, None, None, lead);
        self.own.begin();
        let named =
            |(connection, name): (&u64, &String)| NamedRank { connection: *connection, name: name.clone() };
        let ranks = Some(self.ranks.iter().map(named).collect());
        self.tell(FromLauncher::Begin { ranks });
        hold
    }

    fn tick(&mut self) {
        self.own.tick(self.epoch.elapsed());
        self.take_own();
    }

    fn release(&mut self) {
        if self.hold.take().is_some() {
            (self.is_wanted, self.lead) = (false, None);
            self.own.end();
            self.parked_since = None;
            // After a failure, all ranks run already. Otherwise, some of the orders that release them may be under way.
            if !std::mem::take(&mut self.has_failed) {
                self.orders.extend(self.ranks.keys().map(|rank| (*rank, Order::Release)));
            }
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
    /// Has all ranks stop at a consistent cut, for `limit` at most; with a `lead`, those of all nodes. Then no connection
    /// can be made until the agents are detached, or the cut is dropped. Ends early if `is_over`: the checkpoint is not
    /// wanted any more.
    ///
    /// # Errors
    /// [`QuiesceError::NoCut`] if the attempts are used up, [`QuiesceError::Withdrawn`] if it is over,
    /// [`QuiesceError::Deadline`] if an agent has not said hello or not returned, and [`QuiesceError::NotListening`]. All
    /// ranks run on.
    pub fn reach_cut(
        &self,
        limit: Duration,
        lead: Option<Arc<dyn JobLead>>,
        is_over: &dyn Fn() -> bool,
    ) -> Result<HeldCut<'_>, QuiesceError> {
        let called = Instant::now();
        let end = called + limit;
        let mut held = self.request_cut(limit, end, lead)?;
        let begun = held.parked_since;
        let (mut is_listening, mut closed, mut has_given_up) = (true, None, false);
        loop {
            self.shared.send_orders();
            let mut state = self.shared.lock();
            state.cut.tick();
            state.detached.retain(|one| !one.handle.has_ended());
            match state.cut.answer.take() {
                Some(Ok(CutAnswer { has_communicators, attempts })) => {
                    held.parked_since = state.cut.parked_since.unwrap_or(begun);
                    held.cost = has_communicators.then(|| CutCost { duration: begun.elapsed(), attempts });
                    return Ok(held);
                }
                Some(Err(reason)) => {
                    let no_cut = QuiesceError::NoCut { reason, after: called.elapsed() };
                    return Err(state.unanswered(called.elapsed()).unwrap_or(no_cut));
                }
                None => {}
            }
            // A process that detaches late, for an earlier attempt, has to return.
            let closes = state.cut.close.filter(|_| state.detached.is_empty());
            match closes {
                Some(_) if is_listening => {
                    drop(state);
                    self.stop_listening();
                    is_listening = false;
                }
                Some(round) if closed != Some(round) && state.unsettled().is_empty() => {
                    closed = Some(round);
                    state.cut.tell(FromLauncher::Closed { round });
                }
                None if !is_listening => {
                    drop(state);
                    self.listen_for_ranks();
                    is_listening = true;
                }
                _ if is_over() => return Err(QuiesceError::Withdrawn),
                _ if Instant::now() >= end && !has_given_up => {
                    // The answer is that there is none, and why.
                    has_given_up = true;
                    state.cut.tell(FromLauncher::GivesUp);
                }
                _ => self.shared.wait(&mut state, PROCESS_POLL_INTERVAL),
            }
        }
    }

    /// Asks the coordinator for a cut, once no process is away, or fails at `end`.
    fn request_cut(
        &self,
        limit: Duration,
        end: Instant,
        lead: Option<Arc<dyn JobLead>>,
    ) -> Result<HeldCut<'_>, QuiesceError> {
        let mut state = self.await_all_returned(limit, end)?;
        if let Some(lead) = &lead {
            let (shared, hold) = (Arc::downgrade(&self.shared), state.cut.newest + 1);
            lead.listen(Arc::new(move |message| {
                if let Some(shared) = shared.upgrade() {
                    shared.take_from_lead(hold, message);
                }
            }));
        }
        let hold = state.cut.request(lead);
        Ok(HeldCut { agents: self, hold, parked_since: Instant::now(), cost: None })
    }

    /// Keeps the ranks parked that a restore brings back, until this is dropped.
    pub fn hold_cut(&self) -> HeldCut<'_> {
        let mut state = self.shared.lock();
        let hold = state.cut.hold();
        drop(state);
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

impl State {
    /// The error of a request that has failed because processes are unknown here, if that is so.
    fn unanswered(&self, deadline: Duration) -> Option<QuiesceError> {
        let unanswered = self.unsettled();
        let is_reason = self.cut.close.is_some() && !unanswered.is_empty();
        is_reason.then_some(QuiesceError::Deadline { deadline, unanswered })
    }

    /// Processes that may be ranks, and those that have not answered an earlier request to detach, or have not returned.
    fn unsettled(&self) -> Vec<super::Process> {
        let is_settled = |one: &super::state::Connection| one.is_registered && one.asked.is_none();
        let connected = self.connections.values().filter(|one| !is_settled(one)).map(|one| &one.process);
        connected.chain(self.detached.iter().map(|one| &one.process)).cloned().collect()
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
        state.cut.tell(FromLauncher::Report { connection: id, report });
        self.changed.notify_all();
        drop(state);
        self.send_orders();
    }

    /// The coordinator of all nodes has a message, for the request with this number. Its orders are sent by the thread that
    /// has made the request.
    fn take_from_lead(&self, hold: u64, message: ToLauncher) {
        let mut state = self.lock();
        if state.cut.hold == Some(hold) {
            state.cut.take(message);
            self.changed.notify_all();
        }
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
