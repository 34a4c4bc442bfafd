//! Loading: reads each chunk once, in the order of the packs, checks its name, and writes it to all its targets.

use super::chunk_index::{ChunkIndex, Location};
use super::chunks::OpenPacks;
use super::{PackStore, on_threads};
use crate::chunk::{CHUNK_BYTES, ChunkId};
use crate::medium::{BLOCK_ALIGN, Block, ObjectReader};
use crate::pack::{self, HEADER_BYTES, PackId};
use crate::read_failure::copy_of;
use crate::store::{Load, ProgressFn, damaged, recorded};
use crate::{Damage, Manifest, ReadError};
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;

/// A chunk to load.
struct Wanted {
    id: ChunkId,
    bytes: u32,
    /// Its destinations: the number of the target, and the offset in it (bytes).
    destinations: Vec<(usize, u64)>,
}

/// Nearby chunks of a pack that are read together.
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
    let loading = Loading { store, manifest, wanted, progress, packs: OpenPacks::default() };
    let runs = loading.runs()?;
    let threads = store.limits.load_threads().min(runs.len());
    let mut buffers: Vec<_> = (0..threads).map(|_| None).collect();
    on_threads(&mut buffers, &runs, |reading, run| {
        loading.read_run(run, reading.get_or_insert_with(Reading::new))
    })
}

/// The most memory that the buffers of one thread take (bytes): a block, and what [`Codec::decode`](crate::codec::Codec::decode)
/// needs.
pub const THREAD_BYTES: usize = (2 + 3) * CHUNK_BYTES;

/// How often the indexes are read again for a load, since a chunk is in none of them.
const INDEX_READS: usize = 3;

/// The buffers of one thread.
struct Reading {
    block: Block,
    scratch: Vec<u8>,
}

impl Reading {
    fn new() -> Self {
        Self { block: Block::new(2 * CHUNK_BYTES), scratch: Vec::new() }
    }
}

struct Loading<'a> {
    store: &'a PackStore,
    manifest: &'a Manifest,
    wanted: &'a [Load<'a>],
    progress: ProgressFn<'a>,
    packs: OpenPacks,
}

