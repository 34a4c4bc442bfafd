//! `ckpt-run run` for one part of a job on several nodes. The nodes begin, resume and end the job together:
//!
//! ```text
//!   join ──► Load ──► claim ──► restore, or start of the command ──► session ──► all have ended with 0 ──► over: 0
//!             ▲                   │ damaged: an older snapshot          │ │
//!             └───────────────────┴─ a part has failed: restart.rs ─────┘ └─► End ──► over: the exit code of all nodes
//! ```
//!
//! If a launcher or a machine is lost, the job ends on all nodes. Who has started the launchers starts all of them again; or
//! those that are left start again by themselves (`--lost-node`), and wait for that of the lost node, or for a spare.

mod parts;
mod restart;

use super::events::{self, Event, Signals};
use super::policy::Failure;
use super::services::RunContext;
use super::session::{JobSession, SessionEnd, SessionOutcome};
use super::start::NotExecuted;
use super::startup::{self, OpenedJob};
use super::{Supervisor, metrics, start};
use crate::checkpoint::nodes::PartPlace;
use crate::checkpoint::running_job::RunningJob;
use crate::cli::config::Config;
use crate::cluster::{
    self, Cluster, ClusterKey, End, HeldPart, JobNetwork, Join, Load, Member, NODE, NodeOptions, Notice,
    OnNodeLoss, PacketRule, Patience, Rejoin, Replicas, Waiting, Wanted, sockets,
};
use crate::job::journal::{Entry, EventKind, Measured};
use crate::job::resume_point::{Decision, Resume, decide};
use crate::job::status::unix_ms;
use crate::namespace::Network;
use crate::persist::memory::Memory;
use crate::report::failure::{exit_code, in_one_line, log_error};
use crate::restore::resume::Resumer;
use crate::store::root::Root;
use crate::store::tiers;
use crate::sys::deadline::{
    NODE_BEAT_INTERVAL, NODE_REPEAT_INTERVAL, NODE_STEP_TIMEOUT, NODE_TRANSFER_TIMEOUT, REJOIN_LIMIT,
    SPARE_AGAIN_PAUSE,
};
use crate::sys::error::{EXIT_BAD_INPUT, EXIT_OWN, EXIT_PREEMPTED, bad_input};
use anyhow::{Context, Result, anyhow, bail};
use ckpt_cluster::{Blame, Outcome, Settings, Step};
use ckpt_snapshot::{JobRecord, OpenError, SnapshotId, Store};
use ipnet::Ipv4Net;
use parts::{Held, MissingPart, held_parts, resume_point};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// What a node says that is to blame for another try.
const COULD_NOT_RESUME: &str = "this node could not take its part in the resume";
/// More nodes have not been tried.
const MOST_NODES: u32 = 1024;
/// What to do after the end of a job that is not complete.
const AGAIN: &str = "Run the same commands again on all nodes to resume it";
/// Time after which no launcher other than that of node 0 is asked to coordinate: never.
const NO_OTHER_COORDINATOR: Duration = Duration::from_secs(u32::MAX as u64);

/// The configuration, completed by what an engine says of the nodes; `None` if it says nothing.
///
/// # Errors
/// Bad input: what it says cannot be used.
pub(super) fn found(config: &Config) -> Result<Option<Config>> {
    let mut nodes = config.nodes.clone();
    let variable = |name: &str| std::env::var(name).ok();
    nodes.complete(&variable).map_err(bad_input)?;
    Ok(nodes.engine.is_some().then(|| Config { nodes, ..config.clone() }))
}

/// Refuses what works on several nodes only.
///
/// # Errors
/// Bad input.
pub(super) fn check_alone(config: &Config) -> Result<()> {
    if config.network == Network::Job {
        bail!(bad_input(anyhow!(
            "--network job is for a job on several nodes (--nodes): on one machine, use --network private for connections that may move to another machine"
        )));
    }
    let options = &config.nodes;
    if options.replicas > 0 {
        bail!(bad_input(anyhow!(
            "--replicas is for a job on several nodes (--nodes): on one machine, no other has memory for a replica"
        )));
    }
    let is_incomplete = options.rank.is_some() || options.coordinator.is_some();
    if is_incomplete && options.nodes.is_none() {
        bail!(bad_input(anyhow!(
            "--node-rank and --coordinator are for a job on several nodes: give --nodes too, or --nodes 1 for a job on this machine alone"
        )));
    }
    Ok(())
}

