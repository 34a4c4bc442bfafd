//! The same with a network that drops, hangs, crawls and lies: the data is right in the end, or the error is clear and
//! nothing is committed.

mod support;

use ckpt_object_medium::{Pace, Retry};
use ckpt_snapshot::medium::Medium;
use ckpt_test_s3::proxy::Fault;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;
use support::{MIB, Scene, assert_same, hasty, name, noise, patient, read, write};

/// Quick to say that nothing comes any more.
fn watchful() -> Retry {
    Retry { stall: Duration::from_millis(400), ..patient() }
}

#[test]
fn uploads_get_through_whatever_happens_to_a_part() {
    for fault in [
        Fault::Drop,
        Fault::DropInBody(MIB),
        Fault::LoseAnswer,
        Fault::Status(500),
        Fault::Status(503),
        Fault::Status(429),
    ] {
        let scene = Scene::new();
        let (medium, name, content) = (scene.medium(), name("packs/a"), noise(6 * MIB, 4));
        scene.proxy.break_next(3, "PUT", "partNumber=", fault.clone());
        write(&medium, &name, &content, 2 * MIB).unwrap();
        assert_eq!(scene.proxy.left(), 0, "{fault:?}");
        assert_same(&read(&medium, &name).unwrap(), &content);
        assert_eq!(scene.server.unfinished_uploads(), 0, "{fault:?}");
    }
}

#[test]
fn uploads_begin_and_end_whatever_happens() {
    for fault in [Fault::Drop, Fault::LoseAnswer, Fault::Status(503), Fault::Truncate(3)] {
        let scene = Scene::new();
        let (medium, name, content) = (scene.medium(), name("packs/a"), noise(6 * MIB, 5));
        scene.proxy.break_next(2, "POST", "uploads", fault.clone());
        scene.proxy.break_next(1, "POST", "uploadId=", fault.clone());
        write(&medium, &name, &content, 2 * MIB).unwrap();
        assert_eq!(scene.proxy.left(), 0, "{fault:?}");
        assert_same(&read(&medium, &name).unwrap(), &content);
    }
}

