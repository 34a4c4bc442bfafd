//! The readers of manifests, indexes and chunks: what was written reads back, anything else is an error, and nothing
//! takes more memory than it should.

mod common;
mod entries;

use ckpt_snapshot::chunk::{CHUNK_BYTES, Chunk, ChunkId};
use ckpt_snapshot::codec::{Codec, Compression, Encoding, Packing};
use ckpt_snapshot::pack::{Entry, HEADER_BYTES, Index};
use ckpt_snapshot::*;
use ckpt_test_mutate::mutations;
use entries::{ENTRIES, PACK, encrypting, id};
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::{Path, PathBuf};

/// Counts what a thread has allocated, and the most that it had at a time. (What Zstandard allocates by itself is not
/// in it: that is a context of fixed size for each thread.)
struct Counting;

thread_local! {
    static NOW_BYTES: Cell<isize> = const { Cell::new(0) };
    static PEAK_BYTES: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // The thread may be at its end, when nothing is counted any more.
    let _ = NOW_BYTES.try_with(|now| {
        now.set(now.get() + bytes);
        let _ = PEAK_BYTES.try_with(|peak| peak.set(peak.get().max(now.get())));
    });
}

// SAFETY: all work is the system allocator's; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller keeps to the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: the memory came from `alloc` above, with this layout.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most memory that `work` had allocated at a time (bytes).
fn peak_bytes(work: impl FnOnce()) -> usize {
    NOW_BYTES.set(0);
    PEAK_BYTES.set(0);
    work();
    PEAK_BYTES.get().max(0).cast_unsigned()
}

/// What reading a manifest may take for each of its bytes: a list of empty texts is the worst.
const MANIFEST_TIMES: usize = 40;
/// What reading an index may take for each of its bytes.
const INDEX_TIMES: usize = 4;
const SPARE_BYTES: usize = 64 << 10;

fn sample(files: Vec<DataFile>, argv: Vec<String>) -> Manifest {
    let job = JobIdentity { key: "job".into(), cwd: "/".into(), argv };
    Manifest {
        stall_s: 0.25,
        ckpt_run_version: "0".into(),
        criu_version: "4.2.1".into(),
        files,
        ..Manifest::new(id(), job)
    }
}

fn chunks() -> impl Strategy<Value = Vec<Chunk>> {
    let chunk = (any::<[u8; 32]>(), 1..=u32::try_from(CHUNK_BYTES).unwrap());
    prop::collection::vec(chunk.prop_map(|(id, bytes)| Chunk { id: ChunkId(id), bytes }), 0..20)
}

fn some_manifest() -> impl Strategy<Value = Manifest> {
    let file = ("[a-z]{1,8}/[a-z.-]{0,8}[a-z]", chunks()).prop_map(|(path, chunks)| DataFile {
        path: RelPath::new(path).unwrap(),
        bytes: chunks.iter().map(|chunk| u64::from(chunk.bytes)).sum(),
        blake3: None,
        chunks,
    });
    (prop::collection::vec(file, 0..6), prop::collection::vec(".*", 0..4))
        .prop_map(|(files, argv)| sample(files, argv))
}

fn some_index(encrypted: bool) -> impl Strategy<Value = Index> {
    let entry = (any::<[u8; 32]>(), 0..5000_u64, 1..=CHUNK_BYTES, any::<prop::sample::Index>(), 0..4_u8);
    prop::collection::vec(entry, 0..40).prop_map(move |rows| {
        let mut end = HEADER_BYTES as u64;
        let entry = |(id, gap, raw_bytes, stored_bytes, number): (_, _, _, prop::sample::Index, u8)| {
            let number = if encrypted { 0x80 | number } else { number };
            let stored_bytes = u32::try_from(1 + stored_bytes.index(raw_bytes)).unwrap();
            let offset = end + gap;
            end = offset + u64::from(stored_bytes);
            let (encoding, raw_bytes) =
                (Encoding::of_number(number).unwrap(), u32::try_from(raw_bytes).unwrap());
            Entry { id: ChunkId(id), offset, stored_bytes, raw_bytes, encoding }
        };
        let entries = rows.into_iter().map(entry).collect();
        Index { pack: PACK, pack_bytes: end + 1, entries }
    })
}

