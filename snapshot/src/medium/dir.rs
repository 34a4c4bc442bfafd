//! Objects in a directory of a local (or mounted) file system: the object `packs/x` is the file `packs/x` below the
//! root.
//!
//! An object is written under a temporary name in the same directory (`.tmp-…`), synced, renamed, and its directory
//! synced. Names that begin with `.tmp-` are not objects and are swept.
//!
//! Assumptions about the file system: a rename within a directory is atomic, and durable after an fsync of the
//! directory; fsync of a file makes its content and length durable. After a failed fsync the state of the file is
//! unknown, so the object is discarded and the fsync never retried.
//!
//! Fault points: `save-file` (a large object begins), `save-write` (each block), `save-fsync`, `save-rename`;
//! `put-write`, `put-fsync`, `put-rename` for small objects; `sync-dir` after each renaming and removal; `remove-data`;
//! `sweep` (each file).

mod queue;
mod reader;
#[allow(unsafe_code, reason = "the kernel reads from memory while a write is in flight")]
mod ring;
mod root;
mod temporary;
mod writer;

use super::record::{Notes, Operation};
use super::{Medium, ObjectReader, ObjectWriter};
use crate::files::free_bytes;
use crate::{RelPath, faults};
use reader::DirReader;
use root::{Root, written};
use std::fmt::{self, Debug};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use temporary::Temporary;
use writer::DirWriter;

/// Which I/O features of the kernel to use, where available. All are on by default; tests and measurements turn some
/// off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoFeatures {
    /// Large reads and writes bypass the page cache (O_DIRECT).
    pub direct: bool,
    /// Asynchronous writes use io_uring; otherwise each writer has a thread for them.
    pub ring: bool,
}

impl Default for IoFeatures {
    fn default() -> Self {
        Self { direct: true, ring: true }
    }
}

/// A directory of objects.
pub struct DirMedium {
    root: Root,
    ways: IoFeatures,
    /// Replaces the free space that the file system reports.
    free_space: Option<Box<FreeBytesFn>>,
}

/// Says why a directory that is missing may not be made: its file system is not mounted.
pub type Guard = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

type FreeBytesFn = dyn Fn() -> io::Result<u64> + Send + Sync;

impl Debug for DirMedium {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "DirMedium({})", self.root.directory.display())
    }
}

impl DirMedium {
    /// The objects below the directory `root`, which the first write creates. The path of `root` may contain symbolic
    /// links; below `root`, none is followed.
    #[must_use]
    pub fn new(root: PathBuf) -> Self {
        Self { root: Root::new(root, Notes::default()), ways: IoFeatures::default(), free_space: None }
    }

    /// Gets the free space from `free_bytes` instead of the file system. The size of a tmpfs, for example, says nothing
    /// about the free memory.
    #[must_use]
    pub fn with_free_bytes(self, free_bytes: impl Fn() -> io::Result<u64> + Send + Sync + 'static) -> Self {
        Self { free_space: Some(Box::new(free_bytes)), ..self }
    }

    /// Asks `guard` before it makes the root.
    #[must_use]
    pub fn with_guard(self, guard: Option<Guard>) -> Self {
        Self { root: self.root.with_guard(guard), ..self }
    }

    /// Uses only these I/O features.
    #[must_use]
    pub fn with_io_features(self, ways: IoFeatures) -> Self {
        Self { ways, ..self }
    }

    /// As [`DirMedium::new`], with all operations recorded in `recorder`. `root` must exist.
    #[cfg(feature = "faults")]
    #[must_use]
    pub fn recorded(root: PathBuf, recorder: super::record::Recorder) -> Self {
        Self { root: Root::new(root.clone(), Notes(Some(recorder))), ..Self::new(root) }
    }
}

impl Medium for DirMedium {
    fn describe(&self, name: &RelPath) -> String {
        self.root.directory.join(name).display().to_string()
    }

    fn create(&self, name: &RelPath, blocks: usize, block_bytes: usize) -> io::Result<Box<dyn ObjectWriter>> {
        faults::hit("save-file")?;
        let folder = self.root.make_folder_of(name)?;
        Ok(Box::new(DirWriter::new(folder, self.ways, blocks, block_bytes)?))
    }

    fn put_new(&self, name: &RelPath, content: &[u8]) -> io::Result<()> {
        faults::hit("put-write")?;
        let temporary = Temporary::new(self.root.make_folder_of(name)?)?;
        temporary.note(|path| Operation::Write { path, offset: 0, content: content.to_vec() });
        temporary.file.write_all_at(content, 0)?;
        faults::hit("put-fsync")?;
        temporary.sync()?;
        faults::hit("put-rename")?;
        temporary.publish()
    }

    fn open(&self, name: &RelPath) -> io::Result<Box<dyn ObjectReader>> {
        Ok(Box::new(DirReader::new(&self.root.folder_of(name)?, self.ways)?))
    }

    fn list(&self, dir: &RelPath) -> io::Result<Vec<(String, u64)>> {
        let files = self.root.files(Path::new(dir.as_str()))?;
        files
            .into_iter()
            .map(|(name, facts)| Ok((name, u64::try_from(facts.st_size).map_err(io::Error::other)?)))
            .collect()
    }

    fn list_times(&self, dir: &RelPath) -> io::Result<Vec<(String, SystemTime)>> {
        let files = self.root.files(Path::new(dir.as_str()))?;
        Ok(files.into_iter().map(|(name, facts)| (name, written(&facts))).collect())
    }

    fn remove(&self, name: &RelPath) -> io::Result<()> {
        let folder = match self.root.folder_of(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            folder => folder?,
        };
        faults::hit("remove-data")?;
        match folder.unlink(&folder.name) {
            Ok(()) => tracing::debug!("removed {}", self.describe(name)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        // Also if it was missing: an earlier removal may have been interrupted before the sync.
        folder.sync()
    }

    fn sweep(&self, age: Duration) -> io::Result<Vec<String>> {
        self.root.sweep(age)
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        if let Some(free_bytes) = &self.free_space {
            return free_bytes().map(Some);
        }
        free_bytes(&self.root.directory).map(Some)
    }
}

#[cfg(test)]
mod tests;
