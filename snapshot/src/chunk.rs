//! Chunks: data files are stored in chunks, each named by a hash of its content.

use std::fmt;

/// The maximum and default size of a chunk (bytes).
pub const CHUNK_BYTES: usize = 4 << 20;

/// The name of a chunk: a hash of its content. Equal names, equal content.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId(pub [u8; 32]);

impl ChunkId {
    /// The name of every chunk that holds only zeroes. Such chunks are not stored.
    pub const ZEROES: Self = Self([0; 32]);

    /// Whether this is [`ChunkId::ZEROES`].
    #[must_use]
    pub fn is_zeroes(&self) -> bool {
        *self == Self::ZEROES
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

impl fmt::Debug for ChunkId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{self}")
    }
}

/// One chunk of a data file. A data file is the concatenation of its chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Its content's name.
    pub id: ChunkId,
    /// Its length: from 1 to [`CHUNK_BYTES`].
    pub bytes: u32,
}

/// Whether all of `bytes` are zero.
#[must_use]
pub fn is_zeroes(bytes: &[u8]) -> bool {
    // The compiler vectorises each step; the loop ends early after a step with another byte.
    let mut steps = bytes.chunks_exact(256);
    steps.by_ref().all(|step| step.iter().fold(0, |all, &byte| all | byte) == 0)
        && steps.remainder().iter().all(|&byte| byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_are_recognised() {
        for length in [0, 1, 255, 256, 257, 1000] {
            let mut bytes = vec![0; length];
            assert!(is_zeroes(&bytes), "{length}");
            for position in 0..length {
                bytes[position] = 1;
                assert!(!is_zeroes(&bytes), "{position} of {length}");
                bytes[position] = 0;
            }
        }
    }
}
