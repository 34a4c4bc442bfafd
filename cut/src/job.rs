//! The cut of a whole job: its ranks connect to one launcher, or each to that of its node.
//!
//! ```text
//! launchers                                    JobCut, at one of them
//!   Begin{ranks}  -------------------------->  all have begun: the coordinator requests a cut
//!                 <--------------------------  Order, for a rank
//!   Joined, Left, Report, of a rank  -------->
//!                 <--------------------------  Close: the known ranks stand at a cut
//!   accepts no connection, knows all processes
//!   Closed  --------------------------------->
//!     (a rank has joined before that) <------  Open: the attempt goes on
//!                 <--------------------------  Reached: all have closed, and it is still a cut; or Failed
//! ```
//!
//! Messages of one launcher arrive in their order. So a rank that was connected when its launcher closed is known here.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::coordinator::{Coordinator, RankId, Settings, State};
use crate::messages::{FromLauncher, NamedRank, ToLauncher};

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// There is none, or it has ended.
    Idle,
    /// Not all launchers have begun.
    Gathering,
    /// The coordinator is at work.
    Reaching,
    /// It has a cut of the ranks that are known, and launchers look for others.
    Closing,
}

#[derive(Debug, Default)]
struct Launcher {
    has_begun: bool,
    has_agents: bool,
    has_closed: bool,
}

#[derive(Debug)]
struct Rank {
    launcher: u32,
    connection: u64,
    name: String,
}

/// The coordinator of all ranks of a job. Times are those of a clock of the caller that never goes back.
#[derive(Debug)]
pub struct JobCut {
    coordinator: Coordinator,
    launchers: BTreeMap<u32, Launcher>,
    ranks: BTreeMap<RankId, Rank>,
    ids: BTreeMap<(u32, u64), RankId>,
    next_rank: u64,
    phase: Phase,
    /// The number of the newest Close.
    round: u64,
    outbox: Vec<(u32, ToLauncher)>,
}

impl JobCut {
    /// For launchers 0 to `launchers` - 1.
    #[must_use]
    pub fn new(settings: Settings, launchers: u32) -> Self {
        Self {
            coordinator: Coordinator::new(settings),
            launchers: (0..launchers).map(|launcher| (launcher, Launcher::default())).collect(),
            ranks: BTreeMap::new(),
            ids: BTreeMap::new(),
            next_rank: 0,
            phase: Phase::Idle,
            round: 0,
            outbox: Vec::new(),
        }
    }

    /// A new request, which begins when all launchers have sent [`FromLauncher::Begin`]. An earlier one is over.
    pub fn begin(&mut self) {
        self.end();
        self.phase = Phase::Gathering;
        self.launchers.values_mut().for_each(|launcher| *launcher = Launcher::default());
    }

    /// The request is over. Nobody is told: the launchers release their ranks themselves.
    pub fn end(&mut self) {
        self.phase = Phase::Idle;
        self.coordinator.release();
        drop(self.coordinator.take_orders());
        self.outbox.clear();
    }

    #[cfg(test)]
    pub(crate) fn coordinator(&self) -> &Coordinator {
        &self.coordinator
    }

    #[cfg(test)]
    pub(crate) fn connection(&self, rank: RankId) -> u64 {
        self.ranks[&rank].connection
    }

    /// The messages to send, in this order; they are handed out once.
    #[must_use]
    pub fn take_messages(&mut self) -> Vec<(u32, ToLauncher)> {
        std::mem::take(&mut self.outbox)
    }

    /// When [`JobCut::tick`] has something to do, if nothing else happens.
    #[must_use]
    pub fn next_tick(&self) -> Option<Duration> {
        self.coordinator.next_tick().filter(|_| self.is_reaching())
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) {
        if self.is_reaching() {
            self.coordinator.tick(now);
            self.go_on();
        }
    }

    /// Takes a message of a launcher.
    pub fn receive(&mut self, now: Duration, launcher: u32, message: FromLauncher) {
        if self.phase == Phase::Idle || !self.launchers.contains_key(&launcher) {
            return;
        }
        match message {
            FromLauncher::Begin { ranks } => self.begin_at(now, launcher, ranks),
            FromLauncher::Joined { rank } => self.join(now, launcher, rank),
            FromLauncher::Left { connection } => self.leave((launcher, connection)),
            FromLauncher::Report { connection, report } => {
                if let Some(rank) = self.ids.get(&(launcher, connection)) {
                    self.coordinator.receive(*rank, report);
                }
            }
            FromLauncher::Closed { round } => {
                let known = self.launchers.get_mut(&launcher).filter(|_| round == self.round);
                known.into_iter().for_each(|launcher| launcher.has_closed = true);
            }
            FromLauncher::GivesUp => return self.give_up(),
        }
        self.go_on();
    }

