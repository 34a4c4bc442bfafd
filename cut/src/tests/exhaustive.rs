//! Small programs of two and three ranks under every order of steps and messages.
//!
//! A rank here is the decision of the real one ([`Attempt`]) around plain numbers; that its clock takes such a decision
//! atomically is what the model of loom shows. The coordinator is the real one. A rank has at most one report in flight.
//! The exploration ends at a cut: after the release the job is as one without a checkpoint.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use stateright::{Checker, Model, Property};

use super::program::{On, Operation, Program, What, of_operations};
use super::simulation::Flaw;
use crate::rank::Attempt;
use crate::{Coordinator, Member, MemberReport, Name, Order, RankId, Report, Role, Settings, State};

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
struct Rank {
    done: usize,
    is_in_call: bool,
    /// For [`Flaw::SplitGroup`].
    parts: usize,
    members: BTreeMap<Member, (Role, u64)>,
    attempt: Option<Attempt>,
    inbox: VecDeque<Order>,
    outbox: VecDeque<Report>,
    last_report: Option<Report>,
    /// For [`Flaw::OldVersion`].
    newest: u64,
    /// For [`Flaw::NoRaise`].
    first_targets: Vec<(Member, u64)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Job {
    ranks: Vec<Rank>,
    coordinator: Coordinator,
    /// Who has begun each operation, as bits.
    begun: Vec<u32>,
    is_requested: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Action {
    Request,
    Step(usize),
    Follow(usize),
    Report(usize),
    Receive(usize),
    /// The deadline. Only when nothing else happens: an attempt that goes on has time.
    Expire,
}

struct Exploration {
    program: Program,
    /// Number of the first operations that all ranks have done before.
    prelude: usize,
    /// Whether ranks wait for each other on the host.
    waits: bool,
    flaw: Option<Flaw>,
}

const SETTINGS: Settings =
    Settings { timeout: Duration::from_secs(1), attempts: 1, back_off: Duration::from_secs(1) };

impl Model for Exploration {
    type State = Job;
    type Action = Action;

    fn init_states(&self) -> Vec<Job> {
        let ranks = self.program.of_rank.len();
        let mut coordinator = Coordinator::new(SETTINGS);
        (0..ranks).for_each(|rank| coordinator.join(RankId(rank as u64), Duration::ZERO));
        let begun = vec![0; self.program.operations.len()];
        let mut job = Job { ranks: vec![Rank::default(); ranks], coordinator, begun, is_requested: false };
        let is_in_prelude = |job: &Job, rank: usize| {
            self.program.of_rank[rank].get(job.ranks[rank].done).is_some_and(|index| *index < self.prelude)
        };
        while let Some(rank) = (0..ranks)
            .find(|rank| is_in_prelude(&job, *rank) && self.after(&job, Action::Step(*rank)).is_some())
        {
            job = self.after(&job, Action::Step(rank)).expect("a step");
        }
        vec![job]
    }

    fn actions(&self, job: &Job, actions: &mut Vec<Action>) {
        if *job.coordinator.state() == State::Cut {
            return;
        }
        let ranks = 0..job.ranks.len();
        let all = ranks.flat_map(|rank| {
            [Action::Step(rank), Action::Follow(rank), Action::Report(rank), Action::Receive(rank)]
        });
        let all = all.chain([Action::Request]);
        actions.extend(all.filter(|action| self.after(job, *action).is_some()));
        if actions.is_empty() {
            actions.extend(job.coordinator.next_tick().map(|_| Action::Expire));
        }
    }

    fn next_state(&self, job: &Job, action: Action) -> Option<Job> {
        self.after(job, action)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always("consistent", Self::is_consistent),
            Property::always("finite", Self::goes_on),
            Property::sometimes("cut", |_, job: &Job| *job.coordinator.state() == State::Cut),
        ];
        if self.waits {
            let has_failed = |_: &Self, job: &Job| matches!(job.coordinator.state(), State::Failed(_));
            properties.push(Property::sometimes("failure", has_failed));
        }
        properties
    }
}

impl Exploration {
    /// At a cut no rank is in a call, and each operation is begun by all its ranks or by none.
    fn is_consistent(&self, job: &Job) -> bool {
        let is_whole = |(operation, begun): (&Operation, &u32)| {
            !operation.what.is_common() || *begun == 0 || begun.count_ones() as usize == operation.ranks.len()
        };
        *job.coordinator.state() != State::Cut
            || job.ranks.iter().all(|rank| !rank.is_in_call)
                && self.program.operations.iter().zip(&job.begun).all(is_whole)
    }

