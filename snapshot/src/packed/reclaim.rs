//! Giving back the room of what no snapshot needs any more.
//!
//! - A pack without a chunk that a snapshot names goes: its index first, then the pack.
//! - A pack of which less than half is needed is copied over: what is needed goes into a new pack, which is durable and
//!   has its index before the old one goes. So are packs with damage in them that is made good elsewhere, and small ones
//!   when there are many: each save leaves a few. The emptiest go first, and no more at once than there is room for:
//!   what has gone makes room for the next ones, so that a disk that is almost full gets emptier.
//!
//! Copying is done beside a save. What goes, goes when no save is under way, after another look at the snapshots: a
//! save may have found a chunk known that nobody needed before.

use super::chunks::{Chunks, Room};
use super::known::{Known, Location};
use super::packer::Packer;
use super::{PackStore, Turn};
use crate::chunk::ChunkId;
use crate::pack::{Index, PACKS, PackId};
use crate::read_failure::{ReadFailure, classify};
use crate::store::{Reclaimed, Store};
use crate::{ReadError, RelPath, SaveError, SnapshotId, faults};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// A pack that is shorter is a small one (bytes).
const SMALL_BYTES: u64 = 32 << 20;
/// So many small ones may be.
const SMALL_MAX: usize = 32;

/// What snapshots need.
#[derive(Default)]
struct Needed {
    looked_at: HashSet<SnapshotId>,
    chunks: HashSet<ChunkId>,
}

impl Needed {
    /// Takes in all snapshots that it has not looked at. Those that were removed meanwhile still count. Returns the
    /// chunks that nobody needed before.
    fn look(&mut self, store: &PackStore) -> Result<Vec<ChunkId>, SaveError> {
        let mut fresh = Vec::new();
        for id in store.ids()? {
            if self.looked_at.contains(&id) {
                continue;
            }
            match store.manifest(&id) {
                Ok(manifest) => {
                    let chunks = manifest.files.iter().flat_map(|file| &file.chunks).map(|chunk| chunk.id);
                    let new = chunks.filter(|id| !id.is_zeroes() && self.chunks.insert(*id));
                    fresh.extend(new);
                }
                Err(ReadError::Missing(_)) => continue,
                // What it needed is not to be known any more.
                Err(ReadError::Damaged { id, damage }) if damage.is_certain() => {
                    tracing::warn!("the snapshot {id} is damaged: {damage}; nothing is kept for it");
                }
                Err(error) => return Err(error.into()),
            }
            self.looked_at.insert(id);
        }
        Ok(fresh)
    }
}

/// What one pack holds that is needed.
#[derive(Default)]
struct Contents {
    pack_bytes: u64,
    needed_bytes: u64,
    needed: Vec<Location>,
    /// There is damage in it.
    is_damaged: bool,
    /// It stays. Some of it is damaged and lies nowhere else: reading it may have failed for a reason that passes. Or it
    /// is so young that another machine may be about to need it.
    is_held: bool,
}

impl Contents {
    /// Whether a copy of what is needed is worth its writing, whatever other packs there are.
    fn is_worth_copying(&self) -> bool {
        !self.needed.is_empty()
            && !self.is_held
            && (self.needed_bytes < self.pack_bytes / 2 || self.is_damaged)
    }

    fn is_small(&self) -> bool {
        !self.needed.is_empty() && !self.is_held && self.pack_bytes < SMALL_BYTES
    }
}

/// See [`crate::Store::reclaim_until`].
pub fn reclaim(store: &PackStore, cancel: &AtomicBool) -> Result<Reclaimed, SaveError> {
    let _alone = store.reclaiming.lock();
    let mut work = Work {
        store,
        cancel,
        needed: Needed::default(),
        fresh: HashSet::new(),
        copied: HashSet::new(),
        chunks: Chunks::new(store),
        done: Reclaimed::default(),
    };
    work.needed.look(store)?;
    store.refresh()?;
    let packs = work.contents()?;
    let is_dead = |held: &Contents| held.needed.is_empty() && !held.is_held;
    let dead: Vec<_> = packs.iter().filter(|(_, held)| is_dead(held)).map(|(pack, _)| *pack).collect();
    // First, since it makes room for the others' copies.
    work.remove(&dead)?;
    let mut waiting = worth_copying(&packs);
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
    needed: Needed,
    /// Chunks that became needed after it was decided what goes.
    fresh: HashSet<ChunkId>,
    /// Chunks that lie in new packs.
    copied: HashSet<ChunkId>,
    chunks: Chunks<'a>,
    done: Reclaimed,
}

