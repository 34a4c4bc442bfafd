//! A launcher: its node, the election, and the coordinator while it is this launcher.
//!
//! ```text
//!              silence             enough nodes ask           the epoch's record is put
//!   Following --------> Leaderless ----------------> Candidate -------------------------> Coordinating
//!      ^                    |                            |                                     |
//!      |   a beat           |     a beat, or another     |        a higher epoch               |
//!      +--------------------+----launcher's record-------+-------------------------------------+
//! ```
//!
//! A node that hears no coordinator asks rank 0, then also rank 1, and so on, to become one. A launcher that so many
//! nodes ask as the job has parts is a candidate. So a node that is cut off alone never ends the others' epoch.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::action::{Action, Event, PutAnswer, Reason, Settings};
use crate::coordinator::Coordinator;
use crate::log::{Log, PartId, Record};
use crate::messages::{AttemptId, Blame, Hello, Message, NodeId, Outcome, SessionState, Step};
use crate::node::Node;

/// A candidate: reads the log to its end and puts the record of the next epoch there.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Candidacy {
    /// Once the log has been read.
    record: Option<Record>,
    repeat_at: Duration,
}

/// A launcher of the job. Times are those of a clock of the caller that never goes back.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    me: NodeId,
    settings: Settings,
    node: Node,
    log: Log,
    /// The highest epoch that it knows.
    epoch: u64,
    /// Since when no coordinator was heard.
    heard: Duration,
    /// Who asks this launcher to coordinate, and since when.
    asking: BTreeMap<u32, Duration>,
    hello_at: Duration,
    candidacy: Option<Candidacy>,
    coordinator: Option<Coordinator>,
    /// See [`Peer::exclude`].
    excluded: Vec<AttemptId>,
    actions: Vec<Action>,
}

impl Peer {
    /// A launcher that has just started.
    #[must_use]
    pub fn new(me: NodeId, settings: Settings, now: Duration) -> Self {
        Self {
            me,
            settings,
            node: Node::new(me),
            log: Log::default(),
            epoch: 0,
            heard: now,
            asking: BTreeMap::new(),
            hello_at: now,
            candidacy: None,
            coordinator: None,
            excluded: Vec::new(),
            actions: Vec::new(),
        }
    }

    /// Has this launcher, when it coordinates, resume these snapshots too only if there are no others: nodes have said that
    /// they do not have their parts, or the job fails after each resume from them.
    ///
    /// Returns how many of the snapshots in the log were not excluded before, and had not failed; none, if this launcher does
    /// not coordinate yet.
    pub fn exclude(&mut self, snapshots: Vec<AttemptId>) -> usize {
        let excluded = self.coordinator.as_mut().map_or(0, |coordinator| coordinator.exclude(&snapshots));
        self.excluded.extend(snapshots);
        excluded
    }

    /// The snapshots in the log, newest first, if this launcher coordinates.
    #[must_use]
    pub fn snapshots(&self) -> Vec<AttemptId> {
        self.coordinator.as_ref().map_or_else(Vec::new, Coordinator::snapshots)
    }

    /// What has to be done, in this order; it is handed out once.
    #[must_use]
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// The part of the job here.
    #[must_use]
    pub fn session(&self) -> Option<SessionState> {
        self.node.session()
    }

    /// The session of the whole job, if this launcher coordinates and one runs.
    #[must_use]
    pub fn coordinated_session(&self) -> Option<AttemptId> {
        self.coordinator.as_ref().and_then(Coordinator::session)
    }

    /// The highest epoch that it knows.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether this launcher coordinates.
    #[must_use]
    pub fn is_coordinator(&self) -> bool {
        self.coordinator.is_some()
    }

    /// When [`Peer::tick`] has something to do, if nothing else happens.
    #[must_use]
    pub fn next_tick(&self) -> Duration {
        let own = match (&self.coordinator, &self.candidacy) {
            (Some(coordinator), _) => coordinator.next_tick(),
            (None, Some(candidacy)) => candidacy.repeat_at.min(self.hello_at),
            (None, None) => self.hello_at,
        };
        self.node.lease_end().map_or(own, |lease_end| lease_end.min(own))
    }

