//! `srun ckpt-run` on several nodes, which are network namespaces with a slurmd each: it finds the other nodes by itself.

use super::{CONFIG, Cluster};
use ckpt_run_tests::{Sandbox, ckpt_run, criu, programs, python, until};
use ckpt_test_skip::is_full_run_or_skip;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

const ROUNDS: usize = 600;

/// PID 1 of the cluster: as for one node, with NODES of them in network namespaces, each with a host name of its own. They
/// are connected by a bridge.
const ENTER: &str = r#"set -eu
mount -t tmpfs -o mode=0755 tmpfs /run
mount --bind "${SLURM_CONF%/*}/hosts" /etc/hosts
hostname node0
ip link set lo up
ip link add switch type bridge
ip address add 10.78.0.1/24 dev switch
ip link set switch up
node=1
while [ $node -lt NODES ]; do
    ip netns add node$node
    ip link add port$node master switch type veth peer name eth0 netns node$node
    ip link set port$node up
    ip -n node$node address add 10.78.0.$((node + 1))/24 dev eth0
    ip -n node$node link set eth0 up
    ip -n node$node link set lo up
    mkdir -p /run/slurm/spool-node$node
    node=$((node + 1))
done
umask 022
mkdir -p /run/munge /run/slurm/state /run/slurm/spool-node0
(umask 077; head -c 128 /dev/urandom > /run/munge/key)
munged --foreground --socket=/run/munge/socket --key-file=/run/munge/key --pid-file=/run/munge/pid \
    --seed-file=/run/munge/seed --log-file=/run/munge/log &
slurmctld -D &
slurmd -D -d "$BIN/slurmstepd" &
node=1
while [ $node -lt NODES ]; do
    nsenter --net=/run/netns/node$node unshare --uts sh -c "hostname node$node; exec slurmd -D -d '$BIN/slurmstepd'" &
    node=$((node + 1))
done
wait
"#;

/// The configuration for that many nodes.
fn config(nodes: usize) -> String {
    let line = |node| format!("NodeName=node{node} NodeAddr=10.78.0.{} CPUs=2", node + 1);
    let lines: Vec<_> = (0..nodes).map(line).collect();
    let all = format!("Nodes=node[0-{}]", nodes - 1);
    let changed = CONFIG.lines().filter(|line| !line.starts_with("NodeName=")).map(|line| {
        line.replace("Nodes=localhost", &all)
            .replace("SlurmctldHost=localhost", "SlurmctldHost=node0")
            .replace("/run/slurm/spool", "/run/slurm/spool-%n")
            .replace("/run/slurm/slurmd.pid", "/run/slurm/slurmd-%n.pid")
    });
    // Nodes come before the partitions that have them.
    let (partitions, rest): (Vec<_>, Vec<_>) = changed.partition(|line| line.starts_with("PartitionName="));
    format!("{}\n{}\n{}\n", rest.join("\n"), lines.join("\n"), partitions.join("\n"))
}

/// A cluster of that many nodes.
fn cluster(nodes: usize) -> Cluster {
    let sandbox = Sandbox::new();
    let host = |node| format!("10.78.0.{} node{node}\n", node + 1);
    let hosts: String = (0..nodes).map(host).collect();
    fs::write(sandbox.path().join("hosts"), format!("127.0.0.1 localhost\n{hosts}")).unwrap();
    let enter = ENTER.replace("NODES", &nodes.to_string());
    Cluster::start_with(sandbox, &config(nodes), &enter, &format!("{nodes} idle"))
}

