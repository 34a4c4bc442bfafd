//! A job on two machines, which are network namespaces with their own stores and directories: killed at any moment, on one
//! machine or on both, it goes on when the same commands are run again, and computes the same.

use ckpt_run_tests::machines::Machines;
use ckpt_run_tests::{Running, python, seeded_rng, torchrun, train_script};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

/// The machines, or nothing if there can be none here.
fn machines() -> Option<Machines> {
    if std::env::var_os("CKPT_TEST_KILLS").is_none() {
        ckpt_test_skip::skip("needs `cargo xtask test --full`");
        return None;
    }
    match Machines::two() {
        Ok(machines) => Some(machines),
        Err(why) => {
            ckpt_test_skip::skip(&why);
            None
        }
    }
}

/// A job on both machines.
struct Job {
    machines: Machines,
    /// The command of each part.
    commands: [Vec<String>; 2],
    options: Vec<String>,
}

impl Job {
    fn new(machines: Machines, command: impl Fn(&Machines, usize) -> Vec<String>) -> Self {
        let commands = [command(&machines, 0), command(&machines, 1)];
        for sandbox in &machines.sandboxes {
            set_key(sandbox.path(), 7);
            fs::write(sandbox.path().join("slow"), "").unwrap();
        }
        Self { machines, commands, options: Vec::new() }
    }

    /// A connection with much data under way in both directions.
    fn stream(machines: Machines, blocks: usize) -> Self {
        Self::new(machines, |machines, node| {
            let program = ckpt_run_tests::programs().join("nodes/stream.py");
            let mut command = vec![python().display().to_string(), program.display().to_string()];
            command.extend([node.to_string(), machines.address(0), "5000".to_owned(), blocks.to_string()]);
            command
        })
    }

    /// torchrun with one rank on each machine.
    fn training(machines: Machines, steps: usize) -> Self {
        let mut job = Self::new(machines, |machines, node| {
            let mut command = vec![torchrun().display().to_string()];
            command.extend(["-r", "1", "-t", "1", "--nnodes=2", "--nproc_per_node=1"].map(str::to_owned));
            command.push(format!("--node_rank={node}"));
            command.push(format!("--master_addr={}", machines.address(0)));
            command.extend(["--master_port=5001".to_owned(), train_script().display().to_string()]);
            let steps = steps.to_string();
            let options =
                ["--steps", &steps, "--step-ms", "400", "--slow-while", "slow", "--log", "losses.txt"];
            command.extend(options.map(str::to_owned));
            command
        });
        for sandbox in &mut job.machines.sandboxes {
            sandbox.variables.push(("GLOO_SOCKET_IFNAME".to_owned(), "eth0".to_owned()));
        }
        job
    }

    fn arguments(&self, node: usize) -> Vec<String> {
        let mut arguments = ["--nodes", "2", "--node-rank"].map(str::to_owned).to_vec();
        arguments.extend([node.to_string(), "--coordinator".to_owned()]);
        arguments.extend([format!("{}:7070", self.machines.address(0))]);
        arguments
            .extend(["--cluster-key-file", "key", "--interpose", "off", "--job", "both"].map(str::to_owned));
        arguments.extend(self.options.iter().cloned());
        arguments.push("--".to_owned());
        arguments.extend(self.commands[node].iter().cloned());
        arguments
    }

    fn start_one(&self, node: usize) -> Running {
        self.machines.start(node, &self.arguments(node))
    }

    fn start(&self) -> [Running; 2] {
        [self.start_one(0), self.start_one(1)]
    }

    /// Lines of a file of a node.
    fn lines(&self, node: usize, file: &str) -> usize {
        self.machines.sandboxes[node].read(file).lines().count()
    }

    fn checkpoint(&self, running: &[Running; 2]) {
        running[0].checkpoint(&self.machines.sandboxes[0]);
    }

    fn until_answering(&self, running: &mut [Running; 2]) {
        for (one, sandbox) in running.iter_mut().zip(&self.machines.sandboxes) {
            one.until_answering(sandbox);
        }
    }

    fn full_speed(&self) {
        for sandbox in &self.machines.sandboxes {
            let _ = fs::remove_file(sandbox.path().join("slow"));
        }
    }

    fn snapshots(&self) -> [usize; 2] {
        [0, 1].map(|node| self.machines.sandboxes[node].snapshots().len())
    }
}

