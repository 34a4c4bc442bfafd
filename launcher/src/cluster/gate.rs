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
use ckpt_cluster::{AttemptId, Outcome, Step};
use crossbeam_channel::Sender;
use parking_lot::{Condvar, Mutex};

/// How an attempt has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GateEnd {
    /// The log has the global manifest.
    Committed,
    /// It was given up: there is no snapshot, and will be none.
    Aborted(String),
    /// The job is over, and nobody here knows whether the log has it.
    Unknown(String),
}

/// See the module.
#[derive(Debug)]
pub struct Gate {
    attempt: AttemptId,
    host: Sender<Input>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    ordered: Vec<Step>,
    done: Vec<Step>,
    rule: Option<PacketRule>,
    end: Option<GateEnd>,
}

impl Gate {
    /// Of an attempt whose first step is ordered.
    pub(super) fn new(attempt: AttemptId, first: Step, host: Sender<Input>) -> Self {
        let state = State { ordered: vec![first], ..State::default() };
        Self { attempt, host, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// The attempt.
    #[must_use]
    pub fn attempt(&self) -> AttemptId {
        self.attempt
    }

    /// Orders a step.
    pub(super) fn order(&self, step: Step) {
        self.state.lock().ordered.push(step);
        self.changed.notify_all();
    }

    /// The attempt is over: the packet rule is removed now, and waits end.
    pub(super) fn close(&self, end: GateEnd) {
        let mut state = self.state.lock();
        state.end.get_or_insert(end);
        state.rule = None;
        self.changed.notify_all();
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

    /// Reports a step as done.
    pub fn done(&self, step: Step, outcome: Outcome) {
        self.state.lock().done.push(step);
        let _ = self.host.send(Input::Finished { attempt: self.attempt, step, outcome });
    }

    /// Reports that the present step has failed. The attempt is over.
    pub fn fail(&self, reason: &str, blames_snapshot: bool) {
        let step = self.state.lock().ordered.last().copied();
        self.close(GateEnd::Aborted(reason.to_owned()));
        if let Some(step) = step {
            let outcome = Outcome::Failed { reason: reason.to_owned(), blames_snapshot };
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
        drop(self.state.lock().rule.take());
        self.done(Step::Unblock, Outcome::Done);
        self.wait(Step::Thaw)
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
