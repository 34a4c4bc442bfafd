//! Jobs that write files in several ways (tests/programs/files), killed at random moments and resumed. Their files have
//! to be those of an unbroken run.

use crate::trees::Tree;
use crate::{Running, Sandbox, WAIT_TIMEOUT, from_env, programs, python, seeded_rng, set_variables};
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// All habits, in groups that run in one process each.
pub const GROUPS: &[(&str, &[&str])] = &[
    (
        "logs",
        &[
            "kept_append",
            "kept_log_seek",
            "reopened_append",
            "existing_append",
            "outside_append",
            "csv_reopened",
            "many_appenders",
            "jsonl_flock",
            "rotation",
            "late_reopen",
            "copytruncate",
            "tensorboard",
            "synced_append",
        ],
    ),
    (
        "in_place",
        &[
            "existing_counter",
            "made_counter",
            "late_counter",
            "kept_counter",
            "outside_counter",
            "shared_counter",
            "truncate_rewrite",
            "rewrite_middle",
            "reopened_middle",
            "sparse",
            "punch_holes",
            "preallocated",
            "shrink_and_grow",
            "ring_file",
            "mapped",
            "mapped_anew",
            "mapped_growing",
            "unlinked_temporary",
        ],
    ),
    (
        "replaced",
        &[
            "tmp_rename",
            "tmp_rename_fsync",
            "tmp_rename_same_length",
            "existing_json",
            "backup_rename",
            "replaced_while_open",
            "delete_recreate",
            "come_and_go",
            "deletes_old_files",
            "lock_file",
            "pid_file",
            "swapped",
            "linked_when_complete",
        ],
    ),
    (
        "trees",
        &[
            "hard_links",
            "link_replace",
            "symlink_swap",
            "symlink_anew",
            "directory_rename",
            "directory_moves",
            "moved_between",
            "modes_and_times",
            "temporary_trees",
            "special_files",
            "changes_kind",
            "random_tree",
            "odd_names",
        ],
    ),
    (
        "databases",
        &[
            "sqlite_rollback",
            "sqlite_rollback_reopened",
            "sqlite_persist",
            "sqlite_wal",
            "sqlite_wal_reopened",
            "dbm_dumb",
            "lmdb_kept",
            "lmdb_writemap",
            "lmdb_reopened",
        ],
    ),
    ("training", &["torch_save", "torch_save_rename", "trainer_checkpoints", "best_model"]),
];

/// Habits whose resume may be refused, and why. Each runs in a job of its own.
pub const MAY_REFUSE: &[(&str, &str)] = &[(
    "old_file_rewritten",
    "a large file of an earlier job that is first changed after the snapshot, on a file system without reflinks",
)];

/// Habits of all groups for tests that have no time for all of them.
pub const MIXED: &[&str] = &[
    "many_appenders",
    "reopened_append",
    "outside_append",
    "rotation",
    "existing_counter",
    "kept_counter",
    "truncate_rewrite",
    "punch_holes",
    "mapped",
    "unlinked_temporary",
    "tmp_rename",
    "backup_rename",
    "come_and_go",
    "deletes_old_files",
    "hard_links",
    "link_replace",
    "symlink_swap",
    "symlink_anew",
    "directory_rename",
    "directory_moves",
    "moved_between",
    "modes_and_times",
    "changes_kind",
    "sqlite_wal",
    "sqlite_rollback_reopened",
];

/// In the message of a refused resume.
const REFUSAL: &str = "cannot be put back";
/// The program was told to end and has some more steps to do at full speed.
const END_LIMIT: Duration = Duration::from_secs(120);
/// A checkpoint may fail at some moments. This many in a row are an error.
const FAILED_CHECKPOINTS_MAX: u32 = 20;

/// What to do to a job.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How its processes write files.
    pub habits: Vec<String>,
    /// How often to kill it.
    pub kills: u32,
    /// Decides the moments.
    pub seed: u64,
    /// Options of ckpt-run. With an interval, no snapshot is asked for.
    pub options: Vec<String>,
    /// The user that the job and ckpt-run run as, without capabilities. Otherwise that of the test.
    pub uid: Option<u32>,
    /// When to stop killing.
    pub until: Option<Instant>,
    /// The name of the working directory.
    pub work: OsString,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// How often it was killed.
    pub kills: u32,
    /// How often it was resumed.
    pub resumed: u32,
    /// The message of a refused resume. The job has ended then.
    pub refused: Option<String>,
    /// What is wrong. It ends the job.
    pub wrong: Option<String>,
    /// What was done, with times.
    pub events: String,
}

