//! Snapshots of which the parts are in memory, and only every so many in the stores (`--persist-every`).

use super::assert_blocks;
use super::job::{Job, codes, kill_processes, machines, said};
use super::replicas::newest_stored;
use rustix::process::Signal;

const BLOCKS: usize = 3000;

/// A job of which each third snapshot goes to the stores.
fn job() -> Option<Job> {
    let mut job = Job::stream(machines(2)?, BLOCKS);
    let options = ["-v", "--interval", "500ms", "--persist-every", "3", "--keep", "2", "--max-restarts", "5"];
    job.options = options.map(str::to_owned).into();
    Some(job)
}

/// How many snapshots a node has in memory.
fn in_memory(job: &Job, node: usize) -> usize {
    let held = job.machines.sandboxes[node].json(["status", "--json"]);
    held[0]["in_memory"]["snapshots"].as_array().map_or(0, Vec::len)
}

#[test]
fn a_job_that_fails_is_resumed_from_memory_and_one_that_is_lost_from_the_store() {
    let Some(job) = job() else { return };
    let mut running = job.begun("blocks.txt");
    running[0].until("two snapshots in memory", || (in_memory(&job, 0) == 2).then_some(()));
    // A process fails: the launchers stay, with what they have in memory.
    let newest = job.machines.sandboxes[0].json(["status", "--json"]);
    let newest = newest[0]["in_memory"]["snapshots"][1]["id"].as_str().unwrap().to_owned();
    assert!(kill_processes(&running[1], "stream.py") > 0);
    running[0].until("a resume", || job.has_resumed(0, 1).then_some(()));
    let text = running[0].said();
    let resumed = text.split_once("resumed from snapshot ").unwrap().1;
    let stored = job.machines.sandboxes[0].snapshots();
    assert!(resumed[..newest.len()] >= *newest, "not older than {newest}: {text}");
    job.until_more(&mut running, "blocks.txt", 5);
    // A launcher is lost, and with it its memory.
    running[1].kill_everything();
    assert_eq!(running[0].wait(), 125, "{}", running[0].said());
    assert!(!stored.is_empty() && job.snapshots().iter().all(|count| *count > 0), "{stored:?}");
    let mut running = job.start();
    job.until_answering(&mut running);
    assert!(running[1].said().contains("resumed from snapshot"), "{}", running[1].said());
    // The last snapshot is in the store.
    running[0].signal(Signal::TERM);
    assert_eq!(codes(&mut running), [75, 75], "{}", said(&running));
    let ids = [0, 1].map(|node| job.machines.sandboxes[node].snapshots().pop().unwrap());
    job.full_speed();
    let mut running = job.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    for (one, id) in running.iter().zip(&ids) {
        assert!(one.said().contains(&format!("resumed from snapshot {id}")), "{id}: {}", one.said());
    }
    assert_blocks(&job, BLOCKS, &running);
}

/// Somebody waits for a snapshot that was asked for: it is in the stores, on whichever node.
#[test]
fn a_snapshot_that_is_asked_for_is_in_the_stores() {
    let Some(mut job) = job() else { return };
    "off".clone_into(&mut job.options[2]);
    let mut running = job.begun("blocks.txt");
    for node in [0, 1, 1] {
        let before = job.snapshots();
        running[node].checkpoint(&job.machines.sandboxes[node]);
        running[1 - node].until("the part of the other node", || {
            let now = job.snapshots();
            (0..2).all(|node| now[node] > before[node] || now[node] == 2).then_some(())
        });
        assert_eq!(in_memory(&job, node), 0);
    }
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

/// A node without memory for its part costs that snapshot: the next one goes to the stores.
#[test]
fn a_node_without_memory_does_not_keep_the_job_from_being_saved() {
    let Some(mut job) = job() else { return };
    job.fault(1, Some("memory-begin=error"));
    let mut running = job.begun("blocks.txt");
    running[0]
        .until("three snapshots", || (newest_number(&job).is_some_and(|newest| newest >= 3)).then_some(()));
    assert_eq!(in_memory(&job, 0), 0, "{}", running[0].said());
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert!(running[0].said().contains("there is no memory for a snapshot"), "{}", running[0].said());
    assert_blocks(&job, BLOCKS, &running);
}

/// A snapshot in memory that fails for another reason than memory: the next ones are in memory too.
#[test]
fn a_snapshot_in_memory_that_fails_sends_no_others_to_the_stores() {
    let Some(mut job) = job() else { return };
    "1000".clone_into(&mut job.options[4]);
    job.fault(1, Some("vote@3=error"));
    let mut running = job.begun("blocks.txt");
    running[0].until("a failure", || job.has_said(0, "injected at vote").then_some(()));
    let first = newest_stored(&job, 0);
    let taken = || {
        let said = job.machines.sandboxes[0].read("job.err");
        said.rsplit_once("injected at vote").expect("a failure").1.matches("kept in memory").count()
    };
    running[0].until("two snapshots in memory", || (taken() >= 2).then_some(()));
    assert_eq!(newest_stored(&job, 0), first, "{}", running[0].said());
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

/// The number of the newest snapshot in the store of node 0.
fn newest_number(job: &Job) -> Option<u64> {
    job.machines.sandboxes[0].snapshots().last()?.split('-').next()?.parse().ok()
}