fn codec() -> impl Strategy<Value = Codec> {
    any::<bool>().prop_map(|encrypted| if encrypted { encrypting().clone() } else { Codec::default() })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn manifests_read_back(manifest in some_manifest(), codec in codec(), at in any::<prop::sample::Index>(), bit in 0..8_u8) {
        let object = sealed::encode(&manifest, &codec).unwrap();
        prop_assert_eq!(sealed::decode(&id(), &object, &codec).unwrap(), manifest);
        let at = at.index(object.len());
        prop_assert!(sealed::decode(&id(), &object[..at], &codec).is_err());
        let mut altered = object;
        altered[at] ^= 1 << bit;
        prop_assert!(sealed::decode(&id(), &altered, &codec).is_err());
    }

    #[test]
    fn indexes_read_back(
        (codec, index) in any::<bool>().prop_flat_map(|encrypted| {
            let codec = if encrypted { encrypting().clone() } else { Codec::default() };
            (Just(codec), some_index(encrypted))
        }),
        at in any::<prop::sample::Index>(), bit in 0..8_u8,
    ) {
        let object = index.encode(&codec);
        prop_assert_eq!(Index::decode(&PACK, &object, &codec).unwrap(), index);
        let at = at.index(object.len());
        prop_assert!(Index::decode(&PACK, &object[..at], &codec).is_err());
        let mut altered = object;
        altered[at] ^= 1 << bit;
        prop_assert!(Index::decode(&PACK, &altered, &codec).is_err());
    }

    #[test]
    fn arbitrary_bytes_are_errors_or_sound(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        for (_, entry) in ENTRIES {
            entry(&bytes);
        }
    }
}

fn corpus(entry: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(entry);
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    files
}

fn samples(entry: &str) -> Vec<Vec<u8>> {
    corpus(entry).iter().map(|file| std::fs::read(file).unwrap()).collect()
}

#[test]
fn any_manifest_of_version_1_is_read_or_refused() {
    mutations(&samples("manifest_v1"), entries::manifest_v1);
}

#[test]
fn any_manifest_is_read_or_refused() {
    mutations(&samples("manifest"), entries::manifest);
}

#[test]
fn any_index_is_read_or_refused() {
    mutations(&samples("index"), entries::index);
}

#[test]
fn any_chunk_is_read_or_refused() {
    mutations(&samples("chunk"), entries::chunk);
}

/// Each file of the corpus, whole, cut, and with each of its bytes altered.
#[test]
fn the_corpus_and_what_is_near_it() {
    for (name, entry) in ENTRIES {
        let files = corpus(name);
        assert!(files.len() > 2, "{name}");
        for file in files {
            let whole = std::fs::read(&file).unwrap();
            entry(&whole);
            let step = whole.len().div_ceil(200).max(1);
            for at in (0..whole.len()).step_by(step) {
                entry(&whole[..at]);
                let mut altered = whole.clone();
                altered[at] ^= 0x15;
                entry(&altered);
            }
        }
    }
}

