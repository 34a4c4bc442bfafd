//! Packs: objects with many chunks, and their indexes.
//!
//! `packs/ID.pack` is a header, chunks, and a copy of the index. `packs/ID.index` lists the chunks and their offsets. The
//! index is written after the pack is durable; a pack without an index is garbage, unless the index was lost.
//! docs/format.md specifies the bytes.

use crate::chunk::{CHUNK_BYTES, ChunkId};
use crate::codec::{Codec, Encoding, NO_KEY};
pub use crate::format::{FormatError, PackId};
pub(crate) use crate::format::{packs_dir, u32_at, u64_at};
use crate::medium::ObjectReader;
use std::io;

/// The length of a pack's header; the first chunk begins after it (bytes).
pub const HEADER_BYTES: usize = 64;
/// Chunks of at least this length begin at a multiple of [`crate::medium::BLOCK_ALIGN`], which allows direct I/O to
/// their destination (bytes).
pub const ALIGNED_FROM_BYTES: usize = 64 << 10;
/// A pack is finished when it has reached this length (bytes).
pub const PACK_MAX_BYTES: u64 = 1 << 30;
/// A longer index is not read (bytes): it is damaged.
pub const INDEX_MAX_BYTES: u64 = 1 << 30;

/// The entry of a chunk in an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The chunk's name.
    pub id: ChunkId,
    /// Its offset in the pack (bytes).
    pub offset: u64,
    /// Its encoded length in the pack (bytes).
    pub stored_bytes: u32,
    /// The length of its content (bytes).
    pub raw_bytes: u32,
    /// Its encoding: compression and encryption.
    pub encoding: Encoding,
}

/// The index of a pack: its chunks, sorted by offset, without overlaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    /// The pack.
    pub pack: PackId,
    /// The pack's length (bytes).
    pub pack_bytes: u64,
    /// Its chunks.
    pub entries: Vec<Entry>,
}

const PACK_MAGIC: &[u8; 8] = b"CKPTPACK";
const INDEX_MAGIC: &[u8; 8] = b"CKPTINDX";
const VERSION: u32 = 1;
const INDEX_HEADER_BYTES: usize = 56;
const ENTRY_BYTES: usize = 56;
const CHECKSUM_BYTES: usize = 32;
/// The last bytes of a pack: the length of the copy of its index, and this.
const TAIL_MAGIC: &[u8; 8] = b"CKPTTAIL";
/// The length of what follows the copy of the index (bytes).
pub const TAIL_BYTES: usize = 16;

/// The first bytes of the pack `pack`.
#[must_use]
pub fn header(pack: &PackId, codec: &Codec) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(PACK_MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[16..32].copy_from_slice(&pack.0);
    header[32..40].copy_from_slice(&codec.key_number().to_le_bytes());
    header
}

impl Index {
    /// Encodes the index.
    #[must_use]
    pub fn encode(&self, codec: &Codec) -> Vec<u8> {
        let mut out =
            Vec::with_capacity(INDEX_HEADER_BYTES + self.entries.len() * ENTRY_BYTES + CHECKSUM_BYTES);
        out.extend_from_slice(INDEX_MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&0_u32.to_le_bytes());
        out.extend_from_slice(&self.pack.0);
        out.extend_from_slice(&codec.key_number().to_le_bytes());
        out.extend_from_slice(&self.pack_bytes.to_le_bytes());
        out.extend_from_slice(&(self.entries.len() as u64).to_le_bytes());
        for entry in &self.entries {
            out.extend_from_slice(&entry.id.0);
            out.extend_from_slice(&entry.offset.to_le_bytes());
            out.extend_from_slice(&entry.stored_bytes.to_le_bytes());
            out.extend_from_slice(&entry.raw_bytes.to_le_bytes());
            out.extend_from_slice(&[entry.encoding.number(), 0, 0, 0, 0, 0, 0, 0]);
        }
        let checksum = codec.checksum(&out);
        out.extend_from_slice(&checksum);
        out
    }

    /// The end of a pack: a copy of the index, its length, and a magic number.
    #[must_use]
    pub fn tail(&self, codec: &Codec) -> Vec<u8> {
        let mut tail = self.encode(codec);
        let index_bytes = tail.len() as u64;
        tail.extend_from_slice(&index_bytes.to_le_bytes());
        tail.extend_from_slice(TAIL_MAGIC);
        tail
    }

    /// The length of [`Self::tail`] (bytes).
    #[must_use]
    pub fn tail_bytes(&self) -> u64 {
        (INDEX_HEADER_BYTES + self.entries.len() * ENTRY_BYTES + CHECKSUM_BYTES + TAIL_BYTES) as u64
    }

    /// The end of the last chunk in the pack (bytes).
    #[must_use]
    pub fn chunks_end(&self) -> u64 {
        self.entries.last().map_or(HEADER_BYTES as u64, |last| last.offset + u64::from(last.stored_bytes))
    }

