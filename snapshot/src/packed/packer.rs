//! One pack that is being written. Chunks are read straight into the block that will be written; those that turn out
//! to be known already are simply overwritten by the next one.

use super::{BLOCK_BYTES, BLOCKS};
use crate::chunk::ChunkId;
use crate::codec::{Codec, Encoding};
use crate::medium::{BLOCK_ALIGN, Block, Medium, ObjectWriter};
use crate::pack::{ALIGNED_FROM_BYTES, Entry, HEADER_BYTES, Index, PackId, header};
use std::io;

/// A pack in writing.
pub struct Packer {
    writer: Box<dyn ObjectWriter>,
    /// The block that is being filled.
    block: Block,
    /// Where it will lie in the pack (bytes).
    block_offset: u64,
    index: Index,
    /// Where the next chunk begins in the block.
    begin: usize,
    /// A chunk's content when it is not stored as it is, and what it becomes.
    raw: Vec<u8>,
    scratch: Vec<u8>,
}

impl Packer {
    /// Begins a pack.
    ///
    /// # Errors
    /// When the medium cannot.
    pub fn new(medium: &dyn Medium, codec: &Codec) -> io::Result<Self> {
        let pack = PackId::random()?;
        let mut writer = medium.create(&pack.pack(), BLOCKS, BLOCK_BYTES)?;
        let mut block = writer.block()?;
        block[..HEADER_BYTES].copy_from_slice(&header(&pack, codec));
        block.set_filled(HEADER_BYTES);
        let index = Index { pack, pack_bytes: 0, entries: Vec::new() };
        let (raw, scratch) = (Vec::new(), Vec::new());
        Ok(Self { writer, block, block_offset: 0, index, begin: 0, raw, scratch })
    }

    /// The pack's name.
    pub fn pack(&self) -> PackId {
        self.index.pack
    }

    /// Whether nothing was kept.
    pub fn is_empty(&self) -> bool {
        self.index.entries.is_empty()
    }

    /// How long it is so far (bytes).
    pub fn bytes(&self) -> u64 {
        self.block_offset + self.block.filled() as u64
    }

    /// Memory to read a chunk of `bytes` into. What was read there and not kept is overwritten by the next one.
    ///
    /// # Errors
    /// Those of writing what came before.
    pub fn place(&mut self, bytes: usize, codec: &Codec) -> io::Result<&mut [u8]> {
        let filled = self.block.filled();
        self.begin = if bytes >= ALIGNED_FROM_BYTES { filled.next_multiple_of(BLOCK_ALIGN) } else { filled };
        if self.begin + bytes + codec.overhead_bytes() > self.block.len() {
            self.write_block()?;
            self.begin = 0;
        }
        if codec.is_plain() {
            return Ok(&mut self.block[self.begin..self.begin + bytes]);
        }
        self.raw.resize(bytes, 0);
        Ok(&mut self.raw[..bytes])
    }

    /// Keeps the chunk that was read into the last [`Packer::place`], all `bytes` of it. Returns what it takes in the
    /// pack (bytes).
    pub fn keep(&mut self, id: ChunkId, bytes: usize, codec: &Codec) -> u64 {
        let offset = self.block_offset + self.begin as u64;
        let (stored_bytes, encoding) = if codec.is_plain() {
            (bytes, Encoding::Raw)
        } else {
            let (stored, encoding) =
                codec.encode(&self.index.pack, offset, &self.raw[..bytes], &mut self.scratch);
            self.block[self.begin..self.begin + stored.len()].copy_from_slice(stored);
            (stored.len(), encoding)
        };
        // The block was used before.
        let filled = self.block.filled();
        self.block[filled..self.begin].fill(0);
        self.block.set_filled(self.begin + stored_bytes);
        let length = |bytes: usize| u32::try_from(bytes).expect("a chunk is small");
        let (stored_bytes, raw_bytes) = (length(stored_bytes), length(bytes));
        self.index.entries.push(Entry { id, offset, stored_bytes, raw_bytes, encoding });
        stored_bytes.into()
    }

    /// Hands the block over, padded with zeroes, and takes an empty one.
    fn write_block(&mut self) -> io::Result<()> {
        let filled = self.block.filled();
        let padded = filled.next_multiple_of(BLOCK_ALIGN);
        self.block[filled..padded].fill(0);
        self.block.set_filled(padded);
        let next = self.writer.block()?;
        let mut full = std::mem::replace(&mut self.block, next);
        full.set_filled(padded);
        self.block.set_filled(0);
        self.block_offset += padded as u64;
        self.writer.append(full)
    }

    /// Makes the pack durable. Its index is for the caller to write.
    ///
    /// # Errors
    /// When it cannot be written: it is not there then.
    pub fn finish(mut self) -> io::Result<Index> {
        self.index.pack_bytes = self.bytes();
        if self.block.filled() > 0 {
            self.writer.append(self.block)?;
        }
        self.writer.finish()?;
        Ok(self.index)
    }
}
