//! A memory limit of a cgroup above that of ckpt-run, as Slurm and Kubernetes set it: what does not fit below it is not
//! staged in memory.

use ckpt_run_tests::cgroups::Cgroups;
use ckpt_run_tests::{Sandbox, python};
use std::fs;

/// The job has this much memory.
const JOB_MIB: u64 = 300;
/// There is room for the job and not for a copy.
const LIMIT_BYTES: u64 = 560 << 20;
/// There is room for the job, a copy, and some snapshots.
const STORE_LIMIT_BYTES: u64 = 900 << 20;

const JOB: &str = r#"
import os, sys, time
held = bytearray(os.urandom(1 << 20)) * int(sys.argv[1])
open("ready", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
print(len(held) >> 20, flush=True)
"#;

/// Of the job whose memory is new at each checkpoint.
const NOISE_MIB: u64 = 90;

const NOISE: &str = r#"
import os, sys, time
step = 0
while not os.path.exists("go"):
    held = os.urandom(int(sys.argv[1]) << 20)
    step += 1
    with open("at", "w") as file:
        file.write(str(step))
    while not os.path.exists(f"step-{step}") and not os.path.exists("go"):
        time.sleep(0.01)
print(len(held) >> 20, flush=True)
"#;

#[test]
fn the_limit_of_a_cgroup_further_up_counts() {
    has_its_limit("staging", &[]);
}

/// In a cgroup namespace, paths begin at the cgroup of its first process: what is further up has no name.
#[test]
fn the_limit_outside_of_a_cgroup_namespace_counts() {
    has_its_limit("namespace", &["unshare", "--cgroup"]);
}

fn has_its_limit(name: &str, wrapper: &[&str]) {
    let Some(cgroups) = Cgroups::new(name, LIMIT_BYTES) else {
        return ckpt_test_skip::skip("no cgroups with limits of memory can be made");
    };
    let sandbox = Sandbox::new();
    let python = python();
    let words = ["--", python.to_str().unwrap(), "-c", JOB, &JOB_MIB.to_string()];
    let mut job = sandbox.start_command("job", cgroups.command_by(wrapper, &sandbox.command(words)));
    job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    job.checkpoint(&sandbox);
    assert!(job.said().contains("the checkpoint cannot be staged in memory"), "{}", job.said());
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("job.out"), format!("{JOB_MIB}\n"), "it was not killed");
    sandbox.verify_all();
}

/// A job that leaves little of its memory: the kernel would kill it, or ckpt-run, for a checkpoint.
const FULL: &str = r#"
import os, sys, time
held, limit, usage = [], int(sys.argv[1]), sys.argv[2]
while int(open(usage).read()) < limit - (40 << 20):
    held.append(os.urandom(2 << 20))