/// Bodies that parse to much more than they are long.
fn greedy_bodies() -> Vec<Vec<u8>> {
    let list = |field: &str, item: &str| {
        let items = vec![item; 300_000 / item.len()].join(",");
        format!(r#"{{"version":1,"id":"{}","{field}":[{items}]}}"#, id()).into_bytes()
    };
    let mut bodies = Vec::new();
    for field in ["files", "shm_files", "spare_files", "gpu", "open_files", "stdio", "links", "unknown"] {
        for item in ["{}", "[]", r#"{"path":0}"#, r#"{"path":"a"}"#, r#"{"a":[0,0,0,0,0,0,0,0]}"#, "0"] {
            bodies.push(list(field, item));
        }
    }
    let argv = vec![String::new(); 100_000];
    bodies.push(serde_json::to_vec(&sample(Vec::new(), argv)).unwrap());
    bodies.push([vec![b'['; 100_000], vec![b']'; 100_000]].concat());
    bodies
}

#[test]
fn manifests_take_a_bounded_multiple_of_their_length() {
    for body in greedy_bodies() {
        let start = String::from_utf8_lossy(&body[..body.len().min(80)]).into_owned();
        let text =
            [br#"{"checksum":""#, blake3::hash(&body).to_hex().as_bytes(), br#"","body":"#, &body, b"}"]
                .concat();
        let peak = peak_bytes(|| _ = Manifest::decode(&id(), &text));
        assert!(peak < MANIFEST_TIMES * text.len() + SPARE_BYTES, "{start}: {peak} for {}", text.len());
        let codec = Codec::default();
        let object = as_object(&[&(body.len() as u64).to_le_bytes()[..], &body].concat());
        let peak = peak_bytes(|| _ = sealed::decode(&id(), &object, &codec));
        assert!(peak < MANIFEST_TIMES * object.len() + SPARE_BYTES, "{start}: {peak} for {}", object.len());
    }
}

fn as_object(body: &[u8]) -> Vec<u8> {
    let mut object = b"CKPTSNAP\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec();
    object.extend_from_slice(&(body.len() as u64).to_le_bytes());
    object.extend_from_slice(body);
    object.extend_from_slice(blake3::hash(&object).as_bytes());
    object
}

#[test]
fn lengths_that_lie_take_no_memory() {
    for length in [u64::MAX, u64::MAX - 8, 1 << 40, 1 << 32, 65 << 20] {
        let object = as_object(&length.to_le_bytes());
        let peak = peak_bytes(|| assert!(sealed::decode(&id(), &object, &Codec::default()).is_err()));
        assert!(peak < SPARE_BYTES, "{length}: {peak}");
        let mut index = Index { pack: PACK, pack_bytes: 64, entries: Vec::new() }.encode(&Codec::default());
        index.truncate(48);
        index.extend_from_slice(&length.to_le_bytes());
        index.extend_from_slice(blake3::hash(&index).as_bytes());
        let peak = peak_bytes(|| assert!(Index::decode(&PACK, &index, &Codec::default()).is_err()));
        assert!(peak < SPARE_BYTES, "{length}: {peak}");
    }
}

#[test]
fn indexes_take_a_small_multiple_of_their_length() {
    let entry = |number: u64| Entry {
        id: ChunkId([1; 32]),
        offset: 64 + number,
        stored_bytes: 1,
        raw_bytes: 1,
        encoding: Encoding::Raw,
    };
    let index = Index { pack: PACK, pack_bytes: 1 << 20, entries: (0..40_000).map(entry).collect() };
    let object = index.encode(&Codec::default());
    let peak = peak_bytes(|| assert!(Index::decode(&PACK, &object, &Codec::default()).is_ok()));
    assert!(peak < INDEX_TIMES * object.len() + SPARE_BYTES, "{peak} for {}", object.len());
}

#[test]
fn a_chunk_that_says_little_and_holds_much_takes_little() {
    let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap();
    for (packing, stored) in [
        (Packing::Zstd, bomb.clone()),
        (Packing::Planes2, [&8_u32.to_le_bytes()[..], &u32::MAX.to_le_bytes(), &[0; 8]].concat()),
        (Packing::Planes4, [&[0; 16][..], &bomb].concat()),
    ] {
        for raw_bytes in [16, 5000, CHUNK_BYTES, CHUNK_BYTES + 1, usize::MAX] {
            let mut scratch = Vec::new();
            let peak = peak_bytes(|| {
                let codec = Codec::new(Compression::Auto, None);
                let encoding = Encoding::Compressed(packing);
                let read = codec.decode(&PACK, 64, encoding, &stored, raw_bytes, &mut scratch);
                assert!(read.is_err(), "{packing:?} {raw_bytes}");
            });
            let bound = 2 * raw_bytes.min(CHUNK_BYTES) + SPARE_BYTES;
            assert!(peak <= bound, "{packing:?} {raw_bytes}: {peak}");
        }
    }
}

#[test]
fn sources_of_many_files_share_what_they_read_with() {
    let dir = tempfile::tempdir().unwrap();
    let store = common::packed(dir.path());
    let files: Vec<_> =
        (0..40).map(|number| (format!("images/core-{number}.img"), common::noise(number, 5000))).collect();
    let named: Vec<_> = files.iter().map(|(name, content)| (name.as_str(), content.as_slice())).collect();
    let manifest = common::save(&store, 1, &named).unwrap();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let peak = peak_bytes(|| {
        let sources: Vec<_> =
            manifest.files.iter().map(|file| store.source(&manifest, &file.path).unwrap()).collect();
        for (source, (name, content)) in sources.iter().zip(&files) {
            let mut read = vec![0; content.len()];
            source.read_at(0, &mut read).unwrap();
            assert!(read == *content, "{name}");
        }
        // Other tests have files open as well, but not for each of these.
        assert!(descriptors() < before + sources.len(), "{} for {before}", descriptors());
    });
    assert!(peak < 2 * CHUNK_BYTES, "{peak}");
}

#[test]
fn a_file_that_is_all_zeroes_takes_no_more_than_a_small_one_may() {
    let dir = tempfile::tempdir().unwrap();
    let store = common::packed(dir.path());
    let zeroes = Chunk { id: ChunkId::ZEROES, bytes: u32::try_from(CHUNK_BYTES).unwrap() };
    let path = common::path("gpu/7.json");
    let file = |chunks: usize| DataFile {
        path: path.clone(),
        bytes: (chunks * CHUNK_BYTES) as u64,
        blake3: None,
        chunks: vec![zeroes; chunks],
    };
    let read = |chunks| (&store as &dyn Store).read(&sample(vec![file(chunks)], Vec::new()), &path);
    assert_eq!(read(16).unwrap().len(), 64 << 20);
    let manifest = sample(vec![file(1 << 12)], Vec::new());
    let peak = peak_bytes(|| {
        let error = (&store as &dyn Store).read(&manifest, &path).unwrap_err();
        assert!(error.to_string().contains("gpu/7.json has 17179869184 bytes"), "{error}");
    });
    assert!(peak < SPARE_BYTES, "{peak}");
}

/// Regenerates the corpus: `cargo test -p ckpt-snapshot --test readers -- --ignored`.
#[test]
#[ignore = "writes the committed corpus"]
fn write_the_corpus() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let put = |entry: &str, name: &str, bytes: &[u8]| {
        std::fs::create_dir_all(dir.join(entry)).unwrap();
        std::fs::write(dir.join(entry).join(name), bytes).unwrap();
    };
    write_manifests(&put);
    write_indexes(&put);
    write_chunks(&put);
}

/// A manifest with every kind of data file.
fn full_manifest() -> Manifest {
    let chunk = |number: u8| Chunk { id: ChunkId([number; 32]), bytes: 4096 };
    let file = |path: &str, chunks: Vec<Chunk>| DataFile {
        path: RelPath::new(path).unwrap(),
        bytes: chunks.len() as u64 * 4096,
        blake3: None,
        chunks,
    };
    let files = vec![file("images/a.img", vec![chunk(1), chunk(0), chunk(2)]), file("shm/0", Vec::new())];
    let mut full = sample(files, vec!["python3".into(), "train.py".into()]);
    full.shm_files = vec![SavedFile {
        path: "/dev/shm/x".into(),
        data: RelPath::new("shm/0").unwrap(),
        mode: 0o600,
        uid: 0,
        gid: 0,
    }];
    full.gpu = vec![GpuProcess {
        pid: 7,
        mirror: 9,
        mirror_bytes: 4,
        mirror_used_bytes: Some(0),
        supports_loads: true,
        memory: Some(RelPath::new("gpu/7.mem").unwrap()),
        report: RelPath::new("gpu/7.json").unwrap(),
        gpus: vec![GpuRecord {
            uuid: "GPU-1".into(),
            name: "A".into(),
            memory_bytes: 9,
            captured_bytes: 4,
            driver_bytes: Some(3),
        }],
    }];
    full.version = full.least_version();
    full
}

fn write_manifests(put: &dyn Fn(&str, &str, &[u8])) {
    let full = full_manifest();
    let small = sample(Vec::new(), Vec::new());
    for (name, manifest) in [("full", &full), ("small", &small)] {
        put("manifest_v1", name, &manifest.encode());
        put("manifest_v1", &format!("{name}-body"), &serde_json::to_vec(manifest).unwrap());
        let object = sealed::encode(manifest, &Codec::default()).unwrap();
        put("manifest", &format!("{name}-body"), &object[32..object.len() - 32]);
        put("manifest", name, &object);
    }
    put("manifest", "encrypted", &sealed::encode(&full, encrypting()).unwrap());
}

fn write_indexes(put: &dyn Fn(&str, &str, &[u8])) {
    let rows = |encrypted: bool| {
        let number =
            move |number: u8| Encoding::of_number(if encrypted { 0x80 | number } else { number }).unwrap();
        (0..4_u8).map(move |row| Entry {
            id: ChunkId([row + 1; 32]),
            offset: 64 + 4096 * u64::from(row),
            stored_bytes: 4000,
            raw_bytes: 4096,
            encoding: number(row),
        })
    };
    for (name, codec) in [("plain", &Codec::default()), ("encrypted", encrypting())] {
        let entries = rows(codec.key_number() != 0).collect();
        let object = Index { pack: PACK, pack_bytes: 20_000, entries }.encode(codec);
        put("index", &format!("{name}-body"), &object[..object.len() - 32]);
        put("index", name, &object);
    }
}

fn write_chunks(put: &dyn Fn(&str, &str, &[u8])) {
    let text = b"loss 0.25 step ".repeat(100);
    let numbers: Vec<u8> = (0..400_u16).flat_map(|number| (f32::from(number) * 0.01).to_le_bytes()).collect();
    let halves: Vec<u8> = (0..800_u16).flat_map(|number| [(number * 77) as u8, 0x3f]).collect();
    for (name, content) in [("text", &text), ("numbers", &numbers), ("halves", &halves)] {
        for (kind, codec) in [("plain", &Codec::new(Compression::Auto, None)), ("encrypted", encrypting())] {
            let mut scratch = Vec::new();
            let (stored, encoding) = codec.encode(&PACK, 64, content, &mut scratch);
            let length = u32::try_from(content.len()).unwrap().to_le_bytes();
            put("chunk", &format!("{name}-{kind}"), &[&[encoding.number()], &length[..], stored].concat());
        }
    }
}
