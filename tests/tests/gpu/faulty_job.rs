//! A GPU program under ckpt-run, with faults that are switched on and off while it runs.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use ckpt_run_tests::cgroups::Cgroups;
use ckpt_run_tests::gpu::{Gpu, built, cuda_program, succeed};
use ckpt_run_tests::{Running, Sandbox, until};
use serde_json::Value;

/// More steps than any test needs.
const STEPS: &str = "100000";

pub struct Job {
    pub sandbox: Sandbox,
    pub gpu: Gpu,
    pub program: Vec<OsString>,
    environment: Vec<(&'static str, OsString)>,
    options: Vec<&'static str>,
    cgroups: Option<Cgroups>,
}

impl Job {
    pub fn new(source: &str, arguments: &[&str]) -> Self {
        let (sandbox, gpu) = (Sandbox::new(), Gpu::new());
        let mut program = vec![gpu.compile(&cuda_program(source), sandbox.path()).into_os_string()];
        program.extend(arguments.iter().map(Into::into));
        let file = |name: &str| sandbox.path().join(name).into_os_string();
        let environment = vec![("CKPT_FAULT_FILE", file("points")), ("SIMCUDA_FAULT_FILE", file("rules"))];
        Self { sandbox, gpu, program, environment, options: Vec::new(), cgroups: None }
    }

    /// A job with a fixed number of small and large allocations, all of which it changes.
    pub fn steady(pieces: &str) -> Self {
        let job = Self::new("steady.c", &[STEPS, pieces]);
        job.touch("slow");
        job
    }

    /// Two devices in so many processes, whose memory is reached at one address.
    pub fn multicast(processes: &str) -> Self {
        let job = Self::new("multicast.c", &[STEPS, processes]).with("SIMCUDA_DEVICES", "2");
        job.touch("slow");
        job
    }

    /// A program that keeps the GPU busy in the given way.
    pub fn stalls(mode: &str) -> Self {
        Self::new("stalls.c", &[mode]).with_options(&["--freeze-timeout", "3s"])
    }

    pub fn with(mut self, name: &'static str, value: &str) -> Self {
        self.environment.push((name, value.into()));
        self
    }

    /// Runs it on the GPUs of another directory, which it may share with other jobs.
    pub fn on_machine(self, machine: &Path) -> Self {
        let files = self.gpu.device_files(machine);
        let machine = machine.to_str().expect("text");
        self.with("SIMCUDA_DIR", machine)
            .with("CKPT_TEST_DEVICE_FILES", &files)
            .with("CKPT_TEST_DEVICES", &format!("{machine}/"))
    }

