//! The coordinator alone, message by message.

use std::time::Duration;

use crate::{
    Blocker, Coordinator, Failure, Member, MemberReport, Name, NamedMember, Order, RankId, Report, Role,
    Settings, State,
};

const SETTINGS: Settings =
    Settings { timeout: Duration::from_secs(10), attempts: 2, back_off: Duration::from_secs(1) };

const COMMUNICATOR: Role = Role::Communicator { awaits: None, alias: None };

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn coordinator(ranks: u64) -> Coordinator {
    let mut coordinator = Coordinator::new(SETTINGS);
    (0..ranks).for_each(|rank| coordinator.join(RankId(rank), seconds(0)));
    coordinator
}

fn member(name: Name, index: u32, sequence: u64) -> MemberReport {
    let member = Member { communicator: name, index };
    MemberReport { member, role: COMMUNICATOR, sequence, call: "ncclAllReduce".to_owned() }
}

fn report(attempt: u64, version: u64, members: Vec<MemberReport>) -> Report {
    Report { attempt, version, in_call: 0, members, parked: Vec::new() }
}

fn reach(attempt: u64, version: u64, targets: Vec<(Member, u64)>) -> Order {
    Order::Reach { attempt, version, targets, is_open: false }
}

fn at(name: Name, index: u32) -> Member {
    Member { communicator: name, index }
}

#[test]
fn a_job_without_communicators_is_cut_at_once() {
    let mut coordinator = coordinator(2);
    coordinator.request(seconds(0));
    let count = |rank| (RankId(rank), Order::Count { attempt: 1 });
    coordinator.receive(RankId(0), report(1, 0, Vec::new()));
    assert_eq!(*coordinator.state(), State::Counting);
    coordinator.receive(RankId(1), report(1, 0, Vec::new()));
    assert_eq!(*coordinator.state(), State::Cut);
    assert!(!coordinator.has_communicators());
    assert_eq!(coordinator.take_orders(), [count(0), count(1)], "one round trip");
    coordinator.release();
    assert_eq!(coordinator.take_orders(), [(RankId(0), Order::Release), (RankId(1), Order::Release)]);
    assert_eq!(*coordinator.state(), State::Idle);
}

/// It has split off a communicator, destroyed its parent, and used neither since.
#[test]
fn a_rank_whose_communicators_have_no_steps_is_told_that_it_stands_at_the_cut() {
    let part = Name(2);
    let mut coordinator = coordinator(2);
    coordinator.request(seconds(0));
    coordinator.receive(RankId(0), report(1, 0, vec![member(part, 0, 0)]));
    coordinator.receive(RankId(1), report(1, 0, Vec::new()));
    assert_eq!(coordinator.take_orders().last(), Some(&(RankId(0), reach(1, 1, Vec::new()))));
    assert_eq!(*coordinator.state(), State::Reaching);
    coordinator.receive(RankId(0), report(1, 1, vec![member(part, 0, 0)]));
    assert_eq!(*coordinator.state(), State::Cut);
}

#[test]
fn targets_are_the_furthest_sequences_and_a_raise_has_the_next_version() {
    let world = Name(1);
    let mut coordinator = coordinator(2);
    coordinator.request(seconds(0));
    coordinator.receive(RankId(0), report(1, 0, vec![member(world, 0, 5)]));
    coordinator.receive(RankId(1), report(1, 0, vec![member(world, 1, 7)]));
    let orders: Vec<_> = coordinator.take_orders().into_iter().skip(2).collect();
    let first = [
        (RankId(0), reach(1, 1, vec![(at(world, 0), 7)])),
        (RankId(1), reach(1, 1, vec![(at(world, 1), 7)])),
    ];
    assert_eq!(orders, first);
    coordinator.receive(RankId(0), report(1, 1, vec![member(world, 0, 8)]));
    assert_eq!(coordinator.take_orders().len(), 2);
    coordinator.receive(RankId(1), report(1, 1, vec![member(world, 1, 8)]));
    coordinator.receive(RankId(0), report(1, 2, vec![member(world, 0, 8)]));
    assert_eq!(*coordinator.state(), State::Reaching, "rank 1 has the first version only");
    coordinator.receive(RankId(1), report(1, 2, vec![member(world, 1, 8)]));
    assert_eq!(*coordinator.state(), State::Cut);
}