    fn is_reaching(&self) -> bool {
        matches!(self.phase, Phase::Reaching | Phase::Closing)
    }

    fn begin_at(&mut self, now: Duration, launcher: u32, ranks: Option<Vec<NamedRank>>) {
        let before: Vec<_> = self.ids.keys().filter(|(of, _)| *of == launcher).copied().collect();
        before.into_iter().for_each(|place| self.leave(place));
        let known = self.launchers.entry(launcher).or_default();
        (known.has_begun, known.has_agents) = (true, ranks.is_some());
        ranks.into_iter().flatten().for_each(|rank| self.join(now, launcher, rank));
        if self.phase == Phase::Gathering && self.launchers.values().all(|launcher| launcher.has_begun) {
            self.phase = Phase::Reaching;
            self.coordinator.request(now);
        }
    }

    fn join(&mut self, now: Duration, launcher: u32, rank: NamedRank) {
        let NamedRank { connection, name } = rank;
        let id = RankId(self.next_rank);
        self.next_rank += 1;
        self.ids.insert((launcher, connection), id);
        self.ranks.insert(id, Rank { launcher, connection, name });
        self.coordinator.join(id, now);
    }

    fn leave(&mut self, place: (u32, u64)) {
        if let Some(rank) = self.ids.remove(&place) {
            self.ranks.remove(&rank);
            self.coordinator.leave(rank);
        }
    }

    /// A launcher has no more time.
    fn give_up(&mut self) {
        if self.phase == Phase::Reaching {
            self.coordinator.give_up();
            return self.go_on();
        }
        let is_closing = self.phase == Phase::Closing;
        let is_late = |one: &Launcher| if is_closing { !one.has_closed } else { !one.has_begun };
        let late = self.launchers.iter().filter(|(_, one)| is_late(one));
        let late: Vec<_> = late.map(|(launcher, _)| launcher.to_string()).collect();
        // At a cut, the ranks are parked.
        self.coordinator.release();
        self.pass_orders_on();
        let of = if self.is_one() { String::new() } else { format!(" of node {}", late.join(", ")) };
        self.fail(&format!("not all processes{of} have answered in time"));
    }

    fn is_one(&self) -> bool {
        self.launchers.len() == 1
    }

    fn name(&self, rank: RankId) -> String {
        match self.ranks.get(&rank) {
            None => "a process that has ended".to_owned(),
            Some(rank) if self.is_one() => rank.name.clone(),
            Some(rank) => format!("{} of node {}", rank.name, rank.launcher),
        }
    }

    fn tell(&mut self, is_told: impl Fn(&Launcher) -> bool, message: &ToLauncher) {
        let told = self.launchers.iter().filter(|(_, launcher)| is_told(launcher));
        self.outbox.extend(told.map(|(launcher, _)| (*launcher, message.clone())));
    }

    fn fail(&mut self, why: &str) {
        self.phase = Phase::Idle;
        self.tell(|launcher| launcher.has_agents, &ToLauncher::Failed { why: why.to_owned() });
    }

    fn pass_orders_on(&mut self) {
        for (rank, order) in self.coordinator.take_orders() {
            if let Some(Rank { launcher, connection, .. }) = self.ranks.get(&rank) {
                self.outbox.push((*launcher, ToLauncher::Order { connection: *connection, order }));
            }
        }
    }

    /// Says what follows from what is known.
    fn go_on(&mut self) {
        self.pass_orders_on();
        if !self.is_reaching() {
            return;
        }
        let is_cut = match self.coordinator.state() {
            State::Failed(failure) => {
                let why = failure.describe(|rank| self.name(rank));
                return self.fail(&why);
            }
            state => *state == State::Cut,
        };
        match (is_cut, self.phase) {
            (true, Phase::Reaching) => {
                self.phase = Phase::Closing;
                self.round += 1;
                // A launcher without agents has no ranks, and gets none.
                self.launchers.values_mut().for_each(|launcher| launcher.has_closed = !launcher.has_agents);
                self.tell(|launcher| launcher.has_agents, &ToLauncher::Close { round: self.round });
            }
            (false, Phase::Closing) => {
                self.phase = Phase::Reaching;
                self.tell(|launcher| launcher.has_agents, &ToLauncher::Open);
            }
            _ => {}
        }
        if is_cut && self.launchers.values().all(|launcher| launcher.has_closed) {
            let has_communicators = self.coordinator.has_communicators();
            let reached = ToLauncher::Reached { has_communicators, attempts: self.coordinator.tries() };
            // The ranks stay parked, whatever connections come and go.
            self.phase = Phase::Idle;
            self.coordinator.release();
            drop(self.coordinator.take_orders());
            self.tell(|launcher| launcher.has_agents, &reached);
        }
    }
}
