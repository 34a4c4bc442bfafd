//! Launchers that stay when one is lost: a spare takes its place, or somebody starts it again.

use super::job::{Job, codes, machines, said as said_by};
use super::moving::{NODE_0, of_network};
use super::objects::in_objects;
use super::{assert_blocks, survives_many_kills};
use ckpt_run_tests::Running;
use ckpt_test_s3::Service;
use std::fs;
use std::time::Instant;

const BLOCKS: usize = 2000;

/// Two of four machines are lost, one after the other.
#[test]
fn a_spare_takes_the_place_of_a_node_that_is_lost() {
    let Some(machines) = machines(4) else { return };
    let mut job = of_network(Job::stream_to(machines, BLOCKS, NODE_0), 2);
    job.options.extend(["--node-timeout", "3s"].map(str::to_owned));
    let mut spares: Vec<_> = [2, 3].map(|number| job.start_spare(number, 1)).into();
    let mut running = job.begun("blocks.txt");
    for (spare, machine) in spares.iter_mut().zip([2, 3]) {
        until_it_waits(&job, spare, machine);
    }
    for round in 1..=2 {
        job.checkpoint(&running);
        job.until_more(&mut running, "blocks.txt", 5);
        job.machines.connect(job.places[1], false);
        let lost_at = Instant::now();
        running[1].kill_everything();
        job.places[1] = 1 + round;
        running[1] = spares.remove(0);
        running[0].until("a resume", || job.has_resumed(0, round).then_some(()));
        job.until_more(&mut running, "blocks.txt", 1);
        println!("{:.1} s from the loss of a machine to the next blocks", lost_at.elapsed().as_secs_f64());
        job.until_answering(&mut running);
    }
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said_by(&running));
    assert_blocks(&job, BLOCKS, &running);
}

pub fn until_it_waits(job: &Job, spare: &mut Running, machine: usize) {
    let said = || job.machines.sandboxes[machine].read("spare.err");
    spare.until("a spare", || said().contains("waits until a node is lost").then_some(()));
}

/// One that is not needed ends with the job. One whose node 0 is lost ends as the other nodes do.
#[test]
fn a_spare_ends_with_the_job() {
    let Some(machines) = machines(3) else { return };
    let job = of_network(Job::stream_to(machines, 200, NODE_0), 2);
    let mut spare = job.start_spare(2, 1);
    let mut running = job.begun("blocks.txt");
    until_it_waits(&job, &mut spare, 2);
    // Before the first snapshot, a part can only begin, with its own command.
    running[1].kill_everything();
    assert_eq!((running[0].wait(), spare.wait()), (125, 125), "{}", spare.said());
    for sandbox in &job.machines.sandboxes[..2] {
        fs::remove_file(sandbox.path().join("blocks.txt")).unwrap();
    }
    let mut spare = job.start_spare(2, 1);
    let mut running = job.begun("blocks.txt");
    until_it_waits(&job, &mut spare, 2);
    job.checkpoint(&running);
    running[0].kill_launcher();
    assert_eq!((running[1].wait(), spare.wait()), (125, 125), "{}", spare.said());
    let mut spare = job.start_spare(2, 1);
    job.full_speed();
    let mut running = job.start();
    assert_eq!((codes(&mut running), spare.wait()), (vec![0, 0], 0), "{}{}", said_by(&running), spare.said());
    assert_blocks(&job, 200, &running);
}

/// The machine of node 0 is lost, with the coordinator.
#[test]
fn a_spare_takes_the_place_of_node_0() {
    let Some(machines) = machines(3) else { return };
    let mut job = of_network(Job::stream_to(machines, BLOCKS, NODE_0), 2);
    job.options.extend(["--node-timeout", "3s"].map(str::to_owned));
    job.standbys = vec![2];
    let mut spare = job.start_spare(2, 0);
    let mut running = job.begun("blocks.txt");
    until_it_waits(&job, &mut spare, 2);
    job.checkpoint(&running);
    job.until_more(&mut running, "blocks.txt", 5);
    job.machines.connect(0, false);
    let lost_at = Instant::now();
    running[0].kill_everything();
    running[0] = spare;
    running[1].until("a resume", || job.has_resumed(1, 1).then_some(()));
    job.until_more(&mut running, "blocks.txt", 1);
    println!("{:.1} s from the loss of node 0 to the next blocks", lost_at.elapsed().as_secs_f64());
    job.until_answering(&mut running);
    let said = job.machines.sandboxes[2].read("spare.err");
    assert!(said.contains("node 0 is not there: this spare takes its place"), "{said}");
    job.checkpoint(&running);
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said_by(&running));
    assert_blocks(&job, BLOCKS, &running);
}

