//! One attempt of a snapshot or a resume at this node, as the thread that performs its steps sees it.
//!
//! ```text
//!   host thread                        checkpointer, or the thread that resumes
//!   order(step)  ------------------->  wait(step), performs it
//!               <-------------------   done(step)
//!   close(), commit()  ------------->  wait() fails, wait_end() returns
//! ```
//!
//! The packet rule of the attempt is kept here: whatever that thread does, the host removes the rule when the lease ends.

use super::host::Input;
use super::packet_rule::PacketRule;
use super::progress::{self, Released};
use crate::agents::JobLead;
use ckpt_cluster::{AttemptId, Blame, Outcome, Step};
use ckpt_cut::{FromLauncher, ToLauncher};
use ckpt_snapshot::faults;
use crossbeam_channel::Sender;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// How an attempt has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GateEnd {
    /// The log has the global manifest.
    Committed {
        /// For how long no part of the job has done anything, as far as that is known, in milliseconds.
        idle_ms: Option<u64>,
    },
    /// It was given up: there is no snapshot, and will be none.
    Aborted(String),
    /// The job is over, and nobody here knows whether the log has it.
    Unknown(String),
}

/// See the module.
pub struct Gate {
    attempt: AttemptId,
    host: Sender<Input>,
    is_to_stop: Arc<AtomicBool>,
    is_durable: bool,
    state: Mutex<State>,
    changed: Condvar,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("attempt", &self.attempt).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    ordered: Vec<Step>,
    done: Vec<Step>,
    rule: Option<PacketRule>,
    blocked_since: Option<Instant>,
    released: Option<Released>,
    /// Sockets of the job whose connections have to move on after the release.
    watched: BTreeSet<u64>,
    /// Takes what the coordinator says of the cut of the job's ranks.
    take_cut: Option<Arc<dyn Fn(ToLauncher) + Send + Sync>>,
    /// Whether addresses are those of nodes.
    located: BTreeMap<IpAddr, bool>,
    interrupt: Option<Box<dyn FnOnce() + Send>>,
    end: Option<GateEnd>,
}

impl Gate {
    /// Of an attempt whose first step is ordered. The job `is_to_stop` after it.
    pub(super) fn new(
        attempt: AttemptId,
        first: Step,
        host: Sender<Input>,
        is_to_stop: Arc<AtomicBool>,
    ) -> Self {
        let state = State { ordered: vec![first], ..State::default() };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Self { attempt, host, is_to_stop, is_durable: true, state, changed }
    }

    pub(super) fn with_durability(self, is_durable: bool) -> Self {
        Self { is_durable, ..self }
    }

