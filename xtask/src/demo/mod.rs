//! `cargo xtask demo`: the main job, end to end.
//!
//! A torchrun job of two ranks trains twice: once without ckpt-run and unbroken, once under ckpt-run, where it is
//! checkpointed while it runs, killed with SIGKILL together with ckpt-run, and started again with the very same
//! command. The losses of both must be the same, bit for bit.

mod job;
mod losses;
mod tree;

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use self::job::Job;
use self::losses::{Comparison, Marks};
use crate::say::{self, Clock};
use crate::{process, test, tools, workspace};

/// How long anything in the demo may take before it is taken for stuck.
const PATIENCE: Duration = Duration::from_secs(180);

/// Steps before the checkpoint is asked for, and steps between it and the kill.
const STEPS_AHEAD: usize = 8;

/// The Cargo profile that ckpt-run is built with: the one that is built fastest, see Cargo.toml.
const PROFILE: &str = "demo";

/// Options of `cargo xtask demo`.
#[derive(clap::Args)]
pub struct Args {
    /// Steps that the job trains
    #[arg(long, default_value_t = 48, value_parser = clap::value_parser!(u32).range(24..))]
    steps: u32,
    /// Time that the job sleeps after each step; raise it if the job ends before it can be killed
    #[arg(long, default_value_t = 200)]
    step_ms: u32,
    /// Keep the work directory with the job's output, the losses and the snapshot
    #[arg(long)]
    keep: bool,
}

