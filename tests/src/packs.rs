//! Locations of chunks and objects in the packed store of a job.

use crate::Sandbox;
use ckpt_snapshot::chunk::ChunkId;
use ckpt_snapshot::codec::Codec;
use ckpt_snapshot::medium::DirMedium;
use ckpt_snapshot::pack::{Entry, Index, PackId};
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::{Manifest, SnapshotId, Store};
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Location of a chunk.
#[derive(Debug, Clone)]
pub struct ChunkLocation {
    /// The file of the pack.
    pub pack: PathBuf,
    /// Offset in that file.
    pub offset: usize,
    /// Length in the file.
    pub bytes: usize,
}

fn store(job: &Path) -> PackStore {
    PackStore::new(Arc::new(DirMedium::new(job.to_owned())), Codec::default(), Limits::default())
}

/// The manifest of a snapshot, as a file.
///
/// # Panics
/// When there is no job.
#[must_use]
pub fn manifest_file(sandbox: &Sandbox, id: &str) -> PathBuf {
    sandbox.job_dir().join("manifests").join(id)
}

/// All objects of the job's store, by name: packs, indexes, manifests.
///
/// # Panics
/// When there is no job.
#[must_use]
pub fn objects(sandbox: &Sandbox) -> Vec<PathBuf> {
    let below = |dir: &str| fs::read_dir(sandbox.job_dir().join(dir)).expect("a directory of the store");
    let entries = below("packs").chain(below("manifests"));
    let mut all: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    all.sort();
    all
}

/// Locations of those chunks of a data file of a snapshot that no other snapshot shares.
///
/// # Panics
/// When the store is unreadable, or there is no such chunk.
#[must_use]
pub fn unique_chunks(sandbox: &Sandbox, id: &str, path: &str) -> Vec<ChunkLocation> {
    let job = sandbox.job_dir();
    let id: SnapshotId = id.parse().expect("an ID");
    let mut own = HashSet::new();
    let mut others = HashSet::new();
    for listed in store(&job).list().expect("a list") {
        let manifest = listed.manifest.expect("a manifest");
        if listed.id == id {
            own.extend(chunks(&manifest, Some(path)));
        } else {
            others.extend(chunks(&manifest, None));
        }
    }
    let all = all_chunks(&job);
    let found = all.into_iter().filter(|(entry, _)| own.contains(&entry.id) && !others.contains(&entry.id));
    let found: Vec<_> = found.map(|(_, location)| location).collect();
    assert!(!found.is_empty(), "{path} of {id} is the same in another snapshot");
    found
}

fn chunks(manifest: &Manifest, path: Option<&str>) -> Vec<ChunkId> {
    let wanted = manifest.files.iter().filter(|file| path.is_none_or(|path| file.path.as_str() == path));
    wanted.flat_map(|file| file.chunks.iter().map(|chunk| chunk.id)).collect()
}

fn all_chunks(job: &Path) -> Vec<(Entry, ChunkLocation)> {
    let mut found = Vec::new();
    for file in fs::read_dir(job.join("packs")).expect("packs") {
        let file = file.expect("an entry").path();
        if file.extension().is_none_or(|extension| extension != "index") {
            continue;
        }
        for entry in index(&file, &Codec::default()).entries {
            let offset = usize::try_from(entry.offset).expect("it fits");
            let location = ChunkLocation {
                pack: file.with_extension("pack"),
                offset,
                bytes: entry.stored_bytes as usize,
            };
            found.push((entry, location));
        }
    }
    found
}

/// The index of a pack, from its file.
///
/// # Panics
/// When it cannot be read.
#[must_use]
pub fn index(file: &Path, codec: &Codec) -> Index {
    let name = file.file_stem().and_then(|name| name.to_str()).expect("a name");
    let mut pack = PackId([0; 16]);
    for (byte, digits) in pack.0.iter_mut().zip(name.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).expect("digits");
        *byte = u8::from_str_radix(digits, 16).expect("digits");
    }
    Index::decode(&pack, &fs::read(file).expect("an index"), codec).expect("an index")
}
