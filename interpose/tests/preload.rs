//! The library in real programs, with a launcher that is played by the test.

mod common;

use procfs_core::FromRead as _;
use procfs_core::process::Stat;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use ckpt_protocol::agent::{FromAgent, Hello, PROTOCOL_VERSION, SOCKET_VARIABLE};
use ckpt_protocol::frame::{self, FrameError};
use common::launcher::{Agent, Launcher, quiesce};
use common::program::{Program, interpose};
use common::until;

/// Short enough to wait for what is not to happen.
const SHORT: Duration = Duration::from_millis(200);

/// Long enough for what takes some milliseconds, on a machine that does other things too.
const LONG: Duration = Duration::from_secs(60);

/// The numbers below are for the application.
const FIRST_OF_OURS: u32 = 900;

/// A program with the library in it, told to talk to `socket`.
fn preloaded(socket: &Path, program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    interpose(&mut command, socket);
    command.args(arguments).stdin(Stdio::null());
    command
}

fn python(socket: &Path, script: &str) -> Command {
    preloaded(socket, "/usr/bin/python3", &["-c", script])
}

fn runs(launcher: &Launcher, program: &str, arguments: &[&str]) -> Program {
    Program::start_as_is(preloaded(&launcher.socket(), program, arguments))
}

fn runs_python(launcher: &Launcher, script: &str) -> Program {
    Program::start_as_is(python(&launcher.socket(), script))
}

/// The descriptors that a process has above the standard three, and what they stand for. Those that this test
/// was itself started with, and that it hands on, do not count.
fn descriptors(pid: u32) -> BTreeMap<u32, PathBuf> {
    let all = |process: &str| -> BTreeMap<u32, PathBuf> {
        let entries = fs::read_dir(format!("/proc/{process}/fd")).expect("a process");
        let entry =
            |path: PathBuf| Some((path.file_name()?.to_str()?.parse().ok()?, fs::read_link(&path).ok()?));
        entries.filter_map(|found| entry(found.ok()?.path())).collect()
    };
    let inherited = all("self");
    let mut own = all(&pid.to_string());
    own.retain(|number, path| *number >= 3 && inherited.get(number) != Some(path));
    own
}

fn sockets(pid: u32) -> Vec<u32> {
    let is_socket = |path: &PathBuf| path.to_string_lossy().starts_with("socket:");
    descriptors(pid).into_iter().filter(|(_, path)| is_socket(path)).map(|(number, _)| number).collect()
}

/// The agent notices the end of a connection, or of the path, a moment later.
fn has_no_socket(program: &Program) {
    until("the end of the agent's socket", || sockets(program.pid()).is_empty().then_some(()));
}

/// A field of the status of the agent's thread in a process; `None` if it has no such thread.
fn agent_thread(pid: u32, field: &str) -> Option<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("status")).ok()).find_map(|status| {
        let status: BTreeMap<_, _> = status.lines().filter_map(|line| line.split_once(":\t")).collect();
        (status["Name"] == "ckpt-agent").then(|| status[field].to_owned())
    })
}

fn start_time(pid: u32) -> u64 {
    Stat::from_file(format!("/proc/{pid}/stat")).expect("a process").starttime
}

#[test]
fn a_program_says_hello_and_is_otherwise_as_before() {
    let launcher = Launcher::new();
    let program = runs(&launcher, "/bin/sleep", &["1000"]);
    let agent = launcher.next();
    program.falls_asleep();
    let expected = Hello {
        version: PROTOCOL_VERSION,
        pid: program.pid(),
        start_time_ticks: start_time(program.pid()),
        exe: fs::read_link(format!("/proc/{}/exe", program.pid())).expect("a link").display().to_string(),
        away: None,
        is_detached: false,
        supports_activity: true,
        supports_release: true,
        supports_cut: true,
        supports_reads: true,
        supports_loads: true,
        parks_by_key: true,
        instance: agent.hello.instance,
    };
    assert_eq!(agent.hello, expected);
    assert_ne!(expected.instance, 0);
    let ours = sockets(program.pid());
    assert!(matches!(ours[..], [number] if number >= FIRST_OF_OURS), "{ours:?}");
    assert_eq!(descriptors(program.pid()).len(), 1);
    // All but those that nobody can block: SIGKILL, SIGSTOP and the C library's own two.
    let blocked = agent_thread(program.pid(), "SigBlk").expect("an agent's thread");
    assert_eq!(blocked, "fffffffe7ffbfeff");
    let main = fs::read_to_string(format!("/proc/{}/status", program.pid())).expect("a process");
    assert!(main.contains("SigBlk:\t0000000000000000"), "{main}");
}

