//! Faults of all kinds at once, at random, over a torchrun job with device memory: its result is that of an unbroken run,
//! and no snapshot is lost. Run by `cargo xtask soak --chaos TIME`.

use std::fs;
use std::time::{Duration, Instant};

use ckpt_run_tests::system_calls::traced;
use ckpt_run_tests::{Running, Sandbox, seeded_rng};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::gpu_job::{GpuJob, library};

/// More steps than any run has time for.
const STEPS: &str = "1000000";
/// A snapshot may contain a rank that has just died: then it takes some restarts to get to an older one.
const RESTARTS: &str = "32767";
/// Without another time, in seconds.
const DEFAULT_S: u64 = 25;
/// Calls of the driver that are made to fail, and how.
const CALLS: [&str; 8] = [
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
    "cuMemCreate",
    "cuMemMap",
    "cuMemExportToShareableHandle",
    "cuDevicePrimaryCtxRetain",
];
const ACTIONS: [&str; 5] = ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY", "delay:50", "hang", "crash"];
/// Steps of the interposer at which it is killed, delayed or panics.
const POINTS: [&str; 6] =
    ["staged", "detach-captured", "detach-released", "detach-checkpointed", "attach-begun", "attach-mapped"];

struct Chaos {
    job: GpuJob,
    /// What was done to system calls.
    notes: Sandbox,
    random: fastrand::Rng,
    kills: u64,
    sessions: u64,
    /// Signals to processes of the job.
    signals: u64,
    /// Faults of the driver and of the interposer that were prepared. Not each of them is come by.
    armed: u64,
    /// Snapshots that `ckpt-run checkpoint` has said to be stored.
    acknowledged: u64,
    /// The number of the newest snapshot that was acknowledged or seen.
    newest: u64,
}

impl Chaos {
    fn path(&self, name: &str) -> std::path::PathBuf {
        self.job.sandbox.path().join(name)
    }

    /// Replaces a file of faults at once.
    fn arm(&mut self, name: &str, faults: &str) {
        fs::write(self.path("new"), faults).unwrap();
        fs::rename(self.path("new"), self.path(name)).unwrap();
        self.armed += 1;
    }

    fn disarm(&self) {
        for name in ["points", "rules"] {
            let _ = fs::remove_file(self.path(name));
        }
    }

    /// Starts or resumes the job. Most sessions have faults of system calls.
    fn start(&mut self) -> Running {
        let mut command = self.job.command(library());
        command
            .env("CKPT_FAULT_STALL_MS", "4000")
            .env("CKPT_INTERVAL", "300ms")
            .env("CKPT_FREEZE_TIMEOUT", "3s")
            .env("CKPT_GPU_TIMEOUT", "1s");
        command.env("CKPT_FAULT_FILE", self.path("points")).env("SIMCUDA_FAULT_FILE", self.path("rules"));
        command.env("CKPT_FILES_EXCLUDE", "points*,rules*,new,end,slow").env("CKPT_MAX_RESTARTS", RESTARTS);
        let (seed, one_in) = (self.random.u64(..), self.random.u64(5..50));
        let faults = match self.random.u64(..4) {
            0 => None,
            1 => Some(format!("{seed} 2000 {one_in} 3 refused")),
            _ => Some(format!("{seed} 0 {one_in} 1000000 interrupted short late")),
        };
        if let Some(faults) = faults {
            let tracer = env!("CARGO_BIN_EXE_system-call-faults");
            command = traced(&command, tracer, self.notes.path(), &faults);
        }
        self.sessions += 1;
        self.job.sandbox.start_command("job", command)
    }

    /// Does something at random to a job that runs.
    fn inject(&mut self, job: &Running) {
        let call = |random: &mut fastrand::Rng| *random.choice(&CALLS).unwrap();
        match self.random.u64(..6) {
            0 => {
                let (call, action) = (call(&mut self.random), self.random.choice(ACTIONS).unwrap());
                let number = self.random.u64(1..4);
                self.arm("rules", &format!("{call}:{number}={action}"));
            }
            1 => {
                let point = self.random.choice(POINTS).unwrap();
                let action = self.random.choice(["kill", "delay:200", "panic"]).unwrap();
                self.arm("points", &format!("{point}={action}"));
            }
            2 => self.disarm(),
            3 => self.checkpoint(),
            signal => {
                let Some(pid) = self.random.choice(job.descendants()) else { return };
                let Some(pid) = Pid::from_raw(pid) else { return };
                self.signals += 1;
                // It may have ended.
                if signal == 4 {
                    let _ = kill_process(pid, Signal::KILL);
                } else {
                    let _ = kill_process(pid, Signal::STOP);
                    std::thread::sleep(Duration::from_millis(self.random.u64(..300)));
                    let _ = kill_process(pid, Signal::CONT);
                }
            }
        }
    }

