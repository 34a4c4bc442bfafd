//! The packed store: chunks in packs, a manifest object for each snapshot, on any [`Medium`].
//!
//! - A snapshot names its chunks; where they lie is what the indexes of the packs say (`known`). So no snapshot
//!   depends on another one, and packs can be rewritten under all of them.
//! - `save` and `load` work with several threads and a bounded number of blocks, whatever the snapshot's size.
//!
//! The order of things is what makes it safe: a pack is durable before its index is written, the indexes before the
//! manifest, and the manifest appears whole or not at all. What is removed goes the other way round.

mod chunks;
mod known;
mod load;
mod packer;
mod reclaim;
mod save;
mod scrub;
mod source;

pub use scrub::Scrubbed;

use crate::codec::Codec;
use crate::medium::{Medium, read_all};
use crate::pack::{Index, PACK_MAX_BYTES, PackId};
use crate::read_failure::{ReadFailure, classify};
use crate::store::{
    Listed, Load, ProgressFn, Reclaimed, SnapshotWriter, Source, Store, Target, damaged, recorded,
};
use crate::{Damage, Manifest, ReadError, RelPath, SaveError, SnapshotId, sealed};
use known::{Known, News};
use parking_lot::{Condvar, Mutex, RwLock};
use source::PackedFile;
use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Size of the blocks in which packs are written (bytes): two chunks.
const BLOCK_BYTES: usize = 8 << 20;
/// Blocks of each pack that is being written: one that is filled, the others on their way.
const BLOCKS: usize = 4;

/// How much of the machine a store may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Memory for blocks, whatever a snapshot's size (bytes).
    pub pool_bytes: u64,
    /// Threads that read, hash and write chunks.
    pub workers: usize,
    /// Chunks that are at most this far from each other in a pack are read together (bytes).
    pub gap_bytes: u64,
    /// A pack that has become this long is finished, and another one begun (bytes).
    pub pack_bytes: u64,
    /// What is durable of a snapshot that was given up, or whose writer was killed, stays: the next try does not write
    /// it again. What nobody comes back for goes with [`Store::reclaim`]. For media that are slow to write to.
    pub keeps_unfinished: bool,
    /// Machines that know nothing of each other may write to it at a time. What is younger than this, and not from this
    /// very [`PackStore`], is left by [`Store::sweep`] and [`Store::reclaim`]: the snapshot that needs it may be about to
    /// be committed. `None`: it is only used under the job's lock.
    pub shared: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        let workers = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            pool_bytes: 1 << 30,
            workers: workers.clamp(2, 8),
            pack_bytes: PACK_MAX_BYTES,
            keeps_unfinished: false,
            shared: None,
            gap_bytes: 64 << 10,
        }
    }
}

impl Limits {
    /// For an object store, which another machine may use for the same job. When an upload is interrupted, no more than a pack of each thread is sent again; and there
    /// are not so many that their indexes take long to read.
    #[must_use]
    pub fn remote() -> Self {
        let shared = Some(Duration::from_secs(24 * 3600));
        // A request takes as long as a megabyte or so.
        Self { pack_bytes: 256 << 20, keeps_unfinished: true, shared, gap_bytes: 1 << 20, ..Self::default() }
    }

    /// Threads that fit into the pool, with the blocks that each needs.
    fn threads(&self) -> usize {
        let each_bytes = (BLOCKS + 1) * BLOCK_BYTES;
        let fit = usize::try_from(self.pool_bytes).unwrap_or(usize::MAX) / each_bytes;
        self.workers.min(fit).max(1)
    }
}

/// A [`Store`] of packs on a [`Medium`].
#[derive(Debug)]
pub struct PackStore {
    medium: Arc<dyn Medium>,
    codec: Codec,
    limits: Limits,
    /// What the indexes of the packs say; `None` until somebody needs it.
    known: RwLock<Option<Known>>,
    /// Whether somebody is saving: what a save found known is not to go before it is committed.
    saving: Turns,
    /// Held while packs go, and while the indexes are read again: what is gone is not to be known afterwards.
    moving: Mutex<()>,
    /// One reclaims at a time.
    reclaiming: Mutex<()>,
    /// Packs that were written from here: no other machine is about to commit a snapshot of them.
    own: Mutex<HashSet<PackId>>,
    /// What the sources have in common that are there now.
    sources: Mutex<Weak<chunks::Shared>>,
}

impl PackStore {
    /// The store on `medium`. Nothing is read or written yet.
    #[must_use]
    pub fn new(medium: Arc<dyn Medium>, codec: Codec, limits: Limits) -> Self {
        Self {
            medium,
            codec,
            limits,
            known: RwLock::new(None),
            saving: Turns::default(),
            moving: Mutex::default(),
            reclaiming: Mutex::default(),
            own: Mutex::default(),
            sources: Mutex::default(),
        }
    }

    /// Where it is.
    #[must_use]
    pub fn medium(&self) -> &dyn Medium {
        &*self.medium
    }

    fn address(&self, name: &RelPath) -> PathBuf {
        self.medium.describe(name).into()
    }

    fn manifests() -> RelPath {
        RelPath::new(sealed::MANIFESTS).expect("a plain path")
    }