/// Refuses what does not work on several nodes yet.
///
/// # Errors
/// Bad input.
fn check(config: &Config) -> Result<()> {
    let options = &config.nodes;
    let missing = [("--node-rank", options.rank.is_none()), ("--coordinator", options.coordinator.is_none())];
    let missing: Vec<_> =
        missing.iter().filter(|(_, is_missing)| *is_missing).map(|(name, _)| *name).collect();
    if !missing.is_empty() {
        bail!(bad_input(anyhow!("a job on several nodes (--nodes) also needs {}", missing.join(", "))));
    }
    let nodes = options.several().unwrap_or(1);
    if nodes > MOST_NODES {
        bail!(bad_input(anyhow!("--nodes may be at most {MOST_NODES}")));
    }
    if options.is_spare() && config.network != Network::Job {
        bail!(bad_input(anyhow!(
            "a node rank of {nodes} or more, with --nodes {nodes}, is a spare, which takes the place of a node that is lost: this needs --network job, since its machine has another address"
        )));
    }
    if options.replicas > 0 && config.persist_every <= 1 {
        bail!(bad_input(anyhow!(
            "--replicas is for snapshots in memory: use it with --persist-every N, of 2 or more"
        )));
    }
    let ends_with_a_lost_one = match options.on_loss {
        OnNodeLoss::Exit => true,
        // There can be no spare.
        OnNodeLoss::Auto => config.network != Network::Job,
        OnNodeLoss::Wait => false,
    };
    if options.replicas > 0 && ends_with_a_lost_one {
        bail!(bad_input(anyhow!(
            "--replicas does not help here: all launchers end with one that is lost, and their memory with them. Use --network job and a spare, or --lost-node wait"
        )));
    }
    let refused = [
        ("--network private: its loopback reaches no other node", config.network == Network::Private),
        ("--upload: give --store the same address instead", config.store.upload.is_some()),
    ];
    match refused.iter().find(|(_, is_used)| *is_used) {
        Some((what, _)) => bail!(bad_input(anyhow!("with --nodes, this is not possible yet: {what}"))),
        None => Ok(()),
    }
}

/// Runs this node's part of the job until the job ends for good, or has to be started again on all nodes; returns the exit
/// code.
///
/// # Errors
/// When the job could not be started or resumed.
pub(super) fn run(config: &Config, argv: &[OsString]) -> Result<i32> {
    check(config)?;
    let nodes = &config.nodes;
    let number = nodes.several().unwrap_or(1);
    let given = nodes.rank.context("the rank was checked")?;
    let spare = if given >= number { given } else { number + given };
    let rank = nodes.rejoins_as.unwrap_or(given);
    if rank >= number {
        return await_place(config, argv, rank);
    }
    let is_moved = rank != given;
    let nodes = NodeOptions { rank: Some(rank), is_moved, spare, ..nodes.clone() };
    let may_be_spare = config.network == Network::Job && nodes.on_loss != OnNodeLoss::Exit;
    let again = Rejoin { rank: spare, has_begun: nodes.has_begun };
    run_node(&Config { nodes, ..config.clone() }, argv)
        .map_err(|error| if may_be_spare { spare_again(error, again) } else { error })
}

/// Another launcher has the part: a spare has taken the place of this one; or this one is a spare, and the other one seems to be
/// lost from here only.
fn spare_again(error: anyhow::Error, again: Rejoin) -> anyhow::Error {
    if !is_locked(&error) {
        return error;
    }
    tracing::warn!("{error}: this launcher is a spare");
    std::thread::sleep(SPARE_AGAIN_PAUSE);
    again.into()
}

