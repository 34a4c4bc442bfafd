//! Device memory that goes away and comes back while a program has it, on simcuda, with a launcher that is played by
//! the test: parked, copied back, changed in part, staged or not.

mod played;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};
use std::{env, fs};

use ckpt_protocol::agent::{
    FromAgent, GpuReport, Hello, PROTOCOL_VERSION, RegionKind, SOCKET_VARIABLE, ToAgent,
};
use played::{Kept, hear, say};

const PATIENCE: Duration = Duration::from_secs(30);
const MIB: u64 = 1 << 20;

/// A program under the interposer, and what its launcher has of it.
struct Job {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    listener: Option<UnixListener>,
    stream: UnixStream,
    kept: Kept,
    attempt: u64,
    socket: PathBuf,
    _directory: tempfile::TempDir,
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn library() -> PathBuf {
    let test = env::current_exe().expect("this test");
    let deps = test.parent().expect("a directory");
    let built = |path: PathBuf| -> Option<(SystemTime, PathBuf)> {
        Some((fs::metadata(&path).ok()?.modified().ok()?, path))
    };
    let places = [deps.join("libckpt_interpose.so"), deps.with_file_name("libckpt_interpose.so")];
    places.into_iter().filter_map(built).max().expect("libckpt_interpose.so is built with this test").1
}

fn driver() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/simcuda/libcuda.so.1");
    let path = env::var_os("CKPT_TEST_LIBCUDA").map_or_else(default, PathBuf::from);
    assert!(path.is_file(), "{} is not there: call `cargo xtask test`", path.display());
    path
}

impl Job {
    /// Starts the program with these variables.
    fn start(variables: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = directory.path().join("socket");
        let program = directory.path().join("away");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/away.c");
        let compiled = Command::new("cc")
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1"])
            .arg(source)
            .arg("-o")
            .arg(&program)
            .arg(driver())
            .output()
            .expect("cc");
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        let listener = UnixListener::bind(&socket).expect("listening");
        listener.set_nonblocking(true).expect("set");
        let mut command = Command::new(&program);
        command.env("LD_LIBRARY_PATH", driver().parent().expect("a directory"));
        command.env("SIMCUDA_DIR", directory.path().join("devices")).env("SIMCUDA_MEMORY", "96MiB");
        command.env("LD_PRELOAD", library()).env(SOCKET_VARIABLE, &socket);
        command.envs(variables.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("started");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (stream, _) = greet(&listener);
        let mut job = Self {
            child,
            input,
            output,
            listener: Some(listener),
            stream,
            kept: Kept::new(7),
            attempt: 0,
            socket,
            _directory: directory,
        };
        assert_eq!(job.line(), "ready");
        job
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    fn does(&mut self, command: &str) {
        writeln!(self.input, "{command}").expect("told");
        assert_eq!(self.line(), "ok", "{command}");
    }

    fn stage(&mut self) {
        self.attempt += 1;
        self.kept.stage(&self.stream, self.attempt);
    }

    fn goes(&mut self, park: bool) -> GpuReport {
        self.listener = None;
        fs::remove_file(&self.socket).expect("removed");
        self.kept.sends_away(&self.stream, self.attempt, park)
    }

    /// Returns how many bytes were copied back.
    fn comes_back(&mut self) -> u64 {
        let listener = UnixListener::bind(&self.socket).expect("listening");
        listener.set_nonblocking(true).expect("set");
        let (stream, hello) = greet(&listener);
        let back = self.kept.bring_back(&stream, &hello);
        self.stream = stream;
        self.listener = Some(listener);
        match back {
            FromAgent::Back { copied_bytes, lost: None, .. } => copied_bytes,
            other => panic!("{other:?}"),
        }
    }

    /// Away and back, with all that belongs to it.
    fn round(&mut self, park: bool) -> (GpuReport, u64) {
        self.stage();
        let report = self.goes(park);
        let copied_bytes = self.comes_back();
        (report, copied_bytes)
    }
}

fn greet(listener: &UnixListener) -> (UnixStream, Hello) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(false).expect("set");
            stream.set_read_timeout(Some(PATIENCE)).expect("set");
            let FromAgent::Hello(hello) = hear(&stream) else { panic!("not a hello") };
            say(&stream, &ToAgent::Welcome { version: PROTOCOL_VERSION });
            return (stream, hello);
        }
        assert!(Instant::now() < deadline, "no agent came");
        sleep(Duration::from_millis(1));
    }
}

