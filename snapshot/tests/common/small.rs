//! Snapshots of small chunks, so that much happens in little time.

use super::{manifest, path};
use ckpt_snapshot::medium::Medium;
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::*;
use std::io;
use std::sync::Arc;

/// Length of each chunk.
pub const PART_BYTES: usize = 1000;

/// Content in chunks of [`PART_BYTES`].
pub struct Parts<'a>(pub &'a [u8]);

impl Source for Parts<'_> {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, into)
    }

    fn chunk_end(&self, offset: u64) -> u64 {
        (offset + PART_BYTES as u64).min(self.bytes())
    }
}

/// A store that works with so many threads: each writes a pack of its own.
pub fn store_with(medium: impl Medium + 'static, workers: usize) -> PackStore {
    let limits = Limits { workers, loaders: workers, ..Limits::default() };
    PackStore::new(Arc::new(medium), codec::Codec::default(), limits)
}

pub fn store(medium: impl Medium + 'static) -> PackStore {
    store_with(medium, 1)
}

/// Content of which each of `parts` is one chunk; equal numbers, equal chunks.
pub fn content(parts: &[u64]) -> Vec<u8> {
    parts.iter().flat_map(|&part| super::noise(part, PART_BYTES)).collect()
}

/// The name of the one data file.
pub fn file() -> RelPath {
    path("images/pages-1.img")
}

/// Saves the snapshot number `sequence` with these chunks.
pub fn save(store: &dyn Store, sequence: u64, parts: &[u64]) -> Result<Manifest, SaveError> {
    let (manifest, content) = (manifest(sequence), content(parts));
    let mut writer = store.begin(&manifest.id, content.len() as u64)?;
    writer.put(&[Input { path: file(), from: &Parts(&content) }], &|_| {})?;
    writer.commit(manifest)
}

/// Whether the snapshot is there and holds these chunks.
pub fn holds(store: &dyn Store, sequence: u64, parts: &[u64]) -> Result<(), String> {
    let read = store.manifest(&manifest(sequence).id).and_then(|found| store.read(&found, &file()));
    match read {
        Ok(read) if read == content(parts) => Ok(()),
        Ok(read) => Err(format!("{sequence} has other content, {} bytes", read.len())),
        Err(error) => Err(format!("{sequence}: {error}")),
    }
}
