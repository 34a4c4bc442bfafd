//! The snapshot store: saves, verifies, lists and prunes the snapshots of a job. A committed snapshot is complete,
//! and damage is detected before anything is restored from it. This crate knows nothing of CUDA or of processes.
//!
//! - [`StoreRoot`] is the directory that the user names; it holds one [`JobDir`] per job.
//! - [`Store`] is the trait for the snapshots of one job. [`packed::PackStore`] implements the current format,
//!   [`DirStore`] reads version 1 (plain files), and [`Tiers`] combines several stores.
//! - [`medium::Medium`] is the trait for the storage below a packed store: a directory or an object store.
//! - [`Manifest`] describes one snapshot; [`SnapshotId`] names it.
//!
//! docs/format.md specifies the layout on disk.

#![deny(unsafe_code)]

pub mod chunk;
pub mod codec;
pub mod faults;
pub mod medium;
pub mod pack;
pub mod packed;
pub mod sealed;
mod seen;

mod authentic;
mod cancel;
mod checked_json;
mod dir_store;
mod error;
mod files;
mod format;
mod id;
mod job;
mod manifest;
mod marks;
mod numbered;
mod read_failure;
mod records;
mod rel_path;
mod retention;
mod store;
mod tiers;

pub use authentic::Refusal;
pub use cancel::Cancellable;
pub use dir_store::DirStore;
pub use error::{Damage, OpenError, ReadError, SaveError, size_text};
pub use files::{free_bytes, is_in_memory, open_regular, read_regular, sync_dir, write_atomically};
pub use id::{IdError, SnapshotId};
pub use job::{Folder, JobDir, JobKey, JobLock, JobOutcome, JobRecord, StoreRoot};
pub use manifest::{
    AffinityGroup, AgentsRecord, CutRecord, DataFile, Directory, EventCounter, FailedProcess, GpuProcess,
    GpuRecord, HostFacts, InputRecord, JobIdentity, LinkedFile, MANIFEST_VERSION, Manifest, NodePart,
    OpenFile, PartNetwork, ProcessMemory, ProcessTree, SavedFile, SocketOption, SocketOptions, StdioKind,
    StdioRecord, TtyRecord,
};
pub use marks::{FailedRestore, Mark, Marks, TagError};
pub use rel_path::{RelPath, RelPathError};
pub use retention::{FAILURE_LATENCY, History, KeepEvery, KeepEveryError, Retention, choose_prunable};
pub use store::{Input, Listed, Load, ProgressFn, Reclaimed, SnapshotWriter, Source, Store, Target};
pub use tiers::{CopyError, PlacedSnapshot, Tier, TierCopy, Tiers};
