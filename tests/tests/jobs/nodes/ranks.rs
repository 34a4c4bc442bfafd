//! Ranks of NCCL on two machines, with simulated GPUs of their own: all of them stop at the same collective for a snapshot,
//! and go on from it bit for bit.

use super::job::{Job, codes, kill_processes, machines, said, signal_processes};
use ckpt_run_tests::gpu::{Gpu, built, cuda_program, succeed};
use ckpt_run_tests::machines::Machines;
use ckpt_run_tests::{Running, Sandbox, schema, seeded_rng, until};
use rustix::process::Signal;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

const NODES: usize = 2;

/// The job, and the GPUs of its machines.
struct Ranks {
    job: Job,
    program: PathBuf,
    steps: usize,
    count: usize,
    _gpus: Vec<Gpu>,
}

impl Ranks {
    /// So many ranks on each of two machines; others are spare. All are connected by sockets, which threads poll all the
    /// time: many are slow.
    fn new(machines: Machines, each: usize, steps: usize) -> Self {
        let gpus: Vec<_> = machines.sandboxes.iter().map(|_| Gpu::new()).collect();
        let home = machines.sandboxes[0].path().to_owned();
        let program = gpus[0].compile_with_nccl(&cuda_program("ranks.c"), &home);
        let count = each * NODES;
        let mut job = Job::new(machines, |_, node| {
            let mut command = vec![program.display().to_string()];
            command.extend([steps, count, node * each, each].map(|number| number.to_string()));
            command.push(home.join("ids").display().to_string());
            command
        });
        job.places.truncate(NODES);
        job.interpose = built("libckpt_interpose.so").display().to_string();
        for (node, (sandbox, gpu)) in job.machines.sandboxes.iter_mut().zip(&gpus).enumerate() {
            let command = gpu.command("true");
            let set = command.get_envs().filter_map(|(name, value)| Some((name, value?)));
            let text = |text: &std::ffi::OsStr| text.to_string_lossy().into_owned();
            sandbox.variables.extend(set.map(|(name, value)| (text(name), text(value))));
            // The machines of the test have the same kernel.
            let host = [("NCCL_HOSTID", format!("machine{node}")), ("SIMCUDA_DEVICES", each.to_string())];
            sandbox.variables.extend(host.map(|(name, value)| (name.to_owned(), value)));
        }
        Self { job, program, steps, count, _gpus: gpus }
    }

    /// What all ranks on one machine print, without ckpt-run.
    fn unbroken(&self) -> String {
        let (gpu, sandbox) = (Gpu::new(), Sandbox::new());
        let mut command: Command = gpu.command(&self.program);
        command.args([self.steps, self.count].map(|number| number.to_string())).current_dir(sandbox.path());
        command.env("SIMCUDA_DEVICES", self.count.to_string());
        succeed(command)
    }

    /// A rank is late if it has let others wait for this long.
    fn names_late_ranks_after(&mut self, limit: Duration) {
        for sandbox in &mut self.job.machines.sandboxes {
            sandbox.variables.push(("CKPT_FAULT_LATE_RANK_MS".to_owned(), limit.as_millis().to_string()));
        }
    }

    fn output(&self) -> String {
        self.job.machines.sandboxes[0].read("job.out")
    }

    fn until_more(&self, running: &mut [Running], more: usize) {
        let goal = self.output().lines().count() + more;
        running[0].until("steps", || (self.output().lines().count() >= goal).then_some(()));
    }

    /// The job, after so many steps.
    fn begun(&self, steps: usize) -> Vec<Running> {
        let mut running = self.job.start();
        self.job.until_answering(&mut running);
        self.until_more(&mut running, steps);
        running
    }

    /// The last run came to its end, and all runs together have printed what an unbroken one prints.
    fn assert_output(&self, running: &[Running]) {
        assert!(self.output() == self.unbroken(), "{}\n{}", self.output(), said(running));
        for sandbox in &self.job.machines.sandboxes[..NODES] {
            sandbox.verify_all();
        }
    }
}

