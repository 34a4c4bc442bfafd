//! SIGKILL of the launcher, of CRIU and of a process of the job at every phase boundary of a checkpoint, and I/O
//! errors at every write: the job or its resume always ends right, and no snapshot that `ls` shows fails `verify`.

use ckpt_run_tests::packs::objects;
use ckpt_run_tests::{Running, Sandbox, criu, programs, python, torchrun_with_two_ranks, train_script};
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

/// Phase boundaries of a checkpoint of a resumed job, in order, and which passage of each. The first small object is the
/// claim of the job; the next ones are the number of the snapshot, the index of a pack and the manifest.
pub const POINTS: &[&str] = &[
    "attempt@1",
    "dump-pre-dump@1",
    "dump-query-ext-files@1",
    "copied@1",
    "dump-post-dump@1",
    "dump-done@1",
    "save-file@1",
    "save-write@1",
    "save-fsync@1",
    "save-rename@1",
    "save-sync@1",
    "put-write@3",
    "put-write@4",
    "put-write@5",
    "put-rename@3",
    "put-rename@4",
    "put-rename@5",
    "sync-dir@3",
    "save-before-commit@1",
    "save-after-commit@1",
];
/// Those at which CRIU is there.
pub const CRIU_POINTS: &[&str] = &["dump-pre-dump", "dump-query-ext-files", "copied", "dump-post-dump"];

fn job(sandbox: &Sandbox, name: &str, fault: Option<&str>) -> Running {
    let mut command =
        sandbox.command([PathBuf::from("-v"), "--".into(), python(), programs().join("append_log.py")]);
    if let Some(fault) = fault {
        command.env("CKPT_FAULT", fault);
    }
    sandbox.start_command(name, command)
}

fn until_ready(job: &mut Running, sandbox: &Sandbox) {
    job.until("the program is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(sandbox);
}

/// Lets the job go to its end, which has to be the right one.
fn ends_right(mut job: Running, sandbox: &Sandbox, what: &str) {
    sandbox.verify_all();
    fs::write(sandbox.path().join("go"), "").unwrap();
    let code = job.wait();
    assert_eq!(code, 0, "{what}: {}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n", "{what}: {}", job.said());
    sandbox.verify_all();
}

/// A job that was saved once and killed, and is resumed with a fault ahead: there always is something to resume.
fn saved_and_resumed(sandbox: &Sandbox, fault: &str) -> (Running, String) {
    let mut first = job(sandbox, "first", None);
    until_ready(&mut first, sandbox);
    let id = first.checkpoint(sandbox);
    first.kill_everything();
    let mut second = job(sandbox, "second", Some(fault));
    second.until_answering(sandbox);
    (second, id)
}

#[test]
fn the_launcher_is_killed_at_every_phase() {
    for point in POINTS {
        let sandbox = Sandbox::new();
        let (mut second, id) = saved_and_resumed(&sandbox, &format!("{point}=kill"));
        let output = sandbox.call(["checkpoint"]);
        assert!(!output.status.success(), "{point}: the launcher should have died");
        let status = second.wait_status();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(9),
            "{point}: {}",
            second.said()
        );
        let listed = sandbox.snapshots();
        assert!(listed.contains(&id), "{point}: {listed:?}");
        sandbox.verify_all();
        let mut third = job(&sandbox, "third", None);
        third.until_answering(&sandbox);
        assert!(third.said().contains("resumed from snapshot"), "{point}: {}", third.said());
        // The remains of the interrupted save are deleted.
        let objects = objects(&sandbox);
        let indexes =
            objects.iter().filter(|path| path.extension().is_some_and(|kind| kind == "index")).count();
        let packs = objects.iter().filter(|path| path.extension().is_some_and(|kind| kind == "pack")).count();
        assert_eq!(packs, indexes, "{point}: {objects:?}");
        assert_eq!(objects.len() - packs - indexes, sandbox.snapshots().len(), "{point}: {objects:?}");
        ends_right(third, &sandbox, point);
    }
}

