//! The thread that runs the protocol at this node: messages, steps, answers of the log and times go into the state machine
//! of `ckpt-cluster`, and what that says is done.
//!
//! ```text
//!   joined ──► resuming (Load) ──► running ──► all parts have ended with 0 ──► Complete
//!              ▲  │                   │
//!              │  │                   ├─► a connection is lost, a node is silent, the job is stopped ──► End
//!              │  └───────────────────┴─► a part has failed ──► Over: all parts are ended
//!              └──────────────── again ◄── the supervisor of node 0 decides ──► not again: End
//! ```
//!
//! After an End each launcher ends its part and exits: who has started the launchers starts them again.

mod cut;
mod locating;
mod log;
mod loss;
#[cfg(test)]
mod measure;
mod rank_reports;
mod restarting;
mod stopping;

pub use rank_reports::RankReports;

use super::gate::{Gate, GateEnd};
use super::job_network::JobNetwork;
use super::join::Unreachable;
use super::links::{Joining, Link};
use super::messages::{End, EndedPart, IdlePart, Join, Message, RankReport, Restart, StopHow, Welcome};
use super::options::OnNodeLoss;
use super::rejoin::Rejoin;
use super::replicas::Replicas;
use super::sockets::{self, LauncherConnections};
use super::spares::Spares;
use super::stored_log::StoredLog;
use crate::job::status::unix_ms;
use crate::sys::deadline::{NODE_CAUSE_WINDOW, NODE_CONNECTIONS_END_TIMEOUT, NODE_FIRST_RETRY_INTERVAL};
use crate::sys::error::{BadInput, EXIT_BAD_INPUT, EXIT_OWN, bad_input};
use anyhow::{Context, Result, anyhow};
use ckpt_cluster::{
    Action, AttemptId, Blame, Envelope, Event, NodeId, Order, Outcome, Peer, Reason, Settings, Step,
};
use ckpt_cut::FromLauncher;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use cut::RanksOfAll;
use log::LogThread;
use rank_reports::Reported;
use signal_hook::consts::SIGKILL;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};
use stopping::Stopping;

/// What the thread takes.
#[derive(Debug)]
pub(super) enum Input {
    Joining(Box<Joining>),
    Received {
        rank: u32,
        number: u64,
        message: Message,
    },
    Lost {
        rank: u32,
        number: u64,
        why: String,
    },
    Finished {
        attempt: AttemptId,
        step: Step,
        outcome: Outcome,
    },
    /// Is this the address of a node?
    Locate {
        address: IpAddr,
    },
    /// Of the ranks here.
    Ranks {
        attempt: AttemptId,
        message: FromLauncher,
    },
    /// A snapshot is wanted.
    Request {
        is_durable: bool,
    },
    PartEnded(EndedPart),
    /// The part here does nothing; or works again.
    Idle(Option<IdlePart>),
    /// For how long the part here has done nothing.
    Progress {
        idle_ms: u64,
    },
    /// How far the ranks here are.
    RankReports(Vec<RankReport>),
    Stop {
        why: String,
        how: StopHow,
    },
    /// The part of a session that is over is ended here. These local ports belong to connections in the snapshots.
    SessionEnded {
        ports: BTreeSet<u16>,
    },
    /// The thread of the log has answered.
    Log(log::Answer),
    /// Node 0 is about to restart the job.
    Restarting(Restart),
    /// Node 0 restarts it now.
    Resume(Resumable),
    /// Node 0 does not restart it.
    GiveUp(End),
    /// Another node cannot be reached in the network of the job.
    Unreachable {
        why: String,
    },
    /// This launcher cannot go on.
    Fail {
        why: String,
        code: i32,
    },
}

/// A part is to be restored, or the command to be started.
#[derive(Debug)]
pub struct Load {
    /// Its steps.
    pub gate: Arc<Gate>,
    /// The snapshot and the hash of the part here; `None` for the beginning.
    pub from: Option<(AttemptId, String)>,
}

/// From which snapshots node 0 resumes the job: its own parts tell it.
#[derive(Debug, Default)]
pub struct Resumable {
    /// They are in its store; `None` if that is not known.
    pub held: Option<Vec<AttemptId>>,
    /// They may contain what made the job fail, and are resumed only if there are no others.
    pub excluded: Vec<AttemptId>,
}

/// What the supervisor learns.
#[derive(Debug)]
pub enum Notice {
    /// See [`Load`].
    Load(Load),
    /// A snapshot of the part is to be taken.
    Checkpoint(Arc<Gate>),
    /// A snapshot that was wanted is not begun, or was given up before that.
    NotTaken(String),
    /// The job is being ended with a snapshot.
    Stopping,
    /// It cannot be saved, and runs on.
    RunsOn(String),
    /// It cannot be saved, and ends within the grace period: it gets SIGTERM.
    Terminate(String),
    /// All parts run.
    Running,
    /// The session is over on all nodes. At node 0: [`Cluster::give_up`], or [`Cluster::announce`] and [`Cluster::resume`].
    Over(End),
    /// The job is about to be restarted.
    Restarting(Restart),
    /// All parts have ended with 0.
    Complete,
    /// The job is over on all nodes.
    End(End),
}

/// The other nodes, as the rest of the launcher sees them.
pub struct Cluster {
    me: NodeId,
    nodes: u32,
    welcome: Welcome,
    inputs: Sender<Input>,
    notices: Receiver<Notice>,
    thread: JoinHandle<()>,
    network: Option<JobNetwork>,
    launchers: LauncherConnections,
    aftermath: Arc<Aftermath>,
    reported: Arc<Reported>,
}

/// After so many failures of snapshots in memory in a row, the number of those in the stores before the next one grows no more.
const MOST_MEMORY_FAILURES: u32 = 5;

/// What is left of a session.
#[derive(Debug, Default)]
struct Aftermath {
    /// The launchers start again.
    rejoins: AtomicBool,
    /// The run has begun on all nodes.
    has_begun: AtomicBool,
    /// The job was to be stopped, here or at another node.
    is_to_stop: Arc<AtomicBool>,
}

