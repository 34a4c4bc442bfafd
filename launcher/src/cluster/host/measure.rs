//! What the protocol costs by itself: many launchers in one process, with real messages over loopback, and parts that are
//! captured, stored and restored in no time.

use super::{Cluster, Gate, GateEnd, Input, Load, Notice};
use crate::agents::JobLead as _;
use crate::cluster::join::{Member, join};
use crate::cluster::messages::{HeldPart, StopHow};
use crate::cluster::{ClusterKey, Coordinator};
use crate::job::journal::Journal;
use crate::sys::deadline::{NODE_BEAT_INTERVAL, NODE_REPEAT_INTERVAL, NODE_STEP_TIMEOUT};
use ckpt_cluster::{Outcome, Settings, Step};
use ckpt_cut::{FromLauncher, MemberReport, Name, NamedRank, Order, Report, Role, ToLauncher};
use ckpt_snapshot::{JobDir, JobKey, StoreRoot};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::collections::BTreeSet;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// No step takes nearly as long.
const LIMIT: Duration = Duration::from_secs(600);

/// Ranks of NCCL on each node.
const RANKS: u64 = 8;

/// What is wanted of a launcher.
enum Command {
    Request,
    Die,
    Stop,
}

/// What a launcher tells.
enum Told {
    /// All parts run; from node 0.
    Running,
    /// The snapshot of a part is committed.
    Saved(Saved),
}

/// Times of a snapshot at one node.
struct Saved {
    /// From when to when its ranks were brought to a cut.
    quiesced: (Instant, Instant),
    /// From when to when the part was held.
    held: (Instant, Instant),
}

/// A launcher without a job.
struct Simulated {
    rank: u32,
    nodes: u32,
    /// Where node 0 listens at the next start.
    port: Arc<AtomicU16>,
    job: JobDir,
    held: Option<HeldPart>,
    commands: Receiver<Command>,
    told: Sender<Told>,
}

impl Simulated {
    fn member(&self) -> Member {
        let silence = LIMIT;
        let settings = Settings {
            nodes: self.nodes,
            parts: self.nodes,
            beat: NODE_BEAT_INTERVAL,
            silence,
            stagger: LIMIT * 100,
            repeat: NODE_REPEAT_INTERVAL,
            gather: NODE_BEAT_INTERVAL,
            lease: LIMIT,
            load_lease: LIMIT,
            step_limit: NODE_STEP_TIMEOUT + LIMIT,
            transfer_limit: LIMIT,
            tries: 1,
        };
        let at = format!("127.0.0.1:{}", self.port.load(Ordering::SeqCst));
        Member {
            replicas: None,
            on_loss: crate::cluster::options::OnNodeLoss::Exit,
            is_moved: false,
            is_named: false,
            is_watched: false,
            every: 1,
            spare: self.rank,
            rejoins: false,
            has_begun: false,
            limit: None,
            rank: self.rank,
            coordinator: Coordinator::parse(&at).expect("an address"),
            key: ClusterKey([7; 32]),
            settings,
            job: self.job.clone(),
            parts: self.held.iter().cloned().collect(),
            ports: BTreeSet::new(),
            is_anew: false,
            wanted: None,
            other_node: None,
            has_to_resume: false,
            grace: LIMIT,
            network_range: None,
        }
    }

    /// Starts again and again, as an engine would start it, until it is stopped.
    fn run(mut self) {
        loop {
            let cluster = join(self.member(), &Journal::of(&self.job)).expect("joined");
            let is_stopped = self.serve(&cluster);
            cluster.finish();
            if is_stopped {
                return;
            }
        }
    }

    fn serve(&mut self, cluster: &Cluster) -> bool {
        loop {
            crossbeam_channel::select! {
                recv(cluster.notices()) -> notice => match notice.expect("an End comes before") {
                    Notice::Load(load) => resume(&load),
                    Notice::Checkpoint(gate) => self.save(cluster, &gate),
                    Notice::Running => self.told.send(Told::Running).expect("it listens"),
                    Notice::End(end) => return end.is_requested,
                    other => panic!("{other:?}"),
                },
                recv(self.commands) -> command => match command {
                    Ok(Command::Request) => cluster.request(true),
                    Ok(Command::Stop) => cluster.stop("the end".to_owned(), StopHow::Now),
                    // As if the process had died: the kernel closes its connection.
                    Ok(Command::Die) => cluster.input(Input::Lost { rank: 0, number: 0, why: String::new() }),
                    Err(_) => panic!("it is stopped before"),
                },
            }
        }
    }

