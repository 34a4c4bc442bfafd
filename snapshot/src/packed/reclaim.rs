//! Garbage collection: frees the space of chunks that no snapshot uses.
//!
//! - A pack without live chunks is deleted: first its index, then the pack. A chunk is live if a manifest names it.
//! - Packs less than half live are rewritten: the live chunks are copied to a new pack, which is durable with its index
//!   before the old pack is deleted. The same happens to packs with damaged chunks that have an intact copy elsewhere,
//!   and to small packs if there are many, since each save leaves a few. The emptiest packs come first, and only as many
//!   at once as there is free space for. Each round frees space for the next, so this works on an almost full disk.
//!
//! Copying runs concurrently with a save. Deletion waits until no save is running and then rescans the manifests: a save
//! may have reused a chunk that was garbage before. Saves of other machines are not waited for: see
//! [`super::tombstones`].

use super::PackStore;
use super::chunk_index::{ChunkIndex, Location};
use super::chunks::{Buffers, Chunks};
use super::packer::Packer;
use super::tombstones::{self, Tombstone};
use crate::chunk::ChunkId;
use crate::pack::{Index, PackId, packs_dir};
use crate::read_failure::{ReadFailure, classify};
use crate::store::{Reclaimed, Store};
use crate::{ReadError, RelPath, SaveError, SnapshotId, faults};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// Shorter packs are small (bytes).
const SMALL_PACK_BYTES: u64 = 32 << 20;
/// More small packs than this are merged.
const SMALL_PACKS_MAX: usize = 32;

/// The live chunks.
#[derive(Default)]
struct Live {
    scanned: HashSet<SnapshotId>,
    /// Those that were told to be damaged. Each may be replaced by a whole one.
    damaged: HashSet<SnapshotId>,
    chunks: HashSet<ChunkId>,
}

impl Live {
    /// Adds the chunks of all snapshots that were not scanned yet. Snapshots that are removed later still count. Returns
    /// the chunks that were not live before.
    fn scan(&mut self, store: &PackStore) -> Result<Vec<ChunkId>, SaveError> {
        let mut fresh = Vec::new();
        for id in store.ids()? {
            if self.scanned.contains(&id) {
                continue;
            }
            match store.manifest(&id) {
                Ok(manifest) => {
                    let chunks = manifest.files.iter().flat_map(|file| &file.chunks).map(|chunk| chunk.id);
                    fresh.extend(chunks.filter(|id| !id.is_zeroes() && self.chunks.insert(*id)));
                }
                Err(ReadError::Missing(_)) => continue,
                // Its chunks cannot be determined any more.
                Err(ReadError::Damaged { id: text, damage }) if damage.is_certain() => {
                    if self.damaged.insert(id) {
                        tracing::warn!("the snapshot {text} is damaged: {damage}; its chunks are not kept");
                    }
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            self.scanned.insert(id);
        }
        Ok(fresh)
    }
}

/// The live chunks of one pack.
#[derive(Default)]
struct PackUse {
    pack_bytes: u64,
    live_bytes: u64,
    live: Vec<Location>,
    /// Whether a chunk in it is damaged.
    is_damaged: bool,
    /// Whether the pack must stay. Either a live chunk without another copy could not be read, perhaps temporarily. Or
    /// the pack is so young that another machine may be about to commit a snapshot that uses it.
    is_held: bool,
}

impl PackUse {
    /// Whether the pack is worth rewriting, regardless of other packs.
    fn is_worth_rewriting(&self) -> bool {
        !self.live.is_empty() && !self.is_held && (self.live_bytes < self.pack_bytes / 2 || self.is_damaged)
    }

    fn is_small(&self) -> bool {
        !self.live.is_empty() && !self.is_held && self.pack_bytes < SMALL_PACK_BYTES
    }
}

/// See [`crate::Store::reclaim_until`].
pub fn reclaim(store: &PackStore, cancel: &AtomicBool) -> Result<Reclaimed, SaveError> {
    let _alone = store.reclaiming.lock();
    if store.limits.shared.is_some() {
        tombstones::sweep(store)?;
    }
    if store.has_unindexed.swap(false, Ordering::Relaxed) {
        sweep_packs(store)?;
    }
    let mut work =
        Work { store, cancel, live: Live::default(), chunks: Chunks::new(store), done: Reclaimed::default() };
    work.live.scan(store)?;
    let leaving = store.refresh_and_leaving(None)?;
    let packs = work.pack_use(&leaving)?;
    let is_dead = |pack_use: &PackUse| pack_use.live.is_empty() && !pack_use.is_held;
    let dead: Vec<_> = packs.iter().filter(|(_, one)| is_dead(one)).map(|(pack, _)| *pack).collect();
    // First, since it frees space for the copies.
    work.remove(&dead)?;
    let mut waiting = worth_rewriting(&packs);
    loop {
        let now = work.take_fitting(&packs, &mut waiting)?;
        if now.is_empty() || cancel.load(Ordering::Relaxed) {
            return Ok(work.done);
        }
        let left = work.copy(&packs, &now)?;
        work.remove(&left)?;
    }
}

struct Work<'a> {
    store: &'a PackStore,
    cancel: &'a AtomicBool,
    live: Live,
    chunks: Chunks<'a>,
    done: Reclaimed,
}

impl Work<'_> {
    fn failed(&self, step: &'static str, name: &RelPath) -> impl FnOnce(io::Error) -> SaveError + use<> {
        self.store.failed(step, name)
    }

