//! The packed store: chunks in packs, and a manifest object for each snapshot, on any [`Medium`].
//!
//! - A snapshot lists the names of its chunks; the indexes of the packs say where each chunk is (`chunk_index`). So no
//!   snapshot depends on another one, and packs can be rewritten without touching manifests.
//! - `save` and `load` use several threads and a bounded number of blocks, independent of the snapshot's size.
//!
//! Crash safety depends on the order of writes: a pack is durable before its index is written, all indexes are durable
//! before the manifest, and the manifest is created atomically. Removals happen in the reverse order.

mod chunk_index;
mod chunks;
mod load;
mod packer;
mod reclaim;
mod save;
mod scrub;
mod source;
mod tombstones;

pub use scrub::{Repaired, Scrubbed};
use tombstones::Tombstone;
pub use tombstones::{new_name as new_tombstone, set as set_tombstone};

use crate::codec::Codec;
use crate::medium::{Medium, read_all};
use crate::pack::{Index, PACK_MAX_BYTES, PackId, packs_dir};
use crate::read_failure::{ReadFailure, classify};
use crate::store::{
    Discard, Listed, Load, ProgressFn, Reclaimed, SnapshotWriter, Source, Store, damaged, recorded,
};
use crate::{Damage, JobKey, Manifest, ReadError, RelPath, SaveError, SnapshotId, sealed};
use chunk_index::{ChunkIndex, IndexUpdate, Location};
use packer::{BLOCK_BYTES, BLOCKS};
use parking_lot::{Mutex, RwLock};
use source::PackedFile;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Resource limits of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Memory for blocks (bytes).
    pub pool_bytes: u64,
    /// Threads that read, hash and write chunks.
    pub workers: usize,
    /// Threads of a load. A resume has all cores, while other work runs beside the job.
    pub loaders: usize,
    /// Chunks of a pack with at most this many bytes between them are read together.
    pub gap_bytes: u64,
    /// A pack is finished when it has reached this length (bytes).
    pub pack_bytes: u64,
    /// A snapshot begins only if there is room for twice of what the last one has added. Otherwise it begins, and fails
    /// when the room turns out to be short. For media of which others must not be deprived: memory.
    pub needs_room: bool,
    /// Keeps the durable packs of a failed or interrupted save, so that a retry need not write them again.
    /// [`Store::reclaim`] removes them if no snapshot uses them. For media with slow writes.
    pub keeps_unfinished: bool,
    /// Several machines may write to the store concurrently, without a common lock. Packs are deleted with a tombstone then
    /// (`tombstones`). [`Store::sweep`] and [`Store::reclaim`] keep packs younger than this that another [`PackStore`] has
    /// written: their snapshot may be about to be committed, and would be taken back. `None` if all writers hold the job's
    /// lock.
    pub shared: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            pool_bytes: 1 << 30,
            workers: cores.clamp(2, 8),
            // More would wait for memory.
            loaders: cores.clamp(2, 16),
            pack_bytes: PACK_MAX_BYTES,
            needs_room: false,
            keeps_unfinished: false,
            shared: None,
            gap_bytes: 64 << 10,
        }
    }
}

impl Limits {
    /// Limits for an object store, which another machine may use for the same job. The pack size is a compromise: an
    /// interrupted upload repeats at most one pack per thread, and there are few enough indexes to read.
    #[must_use]
    pub fn remote() -> Self {
        let shared = Some(Duration::from_secs(24 * 3600));
        // The latency of a request is worth about a megabyte of transfer.
        Self { pack_bytes: 256 << 20, keeps_unfinished: true, shared, gap_bytes: 1 << 20, ..Self::default() }
    }

    /// The number of threads whose blocks fit into the pool.
    fn threads(&self) -> usize {
        self.that_fit(self.workers, (BLOCKS + 1) * BLOCK_BYTES)
    }

    /// The number of threads of a load whose buffers fit into the pool.
    fn load_threads(&self) -> usize {
        self.that_fit(self.loaders, load::THREAD_BYTES)
    }

    fn that_fit(&self, threads: usize, each_bytes: usize) -> usize {
        let fit = usize::try_from(self.pool_bytes).unwrap_or(usize::MAX) / each_bytes;
        threads.min(fit).max(1)
    }
}