    /// Asks for a snapshot. One that is acknowledged must not be lost.
    fn checkpoint(&mut self) {
        let output = self.job.sandbox.call(["checkpoint"]);
        if output.status.success() {
            let id = String::from_utf8(output.stdout).unwrap();
            let number =
                id.split('-').next().and_then(|number| number.parse().ok()).expect("a snapshot's ID");
            (self.acknowledged, self.newest) = (self.acknowledged + 1, self.newest.max(number));
        }
    }

    /// One session, from its start to its end by whatever comes first.
    fn session(&mut self) {
        let mut job = self.start();
        let end = Instant::now() + Duration::from_millis(self.random.u64(1000..6000));
        while Instant::now() < end && !job.has_ended() {
            std::thread::sleep(Duration::from_millis(self.random.u64(..400)));
            self.inject(&job);
        }
        if !job.has_ended() {
            self.kills += 1;
            if self.random.bool() { job.kill_launcher() } else { job.kill_everything() }
        }
        self.disarm();
        self.look_at_snapshots();
    }

    /// The newest snapshot is never older than before. One without any has begun again: its log is not taken back.
    fn look_at_snapshots(&mut self) {
        let listed = self.job.sandbox.call(["ls", "--json"]).stdout;
        let listed: Vec<serde_json::Value> = serde_json::from_slice(&listed).unwrap_or_default();
        let numbers = listed.iter().filter_map(|row| row["id"].as_str()?.split('-').next()?.parse().ok());
        let newest = numbers.max().unwrap_or(0);
        assert!(newest >= self.newest, "snapshot {} is gone, {newest} is the newest", self.newest);
        self.newest = newest;
        if newest == 0 {
            let _ = fs::remove_file(self.path(self.job.output));
        }
    }

    /// Without faults to the end.
    fn finish(&mut self) {
        let _ = fs::remove_file(self.path("slow"));
        fs::write(self.path("end"), "").unwrap();
        let mut command = self.job.command(library());
        command.env("CKPT_MAX_RESTARTS", RESTARTS);
        let mut job = self.job.sandbox.start_command("job", command);
        assert_eq!(job.wait(), 0, "{}", job.said());
        self.job.sandbox.verify_all();
        let output = self.job.output();
        let steps = output.lines().count().to_string();
        let arguments = self.job.program.get_args();
        let arguments = arguments.map(|argument| if argument == STEPS { steps.as_ref() } else { argument });
        let unbroken = self.job.unbroken_with(arguments);
        let differs = output.lines().zip(unbroken.lines()).position(|(ours, other)| ours != other);
        assert!(
            output == unbroken,
            "line {differs:?} of {steps} is not that of an unbroken run:\n{output}\nunbroken:\n{unbroken}"
        );
    }
}

#[test]
#[ignore = "cargo xtask soak --chaos TIME"]
fn faults_of_all_kinds_at_once_change_no_result() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    let limit = Duration::from_secs(number("CKPT_TEST_CHAOS_S").unwrap_or(DEFAULT_S));
    let seed = number("CKPT_TEST_CHAOS_SEED").unwrap_or_else(|| fastrand::u64(..));
    let job = GpuJob::torchrun(STEPS);
    job.slow_down();
    let mut chaos = Chaos {
        job,
        notes: Sandbox::new(),
        random: seeded_rng(seed),
        kills: 0,
        sessions: 0,
        signals: 0,
        armed: 0,
        acknowledged: 0,
        newest: 0,
    };
    // What has no snapshot begins again, and its log is not taken back.
    let mut first = chaos.job.start_and_save();
    first.kill_everything();
    let begun = Instant::now();
    while begun.elapsed() < limit {
        chaos.session();
    }
    chaos.finish();
    let journal = fs::read_to_string(chaos.job.sandbox.job_dir().join("journal.jsonl")).unwrap();
    let resumes = journal.matches(r#""kind":"resumed""#).count();
    let Chaos { kills, sessions, signals, armed, acknowledged, newest, .. } = chaos;
    assert!(acknowledged > 0 || limit.as_secs() <= DEFAULT_S, "no snapshot was acknowledged");
    let system_calls = chaos.notes.read("faults").lines().count() as u64;
    let faults = system_calls + signals + kills;
    let told = json!({
        "seed": seed,
        "seconds": begun.elapsed().as_secs(),
        "faults": faults,
        "faults_of_system_calls": system_calls,
        "kills": kills,
        "signals": signals,
        "armed": armed,
        "acknowledged_snapshots": acknowledged,
        "sessions": sessions,
        "resumes": resumes,
        "newest_snapshot": newest,
    });
    println!("{told}");
}
