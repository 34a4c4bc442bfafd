//! What a launcher does for the state machines, and the times that they use.

use std::fmt;
use std::time::Duration;

use crate::log::Record;
use crate::messages::{AttemptId, Blame, Message, Order, Step};

/// Numbers and times. All launchers of a job have the same ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Settings {
    /// Number of launchers that the engine starts.
    pub nodes: u32,
    /// Number of parts of the job; further nodes are spares.
    pub parts: u32,
    /// The interval of the coordinator's beats.
    pub beat: Duration,
    /// A node that is not heard for this long is lost; so is a coordinator.
    pub silence: Duration,
    /// The time after which the next node rank is asked to coordinate.
    pub stagger: Duration,
    /// After this time an order, or a request to the store, without an answer is repeated.
    pub repeat: Duration,
    /// For how long a resume waits for spares, and for nodes that were away, once there are enough nodes.
    pub gather: Duration,
    /// For how long a node may hold its tasks in a checkpoint.
    pub lease: Duration,
    /// For how long a node may hold its tasks in a resume.
    pub load_lease: Duration,
    /// The time for each of the steps in which the job stands.
    pub step_limit: Duration,
    /// The time for copying files before the job stands, and for storing or loading a part.
    pub transfer_limit: Duration,
    /// So many failures that a snapshot is to blame for lead to an older one.
    pub tries: u32,
}

impl Settings {
    pub(crate) fn limit(&self, step: Step, is_resume: bool) -> Duration {
        match step {
            Step::Prepare | Step::Store | Step::Load => self.transfer_limit,
            // Processes that run may still load memory of their GPUs.
            Step::Thaw if is_resume => self.transfer_limit,
            _ => self.step_limit,
        }
    }
}

/// The store's answer to a put.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PutAnswer {
    /// The record is in the log.
    Done,
    /// The position has this record.
    Taken(Record),
}

/// Why an attempt was aborted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A node could not do a step, or voted no.
    Failed {
        /// The node.
        rank: u32,
        /// Its words.
        reason: String,
        /// What has to change.
        blame: Blame,
    },
    /// The deadline of a step has passed.
    Late {
        /// The nodes that had not done the step.
        ranks: Vec<u32>,
    },
    /// Nodes are lost, or the part of the job there has ended.
    Lost {
        /// The nodes.
        ranks: Vec<u32>,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |ranks: &[u32]| ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        match self {
            Self::Failed { rank, reason, .. } => write!(f, "node {rank}: {reason}"),
            Self::Late { ranks } => write!(f, "not in time: node {}", names(ranks)),
            Self::Lost { ranks } => {
                write!(f, "lost, or its part of the job has ended: node {}", names(ranks))
            }
        }
    }
}

/// What people and the launcher's other parts learn from the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// This launcher coordinates from now on.
    Elected {
        /// The epoch.
        epoch: u64,
    },
    /// Another launcher coordinates, or none does.
    Deposed,
    /// A session runs on all its nodes.
    Running {
        /// The session.
        session: AttemptId,
    },
    /// A snapshot is committed.
    Committed {
        /// The checkpoint.
        attempt: AttemptId,
    },
    /// An attempt is over without a result.
    Aborted {
        /// The attempt.
        attempt: AttemptId,
        /// In which step.
        step: Step,
        /// Why.
        reason: Reason,
    },
    /// At least half of the nodes have done a step for a while, and wait for these.
    Slow {
        /// The step.
        step: Step,
        /// The nodes that have not done it.
        ranks: Vec<u32>,
    },
    /// The session is over: nodes were lost, or parts of the job ended.
    Lost {
        /// The session.
        session: AttemptId,
        /// The nodes.
        ranks: Vec<u32>,
    },
}

/// What the caller has to do, in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send a message to a node rank.
    Send {
        /// The rank.
        to: u32,
        /// The message.
        message: Message,
    },
    /// Begin a step; [`Peer::finished`](crate::Peer::finished) reports its end.
    Perform {
        /// The attempt.
        attempt: AttemptId,
        /// The step.
        order: Order,
    },
    /// Now: stop what is in progress, remove the packet rule, let the tasks run.
    Release,
    /// Now: stop what is in progress, remove the packet rule, then kill the part.
    Kill,
    /// Read the log from this position to its end, for [`Peer::read`](crate::Peer::read).
    Read {
        /// The position.
        from: u64,
    },
    /// Put a record if the position has none, for [`Peer::put`](crate::Peer::put).
    Put {
        /// The position.
        position: u64,
        /// The record.
        record: Record,
    },
    /// Report.
    Event(Event),
}
