//! `ckpt-run demo`: a small job is checkpointed, killed and resumed on this machine, and its results are compared with those
//! of an undisturbed run.

pub mod job;
mod process;

use crate::cli::args::DemoArgs;
use crate::cli::config::Config;
use crate::criu::Criu;
use crate::namespace::Namespace;
use crate::sys::deadline::{DEMO_POLL_INTERVAL, DEMO_TIMEOUT};
use crate::sys::error::{EXIT_NEGATIVE, bad_input};
use anyhow::{Context, Result, anyhow, bail, ensure};
use job::{END, Kind, STEPS, WAIT_AFTER};
use process::Process;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::fmt::Display;
use std::fs::{self, DirBuilder};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

/// Steps before the checkpoint.
const STEPS_BEFORE: usize = 10;

/// Runs the demo; exit code 1 when the results differ.
///
/// # Errors
/// When CRIU or rights are missing, or a step fails.
pub fn demo(config: &Config, args: &DemoArgs) -> Result<i32> {
    let criu = Criu::find(config.criu.as_deref());
    let criu = criu.map_err(|error| if config.criu.is_some() { bad_input(error) } else { error.into() })?;
    // The namespace ends at once: nothing runs in it.
    Namespace::create(config.network, None)?;
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted))?;
    }
    let dir = WorkDir::create()?;
    let kind = Kind::choose(args.plain);
    let demo = Demo {
        start: Instant::now(),
        program: std::env::current_exe().context("cannot determine the path of ckpt-run")?,
        criu: criu.path,
        kind,
        dir,
        interrupted,
    };
    let is_equal = demo.run()?;
    Ok(if is_equal { 0 } else { EXIT_NEGATIVE })
}

/// A directory in the temporary one, removed at the end.
struct WorkDir(PathBuf);