open("ready", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
print("whole" if len({hash(one) for one in held}) == len(held) else "not", flush=True)
"#;

#[test]
fn a_job_that_has_taken_its_memory_is_not_saved_and_goes_on() {
    let Some(cgroups) = Cgroups::new("full", LIMIT_BYTES) else {
        return ckpt_test_skip::skip("no cgroups with limits of memory can be made");
    };
    let sandbox = Sandbox::new();
    let python = python();
    let limit = LIMIT_BYTES.to_string();
    let words = ["--", python.to_str().unwrap(), "-c", FULL, &limit, cgroups.usage_file().to_str().unwrap()];
    let mut job = sandbox.start_command("job", cgroups.command(&sandbox.command(words)));
    job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    for _ in 0..2 {
        let output = sandbox.call(["checkpoint"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains("is free")
                && said.contains("for their own work. Let other programs use less memory"),
            "{said}"
        );
    }
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("job.out"), "whole\n");
}

/// There is room for the job and a copy, and for the job when it has grown.
const GROWS_LIMIT_BYTES: u64 = 1000 << 20;

const GROWS: &str = r#"
import os, sys, time
held = [os.urandom(1 << 20) for _ in range(int(sys.argv[1]))]
digests = [hash(one) for one in held]
open("ready", "w").close()
while not os.path.exists("grow"):
    time.sleep(0.001)
while len(held) < 800:
    held += [bytes([len(held) % 256]) * (1 << 20) for _ in range(5)]
    time.sleep(0.005)
open("grown", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
print("whole" if digests == [hash(bytes(one)) for one in held[: len(digests)]] else "not", len(held), flush=True)
"#;

/// The job grows while its snapshot is being stored: it gets the memory of the copy.
#[test]
fn a_job_that_grows_while_it_is_stored_is_not_killed() {
    let Some(cgroups) = Cgroups::new("grows", GROWS_LIMIT_BYTES) else {
        return ckpt_test_skip::skip("no cgroups with limits of memory can be made");
    };
    let sandbox = Sandbox::new();
    let python = python();
    let words = ["--max-restarts", "0", "--", python.to_str().unwrap(), "-c", GROWS, &JOB_MIB.to_string()];
    let mut command = sandbox.command(words);
    command.env("CKPT_FAULT", "save-write=delay:500");
    let mut job = sandbox.start_command("job", cgroups.command(&command));
    job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    let mut checkpoint = sandbox.start("checkpoint", ["checkpoint"]);
    checkpoint.until("the snapshot is being stored", || {
        (sandbox.json(["status", "--json"])[0]["progress"]["phase"] == "persist").then_some(())
    });
    fs::write(sandbox.path().join("grow"), "").unwrap();
    assert_eq!(checkpoint.wait(), 1, "{}", checkpoint.said());
    assert!(checkpoint.said().contains("memory ran short while"), "{}", checkpoint.said());
    job.until("a larger job", || sandbox.path().join("grown").exists().then_some(()));
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("job.out"), "whole 800\n");
    assert!(!job.said().contains("cannot be staged in memory"), "{}", job.said());
}

/// A store in memory, whose file system would have room: what the limit leaves counts.
#[test]
fn a_store_in_memory_takes_no_more_than_the_limit_leaves() {
    let Some(cgroups) = Cgroups::new("store", STORE_LIMIT_BYTES) else {
        return ckpt_test_skip::skip("no cgroups with limits of memory can be made");
    };
    let sandbox = Sandbox::new();
    let Ok(store) = tempfile::tempdir_in("/dev/shm") else {
        return ckpt_test_skip::skip("there is no /dev/shm");
    };
    let (python, store) = (python(), store.path().join("store"));
    let words = ["--keep", "9", "--store", store.to_str().unwrap(), "--"];
    let argv = [python.to_str().unwrap(), "-c", NOISE, &NOISE_MIB.to_string()];
    let words = words.iter().chain(&argv).copied();
    let mut job = sandbox.start_command("job", cgroups.command(&sandbox.command(words)));
    let call =
        |words: &[&str]| sandbox.call(words.iter().copied().chain(["--store", store.to_str().unwrap()]));
    let mut refused = None;
    for step in 1..=9 {
        let at = || fs::read_to_string(sandbox.path().join("at")).is_ok_and(|at| at == step.to_string());
        job.until("new memory", || at().then_some(()));
        let saved = call(&["checkpoint"]);
        if !saved.status.success() {
            refused = Some(String::from_utf8_lossy(&saved.stderr).into_owned());
            break;
        }
        fs::write(sandbox.path().join(format!("step-{step}")), "").unwrap();
    }
    let refused = refused.expect("nine snapshots do not fit");
    // For its images, or for the snapshot.
    assert!(refused.contains("free") && refused.contains("--store"), "{refused}");
    assert!(sandbox.path().join("step-1").exists(), "the first one fits: {refused}");
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("job.out"), format!("{NOISE_MIB}\n"), "it was not killed");
    assert!(call(&["verify", "--all"]).status.success());
}
