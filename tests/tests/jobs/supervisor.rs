//! Unattended jobs: restarted when they fail, given up when restarts do not help, preempted and stopped.

use ckpt_run_tests::{Running, Sandbox, python, schema, set_variables, until};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A job that logs `begun`, then counts in a loop; files in its directory control it: it exits with 3
/// while there is `crash`, removes `die-once` and kills itself, and ends successfully when there is `go`.
const COUNTER: &str = r#"
import os, sys, time
def there(name): return os.path.exists(name)
log = open("log", "a", buffering=1)
log.write("begun\n")
open("ready", "w").close()
n = 0
while not there("go"):
    n += 1
    if there("die-once"):
        os.unlink("die-once")
        os.kill(os.getpid(), 9)
    if there("crash"):
        os.write(2, b"crashing\n")
        sys.exit(3)
    time.sleep(0.02)
print("counted", n, flush=True)
"#;

fn command(sandbox: &Sandbox, options: &[&str]) -> Command {
    let mut arguments: Vec<&str> = options.to_vec();
    let python = python();
    arguments.extend(["--", python.to_str().unwrap(), "-c", COUNTER]);
    let mut command = sandbox.command(arguments);
    command.env("CKPT_MAX_RESTARTS", "100");
    command
}

fn start(sandbox: &Sandbox, name: &str, options: &[&str]) -> Running {
    sandbox.start_command(name, command(sandbox, options))
}

pub fn until_ready(job: &mut Running, sandbox: &Sandbox) {
    job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(sandbox);
}

pub fn touch(sandbox: &Sandbox, name: &str) {
    fs::write(sandbox.path().join(name), "").unwrap();
}

fn until_said(job: &mut Running, what: &str, times: usize) {
    let seen = |job: &Running| (job.said().matches(what).count() >= times).then_some(());
    until(what, || {
        let found = seen(job);
        assert!(found.is_some() || !job.has_ended() || seen(job).is_some(), "{}", job.said());
        found
    });
}

/// The job is killed over and over: the launcher resumes it each time by itself.
#[test]
fn a_killed_job_is_resumed_by_its_launcher() {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "job", &[]);
    until_ready(&mut job, &sandbox);
    let pid = job.pid();
    let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    let mut after_first = None;
    for round in 1..=4 {
        job.checkpoint(&sandbox);
        touch(&sandbox, "die-once");
        until_said(&mut job, "resumed from snapshot", round as usize);
        job.until("a running job", || {
            let status = sandbox.json(["status", "--json"]);
            (status[0]["restart_s"].is_null() && status[0]["restarts"] == round).then_some(())
        });
        // Restarts leak nothing. A request that has just ended may hold a thread and a descriptor for a moment, and one
        // of those that stay may not have been there yet when they were counted first.
        let (fds, threads) = *after_first.get_or_insert((count("fd"), count("task")));
        job.until("no more descriptors and threads than after the first restart", || {
            (count("fd") <= fds + 1 && count("task") <= threads + 1).then_some(())
        });
    }
    let status = sandbox.json(["status", "--json"]);
    assert!(status[0]["last_job_failure"].as_str().unwrap().contains("SIGKILL"), "{status}");
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "begun\n", "it was begun once");
}

/// Without a snapshot the job restarts from the beginning, with its input from the first byte.
#[test]
fn a_job_without_snapshots_restarts_from_the_beginning() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path().join("input"), "one\ntwo\n").unwrap();
    let script = "read line; echo \"read $line\"; [ -e tried ] && exit 0; : > tried; : > ready; while [ ! -e die ]; do sleep 0.05; done; exit 9";
    let mut command = sandbox.command(["--", "sh", "-c", script]);
    command.env("CKPT_MAX_RESTARTS", "1").stdin(fs::File::open(sandbox.path().join("input")).unwrap());
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    // Longer than the time in which a failure counts as a failed start.
    std::thread::sleep(Duration::from_millis(5200));
    touch(&sandbox, "die");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(job.said().matches("read one").count(), 2, "{}", job.said());
}

