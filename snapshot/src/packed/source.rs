//! A data file of a packed snapshot as a [`Source`], for copies to another store.

use super::PackStore;
use super::chunk_index::{ChunkIndex, Location};
use super::chunks::{Buffers, Chunks};
use crate::DataFile;
use crate::chunk::{Chunk, ChunkId};
use crate::store::Source;
use std::io;
use std::ops::Range;

/// See [`crate::Store::source`].
pub struct PackedFile<'a> {
    store: &'a PackStore,
    chunks: Chunks<'a>,
    /// The file's chunks, with their end offsets in the file (bytes).
    parts: Vec<(Chunk, u64)>,
    bytes: u64,
}

impl<'a> PackedFile<'a> {
    pub fn new(store: &'a PackStore, file: &DataFile) -> Self {
        let mut end = 0;
        let part = |chunk: &Chunk| {
            end += u64::from(chunk.bytes);
            (*chunk, end)
        };
        let parts = file.chunks.iter().map(part).collect();
        Self { store, chunks: Chunks::shared(store), parts, bytes: file.bytes }
    }

    /// The number of the chunk that contains `offset`.
    fn number_at(&self, offset: u64) -> usize {
        self.parts.partition_point(|(_, end)| *end <= offset)
    }

    /// Reads all of a chunk from any intact copy.
    fn read_chunk(&self, chunk: &Chunk, into: &mut [u8], buffers: &mut Buffers) -> io::Result<()> {
        if chunk.id.is_zeroes() {
            into.fill(0);
            return Ok(());
        }
        let mut failure = None;
        for is_retry in [false, true] {
            if is_retry {
                // Another process may have moved the chunk since the indexes were read.
                self.store.refresh().map_err(io::Error::other)?;
            }
            let found = |index: &ChunkIndex| index.locations(&chunk.id).to_vec();
            for location in self.store.with_index(found).map_err(io::Error::other)? {
                match self.chunks.read_to(&location, into, buffers) {
                    Ok(()) => return Ok(()),
                    Err(error) => failure = Some(error),
                }
            }
        }
        let missing =
            || io::Error::new(io::ErrorKind::NotFound, format!("its chunk {} is in no pack", chunk.id));
        Err(failure.unwrap_or_else(missing))
    }

    /// Reads ahead the chunks from `number` up to the offset `end`, as far as they are adjacent in a pack.
    fn read_ahead(&self, number: usize, end: u64, buffers: &mut Buffers) -> io::Result<()> {
        let wanted = self.parts[number..].iter().take_while(|(_, its_end)| *its_end <= end);
        let wanted = wanted.map(|(chunk, _)| chunk.id).filter(|id| !id.is_zeroes());
        let located = |index: &ChunkIndex| {
            let mut found: Vec<Location> = Vec::new();
            for location in wanted.map_while(|id| index.locations(&id).first().copied()) {
                let follows =
                    |last: &Location| last.pack == location.pack && last.entry.offset < location.entry.offset;
                if buffers.has(&location) || !found.last().is_none_or(follows) {
                    break;
                }
                found.push(location);
            }
            found
        };
        let found = self.store.with_index(located).map_err(io::Error::other)?;
        // A single chunk is read directly to its destination instead.
        if found.len() > 1 {
            self.chunks.read_ahead(&found, buffers);
        }
        Ok(())
    }

    /// Fills `into` with the content at `offset`, chunk by chunk.
    fn read_parts(&self, offset: u64, into: &mut [u8], buffers: &mut Buffers) -> io::Result<()> {
        let (mut offset, mut rest) = (offset, into);
        while !rest.is_empty() {
            let number = self.number_at(offset);
            let (chunk, end) = self.parts.get(number).ok_or(io::ErrorKind::UnexpectedEof)?;
            self.read_ahead(number, offset + rest.len() as u64, buffers)?;
            let left = usize::try_from(end - offset).expect("a chunk is small").min(rest.len());
            let (now, later) = rest.split_at_mut(left);
            if left == chunk.bytes as usize {
                self.read_chunk(chunk, now, buffers)?;
            } else {
                let mut whole = vec![0; chunk.bytes as usize];
                self.read_chunk(chunk, &mut whole, buffers)?;
                let at = whole.len() - usize::try_from(end - offset).expect("a chunk is small");
                now.copy_from_slice(&whole[at..at + left]);
            }
            offset += left as u64;
            rest = later;
        }
        Ok(())
    }
}

impl Source for PackedFile<'_> {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.chunks.with_buffers(|buffers| self.read_parts(offset, into, buffers))
    }

    fn chunk_end(&self, offset: u64) -> u64 {
        self.parts[self.number_at(offset)].1
    }

    fn known(&self, range: Range<u64>) -> Option<ChunkId> {
        let (chunk, end) = self.parts.get(self.number_at(range.start))?;
        (range == (end - u64::from(chunk.bytes)..*end)).then_some(chunk.id)
    }
}
