//! The coordinator's side: a state machine over messages, without I/O and without a clock of its own.
//!
//! ```text
//!          request          all reported           all met, none in a call
//!   Idle ----------> Counting -----------> Reaching ----------------------> Cut
//!    ^ ^                |                   |  ^                             |
//!    | |                |      deadline     |  |  a rank joins               |
//!    | |                +---------+---------+  +-----------------------------+
//!    | |                          |                                          |
//!    | |   tries used up          v      back-off over                       |
//!    | +---------------------- BackingOff -------------> Counting            |
//!    |                                                                       |
//!    +-------------------------------- release ------------------------------+
//! ```
//!
//! Every rank's newest report is kept; everything else follows from the reports. A rank gets targets with a new version
//! when its own targets change, and a first one if it has communicators; one without has no targets, and gets none. It is ready if its report acknowledges
//! the newest version that was sent to it, no call is in progress and all targets are met. Such a rank begins no step
//! before it gets the next version, so its report stays true, and all ranks being ready is the cut.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::messages::{MemberReport, Order, Report, Role};
use crate::names::Member;

mod failure;
mod targets;

pub use failure::{Blocker, Failure, NamedMember};
use targets::{Aliases, Targets, targets};

/// A rank: a process of the job. The caller gives the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RankId(pub u64);

impl fmt::Display for RankId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// Times and tries of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Settings {
    /// The time of one attempt.
    pub timeout: Duration,
    /// Number of attempts for a request, at least 1.
    pub attempts: u32,
    /// The time for which the ranks run after the first attempt; it doubles after each.
    pub back_off: Duration,
}

/// Where the coordinator is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// No cut is wanted.
    Idle,
    /// Ranks report what they have begun.
    Counting,
    /// Ranks run to their targets.
    Reaching,
    /// The ranks stand at a consistent cut until [`Coordinator::release`].
    Cut,
    /// An attempt has failed; all ranks run, and the next attempt begins later.
    BackingOff {
        /// When.
        until: Duration,
    },
    /// All attempts have failed; all ranks run.
    Failed(Failure),
}

/// What the coordinator knows of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Rank {
    /// Its newest report of this attempt.
    report: Option<Report>,
    /// The newest version of targets that was sent to it; 0 before the first.
    version: u64,
    /// What that version said.
    targets: BTreeMap<Member, u64>,
    is_open: bool,
}

impl Rank {
    fn is_ready(&self) -> bool {
        let Some(report) = &self.report else { return false };
        report.version == self.version
            && report.in_call == 0
            && !self.is_open
            && self.targets.iter().all(|(member, target)| sequence(report, *member) >= *target)
    }

    /// Whether all targets stay as they are after this report: the rank has begun nothing that its targets do not ask for,
    /// and its communicators are the same.
    fn keeps_targets(&self, report: &Report) -> bool {
        let Some(before) = &self.report else { return false };
        let is_asked_for = |(before, now): (&MemberReport, &MemberReport)| {
            let has_moved = before.sequence != now.sequence;
            (before.member, before.role, before.sequence > 0) == (now.member, now.role, now.sequence > 0)
                && (!has_moved || self.targets.get(&now.member).is_some_and(|target| now.sequence <= *target))
        };
        before.members.len() == report.members.len()
            && before.members.iter().zip(&report.members).all(is_asked_for)
    }
}

/// What a report says of a member; its members are sorted.
fn find(report: &Report, member: Member) -> Option<&MemberReport> {
    report.members.binary_search_by_key(&member, |one| one.member).ok().map(|index| &report.members[index])
}

fn sequence(report: &Report, member: Member) -> u64 {
    find(report, member).map_or(0, |one| one.sequence)
}

/// The coordinator of a job's ranks. Times are those of a clock of the caller that never goes back.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Coordinator {
    settings: Settings,
    state: State,
    ranks: BTreeMap<RankId, Rank>,
    aliases: Aliases,
    /// The number of the newest attempt.
    attempt: u64,
    /// Attempts of this request.
    tries: u32,
    deadline: Duration,
    /// Number of ranks that have not reported.
    silent: usize,
    /// Number of ranks that are not ready.
    unready: usize,
    orders: Vec<(RankId, Order)>,
}

