//! Objects in a real S3 server, when nothing is wrong.

mod support;

use ckpt_object_medium::{ObjectMedium, Options, Pace, Site};
use ckpt_snapshot::medium::Medium;
use std::io::ErrorKind;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use support::{MIB, SECRET, Scene, assert_same, hasty, name, noise, patient, read, settings, write};

#[test]
fn objects_of_every_length_come_back() {
    let scene = Scene::new();
    let medium = scene.medium();
    let part = 5 * MIB;
    let lengths =
        [0, 1, 4096, 65_535, 65_536, 65_537, MIB + 3, part - 1, part, part + 1, 2 * part, 17 * MIB + 5];
    for (at, length) in lengths.into_iter().enumerate() {
        let (name, content) = (name(&format!("packs/{length}")), noise(length, at as u64));
        write(&medium, &name, &content, MIB).unwrap();
        assert_same(&read(&medium, &name).unwrap(), &content);
    }
    let mut listed = medium.list(&name("packs")).unwrap();
    listed.sort_by_key(|(_, bytes)| *bytes);
    assert_eq!(listed, lengths.map(|length| (length.to_string(), length as u64)));
    assert_eq!(scene.server.unfinished_uploads(), 0);
}

#[test]
fn little_memory_is_enough() {
    let scene = Scene::new();
    let medium = scene.medium();
    let content = noise(11 * MIB, 1);
    write(&medium, &name("packs/a"), &content, 64 << 10).unwrap();
    assert_same(&read(&medium, &name("packs/a")).unwrap(), &content);
    assert_eq!(scene.proxy.seen("PUT", "partNumber"), 3);
}

#[test]
fn parts_of_objects_are_read() {
    let scene = Scene::new();
    let medium = scene.medium();
    let content = noise(9 * MIB, 2);
    write(&medium, &name("packs/a"), &content, 4 * MIB).unwrap();
    let object = medium.open(&name("packs/a")).unwrap();
    assert_eq!(object.bytes(), content.len() as u64);
    for (offset, length) in [(0, 0), (0, 10), (65_000, 1000), (MIB, 4096), (5, 9 * MIB - 5), (9 * MIB, 0)] {
        let mut into = vec![0; length];
        object.read_at(offset as u64, &mut into).unwrap();
        assert_same(&into, &content[offset..offset + length]);
    }
    let beyond = object.read_at(content.len() as u64 - 1, &mut [0; 2]).unwrap_err();
    assert_eq!(beyond.kind(), ErrorKind::UnexpectedEof, "{beyond}");
    let gone = medium.open(&name("packs/b")).map(|_| ()).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound, "{gone}");
}

#[test]
fn small_objects_are_made_and_removed() {
    let scene = Scene::new();
    let medium = scene.medium();
    let manifest = name("manifests/1");
    medium.put_new(&manifest, b"first").unwrap();
    let second = medium.put_new(&manifest, b"second").unwrap_err();
    assert_eq!(second.kind(), ErrorKind::AlreadyExists, "{second}");
    let same = medium.put_new(&manifest, b"first").unwrap_err();
    assert_eq!(same.kind(), ErrorKind::AlreadyExists, "not ours although it looks like it");
    assert_eq!(read(&medium, &manifest).unwrap(), b"first");

    medium.remove(&manifest).unwrap();
    medium.remove(&manifest).unwrap();
    assert_eq!(medium.list(&name("manifests")).unwrap(), []);
    assert_eq!(medium.list(&name("nowhere")).unwrap(), []);
    assert_eq!(medium.free_bytes().unwrap(), None);
}

#[test]
fn places_below_are_told_apart() {
    let scene = Scene::new();
    let medium = scene.medium();
    let (a, b) = (medium.below(&name("jobs/a")), medium.below(&name("jobs/b")));
    a.put_new(&name("job.json"), b"a").unwrap();
    b.put_new(&name("job.json"), b"b").unwrap();
    a.put_new(&name("packs/1"), b"1").unwrap();
    assert_eq!(read(&b, &name("job.json")).unwrap(), b"b");
    let mut jobs = medium.list_dirs(Some(&name("jobs"))).unwrap();
    jobs.sort();
    assert_eq!(jobs, ["a", "b"]);
    assert_eq!(a.describe(&name("packs/1")), "s3://bucket/team/jobs/a/packs/1");
    assert_eq!(a.list_dirs(None).unwrap(), ["packs"]);
}

