//! A job whose output depends on all of its memory, for tests of all kinds of stores.

use ckpt_run_tests::{Running, Sandbox, python};
use std::fs;
use std::sync::OnceLock;

/// A job with 32 MiB in memory. It changes a part of them for each file `step`, and prints a checksum at its end.
pub const KEEPER: &str = r#"
import hashlib, os, random, time
held = bytearray(random.Random(7).randbytes(32 << 20))
known = bytearray("-".join(["only", "in", "memory"]) * 5, "ascii")
steps = 0
open("ready", "w").close()
while not os.path.exists("go"):
    if os.path.exists("step"):
        held[steps << 20 : steps + 1 << 20] = random.Random(steps).randbytes(1 << 20)
        steps += 1
        os.unlink("step")
    time.sleep(0.01)
print(steps, hashlib.sha256(held).hexdigest(), flush=True)
"#;

pub fn start(sandbox: &Sandbox, name: &str, options: &[&str]) -> Running {
    let python = python();
    let command = ["--", python.to_str().unwrap(), "-c", KEEPER];
    let mut job = sandbox.start(name, options.iter().copied().chain(command));
    job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(sandbox);
    job
}

pub fn step(sandbox: &Sandbox, job: &mut Running) {
    let step = sandbox.path().join("step");
    fs::write(&step, "").unwrap();
    job.until("a step", || (!step.exists()).then_some(()));
}

/// Lets the job run to its end; returns its output.
pub fn finish(sandbox: &Sandbox, name: &str, mut job: Running) -> String {
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    fs::remove_file(sandbox.path().join("go")).unwrap();
    sandbox.read(&format!("{name}.out"))
}

/// What an unbroken run with `steps` steps prints. Tests share the runs.
pub fn unbroken(steps: usize) -> &'static str {
    static OUTPUTS: [OnceLock<String>; 8] = [const { OnceLock::new() }; 8];
    OUTPUTS[steps].get_or_init(|| {
        let sandbox = Sandbox::new();
        let mut job = start(&sandbox, "unbroken", &[]);
        (0..steps).for_each(|_| step(&sandbox, &mut job));
        finish(&sandbox, "unbroken", job)
    })
}

pub fn has_said(sandbox: &Sandbox, name: &str, what: &str) -> Option<()> {
    sandbox.read(&format!("{name}.err")).contains(what).then_some(())
}
