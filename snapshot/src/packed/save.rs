//! Saving: several threads each take the next chunk, read it into the block of their own pack, hash it, and keep it if
//! it is new.

use super::chunk_index::ChunkIndex;
use super::packer::Packer;
use super::{PackStore, on_threads};
use crate::chunk::{Chunk, ChunkId, is_zeroes};
use crate::medium::read_all;
use crate::pack::{Index, PackId, packs_dir};
use crate::store::{Input, ProgressFn, SnapshotWriter, Store};
use crate::{DataFile, Manifest, ReadError, RelPath, SaveError, SnapshotId, faults, sealed};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashSet;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Room that a snapshot leaves free: a 64th of its size, within these limits (bytes).
const SPARE_MIN_BYTES: u64 = 1 << 20;
const SPARE_MAX_BYTES: u64 = 256 << 20;
/// The free space is looked at whenever so many bytes more are stored.
const ROOM_EVERY_BYTES: u64 = 16 << 20;

/// A snapshot that is being written.
pub struct Saving<'a> {
    common: Common<'a>,
    _lock: MutexGuard<'a, ()>,
    id: SnapshotId,
    /// One for each thread that has found a new chunk.
    packers: Vec<Option<Packer>>,
    /// Durable packs, with or without their indexes.
    finished: Vec<Index>,
    files: Vec<DataFile>,
    is_committed: bool,
}

/// The state that the threads share.
struct Common<'a> {
    store: &'a PackStore,
    /// At least so much room was free when the snapshot began (bytes).
    needed_bytes: u64,
    /// The snapshot leaves so much room to others (bytes).
    spare_bytes: u64,
    /// Packs that somebody is about to delete: their chunks are stored anew.
    leaving: HashSet<PackId>,
    /// Chunks that this snapshot has added.
    new_chunks: Mutex<HashSet<ChunkId>>,
    stored_bytes: AtomicU64,
    /// Length of those chunks.
    changed_bytes: AtomicU64,
}

impl<'a> Saving<'a> {
    /// Waits for the save lock and begins the snapshot `id`; see [`crate::Store::begin`].
    pub fn begin(store: &'a PackStore, id: &SnapshotId, needed_bytes: u64) -> Result<Self, SaveError> {
        let lock = store.saving.lock();
        let leaving = match store.limits.shared {
            // Another machine may have removed packs.
            Some(_) => store.refresh_and_leaving(None)?,
            None => {
                store.with_index(|_| ())?;
                if let Err(error) = store.forget_deleted() {
                    tracing::debug!("it is not known which packs are there: {error}");
                }
                HashSet::new()
            }
        };
        let spare_bytes = (needed_bytes / 64).clamp(SPARE_MIN_BYTES, SPARE_MAX_BYTES);
        let expected_bytes = expected_bytes(store, needed_bytes)?;
        let beside_bytes =
            if store.limits.needs_room { spare_bytes.max(expected_bytes / 8) } else { spare_bytes };
        let wanted_bytes = expected_bytes.saturating_add(beside_bytes);
        let failed = store.failed("get the free space for", &sealed::name(id));
        if let Some(available_bytes) = store.medium.free_bytes().map_err(failed)?
            && available_bytes < wanted_bytes
        {
            let path = store.address(&sealed::manifests_dir());
            return Err(SaveError::NoSpace { path, needed_bytes: wanted_bytes, available_bytes });
        }
        let common = Common {
            store,
            needed_bytes: wanted_bytes,
            spare_bytes,
            leaving,
            new_chunks: Mutex::default(),
            stored_bytes: AtomicU64::new(0),
            changed_bytes: AtomicU64::new(0),
        };
        Ok(Self {
            common,
            _lock: lock,
            id: id.clone(),
            packers: Vec::new(),
            finished: Vec::new(),
            files: Vec::new(),
            is_committed: false,
        })
    }
}

