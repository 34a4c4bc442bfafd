//! The beginning: node 0 listens, the others connect, and nothing is begun before all are there.

use super::NODE;
use super::connection::{self, ClusterKey, ConnectionError, Receiver, Sender, Side};
use super::diag;
use super::host::{Cluster, HostParts, Input};
use super::job_network::{self, JobNetwork};
use super::links::{self, Joining, Link};
use super::messages::{End, HeldPart, Join, Message, Welcome};
use super::options::{Coordinator, OnNodeLoss};
use super::rejoin::Rejoin;
use super::replicas::{self, Replicas};
use super::sockets::LauncherConnections;
use super::spares::{self, Spares};
use super::stored_log::StoredLog;
use crate::job::journal::{Entry, EventKind, Journal};
use crate::sys::deadline::{
    NODE_BEAT_INTERVAL, NODE_CONNECTION_TIMEOUT, NODE_FIRST_RETRY_INTERVAL, NODE_RETRY_INTERVAL,
    NODE_SEARCH_TIMEOUT, NODE_WAIT_RECORD, NODE_WAIT_REPORT, SPARE_REJOIN_PATIENCE, SPARE_SLOW_PATIENCE,
    SPARE_START_PATIENCE,
};
use crate::sys::error::{BadInput, EXIT_BAD_INPUT, EXIT_OWN, bad_input};
use crate::sys::host;
use anyhow::{Context, Result, anyhow, bail};
use ckpt_cluster::{AttemptId, NodeId, PartRecord, Settings};
use ckpt_snapshot::JobDir;
use crossbeam_channel::unbounded;
use ipnet::Ipv4Net;
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// A node that is about to join.
pub struct Member {
    /// Its rank.
    pub rank: u32,
    /// Where node 0 listens.
    pub coordinator: Coordinator,
    /// The key that all nodes share.
    pub key: ClusterKey,
    /// Numbers and times; only those of node 0 count.
    pub settings: Settings,
    /// The job in the store.
    pub job: JobDir,
    /// The parts in the store.
    pub parts: Vec<HeldPart>,
    /// Another node of the job of which the store has parts, if it has none of this node.
    pub other_node: Option<u32>,
    /// Local ports of their connections.
    pub ports: BTreeSet<u16>,
    /// Whether the job starts from the beginning (`--resume never`).
    pub is_anew: bool,
    /// Whether it must not (`--resume required`).
    pub has_to_resume: bool,
    /// The snapshot that is to be resumed (`--resume ID`).
    pub wanted: Option<Wanted>,
    /// Time for the last snapshot of a job that is stopped.
    pub grace: Duration,
    /// With `--network job`: the addresses from which those of the job are chosen.
    pub network_range: Option<Ipv4Net>,
    /// What the launchers do that are left when one is lost.
    pub on_loss: OnNodeLoss,
    /// Whether it was started as another node, or as a spare.
    pub is_moved: bool,
    /// Whether the job's name was given (`--job`).
    pub is_named: bool,
    /// Whether a watchdog looks at the part (`--hang-timeout`).
    pub is_watched: bool,
    /// Every so many snapshots, one goes to the store, and the others only to memory (`--persist-every`).
    pub every: u64,
    /// With `--replicas`.
    pub replicas: Option<Arc<Replicas>>,
    /// Its number as a spare.
    pub spare: u32,
    /// Whether this launcher was there before another one was lost.
    pub rejoins: bool,
    /// Whether the run had begun then.
    pub has_begun: bool,
    /// How long it waits for the others then; `None` if there is no limit.
    pub limit: Option<Duration>,
}

/// See [`Member::wanted`].
pub struct Wanted {
    /// As it was named.
    pub text: String,
    /// The part in the store, or why there is none. That of node 0 says which snapshot it is.
    pub part: Result<HeldPart, String>,
}

/// Says for whom a launcher waits. Nodes may come and go for days: not each change is recorded.
struct Waits<'a> {
    journal: &'a Journal,
    said: String,
    recorded: Option<Instant>,
}

impl<'a> Waits<'a> {
    fn new(journal: &'a Journal) -> Self {
        Self { journal, said: String::new(), recorded: None }
    }

    fn say(&mut self, what: String) {
        if what == self.said {
            return;
        }
        if self.recorded.is_none_or(|then| then.elapsed() >= NODE_WAIT_RECORD) {
            self.recorded = Some(Instant::now());
            self.journal.waiting(&what[..]);
        } else {
            tracing::info!("{what}");
        }
        self.said = what;
    }
}

/// Waits until all nodes are there, and starts the thread that talks to them.
///
/// # Errors
/// Bad input: another key, another version, other options at another node. Or the network or the store fails.
pub fn join(member: Member, journal: &Journal) -> Result<Cluster> {
    let waits = Waits::new(journal);
    if member.rank == 0 { gather(member, waits) } else { connect(member, waits) }
}

impl Member {
    fn join(&self) -> Join {
        Join {
            is_anew: self.is_anew,
            wanted: self.wanted.as_ref().map(|wanted| wanted.text.clone()),
            parts: newest(&self.parts).to_vec(),
            other_node: self.other_node,
            is_moved: self.is_moved,
            rejoins: self.rejoins && self.has_begun,
            is_named: self.is_named,
            is_watched: self.is_watched,
            has_memory: self.every > 1,
            has_replicas: self.replicas.is_some(),
            holding: self.replicas.as_ref().map(|replicas| replicas.holding()),
            ..Join::of_machine(name_of(&self.job), self.rank, self.settings.nodes, self.network_range)
        }
    }
}

impl Member {
    /// All nodes have joined. Connects with the replicas, and says which connections launchers have.
    fn launchers(&self, welcome: &Welcome, coordinator: Option<IpAddr>) -> LauncherConnections {
        let nodes = self.settings.nodes;
        self.replicas.iter().for_each(|replicas| replicas.connect(welcome, (self.rank, nodes), coordinator));
        let has_replicas = self.replicas.is_some();
        LauncherConnections { port: self.coordinator.port, coordinator, has_replicas }
    }

    /// Local ports of connections in the parts of this node, and in their replicas.
    fn ports(&self, welcome: &Welcome) -> BTreeSet<u16> {
        &self.ports | &Replicas::ports(welcome, self.rank)
    }
}

/// The most parts of which a node tells: its first message must not be longer than [`connection::MOST_BYTES_AT_FIRST`].
const MOST_PARTS: usize = 3000;

