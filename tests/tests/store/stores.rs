//! Options of the store: upload, encryption, compression, shared chunks, tags, comparison, export and object stores.

use crate::keeper::{KEEPER, finish, has_said, start, step, unbroken};
use ckpt_run_tests::{Sandbox, python};
use ckpt_test_s3::proxy::Fault;
use ckpt_test_s3::{BUCKET, Service};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

/// A machine is lost with its store: the job resumes elsewhere from the upload.
#[test]
fn a_job_resumes_from_its_upload_after_its_store_is_lost() {
    let sandbox = Sandbox::new();
    let remote = sandbox.path().join("remote");
    fs::create_dir(&remote).unwrap();
    let url = format!("file://{}", remote.display());
    let options = ["--upload", &url, "--upload-every", "2", "--grace", "60s"];
    let mut job = start(&sandbox, "job", &options);
    step(&sandbox, &mut job);
    // Remains of killed uploads: a recent one may belong to a running upload, an old one is deleted.
    let leave = |name: &str, age_s: u64| {
        let dir = remote.join("jobs").join(sandbox.job_dir().file_name().unwrap());
        let path = dir.join(format!("packs/{name:0>32}.pack"));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::File::create(&path)
            .unwrap()
            .set_modified(SystemTime::now() - Duration::from_secs(age_s))
            .unwrap();
        path
    };
    let (left, another) = (leave("1", 2 * 86_400), leave("2", 3600));
    job.checkpoint(&sandbox);
    job.until("the upload of the first snapshot", || has_said(&sandbox, "job", "uploaded"));
    job.until("what was left goes", || (!left.exists()).then_some(()));
    step(&sandbox, &mut job);
    job.signal(rustix::process::Signal::TERM);
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert!(another.exists());
    // The last snapshot is uploaded, although only every second one should be.
    assert_eq!(sandbox.read("job.err").matches("uploaded").count(), 2, "{}", job.said());
    fs::remove_dir_all(sandbox.path().join(".ckpt-run")).unwrap();
    let job = start(&sandbox, "again", &options);
    assert!(job.said().contains("resumed from snapshot 000002"), "{}", job.said());
    assert_eq!(finish(&sandbox, "again", job), unbroken(2));
}

/// The files in `dir` whose names end so.
fn files_in(dir: &Path, end: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    files.filter(|path| path.to_string_lossy().ends_with(end)).collect()
}