/// A failure that repeats: ckpt-run tries an older snapshot, then gives up with the reason and the job's exit code. The
/// next run still resumes.
#[test]
fn a_repeated_failure_ends_the_restarts() {
    let sandbox = Sandbox::new();
    // A separate log, since the job's output is rolled back with the job.
    let mut job = start(&sandbox, "job", &["--log-file", "messages"]);
    until_ready(&mut job, &sandbox);
    let older = job.checkpoint(&sandbox);
    let newer = job.checkpoint(&sandbox);
    touch(&sandbox, "crash");
    assert_eq!(job.wait(), 3, "{}", job.said());
    let said = sandbox.read("messages");
    assert_eq!(said.matches(&format!("resumed from snapshot {newer}")).count(), 3, "{said}");
    assert_eq!(said.matches(&format!("resumed from snapshot {older}")).count(), 3, "{said}");
    assert!(said.contains("It is not restarted: it was resumed from the same snapshot and failed"), "{said}");
    assert!(sandbox.ok(["status"]).contains("ended with 3; run it again to resume"));
    let told = sandbox.ok(["explain"]);
    for wanted in [
        "started",
        "failed       it ended with exit code 3",
        "restart 1 in",
        "given up",
        "run the same command again",
    ] {
        assert!(told.contains(wanted), "{wanted}: {told}");
    }
    let entries = sandbox.json(["explain", "--all", "--json"])[0]["entries"].clone();
    let failures = entries.as_array().unwrap().iter().filter(|entry| entry["kind"] == "failed").count();
    assert_eq!(failures, 7, "{entries}");
    fs::remove_file(sandbox.path().join("crash")).unwrap();
    touch(&sandbox, "go");
    let mut job = start(&sandbox, "again", &[]);
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains(&format!("resumed from snapshot {older}")), "{}", job.said());
    assert_eq!(sandbox.read("log"), "begun\n");
}

/// A launcher with one rank, which it looks at only while there is `crash`.
const RANKS: &str = r#"
import os, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)"])
open("ready", "w").close()
while not os.path.exists("crash") or rank.poll() is None:
    time.sleep(0.02)
sys.exit(rank.returncode != 0)
"#;

/// Snapshots between the death of a rank and the moment when its launcher looks are of a job that is about to fail. They do
/// not replace the last one before.
#[test]
fn snapshots_of_a_job_with_a_dead_rank_do_not_replace_the_good_one() {
    let sandbox = Sandbox::new();
    let python = python();
    let mut command = sandbox.command(["--keep", "2", "--", python.to_str().unwrap(), "-c", RANKS]);
    command.env("CKPT_MAX_RESTARTS", "100");
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    // It stays as well: none is a minute older than the newest yet.
    let first = job.checkpoint(&sandbox);
    let good = job.checkpoint(&sandbox);
    let is_rank = |pid: &i32| {
        fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.contains("\0-c\0import os, time"))
    };
    let rank = job.descendants().into_iter().find(is_rank).expect("a rank");
    kill_process(Pid::from_raw(rank).unwrap(), Signal::KILL).unwrap();
    let state = || fs::read_to_string(format!("/proc/{rank}/stat")).unwrap();
    until("the end of the rank", || state().contains(") Z ").then_some(()));
    let doubtful: Vec<String> = (0..4).map(|_| job.checkpoint(&sandbox)).collect();
    let kept: Vec<_> = [&first, &good].into_iter().chain(&doubtful[2..]).cloned().collect();
    let listed = sandbox.json(["ls", "--json"]);
    let mut listed: Vec<_> =
        listed.as_array().unwrap().iter().map(|row| row["id"].as_str().unwrap().to_owned()).collect();
    listed.sort();
    assert_eq!(listed, kept);
    assert!(
        job.said().contains("has ended with exit code 137: the job may be about to fail"),
        "{}",
        job.said()
    );
    schema::check("show", &sandbox.json(["show", doubtful.last().unwrap(), "--json"]));
    schema::check("status", &sandbox.json(["status", "--json"]));
    touch(&sandbox, "crash");
    // The newest one is tried once.
    until_said(&mut job, &format!("resumed from snapshot {good}"), 1);
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(job.said().matches("resumed from snapshot").count(), 1, "{}", job.said());
    let told = sandbox.ok(["explain", "--all"]);
    assert_eq!(told.matches("ended with exit code 1").count(), 2, "{told}");
}

#[test]
fn a_command_that_fails_at_once_is_not_restarted() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(["--", "sh", "-c", "echo started; exit 2"]);
    command.env("CKPT_MAX_RESTARTS", "100");
    let mut job = sandbox.start_command("job", command);
    assert_eq!(job.wait(), 2);
    assert_eq!(job.said().matches("started\n").count(), 1, "{}", job.said());
    assert!(job.said().contains("s after its first start"), "{}", job.said());
}

