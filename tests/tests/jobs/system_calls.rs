//! System calls of launcher and init that are interrupted, transfer less, come late or fail: the job's output is that of
//! an unbroken run. See `src/bin/system-call-faults.rs` for what is done to them.

use ckpt_run_tests::system_calls::traced;
use ckpt_run_tests::{Running, Sandbox, programs, rng_of_run, until};
use ckpt_test_skip::is_full_run_or_skip;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Steps of the job: a few seconds.
const STEPS: &str = "1000";
/// From this step on, the job is not killed: a job that was complete would begin again.
const NEARLY_DONE: usize = 900;
/// How often the job is resumed with failing calls, and how many fail in each of these sessions.
const FAULTY_SESSIONS: usize = 5;
const FAULTS_OF_SESSION: usize = 4;
/// When a session has begun, in milliseconds, on a machine that is not very slow.
const STARTED_MS: u64 = 1500;
/// What the job makes.
const FILES: [&str; 3] = ["chain", "state", "newest"];

fn job() -> [String; 3] {
    ["/usr/bin/python3".into(), programs().join("steady.py").display().to_string(), STEPS.into()]
}

/// What the job leaves: its files and its standard output.
fn output(dir: &Path, out: &str) -> Vec<String> {
    let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default();
    FILES.iter().map(|name| read(name)).chain([read(out)]).collect()
}

fn unbroken() -> Vec<String> {
    let sandbox = Sandbox::new();
    let [program, rest @ ..] = job();
    let out = fs::File::create(sandbox.path().join("out")).unwrap();
    let status = Command::new(program).args(rest).current_dir(sandbox.path()).stdout(out).status().unwrap();
    assert!(status.success());
    output(sandbox.path(), "out")
}

struct Faulty {
    sandbox: Sandbox,
    /// What was done to the system calls.
    notes: Sandbox,
}

impl Faulty {
    fn command(&self) -> Command {
        let arguments = ["--interval", "300ms", "--keep", "2", "--"].map(String::from);
        self.sandbox.command(arguments.into_iter().chain(job()))
    }

    /// Starts or resumes the job; its system calls have faults: `SEED AFTER-MS ONE-IN MOST KIND...`.
    fn start(&self, faults: &str) -> Running {
        let tracer = env!("CARGO_BIN_EXE_system-call-faults");
        let command = traced(&self.command(), tracer, self.notes.path(), faults);
        self.sandbox.start_command("job", command)
    }

    fn steps(&self) -> usize {
        self.sandbox.read(FILES[0]).lines().count()
    }

    /// Whether few of its steps are left.
    fn is_nearly_done(&self) -> bool {
        self.steps() >= NEARLY_DONE
    }

    /// How many there are. None while there is no store yet.
    fn snapshots(&self) -> usize {
        let listed = self.sandbox.call(["ls", "--json"]).stdout;
        serde_json::from_slice::<Vec<serde_json::Value>>(&listed).map_or(0, |rows| rows.len())
    }
}

impl Faulty {
    /// The job has made what an unbroken run makes. Returns how many faults there were.
    fn assert_output(&self, expected: &[String]) -> usize {
        let faults = self.notes.read("faults").lines().count();
        println!("{faults} faults");
        assert!(output(self.sandbox.path(), "job.out") == expected, "{}", self.sandbox.read("job.err"));
        self.sandbox.verify_all();
        faults
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{}{}", self.notes.read("faults"), self.notes.read("faults.err"));
        }
    }
}

/// Does it once, more often in a full run.
fn rounds(round: impl Fn(&mut fastrand::Rng, &[String])) {
    let rounds =
        std::env::var("CKPT_TEST_SYSTEM_CALL_ROUNDS").map_or(1, |rounds| rounds.parse().expect("a number"));
    let mut random = rng_of_run();
    let expected = unbroken();
    (0..rounds).for_each(|_| round(&mut random, &expected));
}

#[test]
fn interrupted_short_and_late_calls_change_nothing() {
    rounds(with_harmless_faults);
}

