//! Code shared by the end-to-end tests: a sandbox directory, and a `ckpt-run` that runs a job in it. The tests can kill
//! it with all its descendants, and a failed test does so.
//!
//! The tests use the real CRIU and the real Python with PyTorch that `cargo xtask test` provides. Their paths
//! come from the environment (see `xtask`); the defaults are the paths that xtask uses.

#![forbid(unsafe_code)]

pub mod cgroups;
pub mod file_systems;
pub mod gpu;
pub mod habits;
pub mod machines;
pub mod packs;
pub mod power_loss;
pub mod processes;
pub mod schema;
pub mod system_calls;
pub mod trees;
pub mod virtual_machine;

use serde_json::Value;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// How long a test waits for a condition: longer than anything takes on a slow and busy machine.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(600);

/// Polling interval for a condition that costs nothing.
const SHORTEST_POLL: Duration = Duration::from_millis(5);
/// Polling interval for a condition that takes long to check.
const LONGEST_POLL: Duration = Duration::from_millis(100);

/// The repository's root.
///
/// # Panics
/// Never: this crate lies in it.
#[must_use]
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

/// The path in the environment variable `name`, or `default`.
pub fn from_env(name: &str, default: impl FnOnce() -> PathBuf) -> PathBuf {
    std::env::var_os(name).map_or_else(default, PathBuf::from)
}

/// The `ckpt-run` under test.
#[must_use]
pub fn ckpt_run() -> PathBuf {
    let path = from_env("CKPT_TEST_BIN", || {
        let test = std::env::current_exe().expect("the test's own path");
        test.parent().and_then(Path::parent).expect("target/PROFILE/deps").join("ckpt-run")
    });
    assert!(path.is_file(), "{} is not there: call `cargo xtask test`", path.display());
    path
}

/// The CRIU to test with.
#[must_use]
pub fn criu() -> PathBuf {
    let path = from_env("CKPT_CRIU", || workspace().join("target/tools/criu/bin/criu"));
    assert!(path.is_file(), "{} is not there: call `cargo xtask test`", path.display());
    path
}

/// Files with which tests control their jobs. What is done to files right before a job is killed is taken for the job's:
/// a file that a test deletes then would come back.
const CONTROL_FILES: &[&str] = &[
    "busy", "compute", "crash", "done", "end", "fail", "go", "hang", "leave", "more", "pass-*", "private",
    "ready", "release", "saved", "slow", "step", "stop-*", "wanted",
];

/// Set to a number, jobs of the tests copy their memory before each dump, in so many rounds.
pub const PRECOPY_VARIABLE: &str = "CKPT_TEST_PRECOPY";

/// The Python that has PyTorch.
#[must_use]
pub fn python() -> PathBuf {
    from_env("CKPT_TEST_PYTHON", || "/usr/bin/python3".into())
}

/// Its torchrun.
#[must_use]
pub fn torchrun() -> PathBuf {
    from_env("CKPT_TEST_TORCHRUN", || "/usr/bin/torchrun".into())
}

/// The directory of the test programs.
#[must_use]
pub fn programs() -> PathBuf {
    workspace().join("tests/programs")
}

/// The training script of the examples.
#[must_use]
pub fn train_script() -> PathBuf {
    workspace().join("examples/train.py")
}

/// torchrun with two ranks on this machine, without the script and its options.
///
/// # Panics
/// When no port is free.
#[must_use]
pub fn torchrun_with_two_ranks() -> Vec<std::ffi::OsString> {
    torchrun_with_ranks(2)
}

/// The same with so many ranks. It gets a free port below the ephemeral range, since tests run in parallel; the port
/// behind it is free for the ranks.
///
/// # Panics
/// When no port is free.
#[must_use]
pub fn torchrun_with_ranks(count: u32) -> Vec<std::ffi::OsString> {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let port = (0..1000)
        .map(|_| {
            let next = NEXT.fetch_add(2, std::sync::atomic::Ordering::Relaxed);
            20_000 + u16::try_from((std::process::id() * 37 + next) % 10_000).expect("below 10000")
        })
        .find(|port| (*port..port + 2).all(|port| std::net::TcpListener::bind(("0.0.0.0", port)).is_ok()))
        .expect("a free port");
    let mut argv = vec![torchrun().into_os_string()];
    argv.extend(["-r", "1", "-t", "1", "--master_port"].map(Into::into));
    argv.extend([port.to_string().into(), format!("--nproc_per_node={count}").into()]);
    argv
}

/// Polls until `condition` returns a value. A condition that starts processes is polled less often: the job that the
/// test waits for needs the CPU.
///
/// # Panics
/// After [`WAIT_TIMEOUT`], with `what`.
pub fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        let begun = Instant::now();
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "timed out waiting for: {what}");
        std::thread::sleep((begun.elapsed() * 2).clamp(SHORTEST_POLL, LONGEST_POLL));
    }
}

pub use ckpt_test_skip::is_full_run;