/// What the thread works with.
pub(super) struct HostParts {
    pub(super) me: NodeId,
    pub(super) settings: Settings,
    pub(super) links: BTreeMap<u32, Link>,
    /// At node 0.
    pub(super) log: Option<StoredLog>,
    /// At node 0: snapshots that cannot be resumed, since a part is missing, and the number of the others.
    pub(super) excluded: Vec<AttemptId>,
    pub(super) usable: usize,
    pub(super) grace: Duration,
    /// See [`Member::every`](super::join::Member).
    pub(super) every: u64,
    /// Local ports of the job's connections in earlier sessions.
    pub(super) ports: BTreeSet<u16>,
    /// At node 0: the addresses of all nodes.
    pub(super) addresses: BTreeSet<IpAddr>,
    pub(super) launchers: LauncherConnections,
    /// With `--replicas`.
    pub(super) replicas: Option<Arc<Replicas>>,
    /// At node 0.
    pub(super) spares: Spares,
    /// How this node has joined.
    pub(super) own: Join,
    pub(super) on_loss: OnNodeLoss,
}

impl Cluster {
    pub(super) fn start(
        parts: HostParts,
        welcome: Welcome,
        (inputs, inbox): (Sender<Input>, Receiver<Input>),
    ) -> Result<Self> {
        let (to_supervisor, notices) = unbounded();
        let (me, nodes, launchers) = (parts.me, parts.settings.nodes, parts.launchers);
        let host = Host::new(parts, inputs.clone(), to_supervisor)
            .context("cannot start the thread for the log of the job's nodes")?;
        let (aftermath, reported) = (Arc::clone(&host.aftermath), Arc::clone(&host.reported));
        let run = move || host.run(&inbox);
        let thread = std::thread::Builder::new().name("nodes".to_owned()).spawn(run);
        let thread = thread.context("cannot start the thread for the other nodes")?;
        let network = None;
        Ok(Self { me, nodes, welcome, inputs, notices, thread, network, launchers, aftermath, reported })
    }

    /// With the network of the job, which is made by a function that is told whether the job has ended meanwhile. If there is
    /// an error, the job ends on all nodes.
    pub(super) fn with_network(
        self,
        may_rejoin: bool,
        make: impl FnOnce(&Welcome, &(dyn Fn() -> bool + Sync)) -> Result<Option<JobNetwork>>,
    ) -> Result<Self> {
        let error = match make(&self.welcome, &|| self.thread.is_finished()) {
            Ok(network) => return Ok(Self { network, ..self }),
            Err(error) => error,
        };
        if !self.thread.is_finished() && may_rejoin && error.is::<Unreachable>() {
            // A node that cannot be reached is lost. If it cannot be reached again, somebody has to look.
            self.input(Input::Unreachable { why: format!("{error:#}") });
            while !self.thread.is_finished() {
                std::thread::sleep(NODE_FIRST_RETRY_INTERVAL);
            }
        }
        if let Some(rejoin) = self.rejoin() {
            tracing::warn!(
                "the job has ended on all nodes: {error:#}. It is resumed when all nodes are there"
            );
            return Err(rejoin.into());
        }
        if self.thread.is_finished()
            && let Some(End { why, code, .. }) = told_end(&self.notices)
        {
            let told = anyhow!("the job has ended on all nodes: {why}");
            return Err(if code == EXIT_BAD_INPUT { bad_input(told) } else { told });
        }
        let code = if error.is::<BadInput>() { EXIT_BAD_INPUT } else { EXIT_OWN };
        self.fail(format!("{error:#}"), code);
        Err(error)
    }

    /// The network of the job, if it has one.
    #[must_use]
    pub fn network(&self) -> Option<&JobNetwork> {
        self.network.as_ref()
    }

    /// The connections to the other launchers.
    #[must_use]
    pub fn launchers(&self) -> LauncherConnections {
        self.launchers
    }

    /// This node's rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.me.rank
    }

    /// Number of nodes.
    #[must_use]
    pub fn nodes(&self) -> u32 {
        self.nodes
    }

    /// The log of this run of the job, and the snapshots of which it has the global manifest.
    #[must_use]
    pub fn log(&self) -> (&str, &[AttemptId]) {
        (&self.welcome.log, &self.welcome.committed)
    }

    /// What the supervisor has to know.
    #[must_use]
    pub fn notices(&self) -> &Receiver<Notice> {
        &self.notices
    }

    fn input(&self, input: Input) {
        // The thread has ended after an End, which the supervisor has, or will have.
        let _ = self.inputs.send(input);
    }

    /// Requests a snapshot of all nodes; one in the store, if somebody waits for it.
    pub fn request(&self, is_durable: bool) {
        self.input(Input::Request { is_durable });
    }

    /// The part of the job here has ended.
    pub fn part_ended(&self, end: EndedPart) {
        self.input(Input::PartEnded(end));
    }

    /// The part of the job here does nothing; or works again.
    pub fn is_idle(&self, part: Option<IdlePart>) {
        self.input(Input::Idle(part));
    }

    /// Ends the job on all nodes.
    pub fn stop(&self, why: String, how: StopHow) {
        // The thread may have ended.
        self.aftermath.is_to_stop.store(true, Ordering::SeqCst);
        self.input(Input::Stop { why, how });
    }

    /// The part of a session that is over is ended here. These local ports belong to connections in the snapshots.
    pub fn session_ended(&self, ports: BTreeSet<u16>) {
        self.input(Input::SessionEnded { ports });
    }

    /// Tells all nodes that the job is restarted soon. From node 0, after [`Notice::Over`].
    pub fn announce(&self, restart: Restart) {
        self.input(Input::Restarting(restart));
    }

    /// Resumes the job. From node 0, after [`Notice::Over`].
    pub fn resume(&self, from: Resumable) {
        self.input(Input::Resume(from));
    }

    /// Ends the job, which is not restarted. From node 0, after [`Notice::Over`].
    pub fn give_up(&self, end: End) {
        self.input(Input::GiveUp(end));
    }

    /// Ends the job on all nodes: this launcher cannot go on. Returns when all have been told. The exit code is that with
    /// which the job had ended meanwhile, or else this one.
    pub fn fail(self, why: String, code: i32) -> i32 {
        let notices = self.notices.clone();
        self.input(Input::Fail { why, code });
        self.finish();
        told_end(&notices).map_or(code, |end| end.code)
    }

    /// How this launcher starts again, if the job has ended on all nodes so that the launchers that are left do.
    #[must_use]
    pub fn rejoin(&self) -> Option<Rejoin> {
        let Aftermath { rejoins, has_begun, is_to_stop } = &*self.aftermath;
        let rejoins = rejoins.load(Ordering::SeqCst) && !is_to_stop.load(Ordering::SeqCst);
        rejoins.then(|| Rejoin { rank: self.me.rank, has_begun: has_begun.load(Ordering::SeqCst) })
    }

    /// Waits until all that has to be sent is sent. Only after Complete, End or a failure.
    pub fn finish(self) {
        drop(self.inputs);
        let _ = self.thread.join();
    }
}