#[test]
fn an_upload_that_does_not_get_through_leaves_nothing() {
    let scene = Scene::new();
    let medium = scene.medium_with(hasty(), Arc::new(Pace::default()));
    scene.proxy.break_next(usize::MAX / 2, "PUT", "partNumber=2", Fault::Status(500));
    let error = write(&medium, &name("packs/a"), &noise(12 * MIB, 6), 2 * MIB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert!(error.to_string().contains("writing s3://bucket/team/packs/a"), "{error}");
    assert!(error.to_string().contains("500"), "{error}");
    assert_eq!(scene.server.unfinished_uploads(), 0);
    assert_eq!(scene.server.objects().len(), 0);
}

#[test]
fn what_will_never_work_is_not_tried_again() {
    let scene = Scene::new();
    scene.proxy.break_next(usize::MAX / 2, "PUT", "", Fault::Status(403));
    let error = write(&scene.medium(), &name("packs/a.index"), b"small", 4096).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert_eq!(scene.proxy.seen("PUT", ""), 1);
    scene.proxy.clear_faults();
    scene.proxy.break_next(usize::MAX / 2, "PUT", "", Fault::Status(400));
    let error = write(&scene.medium(), &name("packs/a.index"), b"small", 4096).unwrap_err();
    assert!(error.to_string().contains("400"), "{error}");
    assert_eq!(scene.proxy.seen("PUT", ""), 2);
}

#[test]
fn reads_go_on_where_they_broke_off() {
    for fault in [
        Fault::Drop,
        Fault::LoseAnswer,
        Fault::Status(500),
        Fault::Status(503),
        Fault::Truncate(MIB),
        Fault::Stall(1000),
    ] {
        let scene = Scene::new();
        let medium = scene.medium_with(watchful(), Arc::new(Pace::default()));
        let (name, content) = (name("packs/a"), noise(4 * MIB + 12_345, 7));
        write(&medium, &name, &content, 4 * MIB).unwrap();
        let object = medium.open(&name).unwrap();
        scene.proxy.break_next(4, "GET", "packs/a", fault.clone());
        let mut into = vec![0; content.len()];
        object.read_at(0, &mut into).unwrap();
        assert_eq!(scene.proxy.left(), 0, "{fault:?}");
        assert_same(&into, &content);
    }
}

#[test]
fn a_connection_that_crawls_is_left_for_another() {
    let scene = Scene::new();
    // 4 s for all of it: plenty for a connection that works, and too little for one that crawls.
    let retry = Retry { stall: Duration::from_secs(3), slowest_bytes_per_s: 1 << 20, ..patient() };
    let medium = scene.medium_with(retry, Arc::new(Pace::default()));
    let (name, content) = (name("packs/a"), noise(MIB, 8));
    write(&medium, &name, &content, MIB).unwrap();
    let object = medium.open(&name).unwrap();
    // 10 KiB every 100 ms never stalls, but would take 10 s.
    let crawls = Fault::Trickle { piece_bytes: 10 << 10, pause: Duration::from_millis(100) };
    scene.proxy.break_next(1, "GET", "packs/a", crawls);
    let mut into = vec![0; content.len()];
    object.read_at(0, &mut into).unwrap();
    assert_same(&into, &content);
    // On a busy machine, others may crawl too.
    let tries = scene.proxy.seen("GET", "packs/a");
    assert!(tries >= 3, "open, the slow one, another: {tries}");
}

#[test]
fn opening_and_listing_get_through() {
    for fault in [Fault::Drop, Fault::Status(503), Fault::Truncate(1), Fault::Stall(1)] {
        let scene = Scene::new();
        let medium = scene.medium_with(watchful(), Arc::new(Pace::default()));
        let names: Vec<String> = (10..23).map(|number| format!("{number}")).collect();
        for one in &names {
            medium.put_new(&name(&format!("manifests/{one}")), one.as_bytes()).unwrap();
        }
        scene.proxy.break_next(3, "GET", "", fault.clone());
        let mut listed: Vec<_> =
            medium.list(&name("manifests")).unwrap().into_iter().map(|(name, _)| name).collect();
        listed.sort();
        assert_eq!(listed, names, "{fault:?}");
        scene.proxy.break_next(3, "GET", "", fault.clone());
        assert_eq!(read(&medium, &name("manifests/17")).unwrap(), b"17");
        assert_eq!(scene.proxy.left(), 0, "{fault:?}");
    }
}

#[test]
fn a_read_that_never_gets_through_is_an_error() {
    let scene = Scene::new();
    let medium = scene.medium_with(hasty(), Arc::new(Pace::default()));
    write(&medium, &name("packs/a"), &noise(MIB, 9), MIB).unwrap();
    let object = medium.open(&name("packs/a")).unwrap();
    scene.proxy.break_next(usize::MAX / 2, "GET", "packs/a", Fault::Truncate(100));
    let error = object.read_at(0, &mut vec![0; MIB]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert!(error.to_string().contains("reading s3://bucket/team/packs/a"), "{error}");
}

#[test]
fn an_object_that_was_replaced_meanwhile_is_not_mixed() {
    let scene = Scene::new();
    let medium = scene.medium();
    let (record, old, new) = (name("marks.json"), noise(100 << 10, 10), noise(100 << 10, 11));
    medium.put_new(&record, &old).unwrap();
    let object = medium.open(&record).unwrap();
    medium.remove(&record).unwrap();
    medium.put_new(&record, &new).unwrap();
    let error = object.read_at(0, &mut vec![0; old.len()]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
    assert_same(&read(&medium, &record).unwrap(), &new);
}

#[test]
fn a_commit_whose_answer_was_lost_has_won() {
    for fault in [Fault::LoseAnswer, Fault::Status(500), Fault::Status(503), Fault::Drop] {
        let scene = Scene::new();
        let medium = scene.medium();
        medium.check(Duration::from_secs(10)).unwrap();
        scene.proxy.break_next(3, "PUT", "manifests/1", fault.clone());
        medium.put_new(&name("manifests/1"), b"mine").unwrap();
        assert_eq!(scene.proxy.left(), 0, "{fault:?}");
        assert_eq!(read(&medium, &name("manifests/1")).unwrap(), b"mine");
    }
}

#[test]
fn a_commit_whose_answer_was_lost_has_not_won_over_another() {
    for fault in [Fault::LoseAnswer, Fault::Drop, Fault::Status(500)] {
        let scene = Scene::new();
        let medium = scene.medium();
        medium.put_new(&name("manifests/1"), b"theirs").unwrap();
        scene.proxy.break_next(2, "PUT", "manifests/1", fault.clone());
        let error = medium.put_new(&name("manifests/1"), b"mine").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{fault:?}: {error}");
        assert_eq!(read(&medium, &name("manifests/1")).unwrap(), b"theirs");
    }
}

#[test]
fn a_commit_that_does_not_get_through_is_an_error() {
    let scene = Scene::new();
    let medium = scene.medium_with(hasty(), Arc::new(Pace::default()));
    medium.check(Duration::from_secs(10)).unwrap();
    scene.proxy.break_next(usize::MAX / 2, "PUT", "manifests/1", Fault::Status(503));
    let error = medium.put_new(&name("manifests/1"), b"mine").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(scene.server.objects().len(), 0);

    // After any other error the caller would remove the existing object.
    medium.put_new(&name("manifests/2"), b"theirs").unwrap();
    scene.proxy.break_next(usize::MAX / 2, "PUT", "manifests/2", Fault::Status(503));
    let error = medium.put_new(&name("manifests/2"), b"mine").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
}

#[test]
fn one_conflict_is_not_an_object() {
    let scene = Scene::new();
    let medium = scene.medium();
    medium.check(Duration::from_secs(10)).unwrap();
    // What Amazon answers while another put of the name is under way, which may fail yet.
    scene.proxy.break_next(2, "PUT", "manifests/1", Fault::Status(409));
    medium.put_new(&name("manifests/1"), b"mine").unwrap();
    assert_eq!(read(&medium, &name("manifests/1")).unwrap(), b"mine");
}

#[test]
fn writers_who_race_over_a_bad_network_have_one_winner() {
    let scene = Scene::new();
    let media: Vec<_> = (0..4).map(|_| scene.medium()).collect();
    for (round, fault) in [Fault::LoseAnswer, Fault::Drop, Fault::Status(500)].into_iter().enumerate() {
        let manifest = name(&format!("manifests/{round}"));
        media.iter().for_each(|medium| medium.check(Duration::from_secs(10)).unwrap());
        scene.proxy.break_next(3, "PUT", "manifests/", fault.clone());
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let commit = |at: usize| media[at].put_new(&manifest, format!("writer {at}").as_bytes());
            let writers: Vec<_> = (0..media.len()).map(|at| scope.spawn(move || commit(at))).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        let won: Vec<_> = (0..media.len()).filter(|&at| outcomes[at].is_ok()).collect();
        assert_eq!(won.len(), 1, "{fault:?}: {outcomes:?}");
        assert_eq!(read(&media[0], &manifest).unwrap(), format!("writer {}", won[0]).as_bytes());
    }
}

#[test]
fn removals_get_through() {
    for fault in [Fault::Drop, Fault::LoseAnswer, Fault::Status(503)] {
        let scene = Scene::new();
        let medium = scene.medium();
        medium.put_new(&name("packs/a"), b"a").unwrap();
        scene.proxy.break_next(2, "DELETE", "packs/a", fault.clone());
        medium.remove(&name("packs/a")).unwrap();
        assert_eq!(scene.proxy.left(), 0, "{fault:?}");
        assert_eq!(scene.server.objects().len(), 0);
    }
}
