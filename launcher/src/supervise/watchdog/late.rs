//! Ranks of NCCL that are late: other ranks wait for them in a collective, a send or a receive.
//!
//! The interposer counts a rank's calls on each communicator for the consistent cut (`docs/design/collectives.md`). A rank
//! is *behind* on a communicator while another member has made more calls on it. It is *late* if, for the limit, it has
//! not made its next call there, and one of those that have has made no call at all: that one waits. A late rank *hangs* if
//! neither it nor a process that it has started has done anything for the limit: no call to a GPU, no CPU time, no files.
//! If a late rank itself waits for another late rank, only the latter is named.
//!
//! Of a job on several nodes, each node reports its ranks to node 0, which compares them with its own.
//!
//! The clock stands still while a checkpoint works on the job.

use super::observe::{Gpu, Key, Process, Seen, TICK};
use super::{BURST, IDLE_SHARE};
use crate::agents::GpuActivity;
use crate::cluster::RankReport;
use ckpt_cut::{Member, MemberReport, Name, Role};
use ckpt_protocol::control::{LateDoing, LateRank};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime};

/// Of a rank with more communicators and pairs, only so many are told to another node.
const MEMBERS_TOLD: usize = 256;
/// Bytes read and written between two polls that count as work: log lines do not.
const IO_BYTES: u64 = 64 << 10;

/// A moment.
#[derive(Clone, Copy, Debug, PartialEq)]
struct At {
    /// Without the time that checkpoints have taken.
    clock: Duration,
    time: SystemTime,
}

impl At {
    fn before(self, ago: Duration) -> Self {
        Self { clock: self.clock.saturating_sub(ago), time: self.time.checked_sub(ago).unwrap_or(self.time) }
    }
}

/// What counts as work, most certain first.
const WORK: [LateDoing; 3] = [LateDoing::GpuWork, LateDoing::Files, LateDoing::Cpu];

/// What a process has done.
struct Effort {
    cpu: Duration,
    calls: Option<u64>,
    io_bytes: u64,
    is_stopped: bool,
    /// Since when CPU time is added up, and what it was then.
    since: (Duration, Duration),
    /// When it last did each kind of [`WORK`].
    worked: [Option<At>; WORK.len()],
}

impl Effort {
    fn new(process: &Process, now: At) -> Self {
        Self {
            cpu: process.cpu,
            calls: process.gpu.calls(),
            io_bytes: process.io_bytes,
            is_stopped: process.is_stopped,
            since: (now.clock, process.cpu),
            // To start a process is work.
            worked: [None, None, Some(now)],
        }
    }

    fn observe(&mut self, process: &Process, now: At, passed: Duration, is_disturbed: bool) {
        let calls = process.gpu.calls();
        let has_called = calls.is_some() && self.calls.is_some() && calls != self.calls;
        let waits = matches!(process.gpu, Gpu::Reported(GpuActivity { is_waiting: true, .. })) && !has_called;
        let used = process.cpu.saturating_sub(self.cpu);
        let in_all = process.cpu.saturating_sub(self.since.1);
        let idle_most = TICK + now.clock.saturating_sub(self.since.0).mul_f64(IDLE_SHARE);
        let is_busy = in_all > idle_most || used > BURST.max(passed.mul_f64(IDLE_SHARE * 5.0));
        let moved = process.io_bytes.saturating_sub(self.io_bytes) >= IO_BYTES;
        let done = [
            has_called,
            !is_disturbed && (moved || process.is_in_io),
            !is_disturbed && !waits && is_busy && !process.is_stopped,
        ];
        for (worked, is_done) in self.worked.iter_mut().zip(done) {
            *worked = if is_done { Some(now) } else { *worked };
        }
        if waits || is_disturbed || done.contains(&true) {
            self.since = (now.clock, process.cpu);
        }
        (self.cpu, self.io_bytes, self.is_stopped) = (process.cpu, process.io_bytes, process.is_stopped);
        self.calls = calls.or(self.calls);
    }
}

/// What is known of a process with communicators.
struct Rank {
    members: Vec<MemberReport>,
    /// When it last made a call that others have to match.
    called: At,
    /// Of a rank on another node: what that node says of it.
    reported: Option<RankReport>,
}

/// A node, and a process there.
pub(super) type RankKey = (u32, Key);

/// A member that is behind.
#[derive(Clone, Copy)]
struct Behind {
    sequence: u64,
    since: At,
}

/// Which call of which rank is missing.
pub(super) type CallId = (RankKey, Member, u64);

