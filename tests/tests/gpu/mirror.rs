//! `--mirror changed`: the copy of device memory takes host memory during checkpoints only. What it lacks is in the store.
//! `--mirror none`: there is no copy.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::faults::{LAUNCHER_FAILED, stopped_process};
use crate::faulty_job::Job;
use crate::gpu_job::{GpuJob, kills};
use ckpt_run_tests::cgroups::Cgroups;
use ckpt_run_tests::{Running, set_variables};
use rustix::process::{Signal, kill_process};

const MIB: u64 = 1 << 20;
/// Device memory of the job. It writes to all of it.
const JOB_MIB: u64 = 64;
/// The same where host memory is measured.
const MEASURED_MIB: u64 = 256;

/// The same where there is memory for half of a copy, for one, and for two, beside the spare of 256 MiB.
const DEFAULT_MIB: u64 = 640;
/// More than any job here takes.
const LIMIT_BYTES: u64 = 8 << 30;

/// What was parked does not come back: device memory is allocated again and copied back.
const NOT_PARKED: &str = "cuMemImportFromShareableHandle:1+=CUDA_ERROR_NOT_SUPPORTED";

/// Threads copy device memory, as they do with a large mirror and many CPUs.
const COPY_THREADS: &str = "CKPT_FAULT_COPY_THREADS";

fn job() -> Job {
    job_with("changed", JOB_MIB)
}

fn job_with(mirror: &'static str, mib: u64) -> Job {
    let job = Job::new("unwritten.c", &["100000", &mib.to_string()]).with("CKPT_CAPTURE", "changed");
    job.touch("slow");
    job.with_options(&["--mirror", mirror])
}

/// Starts the job, and waits until it has written to all of its memory.
fn filled(job: &Job) -> Running {
    let mut running = job.start();
    job.touch("fill");
    running.until("all memory is written", || job.is_there("filled").then_some(()));
    running
}

/// Host memory of the copies of device memory, which are files without a name in memory. Prints each. Packs that the
/// garbage collection has deleted, and still has open, are no memory.
fn held_bytes(running: &Running) -> u64 {
    held_bytes_by(running.pid())
}

fn held_bytes_by(launcher_pid: u32) -> u64 {
    let open = fs::read_dir(format!("/proc/{launcher_pid}/fd")).expect("the launcher's files");
    let unnamed = open.filter_map(|entry| {
        let path = entry.ok()?.path();
        let target = fs::read_link(&path).ok()?;
        // A file without a name has a number, in the root of its file system, or is a memfd.
        let is_unnamed = |start| target.to_string_lossy().starts_with(start);
        ["/#", "/memfd:ckpt-mirror"].into_iter().any(is_unnamed).then_some(())?;
        let bytes = fs::metadata(path).ok()?.blocks() * 512;
        println!("{} has {bytes} bytes", target.display());
        Some(bytes)
    });
    unnamed.sum()
}

fn save(job: &Job, running: &mut Running) {
    running.checkpoint(&job.sandbox);
    job.goes_on(running);
}

#[test]
fn a_partial_copy_takes_no_host_memory_between_checkpoints() {
    let everything = job_with("all", MEASURED_MIB);
    let mut running = filled(&everything);
    save(&everything, &mut running);
    assert!(held_bytes(&running) >= MEASURED_MIB * MIB * 7 / 8, "{}", held_bytes(&running));
    assert_eq!(everything.status()["device_memory"]["mirror"], "all");
    running.kill_everything();

    let job = job_with("changed", MEASURED_MIB);
    let mut running = filled(&job);
    for round in 0..4 {
        save(&job, &mut running);
        assert!(held_bytes(&running) <= MEASURED_MIB * MIB / 4, "{}", held_bytes(&running));
        let memory = job.status()["device_memory"].take();
        assert_eq!(memory["mirror"], "changed");
        assert!(memory["mirror_bytes"].as_u64().expect("bytes") <= MEASURED_MIB * MIB / 4, "{memory}");
        assert_eq!(memory["copied_back_bytes"], 0, "{memory}");
        if round % 2 == 1 {
            running.kill_everything();
            running = job.resume();
        }
    }
    job.ends_right(&mut running);
    assert!(job.sandbox.read("job.out").contains("at last"), "{}", running.said());
}

