//! What running under ckpt-run costs while no checkpoint is taken: the same work, plain and under ckpt-run, in turns.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::median;
use crate::tools::Tools;

/// Arithmetic, system calls, page faults and processes: whatever a namespace or a filter could slow down. Prints the
/// seconds that it took by itself, without start-up.
const WORK: &str = "
import os, subprocess, time
begun = time.monotonic()
total = 0
for i in range(4_000_000):
    total += i * i
for _ in range(400_000):
    os.getppid()
for _ in range(20):
    bytearray(16 << 20)
for _ in range(100):
    subprocess.run(['/bin/true'])
print(time.monotonic() - begun)
";
const ROUNDS: usize = 9;

/// The median over rounds of (time under ckpt-run / time plain), less one.
pub fn measure(tools: &Tools, ckpt_run: &Path) -> Result<f64> {
    let dir = tempfile::tempdir()?;
    let python = tools.python();
    let plain = || seconds(Command::new(python).arg("-c").arg(WORK));
    let under = || {
        let mut command = Command::new(ckpt_run);
        command
            .args(["-q", "--interval", "off", "--resume", "never", "--store"])
            .arg(dir.path().join("store"));
        command.arg("--").arg(python).arg("-c").arg(WORK).env("CKPT_CRIU", tools.criu());
        seconds(&mut command)
    };
    plain()?;
    let mut ratios = Vec::new();
    for round in 0..ROUNDS {
        let (plain_s, under_s) = if round % 2 == 0 {
            let plain_s = plain()?;
            (plain_s, under()?)
        } else {
            let under_s = under()?;
            (plain()?, under_s)
        };
        ratios.push(under_s / plain_s);
    }
    Ok(median(ratios) - 1.0)
}

fn seconds(command: &mut Command) -> Result<f64> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().with_context(|| format!("the work printed {text:?}"))
}
