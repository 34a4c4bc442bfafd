//! One checkpoint of two nodes under every order of messages, losses, repetitions, ends of leases and the deadline.
//!
//! A message that was sent stays in the network: it may arrive never, late, or any number of times. The exploration ends
//! at the commit.

use std::collections::BTreeSet;
use std::time::Duration;

use stateright::{Checker, Model, Property};

use crate::coordinator::Coordinator;
use crate::node::Node;
use crate::{
    Action, AttemptId, Blame, Hello, Log, Message, NodeId, Order, Outcome, PutAnswer, Record, Settings, Step,
};

const SECOND: Duration = Duration::from_secs(1);
const SETTINGS: Settings = Settings {
    nodes: 2,
    parts: 2,
    beat: Duration::from_secs(1000),
    silence: Duration::from_secs(1000),
    stagger: SECOND,
    repeat: SECOND,
    gather: SECOND,
    lease: Duration::from_secs(10),
    load_lease: Duration::from_secs(10),
    step_limit: Duration::from_secs(5),
    transfer_limit: Duration::from_secs(5),
    tries: 1,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Cluster {
    coordinator: Coordinator,
    nodes: Vec<Node>,
    network: BTreeSet<(u32, Message)>,
    performing: Vec<Option<Order>>,
    rules: Vec<bool>,
    captured: Vec<bool>,
    /// A node was let go before all had captured.
    is_torn: bool,
    is_committed: bool,
    is_late: bool,
    has_lease_ended: bool,
    unblocks_early: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Happening {
    Deliver(u32, Message),
    Finish(usize),
    Fail(usize),
    LeaseEnds(usize),
    Deadline,
}

/// Whether each node removes its packet rule when it has captured, which is wrong.
struct Exploration {
    unblocks_early: bool,
}

const ATTEMPT: AttemptId = AttemptId { epoch: 1, number: 2 };

fn node(rank: u32) -> NodeId {
    NodeId { rank, incarnation: 1 }
}

impl Cluster {
    /// A session runs on both nodes, and a snapshot is requested.
    fn new(unblocks_early: bool) -> Self {
        let mut log = Log::default();
        log.add(0, Record::Epoch { epoch: 1, coordinator: node(0) });
        let mut cluster = Self {
            coordinator: Coordinator::new(SETTINGS, log, Duration::ZERO),
            nodes: (0..2).map(|rank| Node::new(node(rank))).collect(),
            network: BTreeSet::new(),
            performing: vec![None; 2],
            rules: vec![false; 2],
            captured: vec![false; 2],
            is_torn: false,
            is_committed: false,
            is_late: false,
            has_lease_ended: false,
            unblocks_early: false,
        };
        cluster.hello();
        for _ in Step::RESUME {
            cluster.deliver_all();
            (0..2).for_each(|at| cluster.finish(at, Outcome::Done));
            cluster.deliver_all();
        }
        cluster.hello();
        cluster.network.clear();
        let mut actions = Vec::new();
        cluster.coordinator.request(Duration::ZERO, &mut actions);
        cluster.act(0, actions);
        (cluster.is_torn, cluster.captured) = (false, vec![false; 2]);
        cluster.unblocks_early = unblocks_early;
        cluster
    }

    fn hello(&mut self) {
        for rank in 0..2 {
            let own = &self.nodes[rank as usize];
            let (newest, session) = (own.newest(), own.session());
            let hello = Hello { node: node(rank), epoch: 1, is_leaderless: false, newest, session };
            let mut actions = Vec::new();
            self.coordinator.hello(Duration::ZERO, hello, &mut actions);
            self.act(0, actions);
        }
    }

    fn deliver_all(&mut self) {
        for (to, message) in std::mem::take(&mut self.network) {
            self.deliver(to, message);
        }
    }

    fn deliver(&mut self, to: u32, message: Message) {
        let mut actions = Vec::new();
        let at = to as usize;
        match message {
            Message::Order { attempt, order, .. } => {
                self.nodes[at].order(Duration::ZERO, 0, attempt, order, &mut actions);
            }
            Message::Abort { attempt, .. } => self.nodes[at].abort(attempt, &mut actions),
            Message::Report { node, attempt, step, outcome } => {
                let what = (step, outcome);
                self.coordinator.report(Duration::ZERO, node, attempt, what, &mut actions);
            }
            Message::Beat { .. } | Message::Hello(_) | Message::Over { .. } => {}
        }
        self.act(at, actions);
    }

    fn finish(&mut self, at: usize, outcome: Outcome) {
        let Some(order) = self.performing[at].take() else { return };
        let step = order.step();
        self.captured[at] |= step == Step::Dump;
        if self.unblocks_early && step == Step::Dump {
            self.let_go(at);
        }
        let mut actions = Vec::new();
        let attempt = self.nodes[at].newest();
        self.nodes[at].finished(attempt, step, outcome, &mut actions);
        self.act(at, actions);
    }

    fn let_go(&mut self, at: usize) {
        self.rules[at] = false;
        self.is_torn |= self.captured.contains(&false);
    }

    fn act(&mut self, at: usize, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Send { to, message } => {
                    self.network.insert((to, message));
                }
                Action::Perform { order, .. } => {
                    self.rules[at] |= matches!(order.step(), Step::Freeze | Step::Load);
                    if order.step() == Step::Unblock {
                        self.let_go(at);
                    }
                    let step = order.step();
                    self.performing[at] = Some(order);
                    // The others end at once: what is in between them matters less.
                    if !matches!(step, Step::Dump | Step::Unblock) {
                        let hash = at.to_string();
                        let is_store = step == Step::Store;
                        self.finish(at, if is_store { Outcome::Stored { hash } } else { Outcome::Done });
                    }
                }
                Action::Release | Action::Kill => {
                    self.let_go(at);
                    self.performing[at] = None;
                }
                Action::Put { position, .. } => {
                    self.is_committed = true;
                    let mut actions = Vec::new();
                    self.coordinator.put(Duration::ZERO, position, PutAnswer::Done, &mut actions);
                    self.act(0, actions);
                }
                Action::Event(_) | Action::Read { .. } => {}
            }
        }
    }

    fn is_aborted(&self) -> bool {
        self.network.iter().any(|(_, message)| matches!(message, Message::Abort { .. }))
    }
}

