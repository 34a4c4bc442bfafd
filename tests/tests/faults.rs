//! SIGKILL of the launcher, of CRIU and of a process of the job at every phase boundary of a checkpoint, and I/O
//! errors at every write: the job or its resume always ends right, and no snapshot that `ls` shows fails `verify`.

use ckpt_run_tests::{Running, Sandbox, programs, python, torchrun_with_two_ranks, train_script};
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

/// Phase boundaries of a checkpoint, in order.
const POINTS: &[&str] = &[
    "attempt",
    "dump-pre-dump",
    "dump-query-ext-files",
    "dump-post-dump",
    "dump-done",
    "save-file",
    "save-sync",
    "save-before-commit",
    "save-after-commit",
];
/// Those at which CRIU is there.
const CRIU_POINTS: &[&str] = &["dump-pre-dump", "dump-query-ext-files", "dump-post-dump"];

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

#[test]
fn the_launcher_is_killed_at_every_phase() {
    for point in POINTS {
        let sandbox = Sandbox::new();
        // A first snapshot succeeds, so that there always is something to resume; the second meets the fault.
        let mut first = job(&sandbox, "first", Some(&format!("{}@{}=kill", point, second_passage(point))));
        until_ready(&mut first, &sandbox);
        let id = first.checkpoint(&sandbox);
        let output = sandbox.call(["checkpoint"]);
        assert!(!output.status.success(), "{point}: the launcher should have died");
        let status = first.wait_status();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(9),
            "{point}: {}",
            first.said()
        );
        let listed = sandbox.snapshots();
        assert!(listed.contains(&id), "{point}: {listed:?}");
        sandbox.verify_all();
        let mut second = job(&sandbox, "second", None);
        second.until_answering(&sandbox);
        assert!(second.said().contains("resumed from snapshot"), "{point}: {}", second.said());
        // What the interrupted save had left is gone.
        let left = fs::read_dir(sandbox.job_dir().join("snapshots")).unwrap().count();
        assert_eq!(left, sandbox.snapshots().len(), "{point}");
        ends_right(second, &sandbox, point);
    }
}

/// The passage of a point that belongs to the second checkpoint. `save-file` and `save-sync` are passed once per data
/// file: the one in the middle of the second snapshot is near enough to 1.5 times as many as there are in one.
fn second_passage(point: &str) -> usize {
    if matches!(point, "save-file" | "save-sync") { 30 } else { 2 }
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
        // The job is unharmed: it goes on, and can be saved.
        let lines = sandbox.read("lines.txt").lines().count();
        job.until("the job goes on", || (sandbox.read("lines.txt").lines().count() > lines).then_some(()));
        job.checkpoint(&sandbox);
        ends_right(job, &sandbox, point);
    }
}

/// CRIU hangs while the job stands still: after --freeze-timeout it is given up and the job goes on.
#[test]
fn a_job_that_stands_still_for_too_long_goes_on() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command([
        "--freeze-timeout".into(),
        PathBuf::from("1s"),
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
    assert!(said.contains("stood still for 1s") && said.contains("--freeze-timeout"), "{said}");
    let lines = sandbox.read("lines.txt").lines().count();
    job.until("the job goes on", || (sandbox.read("lines.txt").lines().count() > lines).then_some(()));
    job.checkpoint(&sandbox);
    ends_right(job, &sandbox, "a stopped CRIU");
}

#[test]
fn io_errors_at_every_write_leave_the_job_alone() {
    for (point, action) in [
        ("save-file", "enospc"),
        ("save-file", "eio"),
        ("save-sync", "eio"),
        ("save-before-commit", "enospc"),
        ("attempt", "error"),
        ("dump-post-dump", "error"),
    ] {
        let what = format!("{point}={action}");
        let sandbox = Sandbox::new();
        let mut job = job(&sandbox, "job", Some(&format!("{point}@{}={action}", second_passage(point))));
        until_ready(&mut job, &sandbox);
        let id = job.checkpoint(&sandbox);
        let output = sandbox.call(["checkpoint"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{what}: {said}");
        if action == "enospc" {
            assert!(said.contains("no room") && said.contains("needs about"), "{what}: {said}");
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