#[test]
fn away_it_holds_nothing_and_it_comes_back() {
    let mut launcher = Launcher::new();
    let program = runs(&launcher, "/bin/sleep", &["1000"]);
    let mut agent = launcher.next();
    program.falls_asleep();
    for attempt in 1..=3 {
        launcher.stop_listening();
        assert_eq!(agent.goes_away(attempt), None);
        let end = Instant::now() + SHORT;
        while Instant::now() < end {
            let held = descriptors(program.pid());
            assert!(held.is_empty(), "{held:?}");
        }
        launcher.listen();
        let since = Instant::now();
        agent = launcher.next();
        agent.is_back(attempt);
        assert!(since.elapsed() < LONG);
        assert_eq!(agent.hello.pid, program.pid());
    }
}

#[test]
fn a_listener_that_is_slow_to_listen_is_waited_for() {
    let mut launcher = Launcher::new();
    let program = runs(&launcher, "/bin/sleep", &["1000"]);
    let agent = launcher.next();
    launcher.stop_listening();
    assert_eq!(agent.goes_away(1), None);
    // A stale socket refuses connections; none is left behind by trying.
    drop(UnixListener::bind(launcher.socket()).expect("a stale socket"));
    sleep(SHORT);
    fs::remove_file(launcher.socket()).expect("removed");
    has_no_socket(&program);
    launcher.listen();
    launcher.next().is_back(1);
}

#[test]
fn a_forked_child_has_an_agent_of_its_own() {
    let launcher = Launcher::new();
    let fifo = launcher.directory.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("started").success());
    assert!(fs::metadata(&fifo).expect("there").file_type().is_fifo());
    let script = "(read line < \"$1\"; exit 3) & wait $!";
    let mut shell = runs(&launcher, "/bin/sh", &["-c", script, "sh", fifo.to_str().expect("text")]);
    let agents = [launcher.next(), launcher.next()];
    let child = agents.iter().find(|agent| agent.hello.pid != shell.pid()).expect("the child's");
    let parent = agents.iter().find(|agent| agent.hello.pid == shell.pid()).expect("the parent's");
    assert_eq!(child.hello.exe, parent.hello.exe);
    for agent in &agents {
        let ours = sockets(agent.hello.pid);
        assert_eq!(ours.len(), 1, "its own only: {ours:?}");
    }
    for agent in agents {
        assert_eq!(agent.goes_away(1), None);
    }
    fs::write(&fifo, "line\n").expect("written");
    assert_eq!(shell.ends(), Some(3));
}

#[test]
fn a_program_that_is_executed_has_an_agent_of_its_own() {
    let launcher = Launcher::new();
    let program = runs(&launcher, "/bin/sh", &["-c", "exec sleep 1000"]);
    let agent = launcher.next_that("the program after the exec", |hello| hello.exe.contains("sleep"));
    assert_eq!(agent.hello.pid, program.pid());
    assert_eq!(sockets(program.pid()).len(), 1);
    assert_eq!(agent.goes_away(1), None);
}

#[test]
fn workers_of_multiprocessing_have_agents_and_work() {
    let mut launcher = Launcher::new();
    let script = "
import multiprocessing, sys
multiprocessing.set_start_method('fork')
ask, answer = multiprocessing.SimpleQueue(), multiprocessing.SimpleQueue()
worker = multiprocessing.Process(target=lambda: answer.put(ask.get() + 1))
worker.start()
sys.stdin.read()
ask.put(41)
assert answer.get() == 42
worker.join()
sys.exit(worker.exitcode or 5)
";
    let mut program = Program::start(python(&launcher.socket(), script));
    let agents = [launcher.next(), launcher.next()];
    let mut pids = agents.each_ref().map(|agent| agent.hello.pid);
    assert!(pids.contains(&program.pid()) && pids[0] != pids[1], "{pids:?}");
    launcher.stop_listening();
    for agent in agents {
        assert_eq!(agent.goes_away(1), None);
    }
    for pid in pids {
        assert!(sockets(pid).is_empty());
    }
    launcher.listen();
    let mut back = [launcher.next(), launcher.next()].map(|agent| {
        agent.is_back(1);
        agent.hello.pid
    });
    pids.sort_unstable();
    back.sort_unstable();
    assert_eq!(back, pids);
    assert_eq!(program.ends(), Some(5));
}

