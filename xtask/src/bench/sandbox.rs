//! Processes of a given size together, under ckpt-run, and CRIU alone beside it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::process;
use crate::tools::python::PYTHON;
use crate::workspace;

const BALLAST: &str = include_str!("ballast.py");
const PATIENCE: Duration = Duration::from_secs(300);
/// As ckpt-run decides it: huge pages are for large images.
const HUGE_FROM_BYTES: u64 = 1 << 30;
/// The root of the job's tree, in its namespace.
const ROOT_PID: &str = "10001";
const CRIU_OPTIONS: &[&str] = &["--tcp-established", "--file-locks", "--link-remap"];

/// A working directory, a store and a tmpfs for one round.
pub struct Sandbox<'a> {
    criu: &'a Path,
    ckpt_run: &'a Path,
    bytes: u64,
    processes: u32,
    /// `--precopy`.
    precopy: &'static str,
    dir: tempfile::TempDir,
}

/// Where benchmarks have their files: on the disk of the build directory, or that of a virtual machine.
fn place() -> Result<PathBuf> {
    std::env::var_os("CKPT_BENCH_DIR").map_or_else(workspace::target_dir, |dir| Ok(dir.into()))
}

/// Writes so much memory and frees it: a virtual machine gives back what it has not used for a while, and fetching it again is
/// slow for whoever comes first.
fn fetch_memory(bytes: u64) -> Result<()> {
    let free_bytes =
        process::capture(Command::new("sh").args(["-c", "grep MemAvailable /proc/meminfo | tr -dc 0-9"]))?
            .trim()
            .parse::<u64>()?
            * 1024;
    let fetched_bytes = bytes.min(free_bytes / 10 * 9);
    process::capture(
        Command::new(PYTHON)
            .args(["-c", "import sys; bytearray(b'1') * int(sys.argv[1])"])
            .arg(fetched_bytes.to_string()),
    )?;
    Ok(())
}

impl<'a> Sandbox<'a> {
    /// Makes them.
    pub fn new(criu: &'a Path, ckpt_run: &'a Path, bytes: u64, processes: u32) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("bench-").tempdir_in(place()?)?;
        fs::write(dir.path().join("ballast.py"), BALLAST)?;
        let sandbox = Self { criu, ckpt_run, bytes, processes, precopy: "auto", dir };
        let images = sandbox.images();
        fs::create_dir(&images)?;
        let huge = if bytes >= HUGE_FROM_BYTES { "huge=always" } else { "huge=never" };
        let mut mount = Command::new("mount");
        process::capture(
            mount.args(["-t", "tmpfs", "-o", &format!("size=100%,{huge}"), "tmpfs"]).arg(&images),
        )?;
        Ok(sandbox)
    }

    /// With this `--precopy`.
    pub fn with_precopy(mut self, precopy: &'static str) -> Self {
        self.precopy = precopy;
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Where CRIU alone puts its images.
    fn images(&self) -> PathBuf {
        self.path("criu-alone")
    }

    fn ckpt_run(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.ckpt_run);
        command.args(arguments).current_dir(self.dir.path()).stdin(Stdio::null());
        command.env("CKPT_CRIU", self.criu).env("CKPT_INTERVAL", "off").env("CKPT_QUIET", "1");
        command.env("CKPT_PRECOPY", self.precopy);
        // The process answers by files, which a resume must not put back.
        command.env("CKPT_FILES_EXCLUDE", "*");
        command
    }

    fn launch(&self) -> Result<Job<'_, 'a>> {
        let [bytes, processes] = [self.bytes.to_string(), self.processes.to_string()];
        let mut command = self.ckpt_run(&["--", PYTHON, "ballast.py", &bytes, &processes]);
        let child = command.stdout(Stdio::null()).spawn().context("starting ckpt-run")?;
        Ok(Job { sandbox: self, child })
    }

    /// Starts the processes and waits until their memory is filled.
    pub fn start(&self) -> Result<Job<'_, 'a>> {
        let job = self.launch()?;
        self.until("the memory to be filled", || self.path("ready").exists().then_some(()))?;
        // A moment of rest, so that what filling it has caused is over.
        self.ask("ping", "pong")?;
        Ok(job)
    }

    /// Fetches memory for the job, and for a copy of it.
    fn fetch_memory(&self) -> Result<()> {
        fetch_memory(2 * self.bytes)
    }

    /// Asks the process something and returns its answer.
    fn ask(&self, question: &str, answer: &str) -> Result<String> {
        let answer = self.path(answer);
        fs::write(self.path(question), "")?;
        self.until(question, || fs::read_to_string(&answer).ok()).inspect(|_| drop(fs::remove_file(&answer)))
    }

    fn until<T>(&self, what: &str, mut condition: impl FnMut() -> Option<T>) -> Result<T> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(value) = condition() {
                return Ok(value);
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        bail!("waited in vain for {what}")
    }

    /// Seconds from the start of ckpt-run until the resumed process answers; ends it.
    pub fn restore(&self) -> Result<f64> {
        self.fetch_memory()?;
        fs::write(self.path("ping"), "")?;
        let begun = Instant::now();
        let job = self.launch()?;
        let answer = self.path("pong");
        self.until("the resumed process", || fs::read(&answer).ok())?;
        let restore_s = begun.elapsed().as_secs_f64();
        fs::remove_file(&answer)?;
        job.kill()?;
        Ok(restore_s)
    }

    /// The same for CRIU alone, from the same images, in a PID namespace that util-linux makes.
    pub fn restore_by_criu_alone(&self) -> Result<f64> {
        let images = self.path("exported-images");
        process::capture(self.ckpt_run(&["export", "1", "--format", "criu", "--to"]).arg(&images))?;
        self.fetch_memory()?;
        fs::write(self.path("ping"), "")?;
        let script = format!(
            "{} restore -d -D {} -W {} -o restore.log {} || exit 1; sleep 1000",
            self.criu.display(),
            images.display(),
            self.images().display(),
            CRIU_OPTIONS.join(" "),
        );
        let begun = Instant::now();
        let mut unshare = Command::new("unshare");
        unshare.args(["--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "sh", "-c", &script]);
        let mut child =
            unshare.current_dir(self.dir.path()).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        let answer = self.path("pong");
        let answered = self.until("the process that CRIU restores", || fs::read(&answer).ok());
        let restore_s = begun.elapsed().as_secs_f64();
        child.kill()?;
        child.wait()?;
        answered?;
        fs::remove_file(&answer)?;
        fs::remove_dir_all(&images)?;
        Ok(restore_s)
    }
}

impl Drop for Sandbox<'_> {
    fn drop(&mut self) {
        // Lazily: a process that is just being killed may still use it.
        let _ = Command::new("umount").arg("--lazy").arg(self.images()).status();
    }
}

