//! On which GPUs a job is restored, and the memory that a restore takes of them.

use std::fs;
use std::path::Path;

use ckpt_run_tests::{Running, until};
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use simcuda_machine::config::Config;
use simcuda_machine::{Gpu, Ledger};

use crate::faults::{Hog, LAUNCHER_FAILED, stopped_process, with_hog};
use crate::faulty_job::Job;

/// The exit code of bad input.
const BAD_INPUT: i32 = 2;

/// What a context takes: memory of the driver, which is neither parked nor captured.
const CONTEXT: (&str, &str) = ("SIMCUDA_CONTEXT_MEMORY", "8MiB");
const CONTEXT_BYTES: u64 = 8 << 20;

fn steady() -> Job {
    Job::steady("2").with(CONTEXT.0, CONTEXT.1)
}

/// Checkpoints the job; once it is off the GPU, the other process allocates all free memory. Then `work` is done.
fn taken_while_away(job: &Job, running: &Running, hog: &mut Hog, work: impl FnOnce(&mut Hog)) {
    job.arm("detach-checkpointed=stop");
    std::thread::scope(|scope| {
        let attempt = scope.spawn(|| job.sandbox.call(["checkpoint"]));
        until("the fault", || job.is_there("points.stopped").then_some(()));
        let stopped = stopped_process(running);
        hog.takes_all(job);
        job.disarm();
        kill_process(stopped, Signal::CONT).expect("it is stopped");
        work(hog);
        attempt.join().expect("no panic");
    });
}

#[test]
fn a_job_waits_for_device_memory_before_it_is_restored() {
    with_hog(steady(), |job, mut running, hog| {
        taken_while_away(job, &running, hog, |hog| {
            until("the wait", || said(job).contains("Waiting up to").then_some(()));
            hog.ends();
        });
        job.goes_on(&mut running);
        running.checkpoint(&job.sandbox);
        job.ends_right(&mut running);
    });
}

/// What ckpt-run has printed in all runs of the job.
fn said(job: &Job) -> String {
    job.sandbox.read("job.err")
}

/// The process is not ruined by a restore that cannot succeed: it gets none. The job is ended, and resumes.
#[test]
fn device_memory_that_is_short_for_too_long_ends_the_job() {
    with_hog(steady().with_options(&["--gpu-timeout", "1s"]), |job, mut running, hog| {
        running.checkpoint(&job.sandbox);
        taken_while_away(job, &running, hog, |_| ());
        assert_eq!(running.wait(), LAUNCHER_FAILED, "{}", running.said());
        let said = running.said();
        assert!(said.contains("its GPU state was lost") && said.contains("is needed to restore"), "{said}");
        assert!(!said.contains("cuCheckpointProcessRestore failed"), "{said}");
        hog.ends();
        let mut again = job.resume();
        job.ends_right(&mut again);
    });
}

/// Before anything is started: the snapshot is unchanged.
#[test]
fn a_resume_waits_for_device_memory() {
    with_hog(steady(), |job, mut running, hog| {
        running.checkpoint(&job.sandbox);
        running.kill_everything();
        hog.takes_all(job);
        let mut early = job.start_with(&["--gpu-timeout", "1s"], "");
        assert_eq!(early.wait(), LAUNCHER_FAILED, "{}", early.said());
        let told_early = early.said();
        let uuid = gpus(job.gpu.directory(), 1)[0].uuid_text();
        for told in [uuid.as_str(), "has 0 B of free memory", "is intact", "nothing was started"] {
            assert!(told_early.contains(told), "{told}: {told_early}");
        }
        job.sandbox.verify_all();
        let waits = || said(job).matches("Waiting up to").count();
        let before = waits();
        let mut waiting = job.start_with(&[], "");
        waiting.until("the wait", || (waits() > before).then_some(()));
        hog.ends();
        waiting.until_answering(&job.sandbox);
        job.goes_on(&mut waiting);
        job.ends_right(&mut waiting);
    });
}

/// The GPUs of the simulated machine in a directory, without a file that lists them.
fn gpus(machine: &Path, devices: usize) -> Vec<Gpu> {
    let config = Config::from_environment().expect("settings");
    Config { directory: machine.to_owned(), devices, ..config }.gpus().expect("GPUs")
}

/// Makes it a machine with these GPUs: IDs and names.
fn set_gpus(machine: &Path, list: &[(usize, &str)]) -> Vec<Gpu> {
    let lines: String = list.iter().map(|(id, name)| format!("{id} 64MiB {name}\n")).collect();
    fs::write(machine.join("gpus"), lines).expect("a file");
    gpus(machine, 0)
}

/// The GPUs of the newest snapshot's only process.
fn recorded(job: &Job) -> Vec<Value> {
    let newest = job.sandbox.snapshots().pop().expect("a snapshot");
    let shown = job.sandbox.json(["show", "--json", &newest]);
    shown["gpu"][0]["gpus"].as_array().expect("GPUs").clone()
}

/// What the job's processes have of a GPU.
fn used_bytes(machine: &Path, id: usize, job: &Running) -> u64 {
    let ledger = Ledger::of(machine, id);
    job.descendants().into_iter().map(|pid| ledger.mapped_bytes(pid.cast_unsigned())).sum()
}