#[test]
fn the_launcher_is_killed_while_it_claims_the_job() {
    for point in ["put-write@1", "put-rename@1", "sync-dir@1", "put-write@2", "put-rename@2", "sync-dir@2"] {
        let sandbox = Sandbox::new();
        let mut first = job(&sandbox, "first", None);
        until_ready(&mut first, &sandbox);
        first.checkpoint(&sandbox);
        first.kill_everything();
        // It may be of a machine that still runs the job.
        let unfinished = sandbox.job_dir().join("packs/00000000000000000000000000000001.pack");
        fs::write(&unfinished, "").unwrap();
        let status = job(&sandbox, "second", Some(&format!("{point}=kill"))).wait_status();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "{point}");
        let is_claimed = !["put-write@1", "put-rename@1"].contains(&point);
        assert!(is_claimed || unfinished.exists(), "{point}: nothing is deleted before the claim");
        let mut third = job(&sandbox, "third", None);
        third.until_answering(&sandbox);
        assert!(third.said().contains("resumed from snapshot"), "{point}: {}", third.said());
        assert!(!unfinished.exists(), "{point}");
        ends_right(third, &sandbox, point);
    }
}

#[test]
fn criu_is_killed_at_every_phase() {
    for point in CRIU_POINTS {
        let sandbox = Sandbox::new();
        let mut job = job(&sandbox, "job", Some(&format!("{point}@1=kill-criu")));
        until_ready(&mut job, &sandbox);
        let output = sandbox.call(["checkpoint"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{point}: {said}");
        assert_eq!(sandbox.snapshots().len(), 0, "{point}");
        // The job is unharmed: it continues, and can be saved.
        let lines = sandbox.read("lines.txt").lines().count();
        job.until("the job goes on", || (sandbox.read("lines.txt").lines().count() > lines).then_some(()));
        job.checkpoint(&sandbox);
        ends_right(job, &sandbox, point);
    }
}

/// CRIU hangs in a restore: it is given up, and nothing is lost.
#[test]
fn a_restore_that_hangs_is_given_up() {
    let sandbox = Sandbox::new();
    // Before the job: a file that is made just after its death may be the job's.
    let hanging = sandbox.path().join("criu");
    let script = "case \" $* \" in *\" swrk \"*) exec sleep 1000;; esac";
    fs::write(&hanging, format!("#!/bin/sh\n{script}\nexec '{}' \"$@\"\n", criu().display())).unwrap();
    fs::set_permissions(&hanging, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut first = job(&sandbox, "first", None);
    until_ready(&mut first, &sandbox);
    first.checkpoint(&sandbox);
    first.kill_everything();
    // Nothing moves; or CRIU works, and says nothing.
    for (limit, reason) in [
        ("CKPT_FAULT_STALL_MS", "nothing has moved for 1 seconds"),
        ("CKPT_FAULT_SILENCE_MS", "CRIU did not finish in time"),
    ] {
        let mut command = sandbox.command(["--".into(), python(), programs().join("append_log.py")]);
        command.env("CKPT_CRIU", &hanging).env(limit, "1000");
        let mut second = sandbox.start_command("second", command);
        assert_eq!(second.wait(), 125, "{}", second.said());
        for said in [reason, "trying once more", "nothing is lost"] {
            assert!(second.said().contains(said), "{said}: {}", second.said());
        }
    }
    let mut third = job(&sandbox, "third", None);
    third.until_answering(&sandbox);
    assert!(third.said().contains("resumed from snapshot"), "{}", third.said());
    ends_right(third, &sandbox, "after a restore that hung");
}

/// CRIU hangs while the job is frozen: after --freeze-timeout the attempt fails and the job continues.
#[test]
fn a_job_that_stands_still_for_too_long_goes_on() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command([
        "--freeze-timeout".into(),
        PathBuf::from("5s"),
        "--".into(),
        python(),
        programs().join("append_log.py"),
    ]);
    command.env("CKPT_FAULT", "dump-query-ext-files@1=stop-criu");
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    let output = sandbox.call(["checkpoint"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("paused for 5s") && said.contains("--freeze-timeout"), "{said}");
    let lines = sandbox.read("lines.txt").lines().count();
    job.until("the job goes on", || (sandbox.read("lines.txt").lines().count() > lines).then_some(()));
    // On a busy machine --freeze-timeout may be over before one succeeds.
    job.until("a checkpoint", || sandbox.call(["checkpoint"]).status.success().then_some(()));
    ends_right(job, &sandbox, "a stopped CRIU");
}

/// Its connections work afterwards, although CRIU had them in its hands.
#[test]
fn connections_outlast_a_checkpoint_that_takes_too_long() {
    const ECHO: &str = r#"
import socket, threading, time
listener = socket.create_server(("127.0.0.1", 0))
one = socket.create_connection(listener.getsockname())
other = listener.accept()[0]
def echo():
    while True: other.sendall(other.recv(1))
threading.Thread(target=echo, daemon=True).start()
with open("lines.txt", "a", buffering=1) as out:
    while True:
        one.sendall(b"x")
        out.write(one.recv(1).decode() + "\n")
        time.sleep(0.01)
"#;
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(["--freeze-timeout", "3s", "--"]);
    command.arg(python()).args(["-c", ECHO]).env("CKPT_FAULT", "dump-post-dump@1=stop-criu");
    let mut job = sandbox.start_command("job", command);
    let lines = || sandbox.read("lines.txt").lines().count();
    job.until("lines", || (lines() > 5).then_some(()));
    job.until_answering(&sandbox);
    let output = sandbox.call(["checkpoint"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("paused for 3s"), "{said}");
    let before = lines();
    job.until("more lines", || (lines() > before + 5).then_some(()));
    job.kill_everything();
}

#[test]
fn io_errors_at_every_write_leave_the_job_alone() {
    for (point, action) in [
        ("save-file@1", "enospc"),
        ("save-write@1", "enospc"),
        ("save-write@1", "eio"),
        ("save-fsync@1", "eio"),
        ("save-rename@1", "eio"),
        ("put-fsync@3", "eio"),
        ("put-write@4", "enospc"),
        ("put-fsync@4", "eio"),
        ("save-before-commit@1", "enospc"),
        ("attempt@1", "error"),
        ("dump-post-dump@1", "error"),
    ] {
        let what = format!("{point}={action}");
        let sandbox = Sandbox::new();
        let (job, id) = saved_and_resumed(&sandbox, &format!("{point}={action}"));
        let output = sandbox.call(["checkpoint"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{what}: {said}");
        if action == "enospc" {
            assert!(said.contains("no room") && said.contains("needs at least"), "{what}: {said}");
        }
        assert_eq!(sandbox.snapshots(), [id.as_str()], "{what}");
        let newer = job.checkpoint(&sandbox);
        assert_eq!(sandbox.snapshots(), [id, newer], "{what}");
        ends_right(job, &sandbox, &what);
    }
}

/// The training's command line; the same for every run of one job.
fn training_command() -> Vec<OsString> {
    let mut argv = torchrun_with_two_ranks();
    argv.push(train_script().into());
    argv.extend(
        ["--steps", "1500", "--step-ms", "30", "--slow-while", "slow", "--log", "losses.txt"]
            .map(OsString::from),
    );
    argv
}

fn training(
    sandbox: &Sandbox,
    name: &str,
    options: &[&str],
    argv: &[OsString],
    fault: Option<&str>,
) -> Running {
    let mut arguments: Vec<OsString> = options.iter().map(OsString::from).collect();
    arguments.push("--".into());
    arguments.extend(argv.iter().cloned());
    let mut command = sandbox.command(arguments);
    if let Some(fault) = fault {
        command.env("CKPT_FAULT", fault);
    }
    sandbox.start_command(name, command)
}

/// A rank is killed in the middle of a checkpoint: the training fails as it would have, and its next run resumes.
#[test]
fn a_rank_is_killed_at_every_phase() {
    let argv = training_command();
    let unbroken = {
        let sandbox = Sandbox::new();
        assert_eq!(training(&sandbox, "job", &[], &argv, None).wait(), 0);
        sandbox.read("losses.txt")
    };
    for point in ["dump-pre-dump", "dump-post-dump", "dump-done"] {
        let sandbox = Sandbox::new();
        // Slow until the rank is killed: the training must not end before.
        fs::write(sandbox.path().join("slow"), "").unwrap();
        let mut job = training(&sandbox, "job", &[], &argv, Some(&format!("{point}@2=kill-rank")));
        job.until("the training runs", || (sandbox.read("losses.txt").lines().count() >= 5).then_some(()));
        let sound = job.checkpoint(&sandbox);
        sandbox.call(["checkpoint"]);
        assert_ne!(job.wait(), 0, "{point}: a rank was killed\n{}", job.said());
        sandbox.verify_all();
        fs::remove_file(sandbox.path().join("slow")).unwrap();
        // Killed before the dump, the rank may be dead in the second snapshot; the first has it alive.
        let options: &[&str] = if point == "dump-pre-dump" { &["--resume", &sound] } else { &[] };
        let mut job = training(&sandbox, "again", options, &argv, None);
        assert_eq!(job.wait(), 0, "{point}: {}", job.said());
        assert_eq!(sandbox.read("losses.txt"), unbroken, "{point}");
    }
}
