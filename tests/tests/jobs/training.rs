//! The main job: real PyTorch training, killed without warning and resumed, ends bit for bit as an unbroken run, and
//! its log has every step exactly once.

use ckpt_run_tests::{Running, Sandbox, python, rng_of_run, torchrun_with_two_ranks, train_script, until};
use std::ffi::OsString;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

/// More steps than a slow training does during a test.
const STEPS: usize = 1500;
/// Samples in each of the script's steps.
const BATCH: usize = 16;

struct Training {
    argv: Vec<OsString>,
    /// The losses of an unbroken run, which several tests compare with.
    unbroken: &'static OnceLock<String>,
}

impl Training {
    fn single(workers: usize) -> Self {
        static UNBROKEN: [OnceLock<String>; 3] = [const { OnceLock::new() }; 3];
        let mut argv: Vec<OsString> = vec![python().into(), train_script().into()];
        argv.extend(Self::options(workers));
        Self { argv, unbroken: &UNBROKEN[workers] }
    }

    fn two_ranks() -> Self {
        static UNBROKEN: OnceLock<String> = OnceLock::new();
        let mut argv = torchrun_with_two_ranks();
        argv.push(train_script().into());
        argv.extend(Self::options(0));
        Self { argv, unbroken: &UNBROKEN }
    }

    /// The steps are slow while there is the file `slow`: a test has enough time on any machine.
    fn options(workers: usize) -> [OsString; 10] {
        let (steps, workers) = (STEPS.to_string(), workers.to_string());
        let log = ["--log", "losses.txt"];
        ["--steps", &steps, "--workers", &workers, "--step-ms", "30", "--slow-while", "slow", log[0], log[1]]
            .map(OsString::from)
    }

    /// The losses of an unbroken run without ckpt-run. All tests with the same command line share one run.
    fn unbroken(&self) -> &str {
        self.unbroken.get_or_init(|| self.run_unbroken())
    }

    fn run_unbroken(&self) -> String {
        let sandbox = Sandbox::new();
        let mut command = Command::new(&self.argv[0]);
        let status = command
            .args(&self.argv[1..])
            .env("OMP_NUM_THREADS", "1")
            .current_dir(sandbox.path())
            .stdout(std::process::Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
        let losses = sandbox.read("losses.txt");
        assert_eq!(losses.lines().count(), STEPS);
        losses
    }

    fn start(&self, sandbox: &Sandbox) -> Running {
        let mut arguments = vec![OsString::from("--")];
        arguments.extend(self.argv.iter().cloned());
        sandbox.start("job", arguments)
    }
}

/// A directory in which the training is slow.
fn slow_sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    std::fs::write(sandbox.path().join("slow"), "").unwrap();
    sandbox
}

fn full_speed(sandbox: &Sandbox) {
    std::fs::remove_file(sandbox.path().join("slow")).unwrap();
}

fn steps_done(sandbox: &Sandbox) -> usize {
    sandbox.read("losses.txt").lines().count()
}

fn until_step(job: &mut Running, sandbox: &Sandbox, step: usize) {
    job.until("a step of the training", || (steps_done(sandbox) >= step).then_some(()));
}

/// Saves, kills and resumes the training; its losses have to be those of an unbroken run.
fn survives(training: &Training) {
    let sandbox = slow_sandbox();
    let mut job = training.start(&sandbox);
    until_step(&mut job, &sandbox, 5);
    job.checkpoint(&sandbox);
    let at_snapshot = steps_done(&sandbox);
    until_step(&mut job, &sandbox, at_snapshot + 5);
    job.kill_everything();
    assert!(steps_done(&sandbox) < STEPS, "it was killed in the middle");
    full_speed(&sandbox);
    let mut job = training.start(&sandbox);
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
    assert_eq!(sandbox.read("losses.txt"), training.unbroken());
    sandbox.verify_all();
}

#[test]
fn a_single_process_survives() {
    survives(&Training::single(0));
}

#[test]
fn data_loader_workers_survive() {
    survives(&Training::single(2));
}

#[test]
fn torchrun_with_two_ranks_survives() {
    survives(&Training::two_ranks());
}

/// Killed 20 times at random moments: while it runs, while it is saved, while it is resumed.
#[test]
fn twenty_kills_at_random_moments() {
    let training = Training::two_ranks();
    let sandbox = slow_sandbox();
    let mut random = rng_of_run();
    let mut kills = 0;
    let mut job = loop {
        let mut command =
            sandbox.command(std::iter::once(OsString::from("--")).chain(training.argv.iter().cloned()));
        command.env("CKPT_INTERVAL", "300ms");
        let mut job = sandbox.start_command("job", command);
        // The first one lives until there is a snapshot: a start from the beginning would find its log.
        let mut life = Duration::from_millis(random.u64(300..2800));
        if kills == 0 {
            until_step(&mut job, &sandbox, 5);
            job.checkpoint(&sandbox);
            life = Duration::ZERO;
        }
        let deadline = std::time::Instant::now() + life;
        while std::time::Instant::now() < deadline && !job.has_ended() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if kills == 20 || job.has_ended() {
            full_speed(&sandbox);
            break job;
        }
        job.kill_everything();
        sandbox.verify_all();
        kills += 1;
    };
    let code = job.wait();
    assert_eq!(code, 0, "after {kills} kills\n{}", job.said());
    assert_eq!(sandbox.read("losses.txt"), training.unbroken(), "after {kills} kills\n{}", job.said());
    assert_eq!(kills, 20, "the training ended too early: give it more steps");
}

