//! Packs: objects of many chunks, and the index that says what lies where in one.
//!
//! `packs/ID.pack` is a header and chunks. `packs/ID.index` is written when the pack is durable: a pack without an
//! index is nobody's. docs/format.md gives the bytes.

use crate::RelPath;
use crate::chunk::{CHUNK_BYTES, ChunkId};
use crate::codec::{Codec, Encoding};
use std::fmt;

/// The directory of packs and their indexes.
pub const PACKS: &str = "packs";
/// Where chunks begin in a pack (bytes).
pub const HEADER_BYTES: usize = 64;
/// A chunk from this length on begins at a multiple of [`crate::medium::BLOCK_ALIGN`], so that it can be read straight
/// to where it belongs (bytes).
pub const ALIGNED_FROM_BYTES: usize = 64 << 10;
/// No pack is begun that would become longer (bytes).
pub const PACK_MAX_BYTES: u64 = 1 << 30;
/// An index that is longer is not read (bytes): it would be damage.
pub const INDEX_MAX_BYTES: u64 = 1 << 30;

/// Why bytes are not what they should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Written by a newer ckpt-run.
    #[error("it has version {found}, this ckpt-run reads versions up to {known}")]
    Newer {
        /// Its version.
        found: u32,
        /// The newest that this build knows.
        known: u32,
    },
    /// Encrypted with a key that is not this one, or with one at all.
    #[error("{0}")]
    Key(&'static str),
    /// The checksum does not match.
    #[error("its checksum does not match")]
    Checksum,
    /// It cannot be.
    #[error("it does not read: {0}")]
    Invalid(&'static str),
}

/// The name of a pack: random.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackId(pub [u8; 16]);

impl PackId {
    /// A new one.
    ///
    /// # Errors
    /// When the kernel has no random numbers.
    pub fn random() -> std::io::Result<Self> {
        let mut id = [0; 16];
        let mut filled = 0;
        while filled < id.len() {
            filled += rustix::rand::getrandom(&mut id[filled..], rustix::rand::GetRandomFlags::empty())?;
        }
        Ok(Self(id))
    }

    /// What [`PackId`] prints, read back.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut id = [0; 16];
        let digits = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
        if text.len() != 32 || !text.as_bytes().iter().all(digits) {
            return None;
        }
        for (byte, pair) in id.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(id))
    }

    /// The object with the chunks.
    #[must_use]
    pub fn pack(&self) -> RelPath {
        RelPath::new(format!("{PACKS}/{self}.pack")).expect("a plain path")
    }

    /// The object with the index.
    #[must_use]
    pub fn index(&self) -> RelPath {
        RelPath::new(format!("{PACKS}/{self}.index")).expect("a plain path")
    }
}

impl fmt::Display for PackId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

impl fmt::Debug for PackId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{self}")
    }
}

/// Where a chunk lies in its pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The chunk's name.
    pub id: ChunkId,
    /// Where it begins in the pack (bytes).
    pub offset: u64,
    /// How much lies there (bytes).
    pub stored_bytes: u32,
    /// How much content that is (bytes).
    pub raw_bytes: u32,
    /// How it is stored.
    pub encoding: Encoding,
}

/// What lies where in a pack: in the order of the offsets, without overlaps.
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
    /// The bytes to store.
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

    /// Reads what [`Index::encode`] wrote for `pack`. Takes no more memory than a small multiple of `bytes`.
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
            // A reader makes room for what it is told, and not for more than a chunk.
            let longest_bytes = entry.raw_bytes as usize + codec.overhead_bytes();
            if entry.stored_bytes as usize > longest_bytes {
                return Err(invalid("a chunk of an impossible length"));
            }
            if matches!(entry.encoding, Encoding::Encrypted(_)) != (codec.key_number() != 0) {
                return Err(invalid("a chunk that is not encrypted as its pack is"));
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

/// Whether something with this key number can be read.
///
/// # Errors
/// [`FormatError::Key`].
pub(crate) fn check_key(found: u64, codec: &Codec) -> Result<(), FormatError> {
    match (found, codec.key_number()) {
        (found, known) if found == known => Ok(()),
        (0, _) => Err(FormatError::Key("it is not encrypted, and a key was given (--encrypt-key-file)")),
        (_, 0) => Err(FormatError::Key("it is encrypted: give the key with --encrypt-key-file")),
        _ => {
            Err(FormatError::Key("it is encrypted with another key than the one given (--encrypt-key-file)"))
        }
    }
}

fn entry(row: &[u8]) -> Result<Entry, FormatError> {
    let mut id = [0; 32];
    id.copy_from_slice(&row[..32]);
    let (stored_bytes, raw_bytes) = (u32_at(row, 40), u32_at(row, 44));
    let encoding = Encoding::of_number(row[48]).ok_or(FormatError::Invalid("an unknown encoding"))?;
    if row[49..56] != [0; 7] {
        return Err(FormatError::Invalid("an entry with something that is not known"));
    }
    if raw_bytes == 0 || raw_bytes as usize > CHUNK_BYTES || stored_bytes == 0 {
        return Err(FormatError::Invalid("a chunk of an impossible length"));
    }
    Ok(Entry { id: ChunkId(id), offset: u64_at(row, 32), stored_bytes, raw_bytes, encoding })
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}