#[test]
fn ranks_on_two_machines_are_saved_together() {
    let Some(machines) = machines(2) else { return };
    // While they are slow: longer than two checkpoints take on a busy machine.
    let ranks = Ranks::new(machines, 2, 400);
    let job = &ranks.job;
    let mut running = ranks.begun(3);
    job.checkpoint(&running);
    ranks.until_more(&mut running, 2);
    job.checkpoint(&running);
    ranks.until_more(&mut running, 2);
    running[1].kill_everything();
    assert_eq!(running[0].wait(), 125, "{}", running[0].said());
    job.full_speed();
    let mut running = job.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    for one in &running {
        assert!(one.said().contains("resumed from snapshot"), "{}", one.said());
    }
    ranks.assert_output(&running);
}

/// A rank, or everything on a machine, dies at random moments: while the job runs, is saved, or is resumed.
#[test]
fn ranks_on_two_machines_survive_kills() {
    let Some(machines) = machines(2) else { return };
    let kills: usize = std::env::var("CKPT_TEST_KILLS").map_or(1, |text| text.parse().expect("a number"));
    let mut ranks = Ranks::new(machines, 1, 300 + 300 * kills);
    ranks.job.options = ["--interval", "1s", "--max-restarts", "1000"].map(str::to_owned).into();
    let job = &ranks.job;
    let mut rng = seeded_rng(19);
    let mut running = ranks.begun(2);
    job.checkpoint(&running);
    for kill in 0..2 * kills {
        std::thread::sleep(Duration::from_millis(rng.u64(500..4000)));
        assert!(ranks.output().lines().count() < ranks.steps, "it is killed before its end");
        if kill % 2 == 0 {
            // It has none while it is being resumed.
            let node = rng.usize(..2);
            let end = Instant::now() + Duration::from_secs(20);
            while kill_processes(&running[node], "ids") == 0 {
                assert!(Instant::now() < end, "there is no rank to kill\n{}", said(&running));
                std::thread::sleep(Duration::from_millis(10));
            }
        } else {
            let node = rng.usize(..2);
            running[node].kill_everything();
            running[1 - node].wait();
            running = job.start();
            job.until_answering(&mut running);
        }
    }
    until("a snapshot of the last run", || {
        job.machines.sandboxes[0].call(["checkpoint"]).status.success().then_some(())
    });
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    ranks.assert_output(&running);
}

/// With the network of the job, another machine takes a node and its ranks.
#[test]
fn ranks_move_to_another_machine() {
    let Some(machines) = machines(3) else { return };
    let mut ranks = Ranks::new(machines, 1, 300);
    ranks.job.options = ["--network", "job", "--interval", "off"].map(str::to_owned).into();
    let mut running = ranks.job.start();
    ranks.job.until_answering(&mut running);
    for node in [1, 0] {
        ranks.until_more(&mut running, 3);
        ranks.job.checkpoint(&running);
        ranks.until_more(&mut running, 2);
        running[node].kill_everything();
        assert_eq!(running[1 - node].wait(), 125, "{}", running[1 - node].said());
        ranks.job.places[node] = ranks.job.free_machine();
        running = ranks.job.start();
        ranks.job.until_answering(&mut running);
        for one in &running {
            assert!(one.said().contains("resumed from snapshot"), "{}", one.said());
        }
    }
    ranks.job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    ranks.assert_output(&running);
}

/// A rank does not come to the step of the others: there is no snapshot, its process and its node are named, and all run on.
#[test]
fn a_rank_that_waits_elsewhere_is_named_with_its_node() {
    let Some(machines) = machines(2) else { return };
    let mut ranks = Ranks::new(machines, 1, 300);
    ranks.job.options = ["--freeze-timeout", "10s", "--interval", "off"].map(str::to_owned).into();
    ranks.names_late_ranks_after(Duration::from_secs(3));
    let job = &ranks.job;
    let mut running = ranks.begun(2);
    let late = |node: usize| job.machines.sandboxes[node].json(["status", "--json"])[0]["late_ranks"].clone();
    let waiting = job.machines.sandboxes[1].path();
    std::fs::write(waiting.join("pause"), "").unwrap();
    running[1].until("a rank that waits", || waiting.join("paused").exists().then_some(()));
    let failed = job.machines.sandboxes[0].call(["checkpoint"]);
    let text = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && text.contains("of node 1 has begun"), "{text}");
    assert_eq!(job.snapshots(), [0, 0]);
    // Node 0 also names it by itself, and nobody else does.
    running[0].until("a late rank", || {
        let late = late(0);
        (late[0]["rank"] == 1 && late[0]["node"] == 1 && late[0]["waiting"] == serde_json::json!([0]))
            .then_some(())
    });
    schema::check("status", &job.machines.sandboxes[0].json(["status", "--json"]));
    assert_eq!(late(1), serde_json::json!([]));
    std::fs::remove_file(waiting.join("pause")).unwrap();
    running[0].until("no late rank", || (late(0) == serde_json::json!([])).then_some(()));
    ranks.until_more(&mut running, 2);
    job.checkpoint(&running);
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    ranks.assert_output(&running);
}

