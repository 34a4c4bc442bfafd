//! Programs in C: compiled, and run with the interposer or without.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Output, Stdio};

use ckpt_protocol::agent::SOCKET_VARIABLE;

use super::{directory, driver, library, until};

/// Compiles a source file, whose path is taken from `tests/` if it is relative.
pub fn compile<O: AsRef<OsStr>>(source: impl AsRef<Path>, output: &Path, options: &[O]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1"]).arg(source).arg("-o").arg(output);
    let result = cc.args(options).output().expect("a C compiler");
    assert!(result.status.success(), "{}", String::from_utf8_lossy(&result.stderr));
}

/// Compiles `tests/programs/NAME.c`, linked against the driver, for all tests of this process.
pub fn program(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    // Another run of the tests may do the same at this moment.
    let fresh = directory.join(format!("{name}.{}", std::process::id()));
    compile(format!("programs/{name}.c"), &fresh, &[driver().as_os_str(), OsStr::new("-lpthread")]);
    let path = directory.join(name);
    fs::rename(&fresh, &path).expect("renamed");
    path
}

/// A command that finds the driver, with devices in a directory; without the interposer.
pub fn plain(program: &Path, devices: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", driver().parent().expect("a directory")).env("SIMCUDA_DIR", devices);
    // The launchers of these tests do not hold the devices open.
    command.env("SIMCUDA_PERSISTENCE", "1");
    command
}

/// Has a command run with the interposer, whose agents look for a launcher at a path.
pub fn interpose(command: &mut Command, socket: &Path) {
    command.env("LD_PRELOAD", library()).env(SOCKET_VARIABLE, socket);
}

/// Runs a program on devices of its own. There is no launcher: the agent waits for one.
pub fn run(program: &Path, arguments: &[&str], is_interposed: bool, settings: &[(&str, &str)]) -> Output {
    let directory = directory();
    let mut command = plain(program, directory.path());
    if is_interposed {
        interpose(&mut command, &directory.path().join("socket"));
    }
    command.args(arguments).envs(settings.iter().copied()).output().expect("started")
}

/// What a program said that has succeeded.
pub fn said(output: &Output) -> String {
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{stdout}{stderr}", output.status);
    stdout.into_owned()
}

/// A program that runs; neither it nor its children outlive its test.
pub struct Program {
    child: Child,
    has_ended: bool,
    /// Where it has a pipe for its input.
    pub input: Option<ChildStdin>,
    output: Option<BufReader<ChildStdout>>,
}

impl Program {
    /// Starts a program with pipes.
    pub fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self::start_as_is(command)
    }

    /// Starts a program with pipes where the command says so.
    pub fn start_as_is(mut command: Command) -> Self {
        let mut child = command.process_group(0).spawn().expect("started");
        let output = child.stdout.take().map(BufReader::new);
        Self { has_ended: false, input: child.stdin.take(), child, output }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn say(&mut self, line: &str) {
        writeln!(self.input.as_mut().expect("open"), "{line}").expect("written");
    }

    /// The next line that it says; none at its end.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.as_mut().expect("a pipe").read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    /// Says a line; returns the answer.
    pub fn does(&mut self, line: &str) -> String {
        self.say(line);
        self.line()
    }

    pub fn lines_until(&mut self, last: &str) -> Vec<String> {
        let lines = std::iter::from_fn(|| Some(self.line()).filter(|line| line != last && !line.is_empty()));
        lines.collect()
    }

    /// Waits until `sleep` sleeps: it has opened and closed by then what it opens at its start.
    pub fn falls_asleep(&self) {
        until("the program to sleep", || {
            let call = fs::read_to_string(format!("/proc/{}/syscall", self.pid())).ok()?;
            call.starts_with(&format!("{} ", libc::SYS_clock_nanosleep)).then_some(())
        });
    }

    pub fn is_running(&mut self) -> bool {
        self.end().is_none()
    }

    /// Ends its input; returns its exit code.
    pub fn ends(&mut self) -> Option<i32> {
        drop(self.input.take());
        until("the program's end", || self.end()).code()
    }

    fn end(&mut self) -> Option<ExitStatus> {
        let mut found = MaybeUninit::<libc::siginfo_t>::zeroed();
        let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        // SAFETY: `found` has room for what is found, and is nothing if nothing is.
        let result = unsafe { libc::waitid(libc::P_PID, self.pid(), found.as_mut_ptr(), options) };
        // SAFETY: zeroed, or written by waitid.
        let found = unsafe { found.assume_init() };
        // SAFETY: zeroed, or of a child's end.
        let pid = unsafe { found.si_pid() };
        (result != 0 || pid != 0).then(|| self.kill())
    }

    /// Kills what is left of it and its children.
    fn kill(&mut self) -> ExitStatus {
        if !self.has_ended {
            let group = libc::pid_t::try_from(self.pid()).expect("a process ID");
            // SAFETY: kill takes plain numbers. The program leads a group of its own, and it was not waited for, so
            // the number is still that group's.
            unsafe { libc::kill(-group, libc::SIGKILL) };
            self.has_ended = true;
        }
        self.child.wait().expect("a child")
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}
