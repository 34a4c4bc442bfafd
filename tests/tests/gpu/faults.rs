//! Failures while GPU state is saved or restored: failed calls of the driver, work that does not end, memory taken by
//! another process, and SIGKILL between any two steps. The job either continues unharmed and can be saved next time, or
//! ends and resumes correctly.

use std::process::Child;
use std::time::Duration;

use crate::faulty_job::Job;
use ckpt_run_tests::gpu::{cuda_program, succeed};
use ckpt_run_tests::{Running, is_full_run, processes, until};
use rustix::process::{Pid, Signal, kill_process};

/// The launcher's exit code when a job was ended, or could not be brought back.
pub const LAUNCHER_FAILED: i32 = 125;

/// Fault points between any two steps, in order (interpose, `cuda::checkpoint`).
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
/// Those of processes that share multicast objects.
const MULTICAST: [&str; 5] = [
    "detach-all-drained",
    "detach-multicast",
    "detach-multicast-ended",
    "attach-multicast-added",
    "attach-multicast-bound",
];
/// Fault points of the launcher.
const LAUNCHER: [&str; 3] = ["prepare", "staged", "delivered"];

/// Nothing is parked.
const NOT_EXPORTED: &str = "cuMemExportToShareableHandle:1+=CUDA_ERROR_NOT_SUPPORTED";
/// What was parked does not come back: device memory is allocated again and copied back.
const NOT_PARKED: &str = "cuMemImportFromShareableHandle:1+=CUDA_ERROR_NOT_SUPPORTED";

/// Kills the job at each of these points of a checkpoint, and resumes it.
fn is_killed_at(job: &Job, points: impl IntoIterator<Item = &'static str>) {
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    for point in points {
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
fn killed_between_any_two_steps_of_a_checkpoint() {
    is_killed_at(&Job::steady("2"), DETACH.into_iter().chain(ATTACH));
}

/// Processes that share multicast objects take these steps together: all are killed, each where it is.
#[test]
fn killed_while_multicast_objects_go_down_or_come_back() {
    is_killed_at(&Job::multicast("2"), MULTICAST);
}

/// One of the processes that share multicast objects fails once, on its way down or on its way back.
#[test]
fn one_process_may_fail_once_while_multicast_objects_go_down_or_come_back() {
    let job = Job::multicast("2");
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    for call in [
        "cuMemUnmap:1",
        "cuMulticastUnbind:2",
        "cuCheckpointProcessCheckpoint:1",
        "cuMulticastCreate:1",
        "cuMulticastAddDevice:2",
        "cuMulticastBindMem:1",
    ] {
        job.paused(&mut running, |running| {
            job.fail(&format!("{call}=CUDA_ERROR_UNKNOWN"));
            let tried = job.try_checkpoint(running);
            let is_on_the_way_back = call.starts_with("cuMulticast") && !call.contains("Unbind");
            assert_eq!(tried.is_ok(), is_on_the_way_back, "{call}: {tried:?}");
            assert!(tried.err().is_none_or(|said| said.contains("(999)")), "{call}");
            assert_eq!(job.failed().len(), 1, "{call}");
            job.disarm();
            running.checkpoint(&job.sandbox);
        });
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

/// The process is delayed at each step for longer than a checkpoint may take.
#[test]
fn delayed_between_any_two_steps() {
    let job = Job::steady("2").with_options(&["--freeze-timeout", "2s"]);
    let mut running = job.start();
    for point in DETACH.iter().chain(&ATTACH) {
        job.arm(&format!("{point}=delay:2300"));
        job.sandbox.call(["checkpoint"]);
        job.disarm();
        job.goes_on(&mut running);
    }
    // The process may still be away after the last delay.
    job.saves(&running);
    job.ends_right(&mut running);
}

/// A panic in the interposer.
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
        // The snapshot is complete at `delivered`: a later failure does not discard it.
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
        // A call that two rules match is listed twice.
        let mut noted = 0;
        calls.retain(|call| {
            noted += usize::from(also.starts_with(call.as_str()));
            !also.starts_with(call.as_str()) || noted % 2 == 1
        });
    }
    calls
}

/// Makes the first and the last call of each kind fail once, from the call `first` on, together with the faults `also`.
/// The job continues unharmed, and is either saved or refused with a reason.
fn any_call_may_fail_once(first: &str, capture: &str, also: &str) {
    let job = Job::steady("2").with("CKPT_CAPTURE", capture);
    let mut running = job.start();
    // Each attempt begins after such a checkpoint.
    let good_checkpoint = |running: &mut Running| {
        if !also.is_empty() {
            job.fail(also);
        }
        running.checkpoint(&job.sandbox);
        job.disarm();
    };
    good_checkpoint(&mut running);
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
        good_checkpoint(&mut running);
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
    any_call_may_fail_once("cuMemExportToShareableHandle", "all", NOT_EXPORTED);
}

/// Without any of these calls every checkpoint is refused, and the job continues.
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
        // The first two calls are for memory that cannot be read in place.
        "cuMemUnmap:3+",
        "cuMemRelease:1+",
    ];
    for call in refusing {
        job.paused(&mut running, |running| {
            // Not "not supported", after which there is no other attempt.
            job.fail(&format!("{call}=CUDA_ERROR_INVALID_VALUE"));
            let name = call.split([':', '_']).next().unwrap();
            let said = job.try_checkpoint(running).expect_err(call);
            assert!(said.contains(name) && said.contains("CUDA_ERROR_INVALID_VALUE (1)"), "{call}: {said}");
            job.disarm();
        });
    }
    assert!(job.sandbox.snapshots().is_empty());
    running.checkpoint(&job.sandbox);
    job.ends_right(&mut running);
}

