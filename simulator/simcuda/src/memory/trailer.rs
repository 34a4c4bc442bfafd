//! What a segment's file says about itself, behind its data: 64 bytes, little-endian.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | magic `SIMSEGM1` (the last byte is the version) |
//! | 8 | 8 | ID, unique on its device |
//! | 16 | 8 | size of the data |
//! | 24 | 4 | ID of the GPU |
//! | 28 | 4 | handle types it may be exported as |
//! | 32 | 24 | zero |
//! | 56 | 8 | checksum of all that (FNV-1a) |

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use simcuda_machine::TRAILER_BYTES;

const MAGIC: &[u8; 8] = b"SIMSEGM1";

/// A segment as its file describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Trailer {
    pub(super) id: u64,
    pub(super) size_bytes: u64,
    pub(super) device: i32,
    pub(super) handle_types: u32,
}

impl Trailer {
    pub(super) fn encode(&self) -> [u8; TRAILER_BYTES] {
        let mut bytes = [0; TRAILER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..16].copy_from_slice(&self.id.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.size_bytes.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.device.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.handle_types.to_le_bytes());
        let sum = checksum(&bytes[..56]);
        bytes[56..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; TRAILER_BYTES]) -> Option<Self> {
        if &bytes[..8] != MAGIC || u64_at(bytes, 56) != checksum(&bytes[..56]) {
            return None;
        }
        Some(Self {
            id: u64_at(bytes, 8),
            size_bytes: u64_at(bytes, 16),
            device: i32::from_le_bytes(bytes[24..28].try_into().ok()?),
            handle_types: u32::from_le_bytes(bytes[28..32].try_into().ok()?),
        })
    }

    /// The trailer of a file, `None` if it has no sound one.
    pub(super) fn read(file: &File) -> io::Result<Option<Self>> {
        let length = file.metadata()?.len();
        let Some(size_bytes) = length.checked_sub(TRAILER_BYTES as u64) else { return Ok(None) };
        let mut bytes = [0; TRAILER_BYTES];
        file.read_exact_at(&mut bytes, size_bytes)?;
        Ok(Self::decode(&bytes).filter(|trailer| trailer.size_bytes == size_bytes))
    }
}

/// Little-endian number at an offset; the caller's offset is within the array.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// FNV-1a, 64 bits: against damage, not against malice.
pub(super) fn checksum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_trailer_is_refused() {
        let trailer = Trailer { id: 7, size_bytes: 2 << 20, device: 1, handle_types: 1 };
        let bytes = trailer.encode();
        assert_eq!(Trailer::decode(&bytes), Some(trailer));
        for at in 0..TRAILER_BYTES {
            let mut damaged = bytes;
            damaged[at] ^= 0x10;
            assert_eq!(Trailer::decode(&damaged), None, "byte {at}");
        }
    }
}