#[test]
fn a_snapshot_says_which_gpus_it_was_taken_with_and_what_they_need() {
    let job = steady().with("SIMCUDA_DEVICES", "2").with("CUDA_VISIBLE_DEVICES", "1");
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    let all = gpus(job.gpu.directory(), 2);
    let records = recorded(&job);
    assert_eq!(records.len(), 2, "also the one that the process does not see: {records:?}");
    for (record, gpu) in records.iter().zip(&all) {
        assert_eq!(record["uuid"], gpu.uuid_text());
        assert_eq!(record["name"], gpu.name);
        assert_eq!(record["memory_bytes"], gpu.memory_bytes);
    }
    let bytes = |record: &Value, name: &str| record[name].as_u64().unwrap_or_default();
    assert!(bytes(&records[1], "driver_bytes") >= CONTEXT_BYTES, "{records:?}");
    assert!(bytes(&records[1], "captured_bytes") > 0, "{records:?}");
    assert_eq!((bytes(&records[0], "driver_bytes"), bytes(&records[0], "captured_bytes")), (0, 0));
    let newest = job.sandbox.snapshots().pop().expect("a snapshot");
    let shown = job.sandbox.ok(["show", &newest]);
    assert!(shown.contains(&format!("on {} ({})", all[1].uuid_text(), all[1].name)), "{shown}");
    job.ends_right(&mut running);
}

/// Two jobs on one machine, each of which sees one GPU, are resumed on each other's.
#[test]
fn two_jobs_change_places() {
    let machine = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let all = gpus(machine.path(), 2);
    let jobs = ["0", "1"].map(|visible| {
        let job = steady().with("SIMCUDA_DEVICES", "2").with("CUDA_VISIBLE_DEVICES", visible);
        job.on_machine(machine.path())
    });
    let mut running: Vec<_> = jobs.iter().map(Job::start).collect();
    for (job, running) in jobs.iter().zip(&mut running) {
        running.checkpoint(&job.sandbox);
        job.goes_on(running);
        running.kill_everything();
    }
    let [first, second] = [all[0].uuid_text(), all[1].uuid_text()];
    let maps = [format!("{first}={second}"), format!("{second}={first}")];
    let mut running: Vec<_> = jobs
        .iter()
        .zip(&maps)
        .map(|(job, map)| job.started(job.start_with(&["--gpu-map", map], "")))
        .collect();
    for (at, (job, running)) in jobs.iter().zip(&mut running).enumerate() {
        job.goes_on(running);
        assert!(used_bytes(machine.path(), 1 - at, running) > CONTEXT_BYTES, "{}", running.said());
        assert_eq!(used_bytes(machine.path(), at, running), 0);
        running.checkpoint(&job.sandbox);
        job.ends_right(running);
    }
}

/// Another machine: the GPU is missing, and another one of its type takes its place, also in the snapshots after that.
#[test]
fn a_missing_gpu_is_replaced_by_another_one_of_its_type() {
    let job = steady();
    let machine = job.gpu.directory().to_owned();
    let old = set_gpus(&machine, &[(0, "A"), (1, "A")]);
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    running.kill_everything();
    set_gpus(&machine, &[(1, "A"), (4, "B")]);
    let mut refused = job.start_with(&[], "");
    assert_eq!(refused.wait(), BAD_INPUT, "{}", refused.said());
    let told = format!("no A is left here to take the place of {}", old[0].uuid_text());
    assert!(refused.said().contains(&told), "{}", refused.said());
    let new = set_gpus(&machine, &[(4, "B"), (3, "A"), (1, "A")]);
    let mut again = job.resume();
    job.goes_on(&mut again);
    assert!(used_bytes(&machine, 3, &again) > CONTEXT_BYTES, "{}", again.said());
    again.checkpoint(&job.sandbox);
    let uuids: Vec<_> = recorded(&job).iter().map(|gpu| gpu["uuid"].clone()).collect();
    assert_eq!(uuids, [new[1].uuid_text(), new[2].uuid_text()], "the driver knows no more than these");
    job.goes_on(&mut again);
    again.kill_everything();
    let mut last = job.resume();
    job.goes_on(&mut last);
    assert!(used_bytes(&machine, 3, &last) > CONTEXT_BYTES, "{}", last.said());
    job.ends_right(&mut last);
}

/// Before 580 a job can be resumed on the same GPUs only.
#[test]
fn another_gpu_needs_driver_580() {
    let job = steady().with("SIMCUDA_DRIVER", "575");
    let machine = job.gpu.directory().to_owned();
    let old = set_gpus(&machine, &[(0, "A"), (1, "A")]);
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    running.kill_everything();
    let new = set_gpus(&machine, &[(2, "A"), (1, "A")]);
    let mut refused = job.start_with(&[], "");
    assert_eq!(refused.wait(), BAD_INPUT, "{}", refused.said());
    let said = refused.said();
    let told = format!("{} would take the place of {} (A)", new[0].uuid_text(), old[0].uuid_text());
    assert!(
        said.contains(&told) && said.contains("driver 580 or newer, and this machine has 575.57.08"),
        "{said}"
    );
    set_gpus(&machine, &[(0, "A"), (1, "A")]);
    let mut again = job.resume();
    job.ends_right(&mut again);
}

/// A driver that only another program could checkpoint.
#[test]
fn a_checkpoint_needs_driver_570() {
    let job = steady().with("SIMCUDA_DRIVER", "550");
    let mut running = job.start();
    job.is_refused(&running, "(CUDA 12.4) has no cuCheckpointProcessLock");
    job.goes_on(&mut running);
    job.is_refused(&running, "NVIDIA's driver 570 (CUDA 12.8) or newer is needed");
    job.ends_right(&mut running);
}
