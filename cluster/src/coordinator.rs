//! The coordinator of one epoch: a state machine over messages and times.
//!
//! ```text
//!              all nodes run one session
//!   Gathering ------------------------------------------> Running <----------------+
//!     ^  ^  \                                             ^  |  ^                  |
//!     |  |   \ enough nodes      all steps done           |  |  | aborted          | put answered
//!     |  |    +----------> Resume ------------------------+  |  |                  |
//!     |  |  aborted          |                      request  v  |   all steps done |
//!     |  +-------------------+                           Checkpoint ----------> Committing
//!     |                                                      |
//!     +------------------------------------------------------+
//!        a node of the session is lost (also from Running)
//! ```
//!
//! The caller may end a session, and let Gathering wait until it says that the job is to be resumed.
//!
//! A checkpoint and a resume go through their steps in the same way: `attempt.rs`. While a put is not answered nothing
//! else begins, since a resume has to know all snapshots.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::action::{Action, Event, PutAnswer, Reason, Settings};
use crate::log::{Log, PartId, PartRecord, Record};
use crate::messages::{AttemptId, Blame, Hello, Message, NodeId, Order, Outcome, SessionState, Step};

mod attempt;

use attempt::{Attempt, Kind};

/// What the coordinator knows of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Member {
    hello: Hello,
    /// When it was heard last.
    heard: Duration,
}

/// A session: which node has which part.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Session {
    id: AttemptId,
    nodes: Vec<NodeId>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Gathering { since: Duration },
    Running,
    Working(Attempt),
    Committing { attempt: AttemptId, record: Record, put_at: Duration },
}

/// The coordinator of an epoch, from the record of the epoch in the log to that of the next one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Coordinator {
    settings: Settings,
    epoch: u64,
    log: Log,
    /// Number of attempts.
    attempts: u64,
    members: BTreeMap<u32, Member>,
    session: Option<Session>,
    phase: Phase,
    is_wanted: bool,
    /// A session has ended, and nothing is resumed before the caller says so.
    is_waiting: bool,
    /// Failures that a snapshot is to blame for.
    failures: BTreeMap<AttemptId, u32>,
    ticked: Duration,
    beat_at: Duration,
}

impl Coordinator {
    /// The epoch's record is the last one of the log.
    pub(crate) fn new(settings: Settings, log: Log, now: Duration) -> Self {
        Self {
            settings,
            epoch: log.epoch(),
            log,
            attempts: 0,
            members: BTreeMap::new(),
            session: None,
            phase: Phase::Gathering { since: now },
            is_wanted: false,
            is_waiting: false,
            failures: BTreeMap::new(),
            ticked: now,
            beat_at: now,
        }
    }

    /// These snapshots are resumed only if there are no others: see [`crate::Peer::exclude`].
    pub(crate) fn exclude(&mut self, snapshots: &[AttemptId]) -> usize {
        let known = self.snapshots();
        let is_new = |attempt: &&AttemptId| {
            let failures = self.failures.insert(**attempt, u32::MAX).unwrap_or(0);
            failures < self.settings.tries && known.contains(attempt)
        };
        snapshots.iter().filter(is_new).count()
    }

    pub(crate) fn snapshots(&self) -> Vec<AttemptId> {
        self.log.snapshots().map(|(attempt, _)| attempt).collect()
    }

    pub(crate) fn into_log(self) -> Log {
        self.log
    }

    pub(crate) fn session(&self) -> Option<AttemptId> {
        self.session.as_ref().map(|session| session.id)
    }

    pub(crate) fn next_tick(&self) -> Duration {
        let next = match &self.phase {
            Phase::Gathering { since } => *since + self.settings.gather,
            Phase::Running => self.beat_at,
            Phase::Working(attempt) => attempt.next_tick(),
            Phase::Committing { put_at, .. } => *put_at,
        };
        if next > self.ticked { next.min(self.beat_at) } else { self.beat_at }
    }

    /// A snapshot is wanted, as soon as a session runs.
    pub(crate) fn request(&mut self, now: Duration, actions: &mut Vec<Action>) {
        self.is_wanted = true;
        self.go_on(now, actions);
    }

