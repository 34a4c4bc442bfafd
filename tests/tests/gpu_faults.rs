//! What goes wrong while a job's state is taken off the GPU or brought back: calls of the driver that fail, work that
//! does not end, memory that somebody else has taken, and SIGKILL between any two steps. The job goes on unharmed and
//! can be saved the next time, or it ends and resumes right.

use std::ffi::OsString;
use std::fs;
use std::process::Child;

use ckpt_run_tests::gpu::{Gpu, built, example, succeed};
use ckpt_run_tests::{Running, Sandbox, descendants, until};
use rustix::process::Signal;

/// The launcher's exit code when a job was ended, or could not be brought back.
const LAUNCHER_FAILED: i32 = 125;

/// Between any two steps, in their order (interpose, `cuda::checkpoint`).
const DETACH: [&str; 3] = ["detach-gate", "detach-locked", "detach-checkpointed"];
const ATTACH: [&str; 3] = ["attach-begun", "attach-restored", "attach-unlocked"];

struct Job {
    sandbox: Sandbox,
    gpu: Gpu,
    program: Vec<OsString>,
    environment: Vec<(&'static str, OsString)>,
    options: Vec<&'static str>,
}

impl Job {
    fn new(program: impl FnOnce(&Gpu, &Sandbox) -> Vec<OsString>) -> Self {
        let (sandbox, gpu) = (Sandbox::new(), Gpu::new());
        let program = program(&gpu, &sandbox);
        // Armed as long as the file is there, which is not so at first.
        let environment = vec![("CKPT_FAULT_WHILE", sandbox.path().join("armed").into())];
        Self { sandbox, gpu, program, environment, options: Vec::new() }
    }

    /// Launches, allocates, frees and copies for some seconds; prints checksums.
    fn legacy() -> Self {
        Self::new(|gpu, sandbox| {
            let program = gpu.compile(&example("legacy-job/legacy-job.c"), sandbox.path());
            vec![program.into(), "150".into(), "100".into(), "15".into()]
        })
    }

    /// A program that keeps the GPU from standing still, see there.
    fn stalls(mode: &str) -> Self {
        Self::new(|gpu, sandbox| vec![stalls(gpu, sandbox), mode.into()])
            .with_options(&["--freeze-timeout", "1s"])
    }

    fn with(mut self, name: &'static str, value: &str) -> Self {
        self.environment.push((name, value.into()));
        self
    }

    fn with_options(mut self, options: &[&'static str]) -> Self {
        self.options.extend(options);
        self
    }

    fn start(&self) -> Running {
        let mut job = self.start_with(&[]);
        job.until_answering(&self.sandbox);
        job.until("the first line", || (self.lines() > 0).then_some(()));
        job
    }

    fn start_with(&self, options: &[&str]) -> Running {
        let mut command =
            self.sandbox.command(["--interpose".into(), OsString::from(built("libckpt_interpose.so"))]);
        command.args(&self.options).args(options).arg("--").args(&self.program);
        for (name, value) in self.gpu.command("").get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        self.sandbox.start_command("job", command)
    }

    fn arm(&self) {
        self.touch("armed");
    }

    fn disarm(&self) {
        fs::remove_file(self.sandbox.path().join("armed")).unwrap();
    }

    fn touch(&self, name: &str) {
        fs::write(self.sandbox.path().join(name), "").unwrap();
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.sandbox.path().join(name)).unwrap();
    }

    fn is_there(&self, name: &str) -> bool {
        self.sandbox.path().join(name).exists()
    }

    fn lines(&self) -> usize {
        self.sandbox.read("job.out").lines().count()
    }

    fn goes_on(&self, job: &mut Running) {
        let goal = self.lines() + 2;
        job.until("more lines", || (self.lines() >= goal).then_some(()));
    }

