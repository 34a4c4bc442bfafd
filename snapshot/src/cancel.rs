//! Cancellation of copies.

use crate::chunk::ChunkId;
use crate::store::{Source, Target};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// A source or a target whose operations fail once a flag is set.
pub struct Cancellable<'a, T: ?Sized> {
    inner: &'a T,
    cancelled: &'a AtomicBool,
}

impl<'a, T: ?Sized> Cancellable<'a, T> {
    /// `inner`, until `cancelled` is set.
    #[must_use]
    pub fn new(inner: &'a T, cancelled: &'a AtomicBool) -> Self {
        Self { inner, cancelled }
    }

    fn check(&self) -> io::Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(io::Error::other("cancelled"));
        }
        Ok(())
    }
}

impl<T: Source + ?Sized> Source for Cancellable<'_, T> {
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.check()?;
        self.inner.read_at(offset, into)
    }

    fn chunk_end(&self, offset: u64) -> u64 {
        self.inner.chunk_end(offset)
    }

    /// `None` after cancellation: the caller then reads, which fails. Otherwise a copy of which every chunk is known
    /// would never notice.
    fn known(&self, range: Range<u64>) -> Option<ChunkId> {
        self.check().ok()?;
        self.inner.known(range)
    }

    fn taken(&self) -> io::Result<()> {
        self.inner.taken()
    }
}

impl<T: Target + ?Sized> Target for Cancellable<'_, T> {
    fn set_bytes(&self, bytes: u64) -> io::Result<()> {
        self.check()?;
        self.inner.set_bytes(bytes)
    }

    fn wants(&self, range: Range<u64>) -> bool {
        self.inner.wants(range)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.check()?;
        self.inner.write_at(offset, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;

    /// A source whose chunks are all known.
    struct Zeroes;

    impl Source for Zeroes {
        fn bytes(&self) -> u64 {
            3
        }

        fn read_at(&self, _offset: u64, _into: &mut [u8]) -> io::Result<()> {
            unreachable!("all of it is known")
        }

        fn known(&self, _range: Range<u64>) -> Option<ChunkId> {
            Some(ChunkId::ZEROES)
        }
    }

    #[test]
    fn a_cancelled_source_and_target_fail() {
        let cancelled = AtomicBool::new(false);
        let zeroes = Cancellable::new(&Zeroes, &cancelled);
        assert_eq!(zeroes.known(0..3), Some(ChunkId::ZEROES));
        let from: &[u8] = b"abc";
        let source = Cancellable::new(&from, &cancelled);
        let into = Mutex::new(Vec::new());
        let target = Cancellable::new(&into, &cancelled);
        assert_eq!((source.bytes(), source.chunk_end(1)), (3, 3));
        source.read_at(1, &mut [0; 2]).unwrap();
        target.set_bytes(3).unwrap();
        target.write_at(0, b"x").unwrap();
        cancelled.store(true, Ordering::Relaxed);
        assert!(source.read_at(0, &mut [0; 2]).is_err());
        assert!(zeroes.known(0..3).is_none() && zeroes.read_at(0, &mut [0; 3]).is_err());
        assert!(target.set_bytes(3).is_err() && target.write_at(0, b"x").is_err());
    }
}
