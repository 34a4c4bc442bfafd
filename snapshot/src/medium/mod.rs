//! Where the objects of a job lie: in a directory, in an object store. Everything that the packed store writes and
//! reads goes through [`Medium`], so that tests can put one under it that crashes or fails.
//!
//! An object has a name, is written once, front to back, and never changes. It is seen from the moment that
//! [`ObjectWriter::finish`] or [`Medium::put_new`] has returned, and is durable by then.

#[allow(unsafe_code, reason = "memory for direct I/O needs an alignment that `Vec` cannot give")]
mod block;
mod dir;
pub mod record;

pub use block::{BLOCK_ALIGN, Block};
pub use dir::{DirMedium, Ways};

use crate::RelPath;
use std::fmt::Debug;
use std::io;
use std::time::{Duration, SystemTime};

/// A place for objects.
pub trait Medium: Debug + Send + Sync {
    /// The path or the address of `name`, for messages.
    fn describe(&self, name: &RelPath) -> String;

    /// Begins the object `name`. Another writer of the same name is not expected: names of large objects are random.
    /// The writer holds at most `blocks` blocks of `block_bytes` each (a multiple of [`BLOCK_ALIGN`]) in memory.
    ///
    /// # Errors
    /// When it cannot be begun.
    fn create(&self, name: &RelPath, blocks: usize, block_bytes: usize) -> io::Result<Box<dyn ObjectWriter>>;

    /// Makes the object `name` with `content`, unless there is one. This is how a snapshot is committed: of several
    /// who try, one wins.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] when there is one; it is untouched. After any other error it may be there or
    /// not.
    fn put_new(&self, name: &RelPath, content: &[u8]) -> io::Result<()>;

    /// Makes or replaces the object `name`: readers see the old content or the new one. The one exception from "never
    /// changes", for small records such as marks.
    ///
    /// # Errors
    /// When a step fails; either content may be there then.
    fn replace(&self, name: &RelPath, content: &[u8]) -> io::Result<()>;

    /// Opens the object `name` for reading.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when there is none.
    fn open(&self, name: &RelPath) -> io::Result<Box<dyn ObjectReader>>;

    /// Name (its last component) and length of each object directly below `dir`, in any order. No `dir`, no objects.
    ///
    /// # Errors
    /// When it cannot be read.
    fn list(&self, dir: &RelPath) -> io::Result<Vec<(String, u64)>>;

    /// Name (its last component) of each object directly below `dir`, and when it was written, by the clock of whoever
    /// keeps it. No `dir`, no objects.
    ///
    /// # Errors
    /// When it cannot be read.
    fn list_times(&self, dir: &RelPath) -> io::Result<Vec<(String, SystemTime)>>;

    /// Removes the object `name`, durably. One that is not there is removed already.
    ///
    /// # Errors
    /// When it stays, or may come back.
    fn remove(&self, name: &RelPath) -> io::Result<()>;

    /// Removes what interrupted writers have left and nobody can see, if it was written at least so long ago; returns
    /// what it was. Nobody may have been writing for longer than that.
    ///
    /// # Errors
    /// When something stays.
    fn sweep(&self, age: Duration) -> io::Result<Vec<String>>;

    /// Bytes that may still be written; `None` where there is no limit to be known.
    ///
    /// # Errors
    /// When it cannot be asked.
    fn free_bytes(&self) -> io::Result<Option<u64>>;
}

/// An object that is being written. Dropped without [`ObjectWriter::finish`], nothing of it stays.
pub trait ObjectWriter: Send {
    /// An empty block to fill. Waits until one is free.
    ///
    /// # Errors
    /// Those of an earlier block that could not be written.
    fn block(&mut self) -> io::Result<Block>;

    /// Takes the next part of the object; it may be written later. All blocks but the last one have a length that
    /// is a multiple of [`BLOCK_ALIGN`].
    ///
    /// # Errors
    /// Those of this or an earlier block.
    fn append(&mut self, block: Block) -> io::Result<()>;

    /// Makes the object whole and durable.
    ///
    /// # Errors
    /// Those of any block; the object does not exist then, or is not referred to by anybody.
    fn finish(self: Box<Self>) -> io::Result<()>;
}

/// An object that is being read, from several threads if need be.
pub trait ObjectReader: Send + Sync {
    /// Its length.
    fn bytes(&self) -> u64;

    /// Fills `into` with what lies from `offset` on. Fast where offset, length and address are multiples of
    /// [`BLOCK_ALIGN`].
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] when the object ends before.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
}

/// All of a small object.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] when it has more than `max_bytes`, and those of reading.
pub fn read_all(medium: &dyn Medium, name: &RelPath, max_bytes: u64) -> io::Result<Vec<u8>> {
    let object = medium.open(name)?;
    let bytes = object.bytes();
    if bytes > max_bytes {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("it has {bytes} bytes, more than any such object"),
        ));
    }
    let mut content = vec![0; usize::try_from(bytes).map_err(io::Error::other)?];
    object.read_at(0, &mut content)?;
    Ok(content)
}
