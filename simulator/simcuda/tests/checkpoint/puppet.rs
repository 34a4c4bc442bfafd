//! A program that makes driver calls on command (programs/puppet.c), and what /proc says of it.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use simcuda_machine::config::Config;
use tempfile::TempDir;

use super::common;

/// Long enough for anything that is to happen.
const LONG: Duration = Duration::from_secs(600);

pub const SUCCESS: i32 = 0;
pub const INVALID_VALUE: i32 = 1;
pub const OUT_OF_MEMORY: i32 = 2;
pub const NOT_INITIALIZED: i32 = 3;
pub const INVALID_DEVICE: i32 = 101;
pub const OPERATING_SYSTEM: i32 = 304;
pub const ILLEGAL_STATE: i32 = 401;
pub const NOT_READY: i32 = 600;
pub const NOT_SUPPORTED: i32 = 801;
pub const UNKNOWN: i32 = 999;

/// What cuCheckpointProcessGetState answers.
pub const RUNNING: &str = "0 0";
pub const LOCKED: &str = "0 1";
pub const CHECKPOINTED: &str = "0 2";
pub const FAILED: &str = "0 3";

pub fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LONG;
    loop {
        if let Some(done) = attempt() {
            return done;
        }
        assert!(Instant::now() < end, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| common::compile("puppet"));

/// A simulated machine: 2 devices of 64 MiB.
pub struct Machine(TempDir);

impl Machine {
    pub fn new() -> Self {
        Self(tempfile::tempdir_in("/dev/shm").expect("a directory for the devices"))
    }

    pub fn puppet(&self) -> Puppet {
        self.start(&[])
    }

    /// A puppet with these variables, without a context.
    pub fn puppet_with(&self, environment: &[(&str, &str)]) -> Puppet {
        self.start(environment)
    }

    /// A puppet to which the kernel refuses what sandboxes tend to refuse, with a context.
    pub fn sandboxed(&self) -> Puppet {
        self.initialised_with(&[("PUPPET_SANDBOX", "1")])
    }

    /// A puppet with a context and these variables.
    pub fn initialised_with(&self, environment: &[(&str, &str)]) -> Puppet {
        let mut puppet = self.start(environment);
        assert_eq!(puppet.ask("init"), "0", "{}", puppet.errors());
        puppet
    }

    /// Makes it a machine with these GPUs: IDs and names.
    pub fn set_gpus(&self, gpus: &[(usize, &str)]) {
        let lines: String = gpus.iter().map(|(id, name)| format!("{id} 64MiB {name}\n")).collect();
        fs::write(self.0.path().join("gpus"), lines).expect("a file");
    }

    /// The UUID of the GPU with this ID, in hexadecimal digits.
    pub fn uuid(&self, id: usize) -> String {
        let config = Config::from_environment().expect("settings");
        let config = Config { directory: self.0.path().to_owned(), ..config };
        let gpus = config.gpus().expect("GPUs");
        let gpu = gpus.iter().find(|gpu| gpu.id == id).expect("a GPU of this ID");
        gpu.uuid.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn start(&self, environment: &[(&str, &str)]) -> Puppet {
        let directory = tempfile::tempdir().expect("a directory");
        let fifo = directory.path().join("commands");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::from_raw_mode(0o600)).expect("a FIFO");
        let log = directory.path().join("log");
        let errors = File::create(directory.path().join("errors")).expect("a file");
        // A session of its own: CRIU refuses to save part of one.
        let child = Command::new("setsid")
            .arg(&*PROGRAM)
            .args([common::library().as_path(), &fifo, &log])
            .env("SIMCUDA_DIR", self.0.path())
            .env("SIMCUDA_DEVICES", "2")
            .env("SIMCUDA_MEMORY", "64MiB")
            .envs(environment.iter().copied())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .expect("the program");
        let mut puppet =
            Puppet { pid: child.id() as i32, child, directory, read_bytes: 0, of_threads: Vec::new() };
        let ready = puppet.line(|line| !line.starts_with("thread"));
        assert_eq!(ready, format!("ready {}", puppet.pid));
        puppet
    }

    /// A puppet with a context.
    pub fn initialised(&self) -> Puppet {
        self.initialised_with(&[])
    }
}

/// One program. It does not outlive its test.
pub struct Puppet {
    child: Child,
    pub pid: i32,
    pub directory: TempDir,
    read_bytes: usize,
    of_threads: Vec<String>,
}

impl Drop for Puppet {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = fs::read_to_string(self.directory.path().join("log")).unwrap_or_default();
            eprintln!("--- log of {}\n{log}--- errors\n{}---", self.pid, self.errors());
        }
    }
}

