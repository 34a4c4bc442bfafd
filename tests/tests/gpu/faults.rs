//! What goes wrong while a job's state is taken off the GPU or brought back: calls of the driver that fail, work that
//! does not end, memory that somebody else has taken, and SIGKILL between any two steps. The job goes on unharmed and
//! can be saved the next time, or it ends and resumes right.

use std::ffi::OsString;
use std::fs;
use std::process::Child;

use ckpt_run_tests::gpu::{Gpu, built, cuda_program, succeed};
use ckpt_run_tests::{Running, Sandbox, descendants, until};
use rustix::process::Signal;
use serde_json::Value;

/// The launcher's exit code when a job was ended, or could not be brought back.
const LAUNCHER_FAILED: i32 = 125;

/// Between any two steps, in their order (interpose, `cuda::checkpoint`).
const DETACH: [&str; 8] = [
    "staged",
    "detach-gate",
    "detach-drained",
    "detach-captured",
    "detach-parked",
    "detach-released",
    "detach-locked",
    "detach-checkpointed",
];
const ATTACH: [&str; 5] =
    ["attach-begun", "attach-restored", "attach-unlocked", "attach-mapped", "attach-done"];
/// The launcher's.
const LAUNCHER: [&str; 3] = ["prepare", "staged", "delivered"];

/// Nothing is parked: what was on the GPU is made anew and copied back.
const NOT_PARKED: &str = "cuMemExportToShareableHandle:1+=CUDA_ERROR_NOT_SUPPORTED";

/// More steps than any test takes.
const STEPS: &str = "100000";

struct Job {
    sandbox: Sandbox,
    gpu: Gpu,
    program: Vec<OsString>,
    environment: Vec<(&'static str, OsString)>,
    options: Vec<&'static str>,
}

impl Job {
    fn new(source: &str, arguments: &[&str]) -> Self {
        let (sandbox, gpu) = (Sandbox::new(), Gpu::new());
        let mut program = vec![gpu.compile(&cuda_program(source), sandbox.path()).into_os_string()];
        program.extend(arguments.iter().map(Into::into));
        let file = |name: &str| sandbox.path().join(name).into_os_string();
        let environment = vec![("CKPT_FAULT_FILE", file("points")), ("SIMCUDA_FAULT_FILE", file("rules"))];
        Self { sandbox, gpu, program, environment, options: Vec::new() }
    }

    /// Has all its device memory from the beginning, some small and as many large pieces of it, and changes it all.
    fn steady(pieces: &str) -> Self {
        let job = Self::new("steady.c", &[STEPS, pieces]);
        job.touch("slow");
        job
    }

    /// A program that keeps the GPU from standing still, see there.
    fn stalls(mode: &str) -> Self {
        Self::new("stalls.c", &[mode]).with_options(&["--freeze-timeout", "3s"])
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
        self.started(self.start_with(&[], ""))
    }

    /// Starts it with a fault of the launcher's own.
    fn start_with_fault(&self, fault: &str) -> Running {
        self.started(self.start_with(&[], fault))
    }

    fn started(&self, mut job: Running) -> Running {
        job.until_answering(&self.sandbox);
        job.until("the first line", || (self.lines() > 0).then_some(()));
        job
    }

    /// A second life, which has to begin where the first one was saved.
    fn resume(&self) -> Running {
        let job = self.start();
        assert!(self.status()["resumed_from"].is_string(), "{}", job.said());
        job
    }

    fn start_with(&self, options: &[&str], fault: &str) -> Running {
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
        if !fault.is_empty() {
            command.env("CKPT_FAULT", fault);
        }
        self.sandbox.start_command("job", command)
    }

    /// Faults of the interposer from now on: `point=action,...`.
    fn arm(&self, points: &str) {
        self.replace("points", points);
    }

    /// Calls of the driver that fail from now on: `SYMBOL:N=ACTION;...`. See simulator/README.md.
    fn fail(&self, rules: &str) {
        let _ = fs::remove_file(self.sandbox.path().join("rules.hits"));
        self.replace("rules", rules);
    }

