//! The snapshot engine: where snapshots of a job are kept, how they are written so that a committed one is whole,
//! and how damage is found before anything is restored from it. No CUDA and no process control in here.
//!
//! - [`StoreRoot`] is the directory that the user names; it holds one [`JobDir`] per job.
//! - [`Store`] is the trait behind which one job's snapshots live; [`DirStore`] is version 1 of it: plain files.
//! - [`Manifest`] describes one snapshot; [`SnapshotId`] names it.
//!
//! docs/format.md gives the layout on disk.

pub mod chunk;
pub mod codec;
pub mod faults;
pub mod medium;
pub mod pack;
pub mod packed;
pub mod sealed;

mod blame;
mod cancel;
mod checked_json;
mod dir_store;
mod error;
mod files;
mod id;
mod job;
mod manifest;
mod marks;
mod rel_path;
mod retention;
mod store;
mod tiers;

pub use cancel::Cancellable;
pub use dir_store::DirStore;
pub use error::{Damage, OpenError, ReadError, SaveError};
pub use files::{SparseWriter, copy_hashed, free_bytes, sync_dir, write_atomically};
pub use id::{IdError, SnapshotId};
pub use job::{JobDir, JobKey, JobLock, JobOutcome, JobRecord, StoreRoot};
pub use manifest::{
    AffinityGroup, AgentsRecord, DataFile, Directory, GpuProcess, HostFacts, JobIdentity, LinkedFile,
    MANIFEST_VERSION, Manifest, OpenFile, ProcessTree, SavedFile, StdioKind, StdioRecord, TtyRecord,
};
pub use marks::{FailedRestore, Mark, Marks, TagError};
pub use rel_path::{RelPath, RelPathError};
pub use retention::{History, KeepEvery, KeepEveryError, Retention, choose_prunable};
pub use store::{Input, Listed, Load, ProgressFn, Reclaimed, SnapshotWriter, Source, Store, Target};
pub use tiers::{CopyError, Place, Placed, Tier, Tiers};