struct Host {
    me: NodeId,
    begun: Instant,
    settings: Settings,
    peer: Peer,
    links: BTreeMap<u32, Link>,
    log: Option<LogThread>,
    /// Node 0: the cut of the ranks of all nodes.
    ranks: RanksOfAll,
    grace: Duration,
    ports: BTreeSet<u16>,
    addresses: BTreeSet<IpAddr>,
    inputs: Sender<Input>,
    notices: Sender<Notice>,
    gate: Option<Arc<Gate>>,
    /// Why the attempt was given up, as the coordinator says.
    reason: Option<String>,
    is_resuming: bool,
    /// Snapshots that may still be resumed in place of one that is damaged.
    usable: usize,
    /// Node 0: which parts have ended with 0, and which with another code.
    ended: BTreeSet<u32>,
    failed: BTreeSet<u32>,
    has_part_ended: bool,
    /// Node 0: parts that do nothing, since when, and what their watchdogs say.
    idle: BTreeMap<u32, (u64, String)>,
    /// See [`Message::Durable`].
    is_next_durable: bool,
    every: u64,
    /// Node 0: how many snapshots in memory there have been since the last one in the store; `None` if the next one goes there.
    since_durable: Option<u64>,
    /// Node 0: how many snapshots go to the stores before the next one that does not, and how often one of these has failed.
    memory_wait: u64,
    memory_failures: u32,
    /// Node 0: when a part has made progress last, as far as the nodes have said in this session.
    progress: Option<Instant>,
    /// The supervisor has a session, or starts one.
    has_session: bool,
    /// The resume that waits for the end of it.
    settling: Option<AttemptId>,
    stopping: Option<Stopping>,
    /// Node 0: the failure of a part, with its node, and until when it may turn out to be the consequence of another one.
    failing: Option<(u32, End, Instant)>,
    /// The session is over, and another one may follow.
    is_waiting: bool,
    /// When each node was heard last with which this one is connected.
    heard: BTreeMap<u32, Instant>,
    /// When times were looked at last.
    watched: Instant,
    /// See [`Self::show`].
    shown: Instant,
    /// All parts have ended with 0, which is being recorded. Nothing else counts.
    is_completing: bool,
    is_over: bool,
    /// Node 0: the spares that wait, and how many were admitted since the job runs.
    spares: Spares,
    admitted: u64,
    own: Join,
    on_loss: OnNodeLoss,
    /// See [`Cluster::rejoin`].
    aftermath: Arc<Aftermath>,
    /// See [`RankReports`].
    reported: Arc<Reported>,
    replicas: Option<Arc<Replicas>>,
}