/// What fits into the free host memory decides, of which a cgroup leaves only so much. The simulated device's memory is host
/// memory, which is staged too: what is left when the launcher decides is less by that.
#[test]
fn the_default_is_chosen_by_what_is_free() {
    for (spare_mib, mode) in [(2400, "all"), (1700, "changed"), (1060, "none")] {
        let Some(cgroups) = Cgroups::new(&format!("mirror-{mode}"), LIMIT_BYTES) else {
            return ckpt_test_skip::skip("no cgroups with limits of memory can be made");
        };
        let job = job_with("auto", DEFAULT_MIB).in_cgroups(cgroups);
        let mut running = filled(&job);
        job.leave_memory(spare_mib * MIB);
        save(&job, &mut running);
        assert_eq!(job.status()["device_memory"]["mirror"], mode, "{}", running.said());
        if mode == "none" {
            running.kill_everything();
            job.leave_memory(LIMIT_BYTES);
            running = job.resume();
        }
        job.ends_right(&mut running);
    }
}

#[test]
fn memory_that_cannot_be_parked_is_read_from_the_store() {
    let said = is_read_from_the_store(job().with("CKPT_VERBOSE", "1"));
    assert!(said.contains("copies by 0 threads"), "{said}");
}

#[test]
fn memory_that_cannot_be_parked_is_copied_back_by_threads() {
    let said = is_read_from_the_store(job().with(COPY_THREADS, "3").with("CKPT_VERBOSE", "1"));
    assert!(said.contains("copies by 3 threads") && !said.contains("threads cannot copy"), "{said}");
}

/// Returns what the launchers have said.
fn is_read_from_the_store(job: Job) -> String {
    let mut running = filled(&job);
    save(&job, &mut running);
    for _ in 0..2 {
        job.fail(NOT_PARKED);
        save(&job, &mut running);
        let memory = job.status()["device_memory"].take();
        assert!(memory["copied_back_bytes"].as_u64() >= Some(JOB_MIB * MIB * 7 / 8), "{memory}");
        assert!(held_bytes(&running) <= JOB_MIB * MIB / 4, "{}", held_bytes(&running));
        job.disarm();
        save(&job, &mut running);
    }
    let said = running.said();
    running.kill_everything();
    let mut running = job.resume();
    job.ends_right(&mut running);
    said + &running.said()
}

/// A capture that the launcher does not hear of, and saves that fail: the next checkpoint is complete.
#[test]
fn failed_checkpoints_leave_a_complete_copy() {
    let job = job();
    let mut running = filled(&job);
    save(&job, &mut running);
    for (points, rules) in
        [("detach-captured=panic", ""), ("detach-released=panic", NOT_PARKED), ("detach-released=panic", "")]
    {
        job.fail(rules);
        job.arm(points);
        job.is_refused(&running, "the interposer made a mistake");
        job.disarm();
        job.goes_on(&mut running);
        save(&job, &mut running);
        running.kill_everything();
        running = job.resume();
        save(&job, &mut running);
    }
    running.kill_everything();

    let mut running = job.start_with_fault("save-before-commit@2=error,save-before-commit@3=error");
    save(&job, &mut running);
    for _ in 0..2 {
        assert!(!job.sandbox.call(["checkpoint"]).status.success(), "{}", running.said());
        job.goes_on(&mut running);
    }
    save(&job, &mut running);
    running.kill_everything();
    let mut running = job.resume();
    job.ends_right(&mut running);
}