    /// Nothing is stuck: where nothing can happen, the program is over. Without waits on the host no deadline is needed.
    fn goes_on(&self, job: &Job) -> bool {
        let mut actions = Vec::new();
        self.actions(job, &mut actions);
        let has_ended = job.ranks.iter().zip(&self.program.of_rank).all(|(rank, of)| rank.done == of.len());
        let is_over = has_ended || *job.coordinator.state() == State::Cut;
        if actions == [Action::Expire] { self.waits } else { !actions.is_empty() || is_over }
    }

    fn after(&self, job: &Job, action: Action) -> Option<Job> {
        let mut job = job.clone();
        let has_moved = match action {
            Action::Request => {
                let is_first = !job.is_requested;
                job.is_requested = true;
                job.coordinator.request(Duration::ZERO);
                is_first
            }
            Action::Step(rank) => self.step(&mut job, rank),
            Action::Follow(rank) => self.follow(&mut job.ranks[rank]),
            Action::Report(rank) => self.report(&mut job.ranks[rank]),
            Action::Receive(rank) => match job.ranks[rank].outbox.pop_front() {
                None => false,
                Some(report) => {
                    job.coordinator.receive(RankId(rank as u64), report);
                    true
                }
            },
            Action::Expire => {
                job.coordinator.tick(Duration::from_secs(1));
                true
            }
        };
        for (RankId(rank), order) in job.coordinator.take_orders() {
            let rank = &mut job.ranks[rank as usize];
            if let (Order::Reach { version, .. }, Some(Flaw::OldVersion)) = (&order, self.flaw) {
                rank.newest = *version;
            }
            rank.inbox.push_back(order);
        }
        has_moved.then_some(job)
    }

    fn follow(&self, rank: &mut Rank) -> bool {
        let Some(mut order) = rank.inbox.pop_front() else { return false };
        if let (Order::Reach { version, targets, .. }, Some(Flaw::NoRaise)) = (&mut order, self.flaw) {
            if *version == 1 {
                rank.first_targets.clone_from(targets);
            }
            targets.clone_from(&rank.first_targets);
        }
        rank.attempt = Attempt::after(rank.attempt.take(), order);
        true
    }

    fn report(&self, rank: &mut Rank) -> bool {
        let report = rank.attempt.as_ref().map(|attempt| Report {
            attempt: attempt.number,
            version: match self.flaw {
                Some(Flaw::OldVersion) if attempt.version > 0 => rank.newest,
                _ => attempt.version,
            },
            in_call: u64::from(rank.is_in_call && self.flaw != Some(Flaw::NoMark)),
            members: rank
                .members
                .iter()
                .map(|(member, (role, sequence))| MemberReport {
                    member: *member,
                    role: *role,
                    sequence: *sequence,
                    call: String::new(),
                })
                .collect(),
            parked: Vec::new(),
        });
        if report.is_none() || report == rank.last_report || !rank.outbox.is_empty() {
            return false;
        }
        rank.last_report.clone_from(&report);
        rank.outbox.extend(report);
        true
    }

    fn step(&self, job: &mut Job, rank: usize) -> bool {
        let Some(&index) = self.program.of_rank[rank].get(job.ranks[rank].done) else { return false };
        let operation = &self.program.operations[index];
        let is_begun_by_all = |job: &Job, index: usize| {
            job.begun[index].count_ones() as usize == self.program.operations[index].ranks.len()
        };
        match &operation.what {
            What::Synchronize => {
                let mine = &self.program.of_rank[rank][..job.ranks[rank].done];
                if !mine.iter().all(|index| is_begun_by_all(job, *index)) {
                    return false;
                }
            }
            What::Wait => {
                if operation.ranks[1] == rank && job.begun[index] == 0 {
                    return false;
                }
            }
            _ if !job.ranks[rank].is_in_call => return self.begin(job, rank, index),
            what => {
                let blocks = matches!(what, What::Create(_) | What::Split(..) | What::Destroy(_, true));
                if blocks && !is_begun_by_all(job, index) {
                    return false;
                }
                self.end(&mut job.ranks[rank], rank, what);
                return true;
            }
        }
        job.begun[index] |= 1 << rank;
        job.ranks[rank].done += 1;
        true
    }

