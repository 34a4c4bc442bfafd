//! A job under a random schedule: ranks with their clocks, the launchers to which they connect, messages in flight, and the
//! coordinator.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::program::{On, Operation, Program, What};
use crate::rank::{Clock, Counts, Entry, InCall, Thread};
use crate::{
    Blocker, Failure, FromLauncher, JobCut, Member, Name, NamedRank, Order, RankId, Report, Role, Settings,
    State, ToLauncher,
};

/// A deliberate error, which the tests have to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Ranks do not learn of raised targets.
    NoRaise,
    /// Steps in progress are not reported.
    NoMark,
    /// A group begins one communicator after the other.
    SplitGroup,
    /// A report counts as acknowledging the newest targets, whatever its rank has.
    OldVersion,
    /// A launcher says that it knows all processes, and accepts further ones.
    NotClosed,
}

/// How a run is to be.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub seed: u64,
    /// Number of checkpoints to request.
    pub checkpoints: u32,
    /// Whether deadlines, and not only back-offs, also pass while the ranks make progress.
    pub expires: bool,
    /// The first operations, which end before the first request.
    pub prelude: usize,
    pub killed: Option<Killed>,
    pub flaw: Option<Flaw>,
}

/// A rank that is killed.
#[derive(Clone, Copy, Debug)]
pub struct Killed {
    pub rank: usize,
    /// After so many beginnings and ends of its operations.
    pub after: usize,
}

/// What has happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub cuts: u32,
    /// Attempts that ended because no rank could go on.
    pub stuck: u32,
    /// Of requests for which all attempts failed.
    pub failures: Vec<Failure>,
    /// By rank: how many beginnings and ends of its operations it has made.
    pub progress: Vec<usize>,
}

enum FromRank {
    Joined,
    Report(Report),
    Ended,
}

#[derive(Default)]
struct Rank<'a> {
    has_joined: bool,
    has_ended: bool,
    /// How many of its operations it has completed.
    done: usize,
    in_call: Option<InCall<'a>>,
    /// For [`Flaw::SplitGroup`]: how many parts of the step have begun.
    parts: usize,
    communicators: BTreeMap<usize, Arc<Entry>>,
    graphs: BTreeMap<usize, Counts>,
    inbox: VecDeque<Order>,
    outbox: VecDeque<FromRank>,
    last_report: Option<Report>,
    /// The newest version that was sent to it, and the first targets.
    newest: u64,
    first_targets: Vec<(Member, u64)>,
}

/// What a launcher does next for the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Idle,
    /// It has not begun.
    Wanted,
    Begun,
    /// The coordinator wants it to accept no connection.
    Closing(u64),
    Closed,
    /// The ranks of all launchers are at the cut.
    Reached,
    Failed,
}

#[derive(Default)]
struct Launcher {
    stage: Stage,
    /// Ranks that are connected.
    ranks: BTreeSet<usize>,
    inbox: VecDeque<ToLauncher>,
    outbox: VecDeque<FromLauncher>,
}

pub struct World<'a> {
    program: &'a Program,
    clocks: &'a [Clock],
    ranks: Vec<Rank<'a>>,
    /// A launcher has given the request up.
    is_given_up: bool,
    /// Rank r connects to launcher r modulo their number.
    launchers: Vec<Launcher>,
    cut: JobCut,
    now: Duration,
    run: Run,
    random: u64,
    /// Who has begun each operation.
    begun: Vec<BTreeSet<usize>>,
    /// Which operation each step was, by the sequence that the ranks' clocks gave it.
    matched: BTreeMap<(On, u64), usize>,
    /// What had been begun when the ranks began to count.
    begun_at_count: BTreeSet<usize>,
    outcome: Outcome,
}

const SETTINGS: Settings =
    Settings { timeout: Duration::from_secs(10), attempts: 3, back_off: Duration::from_secs(1) };

fn named(rank: usize) -> NamedRank {
    NamedRank { connection: rank as u64, name: format!("rank {rank}") }
}