impl Coordinator {
    /// A coordinator without ranks.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            state: State::Idle,
            ranks: BTreeMap::new(),
            aliases: Aliases::default(),
            attempt: 0,
            tries: 0,
            deadline: Duration::ZERO,
            silent: 0,
            unready: 0,
            orders: Vec::new(),
        }
    }

    /// Where it is.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// When [`Coordinator::tick`] has something to do, if nothing else happens.
    #[must_use]
    pub fn next_tick(&self) -> Option<Duration> {
        match self.state {
            State::Counting | State::Reaching => Some(self.deadline),
            State::BackingOff { until } => Some(until),
            State::Idle | State::Cut | State::Failed(_) => None,
        }
    }

    /// Number of attempts of the newest request.
    #[must_use]
    pub fn tries(&self) -> u32 {
        self.tries
    }

    /// Whether a rank has reported a communicator in the newest attempt.
    #[must_use]
    pub fn has_communicators(&self) -> bool {
        self.reports().any(|(_, report)| !report.members.is_empty())
    }

    /// The messages to send, in this order; they are handed out once.
    #[must_use]
    pub fn take_orders(&mut self) -> Vec<(RankId, Order)> {
        std::mem::take(&mut self.orders)
    }

    /// A rank has connected. While a cut is wanted it takes part in it, and a cut that was reached is not one any more: the
    /// attempt gets its whole time again.
    pub fn join(&mut self, rank: RankId, now: Duration) {
        let before = self.ranks.insert(rank, Rank::default());
        self.silent += usize::from(before.is_none_or(|before| before.report.is_some()));
        if self.state == State::Cut {
            self.deadline = now + self.settings.timeout;
        }
        if self.is_attempting() || self.state == State::Cut {
            self.orders.push((rank, Order::Count { attempt: self.attempt }));
            self.evaluate();
        }
    }

    /// A rank has ended, whether it exited or was killed. The other members of its communicators are not held to what it
    /// had begun.
    pub fn leave(&mut self, rank: RankId) {
        let before = self.ranks.remove(&rank);
        self.silent -= usize::from(before.is_some_and(|before| before.report.is_none()));
        self.evaluate();
    }

    /// Requests a cut. Does nothing if one is wanted already.
    pub fn request(&mut self, now: Duration) {
        if matches!(self.state, State::Idle | State::Failed(_)) {
            self.tries = 0;
            self.begin_attempt(now);
        }
    }

    /// Ends the checkpoint, or the wish for one: all ranks run on.
    pub fn release(&mut self) {
        if self.is_attempting() || self.state == State::Cut {
            self.release_ranks();
        }
        self.state = State::Idle;
    }

    /// Takes a rank's report.
    pub fn receive(&mut self, rank: RankId, mut report: Report) {
        let is_current = report.attempt == self.attempt && (self.is_attempting() || self.state == State::Cut);
        if let (true, Some(known)) = (is_current, self.ranks.get_mut(&rank)) {
            report.members.sort_by_key(|one| one.member);
            self.aliases.learn(&report);
            let keeps_targets = known.keeps_targets(&report);
            let was_ready = known.is_ready();
            self.silent -= usize::from(known.report.replace(report).is_none());
            if !keeps_targets || self.state == State::Counting {
                return self.evaluate();
            }
            // Most reports of many ranks are such: each has to cost little.
            match (was_ready, known.is_ready()) {
                (true, false) => self.unready += 1,
                (false, true) => self.unready -= 1,
                _ => {}
            }
            debug_assert!(self.has_sent(&targets(self.reports(), &self.aliases)), "the targets have changed");
            self.settle();
        }
    }

    /// Time has passed: ends an attempt at its deadline, and begins the next one after the back-off.
    pub fn tick(&mut self, now: Duration) {
        match self.state {
            State::Counting | State::Reaching if now >= self.deadline => self.abandon(now),
            State::BackingOff { until } if now >= until => self.begin_attempt(now),
            _ => {}
        }
    }

    /// Ends a request that has not reached its cut, as if its tries were used up: all ranks run on.
    pub fn give_up(&mut self) {
        let is_attempting = self.is_attempting();
        if is_attempting || matches!(self.state, State::BackingOff { .. }) {
            self.state = State::Failed(self.failure());
        }
        if is_attempting {
            self.release_ranks();
        }
    }

    fn is_attempting(&self) -> bool {
        matches!(self.state, State::Counting | State::Reaching)
    }

    fn begin_attempt(&mut self, now: Duration) {
        self.attempt += 1;
        self.tries += 1;
        self.deadline = now + self.settings.timeout;
        self.state = State::Counting;
        self.silent = self.ranks.len();
        for (id, rank) in &mut self.ranks {
            *rank = Rank::default();
            self.orders.push((*id, Order::Count { attempt: self.attempt }));
        }
        self.evaluate();
    }

    fn abandon(&mut self, now: Duration) {
        if self.tries >= self.settings.attempts {
            return self.give_up();
        }
        let doublings = self.tries.saturating_sub(1).min(16);
        self.state = State::BackingOff { until: now + self.settings.back_off * (1 << doublings) };
        self.release_ranks();
    }

    fn release_ranks(&mut self) {
        self.orders.extend(self.ranks.keys().map(|rank| (*rank, Order::Release)));
    }

    fn reports(&self) -> impl Iterator<Item = (RankId, &Report)> + Clone {
        self.ranks.iter().filter_map(|(id, rank)| Some((*id, rank.report.as_ref()?)))
    }

    /// Sends targets that have changed, and finds out whether this is the cut.
    fn evaluate(&mut self) {
        if !self.is_attempting() && self.state != State::Cut {
            return;
        }
        if self.state == State::Counting && self.silent > 0 {
            return;
        }
        self.state = State::Reaching;
        let Targets { mut of_ranks, incomplete } = targets(self.reports(), &self.aliases);
        let is_open = !incomplete.is_empty();
        for (id, rank) in self.ranks.iter_mut().filter(|(_, rank)| rank.report.is_some()) {
            let targets = of_ranks.remove(id).unwrap_or_default();
            // A rank with communicators has to know that its targets are none.
            let is_untold =
                rank.version == 0 && rank.report.as_ref().is_some_and(|report| !report.members.is_empty());
            if rank.targets == targets && rank.is_open == is_open && !is_untold {
                continue;
            }
            rank.version += 1;
            let order = Order::Reach {
                attempt: self.attempt,
                version: rank.version,
                targets: targets.iter().map(|(member, target)| (*member, *target)).collect(),
                is_open,
            };
            (rank.targets, rank.is_open) = (targets, is_open);
            self.orders.push((*id, order));
        }
        self.unready = self.ranks.values().filter(|rank| !rank.is_ready()).count();
        self.settle();
    }

    fn settle(&mut self) {
        self.state = if self.unready == 0 { State::Cut } else { State::Reaching };
    }

    /// Whether all ranks that have reported have these targets.
    fn has_sent(&self, targets: &Targets) -> bool {
        let none = BTreeMap::new();
        let is_open = !targets.incomplete.is_empty();
        self.ranks.iter().filter(|(_, rank)| rank.report.is_some()).all(|(id, rank)| {
            rank.is_open == is_open && rank.targets == *targets.of_ranks.get(id).unwrap_or(&none)
        })
    }

    fn failure(&self) -> Failure {
        let incomplete = targets(self.reports(), &self.aliases).incomplete;
        let incomplete = incomplete.into_iter().map(|one| Blocker::Incomplete {
            communicator: one.communicator,
            joined: one.joined,
            ranks: one.ranks,
        });
        let of_ranks = self.ranks.iter().flat_map(|(id, rank)| blockers(*id, rank));
        let parked = self.reports().filter(|(_, report)| !report.parked.is_empty());
        Failure {
            attempts: self.tries,
            blockers: of_ranks.chain(incomplete).collect(),
            parked: parked.map(|(rank, report)| (rank, report.parked.clone())).collect(),
        }
    }
}

fn blockers(id: RankId, rank: &Rank) -> Vec<Blocker> {
    let Some(report) = &rank.report else { return vec![Blocker::Silent { rank: id }] };
    if report.version < rank.version {
        return vec![Blocker::Silent { rank: id }];
    }
    if report.in_call > 0 {
        let mut called: Vec<_> = report.members.iter().filter(|one| !one.call.is_empty()).collect();
        called.sort_by_key(|one| matches!(one.role, Role::Pair { .. }));
        let calls = called.iter().map(|one| (one.call.clone(), place(one.member, Some(one)))).collect();
        return vec![Blocker::InCall { rank: id, calls }];
    }
    let behind = rank.targets.iter().filter_map(|(member, target)| {
        let known = find(report, *member);
        let sequence = known.map_or(0, |one| one.sequence);
        (sequence < *target).then(|| Blocker::Behind {
            rank: id,
            place: place(*member, known),
            sequence,
            target: *target,
            call: known.map_or_else(String::new, |one| one.call.clone()),
        })
    });
    behind.collect()
}

fn place(member: Member, known: Option<&MemberReport>) -> NamedMember {
    NamedMember { member, role: known.map(|one| one.role) }
}