    /// The calls that were made to fail since.
    fn failed(&self) -> Vec<String> {
        self.sandbox.read("rules.hits").lines().map(Into::into).collect()
    }

    /// No faults any more.
    fn disarm(&self) {
        for name in ["points", "rules"] {
            let _ = fs::remove_file(self.sandbox.path().join(name));
        }
    }

    /// Never seen half written.
    fn replace(&self, name: &str, content: &str) {
        let new = self.sandbox.path().join(format!("{name}.new"));
        fs::write(&new, content).unwrap();
        fs::rename(new, self.sandbox.path().join(name)).unwrap();
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

    /// Until the file is removed, a steady job makes no call: what is made to fail is the interposer's.
    fn pause(&self, job: &mut Running) {
        let _ = fs::remove_file(self.sandbox.path().join("paused"));
        self.touch("pause");
        job.until("a pause", || self.is_there("paused").then_some(()));
    }

    /// Does something in a pause.
    fn paused<T>(&self, job: &mut Running, work: impl FnOnce(&Running) -> T) -> T {
        self.pause(job);
        let done = work(job);
        self.remove("pause");
        self.goes_on(job);
        done
    }

    /// Tries a checkpoint; what was said if it was refused, which `status` has to show too.
    fn try_checkpoint(&self, job: &Running) -> Result<(), String> {
        let output = self.sandbox.call(["checkpoint"]);
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}\n{}", job.said());
        let failure = self.status()["last_failure"].as_str().unwrap_or_default().to_owned();
        let reason =
            said.trim_end().rsplit("cannot be saved as it is: ").next().unwrap_or_default().to_owned();
        assert!(failure.contains(&reason), "{said} but: {failure}");
        Err(said)
    }

    fn status(&self) -> Value {
        self.sandbox.json(["status", "--json"])[0].take()
    }

    /// A checkpoint that is refused for this reason.
    fn is_refused(&self, job: &Running, why: &str) {
        let said = self.try_checkpoint(job).expect_err("refused");
        assert!(said.contains(why), "not {why:?}: {said}");
    }

