//! The programs of `resources` in a virtual machine with a distribution's kernel, which differs from the machine's own:
//! it tracks soft-dirty pages, for example.

use ckpt_run_tests::file_systems::{FileSystem, make_image};
use ckpt_run_tests::virtual_machine::{self, Hardware, VirtualMachine, shared_directory, tool};
use ckpt_run_tests::{PRECOPY_VARIABLE, Running, Sandbox, programs, python, workspace};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

const DISK_BYTES: u64 = 2 << 30;
/// What a program prints that is not available there.
const SKIPPED: &str = "SKIPPED: ";

/// Points of pre-copy: the beginning and the end of each round.
const POINTS: [&str; 4] = ["precopy-begin@1", "precopy-begin@2", "precopy-round@1", "precopy-round@2"];
/// Those at which CRIU is there.
const CRIU_POINTS: [&str; 2] = ["precopy-begin@1", "precopy-begin@2"];
/// The training jobs that are run with pre-copy.
const TRAINING: [&str; 3] = [
    "training::a_single_process_survives",
    "training::data_loader_workers_survive",
    "training::torchrun_with_two_ranks_survives",
];

/// Names of the tests of all programs.
fn test_names() -> Vec<String> {
    let mut list = Command::new(std::env::current_exe().unwrap());
    let output = list.args(["resources::", "--list", "--format=terse"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

/// Runs these tests in a machine, where they have to pass or to be skipped. Returns which were skipped there.
fn pass_in_a_machine(tests: &[String], variables: &[(&str, &str)]) -> Vec<String> {
    let Some(tool) = tool() else {
        ckpt_test_skip::needs_full();
        return Vec::new();
    };
    let _alone = virtual_machine::alone();
    let sandbox = Sandbox::new();
    let disk = sandbox.path().join("disk");
    make_image(&disk, DISK_BYTES).and_then(|()| FileSystem::Ext4.format(&disk)).unwrap();
    let hardware = Hardware { cores: 2, memory_mib: 2048, disk: &disk, network: None };
    let machine = VirtualMachine::boot(&tool, &sandbox.path().join("machine"), hardware);
    machine.ok(&format!("mount /dev/vda '{}'\n", workspace().join("target/tests").display()));
    let (mut skipped, mut failed) = (Vec::new(), Vec::new());
    for name in tests {
        println!("{name}");
        let test = machine.start_test_with(name, variables);
        if test.wait() != 0 {
            failed.push(format!("{name}: {}", test.said()));
        } else if test.said().contains(SKIPPED) {
            skipped.push(name.clone());
        }
    }
    println!("{} tests, not available: {skipped:?}", tests.len());
    assert!(failed.is_empty(), "{} of {}:\n{}", failed.len(), tests.len(), failed.join("\n"));
    skipped
}

#[test]
fn all_programs_pass_under_a_distributions_kernel() {
    let programs = test_names();
    assert!(programs.len() > 50, "{programs:?}");
    pass_in_a_machine(&programs, &[]);
}

#[test]
fn all_programs_and_training_pass_with_pre_copy() {
    let mut tests = test_names();
    tests.extend(TRAINING.map(str::to_owned));
    pass_in_a_machine(&tests, &[(PRECOPY_VARIABLE, "2")]);
}

#[test]
fn kills_during_pre_copy() {
    let kills = "distribution_kernel::nothing_is_lost_by_kills_during_pre_copy".to_owned();
    // That kernel tracks changes: there is no reason not to try.
    assert!(pass_in_a_machine(&[kills], &[]).is_empty());
}

#[test]
fn nodes_with_pre_copy() {
    let test = "nodes::precopy::parts_whose_memory_was_copied_before_are_one_snapshot".to_owned();
    assert!(pass_in_a_machine(&[test], &[]).is_empty());
}

fn job(sandbox: &Sandbox, name: &str, fault: Option<&str>) -> Running {
    let arguments = ["-vv", "--precopy", "2", "--"].map(PathBuf::from);
    let mut command =
        sandbox.command(arguments.into_iter().chain([python(), programs().join("dirty_memory.py")]));
    if let Some(fault) = fault {
        command.env("CKPT_FAULT", fault);
    }
    sandbox.start_command(name, command)
}

/// A job that runs and answers.
fn ready(sandbox: &Sandbox, name: &str, fault: Option<&str>) -> Running {
    let mut job = job(sandbox, name, fault);
    job.until("the program is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(sandbox);
    job
}

fn passes(mut job: Running, sandbox: &Sandbox, what: &str) {
    sandbox.verify_all();
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{what}: {}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n", "{what}: {}", job.said());
}

/// Called in a machine.
#[test]
fn nothing_is_lost_by_kills_during_pre_copy() {
    if shared_directory().is_none() {
        ckpt_test_skip::skip("another test runs this one in a virtual machine");
        return;
    }
    for point in CRIU_POINTS {
        let sandbox = Sandbox::new();
        let job = ready(&sandbox, "job", Some(&format!("{point}=kill-criu")));
        job.checkpoint(&sandbox);
        assert!(job.said().contains("memory is copied while the job is paused"), "{point}: {}", job.said());
        passes(job, &sandbox, &format!("CRIU killed at {point}"));
    }
    for point in POINTS {
        let sandbox = Sandbox::new();
        let mut first = ready(&sandbox, "first", None);
        let id = first.checkpoint(&sandbox);
        assert!(first.said().contains("pre-copy, round 2"), "{}", first.said());
        first.kill_everything();
        let mut second = job(&sandbox, "second", Some(&format!("{point}=kill")));
        second.until_answering(&sandbox);
        assert!(!sandbox.call(["checkpoint"]).status.success(), "{point}");
        second.wait_status();
        assert_eq!(sandbox.snapshots(), [id], "{point}");
        let mut third = job(&sandbox, "third", None);
        third.until_answering(&sandbox);
        assert!(third.said().contains("resumed from snapshot"), "{point}: {}", third.said());
        passes(third, &sandbox, &format!("ckpt-run killed at {point}"));
    }
}
