//! A job on several machines whose store is an object store.

use super::assert_blocks;
use super::job::{Job, codes, machines, said};
use super::moving::{NODE_0, of_network};
use ckpt_run_tests::Running;
use ckpt_test_s3::proxy::{Fault, Proxy};
use ckpt_test_s3::{BUCKET, Service};
use rustix::process::Signal;
use std::fs;

/// A job of two nodes whose store is an object store, and a proxy for each machine. Each has a state directory of its own.
pub fn in_objects(mut job: Job, service: &Service) -> (Job, Vec<Proxy>) {
    // Where the proxy of the service has it, outside of the machines.
    let port = service.proxy.address.port();
    let of_machine = |machine| service.proxy_at(job.machines.listen(machine, port));
    let proxies = (0..job.machines.sandboxes.len()).map(of_machine).collect();
    for sandbox in &mut job.machines.sandboxes {
        sandbox.store = format!("s3://{BUCKET}/team").into();
        let state = sandbox.path().join("state").display().to_string();
        sandbox.variables.extend(service.variables());
        sandbox.variables.push(("XDG_STATE_HOME".to_owned(), state));
    }
    job.has_key_file = false;
    (of_network(job, 2), proxies)
}

fn resumed(job: &Job, running: &mut [Running]) {
    job.until_answering(running);
    for one in running {
        assert!(one.said().contains("resumed from snapshot"), "{}", one.said());
    }
}

/// Both machines are lost, one after the other, with what is on their disks.
#[test]
fn nodes_need_only_an_object_store() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines(3) else { return };
    let service = Service::new();
    let (mut job, proxies) = in_objects(Job::stream_to(machines, BLOCKS, NODE_0), &service);
    let mut running = job.begun("blocks.txt");
    for node in [1, 0] {
        // Global manifests are put by node 0.
        let proxy = &proxies[job.places[0]];
        proxy.break_next(2, "PUT", "/nodes/", Fault::Status(503));
        proxy.break_next(1, "PUT", "/nodes/", Fault::LoseAnswer);
        job.checkpoint(&running);
        job.until_more(&mut running, "blocks.txt", 5);
        running[node].kill_everything();
        assert_eq!(running[1 - node].wait(), 125, "{}", running[1 - node].said());
        let lost = job.machines.sandboxes[node].path();
        fs::remove_dir_all(lost.join("state")).unwrap();
        fs::remove_file(lost.join("blocks.txt")).unwrap();
        job.places[node] = job.free_machine();
        running = job.start();
        resumed(&job, &mut running);
    }
    let listed = job.machines.sandboxes[0].json(["ls", "--json"]);
    let states: Vec<_> =
        listed.as_array().unwrap().iter().map(|row| row["state"].as_str().unwrap()).collect();
    assert_eq!(states.iter().filter(|state| **state == "committed, node 0 of 2").count(), 2, "{states:?}");
    assert_eq!(states.iter().filter(|state| **state == "part of node 1 of 2").count(), 2, "{states:?}");
    // One node keeps one snapshot, the other one another: then there would be none.
    let ids = |of: &str| -> Vec<String> {
        let rows = listed.as_array().unwrap().iter().filter(|row| row["job"] == of);
        rows.map(|row| row["id"].as_str().unwrap().to_owned()).collect()
    };
    let sandbox = &job.machines.sandboxes[0];
    sandbox.ok(["rm", "--job", "both.node0", &ids("both.node0")[0]]);
    let refused = sandbox.call(["rm", "--job", "both.node1", &ids("both.node1")[1]]);
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && text.contains("is the last snapshot"), "{text}");
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
    // Other machines know that the job is complete.
    job.slow_down();
    for sandbox in &job.machines.sandboxes {
        let _ = fs::remove_dir_all(sandbox.path().join("state"));
        let _ = fs::remove_file(sandbox.path().join("blocks.txt"));
    }
    let running = job.begun("blocks.txt");
    let resumes = running[0].said().matches("resumed from snapshot").count();
    assert_eq!(resumes, 2, "those of the run before: {}", running[0].said());
}

/// The launchers of two machines stand still. Two others resume the job and save it; then the first two go on.
#[test]
fn launchers_that_were_away_commit_nothing() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines(4) else { return };
    let service = Service::new();
    let (mut job, _proxies) = in_objects(Job::stream_to(machines, BLOCKS, NODE_0), &service);
    let mut away = job.begun("blocks.txt");
    job.checkpoint(&away);
    for (one, sandbox) in away.iter().zip(&job.machines.sandboxes) {
        one.signal(Signal::STOP);
        // On another machine it is another file.
        fs::remove_file(sandbox.path().join("blocks.txt")).unwrap();
    }
    let states: Vec<_> = job.machines.sandboxes.iter().map(|sandbox| sandbox.path().join("state")).collect();
    for (sandbox, state) in job.machines.sandboxes.iter_mut().zip(&states) {
        let other = state.with_file_name("other-state").display().to_string();
        sandbox
            .variables
            .iter_mut()
            .filter(|(name, _)| name == "XDG_STATE_HOME")
            .for_each(|(_, at)| at.clone_from(&other));
    }
    job.places = vec![2, 3];
    let mut running = job.start();
    resumed(&job, &mut running);
    job.checkpoint(&running);
    let saved = job.machines.sandboxes[0].snapshots();

    away.iter().for_each(|one| one.signal(Signal::CONT));
    let mut asked = job.machines.sandboxes[0].command(["checkpoint"]);
    let refused = asked.env("XDG_STATE_HOME", &states[0]).output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("another ckpt-run"), "{text}\n{}", said(&away));
    assert_eq!(job.machines.sandboxes[0].snapshots(), saved);
    away.iter_mut().for_each(Running::kill_everything);
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert_blocks(&job, BLOCKS, &running);
}