/// Four machines, with a launcher on each that is started again when it fails, with the same command. Any of them may have node
/// 0, and any of them is killed at any time.
#[test]
fn training_with_spares_survives_many_kills() {
    training_with_spares(&[]);
}

pub fn training_with_spares(options: &[&str]) {
    const STEPS: usize = 1500;
    let Some(machines) = machines(4) else { return };
    let service = Service::new();
    let (mut job, _proxies) = in_objects(Job::training_at(machines, STEPS, (2, NODE_0)), &service);
    job.options.extend(["--node-timeout", "3s"].iter().chain(options).map(|word| (*word).to_owned()));
    job.standbys = vec![1, 2, 3];
    let start = |job: &Job, machine: usize| match machine {
        0 | 1 => job.start_one(machine),
        _ => job.start_spare(machine, machine),
    };
    let (mut moved, mut spares) =
        (0, [2, 3].map(|machine| start(&job, machine)).into_iter().collect::<Vec<_>>());
    survives_many_kills(job, STEPS, |job, running, random| {
        let machine = random.usize(0..4);
        let launcher = match machine {
            0 | 1 => &mut running[machine],
            _ => &mut spares[machine - 2],
        };
        if random.bool() {
            launcher.kill_everything();
        } else {
            launcher.kill_launcher();
        }
        moved += usize::from(machine < 2);
        for (number, spare) in spares.iter_mut().enumerate() {
            if spare.has_ended() {
                assert_ne!(spare.wait_status().code(), Some(2), "{}", spare.said());
                *spare = start(job, 2 + number);
            }
        }
    });
    eprintln!("{moved} kills were of a machine that was not started as a spare");
    for spare in &mut spares {
        assert!(spare.has_ended(), "{}", spare.said());
    }
}

/// A spare that takes itself for node 0 while there is one: with an object store, and with a lock that both see.
#[test]
fn a_spare_gives_way_to_another_node_0() {
    for is_locked in [false, true] {
        let Some(machines) = machines(3) else { return };
        let service = Service::new();
        let mut job = Job::stream_to(machines, BLOCKS, NODE_0);
        job.standbys = vec![2];
        let (job, _proxies) =
            if is_locked { (of_network(job, 2), Vec::new()) } else { in_objects(job, &service) };
        let mut running = job.begun("blocks.txt");
        job.checkpoint(&running);
        let mut spare = job.start_as_node_0(2);
        until_it_waits(&job, &mut spare, 2);
        let said = job.machines.sandboxes[2].read("spare.err");
        assert!(
            said.contains(if is_locked { "this launcher is a spare" } else { "another launcher of node 0" }),
            "{said}"
        );
        job.full_speed();
        assert_eq!(
            (codes(&mut running), spare.wait()),
            (vec![0, 0], 0),
            "{}{}",
            said_by(&running),
            spare.said()
        );
        assert_blocks(&job, BLOCKS, &running);
    }
}

/// `--lost-node wait`: only the launcher that was lost is started again.
#[test]
fn launchers_wait_for_one_that_is_started_again() {
    let Some(machines) = machines(2) else { return };
    let mut job = Job::stream(machines, BLOCKS);
    job.options.extend(["--lost-node", "wait", "--resume", "never"].map(str::to_owned));
    let mut running = job.begun("blocks.txt");
    for node in [1, 0] {
        job.checkpoint(&running);
        running[node].kill_everything();
        let waits = || job.has_said(1 - node, "It is resumed when all nodes are there").then_some(());
        running[1 - node].until("it waits", waits);
        // Those that have begun do so no more.
        job.options.retain(|option| option != "--resume" && option != "never");
        running[node] = job.start_one(node);
        job.until_more(&mut running, "blocks.txt", 5);
        job.until_answering(&mut running);
        assert!(job.has_resumed(1 - node, 2 - node), "{}", running[1 - node].said());
    }
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said_by(&running));
    assert_blocks(&job, BLOCKS, &running);
}
