//! What ckpt-run says so that nobody is misled: changed scripts and command lines, complete jobs, stores of other users,
//! jobs that cannot be read, how a job ended, what it wrote before, and what a tag names.

use crate::supervisor::{touch, until_ready};
use ckpt_run_tests::packs::objects;
use ckpt_run_tests::{Running, Sandbox, python, schema, until};
use rustix::process::Signal;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

/// Runs until there is `go`, with the file `needed` open.
const JOB: &str = r#"
import os, time
held = open("needed")
open("ready", "w").close()
while not os.path.exists("go"): time.sleep(0.02)
"#;

fn start(sandbox: &Sandbox, name: &str, last: &str) -> Running {
    let python = python();
    let options = ["--job", "named", "--files", "off", "--", python.to_str().unwrap(), "train.py", last];
    sandbox.start(name, options)
}

fn prepared() -> (Sandbox, Running) {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path().join("train.py"), JOB).unwrap();
    touch(&sandbox, "needed");
    let mut job = start(&sandbox, "job", "--lr=1");
    until_ready(&mut job, &sandbox);
    (sandbox, job)
}

/// A command has ended with that exit code, and has said so.
fn is_answered(output: std::process::Output, code: i32, expected: &str) {
    let said =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.code() == Some(code) && said.contains(expected), "{:?}: {said}", output.status);
}

#[test]
fn a_start_that_passes_over_snapshots_says_so() {
    let (sandbox, mut job) = prepared();
    let id = job.checkpoint(&sandbox);
    job.kill_everything();
    let python = python();
    let command = ["--job", "named", "--files", "off", "--", python.to_str().unwrap(), "train.py", "--lr=1"];
    // It is killed before its first snapshot.
    let mut job = sandbox.start("fresh", ["--resume", "never"].into_iter().chain(command));
    job.until_answering(&sandbox);
    job.kill_everything();
    let mut job = sandbox.start("again", command);
    job.until_answering(&sandbox);
    let said = job.said();
    assert!(
        said.contains(&format!(
            "its newest run has no snapshot yet. There are snapshots of runs before: `--resume {id}`"
        )),
        "{said}"
    );
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
}

/// The old process is resumed: neither the new code nor the new arguments have an effect.
#[test]
fn changes_without_effect_are_named() {
    let (sandbox, mut job) = prepared();
    job.checkpoint(&sandbox);
    job.kill_everything();
    let mut job = start(&sandbox, "unchanged", "--lr=1");
    job.until_answering(&sandbox);
    assert!(!job.said().contains("--resume never"), "{}", job.said());
    job.kill_everything();
    fs::write(sandbox.path().join("train.py"), format!("{JOB}print('new')")).unwrap();
    let mut job = start(&sandbox, "changed", "--lr=2");
    job.until_answering(&sandbox);
    let id = job.checkpoint(&sandbox);
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
    let said = job.said();
    assert!(said.contains("train.py has changed since the job was started: a resumed job runs the code that it had loaded. To start from the beginning instead: --resume never"), "{said}");
    assert!(said.contains("train.py --lr=1`, and resumes as that: what differs in"), "{said}");
    let told = sandbox.ok(["explain", "--all"]);
    assert_eq!(told.matches("  note         ").count(), 2, "{told}");
    assert!(sandbox.ok(["show", &id]).contains("train.py --lr=1"), "the snapshot is of the old command");
    let mut job = start(&sandbox, "again", "--lr=2");
    assert_eq!(job.wait(), 0);
    assert!(
        job.said().contains("it was complete, as it had ended with 0, and starts again"),
        "{}",
        job.said()
    );
}