#[test]
fn children_that_are_forked_all_the_time_hold_no_connection_of_their_parent() {
    let launcher = Launcher::new();
    let script = "
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        time.sleep(120)
        os._exit(0)
    time.sleep(0.02)
";
    let program = runs_python(&launcher, script);
    let is_parent = |hello: &Hello| hello.pid == program.pid();
    let mut agent = launcher.next_that("the parent", is_parent);
    for attempt in 1..=40 {
        let asked = Instant::now();
        // Comes to the end of the connection only when no child holds it, which it would do for longer.
        assert_eq!(agent.goes_away(attempt), None);
        assert!(asked.elapsed() < LONG, "a child held the connection");
        agent = launcher.next_that("the parent", is_parent);
        agent.is_back(attempt);
    }
}

#[test]
fn a_launcher_that_is_lost_is_looked_for() {
    let mut launcher = Launcher::new();
    let program = runs(&launcher, "/bin/sleep", &["1000"]);
    let agent = launcher.next();
    launcher.stop_listening();
    drop(agent);
    has_no_socket(&program);
    launcher.listen();
    let agent = launcher.next();
    assert_eq!((agent.hello.pid, agent.hello.away), (program.pid(), None));
}

#[test]
fn a_refused_agent_is_silent_for_ever() {
    for answer in [r#"{"type":"refused","reason":"no"}"#, r#"{"type":"dance"}"#, "nonsense"] {
        let launcher = Launcher::new();
        let mut program = runs(&launcher, "/bin/sleep", &["1000"]);
        let mut stream = until("an agent", || launcher.try_accept());
        assert!(matches!(frame::read(&mut stream), Ok(FromAgent::Hello(_))));
        let mut bytes = u32::try_from(answer.len()).expect("fits").to_le_bytes().to_vec();
        bytes.extend_from_slice(answer.as_bytes());
        std::io::Write::write_all(&mut stream, &bytes).expect("written");
        assert!(matches!(frame::read::<FromAgent>(&mut stream), Err(FrameError::Closed)));
        until("the agent's end", || agent_thread(program.pid(), "Name").is_none().then_some(()));
        assert!(launcher.try_accept().is_none());
        assert!(sockets(program.pid()).is_empty());
        assert!(program.is_running());
    }
}

fn output(command: &mut Command) -> Output {
    command.output().expect("started")
}

#[test]
fn without_a_launcher_programs_run_as_without_the_library() {
    let nowhere = Path::new("/nonexistent/socket");
    let stale = tempfile::tempdir().expect("a directory");
    let stale = stale.path().join("socket");
    drop(UnixListener::bind(&stale).expect("a stale socket"));
    let too_long = PathBuf::from("/x".repeat(100));
    let shell = ["-c", "echo out; (echo err >&2; exit 4) & wait $!; printf '%s\\n' $? | cat; exit 7"];
    let script = "
import multiprocessing, os, subprocess, sys
multiprocessing.set_start_method('fork')
with multiprocessing.Pool(3) as pool:
    print(sum(pool.map(len, ['x' * size for size in range(50)])))
print(subprocess.run(['sh', '-c', 'echo $((6 * 7))'], capture_output=True).stdout)
# While the agent tries a path at which nobody listens, it has a descriptor of its own.
print(sorted(fd for fd in os.listdir('/proc/self/fd') if int(fd) < 900), flush=True)
os.kill(os.getpid(), 9) if len(sys.argv) > 1 else sys.exit(9)
";
    let programs: [(&str, &[&str]); 3] = [
        ("/bin/sh", &shell),
        ("/usr/bin/python3", &["-c", script]),
        ("/usr/bin/python3", &["-c", script, "killed"]),
    ];
    for (program, arguments) in programs {
        let plain = output(Command::new(program).args(arguments).stdin(Stdio::null()));
        for socket in [nowhere, &stale, &too_long, Path::new("")] {
            let with = output(&mut preloaded(socket, program, arguments));
            assert_eq!(with, plain, "{program} with {}", socket.display());
        }
        let with = output(preloaded(nowhere, program, arguments).env_remove(SOCKET_VARIABLE));
        assert_eq!(with, plain, "{program} without the variable");
    }
}