fn with_harmless_faults(random: &mut fastrand::Rng, expected: &[String]) {
    let faulty = Faulty { sandbox: Sandbox::new(), notes: Sandbox::new() };
    let mut job = faulty.start(&format!("{} 0 15 1000000 interrupted short late", random.u64(..)));
    until("two snapshots, or the end on a slow machine", || {
        (faulty.snapshots() >= 2 || job.has_ended()).then_some(())
    });
    std::thread::sleep(Duration::from_millis(random.u64(..500)));
    if !job.has_ended() {
        job.kill_everything();
        job = faulty.start(&format!("{} 0 15 1000000 interrupted short late", random.u64(..)));
    }
    let code = job.wait();
    assert_eq!(code, 0, "{}", job.said());
    let warned = job.said().lines().any(|line| line.contains("warning") || line.contains("error"));
    assert!(!warned, "{}", job.said());
    faulty.assert_output(expected);
}

#[test]
fn calls_that_fail_cost_snapshots_and_sessions_and_no_result() {
    rounds(|random, expected| {
        let sessions = std::array::from_fn::<_, FAULTY_SESSIONS, _>(|_| {
            // While it starts or resumes, most of them end it. Later none may.
            let after_ms = if random.bool() { 0 } else { STARTED_MS };
            (after_ms, format!("{} {FAULTS_OF_SESSION} refused", random.u64(10..200)))
        });
        with_errors(random, expected, &sessions);
    });
}

/// The same for each error of each system call, one after the other.
#[test]
fn each_call_fails_in_each_way() {
    if !is_full_run_or_skip() {
        return;
    }
    let (expected, faults) = (unbroken(), possible_faults());
    println!("{} faults", faults.len());
    assert!(faults.len() > 60, "{faults:?}");
    let mut random = rng_of_run();
    for fault in &faults {
        println!("{fault}");
        // The first call when the job runs, the first one of all in a resume, and any one.
        let sessions = [(STARTED_MS, 1), (0, 1), (0, random.u64(2..50))];
        let sessions = sessions.map(|(after_ms, one_in)| (after_ms, format!("{one_in} 1 {fault}")));
        let injected = with_errors(&mut random, &expected, &sessions);
        assert!(injected > 0, "{fault}: no call had it");
    }
}

/// The errors that system calls of a run can have, as the tracer takes them.
fn possible_faults() -> Vec<String> {
    let faulty = Faulty { sandbox: Sandbox::new(), notes: Sandbox::new() };
    // What only the first start of a job calls is not meant.
    let mut job = faulty.sandbox.start_command("job", faulty.command());
    until("two snapshots", || (faulty.snapshots() >= 2 || job.has_ended()).then_some(()));
    job.kill_everything();
    assert_eq!(faulty.start("1 0 1 1 listed").wait(), 0);
    let faults: BTreeSet<_> = faulty.notes.read("faults").lines().map(str::to_owned).collect();
    faults.into_iter().collect()
}

/// Sessions with faults, each from a moment on (milliseconds) and `ONE-IN MOST KIND...`, and one without any. Returns how many
/// calls had one.
fn with_errors(random: &mut fastrand::Rng, expected: &[String], sessions: &[(u64, String)]) -> usize {
    let faulty = Faulty { sandbox: Sandbox::new(), notes: Sandbox::new() };
    for (after_ms, faults) in sessions {
        let (seed, before) = (random.u64(..), faulty.steps());
        let mut job = faulty.start(&format!("{seed} {after_ms} {faults}"));
        let end = Instant::now() + Duration::from_millis(random.u64(500..4000));
        while Instant::now() < end && !job.has_ended() {
            std::thread::sleep(Duration::from_millis(10));
        }
        if faulty.is_nearly_done() {
            job.wait_status();
        }
        if job.has_ended() {
            let status = job.wait_status();
            println!("ended: {status}");
            let has_run = *after_ms > 0 && faulty.steps() != before;
            assert!(!has_run || status.success(), "{}", job.said());
            if status.success() {
                return faulty.assert_output(expected);
            }
        } else {
            job.kill_everything();
        }
        // What has no snapshot starts again: its output is not taken back.
        if faulty.snapshots() == 0 {
            FILES
                .iter()
                .chain(&["job.out"])
                .for_each(|name| drop(fs::remove_file(faulty.sandbox.path().join(name))));
        }
    }
    let mut job = faulty.sandbox.start_command("job", faulty.command());
    assert_eq!(job.wait(), 0, "{}", job.said());
    faulty.assert_output(expected)
}