#[test]
fn of_many_who_commit_one_name_exactly_one_wins() {
    let scene = Scene::new();
    let media: Vec<ObjectMedium> = (0..6).map(|_| scene.medium()).collect();
    for round in 0..5 {
        let (manifest, start) = (name(&format!("manifests/{round}")), Barrier::new(media.len()));
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let commit = |(at, medium): (usize, &ObjectMedium)| {
                start.wait();
                medium.put_new(&manifest, format!("writer {at}").as_bytes())
            };
            let writers: Vec<_> =
                media.iter().enumerate().map(|one| scope.spawn(move || commit(one))).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        let won: Vec<_> = (0..media.len()).filter(|&at| outcomes[at].is_ok()).collect();
        assert_eq!(won.len(), 1, "{outcomes:?}");
        let lost = outcomes.iter().filter_map(|outcome| outcome.as_ref().err());
        assert!(lost.clone().all(|error| error.kind() == ErrorKind::AlreadyExists), "{outcomes:?}");
        assert_eq!(read(&media[0], &manifest).unwrap(), format!("writer {}", won[0]).as_bytes());
    }
}

#[test]
fn what_was_not_finished_leaves_nothing() {
    let scene = Scene::new();
    let medium = scene.medium();
    let mut writer = medium.create(&name("packs/a"), 4, 4 * MIB).unwrap();
    for _ in 0..5 {
        let mut block = writer.block().unwrap();
        block.set_filled(4 * MIB);
        writer.append(block).unwrap();
    }
    assert_eq!(scene.server.unfinished_uploads(), 1);
    drop(writer);
    assert_eq!(scene.server.unfinished_uploads(), 0);
    assert_eq!(scene.server.objects().len(), 0);
}

#[test]
fn a_service_without_conditional_puts_is_found_out() {
    for ignores in [true, false] {
        let scene = Scene::new();
        let state = &scene.server.state;
        let lacks = if ignores { &state.ignores_conditions } else { &state.refuses_conditions };
        lacks.store(true, Ordering::SeqCst);
        let medium = scene.medium();
        let error = medium.put_new(&name("manifests/1"), b"1").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("conditional puts (If-None-Match)"), "{error}");
        assert!(medium.check(Duration::from_secs(5)).is_err());
        assert_eq!(scene.server.objects().len(), 0, "nothing is committed, no probe is left");
    }
}

#[test]
fn a_probe_that_was_left_is_swept_and_never_listed() {
    let scene = Scene::new();
    let medium = scene.medium();
    for probe in [".probe-1", ".probe-2"] {
        medium.put_new(&name(probe), b"1").unwrap();
    }
    medium.put_new(&name("job.json"), b"{}").unwrap();
    scene.server.age("team/.probe-1", Duration::from_secs(7200));
    assert_eq!(medium.sweep(Duration::from_secs(3600)).unwrap(), ["s3://bucket/team/.probe-1"]);
    let left: Vec<_> = scene.server.objects().into_keys().collect();
    assert_eq!(left, ["team/.probe-2", "team/job.json"], "another machine may be about to look at its own");
    assert_eq!(medium.sweep(Duration::from_secs(3600)).unwrap(), [""; 0]);
}

#[test]
fn the_check_says_what_stands_in_the_way() {
    let scene = Scene::new();
    scene.medium().check(Duration::from_secs(10)).unwrap();
    assert_eq!(scene.server.objects().len(), 0);

    let endpoint = format!("http://{}", scene.proxy.address);
    let check = |url: &str, endpoint: &str, secret: &str| {
        let options = Options {
            settings: settings(endpoint, support::KEY, secret),
            retry: patient(),
            ..Options::default()
        };
        ObjectMedium::open(&url.parse().unwrap(), options)?.check(Duration::from_millis(100))
    };
    let wrong_key = check("s3://bucket/team", &endpoint, "other-hush-hush").unwrap_err();
    assert_eq!(wrong_key.kind(), ErrorKind::PermissionDenied, "{wrong_key}");
    let no_bucket = check("s3://nowhere/team", &endpoint, SECRET).unwrap_err();
    assert_eq!(no_bucket.kind(), ErrorKind::NotFound, "{no_bucket}");
    let nobody = check("s3://bucket/team", "http://127.0.0.1:1", SECRET).unwrap_err();
    assert!(nobody.to_string().contains("s3://bucket/team"), "{nobody}");
    for error in [wrong_key, no_bucket, nobody] {
        assert!(!format!("{error} {error:?}").contains("hush"), "{error:?}");
    }
}

#[test]
fn secrets_are_not_shown() {
    let scene = Scene::new();
    let options = Options { settings: scene.settings(), ..Options::default() };
    let shown = format!("{options:?} {:?}", scene.medium());
    assert!(shown.contains("aws_secret_access_key") && !shown.contains("hush"), "{shown}");
}