impl Host {
    fn new(parts: HostParts, inputs: Sender<Input>, notices: Sender<Notice>) -> std::io::Result<Self> {
        let HostParts { me, settings, links, log, excluded, usable, grace, ports, addresses, .. } = parts;
        let (spares, own, on_loss) = (parts.spares, parts.own, parts.on_loss);
        let heard = links.keys().map(|rank| (*rank, Instant::now())).collect();
        let mut peer = Peer::new(me, settings, Duration::ZERO);
        peer.exclude(excluded);
        let log = log.map(|log| LogThread::start(log, inputs.clone())).transpose()?;
        Ok(Self {
            me,
            begun: Instant::now(),
            settings,
            peer,
            links,
            log,
            ranks: RanksOfAll::new(settings.nodes),
            grace,
            ports,
            addresses,
            inputs,
            notices,
            gate: None,
            reason: None,
            is_resuming: true,
            usable,
            ended: BTreeSet::new(),
            failed: BTreeSet::new(),
            has_part_ended: false,
            idle: BTreeMap::new(),
            progress: None,
            is_next_durable: false,
            every: parts.every,
            since_durable: None,
            memory_wait: 0,
            memory_failures: 0,
            has_session: false,
            settling: None,
            stopping: None,
            failing: None,
            is_waiting: false,
            heard,
            watched: Instant::now(),
            shown: Instant::now(),
            is_completing: false,
            is_over: false,
            spares,
            admitted: 0,
            own,
            on_loss,
            aftermath: Arc::default(),
            reported: Arc::default(),
            replicas: parts.replicas,
        })
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn is_coordinator(&self) -> bool {
        self.me.rank == 0
    }

    fn run(mut self, inbox: &Receiver<Input>) {
        self.peer.tick(self.now());
        loop {
            self.perform();
            if self.is_over {
                break;
            }
            match inbox.recv_deadline(self.deadline()) {
                Ok(input) => self.take(input),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.is_over {
                break;
            }
            self.watch_times();
        }
        // Also when the job is complete: a snapshot may be in progress.
        if let Some(gate) = self.gate.take() {
            gate.close(GateEnd::Unknown("the job has ended".to_owned()));
        }
        // A node that is lost answers no more.
        self.replicas.iter().for_each(|replicas| replicas.close());
        self.links.into_values().for_each(Link::finish);
        self.spares.finish();
    }

    fn deadline(&self) -> Instant {
        let next = self.begun + self.peer.next_tick();
        let silent = self.heard.values().min().map(|heard| *heard + self.patience());
        let stopped = self.stopping.as_ref().and_then(Stopping::deadline);
        let failed = self.failing.as_ref().map(|(_, _, until)| *until);
        let cut = self.ranks.next_tick().map(|next| self.begun + next);
        // A later call means that this process was paused.
        let awake = Some(self.watched + self.settings.beat);
        let next =
            [Some(next), silent, stopped, failed, cut, awake].into_iter().flatten().min().unwrap_or(next);
        // A state machine that wants to be called at once must not keep this thread busy.
        next.max(Instant::now() + Duration::from_millis(1))
    }

    /// How long another node may be silent. The protocol of snapshots notices a silent node before, and says more, where it
    /// awaits one: not while the job waits for a restart, or for the store.
    fn patience(&self) -> Duration {
        self.settings.silence + if self.is_coordinator() { self.settings.beat * 2 } else { Duration::ZERO }
    }

    /// The node that is silent for the longest, if that is too long.
    fn silent(&mut self) -> Option<(u32, Duration)> {
        // The time for which this process itself was paused says nothing of the others.
        let pause = std::mem::replace(&mut self.watched, Instant::now()).elapsed();
        if pause > self.settings.beat * 2 {
            self.heard.values_mut().for_each(|heard| *heard += pause);
        }
        let (rank, heard) = self.heard.iter().min_by_key(|(_, heard)| **heard)?;
        let silence = heard.elapsed();
        (silence >= self.patience()).then_some((*rank, silence))
    }

    fn watch_times(&mut self) {
        if self.is_completing {
            // Node 0 is not to look silent.
            return self.tick();
        }
        if let Some((rank, end, _)) = self.failing.take_if(|(_, _, until)| *until <= Instant::now()) {
            return self.over(rank, end);
        }
        if self.stopping.as_ref().and_then(Stopping::deadline).is_some_and(|until| until <= Instant::now()) {
            return self.not_saved("no snapshot was taken in time (--grace)");
        }
        if let Some((rank, silence)) = self.silent() {
            let what = if rank == 0 { ", the coordinator," } else { "" };
            return self.end_after_loss(format!("node {rank}{what} is silent for {} s", silence.as_secs()));
        }
        self.tick();
    }

    fn tick(&mut self) {
        self.spares.show(true);
        self.show();
        if self.now() >= self.peer.next_tick() {
            self.peer.tick(self.now());
        }
        self.tick_cut();
    }

    /// Node 0: requests a snapshot. Whether that is possible.
    fn request(&mut self, is_durable: bool) -> bool {
        // Nothing is only in memory before a first one is in the store.
        let is_due = self.since_durable.is_none_or(|since| since + 1 >= self.every);
        if is_durable || is_due || self.memory_wait > 0 {
            self.is_next_durable = true;
            self.tell_all(&Message::Durable);
        }
        self.peer.request(self.now())
    }

    /// Node 0: counts a snapshot.
    fn count(&mut self, attempt: AttemptId) {
        let gate = self.gate.as_ref().filter(|gate| gate.attempt() == attempt);
        match gate.map(|gate| gate.is_durable()) {
            Some(true) => {
                self.since_durable = Some(0);
                self.memory_wait = self.memory_wait.saturating_sub(1);
            }
            Some(false) => {
                self.since_durable = self.since_durable.map(|since| since + 1);
                self.memory_failures = 0;
            }
            None => self.since_durable = None,
        }
    }

    /// Node 0: an attempt was given up. If a node has no memory for it, the next ones go to the stores, more of them after each
    /// such failure.
    fn count_failure(&mut self, reason: &Reason) {
        if matches!(reason, Reason::Failed { blame: Blame::Memory, .. }) {
            self.memory_wait = self.every << self.memory_failures;
            self.memory_failures = MOST_MEMORY_FAILURES.min(self.memory_failures + 1);
        }
    }

    /// Tells the other nodes that node 0 is there: until it coordinates, which takes as long as the store takes for the log, the
    /// protocol of snapshots sends them nothing.
    fn show(&mut self) {
        let is_due = self.shown.elapsed() >= self.settings.beat;
        if is_due && self.is_coordinator() && !self.peer.is_coordinator() {
            self.shown = Instant::now();
            self.tell_all(&Message::Present);
        }
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Log(answer) => self.answered(answer),
            _ if self.is_completing => {}
            Input::Joining(joining) => self.admit_spare(*joining),
            Input::Received { rank, number, message } => {
                if self.links.get(&rank).is_some_and(|link| link.number == number) {
                    self.heard.insert(rank, Instant::now());
                    self.receive(rank, message);
                }
            }
            Input::Lost { rank, number, why } => {
                if self.links.get(&rank).is_some_and(|link| link.number == number) {
                    self.end_after_loss(format!("the connection to node {rank} is lost ({why})"));
                } else if self.spares.lost(rank, number) {
                    tracing::info!("the spare {rank} is not there any more: {why}");
                }
            }
            Input::Finished { attempt, step, outcome } => {
                self.peer.finished(self.now(), attempt, step, outcome);
            }
            Input::Locate { address } => self.tell_coordinator(Message::Locate { address }),
            Input::Ranks { attempt, message } => self.tell_coordinator(Message::Ranks { attempt, message }),
            Input::Request { is_durable } => self.tell_coordinator(Message::Request { is_durable }),
            Input::PartEnded(end) => {
                self.has_part_ended = true;
                self.tell_coordinator(Message::PartEnded(end));
            }
            Input::Idle(part) => self.tell_coordinator(Message::Idle { part }),
            Input::Progress { idle_ms } => self.tell_coordinator(Message::Progress { idle_ms }),
            Input::RankReports(ranks) => self.tell_coordinator(Message::RankReports { ranks }),
            Input::Stop { why, how } => {
                let why = format!("node {}: {why}", self.me.rank);
                self.tell_coordinator(Message::Stop { why, how });
            }
            Input::SessionEnded { ports } => self.session_ended(ports),
            Input::Restarting(restart) => self.announce(restart),
            Input::Resume(from) => self.resume(from),
            Input::GiveUp(end) => self.end(end),
            Input::Unreachable { why } => {
                let why = format!("node {}: {why}", self.me.rank);
                let end = End::failure(why, EXIT_OWN);
                // The coordinator decides.
                self.tell_coordinator(Message::End(End { is_to_rejoin: true, ..end }));
            }
            Input::Fail { why, code } => {
                let end = End::failure(format!("node {}: {why}", self.me.rank), code);
                if self.is_coordinator() {
                    self.end(end);
                } else {
                    self.tell_coordinator(Message::End(end));
                    self.is_over = true;
                }
            }
        }
    }

    fn tell_coordinator(&mut self, message: Message) {
        match self.links.get(&0) {
            Some(link) => link.send(message),
            None => self.receive(0, message),
        }
    }

    fn receive(&mut self, rank: u32, message: Message) {
        match message {
            Message::Snapshot(envelope) => self.receive_snapshot(rank, envelope),
            Message::Present => {}
            Message::Progress { idle_ms } => self.progress_of(idle_ms),
            Message::Committed { attempt, idle_ms } => self.commit(attempt, idle_ms),
            Message::Locate { address } => self.locate(rank, address),
            Message::Located { address, is_node } => self.located(address, is_node),
            Message::Ranks { attempt, message } => self.ranks_say(rank, attempt, message),
            Message::Cut { attempt, message } => {
                if let Some(gate) = self.gate.as_ref().filter(|gate| gate.attempt() == attempt) {
                    gate.cut(message);
                }
            }
            Message::PartEnded(end) => self.part_ended(rank, end),
            Message::Idle { part } => self.part_is_idle(rank, part),
            Message::RankReports { ranks } => self.rank_reports(rank, ranks),
            // Sessions run only after this launcher has begun to coordinate.
            Message::Request { is_durable } if !self.is_terminating() => drop(self.request(is_durable)),
            // The job is about to end.
            Message::Request { .. } => {}
            Message::Durable => self.is_next_durable = true,
            Message::Stop { why, how } => self.stop(why, how),
            Message::Stopping => {
                self.aftermath.is_to_stop.store(true, Ordering::SeqCst);
                let _ = self.notices.send(Notice::Stopping);
            }
            Message::RunsOn { why } => {
                self.aftermath.is_to_stop.store(false, Ordering::SeqCst);
                let _ = self.notices.send(Notice::RunsOn(why));
            }
            Message::Terminate { why } => drop(self.notices.send(Notice::Terminate(why))),
            Message::Over(end) => self.over(0, end),
            Message::Restarting(restart) => self.announce(restart),
            Message::Complete => {
                let _ = self.notices.send(Notice::Complete);
                self.is_over = true;
            }
            Message::End(end) if end.is_to_rejoin && self.is_coordinator() => self.end_after_loss(end.why),
            Message::End(end) => self.end(end),
            Message::Join(_)
            | Message::Welcome(_)
            | Message::Refused { .. }
            | Message::Spare { .. }
            | Message::Take { .. }
            | Message::Joined
            | Message::NotHere => {
                tracing::debug!("node {rank} sends a message that belongs to the beginning");
            }
        }
    }

    /// A part of the job has ended, by itself or by its launcher.
    fn part_ended(&mut self, rank: u32, EndedPart { code, why, hung_ms }: EndedPart) {
        if self.is_waiting {
            // It was killed, since the session is over.
            return;
        }
        let of_its_kind = if code == 0 { &mut self.ended } else { &mut self.failed };
        of_its_kind.insert(rank);
        if self.is_terminating() {
            return self.look_for_end();
        }
        if self.ended.len() == self.settings.nodes as usize {
            return self.complete();
        }
        if code == 0 {
            return self.look_for_hang();
        }
        let what = why.unwrap_or_else(|| format!("its part of the job ended with exit code {code}"));
        let hung_since_unix_ms = hung_ms.map(|ms| unix_ms(SystemTime::now()).saturating_sub(ms));
        let end = End { hung_since_unix_ms, ..End::failure(format!("node {rank}: {what}"), code) };
        // Its end may be the consequence of the loss of another node, which is about to show, or of the end of a part that
        // hung: launchers tell that at about the same time.
        match &mut self.failing {
            Some((first, known, _)) if end.hung_since_unix_ms.is_some() => {
                let since = known.hung_since_unix_ms.into_iter().chain(end.hung_since_unix_ms).min();
                if known.hung_since_unix_ms.is_none() {
                    (*first, *known) = (rank, end);
                }
                known.hung_since_unix_ms = since;
            }
            Some(_) => {}
            None => self.failing = Some((rank, end, Instant::now() + NODE_CAUSE_WINDOW)),
        }
    }

    /// What is known of the parts of a session that is over.
    fn forget_parts(&mut self) {
        self.ended.clear();
        self.failed.clear();
        self.idle.clear();
        self.progress = None;
        self.failing = None;
    }

    fn part_is_idle(&mut self, rank: u32, part: Option<IdlePart>) {
        self.idle.remove(&rank);
        if let Some(IdlePart { what, idle_ms }) = part {
            self.idle.insert(rank, (unix_ms(SystemTime::now()).saturating_sub(idle_ms), what));
        }
        self.look_for_hang();
    }

    /// The job hangs if no part does anything. A part that does nothing may wait for one that works.
    fn look_for_hang(&mut self) {
        let has_stopped = |rank| self.idle.contains_key(&rank) || self.ended.contains(&rank);
        if self.is_waiting || self.stopping.is_some() || !(0..self.settings.nodes).all(has_stopped) {
            return;
        }
        // Until then the job has made progress.
        let Some((rank, (since, what))) = self.idle.iter().max_by_key(|(_, (since, _))| *since) else {
            return;
        };
        let why = format!("no node has done anything since node {rank} did: {what}");
        let end = End { hung_since_unix_ms: Some(*since), ..End::failure(why, 128 + SIGKILL) };
        self.over(*rank, end);
    }

    fn receive_snapshot(&mut self, rank: u32, envelope: Envelope) {
        let aborted = match &envelope.message {
            ckpt_cluster::Message::Abort { attempt, reason, .. } => Some((*attempt, reason.clone())),
            _ => None,
        };
        match envelope.open() {
            // The connection has authenticated the sender.
            Ok((_, message)) => self.peer.receive(self.now(), rank, message),
            Err(error) => {
                return self.end(End::failure(error.to_string(), EXIT_OWN));
            }
        }
        if let Some((attempt, reason)) = aborted {
            self.give_up(attempt, &reason);
        }
    }

    fn give_up(&self, attempt: AttemptId, why: &str) {
        if let Some(gate) = self.gate.as_ref().filter(|gate| gate.attempt() == attempt) {
            gate.close(GateEnd::Aborted(why.to_owned()));
        }
    }

    fn tell_all(&self, message: &Message) {
        if self.is_coordinator() {
            self.links.values().for_each(|link| link.send(message.clone()));
        }
    }

    /// First of all: nothing stays frozen, and no packet rule is left.
    fn close_gate(&mut self, why: &str) {
        if let Some(gate) = self.gate.take() {
            gate.close(GateEnd::Unknown(why.to_owned()));
        }
    }

    /// The job is over on all nodes.
    fn end(&mut self, end: End) {
        if self.is_over {
            return;
        }
        self.is_over = true;
        self.close_gate(&end.why);
        self.aftermath.rejoins.store(end.is_to_rejoin, Ordering::SeqCst);
        let told = Message::End(end.clone());
        self.tell_all(&told);
        self.spares.tell(&told);
        let _ = self.notices.send(Notice::End(end));
    }

    fn commit(&self, attempt: AttemptId, idle_ms: Option<u64>) {
        if let Some(gate) = self.gate.as_ref().filter(|gate| gate.attempt() == attempt) {
            gate.close(GateEnd::Committed { idle_ms });
        }
    }

    /// The part of a node has done nothing for this long.
    fn progress_of(&mut self, idle_ms: u64) {
        let at = Instant::now().checked_sub(Duration::from_millis(idle_ms));
        self.progress = self.progress.max(at);
    }

    /// Does what the state machine says.
    fn perform(&mut self) {
        loop {
            let actions = self.peer.take_actions();
            if actions.is_empty() {
                return;
            }
            for action in actions {
                if self.is_over {
                    return;
                }
                self.perform_one(action);
            }
        }
    }

    fn perform_one(&mut self, action: Action) {
        match action {
            Action::Send { to, message } => {
                if let Some(link) = self.links.get(&to) {
                    link.send(Message::Snapshot(Envelope::new(self.me.rank, message)));
                }
            }
            _ if self.is_completing => {}
            Action::Perform { attempt, order } => self.order(attempt, order),
            Action::Release => self.release(),
            Action::Kill => {
                let why = self.reason.take().unwrap_or_else(|| "the resume was given up".to_owned());
                if let Some(gate) = &self.gate {
                    gate.close(GateEnd::Aborted(why));
                }
            }
            Action::Read { from } => self.read_log(from),
            Action::Put { position, record } => self.put_record(position, record),
            Action::Event(event) => self.event(event),
        }
    }

    /// Begins a step.
    fn order(&mut self, attempt: AttemptId, order: Order) {
        let step = order.step();
        match order {
            Order::Prepare { .. } => {
                let gate = self.new_gate(attempt, step);
                if self.has_part_ended {
                    let why = "its part of the job has ended";
                    let _ = self.notices.send(Notice::NotTaken(why.to_owned()));
                    return gate.fail(why, Blame::Node);
                }
                let _ = self.notices.send(Notice::Checkpoint(gate));
            }
            Order::Load { from, .. } => {
                let gate = self.new_gate(attempt, step);
                (self.has_session, self.has_part_ended, self.is_waiting) = (true, false, false);
                // What has come of the session before, after the decision to restart the job.
                self.forget_parts();
                let from = from.map(|(part, hash)| (part.attempt, hash));
                let _ = self.notices.send(Notice::Load(Load { gate, from }));
            }
            Order::End => self.end_earlier(attempt),
            Order::Quiesce { .. }
            | Order::Freeze
            | Order::Dump
            | Order::Unblock
            | Order::Thaw
            | Order::Store
            | Order::Prove => {
                // In Prove, all nodes have agreed, and the job runs on all.
                if step != Step::Prove || !self.begins_run(attempt) {
                    self.pass_on(attempt, step);
                }
            }
        }
    }

    /// Orders a step of the attempt in progress here. If that has failed meanwhile, nobody performs it.
    fn pass_on(&mut self, attempt: AttemptId, step: Step) {
        if step == Step::Prove {
            self.aftermath.has_begun.store(true, Ordering::SeqCst);
        }
        let Some(gate) = self.gate.as_ref().filter(|gate| gate.attempt() == attempt) else { return };
        if let Some(GateEnd::Aborted(reason) | GateEnd::Unknown(reason)) = gate.order(step) {
            let outcome = Outcome::Failed { reason, blame: Blame::Node };
            self.peer.finished(self.now(), attempt, step, outcome);
        }
    }

    /// The processes of an earlier session have ended with its launcher. Waits, in a thread of its own, until the kernel has
    /// closed their connections: behind a packet rule, of any node, it could not.
    fn settle(&self, attempt: AttemptId) {
        let (ports, host) = (self.ports.clone(), self.inputs.clone());
        let settle = move || {
            let deadline = Instant::now() + NODE_CONNECTIONS_END_TIMEOUT;
            if let Err(error) = sockets::await_settled(&ports, deadline) {
                tracing::warn!("connections of an earlier session may be left: {error}");
            }
            let _ = host.send(Input::Finished { attempt, step: Step::End, outcome: Outcome::Done });
        };
        if let Err(error) = std::thread::Builder::new().name("nodes-settle".to_owned()).spawn(settle) {
            tracing::warn!("cannot start a thread: {error}");
        }
    }

    fn new_gate(&mut self, attempt: AttemptId, first: Step) -> Arc<Gate> {
        let is_to_stop = Arc::clone(&self.aftermath.is_to_stop);
        // What was said of the one before.
        self.reason = None;
        let is_durable =
            first != Step::Prepare || self.every <= 1 || std::mem::take(&mut self.is_next_durable);
        let gate = Gate::new(attempt, first, self.inputs.clone(), is_to_stop).with_durability(is_durable);
        let gate = Arc::new(gate);
        if let Some(before) = self.gate.replace(Arc::clone(&gate)) {
            before.close(GateEnd::Aborted("a newer attempt has begun".to_owned()));
        }
        gate
    }

    /// Lets the tasks run.
    fn release(&mut self) {
        let why = self.reason.take();
        let Some(gate) = &self.gate else { return };
        if gate.has_done(Step::Unblock) && gate.end().is_none() && why.is_none() {
            // The lease has ended after all have captured: the attempt goes on.
            gate.order(Step::Thaw);
        } else {
            let why = why.unwrap_or_else(|| "it was given up, or its time was over".to_owned());
            gate.close(GateEnd::Aborted(why));
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Elected { epoch } => tracing::debug!("node 0 coordinates epoch {epoch}"),
            Event::Running { .. } => {
                self.is_resuming = false;
                let _ = self.notices.send(Notice::Running);
            }
            Event::Committed { attempt } => {
                self.usable += 1;
                self.count(attempt);
                let ms = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
                let idle_ms = self.progress.map(|at| ms(at.elapsed()));
                self.tell_all(&Message::Committed { attempt, idle_ms });
                self.commit(attempt, idle_ms);
                self.stop_committed(attempt);
            }
            Event::Aborted { attempt, step, reason } => self.aborted(attempt, step, &reason),
            Event::Slow { step, ranks } => {
                let ranks: Vec<_> = ranks.iter().map(u32::to_string).collect();
                tracing::warn!(
                    "node {} is slow: it has not {}, for which the others have waited for half a minute",
                    ranks.join(", "),
                    done(step)
                );
            }
            Event::Lost { .. } if self.is_waiting => {}
            Event::Lost { ranks, .. } => {
                let ranks: Vec<_> = ranks.iter().map(u32::to_string).collect();
                let why = format!("node {} is silent, or its part of the job is lost", ranks.join(", "));
                self.end_after_loss(why);
            }
            Event::Deposed => {
                let why = "node 0: another launcher has written to the log of the job's nodes".to_owned();
                self.end(End::failure(why, EXIT_OWN));
            }
        }
    }

    fn aborted(&mut self, attempt: AttemptId, step: Step, reason: &Reason) {
        let why = reason.to_string();
        self.ranks.end();
        if self.is_waiting {
            return self.give_up(attempt, &why);
        }
        if !self.is_resuming {
            self.count_failure(reason);
            self.give_up(attempt, &why);
            // For a release that follows.
            self.reason = Some(why.clone());
            // Otherwise the attempt here reports it.
            if self.gate.as_ref().is_none_or(|gate| gate.attempt() != attempt) {
                let _ = self.notices.send(Notice::NotTaken(why.clone()));
            }
            return self.stop_aborted(attempt, &why);
        }
        let (blame, rank) = match reason {
            Reason::Failed { rank, blame, .. } => (*blame, *rank),
            Reason::Late { ranks } | Reason::Lost { ranks } => {
                (Blame::Node, ranks.first().copied().unwrap_or(0))
            }
        };
        // After that, parts run, and have to be ended first.
        if blame == Blame::Snapshot && step == Step::Load {
            self.usable = self.usable.saturating_sub(1);
            if self.usable > 0 {
                self.give_up(attempt, &why);
                return tracing::error!("{why}; an older snapshot is tried, on all nodes");
            }
        }
        let at = if step == Step::Load { "" } else { " after all parts were restored" };
        let code = if blame == Blame::Input { EXIT_BAD_INPUT } else { EXIT_OWN };
        let end = End::failure(format!("the job cannot be resumed{at}: {why}"), code);
        match reason {
            Reason::Lost { .. } => self.end_after_loss(end.why),
            _ => self.over(rank, end),
        }
    }
}

/// What a node has done after a step, for people.
fn done(step: Step) -> &'static str {
    match step {
        Step::Prepare => "prepared its snapshot",
        Step::Quiesce => "stopped its ranks",
        Step::Freeze => "blocked its connections",
        Step::Dump => "captured its part",
        Step::Unblock => "unblocked its connections",
        Step::Thaw => "let its part run",
        Step::Store => "stored its part",
        Step::Prove => "seen its connections move on",
        Step::End => "ended its earlier part",
        Step::Load => "loaded its part",
    }
}

