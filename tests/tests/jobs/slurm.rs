//! The example for Slurm, under a real slurmctld, slurmd and munged in namespaces of their own: the job is preempted,
//! reaches its time limit, is requeued, and ends with the result of an unbroken run. A step on two nodes is in `nodes.rs`.

mod nodes;

use ckpt_run_tests::{Running, Sandbox, ckpt_run, criu, from_env, python, until, workspace};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Counts steps, with a checksum over all of them, and waits after each hundred for a file.
/// `steps` is put back with the job. `done` is excluded from that: it has every step that was ever done.
const STEPS: &str = r#"
import hashlib, os, time
print("begun", flush=True)
log = open("steps", "a", buffering=1)
state = b""
for step in range(400):
    while step % 100 == 0 and step > 0 and not os.path.exists(f"pass-{step}"): time.sleep(0.01)
    state = hashlib.sha256(state + b"%d" % step).digest()
    log.write(f"{step} {state.hex()}\n")
    with open("done", "a") as done: done.write(f"{step}\n")
print("result", state.hex(), flush=True)
"#;

/// All that slurm.conf needs for one machine. The daemons' own files are in `/run`, which is theirs alone.
/// `CPUs` and `SlurmdParameters`: two jobs at a time, whatever the machine has. `OverTimeLimit`: minutes in
/// which a job whose time is over may still be saved, should the machine be slow.
const CONFIG: &str = "ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge/socket
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=60
OverTimeLimit=5
NodeName=localhost NodeAddr=127.0.0.1 CPUs=2
PartitionName=low Nodes=localhost Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
PartitionName=high Nodes=localhost PriorityTier=10 PreemptMode=OFF
";

/// PID 1 of the cluster: makes `/run` and the network, and starts the daemons. slurmd wants an address besides that of
/// the loopback interface.
const ENTER: &str = r#"set -eu
mount -t tmpfs -o mode=0755 tmpfs /run
hostname localhost
"$PYTHON" -c '
import fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    up, address = 0x8914, 0x8916
    fcntl.ioctl(s, up, struct.pack("16sh14x", b"lo", 1))
    fcntl.ioctl(s, address, struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton("192.0.2.1")))'
umask 022
mkdir -p /run/munge /run/slurm/spool /run/slurm/state
(umask 077; head -c 128 /dev/urandom > /run/munge/key)
munged --foreground --socket=/run/munge/socket --key-file=/run/munge/key --pid-file=/run/munge/pid \
    --seed-file=/run/munge/seed --log-file=/run/munge/log &
slurmctld -D &
slurmd -D -d "$BIN/slurmstepd" &
wait
"#;

/// The directory with Slurm's programs and plugins.
fn slurm() -> PathBuf {
    from_env("CKPT_TEST_SLURM", || workspace().join("target/tools/slurm"))
}

/// A cluster of one node. All of it goes with its PID 1 when this is dropped.
struct Cluster {
    daemons: Running,
    /// Jobs run in here. It is removed after the daemons.
    sandbox: Sandbox,
}

impl Cluster {
    fn start() -> Self {
        Self::start_with(Sandbox::new(), CONFIG, ENTER, "1 idle")
    }

    /// With a configuration, and a script for its PID 1. `state` is what `sinfo` says when it can take jobs.
    fn start_with(sandbox: Sandbox, config: &str, enter: &str, state: &str) -> Self {
        let config = format!("{config}PluginDir={}\n", slurm().join("plugins").display());
        fs::write(sandbox.path().join("slurm.conf"), config).unwrap();
        fs::write(sandbox.path().join("enter"), enter).unwrap();
        let mut command = Command::new("unshare");
        command.args([
            "--pid",
            "--fork",
            "--kill-child",
            "--mount",
            "--mount-proc",
            "--propagation",
            "private",
        ]);
        command.args(["--net", "--ipc", "--uts", "/bin/sh"]).arg(sandbox.path().join("enter"));
        command.env("PYTHON", python());
        prepare(&mut command, &sandbox);
        let daemons = sandbox.start_command("cluster", command);
        let cluster = Self { sandbox, daemons };
        until("idle nodes", || {
            cluster
                .call(&["sinfo", "--noheader", "--format=%D %T", "--partition=low"])
                .ok()
                .filter(|found| found == state)
        });
        cluster
    }

    /// A command inside.
    fn command(&self, argv: &[&str]) -> Result<Command, String> {
        let first = self.daemons.descendants().first().copied().ok_or("no daemons")?;
        let mut command = Command::new("nsenter");
        command.args(["-t", &first.to_string(), "--mount", "--pid", "--net", "--ipc", "--uts"]);
        command.arg(format!("--wd={}", self.sandbox.path().display()));
        // Slurm's commands wait long for daemons that do not answer.
        command.args(["timeout", "60"]).args(argv);
        prepare(&mut command, &self.sandbox);
        Ok(command)
    }

