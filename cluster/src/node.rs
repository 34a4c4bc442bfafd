//! The node's side: performs the steps of an attempt, in order, and lets go when the lease ends.
//!
//! ```text
//!              first order of a newer attempt           next order           last step done
//!   Idle -----------------------------------> Step k ---------------> ... ------------------> Idle
//!                                              |  ^
//!          failure, Abort, newer attempt,      |  | same order again: the report again
//!          lease ends before Unblock is done   |
//!                                              v
//!                     Over: checkpoint: packet rule removed, tasks run
//!                           resume: packet rule removed, part killed
//! ```
//!
//! The lease covers a checkpoint from Quiesce to Thaw and a resume from Load to Thaw. If it ends after Unblock is done,
//! the node thaws by itself and the attempt goes on: Unblock is ordered when all nodes have captured, or restored.

use std::time::Duration;

use crate::action::Action;
use crate::messages::{AttemptId, Blame, Message, NodeId, Order, Outcome, SessionState, Step};

/// A node of the job.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    me: NodeId,
    /// The newest attempt that it knows.
    newest: AttemptId,
    attempt: Attempt,
    session: Option<SessionState>,
}

/// What the node knows of its newest attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Attempt {
    /// Empty if the node has learnt of the attempt from its end only.
    steps: &'static [Step],
    coordinator: u32,
    /// Of the steps that are done.
    outcomes: Vec<Outcome>,
    is_in_progress: bool,
    /// While tasks are held.
    lease_end: Option<Duration>,
    /// Why it is over.
    failure: Option<Outcome>,
}

impl Attempt {
    fn is_resume(&self) -> bool {
        self.steps == Step::RESUME
    }

    fn has_done(&self, step: Step) -> bool {
        self.steps.iter().take(self.outcomes.len()).any(|one| *one == step)
    }

    fn current(&self) -> Option<Step> {
        self.steps.get(self.outcomes.len()).copied()
    }
}

fn failed(reason: &str) -> Outcome {
    Outcome::Failed { reason: reason.to_owned(), blame: Blame::Node }
}

impl Node {
    /// A node without a part of the job.
    #[must_use]
    pub fn new(me: NodeId) -> Self {
        Self { me, newest: AttemptId::default(), attempt: Attempt::default(), session: None }
    }

    /// The newest attempt that it knows.
    #[must_use]
    pub fn newest(&self) -> AttemptId {
        self.newest
    }

    /// Its part of the job.
    #[must_use]
    pub fn session(&self) -> Option<SessionState> {
        self.session
    }

    /// When the lease ends, while tasks are held.
    #[must_use]
    pub fn lease_end(&self) -> Option<Duration> {
        self.attempt.lease_end
    }

    /// There is a newer epoch: what a coordinator of an earlier one has begun is over.
    pub fn adopt(&mut self, epoch: u64, actions: &mut Vec<Action>) {
        if self.newest.epoch < epoch {
            self.end_attempt(AttemptId { epoch, number: 0 }, actions);
        }
    }

    /// Takes an order of a coordinator.
    pub fn order(
        &mut self,
        now: Duration,
        from: u32,
        id: AttemptId,
        order: Order,
        actions: &mut Vec<Action>,
    ) {
        let step = order.step();
        if id > self.newest {
            let all = [Step::CHECKPOINT, Step::RESUME];
            let Some(steps) = all.into_iter().find(|steps| steps[0] == step) else { return };
            self.end_attempt(id, actions);
            self.attempt = Attempt { steps, coordinator: from, ..Attempt::default() };
        }
        if id != self.newest {
            return;
        }
        let Some(index) = self.attempt.steps.iter().position(|one| *one == step) else { return };
        if let Some(known) = self.attempt.outcomes.get(index).or(self.attempt.failure.as_ref()) {
            let outcome = known.clone();
            self.report(step, outcome, actions);
        } else if index == self.attempt.outcomes.len() && !self.attempt.is_in_progress {
            self.begin(now, order, actions);
        }
    }

