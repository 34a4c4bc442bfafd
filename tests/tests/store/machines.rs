//! Jobs that move between machines, and one job that runs on two machines at once.

use crate::keeper::{KEEPER, finish, has_said, start, step, unbroken};
use crate::stores::with_service;
use ckpt_run_tests::{Running, Sandbox, python, set_variables};
use ckpt_snapshot::medium::DirMedium;
use ckpt_snapshot::{JobKey, JobRecord, OpenError, StoreRoot};
use ckpt_test_s3::proxy::Fault;
use ckpt_test_s3::{BUCKET, Service};
use rustix::process::Signal;
use std::fs;
use std::process::Command;
use std::sync::Arc;

/// How the sessions of the job ended, on whatever machine.
fn endings(sandbox: &Sandbox, options: &[&str]) -> Vec<String> {
    let report = sandbox.json(options.iter().copied().chain(["report", "--json"]));
    let sessions = report["sessions"].as_array().unwrap();
    sessions.iter().map(|session| session["ending"].as_str().unwrap_or("none").to_owned()).collect()
}

/// A job moves to another machine, and returns to a disk with old snapshots. Both machines know when it is complete.
#[test]
fn a_returning_job_resumes_from_the_newest_upload() {
    let sandbox = Sandbox::new();
    let path = |name: &str| sandbox.path().join(name);
    fs::create_dir(path("remote")).unwrap();
    let url = format!("file://{}", path("remote").display());
    let options = ["--upload", &url, "--grace", "60s"];
    // Each machine has a disk of its own.
    let plug_in = |disk: &str| fs::rename(path(disk), path(".ckpt-run")).unwrap();
    let unplug = |disk: &str| fs::rename(path(".ckpt-run"), path(disk)).unwrap();
    let preempted = |name: &str, from: Option<&str>| {
        let mut job = start(&sandbox, name, &options);
        let resumed = from.map(|id| format!("resumed from snapshot {id}"));
        assert!(resumed.is_none_or(|resumed| job.said().contains(&resumed)), "{}", job.said());
        step(&sandbox, &mut job);
        job.signal(Signal::TERM);
        assert_eq!(job.wait(), 75, "{}", job.said());
    };
    preempted("first", None);
    unplug("one");
    preempted("second", Some("000001"));
    unplug("two");
    plug_in("one");
    let job = start(&sandbox, "third", &options);
    assert!(job.said().contains("resumed from snapshot 000002"), "{}", job.said());
    assert!(job.said().contains("it has continued on another machine"), "{}", job.said());
    assert_eq!(finish(&sandbox, "third", job), unbroken(2));
    assert_eq!(endings(&sandbox, &[]), ["ended", "ended", "complete"]);
    unplug("one");
    plug_in("two");
    assert_eq!(endings(&sandbox, &[]), ["ended", "ended"]);
    assert_eq!(endings(&sandbox, &["--upload", &url]), ["ended", "ended", "complete"]);
    let status = sandbox.ok(["status"]);
    assert!(status.contains("stopped; run it again"), "without the uploads, this machine's: {status}");
    let status = sandbox.ok(["--upload", &url, "status"]);
    assert!(status.contains(": complete"), "{status}");
    let job = start(&sandbox, "fourth", &options);
    assert!(!job.said().contains("resumed"), "it is complete: {}", job.said());
    assert!(job.said().contains("it was complete, as it had ended with 0"), "{}", job.said());
    assert_eq!(finish(&sandbox, "fourth", job), unbroken(0));
}

/// Continues as another machine that shares the store: it has its own state directory.
fn on(sandbox: &mut Sandbox, machine: &str) {
    let state = sandbox.path().join(machine).display().to_string();
    sandbox.variables = vec![("XDG_STATE_HOME".to_owned(), state)];
}