/// A signal that is passed on: the user has ended the job.
#[test]
fn an_interrupted_job_is_not_restarted() {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "job", &["--on-signal", "TERM"]);
    until_ready(&mut job, &sandbox);
    job.checkpoint(&sandbox);
    job.signal(Signal::INT);
    assert_eq!(job.wait(), 128 + 2, "{}", job.said());
    assert!(!job.said().contains("Restart"), "{}", job.said());
    // The next run resumes.
    touch(&sandbox, "go");
    let mut job = start(&sandbox, "again", &[]);
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "begun\n");
}

/// Ctrl-C, and the end of the terminal, lose no work: the job has no snapshot before them.
#[test]
fn an_interrupted_job_is_saved_first() {
    let sandbox = Sandbox::new();
    for (name, signal, said) in [
        ("interrupted", Signal::INT, "Another Ctrl-C ends it at once"),
        ("hung-up", Signal::HUP, "Another signal ends it at once"),
    ] {
        let mut job = start(&sandbox, name, &["--job", name]);
        until_ready(&mut job, &sandbox);
        job.signal(signal);
        assert_eq!(job.wait(), 75, "{}", job.said());
        assert!(job.said().contains(said), "{}", job.said());
        touch(&sandbox, "go");
        let mut job = start(&sandbox, &format!("{name}-again"), &["--job", name]);
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert_eq!(sandbox.read("log"), "begun\n", "{}", job.said());
        for name in ["log", "go", "ready"] {
            fs::remove_file(sandbox.path().join(name)).unwrap();
        }
    }
}

/// A job that cannot be saved gets the key, and decides by itself.
#[test]
fn a_job_that_cannot_be_saved_gets_the_interrupt() {
    let sandbox = Sandbox::new();
    let script = r#"
import os, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(9))
counter = os.eventfd(0, os.EFD_SEMAPHORE)
open("ready", "w").close()
while True: time.sleep(0.02)
"#;
    let mut job = sandbox.start("job", ["--", python().to_str().unwrap(), "-c", script]);
    until_ready(&mut job, &sandbox);
    job.signal(Signal::INT);
    assert_eq!(job.wait(), 9, "{}", job.said());
    assert!(job.said().contains("all that it has done is lost"), "{}", job.said());
}

/// A second Ctrl-C does not wait for the snapshot.
#[test]
fn a_second_interrupt_ends_at_once() {
    let sandbox = Sandbox::new();
    let mut command = command(&sandbox, &[]);
    command.env("CKPT_FAULT", "save-before-commit=delay:600000");
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    job.signal(Signal::INT);
    until_said(&mut job, "Another Ctrl-C ends it at once", 1);
    // Closer together, they would be one.
    std::thread::sleep(Duration::from_millis(300));
    job.signal(Signal::INT);
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert!(job.said().contains("without a snapshot: received a second signal (SIGINT)"), "{}", job.said());
    assert_eq!(sandbox.snapshots(), [""; 0]);
}

#[test]
fn a_launcher_that_waits_for_a_restart_ends_when_asked() {
    let sandbox = Sandbox::new();
    for (round, signal, code) in [(0, Signal::TERM, 75), (1, Signal::QUIT, 131)] {
        let name = format!("job{round}");
        let mut job = start(&sandbox, &name, &["--job", &name]);
        job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
        job.until_answering(&sandbox);
        job.checkpoint_of(&sandbox, &name);
        touch(&sandbox, "crash");
        // By the third failure the pause before a restart is long enough to signal in it.
        until_said(&mut job, "Restart 3 in", 1);
        job.signal(signal);
        assert_eq!(job.wait(), code, "{}", job.said());
        fs::remove_file(sandbox.path().join("crash")).unwrap();
        fs::remove_file(sandbox.path().join("ready")).unwrap();
    }
}

/// A job that has run and cannot be restarted because of the store: this is not bad input, which touches nothing.
#[test]
fn a_failed_restart_is_not_bad_input() {
    let sandbox = Sandbox::new();
    let mut command = command(&sandbox, &[]);
    command.env("CKPT_MAX_RESTARTS", "1");
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    job.checkpoint(&sandbox);
    fs::create_dir_all(sandbox.job_dir().join("marks")).unwrap();
    fs::write(sandbox.job_dir().join("marks/1.json"), "damaged").unwrap();
    touch(&sandbox, "die-once");
    assert_eq!(job.wait(), 125, "{}", job.said());
    let said = job.said();
    assert!(said.contains("marks/1.json") && said.contains("It is not restarted"), "{said}");
}

