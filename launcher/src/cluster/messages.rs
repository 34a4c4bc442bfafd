//! What the launchers of a job's nodes tell each other, beside the messages of `ckpt-cluster`.

use ckpt_cluster::{AttemptId, Envelope};
use ckpt_cut::{FromLauncher, MemberReport, ToLauncher};
use ckpt_protocol::control::LateDoing;
use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The version of the connection and of these messages. All nodes of a job have the same one.
pub const VERSION: u32 = 13;

/// The first message of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// Its node rank.
    pub rank: u32,
    /// Number of nodes, as it was told.
    pub nodes: u32,
    /// Greater for each later start.
    pub incarnation: u64,
    /// The version of its ckpt-run, for messages.
    pub ckpt_run: String,
    /// The name of its machine, for messages.
    pub hostname: String,
    /// The name that an engine has for its machine.
    pub engine_name: Option<String>,
    /// The addresses of its machine.
    pub addresses: BTreeSet<IpAddr>,
    /// With `--network job`: the addresses from which those of the job are chosen.
    pub network_range: Option<Ipv4Net>,
    /// Whether it was told to start from the beginning (`--resume never`).
    pub is_anew: bool,
    /// The snapshot that it was told to resume (`--resume ID`), as it was named.
    pub wanted: Option<String>,
    /// The parts in its store.
    pub parts: Vec<HeldPart>,
    /// Another node of the job of which its store has parts, if it has none of this node.
    pub other_node: Option<u32>,
    /// It was started as another node, or as a spare: its command may be meant for that.
    pub is_moved: bool,
    /// It was there before another launcher was lost, when the run had begun.
    pub rejoins: bool,
    /// The name of the job, without the node.
    pub job: String,
    /// Whether its user has given that name (`--job`). Otherwise it is made from the command, which may differ between nodes.
    pub is_named: bool,
    /// Whether a watchdog looks at its part (`--hang-timeout`).
    pub is_watched: bool,
    /// Whether it can keep snapshots in memory (`--persist-every`).
    pub has_memory: bool,
    /// Whether it keeps replicas (`--replicas`).
    pub has_replicas: bool,
    /// Those that it holds of another node. A spare holds none.
    pub holding: Option<Holding>,
}

/// What a node tells of the replicas that it holds (`--replicas`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// The port at which it takes them.
    pub port: u16,
    /// Those that it holds, of the node before it.
    pub replicas: HeldParts,
}

/// The parts of a node in the memory of another one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldParts {
    /// Each of them.
    pub parts: Vec<HeldPart>,
    /// Local ports of their connections.
    pub ports: BTreeSet<u16>,
}

/// A part in the store of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldPart {
    /// The log that may have its global manifest.
    pub log: String,
    /// The checkpoint.
    pub attempt: AttemptId,
    /// The hash of its content.
    pub hash: String,
    /// The node has been resumed from an older snapshot since: its files do not match the part any more.
    pub is_abandoned: bool,
}

/// The answer once all nodes have joined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Why the newest snapshot is not resumed, if it is not.
    pub passed_over: Option<String>,
    /// The log of this run of the job.
    pub log: String,
    /// The snapshots of which it has the global manifest. All other parts are garbage.
    pub committed: Vec<AttemptId>,
    /// With `--network job`.
    pub network: Option<NetworkPlan>,
    /// Another one at each start of the launchers.
    pub number: u64,
    /// With `--replicas`: where nodes hold those of others.
    pub holders: Vec<HolderPlace>,
}

/// Where a node holds replicas, and what is held of its own part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderPlace {
    /// The node.
    pub rank: u32,
    /// Its machine; `None` is that of node 0, of which each node knows the address at which it has found it.
    pub address: Option<IpAddr>,
    /// The port.
    pub port: u16,
    /// Local ports of connections in the replicas that another node holds of this one.
    pub ports: BTreeSet<u16>,
}

/// The network of the job's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkPlan {
    /// Its number, 24 bits. Another one at each start of the launchers, so that packets of parts that have not ended yet, on
    /// machines that were cut off, reach nobody.
    pub number: u32,
    /// Its addresses. Node 0 has the first one, and so on.
    pub subnet: Ipv4Net,
    /// The machines of the nodes, without that of node 0: each node adds the address at which it has found that.
    pub machines: Vec<(u32, IpAddr)>,
    /// The names of each node.
    pub names: Vec<Vec<String>>,
}

/// Why the job ends on all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// What has happened, with the name of the node.
    pub why: String,
    /// The exit code of ckpt-run on all nodes.
    pub code: i32,
    /// The job was ended as requested: nothing has failed.
    pub is_requested: bool,
    /// It was ended with a last snapshot of all nodes.
    pub is_saved: bool,
    /// The launchers that are left start again, and wait until all nodes are there.
    pub is_to_rejoin: bool,
    /// The job hung: it has done nothing since then, in milliseconds since 1970 by the clock of node 0.
    pub hung_since_unix_ms: Option<u64>,
}

impl End {
    /// Something has failed.
    #[must_use]
    pub fn failure(why: String, code: i32) -> Self {
        let hung_since_unix_ms = None;
        Self { why, code, is_requested: false, is_saved: false, is_to_rejoin: false, hung_since_unix_ms }
    }

    /// Since when the job has done nothing, if it hung.
    #[must_use]
    pub fn hung_since(&self) -> Option<SystemTime> {
        self.hung_since_unix_ms.map(|ms| UNIX_EPOCH + Duration::from_millis(ms))
    }
}