    /// A checkpoint that is refused for this reason, which `status` shows too.
    fn is_refused(&self, why: &str) {
        let output = self.sandbox.call(["checkpoint"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(why), "not {why:?}: {said}");
        let status = self.sandbox.json(["status", "--json"]);
        let failure = status[0]["last_failure"].as_str().unwrap_or_default();
        assert!(failure.contains(why), "not {why:?}: {status}");
    }

    /// To be called while the job runs; its output has to be that of one to which nothing happened.
    fn ends_right(&self, job: &mut Running) {
        assert_eq!(job.wait(), 0, "{}", job.said());
        let mut command = Gpu::new().command(&self.program[0]);
        command.args(&self.program[1..]);
        assert_eq!(self.sandbox.read("job.out"), succeed(command));
        self.sandbox.verify_all();
    }

    /// Ends a program that goes on until it is told to.
    fn is_told_to_end(&self, job: &mut Running) {
        self.touch("end");
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert!(self.sandbox.read("job.out").ends_with("right\n"), "{}", job.said());
        self.sandbox.verify_all();
    }
}

fn stalls(gpu: &Gpu, sandbox: &Sandbox) -> OsString {
    let source = example("../tests/programs/cuda/stalls.c");
    gpu.compile(&source, sandbox.path()).into()
}

/// The process of the job that a fault has stopped.
fn stopped_process(job: &Running) -> rustix::process::Pid {
    let pid = until("a stopped process", || {
        let is_stopped = |pid: &i32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        };
        descendants(job.pid().cast_signed()).into_iter().find(is_stopped)
    });
    rustix::process::Pid::from_raw(pid).expect("a process ID")
}

#[test]
fn killed_between_any_two_steps_of_a_checkpoint() {
    for point in [DETACH, ATTACH].concat() {
        let job = Job::legacy().with("CKPT_FAULT", &format!("{point}=kill"));
        let mut running = job.start();
        running.checkpoint(&job.sandbox);
        job.goes_on(&mut running);
        job.arm();
        job.sandbox.call(["checkpoint"]);
        assert_ne!(running.wait(), 0, "{point}: {}", running.said());
        job.disarm();
        job.sandbox.verify_all();
        let mut again = job.start();
        assert!(again.said().contains("resumed from snapshot"), "{point}: {}", again.said());
        job.ends_right(&mut again);
    }
}

#[test]
fn killed_between_any_two_steps_of_a_resume() {
    for point in ATTACH {
        let job = Job::legacy().with("CKPT_FAULT", &format!("{point}=kill"));
        let mut running = job.start();
        running.checkpoint(&job.sandbox);
        running.kill_everything();
        job.arm();
        let mut killed = job.start_with(&[]);
        assert_ne!(killed.wait(), 0, "{point}: {}", killed.said());
        job.disarm();
        let mut again = job.start();
        assert!(again.said().contains("resumed from snapshot"), "{point}: {}", again.said());
        job.ends_right(&mut again);
    }
}

/// The process stands still at each step for longer than a checkpoint may take.
#[test]
fn delayed_between_any_two_steps() {
    for point in [DETACH, ATTACH].concat() {
        let job = Job::legacy().with("CKPT_FAULT", &format!("{point}=delay:2500"));
        let job = job.with_options(&["--freeze-timeout", "1s"]);
        let mut running = job.start();
        job.arm();
        job.sandbox.call(["checkpoint"]);
        job.disarm();
        job.goes_on(&mut running);
        running.checkpoint(&job.sandbox);
        job.ends_right(&mut running);
    }
}

#[test]
fn a_call_that_fails_once_leaves_the_job_alone() {
    for call in ["cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"] {
        let job = Job::legacy().with("SIMCUDA_FAULT", &format!("{call}:1=CUDA_ERROR_NOT_PERMITTED"));
        let mut running = job.start();
        job.is_refused(&format!("{call} failed with CUDA_ERROR_NOT_PERMITTED (800)"));
        job.goes_on(&mut running);
        running.checkpoint(&job.sandbox);
        job.ends_right(&mut running);
    }
}

#[test]
fn an_unlock_that_fails_once_is_tried_again() {
    for also in ["", ";cuCheckpointProcessCheckpoint:1=CUDA_ERROR_UNKNOWN"] {
        let fault = format!("cuCheckpointProcessUnlock:1=CUDA_ERROR_UNKNOWN{also}");
        let job = Job::legacy().with("SIMCUDA_FAULT", &fault);
        let mut running = job.start();
        if also.is_empty() {
            running.checkpoint(&job.sandbox);
        } else {
            job.is_refused("cuCheckpointProcessCheckpoint failed with CUDA_ERROR_UNKNOWN (999)");
        }
        job.goes_on(&mut running);
        running.checkpoint(&job.sandbox);
        job.ends_right(&mut running);
    }
}

#[test]
fn a_call_that_always_fails_refuses_every_checkpoint() {
    for call in ["cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"] {
        let job = Job::legacy().with("SIMCUDA_FAULT", &format!("{call}:1+=CUDA_ERROR_NOT_SUPPORTED"));
        let mut running = job.start();
        for _ in 0..3 {
            job.is_refused(&format!("{call} failed with CUDA_ERROR_NOT_SUPPORTED (801)"));
        }
        job.ends_right(&mut running);
        assert!(job.sandbox.snapshots().is_empty());
    }
}

/// The driver is gone for good: the job is ended, and resumes from the snapshot before.
#[test]
fn a_driver_that_does_not_come_back_ends_the_job() {
    for (call, rule) in [
        ("cuCheckpointProcessRestore", "cuCheckpointProcessRestore:2=CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuCheckpointProcessUnlock", "cuCheckpointProcessUnlock:2+=CUDA_ERROR_UNKNOWN"),
        // Locked, not checkpointed, and not to be unlocked either.
        (
            "cuCheckpointProcessUnlock",
            "cuCheckpointProcessCheckpoint:2+=CUDA_ERROR_UNKNOWN;cuCheckpointProcessUnlock:2+=CUDA_ERROR_UNKNOWN",
        ),
    ] {
        let job = Job::legacy().with("SIMCUDA_FAULT", rule);
        let mut running = job.start();
        let sound = running.checkpoint(&job.sandbox);
        job.goes_on(&mut running);
        job.sandbox.call(["checkpoint"]);
        assert_eq!(running.wait(), LAUNCHER_FAILED, "{rule}: {}", running.said());
        let said = running.said();
        assert!(
            said.contains(&format!("{call} failed with")) && said.contains("GPU state"),
            "{rule}: {said}"
        );
        job.sandbox.verify_all();
        // The driver in the snapshot before has counted one call fewer.
        let mut again = job.start_with(&["--resume", &sound]);
        job.ends_right(&mut again);
    }
}

#[test]
fn a_lock_that_takes_too_long_is_given_up() {
    let job = Job::legacy().with("SIMCUDA_FAULT", "cuCheckpointProcessLock:1=delay:2000");
    let job = job.with_options(&["--freeze-timeout", "1s"]);
    let mut running = job.start();
    let output = job.sandbox.call(["checkpoint"]);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    job.goes_on(&mut running);
    running.checkpoint(&job.sandbox);
    job.ends_right(&mut running);
}

/// What holds the GPU up holds up checkpoints until it is over, and is not harmed by the attempts.
fn is_given_up_while_it_stalls(mode: &str, fault: &str, why: &str) {
    let job = Job::stalls(mode).with("SIMCUDA_FAULT", fault);
    let mut running = job.start();
    job.touch("stall");
    running.until("the stall", || job.is_there("stalled").then_some(()));
    job.is_refused(why);
    job.goes_on(&mut running);
    job.is_refused(why);
    job.remove("stall");
    running.until("the end of the stall", || job.is_there("over").then_some(()));
    running.checkpoint(&job.sandbox);
    running.kill_everything();
    let mut again = job.start();
    job.goes_on(&mut again);
    job.is_told_to_end(&mut again);
}

#[test]
fn a_stream_that_waits_for_the_host() {
    is_given_up_while_it_stalls("wait", "", "work on the GPU did not end in time");
}

#[test]
fn a_capture_that_stays_open() {
    is_given_up_while_it_stalls("capture", "", "a stream capture (cuStreamBeginCapture) did not end");
}

#[test]
fn a_capture_of_a_thread_s_own_stream() {
    is_given_up_while_it_stalls("thread", "", "a stream capture (cuStreamBeginCapture) did not end");
}

/// A capture of which the driver does not say whether it is open is not saved in the middle.
#[test]
fn a_capture_that_the_driver_does_not_answer_for() {
    let fault = "cuStreamIsCapturing:1=CUDA_ERROR_UNKNOWN";
    is_given_up_while_it_stalls("capture", fault, "a stream capture (cuStreamBeginCapture) did not end");
}

/// Another process takes the memory while the job is off the GPU: a driver does not survive that.
#[test]
fn memory_that_another_process_took() {
    let job = Job::legacy().with("SIMCUDA_MEMORY", "64MiB").with("CKPT_FAULT", "attach-begun=stop");
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    let mut hog = Hog::start(&job);
    job.arm();
    std::thread::scope(|scope| {
        scope.spawn(|| job.sandbox.call(["checkpoint"]));
        until("the fault", || job.is_there("armed.stopped").then_some(()));
        let stopped = stopped_process(&running);
        hog.takes_all(&job);
        job.disarm();
        rustix::process::kill_process(stopped, Signal::CONT).unwrap();
    });
    assert_eq!(running.wait(), LAUNCHER_FAILED, "{}", running.said());
    let said = running.said();
    assert!(said.contains("CUDA_ERROR_OUT_OF_MEMORY") && said.contains("GPU state"), "{said}");
    // As long as the memory is not there, the job does not come back, and the snapshots are left alone.
    let mut early = job.start_with(&[]);
    assert_eq!(early.wait(), LAUNCHER_FAILED, "{}", early.said());
    job.sandbox.verify_all();
    hog.ends();
    let mut again = job.start();
    job.ends_right(&mut again);
}

/// A process with memory on the same GPU.
struct Hog(Child);

impl Hog {
    fn start(job: &Job) -> Self {
        let mut command = job.gpu.command(stalls(&job.gpu, &job.sandbox));
        command.arg("hog").env("SIMCUDA_MEMORY", "64MiB").current_dir(job.sandbox.path());
        Self(command.spawn().expect("started"))
    }

    fn takes_all(&mut self, job: &Job) {
        job.touch("take");
        until("the memory is taken", || job.is_there("taken").then_some(()));
    }

    fn ends(&mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("waited for");
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