/// Waits, as a spare, until a node is lost.
fn await_place(config: &Config, argv: &[OsString], rank: u32) -> Result<i32> {
    // A signal that asks the job to end ends a spare at once.
    let _signals = Signals::listen(config.on_signal.clone())?;
    await_store(config);
    // It may be the first launcher that uses the store.
    Root::open_or_create(&config.store, &config.store.pace())?;
    let options = &config.nodes;
    let nodes = options.several().unwrap_or(1);
    let at = options.coordinator.clone().context("the address was checked")?;
    let patience = match options.on_loss {
        OnNodeLoss::Wait => Patience::Endless,
        OnNodeLoss::Auto if at.may_move() => Patience::Some,
        OnNodeLoss::Auto | OnNodeLoss::Exit => Patience::None,
    };
    let job = startup::job_key(config, argv, None)?;
    let join = Join {
        is_watched: config.hang_timeout.is_some(),
        has_memory: config.persist_every > 1,
        has_replicas: options.replicas > 0,
        ..Join::of_machine(job.as_str(), rank, nodes, network_range(config))
    };
    let waiting = Waiting { at, key: key(config)?, join, timeout: options.timeout, patience };
    let node_0 = startup::job_key(config, argv, Some(0))?;
    let store = config.store.clone();
    let may_resume = move || {
        let has = |root: Root| Ok(cluster::has_snapshots(&root.job(&node_0))?);
        Root::open(&store).and_then(has).unwrap_or_else(|error| {
            tracing::warn!("it is not known whether the job has a snapshot: {error:#}");
            false
        })
    };
    cluster::await_place(&waiting, may_resume)
}

/// Does something with the store. A launcher that starts again has used it before: what is wrong now may pass.
fn with_store<T>(config: &Config, work: impl Fn() -> Result<T>) -> Result<T> {
    let begun = Instant::now();
    loop {
        match work() {
            Err(error) if config.nodes.rejoins_as.is_some() && begun.elapsed() < REJOIN_LIMIT => {
                tracing::warn!("{error:#}. It is tried again");
            }
            result => return result,
        }
        std::thread::sleep(SPARE_AGAIN_PAUSE);
    }
}

/// Waits until the store of a launcher that starts again answers.
fn await_store(config: &Config) {
    if config.nodes.rejoins_as.is_some() {
        let _ = with_store(config, || Root::open(&config.store)?.check());
    }
}

fn is_locked(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(OpenError::Locked { .. }))
}

fn run_node(config: &Config, argv: &[OsString]) -> Result<i32> {
    if let Err(code) = start::find_command(&argv[0]) {
        return Ok(code);
    }
    let begun_at = SystemTime::now();
    PacketRule::put(&BTreeSet::new()).map_err(|error| {
        anyhow!("cannot block connections while a snapshot of several nodes is taken: {error}. This needs CAP_NET_ADMIN and a kernel with nftables and owned tables (Linux 5.12)")
    })?;
    let metrics = config.metrics.map(metrics::listen).transpose()?;
    await_store(config);
    let mut opened = startup::open(config, argv)?;
    // What happens to a job happens on all its nodes: one of them tells it.
    let address = config.notify.clone().filter(|_| config.nodes.rank == Some(0));
    let notifier = address.map(|to| super::notifier(to, config, &opened)).transpose()?;
    let member = with_store(config, || member(config, &opened))?;
    let cluster = cluster::join(member, &opened.journal)?;
    let (nodes, rank) = (cluster.nodes(), cluster.rank());
    let engine = config.nodes.engine.map_or_else(String::new, |engine| format!(", as {engine} says"));
    tracing::info!("all {nodes} nodes are there; this is node {rank}{engine}");
    let load = match next_load(&cluster) {
        Ok(load) => load,
        Err(end) => {
            let rejoin = cluster.rejoin();
            cluster.finish();
            opened.journal.end_listening();
            let code = report(&end);
            return rejoin.map_or(Ok(code), |rejoin| Err(rejoin.into()));
        }
    };
    let over = run_part(config, argv, (&mut opened, begun_at), &cluster, load, metrics);
    opened.journal.end_listening();
    drop(notifier);
    if let Some(rejoin) = cluster.rejoin().filter(|_| !matches!(over, Ok(EXIT_PREEMPTED))) {
        cluster.finish();
        if let Err(Over::Failed(error) | Over::Told(error, _)) = over {
            log_error(&error);
        }
        return Err(rejoin.into());
    }
    match over {
        Ok(code) => {
            cluster.finish();
            Ok(code)
        }
        Err(Over::Told(error, code)) => {
            cluster.finish();
            log_error(&error);
            Ok(code)
        }
        Err(Over::Code(code)) => {
            Ok(cluster.fail(format!("its command cannot be executed (exit code {code})"), code))
        }
        Err(Over::Failed(error)) => {
            log_error(&error);
            Ok(cluster.fail(in_one_line(&error), exit_code(&error, EXIT_OWN)))
        }
    }
}

/// Why this launcher cannot go on.
enum Over {
    /// The other nodes know. The job has ended with this exit code.
    Told(anyhow::Error, i32),
    /// The command cannot be executed.
    Code(i32),
    Failed(anyhow::Error),
}

