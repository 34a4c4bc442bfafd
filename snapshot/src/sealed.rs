//! Objects with a checksum, which are encrypted if there is a key: manifests, and copies of the journal. The manifest of a
//! packed snapshot is JSON, followed by the chunks of each data file as a table of fixed-size rows. docs/format.md specifies
//! the bytes.

use crate::chunk::{CHUNK_BYTES, Chunk, ChunkId};
use crate::codec::Codec;
use crate::pack::{FormatError, check_key, u32_at, u64_at};
use crate::store::damaged;
use crate::{Damage, Manifest, ReadError, RelPath, SnapshotId};
use std::io;

/// A longer manifest is not read (bytes): it is damaged.
pub const MANIFEST_MAX_BYTES: u64 = 1 << 30;

/// Longer JSON is not read (bytes): parsing takes a multiple of its length in memory.
const JSON_MAX_BYTES: usize = 64 << 20;

/// What an object begins with.
pub type Magic = [u8; 8];

const MANIFEST: &Magic = b"CKPTSNAP";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 32;
const CHECKSUM_BYTES: usize = 32;
const ROW_BYTES: usize = 36;

/// The directory of manifests.
pub(crate) fn manifests_dir() -> RelPath {
    RelPath::new("manifests").expect("a plain path")
}

/// The object with the manifest of `id`.
#[must_use]
pub fn name(id: &SnapshotId) -> RelPath {
    RelPath::new(format!("manifests/{id}")).expect("a plain path")
}

/// Encodes the manifest object.
///
/// # Errors
/// If [`decode`] would refuse the object for its length.
///
/// # Panics
/// Never: every field has a JSON form, and no data file has 2^32 chunks.
pub fn encode(manifest: &Manifest, codec: &Codec) -> io::Result<Vec<u8>> {
    let at_most = |what: &str, bytes: usize, max_bytes: u64| {
        let reason = || {
            format!(
                "the manifest has {bytes} bytes of {what}, and ckpt-run reads {max_bytes}: the job has too many files and processes, or too much memory, for one snapshot"
            )
        };
        if bytes as u64 > max_bytes { Err(io::Error::other(reason())) } else { Ok(()) }
    };
    let json = serde_json::to_vec(manifest).expect("a manifest has a JSON form");
    at_most("text", json.len(), JSON_MAX_BYTES as u64)?;
    let mut body = Vec::new();
    body.extend_from_slice(&(json.len() as u64).to_le_bytes());
    body.extend_from_slice(&json);
    for file in &manifest.files {
        let count = u32::try_from(file.chunks.len()).expect("a file of less than 16 PiB");
        body.extend_from_slice(&count.to_le_bytes());
        for chunk in &file.chunks {
            body.extend_from_slice(&chunk.id.0);
            body.extend_from_slice(&chunk.bytes.to_le_bytes());
        }
    }
    let out = seal(MANIFEST, &manifest.id.to_string(), body, codec);
    at_most("text and tables", out.len(), MANIFEST_MAX_BYTES)?;
    Ok(out)
}

/// The object with this content. With a key, `context` is authenticated with it.
///
/// # Panics
/// If the system has no random numbers.
#[must_use]
pub fn seal(magic: &Magic, context: &str, content: Vec<u8>, codec: &Codec) -> Vec<u8> {
    let body = codec.seal(context, content);
    let mut out = Vec::with_capacity(HEADER_BYTES + body.len() + CHECKSUM_BYTES);
    out.extend_from_slice(magic);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&0_u32.to_le_bytes());
    out.extend_from_slice(&codec.key_number().to_le_bytes());
    out.extend_from_slice(&(body.len() as u64).to_le_bytes());
    out.extend_from_slice(&body);
    let checksum = codec.checksum(&out);
    out.extend_from_slice(&checksum);
    out
}

