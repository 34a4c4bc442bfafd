//! Snapshots in the launcher's memory (`--persist-every`): they survive the end of the job, but not of the launcher.

use ckpt_run_tests::{Running, Sandbox, python, until};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::process::Command;

/// A job that counts steps in its memory only: one for each time that there is a file `step`. `die-once` kills it.
const STEPPER: &str = r#"
import os, time
def there(name): return os.path.exists(name)
log = open("log", "a", buffering=1)
log.write("begun\n")
held = bytearray(os.urandom(8 << 20))
steps = 0
open("ready", "w").close()
while not there("go"):
    if there("step"):
        steps += 1
        os.unlink("step")
    if there("die-once"):
        os.unlink("die-once")
        os.kill(os.getpid(), 9)
    time.sleep(0.01)
print("steps", steps, flush=True)
"#;

fn command(sandbox: &Sandbox) -> Command {
    let python = python();
    let options = ["--interval", "500ms", "--persist-every", "1000", "--grace", "60s"];
    let mut command =
        sandbox.command(options.into_iter().chain(["--", python.to_str().unwrap(), "-c", STEPPER]));
    command.env("CKPT_MAX_RESTARTS", "100");
    command
}

fn start(sandbox: &Sandbox, name: &str) -> Running {
    let mut job = sandbox.start_command(name, command(sandbox));
    job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(sandbox);
    job
}

fn touch(sandbox: &Sandbox, name: &str) {
    fs::write(sandbox.path().join(name), "").unwrap();
}

fn status(sandbox: &Sandbox) -> Value {
    sandbox.json(["status", "--json"])[0].clone()
}

/// Lets the job make a step; waits for a snapshot that has it, and returns its ID.
fn step(sandbox: &Sandbox, job: &mut Running) -> String {
    touch(sandbox, "step");
    job.until("a step", || (!sandbox.path().join("step").exists()).then_some(()));
    let before = status(sandbox)["saved"].as_u64().unwrap();
    // The next one may have begun before the step.
    job.until("a snapshot in memory with the step", || {
        let status = status(sandbox);
        let is_later = status["saved"].as_u64().unwrap() >= before + 2;
        let newest = &status["last_snapshot"];
        (is_later && newest["in_memory"] == true).then(|| newest["id"].as_str().unwrap().to_owned())
    })
}

/// The snapshots that `ls` shows in that tier.
fn in_tier(sandbox: &Sandbox, tier: &str) -> Vec<String> {
    let listed = sandbox.json(["ls", "--json"]);
    let has = |row: &&Value| row["tiers"].as_array().unwrap().iter().any(|one| one == tier);
    let rows = listed.as_array().unwrap().iter().filter(has);
    rows.map(|row| row["id"].as_str().unwrap().to_owned()).collect()
}

fn until_on_disk(sandbox: &Sandbox, job: &mut Running) -> String {
    job.until("the first snapshot on disk", || in_tier(sandbox, "disk").first().cloned())
}

fn finish(sandbox: &Sandbox, job: &mut Running) {
    touch(sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "begun\n", "it was begun once");
}

/// Killed three times, the job resumes from memory each time: no step is lost, although no snapshot on disk has them.
#[test]
fn a_job_killed_between_persisted_snapshots_resumes_from_memory() {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "job");
    let first = until_on_disk(&sandbox, &mut job);
    for round in 1..=3 {
        step(&sandbox, &mut job);
        touch(&sandbox, "die-once");
        until("a resume from memory", || {
            let said = job.said();
            assert!(!job.has_ended(), "{said}");
            (said.matches(", which is in memory, taken").count() == round).then_some(())
        });
        job.until_answering(&sandbox);
    }
    assert_eq!(in_tier(&sandbox, "disk"), [first], "nothing else went to disk");
    assert!((1..=2).contains(&in_tier(&sandbox, "memory").len()));
    let told = sandbox.ok(["status"]);
    assert!(told.contains(", in memory only)") && told.contains("in memory        2 snapshots"), "{told}");
    finish(&sandbox, &mut job);
    assert!(sandbox.read("job.out").contains("steps 3\n"), "{}", job.said());
    assert!(sandbox.ok(["explain", "--all"]).contains("  in memory "));
    sandbox.verify_all();
}

/// Snapshots in memory are lost with a killed launcher; the next run reports that and resumes from the disk.
#[test]
fn a_killed_launcher_loses_snapshots_in_memory() {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "job");
    let first = until_on_disk(&sandbox, &mut job);
    let newest = step(&sandbox, &mut job);
    let output = sandbox.call(["show", &newest]);
    let said = String::from_utf8_lossy(&output.stderr);
    // Newer snapshots may have replaced it.
    assert_eq!(output.status.code(), Some(2), "{said}");
    job.kill_launcher();
    assert_eq!(in_tier(&sandbox, "memory"), [""; 0]);
    assert_eq!(sandbox.snapshots(), std::slice::from_ref(&first));
    let story = sandbox.ok(["explain"]);
    assert!(story.contains("were in memory only (--persist-every), and are lost"), "{story}");
    let mut job = start(&sandbox, "again");
    let said = job.said();
    assert!(said.contains("were in memory only (--persist-every) and are lost"), "{said}");
    assert!(said.contains(&format!("resumed from snapshot {first}, taken")), "{said}");
    finish(&sandbox, &mut job);
    assert!(sandbox.read("again.out").contains("steps 0\n"), "{}", job.said());
}