    /// Names of all committed snapshots, oldest first.
    fn ids(&self) -> Result<Vec<SnapshotId>, ReadError> {
        let dir = Self::manifests();
        let failed = |source| ReadError::Io { step: "read", path: self.address(&dir), source };
        let listed = self.medium.list(&dir).map_err(failed)?;
        let mut ids: Vec<SnapshotId> = listed.iter().filter_map(|(name, _)| name.parse().ok()).collect();
        ids.sort();
        Ok(ids)
    }

    /// Does `with` on what the indexes say, after reading them if nobody has.
    fn with_known<T>(&self, with: impl FnOnce(&Known) -> T) -> Result<T, ReadError> {
        if let Some(known) = &*self.known.read() {
            return Ok(with(known));
        }
        let mut slot = self.known.write();
        if slot.is_none() {
            let news = News::read(&*self.medium, &self.codec, &HashMap::new())?;
            slot.get_or_insert_default().learn(news);
        }
        Ok(with(slot.as_ref().expect("it was filled just now")))
    }

    /// Changes what the indexes are known to say, if that was read.
    fn change_known(&self, change: impl FnOnce(&mut Known)) {
        if let Some(known) = &mut *self.known.write() {
            change(known);
        }
    }

    /// Writes the index of a pack that is durable: only now it is somebody's.
    fn write_index(&self, index: &Index) -> io::Result<()> {
        self.own.lock().insert(index.pack);
        self.medium.put_new(&index.pack.index(), &index.encode(&self.codec))
    }

    /// Looks again for what the indexes say: another process may have moved things.
    fn refresh(&self) -> Result<(), ReadError> {
        let _still = self.moving.lock();
        let before = match &*self.known.read() {
            Some(known) => known.packs().clone(),
            None => HashMap::new(),
        };
        // A save may be committed while this reads, so that what it adds is not to be overwritten.
        let news = News::read(&*self.medium, &self.codec, &before)?;
        self.known.write().get_or_insert_default().learn(news);
        Ok(())
    }
}

impl Store for PackStore {
    fn begin(&self, id: &SnapshotId, needed_bytes: u64) -> Result<Box<dyn SnapshotWriter + '_>, SaveError> {
        Ok(Box::new(save::Saving::begin(self, id, needed_bytes)?))
    }

    fn list(&self) -> Result<Vec<Listed>, ReadError> {
        let ids = self.ids()?;
        // One that is removed meanwhile is not there.
        let listed = ids.into_iter().map(|id| Listed { manifest: self.manifest(&id), id });
        Ok(listed.filter(|one| !matches!(one.manifest, Err(ReadError::Missing(_)))).collect())
    }

    fn manifest(&self, id: &SnapshotId) -> Result<Manifest, ReadError> {
        let name = sealed::name(id);
        let unreadable = |source: io::Error| match classify(&source) {
            ReadFailure::Damaged if source.kind() == io::ErrorKind::NotFound => {
                ReadError::Missing(id.to_string())
            }
            ReadFailure::Damaged => damaged(id, Damage::Manifest(source.to_string())),
            ReadFailure::Unreadable => {
                damaged(id, Damage::Unreadable { path: self.medium.describe(&name), source })
            }
            ReadFailure::Access => ReadError::Io { step: "read", path: self.address(&name), source },
        };
        let content = read_all(&*self.medium, &name, sealed::MANIFEST_MAX_BYTES).map_err(unreadable)?;
        sealed::decode(id, &content, &self.codec)
    }

    fn verify(&self, manifest: &Manifest, progress: ProgressFn) -> Result<(), ReadError> {
        let all: Vec<_> =
            manifest.files.iter().map(|file| Load { path: &file.path, into: &Nowhere }).collect();
        self.load(manifest, &all, progress)
    }

    fn load(&self, manifest: &Manifest, wanted: &[Load<'_>], progress: ProgressFn) -> Result<(), ReadError> {
        load::load(self, manifest, wanted, progress)
    }

    fn source(&self, manifest: &Manifest, path: &RelPath) -> Result<Box<dyn Source + '_>, ReadError> {
        Ok(Box::new(PackedFile::new(self, recorded(manifest, path)?)))
    }

    fn remove(&self, id: &SnapshotId) -> Result<(), SaveError> {
        let name = sealed::name(id);
        tracing::debug!("removing {}", self.medium.describe(&name));
        let failed = |source| SaveError::Io { step: "remove", path: self.address(&name), source };
        self.medium.remove(&name).map_err(failed)
    }

    fn sweep(&self) -> Result<Vec<String>, SaveError> {
        reclaim::sweep(self)
    }

    fn reclaim_until(&self, cancel: &AtomicBool) -> Result<Reclaimed, SaveError> {
        reclaim::reclaim(self, cancel)
    }
}

/// Takes everything and keeps nothing.
struct Nowhere;

impl Target for Nowhere {
    fn set_bytes(&self, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn write_at(&self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }
}

/// A lock whose guard may go to another thread.
#[derive(Debug, Default)]
struct Turns {
    taken: Mutex<bool>,
    free: Condvar,
}

impl Turns {
    /// Waits for one's turn.
    fn take(&self) -> Turn<'_> {
        let mut taken = self.taken.lock();
        self.free.wait_while(&mut taken, |taken| *taken);
        *taken = true;
        Turn(self)
    }
}

/// One's turn, until it is dropped.
#[derive(Debug)]
struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.taken.lock() = false;
        self.0.free.notify_one();
    }
}