/// The newest of these parts, oldest first, of which a node tells. The others count as missing.
#[must_use]
pub fn newest<T>(parts: &[T]) -> &[T] {
    &parts[parts.len().saturating_sub(MOST_PARTS)..]
}

impl Join {
    /// What is known without a store.
    #[must_use]
    pub fn of_machine(job: &str, rank: u32, nodes: u32, network_range: Option<Ipv4Net>) -> Self {
        Self {
            job: job.to_owned(),
            is_named: false,
            is_watched: false,
            has_memory: false,
            has_replicas: false,
            holding: None,
            rank,
            nodes,
            incarnation: incarnation(),
            ckpt_run: env!("CARGO_PKG_VERSION").to_owned(),
            hostname: host::facts().hostname,
            engine_name: std::env::var("SLURMD_NODENAME").ok(),
            addresses: diag::addresses().unwrap_or_default(),
            network_range,
            is_anew: false,
            wanted: None,
            parts: Vec::new(),
            other_node: None,
            is_moved: false,
            rejoins: false,
        }
    }
}

fn addresses(host: &str, port: u16) -> std::io::Result<Vec<SocketAddr>> {
    Ok((host, port).to_socket_addrs()?.collect())
}

/// The name of the job of which this is a part.
fn name_of(part: &JobDir) -> &str {
    let key = part.key().as_str();
    key.rsplit_once(NODE).map_or(key, |(job, _)| job)
}

/// Where node 0 can listen on its machine; of other machines' addresses the kernel says that they are not its own.
///
/// # Errors
/// When no name has an address.
pub(super) fn own_addresses(at: &Coordinator) -> std::io::Result<Vec<SocketAddr>> {
    let (mut found, mut failure) = (Vec::new(), None);
    for host in &at.hosts {
        match addresses(host, at.port) {
            Ok(addresses) => found.extend(listened(host, addresses)),
            Err(error) => failure = Some(error),
        }
    }
    match failure {
        Some(error) if found.is_empty() => Err(error),
        _ => Ok(found),
    }
}

/// Greater for each later start on this machine, as far as its clock is right.
pub(super) fn incarnation() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Node 0.
fn gather(member: Member, waits: Waits<'_>) -> Result<Cluster> {
    let journal = waits.journal;
    let (inputs, inbox) = unbounded();
    let at = &member.coordinator;
    let addresses = own_addresses(at).with_context(|| format!("cannot resolve the coordinator {at}"))?;
    links::listen(&addresses, member.settings.nodes, &member.key, &inputs)
        .map_err(|error| cannot_listen(at, error))?;
    let own = member.join();
    let patience = spare_patience(&member);
    let has_joined = give_way(&member)?;
    let awaited = await_all(&own, at, (&inputs, &inbox), waits, (patience, member.limit));
    has_joined.store(true, Ordering::SeqCst);
    let (joined, spares) = awaited?;
    let (Chosen { welcome, excluded, usable }, log) = match open_log(&member, &own, &joined) {
        Ok(opened) => opened,
        Err(error) => {
            let why = format!("{error:#}");
            // A store that fails may not fail again; what is damaged stays so.
            let damaged = |cause: &std::io::Error| cause.kind() == ErrorKind::InvalidData;
            let is_damaged = error.chain().filter_map(|cause| cause.downcast_ref()).any(damaged);
            let is_transient = !is_damaged && !error.is::<BadInput>();
            let end = Message::End(End::failure(why.clone(), exit_code_of(&error)));
            dismiss((joined, spares), &Message::Refused { why, is_transient }, &end);
            return Err(error);
        }
    };
    let of_machines = std::iter::once(&own).chain(joined.values().map(|one| &one.join));
    let mut addresses: BTreeSet<_> = of_machines.flat_map(|join| join.addresses.iter().copied()).collect();
    if let Some(plan) = &welcome.network {
        addresses.extend(JobNetwork::addresses(plan, member.settings.nodes));
    }
    let local = joined.values().next().map(|one| one.machines.1);
    let launchers = member.launchers(&welcome, None);
    let links: BTreeMap<_, _> = joined.into_iter().map(|(rank, one)| (rank, one.link)).collect();
    links.values().for_each(|link| link.send(Message::Welcome(welcome.clone())));
    tell_passed_over(&welcome, journal);
    let me = NodeId { rank: 0, incarnation: own.incarnation };
    let parts = HostParts {
        me,
        settings: member.settings,
        links,
        log: Some(log),
        excluded,
        usable,
        grace: member.grace,
        every: member.every,
        ports: member.ports(&welcome),
        addresses,
        launchers,
        replicas: member.replicas.clone(),
        spares,
        own: own.clone(),
        on_loss: member.on_loss,
    };
    let cluster = Cluster::start(parts, welcome, (inputs, inbox))?;
    cluster.with_network(!member.rejoins, |welcome, is_over| {
        job_network((&member.coordinator, &own), welcome, local, is_over)
    })
}

/// Looks for another node 0 until all have joined, which the flag says.
fn give_way(member: &Member) -> Result<Arc<AtomicBool>> {
    let (at, has_joined) = (&member.coordinator, Arc::new(AtomicBool::new(false)));
    if at.may_move() {
        let job = name_of(&member.job);
        let join = Join {
            rejoins: member.has_begun,
            is_watched: member.is_watched,
            has_memory: member.every > 1,
            has_replicas: member.replicas.is_some(),
            ..Join::of_machine(job, member.spare, member.settings.nodes, member.network_range)
        };
        spares::give_way(at.clone(), member.key.clone(), join, Arc::clone(&has_joined))
            .context("cannot start a thread")?;
    }
    Ok(has_joined)
}

fn exit_code_of(error: &anyhow::Error) -> i32 {
    if error.is::<BadInput>() { EXIT_BAD_INPUT } else { EXIT_OWN }
}

/// Whether the job of node 0 has snapshots to resume.
///
/// # Errors
/// When the store cannot be read.
pub fn has_snapshots(job: &JobDir) -> std::io::Result<bool> {
    let newest = StoredLog::newest(job)?;
    Ok(newest.is_some_and(|log| log.content().snapshots().next().is_some() && !log.is_complete()))
}

/// How long a node may be missing when all others are there, before a spare takes its place; `None` if none can, since there is
/// nothing to resume: a part that begins needs its own command.
fn spare_patience(member: &Member) -> Option<Duration> {
    // Without it there are no spares, and the log need not be read here.
    member.network_range?;
    let patience = if member.rejoins { SPARE_REJOIN_PATIENCE } else { SPARE_START_PATIENCE };
    // An error is reported when all are there.
    let has_snapshots = || has_snapshots(&member.job).unwrap_or(true);
    (!member.is_anew && (member.wanted.is_some() || has_snapshots())).then_some(patience)
}