    /// The attempt that [`Self::give_up`] may give up.
    #[cfg(test)]
    pub(crate) fn in_progress(&self) -> Option<AttemptId> {
        match &self.phase {
            Phase::Working(attempt) => Some(attempt.id),
            Phase::Committing { attempt, .. } => Some(*attempt),
            _ => None,
        }
    }

    /// Gives up this attempt of a snapshot, unless all nodes have done all steps: it may be in the log then.
    pub(crate) fn give_up(
        &mut self,
        now: Duration,
        id: AttemptId,
        reason: Reason,
        actions: &mut Vec<Action>,
    ) {
        let is_it = |attempt: &Attempt| attempt.id == id && matches!(attempt.kind, Kind::Checkpoint { .. });
        if matches!(&self.phase, Phase::Working(attempt) if is_it(attempt)) {
            self.abort(now, reason, actions);
        }
    }

    /// The session is over, since the part of a node has failed. Nothing is resumed before [`Self::end_wait`].
    pub(crate) fn end_session(&mut self, now: Duration, rank: u32, actions: &mut Vec<Action>) {
        (self.is_waiting, self.is_wanted) = (true, false);
        // What nodes have said of it is not true any more.
        self.members.values_mut().for_each(|member| member.hello.session = None);
        if matches!(self.phase, Phase::Committing { .. }) {
            self.session = None;
        } else {
            self.lose(now, vec![rank], actions);
        }
    }

    /// The job is resumed, now if nothing else is in the way.
    pub(crate) fn end_wait(&mut self, now: Duration, actions: &mut Vec<Action>) {
        self.is_waiting = false;
        if let Phase::Gathering { since } = &mut self.phase {
            *since = now.saturating_sub(self.settings.gather);
        }
        self.go_on(now, actions);
    }

    /// See [`Log::garbage`]: attempts before the open one are over, and so is the newest one if none is open.
    pub(crate) fn garbage(&self, parts: &[PartId]) -> Vec<PartId> {
        let is_open = matches!(self.phase, Phase::Working(_) | Phase::Committing { .. });
        let number = self.attempts + u64::from(!is_open);
        self.log.garbage(AttemptId { epoch: self.epoch, number }, parts)
    }

    pub(crate) fn tick(&mut self, now: Duration, actions: &mut Vec<Action>) {
        // The time for which this process itself was paused says nothing of the others.
        let pause = now.saturating_sub(self.ticked);
        if pause > self.settings.beat * 2 {
            self.members.values_mut().for_each(|member| member.heard += pause);
        }
        self.ticked = now;
        if now >= self.beat_at {
            self.beat_at = now + self.settings.beat;
            let message = Message::Beat { epoch: self.epoch };
            actions.extend((0..self.settings.nodes).map(|to| Action::Send { to, message: message.clone() }));
        }
        match &mut self.phase {
            Phase::Working(attempt) if now >= attempt.deadline => {
                let ranks = attempt.missing().map(|node| node.rank).collect();
                self.abort(now, Reason::Late { ranks }, actions);
            }
            Phase::Working(attempt) => {
                attempt.repeat(now, self.settings.repeat, actions);
                let (step, slow) = (attempt.step(), attempt.slow(now));
                actions.extend(slow.map(|ranks| Action::Event(Event::Slow { step, ranks })));
            }
            Phase::Committing { record, put_at, .. } if now >= *put_at => {
                *put_at = now + self.settings.repeat;
                actions.push(Action::Put { position: self.log.end(), record: record.clone() });
            }
            _ => {}
        }
        self.go_on(now, actions);
    }