/// The name alone says which job it is.
#[test]
fn a_job_that_resumes_in_another_directory_says_where() {
    let sandbox = Sandbox::new();
    let other = sandbox.path().join("other");
    fs::create_dir(&other).unwrap();
    let job = ["--job", "named", "--", "sh", "-c", "while [ ! -e go ]; do sleep 0.05; done; echo > ended"];
    let in_other = |name: &str| {
        let mut command = sandbox.command(job);
        command.current_dir(&other);
        sandbox.start_command(name, command)
    };
    let mut first = sandbox.start("first", job);
    first.until_answering(&sandbox);
    first.checkpoint(&sandbox);
    first.kill_everything();
    let mut second = in_other("second");
    second.until_answering(&sandbox);
    let said = second.said();
    let here = format!(
        "the job was started in {}, and resumes there: nothing of it is done in {}",
        sandbox.path().display(),
        other.display()
    );
    assert!(said.contains(&here), "{said}");
    // Its next snapshot is of the job in its own directory, too.
    second.checkpoint(&sandbox);
    second.kill_everything();
    let mut third = sandbox.start("third", job);
    third.until_answering(&sandbox);
    assert!(!third.said().contains("was started in"), "{}", third.said());
    touch(&sandbox, "go");
    assert_eq!(third.wait(), 0, "{}", third.said());
    assert!(sandbox.path().join("ended").exists());
}

/// A failed resume and a preemption are neither a failure of the job nor a kill.
#[test]
fn how_a_job_ended_is_told() {
    let (sandbox, mut job) = prepared();
    let text = sandbox.ok(["status", "--json"]);
    assert_eq!(text.matches("\"job\":").count(), 1, "{text}");
    job.signal(Signal::TERM);
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert!(sandbox.ok(["status"]).contains("named: stopped; run it again to resume, 1 snapshot"));
    assert_eq!(sandbox.json(["status", "--json"])[0]["outcome"]["state"], "stopped");
    assert!(!sandbox.ok(["explain"]).contains("died"));
    let mut job = start(&sandbox, "second", "--lr=1");
    job.until_answering(&sandbox);
    job.kill_everything();
    assert!(sandbox.ok(["status"]).contains("died with its launcher"));
    fs::rename(sandbox.path().join("needed"), sandbox.path().join("away")).unwrap();
    let mut job = start(&sandbox, "third", "--lr=1");
    assert_ne!(job.wait(), 0, "{}", job.said());
    let told = sandbox.ok(["explain"]);
    let (died, failed) = (told.find("  died  ").unwrap(), told.find("  not started  ").unwrap());
    assert!(died < failed && told.matches("  died  ").count() == 1, "{told}");
    assert!(sandbox.ok(["status"]).contains("could not be started or resumed"));
}

/// One damaged job is named, and the others are served.
#[test]
fn a_job_that_cannot_be_read_blocks_no_other() {
    let sandbox = Sandbox::new();
    for name in ["broken", "whole"] {
        sandbox.ok(["--job", name, "--", "true"]);
    }
    let records = fs::read_dir(sandbox.store.join("jobs/broken/job")).unwrap();
    records.for_each(|record| fs::write(record.unwrap().path(), "damaged").unwrap());
    let output = sandbox.call(["status"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("whole: complete") && said.contains("broken: cannot be read: "), "{said}");
    assert_eq!(output.status.code(), Some(1));
    for command in [&["explain"][..], &["prune", "--keep", "1"]] {
        let output = sandbox.call(command);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("the job broken is left out: "), "{command:?}: {said}");
        assert_eq!(output.status.code(), Some(1), "{command:?}");
    }
    assert!(String::from_utf8_lossy(&sandbox.call(["explain"]).stdout).contains("whole\n"));
    assert_eq!(sandbox.call(["status", "broken"]).status.code(), Some(2), "alone, it is the error");
}

/// With sudo: root's files in the store would shut its owner out.
#[test]
fn root_does_not_take_over_a_users_store() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    const USER: u32 = 64_124;
    let mut sandbox = Sandbox::new();
    sandbox.variables.push(("SUDO_UID".to_owned(), USER.to_string()));
    sandbox.ok(["--job", "theirs", "--", "true"]);
    for path in [sandbox.path(), &sandbox.store] {
        chown(path, Some(USER), None).unwrap();
    }
    assert!(sandbox.ok(["status"]).contains("theirs: complete"), "reading changes nothing");
    for command in [&["--", "true"][..], &["--job", "theirs", "--", "true"], &["prune"]] {
        let output = sandbox.call(command);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command:?}: {said}");
        assert!(
            said.contains("belongs to user 64124") && said.contains("`sudo -u '#64124' ckpt-run …`"),
            "{said}"
        );
    }
    let trusted = sandbox.store.display().to_string();
    assert!(fs::read_dir(sandbox.store.join("jobs")).unwrap().count() == 1, "nothing was made");
    sandbox.ok(["--trust", &trusted, "--", "true"]);
}

