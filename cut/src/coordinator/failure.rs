//! Why no cut was possible, by ranks and calls.

use std::collections::BTreeSet;
use std::fmt;

use super::RankId;
use crate::messages::Role;
use crate::names::{Member, Name};

/// The tries of a request are used up.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Failure {
    /// Number of attempts.
    pub attempts: u32,
    /// What the last attempt waited for.
    pub blockers: Vec<Blocker>,
    /// Ranks that stood ready, with the calls that were parked.
    pub parked: Vec<(RankId, Vec<String>)>,
}

/// So many calls are named of a rank: it may send to many others.
const MOST_CALLS: usize = 4;

/// What a rank is in a communicator, or which pair of its ranks it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NamedMember {
    /// The communicator, or pair, and the place in it.
    pub member: Member,
    /// Its kind; `None` if the rank has not reported it.
    pub role: Option<Role>,
}

impl fmt::Display for NamedMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Member { communicator, index } = self.member;
        match self.role {
            Some(Role::Pair { of, from, to }) => {
                write!(f, "in which rank {from} sends to rank {to} of communicator {of}")
            }
            _ => write!(f, "as rank {index} of communicator {communicator}"),
        }
    }
}

/// What an attempt waits for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Blocker {
    /// A rank has not answered.
    Silent {
        /// The rank.
        rank: RankId,
    },
    /// A rank is in a call that does not return.
    InCall {
        /// The rank.
        rank: RankId,
        /// Its last calls on its communicators, and its places there.
        calls: Vec<(String, NamedMember)>,
    },
    /// A rank has to take more steps on a communicator and does not reach them: it waits outside NCCL.
    Behind {
        /// The rank.
        rank: RankId,
        /// Its place in the communicator.
        place: NamedMember,
        /// Its steps so far.
        sequence: u64,
        /// The steps that other ranks have begun.
        target: u64,
        /// Its last call on the communicator.
        call: String,
    },
    /// A communicator is being created, and some of its ranks have not begun that.
    Incomplete {
        /// The communicator.
        communicator: Name,
        /// Number of its ranks that have.
        joined: u32,
        /// Number of its ranks.
        ranks: u32,
    },
}

impl Blocker {
    #[cfg(test)]
    pub(crate) fn rank_mut(&mut self) -> Option<&mut RankId> {
        match self {
            Self::Silent { rank } | Self::InCall { rank, .. } | Self::Behind { rank, .. } => Some(rank),
            Self::Incomplete { .. } => None,
        }
    }

    fn describe(&self, name: &dyn Fn(RankId) -> String) -> String {
        match self {
            Self::Silent { rank } => format!("{} has not answered", name(*rank)),
            Self::InCall { rank, calls } => {
                let (first, others) = calls.split_at(calls.len().min(MOST_CALLS));
                let mut named: Vec<_> = first.iter().map(|(call, place)| format!("{call} {place}")).collect();
                if !others.is_empty() {
                    let calls: BTreeSet<_> = others.iter().map(|(call, _)| &**call).collect();
                    let calls = calls.into_iter().collect::<Vec<_>>().join(", ");
                    named.push(format!("{calls} on {} more", others.len()));
                }
                let last = match named.join(", ") {
                    none if none.is_empty() => none,
                    calls => format!(" (the last on its communicators: {calls})"),
                };
                format!("{} is in a call of NCCL that does not return{last}", name(*rank))
            }
            Self::Behind { rank, place, sequence, target, call } => {
                let after = if call.is_empty() { String::new() } else { format!(" after {call}") };
                format!("{} has begun {sequence} of {target} steps {place} and waits{after}", name(*rank))
            }
            Self::Incomplete { communicator, joined, ranks } => {
                format!("communicator {communicator} is being created with {joined} of {ranks} ranks")
            }
        }
    }
}

impl Failure {
    /// One clause per blocker; `name` says which process a rank is.
    #[must_use]
    pub fn describe(&self, name: impl Fn(RankId) -> String) -> String {
        let plural = if self.attempts == 1 { "" } else { "s" };
        let blockers = self.blockers.iter().map(|blocker| blocker.describe(&name));
        let parked = self.parked.iter();
        let parked =
            parked.map(|(rank, calls)| format!("{} is parked before {}", name(*rank), calls.join(", ")));
        let clauses = blockers.chain(parked).collect::<Vec<_>>().join("; ");
        let colon = if clauses.is_empty() { "" } else { ": " };
        format!("the ranks did not reach a common step in {} attempt{plural}{colon}{clauses}", self.attempts)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe(|rank| rank.to_string()))
    }
}
