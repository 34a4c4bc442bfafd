//! The packed store as its users see it: what is stored once, what is found damaged, what an interruption leaves.

mod common;

use ckpt_snapshot::chunk::{CHUNK_BYTES, ChunkId};
use ckpt_snapshot::codec::{Codec, Compression};
use ckpt_snapshot::medium::DirMedium;
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::*;
use common::{assert_holds, bytes_of, manifest, noise, packed, packed_with, path, save};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

#[test]
fn a_committed_snapshot_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let (large, small) = (noise(1, 3 * CHUNK_BYTES + 12_345), noise(2, 100));
    let zeroes = vec![0; CHUNK_BYTES + 7];
    let files: &[(&str, &[u8])] = &[
        ("images/pages-1.img", &large),
        ("images/core-1.img", &small),
        ("images/empty.img", b""),
        ("shm/0", &zeroes),
    ];
    let saved = save(&packed(dir.path()), 1, files).unwrap();

    // Another process.
    let store = packed(dir.path());
    let listed = store.list().unwrap();
    assert_eq!(listed.len(), 1);
    let read = listed.into_iter().next().unwrap().manifest.unwrap();
    assert_eq!(read, saved);
    assert_holds(&store, &read, files);
    let verified = AtomicU64::new(0);
    store.verify(&read, &|bytes| _ = verified.fetch_add(bytes, Ordering::Relaxed)).unwrap();
    assert_eq!(verified.into_inner(), read.data_bytes());
    assert!(bytes_of(dir.path(), ".pack").unwrap() < large.len() as u64 + 100_000, "zeroes are not stored");
}

#[test]
fn what_is_there_is_not_stored_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path());
    let mut content = noise(1, 8 * CHUNK_BYTES);
    save(&store, 1, &[("gpu/1.mem", &content), ("gpu/2.mem", &content)]).unwrap();
    let first_bytes = bytes_of(dir.path(), ".pack").unwrap();
    assert!(first_bytes < content.len() as u64 + 100_000, "ranks that hold the same: {first_bytes}");

    content[5 * CHUNK_BYTES + 17] ^= 1;
    let saved = save(&packed(dir.path()), 2, &[("gpu/1.mem", &content)]).unwrap();
    let more_bytes = bytes_of(dir.path(), ".pack").unwrap() - first_bytes;
    assert!(more_bytes < CHUNK_BYTES as u64 + 100_000, "one chunk has changed: {more_bytes}");
    assert_eq!(saved.stored_bytes, Some(CHUNK_BYTES as u64));
    assert_eq!(saved.changed_bytes, Some(CHUNK_BYTES as u64));
    assert_holds(&packed(dir.path()), &saved, &[("gpu/1.mem", &content)]);
}

#[test]
fn what_has_changed_is_counted_before_compression() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed_with(dir.path(), Codec::new(Compression::Zstd { level: 1 }, None));
    let content: Vec<u8> = (0..4 * CHUNK_BYTES).map(|at| (1 + at / CHUNK_BYTES) as u8).collect();
    let first = save(&store, 1, &[("images/pages-1.img", &content)]).unwrap();
    assert_eq!(first.changed_bytes, Some(content.len() as u64));
    assert!(first.stored_bytes.unwrap() < content.len() as u64 / 10, "{first:?}");
    let again = save(&store, 2, &[("images/pages-1.img", &content)]).unwrap();
    assert_eq!((again.changed_bytes, again.stored_bytes), (Some(0), Some(0)));
}

/// A dump that is tried again stores its device memory again.
#[test]
fn a_file_that_is_stored_again_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path());
    let mut writer = store.begin(&manifest(1).id, 100).unwrap();
    let contents = [noise(1, 2 * CHUNK_BYTES), noise(2, CHUNK_BYTES + 5)];
    for content in &contents {
        writer.put(&[Input { path: path("gpu/1.mem"), from: content }], &|_| {}).unwrap();
    }
    writer.put(&[Input { path: path("gpu/2.mem"), from: &contents[0] }], &|_| {}).unwrap();
    let saved = writer.commit(manifest(1)).unwrap();
    assert_holds(&packed(dir.path()), &saved, &[("gpu/1.mem", &contents[1]), ("gpu/2.mem", &contents[0])]);
    assert_eq!(saved.files.len(), 2);
}

