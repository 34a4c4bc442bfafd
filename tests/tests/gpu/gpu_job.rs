//! A GPU program under ckpt-run, and what the tests do to it.

use rustix::process::Signal;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::process::Command;
use std::time::{Duration, Instant};

use ckpt_run_tests::gpu::{Gpu, built, cuda_bindings_alone, cuda_program, succeed};
use ckpt_run_tests::processes::descendants;
use ckpt_run_tests::{Running, Sandbox, is_full_run, seeded_rng, set_variables, torchrun_with_two_ranks};

/// How often most jobs are killed: 5 times, or as often as `CKPT_TEST_KILLS` says.
pub fn kills() -> u32 {
    std::env::var("CKPT_TEST_KILLS").map_or(5, |text| text.parse().expect("a number"))
}

/// The same for jobs of many processes, which take long: twice.
pub fn few_kills() -> u32 {
    if is_full_run() { kills() } else { 2 }
}

/// Steps of a job that rests between them and lasts longer than all kills take.
pub fn steps() -> String {
    (100 * kills()).to_string()
}

const LONGEST_LIFE_MS: u64 = 1000;
/// How long a snapshot may take to come: the job may have to be resumed before.
const LONGEST_WAIT: Duration = Duration::from_secs(600);
/// A job whose first snapshot takes longer is slow: eight ranks that poll sockets on two cores.
const SLOW_SNAPSHOT: Duration = Duration::from_secs(20);

/// A job on a simulated GPU in a sandbox.
pub struct GpuJob {
    pub sandbox: Sandbox,
    /// Lives as long as the job.
    _gpu: Gpu,
    pub program: Command,
    /// Arguments that slow the job down, so that it can be killed many times.
    slowness: Vec<OsString>,
    /// The file with the output that is compared.
    pub output: &'static str,
}

impl GpuJob {
    pub fn new(program: impl FnOnce(&Gpu, &Sandbox) -> Command) -> Self {
        let (sandbox, gpu) = (Sandbox::new(), Gpu::new());
        let program = program(&gpu, &sandbox);
        Self { sandbox, _gpu: gpu, program, slowness: Vec::new(), output: "job.out" }
    }

    /// A C program of `tests/programs/cuda`. Its work on the GPU takes long enough to be interrupted.
    pub fn in_c(name: &str) -> Self {
        Self::new(|gpu, sandbox| {
            let mut command = gpu.command(gpu.compile(&cuda_program(name), sandbox.path()));
            command.arg(steps()).env("SIMCUDA_JITTER", "1");
            command
        })
    }

    /// A script of `tests/programs/cuda`.
    pub fn in_python(name: &str) -> Self {
        Self::new(|gpu, _| {
            let mut command = gpu.python(name);
            command.arg(steps());
            command
        })
    }

    /// Two ranks that use the GPU by cuda-bindings and gloo between each other, with PyTorch's own Python.
    pub fn torchrun(steps: &str) -> Self {
        let mut job = Self::new(|gpu, sandbox| {
            let argv = torchrun_with_two_ranks();
            let mut command = gpu.command(&argv[0]);
            command.args(&argv[1..]).arg(cuda_program("torchrun_job.py")).args([steps, "steps.txt"]);
            let path = cuda_bindings_alone(sandbox.path());
            command.env("PYTHONPATH", path).env("PYTHONDONTWRITEBYTECODE", "1");
            command
        });
        job.output = "steps.txt";
        job
    }