/// A [`Store`] of packs on a [`Medium`].
#[derive(Debug)]
pub struct PackStore {
    medium: Arc<dyn Medium>,
    codec: Codec,
    limits: Limits,
    /// The job whose snapshots are in it, if that is known.
    job: Option<JobKey>,
    /// The content of all indexes; read when it is first needed.
    index: RwLock<Option<ChunkIndex>>,
    /// Held by a save until it is committed: chunks that it found in the index must not be removed before.
    saving: Mutex<()>,
    /// Held while packs are removed, and while the indexes are refreshed: a refresh must not bring removed packs back.
    removing: Mutex<()>,
    /// Serialises garbage collection.
    reclaiming: Mutex<()>,
    /// Packs that this store has written: no other machine is about to commit a snapshot that uses them.
    own: Mutex<HashSet<PackId>>,
    /// Whether a failed save has left packs of which indexes may not exist.
    has_unindexed: AtomicBool,
    /// The open packs and buffers of the sources that exist at the moment.
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
            job: None,
            index: RwLock::new(None),
            saving: Mutex::default(),
            removing: Mutex::default(),
            reclaiming: Mutex::default(),
            own: Mutex::default(),
            has_unindexed: AtomicBool::new(false),
            sources: Mutex::default(),
        }
    }

    /// With a key, snapshots of other jobs are refused: the same key may be used for several jobs, and whoever can write
    /// to the store could put one in another's place.
    #[must_use]
    pub fn of_job(mut self, job: &JobKey) -> Self {
        self.job = Some(job.clone());
        self
    }

    /// Its medium.
    #[must_use]
    pub fn medium(&self) -> &dyn Medium {
        &*self.medium
    }

    fn address(&self, name: &RelPath) -> PathBuf {
        self.medium.describe(name).into()
    }

    /// The error of a failed read of `name`.
    fn read_failed(&self, name: &RelPath) -> impl FnOnce(io::Error) -> ReadError + use<> {
        let path = self.address(name);
        move |source| ReadError::Io { step: "read", path, source }
    }

    /// The error of a failed step with `name`.
    fn failed(&self, step: &'static str, name: &RelPath) -> impl FnOnce(io::Error) -> SaveError + use<> {
        let path = self.address(name);
        move |source| SaveError::Io { step, path, source }
    }

    /// The error for a part of the snapshot `id` that cannot be read: damage, unless the access failed.
    fn unreadable(&self, id: &SnapshotId, name: &RelPath, source: io::Error) -> ReadError {
        match classify(&source) {
            ReadFailure::Access => self.read_failed(name)(source),
            _ => damaged(id, Damage::Unreadable { path: self.medium.describe(name), source }),
        }
    }

    /// The content of a chunk from its stored form, if it is intact.
    fn decode<'b>(
        &self,
        location: &Location,
        stored: &'b [u8],
        scratch: &'b mut Vec<u8>,
    ) -> Option<&'b [u8]> {
        let (pack, entry) = (&location.pack, &location.entry);
        let bytes = entry.raw_bytes as usize;
        let content = self.codec.decode(pack, entry.offset, entry.encoding, stored, bytes, scratch).ok()?;
        (self.codec.id(content) == entry.id).then_some(content)
    }

    /// IDs of all committed snapshots, oldest first.
    fn ids(&self) -> Result<Vec<SnapshotId>, ReadError> {
        let dir = sealed::manifests_dir();
        let listed = self.medium.list(&dir).map_err(self.read_failed(&dir))?;
        let mut ids: Vec<SnapshotId> = listed.iter().filter_map(|(name, _)| name.parse().ok()).collect();
        ids.sort();
        Ok(ids)
    }

    /// Calls `with` with the chunk index, which is read first if necessary.
    fn with_index<T>(&self, with: impl FnOnce(&ChunkIndex) -> T) -> Result<T, ReadError> {
        if let Some(index) = &*self.index.read() {
            return Ok(with(index));
        }
        let mut slot = self.index.write();
        if slot.is_none() {
            let update = IndexUpdate::read(&*self.medium, &self.codec, &HashMap::new())?;
            slot.get_or_insert_default().apply(update);
        }
        Ok(with(slot.as_ref().expect("it was filled just now")))
    }

    /// Changes the chunk index, if it was read.
    fn change_index(&self, change: impl FnOnce(&mut ChunkIndex)) {
        if let Some(index) = &mut *self.index.write() {
            change(index);
        }
    }

    /// Writes the index of a durable pack, which makes the pack valid.
    fn write_index(&self, index: &Index) -> io::Result<()> {
        self.own.lock().insert(index.pack);
        self.medium.put_new(&index.pack.index(), &index.encode(&self.codec))
    }

    /// As [`Self::refresh`]. Returns the packs that others are about to delete, but for those of the tombstone `own`.
    fn refresh_and_leaving(&self, own: Option<&Tombstone>) -> Result<HashSet<PackId>, ReadError> {
        // In this order: a tombstone goes when its packs have gone.
        let leaving = match self.limits.shared {
            Some(_) => tombstones::packs(self, own)?,
            None => HashSet::new(),
        };
        self.refresh()?;
        Ok(leaving)
    }

    /// Forgets packs that a person has deleted. Waits for nobody who changes the store.
    fn forget_deleted(&self) -> Result<(), ReadError> {
        let known = self.with_index(|index| index.packs().keys().copied().collect::<HashSet<_>>())?;
        let listed = self.medium.list(&packs_dir()).map_err(self.read_failed(&packs_dir()))?;
        let listed: HashSet<_> =
            listed.iter().filter_map(|(name, _)| PackId::parse(name.strip_suffix(".pack")?)).collect();
        self.change_index(|index| index.forget_packs(&known.difference(&listed).copied().collect()));
        Ok(())
    }

    /// Reads new indexes: another process may have written or moved chunks.
    fn refresh(&self) -> Result<(), ReadError> {
        let _removing = self.removing.lock();
        let before = match &*self.index.read() {
            Some(index) => index.packs().clone(),
            None => HashMap::new(),
        };
        // A save may be committed in the meantime. The update does not overwrite its additions.
        let update = IndexUpdate::read(&*self.medium, &self.codec, &before)?;
        self.index.write().get_or_insert_default().apply(update);
        Ok(())
    }
}

