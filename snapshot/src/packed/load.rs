//! Loading: chunks are read in the order in which they lie in their packs, each once, compared with their names, and
//! put wherever they are wanted.

use super::PackStore;
use super::chunks::OpenPacks;
use super::known::{Known, Location};
use crate::chunk::{CHUNK_BYTES, ChunkId};
use crate::medium::{BLOCK_ALIGN, Block, ObjectReader};
use crate::pack::{self, HEADER_BYTES, PackId};
use crate::read_failure::{ReadFailure, classify};
use crate::store::{Load, ProgressFn, recorded};
use crate::{Damage, Manifest, ReadError};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// One chunk that is wanted.
struct Wanted {
    id: ChunkId,
    bytes: u32,
    /// Which of the targets, and where in it (bytes).
    places: Vec<(usize, u64)>,
}

/// Chunks that lie beside each other in a pack, and are read together.
struct Run {
    pack: PackId,
    begin: u64,
    end: u64,
    chunks: Vec<(Location, Wanted)>,
}

/// See [`crate::Store::load`].
pub fn load(
    store: &PackStore,
    manifest: &Manifest,
    wanted: &[Load<'_>],
    progress: ProgressFn,
) -> Result<(), ReadError> {
    let loading = Loading {
        store,
        manifest,
        wanted,
        progress,
        packs: OpenPacks::default(),
        is_fresh: Mutex::default(),
    };
    let chunks = loading.plan()?;
    let runs = match loading.locate(chunks) {
        Ok(runs) => runs,
        // Another process may have moved chunks since the indexes were read.
        Err(_) => {
            loading.refresh()?;
            loading.locate(loading.plan()?)?
        }
    };
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let threads = store.limits.threads().min(runs.len());
    let work = || {
        let mut reading = Reading { block: Block::new(2 * CHUNK_BYTES), scratch: Vec::new() };
        while !stop.load(Ordering::Relaxed)
            && let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed))
        {
            loading.read_run(run, &mut reading).inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running.into_iter().map(|thread| thread.join().expect("no panic in a load")).fold(Ok(()), Result::and)
    })
}

/// The memory of one thread.
struct Reading {
    block: Block,
    scratch: Vec<u8>,
}

struct Loading<'a> {
    store: &'a PackStore,
    manifest: &'a Manifest,
    wanted: &'a [Load<'a>],
    progress: ProgressFn<'a>,
    packs: OpenPacks,
    /// The indexes were read again for this load.
    is_fresh: Mutex<bool>,
}

