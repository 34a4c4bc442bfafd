//! A job on two machines, which are network namespaces with their own stores and directories: killed at any moment, on one
//! machine or on both, it goes on when the same commands are run again, and computes the same. More machines are in
//! `ring.rs`, ranks with GPUs in `ranks.rs`.

mod hangs;
mod job;
mod memory;
mod moving;
mod objects;
mod precopy;
mod ranks;
mod replicas;
mod ring;
mod spares;

use ckpt_run_tests::{Running, seeded_rng, until};
use job::{Job, codes, kill_processes, machines, said, set_key};
use std::time::{Duration, Instant};

/// The blocks are complete, each once and in order.
fn assert_blocks(job: &Job, blocks: usize, running: &[Running]) {
    for (node, running) in running.iter().enumerate() {
        let text = job.machines.sandboxes[node].read("blocks.txt");
        let numbers: Vec<_> = text.lines().map(|line| line.split(' ').next().unwrap_or_default()).collect();
        let expected: Vec<_> = (0..blocks).map(|number| number.to_string()).collect();
        assert!(numbers == expected, "node {node}: {} lines\n{}", numbers.len(), running.said());
    }
}

/// The job is resumed by the same commands, and comes to its end.
fn assert_resumes(job: &Job, blocks: usize) {
    job.full_speed();
    let mut running = job.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    for one in &running {
        assert!(one.said().contains("resumed from snapshot"), "{}", one.said());
    }
    assert_blocks(job, blocks, &running);
}

#[test]
fn a_connection_between_two_machines_survives() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines(2) else { return };
    let mut job = Job::stream(machines, BLOCKS);
    job.options = ["--encrypt-key-file", "key", "--resume", "required"].map(str::to_owned).into();
    // A run that has to resume needs a store.
    let mut running = job.start();
    assert_eq!(codes(&mut running), [2, 2], "{}", said(&running));
    job.options.truncate(2);
    let mut running = job.start();
    job.until_lines(&mut running, "blocks.txt", 10);
    job.checkpoint(&running);
    job.until_lines(&mut running, "blocks.txt", job.lines(0, "blocks.txt") + 10);
    // A machine is lost: the other one ends its part too, and says why.
    running[1].kill_everything();
    assert_eq!(running[0].wait(), 125, "{}", running[0].said());
    assert!(running[0].said().contains("the connection to node 1 is lost"), "{}", running[0].said());
    assert!(job.lines(0, "blocks.txt") < BLOCKS, "it was killed in the middle");
    job.options.extend(["--resume", "required"].map(str::to_owned));
    let mut running = job.start();
    job.until_answering(&mut running);
    job.checkpoint(&running);
    // The launcher of the coordinator dies.
    running[0].kill_everything();
    assert_eq!(running[1].wait(), 125, "{}", running[1].said());
    assert!(running[1].said().contains("the connection to node 0 is lost"), "{}", running[1].said());
    assert_eq!(job.snapshots(), [2, 2]);
    assert_resumes(&job, BLOCKS);
}

/// A node that cannot take its part costs the snapshot, nothing else: the job runs on at once on both machines. Then
/// launchers die in the middle of a cut, one at each of its phases.
#[test]
fn a_cut_that_fails_on_one_machine_leaves_the_job_running_on_both() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines(2) else { return };
    let mut job = Job::stream(machines, BLOCKS);
    job.fault(1, Some("dump-post-dump@1=error"));
    let mut running = job.begun("blocks.txt");
    let failed = job.machines.sandboxes[0].call(["checkpoint"]);
    let text = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && text.contains("node 1: "), "{text}{}", running[1].said());
    assert_eq!(job.snapshots(), [0, 0]);
    let before = job.lines(0, "blocks.txt").max(job.lines(1, "blocks.txt"));
    job.until_lines(&mut running, "blocks.txt", before + 5);
    job.checkpoint(&running);
    running[1].kill_everything();
    running[0].wait();
    for (node, point) in [(1, "dump-post-dump@1"), (0, "dump-done@1"), (1, "save-before-commit@1")] {
        job.fault(node, Some(&format!("{point}=kill")));
        let mut running = job.start();
        job.until_answering(&mut running);
        assert!(!job.machines.sandboxes[0].call(["checkpoint"]).status.success(), "{point}");
        running[node].wait_status();
        assert_eq!(running[1 - node].wait(), 125, "{point}: {}", running[1 - node].said());
        job.fault(node, None);
    }
    job.full_speed();
    let mut running = job.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