/// The log, and what it says to the nodes that have joined.
fn open_log(member: &Member, own: &Join, joined: &BTreeMap<u32, Joined>) -> Result<(Chosen, StoredLog)> {
    let job = &member.job;
    // The other nodes have begun the run that `--resume` asks node 0 to begin.
    let begins = match member.rejoins {
        true => !member.has_begun,
        false => !joined.values().any(|one| one.join.rejoins),
    };
    let wanted = member.wanted.as_ref().filter(|_| begins);
    let newest = if wanted.is_some() { StoredLog::newest(job).transpose() } else { None };
    let log = match newest {
        Some(newest) => newest.map(StoredLog::reopened),
        None => StoredLog::open(job, member.is_anew && begins),
    };
    let log = log.context("the log of the job's nodes cannot be opened")?;
    Ok((welcome((member, wanted), &log, own, joined)?, log))
}

/// Waits until all other nodes have joined, or spares in their places. Also returns the spares that are left.
fn await_all(
    own: &Join,
    at: &Coordinator,
    (inputs, inbox): (&crossbeam_channel::Sender<Input>, &crossbeam_channel::Receiver<Input>),
    mut waits: Waits<'_>,
    (patience, limit): (Option<Duration>, Option<Duration>),
) -> Result<(BTreeMap<u32, Joined>, Spares)> {
    let (mut joined, mut spares) = (BTreeMap::new(), Spares::default());
    let (mut number, mut report) = (0, Instant::now() + NODE_WAIT_REPORT);
    // When a node has come or gone.
    let mut changed = Instant::now();
    let end = limit.map(|limit| changed + limit);
    while joined.len() + 1 < own.nodes as usize {
        if end.is_some_and(|end| end <= Instant::now()) {
            return give_up(own.nodes, (joined, spares), at);
        }
        // Nodes that are left may need some time to end their parts. They are not to lose their places.
        let is_last = joined.len() + 2 == own.nodes as usize;
        let slow = |patience: Duration| if is_last { patience } else { SPARE_SLOW_PATIENCE.max(patience) };
        let patience = patience.map(slow);
        let given_at = patience.filter(|_| spares.number() > 0).map(|patience| changed + patience);
        spares.show(false);
        let next = given_at.map_or(report, |given_at| given_at.min(report));
        match inbox.recv_deadline(next.min(Instant::now() + NODE_BEAT_INTERVAL)).ok() {
            Some(Input::Joining(joining)) => {
                number += 1;
                let join = &joining.join;
                match mismatch(own, join).or_else(|| other_resume(own, join)) {
                    Some(why) => refuse(*joining, why),
                    None if is_spare(own, join, &joined, patience.is_some()) => {
                        spares.add(*joining, (number, false), inputs);
                    }
                    None if admit(*joining, number, &mut joined, inputs) => changed = Instant::now(),
                    None => {}
                }
            }
            Some(Input::Lost { rank, number, .. }) => {
                if !spares.lost(rank, number) {
                    joined.retain(|known, one: &mut Joined| *known != rank || one.link.number != number);
                    changed = Instant::now();
                }
            }
            Some(_) => {}
            None if given_at.is_some_and(|given_at| given_at <= Instant::now()) => {
                spares.give((1..own.nodes).filter(|rank| !joined.contains_key(rank)), own.rejoins);
                changed = Instant::now();
            }
            None if report > Instant::now() => {}
            None => {
                waits.say(missing(own.nodes, &joined, at));
                report = Instant::now() + NODE_WAIT_REPORT;
            }
        }
    }
    Ok((joined, spares))
}

/// No spare takes the place of a node that is lost: the launchers end, and the scheduler starts them again.
fn give_up<T>(nodes: u32, (joined, spares): (BTreeMap<u32, Joined>, Spares), at: &Coordinator) -> Result<T> {
    let why =
        format!("no spare has taken the place of a node that was lost: {}", missing(nodes, &joined, at));
    let end = Message::End(End::failure(why.clone(), EXIT_OWN));
    dismiss((joined, spares), &end, &end);
    bail!(why)
}

/// Tells the nodes that have joined, and the spares, why nothing begins, and closes the connections.
fn dismiss((joined, spares): (BTreeMap<u32, Joined>, Spares), to_nodes: &Message, to_spares: &Message) {
    for Joined { link, .. } in joined.into_values() {
        link.send(to_nodes.clone());
        link.finish();
    }
    spares.tell(to_spares);
    spares.finish();
}

/// A node that has joined.
struct Joined {
    join: Join,
    link: Link,
    /// See [`Joining`].
    machines: (IpAddr, IpAddr),
}

/// Where node 0 listens. Distributions give a machine's own name an address of the loopback interface in its /etc/hosts, at
/// which no other machine reaches it.
fn listened(host: &str, addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let is_name = host.parse::<IpAddr>().is_err() && host != "localhost";
    if !is_name || !addresses.iter().all(|address| address.ip().is_loopback()) {
        return addresses;
    }
    let any = |address: SocketAddr| {
        let any = if address.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0; 16]) };
        SocketAddr::new(any, address.port())
    };
    addresses.into_iter().map(any).collect()
}

/// Why node 0 cannot listen, and what to do about it.
fn cannot_listen(at: &Coordinator, error: std::io::Error) -> anyhow::Error {
    match error.kind() {
        ErrorKind::AddrNotAvailable => {
            let why = anyhow!(
                "node 0 cannot listen at {at}, which is no address of this machine: give the address of node 0 as --coordinator"
            );
            // A name may lead to this machine a little later.
            let is_address = |host: &String| host.parse::<IpAddr>().is_ok();
            if at.hosts.iter().all(is_address) { bad_input(why) } else { why }
        }
        // The launcher before it may be about to end.
        ErrorKind::AddrInUse => anyhow!(
            "node 0 cannot listen at {at}, since another program does: end it, or give another port in --coordinator on all nodes"
        ),
        _ => anyhow::Error::new(error).context(format!("node 0 cannot listen at {at}")),
    }
}

/// What all nodes are told, which snapshots cannot be resumed, and the number of those that can be.
#[derive(Debug)]
struct Chosen {
    welcome: Welcome,
    excluded: Vec<AttemptId>,
    usable: usize,
}