impl<T: Into<anyhow::Error>> From<T> for Over {
    fn from(error: T) -> Self {
        Self::Failed(error.into())
    }
}

fn member(config: &Config, opened: &OpenedJob) -> Result<Member> {
    parts::warn_of_unreadable(&opened.store)?;
    let held = held_parts(opened)?;
    let options = &config.nodes;
    let (rank, coordinator) = (options.rank, options.coordinator.clone());
    let nodes = options.several().context("the number of nodes was checked")?;
    let may_move = coordinator.as_ref().is_some_and(cluster::Coordinator::may_move);
    let on_loss = match options.on_loss {
        // A spare takes the place of node 0, which cannot say so.
        OnNodeLoss::Auto if rank != Some(0) && may_move => OnNodeLoss::Wait,
        on_loss => on_loss,
    };
    let settings = Settings {
        nodes,
        parts: nodes,
        beat: NODE_BEAT_INTERVAL,
        silence: options.timeout,
        stagger: NO_OTHER_COORDINATOR,
        repeat: NODE_REPEAT_INTERVAL,
        gather: NODE_BEAT_INTERVAL,
        lease: config.freeze_timeout,
        load_lease: NODE_TRANSFER_TIMEOUT,
        step_limit: config.freeze_timeout + NODE_STEP_TIMEOUT,
        transfer_limit: NODE_TRANSFER_TIMEOUT,
        tries: 1,
    };
    Ok(Member {
        rank: rank.context("the rank was checked")?,
        coordinator: coordinator.context("the address was checked")?,
        key: key(config)?,
        settings,
        job: opened.dir.clone(),
        wanted: wanted(config, opened, &held),
        parts: held.into_iter().map(|(_, part)| part).collect(),
        other_node: other_node(config, opened)?,
        ports: parts::ports(&opened.store),
        is_anew: config.resume == Resume::Never,
        has_to_resume: config.resume == Resume::Required,
        grace: config.grace,
        network_range: network_range(config),
        on_loss,
        is_moved: options.is_moved,
        is_named: config.job.is_some(),
        is_watched: config.hang_timeout.is_some(),
        every: config.persist_every,
        replicas: opened.replicas.clone(),
        spare: options.spare,
        rejoins: options.rejoins_as.is_some(),
        has_begun: options.has_begun,
        limit: (options.rejoins_as.is_some() && options.on_loss == OnNodeLoss::Auto).then_some(REJOIN_LIMIT),
    })
}

/// With `--network job`: the addresses from which those of the job are chosen.
fn network_range(config: &Config) -> Option<Ipv4Net> {
    (config.network == Network::Job).then_some(config.nodes.network_range)
}

/// The snapshot of `--resume ID`. It is named as in the store of node 0.
fn wanted(config: &Config, opened: &OpenedJob, held: &Held) -> Option<Wanted> {
    let Resume::Snapshot(text) = &config.resume else { return None };
    // Node 0 tells the others why it has none.
    let part = part_of(config, opened, held, text).map_err(|error| format!("{error:#}"));
    Some(Wanted { text: text.clone(), part })
}

/// The part that `text` names.
fn part_of(config: &Config, opened: &OpenedJob, held: &Held, text: &str) -> Result<HeldPart> {
    let named = startup::without_tag(config, &opened.dir, &opened.store, text)?;
    let id = (&*opened.store as &dyn Store).find(&named)?;
    let part = held.iter().find(|(held, _)| *held == id).map(|(_, part)| part.clone());
    part.ok_or_else(|| anyhow!("the snapshot {id} is none of a job on several nodes, or it cannot be read"))
}

/// Another node of the job of which the store has parts, if it has none of this node.
fn other_node(config: &Config, opened: &OpenedJob) -> Result<Option<u32>> {
    let key = opened.dir.key().as_str();
    let Some((job, _)) = key.rsplit_once(NODE) else { return Ok(None) };
    if !tiers::list_local(&opened.store)?.is_empty() {
        return Ok(None);
    }
    for other in Root::open(&config.store)?.jobs()? {
        let of_job = other.key().as_str().rsplit_once(NODE).filter(|(name, _)| *name == job);
        let Some(number) = of_job.and_then(|(_, number)| number.parse().ok()) else { continue };
        if !tiers::list_local(&*tiers::open(&config.store, &other)?)?.is_empty() {
            return Ok(Some(number));
        }
    }
    Ok(None)
}

