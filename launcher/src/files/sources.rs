//! Staged files as sources and targets of the store.

use crate::files::staging::StagedDir;
use ckpt_snapshot::chunk::CHUNK_BYTES;
use ckpt_snapshot::{Source, Target};
use std::io;
use std::os::unix::fs::FileExt;

/// A file in a staging directory. The file is opened for each access, because there may be more files than a process may
/// have open.
pub struct StagedFile<'a> {
    dir: &'a StagedDir,
    name: String,
    bytes: u64,
    /// The ends of its chunks, sorted; empty for chunks of the maximum size.
    ends: Vec<u64>,
}

impl<'a> StagedFile<'a> {
    /// The file `name` in `dir`, which is `bytes` long or will be created.
    #[must_use]
    pub fn new(dir: &'a StagedDir, name: String, bytes: u64) -> Self {
        Self { dir, name, bytes, ends: Vec::new() }
    }

    /// The same file with these chunk ends. Chunks are split at the maximum size.
    #[must_use]
    pub fn with_ends(self, ends: Vec<u64>) -> Self {
        Self { ends, ..self }
    }
}

impl Source for StagedFile<'_> {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.dir.open(&self.name)?.read_exact_at(into, offset)
    }

    fn chunk_end(&self, offset: u64) -> u64 {
        let longest = (offset + CHUNK_BYTES as u64).min(self.bytes);
        let next = self.ends.get(self.ends.partition_point(|&end| end <= offset));
        next.map_or(longest, |&end| end.min(longest))
    }

    /// Frees the file's memory as soon as it is stored.
    fn taken(&self) -> io::Result<()> {
        self.dir.remove(&self.name)
    }
}

impl Target for StagedFile<'_> {
    fn set_bytes(&self, bytes: u64) -> io::Result<()> {
        self.dir.create(&self.name)?.set_len(bytes)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.dir.change(&self.name)?.write_all_at(bytes, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::staging::Staging;

    #[test]
    fn a_staged_file_is_written_read_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let staging = Staging::on_disk(&dir.path().join("staging")).unwrap();
        let staged = staging.subdir("images").unwrap();
        let file = StagedFile::new(&staged, "a.img".into(), 6);
        file.set_bytes(6).unwrap();
        file.write_at(3, b"abc").unwrap();
        let mut content = [1; 5];
        file.read_at(1, &mut content).unwrap();
        assert_eq!(&content, b"\0\0abc");
        assert!(file.read_at(2, &mut content).is_err(), "beyond the end");
        let cut = StagedFile::new(&staged, "a.img".into(), 6).with_ends(vec![2, 5]);
        let ends = [0, 1, 2, 4, 5].map(|offset| cut.chunk_end(offset));
        assert_eq!((ends, file.chunk_end(1)), ([2, 2, 5, 5, 6], 6));
        file.taken().unwrap();
        assert!(staged.files().unwrap().is_empty());
    }
}