/// What `explain` says where the machine has another name.
fn explain_on_another_machine(sandbox: &Sandbox) -> String {
    let explain = sandbox.command(["explain"]);
    let mut command = Command::new("unshare");
    command.args(["--uts", "sh", "-c", r#"hostname elsewhere && exec "$@""#, "sh"]);
    command.arg(explain.get_program()).args(explain.get_args()).current_dir(sandbox.path());
    set_variables(&mut command, &explain);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

/// A start that fails because its CRIU is broken: it resumes nothing, and does not take the job over.
fn fails_to_resume(sandbox: &Sandbox, options: &[&str], from: &str) {
    let broken = sandbox.path().join("criu");
    // A shell writes the file: a process that another test forks here could hold it open and prevent its execution.
    let write =
        "printf '#!/bin/sh\\n[ \"$1\" != swrk ] && exec %s \"$@\"\\n' \"$1\" > \"$2\" && chmod +x \"$2\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", write, "sh"]).arg(ckpt_run_tests::criu()).arg(&broken);
    assert!(shell.status().unwrap().success());
    let python = python();
    let command = ["--", python.to_str().unwrap(), "-c", KEEPER];
    let mut command = sandbox.command(options.iter().copied().chain(command));
    let output = command.env("CKPT_CRIU", &broken).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(&format!("resuming from snapshot {from}")), "{said}");
}

fn send(pid: i32, signal: Signal) {
    let _ = rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), signal);
}

/// Kills a job whose machine has lost it to another one: it is not restarted there.
fn is_not_restarted(mut job: Running) {
    for pid in job.descendants() {
        send(pid, Signal::KILL);
    }
    assert_eq!(job.wait(), 125, "{}", job.said());
    assert!(job.said().contains("the job is not restarted here: another ckpt-run"), "{}", job.said());
}

