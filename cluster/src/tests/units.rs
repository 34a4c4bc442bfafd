//! Single rules.

use std::time::Duration;

use crate::action::{Action, Reason};
use crate::coordinator::Coordinator;
use crate::{
    AttemptId, Blame, Envelope, Event, Hello, Log, Message, NodeId, Order, OtherVersion, Outcome, PartId,
    PartRecord, PutAnswer, Record, SessionState, Settings, Step, VERSION,
};

fn attempt(epoch: u64, number: u64) -> AttemptId {
    AttemptId { epoch, number }
}

fn node(rank: u32) -> NodeId {
    NodeId { rank, incarnation: 1 }
}

#[test]
fn messages_have_a_json_form_and_a_version() {
    let order = Order::Load {
        lease: Duration::from_secs(60),
        from: Some((PartId { attempt: attempt(1, 2), part: 3 }, "hash".to_owned())),
        part: 3,
        places: vec![1, 0],
    };
    let envelope = Envelope::new(7, Message::Order { to: node(1), attempt: attempt(2, 1), order });
    let text = serde_json::to_string(&envelope).unwrap();
    let read: Envelope = serde_json::from_str(&text).unwrap();
    assert_eq!(read, envelope);
    let newer = Envelope { version: VERSION + 1, ..read };
    assert_eq!(newer.open(), Err(OtherVersion { from: 7, found: VERSION + 1 }));
}

#[test]
fn a_log_takes_one_record_at_each_position() {
    let mut log = Log::default();
    log.add(0, Record::Epoch { epoch: 1, coordinator: node(0) });
    log.add(0, Record::Epoch { epoch: 2, coordinator: node(1) });
    log.add(2, Record::Epoch { epoch: 3, coordinator: node(1) });
    assert_eq!((log.end(), log.epoch()), (1, 1));
}

#[test]
fn only_parts_that_cannot_be_committed_any_more_are_garbage() {
    let mut log = Log::default();
    let parts = vec![PartRecord { rank: 0, hash: String::new() }];
    log.add(0, Record::Epoch { epoch: 1, coordinator: node(0) });
    log.add(1, Record::Snapshot { attempt: attempt(1, 2), session: attempt(1, 1), parts });
    log.add(2, Record::Epoch { epoch: 3, coordinator: node(1) });
    let of = |epoch, number| PartId { attempt: attempt(epoch, number), part: 0 };
    let all = [of(1, 2), of(1, 3), of(2, 1), of(3, 4), of(3, 5), of(4, 1)];
    assert_eq!(log.garbage(attempt(3, 5), &all), [of(1, 3), of(2, 1), of(3, 4)]);
}

const SECOND: Duration = Duration::from_secs(1);

/// A coordinator of two nodes that do each step at once.
struct TwoNodes {
    coordinator: Coordinator,
    sessions: [Option<SessionState>; 2],
    newest: AttemptId,
    events: Vec<Event>,
    puts: Vec<(u64, Record)>,
    /// It does not answer.
    slow: Option<u32>,
}

impl TwoNodes {
    fn new() -> Self {
        let settings = Settings {
            nodes: 2,
            parts: 2,
            beat: SECOND,
            silence: SECOND * 1000,
            stagger: SECOND,
            repeat: SECOND,
            gather: SECOND,
            lease: SECOND,
            load_lease: SECOND,
            step_limit: SECOND * 1000,
            transfer_limit: SECOND * 1000,
            tries: 1,
        };
        let mut log = Log::default();
        log.add(0, Record::Epoch { epoch: 1, coordinator: node(0) });
        let coordinator = Coordinator::new(settings, log, Duration::ZERO);
        let (events, puts) = (Vec::new(), Vec::new());
        Self { coordinator, sessions: [None; 2], newest: attempt(0, 0), events, puts, slow: None }
    }

    fn call(&mut self, at: u64, call: impl FnOnce(&mut Coordinator, Duration, &mut Vec<Action>)) {
        let (now, mut actions) = (SECOND * u32::try_from(at).unwrap(), Vec::new());
        call(&mut self.coordinator, now, &mut actions);
        while !actions.is_empty() {
            for action in std::mem::take(&mut actions) {
                match action {
                    Action::Send { message: Message::Order { to, attempt, order }, .. }
                        if self.slow != Some(to.rank) =>
                    {
                        let outcome = self.perform(to.rank, attempt, &order);
                        self.coordinator.report(now, to, attempt, (order.step(), outcome), &mut actions);
                    }
                    Action::Event(event) => self.events.push(event),
                    Action::Put { position, record } => self.puts.push((position, record)),
                    _ => {}
                }
            }
        }
    }

    fn perform(&mut self, rank: u32, attempt: AttemptId, order: &Order) -> Outcome {
        let session = &mut self.sessions[rank as usize];
        self.newest = attempt;
        match order {
            Order::End => *session = None,
            Order::Load { part, .. } => {
                *session = Some(SessionState { id: attempt, part: *part, is_running: true });
            }
            Order::Store => return Outcome::Stored { hash: rank.to_string() },
            _ => {}
        }
        Outcome::Done
    }

    fn hello(&mut self, at: u64, rank: u32) {
        let session = self.sessions[rank as usize];
        let hello = Hello { node: node(rank), epoch: 1, is_leaderless: false, newest: self.newest, session };
        self.call(at, |coordinator, now, actions| coordinator.hello(now, hello, actions));
    }

