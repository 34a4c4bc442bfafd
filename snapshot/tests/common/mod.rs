//! What tests of stores share.

#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod memory;
pub mod small;

use ckpt_snapshot::medium::DirMedium;
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::*;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// A manifest without data files.
pub fn manifest(sequence: u64) -> Manifest {
    let job = JobIdentity { key: "job".into(), cwd: "/".into(), argv: vec!["true".into()] };
    Manifest {
        ckpt_run_version: "0".into(),
        criu_version: "4.1.1".into(),
        ..Manifest::new(SnapshotId::new(sequence, SystemTime::UNIX_EPOCH), job)
    }
}

/// A packed store in `dir`.
pub fn packed(dir: &Path) -> PackStore {
    packed_with(dir, codec::Codec::default())
}

/// A packed store in `dir` with a codec of its own.
pub fn packed_with(dir: &Path, codec: codec::Codec) -> PackStore {
    PackStore::new(Arc::new(DirMedium::new(dir.to_owned())), codec, Limits::default())
}

/// Random bytes, different for each seed.
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    fastrand::Rng::with_seed(seed).fill(&mut out);
    out
}

pub fn path(text: &str) -> RelPath {
    RelPath::new(text).unwrap()
}

/// Saves `files` as the snapshot number `sequence`.
pub fn save(store: &dyn Store, sequence: u64, files: &[(&str, &[u8])]) -> Result<Manifest, SaveError> {
    let manifest = manifest(sequence);
    let bytes = files.iter().map(|(_, content)| content.len() as u64).sum();
    let mut writer = store.begin(&manifest.id, bytes)?;
    let inputs: Vec<_> =
        files.iter().map(|(name, content)| Input { path: path(name), from: content }).collect();
    writer.put(&inputs, &|_| {})?;
    writer.commit(manifest)
}

/// Whether `files` is what the snapshot holds.
pub fn assert_holds(store: &dyn Store, manifest: &Manifest, files: &[(&str, &[u8])]) {
    for (name, content) in files {
        let read = store.read(manifest, &path(name)).unwrap();
        assert!(read == *content, "{name} of {}: {} bytes for {}", manifest.id, read.len(), content.len());
    }
    assert_eq!(manifest.files.len(), files.len());
}

/// Lengths of all files below `dir` whose name ends in `suffix`, added up.
pub fn bytes_of(dir: &Path, suffix: &str) -> io::Result<u64> {
    let mut total = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            total += bytes_of(&entry.path(), suffix)?;
        } else if entry.file_name().to_string_lossy().ends_with(suffix) {
            total += entry.metadata()?.len();
        }
    }
    Ok(total)
}