/// Two snapshots, of which the newer one needs a file that is gone when the job is killed.
fn with_a_newest_that_cannot_be_resumed(sandbox: &Sandbox, options: &[&str]) -> (Running, [String; 2]) {
    const NEEDS_A_FILE: &str = r#"
import os, time
open("ready", "w").close()
held = None
while not os.path.exists("go"):
    if held is None and os.path.exists("needed"):
        held = open("needed")
        open("holds", "w").close()
    if os.path.exists("die-once"):
        os.unlink("die-once")
        os.kill(os.getpid(), 9)
    time.sleep(0.02)
print("holds", held is not None, flush=True)
"#;
    let python = python();
    let command = [options, &["--files", "off", "--", python.to_str().unwrap(), "-c", NEEDS_A_FILE]].concat();
    let mut job = sandbox.start("job", command);
    until_ready(&mut job, sandbox);
    let older = job.checkpoint(sandbox);
    touch(sandbox, "needed");
    job.until("the file is open", || sandbox.path().join("holds").exists().then_some(()));
    let newest = job.checkpoint(sandbox);
    fs::remove_file(sandbox.path().join("needed")).unwrap();
    touch(sandbox, "die-once");
    (job, [older, newest])
}

#[test]
fn after_a_while_an_older_snapshot_is_resumed_and_the_newest_is_kept() {
    let sandbox = Sandbox::new();
    let (mut job, [older, newest]) = with_a_newest_that_cannot_be_resumed(
        &sandbox,
        &["--max-restarts", "9", "--resume-policy", "2s", "--keep", "2"],
    );
    until_said(&mut job, &format!("resumed from snapshot {older}"), 1);
    until_said(&mut job, &format!("When the cause is fixed: --resume {newest}"), 1);
    job.until_answering(&sandbox);
    job.checkpoint(&sandbox);
    assert!(sandbox.ok(["explain"]).contains("resumed from an older snapshot: "), "it is in the journal");
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains("holds False"), "{}", job.said());
    // The cause is fixed.
    touch(&sandbox, "needed");
    let again = ["--resume", &newest, "--files", "off", "--"];
    let argv: Vec<String> = sandbox.json(["show", &newest, "--json"])["job"]["argv"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one.as_str().unwrap().to_owned())
        .collect();
    let mut resumed = sandbox.start("again", again.into_iter().map(str::to_owned).chain(argv));
    assert_eq!(resumed.wait(), 0, "{}", resumed.said());
    assert!(resumed.said().contains("holds True"), "{}", resumed.said());
}

#[test]
fn with_the_policy_newest_no_older_snapshot_is_resumed() {
    let sandbox = Sandbox::new();
    let (mut job, _) =
        with_a_newest_that_cannot_be_resumed(&sandbox, &["--max-restarts", "3", "--resume-policy", "newest"]);
    assert_eq!(job.wait(), 125, "{}", job.said());
    assert!(!job.said().contains("resumed from snapshot"), "{}", job.said());
}

/// A launcher that does not outlive its test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The reader of the job's output has stopped: ckpt-run still ends within the grace period.
#[test]
fn unread_output_does_not_outlast_the_grace_period() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(["--grace", "5s", "--", "sh", "-c", "yes & : > ready; wait"]);
    let mut launcher = Killed(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap());
    let pid = Pid::from_child(&launcher.0);
    until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    until("a launcher that answers", || {
        let status = sandbox.json(["status", "--json"]);
        (status[0]["launcher_pid"].as_u64() == Some(u64::from(launcher.0.id()))).then_some(())
    });
    let begun = Instant::now();
    kill_process(pid, Signal::TERM).unwrap();
    let status = until("its end", || launcher.0.try_wait().unwrap());
    let took = begun.elapsed();
    assert_eq!(status.code(), Some(75));
    // Without the limit of the grace period it would take half a minute.
    assert!(took < Duration::from_secs(25), "{took:?}");
}