/// What the driver does not support is asked of it once: later attempts are refused in the same words, and do not pause
/// the job.
#[test]
fn what_the_driver_does_not_support_is_remembered() {
    let job = Job::steady("2");
    let mut running = job.start();
    for (index, call) in ["cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"].into_iter().enumerate()
    {
        job.fail(&format!("{call}:1+=CUDA_ERROR_NOT_SUPPORTED"));
        let first = job.try_checkpoint(&running).expect_err(call);
        assert!(first.contains(call) && first.contains("tried again once"), "{first}");
        let asked = job.failed();
        for _ in 0..2 {
            job.goes_on(&mut running);
            assert_eq!(job.try_checkpoint(&running).expect_err(call), first);
        }
        assert_eq!(job.failed(), asked, "the driver was asked again");
        let warnings = running.said().matches("no snapshot this time").count();
        assert_eq!(warnings, index + 1, "one for each reason: {}", running.said());
        job.disarm();
        job.change(&mut running);
    }
    running.checkpoint(&job.sandbox);
    job.ends_right(&mut running);
}

/// Without these calls a checkpoint is slower, and `status` and `show` say why.
#[test]
fn a_call_that_always_fails_makes_checkpoints_slower() {
    let job = Job::steady("70");
    let mut running = job.start();
    for (rule, is_parked, remark) in [
        // This rule is the first one, since a loaded module is kept.
        ("cuModuleLoadData:1+", true, "what has changed is not known: cuModuleLoadData failed with"),
        ("cuMemHostAlloc:1+", true, "what has changed is not known: cuMemHostAlloc failed with"),
        ("cuMemHostRegister_v2:1+", true, "the mirror is not pinned: cuMemHostRegister failed with"),
        // What is not imported again is parked anew in the next checkpoint.
        ("cuMemImportFromShareableHandle:1+", true, ""),
        ("cuMemExportToShareableHandle:1+", false, ""),
        // In the second batch.
        ("cuMemExportToShareableHandle:66", true, ""),
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

/// NVML hangs in the process that the launcher asks it by, or fails: the launcher says so, and goes on.
#[test]
fn nvml_that_does_not_answer_stops_nothing() {
    const SILENT: &str = "does not say which GPUs there are: ";
    let job = Job::steady("2");
    let rules = job.sandbox.path().join("rules-nvml").display().to_string();
    let job = job.with("SIMNVML_FAULT_FILE", &rules);
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    job.replace("rules-nvml", "*:1+=hang");
    running.checkpoint(&job.sandbox);
    assert!(running.said().contains(&format!("{SILENT}no answer within 10 s")), "{}", running.said());
    assert!(job.is_there("rules-nvml.hits"));
    job.goes_on(&mut running);
    running.kill_everything();
    // 999 is NVML_ERROR_UNKNOWN. The resume and the checkpoint after it ask from processes of their own.
    job.remove("rules-nvml.hits");
    job.replace("rules-nvml", "nvmlDeviceGetCount_v2:1=999");
    let mut running = job.resume();
    running.checkpoint(&job.sandbox);
    assert!(running.said().matches(SILENT).count() >= 3, "{}", running.said());
    assert!(job.sandbox.read("rules-nvml.hits").lines().count() >= 2);
    job.remove("rules-nvml");
    running.kill_everything();
    let mut running = job.resume();
    running.checkpoint(&job.sandbox);
    let newest = job.sandbox.snapshots().pop().expect("a snapshot");
    let manifest = job.sandbox.json(["show", &newest, "--json"]);
    assert!(manifest.to_string().contains("\"uuid\":\"GPU-"), "a new session asks NVML: {manifest}");
    running.kill_everything();
    let mut running = job.resume();
    job.ends_right(&mut running);
}

/// A worker is forked while another thread initialises the driver, which has its device files open by then.
#[test]
fn a_worker_that_is_forked_while_the_driver_starts_survives() {
    let job = Job::new("forks_early.c", &["100000"]);
    job.touch("slow");
    job.arm("init-returned=hold");
    let starting = job.start_with(&[], "");
    job.until_held();
    job.touch("fork");
    until("a worker", || job.is_there("forked").then_some(()));
    job.disarm();
    let mut running = job.started(starting);
    for _ in 0..2 {
        running.checkpoint(&job.sandbox);
        job.goes_on(&mut running);
        running.kill_everything();
        running = job.resume();
        job.goes_on(&mut running);
    }
    job.ends_right(&mut running);
}

/// A thread opens a device with which memory of the GPU can be registered, while the process is taken off its GPU.
#[test]
fn a_device_that_is_opened_during_the_detach_is_found() {
    let directory = tempfile::tempdir().expect("a directory");
    let device = directory.path().join("gdrdrv");
    std::fs::write(&device, "").expect("a file");
    let job = Job::new("registered.c", &["100000", device.to_str().expect("text"), "late"]);
    let job = job.with("CKPT_TEST_DEVICES", &format!("{}/", directory.path().display()));
    job.touch("slow");
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    job.arm("detach-captured=hold");
    let mut command = job.sandbox.command(["checkpoint"]);
    let attempt = command.stderr(std::process::Stdio::piped()).spawn().expect("it runs");
    job.until_held();
    job.touch("late");
    until("a device", || job.is_there("opened").then_some(()));
    job.disarm();
    let refused = attempt.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("it has a device open, GDRCopy's"), "{said}");
    job.goes_on(&mut running);
    running.kill_everything();
}

/// The driver cannot be restored: the job is ended, and resumes from its previous snapshot. Its process is taken off the
/// GPU before it is killed, which would ruin the GPU.
#[test]
fn a_driver_that_does_not_come_back_ends_the_job() {
    let job = Job::steady("2").with("SIMCUDA_KILL_RUINS", "1");
    let mut running = job.start();
    let not_parked = |rule: &str| format!("{NOT_PARKED};{rule}");
    for (call, rule) in [
        ("cuCheckpointProcessRestore", "cuCheckpointProcessRestore:1+=CUDA_ERROR_OUT_OF_MEMORY".to_owned()),
        ("cuCheckpointProcessUnlock", "cuCheckpointProcessUnlock:2+=CUDA_ERROR_UNKNOWN".to_owned()),
        // The first two calls are for memory that cannot be read in place.
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
        assert!(!said.contains("is killed with its state"), "{rule}: {said}");
        job.disarm();
        job.remove("pause");
        running = job.resume();
    }
    job.ends_right(&mut running);
}

/// The driver is locked with memory that it does not save, or saves nothing: the process cannot be taken off the GPU before
/// it is killed, and the message says so.
#[test]
fn a_locked_driver_that_fails_for_good_ends_the_job() {
    let job = Job::steady("2");
    let mut running = job.start();
    for rule in [
        "cuCheckpointProcessUnlock:1+=CUDA_ERROR_UNKNOWN",
        "cuCheckpointProcessCheckpoint:1+=CUDA_ERROR_UNKNOWN;cuCheckpointProcessUnlock:2+=CUDA_ERROR_UNKNOWN",
    ] {
        running.checkpoint(&job.sandbox);
        job.goes_on(&mut running);
        job.pause(&mut running);
        job.fail(rule);
        let told_before = job.sandbox.read("job.err").len();
        job.sandbox.call(["checkpoint"]);
        assert_eq!(running.wait(), LAUNCHER_FAILED, "{rule}: {}", running.said());
        let said = job.sandbox.read("job.err").split_off(told_before);
        assert!(
            said.contains("cuCheckpointProcessUnlock failed with")
                && said.contains("its GPU state was lost")
                && said.contains("is killed with its state on the GPU"),
            "{rule}: {said}"
        );
        job.disarm();
        job.remove("pause");
        running = job.resume();
    }
    job.ends_right(&mut running);
}

/// The same failures during a resume: the job ends, and the snapshot is unchanged.
#[test]
fn a_driver_that_fails_in_a_resume_ends_the_job() {
    let job = Job::steady("2").with("SIMCUDA_KILL_RUINS", "1");
    let mut running = job.start();
    running.signal(Signal::TERM);
    assert_eq!(running.wait(), 75, "{}", running.said());
    for (call, error) in [
        ("cuCheckpointProcessRestore", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuCheckpointProcessUnlock", "CUDA_ERROR_UNKNOWN"),
        ("cuMemCreate", "CUDA_ERROR_UNKNOWN"),
        ("cuMemcpyHtoDAsync_v2", "CUDA_ERROR_UNKNOWN"),
    ] {
        job.fail(&format!("{call}:1+={error}"));
        let mut failed = job.start_with(&[], "");
        assert_eq!(failed.wait(), LAUNCHER_FAILED, "{call}: {}", failed.said());
        let said = failed.said();
        let name = call.split('_').next().unwrap();
        assert!(
            said.contains(&format!("{name} failed with {error}")) && said.contains("is intact"),
            "{said}"
        );
    }
    job.disarm();
    let mut again = job.resume();
    job.ends_right(&mut again);
}

/// The owner of shared memory is killed when all processes are off their GPU and before they are dumped. Its parent has
/// waited for it, so that nothing of it is in the dump. A snapshot of the other one could not be resumed.
#[test]
fn a_process_that_is_killed_while_it_is_away_spoils_no_snapshot() {
    let job = Job::new("orphaned.c", &["3000"]);
    job.touch("slow");
    job.touch("linger");
    let mut running = job.start_with_fault("dump-pre-dump@2=kill-rank");
    let sound = running.checkpoint(&job.sandbox);
    job.goes_on(&mut running);
    job.is_refused(&running, "which has freed it or ended");
    let said = running.said();
    assert!(said.contains("one of them has failed: status 0x9"), "{said}");
    job.remove("linger");
    assert_eq!(running.wait(), 1, "{}", running.said());
    assert_eq!(job.sandbox.snapshots(), [sound]);
    job.remove("slow");
    let mut running = job.start_with(&[], "");
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert!(running.said().contains("resumed from snapshot"), "{}", running.said());
    let mut unbroken = job.gpu.command(&job.program[0]);
    unbroken.args(&job.program[1..]).current_dir("/");
    assert_eq!(job.sandbox.read("job.out"), succeed(unbroken));
}

/// One of two processes is lost in a resume: the other one, which the driver has restored, is taken off its GPU too.
#[test]
fn a_resume_that_fails_in_one_process_takes_all_off_their_gpus() {
    let job = Job::multicast("2").with("SIMCUDA_KILL_RUINS", "1");
    let mut running = job.start();
    running.signal(Signal::TERM);
    assert_eq!(running.wait(), 75, "{}", running.said());
    job.fail("cuMulticastCreate:1+=CUDA_ERROR_UNKNOWN");
    let mut failed = job.start_with(&[], "");
    assert_eq!(failed.wait(), LAUNCHER_FAILED, "{}", failed.said());
    let said = failed.said();
    assert!(said.contains("cuMulticastCreate failed with") && said.contains("is intact"), "{said}");
    assert!(!said.contains("is killed with its state"), "{said}");
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
    job.saves(&running);
    job.ends_right(&mut running);
}

/// Host memory that another thread maps while the driver's addresses are free, before release 580, is not overwritten.
#[test]
fn a_thread_that_maps_memory_all_the_time() {
    let mut job = Job::steady("6").with("SIMCUDA_DRIVER", "575");
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

/// Memory that is freed after its mirror was staged and before the driver is locked is not saved.
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

/// A program shares memory again after its mirror was staged, and had none to share when the mirror was asked for.
#[test]
fn memory_that_is_shared_after_the_mirror_was_staged() {
    let job = Job::new("exported.c", &["100000"]);
    job.touch("slow");
    let mut running = job.start_with_fault("staged@1=delay:1500");
    job.pause(&mut running);
    std::thread::scope(|scope| {
        let attempt = scope.spawn(|| job.try_checkpoint(&running));
        until("the delay", || running.said().contains("fault point staged").then_some(()));
        job.remove("pause");
        attempt.join().expect("no panic").expect("saved");
    });
    job.goes_on(&mut running);
}

/// Work that stalls the GPU makes checkpoints fail until the stall is over; the attempts do not harm the job.
fn is_given_up_while_it_stalls(mode: &str, fault: &str, why: &str) {
    let job = Job::stalls(mode).with("SIMCUDA_FAULT", fault);
    let mut running = job.start();
    job.touch("stall");
    running.until("the stall", || job.is_there("stalled").then_some(()));
    // On a busy machine, the launcher's own limit may end before it hears of the agent's.
    let is_refused = |running: &Running| {
        until(why, || job.try_checkpoint(running).expect_err("refused").contains(why).then_some(()));
    };
    is_refused(&running);
    job.goes_on(&mut running);
    is_refused(&running);
    job.remove("stall");
    running.until("the end of the stall", || job.is_there("over").then_some(()));
    job.saves(&running);
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

/// A stream capture whose state the driver does not report counts as open.
#[test]
fn a_capture_whose_state_is_unknown() {
    let fault = "cuStreamIsCapturing:1=CUDA_ERROR_UNKNOWN";
    is_given_up_while_it_stalls("capture", fault, "a stream capture (cuStreamBeginCapture) did not end");
}

/// The process of the job that a fault has stopped.
pub fn stopped_process(job: &Running) -> Pid {
    let pid = until("a stopped process", || {
        job.descendants().into_iter().find(|pid| processes::state(*pid) == Some('T'))
    });
    Pid::from_raw(pid).expect("a process ID")
}

/// A job on a small GPU, and another process that can allocate the rest of its memory.
pub fn with_hog(job: Job, work: impl FnOnce(&Job, Running, &mut Hog)) {
    let job = job.with("SIMCUDA_MEMORY", "64MiB");
    let running = job.start();
    let mut hog = Hog::start(&job);
    work(&job, running, &mut hog);
}

/// Checkpoints the job; while it is off the GPU, the other process allocates all free memory.
fn while_away(job: &Job, running: &Running, hog: &mut Hog) {
    job.arm("attach-begun=stop");
    std::thread::scope(|scope| {
        let attempt = scope.spawn(|| job.sandbox.call(["checkpoint"]));
        until("the fault", || job.is_there("points.stopped").then_some(()));
        let stopped = stopped_process(running);
        hog.takes_all(job);
        job.disarm();
        kill_process(stopped, Signal::CONT).unwrap();
        attempt.join().expect("no panic");
    });
}

/// Parked memory stays allocated: no other process gets it.
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

/// Memory of the driver, such as global variables of a module, is not parked. If another process takes it at the last
/// moment, after ckpt-run has seen that it was free, the driver's restore fails.
#[test]
fn memory_of_the_driver_taken_by_another_process() {
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

/// The calls of the driver's checkpoint API, in their order.
const CYCLE: [&str; 4] = [
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
];

/// A driver that never returns from a call, or crashes in it: the job is ended, and resumes from the snapshot before.
#[test]
fn a_driver_that_hangs_or_crashes_in_a_checkpoint() {
    let job = Job::steady("2").with_options(&["--freeze-timeout", "3s", "--gpu-timeout", "2s"]);
    let mut running = job.start();
    job.saves(&running);
    let first = CYCLE.iter().flat_map(|call| [(call, 1, "hang"), (call, 1, "crash")]);
    // The first lock and the first unlock are those that wait for submitted work.
    for (call, number, action) in first.chain([(&CYCLE[0], 2, "hang"), (&CYCLE[3], 2, "crash")]) {
        job.goes_on(&mut running);
        job.fail(&format!("{call}:{number}={action}"));
        assert_ne!(job.is_ended_by_a_checkpoint(&mut running), 0, "{call}={action}: {}", running.said());
        if action == "hang" {
            assert!(running.said().contains("--gpu-timeout"), "{call}: {}", running.said());
        }
        job.disarm();
        running = job.resume();
    }
    job.ends_right(&mut running);
}

/// The same for the first and the last of the other calls of each kind, without `--full` for some of these: either the job is
/// ended, or it goes on. It never stands still, and the snapshot before is good.
#[test]
fn a_driver_that_hangs_in_any_call_of_a_checkpoint() {
    let job = Job::steady("2").with_options(&["--freeze-timeout", "3s", "--gpu-timeout", "2s"]);
    let mut running = job.start();
    job.saves(&running);
    // Each of the checkpoints below is the first one after a resume, too.
    running.kill_everything();
    running = job.resume();
    let calls = calls(&job, &mut running, "");
    running.kill_everything();
    running = job.resume();
    let is_outer = |(index, name): &(usize, &String)| {
        !calls[..*index].contains(name) || !calls[*index + 1..].contains(name)
    };
    let tried: Vec<_> = calls.iter().enumerate().filter(is_outer).collect();
    let each = if is_full_run() { 1 } else { tried.len() / 4 };
    for (index, name) in tried.into_iter().step_by(each) {
        job.pause(&mut running);
        let lines = job.lines();
        // On a busy machine the time may be over before that call.
        let hung = until(&format!("call {index}, {name}, to be made"), || {
            job.fail(&format!("*:{}=hang", index + 1));
            job.sandbox.call(["checkpoint"]);
            Some(job.failed()).filter(|hung| !hung.is_empty() || running.has_ended())
        });
        assert!(!hung.is_empty(), "{name}: {}", running.said());
        job.remove("pause");
        job.disarm();
        until(&format!("an end after call {index}, {name}, of {hung:?}"), || {
            (running.has_ended() || job.lines() >= lines + 2).then_some(())
        });
        running.kill_everything();
        running = job.resume();
        job.goes_on(&mut running);
    }
    job.ends_right(&mut running);
}

/// The same in a resume: nothing is lost, and the next one succeeds.
#[test]
fn a_driver_that_hangs_or_crashes_in_a_resume() {
    let job = Job::steady("2").with_options(&["--freeze-timeout", "3s", "--gpu-timeout", "2s"]);
    let mut running = job.start();
    job.saves(&running);
    for (call, action) in CYCLE[2..].iter().flat_map(|call| [(call, "hang"), (call, "crash")]) {
        running.kill_everything();
        job.fail(&format!("{call}:1={action}"));
        let mut failing = job.start_with(&[], "");
        assert_ne!(failing.wait(), 0, "{call}={action}: {}", failing.said());
        job.disarm();
        running = job.resume();
    }
    job.ends_right(&mut running);
}

/// Somebody has stopped the process: that is no hang of its driver, however long it takes.
#[test]
fn a_process_that_is_stopped_in_a_checkpoint_is_not_lost() {
    let job = Job::steady("2").with_options(&["--freeze-timeout", "2s", "--gpu-timeout", "2s"]);
    let mut running = job.start();
    job.arm("detach-gate=stop");
    until("a process that is stopped", || {
        job.sandbox.call(["checkpoint"]);
        job.is_there("points.stopped").then_some(())
    });
    // Longer than both limits: a loss would have ended the job by then.
    std::thread::sleep(Duration::from_secs(5));
    job.disarm();
    kill_process(stopped_process(&running), Signal::CONT).expect("it is there");
    job.goes_on(&mut running);
    job.saves(&running);
    job.ends_right(&mut running);
}

/// A driver that hangs now and then: the launcher brings the job back by itself.
#[test]
fn a_job_whose_driver_hangs_is_restarted() {
    let job = Job::steady("2").with_options(&["--freeze-timeout", "3s", "--gpu-timeout", "2s"]);
    let mut running = job.started(job.start_with(&["--max-restarts", "3"], ""));
    job.saves(&running);
    job.goes_on(&mut running);
    job.fail("cuCheckpointProcessCheckpoint:1=hang");
    until("a call that hangs", || {
        job.sandbox.call(["checkpoint"]);
        (!job.failed().is_empty()).then_some(())
    });
    job.disarm();
    running.until("a restart", || (job.status()["restarts"].as_u64() == Some(1)).then_some(()));
    job.goes_on(&mut running);
    job.ends_right(&mut running);
}

/// A process with memory on the same GPU.
pub struct Hog(Child);

impl Hog {
    fn start(job: &Job) -> Self {
        let program = job.gpu.compile(&cuda_program("stalls.c"), job.sandbox.path());
        let mut command = job.gpu.command(program);
        command.arg("hog").env("SIMCUDA_MEMORY", "64MiB").current_dir(job.sandbox.path());
        Self(command.spawn().expect("started"))
    }

    pub fn takes_all(&mut self, job: &Job) {
        job.touch("take");
        until("the memory is taken", || job.is_there("taken").then_some(()));
    }

    pub fn ends(&mut self) {
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