    /// The live chunks of every pack. `leaving` are those that others are about to delete.
    fn pack_use(&self, leaving: &HashSet<PackId>) -> Result<BTreeMap<PackId, PackUse>, SaveError> {
        let duplicates = |index: &ChunkIndex| -> Vec<Vec<Location>> {
            let all = self.live.chunks.iter().map(|id| index.locations(id));
            all.filter(|locations| locations.len() > 1).map(<[Location]>::to_vec).collect()
        };
        let mut unreadable = Vec::new();
        for locations in self.store.with_index(duplicates)? {
            if !self.forget_damaged_copies(&locations)? {
                unreadable.extend(locations);
            }
        }
        let young = young(self.store).map_err(self.failed("list", &packs_dir()))?;
        Ok(self.store.with_index(|index| {
            let new = |pack_bytes| PackUse { pack_bytes, ..PackUse::default() };
            let mut packs: BTreeMap<_, _> =
                index.packs().iter().map(|(pack, &bytes)| (*pack, new(bytes))).collect();
            for id in &self.live.chunks {
                // Of several intact copies, the first one is live that nobody is about to delete.
                let copies = index.locations(id);
                let stays = |copy: &&Location| !leaving.contains(&copy.pack);
                let Some(location) = copies.iter().find(stays) else {
                    // Somebody is about to delete all of them, or has not been able to.
                    for copy in copies {
                        packs.entry(copy.pack).and_modify(|pack_use| pack_use.is_held = true);
                    }
                    continue;
                };
                let Some(pack_use) = packs.get_mut(&location.pack) else { continue };
                pack_use.live_bytes += u64::from(location.entry.stored_bytes);
                pack_use.live.push(*location);
            }
            // Any of these copies may be readable later: all stay.
            for location in unreadable {
                // A person may have deleted the pack since.
                let Some(pack_use) = packs.get_mut(&location.pack) else { continue };
                pack_use.live.push(location);
                pack_use.is_held = true;
            }
            for wrong in index.wrong() {
                let Some(pack_use) = packs.get_mut(&wrong.pack) else { continue };
                pack_use.is_damaged = true;
                let is_elsewhere = index.locations(&wrong.entry.id).iter().any(|location| location != wrong);
                if self.live.chunks.contains(&wrong.entry.id) && !is_elsewhere {
                    pack_use.live.push(*wrong);
                    pack_use.is_held = true;
                }
            }
            for (pack, pack_use) in &mut packs {
                pack_use.is_held |= young.contains(pack);
                pack_use.live.sort_by_key(|location| location.entry.offset);
            }
            packs
        })?)
    }