    /// To be called while a steady job runs; its output has to be that of one to which nothing happened.
    fn ends_right(&self, job: &mut Running) {
        self.touch("end");
        assert_eq!(job.wait(), 0, "{}", job.said());
        let output = self.sandbox.read("job.out");
        let steps = (output.lines().count() - 1).to_string();
        let gpu = Gpu::new();
        let mut command = gpu.command(&self.program[0]);
        command.arg(steps).args(&self.program[2..3]).current_dir("/");
        assert_eq!(output, succeed(command));
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
    let job = Job::steady("2");
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    for point in DETACH.iter().chain(&ATTACH) {
        job.goes_on(&mut running);
        job.arm(&format!("{point}=kill"));
        job.sandbox.call(["checkpoint"]);
        assert_ne!(running.wait(), 0, "{point}: {}", running.said());
        job.disarm();
        running = job.resume();
    }
    job.ends_right(&mut running);
}

#[test]
fn killed_between_any_two_steps_of_a_resume() {
    let job = Job::steady("2");
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    running.kill_everything();
    for point in ATTACH {
        job.arm(&format!("{point}=kill"));
        let mut killed = job.start_with(&[], "");
        assert_ne!(killed.wait(), 0, "{point}: {}", killed.said());
    }
    job.disarm();
    let mut again = job.resume();
    job.ends_right(&mut again);
}

/// The process stands still at each step for longer than a checkpoint may take.
#[test]
fn delayed_between_any_two_steps() {
    let job = Job::steady("2").with_options(&["--freeze-timeout", "3s"]);
    let mut running = job.start();
    for point in DETACH.iter().chain(&ATTACH) {
        job.arm(&format!("{point}=delay:3300"));
        job.sandbox.call(["checkpoint"]);
        job.disarm();
        job.goes_on(&mut running);
    }
    running.checkpoint(&job.sandbox);
    job.ends_right(&mut running);
}

/// A mistake of the interposer's own.
#[test]
fn a_panic_between_any_two_steps() {
    let job = Job::steady("2");
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    for point in &DETACH[..7] {
        job.arm(&format!("{point}=panic"));
        job.is_refused(&running, "the interposer made a mistake");
        job.disarm();
        job.goes_on(&mut running);
    }
    running.checkpoint(&job.sandbox);
    job.ends_right(&mut running);
}

#[test]
fn a_launcher_that_is_killed_or_fails_at_any_step() {
    let job = Job::steady("2");
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    running.kill_everything();
    for point in LAUNCHER {
        // A resume is one passage of the point.
        let passage = if point == "delivered" { 2 } else { 1 };
        let mut running = job.start_with_fault(&format!("{point}@{passage}=kill"));
        job.sandbox.call(["checkpoint"]);
        assert!(!running.wait_status().success(), "{point}: {}", running.said());
        let mut running = job.start_with_fault(&format!("{point}@{passage}=error"));
        let output = job.sandbox.call(["checkpoint"]);
        // What fails later than that is no reason to throw a snapshot away.
        assert_eq!(output.status.success(), point == "delivered", "{point}: {}", running.said());
        job.goes_on(&mut running);
        running.checkpoint(&job.sandbox);
        job.goes_on(&mut running);
        running.kill_everything();
    }
    let mut killed = job.start_with(&[], "delivered=kill");
    assert!(!killed.wait_status().success(), "{}", killed.said());
    let delays = LAUNCHER.map(|point| format!("{point}=delay:1200")).join(",");
    let mut again = job.start_with(&["--freeze-timeout", "1s"], &delays);
    again.until_answering(&job.sandbox);
    job.goes_on(&mut again);
    job.sandbox.call(["checkpoint"]);
    job.goes_on(&mut again);
    job.ends_right(&mut again);
}

/// The calls of an attempt, in their order, with `also` faults given.
fn calls(job: &Job, running: &mut Running, also: &str) -> Vec<String> {
    let mut calls = job.paused(running, |running| {
        job.fail(&format!("*:1+=delay:0;{also}"));
        running.checkpoint(&job.sandbox);
        job.disarm();
        job.failed()
    });
    if !also.is_empty() {
        // Each of those is noted for both rules.
        let mut noted = 0;
        calls.retain(|call| {
            noted += usize::from(also.starts_with(call.as_str()));
            !also.starts_with(call.as_str()) || noted % 2 == 1
        });
    }
    calls
}

/// Whichever call of the driver fails once in an attempt, the first or the last of its kind from `first` on, `also`
/// faults given: the job runs on unharmed, and is either saved or told why not.
fn any_call_may_fail_once(first: &str, capture: &str, also: &str) {
    let job = Job::steady("2").with("CKPT_CAPTURE", capture);
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    let calls = calls(&job, &mut running, also);
    let start = calls.iter().position(|call| call == first).expect("a call of that kind");
    for (index, name) in calls.iter().enumerate().skip(start) {
        let is_first = !calls[start..index].contains(name);
        let is_last = !calls[index + 1..].contains(name);
        if !is_first && !is_last {
            continue;
        }
        let failed = job.paused(&mut running, |running| {
            job.fail(&format!("*:{}=CUDA_ERROR_UNKNOWN;{also}", index + 1));
            if let Err(said) = job.try_checkpoint(running) {
                assert!(said.contains("(999)"), "call {index}, {name}: {said}");
            }
            job.disarm();
            job.failed()
        });
        assert!(failed.contains(name), "call {index}, {name}: {failed:?}");
        // The next attempt begins as this one did.
        running.checkpoint(&job.sandbox);
        job.goes_on(&mut running);
    }
    job.goes_on(&mut running);
    running.kill_everything();
    job.ends_right(&mut job.resume());
}

#[test]
fn any_call_may_fail_once_where_memory_is_parked() {
    any_call_may_fail_once("cuThreadExchangeStreamCaptureMode", "changed", "");
}

#[test]
fn any_call_may_fail_once_where_memory_is_copied_back() {
    any_call_may_fail_once("cuMemExportToShareableHandle", "all", NOT_PARKED);
}

/// Without any of these there is no checkpoint, and the job runs on.
#[test]
fn a_call_that_always_fails_refuses_every_checkpoint() {
    let job = Job::steady("2");
    let mut running = job.start();
    let refusing = [
        "cuCheckpointProcessLock:1+",
        "cuCheckpointProcessLock:2+",
        "cuCheckpointProcessCheckpoint:1+",
        "cuMemcpyDtoHAsync_v2:1+",
        "cuStreamCreate:1+",
        "cuMemHostUnregister:1+",
        "cuCtxPushCurrent_v2:1+",
        "cuMemAddressReserve:1+",
        // The first two are for a look at what cannot be read where it is.
        "cuMemUnmap:3+",
        "cuMemRelease:1+",
    ];
    for call in refusing {
        job.paused(&mut running, |running| {
            job.fail(&format!("{call}=CUDA_ERROR_NOT_SUPPORTED"));
            let name = call.split([':', '_']).next().unwrap();
            let said = job.try_checkpoint(running).expect_err(call);
            assert!(said.contains(name) && said.contains("CUDA_ERROR_NOT_SUPPORTED (801)"), "{call}: {said}");
            job.disarm();
        });
    }
    assert!(job.sandbox.snapshots().is_empty());
    running.checkpoint(&job.sandbox);
    job.ends_right(&mut running);
}

/// Without these a checkpoint is slower, and the job's state says so.
#[test]
fn a_call_that_always_fails_makes_checkpoints_slower() {
    let job = Job::steady("70");
    let mut running = job.start();
    for (rule, is_parked, remark) in [
        // First of all: what was loaded once stays.
        ("cuModuleLoadData:1+", true, "what has changed is not known: cuModuleLoadData failed with"),
        ("cuMemHostAlloc:1+", true, "what has changed is not known: cuMemHostAlloc failed with"),
        ("cuMemHostRegister_v2:1+", true, "the mirror is not pinned: cuMemHostRegister failed with"),
        ("cuMemExportToShareableHandle:1+", false, ""),
        // In the second batch.
        ("cuMemExportToShareableHandle:66", true, ""),
        ("cuMemImportFromShareableHandle:1+", true, ""),
    ] {
        job.paused(&mut running, |running| {
            job.fail(&format!("{rule}=CUDA_ERROR_NOT_SUPPORTED"));
            running.checkpoint(&job.sandbox);
            assert!(!job.failed().is_empty(), "{rule}");
            job.disarm();
        });
        let status = job.status()["device_memory"].take();
        let said = status["not_parked_because"].as_str().unwrap_or_default();
        let bytes = |name: &str| status[name].as_u64().unwrap_or_default();
        assert_eq!(
            said.contains("cuMemExportToShareableHandle failed with"),
            rule.contains("Export"),
            "{status}"
        );
        assert_eq!(bytes("parked_bytes") > 0, is_parked, "{rule}: {status}");
        let is_copied = rule.contains("Export") || rule.contains("Import");
        assert_eq!(bytes("copied_back_bytes") > 0, is_copied, "{rule}: {status}");
        let newest = job.sandbox.snapshots().pop().expect("a snapshot");
        let shown = job.sandbox.ok(["show", &newest]);
        assert!(shown.contains(remark), "{rule}: {shown}");
    }
    job.ends_right(&mut running);
}

/// The driver is gone for good: the job is ended, and resumes from the snapshot before.
#[test]
fn a_driver_that_does_not_come_back_ends_the_job() {
    let job = Job::steady("2");
    let mut running = job.start();
    let not_parked = |rule: &str| format!("{NOT_PARKED};{rule}");
    for (call, rule) in [
        ("cuCheckpointProcessRestore", "cuCheckpointProcessRestore:1+=CUDA_ERROR_OUT_OF_MEMORY".to_owned()),
        ("cuCheckpointProcessUnlock", "cuCheckpointProcessUnlock:1+=CUDA_ERROR_UNKNOWN".to_owned()),
        ("cuCheckpointProcessUnlock", "cuCheckpointProcessUnlock:2+=CUDA_ERROR_UNKNOWN".to_owned()),
        // Locked, not checkpointed, and not to be unlocked either.
        (
            "cuCheckpointProcessUnlock",
            "cuCheckpointProcessCheckpoint:1+=CUDA_ERROR_UNKNOWN;cuCheckpointProcessUnlock:2+=CUDA_ERROR_UNKNOWN"
                .to_owned(),
        ),
        // The first two are for a look at what cannot be read where it is.
        ("cuMemMap", "cuMemMap:3+=CUDA_ERROR_UNKNOWN".to_owned()),
        ("cuMemSetAccess", "cuMemSetAccess:3+=CUDA_ERROR_UNKNOWN".to_owned()),
        ("cuMemCreate", not_parked("cuMemCreate:1+=CUDA_ERROR_UNKNOWN")),
        ("cuMemcpyHtoDAsync", not_parked("cuMemcpyHtoDAsync_v2:1+=CUDA_ERROR_UNKNOWN")),
    ] {
        job.disarm();
        running.checkpoint(&job.sandbox);
        job.goes_on(&mut running);
        job.pause(&mut running);
        job.fail(&rule);
        let told_before = job.sandbox.read("job.err").len();
        job.sandbox.call(["checkpoint"]);
        assert_eq!(running.wait(), LAUNCHER_FAILED, "{rule}: {}", running.said());
        let said = job.sandbox.read("job.err").split_off(told_before);
        assert!(
            said.contains(&format!("{call} failed with")) && said.contains("its GPU state was lost"),
            "{rule}: {said}"
        );
        job.disarm();
        job.remove("pause");
        running = job.resume();
    }
    job.ends_right(&mut running);
}

/// Neither comes a job back that was to be resumed; the snapshot stays as it is.
#[test]
fn a_driver_that_fails_in_a_resume_ends_the_job() {
    let job = Job::steady("2");
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    running.kill_everything();
    for (call, error) in [
        ("cuCheckpointProcessRestore", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemCreate", "CUDA_ERROR_UNKNOWN"),
        ("cuMemcpyHtoDAsync_v2", "CUDA_ERROR_UNKNOWN"),
    ] {
        job.fail(&format!("{call}:1+={error}"));
        let mut failed = job.start_with(&[], "");
        assert_eq!(failed.wait(), LAUNCHER_FAILED, "{call}: {}", failed.said());
        let said = failed.said();
        let name = call.split('_').next().unwrap();
        assert!(said.contains(&format!("{name} failed with {error}")) && said.contains("is whole"), "{said}");
    }
    job.disarm();
    let mut again = job.resume();
    job.ends_right(&mut again);
}

#[test]
fn a_lock_that_takes_too_long_is_given_up() {
    let job = Job::steady("2").with_options(&["--freeze-timeout", "3s"]);
    let mut running = job.start();
    for call in ["1", "2"] {
        job.fail(&format!("cuCheckpointProcessLock:{call}=delay:4500"));
        let output = job.sandbox.call(["checkpoint"]);
        assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
        job.disarm();
        job.goes_on(&mut running);
    }
    running.checkpoint(&job.sandbox);
    job.ends_right(&mut running);
}

/// Host memory that another thread maps while the driver's addresses are free stays what it is.
#[test]
fn a_thread_that_maps_memory_all_the_time() {
    let mut job = Job::steady("6");
    job.program.push("maps".into());
    let mut running = job.start();
    for _ in 0..10 {
        running.checkpoint(&job.sandbox);
        job.goes_on(&mut running);
    }
    running.kill_everything();
    let mut again = job.resume();
    for _ in 0..5 {
        again.checkpoint(&job.sandbox);
        job.goes_on(&mut again);
    }
    job.ends_right(&mut again);
}

/// A mirror without anything to be saved in it: the driver has let go of it before it is locked.
#[test]
fn memory_that_is_freed_after_the_mirror_was_staged() {
    let job = Job::new("frees.c", &["1"]);
    let mut running = job.start_with_fault("staged@1=delay:1500");
    std::thread::scope(|scope| {
        let attempt = scope.spawn(|| job.try_checkpoint(&running));
        until("the delay", || running.said().contains("fault point staged").then_some(()));
        job.touch("free");
        until("free memory", || job.is_there("freed").then_some(()));
        attempt.join().expect("no panic").expect("saved");
    });
    job.goes_on(&mut running);
    job.remove("free");
    running.checkpoint(&job.sandbox);
    job.goes_on(&mut running);
    job.is_told_to_end(&mut running);
}

/// What holds the GPU up holds up checkpoints until it is over, and is not harmed by the attempts.
fn is_given_up_while_it_stalls(mode: &str, fault: &str, why: &str) {
    let job = Job::stalls(mode).with("SIMCUDA_FAULT", fault);
    let mut running = job.start();
    job.touch("stall");
    running.until("the stall", || job.is_there("stalled").then_some(()));
    job.is_refused(&running, why);
    job.goes_on(&mut running);
    job.is_refused(&running, why);
    job.remove("stall");
    running.until("the end of the stall", || job.is_there("over").then_some(()));
    running.checkpoint(&job.sandbox);
    running.kill_everything();
    let mut again = job.resume();
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

/// A job on a small GPU, and another process that may take what is left.
fn with_hog(job: Job, work: impl FnOnce(&Job, Running, &mut Hog)) {
    let job = job.with("SIMCUDA_MEMORY", "64MiB");
    let running = job.start();
    let mut hog = Hog::start(&job);
    work(&job, running, &mut hog);
}

/// While the job is off the GPU, another process takes all that is free.
fn while_away(job: &Job, running: &Running, hog: &mut Hog) {
    job.arm("attach-begun=stop");
    std::thread::scope(|scope| {
        let attempt = scope.spawn(|| job.sandbox.call(["checkpoint"]));
        until("the fault", || job.is_there("points.stopped").then_some(()));
        let stopped = stopped_process(running);
        hog.takes_all(job);
        job.disarm();
        rustix::process::kill_process(stopped, Signal::CONT).unwrap();
        attempt.join().expect("no panic");
    });
}

/// What is parked stays on the GPU: nobody takes it.
#[test]
fn memory_that_another_process_wants_is_parked() {
    with_hog(Job::new("stalls.c", &["wait"]), |job, mut running, hog| {
        while_away(job, &running, hog);
        job.goes_on(&mut running);
        running.checkpoint(&job.sandbox);
        job.goes_on(&mut running);
        job.is_told_to_end(&mut running);
    });
}

/// What belongs to the driver, such as a module's global variables, is not parked: a driver does not survive that.
#[test]
fn memory_of_the_driver_that_another_process_took() {
    with_hog(Job::steady("2"), |job, mut running, hog| {
        running.checkpoint(&job.sandbox);
        while_away(job, &running, hog);
        assert_eq!(running.wait(), LAUNCHER_FAILED, "{}", running.said());
        let said = running.said();
        let told = "cuCheckpointProcessRestore failed with CUDA_ERROR_OUT_OF_MEMORY";
        assert!(said.contains(told) && said.contains("its GPU state was lost"), "{said}");
        hog.ends();
        let mut again = job.resume();
        job.ends_right(&mut again);
    });
}

/// A job that is resumed waits for memory that another process has, for a while. If it does not come, the job ends, and
/// the snapshot is left alone.
#[test]
fn memory_that_another_process_took_is_waited_for() {
    with_hog(Job::new("stalls.c", &["wait"]), |job, mut running, hog| {
        running.checkpoint(&job.sandbox);
        running.kill_everything();
        hog.takes_all(job);
        let mut early = job.start_with(&[], "");
        assert_eq!(early.wait(), LAUNCHER_FAILED, "{}", early.said());
        let said = early.said();
        assert!(said.contains("cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY"), "{said}");
        job.sandbox.verify_all();
        job.fail("cuMemCreate:12=delay:1");
        let mut waiting = job.start_with(&[], "");
        // It has tried for a while.
        waiting.until("some tries", || (!job.failed().is_empty()).then_some(()));
        hog.ends();
        waiting.until_answering(&job.sandbox);
        job.goes_on(&mut waiting);
        job.is_told_to_end(&mut waiting);
    });
}

/// A process with memory on the same GPU.
struct Hog(Child);

impl Hog {
    fn start(job: &Job) -> Self {
        let program = job.gpu.compile(&cuda_program("stalls.c"), job.sandbox.path());
        let mut command = job.gpu.command(program);
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