/// The receiver has not used the pair yet: it learns of it from its target.
#[test]
fn the_other_end_of_a_pair_gets_a_target() {
    let world = Name(1);
    let pair = world.pair(0, 1);
    let mut coordinator = coordinator(2);
    coordinator.request(seconds(0));
    let sent = MemberReport { role: Role::Pair { of: world, from: 0, to: 1 }, ..member(pair, 0, 3) };
    coordinator.receive(RankId(0), report(1, 0, vec![member(world, 0, 0), sent]));
    coordinator.receive(RankId(1), report(1, 0, vec![member(world, 1, 0)]));
    let orders = coordinator.take_orders();
    assert!(orders.contains(&(RankId(1), reach(1, 1, vec![(at(pair, 1), 3)]))), "{orders:?}");
}

#[test]
fn while_a_communicator_lacks_members_no_rank_parks() {
    let mut coordinator = coordinator(2);
    coordinator.request(seconds(0));
    let role = Role::Communicator { awaits: Some(2), alias: None };
    let joined = |index| MemberReport { role, ..member(Name(1), index, 1) };
    coordinator.receive(RankId(0), Report { in_call: 1, ..report(1, 0, vec![joined(0)]) });
    coordinator.receive(RankId(1), report(1, 0, Vec::new()));
    let open = Order::Reach { attempt: 1, version: 1, targets: Vec::new(), is_open: true };
    assert!(coordinator.take_orders().contains(&(RankId(1), open)));
    coordinator.receive(RankId(1), Report { in_call: 1, ..report(1, 1, vec![joined(1)]) });
    assert!(coordinator.take_orders().contains(&(RankId(1), reach(1, 2, vec![(at(Name(1), 1), 1)]))));
}

/// The ranks of the parent know a grown communicator by the parent, the new ones by the unique ID, and one by both.
#[test]
fn a_grown_communicator_has_two_names() {
    let (by_parent, by_id) = (Name(1).grow(0), Name::of_unique_ids(&[1]));
    let role = Role::Communicator { awaits: Some(2), alias: Some(by_id) };
    let root = MemberReport { role, ..member(by_parent, 0, 4) };
    let mut coordinator = coordinator(2);
    coordinator.request(seconds(0));
    coordinator.receive(RankId(0), report(1, 0, vec![root]));
    coordinator.receive(RankId(1), report(1, 0, vec![member(by_id, 1, 2)]));
    let orders = coordinator.take_orders();
    assert!(orders.contains(&(RankId(1), reach(1, 1, vec![(at(by_id, 1), 4)]))), "{orders:?}");
}

#[test]
fn a_failure_names_ranks_and_calls_after_a_back_off() {
    let world = Name(1 << 96);
    let mut coordinator = coordinator(4);
    coordinator.request(seconds(0));
    for rank in 0..4 {
        coordinator.receive(RankId(rank), Report { in_call: 1, ..report(1, 0, Vec::new()) });
    }
    coordinator.tick(seconds(9));
    assert_eq!(*coordinator.state(), State::Reaching);
    coordinator.tick(seconds(10));
    assert_eq!(*coordinator.state(), State::BackingOff { until: seconds(11) });
    coordinator.tick(seconds(11));
    assert_eq!((coordinator.state(), coordinator.next_tick()), (&State::Counting, Some(seconds(21))));
    for (rank, sequence) in [(0, 3), (1, 2), (2, 3), (3, 3)] {
        coordinator.receive(RankId(rank), report(2, 0, vec![member(world, rank as u32, sequence)]));
    }
    let parked = vec!["ncclBroadcast".to_owned()];
    coordinator.receive(RankId(0), Report { parked, ..report(2, 1, vec![member(world, 0, 3)]) });
    coordinator.receive(RankId(1), report(2, 1, vec![member(world, 1, 2)]));
    coordinator.receive(RankId(2), Report { in_call: 1, ..report(2, 1, vec![member(world, 2, 3)]) });
    coordinator.tick(seconds(21));
    let State::Failed(failure) = coordinator.state() else { panic!("{:?}", coordinator.state()) };
    assert_eq!(
        failure.to_string(),
        "the ranks did not reach a common step in 2 attempts: rank 1 has begun 2 of 3 steps as rank 1 of communicator \
         00000001 and waits after ncclAllReduce; rank 2 is in a call of NCCL that does not return (the last on its \
         communicators: ncclAllReduce as rank 2 of communicator 00000001); rank 3 has not answered; rank 0 is parked before ncclBroadcast"
    );
    let releases = coordinator.take_orders().into_iter().filter(|(_, order)| *order == Order::Release);
    assert_eq!(releases.count(), 8);
    coordinator.request(seconds(30));
    assert_eq!(*coordinator.state(), State::Counting);
}