/// A random generator of one test. An ordinary run does the same each time, so that nothing fails in it that is new; a full
/// run looks for that.
#[must_use]
pub fn rng_of_run() -> fastrand::Rng {
    seeded_rng(if is_full_run() { fastrand::u64(..) } else { 1 })
}

/// A random generator whose numbers depend on the seed only. It prints the seed, which a failed test shows.
#[must_use]
pub fn seeded_rng(seed: u64) -> fastrand::Rng {
    println!("random seed {seed}");
    fastrand::Rng::with_seed(seed)
}

/// A directory for one test, removed at its end.
pub struct Sandbox {
    dir: tempfile::TempDir,
    /// Path of the store; `.ckpt-run` in the sandbox unless a test changes it.
    pub store: PathBuf,
    /// Environment variables of every `ckpt-run`.
    pub variables: Vec<(String, String)>,
}

impl Sandbox {
    /// A fresh directory, below `target` so that it lies on a disk.
    ///
    /// # Panics
    /// When it cannot be made.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        let parent = workspace().join("target/tests");
        fs::create_dir_all(&parent).expect("target/tests");
        Self::new_in(&parent)
    }

    /// A fresh directory in another one.
    ///
    /// # Panics
    /// When it cannot be made.
    #[must_use]
    pub fn new_in(parent: &Path) -> Self {
        let dir = tempfile::Builder::new().prefix("t-").tempdir_in(parent).expect("a directory");
        let store = dir.path().join(".ckpt-run");
        Self { dir, store, variables: Vec::new() }
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Content of a file in the directory; empty if there is none.
    #[must_use]
    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path().join(name)).unwrap_or_default()
    }

    /// Makes a CRIU in the directory that says of any kernel that it tracks changes to memory.
    ///
    /// # Panics
    /// When it cannot be written.
    #[must_use]
    pub fn criu_that_seems_to_track_memory(&self) -> PathBuf {
        let (script, real) = (self.path().join("criu"), criu());
        let text = format!(
            "#!/bin/sh\ncase \"$*\" in *mem_dirty_track*) exit 0;; esac\nexec {} \"$@\"\n",
            real.display()
        );
        fs::write(&script, text).expect("a script");
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("a program");
        script
    }

    /// A `ckpt-run` command in this directory, with this store and without an interval and restarts.
    #[must_use]
    pub fn command<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(ckpt_run());
        command.args(arguments).current_dir(self.path()).stdin(Stdio::null());
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("CKPT_")) {
            command.env_remove(name);
        }
        if let Some(rounds) = std::env::var_os(PRECOPY_VARIABLE) {
            command.env("CKPT_PRECOPY", rounds);
        }
        command.env("CKPT_STORE", &self.store).env("CKPT_CRIU", criu()).env("CKPT_INTERVAL", "off");
        command.env("CKPT_MAX_RESTARTS", "0").env("CKPT_FILES_EXCLUDE", CONTROL_FILES.join(","));
        let path = std::env::var_os("CKPT_TEST_PYTHONPATH")
            .unwrap_or_else(|| workspace().join("target/tools/uvloop/lib/python3.11/site-packages").into());
        command.env("PYTHONPATH", path).env("PYTHONDONTWRITEBYTECODE", "1").env("OMP_NUM_THREADS", "1");
        command.envs(self.variables.iter().cloned());
        command
    }

    /// Runs a `ckpt-run` command to its end.
    ///
    /// # Panics
    /// When it cannot be executed.
    pub fn call<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Output {
        self.command(arguments).output().expect("ckpt-run runs")
    }

    /// Runs a `ckpt-run` command that has to succeed; returns its stdout without the last line's end.
    ///
    /// # Panics
    /// When it fails.
    pub fn ok<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> String {
        let output = self.call(arguments);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{}: {out}{err}", output.status);
        out.trim_end().to_owned()
    }

    /// Runs a command that prints JSON.
    ///
    /// # Panics
    /// When it fails or prints something else.
    pub fn json<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Value {
        serde_json::from_str(&self.ok(arguments)).expect("JSON")
    }

    /// IDs of the snapshots that `ls` shows, oldest first.
    pub fn snapshots(&self) -> Vec<String> {
        let output = self.call(["ls", "--json"]);
        // 1: one of them cannot be read.
        assert!(matches!(output.status.code(), Some(0 | 1)), "{output:?}");
        let listed: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let ids = listed.as_array().expect("a list").iter();
        ids.map(|row| row["id"].as_str().expect("an ID").to_owned()).collect()
    }

    /// Checks that every snapshot that `ls` shows is sound.
    ///
    /// # Panics
    /// When one is not.
    pub fn verify_all(&self) {
        let output = self.call(["verify", "--all"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }

    /// The directory of the only job in the store.
    ///
    /// # Panics
    /// When there is not exactly one.
    #[must_use]
    pub fn job_dir(&self) -> PathBuf {
        let jobs: Vec<_> = fs::read_dir(self.store.join("jobs"))
            .expect("jobs")
            .map(|job| job.expect("a job").path())
            .collect();
        assert_eq!(jobs.len(), 1, "{jobs:?}");
        jobs[0].clone()
    }

    /// Starts `ckpt-run ARGUMENTS` in the background; its output goes to `NAME.out` and `NAME.err`, appended.
    pub fn start<S: AsRef<OsStr>>(&self, name: &str, arguments: impl IntoIterator<Item = S>) -> Running {
        self.start_command(name, self.command(arguments))
    }

    /// The same for a prepared command.
    ///
    /// # Panics
    /// When it cannot be executed.
    pub fn start_command(&self, name: &str, mut command: Command) -> Running {
        let log = |kind: &str| {
            let path = self.path().join(format!("{name}.{kind}"));
            File::options().append(true).create(true).open(path).expect("a log")
        };
        let child = command.stdout(log("out")).stderr(log("err")).spawn().expect("ckpt-run runs");
        Running { child, logs: self.path().join(name), store: self.store.clone() }
    }
}

/// Copies the environment variables of `inner` to a command that starts `inner`.
pub fn set_variables(command: &mut Command, inner: &Command) {
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
}

/// A `ckpt-run` in the background; killed with its job when dropped.
pub struct Running {
    child: Child,
    logs: PathBuf,
    store: PathBuf,
}

impl Running {
    /// The launcher's PID.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Output of the launcher and of the job so far.
    #[must_use]
    pub fn said(&self) -> String {
        let read = |kind: &str| fs::read_to_string(self.logs.with_extension(kind)).unwrap_or_default();
        format!("--- stdout\n{}--- stderr\n{}", read("out"), read("err"))
    }

    /// Waits until it ends; returns its exit code.
    ///
    /// # Panics
    /// When it does not end, or dies of a signal.
    pub fn wait(&mut self) -> i32 {
        let status = self.wait_status();
        status.code().unwrap_or_else(|| panic!("ckpt-run: {status}\n{}", self.said()))
    }

    /// Waits until it ends, by exit or by signal.
    ///
    /// # Panics
    /// When it does not end.
    pub fn wait_status(&mut self) -> ExitStatus {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                return status;
            }
            assert!(Instant::now() < deadline, "ckpt-run does not end\n{}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether it has ended.
    ///
    /// # Panics
    /// When it cannot be waited for.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_some()
    }

    /// Polls until `condition` returns a value; fails when ckpt-run ends first.
    ///
    /// # Panics
    /// When ckpt-run ends, or after [`WAIT_TIMEOUT`].
    pub fn until<T>(&mut self, what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
        until(what, || {
            let value = condition();
            if value.is_none() && self.has_ended() {
                let status = self.wait_status();
                panic!("ckpt-run ended before: {what} ({status})\n{}", self.said());
            }
            value
        })
    }

    /// Waits until the job's control socket answers.
    pub fn until_answering(&mut self, sandbox: &Sandbox) {
        let pid = u64::from(self.child.id());
        self.until("a launcher that answers", || {
            let output = sandbox.call(["status", "--json"]);
            let status: Value = serde_json::from_slice(&output.stdout).ok()?;
            status.as_array()?.iter().any(|job| job["launcher_pid"].as_u64() == Some(pid)).then_some(())
        });
    }

    /// Takes a snapshot; returns its ID.
    ///
    /// # Panics
    /// When it fails.
    pub fn checkpoint(&self, sandbox: &Sandbox) -> String {
        let output = sandbox.call(["checkpoint"]);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{err}\n{}", self.said());
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// The same for one of several jobs in the store.
    ///
    /// # Panics
    /// When it fails.
    pub fn checkpoint_of(&self, sandbox: &Sandbox, job: &str) -> String {
        let output = sandbox.call(["checkpoint", job]);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{err}\n{}", self.said());
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// PIDs of all descendants of the launcher, in the PID namespace of the tests.
    #[must_use]
    pub fn descendants(&self) -> Vec<i32> {
        processes::descendants(self.child.id().cast_signed())
    }

    /// Sends SIGKILL to the launcher and to all its descendants; returns when all of them have ended.
    ///
    /// # Panics
    /// When something stays.
    pub fn kill_everything(&mut self) {
        let below = self.descendants();
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
        for pid in &below {
            kill(*pid);
        }
        until("the end of everything that was killed", || {
            below.iter().all(|pid| processes::has_ended(*pid)).then_some(())
        });
        assert!(self.store.exists() || !self.store.is_absolute(), "it is an address, or there");
    }

    /// Sends SIGKILL to the launcher alone; its job has to end with it.
    ///
    /// # Panics
    /// When something stays.
    pub fn kill_launcher(&mut self) {
        let below = self.descendants();
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
        until("the end of the job of a killed launcher", || {
            below.iter().all(|pid| processes::has_ended(*pid)).then_some(())
        });
    }

    /// Sends a signal to the launcher.
    ///
    /// # Panics
    /// When it cannot be sent.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("the launcher is there");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            eprintln!("{}", self.said());
        }
    }
}

fn kill(pid: i32) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid) {
        // It may have ended already.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}