    /// A node says how it is.
    pub(crate) fn hello(&mut self, now: Duration, hello: Hello, actions: &mut Vec<Action>) {
        let known = self.members.get(&hello.node.rank);
        let is_old = known.is_some_and(|known| {
            let of = |hello: &Hello| (hello.node.incarnation, hello.newest);
            of(&hello) < of(&known.hello)
        });
        if is_old || hello.epoch != self.epoch || hello.node.rank >= self.settings.nodes {
            return;
        }
        let current = self.session.as_ref();
        if let (Some(theirs), Some(current)) = (hello.session, current)
            && theirs.id < current.id
            && !matches!(self.phase, Phase::Working(_))
        {
            let message = Message::Over { to: hello.node, epoch: self.epoch, session: theirs.id };
            actions.push(Action::Send { to: hello.node.rank, message });
        }
        let node = hello.node;
        self.members.insert(node.rank, Member { hello, heard: now });
        // A message of one node must not cost a look at all of them: those that are silent are found in `tick`.
        let (id, nodes) = self.awaited();
        let of_rank = nodes.get(node.rank as usize).filter(|one| one.rank == node.rank);
        let of_rank = of_rank.or_else(|| nodes.iter().find(|one| one.rank == node.rank));
        let is_lost = of_rank.is_some_and(|one| !self.is_there(now, *one, id));
        let is_gathering = matches!(self.phase, Phase::Gathering { .. });
        if is_lost || is_gathering && self.members.len() >= self.settings.parts as usize {
            self.go_on(now, actions);
        }
    }

    /// A node says what has become of a step.
    pub(crate) fn report(
        &mut self,
        now: Duration,
        node: NodeId,
        id: AttemptId,
        (step, outcome): (Step, Outcome),
        actions: &mut Vec<Action>,
    ) {
        let Phase::Working(attempt) = &mut self.phase else { return };
        if id != attempt.id || step != attempt.step() {
            return;
        }
        if let Outcome::Failed { reason, blame } = outcome {
            if !attempt.nodes().contains(&node) {
                return;
            }
            if let (Blame::Snapshot, Kind::Resume { from: Some(from) }) = (blame, &attempt.kind) {
                let failures = self.failures.entry(*from).or_insert(0);
                *failures = failures.saturating_add(1);
            }
            return self.abort(now, Reason::Failed { rank: node.rank, reason, blame }, actions);
        }
        attempt.take(now, node, outcome);
        if !attempt.is_done() {
            return;
        }
        if attempt.advance(now, &self.settings, actions) {
            self.go_on(now, actions);
        } else {
            self.complete(now, actions);
        }
    }

    /// All steps are done.
    fn complete(&mut self, now: Duration, actions: &mut Vec<Action>) {
        let Phase::Working(attempt) = std::mem::replace(&mut self.phase, Phase::Running) else { return };
        match attempt.kind {
            Kind::Resume { .. } => {
                self.note_parts(&attempt);
                actions.push(Action::Event(Event::Running { session: attempt.id }));
                self.session = Some(Session { id: attempt.id, nodes: attempt.nodes });
            }
            Kind::Checkpoint { session } => {
                self.is_wanted = false;
                let parts = attempt.nodes.iter().zip(attempt.hashes);
                let parts = parts.map(|(node, hash)| PartRecord { rank: node.rank, hash }).collect();
                let record = Record::Snapshot { attempt: attempt.id, session, parts };
                actions.push(Action::Put { position: self.log.end(), record: record.clone() });
                let put_at = now + self.settings.repeat;
                self.phase = Phase::Committing { attempt: attempt.id, record, put_at };
            }
        }
        self.go_on(now, actions);
    }

    /// The store has answered. Returns whether this launcher still coordinates.
    pub(crate) fn put(
        &mut self,
        now: Duration,
        position: u64,
        answer: PutAnswer,
        actions: &mut Vec<Action>,
    ) -> bool {
        let Phase::Committing { attempt, record, .. } = &self.phase else { return true };
        if position != self.log.end() {
            return true;
        }
        // An earlier try of the same put may have had its answer lost.
        let (attempt, own) = (*attempt, record.clone());
        let is_committed = match answer {
            PutAnswer::Done => true,
            PutAnswer::Taken(found) => found == own,
        };
        if is_committed {
            self.log.add(position, own);
            actions.push(Action::Event(Event::Committed { attempt }));
            self.phase = match self.session {
                Some(_) => Phase::Running,
                None => Phase::Gathering { since: now },
            };
            self.go_on(now, actions);
        }
        is_committed
    }

