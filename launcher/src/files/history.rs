//! What the last committed snapshot recorded of the job's files: what has not changed since is not read again.

use crate::files::inventory::{Entry, Identity, Inventory, Prefix};
use crate::sys::path_text::shown;
use ckpt_snapshot::Manifest;
use ckpt_snapshot::chunk::ChunkId;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::Arc;

/// The end of each chunk of a data file (bytes), and its name.
pub type ChunkNames = Arc<[(u64, ChunkId)]>;

/// The job's files as the last committed snapshot has them.
#[derive(Default)]
pub struct FileHistory {
    /// When the job was started from the beginning, nanoseconds since 1970 UTC.
    pub begun_ns: i64,
    /// When the files were recorded for the last committed snapshot, nanoseconds since 1970 UTC.
    pub recorded_ns: i64,
    /// Files by path.
    pub known: BTreeMap<String, Known>,
    /// Paths that the job has touched since the last committed snapshot; `None` if that is not known.
    pub touched: Option<BTreeSet<String>>,
    /// Whether the init watches the job's files.
    is_tracked: bool,
    /// Files that were reported as not covered.
    reported: BTreeSet<String>,
    hashes: BTreeMap<String, RunningHash>,
}

/// A file of the last committed snapshot.
#[derive(Clone)]
pub struct Known {
    /// Its entry.
    pub entry: Entry,
    /// Its chunks in the store, if its content is there.
    pub chunks: ChunkNames,
}

/// The checksum of the beginning of a file that grows.
struct RunningHash {
    identity: Identity,
    bytes: u64,
    hasher: blake3::Hasher,
}

impl FileHistory {
    /// Of a job that begins now.
    #[must_use]
    pub fn new(begun_ns: i64) -> Self {
        Self { begun_ns, ..Self::default() }
    }

    /// Of a job that was resumed from a snapshot with this inventory.
    #[must_use]
    pub fn resumed(manifest: &Manifest, inventory: Inventory) -> Self {
        let mut history = Self::new(inventory.begun_ns);
        history.committed(manifest, inventory);
        history
    }

    /// From now on, [`Self::touch`] is told what the job writes, if `is_tracked`.
    pub fn track(&mut self, is_tracked: bool) {
        self.is_tracked = is_tracked;
        self.touched = is_tracked.then(BTreeSet::new);
    }

    /// Whether the init watches the job's files.
    #[must_use]
    pub fn is_tracked(&self) -> bool {
        self.is_tracked
    }

    /// Adds what the job has written; `None` if that is not known.
    pub fn touch(&mut self, paths: Option<Vec<String>>) {
        match (&mut self.touched, paths) {
            (Some(touched), Some(paths)) => touched.extend(paths),
            _ => self.touched = None,
        }
    }

    /// Records that a snapshot was committed.
    pub fn committed(&mut self, manifest: &Manifest, inventory: Inventory) {
        let files: BTreeMap<&str, _> =
            manifest.files.iter().map(|file| (file.path.as_str(), &file.chunks)).collect();
        let known = inventory.entries.into_iter().map(|(path, entry)| {
            let data = entry.copies().and_then(|copies| copies.data.as_ref());
            let mut end = 0;
            let chunks = data.and_then(|data| files.get(data.as_str())).into_iter().copied().flatten();
            let chunks = chunks.map(|chunk| {
                end += u64::from(chunk.bytes);
                (end, chunk.id)
            });
            let chunks = chunks.collect();
            (path, Known { entry, chunks })
        });
        self.known = known.collect();
        self.recorded_ns = inventory.recorded_ns;
        self.track(self.is_tracked);
        self.hashes.retain(|path, _| self.known.contains_key(path));
    }

    /// Reports each file that a resume could not put back, once.
    pub fn report_uncovered(&mut self, uncovered: &BTreeMap<String, String>) {
        for (path, reason) in uncovered {
            if self.reported.insert(path.clone()) {
                tracing::warn!(
                    "{}: if the job changes it after the snapshot, a resume is refused: {reason}",
                    shown(path)
                );
            }
        }
    }

    /// The checksum of the first `identity.bytes` bytes of a file. Bytes that an earlier call has read are not read
    /// again, so that a change of them is not noticed here: a resume finds the wrong checksum and refuses. `None` if more
    /// than `limit_bytes` would have to be read; the next call continues.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn prefix(
        &mut self,
        path: &str,
        file: &mut File,
        identity: &Identity,
        limit_bytes: u64,
    ) -> io::Result<Option<Prefix>> {
        let continues =
            |hash: &RunningHash| hash.identity.is_same_inode(identity) && hash.bytes <= identity.bytes;
        let mut hash = self.hashes.remove(path).filter(continues).unwrap_or_else(|| RunningHash {
            identity: *identity,
            bytes: 0,
            hasher: blake3::Hasher::new(),
        });
        file.seek(SeekFrom::Start(hash.bytes))?;
        let wanted = (identity.bytes - hash.bytes).min(limit_bytes);
        let added = io::copy(&mut Read::take(&mut *file, wanted), &mut hash.hasher)?;
        hash.bytes += added;
        let is_whole = hash.bytes == identity.bytes;
        let prefix = is_whole
            .then(|| Prefix { blake3: Some(hash.hasher.finalize().to_hex().to_string()), is_whole: true });
        self.hashes.insert(path.to_owned(), hash);
        Ok(prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_growing_file_is_hashed_in_parts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, "abcdef").unwrap();
        let mut history = FileHistory::new(0);
        let mut prefix = |limit: u64| {
            let mut file = File::open(&path).unwrap();
            let identity = Identity::of(&file.metadata().unwrap());
            history.prefix("log", &mut file, &identity, limit).unwrap()
        };
        assert_eq!(prefix(4), None);
        let whole = Some(blake3::hash(b"abcdef").to_hex().to_string());
        assert_eq!(prefix(4).unwrap().blake3, whole);
        File::options().append(true).open(&path).unwrap().write_all(b"g").unwrap();
        assert_eq!(prefix(1).unwrap().blake3, Some(blake3::hash(b"abcdefg").to_hex().to_string()));
        std::fs::write(&path, "xyz").unwrap();
        assert_eq!(prefix(8).unwrap().blake3, Some(blake3::hash(b"xyz").to_hex().to_string()), "shorter");
    }
}