/// A rank is killed, and the launcher resumes the job; then the job is preempted, and resumes.
#[test]
fn two_ranks_are_restarted_and_preempted() {
    let training = Training::two_ranks();
    let sandbox = slow_sandbox();
    let start = || {
        let arguments = ["--grace", "100s", "--log-file", "messages", "--"].map(OsString::from);
        let mut command = sandbox.command(arguments.into_iter().chain(training.argv.iter().cloned()));
        command.env("CKPT_MAX_RESTARTS", "10");
        sandbox.start_command("job", command)
    };
    let mut job = start();
    until_step(&mut job, &sandbox, 5);
    job.checkpoint(&sandbox);
    let is_rank = |pid: &i32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable == b"LOCAL_RANK=1")
    };
    let rank = job.descendants().into_iter().find(is_rank).expect("a rank");
    let rank = rustix::process::Pid::from_raw(rank).expect("a PID");
    rustix::process::kill_process(rank, rustix::process::Signal::KILL).expect("it runs");
    job.until("a restart", || sandbox.read("messages").contains("resumed from snapshot").then_some(()));
    let before = steps_done(&sandbox);
    until_step(&mut job, &sandbox, before + 5);
    job.signal(rustix::process::Signal::TERM);
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert!(sandbox.read("messages").contains("was ended with the snapshot"), "{}", sandbox.read("messages"));
    assert!(steps_done(&sandbox) < STEPS, "it was preempted in the middle");
    full_speed(&sandbox);
    assert_eq!(start().wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("losses.txt"), training.unbroken());
    sandbox.verify_all();
}

#[test]
fn a_resumed_job_is_checkpointed_and_resumed_again() {
    let training = Training::two_ranks();
    let sandbox = slow_sandbox();
    let mut last = String::new();
    for round in 1..=3 {
        let mut job = training.start(&sandbox);
        job.until_answering(&sandbox);
        until_step(&mut job, &sandbox, round * 12);
        let id = job.checkpoint(&sandbox);
        assert!(id > last, "{id} after {last}");
        last = id;
        until_step(&mut job, &sandbox, round * 12 + 6);
        job.kill_everything();
    }
    full_speed(&sandbox);
    let mut job = training.start(&sandbox);
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains(&format!("resumed from snapshot {last}")));
    assert_eq!(sandbox.read("losses.txt"), training.unbroken());
}

/// With the interposer in every process: its connections are closed during a dump and reopened.
#[test]
fn training_with_the_interposer_survives() {
    let library = ckpt_run_tests::ckpt_run().with_file_name("libckpt_interpose.so");
    assert!(library.is_file(), "{} is not there: call `cargo xtask test`", library.display());
    let mut training = Training::single(2);
    // One epoch for all steps: at the end of each the workers end, and new ones begin.
    training.argv.extend(["--dataset-size", &(STEPS * BATCH).to_string()].map(OsString::from));
    let sandbox = slow_sandbox();
    let start = || {
        let mut command =
            sandbox.command(std::iter::once(OsString::from("--")).chain(training.argv.iter().cloned()));
        command.env("CKPT_INTERPOSE", &library).env("CKPT_VERBOSE", "1");
        sandbox.start_command("job", command)
    };
    let mut job = start();
    until_step(&mut job, &sandbox, 5);
    let id = job.checkpoint(&sandbox);
    assert!(job.said().contains("interposer: 3 processes continued, 0 were restored"), "{}", job.said());
    let agents = sandbox.json(["show", &id, "--json"])["tree"]["agents"]["pids"].clone();
    assert_eq!(agents.as_array().unwrap().len(), 3, "the trainer and its two workers: {agents}");
    job.kill_everything();
    let mut job = start();
    job.until_answering(&sandbox);
    assert!(job.said().contains("interposer: 0 processes continued, 3 were restored"), "{}", job.said());
    full_speed(&sandbox);
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("losses.txt"), training.run_unbroken());
}

/// The PIDs of the killed job are used by other processes: it still resumes.
#[test]
fn resumes_while_its_pids_are_taken() {
    let training = Training::single(2);
    let sandbox = slow_sandbox();
    let mut job = training.start(&sandbox);
    until_step(&mut job, &sandbox, 5);
    job.checkpoint(&sandbox);
    let pids = job.descendants();
    job.kill_everything();
    // Other programs of the machine take PIDs meanwhile.
    let taken = until("a PID that can be taken", || {
        let taken: Vec<_> = pids.iter().filter_map(|pid| occupy(*pid)).collect();
        (!taken.is_empty()).then_some(taken)
    });
    full_speed(&sandbox);
    let mut job = training.start(&sandbox);
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("losses.txt"), training.unbroken());
    drop(taken);
}

/// Starts a process with this PID, if the kernel assigns it.
fn occupy(pid: i32) -> Option<Occupied> {
    std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).ok()?;
    let child = Command::new("/bin/sleep").arg("300").spawn().ok()?;
    let occupied = Occupied(child);
    (occupied.0.id().cast_signed() == pid).then_some(occupied)
}

struct Occupied(std::process::Child);

impl Drop for Occupied {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
