//! The content of a device's ledger: 24 bytes, little-endian: magic, bytes in use, next segment.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const BYTES: usize = 24;
const MAGIC: &[u8; 8] = b"SIMLEDG1";

/// What a device's ledger says.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Memory in use by all processes, bytes.
    pub used_bytes: u64,
    /// The ID of the next segment.
    pub next_id: u64,
}

impl Counters {
    /// A ledger that is not one (new, or cut short by a crash) starts empty; reconciliation sets it right.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read(file: &File) -> io::Result<Self> {
        let mut bytes = [0; BYTES];
        let read = file.read_at(&mut bytes, 0)?;
        if read < BYTES || &bytes[..8] != MAGIC {
            return Ok(Self::default());
        }
        let number = |at: usize| {
            bytes[at..at + 8].iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
        };
        Ok(Self { used_bytes: number(8), next_id: number(16) })
    }

    /// Writes the ledger.
    ///
    /// # Errors
    /// The kernel's.
    pub fn write(&self, file: &File) -> io::Result<()> {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..16].copy_from_slice(&self.used_bytes.to_le_bytes());
        bytes[16..].copy_from_slice(&self.next_id.to_le_bytes());
        file.write_all_at(&bytes, 0)
    }
}