impl Puppet {
    pub fn errors(&self) -> String {
        fs::read_to_string(self.directory.path().join("errors")).unwrap_or_default()
    }

    /// Has it carry out a command; the answer without the command's name.
    pub fn ask(&mut self, command: &str) -> String {
        self.send(command);
        self.answer(command)
    }

    /// As [`Self::ask`], for an answer that is only a result.
    pub fn call(&mut self, command: &str) -> i32 {
        self.ask(command).parse().expect("a number")
    }

    pub fn send(&self, command: &str) {
        let fifo = OpenOptions::new().write(true).open(self.directory.path().join("commands"));
        fifo.and_then(|mut fifo| writeln!(fifo, "{command}")).expect("a FIFO that takes a line");
    }

    /// The answer to a command sent before.
    pub fn answer(&mut self, command: &str) -> String {
        let name = command.split(' ').next().expect("a command");
        let line = self.line(|line| !line.starts_with("thread "));
        line.strip_prefix(name).unwrap_or_else(|| panic!("{line:?} answers {command:?}")).trim().to_owned()
    }

    /// What a thread says next: the words after "thread".
    pub fn of_thread(&mut self) -> Vec<String> {
        let line = self.line(|line| line.starts_with("thread "));
        line.split(' ').skip(1).map(str::to_owned).collect()
    }

    fn line(&mut self, wanted: impl Fn(&str) -> bool) -> String {
        until("an answer", || {
            let log = fs::read_to_string(self.directory.path().join("log")).unwrap_or_default();
            let whole = log.rfind('\n').map_or(0, |end| end + 1);
            self.of_threads.extend(log[self.read_bytes..whole].lines().map(str::to_owned));
            self.read_bytes = whole;
            if let Ok(Some(status)) = self.child.try_wait()
                && self.of_threads.is_empty()
            {
                panic!("the program ended: {status}");
            }
            let index = self.of_threads.iter().position(|line| wanted(line))?;
            Some(self.of_threads.remove(index))
        })
    }

    /// Has it start a thread that allocates; its ID, once it has said that it starts.
    pub fn spawn(&mut self) -> i32 {
        assert_eq!(self.call("spawn"), 0);
        let words = self.of_thread();
        assert_eq!(words[1], "starts");
        words[0].parse().expect("a thread's ID")
    }

    /// The ID of the thread that carries out what others ask for.
    pub fn control_thread(&mut self) -> i32 {
        let answer = self.ask("thread-id");
        answer.strip_prefix("0 ").expect("success").parse().expect("a thread's ID")
    }

    /// Waits until a thread sleeps on a futex.
    pub fn until_parked(&self, thread: i32) {
        let path = format!("/proc/{}/task/{thread}/syscall", self.pid);
        let futex = format!("{} ", libc::SYS_futex);
        until("a thread at the lock", || {
            fs::read_to_string(&path).ok().filter(|call| call.starts_with(&futex))
        });
    }

    /// From now on the program lives as long as `child`, of which it is a descendant.
    pub fn runs_below(&mut self, child: Child) {
        self.child = child;
    }

    /// Waits for the end of the program, killed by another process, and reaps it.
    pub fn ended(&mut self) {
        until("the program's end", || self.child.try_wait().expect("a child"));
    }
}

/// What the descriptors of a process are.
fn descriptors(pid: i32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("a process");
    entries
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .map(|link| link.to_string_lossy().into_owned())
        .collect()
}

/// Whether a process holds a descriptor and whether it holds a mapping that CRIU refuses.
pub fn dump_blockers(pid: i32) -> (bool, bool) {
    let is_descriptor = |link: &String| {
        link.contains("userfaultfd") || link.contains("landlock-ruleset") || link.contains("secretmem")
    };
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("a process");
    let is_mapping = |line: &str| line.contains("secretmem") || line.contains("socket:[");
    (descriptors(pid).iter().any(is_descriptor), maps.lines().any(is_mapping))
}

/// Whether a process can be asked: the descriptors of its control are there.
pub fn has_control(pid: i32) -> bool {
    descriptors(pid).iter().any(|link| link.contains("simcuda-control"))
}

/// Whether anything is mapped at an address.
pub fn is_mapped(pid: i32, address: u64) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("a process");
    maps.lines().any(|line| {
        let (start, rest) = line.split_once('-').expect("a range");
        let end = rest.split(' ').next().expect("a range");
        let number = |text| u64::from_str_radix(text, 16).expect("a hexadecimal number");
        (number(start)..number(end)).contains(&address)
    })
}