/// A scheduler has started the job on a second machine while the first one is still alive. From then on only the second
/// one takes snapshots.
#[test]
fn later_machine_owns_a_shared_store() {
    let mut sandbox = Sandbox::new();
    sandbox.store = format!("file://{}", sandbox.path().join("remote").display()).into();
    on(&mut sandbox, "one");
    let mut first = start(&sandbox, "first", &["--max-restarts", "5"]);
    step(&sandbox, &mut first);
    let shared = first.checkpoint(&sandbox);

    on(&mut sandbox, "broken");
    fails_to_resume(&sandbox, &[], &shared);
    on(&mut sandbox, "one");
    let shared = first.checkpoint(&sandbox);

    on(&mut sandbox, "two");
    let mut second = start(&sandbox, "second", &[]);
    assert!(second.said().contains(&format!("resumed from snapshot {shared}")), "{}", second.said());
    let before_refusal = sandbox.snapshots();
    on(&mut sandbox, "one");
    let output = sandbox.call(["checkpoint"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("another ckpt-run (on the machine ") && said.contains("End one of the two"),
        "{said}"
    );
    assert_eq!(sandbox.snapshots(), before_refusal);
    is_not_restarted(first);

    on(&mut sandbox, "two");
    step(&sandbox, &mut second);
    let newest = second.checkpoint(&sandbox);
    on(&mut sandbox, "watcher");
    let said = explain_on_another_machine(&sandbox);
    assert!(said.contains("has not recorded its end: the job runs there"), "{said}");
    assert_eq!(said.matches(" died ").count(), 1, "the first launcher only: {said}");
    on(&mut sandbox, "two");
    second.kill_everything();
    on(&mut sandbox, "one");
    let third = start(&sandbox, "third", &[]);
    assert!(third.said().contains(&format!("resumed from snapshot {newest}")), "{}", third.said());
    assert_eq!(finish(&sandbox, "third", third), unbroken(2));
    sandbox.verify_all();
    on(&mut sandbox, "elsewhere");
    let mut all = endings(&sandbox, &[]);
    // Its launcher may have seen that its job was killed.
    let second = all.remove(2);
    assert!(second == "killed" || second == "failed", "{second}");
    assert_eq!(all, ["killed", "not-started", "complete"]);
    let said = sandbox.ok(["explain"]);
    assert!(said.contains("  resumed ") && said.contains("  complete "), "{said}");
}

/// A machine stands still while a write of its launcher is under way, and the write arrives when the job has gone on and
/// ended elsewhere. Neither the write nor the machine, when it goes on, changes anything.
#[test]
fn a_late_write_of_a_stopped_machine_changes_nothing() {
    for held in ["/job/", "/manifests/"] {
        let service = Service::new();
        let mut sandbox = with_service(&service);
        sandbox.store = format!("s3://{BUCKET}/team").into();
        let state = |sandbox: &mut Sandbox, machine: &str| {
            let dir = sandbox.path().join(machine).display().to_string();
            sandbox.variables.retain(|(name, _)| name != "XDG_STATE_HOME");
            sandbox.variables.push(("XDG_STATE_HOME".to_owned(), dir));
        };
        state(&mut sandbox, "one");
        let mut first = start(&sandbox, "first", &[]);
        step(&sandbox, &mut first);
        let shared = first.checkpoint(&sandbox);
        service.proxy.break_next(1, "PUT", held, Fault::Late);
        let mut asked = sandbox.start("asked", ["checkpoint"]);
        first.until("a write under way", || (service.proxy.held() == 1).then_some(()));
        let all = first.descendants();
        let of_the_job = |signal| all.iter().for_each(|pid| send(*pid, signal));
        first.signal(Signal::STOP);
        of_the_job(Signal::STOP);

        state(&mut sandbox, "two");
        let mut second = start(&sandbox, "second", &[]);
        assert!(second.said().contains(&format!("resumed from snapshot {shared}")), "{}", second.said());
        step(&sandbox, &mut second);
        second.checkpoint(&sandbox);
        assert_eq!(finish(&sandbox, "second", second), unbroken(2));
        service.proxy.deliver();
        first.until("the late write", || (service.proxy.delivered() == 1).then_some(()));
        first.signal(Signal::CONT);
        of_the_job(Signal::CONT);
        // The snapshot of the late manifest exists. Its number is abandoned.
        let is_refused = asked.wait() != 0;
        assert!(is_refused || held == "/manifests/", "{}", asked.said());
        state(&mut sandbox, "one");
        first.until("a refusal", || {
            let said = String::from_utf8(sandbox.call(["checkpoint"]).stderr).unwrap();
            said.contains("another ckpt-run").then_some(())
        });
        first.kill_everything();

        state(&mut sandbox, "three");
        let third = start(&sandbox, "third", &[]);
        assert!(!third.said().contains("resumed"), "it is complete: {}", third.said());
        assert_eq!(finish(&sandbox, "third", third), unbroken(0));
        sandbox.verify_all();
    }
}

/// Two machines with a disk each, which upload the same job to one place.
struct Uploads {
    sandbox: Sandbox,
    url: String,
}

impl Uploads {
    fn new() -> Self {
        let mut sandbox = Sandbox::new();
        fs::create_dir(sandbox.path().join("remote")).unwrap();
        sandbox.variables = vec![("CKPT_JOB".to_owned(), "both".to_owned())];
        let url = format!("file://{}", sandbox.path().join("remote").display());
        Self { sandbox, url }
    }

    fn options(&self) -> [&str; 4] {
        ["--upload", &self.url, "--max-restarts", "5"]
    }

    /// Continues as this machine.
    fn on(&mut self, machine: &str) {
        self.sandbox.store = self.sandbox.path().join(machine);
    }

    /// Starts the job, which has to resume from this snapshot.
    fn resume(&self, name: &str, from: &str) -> Running {
        let job = start(&self.sandbox, name, &self.options());
        assert!(job.said().contains(&format!("resumed from snapshot {from}")), "{}", job.said());
        job
    }

    /// Waits until the object store has only these snapshots.
    fn until_left(&self, job: &mut Running, expected: &[&String]) {
        job.until("pruned uploads", || {
            let mut names = self.manifests();
            names.sort();
            names.iter().eq(expected.iter().copied()).then_some(())
        });
    }

    /// Waits for the upload of a snapshot. The job's record is uploaded after it.
    fn until_uploaded(&self, job: &mut Running, number: u64) {
        job.until("an upload", || {
            let records = fs::read_dir(self.sandbox.path().join("remote/jobs/both/job")).ok()?;
            let of = |name: &str| name.strip_suffix(".json")?.parse::<u64>().ok();
            let names = records.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
            let newest = names.filter_map(|name| of(&name)).max()?;
            let record = self.sandbox.read(&format!("remote/jobs/both/job/{newest}.json"));
            record.contains(&format!(r#""last_sequence":{number},"#)).then_some(())
        });
    }

    /// The manifests that were uploaded.
    fn manifests(&self) -> Vec<String> {
        let manifests = fs::read_dir(self.sandbox.path().join("remote/jobs/both/manifests")).unwrap();
        manifests.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Takes snapshots that stay on this machine, since the other one owns the uploads.
    fn refused_uploads(&self, job: &mut Running) -> Vec<String> {
        let refused = |count: usize| {
            let id = job.checkpoint(&self.sandbox);
            job.until("a refusal", || {
                let said = self.sandbox.read("first.err");
                let refusals = said.matches("but was not uploaded: another ckpt-run (on the machine ");
                (refusals.count() == count).then_some(())
            });
            id
        };
        (1..=3).map(refused).collect()
    }
}

#[test]
fn later_machine_owns_uploads() {
    let mut uploads = Uploads::new();
    uploads.on("one");
    let mut first = start(&uploads.sandbox, "first", &uploads.options());
    let shared = first.checkpoint(&uploads.sandbox);
    uploads.until_uploaded(&mut first, 1);

    uploads.on("broken");
    fails_to_resume(&uploads.sandbox, &uploads.options(), &shared);
    uploads.on("one");
    let shared = first.checkpoint(&uploads.sandbox);
    uploads.until_uploaded(&mut first, 2);

    uploads.on("two");
    let mut second = uploads.resume("second", &shared);
    uploads.on("one");
    let own = uploads.refused_uploads(&mut first);
    is_not_restarted(first);

    uploads.on("two");
    step(&uploads.sandbox, &mut second);
    let newest = second.checkpoint(&uploads.sandbox);
    uploads.until_uploaded(&mut second, 3);
    let names = uploads.manifests();
    let is_uploaded = |id: &String| names.iter().any(|name| name.starts_with(id));
    assert!(names.len() == 3 && is_uploaded(&newest) && !own[1..].iter().any(is_uploaded), "{names:?}");
    second.kill_everything();

    // The first machine resumes from the upload, although its own disk has higher numbers. It does so again when it is
    // started a second time before it has taken a snapshot.
    uploads.on("one");
    for name in ["third", "fourth"] {
        let mut again = uploads.resume(name, &newest);
        let is_told = has_said(&uploads.sandbox, name, "it has continued on another machine").is_some();
        assert_eq!(is_told, name == "third");
        again.kill_everything();
    }
    let mut fifth = start(&uploads.sandbox, "fifth", &uploads.options());
    let on_disk = fifth.checkpoint(&uploads.sandbox);
    fifth.kill_everything();
    let sixth = uploads.resume("sixth", &on_disk);
    assert_eq!(finish(&uploads.sandbox, "sixth", sixth), unbroken(1));
}

/// `prune` deletes uploads too, but for those that machines have marked, and those of a job that another machine may be running.
#[test]
fn prune_deletes_uploads() {
    let mut uploads = Uploads::new();
    let url = uploads.url.clone();
    let upload = ["--upload", &url];
    uploads.on("one");
    let mut first = start(&uploads.sandbox, "first", &[&uploads.options()[..], &["--keep", "9"]].concat());
    let ids = [1, 2, 3, 4].map(|number| {
        let id = first.checkpoint(&uploads.sandbox);
        uploads.until_uploaded(&mut first, number);
        id
    });
    uploads.sandbox.ok(["pin", &ids[1]].iter().chain(&upload));
    let prune = |sandbox: &Sandbox, more: &[&str]| {
        sandbox.ok([&["prune", "--keep", "1"], &upload[..], more].concat())
    };
    let count = |uploads: &Uploads| uploads.manifests().len();
    let said = prune(&uploads.sandbox, &["--dry-run"]);
    assert!(said.contains(&format!("would remove {} of job both\n", ids[0])), "{said}");
    assert_eq!(count(&uploads), 4);
    // Its uploads are on this machine too.
    let said = prune(&uploads.sandbox, &[]);
    assert!(said.contains(&format!("removed {} of job both\n", ids[2])), "{said}");
    assert!(said.contains(&format!("kept {} of job both: pinned", ids[1])), "{said}");
    assert!(!said.contains(&ids[3]), "{said}");
    uploads.until_left(&mut first, &[&ids[1], &ids[3]]);
    assert_eq!(prune(&uploads.sandbox, &[]).matches(&ids[1]).count(), 2, "one line with its remedy");
    first.kill_everything();

    uploads.on("two");
    let mut second = uploads.resume("second", &ids[3]);
    let own = second.checkpoint(&uploads.sandbox);
    uploads.until_uploaded(&mut second, 5);
    second.kill_everything();
    // The first machine does not know what the other one needs.
    uploads.on("one");
    uploads.sandbox.ok(["unpin", &ids[1]].iter().chain(&upload));
    let said = prune(&uploads.sandbox, &[]);
    let stays =
        format!("kept {} of job both in the object store: another machine may be running the job", ids[1]);
    assert!(said.contains(&format!("removed {} of job both from the store on disk", ids[1])), "{said}");
    assert!(said.contains(&stays), "{said}");
    assert_eq!(count(&uploads), 3);
    uploads.on("two");
    let said = prune(&uploads.sandbox, &[]);
    assert!(said.ends_with(&format!("removed {} of job both", ids[3])), "{said}");
    let second = uploads.resume("third", &own);
    assert_eq!(finish(&uploads.sandbox, "third", second), unbroken(0));
    // Of a job that has ended, each machine may delete, and the space is reclaimed.
    uploads.on("one");
    prune(&uploads.sandbox, &[]);
    assert_eq!(count(&uploads), 1);
    let packs = fs::read_dir(uploads.sandbox.path().join("remote/jobs/both/packs")).unwrap();
    let bytes: u64 = packs.map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert!(bytes < 45_000_000, "one snapshot of 37 MB, and not the others too: {bytes}");
}

/// An object store that does not answer is no reason to leave this machine's disk full.
#[test]
fn prune_does_not_need_the_object_store_for_this_machine() {
    let mut uploads = Uploads::new();
    uploads.on("one");
    let mut job = start(&uploads.sandbox, "job", &uploads.options());
    let ids = [1, 2].map(|number| {
        let id = job.checkpoint(&uploads.sandbox);
        uploads.until_uploaded(&mut job, number);
        id
    });
    let (remote, away) = (uploads.sandbox.path().join("remote"), uploads.sandbox.path().join("away"));
    fs::rename(&remote, &away).unwrap();
    fs::write(&remote, "").unwrap();
    let output = uploads.sandbox.call(["prune", "--keep", "1", "--upload", &uploads.url]);
    let (printed, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(
        output.status.code() == Some(1) && said.contains("in the object store are not deleted"),
        "{said}"
    );
    assert!(printed.contains(&format!("removed {}", ids[0])), "{printed}");
    assert_eq!(uploads.sandbox.snapshots(), [&*ids[1]]);
    fs::remove_file(&remote).unwrap();
    fs::rename(&away, &remote).unwrap();
    assert_eq!(uploads.manifests().len(), 2);
    assert_eq!(finish(&uploads.sandbox, "job", job), unbroken(0));
}

/// One machine marks a snapshot as kept, another one prunes the uploads.
#[test]
fn a_pinned_snapshot_is_kept_by_other_machines() {
    let mut uploads = Uploads::new();
    uploads.sandbox.variables.push(("CKPT_KEEP".to_owned(), "1".to_owned()));
    let url = uploads.url.clone();
    let upload = ["--upload", &url];
    uploads.on("one");
    let mut first = start(&uploads.sandbox, "first", &uploads.options());
    let [pinned, tagged, plain] = [1, 2, 3].map(|number| {
        let id = first.checkpoint(&uploads.sandbox);
        match number {
            1 => drop(uploads.sandbox.ok(["pin", &id].iter().chain(&upload))),
            2 => drop(uploads.sandbox.ok(["tag", &id, "good"].iter().chain(&upload))),
            _ => {}
        }
        uploads.until_uploaded(&mut first, number as u64);
        id
    });
    first.kill_everything();

    uploads.on("two");
    let mut second = uploads.resume("second", &plain);
    let more = [4, 5].map(|number| {
        let id = second.checkpoint(&uploads.sandbox);
        uploads.until_uploaded(&mut second, number);
        id
    });
    uploads.until_left(&mut second, &[&pinned, &tagged, &more[1]]);
    // What others keep is not deleted by a command either, nor by one that knows the object store only.
    let kept = |arguments: &[&str]| {
        let output = uploads.sandbox.call(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("nothing was deleted") && said.contains(&pinned), "{said}");
    };
    kept(&[&["rm", &pinned][..], &upload].concat());
    kept(&["rm", "--dry-run", &pinned, "--store", &url]);
    // The mark of a machine is its own.
    uploads.sandbox.ok(["pin", &pinned].iter().chain(&upload));
    let unpinned = uploads.sandbox.call(["unpin", &pinned].iter().chain(&upload));
    let said = String::from_utf8_lossy(&unpinned.stderr).into_owned();
    assert!(unpinned.status.success() && said.contains("unpin --all-machines"), "{said}");
    let another = second.checkpoint(&uploads.sandbox);
    uploads.until_left(&mut second, &[&pinned, &tagged, &another]);
    uploads.on("one");
    let unpinned = uploads.sandbox.call(["unpin", &pinned].iter().chain(&upload));
    assert!(unpinned.status.success() && !String::from_utf8_lossy(&unpinned.stderr).contains("unpin --all"));
    uploads.on("two");
    let last = second.checkpoint(&uploads.sandbox);
    uploads.until_left(&mut second, &[&tagged, &last]);
    // The other machine may be gone.
    uploads.sandbox.ok(["unpin", "--all-machines", &tagged].iter().chain(&upload));
    let last = second.checkpoint(&uploads.sandbox);
    uploads.until_left(&mut second, &[&last]);
    let second = finish(&uploads.sandbox, "second", second);
    assert_eq!(second, unbroken(0));
}

/// A tag that one machine sets is a name of the snapshot on the others, and the one that is set last counts.
#[test]
fn a_tag_is_known_on_other_machines() {
    let mut uploads = Uploads::new();
    uploads.sandbox.variables.push(("CKPT_KEEP".to_owned(), "1".to_owned()));
    let url = uploads.url.clone();
    let call = |uploads: &Uploads, words: &[&str]| {
        let output = uploads.sandbox.call(words.iter().copied().chain(["--upload", &*url]));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned() + &said)
    };
    let named = |uploads: &Uploads, tag: &str| {
        let (code, shown) = call(uploads, &["show", "--json", tag]);
        assert_eq!(code, Some(0), "{shown}");
        serde_json::from_str::<serde_json::Value>(&shown).unwrap()["id"].as_str().unwrap().to_owned()
    };
    uploads.on("one");
    let mut first = start(&uploads.sandbox, "first", &uploads.options());
    let tagged = first.checkpoint(&uploads.sandbox);
    uploads.until_uploaded(&mut first, 1);
    let (code, said) = call(&uploads, &["tag", &tagged, "good"]);
    assert_eq!(code, Some(0), "{said}");
    step(&uploads.sandbox, &mut first);
    first.checkpoint(&uploads.sandbox);
    uploads.until_uploaded(&mut first, 2);
    first.kill_everything();

    uploads.on("two");
    let mut second =
        start(&uploads.sandbox, "second", &[&uploads.options()[..], &["--resume", "good"]].concat());
    assert!(second.said().contains(&format!("resumed from snapshot {tagged}")), "{}", second.said());
    assert_eq!(named(&uploads, "good"), tagged);
    let (_, listed) = call(&uploads, &["ls", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed[0]["tags"][0], "good", "{listed}");
    let (code, said) = call(&uploads, &["rm", &tagged]);
    assert!(code == Some(2) && said.contains("has the tag"), "{said}");
    let newer = second.checkpoint(&uploads.sandbox);
    uploads.until_uploaded(&mut second, 3);
    let (code, said) = call(&uploads, &["tag", &newer, "good"]);
    assert!(code == Some(0) && said.contains(&format!("has moved from {tagged} to {newer}")), "{said}");
    uploads.on("one");
    assert_eq!(named(&uploads, "good"), newer);
    // What else one says of the other snapshot does not bring the tag back.
    let (code, said) = call(&uploads, &["pin", &tagged]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(named(&uploads, "good"), newer);
    // The machine that has set it lets go.
    uploads.on("two");
    let (code, said) = call(&uploads, &["unpin", "--all-machines", &tagged]);
    assert_eq!(code, Some(0), "{said}");
    let last = second.checkpoint(&uploads.sandbox);
    uploads.until_left(&mut second, &[&newer, &last]);
    let (code, said) = call(&uploads, &["untag", &newer, "good"]);
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = call(&uploads, &["show", "good"]);
    assert!(code == Some(2) && said.contains("good"), "{said}");
    assert_eq!(finish(&uploads.sandbox, "second", second), unbroken(0));
}

/// A mark that the retention of another machine has not seen is not confirmed.
#[test]
fn a_mark_that_comes_too_late_is_told() {
    let mut uploads = Uploads::new();
    let url = uploads.url.clone();
    uploads.on("one");
    let mut job = start(&uploads.sandbox, "first", &uploads.options());
    let id = job.checkpoint(&uploads.sandbox);
    uploads.until_uploaded(&mut job, 1);
    // What retention of another machine writes before it deletes.
    let records = uploads.sandbox.path().join("remote/jobs/both");
    let any = StoreRoot::open_or_create(&uploads.sandbox.path().join("any")).unwrap();
    let remote = any.job(&JobKey::named("both").unwrap()).with_content_in(Arc::new(DirMedium::new(records)));
    let deletes_the_first = |record: Option<JobRecord>| {
        Ok::<_, OpenError>(record.map(|record| JobRecord { deleted: [1].into(), ..record }))
    };
    remote.change_record(deletes_the_first).unwrap();
    let manifest = uploads.sandbox.path().join("one/jobs/both/manifests").join(&id);
    for (is_here, code, words) in [
        (true, Some(0), "is kept on this machine, but is being deleted from the object store"),
        (false, Some(2), "is being deleted: the mark has come too late"),
    ] {
        if !is_here {
            fs::remove_file(&manifest).unwrap();
        }
        for command in [&["pin", &*id][..], &["tag", &id, "good"]] {
            let output = uploads.sandbox.call(command.iter().copied().chain(["--upload", &*url]));
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.code() == code && said.contains(words), "{command:?}: {said}");
        }
    }
    assert_eq!(finish(&uploads.sandbox, "first", job), unbroken(0));
}

/// Retention records what it deletes, and then looks at the marks once more: a mark that is set in between counts, also if it
/// was not confirmed.
#[test]
fn a_mark_that_is_set_before_a_deletion_counts() {
    for is_upload in [false, true] {
        let mut uploads = Uploads::new();
        uploads.sandbox.variables.push(("CKPT_KEEP".to_owned(), "1".to_owned()));
        let hold = uploads.sandbox.path().join("hold");
        let point = if is_upload { "upload-deletion-recorded" } else { "deletion-recorded" };
        let fault = format!("{point}=hold:{}", hold.display());
        uploads.sandbox.variables.push(("CKPT_FAULT".to_owned(), fault));
        let url = uploads.url.clone();
        uploads.on("one");
        let options = if is_upload { uploads.options().to_vec() } else { Vec::new() };
        let mut job = start(&uploads.sandbox, "first", &options);
        let id = job.checkpoint(&uploads.sandbox);
        if is_upload {
            uploads.until_uploaded(&mut job, 1);
        }
        fs::write(&hold, "").unwrap();
        let mut asked = uploads.sandbox.command(["checkpoint"]).spawn().unwrap();
        job.until("what is deleted is recorded", || {
            has_said(&uploads.sandbox, "first", &format!("fault point {point}"))
        });
        let pin =
            ["pin", &*id].into_iter().chain(is_upload.then_some(["--upload", &url]).into_iter().flatten());
        let pinned = uploads.sandbox.call(pin);
        let said = String::from_utf8_lossy(&pinned.stderr).into_owned();
        assert!(pinned.status.code() == Some(2) && said.contains("is being deleted"), "{said}");
        fs::remove_file(&hold).unwrap();
        assert!(asked.wait().unwrap().success());
        // The next deletion comes after this one.
        let last = job.checkpoint(&uploads.sandbox);
        let is_kept = || {
            let kept = if is_upload { uploads.manifests() } else { uploads.sandbox.snapshots() };
            (kept.len() == 2 && kept.contains(&id) && kept.contains(&last)).then_some(())
        };
        job.until("the marked and the last one are left", is_kept);
        assert_eq!(finish(&uploads.sandbox, "first", job), unbroken(0));
    }
}
