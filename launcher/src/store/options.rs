//! The options that say where and how a job's snapshots are stored.

use ckpt_object_medium::{Pace, PausePolicy, StoreUrl};
use ckpt_snapshot::codec::{Compression, Key};
use std::path::PathBuf;
use std::sync::Arc;

use crate::sys::deadline::UPLOAD_LONGEST_PAUSE;
use crate::sys::trust::Trust;

/// Where snapshots are stored, and how.
#[derive(Clone, Debug, Default)]
pub struct StoreOptions {
    /// The store's directory. For a store at an address: the directory for the part that stays on this machine.
    pub dir: PathBuf,
    /// The store's address, unless it is a directory.
    pub url: Option<StoreUrl>,
    /// The object store to which snapshots are uploaded.
    pub upload: Option<StoreUrl>,
    /// The limit of uploads (bytes per second).
    pub upload_limit_bytes_per_s: Option<u64>,
    /// Uploads pause while the job sends more than this (bytes per second).
    pub upload_pause_above_bytes_per_s: Option<u64>,
    /// How chunks are compressed.
    pub compression: Compression,
    /// The key that snapshots are encrypted with.
    pub key: Option<Key>,
    /// Which directories of other users are trusted.
    pub trust: Trust,
}

impl StoreOptions {
    /// The rate of uploads.
    #[must_use]
    pub fn pace(&self) -> Arc<Pace> {
        let policy =
            |above_bytes_per_s| PausePolicy { above_bytes_per_s, longest_pause: UPLOAD_LONGEST_PAUSE };
        let pauses = self.upload_pause_above_bytes_per_s.map(policy);
        Arc::new(Pace::new(self.upload_limit_bytes_per_s, pauses))
    }
}