    /// Runs a command inside.
    fn call(&self, argv: &[&str]) -> Result<String, String> {
        let output = self.command(argv)?.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(format!("{argv:?}: {}: {}", output.status, text(&output.stderr)))
        }
    }

    fn ok(&self, argv: &[&str]) -> String {
        self.call(argv).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Submits the example as it is, with a command.
    fn submit(&self, options: &[&str], command: &[&str]) {
        let ckpt_run = ckpt_run();
        let bin = ckpt_run.parent().unwrap().display();
        // Nothing else of the environment, such as where Slurm's programs find their libraries.
        let export = format!(
            "--export=PATH={}:{bin}:/usr/sbin:/usr/bin:/sbin:/bin,SLURM_CONF={},CKPT_CRIU={},CKPT_INTERVAL=off,CKPT_GRACE=100s,CKPT_FILES_EXCLUDE=done",
            slurm().join("bin").display(),
            self.sandbox.path().join("slurm.conf").display(),
            criu().display()
        );
        let example = workspace().join("examples/slurm/job.sbatch");
        let mut argv = vec!["sbatch", "--partition=low", &export];
        argv.extend(options);
        argv.push(example.to_str().unwrap());
        argv.extend(command);
        self.ok(&argv);
    }

    /// What Slurm says of a job: `JobState=PENDING` and the like.
    fn says(&self, job: &str, what: &[&str]) -> bool {
        let shown = self.ok(&["scontrol", "--oneliner", "show", "job", job]);
        what.iter().all(|what| shown.split_whitespace().any(|word| word == *what))
    }

    fn until_says(&self, job: &str, what: &[&str]) {
        until(&format!("job {job}: {what:?}"), || self.says(job, what).then_some(()));
    }

    /// A requeued job waits for two minutes by itself. A second or so is needed: slurmd refuses what was granted in the
    /// second in which it ended the job.
    fn start_again(&self, job: &str) {
        self.ok(&["scontrol", "update", &format!("JobId={job}"), "StartTime=now+2", "TimeLimit=60"]);
    }

    fn until_steps(&self, dir: &str, steps: usize) {
        let file = format!("{dir}steps");
        until(&format!("{steps} steps in {file}"), || {
            (self.sandbox.read(&file).lines().count() >= steps).then_some(())
        });
    }

    fn pass(&self, step: usize) {
        fs::write(self.sandbox.path().join(format!("pass-{step}")), "").unwrap();
    }

    /// What the job and ckpt-run have said in the log of a job.
    fn log(&self, job: &str) -> String {
        self.sandbox.read(&format!("trained-{job}.log"))
    }

    /// The job may be faster than the message.
    fn until_resumed(&self, job: &str, id: &str) {
        let wanted = format!("resumed from snapshot {id}");
        until(&format!("{wanted} in the log"), || self.log(job).contains(&wanted).then_some(()));
    }

    /// The ID of a job's last snapshot, if its log has one.
    fn ended_with(&self, job: &str) -> Option<String> {
        let log = self.log(job);
        let (_, rest) = log.rsplit_once("the job was ended with the snapshot ")?;
        Some(rest.split_once(". ")?.0.to_owned())
    }

    /// The same for a job that must have one.
    fn has_ended_with(&self, job: &str) -> String {
        self.ended_with(job).unwrap_or_else(|| panic!("no snapshot at its end: {}", self.log(job)))
    }

    /// Waits until a job is complete; checks that it did the steps of `done`, in `dir`, and has the result of one that
    /// was not broken.
    fn check(&self, job: &str, log: &str, dir: &str, done: impl Iterator<Item = usize>) {
        // It must not begin again. Slurm 24.11 calls one that was preempted earlier by that name.
        until(&format!("the end of job {job}"), || {
            let is_over = |state| self.says(job, &[state, "ExitCode=0:0", "Requeue=0"]);
            (is_over("JobState=COMPLETED") || is_over("JobState=PREEMPTED")).then_some(())
        });
        let log = self.log(log);
        assert_eq!(log.matches("begun\n").count(), 1, "{log}");
        let all: Vec<String> = done.map(|step| step.to_string()).collect();
        let was: Vec<String> = self.sandbox.read(&format!("{dir}done")).lines().map(str::to_owned).collect();
        assert_eq!(was, all, "{log}");
        let plain = Sandbox::new();
        for step in [100, 200, 300] {
            fs::write(plain.path().join(format!("pass-{step}")), "").unwrap();
        }
        let output = Command::new(python()).args(["-c", STEPS]).current_dir(plain.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(self.sandbox.read(&format!("{dir}steps")), plain.read("steps"));
        let result = String::from_utf8_lossy(&output.stdout).replace("begun\n", "");
        // What ckpt-run says of a resume may come after what the job prints.
        let own = |line: &&str| !line.starts_with("ckpt-run: ");
        let printed: String = log.split_inclusive('\n').filter(own).collect();
        assert!(printed.ends_with(&result), "{log}");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for job in ["1", "2"] {
                eprintln!("--- log of job {job}\n{}", self.log(job));
            }
        }
    }
}