    /// Reads all copies of a chunk and removes the damaged ones from the index, unless no copy is intact. Returns whether
    /// one is.
    fn forget_damaged_copies(&self, locations: &[Location]) -> Result<bool, SaveError> {
        let mut good = 0;
        let mut wrong = Vec::new();
        for location in locations {
            match self.chunks.with_buffers(|buffers| self.chunks.read(location, buffers).map(drop)) {
                Ok(()) => good += 1,
                Err(error) if classify(&error) == ReadFailure::Access => {
                    return Err(self.failed("read", &location.pack.pack())(error));
                }
                Err(_) => wrong.push(location),
            }
        }
        if good > 0 {
            self.store.change_index(|index| {
                wrong.iter().for_each(|location| index.forget(&location.entry.id, location));
            });
        }
        Ok(good > 0)
    }

    /// Takes packs from `waiting`, in order, whose live chunks fit into half of the free space. The other half is left
    /// for a concurrent save.
    fn take_fitting(
        &self,
        packs: &BTreeMap<PackId, PackUse>,
        waiting: &mut Vec<PackId>,
    ) -> Result<Vec<PackId>, SaveError> {
        let free_bytes =
            self.store.medium.free_bytes().map_err(self.failed("get the free space of", &packs_dir()))?;
        let mut left_bytes = free_bytes.map_or(u64::MAX, |free_bytes| free_bytes / 2);
        let mut taken = Vec::new();
        waiting.retain(|pack| {
            let live_bytes = packs[pack].live_bytes;
            let fits = live_bytes <= left_bytes;
            if fits {
                left_bytes -= live_bytes;
                taken.push(*pack);
            }
            !fits
        });
        // Rewriting a single small pack would only produce another small pack.
        if let [one] = taken[..]
            && !packs[&one].is_worth_rewriting()
        {
            taken.clear();
        }
        if taken.is_empty() && !waiting.is_empty() {
            tracing::debug!("not enough free space to rewrite {} partially used packs", waiting.len());
        }
        Ok(taken)
    }

    /// Copies the live chunks of the packs `now` to new packs, which are then durable and indexed. Returns the packs that
    /// are garbage now.
    fn copy(&mut self, packs: &BTreeMap<PackId, PackUse>, now: &[PackId]) -> Result<Vec<PackId>, SaveError> {
        let (mut garbage, mut packer) = (Vec::new(), None);
        let mut buffers = Buffers::new();
        for pack in now {
            if self.cancel.load(Ordering::Relaxed) {
                break;
            }
            let mut is_complete = true;
            let live = &packs[pack].live;
            for (number, location) in live.iter().enumerate() {
                self.chunks.read_ahead(&live[number..], &mut buffers);
                match self.chunks.read(location, &mut buffers) {
                    Ok(content) => {
                        self.append(&mut packer, location, content)?;
                    }
                    Err(error) if classify(&error) == ReadFailure::Access => {
                        return Err(self.failed("read", &pack.pack())(error));
                    }
                    Err(error) => {
                        tracing::warn!("cannot rewrite the pack {pack}, which stays: {error}");
                        // So that the next garbage collection does not try it again.
                        self.store.change_index(|index| match classify(&error) {
                            ReadFailure::Damaged => index.forget(&location.entry.id, location),
                            _ => index.suspect(location),
                        });
                        is_complete = false;
                        break;
                    }
                }
            }
            if is_complete {
                garbage.push(*pack);
            }
        }
        self.finish(packer)?;
        Ok(garbage)
    }

    fn append(
        &mut self,
        slot: &mut Option<Packer>,
        location: &Location,
        content: &[u8],
    ) -> Result<(), SaveError> {
        self.finish(slot.take_if(|packer| packer.bytes() >= self.store.limits.pack_bytes))?;
        let codec = &self.store.codec;
        let begin = || Packer::new(&*self.store.medium, codec).map_err(self.failed("write to", &packs_dir()));
        let packer = match slot {
            Some(packer) => packer,
            None => slot.insert(begin()?),
        };
        let name = packer.pack().pack();
        faults::hit("reclaim-copy").map_err(self.failed("write", &name))?;
        let buffer = packer.buffer(content.len(), codec).map_err(self.failed("write", &name))?;
        buffer.copy_from_slice(content);
        self.done.moved_bytes += packer.keep(location.entry.id, content.len(), codec);
        Ok(())
    }