/// Content of which some is known, and what was read of it all the same.
struct Claims<'a> {
    content: &'a [u8],
    known: Vec<(Range<u64>, ChunkId)>,
    read: Mutex<Vec<Range<u64>>>,
}

impl<'a> Claims<'a> {
    fn new(content: &'a [u8], known: Vec<(Range<u64>, ChunkId)>) -> Self {
        Self { content, known, read: Mutex::default() }
    }

    /// Saves it as `gpu/1.mem`; returns where it was read, in order.
    fn save(&self, store: &dyn Store, sequence: u64) -> (Manifest, Vec<Range<u64>>) {
        let mut writer = store.begin(&manifest(sequence).id, 100).unwrap();
        writer.put(&[Input { path: path("gpu/1.mem"), from: self }], &|_| {}).unwrap();
        let saved = writer.commit(manifest(sequence)).unwrap();
        assert_holds(store, &saved, &[("gpu/1.mem", self.content)]);
        let mut read = self.read.lock().unwrap().clone();
        read.sort_by_key(|range| range.start);
        (saved, read)
    }
}

impl Source for Claims<'_> {
    fn bytes(&self) -> u64 {
        self.content.len() as u64
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.read.lock().unwrap().push(offset..offset + into.len() as u64);
        self.content.read_at(offset, into)
    }

    fn known(&self, range: Range<u64>) -> Option<ChunkId> {
        self.known.iter().find(|(known, _)| *known == range).map(|(_, id)| *id)
    }
}

/// The range of the chunk with this number.
fn nth(number: usize) -> Range<u64> {
    (number * CHUNK_BYTES) as u64..((number + 1) * CHUNK_BYTES) as u64
}

#[test]
fn known_chunks_are_not_read_if_they_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path());
    let content = noise(1, 4 * CHUNK_BYTES);
    let first = save(&store, 1, &[("gpu/1.mem", &content)]).unwrap();
    let known: Vec<_> = [1, 3].map(|number| (nth(number), first.files[0].chunks[number].id)).into();
    let (second, read) = Claims::new(&content, known.clone()).save(&store, 2);
    assert_eq!((second.files, second.stored_bytes), (first.files, Some(0)));
    assert_eq!(read, [nth(0), nth(2)]);
    // In a store that does not have them, they have to be read.
    let other = tempfile::tempdir().unwrap();
    let (_, read) = Claims::new(&content, known).save(&packed(other.path()), 2);
    assert_eq!(read, [0, 1, 2, 3].map(nth));
}

/// A chunk that is there, and cannot be what lies at the range.
#[test]
fn a_known_chunk_has_to_be_as_long_as_its_range() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path());
    let content = noise(1, CHUNK_BYTES + 1000);
    let first = save(&store, 1, &[("gpu/1.mem", &content)]).unwrap();
    let ranges = [nth(0), CHUNK_BYTES as u64..content.len() as u64];
    let [long, short] = [0, 1].map(|number| first.files[0].chunks[number].id);
    let claim = |ids: [ChunkId; 2]| Claims::new(&content, ranges.clone().into_iter().zip(ids).collect());
    assert_eq!(claim([short, long]).save(&store, 2).1, ranges);
    assert_eq!(claim([long, short]).save(&store, 3).1, []);
}

/// A new snapshot never refers to missing chunks, whatever names a source gives.
#[test]
fn a_known_chunk_that_is_gone_is_stored_anew() {
    let dir = tempfile::tempdir().unwrap();
    let content = noise(1, 2 * CHUNK_BYTES);
    let first = save(&packed(dir.path()), 1, &[("gpu/1.mem", &content)]).unwrap();
    for entry in fs::read_dir(dir.path().join("packs")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|kind| kind == "pack") {
            fs::remove_file(path).unwrap();
        }
    }
    let known = [0, 1].map(|number| (nth(number), first.files[0].chunks[number].id)).into();
    let (second, read) = Claims::new(&content, known).save(&packed(dir.path()), 2);
    assert_eq!((second.stored_bytes, read), (Some(content.len() as u64), [0, 1].map(nth).into()));
}

