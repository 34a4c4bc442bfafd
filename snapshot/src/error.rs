//! The errors of a store, one enum per operation.

use crate::authentic::Refusal;
use crate::read_failure::{ReadFailure, classify};
use crate::{IdError, RelPathError};
use std::io;
use std::path::{Path, PathBuf};

/// Opening a store, or a job in it, failed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A step on the file system failed.
    #[error("cannot {step} {path}: {source}", path = path.display())]
    Io {
        /// What was being done.
        step: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The directory has other files in it and is not a store.
    #[error("{} is not a ckpt-run store: the directory has files but no store.json. Name another directory with --store", .0.display())]
    NotAStore(PathBuf),
    /// A record of the store (`store.json`, `job/N.json`, `marks/N.json`) is not valid.
    #[error("{} does not read as a record of ckpt-run: {reason}. The file may be damaged: restore it from a backup, or {}", path.display(), way_out(path))]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A record (`job/N.json`, `marks/N.json`) is not one of the holder of the key.
    #[error("{} does not count: {refusal}", path.display())]
    Unauthentic {
        /// The file or address.
        path: PathBuf,
        /// Why, and what to do.
        refusal: Refusal,
    },
    /// The job's records are older than those that this machine has seen.
    #[error("{} has number {number}, and this machine has seen number {seen_number}: somebody has put back an older state of the job. Remove {} if that is what you want", path.display(), seen.display())]
    Replayed {
        /// The file or address.
        path: PathBuf,
        /// Its number.
        number: u64,
        /// The highest number that was seen.
        seen_number: u64,
        /// The file, outside of the store, with what was seen.
        seen: PathBuf,
    },
    /// A job is to be changed whose record has a code of a key, and no key was named.
    #[error("{} was written with a key, and only with that key can the job be changed. Use --encrypt-key-file, or give the job another name (--job)", .0.display())]
    NeedsKey(PathBuf),
    /// There is a symbolic link in the directory of a job.
    #[error("{} is a symbolic link. ckpt-run follows none in a job's directory, since it could lead out of the store. Remove it, or replace it by what it names", .0.display())]
    Link(PathBuf),
    /// Written by a newer ckpt-run.
    #[error("{} has version {found}; this ckpt-run reads versions up to {known}. Use the ckpt-run that wrote it, or a newer one", path.display())]
    Newer {
        /// The store's directory or the record.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest version that this build reads.
        known: u32,
    },
    /// Another launcher runs the job.
    #[error(
        "the job {job} is already running under another ckpt-run (process {pid}). Give this job a name of its own with --job NAME, or end the other one first"
    )]
    Locked {
        /// The job.
        job: String,
        /// The process that holds the lock, if known.
        pid: String,
        /// Whether it holds the lock for maintenance of the store, which ends by itself.
        is_maintenance: bool,
    },
    /// The name of a job is not a valid directory name.
    #[error(
        "{0:?} cannot be a job's name: use at most 100 letters, digits, '.', '_' and '-', not beginning with '.'"
    )]
    BadName(String),
}

/// What to do about a damaged record without a backup.
fn way_out(path: &Path) -> &'static str {
    // `job/N.json` and `marks/N.json`, by `store.json`.
    let is_numbered = path.file_stem().is_some_and(|stem| stem.to_string_lossy().parse::<u64>().is_ok());
    match is_numbered {
        true => {
            "move it away: the record before it counts then, without what was recorded last, and the snapshots stay"
        }
        false => "name another directory with --store",
    }
}

/// Why a stored snapshot must not be restored. An older one may be intact.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    /// The manifest is missing parts or does not parse.
    #[error("its manifest is damaged: {0}")]
    Manifest(String),
    /// The checksum of the manifest does not match.
    #[error("its manifest has been altered: its checksum is {found}, not the recorded {recorded}")]
    ManifestChecksum {
        /// Computed now.
        found: String,
        /// Recorded.
        recorded: String,
    },
    /// The manifest describes another snapshot.
    #[error("its manifest belongs to the snapshot {0}")]
    WrongId(String),
    /// A data file, pack or manifest is missing or cannot be read.
    #[error("{path}: {source}")]
    Unreadable {
        /// A data file's path relative to the snapshot, or the path or address of an object.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// A chunk of a data file is missing from all packs.
    #[error("{path}: its chunk {chunk} is in no pack of the store")]
    NoChunk {
        /// The data file.
        path: String,
        /// The chunk's name.
        chunk: String,
    },
    /// The indexes do not list all of a data file, or only in packs that are about to be deleted. A deletion may be
    /// withdrawn, and an index be repaired.
    #[error("the store lacks data of {path}. `ckpt-run verify` says what")]
    Lacking {
        /// The data file.
        path: String,
    },
    /// A pack or an index has been altered.
    #[error("{object}: {reason}")]
    Object {
        /// The object's path or address.
        object: String,
        /// What is wrong.
        reason: String,
    },
    /// A data file has the wrong length.
    #[error("{path} has {found} bytes, but {recorded} bytes were written")]
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
    /// Whether the damage is certain. An I/O error may be temporary: a network file system reports the same error while
    /// its server is down. Nothing may be removed because of uncertain damage.
    #[must_use]
    pub fn is_certain(&self) -> bool {
        match self {
            Self::Unreadable { source, .. } => classify(source) == ReadFailure::Damaged,
            Self::Lacking { .. } => false,
            _ => true,
        }
    }
}