/// A process has sent a message and closed its connection, and the other end has not read all of it: the rest is in the
/// kernel alone, and would be in no snapshot.
#[test]
fn a_message_between_machines_whose_connection_is_closed_is_not_lost() {
    const MESSAGES: usize = 10;
    let Some(machines) = machines(2) else { return };
    let job = Job::messages(machines, MESSAGES);
    let mut running = job.start();
    running[1].until("a message that is sent", || (job.lines(1, "messages.txt") == 1).then_some(()));
    job.until_answering(&mut running);
    let failed = job.machines.sandboxes[0].call(["checkpoint"]);
    let text = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && text.contains("was being opened or closed"), "{text}");
    assert_eq!((job.snapshots(), job.lines(0, "messages.txt")), (vec![0, 0], 0));
    std::fs::remove_file(job.machines.sandboxes[0].path().join("slow")).unwrap();
    running[0].until("the message", || (job.lines(0, "messages.txt") == 1).then_some(()));
    job.checkpoint(&running);
    running[1].kill_everything();
    running[0].wait();
    job.full_speed();
    let mut running = job.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert!(running[1].said().contains("resumed from snapshot"), "{}", running[1].said());
    assert_eq!([0, 1].map(|node| job.lines(node, "messages.txt")), [MESSAGES; 2]);
}

/// Nothing runs: `ckpt-run stop` ends the launcher that waits. A launcher of another job does not take the other one's place.
#[test]
fn a_launcher_that_waits_for_others_is_stopped() {
    let Some(machines) = machines(2) else { return };
    let job = Job::stream(machines, 2000);
    let mut waiting = job.start_one(1);
    waiting.until("the wait", || job.has_said(1, "waiting for the launcher of node 0").then_some(()));
    job.machines.sandboxes[1].ok(["stop"]);
    assert_eq!(waiting.wait(), 75, "{}", waiting.said());

    let mut zero = job.start_one(0);
    zero.until("the wait", || job.has_said(0, "waiting for the launchers of node 1").then_some(()));
    let other = ["--nodes", "2", "--node-rank", "1", "--cluster-key-file", "key", "--job", "other"];
    let at = format!("{}:7070", job.machines.address(0));
    let options = [&other[..], &["--interpose", "off", "--coordinator", &at, "--", "true"]].concat();
    let options: Vec<_> = options.into_iter().map(str::to_owned).collect();
    let mut stranger = job.machines.start(1, 1, &options);
    assert_eq!(stranger.wait(), 2, "{}", stranger.said());
    assert!(
        stranger.said().contains("start all nodes and spares with the same --job"),
        "{}",
        stranger.said()
    );
    let mut running = vec![zero, job.start_one(1)];
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
}

/// The newest parts have no global manifest: only those before them can be resumed.
#[test]
fn the_last_snapshot_of_all_nodes_is_not_removed() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines(2) else { return };
    let mut job = Job::stream(machines, BLOCKS);
    job.options = ["--interval", "off"].map(str::to_owned).into();
    // After the epoch and the first snapshot.
    job.fault(0, Some("nodes-log-put@3=kill"));
    let mut running = job.begun("blocks.txt");
    job.checkpoint(&running);
    assert!(!job.machines.sandboxes[1].call(["checkpoint"]).status.success());
    running[0].wait_status();
    assert_eq!(running[1].wait(), 125, "{}", running[1].said());
    assert_eq!(job.snapshots(), [2, 2]);
    for sandbox in &job.machines.sandboxes {
        let refused = sandbox.call(["rm", &sandbox.snapshots()[0]]);
        let text = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(2) && text.contains("is the last snapshot"), "{text}");
        sandbox.ok(["rm", &sandbox.snapshots()[1]]);
    }
    job.fault(0, None);
    assert_resumes(&job, BLOCKS);
}

