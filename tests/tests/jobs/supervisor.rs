//! Jobs that nobody watches: restarted when they fail, given up when that gains nothing, preempted and stopped.

use ckpt_run_tests::{Running, Sandbox, python, set_variables, until};
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A job that logs `begun`, then counts in a loop; it does what the files in its directory say: `crash` makes it exit
/// with 3 as long as that file is there, `die-once` kills it and is removed by it, `go` lets it end well.
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

fn until_ready(job: &mut Running, sandbox: &Sandbox) {
    job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(sandbox);
}

fn touch(sandbox: &Sandbox, name: &str) {
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
        // Lives leave nothing behind. Who has just called may have a thread and a descriptor for a moment.
        let (fds, threads) = *after_first.get_or_insert((count("fd"), count("task")));
        job.until("no more descriptors and threads than after the first restart", || {
            (count("fd") <= fds && count("task") <= threads).then_some(())
        });
    }
    let status = sandbox.json(["status", "--json"]);
    assert!(status[0]["last_job_failure"].as_str().unwrap().contains("SIGKILL"), "{status}");
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "begun\n", "it was begun once");
}

/// Without a snapshot it is started again from the beginning, with its input from where it had begun.
#[test]
fn without_a_snapshot_it_is_started_again() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path().join("input"), "one\ntwo\n").unwrap();
    let script = "read line; echo \"read $line\"; [ -e tried ] && exit 0; : > tried; : > ready; while [ ! -e die ]; do sleep 0.05; done; exit 9";
    let mut command = sandbox.command(["--", "sh", "-c", script]);
    command.env("CKPT_MAX_RESTARTS", "1").stdin(fs::File::open(sandbox.path().join("input")).unwrap());
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    // Longer than what counts as never having got going.
    std::thread::sleep(Duration::from_millis(5200));
    touch(&sandbox, "die");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(job.said().matches("read one").count(), 2, "{}", job.said());
}

/// A failure that comes back at the same place: an older snapshot is tried, then it is given up with the reason and the
/// job's exit code, and the next run still resumes.
#[test]
fn a_failure_that_comes_back_is_given_up() {
    let sandbox = Sandbox::new();
    // What goes to the terminal's log is rolled back with the job.
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

#[test]
fn a_command_that_never_gets_going_is_not_restarted() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(["--", "sh", "-c", "echo started; exit 2"]);
    command.env("CKPT_MAX_RESTARTS", "100");
    let mut job = sandbox.start_command("job", command);
    assert_eq!(job.wait(), 2);
    assert_eq!(job.said().matches("started\n").count(), 1, "{}", job.said());
    assert!(job.said().contains("s after its first start"), "{}", job.said());
}

#[test]
fn an_interrupted_job_is_not_restarted() {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "job", &[]);
    until_ready(&mut job, &sandbox);
    job.checkpoint(&sandbox);
    job.signal(Signal::INT);
    assert_eq!(job.wait(), 128 + 2, "{}", job.said());
    assert!(!job.said().contains("Restart"), "{}", job.said());
    // The next run goes on.
    touch(&sandbox, "go");
    let mut job = start(&sandbox, "again", &[]);
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "begun\n");
}

#[test]
fn a_launcher_that_waits_for_a_restart_ends_when_asked() {
    let sandbox = Sandbox::new();
    for (round, signal, code) in [(0, Signal::TERM, 75), (1, Signal::INT, 130)] {
        let name = format!("job{round}");
        let mut job = start(&sandbox, &name, &["--job", &name]);
        job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
        job.until_answering(&sandbox);
        job.checkpoint_of(&sandbox, &name);
        touch(&sandbox, "crash");
        // By the third failure waits are long enough to be met.
        until_said(&mut job, "Restart 3 in", 1);
        job.signal(signal);
        assert_eq!(job.wait(), code, "{}", job.said());
        fs::remove_file(sandbox.path().join("crash")).unwrap();
        fs::remove_file(sandbox.path().join("ready")).unwrap();
    }
}