/// Decodes the manifest object of the snapshot `id`. Allocates at most a small multiple of the length of `bytes`.
///
/// # Errors
/// [`ReadError::Damaged`], [`ReadError::Newer`], [`ReadError::Hostile`] or [`ReadError::Key`].
pub fn decode(id: &SnapshotId, bytes: &[u8], codec: &Codec) -> Result<Manifest, ReadError> {
    let wrong = |error: FormatError| match error {
        FormatError::Newer { found, known } => ReadError::Newer { id: id.to_string(), found, known },
        FormatError::Key(reason) => ReadError::Key { what: format!("the snapshot {id}"), reason },
        other => damaged(id, Damage::Manifest(other.to_string())),
    };
    let body = open(MANIFEST, &id.to_string(), bytes, codec).map_err(wrong)?;
    let (json, table) = split(&body).map_err(wrong)?;
    let mut manifest = Manifest::from_body(id, json)?;
    fill_in(&mut manifest, table).map_err(wrong)?;
    Ok(manifest)
}

/// The content of an object of [`seal`] with the same magic and context.
///
/// # Errors
/// If the object was altered, or is of a newer version, another key or another kind.
pub fn open(magic: &Magic, context: &str, bytes: &[u8], codec: &Codec) -> Result<Vec<u8>, FormatError> {
    if bytes.len() < HEADER_BYTES + CHECKSUM_BYTES || &bytes[..8] != magic {
        return Err(FormatError::Invalid("it is an object of another kind"));
    }
    let (record, checksum) = bytes.split_at(bytes.len() - CHECKSUM_BYTES);
    let version = u32_at(record, 8);
    if version > VERSION {
        return Err(FormatError::Newer { found: version, known: VERSION });
    }
    check_key(u64_at(record, 16), codec)?;
    if codec.checksum(record) != checksum {
        return Err(FormatError::Checksum);
    }
    let body = &record[HEADER_BYTES..];
    if version == 0 || u32_at(record, 12) != 0 || u64_at(record, 24) != body.len() as u64 {
        return Err(FormatError::Invalid("its length is not the one in its header"));
    }
    codec.unseal(context, body.to_vec())
}

fn split(body: &[u8]) -> Result<(&str, &[u8]), FormatError> {
    let short = FormatError::Invalid("it ends too early");
    let (length, rest) = body.split_at_checked(8).ok_or(short.clone())?;
    let json_bytes = usize::try_from(u64_at(length, 0)).map_err(|_| short.clone())?;
    let (json, table) = rest.split_at_checked(json_bytes).ok_or(short)?;
    if json.len() > JSON_MAX_BYTES {
        return Err(FormatError::Invalid("its text is longer than allowed"));
    }
    let json = str::from_utf8(json).map_err(|_| FormatError::Invalid("its text is not UTF-8"))?;
    Ok((json, table))
}

/// Reads the chunks of each data file from the table.
fn fill_in(manifest: &mut Manifest, table: &[u8]) -> Result<(), FormatError> {
    let short = FormatError::Invalid("its table of chunks ends too early");
    let mut rest = table;
    for file in &mut manifest.files {
        let (count, after) = rest.split_at_checked(4).ok_or(short.clone())?;
        let rows_bytes = u32_at(count, 0) as usize * ROW_BYTES;
        let (rows, after) = after.split_at_checked(rows_bytes).ok_or(short.clone())?;
        rest = after;
        file.chunks = rows.chunks_exact(ROW_BYTES).map(chunk).collect::<Result<_, _>>()?;
        if file.chunks.iter().map(|chunk| u64::from(chunk.bytes)).sum::<u64>() != file.bytes {
            return Err(FormatError::Invalid("a data file is not as long as its chunks"));
        }
    }
    if rest.is_empty() { Ok(()) } else { Err(FormatError::Invalid("its table of chunks is too long")) }
}

fn chunk(row: &[u8]) -> Result<Chunk, FormatError> {
    let id = ChunkId(*row.first_chunk().expect("a whole row"));
    let bytes = u32_at(row, 32);
    if bytes == 0 || bytes as usize > CHUNK_BYTES {
        return Err(FormatError::Invalid("a chunk of an impossible length"));
    }
    Ok(Chunk { id, bytes })
}