/// The store of node 0 takes longer for a record, that of its epoch or of a snapshot, than the nodes wait for a sign of life of
/// node 0.
#[test]
fn a_store_that_is_slow_does_not_end_the_job() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines(2) else { return };
    let mut job = Job::stream(machines, BLOCKS);
    job.options = ["--node-timeout", "3s", "--interval", "off"].map(str::to_owned).into();
    job.fault(0, Some("nodes-log-put@1=delay:8000,nodes-log-put@2=delay:8000"));
    let mut running = job.begun("blocks.txt");
    job.checkpoint(&running);
    assert_eq!(job.snapshots(), [1, 1]);
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

/// The packet rule of one machine is not removed after a snapshot, and then after a resume: the connection is named, there
/// is no such snapshot, and the next try works.
#[test]
fn a_connection_that_stands_still_is_named() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines(2) else { return };
    let mut job = Job::stream(machines, BLOCKS);
    job.fault(1, Some("rule-removed@2=error"));
    let mut running = job.begun("blocks.txt");
    job.checkpoint(&running);
    let failed = job.machines.sandboxes[0].call(["checkpoint"]);
    let text = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && text.contains("stands still"), "{text}{}", said(&running));
    // Each node removes its part when it learns that.
    running[1].until("one snapshot", || (job.snapshots() == [1, 1]).then_some(()));
    running[1].kill_everything();
    running[0].wait();
    job.fault(1, Some("rule-removed@1=error"));
    let mut running = job.start();
    assert_eq!(codes(&mut running), [125, 125], "{}", said(&running));
    let expected = "cannot be resumed after all parts were restored: node ";
    for one in &running {
        assert!(one.said().contains(expected) && one.said().contains("stands still"), "{}", one.said());
    }
    job.fault(1, None);
    job.full_speed();
    let mut running = job.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

#[test]
fn training_on_two_machines_survives_and_is_preempted() {
    const STEPS: usize = 300;
    let (Some(first), Some(second)) = (machines(2), machines(2)) else { return };
    let unbroken = Job::training(first, STEPS);
    unbroken.full_speed();
    let mut running = unbroken.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    let expected = unbroken.machines.sandboxes[0].read("losses.txt");
    assert_eq!(expected.lines().count(), STEPS);
    let job = Job::training(second, STEPS);
    let mut running = job.start();
    running[0].until("steps", || (job.lines(0, "losses.txt") >= 5).then_some(()));
    job.checkpoint(&running);
    let before = job.lines(0, "losses.txt");
    running[0].until("steps", || (job.lines(0, "losses.txt") >= before + 3).then_some(()));
    running[0].kill_everything();
    running[1].wait();
    let mut running = job.start();
    job.until_answering(&mut running);
    running[1].signal(rustix::process::Signal::TERM);
    assert_eq!(codes(&mut running), [75, 75], "{}", said(&running));
    assert!(running[0].said().contains("its last snapshot is committed"), "{}", running[0].said());
    assert!(job.lines(0, "losses.txt") < STEPS, "it was ended in the middle");
    job.full_speed();
    let mut running = job.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_eq!(job.machines.sandboxes[0].read("losses.txt"), expected);
}