/// The key of `--cluster-key-file`, or that of the store.
fn key(config: &Config) -> Result<ClusterKey> {
    if let Some(key) = &config.nodes.key {
        return Ok(key.clone());
    }
    // Who can read an object store need not be able to read what is in it.
    if let (Some(_), Some(key)) = (&config.store.url, &config.store.key) {
        return Ok(ClusterKey::of_encrypted(key));
    }
    let root = Root::open(&config.store)?;
    let key = match root.objects_of_nodes() {
        Some(objects) => ClusterKey::of_objects(&*objects),
        None => ClusterKey::of_store(&config.store.dir),
    };
    key.map_err(|error| {
        bad_input(anyhow!(
            "there is no key for the connections between the nodes in {} ({error}): use --cluster-key-file",
            root.name()
        ))
    })
}

/// The replicas of the job, which this launcher holds for another node and has at another one, if it keeps any.
///
/// # Errors
/// When there is no key, or the kernel refuses.
pub(super) fn replicas(config: &Config, memory: Option<&Memory>) -> Result<Option<Arc<Replicas>>> {
    let NodeOptions { rank: Some(rank), replicas: 1.., .. } = config.nodes else { return Ok(None) };
    let (Some(memory), Some(nodes)) = (memory, config.nodes.several()) else { return Ok(None) };
    memory.survives_as(rank);
    Ok(Some(Arc::new(Replicas::start(memory, &key(config)?, (rank, nodes))?)))
}

/// Waits for the order to begin or to resume.
fn next_load(cluster: &Cluster) -> Result<Load, End> {
    loop {
        match cluster.notices().recv() {
            Ok(Notice::Load(load)) => return Ok(load),
            Ok(Notice::End(end)) => return Err(end),
            // Node 0 decides for all.
            Ok(Notice::Over(end)) if cluster.rank() == 0 => cluster.give_up(end),
            Ok(_) => {}
            Err(_) => return Err(restart::no_thread()),
        }
    }
}

/// Says why the job is over, and returns the exit code.
fn report(end: &End) -> i32 {
    let fix = if end.code == EXIT_BAD_INPUT { "Fix the cause. " } else { "" };
    if end.is_to_rejoin {
        tracing::warn!("the job has ended on all nodes: {}. It is resumed when all nodes are there", end.why);
    } else if end.is_requested && end.is_saved {
        tracing::info!("the job has ended on all nodes: {}. {AGAIN}", end.why);
    } else if end.is_requested {
        tracing::warn!(
            "the job has ended on all nodes: {}. What it has done since its newest snapshot is lost. {AGAIN}",
            end.why
        );
    } else {
        tracing::error!("the job has ended on all nodes: {}. {fix}{AGAIN}", end.why);
    }
    end.code
}

fn run_part(
    config: &Config,
    argv: &[OsString],
    (opened, begun_at): (&mut OpenedJob, SystemTime),
    cluster: &Cluster,
    load: Load,
    metrics: Option<std::net::TcpListener>,
) -> Result<i32, Over> {
    let rejoins = config.nodes.rejoins_as.is_some();
    let (load, resume) = match parts::first_resume_point(cluster, opened, load, rejoins)? {
        Ok(found) => found,
        Err(end) => return Ok(report(&end)),
    };
    let (claimed, candidates) = startup::claim(config, opened, &resume)?;
    let opened = &*opened;
    let _recorded = startup::record(config, opened, &claimed, begun_at);
    parts::remove_garbage(cluster, opened, &load);
    let context = RunContext::start(config, argv, opened, &claimed, Some(cluster))?;
    let serve = |listener| metrics::serve(listener, &context.status, &opened.dir);
    let _metrics = metrics.map(serve).transpose()?;
    let over = Supervisor::new(&context).supervise_part(cluster, load, candidates);
    // What is in memory survives a launcher that starts again, if there are replicas.
    let is_kept = opened.replicas.is_some() && cluster.rejoin().is_some();
    if let (Some(persister), false) = (&context.persister, is_kept || matches!(over, Ok(0))) {
        persister.complete_last_copy(Instant::now(), || None);
    }
    if cluster.rejoin().is_some() {
        opened.signals.serve_no_more();
        if is_signalled(&context) {
            return Ok(EXIT_PREEMPTED);
        }
    }
    over
}

