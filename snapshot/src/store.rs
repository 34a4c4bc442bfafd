//! The trait behind which the snapshots of one job live.

use crate::chunk::{CHUNK_BYTES, ChunkId};
use crate::{Damage, DataFile, Manifest, ReadError, RelPath, SaveError, SnapshotId};
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};

/// The longest data file that is read as a whole (bytes).
pub const READ_MAX_BYTES: u64 = 64 << 20;

/// Told of bytes as they are read or written, from whichever thread does the work.
pub type ProgressFn<'a> = &'a (dyn Fn(u64) + Sync);

/// The snapshots of one job.
///
/// A snapshot exists from the moment its [`SnapshotWriter::commit`] returns; what was begun and not committed is
/// seen by nobody and is removed by [`Store::sweep`].
pub trait Store: Debug + Send + Sync {
    /// Begins the snapshot `id`. `needed_bytes` is an upper estimate of its size: room is checked before anything is
    /// written.
    ///
    /// # Errors
    /// [`SaveError::NoSpace`] when it cannot fit, [`SaveError::Io`] when a step fails.
    fn begin(&self, id: &SnapshotId, needed_bytes: u64) -> Result<Box<dyn SnapshotWriter + '_>, SaveError>;

    /// All committed snapshots, oldest first, damaged ones included.
    ///
    /// # Errors
    /// When the store cannot be read at all.
    fn list(&self) -> Result<Vec<Listed>, ReadError>;

    /// The manifest of `id`, checked against its own checksum.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn manifest(&self, id: &SnapshotId) -> Result<Manifest, ReadError>;

    /// Reads every data file of the snapshot and compares it with its checksums.
    ///
    /// # Errors
    /// The first [`Damage`].
    fn verify(&self, manifest: &Manifest, progress: ProgressFn) -> Result<(), ReadError>;

    /// Copies data files of the snapshot to where they are wanted. All of it is compared on the way; nothing that was
    /// copied is to be used before this has returned without an error. What several files share is read once.
    ///
    /// # Errors
    /// Damage, and [`ReadError::Target`] when a target cannot be written.
    fn load(&self, manifest: &Manifest, wanted: &[Load<'_>], progress: ProgressFn) -> Result<(), ReadError>;

    /// A data file of the snapshot as something to be stored elsewhere, chunk by chunk. What is read from it has been
    /// compared with its checksum.
    ///
    /// # Errors
    /// When the manifest does not list it, and damage that is found at once.
    fn source(&self, manifest: &Manifest, path: &RelPath) -> Result<Box<dyn Source + '_>, ReadError>;

    /// Removes the snapshot. Another one is never touched; an interruption leaves nothing that `list` shows. What only
    /// it needed may stay until [`Store::reclaim`].
    ///
    /// # Errors
    /// When a step fails.
    fn remove(&self, id: &SnapshotId) -> Result<(), SaveError>;

    /// Removes what interrupted saves and removals left, and returns its names. Call it only under the job's lock and
    /// when no snapshot is being written, but by other machines where they may (`Limits::shared`): what is young is left
    /// then.
    ///
    /// # Errors
    /// When a step fails.
    fn sweep(&self) -> Result<Vec<String>, SaveError>;

    /// Gives back the room of what no snapshot needs any more. Call it only under the job's lock; a snapshot may be
    /// in writing meanwhile.
    ///
    /// # Errors
    /// When a step fails; no snapshot is harmed.
    fn reclaim(&self) -> Result<Reclaimed, SaveError> {
        self.reclaim_until(&AtomicBool::new(false))
    }

    /// The same, until nobody has time for it any more: what was done by then stays done, the next one goes on.
    ///
    /// # Errors
    /// As above.
    fn reclaim_until(&self, cancel: &AtomicBool) -> Result<Reclaimed, SaveError>;
}

/// What [`Store::reclaim`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Bytes given back.
    pub freed_bytes: u64,
    /// Bytes that had to be written again for that.
    pub moved_bytes: u64,
}

/// One committed snapshot in a listing.
#[derive(Debug)]
pub struct Listed {
    /// Its name.
    pub id: SnapshotId,
    /// What it says, or why that cannot be read.
    pub manifest: Result<Manifest, ReadError>,
}

/// Where a data file comes from. Read by several threads at once.
pub trait Source: Sync {
    /// Its length.
    fn bytes(&self) -> u64;