/// What was meant is in the message.
#[test]
fn mistakes_are_answered_with_what_was_meant() {
    let (sandbox, mut job) = prepared();
    is_answered(sandbox.call(["train.py"]), 127, "Did you mean `ckpt-run python3 train.py`?");
    is_answered(sandbox.call(["./train.py"]), 126, "Did you mean `ckpt-run python3 ./train.py`?");
    is_answered(sandbox.call(["--store", "s3:/models/a", "ls"]), 2, "Did you mean s3://models/a?");
    let mistyped = sandbox.command(["config"]).env("CKPT_INTREVAL", "5m").output().unwrap();
    is_answered(
        mistyped,
        0,
        "CKPT_INTREVAL is no option of ckpt-run and is ignored. Did you mean CKPT_INTERVAL?",
    );
    let first = job.checkpoint(&sandbox);
    let other = sandbox.call(["--job", "other", "--resume", &first, "--", "true"]);
    is_answered(
        other,
        2,
        &format!("the snapshot {first} is of the job named, and this command is the job other"),
    );
    let export = sandbox.call(["export", &first, "--format", "safetensors"]);
    is_answered(export, 2, "has no device memory");
    assert!(sandbox.ok(["ps"]).contains("named"), "a running job of this user");
    sandbox.ok(["pin", &first]);
    job.checkpoint(&sandbox);
    let pruned = sandbox.ok(["prune", "--keep", "1"]);
    assert!(pruned.contains(&format!("kept {first} of job named: pinned")), "{pruned}");
    assert!(sandbox.store.join(".gitignore").exists());
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains("job named: 2 snapshots (paused for "), "{}", job.said());
}

/// Of two snapshots the older one is resumed: the newer one does not keep the job from starting at its beginning.
#[test]
fn the_last_snapshot_to_resume_from_is_kept_and_named() {
    let (sandbox, mut job) = prepared();
    let ids = [job.checkpoint(&sandbox), job.checkpoint(&sandbox)];
    job.kill_everything();
    let mut job = sandbox.start(
        "older",
        ["--resume", "1", "--job", "named", "--files", "off", "--"].into_iter().chain([
            python().to_str().unwrap(),
            "train.py",
            "--lr=1",
        ]),
    );
    job.until_answering(&sandbox);
    let listed = sandbox.ok(["ls"]);
    let line = |id: &str| listed.lines().find(|line| line.starts_with(id)).unwrap().to_owned();
    assert!(line(&ids[0]).ends_with("committed"), "{listed}");
    assert!(line(&ids[1]).contains("abandoned: the job was resumed from an older one"), "{listed}");
    job.kill_everything();
    assert!(sandbox.ok(["status"]).contains("died with its launcher; run it again to resume, 2 snapshots"));
    let refused = sandbox.call(["rm", &ids[0]]);
    is_answered(refused, 2, "is the last snapshot from which the job named can be resumed");
    let whole = sandbox.call(["rm", "--whole-job", "named"]);
    is_answered(whole, 2, "it is running, was preempted, or its launcher was killed");
    sandbox.ok(["rm", &ids[1]]);
    sandbox.ok(["rm", "--force", &ids[0]]);
    let status = sandbox.ok(["status"]);
    assert!(status.contains("run it again to start from the beginning: there is no snapshot"), "{status}");
    let told = sandbox.ok(["explain"]);
    assert!(told.contains("run the same command again: it starts from the beginning"), "{told}");
}