/// Each tier is verified by itself; an index that is lost is written again.
#[test]
fn every_tier_is_verified_and_indexes_are_repaired() {
    let sandbox = Sandbox::new();
    let remote = sandbox.path().join("remote");
    fs::create_dir(&remote).unwrap();
    let url = format!("file://{}", remote.display());
    let mut job = start(&sandbox, "job", &["--upload", &url]);
    step(&sandbox, &mut job);
    let id = job.checkpoint(&sandbox);
    job.until("the upload", || has_said(&sandbox, "job", " uploaded: "));
    job.kill_everything();
    let call = |arguments: &[&str]| {
        let output = sandbox.call([arguments, &["--upload", &url]].concat());
        (output.status.code().unwrap(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (code, said) = call(&["verify", "--all"]);
    assert!(code == 0 && said.contains("disk: sound") && said.contains("remote: sound"), "{said}");

    let there = remote.join("jobs").join(sandbox.job_dir().file_name().unwrap()).join("packs");
    for pack in files_in(&there, ".pack") {
        fs::remove_file(pack).unwrap();
    }
    for arguments in
        [&["verify", &id][..], &["verify", "--all"], &["verify", "--scrub", "--read-data-subset", "1%"]]
    {
        let (code, said) = call(arguments);
        assert!(code == 1 && said.contains("disk: sound") && said.contains("remote: DAMAGED"), "{said}");
        assert_eq!(call(&[arguments, &["--tier", "remote"]].concat()).0, 1);
        assert_eq!(call(&[arguments, &["--tier", "disk"]].concat()).0, 0);
    }
    let here = sandbox.job_dir().join("packs");
    for index in files_in(&here, ".index") {
        fs::remove_file(index).unwrap();
    }
    let (code, said) = call(&["verify", "--scrub", "--tier", "disk"]);
    assert!(code == 1 && said.contains("of the snapshot's chunks are damaged or in no pack"), "{said}");
    let (code, said) = call(&["repair"]);
    assert!(code == 0 && said.contains("disk: "), "{said}");
    assert_eq!(call(&["verify", "--all", "--tier", "disk"]).0, 0);
    let job = start(&sandbox, "again", &[]);
    assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
    assert_eq!(finish(&sandbox, "again", job), unbroken(1));
    // Nothing verified is no success.
    for arguments in
        [&["verify", "--all", "--tier", "remote"][..], &["verify", "--scrub", "--tier", "remote"]]
    {
        let output = sandbox.call(arguments);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
    assert_eq!(call(&["verify", "--all", "--read-data-subset", "5%"]).0, 2);
    for bad in ["0%", "101%", "5"] {
        assert_eq!(call(&["verify", "--scrub", "--read-data-subset", bad]).0, 2);
    }
}

/// Sends broadcasts as fast as it can while there is the file `busy`.
const TALKER: &str = r#"
import os, random, socket, time
held = random.Random(7).randbytes(4 << 20)
talk = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
talk.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
open("ready", "w").close()
while not os.path.exists("go"):
    if os.path.exists("busy"):
        for _ in range(20):
            talk.sendto(bytes(60000), ("10.99.99.255", 9))
    time.sleep(0.01)
print(len(held), flush=True)
"#;

/// Set in the namespaces.
const WITHIN: &str = "CKPT_TEST_STORES_WITHIN";

/// A network interface that only this job uses.
const WITH_INTERFACE: &str = "mount -t sysfs sysfs /sys && ip link add ckpt0 type veth peer name ckpt1 \
                              && ip link set lo up && ip link set ckpt1 up && ip link set ckpt0 up \
                              && ip address add 10.99.99.1/24 brd + dev ckpt0 && exec \"$@\"";

/// The job's own traffic has priority. The service is on the loopback interface, which does not count.
#[test]
fn uploads_pause_while_the_job_sends() {
    if std::env::var_os(WITHIN).is_none() {
        let mut outer = Command::new("unshare");
        outer.args(["--net", "--mount", "--propagation", "private", "sh", "-c", WITH_INTERFACE, "sh"]);
        outer
            .arg(std::env::current_exe().unwrap())
            .args(["stores::uploads_pause_while_the_job_sends", "--exact"]);
        let output = outer.arg("--nocapture").env(WITHIN, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        return assert!(
            output.status.success() && said.contains("1 passed"),
            "{said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let service = Service::new();
    let sandbox = with_service(&service);
    let file = |name: &str| sandbox.path().join(name);
    fs::write(file("busy"), "").unwrap();
    let url = format!("s3://{BUCKET}/team");
    // ckpt-run subtracts its uploads from the traffic of the interface: they have to be small compared to the job's.
    let slowly = ["--upload", &url, "--upload-limit", "2MB/s", "--upload-pause-above", "10kB/s"];
    let command = ["--verbose", "--", python().to_str().unwrap(), "-c", TALKER].map(ToOwned::to_owned);
    let mut job = sandbox.start("job", slowly.into_iter().chain(command.iter().map(|word| &**word)));
    job.until("the job is ready", || file("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    job.checkpoint(&sandbox);
    job.until("a pause", || has_said(&sandbox, "job", "pausing uploads: the job sends"));
    assert!(has_said(&sandbox, "job", " uploaded: ").is_none(), "{}", job.said());
    fs::remove_file(file("busy")).unwrap();
    job.until("the upload resumes", || has_said(&sandbox, "job", "resuming uploads"));
    job.until("the upload", || has_said(&sandbox, "job", " uploaded: "));
    assert_eq!(finish(&sandbox, "job", job), format!("{}\n", 4 << 20));
}

/// A failed upload is reported, and does not harm the job.
#[test]
fn an_unreachable_upload_target_does_not_harm_the_job() {
    let sandbox = Sandbox::new();
    let remote = sandbox.path().join("remote");
    let url = format!("file://{}", remote.display());
    let mut job = start(&sandbox, "job", &["--upload", &url]);
    // From now on it is not a directory.
    fs::remove_dir_all(&remote).unwrap();
    fs::write(&remote, "").unwrap();
    step(&sandbox, &mut job);
    job.checkpoint(&sandbox);
    job.until("the failure is told", || has_said(&sandbox, "job", "was not uploaded"));
    job.kill_everything();
    let job = start(&sandbox, "again", &["--upload", &url]);
    assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
    assert_eq!(finish(&sandbox, "again", job), unbroken(1));
}

/// A text that is only in the job's memory.
const ONLY_IN_MEMORY: &str = "only-in-memoryonly-in-memory";

/// Encrypted snapshots contain no plain text, and need their key.
#[test]
fn an_encrypted_job_needs_its_key() {
    let sandbox = Sandbox::new();
    let key = |name: &str, byte: u8| {
        let path = sandbox.path().join(name);
        fs::write(&path, std::array::from_fn::<u8, 32, _>(|place| byte.wrapping_mul(place as u8 + 1)))
            .unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (right, wrong) = (key("right", 7), key("wrong", 8));
    let options = ["--encrypt-key-file", &right, "--compress", "auto"];
    let mut job = start(&sandbox, "job", &options);
    step(&sandbox, &mut job);
    let id = job.checkpoint(&sandbox);
    job.kill_everything();

    let store = sandbox.path().join(".ckpt-run/jobs");
    assert!(bytes_of(&store) > 32 << 20, "there is a snapshot");
    assert!(!is_in(&store, ONLY_IN_MEMORY), "what the job has in memory is in the store");
    for (key, why) in [(None, "it is encrypted"), (Some(&wrong), "with another key")] {
        let mut arguments = vec!["verify", &id];
        arguments.extend(key.iter().flat_map(|key| ["--encrypt-key-file", key.as_str()]));
        let output = sandbox.call(&arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(why) && said.contains("--encrypt-key-file"), "{said}");
        arguments.splice(..2, ["run"]);
        arguments
            .extend(["--", python().to_str().unwrap(), "-c", KEEPER].map(|word| &*word.to_owned().leak()));
        let output = sandbox.call(&arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "nothing is started: {said}");
        assert!(said.contains(why), "{said}");
    }
    sandbox.ok(["verify", &id, "--encrypt-key-file", &right]);
    let job = start(&sandbox, "again", &options);
    assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
    assert_eq!(finish(&sandbox, "again", job), unbroken(1));
}

fn bytes_of(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| match entry.file_type().unwrap().is_dir() {
            true => bytes_of(&entry.path()),
            false => entry.metadata().unwrap().len(),
        })
        .sum()
}

/// Whether a file below `dir` has `text` in it.
fn is_in(dir: &Path, text: &str) -> bool {
    let output = Command::new("grep").args(["-rlF", text]).arg(dir).output().unwrap();
    assert!(matches!(output.status.code(), Some(0 | 1)), "{output:?}");
    !output.stdout.is_empty()
}

/// Unchanged data is stored once; `diff` lists the changes; `export` writes the data to a directory.
#[test]
fn snapshots_share_chunks_and_are_compared_and_exported() {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "job", &["--keep", "1"]);
    let first = job.checkpoint(&sandbox);
    sandbox.ok(["tag", &first, "good"]);
    let shown = |id: &str| sandbox.json(["show", id, "--json"]);
    let stored = |shown: &Value| shown["stored_bytes"].as_u64().unwrap();
    assert!(stored(&shown(&first)) > 32 << 20, "all of it is new");
    step(&sandbox, &mut job);
    let second = job.checkpoint(&sandbox);
    let second_bytes = stored(&shown(&second));
    assert!(second_bytes < 24 << 20, "1 MiB of 32 has changed, and what Python does: {second_bytes}");
    assert_eq!(sandbox.snapshots(), [first.clone(), second.clone()], "what has a tag stays");

    let difference = sandbox.json(["diff", &first, &second, "--json"]);
    let changed_bytes = difference["host_memory"]["changed_bytes"].as_u64().unwrap();
    assert!((1 << 20..16 << 20).contains(&changed_bytes), "{difference}");

    let to = sandbox.path().join("taken-out");
    sandbox.ok(["export", &second, "--to", to.to_str().unwrap()]);
    assert!(bytes_of(&to) > 32 << 20);
    assert!(is_in(&to, ONLY_IN_MEMORY), "the job's memory");
    assert!(is_in(&sandbox.job_dir().join("packs"), ONLY_IN_MEMORY), "it is not encrypted");
    let output = sandbox.call(["export", &second, "--to", to.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2), "it is not written over");

    sandbox.ok(["untag", &first, "good"]);
    let before = bytes_of(&sandbox.job_dir().join("packs"));
    step(&sandbox, &mut job);
    let third = job.checkpoint(&sandbox);
    job.until("the older ones are gone", || (sandbox.snapshots() == [third.clone()]).then_some(()));
    let output = sandbox.call(["verify", "--scrub"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let after = bytes_of(&sandbox.job_dir().join("packs"));
    assert!(after < before + (24 << 20), "{before} became {after}");
    assert_eq!(finish(&sandbox, "job", job), unbroken(2));
}

/// A sandbox whose `ckpt-run` uses the service, with a state directory of its own.
pub fn with_service(service: &Service) -> Sandbox {
    let mut sandbox = Sandbox::new();
    let state = sandbox.path().join("state").display().to_string();
    sandbox.variables = service.variables();
    sandbox.variables.push(("XDG_STATE_HOME".to_owned(), state));
    sandbox
}

/// Removes the local state of the store, as on another machine.
fn forget_state(sandbox: &Sandbox) {
    fs::remove_dir_all(sandbox.path().join("state")).unwrap();
}

/// A job with an object store and no local store: it is killed with its launcher, and resumes elsewhere.
#[test]
fn a_job_needs_only_an_object_store() {
    let service = Service::new();
    let mut sandbox = with_service(&service);
    sandbox.store = format!("s3://{BUCKET}/team").into();
    let options = ["--keep", "2", "--grace", "60s"];
    let mut job = start(&sandbox, "job", &options);
    step(&sandbox, &mut job);
    let first = job.checkpoint(&sandbox);
    sandbox.ok(["tag", &first, "first"]);
    for _ in 0..3 {
        job.checkpoint(&sandbox);
    }
    step(&sandbox, &mut job);
    let newest = job.checkpoint(&sandbox);
    let kept = sandbox.snapshots();
    assert_eq!(kept.len(), 3, "two, and what has a tag: {kept:?}");
    job.kill_everything();
    assert!(!sandbox.path().join(".ckpt-run").exists());

    forget_state(&sandbox);
    let listed = sandbox.json(["ls", "--json"]);
    assert_eq!(sandbox.snapshots(), kept);
    assert_eq!((&listed[0]["tags"][0], &listed[0]["tiers"][0]), (&"first".into(), &"remote".into()));
    sandbox.verify_all();
    sandbox.ok(["verify", "--scrub"]);
    assert_eq!(sandbox.json(["show", "first", "--json"])["id"], first.as_str());
    let told = sandbox.ok(["status"]);
    assert!(told.contains("runs on another machine, or died with its launcher"), "{told}");
    // The journal has come with the job; snapshots within its first minute may not be in it.
    let explained = sandbox.ok(["explain"]);
    assert!(explained.contains("  started "), "{explained}");
    let to = sandbox.path().join("taken-out");
    sandbox.ok(["export", &first, "--to", to.to_str().unwrap()]);
    assert!(is_in(&to, ONLY_IN_MEMORY));

    let mut job = start(&sandbox, "again", &options);
    assert!(job.said().contains(&format!("resumed from snapshot {newest}, taken")), "{}", job.said());
    // The last snapshot of a preempted job is in the object store when ckpt-run ends.
    step(&sandbox, &mut job);
    job.signal(rustix::process::Signal::TERM);
    assert_eq!(job.wait(), 75, "{}", job.said());
    forget_state(&sandbox);
    let job = start(&sandbox, "third", &options);
    assert_eq!(finish(&sandbox, "third", job), unbroken(3));

    // Another machine knows that the job is complete, and may therefore delete objects.
    forget_state(&sandbox);
    let told = sandbox.ok(["status"]);
    assert!(told.contains(": complete, 3 snapshots"), "{told}");
    sandbox.ok(["untag", "first", "first"]);
    sandbox.ok(["prune", "--keep", "1"]);
    let left = sandbox.snapshots();
    assert_eq!(left.len(), 1);
    sandbox.ok(["rm", &left[0]]);
    let objects = service.server.objects();
    let is_left = |name: &String| name.ends_with(".json") || name.contains("/journals/");
    assert!(objects.keys().all(is_left), "{objects:?}");
}

/// `prune` records what it deletes, unless it is marked: a mark that comes later is refused, one that came before counts.
#[test]
fn a_mark_beside_a_prune_counts_or_is_refused() {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "job", &["--keep", "4"]);
    let ids: Vec<_> = (0..4).map(|_| job.checkpoint(&sandbox)).collect();
    let hold = sandbox.path().join("hold");
    fs::write(&hold, "").unwrap();
    let mut command = sandbox.command(["prune", "--keep", "1"]);
    command.env("CKPT_FAULT", format!("prune-recorded=hold:{}", hold.display()));
    let log = sandbox.path().join("prune.log");
    sandbox.ok(["pin", &ids[0]]);
    let mut prune = command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
    job.until("what is deleted is recorded", || {
        fs::read_to_string(&log).unwrap().contains("fault point prune-recorded").then_some(())
    });
    for late in [&["pin", &*ids[1]][..], &["tag", &ids[2], "best"]] {
        let refused = sandbox.call(late);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(2) && said.contains("is being deleted"), "{late:?}: {said}");
    }
    sandbox.ok(["tag", &ids[3], "newest"]);
    fs::remove_file(&hold).unwrap();
    assert!(prune.wait().unwrap().success());
    assert_eq!(sandbox.snapshots(), [&*ids[0], &*ids[3]]);
    // Of one that is killed a record is left, until the next one.
    sandbox.ok(["unpin", &ids[0]]);
    let mut killed = sandbox.command(["prune", "--keep", "1"]);
    assert!(!killed.env("CKPT_FAULT", "prune-recorded=kill").output().unwrap().status.success());
    assert_eq!(sandbox.call(["pin", &ids[0]]).status.code(), Some(2));
    sandbox.ok(["prune", "--keep", "2"]);
    sandbox.ok(["pin", &ids[0]]);
    assert_eq!(finish(&sandbox, "job", job), unbroken(0));
}

/// A machine is lost with its store, and the network is unreliable.
#[test]
fn a_job_resumes_from_an_unreliable_object_store() {
    let service = Service::new();
    let sandbox = with_service(&service);
    let url = format!("s3://{BUCKET}/team");
    let mut job = start(&sandbox, "job", &["--upload", &url]);
    step(&sandbox, &mut job);
    service.proxy.break_next(2, "PUT", "packs/", Fault::DropInBody(1 << 20));
    service.proxy.break_next(2, "PUT", "packs/", Fault::Status(503));
    service.proxy.break_next(1, "PUT", "manifests/", Fault::LoseAnswer);
    let id = job.checkpoint(&sandbox);
    job.until("the upload", || has_said(&sandbox, "job", "uploaded"));
    assert_eq!(service.proxy.left(), 0);
    job.kill_everything();
    fs::remove_dir_all(sandbox.path().join(".ckpt-run")).unwrap();
    service.proxy.break_next(2, "GET", "packs/", Fault::Truncate(1 << 20));
    let job = start(&sandbox, "again", &["--upload", &url]);
    assert!(job.said().contains(&format!("resumed from snapshot {id}, taken")), "{}", job.said());
    assert_eq!(finish(&sandbox, "again", job), unbroken(1));
}

/// An unusable service is reported before anything is started, with what to do.
#[test]
fn an_unusable_object_store_is_reported_at_the_start() {
    let service = Service::new();
    let sandbox = with_service(&service);
    let nobody = "http://127.0.0.1:1";
    for (store, name, value, why, remedy) in [
        ("s3://bucket/team", "AWS_SECRET_ACCESS_KEY", "other", "s3://bucket/team", "credentials are right"),
        ("s3://nowhere/team", "AWS_REGION", "us-east-1", "s3://nowhere/team", "the bucket's name is right"),
        ("s3://bucket/team", "AWS_ENDPOINT_URL", nobody, "s3://bucket/team", "can be reached from here"),
        ("s3://bucket/team", "AWS_ALLOW_HTTP", "false", "s3://bucket/team", "AWS_ALLOW_HTTP=true"),
        ("s3://bucket/team", "CKPT_UPLOAD", "s3://bucket/copies", "s3://bucket/team", "leave --upload out"),
    ] {
        let touch = ["--store", store, "--", "touch", "started"];
        // Once is enough for the slow case.
        let calls = if value == nobody { 1 } else { 2 };
        for arguments in [&touch[..], &["--store", store, "ls"]].into_iter().take(calls) {
            let output = sandbox.command(arguments).env(name, value).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{store}, {name}: {said}");
            assert!(said.contains(why) && said.contains(remedy), "{store}, {name}: {said}");
            assert!(!said.contains("hush"), "{said}");
        }
    }
    assert!(!sandbox.path().join("started").exists());
    assert_eq!(service.server.objects().len(), 0);
}

/// A service that fails while the job runs costs one snapshot; the job continues.
#[test]
fn a_failing_object_store_costs_only_a_snapshot() {
    let service = Service::new();
    let mut sandbox = with_service(&service);
    sandbox.store = format!("s3://{BUCKET}/team").into();
    let mut job = start(&sandbox, "job", &[]);
    step(&sandbox, &mut job);
    service.proxy.break_next(usize::MAX / 2, "PUT", "packs/", Fault::Status(403));
    service.proxy.break_next(usize::MAX / 2, "POST", "packs/", Fault::Status(403));
    let output = sandbox.call(["checkpoint"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("s3://bucket/team/jobs/") && said.contains("403"), "{said}");
    assert!(job.said().contains("no snapshot this time; the job runs on"), "{}", job.said());
    service.proxy.clear_faults();
    job.checkpoint(&sandbox);
    assert_eq!(sandbox.snapshots().len(), 1);
    assert_eq!(finish(&sandbox, "job", job), unbroken(1));
}

/// Bad options are reported before anything is started.
#[test]
fn bad_store_options_are_refused() {
    let sandbox = Sandbox::new();
    let open = sandbox.path().join("open");
    fs::write(&open, [1; 32]).unwrap();
    for (options, why) in [
        (["--compress", "zip"], "compress"),
        (["--upload", "ftp://host/x"], "ftp"),
        (["--upload", "s3://"], "BUCKET"),
        (["--upload", "https://host/x"], "can only be read from"),
        (["--upload-limit", "fast"], "upload-limit"),
        (["--upload-pause-above", "busy"], "upload-pause-above"),
        (["--keep-every", "often"], "keep-every"),
        (["--encrypt-key-file", "/nonexistent/key"], "/nonexistent/key"),
        (["--encrypt-key-file", open.to_str().unwrap()], "open"),
    ] {
        let output = sandbox.call(options.iter().copied().chain(["--", "true"]));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{options:?}: {said}");
        assert!(said.contains(why), "{options:?}: {said}");
    }
    assert!(!sandbox.path().join(".ckpt-run").exists(), "nothing was touched");
}