impl Store for PackStore {
    fn begin(&self, id: &SnapshotId, needed_bytes: u64) -> Result<Box<dyn SnapshotWriter + '_>, SaveError> {
        Ok(Box::new(save::Saving::begin(self, id, needed_bytes)?))
    }

    fn list(&self) -> Result<Vec<Listed>, ReadError> {
        let ids = self.ids()?;
        // Snapshots that are removed concurrently are left out.
        let listed = ids.into_iter().map(|id| Listed { manifest: self.manifest(&id), id });
        Ok(listed.filter(|one| !matches!(one.manifest, Err(ReadError::Missing(_)))).collect())
    }

    fn list_checked(&self) -> Result<Vec<Listed>, ReadError> {
        let mut listed = self.list()?;
        // The indexes after the manifests, which are written later.
        let leaving = self.refresh_and_leaving(None)?;
        self.with_index(|index| {
            for one in &mut listed {
                let lacking =
                    |manifest| index.lacking(manifest, &leaving).next().map(|file| file.path.to_string());
                if let Some(path) = one.manifest.as_ref().ok().and_then(lacking) {
                    one.manifest = Err(damaged(&one.id, Damage::Lacking { path }));
                }
            }
        })?;
        Ok(listed)
    }

    fn manifest(&self, id: &SnapshotId) -> Result<Manifest, ReadError> {
        let name = sealed::name(id);
        let unreadable = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => ReadError::Missing(id.to_string()),
            _ if classify(&source) == ReadFailure::Damaged => {
                damaged(id, Damage::Manifest(source.to_string()))
            }
            _ => self.unreadable(id, &name, source),
        };
        let content = read_all(&*self.medium, &name, sealed::MANIFEST_MAX_BYTES).map_err(unreadable)?;
        let manifest = sealed::decode(id, &content, &self.codec)?;
        let is_other = |job: &JobKey| self.codec.key_number() != 0 && job.to_string() != manifest.job.key;
        match self.job.as_ref().filter(|job| is_other(job)) {
            Some(_) => Err(damaged(id, Damage::Manifest(format!("it is of the job {}", manifest.job.key)))),
            None => Ok(manifest),
        }
    }

    fn verify(&self, manifest: &Manifest, progress: ProgressFn) -> Result<(), ReadError> {
        let all: Vec<_> =
            manifest.files.iter().map(|file| Load { path: &file.path, into: &Discard }).collect();
        self.load(manifest, &all, progress)
    }

    fn load(&self, manifest: &Manifest, wanted: &[Load<'_>], progress: ProgressFn) -> Result<(), ReadError> {
        load::load(self, manifest, wanted, progress)
    }

    fn source(&self, manifest: &Manifest, path: &RelPath) -> Result<Box<dyn Source + '_>, ReadError> {
        Ok(Box::new(PackedFile::new(self, recorded(manifest, path)?)))
    }

    fn is_lacking(&self, manifest: &Manifest) -> Result<bool, ReadError> {
        let leaving = self.refresh_and_leaving(None)?;
        self.with_index(|index| index.lacking(manifest, &leaving).next().is_some())
    }

    fn remove(&self, id: &SnapshotId) -> Result<(), SaveError> {
        let name = sealed::name(id);
        tracing::debug!("removing {}", self.medium.describe(&name));
        self.medium.remove(&name).map_err(self.failed("remove", &name))
    }

    fn pins(&self) -> Result<BTreeMap<SnapshotId, BTreeSet<String>>, ReadError> {
        let mut pins = BTreeMap::<SnapshotId, BTreeSet<String>>::new();
        if self.limits.shared.is_none() {
            return Ok(pins);
        }
        let dir = pins_dir();
        for (name, _) in self.medium.list(&dir).map_err(self.read_failed(&dir))? {
            let (id, keeper) = name.split_once(KEEPER_SEPARATOR).unwrap_or((&name, ""));
            let is_pin = keeper.is_empty() || PackId::parse(keeper).is_some();
            if let Ok(id) = id.parse()
                && is_pin
            {
                pins.entry(id).or_default().insert(keeper.to_owned());
            }
        }
        // Written along with the others.
        for keepers in pins.values_mut().filter(|keepers| keepers.len() > 1) {
            keepers.remove("");
        }
        Ok(pins)
    }

    fn pin(&self, id: &SnapshotId, keeper: &str) -> Result<(), SaveError> {
        for name in [pin_name(id, keeper), pin_name(id, "")] {
            match self.medium.put_new(&name, b"") {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                other => other.map_err(self.failed("write", &name))?,
            }
        }
        Ok(())
    }

    fn unpin(&self, id: &SnapshotId, keeper: Option<&str>) -> Result<bool, SaveError> {
        let remove = |name: &RelPath| self.medium.remove(name).map_err(self.failed("remove", name));
        let mut others = self.pins()?.remove(id).unwrap_or_default();
        others.remove("");
        match keeper {
            Some(keeper) => {
                remove(&pin_name(id, keeper))?;
                others.remove(keeper);
            }
            None => std::mem::take(&mut others).iter().try_for_each(|one| remove(&pin_name(id, one)))?,
        }
        if others.is_empty() {
            remove(&pin_name(id, ""))?;
        }
        Ok(!others.is_empty())
    }

    fn sweep(&self) -> Result<Vec<String>, SaveError> {
        reclaim::sweep(self)
    }

    fn reclaim_until(&self, cancel: &AtomicBool) -> Result<Reclaimed, SaveError> {
        reclaim::reclaim(self, cancel)
    }
}