/// A resume cuts the log of the job to its length at the snapshot, where ckpt-run has written too since.
#[test]
fn what_ckpt_run_says_stays_in_the_log_of_the_job() {
    const COUNT: &str = r#"
import os, sys, time
for number in range(10**9):
    print("step", number, file=sys.stderr, flush=True)
    if os.path.exists("fail"): os.remove("fail"); sys.exit(3)
    if os.path.exists("go"): break
    time.sleep(0.02)
"#;
    let sandbox = Sandbox::new();
    let python = python();
    let command = ["--max-restarts", "1", "--", python.to_str().unwrap(), "-c", COUNT];
    let mut job = sandbox.start("job", command);
    job.until_answering(&sandbox);
    job.checkpoint(&sandbox);
    let log = || sandbox.read("job.err");
    let steps = |log: &str| log.lines().filter(|line| line.starts_with("step ")).count();
    let then = steps(&log());
    job.until("more steps", || (steps(&log()) > then + 20).then_some(()));
    job.kill_everything();
    let mut job = sandbox.start("job", command);
    job.until_answering(&sandbox);
    assert!(log().contains("resuming from snapshot"), "before the cut: {}", log());
    touch(&sandbox, "fail");
    job.until("the restart", || log().contains("restart 1 of the job").then_some(()));
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", log());
    let log = log();
    assert!(log.contains("the job failed: it ended with exit code 3. Restart 1"), "before the cut: {log}");
    let numbers: Vec<_> = log.lines().filter_map(|line| line.strip_prefix("step ")).collect();
    let expected: Vec<_> = (0..numbers.len()).map(|number| number.to_string()).collect();
    assert_eq!(numbers, expected, "each step once: {log}");
}

/// Most come from variables of a script that are not set.
#[test]
fn values_that_are_empty_or_negative_are_refused() {
    let (sandbox, mut job) = prepared();
    job.kill_everything();
    for (arguments, why) in [
        (&["--job", "", "--", "true"][..], "the name of a job is empty"),
        (&["ls", "--job", ""], "the name of a job is empty"),
        (&["prune", "--keep", "-3"], "\"-3\" (command line): this must be a number from 1"),
        (&["verify", ""], "the ID of the snapshot is empty"),
    ] {
        is_answered(sandbox.call(arguments), 2, why);
    }
}

#[test]
fn a_full_output_is_not_the_disk_of_the_store() {
    let sandbox = Sandbox::new();
    sandbox.ok(["--", "true"]);
    for arguments in [&["status"][..], &["config"], &["status", "--json"]] {
        let mut command = sandbox.command(arguments);
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let output = command.stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("cannot write to stdout") && !said.contains("prune"), "{arguments:?}: {said}");
        assert_eq!(output.status.code(), Some(1), "{said}");
    }
}