#[test]
fn another_key_and_another_address_are_refused_by_name() {
    let Some(machines) = machines(2) else { return };
    let job = Job::stream(machines, 2000);
    set_key(job.machines.sandboxes[1].path(), 8);
    let (mut zero, mut one) = (job.start_one(0), job.start_one(1));
    assert_eq!(one.wait(), 2, "{}", one.said());
    assert!(one.said().contains("has another key: --cluster-key-file"), "{}", one.said());
    zero.until("a message", || job.has_said(0, "is refused: the other end has another key").then_some(()));
    set_key(job.machines.sandboxes[1].path(), 7);
    let mut running = vec![zero, job.start_one(1)];
    job.until_lines(&mut running, "blocks.txt", 5);
    job.checkpoint(&running);
    running[0].kill_everything();
    running[1].wait();
    // A part alone is no snapshot.
    let sandbox = &job.machines.sandboxes[1];
    let listed = sandbox.ok(["ls"]);
    assert!(listed.contains("part of node 1 of 2"), "{listed}");
    assert!(job.machines.sandboxes[0].ok(["ls"]).contains("committed, node 0 of 2"));
    let alone = sandbox.call(["--job", "both.node1", "--", "true"]);
    let said = String::from_utf8_lossy(&alone.stderr).into_owned();
    assert!(alone.status.code() == Some(2) && said.contains("with --nodes 2 on all of them"), "{said}");
    job.machines.readdress(1, "10.77.0.9");
    let mut running = job.start();
    assert_eq!(running[1].wait(), 2, "{}", running[1].said());
    assert!(running[1].said().contains("connections from 10.77.0.2"), "{}", running[1].said());
    // A scheduler must not try again: node 0 says why, too.
    assert_eq!(running[0].wait(), 2, "{}", running[0].said());
    let text = running[0].said();
    assert!(text.contains("node 1: the snapshot ") && text.contains("connections from 10.77.0.2"), "{text}");
}

/// `--resume never` fails on one node after all have begun: there is no new run, and the next start resumes the present one.
#[test]
fn a_run_that_does_not_begin_on_all_nodes_leaves_the_one_before() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines(2) else { return };
    let mut job = Job::stream(machines, BLOCKS);
    let mut running = job.begun("blocks.txt");
    job.checkpoint(&running);
    running[0].kill_everything();
    running[1].wait();
    let command = job.change_command(1, vec!["./key".to_owned()]);
    job.options.extend(["--resume", "never"].map(str::to_owned));
    let mut running = job.start();
    assert_eq!(codes(&mut running), [126, 126], "{}", said(&running));
    assert!(running[0].said().contains("node 1: its command cannot be executed"), "{}", running[0].said());
    job.change_command(1, command);
    job.options.clear();
    assert_resumes(&job, BLOCKS);
}

/// `--resume ID` on all nodes. What was saved after that snapshot is resumed on request only.
#[test]
fn an_older_snapshot_is_resumed_on_all_nodes() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines(2) else { return };
    let mut job = Job::stream(machines, BLOCKS);
    let mut running = job.begun("blocks.txt");
    for _ in 0..2 {
        job.checkpoint(&running);
        job.until_lines(&mut running, "blocks.txt", job.lines(0, "blocks.txt") + 10);
    }
    running[0].kill_everything();
    running[1].wait();
    // The newest part might have no global manifest.
    job.machines.sandboxes[1].ok(["prune", "--keep", "1"]);
    assert_eq!(job.snapshots(), [2, 2]);
    let ids = job.machines.sandboxes[0].snapshots();
    let resume = |id: &str| ["--resume", id].map(str::to_owned).into();
    let resumed = |running: &[Running], id: &str| {
        let said = running[0].said();
        assert!(said.contains(&format!("resumed from snapshot {id}")), "{said}");
        assert!(running[1].said().contains("resumed from snapshot"), "{}", running[1].said());
    };
    let [zero, one] = [0, 1].map(|node| job.machines.sandboxes[node].store.clone());
    let interchange = || {
        let aside = zero.with_extension("aside");
        for (from, to) in [(&zero, &aside), (&one, &zero), (&aside, &one)] {
            std::fs::rename(from, to).unwrap();
        }
    };
    interchange();
    let mut refused = job.start();
    assert_eq!(codes(&mut refused), [2, 2], "{}", said(&refused));
    assert!(said(&refused).contains("the store of node 0 has snapshots of node 1"), "{}", said(&refused));
    interchange();
    job.options = resume("9");
    let mut refused = job.start();
    assert_eq!(codes(&mut refused), [2, 2], "{}", said(&refused));
    for one in &refused {
        assert!(one.said().contains("there is no snapshot 9"), "{}", one.said());
    }
    job.options = resume(&ids[0]);
    let mut running = job.start();
    job.until_answering(&mut running);
    resumed(&running, &ids[0]);
    // Before there is another snapshot.
    running[1].kill_everything();
    assert_eq!(running[0].wait(), 125, "{}", running[0].said());
    job.options.clear();
    job.full_speed();
    let mut running = job.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    resumed(&running, &ids[0]);
    assert_blocks(&job, BLOCKS, &running);
    // One that was left behind, of a run that is complete.
    job.options = resume(&ids[1]);
    let mut running = job.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    resumed(&running, &ids[1]);
    assert_blocks(&job, BLOCKS, &running);
}