    pub fn slowed_by<S: Into<OsString>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.slowness = arguments.into_iter().map(Into::into).collect();
        self
    }

    /// Output of an unbroken run without ckpt-run, on a GPU of its own.
    pub fn unbroken(&self) -> String {
        self.unbroken_with(self.program.get_args())
    }

    /// The same with other arguments.
    pub fn unbroken_with<'a>(&self, arguments: impl Iterator<Item = &'a OsStr>) -> String {
        let (gpu, sandbox) = (Gpu::new(), Sandbox::new());
        let mut command = Command::new(self.program.get_program());
        command.args(arguments).env("OMP_NUM_THREADS", "1").current_dir(sandbox.path());
        set_variables(&mut command, &self.program);
        command.env("SIMCUDA_DIR", gpu.directory()).env_remove("SIMCUDA_JITTER");
        let printed = succeed(command);
        if self.output == "job.out" { printed } else { sandbox.read(self.output) }
    }

    pub fn command(&self, interpose: impl Into<OsString>) -> Command {
        let mut command = self.sandbox.command(["--interpose".into(), interpose.into()]);
        command.arg("--").arg(self.program.get_program()).args(self.program.get_args()).args(&self.slowness);
        set_variables(&mut command, &self.program);
        command
    }

    pub fn start(&self) -> Running {
        self.sandbox.start_command("job", self.command(library()))
    }

    /// Creates the file that keeps a job of `tests/programs/cuda` slow.
    pub fn slow_down(&self) {
        std::fs::write(self.sandbox.path().join("slow"), "").expect("a file");
    }

    pub fn full_speed(&self) {
        std::fs::remove_file(self.sandbox.path().join("slow")).expect("it was slow");
    }

    pub fn output(&self) -> String {
        self.sandbox.read(self.output)
    }

    /// Waits until the job has printed `more` further lines.
    pub fn until_more_lines(&self, job: &mut Running, more: usize) {
        let lines = || self.output().lines().count();
        let goal = lines() + more;
        job.until("more lines", || (lines() >= goal).then_some(()));
    }

    /// Starts the job, saves it once it has printed two lines, and lets it print more.
    pub fn start_and_save(&self) -> Running {
        let mut job = self.start();
        job.until_answering(&self.sandbox);
        self.until_more_lines(&mut job, 2);
        job.checkpoint(&self.sandbox);
        self.until_more_lines(&mut job, 1);
        job
    }

    /// Kills the job at random moments: while it runs, while it is saved, while it is resumed. The last run ends.
    /// Returns the output.
    pub fn killed_at_random_moments(&self, kills: u32) -> String {
        let mut random = rng_of_this_test();
        self.slow_down();
        let mut job = self.start_and_save();
        for kill in 1..=kills {
            job.kill_everything();
            let mut command = self.command(library());
            if kill < kills {
                command.env("CKPT_INTERVAL", "250ms");
            } else {
                self.full_speed();
            }
            job = self.sandbox.start_command("job", command);
            let death = Instant::now() + Duration::from_millis(random.u64(..LONGEST_LIFE_MS));
            while kill < kills && Instant::now() < death {
                assert!(!job.has_ended(), "it was to be killed in the middle\n{}", job.said());
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
        self.sandbox.verify_all();
        self.output()
    }

    /// Kills the job at random moments; its output has to be that of an unbroken run.
    pub fn survives(&self, kills: u32) {
        let output = self.killed_at_random_moments(kills);
        assert_eq!(output, self.unbroken());
    }

    /// Kills, at random moments and so often each: one process of the program, the job's init with all processes, and the
    /// launcher. The launcher resumes the job by itself after the first, and ends after the second. Half of the kills
    /// come once there is a new snapshot; if snapshots take long, only the first three. Then the job is told that it is enough; its output has to be that of an
    /// unbroken run with so many steps.
    pub fn survives_kills_of_each_kind(&self, kills: u32) {
        let mut random = rng_of_this_test();
        self.slow_down();
        let begun = Instant::now();
        let mut job = self.start_and_save();
        // A job of many ranks takes longer to begin.
        let longest_life = Duration::from_millis(LONGEST_LIFE_MS).max(2 * begun.elapsed());
        let each = if begun.elapsed() < SLOW_SNAPSHOT { 2 } else { kills };
        job.kill_launcher();
        let start = || {
            let mut command = self.command(library());
            command.env("CKPT_INTERVAL", "250ms").env("CKPT_MAX_RESTARTS", "1000");
            self.sandbox.start_command("job", command)
        };
        job = start();
        let (mut saved, mut newest) = (0, self.newest());
        for kill in 0..3 * kills {
            if kill / 3 % each == 0 {
                self.until_newer(&newest, &mut job, &start);
                saved += 1;
            }
            let death = Instant::now() + longest_life.mul_f64(random.f64());
            while Instant::now() < death {
                started_again(&mut job, &start);
                std::thread::sleep(Duration::from_millis(1));
            }
            let launcher = job.pid().cast_signed();
            match kill % 3 {
                0 => random.choice(self.processes(launcher)).into_iter().for_each(kill_process),
                1 => init_below(launcher).into_iter().for_each(kill_process),
                _ => {
                    job.kill_launcher();
                    job = start();
                }
            }
            newest = self.newest();
        }
        job.kill_launcher();
        let steps = self.ends_when_told(0);
        let report = self.sandbox.json(["report", "--json"]);
        // Ranks wait for one that was killed, and for those that come back later: none is late.
        assert_eq!(report["late_ranks"].as_array().map(Vec::len), Some(0), "{}", report["late_ranks"]);
        let sessions = report["sessions"].as_array().expect("a list").iter();
        let resumed_from: BTreeSet<_> = sessions.filter_map(|one| one["resumed_from"].as_str()).collect();
        println!("{} kills, {} snapshots resumed from, {steps:?} steps", 3 * kills + 2, resumed_from.len());
        // A launcher may store one more while a rank is killed, so that the wait for the next one is short.
        assert!(2 * resumed_from.len() >= saved, "of {saved}: {resumed_from:?}");
    }

    /// Resumes the job, and tells it that it is enough: its output has to be that of an unbroken run with so many steps, which
    /// is what the argument number `steps_at` says. Returns how many they were.
    pub fn ends_when_told(&self, steps_at: usize) -> OsString {
        self.full_speed();
        let mut job = self.start();
        job.until_answering(&self.sandbox);
        self.until_more_lines(&mut job, 1);
        // Not before: the resume would take it for a file that the job had made in its last moments.
        std::fs::write(self.sandbox.path().join("enough"), "").expect("a file");
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
        self.sandbox.verify_all();
        let output = self.output();
        let steps = OsString::from(output.lines().count().to_string());
        let mut arguments: Vec<&OsStr> = self.program.get_args().collect();
        arguments[steps_at] = &steps;
        assert_eq!(output, self.unbroken_with(arguments.into_iter()));
        steps
    }

    fn newest(&self) -> Option<String> {
        self.sandbox.snapshots().pop()
    }

    /// Waits for a snapshot that is newer than this one.
    fn until_newer(&self, than: &Option<String>, job: &mut Running, start: &impl Fn() -> Running) {
        let end = Instant::now() + LONGEST_WAIT;
        while self.newest() <= *than {
            started_again(job, start);
            assert!(Instant::now() < end, "no snapshot after {than:?}\n{}", job.said());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The processes of the program.
    fn processes(&self, launcher: i32) -> Vec<i32> {
        let name = std::path::Path::new(self.program.get_program()).file_name();
        let is_the_program = |pid: &i32| {
            let exe = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            exe.file_name() == name
        };
        descendants(launcher).into_iter().filter(is_the_program).collect()
    }

    /// Preempts the job several times: each time the last snapshot has its GPU state.
    pub fn is_preempted(&self, times: u32) {
        self.slow_down();
        for _ in 0..times {
            let mut job = self.start();
            job.until_answering(&self.sandbox);
            self.until_more_lines(&mut job, 2);
            job.signal(Signal::TERM);
            assert_eq!(job.wait(), 75, "{}", job.said());
        }
        let snapshots = self.sandbox.snapshots();
        let newest = snapshots.last().expect("a snapshot");
        assert!(newest.starts_with(&format!("{times:06}-")), "each time there was one: {snapshots:?}");
        self.full_speed();
        let mut job = self.start();
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert_eq!(self.output(), self.unbroken());
    }

    /// Kills the job, but not its launcher, which resumes it.
    pub fn is_restarted(&self, times: u32) {
        self.slow_down();
        let mut command = self.command(library());
        command.env("CKPT_MAX_RESTARTS", "100");
        let mut job = self.sandbox.start_command("job", command);
        job.until_answering(&self.sandbox);
        for round in 1..=times {
            self.until_more_lines(&mut job, 2);
            job.checkpoint(&self.sandbox);
            kill_process(*self.processes(job.pid().cast_signed()).first().expect("it runs"));
            job.until("a restart", || {
                let status = self.sandbox.json(["status", "--json"]);
                (status[0]["restarts"] == round && status[0]["restart_s"].is_null()).then_some(())
            });
        }
        self.full_speed();
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert_eq!(self.output(), self.unbroken());
    }

    /// A checkpoint is refused with the process and this reason, and the job continues. With the file `private` the job
    /// releases the resource that cannot be saved; then it is saved, killed and resumed.
    pub fn is_refused_until_private(&self, because: &str) {
        let program = format!("({})", self.program.get_program().display());
        self.slow_down();
        let mut job = self.start();
        job.until_answering(&self.sandbox);
        for _ in 0..2 {
            self.until_more_lines(&mut job, 2);
            let refused = self.sandbox.call(["checkpoint"]);
            assert_eq!(refused.status.code(), Some(1), "{refused:?}");
            let reason = String::from_utf8_lossy(&refused.stderr);
            for told in ["process ", &program, because] {
                assert!(reason.contains(told), "{told}: {reason}");
            }
        }
        std::fs::write(self.sandbox.path().join("private"), "").expect("a file");
        self.until_more_lines(&mut job, 3);
        job.checkpoint(&self.sandbox);
        self.until_more_lines(&mut job, 2);
        job.kill_everything();
        self.full_speed();
        let mut job = self.start();
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert_eq!(self.output(), self.unbroken());
    }
}

/// Starts the job again if its launcher has ended.
fn started_again(job: &mut Running, start: &impl Fn() -> Running) {
    if job.has_ended() {
        let status = job.wait_status();
        assert!(!status.success(), "it was to be killed in the middle\n{}", job.said());
        *job = start();
    }
}

/// The first process of a job's PID namespace, a child of the launcher's.
fn init_below(launcher: i32) -> Option<i32> {
    let is_the_first = |pid: &i32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        field("PPid:").trim() == launcher.to_string()
            && field("NSpid:").split_whitespace().next_back() == Some("1")
    };
    descendants(launcher).into_iter().find(is_the_first)
}

fn kill_process(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a PID");
    // It may have ended already.
    let _ = rustix::process::kill_process(pid, Signal::KILL);
}

/// A generator with the same numbers in each run, and different ones in each test.
fn rng_of_this_test() -> fastrand::Rng {
    let mut hasher = DefaultHasher::new();
    std::thread::current().name().expect("the thread of a test is named after it").hash(&mut hasher);
    seeded_rng(hasher.finish())
}

pub fn library() -> OsString {
    built("libckpt_interpose.so").into()
}
