//! A job with device memory under ckpt-run, and what its checkpoints take.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::Bench;
use crate::process;
use crate::test::clear_options;

/// Which job.
#[derive(Clone, Copy)]
pub struct What {
    pub processes: usize,
    /// Device memory of each process.
    pub bytes: usize,
    /// How many allocations that is in each.
    pub allocations: usize,
    pub way: Way,
    /// What ckpt-run keeps of it in host memory (`--mirror`). If this is given, the content is noise.
    pub mirror: Option<&'static str>,
}

/// How the content of its device memory is saved.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Hashed on the device; what has changed is copied.
    Changed,
    /// All of it is copied.
    All,
    /// The driver copies it to pageable memory of the process, and CRIU writes that. So it is for memory that is none
    /// of ours: a module's variable.
    Driver,
}

/// What a checkpoint took, seconds. What is left of the stall is the dump, and coming back. Of several processes, the
/// longest of each.
#[derive(Clone, Copy, Default, Serialize)]
pub struct Stall {
    pub stall_s: f64,
    pub drain_s: f64,
    pub capture_s: f64,
    pub release_s: f64,
    pub driver_s: f64,
    /// Sum over the processes; `None` if it was not looked for.
    pub changed_bytes: Option<u64>,
}

/// The parts of what `ckpt-run checkpoint --json` and `ckpt-run show --json` say that are used.
#[derive(Deserialize)]
struct Saved {
    id: String,
    stall_s: f64,
}

#[derive(Deserialize)]
struct Shown {
    gpu_processes: Vec<OnGpu>,
    cut: Option<Cut>,
}

#[derive(Deserialize)]
struct Cut {
    duration_s: f64,
}

#[derive(Deserialize)]
struct OnGpu {
    times: Times,
    regions: Vec<Region>,
}

#[derive(Deserialize)]
struct Times {
    drain_s: f64,
    capture_s: f64,
    release_s: f64,
    driver_s: f64,
}

#[derive(Deserialize)]
struct Region {
    changed_bytes: Option<u64>,
}

/// A job that runs; it is killed when this is dropped.
pub struct Job<'b> {
    bench: &'b Bench,
    /// Working directory and store.
    dir: tempfile::TempDir,
    child: Child,
    ask: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl<'b> Job<'b> {
    /// Starts it and waits until its memory is filled.
    pub fn start(bench: &'b Bench, what: What) -> Result<Self> {
        let mut program = Command::new(bench.dir.path().join("memory"));
        program.args([what.processes, what.bytes, what.allocations].map(|number| number.to_string()));
        program.arg(match what {
            What { way: Way::Driver, .. } => "module",
            What { mirror: Some(_), .. } => "noise",
            What { .. } => "allocated",
        });
        program.envs(what.mirror.map(|mirror| ("CKPT_MIRROR", mirror)));
        program.env("LD_LIBRARY_PATH", &bench.driver).env("SIMCUDA_DIR", bench.device.path());
        program.env("SIMCUDA_PERSISTENCE", "1");
        program.env("CKPT_CAPTURE", if what.way == Way::Changed { "changed" } else { "all" });
        Self::start_program(bench, &program, what.processes)
    }

    /// Starts a program with its variables, and waits until it has said "ready" so often.
    pub fn start_program(bench: &'b Bench, program: &Command, ready: usize) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("bench-").tempdir_in(&bench.store_parent)?;
        let mut command = ckpt_run(bench, &dir);
        command.arg("--interpose").arg(&bench.library).arg("--");
        command.arg(program.get_program()).args(program.get_args());
        command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("starting ckpt-run")?;
        let ask = child.stdin.take().context("no pipe")?;
        let answers = BufReader::new(child.stdout.take().context("no pipe")?);
        let mut job = Self { bench, dir, child, ask, answers };
        for _ in 0..ready {
            job.hear("ready")?;
        }
        Ok(job)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(line)
    }

    fn hear(&mut self, word: &str) -> Result<()> {
        let line = self.line()?;
        ensure!(line.trim() == word, "the job said {line:?} instead of {word:?}");
        Ok(())
    }

    /// The number that the program answers to an empty line.
    pub fn ask(&mut self) -> Result<f64> {
        writeln!(self.ask)?;
        let line = self.line()?;
        line.trim().parse().with_context(|| format!("the job said {line:?} instead of a number"))
    }

    /// Changes so many percent of the memory of the first process.
    pub fn change(&mut self, percent: u32) -> Result<()> {
        writeln!(self.ask, "{percent}")?;
        self.hear("changed")
    }

    /// Saves it.
    pub fn checkpoint(&self) -> Result<Stall> {
        let (saved, shown) = self.save()?;
        let longest = |of: fn(&Times) -> f64| {
            shown.gpu_processes.iter().map(|on_gpu| of(&on_gpu.times)).fold(0.0, f64::max)
        };
        let regions = shown.gpu_processes.iter().flat_map(|on_gpu| &on_gpu.regions);
        Ok(Stall {
            stall_s: saved.stall_s,
            drain_s: longest(|times| times.drain_s),
            capture_s: longest(|times| times.capture_s),
            release_s: longest(|times| times.release_s),
            driver_s: longest(|times| times.driver_s),
            changed_bytes: regions
                .map(|region| region.changed_bytes)
                .reduce(|sum, bytes| Some(sum? + bytes?))
                .flatten(),
        })
    }

    /// Saves it; returns the seconds from the request to the consistent cut.
    pub fn cut_s(&self) -> Result<f64> {
        self.save()?.1.cut.map(|cut| cut.duration_s).context("no process had a communicator")
    }

    fn save(&self) -> Result<(Saved, Shown)> {
        let said = process::capture(ckpt_run(self.bench, &self.dir).args(["checkpoint", "--json"]))?;
        let saved: Saved = serde_json::from_str(&said).context("ckpt-run checkpoint --json")?;
        let said = process::capture(ckpt_run(self.bench, &self.dir).args(["show", &saved.id, "--json"]))?;
        Ok((saved, serde_json::from_str(&said).context("ckpt-run show --json")?))
    }

    /// The shortest stall of some checkpoints, of each of which so much was changed. The first checkpoint of a job
    /// finds everything changed, so it is to be another one.
    pub fn shortest_stall(&mut self, percent: u32, rounds: usize) -> Result<Stall> {
        let mut shortest = Stall { stall_s: f64::INFINITY, ..Stall::default() };
        for _ in 0..rounds {
            self.change(percent)?;
            let stall = self.checkpoint()?;
            if stall.stall_s < shortest.stall_s {
                shortest = stall;
            }
        }
        Ok(shortest)
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ckpt_run(bench: &Bench, dir: &tempfile::TempDir) -> Command {
    let mut command = Command::new(&bench.ckpt_run);
    clear_options(&mut command);
    command.current_dir(dir.path()).env("CKPT_CRIU", &bench.criu).env("CKPT_INTERVAL", "off");
    command.env("CKPT_QUIET", "1").env("CKPT_KEEP", "1").env("CKPT_FREEZE_TIMEOUT", "10m");
    command
}
