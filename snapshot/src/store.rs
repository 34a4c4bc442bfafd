//! The trait [`Store`]: the snapshots of one job.

use crate::chunk::{CHUNK_BYTES, ChunkId};
use crate::{Damage, DataFile, Manifest, ReadError, RelPath, SaveError, SnapshotId};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;

/// The maximum size of a data file that `read` loads into memory (bytes).
pub const READ_MAX_BYTES: u64 = 64 << 20;

/// Progress callback: called with the number of bytes read or written, from any worker thread.
pub type ProgressFn<'a> = &'a (dyn Fn(u64) + Sync);

/// The snapshots of one job.
///
/// A snapshot exists as soon as its [`SnapshotWriter::commit`] returns. An uncommitted snapshot is invisible, and
/// [`Store::sweep`] removes it.
pub trait Store: Debug + Send + Sync {
    /// Begins the snapshot `id`. `needed_bytes` is an upper estimate of its size, of which the store may have most already:
    /// nothing is written if the free space is most likely short.
    ///
    /// # Errors
    /// [`SaveError::NoSpace`] if the snapshot does not fit, [`SaveError::Io`] if a step fails.
    fn begin(&self, id: &SnapshotId, needed_bytes: u64) -> Result<Box<dyn SnapshotWriter + '_>, SaveError>;

    /// All committed snapshots, oldest first, damaged ones included.
    ///
    /// # Errors
    /// If the store cannot be read at all.
    fn list(&self) -> Result<Vec<Listed>, ReadError>;

    /// As [`Store::list`], but a snapshot whose data is not all listed by indexes counts as unreadable, with
    /// [`Damage::Lacking`]. The data itself is not read.
    ///
    /// # Errors
    /// If the store cannot be read at all.
    fn list_checked(&self) -> Result<Vec<Listed>, ReadError> {
        self.list()
    }

    /// Reads the manifest of `id` and checks its checksum.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn manifest(&self, id: &SnapshotId) -> Result<Manifest, ReadError>;

    /// Reads every data file of the snapshot and checks its checksums.
    ///
    /// # Errors
    /// The first [`Damage`].
    fn verify(&self, manifest: &Manifest, progress: ProgressFn) -> Result<(), ReadError>;