#[test]
fn a_launcher_that_is_killed_or_fails_with_a_partial_copy() {
    let job = job();
    let mut running = filled(&job);
    save(&job, &mut running);
    running.kill_everything();
    for fault in ["save-before-commit@2=kill", "save-after-commit@2=kill", "fill=kill"] {
        let mut running = job.start_with_fault(fault);
        save(&job, &mut running);
        job.fail(NOT_PARKED);
        job.sandbox.call(["checkpoint"]);
        assert!(!running.wait_status().success(), "{fault}: {}", running.said());
        job.disarm();
    }
    let mut running = job.resume();
    job.ends_right(&mut running);
}

/// Overwrites the content of all large packs.
fn damage_packs(job: &Job) {
    for entry in fs::read_dir(job.sandbox.job_dir().join("packs")).expect("packs") {
        let path = entry.expect("an entry").path();
        let bytes = path.metadata().expect("facts").len();
        if bytes > MIB {
            fs::write(&path, vec![0x5a; usize::try_from(bytes).expect("it fits")]).expect("written");
        }
    }
}

/// The store is damaged behind the launcher's back, and the memory could not stay on the GPU.
#[test]
fn damage_is_named_when_memory_is_put_back() {
    let job = job();
    let mut running = filled(&job);
    save(&job, &mut running);
    damage_packs(&job);
    job.fail(NOT_PARKED);
    job.sandbox.call(["checkpoint"]);
    assert_eq!(running.wait(), LAUNCHER_FAILED, "{}", running.said());
    let said = running.said();
    assert!(said.contains("cannot be read from the store") && said.contains("damaged"), "{said}");
}

/// A person deletes the packs that have what the copy lacks: all memory is copied again.
#[test]
fn packs_that_are_deleted_are_stored_again() {
    let job = job();
    let mut running = filled(&job);
    save(&job, &mut running);
    fs::remove_dir_all(job.sandbox.job_dir().join("packs")).expect("removed");
    save(&job, &mut running);
    running.kill_everything();
    let mut again = job.resume();
    assert!(again.said().contains("resumed from snapshot 000002"), "{}", again.said());
    // It lacks data.
    job.sandbox.ok(["rm", "1"]);
    job.ends_right(&mut again);
}

/// Several processes that share device memory.
#[test]
fn processes_with_shared_memory_survive() {
    let mut job = GpuJob::in_c("shared.c");
    job.program.env("CKPT_MIRROR", "changed").env("CKPT_CAPTURE", "changed");
    job.survives(kills());
}

/// Takes a snapshot, and returns the most host memory that was seen meanwhile.
fn peak_of_save(job: &Job, running: &mut Running) -> u64 {
    let mut command = job.sandbox.command(["checkpoint"]);
    let mut checkpoint = command.stdout(Stdio::null()).spawn().expect("ckpt-run runs");
    let (mut peak, pid) = (0, running.pid());
    let status = running.until("a snapshot", || {
        peak = peak.max(held_bytes_by(pid));
        checkpoint.try_wait().expect("wait")
    });
    assert!(status.success(), "{}", running.said());
    job.goes_on(running);
    peak
}

/// Resumes the job, and returns the most host memory that was seen meanwhile.
fn peak_of_resume(job: &Job) -> (Running, u64) {
    let mut running = job.start_with(&[], "");
    let (mut peak, pid) = (0, running.pid());
    running.until("a resumed job", || {
        peak = peak.max(held_bytes_by(pid));
        job.sandbox.read("job.err").contains("resumed from snapshot").then_some(())
    });
    (job.started(running), peak)
}

