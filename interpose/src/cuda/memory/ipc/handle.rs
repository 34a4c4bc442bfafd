//! What a program passes from process to process: the 64 bytes of a `CUipcMemHandle`, or of a `CUmemPoolPtrExportData`,
//! with our content.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | magic `CKPTIPC1` (the last byte is the version) |
//! | 8 | 16 | key of the physical memory, little-endian as all numbers here |
//! | 24 | 8 | offset of the allocation in it, in bytes |
//! | 32 | 8 | size of the allocation, in bytes |
//! | 40 | 4 | ID of the process that it belongs to |
//! | 44 | 8 | of a pool's allocation: the number of the pool in that process, never 0; else 0 |
//! | 52 | 4 | zero |
//! | 56 | 8 | checksum of all that (FNV-1a, 64 bits) |
//!
//! That a handle of the driver's looks like that by chance is as likely as guessing 128 bits. Which device the memory
//! is on the driver says: its ordinal may be another one in another process (CUDA_VISIBLE_DEVICES).

use ckpt_protocol::agent::ShareKey as Key;

const MAGIC: &[u8; 8] = b"CKPTIPC1";
pub(super) const HANDLE_BYTES: usize = 64;
const CHECKSUM_AT: usize = HANDLE_BYTES - 8;

/// An allocation that another process may open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Handle {
    pub key: Key,
    pub offset: u64,
    pub bytes: u64,
    pub owner: u32,
    /// 0 for memory of no pool.
    pub pool: u64,
}

impl Handle {
    pub fn encode(&self) -> [u8; HANDLE_BYTES] {
        let mut text = [0; HANDLE_BYTES];
        text[..8].copy_from_slice(MAGIC);
        text[8..24].copy_from_slice(&self.key.0.to_le_bytes());
        text[24..32].copy_from_slice(&self.offset.to_le_bytes());
        text[32..40].copy_from_slice(&self.bytes.to_le_bytes());
        text[40..44].copy_from_slice(&self.owner.to_le_bytes());
        text[44..52].copy_from_slice(&self.pool.to_le_bytes());
        let sum = checksum(&text[..CHECKSUM_AT]);
        text[CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
        text
    }

    /// `None` for what is not ours, or damaged.
    pub fn decode(text: &[u8; HANDLE_BYTES]) -> Option<Self> {
        if &text[..8] != MAGIC || checksum(&text[..CHECKSUM_AT]).to_le_bytes() != text[CHECKSUM_AT..] {
            return None;
        }
        let handle = Self {
            key: Key(u128::from_le_bytes(text[8..24].try_into().ok()?)),
            offset: u64::from_le_bytes(text[24..32].try_into().ok()?),
            bytes: u64::from_le_bytes(text[32..40].try_into().ok()?),
            owner: u32::from_le_bytes(text[40..44].try_into().ok()?),
            pool: u64::from_le_bytes(text[44..52].try_into().ok()?),
        };
        handle.offset.checked_add(handle.bytes)?;
        (handle.bytes > 0).then_some(handle)
    }

    /// Whether it lies in memory of this size.
    pub fn fits(&self, bytes: u64) -> bool {
        self.offset + self.bytes <= bytes
    }
}

pub(super) fn checksum(text: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    text.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HANDLE: Handle = Handle { key: Key(1 << 127 | 5), offset: 512, bytes: 100, owner: 7, pool: 3 };

    #[test]
    fn a_handle_comes_back_whole_and_a_damaged_one_not_at_all() {
        let text = HANDLE.encode();
        assert_eq!(Handle::decode(&text), Some(HANDLE));
        for bit in 0..HANDLE_BYTES * 8 {
            let mut damaged = text;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Handle::decode(&damaged), None, "bit {bit}");
        }
        assert_eq!(Handle::decode(&[0; HANDLE_BYTES]), None);
    }

    #[test]
    fn a_place_that_cannot_be_is_refused() {
        assert_eq!(Handle::decode(&Handle { bytes: 0, ..HANDLE }.encode()), None);
        assert_eq!(Handle::decode(&Handle { offset: u64::MAX, ..HANDLE }.encode()), None);
        assert!(HANDLE.fits(612));
        assert!(!HANDLE.fits(611));
    }
}