    fn begin(&mut self, now: Duration, order: Order, actions: &mut Vec<Action>) {
        match &order {
            Order::Prepare { session } => {
                let has_it = self.session.is_some_and(|own| own.id == *session && own.is_running);
                if !has_it {
                    return self.fail(failed("no part of the job's session runs here"), actions);
                }
            }
            Order::Quiesce { lease } => self.attempt.lease_end = Some(now + *lease),
            Order::End => self.session = None,
            Order::Load { lease, part, .. } => {
                self.attempt.lease_end = Some(now + *lease);
                self.session = Some(SessionState { id: self.newest, part: *part, is_running: false });
            }
            _ => {}
        }
        self.attempt.is_in_progress = true;
        actions.push(Action::Perform { attempt: self.newest, order });
    }

    /// A step that [`Action::Perform`] began has ended.
    pub fn finished(&mut self, id: AttemptId, step: Step, outcome: Outcome, actions: &mut Vec<Action>) {
        let is_awaited = self.attempt.is_in_progress && self.attempt.current() == Some(step);
        if id != self.newest || !is_awaited {
            return;
        }
        if matches!(outcome, Outcome::Failed { .. }) {
            return self.fail(outcome, actions);
        }
        self.attempt.is_in_progress = false;
        self.attempt.outcomes.push(outcome.clone());
        if step == Step::Thaw {
            self.has_thawed();
        }
        self.report(step, outcome, actions);
    }

    fn has_thawed(&mut self) {
        self.attempt.lease_end = None;
        if let Some(session) = &mut self.session {
            session.is_running = true;
        }
    }

    /// The coordinator has given an attempt up.
    pub fn abort(&mut self, id: AttemptId, actions: &mut Vec<Action>) {
        if id > self.newest || id == self.newest && self.attempt.failure.is_none() {
            self.end_attempt(id, actions);
        }
    }

    /// A session of which this node is no part any more.
    pub fn over(&mut self, session: AttemptId, actions: &mut Vec<Action>) {
        if self.session.is_some_and(|own| own.id == session) {
            self.attempt.lease_end = None;
            self.attempt.is_in_progress = false;
            self.attempt.failure.get_or_insert(failed("the session is over"));
            self.session = None;
            actions.push(Action::Kill);
        }
    }

    /// The part of the job has ended by itself, or was killed.
    pub fn part_ended(&mut self, actions: &mut Vec<Action>) {
        if self.session.take().is_some() && self.attempt.failure.is_none() && self.attempt.current().is_some()
        {
            self.fail(failed("the part of the job has ended"), actions);
        }
    }

    /// Time has passed: nothing is held after the end of the lease.
    pub fn tick(&mut self, now: Duration, actions: &mut Vec<Action>) {
        if self.attempt.lease_end.is_none_or(|end| now < end) {
            return;
        }
        if self.attempt.has_done(Step::Unblock) {
            actions.push(Action::Release);
            self.attempt.outcomes.push(Outcome::Done);
            self.attempt.is_in_progress = false;
            self.has_thawed();
        } else {
            self.fail(failed("the lease has ended"), actions);
        }
    }

    fn fail(&mut self, outcome: Outcome, actions: &mut Vec<Action>) {
        let step = self.attempt.current();
        self.let_go(actions);
        self.attempt.failure = Some(outcome.clone());
        if let Some(step) = step {
            self.report(step, outcome, actions);
        }
    }

    /// Ends what is open, and takes `id` for an attempt that is over.
    fn end_attempt(&mut self, id: AttemptId, actions: &mut Vec<Action>) {
        self.let_go(actions);
        self.newest = id;
        self.attempt.failure = Some(failed("the attempt is over"));
    }

    fn let_go(&mut self, actions: &mut Vec<Action>) {
        let is_held = self.attempt.lease_end.take().is_some();
        let was_in_progress = std::mem::take(&mut self.attempt.is_in_progress);
        if is_held && self.attempt.is_resume() {
            self.session = None;
            actions.push(Action::Kill);
        } else if is_held || was_in_progress && self.attempt.current() != Some(Step::End) {
            actions.push(Action::Release);
        }
    }

    fn report(&self, step: Step, outcome: Outcome, actions: &mut Vec<Action>) {
        let message = Message::Report { node: self.me, attempt: self.newest, step, outcome };
        actions.push(Action::Send { to: self.attempt.coordinator, message });
    }
}
