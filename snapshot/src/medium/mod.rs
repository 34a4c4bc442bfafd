//! Storage for the objects of a job: a directory or an object store. The packed store does all I/O through [`Medium`],
//! so that tests can substitute a medium that crashes or fails.
//!
//! An object has a name, is written once, sequentially, and never changes. It is visible and durable as soon as
//! [`ObjectWriter::finish`] or [`Medium::put_new`] has returned.

#[allow(unsafe_code, reason = "memory for direct I/O needs an alignment that `Vec` cannot give")]
mod block;
mod dir;
pub mod record;

pub use block::{BLOCK_ALIGN, Block};
pub use dir::{DirMedium, Guard, IoFeatures};

use crate::RelPath;
use std::fmt::Debug;
use std::io;
use std::time::{Duration, SystemTime};

/// Storage for named objects.
pub trait Medium: Debug + Send + Sync {
    /// The path or the address of `name`, for messages.
    fn describe(&self, name: &RelPath) -> String;

    /// Begins the object `name`, which nobody else may write: names of large objects are random. The writer holds at
    /// most `blocks` blocks of `block_bytes` each (a multiple of [`BLOCK_ALIGN`]) in memory.
    ///
    /// # Errors
    /// If the object cannot be begun.
    fn create(&self, name: &RelPath, blocks: usize, block_bytes: usize) -> io::Result<Box<dyn ObjectWriter>>;

    /// Creates the object `name` with `content`, unless it exists. This commits a snapshot: of several concurrent
    /// writers, one wins.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] if the object exists; it is unchanged. After any other error the object may or
    /// may not exist.
    fn put_new(&self, name: &RelPath, content: &[u8]) -> io::Result<()>;

    /// Opens the object `name` for reading.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if there is none.
    fn open(&self, name: &RelPath) -> io::Result<Box<dyn ObjectReader>>;

    /// Name (last component) and length of each object directly below `dir`, in any order. Empty if `dir` is missing.
    ///
    /// # Errors
    /// If the directory cannot be read.
    fn list(&self, dir: &RelPath) -> io::Result<Vec<(String, u64)>>;

    /// Name (last component) and modification time of each object directly below `dir`, by the clock of the file system
    /// or service. Empty if `dir` is missing.
    ///
    /// # Errors
    /// If the directory cannot be read.
    fn list_times(&self, dir: &RelPath) -> io::Result<Vec<(String, SystemTime)>>;

    /// Removes the object `name`, durably. A missing object is no error.
    ///
    /// # Errors
    /// If the object may still exist, or may reappear after a crash.
    fn remove(&self, name: &RelPath) -> io::Result<()>;

    /// Removes invisible leftovers of interrupted writers that are at least `age` old, and returns their names. No
    /// writer may take longer than `age`.
    ///
    /// # Errors
    /// If a leftover cannot be removed.
    fn sweep(&self, age: Duration) -> io::Result<Vec<String>>;

    /// Free space in bytes; `None` if there is no known limit.
    ///
    /// # Errors
    /// If the free space cannot be determined.
    fn free_bytes(&self) -> io::Result<Option<u64>>;
}

/// An object that is being written. If it is dropped without [`ObjectWriter::finish`], it is discarded.
pub trait ObjectWriter: Send {
    /// An empty block to fill. Waits until one is free.
    ///
    /// # Errors
    /// The error of an earlier block that could not be written.
    fn block(&mut self) -> io::Result<Block>;

    /// Appends a block to the object; it may be written later. The length of every block but the last must be a multiple
    /// of [`BLOCK_ALIGN`].
    ///
    /// # Errors
    /// The error of this or an earlier block.
    fn append(&mut self, block: Block) -> io::Result<()>;

    /// Completes the object and makes it durable.
    ///
    /// # Errors
    /// The error of any block. The object then does not exist, or nothing refers to it.
    fn finish(self: Box<Self>) -> io::Result<()>;
}

/// An object that is being read, possibly by several threads.
pub trait ObjectReader: Send + Sync {
    /// Its length.
    fn bytes(&self) -> u64;

    /// Fills `into` with the content at `offset`. Fastest if offset, length and address are multiples of
    /// [`BLOCK_ALIGN`].
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] if the object is too short.
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
            format!("it has {bytes} bytes, more than the {max_bytes} allowed"),
        ));
    }
    let mut content = vec![0; usize::try_from(bytes).map_err(io::Error::other)?];
    object.read_at(0, &mut content)?;
    Ok(content)
}
