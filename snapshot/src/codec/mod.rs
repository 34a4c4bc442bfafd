//! The codec of chunks: naming, compression and encryption. docs/format.md specifies the bytes,
//! docs/design/storage.md gives the reasons.

mod compress;
mod key;

pub use compress::{Compression, CompressionError, Packing};
pub use key::{Key, KeyError};

use crate::chunk::{CHUNK_BYTES, ChunkId};
use crate::format::{FormatError, PackId};
use key::{SALT_BYTES, Secrets, TAG_BYTES};
use std::sync::Arc;

/// The encoding of a stored chunk, as recorded in its index entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Neither compressed nor encrypted.
    Raw,
    /// Compressed.
    Compressed(Packing),
    /// Encrypted, after optional compression.
    Encrypted(Option<Packing>),
}

/// This bit is set in the number of encrypted encodings; the other bits are the compression's number, 0 for none.
const ENCRYPTED: u8 = 0x80;

impl Encoding {
    /// Its number on disk.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Compressed(packing) => packing.number(),
            Self::Encrypted(packing) => ENCRYPTED | packing.map_or(0, Packing::number),
        }
    }

    /// The encoding with this number on disk.
    #[must_use]
    pub fn of_number(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Raw),
            ENCRYPTED => Some(Self::Encrypted(None)),
            _ => {
                let packing = Packing::of_number(number & !ENCRYPTED)?;
                let encrypted = number & ENCRYPTED != 0;
                Some(if encrypted { Self::Encrypted(Some(packing)) } else { Self::Compressed(packing) })
            }
        }
    }
}

/// Encodes and decodes chunks. All tiers of a job use the same codec. The default neither compresses nor encrypts.
#[derive(Clone, Debug, Default)]
pub struct Codec {
    compression: Compression,
    secrets: Option<Arc<Secrets>>,
}

impl Codec {
    /// A codec with this compression that encrypts if there is a key. It decodes any compression. Encrypted data must
    /// have been written with the same key, and unencrypted data without one.
    #[must_use]
    pub fn new(compression: Compression, key: Option<&Key>) -> Self {
        Self { compression, secrets: key.map(|key| Arc::new(Secrets::new(key))) }
    }

    /// The name of a chunk with this content. With a key, the name reveals nothing about the content to others.
    #[must_use]
    pub fn id(&self, content: &[u8]) -> ChunkId {
        let hash = match &self.secrets {
            None => blake3::hash(content),
            Some(secrets) => blake3::keyed_hash(&secrets.names, content),
        };
        ChunkId(*hash.as_bytes())
    }

    /// The checksum of a record (an index or manifest). With a key, only its owner can compute the checksum.
    #[must_use]
    pub fn checksum(&self, record: &[u8]) -> [u8; 32] {
        let hash = match &self.secrets {
            None => blake3::hash(record),
            Some(secrets) => blake3::keyed_hash(&secrets.records, record),
        };
        *hash.as_bytes()
    }

