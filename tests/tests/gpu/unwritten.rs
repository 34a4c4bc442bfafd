//! Device memory of which most is never written: it takes neither host memory between checkpoints nor room in the store.

use crate::faulty_job::Job;
use crate::gpu_job::{GpuJob, kills, steps};
use ckpt_run_tests::gpu::{Gpu, cuda_program};
use ckpt_run_tests::{Running, Sandbox};
use std::path::Path;

const MIB: u64 = 1 << 20;
/// Device memory of the job, which writes to an eighth of it.
const JOB_MIB: u64 = 192;

/// The most that a checkpoint may take: what the job writes, and its small memory.
const WRITTEN_BYTES: u64 = (JOB_MIB / 8 + 8) * MIB;

fn job() -> Job {
    let job = Job::new("unwritten.c", &["100000", &JOB_MIB.to_string()]).with("CKPT_CAPTURE", "changed");
    job.touch("slow");
    job
}

fn mirror_bytes(job: &Job) -> u64 {
    let memory = job.status()["device_memory"].take();
    assert!(memory["bytes"].as_u64() >= Some(JOB_MIB * MIB), "{memory}");
    memory["mirror_bytes"].as_u64().expect("bytes")
}

fn save(job: &Job, running: &mut Running) -> u64 {
    running.checkpoint(&job.sandbox);
    job.goes_on(running);
    mirror_bytes(job)
}

fn stored_bytes(sandbox: &Sandbox) -> u64 {
    fn of(path: &Path) -> u64 {
        // Files are deleted meanwhile.
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries
            .map(|entry| entry.path())
            .map(|path| if path.is_dir() { of(&path) } else { path.metadata().map_or(0, |file| file.len()) })
            .sum()
    }
    of(&sandbox.store)
}

#[test]
fn memory_that_was_never_written_costs_nothing() {
    let job = job();
    let mut running = job.start();
    for _ in 0..2 {
        let held_bytes = save(&job, &mut running);
        assert!((1..=WRITTEN_BYTES).contains(&held_bytes), "{held_bytes}");
    }
    for _ in 0..2 {
        running.kill_everything();
        running = job.resume();
        let held_bytes = save(&job, &mut running);
        assert!((1..=WRITTEN_BYTES).contains(&held_bytes), "{held_bytes}");
    }
    // The job changes what it writes, so that each snapshot that is kept has its own. What no snapshot needs any more is
    // deleted a little later.
    running.until("little in the store", || {
        let kept = job.sandbox.snapshots().len() as u64;
        (stored_bytes(&job.sandbox) < kept * WRITTEN_BYTES).then_some(())
    });
    job.ends_right(&mut running);
}

/// The mirror grows with what the program writes after its size was determined.
#[test]
fn memory_that_is_written_late_is_saved() {
    let job = job();
    let mut running = job.start();
    save(&job, &mut running);
    job.touch("fill");
    running.until("all memory is written", || job.is_there("filled").then_some(()));
    assert!(save(&job, &mut running) >= JOB_MIB * MIB * 7 / 8);
    running.kill_everything();
    let mut running = job.resume();
    assert!(save(&job, &mut running) >= JOB_MIB * MIB * 7 / 8);
    job.touch("end");
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert!(job.sandbox.read("job.out").contains("at last"), "{}", running.said());
}

#[test]
fn a_job_that_writes_little_of_its_memory_survives() {
    let program = |gpu: &Gpu, sandbox: &Sandbox| {
        let mut command = gpu.command(gpu.compile(&cuda_program("unwritten.c"), sandbox.path()));
        command.args([steps().as_str(), "96"]).env("CKPT_CAPTURE", "changed");
        command
    };
    GpuJob::new(program).survives(kills());
}

/// The program waits while its memory is looked through. Whatever happens then, it goes on or begins again.
#[test]
fn killed_or_failed_while_memory_is_looked_through() {
    for point in ["look-gate", "look-done"] {
        let job = job().with_options(&["--freeze-timeout", "5s"]);
        let mut running = job.start();
        job.arm(&format!("{point}=panic"));
        job.is_refused(&running, "the interposer made a mistake");
        job.arm(&format!("{point}=delay:1500"));
        job.saves(&running);
        job.disarm();
        job.ends_right(&mut running);

        let job = self::job();
        let mut running = job.start();
        job.arm(&format!("{point}=kill"));
        job.sandbox.call(["checkpoint"]);
        assert_ne!(running.wait(), 0, "{point}: {}", running.said());
        job.disarm();
        // There is no snapshot: the job begins again.
        std::fs::remove_file(job.sandbox.path().join("job.out")).expect("the output");
        job.ends_right(&mut job.start());
    }
    // Memory that cannot be looked through counts as used, until the next checkpoint.
    let job = job();
    let mut running = job.start();
    job.fail("cuCheckpointProcessLock:1=CUDA_ERROR_UNKNOWN");
    assert!(save(&job, &mut running) >= JOB_MIB * MIB);
    job.disarm();
    let held_bytes = save(&job, &mut running);
    assert!(held_bytes <= WRITTEN_BYTES, "{held_bytes}");
    job.ends_right(&mut running);
}

/// A driver that stays locked after that ends the job.
#[test]
fn a_driver_that_stays_locked_ends_the_job() {
    let job = job();
    let mut running = job.start();
    job.fail("cuCheckpointProcessUnlock:1+=CUDA_ERROR_UNKNOWN");
    job.sandbox.call(["checkpoint"]);
    assert_eq!(running.wait(), 125, "{}", running.said());
    assert!(running.said().contains("cuCheckpointProcessUnlock failed with"), "{}", running.said());
}

/// A driver that hangs before the detach, while the program waits behind the gate or runs: the job is ended, and does not
/// stand still or run without snapshots.
#[test]
fn a_driver_that_hangs_before_the_detach_ends_the_job() {
    for call in ["cuCheckpointProcessLock", "cuCheckpointProcessUnlock", "cuMemHostRegister_v2"] {
        let job = job().with_options(&["--freeze-timeout", "5s", "--gpu-timeout", "2s"]);
        let mut running = job.start();
        job.fail(&format!("{call}:1=hang"));
        job.sandbox.call(["checkpoint"]);
        assert_eq!(running.wait(), 125, "{call}: {}", running.said());
        assert!(running.said().contains("has not come back"), "{call}: {}", running.said());
        job.disarm();
        // There is no snapshot: the job begins again.
        std::fs::remove_file(job.sandbox.path().join("job.out")).expect("the output");
        job.ends_right(&mut job.start());
    }
}
