//! The directory store as its users see it: commit, interruption, damage, removal.

use ckpt_snapshot::*;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::SystemTime;

fn manifest(sequence: u64) -> Manifest {
    Manifest {
        version: Manifest::version_for(&[]),
        id: SnapshotId::new(sequence, SystemTime::UNIX_EPOCH),
        job: JobIdentity { key: "job".into(), cwd: "/".into(), argv: vec!["true".into()] },
        run: 1,
        taken_unix_ms: 0,
        stall_s: 0.0,
        host: HostFacts::default(),
        ckpt_run_version: "0".into(),
        criu_version: "4.1.1".into(),
        tree: ProcessTree::default(),
        stdio: Vec::new(),
        tty: None,
        open_files: Vec::new(),
        shm_files: Vec::new(),
        spare_files: Vec::new(),
        directories: Vec::new(),
        links: Vec::new(),
        gpu: Vec::new(),
        files: Vec::new(),
    }
}

fn save(store: &dyn Store, sequence: u64) -> Manifest {
    let manifest = manifest(sequence);
    let mut writer = store.begin(&manifest.id, 100).unwrap();
    for (path, content) in [("images/core-1.img", "core"), ("images/pages-1.img", "pages"), ("shm/0", "shm")]
    {
        writer.put(&RelPath::new(path).unwrap(), &mut content.as_bytes(), &|_| {}).unwrap();
    }
    writer.commit(manifest).unwrap()
}

fn ids(store: &dyn Store) -> Vec<u64> {
    store.list().unwrap().iter().map(|listed| listed.id.sequence()).collect()
}

#[test]
fn a_committed_snapshot_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    let saved = save(&store, 1);
    assert_eq!(store.manifest(&saved.id).unwrap(), saved);
    assert_eq!(saved.files.len(), 3);
    store.verify(&saved, &|_| {}).unwrap();
    let images = store.images(&saved).unwrap();
    assert_eq!(images.check_bytes, 5);
    (images.check)(&|_| {}).unwrap();
    let found = (&store as &dyn Store).find("1").unwrap();
    assert_eq!(found, saved.id);
}

#[test]
fn only_the_owner_can_read_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    let saved = save(&store, 1);
    let root = dir.path().join("snapshots").join(saved.id.to_string());
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    for sub in ["", "images", "shm"] {
        assert_eq!(mode(&root.join(sub)), 0o700, "{sub}");
    }
    for file in ["manifest.json", "images/core-1.img", "images/pages-1.img", "shm/0"] {
        assert_eq!(mode(&root.join(file)), 0o600, "{file}");
    }
}

#[test]
fn what_is_not_committed_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    save(&store, 1);
    let mut writer = store.begin(&manifest(2).id, 100).unwrap();
    writer.put(&RelPath::new("images/a").unwrap(), &mut &b"x"[..], &|_| {}).unwrap();
    // As if the launcher had died here: the writer never runs its destructor.
    std::mem::forget(writer);
    assert_eq!(ids(&store), [1]);
    assert!(matches!(store.manifest(&manifest(2).id), Err(ReadError::Missing(_))));
    assert_eq!(store.sweep().unwrap(), [manifest(2).id.to_string()]);
    assert_eq!(fs::read_dir(dir.path().join("snapshots")).unwrap().count(), 1);
    // A writer that is dropped cleans up behind itself.
    drop(store.begin(&manifest(3).id, 100).unwrap());
    assert_eq!(fs::read_dir(dir.path().join("snapshots")).unwrap().count(), 1);
}

#[test]
fn every_flipped_byte_in_every_file_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    let saved = save(&store, 1);
    let root = dir.path().join("snapshots").join(saved.id.to_string());
    for file in ["manifest.json", "images/core-1.img", "images/pages-1.img", "shm/0"] {
        let whole = fs::read(root.join(file)).unwrap();
        for position in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[position] ^= 0x20;
            fs::write(root.join(file), &flipped).unwrap();
            let read = store.manifest(&saved.id).and_then(|manifest| store.verify(&manifest, &|_| {}));
            assert!(matches!(read, Err(ReadError::Damaged { .. })), "{file} byte {position}: {read:?}");
        }
        fs::write(root.join(file), &whole).unwrap();
    }
    store.verify(&saved, &|_| {}).unwrap();
}

