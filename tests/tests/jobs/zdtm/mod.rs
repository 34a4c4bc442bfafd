//! zdtm, CRIU's own functional tests, as jobs: each program sets something up, waits, and checks after SIGTERM that it is
//! still so. Here it is checkpointed, killed with everything, and resumed in between.
//!
//! `cargo xtask test --full` fetches and builds them; nothing of them is in the repository. They are started and stopped
//! as their own `zdtm.py` does, but all as root: CRIU saves another user's processes only with CAP_SYS_RESOURCE, which not
//! every machine has. What must be refused is in [`expected`] by name: whatever is not there has to pass, and
//! whatever is there must not. `CKPT_TEST_ZDTM_ONLY` names the programs to run, such as `static/pid00,static/fpu00`.

mod expected;
mod programs;

use ckpt_run_tests::{Running, Sandbox};
use expected::{EXPECTED, LEFT_OUT, NAMESPACES_OF_A_JOB};
use programs::{Need, Program, Programs};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How many of them have to run at least.
const RUN_AT_LEAST: usize = 300;
/// Programs that run at once: most of the time each of them waits.
const AT_ONCE: usize = 6;
/// How long one step of a program may take: full TCP queues of a resumed job drain slowly on a busy machine.
const STEP_TIMEOUT: Duration = Duration::from_secs(300);

/// Starts a program, whose first process returns when another is ready, and stops it. `$1` is its name, `$2` the command.
/// It waits without a child process, so that nothing but the program changes.
const SCRIPT: &str = r#"
eval "$2" || exit 3
echo > ready
exec 3<>go
read -r _ <&3
exec 3<&-
pid=$(cat "$1.pid")
kill -TERM "$pid" || exit 4
while kill -0 "$pid" 2> /dev/null; do sleep 0.02; done
"#;

/// What became of a program.
#[derive(Debug)]
enum Outcome {
    /// It was resumed and passed.
    Passed,
    /// The checkpoint was refused, for this reason, and the program passed afterwards.
    Refused(String),
    /// The snapshot could not be resumed.
    NotResumed(String),
    /// It did not run or did not pass.
    Wrong(String),
}

/// A program that runs under ckpt-run.
struct Run<'a> {
    program: &'a Program,
    sandbox: Sandbox,
    dir: PathBuf,
}

impl<'a> Run<'a> {
    fn new(programs: &Programs, program: &'a Program) -> Self {
        let sandbox = Sandbox::new();
        let dir = sandbox.path().join("zdtm");
        fs::create_dir(&dir).unwrap();
        // Some programs become another user, and create files.
        fs::set_permissions(sandbox.path(), Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(0o777)).unwrap();
        let name = program.name();
        symlink(programs.executable(program), dir.join(name)).unwrap();
        let mut mkfifo = Command::new("mkfifo");
        assert!(mkfifo.arg(dir.join("go")).status().unwrap().success());
        Self { program, sandbox, dir }
    }

    /// Starts or resumes it.
    fn start(&self) -> Running {
        let words = ["--network", "private", "--", "/bin/sh", "-c", SCRIPT, "zdtm", self.program.name()];
        let mut command = self.sandbox.command(words.into_iter().chain([&*self.program.command]));
        command.current_dir(&self.dir).env("TMPDIR", "/tmp");
        self.sandbox.start_command("job", command)
    }

    fn run(&self) -> Outcome {
        let mut job = self.start();
        let is_ready = self.wait(&mut job, || self.dir.join("ready").exists());
        if !is_ready {
            return Outcome::Wrong(format!("not ready: {}", self.said(&job)));
        }
        job.until_answering(&self.sandbox);
        let mut command = self.sandbox.command(["checkpoint"]);
        let checkpoint = command.current_dir(&self.dir).output().unwrap();
        if !checkpoint.status.success() {
            let reason = String::from_utf8_lossy(&checkpoint.stderr).into_owned();
            return match self.passes(job) {
                Ok(()) => Outcome::Refused(reason),
                Err(why) => Outcome::Wrong(format!("after a refused checkpoint ({reason}): {why}")),
            };
        }
        job.kill_everything();
        let mut job = self.start();
        let is_resumed =
            self.wait(&mut job, || self.sandbox.read("job.err").contains("resumed from snapshot"));
        if !is_resumed {
            return Outcome::NotResumed(self.said(&job));
        }
        self.passes(job).map_or_else(Outcome::Wrong, |()| Outcome::Passed)
    }

