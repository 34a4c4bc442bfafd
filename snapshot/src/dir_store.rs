//! Version 1 of the store: a directory per snapshot, `snapshots/ID/manifest.json` beside plain data files.
//!
//! Commit protocol: fsync the data files and their directories; write and fsync `manifest.json.tmp`; rename it to
//! `manifest.json`; fsync the directory. A directory without `manifest.json` is not a snapshot.
//!
//! Assumptions about the file system: a rename within a directory is atomic, and durable after an fsync of the
//! directory; fsync of a file makes its content durable. After a failed fsync the save fails; fsync is never retried.

use crate::chunk::is_zeroes;
use crate::files::{
    SparseWriter, copy_hashed, create_private, create_private_dir, free_bytes, open_beneath, sync_dir,
};
use crate::read_failure::{ReadFailure, classify};
use crate::store::{
    Input, Listed, Load, ProgressFn, Reclaimed, SnapshotWriter, Source, Store, Target, damaged, recorded,
};
use crate::{Damage, DataFile, Manifest, ReadError, RelPath, SaveError, SnapshotId, faults};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

const MANIFEST: &str = "manifest.json";
const MANIFEST_TMP: &str = "manifest.json.tmp";
/// A larger manifest is not read: it is damaged or hostile.
const MANIFEST_MAX_BYTES: u64 = 256 << 20;
/// Free space required beyond the estimate: an eighth of it, and at least this.
const SPARE_MIN_BYTES: u64 = 1 << 20;

/// A [`Store`] in a directory of the local (or a mounted) file system.
#[derive(Debug)]
pub struct DirStore {
    snapshots: PathBuf,
}

impl DirStore {
    /// The store in the directory `snapshots`, which the first save creates.
    #[must_use]
    pub fn new(snapshots: PathBuf) -> Self {
        Self { snapshots }
    }

    fn dir(&self, id: &SnapshotId) -> PathBuf {
        self.snapshots.join(id.to_string())
    }

    /// Every directory whose name is a snapshot ID, with whether it is committed, oldest first.
    fn entries(&self) -> io::Result<Vec<(SnapshotId, bool)>> {
        let entries = match std::fs::read_dir(&self.snapshots) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry?;
            let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            if entry.file_type()?.is_dir() {
                let committed = entry.path().join(MANIFEST).symlink_metadata().is_ok();
                found.push((id, committed));
            }
        }
        found.sort();
        Ok(found)
    }

    fn delete(&self, id: &SnapshotId) -> Result<(), SaveError> {
        let dir = self.dir(id);
        let failed = |step, path: &Path| {
            let path = path.to_owned();
            move |source| SaveError::Io { step, path, source }
        };
        // The manifest first: an interrupted removal leaves a directory that `sweep` removes.
        let manifest = dir.join(MANIFEST);
        match std::fs::remove_file(&manifest) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("remove", &manifest)(error));
            }
            _ => {}
        }
        sync_dir(&dir).map_err(failed("sync", &dir))?;
        faults::hit("remove-data").map_err(failed("remove", &dir))?;
        std::fs::remove_dir_all(&dir).map_err(failed("remove", &dir))?;
        tracing::debug!("removed {}", dir.display());
        Ok(())
    }

    /// The error for a file of the snapshot that cannot be read: damage, unless the access failed.
    fn unreadable(&self, id: &SnapshotId, path: &str, source: io::Error) -> ReadError {
        match classify(&source) {
            ReadFailure::Access => ReadError::Io { step: "read", path: self.dir(id).join(path), source },
            ReadFailure::Damaged | ReadFailure::Unreadable => {
                damaged(id, Damage::Unreadable { path: path.to_owned(), source })
            }
        }
    }

    fn open_dir(&self, id: &SnapshotId) -> Result<File, ReadError> {
        // The store's path may contain symbolic links; the snapshot's directory must not be one.
        File::open(&self.snapshots).and_then(|snapshots| open_beneath(&snapshots, id.to_string())).map_err(
            |source| match source.kind() {
                io::ErrorKind::NotFound => ReadError::Missing(id.to_string()),
                _ => ReadError::Io { step: "open", path: self.dir(id), source },
            },
        )
    }
}