#[test]
fn without_a_copy_checkpoints_take_a_quarter_of_the_host_memory_at_most() {
    let job = job_with("none", MEASURED_MIB);
    let mut running = filled(&job);
    for round in 0..3 {
        let peak = peak_of_save(&job, &mut running);
        assert!(peak <= MEASURED_MIB * MIB / 4, "round {round}: {peak}");
        let memory = job.status()["device_memory"].take();
        assert_eq!((&memory["mirror"], &memory["mirror_bytes"]), (&"none".into(), &0.into()), "{memory}");
        assert_eq!(memory["copied_back_bytes"], 0, "{memory}");
        if round == 0 {
            running.kill_everything();
            let (resumed, peak) = peak_of_resume(&job);
            running = resumed;
            assert!((1..=MEASURED_MIB * MIB / 4).contains(&peak), "a resume: {peak}");
            let pid = running.pid();
            let is_freed = || (held_bytes_by(pid) == 0).then_some(());
            running.until("the window is freed", is_freed);
        }
    }
    // Most of it has not changed, and is neither read nor stored again.
    assert!(job.status()["last_snapshot"]["unread_bytes"].as_u64() >= Some(MEASURED_MIB * MIB / 2));
    running.kill_everything();
    let mut running = job.resume();
    job.ends_right(&mut running);
}

