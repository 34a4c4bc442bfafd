//! Snapshots in memory of which each part is also in the memory of another node (`--replicas`): they survive the loss of a
//! machine.

use super::assert_blocks;
use super::job::{Job, codes, machines, said};
use super::moving::{NODE_0, of_network};
use super::ring;
use super::spares::{training_with_spares, until_it_waits};
use ckpt_run_tests::Running;
use rustix::process::Signal;
use std::fs;

const BLOCKS: usize = 2000;

/// Of a job of which one snapshot goes to the stores, and all later ones stay in memory.
const REPLICAS: [&str; 6] = ["--persist-every", "1000", "--replicas", "1", "--lost-node", "wait"];

fn with_replicas(mut job: Job) -> Job {
    let others = ["-v", "--interval", "500ms", "--node-timeout", "3s"];
    job.options.extend(others.iter().chain(&REPLICAS).map(|word| (*word).to_owned()));
    job
}

/// The snapshots that a node has in memory, oldest first.
fn in_memory(job: &Job, node: usize) -> Vec<String> {
    let held = job.machines.sandboxes[node].json(["status", "--json"]);
    let held = held[0]["in_memory"]["snapshots"].as_array().cloned().unwrap_or_default();
    held.iter().map(|one| one["id"].as_str().unwrap_or_default().to_owned()).collect()
}

/// The newest snapshot in the store of a node.
pub fn newest_stored(job: &Job, node: usize) -> String {
    // What `ls` lists may be in memory.
    let manifests = job.machines.sandboxes[node].store.join(format!("jobs/both.node{node}/manifests"));
    let names = fs::read_dir(manifests).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter_map(|name| name.into_string().ok()).max().expect("a snapshot in the store")
}

/// Waits until two newer snapshots are in memory than those that are there now, and returns the older one of them.
fn until_newer(job: &Job, running: &mut [Running]) -> String {
    let last = in_memory(job, 0).pop().unwrap_or_default();
    running[0].until("two snapshots in memory", || {
        let now = in_memory(job, 0);
        (now.len() == 2 && now.iter().all(|id| *id > last)).then(|| now[0].clone())
    })
}

/// Whether the text says that the job was resumed from a snapshot that is not older than `id`.
fn resumed_from(text: &str, id: &str) -> bool {
    text.rsplit_once("resumed from snapshot ").is_some_and(|(_, from)| from.get(..id.len()) >= Some(id))
}

