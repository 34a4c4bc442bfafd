//! A cluster under a random schedule: launchers, messages, clocks, faults, and the store.

use std::collections::BTreeMap;
use std::time::Duration;

use super::host::{Ground, Host};
use crate::{
    Action, AttemptId, Blame, Envelope, Message, NodeId, Order, Outcome, PartId, Peer, PutAnswer, Record,
    Settings, Step,
};

/// A deliberate error, which the tests have to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Nodes hold their tasks until an order comes.
    NoLease,
    /// The store adds a global manifest whatever came before it.
    NoEpoch,
    /// The packet rules are removed when all nodes have begun to capture.
    NoSecondBarrier,
    /// Each node removes its packet rule when it has captured.
    EarlyUnblock,
    /// Reports of earlier attempts count.
    AnyAttempt,
    /// Parts that are being restored are released when all nodes have begun.
    NoLoadBarrier,
    /// All parts without a global manifest are collected.
    EagerGarbage,
}

enum StoreRequest {
    Read(u64),
    Put(u64, Record),
}

enum StoreAnswer {
    Read(u64, Vec<Record>),
    Put(u64, PutAnswer),
}

enum Event {
    Deliver {
        to: u32,
        envelope: Envelope,
    },
    Tick {
        at: u32,
    },
    EffectEnd {
        at: u32,
        id: u64,
    },
    Finished {
        to: NodeId,
        attempt: AttemptId,
        step: Step,
        outcome: Outcome,
    },
    Request {
        from: NodeId,
        request: StoreRequest,
    },
    Answer {
        to: NodeId,
        answer: StoreAnswer,
    },
    Delete(Vec<PartId>),
    Start {
        at: u32,
    },
    Fault,
    Heal,
    Checkpoint,
    Collect,
    /// The caller of a coordinator resumes the job after the end of a session.
    Resume,
}

/// A clock that runs a little too fast or too slow, and may jump ahead.
#[derive(Clone, Copy)]
struct Clock {
    since: Duration,
    then: Duration,
    per_mille: u32,
}

impl Clock {
    fn local(&self, now: Duration) -> Duration {
        self.then + now.saturating_sub(self.since) * self.per_mille / 1000
    }

    fn global(&self, local: Duration) -> Duration {
        self.since + local.saturating_sub(self.then) * 1000 / self.per_mille
    }
}

struct Machine {
    peer: Option<Peer>,
    incarnation: u64,
    clock: Clock,
    paused_until: Duration,
    side: bool,
    host: Host,
    tick_at: Duration,
    /// The newest attempt that its coordinator has given orders for.
    ordering: AttemptId,
}

/// How bad it is.
#[derive(Clone, Copy)]
struct Chaos {
    fault_interval_ms: u64,
    loss_per_mille: u64,
    late_per_mille: u64,
    failure_per_mille: u64,
}

pub struct World {
    pub settings: Settings,
    pub ground: Ground,
    pub now: Duration,
    pub random: fastrand::Rng,
    machines: Vec<Machine>,
    events: BTreeMap<(Duration, u64), Event>,
    number: u64,
    chaos: Option<Chaos>,
    store_fails_until: Duration,
    flaw: Option<Flaw>,
    pub resumed: u64,
    /// Sessions that the caller has ended.
    pub ended: u64,
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

impl World {
    pub fn new(settings: Settings, seed: u64, flaw: Option<Flaw>) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let chaos = Chaos {
            fault_interval_ms: [2_000, 8_000, 30_000][random.usize(..3)],
            loss_per_mille: [0, 20, 200][random.usize(..3)],
            late_per_mille: [0, 20, 200][random.usize(..3)],
            failure_per_mille: [0, 0, 20][random.usize(..3)],
        };
        let machines = (0..settings.nodes).map(|_| Machine {
            peer: None,
            incarnation: 0,
            clock: Clock {
                since: Duration::ZERO,
                then: ms(random.u64(..100_000)),
                per_mille: random.u32(950..1050),
            },
            paused_until: Duration::ZERO,
            side: false,
            host: Host::default(),
            tick_at: Duration::MAX,
            ordering: AttemptId::default(),
        });
        let mut world = Self {
            settings,
            ground: Ground::default(),
            now: Duration::ZERO,
            machines: machines.collect(),
            random,
            events: BTreeMap::new(),
            number: 0,
            chaos: Some(chaos),
            store_fails_until: Duration::ZERO,
            flaw,
            resumed: 0,
            ended: 0,
        };
        for at in 0..settings.nodes {
            let delay = ms(world.random.u64(..3_000));
            world.after(delay, Event::Start { at });
        }
        for event in [Event::Fault, Event::Checkpoint, Event::Collect] {
            world.after(ms(5_000), event);
        }
        world
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.number += 1;
        self.events.insert((self.now + delay, self.number), event);
    }

