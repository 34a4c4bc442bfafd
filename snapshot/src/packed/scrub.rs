//! Reading everything that a store has, whether a snapshot needs it or not.

use super::PackStore;
use super::chunks::OpenPacks;
use super::known::Location;
use crate::chunk::CHUNK_BYTES;
use crate::medium::{BLOCK_ALIGN, Block, ObjectReader, read_all};
use crate::pack::{self, Entry, FormatError, HEADER_BYTES, INDEX_MAX_BYTES, Index, PACKS, PackId};
use crate::read_failure::{ReadFailure, classify};
use crate::store::{ProgressFn, Store};
use crate::{Damage, ReadError, RelPath};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// So much is read at once (bytes).
const STRETCH_BYTES: usize = 2 * CHUNK_BYTES;

/// What [`PackStore::scrub`] found.
#[derive(Debug, Default)]
pub struct Scrubbed {
    /// Packs that were read.
    pub packs: usize,
    /// Their length (bytes).
    pub pack_bytes: u64,
    /// Manifests that were read.
    pub manifests: usize,
    /// All that is amiss.
    pub damage: Vec<Damage>,
}

/// A part of a pack: chunks and what lies between them.
struct Stretch {
    pack: usize,
    begin: u64,
    end: u64,
    entries: Vec<Entry>,
}

struct Pack {
    id: PackId,
    bytes: u64,
}

struct Scrubbing<'a> {
    store: &'a PackStore,
    packs: Vec<Pack>,
    open: OpenPacks,
    stretches: Vec<Stretch>,
    found: Mutex<Scrubbed>,
}

impl PackStore {
    /// Reads all that there is: every manifest, every index, every pack from its header to its end, whether a snapshot
    /// needs it or not. `progress` is told bytes of packs; their sum is [`PackStore::pack_bytes`]. Chunks that are found
    /// damaged are stored anew by the next save that has them. `cancel` ends it early.
    ///
    /// # Errors
    /// When the medium fails. What is damaged is no error but in [`Scrubbed::damage`].
    pub fn scrub(&self, progress: ProgressFn, cancel: &AtomicBool) -> Result<Scrubbed, ReadError> {
        self.with_known(|_| ())?;
        let mut scrubbing = Scrubbing {
            store: self,
            packs: Vec::new(),
            open: OpenPacks::default(),
            stretches: Vec::new(),
            found: Mutex::default(),
        };
        scrubbing.read_manifests()?;
        scrubbing.read_indexes()?;
        scrubbing.read_packs(progress, cancel)?;
        Ok(scrubbing.found.into_inner())
    }

    /// Length of all packs (bytes).
    ///
    /// # Errors
    /// When the medium fails.
    pub fn pack_bytes(&self) -> Result<u64, ReadError> {
        let listed = self.list_packs()?;
        Ok(listed.iter().filter(|(name, _)| name.ends_with(".pack")).map(|(_, bytes)| bytes).sum())
    }

    fn list_packs(&self) -> Result<Vec<(String, u64)>, ReadError> {
        let folder = RelPath::new(PACKS).expect("a plain path");
        let failed = |source| ReadError::Io { step: "read", path: self.address(&folder), source };
        self.medium.list(&folder).map_err(failed)
    }
}

