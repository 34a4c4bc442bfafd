//! In front of the driver: every route by which programs find it, what stands at each entry point, and what happens
//! where a program gets past. The launcher is played by the test; the driver is simcuda, or one that only counts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use ckpt_protocol::agent::{FromAgent, Hello, PROTOCOL_VERSION, SOCKET_VARIABLE, ToAgent};
use ckpt_protocol::frame;
use cuda_abi::{Class, ENTRY_POINTS, Lookup, lookup};

#[path = "front/nccl.rs"]
mod nccl;

const LONG: Duration = Duration::from_secs(60);

/// What each entry point's class is meant to be: a row that is lost, or has become another, shows.
const CLASSES: &str = include_str!("entry_points.txt");

fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this test's path");
    let deps = test.parent().expect("a directory");
    let built = |path: PathBuf| Some((fs::metadata(&path).ok()?.modified().ok()?, path));
    let places = [deps.join("libckpt_interpose.so"), deps.with_file_name("libckpt_interpose.so")];
    places.into_iter().filter_map(built).max().expect("libckpt_interpose.so is built with this test").1
}

/// simcuda, as `libcuda.so.1`.
fn driver() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/simcuda/libcuda.so.1");
    let path = std::env::var_os("CKPT_TEST_LIBCUDA").map_or_else(default, PathBuf::from);
    assert!(path.is_file(), "{} is not there: call `cargo xtask test`", path.display());
    path
}

/// What handlers of other entry points ask the driver about.
const ASKED: &[&str] = &["cuCtxGetCurrent"];

fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LONG;
    loop {
        if let Some(done) = attempt() {
            return done;
        }
        assert!(Instant::now() < end, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A launcher, and a directory for what its job needs.
struct Launcher {
    directory: tempfile::TempDir,
    listener: UnixListener,
}

impl Launcher {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let listener = Self::listen(&directory.path().join("socket"));
        Self { directory, listener }
    }

    fn listen(path: &Path) -> UnixListener {
        let listener = UnixListener::bind(path).expect("a listener");
        listener.set_nonblocking(true).expect("set");
        listener
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Compiles a program of `tests/programs` into the directory.
    fn compile(&self, source: &str, output: &str, options: &[&str]) -> PathBuf {
        let path = self.path(output);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-rdynamic", "-I"]);
        cc.arg(self.directory.path());
        let result = cc.arg(source).arg("-o").arg(&path).args(options).output().expect("cc");
        assert!(result.status.success(), "{}", String::from_utf8_lossy(&result.stderr));
        path
    }

    fn compile_with_driver(&self, source: &str, output: &str, more: &[&str]) -> PathBuf {
        let path = driver();
        let options = [more, &[path.to_str().expect("text")]].concat();
        self.compile(source, output, &options)
    }

    /// A command that finds the driver; without the interposer.
    fn plain(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", driver().parent().expect("a directory"));
        command.env("SIMCUDA_DIR", self.directory.path()).env("SIMCUDA_MEMORY", "64MiB");
        command
    }

    fn preloaded(&self, program: &Path) -> Command {
        let mut command = self.plain(program);
        command.env("LD_PRELOAD", library()).env(SOCKET_VARIABLE, self.path("socket"));
        command
    }

    /// The next agent that is like that; others are let go at the end.
    fn next_that(&self, what: &str, is: impl Fn(&Hello) -> bool) -> Agent {
        let mut others = Vec::new();
        until(what, || {
            let (stream, _) = self.listener.accept().ok()?;
            stream.set_nonblocking(false).expect("set");
            stream.set_read_timeout(Some(LONG)).expect("set");
            let FromAgent::Hello(hello) = frame::read(&mut &stream).ok()? else { panic!("not a hello") };
            frame::write(&mut &stream, &ToAgent::Welcome { version: PROTOCOL_VERSION }).ok()?;
            if hello.is_detached {
                // No mirror was staged, so all memory went the driver's way.
                frame::write(&mut &stream, &ToAgent::Deliver { mirror: 0, bytes: 0, parked: 0 }).ok()?;
            }
            let agent = Agent { stream, hello };
            if is(&agent.hello) {
                return Some(agent);
            }
            others.push(agent);
            None
        })
    }

    fn agent_of(&self, program: &Program) -> Agent {
        self.next_that("the program's agent", |hello| hello.pid == program.child.id())
    }

    /// Has the path of the socket gone while agents are away, as the launcher does it.
    fn while_away(&mut self, agents: Vec<Agent>, work: impl FnOnce()) {
        fs::remove_file(self.path("socket")).expect("removed");
        let pids: BTreeSet<u32> = agents.iter().map(|agent| agent.hello.pid).collect();
        for agent in agents {
            let answer = agent.quiesce();
            assert!(matches!(answer, FromAgent::Quiesced { attempt: 1, .. }), "{answer:?}");
        }
        work();
        self.listener = Self::listen(&self.path("socket"));
        let mut back = BTreeSet::new();
        for _ in &pids {
            let agent = self.next_that("an agent that is back", |hello| hello.away == Some(1));
            let answer: FromAgent = frame::read(&mut &agent.stream).expect("a back");
            assert_eq!(answer, FromAgent::Back { attempt: 1, restored: false, copied_bytes: 0, lost: None });
            back.insert(agent.hello.pid);
        }
        assert_eq!(back, pids);
    }
}

struct Agent {
    stream: UnixStream,
    hello: Hello,
}

impl Agent {
    fn quiesce(&self) -> FromAgent {
        let timeout_ms = u64::try_from(LONG.as_millis()).expect("fits");
        frame::write(&mut &self.stream, &ToAgent::Quiesce { attempt: 1, timeout_ms, park: false })
            .expect("asked");
        frame::read(&mut &self.stream).expect("an answer")
    }
}

/// A program with pipes; neither it nor its children outlive its test.
struct Program {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Program {
    fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().expect("started");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { input: child.stdin.take(), child, output }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    fn lines_until(&mut self, last: &str) -> Vec<String> {
        let lines = std::iter::from_fn(|| Some(self.line()).filter(|line| line != last && !line.is_empty()));
        lines.collect()
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input.as_mut().expect("open"), "{line}").expect("written");
    }

    /// Ends its input; returns its exit code.
    fn ends(&mut self) -> Option<i32> {
        drop(self.input.take());
        until("the program's end", || self.child.try_wait().expect("a child")).code()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let group = libc::pid_t::try_from(self.child.id()).expect("a process ID");
        // SAFETY: kill takes plain numbers. The program leads a group of its own, which was its own from its start.
        unsafe { libc::kill(-group, libc::SIGKILL) };
        let _ = self.child.wait();
    }
}

fn class_name(class: Option<Class>) -> &'static str {
    match class {
        Some(Class::Virtualise) => "virtualise",
        Some(Class::Track) => "track",
        Some(Class::Gate) => "gate",
        Some(Class::Leave) => "leave",
        Some(Class::Taint) => "taint",
        None => "legacy",
    }
}

#[test]
fn the_table_has_each_entry_point_with_its_class() {
    let symbols = ENTRY_POINTS.iter().flat_map(|row| {
        let names = std::iter::once(row.symbol).chain(row.per_thread.map(|(name, _)| name));
        names.map(|name| format!("{} {name}", class_name(row.class)))
    });
    let table: BTreeSet<String> = symbols.collect();
    let meant: BTreeSet<String> = CLASSES.lines().map(str::to_owned).collect();
    let missing: Vec<_> = meant.difference(&table).collect();
    let new: Vec<_> = table.difference(&meant).collect();
    assert!(missing.is_empty() && new.is_empty(), "no longer there: {missing:#?}; not in the list: {new:#?}");
}

/// Each entry point by its exported symbol, called while the gate is closed: those that may change what a checkpoint
/// saves wait and do not reach the driver, the others pass, and in the end each has been called once.
#[test]
fn at_a_closed_gate_each_entry_point_does_what_its_class_says() {
    let mut launcher = Launcher::new();
    let classes: BTreeMap<&str, &str> = CLASSES
        .lines()
        .map(|line| line.split_once(' ').expect("a class and a name"))
        .map(|(class, name)| (name, class))
        .collect();
    let (typed, legacy): (Vec<_>, Vec<_>) = classes.iter().partition(|(_, class)| **class != "legacy");
    let rows = typed.iter().chain(&legacy).map(|(name, _)| format!("ROW({name})\n"));
    let rows = format!("#undef TYPED\n#define TYPED {}\n{}", typed.len(), rows.collect::<String>());
    fs::write(launcher.path("symbols.h"), rows).expect("written");
    let soname = ["-shared", "-fPIC", "-fno-builtin", "-Wl,-soname,libcuda.so.1"];
    let fake = launcher.compile("fake_driver.c", "libcuda.so.1", &soname);
    let program = launcher.compile("matrix.c", "matrix", &[fake.to_str().expect("text"), "-lpthread"]);
    let mut command = launcher.preloaded(&program);
    command.env("LD_LIBRARY_PATH", launcher.directory.path());
    let mut program = Program::start(command);
    assert_eq!(program.line(), "ready");
    let agent = launcher.agent_of(&program);
    launcher.while_away(vec![agent], || {
        program.say("call");
        let lines = program.lines_until("settled");
        let expected = classes.iter().map(|(name, class)| match *class {
            "leave" => format!("passed {name} 1"),
            _ => format!("parked {name} 0"),
        });
        assert_eq!(lines.iter().cloned().collect::<BTreeSet<_>>(), expected.collect::<BTreeSet<_>>());
    });
    program.say("end");
    let called: BTreeSet<String> = program.lines_until("").into_iter().collect();
    let once: BTreeSet<String> = classes.keys().map(|name| format!("called {name} 1")).collect();
    // What handlers ask the driver about has no effect.
    let is_asked = |line: &&String| !ASKED.iter().any(|name| line.starts_with(&format!("called {name} ")));
    let other: Vec<_> = once.symmetric_difference(&called).filter(is_asked).collect();
    assert!(other.is_empty(), "{other:#?}");
    assert_eq!(program.ends(), Some(0));
}

/// What `routes` prints, by route.
fn routes(mut command: Command, driver: &Path, queries: &str) -> BTreeMap<String, String> {
    command.arg(driver);
    let mut program = Program::start(command);
    let mut input = program.input.take().expect("a pipe");
    let queries = queries.to_owned();
    let writer = std::thread::spawn(move || input.write_all(queries.as_bytes()).expect("written"));
    let lines = program.lines_until("");
    writer.join().expect("written");
    assert_eq!(program.ends(), Some(0), "{lines:?}");
    let route =
        |line: String| line.split_once(": ").map(|(route, found)| (route.to_owned(), found.to_owned()));
    lines.into_iter().map(|line| route(line).expect("a route")).collect()
}

/// Names, versions and flags to ask cuGetProcAddress for: each name at each of its versions and just before it.
fn queries() -> Vec<(&'static str, u32, u64)> {
    let mut queries = BTreeSet::new();
    for row in ENTRY_POINTS {
        for version in [row.since, row.since - 10, 13000] {
            for flags in [0, 1, 2] {
                queries.insert((row.public_name, version, flags));
            }
        }
    }
    queries.extend([("cuNoSuchFunction", 13000, 0), ("cuMemAlloc_v2", 13000, 0), ("cuInit", 0, 0)]);
    queries.into_iter().collect()
}

/// Runs `routes` with the driver under one file name, plain and with the interposer.
fn look_up_everything(launcher: &Launcher, driver: &Path) {
    let program = launcher.compile("routes.c", "routes", &["-ldl"]);
    let queries = queries();
    let text: String =
        queries.iter().map(|(name, version, flags)| format!("{name} {version} {flags}\n")).collect();
    let plain = routes(launcher.plain(&program), driver, &text);
    let with = routes(launcher.preloaded(&program), driver, &text);
    assert!(with.keys().eq(plain.keys()));
    let file = driver.file_name().and_then(|name| name.to_str()).expect("text");
    for (route, found) in &plain {
        // The driver's function has become ours of the same name, and nothing else is another one.
        let expected = match found.strip_prefix(file) {
            Some(name) => format!("libckpt_interpose.so{name}"),
            None => found.clone(),
        };
        // A driver that only others can see is seen through the default scope, since we are in that.
        let is_scope = route.starts_with("local default cu") || route.starts_with("local next cu");
        if is_scope && found == "none" && !route.ends_with("cuNoSuchFunction") {
            assert!(with[route].starts_with("libckpt_interpose.so "), "{route}: {}", with[route]);
        } else {
            assert_eq!(with[route], expected, "{route}");
        }
    }
    assert_eq!(with["handle"], "libckpt_interpose.so cuInit");
    for (name, version, flags) in queries {
        // What the driver hands out to a program of this version; simcuda is one of 13.0.
        let (Lookup::Found(symbol), true) = (lookup(name, version, flags == 2), version <= 13000) else {
            continue;
        };
        let route = format!("v2 {name} {version} {flags} = 0, 0");
        let Some(found) = with.get(&route) else { continue };
        assert_eq!(found, &format!("libckpt_interpose.so {symbol}"), "{route}");
    }
    let handed_out = with.keys().filter(|route| route.starts_with("v2 cu") && route.ends_with("= 0, 0"));
    assert!(handed_out.count() > 400);
}

#[test]
fn every_route_leads_to_us() {
    let launcher = Launcher::new();
    look_up_everything(&launcher, &driver());
}

#[test]
fn a_driver_under_another_name_is_known_by_its_soname() {
    let launcher = Launcher::new();
    let copy = launcher.path("renamed.so");
    fs::copy(driver(), &copy).expect("copied");
    look_up_everything(&launcher, &copy);
}

#[test]
fn other_preloaded_libraries_are_not_given_themselves() {
    let launcher = Launcher::new();
    let wrapper = launcher.compile("wrapper.c", "wrapper.so", &["-shared", "-fPIC", "-ldl"]);
    let program = launcher.compile_with_driver("direct.c", "direct", &["-ldl"]);
    let both = |first: &Path, second: &Path| format!("{}:{}", first.display(), second.display());
    // Before us, it is what the program calls.
    let mut command = launcher.preloaded(&program);
    command.env("LD_PRELOAD", both(&wrapper, &library()));
    let mut running = Program::start(command);
    assert_eq!(running.line(), "wrapper: next is ours, marker none");
    assert_eq!(running.line(), "direct: ours");
    assert_eq!(running.ends(), Some(0));
    // Behind us, what a look for the next one finds.
    let source = launcher.path("next.c");
    let text = "#define _GNU_SOURCE\n#include <dlfcn.h>\nint main(void) { return \
                ((int (*)(unsigned))dlsym(RTLD_NEXT, \"cuInit\"))(0); }\n";
    fs::write(&source, text).expect("written");
    let options = ["-Wl,--no-as-needed", "-ldl"];
    let program = launcher.compile_with_driver(source.to_str().expect("text"), "next", &options);
    let mut command = launcher.preloaded(&program);
    command.env("LD_PRELOAD", both(&library(), &wrapper));
    let mut running = Program::start(command);
    assert_eq!(running.line(), "wrapper: next is ours, marker none");
    assert_eq!(running.ends(), Some(0));
}

#[test]
fn the_child_of_a_fork_has_no_state_and_says_so() {
    let mut launcher = Launcher::new();
    let program = launcher.compile_with_driver("direct.c", "direct", &["-ldl"]);
    let mut command = launcher.preloaded(&program);
    command.arg("fork");
    let mut running = Program::start(command);
    assert_eq!([running.line(), running.line()], ["direct: ours", "child"]);
    let parent = launcher.agent_of(&running);
    let child = launcher.next_that("the child's agent", |hello| hello.pid != running.child.id());
    launcher.while_away(vec![parent, child], || {});
    assert_eq!(running.ends(), Some(0));
}

#[test]
fn a_driver_that_is_used_past_us_is_refused_by_its_name() {
    let launcher = Launcher::new();
    let user = launcher.compile_with_driver("user.c", "user.so", &["-shared", "-fPIC"]);
    let program = launcher.compile("bypass.c", "bypass", &["-ldl"]);
    for how in ["deepbind", "dlmopen"] {
        for what in ["load", "use"] {
            let mut command = launcher.preloaded(&program);
            command.args([what, how]).arg(&user);
            let mut running = Program::start(command);
            assert_eq!(running.line(), "ready", "{what} {how}");
            let answer = launcher.agent_of(&running).quiesce();
            match (what, answer) {
                ("load", FromAgent::Quiesced { attempt: 1, .. }) => {}
                ("use", FromAgent::Failed { attempt: 1, reason, .. }) => {
                    let real = fs::canonicalize(driver()).expect("a path");
                    let names = ["libcuda.so.1", real.to_str().expect("text")];
                    assert!(names.iter().any(|name| reason.contains(name)), "{reason}");
                    assert!(reason.contains("RTLD_DEEPBIND or dlmopen"), "{reason}");
                    // Harmless, but for the checkpoint.
                    assert_eq!(running.ends(), Some(0));
                }
                (what, answer) => panic!("{what} {how}: {answer:?}"),
            }
        }
    }
}

/// Starts a command that in some way starts `sleep` with another environment, which has an agent nevertheless.
fn sleep_is_in_the_job(launcher: &Launcher, mut command: Command, how: &str) {
    command.stdin(Stdio::null());
    let _running = Program::start(command);
    let agent = launcher.next_that(how, |hello| hello.exe.ends_with("/sleep"));
    let environment = fs::read(format!("/proc/{}/environ", agent.hello.pid)).expect("a process");
    let mut names: Vec<_> = environment.split(|byte| *byte == 0).filter(|entry| !entry.is_empty()).collect();
    names.retain(|entry| !entry.starts_with(b"LC_CTYPE="));
    let socket = format!("{SOCKET_VARIABLE}={}", launcher.path("socket").display());
    let preload = format!("LD_PRELOAD={}", library().display());
    assert_eq!(names, [&b"ONLY=1"[..], socket.as_bytes(), preload.as_bytes()], "{how}");
}

#[test]
fn programs_started_with_another_environment_stay_in_the_job() {
    let launcher = Launcher::new();
    let program = launcher.compile("exec.c", "exec", &[]);
    let ways = ["execve", "execvpe", "execle", "fexecve", "execveat", "vfork", "posix_spawn", "posix_spawnp"];
    for how in ways.into_iter().chain(["execv", "execvp", "execl", "execlp"]) {
        let mut command = launcher.preloaded(&program);
        command.arg(how);
        sleep_is_in_the_job(&launcher, command, how);
    }
    let mut command = launcher.preloaded(Path::new("/usr/bin/env"));
    command.args(["-i", "ONLY=1", "/bin/sleep", "1000"]);
    sleep_is_in_the_job(&launcher, command, "env -i");
}

#[test]
fn children_of_python_with_another_environment_stay_in_the_job() {
    let launcher = Launcher::new();
    let ways = [
        "subprocess.run(['/bin/sleep', '1000'], env={'ONLY': '1'})",
        "subprocess.run(['/bin/sleep', '1000'], env={'ONLY': '1'}, preexec_fn=lambda: None)",
        "os.waitpid(os.posix_spawn('/bin/sleep', ['sleep', '1000'], {'ONLY': '1'}), 0)",
        "os.execve('/bin/sleep', ['sleep', '1000'], {'ONLY': '1'})",
    ];
    for how in ways {
        let mut command = launcher.preloaded(Path::new("/usr/bin/python3"));
        command.args(["-c", &format!("import os, subprocess\n{how}")]);
        sleep_is_in_the_job(&launcher, command, how);
    }
}

#[test]
fn a_program_that_cannot_be_started_is_an_error_as_before() {
    let launcher = Launcher::new();
    let program = launcher.compile("exec.c", "exec", &[]);
    let run = |mut command: Command| command.arg("fails").output().expect("started");
    let (plain, with) = (run(launcher.plain(&program)), run(launcher.preloaded(&program)));
    assert_eq!(plain.status.code(), Some(5));
    assert_eq!(with, plain);
}

/// A module of Python's, for instance, whose scope nobody else sees.
#[test]
fn a_library_finds_us_in_a_scope_of_its_own() {
    let launcher = Launcher::new();
    let user = launcher.compile_with_driver("user.c", "user.so", &["-shared", "-fPIC"]);
    let script = "import ctypes, sys; user = ctypes.CDLL(sys.argv[1]); print(user.in_scope(), user.behind())";
    let run = |mut command: Command| {
        let result = command.args(["-c", script]).arg(&user).output().expect("started");
        String::from_utf8_lossy(&result.stdout).trim_end().to_owned()
    };
    let python = Path::new("/usr/bin/python3");
    assert_eq!(run(launcher.plain(python)), "1 1");
    assert_eq!(run(launcher.preloaded(python)), "2 2");
}

/// The dynamic loader leaves us out of a program that has more rights than its user. What the launcher says to such a
/// process is its part.
#[test]
fn a_set_user_id_program_runs_without_us() {
    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("not shown: only root can make such a program");
        return;
    }
    let launcher = Launcher::new();
    let program = launcher.path("sleep");
    fs::copy("/bin/sleep", &program).expect("copied");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).expect("set");
    fs::set_permissions(launcher.directory.path(), fs::Permissions::from_mode(0o755)).expect("set");
    let mut command = launcher.preloaded(&program);
    command.arg("1000").uid(65534).gid(65534);
    let running = Program::start(command);
    let maps = until("the program to sleep", || {
        let status = fs::read_to_string(format!("/proc/{}/syscall", running.child.id())).ok()?;
        let is_asleep = status.starts_with(&format!("{} ", libc::SYS_clock_nanosleep));
        is_asleep.then(|| fs::read_to_string(format!("/proc/{}/maps", running.child.id())).expect("maps"))
    });
    assert!(maps.contains("libc"), "{maps}");
    assert!(!maps.contains("libckpt_interpose"), "{maps}");
    assert!(launcher.listener.accept().is_err());
}
