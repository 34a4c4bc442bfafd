//! A job on two machines that hangs, one that is preempted and cannot be saved, and one whose snapshots are all damaged.

use crate::nodes::job::{Job, codes, kill_processes, machines, said};
use ckpt_run_tests::Running;
use ckpt_run_tests::machines::Machines;
use std::fs;

/// More than a hang takes to be found.
const STEPS: usize = 1500;

fn touch(job: &Job, node: usize, name: &str) {
    fs::write(job.machines.sandboxes[node].path().join(name), "").unwrap();
}

fn remove(job: &Job, node: usize, name: &str) {
    fs::remove_file(job.machines.sandboxes[node].path().join(name)).unwrap();
}

/// Each step of each node once, in order.
fn assert_steps(job: &Job, running: &[Running]) {
    let expected: String = (0..STEPS).map(|step| format!("{step}\n")).collect();
    for node in 0..2 {
        assert!(job.machines.sandboxes[node].read("steps.txt") == expected, "node {node}: {}", said(running));
    }
}

/// With a watchdog of this time-out.
fn watched(machines: Machines, hang_timeout: &str) -> Job {
    let mut job = Job::works(machines, STEPS);
    let options = ["--interval", "off", "--hang-timeout", hang_timeout, "--monitor-interval", "100ms"];
    job.options = options.into_iter().chain(["--max-restarts", "5"]).map(str::to_owned).collect();
    job
}

/// The snapshots that were taken meanwhile hang, too.
#[test]
fn a_hang_is_resumed_from_a_snapshot_before_it_on_all_nodes() {
    let Some(machines) = machines(2) else { return };
    let job = watched(machines, "8s");
    let mut running = job.begun("steps.txt");
    job.checkpoint(&running);
    job.until_more(&mut running, "steps.txt", 5);
    (0..2).for_each(|node| touch(&job, node, "hang"));
    let at = |node| job.lines(node, "steps.txt");
    let mut before = [0, 0];
    running[0].until("the hang", || (std::mem::replace(&mut before, [at(0), at(1)]) == before).then_some(()));
    for _ in 0..2 {
        job.checkpoint(&running);
    }
    (0..2).for_each(|node| remove(&job, node, "hang"));
    running[0].until("a restart", || job.has_said(0, "restart 1 on all nodes").then_some(()));
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    let text = running[0].said();
    assert!(
        text.contains("no node has done anything since") && text.contains("from an older snapshot"),
        "{text}"
    );
    assert!(!text.contains("restart 2"), "{text}");
    assert_steps(&job, &running);
    let report = job.machines.sandboxes[0].json(["report", "--json"]);
    assert!(report["time_ms"]["hang"].as_u64() >= Some(7000), "{}", report["time_ms"]);
}

/// One part waits for the other, which hangs later: the snapshot that is kept from before the hang is the same on both.
#[test]
fn a_hang_after_a_long_wait_is_resumed_from_before_it() {
    let Some(machines) = machines(2) else { return };
    let mut job = watched(machines, "8s");
    job.options.extend(["--keep", "1"].map(str::to_owned));
    let mut running = job.begun("steps.txt");
    let lines = |node| job.lines(node, "steps.txt");
    let until_still = |running: &mut [Running], node: usize| {
        let mut before = 0;
        running[node].until("a part that waits", || {
            (std::mem::replace(&mut before, lines(node)) == lines(node)).then_some(())
        });
    };
    job.checkpoint(&running);
    touch(&job, 0, "stop-here");
    until_still(&mut running, 0);
    // Node 1 works meanwhile.
    let now = lines(1);
    running[1].until("steps", || (lines(1) > now + 20).then_some(()));
    job.checkpoint(&running);
    let now = lines(1);
    running[1].until("steps", || (lines(1) > now + 20).then_some(()));
    touch(&job, 1, "hang");
    until_still(&mut running, 1);
    for _ in 0..2 {
        job.checkpoint(&running);
    }
    remove(&job, 1, "hang");
    running[0].until("a restart", || job.has_said(0, "restart 1 on all nodes").then_some(()));
    remove(&job, 0, "stop-here");
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    let text = running[0].said();
    assert!(text.contains("from an older snapshot") && !text.contains("restart 2"), "{text}");
    assert_steps(&job, &running);
}

/// Such as a rank in a barrier while another one evaluates alone.
#[test]
fn a_part_that_waits_for_another_node_does_not_hang() {
    let Some(machines) = machines(2) else { return };
    let job = watched(machines, "5s");
    let mut running = job.begun("steps.txt");
    touch(&job, 1, "stop-here");
    let waits = "The job is restarted if its parts on the other nodes do nothing either";
    running[1].until("an idle part", || job.has_said(1, waits).then_some(()));
    let now = job.lines(0, "steps.txt");
    running[0].until("steps", || (job.lines(0, "steps.txt") >= now + 100).then_some(()));
    remove(&job, 1, "stop-here");
    running[1].until("a part that works", || job.has_said(1, "works again").then_some(()));
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert!(!said(&running).contains("restart 1"), "{}", said(&running));
    assert_steps(&job, &running);
}

#[test]
fn a_preempted_job_that_cannot_be_saved_gets_sigterm_on_all_nodes() {
    let Some(machines) = machines(2) else { return };
    let mut job = Job::works(machines, STEPS);
    job.options = ["--interval", "off"].map(str::to_owned).into();
    job.fault(0, Some("dump-post-dump@1=error"));
    let mut running = job.begun("steps.txt");
    // A node that has done nothing wrong learns why there is no snapshot.
    let failed = job.machines.sandboxes[1].call(["checkpoint"]);
    let text = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && text.contains("node 0: "), "{text}{}", running[0].said());
    running[0].kill_everything();
    running[1].wait();
    job.fault(0, None);
    job.fault(1, Some("dump-post-dump@1=error"));
    let mut running = job.begun("steps.txt");
    running[0].signal(rustix::process::Signal::TERM);
    assert_eq!(codes(&mut running), [75, 75], "{}", said(&running));
    for (node, one) in running.iter().enumerate() {
        let text = one.said();
        assert!(text.contains("the job cannot be saved: ") && text.contains("is lost"), "{text}");
        assert!(job.machines.sandboxes[node].path().join("saved").is_file(), "it could save itself: {text}");
    }
}

/// The older snapshot that would be tried was deleted by `--keep`.
#[test]
fn a_damaged_snapshot_without_an_older_one_is_tried_again() {
    let Some(machines) = machines(2) else { return };
    let mut job = Job::works(machines, STEPS);
    job.options = ["--interval", "off", "--keep", "1", "--max-restarts", "2"].map(str::to_owned).into();
    let mut running = job.begun("steps.txt");
    for _ in 0..2 {
        job.checkpoint(&running);
        job.until_more(&mut running, "steps.txt", 5);
    }
    running[0].until("one snapshot", || (job.snapshots() == [1, 1]).then_some(()));
    for entry in fs::read_dir(job.machines.sandboxes[1].job_dir().join("packs")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "pack") {
            fs::write(&path, vec![0x5a; fs::read(&path).unwrap().len()]).unwrap();
        }
    }
    assert!(kill_processes(&running[1], "works.py") > 0);
    assert_eq!(codes(&mut running), [125, 125], "{}", said(&running));
    let text = running[0].said();
    assert!(text.contains("is damaged") && text.contains("it was restarted 2 times"), "{text}");
    assert!(!text.contains("an older snapshot is tried"), "{text}");
}