#[test]
fn a_manifest_that_is_too_long_to_read_is_not_committed() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path());
    let content = noise(1, 1000);
    let mut writer = store.begin(&manifest(1).id, 100).unwrap();
    writer.put(&[Input { path: path("gpu/1.mem"), from: &content }], &|_| {}).unwrap();
    let mut long = manifest(1);
    long.job.argv = vec!["x".repeat(64 << 20)];
    let error = writer.commit(long).unwrap_err();
    assert!(error.to_string().contains("ckpt-run reads 67108864"), "{error}");
    assert!(store.list().unwrap().is_empty());
    assert_eq!(bytes_of(dir.path(), "").unwrap(), 0, "nothing is left of it");
    save(&store, 1, &[("gpu/1.mem", &content)]).unwrap();
}

#[test]
fn chunks_end_where_the_source_says() {
    struct Odd(Vec<u8>);
    impl Source for Odd {
        fn bytes(&self) -> u64 {
            self.0.len() as u64
        }
        fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
            self.0.as_slice().read_at(offset, into)
        }
        fn chunk_end(&self, offset: u64) -> u64 {
            (offset + 70_001).min(self.bytes())
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path());
    let odd = Odd(noise(3, 20 << 20));
    let mut writer = store.begin(&manifest(1).id, 100).unwrap();
    writer.put(&[Input { path: path("a"), from: &odd }], &|_| {}).unwrap();
    let saved = writer.commit(manifest(1)).unwrap();
    assert_eq!(saved.files[0].chunks.len(), (20_usize << 20).div_ceil(70_001));
    assert_holds(&packed(dir.path()), &saved, &[("a", &odd.0)]);
}

#[test]
fn what_is_not_committed_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path());
    let content = noise(1, CHUNK_BYTES);
    let first = save(&store, 1, &[("a", &content)]).unwrap();
    let packs_bytes = bytes_of(dir.path(), "").unwrap();
    let mut writer = store.begin(&manifest(2).id, 100).unwrap();
    let other = noise(2, CHUNK_BYTES);
    writer.put(&[Input { path: path("a"), from: &other.as_slice() }], &|_| {}).unwrap();
    drop(writer);
    assert_eq!(bytes_of(dir.path(), "").unwrap(), packs_bytes);
    assert!(matches!(store.manifest(&manifest(2).id), Err(ReadError::Missing(_))));
    // What the one that was given up had claimed is stored by the next.
    let third = save(&store, 3, &[("a", &other)]).unwrap();
    assert_holds(&packed(dir.path()), &third, &[("a", &other)]);
    assert_holds(&store, &first, &[("a", &content)]);
}