impl Loading<'_> {
    /// Reads the indexes again, once: of whatever another process has moved, all was moved before it was removed.
    fn refresh(&self) -> Result<(), ReadError> {
        let mut is_fresh = self.is_fresh.lock();
        if !*is_fresh {
            self.store.refresh()?;
            *is_fresh = true;
        }
        Ok(())
    }

    fn damaged(&self, damage: Damage) -> ReadError {
        ReadError::Damaged { id: self.manifest.id.to_string(), damage }
    }

    /// Where each chunk goes. Targets learn how long they become.
    fn plan(&self) -> Result<HashMap<ChunkId, Wanted>, ReadError> {
        let files: HashMap<_, _> = self.manifest.files.iter().map(|file| (&file.path, file)).collect();
        let mut chunks: HashMap<ChunkId, Wanted> = HashMap::new();
        for (number, one) in self.wanted.iter().enumerate() {
            let file = match files.get(one.path) {
                Some(file) => *file,
                None => recorded(self.manifest, one.path)?,
            };
            one.into.set_bytes(file.bytes).map_err(|source| self.refused(number, source))?;
            let mut offset = 0;
            for chunk in &file.chunks {
                let bytes = chunk.bytes;
                if chunk.id.is_zeroes() {
                    (self.progress)(bytes.into());
                } else {
                    let new = || Wanted { id: chunk.id, bytes, places: Vec::new() };
                    let wanted = chunks.entry(chunk.id).or_insert_with(new);
                    if wanted.bytes != bytes {
                        let damage = format!("{} has a chunk of two lengths", one.path);
                        return Err(self.damaged(Damage::Manifest(damage)));
                    }
                    wanted.places.push((number, offset));
                }
                offset += u64::from(bytes);
            }
        }
        Ok(chunks)
    }

    fn refused(&self, number: usize, source: io::Error) -> ReadError {
        ReadError::Target { path: self.wanted[number].path.to_string(), source }
    }

    fn name_of(&self, wanted: &Wanted) -> String {
        wanted.places.first().map_or_else(String::new, |(number, _)| self.wanted[*number].path.to_string())
    }

    /// Finds all chunks, in the order in which they lie, in pieces that are read at once.
    fn locate(&self, chunks: HashMap<ChunkId, Wanted>) -> Result<Vec<Run>, ReadError> {
        let mut located = self.store.with_known(|known| {
            let one = |wanted: Wanted| {
                let location = known.locations(&wanted.id).next().copied();
                let location = location.ok_or_else(|| self.damaged(self.missing(known, &wanted)))?;
                Ok::<_, ReadError>((location, wanted))
            };
            chunks.into_values().map(one).collect::<Result<Vec<_>, _>>()
        })??;
        located.sort_by_key(|(location, _)| (location.pack, location.entry.offset));
        let mut runs: Vec<Run> = Vec::new();
        for (location, wanted) in located {
            let entry = location.entry;
            if entry.raw_bytes != wanted.bytes {
                let damage = format!("{} has a chunk of another length than its pack", self.name_of(&wanted));
                return Err(self.damaged(Damage::Manifest(damage)));
            }
            let end = entry.offset + u64::from(entry.stored_bytes);
            match runs.last_mut() {
                Some(run)
                    if run.pack == location.pack
                        && entry.offset <= run.end + self.store.limits.gap_bytes
                        && end - run.begin <= CHUNK_BYTES as u64 =>
                {
                    run.end = end;
                    run.chunks.push((location, wanted));
                }
                _ => {
                    let (pack, begin) = (location.pack, entry.offset);
                    runs.push(Run { pack, begin, end, chunks: vec![(location, wanted)] });
                }
            }
        }
        Ok(runs)
    }

    /// Why a chunk is not to be found.
    fn missing(&self, known: &Known, wanted: &Wanted) -> Damage {
        match known.broken.first() {
            Some((pack, reason)) => {
                Damage::Object { object: self.store.medium.describe(&pack.index()), reason: reason.clone() }
            }
            None => Damage::NoChunk { path: self.name_of(wanted), chunk: wanted.id.to_string() },
        }
    }

    /// The pack, with its header compared when it was opened.
    fn open(&self, pack: PackId) -> Result<Arc<dyn ObjectReader>, ReadError> {
        self.packs.get(pack, || {
            let name = pack.pack();
            let object = || self.store.medium.describe(&name);
            let wrong = |reason: String| self.damaged(Damage::Object { object: object(), reason });
            let opened = self.store.medium.open(&name).map_err(|error| self.unreadable(pack, error))?;
            let recorded = self.store.with_known(|known| known.pack_bytes(&pack))?;
            if recorded.is_some_and(|recorded| recorded != opened.bytes()) {
                return Err(wrong(format!("it has {} bytes, its index says otherwise", opened.bytes())));
            }
            let mut header = [0; HEADER_BYTES];
            opened.read_at(0, &mut header).map_err(|error| self.unreadable(pack, error))?;
            if header != pack::header(&pack, &self.store.codec) {
                return Err(wrong("its header has been altered".to_owned()));
            }
            Ok(opened)
        })
    }

    /// A pack that cannot be read: damage, unless it is the medium that fails.
    fn unreadable(&self, pack: PackId, source: io::Error) -> ReadError {
        let path = self.store.medium.describe(&pack.pack());
        match classify(&source) {
            ReadFailure::Access => ReadError::Io { step: "read", path: path.into(), source },
            ReadFailure::Damaged | ReadFailure::Unreadable => {
                self.damaged(Damage::Unreadable { path, source })
            }
        }
    }

    /// Reads the stretch `begin..end` of a pack to the beginning of the block.
    fn read_stretch(&self, pack: PackId, begin: u64, end: u64, block: &mut Block) -> Result<(), ReadError> {
        let object = self.open(pack)?;
        let bytes = usize::try_from(end - begin).expect("a run is small");
        // Whole blocks are read faster than parts of them.
        let left_bytes = usize::try_from(object.bytes().saturating_sub(begin)).unwrap_or(usize::MAX);
        let padded = bytes.next_multiple_of(BLOCK_ALIGN);
        let padded = if padded <= left_bytes { padded } else { bytes };
        object.read_at(begin, &mut block[..padded]).map_err(|error| self.unreadable(pack, error))
    }

    fn read_run(&self, run: &Run, reading: &mut Reading) -> Result<(), ReadError> {
        let read = self.read_stretch(run.pack, run.begin, run.end, &mut reading.block);
        for (location, wanted) in &run.chunks {
            let at = usize::try_from(location.entry.offset - run.begin).expect("a run is small");
            let stored = &reading.block[at..at + location.entry.stored_bytes as usize];
            let found = match &read {
                Ok(()) => self.content(location, wanted, stored, &mut reading.scratch),
                Err(_) => None,
            };
            match found {
                Some(content) => self.deliver(wanted, content)?,
                // It may lie somewhere else as well.
                None => self.read_elsewhere(location, wanted, &read)?,
            }
        }
        Ok(())
    }

    /// What `stored` holds, if it is the chunk.
    fn content<'b>(
        &self,
        location: &Location,
        wanted: &Wanted,
        stored: &'b [u8],
        scratch: &'b mut Vec<u8>,
    ) -> Option<&'b [u8]> {
        let (codec, entry) = (&self.store.codec, &location.entry);
        let bytes = wanted.bytes as usize;
        let content =
            codec.decode(&location.pack, entry.offset, entry.encoding, stored, bytes, scratch).ok()?;
        (codec.id(content) == wanted.id).then_some(content)
    }

    /// Looks for a chunk in other packs than the one where it was not.
    fn read_elsewhere(
        &self,
        wrong: &Location,
        wanted: &Wanted,
        why: &Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        match why {
            // The medium fails, which says nothing of the chunk.
            Err(ReadError::Io { .. }) => {}
            // Another process may have moved the chunk and removed the pack since the indexes were read.
            Err(_) => self.refresh()?,
            // The next save is to store it anew.
            Ok(()) => self.store.change_known(|known| known.forget(&wanted.id, wrong)),
        }
        let others: Vec<Location> =
            self.store.with_known(|known| known.locations(&wanted.id).copied().collect())?;
        let mut reading = Reading { block: Block::new(2 * CHUNK_BYTES), scratch: Vec::new() };
        for other in others {
            let (begin, stored_bytes) = (other.entry.offset, other.entry.stored_bytes);
            let end = begin + u64::from(stored_bytes);
            if self.read_stretch(other.pack, begin, end, &mut reading.block).is_err() {
                continue;
            }
            let stored = &reading.block[..stored_bytes as usize];
            if let Some(content) = self.content(&other, wanted, stored, &mut reading.scratch) {
                return self.deliver(wanted, content);
            }
        }
        match why {
            Err(ReadError::Io { step, path, source }) => {
                let source = io::Error::new(source.kind(), source.to_string());
                Err(ReadError::Io { step, path: path.clone(), source })
            }
            Err(error) => {
                let reason = error.to_string();
                Err(self.damaged(Damage::Object { object: self.name_of(wanted), reason }))
            }
            Ok(()) => Err(self.damaged(Damage::Checksum { path: self.name_of(wanted) })),
        }
    }

    fn deliver(&self, wanted: &Wanted, content: &[u8]) -> Result<(), ReadError> {
        for (number, offset) in &wanted.places {
            let target = self.wanted[*number].into;
            target.write_at(*offset, content).map_err(|source| self.refused(*number, source))?;
            (self.progress)(content.len() as u64);
        }
        Ok(())
    }
}