impl Work<'_> {
    fn failed(&self, step: &'static str, name: &RelPath) -> impl FnOnce(io::Error) -> SaveError + use<> {
        let path = self.store.address(name);
        move |source| SaveError::Io { step, path, source }
    }

    /// What is needed, by pack.
    fn contents(&self) -> Result<BTreeMap<PackId, Contents>, SaveError> {
        let several = |known: &Known| -> Vec<Vec<Location>> {
            let all = self.needed.chunks.iter().map(|id| known.locations(id).copied().collect::<Vec<_>>());
            all.filter(|locations| locations.len() > 1).collect()
        };
        let mut bad = Vec::new();
        for locations in self.store.with_known(several)? {
            if !self.settle(&locations)? {
                bad.extend(locations);
            }
        }
        let folder = RelPath::new(PACKS).expect("a plain path");
        let young = young(self.store).map_err(self.failed("look at", &folder))?;
        Ok(self.store.with_known(|known| {
            let new = |pack_bytes| Contents { pack_bytes, ..Contents::default() };
            let mut packs: BTreeMap<_, _> =
                known.packs().iter().map(|(pack, &bytes)| (*pack, new(bytes))).collect();
            for id in &self.needed.chunks {
                // Of several good ones, the others are not needed.
                let Some(location) = known.locations(id).next() else { continue };
                let held = packs.get_mut(&location.pack).expect("its index says where it lies");
                held.needed_bytes += u64::from(location.entry.stored_bytes);
                held.needed.push(*location);
            }
            // Who knows which of them reads next time: all stay.
            for location in bad {
                let held = packs.get_mut(&location.pack).expect("its index says where it lies");
                held.needed.push(location);
                held.is_held = true;
            }
            for wrong in known.wrong() {
                let held = packs.get_mut(&wrong.pack).expect("its index says where it lies");
                held.is_damaged = true;
                let is_elsewhere = known.locations(&wrong.entry.id).any(|location| location != wrong);
                if self.needed.chunks.contains(&wrong.entry.id) && !is_elsewhere {
                    held.needed.push(*wrong);
                    held.is_held = true;
                }
            }
            for (pack, held) in &mut packs {
                held.is_held |= young.contains(pack);
                held.needed.sort_by_key(|location| location.entry.offset);
            }
            packs
        })?)
    }

    /// Of a chunk that lies in several places, those that do not read are forgotten, unless none does. Says whether one
    /// does.
    fn settle(&self, locations: &[Location]) -> Result<bool, SaveError> {
        let mut good = 0;
        let mut wrong = Vec::new();
        for location in locations {
            match self.chunks.with_room(|room| self.chunks.read(location, room).map(drop)) {
                Ok(()) => good += 1,
                Err(error) if classify(&error) == ReadFailure::Access => {
                    return Err(self.failed("read", &location.pack.pack())(error));
                }
                Err(_) => wrong.push(location),
            }
        }
        if good > 0 {
            self.store.change_known(|known| {
                wrong.iter().for_each(|location| known.forget(&location.entry.id, location));
            });
        }
        Ok(good > 0)
    }

    /// Takes from `waiting`, in its order, what fits into half of the room that there is: as much again is left for a
    /// save that is under way.
    fn take_fitting(
        &self,
        packs: &BTreeMap<PackId, Contents>,
        waiting: &mut Vec<PackId>,
    ) -> Result<Vec<PackId>, SaveError> {
        let folder = RelPath::new(PACKS).expect("a plain path");
        let free_bytes = self.store.medium.free_bytes().map_err(self.failed("look for room in", &folder))?;
        let mut left_bytes = free_bytes.map_or(u64::MAX, |free_bytes| free_bytes / 2);
        let mut taken = Vec::new();
        waiting.retain(|pack| {
            let needed_bytes = packs[pack].needed_bytes;
            let fits = needed_bytes <= left_bytes;
            if fits {
                left_bytes -= needed_bytes;
                taken.push(*pack);
            }
            !fits
        });
        // A small one alone would only become another small one.
        if let [one] = taken[..]
            && !packs[&one].is_worth_copying()
        {
            taken.clear();
        }
        if taken.is_empty() && !waiting.is_empty() {
            tracing::debug!("no room to copy {} packs that are used in part: they stay", waiting.len());
        }
        Ok(taken)
    }

    /// Copies what is needed of the packs `now` into new ones, which are then durable and known. Returns the packs that
    /// nobody needs any more.
    fn copy(&mut self, packs: &BTreeMap<PackId, Contents>, now: &[PackId]) -> Result<Vec<PackId>, SaveError> {
        let (mut copied, mut left) = (HashSet::new(), Vec::new());
        let mut packer = None;
        let mut room = Room::new();
        for pack in now {
            if self.cancel.load(Ordering::Relaxed) {
                break;
            }
            let mut is_whole = true;
            let needed = &packs[pack].needed;
            for (number, location) in needed.iter().enumerate() {
                self.chunks.read_ahead(&needed[number..], &mut room);
                match self.chunks.read(location, &mut room) {
                    Ok(content) => {
                        self.append(&mut packer, location, content)?;
                        copied.insert(location.entry.id);
                    }
                    Err(error) if classify(&error) == ReadFailure::Access => {
                        return Err(self.failed("read", &pack.pack())(error));
                    }
                    Err(error) => {
                        tracing::warn!("{error}: the pack is left as it is");
                        // Neither is it copied again next time.
                        self.store.change_known(|known| match classify(&error) {
                            ReadFailure::Damaged => known.forget(&location.entry.id, location),
                            _ => known.suspect(location),
                        });
                        is_whole = false;
                        break;
                    }
                }
            }
            if is_whole {
                left.push(*pack);
            }
        }
        self.finish(packer)?;
        self.copied.extend(copied);
        Ok(left)
    }

    fn append(
        &mut self,
        slot: &mut Option<Packer>,
        location: &Location,
        content: &[u8],
    ) -> Result<(), SaveError> {
        self.finish(slot.take_if(|packer| packer.bytes() >= self.store.limits.pack_bytes))?;
        let codec = &self.store.codec;
        let folder = RelPath::new(PACKS).expect("a plain path");
        let packer = match slot {
            Some(packer) => packer,
            None => slot
                .insert(Packer::new(&*self.store.medium, codec).map_err(self.failed("write to", &folder))?),
        };
        let name = packer.pack().pack();
        faults::hit("reclaim-copy").map_err(self.failed("write", &name))?;
        let place = packer.place(content.len(), codec).map_err(self.failed("write", &name))?;
        place.copy_from_slice(content);
        self.done.moved_bytes += packer.keep(location.entry.id, content.len(), codec);
        Ok(())
    }

    /// Makes a new pack durable and known.
    fn finish(&self, packer: Option<Packer>) -> Result<(), SaveError> {
        let Some(packer) = packer else { return Ok(()) };
        let pack = packer.pack();
        let index: Index = packer.finish().map_err(self.failed("write", &pack.pack()))?;
        let written = faults::hit("reclaim-index").and_then(|()| self.store.write_index(&index));
        if let Err(error) = written {
            // Whether the index is there is not known. The pack may stay: all that is in it lies elsewhere as well.
            return Err(self.failed("write", &pack.index())(error));
        }
        self.store.change_known(|known| known.add(&index));
        Ok(())
    }

    /// Removes those of `packs` that nobody needs, apart from chunks that were copied.
    fn remove(&mut self, packs: &[PackId]) -> Result<(), SaveError> {
        if packs.is_empty() {
            return Ok(());
        }
        let _turn: Turn<'_> = self.store.saving.take();
        self.fresh.extend(self.needed.look(self.store)?);
        let _still = self.store.moving.lock();
        let stay: HashSet<PackId> = self.store.with_known(|known| {
            let found = self.fresh.difference(&self.copied).flat_map(|id| known.locations(id));
            found.map(|location| location.pack).collect()
        })?;
        let go: HashMap<PackId, u64> = self.store.with_known(|known| {
            let go = packs.iter().filter(|pack| !stay.contains(pack));
            go.filter_map(|pack| Some((*pack, known.pack_bytes(pack)?))).collect()
        })?;
        // A save that begins after this one's turn is not to find them.
        self.store.change_known(|known| known.forget_packs(&go.keys().copied().collect()));
        for (pack, pack_bytes) in go {
            let failed = |name: &RelPath| self.failed("remove", name);
            tracing::debug!("removing {}", self.store.medium.describe(&pack.pack()));
            faults::hit("reclaim-remove").map_err(failed(&pack.index()))?;
            self.store.medium.remove(&pack.index()).map_err(failed(&pack.index()))?;
            faults::hit("reclaim-between").map_err(failed(&pack.pack()))?;
            self.store.medium.remove(&pack.pack()).map_err(failed(&pack.pack()))?;
            self.done.freed_bytes += pack_bytes;
        }
        Ok(())
    }
}