/// Whether a signal has asked the job to end that nobody has served: the session was over.
fn is_signalled(context: &RunContext<'_>) -> bool {
    let is_ending = |event| match event {
        Event::Signal(signal) => events::is_stopping(signal) || context.config.on_signal.contains(&signal),
        _ => false,
    };
    context.inbox.try_iter().any(is_ending)
}

impl<'a> Supervisor<'a> {
    fn supervise_part(
        mut self,
        cluster: &Cluster,
        mut load: Load,
        candidates: Vec<SnapshotId>,
    ) -> Result<i32, Over> {
        let mut candidates = Ok(candidates);
        loop {
            self.begun_at = SystemTime::now();
            let signals = &self.context.opened.signals;
            let begun = candidates.and_then(|candidates| {
                match signals.while_busy(|| self.start_part(cluster, &load, &candidates))? {
                    Ok(job) => self.begin_part(job, &load).map(Ok).map_err(|error| (error, false)),
                    Err(not_executed) => Ok(Err(not_executed)),
                }
            });
            let (mut own_error, mut ended) = (None, None);
            match begun {
                Ok(Ok(session)) => match self.serve_part(session) {
                    PartEnd::Code(code) => return Ok(code),
                    PartEnd::Over(end, failure) => ended = Some((end, failure)),
                },
                Ok(Err(NotExecuted { code, entry })) => {
                    self.context.opened.journal.add(&entry);
                    return Err(Over::Code(code));
                }
                Err((error, blames_snapshot)) => {
                    let is_own = load.gate.end().is_none();
                    load.gate.fail(&in_one_line(&error), blame(&error, blames_snapshot));
                    own_error = Some(error).filter(|_| is_own);
                }
            }
            restart::await_processes();
            cluster.session_ended(parts::ports(&self.context.opened.store));
            load = match (self.next_session(cluster, ended), own_error) {
                (Ok(next), own_error) => {
                    // Such as a damaged snapshot, and an older one is tried.
                    own_error.iter().for_each(|error| self.tell_own(error));
                    next
                }
                // The others know what has failed here.
                (Err(end), Some(error)) if self.is_first => return Err(Over::Told(error, end.code)),
                (Err(end), _) => return Ok(report(&end)),
            };
            candidates = self.decide_again(cluster, &load).map_err(|error| {
                let is_missing = error.is::<MissingPart>();
                (error, is_missing)
            });
        }
    }

    /// Another snapshot is tried.
    fn decide_again(&self, cluster: &Cluster, load: &Load) -> Result<Vec<SnapshotId>> {
        let OpenedJob { dir, store, identity, .. } = self.context.opened;
        let resume = resume_point(cluster, self.context.opened, load)?;
        let Decision { record, candidates } = decide(&resume, dir, store, identity, None)?;
        self.context.claimed.ownership.change(|present| {
            let launcher = std::mem::take(&mut present.launcher);
            *present = JobRecord { launcher, ..record };
        })?;
        Ok(candidates)
    }

    /// Starts or resumes the part, together with the others, unless the command cannot be executed. Of an
    /// error, also says whether the snapshot is to blame.
    fn start_part(
        &mut self,
        cluster: &Cluster,
        load: &Load,
        candidates: &[SnapshotId],
    ) -> Result<Result<RunningJob, NotExecuted>, (anyhow::Error, bool)> {
        let context = self.context;
        context.discard_staging().map_err(|error| (error, false))?;
        self.began_from = None;
        let (Some((_, hash)), Some(id)) = (&load.from, candidates.last()) else {
            load.gate.done(Step::Load, Outcome::Done);
            load.gate.release().map_err(|why| (anyhow!(why), false))?;
            let started = start::start(
                (context.config, cluster.network()),
                context.argv,
                context.opened,
                &context.file_rules,
            );
            return started.map_err(|error| (error, false));
        };
        let staging_dir = context.config.store.staging_dir(&context.opened.dir);
        let (gate, job_network) = (Some(&*load.gate), cluster.network());
        let resumer = Resumer { gate, job_network, ..self.resumer(staging_dir.as_deref()) };
        let resumed = resumer.part(id, hash)?;
        self.began_from = Some(resumed.manifest);
        Ok(Ok(resumed.job))
    }

    /// Says what has failed at this node. Node 0 has said it too.
    fn tell_own(&self, error: &anyhow::Error) {
        let what = format!("{COULD_NOT_RESUME}: {}", in_one_line(error));
        tracing::error!("{what}");
        self.context.opened.journal.add(&Entry::new(EventKind::Noted, what));
    }