#[test]
fn a_source_that_fails_ends_the_save_only() {
    struct Fails;
    impl Source for Fails {
        fn bytes(&self) -> u64 {
            10 << 20
        }
        fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
            into.fill(1);
            if offset > 0 { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path());
    let mut writer = store.begin(&manifest(1).id, 100).unwrap();
    let put = writer.put(&[Input { path: path("a"), from: &Fails }], &|_| {});
    assert!(matches!(&put, Err(SaveError::Source { path, .. }) if path == "a"), "{put:?}");
    drop(writer);
    assert!(store.list().unwrap().is_empty());
    save(&store, 2, &[("a", b"x")]).unwrap();
}

#[test]
fn of_two_who_commit_one_name_one_wins() {
    let dir = tempfile::tempdir().unwrap();
    let first = save(&packed(dir.path()), 1, &[("a", b"first")]).unwrap();
    let second = save(&packed(dir.path()), 1, &[("a", b"second")]);
    assert!(matches!(second, Err(SaveError::Taken(_))), "{second:?}");
    let store = packed(dir.path());
    assert_holds(&store, &first, &[("a", b"first")]);
    assert_eq!(fs::read_dir(dir.path().join("packs")).unwrap().count(), 2, "the loser leaves nothing");
}

#[test]
fn a_chunk_that_lies_twice_is_read_where_it_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let content = noise(1, 2 * CHUNK_BYTES);
    // Neither knows of the other.
    let (one, two) = (packed(dir.path()), packed(dir.path()));
    one.list().unwrap();
    let begun = two.begin(&manifest(2).id, 100).unwrap();
    let saved = save(&one, 1, &[("a", &content)]).unwrap();
    let mut begun = begun;
    begun.put(&[Input { path: path("a"), from: &content.as_slice() }], &|_| {}).unwrap();
    begun.commit(manifest(2)).unwrap();
    let packs: Vec<_> = fs::read_dir(dir.path().join("packs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|kind| kind == "pack"))
        .collect();
    assert!(packs.len() >= 2);
    for damaged in &packs {
        let whole = fs::read(damaged).unwrap();
        let mut altered = whole.clone();
        altered[1 << 20] ^= 1;
        fs::write(damaged, altered).unwrap();
        let store = packed(dir.path());
        assert_holds(&store, &saved, &[("a", &content)]);
        fs::write(damaged, whole).unwrap();
    }
}

#[test]
fn a_damaged_chunk_is_found_and_stored_anew() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path());
    let content = noise(1, CHUNK_BYTES);
    let first = save(&store, 1, &[("a", &content)]).unwrap();
    let pack = fs::read_dir(dir.path().join("packs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|kind| kind == "pack"))
        .unwrap();
    let mut altered = fs::read(&pack).unwrap();
    altered[1 << 20] ^= 1;
    fs::write(&pack, altered).unwrap();
    let verified = store.verify(&first, &|_| {});
    let is_found =
        matches!(&verified, Err(ReadError::Damaged { damage: Damage::Checksum { path }, .. }) if path == "a");
    assert!(is_found, "{verified:?}");
    let second = save(&store, 2, &[("a", &content)]).unwrap();
    store.verify(&second, &|_| {}).unwrap();
    store.verify(&first, &|_| {}).unwrap();
}

#[test]
fn what_another_process_has_moved_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let content = noise(1, CHUNK_BYTES);
    let saved = save(&packed(dir.path()), 1, &[("a", &content)]).unwrap();
    let store = packed(dir.path());
    store.verify(&saved, &|_| {}).unwrap();
    let packs = dir.path().join("packs");
    fs::rename(&packs, dir.path().join("old")).unwrap();
    let again = save(&packed(dir.path()), 2, &[("a", &content)]).unwrap();
    assert_eq!(again.stored_bytes, Some(CHUNK_BYTES as u64), "it is in a pack of another name now");
    store.verify(&saved, &|_| {}).unwrap();
}

#[test]
fn missing_packs_and_indexes_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let content = noise(1, CHUNK_BYTES);
    let saved = save(&packed(dir.path()), 1, &[("a", &content)]).unwrap();
    for kind in ["pack", "index"] {
        let found = fs::read_dir(dir.path().join("packs")).unwrap().map(|entry| entry.unwrap().path());
        let object = found.into_iter().find(|path| path.extension().is_some_and(|one| one == kind)).unwrap();
        let kept = fs::read(&object).unwrap();
        fs::remove_file(&object).unwrap();
        let verified = packed(dir.path()).verify(&saved, &|_| {});
        assert!(matches!(verified, Err(ReadError::Damaged { .. })), "{kind}: {verified:?}");
        fs::write(&object, &kept[..kept.len() - 1]).unwrap();
        let verified = packed(dir.path()).verify(&saved, &|_| {});
        // The pack has a copy of its index.
        let is_damaged = matches!(verified, Err(ReadError::Damaged { .. }));
        assert_eq!((is_damaged, verified.is_ok()), (kind == "pack", kind == "index"), "{verified:?}");
        fs::write(&object, kept).unwrap();
    }
    packed(dir.path()).verify(&saved, &|_| {}).unwrap();
}