fn script(path: &Path, text: &str) -> String {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// The command of a step of that many parts. Its tasks have the libraries of srun's wrapper in their environment.
fn part(dir: &Path, parts: usize) -> String {
    let addresses: Vec<_> = (1..=parts).map(|part| format!("10.78.0.{part}")).collect();
    part_with(dir, "", &addresses.join(" "))
}

/// The same with further options, at these addresses.
fn part_with(dir: &Path, options: &str, addresses: &str) -> String {
    let text = format!(
        "#!/bin/sh\nunset LD_LIBRARY_PATH\nexport CKPT_CRIU={}\nmkdir -p node$SLURM_NODEID\ncd node$SLURM_NODEID\n\
         exec {} {options} --store ../store --job ring --interval off --interpose off -- \
         {} {} $SLURM_NODEID {ROUNDS} 5000 {addresses}\n",
        criu().display(),
        ckpt_run().display(),
        python().display(),
        programs().join("nodes/ring.py").display(),
    );
    script(&dir.join("part"), &text)
}

fn rounds(cluster: &Cluster, node: usize) -> String {
    cluster.sandbox.read(&format!("node{node}/rounds.txt"))
}

/// The rounds are those of a ring that was never broken.
fn assert_rounds(cluster: &Cluster, parts: usize, said: &str) {
    for rank in 0..parts {
        let mut expected = Command::new(python());
        expected.arg(programs().join("nodes/ring.py")).arg("expect");
        let expected =
            expected.args([rank, ROUNDS, parts].map(|number| number.to_string())).output().unwrap();
        assert_eq!(rounds(cluster, rank), String::from_utf8_lossy(&expected.stdout), "{said}");
    }
}

#[test]
fn a_step_on_two_nodes_is_stopped_and_resumes() {
    if !is_full_run_or_skip() {
        return;
    }
    let cluster = cluster(2);
    let dir = cluster.sandbox.path();
    let part = part(dir, 2);
    let srun = ["srun", "--partition=low", "--nodes=2", "--ntasks-per-node=1", &part];
    let mut crowded = srun;
    crowded[3] = "--ntasks-per-node=2";
    let error = cluster.call(&crowded).unwrap_err();
    assert!(error.contains("use srun --ntasks-per-node=1"), "{error}");

    for node in ["node0", "node1"] {
        fs::write(dir.join(node).join("slow"), "").unwrap();
    }
    let log = fs::File::create(dir.join("first.log")).unwrap();
    let mut first = cluster.command(&srun).unwrap();
    let mut first = first.stdout(Stdio::null()).stderr(log).spawn().unwrap();
    until("rounds", || {
        let has_ended = first.try_wait().unwrap().is_some();
        assert!(!has_ended, "{}", cluster.sandbox.read("first.log"));
        (rounds(&cluster, 1).lines().count() >= 5).then_some(())
    });
    let store = dir.join("store").display().to_string();
    let id = cluster.ok(&[ckpt_run().to_str().unwrap(), "stop", "--store", &store, "--job", "ring.node1"]);
    assert_eq!(first.wait().unwrap().code(), Some(75), "{}", cluster.sandbox.read("first.log"));
    assert!(cluster.sandbox.read("first.log").contains("as Slurm says"));
    assert_eq!(fs::metadata(dir.join("store/cluster.key")).unwrap().permissions().mode() & 0o777, 0o600);

    for node in ["node0", "node1"] {
        fs::remove_file(dir.join(node).join("slow")).unwrap();
    }
    // Another step, of another job.
    let output = cluster.command(&srun).unwrap().output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains(&format!("resumed from snapshot {id}")), "{said}");
    assert_rounds(&cluster, 2, &said);
}