#[test]
fn a_rank_that_sends_to_many_is_described_in_a_few_words() {
    let of = Name(1 << 96);
    let calls = (1..7).map(|to| {
        let member = Member { communicator: of.pair(0, to), index: 0 };
        ("ncclSend".to_owned(), NamedMember { member, role: Some(Role::Pair { of, from: 0, to }) })
    });
    let blockers = vec![Blocker::InCall { rank: RankId(0), calls: calls.collect() }];
    let text = Failure { attempts: 1, blockers, parked: Vec::new() }.to_string();
    let first = "ncclSend in which rank 0 sends to rank 1 of communicator 00000001, ncclSend in which";
    assert!(
        text.contains(first) && text.ends_with("to rank 4 of communicator 00000001, ncclSend on 2 more)"),
        "{text}"
    );
}

#[test]
fn an_incomplete_communicator_is_named() {
    let incomplete = Blocker::Incomplete { communicator: Name(1 << 96), joined: 1, ranks: 2 };
    let failure = Failure { attempts: 1, blockers: vec![incomplete], parked: Vec::new() };
    let text = "the ranks did not reach a common step in 1 attempt: communicator 00000001 is being created with 1 of 2 \
                ranks";
    assert_eq!(failure.to_string(), text);
}

/// The dead rank was a step ahead, on its own communicator and on that of both.
#[test]
fn the_others_are_not_held_to_what_a_rank_had_begun_that_has_ended() {
    let world = Name(1);
    let mut coordinator = coordinator(2);
    coordinator.request(seconds(0));
    coordinator.receive(RankId(0), report(1, 0, vec![member(world, 0, 9)]));
    coordinator.leave(RankId(0));
    coordinator.receive(RankId(1), report(1, 0, vec![member(world, 1, 8)]));
    coordinator.receive(RankId(1), report(1, 1, vec![member(world, 1, 8)]));
    assert_eq!(*coordinator.state(), State::Cut);
}

#[test]
fn a_rank_that_joins_takes_part_and_undoes_a_cut() {
    let mut coordinator = coordinator(1);
    coordinator.request(seconds(0));
    coordinator.receive(RankId(0), report(1, 0, Vec::new()));
    assert_eq!(*coordinator.state(), State::Cut);
    let _ = coordinator.take_orders();
    // Long after the attempt has begun: a cut has no deadline.
    coordinator.join(RankId(1), seconds(30));
    assert_eq!(*coordinator.state(), State::Reaching);
    assert_eq!(coordinator.take_orders(), [(RankId(1), Order::Count { attempt: 1 })]);
    coordinator.tick(seconds(39));
    assert_eq!(*coordinator.state(), State::Reaching, "the rank has the time of an attempt");
    coordinator.receive(RankId(1), report(1, 0, Vec::new()));
    assert_eq!(*coordinator.state(), State::Cut);
}

#[test]
fn a_request_that_is_given_up_releases_all_ranks_and_tells_what_it_waited_for() {
    let release = [0, 1].map(|rank| (RankId(rank), Order::Release));
    let mut coordinator = coordinator(2);
    coordinator.give_up();
    assert_eq!(*coordinator.state(), State::Idle, "nothing was requested");
    coordinator.request(seconds(0));
    coordinator.receive(RankId(0), report(1, 0, Vec::new()));
    let _ = coordinator.take_orders();
    coordinator.give_up();
    assert_eq!(coordinator.take_orders(), release);
    let State::Failed(failure) = coordinator.state() else { panic!("{:?}", coordinator.state()) };
    assert_eq!(
        failure.describe(|rank| format!("process {}", rank.0 + 7)),
        "the ranks did not reach a common step in 1 attempt: process 8 has not answered"
    );

    coordinator.request(seconds(20));
    coordinator.tick(seconds(30));
    assert_eq!(*coordinator.state(), State::BackingOff { until: seconds(31) });
    let _ = coordinator.take_orders();
    coordinator.give_up();
    assert!(matches!(coordinator.state(), State::Failed(failure) if failure.blockers.len() == 2));
    assert_eq!(coordinator.take_orders(), [], "they run already");
}

#[test]
fn reports_of_an_earlier_attempt_and_of_unknown_ranks_are_ignored() {
    let mut coordinator = coordinator(1);
    coordinator.request(seconds(0));
    coordinator.tick(seconds(10));
    coordinator.tick(seconds(11));
    let before = coordinator.clone();
    coordinator.receive(RankId(0), report(1, 0, Vec::new()));
    coordinator.receive(RankId(7), report(2, 0, Vec::new()));
    assert_eq!(coordinator, before);
}
