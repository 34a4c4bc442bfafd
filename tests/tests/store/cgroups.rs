//! A memory limit of a cgroup above that of ckpt-run, as Slurm and Kubernetes set it: what does not fit below it is not
//! staged in memory.

use ckpt_run_tests::{Sandbox, python, set_variables};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The job has this much memory.
const JOB_MIB: u64 = 300;
/// There is room for the job and not for a copy.
const LIMIT_BYTES: u64 = 560 << 20;

const JOB: &str = r#"
import os, sys, time
held = bytearray(os.urandom(1 << 20)) * int(sys.argv[1])
open("ready", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
print(len(held) >> 20, flush=True)
"#;

/// A cgroup with the limit, and one in it without a limit, for the job. Removed at the end.
struct Cgroups {
    limited: PathBuf,
    inner: PathBuf,
}

impl Cgroups {
    /// `None` where cgroups with limits of memory cannot be made.
    fn new() -> Option<Self> {
        let versions = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        versions.into_iter().find_map(|(root, limit)| {
            let limited = Path::new(root).join(format!("ckpt-run-test-{}", std::process::id()));
            fs::create_dir(&limited).ok()?;
            let cgroups = Self { inner: limited.join("inner"), limited };
            fs::write(cgroups.limited.join(limit), LIMIT_BYTES.to_string()).ok()?;
            fs::create_dir(&cgroups.inner).ok()?;
            Some(cgroups)
        })
    }

    /// The same command in the inner one.
    fn command(&self, inner: &Command) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", r#"echo 0 > "$1" && shift && exec "$@""#, "sh"]);
        command.arg(self.inner.join("cgroup.procs")).arg(inner.get_program()).args(inner.get_args());
        command.current_dir(inner.get_current_dir().unwrap()).stdin(std::process::Stdio::null());
        set_variables(&mut command, inner);
        command
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        // Processes that were killed leave it a moment later.
        for _ in 0..600 {
            let _ = fs::remove_dir(&self.inner);
            if fs::remove_dir(&self.limited).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }
}

#[test]
fn the_limit_of_a_cgroup_further_up_counts() {
    let Some(cgroups) = Cgroups::new() else {
        return ckpt_test_skip::skip("no cgroups with limits of memory can be made");
    };
    let sandbox = Sandbox::new();
    let python = python();
    let words = ["--", python.to_str().unwrap(), "-c", JOB, &JOB_MIB.to_string()];
    let mut job = sandbox.start_command("job", cgroups.command(&sandbox.command(words)));
    job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    job.checkpoint(&sandbox);
    assert!(job.said().contains("the checkpoint cannot be staged in memory"), "{}", job.said());
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("job.out"), format!("{JOB_MIB}\n"), "it was not killed");
    sandbox.verify_all();
}