    /// The reports of a resume say more than hellos that nodes have sent between its steps, when they had no part yet. A part
    /// that has ended meanwhile shows in the next hello.
    fn note_parts(&mut self, attempt: &Attempt) {
        for (part, node) in (0..).zip(attempt.nodes()) {
            if let Some(member) = self.members.get_mut(&node.rank).filter(|member| member.hello.node == *node)
            {
                member.hello.newest = attempt.id;
                member.hello.session = Some(SessionState { id: attempt.id, part, is_running: true });
            }
        }
    }

    fn abort(&mut self, now: Duration, reason: Reason, actions: &mut Vec<Action>) {
        let next = match &self.phase {
            Phase::Working(Attempt { kind: Kind::Checkpoint { .. }, .. }) => Phase::Running,
            _ => Phase::Gathering { since: now },
        };
        let Phase::Working(attempt) = std::mem::replace(&mut self.phase, next) else { return };
        self.is_wanted &= !matches!(attempt.kind, Kind::Checkpoint { .. });
        let (step, text) = (attempt.step(), reason.to_string());
        for to in attempt.all() {
            let message = Message::Abort { to, attempt: attempt.id, reason: text.clone() };
            actions.push(Action::Send { to: to.rank, message });
        }
        actions.push(Action::Event(Event::Aborted { attempt: attempt.id, step, reason }));
    }

    /// Begins what can begin.
    fn go_on(&mut self, now: Duration, actions: &mut Vec<Action>) {
        let lost = self.lost(now);
        if !lost.is_empty() {
            self.lose(now, lost, actions);
        }
        match self.phase {
            Phase::Gathering { since } if !self.is_waiting => self.gather(now, since, actions),
            Phase::Running if self.is_wanted => {
                let Some(session) = &self.session else { return };
                let (kind, nodes) = (Kind::Checkpoint { session: session.id }, session.nodes.clone());
                let prepare = vec![Order::Prepare { session: session.id }; nodes.len()];
                self.begin(now, kind, (nodes, Vec::new()), prepare, actions);
            }
            _ => {}
        }
    }

    fn is_silent(&self, member: &Member, now: Duration) -> bool {
        now.saturating_sub(member.heard) >= self.settings.silence
    }

    /// The nodes that have to be there, and the session of which they have a part.
    fn awaited(&self) -> (Option<AttemptId>, &[NodeId]) {
        match (&self.phase, &self.session) {
            (Phase::Working(attempt), _) if matches!(attempt.kind, Kind::Resume { .. }) => {
                (None, attempt.nodes())
            }
            (Phase::Running | Phase::Working(_), Some(session)) => (Some(session.id), &session.nodes[..]),
            _ => (None, &[]),
        }
    }

    fn is_there(&self, now: Duration, node: NodeId, id: Option<AttemptId>) -> bool {
        self.members.get(&node.rank).is_some_and(|member| {
            let has_part = member.hello.session.map(|session| session.id) == id;
            // A hello that is older than the session says nothing of it.
            let is_older = id.is_none_or(|id| member.hello.newest < id);
            member.hello.node == node && !self.is_silent(member, now) && (has_part || is_older)
        })
    }

    /// The nodes that the session, or the resume, has lost.
    fn lost(&self, now: Duration) -> Vec<u32> {
        let (id, nodes) = self.awaited();
        nodes.iter().filter(|node| !self.is_there(now, **node, id)).map(|node| node.rank).collect()
    }

    fn lose(&mut self, now: Duration, ranks: Vec<u32>, actions: &mut Vec<Action>) {
        if matches!(self.phase, Phase::Working(_)) {
            self.abort(now, Reason::Lost { ranks: ranks.clone() }, actions);
        }
        if let Some(session) = self.session.take() {
            actions.push(Action::Event(Event::Lost { session: session.id, ranks }));
        }
        self.phase = Phase::Gathering { since: now };
    }