    fn chance(&mut self, per_mille: impl Fn(&Chaos) -> u64) -> bool {
        let chance = self.chaos.as_ref().map_or(0, per_mille);
        self.random.u64(..1000) < chance
    }

    /// Runs until a time, or until the condition holds. Returns whether it held.
    pub fn run(&mut self, until: Duration, is_reached: impl Fn(&Self) -> bool) -> Result<bool, String> {
        loop {
            if is_reached(self) {
                return Ok(true);
            }
            let Some(((at, _), event)) = self.events.pop_first() else { return Ok(false) };
            if at > until {
                self.after(at - self.now, event);
                self.now = until;
                return Ok(false);
            }
            self.now = at;
            self.handle(event)?;
        }
    }

    /// All faults are over, and all machines are up.
    pub fn heal(&mut self) {
        (self.chaos, self.store_fails_until) = (None, Duration::ZERO);
        for at in 0..self.machines.len() {
            let machine = &mut self.machines[at];
            (machine.side, machine.paused_until) = (false, self.now);
            if machine.peer.is_none() {
                self.after(ms(100), Event::Start { at: at as u32 });
            }
        }
    }

    fn handle(&mut self, event: Event) -> Result<(), String> {
        let at = match &event {
            Event::Deliver { to, .. } => Some(*to),
            Event::Tick { at } => Some(*at),
            Event::Finished { to, .. } | Event::Answer { to, .. } => Some(to.rank),
            _ => None,
        };
        if let Some(at) = at {
            let paused_until = self.machines[at as usize].paused_until;
            if paused_until > self.now {
                self.after(paused_until - self.now, event);
                return Ok(());
            }
        }
        match event {
            Event::Deliver { to, envelope } => self.deliver(to, envelope),
            Event::Tick { at } if self.machines[at as usize].tick_at <= self.now => {
                self.machines[at as usize].tick_at = Duration::MAX;
                self.with(at, Peer::tick)
            }
            Event::Tick { .. } => Ok(()),
            Event::EffectEnd { at, id } => self.end_effect(at, id),
            Event::Finished { to, attempt, step, outcome } if self.is_up(to) => {
                self.with(to.rank, |peer, local| peer.finished(local, attempt, step, outcome))
            }
            Event::Answer { to, answer } if self.is_up(to) => {
                self.with(to.rank, |peer, local| match answer {
                    StoreAnswer::Read(from, records) => peer.read(local, from, records),
                    StoreAnswer::Put(position, answer) => peer.put(local, position, answer),
                })
            }
            Event::Finished { .. } | Event::Answer { .. } => Ok(()),
            Event::Request { from, request } => self.store(from, request),
            Event::Delete(parts) => {
                parts.iter().for_each(|part| drop(self.ground.parts.remove(part)));
                self.ground.check_parts()
            }
            Event::Start { at } => self.start(at),
            Event::Fault => self.fault(),
            Event::Heal => {
                self.machines.iter_mut().for_each(|machine| machine.side = false);
                Ok(())
            }
            Event::Checkpoint => {
                self.after(ms(4_000), Event::Checkpoint);
                (0..self.settings.nodes).try_for_each(|at| {
                    self.with(at, |peer, local| {
                        peer.request(local);
                    })
                })
            }
            Event::Collect => {
                self.collect();
                Ok(())
            }
            Event::Resume => self.resume(),
        }
    }

    fn is_up(&self, node: NodeId) -> bool {
        let machine = &self.machines[node.rank as usize];
        machine.peer.is_some() && machine.incarnation == node.incarnation
    }

    fn start(&mut self, at: u32) -> Result<(), String> {
        let machine = &mut self.machines[at as usize];
        if machine.peer.is_none() {
            machine.incarnation += 1;
            machine.paused_until = self.now;
            let me = NodeId { rank: at, incarnation: machine.incarnation };
            machine.peer = Some(Peer::new(me, self.settings, machine.clock.local(self.now)));
        }
        self.with(at, Peer::tick)
    }