/// A late rank.
#[derive(Clone, Debug)]
pub(super) struct Late {
    pub id: CallId,
    /// When the others had made the call, and the rank had last worked.
    pub since: SystemTime,
    pub rank: LateRank,
}

/// Finds late ranks, poll by poll.
pub(super) struct LateRanks {
    limit: Duration,
    /// This node, if the job is on several.
    node: Option<u32>,
    now: At,
    polled: Instant,
    /// Of processes here.
    efforts: BTreeMap<Key, Effort>,
    ranks: BTreeMap<RankKey, Rank>,
    behind: BTreeMap<(RankKey, Member), Behind>,
}

impl LateRanks {
    pub fn new(limit: Duration, node: Option<u32>, now: Instant) -> Self {
        let (efforts, ranks, behind) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let at = At { clock: Duration::ZERO, time: SystemTime::now() };
        Self { limit, node, now: at, polled: now, efforts, ranks, behind }
    }

    /// A process on this node.
    fn here(&self, key: Key) -> RankKey {
        (self.node.unwrap_or(0), key)
    }

    /// Whether any process is a rank, as far as is known.
    pub fn has_ranks(&self) -> bool {
        !self.ranks.is_empty()
    }

    /// Adds an observation, and what other nodes report. While the job `is_disturbed` by a checkpoint, time does not count.
    /// Returns the late ranks.
    pub fn update(
        &mut self,
        seen: &Seen,
        others: Vec<(u32, RankReport)>,
        now: Instant,
        is_disturbed: bool,
    ) -> Vec<Late> {
        let passed = now.saturating_duration_since(std::mem::replace(&mut self.polled, now));
        let passed = if is_disturbed { Duration::ZERO } else { passed };
        self.now = At { clock: self.now.clock + passed, time: SystemTime::now() };
        self.efforts.retain(|key, _| seen.contains_key(key));
        self.ranks.retain(|(_, key), rank| rank.reported.is_none() && seen.contains_key(key));
        for (key, process) in seen {
            match self.efforts.get_mut(key) {
                Some(effort) => effort.observe(process, self.now, passed, is_disturbed),
                None => drop(self.efforts.insert(*key, Effort::new(process, self.now))),
            }
            self.update_rank(self.here(*key), process);
        }
        for (node, reported) in others {
            let ago = Duration::from_millis(reported.called_ms);
            let members = reported.members.clone();
            let rank = Rank { members, called: self.now.before(ago), reported: Some(reported.clone()) };
            self.ranks.insert((node, reported.key), rank);
        }
        self.update_behind();
        self.late(seen)
    }

    /// What node 0 is told of the ranks here.
    pub fn reports(&self, seen: &Seen) -> Vec<RankReport> {
        let groups = Groups::of(seen, &self.ranks, self.node);
        let own = self.ranks.iter().filter(|(_, rank)| rank.reported.is_none());
        let ago_ms =
            |at: At| u64::try_from(self.now.clock.saturating_sub(at.clock).as_millis()).unwrap_or(u64::MAX);
        let report = |(key, rank): (&RankKey, &Rank)| {
            let Process { pid, name, .. } = &groups.seen[&key.1];
            let (doing, last) = self.doing(*key, &groups);
            let mut members = rank.members.clone();
            members.sort_by_key(|one| matches!(one.role, Role::Pair { .. }));
            members.truncate(MEMBERS_TOLD);
            RankReport {
                key: key.1,
                pid: *pid,
                process: name.clone(),
                members,
                called_ms: ago_ms(rank.called),
                doing,
                idle_ms: last.map(ago_ms),
            }
        };
        own.map(report).collect()
    }

    fn update_rank(&mut self, key: RankKey, process: &Process) {
        // A process that is stopped does not answer: it stays where it was.
        let Some(members) = process.members.clone() else { return };
        if members.is_empty() {
            self.ranks.remove(&key);
            return;
        }
        let sequences = |members: &[MemberReport]| {
            members.iter().map(|one| (one.member, one.sequence)).collect::<Vec<_>>()
        };
        let before = self.ranks.get(&key);
        let called = before.filter(|before| sequences(&before.members) == sequences(&members));
        let called = called.map_or(self.now, |before| before.called);
        self.ranks.insert(key, Rank { members, called, reported: None });
    }