/// The packs that are worth copying over, the emptiest first.
fn worth_copying(packs: &BTreeMap<PackId, Contents>) -> Vec<PackId> {
    let has_many = packs.values().filter(|held| held.is_small()).count() > SMALL_MAX;
    let is_worth = |held: &Contents| held.is_worth_copying() || has_many && held.is_small();
    let mut worth: Vec<_> = packs.iter().filter(|(_, held)| is_worth(held)).collect();
    let product = |one: u64, other: u64| u128::from(one) * u128::from(other);
    worth.sort_by(|(_, one), (_, other)| {
        product(one.needed_bytes, other.pack_bytes).cmp(&product(other.needed_bytes, one.pack_bytes))
    });
    worth.into_iter().map(|(pack, _)| *pack).collect()
}

/// Packs that are not to go, whoever needs them: see [`super::Limits::shared`].
fn young(store: &PackStore) -> io::Result<HashSet<PackId>> {
    let Some(age) = store.limits.shared else { return Ok(HashSet::new()) };
    let listed = store.medium.list_times(&RelPath::new(PACKS).expect("a plain path"))?;
    let now = SystemTime::now();
    let is_young = |time: SystemTime| !now.duration_since(time).is_ok_and(|passed| passed >= age);
    let packs = listed.iter().filter(|(_, time)| is_young(*time));
    let young: HashSet<_> =
        packs.filter_map(|(name, _)| PackId::parse(name.strip_suffix(".pack")?)).collect();
    let own = store.own.lock();
    Ok(young.difference(&own).copied().collect())
}

/// See [`crate::Store::sweep`]: what was never finished, and packs without an index.
pub fn sweep(store: &PackStore) -> Result<Vec<String>, SaveError> {
    let _alone = store.reclaiming.lock();
    let _turn = store.saving.take();
    let folder = RelPath::new(PACKS).expect("a plain path");
    let failed = |name: &RelPath| {
        let path = store.address(name);
        move |source| SaveError::Io { step: "sweep", path, source }
    };
    let mut swept = store.medium.sweep(store.limits.shared.unwrap_or_default()).map_err(failed(&folder))?;
    let listed = store.medium.list(&folder).map_err(failed(&folder))?;
    // After the listing: who writes has made the pack, and its index comes next.
    let young = young(store).map_err(failed(&folder))?;
    let named = |suffix| -> HashSet<PackId> {
        listed.iter().filter_map(|(name, _)| name.strip_suffix(suffix).and_then(PackId::parse)).collect()
    };
    for pack in named(".pack").difference(&named(".index")).filter(|pack| !young.contains(pack)) {
        let name = pack.pack();
        tracing::debug!("removing {}, which has no index", store.medium.describe(&name));
        store.medium.remove(&name).map_err(failed(&name))?;
        swept.push(name.to_string());
    }
    Ok(swept)
}