    pub fn with_options(mut self, options: &[&'static str]) -> Self {
        self.options.extend(options);
        self
    }

    /// Runs it in a cgroup with a limit of memory.
    pub fn in_cgroups(self, cgroups: Cgroups) -> Self {
        Self { cgroups: Some(cgroups), ..self }
    }

    /// Leaves so much memory to the job, the launcher and the store, in the cgroups.
    pub fn leave_memory(&self, spare_bytes: u64) {
        self.cgroups.as_ref().expect("it has cgroups").leave(spare_bytes);
    }

    pub fn start(&self) -> Running {
        self.started(self.start_with(&[], ""))
    }

    /// Starts it with a fault of the launcher's own.
    pub fn start_with_fault(&self, fault: &str) -> Running {
        self.started(self.start_with(&[], fault))
    }

    pub fn started(&self, mut job: Running) -> Running {
        job.until_answering(&self.sandbox);
        job.until("the first line", || (self.lines() > 0).then_some(()));
        job
    }

    /// Starts the job again; it has to resume from a snapshot.
    pub fn resume(&self) -> Running {
        let job = self.start();
        assert!(self.status()["resumed_from"].is_string(), "{}", job.said());
        job
    }

    pub fn start_with(&self, options: &[&str], fault: &str) -> Running {
        let mut command =
            self.sandbox.command(["--interpose".into(), OsString::from(built("libckpt_interpose.so"))]);
        command.args(&self.options).args(options).arg("--").args(&self.program);
        for (name, value) in self.gpu.command("").get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        // The files by which a test and the simulated driver talk are not the job's.
        command.env("CKPT_FILES_EXCLUDE", "points*,rules*,pause,paused,change,slow,linger");
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        if !fault.is_empty() {
            command.env("CKPT_FAULT", fault);
        }
        let command = self.cgroups.iter().fold(command, |command, cgroups| cgroups.command(&command));
        self.sandbox.start_command("job", command)
    }

    /// Switches on faults of the interposer: `point=action,...`.
    pub fn arm(&self, points: &str) {
        self.replace("points", points);
    }

    /// Makes calls of the driver fail: `SYMBOL:N=ACTION;...`. See simulator/README.md.
    pub fn fail(&self, rules: &str) {
        let _ = fs::remove_file(self.sandbox.path().join("rules.hits"));
        self.replace("rules", rules);
    }

    /// The calls that have failed since.
    pub fn failed(&self) -> Vec<String> {
        self.sandbox.read("rules.hits").lines().map(Into::into).collect()
    }

    /// Waits until a process is at the point that was armed with `hold`. It stays there until the faults are switched off.
    pub fn until_held(&self) {
        until("a process at the point", || self.is_there("points.held").then_some(()));
        self.remove("points.held");
    }

    /// Switches all faults off.
    pub fn disarm(&self) {
        for name in ["points", "rules"] {
            let _ = fs::remove_file(self.sandbox.path().join(name));
        }
    }

    /// Replaces a file atomically.
    pub fn replace(&self, name: &str, content: &str) {
        let new = self.sandbox.path().join(format!("{name}.new"));
        fs::write(&new, content).unwrap();
        fs::rename(new, self.sandbox.path().join(name)).unwrap();
    }

    pub fn touch(&self, name: &str) {
        fs::write(self.sandbox.path().join(name), "").unwrap();
    }

    pub fn remove(&self, name: &str) {
        fs::remove_file(self.sandbox.path().join(name)).unwrap();
    }

    pub fn is_there(&self, name: &str) -> bool {
        self.sandbox.path().join(name).exists()
    }

    pub fn lines(&self) -> usize {
        self.sandbox.read("job.out").lines().count()
    }

    pub fn goes_on(&self, job: &mut Running) {
        let goal = self.lines() + 2;
        job.until("more lines", || (self.lines() >= goal).then_some(()));
    }

    /// Pauses a steady job: it makes no calls, so that only calls of the interposer can fail.
    pub fn pause(&self, job: &mut Running) {
        let _ = fs::remove_file(self.sandbox.path().join("paused"));
        self.touch("pause");
        job.until("a pause", || self.is_there("paused").then_some(()));
    }

    /// Has a steady job do what may change the driver's mind.
    pub fn change(&self, job: &mut Running) {
        self.touch("change");
        job.until("a change", || (!self.is_there("change")).then_some(()));
    }

    /// Runs `work` while the job is paused.
    pub fn paused<T>(&self, job: &mut Running, work: impl FnOnce(&Running) -> T) -> T {
        self.pause(job);
        let done = work(job);
        self.remove("pause");
        self.goes_on(job);
        done
    }

    /// Tries a checkpoint. If it is refused, returns the message; `status` has to show the reason too.
    pub fn try_checkpoint(&self, job: &Running) -> Result<(), String> {
        let output = self.sandbox.call(["checkpoint"]);
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}\n{}", job.said());
        let failure = self.status()["last_failure"].as_str().unwrap_or_default().to_owned();
        let reason = said.trim_end().rsplit("cannot be saved as it is: ").next().unwrap_or_default();
        let reason = reason.trim_start_matches("ckpt-run: error: ").split(". CRIU's log").next();
        let reason = reason.unwrap_or_default().to_owned();
        assert!(failure.contains(&reason), "{said} but: {failure}");
        Err(said)
    }

    /// Takes a snapshot. On a busy machine a short `--freeze-timeout` may be over before one succeeds.
    pub fn saves(&self, job: &Running) {
        until("a checkpoint", || self.try_checkpoint(job).ok());
    }

    /// Asks for checkpoints until one of them has ended the job. On a busy machine a short `--freeze-timeout` may be over
    /// before the fault.
    pub fn is_ended_by_a_checkpoint(&self, job: &mut Running) -> i32 {
        until("a checkpoint that ends the job", || {
            self.sandbox.call(["checkpoint"]);
            job.has_ended().then_some(())
        });
        job.wait()
    }

    pub fn status(&self) -> Value {
        self.sandbox.json(["status", "--json"])[0].take()
    }

    /// Tries a checkpoint that has to be refused for this reason. On a busy machine a short `--freeze-timeout` may be over
    /// before that: then it is tried again.
    pub fn is_refused(&self, job: &Running, why: &str) {
        until("a checkpoint that is refused in time", || {
            let said = self.try_checkpoint(job).expect_err("refused");
            let is_late = said.contains("did not answer within");
            assert!(said.contains(why) || is_late, "not {why:?}: {said}");
            said.contains(why).then_some(())
        });
    }

    /// Ends a steady job; its output has to be that of an unbroken run.
    pub fn ends_right(&self, job: &mut Running) {
        self.touch("end");
        assert_eq!(job.wait(), 0, "{}", job.said());
        let output = self.sandbox.read("job.out");
        let steps = (output.lines().count() - 1).to_string();
        let gpu = Gpu::new();
        let mut command = gpu.command(&self.program[0]);
        command.arg(steps).args(self.program.iter().skip(2).take(1)).current_dir("/");
        command.envs(self.environment.iter().filter(|(name, _)| *name == "SIMCUDA_DEVICES").cloned());
        assert_eq!(output, succeed(command));
        self.sandbox.verify_all();
    }

    /// Ends a program that runs until there is the file `end`.
    pub fn is_told_to_end(&self, job: &mut Running) {
        self.touch("end");
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert!(self.sandbox.read("job.out").ends_with("right\n"), "{}", job.said());
        self.sandbox.verify_all();
    }
}
