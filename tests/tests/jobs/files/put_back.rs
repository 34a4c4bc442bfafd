//! Resumes that are killed while they put files back, and checkpoints of a file that is written for long.

use super::{mixed, plan};
use crate::supervisor::until_ready;
use ckpt_run_tests::habits::{HabitJob, State};
use ckpt_run_tests::{Running, Sandbox, python};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

/// The fault points of launcher/src/restore/put_back.rs, in order.
const POINTS: &[&str] = &[
    "put-back-moving",
    "put-back-aside",
    "put-back-directory",
    "put-back-file",
    "put-back-made",
    "put-back-rewrite",
    "put-back-symlink",
    "put-back-link",
    "put-back-done",
];
/// A point is passed once for each file: the resume is killed at one of the first passages.
const PASSAGES: u32 = 3;
/// How often more for a point that was not reached in any of them.
const MORE_TRIES: usize = 5;
/// Between a snapshot and a kill: all habits of the job have done some steps.
const GAP: Duration = Duration::from_millis(400);

fn runs(job: &mut HabitJob, what: &str) -> Running {
    match job.resume() {
        State::Runs(running) => running,
        State::Refused(why) | State::Wrong(why) => panic!("{what}: {why}\n{}", job.events()),
        State::Ended => panic!("{what}: the job has ended\n{}", job.events()),
    }
}

/// Saves the job, lets it write, kills it, and kills its resume at a fault point. Returns whether that was reached.
fn kill_a_resume(job: &mut HabitJob, mut running: Running, point: &str, passage: u32) -> (Running, bool) {
    let what = format!("{point}@{passage}");
    job.checkpoint(&mut running).unwrap_or_else(|why| panic!("{what}: {why}\n{}", job.events()));
    std::thread::sleep(GAP);
    running.kill_everything();
    job.note(&format!("a resume that is killed at {what}"));
    let mut command = job.run_command();
    command.env("CKPT_FAULT", format!("{what}=kill"));
    let mut faulty = job.launch(command);
    let is_reached = loop {
        if faulty.has_ended() {
            let status = faulty.wait_status();
            job.note(faulty.said().trim());
            assert_eq!(status.signal(), Some(9), "{what}: {status}\n{}", job.events());
            break true;
        }
        if faulty.said().contains("resumed from snapshot") {
            faulty.kill_everything();
            break false;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    (runs(job, &what), is_reached)
}

#[test]
fn a_resume_is_killed_at_every_step_of_putting_back() {
    let mut job = HabitJob::new(Sandbox::new(), &plan(&mixed(), 0, &[]));
    let mut running = job.start();
    let mut reached = BTreeSet::new();
    let tries = (1..=PASSAGES).flat_map(|passage| POINTS.iter().map(move |point| (point, passage)));
    // What the job has written since the snapshot decides which points a resume passes.
    let more = POINTS.iter().cycle().take(MORE_TRIES * POINTS.len()).map(|point| (point, 1));
    for (index, (point, passage)) in tries.chain(more).enumerate() {
        let is_further = index >= POINTS.len() * PASSAGES as usize;
        if is_further && reached.contains(point) {
            continue;
        }
        let is_reached;
        (running, is_reached) = kill_a_resume(&mut job, running, point, passage);
        if is_reached {
            reached.insert(point);
        }
    }
    let end = job.finish(running);
    assert_eq!(end, Ok(()), "the sequence was\n{}", job.events());
    assert_eq!(reached.len(), POINTS.len(), "only {reached:?} were reached\n{}", job.events());
}

/// A checkpoint of 30 MB is written to `ckpt.tmp` and renamed. The snapshot has a part of it, the kill hits the next one:
/// no part of that may be in the file.
#[test]
fn a_checkpoint_has_bytes_of_one_epoch_only() {
    let mut job = HabitJob::new(Sandbox::new(), &plan(&["epochs"], 0, &[]));
    let mut running = job.start();
    let file = job.sandbox.path().join("work/epochs/ckpt.tmp");
    let bytes = || fs::metadata(&file).map_or(0, |meta| meta.len());
    let is_half_written = || (5 << 20..20 << 20).contains(&bytes()).then_some(());
    for _ in 0..4 {
        running.until("a part of an epoch", is_half_written);
        job.checkpoint(&mut running).unwrap_or_else(|why| panic!("{why}\n{}", job.events()));
        running.until("the end of the epoch", || (bytes() == 0).then_some(()));
        running.until("a part of the next epoch", is_half_written);
        running.kill_everything();
        job.note("killed in the next epoch");
        running = runs(&mut job, "epochs");
    }
    let end = job.finish(running);
    assert_eq!(end, Ok(()), "the sequence was\n{}", job.events());
}

/// Makes and deletes files without a pause, and ends with 1 if there are others.
const BUSY: &str = r"
import os
os.mkdir('made')
number = 0
while not os.path.exists('go'):
    open(f'made/{number}', 'w').close()
    if number >= 3:
        os.unlink(f'made/{number - 3}')
    expected = {str(one) for one in range(max(0, number - 2), number + 1)}
    found = set(os.listdir('made'))
    if found != expected:
        raise SystemExit(f'{found} instead of {expected}')
    number += 1
    if number == 10:
        open('ready', 'w').close()
";

/// The init may be killed in the middle of recording the end of the job: it says that it has seen the end only if it has.
#[test]
fn files_that_are_made_while_everything_is_killed_are_the_jobs() {
    for _ in 0..8 {
        let sandbox = Sandbox::new();
        let python = python().display().to_string();
        let start = || sandbox.start("job", ["--", &python, "-c", BUSY]);
        let mut job = start();
        until_ready(&mut job, &sandbox);
        job.checkpoint(&sandbox);
        job.kill_everything();
        let mut job = start();
        job.until("a resume", || sandbox.read("job.err").contains("resumed from snapshot").then_some(()));
        fs::write(sandbox.path().join("go"), "").unwrap();
        assert_eq!(job.wait(), 0, "{}", job.said());
    }
}