/// The processes under ckpt-run.
pub struct Job<'b, 'a> {
    sandbox: &'b Sandbox<'a>,
    child: Child,
}

impl Job<'_, '_> {
    /// (longest gap between heartbeats, time until durable), seconds.
    pub fn checkpoint(&mut self) -> Result<(f64, f64)> {
        let (stall_s, saved) = self.saved()?;
        Ok((stall_s, saved["durable_s"].as_f64().context("no durable_s")?))
    }

    /// (longest gap between heartbeats, all pauses together as ckpt-run tells), seconds.
    pub fn pauses(&mut self) -> Result<(f64, f64)> {
        let (stall_s, saved) = self.saved()?;
        Ok((stall_s, saved["stall_s"].as_f64().context("no stall_s")?))
    }

    fn saved(&mut self) -> Result<(f64, serde_json::Value)> {
        self.sandbox.fetch_memory()?;
        self.sandbox.ask("reset", "reset-done")?;
        let text = process::capture(&mut self.sandbox.ckpt_run(&["checkpoint", "--json"]))?;
        let stall_s = self.sandbox.ask("report", "gap")?.parse()?;
        Ok((stall_s, serde_json::from_str(&text)?))
    }

    /// Changes all of the memory, or a twentieth: `all`, `dense`, `scattered`.
    pub fn change(&self, what: &str) -> Result<()> {
        self.sandbox.ask(&format!("change-{what}"), "changed").map(drop)
    }

    /// From now on, a twentieth is changed again and again: `dense`, `scattered`.
    pub fn rewrite(&self, what: &str) -> Result<()> {
        self.sandbox.ask(&format!("rewrite-{what}"), "rewriting").map(drop)
    }

    /// Longest gap between heartbeats while CRIU alone dumps the same process into a tmpfs.
    pub fn dump_by_criu_alone(&mut self) -> Result<f64> {
        let launcher = self.child.id();
        let init = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children"))?;
        let images = self.sandbox.images();
        self.sandbox.fetch_memory()?;
        self.sandbox.ask("reset", "reset-done")?;
        let mut nsenter = Command::new("nsenter");
        nsenter.args(["--target", init.trim(), "--pid", "--mount", "--"]).arg(self.sandbox.criu);
        nsenter.args([
            "dump",
            "--tree",
            ROOT_PID,
            "--leave-running",
            "--network-lock",
            "skip",
            "-o",
            "dump.log",
        ]);
        process::capture(nsenter.args(CRIU_OPTIONS).arg("-D").arg(&images))?;
        let stall_s = self.sandbox.ask("report", "gap")?.parse()?;
        // The memory is needed for the other one.
        for entry in fs::read_dir(&images)? {
            fs::remove_file(entry?.path())?;
        }
        Ok(stall_s)
    }

    /// SIGKILL to the launcher; its job dies with it.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Job<'_, '_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