/// Preempted ten times in a row by SIGTERM: every run ends with 75, and no step is lost or repeated.
#[test]
fn ten_preemptions_lose_no_step() {
    const STEPS: usize = 110;
    let script = r#"
import os, sys, time
log = open("steps", "a", buffering=1)
for step in range(110):
    log.write(f"step {step} {hash((step, 7)) & 0xffff}\n")
    while not os.path.exists(f"pass-{step // 10}"): time.sleep(0.01)
"#;
    let sandbox = Sandbox::new();
    let start = || {
        let mut command = sandbox.command([
            "--grace",
            "60s",
            "--log-file",
            "messages",
            "--",
            python().to_str().unwrap(),
            "-c",
            script,
        ]);
        command.env("PYTHONHASHSEED", "0");
        sandbox.start_command("job", command)
    };
    let steps = || sandbox.read("steps").lines().count();
    for round in 0..10 {
        let mut job = start();
        job.until("steps of this round", || (steps() > round * 10).then_some(()));
        job.until_answering(&sandbox);
        let before = steps();
        job.signal(Signal::TERM);
        assert_eq!(job.wait(), 75, "{}", job.said());
        assert_eq!(steps(), before, "what the job had done is what it goes on from");
        touch(&sandbox, &format!("pass-{round}"));
    }
    touch(&sandbox, "pass-10");
    let mut job = start();
    assert_eq!(job.wait(), 0, "{}", job.said());
    let messages = sandbox.read("messages");
    assert_eq!(
        messages.matches("was ended with the snapshot").count(),
        10,
        "{}",
        messages.lines().filter(|line| !line.contains("rolled back")).collect::<Vec<_>>().join("\n")
    );
    assert!(!messages.contains("steps: rolled back"), "nothing was done after a snapshot: {messages}");
    let broken = sandbox.read("steps");
    fs::remove_file(sandbox.path().join("steps")).unwrap();
    let status = Command::new(python())
        .args(["-c", script])
        .env("PYTHONHASHSEED", "0")
        .current_dir(sandbox.path())
        .status();
    assert!(status.unwrap().success());
    assert_eq!(broken, sandbox.read("steps"));
    assert_eq!(broken.lines().count(), STEPS);
}

/// A file and a command preempt as a signal does.
#[test]
fn a_file_and_a_probe_preempt() {
    let sandbox = Sandbox::new();
    let options =
        ["--preempt-file", "leave", "--preempt-probe", "test -e wanted", "--monitor-interval", "50ms"];
    // A file from before the start does not count.
    touch(&sandbox, "leave");
    for trigger in ["leave", "wanted"] {
        let mut job = start(&sandbox, "job", &options);
        until_ready(&mut job, &sandbox);
        fs::remove_file(sandbox.path().join("leave")).unwrap_or_default();
        touch(&sandbox, trigger);
        assert_eq!(job.wait(), 75, "{}", job.said());
    }
    assert_eq!(sandbox.snapshots().len(), 2);
    fs::remove_file(sandbox.path().join("wanted")).unwrap();
    touch(&sandbox, "go");
    let mut job = start(&sandbox, "job", &options);
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "begun\n");
}

#[test]
fn stop_ends_a_job_with_a_snapshot() {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "job", &[]);
    until_ready(&mut job, &sandbox);
    let id = sandbox.ok(["stop"]);
    // It can be started again at once.
    touch(&sandbox, "go");
    let mut again = start(&sandbox, "again", &[]);
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert_eq!(again.wait(), 0, "{}", again.said());
    assert!(again.said().contains(&format!("resumed from snapshot {id}")), "{}", again.said());
    let output = sandbox.call(["stop"]);
    assert_eq!(output.status.code(), Some(1));
}

/// Nobody but the caller waits for `stop`: a dump that takes longer than the grace period is completed.
#[test]
fn stop_waits_for_a_long_dump() {
    let sandbox = Sandbox::new();
    let mut command = command(&sandbox, &["--grace", "500ms"]);
    command.env("CKPT_FAULT", "attempt=delay:2000");
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    let id = sandbox.ok(["stop"]);
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert_eq!(sandbox.snapshots(), [id.trim()], "{}", job.said());
}

