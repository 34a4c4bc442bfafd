//! `--network job`: a machine is lost, and another one with other addresses takes its node. The directories and stores are on
//! a file system that all machines have.

use super::job::{Job, codes, machines, said};
use super::{assert_blocks, kill, survives_many_kills};

pub const NODE_0: &str = "ckpt-node-0";

pub fn of_network(mut job: Job, nodes: usize) -> Job {
    job.places.truncate(nodes);
    job.options.extend(["--network", "job"].map(str::to_owned));
    job
}

#[test]
fn another_machine_takes_the_node_of_one_that_is_lost() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines(3) else { return };
    let mut job = of_network(Job::stream_to(machines, BLOCKS, NODE_0), 2);
    job.options.extend(["--node-timeout", "3s"].map(str::to_owned));
    let mut running = job.begun("blocks.txt");
    job.checkpoint(&running);
    let shown = job.machines.sandboxes[1].ok(["show", &job.machines.sandboxes[1].snapshots()[0]]);
    assert!(shown.contains("network of the job") && shown.contains("/30"), "{shown}");
    // Node 1 moves, then node 0 with the coordinator, to where node 1 was.
    for node in [1, 0] {
        job.until_more(&mut running, "blocks.txt", 5);
        job.machines.connect(job.places[node], false);
        running[node].kill_everything();
        assert_eq!(running[1 - node].wait(), 125, "{}", running[1 - node].said());
        let lost = job.places[node];
        job.places[node] = job.free_machine();
        running = job.start();
        job.until_answering(&mut running);
        for one in &running {
            assert!(one.said().contains("resumed from snapshot"), "{}", one.said());
        }
        job.machines.connect(lost, true);
        job.checkpoint(&running);
    }
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
    for place in &job.places {
        assert!(job.machines.interfaces(*place, "ckpt").is_empty(), "nothing is left");
    }
}

/// What a launcher leaves that was killed is deleted by the next start of any job on that machine, and nothing else is.
#[test]
fn an_interface_that_a_killed_launcher_has_left_is_deleted() {
    const OF_ANOTHER: &str = "ckpt01234567";
    let Some(machines) = machines(2) else { return };
    let job = of_network(Job::stream_to(machines, 2000, NODE_0), 2);
    job.machines.add_vxlan(0, OF_ANOTHER);
    let mut running = job.begun("blocks.txt");
    job.checkpoint(&running);
    running[0].kill_launcher();
    assert_eq!(running[1].wait(), 125, "{}", running[1].said());
    let mut left = job.machines.interfaces(0, "ckpt");
    left.retain(|name| name != OF_ANOTHER);
    assert_eq!((left.len(), job.machines.interfaces(1, "ckpt").len()), (1, 0), "{left:?}");
    let found = job.machines.on(0, &job.machines.sandboxes[0].command(["doctor"])).output().unwrap();
    let found = String::from_utf8_lossy(&found.stdout).into_owned();
    assert!(found.contains(&left[0]) && !found.contains(OF_ANOTHER), "{found}");
    // A job on this machine only.
    let mut alone = job.machines.on(0, &job.machines.sandboxes[0].command(["--job", "alone", "--", "true"]));
    let output = alone.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && text.contains(&format!("interface {}", left[0])), "{text}");
    assert_eq!(job.machines.interfaces(0, "ckpt"), [OF_ANOTHER]);
    // That of a launcher that runs stays, whatever begins beside it.
    let mut running = job.start();
    job.until_answering(&mut running);
    let both = job.machines.interfaces(0, "ckpt");
    assert_eq!(both.len(), 2, "{both:?}");
    assert!(alone.status().unwrap().success());
    assert_eq!(job.machines.interfaces(0, "ckpt"), both);
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, 2000, &running);
    assert_eq!(job.machines.interfaces(0, "ckpt"), [OF_ANOTHER]);
}

#[test]
fn connections_beside_the_network_of_a_job_are_named() {
    let Some(machines) = machines(2) else { return };
    let job = of_network(Job::stream(machines, 2000), 2);
    let running = job.begun("blocks.txt");
    job.checkpoint(&running);
    for (node, address) in ["10.77.0.1", "10.77.0.2"].into_iter().enumerate() {
        assert!(job.has_said(node, &format!("the job has connections from {address}")), "{}", said(&running));
    }
}

#[test]
fn what_does_not_fit_the_network_of_a_job_is_refused() {
    let Some(machines) = machines(3) else { return };
    let mut job = of_network(Job::stream_to(machines, 2000, NODE_0), 2);
    let mut running = job.begun("blocks.txt");
    job.checkpoint(&running);
    running[0].kill_everything();
    running[1].wait();
    let with = |job: &mut Job, options: &[&str], expected: &str| {
        job.options = options.iter().map(|option| (*option).to_owned()).collect();
        let mut running = job.start();
        assert_eq!(codes(&mut running), [2, 2], "{}", said(&running));
        assert!(running.iter().all(|one| one.said().contains(expected)), "{}", said(&running));
    };
    with(&mut job, &[], "use this option again");
    with(&mut job, &["--network", "job", "--network-range", "10.9.0.0/24"], "with which it began");
    with(&mut job, &["--network", "job", "--network-range", "10.9.0.0/31"], "too small for 2 nodes");
    job.options = ["--network", "job"].map(str::to_owned).into();
    // A firewall between the machines.
    job.machines.block_udp(0, true);
    let mut running = job.start();
    let ended = codes(&mut running);
    assert!(
        ended == [125, 125] && said(&running).contains("does not answer"),
        "{ended:?} {}",
        said(&running)
    );
    job.machines.block_udp(0, false);
    // No new run has begun after this: the next start resumes the present one.
    let taken = ["--network", "job", "--network-range", "10.77.0.0/30", "--resume", "never"];
    with(&mut job, &taken, "choose other addresses");
    job.options = ["--network", "job"].map(str::to_owned).into();
    job.full_speed();
    let mut running = job.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    for one in &running {
        assert!(one.said().contains("resumed from snapshot"), "{}", one.said());
    }
    assert_blocks(&job, 2000, &running);
}

/// Processes of the job, launchers and machines are killed. A node whose machine was killed goes to the spare one.
#[test]
fn training_that_moves_between_machines_survives_many_kills() {
    const STEPS: usize = 1500;
    let Some(machines) = machines(3) else { return };
    let job = of_network(Job::training_at(machines, STEPS, (2, NODE_0)), 2);
    let mut moved = 0;
    survives_many_kills(job, STEPS, |job, running, random| {
        if random.bool() {
            let node = random.usize(0..2);
            running[node].kill_everything();
            job.places[node] = job.free_machine();
            moved += 1;
        } else {
            kill(running, random);
        }
    });
    eprintln!("{moved} kills were of a machine whose node has moved");
}