impl Store for DirStore {
    fn begin(&self, id: &SnapshotId, needed_bytes: u64) -> Result<Box<dyn SnapshotWriter + '_>, SaveError> {
        let failed = |step, path: &Path| {
            let path = path.to_owned();
            move |source| SaveError::Io { step, path, source }
        };
        if !self.snapshots.exists() {
            create_private_dir(&self.snapshots).map_err(failed("create", &self.snapshots))?;
            let parent = self.snapshots.parent().unwrap_or(Path::new("/"));
            sync_dir(parent).map_err(failed("sync", parent))?;
        }
        let available_bytes =
            free_bytes(&self.snapshots).map_err(failed("get the free space of", &self.snapshots))?;
        let wanted_bytes = needed_bytes + (needed_bytes / 8).max(SPARE_MIN_BYTES);
        if available_bytes < wanted_bytes {
            let path = self.snapshots.clone();
            return Err(SaveError::NoSpace { path, needed_bytes: wanted_bytes, available_bytes });
        }
        let dir = self.dir(id);
        create_private_dir(&dir).map_err(failed("create", &dir))?;
        Ok(Box::new(DirWriter {
            dir,
            needed_bytes: wanted_bytes,
            files: Vec::new(),
            subdirs: BTreeSet::new(),
            kept: false,
        }))
    }

    fn list(&self) -> Result<Vec<Listed>, ReadError> {
        let failed = |source| ReadError::Io { step: "read", path: self.snapshots.clone(), source };
        let committed = self.entries().map_err(failed)?.into_iter().filter(|(_, committed)| *committed);
        Ok(committed.map(|(id, _)| Listed { manifest: self.manifest(&id), id }).collect())
    }

    fn manifest(&self, id: &SnapshotId) -> Result<Manifest, ReadError> {
        let dir = self.open_dir(id)?;
        let unreadable = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => ReadError::Missing(id.to_string()),
            _ => self.unreadable(id, MANIFEST, source),
        };
        let file = open_beneath(&dir, MANIFEST).map_err(unreadable)?;
        let mut text = Vec::new();
        file.take(MANIFEST_MAX_BYTES).read_to_end(&mut text).map_err(unreadable)?;
        Manifest::decode(id, &text)
    }

    fn verify(&self, manifest: &Manifest, progress: ProgressFn) -> Result<(), ReadError> {
        let dir = self.open_dir(&manifest.id)?;
        manifest.files.iter().try_for_each(|file| self.check_file(&dir, &manifest.id, file, progress))
    }

    fn load(&self, manifest: &Manifest, wanted: &[Load<'_>], progress: ProgressFn) -> Result<(), ReadError> {
        let dir = self.open_dir(&manifest.id)?;
        for one in wanted {
            let file = recorded(manifest, one.path)?;
            let failed = |source| ReadError::Target { path: one.path.to_string(), source };
            one.into.set_bytes(file.bytes).map_err(failed)?;
            let mut to = Sequential { into: one.into, position: 0, failure: None };
            let copied = self.copy_checked(&dir, &manifest.id, file, &mut to, progress);
            match to.failure {
                Some(source) => return Err(failed(source)),
                None => copied?,
            }
        }
        Ok(())
    }

    /// Checks the whole file first: its checksum covers all of it.
    fn source(&self, manifest: &Manifest, path: &RelPath) -> Result<Box<dyn Source + '_>, ReadError> {
        let dir = self.open_dir(&manifest.id)?;
        let recorded = recorded(manifest, path)?;
        self.check_file(&dir, &manifest.id, recorded, &|_| {})?;
        let file = self.open_checked_length(&dir, &manifest.id, recorded)?;
        Ok(Box::new(PlainFile { file, bytes: recorded.bytes }))
    }

    fn remove(&self, id: &SnapshotId) -> Result<(), SaveError> {
        self.delete(id)
    }

    fn sweep(&self) -> Result<Vec<String>, SaveError> {
        let failed = |source| SaveError::Io { step: "read", path: self.snapshots.clone(), source };
        let left = self.entries().map_err(failed)?.into_iter().filter(|(_, committed)| !committed);
        left.map(|(id, _)| self.delete(&id).map(|()| id.to_string())).collect()
    }

    fn reclaim_until(&self, _cancel: &AtomicBool) -> Result<Reclaimed, SaveError> {
        Ok(Reclaimed::default())
    }
}

/// Writes to a target sequentially. Keeps a write error separate from read errors, since it is not damage.
struct Sequential<'a> {
    into: &'a dyn Target,
    position: u64,
    failure: Option<io::Error>,
}

impl Write for Sequential<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A hole smaller than a page saves nothing.
        let is_hole = bytes.len() >= 4096 && is_zeroes(bytes);
        let written = if is_hole { Ok(()) } else { self.into.write_at(self.position, bytes) };
        self.position += bytes.len() as u64;
        written.map(|()| bytes.len()).map_err(|error| {
            let kind = error.kind();
            self.failure = Some(error);
            io::Error::from(kind)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A data file as a source.
struct PlainFile {
    file: File,
    bytes: u64,
}

impl Source for PlainFile {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, offset)
    }
}

/// Reads a source sequentially.
struct Reading<'a> {
    from: &'a dyn Source,
    position: u64,
}

impl Read for Reading<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left_bytes = self.from.bytes() - self.position;
        let bytes = buffer.len().min(usize::try_from(left_bytes).unwrap_or(usize::MAX));
        self.from.read_at(self.position, &mut buffer[..bytes])?;
        self.position += bytes as u64;
        Ok(bytes)
    }
}