/// `stop` leaves a job that cannot be saved running, and says why; with `--force` it ends it.
#[test]
fn stop_does_not_end_a_job_that_cannot_be_saved() {
    let sandbox = Sandbox::new();
    let script = r#"
import os, time
counter = os.eventfd(0, os.EFD_SEMAPHORE)
open("ready", "w").close()
while True: time.sleep(0.02)
"#;
    let mut job = sandbox.start("job", ["--", python().to_str().unwrap(), "-c", script]);
    until_ready(&mut job, &sandbox);
    for _ in 0..2 {
        let output = sandbox.call(["stop"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("runs on") && said.contains("eventfd") && said.contains("--force"), "{said}");
        assert!(!job.has_ended(), "{}", job.said());
    }
    assert_eq!(sandbox.call(["stop", "--force"]).status.code(), Some(1));
    assert_eq!(job.wait(), 75, "{}", job.said());
}

/// A job that cannot be saved gets SIGTERM and still ends with 75; its previous snapshot counts.
#[test]
fn a_job_that_cannot_be_saved_is_asked_to_end() {
    let sandbox = Sandbox::new();
    let script = r#"
import os, signal, sys, time
def end(*_): open("asked", "w").close(); sys.exit(0)
signal.signal(signal.SIGTERM, end)
open("ready", "w").close()
while not os.path.exists("spoil"): time.sleep(0.02)
counter = os.eventfd(0, os.EFD_SEMAPHORE)
open("spoilt", "w").close()
while True: time.sleep(0.02)
"#;
    let mut job = sandbox.start("job", ["--", python().to_str().unwrap(), "-c", script]);
    until_ready(&mut job, &sandbox);
    let id = job.checkpoint(&sandbox);
    touch(&sandbox, "spoil");
    job.until("a job that cannot be saved", || sandbox.path().join("spoilt").exists().then_some(()));
    job.signal(Signal::TERM);
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert!(sandbox.path().join("asked").exists(), "{}", job.said());
    assert!(job.said().contains(&format!("The newest one is {id}")), "{}", job.said());
}

/// A second signal ends everything at once, however long the grace period is.
#[test]
fn a_second_signal_ends_at_once() {
    let sandbox = Sandbox::new();
    let script = r#"
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: open("asked", "w").close())
counter = os.eventfd(0, os.EFD_SEMAPHORE)
open("ready", "w").close()
while True: time.sleep(0.02)
"#;
    let mut job = sandbox.start("job", ["--grace", "1h", "--", python().to_str().unwrap(), "-c", script]);
    until_ready(&mut job, &sandbox);
    job.signal(Signal::TERM);
    job.until("the job was asked", || sandbox.path().join("asked").exists().then_some(()));
    job.signal(Signal::HUP);
    assert_eq!(job.wait(), 75, "{}", job.said());
}

/// `timeout` signals its command and then the command's group. With the snapshot delayed, the second one comes before it.
#[test]
fn the_same_signal_twice_is_one_request() {
    let sandbox = Sandbox::new();
    let mut command = command(&sandbox, &[]);
    command.env("CKPT_FAULT", "save-before-commit=delay:500");
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    job.signal(Signal::TERM);
    until_said(&mut job, "is ended with a snapshot", 1);
    job.signal(Signal::TERM);
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert_eq!(sandbox.snapshots().len(), 1, "{}", job.said());
}

/// The same job with a short grace period.
#[test]
fn the_job_is_killed_at_the_end_of_the_grace_period() {
    let sandbox = Sandbox::new();
    let script = r#"
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
counter = os.eventfd(0, os.EFD_SEMAPHORE)
open("ready", "w").close()
while True: time.sleep(0.02)
"#;
    let mut job = sandbox.start("job", ["--grace", "2s", "--", python().to_str().unwrap(), "-c", script]);
    until_ready(&mut job, &sandbox);
    let begun = Instant::now();
    job.signal(Signal::TERM);
    assert_eq!(job.wait(), 75, "{}", job.said());
    let took = begun.elapsed().as_secs_f64();
    assert!((1.9..25.0).contains(&took), "{took} s\n{}", job.said());
}

/// A fault that holds a snapshot before its commit until the file `hold`, which it makes, is deleted.
fn hold_before_commit(sandbox: &Sandbox) -> String {
    touch(sandbox, "hold");
    format!("save-before-commit=hold:{}", sandbox.path().join("hold").display())
}