/// A launcher that is stopped, or that waits for a disk, does not keep commands waiting.
#[test]
fn a_launcher_that_does_not_answer_is_named() {
    let (sandbox, mut job) = prepared();
    job.until_answering(&sandbox);
    let id = job.checkpoint(&sandbox);
    job.signal(Signal::STOP);
    let sandbox = &sandbox;
    let [status, listed, logs, running] = std::thread::scope(|scope| {
        [&["status"][..], &["ls"], &["logs"], &["ps"]]
            .map(|arguments| scope.spawn(move || sandbox.call(arguments)))
            .map(|call| call.join().unwrap())
    });
    let mut asking = sandbox.start_command("asking", sandbox.command(["checkpoint"]));
    asking.until("a word", || sandbox.read("asking.err").contains("is stopped: waiting").then_some(()));
    job.signal(Signal::CONT);
    assert_eq!(asking.wait(), 0, "{}", asking.said());
    is_answered(status, 0, "launcher         does not answer");
    is_answered(listed, 0, &id);
    is_answered(running, 0, "does not answer: it is stopped");
    assert!(logs.status.code().is_some());
    touch(sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
}

/// `checkpoint` and `stop` wait for a job that is being resumed.
#[test]
fn a_job_that_is_being_resumed_is_waited_for() {
    let (mut sandbox, mut job) = prepared();
    job.until_answering(&sandbox);
    job.checkpoint(&sandbox);
    let hold = format!("load-images=hold:{}", sandbox.path().join("hold").display());
    sandbox.variables.push(("CKPT_FAULT".to_owned(), hold));
    for command in ["checkpoint", "stop"] {
        job.kill_everything();
        touch(&sandbox, "hold");
        let has_said = |name: String, what| sandbox.read(&format!("{name}.err")).contains(what).then_some(());
        job = start(&sandbox, &format!("before-{command}"), "--lr=1");
        job.until("a resume", || has_said(format!("before-{command}"), "load-images"));
        let mut call = sandbox.start(command, [command]);
        call.until("a message", || has_said(command.to_owned(), "is being started or resumed"));
        fs::remove_file(sandbox.path().join("hold")).unwrap();
        assert_eq!(call.wait(), 0, "{}{}", call.said(), job.said());
        assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
    }
    assert_eq!(job.wait(), 75, "{}", job.said());
}

/// What a command does, and its exit code, do not depend on a reader of its output.
#[test]
fn commands_whose_reader_is_gone_do_their_work() {
    let (sandbox, mut job) = prepared();
    let ids: Vec<_> = (0..3).map(|_| job.checkpoint(&sandbox)).collect();
    job.kill_everything();
    let unread = |arguments: &[&str]| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        sandbox.command(arguments).stdout(writer).status().unwrap().code()
    };
    assert_eq!(unread(&["rm", &ids[0], &ids[1]]), Some(0));
    assert_eq!(sandbox.snapshots(), ids[2..]);
    for path in objects(&sandbox) {
        if path.extension().is_some_and(|extension| extension == "pack") {
            let mut pack = fs::read(&path).unwrap();
            let middle = pack.len() / 2;
            pack[middle..].iter_mut().for_each(|byte| *byte ^= 1);
            fs::write(&path, pack).unwrap();
        }
    }
    for options in [&["verify", "--all"][..], &["verify", "--all", "--json"]] {
        assert_eq!(unread(options), Some(1));
    }
}

/// `ckpt-run CMD | head`: without its reader, a job that then fails is over.
#[test]
fn a_closed_pipe_is_final() {
    let sandbox = Sandbox::new();
    let script = ": > ready; while echo x; do sleep 0.02; done";
    let mut command = sandbox.command(["--max-restarts", "9", "--", "sh", "-c", script]);
    let log = fs::File::create(sandbox.path().join("job.err")).unwrap();
    let mut child = command
        .env_remove("CKPT_MAX_RESTARTS")
        .stdout(std::process::Stdio::piped())
        .stderr(log)
        .spawn()
        .unwrap();
    let reader = child.stdout.take();
    // With a snapshot, the failure is not that of a first start.
    until("a snapshot", || sandbox.call(["checkpoint"]).status.success().then_some(()));
    drop(reader);
    let status = until("the end of ckpt-run", || child.try_wait().unwrap());
    let said = sandbox.read("job.err");
    assert!(!status.success() && !said.contains("Restart 1"), "{status}: {said}");
    assert!(said.contains("after the reader of its output had closed it: it is not restarted"), "{said}");
}

/// Fails once, with a traceback, and then ends well.
const FAILS_ONCE: &str = r#"
import os, sys, time
print("loading", flush=True)
open("ready", "w").close()
while not os.path.exists("go"): time.sleep(0.02)
if not os.path.exists("failed"):
    open("failed", "w").close()
    raise ValueError("the loss is not a number")
print("accuracy 0.93", flush=True)
"#;

