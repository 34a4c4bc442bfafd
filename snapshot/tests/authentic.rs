//! With a key, the records of a job (`job/N.json`, `marks/N.json`) count only as the holder of the key has written them.
//! Each test is one thing that somebody can try who can write to the store and does not have the key.

mod common;

use ckpt_snapshot::codec::Key;
use ckpt_snapshot::*;
use common::memory::{Judged, Memory, When};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

fn key(first: u8) -> Key {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    fs::write(&path, (first..first + 32).collect::<Vec<u8>>()).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
    Key::from_file(&path).unwrap()
}

fn record(run: u64) -> JobRecord {
    JobRecord {
        version: 1,
        cwd: "/work".to_owned(),
        argv: vec!["true".to_owned()],
        run,
        last_sequence: 0,
        sequence_before_run: 0,
        abandoned: Vec::new(),
        deleted: Vec::new(),
        resumed_from: None,
        claims: 0,
        claimed_at_sequence: 0,
        launcher: "0123@node".into(),
        outcome: JobOutcome::Unfinished,
        is_removed: false,
    }
}

fn id(number: u64) -> SnapshotId {
    SnapshotId::new(number, UNIX_EPOCH)
}

/// A store with the key, and its directory.
struct Keyed {
    key: Key,
    _dir: tempfile::TempDir,
    root: StoreRoot,
}

impl Keyed {
    /// The job has three records of each kind.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let keyed = Self { key: key(100), _dir: dir, root };
        keyed.write(&keyed.job(), 1);
        keyed
    }

    fn named(&self, name: &str) -> JobDir {
        self.root.job(&JobKey::named(name).unwrap())
    }

    fn job(&self) -> JobDir {
        self.named("job").with_key(Some(&self.key))
    }

    /// Three records of each kind, the last one with the last of these runs, and with all these numbers pinned.
    fn write(&self, job: &JobDir, first: u64) {
        for number in first..first + 3 {
            job.set_record(&record(number)).unwrap();
            job.change_marks(|marks| marks.pin(&id(number))).unwrap();
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.job().path().join(name)
    }

    /// The file is refused for this reason, as long as it is there.
    fn is_refused(&self, name: &str, why: &Refusal) {
        let errors = if name.starts_with("job") {
            let change = self.job().change_record(Ok::<_, OpenError>);
            [self.job().record().unwrap_err(), change.unwrap_err()]
        } else {
            let change = self.job().change_marks(|marks| marks.unpin(&id(3)));
            [self.job().marks().unwrap_err(), change.unwrap_err()]
        };
        for error in errors {
            let said = error.to_string();
            assert!(said.contains(name) && said.contains("Remove the file"), "{said}");
            let OpenError::Unauthentic { refusal, .. } = error else { panic!("{name}: {said}") };
            assert_eq!(refusal, *why, "{name}");
        }
        fs::remove_file(self.file(name)).unwrap();
    }

    fn is_as_written(&self) {
        assert_eq!(self.job().record().unwrap(), Some(record(3)));
        assert_eq!(self.job().marks().unwrap().kept().count(), 3);
    }
}

