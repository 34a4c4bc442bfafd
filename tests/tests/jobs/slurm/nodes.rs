//! `srun ckpt-run` on two nodes, which are network namespaces with a slurmd each: it finds the other node by itself.

use super::{CONFIG, Cluster};
use ckpt_run_tests::{Sandbox, ckpt_run, criu, programs, python, until};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

const ROUNDS: usize = 600;
const HOSTS: &str = "127.0.0.1 localhost\n10.78.0.1 node0\n10.78.0.2 node1\n";

/// PID 1 of the cluster: as for one node, with a second one in a network namespace and with a host name of its own.
const ENTER: &str = r#"set -eu
mount -t tmpfs -o mode=0755 tmpfs /run
mount --bind "${SLURM_CONF%/*}/hosts" /etc/hosts
hostname node0
ip link set lo up
ip netns add node1
ip link add eth0 type veth peer name eth0 netns node1
ip address add 10.78.0.1/24 dev eth0
ip link set eth0 up
ip -n node1 address add 10.78.0.2/24 dev eth0
ip -n node1 link set eth0 up
ip -n node1 link set lo up
umask 022
mkdir -p /run/munge /run/slurm/state /run/slurm/spool-node0 /run/slurm/spool-node1
(umask 077; head -c 128 /dev/urandom > /run/munge/key)
munged --foreground --socket=/run/munge/socket --key-file=/run/munge/key --pid-file=/run/munge/pid \
    --seed-file=/run/munge/seed --log-file=/run/munge/log &
slurmctld -D &
slurmd -D -d "$BIN/slurmstepd" &
nsenter --net=/run/netns/node1 unshare --uts sh -c 'hostname node1; exec slurmd -D -d "$BIN/slurmstepd"' &
wait
"#;

/// The configuration for two nodes.
fn config() -> String {
    let nodes = "NodeName=node0 NodeAddr=10.78.0.1 CPUs=2\nNodeName=node1 NodeAddr=10.78.0.2 CPUs=2\n";
    let changed = CONFIG.lines().filter(|line| !line.starts_with("NodeName=")).map(|line| {
        line.replace("Nodes=localhost", "Nodes=node0,node1")
            .replace("SlurmctldHost=localhost", "SlurmctldHost=node0")
            .replace("/run/slurm/spool", "/run/slurm/spool-%n")
            .replace("/run/slurm/slurmd.pid", "/run/slurm/slurmd-%n.pid")
    });
    // Nodes come before the partitions that have them.
    let (partitions, rest): (Vec<_>, Vec<_>) = changed.partition(|line| line.starts_with("PartitionName="));
    format!("{}\n{nodes}{}\n", rest.join("\n"), partitions.join("\n"))
}

/// The command of the step. Its tasks have the libraries of srun's wrapper in their environment.
fn script(dir: &Path) -> String {
    let path = dir.join("part");
    let text = format!(
        "#!/bin/sh\nunset LD_LIBRARY_PATH\nexport CKPT_CRIU={}\nmkdir -p node$SLURM_NODEID\ncd node$SLURM_NODEID\n\
         exec {} --store ../store --job ring --interval off --interpose off -- \
         {} {} $SLURM_NODEID {ROUNDS} 5000 10.78.0.1 10.78.0.2\n",
        criu().display(),
        ckpt_run().display(),
        python().display(),
        programs().join("nodes/ring.py").display(),
    );
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

#[test]
fn a_step_on_two_nodes_is_stopped_and_resumes() {
    if std::env::var_os("CKPT_TEST_KILLS").is_none() {
        return ckpt_test_skip::skip("needs `cargo xtask test --full`");
    }
    let sandbox = Sandbox::new();
    fs::write(sandbox.path().join("hosts"), HOSTS).unwrap();
    let cluster = Cluster::start_with(sandbox, &config(), ENTER, "2 idle");
    let dir = cluster.sandbox.path();
    let part = script(dir);
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
    let rounds = |node: &str| cluster.sandbox.read(&format!("{node}/rounds.txt"));
    until("rounds", || {
        let has_ended = first.try_wait().unwrap().is_some();
        assert!(!has_ended, "{}", cluster.sandbox.read("first.log"));
        (rounds("node1").lines().count() >= 5).then_some(())
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
    for (rank, node) in ["node0", "node1"].iter().enumerate() {
        let mut expected = Command::new(python());
        expected.arg(programs().join("nodes/ring.py")).arg("expect");
        let expected = expected.args([rank, ROUNDS, 2].map(|number| number.to_string())).output().unwrap();
        assert_eq!(rounds(node), String::from_utf8_lossy(&expected.stdout), "{said}");
    }
}