/// A job that has run and cannot be restarted for a reason of ours: that is no bad input with which nothing was touched.
#[test]
fn giving_up_after_the_job_has_run_is_no_bad_input() {
    let sandbox = Sandbox::new();
    let mut command = command(&sandbox, &[]);
    command.env("CKPT_MAX_RESTARTS", "1");
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    job.checkpoint(&sandbox);
    fs::write(sandbox.job_dir().join("marks.json"), "damaged").unwrap();
    touch(&sandbox, "die-once");
    assert_eq!(job.wait(), 125, "{}", job.said());
    let said = job.said();
    assert!(said.contains("marks.json") && said.contains("It is not restarted"), "{said}");
}

/// A launcher that does not outlive its test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Who was to read the job's output has stopped: the machine is given back within the grace all the same.
#[test]
fn output_that_nobody_takes_does_not_outlive_the_grace() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(["--grace", "5s", "--", "sh", "-c", "yes & : > ready; wait"]);
    let mut launcher = Killed(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap());
    let pid = rustix::process::Pid::from_child(&launcher.0);
    until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    until("a launcher that answers", || {
        let status = sandbox.json(["status", "--json"]);
        (status[0]["launcher_pid"].as_u64() == Some(u64::from(launcher.0.id()))).then_some(())
    });
    let begun = Instant::now();
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    let status = until("its end", || launcher.0.try_wait().unwrap());
    let took = begun.elapsed();
    assert_eq!(status.code(), Some(75));
    // Without the grace's end it would be given half a minute.
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
    // One that is there from before does not count.
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

/// A job that cannot be saved is asked to end, and ends with 75 all the same; the snapshot before counts.
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

/// A second signal ends everything at once, however long the grace is.
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
    job.signal(Signal::TERM);
    assert_eq!(job.wait(), 75, "{}", job.said());
}

/// The same job with little grace: it is over when the grace is.
#[test]
fn the_grace_is_kept() {
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

/// A machine that is wanted is first announced by a file or a probe, and a little later everything on it gets SIGTERM.
#[test]
fn the_first_signal_after_another_reason_ends_nothing() {
    let sandbox = Sandbox::new();
    let mut command = command(&sandbox, &["--preempt-file", "wanted", "--monitor-interval", "100ms"]);
    command.env("CKPT_FAULT", "save-before-commit=delay:5000");
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    touch(&sandbox, "wanted");
    until_said(&mut job, "fault point save-before-commit", 1);
    job.signal(Signal::TERM);
    assert_eq!(job.wait(), 75, "{}", job.said());
    for said in ["is being ended with a snapshot already", "the job was ended with the snapshot"] {
        assert!(job.said().contains(said), "{said}: {}", job.said());
    }
}

/// The last snapshot would wait for an earlier one to be stored, for too long: the job ends in its own way, and the
/// earlier one is there.
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
    command.env("CKPT_FAULT", "save-before-commit=delay:12000");
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| sandbox.ok(["checkpoint"]));
        until_said(&mut job, "fault point save-before-commit", 1);
        job.signal(Signal::TERM);
        assert_eq!(job.wait(), 75, "{}", job.said());
        assert!(sandbox.path().join("asked").exists(), "{}", job.said());
        let newest = call.join().expect("no panic");
        let said = format!("an earlier snapshot is still being stored. The newest one is {}", newest.trim());
        assert!(job.said().contains(&said), "{newest}: {}", job.said());
    });
}