/// Between the name of a snapshot and that of the store that keeps it.
const KEEPER_SEPARATOR: char = '_';

/// The name of a mark. The one without a keeper is what earlier builds write and look for; it stays as long as there is a
/// keeper.
fn pin_name(id: &SnapshotId, keeper: &str) -> RelPath {
    let end = if keeper.is_empty() { String::new() } else { format!("{KEEPER_SEPARATOR}{keeper}") };
    RelPath::new(format!("{}/{id}{end}", pins_dir())).expect("a plain path")
}

/// The directory of the marks of kept snapshots: empty objects.
fn pins_dir() -> RelPath {
    RelPath::new("pins").expect("a plain path")
}

/// Calls `work` for each of `items`, with a thread for each of `slots`. The first error stops all threads.
fn on_threads<S: Send, T: Sync, E: Send>(
    slots: &mut [Option<S>],
    items: &[T],
    work: impl Fn(&mut Option<S>, &T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let run = |slot: &mut Option<S>| {
        while !stop.load(Ordering::Relaxed)
            && let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed))
        {
            work(slot, item).inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let run = &run;
        let running: Vec<_> = slots.iter_mut().map(|slot| scope.spawn(move || run(slot))).collect();
        running
            .into_iter()
            .map(|thread| thread.join().expect("no panic in a worker"))
            .fold(Ok(()), Result::and)
    })
}