#[test]
fn what_does_not_work_on_several_nodes_is_refused() {
    let sandbox = ckpt_run_tests::Sandbox::new();
    set_key(sandbox.path(), 7);
    let nodes =
        ["--nodes", "2", "--node-rank", "0", "--coordinator", "127.0.0.1:7070", "--cluster-key-file", "key"];
    let refused = |options: &[&str], expected: &str| {
        let output = sandbox.call(nodes.iter().chain(options).chain(&["--", "true"]));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains(expected), "{options:?}: {said}");
    };
    let off = ["--interpose", "off"];
    for options in [&["--network", "private"][..], &["--upload", "s3://bucket/x"]] {
        refused(&[&off[..], options].concat(), options[0]);
    }
    refused(&["--replicas", "1"], "use it with --persist-every N");
    refused(&["--replicas", "2"], "0 or 1");
    let memory = ["--replicas", "1", "--persist-every", "2"];
    refused(&memory, "all launchers end with one that is lost");
    refused(&[&memory[..], &["--network", "job", "--lost-node", "exit"]].concat(), "or --lost-node wait");
    let output = sandbox.call(["--nodes", "2", "--", "true"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("--node-rank, --coordinator"), "{said}");
    let output = sandbox.call(["--network", "job", "--interpose", "off", "--", "true"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("--network private"), "{said}");
    let output = sandbox.call(["--replicas", "1", "--", "true"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("for a job on several nodes"), "{said}");
    for alone in [&["--node-rank", "1"][..], &["--coordinator", "127.0.0.1:7070"]] {
        let output = sandbox.call(alone.iter().chain(&["--", "true"]));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains("give --nodes too"), "{said}");
    }
    let mut outside = nodes;
    outside[3] = "2";
    let output = sandbox.call(outside.iter().chain(&["--", "true"]));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("is a spare"), "{said}");
    // The other nodes would wait for one that runs without ckpt-run.
    let mut without = sandbox.command(nodes.iter().chain(&["--", "touch", "ran"]));
    without.env("CKPT_AUTO", "1").env("CKPT_CRIU", "/nowhere");
    assert_eq!(without.output().unwrap().status.code(), Some(2));
    assert!(!sandbox.path().join("ran").exists());
    assert!(!sandbox.store.exists(), "nothing was changed");
}