#[test]
fn a_wrong_start_is_refused() {
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

/// A store that cannot be written is the user's to mend: nothing is started, whether there is a store or not.
#[test]
fn a_store_on_a_read_only_mount_is_refused() {
    let sandbox = Sandbox::new();
    // The mount is in a namespace of its own, and gone with the command.
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

/// A job that works until `lock-up` (which it removes) makes two threads of it wait for each other for ever, or
/// `go` lets it end.
const BUSY: &str = r#"
import os, threading
def there(name): return os.path.exists(name)
one, other = threading.Lock(), threading.Lock()
def lock_up(first, second, both):
    with first:
        both.wait()
        with second: pass
open("log", "a").write("begun\n")
open("ready", "w").close()
while not there("go"):
    sum(range(50000))
    if there("lock-up"):
        os.unlink("lock-up")
        both = threading.Barrier(2)
        thread = threading.Thread(target=lock_up, args=(other, one, both))
        thread.start()
        lock_up(one, other, both)
"#;

fn start_busy(sandbox: &Sandbox, hang_timeout: &str, options: &[&str]) -> Running {
    let python = python();
    let mut arguments =
        vec!["--hang-timeout", hang_timeout, "--monitor-interval", "100ms", "--log-file", "messages"];
    arguments.extend(options);
    arguments.extend(["--", python.to_str().unwrap(), "-c", BUSY]);
    let mut command = sandbox.command(arguments);
    // A py-spy that says what it was asked.
    let bin = sandbox.path().join("bin");
    fs::create_dir_all(&bin).unwrap();
    fs::write(bin.join("py-spy"), "#!/bin/sh\necho \"py-spy $@\"\n").unwrap();
    fs::set_permissions(bin.join("py-spy"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    command.env("CKPT_MAX_RESTARTS", "5").env("PATH", path);
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, sandbox);
    job
}

/// What was kept of the first hang.
fn kept(sandbox: &Sandbox) -> std::path::PathBuf {
    let attempts =
        fs::read_dir(sandbox.job_dir().join("attempts")).unwrap().map(|entry| entry.unwrap().path());
    let mut hangs: Vec<_> = attempts.filter(|path| path.to_str().unwrap().contains("-hang-")).collect();
    hangs.sort();
    hangs.remove(0)
}

#[test]
fn a_deadlocked_job_is_restarted_from_before_the_deadlock() {
    let sandbox = Sandbox::new();
    // Two snapshots are taken and stored meanwhile.
    let mut job = start_busy(&sandbox, "10s", &["--freeze-timeout", "30s", "--keep", "1"]);
    let before = job.checkpoint(&sandbox);
    touch(&sandbox, "lock-up");
    job.until("the deadlock", || (!sandbox.path().join("lock-up").exists()).then_some(()));
    // Snapshots of the deadlock, long enough after it began. The one before it stays, whatever --keep says.
    std::thread::sleep(Duration::from_millis(500));
    job.checkpoint(&sandbox);
    let within = job.checkpoint(&sandbox);
    until("a restart", || sandbox.read("messages").contains("resumed from snapshot").then_some(()));
    let messages = sandbox.read("messages");
    assert!(messages.contains(&format!("resumed from snapshot {before}")), "not {within}: {messages}");
    assert!(messages.contains("none of its processes has done anything"), "{messages}");
    let stacks = fs::read_to_string(kept(&sandbox).join("stacks.txt")).unwrap();
    assert!(stacks.contains("futex"), "{stacks}");
    let python = fs::read_dir(kept(&sandbox)).unwrap().map(|entry| entry.unwrap().path());
    let python: Vec<_> = python.filter(|path| path.to_str().unwrap().contains("python-")).collect();
    assert!(fs::read_to_string(&python[0]).unwrap().starts_with("py-spy dump --nonblocking --pid "));
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "begun\n");
    assert!(sandbox.ok(["explain"]).contains("it hung: none of its processes"));
}

#[test]
fn a_stopped_process_is_found_and_the_job_restarted() {
    let sandbox = Sandbox::new();
    let mut job = start_busy(&sandbox, "2s", &[]);
    job.checkpoint(&sandbox);
    let named =
        |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().starts_with("python");
    let pid = job.descendants().into_iter().find(named).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), Signal::STOP).unwrap();
    until("a restart", || sandbox.read("messages").contains("resumed from snapshot").then_some(()));
    assert!(sandbox.read("messages").contains("(python3) has been stopped"), "{}", sandbox.read("messages"));
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
}

#[test]
fn a_busy_job_does_not_hang() {
    let sandbox = Sandbox::new();
    let mut job = start_busy(&sandbox, "4s", &["--interval", "500ms"]);
    let begun = Instant::now();
    // Three times the limit: nothing else tells that something does not happen.
    while begun.elapsed().as_secs() < 12 {
        assert!(!job.has_ended(), "{}", job.said());
        std::thread::sleep(Duration::from_millis(50));
    }
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(!sandbox.read("messages").contains("hangs"), "{}", sandbox.read("messages"));
}

/// The interval follows from what a snapshot costs, and the budget is kept.
#[test]
fn the_interval_follows_the_budget() {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "job", &["--overhead", "2%", "--interval", "300ms", "--keep", "9"]);
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
    // The second came as long after the first as that one had cost, fifty times over, at least.
    assert!(taken[1] - taken[0] >= stalls[0] * 49.0 * 0.99, "{stalls:?} {taken:?} {status}");
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
