//! Version 1 of the store: a directory per snapshot, `snapshots/ID/manifest.json` beside plain data files. Such
//! snapshots are read and removed, no longer written.
//!
//! A directory without `manifest.json` is not a snapshot: its removal or its save was interrupted.

use crate::chunk::is_zeroes;
use crate::files::{open_beneath, sync_dir};
use crate::read_failure::{ReadFailure, classify};
use crate::store::{
    Discard, Listed, Load, ProgressFn, Reclaimed, SnapshotWriter, Source, Store, Target, damaged, recorded,
};
use crate::{Damage, DataFile, Manifest, ReadError, RelPath, SaveError, SnapshotId, faults};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

const MANIFEST: &str = "manifest.json";
/// A larger manifest is not read: it is damaged or hostile.
const MANIFEST_MAX_BYTES: u64 = 256 << 20;
/// Bytes read per step: large enough to amortise the system calls, small enough for progress reports.
const STEP_BYTES: usize = 4 << 20;

/// A [`Store`] in a directory of the local (or a mounted) file system.
#[derive(Debug)]
pub struct DirStore {
    snapshots: PathBuf,
}

impl DirStore {
    /// The store in the directory `snapshots`, which may be missing.
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
    fn begin(&self, id: &SnapshotId, _bytes: u64) -> Result<Box<dyn SnapshotWriter + '_>, SaveError> {
        let source = io::ErrorKind::Unsupported.into();
        Err(SaveError::Io { step: "save a snapshot of version 1 in", path: self.dir(id), source })
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
        manifest
            .files
            .iter()
            .try_for_each(|file| self.copy_checked(&dir, &manifest.id, file, &Discard, progress))
    }

    fn load(&self, manifest: &Manifest, wanted: &[Load<'_>], progress: ProgressFn) -> Result<(), ReadError> {
        let dir = self.open_dir(&manifest.id)?;
        for one in wanted {
            let file = recorded(manifest, one.path)?;
            one.into.set_bytes(file.bytes).map_err(target_failed(file))?;
            self.copy_checked(&dir, &manifest.id, file, one.into, progress)?;
        }
        Ok(())
    }

    /// Checks the whole file first: its checksum covers all of it.
    fn source(&self, manifest: &Manifest, path: &RelPath) -> Result<Box<dyn Source + '_>, ReadError> {
        let dir = self.open_dir(&manifest.id)?;
        let recorded = recorded(manifest, path)?;
        self.copy_checked(&dir, &manifest.id, recorded, &Discard, &|_| {})?;
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

fn target_failed(file: &DataFile) -> impl FnOnce(io::Error) -> ReadError {
    |source| ReadError::Target { path: file.path.to_string(), source }
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

    /// Copies a data file to its target and checks it. Errors of the target are not damage.
    fn copy_checked(
        &self,
        dir: &File,
        id: &SnapshotId,
        recorded: &DataFile,
        into: &dyn Target,
        progress: ProgressFn,
    ) -> Result<(), ReadError> {
        let file = self.open_checked_length(dir, id, recorded)?;
        let path = recorded.path.to_string();
        let mut hasher = blake3::Hasher::new();
        let mut buffer = Vec::new();
        for offset in (0..recorded.bytes).step_by(STEP_BYTES) {
            let left_bytes = usize::try_from(recorded.bytes - offset).unwrap_or(usize::MAX);
            buffer.resize(left_bytes.min(STEP_BYTES), 0);
            file.read_exact_at(&mut buffer, offset).map_err(|source| self.unreadable(id, &path, source))?;
            hasher.update(&buffer);
            if !is_zeroes(&buffer) {
                into.write_at(offset, &buffer).map_err(target_failed(recorded))?;
            }
            progress(buffer.len() as u64);
        }
        let found = hasher.finalize().to_hex().to_string();
        if Some(found) == recorded.blake3 { Ok(()) } else { Err(damaged(id, Damage::Checksum { path })) }
    }
}
