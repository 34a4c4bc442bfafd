//! What the files of a job cost: tracking what it writes, checkpoints with changed files, and putting files back.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::{idle, median};
use crate::process;
use crate::tools::python::PYTHON;

/// About 10,000 files a minute, with arithmetic in between. Prints the seconds that it took.
const WRITER: &str = "
import os, tempfile, time
begun = time.monotonic()
with tempfile.TemporaryDirectory(dir='.') as dir:
    for i in range(1000):
        with open(f'{dir}/{i}', 'w') as file:
            file.write('x' * 1000)
        total = sum(k * k for k in range(75_000))
print(time.monotonic() - begun)
";
/// Has a file of `BYTES` bytes open, changes the first N bytes of it when `change` says N, and writes many small files when
/// `small` says how many.
const HOLDER: &str = "
import os, sys, time
size = int(sys.argv[1])
with open('big', 'wb') as file:
    for _ in range(size // (1 << 20)):
        file.write(os.urandom(1 << 20))
file = open('big', 'r+b', buffering=0)
os.makedirs('small', exist_ok=True)
open('ready', 'w').close()
def asked(name):
    try:
        value = int(open(name).read())
    except (OSError, ValueError):
        return None
    os.remove(name)
    return value
while True:
    n = asked('change')
    if n is not None:
        file.seek(0)
        for _ in range(n // (1 << 20)):
            file.write(os.urandom(1 << 20))
        open('changed', 'w').close()
    n = asked('write')
    if n is not None:
        for i in range(n):
            with open(f'small/{i}', 'w') as small:
                small.write(str(time.monotonic()) * 50)
        open('written', 'w').close()
    open('beat', 'w').close()
    time.sleep(0.01)
";
const WAIT_LIMIT: Duration = Duration::from_secs(120);
const SMALL_FILES: usize = 1000;

/// Options of `cargo xtask bench files`.
#[derive(clap::Args)]
pub struct Args {
    /// The size of the open file, MiB
    #[arg(long, default_value_t = 512)]
    mib: u64,
    /// Rounds; the medians are reported
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Also write the JSON to this file
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// Times are seconds, medians over the rounds.
#[derive(Serialize)]
pub struct Report {
    /// (Time of a job that writes 10,000 files a minute under ckpt-run / time plain), less one. It includes what else
    /// ckpt-run costs.
    tracking_overhead: f64,
    /// What 1 GB of changed content of an open file adds to the pause of the job.
    stall_per_gb_changed_s: f64,
    /// The pause of the job when none of its files has changed.
    stall_unchanged_s: f64,
    /// The same when the open file has a tenth of the size.
    stall_unchanged_small_s: f64,
    /// What 1000 changed small files add to a resume.
    putback_s: f64,
    open_file_bytes: u64,
    rounds: usize,
}

/// Measures all.
pub fn measure(criu: &Path, ckpt_run: &Path, args: &Args) -> Result<Report> {
    let bytes = args.mib << 20;
    eprintln!("bench: a job that writes 10,000 files a minute");
    let tracking_overhead =
        idle::in_turns(criu, ckpt_run, WRITER, |plain_s, under_s| under_s / plain_s)? - 1.0;
    let (mut unchanged, mut changed, mut small, mut putback) = (vec![], vec![], vec![], vec![]);
    for round in 1..=args.rounds {
        eprintln!("bench: round {round} of {}", args.rounds);
        let mut job = Job::start(criu, ckpt_run, bytes)?;
        job.checkpoint()?;
        unchanged.push(job.checkpoint()?);
        job.ask("change", bytes / 2, "changed")?;
        changed.push(job.checkpoint()?);
        job.kill()?;
        let nothing_s = job.resume()?;
        job.ask("write", SMALL_FILES as u64, "written")?;
        job.checkpoint()?;
        job.ask("write", SMALL_FILES as u64, "written")?;
        job.kill()?;
        putback.push(job.resume()? - nothing_s);
        job.kill()?;
        let mut job = Job::start(criu, ckpt_run, bytes / 10)?;
        job.checkpoint()?;
        small.push(job.checkpoint()?);
        job.kill()?;
    }
    let (stall_unchanged_s, stall_changed_s) = (median(unchanged), median(changed));
    Ok(Report {
        tracking_overhead,
        stall_per_gb_changed_s: (stall_changed_s - stall_unchanged_s) / (bytes as f64 / 2.0 / 1e9),
        stall_unchanged_s,
        stall_unchanged_small_s: median(small),
        putback_s: median(putback),
        open_file_bytes: bytes,
        rounds: args.rounds,
    })
}

/// The job, in a directory of its own.
struct Job {
    dir: tempfile::TempDir,
    command: Vec<PathBuf>,
    bytes: u64,
    child: Option<Child>,
}

impl Job {
    fn start(criu: &Path, ckpt_run: &Path, bytes: u64) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("bench-").tempdir_in(crate::workspace::target_dir()?)?;
        let mut job = Self { dir, command: vec![ckpt_run.to_owned(), criu.to_owned()], bytes, child: None };
        job.launch()?;
        job.until("ready")?;
        Ok(job)
    }

    fn ckpt_run(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.command[0]);
        command.args(arguments).current_dir(self.dir.path()).stdin(Stdio::null()).stdout(Stdio::null());
        // The questions and answers are not the job's files.
        command.env("CKPT_FILES_EXCLUDE", "ready,change,changed,write,written,beat");
        command.env("CKPT_CRIU", &self.command[1]).env("CKPT_INTERVAL", "off").env("CKPT_QUIET", "1");
        command
    }

    fn launch(&mut self) -> Result<()> {
        let mut command = self.ckpt_run(&["--", PYTHON, "-c", HOLDER, &self.bytes.to_string()]);
        self.child = Some(command.spawn().context("starting ckpt-run")?);
        Ok(())
    }

    fn until(&self, name: &str) -> Result<()> {
        let (path, deadline) = (self.dir.path().join(name), Instant::now() + WAIT_LIMIT);
        while !path.exists() {
            if Instant::now() > deadline {
                bail!("the job did not make {name} within {} s", WAIT_LIMIT.as_secs());
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        Ok(())
    }

    fn ask(&self, question: &str, value: u64, answer: &str) -> Result<()> {
        let _ = fs::remove_file(self.dir.path().join(answer));
        let new = self.dir.path().join("written.new");
        fs::write(&new, value.to_string())?;
        fs::rename(new, self.dir.path().join(question))?;
        self.until(answer)
    }

    /// Takes a snapshot. Returns how long the job was paused, seconds.
    fn checkpoint(&self) -> Result<f64> {
        let text = process::capture(self.ckpt_run(&["checkpoint", "--json"]).stdout(Stdio::piped()))?;
        let saved: serde_json::Value = serde_json::from_str(&text)?;
        saved["stall_s"].as_f64().context("the answer has no stall_s")
    }

    fn kill(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Seconds from the start of ckpt-run until the resumed job runs.
    fn resume(&mut self) -> Result<f64> {
        let _ = fs::remove_file(self.dir.path().join("beat"));
        let begun = Instant::now();
        self.launch()?;
        self.until("beat")?;
        Ok(begun.elapsed().as_secs_f64())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}