/// A step with a node more than the job has. The launcher of one is killed, and srun keeps the others.
#[test]
fn a_further_node_of_a_step_is_a_spare() {
    if !is_full_run_or_skip() {
        return;
    }
    let cluster = cluster(3);
    let dir = cluster.sandbox.path();
    let options = "--nodes 2 --network job --node-timeout 3s";
    let part = part_with(dir, options, "ckpt-node-0 ckpt-node-1");
    for node in ["node0", "node1"] {
        fs::create_dir(dir.join(node)).unwrap();
        fs::write(dir.join(node).join("slow"), "").unwrap();
    }
    let log = fs::File::create(dir.join("step.log")).unwrap();
    let mut step = cluster
        .command(&["srun", "--no-kill", "--partition=low", "--nodes=3", "--ntasks-per-node=1", &part])
        .unwrap();
    let mut step = step.stdout(Stdio::null()).stderr(log).spawn().unwrap();
    let said = || cluster.sandbox.read("step.log");
    let mut until_lines = |lines: usize, text: &str| {
        until("rounds", || {
            assert!(step.try_wait().unwrap().is_none(), "{}", said());
            let is_there = rounds(&cluster, 1).lines().count() >= lines && said().contains(text);
            is_there.then_some(())
        });
    };
    until_lines(5, "waits until a node is lost");
    let store = dir.join("store").display().to_string();
    cluster.ok(&[ckpt_run().to_str().unwrap(), "checkpoint", "--store", &store, "--job", "ring.node0"]);
    let kill = format!(
        "for pid in $(pgrep -x ckpt-run); do [ \"$(readlink /proc/$pid/cwd)\" = {}/node1 ] && kill -9 $pid; done; true",
        dir.display()
    );
    cluster.ok(&["sh", "-c", &kill]);
    until_lines(5, "the spare 2 takes its place");
    for node in ["node0", "node1"] {
        fs::remove_file(dir.join(node).join("slow")).unwrap();
    }
    // The exit code of the step is that of the task that was killed.
    assert_ne!(step.wait().unwrap().code(), Some(0), "{}", said());
    assert_rounds(&cluster, 2, &said());
}

/// What `sbatch` runs on the first node: as examples/slurm/job.sbatch, with a step on all nodes.
const BATCH: &str = r#"#!/bin/sh
requeue=no
trap 'requeue=yes; env -u LD_LIBRARY_PATH "$CKPT_RUN" stop --store store --job ring.node0 &' USR1
trap : TERM
srun ./part &
step=$!
while kill -0 $step 2>/dev/null; do wait $step; done
wait $step
code=$?
echo "the step has ended with $code"
if [ $code -ne 75 ]; then
    scontrol update "JobId=$SLURM_JOB_ID" Requeue=0