#[test]
fn missing_and_cut_files_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    let saved = save(&store, 1);
    let pages = dir.path().join("snapshots").join(saved.id.to_string()).join("images/pages-1.img");
    fs::write(&pages, "pag").unwrap();
    assert!(matches!(
        store.images(&saved),
        Err(ReadError::Damaged { damage: Damage::Length { found: 3, .. }, .. })
    ));
    fs::remove_file(&pages).unwrap();
    assert!(matches!(
        store.verify(&saved, &|_| {}),
        Err(ReadError::Damaged { damage: Damage::Unreadable { .. }, .. })
    ));
}

#[test]
fn symbolic_links_are_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    let saved = save(&store, 1);
    let root = dir.path().join("snapshots").join(saved.id.to_string());
    fs::write(dir.path().join("outside"), "shm").unwrap();
    fs::remove_file(root.join("shm/0")).unwrap();
    std::os::unix::fs::symlink(dir.path().join("outside"), root.join("shm/0")).unwrap();
    assert!(matches!(store.verify(&saved, &|_| {}), Err(ReadError::Damaged { .. })));
    assert!(store.open(&saved, &RelPath::new("shm/0").unwrap()).is_err());
    store.remove(&saved.id).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("outside")).unwrap(), "shm");
}

#[test]
fn removal_takes_one_snapshot_only() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    let saved: Vec<_> = (1..=3).map(|sequence| save(&store, sequence)).collect();
    store.remove(&saved[1].id).unwrap();
    assert_eq!(ids(&store), [1, 3]);
    assert!(matches!((&store as &dyn Store).find("2"), Err(ReadError::Missing(_))));
    store.verify(&saved[2], &|_| {}).unwrap();
}

#[test]
fn room_is_checked_ahead() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    save(&store, 1);
    let error = store.begin(&manifest(2).id, 1 << 60).err().unwrap();
    assert!(matches!(error, SaveError::NoSpace { .. }), "{error}");
    assert!(error.to_string().contains("needs about"), "{error}");
    assert_eq!(ids(&store), [1]);
    assert_eq!(fs::read_dir(dir.path().join("snapshots")).unwrap().count(), 1);
}

#[test]
fn device_memory_is_compared_as_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    let path = |name: &str| RelPath::new(name).unwrap();
    let process = GpuProcess {
        pid: 7,
        mirror: 1,
        mirror_bytes: 8,
        memory: Some(path("gpu/7.mem")),
        report: path("gpu/7.json"),
    };
    let manifest = Manifest { version: 2, gpu: vec![process], ..manifest(1) };
    let mut writer = store.begin(&manifest.id, 100).unwrap();
    for (name, content) in [("images/core-1.img", "core"), ("gpu/7.mem", "memory"), ("gpu/7.json", "{}")] {
        writer.put(&path(name), &mut content.as_bytes(), &|_| {}).unwrap();
    }
    let saved = writer.commit(manifest).unwrap();
    let mut content = Vec::new();
    store.read(&saved, &path("gpu/7.mem"), &mut content, &|_| {}).unwrap();
    assert_eq!(content, b"memory");

    // What cannot be written is no damage.
    let mut full: &mut [u8] = &mut [0; 3];
    let read = store.read(&saved, &path("gpu/7.mem"), &mut full, &|_| {});
    assert!(matches!(read, Err(ReadError::Io { step: "copy", .. })), "{read:?}");
    let read = store.read(&saved, &path("gpu/8.mem"), &mut content, &|_| {});
    assert!(matches!(read, Err(ReadError::Damaged { damage: Damage::Manifest(_), .. })), "{read:?}");

    // Memory is left to `read`; all else is compared at once.
    let file = |name: &str| dir.path().join("snapshots").join(saved.id.to_string()).join(name);
    fs::write(file("gpu/7.mem"), "Memory").unwrap();
    let images = store.images(&saved).unwrap();
    assert_eq!(images.check_bytes, 0);
    (images.check)(&|_| {}).unwrap();
    let read = store.read(&saved, &path("gpu/7.mem"), &mut content, &|_| {});
    assert!(matches!(read, Err(ReadError::Damaged { damage: Damage::Checksum { .. }, .. })), "{read:?}");
    fs::write(file("gpu/7.mem"), "mem").unwrap();
    let images = store.images(&saved);
    assert!(matches!(images, Err(ReadError::Damaged { damage: Damage::Length { found: 3, .. }, .. })));
    fs::write(file("gpu/7.mem"), "memory").unwrap();
    fs::write(file("gpu/7.json"), "[]").unwrap();
    let images = store.images(&saved);
    assert!(matches!(images, Err(ReadError::Damaged { damage: Damage::Checksum { .. }, .. })));
}
