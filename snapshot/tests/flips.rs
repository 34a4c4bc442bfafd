//! Every byte of a small store, altered one at a time, is found. The inside of one chunk, which has to be large to have
//! padding before it, is sampled, unless `CKPT_TEST_ALL_BYTES` is set.

mod common;

use ckpt_snapshot::chunk::CHUNK_BYTES;
use ckpt_snapshot::packed::PackStore;
use ckpt_snapshot::*;
use common::memory::Memory;
use common::small::{content, holds, save, store};
use common::{manifest, noise};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

static GO_ON: AtomicBool = AtomicBool::new(false);

/// Two snapshots, garbage chunks, and a gap before an aligned chunk.
fn small_store() -> Memory {
    let memory = Memory::default();
    let store = store(memory.clone());
    save(&store, 1, &[1, 2, 3]).unwrap();
    save(&store, 2, &[1, 4]).unwrap();
    save(&store, 3, &[5, 6]).unwrap();
    store.remove(&manifest(3).id).unwrap();
    let large = noise(9, 66_000);
    common::save(&store, 4, &[("images/a.img", &content(&[7])), ("images/b.img", &large)]).unwrap();
    memory
}

/// The damage that a scrub of the store finds.
fn amiss(store: &PackStore) -> usize {
    store.scrub(1.0, &|_| {}, &GO_ON).map_or(1, |found| found.damage.len())
}

#[test]
fn every_byte_of_packs_indexes_and_manifests_counts() {
    let memory = small_store();
    assert_eq!(amiss(&store(memory.clone())), 0);
    let packs = memory.names(".pack");
    assert_eq!(packs.len(), 4);
    let gap = |content: &[u8]| content.windows(500).any(|window| window.iter().all(|&byte| byte == 0));
    assert!(memory.objects().values().any(|content| gap(content)), "there is padding");
    let all = std::env::var_os("CKPT_TEST_ALL_BYTES").is_some();
    let mut flipped = 0;
    for (name, content) in memory.objects() {
        // 4096 is where the large chunk begins; its last bytes are tried, too.
        let is_sampled = |position: &usize| !(4200..65_000).contains(position) || position.is_multiple_of(61);
        for position in (0..content.len()).filter(|position| all || is_sampled(position)) {
            let other = memory.fork();
            let mut content = content.to_vec();
            content[position] ^= 1 << (position % 8);
            other.set(&name, content);
            assert_ne!(amiss(&store(other)), 0, "{name}, byte {position}");
            flipped += 1;
        }
    }
    assert!(flipped > 15_000, "{flipped}");
}

#[test]
fn an_altered_byte_is_never_read_as_content() {
    let memory = small_store();
    let held: [(u64, &[u64]); 2] = [(1, &[1, 2, 3]), (2, &[1, 4])];
    for (number, parts) in held {
        holds(&store(memory.clone()), number, parts).unwrap();
    }
    let (mut found, mut tried) = (0, 0);
    for (name, content) in memory.objects() {
        // The pack with the large chunk is for the other test.
        for position in (0..content.len()).filter(|_| content.len() < 60_000) {
            let other = memory.fork();
            other.flip(&name, position);
            for (number, parts) in held {
                tried += 1;
                match holds(&store(other.clone()), number, parts) {
                    Ok(()) => {}
                    Err(error) => {
                        assert!(!error.contains("other content"), "{name}, byte {position}: {error}");
                        found += 1;
                    }
                }
            }
        }
    }
    assert!(found > 4000 && found < tried, "{found} of {tried}");
}

#[test]
fn a_scrub_tells_how_far_it_is() {
    let memory = Memory::default();
    let store = store(memory.clone());
    let large = noise(1, 5 * CHUNK_BYTES + 100);
    common::save(&store, 1, &[("gpu/1.mem", &large), ("images/a.img", &noise(2, 10))]).unwrap();
    let scrubbed_bytes = AtomicU64::new(0);
    let found =
        store.scrub(1.0, &|bytes| _ = scrubbed_bytes.fetch_add(bytes, Ordering::Relaxed), &GO_ON).unwrap();
    assert_eq!((found.packs, found.manifests), (1, 1));
    assert_eq!(scrubbed_bytes.load(Ordering::Relaxed), found.pack_bytes);
    assert_eq!(store.pack_bytes().unwrap(), found.pack_bytes);
    assert!(found.pack_bytes > large.len() as u64);
    let stop = AtomicBool::new(true);
    scrubbed_bytes.store(0, Ordering::Relaxed);
    store.scrub(1.0, &|bytes| _ = scrubbed_bytes.fetch_add(bytes, Ordering::Relaxed), &stop).unwrap();
    assert_eq!(scrubbed_bytes.load(Ordering::Relaxed), 0);
}

/// Each bit of a file, altered by itself, is found by whoever reads it.
fn every_bit_counts(file: &Path, reads: impl Fn() -> bool) {
    let text = std::fs::read(file).unwrap();
    for position in 0..text.len() {
        for bit in 0..8 {
            let mut flipped = text.clone();
            flipped[position] ^= 1 << bit;
            std::fs::write(file, flipped).unwrap();
            assert!(!reads(), "{}: byte {position}, bit {bit}", file.display());
        }
    }
    std::fs::write(file, text).unwrap();
    assert!(reads());
}

#[test]
fn every_bit_of_the_small_records_counts() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let root = StoreRoot::open_or_create(&store).unwrap();
    let job = root.job(&JobKey::named("job").unwrap());
    job.change_marks(|marks| marks.tag(&manifest(1).id, "best").unwrap()).unwrap();
    every_bit_counts(&job.path().join("marks/1.json"), || job.marks().is_ok());
    assert!(job.marks().unwrap().is_kept(&manifest(1).id));
    let record = JobRecord {
        version: 1,
        cwd: "/work".to_owned(),
        argv: vec!["true".to_owned()],
        run: 3,
        last_sequence: 41,
        sequence_before_run: 12,
        abandoned: vec![(20, 30)],
        deleted: vec![7],
        resumed_from: Some("000021-20261121T114512Z".parse().unwrap()),
        claims: 1,
        claimed_at_sequence: 0,
        launcher: "0123@node".into(),
        outcome: JobOutcome::Unfinished,
        is_removed: false,
    };
    job.set_record(&record).unwrap();
    every_bit_counts(&job.path().join("job/1.json"), || job.record().is_ok());
    assert_eq!(job.record().unwrap(), Some(record));
    let layout = store.join("store.json");
    // The digit 3 differs in one bit from 1 and from 2. What a store has is read whichever of them it is.
    let is_older = || {
        [":1}", ":2}"]
            .iter()
            .any(|end| std::fs::read_to_string(&layout).is_ok_and(|text| text.ends_with(end)))
    };
    every_bit_counts(&layout, || StoreRoot::open(&store).is_ok() && !is_older());
}