/// The directory and the command line of a job.
pub struct HabitJob {
    /// Its sandbox: [`Plan::work`] is the working directory, `outside` another one.
    pub sandbox: Sandbox,
    work: OsString,
    habits: Vec<String>,
    options: Vec<String>,
    uid: Option<u32>,
    /// How often ckpt-run was started.
    starts: u32,
    begun: Instant,
    events: String,
}

/// A job after an attempt to resume it.
pub enum State {
    /// It runs.
    Runs(Running),
    /// The resume was refused by name.
    Refused(String),
    /// It failed.
    Wrong(String),
    /// It has ended as it should.
    Ended,
}

impl HabitJob {
    /// Prepares a job in a sandbox: its working directory, and the files that exist before it starts.
    ///
    /// # Panics
    /// When these cannot be made.
    #[must_use]
    pub fn new(sandbox: Sandbox, plan: &Plan) -> Self {
        let Plan { habits, options, uid, work, .. } = plan.clone();
        fs::write(sandbox.path().join("slow"), "").expect("a file");
        let job = Self {
            sandbox,
            work,
            habits,
            options,
            uid,
            starts: 0,
            begun: Instant::now(),
            events: String::new(),
        };
        job.own(job.sandbox.path());
        job.make_directories(job.sandbox.path());
        job.plain(&job.sandbox.path().join(&job.work), &["--prepare"]);
        job
    }

    fn own(&self, path: &Path) {
        if let Some(uid) = self.uid {
            chown(path, Some(uid), Some(uid)).expect("chown");
        }
    }

    fn make_directories(&self, top: &Path) {
        for dir in [&*self.work, OsStr::new("outside")] {
            fs::create_dir(top.join(dir)).expect("a directory");
            self.own(&top.join(dir));
        }
    }

    /// The command as the user of the job.
    fn as_user(&self, inner: Command) -> Command {
        let Some(uid) = self.uid else { return inner };
        let uid = uid.to_string();
        let mut outer = Command::new("setpriv");
        outer.args(["--reuid", &uid, "--regid", &uid, "--clear-groups", "--inh-caps", "-all"]);
        outer.args(["--ambient-caps", "-all"]).arg(inner.get_program()).args(inner.get_args());
        outer.current_dir(inner.get_current_dir().expect("a directory")).stdin(Stdio::null());
        set_variables(&mut outer, &inner);
        outer.env_remove("XDG_RUNTIME_DIR");
        outer
    }