elif [ $requeue = yes ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"#;

fn set_slow(dir: &Path, parts: usize, is_slow: bool) {
    for node in 0..parts {
        let dir = dir.join(format!("node{node}"));
        fs::create_dir_all(&dir).unwrap();
        let slow = dir.join("slow");
        if is_slow { fs::write(slow, "") } else { fs::remove_file(slow) }.unwrap();
    }
}

/// Submits the batch script for four nodes; returns the job's ID.
fn submit(cluster: &Cluster, batch: &str, options: &[&str]) -> String {
    let export = format!("--export=ALL,CKPT_RUN={}", ckpt_run().display());
    let mut argv =
        vec!["sbatch", "--parsable", "--partition=low", "--nodes=4", "--ntasks-per-node=1", &export];
    argv.extend(["--requeue", "--open-mode=append", "--output=ring.log", "--signal=B:USR1@150", "--time=60"]);
    argv.extend(options);
    argv.push(batch);
    cluster.ok(&argv)
}

/// Four of five nodes: preempted by a job of a partition of higher priority; started again with another node in place of one
/// that is drained, which does not have its address; and once more with the node back.
#[test]
fn a_job_on_four_nodes_is_preempted_requeued_and_refused_with_another_node() {
    const PARTS: usize = 4;
    if !is_full_run_or_skip() {
        return;
    }
    let cluster = cluster(5);
    let dir = cluster.sandbox.path();
    part(dir, PARTS);
    let batch = script(&dir.join("batch"), BATCH);
    set_slow(dir, PARTS, true);
    let submit = |options: &[&str]| submit(&cluster, &batch, options);
    let until_round = |round: usize| {
        until("rounds of all parts", || {
            (0..PARTS).all(|node| rounds(&cluster, node).lines().count() >= round).then_some(())
        });
    };
    let log = || cluster.sandbox.read("ring.log");
    let job = submit(&["--nodelist=node0,node1,node2,node3"]);
    until_round(5);
    let wanted = dir.join("wanted");
    let wrap = format!("--wrap=touch {}", wanted.display());
    cluster.ok(&["sbatch", "--partition=high", "--nodes=5", "--ntasks=10", "--output=/dev/null", &wrap]);
    until("the job that preempts", || wanted.exists().then_some(()));
    cluster.until_says(&job, &["JobState=PENDING", "Restarts=1"]);
    assert!(log().contains("its last snapshot is committed"), "{}", log());

    let before = rounds(&cluster, 0).lines().count();
    cluster.start_again(&job);
    until_round(before + 5);
    assert!(log().contains("resumed from snapshot"), "{}", log());
    // Without a snapshot now: from the last one, by another job. node3 is away, and node4 has another address.
    cluster.ok(&["scancel", &job]);
    cluster.until_says(&job, &["JobState=CANCELLED"]);
    until("free nodes", || (cluster.ok(&["squeue", "--noheader"]).is_empty()).then_some(()));
    cluster.ok(&["scontrol", "update", "NodeName=node3", "State=drain", "Reason=test"]);
    let refused = submit(&[]);
    cluster.until_says(&refused, &["JobState=FAILED"]);
    assert!(log().contains("10.78.0.4"), "{}", log());

    cluster.ok(&["scontrol", "update", "NodeName=node3", "State=resume"]);
    set_slow(dir, PARTS, false);
    let last = submit(&["--nodelist=node0,node1,node2,node3"]);
    cluster.until_says(&last, &["JobState=COMPLETED", "ExitCode=0:0"]);
    assert_rounds(&cluster, PARTS, &log());
}

/// With a network of its own, the job goes on when another node takes the place of one that is drained.
#[test]
fn a_drained_node_is_replaced() {
    const PARTS: usize = 4;
    if !is_full_run_or_skip() {
        return;
    }
    let cluster = cluster(PARTS + 1);
    let dir = cluster.sandbox.path();
    let names: Vec<_> = (0..PARTS).map(|node| format!("ckpt-node-{node}")).collect();
    part_with(dir, "--network job", &names.join(" "));
    let batch = script(&dir.join("batch"), BATCH);
    set_slow(dir, PARTS, true);
    let log = || cluster.sandbox.read("ring.log");
    let until_round = |round: usize| {
        until("rounds of all parts", || {
            (0..PARTS).all(|node| rounds(&cluster, node).lines().count() >= round).then_some(())
        });
    };
    let job = submit(&cluster, &batch, &[]);
    until_round(5);
    let hosts = |cluster: &Cluster| cluster.ok(&["scontrol", "show", "job", &job]);
    let first = hosts(&cluster);
    let is_on =
        |shown: &str, nodes: &str| shown.lines().any(|line| line.trim() == format!("NodeList={nodes}"));
    assert!(is_on(&first, "node[0-3]"), "{first}");
    cluster.ok(&["scontrol", "update", "NodeName=node3", "State=drain", "Reason=test"]);
    cluster.ok(&["scancel", "--batch", "--signal=USR1", &job]);
    cluster.until_says(&job, &["JobState=PENDING", "Restarts=1"]);
    let before = rounds(&cluster, 0).lines().count();
    cluster.start_again(&job);
    until_round(before + 5);
    let then = hosts(&cluster);
    assert!(is_on(&then, "node[0-2,4]"), "{then}");
    assert!(log().contains("resumed from snapshot"), "{}", log());
    set_slow(dir, PARTS, false);
    cluster.until_says(&job, &["JobState=COMPLETED", "ExitCode=0:0"]);
    assert_rounds(&cluster, PARTS, &log());
}
