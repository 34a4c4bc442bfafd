//! Staged files as sources and targets of the store.

use crate::files::saved::next_data;
use crate::files::staging::StagedDir;
use ckpt_snapshot::chunk::{CHUNK_BYTES, ChunkId};
use ckpt_snapshot::{Source, Target};
use std::fs::File;
use std::io;
use std::ops::Range;
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
        chunk_end(&self.ends, offset, self.bytes)
    }

    /// Holes need not be read.
    fn known(&self, range: Range<u64>) -> Option<ChunkId> {
        let file = self.ends.is_empty().then(|| self.dir.open(&self.name).ok())??;
        if file.metadata().ok()?.len() < range.end {
            return None;
        }
        let data = next_data(&file, range.start, range.end).ok()?;
        data.is_none().then_some(ChunkId::ZEROES)
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

/// A part of a staged file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagedPart {
    /// Which of the files.
    pub file: usize,
    /// Where it begins in the file.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// Parts of several staged files, one after the other.
pub struct StagedParts<'a> {
    /// The files, by directory and name.
    files: Vec<(&'a StagedDir, &'a str)>,
    /// With the positions at which they end.
    parts: Vec<(u64, StagedPart)>,
    ends: Vec<u64>,
}

impl<'a> StagedParts<'a> {
    /// `parts` of `files`, with these chunk ends. Chunks are split at the maximum size.
    #[must_use]
    pub fn new(
        files: Vec<(&'a StagedDir, &'a str)>,
        parts: impl Iterator<Item = StagedPart>,
        ends: Vec<u64>,
    ) -> Self {
        let parts = parts.scan(0, |end, part| {
            *end += part.bytes;
            Some((*end, part))
        });
        Self { files, parts: parts.collect(), ends }
    }
}

impl Source for StagedParts<'_> {
    fn bytes(&self) -> u64 {
        self.parts.last().map_or(0, |(end, _)| *end)
    }

    fn read_at(&self, mut offset: u64, mut into: &mut [u8]) -> io::Result<()> {
        let mut opened: Vec<Option<File>> = self.files.iter().map(|_| None).collect();
        let first = self.parts.partition_point(|(end, _)| *end <= offset);
        for (end, part) in &self.parts[first..] {
            let length = usize::try_from(end - offset).map_err(io::Error::other)?.min(into.len());
            let (read, rest) = into.split_at_mut(length);
            let file = match &mut opened[part.file] {
                Some(file) => file,
                empty => empty.insert(self.files[part.file].0.open(self.files[part.file].1)?),
            };
            file.read_exact_at(read, part.offset + part.bytes - (end - offset))?;
            (offset, into) = (*end, rest);
            if into.is_empty() {
                return Ok(());
            }
        }
        if into.is_empty() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    fn chunk_end(&self, offset: u64) -> u64 {
        chunk_end(&self.ends, offset, self.bytes())
    }

    /// Frees the memory of all files as soon as the parts are stored.
    fn taken(&self) -> io::Result<()> {
        self.files.iter().try_for_each(|(dir, name)| dir.remove(name))
    }
}

/// The end of the chunk at `offset` of a file with these chunk ends.
fn chunk_end(ends: &[u64], offset: u64, bytes: u64) -> u64 {
    let longest = (offset + CHUNK_BYTES as u64).min(bytes);
    let next = ends.get(ends.partition_point(|&end| end <= offset));
    next.map_or(longest, |&end| end.min(longest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::staging::Staging;

    #[test]
    fn parts_are_read_as_one_file() {
        let dir = tempfile::tempdir().unwrap();
        let staging = Staging::on_disk(&dir.path().join("staging")).unwrap();
        let dirs = ["new", "old"].map(|name| staging.subdir(name).unwrap());
        for (dir, content) in dirs.iter().zip([b"abcdef", b"ABCDEF"]) {
            io::Write::write_all(&mut dir.create("pages").unwrap(), content).unwrap();
        }
        let part = |file, offset, bytes| StagedPart { file, offset, bytes };
        let parts = [part(0, 0, 2), part(1, 3, 3), part(0, 2, 1)];
        let files = vec![(&dirs[0], "pages"), (&dirs[1], "pages")];
        let source = StagedParts::new(files, parts.into_iter(), vec![2, 6]);
        assert_eq!(source.bytes(), 6);
        for (start, end) in (0..=6).flat_map(|start| (start..=6).map(move |end| (start, end))) {
            let mut content = vec![0; end - start];
            source.read_at(start as u64, &mut content).unwrap();
            assert_eq!(content, b"abDEFc"[start..end]);
        }
        assert!(source.read_at(5, &mut [0; 2]).is_err(), "beyond the end");
        assert_eq!([0, 1, 2, 5].map(|offset| source.chunk_end(offset)), [2, 2, 6, 6]);
        source.taken().unwrap();
        assert!(dirs.iter().all(|dir| dir.files().unwrap().is_empty()));
    }

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
        assert_eq!(file.known(0..6), None);
        let sparse = StagedFile::new(&staged, "sparse".into(), 64 << 20);
        sparse.set_bytes(64 << 20).unwrap();
        sparse.write_at(40 << 20, b"abc").unwrap();
        let [hole, data, beyond] = [0..4 << 20, 40 << 20..44 << 20, 63 << 20..65 << 20];
        assert_eq!((sparse.known(hole), sparse.known(data)), (Some(ChunkId::ZEROES), None));
        assert_eq!(sparse.known(beyond), None, "what is not there is no hole");
        sparse.taken().unwrap();
        let cut = StagedFile::new(&staged, "a.img".into(), 6).with_ends(vec![2, 5]);
        let ends = [0, 1, 2, 4, 5].map(|offset| cut.chunk_end(offset));
        assert_eq!((ends, file.chunk_end(1)), ([2, 2, 5, 5, 6], 6));
        file.taken().unwrap();
        assert!(staged.files().unwrap().is_empty());
    }
}