    fn save(&mut self, cluster: &Cluster, gate: &Gate) {
        let hash = format!("{:064x}", self.rank);
        let Ok(saved) = capture(gate, &hash, self.rank) else { return };
        if matches!(gate.wait_end(), GateEnd::Committed { .. }) {
            let log = cluster.log().0.to_owned();
            self.held = Some(HeldPart { log, attempt: gate.attempt(), hash, is_abandoned: false });
            self.told.send(Told::Saved(saved)).expect("it listens");
        }
    }
}

fn resume(load: &Load) {
    let gate = &load.gate;
    gate.done(Step::Load, Outcome::Done);
    if gate.release().is_ok() {
        gate.done(Step::Thaw, Outcome::Done);
        gate.prove();
    }
}

fn capture(gate: &Gate, hash: &str, node: u32) -> Result<Saved, String> {
    gate.done(Step::Prepare, Outcome::Done);
    gate.wait(Step::Quiesce)?;
    let begun = Instant::now();
    reach_cut(gate, node)?;
    gate.done(Step::Quiesce, Outcome::Done);
    gate.wait(Step::Freeze)?;
    let quiesced = (begun, Instant::now());
    gate.done(Step::Freeze, Outcome::Done);
    gate.wait(Step::Dump)?;
    let frozen = Instant::now();
    gate.done(Step::Dump, Outcome::Done);
    gate.release()?;
    let held = (frozen, Instant::now());
    gate.done(Step::Thaw, Outcome::Done);
    gate.wait(Step::Store)?;
    gate.done(Step::Store, Outcome::Stored { hash: hash.to_owned() });
    gate.prove();
    Ok(Saved { quiesced, held })
}

/// Plays the ranks of a node, all with one communicator. Every second one is a step behind the others, and makes that step
/// when it is told to.
fn reach_cut(gate: &Gate, node: u32) -> Result<(), String> {
    let (sender, messages) = unbounded();
    gate.listen(Arc::new(move |message| drop(sender.send(message))));
    let name = |connection| NamedRank { connection, name: String::new() };
    gate.tell(FromLauncher::Begin { ranks: Some((0..RANKS).map(name).collect()) });
    let report = |connection: u64, attempt, version, sequence| {
        let index = node * RANKS as u32 + connection as u32;
        let member = ckpt_cut::Member { communicator: Name(1 << 96), index };
        let role = Role::Communicator { awaits: None, alias: None };
        let members = vec![MemberReport { member, role, sequence, call: "ncclAllReduce".to_owned() }];
        let report = Report { attempt, version, in_call: 0, members, parked: Vec::new() };
        gate.tell(FromLauncher::Report { connection, report });
    };
    loop {
        match messages.recv_timeout(LIMIT).map_err(|error| error.to_string())? {
            ToLauncher::Order { connection, order: Order::Count { attempt } } => {
                report(connection, attempt, 0, 5 + connection % 2);
            }
            ToLauncher::Order { connection, order: Order::Reach { attempt, version, targets, .. } } => {
                report(connection, attempt, version, targets[0].1);
            }
            ToLauncher::Close { round } => gate.tell(FromLauncher::Closed { round }),
            ToLauncher::Reached { .. } => return Ok(()),
            ToLauncher::Failed { why } => return Err(why),
            ToLauncher::Order { order: Order::Release, .. } | ToLauncher::Open => {}
        }
    }
}

/// Seconds.
#[derive(Debug, serde::Serialize)]
struct Costs {
    nodes: u32,
    /// From the start of all launchers to the moment when all parts run.
    start_s: f64,
    /// From the moment when the first node is told to bring its ranks to a cut to that when all ranks of all nodes are there.
    quiesce_s: f64,
    /// From the moment when the first part is frozen to that when the last one is released.
    cut_overhead_s: f64,
    /// From the request to the commit, as all nodes know it.
    snapshot_s: f64,
    /// From the death of a launcher, through the end of all, to the moment when all parts run again.
    recovery_s: f64,
}

