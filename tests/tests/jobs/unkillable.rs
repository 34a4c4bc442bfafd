//! Jobs with a process that cannot be killed, since it waits for a file system that does not answer.

use ckpt_run_tests::{Running, Sandbox, programs, python, set_variables, until};
use rustix::process::Signal;
use std::fs;
use std::process::Command;

/// Fails when the file `hang` appears, and leaves a process behind that waits for the file system for ever.
const JOB: &str = ": > ready; while [ ! -e hang ]; do [ -e go ] && exit 0; sleep 0.05; done; rm -f hang asked; \
                   stat wall/x & until [ -e asked ]; do sleep 0.05; done; exit 3";

fn start(sandbox: &Sandbox) -> Running {
    let plain = sandbox.command(["--", "sh", "-c", JOB]);
    let mut command = Command::new(python());
    command.arg(programs().join("hanging_mount.py")).arg(plain.get_program()).args(plain.get_args());
    command.current_dir(sandbox.path());
    set_variables(&mut command, &plain);
    command.env("CKPT_MAX_RESTARTS", "10");
    let mut job = sandbox.start_command("job", command);
    job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(sandbox);
    job
}

/// The job has failed, and its restart waits for what is left of it.
fn failed(sandbox: &Sandbox) -> Running {
    let mut job = start(sandbox);
    job.checkpoint(sandbox);
    fs::write(sandbox.path().join("hang"), "").unwrap();
    until("a restart that waits", || {
        assert!(!job.has_ended(), "{}", job.said());
        job.said().contains("the restart waits").then_some(())
    });
    let said = job.said();
    assert!(said.contains("(stat) is in state D"), "{said}");
    assert!(!said.contains("resumed from snapshot"), "{said}");
    job
}

#[test]
fn a_restart_waits_for_processes_that_cannot_be_killed() {
    let sandbox = Sandbox::new();
    let mut job = failed(&sandbox);
    fs::write(sandbox.path().join("release"), "").unwrap();
    job.until("the restart", || job_resumed(&sandbox));
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
}

fn job_resumed(sandbox: &Sandbox) -> Option<()> {
    sandbox.read("job.err").contains("restart 1 of the job").then_some(())
}

#[test]
fn a_signal_ends_the_wait() {
    let sandbox = Sandbox::new();
    let mut job = failed(&sandbox);
    job.signal(Signal::TERM);
    assert_eq!(job.wait(), 75, "{}", job.said());
}
