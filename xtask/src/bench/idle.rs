//! What running under ckpt-run costs while no checkpoint is taken: the same work, plain and under ckpt-run, in turns.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use serde::Serialize;

use super::median;
use crate::tools::python::PYTHON;

/// Arithmetic, page faults, files and processes: what a job does. Prints the seconds that it took by itself, without
/// start-up.
const WORK: &str = "
import subprocess, time
begun = time.monotonic()
total = 0
for i in range(10_000_000):
    total += i * i
for _ in range(40):
    bytearray(16 << 20)
for _ in range(2000):
    open('/dev/null').close()
for _ in range(20):
    subprocess.run(['/bin/true'])
print(time.monotonic() - begun)
";
/// Nothing but system calls, each as cheap as can be: prints the seconds of one.
const CALLS: &str = "
import os, time
begun = time.monotonic()
for _ in range(1_000_000):
    os.getppid()
print((time.monotonic() - begun) / 1_000_000)
";
/// One file that is written all the time: prints the seconds of one write of 4 KiB.
const WRITES: &str = "
import os, time
file = os.open('file', os.O_CREAT | os.O_WRONLY)
block = bytes(4096)
begun = time.monotonic()
for number in range(300_000):
    os.pwrite(file, block, number % 256 * 4096)
print((time.monotonic() - begun) / 300_000)
";
const ROUNDS: usize = 9;

/// What ckpt-run costs while it does nothing.
#[derive(Serialize)]
pub struct Idle {
    /// The median over rounds of (time of a mixed load under ckpt-run / time plain), less one.
    pub idle_overhead: f64,
    /// What the filter for io_uring adds to every system call, nanoseconds; the median of the differences.
    pub system_call_ns: f64,
    /// What it adds to a write of 4 KiB to one file, nanoseconds; the same.
    pub write_ns: f64,
}

/// Measures all of it.
pub fn measure(criu: &Path, ckpt_run: &Path) -> Result<Idle> {
    let idle_overhead = in_turns(criu, ckpt_run, WORK, |plain_s, under_s| under_s / plain_s)? - 1.0;
    let added_ns = |work| in_turns(criu, ckpt_run, work, |plain_s, under_s| (under_s - plain_s) * 1e9);
    Ok(Idle { idle_overhead, system_call_ns: added_ns(CALLS)?, write_ns: added_ns(WRITES)? })
}

/// The median over rounds of what `compare` makes of (seconds plain, seconds under ckpt-run).
pub fn in_turns(criu: &Path, ckpt_run: &Path, work: &str, compare: fn(f64, f64) -> f64) -> Result<f64> {
    let dir = tempfile::tempdir()?;
    let plain = || seconds(Command::new(PYTHON).arg("-c").arg(work).current_dir(&dir));
    let under = || {
        let mut command = Command::new(ckpt_run);
        command
            .args(["-q", "--interval", "off", "--resume", "never", "--store"])
            .arg(dir.path().join("store"));
        command.arg("--").arg(PYTHON).arg("-c").arg(work).env("CKPT_CRIU", criu);
        seconds(command.current_dir(&dir))
    };
    plain()?;
    let mut compared = Vec::new();
    for round in 0..ROUNDS {
        let (plain_s, under_s) = if round % 2 == 0 {
            let plain_s = plain()?;
            (plain_s, under()?)
        } else {
            let under_s = under()?;
            (plain()?, under_s)
        };
        compared.push(compare(plain_s, under_s));
    }
    Ok(median(compared))
}

fn seconds(command: &mut Command) -> Result<f64> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().with_context(|| format!("the work printed {text:?}"))
}