    fn begin_part(&self, job: RunningJob, load: &Load) -> Result<JobSession<'a>> {
        load.gate.watch(connections(&job));
        let session = JobSession::begin(self.context, job, self.began_from.as_ref())?;
        load.gate.done(Step::Thaw, Outcome::Done);
        let gate = Arc::clone(&load.gate);
        let prove = std::thread::Builder::new().name("nodes-progress".to_owned()).spawn(move || gate.prove());
        prove.context("cannot start a thread")?;
        Ok(session)
    }

    fn serve_part(&mut self, session: JobSession<'_>) -> PartEnd {
        self.began();
        let SessionEnd { outcome, duration, saved_after, ended_at } = session.serve();
        let is_first = std::mem::take(&mut self.is_first);
        let measured = Measured { ended_unix_ms: Some(unix_ms(ended_at)), ..Measured::default() };
        let journal = &self.context.opened.journal;
        match outcome {
            SessionOutcome::Complete => {
                journal.add(
                    &Entry::new(EventKind::Complete, "the job ended with 0 on all nodes").measured(measured),
                );
                PartEnd::Code(0)
            }
            SessionOutcome::OverOnNodes(end) => {
                // The time of a hang counts as one.
                let measured = Measured { begun_unix_ms: end.hung_since_unix_ms, ..measured };
                journal.add(&Entry::new(EventKind::Failed, &end.why[..]).measured(measured));
                let is_resumed = self.began_from.is_some();
                let failure = Failure {
                    // A job that hung had begun to work.
                    is_first_start: is_first && !is_resumed && end.hung_since_unix_ms.is_none(),
                    is_resumed,
                    has_run: true,
                    ran_for: duration,
                    saved_after,
                    is_doubtful: false,
                    // Node 0 looks for it when it decides.
                    next_older_by: None,
                };
                PartEnd::Over(end, failure)
            }
            SessionOutcome::Failed { code, what, .. } => {
                let kind = if code == EXIT_PREEMPTED { EventKind::Ended } else { EventKind::Failed };
                journal.add(&Entry::new(kind, what).remedy(Some(AGAIN)).measured(measured));
                PartEnd::Code(code)
            }
            SessionOutcome::StoppedByUser { code } => PartEnd::Code(code),
            SessionOutcome::Preempted { entry, .. } => {
                journal.add(&entry.measured(measured));
                PartEnd::Code(EXIT_OWN)
            }
        }
    }
}

/// What a failed start or resume of the part is blamed on.
fn blame(error: &anyhow::Error, blames_snapshot: bool) -> Blame {
    match exit_code(error, EXIT_OWN) {
        _ if blames_snapshot => Blame::Snapshot,
        EXIT_BAD_INPUT => Blame::Input,
        _ => Blame::Node,
    }
}

/// The sockets of the job with connections that reach other machines.
fn connections(job: &RunningJob) -> BTreeSet<u64> {
    // A job that has just ended has none.
    let Ok(survey) = job.namespace.survey() else { return BTreeSet::new() };
    let proc = PathBuf::from(format!("/proc/{}/root/proc", job.namespace.init_pid()));
    sockets::of_processes(&proc, &survey.pids)
        .map_or_else(|_| BTreeSet::new(), |own| sockets::connections(&own))
}

/// Which part this launcher has.
pub(super) fn place(cluster: &Cluster) -> PartPlace {
    PartPlace {
        log: cluster.log().0.to_owned(),
        node: cluster.rank(),
        nodes: cluster.nodes(),
        network: cluster.network().map(JobNetwork::part),
        launchers: cluster.launchers(),
    }
}

/// How a session of this part has ended.
enum PartEnd {
    /// The job has ended on all nodes, with this exit code.
    Code(i32),
    /// Another session may follow.
    Over(End, Failure),
}

/// How the job, or a session of it, has ended on all nodes.
#[derive(Debug)]
pub(super) enum NodesEnd {
    Complete,
    /// The session only.
    Over(End),
    End(End),
}

impl NodesEnd {
    pub(super) fn outcome(&self) -> SessionOutcome {
        match self {
            Self::Complete => SessionOutcome::Complete,
            Self::Over(end) => SessionOutcome::OverOnNodes(end.clone()),
            Self::End(end) => {
                let code = report(end);
                SessionOutcome::Failed { code, what: end.why.clone(), error: None, hung_since: None }
            }
        }
    }
}
