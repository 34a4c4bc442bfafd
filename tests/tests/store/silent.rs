//! A store in a directory that does not answer. While nothing of the job runs, ckpt-run says so, and ends after a time. A job
//! that runs goes on.

use crate::keeper::{KEEPER, finish, start, step, unbroken};
use ckpt_run_tests::{Running, Sandbox, programs, python, set_variables, until};
use std::fs;
use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};

const LAUNCHER_FAILED: i32 = 125;

/// The keeper, with a short limit for the store, and a store that does not answer at this fault point.
fn run_with(sandbox: &Sandbox, fault: &str) -> Running {
    let python = python();
    let mut command = sandbox.command(["--", python.to_str().expect("text"), "-c", KEEPER]);
    // One wait, as for an answer.
    command.env("CKPT_FAULT", format!("{fault}=delay:3600000"));
    command.env("CKPT_FAULT_STORE_ANSWER_MS", "3000");
    sandbox.start_command("silent", command)
}

/// The job ends, and nothing of it runs. Once the store answers, it is resumed.
#[test]
fn a_resume_does_not_wait_for_a_silent_store_for_ever() {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "job", &[]);
    step(&sandbox, &mut job);
    job.checkpoint(&sandbox);
    job.kill_everything();
    for (fault, doing) in [
        ("store-open", "it was being opened"),
        ("load-images", "the snapshot was being read"),
        // Memory, while CRIU waits for it.
        ("load-pages", "the snapshot was being read"),
        // Memory that is written into the processes, which exist.
        ("load-place", "the snapshot was being read"),
    ] {
        let store = sandbox.path().join(".ckpt-run");
        let end = format!("{} has not answered for 3.0 s while {doing}: ckpt-run ends", store.display());
        // On a busy machine the store may be that slow at another point, too.
        until(&format!("a resume that ends at {fault}"), || {
            let mut silent = run_with(&sandbox, fault);
            assert_eq!(silent.wait(), LAUNCHER_FAILED, "{fault}: {}", silent.said());
            let said = silent.said();
            assert!(said.contains("ckpt-run ends") && !said.contains("resumed from"), "{fault}: {said}");
            said.contains(&end).then_some(())
        });
    }
    let job = start(&sandbox, "again", &[]);
    assert!(job.said().contains("resumed from snapshot 000001"), "{}", job.said());
    assert_eq!(finish(&sandbox, "again", job), unbroken(1));
}

/// The record of what the job writes is opened before the job runs.
#[test]
fn a_start_does_not_wait_for_a_silent_store_for_ever() {
    let sandbox = Sandbox::new();
    let mut silent = run_with(&sandbox, "record-open");
    assert_eq!(silent.wait(), LAUNCHER_FAILED, "{}", silent.said());
    let said = silent.said();
    assert!(said.contains("has not answered for 3.0 s") && said.contains("ckpt-run ends"), "{said}");
    assert!(!sandbox.path().join("ready").exists(), "the job has run");
    let job = start(&sandbox, "again", &[]);
    assert_eq!(finish(&sandbox, "again", job), unbroken(0));
}

/// An object store that accepts connections and never answers. Requests of a job are retried for minutes; commands that
/// only read wait for one answer, however many jobs there are, and show what is on this machine.
#[test]
fn commands_that_only_read_do_not_wait_long_for_an_object_store() {
    let sandbox = Sandbox::new();
    for name in ["first", "second", "third"] {
        let mut job = sandbox.start(name, ["--job", name, "--interval", "off", "--", "sleep", "1000"]);
        job.until_answering(&sandbox);
        sandbox.ok(["checkpoint", name]);
        job.kill_everything();
    }
    let server = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("http://{}", server.local_addr().expect("an address"));
    let credentials =
        [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret"), ("AWS_REGION", "here")];
    for command in ["status", "ls", "explain"] {
        let begun = Instant::now();
        let mut command = sandbox.command(["--upload", "s3://bucket/place", command]);
        command.envs(credentials).env("AWS_ENDPOINT_URL", &endpoint).env("AWS_ALLOW_HTTP", "true");
        let output = command.output().expect("ckpt-run runs");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        for name in ["first", "second", "third"] {
            assert!(said.contains(name), "{said}");
        }
        assert!(said.contains("the object store has not answered before"), "{said}");
        assert_eq!(said.matches("(retried for 5s)").count(), 1, "{said}");
        // A single request of a job would be retried for 5 minutes.
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    }
}

/// A file system whose server never answers, so that not even SIGKILL ends a read.
#[test]
fn a_start_does_not_wait_for_a_hanging_file_system_for_ever() {
    let sandbox = Sandbox::new();
    let plain = sandbox.command(["--store", "wall/store", "--", "true"]);
    let mut command = Command::new(python());
    command.arg(programs().join("hanging_mount.py")).arg(plain.get_program()).args(plain.get_args());
    command.current_dir(sandbox.path());
    set_variables(&mut command, &plain);
    command.env("CKPT_FAULT_STORE_ANSWER_MS", "3000");
    let mut job = sandbox.start_command("job", command);
    job.until("the message", || {
        job_said(&sandbox)
            .contains("wall/store has not answered for 3.0 s while it was being opened")
            .then_some(())
    });
    // The kernel ends the process when the file system lets it.
    fs::write(sandbox.path().join("release"), "").expect("written");
    assert_eq!(job.wait(), LAUNCHER_FAILED, "{}", job.said());
}

/// At a checkpoint, the record of what the job writes is opened, and the one before is closed: neither may stop the job.
#[test]
fn a_job_runs_on_while_its_store_is_silent_at_a_checkpoint() {
    let mut sandbox = Sandbox::new();
    let [opens, closes] = ["opens.hold", "closes.hold"].map(|name| sandbox.path().join(name));
    let fault = format!("record-open=hold:{},record-close=hold:{}", opens.display(), closes.display());
    sandbox.variables.push(("CKPT_FAULT".to_owned(), fault));
    let mut job = start(&sandbox, "job", &[]);
    for hold in [&opens, &closes] {
        fs::write(hold, "").expect("written");
    }
    let opened = || job_said(&sandbox).matches("fault point record-open").count();
    assert_eq!(opened(), 1, "the record of a new run");
    let mut asked = sandbox.start("asked", ["checkpoint"]);
    job.until("a record that does not open", || (opened() == 2).then_some(()));
    step(&sandbox, &mut job);
    fs::remove_file(&opens).expect("the file is there");
    assert_eq!(asked.wait(), 0, "{}", asked.said());
    // The record of the first one does not close.
    let second = job.checkpoint(&sandbox);
    step(&sandbox, &mut job);
    let record = sandbox.job_dir().join("written").join(&second);
    let is_path = |line: &str| line.starts_with('"');
    let has_paths = || fs::read_to_string(&record).expect("a record").lines().any(is_path);
    assert!(!has_paths(), "it has begun");
    fs::remove_file(&closes).expect("the file is there");
    job.until("the record of the second one", || has_paths().then_some(()));
    assert_eq!(finish(&sandbox, "job", job), unbroken(2));
}

fn job_said(sandbox: &Sandbox) -> String {
    sandbox.read("job.err")
}