fn welcome(
    (member, wanted): (&Member, Option<&Wanted>),
    log: &StoredLog,
    own: &Join,
    joined: &BTreeMap<u32, Joined>,
) -> Result<Chosen> {
    let all: Vec<_> = std::iter::once(own).chain(joined.values().map(|one| &one.join)).collect();
    let all = replicas::with_held(&all);
    let all: Vec<_> = all.iter().collect();
    let mut chosen = match wanted {
        Some(Wanted { part: Err(why), .. }) => bail!(bad_input(anyhow!("{why}"))),
        Some(Wanted { text, part: Ok(part) }) => only(log, &all, (text, part))?,
        None => to_resume(log, &all, member.has_to_resume)?,
    };
    chosen.welcome.number = own.incarnation;
    let addresses = joined.iter().map(|(rank, one)| (*rank, one.machines.0)).collect();
    chosen.welcome.holders = replicas::places(&all, &addresses);
    if let Some(range) = member.network_range {
        let machines = joined.values().map(|one| (&one.join, one.machines.0));
        // The address of the first one is not used.
        let nodes: Vec<_> = std::iter::once((own, IpAddr::from([0; 4]))).chain(machines).collect();
        let plan = job_network::plan(range, log.name(), &member.coordinator, &nodes)?;
        chosen.welcome.network = Some(plan);
    }
    Ok(chosen)
}

/// Another node cannot be reached in the network of the job.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Unreachable(String);

/// The network of the job at this node, if it has one; `local` is the address of this machine.
fn job_network(
    (coordinator, join): (&Coordinator, &Join),
    welcome: &Welcome,
    local: Option<IpAddr>,
    is_over: &(dyn Fn() -> bool + Sync),
) -> Result<Option<JobNetwork>> {
    let (Some(plan), Some(local)) = (&welcome.network, local) else { return Ok(None) };
    let port = coordinator.port;
    let network = JobNetwork::make(plan, &welcome.log, join.rank, (local, port), &join.hostname)?;
    let is_reached = network.check(port, is_over);
    is_reached.map_err(|error| Unreachable(format!("{error:#}")))?;
    Ok(Some(network))
}

/// For whom node 0 waits.
fn missing(nodes: u32, joined: &BTreeMap<u32, Joined>, at: &Coordinator) -> String {
    let missing = (1..nodes).filter(|rank| !joined.contains_key(rank));
    let missing: Vec<_> = missing.map(|rank| rank.to_string()).collect();
    format!("waiting for the launchers of node {} at {at}", missing.join(", "))
}

/// Whether a launcher that joins is a spare, or becomes one: another launcher has its rank, and any machine can take any node.
fn is_spare(own: &Join, join: &Join, joined: &BTreeMap<u32, Joined>, may_take_places: bool) -> bool {
    let may_be_spare = own.network_range.is_some() && may_take_places;
    let is_taken = |one: &Joined| may_be_spare && one.join.incarnation > join.incarnation;
    join.rank >= own.nodes || joined.get(&join.rank).is_some_and(is_taken)
}

/// Refuses a node, or a spare.
pub(super) fn refuse(joining: Joining, why: String) {
    let Joining { join, connection: (mut sender, _), .. } = joining;
    tracing::error!("node {} on {} is refused: {why}", join.rank, join.hostname);
    let _ = sender.send(&Message::Refused { why, is_transient: false });
    sender.close();
}

/// Takes a node in, unless another launcher has its rank. Whether it was taken in.
fn admit(
    joining: Joining,
    number: u64,
    joined: &mut BTreeMap<u32, Joined>,
    inputs: &crossbeam_channel::Sender<Input>,
) -> bool {
    let Joining { join, connection: (mut sender, receiver), machines } = joining;
    let rank = join.rank;
    if joined.get(&rank).is_some_and(|known| known.join.incarnation >= join.incarnation) {
        let why = format!("another launcher has node rank {rank}");
        tracing::warn!("a launcher on {} is refused: {why}", join.hostname);
        let _ = sender.send(&Message::Refused { why, is_transient: true });
        sender.close();
        return false;
    }
    tracing::debug!("node {rank} on {} has joined", join.hostname);
    match Link::start(rank, number, (sender, receiver), inputs) {
        Ok(link) => {
            link.send(Message::Joined);
            joined.insert(rank, Joined { join, link, machines });
        }
        Err(error) => {
            tracing::warn!("node {rank} cannot be served: {error}");
            return false;
        }
    }
    true
}

/// Why a node, or a spare, cannot join.
pub(super) fn mismatch(own: &Join, join: &Join) -> Option<String> {
    if join.nodes != own.nodes {
        return Some(format!("it was told --nodes {} and node 0 --nodes {}", join.nodes, own.nodes));
    }
    if join.rank == 0 {
        return Some("another launcher is node 0".to_owned());
    }
    if join.ckpt_run != own.ckpt_run {
        return Some(format!("it is ckpt-run {} and node 0 ckpt-run {}", join.ckpt_run, own.ckpt_run));
    }
    let is_named = join.is_named && own.is_named;
    if (join.rank >= own.nodes || is_named) && join.job != own.job {
        return Some(format!(
            "it would have the job {} and node 0 has {}: start all nodes and spares with the same --job",
            join.job, own.job
        ));
    }
    if join.network_range != own.network_range {
        return Some("--network or --network-range differs from that of node 0".to_owned());
    }
    if join.has_memory != own.has_memory {
        return Some("--persist-every has to be given on all nodes, or on none".to_owned());
    }
    if join.has_replicas != own.has_replicas {
        return Some("--replicas has to be given on all nodes, or on none".to_owned());
    }
    if join.is_watched != own.is_watched {
        let (with, without) = if own.is_watched { ("node 0", "it") } else { ("it", "node 0") };
        return Some(format!(
            "{with} has --hang-timeout and {without} has not: a hang shows only where all nodes look for it. Give it on all nodes, or on none"
        ));
    }
    None
}

/// Why a node that was told to begin elsewhere than node 0 cannot join. Spares, and launchers that start again, begin nowhere.
fn other_resume(own: &Join, join: &Join) -> Option<String> {
    let counts = join.rank < own.nodes && ![own, join].iter().any(|join| join.is_moved || join.rejoins);
    let differs = join.is_anew != own.is_anew || join.wanted != own.wanted;
    (counts && differs).then(|| "--resume differs from that of node 0".to_owned())
}

