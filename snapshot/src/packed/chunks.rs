//! Reads single chunks from packs and checks their names.

use super::PackStore;
use super::chunk_index::Location;
use crate::chunk::CHUNK_BYTES;
use crate::codec::Encoding;
use crate::medium::{BLOCK_ALIGN, Block, ObjectReader};
use crate::pack::PackId;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

/// The maximum number of cached open packs; each takes up to two descriptors, or a connection.
const OPEN_MAX: usize = 64;

/// A cache of open packs: at most [`OPEN_MAX`], besides those in use.
#[derive(Default)]
pub struct OpenPacks(Mutex<HashMap<PackId, Arc<dyn ObjectReader>>>);

impl OpenPacks {
    /// The pack, opened by `open` if it is not in the cache.
    ///
    /// # Errors
    /// The error of `open`.
    pub fn get<E>(
        &self,
        pack: PackId,
        open: impl FnOnce() -> Result<Box<dyn ObjectReader>, E>,
    ) -> Result<Arc<dyn ObjectReader>, E> {
        let all = || self.0.lock();
        if let Some(object) = all().get(&pack) {
            return Ok(object.clone());
        }
        let object: Arc<dyn ObjectReader> = open()?.into();
        let mut all = all();
        if all.len() >= OPEN_MAX {
            all.clear();
        }
        all.insert(pack, object.clone());
        Ok(object)
    }
}

/// The buffers of one reader.
pub struct Buffers {
    block: Block,
    scratch: Vec<u8>,
    ahead: ReadAhead,
}

/// A part of a pack that was read ahead.
#[derive(Default)]
struct ReadAhead {
    at: Option<(PackId, u64)>,
    content: Vec<u8>,
}

impl ReadAhead {
    /// The encoded chunk at `location`, if it was read ahead.
    fn find(&self, location: &Location) -> Option<&[u8]> {
        let (_, begin) = self.at.filter(|(pack, _)| *pack == location.pack)?;
        let from = usize::try_from(location.entry.offset.checked_sub(begin)?).ok()?;
        self.content.get(from..from.checked_add(location.entry.stored_bytes as usize)?)
    }
}

impl Buffers {
    pub fn new() -> Self {
        // An incompressible chunk grows slightly when it is encoded.
        let block = Block::new(CHUNK_BYTES + 2 * BLOCK_ALIGN);
        Self { block, scratch: Vec::new(), ahead: ReadAhead::default() }
    }

    /// Whether the chunk at `location` was read ahead.
    pub fn has(&self, location: &Location) -> bool {
        self.ahead.find(location).is_some()
    }
}

/// Open packs and buffers that readers of one store share: a copy has a reader for each of possibly thousands of files.
#[derive(Default)]
pub struct Shared {
    open: OpenPacks,
    /// Free buffers: as many as chunks were ever read concurrently.
    free: Mutex<Vec<Buffers>>,
}

/// Reads chunks of a store.
pub struct Chunks<'a> {
    store: &'a PackStore,
    shared: Arc<Shared>,
}

impl<'a> Chunks<'a> {
    pub fn new(store: &'a PackStore) -> Self {
        Self { store, shared: Arc::default() }
    }

    /// A reader that shares open packs and buffers with all other shared readers. The last one frees them.
    pub fn shared(store: &'a PackStore) -> Self {
        let mut current = store.sources.lock();
        let shared = current.upgrade().unwrap_or_default();
        *current = Arc::downgrade(&shared);
        Self { store, shared }
    }

    /// Does `work` with free buffers.
    pub fn with_buffers<T>(&self, work: impl FnOnce(&mut Buffers) -> T) -> T {
        let free = self.shared.free.lock().pop();
        let mut buffers = free.unwrap_or_else(Buffers::new);
        let result = work(&mut buffers);
        self.shared.free.lock().push(buffers);
        result
    }

    fn open(&self, pack: PackId) -> io::Result<Arc<dyn ObjectReader>> {
        self.shared.open.get(pack, || self.store.medium.open(&pack.pack()))
    }

    /// Reads the first of these chunks, which are in one pack in this order, together with nearby ones in one request.
    /// Ignores errors: a later read of the single chunk reports them.
    pub fn read_ahead(&self, locations: &[Location], buffers: &mut Buffers) {
        let Some(first) = locations.first().filter(|first| !buffers.has(first)) else { return };
        let begin = first.entry.offset;
        let mut end = begin;
        for Location { entry, .. } in locations {
            let next = entry.offset.saturating_add(entry.stored_bytes.into());
            if entry.offset > end.saturating_add(self.store.limits.gap_bytes)
                || next > begin + CHUNK_BYTES as u64
            {
                break;
            }
            end = end.max(next);
        }
        let ReadAhead { at, content } = &mut buffers.ahead;
        content.resize(usize::try_from(end - begin).expect("not more than a chunk"), 0);
        let read = self.open(first.pack).and_then(|object| object.read_at(begin, content));
        *at = read.is_ok().then_some((first.pack, begin));
    }

    /// Reads the chunk at `location`.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if the chunk is damaged, and read errors.
    pub fn read<'r>(&self, location: &Location, buffers: &'r mut Buffers) -> io::Result<&'r [u8]> {
        let length = location.entry.stored_bytes as usize;
        let Buffers { block, scratch, ahead } = buffers;
        let stored = match ahead.find(location) {
            Some(stored) => stored,
            None => {
                let stored = block.get_mut(..length).ok_or_else(|| damaged(location))?;
                self.open(location.pack)?.read_at(location.entry.offset, stored)?;
                stored
            }
        };
        self.store.decode(location, stored, scratch).ok_or_else(|| damaged(location))
    }

    /// Reads the chunk at `location` to `into`, without a copy if possible.
    ///
    /// # Errors
    /// As [`Chunks::read`].
    pub fn read_to(&self, location: &Location, into: &mut [u8], buffers: &mut Buffers) -> io::Result<()> {
        let entry = &location.entry;
        if into.len() != entry.raw_bytes as usize {
            return Err(damaged(location));
        }
        if !buffers.has(location)
            && self.store.codec.is_plain()
            && entry.encoding == Encoding::Raw
            && into.len() == entry.stored_bytes as usize
        {
            self.open(location.pack)?.read_at(entry.offset, into)?;
            let is_intact = self.store.codec.id(into) == entry.id;
            return if is_intact { Ok(()) } else { Err(damaged(location)) };
        }
        into.copy_from_slice(self.read(location, buffers)?);
        Ok(())
    }
}

fn damaged(location: &Location) -> io::Error {
    let message = format!("the chunk {} is damaged in the pack {}", location.entry.id, location.pack);
    io::Error::new(io::ErrorKind::InvalidData, message)
}