#[test]
fn with_a_launcher_output_and_exit_code_are_the_same_too() {
    let launcher = Launcher::new();
    let script = "
import os, subprocess
print(subprocess.run(['sh', '-c', 'exec 3</dev/null; exec 9>&1; echo nine >&9'], capture_output=True))
os.close(0)
print(os.open('/dev/null', os.O_RDONLY), os.open('/dev/null', os.O_RDONLY), flush=True)
os._exit(11)
";
    let plain = output(Command::new("/usr/bin/python3").args(["-c", script]).stdin(Stdio::null()));
    assert_eq!(plain.status.code(), Some(11));
    assert_eq!(output(&mut python(&launcher.socket(), script)), plain);
}

#[test]
fn without_the_variable_there_is_no_agent() {
    let launcher = Launcher::new();
    let mut command = preloaded(&launcher.socket(), "/bin/sleep", &["1000"]);
    command.env_remove(SOCKET_VARIABLE);
    let program = Program::start_as_is(command);
    until("the program", || {
        fs::read_to_string(format!("/proc/{}/comm", program.pid())).ok().filter(|name| name == "sleep\n")
    });
    sleep(SHORT);
    assert!(agent_thread(program.pid(), "Name").is_none());
    assert!(launcher.try_accept().is_none());
}

#[test]
fn a_process_whose_main_thread_has_ended_ends_with_its_last_other_one() {
    let script = "
import ctypes, sys, threading
threading.Thread(target=lambda: sys.stdin.read()).start()
ctypes.CDLL(None).pthread_exit(None)
";
    let launcher = Launcher::new();
    let mut connected = Program::start(python(&launcher.socket(), script));
    let agent = launcher.next();
    assert_eq!(connected.ends(), Some(0));
    assert!(matches!(agent.try_hear(), Err(FrameError::Closed)));
    let mut alone = Program::start(python(Path::new("/nonexistent/socket"), script));
    assert_eq!(alone.ends(), Some(0));
}

#[test]
fn a_program_that_closes_or_replaces_all_descriptors_keeps_its_own() {
    let launcher = Launcher::new();
    let script = "
import os, socket, sys
os.closerange(3, 1024)
theirs, other = socket.socketpair()
other.sendall(b'theirs')
for number in range(900, 1000):
    os.dup2(theirs.fileno(), number)
print('ready', flush=True)
sys.stdin.read()
for number in range(900, 1000):
    os.fstat(number)
assert theirs.recv(100) == b'theirs'
theirs.close()
other.setblocking(False)
try:
    assert other.recv(1) == b'never'
except BlockingIOError:
    sys.exit(6)
";
    let mut program = Program::start(python(&launcher.socket(), script));
    let agent = launcher.next();
    assert_eq!(program.line(), "ready");
    // The connection is as good as gone; the agent notices now, if it has not before, and makes another one.
    let _ = frame::write(&mut &agent.stream, &quiesce(1, false));
    assert!(agent.try_hear().is_err());
    // One that was made before all descriptors were replaced is lost too.
    let agent = until("a connection that lasts", || {
        let agent = Agent::greet(launcher.try_accept()?)?;
        assert_eq!((agent.hello.pid, agent.hello.away), (program.pid(), None));
        frame::write(&mut &agent.stream, &quiesce(2, false)).ok()?;
        matches!(agent.try_hear(), Ok(FromAgent::Quiesced { attempt: 2, .. })).then_some(agent)
    });
    assert!(matches!(agent.try_hear(), Err(FrameError::Closed)));
    launcher.next().is_back(2);
    assert_eq!(program.ends(), Some(6));
}
