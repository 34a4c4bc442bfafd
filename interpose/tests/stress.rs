//! Threads that launch all the time while their process is sent away again and again, on a driver that ends the
//! process if a call is inside when it is locked, with a launcher that is played by the test.
//!
//! 5 seconds; as many as `CKPT_TEST_STRESS_S` says.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use ckpt_protocol::agent::{FromAgent, PROTOCOL_VERSION, SOCKET_VARIABLE, ToAgent};
use ckpt_protocol::frame;

const THREADS: &str = "32";
const INTERVAL: Duration = Duration::from_millis(50);
/// Longer than anything here takes on a machine that does other things too.
const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn nobody_is_inside_and_nobody_sleeps_on() {
    let seconds = std::env::var("CKPT_TEST_STRESS_S").map_or(5, |text| text.parse().expect("seconds"));
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("socket");
    let mut program = Program::start(directory.path(), &socket);
    let mut agent = accept(&socket);
    let end = Instant::now() + Duration::from_secs(seconds);
    for attempt in 1.. {
        say(&agent, &ToAgent::Quiesce { attempt, timeout_ms: 20_000, park: false });
        let answer = hear(&agent);
        assert!(matches!(answer, FromAgent::Quiesced { attempt: of, .. } if of == attempt), "{answer:?}");
        drop(agent);
        let before = program.fewest_launches();
        agent = accept(&socket);
        let back = hear(&agent);
        assert_eq!(back, FromAgent::Back { attempt, restored: false, copied_bytes: 0, lost: None });
        // Each thread was woken: what it counts now it may have launched before, what comes next not.
        let deadline = Instant::now() + PATIENCE;
        while program.fewest_launches() <= before + 1 {
            assert!(Instant::now() < deadline, "a thread launches no more after attempt {attempt}");
            sleep(Duration::from_millis(1));
        }
        if Instant::now() >= end {
            break;
        }
        sleep(INTERVAL);
    }
    assert!(program.child.try_wait().expect("a child").is_none(), "the program has ended");
}

struct Program {
    child: Child,
    ask: ChildStdin,
    answer: BufReader<ChildStdout>,
}

impl Program {
    fn start(directory: &Path, socket: &Path) -> Self {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stress");
        let driver = directory.join("libcuda.so.1");
        let program = directory.join("threads");
        let cc = |source: &str, options: &[&str], to: &Path| {
            let mut cc = Command::new("cc");
            cc.args(["-std=gnu11", "-O2", "-Wall", "-Werror"]).arg(sources.join(source)).arg("-o").arg(to);
            let status = cc.args(options).status().expect("a C compiler");
            assert!(status.success(), "{cc:?}");
        };
        cc("driver.c", &["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"], &driver);
        let place = format!("-L{}", directory.display());
        cc("threads.c", &[&place, "-l:libcuda.so.1", "-lpthread"], &program);
        let mut command = Command::new(program);
        command.arg(THREADS).env("LD_LIBRARY_PATH", directory).env("LD_PRELOAD", library());
        command.env(SOCKET_VARIABLE, socket).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("started");
        let ask = child.stdin.take().expect("a pipe");
        let answer = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, ask, answer }
    }

    fn fewest_launches(&mut self) -> u64 {
        let mut line = String::new();
        self.ask.write_all(b"\n").expect("the program is there");
        self.answer.read_line(&mut line).expect("an answer");
        line.trim().parse().unwrap_or_else(|_| panic!("the program said {line:?}"))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Listens until the agent has come and said hello, and no longer: a path that is there calls it back.
fn accept(path: &Path) -> UnixStream {
    let listener = UnixListener::bind(path).expect("a listener");
    listener.set_nonblocking(true).expect("set");
    let deadline = Instant::now() + PATIENCE;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                fs::remove_file(path).expect("removed");
                stream.set_nonblocking(false).expect("set");
                stream.set_read_timeout(Some(PATIENCE)).expect("set");
                let FromAgent::Hello(hello) = hear(&stream) else { panic!("not a hello") };
                say(&stream, &ToAgent::Welcome { version: PROTOCOL_VERSION });
                if hello.is_detached {
                    say(&stream, &ToAgent::Deliver { mirror: 0, bytes: 0, parked: 0 });
                }
                return stream;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        assert!(Instant::now() < deadline, "no agent came");
        sleep(Duration::from_millis(1));
    }
}

fn say(mut stream: &UnixStream, message: &ToAgent) {
    frame::write(&mut stream, message).expect("said");
}

fn hear(mut stream: &UnixStream) -> FromAgent {
    frame::read(&mut stream).expect("an answer")
}

fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this test's path");
    let deps = test.parent().expect("a directory");
    let built = |path: PathBuf| Some((fs::metadata(&path).ok()?.modified().ok()?, path));
    let places = [deps.join("libckpt_interpose.so"), deps.with_file_name("libckpt_interpose.so")];
    places.into_iter().filter_map(built).max().expect("libckpt_interpose.so is built with this test").1
}