/// A store that fails while it takes the memory, or later: the memory is on the GPU, and the next snapshot is complete.
#[test]
fn without_a_copy_a_failing_store_leaves_the_job_running() {
    let job = job_with("none", JOB_MIB);
    let faults = "window-read@3=enospc,window@3=error,save-before-commit@2=error";
    let mut running = job.start_with_fault(faults);
    job.touch("fill");
    running.until("all memory is written", || job.is_there("filled").then_some(()));
    for why in [Some(".mem"), None, Some("injected at window"), Some("injected at save-before-commit"), None]
    {
        let output = job.sandbox.call(["checkpoint"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.success(), why.is_none(), "{why:?}: {said}\n{}", running.said());
        assert!(said.contains(why.unwrap_or_default()), "not {why:?}: {said}");
        job.goes_on(&mut running);
    }
    running.kill_everything();
    let mut running = job.resume();
    job.ends_right(&mut running);
}

/// The interposer and the driver fail at each step. Nothing is lost while the memory is on the GPU.
#[test]
fn without_a_copy_failures_of_the_process_are_undone() {
    let job = job_with("none", JOB_MIB);
    let mut running = filled(&job);
    job.fail("cuMemExportToShareableHandle:1+=CUDA_ERROR_NOT_SUPPORTED");
    job.is_refused(&running, "--mirror changed");
    for points in ["detach-readable=panic", "detach-captured=panic", "detach-released=panic"] {
        job.disarm();
        job.arm(points);
        job.is_refused(&running, "the interposer made a mistake");
        job.goes_on(&mut running);
    }
    job.disarm();
    save(&job, &mut running);
    running.kill_everything();
    let mut running = job.resume();
    job.ends_right(&mut running);
}

/// The store is too slow: the process stops waiting for it, and the launcher's late requests do no harm.
#[test]
fn without_a_copy_a_store_that_is_too_slow_does_not_stop_the_job() {
    let job = job_with("none", JOB_MIB).with_options(&["--freeze-timeout", "3s"]);
    let mut running = job.start_with_fault("window-read@2=delay:4000");
    job.goes_on(&mut running);
    let output = job.sandbox.call(["checkpoint"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("--freeze-timeout"), "{said}");
    job.goes_on(&mut running);
    job.ends_right(&mut running);
}

/// The store does not answer at all: all processes run on, and the message names the store. Once it answers, it is used again.
#[test]
fn without_a_copy_a_store_that_never_answers_does_not_stop_the_job() {
    let job = Job::new("shared.c", &["100000"]).with("CKPT_CAPTURE", "changed");
    let job = job.with_options(&["--mirror", "none", "--freeze-timeout", "6s"]);
    job.touch("slow");
    job.touch("points.hold");
    // The first process has been saved by then, and waits.
    let hold = format!("window@2=hold:{}", job.sandbox.path().join("points.hold").display());
    let mut running = job.start_with_fault(&hold);
    job.goes_on(&mut running);
    let checkpoint = || job.sandbox.command(["checkpoint"]).stderr(Stdio::piped()).spawn().expect("it runs");
    let mut attempt = checkpoint();
    let store = job.sandbox.job_dir().parent().and_then(Path::parent).expect("a store").display().to_string();
    let given_up = format!("the store {store} has not taken the memory of the GPUs. The job continues");
    running.until("the message", || {
        // On a busy machine the time may be over before the store is reached.
        if attempt.try_wait().expect("wait").is_some() {
            attempt = checkpoint();
        }
        job.sandbox.read("job.err").contains(&given_up).then_some(())
    });
    job.goes_on(&mut running);
    assert_eq!(attempt.try_wait().expect("wait"), None, "the store has not answered");
    job.remove("points.hold");
    let output = attempt.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains(&store) && said.contains("--freeze-timeout"), "{said}");
    job.saves(&running);
    running.kill_everything();
    let mut running = job.resume();
    job.goes_on(&mut running);
    running.kill_everything();
}

/// Memory could not stay on the GPU, and the store does not answer when it is read back: the job cannot run on without it.
#[test]
fn a_store_that_never_answers_ends_a_job_that_needs_it() {
    let job = job().with_options(&["--freeze-timeout", "5s", "--gpu-timeout", "2s"]);
    job.touch("points.hold");
    let mut running =
        job.start_with_fault(&format!("fill@1=hold:{}", job.sandbox.path().join("points.hold").display()));
    job.touch("fill");
    running.until("all memory is written", || job.is_there("filled").then_some(()));
    job.saves(&running);
    job.fail(NOT_PARKED);
    assert_eq!(job.is_ended_by_a_checkpoint(&mut running), LAUNCHER_FAILED, "{}", running.said());
    assert!(running.said().contains("the store has not answered while"), "{}", running.said());
    job.remove("points.hold");
    job.disarm();
    let mut running = job.resume();
    job.ends_right(&mut running);
}

#[test]
fn without_a_copy_a_launcher_is_killed_and_a_job_is_preempted() {
    let job = job_with("none", JOB_MIB);
    let mut running = filled(&job);
    save(&job, &mut running);
    running.kill_everything();
    for fault in ["window-read@1=kill", "save-before-commit@1=kill", "save-after-commit@1=kill"] {
        let mut running = job.start_with_fault(fault);
        job.goes_on(&mut running);
        job.sandbox.call(["checkpoint"]);
        assert!(!running.wait_status().success(), "{fault}: {}", running.said());
    }
    let mut running = job.resume();
    job.goes_on(&mut running);
    running.signal(Signal::TERM);
    assert_eq!(running.wait(), 75, "{}", running.said());
    let mut running = job.resume();
    job.ends_right(&mut running);
}

/// The store fails or the launcher is killed while a restored process loads its memory.
#[test]
fn without_a_copy_a_resume_outlives_failures() {
    let job = job_with("none", JOB_MIB);
    let mut running = filled(&job);
    save(&job, &mut running);
    save(&job, &mut running);
    running.kill_everything();
    // An access that fails says nothing about the snapshot.
    let mut running = job.start_with(&[], "load@2=error");
    assert_eq!(running.wait(), LAUNCHER_FAILED, "{}", running.said());
    assert!(running.said().contains("cannot be read from the store: "), "{}", running.said());
    let mut running = job.start_with(&[], "load@3=kill");
    assert!(!running.wait_status().success(), "{}", running.said());
    // What the disk cannot read is skipped for an older snapshot.
    let mut running = job.start_with_fault("load@2=eio");
    assert!(running.said().contains("this is not the newest snapshot"), "{}", running.said());
    job.goes_on(&mut running);
    save(&job, &mut running);
    running.kill_everything();
    let mut running = job.resume();
    job.ends_right(&mut running);
}

/// The store does not answer while a restored process loads its memory: the resume fails, and says so. Once it answers, the
/// job is resumed.
#[test]
fn without_a_copy_a_store_that_never_answers_fails_the_resume() {
    let job = job_with("none", JOB_MIB);
    let mut running = filled(&job);
    save(&job, &mut running);
    running.kill_everything();
    job.touch("points.hold");
    let hold = format!("load@2=hold:{}", job.sandbox.path().join("points.hold").display());
    let mut running = job.start_with(&["--freeze-timeout", "5s", "--gpu-timeout", "5s"], &hold);
    assert_eq!(running.wait(), LAUNCHER_FAILED, "{}", running.said());
    let said = running.said();
    assert!(said.contains("the store has not answered for 10s while its device memory was loaded"), "{said}");
    job.remove("points.hold");
    let mut running = job.resume();
    job.ends_right(&mut running);
}

/// The store is damaged after the snapshot was verified, before a restored process loads its memory.
#[test]
fn without_a_copy_damage_is_found_when_memory_is_loaded() {
    let job = job_with("none", JOB_MIB);
    let mut running = filled(&job);
    save(&job, &mut running);
    running.kill_everything();
    job.arm("attach-mapped=stop");
    let mut running = job.start_with(&[], "");
    running.until("the fault", || job.is_there("points.stopped").then_some(()));
    damage_packs(&job);
    job.disarm();
    kill_process(stopped_process(&running), Signal::CONT).expect("it is stopped");
    assert_ne!(running.wait(), 0, "{}", running.said());
    let said = running.said();
    assert!(
        said.contains("none of the 1 snapshots of this job is whole") && said.contains("is damaged"),
        "{said}"
    );
}

/// Damage to the store is named when a snapshot is resumed.
#[test]
fn without_a_copy_damage_is_named() {
    let job = job_with("none", JOB_MIB);
    let mut running = filled(&job);
    save(&job, &mut running);
    running.kill_everything();
    damage_packs(&job);
    let mut running = job.start_with(&[], "");
    assert_ne!(running.wait(), 0, "{}", running.said());
    assert!(running.said().contains("damaged"), "{}", running.said());
}

/// Several processes that share device memory, all of which is copied.
#[test]
fn without_a_copy_processes_with_shared_memory_survive() {
    let mut job = GpuJob::in_c("shared.c");
    let mut short = Command::new(job.program.get_program());
    set_variables(&mut short, &job.program);
    job.program = short;
    job.program.arg("160").env("CKPT_MIRROR", "none").env("CKPT_CAPTURE", "all");
    job.survives(1);
}

/// One process of two runs on after a failed attempt, and writes to the memory of the other one between that one's hashes and
/// copies. Afterwards the memory has the content again that was hashed: the copy with the other content is not used.
#[test]
fn memory_that_is_written_while_its_owner_captures_it_is_captured_again() {
    for mode in ["all", "changed"] {
        let job = Job::new("flips.c", &["16"]).with("CKPT_CAPTURE", "changed");
        let job = job.with_options(&["--mirror", mode]);
        let mut running = job.start();
        write_through_the_other(&job, &mut running, 2);
        running.checkpoint(&job.sandbox);
        write_through_the_other(&job, &mut running, 3);

        job.arm("capture-hashed=stop,detach-captured=panic");
        let mut attempt = job.sandbox.command(["checkpoint"]).stderr(Stdio::null()).spawn().expect("it runs");
        let owner = stopped_process(&running);
        write_through_the_other(&job, &mut running, 4);
        job.disarm();
        kill_process(owner, Signal::CONT).expect("it is stopped");
        assert!(!attempt.wait().expect("it ends").success(), "{}", running.said());

        write_through_the_other(&job, &mut running, 3);
        running.checkpoint(&job.sandbox);
        running.kill_everything();
        let mut running = job.resume();
        assert_eq!(content_of_all(&job, &mut running), "3\n", "{mode}");
        running.kill_everything();
    }
}

fn write_through_the_other(job: &Job, running: &mut Running, value: u32) {
    fs::write(job.sandbox.path().join("change"), value.to_string()).expect("written");
    running.until("the write", || (!job.is_there("change")).then_some(()));
}

fn content_of_all(job: &Job, running: &mut Running) -> String {
    job.touch("pause");
    running.until("the answer", || (!job.is_there("pause")).then_some(()));
    job.sandbox.read("paused")
}