impl Scrubbing<'_> {
    fn amiss(&self, damage: Damage) {
        self.found.lock().damage.push(damage);
    }

    fn object_is(&self, name: &RelPath, reason: impl Into<String>) {
        let (object, reason) = (self.store.medium.describe(name), reason.into());
        self.amiss(Damage::Object { object, reason });
    }

    fn read_manifests(&mut self) -> Result<(), ReadError> {
        for id in self.store.ids()? {
            match self.store.manifest(&id) {
                Err(ReadError::Missing(_)) => continue,
                Ok(_) => {}
                Err(ReadError::Damaged { damage, .. }) => self.amiss(damage),
                Err(error @ ReadError::Hostile { .. }) => self.amiss(Damage::Manifest(error.to_string())),
                Err(error) => return Err(error),
            }
            self.found.get_mut().manifests += 1;
        }
        Ok(())
    }

    /// What `error` says of the object `name`: damage, unless it says nothing of it.
    fn is_unreadable(&self, name: &RelPath, source: io::Error) -> Result<(), ReadError> {
        if classify(&source) == ReadFailure::Access {
            return Err(ReadError::Io { step: "read", path: self.store.address(name), source });
        }
        self.object_is(name, source.to_string());
        Ok(())
    }

    /// Reads the indexes and divides the packs into stretches. Packs without an index are nobody's: they are not read.
    fn read_indexes(&mut self) -> Result<(), ReadError> {
        let listed = self.store.list_packs()?;
        let ids: BTreeSet<PackId> = listed
            .iter()
            .filter_map(|(name, _)| name.strip_suffix(".index").and_then(PackId::parse))
            .collect();
        for id in ids {
            let bytes = match read_all(&*self.store.medium, &id.index(), INDEX_MAX_BYTES) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => {
                    self.is_unreadable(&id.index(), error)?;
                    continue;
                }
                Ok(bytes) => bytes,
            };
            let what = || self.store.medium.describe(&id.index());
            match Index::decode(&id, &bytes, &self.store.codec) {
                Ok(index) => self.divide(id, &index)?,
                Err(FormatError::Key(reason)) => return Err(ReadError::Key { what: what(), reason }),
                Err(FormatError::Newer { found, known }) => {
                    return Err(ReadError::NewerObject { what: what(), found, known });
                }
                Err(error) => self.object_is(&id.index(), error.to_string()),
            }
        }
        Ok(())
    }

    /// The pack; `None` when it cannot be opened, which is noted unless it went with its index meanwhile.
    fn open(&self, id: PackId) -> Result<Option<Arc<dyn ObjectReader>>, ReadError> {
        match self.open.get(id, || self.store.medium.open(&id.pack())) {
            Ok(object) => Ok(Some(object)),
            Err(_) if self.store.medium.open(&id.index()).is_err_and(is_gone) => Ok(None),
            Err(error) => self.is_unreadable(&id.pack(), error).map(|()| None),
        }
    }

    fn divide(&mut self, id: PackId, index: &Index) -> Result<(), ReadError> {
        let Some(object) = self.open(id)? else { return Ok(()) };
        if object.bytes() != index.pack_bytes {
            let reason = format!("it has {} bytes, its index says {}", object.bytes(), index.pack_bytes);
            self.object_is(&id.pack(), reason);
            return Ok(());
        }
        let pack = self.packs.len();
        self.packs.push(Pack { id, bytes: index.pack_bytes });
        let found = self.found.get_mut();
        found.packs += 1;
        found.pack_bytes += index.pack_bytes;
        let mut now = Stretch { pack, begin: 0, end: HEADER_BYTES as u64, entries: Vec::new() };
        for entry in &index.entries {
            let end = entry.offset + u64::from(entry.stored_bytes);
            if end - now.begin > STRETCH_BYTES as u64 {
                let next = Stretch { pack, begin: now.end, end: now.end, entries: Vec::new() };
                self.stretches.push(std::mem::replace(&mut now, next));
            }
            now.end = end;
            now.entries.push(*entry);
        }
        now.end = index.pack_bytes;
        self.stretches.push(now);
        Ok(())
    }

    fn read_packs(&self, progress: ProgressFn, cancel: &AtomicBool) -> Result<(), ReadError> {
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let threads = self.store.limits.threads().min(self.stretches.len());
        let work = || -> Result<(), ReadError> {
            let mut room = (Block::new(STRETCH_BYTES + 2 * BLOCK_ALIGN), Vec::new());
            while !cancel.load(Ordering::Relaxed)
                && !stop.load(Ordering::Relaxed)
                && let Some(stretch) = self.stretches.get(next.fetch_add(1, Ordering::Relaxed))
            {
                let read = self.read_stretch(stretch, &mut room.0, &mut room.1);
                read.inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
                progress(stretch.end - stretch.begin);
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let ended = running.into_iter().map(|thread| thread.join().expect("no panic in a scrub"));
            ended.fold(Ok(()), Result::and)
        })
    }

    /// Compares all that lies in `stretch`.
    fn read_stretch(
        &self,
        stretch: &Stretch,
        block: &mut Block,
        scratch: &mut Vec<u8>,
    ) -> Result<(), ReadError> {
        let pack = &self.packs[stretch.pack];
        let Some(object) = self.open(pack.id)? else { return Ok(()) };
        // From a multiple of what suits direct I/O on, to one where there is more.
        let begin = stretch.begin - stretch.begin % BLOCK_ALIGN as u64;
        let end = stretch.end.next_multiple_of(BLOCK_ALIGN as u64).min(pack.bytes);
        let length = |from: u64, to: u64| usize::try_from(to - from).unwrap_or(usize::MAX);
        let Some(room) = block.get_mut(..length(begin, end)) else {
            self.object_is(&pack.id.pack(), "it has a stretch without chunks that nobody writes");
            return Ok(());
        };
        if let Err(error) = object.read_at(begin, room) {
            return self.is_unreadable(&pack.id.pack(), error);
        }
        let part = |from: u64, to: u64| &block[length(begin, from)..length(begin, to)];
        let mut position = stretch.begin;
        if position == 0 {
            position = HEADER_BYTES as u64;
            if part(0, position) != pack::header(&pack.id, &self.store.codec) {
                self.object_is(&pack.id.pack(), "its header has been altered");
            }
        }
        let codec = &self.store.codec;
        for entry in &stretch.entries {
            self.compare_gap(pack, position, part(position, entry.offset));
            position = entry.offset + u64::from(entry.stored_bytes);
            let (stored, raw_bytes) = (part(entry.offset, position), entry.raw_bytes as usize);
            let content = codec.decode(&pack.id, entry.offset, entry.encoding, stored, raw_bytes, scratch);
            if content.is_ok_and(|content| codec.id(content) == entry.id) {
                continue;
            }
            let location = Location { pack: pack.id, entry: *entry };
            self.store.change_known(|known| known.forget(&entry.id, &location));
            self.object_is(&pack.id.pack(), format!("the chunk at {} is damaged", entry.offset));
        }
        self.compare_gap(pack, position, part(position, stretch.end));
        Ok(())
    }

    fn compare_gap(&self, pack: &Pack, begin: u64, gap: &[u8]) {
        if gap.iter().any(|&byte| byte != 0) {
            self.object_is(&pack.id.pack(), format!("between chunks, at {begin}, there is something"));
        }
    }
}

fn is_gone(error: io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}