    /// Waits for something; false if the job ends first.
    fn wait(&self, job: &mut Running, done: impl Fn() -> bool) -> bool {
        let deadline = Instant::now() + STEP_TIMEOUT;
        loop {
            if done() {
                return true;
            }
            if job.has_ended() {
                return false;
            }
            assert!(Instant::now() < deadline, "it takes too long: {}", self.said(job));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Stops the program, which checks what it has set up.
    fn passes(&self, mut job: Running) -> Result<(), String> {
        // For reading too: to open it does not wait then.
        let mut go = File::options().read(true).write(true).open(self.dir.join("go")).unwrap();
        go.write_all(b"\n").unwrap();
        self.wait(&mut job, || false);
        let code = job.wait();
        let out = fs::read_to_string(self.dir.join(format!("{}.out", self.program.name())));
        let out = out.unwrap_or_default();
        let passed =
            out.lines().next_back().is_some_and(|line| line.split_whitespace().any(|word| word == "PASS"));
        if passed && code == 0 { Ok(()) } else { Err(format!("exit code {code}, {}", self.said(&job))) }
    }

    /// What program and launcher say.
    fn said(&self, job: &Running) -> String {
        let name = self.program.name();
        let read =
            |suffix: &str| fs::read_to_string(self.dir.join(format!("{name}.{suffix}"))).unwrap_or_default();
        format!("{}{}{}", read("out"), read("out.inprogress"), job.said())
    }
}

/// One that panics is wrong, and the others run.
fn outcome(programs: &Programs, program: &Program) -> Outcome {
    let run = catch_unwind(AssertUnwindSafe(|| Run::new(programs, program).run()));
    run.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Outcome::Wrong(text.unwrap_or_else(|| "it panicked".to_owned()))
    })
}

/// Runs programs, several at once, and returns what became of each.
fn run_all<'a>(programs: &Programs, wanted: &[&'a Program], at_once: usize) -> Vec<(&'a Program, Outcome)> {
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(program) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = outcome(programs, program);
                    outcomes.lock().unwrap().push((*program, outcome));
                }
            });
        }
    });
    outcomes.into_inner().unwrap()
}

/// Why an outcome is not the expected one.
fn surprise(program: &Program, outcome: &Outcome) -> Option<String> {
    let is_there = |need: &Need| need.is_met();
    let expected = EXPECTED
        .iter()
        .find(|row| row.program == program.path && !row.without.as_ref().is_some_and(is_there));
    match (outcome, expected) {
        (Outcome::Passed, None) => None,
        (Outcome::Passed, Some(_)) => Some("it passed, and is on the list of refusals".to_owned()),
        (Outcome::Refused(text), Some(row)) if text.contains(row.words) => None,
        (Outcome::Refused(text), _) => Some(format!("the checkpoint was refused: {text}")),
        (Outcome::NotResumed(text), _) => Some(format!("it could not be resumed: {text}")),
        (Outcome::Wrong(text), _) => Some(text.clone()),
    }
}

#[test]
fn criu_s_own_tests_pass_as_jobs() {
    let Some(root) = std::env::var_os("CKPT_TEST_ZDTM").map(PathBuf::from) else {
        ckpt_test_skip::needs_full();
        return;
    };
    // One of them changes the name of the machine. Threads and processes that this thread starts are in the namespace, too.
    // SAFETY: a flag that concerns neither memory nor descriptors.
    unsafe { unshare_unsafe(UnshareFlags::NEWUTS) }.expect("a UTS namespace");
    let only = std::env::var("CKPT_TEST_ZDTM_ONLY").ok();
    let programs = Programs::find(root);
    let is_wanted = |program: &&Program| {
        only.as_ref().is_none_or(|only| only.split(',').any(|name| name == program.path))
    };
    let (alone, together): (Vec<_>, Vec<_>) =
        programs.list.iter().filter(is_wanted).partition(|program| program.has_flag("excl"));
    let mut outcomes = run_all(&programs, &together, AT_ONCE);
    outcomes.extend(run_all(&programs, &alone, 1));

    let count = |is: fn(&Outcome) -> bool| outcomes.iter().filter(|(_, outcome)| is(outcome)).count();
    println!(
        "zdtm: {} programs ran, {} passed, {} were refused and passed, {} were not resumed; {} not available: {}",
        outcomes.len(),
        count(|outcome| matches!(outcome, Outcome::Passed)),
        count(|outcome| matches!(outcome, Outcome::Refused(_))),
        count(|outcome| matches!(outcome, Outcome::NotResumed(_))),
        programs.unavailable.len(),
        programs.unavailable.join(", ")
    );
    let surprises: Vec<_> = outcomes
        .iter()
        .filter_map(|(program, outcome)| {
            Some(format!("== {}: {}", program.path, surprise(program, outcome)?))
        })
        .collect();
    assert!(surprises.is_empty(), "{} surprises\n{}", surprises.len(), surprises.join("\n"));
    assert!(only.is_some() || outcomes.len() >= RUN_AT_LEAST, "{} programs ran", outcomes.len());
    let listed = EXPECTED.iter().map(|row| row.program).chain(LEFT_OUT.iter().map(|(path, _)| *path));
    for path in listed.chain(NAMESPACES_OF_A_JOB.iter().copied()) {
        assert!(programs.is_known(path), "there is no program {path}");
    }
}