    fn member(&self, communicator: usize, rank: usize) -> Member {
        let index = self.program.communicators[communicator].iter().position(|one| *one == rank);
        let communicator = Name::of_unique_ids(&[communicator as u8]);
        Member { communicator, index: index.expect("a member") as u32 }
    }

    /// The members that a rank counts for an operation.
    fn counted(&self, rank: usize, what: &What) -> Vec<(Member, Role)> {
        let exists = Role::Communicator { awaits: None, alias: None };
        match what {
            What::Create(communicator) => {
                let awaits = Some(self.program.communicators[*communicator].len() as u32);
                vec![(self.member(*communicator, rank), Role::Communicator { awaits, alias: None })]
            }
            What::Split(communicator, _) | What::Destroy(communicator, _) => {
                vec![(self.member(*communicator, rank), exists)]
            }
            What::Enqueue(on) => {
                let counted = on.iter().filter_map(|(on, _)| match *on {
                    On::Communicator(one) => {
                        let is_member = self.program.communicators[one].contains(&rank);
                        is_member.then(|| (self.member(one, rank), exists))
                    }
                    On::Pair(one, from, to) => {
                        let of = self.member(one, from).communicator;
                        let [from_index, to_index] = [from, to].map(|end| self.member(one, end).index);
                        let member = Member {
                            communicator: of.pair(from_index, to_index),
                            index: u32::from(rank == to),
                        };
                        let role = Role::Pair { of, from: from_index, to: to_index };
                        (rank == from || rank == to).then_some((member, role))
                    }
                });
                counted.collect()
            }
            other => unreachable!("{other:?} is in no program here"),
        }
    }

    fn begin(&self, job: &mut Job, number: usize, index: usize) -> bool {
        let counted = self.counted(number, &self.program.operations[index].what);
        let rank = &mut job.ranks[number];
        let sequence_of = |member| rank.members.get(&member).map_or(0, |(_, sequence)| *sequence);
        if rank.attempt.as_ref().is_some_and(|attempt| attempt.parks(sequence_of)) {
            return false;
        }
        let is_split = self.flaw == Some(Flaw::SplitGroup);
        let part = if is_split { rank.parts..rank.parts + 1 } else { 0..counted.len() };
        rank.parts = if part.end == counted.len() { 0 } else { part.end };
        for (member, role) in &counted[part] {
            rank.members.entry(*member).or_insert((*role, 0)).1 += 1;
        }
        if rank.parts == 0 {
            job.begun[index] |= 1 << number;
            // What is only enqueued returns at once.
            let what = &self.program.operations[index].what;
            rank.is_in_call = !matches!(what, What::Enqueue(_));
            rank.done += usize::from(!rank.is_in_call);
        }
        true
    }

    fn end(&self, rank: &mut Rank, number: usize, what: &What) {
        let exists = Role::Communicator { awaits: None, alias: None };
        match what {
            What::Create(communicator) => {
                let member = self.member(*communicator, number);
                rank.members.entry(member).and_modify(|(role, _)| *role = exists);
            }
            What::Split(_, parts) => {
                for part in parts.iter().filter(|part| self.program.communicators[**part].contains(&number)) {
                    rank.members.insert(self.member(*part, number), (exists, 0));
                }
            }
            What::Destroy(communicator, _) => {
                let member = self.member(*communicator, number);
                rank.members.remove(&member);
            }
            _ => {}
        }
        rank.is_in_call = false;
        rank.done += 1;
    }
}

/// A collective or a group on these communicators.
fn on(communicators: &[usize]) -> What {
    What::Enqueue(communicators.iter().map(|one| (On::Communicator(*one), 1)).collect())
}

fn send(communicator: usize, from: usize, to: usize) -> What {
    What::Enqueue(vec![(On::Pair(communicator, from, to), 1)])
}

/// More states than this are more than a test should explore.
const MOST_STATES: usize = 1_000_000;

/// Explores a program whose first operations, the creations of the first `prelude` communicators, are done.
fn explore(
    communicators: &[&[usize]],
    prelude: usize,
    operations: Vec<(What, &[usize])>,
    flaw: Option<Flaw>,
) -> impl Checker<Exploration> {
    let created = communicators[..prelude].iter().enumerate();
    let created = created.map(|(communicator, ranks)| (What::Create(communicator), *ranks));
    let operations = created.chain(operations);
    let operations: Vec<_> =
        operations.map(|(what, ranks)| Operation { what, ranks: ranks.to_vec() }).collect();
    let waits = operations.iter().any(|operation| matches!(operation.what, What::Wait));
    let communicators = communicators.iter().map(|ranks| ranks.to_vec()).collect();
    let program = of_operations(operations, communicators);
    let exploration = Exploration { program, prelude, waits, flaw };
    let checker = exploration.checker().target_state_count(MOST_STATES).spawn_bfs().join();
    assert!(checker.state_count() < MOST_STATES, "the exploration is not complete");
    checker
}

/// All properties hold, in that many states at least.
fn holds(communicators: &[&[usize]], prelude: usize, operations: Vec<(What, &[usize])>, states: usize) {
    let checker = explore(communicators, prelude, operations, None);
    checker.assert_properties();
    let count = checker.unique_state_count();
    println!("{count} states, {} ranks", checker.model().program.of_rank.len());
    assert!(count >= states, "{count} states");
}

/// The property that a flawed protocol violates.
fn violated(
    flaw: Flaw,
    communicators: &[&[usize]],
    prelude: usize,
    operations: Vec<(What, &[usize])>,
) -> Vec<&'static str> {
    let checker = explore(communicators, prelude, operations, Some(flaw));
    let violations = ["consistent", "finite"].into_iter();
    violations.filter(|property| checker.discovery(property).is_some()).collect()
}

