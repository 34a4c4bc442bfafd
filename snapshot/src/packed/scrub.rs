//! Scrubbing: reads and checks everything in a store, whether a snapshot uses it or not, and whether each snapshot has all
//! its chunks. Repair: indexes that are lost or damaged are written again from the copies at the end of their packs.

use super::chunk_index::{Location, read_index};
use super::chunks::OpenPacks;
use super::{PackStore, on_threads};
use crate::chunk::CHUNK_BYTES;
use crate::medium::{BLOCK_ALIGN, Block, ObjectReader};
use crate::pack::{self, Entry, HEADER_BYTES, Index, PackId, packs_dir};
use crate::read_failure::{ReadFailure, classify};
use crate::store::{ProgressFn, Store};
use crate::{Damage, ReadError, RelPath, SaveError, SnapshotId, sealed};
use parking_lot::Mutex;
use std::collections::{BTreeSet, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The length of one read (bytes).
const SEGMENT_BYTES: usize = 2 * CHUNK_BYTES;

/// The result of [`PackStore::scrub`].
#[derive(Debug, Default)]
pub struct Scrubbed {
    /// Packs that were read.
    pub packs: usize,
    /// Total length of the packs (bytes).
    pub pack_bytes: u64,
    /// How much of that was read and checked (bytes).
    pub read_bytes: u64,
    /// Manifests that were read.
    pub manifests: usize,
    /// All damage found.
    pub damage: Vec<Damage>,
}

/// The result of [`PackStore::repair`].
#[derive(Debug, Default)]
pub struct Repaired {
    /// Packs whose indexes were written again.
    pub packs: Vec<String>,
    /// Packs without an index that have no usable copy of it, with the reasons.
    pub unusable: Vec<(String, String)>,
}

/// A part of a pack: chunks and the gaps between them.
struct Segment {
    pack: usize,
    begin: u64,
    end: u64,
    entries: Vec<Entry>,
    /// The copy of the index after the last chunk, which was compared before (bytes).
    tail_bytes: u64,
}

struct Pack {
    id: PackId,
    bytes: u64,
}

struct Scrubbing<'a> {
    store: &'a PackStore,
    packs: Vec<Pack>,
    open: OpenPacks,
    segments: Vec<Segment>,
    found: Mutex<Scrubbed>,
}

impl PackStore {
    /// Reads and checks every manifest, every index, and every pack from its header to its end, or a random `share` of
    /// the packs' content (0 to 1). Also checks that each snapshot has all its chunks. `progress` counts bytes of packs, up
    /// to [`PackStore::pack_bytes`]. The next save that contains a damaged chunk stores the chunk again. `cancel` ends the
    /// scrub early.
    ///
    /// # Errors
    /// If the access to the medium fails. Damage is not an error, but listed in [`Scrubbed::damage`].
    pub fn scrub(
        &self,
        share: f64,
        progress: ProgressFn,
        cancel: &AtomicBool,
    ) -> Result<Scrubbed, ReadError> {
        self.with_index(|_| ())?;
        let mut scrubbing = Scrubbing {
            store: self,
            packs: Vec::new(),
            open: OpenPacks::default(),
            segments: Vec::new(),
            found: Mutex::default(),
        };
        let ids = scrubbing.read_manifests()?;
        // These snapshots have their packs by now.
        self.refresh()?;
        scrubbing.read_indexes()?;
        scrubbing.segments.retain(|_| fastrand::f64() < share);
        scrubbing.read_packs(progress, cancel)?;
        for id in ids {
            scrubbing.look_for_chunks(&id)?;
        }
        Ok(scrubbing.found.into_inner())
    }

    /// Writes indexes that are missing or damaged again, from the copies in their packs. Returns their packs, and those
    /// that have no usable copy, with the reasons.
    ///
    /// # Errors
    /// If the access to the medium fails, or an index cannot be written.
    pub fn repair(&self) -> Result<Repaired, SaveError> {
        let _alone = self.reclaiming.lock();
        let _no_save = self.saving.lock();
        let mut repaired = Repaired::default();
        for (name, _) in self.list_packs()? {
            let Some(pack) = name.strip_suffix(".pack").and_then(PackId::parse) else { continue };
            let (name, codec) = (pack.index(), &self.codec);
            if read_index(&*self.medium, codec, pack, |_| {})?.is_some() {
                continue;
            }
            let object = self.medium.open(&pack.pack()).map_err(self.failed("open", &pack.pack()))?;
            match Index::from_tail(&pack, &*object, codec) {
                Ok(index) => {
                    self.medium.remove(&name).map_err(self.failed("remove", &name))?;
                    let content = index.encode(codec);
                    self.medium.put_new(&name, &content).map_err(self.failed("write", &name))?;
                    repaired.packs.push(pack.to_string());
                }
                Err(error) if classify(&error) == ReadFailure::Access => {
                    return Err(self.failed("read", &pack.pack())(error));
                }
                Err(error) => {
                    repaired.unusable.push((self.medium.describe(&pack.pack()), error.to_string()));
                }
            }
        }
        self.refresh()?;
        Ok(repaired)
    }

