//! What coordinator, launchers and ranks tell each other. Messages of one sender arrive in the order in which they were sent.

use crate::names::{Member, Name};

/// From the coordinator to a rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(tag = "order", rename_all = "snake_case"))]
pub enum Order {
    /// A cut is wanted: report, and begin no step until the targets are known.
    Count {
        /// The number of the attempt, which reports repeat.
        attempt: u64,
    },
    /// The targets, which replace all earlier ones of the attempt.
    Reach {
        /// The attempt.
        attempt: u64,
        /// The version of the targets, from 1.
        version: u64,
        /// How many steps the rank has to take part in; members that are not listed have no target.
        targets: Vec<(Member, u64)>,
        /// Whether no step parks: a communicator is being created, and its missing members are unknown.
        is_open: bool,
    },
    /// The attempt or the checkpoint is over: run on.
    Release,
}

/// From a rank to the coordinator: its whole state, after each change while a cut is wanted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Report {
    /// The attempt.
    pub attempt: u64,
    /// The newest version of the targets that the rank has; 0 before the first.
    pub version: u64,
    /// Number of steps in progress: begun and not yet returned.
    pub in_call: u64,
    /// The rank's communicators and pairs, sorted by member.
    pub members: Vec<MemberReport>,
    /// The calls that are parked.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Vec::is_empty"))]
    pub parked: Vec<String>,
}

/// A communicator in a report.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MemberReport {
    /// The rank's place in it.
    pub member: Member,
    /// Its kind.
    pub role: Role,
    /// Number of steps that the rank has begun.
    pub sequence: u64,
    /// The rank's last call on it; empty before the first.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "String::is_empty"))]
    pub call: String,
}

/// The kind of a communicator, and what the coordinator has to know to find its other members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Role {
    /// A communicator of NCCL.
    Communicator {
        /// Its number of ranks while its creation is in progress, which is its first step. `None` once it exists, and
        /// for a part of another communicator: the split was a step of that one.
        #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
        awaits: Option<u32>,
        /// Another name of it, which other members use (`ncclCommGrow`).
        #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
        alias: Option<Name>,
    },
    /// What one rank of a communicator sends to another.
    Pair {
        /// The communicator.
        of: Name,
        /// The index of the sender in it.
        from: u32,
        /// The index of the receiver in it.
        to: u32,
    },
}

/// A rank as its launcher knows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct NamedRank {
    /// The number of its connection, which no other one of this launcher has.
    pub connection: u64,
    /// Which process it is, for messages.
    pub name: String,
}

/// From a launcher to the coordinator of the job.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case"))]
pub enum FromLauncher {
    /// It takes part in a cut, with these ranks. `None` if its processes have no agents: it waits for nothing, and is told
    /// nothing.
    Begin {
        /// The ranks.
        ranks: Option<Vec<NamedRank>>,
    },
    /// A rank has connected.
    Joined {
        /// The rank.
        rank: NamedRank,
    },
    /// A rank's connection has ended.
    Left {
        /// The connection.
        connection: u64,
    },
    /// What a rank reports.
    Report {
        /// Its connection.
        connection: u64,
        /// The report.
        report: Report,
    },
    /// It accepts no connection since [`ToLauncher::Close`], and knows all processes.
    Closed {
        /// The number in that message.
        round: u64,
    },
    /// It cannot wait any longer.
    GivesUp,
}

/// From the coordinator of the job to a launcher.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case"))]
pub enum ToLauncher {
    /// For a rank.
    Order {
        /// Its connection.
        connection: u64,
        /// The order.
        order: Order,
    },
    /// The known ranks stand at a cut: accept no connection, and say when all processes are known.
    Close {
        /// Counts these messages.
        round: u64,
    },
    /// A rank has joined: accept connections again.
    Open,
    /// It is the cut of all ranks of the job. They stay parked until the launcher releases them.
    Reached {
        /// Whether any rank has a communicator.
        has_communicators: bool,
        /// Number of attempts.
        attempts: u32,
    },
    /// There is none. All ranks run, or have been told to.
    Failed {
        /// Why.
        why: String,
    },
}