    /// Copies data files of the snapshot to their targets and checks their checksums. The copies must not be used until
    /// this returns without an error. Chunks that several files share are read once.
    ///
    /// # Errors
    /// [`ReadError::Damaged`], and [`ReadError::Target`] if a target cannot be written.
    fn load(&self, manifest: &Manifest, wanted: &[Load<'_>], progress: ProgressFn) -> Result<(), ReadError>;

    /// A data file of the snapshot as a [`Source`], to copy it to another store. Reads from it check the checksums.
    ///
    /// # Errors
    /// If the manifest does not list the file, or damage is detected immediately.
    fn source(&self, manifest: &Manifest, path: &RelPath) -> Result<Box<dyn Source + '_>, ReadError>;

    /// Removes the snapshot. Other snapshots are never touched, and an interrupted removal leaves nothing that `list`
    /// shows. Data that only this snapshot used may stay until [`Store::reclaim`].
    ///
    /// # Errors
    /// If a step fails.
    fn remove(&self, id: &SnapshotId) -> Result<(), SaveError>;

    /// Whether the store lacks data of a snapshot, as far as that shows without reading the data.
    ///
    /// # Errors
    /// [`ReadError::Io`] if the access failed.
    fn is_lacking(&self, _manifest: &Manifest) -> Result<bool, ReadError> {
        Ok(false)
    }

    /// The snapshots that a machine has marked as kept, in a store that machines share, each with the names of the stores
    /// that keep it: no machine prunes them. The name is empty if an earlier build has set the mark.
    ///
    /// # Errors
    /// If the marks cannot be read.
    fn pins(&self) -> Result<BTreeMap<SnapshotId, BTreeSet<String>>, ReadError> {
        Ok(BTreeMap::new())
    }

    /// Marks a snapshot as kept for all machines, by the machine whose store is named `keeper`. It need not exist yet.
    ///
    /// # Errors
    /// If a step fails.
    fn pin(&self, _id: &SnapshotId, _keeper: &str) -> Result<(), SaveError> {
        Ok(())
    }

    /// Removes the mark of `keeper`, or those of all. Returns whether others still keep the snapshot.
    ///
    /// # Errors
    /// If a step fails.
    fn unpin(&self, _id: &SnapshotId, _keeper: Option<&str>) -> Result<bool, SaveError> {
        Ok(false)
    }

    /// Removes the leftovers of interrupted saves and removals, and returns their names. Call it only under the job's
    /// lock and while this machine writes no snapshot. Where other machines may write (`Limits::shared`), recent
    /// leftovers stay.
    ///
    /// # Errors
    /// If a step fails.
    fn sweep(&self) -> Result<Vec<String>, SaveError>;

    /// Frees the space of data that no snapshot uses any more (garbage collection). Call it only under the job's lock; a
    /// snapshot may be written at the same time.
    ///
    /// # Errors
    /// If a step fails; no snapshot is harmed.
    fn reclaim(&self) -> Result<Reclaimed, SaveError> {
        self.reclaim_until(&AtomicBool::new(false))
    }

    /// As [`Store::reclaim`], until `cancel` is set. Completed work is kept, and the next call continues from there.
    ///
    /// # Errors
    /// As [`Store::reclaim`].
    fn reclaim_until(&self, cancel: &AtomicBool) -> Result<Reclaimed, SaveError>;
}

/// The result of [`Store::reclaim`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Bytes freed.
    pub freed_bytes: u64,
    /// Bytes of live chunks that were copied to new packs.
    pub moved_bytes: u64,
}

/// One committed snapshot in a listing.
#[derive(Debug)]
pub struct Listed {
    /// Its name.
    pub id: SnapshotId,
    /// Its manifest, or the error of reading it.
    pub manifest: Result<Manifest, ReadError>,
}

/// The content of a data file to be stored. Several threads read it concurrently.
pub trait Source: Sync {
    /// Its length.
    fn bytes(&self) -> u64;

    /// Fills `into` with the content at `offset`. Callers never read beyond the end.
    ///
    /// # Errors
    /// If the content cannot be read; the save then fails.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// The end of the chunk that begins at `offset`, at most [`CHUNK_BYTES`] later. With content-defined boundaries,
    /// unchanged content is deduplicated even if the content before it has grown.
    fn chunk_end(&self, offset: u64) -> u64 {
        (offset + CHUNK_BYTES as u64).min(self.bytes())
    }

    /// The name of the chunk at `range` if it is known without reading, because it is unchanged since an earlier
    /// snapshot. The source vouches for the name. A store that lacks a chunk of that name and length reads the range
    /// anyway.
    fn known(&self, _range: Range<u64>) -> Option<ChunkId> {
        None
    }

    /// Called when all of the content has been stored: the source may free its memory.
    ///
    /// # Errors
    /// If the source fails to do so; the save then fails.
    fn taken(&self) -> io::Result<()> {
        Ok(())
    }
}

impl<T: AsRef<[u8]> + Sync> Source for T {
    fn bytes(&self) -> u64 {
        self.as_ref().len() as u64
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        let from = self.as_ref().get(offset..).and_then(|rest| rest.get(..into.len()));
        into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// A data file to be stored.
pub struct Input<'a> {
    /// Its name in the snapshot.
    pub path: RelPath,
    /// Its content.
    pub from: &'a dyn Source,
}

/// The destination of a data file. Several threads write it concurrently, each part once, in any order.
pub trait Target: Sync {
    /// Sets the length of the data file; called before any write. Parts that are not written must read as zeroes.
    ///
    /// # Errors
    /// If the target has no room for that many bytes.
    fn set_bytes(&self, bytes: u64) -> io::Result<()>;

    /// Whether anything in `range` is wanted: a chunk in which nothing is need not be read, but may be written all the same.
    fn wants(&self, _range: Range<u64>) -> bool {
        true
    }