/// A preemption is first announced by a file or a probe, and a little later every process gets SIGTERM.
#[test]
fn a_signal_during_a_preemption_does_not_interrupt_it() {
    let sandbox = Sandbox::new();
    let mut command = command(&sandbox, &["--preempt-file", "wanted", "--monitor-interval", "100ms"]);
    command.env("CKPT_FAULT", hold_before_commit(&sandbox));
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    touch(&sandbox, "wanted");
    until_said(&mut job, "fault point save-before-commit", 1);
    job.signal(Signal::TERM);
    until_said(&mut job, "is being ended with a snapshot already", 1);
    fs::remove_file(sandbox.path().join("hold")).unwrap();
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert!(job.said().contains("the job was ended with the snapshot"), "{}", job.said());
}

/// Memory is being copied for a checkpoint that is not the last one (`--precopy`), which takes long. CRIU is stopped before
/// it needs what this kernel may not have.
#[test]
fn a_preemption_does_not_wait_for_a_round_of_pre_copy() {
    let sandbox = Sandbox::new();
    let options = ["--precopy", "1", "--freeze-timeout", "10m", "--grace", "2m", "--interval", "off"];
    let mut command = command(&sandbox, &options);
    command
        .env("CKPT_FAULT", "precopy-begin@1=stop-criu")
        .env("CKPT_CRIU", sandbox.criu_that_seems_to_track_memory());
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| sandbox.call(["checkpoint"]));
        until_said(&mut job, "fault point precopy-begin", 1);
        job.signal(Signal::TERM);
        assert_eq!(job.wait(), 75, "{}", job.said());
        let output = call.join().expect("no panic");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("the job has ended"), "{said}");
    });
    assert!(job.said().contains("the job was ended with the snapshot"), "{}", job.said());
    assert_eq!(sandbox.snapshots().len(), 1);
}

/// As by `timeout`, or a scheduler: all processes of the launcher's group get SIGTERM, and the last snapshot takes longer than the
/// init of a launcher that has died waits.
#[test]
fn a_signal_to_the_whole_group_does_not_end_a_long_snapshot() {
    let sandbox = Sandbox::new();
    let mut command = command(&sandbox, &["--interval", "off"]);
    command.env("CKPT_FAULT", "dump-post-dump@1=delay:8000").process_group(0);
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    let group = Pid::from_raw(job.pid().cast_signed()).unwrap();
    rustix::process::kill_process_group(group, Signal::TERM).unwrap();
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert!(job.said().contains("the job was ended with the snapshot"), "{}", job.said());
    assert_eq!(sandbox.snapshots().len(), 1);
}

/// `ckpt-run stop` fails once. The job runs on, and is saved as before: copies of its memory are not given up at once, as in a
/// job that is being ended.
#[test]
fn a_stop_that_fails_changes_nothing() {
    let sandbox = Sandbox::new();
    let mut command = command(&sandbox, &["--precopy", "1", "--interval", "off"]);
    command
        .env("CKPT_FAULT", "dump-post-dump@1=error")
        .env("CKPT_CRIU", sandbox.criu_that_seems_to_track_memory());
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    let failed = sandbox.call(["stop"]);
    let said = String::from_utf8_lossy(&failed.stderr);
    assert!(!failed.status.success() && said.contains("the job runs on"), "{said}");
    let id = job.checkpoint(&sandbox);
    assert_eq!(sandbox.snapshots(), [id]);
    sandbox.ok(["stop"]);
    assert_eq!(job.wait(), 75, "{}", job.said());
}

/// An earlier snapshot is still being stored, and the last one would wait too long for it: the job gets SIGTERM, and
/// the earlier snapshot is complete.
#[test]
fn a_job_whose_last_snapshot_has_to_wait_is_asked_to_end() {
    let sandbox = Sandbox::new();
    let script = r#"
import signal, sys, time
def end(*_): open("asked", "w").close(); sys.exit(0)
signal.signal(signal.SIGTERM, end)
open("ready", "w").close()
while True: time.sleep(0.02)
"#;
    let mut command = sandbox.command(["--grace", "16s", "--", python().to_str().unwrap(), "-c", script]);
    command.env("CKPT_FAULT", hold_before_commit(&sandbox));
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| sandbox.ok(["checkpoint"]));
        until_said(&mut job, "fault point save-before-commit", 1);
        job.signal(Signal::TERM);
        job.until("the end of half of the grace period", || {
            sandbox.path().join("asked").exists().then_some(())
        });
        fs::remove_file(sandbox.path().join("hold")).unwrap();
        assert_eq!(job.wait(), 75, "{}", job.said());
        let newest = call.join().expect("no panic");
        let said = format!("an earlier snapshot is still being stored. The newest one is {}", newest.trim());
        assert!(job.said().contains(&said), "{newest}: {}", job.said());
    });
}