    /// Reads the copy of the index from the pack that `object` is.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if it has none, or a damaged one; those of the medium.
    pub fn from_tail(pack: &PackId, object: &dyn ObjectReader, codec: &Codec) -> io::Result<Self> {
        let invalid = |reason: String| io::Error::new(io::ErrorKind::InvalidData, reason);
        let none = || invalid("it has no copy of its index".to_owned());
        let tail_at = object.bytes().checked_sub(TAIL_BYTES as u64).ok_or_else(none)?;
        let mut tail = [0; TAIL_BYTES];
        object.read_at(tail_at, &mut tail)?;
        let index_bytes = u64_at(&tail, 0);
        let index_at = tail_at.checked_sub(index_bytes).filter(|_| index_bytes <= INDEX_MAX_BYTES);
        let index_at = index_at.filter(|_| &tail[8..] == TAIL_MAGIC).ok_or_else(none)?;
        let mut copy = vec![0; usize::try_from(index_bytes).map_err(io::Error::other)?];
        object.read_at(index_at, &mut copy)?;
        let index = Self::decode(pack, &copy, codec)
            .map_err(|error| invalid(format!("the copy of its index cannot be used: {error}")))?;
        if index.pack_bytes != object.bytes() {
            return Err(invalid(format!(
                "it has {} bytes, not {} as in its index",
                object.bytes(),
                index.pack_bytes
            )));
        }
        Ok(index)
    }

    /// Decodes the index of `pack`. Allocates at most a small multiple of the length of `bytes`.
    ///
    /// # Errors
    /// See [`FormatError`].
    pub fn decode(pack: &PackId, bytes: &[u8], codec: &Codec) -> Result<Self, FormatError> {
        let invalid = FormatError::Invalid;
        if bytes.len() < INDEX_HEADER_BYTES + CHECKSUM_BYTES || &bytes[..8] != INDEX_MAGIC {
            return Err(invalid("it is not an index of a pack"));
        }
        let (record, checksum) = bytes.split_at(bytes.len() - CHECKSUM_BYTES);
        let version = u32_at(record, 8);
        if version > VERSION {
            return Err(FormatError::Newer { found: version, known: VERSION });
        }
        check_key(u64_at(record, 32), codec)?;
        if codec.checksum(record) != checksum {
            return Err(FormatError::Checksum);
        }
        let (pack_bytes, count) = (u64_at(record, 40), u64_at(record, 48));
        let rows = &record[INDEX_HEADER_BYTES..];
        if record[16..32] != pack.0 {
            return Err(invalid("it is the index of another pack"));
        }
        if version == 0
            || u32_at(record, 12) != 0
            || count.checked_mul(ENTRY_BYTES as u64) != Some(rows.len() as u64)
        {
            return Err(invalid("its length is not that of its entries"));
        }
        let entries = rows.chunks_exact(ENTRY_BYTES).map(entry).collect::<Result<Vec<_>, _>>()?;
        let mut end = HEADER_BYTES as u64;
        for entry in &entries {
            // Readers allocate what the index says: never more than a chunk.
            let longest_bytes = entry.raw_bytes as usize + codec.overhead_bytes();
            if entry.stored_bytes as usize > longest_bytes {
                return Err(invalid("a chunk of an impossible length"));
            }
            if matches!(entry.encoding, Encoding::Encrypted(_)) != (codec.key_number() != 0) {
                return Err(invalid("a chunk is encrypted and its pack is not, or the other way round"));
            }
            if entry.offset < end {
                return Err(invalid("its entries overlap"));
            }
            end = entry
                .offset
                .checked_add(entry.stored_bytes.into())
                .ok_or(invalid("an entry lies outside"))?;
        }
        if end > pack_bytes {
            return Err(invalid("an entry lies outside of the pack"));
        }
        Ok(Self { pack: *pack, pack_bytes, entries })
    }
}

/// Checks that an object with this key number can be read.
///
/// # Errors
/// [`FormatError::Key`].
pub(crate) fn check_key(found: u64, codec: &Codec) -> Result<(), FormatError> {
    match (found, codec.key_number()) {
        (found, known) if found == known => Ok(()),
        (0, _) => Err(FormatError::Key("it is not encrypted, but a key was given (--encrypt-key-file)")),
        (_, 0) => Err(FormatError::Key(NO_KEY)),
        _ => {
            Err(FormatError::Key("it is encrypted with another key than the one given (--encrypt-key-file)"))
        }
    }
}

fn entry(row: &[u8]) -> Result<Entry, FormatError> {
    let id = ChunkId(*row.first_chunk().expect("a whole row"));
    let (stored_bytes, raw_bytes) = (u32_at(row, 40), u32_at(row, 44));
    let encoding = Encoding::of_number(row[48]).ok_or(FormatError::Invalid("an unknown encoding"))?;
    if row[49..56] != [0; 7] {
        return Err(FormatError::Invalid("an entry has bytes set that must be zero"));
    }
    if raw_bytes == 0 || raw_bytes as usize > CHUNK_BYTES || stored_bytes == 0 {
        return Err(FormatError::Invalid("a chunk of an impossible length"));
    }
    Ok(Entry { id, offset: u64_at(row, 32), stored_bytes, raw_bytes, encoding })
}
