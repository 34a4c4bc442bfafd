//! Jobs that hang: detected, diagnosed and restarted from before the hang.

use crate::supervisor::{touch, until_ready};
use ckpt_run_tests::{Running, Sandbox, python, until};
use rustix::process::Signal;
use std::fs;
use std::time::{Duration, Instant};

/// A job that computes until there is `go`. When there is `lock-up`, it removes that file and deadlocks two of its
/// threads.
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
    // A fake py-spy that prints its arguments.
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

/// The diagnosis of the first hang.
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
    // Snapshots of the deadlock, long enough after it began. The snapshot before it is kept, whatever --keep says.
    std::thread::sleep(Duration::from_millis(500));
    job.checkpoint(&sandbox);
    let within = job.checkpoint(&sandbox);
    let pruned = sandbox.ok(["prune", "--keep", "1"]);
    assert!(
        pruned.contains(&format!("kept {before} of job ")) && pruned.contains("if the job hangs"),
        "{pruned}"
    );
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
    let explained = sandbox.ok(["explain"]);
    assert!(explained.contains("it hung: none of its processes"), "{explained}");
    assert!(!explained.contains("out of memory"), "ckpt-run itself has ended it: {explained}");
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
    // Wait for twice the limit, since no event shows that no hang was detected.
    while begun.elapsed().as_secs() < 8 {
        assert!(!job.has_ended(), "{}", job.said());
        std::thread::sleep(Duration::from_millis(50));
    }
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(!sandbox.read("messages").contains("hangs"), "{}", sandbox.read("messages"));
}