impl DirStore {
    fn open_checked_length(
        &self,
        dir: &File,
        id: &SnapshotId,
        recorded: &DataFile,
    ) -> Result<File, ReadError> {
        let path = recorded.path.to_string();
        let unreadable = |source| self.unreadable(id, &path, source);
        let file = open_beneath(dir, &recorded.path).map_err(unreadable)?;
        let found = file.metadata().map_err(unreadable)?.len();
        if found != recorded.bytes {
            return Err(damaged(id, Damage::Length { path, found, recorded: recorded.bytes }));
        }
        Ok(file)
    }

    fn check_file(
        &self,
        dir: &File,
        id: &SnapshotId,
        recorded: &DataFile,
        progress: ProgressFn,
    ) -> Result<(), ReadError> {
        self.copy_checked(dir, id, recorded, &mut io::sink(), progress)
    }

    fn copy_checked(
        &self,
        dir: &File,
        id: &SnapshotId,
        recorded: &DataFile,
        to: &mut dyn Write,
        progress: ProgressFn,
    ) -> Result<(), ReadError> {
        let mut file = self.open_checked_length(dir, id, recorded)?;
        let path = recorded.path.to_string();
        let (_, found) = copy_hashed(&mut file, to, &|bytes| progress(bytes))
            .map_err(|source| self.unreadable(id, &path, source))?;
        if Some(found) == recorded.blake3 { Ok(()) } else { Err(damaged(id, Damage::Checksum { path })) }
    }
}

struct DirWriter {
    dir: PathBuf,
    needed_bytes: u64,
    files: Vec<DataFile>,
    subdirs: BTreeSet<PathBuf>,
    kept: bool,
}

impl DirWriter {
    /// Names the failed step. A full disk becomes [`SaveError::NoSpace`].
    fn failed(&self, step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SaveError {
        let (store, path) = (self.dir.clone(), path.to_owned());
        let needed_bytes = self.needed_bytes;
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                let available_bytes = free_bytes(&store).unwrap_or(0);
                SaveError::NoSpace { path: store, needed_bytes, available_bytes }
            }
            _ => SaveError::Io { step, path, source },
        }
    }

    fn put_one(
        &mut self,
        path: &RelPath,
        from: &mut dyn Read,
        progress: ProgressFn,
    ) -> Result<(), SaveError> {
        let target = self.dir.join(path);
        if let Some(parent) = target.parent().filter(|parent| *parent != self.dir) {
            create_private_dir(parent).map_err(self.failed("create", parent))?;
            self.subdirs.insert(parent.to_owned());
        }
        let mut write = || -> io::Result<(u64, String)> {
            let mut file = create_private(&target)?;
            faults::hit("save-file")?;
            let mut sparse = SparseWriter::new(&mut file);
            let copied = copy_hashed(from, &mut sparse, &|bytes| progress(bytes))?;
            sparse.finish()?;
            faults::hit("save-sync")?;
            file.sync_all()?;
            Ok(copied)
        };
        let (bytes, blake3) = write().map_err(self.failed("write", &target))?;
        self.files.push(DataFile { path: path.clone(), bytes, blake3: Some(blake3), chunks: Vec::new() });
        Ok(())
    }

    fn write_manifest(&self, manifest: &Manifest) -> io::Result<()> {
        let mut file = create_private(&self.dir.join(MANIFEST_TMP))?;
        file.write_all(&manifest.encode())?;
        file.sync_all()?;
        faults::hit("save-before-commit")?;
        std::fs::rename(self.dir.join(MANIFEST_TMP), self.dir.join(MANIFEST))
    }
}

impl SnapshotWriter for DirWriter {
    fn put(&mut self, files: &[Input<'_>], progress: ProgressFn) -> Result<(), SaveError> {
        for file in files {
            self.put_one(&file.path, &mut Reading { from: file.from, position: 0 }, progress)?;
            let failed = |source| SaveError::Source { path: file.path.to_string(), source };
            file.from.taken().map_err(failed)?;
        }
        Ok(())
    }

    fn commit(mut self: Box<Self>, mut manifest: Manifest) -> Result<Manifest, SaveError> {
        manifest.files = std::mem::take(&mut self.files);
        for subdir in &self.subdirs {
            sync_dir(subdir).map_err(self.failed("sync", subdir))?;
        }
        let parent = self.dir.parent().unwrap_or(Path::new(".")).to_owned();
        for dir in [&self.dir, &parent] {
            sync_dir(dir).map_err(self.failed("sync", dir))?;
        }
        self.write_manifest(&manifest).map_err(self.failed("commit", &self.dir))?;
        // If this fails, `drop` removes the snapshot: it might not survive a crash.
        sync_dir(&self.dir).map_err(self.failed("sync", &self.dir))?;
        self.kept = true;
        faults::hit("save-after-commit").map_err(self.failed("commit", &self.dir))?;
        Ok(manifest)
    }
}

impl Drop for DirWriter {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = std::fs::remove_dir_all(&self.dir)
        {
            // Without a manifest it is not a snapshot, and the next start sweeps it.
            tracing::warn!("cannot remove the unfinished snapshot {}: {error}", self.dir.display());
        }
    }
}