    /// Calls a launcher, does what it says, and checks what it holds.
    fn with(&mut self, at: u32, call: impl FnOnce(&mut Peer, Duration)) -> Result<(), String> {
        let machine = &mut self.machines[at as usize];
        let local = machine.clock.local(self.now);
        if machine.paused_until > self.now {
            return Ok(());
        }
        let Some(peer) = &mut machine.peer else { return Ok(()) };
        call(peer, local);
        for action in peer.take_actions() {
            self.act(at, local, action)?;
        }
        let machine = &mut self.machines[at as usize];
        let is_held_too_long = machine.host.hold.is_some_and(|hold| local > hold.since + hold.limit + ms(1));
        if is_held_too_long || machine.host.has_rule && machine.host.hold.is_none() {
            return Err(format!("node {at} is frozen beyond its lease, or keeps a packet rule"));
        }
        let Some(peer) = &machine.peer else { return Ok(()) };
        let next = machine.clock.global(peer.next_tick()).max(self.now) + Duration::from_micros(1);
        if next < machine.tick_at {
            machine.tick_at = next;
            self.after(next - self.now, Event::Tick { at });
        }
        Ok(())
    }

    fn act(&mut self, at: u32, local: Duration, action: Action) -> Result<(), String> {
        let settings = self.settings;
        let machine = &mut self.machines[at as usize];
        let from = NodeId { rank: at, incarnation: machine.incarnation };
        match action {
            Action::Send { to, message } => {
                if let Message::Order { attempt, .. } = &message {
                    machine.ordering = *attempt;
                }
                self.send(at, to, message);
            }
            Action::Perform { attempt, order } => return self.perform(at, local, attempt, order),
            Action::Release => return self.ground.release(&mut machine.host, self.now, &settings),
            Action::Kill => return self.ground.kill(&mut machine.host, self.now, &settings),
            Action::Read { from: position } => self.ask(from, StoreRequest::Read(position)),
            Action::Put { position, record } => self.ask(from, StoreRequest::Put(position, record)),
            Action::Event(event) => {
                self.resumed += u64::from(matches!(event, crate::Event::Running { .. }));
            }
        }
        Ok(())
    }

    fn send(&mut self, from: u32, to: u32, message: Message) {
        let copies = 1 + u32::from(self.chance(|chaos| chaos.late_per_mille));
        for _ in 0..copies {
            if self.chance(|chaos| chaos.loss_per_mille) {
                continue;
            }
            let is_late = self.chance(|chaos| chaos.late_per_mille);
            let delay = ms(if is_late { self.random.u64(..15_000) } else { self.random.u64(1..30) });
            let envelope = Envelope::new(from, message.clone());
            self.after(delay, Event::Deliver { to, envelope });
        }
    }

    fn deliver(&mut self, to: u32, envelope: Envelope) -> Result<(), String> {
        let (from, mut message) = envelope.open().map_err(|error| error.to_string())?;
        if self.machines[from as usize].side != self.machines[to as usize].side {
            return Ok(());
        }
        let far = Duration::from_secs(1_000_000);
        match (&mut message, self.flaw) {
            (
                Message::Order { order: Order::Quiesce { lease } | Order::Load { lease, .. }, .. },
                Some(Flaw::NoLease),
            ) => {
                *lease = far;
            }
            (Message::Report { attempt, .. }, Some(Flaw::AnyAttempt)) => {
                *attempt = self.machines[to as usize].ordering;
            }
            _ => {}
        }
        self.with(to, |peer, local| peer.receive(local, from, message))
    }

    fn perform(&mut self, at: u32, local: Duration, attempt: AttemptId, order: Order) -> Result<(), String> {
        let settings = self.settings;
        let step = order.step();
        let host = &mut self.machines[at as usize].host;
        self.ground.begin(host, (self.now, local), attempt, &order, &settings)?;
        self.number += 1;
        let id = self.number;
        host.effect = Some((id, attempt, order));
        let is_slow = self.chance(|chaos| chaos.late_per_mille / 4);
        let delay = ms(if is_slow { self.random.u64(..30_000) } else { self.random.u64(..300) });
        self.after(delay, Event::EffectEnd { at, id });
        let is_reported_early = match self.flaw {
            Some(Flaw::NoSecondBarrier) => step == Step::Dump,
            Some(Flaw::NoLoadBarrier) => step == Step::Load,
            _ => false,
        };
        if is_reported_early {
            let node = NodeId { rank: at, incarnation: self.machines[at as usize].incarnation };
            let message = Message::Report { node, attempt, step, outcome: Outcome::Done };
            (0..settings.nodes).for_each(|to| self.send(at, to, message.clone()));
        }
        Ok(())
    }