impl Common<'_> {
    /// Names the failed step. A full disk becomes [`SaveError::NoSpace`].
    fn failed(&self, step: &'static str, name: &RelPath) -> impl FnOnce(io::Error) -> SaveError + use<> {
        let path = self.store.address(name);
        let stored_bytes = self.stored_bytes.load(Ordering::Relaxed);
        let needed_bytes = self.needed_bytes.max(stored_bytes.saturating_add(self.spare_bytes));
        let medium = self.store.medium.clone();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                let available_bytes = medium.free_bytes().ok().flatten().unwrap_or(0);
                SaveError::NoSpace { path, needed_bytes, available_bytes }
            }
            _ => SaveError::Io { step, path, source },
        }
    }

    /// Claims a chunk. Returns whether the caller must store it: no pack that stays has it, and no other thread has claimed it.
    fn claim(&self, id: ChunkId) -> Result<bool, SaveError> {
        if self.store.with_index(|index| index.has_outside(&id, &self.leaving))? {
            return Ok(false);
        }
        Ok(self.new_chunks.lock().insert(id))
    }

    /// Whether the store has a chunk of this name and length, which a source has named without reading it.
    fn is_there(&self, id: &ChunkId, bytes: usize) -> Result<bool, SaveError> {
        let is_there = |index: &ChunkIndex| index.is_of(id, bytes) && index.has_outside(id, &self.leaving);
        Ok(id.is_zeroes() || self.store.with_index(is_there)?)
    }

    /// Stores the chunk `task` of `input`, if it is new.
    fn store_chunk(
        &self,
        input: &Input<'_>,
        task: &Task,
        slot: &mut Option<Packer>,
        finished: &Mutex<Vec<Index>>,
    ) -> Result<Chunk, SaveError> {
        let codec = &self.store.codec;
        let length = usize::try_from(task.end - task.begin).expect("a chunk is small");
        let chunk = |id| Chunk { id, bytes: u32::try_from(length).expect("a chunk is small") };
        if let Some(id) = input.from.known(task.begin..task.end)
            && self.is_there(&id, length)?
        {
            return Ok(chunk(id));
        }
        if let Some(full) = slot.take_if(|packer| packer.bytes() >= self.store.limits.pack_bytes) {
            let index = self.finish(full)?;
            finished.lock().extend(index);
        }
        let packer = match slot {
            Some(packer) => packer,
            None => {
                let begun = Packer::new(&*self.store.medium, codec);
                slot.insert(begun.map_err(self.failed("write", &packs_dir()))?)
            }
        };
        let failed = self.failed("write", &packer.pack().pack());
        let content = packer.buffer(length, codec).map_err(failed)?;
        input.from.read_at(task.begin, content).map_err(source_failed(input))?;
        if is_zeroes(content) {
            return Ok(chunk(ChunkId::ZEROES));
        }
        let id = codec.id(content);
        if self.claim(id)? {
            let stored_bytes = packer.keep(id, length, codec);
            let before = self.stored_bytes.fetch_add(stored_bytes, Ordering::Relaxed);
            if before / ROOM_EVERY_BYTES != (before + stored_bytes) / ROOM_EVERY_BYTES {
                self.check_room()?;
            }
            self.changed_bytes.fetch_add(task.end - task.begin, Ordering::Relaxed);
        }
        Ok(chunk(id))
    }

    /// Ends the snapshot before it takes the room that the job itself may need.
    fn check_room(&self) -> Result<(), SaveError> {
        let failed = self.failed("get the free space for", &packs_dir());
        let free_bytes = self.store.medium.free_bytes();
        if free_bytes.is_ok_and(|bytes| bytes.is_some_and(|bytes| bytes < self.spare_bytes)) {
            return Err(failed(io::ErrorKind::StorageFull.into()));
        }
        Ok(())
    }

    /// Makes a pack durable and returns its index. With `keeps_unfinished`, writes the index immediately and returns
    /// `None`: the pack then stays even if this save fails.
    fn finish(&self, packer: Packer) -> Result<Option<Index>, SaveError> {
        let failed = self.failed("write", &packer.pack().pack());
        let index = packer.finish(&self.store.codec).map_err(failed)?;
        if !self.store.limits.keeps_unfinished {
            return Ok(Some(index));
        }
        self.write_index(&index)?;
        self.store.change_index(|all| all.add(&index));
        Ok(None)
    }

    fn write_index(&self, index: &Index) -> Result<(), SaveError> {
        let name = index.pack.index();
        self.store.write_index(index).map_err(self.failed("write", &name))
    }

    /// Stores the chunk `task`, and notes it.
    fn work(
        &self,
        work: &Work<'_>,
        task: &Task,
        slot: &mut Option<Packer>,
        progress: ProgressFn,
    ) -> Result<(), SaveError> {
        let input = &work.inputs[task.input];
        let chunk = self.store_chunk(input, task, slot, &work.finished)?;
        task.chunk.set(chunk).expect("each is taken once");
        if work.left[task.input].fetch_sub(1, Ordering::AcqRel) == 1 {
            input.from.taken().map_err(source_failed(input))?;
        }
        progress(chunk.bytes.into());
        Ok(())
    }
}