    /// Fills `into` with what lies from `offset` on; never asked for more than there is.
    ///
    /// # Errors
    /// When it cannot be read: the snapshot is given up.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Where the chunk that begins at `offset` ends, at most [`CHUNK_BYTES`] later. Boundaries that follow the content
    /// let unchanged content be found again when something before it has become longer.
    fn chunk_end(&self, offset: u64) -> u64 {
        (offset + CHUNK_BYTES as u64).min(self.bytes())
    }

    /// The chunk that lies at `range`, if that is known without reading it: since it is the same as in an earlier
    /// snapshot. A store that does not have that chunk, or has it in another length, reads the range all the same; that
    /// the content is the chunk's is for the source to be sure of.
    fn known(&self, _range: Range<u64>) -> Option<ChunkId> {
        None
    }

    /// All of it has been taken: its memory may be given back.
    ///
    /// # Errors
    /// When that fails: the snapshot is given up.
    fn taken(&self) -> io::Result<()> {
        Ok(())
    }
}

impl Source for &[u8] {
    fn bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        let from = self.get(offset..).and_then(|rest| rest.get(..into.len()));
        into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl Source for Vec<u8> {
    fn bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        (&self[..]).read_at(offset, into)
    }
}

/// A data file to be stored.
pub struct Input<'a> {
    /// Its name in the snapshot.
    pub path: RelPath,
    /// Its content.
    pub from: &'a dyn Source,
}

/// Where a data file goes. Written by several threads at once, each part once, in any order.
pub trait Target: Sync {
    /// Told first: how long the data file is. From now on the target reads as zeroes where nothing is written.
    ///
    /// # Errors
    /// When there is no place for it.
    fn set_bytes(&self, bytes: u64) -> io::Result<()>;

    /// Puts `bytes` at `offset`.
    ///
    /// # Errors
    /// When there is no place for it.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// A new file; long stretches of zeroes become holes.
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
        *self.lock().unwrap_or_else(PoisonError::into_inner) = content;
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        let mut content = self.lock().unwrap_or_else(PoisonError::into_inner);
        let place = content.get_mut(offset..).and_then(|rest| rest.get_mut(..bytes.len()));
        place.ok_or(io::ErrorKind::UnexpectedEof)?.copy_from_slice(bytes);
        Ok(())
    }
}

/// A data file that is wanted.
pub struct Load<'a> {
    /// Its name in the snapshot.
    pub path: &'a RelPath,
    /// Where it goes.
    pub into: &'a dyn Target,
}

/// A snapshot being written. Dropped without [`SnapshotWriter::commit`], it is removed again.
pub trait SnapshotWriter: Send {
    /// Stores data files. What is there already, in this snapshot or another, is not stored again.
    ///
    /// # Errors
    /// When one cannot be read or stored; the writer is then of no more use.
    fn put(&mut self, files: &[Input<'_>], progress: ProgressFn) -> Result<(), SaveError>;

    /// Makes everything durable and the snapshot exist. `manifest.files` and
    /// `manifest.stored_bytes` are filled in from what was `put`.
    ///
    /// # Errors
    /// When a step fails: the snapshot does not exist then. [`SaveError::Taken`] when another one has its name.
    fn commit(self: Box<Self>, manifest: Manifest) -> Result<Manifest, SaveError>;
}

impl dyn Store + '_ {
    /// The snapshot that a person means by `text`: a whole ID, its number, or its beginning.
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
}

impl dyn Store + '_ {
    /// All of the small data file `path`: at most 64 MiB of it, since a manifest of a few megabytes can
    /// name a file of any length that is all zeroes.
    ///
    /// # Errors
    /// Damage, and a data file that is longer.
    pub fn read(&self, manifest: &Manifest, path: &RelPath) -> Result<Vec<u8>, ReadError> {
        let bytes = recorded(manifest, path)?.bytes;
        if bytes > READ_MAX_BYTES {
            let reason =
                format!("{path} has {bytes} bytes, and such a file never has more than {READ_MAX_BYTES}");
            return Err(damaged(&manifest.id, Damage::Manifest(reason)));
        }
        let content = Mutex::new(Vec::new());
        self.load(manifest, &[Load { path, into: &content }], &|_| {})?;
        Ok(content.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}

pub(crate) fn damaged(id: &SnapshotId, damage: Damage) -> ReadError {
    ReadError::Damaged { id: id.to_string(), damage }
}

/// What the manifest says of a data file that it names elsewhere.
pub(crate) fn recorded<'a>(manifest: &'a Manifest, path: &RelPath) -> Result<&'a DataFile, ReadError> {
    let missing = || Damage::Manifest(format!("it does not list the file {path} that it names"));
    let found = manifest.files.iter().find(|file| &file.path == path);
    found.ok_or_else(|| damaged(&manifest.id, missing()))
}