#[test]
fn room_is_checked_ahead_by_what_the_last_one_brought() {
    let dir = tempfile::tempdir().unwrap();
    let store = packed(dir.path());
    let error = store.begin(&manifest(1).id, 1 << 60).err().unwrap();
    assert!(matches!(error, SaveError::NoSpace { .. }), "{error}");
    assert!(error.to_string().contains("needs at least"), "{error}");
    // A sparse job of which next to nothing has to be stored.
    struct Sparse;
    impl Source for Sparse {
        fn bytes(&self) -> u64 {
            1 << 36
        }
        fn read_at(&self, _offset: u64, _into: &mut [u8]) -> io::Result<()> {
            unreachable!("all of it is known")
        }
        fn known(&self, _range: Range<u64>) -> Option<ChunkId> {
            Some(ChunkId::ZEROES)
        }
    }
    let mut writer = store.begin(&manifest(1).id, 100).unwrap();
    writer.put(&[Input { path: path("a"), from: &Sparse }], &|_| {}).unwrap();
    writer.commit(manifest(1)).unwrap();
    store.begin(&manifest(2).id, 1 << 36).unwrap();
    store.begin(&manifest(2).id, 1 << 60).err().unwrap();
}

/// The store of a directory, with so much free space.
fn with_room(dir: &Path, free_bytes: &Arc<AtomicU64>, limits: Limits) -> PackStore {
    let free_bytes = Arc::clone(free_bytes);
    let medium =
        DirMedium::new(dir.to_path_buf()).with_free_bytes(move || Ok(free_bytes.load(Ordering::Relaxed)));
    PackStore::new(Arc::new(medium), Codec::default(), limits)
}

#[test]
fn a_first_snapshot_does_not_say_what_the_next_one_needs() {
    let dir = tempfile::tempdir().unwrap();
    let free_bytes = Arc::new(AtomicU64::new(1 << 40));
    let mut content = noise(1, 8 * CHUNK_BYTES);
    let store = with_room(dir.path(), &free_bytes, Limits::default());
    save(&store, 1, &[("a", &content)]).unwrap();
    free_bytes.store(2 * CHUNK_BYTES as u64, Ordering::Relaxed);
    content[17] ^= 1;
    let cautious = with_room(dir.path(), &free_bytes, Limits { needs_room: true, ..Limits::default() });
    let refused = save(&cautious, 2, &[("a", &content)]);
    assert!(matches!(refused, Err(SaveError::NoSpace { .. })), "{refused:?}");
    let saved = save(&store, 2, &[("a", &content)]).unwrap();
    assert_eq!(saved.stored_bytes, Some(CHUNK_BYTES as u64));
    // Now it is known what a snapshot adds.
    free_bytes.store(CHUNK_BYTES as u64 / 2, Ordering::Relaxed);
    let id = manifest(3).id;
    assert!(matches!(store.begin(&id, content.len() as u64).err(), Some(SaveError::NoSpace { .. })));
}

/// The file system may be that of the job's own files.
#[test]
fn a_snapshot_ends_before_the_disk_is_full() {
    let dir = tempfile::tempdir().unwrap();
    let free_bytes = Arc::new(AtomicU64::new(1 << 40));
    let store = with_room(dir.path(), &free_bytes, Limits::default());
    let content = noise(1, 16 * CHUNK_BYTES);
    let mut writer = store.begin(&manifest(1).id, content.len() as u64).unwrap();
    free_bytes.store(100, Ordering::Relaxed);
    let failed = writer.put(&[Input { path: path("a"), from: &content }], &|_| {});
    let Err(SaveError::NoSpace { needed_bytes, available_bytes: 100, .. }) = failed else {
        panic!("{failed:?}");
    };
    assert!(needed_bytes > content.len() as u64, "{needed_bytes}");
    drop(writer);
    assert_eq!(bytes_of(dir.path(), ".pack").unwrap(), 0, "what was written is taken back");
}
