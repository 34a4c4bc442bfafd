//! From the content of a chunk to what lies in a pack, and back: names, compression, encryption. docs/format.md gives
//! the bytes, docs/design.md says why it is done in this way.

mod compress;
mod key;

pub use compress::{Compression, CompressionError, Packing};
pub use key::{Key, KeyError};

use crate::chunk::{CHUNK_BYTES, ChunkId};
use crate::pack::{FormatError, PackId};
use key::{SALT_BYTES, Secrets, TAG_BYTES};
use std::sync::Arc;

/// How a chunk's content is stored, as its entry in a pack's index says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// As it is.
    Raw,
    /// Compressed.
    Compressed(Packing),
    /// Encrypted, after it was compressed or not.
    Encrypted(Option<Packing>),
}

/// Set in the number on disk of what is encrypted; the rest of it is the number of the compression, 0 for none.
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

/// What is done to chunks on their way to a pack and back. All of a job's tiers use the same. The default neither
/// compresses nor encrypts.
#[derive(Clone, Debug, Default)]
pub struct Codec {
    compression: Compression,
    secrets: Option<Arc<Secrets>>,
}

impl Codec {
    /// One that compresses, and encrypts if there is a key. What it reads may be compressed otherwise; it must have
    /// been encrypted with the same key or not at all.
    #[must_use]
    pub fn new(compression: Compression, key: Option<&Key>) -> Self {
        Self { compression, secrets: key.map(|key| Arc::new(Secrets::new(key))) }
    }

    /// Names `content`. With a key, nobody without it can tell which content has this name.
    #[must_use]
    pub fn id(&self, content: &[u8]) -> ChunkId {
        let hash = match &self.secrets {
            None => blake3::hash(content),
            Some(secrets) => blake3::keyed_hash(secrets.names(), content),
        };
        ChunkId(*hash.as_bytes())
    }

    /// The checksum of records (indexes, manifests): nobody without the key, if there is one, can make it.
    #[must_use]
    pub fn checksum(&self, record: &[u8]) -> [u8; 32] {
        let hash = match &self.secrets {
            None => blake3::hash(record),
            Some(secrets) => blake3::keyed_hash(secrets.records(), record),
        };
        *hash.as_bytes()
    }

    /// What is to be stored for `content` at `offset` in `pack`: `content` itself or something in `scratch`, at most
    /// [`Codec::overhead_bytes`] longer than `content`. With a key, `offset` must be that of nothing else that is ever
    /// stored in `pack`: the encryption relies on it.
    ///
    /// # Panics
    /// When `content` is longer than [`CHUNK_BYTES`].
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

    /// Whether chunks are stored as they are.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.compression == Compression::None && self.secrets.is_none()
    }

    /// By how much more than its content a chunk may take (bytes).
    #[must_use]
    pub fn overhead_bytes(&self) -> usize {
        if self.secrets.is_some() { TAG_BYTES } else { 0 }
    }

    /// The content of what [`Codec::encode`] gave, `raw_bytes` long: `stored` itself or something in `scratch`, which
    /// grows to three times [`CHUNK_BYTES`] at most. Its name has not been compared yet.
    ///
    /// # Errors
    /// What does not decode, and what is not `raw_bytes` long.
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
        match encoding {
            Encoding::Raw if stored.len() == raw_bytes => Ok(stored),
            Encoding::Raw => Err(FormatError::Invalid("a chunk of the wrong length")),
            Encoding::Compressed(packing) => {
                reserve(scratch, 2 * raw_bytes);
                let (content, planes) = scratch.split_at_mut(raw_bytes);
                compress::unpack(packing, stored, content, planes)?;
                Ok(content)
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
                let Some(packing) = packing else {
                    let whole = plain.len() == raw_bytes;
                    return if whole {
                        Ok(plain)
                    } else {
                        Err(FormatError::Invalid("a chunk of the wrong length"))
                    };
                };
                let (content, planes) = rest.split_at_mut(raw_bytes);
                compress::unpack(packing, plain, content, planes)?;
                Ok(content)
            }
        }
    }

    /// Seals a record (a manifest's content) for `context`: the same for whoever opens it.
    ///
    /// # Panics
    /// When the system has no random numbers.
    #[must_use]
    pub fn seal(&self, context: &str, mut record: Vec<u8>) -> Vec<u8> {
        let Some(secrets) = &self.secrets else { return record };
        let mut salt = [0; SALT_BYTES];
        aws_lc_rs::rand::fill(&mut salt).expect("the system has random numbers");
        let tag = secrets.of_record(&salt).seal(0, context.as_bytes(), &mut record);
        [&salt[..], &record, &tag].concat()
    }

    /// Opens what [`Codec::seal`] gave for the same `context`.
    ///
    /// # Errors
    /// What was altered, or sealed with another key.
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

    /// A number that tells keys apart without giving them away; 0 for none.
    #[must_use]
    pub fn key_number(&self) -> u64 {
        self.secrets.as_ref().map_or(0, |secrets| secrets.number())
    }
}

pub(crate) const NO_KEY: &str = "it is encrypted: give the key with --encrypt-key-file";

/// What the encryption of a chunk vouches for beside its bytes.
fn associated(encoding: Encoding, raw_bytes: usize) -> [u8; 9] {
    let mut associated = [0; 9];
    associated[0] = encoding.number();
    associated[1..].copy_from_slice(&(raw_bytes as u64).to_le_bytes());
    associated
}

/// Makes room without clearing what is there: it is written over.
fn reserve(scratch: &mut Vec<u8>, bytes: usize) {
    if scratch.len() < bytes {
        scratch.resize(bytes, 0);
    }
}