#[test]
fn invalid_options_are_refused() {
    let sandbox = Sandbox::new();
    for (option, value, wanted) in [
        ("--grace", "0s", "grace"),
        ("--grace", "0", "a time such as 30s"),
        ("--interval", "soon", "a time such as 10m, or off"),
        ("--interval", "0s", "a time such as 10m, or off"),
        ("--on-signal", "SIGNOTHING", "TERM, USR1"),
        ("--on-signal", "KILL", "TERM, USR1"),
        ("--max-restarts", "often", "max-restarts"),
        ("--monitor-interval", "0s", "monitor-interval"),
    ] {
        let output = sandbox.call([option, value, "--", "true"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(wanted), "{said}");
    }
    assert!(!Path::new(&sandbox.store).exists(), "nothing was touched");
}

/// A store on a read-only file system is bad input: nothing is started, whether the store exists or not.
#[test]
fn a_store_on_a_read_only_mount_is_refused() {
    let sandbox = Sandbox::new();
    // The mount is in a namespace of its own, and ends with the command.
    let enter = "mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\" && shift && exec \"$@\"";
    let mounted = sandbox.path().join("mounted");
    fs::create_dir(&mounted).unwrap();
    for (store, is_there) in [("new", false), ("used", true)] {
        let store = mounted.join(store);
        let began = sandbox.path().join("began");
        let mut arguments =
            vec!["--job".into(), "same".into(), "--store".into(), store.clone().into_os_string()];
        if is_there {
            let output =
                sandbox.command(arguments.iter().chain(&["--".into(), "true".into()])).output().unwrap();
            assert!(output.status.success(), "{output:?}");
        }
        arguments.extend(["--".into(), "touch".into(), began.clone().into_os_string()]);
        let inner = sandbox.command(&arguments);
        let mut outer = Command::new("unshare");
        outer.args(["--mount", "--propagation", "private", "sh", "-c", enter, "sh"]).arg(&mounted);
        outer.arg(inner.get_program()).args(inner.get_args()).current_dir(sandbox.path());
        set_variables(&mut outer, &inner);
        let output = outer.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(store.to_str().unwrap()) && said.contains("Read-only file system"), "{said}");
        assert_eq!(said.matches("Read-only file system").count(), 1, "a cause is told once: {said}");
        assert!(said.contains("name another with --store"), "it says what to do: {said}");
        assert!(!began.exists() && (is_there || !store.exists()), "nothing was touched");
    }
}

/// The interval follows from what a snapshot costs, and the budget is kept.
#[test]
fn the_interval_follows_the_budget() {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "job", &["--overhead", "10%", "--interval", "300ms", "--keep", "9"]);
    until_ready(&mut job, &sandbox);
    job.until("a second snapshot", || (sandbox.snapshots().len() >= 2).then_some(()));
    let status = sandbox.json(["status", "--json"]);
    let shown = sandbox.snapshots();
    let stalls: Vec<f64> =
        shown.iter().map(|id| sandbox.json(["show", id, "--json"])["stall_s"].as_f64().unwrap()).collect();
    let taken: Vec<f64> = shown
        .iter()
        .map(|id| sandbox.json(["show", id, "--json"])["taken_unix_ms"].as_f64().unwrap() / 1e3)
        .collect();
    // The second came as long after the first as that one had cost, nine times over, at least.
    assert!(taken[1] - taken[0] >= stalls[0] * 9.0 * 0.99, "{stalls:?} {taken:?} {status}");
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
    let output = sandbox.call(["--overhead", "60%", "--", "true"]);
    assert_eq!(output.status.code(), Some(2));
}

/// Each message is a JSON object, on stderr and in the log.
#[test]
fn messages_can_be_json() {
    let sandbox = Sandbox::new();
    let mut command =
        sandbox.command(["--log-format", "json", "--log-file", "messages", "--", "sh", "-c", "exit 2"]);
    command.env("CKPT_MAX_RESTARTS", "5");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    for text in [String::from_utf8(output.stderr).unwrap(), sandbox.read("messages")] {
        let messages: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let told = |message: &serde_json::Value| {
            message["level"] == "ERROR"
                && message["fields"]["message"].as_str().unwrap().contains("It is not restarted")
        };
        assert!(messages.iter().any(told), "{text}");
    }
}