    /// Makes a new pack durable and adds it to the index.
    fn finish(&self, packer: Option<Packer>) -> Result<(), SaveError> {
        let Some(packer) = packer else { return Ok(()) };
        let pack = packer.pack();
        let index: Index = packer.finish(&self.store.codec).map_err(self.failed("write", &pack.pack()))?;
        let written = faults::hit("reclaim-index").and_then(|()| self.store.write_index(&index));
        if let Err(error) = written {
            // The index may exist nevertheless. The pack can stay: its chunks are all copies.
            return Err(self.failed("write", &pack.index())(error));
        }
        self.store.change_index(|all| all.add(&index));
        Ok(())
    }

    /// Deletes those of `packs` that are still garbage after a rescan of the manifests.
    fn remove(&mut self, packs: &[PackId]) -> Result<(), SaveError> {
        if packs.is_empty() {
            return Ok(());
        }
        let store = self.store;
        let mut leaving: HashSet<PackId> = packs.iter().copied().collect();
        let is_in_them = |index: &ChunkIndex, id: &ChunkId| {
            index.locations(id).iter().any(|at| leaving.contains(&at.pack))
        };
        // Mostly few: further copies, and chunks that were copied.
        let mut live: Vec<ChunkId> = store.with_index(|index| {
            self.live.chunks.iter().copied().filter(|id| is_in_them(index, id)).collect()
        })?;
        let _no_save = store.saving.lock();
        let tombstone = store.limits.shared.map(|_| Tombstone::set(store, packs)).transpose()?;
        let mut look = || -> Result<(), SaveError> {
            if tombstone.is_some() {
                // Packs with the copies of what is live may be about to go, too.
                leaving.extend(store.refresh_and_leaving(tombstone.as_ref())?);
            }
            live.extend(self.live.scan(store)?);
            Ok(())
        };
        if let Err(error) = look() {
            // Nothing is deleted.
            tombstone.map_or(Ok(()), |tombstone| tombstone.remove(store))?;
            return Err(error);
        }
        let _removing = store.removing.lock();
        let garbage: HashMap<PackId, u64> = store.with_index(|index| {
            let needed = live.iter().filter(|id| !index.has_outside(id, &leaving));
            let still_used: HashSet<_> =
                needed.flat_map(|id| index.locations(id)).map(|location| location.pack).collect();
            let garbage = packs.iter().filter(|pack| !still_used.contains(pack));
            garbage.filter_map(|pack| Some((*pack, index.pack_bytes(pack)?))).collect()
        })?;
        // The next save must not find them in the index.
        store.change_index(|index| index.forget_packs(&garbage.keys().copied().collect()));
        for (pack, pack_bytes) in garbage {
            self.remove_pack(pack)?;
            self.done.freed_bytes += pack_bytes;
        }
        tombstone.map_or(Ok(()), |tombstone| tombstone.remove(store))
    }

    fn remove_pack(&self, pack: PackId) -> Result<(), SaveError> {
        let failed = |name: &RelPath| self.failed("remove", name);
        let medium = &self.store.medium;
        tracing::debug!("removing {}", medium.describe(&pack.pack()));
        faults::hit("reclaim-remove").map_err(failed(&pack.index()))?;
        medium.remove(&pack.index()).map_err(failed(&pack.index()))?;
        faults::hit("reclaim-between").map_err(failed(&pack.pack()))?;
        medium.remove(&pack.pack()).map_err(failed(&pack.pack()))
    }
}

/// The packs that are worth rewriting, the emptiest first.
fn worth_rewriting(packs: &BTreeMap<PackId, PackUse>) -> Vec<PackId> {
    let has_many = packs.values().filter(|one| one.is_small()).count() > SMALL_PACKS_MAX;
    let is_worth = |one: &PackUse| one.is_worth_rewriting() || has_many && one.is_small();
    let mut worth: Vec<_> = packs.iter().filter(|(_, one)| is_worth(one)).collect();
    let product = |one: u64, other: u64| u128::from(one) * u128::from(other);
    worth.sort_by(|(_, one), (_, other)| {
        product(one.live_bytes, other.pack_bytes).cmp(&product(other.live_bytes, one.pack_bytes))
    });
    worth.into_iter().map(|(pack, _)| *pack).collect()
}