    /// Whether the parts go to the stores of the nodes; otherwise to memory only.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        self.is_durable
    }

    /// Whether the job is to stop after the attempt, which has to be short then.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.is_to_stop.load(Ordering::Relaxed)
    }

    /// The attempt.
    #[must_use]
    pub fn attempt(&self) -> AttemptId {
        self.attempt
    }

    /// Orders a step. If the attempt is over, returns how it has ended: nobody performs the step.
    pub(super) fn order(&self, step: Step) -> Option<GateEnd> {
        let mut state = self.state.lock();
        if state.end.is_none() {
            state.ordered.push(step);
            self.changed.notify_all();
        }
        state.end.clone()
    }

    /// The attempt is over: the packet rule is removed now, and waits end. Returns the step that was ordered last.
    pub(super) fn close(&self, end: GateEnd) -> Option<Step> {
        let mut state = self.state.lock();
        state.end.get_or_insert(end);
        state.rule = None;
        self.changed.notify_all();
        let (last, interrupt) = (state.ordered.last().copied(), state.interrupt.take());
        drop(state);
        interrupt.into_iter().for_each(|interrupt| interrupt());
        last
    }

    /// Performs what the attempt can do without, unless the attempt is over. `interrupt` is called when it is over meanwhile.
    pub fn interruptible(&self, interrupt: Box<dyn FnOnce() + Send>, perform: impl FnOnce()) {
        {
            let mut state = self.state.lock();
            if state.end.is_some() {
                return;
            }
            state.interrupt = Some(interrupt);
        }
        perform();
        self.state.lock().interrupt = None;
    }

    /// Whether a step is done.
    #[must_use]
    pub fn has_done(&self, step: Step) -> bool {
        self.state.lock().done.contains(&step)
    }

    /// Why it is over, if it is.
    #[must_use]
    pub fn end(&self) -> Option<GateEnd> {
        self.state.lock().end.clone()
    }

    /// Waits until the step is ordered.
    ///
    /// # Errors
    /// Why the attempt is over.
    pub fn wait(&self, step: Step) -> Result<(), String> {
        let mut state = self.state.lock();
        loop {
            match &state.end {
                Some(GateEnd::Aborted(why) | GateEnd::Unknown(why)) => return Err(why.clone()),
                _ if state.ordered.contains(&step) => return Ok(()),
                _ => self.changed.wait(&mut state),
            }
        }
    }

    /// Reports for how long the part has done nothing, in milliseconds.
    pub fn is_idle_for(&self, idle_ms: u64) {
        let _ = self.host.send(Input::Progress { idle_ms });
    }

    /// Reports a step as done.
    pub fn done(&self, step: Step, outcome: Outcome) {
        let mut state = self.state.lock();
        state.done.push(step);
        // Before a part is restored, no connection of it repeats anything.
        if step == Step::Load && state.blocked_since.is_some() {
            state.blocked_since = Some(Instant::now());
        }
        drop(state);
        let _ = self.host.send(Input::Finished { attempt: self.attempt, step, outcome });
    }

    /// Reports that the present step has failed. The attempt is over.
    pub fn fail(&self, reason: &str, blame: Blame) {
        if let Some(step) = self.close(GateEnd::Aborted(reason.to_owned())) {
            let outcome = Outcome::Failed { reason: reason.to_owned(), blame };
            let _ = self.host.send(Input::Finished { attempt: self.attempt, step, outcome });
        }
    }

    /// Keeps the packet rule until it is removed.
    ///
    /// # Errors
    /// Why the attempt is over. The rule is removed then.
    pub fn keep_rule(&self, rule: PacketRule) -> Result<(), String> {
        let mut state = self.state.lock();
        match &state.end {
            Some(GateEnd::Aborted(why) | GateEnd::Unknown(why)) => Err(why.clone()),
            _ => {
                state.rule = Some(rule);
                state.blocked_since.get_or_insert_with(Instant::now);
                Ok(())
            }
        }
    }

    /// Whether the packet rule has this port; false without a rule.
    #[must_use]
    pub fn blocks(&self, port: u16) -> bool {
        self.state.lock().rule.as_ref().is_some_and(|rule| rule.ports().contains(&port))
    }

    /// Waits for Unblock and removes the packet rule, then for Thaw. The caller lets the tasks run.
    ///
    /// # Errors
    /// Why the attempt is over.
    pub fn release(&self) -> Result<(), String> {
        self.wait(Step::Unblock)?;
        let rule = self.state.lock().rule.take();
        rule.into_iter().for_each(remove);
        let mut state = self.state.lock();
        let at = Instant::now();
        state.released = state.blocked_since.map(|since| Released { at, blocked: at - since });
        drop(state);
        self.done(Step::Unblock, Outcome::Done);
        self.wait(Step::Thaw)
    }

    /// The connections of these sockets of the job have to move on after the release.
    pub fn watch(&self, inodes: BTreeSet<u64>) {
        self.state.lock().watched = inodes;
    }

    /// Waits for Prove, looks whether the job's connections to other nodes move on, and reports that.
    pub fn prove(&self) {
        if self.wait(Step::Prove).is_err() {
            return;
        }
        let (watched, released) = {
            let state = self.state.lock();
            (state.watched.clone(), state.released)
        };
        let is_over = || self.end().is_some();
        let still = released.filter(|_| !watched.is_empty()).and_then(|released| {
            progress::find_still(&watched, released, |remote| self.is_node(remote), is_over)
        });
        match still {
            None => self.done(Step::Prove, Outcome::Done),
            Some(still) => self.fail(&still.what, Blame::Node),
        }
    }

    /// Asks the coordinator whether this is the address of a node. No, if the attempt is over.
    #[must_use]
    pub fn is_node(&self, address: IpAddr) -> bool {
        let _ = self.host.send(Input::Locate { address });
        let mut state = self.state.lock();
        loop {
            match state.located.get(&address) {
                Some(is_node) => return *is_node,
                None if state.end.is_some() => return false,
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// The coordinator's answer.
    pub(super) fn located(&self, address: IpAddr, is_node: bool) {
        self.state.lock().located.insert(address, is_node);
        self.changed.notify_all();
    }

    /// What the coordinator says of the cut of the job's ranks.
    pub(super) fn cut(&self, message: ToLauncher) {
        let state = self.state.lock();
        let take = state.take_cut.clone().filter(|_| state.end.is_none());
        drop(state);
        if let Some(take) = take {
            take(message);
        }
    }

    /// Waits for the end of the attempt.
    #[must_use]
    pub fn wait_end(&self) -> GateEnd {
        let mut state = self.state.lock();
        loop {
            match &state.end {
                Some(end) => return end.clone(),
                None => self.changed.wait(&mut state),
            }
        }
    }
}

impl JobLead for Gate {
    fn listen(&self, take: Arc<dyn Fn(ToLauncher) + Send + Sync>) {
        self.state.lock().take_cut = Some(take);
    }

    fn tell(&self, message: FromLauncher) {
        let _ = self.host.send(Input::Ranks { attempt: self.attempt, message });
    }
}

fn remove(rule: PacketRule) {
    match faults::hit("rule-removed") {
        Ok(()) => drop(rule),
        // As if the kernel had not removed it.
        Err(_) => std::mem::forget(rule),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_attempt_can_do_without_ends_with_it() {
        let attempt = AttemptId { epoch: 1, number: 1 };
        let gate = || {
            let (host, _) = crossbeam_channel::unbounded();
            Gate::new(attempt, Step::Prepare, host, Arc::default())
        };
        let calls = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let interrupt = || -> Box<dyn FnOnce() + Send> {
            let calls = Arc::clone(&calls);
            Box::new(move || {
                calls.fetch_add(1, Ordering::Relaxed);
            })
        };
        let called = || calls.load(Ordering::Relaxed);
        let committed = GateEnd::Committed { idle_ms: None };

        let one = gate();
        let mut is_performed = false;
        one.interruptible(interrupt(), || is_performed = true);
        assert!(is_performed);
        one.close(committed.clone());
        assert_eq!(called(), 0, "it was over before");

        let one = gate();
        one.interruptible(interrupt(), || {
            one.close(GateEnd::Aborted("the job is to end".to_owned()));
            assert_eq!(called(), 1);
        });
        one.interruptible(interrupt(), || panic!("the attempt is over"));
        one.close(committed);
        assert_eq!(called(), 1);
    }
}
