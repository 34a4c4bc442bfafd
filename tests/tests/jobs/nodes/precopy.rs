//! Parts whose memory is copied while the job runs (`--precopy`).

use super::job::{Job, codes, machines, said};
use super::{assert_blocks, assert_resumes};
use ckpt_run_tests::machines::Machines;
use ckpt_run_tests::virtual_machine::shared_directory;
use rustix::process::Signal;
use std::fs;

const BLOCKS: usize = 2000;

/// Memory is being copied at a node, which takes longer than a test: CRIU is stopped before it needs what this kernel may not
/// have.
fn slow_copies(node: usize, machines: Machines) -> Job {
    let mut job = Job::stream(machines, BLOCKS);
    job.options = ["--precopy", "1", "--freeze-timeout", "1h", "--grace", "5m"].map(str::to_owned).into();
    for sandbox in &mut job.machines.sandboxes {
        let criu = sandbox.criu_that_seems_to_track_memory();
        sandbox.variables.push(("CKPT_CRIU".to_owned(), criu.display().to_string()));
    }
    job.fault(node, Some("precopy-begin@1=stop-criu"));
    job
}

#[test]
fn copies_end_when_another_node_has_given_up() {
    let Some(machines) = machines(2) else { return };
    let mut job = slow_copies(0, machines);
    let hold = job.machines.sandboxes[1].path().join("hold");
    fs::write(&hold, "").unwrap();
    job.fault(1, Some(&format!("precopy-begin@1=hold:{},vote@1=error", hold.display())));
    let mut running = job.begun("blocks.txt");
    std::thread::scope(|scope| {
        let call = scope.spawn(|| job.machines.sandboxes[0].call(["checkpoint"]));
        running[0].until("a copy", || job.has_said(0, "fault point precopy-begin").then_some(()));
        fs::remove_file(&hold).unwrap();
        let failed = call.join().expect("no panic");
        let text = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert!(!failed.status.success() && text.contains("node 1: "), "{text}{}", said(&running));
    });
    job.checkpoint(&running);
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

#[test]
fn a_preemption_does_not_wait_for_the_copies_of_a_node() {
    let Some(machines) = machines(2) else { return };
    let mut job = slow_copies(1, machines);
    let mut running = job.begun("blocks.txt");
    std::thread::scope(|scope| {
        let call = scope.spawn(|| job.machines.sandboxes[0].call(["checkpoint"]));
        running[1].until("a copy", || job.has_said(1, "fault point precopy-begin").then_some(()));
        running[0].signal(Signal::TERM);
        assert_eq!(codes(&mut running), [75, 75], "{}", said(&running));
        let output = call.join().expect("no panic");
        assert!(output.status.success(), "it is the last one: {}", String::from_utf8_lossy(&output.stderr));
    });
    assert_eq!(job.snapshots(), [1, 1]);
    job.fault(1, None);
    job.options.clear();
    assert_resumes(&job, BLOCKS);
}

/// Called in a virtual machine whose kernel tracks changes to memory, by `distribution_kernel.rs`.
#[test]
fn parts_whose_memory_was_copied_before_are_one_snapshot() {
    const BLOCKS: usize = 600;
    if shared_directory().is_none() {
        ckpt_test_skip::skip("another test runs this one in a virtual machine");
        return;
    }
    let machines = Machines::make(2).expect("machines in the machine");
    let mut job = Job::stream(machines, BLOCKS);
    job.options = ["-vv", "--precopy", "2"].map(str::to_owned).into();
    // One node cannot copy: it takes its part all the same.
    job.fault(1, Some("precopy-begin@2=kill-criu"));
    let mut running = job.begun("blocks.txt");
    job.checkpoint(&running);
    assert!(job.has_said(0, "pre-copy, round 2"), "{}", running[0].said());
    assert!(job.has_said(1, "memory is copied while the job is paused"), "{}", running[1].said());
    job.until_more(&mut running, "blocks.txt", 3);
    job.checkpoint(&running);
    assert!(job.has_said(1, "pre-copy, round 2"), "{}", running[1].said());
    job.until_more(&mut running, "blocks.txt", 3);
    running[1].kill_everything();
    running[0].wait();
    // A launcher dies while memory is copied.
    for node in [0, 1] {
        job.fault(node, Some("precopy-round@1=kill"));
        let mut running = job.start();
        job.until_answering(&mut running);
        assert!(!job.machines.sandboxes[0].call(["checkpoint"]).status.success());
        running[node].wait_status();
        assert_eq!(running[1 - node].wait(), 125, "{}", running[1 - node].said());
        job.fault(node, None);
    }
    assert_eq!(job.snapshots(), [2, 2]);
    assert_resumes(&job, BLOCKS);
}
