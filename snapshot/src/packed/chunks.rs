//! Single chunks, read where they lie and compared with their names.

use super::PackStore;
use super::known::Location;
use crate::chunk::CHUNK_BYTES;
use crate::codec::Encoding;
use crate::medium::{BLOCK_ALIGN, Block, ObjectReader};
use crate::pack::PackId;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

/// So many packs stay open (each is up to two descriptors, or a connection).
const OPEN_MAX: usize = 64;

/// Packs that are open: not more than [`OPEN_MAX`], and those that somebody is reading from.
#[derive(Default)]
pub struct OpenPacks(Mutex<HashMap<PackId, Arc<dyn ObjectReader>>>);

impl OpenPacks {
    /// The pack, which `open` opens if it is not open.
    ///
    /// # Errors
    /// Those of `open`.
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

/// Memory to read chunks into.
pub struct Room {
    block: Block,
    scratch: Vec<u8>,
    ahead: Ahead,
}

/// A part of a pack that was read beforehand.
#[derive(Default)]
struct Ahead {
    at: Option<(PackId, u64)>,
    content: Vec<u8>,
}

impl Ahead {
    /// The chunk at `location` as it is stored, if it was read.
    fn find(&self, location: &Location) -> Option<&[u8]> {
        let (_, begin) = self.at.filter(|(pack, _)| *pack == location.pack)?;
        let from = usize::try_from(location.entry.offset.checked_sub(begin)?).ok()?;
        self.content.get(from..from.checked_add(location.entry.stored_bytes as usize)?)
    }
}

impl Room {
    pub fn new() -> Self {
        // What does not shrink grows a little when it is encoded.
        let block = Block::new(CHUNK_BYTES + 2 * BLOCK_ALIGN);
        Self { block, scratch: Vec::new(), ahead: Ahead::default() }
    }

    /// Whether the chunk at `location` was read beforehand.
    pub fn has(&self, location: &Location) -> bool {
        self.ahead.find(location).is_some()
    }
}

/// What readers of one store have in common: a copy has a reader for each data file, and there may be thousands.
#[derive(Default)]
pub struct Shared {
    open: OpenPacks,
    /// Not in use. There are as many as chunks were read at once.
    rooms: Mutex<Vec<Room>>,
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

    /// One that has all in common with the others of its kind that there are at the time. With the last of them it
    /// goes.
    pub fn shared(store: &'a PackStore) -> Self {
        let mut now = store.sources.lock();
        let shared = now.upgrade().unwrap_or_default();
        *now = Arc::downgrade(&shared);
        Self { store, shared }
    }

    /// Does `work` with memory to read into.
    pub fn with_room<T>(&self, work: impl FnOnce(&mut Room) -> T) -> T {
        let rooms = || self.shared.rooms.lock();
        let free = rooms().pop();
        let mut room = free.unwrap_or_else(Room::new);
        let done = work(&mut room);
        rooms().push(room);
        done
    }

    fn open(&self, pack: PackId) -> io::Result<Arc<dyn ObjectReader>> {
        self.shared.open.get(pack, || self.store.medium.open(&pack.pack()))
    }

    /// Reads the first of these chunks, which lie in one pack in this order, together with those that follow closely:
    /// each would be a request of its own. What does not read is left to who reads it singly.
    pub fn read_ahead(&self, locations: &[Location], room: &mut Room) {
        let Some(first) = locations.first().filter(|first| !room.has(first)) else { return };
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
        let Ahead { at, content } = &mut room.ahead;
        content.resize(usize::try_from(end - begin).expect("not more than a chunk"), 0);
        let read = self.open(first.pack).and_then(|object| object.read_at(begin, content));
        *at = read.is_ok().then_some((first.pack, begin));
    }

    /// The chunk that lies at `location`.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] when something else lies there, and those of reading.
    pub fn read<'r>(&self, location: &Location, room: &'r mut Room) -> io::Result<&'r [u8]> {
        let (entry, codec) = (&location.entry, &self.store.codec);
        let length = entry.stored_bytes as usize;
        let Room { block, scratch, ahead } = room;
        let stored = match ahead.find(location) {
            Some(stored) => stored,
            None => {
                let stored = block.get_mut(..length).ok_or_else(|| not_it(location))?;
                self.open(location.pack)?.read_at(entry.offset, stored)?;
                stored
            }
        };
        let raw_bytes = entry.raw_bytes as usize;
        let content = codec
            .decode(&location.pack, entry.offset, entry.encoding, stored, raw_bytes, scratch)
            .map_err(|_| not_it(location))?;
        if codec.id(content) == entry.id { Ok(content) } else { Err(not_it(location)) }
    }

    /// The chunk that lies at `location`, all of it straight to `into`.
    ///
    /// # Errors
    /// As [`Chunks::read`].
    pub fn read_to(&self, location: &Location, into: &mut [u8], room: &mut Room) -> io::Result<()> {
        let entry = &location.entry;
        if into.len() != entry.raw_bytes as usize {
            return Err(not_it(location));
        }
        if !room.has(location)
            && self.store.codec.is_plain()
            && entry.encoding == Encoding::Raw
            && into.len() == entry.stored_bytes as usize
        {
            self.open(location.pack)?.read_at(entry.offset, into)?;
            let is_it = self.store.codec.id(into) == entry.id;
            return if is_it { Ok(()) } else { Err(not_it(location)) };
        }
        into.copy_from_slice(self.read(location, room)?);
        Ok(())
    }
}

fn not_it(location: &Location) -> io::Error {
    let message = format!("the chunk {} is damaged in the pack {}", location.entry.id, location.pack);
    io::Error::new(io::ErrorKind::InvalidData, message)
}
