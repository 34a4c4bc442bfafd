//! One attempt: its steps, with a barrier after each.

use std::time::Duration;

use crate::action::{Action, Settings};
use crate::log::PartId;
use crate::messages::{AttemptId, Message, NodeId, Order, Outcome, Step};

/// Nodes for which the others have waited for this long in one step are named.
pub(super) const SLOW: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Checkpoint {
        session: AttemptId,
    },
    /// From a snapshot, or from the beginning.
    Resume {
        from: Option<AttemptId>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Attempt {
    pub(super) id: AttemptId,
    pub(super) kind: Kind,
    /// By part.
    pub(super) nodes: Vec<NodeId>,
    /// Nodes without a part, which end what they have of earlier sessions.
    others: Vec<NodeId>,
    /// By part: of what was stored, or of what is to be loaded.
    pub(super) hashes: Vec<String>,
    index: usize,
    /// The orders of this step, and which are done; by node.
    orders: Vec<(NodeId, Order, bool)>,
    /// How many are not done.
    open: usize,
    /// Since when at least half of the nodes wait for the others.
    waits_since: Option<Duration>,
    /// The others were named.
    are_told: bool,
    pub(super) deadline: Duration,
    repeat_at: Duration,
}

impl Attempt {
    pub(super) fn new(
        id: AttemptId,
        kind: Kind,
        nodes: Vec<NodeId>,
        others: Vec<NodeId>,
        mut hashes: Vec<String>,
    ) -> Self {
        if matches!(kind, Kind::Checkpoint { .. }) {
            hashes = vec![String::new(); nodes.len()];
        }
        Self {
            id,
            kind,
            nodes,
            others,
            hashes,
            index: 0,
            orders: Vec::new(),
            open: 0,
            waits_since: None,
            are_told: false,
            deadline: Duration::ZERO,
            repeat_at: Duration::ZERO,
        }
    }

    fn steps(&self) -> &'static [Step] {
        match self.kind {
            Kind::Checkpoint { .. } => Step::CHECKPOINT,
            Kind::Resume { .. } => Step::RESUME,
        }
    }

    pub(super) fn step(&self) -> Step {
        self.steps()[self.index]
    }

    pub(super) fn nodes(&self) -> &[NodeId] {
        &self.nodes
    }

    pub(super) fn all(&self) -> impl Iterator<Item = NodeId> {
        self.nodes.iter().chain(&self.others).copied()
    }

    pub(super) fn next_tick(&self) -> Duration {
        self.deadline.min(self.repeat_at)
    }

    pub(super) fn missing(&self) -> impl Iterator<Item = NodeId> {
        self.orders.iter().filter(|(_, _, is_done)| !is_done).map(|(node, _, _)| *node)
    }

    /// Whether all nodes have done the step.
    pub(super) fn is_done(&self) -> bool {
        self.open == 0
    }

    /// Orders a step: the nodes by part, then the others if there are orders left.
    pub(super) fn send(
        &mut self,
        now: Duration,
        orders: Vec<Order>,
        settings: &Settings,
        actions: &mut Vec<Action>,
    ) {
        self.orders = self.all().zip(orders).map(|(node, order)| (node, order, false)).collect();
        self.open = self.orders.len();
        (self.waits_since, self.are_told) = (None, false);
        self.deadline = now + settings.limit(self.step(), matches!(self.kind, Kind::Resume { .. }));
        self.repeat_at = now;
        self.repeat(now, settings.repeat, actions);
    }

    /// Repeats the orders that are not known to be done.
    pub(super) fn repeat(&mut self, now: Duration, interval: Duration, actions: &mut Vec<Action>) {
        if now < self.repeat_at {
            return;
        }
        self.repeat_at = now + interval;
        let missing = self.orders.iter().filter(|(_, _, is_done)| !is_done);
        actions.extend(missing.map(|(to, order, _)| Action::Send {
            to: to.rank,
            message: Message::Order { to: *to, attempt: self.id, order: order.clone() },
        }));
    }

    /// The nodes for which at least half of all have waited for [`SLOW`], once for each step.
    pub(super) fn slow(&mut self, now: Duration) -> Option<Vec<u32>> {
        let since = self.waits_since.filter(|_| self.open > 0)?;
        let is_news = now.saturating_sub(since) >= SLOW && !std::mem::replace(&mut self.are_told, true);
        is_news.then(|| self.missing().map(|node| node.rank).collect())
    }

    /// A node has done the step.
    pub(super) fn take(&mut self, now: Duration, node: NodeId, outcome: Outcome) {
        let is_it = |(to, _, _): &(NodeId, Order, bool)| *to == node;
        // Most are at the place of their rank: a report of each of many nodes has to cost little.
        let expected = Some(node.rank as usize).filter(|place| self.orders.get(*place).is_some_and(is_it));
        let Some(place) = expected.or_else(|| self.orders.iter().position(is_it)) else { return };
        let (_, _, is_done) = &mut self.orders[place];
        self.open -= usize::from(!std::mem::replace(is_done, true));
        if self.open * 2 <= self.orders.len() {
            self.waits_since.get_or_insert(now);
        }
        // The nodes with a part come first.
        if let (Outcome::Stored { hash }, Some(known)) = (outcome, self.hashes.get_mut(place)) {
            *known = hash;
        }
    }

    /// Goes to the next step, if there is one.
    pub(super) fn advance(&mut self, now: Duration, settings: &Settings, actions: &mut Vec<Action>) -> bool {
        if self.index + 1 == self.steps().len() {
            return false;
        }
        self.index += 1;
        let orders = (0..self.nodes.len()).map(|part| self.order(part, settings)).collect();
        self.send(now, orders, settings, actions);
        true
    }

    fn order(&self, part: usize, settings: &Settings) -> Order {
        match (self.step(), &self.kind) {
            (Step::Prepare, Kind::Checkpoint { session }) => Order::Prepare { session: *session },
            (Step::Load, Kind::Resume { from }) => {
                let number = u32::try_from(part).expect("a number of parts has 32 bits");
                let from = from.map(|attempt| {
                    (PartId { attempt, part: number }, self.hashes.get(part).cloned().unwrap_or_default())
                });
                let places = places(&self.nodes);
                Order::Load { lease: settings.load_lease, from, part: number, places }
            }
            (Step::Quiesce, _) => Order::Quiesce { lease: settings.lease },
            (Step::Freeze, _) => Order::Freeze,
            (Step::Dump, _) => Order::Dump,
            (Step::Unblock, _) => Order::Unblock,
            (Step::Thaw, _) => Order::Thaw,
            (Step::Store, _) => Order::Store,
            (Step::Prove, _) => Order::Prove,
            (Step::End | Step::Load | Step::Prepare, _) => Order::End,
        }
    }
}

/// The node rank at which each part is, for an order: nothing if each is at the node of its own number, so that the orders
/// do not grow with the number of nodes.
fn places(nodes: &[NodeId]) -> Vec<u32> {
    let places: Vec<_> = nodes.iter().map(|node| node.rank).collect();
    if places.iter().copied().eq(0..) { Vec::new() } else { places }
}