/// See [`choose`]. With `--resume required`, no snapshot is an error.
fn to_resume(log: &StoredLog, all: &[&Join], is_required: bool) -> Result<Chosen> {
    let chosen = choose(log, all)?;
    // Its log is in another store: the job would begin again.
    if let Some(Join { rank: 0, other_node: Some(other), is_anew: false, .. }) = all.first().copied() {
        bail!(bad_input(anyhow!(
            "the store of node 0 has snapshots of node {other} of this job, and none of node 0: give each node the number and the store that it had, or start from the beginning with --resume never on all nodes"
        )));
    }
    if let (0, Some(join)) = (chosen.usable, all.iter().find(|join| join.is_moved)) {
        bail!(bad_input(anyhow!(
            "a launcher on {} that was started as another node, or as a spare, is in the place of node {}, and the job has no snapshot of all nodes to resume: start all nodes again, since each has to begin with its own command",
            join.hostname,
            join.rank
        )));
    }
    if is_required && chosen.usable == 0 {
        bail!(bad_input(anyhow!("there is nothing to resume: the job has no snapshot of all nodes")));
    }
    Ok(chosen)
}

/// The same with one snapshot only (`--resume ID`), of which node 0 has this part.
fn only(log: &StoredLog, all: &[&Join], (text, part): (&str, &HeldPart)) -> Result<Chosen> {
    let content = log.content();
    if part.log != log.name() && content.end() == 0 {
        bail!(bad_input(anyhow!(
            "the store of node 0 has no log of the run of the snapshot {text}: give node 0 the store that it had"
        )));
    }
    if part.log != log.name() {
        bail!(bad_input(anyhow!(
            "the snapshot {text} is of an earlier run of the job; only those of its newest run can be resumed on several nodes"
        )));
    }
    let all_snapshots = || content.snapshots().map(|(attempt, _)| attempt);
    let Some((_, parts)) = content.snapshots().find(|(attempt, _)| *attempt == part.attempt) else {
        bail!(bad_input(anyhow!(
            "the snapshot {text} is not one of all nodes: there is no global manifest of it"
        )));
    };
    let lacking = lacking(log, all, part.attempt, parts);
    if !lacking.is_empty() {
        bail!(bad_input(anyhow!(
            "the snapshot {text} is not complete: it lacks the part of node {}",
            lacking.join(", ")
        )));
    }
    let excluded = all_snapshots().filter(|attempt| *attempt != part.attempt).collect();
    Ok(Chosen { welcome: told(log, all, all_snapshots().collect()), excluded, usable: 1 })
}

/// What all nodes are told of these snapshots, which have global manifests. A long run has more than a message holds: those
/// whose parts are gone concern nobody.
fn told(log: &StoredLog, all: &[&Join], mut committed: Vec<AttemptId>) -> Welcome {
    let held: BTreeSet<_> = all.iter().flat_map(|join| join.parts.iter().map(|part| part.attempt)).collect();
    committed.retain(|attempt| held.contains(attempt));
    let (log, holders) = (log.name().to_owned(), Vec::new());
    Welcome { passed_over: None, log, committed, network: None, number: 0, holders }
}

/// The nodes that lack their part of a snapshot with these parts.
fn lacking(log: &StoredLog, all: &[&Join], attempt: AttemptId, parts: &[PartRecord]) -> Vec<String> {
    let has = |join: &Join| {
        let hash = parts.get(join.rank as usize).map(|part| &part.hash);
        let is_it =
            |part: &HeldPart| part.log == log.name() && part.attempt == attempt && Some(&part.hash) == hash;
        join.parts.iter().any(is_it)
    };
    let mut lacking: Vec<_> =
        all.iter().filter(|join| !has(join)).map(|join| join.rank.to_string()).collect();
    // Of more nodes than there are.
    lacking.extend((all.len()..parts.len()).map(|rank| rank.to_string()));
    lacking
}

/// What the nodes have to know of the log, and which of its snapshots cannot be resumed: nodes lack their parts, or have been
/// resumed from an older one.
fn choose(log: &StoredLog, all: &[&Join]) -> Result<Chosen> {
    let of_log = |part: &&HeldPart| part.log == log.name() && part.is_abandoned;
    let abandoned: BTreeSet<_> =
        all.iter().flat_map(|join| &join.parts).filter(of_log).map(|part| part.attempt).collect();
    let (mut committed, mut excluded, mut newest_lacks) = (Vec::new(), Vec::new(), None);
    let (mut passed_over, mut newest_is_gone, mut has_whole) = (None, None, false);
    for (attempt, parts) in log.content().snapshots() {
        committed.push(attempt);
        let lacking = lacking(log, all, attempt, parts);
        if !lacking.is_empty() || abandoned.contains(&attempt) {
            excluded.push(attempt);
        }
        if lacking.is_empty() {
            has_whole = true;
            continue;
        }
        let is_surprise = lacking.len() < all.len() && !abandoned.contains(&attempt);
        let nodes = lacking.join(", ");
        if is_surprise && excluded.len() == committed.len() {
            passed_over.get_or_insert(format!(
                "the newest snapshot is not resumed: it lacks the part of node {nodes}. An older one is"
            ));
        }
        // Those that are gone everywhere were deleted, or were in memory only.
        let place = if lacking.len() < all.len() { &mut newest_lacks } else { &mut newest_is_gone };
        place.get_or_insert(nodes);
    }
    let newest_lacks = newest_lacks.or(newest_is_gone).filter(|_| !has_whole);
    let is_none_left = !committed.is_empty() && excluded.len() == committed.len();
    if is_none_left && newest_lacks.is_none() {
        bail!(bad_input(anyhow!(
            "each snapshot of the job was left behind by a node, which was resumed from an older one: name one with --resume ID on all nodes, or start from the beginning with --resume never"
        )));
    }
    if let (Some(nodes), true) = (newest_lacks, is_none_left) {
        bail!(bad_input(anyhow!(
            "no snapshot of the job is complete: its newest lacks the part of node {nodes}. Give each node the store that it had, with the same number of nodes, or start from the beginning with --resume never on all nodes"
        )));
    }
    if committed.is_empty()
        && let Some(join) =
            all.iter().find(|join| !join.is_anew && join.parts.iter().any(|part| part.log != log.name()))
        && log.name().starts_with(FIRST)
    {
        bail!(bad_input(anyhow!(
            "node {} has parts of snapshots of this job, but the store of node 0 has no log of it: give node 0 the store that it had, or start from the beginning with --resume never on all nodes",
            join.rank
        )));
    }
    let usable = committed.len() - excluded.len();
    Ok(Chosen { welcome: Welcome { passed_over, ..told(log, all, committed) }, excluded, usable })
}