/// Packs that are too young to be deleted: see [`super::Limits::shared`].
fn young(store: &PackStore) -> io::Result<HashSet<PackId>> {
    let Some(age) = store.limits.shared else { return Ok(HashSet::new()) };
    let listed = store.medium.list_times(&packs_dir())?;
    let now = SystemTime::now();
    let is_young = |time: SystemTime| !now.duration_since(time).is_ok_and(|passed| passed >= age);
    let packs = listed.iter().filter(|(_, time)| is_young(*time));
    let young: HashSet<_> =
        packs.filter_map(|(name, _)| PackId::parse(name.strip_suffix(".pack")?)).collect();
    let own = store.own.lock();
    Ok(young.difference(&own).copied().collect())
}

/// Whether a snapshot needs a chunk that no index lists.
fn lacks_chunks(store: &PackStore) -> Result<bool, SaveError> {
    store.refresh()?;
    for id in store.ids()? {
        let manifest = match store.manifest(&id) {
            Err(ReadError::Missing(_)) => continue,
            // Nobody knows what it needs.
            Err(ReadError::Damaged { .. } | ReadError::Hostile { .. }) => return Ok(true),
            manifest => manifest?,
        };
        if store.with_index(|index| index.lacking(&manifest, &HashSet::new()).next().is_some())? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// See [`crate::Store::sweep`]: removes unfinished objects and packs without an index.
pub fn sweep(store: &PackStore) -> Result<Vec<String>, SaveError> {
    let _alone = store.reclaiming.lock();
    let age = store.limits.shared.unwrap_or_default();
    let mut swept = store.medium.sweep(age).map_err(store.failed("sweep", &packs_dir()))?;
    if store.limits.shared.is_some() {
        swept.extend(tombstones::sweep(store)?);
    }
    swept.extend(sweep_packs(store)?);
    Ok(swept)
}

/// Removes packs without an index. Returns their names.
fn sweep_packs(store: &PackStore) -> Result<Vec<String>, SaveError> {
    let _no_save = store.saving.lock();
    let mut without_index = without_index(store)?;
    if without_index.is_empty() {
        return Ok(Vec::new());
    }
    if lacks_chunks(store)? {
        tracing::warn!(
            "{} packs without an index are kept, since a snapshot lacks data that may be in them: `ckpt-run repair`",
            without_index.len()
        );
        return Ok(Vec::new());
    }
    let set = || Tombstone::set(store, &without_index.iter().copied().collect::<Vec<_>>());
    let tombstone = store.limits.shared.map(|_| set()).transpose()?;
    if let Some(tombstone) = &tombstone {
        // With an index that comes later, a snapshot is taken back, or another machine's copies of chunks do not count.
        match self::without_index(store) {
            Ok(still) => without_index.retain(|pack| still.contains(pack)),
            Err(error) => {
                // Nothing is deleted.
                tombstone.remove(store)?;
                return Err(error);
            }
        }
    }
    let mut swept = Vec::new();
    for pack in without_index {
        let name = pack.pack();
        tracing::debug!("removing {}, which has no index", store.medium.describe(&name));
        store.medium.remove(&name).map_err(store.failed("sweep", &name))?;
        swept.push(name.to_string());
    }
    tombstone.map_or(Ok(()), |tombstone| tombstone.remove(store))?;
    Ok(swept)
}

/// The packs without an index that are not too young.
fn without_index(store: &PackStore) -> Result<HashSet<PackId>, SaveError> {
    let folder = packs_dir();
    let failed = || store.failed("sweep", &folder);
    let listed = store.medium.list(&folder).map_err(failed())?;
    // After the listing: a concurrent writer creates the pack first and its index next.
    let young = young(store).map_err(failed())?;
    let named = |suffix| -> HashSet<PackId> {
        listed.iter().filter_map(|(name, _)| name.strip_suffix(suffix).and_then(PackId::parse)).collect()
    };
    Ok(named(".pack").difference(&named(".index")).filter(|pack| !young.contains(pack)).copied().collect())
}
