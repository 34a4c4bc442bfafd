//! A driver that never returns from a call of a resume: the attempt ends by its deadline, and the next one succeeds.

use std::time::{Duration, Instant};

use crate::faulty_job::Job;
use ckpt_run_tests::{Running, is_full_run, until};

/// Long enough for a resume on a busy machine, and short for a test.
const SHORT: [&str; 4] = ["--freeze-timeout", "1s", "--gpu-timeout", "1s"];
/// An ordinary run tries this many calls of each job.
const SAMPLE: usize = 2;
/// Every attempt has to end in this time. Its own limits are two seconds, the rest is for a busy machine.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(90);

/// The job with a snapshot that was taken while it makes no calls of its own.
fn saved(job: &Job) -> Running {
    let mut running = job.start();
    job.pause(&mut running);
    running.checkpoint(&job.sandbox);
    running
}

/// The calls of a resume, in their order.
fn calls_of_a_resume(job: &Job) -> Vec<String> {
    job.fail("*:1+=delay:0");
    let mut running = job.resume();
    job.disarm();
    running.kill_everything();
    job.failed()
}

/// Resumes the job while this rule makes its driver hang. The launcher has to notice that by itself.
fn hangs(job: &Job, rule: &str) {
    let hit = || {
        job.fail(rule);
        let mut failing = job.start_with(&SHORT, "");
        let begun = Instant::now();
        assert_ne!(failing.wait(), 0, "{rule}: {}", failing.said());
        assert!(begun.elapsed() < ATTEMPT_LIMIT, "{rule} took {:?}", begun.elapsed());
        let said = failing.said();
        assert!(said.contains("--gpu-timeout") || said.contains("--freeze-timeout"), "{rule}: {said}");
        // On a busy machine the time may have been over before the call.
        (!job.failed().is_empty()).then_some(())
    };
    until(&format!("a hang by {rule}"), hit);
    job.disarm();
}

/// Lets each of the calls hang in turn, an ordinary run some of them.
fn every_call_may_hang(job: &Job, rules: &[String]) {
    assert!(rules.len() >= SAMPLE, "{rules:?}");
    let step = if is_full_run() { 1 } else { rules.len().div_ceil(SAMPLE) };
    for rule in rules.iter().step_by(step) {
        hangs(job, rule);
    }
    job.remove("pause");
    let mut running = job.resume();
    job.goes_on(&mut running);
    job.ends_right(&mut running);
}

/// By their numbers, the first and the last one of each kind.
fn numbered(calls: &[String]) -> Vec<String> {
    let is_inner =
        |(at, call): (usize, &String)| calls[..at].contains(call) && calls[at + 1..].contains(call);
    let outer = calls.iter().enumerate().filter(|one| !is_inner(*one));
    outer.map(|(at, _)| format!("*:{}=hang", at + 1)).collect()
}

#[test]
fn a_driver_that_hangs_in_any_call_of_a_resume() {
    let job = Job::steady("2");
    saved(&job).kill_everything();
    let calls = calls_of_a_resume(&job);
    every_call_may_hang(&job, &numbered(&calls));
}

#[test]
fn without_a_copy_a_driver_that_hangs_in_any_call_of_a_resume() {
    let job = Job::steady("2").with_options(&["--mirror", "none"]);
    saved(&job).kill_everything();
    let calls = calls_of_a_resume(&job);
    every_call_may_hang(&job, &numbered(&calls));
}

/// The driver of the first process hangs, and the second one waits for that process.
#[test]
fn a_driver_that_hangs_in_any_call_of_one_of_two_processes() {
    let job = Job::multicast("2");
    saved(&job).kill_everything();
    let mut calls = calls_of_a_resume(&job);
    calls.sort_unstable();
    calls.dedup();
    let rules: Vec<_> = calls.iter().map(|call| format!("{call}:1=hang")).collect();
    every_call_may_hang(&job, &rules);
}

/// The launcher resumes the job by itself once more.
#[test]
fn a_resume_in_which_the_driver_hangs_is_followed_by_another() {
    let job = Job::steady("2");
    saved(&job).kill_everything();
    job.fail("cuMemMap:1=hang");
    let mut running = job.start_with(&[&SHORT[..], &["--max-restarts", "100"]].concat(), "");
    running.until("a hang", || (!job.failed().is_empty()).then_some(()));
    job.disarm();
    job.remove("pause");
    running.until("a restart", || {
        job.sandbox.read("job.err").contains("of the job, which had failed").then_some(())
    });
    job.goes_on(&mut running);
    job.ends_right(&mut running);
}

/// Opening a GPU's device file is a call of the driver, too, made by the launcher itself.
#[test]
fn a_device_file_that_does_not_open_does_not_stop_a_resume() {
    let job = Job::steady("2");
    saved(&job).kill_everything();
    job.remove("pause");
    job.touch("points.hold");
    let hold = format!("device-file=hold:{}", job.sandbox.path().join("points.hold").display());
    let mut running = job.start_with_fault(&hold);
    assert!(running.said().contains("has not opened within 10 s"), "{}", running.said());
    job.goes_on(&mut running);
    job.remove("points.hold");
    job.ends_right(&mut running);
}

/// The driver takes longer than `--freeze-timeout` to make the context again, and comes back within `--gpu-timeout`.
#[test]
fn a_resume_with_slow_contexts_is_no_hang() {
    const CONTEXT: Duration = Duration::from_millis(2500);
    let job = Job::steady("2").with("SIMCUDA_CONTEXT_MS", "2500");
    let mut running = job.start();
    running.checkpoint(&job.sandbox);
    running.kill_everything();
    let lines = job.lines();
    let begun = Instant::now();
    let mut running = job.start_with(&["--freeze-timeout", "1s", "--gpu-timeout", "120s"], "");
    running.until("a line", || (job.lines() > lines).then_some(()));
    assert!(begun.elapsed() >= CONTEXT, "{:?}", begun.elapsed());
    assert!(running.said().contains("has not returned yet"), "{}", running.said());
    job.ends_right(&mut running);
}
