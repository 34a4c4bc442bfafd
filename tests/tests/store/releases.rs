//! Stores that earlier builds of ckpt-run have written: the present build resumes from them, and stores more.
//!
//! `cargo xtask test --full` builds them from the history of the repository; a clone without that history skips this.

use ckpt_run_tests::{Running, Sandbox, programs, python, set_variables};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Programs with something that a manifest records beside CRIU's images, and the commonest kinds of resources.
const PROGRAMS: &[&str] = &[
    "affinity.py",
    "bash_job.sh",
    "file_offset.py",
    "ptys.py",
    "shm_named.py",
    "subprocess_pipe.py",
    "tcp_noreuse.py",
    "threads300.py",
    "unix_named.py",
    "unlinked_link.py",
];

/// The same command line of another `ckpt-run`.
fn of_release(release: &Path, inner: &Command) -> Command {
    let mut command = Command::new(release);
    command.args(inner.get_args()).current_dir(inner.get_current_dir().unwrap());
    command.stdin(std::process::Stdio::null());
    set_variables(&mut command, inner);
    command
}

fn job(sandbox: &Sandbox, program: &str) -> Command {
    let interpreter = if program.ends_with(".sh") { "/bin/bash".into() } else { python() };
    sandbox.command(["--".into(), interpreter, programs().join(program)])
}

fn resumed(sandbox: &Sandbox, program: &str, name: &str) -> Running {
    let mut job = sandbox.start_command(name, job(sandbox, program));
    job.until_answering(sandbox);
    job
}

/// A job of the earlier build is checkpointed and killed; the present one resumes it, checkpoints it, and resumes it
/// again.
fn goes_on(release: &Path, program: &str) {
    println!("{}: {program}", release.display());
    let sandbox = Sandbox::new();
    let mut old = sandbox.start_command("old", of_release(release, &job(&sandbox, program)));
    old.until("the program is set up", || sandbox.path().join("ready").exists().then_some(()));
    old.until("a snapshot of the earlier build", || {
        let checkpoint = of_release(release, &sandbox.command(["checkpoint"])).output().unwrap();
        checkpoint.status.success().then_some(())
    });
    old.kill_everything();

    let mut new = resumed(&sandbox, program, "new");
    assert!(new.said().contains("resumed from snapshot 000001"), "{}", new.said());
    new.checkpoint(&sandbox);
    new.kill_everything();
    let mut new = resumed(&sandbox, program, "newer");
    assert!(new.said().contains("resumed from snapshot 000002"), "{}", new.said());
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(new.wait(), 0, "{}", new.said());
    assert_eq!(sandbox.read("log"), "started\npass\n", "{}", new.said());
    assert_eq!(sandbox.snapshots().len(), 2);
    sandbox.verify_all();
}

#[test]
fn what_earlier_builds_have_stored_is_resumed() {
    let Some(dir) = std::env::var_os("CKPT_TEST_RELEASES").map(PathBuf::from) else {
        ckpt_test_skip::skip(
            "CKPT_TEST_RELEASES is not set; `cargo xtask test --full` sets it where the repository's history is there",
        );
        return;
    };
    let releases: Vec<_> =
        fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path().join("ckpt-run")).collect();
    assert!(!releases.is_empty(), "there is none in {}", dir.display());
    for program in PROGRAMS {
        std::thread::scope(|scope| {
            for release in &releases {
                scope.spawn(|| goes_on(release, program));
            }
        });
    }
}