/// A resume cuts the traceback off the user's log: it is still told.
#[test]
fn what_a_job_wrote_before_it_failed_is_told() {
    let sandbox = Sandbox::new();
    let python = python();
    fs::write(sandbox.path().join("train.py"), FAILS_ONCE).unwrap();
    let arguments = ["--files", "off", "--", python.to_str().unwrap(), "train.py"];
    let mut command = sandbox.command(arguments);
    command.env("CKPT_MAX_RESTARTS", "1");
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    job.checkpoint(&sandbox);
    let now = sandbox.ok(["logs"]);
    assert!(now.contains("  now                   output       loading\n"), "{now}");
    let log = sandbox.path().join("job.out").canonicalize().unwrap();
    assert!(now.contains(&format!("the output of the job: {}\n", log.display())), "{now}");
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(!job.said().contains("not a number"), "the resume has cut it off: {}", job.said());
    let told = sandbox.ok(["explain"]);
    let shown =
        ["\n                        output       ", "ValueError: the loss is not a number\n", "  failed  "];
    let at: Vec<_> = shown.iter().map(|text| told.find(text).expect(&told)).collect();
    assert!(at.is_sorted() && !told.contains("accuracy"), "{told}");
    let logs = sandbox.ok(["logs"]);
    let shown = [
        "  started  ",
        "ValueError: the loss is not a number\n",
        "  failed  ",
        "  resumed  ",
        "accuracy 0.93\n",
    ];
    let at: Vec<_> = shown.iter().map(|text| logs.find(text).expect(&logs)).collect();
    assert!(at.is_sorted() && logs.contains("  complete  "), "{logs}");
    assert!(logs.contains("what a resume took from files of the job"), "{logs}");
    schema::check("logs", &sandbox.json(["logs", "--json"]));
}

/// What a job wrote before it was stopped is in `logs`, and no reason of a failure.
#[test]
fn the_output_of_a_stopped_job_is_before_its_end() {
    let sandbox = Sandbox::new();
    let python = python();
    fs::write(sandbox.path().join("train.py"), FAILS_ONCE).unwrap();
    let mut job = sandbox.start("job", ["--files", "off", "--", python.to_str().unwrap(), "train.py"]);
    until_ready(&mut job, &sandbox);
    sandbox.ok(["stop"]);
    assert_eq!(job.wait(), 75, "{}", job.said());
    let journal = fs::read_to_string(sandbox.job_dir().join("journal.jsonl")).unwrap();
    let at = ["\"output\"", "\"ended\""].map(|kind| journal.find(kind).expect(&journal));
    assert!(at.is_sorted(), "{journal}");
    assert!(sandbox.ok(["logs"]).contains("  output       loading\n"));
    let told = sandbox.ok(["explain"]);
    assert!(told.contains("  ended  ") && !told.contains("loading"), "{told}");
}

/// In an encrypted store, nothing that the job has written is in the clear.
#[test]
fn what_a_job_wrote_is_not_beside_encrypted_snapshots() {
    let sandbox = Sandbox::new();
    let key = sandbox.path().join("key");
    fs::write(&key, (0..32).collect::<Vec<u8>>()).unwrap();
    fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
    let arguments = ["--encrypt-key-file", "key", "--", "sh", "-c", "echo secret$((40 + 2)); exit 3"];
    let output = sandbox.call(arguments);
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    let journal = fs::read_to_string(sandbox.job_dir().join("journal.jsonl")).unwrap();
    assert!(journal.contains("\"failed\"") && !journal.contains("secret42"), "{journal}");
}

/// A tag moves, as the user meant it to, and its former snapshot is named: it is no longer kept.
#[test]
fn a_tag_names_one_snapshot() {
    let (sandbox, mut job) = prepared();
    let ids = [job.checkpoint(&sandbox), job.checkpoint(&sandbox)];
    sandbox.ok(["tag", &ids[0], "best"]);
    let kept = sandbox.ok(["prune", "--keep", "1", "--dry-run"]);
    assert!(kept.contains("it has the tag best") && kept.contains("nothing to remove"), "{kept}");
    assert!(!kept.contains("no job has more"), "one has: {kept}");
    let moved = sandbox.call(["tag", &ids[1], "best"]);
    let said = String::from_utf8_lossy(&moved.stderr);
    assert!(
        moved.status.success() && said.contains(&format!("moved from {} to {}", ids[0], ids[1])),
        "{said}"
    );
    assert_eq!(sandbox.json(["show", "best", "--json"])["id"], *ids[1]);
    assert!(sandbox.ok(["prune", "--keep", "1", "--dry-run"]).contains(&format!("would remove {}", ids[0])));
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
}