/// How the name of the first log of a job begins.
const FIRST: &str = "000001-";

/// Another node.
fn connect(member: Member, mut waits: Waits<'_>) -> Result<Cluster> {
    let (at, join) = (&member.coordinator, member.join());
    let (mut report, mut pause) = (Some(Instant::now() + NODE_WAIT_REPORT), NODE_FIRST_RETRY_INTERVAL);
    let end = member.limit.map(|limit| Instant::now() + limit);
    loop {
        let why = match try_connect(&member, &join, &mut waits) {
            Ok(admitted) => {
                tell_passed_over(&admitted.welcome, waits.journal);
                return joined(&member, join, admitted);
            }
            Err(Refusal::Final(why)) => {
                bail!(bad_input(anyhow!(
                    "node 0 at {at} does not take this node (node rank {}): {why}",
                    member.rank
                )))
            }
            Err(Refusal::Transient(why)) => why,
            Err(Refusal::Taken) => {
                tracing::warn!("another launcher has the place of node {}: this one is a spare", member.rank);
                return Err(Rejoin { rank: member.spare, has_begun: member.has_begun }.into());
            }
            Err(Refusal::Ended(why)) => bail!(why),
        };
        if end.is_some_and(|end| end <= Instant::now()) {
            bail!("no launcher of node 0 has come since it was lost: {why}");
        }
        tracing::debug!("no connection to node 0 at {at}: {why}");
        if report.is_some_and(|report| Instant::now() >= report) {
            waits.say(format!("waiting for the launcher of node 0 at {at}: {why}"));
            report = None;
        }
        std::thread::sleep(pause);
        pause = NODE_RETRY_INTERVAL.min(pause * 2);
    }
}

/// Says why an older snapshot is resumed.
fn tell_passed_over(welcome: &Welcome, journal: &Journal) {
    if let Some(why) = &welcome.passed_over {
        tracing::warn!("{why}");
        journal.add(&Entry::new(EventKind::Noted, &why[..]));
    }
}

/// Node 0 has taken this node in.
fn joined(member: &Member, join: Join, admitted: Admitted) -> Result<Cluster> {
    let Admitted { connection, mut welcome, machines: [coordinator, local] } = admitted;
    if let Some(plan) = &mut welcome.network {
        plan.machines.push((0, coordinator));
    }
    let (inputs, inbox) = unbounded();
    let link = Link::start(0, 0, connection, &inputs).context("cannot start a thread")?;
    let parts = HostParts {
        me: NodeId { rank: member.rank, incarnation: join.incarnation },
        settings: member.settings,
        links: BTreeMap::from([(0, link)]),
        log: None,
        excluded: Vec::new(),
        usable: 0,
        grace: member.grace,
        every: member.every,
        ports: member.ports(&welcome),
        addresses: BTreeSet::new(),
        launchers: member.launchers(&welcome, Some(coordinator)),
        replicas: member.replicas.clone(),
        spares: Spares::default(),
        own: join.clone(),
        on_loss: member.on_loss,
    };
    let cluster = Cluster::start(parts, welcome, (inputs, inbox))?;
    cluster.with_network(!member.rejoins, |welcome, is_over| {
        job_network((&member.coordinator, &join), welcome, Some(local), is_over)
    })
}

/// Why node 0 does not take a node in.
pub(super) enum Refusal {
    Final(String),
    Transient(String),
    /// Another launcher has its rank: it is a spare.
    Taken,
    /// The launchers do not wait any longer.
    Ended(String),
}

impl<T: Into<ConnectionError>> From<T> for Refusal {
    fn from(error: T) -> Self {
        let error = error.into();
        if error.is_final() { Self::Final(error.to_string()) } else { Self::Transient(error.to_string()) }
    }
}

/// Node 0 has taken this node.
struct Admitted {
    connection: (Sender, Receiver),
    welcome: Welcome,
    /// The address of the machine of node 0, and of this one.
    machines: [IpAddr; 2],
}

/// Node 0, as it was reached.
pub(super) struct Reached {
    pub(super) connection: (Sender, Receiver),
    /// Its answer to [`Message::Join`].
    pub(super) answer: Message,
    /// The address of its machine, and of this one.
    machines: [IpAddr; 2],
}