/// Many launchers.
struct Launchers {
    commands: Vec<Sender<Command>>,
    threads: Vec<JoinHandle<()>>,
    told: Receiver<Told>,
    port: Arc<AtomicU16>,
    _store: tempfile::TempDir,
}

impl Launchers {
    fn start(nodes: u32) -> Self {
        let (port, store) = (Arc::new(AtomicU16::new(0)), tempfile::tempdir().expect("a directory"));
        let root = StoreRoot::open_or_create(store.path()).expect("a store");
        let job = root.job(&JobKey::named("job").expect("a name"));
        let (teller, told) = unbounded();
        let (mut commands, mut threads) = (Vec::new(), Vec::new());
        next_port(&port);
        for rank in 0..nodes {
            let (sender, receiver) = unbounded();
            let (port, job, told) = (Arc::clone(&port), job.clone(), teller.clone());
            let one = Simulated { rank, nodes, port, job, held: None, commands: receiver, told };
            let thread = std::thread::Builder::new().stack_size(256 << 10).spawn(move || one.run());
            threads.push(thread.expect("a thread"));
            commands.push(sender);
        }
        Self { commands, threads, told, port, _store: store }
    }

    fn until_running(&self) {
        while !matches!(self.told.recv_timeout(LIMIT).expect("it runs"), Told::Running) {}
    }

    fn tell(&self, rank: usize, command: Command) {
        self.commands[rank].send(command).expect("it listens");
    }

    /// How long the ranks took to their cut, how long the parts were held, and the whole snapshot.
    fn snapshot(&self) -> [Duration; 3] {
        let begun = Instant::now();
        self.tell(0, Command::Request);
        let saved = |_| match self.told.recv_timeout(LIMIT).expect("a snapshot") {
            Told::Saved(saved) => saved,
            Told::Running => panic!("nothing has failed"),
        };
        let saved: Vec<_> = (0..self.threads.len()).map(saved).collect();
        let length = |of: fn(&Saved) -> (Instant, Instant)| {
            let (begun, ended): (Vec<_>, Vec<_>) = saved.iter().map(of).unzip();
            ended.into_iter().max().expect("a node") - begun.into_iter().min().expect("a node")
        };
        [length(|saved| saved.quiesced), length(|saved| saved.held), begun.elapsed()]
    }

    fn recovery(&self) -> Duration {
        next_port(&self.port);
        let begun = Instant::now();
        self.tell(self.threads.len() - 1, Command::Die);
        self.until_running();
        begun.elapsed()
    }

    fn stop(self) {
        self.tell(0, Command::Stop);
        self.threads.into_iter().for_each(|thread| thread.join().expect("it has ended"));
    }
}

/// Listeners of earlier starts stay, since they end with their process.
fn next_port(port: &AtomicU16) {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    port.store(free.expect("a port").port(), Ordering::SeqCst);
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}

fn costs(nodes: u32, rounds: usize) -> Costs {
    let begun = Instant::now();
    let launchers = Launchers::start(nodes);
    launchers.until_running();
    let start_s = begun.elapsed().as_secs_f64();
    let times: Vec<_> = (0..rounds).map(|_| launchers.snapshot()).collect();
    let [quiesce_s, cut_overhead_s, snapshot_s] =
        [0, 1, 2].map(|which| median(times.iter().map(|times| times[which]).collect()));
    let recoveries = (0..rounds).map(|_| launchers.recovery()).collect();
    launchers.stop();
    Costs { nodes, start_s, quiesce_s, cut_overhead_s, snapshot_s, recovery_s: median(recoveries) }
}

#[test]
fn simulated_launchers_take_snapshots_and_recover() {
    let costs = costs(3, 1);
    assert!(costs.quiesce_s + costs.cut_overhead_s <= costs.snapshot_s, "{costs:?}");
}

#[test]
#[ignore = "a measurement: `cargo xtask bench cluster`"]
fn costs_by_number_of_nodes() {
    let setting = |name, default: &str| std::env::var(name).unwrap_or_else(|_| default.to_owned());
    let rounds = setting("CKPT_BENCH_ROUNDS", "5").parse().expect("a number");
    for nodes in setting("CKPT_BENCH_NODES", "4,64").split(',') {
        let costs = costs(nodes.parse().expect("a number"), rounds);
        println!("\n{}", serde_json::to_string(&costs).expect("JSON"));
    }
}