/// Of three nodes, two are there. Commands on them say for whom they wait, and a signal ends the wait.
#[test]
fn launchers_that_wait_for_others_say_so() {
    let Some(machines) = machines(3) else { return };
    let job = Job::stream(machines, 1);
    let mut running = [0, 1].map(|node| job.start_one(node));
    for (node, expected) in [(0, "waiting for the launchers of node 2 at "), (1, "; that of node 0 at ")] {
        let call = |command: &str| {
            let output = job.machines.sandboxes[node].call([command]);
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let status = running[node].until("a launcher that waits", || {
            Some(call("status")).filter(|status| status.contains(expected))
        });
        assert!(status.contains(": waiting, 0 snapshots\n  launcher         waiting for "), "{status}");
        let story = call("explain");
        assert!(story.contains("(running)\n") && story.contains(expected), "{story}");
    }
    running.iter().for_each(|one| one.signal(rustix::process::Signal::TERM));
    assert_eq!(codes(&mut running), [75, 75], "{}", said(&running));
    assert!(
        said(&running).contains("received SIGTERM while the job was being started"),
        "{}",
        said(&running)
    );
    let status = job.machines.sandboxes[0].call(["status"]);
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(status.starts_with("there is no job in "), "{status}");
}

/// `checkpoint` and `stop` do the same on every node.
#[test]
fn any_node_takes_requests_for_snapshots_and_the_end() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines(2) else { return };
    let mut job = Job::stream(machines, BLOCKS);
    job.fault(1, Some("dump-post-dump@2=error"));
    let mut running = job.begun("blocks.txt");
    let id = running[1].checkpoint(&job.machines.sandboxes[1]);
    assert_eq!((job.snapshots(), job.machines.sandboxes[1].snapshots()), (vec![1, 1], vec![id]));
    // It cannot be saved, and runs on.
    let refused = job.machines.sandboxes[1].call(["stop"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("the job runs on: "), "{text}{}", said(&running));
    assert!(text.contains("node 1: ") && text.contains("stop --force"), "{text}");
    let before = job.lines(0, "blocks.txt").max(job.lines(1, "blocks.txt"));
    job.until_lines(&mut running, "blocks.txt", before + 5);
    // Both callers get the ID of the part in their own store.
    let calls = [0, 1].map(|node| {
        let mut call = job.machines.sandboxes[node].command(["stop"]);
        call.stdout(std::process::Stdio::piped()).spawn().unwrap()
    });
    for (node, call) in calls.into_iter().enumerate() {
        let output = call.wait_with_output().unwrap();
        let id = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        assert!(output.status.success(), "{}", said(&running));
        assert_eq!(job.machines.sandboxes[node].snapshots().last(), Some(&id));
    }
    assert_eq!(codes(&mut running), [75, 75], "{}", said(&running));
    assert_eq!(job.snapshots(), [2, 2]);
    job.fault(1, None);
    // A scheduler signals all launchers at once; a second signal to one of them ends the job at once.
    let mut running = job.begun("blocks.txt");
    running.iter().for_each(|one| one.signal(rustix::process::Signal::TERM));
    assert_eq!(codes(&mut running), [75, 75], "{}", said(&running));
    assert_eq!(job.snapshots(), [3, 3]);
    job.full_speed();
    let mut running = job.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

/// The job's processes on one machine are killed; the launchers stay, and restart the job on both.
#[test]
fn a_part_that_fails_is_restarted_on_all_nodes() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines(2) else { return };
    let mut job = Job::stream(machines, BLOCKS);
    job.options.extend(["--max-restarts", "10"].map(str::to_owned));
    let mut running = job.begun("blocks.txt");
    for (round, victim) in [1, 0, 1, 0].into_iter().enumerate() {
        job.checkpoint(&running);
        let before = job.lines(0, "blocks.txt").max(job.lines(1, "blocks.txt"));
        job.until_lines(&mut running, "blocks.txt", before + 2);
        assert_eq!(kill_processes(&running[victim], "stream.py"), 1, "{}", running[victim].said());
        let killed = Instant::now();
        let restart = format!("restart {} on all nodes", round + 1);
        for (node, running) in running.iter_mut().enumerate() {
            running.until("a restart", || job.has_said(node, &restart).then_some(()));
            assert!(job.has_said(node, &format!("node {victim}: its part")), "{}", running.said());
        }
        // Until then, the file has the lines of the job that was killed.
        let restarted = format!("restart {} of the job", round + 1);
        for (node, running) in running.iter_mut().enumerate() {
            running.until("the job", || job.has_said(node, &restarted).then_some(()));
        }
        job.until_lines(&mut running, "blocks.txt", before + 5);
        eprintln!("going on {:.1} s after the kill", killed.elapsed().as_secs_f64());
    }
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

/// One node cannot read its store: in a restart, and when its launcher starts again. The newest snapshot is resumed all the same,
/// as soon as that has passed.
#[test]
fn a_store_that_cannot_be_read_for_a_moment_costs_no_snapshot() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines(2) else { return };
    let mut job = Job::stream(machines, BLOCKS);
    job.options.extend(
        ["--max-restarts", "10", "--interval", "off", "--lost-node", "wait", "--node-timeout", "3s"]
            .map(str::to_owned),
    );
    job.fault(1, Some("part-manifest@1=error"));
    let mut running = job.begun("blocks.txt");
    for round in 1..=2 {
        job.checkpoint(&running);
        let newest = job.machines.sandboxes[1].snapshots().pop().expect("a snapshot");
        job.until_more(&mut running, "blocks.txt", 2);
        if round == 1 {
            assert_eq!(kill_processes(&running[1], "stream.py"), 1, "{}", running[1].said());
        } else {
            running[0].kill_everything();
            running[0] = job.start_one(0);
        }
        running[1].until("a resume", || job.has_resumed(1, round).then_some(()));
        job.until_answering(&mut running);
        let text = running[1].said();
        assert_eq!(text.matches("fault point part-manifest").count(), round, "{text}");
        let from = text.rsplit_once("resumed from snapshot ").expect("a resume").1;
        assert!(newest.ends_with(&from[..newest.len().min(from.len())]), "{newest}: {text}");
    }
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

#[test]
fn a_part_that_fails_too_often_ends_the_job() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines(2) else { return };
    let mut job = Job::stream(machines, BLOCKS);
    job.options.extend(["--max-restarts", "1", "--interval", "off"].map(str::to_owned));
    let mut running = job.begun("blocks.txt");
    job.checkpoint(&running);
    let before = job.lines(0, "blocks.txt").max(job.lines(1, "blocks.txt"));
    job.until_lines(&mut running, "blocks.txt", before + 2);
    assert_eq!(kill_processes(&running[0], "stream.py"), 1, "{}", running[0].said());
    job.until_lines(&mut running, "blocks.txt", before + 5);
    assert_eq!(kill_processes(&running[1], "stream.py"), 1, "{}", running[1].said());
    assert_eq!(codes(&mut running), [137, 137], "{}", said(&running));
    for running in &running {
        assert!(
            running.said().contains("it was restarted 1 times, which is the limit"),
            "{}",
            running.said()
        );
    }
    // `stop` while a restart is due.
    job.options[1] = "10".to_owned();
    let mut running = job.begun("blocks.txt");
    for round in 1..=2 {
        let before = job.lines(0, "blocks.txt").max(job.lines(1, "blocks.txt"));
        job.until_lines(&mut running, "blocks.txt", before + 2);
        assert_eq!(kill_processes(&running[1], "stream.py"), 1, "{}", running[1].said());
        let restart = format!("restart {round} on all nodes");
        running[1].until("a restart", || job.has_said(1, &restart).then_some(()));
    }
    let stopped = job.machines.sandboxes[1].call(["stop"]);
    let text = String::from_utf8_lossy(&stopped.stderr).into_owned();
    assert!(text.contains("the job was not running"), "{text}");
    assert_eq!(codes(&mut running), [75, 75], "{}", said(&running));
    job.full_speed();
    let mut running = job.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}

/// Kills the job's processes, the launcher or everything on a machine, or on all of them.
fn kill(running: &mut [Running], random: &mut fastrand::Rng) {
    let nodes = running.len();
    let (what, victim) = (random.usize(0..3), random.usize(0..=nodes));
    for node in (0..nodes).filter(|node| victim == nodes || victim == *node) {
        match what {
            0 => _ = kill_processes(&running[node], "train.py"),
            1 => running[node].kill_launcher(),
            _ => running[node].kill_everything(),
        }
    }
}

/// Does what an engine does: a launcher that has failed is started again.
fn start_again(job: &Job, running: &mut [Running]) {
    for (node, running) in running.iter_mut().enumerate() {
        if running.has_ended() && !running.wait_status().success() {
            // Nobody has given anything wrong.
            assert_ne!(running.wait_status().code(), Some(2), "{}", running.said());
            *running = job.start_one(node);
        }
    }
}

/// Kills something of the training again and again at random moments, while the job starts, runs, is saved, is restored or is
/// resumed. What has failed is started again. The losses are those of an unbroken training.
fn survives_many_kills(
    mut job: Job,
    steps: usize,
    mut kill: impl FnMut(&mut Job, &mut [Running], &mut fastrand::Rng),
) {
    let kills = std::env::var("CKPT_TEST_KILLS").expect("there are machines with it only");
    let kills: usize = kills.parse().expect("a number of kills");
    let unbroken = Job::training(machines(job.nodes()).expect("machines"), steps);
    let unbroken = unbroken.with_ranks(job.ranks, job.workers);
    unbroken.full_speed();
    let mut running = unbroken.start();
    assert_eq!(codes(&mut running), vec![0; job.nodes()], "{}", said(&running));
    let mut random = seeded_rng(u64::from(std::process::id()));
    job.options.extend(["--interval", "500ms", "--max-restarts", "1000"].map(str::to_owned));
    let mut running = job.start();
    running[0].until("steps", || (job.lines(0, "losses.txt") >= 5).then_some(()));
    // With an object store, the first one takes a while.
    job.until_answering(&mut running);
    job.checkpoint(&running);
    for kill_number in 0..kills {
        kill(&mut job, &mut running, &mut random);
        let until = Instant::now() + Duration::from_millis(random.u64(100..6000));
        while Instant::now() < until {
            start_again(&job, &mut running);
            std::thread::sleep(Duration::from_millis(10));
        }
        let lines = job.lines(0, "losses.txt");
        assert!(lines < steps, "the training ended too early, after {kill_number} kills");
    }
    job.full_speed();
    let expected = unbroken.machines.sandboxes[0].read("losses.txt");
    until("the end of the training", || {
        let is_complete = job.lines(0, "losses.txt") == steps && running.iter_mut().all(Running::has_ended);
        if !is_complete {
            start_again(&job, &mut running);
        }
        is_complete.then_some(())
    });
    assert_eq!(codes(&mut running), vec![0; job.nodes()], "{}", said(&running));
    assert_eq!(job.machines.sandboxes[0].read("losses.txt"), expected);
}

/// Processes of the job, launchers, machines, or both machines, are killed.
#[test]
fn training_on_two_machines_survives_many_kills() {
    const STEPS: usize = 1500;
    let Some(machines) = machines(2) else { return };
    survives_many_kills(Job::training(machines, STEPS), STEPS, |_, running, random| kill(running, random));
}

/// Eight ranks, and as many workers of a DataLoader. The network breaks in two halves, too: for a moment, or for longer than
/// a node may be silent.
#[test]
fn training_on_four_machines_with_two_ranks_each_survives_many_kills() {
    const STEPS: usize = 1500;
    let Some(machines) = machines(4) else { return };
    let job = Job::training(machines, STEPS).with_ranks(2, 1);
    survives_many_kills(job, STEPS, |job, running, random| {
        if random.bool() {
            return kill(running, random);
        }
        job.machines.join_halves(false);
        let until = Instant::now() + Duration::from_millis(random.u64(100..15_000));
        while Instant::now() < until {
            start_again(job, running);
            std::thread::sleep(Duration::from_millis(10));
        }
        job.machines.join_halves(true);
    });
}

/// A snapshot that is in progress when the job ends is not waited for.
#[test]
fn a_job_that_ends_during_a_snapshot_is_complete() {
    const BLOCKS: usize = 100;
    let Some(machines) = machines(2) else { return };
    let mut job = Job::stream(machines, BLOCKS);
    for node in 0..2 {
        job.fault(node, Some("save-before-commit@1=delay:20000"));
    }
    let mut running = job.begun("blocks.txt");
    let checkpoint = job.machines.sandboxes[0].command(["checkpoint"]).spawn();
    running[0].until("a snapshot", || job.has_said(0, "save-before-commit").then_some(()));
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert!(!checkpoint.unwrap().wait().unwrap().success());
    assert_blocks(&job, BLOCKS, &running);
}
