//! A reader that was written from docs/format.md alone reads stores of every kind.

use ckpt_run_tests::packs::index;
use ckpt_run_tests::{from_env, workspace};
use ckpt_snapshot::codec::{Codec, Compression, Key};
use ckpt_snapshot::medium::DirMedium;
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::{
    Input, JobDir, JobIdentity, JobKey, JobOutcome, JobRecord, Manifest, RelPath, SnapshotId, Store,
    StoreRoot,
};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::SystemTime;

type Files = Vec<(&'static str, Vec<u8>)>;

fn read(store: &Path, more: &[&Path]) -> Output {
    let python =
        from_env("CKPT_TEST_READER_PYTHON", || workspace().join("target/tools/store-reader/bin/python3"));
    assert!(python.is_file(), "{} is not there: call `cargo xtask test`", python.display());
    let mut command = Command::new(python);
    command.env_remove("PYTHONPATH").env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONNOUSERSITE", "1");
    command.arg(workspace().join("tests/reader/reader.py")).arg(store).args(more).output().unwrap()
}

fn understood(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut noise = vec![0; bytes];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut noise);
    noise
}

/// Typical data of a job: weights, their upper halves, noise, text, zeroes, an empty file, shared chunks.
fn files(seed: u64) -> Files {
    let weights = |width: usize| -> Vec<u8> {
        let number = |four: &[u8; 4]| i32::from_le_bytes(*four) as f32 / 2e9;
        let numbers = noise(seed, 1_600_003 * 4);
        let numbers = numbers.as_chunks::<4>().0.iter().map(number);
        numbers.flat_map(|number| number.to_le_bytes()[4 - width..].to_vec()).collect()
    };
    let mut odd = weights(4);
    odd.truncate(odd.len() - 1);
    vec![
        ("gpu/1.mem", odd),
        ("gpu/2.mem", weights(2)),
        ("images/pages-1.img", noise(7, 5_000_000)),
        ("images/core-1.img", format!("registers of {seed}").into_bytes()),
        ("images/log.img", b"step 1: loss 0.25\n".repeat(9000)),
        ("images/empty.img", Vec::new()),
        ("shm/0", vec![0; 4_200_000]),
    ]
}

fn manifest(sequence: u64) -> Manifest {
    let job = JobIdentity { key: "job".into(), cwd: "/".into(), argv: vec!["true".into()] };
    Manifest {
        ckpt_run_version: "0".into(),
        criu_version: "4.2.1".into(),
        ..Manifest::new(SnapshotId::new(sequence, SystemTime::UNIX_EPOCH), job)
    }
}

/// A job with two snapshots in the store at `path`.
fn written(path: &Path, codec: Codec, key: Option<&Key>) -> JobDir {
    let job = StoreRoot::open_or_create(path).unwrap().job(&JobKey::named("job").unwrap()).with_key(key);
    let _lock = job.lock_to_run(|_| ()).unwrap();
    let (cwd, argv) = ("/".to_owned(), vec!["true".to_owned()]);
    let outcome = JobOutcome::Unfinished;
    let record = JobRecord {
        version: 1,
        cwd,
        argv,
        run: 1,
        last_sequence: 2,
        sequence_before_run: 0,
        abandoned: Vec::new(),
        resumed_from: None,
        deleted: Vec::new(),
        claims: 0,
        claimed_at_sequence: 0,
        launcher: "0123@node".into(),
        outcome,
        is_removed: false,
    };
    job.set_record(&record).unwrap();
    let store = PackStore::new(Arc::new(DirMedium::new(job.path().to_owned())), codec, Limits::default());
    for sequence in [1, 2] {
        let manifest = manifest(sequence);
        let files = files(sequence);
        let mut writer = store.begin(&manifest.id, 0).unwrap();
        let contents: Vec<_> = files.iter().map(|(name, content)| (*name, &content[..])).collect();
        let inputs: Vec<_> = contents
            .iter()
            .map(|(name, content)| Input { path: RelPath::new(*name).unwrap(), from: content })
            .collect();
        writer.put(&inputs, &|_| {}).unwrap();
        writer.commit(manifest).unwrap();
    }
    job
}