    fn update_behind(&mut self) {
        let mut furthest: BTreeMap<Name, u64> = BTreeMap::new();
        for report in self.ranks.values().flat_map(|rank| &rank.members) {
            let furthest = furthest.entry(report.member.communicator).or_default();
            *furthest = report.sequence.max(*furthest);
        }
        let before = std::mem::take(&mut self.behind);
        for (key, rank) in &self.ranks {
            for MemberReport { member, sequence, .. } in &rank.members {
                if *sequence < furthest[&member.communicator] {
                    let place = (*key, *member);
                    let same = before.get(&place).filter(|before| before.sequence == *sequence).copied();
                    let new = Behind { sequence: *sequence, since: self.now };
                    self.behind.insert(place, same.unwrap_or(new));
                }
            }
        }
    }

    fn late(&self, seen: &Seen) -> Vec<Late> {
        let is_long_ago = |at: At| self.now.clock.saturating_sub(at.clock) >= self.limit;
        let members = Members::of(&self.ranks);
        let is_late = |(key, member): &(RankKey, Member), behind: &Behind| {
            let mut waiting = members.ahead(*member, behind.sequence).filter(|(other, _)| other != key);
            is_long_ago(behind.since) && waiting.any(|(other, _)| is_long_ago(self.ranks[&other].called))
        };
        let late: Vec<_> = self.behind.iter().filter(|(place, behind)| is_late(place, behind)).collect();
        let waiting = late.iter().flat_map(|((key, member), behind)| {
            members.ahead(*member, behind.sequence).map(|(other, _)| other).filter(move |other| other != key)
        });
        let waiting: BTreeSet<RankKey> = waiting.collect();
        let mut blamed: Vec<_> = late.iter().filter(|((key, _), _)| !waiting.contains(key)).collect();
        if blamed.is_empty() {
            // They wait for each other.
            blamed = late.iter().collect();
        }
        // Of each rank, the call that has been missing longest.
        blamed.sort_by_key(|((key, _), behind)| (*key, behind.since.clock));
        blamed.dedup_by_key(|((key, _), _)| *key);
        let groups = Groups::of(seen, &self.ranks, self.node);
        let all = (members, Numbers::of(&self.ranks));
        let describe = |((key, member), behind): &(&(RankKey, Member), &Behind)| {
            self.describe(*key, *member, behind, &groups, &all)
        };
        blamed.into_iter().map(describe).collect()
    }

    /// What the process, and those that it has started, have done within the limit; if it is nothing, when they last did.
    fn doing(&self, key: RankKey, groups: &Groups) -> (LateDoing, Option<At>) {
        if let Some(reported) = &self.ranks[&key].reported {
            let idle = reported.idle_ms.map(Duration::from_millis);
            return (reported.doing, idle.map(|idle| self.now.before(idle)));
        }
        let efforts = || groups.of_rank(key.1).filter_map(|one| self.efforts.get(&one));
        let is_recent = |at: &At| self.now.clock.saturating_sub(at.clock) < self.limit;
        let latest = |efforts: &mut dyn Iterator<Item = &Effort>| {
            efforts.flat_map(|effort| effort.worked).flatten().max_by_key(|at| at.clock)
        };
        let own = &self.efforts[&key.1];
        if own.is_stopped && !own.worked.iter().flatten().any(is_recent) {
            return (LateDoing::Stopped, latest(&mut [own].into_iter()));
        }
        for (kind, doing) in WORK.into_iter().enumerate() {
            if efforts().filter_map(|effort| effort.worked[kind]).any(|at| is_recent(&at)) {
                return (doing, None);
            }
        }
        let called = self.ranks[&key].called;
        if is_recent(&called) {
            (LateDoing::OtherCalls, None)
        } else {
            (LateDoing::Nothing, latest(&mut efforts()))
        }
    }

    fn describe(
        &self,
        key: RankKey,
        member: Member,
        behind: &Behind,
        groups: &Groups,
        (members, numbers): &(Members, Numbers),
    ) -> Late {
        let (pid, name) = match &self.ranks[&key].reported {
            Some(reported) => (reported.pid, reported.process.clone()),
            None => (groups.seen[&key.1].pid, groups.seen[&key.1].name.clone()),
        };
        let report = self.ranks[&key].members.iter().find(|one| one.member == member);
        let role = report.map_or(Role::Communicator { awaits: None, alias: None }, |one| one.role);
        let number = behind.sequence + 1;
        let waiting: BTreeSet<u32> =
            members.ahead(member, behind.sequence).map(|(key, one)| numbers.of_rank(key, one)).collect();
        // The name of a member's last call is that of the missing one if it has made no other since.
        let same = members.ahead(member, behind.sequence).find(|(_, one)| one.sequence == number);
        let call = match role {
            Role::Pair { .. } if member.index == 0 => Some("ncclSend".to_owned()),
            Role::Pair { .. } => Some("ncclRecv".to_owned()),
            Role::Communicator { .. } => {
                same.map(|(_, one)| one.call.clone()).filter(|call| !call.is_empty())
            }
        };
        let (doing, last) = self.doing(key, groups);
        let communicator = match role {
            Role::Pair { of, .. } => of,
            Role::Communicator { .. } => member.communicator,
        };
        let rank = LateRank {
            rank: report.map_or(member.index, |one| numbers.of_rank(key, one)),
            pid,
            process: name,
            node: self.node.map(|_| key.0),
            communicator: communicator.to_string(),
            call,
            number,
            waiting: waiting.into_iter().collect(),
            late_s: self.now.clock.saturating_sub(behind.since.clock).as_secs_f64(),
            doing,
        };
        let since = last.map_or(behind.since.time, |last| last.time.min(behind.since.time));
        Late { id: (key, member, behind.sequence), since, rank }
    }
}