impl WorkDir {
    fn create() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("ckpt-run-demo-{:08x}", fastrand::u32(..)));
        let created = DirBuilder::new().mode(0o700).create(&path);
        created.with_context(|| format!("cannot create {}; TMPDIR names another place", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

struct Demo {
    start: Instant,
    program: PathBuf,
    criu: PathBuf,
    kind: Kind,
    dir: WorkDir,
    interrupted: Arc<AtomicBool>,
}

/// Steps that the log had.
struct Marks {
    before_snapshot: usize,
    after_snapshot: usize,
    at_kill: usize,
}

impl Demo {
    /// Both runs and the comparison: whether the results are equal.
    fn run(&self) -> Result<bool> {
        self.say(format_args!("The job: {}, {STEPS} steps.", self.kind.description()));
        for dir in ["undisturbed", "killed"] {
            fs::create_dir(self.path(dir))?;
        }
        fs::write(self.path("undisturbed").join(END), "")?;
        let mut undisturbed = Command::new(&self.command("undisturbed")?[0]);
        undisturbed.args(&self.command("undisturbed")?[1..]).current_dir(self.path("undisturbed"));
        undisturbed.env("OMP_NUM_THREADS", "1");
        let mut undisturbed = Process::start(&mut undisturbed, self.path("undisturbed.out"))?;
        self.say("It runs twice: undisturbed for comparison, and under ckpt-run.");

        let (id, marks) = self.run_until_killed()?;
        self.resume(&id, &marks)?;
        self.wait(&mut undisturbed, "the undisturbed job", |_| Ok(()))?;
        Ok(self.compare())
    }

    /// Starts the job under ckpt-run, takes a snapshot, kills everything.
    fn run_until_killed(&self) -> Result<(String, Marks)> {
        let mut job = Process::start(&mut self.under_ckpt_run()?, self.path("first.out"))?;
        let before_snapshot = self.until_steps(&mut job, STEPS_BEFORE)?;
        let mut checkpoint = self.ckpt_run();
        checkpoint.arg("checkpoint").stdin(Stdio::null());
        let output = checkpoint.output().context("cannot start ckpt-run")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            // The log is removed with the directory.
            let reason = said.trim().trim_start_matches("ckpt-run: ").trim_start_matches("error: ");
            let reason = reason.split(" CRIU's log is in").next().unwrap_or_default().trim_end_matches('.');
            bail!("the checkpoint failed: {reason}. `ckpt-run doctor` shows what this machine lacks");
        }
        let id = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let after_snapshot = self.steps();
        self.say(format_args!("Step {after_snapshot}: snapshot {id} is stored. The job runs on."));

        self.until_steps(&mut job, WAIT_AFTER)?;
        let killed = job.kill()?;
        self.until("the end of the killed processes", || {
            let mut ended = killed.iter().map(process::has_ended);
            ended.try_fold(true, |all, one| one.map(|one| all && one)).map(|all| all.then_some(()))
        })?;
        let at_kill = self.steps();
        self.say(format_args!(
            "Step {at_kill}: killed with SIGKILL, ckpt-run and the {} processes that it had started.",
            killed.len()
        ));
        Ok((id, Marks { before_snapshot, after_snapshot, at_kill }))
    }

    /// Runs the same command again, to its end.
    fn resume(&self, id: &str, marks: &Marks) -> Result<()> {
        self.say("The same command again.");
        fs::write(self.path("killed").join(END), "")?;
        let begun = Instant::now();
        let mut job = Process::start(&mut self.under_ckpt_run()?, self.path("second.out"))?;
        let mut is_reported = false;
        let mut fewest = marks.at_kill;
        self.wait(&mut job, "the resumed job", |job| {
            fewest = fewest.min(self.steps());
            if !is_reported && job.said().contains(&format!("resumed from snapshot {id}")) {
                is_reported = true;
                let took = begun.elapsed().as_secs_f64();
                self.say(format_args!("Resumed from the snapshot after {took:.1} s."));
            }
            Ok(())
        })?;
        ensure!(is_reported, "the job was started from the beginning, not resumed:\n{}", job.said());
        // The shortest length is seen by polling, and may be missed.
        if (marks.before_snapshot..=marks.after_snapshot).contains(&fewest) {
            self.say(format_args!("Steps {} to {} were done again.", fewest + 1, marks.at_kill));
        }
        self.say("The job has ended.");
        Ok(())
    }

    fn compare(&self) -> bool {
        let (undisturbed, killed) = (self.log("undisturbed"), self.log("killed"));
        let is_equal = killed == undisturbed && killed.lines().count() == STEPS;
        if is_equal {
            self.say(format_args!(
                "Equal: all {STEPS} results are those of the undisturbed run, bit for bit."
            ));
            print("\nYour own job: ckpt-run CMD…. After a crash, run the same command again.");
        } else {
            let lines = undisturbed.lines().zip(killed.lines()).take_while(|(one, other)| one == other);
            self.say(format_args!(
                "NOT EQUAL: the results of the killed job ({} steps) differ from those of the undisturbed run ({} steps) \
                 after step {}. Please report this",
                killed.lines().count(),
                undisturbed.lines().count(),
                lines.count()
            ));
        }
        is_equal
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.0.join(name)
    }

    fn command(&self, dir: &str) -> Result<Vec<PathBuf>> {
        self.kind.command(&self.program, &self.path(dir))
    }

    fn ckpt_run(&self) -> Command {
        let mut command = Command::new(&self.program);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("CKPT_")) {
            command.env_remove(name);
        }
        command.env_remove("LD_PRELOAD").env("OMP_NUM_THREADS", "1");
        command.current_dir(self.path("killed")).arg("--store").arg(self.path("store"));
        command
    }

    fn under_ckpt_run(&self) -> Result<Command> {
        let mut command = self.ckpt_run();
        command.arg("--criu").arg(&self.criu).args(["--interval", "off", "--max-restarts", "0"]);
        command.args(["--interpose", "off", "--files-exclude", END, "--"]).args(self.command("killed")?);
        Ok(command)
    }

    fn log(&self, dir: &str) -> String {
        fs::read_to_string(self.path(dir).join("log.txt")).unwrap_or_default()
    }

    /// Steps that the job under ckpt-run has logged.
    fn steps(&self) -> usize {
        self.log("killed").matches('\n').count()
    }

    fn until_steps(&self, job: &mut Process, steps: usize) -> Result<usize> {
        self.until("steps of the job", || {
            let done = self.steps();
            if done < steps && job.ended()?.is_some() {
                return job.fail("ckpt-run ended before its job");
            }
            Ok((done >= steps).then_some(done))
        })
    }

    /// Waits for a process to end with exit code 0; calls `look` meanwhile and afterwards.
    fn wait(
        &self,
        job: &mut Process,
        what: &str,
        mut look: impl FnMut(&Process) -> Result<()>,
    ) -> Result<()> {
        let status = self.until(what, || {
            let status = job.ended()?;
            look(job)?;
            Ok(status)
        })?;
        if !status.success() {
            return job.fail(&format!("{what} failed ({status})"));
        }
        Ok(())
    }

    /// Polls until `condition` returns a value.
    fn until<T>(&self, what: &str, mut condition: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let begun = Instant::now();
        loop {
            if let Some(value) = condition()? {
                return Ok(value);
            }
            if self.interrupted.load(Ordering::Relaxed) {
                bail!("interrupted; everything that the demo had started is ended");
            }
            if begun.elapsed() > DEMO_TIMEOUT {
                return Err(anyhow!("waited {} s in vain for {what}", DEMO_TIMEOUT.as_secs()));
            }
            thread::sleep(DEMO_POLL_INTERVAL);
        }
    }

    fn say(&self, line: impl Display) {
        print(&format!("[{:5.1} s] {line}", self.start.elapsed().as_secs_f64()));
    }
}

/// Prints a line. The demo goes on when nobody reads it: its exit code is the result.
fn print(line: &str) {
    let _ = writeln!(io::stdout().lock(), "{line}");
}
