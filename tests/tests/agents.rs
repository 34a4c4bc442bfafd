//! What the launcher does with what agents say: a program plays one, so that nothing depends on a GPU.

use ckpt_run_tests::{Running, Sandbox, programs, python};
use std::ffi::OsString;
use std::path::Path;

/// Any library that can be preloaded and does nothing: the program plays the agent.
fn harmless() -> &'static str {
    let places = ["/lib/x86_64-linux-gnu/libm.so.6", "/usr/lib64/libm.so.6", "/lib64/libm.so.6"];
    places.into_iter().find(|place| Path::new(place).is_file()).expect("the C library's mathematics")
}

fn start(sandbox: &Sandbox, interpose: &str) -> Running {
    let argv: [OsString; 3] = ["--".into(), python().into(), programs().join("agent/played.py").into()];
    let mut command = sandbox.command(argv);
    command.env("CKPT_INTERPOSE", interpose).env("CKPT_VERBOSE", "1");
    sandbox.start_command("job", command)
}

fn started(sandbox: &Sandbox) -> Running {
    let mut job = start(sandbox, harmless());
    job.until("the agent", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(sandbox);
    job
}

fn write(sandbox: &Sandbox, name: &str, content: &str) {
    std::fs::write(sandbox.path().join(name), content).unwrap();
}

fn remove(sandbox: &Sandbox, name: &str) {
    std::fs::remove_file(sandbox.path().join(name)).unwrap();
}

#[test]
fn a_refusal_is_told_and_the_job_runs_on() {
    let sandbox = Sandbox::new();
    let mut job = started(&sandbox);
    write(&sandbox, "quiesce", "managed memory (cuMemAllocManaged) cannot be saved: use cuMemAlloc");
    for _ in 0..2 {
        let output = sandbox.call(["checkpoint"]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("the job cannot be saved as it is: process 10002 of the job"), "{said}");
        assert!(said.contains("(cuMemAllocManaged) cannot be saved: use cuMemAlloc"), "{said}");
        assert!(!said.contains("CRIU"), "it was not asked: {said}");
    }
    assert_eq!(sandbox.read("refused"), "1\n2\n", "once for each checkpoint");
    let status = sandbox.json(["status", "--json"]);
    assert_eq!(status[0]["failed"], 2);
    assert!(status[0]["last_failure"].as_str().unwrap().contains("cuMemAllocManaged"), "{status}");
    assert_eq!(job.said().matches("no snapshot this time").count(), 1, "{}", job.said());

    remove(&sandbox, "quiesce");
    write(&sandbox, "delay_s", "0.7");
    let id = job.checkpoint(&sandbox);
    let stall_s = sandbox.json(["show", &id, "--json"])["stall_s"].as_f64().unwrap();
    assert!((0.7..20.0).contains(&stall_s), "until the agent is back: {stall_s}");
    write(&sandbox, "go", "");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
}

#[test]
fn lost_gpu_state_ends_the_job_and_its_snapshot_is_good() {
    let sandbox = Sandbox::new();
    let mut job = started(&sandbox);
    write(&sandbox, "lost", "GPU state is gone: the driver said 999");
    let id = job.checkpoint(&sandbox);
    assert_eq!(job.wait(), 125, "{}", job.said());
    let said = job.said();
    assert!(said.contains("the job was ended because its GPU state was lost (process 10002"), "{said}");
    assert!(said.contains("GPU state is gone: the driver said 999"), "{said}");
    assert!(said.contains(&format!("The snapshot {id} is good: run the same command again")), "{said}");

    // It is lost in the resume too: there is no other try.
    let mut job = start(&sandbox, harmless());
    assert_eq!(job.wait(), 125, "{}", job.said());
    let said = job.said();
    assert!(
        said.contains(&format!("the snapshot {id} is whole, but the job's GPU state could not")),
        "{said}"
    );
    assert_eq!(said.matches("the driver said 999").count(), 1, "the first run's are rolled back: {said}");

    // What is away waits for the launcher, whatever is wanted now.
    remove(&sandbox, "lost");
    write(&sandbox, "go", "");
    let mut job = start(&sandbox, "off");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains("0 processes went on, 1 were restored"), "{}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
}
