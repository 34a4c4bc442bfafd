//! The log in the store: who coordinates, and which snapshots exist.
//!
//! Each position takes one record, by a put that fails if there is one. A launcher puts at the position after the last
//! record that it has read, so its put says that nothing has come between.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::messages::{AttemptId, NodeId};

/// The name of a part in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PartId {
    /// The checkpoint.
    pub attempt: AttemptId,
    /// Which part of the job, from 0.
    pub part: u32,
}

/// A part in a global manifest.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PartRecord {
    /// The node rank that stored it.
    pub rank: u32,
    /// The hash of its content.
    pub hash: String,
}

/// A record of the log.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub enum Record {
    /// An epoch begins.
    Epoch {
        /// Higher than all before.
        epoch: u64,
        /// Its coordinator.
        coordinator: NodeId,
    },
    /// A global manifest: the snapshot exists.
    Snapshot {
        /// The checkpoint, with the epoch.
        attempt: AttemptId,
        /// The session that was saved.
        session: AttemptId,
        /// All parts, in order.
        parts: Vec<PartRecord>,
    },
    /// The job has ended with 0 on all nodes. More records follow only if it is resumed once more, on request.
    Complete,
}

/// What a launcher has read of the log, from its beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Log {
    records: Vec<Record>,
}

impl Log {
    /// The position after the last record.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.records.len() as u64
    }

    /// The records from a position on.
    #[must_use]
    pub fn records_from(&self, position: u64) -> &[Record] {
        usize::try_from(position).ok().and_then(|at| self.records.get(at..)).unwrap_or_default()
    }

    /// The newest epoch; 0 before the first.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        let epochs = self.records.iter().rev().filter_map(|record| match record {
            Record::Epoch { epoch, .. } => Some(*epoch),
            Record::Snapshot { .. } | Record::Complete => None,
        });
        epochs.take(1).next().unwrap_or(0)
    }

    /// Whether the job has ended with 0 after a position.
    #[must_use]
    pub fn is_complete_since(&self, position: u64) -> bool {
        (0..).zip(&self.records).any(|(at, record)| at >= position && *record == Record::Complete)
    }

    /// Adds the record at a position; one that is known already, or that does not follow, is left out.
    pub fn add(&mut self, position: u64, record: Record) {
        if position == self.end() {
            self.records.push(record);
        }
    }

    /// The snapshots, newest first.
    pub fn snapshots(&self) -> impl Iterator<Item = (AttemptId, &[PartRecord])> {
        self.records.iter().rev().filter_map(|record| match record {
            Record::Epoch { .. } | Record::Complete => None,
            Record::Snapshot { attempt, parts, .. } => Some((*attempt, &parts[..])),
        })
    }

    /// The newest session of which there is a snapshot.
    pub(crate) fn session(&self) -> Option<AttemptId> {
        let sessions = self.records.iter().filter_map(|record| match record {
            Record::Epoch { .. } | Record::Complete => None,
            Record::Snapshot { session, .. } => Some(*session),
        });
        sessions.max()
    }

    /// Which of these parts can never be in a global manifest any more. The caller coordinates `epoch`, and every attempt
    /// before `open` is over.
    ///
    /// An earlier epoch commits nothing after the record of this one. A later one is not known, and its parts stay.
    #[must_use]
    pub fn garbage(&self, open: AttemptId, parts: &[PartId]) -> Vec<PartId> {
        let committed: BTreeSet<_> = self.snapshots().map(|(attempt, _)| attempt).collect();
        let is_garbage = |part: &&PartId| part.attempt < open && !committed.contains(&part.attempt);
        parts.iter().filter(is_garbage).copied().collect()
    }
}
