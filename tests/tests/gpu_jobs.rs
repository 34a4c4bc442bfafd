//! Programs with GPU state under ckpt-run: saved, killed at random moments, resumed, with the same output as if
//! nothing had happened.

use std::ffi::OsString;
use std::process::Command;
use std::time::{Duration, Instant};

use ckpt_run_tests::gpu::{Gpu, built, cuda_bindings_alone, cuda_program, example, libcuda_dir, succeed};
use ckpt_run_tests::{Running, Sandbox, torchrun_with_two_ranks};

/// How often each job is killed, but for those that are killed 20 times in any case: 5 times, or as `CKPT_TEST_KILLS` says.
fn kills() -> u32 {
    std::env::var("CKPT_TEST_KILLS").map_or(5, |text| text.parse().expect("a number"))
}
/// More than a program rests through while it is killed so often.
fn steps() -> String {
    (80 * kills()).to_string()
}

const LONGEST_LIFE_MS: u64 = 1000;

/// A job on a simulated GPU in a sandbox.
struct GpuJob {
    sandbox: Sandbox,
    /// Lives as long as the job.
    _gpu: Gpu,
    program: Command,
    /// Arguments that only slow it down, so that it can be killed many times.
    slowness: Vec<OsString>,
    /// Where its output goes that is compared.
    output: &'static str,
}

impl GpuJob {
    fn new(program: impl FnOnce(&Gpu, &Sandbox) -> Command) -> Self {
        let (sandbox, gpu) = (Sandbox::new(), Gpu::new());
        let program = program(&gpu, &sandbox);
        Self { sandbox, _gpu: gpu, program, slowness: Vec::new(), output: "job.out" }
    }

    /// A program of `tests/programs/cuda` in C. Its work on the GPU takes long enough to be met in the middle of it.
    fn in_c(name: &str) -> Self {
        Self::new(|gpu, sandbox| {
            let mut command = gpu.command(gpu.compile(&cuda_program(name), sandbox.path()));
            command.arg(steps()).env("SIMCUDA_JITTER", "1");
            command
        })
    }

    /// A script of `tests/programs/cuda`.
    fn in_python(name: &str) -> Self {
        Self::new(|gpu, _| {
            let mut command = gpu.python(name);
            command.arg(steps());
            command
        })
    }