const FIRST: &[usize] = &[0];
const BOTH: &[usize] = &[0, 1];
const BACK: &[usize] = &[1, 0];
const ALL: &[usize] = &[0, 1, 2];
const LEFT: &[usize] = &[0, 1];
const RIGHT: &[usize] = &[1, 2];

#[test]
fn two_ranks_that_create_a_communicator() {
    let program = vec![(What::Create(0), BOTH), (on(&[0]), BOTH)];
    holds(&[BOTH], 0, program, 100);
}

#[test]
fn two_ranks_with_collectives_and_sends() {
    let program = vec![(on(&[0]), BOTH), (send(0, 1, 0), BOTH), (What::Synchronize, FIRST), (on(&[0]), BOTH)];
    holds(&[BOTH], 1, program, 100);
}

#[test]
fn two_ranks_that_split_and_destroy() {
    let program = vec![
        (What::Split(0, vec![1]), BOTH),
        (on(&[1, 0]), BOTH),
        (What::Destroy(1, true), BOTH),
        (on(&[0]), BOTH),
    ];
    holds(&[BOTH, BOTH], 1, program, 100);
}

/// The chain by which targets are raised: rank 1 has to pass its other communicator, so rank 2 has to follow.
#[test]
fn three_ranks_with_overlapping_communicators() {
    let program = vec![(on(&[1]), RIGHT), (on(&[0]), LEFT), (on(&[1]), RIGHT)];
    holds(&[LEFT, RIGHT], 2, program, 1000);
}

#[test]
fn three_ranks_with_a_group() {
    holds(&[LEFT, RIGHT], 2, vec![(on(&[0, 1]), ALL), (on(&[0]), LEFT)], 1000);
}

/// Rank 1 waits for rank 0, which is parked, and rank 2 for rank 1.
#[test]
fn a_wait_on_the_host_ends_the_attempt_only() {
    let program = vec![(on(&[0]), FIRST), (What::Wait, LEFT), (on(&[1]), RIGHT), (What::Wait, BACK)];
    holds(&[FIRST, RIGHT], 2, program, 100);
}

#[test]
fn the_model_finds_a_missing_target_raise() {
    let program = vec![(on(&[1]), RIGHT), (on(&[0]), LEFT)];
    assert_eq!(violated(Flaw::NoRaise, &[LEFT, RIGHT], 2, program), ["finite"]);
}

#[test]
fn the_model_finds_a_missing_mark() {
    assert!(violated(Flaw::NoMark, &[BOTH], 0, vec![(What::Create(0), BOTH)]).contains(&"consistent"));
}

#[test]
fn the_model_finds_a_group_that_is_not_atomic() {
    let program = vec![(on(&[0, 1]), ALL)];
    assert!(violated(Flaw::SplitGroup, &[LEFT, RIGHT], 2, program).contains(&"consistent"));
}

/// While the communicator is being created no step parks. A rank that still believes this begins one after the cut.
#[test]
fn the_model_finds_an_acknowledgement_of_older_targets() {
    let program = vec![(What::Create(0), BOTH), (on(&[0]), BOTH)];
    assert!(violated(Flaw::OldVersion, &[BOTH], 0, program).contains(&"consistent"));
}