/// The record with this body and its checksum, which needs no key.
fn of_body(body: &str) -> Vec<u8> {
    let checksum = blake3::hash(body.as_bytes()).to_hex();
    format!(r#"{{"checksum":"{checksum}","body":{body}}}"#).into_bytes()
}

fn body_of(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    let at = text.find(r#""body":"#).unwrap() + 7;
    text[at..text.len() - 1].to_owned()
}

#[test]
fn records_are_what_the_document_says() {
    let keyed = Keyed::new();
    let body = body_of(&keyed.file("job/3.json"));
    let start = r#"{"version":2,"key":"f52d60274843b3ca","code":"00c41e4c81b6d23d010d24253ab18d1cf9c0bd2b2053aa251278ff303aa00e7c","cwd":"/work","argv":["true"],"run":3,"#;
    assert!(body.starts_with(start), "{body}");
    keyed.is_as_written();
}

#[test]
fn no_byte_of_a_record_can_be_altered() {
    let keyed = Keyed::new();
    for name in ["job/3.json", "marks/3.json"] {
        let (file, is_job) = (keyed.file(name), name.starts_with("job"));
        let whole = fs::read(&file).unwrap();
        let body = body_of(&file);
        for place in 0..body.len() {
            let mut altered = body.clone().into_bytes();
            altered[place] ^= 1 << (place % 7);
            fs::write(&file, of_body(str::from_utf8(&altered).unwrap())).unwrap();
            let error = if is_job { keyed.job().record().err() } else { keyed.job().marks().err() };
            assert!(matches!(error, Some(OpenError::Unauthentic { .. })), "{name} {place}: {error:?}");
        }
        // Other spellings of the same, and bytes around it.
        let text = str::from_utf8(&whole).unwrap();
        let (checksum, body) = (&text[13..77], &body);
        for other in [
            format!("{text} "),
            format!(r#"{{"body":{body},"checksum":"{checksum}"}}"#),
            text.replacen(checksum, &checksum.to_uppercase(), 1),
        ] {
            fs::write(&file, other).unwrap();
            let error = if is_job { keyed.job().record().err() } else { keyed.job().marks().err() };
            assert!(matches!(error, Some(OpenError::Unauthentic { .. })), "{name}: {error:?}");
        }
        fs::write(&file, whole).unwrap();
        keyed.is_as_written();
    }
}

#[test]
fn a_record_does_not_count_under_another_number() {
    let keyed = Keyed::new();
    for (from, to) in
        [("job/2.json", "job/4.json"), ("job/3.json", "job/4.json"), ("marks/1.json", "marks/9.json")]
    {
        fs::copy(keyed.file(from), keyed.file(to)).unwrap();
        keyed.is_refused(to, &Refusal::WrongCode);
    }
    keyed.is_as_written();
}

#[test]
fn a_record_does_not_count_as_another_kind() {
    let keyed = Keyed::new();
    keyed.job().set_record(&record(4)).unwrap();
    fs::rename(keyed.file("job/4.json"), keyed.file("marks/4.json")).unwrap();
    keyed.is_refused("marks/4.json", &Refusal::WrongCode);
    keyed.is_as_written();
}

#[test]
fn a_record_does_not_count_in_another_job() {
    let keyed = Keyed::new();
    let other = keyed.named("other").with_key(Some(&key(100)));
    keyed.write(&other, 7);
    keyed.write(&other, 10);
    for name in ["job/4.json", "marks/4.json"] {
        fs::copy(other.path().join(name), keyed.file(name)).unwrap();
        keyed.is_refused(name, &Refusal::WrongCode);
    }
    keyed.is_as_written();
}

#[test]
fn a_record_of_another_key_does_not_count() {
    let keyed = Keyed::new();
    let other = keyed.named("job").with_key(Some(&key(7)));
    for name in ["job/4.json", "marks/4.json"] {
        assert!(other.record().unwrap_err().to_string().contains("with another key"));
        let apart = tempfile::tempdir().unwrap();
        let root = StoreRoot::open_or_create(apart.path()).unwrap();
        let theirs = root.job(&JobKey::named("job").unwrap()).with_key(Some(&key(7)));
        keyed.write(&theirs, 7);
        keyed.write(&theirs, 10);
        fs::copy(theirs.path().join(name), keyed.file(name)).unwrap();
        keyed.is_refused(name, &Refusal::OtherKey);
    }
    keyed.is_as_written();
}

/// Whatever is deleted besides, a record without a code does not count: neither one of today nor one of an older build.
#[test]
fn a_record_without_a_code_does_not_count() {
    let keyed = Keyed::new();
    let plain = keyed.named("plain");
    keyed.write(&plain, 7);
    keyed.write(&plain, 10);
    for (why, number) in [(Refusal::Planted, 4), (Refusal::NoCode, 1)] {
        for kind in ["job", "marks"] {
            let name = format!("{kind}/{number}.json");
            if why == Refusal::NoCode {
                fs::remove_dir_all(keyed.file(kind)).unwrap();
                fs::create_dir(keyed.file(kind)).unwrap();
            }
            fs::copy(plain.path().join(&name), keyed.file(&name)).unwrap();
            keyed.is_refused(&name, &why);
        }
    }
    for kind in ["marks", "job"] {
        let old = format!("{kind}.json");
        fs::copy(plain.path().join(kind).join("1.json"), keyed.file(&old)).unwrap();
        keyed.is_refused(&old, &Refusal::NoCode);
    }
    fs::write(keyed.file("job.json"), serde_json::to_vec_pretty(&record(9)).unwrap()).unwrap();
    keyed.is_refused("job.json", &Refusal::NoCode);
    assert!(keyed.job().record().unwrap().is_none() && keyed.job().marks().unwrap() == Marks::default());
}

/// The code is taken away, so that the record looks as one that was written without a key.
#[test]
fn a_record_without_its_code_does_not_count() {
    let keyed = Keyed::new();
    for name in ["job/3.json", "marks/3.json"] {
        let body = body_of(&keyed.file(name));
        let rest = &body[body.find(r#""code""#).unwrap() + 9 + 64..];
        fs::write(keyed.file(name), of_body(&format!(r#"{{"version":1{rest}"#))).unwrap();
        keyed.is_refused(name, &Refusal::Planted);
    }
    let before = (keyed.job().record().unwrap().unwrap().run, keyed.job().marks().unwrap().kept().count());
    assert_eq!(before, (2, 2), "the records before count");
}

#[test]
fn what_is_no_record_is_refused() {
    let keyed = Keyed::new();
    for name in ["job/4.json", "job/18446744073709551615.json", "marks/4.json"] {
        for content in ["", "{", "{}"] {
            fs::write(keyed.file(name), content).unwrap();
            let error =
                if name.starts_with("job") { keyed.job().record().err() } else { keyed.job().marks().err() };
            assert!(
                matches!(&error, Some(OpenError::Unauthentic { refusal: Refusal::Unreadable(_), .. })),
                "{name}: {error:?}"
            );
        }
        fs::File::options().write(true).open(keyed.file(name)).unwrap().set_len(1 << 40).unwrap();
        assert!(keyed.job().change_marks(|marks| marks.pin(&id(9))).is_err() || name.starts_with("job"));
        fs::remove_file(keyed.file(name)).unwrap();
    }
}

/// Records that appear while the job runs: whatever they are, the job's own count, and are changed.
#[test]
fn a_running_job_passes_over_what_is_planted() {
    let keyed = Keyed::new();
    let running = keyed.job().passing_over_forgeries();
    let plain = keyed.named("plain");
    keyed.write(&plain, 7);
    let planted = |kind: &str| {
        let at = |name: &str| keyed.file(kind).join(name);
        fs::copy(at("2.json"), at("18446744073709551615.json")).unwrap();
        fs::copy(plain.path().join(kind).join("3.json"), at("99.json")).unwrap();
        fs::write(at("4.json"), "{").unwrap();
        fs::create_dir(at("5.json")).unwrap();
        std::os::unix::fs::symlink(at("3.json"), at("6.json")).unwrap();
        drop(std::os::unix::net::UnixListener::bind(at("7.json")).unwrap());
        rustix::fs::mkfifoat(rustix::fs::CWD, at("8.json"), 0o600.into()).unwrap();
        fs::File::create(at("98.json")).unwrap().set_len(1 << 40).unwrap();
    };
    planted("job");
    planted("marks");
    for run in 4..=80 {
        running
            .change_record(|present| {
                let present = present.unwrap();
                assert_eq!(present.run, run - 1);
                Ok::<_, OpenError>(Some(JobRecord { run, ..present }))
            })
            .unwrap();
        running.change_marks(|marks| marks.pin(&id(run))).unwrap();
        assert_eq!(running.record().unwrap().unwrap().run, run);
        assert_eq!(running.marks().unwrap().kept().count() as u64, run);
    }
    assert!(keyed.file("job/85.json").exists() && !keyed.file("job/3.json").exists(), "old ones are removed");
    // They are still there for the next start, which names them.
    assert!(matches!(keyed.job().record(), Err(OpenError::Unauthentic { .. })));
    // Whatever is removed, the launcher knows what it has written, and writes it again.
    for kind in ["job", "marks"] {
        for number in 9..=85 {
            let _ = fs::remove_file(keyed.file(kind).join(format!("{number}.json")));
        }
    }
    assert_eq!(running.marks().unwrap().kept().count(), 80);
    running
        .change_record(|present| {
            assert_eq!(present, Some(record(80)));
            Ok::<_, OpenError>(None)
        })
        .unwrap();
    running.change_marks(|marks| marks.pin(&id(80))).unwrap();
    let later = keyed.job().passing_over_forgeries();
    assert_eq!(later.record().unwrap(), Some(record(80)));
    assert_eq!(later.marks().unwrap().kept().count(), 80);
}

/// Older records with their codes, when newer ones are removed or overwritten: what the launcher has read counts.
#[test]
fn a_running_job_passes_over_older_records() {
    let keyed = Keyed::new();
    let running = keyed.job().passing_over_forgeries();
    running.change_record(|_| Ok::<_, OpenError>(Some(record(4)))).unwrap();
    running.change_marks(|marks| marks.pin(&id(4))).unwrap();
    for damage in [|file: PathBuf| fs::remove_file(file).unwrap(), |file| fs::write(file, "{").unwrap()] {
        for kind in ["job", "marks"] {
            let numbers = fs::read_dir(keyed.file(kind)).unwrap().filter_map(|entry| {
                entry.unwrap().path().file_stem()?.to_str()?.parse::<u64>().ok().filter(|number| *number > 2)
            });
            numbers.for_each(|number| damage(keyed.file(&format!("{kind}/{number}.json"))));
        }
        assert_eq!(running.record().unwrap(), Some(record(4)));
        assert_eq!(running.marks().unwrap().kept().count(), 4);
        // They are written again, also without a change.
        running.change_record(|_| Ok::<_, OpenError>(None)).unwrap();
        running.change_marks(|marks| marks.pin(&id(4))).unwrap();
        let later = keyed.job().passing_over_forgeries();
        assert_eq!(later.record().unwrap(), Some(record(4)));
        assert_eq!(later.marks().unwrap().kept().count(), 4);
        // Another job, and the same one in another place, are not this one.
        let sibling = running.sibling(&JobKey::named("another").unwrap());
        let elsewhere = running.clone().with_content_in(Arc::new(Memory::default()));
        assert_eq!((sibling.record().unwrap(), elsewhere.record().unwrap()), (None, None));
    }
}

/// Most jobs have no marks: then somebody else's would be the only ones.
#[test]
fn planted_marks_do_not_count_in_a_running_job_without_marks() {
    let keyed = Keyed::new();
    let plain = keyed.named("plain");
    keyed.write(&plain, 7);
    let without = |name| {
        let job = keyed.named(name).with_key(Some(&keyed.key));
        job.set_record(&record(1)).unwrap();
        job
    };
    let plant = |job: &JobDir| {
        fs::create_dir_all(job.path().join("marks")).unwrap();
        fs::copy(plain.path().join("marks/3.json"), job.path().join("marks/9.json")).unwrap();
    };
    let running = without("begun").passing_over_forgeries();
    running.begin_marks().unwrap();
    running.begin_marks().unwrap();
    assert_eq!(fs::read_dir(running.path().join("marks")).unwrap().count(), 1);
    plant(&running);
    assert_eq!(running.marks().unwrap(), Marks::default());
    running.change_marks(|marks| marks.pin(&id(1))).unwrap();
    assert_eq!(running.marks().unwrap().kept().count(), 1);
    // Those that are there when the job begins are refused.
    let late = without("late");
    plant(&late);
    let error = late.passing_over_forgeries().begin_marks().unwrap_err();
    assert!(matches!(error, OpenError::Unauthentic { refusal: Refusal::Planted, .. }), "{error}");
    // Without a key, nothing is written.
    keyed.named("no-key").begin_marks().unwrap();
    assert!(!keyed.named("no-key").path().exists());
}

/// An object that a service lists and does not give. Time-outs, and a service that gives nothing, are no such thing.
#[test]
fn a_running_job_passes_over_objects_that_are_denied() {
    use io::ErrorKind::{Other, PermissionDenied, TimedOut};
    let (keyed, memory) = (Keyed::new(), Memory::default());
    let job = |kind: io::ErrorKind, denied: &'static str| {
        let medium = Judged::new(memory.clone(), move |when, what, name| match when {
            When::Before if what == "open" && name.starts_with(denied) => Err(kind.into()),
            _ => Ok(()),
        });
        keyed.job().with_content_in(Arc::new(medium))
    };
    job(Other, "nothing").set_record(&record(1)).unwrap();
    memory.set("job/2.json", b"{".to_vec());
    for (kind, denied, is_odd) in [
        (PermissionDenied, "job/2.json", true),
        (Other, "job/2.json", true),
        (TimedOut, "job/2.json", false),
        (PermissionDenied, "job", false),
    ] {
        let strict = job(kind, denied).record().unwrap_err();
        assert!(matches!(strict, OpenError::Io { .. }), "{kind} {denied}: {strict}");
        let running = job(kind, denied).passing_over_forgeries().record();
        assert_eq!(running.is_ok_and(|record| record.is_some()), is_odd, "{kind} {denied}");
    }
    let running = job(Other, "job/2.json").passing_over_forgeries();
    running.change_record(|_| Ok::<_, OpenError>(Some(record(3)))).unwrap();
    assert_eq!(running.record().unwrap(), Some(record(3)));
    assert!(memory.objects().contains_key("job/3.json"));
}

/// What appears while a record is written, with a number far above it, is not taken for a newer one.
#[test]
fn a_change_is_made_once_whatever_appears_meanwhile() {
    let (keyed, memory) = (Keyed::new(), Memory::default());
    let planter = memory.clone();
    let medium = Judged::new(memory.clone(), move |when, what, name| {
        let number: u64 = name.trim_start_matches("job/").trim_end_matches(".json").parse().unwrap_or(0);
        if when == When::After && what == "put" {
            planter.set(&format!("job/{}.json", number + 1000), b"{".to_vec());
        }
        Ok(())
    });
    let running = keyed.job().with_content_in(Arc::new(medium)).passing_over_forgeries();
    let mut changes = 0;
    for run in 1..=3 {
        running
            .change_record(|_| {
                changes += 1;
                Ok::<_, OpenError>(Some(record(run)))
            })
            .unwrap();
        assert_eq!(running.record().unwrap(), Some(record(run)));
        // The re-read of a change asks what to make of the record that was read only if that is another one.
        assert_eq!(changes, run);
    }
    let numbers = ["job/1.json", "job/2.json", "job/3.json"];
    assert!(numbers.iter().all(|name| memory.objects().contains_key(*name)), "{:?}", memory.names(".json"));
}

/// Commands that change nothing work without the key, as before. Nothing is written that a key would not accept.
#[test]
fn without_the_key_records_are_read_and_not_changed() {
    let keyed = Keyed::new();
    let without = keyed.named("job");
    assert_eq!(without.record().unwrap(), Some(record(3)));
    assert_eq!(without.marks().unwrap().kept().count(), 3);
    let changed = without.change_marks(|marks| marks.unpin(&id(1))).unwrap_err();
    assert!(matches!(&changed, OpenError::NeedsKey(path) if path.ends_with("marks/3.json")), "{changed}");
    let changed = without.set_record(&record(4)).unwrap_err();
    assert!(changed.to_string().contains("--encrypt-key-file"), "{changed}");
    assert!(matches!(without.check_records(), Err(OpenError::NeedsKey(_))));
    keyed.job().check_records().unwrap();
    keyed.is_as_written();
    // Nor are marks begun that the next start would refuse.
    fs::remove_dir_all(keyed.file("marks")).unwrap();
    let pinned = without.change_marks(|marks| marks.pin(&id(1))).unwrap_err();
    assert!(matches!(&pinned, OpenError::NeedsKey(path) if path.ends_with("job/3.json")), "{pinned}");
    assert!(matches!(without.check_records(), Err(OpenError::NeedsKey(_))));
    assert_eq!(keyed.job().marks().unwrap(), Marks::default());
}

/// Records of a job that had no key, or of an older build, get their codes when the user says so: only then, and only
/// once.
#[test]
fn older_records_are_signed_on_request() {
    let keyed = Keyed::new();
    let (plain, signed) = (keyed.named("plain"), keyed.named("plain").with_key(Some(&key(100))));
    keyed.write(&plain, 1);
    let error = signed.record().unwrap_err();
    assert!(error.to_string().contains("repair --adopt-records"), "{error}");
    let adopted = signed.adopt_records().unwrap();
    let names: Vec<_> = adopted.iter().flat_map(|(old, new)| [old, new]).collect();
    let expected =
        ["marks/3.json", "marks/4.json", "job/3.json", "job/4.json"].map(|name| plain.path().join(name));
    assert_eq!(names, expected.iter().collect::<Vec<_>>());
    assert_eq!(signed.record().unwrap(), Some(record(3)));
    assert_eq!(signed.marks().unwrap().kept().count(), 3);
    assert!(signed.adopt_records().unwrap().is_empty());
    // From now on, nothing else is signed.
    fs::copy(plain.path().join("job/2.json"), plain.path().join("job/5.json")).unwrap();
    for error in [signed.adopt_records().unwrap_err(), signed.record().unwrap_err()] {
        assert!(matches!(&error, OpenError::Unauthentic { refusal: Refusal::Planted, .. }), "{error}");
        assert!(!error.to_string().contains("adopt"), "{error}");
    }
    fs::remove_file(plain.path().join("job/5.json")).unwrap();
    let other = keyed.named("plain").with_key(Some(&key(7)));
    assert!(matches!(other.adopt_records(), Err(OpenError::Unauthentic { refusal: Refusal::OtherKey, .. })));
    assert_eq!(signed.record().unwrap(), Some(record(3)));
}

/// Who can plant one kind of record and remove another cannot have the first one adopted.
#[test]
fn records_of_a_job_with_codes_are_not_adopted() {
    let keyed = Keyed::new();
    let plain = keyed.named("plain");
    keyed.write(&plain, 7);
    let is_planted = |job: &JobDir| {
        for error in [job.marks().unwrap_err(), job.adopt_records().unwrap_err()] {
            assert!(matches!(error, OpenError::Unauthentic { refusal: Refusal::Planted, .. }), "{error}");
        }
    };
    let marks = |number: u64| keyed.file(&format!("marks/{number}.json"));
    // Plain ones, and no others.
    (1..=3).for_each(|number| fs::remove_file(marks(number)).unwrap());
    fs::copy(plain.path().join("marks/2.json"), marks(2)).unwrap();
    is_planted(&keyed.job());
    // Besides, one of another key, or one that was moved.
    fs::remove_dir_all(keyed.file("job")).unwrap();
    fs::write(marks(1), fs::read(plain.path().join("marks/1.json")).unwrap()).unwrap();
    assert!(matches!(keyed.job().marks(), Err(OpenError::Unauthentic { refusal: Refusal::NoCode, .. })));
    let other = keyed.named("other").with_key(Some(&keyed.key));
    keyed.write(&other, 1);
    fs::copy(other.path().join("marks/1.json"), marks(1)).unwrap();
    is_planted(&keyed.job());
}

/// What a newer store looks like to a build that knows no codes: a newer version, and not damage that it would replace.
#[test]
fn older_builds_see_a_newer_version() {
    let keyed = Keyed::new();
    for name in ["job/3.json", "marks/3.json"] {
        let body: serde_json::Value = serde_json::from_str(&body_of(&keyed.file(name))).unwrap();
        assert_eq!(body["version"], 2);
    }
    // Such a build reads the record as a whole, and skips fields that it does not know.
    let body = body_of(&keyed.file("job/3.json"));
    assert_eq!(serde_json::from_str::<JobRecord>(&body).unwrap(), JobRecord { version: 2, ..record(3) });
}
