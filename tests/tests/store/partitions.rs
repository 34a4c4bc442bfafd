//! A machine that cannot reach the object store any more, while another one runs the job. It comes back later.

use crate::stores::with_service;
use ckpt_run_tests::{Running, Sandbox, python, rng_of_run};
use ckpt_test_s3::proxy::{Fault, Proxy};
use ckpt_test_s3::{BUCKET, Service};
use rustix::process::Signal;
use std::fs;
use std::sync::OnceLock;

/// A job whose output depends on all of its memory, and not on files: it runs on two machines at once.
const JOB: &str = r#"
import hashlib, os, random, time
held = bytearray(random.Random(7).randbytes(4 << 20))
open("ready", "w").close()
for step in range(100):
    at = step % 4 << 20
    held[at : at + 100] = hashlib.sha256(held).digest() * 3 + bytes(4)
    time.sleep(0.01)
while not os.path.exists("go"):
    time.sleep(0.01)
print(hashlib.sha256(held).hexdigest(), flush=True)
"#;

/// Makes the sandbox a machine that reaches the store by this proxy.
fn on(sandbox: &mut Sandbox, machine: &str, proxy: &Proxy) {
    let state = sandbox.path().join(machine).display().to_string();
    let own = [("XDG_STATE_HOME", state), ("AWS_ENDPOINT_URL", proxy.endpoint())];
    sandbox.variables.retain(|(name, _)| own.iter().all(|(other, _)| name != other));
    sandbox.variables.extend(own.map(|(name, value)| (name.to_owned(), value)));
}

fn start(sandbox: &Sandbox, name: &str) -> Running {
    let python = python();
    let options = ["--max-restarts", "5", "--", python.to_str().unwrap(), "-c", JOB];
    let mut job = sandbox.start(name, options);
    job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(sandbox);
    job
}

fn finish(sandbox: &Sandbox, name: &str, mut job: Running) -> String {
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    sandbox.read(&format!("{name}.out"))
}

fn unbroken() -> &'static str {
    static OUTPUT: OnceLock<String> = OnceLock::new();
    OUTPUT.get_or_init(|| {
        let sandbox = Sandbox::new();
        let job = start(&sandbox, "unbroken");
        finish(&sandbox, "unbroken", job)
    })
}

fn resume(sandbox: &Sandbox, name: &str, from: &str) -> Running {
    let job = start(sandbox, name);
    assert!(job.said().contains(&format!("resumed from snapshot {from}")), "{}", job.said());
    job
}

/// Machine one is cut off after so many requests of a checkpoint. Machine two resumes the job and saves it. Then machine one
/// comes back.
fn cut_off(fault: &Fault, after_requests: usize) {
    println!("{fault:?} after {after_requests} requests");
    let service = Service::new();
    let other = service.another_proxy();
    let mut sandbox = with_service(&service);
    sandbox.store = format!("s3://{BUCKET}/team").into();
    on(&mut sandbox, "one", &service.proxy);
    let mut first = start(&sandbox, "first");
    let shared = first.checkpoint(&sandbox);

    let before = service.proxy.seen("", "");
    service.proxy.cut_off(after_requests, fault.clone());
    let mut asked = sandbox.start("asked", ["checkpoint"]);
    first.until("a request that is lost", || {
        (service.proxy.seen("", "") > before + after_requests || asked.has_ended()).then_some(())
    });

    on(&mut sandbox, "two", &other);
    let committed = sandbox.snapshots();
    let newest = committed.last().unwrap();
    assert!(after_requests > 0 || committed == [shared], "{committed:?}");
    let mut second = resume(&sandbox, "second", newest);
    let newest = second.checkpoint(&sandbox);
    let saved = sandbox.snapshots();

    service.proxy.heal();
    let is_refused = asked.wait() != 0;
    // It may have succeeded before the machine was cut off.
    assert!(is_refused || after_requests > 0, "{}", asked.said());
    on(&mut sandbox, "one", &service.proxy);
    first.until("a refusal", || {
        let said = String::from_utf8(sandbox.call(["checkpoint"]).stderr).unwrap();
        said.contains("another ckpt-run (on the machine ").then_some(())
    });
    on(&mut sandbox, "two", &other);
    let now = sandbox.snapshots();
    // Documented: one that was being committed may still appear. It is abandoned.
    let late = now.iter().filter(|id| !saved.contains(id)).count();
    assert!(late <= usize::from(after_requests > 0), "{saved:?} {now:?}");
    let last = second.checkpoint(&sandbox);
    assert_ne!(last, newest);

    // It is not started again on the machine that has lost it.
    for pid in first.descendants() {
        let _ = rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), Signal::KILL);
    }
    assert_eq!(first.wait(), 125, "{}", first.said());
    assert!(first.said().contains("the job is not restarted here: another ckpt-run"), "{}", first.said());
    second.kill_everything();
    on(&mut sandbox, "one", &service.proxy);
    let third = resume(&sandbox, "third", &last);
    assert_eq!(finish(&sandbox, "third", third), unbroken());
    sandbox.verify_all();
}

#[test]
fn a_machine_that_was_cut_off_saves_nothing_when_it_is_back() {
    for fault in [Fault::Drop, Fault::Silence, Fault::Late] {
        cut_off(&fault, 0);
    }
}

fn full_rounds() -> Option<usize> {
    std::env::var(ckpt_test_skip::FULL_VARIABLE).ok()?.parse().ok()
}

/// The same in the middle of a checkpoint.
#[test]
fn a_machine_is_cut_off_at_any_request() {
    let Some(rounds) = full_rounds() else { return ckpt_test_skip::needs_full() };
    let mut random = rng_of_run();
    for round in 0..rounds {
        let fault = [Fault::Drop, Fault::Silence, Fault::Late, Fault::LoseAnswer][round % 4].clone();
        cut_off(&fault, random.usize(0..20));
    }
}