/// Runs the demo. Exit code 1 says that the losses differ.
pub fn run(args: &Args) -> Result<ExitCode> {
    println!("A torchrun job of 2 ranks is checkpointed, killed with SIGKILL, and goes on.\n");
    let programs = Programs::set_up()?;
    let mut work = tempfile::Builder::new()
        .prefix("ckpt-run-demo-")
        .tempdir()
        .context("creating a temporary work directory")?;
    println!();
    let outcome = Demo::new(args, programs, work.path()).and_then(|demo| demo.run());
    let identical = outcome.as_ref().is_ok_and(|&identical| identical);
    let path = work.path().to_path_buf();
    work.disable_cleanup(args.keep || !identical);
    if args.keep || !identical {
        println!("\nThe work directory is kept: {}", path.display());
    }
    outcome.map(|identical| if identical { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What the demo runs.
struct Programs {
    ckpt_run: PathBuf,
    criu: PathBuf,
    torchrun: PathBuf,
}

impl Programs {
    /// Builds ckpt-run alone, and sets up CRIU and PyTorch at the same time: a build needs the processor, a set-up the
    /// network.
    fn set_up() -> Result<Self> {
        let start = Instant::now();
        let mut cargo = workspace::cargo();
        cargo.args(["build", "--profile", PROFILE, "--quiet", "--package", "ckpt-run"]);
        eprintln!("demo:  building ckpt-run, about two minutes on two cores: {}", process::describe(&cargo));
        let mut build = cargo.spawn().context("could not start cargo build")?;
        let tools = tools::criu().and_then(|criu| Ok((criu, tools::torchrun()?)));
        if tools.is_err() {
            // It may have ended by itself.
            let _ = build.kill();
        }
        let status = build.wait()?;
        let (criu, torchrun) = tools?;
        ensure!(status.success(), "`{}` failed", process::describe(&cargo));
        let ckpt_run = workspace::target_dir()?.join(PROFILE).join("ckpt-run");
        println!("demo:  {} is ready ({})", ckpt_run.display(), say::duration(start.elapsed()));
        Ok(Self { ckpt_run, criu, torchrun })
    }
}

/// A port that nobody has: torchrun's own default may be in use by another job. It is below those that the kernel gives
/// to outgoing connections, so that none of them has it when the job wants it back.
fn free_port() -> Result<u16> {
    let first = 20_000 + (std::process::id() % 10_000) as u16;
    let mut ports = (first..30_000).chain(20_000..first);
    ports
        .find(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok())
        .context("no port between 20000 and 30000 is free")
}

/// Where and how the demo runs.
struct Demo {
    clock: Clock,
    ckpt_run: PathBuf,
    criu: PathBuf,
    /// The job's own command, without ckpt-run.
    command: Vec<String>,
    steps: usize,
    step_ms: u32,
    work: PathBuf,
}

impl Demo {
    fn new(args: &Args, programs: Programs, work: &Path) -> Result<Self> {
        for dir in ["unbroken", "broken", "tmp"] {
            fs::create_dir(work.join(dir))?;
        }
        let port = free_port()?;
        let script = workspace::root().join("examples/train.py");
        // Debian's torchrun 1.13 under Python 3.11 needs -r and -t.
        let line = format!("-r 1 -t 1 --master_port {port} --nproc_per_node=2");
        let options = format!("--steps {} --step-ms {} --workers 1", args.steps, args.step_ms);
        let mut command = vec![programs.torchrun.display().to_string()];
        command.extend(line.split(' ').map(str::to_owned));
        command.push(script.display().to_string());
        command.extend(options.split(' ').map(str::to_owned));
        Ok(Self {
            clock: Clock::start(),
            ckpt_run: programs.ckpt_run,
            criu: programs.criu,
            command,
            steps: args.steps as usize,
            step_ms: args.step_ms,
            work: work.to_path_buf(),
        })
    }

    /// Both runs and the comparison. `false` says that the losses differ.
    fn run(&self) -> Result<bool> {
        self.run_unbroken()?;
        let mut marks = self.run_until_killed()?;
        marks.resumed_after = self.resume(&marks)?;
        let unbroken = losses::read(&self.losses("unbroken"))?;
        let broken = losses::read(&self.losses("broken"))?;
        let comparison = Comparison::new(&unbroken, &broken);
        println!("\n{}", comparison.table(&marks));
        println!("{}", comparison.verdict());
        Ok(comparison.is_identical())
    }

    fn run_unbroken(&self) -> Result<()> {
        self.clock.say("without ckpt-run: the job starts, to see what it does when nothing happens");
        let start = Instant::now();
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]);
        let mut job = self.start(command, "unbroken", "output.txt")?;
        job.wait(PATIENCE)?;
        self.clock.say(&format!(
            "without ckpt-run: {} steps in {}",
            self.steps,
            say::duration(start.elapsed())
        ));
        Ok(())
    }

    /// Starts the job under ckpt-run, takes a checkpoint, kills all of it.
    fn run_until_killed(&self) -> Result<Marks> {
        self.clock.say("under ckpt-run: the job starts again from the beginning, with the command");
        println!("           {}", self.shown_command());
        let mut job = self.start(self.under_ckpt_run(), "broken", "output-1.txt")?;
        let before = self.wait_for_steps(&mut job, STEPS_AHEAD)?;

        self.clock.say(&format!("step {before}: `ckpt-run checkpoint`"));
        let start = Instant::now();
        let mut ask = Command::new(&self.ckpt_run);
        ask.args(["checkpoint", "--store"]).arg(self.store()).current_dir(self.work.join("broken"));
        test::clear_options(&mut ask);
        let id = process::capture(&mut ask).context("the checkpoint failed")?.trim().to_owned();
        let after = self.steps_done()?;
        let took = say::duration(start.elapsed());
        self.clock.say(&format!("step {after}: snapshot {id} is durable, after {took}"));

        let wanted = after + STEPS_AHEAD;
        ensure!(wanted < self.steps, "the job is too short for this machine; try --steps {}", 2 * self.steps);
        self.wait_for_steps(&mut job, wanted)?;
        let start = Instant::now();
        let pid = job.pid();
        let killed = job.kill_all().context("killing the job")?;
        let took = say::duration(start.elapsed());
        let marks = Marks {
            asked_after: before,
            durable_after: after,
            killed_after: self.steps_done()?,
            resumed_after: 0,
        };
        self.clock.say(&format!(
            "step {}: SIGKILL to ckpt-run (PID {pid}) and to what it had started: {killed} processes, none is left after {took}",
            marks.killed_after
        ));
        Ok(marks)
    }

    /// Runs the very same command again and returns the last step that it found done.
    fn resume(&self, marks: &Marks) -> Result<usize> {
        self.clock.say("the very same command again");
        let start = Instant::now();
        let mut job = self.start(self.under_ckpt_run(), "broken", "output-2.txt")?;
        // ckpt-run cuts the log to what it was at the snapshot before the job goes on.
        let mut resumed_after = marks.killed_after;
        let mut told = false;
        while job.is_running()? {
            let steps = self.steps_done()?;
            resumed_after = resumed_after.min(steps);
            if !told && steps > resumed_after && resumed_after < marks.killed_after {
                let took = say::duration(start.elapsed());
                self.clock.say(&format!("it went on after step {resumed_after}, {took} after the command"));
                told = true;
            }
            job.check_patience(start, PATIENCE)?;
            job::pause();
        }
        job.wait(PATIENCE)?;
        self.clock.say("it ended with exit code 0");
        if !(marks.asked_after..=marks.durable_after).contains(&resumed_after) {
            let Marks { asked_after, durable_after, .. } = marks;
            bail!(
                "it went on after step {resumed_after}, but the snapshot was taken between steps {asked_after} and \
                 {durable_after}; what it said:\n{}",
                job.output_tail()
            );
        }
        Ok(resumed_after)
    }

    fn under_ckpt_run(&self) -> Command {
        let mut command = Command::new(&self.ckpt_run);
        command.args(["--interval", "off", "--store"]).arg(self.store());
        command.arg("--criu").arg(&self.criu).arg("--").args(&self.command);
        command
    }

    /// The command as one would type it, with names for paths.
    fn shown_command(&self) -> String {
        let name =
            |word: &String| Path::new(word).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let words: Vec<_> = self.command.iter().map(name).collect();
        format!("ckpt-run --interval off --store DIR -- {}", words.join(" "))
    }

    /// Starts a command in one of the work directories, its output going to a file there.
    fn start(&self, mut command: Command, dir: &str, output: &str) -> Result<Job> {
        test::clear_options(&mut command);
        let dir = self.work.join(dir);
        // torchrun leaves logs in the temporary directory.
        command.current_dir(&dir).env("TMPDIR", self.work.join("tmp"));
        Job::start(command, dir.join(output))
    }

    fn store(&self) -> PathBuf {
        self.work.join("store")
    }

    fn losses(&self, dir: &str) -> PathBuf {
        self.work.join(dir).join("losses.txt")
    }

    /// Steps that the run under ckpt-run has logged.
    fn steps_done(&self) -> Result<usize> {
        Ok(losses::read(&self.losses("broken"))?.len())
    }

    fn wait_for_steps(&self, job: &mut Job, wanted: usize) -> Result<usize> {
        let start = Instant::now();
        loop {
            let done = self.steps_done()?;
            if done >= wanted {
                return Ok(done);
            }
            if !job.is_running()? {
                bail!(
                    "the job ended before step {wanted} (of {} ms each); what it said:\n{}",
                    self.step_ms,
                    job.output_tail()
                );
            }
            job.check_patience(start, PATIENCE)?;
            job::pause();
        }
    }
}