    fn end_effect(&mut self, at: u32, id: u64) -> Result<(), String> {
        let has_failed = self.chance(|chaos| chaos.failure_per_mille);
        let settings = self.settings;
        let machine = &mut self.machines[at as usize];
        let Some((_, attempt, order)) = machine.host.effect.take_if(|(current, ..)| *current == id) else {
            return Ok(());
        };
        let to = NodeId { rank: at, incarnation: machine.incarnation };
        let step = order.step();
        let outcome = if has_failed {
            let blame = if step == Step::Load { Blame::Snapshot } else { Blame::Node };
            Outcome::Failed { reason: "injected".to_owned(), blame }
        } else {
            let hash = self.ground.complete(&mut machine.host, self.now, attempt, &order);
            hash.map_or(Outcome::Done, |hash| Outcome::Stored { hash })
        };
        if self.flaw == Some(Flaw::EarlyUnblock) && step == Step::Dump {
            self.ground.let_go(&mut machine.host, self.now, &settings)?;
        }
        self.after(Duration::ZERO, Event::Finished { to, attempt, step, outcome });
        Ok(())
    }

    fn ask(&mut self, from: NodeId, request: StoreRequest) {
        if self.store_fails_until > self.now || self.chance(|chaos| chaos.loss_per_mille) {
            return;
        }
        let is_late = self.chance(|chaos| chaos.late_per_mille);
        let delay = ms(if is_late { self.random.u64(..20_000) } else { self.random.u64(5..100) });
        self.after(delay, Event::Request { from, request });
    }

    fn store(&mut self, from: NodeId, request: StoreRequest) -> Result<(), String> {
        let settings = self.settings;
        let answer = match request {
            StoreRequest::Read(position) => {
                let records = self.ground.log.iter().skip(position as usize).cloned().collect();
                StoreAnswer::Read(position, records)
            }
            StoreRequest::Put(position, record) => {
                let found = self.ground.log.get(position as usize);
                let is_ignored =
                    self.flaw == Some(Flaw::NoEpoch) && matches!(record, Record::Snapshot { .. });
                match found.filter(|_| !is_ignored || self.ground.log.contains(&record)) {
                    Some(found) => StoreAnswer::Put(position, PutAnswer::Taken(found.clone())),
                    None if position as usize > self.ground.log.len() => {
                        return Err("a put leaves a gap in the log".to_owned());
                    }
                    None => {
                        self.ground.add(record, &settings)?;
                        StoreAnswer::Put(position, PutAnswer::Done)
                    }
                }
            }
        };
        if !self.chance(|chaos| chaos.loss_per_mille) {
            let delay = ms(self.random.u64(1..50));
            self.after(delay, Event::Answer { to: from, answer });
        }
        Ok(())
    }

    fn collect(&mut self) {
        self.after(ms(3_000), Event::Collect);
        let parts: Vec<_> = self.ground.parts.keys().copied().collect();
        for at in 0..self.machines.len() {
            let Some(peer) = &self.machines[at].peer else { continue };
            let mut garbage = peer.garbage(&parts);
            if self.flaw == Some(Flaw::EagerGarbage) {
                let is_committed = |part: &PartId| {
                    let is_of = |record: &Record| matches!(record, Record::Snapshot { attempt, .. } if *attempt == part.attempt);
                    self.ground.log.iter().any(is_of)
                };
                garbage = parts.iter().filter(|part| !is_committed(part)).copied().collect();
            }
            let delay = ms(self.random.u64(..10_000));
            self.after(delay, Event::Delete(garbage));
        }
    }

    pub fn crash(&mut self, at: usize) -> Result<(), String> {
        let settings = self.settings;
        let machine = &mut self.machines[at];
        machine.peer = None;
        self.ground.kill(&mut machine.host, self.now, &settings)
    }

    pub fn restart(&mut self, at: usize, delay: Duration) {
        self.after(delay, Event::Start { at: at as u32 });
    }