/// A rank is stopped, on another node than node 0, which restarts the job.
#[test]
fn a_rank_that_hangs_on_another_node_restarts_the_job() {
    let Some(machines) = machines(2) else { return };
    let mut ranks = Ranks::new(machines, 1, 300);
    let options = ["--hang-timeout", "auto", "--max-restarts", "9", "--interval", "off"];
    ranks.job.options = options.map(str::to_owned).into();
    ranks.names_late_ranks_after(Duration::from_secs(4));
    let job = &ranks.job;
    let mut running = ranks.begun(2);
    job.checkpoint(&running);
    ranks.until_more(&mut running, 2);
    // Before a step, so that it is behind the other one.
    let waiting = job.machines.sandboxes[1].path();
    std::fs::write(waiting.join("pause"), "").unwrap();
    running[0].until("a late rank", || {
        let status = job.machines.sandboxes[0].json(["status", "--json"]);
        (status[0]["late_ranks"][0]["node"] == 1).then_some(())
    });
    assert!(signal_processes(&running[1], "ids", Signal::STOP) > 0);
    until("a restart on both nodes", || {
        let is_told =
            |one: &Running| one.said().contains("rank 1 (process ") && one.said().contains("restart 1 ");
        running.iter().all(is_told).then_some(())
    });
    std::fs::remove_file(waiting.join("pause")).unwrap();
    ranks.until_more(&mut running, 2);
    job.full_speed();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    assert!(running[0].said().contains(", node 1) has not "), "{}", running[0].said());
    let attempts = job.machines.sandboxes[1].job_dir().join("attempts");
    let kept = std::fs::read_dir(&attempts).unwrap().flatten().map(|entry| entry.path().join("stacks.txt"));
    let kept: Vec<_> = kept.filter_map(|path| std::fs::read_to_string(path).ok()).collect();
    assert!(kept.iter().any(|text| text.contains("rank 1 (process ")), "{kept:?}");
    ranks.assert_output(&running);
}

/// One machine fails at the cut: the ranks of both run on. Then a launcher dies while those of both are at a cut.
#[test]
fn a_cut_that_fails_leaves_the_ranks_of_all_machines_running() {
    let Some(machines) = machines(2) else { return };
    let mut ranks = Ranks::new(machines, 1, 300);
    ranks.job.fault(1, Some("cut@1=error"));
    let mut running = ranks.begun(3);
    let failed = ranks.job.machines.sandboxes[0].call(["checkpoint"]);
    let text = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && text.contains("node 1: "), "{text}");
    ranks.until_more(&mut running, 2);
    ranks.job.checkpoint(&running);
    assert_eq!(ranks.job.snapshots(), [1, 1]);
    ranks.until_more(&mut running, 2);
    running[1].kill_everything();
    running[0].wait();
    ranks.job.fault(0, Some("cut@1=kill"));
    let mut running = ranks.job.start();
    ranks.job.until_answering(&mut running);
    assert!(!ranks.job.machines.sandboxes[1].call(["checkpoint"]).status.success());
    running[0].wait_status();
    assert_eq!(running[1].wait(), 125, "{}", running[1].said());
    ranks.job.fault(0, None);
    ranks.job.full_speed();
    let mut running = ranks.job.start();
    assert_eq!(codes(&mut running), [0, 0], "{}", said(&running));
    ranks.assert_output(&running);
}