/// Nothing of a job that runs or may be resumed is deleted, and all of one that is complete.
#[test]
fn a_complete_job_is_deleted_as_a_whole() {
    let (sandbox, mut job) = prepared();
    let id = job.checkpoint(&sandbox);
    let jobs = sandbox.path().join(".ckpt-run/jobs");
    let refused = |arguments: &[&str], why: &str| {
        let output = sandbox.call(["rm", "--whole-job"].iter().chain(arguments));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(why), "{why}: {said}");
        assert!(jobs.join("named/manifests").join(&id).exists());
    };
    refused(&["named"], "is running");
    job.kill_everything();
    refused(&["named"], "is not complete");
    refused(&["named", "--force"], "is not complete");
    let mut job = start(&sandbox, "again", "--lr=1");
    job.until_answering(&sandbox);
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
    // A job that is not complete keeps the others named with it.
    let mut failing = sandbox.start("failing", ["--job", "failing", "--max-restarts", "0", "--", "false"]);
    assert_ne!(failing.wait(), 0);
    refused(&["named", "--whole-job", "failing"], "failing is not complete");
    sandbox.ok(["pin", &id]);
    refused(&["named"], "pinned");
    let told = sandbox.ok(["rm", "--whole-job", "named", "--force", "--dry-run"]);
    assert!(
        told.contains(&format!("would remove {id} of job named")) && told.contains("would remove the job"),
        "{told}"
    );
    assert!(jobs.join("named/journal.jsonl").exists());
    let told = sandbox.ok(["rm", "--whole-job", "named", "--force"]);
    assert!(told.contains(&format!("removed {id} of job named")), "{told}");
    let names = |dir: &str| {
        let entries = fs::read_dir(jobs.join(dir)).unwrap().map(|entry| entry.unwrap().file_name());
        entries.collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(names("named"), ["job", "lock", "marks"].map(Into::into).into(), "the records stay");
    assert!(names("named/job").len() > 1, "numbers stay taken");
    // What is left after an interruption is deleted by the same command.
    let whole = ["rm", "--whole-job", "named"];
    fs::create_dir_all(jobs.join("named/kept/of")).unwrap();
    sandbox.ok(whole);
    assert!(!jobs.join("named/kept").exists());
    let output = sandbox.call(whole);
    assert!(String::from_utf8_lossy(&output.stderr).contains("there is no job \"named\""), "{output:?}");
    let left = sandbox.json(["status", "--json"]);
    assert_eq!((left.as_array().unwrap().len(), &left[0]["job"]), (1, &"failing".into()), "{left}");
    fs::remove_file(sandbox.path().join("go")).unwrap();
    fs::remove_file(sandbox.path().join("ready")).unwrap();
    let mut job = start(&sandbox, "anew", "--lr=1");
    until_ready(&mut job, &sandbox);
    assert!(!job.said().contains("it was complete"), "{}", job.said());
    assert_eq!(job.checkpoint(&sandbox)[..6], *"000002", "numbers go on");
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
}

/// A snapshot that is marked while it is removed is gone, and the command that marks it says so.
#[test]
fn a_mark_during_a_removal_comes_too_late() {
    let (sandbox, mut job) = prepared();
    let [removed, other] = [job.checkpoint(&sandbox), job.checkpoint(&sandbox)];
    job.kill_everything();
    let hold = sandbox.path().join("hold");
    fs::write(&hold, "").unwrap();
    let mut command = sandbox.command(["rm", &removed]);
    command.env("CKPT_FAULT", format!("removal-recorded=hold:{}", hold.display()));
    let mut held = sandbox.start_command("held", command);
    held.until("the removal", || {
        sandbox.read("held.err").contains("fault point removal-recorded").then_some(())
    });
    let late = sandbox.call(["pin", &removed]);
    assert_eq!(late.status.code(), Some(2), "{late:?}");
    assert!(String::from_utf8_lossy(&late.stderr).contains("too late"), "{late:?}");
    sandbox.ok(["pin", &other]);
    fs::remove_file(&hold).unwrap();
    assert_eq!(held.wait(), 0, "{}", held.said());
    assert_eq!(sandbox.snapshots(), std::slice::from_ref(&other));
    // Nothing counts as being deleted any more.
    sandbox.ok(["tag", &other, "good"]);
}

