//! Objects in a directory of a local (or mounted) file system: the object `packs/x` is the file `packs/x` below the
//! root.
//!
//! An object is written under a temporary name, `.tmp-…` beside its own, made durable (fsync), renamed, and its
//! directory made durable. What begins with `.tmp-` is no object, and is swept.
//!
//! Assumptions about the file system: a rename within a directory is atomic and, after fsync of the directory,
//! durable; fsync of a file makes its content and length durable; after a failed fsync nothing is known of the file,
//! so that the object is given up and the fsync never tried again.
//!
//! Fault points: `save-file` (a large object begins), `save-write` (each block), `save-fsync`, `save-rename`;
//! `put-write`, `put-fsync`, `put-rename` for small objects; `sync-dir` after each renaming and removal; `remove-data`;
//! `sweep` (each file).

mod place;
mod queue;
mod reader;
#[allow(unsafe_code, reason = "the kernel reads from memory while a write is in flight")]
mod ring;
mod temporary;
mod writer;

use super::record::{Notes, Operation};
use super::{Medium, ObjectReader, ObjectWriter};
use crate::files::free_bytes;
use crate::{RelPath, faults};
use place::{Place, written};
use reader::DirReader;
use std::fmt::{self, Debug};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use temporary::Temporary;
use writer::DirWriter;

/// Which ways of the kernel's are to be taken, where it has them. For tests and measurements: all of them are by
/// default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ways {
    /// Large reads and writes go past the page cache (O_DIRECT).
    pub direct: bool,
    /// Writes in flight go through io_uring; otherwise a thread of each writer does them.
    pub ring: bool,
}

impl Default for Ways {
    fn default() -> Self {
        Self { direct: true, ring: true }
    }
}

/// A directory of objects.
#[derive(Debug)]
pub struct DirMedium {
    place: Place,
    ways: Ways,
    room: Option<Room>,
}

/// Says how many bytes may still be written.
type Ask = dyn Fn() -> io::Result<u64> + Send + Sync;

/// Somebody who knows better than the file system how much room there is.
struct Room(Box<Ask>);

impl Debug for Room {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Room")
    }
}

impl DirMedium {
    /// The objects below the directory `root`, which is made when the first one is written. `root` may be reached
    /// through symbolic links; below it, none is followed.
    #[must_use]
    pub fn new(root: PathBuf) -> Self {
        Self { place: Place::new(root, Notes::default()), ways: Ways::default(), room: None }
    }

    /// Asks `room` how many bytes may still be written, instead of the file system: one in memory has a size of its
    /// own, and whether the memory is there is another matter.
    #[must_use]
    pub fn with_room(self, room: impl Fn() -> io::Result<u64> + Send + Sync + 'static) -> Self {
        Self { room: Some(Room(Box::new(room))), ..self }
    }

    /// Takes these ways and no others.
    #[must_use]
    pub fn with_ways(self, ways: Ways) -> Self {
        Self { ways, ..self }
    }

    /// As [`DirMedium::new`]; all that is done below `root` is kept in `recorder`. `root` has to be there.
    #[cfg(feature = "faults")]
    #[must_use]
    pub fn recorded(root: PathBuf, recorder: super::record::Recorder) -> Self {
        Self { place: Place::new(root, Notes(Some(recorder))), ways: Ways::default(), room: None }
    }

    /// Writes a small object under a temporary name, durably.
    fn write_temporary(&self, name: &RelPath, content: &[u8]) -> io::Result<Temporary> {
        faults::hit("put-write")?;
        let temporary = Temporary::new(&self.place, self.place.make_folder_of(name)?)?;
        temporary.note(|path| Operation::Write { path, offset: 0, content: content.to_vec() });
        temporary.file.write_all_at(content, 0)?;
        faults::hit("put-fsync")?;
        temporary.sync()?;
        Ok(temporary)
    }
}

impl Medium for DirMedium {
    fn describe(&self, name: &RelPath) -> String {
        self.place.path(name).display().to_string()
    }

    fn create(&self, name: &RelPath, blocks: usize, block_bytes: usize) -> io::Result<Box<dyn ObjectWriter>> {
        faults::hit("save-file")?;
        let folder = self.place.make_folder_of(name)?;
        Ok(Box::new(DirWriter::new(&self.place, folder, self.ways, blocks, block_bytes)?))
    }

    fn put_new(&self, name: &RelPath, content: &[u8]) -> io::Result<()> {
        let temporary = self.write_temporary(name, content)?;
        faults::hit("put-rename")?;
        temporary.publish_new()
    }

    fn replace(&self, name: &RelPath, content: &[u8]) -> io::Result<()> {
        let temporary = self.write_temporary(name, content)?;
        faults::hit("put-rename")?;
        temporary.publish_over()
    }

    fn open(&self, name: &RelPath) -> io::Result<Box<dyn ObjectReader>> {
        Ok(Box::new(DirReader::new(&self.place.folder_of(name)?, self.ways)?))
    }

    fn list(&self, dir: &RelPath) -> io::Result<Vec<(String, u64)>> {
        let files = self.place.files(Path::new(dir.as_str()))?;
        files
            .into_iter()
            .map(|(name, facts)| Ok((name, u64::try_from(facts.st_size).map_err(io::Error::other)?)))
            .collect()
    }

    fn list_times(&self, dir: &RelPath) -> io::Result<Vec<(String, SystemTime)>> {
        let files = self.place.files(Path::new(dir.as_str()))?;
        Ok(files.into_iter().map(|(name, facts)| (name, written(&facts))).collect())
    }

    fn remove(&self, name: &RelPath) -> io::Result<()> {
        let folder = match self.place.folder_of(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            folder => folder?,
        };
        faults::hit("remove-data")?;
        match folder.unlink(&folder.name) {
            Ok(()) => tracing::debug!("removed {}", self.describe(name)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        // Also when it was not there: whoever removed it may not have got this far.
        folder.sync()
    }

    fn sweep(&self, age: Duration) -> io::Result<Vec<String>> {
        self.place.sweep(age)
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        if let Some(Room(ask)) = &self.room {
            return ask().map(Some);
        }
        let mut path = self.place.root();
        while !path.exists() {
            path = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        }
        free_bytes(path).map(Some)
    }
}

#[cfg(test)]
mod tests;