fn assert_reads_back(codec: Codec, key: Option<(&Path, &Key)>) {
    let dir = tempfile::tempdir().unwrap();
    let (store, into) = (dir.path().join("store"), dir.path().join("into"));
    let job = written(&store, codec.clone(), key.map(|(_, key)| key));
    let mut more = vec![Path::new("--extract"), &into];
    more.extend(key.into_iter().flat_map(|(file, _)| [Path::new("--key"), file]));
    let told = understood(&read(&store, &more));
    assert_eq!(told["version"], 3);
    let snapshots = told["jobs"]["job"]["snapshots"].as_object().unwrap();
    assert_eq!(snapshots.len(), 2);
    for sequence in [1, 2] {
        let id = manifest(sequence).id.to_string();
        let files = files(sequence);
        assert_eq!(snapshots[&id].as_object().unwrap().len(), files.len());
        for (name, content) in files {
            assert_eq!(
                snapshots[&id][name]["blake3"],
                blake3::hash(&content).to_hex().as_str(),
                "{id} {name}"
            );
            assert!(fs::read(into.join("job").join(&id).join(name)).unwrap() == content, "{id} {name}");
        }
    }
    finds_damage(&store, &job, &more, &codec);
}

/// One bit in the middle of a chunk is enough.
fn finds_damage(store: &Path, job: &JobDir, more: &[&Path], codec: &Codec) {
    let packs = fs::read_dir(job.path().join("packs")).unwrap().map(|entry| entry.unwrap().path());
    let mut packs: Vec<PathBuf> =
        packs.filter(|path| path.extension().is_some_and(|kind| kind == "pack")).collect();
    packs.sort_by_key(|path| fs::metadata(path).unwrap().len());
    let largest = packs.last().unwrap();
    let index = index(&largest.with_extension("index"), codec);
    // Between the chunks there is padding.
    let chunk = index.entries[index.entries.len() / 2];
    let mut bytes = fs::read(largest).unwrap();
    bytes[usize::try_from(chunk.offset).unwrap() + chunk.stored_bytes as usize / 2] ^= 1;
    fs::write(largest, bytes).unwrap();
    let output = read(store, more);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
}

fn key(dir: &Path) -> (PathBuf, Key) {
    let path = dir.join("key");
    fs::write(&path, noise(1, 32)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let key = Key::from_file(&path).unwrap();
    (path, key)
}

#[test]
fn a_store_as_it_is() {
    assert_reads_back(Codec::default(), None);
}

#[test]
fn a_compressed_store() {
    assert_reads_back(Codec::new(Compression::Auto, None), None);
    assert_reads_back(Codec::new(Compression::Zstd { level: 3 }, None), None);
}

#[test]
fn an_encrypted_store() {
    let dir = tempfile::tempdir().unwrap();
    let (path, key) = key(dir.path());
    assert_reads_back(Codec::new(Compression::None, Some(&key)), Some((&path, &key)));
    assert_reads_back(Codec::new(Compression::Auto, Some(&key)), Some((&path, &key)));
}

#[test]
fn a_store_of_version_1() {
    let told = understood(&read(&workspace().join("snapshot/tests/fixtures/store-v1"), &[]));
    assert_eq!(told["version"], 1);
    let snapshots = told["jobs"]["train"]["snapshots"].as_object().unwrap();
    let names: Vec<_> = snapshots.keys().collect();
    assert_eq!(names, ["000001-20260921T141321Z", "000002-20260921T141322Z"]);
    let shared = blake3::hash(b"shared").to_hex();
    assert!(snapshots.values().all(|files| files["shm/0"]["blake3"] == shared.as_str()));
}
