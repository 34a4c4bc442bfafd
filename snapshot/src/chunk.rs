//! Chunks: the pieces in which data files are stored, each under the name that its content gives it.

use std::fmt;

/// The largest chunk, and the usual one (bytes).
pub const CHUNK_BYTES: usize = 4 << 20;

/// The name of a chunk: a hash of its content. Equal names, equal content.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId(pub [u8; 32]);

impl ChunkId {
    /// The name of all chunks that hold only zeroes; they are stored nowhere.
    pub const ZEROES: Self = Self([0; 32]);

    /// Whether it is the name of zeroes.
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

/// One chunk of a data file. A data file is its chunks, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Its content's name.
    pub id: ChunkId,
    /// Its length: from 1 to [`CHUNK_BYTES`].
    pub bytes: u32,
}

/// Whether there is nothing but zeroes in `bytes`.
#[must_use]
pub fn is_zeroes(bytes: &[u8]) -> bool {
    // Steps that the compiler turns into vector instructions, with a way out after each.
    let mut steps = bytes.chunks_exact(256);
    steps.by_ref().all(|step| step.iter().fold(0, |all, &byte| all | byte) == 0)
        && steps.remainder().iter().all(|&byte| byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_are_told_from_anything_else() {
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