/// Runs a program to its end. The error says what went wrong.
pub fn simulate(program: &Program, run: Run) -> Result<Outcome, String> {
    let clocks: Vec<_> = program.of_rank.iter().map(|_| Clock::new(&["step"], || ())).collect();
    // A third of all jobs each has one launcher, two, and one for each rank.
    let launchers = [1, 2, clocks.len()][(run.seed % 3) as usize].min(clocks.len());
    let mut world = World {
        program,
        clocks: &clocks,
        ranks: program.of_rank.iter().map(|_| Rank::default()).collect(),
        is_given_up: false,
        launchers: (0..launchers).map(|_| Launcher::default()).collect(),
        cut: JobCut::new(SETTINGS, launchers as u32),
        now: Duration::ZERO,
        run,
        random: run.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        begun: vec![BTreeSet::new(); program.operations.len()],
        matched: BTreeMap::new(),
        begun_at_count: BTreeSet::new(),
        outcome: Outcome::default(),
    };
    world.run()?;
    let progress = (0..world.ranks.len()).map(|rank| world.progress(rank)).collect();
    Ok(Outcome { progress, ..world.outcome })
}

impl<'a> World<'a> {
    fn random(&mut self, below: usize) -> usize {
        // xorshift64
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 33).expect("31 bits") % below
    }

    fn run(&mut self) -> Result<(), String> {
        let actions = self.ranks.len() * 4 + self.launchers.len() * 3 + 2;
        loop {
            let first = self.random(actions);
            let mut has_moved = false;
            for offset in 0..actions {
                has_moved = self.act((first + offset) % actions)?;
                if has_moved {
                    break;
                }
            }
            if has_moved {
                continue;
            }
            let has_ended =
                self.ranks.iter().zip(&self.program.of_rank).all(|(rank, of)| rank.done == of.len());
            match self.cut.next_tick() {
                Some(next) => {
                    self.outcome.stuck += u32::from(!self.is_backing_off());
                    self.pass(next);
                }
                None if has_ended => return self.check_end(),
                // The others wait for the killed rank, with and without checkpoints.
                None if self.run.killed.is_some() && self.run.checkpoints == 0 => return Ok(()),
                None if self.run.killed.is_some() => self.begin_checkpoint(),
                None => return Err("the ranks wait for each other without a checkpoint".to_owned()),
            }
        }
    }

    /// Does one thing, if it can be done.
    fn act(&mut self, action: usize) -> Result<bool, String> {
        let (ranks, launchers) = (self.ranks.len(), self.launchers.len());
        let rank = action % ranks;
        match action / ranks {
            0 => return self.step(rank),
            1 => return Ok(self.follow(rank)),
            2 => return Ok(self.report(rank)),
            3 => return Ok(self.receive(rank)),
            _ => {}
        }
        let action = action - 4 * ranks;
        match action / launchers {
            0 => self.serve(action % launchers),
            1 => Ok(self.hear(action % launchers)),
            2 => Ok(self.deliver(action % launchers)),
            _ if action == 3 * launchers => Ok(self.request()),
            _ => Ok(self.expire()),
        }
    }

    fn is_backing_off(&self) -> bool {
        matches!(self.cut.coordinator().state(), State::BackingOff { .. })
    }

    /// A launcher does what is to be done for the request.
    fn serve(&mut self, index: usize) -> Result<bool, String> {
        let count = self.launchers.len();
        let is_connecting = |(rank, one): (usize, &Rank)| {
            rank % count == index && one.outbox.iter().any(|one| matches!(one, FromRank::Joined))
        };
        let is_settled = !self.ranks.iter().enumerate().any(is_connecting);
        let is_unaware = self.run.flaw == Some(Flaw::NotClosed);
        let of_all = |stage| self.launchers.iter().all(|one| one.stage == stage);
        let (all_reached, all_failed) = (of_all(Stage::Reached), of_all(Stage::Failed));
        let gives_up = self.run.expires && self.random(256) == 0;
        let launcher = &mut self.launchers[index];
        match launcher.stage {
            Stage::Begun | Stage::Closing(_) | Stage::Closed if gives_up && !self.is_given_up => {
                launcher.outbox.push_back(FromLauncher::GivesUp);
                self.is_given_up = true;
            }
            Stage::Wanted => {
                let ranks = launcher.ranks.iter().map(|rank| named(*rank)).collect();
                launcher.outbox.push_back(FromLauncher::Begin { ranks: Some(ranks) });
                launcher.stage = Stage::Begun;
            }
            Stage::Closing(round) if is_settled || is_unaware => {
                launcher.outbox.push_back(FromLauncher::Closed { round });
                launcher.stage = Stage::Closed;
            }
            Stage::Reached if all_reached => {
                self.check_cut()?;
                self.outcome.cuts += 1;
                for rank in 0..self.ranks.len() {
                    self.ranks[rank].inbox.push_back(Order::Release);
                }
                self.launchers.iter_mut().for_each(|one| one.stage = Stage::Idle);
            }
            Stage::Failed if all_failed => {
                self.launchers.iter_mut().for_each(|one| one.stage = Stage::Idle);
                let State::Failed(failure) = self.cut.coordinator().state() else {
                    let is_reason = self.is_given_up;
                    return if is_reason { Ok(true) } else { Err("a failure without one".to_owned()) };
                };
                // The rank that was waited for may have ended since.
                if failure.blockers.is_empty() && !self.is_given_up {
                    return Err("a failure that names nothing".to_owned());
                }
                let mut failure = failure.clone();
                failure.blockers.iter_mut().filter_map(Blocker::rank_mut).for_each(|rank| {
                    *rank = RankId(self.cut.connection(*rank));
                });
                self.outcome.failures.push(failure);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// A launcher takes a message of the coordinator.
    fn hear(&mut self, index: usize) -> bool {
        let Some(message) = self.launchers[index].inbox.pop_front() else { return false };
        self.launchers[index].stage = match message {
            ToLauncher::Order { connection, order } => {
                self.ranks[connection as usize].inbox.push_back(order);
                return true;
            }
            ToLauncher::Close { round } => Stage::Closing(round),
            ToLauncher::Open => Stage::Begun,
            ToLauncher::Reached { .. } => Stage::Reached,
            ToLauncher::Failed { .. } => Stage::Failed,
        };
        true
    }

    /// A message of a launcher arrives.
    fn deliver(&mut self, index: usize) -> bool {
        let Some(mut message) = self.launchers[index].outbox.pop_front() else { return false };
        if let FromLauncher::Report { connection, report } = &mut message
            && self.run.flaw == Some(Flaw::OldVersion)
            && report.version > 0
        {
            report.version = self.ranks[*connection as usize].newest;
        }
        self.cut.receive(self.now, index as u32, message);
        self.send();
        true
    }

    fn send(&mut self) {
        for (launcher, message) in self.cut.take_messages() {
            if let ToLauncher::Order { connection, order: Order::Reach { version, .. } } = &message {
                self.ranks[*connection as usize].newest = *version;
            }
            self.launchers[launcher as usize].inbox.push_back(message);
        }
    }

    fn request(&mut self) -> bool {
        // Not only begun by all: a creation that has not returned is incomplete again when a member exits.
        let next_of_ranks =
            self.ranks.iter().zip(&self.program.of_rank).filter_map(|(rank, of)| of.get(rank.done));
        let is_over = next_of_ranks.min().is_none_or(|next| *next >= self.run.prelude);
        let is_idle = self.launchers.iter().all(|launcher| launcher.stage == Stage::Idle);
        if !is_over || !is_idle || self.run.checkpoints == 0 || self.random(8) > 0 && self.can_any_step() {
            return false;
        }
        self.begin_checkpoint();
        true
    }

    fn begin_checkpoint(&mut self) {
        self.run.checkpoints -= 1;
        self.begun_at_count.clear();
        self.is_given_up = false;
        self.cut.begin();
        for launcher in &mut self.launchers {
            // What is under way belongs to the request before.
            (launcher.stage, launcher.inbox, launcher.outbox) =
                (Stage::Wanted, VecDeque::new(), VecDeque::new());
        }
    }

    fn can_any_step(&self) -> bool {
        self.ranks.iter().zip(&self.program.of_rank).any(|(rank, of)| rank.done < of.len())
    }

    fn expire(&mut self) -> bool {
        match self.cut.next_tick() {
            Some(next) if (self.run.expires || self.is_backing_off()) && self.random(64) == 0 => {
                self.pass(next);
                true
            }
            _ => false,
        }
    }

    fn pass(&mut self, to: Duration) {
        self.now = to;
        self.cut.tick(to);
        self.send();
    }

    /// The agent follows an order.
    fn follow(&mut self, rank: usize) -> bool {
        let Some(order) = self.ranks[rank].inbox.pop_front() else { return false };
        let order = match (self.run.flaw, order) {
            (Some(Flaw::NoRaise), Order::Reach { attempt, version, targets, is_open }) => {
                let first = &mut self.ranks[rank].first_targets;
                if version == 1 {
                    first.clone_from(&targets);
                }
                Order::Reach { attempt, version, targets: first.clone(), is_open }
            }
            (_, order) => order,
        };
        let counts = matches!(order, Order::Count { .. });
        self.clocks[rank].follow(order);
        if counts {
            let begun = (0..self.begun.len()).filter(|operation| self.begun[*operation].contains(&rank));
            self.begun_at_count.extend(begun);
        }
        true
    }

    /// The agent reports a change.
    fn report(&mut self, rank: usize) -> bool {
        let mut report = self.clocks[rank].report();
        if let (Some(Flaw::NoMark), Some(report)) = (self.run.flaw, &mut report) {
            report.in_call = 0;
        }
        let rank = &mut self.ranks[rank];
        if report.is_none() || report == rank.last_report {
            return false;
        }
        rank.last_report.clone_from(&report);
        rank.outbox.extend(report.map(FromRank::Report));
        true
    }

    /// A launcher takes a message of a rank.
    fn receive(&mut self, rank: usize) -> bool {
        let Some(message) = self.ranks[rank].outbox.pop_front() else { return false };
        let index = rank % self.launchers.len();
        let launcher = &mut self.launchers[index];
        let connection = rank as u64;
        let message = match message {
            FromRank::Joined => {
                launcher.ranks.insert(rank);
                FromLauncher::Joined { rank: named(rank) }
            }
            FromRank::Ended => {
                launcher.ranks.remove(&rank);
                FromLauncher::Left { connection }
            }
            FromRank::Report(report) => FromLauncher::Report { connection, report },
        };
        if !matches!(launcher.stage, Stage::Idle | Stage::Wanted) {
            launcher.outbox.push_back(message);
        }
        true
    }

    fn check_cut(&self) -> Result<(), String> {
        if let Some(rank) = self.ranks.iter().position(|rank| rank.in_call.is_some()) {
            return Err(format!("rank {rank} is in a call at the cut"));
        }
        for (index, (operation, begun)) in self.program.operations.iter().zip(&self.begun).enumerate() {
            let ranks_of_parts: Vec<_> = match &operation.what {
                What::Enqueue(on) | What::Capture(_, on) | What::Launch(_, on) => {
                    on.iter().map(|part| self.program.ranks_of(&[*part])).collect()
                }
                _ => vec![operation.ranks.clone()],
            };
            for mut ranks in ranks_of_parts {
                // A killed rank is no member of anything: the others are not held to what it had begun.
                ranks.retain(|rank| !self.is_killed(*rank));
                let begun_by = ranks.iter().filter(|rank| begun.contains(rank)).count();
                if operation.what.is_common() && begun_by > 0 && begun_by < ranks.len() {
                    return Err(format!(
                        "operation {index} ({operation:?}) is begun by {begun:?} only at the cut"
                    ));
                }
            }
        }
        if self.run.prelude > 0 && self.run.flaw.is_none() { self.check_extent() } else { Ok(()) }
    }

    /// Without changes of communicators, exactly that is begun which has to be.
    fn check_extent(&self) -> Result<(), String> {
        let mut needed = self.begun_at_count.clone();
        loop {
            let before = needed.len();
            for operations in &self.program.of_rank {
                let last = operations.iter().rposition(|operation| needed.contains(operation));
                needed.extend(&operations[..last.map_or(0, |last| last + 1)]);
            }
            if needed.len() == before {
                break;
            }
        }
        // A rank that has exited may not have received Count. What it shared with others was complete.
        let has_rank =
            |operation: &Operation| operation.ranks.iter().any(|rank| !self.ranks[*rank].has_ended);
        let is_step = |index: &usize| {
            let operation = &self.program.operations[*index];
            operation.what.is_common() && has_rank(operation)
        };
        let begun = (0..self.begun.len()).filter(|index| !self.begun[*index].is_empty()).filter(is_step);
        let needed = needed.into_iter().filter(is_step);
        let (begun, needed): (Vec<_>, Vec<_>) = (begun.collect(), needed.collect());
        if begun == needed { Ok(()) } else { Err(format!("begun: {begun:?}, needed: {needed:?}")) }
    }

    fn check_end(&self) -> Result<(), String> {
        let all = self.program.operations.iter().zip(&self.begun);
        match all.enumerate().find(|(_, (operation, begun))| operation.ranks.len() != begun.len()) {
            None => Ok(()),
            Some((index, _)) => Err(format!("operation {index} is not done at the end")),
        }
    }

    /// A rank goes on with its program.
    fn step(&mut self, rank: usize) -> Result<bool, String> {
        let program = self.program;
        if !self.ranks[rank].has_joined {
            let stage = self.launchers[rank % self.launchers.len()].stage;
            let is_closed = matches!(stage, Stage::Closing(_) | Stage::Closed | Stage::Reached);
            if is_closed && self.run.flaw != Some(Flaw::NotClosed) {
                return Ok(false);
            }
            self.ranks[rank].has_joined = true;
            self.ranks[rank].outbox.push_back(FromRank::Joined);
            return Ok(true);
        }
        if self.is_killed(rank) {
            return Ok(false);
        }
        if self.run.killed.is_some_and(|killed| killed.rank == rank && self.progress(rank) >= killed.after) {
            self.exit(rank);
            return Ok(true);
        }
        let Some(&index) = program.of_rank[rank].get(self.ranks[rank].done) else {
            // Half of the ranks exit at the end. A rank that does so before its work is complete leaves its peers
            // without theirs, with and without checkpoints.
            let ends = rank.is_multiple_of(2) && !self.ranks[rank].has_ended && self.is_complete(rank);
            if ends {
                self.exit(rank);
            }
            return Ok(ends);
        };
        let operation = &program.operations[index];
        if self.ranks[rank].in_call.is_some() {
            return Ok(self.end(rank, index, operation));
        }
        match operation.what {
            What::Synchronize => {
                if !self.is_complete(rank) {
                    return Ok(false);
                }
            }
            What::Wait => {
                if operation.ranks[1] == rank && !self.begun[index].contains(&operation.ranks[0]) {
                    return Ok(false);
                }
            }
            What::Abort(communicator) => {
                if !self.is_complete_on(rank, communicator) {
                    return Ok(false);
                }
                self.retire(rank, communicator);
            }
            _ => return self.begin(rank, index),
        }
        self.begun[index].insert(rank);
        self.ranks[rank].done += 1;
        Ok(true)
    }

    /// Whether all that the rank has enqueued is complete.
    fn is_complete(&self, rank: usize) -> bool {
        let mine = self.program.of_rank[rank][..self.ranks[rank].done].iter();
        let is_common = |index: &&usize| self.program.operations[**index].what.is_common();
        mine.filter(is_common).all(|index| self.is_begun_by_all(*index))
    }

    /// Whether that is so of a communicator.
    fn is_complete_on(&self, rank: usize, communicator: usize) -> bool {
        let before = &self.program.of_rank[rank][..self.ranks[rank].done];
        let is_on = |index: &&usize| self.program.operations[**index].what.is_on(communicator);
        before.iter().filter(is_on).all(|index| self.is_begun_by_all(*index))
    }

    fn retire(&mut self, rank: usize, communicator: usize) {
        let entry = self.ranks[rank].communicators.remove(&communicator).expect("a communicator");
        self.clocks[rank].retire(&entry);
    }

    fn is_begun_by_all(&self, index: usize) -> bool {
        self.begun[index].len() == self.program.operations[index].ranks.len()
    }

    /// How many beginnings and ends of its operations the rank has made.
    fn progress(&self, rank: usize) -> usize {
        let rank = &self.ranks[rank];
        2 * rank.done + usize::from(rank.in_call.is_some())
    }

    fn is_killed(&self, rank: usize) -> bool {
        self.ranks[rank].has_ended && self.run.killed.is_some_and(|killed| killed.rank == rank)
    }

    fn exit(&mut self, rank: usize) {
        let rank = &mut self.ranks[rank];
        rank.has_ended = true;
        rank.in_call = None;
        rank.outbox.push_back(FromRank::Ended);
    }

    fn entry(&self, rank: usize, on: On) -> Arc<Entry> {
        let communicator = Arc::clone(&self.ranks[rank].communicators[&on.communicator()]);
        let On::Pair(index, from, to) = on else { return communicator };
        let place = |of: usize| self.place(index, of);
        let (from_index, to_index) = (place(from), place(to));
        if rank == from {
            self.clocks[rank].pair(&communicator, to_index, true)
        } else {
            self.clocks[rank].pair(&communicator, from_index, false)
        }
    }

    fn place(&self, communicator: usize, rank: usize) -> u32 {
        let ranks = &self.program.communicators[communicator];
        ranks.iter().position(|member| *member == rank).expect("a member") as u32
    }

    fn register(&mut self, rank: usize, communicator: usize, awaits: Option<u32>) {
        let name = Name::of_unique_ids(&communicator.to_le_bytes());
        let member = Member { communicator: name, index: self.place(communicator, rank) };
        let known = self.ranks[rank].communicators.contains_key(&communicator);
        if !known {
            let entry = self.clocks[rank].register(member, Role::Communicator { awaits, alias: None });
            self.ranks[rank].communicators.insert(communicator, entry);
        }
    }

    /// What a rank counts for an operation. Ranks may have the parts of a group in another order.
    fn parts(&self, rank: usize, on: &[(On, u32)]) -> Vec<(On, u32)> {
        let is_mine = |(on, _): &&(On, u32)| match on {
            On::Communicator(communicator) => self.program.communicators[*communicator].contains(&rank),
            On::Pair(_, from, to) => *from == rank || *to == rank,
        };
        let mut parts: Vec<_> = on.iter().filter(is_mine).copied().collect();
        let by = rank % parts.len().max(1);
        parts.rotate_left(by);
        parts
    }

    fn counts(&self, rank: usize, on: &[(On, u32)]) -> Counts {
        let mut thread = Thread::default();
        thread.start_group();
        for (on, operations) in self.parts(rank, on) {
            let entry = self.entry(rank, on);
            thread.add_to_group(&entry, operations);
            if let On::Pair(communicator, from, to) = on
                && from == to
            {
                // A rank that sends to itself receives it too.
                let of = Arc::clone(&self.ranks[rank].communicators[&communicator]);
                let receives = self.clocks[rank].pair(&of, of.member().index, false);
                thread.add_to_group(&receives, operations);
            }
        }
        thread.end_group().expect("the group").clone()
    }

    fn begin(&mut self, rank: usize, index: usize) -> Result<bool, String> {
        let on = match &self.program.operations[index].what {
            What::Create(communicator) => {
                let ranks = self.program.communicators[*communicator].len() as u32;
                self.register(rank, *communicator, Some(ranks));
                vec![(On::Communicator(*communicator), 1)]
            }
            What::Split(communicator, _) | What::Destroy(communicator, _) => {
                vec![(On::Communicator(*communicator), 1)]
            }
            What::Enqueue(on) | What::Capture(_, on) | What::Launch(_, on) => on.clone(),
            What::Synchronize | What::Wait | What::Abort(_) => Vec::new(),
        };
        let counts = match self.program.operations[index].what {
            What::Launch(graph, _) => self.ranks[rank].graphs[&graph].clone(),
            _ => self.counts(rank, &on),
        };
        if self.run.flaw == Some(Flaw::SplitGroup) {
            let part = self.ranks[rank].parts;
            if part + 1 < counts.step().len() {
                let has_begun = self.clocks[rank].try_begin(&counts.step()[part..=part], 0).is_some();
                self.ranks[rank].parts += usize::from(has_begun);
                return Ok(has_begun);
            }
        }
        let part = std::mem::take(&mut self.ranks[rank].parts);
        let Some(in_call) = self.clocks[rank].try_begin(&counts.step()[part..], 0) else {
            self.ranks[rank].parts = part;
            return Ok(false);
        };
        self.ranks[rank].in_call = Some(in_call);
        self.begun[index].insert(rank);
        for (on, _) in self.parts(rank, &on) {
            let sequence = self.entry(rank, on).sequence();
            let known = *self.matched.entry((on, sequence)).or_insert(index);
            if known != index {
                return Err(format!("step {sequence} of {on:?} is operation {known} and {index}"));
            }
        }
        if let What::Capture(graph, _) = self.program.operations[index].what {
            self.ranks[rank].graphs.insert(graph, counts);
        }
        Ok(true)
    }

    /// A call returns, if it can.
    fn end(&mut self, rank: usize, index: usize, operation: &Operation) -> bool {
        let blocks = match operation.what {
            What::Create(_) | What::Split(..) | What::Capture(..) => true,
            What::Destroy(_, blocks) => blocks,
            _ => false,
        };
        if blocks && !self.is_begun_by_all(index) {
            return false;
        }
        if let What::Destroy(communicator, _) = operation.what
            && !self.is_complete_on(rank, communicator)
        {
            return false;
        }
        match &operation.what {
            What::Create(communicator) => self.ranks[rank].communicators[communicator].created(),
            What::Split(_, parts) => {
                for part in parts.iter().filter(|part| self.program.communicators[**part].contains(&rank)) {
                    self.register(rank, *part, None);
                }
            }
            What::Destroy(communicator, _) => self.retire(rank, *communicator),
            _ => {}
        }
        self.ranks[rank].in_call = None;
        self.ranks[rank].done += 1;
        true
    }
}