/// The members of each communicator.
struct Members<'a>(BTreeMap<Name, Vec<(RankKey, &'a MemberReport)>>);

impl<'a> Members<'a> {
    fn of(ranks: &'a BTreeMap<RankKey, Rank>) -> Self {
        let mut all: BTreeMap<Name, Vec<_>> = BTreeMap::new();
        for (key, rank) in ranks {
            for report in &rank.members {
                all.entry(report.member.communicator).or_default().push((*key, report));
            }
        }
        Self(all)
    }

    /// Those that have made the call that another one has not.
    fn ahead(&self, member: Member, sequence: u64) -> impl Iterator<Item = (RankKey, &'a MemberReport)> {
        let all = self.0.get(&member.communicator).into_iter().flatten();
        all.filter(move |(_, report)| report.sequence > sequence).copied()
    }
}

/// Which processes belong to which rank: those that it has started, except other ranks and theirs.
struct Groups<'a> {
    seen: &'a Seen,
    ranks: BTreeMap<Key, Key>,
}

impl<'a> Groups<'a> {
    fn of(seen: &'a Seen, ranks: &BTreeMap<RankKey, Rank>, node: Option<u32>) -> Self {
        let by_pid: BTreeMap<i32, Key> = seen.keys().map(|key| (key.0, *key)).collect();
        let rank_of = |key: &Key| {
            let parent = |key: &Key| by_pid.get(&seen[key].parent).copied().filter(|parent| parent != key);
            // A PID that is reused while the processes are read could close a circle.
            let above = std::iter::successors(Some(*key), parent).take(seen.len());
            above.into_iter().find(|key| ranks.contains_key(&(node.unwrap_or(0), *key)))
        };
        Self { seen, ranks: seen.keys().filter_map(|key| Some((*key, rank_of(key)?))).collect() }
    }

    fn of_rank(&self, rank: Key) -> impl Iterator<Item = Key> {
        self.ranks.iter().filter(move |(_, of)| **of == rank).map(|(key, _)| *key)
    }
}

/// The numbers of ranks in the communicator with the most members: usually that of the whole job.
struct Numbers(BTreeMap<RankKey, BTreeSet<u32>>);

impl Numbers {
    fn of(ranks: &BTreeMap<RankKey, Rank>) -> Self {
        let mut all: BTreeMap<Name, BTreeMap<RankKey, BTreeSet<u32>>> = BTreeMap::new();
        for (key, rank) in ranks {
            for MemberReport { member, role, .. } in &rank.members {
                if let Role::Communicator { .. } = role {
                    let of = all.entry(member.communicator).or_default().entry(*key).or_default();
                    of.insert(member.index);
                }
            }
        }
        let size = |of: &BTreeMap<RankKey, BTreeSet<u32>>| of.values().map(BTreeSet::len).sum::<usize>();
        // The first of several: the names are in an order.
        let largest = all.into_values().rev().max_by_key(size);
        Self(largest.unwrap_or_default())
    }

    /// The number of a rank. A process with several, as one with several GPUs, has one for each of its members.
    fn of_rank(&self, key: RankKey, report: &MemberReport) -> u32 {
        let numbers = self.0.get(&key).filter(|numbers| numbers.len() == 1);
        let own = match report.role {
            Role::Pair { from, to, .. } => {
                if report.member.index == 0 {
                    from
                } else {
                    to
                }
            }
            Role::Communicator { .. } => report.member.index,
        };
        numbers.and_then(|numbers| numbers.first().copied()).unwrap_or(own)
    }
}

#[cfg(test)]
mod tests;
