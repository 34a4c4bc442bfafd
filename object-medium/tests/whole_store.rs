//! A whole store of packs in a real S3 server.

mod support;

use ckpt_object_medium::{ObjectMedium, Pace};
use ckpt_snapshot::codec::Codec;
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::{Input, JobIdentity, Manifest, ReadError, RelPath, SaveError, SnapshotId, Store};
use ckpt_test_s3::proxy::Fault;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};
use support::{MIB, Scene, assert_same, hasty, name, noise};

/// Limits as for an object store, with short packs. Garbage is deleted immediately.
fn limits() -> Limits {
    Limits { workers: 1, pack_bytes: 6 << 20, shared: Some(Duration::ZERO), ..Limits::remote() }
}

fn store(medium: ObjectMedium) -> PackStore {
    PackStore::new(Arc::new(medium), Codec::default(), limits())
}

fn manifest(sequence: u64) -> Manifest {
    let job = JobIdentity { key: "job".into(), cwd: "/".into(), argv: vec!["true".into()] };
    Manifest {
        ckpt_run_version: "0".into(),
        criu_version: "4.2".into(),
        ..Manifest::new(SnapshotId::new(sequence, UNIX_EPOCH), job)
    }
}

fn file() -> RelPath {
    name("images/pages-1.img")
}

fn save(store: &dyn Store, sequence: u64, content: &[u8]) -> Result<Manifest, SaveError> {
    let manifest = manifest(sequence);
    let mut writer = store.begin(&manifest.id, content.len() as u64)?;
    writer.put(&[Input { path: file(), from: &content }], &|_| {})?;
    writer.commit(manifest)
}

fn load(store: &dyn Store, sequence: u64) -> Result<Vec<u8>, ReadError> {
    store.read(&store.manifest(&manifest(sequence).id)?, &file())
}

#[test]
fn snapshots_are_saved_loaded_verified_and_given_back() {
    let scene = Scene::new();
    let (here, there) = (store(scene.medium()), store(scene.medium()));
    let first = noise(17 * MIB, 20);
    let mut second = first.clone();
    second[9 * MIB..10 * MIB].copy_from_slice(&noise(MIB, 21));
    save(&here, 1, &first).unwrap();
    let before = scene.proxy.sent_bytes();
    save(&here, 2, &second).unwrap();
    assert!(scene.proxy.sent_bytes() - before < 5 * MIB, "one chunk has changed");

    for (sequence, content) in [(1, &first), (2, &second)] {
        assert_same(&load(&there, sequence).unwrap(), content);
        there.verify(&there.manifest(&manifest(sequence).id).unwrap(), &|_| {}).unwrap();
    }
    let taken = save(&there, 2, &first).unwrap_err();
    assert!(matches!(taken, SaveError::Taken(_)), "{taken}");
    assert_same(&load(&here, 2).unwrap(), &second);

    here.remove(&manifest(1).id).unwrap();
    here.remove(&manifest(2).id).unwrap();
    here.sweep().unwrap();
    assert!(here.reclaim().unwrap().freed_bytes >= 17 * MIB as u64);
    assert_eq!(scene.server.objects().len(), 0, "{:?}", scene.server.objects());
}

#[test]
fn snapshots_get_through_a_bad_network() {
    let scene = Scene::new();
    let content = noise(13 * MIB, 22);
    scene.proxy.break_next(2, "PUT", "packs/", Fault::DropInBody(MIB));
    scene.proxy.break_next(2, "PUT", "packs/", Fault::Status(503));
    scene.proxy.break_next(1, "POST", "packs/", Fault::LoseAnswer);
    scene.proxy.break_next(1, "PUT", "manifests/", Fault::LoseAnswer);
    scene.proxy.break_next(2, "GET", "packs/", Fault::Truncate(MIB));
    scene.proxy.break_next(2, "GET", "packs/", Fault::Status(500));
    save(&store(scene.medium()), 1, &content).unwrap();
    assert_same(&load(&store(scene.medium()), 1).unwrap(), &content);
    assert_eq!(scene.proxy.left(), 0);
}

/// An upload that breaks off after some packs; how many bytes it had sent.
fn break_off(scene: &Scene, content: &[u8]) -> usize {
    let begun = AtomicU64::new(0);
    let store = store(scene.medium_with(hasty(), Arc::new(Pace::default())));
    let first = manifest(1);
    let mut writer = store.begin(&first.id, content.len() as u64).unwrap();
    let broken = writer.put(&[Input { path: file(), from: &content }], &|bytes| {
        if begun.fetch_add(bytes, Ordering::SeqCst) > 20 << 20 {
            scene.proxy.break_next(usize::MAX / 2, "", "", Fault::Drop);
        }
    });
    assert!(broken.is_err());
    // As if killed: nothing of what follows reaches the service.
    drop(writer);
    scene.proxy.clear_faults();
    scene.proxy.sent_bytes()
}

#[test]
fn an_interrupted_upload_goes_on_without_what_was_sent() {
    let scene = Scene::new();
    let content = noise(40 * MIB, 23);
    let before = break_off(&scene, &content);
    assert!(before > 16 * MIB, "{before}");
    let again = store(scene.medium());
    assert!(matches!(load(&again, 1), Err(ReadError::Missing(_))), "nothing is committed");
    again.sweep().unwrap();
    save(&again, 1, &content).unwrap();
    let after = scene.proxy.sent_bytes() - before;
    assert!(after < 40 * MIB - 16 * MIB + MIB, "{before} bytes were sent before, {after} after");
    assert_same(&load(&store(scene.medium()), 1).unwrap(), &content);
}

#[test]
fn what_another_machine_may_be_about_to_need_stays() {
    let scene = Scene::new();
    break_off(&scene, &noise(40 * MIB, 25));
    let before = scene.server.objects();
    let limits = Limits { shared: Limits::remote().shared, ..limits() };
    let other = PackStore::new(Arc::new(scene.medium()), Codec::default(), limits);
    assert!(other.sweep().unwrap().is_empty());
    assert_eq!(other.reclaim().unwrap().freed_bytes, 0);
    assert!(before.len() > 4 && scene.server.objects() == before, "{before:?}");
}

#[test]
fn an_interrupted_upload_that_is_not_continued_is_garbage_collected() {
    let scene = Scene::new();
    break_off(&scene, &noise(40 * MIB, 24));
    let later = store(scene.medium());
    save(&later, 2, b"small").unwrap();
    later.sweep().unwrap();
    assert!(later.reclaim().unwrap().freed_bytes > 16 * MIB as u64);
    assert_eq!(load(&later, 2).unwrap(), b"small");
    let left: u64 = scene.server.objects().values().sum();
    assert!(left < MIB as u64, "{:?}", scene.server.objects());
}