    /// A `ckpt-run` command in the job's working directory.
    pub fn command<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = self.sandbox.command(arguments);
        command.env_remove("CKPT_FILES_EXCLUDE");
        command.current_dir(self.sandbox.path().join(&self.work)).env("PYTHONPATH", python_path());
        self.as_user(command)
    }

    /// Runs the program without ckpt-run.
    fn plain(&self, dir: &Path, options: &[&str]) {
        let mut command = Command::new(python());
        command.arg(program()).args(options).args(&self.habits).current_dir(dir).stdin(Stdio::null());
        command
            .env("PYTHONPATH", python_path())
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("OMP_NUM_THREADS", "1");
        let output = self.as_user(command).output().expect("python runs");
        assert!(output.status.success(), "{:?} {options:?}: {}", self.habits, said(&output));
    }

    /// The command that starts or resumes the job.
    #[must_use]
    pub fn run_command(&self) -> Command {
        let mut arguments: Vec<OsString> = self.options.iter().map(Into::into).collect();
        arguments.extend(["--".into(), python().into(), program().into()]);
        arguments.extend(["--slow-while", "../slow"].map(Into::into));
        arguments.extend(self.habits.iter().map(Into::into));
        self.command(arguments)
    }

    /// Starts ckpt-run. Each start has its own logs, since a resume cuts logs that are appended to.
    pub fn launch(&mut self, command: Command) -> Running {
        self.starts += 1;
        self.sandbox.start_command(&format!("run{}", self.starts), command)
    }

    fn log(&self, kind: &str) -> String {
        self.sandbox.read(&format!("run{}.{kind}", self.starts))
    }

    /// Starts the job and waits until its habits have begun.
    ///
    /// # Panics
    /// When it ends before.
    pub fn start(&mut self) -> Running {
        self.note("start");
        let mut running = self.launch(self.run_command());
        running.until("the habits have begun", || self.log("out").contains("begun").then_some(()));
        running.until("a launcher that answers", || {
            let output = self.command(["status", "--json"]).output().expect("ckpt-run runs");
            String::from_utf8_lossy(&output.stdout).contains("launcher_pid\": ").then_some(())
        });
        running
    }

    /// Takes a snapshot. Some moments do not allow one.
    ///
    /// # Errors
    /// The message of the last failed attempt, or the job has ended.
    pub fn checkpoint(&mut self, running: &mut Running) -> Result<(), String> {
        let (mut last, mut failed) = (String::new(), 0);
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while failed < FAILED_CHECKPOINTS_MAX && Instant::now() < deadline {
            let output = self.command(["checkpoint"]).output().expect("ckpt-run runs");
            if output.status.success() {
                self.note(&format!("checkpoint {}", String::from_utf8_lossy(&output.stdout).trim()));
                return Ok(());
            }
            if running.has_ended() {
                return Err(match self.ended(running) {
                    State::Refused(what) | State::Wrong(what) => what,
                    State::Ended | State::Runs(_) => "the job has ended too soon".into(),
                });
            }
            last = said(&output);
            // A launcher that has just resumed the job answers a moment later.
            failed += u32::from(!last.contains("is not running"));
            self.note(&format!("no checkpoint: {}", last.trim()));
            std::thread::sleep(Duration::from_millis(20));
        }
        Err(format!("no checkpoint is possible: {last}"))
    }

    /// Adds a line to what was done.
    pub fn note(&mut self, what: &str) {
        let _ = writeln!(self.events, "{:8.3} {what}", self.begun.elapsed().as_secs_f64());
    }

    /// What was done, with times in seconds.
    #[must_use]
    pub fn events(&self) -> &str {
        &self.events
    }

    /// Resumes the job and waits until it runs.
    ///
    /// # Panics
    /// When it neither runs nor ends.
    pub fn resume(&mut self) -> State {
        let mut running = self.launch(self.run_command());
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let has_ended = running.has_ended();
            let err = self.log("err");
            if err.contains("resumed from snapshot") && !has_ended {
                self.note(err.trim());
                return State::Runs(running);
            }
            if has_ended {
                return self.ended(&mut running);
            }
            assert!(Instant::now() < deadline, "no resume: {}", running.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// How a job that is no longer running has ended.
    fn ended(&mut self, running: &mut Running) -> State {
        let status = running.wait_status();
        self.note(&format!("{status}\n{}", running.said().trim()));
        let err = self.log("err");
        let line_with = |text: &str| err.lines().find(|line| line.contains(text)).map(str::to_owned);
        match line_with(REFUSAL) {
            _ if status.success() => State::Ended,
            Some(line) => State::Refused(line),
            None => {
                let reason = line_with("fail: ").or_else(|| line_with("error: "));
                State::Wrong(reason.unwrap_or_else(|| status.to_string()))
            }
        }
    }

    /// Lets the job run to its end and compares its files with those of an unbroken run.
    ///
    /// # Errors
    /// What is wrong.
    ///
    /// # Panics
    /// When the job does not end.
    pub fn finish(&mut self, mut running: Running) -> Result<(), String> {
        self.note("let the job end");
        fs::remove_file(self.sandbox.path().join("slow")).expect("a slow job");
        let deadline = Instant::now() + END_LIMIT;
        while !running.has_ended() {
            assert!(Instant::now() < deadline, "{:?} does not end: {}", self.habits, running.said());
            std::thread::sleep(Duration::from_millis(5));
        }
        match self.ended(&mut running) {
            State::Ended => self.compare(),
            State::Refused(what) | State::Wrong(what) => Err(what),
            State::Runs(_) => unreachable!("it has ended"),
        }
    }

    fn compare(&mut self) -> Result<(), String> {
        let out = self.log("out");
        let steps = out.lines().rev().find_map(|line| line.strip_prefix("steps "));
        let steps = steps.ok_or_else(|| format!("the job has not said how many steps it did: {out}"))?;
        let unbroken = self.sandbox.path().join("unbroken");
        fs::create_dir(&unbroken).expect("a directory");
        self.own(&unbroken);
        self.make_directories(&unbroken);
        self.plain(&unbroken.join(&self.work), &["--prepare"]);
        self.plain(&unbroken.join(&self.work), &["--steps", steps]);
        let differences: Vec<_> = [&*self.work, OsStr::new("outside")]
            .iter()
            .flat_map(|dir| {
                Tree::read(&self.sandbox.path().join(dir)).differences(&Tree::read(&unbroken.join(dir)))
            })
            .collect();
        if differences.is_empty() { Ok(()) } else { Err(differences.join("; ")) }
    }
}

impl Drop for HabitJob {
    fn drop(&mut self) {
        if let Some(uid) = self.uid {
            // Where sockets are, as there is no XDG_RUNTIME_DIR.
            let _ = fs::remove_dir_all(format!("/tmp/ckpt-run-{uid}"));
        }
    }
}

/// Runs one job as planned.
///
/// # Panics
/// When ckpt-run or the program does something that has nothing to do with files.
#[must_use]
pub fn run(sandbox: Sandbox, plan: &Plan) -> Outcome {
    run_prepared(HabitJob::new(sandbox, plan), plan)
}

/// The same for a job that was prepared.
///
/// # Panics
/// When ckpt-run or the program does something that has nothing to do with files.
#[must_use]
pub fn run_prepared(mut job: HabitJob, plan: &Plan) -> Outcome {
    let mut random = seeded_rng(plan.seed);
    let mut outcome = Outcome::default();
    match kills(&mut job, plan, &mut random, &mut outcome) {
        Ok(running) => outcome.wrong = job.finish(running).err(),
        Err(State::Refused(what)) => outcome.refused = Some(what),
        Err(State::Wrong(what)) => outcome.wrong = Some(what),
        Err(State::Ended | State::Runs(_)) => outcome.wrong = Some("the job has ended too soon".into()),
    }
    outcome.events = std::mem::take(&mut job.events);
    outcome
}

/// Kills and resumes the job; returns it while it runs.
fn kills(
    job: &mut HabitJob,
    plan: &Plan,
    random: &mut fastrand::Rng,
    outcome: &mut Outcome,
) -> Result<Running, State> {
    let is_by_interval = plan.options.iter().any(|option| option == "--interval");
    let mut running = job.start();
    if is_by_interval {
        running.until("a snapshot", || job.log("err").contains("ckpt-run: snapshot ").then_some(()));
    }
    for _ in 0..plan.kills {
        if is_by_interval {
            sleep_randomly(random, 2500);
        } else {
            for _ in 0..random.u32(1..=2) {
                sleep_randomly(random, 300);
                job.checkpoint(&mut running).map_err(State::Wrong)?;
            }
        }
        // Some kills hit a checkpoint.
        let under_way = (random.u32(..3) == 0).then(|| spawn_checkpoint(job));
        sleep_randomly(random, 400);
        let is_launcher_only = random.bool();
        if running.has_ended() {
            return Err(job.ended(&mut running));
        }
        match is_launcher_only {
            true => running.kill_launcher(),
            false => running.kill_everything(),
        }
        if let Some(mut checkpoint) = under_way {
            checkpoint.wait().expect("wait");
        }
        outcome.kills += 1;
        job.note(if is_launcher_only { "kill of the launcher" } else { "kill of everything" });
        running = match job.resume() {
            State::Runs(running) => running,
            other => return Err(other),
        };
        outcome.resumed += 1;
        if plan.until.is_some_and(|until| Instant::now() > until) {
            break;
        }
    }
    Ok(running)
}

fn spawn_checkpoint(job: &mut HabitJob) -> Child {
    job.note("a checkpoint begins");
    let mut command = job.command(["checkpoint"]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("ckpt-run runs")
}

fn sleep_randomly(random: &mut fastrand::Rng, most_ms: u64) {
    std::thread::sleep(Duration::from_millis(random.u64(..most_ms)));
}

/// The program of the habits.
#[must_use]
pub fn program() -> PathBuf {
    programs().join("files/habits.py")
}

/// The names of all habits, as the program lists them.
///
/// # Panics
/// When it does not run.
#[must_use]
pub fn listed() -> Vec<String> {
    let mut command = Command::new(python());
    let output = command.arg(program()).arg("--list").env("PYTHONDONTWRITEBYTECODE", "1").output();
    let output = output.expect("python runs");
    assert!(output.status.success(), "{}", said(&output));
    String::from_utf8(output.stdout).expect("names").lines().map(str::to_owned).collect()
}

/// Where the program finds LMDB.
fn python_path() -> String {
    from_env("CKPT_TEST_LMDB", || crate::workspace().join("target/tools/lmdb/lib/python3.11/site-packages"))
        .to_string_lossy()
        .into_owned()
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}