    fn gather(&mut self, now: Duration, since: Duration, actions: &mut Vec<Action>) {
        let present = self.members.values().filter(|member| !self.is_silent(member, now));
        let present: Vec<_> = present.map(|member| member.hello.clone()).collect();
        // After a snapshot of a later session, an earlier one would lose what that one has done.
        let adopted = adopted(&present, self.settings.parts);
        if let Some(session) = adopted.filter(|session| Some(session.id) >= self.log.session()) {
            actions.push(Action::Event(Event::Running { session: session.id }));
            (self.session, self.phase) = (Some(session), Phase::Running);
            return;
        }
        let is_complete = present.len() == self.settings.nodes as usize && self.attempts == 0;
        let is_enough = present.len() >= self.settings.parts as usize && now >= since + self.settings.gather;
        if is_complete || is_enough {
            self.resume(now, &present, actions);
        }
    }

    fn resume(&mut self, now: Duration, present: &[Hello], actions: &mut Vec<Action>) {
        let has_tries = |attempt: &AttemptId| {
            self.failures.get(attempt).is_none_or(|failures| *failures < self.settings.tries)
        };
        let snapshots = || self.log.snapshots();
        // If all have failed, the newest is tried anyway.
        let chosen = snapshots().find(|(attempt, _)| has_tries(attempt)).or_else(|| snapshots().next());
        let present: Vec<_> = present.iter().map(|hello| hello.node).collect();
        let nodes = places(&present, self.settings.parts as usize, chosen.map(|(_, parts)| parts));
        let from = chosen.map(|(attempt, _)| attempt);
        let ends = vec![Order::End; present.len()];
        let others = present.into_iter().filter(|node| !nodes.contains(node)).collect();
        self.session = None;
        self.begin(now, Kind::Resume { from }, (nodes, others), ends, actions);
    }

    fn begin(
        &mut self,
        now: Duration,
        kind: Kind,
        (nodes, others): (Vec<NodeId>, Vec<NodeId>),
        orders: Vec<Order>,
        actions: &mut Vec<Action>,
    ) {
        self.attempts += 1;
        let id = AttemptId { epoch: self.epoch, number: self.attempts };
        let hashes = match &kind {
            Kind::Resume { from: Some(from) } => self.hashes(*from),
            _ => Vec::new(),
        };
        let mut attempt = Attempt::new(id, kind, nodes, others, hashes);
        attempt.send(now, orders, &self.settings, actions);
        self.phase = Phase::Working(attempt);
    }

    fn hashes(&self, snapshot: AttemptId) -> Vec<String> {
        let found = self.log.snapshots().find(|(attempt, _)| *attempt == snapshot);
        found.map_or_else(Vec::new, |(_, parts)| parts.iter().map(|part| part.hash.clone()).collect())
    }
}

/// The session that all these nodes run, if each part of it is there.
fn adopted(present: &[Hello], parts: u32) -> Option<Session> {
    let id = present.iter().filter_map(|hello| hello.session).map(|session| session.id).max()?;
    let node_of = |part| {
        let has_it = |hello: &&Hello| {
            hello.session.is_some_and(|own| own.id == id && own.part == part && own.is_running)
        };
        present.iter().find(has_it).map(|hello| hello.node)
    };
    Some(Session { id, nodes: (0..parts).map(node_of).collect::<Option<_>>()? })
}

/// Which node takes which part: the one that stored it, if it is there; any other one otherwise.
fn places(present: &[NodeId], parts: usize, snapshot: Option<&[PartRecord]>) -> Vec<NodeId> {
    let storer = |part: usize| match snapshot {
        Some(records) => records.get(part).map(|record| record.rank),
        None => u32::try_from(part).ok(),
    };
    let mut taken: Vec<Option<NodeId>> = Vec::with_capacity(parts);
    for part in 0..parts {
        let node = present.iter().find(|node| Some(node.rank) == storer(part)).copied();
        taken.push(node.filter(|node| !taken.contains(&Some(*node))));
    }
    let mut others: Vec<_> = present.iter().filter(|node| !taken.contains(&Some(**node))).copied().collect();
    others.reverse();
    taken.into_iter().filter_map(|node| node.or_else(|| others.pop())).collect()
}
