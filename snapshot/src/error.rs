//! What can go wrong with a store, one enum per operation.

use crate::blame::{Blame, blame};
use crate::{IdError, RelPathError};
use std::io;
use std::path::PathBuf;

/// Opening a store or a job in it failed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A step on the file system failed.
    #[error("cannot {step} {path}: {source}", path = path.display())]
    Io {
        /// What was being done.
        step: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The directory holds other things and is not a store.
    #[error("{} is not a ckpt-run store: it has files in it but no store.json. Name another directory with --store", .0.display())]
    NotAStore(PathBuf),
    /// `store.json` does not parse.
    #[error("{} does not read as a store's description ({reason}). It may be damaged: restore that file from a backup, or name another directory with --store", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Written by a newer ckpt-run.
    #[error("the store {} has version {found}; this ckpt-run reads versions up to {known}. Use the ckpt-run that wrote it, or a newer one", path.display())]
    Newer {
        /// The store.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest that this build knows.
        known: u32,
    },
    /// Another launcher has the job.
    #[error(
        "the job {job} is already running under another ckpt-run (process {pid}). Give this one a name of its own with --job NAME, or end the other first"
    )]
    Locked {
        /// The job.
        job: String,
        /// The process that holds the lock, as far as known.
        pid: String,
        /// Whether it holds it for work on the store, which ends by itself.
        upkeep: bool,
    },
    /// A job's name that cannot be a directory.
    #[error(
        "{0:?} cannot be a job's name: use letters, digits, '.', '_' and '-', at most 100, not beginning with '.'"
    )]
    BadName(String),
}

/// One thing that is wrong with a snapshot on disk: the snapshot is not to be restored, an older one may be.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    /// The manifest cannot be read or does not parse.
    #[error("its manifest does not read: {0}")]
    Manifest(String),
    /// The manifest's own checksum does not match.
    #[error("its manifest has been altered: checksum {found}, recorded {recorded}")]
    ManifestChecksum {
        /// Computed now.
        found: String,
        /// Recorded.
        recorded: String,
    },
    /// The manifest describes another snapshot than the directory it lies in.
    #[error("its manifest belongs to the snapshot {0}")]
    WrongId(String),
    /// A data file is missing or cannot be read.
    #[error("{path}: {source}")]
    Unreadable {
        /// Relative to the snapshot.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// A chunk of a data file is in no pack.
    #[error("{path}: its chunk {chunk} is in no pack of the store")]
    NoChunk {
        /// The data file.
        path: String,
        /// The chunk's name.
        chunk: String,
    },
    /// A pack or an index is altered.
    #[error("{object}: {reason}")]
    Object {
        /// The object's path or address.
        object: String,
        /// What is wrong.
        reason: String,
    },
    /// A data file has the wrong length.
    #[error("{path} has {found} bytes, {recorded} were written")]
    Length {
        /// Relative to the snapshot.
        path: String,
        /// Now.
        found: u64,
        /// As written.
        recorded: u64,
    },
    /// A data file has the wrong content.
    #[error("{path} has been altered: its checksum does not match")]
    Checksum {
        /// Relative to the snapshot.
        path: String,
    },
}

impl Damage {
    /// Whether it is there for certain. Otherwise it may pass: a file system in the network gives the same error when its
    /// server is away. Nothing is to be removed because of it.
    #[must_use]
    pub fn is_certain(&self) -> bool {
        !matches!(self, Self::Unreadable { source, .. } if blame(source) != Blame::Content)
    }
}

/// Reading a snapshot failed.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// No committed snapshot of that name.
    #[error("there is no snapshot {0} in this store")]
    Missing(String),
    /// More than one snapshot answers to a short form.
    #[error("{text:?} may mean {candidates}: give the whole ID")]
    Ambiguous {
        /// What was asked for.
        text: String,
        /// The IDs, comma-separated.
        candidates: String,
    },
    /// Damage: an older snapshot may do.
    #[error("the snapshot {id} is damaged: {damage}")]
    Damaged {
        /// The snapshot.
        id: String,
        /// What is wrong.
        damage: Damage,
    },
    /// Written by a newer ckpt-run.
    #[error(
        "the snapshot {id} has manifest version {found}; this ckpt-run reads versions up to {known}. Use the ckpt-run that wrote it, or a newer one"
    )]
    Newer {
        /// The snapshot.
        id: String,
        /// Its version.
        found: u32,
        /// The newest that this build knows.
        known: u32,
    },
    /// An object of the store was written by a newer ckpt-run.
    #[error(
        "{what} has version {found}; this ckpt-run reads versions up to {known}. Use the ckpt-run that wrote it, or a newer one"
    )]
    NewerObject {
        /// The object's path or address.
        what: String,
        /// Its version.
        found: u32,
        /// The newest that this build knows.
        known: u32,
    },
    /// A path that leaves the snapshot: not damage but somebody's doing.
    #[error(
        "the snapshot {id} is refused: {source}. ckpt-run never writes such a manifest: find out who did"
    )]
    Hostile {
        /// The snapshot.
        id: String,
        /// The path.
        source: RelPathError,
    },
    /// No key, or the wrong one.
    #[error("{what} cannot be read: {reason}")]
    Key {
        /// What was to be read.
        what: String,
        /// Which key is missing.
        reason: &'static str,
    },
    /// What was read has no place to go to.
    #[error("cannot put {path} in its place: {source}")]
    Target {
        /// The data file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// Not a snapshot's name.
    #[error(transparent)]
    Id(#[from] IdError),
    /// The store itself cannot be read.
    #[error("cannot {step} {path}: {source}", path = path.display())]
    Io {
        /// What was being done.
        step: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// Saving a snapshot failed. Older snapshots are as they were.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// There is, or was, not enough room.
    #[error("no room in {path}: the snapshot needs about {needed}, {available} are free. Free some space, lower --keep, or name another --store", path = path.display(), needed = human(*needed_bytes), available = human(*available_bytes))]
    NoSpace {
        /// The store's directory.
        path: PathBuf,
        /// Bytes needed, as estimated.
        needed_bytes: u64,
        /// Bytes free.
        available_bytes: u64,
    },
    /// What was to be stored cannot be read.
    #[error("cannot read {path}, which is to be stored: {source}")]
    Source {
        /// The data file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// Somebody else has committed a snapshot of this name.
    #[error(
        "there is a snapshot {0} already: another ckpt-run writes to the same job in the same store. Let one of them end, or give one of them a name of its own with --job NAME"
    )]
    Taken(String),
    /// Somebody else has removed from the store what the snapshot shares with older ones.
    #[error(
        "the snapshot {0} is given up: another ckpt-run removed packs from the same store while it was written. Run `ckpt-run checkpoint`, or wait for the next one: it stores what is missing"
    )]
    Overtaken(String),
    /// The store's content has to be read for it, and cannot be.
    #[error(transparent)]
    Store(#[from] ReadError),
    /// A step failed.
    #[error("cannot {step} {path}: {source}", path = path.display())]
    Io {
        /// What was being done.
        step: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

fn human(bytes: u64) -> String {
    #[allow(clippy::cast_precision_loss, reason = "for people, three digits")]
    let bytes = bytes as f64;
    match bytes {
        b if b >= 1e9 => format!("{:.2} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.0} kB", b / 1e3),
    }
}