/// Reading a snapshot failed.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// No committed snapshot has that name.
    #[error("there is no snapshot {0} in this store")]
    Missing(String),
    /// An abbreviated ID matches several snapshots.
    #[error("{text:?} is ambiguous, it matches {candidates}: give the whole ID")]
    Ambiguous {
        /// The abbreviation.
        text: String,
        /// The IDs, comma-separated.
        candidates: String,
    },
    /// The snapshot is damaged, or a part of it cannot be read. An older snapshot may be intact.
    #[error("the snapshot {id} {}: {damage}", if damage.is_certain() { "is damaged" } else { "cannot be read" })]
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
        /// The newest version that this build reads.
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
        /// The newest version that this build reads.
        known: u32,
    },
    /// The manifest has a path that leaves the snapshot. That is not damage: somebody has changed the manifest.
    #[error(
        "the snapshot {id} is refused: {source}. ckpt-run never writes such a manifest: find out who did"
    )]
    Hostile {
        /// The snapshot.
        id: String,
        /// The path.
        source: RelPathError,
    },
    /// The encryption key is missing or wrong.
    #[error("{what} cannot be read: {reason}")]
    Key {
        /// The object.
        what: String,
        /// What is wrong with the key.
        reason: &'static str,
    },
    /// The target of a data file cannot be written.
    #[error("cannot write the data file {path} to its target: {source}")]
    Target {
        /// The data file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// Not a snapshot ID.
    #[error(transparent)]
    Id(#[from] IdError),
    /// The store itself cannot be read.
    #[error("cannot {step} {path}: {source}", path = path.display())]
    Io {
        /// What was being done.
        step: &'static str,
        /// The file, directory or object.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// Saving a snapshot failed. Older snapshots are unchanged.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// There is not enough free space.
    #[error("no room in {path}: the snapshot needs at least {needed}, and {available} are free. Free some space, lower --keep, or name another place (--store, --upload)", path = path.display(), needed = size_text(*needed_bytes), available = size_text(*available_bytes))]
    NoSpace {
        /// The store's directory.
        path: PathBuf,
        /// Estimate of the bytes needed.
        needed_bytes: u64,
        /// Bytes free.
        available_bytes: u64,
    },
    /// The content of a data file cannot be read.
    #[error("cannot read the content of {path} to store it: {source}")]
    Source {
        /// The data file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// A snapshot of this name exists already.
    #[error(
        "there is a snapshot {0} already: another ckpt-run writes to the same job in the same store. Let one of them end, or give one of them a name of its own with --job NAME"
    )]
    Taken(String),
    /// Another process removes chunks that the snapshot shares with older ones.
    #[error(
        "the snapshot {0} was not saved: packs of the store were deleted meanwhile, or another ckpt-run is deleting them. Run `ckpt-run checkpoint`, or wait for the next checkpoint: it stores what is missing"
    )]
    Overtaken(String),
    /// The store's indexes or manifests cannot be read.
    #[error(transparent)]
    Store(#[from] ReadError),
    /// A step failed.
    #[error("cannot {step} {path}: {source}", path = path.display())]
    Io {
        /// What was being done.
        step: &'static str,
        /// The file, directory or object.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// `1.23 GB`.
#[must_use]
pub fn size_text(bytes: u64) -> String {
    #[allow(clippy::cast_precision_loss, reason = "for people, three digits")]
    let bytes = bytes as f64;
    match bytes {
        b if b >= 1e9 => format!("{:.2} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b if b >= 1e3 => format!("{:.1} kB", b / 1e3),
        b => format!("{b:.0} B"),
    }
}
