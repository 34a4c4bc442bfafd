//! What the launchers of a job's nodes tell each other. Messages may be lost, late, doubled or in another order.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::log::PartId;

/// The version of the messages. All launchers of a job have the same one.
pub const VERSION: u32 = 4;

/// A message on its way.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Envelope {
    /// [`VERSION`] of the sender.
    pub version: u32,
    /// The sender's node rank.
    pub from: u32,
    /// The message; JSON of another version need not have the same form.
    pub message: Message,
}

/// A message of another version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the launcher of node {from} speaks version {found} of the cluster protocol and this one version {VERSION}; \
     install the same version of ckpt-run on all nodes"
)]
pub struct OtherVersion {
    /// The sender.
    pub from: u32,
    /// Its version.
    pub found: u32,
}

impl Envelope {
    /// A message of this version.
    #[must_use]
    pub fn new(from: u32, message: Message) -> Self {
        Self { version: VERSION, from, message }
    }

    /// The sender and the message.
    ///
    /// # Errors
    /// The message is of another version.
    pub fn open(self) -> Result<(u32, Message), OtherVersion> {
        if self.version == VERSION {
            Ok((self.from, self.message))
        } else {
            Err(OtherVersion { from: self.from, found: self.version })
        }
    }
}

/// A launcher: the node rank that the engine gave, and which of the launchers that had it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId {
    /// The node rank.
    pub rank: u32,
    /// Greater for each later start of a launcher with this rank.
    pub incarnation: u64,
}

/// An attempt of a checkpoint or a resume. The one of a resume is also the name of the session that it starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AttemptId {
    /// The epoch of its coordinator.
    pub epoch: u64,
    /// Counts the attempts of this epoch, from 1.
    pub number: u64,
}

/// A step of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// See the [`Order`] of the same name.
    Prepare,
    /// As above.
    Quiesce,
    /// As above.
    Freeze,
    /// As above.
    Dump,
    /// As above.
    Unblock,
    /// As above.
    Thaw,
    /// As above.
    Store,
    /// As above.
    Prove,
    /// As above.
    End,
    /// As above.
    Load,
}

impl Step {
    /// The steps of a checkpoint.
    pub const CHECKPOINT: &[Self] = &[
        Self::Prepare,
        Self::Quiesce,
        Self::Freeze,
        Self::Dump,
        Self::Unblock,
        Self::Thaw,
        Self::Store,
        Self::Prove,
    ];
    /// The steps of a resume.
    pub const RESUME: &[Self] = &[Self::End, Self::Load, Self::Unblock, Self::Thaw, Self::Prove];
}

/// A step, with what the node has to know for it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum Order {
    /// Votes on a checkpoint of this session: memory, refusals. Changes nothing.
    Prepare {
        /// The session.
        session: AttemptId,
    },
    /// Brings the ranks of this node to a consistent cut of their collectives. The lease begins.
    Quiesce {
        /// For how long the node may hold its tasks, until it has thawed them.
        lease: Duration,
    },
    /// Puts the packet rule in place, then freezes the tasks.
    Freeze,
    /// Captures the tasks, which stay frozen.
    Dump,
    /// Removes the packet rule. The tasks stay frozen.
    Unblock,
    /// Lets the tasks run.
    Thaw,
    /// Stores the part.
    Store,
    /// Waits until the tasks have made progress.
    Prove,
    /// Kills what is left of earlier sessions, after the packet rule has been removed.
    End,
    /// Makes a network namespace with the packet rule, sets the forwarding entries, puts files back and restores a part,
    /// or prepares the start of the command. The tasks stay frozen. A lease begins.
    Load {
        /// For how long the node may hold its tasks, until it has thawed them.
        lease: Duration,
        /// The part to restore, with the hash of its content; `None` at the job's beginning.
        from: Option<(PartId, String)>,
        /// Which part of the job the node becomes.
        part: u32,
        /// The node rank at which each part is, for the forwarding entries. Empty: each is at the node of its own number.
        places: Vec<u32>,
    },
}

impl Order {
    /// Its step.
    #[must_use]
    pub fn step(&self) -> Step {
        match self {
            Self::Prepare { .. } => Step::Prepare,
            Self::Quiesce { .. } => Step::Quiesce,
            Self::Freeze => Step::Freeze,
            Self::Dump => Step::Dump,
            Self::Unblock => Step::Unblock,
            Self::Thaw => Step::Thaw,
            Self::Store => Step::Store,
            Self::Prove => Step::Prove,
            Self::End => Step::End,
            Self::Load { .. } => Step::Load,
        }
    }
}

/// What has become of a step at a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// It is done.
    Done,
    /// The part is stored.
    Stored {
        /// The hash of its content.
        hash: String,
    },
    /// It failed, or the node votes no. The node has let go.
    Failed {
        /// Why.
        reason: String,
        /// What has to change.
        blame: Blame,
    },
}

/// The cause of a failure, as far as it decides what follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Blame {
    /// The node, or nothing that is known: another try may succeed.
    Node,
    /// The snapshot: it cannot be read, or it cannot be restored. An older one is tried.
    Snapshot,
    /// What the user has given, options or a machine: every try is refused until that is another.
    Input,
    /// The node lacks memory for a snapshot in memory.
    Memory,
}

/// The part of the job at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionState {
    /// The resume that started it.
    pub id: AttemptId,
    /// Which part.
    pub part: u32,
    /// Whether its tasks have been released.
    pub is_running: bool,
}

/// A node's state, in answer to each [`Message::Beat`], and while it knows no coordinator.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Hello {
    /// The node.
    pub node: NodeId,
    /// The highest epoch that it knows.
    pub epoch: u64,
    /// Whether it hears from no coordinator and wants the receiver to become one.
    pub is_leaderless: bool,
    /// The newest attempt that it knows.
    pub newest: AttemptId,
    /// The part of the job at the node.
    pub session: Option<SessionState>,
}

/// All messages.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub enum Message {
    /// From a coordinator to all, at an interval: it is there.
    Beat {
        /// Its epoch.
        epoch: u64,
    },
    /// From a node to the coordinator, or to a candidate.
    Hello(Hello),
    /// From the coordinator to a node: perform a step. Repeated until there is a report.
    Order {
        /// The launcher that is meant.
        to: NodeId,
        /// The attempt.
        attempt: AttemptId,
        /// The step.
        order: Order,
    },
    /// From a node to the coordinator.
    Report {
        /// The node.
        node: NodeId,
        /// The attempt.
        attempt: AttemptId,
        /// The step.
        step: Step,
        /// What has become of it.
        outcome: Outcome,
    },
    /// From the coordinator to a node: the attempt is over, let go.
    Abort {
        /// The launcher that is meant.
        to: NodeId,
        /// The attempt.
        attempt: AttemptId,
        /// Why, for people.
        reason: String,
    },
    /// From the coordinator to a node that was away: the job runs without it, its part has to end.
    Over {
        /// The launcher that is meant.
        to: NodeId,
        /// The coordinator's epoch.
        epoch: u64,
        /// The session that is over.
        session: AttemptId,
    },
}