/// How a part of the job has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedPart {
    /// Its exit code, or that of ckpt-run.
    pub code: i32,
    /// Why ckpt-run has ended it.
    pub why: Option<String>,
    /// It hung: how long it had done nothing, in milliseconds. Not since when: the clocks of nodes differ.
    pub hung_ms: Option<u64>,
}

impl EndedPart {
    /// It has ended by itself.
    #[must_use]
    pub fn own(code: i32) -> Self {
        Self { code, why: None, hung_ms: None }
    }
}

/// A part of the job that does nothing, for as long as a job on one machine would hang. It may wait for another part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdlePart {
    /// What its watchdog has seen.
    pub what: String,
    /// How long it has done nothing, in milliseconds.
    pub idle_ms: u64,
}

/// A rank of NCCL, as its node sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankReport {
    /// PID and start time of its process on its node, which tell it from others.
    pub key: (i32, u64),
    /// PID of its process in the job.
    pub pid: i32,
    /// The name of the process.
    pub process: String,
    /// How far it is on its communicators.
    pub members: Vec<MemberReport>,
    /// When it last made a call that others have to match: how long ago, in milliseconds without checkpoints.
    pub called_ms: u64,
    /// What it has done lately.
    pub doing: LateDoing,
    /// If it has done nothing: for how long, in milliseconds.
    pub idle_ms: Option<u64>,
}

/// The job is restarted on all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restart {
    /// What has failed, with the name of the node.
    pub why: String,
    /// How often it was restarted, this time included.
    pub restarts: u32,
    /// The time until then, in milliseconds.
    pub wait_ms: u64,
    /// From which snapshot, for people.
    pub from: String,
}

/// How a job is ended that has not come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopHow {
    /// With a snapshot, however long that takes. A job that cannot be saved runs on.
    Save,
    /// With a snapshot if it is there within the grace period, otherwise without.
    Preempt,
    /// At once.
    Now,
}

/// All messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Message {
    /// From a node that connects.
    Join(Join),
    /// From the coordinator when all have joined.
    Welcome(Welcome),
    /// From the coordinator: the node cannot join.
    Refused {
        /// Why.
        why: String,
        /// Whether it may try again.
        is_transient: bool,
    },
    /// From the coordinator, again and again: this launcher is a spare. Also if another one has its rank.
    Spare {
        /// Whether the job runs.
        is_running: bool,
    },
    /// From the coordinator, to a spare: it takes the place of a node that is not there.
    Take {
        /// The rank of that node.
        rank: u32,
        /// Whether the run has begun that `--resume` asks for.
        has_begun: bool,
    },
    /// From the coordinator, at once: the node has joined, and waits for the others.
    Joined,
    /// From a spare that listens where the coordinator may be: it is not there.
    NotHere,
    /// Of the protocol of snapshots.
    Snapshot(Envelope),
    /// From node 0, which reads the log and does not coordinate yet: it is there.
    Present,
    /// From a node, before it votes: for how long its part has done nothing.
    Progress {
        /// In milliseconds.
        idle_ms: u64,
    },
    /// From the coordinator: the global manifest is in the log.
    Committed {
        /// The snapshot.
        attempt: AttemptId,
        /// For how long no part of the job has done anything, as far as the nodes have said, in milliseconds.
        idle_ms: Option<u64>,
    },
    /// From a node: is this the address of a node?
    Locate {
        /// The address.
        address: IpAddr,
    },
    /// From the coordinator: the answer.
    Located {
        /// The address.
        address: IpAddr,
        /// Whether it is that of a node.
        is_node: bool,
    },
    /// From a node: of its ranks, in Quiesce.
    Ranks {
        /// The checkpoint.
        attempt: AttemptId,
        /// What it says.
        message: FromLauncher,
    },
    /// From the coordinator: the answer.
    Cut {
        /// The checkpoint.
        attempt: AttemptId,
        /// What it says.
        message: ToLauncher,
    },
    /// From a node: its part of the job has ended.
    PartEnded(EndedPart),
    /// From a node: its part of the job does nothing; or works again.
    Idle {
        /// What it does not do.
        part: Option<IdlePart>,
    },
    /// From a node, again and again: how far its ranks are.
    RankReports {
        /// All of them.
        ranks: Vec<RankReport>,
    },
    /// From a node: a snapshot is wanted.
    Request {
        /// In the store: somebody waits for it.
        is_durable: bool,
    },
    /// From the coordinator: the next snapshot goes to the store, and not only to memory.
    Durable,
    /// From a node: the job is to be ended.
    Stop {
        /// Why.
        why: String,
        /// How.
        how: StopHow,
    },
    /// From the coordinator: the job is to be ended with a snapshot. If node 0 is lost meanwhile, it is not resumed.
    Stopping,
    /// From the coordinator: the job was to be ended with a snapshot, cannot be saved, and runs on.
    RunsOn {
        /// Why.
        why: String,
    },
    /// From the coordinator: the job is to end within the grace period, and cannot be saved. Its parts get SIGTERM.
    Terminate {
        /// Why it cannot be saved.
        why: String,
    },
    /// From the coordinator: the session is over on all nodes, for this reason. Another one may follow.
    Over(End),
    /// From the coordinator: the job is restarted.
    Restarting(Restart),
    /// From the coordinator: all parts have ended with 0.
    Complete,
    /// From the coordinator: the job is over. From a node: it cannot go on.
    End(End),
}