    fn slowed_by<S: Into<OsString>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.slowness = arguments.into_iter().map(Into::into).collect();
        self
    }

    /// What the job prints when nothing happens to it, on a GPU of its own.
    fn unbroken(&self) -> String {
        let (gpu, sandbox) = (Gpu::new(), Sandbox::new());
        let mut command = Command::new(self.program.get_program());
        command.args(self.program.get_args()).env("OMP_NUM_THREADS", "1").current_dir(sandbox.path());
        self.copy_env(&mut command);
        command.env("SIMCUDA_DIR", gpu.directory()).env_remove("SIMCUDA_JITTER");
        let printed = succeed(command);
        if self.output == "job.out" { printed } else { sandbox.read(self.output) }
    }

    fn copy_env(&self, command: &mut Command) {
        for (name, value) in self.program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
    }

    fn command(&self, interpose: impl Into<OsString>) -> Command {
        let mut command = self.sandbox.command(["--interpose".into(), interpose.into()]);
        command.arg("--").arg(self.program.get_program()).args(self.program.get_args()).args(&self.slowness);
        self.copy_env(&mut command);
        command
    }

    fn start(&self) -> Running {
        self.sandbox.start_command("job", self.command(library()))
    }

    /// Slow is a job of `tests/programs/cuda` as long as this file is there.
    fn slow_down(&self) {
        std::fs::write(self.sandbox.path().join("slow"), "").expect("a file");
    }

    fn full_speed(&self) {
        std::fs::remove_file(self.sandbox.path().join("slow")).expect("it was slow");
    }

    fn output(&self) -> String {
        self.sandbox.read(self.output)
    }

    /// Waits until the job has printed so many more lines.
    fn until_more_lines(&self, job: &mut Running, more: usize) {
        let lines = || self.output().lines().count();
        let goal = lines() + more;
        job.until("more lines", || (lines() >= goal).then_some(()));
    }

    /// Starts the job, saves it once it has printed two lines, and lets it print more.
    fn start_and_save(&self) -> Running {
        let mut job = self.start();
        job.until_answering(&self.sandbox);
        self.until_more_lines(&mut job, 2);
        job.checkpoint(&self.sandbox);
        self.until_more_lines(&mut job, 1);
        job
    }

    /// Kills the job again and again, in the middle of whatever happens then: running, being saved, being resumed. It
    /// is saved all the time, and then ends. Returns what it has printed.
    fn killed_at_random_moments(&self, kills: u32) -> String {
        let mut random = Random::of_this_test();
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
            let death = Instant::now() + Duration::from_millis(random.below(LONGEST_LIFE_MS));
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

    /// The output has to be that of an unbroken run.
    fn survives(&self, kills: u32) {
        let output = self.killed_at_random_moments(kills);
        assert_eq!(output, self.unbroken());
    }

    /// A checkpoint is refused, with the process and a reason that has these words, and harms nothing: once the file
    /// `private` is there, the job no longer has what cannot be saved, is saved, killed and resumed.
    fn is_refused_until_private(&self, because: &str) {
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

/// xorshift64.
struct Random(u64);

impl Random {
    /// The same numbers in each run, and others in each test.
    fn of_this_test() -> Self {
        let test = std::thread::current();
        let name = test.name().expect("a test's thread has its name").bytes();
        Self(
            name.fold(0x2545_F491_4F6C_DD1D, |seed, byte| {
                (seed ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
            }),
        )
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

fn library() -> OsString {
    built("libckpt_interpose.so").into()
}

/// The example, which prints a line every ten rounds.
fn legacy_job(rounds: u32, rest_ms: u32) -> GpuJob {
    let program = |gpu: &Gpu, sandbox: &Sandbox| {
        let mut command = gpu.command(gpu.compile(&example("legacy-job/legacy-job.c"), sandbox.path()));
        command.args([rounds.to_string(), "200".into()]);
        command
    };
    GpuJob::new(program).slowed_by([rest_ms.to_string()])
}

#[test]
fn legacy_job_survives() {
    legacy_job(450, 15).survives(20);
}

#[test]
fn train_mlp_survives() {
    let program = |gpu: &Gpu, _: &Sandbox| {
        let mut command = gpu.command(built("train-mlp"));
        command.args(["--steps", "200"]);
        command
    };
    GpuJob::new(program).slowed_by(["--rest-ms", "40"]).survives(20);
}

#[test]
fn cuda_bindings_survives() {
    GpuJob::in_python("bindings_job.py").survives(kills());
}

#[test]
fn numba_cuda_survives() {
    GpuJob::in_python("numba_job.py").survives(kills());
}

#[test]
fn graphs_survive() {
    GpuJob::in_c("graphs.c").survives(kills());
}

#[test]
fn sixteen_threads_on_their_default_streams_survive() {
    GpuJob::in_c("threads.c").survives(kills());
}

#[test]
fn memory_that_a_program_maps_itself_survives() {
    GpuJob::in_c("vmm.c").survives(kills());
}

/// Aliases, parts, memory that is mapped nowhere, handles that were released: all is checked by the program itself.
#[test]
fn whatever_a_program_maps_survives() {
    GpuJob::in_c("mappings.c").survives(kills());
}

#[test]
fn stream_ordered_memory_survives() {
    GpuJob::in_c("pools.c").survives(kills());
}

#[test]
fn pinned_memory_events_host_functions_and_globals_survive() {
    GpuJob::in_c("pinned.c").survives(kills());
}

/// Two ranks that use the GPU by cuda-bindings and gloo between each other, with PyTorch's own Python.
#[test]
fn torchrun_with_two_ranks_survives() {
    let mut job = GpuJob::new(|gpu, sandbox| {
        let argv = torchrun_with_two_ranks();
        let mut command = gpu.command(&argv[0]);
        command.args(&argv[1..]).arg(cuda_program("torchrun_job.py")).args([&steps(), "steps.txt"]);
        command.env("PYTHONPATH", cuda_bindings_alone(sandbox.path())).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    });
    job.output = "steps.txt";
    job.survives(kills());
}

/// What the driver says of pointers and handles, and what the memory holds, is in each line: all are the same.
#[test]
fn pointers_and_handles_stay_what_they_are() {
    let job = GpuJob::in_c("pointers.c");
    let output = job.killed_at_random_moments(kills());
    let answers: Vec<_> = output.lines().map(|line| line.split_once(": ").expect("step N: ...").1).collect();
    for answer in &answers {
        assert_eq!(*answer, answers[0]);
    }
    assert_eq!(without_addresses(&output), without_addresses(&job.unbroken()));
}

/// Addresses and handles, printed as `0x...`, are others in each run. So is how much memory is free: without the interposer,
/// small allocations share a block with the driver's own.
fn without_addresses(text: &str) -> String {
    let mut parts = text.split("0x");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |kept, part| kept + "0x" + part.trim_start_matches(|c: char| c.is_ascii_hexdigit()))
}

#[test]
fn memory_that_four_processes_share_survives() {
    GpuJob::in_c("shared.c").survives(kills());
}

#[test]
fn shared_memory_is_refused_while_its_owner_is_gone() {
    GpuJob::in_c("orphan.c").is_refused_until_private("opened device memory (cuIpcOpenMemHandle) of process");
}

/// As on the driver itself: there are no handles of memory but what the launcher passes on.
#[test]
fn the_conformance_suite_finds_memory_shared_as_by_the_driver() {
    let job = GpuJob::new(|gpu, _| {
        let mut command = gpu.command(built("conformance"));
        command.arg("--lib").arg(libcuda_dir().join("libcuda.so.1")).args(["ipc/", "share/"]);
        command
    });
    let mut running = job.start();
    assert_eq!(running.wait(), 0, "{}{}", job.output(), running.said());
    assert!(job.output().contains("pass   ipc/other-process"), "{}", job.output());
}

#[test]
fn managed_memory_is_refused_while_there_is_some() {
    let reason = "it has called cuMemAllocManaged: managed memory cannot be saved; free it";
    GpuJob::in_c("managed.c").is_refused_until_private(reason);
}

#[test]
fn memory_that_a_program_exports_is_refused_while_there_is_some() {
    GpuJob::in_c("exported.c").is_refused_until_private("cuMemExportToShareableHandle");
}

/// The job runs on after each checkpoint as if there had been none.
#[test]
fn a_checkpoint_does_not_change_what_a_job_computes() {
    let job = legacy_job(150, 15);
    let mut running = job.start();
    running.until_answering(&job.sandbox);
    for _ in 0..3 {
        job.until_more_lines(&mut running, 1);
        running.checkpoint(&job.sandbox);
    }
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
}

/// Without the interposer a process with GPU state cannot be saved, which is told and harms nothing.
#[test]
fn without_the_interposer_a_checkpoint_is_refused() {
    let job = legacy_job(100, 15);
    let mut running = job.sandbox.start_command("job", job.command("off"));
    running.until_answering(&job.sandbox);
    job.until_more_lines(&mut running, 1);
    let refused = job.sandbox.call(["checkpoint"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
}