fn source_failed(input: &Input<'_>) -> impl FnOnce(io::Error) -> SaveError {
    |source| SaveError::Source { path: input.path.to_string(), source }
}

impl Saving<'_> {
    /// Makes packs durable, and then writes their indexes. All at the same time: a file system stores together what is
    /// synced together, and a server answers several requests in the time of one.
    fn finish_packs(&mut self) -> Result<(), SaveError> {
        let used = |packer: &Packer| !packer.is_empty();
        let packers: Vec<_> =
            self.packers.drain(..).flatten().filter(used).map(|packer| Mutex::new(Some(packer))).collect();
        let finished = Mutex::new(std::mem::take(&mut self.finished));
        let common = &self.common;
        let result: Result<(), SaveError> =
            on_threads(&mut vec![None::<()>; packers.len()], &packers, |_, packer| {
                faults::hit("save-sync").map_err(common.failed("write", &packs_dir()))?;
                let packer = packer.lock().take().expect("each is taken once");
                let index = common.finish(packer)?;
                finished.lock().extend(index);
                Ok(())
            });
        self.finished = finished.into_inner();
        result?;
        let threads = common.store.limits.threads().min(self.finished.len());
        on_threads(&mut vec![None::<()>; threads], &self.finished, |_, index| common.write_index(index))
    }

    /// Whether the manifest that exists already is this one: a server may answer a repeated request, of which the first one
    /// succeeded. If nobody can tell, its packs stay.
    fn is_ours(&mut self, name: &RelPath, content: &[u8], error: &io::Error) -> Result<bool, SaveError> {
        if error.kind() != io::ErrorKind::AlreadyExists {
            return Ok(false);
        }
        match read_all(&*self.common.store.medium, name, sealed::MANIFEST_MAX_BYTES) {
            Ok(found) if found == content => return Ok(true),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!("cannot read {}: {error}", self.common.store.medium.describe(name));
                self.finished.clear();
            }
        }
        Err(SaveError::Taken(self.id.to_string()))
    }

    /// Removes the manifest after a failed commit: it may exist now and be lost in a crash. A manifest that another
    /// process has committed is kept.
    fn take_back(&mut self, name: &RelPath, content: &[u8]) -> Result<(), SaveError> {
        let medium = &self.common.store.medium;
        let removed = match read_all(&**medium, name, sealed::MANIFEST_MAX_BYTES) {
            Ok(found) if found != content => return Err(SaveError::Taken(self.id.to_string())),
            Ok(_) => medium.remove(name),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = removed {
            tracing::warn!("cannot remove {}: {error}", medium.describe(name));
            // The snapshot may exist, so its packs must stay.
            self.finished.clear();
        }
        Ok(())
    }

    /// Checks after the commit that all chunks still exist, and that nobody is about to delete them: another machine could
    /// not see before the commit that they are live, and a person may have deleted files of the store. Otherwise removes the
    /// snapshot.
    fn confirm(&mut self, name: &RelPath, content: &[u8], manifest: &Manifest) -> Result<(), SaveError> {
        let store = self.common.store;
        let is_lacking = match store.limits.shared {
            Some(_) => store.is_lacking(manifest),
            None => self.is_lacking_here(manifest),
        };
        let failure = match is_lacking {
            Ok(false) => return Ok(()),
            Ok(true) => SaveError::Overtaken(self.id.to_string()),
            Err(error) => error.into(),
        };
        self.take_back(name, content)?;
        Err(failure)
    }

    /// Whether a person has deleted packs of the snapshot. A look that fails says nothing: the snapshot is durable.
    fn is_lacking_here(&self, manifest: &Manifest) -> Result<bool, ReadError> {
        let store = self.common.store;
        if let Err(error) = store.forget_deleted() {
            tracing::debug!("it is not known whether all packs of the snapshot are there: {error}");
            return Ok(false);
        }
        let none = HashSet::new();
        // A listing of a network file system may lack what is there.
        Ok(store.with_index(|index| index.lacking(manifest, &none).next().is_some())?
            && store.is_lacking(manifest).unwrap_or(false))
    }

    /// Removes the packs of a failed save. A pack that cannot be removed is swept later.
    fn roll_back(&mut self) {
        let store = self.common.store;
        let _removing = store.removing.lock();
        let mut finished = std::mem::take(&mut self.finished);
        if store.limits.shared.is_some() {
            // Another machine may use those whose indexes may exist. They are reclaimed, with a tombstone.
            let own = store.own.lock();
            let (left, unwritten): (Vec<_>, _) =
                finished.into_iter().partition(|index| own.contains(&index.pack));
            store.has_unindexed.fetch_or(!left.is_empty(), Ordering::Relaxed);
            finished = unwritten;
        }
        // A concurrent refresh may have added them to the index.
        store.change_index(|index| index.forget_packs(&finished.iter().map(|index| index.pack).collect()));
        for index in finished {
            for name in [index.pack.index(), index.pack.pack()] {
                if let Err(error) = store.medium.remove(&name) {
                    tracing::warn!("cannot remove {}: {error}", store.medium.describe(&name));
                    break;
                }
            }
        }
    }
}