/// The same in front of an object store: nothing of the snapshots is on disk.
#[test]
fn snapshots_in_memory_are_copied_to_an_object_store() {
    let mut sandbox = Sandbox::new();
    let state = sandbox.path().join("state").display().to_string();
    sandbox.variables.push(("XDG_STATE_HOME".to_owned(), state.clone()));
    sandbox.store = format!("file://{}", sandbox.path().join("remote").display()).into();
    let mut job = start(&sandbox, "job");
    job.until("the first snapshot in the object store", || in_tier(&sandbox, "remote").first().cloned());
    let newest = step(&sandbox, &mut job);
    job.signal(Signal::QUIT);
    assert_eq!(job.wait(), 131, "{}", job.said());
    assert!(job.said().contains("copied from memory to the object store"), "{}", job.said());
    assert!(in_tier(&sandbox, "remote").pop().unwrap() >= newest);
    fs::remove_dir_all(state).unwrap();
    let mut job = start(&sandbox, "again");
    finish(&sandbox, &mut job);
    assert!(sandbox.read("again.out").contains("steps 1\n"), "{}", job.said());
    assert!(!sandbox.path().join(".ckpt-run").exists());
}

/// With memory, disk and an object store: snapshots on disk are uploaded, and so is the last snapshot of a preempted
/// job.
#[test]
fn the_last_snapshot_of_a_preempted_job_is_uploaded() {
    let mut sandbox = Sandbox::new();
    let remote = sandbox.path().join("remote");
    fs::create_dir(&remote).unwrap();
    sandbox.variables.push(("CKPT_UPLOAD".to_owned(), format!("file://{}", remote.display())));
    let mut job = start(&sandbox, "job");
    let first = job.until("an upload", || in_tier(&sandbox, "remote").first().cloned());
    assert_eq!(in_tier(&sandbox, "disk"), [&*first]);
    let newest = step(&sandbox, &mut job);
    assert_eq!(in_tier(&sandbox, "remote"), [first], "what is in memory only is not uploaded");
    job.signal(Signal::TERM);
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert!(in_tier(&sandbox, "remote").pop().unwrap() >= newest, "{}", job.said());
    // The machine is lost, with its disk.
    fs::remove_dir_all(&sandbox.store).unwrap();
    let mut job = start(&sandbox, "again");
    finish(&sandbox, &mut job);
    assert!(sandbox.read("again.out").contains("steps 1\n"), "{}", job.said());
}

/// A launcher that ends regularly loses no snapshot in memory: the last snapshot of a preempted job goes straight to
/// disk, and the newest one of an interrupted job is copied there.
#[test]
fn a_launcher_that_ends_leaves_the_newest_on_disk() {
    let sandbox = Sandbox::new();
    for (name, signal, code, steps) in [("first", Signal::TERM, 75, 1), ("second", Signal::QUIT, 131, 2)] {
        let mut job = start(&sandbox, name);
        let newest = step(&sandbox, &mut job);
        job.signal(signal);
        assert_eq!(job.wait(), code, "{}", job.said());
        let stored = in_tier(&sandbox, "disk").pop().unwrap();
        assert!(stored >= newest, "{stored} and {newest}: {}", job.said());
        let copied =
            job.said().contains(&format!("snapshot {stored} copied from memory to the store on disk"));
        assert_eq!(copied, steps == 2, "{}", job.said());
    }
    let mut job = start(&sandbox, "third");
    assert!(!job.said().contains("are lost with"), "{}", job.said());
    let asked = job.checkpoint(&sandbox);
    assert!(in_tier(&sandbox, "disk").contains(&asked), "what is asked for is safe when it is answered");
    finish(&sandbox, &mut job);
    assert!(sandbox.read("third.out").contains("steps 2\n"), "{}", job.said());
}

/// A preempted job that cannot be saved takes long to end: snapshots in memory are copied meanwhile, not after the
/// grace period.
#[test]
fn snapshots_in_memory_are_copied_during_the_grace_period() {
    let sandbox = Sandbox::new();
    let script = r#"
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: open("asked", "w").close())
open("ready", "w").close()
while not os.path.exists("spoil"): time.sleep(0.02)
counter = os.eventfd(0, os.EFD_SEMAPHORE)
open("spoilt", "w").close()
while True: time.sleep(0.02)
"#;
    let python = python();
    let options = ["--interval", "500ms", "--persist-every", "1000", "--grace", "1h"];
    let command = sandbox.command(options.into_iter().chain(["--", python.to_str().unwrap(), "-c", script]));
    let mut job = sandbox.start_command("job", command);
    job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    let first = until_on_disk(&sandbox, &mut job);
    job.until("more of them in memory", || (in_tier(&sandbox, "memory").last()? > &first).then_some(()));
    touch(&sandbox, "spoil");
    job.until("a job that cannot be saved", || sandbox.path().join("spoilt").exists().then_some(()));
    job.signal(Signal::TERM);
    job.until("the job was asked", || sandbox.path().join("asked").exists().then_some(()));
    let newest = in_tier(&sandbox, "memory").pop().unwrap();
    job.until("the newest on disk", || in_tier(&sandbox, "disk").contains(&newest).then_some(()));
    job.signal(Signal::HUP);
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert!(job.said().contains(&format!("The newest one is {newest}")), "{}", job.said());
    assert!(!job.said().contains("is lost with this ckpt-run"), "{}", job.said());
}