    /// Writes `bytes` at `offset`.
    ///
    /// # Errors
    /// If the target cannot be written.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// A file, truncated first; long runs of zeroes become holes.
impl Target for File {
    fn set_bytes(&self, bytes: u64) -> io::Result<()> {
        self.set_len(0)?;
        self.set_len(bytes)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }
}

/// Content in memory, for small files.
impl Target for Mutex<Vec<u8>> {
    fn set_bytes(&self, bytes: u64) -> io::Result<()> {
        let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
        let mut content = Vec::new();
        content.try_reserve_exact(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        content.resize(bytes, 0);
        *self.lock() = content;
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        let mut content = self.lock();
        let place = content.get_mut(offset..).and_then(|rest| rest.get_mut(..bytes.len()));
        place.ok_or(io::ErrorKind::UnexpectedEof)?.copy_from_slice(bytes);
        Ok(())
    }
}

/// A target that discards everything.
pub(crate) struct Discard;

impl Target for Discard {
    fn set_bytes(&self, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn write_at(&self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }
}

/// A data file to be loaded.
pub struct Load<'a> {
    /// Its name in the snapshot.
    pub path: &'a RelPath,
    /// Its destination.
    pub into: &'a dyn Target,
}

/// A snapshot being written. If it is dropped without [`SnapshotWriter::commit`], it is removed.
pub trait SnapshotWriter: Send {
    /// Stores data files; a file that was stored before is replaced. Chunks that this or another snapshot has stored already are not stored again.
    ///
    /// # Errors
    /// If a file cannot be read or stored; the writer must then be dropped.
    fn put(&mut self, files: &[Input<'_>], progress: ProgressFn) -> Result<(), SaveError>;

    /// Makes all data durable and commits the snapshot. Fills in `manifest.files`, and `manifest.stored_bytes` and
    /// `manifest.changed_bytes` if they are `None`.
    ///
    /// # Errors
    /// If a step fails: the snapshot does not exist then. [`SaveError::Taken`] if a snapshot of that name exists.
    fn commit(self: Box<Self>, manifest: Manifest) -> Result<Manifest, SaveError>;
}

impl dyn Store + '_ {
    /// The snapshot that a user means by `text`: a full ID, a number, or a prefix of the ID.
    ///
    /// # Errors
    /// [`ReadError::Missing`] or [`ReadError::Ambiguous`].
    pub fn find(&self, text: &str) -> Result<SnapshotId, ReadError> {
        let mut matching: Vec<_> = self.list()?.into_iter().map(|listed| listed.id).collect();
        matching.retain(|id| id.answers_to(text));
        match &matching[..] {
            [] => Err(ReadError::Missing(text.to_owned())),
            [id] => Ok(id.clone()),
            several => Err(ReadError::Ambiguous {
                text: text.to_owned(),
                candidates: several.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            }),
        }
    }

    /// The content of the small data file `path`. The limit of `READ_MAX_BYTES` protects against a damaged or hostile
    /// manifest: a few megabytes of manifest can describe a file of any length that is all zeroes.
    ///
    /// # Errors
    /// Damage, which includes a file over the limit.
    pub fn read(&self, manifest: &Manifest, path: &RelPath) -> Result<Vec<u8>, ReadError> {
        let bytes = recorded(manifest, path)?.bytes;
        if bytes > READ_MAX_BYTES {
            let reason =
                format!("{path} has {bytes} bytes; such a file never has more than {READ_MAX_BYTES}");
            return Err(damaged(&manifest.id, Damage::Manifest(reason)));
        }
        let content = Mutex::new(Vec::new());
        self.load(manifest, &[Load { path, into: &content }], &|_| {})?;
        Ok(content.into_inner())
    }
}

pub(crate) fn damaged(id: &SnapshotId, damage: Damage) -> ReadError {
    ReadError::Damaged { id: id.to_string(), damage }
}

/// The entry of the manifest's `files` for the data file `path`.
pub(crate) fn recorded<'a>(manifest: &'a Manifest, path: &RelPath) -> Result<&'a DataFile, ReadError> {
    let missing = || Damage::Manifest(format!("it refers to the data file {path} but does not list it"));
    let found = manifest.files.iter().find(|file| &file.path == path);
    found.ok_or_else(|| damaged(&manifest.id, missing()))
}