impl SnapshotWriter for Saving<'_> {
    fn put(&mut self, files: &[Input<'_>], progress: ProgressFn) -> Result<(), SaveError> {
        let work = Work::new(files);
        for input in files.iter().filter(|input| input.from.bytes() == 0) {
            input.from.taken().map_err(source_failed(input))?;
        }
        let threads = self.common.store.limits.threads().min(work.tasks.len());
        self.packers.resize_with(self.packers.len().max(threads), || None);
        let result = on_threads(&mut self.packers[..threads], &work.tasks, |slot, task| {
            self.common.work(&work, task, slot, progress)
        });
        self.finished.extend(std::mem::take(&mut *work.finished.lock()));
        result?;
        let new = work.into_files();
        self.files.retain(|file| !new.iter().any(|one| one.path == file.path));
        self.files.extend(new);
        Ok(())
    }

    fn commit(mut self: Box<Self>, mut manifest: Manifest) -> Result<Manifest, SaveError> {
        manifest.files = std::mem::take(&mut self.files);
        manifest.stored_bytes.get_or_insert(self.common.stored_bytes.load(Ordering::Relaxed));
        manifest.changed_bytes.get_or_insert(self.common.changed_bytes.load(Ordering::Relaxed));
        self.finish_packs()?;
        let name = sealed::name(&self.id);
        faults::hit("save-before-commit").map_err(self.common.failed("commit", &name))?;
        let content = sealed::encode(&manifest, &self.common.store.codec)
            .map_err(self.common.failed("commit", &name))?;
        if let Err(error) = self.common.store.medium.put_new(&name, &content)
            && !self.is_ours(&name, &content, &error)?
        {
            self.take_back(&name, &content)?;
            return Err(self.common.failed("commit", &name)(error));
        }
        let store = self.common.store;
        store.change_index(|all| self.finished.iter().for_each(|index| all.add(index)));
        self.confirm(&name, &content, &manifest)?;
        self.finished.clear();
        self.is_committed = true;
        faults::hit("save-after-commit").map_err(self.common.failed("commit", &name))?;
        Ok(manifest)
    }
}