    /// Total length of all packs (bytes).
    ///
    /// # Errors
    /// If the medium fails.
    pub fn pack_bytes(&self) -> Result<u64, ReadError> {
        let listed = self.list_packs()?;
        Ok(listed.iter().filter(|(name, _)| name.ends_with(".pack")).map(|(_, bytes)| bytes).sum())
    }

    fn list_packs(&self) -> Result<Vec<(String, u64)>, ReadError> {
        self.medium.list(&packs_dir()).map_err(self.read_failed(&packs_dir()))
    }
}

impl Scrubbing<'_> {
    fn report(&self, damage: Damage) {
        self.found.lock().damage.push(damage);
    }

    fn report_object(&self, name: &RelPath, reason: impl Into<String>) {
        let (object, reason) = (self.store.medium.describe(name), reason.into());
        self.report(Damage::Object { object, reason });
    }

    /// Returns the snapshots whose manifests are whole.
    fn read_manifests(&mut self) -> Result<Vec<SnapshotId>, ReadError> {
        let mut whole = Vec::new();
        for id in self.store.ids()? {
            match self.store.manifest(&id) {
                Err(ReadError::Missing(_)) => continue,
                Ok(_) => whole.push(id),
                Err(ReadError::Damaged { damage, .. }) => self.report(damage),
                Err(error @ ReadError::Hostile { .. }) => self.report(Damage::Manifest(error.to_string())),
                Err(error) => return Err(error),
            }
            self.found.get_mut().manifests += 1;
        }
        Ok(whole)
    }

    /// Reports a snapshot that lacks chunks, unless it was removed meanwhile.
    fn look_for_chunks(&self, id: &SnapshotId) -> Result<(), ReadError> {
        let manifest = match self.store.manifest(id) {
            Err(ReadError::Missing(_) | ReadError::Damaged { .. } | ReadError::Hostile { .. }) => {
                return Ok(());
            }
            manifest => manifest?,
        };
        let none = HashSet::new();
        let lacking = self.store.with_index(|index| {
            let mut lacking = index.lacking(&manifest, &none);
            let first = lacking.next().map(|file| file.path.to_string());
            first.map(|first| (first, lacking.count() + 1))
        })?;
        if let Some((first, count)) = lacking {
            let reason = format!(
                "{count} of the snapshot's chunks are damaged or in no pack of the store, the first in {first}"
            );
            self.report_object(&sealed::name(id), reason);
        }
        Ok(())
    }

    /// Handles a read error of the object `name`: reports damage, unless the access failed.
    fn report_unreadable(&self, name: &RelPath, source: io::Error) -> Result<(), ReadError> {
        if classify(&source) == ReadFailure::Access {
            return Err(self.store.read_failed(name)(source));
        }
        self.report_object(name, source.to_string());
        Ok(())
    }

    /// Reads the indexes and divides the packs into segments. Packs without an index are garbage and are not read.
    fn read_indexes(&mut self) -> Result<(), ReadError> {
        let listed = self.store.list_packs()?;
        let ids: BTreeSet<PackId> = listed
            .iter()
            .filter_map(|(name, _)| name.strip_suffix(".index").and_then(PackId::parse))
            .collect();
        for id in ids {
            let report = |reason| self.report_object(&id.index(), reason);
            if let Some(index) = read_index(&*self.store.medium, &self.store.codec, id, report)? {
                self.divide(id, &index)?;
            }
        }
        Ok(())
    }

    /// Opens the pack. If that fails, reports it and returns `None`; a pack that was deleted with its index concurrently
    /// is not reported.
    fn open(&self, id: PackId) -> Result<Option<Arc<dyn ObjectReader>>, ReadError> {
        match self.open.get(id, || self.store.medium.open(&id.pack())) {
            Ok(object) => Ok(Some(object)),
            Err(_) if self.store.medium.open(&id.index()).is_err_and(is_gone) => Ok(None),
            Err(error) => self.report_unreadable(&id.pack(), error).map(|()| None),
        }
    }

    fn divide(&mut self, id: PackId, index: &Index) -> Result<(), ReadError> {
        let Some(object) = self.open(id)? else { return Ok(()) };
        if object.bytes() != index.pack_bytes {
            let reason = format!("it has {} bytes, not {} as in its index", object.bytes(), index.pack_bytes);
            self.report_object(&id.pack(), reason);
            return Ok(());
        }
        let pack = self.packs.len();
        self.packs.push(Pack { id, bytes: index.pack_bytes });
        let found = self.found.get_mut();
        found.packs += 1;
        found.pack_bytes += index.pack_bytes;
        let mut now =
            Segment { pack, begin: 0, end: HEADER_BYTES as u64, entries: Vec::new(), tail_bytes: 0 };
        for entry in &index.entries {
            let end = entry.offset + u64::from(entry.stored_bytes);
            if end - now.begin > SEGMENT_BYTES as u64 {
                let next = Segment { pack, begin: now.end, end: now.end, entries: Vec::new(), tail_bytes: 0 };
                self.segments.push(std::mem::replace(&mut now, next));
            }
            now.end = end;
            now.entries.push(*entry);
        }
        let has_tail = index.pack_bytes == index.chunks_end() + index.tail_bytes();
        now.end = if has_tail { index.chunks_end() } else { index.pack_bytes };
        now.tail_bytes = index.pack_bytes - now.end;
        self.segments.push(now);
        if has_tail && Index::from_tail(&id, &*object, &self.store.codec).ok().as_ref() != Some(index) {
            self.report_object(&id.pack(), "the copy of its index at its end is damaged");
        }
        Ok(())
    }

    fn read_packs(&self, progress: ProgressFn, cancel: &AtomicBool) -> Result<(), ReadError> {
        let threads = self.store.limits.threads().min(self.segments.len());
        let mut buffers: Vec<_> = (0..threads).map(|_| None).collect();
        on_threads(&mut buffers, &self.segments, |buffers, segment| {
            if cancel.load(Ordering::Relaxed) {
                return Ok(());
            }
            let (block, scratch) =
                buffers.get_or_insert_with(|| (Block::new(SEGMENT_BYTES + 2 * BLOCK_ALIGN), Vec::new()));
            self.read_segment(segment, block, scratch)?;
            let bytes = segment.end + segment.tail_bytes - segment.begin;
            self.found.lock().read_bytes += bytes;
            progress(bytes);
            Ok(())
        })
    }

    /// Reads `segment` and checks its chunks and gaps.
    fn read_segment(
        &self,
        segment: &Segment,
        block: &mut Block,
        scratch: &mut Vec<u8>,
    ) -> Result<(), ReadError> {
        let pack = &self.packs[segment.pack];
        let Some(object) = self.open(pack.id)? else { return Ok(()) };
        // Align both ends for direct I/O.
        let begin = segment.begin - segment.begin % BLOCK_ALIGN as u64;
        let end = segment.end.next_multiple_of(BLOCK_ALIGN as u64).min(pack.bytes);
        let length = |from: u64, to: u64| usize::try_from(to - from).unwrap_or(usize::MAX);
        let Some(buffer) = block.get_mut(..length(begin, end)) else {
            self.report_object(
                &pack.id.pack(),
                "it has a longer gap between chunks than ckpt-run ever leaves",
            );
            return Ok(());
        };
        if let Err(error) = object.read_at(begin, buffer) {
            return self.report_unreadable(&pack.id.pack(), error);
        }
        let part = |from: u64, to: u64| &block[length(begin, from)..length(begin, to)];
        let mut position = segment.begin;
        if position == 0 {
            position = HEADER_BYTES as u64;
            if part(0, position) != pack::header(&pack.id, &self.store.codec) {
                self.report_object(&pack.id.pack(), "its header has been altered");
            }
        }
        for entry in &segment.entries {
            self.compare_gap(pack, position, part(position, entry.offset));
            position = entry.offset + u64::from(entry.stored_bytes);
            let location = Location { pack: pack.id, entry: *entry };
            if self.store.decode(&location, part(entry.offset, position), scratch).is_some() {
                continue;
            }
            self.store.change_index(|index| index.forget(&entry.id, &location));
            self.report_object(&pack.id.pack(), format!("the chunk at {} is damaged", entry.offset));
        }
        self.compare_gap(pack, position, part(position, segment.end));
        Ok(())
    }

    fn compare_gap(&self, pack: &Pack, begin: u64, gap: &[u8]) {
        if gap.iter().any(|&byte| byte != 0) {
            self.report_object(&pack.id.pack(), format!("the gap between chunks at {begin} is not zero"));
        }
    }
}

fn is_gone(error: io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}
