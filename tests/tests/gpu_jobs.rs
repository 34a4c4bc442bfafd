//! Programs with GPU state under ckpt-run: saved, killed, resumed, with the same output as if nothing had happened.

use std::ffi::OsString;
use std::process::Command;

use ckpt_run_tests::gpu::{Gpu, built, example, succeed};
use ckpt_run_tests::{Running, Sandbox};

/// A job on a simulated GPU in a sandbox.
struct GpuJob {
    sandbox: Sandbox,
    gpu: Gpu,
    program: Vec<OsString>,
}

impl GpuJob {
    fn new(program: impl FnOnce(&Gpu, &Sandbox) -> Vec<OsString>) -> Self {
        let (sandbox, gpu) = (Sandbox::new(), Gpu::new());
        let program = program(&gpu, &sandbox);
        Self { sandbox, gpu, program }
    }

    /// What the job prints when nothing happens to it, on a GPU of its own.
    fn unbroken(&self) -> String {
        let mut command = Gpu::new().command(&self.program[0]);
        command.args(&self.program[1..]);
        succeed(command)
    }

    fn start(&self) -> Running {
        let mut command = self.sandbox.command(["--interpose".into(), library()]);
        command.arg("--").args(&self.program);
        for (name, value) in self.gpu.command("").get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        self.sandbox.start_command("job", command)
    }

    fn lines(&self) -> usize {
        self.sandbox.read("job.out").lines().count()
    }

    /// Waits until the job has printed so many more lines.
    fn until_more_lines(&self, job: &mut Running, more: usize) {
        let goal = self.lines() + more;
        job.until("more lines", || (self.lines() >= goal).then_some(()));
    }

    /// Saves and kills the job again and again, then lets it end; the output has to be that of an unbroken run.
    fn survives(&self, kills: usize) {
        let expected = self.unbroken();
        for kill in 0..kills {
            let mut job = self.start();
            job.until_answering(&self.sandbox);
            self.until_more_lines(&mut job, 2);
            job.checkpoint(&self.sandbox);
            self.until_more_lines(&mut job, 1 + kill % 3);
            job.kill_everything();
        }
        let mut job = self.start();
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert_eq!(self.sandbox.read("job.out"), expected);
        self.sandbox.verify_all();
    }
}

fn library() -> OsString {
    built("libckpt_interpose.so").into()
}

fn legacy_job(gpu: &Gpu, sandbox: &Sandbox, rounds: u32) -> Vec<OsString> {
    let program = gpu.compile(&example("legacy-job/legacy-job.c"), sandbox.path());
    vec![program.into(), rounds.to_string().into(), "200".into(), "15".into()]
}

#[test]
fn legacy_job_survives() {
    GpuJob::new(|gpu, sandbox| legacy_job(gpu, sandbox, 200)).survives(3);
}

#[test]
fn train_mlp_survives() {
    let arguments = ["--steps", "80", "--rest-ms", "40"].map(Into::into);
    GpuJob::new(|_, _| [vec![built("train-mlp").into()], arguments.to_vec()].concat()).survives(3);
}

/// The job runs on after each checkpoint as if there had been none.
#[test]
fn a_checkpoint_does_not_change_what_a_job_computes() {
    let job = GpuJob::new(|gpu, sandbox| legacy_job(gpu, sandbox, 150));
    let mut running = job.start();
    running.until_answering(&job.sandbox);
    for _ in 0..3 {
        job.until_more_lines(&mut running, 1);
        running.checkpoint(&job.sandbox);
    }
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.sandbox.read("job.out"), job.unbroken());
}

/// Without the interposer a process with GPU state cannot be saved, which is told and harms nothing.
#[test]
fn without_the_interposer_a_checkpoint_is_refused() {
    let job = GpuJob::new(|gpu, sandbox| legacy_job(gpu, sandbox, 100));
    let mut command: Command = job.sandbox.command(["--interpose", "off", "--"]);
    command.args(&job.program).env("SIMCUDA_DIR", job.gpu.directory());
    command.env("LD_LIBRARY_PATH", ckpt_run_tests::gpu::libcuda_dir());
    let mut running = job.sandbox.start_command("job", command);
    running.until_answering(&job.sandbox);
    job.until_more_lines(&mut running, 1);
    let refused = job.sandbox.call(["checkpoint"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.sandbox.read("job.out"), job.unbroken());
}