/// The end of the job, if that has been told already. Notices before it are taken.
fn told_end(notices: &Receiver<Notice>) -> Option<End> {
    notices.try_iter().find_map(|notice| if let Notice::End(end) = notice { Some(end) } else { None })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    /// Of two nodes.
    pub(super) fn host(rank: u32) -> (Host, Receiver<Input>, Receiver<Notice>) {
        let settings = Settings {
            nodes: 2,
            parts: 2,
            beat: HOUR,
            silence: HOUR,
            stagger: HOUR,
            repeat: HOUR,
            gather: HOUR,
            lease: HOUR,
            load_lease: HOUR,
            step_limit: HOUR,
            transfer_limit: HOUR,
            tries: 1,
        };
        let ((inputs, inbox), (to_supervisor, notices)) = (unbounded(), unbounded());
        let parts = HostParts {
            me: NodeId { rank, incarnation: 1 },
            settings,
            links: BTreeMap::new(),
            log: None,
            excluded: Vec::new(),
            usable: 0,
            grace: HOUR,
            every: 1,
            ports: BTreeSet::new(),
            addresses: BTreeSet::new(),
            launchers: LauncherConnections { port: 1, coordinator: None, has_replicas: false },
            replicas: None,
            spares: Spares::default(),
            own: Join::of_machine("job", rank, 2, None),
            on_loss: OnNodeLoss::Auto,
        };
        (Host::new(parts, inputs, to_supervisor).unwrap(), inbox, notices)
    }

    fn order(host: &mut Host, attempt: AttemptId, order: Order) {
        let message = ckpt_cluster::Message::Order { to: host.me, attempt, order };
        host.receive_snapshot(0, Envelope::new(0, message));
    }

    /// Has the host do all that there is to do; returns its reports of steps.
    fn reports(host: &mut Host, inbox: &Receiver<Input>) -> Vec<Outcome> {
        let mut reports = Vec::new();
        loop {
            let actions = host.peer.take_actions();
            if !actions.is_empty() {
                for action in actions {
                    match action {
                        Action::Send { message: ckpt_cluster::Message::Report { outcome, .. }, .. } => {
                            reports.push(outcome);
                        }
                        action => host.perform_one(action),
                    }
                }
                continue;
            }
            match inbox.recv_timeout(Duration::from_millis(100)) {
                Ok(input) => host.take(input),
                Err(_) => return reports,
            }
        }
    }

    fn load() -> Order {
        Order::Load { lease: HOUR, from: None, part: 1, places: Vec::new() }
    }

    #[test]
    fn a_step_after_a_failure_is_reported_at_once() {
        let (mut host, inbox, notices) = host(1);
        let attempt = AttemptId { epoch: 1, number: 1 };
        order(&mut host, attempt, Order::End);
        assert_eq!(reports(&mut host, &inbox), [Outcome::Done]);
        order(&mut host, attempt, load());
        assert!(reports(&mut host, &inbox).is_empty());
        let Some(Notice::Load(Load { gate, .. })) = notices.try_iter().last() else { panic!("no gate") };
        gate.done(Step::Load, Outcome::Done);
        // No step is in progress that this could be the end of.
        gate.fail("the disk is full", Blame::Node);
        assert_eq!(reports(&mut host, &inbox), [Outcome::Done]);
        order(&mut host, attempt, Order::Unblock);
        let outcomes = reports(&mut host, &inbox);
        let is_failure = |outcome: &Outcome| matches!(outcome, Outcome::Failed { reason, .. } if reason == "the disk is full");
        assert!(outcomes.iter().any(is_failure), "{outcomes:?}");
    }

    /// What a part of the session before has sent before its end, after the decision to restart the job.
    #[test]
    fn the_end_of_a_part_counts_for_its_session_only() {
        let (mut host, inbox, _notices) = host(0);
        host.receive(1, Message::PartEnded(EndedPart::own(0)));
        host.receive(1, Message::PartEnded(EndedPart::own(137)));
        assert!(host.failing.is_some() && host.ended.len() == 1);
        host.order(AttemptId { epoch: 1, number: 1 }, load());
        assert!(host.failing.is_none() && host.ended.is_empty());
        drop(inbox);
    }

    fn part_ended(host: &mut Host, rank: u32, code: i32, hung_ms: Option<u64>) {
        let why = hung_ms.map(|_| "it hung".to_owned());
        host.receive(rank, Message::PartEnded(EndedPart { code, why, hung_ms }));
    }

    /// It is not awake only once it would notice something.
    #[test]
    fn a_silent_coordinator_is_noticed_in_time() {
        const SILENCE: Duration = Duration::from_secs(3);
        let (mut host, inbox, notices) = host(1);
        (host.settings.silence, host.settings.beat) = (SILENCE, SILENCE / 5);
        host.heard.insert(0, Instant::now());
        let begun = Instant::now();
        std::thread::spawn(move || host.run(&inbox));
        let end = notices.iter().find_map(|notice| match notice {
            Notice::End(end) => Some(end),
            _ => None,
        });
        assert!(end.unwrap().why.starts_with("node 0, the coordinator, is silent for "));
        assert!(begun.elapsed() >= SILENCE && begun.elapsed() < SILENCE * 19 / 10, "{:?}", begun.elapsed());
    }

    /// A part that hung was killed. That of the other node fails for lack of it, and its launcher may tell it first.
    #[test]
    fn a_hang_is_the_cause_whoever_tells_it_first() {
        for hung_first in [true, false] {
            let (mut host, _inbox, _notices) = host(0);
            let ends = [(1, 137, Some(60_000)), (0, 1, None)];
            for (rank, code, hung_ms) in if hung_first { ends } else { [ends[1], ends[0]] } {
                part_ended(&mut host, rank, code, hung_ms);
            }
            let (rank, end, _) = host.failing.unwrap();
            let ago = unix_ms(SystemTime::now()) - end.hung_since_unix_ms.unwrap();
            assert_eq!((rank, &*end.why, end.code), (1, "node 1: it hung", 137));
            assert!((60_000..120_000).contains(&ago), "{ago}");
        }
    }

    #[test]
    fn a_job_hangs_once_no_part_does_anything() {
        let idle = |idle_ms| Message::Idle { part: Some(IdlePart { what: "idle".to_owned(), idle_ms }) };
        let over = |messages: &[(u32, Message)]| {
            let (mut host, _inbox, notices) = host(0);
            messages.iter().for_each(|(rank, message)| host.receive(*rank, message.clone()));
            notices
                .try_iter()
                .find_map(|notice| if let Notice::Over(end) = notice { Some(end) } else { None })
        };
        let own = |code| Message::PartEnded(EndedPart::own(code));
        assert!(over(&[(1, idle(9000))]).is_none(), "it may wait for node 0");
        let works = Message::Idle { part: None };
        assert!(over(&[(1, idle(9000)), (1, works), (0, idle(9000))]).is_none());
        let end = over(&[(1, idle(9000)), (0, idle(5000))]).unwrap();
        assert!(end.why.starts_with("no node has done anything since node 0 did"), "{}", end.why);
        let ago = unix_ms(SystemTime::now()) - end.hung_since_unix_ms.unwrap();
        assert!((5000..9000).contains(&ago), "since the last one has worked: {ago}");
        assert!(over(&[(1, idle(9000)), (0, own(0))]).is_some(), "the other part has ended");
        assert!(over(&[(0, own(0)), (1, idle(9000))]).is_some());
    }

    /// Nothing is awaited of the nodes while the job waits for its restart.
    #[test]
    fn a_silent_node_is_lost_whatever_the_job_does() {
        const SHORT: Duration = Duration::from_secs(1);
        for is_silent in [false, true] {
            let (mut host, _inbox, notices) = host(0);
            (host.settings.silence, host.settings.beat) = (SHORT, SHORT / 10);
            host.over(1, End::failure("node 1: its part has failed".to_owned(), 1));
            let heard = Instant::now() - if is_silent { SHORT * 2 } else { SHORT / 2 };
            host.heard.insert(1, heard);
            host.watched = Instant::now();
            host.watch_times();
            let end = told_end(&notices);
            assert_eq!(end.map(|end| end.why), is_silent.then(|| "node 1 is silent for 2 s".to_owned()));
            // A launcher that was paused itself has heard nobody.
            (host.is_over, host.watched) = (false, heard);
            host.heard.insert(1, heard);
            host.watch_times();
            assert!(told_end(&notices).is_none());
        }
    }

    #[test]
    fn launchers_wait_for_a_lost_one_unless_the_job_was_to_end() {
        let rejoins = |on_loss, is_to_stop: bool, runs_on| {
            let (mut host, _inbox, notices) = host(1);
            host.on_loss = on_loss;
            if is_to_stop {
                host.receive(0, Message::Stopping);
            }
            if runs_on {
                host.receive(0, Message::RunsOn { why: "a device".to_owned() });
            }
            host.end_after_loss("node 0 is lost".to_owned());
            let end = told_end(&notices).unwrap();
            assert_eq!(
                (end.code, host.aftermath.rejoins.load(Ordering::SeqCst)),
                (EXIT_OWN, end.is_to_rejoin)
            );
            end.is_to_rejoin
        };
        assert!(rejoins(OnNodeLoss::Wait, false, false) && rejoins(OnNodeLoss::Wait, true, true));
        assert!(!rejoins(OnNodeLoss::Wait, true, false) && !rejoins(OnNodeLoss::Exit, false, false));
        assert!(!rejoins(OnNodeLoss::Auto, false, false), "node 0 would say so");
    }

    #[test]
    fn a_launcher_that_fails_ends_with_the_code_of_the_job() {
        let code = |ended: Option<End>| {
            let ((inputs, inbox), (to_supervisor, notices)) = (unbounded(), unbounded());
            let thread = std::thread::spawn(move || {
                ended.into_iter().for_each(|end| to_supervisor.send(Notice::End(end)).unwrap());
                drop(inbox);
            });
            let me = NodeId { rank: 1, incarnation: 1 };
            let welcome = Welcome {
                passed_over: None,
                log: String::new(),
                committed: Vec::new(),
                network: None,
                number: 0,
                holders: Vec::new(),
            };
            let launchers = LauncherConnections { port: 1, coordinator: None, has_replicas: false };
            let cluster = Cluster {
                me,
                nodes: 2,
                welcome,
                inputs,
                notices,
                thread,
                network: None,
                launchers,
                aftermath: Arc::default(),
                reported: Arc::default(),
            };
            cluster.fail("a disk is full".to_owned(), EXIT_OWN)
        };
        assert_eq!(code(Some(End::failure("node 0: refused".to_owned(), EXIT_BAD_INPUT))), EXIT_BAD_INPUT);
        assert_eq!(code(None), EXIT_OWN);
    }
}
