//! The small records of a job, and the copy of an index in a pack, are untrusted: an object store may be shared.

use ckpt_snapshot::chunk::ChunkId;
use ckpt_snapshot::codec::{Codec, Encoding};
use ckpt_snapshot::medium::{DirMedium, Medium};
use ckpt_snapshot::pack::{Entry, Index, PackId};
use ckpt_snapshot::*;
use ckpt_test_mutate::mutations;
use std::path::Path;
use std::time::UNIX_EPOCH;

fn job(dir: &Path) -> JobDir {
    StoreRoot::open_or_create(&dir.join("store")).unwrap().job(&JobKey::named("job").unwrap())
}

/// The body of a record, and a record of this body.
fn body_of(record: &[u8]) -> Vec<u8> {
    let at = record.windows(8).position(|part| part == b"\"body\":{").unwrap() + 7;
    record[at..record.len() - 1].to_vec()
}

fn with_checksum(body: &[u8]) -> Vec<u8> {
    let checksum = blake3::hash(body).to_hex();
    [br#"{"checksum":""#, checksum.as_bytes(), br#"","body":"#, body, b"}"].concat()
}

#[test]
fn any_record_of_a_job_is_read_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path());
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
        outcome: JobOutcome::Failed { code: 3 },
        is_removed: false,
    };
    job.set_record(&record).unwrap();
    let file = job.path().join("job/1.json");
    let samples = [body_of(&std::fs::read(&file).unwrap())];
    mutations(&samples, |body| {
        for text in [body.to_vec(), with_checksum(body)] {
            std::fs::write(&file, text).unwrap();
            if let Ok(Some(found)) = job.record() {
                job.set_record(&found).unwrap();
                assert_eq!(job.record().unwrap(), Some(found));
                std::fs::remove_file(job.path().join("job/2.json")).ok();
            }
        }
    });
}

#[test]
fn any_marks_are_read_or_refused() {
    let mut marks = Marks::default();
    let id = |number| SnapshotId::new(number, UNIX_EPOCH);
    marks.tag(&id(1), "best").unwrap();
    marks.pin(&id(2));
    marks.restore_failed(&id(2), "no memory", UNIX_EPOCH);
    marks.not_resumed(&id(3), UNIX_EPOCH);
    mutations(&[body_of(&marks.encode())], |body| {
        let _ = Marks::decode(Path::new("marks"), body);
        if let Ok(mut found) = Marks::decode(Path::new("marks"), &with_checksum(body)) {
            assert_eq!(Marks::decode(Path::new("marks"), &found.encode()).unwrap(), found);
            for number in 1..4 {
                found.not_resumed(&id(number), UNIX_EPOCH);
                found.restore_failed(&id(number), "again", UNIX_EPOCH);
                let _ = found.why_bad(&id(number));
            }
        }
    });
}

#[test]
fn any_copy_of_an_index_is_read_or_refused() {
    let (pack, codec) = (PackId([7; 16]), Codec::default());
    let entry = |number: u64| Entry {
        id: ChunkId([1; 32]),
        offset: 64 + 100 * number,
        stored_bytes: 100,
        raw_bytes: 100,
        encoding: Encoding::Raw,
    };
    let mut index = Index { pack, pack_bytes: 0, entries: (0..3).map(entry).collect() };
    index.pack_bytes = index.chunks_end() + index.tail_bytes();
    let sample = [vec![0; 364], index.tail(&codec)].concat();
    let dir = tempfile::tempdir().unwrap();
    let (medium, name) = (DirMedium::new(dir.path().to_owned()), RelPath::new("pack").unwrap());
    let read = |bytes: &[u8]| {
        std::fs::write(dir.path().join("pack"), bytes).unwrap();
        Index::from_tail(&pack, &*medium.open(&name).unwrap(), &codec)
    };
    assert_eq!(read(&sample).unwrap(), index);
    mutations(&[sample], |bytes| {
        if let Ok(found) = read(bytes) {
            assert_eq!(found.pack_bytes, bytes.len() as u64);
        }
    });
}