/// Machines are lost, that of node 0 too. The part of each comes from the memory of the other one.
#[test]
fn a_lost_machine_costs_no_snapshot_in_memory() {
    let Some(machines) = machines(4) else { return };
    let mut job = with_replicas(of_network(Job::stream_to(machines, BLOCKS, NODE_0), 2));
    job.standbys = vec![2, 3];
    let mut running = job.begun("blocks.txt");
    for (node, spare) in [(1, 2), (0, 3)] {
        let mut launcher = job.start_spare(spare, node);
        until_it_waits(&job, &mut launcher, spare);
        let newest = until_newer(&job, &mut running);
        let stored = newest_stored(&job, node);
        assert!(stored < newest, "{stored} {newest}: {}", running[0].said());
        job.machines.connect(job.places[node], false);
        running[node].kill_everything();
        running[node] = launcher;
        job.places[node] = spare;
        job.until_more(&mut running, "blocks.txt", 5);
        job.until_answering(&mut running);
        let said = job.machines.sandboxes[spare].read("spare.err");
        assert!(resumed_from(&said, &newest), "not older than {newest}: {said}");
        // The other one has what it had.
        assert!(resumed_from(&running[1 - node].said(), &newest), "{newest}: {}", running[1 - node].said());
    }
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

/// Each machine has a store of its own, and so has the spare: the part of the lost one is in the memory of the other node only,
/// encrypted with the key of that node.
#[test]
fn with_replicas_a_spare_needs_no_common_store() {
    let Some(machines) = machines(3) else { return };
    let mut job = with_replicas(of_network(Job::stream_to(machines, BLOCKS, NODE_0), 2));
    job.options.extend(["--encrypt-key-file", "key"].map(str::to_owned));
    let mut running = job.begun("blocks.txt");
    let mut spare = job.start_spare_with_own_store(2, 1);
    until_it_waits(&job, &mut spare, 2);
    let newest = until_newer(&job, &mut running);
    job.machines.connect(1, false);
    running[1].kill_everything();
    running[1] = spare;
    job.until_more(&mut running, "blocks.txt", 5);
    let text = running[1].said();
    assert!(resumed_from(&text, &newest), "not older than {newest}: {text}");
    assert!(text.contains("which is in the memory of another node"), "{text}");
    let taken = &job.machines.sandboxes[2];
    running[1]
        .until("a snapshot in the store of the spare", || (!taken.snapshots().is_empty()).then_some(()));
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

/// A launcher that is killed and started again on its machine. Then without a replica: an older snapshot is resumed.
#[test]
fn without_its_replica_a_part_is_lost() {
    let Some(machines) = machines(2) else { return };
    let mut job = with_replicas(Job::stream(machines, BLOCKS));
    let mut running = job.begun("blocks.txt");
    for node in [1, 0] {
        let newest = until_newer(&job, &mut running);
        running[node].kill_everything();
        // Its replicas cannot be stored from now on; its snapshots are taken nevertheless.
        if node == 1 {
            job.fault(0, Some("replicate=error"));
        }
        running[node] = job.start_one(node);
        job.until_more(&mut running, "blocks.txt", 5);
        job.until_answering(&mut running);
        for one in &running {
            assert!(resumed_from(&one.said(), &newest), "not older than {newest}: {}", one.said());
        }
    }
    let _ = until_newer(&job, &mut running);
    let text = running[0].said();
    assert!(text.contains("has no replica in the memory of another node: injected"), "{text}");
    let stored = newest_stored(&job, 0);
    running[0].kill_everything();
    job.fault(0, None);
    running[0] = job.start_one(0);
    job.until_more(&mut running, "blocks.txt", 5);
    job.until_answering(&mut running);
    for one in &running {
        let text = one.said();
        assert!(text.contains("it lacks the part of node 0"), "{text}");
        assert!(
            text.rsplit_once("resumed from snapshot ").unwrap().1.starts_with(&stored),
            "{stored}: {text}"
        );
    }
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

/// Each node has another holder: of three, each is lost.
#[test]
fn each_of_three_nodes_has_a_holder() {
    let Some(machines) = machines(3) else { return };
    let job = with_replicas(Job::ring(machines, ring::ROUNDS));
    let mut running = job.begun("rounds.txt");
    for node in [1, 2, 0] {
        let newest = until_newer(&job, &mut running);
        assert!(newest_stored(&job, node) < newest, "{}", running[0].said());
        running[node].kill_everything();
        running[node] = job.start_one(node);
        job.until_more(&mut running, "rounds.txt", 2);
        job.until_answering(&mut running);
        for one in &running {
            assert!(resumed_from(&one.said(), &newest), "not older than {newest}: {}", one.said());
        }
    }
    job.full_speed();
    assert_eq!(codes(&mut running), [0; 3], "{}", said(&running));
    ring::assert_rounds(&job, &running);
}

/// The job is preempted while a replica waits for its holder: the last snapshot goes to the stores at once.
#[test]
fn a_replica_in_progress_does_not_delay_the_last_snapshot() {
    for node in [0, 1] {
        preempted_while_a_replica_is_in_progress(node);
    }
}

/// That of this node's part, while the other node has its own.
fn preempted_while_a_replica_is_in_progress(node: usize) {
    let Some(machines) = machines(2) else { return };
    let mut job = with_replicas(Job::stream(machines, BLOCKS));
    let held = job.machines.sandboxes[1 - node].path().join("held");
    job.fault(1 - node, Some(&format!("replica-request=hold:{}", held.display())));
    let mut running = job.begun("blocks.txt");
    until_newer(&job, &mut running);
    let first = newest_stored(&job, 0);
    fs::write(&held, "").unwrap();
    let is_in_progress = |of: usize| {
        let said = job.machines.sandboxes[of].read("job.err");
        said.matches("its replica is begun").count() > said.matches("its replica took").count()
    };
    running[0]
        .until("a replica in progress", || (is_in_progress(node) && !is_in_progress(1 - node)).then_some(()));
    running[0].signal(Signal::TERM);
    assert_eq!(codes(&mut running), [75, 75], "{}", said(&running));
    let text = running[0].said();
    assert!(text.contains("its last snapshot is committed"), "{text}");
    assert!(newest_stored(&job, 0) > first && newest_stored(&job, 1) > first, "{text}");
    fs::remove_file(&held).unwrap();
    job.fault(1 - node, None);
    job.full_speed();
    let mut running = job.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

/// The spare cannot read the part, of which node 0 knows that another node has it.
#[test]
fn a_part_that_its_holder_does_not_give_costs_the_snapshots_in_memory_only() {
    let Some(machines) = machines(3) else { return };
    let mut job = with_replicas(of_network(Job::stream_to(machines, BLOCKS, NODE_0), 2));
    let mut running = job.begun("blocks.txt");
    // It has the variables of the node.
    job.fault(1, Some("replicas-listed=error"));
    let mut spare = job.start_spare(2, 1);
    job.fault(1, None);
    until_it_waits(&job, &mut spare, 2);
    let newest = until_newer(&job, &mut running);
    let stored = newest_stored(&job, 1);
    assert!(stored < newest, "{stored} {newest}");
    job.machines.connect(1, false);
    running[1].kill_everything();
    running[1] = spare;
    job.until_more(&mut running, "blocks.txt", 5);
    for one in &running {
        let text = one.said();
        assert!(text.contains("nor can another node give it"), "{text}");
        assert!(text.contains(&format!("resumed from snapshot {stored}")), "{stored}: {text}");
    }
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

/// As with spares alone. Only the first snapshot of each start goes to the store.
#[test]
fn training_with_replicas_survives_many_kills() {
    training_with_spares(&REPLICAS);
}