    /// Requests a snapshot. Returns whether this launcher coordinates; only the coordinator takes requests.
    pub fn request(&mut self, now: Duration) -> bool {
        self.end_lease(now);
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.request(now, &mut self.actions);
        }
        self.deliver_own(now);
        self.coordinator.is_some()
    }

    /// What [`Self::give_up`] may give up.
    #[cfg(test)]
    pub(crate) fn in_progress(&self) -> Option<AttemptId> {
        self.coordinator.as_ref()?.in_progress()
    }

    /// Gives up a snapshot that is in progress, for this reason, unless it may be in the log already. Only the coordinator does
    /// this.
    pub fn give_up(&mut self, now: Duration, attempt: AttemptId, reason: &str) {
        self.end_lease(now);
        if let Some(coordinator) = &mut self.coordinator {
            let reason = Reason::Failed { rank: self.me.rank, reason: reason.to_owned(), blame: Blame::Node };
            coordinator.give_up(now, attempt, reason, &mut self.actions);
        }
        self.deliver_own(now);
    }

    /// Ends the session on all nodes, since the part of a node has failed. Nothing is resumed before [`Peer::resume`]. Only
    /// the coordinator does this.
    pub fn end_session(&mut self, now: Duration, rank: u32) {
        self.end_lease(now);
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.end_session(now, rank, &mut self.actions);
        }
        self.deliver_own(now);
    }

    /// Resumes the job after [`Peer::end_session`].
    pub fn resume(&mut self, now: Duration) {
        self.end_lease(now);
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.end_wait(now, &mut self.actions);
        }
        self.deliver_own(now);
    }

    /// Which of the parts in the store can be deleted. None, if this launcher does not coordinate.
    #[must_use]
    pub fn garbage(&self, parts: &[PartId]) -> Vec<PartId> {
        self.coordinator.as_ref().map_or_else(Vec::new, |coordinator| coordinator.garbage(parts))
    }

    /// Takes a message. The caller has authenticated the sender's rank.
    pub fn receive(&mut self, now: Duration, from: u32, message: Message) {
        self.end_lease(now);
        self.take(now, from, message);
        self.deliver_own(now);
    }

    /// A step that [`Action::Perform`] began has ended.
    pub fn finished(&mut self, now: Duration, attempt: AttemptId, step: Step, outcome: Outcome) {
        self.end_lease(now);
        self.node.finished(attempt, step, outcome, &mut self.actions);
        self.deliver_own(now);
    }

    /// The part of the job here has ended by itself, or was killed.
    pub fn part_ended(&mut self, now: Duration) {
        self.end_lease(now);
        self.node.part_ended(&mut self.actions);
        self.deliver_own(now);
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) {
        self.end_lease(now);
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.tick(now, &mut self.actions);
        } else {
            self.seek(now);
        }
        self.deliver_own(now);
    }

    /// The store has answered [`Action::Read`]: the records from a position on.
    pub fn read(&mut self, now: Duration, from: u64, records: Vec<Record>) {
        self.end_lease(now);
        let end = self.log.end();
        for (position, record) in (from..).zip(records) {
            if self.coordinator.is_none() {
                self.log.add(position, record);
            }
        }
        // The answer to an earlier request may come late: what was to be put at the former end is outdated.
        let has_grown = self.log.end() > end;
        let is_unready = |candidacy: &&mut Candidacy| candidacy.record.is_none() || has_grown;
        let Some(candidacy) = self.candidacy.as_mut().filter(is_unready) else { return };
        let epoch = self.log.epoch().max(self.epoch) + 1;
        candidacy.record = Some(Record::Epoch { epoch, coordinator: self.me });
        candidacy.repeat_at = now;
        self.campaign(now);
    }

    /// The store has answered [`Action::Put`].
    pub fn put(&mut self, now: Duration, position: u64, answer: PutAnswer) {
        self.end_lease(now);
        if let Some(coordinator) = &mut self.coordinator {
            if !coordinator.put(now, position, answer, &mut self.actions) {
                self.step_down(now);
            }
        } else if position == self.log.end()
            && let Some(Candidacy { record: Some(own), .. }) = &self.candidacy
        {
            let own = own.clone();
            let found = if let PutAnswer::Taken(found) = answer { found } else { own.clone() };
            self.log.add(position, found.clone());
            self.candidacy = None;
            if found == own {
                self.lead(now);
            } else if let Record::Snapshot { .. } | Record::Complete = found {
                self.candidacy = Some(Candidacy { record: None, repeat_at: now });
                self.campaign(now);
            }
        }
        self.deliver_own(now);
    }

    /// Whatever happens: first the lease, which may have ended while this process was paused.
    fn end_lease(&mut self, now: Duration) {
        self.node.tick(now, &mut self.actions);
    }

    fn lead(&mut self, now: Duration) {
        self.epoch = self.log.epoch();
        self.node.adopt(self.epoch, &mut self.actions);
        self.asking.clear();
        self.actions.push(Action::Event(Event::Elected { epoch: self.epoch }));
        let mut coordinator = Coordinator::new(self.settings, std::mem::take(&mut self.log), now);
        coordinator.exclude(&self.excluded);
        coordinator.tick(now, &mut self.actions);
        self.coordinator = Some(coordinator);
    }

    fn step_down(&mut self, now: Duration) {
        if let Some(coordinator) = self.coordinator.take() {
            self.log = coordinator.into_log();
            self.actions.push(Action::Event(Event::Deposed));
            (self.heard, self.hello_at) = (now, now);
        }
    }

    /// There may be a newer epoch.
    fn adopt(&mut self, now: Duration, epoch: u64) {
        if epoch > self.epoch {
            self.epoch = epoch;
            self.step_down(now);
            self.node.adopt(epoch, &mut self.actions);
        }
    }

    fn take(&mut self, now: Duration, from: u32, message: Message) {
        match message {
            Message::Beat { epoch } if epoch < self.epoch => self.say_hello(from, false),
            Message::Beat { epoch } => {
                self.adopt(now, epoch);
                self.hears(now);
                self.say_hello(from, false);
            }
            Message::Hello(hello) => {
                self.adopt(now, hello.epoch);
                if let Some(coordinator) = &mut self.coordinator {
                    coordinator.hello(now, hello, &mut self.actions);
                } else if hello.is_leaderless {
                    self.asking.insert(hello.node.rank, now);
                    // At once: a job that starts waits for it.
                    if self.is_leaderless(now) && self.asking.len() >= self.settings.parts as usize {
                        self.stand(now);
                    }
                }
            }
            Message::Order { to, attempt, order } if to == self.me => {
                if attempt.epoch >= self.epoch {
                    self.adopt(now, attempt.epoch);
                    self.node.order(now, from, attempt, order, &mut self.actions);
                }
            }
            Message::Report { node, attempt, step, outcome } => {
                if let Some(coordinator) = &mut self.coordinator {
                    coordinator.report(now, node, attempt, (step, outcome), &mut self.actions);
                }
            }
            Message::Abort { to, attempt, .. } if to == self.me => {
                self.node.abort(attempt, &mut self.actions);
            }
            Message::Over { to, epoch, session } if to == self.me && epoch >= self.epoch => {
                self.node.over(session, &mut self.actions);
            }
            Message::Order { .. } | Message::Abort { .. } | Message::Over { .. } => {}
        }
    }

    fn hears(&mut self, now: Duration) {
        self.heard = now;
        self.candidacy = None;
        self.asking.clear();
        self.hello_at = now + self.settings.silence;
    }

    fn say_hello(&mut self, to: u32, is_leaderless: bool) {
        let hello = Hello {
            node: self.me,
            epoch: self.epoch,
            is_leaderless,
            newest: self.node.newest(),
            session: self.node.session(),
        };
        self.actions.push(Action::Send { to, message: Message::Hello(hello) });
    }

    /// Without a coordinator: asks the first ranks to become one, and becomes one if enough ask.
    fn seek(&mut self, now: Duration) {
        if !self.is_leaderless(now) {
            self.hello_at = self.heard + self.settings.silence;
            return;
        }
        let silence = now.saturating_sub(self.heard);
        if now >= self.hello_at {
            self.hello_at = now + self.settings.beat;
            let periods = silence.as_millis() / self.settings.stagger.as_millis().max(1);
            let last = u32::try_from(periods).unwrap_or(u32::MAX).min(self.settings.nodes - 1);
            (0..=last).for_each(|rank| self.say_hello(rank, true));
        }
        self.stand(now);
    }

    /// Whether no coordinator is heard, or none was ever.
    fn is_leaderless(&self, now: Duration) -> bool {
        now.saturating_sub(self.heard) >= self.settings.silence || self.epoch == 0
    }

    /// Becomes a candidate if enough ask for it.
    fn stand(&mut self, now: Duration) {
        self.asking.retain(|_, asked| now.saturating_sub(*asked) < self.settings.silence);
        if self.candidacy.is_some() {
            self.campaign(now);
        } else if self.asking.len() >= self.settings.parts as usize {
            self.candidacy = Some(Candidacy { record: None, repeat_at: now });
            self.campaign(now);
        }
    }

    fn campaign(&mut self, now: Duration) {
        let Some(candidacy) = self.candidacy.as_mut().filter(|candidacy| now >= candidacy.repeat_at) else {
            return;
        };
        candidacy.repeat_at = now + self.settings.repeat;
        let position = self.log.end();
        self.actions.push(match &candidacy.record {
            None => Action::Read { from: position },
            Some(record) => Action::Put { position, record: record.clone() },
        });
    }

    /// Messages of this launcher to itself do not travel.
    fn deliver_own(&mut self, now: Duration) {
        let mut own = VecDeque::new();
        loop {
            let me = self.me.rank;
            let is_own = |action: &mut Action| matches!(action, Action::Send { to, .. } if *to == me);
            own.extend(self.actions.extract_if(.., is_own));
            let Some(Action::Send { message, .. }) = own.pop_front() else { return };
            self.take(now, me, message);
        }
    }
}