impl Model for Exploration {
    type State = Cluster;
    type Action = Happening;

    fn init_states(&self) -> Vec<Cluster> {
        vec![Cluster::new(self.unblocks_early)]
    }

    fn actions(&self, cluster: &Cluster, happenings: &mut Vec<Happening>) {
        if cluster.is_committed {
            return;
        }
        let messages = cluster.network.iter();
        happenings.extend(messages.map(|(to, message)| Happening::Deliver(*to, message.clone())));
        for at in 0..2 {
            if cluster.performing[at].is_some() {
                happenings.extend([Happening::Finish(at), Happening::Fail(at)]);
            }
            if cluster.nodes[at].lease_end().is_some() {
                happenings.push(Happening::LeaseEnds(at));
            }
        }
        if !cluster.is_late {
            happenings.push(Happening::Deadline);
        }
    }

    fn next_state(&self, cluster: &Cluster, happening: Happening) -> Option<Cluster> {
        let mut next = cluster.clone();
        match happening {
            Happening::Deliver(to, message) => next.deliver(to, message),
            Happening::Finish(at) => {
                next.finish(at, Outcome::Done);
            }
            Happening::Fail(at) => {
                next.finish(at, Outcome::Failed { reason: String::new(), blame: Blame::Node });
            }
            Happening::LeaseEnds(at) => {
                next.has_lease_ended = true;
                let mut actions = Vec::new();
                next.nodes[at].tick(SETTINGS.lease, &mut actions);
                next.act(at, actions);
            }
            Happening::Deadline => {
                next.is_late = true;
                let mut actions = Vec::new();
                next.coordinator.tick(SETTINGS.step_limit, &mut actions);
                // Repeated orders are in the network already.
                next.act(0, actions);
            }
        }
        (next != *cluster).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("whole", |_, cluster: &Cluster| !cluster.is_committed || !cluster.is_torn),
            Property::always("no rule without a lease", |_, cluster: &Cluster| {
                let is_held = |at: usize| cluster.nodes[at].lease_end().is_some();
                (0..2).all(|at| !cluster.rules[at] || is_held(at))
            }),
            Property::always("one attempt", |_, cluster: &Cluster| cluster.nodes[0].newest() <= ATTEMPT),
            Property::sometimes("committed", |_, cluster: &Cluster| cluster.is_committed),
            Property::sometimes("torn and aborted", |_, cluster: &Cluster| {
                cluster.is_torn && cluster.is_aborted()
            }),
            Property::sometimes("committed after a lease ended", |_, cluster: &Cluster| {
                cluster.is_committed && cluster.has_lease_ended
            }),
        ]
    }
}

/// More states than this are more than a test should explore.
const MOST_STATES: usize = 5_000_000;

#[test]
fn a_checkpoint_of_two_nodes_is_whole_or_aborted() {
    let checker =
        Exploration { unblocks_early: false }.checker().target_state_count(MOST_STATES).spawn_bfs().join();
    println!("{} states", checker.unique_state_count());
    assert!(checker.state_count() < MOST_STATES, "the exploration is not complete");
    checker.assert_properties();
}

#[test]
fn the_model_finds_a_packet_rule_that_is_removed_before_all_have_captured() {
    let checker =
        Exploration { unblocks_early: true }.checker().target_state_count(MOST_STATES).spawn_bfs().join();
    assert!(checker.discovery("whole").is_some());
}
