//! A store of version 1, as the builds before packed stores wrote it, is read for ever.

use ckpt_snapshot::{JobKey, JobOutcome, Manifest, RelPath, Store, StoreRoot};
use std::path::Path;

fn fixture() -> StoreRoot {
    StoreRoot::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/store-v1")).unwrap()
}

fn read(store: &dyn Store, manifest: &Manifest, path: &str) -> Vec<u8> {
    store.read(manifest, &RelPath::new(path).unwrap()).unwrap()
}

#[test]
fn its_job_reads() {
    let jobs = fixture().jobs().unwrap();
    let names: Vec<_> = jobs.iter().map(|job| job.key().as_str()).collect();
    assert_eq!(names, ["train"]);
    let record = jobs[0].record().unwrap().unwrap();
    assert_eq!((record.run, record.last_sequence), (1, 2));
    assert_eq!(record.outcome, JobOutcome::Failed { code: 137 });
    assert_eq!(record.argv, ["python3", "train.py"]);
}

#[test]
fn its_snapshots_verify_and_have_their_content() {
    let store = fixture().job(&JobKey::named("train").unwrap()).version_1();
    let manifests: Vec<_> = store.list().unwrap().into_iter().map(|one| one.manifest.unwrap()).collect();
    let names: Vec<_> = manifests.iter().map(|manifest| manifest.id.to_string()).collect();
    assert_eq!(names, ["000001-20260921T141321Z", "000002-20260921T141322Z"]);
    for (number, manifest) in (1_usize..).zip(&manifests) {
        store.verify(manifest, &|_| {}).unwrap();
        let text = format!("registers of snapshot {number}\n");
        assert_eq!(read(&store, manifest, "images/core-10002.img"), text.as_bytes());
        let mut pages = vec![0_u8; 4096];
        pages.extend((0..512).map(|index| u8::try_from(index * number % 251).unwrap()));
        assert_eq!(read(&store, manifest, "images/pages-1.img"), pages);
        assert_eq!(read(&store, manifest, "images/empty.img"), b"");
        assert_eq!(read(&store, manifest, "shm/0"), b"shared");
    }
    assert_eq!(manifests[0].version, 1);
    let with_gpu = &manifests[1];
    assert_eq!((with_gpu.version, with_gpu.gpu[0].mirror), (2, 77));
    assert_eq!(read(&store, with_gpu, "gpu/10002.mem"), [0x3f, 0x80, 0, 0].repeat(64));
}