#[test]
fn settings_are_checked_before_anything_is_sent() {
    let open = |url: &str, settings: &[(&str, &str)]| {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let options = Options { settings: settings.iter().map(own).collect(), ..Options::default() };
        ObjectMedium::open(&url.parse().unwrap(), options).map(|_| ()).unwrap_err()
    };
    let plain = open("s3://b/a", &[("aws_endpoint", "http://10.0.0.1:9000")]);
    assert!(plain.to_string().contains("AWS_ALLOW_HTTP=true"), "{plain}");
    let unknown = open("s3://b/a", &[("aws_colour", "hush")]);
    assert!(
        unknown.to_string().contains("\"aws_colour\"") && !unknown.to_string().contains("hush"),
        "{unknown}"
    );
    let account = open("az://b/a", &[]);
    assert!(account.to_string().contains("AZURE_STORAGE_ACCOUNT_NAME"), "{account}");
    for error in [plain, unknown, account] {
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    }
}

#[test]
fn the_limit_holds_for_uploads_and_is_lifted_in_a_hurry() {
    let scene = Scene::new();
    // 20 MiB in parts of 5 MiB: three of them wait for those before, half a second each.
    let pace = Arc::new(Pace::new(Some(10 << 20), None));
    let medium = scene.medium_with(patient(), Arc::clone(&pace));
    let content = noise(20 * MIB, 3);
    let start = Instant::now();
    write(&medium, &name("packs/a"), &content, 4 * MIB).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(1500), "{:?}", start.elapsed());
    assert_eq!(pace.let_through_bytes(), content.len() as u64);

    pace.set_limit(Some(1));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write(&medium, &name("packs/b"), &content, 4 * MIB));
        while pace.let_through_bytes() <= content.len() as u64 {
            std::thread::yield_now();
        }
        assert!(!writer.is_finished(), "it would take weeks");
        pace.hurry();
        writer.join().unwrap().unwrap();
    });
    assert_same(&read(&medium, &name("packs/b")).unwrap(), &content);
}

#[test]
fn a_service_that_is_away_is_told_of_in_the_end() {
    let scene = Scene::new();
    let medium = scene.medium_with(hasty(), Arc::new(Pace::default()));
    let settings = settings("http://127.0.0.1:1", support::KEY, SECRET);
    let away =
        ObjectMedium::open(medium.url(), Options { settings, retry: hasty(), ..Options::default() }).unwrap();
    let error = away.list(&name("packs")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert!(error.to_string().contains("listing s3://bucket/team/packs"), "{error}");
}

#[test]
fn every_kind_of_address_is_opened() {
    let root = tempfile::tempdir().unwrap();
    let url = format!("file://{}/store", root.path().display());
    let directory = ckpt_object_medium::open(&url.parse().unwrap(), Options::default()).unwrap();
    directory.put_new(&name("manifests/1"), b"1").unwrap();
    assert_eq!(std::fs::read(root.path().join("store/manifests/1")).unwrap(), b"1");

    let scene = Scene::new();
    let options = Options { settings: scene.settings(), ..Options::default() };
    let bucket = ckpt_object_medium::open(&"s3://bucket".parse().unwrap(), options).unwrap();
    bucket.put_new(&name("manifests/1"), b"1").unwrap();
    assert_eq!(scene.server.objects().into_keys().collect::<Vec<_>>(), ["manifests/1"]);
}

#[test]
fn a_site_knows_its_jobs() {
    let dir = tempfile::tempdir().unwrap();
    let scene = Scene::new();
    let options = || Options { settings: scene.settings(), retry: patient(), ..Options::default() };
    for url in [format!("file://{}/store", dir.path().display()), "s3://bucket/team".to_owned()] {
        let site = Site::open(&url.parse().unwrap(), options()).unwrap();
        site.check(Duration::from_secs(10)).unwrap();
        assert_eq!(site.names(&name("jobs")).unwrap(), [""; 0], "{url}");
        // More than a page of the listing.
        for job in ["c", "a", "b", "f", "e", "d", "g"] {
            site.below(&name(&format!("jobs/{job}"))).put_new(&name("job.json"), b"{}").unwrap();
        }
        site.below(&name("jobs")).put_new(&name("stray"), b"").unwrap();
        assert_eq!(site.names(&name("jobs")).unwrap(), ["a", "b", "c", "d", "e", "f", "g"], "{url}");
        assert_eq!(read(&*site.below(&name("jobs/a")), &name("job.json")).unwrap(), b"{}");
    }
    std::fs::write(dir.path().join("file"), "").unwrap();
    let file = format!("file://{}/file", dir.path().display());
    let error = Site::open(&file.parse().unwrap(), options()).unwrap().check(Duration::ZERO).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotADirectory, "{error}");
}

#[test]
fn a_web_server_can_be_read_and_not_written() {
    let web = ObjectMedium::open(&"https://files.example/a".parse().unwrap(), Options::default()).unwrap();
    let create = web.create(&name("packs/a"), 4, 4096).map(|_| ());
    let rest = [web.put_new(&name("a"), b""), web.remove(&name("a"))];
    for refused in rest.into_iter().chain([create]) {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("can only be read"), "{error}");
    }
}