    fn fault(&mut self) -> Result<(), String> {
        let Some(chaos) = self.chaos else { return Ok(()) };
        let interval = ms(self.random.u64(1..2 * chaos.fault_interval_ms));
        self.after(interval, Event::Fault);
        let at = self.random.usize(..self.machines.len());
        let length = ms(self.random.u64(..[500, 10_000, 40_000][self.number as usize % 3]));
        match self.random.u32(..16) {
            0..3 => {
                self.crash(at)?;
                self.restart(at, length);
            }
            3..5 => self.machines[at].paused_until = self.now + length,
            5 => {
                let machine = &mut self.machines[at];
                let then = machine.clock.local(self.now) + length;
                machine.clock = Clock { since: self.now, then, ..machine.clock };
                // The launcher's timers expire.
                return self.with(at as u32, Peer::tick);
            }
            6..9 => {
                for machine in 0..self.machines.len() {
                    self.machines[machine].side = self.random.bool();
                }
                self.after(length, Event::Heal);
            }
            9 => self.store_fails_until = self.now + length,
            10..12 => {
                self.after(length, Event::Resume);
                return self.end_session();
            }
            // The job is to end.
            12..14 => {
                return (0..self.settings.nodes).try_for_each(|at| {
                    self.with(at, |peer, local| match peer.in_progress() {
                        Some(attempt) => peer.give_up(local, attempt, "it ends"),
                        None => peer.tick(local),
                    })
                });
            }
            _ => {
                let machine = &mut self.machines[at];
                if machine.host.job.is_some()
                    && machine.host.hold.is_none()
                    && machine.paused_until <= self.now
                {
                    machine.host.job = None;
                    return self.with(at as u32, Peer::part_ended);
                }
            }
        }
        Ok(())
    }

    /// A part has failed, or the job hangs: the caller of the coordinator ends the session, and each launcher its part.
    fn end_session(&mut self) -> Result<(), String> {
        let rank = self.random.u32(..self.settings.nodes);
        self.ended += 1;
        for at in 0..self.settings.nodes {
            self.with(at, |peer, local| peer.end_session(local, rank))?;
            let machine = &mut self.machines[at as usize];
            if machine.host.job.is_some() && machine.host.hold.is_none() && machine.paused_until <= self.now {
                machine.host.job = None;
                self.with(at, Peer::part_ended)?;
            }
        }
        Ok(())
    }

    /// Some snapshots are left out.
    fn resume(&mut self) -> Result<(), String> {
        if self.machines.iter().any(|machine| machine.paused_until > self.now) {
            self.after(ms(500), Event::Resume);
        }
        let snapshots = self.ground.log.iter().filter_map(|record| match record {
            Record::Snapshot { attempt, .. } => Some(*attempt),
            Record::Epoch { .. } | Record::Complete => None,
        });
        let random = &mut self.random;
        let excluded: Vec<_> = snapshots.filter(|_| random.u32(..3) == 0).collect();
        (0..self.settings.nodes).try_for_each(|at| {
            self.with(at, |peer, local| {
                peer.exclude(excluded.clone());
                peer.resume(local);
            })
        })
    }

    /// A session that runs on all nodes that the newest epoch's coordinator believes it to run on.
    pub fn running(&self) -> Option<AttemptId> {
        let peers = self.machines.iter().filter_map(|machine| machine.peer.as_ref());
        let newest = peers.clone().map(Peer::epoch).max();
        let of_newest = peers.filter(|peer| Some(peer.epoch()) == newest);
        let sessions = of_newest.filter_map(Peer::coordinated_session);
        let runs = |session: &AttemptId| {
            let hosts = self.machines.iter().map(|machine| &machine.host);
            let has_it =
                |host: &&Host| host.hold.is_none() && host.job.is_some_and(|(own, _)| own == *session);
            hosts.filter(has_it).count() == self.settings.parts as usize
        };
        sessions.filter(runs).max()
    }

    /// A machine of the session.
    pub fn machine_of(&self, session: AttemptId) -> usize {
        let is_of = |machine: &Machine| machine.host.job.is_some_and(|(own, _)| own == session);
        self.machines.iter().position(is_of).expect("a machine of the session")
    }

    pub fn describe(&self) -> String {
        let of = |machine: &Machine| format!("{:?}\n", machine.peer);
        self.machines.iter().map(of).collect()
    }
}
