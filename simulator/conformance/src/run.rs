//! Runs every check in a process of its own, with a deadline.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use parking_lot::Mutex;

use crate::check::Check;
use crate::report::{Line, Outcome, Report};
use crate::{nccl, roles};

/// The prefix of the line in which a check's process reports its outcome.
pub const OUTCOME: &str = "conformance-outcome ";

/// The time limit of one check, in seconds: generous, for a busy machine. The variable sets a shorter limit where
/// several checks may hang.
const LIMIT_S: u64 = 120;
const LIMIT_VARIABLE: &str = "CONFORMANCE_LIMIT_S";
/// Where the directories of checks are, for a caller that may kill this program: it removes what is left.
const DIR_VARIABLE: &str = "CONFORMANCE_DIR";

fn limit() -> Duration {
    let own = std::env::var(LIMIT_VARIABLE).ok().and_then(|text| text.parse().ok());
    Duration::from_secs(own.unwrap_or(LIMIT_S))
}

/// Runs the checks of a driver and of NCCL, `jobs` at a time, and prints each result as it arrives.
pub fn all(libraries: (&Path, &Path), checks: &[&Check], jobs: usize) -> Result<Report> {
    let (lib, _) = libraries;
    let (driver_version, device) = identify(lib)?;
    let next = AtomicUsize::new(0);
    let lines = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let worker = || {
            while let Some(check) = checks.get(next.fetch_add(1, Ordering::Relaxed)) {
                let line = one(libraries, check);
                println!("{}", line.text());
                lines.lock().push(line);
            }
        };
        for _ in 0..jobs {
            scope.spawn(worker);
        }
    });
    let mut lines = lines.into_inner();
    lines.sort_by_key(|line| checks.iter().position(|check| check.name == line.name));
    Ok(Report { library: lib.display().to_string(), driver_version, device, checks: lines })
}

/// The driver's version and device, asked in a process of its own so that this one stays without a driver.
fn identify(lib: &Path) -> Result<(i32, String)> {
    let output = roles::command(lib, &["identify"])?.stdin(Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| line.strip_prefix("driver "));
    let line = line.with_context(|| {
        let errors = String::from_utf8_lossy(&output.stderr);
        format!("{} cannot be used as a CUDA driver: {}", lib.display(), errors.trim())
    })?;
    let (version, device) = line.split_once(' ').context("the driver's version is not there")?;
    Ok((version.parse()?, device.to_owned()))
}

fn one(libraries: (&Path, &Path), check: &Check) -> Line {
    let start = Instant::now();
    let outcome = run(libraries, check).unwrap_or_else(|error| Outcome::Fail(format!("{error:#}")));
    let duration_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
    Line { name: check.name, shows: check.shows, outcome, duration_ms }
}

fn run((lib, nccl_lib): (&Path, &Path), check: &Check) -> Result<Outcome> {
    // The simulated driver keeps a device's memory in a directory: one for each check makes them independent.
    let parent = std::env::var_os(DIR_VARIABLE).map(PathBuf::from).unwrap_or_else(|| {
        if Path::new("/dev/shm").is_dir() { "/dev/shm".into() } else { std::env::temp_dir() }
    });
    let directory = tempfile::Builder::new().prefix("conformance-").tempdir_in(parent)?;
    let stderr_file = directory.path().join("stderr");
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--lib").arg(lib).args(["--check", check.name]);
    command.env(nccl::PATH_VARIABLE, nccl_lib);
    command.env("SIMCUDA_DIR", directory.path().join("devices"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(std::fs::File::create(&stderr_file)?);
    let mut child = command.process_group(0).spawn().context("starting the check's process")?;
    let (output, ended) = read_until_deadline(&mut child)?;
    let status = child.wait()?;
    if let Some(text) = output.lines().rev().find_map(|line| line.strip_prefix(OUTCOME)) {
        return Ok(serde_json::from_str(text)?);
    }
    let errors = std::fs::read_to_string(&stderr_file).unwrap_or_default();
    let last: Vec<_> = errors.lines().rev().take(6).collect();
    let last: Vec<_> = last.into_iter().rev().collect();
    let how = if ended { describe(status) } else { format!("not done after {} s", limit().as_secs()) };
    Ok(Outcome::Fail(format!("{how}; {}", last.join(" | ")).trim_end_matches([' ', ';']).to_owned()))
}

/// What the process wrote until its end, and whether it ended by itself. After the deadline it is killed, with
/// the processes that it started.
fn read_until_deadline(child: &mut Child) -> Result<(String, bool)> {
    let mut stdout = child.stdout.take().context("the check's output is not there")?;
    let (send, receive) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What came before an error is kept; its end is the process's end in any case.
        let _ = stdout.read_to_end(&mut bytes);
        let _ = send.send(());
        String::from_utf8_lossy(&bytes).into_owned()
    });
    let ended = receive.recv_timeout(limit()).is_ok();
    let group = i32::try_from(child.id()).context("a process ID")?;
    // SAFETY: it sends a signal to the group that the child leads, which has not been waited for.
    unsafe { libc::kill(-group, libc::SIGKILL) };
    let output = reader.join().map_err(|_| anyhow::anyhow!("the reader panicked"))?;
    Ok((output, ended))
}

fn describe(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("killed by signal {signal}"),
        None => format!("ended without an outcome ({status})"),
    }
}