impl Drop for Saving<'_> {
    fn drop(&mut self) {
        // Unfinished packs are discarded first, which frees their space.
        self.packers.clear();
        if !self.is_committed {
            self.roll_back();
        }
    }
}

/// Estimates how many bytes a snapshot of `needed_bytes` will add at least: what the job has grown by, and half of the least
/// that one of the newest two snapshots has added, since a job may change less from then on. The first snapshot of a store,
/// which has added everything, says nothing of the next one. With [`Limits::needs_room`] it is an upper estimate.
fn expected_bytes(store: &PackStore, needed_bytes: u64) -> Result<u64, SaveError> {
    let manifests: Vec<_> =
        store.ids()?.iter().rev().take(2).map_while(|id| store.manifest(id).ok()).collect();
    let Some(newest) = manifests.first() else { return Ok(needed_bytes) };
    let more_bytes = needed_bytes.saturating_sub(newest.data_bytes());
    let added_bytes = if store.limits.needs_room {
        newest.stored_bytes.map(|bytes| bytes.saturating_mul(2))
    } else {
        manifests
            .get(1)
            .and_then(|older| older.stored_bytes.min(newest.stored_bytes))
            .or(Some(0))
            .map(|bytes| bytes / 2)
    };
    Ok(added_bytes.map_or(needed_bytes, |bytes| bytes.saturating_add(more_bytes).min(needed_bytes)))
}

/// One chunk to store.
struct Task {
    input: usize,
    begin: u64,
    end: u64,
    /// The result.
    chunk: OnceLock<Chunk>,
}

/// All chunks to store.
struct Work<'a> {
    inputs: &'a [Input<'a>],
    tasks: Vec<Task>,
    /// For each input: the number of unfinished tasks.
    left: Vec<AtomicUsize>,
    finished: Mutex<Vec<Index>>,
}

impl<'a> Work<'a> {
    fn new(inputs: &'a [Input<'a>]) -> Self {
        let mut tasks = Vec::new();
        let mut left = Vec::new();
        for (input, Input { from, .. }) in inputs.iter().enumerate() {
            let before = tasks.len();
            let mut begin = 0;
            while begin < from.bytes() {
                let end = from.chunk_end(begin);
                assert!(
                    end > begin && end - begin <= crate::chunk::CHUNK_BYTES as u64,
                    "a chunk of {begin}..{end}"
                );
                tasks.push(Task { input, begin, end, chunk: OnceLock::new() });
                begin = end;
            }
            left.push(AtomicUsize::new(tasks.len() - before));
        }
        Self { inputs, tasks, left, finished: Mutex::default() }
    }

    fn into_files(self) -> Vec<DataFile> {
        let file = |input: &Input<'_>| DataFile {
            path: input.path.clone(),
            bytes: input.from.bytes(),
            blake3: None,
            chunks: Vec::new(),
        };
        let mut files: Vec<_> = self.inputs.iter().map(file).collect();
        for task in self.tasks {
            files[task.input].chunks.push(task.chunk.into_inner().expect("all were taken"));
        }
        files
    }
}