impl Loading<'_> {
    /// What to read. Another process may have moved chunks since the indexes were last read, and again while they are read.
    fn runs(&self) -> Result<Vec<Run>, ReadError> {
        for _ in 0..INDEX_READS {
            if let Ok(runs) = self.locate(self.plan()?) {
                return Ok(runs);
            }
            self.store.refresh()?;
        }
        self.locate(self.plan()?)
    }

    fn damaged(&self, damage: Damage) -> ReadError {
        damaged(&self.manifest.id, damage)
    }

    /// Collects the destinations of each chunk, and sets the lengths of the targets.
    fn plan(&self) -> Result<HashMap<ChunkId, Wanted>, ReadError> {
        let files: HashMap<_, _> = self.manifest.files.iter().map(|file| (&file.path, file)).collect();
        let mut chunks: HashMap<ChunkId, Wanted> = HashMap::new();
        for (number, one) in self.wanted.iter().enumerate() {
            let file = match files.get(one.path) {
                Some(file) => *file,
                None => recorded(self.manifest, one.path)?,
            };
            one.into.set_bytes(file.bytes).map_err(|source| self.target_failed(number, source))?;
            let mut offset = 0;
            for chunk in &file.chunks {
                let bytes = chunk.bytes;
                if !one.into.wants(offset..offset + u64::from(bytes)) {
                    // Another target has it.
                } else if chunk.id.is_zeroes() {
                    (self.progress)(bytes.into());
                } else {
                    let new = || Wanted { id: chunk.id, bytes, destinations: Vec::new() };
                    let wanted = chunks.entry(chunk.id).or_insert_with(new);
                    if wanted.bytes != bytes {
                        let damage = format!("{} has one chunk with two different lengths", one.path);
                        return Err(self.damaged(Damage::Manifest(damage)));
                    }
                    wanted.destinations.push((number, offset));
                }
                offset += u64::from(bytes);
            }
        }
        Ok(chunks)
    }

    fn target_failed(&self, number: usize, source: io::Error) -> ReadError {
        ReadError::Target { path: self.wanted[number].path.to_string(), source }
    }

    fn name_of(&self, wanted: &Wanted) -> String {
        wanted
            .destinations
            .first()
            .map_or_else(String::new, |(number, _)| self.wanted[*number].path.to_string())
    }

    /// Locates all chunks, sorts them by pack and offset, and combines nearby ones to runs.
    fn locate(&self, chunks: HashMap<ChunkId, Wanted>) -> Result<Vec<Run>, ReadError> {
        let mut located = self.store.with_index(|index| {
            let one = |wanted: Wanted| {
                let location = index.locations(&wanted.id).first().copied();
                let location = location.ok_or_else(|| self.damaged(self.missing(index, &wanted)))?;
                Ok::<_, ReadError>((location, wanted))
            };
            chunks.into_values().map(one).collect::<Result<Vec<_>, _>>()
        })??;
        located.sort_by_key(|(location, _)| (location.pack, location.entry.offset));
        let mut runs: Vec<Run> = Vec::new();
        for (location, wanted) in located {
            let entry = location.entry;
            if entry.raw_bytes != wanted.bytes {
                let damage =
                    format!("{} has a chunk with another length than in its pack", self.name_of(&wanted));
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

    /// The damage for a chunk that no index lists.
    fn missing(&self, index: &ChunkIndex, wanted: &Wanted) -> Damage {
        match index.broken.first() {
            Some((pack, reason)) => {
                Damage::Object { object: self.store.medium.describe(&pack.index()), reason: reason.clone() }
            }
            None => Damage::NoChunk { path: self.name_of(wanted), chunk: wanted.id.to_string() },
        }
    }

    /// The pack, whose header is checked when it is opened.
    fn open(&self, pack: PackId) -> Result<Arc<dyn ObjectReader>, ReadError> {
        self.packs.get(pack, || {
            let name = pack.pack();
            let object = || self.store.medium.describe(&name);
            let wrong = |reason: String| self.damaged(Damage::Object { object: object(), reason });
            let opened = self.store.medium.open(&name).map_err(|error| self.unreadable(pack, error))?;
            let recorded = self.store.with_index(|index| index.pack_bytes(&pack))?;
            if recorded.is_some_and(|recorded| recorded != opened.bytes()) {
                return Err(wrong(format!("it has {} bytes, not the length in its index", opened.bytes())));
            }
            let mut header = [0; HEADER_BYTES];
            opened.read_at(0, &mut header).map_err(|error| self.unreadable(pack, error))?;
            if header != pack::header(&pack, &self.store.codec) {
                return Err(wrong("its header has been altered".to_owned()));
            }
            Ok(opened)
        })
    }

    fn unreadable(&self, pack: PackId, source: io::Error) -> ReadError {
        self.store.unreadable(&self.manifest.id, &pack.pack(), source)
    }

    /// Reads the range `begin..end` of a pack to the beginning of the block.
    fn read_range(&self, pack: PackId, begin: u64, end: u64, block: &mut Block) -> Result<(), ReadError> {
        let object = self.open(pack)?;
        let bytes = usize::try_from(end - begin).expect("a run is small");
        // Reads of whole blocks are faster.
        let left_bytes = usize::try_from(object.bytes().saturating_sub(begin)).unwrap_or(usize::MAX);
        let padded = bytes.next_multiple_of(BLOCK_ALIGN);
        let padded = if padded <= left_bytes { padded } else { bytes };
        object.read_at(begin, &mut block[..padded]).map_err(|error| self.unreadable(pack, error))
    }

    fn read_run(&self, run: &Run, reading: &mut Reading) -> Result<(), ReadError> {
        let read = self.read_range(run.pack, run.begin, run.end, &mut reading.block);
        for (location, wanted) in &run.chunks {
            let at = usize::try_from(location.entry.offset - run.begin).expect("a run is small");
            let stored = &reading.block[at..at + location.entry.stored_bytes as usize];
            let found = match &read {
                Ok(()) => self.store.decode(location, stored, &mut reading.scratch),
                Err(_) => None,
            };
            match found {
                Some(content) => self.deliver(wanted, content)?,
                // Another pack may have an intact copy.
                None => self.read_elsewhere(location, wanted, &read)?,
            }
        }
        Ok(())
    }

    /// Reads a chunk from another pack, since the copy at `wrong` is not usable. `read` is the result of reading that.
    fn read_elsewhere(
        &self,
        wrong: &Location,
        wanted: &Wanted,
        read: &Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        // The chunk is damaged: the next save stores it again.
        if read.is_ok() {
            self.store.change_index(|index| index.forget(&wanted.id, wrong));
        }
        // Another process may have moved the chunk and removed the pack since the indexes were read, and again since then.
        // An access that fails says nothing about the chunk.
        let may_be_moved = matches!(read, Err(error) if !matches!(error, ReadError::Io { .. }));
        let (mut tried, mut is_fresh) = (HashSet::from([(wrong.pack, wrong.entry.offset)]), false);
        let mut reading = Reading::new();
        loop {
            let found = self.store.with_index(|index| index.locations(&wanted.id).to_vec())?;
            let others = found.into_iter().filter(|other| other.entry.raw_bytes == wanted.bytes);
            let others: Vec<_> =
                others.filter(|other| tried.insert((other.pack, other.entry.offset))).collect();
            for other in &others {
                let (begin, stored_bytes) = (other.entry.offset, other.entry.stored_bytes);
                let end = begin + u64::from(stored_bytes);
                if self.read_range(other.pack, begin, end, &mut reading.block).is_err() {
                    continue;
                }
                let stored = &reading.block[..stored_bytes as usize];
                if let Some(content) = self.store.decode(other, stored, &mut reading.scratch) {
                    return self.deliver(wanted, content);
                }
            }
            if !may_be_moved || others.is_empty() && is_fresh {
                break;
            }
            self.store.refresh()?;
            is_fresh = true;
        }
        match read {
            Err(ReadError::Io { step, path, source }) => {
                Err(ReadError::Io { step, path: path.clone(), source: copy_of(source) })
            }
            // Keeps the I/O error, which may be temporary.
            Err(ReadError::Damaged { damage: Damage::Unreadable { path, source }, .. }) => {
                Err(self.damaged(Damage::Unreadable { path: path.clone(), source: copy_of(source) }))
            }
            Err(error) => {
                let reason = error.to_string();
                Err(self.damaged(Damage::Object { object: self.name_of(wanted), reason }))
            }
            Ok(()) => Err(self.damaged(Damage::Checksum { path: self.name_of(wanted) })),
        }
    }

    fn deliver(&self, wanted: &Wanted, content: &[u8]) -> Result<(), ReadError> {
        for (number, offset) in &wanted.destinations {
            let target = self.wanted[*number].into;
            target.write_at(*offset, content).map_err(|source| self.target_failed(*number, source))?;
            (self.progress)(content.len() as u64);
        }
        Ok(())
    }
}
