//! Programs with GPU state under ckpt-run: saved, killed at random moments, resumed, with the same output as if
//! nothing had happened.

use rustix::process::Signal;
use serde_json::Value;
use std::ffi::OsString;
use std::process::Command;
use std::time::{Duration, Instant};

use ckpt_run_tests::gpu::{Gpu, built, cuda_bindings_alone, cuda_program, example, libcuda_dir, succeed};
use ckpt_run_tests::{Running, Sandbox, set_variables, torchrun_with_two_ranks, until};

/// How often each job is killed, but for those that are killed 20 times in any case: 5 times, or as `CKPT_TEST_KILLS` says.
fn kills() -> u32 {
    std::env::var("CKPT_TEST_KILLS").map_or(5, |text| text.parse().expect("a number"))
}
/// More than a program rests through while it is killed so often.
fn steps() -> String {
    (160 * kills()).to_string()
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
        set_variables(&mut command, &self.program);
        command.env("SIMCUDA_DIR", gpu.directory()).env_remove("SIMCUDA_JITTER");
        let printed = succeed(command);
        if self.output == "job.out" { printed } else { sandbox.read(self.output) }
    }

    fn command(&self, interpose: impl Into<OsString>) -> Command {
        let mut command = self.sandbox.command(["--interpose".into(), interpose.into()]);
        command.arg("--").arg(self.program.get_program()).args(self.program.get_args()).args(&self.slowness);
        set_variables(&mut command, &self.program);
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

    /// Preempted again and again: what is on the GPU goes into the snapshot with which the job ends.
    fn is_preempted(&self, times: u32) {
        self.slow_down();
        for _ in 0..times {
            let mut job = self.start();
            job.until_answering(&self.sandbox);
            self.until_more_lines(&mut job, 2);
            job.signal(Signal::TERM);
            assert_eq!(job.wait(), 75, "{}", job.said());
        }
        assert_eq!(self.sandbox.snapshots().len(), times.min(3) as usize, "each time there was one");
        self.full_speed();
        let mut job = self.start();
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert_eq!(self.output(), self.unbroken());
    }

    /// Killed under its launcher, which resumes it by itself.
    fn is_restarted(&self, times: u32) {
        self.slow_down();
        let mut command = self.command(library());
        command.env("CKPT_MAX_RESTARTS", "100");
        let mut job = self.sandbox.start_command("job", command);
        job.until_answering(&self.sandbox);
        for round in 1..=times {
            self.until_more_lines(&mut job, 2);
            job.checkpoint(&self.sandbox);
            let name = self.program.get_program();
            let is_the_program = |pid: &i32| {
                let exe = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
                exe.file_name() == std::path::Path::new(name).file_name()
            };
            let pid = job.descendants().into_iter().find(is_the_program).expect("it runs");
            let pid = rustix::process::Pid::from_raw(pid).expect("a PID");
            rustix::process::kill_process(pid, Signal::KILL).expect("it runs");
            job.until("a restart", || {
                let status = self.sandbox.json(["status", "--json"]);
                (status[0]["restarts"] == round && status[0]["restart_s"].is_null()).then_some(())
            });
        }
        self.full_speed();
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert_eq!(self.output(), self.unbroken());
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
fn programs_are_preempted() {
    GpuJob::in_c("vmm.c").is_preempted(4);
    GpuJob::in_c("pools.c").is_preempted(2);
}

#[test]
fn a_program_is_restarted_by_its_launcher() {
    GpuJob::in_c("vmm.c").is_restarted(3);
}

/// How long a job here does nothing before it is taken for hung.
const HANG_TIMEOUT: Duration = Duration::from_secs(2);

/// A job whose stream can be made to hang, and that waits for it in this way.
fn hanging(how: Option<&str>) -> GpuJob {
    let mut job = GpuJob::in_c("hangs.c");
    if let Some(how) = how {
        job.program.env("HANGS_WAIT", how);
    }
    job.slow_down();
    job
}

fn start_watched(job: &GpuJob, interval: &str) -> Running {
    let mut command = job.command(library());
    command.env("CKPT_MAX_RESTARTS", "9").env("CKPT_LOG_FILE", "messages");
    command.env("CKPT_HANG_TIMEOUT", format!("{}s", HANG_TIMEOUT.as_secs()));
    command.env("CKPT_MONITOR_INTERVAL", "100ms");
    command.env("CKPT_INTERVAL", interval).env("CKPT_FREEZE_TIMEOUT", "2s");
    job.sandbox.start_command("job", command)
}

/// A stream that never ends: the job is found to hang, and goes on from before that. Snapshots of the hang are tried
/// all the time, and refused.
fn a_hanging_stream_is_found(how: Option<&str>, expected: &str) {
    let job = hanging(how);
    let mut running = start_watched(&job, "1500ms");
    running.until_answering(&job.sandbox);
    job.until_more_lines(&mut running, 2);
    running.checkpoint(&job.sandbox);
    std::fs::write(job.sandbox.path().join("hang"), "").expect("a file");
    running
        .until("a restart", || job.sandbox.read("messages").contains("resumed from snapshot").then_some(()));
    let messages = job.sandbox.read("messages");
    assert!(messages.contains(&format!("the job hangs: {expected}")), "{messages}");
    assert!(messages.contains("no snapshot this time"), "{messages}");
    let attempts = std::fs::read_dir(job.sandbox.job_dir().join("attempts")).expect("attempts");
    let hang = attempts.map(|entry| entry.expect("an entry").path());
    let hang = hang.filter(|path| path.to_string_lossy().contains("-hang-")).max().expect("stacks");
    let stacks = std::fs::read_to_string(hang.join("stacks.txt")).expect("stacks");
    assert!(stacks.contains("thread") && stacks.contains(" hangs: state "), "{stacks}");
    job.full_speed();
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
    assert!(job.sandbox.ok(["explain"]).contains(&format!("it hung: {expected}")));
}

#[test]
fn a_stream_that_never_ends_is_found() {
    a_hanging_stream_is_found(None, "none of its processes");
}

/// The process uses a CPU all the time, as with a real driver.
#[test]
fn a_stream_that_is_waited_for_by_spinning_is_found() {
    a_hanging_stream_is_found(Some("stream"), "process 10002 (hangs) has waited for its GPU for 2s");
}

#[test]
fn an_event_that_is_waited_for_by_spinning_is_found() {
    a_hanging_stream_is_found(Some("event"), "process 10002 (hangs) has waited for its GPU for 2s");
}

#[test]
fn a_copy_that_spins_is_found() {
    a_hanging_stream_is_found(Some("copy"), "process 10002 (hangs) has waited for its GPU for 2s");
}

#[test]
fn a_stream_that_is_asked_again_and_again_is_found() {
    a_hanging_stream_is_found(Some("query"), "process 10002 (hangs) has waited for its GPU for 2s");
}

/// It submits nothing for three times the limit, and waits for nothing either.
#[test]
fn a_job_that_computes_without_its_gpu_is_left_alone() {
    let job = hanging(Some("stream"));
    let mut running = start_watched(&job, "1500ms");
    running.until_answering(&job.sandbox);
    job.until_more_lines(&mut running, 2);
    let compute = job.sandbox.path().join("compute");
    std::fs::write(&compute, "").expect("a file");
    let begun = Instant::now();
    // Nothing else tells that something does not happen.
    while begun.elapsed() < HANG_TIMEOUT * 3 {
        assert!(!running.has_ended(), "{}", running.said());
        std::thread::sleep(Duration::from_millis(50));
    }
    std::fs::remove_file(compute).expect("it computed");
    job.full_speed();
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
    let messages = job.sandbox.read("messages");
    assert!(messages.contains(" saved: ") && !messages.contains("the job hangs"), "{messages}");
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

/// The driver saves it; the snapshot tells how much it is.
#[test]
fn memory_of_graphs_survives() {
    let job = GpuJob::in_c("graph_memory.c");
    job.survives(kills());
    let id = job.sandbox.snapshots().pop().expect("a snapshot");
    let shown = job.sandbox.json(["show", &id, "--json"]);
    let memory = &shown["gpu_processes"][0]["graph_memory"][0];
    assert!(memory["device"] == 0 && memory["used_bytes"].as_u64() >= Some(1024), "{shown}");
    let text = job.sandbox.ok(["show", &id]);
    assert!(text.contains("graphs have ") && text.contains("; the driver saves it"), "{text}");
}

/// What is special about device memory, and which calls have made it, also of a job that was resumed.
#[test]
fn the_memory_map_tells_flags_and_origins() {
    let mut job = GpuJob::in_c("vmm.c");
    job.program.env("CKPT_ORIGINS", "1");
    job.slow_down();
    let program = job.program.get_program().to_string_lossy().into_owned();
    let tells = |running: &mut Running| {
        running.until_answering(&job.sandbox);
        job.until_more_lines(running, 2);
        // Names are looked up when a checkpoint begins: a call that is new since then gets its name with the next one.
        let (id, shown) = until("a snapshot without new calls", || {
            let id = running.checkpoint(&job.sandbox);
            let shown = job.sandbox.json(["show", &id, "--json"]);
            let origins = shown["gpu_processes"][0]["origins"].as_array().expect("origins");
            let is_named = |origin: &Value| origin[0].as_str().is_some_and(|call| !call.starts_with("0x"));
            origins.iter().all(is_named).then_some((id, shown))
        });
        let process = &shown["gpu_processes"][0];
        let regions = process["regions"].as_array().expect("regions");
        assert!(regions.iter().all(|region| region["flags"]["is_parked"] == true), "{shown}");
        for region in regions {
            let origin = region["origin"].as_u64().expect("an origin");
            let innermost = process["origins"][origin as usize][0].as_str().expect("a call");
            assert!(innermost.starts_with(&format!("{program}+0x")), "{innermost}");
        }
        let text = job.sandbox.ok(["show", &id]);
        assert!(text.contains("ALLOCATIONS  FLAGS") && text.contains("  parked"), "{text}");
        assert!(text.contains(&format!("    from {program}+0x")), "{text}");
    };
    let mut first = job.start();
    tells(&mut first);
    first.kill_everything();
    let mut resumed = job.start();
    tells(&mut resumed);
    job.full_speed();
    assert_eq!(resumed.wait(), 0, "{}", resumed.said());
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

/// Snapshots of a job of which little changes, at given steps, and what each has not read (bytes): with hashes only what
/// has changed is read and stored, without them everything. The store fails once.
struct OfLittle {
    /// The device memory in each snapshot.
    memory: Vec<Vec<Vec<u8>>>,
    unread_bytes: Vec<u64>,
}

impl OfLittle {
    const STOPS: [usize; 5] = [2, 4, 6, 8, 11];
    /// Whose save fails.
    const FAILS: usize = 6;

    fn captured_by(way: &str) -> Self {
        let program = |gpu: &Gpu, sandbox: &Sandbox| {
            let mut command = gpu.command(gpu.compile(&cuda_program("little.c"), sandbox.path()));
            command.arg("14").env("CKPT_CAPTURE", way);
            command
        };
        let job = GpuJob::new(program);
        let sandbox = &job.sandbox;
        let stop = |step: &usize| sandbox.path().join(format!("stop-{step}"));
        // At the last of them the first life ends.
        Self::STOPS.iter().chain(&[13]).for_each(|step| std::fs::write(stop(step), "").expect("a file"));
        let mut command = job.command(library());
        command.env("CKPT_KEEP", "9").env("CKPT_FAULT", "save-before-commit@3=error");
        let mut running = sandbox.start_command("job", command);
        running.until_answering(sandbox);
        let (mut ids, mut unread_bytes) = (Vec::new(), Vec::new());
        for step in &Self::STOPS {
            running.until("the step", || (job.output().lines().count() == *step).then_some(()));
            if *step == Self::FAILS {
                let output = sandbox.call(["checkpoint"]);
                assert_eq!(output.status.code(), Some(1), "{output:?}");
            } else {
                let saved = sandbox.json(["checkpoint", "--json"]);
                ids.push(saved["id"].as_str().expect("an ID").to_owned());
                unread_bytes.push(saved["unread_bytes"].as_u64().expect("bytes"));
            }
            std::fs::remove_file(stop(step)).expect("it stood there");
        }
        let totals = sandbox.json(["status", "--json"])[0]["totals"]["unread_bytes"].as_u64();
        assert_eq!(totals, Some(unread_bytes.iter().sum()));
        let status = sandbox.ok(["status"]);
        assert_eq!(status.contains("unchanged and not read"), way == "changed", "{status}");
        running.kill_everything();
        sandbox.verify_all();
        let memory = ids.iter().map(|id| exported(sandbox, id)).collect();

        // Nothing is known of a mirror that was filled from a snapshot, until one is committed again.
        let mut resumed = job.start();
        resumed.until_answering(sandbox);
        assert!(resumed.said().contains("resumed from snapshot"), "{}", resumed.said());
        resumed.until("the step", || (job.output().lines().count() == 13).then_some(()));
        for is_again in [false, true] {
            let saved = sandbox.json(["checkpoint", "--json"]);
            assert_eq!(saved["unread_bytes"].as_u64() > Some(0), way == "changed" && is_again, "{saved}");
        }
        resumed.kill_everything();
        std::fs::remove_file(stop(&13)).expect("it stood there");
        let mut last = job.start();
        assert_eq!(last.wait(), 0, "{}", last.said());
        assert_eq!(job.output(), job.unbroken());
        Self { memory, unread_bytes }
    }
}

/// What is in each region of the device memory in a snapshot, sorted: addresses are others in each run.
fn exported(sandbox: &Sandbox, id: &str) -> Vec<Vec<u8>> {
    let to = sandbox.path().join(format!("exported-{id}"));
    sandbox.ok(["export", id, "--to", to.to_str().expect("UTF-8")]);
    let mut found = Vec::new();
    for process in std::fs::read_dir(to.join("gpu")).expect("device memory") {
        let device = process.expect("a process").path().join("device-0");
        let regions = std::fs::read_dir(device).expect("regions");
        found.extend(regions.map(|region| std::fs::read(region.expect("a region").path()).expect("read")));
    }
    std::fs::remove_dir_all(to).expect("removed");
    found.sort();
    found
}

/// Saved all the time, killed and resumed, with hashes: what is not read again is right in each of its lives.
#[test]
fn a_job_of_which_little_changes_survives() {
    let mut job = GpuJob::in_c("little.c");
    job.program.env("CKPT_CAPTURE", "changed");
    job.survives(kills());
}

/// What is not read again is byte for byte what would have been read.
#[test]
fn what_has_not_changed_is_not_read() {
    let (changed, all) = (OfLittle::captured_by("changed"), OfLittle::captured_by("all"));
    let bytes = |memory: &Vec<Vec<u8>>| memory.iter().map(Vec::len).sum::<usize>() as u64;
    for (number, (changed, all)) in changed.memory.iter().zip(&all.memory).enumerate() {
        assert!(bytes(changed) >= 80 << 20, "{}", bytes(changed));
        assert!(changed == all, "snapshot {number} has something else than is there");
    }
    assert_eq!(all.unread_bytes, [0; 4]);
    let [first, later @ ..] = &changed.unread_bytes[..] else { panic!("no snapshots") };
    assert_eq!(*first, 0);
    let least = bytes(&changed.memory[0]) / 2;
    assert!(later.iter().all(|unread_bytes| *unread_bytes > least), "{later:?}");
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
