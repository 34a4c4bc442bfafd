//! Stores of versions 2 and 3, plain and encrypted, as the last build with version 2 (commit 553784c) and the first with
//! version 3 wrote them, are read for ever, and can be continued.

mod common;

use ckpt_snapshot::codec::{Codec, Compression, Key};
use ckpt_snapshot::medium::DirMedium;
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::*;
use common::{assert_holds, save};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Their names, and whether they are encrypted.
const KINDS: [(&str, bool); 4] =
    [("store-v2", false), ("store-v2-encrypted", true), ("store-v3", false), ("store-v3-encrypted", true)];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn key() -> Key {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    std::fs::write(&path, (100..132).collect::<Vec<u8>>()).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).unwrap();
    Key::from_file(&path).unwrap()
}

fn open(root: &StoreRoot, is_encrypted: bool) -> (JobDir, PackStore) {
    let key = is_encrypted.then(key);
    let job = root.job(&JobKey::named("job").unwrap()).with_key(key.as_ref());
    let medium = Arc::new(DirMedium::new(job.path().to_owned()));
    let codec = Codec::new(Compression::default(), key.as_ref());
    let store = PackStore::new(medium, codec, Limits::default()).of_job(job.key());
    (job, store)
}

/// Bytes that do not compress, the same for ever.
fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let next = |state: &u64| Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    let states = std::iter::successors(Some(seed), next).skip(1);
    states.map(|state| (state >> 56) as u8).take(bytes).collect()
}

/// The files of snapshot `number`: what does not compress, what is shared between snapshots, zeros, weights, nothing.
fn files(number: u64) -> Vec<(&'static str, Vec<u8>)> {
    let weights = (0..2000_u16).flat_map(|index| (f32::from(index) / 7.0 - 100.0).to_le_bytes()).collect();
    vec![
        ("images/core-10002.img", format!("registers of snapshot {number}\n").into_bytes()),
        ("images/pages-1.img", noise(number, 5000)),
        ("images/pages-2.img", noise(77, 3000)),
        ("images/zeros.img", vec![0; 300_000]),
        ("images/empty.img", Vec::new()),
        ("gpu/10002.mem", weights),
    ]
}

fn borrowed<'a>(files: &'a [(&'static str, Vec<u8>)]) -> Vec<(&'static str, &'a [u8])> {
    files.iter().map(|(name, content)| (*name, &content[..])).collect()
}

/// Version 2 had no list of snapshots that are being deleted.
fn record_in(name: &str) -> JobRecord {
    let deleted = if name.starts_with("store-v2") { Vec::new() } else { record().deleted };
    JobRecord { deleted, ..record() }
}

fn record() -> JobRecord {
    JobRecord {
        version: 1,
        cwd: "/work".into(),
        argv: vec!["python3".into(), "train.py".into()],
        run: 2,
        last_sequence: 4,
        sequence_before_run: 0,
        abandoned: vec![(3, 3)],
        deleted: vec![1],
        resumed_from: None,
        claims: 1,
        claimed_at_sequence: 0,
        launcher: "0123456789abcdef0123456789abcdef@node".into(),
        outcome: JobOutcome::Failed { code: 137 },
        is_removed: false,
    }
}

#[test]
#[ignore = "run by hand to write the fixture of a version"]
fn write_the_stores_of_version_3() {
    for (name, is_encrypted) in KINDS.into_iter().filter(|(name, _)| name.starts_with("store-v3")) {
        let root = StoreRoot::open_or_create(&fixture(name)).unwrap();
        let (job, store) = open(&root, is_encrypted);
        drop(job.lock_to_run(|_| ()).unwrap());
        for number in [2, 4] {
            save(&store, number, &borrowed(&files(number))).unwrap();
        }
        let ids: Vec<_> = store.list().unwrap().into_iter().map(|one| one.id).collect();
        job.change_marks(|marks| {
            marks.tag(&ids[0], "best").unwrap();
            marks.restore_failed(&ids[1], "no such file", std::time::UNIX_EPOCH);
        })
        .unwrap();
        job.set_record(&record()).unwrap();
    }
}

fn is_refused<T>(read: Result<T, OpenError>) -> bool {
    matches!(read, Err(OpenError::Unauthentic { refusal: Refusal::NoCode, .. }))
}

#[test]
fn they_read_as_they_were_written() {
    for (name, is_encrypted) in KINDS {
        let (job, store) = open(&StoreRoot::open(&fixture(name)).unwrap(), is_encrypted);
        // Their records have no codes of the key: it has to be said that they are to be read.
        if is_encrypted {
            assert!(is_refused(job.record()) && is_refused(job.marks()), "{name}");
        }
        let job = job.with_key(None);
        assert_eq!(job.record().unwrap(), Some(record_in(name)), "{name}");
        let listed: Vec<_> = store.list().unwrap().into_iter().map(|one| one.manifest.unwrap()).collect();
        let numbers: Vec<_> = listed.iter().map(|manifest| manifest.id.sequence()).collect();
        assert_eq!(numbers, [2, 4], "{name}");
        let marks = job.marks().unwrap();
        assert_eq!(marks.tagged("best").collect::<Vec<_>>(), [&listed[0].id], "{name}");
        assert!(marks.of(&listed[1].id).is_some() && !marks.is_bad(&listed[1].id), "{name}");
        for manifest in &listed {
            store.verify(manifest, &|_| {}).unwrap();
            assert_holds(&store, manifest, &borrowed(&files(manifest.id.sequence())));
        }
    }
}

#[test]
fn they_are_continued() {
    for (name, is_encrypted) in KINDS {
        let dir = tempfile::tempdir().unwrap();
        copy(&fixture(name), dir.path());
        let (job, store) = open(&StoreRoot::open_or_create(dir.path()).unwrap(), is_encrypted);
        assert_eq!(store.sweep().unwrap(), [""; 0], "{name}");
        save(&store, 5, &borrowed(&files(5))).unwrap();
        let old = store.list().unwrap().remove(0);
        store.remove(&old.id).unwrap();
        store.reclaim().unwrap();
        if is_encrypted {
            assert!(is_refused(job.record()) && is_refused(job.marks()), "{name}");
            assert_eq!(job.adopt_records().unwrap().len(), 2, "{name}");
            assert_eq!(job.record().unwrap(), Some(record_in(name)), "{name}");
        }
        job.set_record(&JobRecord { last_sequence: 5, ..record_in(name) }).unwrap();
        assert_eq!(job.record().unwrap().unwrap().last_sequence, 5, "{name}");
        assert!(!job.path().join("job.json").exists(), "{name}");
        assert_eq!(job.marks().unwrap().tagged("best").count(), 1, "{name}");
        for number in [4, 5] {
            let manifest = (&store as &dyn Store).find(&number.to_string()).unwrap();
            let manifest = store.manifest(&manifest).unwrap();
            assert_holds(&store, &manifest, &borrowed(&files(number)));
        }
    }
}

#[test]
fn an_encrypted_one_is_not_read_without_its_key() {
    for (name, _) in KINDS.into_iter().filter(|(_, is_encrypted)| *is_encrypted) {
        let (_, store) = open(&StoreRoot::open(&fixture(name)).unwrap(), false);
        for one in store.list().unwrap() {
            assert!(matches!(one.manifest, Err(ReadError::Key { .. })), "{name}: {:?}", one.manifest);
        }
        assert_eq!(store.list().unwrap().len(), 2, "{name}");
    }
}

fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir(&to).unwrap();
            copy(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), &to).unwrap();
        }
    }
}