fn bytes_of(report: &GpuReport) -> u64 {
    report.regions.iter().map(|region| region.bytes).sum()
}

#[test]
fn parked_memory_is_not_copied_back() {
    let mut job = Job::start(&[]);
    job.does("fill 1");
    for _ in 0..3 {
        let (report, copied_bytes) = job.round(true);
        assert_eq!(copied_bytes, 0);
        assert_eq!((report.parked_bytes, report.unparked_because.as_deref()), (bytes_of(&report), None));
        job.does("check");
    }
    job.does("change 3");
    job.round(true);
    job.does("check");
}

#[test]
fn memory_that_is_not_parked_comes_from_the_mirror() {
    let mut job = Job::start(&[]);
    job.does("fill 9");
    let (report, copied_bytes) = job.round(false);
    assert!(copied_bytes >= 23 * MIB, "{copied_bytes}");
    assert_eq!((copied_bytes, report.parked_bytes), (bytes_of(&report), 0));
    job.does("check");
    for kind in [RegionKind::Allocation, RegionKind::Slab, RegionKind::Program, RegionKind::Pool] {
        assert!(report.regions.iter().any(|region| region.kind == kind), "{kind:?}: {:?}", report.regions);
    }
    assert!(report.regions.is_sorted_by_key(|region| region.address));
    // What the launcher could not keep comes from there too.
    job.stage();
    job.goes(true);
    job.kept.forget_parked();
    assert_eq!(job.comes_back(), bytes_of(&report));
    job.does("check");
}

#[test]
fn only_what_has_changed_is_copied() {
    let mut job = Job::start(&[("CKPT_CAPTURE", "changed")]);
    let changed =
        |report: &GpuReport| report.regions.iter().filter_map(|region| region.changed_bytes).sum::<u64>();
    job.does("fill 5");
    let (report, _) = job.round(true);
    assert_eq!(changed(&report), bytes_of(&report));
    let (report, _) = job.round(true);
    assert_eq!(changed(&report), 0);
    job.does("change 7");
    let (report, _) = job.round(false);
    assert_eq!(changed(&report), 8 * MIB, "7 MiB lie in four chunks");
    job.does("check");
    // Another mirror has nothing.
    job.kept = Kept::new(8);
    let (report, _) = job.round(false);
    assert_eq!(changed(&report), bytes_of(&report));
    job.does("check");
    // Allocations come and go.
    job.does("free 5");
    job.does("alloc 5000000");
    job.does("alloc 300");
    let (report, _) = job.round(false);
    assert!(changed(&report) < 10 * MIB, "{}", changed(&report));
    job.does("check");
    job.round(false);
    job.does("check");
}

#[test]
fn without_a_mirror_memory_goes_the_drivers_way() {
    let mut job = Job::start(&[]);
    job.does("fill 3");
    job.attempt += 1;
    let report = job.goes(true);
    assert_eq!((bytes_of(&report), report.parked_bytes), (0, 0));
    assert_eq!(job.comes_back(), 0);
    job.does("check");
}

#[test]
fn an_attempt_that_is_given_up_changes_nothing() {
    let mut job = Job::start(&[]);
    job.does("fill 4");
    job.stage();
    say(&job.stream, &ToAgent::Unstage { attempt: job.attempt });
    job.does("check");
    job.round(true);
    job.does("check");
}