/// Starts [`JOB`] in a directory with a store in it.
fn start_in(sandbox: &mut Sandbox, dir: &str, name: &str, options: &[&str]) -> Running {
    let (python, dir) = (python(), sandbox.path().join(dir));
    sandbox.store = dir.join(".ckpt-run");
    let program = ["--", python.to_str().unwrap(), "-c", JOB];
    let mut command = sandbox.command(options.iter().copied().chain(program));
    command.current_dir(dir);
    sandbox.start_command(name, command)
}

/// The store has gone with the directory, in which the job has another key.
#[test]
fn a_job_whose_directory_was_moved_does_not_begin_again() {
    let mut sandbox = Sandbox::new();
    let (old, new) = (sandbox.path().join("old"), sandbox.path().join("new"));
    let is_ready = |dir: &Path| fs::remove_file(dir.join("ready")).ok();
    fs::create_dir(&old).unwrap();
    fs::write(old.join("needed"), "").unwrap();
    let mut short = start_in(&mut sandbox, "old", "short", &[]);
    short.until("the job is ready", || is_ready(&old));
    short.kill_everything();
    let mut job = start_in(&mut sandbox, "old", "job", &["--interval", "300ms"]);
    job.until("the job is ready", || is_ready(&old));
    job.until("a snapshot", || sandbox.read("job.err").contains(" saved: ").then_some(()));
    assert!(job.said().contains("it has run before and has no snapshot"), "{}", job.said());
    job.kill_everything();
    fs::rename(&old, &new).unwrap();
    let mut moved = start_in(&mut sandbox, "new", "moved", &[]);
    assert_eq!(moved.wait(), 2, "{}", moved.said());
    assert!(moved.said().contains(&format!("was started in {}", old.display())), "{}", moved.said());
    // By a symbolic link, it is in its directory again.
    std::os::unix::fs::symlink(&new, &old).unwrap();
    let mut linked = start_in(&mut sandbox, "new", "linked", &[]);
    assert_eq!(linked.wait(), 2, "{}", linked.said());
    let said = linked.said();
    let key = said.split_once("leads to this directory now. To resume it: --job ").expect(&said).1;
    let key = key.split_once(". To start").expect(&said).0.to_owned();
    let mut named = start_in(&mut sandbox, "new", "named", &["--job", &key]);
    named.until("a resume", || sandbox.read("named.err").contains("resumed from snapshot").then_some(()));
    named.kill_everything();
    fs::remove_file(&old).unwrap();
    // Something else is at the old path.
    fs::create_dir(&old).unwrap();
    let mut copy = start_in(&mut sandbox, "new", "copy", &[]);
    copy.until("the job is ready", || is_ready(&new));
    assert!(copy.said().contains("may be a copy") && copy.said().contains(&key), "{}", copy.said());
    copy.kill_everything();
    fs::remove_dir_all(&old).unwrap();
    // A job that is begun again there is the one of this directory.
    for (name, options) in [("fresh", &["--resume", "never"][..]), ("again", &[])] {
        let mut fresh = start_in(&mut sandbox, "new", name, options);
        fresh.until("the job is ready", || is_ready(&new));
        fresh.kill_everything();
    }
    fs::rename(&new, &old).unwrap();
    fs::write(old.join("go"), "").unwrap();
    let mut back = start_in(&mut sandbox, "old", "back", &[]);
    assert_eq!(back.wait(), 0, "{}", back.said());
    assert!(back.said().contains("resumed from snapshot"), "{}", back.said());
}
