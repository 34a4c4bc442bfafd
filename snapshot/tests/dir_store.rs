//! The directory store as its users see it: commit, interruption, damage, removal.

use ckpt_snapshot::*;
use std::fs;
use std::path::Path;
use std::time::SystemTime;

fn manifest(sequence: u64) -> Manifest {
    let job = JobIdentity { key: "job".into(), cwd: "/".into(), argv: vec!["true".into()] };
    Manifest {
        ckpt_run_version: "0".into(),
        criu_version: "4.1.1".into(),
        ..Manifest::new(SnapshotId::new(sequence, SystemTime::UNIX_EPOCH), job)
    }
}

/// Writes a snapshot as the builds before packed stores did.
fn save(dir: &Path, sequence: u64) -> Manifest {
    let mut manifest = manifest(sequence);
    let snapshot = dir.join("snapshots").join(manifest.id.to_string());
    for (path, content) in [("images/core-1.img", "core"), ("images/pages-1.img", "pages"), ("shm/0", "shm")]
    {
        let file = snapshot.join(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, content).unwrap();
        let blake3 = Some(blake3::hash(content.as_bytes()).to_hex().to_string());
        let (path, bytes) = (RelPath::new(path).unwrap(), content.len() as u64);
        manifest.files.push(DataFile { path, bytes, blake3, chunks: Vec::new() });
    }
    fs::write(snapshot.join("manifest.json"), manifest.encode()).unwrap();
    manifest
}

fn ids(store: &dyn Store) -> Vec<u64> {
    store.list().unwrap().iter().map(|listed| listed.id.sequence()).collect()
}

#[test]
fn a_committed_snapshot_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    let saved = save(dir.path(), 1);
    assert_eq!(store.manifest(&saved.id).unwrap(), saved);
    assert_eq!(saved.files.len(), 3);
    store.verify(&saved, &|_| {}).unwrap();
    let store: &dyn Store = &store;
    assert_eq!(store.read(&saved, &RelPath::new("images/pages-1.img").unwrap()).unwrap(), b"pages");
    let found = (store as &dyn Store).find("1").unwrap();
    assert_eq!(found, saved.id);
}

#[test]
fn what_is_not_committed_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    save(dir.path(), 1);
    let unfinished = dir.path().join("snapshots").join(manifest(2).id.to_string());
    fs::create_dir_all(unfinished.join("images")).unwrap();
    fs::write(unfinished.join("images/a"), "x").unwrap();
    assert_eq!(ids(&store), [1]);
    assert!(matches!(store.manifest(&manifest(2).id), Err(ReadError::Missing(_))));
    assert_eq!(store.sweep().unwrap(), [manifest(2).id.to_string()]);
    assert_eq!(fs::read_dir(dir.path().join("snapshots")).unwrap().count(), 1);
}

#[test]
fn every_flipped_byte_in_every_file_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    let saved = save(dir.path(), 1);
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
    let saved = save(dir.path(), 1);
    let pages = dir.path().join("snapshots").join(saved.id.to_string()).join("images/pages-1.img");
    fs::write(&pages, "pag").unwrap();
    assert!(matches!(
        store.verify(&saved, &|_| {}),
        Err(ReadError::Damaged { damage: Damage::Length { found: 3, .. }, .. })
    ));
    fs::remove_file(&pages).unwrap();
    assert!(matches!(
        store.verify(&saved, &|_| {}),
        Err(ReadError::Damaged { damage: Damage::Unreadable { .. }, .. })
    ));
}

/// A directory in its place stands for whatever keeps a manifest from being read today and may be gone tomorrow.
#[test]
fn what_cannot_be_read_is_not_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let snapshots = dir.path().join("snapshots");
    let store = DirStore::new(snapshots.clone());
    let first = save(dir.path(), 1);
    let second = save(dir.path(), 2);
    save(dir.path(), 3);
    let text = |id: &SnapshotId| snapshots.join(id.to_string()).join("manifest.json");
    fs::rename(text(&first.id), dir.path().join("aside")).unwrap();
    fs::create_dir(text(&first.id)).unwrap();
    fs::write(text(&second.id), "{}").unwrap();
    let listed = store.list().unwrap();
    assert!(listed[..2].iter().all(|one| matches!(one.manifest, Err(ReadError::Damaged { .. }))));
    let goes = choose_prunable(&listed, &Retention::newest(1), &Marks::default(), &History::default());
    assert_eq!(goes, [second.id], "only what is damaged for certain");
    fs::remove_dir(text(&first.id)).unwrap();
    fs::rename(dir.path().join("aside"), text(&first.id)).unwrap();
    store.verify(&store.manifest(&first.id).unwrap(), &|_| {}).unwrap();
}

#[test]
fn symbolic_links_are_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    let saved = save(dir.path(), 1);
    let root = dir.path().join("snapshots").join(saved.id.to_string());
    fs::write(dir.path().join("outside"), "shm").unwrap();
    fs::remove_file(root.join("shm/0")).unwrap();
    std::os::unix::fs::symlink(dir.path().join("outside"), root.join("shm/0")).unwrap();
    assert!(matches!(store.verify(&saved, &|_| {}), Err(ReadError::Damaged { .. })));
    assert!((&store as &dyn Store).read(&saved, &RelPath::new("shm/0").unwrap()).is_err());
    store.remove(&saved.id).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("outside")).unwrap(), "shm");
}

#[test]
fn removal_takes_one_snapshot_only() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    let saved: Vec<_> = (1..=3).map(|sequence| save(dir.path(), sequence)).collect();
    store.remove(&saved[1].id).unwrap();
    assert_eq!(ids(&store), [1, 3]);
    assert!(matches!((&store as &dyn Store).find("2"), Err(ReadError::Missing(_))));
    store.verify(&saved[2], &|_| {}).unwrap();
}

#[test]
fn nothing_is_saved_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    let error = store.begin(&manifest(1).id, 1).err().unwrap();
    assert!(matches!(error, SaveError::Io { .. }), "{error}");
    assert!(!dir.path().join("snapshots").exists());
}

/// A target with less room than is needed.
struct Full;

impl Target for Full {
    fn set_bytes(&self, _bytes: u64) -> std::io::Result<()> {
        Ok(())
    }

    fn write_at(&self, _offset: u64, _bytes: &[u8]) -> std::io::Result<()> {
        Err(std::io::ErrorKind::StorageFull.into())
    }
}

#[test]
fn what_is_loaded_is_compared() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().join("snapshots"));
    let saved = save(dir.path(), 1);
    let store: &dyn Store = &store;
    let pages = RelPath::new("images/pages-1.img").unwrap();

    // What cannot be written is no damage.
    let read = store.load(&saved, &[Load { path: &pages, into: &Full }], &|_| {});
    assert!(matches!(read, Err(ReadError::Target { .. })), "{read:?}");
    let read = store.read(&saved, &RelPath::new("images/other.img").unwrap());
    assert!(matches!(read, Err(ReadError::Damaged { damage: Damage::Manifest(_), .. })), "{read:?}");

    let file = dir.path().join("snapshots").join(saved.id.to_string()).join("images/pages-1.img");
    fs::write(&file, "Pages").unwrap();
    let read = store.read(&saved, &pages);
    assert!(matches!(read, Err(ReadError::Damaged { damage: Damage::Checksum { .. }, .. })), "{read:?}");
    fs::write(&file, "pag").unwrap();
    let read = store.read(&saved, &pages);
    assert!(matches!(read, Err(ReadError::Damaged { damage: Damage::Length { found: 3, .. }, .. })));
}