fn set_key(dir: &std::path::Path, byte: u8) {
    let path = dir.join("key");
    fs::write(&path, format!("{byte:02x}").repeat(31) + "5c").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// The blocks are complete, each once and in order.
fn assert_blocks(job: &Job, blocks: usize, running: &[Running; 2]) {
    for (node, running) in running.iter().enumerate() {
        let text = job.machines.sandboxes[node].read("blocks.txt");
        let numbers: Vec<_> = text.lines().map(|line| line.split(' ').next().unwrap_or_default()).collect();
        let expected: Vec<_> = (0..blocks).map(|number| number.to_string()).collect();
        assert!(numbers == expected, "node {node}: {} lines\n{}", numbers.len(), running.said());
    }
}

fn until_lines(job: &Job, running: &mut [Running; 2], file: &str, lines: usize) {
    for (node, running) in running.iter_mut().enumerate() {
        running.until("lines of the job", || (job.lines(node, file) >= lines).then_some(()));
    }
}

#[test]
fn a_connection_between_two_machines_survives() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines() else { return };
    let job = Job::stream(machines, BLOCKS);
    let mut running = job.start();
    until_lines(&job, &mut running, "blocks.txt", 10);
    job.checkpoint(&running);
    until_lines(&job, &mut running, "blocks.txt", job.lines(0, "blocks.txt") + 10);
    // A machine is lost: the other one ends its part too, and says why.
    running[1].kill_everything();
    assert_eq!(running[0].wait(), 125, "{}", running[0].said());
    assert!(running[0].said().contains("the connection to node 1 is lost"), "{}", running[0].said());
    assert!(job.lines(0, "blocks.txt") < BLOCKS, "it was killed in the middle");
    let mut running = job.start();
    job.until_answering(&mut running);
    job.checkpoint(&running);
    // The launcher of the coordinator dies.
    running[0].kill_everything();
    assert_eq!(running[1].wait(), 125, "{}", running[1].said());
    assert!(running[1].said().contains("the connection to node 0 is lost"), "{}", running[1].said());
    assert_eq!(job.snapshots(), [2, 2]);
    job.full_speed();
    let mut running = job.start();
    let codes = [running[0].wait(), running[1].wait()];
    assert_eq!(codes, [0, 0], "{}{}", running[0].said(), running[1].said());
    assert!(running[1].said().contains("resumed from snapshot"), "{}", running[1].said());
    assert_blocks(&job, BLOCKS, &running);
}

/// A job on two machines that has run for a while.
fn begun(job: &Job, file: &str) -> [Running; 2] {
    let mut running = job.start();
    until_lines(job, &mut running, file, 5);
    job.until_answering(&mut running);
    running
}

/// A node that cannot take its part costs the snapshot, nothing else: the job runs on at once on both machines. Then
/// launchers die in the middle of a cut, one at each of its phases.
#[test]
fn a_cut_that_fails_on_one_machine_leaves_the_job_running_on_both() {
    const BLOCKS: usize = 2000;
    let Some(machines) = machines() else { return };
    let mut job = Job::stream(machines, BLOCKS);
    job.machines.sandboxes[1].variables.push(("CKPT_FAULT".to_owned(), "dump-post-dump@1=error".to_owned()));
    let mut running = begun(&job, "blocks.txt");
    let failed = job.machines.sandboxes[0].call(["checkpoint"]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && said.contains("node 1: "), "{said}{}", running[1].said());
    assert_eq!(job.snapshots(), [0, 0]);
    let before = job.lines(0, "blocks.txt").max(job.lines(1, "blocks.txt"));
    until_lines(&job, &mut running, "blocks.txt", before + 5);
    job.checkpoint(&running);
    running[1].kill_everything();
    running[0].wait();
    for (node, point) in [(1, "dump-post-dump@1"), (0, "dump-done@1"), (1, "save-before-commit@1")] {
        let faulty = &mut job.machines.sandboxes[node].variables;
        faulty.retain(|(name, _)| name != "CKPT_FAULT");
        faulty.push(("CKPT_FAULT".to_owned(), format!("{point}=kill")));
        let mut running = job.start();
        job.until_answering(&mut running);
        assert!(!job.machines.sandboxes[0].call(["checkpoint"]).status.success(), "{point}");
        running[node].wait_status();
        assert_eq!(running[1 - node].wait(), 125, "{point}: {}", running[1 - node].said());
        job.machines.sandboxes[node].variables.retain(|(name, _)| name != "CKPT_FAULT");
    }
    job.full_speed();
    let mut running = job.start();
    let codes = [running[0].wait(), running[1].wait()];
    assert_eq!(codes, [0, 0], "{}{}", running[0].said(), running[1].said());
    assert_blocks(&job, BLOCKS, &running);
}

#[test]
fn training_on_two_machines_survives_and_is_preempted() {
    const STEPS: usize = 300;
    let (Some(first), Some(second)) = (machines(), machines()) else { return };
    let unbroken = Job::training(first, STEPS);
    unbroken.full_speed();
    let mut running = unbroken.start();
    assert_eq!([running[0].wait(), running[1].wait()], [0, 0], "{}{}", running[0].said(), running[1].said());
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
    let codes = [running[0].wait(), running[1].wait()];
    assert_eq!(codes, [75, 75], "{}{}", running[0].said(), running[1].said());
    assert!(running[0].said().contains("its last snapshot is committed"), "{}", running[0].said());
    assert!(job.lines(0, "losses.txt") < STEPS, "it was ended in the middle");
    job.full_speed();
    let mut running = job.start();
    let codes = [running[0].wait(), running[1].wait()];
    assert_eq!(codes, [0, 0], "{}{}", running[0].said(), running[1].said());
    assert_eq!(job.machines.sandboxes[0].read("losses.txt"), expected);
}