    /// Encodes `content` to be stored at `offset` in `pack`. Returns `content` itself or a part of `scratch`, at most
    /// [`Codec::overhead_bytes`] longer than `content`. With a key, nothing else may ever be stored at `offset` in
    /// `pack`: the offset is the nonce.
    ///
    /// # Panics
    /// If `content` is longer than [`CHUNK_BYTES`].
    #[must_use]
    pub fn encode<'a>(
        &self,
        pack: &PackId,
        offset: u64,
        content: &'a [u8],
        scratch: &'a mut Vec<u8>,
    ) -> (&'a [u8], Encoding) {
        assert!(content.len() <= CHUNK_BYTES, "a chunk of {} bytes", content.len());
        let packed = compress::pack(self.compression, content, scratch, self.overhead_bytes());
        let packing = packed.map(|(packing, _)| packing);
        let Some(secrets) = &self.secrets else {
            return match packed {
                None => (content, Encoding::Raw),
                Some((packing, bytes)) => (&scratch[..bytes], Encoding::Compressed(packing)),
            };
        };
        let bytes = packed.map_or(content.len(), |(_, bytes)| bytes);
        reserve(scratch, bytes + TAG_BYTES);
        if packed.is_none() {
            scratch[..bytes].copy_from_slice(content);
        }
        let encoding = Encoding::Encrypted(packing);
        let (text, rest) = scratch.split_at_mut(bytes);
        let tag = secrets.of_pack(pack).seal(offset, &associated(encoding, content.len()), text);
        rest[..TAG_BYTES].copy_from_slice(&tag);
        (&scratch[..bytes + TAG_BYTES], encoding)
    }

    /// Whether chunks are stored without compression and encryption.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.compression == Compression::None && self.secrets.is_none()
    }

    /// The maximum growth of a chunk by its encoding (bytes).
    #[must_use]
    pub fn overhead_bytes(&self) -> usize {
        if self.secrets.is_some() { TAG_BYTES } else { 0 }
    }

    /// Decodes the output of [`Codec::encode`] to content of `raw_bytes` bytes. Returns `stored` itself or a part of
    /// `scratch`, which grows to at most three times [`CHUNK_BYTES`]. The caller must still check the chunk's name.
    ///
    /// # Errors
    /// If it does not decode to `raw_bytes` bytes.
    pub fn decode<'a>(
        &self,
        pack: &PackId,
        offset: u64,
        encoding: Encoding,
        stored: &'a [u8],
        raw_bytes: usize,
        scratch: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], FormatError> {
        if raw_bytes > CHUNK_BYTES || stored.len() > raw_bytes + TAG_BYTES {
            return Err(FormatError::Invalid("a chunk of an impossible length"));
        }
        let (packing, packed, rest) = match encoding {
            Encoding::Raw => (None, stored, &mut scratch[..]),
            Encoding::Compressed(packing) => {
                reserve(scratch, 2 * raw_bytes);
                (Some(packing), stored, &mut scratch[..])
            }
            Encoding::Encrypted(packing) => {
                let secrets = self.secrets.as_ref().ok_or(FormatError::Key(NO_KEY))?;
                let (text, tag) = stored
                    .split_last_chunk::<TAG_BYTES>()
                    .ok_or(FormatError::Invalid("a chunk of an impossible length"))?;
                reserve(scratch, text.len() + 2 * raw_bytes);
                let (plain, rest) = scratch.split_at_mut(text.len());
                let associated = associated(encoding, raw_bytes);
                secrets.of_pack(pack).open(offset, &associated, text, tag, plain)?;
                (packing, &*plain, rest)
            }
        };
        let Some(packing) = packing else {
            let is_whole = packed.len() == raw_bytes;
            return is_whole.then_some(packed).ok_or(FormatError::Invalid("a chunk of the wrong length"));
        };
        let (content, planes) = rest.split_at_mut(raw_bytes);
        compress::unpack(packing, packed, content, planes)?;
        Ok(content)
    }

    /// Encrypts a record (the body of a manifest), if there is a key. `context` is authenticated with it.
    ///
    /// # Panics
    /// If the system has no random numbers.
    #[must_use]
    pub fn seal(&self, context: &str, mut record: Vec<u8>) -> Vec<u8> {
        let Some(secrets) = &self.secrets else { return record };
        let mut salt = [0; SALT_BYTES];
        aws_lc_rs::rand::fill(&mut salt).expect("the system has random numbers");
        let tag = secrets.of_record(&salt).seal(0, context.as_bytes(), &mut record);
        [&salt[..], &record, &tag].concat()
    }

    /// Decrypts the output of [`Codec::seal`] for the same `context`.
    ///
    /// # Errors
    /// If the record was altered, or encrypted with another key.
    pub fn unseal(&self, context: &str, sealed: Vec<u8>) -> Result<Vec<u8>, FormatError> {
        let Some(secrets) = &self.secrets else { return Ok(sealed) };
        let parts = sealed
            .split_first_chunk::<SALT_BYTES>()
            .and_then(|(salt, rest)| Some((salt, rest.split_last_chunk::<TAG_BYTES>()?)));
        let (salt, (text, tag)) = parts.ok_or(FormatError::Invalid("it ends too early"))?;
        let mut record = vec![0; text.len()];
        secrets.of_record(salt).open(0, context.as_bytes(), text, tag, &mut record)?;
        Ok(record)
    }

    /// A number that identifies the key without revealing it; 0 without a key.
    #[must_use]
    pub fn key_number(&self) -> u64 {
        self.secrets.as_ref().map_or(0, |secrets| secrets.number)
    }
}

pub(crate) const NO_KEY: &str = "it is encrypted: give the key with --encrypt-key-file";

/// The associated data of a chunk's encryption.
fn associated(encoding: Encoding, raw_bytes: usize) -> [u8; 9] {
    let mut associated = [0; 9];
    associated[0] = encoding.number();
    associated[1..].copy_from_slice(&(raw_bytes as u64).to_le_bytes());
    associated
}

/// Grows `scratch` to at least `bytes`. Existing content is not cleared, since the caller overwrites it.
fn reserve(scratch: &mut Vec<u8>, bytes: usize) {
    if scratch.len() < bytes {
        scratch.resize(bytes, 0);
    }
}