    fn running(&self) -> usize {
        self.events.iter().filter(|event| matches!(event, Event::Running { .. })).count()
    }
}

/// It is named once, and again in the next attempt.
#[test]
fn a_node_that_lets_others_wait_is_named() {
    let mut nodes = TwoNodes::new();
    (0..2).for_each(|rank| nodes.hello(0, rank));
    nodes.slow = Some(1);
    nodes.call(5, Coordinator::request);
    let slow = |nodes: &TwoNodes| {
        let is_slow =
            |event: &&Event| matches!(event, Event::Slow { step: Step::Prepare, ranks } if *ranks == [1]);
        nodes.events.iter().filter(is_slow).count()
    };
    for at in 6..90 {
        nodes.call(at, Coordinator::tick);
        assert_eq!(slow(&nodes), usize::from(at >= 35), "after {} s", at - 5);
    }
    // All of them are slow: nobody waits.
    let mut nodes = TwoNodes::new();
    (0..2).for_each(|rank| nodes.hello(0, rank));
    nodes.call(5, |coordinator, now, actions| {
        coordinator.request(now, actions);
        actions.clear();
    });
    (6..90).for_each(|at| {
        nodes.call(at, |coordinator, now, actions| {
            coordinator.tick(now, actions);
            actions.retain(|action| matches!(action, Action::Event(_)));
        });
    });
    assert_eq!(slow(&nodes), 0);
}

/// One that waits for a node is given up on all nodes. One that may be in the log is not.
#[test]
fn a_snapshot_is_given_up_unless_it_may_be_in_the_log() {
    let mut nodes = TwoNodes::new();
    (0..2).for_each(|rank| nodes.hello(0, rank));
    let give_up = |nodes: &mut TwoNodes, at| {
        let attempt = nodes.coordinator.in_progress().unwrap();
        let reason = Reason::Failed { rank: 0, reason: "the job ends".to_owned(), blame: Blame::Node };
        nodes.call(at, |coordinator, now, actions| coordinator.give_up(now, attempt, reason, actions));
        nodes.events.iter().filter(|event| matches!(event, Event::Aborted { .. })).count()
    };
    nodes.slow = Some(1);
    nodes.call(5, Coordinator::request);
    assert_eq!(give_up(&mut nodes, 6), 1);
    assert!(nodes.coordinator.in_progress().is_none() && nodes.puts.is_empty());
    nodes.slow = None;
    nodes.call(7, Coordinator::request);
    assert_eq!(give_up(&mut nodes, 8), 1);
    let (position, record) = nodes.puts.remove(0);
    let Record::Snapshot { attempt, .. } = record else { panic!("{record:?}") };
    nodes.call(9, |coordinator, now, actions| {
        assert!(coordinator.put(now, position, PutAnswer::Done, actions));
    });
    assert!(nodes.events.contains(&Event::Committed { attempt }), "{:?}", nodes.events);
}

/// The part of node 1 fails: the job is resumed when this is wanted, and not before.
#[test]
fn a_session_that_was_ended_is_resumed_when_it_is_told() {
    let mut nodes = TwoNodes::new();
    (0..2).for_each(|rank| nodes.hello(0, rank));
    assert_eq!(nodes.running(), 1);
    nodes.sessions = [None; 2];
    nodes.call(10, |coordinator, now, actions| coordinator.end_session(now, 1, actions));
    assert!(matches!(&nodes.events[1..], [Event::Lost { ranks, .. }] if ranks == &[1]), "{:?}", nodes.events);
    for at in 11..30 {
        nodes.hello(at, 0);
        nodes.hello(at, 1);
        nodes.call(at, Coordinator::tick);
    }
    assert_eq!(nodes.running(), 1);
    nodes.call(30, Coordinator::end_wait);
    assert_eq!(nodes.running(), 2);
}

/// A session is not adopted although a node has not noticed yet that it is over.
#[test]
fn a_session_that_was_ended_does_not_come_back() {
    let mut nodes = TwoNodes::new();
    (0..2).for_each(|rank| nodes.hello(0, rank));
    let ended = nodes.sessions[0].unwrap().id;
    nodes.call(10, |coordinator, now, actions| coordinator.end_session(now, 1, actions));
    nodes.call(11, Coordinator::end_wait);
    assert_eq!(nodes.running(), 2);
    assert!(nodes.sessions.iter().all(|session| session.unwrap().id > ended));
}

/// The put of a snapshot is in progress when a part fails: it is answered before the job is resumed, and counts.
#[test]
fn a_session_that_was_ended_during_a_commit_is_resumed_from_that_snapshot() {
    let mut nodes = TwoNodes::new();
    (0..2).for_each(|rank| nodes.hello(0, rank));
    nodes.call(5, Coordinator::request);
    let (position, record) = nodes.puts.remove(0);
    nodes.sessions = [None; 2];
    nodes.call(6, |coordinator, now, actions| coordinator.end_session(now, 0, actions));
    nodes.call(7, Coordinator::end_wait);
    assert_eq!(nodes.running(), 1);
    let Record::Snapshot { attempt, .. } = record else { panic!("{record:?}") };
    nodes.call(8, |coordinator, now, actions| {
        assert!(coordinator.put(now, position, PutAnswer::Done, actions));
    });
    assert!(nodes.events.contains(&Event::Committed { attempt }), "{:?}", nodes.events);
    (0..2).for_each(|rank| nodes.hello(9, rank));
    nodes.call(9, Coordinator::tick);
    assert_eq!(nodes.running(), 2);
}