/// Connects to the first host at which node 0 answers. A machine that is lost does not; nor does a launcher that stands still,
/// whose kernel accepts connections.
pub(super) fn connect_to(
    at: &Coordinator,
    key: &ClusterKey,
    join: &Join,
) -> Result<Reached, ConnectionError> {
    let timeout = if at.may_move() { NODE_SEARCH_TIMEOUT } else { NODE_CONNECTION_TIMEOUT };
    let mut failure = None;
    for host in &at.hosts {
        let stream = addresses(host, at.port).and_then(|addresses| {
            let mut stream = Err(std::io::Error::other("the name has no address"));
            for address in addresses {
                stream = TcpStream::connect_timeout(&address, timeout);
                if stream.is_ok() {
                    break;
                }
            }
            stream
        });
        match stream.map_err(ConnectionError::from).and_then(|stream| ask(stream, key, join, timeout)) {
            Ok(reached) => return Ok(reached),
            Err(error) if error.is_final() => return Err(error),
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    Err(failure.unwrap_or_else(|| std::io::Error::other("there is no host").into()))
}

/// Asks node 0 to join.
///
/// # Errors
/// When the other end does not answer within `timeout`, or is not node 0.
pub(super) fn ask(
    stream: TcpStream,
    key: &ClusterKey,
    join: &Join,
    timeout: Duration,
) -> Result<Reached, ConnectionError> {
    let machines = [stream.peer_addr()?, stream.local_addr()?].map(|address| address.ip().to_canonical());
    let socket = stream.try_clone()?;
    let (mut sender, mut receiver) = connection::open(stream, key, Side::Node, timeout)?;
    sender.send(&Message::Join(join.clone()))?;
    let answer = match receiver.receive()? {
        Message::NotHere => return Err(std::io::Error::other("a spare listens there").into()),
        answer => answer,
    };
    // From now on node 0 may take its time.
    socket.set_write_timeout(Some(NODE_CONNECTION_TIMEOUT))?;
    Ok(Reached { connection: (sender, receiver), answer, machines })
}

/// Connections to the other machines at which node 0 may be, and whether nodes look for it there before they look here.
pub(super) fn others(at: &Coordinator) -> Vec<(bool, TcpStream)> {
    let own = diag::addresses().unwrap_or_default();
    let (mut streams, mut is_first) = (Vec::new(), true);
    for address in at.hosts.iter().filter_map(|host| addresses(host, at.port).ok()).flatten() {
        let ip = address.ip().to_canonical();
        if ip.is_loopback() || own.contains(&ip) {
            is_first = false;
        } else if let Ok(stream) = TcpStream::connect_timeout(&address, NODE_SEARCH_TIMEOUT) {
            streams.push((is_first, stream));
        }
    }
    streams
}

fn try_connect(member: &Member, join: &Join, waits: &mut Waits<'_>) -> Result<Admitted, Refusal> {
    let Reached { connection: (sender, mut receiver), answer, machines } =
        connect_to(&member.coordinator, &member.key, join)?;
    check_answer(answer)?;
    // The other nodes may come much later.
    if !receiver.is_ready(NODE_WAIT_REPORT)? {
        waits.say(format!(
            "waiting for the launchers of other nodes; that of node 0 at {} says which are missing",
            member.coordinator
        ));
    }
    receiver.set_timeout(None)?;
    match receiver.receive()? {
        Message::Welcome(welcome) => Ok(Admitted { connection: (sender, receiver), welcome, machines }),
        other => {
            check_answer(other).and_then(|()| Err(Refusal::Transient("it answers something else".to_owned())))
        }
    }
}

/// Whether node 0 has taken a node in.
pub(super) fn check_answer(answer: Message) -> Result<(), Refusal> {
    match answer {
        Message::Joined => Ok(()),
        Message::Refused { why, is_transient: false } => Err(Refusal::Final(why)),
        Message::Refused { why, .. } => Err(Refusal::Transient(why)),
        Message::Spare { .. } => Err(Refusal::Taken),
        Message::End(end) => Err(Refusal::Ended(end.why)),
        _ => Err(Refusal::Transient("it answers something else".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_cluster::Record;
    use ckpt_snapshot::{JobKey, StoreRoot};

    fn job() -> (tempfile::TempDir, JobDir) {
        let store = tempfile::tempdir().unwrap();
        let job = StoreRoot::open_or_create(store.path()).unwrap().job(&JobKey::named("job").unwrap());
        std::fs::create_dir_all(job.path()).unwrap();
        (store, job)
    }

    fn node(rank: u32, parts: &[(&str, u64, &str)]) -> Join {
        let part = |(log, number, hash): &(&str, u64, &str)| HeldPart {
            log: (*log).to_owned(),
            attempt: AttemptId { epoch: 1, number: *number },
            hash: (*hash).to_owned(),
            is_abandoned: false,
        };
        Join {
            rank,
            nodes: 2,
            incarnation: 1,
            ckpt_run: "1".into(),
            hostname: "a".into(),
            engine_name: None,
            addresses: BTreeSet::new(),
            network_range: None,
            is_anew: false,
            wanted: None,
            parts: parts.iter().map(part).collect(),
            other_node: None,
            is_moved: false,
            rejoins: false,
            job: "job".into(),
            is_named: false,
            is_watched: false,
            has_memory: false,
            has_replicas: false,
            holding: None,
        }
    }

    /// `--keep-every` keeps any number of snapshots.
    #[test]
    fn a_node_with_many_parts_can_join() {
        let part = |number| HeldPart {
            log: format!("000001-{:016x}", u64::MAX),
            attempt: AttemptId { epoch: u64::MAX, number },
            hash: "0".repeat(64),
            is_abandoned: false,
        };
        let all: Vec<_> = (0..10_000).map(|above| part(u64::MAX - 10_000 + above)).collect();
        let told = newest(&all);
        assert_eq!((told.len(), told.last()), (MOST_PARTS, all.last()));
        let join = Join { parts: told.to_vec(), ..node(1, &[]) };
        let message = serde_json::to_vec(&Message::Join(join)).unwrap();
        assert!(message.len() < connection::MOST_BYTES_AT_FIRST as usize, "{}", message.len());
        assert_eq!(newest(&all[..2]), &all[..2]);
    }

    #[test]
    fn a_snapshot_is_resumed_only_if_all_have_their_parts() {
        let (_store, job) = job();
        let mut log = StoredLog::open(&job, false).unwrap();
        let name = &log.name().to_owned();
        assert_eq!(choose(&log, &[&node(0, &[]), &node(1, &[])]).unwrap().excluded, []);
        for (position, number) in [(0, 1), (1, 2)] {
            let attempt = AttemptId { epoch: 1, number };
            let part = |rank, hash: &str| PartRecord { rank, hash: hash.to_owned() };
            let parts = vec![part(0, "a"), part(1, "b")];
            log.put(position, &Record::Snapshot { attempt, session: attempt, parts }).unwrap();
        }
        let zero = node(0, &[(name, 1, "a"), (name, 2, "a")]);
        let whole = node(1, &[(name, 1, "b"), (name, 2, "b"), (name, 3, "b")]);
        let chosen = choose(&log, &[&zero, &whole]).unwrap();
        assert_eq!((chosen.welcome.committed.len(), chosen.excluded.len(), chosen.usable), (2, 0, 2));
        assert_eq!(chosen.welcome.passed_over, None);
        let newest = AttemptId { epoch: 1, number: 2 };
        for lacking in [node(1, &[(name, 1, "b")]), node(1, &[(name, 1, "b"), (name, 2, "x")])] {
            let chosen = choose(&log, &[&zero, &lacking]).unwrap();
            assert_eq!((chosen.excluded, chosen.usable), (vec![newest], 1), "{lacking:?}");
            assert!(chosen.welcome.passed_over.unwrap().contains("it lacks the part of node 1"));
        }
        // Nobody has any part of the first one.
        let chosen = choose(&log, &[&node(0, &[(name, 2, "a")]), &node(1, &[(name, 2, "b")])]).unwrap();
        assert_eq!((chosen.welcome.committed, chosen.usable), (vec![newest], 1));
        for none in [node(1, &[]), node(1, &[("other", 1, "b"), ("other", 2, "b")])] {
            let error = choose(&log, &[&zero, &none]).unwrap_err().to_string();
            assert!(error.contains("lacks the part of node 1"), "{error}");
        }
    }

    #[test]
    fn an_older_snapshot_is_resumed_on_request() {
        let (_store, job) = job();
        let mut log = StoredLog::open(&job, false).unwrap();
        let name = log.name().to_owned();
        let id = |number| AttemptId { epoch: 1, number };
        for number in 1..=3 {
            let part = |rank, hash: &str| PartRecord { rank, hash: hash.to_owned() };
            let parts = vec![part(0, "a"), part(1, "b")];
            log.put(number - 1, &Record::Snapshot { attempt: id(number), session: id(number), parts })
                .unwrap();
        }
        let zero = node(0, &[(&name, 1, "a"), (&name, 2, "a"), (&name, 3, "a")]);
        let mut one = node(1, &[(&name, 2, "b"), (&name, 3, "b")]);
        let only = |number: usize, one: &Join| only(&log, &[&zero, one], ("x", &zero.parts[number - 1]));
        let chosen = only(2, &one).unwrap();
        assert_eq!((&chosen.excluded, chosen.usable), (&vec![id(3), id(1)], 1));
        assert_eq!(chosen.welcome.committed.len(), 3, "no part of them is removed");
        assert!(only(1, &one).unwrap_err().to_string().contains("lacks the part of node 1"));
        // One node has been resumed from it.
        one.parts[1].is_abandoned = true;
        let chosen = choose(&log, &[&zero, &one]).unwrap();
        assert_eq!((chosen.excluded, chosen.usable), (vec![id(3), id(1)], 1));
        assert_eq!(only(3, &one).unwrap().excluded, [id(2), id(1)]);
        let other = node(0, &[("other", 1, "a"), (&name, 9, "a")]);
        for (part, why) in other.parts.iter().zip(["an earlier run", "no global manifest"]) {
            let error = super::only(&log, &[&zero, &one], ("x", part)).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        zero_and_one_left_all(&log, &zero, &one);
        log.set_complete().unwrap();
        let mut reopened = StoredLog::newest(&job).unwrap().unwrap().reopened();
        assert!(!reopened.has_begun());
        assert_ne!(StoredLog::open(&job, false).unwrap().name(), name, "not before it has begun");
        reopened.begin().unwrap();
        assert_eq!(StoredLog::open(&job, false).unwrap().name(), name);
    }

    fn zero_and_one_left_all(log: &StoredLog, zero: &Join, one: &Join) {
        let (mut zero, mut one) = (zero.clone(), one.clone());
        let parts = zero.parts.iter_mut().take(2).chain(&mut one.parts);
        parts.for_each(|part| part.is_abandoned = true);
        let name = log.name().to_owned();
        one.parts.extend(node(1, &[(&name, 1, "b")]).parts);
        let error = choose(log, &[&zero, &one]).unwrap_err().to_string();
        assert!(error.contains("left behind") && error.contains("--resume ID"), "{error}");
    }

    #[test]
    fn a_name_of_the_loopback_interface_is_reached_from_other_machines() {
        let at = |addresses: &[&str]| -> Vec<SocketAddr> {
            addresses.iter().map(|address| address.parse().unwrap()).collect()
        };
        let listened = |host, addresses: &[&str]| listened(host, at(addresses));
        assert_eq!(listened("node0", &["127.0.1.1:7", "[::1]:7"]), at(&["0.0.0.0:7", "[::]:7"]));
        assert_eq!(listened("node0", &["127.0.1.1:7", "10.0.0.1:7"]), at(&["127.0.1.1:7", "10.0.0.1:7"]));
        for literal in ["127.0.0.1", "localhost"] {
            assert_eq!(listened(literal, &["127.0.0.1:7"]), at(&["127.0.0.1:7"]));
        }
    }

    #[test]
    fn a_lost_log_is_no_new_job() {
        let (_store, job) = job();
        let log = StoredLog::open(&job, false).unwrap();
        let known = node(1, &[("000001-other", 1, "b")]);
        let error = choose(&log, &[&node(0, &[]), &known]).unwrap_err().to_string();
        assert!(error.contains("node 1 has parts") && error.contains("no log"), "{error}");
        // The stores of the nodes were interchanged.
        let of = |rank, other_node| Join { other_node, ..node(rank, &[]) };
        // A node more, after a complete run.
        to_resume(&log, &[&of(0, None), &of(1, Some(0))], false).unwrap();
        let error = to_resume(&log, &[&of(0, Some(1)), &of(1, Some(0))], false).unwrap_err().to_string();
        assert!(
            error.contains("node 0 has snapshots of node 1") && error.contains("--resume never"),
            "{error}"
        );
        let anew = |rank| Join { is_anew: true, ..of(rank, Some(1 - rank)) };
        to_resume(&log, &[&anew(0), &anew(1)], false).unwrap();
    }

    #[test]
    fn nodes_with_other_options_are_refused() {
        let own = node(0, &[]);
        assert_eq!(mismatch(&own, &node(1, &[])), None);
        let why = |join: Join| mismatch(&own, &join).unwrap();
        assert!(why(Join { nodes: 3, ..node(1, &[]) }).contains("--nodes 3 and node 0 --nodes 2"));
        assert!(why(Join { has_memory: true, ..node(1, &[]) }).contains("--persist-every"));
        assert!(why(Join { has_replicas: true, ..node(1, &[]) }).contains("--replicas"));
        assert!(why(Join { is_watched: true, ..node(1, &[]) }).contains("it has --hang-timeout and node 0"));
        let named = |job: &str| Join { is_named: true, job: job.to_owned(), ..node(1, &[]) };
        assert!(mismatch(&named("job"), &named("other")).unwrap().contains("the same --job"));
        assert_eq!(mismatch(&own, &named("other")), None, "that of node 0 is made from its command");
        assert!(why(node(0, &[])).contains("another launcher is node 0"));
        let range = Some("10.9.0.0/16".parse().unwrap());
        assert!(why(Join { network_range: range, ..node(1, &[]) }).contains("--network"));
        for join in
            [Join { wanted: Some("2".into()), ..node(1, &[]) }, Join { is_anew: true, ..node(1, &[]) }]
        {
            assert!(other_resume(&own, &join).unwrap().contains("--resume"));
            let spare = Join { rank: 2, ..join.clone() };
            assert_eq!((other_resume(&own, &spare), mismatch(&own, &spare)), (None, None));
            let other = Join { job: "other".into(), ..spare.clone() };
            assert!(mismatch(&own, &other).unwrap().contains("the same --job"));
            assert_eq!(other_resume(&Join { rejoins: true, ..own.clone() }, &join), None, "it has begun");
        }
        assert!(why(Join { ckpt_run: "2".into(), ..node(1, &[]) }).contains("ckpt-run 2"));
    }
}