fn prepare(command: &mut Command, sandbox: &Sandbox) {
    let bin = slurm().join("bin");
    assert!(bin.is_dir(), "{} is not there: call `cargo xtask test`", bin.display());
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}:/usr/sbin:/sbin", bin.display())).env("BIN", bin);
    command.env("SLURM_CONF", sandbox.path().join("slurm.conf")).stdin(Stdio::null());
}

fn steps() -> [String; 3] {
    [python().display().to_string(), "-c".to_owned(), STEPS.to_owned()]
}

/// By a job of a partition of higher priority, with notice; then by `scontrol requeue`, without.
#[test]
fn a_preempted_job_is_requeued_and_resumes() {
    let cluster = Cluster::start();
    let command = steps();
    cluster.submit(&["--time=60"], &command.each_ref().map(String::as_str));
    cluster.until_steps("", 100);
    let wanted = cluster.sandbox.path().join("wanted");
    let wrap = format!("--wrap=touch {}", wanted.display());
    cluster.ok(&["sbatch", "--partition=high", "--ntasks=2", "--output=/dev/null", &wrap]);
    until("the job that preempts", || wanted.exists().then_some(()));
    cluster.until_says("1", &["JobState=PENDING", "Restarts=1"]);
    let id = cluster.has_ended_with("1");

    cluster.pass(100);
    cluster.start_again("1");
    cluster.until_steps("", 200);
    cluster.until_resumed("1", &id);
    let store = cluster.sandbox.store.display().to_string();
    let id = cluster.ok(&[ckpt_run().to_str().unwrap(), "checkpoint", "--store", &store]);
    cluster.pass(200);
    cluster.until_steps("", 300);
    cluster.ok(&["scontrol", "requeue", "1"]);
    cluster.until_says("1", &["JobState=PENDING", "Restarts=2"]);
    // Slurm has signalled the job's own processes too, which as a rule end before they are saved. It may also have killed
    // ckpt-run after the last snapshot and before its message.
    let newest = cluster.sandbox.snapshots().pop().expect("a snapshot");
    let (id, again) = if newest == id { (id, 200) } else { (newest, 300) };
    cluster.pass(300);
    cluster.start_again("1");
    cluster.check("1", "1", "", (0..300).chain(again..400));
    cluster.until_resumed("1", &id);
}

#[test]
fn a_job_at_its_time_limit_is_requeued_and_resumes() {
    let cluster = Cluster::start();
    let command = steps();
    // slurmctld looks every 30 s, and signals when the next look might be too late: 20 s after the start at
    // the earliest, by which time the script is at its trap and the job runs.
    cluster.submit(&["--time=1", "--signal=B:USR1@10"], &command.each_ref().map(String::as_str));
    cluster.until_says("1", &["JobState=PENDING", "Restarts=1"]);
    let id = cluster.has_ended_with("1");
    for step in [100, 200, 300] {
        cluster.pass(step);
    }
    cluster.start_again("1");
    cluster.check("1", "1", "", 0..400);
    cluster.until_resumed("1", &id);
}

/// Of two tasks of an array, the one with the ID of the array is preempted; the other one continues.
#[test]
fn one_task_of_an_array_is_requeued() {
    let cluster = Cluster::start();
    let script = "mkdir -p $SLURM_ARRAY_TASK_ID; cd $SLURM_ARRAY_TASK_ID; for n in 100 200 300; do ln -s ../pass-$n; done; exec \"$@\"";
    let command = steps();
    let mut argv = vec!["/bin/sh", "-c", script, "task"];
    argv.extend(command.iter().map(String::as_str));
    cluster.submit(&["--array=1-2", "--time=60"], &argv);
    for task in ["1/", "2/"] {
        cluster.until_steps(task, 100);
    }
    assert!(cluster.says("1_2", &["JobId=1"]), "the last task has the ID of the array");
    cluster.ok(&["scancel", "--signal=USR1", "--batch", "1_2"]);
    cluster.until_says("1_2", &["JobState=PENDING", "Restarts=1"]);
    let id = cluster.has_ended_with("1");
    assert!(cluster.says("1_1", &["JobState=RUNNING", "Restarts=0"]));
    for step in [100, 200, 300] {
        cluster.pass(step);
    }
    cluster.start_again("1_2");
    cluster.check("1_2", "1", "2/", 0..400);
    cluster.check("1_1", "2", "1/", 0..400);
    cluster.until_resumed("1", &id);
}