#[test]
fn another_key_and_another_address_are_refused_by_name() {
    let Some(machines) = machines() else { return };
    let job = Job::stream(machines, 2000);
    set_key(job.machines.sandboxes[1].path(), 8);
    let (mut zero, mut one) = (job.start_one(0), job.start_one(1));
    assert_eq!(one.wait(), 2, "{}", one.said());
    assert!(one.said().contains("has another key: --cluster-key-file"), "{}", one.said());
    zero.until("a message", || zero_said(&job, "is refused: the other end has another key").then_some(()));
    set_key(job.machines.sandboxes[1].path(), 7);
    let mut running = [zero, job.start_one(1)];
    until_lines(&job, &mut running, "blocks.txt", 5);
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
    assert_eq!(running[0].wait(), 125, "{}", running[0].said());
    assert!(running[0].said().contains("node 1: "), "{}", running[0].said());
}

fn zero_said(job: &Job, text: &str) -> bool {
    job.machines.sandboxes[0].read("job.err").contains(text)
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
    for options in [
        &["--network", "private"][..],
        &["--upload", "s3://bucket/x"],
        &["--store", "s3://bucket/x"],
        &["--encrypt-key-file", "key"],
        &["--persist-every", "2"],
        &["--precopy", "auto"],
        &["--resume", "required"],
        &["--resume", "1"],
    ] {
        refused(&[&off[..], options].concat(), options[0]);
    }
    let output = sandbox.call(["--nodes", "2", "--", "true"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("--coordinator, --cluster-key-file"), "{said}");
    let mut outside = nodes;
    outside[3] = "2";
    let output = sandbox.call(outside.iter().chain(&["--", "true"]));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("--node-rank has to be from 0"), "{said}");
    assert!(!sandbox.store.exists(), "nothing was changed");
}

/// Both machines, or one of them, are killed at random moments: while the job runs, is saved or is resumed.
#[test]
fn training_on_two_machines_survives_many_kills() {
    const STEPS: usize = 1500;
    let Some(kills) = std::env::var("CKPT_TEST_KILLS").ok().and_then(|kills| kills.parse::<usize>().ok())
    else {
        return ckpt_test_skip::skip("needs `cargo xtask test --full`");
    };
    let (Some(first), Some(second)) = (machines(), machines()) else { return };
    let unbroken = Job::training(first, STEPS);
    unbroken.full_speed();
    let mut running = unbroken.start();
    assert_eq!([running[0].wait(), running[1].wait()], [0, 0], "{}{}", running[0].said(), running[1].said());
    let mut job = Job::training(second, STEPS);
    let mut random = seeded_rng(u64::from(std::process::id()));
    let mut running = job.start();
    running[0].until("steps", || (job.lines(0, "losses.txt") >= 5).then_some(()));
    job.checkpoint(&running);
    job.options.extend(["--interval", "500ms"].map(str::to_owned));
    for kill in 0..kills {
        let victim = random.usize(0..3);
        for node in (0..2).filter(|node| victim == 2 || victim == *node) {
            running[node].kill_everything();
        }
        if victim < 2 {
            running[1 - victim].wait();
        }
        assert!(job.lines(0, "losses.txt") < STEPS, "the training ended too early, after {kill} kills");
        running = job.start();
        let until = Instant::now() + Duration::from_millis(random.u64(100..6000));
        while Instant::now() < until && !running.iter_mut().any(Running::has_ended) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let codes = running.each_mut().map(|one| one.has_ended().then(|| one.wait()));
        assert_eq!(codes, [None, None], "{}{}", running[0].said(), running[1].said());
    }
    job.full_speed();
    let codes = [running[0].wait(), running[1].wait()];
    assert_eq!(codes, [0, 0], "{}{}", running[0].said(), running[1].said());
    let expected = unbroken.machines.sandboxes[0].read("losses.txt");
    assert_eq!(job.machines.sandboxes[0].read("losses.txt"), expected);
}

/// A snapshot that is in progress when the job ends is not waited for.
#[test]
fn a_job_that_ends_during_a_snapshot_is_complete() {
    const BLOCKS: usize = 100;
    let Some(machines) = machines() else { return };
    let mut job = Job::stream(machines, BLOCKS);
    for sandbox in &mut job.machines.sandboxes {
        sandbox.variables.push(("CKPT_FAULT".to_owned(), "save-before-commit@1=delay:20000".to_owned()));
    }
    let mut running = begun(&job, "blocks.txt");
    let checkpoint = job.machines.sandboxes[0].command(["checkpoint"]).spawn();
    running[0].until("a snapshot", || zero_said(&job, "save-before-commit").then_some(()));
    job.full_speed();
    let codes = [running[0].wait(), running[1].wait()];
    assert_eq!(codes, [0, 0], "{}{}", running[0].said(), running[1].said());
    assert!(!checkpoint.unwrap().wait().unwrap().success());
    assert_blocks(&job, BLOCKS, &running);
}
