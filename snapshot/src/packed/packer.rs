//! A pack that is being written. Chunks are read directly into the block to be written. A chunk that turns out to be
//! stored already is not kept: the next one overwrites it.

use crate::chunk::ChunkId;
use crate::codec::{Codec, Encoding};
use crate::medium::{BLOCK_ALIGN, Block, Medium, ObjectWriter};
use crate::pack::{ALIGNED_FROM_BYTES, Entry, HEADER_BYTES, Index, PackId, header};
use std::io;

/// Size of the blocks in which packs are written (bytes): two chunks.
pub const BLOCK_BYTES: usize = 8 << 20;
/// Blocks per pack: one is being filled, the others are being written.
pub const BLOCKS: usize = 4;

/// A pack that is being written.
pub struct Packer {
    writer: Box<dyn ObjectWriter>,
    /// The block that is being filled.
    block: Block,
    /// Its offset in the pack (bytes).
    block_offset: u64,
    index: Index,
    /// The offset of the next chunk in the block.
    begin: usize,
    /// The content of a chunk to be encoded, and scratch space for the codec.
    raw: Vec<u8>,
    scratch: Vec<u8>,
}

impl Packer {
    /// Begins a pack.
    ///
    /// # Errors
    /// If the medium fails.
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

    /// Whether no chunk was kept.
    pub fn is_empty(&self) -> bool {
        self.index.entries.is_empty()
    }

    /// Its length so far (bytes).
    pub fn bytes(&self) -> u64 {
        self.block_offset + self.block.filled() as u64
    }

    /// A buffer to read a chunk of `bytes` bytes into. The next call reuses the buffer of a chunk that was not kept.
    ///
    /// # Errors
    /// The error of writing an earlier block.
    pub fn buffer(&mut self, bytes: usize, codec: &Codec) -> io::Result<&mut [u8]> {
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

    /// Keeps the chunk that was read into the last [`Packer::buffer`], all `bytes` of it. Returns its encoded length.
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
        // The block is reused: clear the gap before the chunk.
        let filled = self.block.filled();
        self.block[filled..self.begin].fill(0);
        self.block.set_filled(self.begin + stored_bytes);
        let length = |bytes: usize| u32::try_from(bytes).expect("a chunk is small");
        let (stored_bytes, raw_bytes) = (length(stored_bytes), length(bytes));
        self.index.entries.push(Entry { id, offset, stored_bytes, raw_bytes, encoding });
        stored_bytes.into()
    }

    /// Submits the block, padded with zeroes, and takes an empty one.
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

    /// Appends bytes that are no chunk.
    fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let filled = self.block.filled();
            let now = bytes.len().min(self.block.len() - filled);
            self.block[filled..filled + now].copy_from_slice(&bytes[..now]);
            self.block.set_filled(filled + now);
            bytes = &bytes[now..];
            if self.block.filled() == self.block.len() {
                self.write_block()?;
            }
        }
        Ok(())
    }

    /// Makes the pack durable, with a copy of its index at its end. The caller must write the index.
    ///
    /// # Errors
    /// If the pack cannot be written; it does not exist then.
    pub fn finish(mut self, codec: &Codec) -> io::Result<Index> {
        self.index.pack_bytes = self.bytes() + self.index.tail_bytes();
        self.append(&self.index.tail(codec))?;
        if self.block.filled() > 0 {
            self.writer.append(self.block)?;
        }
        self.writer.finish()?;
        Ok(self.index)
    }
}
