//! The options that say where and how a job's snapshots are stored.

use crate::store::mounted;
use crate::sys::deadline::{STORE_RETRY_TIMEOUT, UPLOAD_LONGEST_PAUSE};
use crate::sys::error::bad_input;
use crate::sys::trust::Trust;
use anyhow::{Result, anyhow};
use ckpt_object_medium::{Pace, PausePolicy, Retry, StoreUrl};
use ckpt_snapshot::JobDir;
use ckpt_snapshot::codec::{Codec, Compression, Key};
use serde::Deserialize;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Where CRIU's images may be between the job and the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StagingPlace {
    /// As `Any`, but as `Memory` if the store is encrypted.
    #[default]
    Auto,
    /// In memory only.
    Memory,
    /// On the store's disk if memory does not do.
    Any,
}

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
    /// Where CRIU's images may be between the job and the store.
    pub staging: StagingPlace,
    /// Which directories of other users are trusted.
    pub trust: Trust,
    /// How long requests to object stores are retried.
    pub retry: Retry,
}

impl StoreOptions {
    /// How long a start, or a command, retries a request that it cannot do without.
    #[must_use]
    pub fn short_retry(&self) -> Retry {
        Retry { give_up_after: STORE_RETRY_TIMEOUT.min(self.retry.give_up_after), ..self.retry.clone() }
    }

    /// How what is in the store is compressed and encrypted.
    #[must_use]
    pub fn codec(&self) -> Codec {
        Codec::new(self.compression, self.key.as_ref())
    }

    /// The store's path or address.
    #[must_use]
    pub fn name(&self) -> String {
        self.url.as_ref().map_or_else(|| self.dir.display().to_string(), ToString::to_string)
    }

    /// Checks that nobody else can put snapshots into the store, as far as it is in a directory.
    ///
    /// # Errors
    /// Bad input: another user can.
    pub fn check_trust(&self) -> Result<()> {
        self.trust.check_store(&self.dir).map_err(bad_input)?;
        self.url.as_ref().map_or(Ok(()), |url| self.check_address(url))
    }

    /// The same of a job's directories.
    ///
    /// # Errors
    /// As [`Self::check_trust`].
    pub fn check_trust_of(&self, job: &JobDir) -> Result<()> {
        let shared = [&self.url, &self.upload].into_iter().flatten().filter_map(StoreUrl::directory);
        let shared = shared.map(|dir| dir.join("jobs").join(job.key().as_str()));
        for dir in shared.chain([job.path().to_owned()]) {
            self.trust.check_store(&dir).map_err(bad_input)?;
        }
        Ok(())
    }

    /// The same of an address in an object store: it may be one of a directory.
    ///
    /// # Errors
    /// As [`Self::check_trust`].
    pub fn check_address(&self, url: &StoreUrl) -> Result<()> {
        url.directory().map_or(Ok(()), |dir| self.trust.check_store(&dir).map_err(bad_input))
    }

    /// The directory of the store, if it is one.
    fn directory(&self) -> Option<PathBuf> {
        self.url.as_ref().map_or_else(|| Some(self.dir.clone()), StoreUrl::directory)
    }

    /// Checks that a store which was used before is not below the mount point of a file system that is not mounted.
    ///
    /// # Errors
    /// Bad input: the store is not there.
    pub fn check_mounted(&self) -> Result<()> {
        let missing = self.directory().and_then(|dir| Some((mounted::missing(&dir)?, dir)));
        missing.map_or(Ok(()), |(point, dir)| {
            Err(bad_input(anyhow!(
                "the store {} is not there, and nothing is mounted at {}, where it was: mount it again. To start from the beginning with a new store there: --resume never",
                dir.display(),
                point.display()
            )))
        })
    }

    /// Remembers for [`Self::check_mounted`] where the directories are mounted.
    pub fn remember_mounts(&self) {
        let of_uploads = self.upload.as_ref().and_then(StoreUrl::directory);
        self.directory().iter().chain(&of_uploads).for_each(|dir| mounted::remember(dir));
    }

    /// Creates the directories that addresses name, so that nobody else does. Who uses one that cannot be created says so.
    pub fn create_addresses(&self) {
        let addresses = [&self.url, &self.upload].into_iter().flatten();
        let of_uploads = self.upload.as_ref().and_then(StoreUrl::directory);
        for dir in addresses.filter_map(StoreUrl::directory) {
            if of_uploads.as_ref() == Some(&dir)
                && let Some(point) = mounted::missing(&dir)
            {
                tracing::warn!(
                    "nothing is mounted at {}, where the directory {} was: snapshots are uploaded once it is there again",
                    point.display(),
                    dir.display()
                );
                continue;
            }
            if let Err(error) = DirBuilder::new().recursive(true).mode(0o700).create(&dir) {
                tracing::debug!("cannot create {}: {error}", dir.display());
            }
        }
    }

    /// The directory for images of the job's memory that do not fit into memory, if they may be on disk. They are not
    /// encrypted.
    #[must_use]
    pub fn staging_dir(&self, dir: &JobDir) -> Option<PathBuf> {
        let is_allowed = match self.staging {
            StagingPlace::Auto => self.key.is_none(),
            StagingPlace::Memory => false,
            StagingPlace::Any => true,
        };
        is_allowed.then(|| dir.path().join("staging"))
    }

    /// The rate of uploads.
    #[must_use]
    pub fn pace(&self) -> Arc<Pace> {
        let policy =
            |above_bytes_per_s| PausePolicy { above_bytes_per_s, longest_pause: UPLOAD_LONGEST_PAUSE };
        let pauses = self.upload_pause_above_bytes_per_s.map(policy);
        Arc::new(Pace::new(self.upload_limit_bytes_per_s, pauses))
    }
}
