//! One step of `cargo xtask bench store`, in a process of its own, so that time and memory are its own:
//! `save DIR SEQUENCE MIB CHANGED_PERCENT [SINCE]`, `load DIR SEQUENCE`, `verify DIR SEQUENCE`, `scrub DIR`,
//! `linear DIR GIB`. Prints one JSON object. With SINCE, the store is told what is as in that snapshot, as it is of a
//! mirror of device memory.

use ckpt_snapshot::chunk::{CHUNK_BYTES, ChunkId};
use ckpt_snapshot::codec::Codec;
use ckpt_snapshot::medium::DirMedium;
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::*;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Instant, SystemTime};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| -> u64 { words[at].parse().expect("a number") };
    let dir = PathBuf::from(&words[1]);
    let store = PackStore::new(Arc::new(DirMedium::new(dir.clone())), Codec::default(), Limits::default());
    let result = match words[0].as_str() {
        "save" => {
            let since = words.get(5).map(|text| text.parse().expect("a number"));
            save(&store, number(2), number(3) << 20, number(4), since)
        }
        "load" => load(&store, number(2)),
        "verify" => {
            let manifest = store.manifest(&manifest(number(2)).id).expect("the manifest reads");
            measured(|| store.verify(&manifest, &|_| {}).expect("it is whole"))
        }
        "scrub" => measured(|| {
            let found = store.scrub(1.0, &|_| {}, &AtomicBool::new(false)).expect("the store reads");
            assert!(found.damage.is_empty(), "{:?}", found.damage);
        }),
        "linear" => linear(&store, &dir, number(2) << 30),
        other => panic!("{other} is no step"),
    };
    println!("{result}");
}

/// Runs `work`; tells its seconds, CPU seconds, and the most memory that the process had more than before.
fn measured(work: impl FnOnce()) -> Value {
    let cpu_s = || {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
    };
    // 5: the highest resident size starts again from the present one.
    std::fs::write("/proc/self/clear_refs", "5").expect("/proc/self/clear_refs");
    let (before_bytes, begun, begun_cpu_s) = (resident_bytes("VmRSS:"), Instant::now(), cpu_s());
    work();
    let (seconds, cpu_s) = (begun.elapsed().as_secs_f64(), cpu_s() - begun_cpu_s);
    let peak_bytes = resident_bytes("VmHWM:").saturating_sub(before_bytes);
    json!({ "seconds": seconds, "cpu_s": cpu_s, "peak_bytes": peak_bytes })
}

fn resident_bytes(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc/self/status");
    let line = status.lines().find(|line| line.starts_with(field)).expect("the field");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") << 10
}

fn manifest(sequence: u64) -> Manifest {
    let job = JobIdentity { key: "bench".into(), cwd: "/".into(), argv: vec!["true".into()] };
    Manifest {
        ckpt_run_version: env!("CARGO_PKG_VERSION").into(),
        ..Manifest::new(SnapshotId::new(sequence, SystemTime::UNIX_EPOCH), job)
    }
}

fn noise(seed: u64, into: &mut [u8]) {
    fastrand::Rng::with_seed(seed).fill(into);
}

/// Saves a snapshot, of which so many bytes are new.
fn put(store: &PackStore, sequence: u64, from: &dyn Source, new_bytes: u64) -> Manifest {
    let mut writer = store.begin(&manifest(sequence).id, new_bytes).expect("a snapshot begins");
    let path = RelPath::new("gpu/1.mem").expect("a path");
    writer.put(&[Input { path, from }], &|_| {}).expect("it is stored");
    writer.commit(manifest(sequence)).expect("it is committed")
}

/// Content of which some chunks are known.
struct Told {
    content: Vec<u8>,
    known: Vec<Option<ChunkId>>,
}

impl Source for Told {
    fn bytes(&self) -> u64 {
        self.content.len() as u64
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.content.read_at(offset, into)
    }

    fn known(&self, range: Range<u64>) -> Option<ChunkId> {
        let number = usize::try_from(range.start).expect("it fits into memory") / CHUNK_BYTES;
        *self.known.get(number)?
    }
}

/// Saves noise of which so much is not that of every other snapshot, spread evenly. The rest is known if it is that of
/// the snapshot `since`, all of whose chunks are plain noise.
fn save(store: &PackStore, sequence: u64, bytes: u64, changed_percent: u64, since: Option<u64>) -> Value {
    let since = since.map(|since| store.manifest(&manifest(since).id).expect("the manifest reads"));
    let mut content = vec![0; usize::try_from(bytes).expect("it fits into memory")];
    let mut known = Vec::new();
    for (number, part) in content.chunks_mut(CHUNK_BYTES).enumerate() {
        let chunk = number as u64;
        let is_changed = chunk * changed_percent % 100 < changed_percent;
        noise(if is_changed { sequence << 32 | chunk } else { chunk }, part);
        let before = since.as_ref().filter(|_| !is_changed);
        known.push(before.map(|manifest| manifest.files[0].chunks[number].id));
    }
    let from = Told { content, known };
    let mut stored_bytes = None;
    let mut result = measured(|| stored_bytes = put(store, sequence, &from, bytes).stored_bytes);
    result["stored_bytes"] = json!(stored_bytes);
    result
}

/// Memory that is there before it is wanted, as the launcher's mirrors are.
struct Memory(std::sync::Mutex<Vec<u8>>);

impl Target for Memory {
    fn set_bytes(&self, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        let mut memory = self.0.lock().map_err(|_| io::Error::other("poisoned"))?;
        memory[offset..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

fn load(store: &PackStore, sequence: u64) -> Value {
    let manifest = store.manifest(&manifest(sequence).id).expect("the manifest reads");
    let memory = Memory(vec![1; usize::try_from(manifest.data_bytes()).expect("it fits")].into());
    let wanted = [Load { path: &manifest.files[0].path, into: &memory }];
    measured(|| store.load(&manifest, &wanted, &|_| {}).expect("it loads"))
}

/// Content that is made as it is read: so many different chunks, again and again.
struct Generated {
    bytes: u64,
    chunk_bytes: u64,
    distinct: u64,
}

impl Source for Generated {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        into.fill(0x5a);
        into[..8].copy_from_slice(&(offset / self.chunk_bytes % self.distinct).to_le_bytes());
        Ok(())
    }

    fn chunk_end(&self, offset: u64) -> u64 {
        (offset + self.chunk_bytes).min(self.bytes)
    }
}

/// A snapshot of `bytes`, twice: with 64 different chunks, all of which are read and hashed; and with all chunks
/// different but of 4 KiB each, since no disk here holds more: that gives the index the length that it would have.
fn linear(store: &PackStore, dir: &Path, bytes: u64) -> Value {
    let chunk_bytes = CHUNK_BYTES as u64;
    let chunks = bytes / chunk_bytes;
    let lengths = |name: &str| -> u64 {
        let entries = std::fs::read_dir(dir.join(name)).expect("a directory");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        let wanted = paths.filter(|path| path.extension().is_none_or(|kind| kind != "pack"));
        wanted.map(|path| path.metadata().expect("its length").len()).sum()
    };
    let same = Generated { bytes, chunk_bytes, distinct: 64 };
    let mut result = measured(|| _ = put(store, 1, &same, 64 * chunk_bytes));
    result["manifest_bytes"] = json!(lengths("manifests"));
    let all = Generated { bytes: chunks * 4096, chunk_bytes: 4096, distinct: u64::MAX };
    result["small_chunks"] = measured(|| _ = put(store, 2, &all, all.bytes));
    result["index_bytes"] = json!(lengths("packs"));
    result["chunks"] = json!(chunks);
    result
}
