//! Habits of writing, killed at random moments. `cargo xtask soak --files` runs each alone, for longer.

use super::{KILLS, KILLS_VARIABLE, check, chosen, mixed, number, plan, seed};
use ckpt_run_tests::habits::{self, GROUPS, HabitJob, MAY_REFUSE, MIXED, Outcome, Plan};
use ckpt_run_tests::is_full_run;
use ckpt_run_tests::{Sandbox, ckpt_run, criu, programs};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A user that no other test uses.
const UID: u32 = 61_101;
/// As xtask sets them for `soak --files`: kills of each job, and seconds.
const SOAK_KILLS: &str = "CKPT_TEST_FILES_SOAK_KILLS";
const SOAK_LIMIT: &str = "CKPT_TEST_FILES_SOAK_S";
/// Jobs at the same time: one for each core of a small machine.
const SOAK_JOBS: usize = 2;

fn group(name: &str) {
    let (_, habits) = GROUPS.iter().find(|(group, _)| *group == name).expect("a group");
    let kills = number(KILLS_VARIABLE).unwrap_or(KILLS);
    check(name, &habits::run(Sandbox::new(), &plan(habits, kills, &[])));
}

#[test]
fn every_habit_is_in_a_group() {
    let grouped = GROUPS.iter().flat_map(|(_, habits)| habits.iter().copied());
    let alone = MAY_REFUSE.iter().map(|(habit, _)| *habit);
    let mut all: Vec<_> = grouped.chain(alone).chain(["epochs"]).collect();
    all.sort_unstable();
    let mut listed = habits::listed();
    listed.sort_unstable();
    assert_eq!(all, listed);
    assert!(MIXED.iter().all(|habit| all.contains(habit)));
    assert!(MAY_REFUSE.len() <= 2);
}

#[test]
fn logs() {
    group("logs");
}

#[test]
fn files_changed_in_place() {
    group("in_place");
}

#[test]
fn replaced_files() {
    group("replaced");
}

#[test]
fn links_and_directories() {
    group("trees");
}

#[test]
fn databases() {
    group("databases");
}

#[test]
fn files_of_training_programs() {
    group("training");
}

#[test]
fn what_may_be_refused_is_refused_by_name_or_right() {
    for (habit, _) in MAY_REFUSE {
        check(habit, &habits::run(Sandbox::new(), &plan(&[habit], KILLS, &[])));
    }
}

#[test]
fn snapshots_at_an_interval() {
    let kills = if is_full_run() { 20 } else { 3 };
    check("at an interval", &habits::run(Sandbox::new(), &plan(&mixed(), kills, &["--interval", "1s"])));
}

/// That of the directory is in the paths of all files, in the names that the job has open, and in its working directory.
#[test]
fn files_in_a_directory_whose_name_is_not_utf8() {
    let kills = if is_full_run() { 20 } else { 3 };
    let work = OsStr::from_bytes(b"tr\xe9sor").to_owned();
    check("not UTF-8", &habits::run(Sandbox::new(), &Plan { work, ..plan(&mixed(), kills, &[]) }));
}

/// Without the rights for fanotify, snapshots and resumes look for changed files in the working directory and where files
/// are open for writing. Closed files elsewhere are not covered.
#[test]
fn files_of_a_user_without_rights() {
    for path in [ckpt_run(), criu(), programs()] {
        if !path.ancestors().all(is_reachable) {
            return ckpt_test_skip::skip("other users have no access to the programs under test");
        }
    }
    let kills = if is_full_run() { 20 } else { 3 };
    let habits: Vec<_> = mixed().into_iter().filter(|habit| !habit.starts_with("outside_")).collect();
    let plan = Plan { uid: Some(UID), ..plan(&habits, kills, &["--files", "strict"]) };
    check("without rights", &habits::run(Sandbox::new(), &plan));
    // By default nothing is guessed, and that is said.
    let mut job = HabitJob::new(Sandbox::new(), &Plan { options: Vec::new(), ..plan });
    let mut running = job.start();
    running.kill_everything();
    let said = running.said();
    assert!(said.contains("snapshots cover only those files of the job that are open for writing"), "{said}");
}

fn is_reachable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o001 != 0)
}

/// What the jobs of one habit came to.
#[derive(Default)]
struct Sums {
    kills: u32,
    resumed: u32,
    refused: u32,
    wrong: Vec<Value>,
}

impl Sums {
    fn add(&mut self, outcome: Outcome, seed: u64) {
        self.kills += outcome.kills;
        self.resumed += outcome.resumed;
        self.refused += u32::from(outcome.refused.is_some());
        if let Some(message) = &outcome.refused {
            println!("seed {seed}: {message}\n{}", outcome.events);
        }
        let wrong = outcome.wrong.map(|what| {
            println!("seed {seed}: {what}\n{}", outcome.events);
            json!({ "seed": seed, "what": what })
        });
        self.wrong.extend(wrong);
    }
}

/// The habits, each in a job of its own, and the groups, until the time is over. Without the variables of `xtask soak
/// --files` it is one short round with two habits.
#[test]
fn soak() {
    let kills = number(SOAK_KILLS).unwrap_or(1);
    let limit = number(SOAK_LIMIT).map(Duration::from_secs);
    let alone =
        GROUPS.iter().flat_map(|(_, habits)| habits.iter()).chain(MAY_REFUSE.iter().map(|(name, _)| name));
    let mut jobs: Vec<(&str, Vec<&str>)> = alone.map(|habit| (*habit, vec![*habit])).collect();
    jobs.extend(GROUPS.iter().map(|(name, habits)| (*name, habits.to_vec())));
    match chosen() {
        Some(chosen) => jobs.retain(|(name, _)| chosen.iter().any(|chosen| chosen == name)),
        None if limit.is_none() => jobs.retain(|(name, _)| ["made_counter", "tmp_rename"].contains(name)),
        None => {}
    }
    assert!(!jobs.is_empty(), "no habit has this name");
    let until = limit.map(|limit| Instant::now() + limit);
    let (first_seed, sums) = (seed(), Mutex::new(BTreeMap::<&str, Sums>::new()));
    let next = Mutex::new(0..);
    std::thread::scope(|scope| {
        for _ in 0..SOAK_JOBS {
            scope.spawn(|| {
                loop {
                    let number: usize = next.lock().unwrap().next().expect("a number");
                    let is_over = until.map_or(number >= jobs.len(), |until| Instant::now() > until);
                    if is_over {
                        break;
                    }
                    let (name, habits) = &jobs[number % jobs.len()];
                    // Every third round has snapshots at an interval.
                    let options: &[&str] =
                        if number / jobs.len() % 3 == 2 { &["--interval", "1s"] } else { &[] };
                    let seed = first_seed + number as u64;
                    let plan = Plan { seed, until, ..plan(habits, kills, options) };
                    let outcome = habits::run(Sandbox::new(), &plan);
                    sums.lock().unwrap().entry(name).or_default().add(outcome, seed);
                }
            });
        }
    });
    report(first_seed, &sums.into_inner().unwrap());
}

fn report(seed: u64, sums: &BTreeMap<&str, Sums>) {
    let rows: Vec<_> = sums
        .iter()
        .map(|(habit, sums)| {
            let Sums { kills, resumed, refused, wrong } = sums;
            json!({
                "habit": habit,
                "kills": kills,
                "resumed": resumed,
                "refused": refused,
                "wrong": wrong.len(),
                "what": wrong,
            })
        })
        .collect();
    println!("{}", json!({ "seed": seed, "habits": rows }));
    let may = |habit: &str| MAY_REFUSE.iter().any(|(name, _)| *name == habit);
    let bad: Vec<_> = sums
        .iter()
        .filter(|(habit, sums)| !sums.wrong.is_empty() || sums.refused > 0 && !may(habit))
        .map(|(habit, _)| *habit)
        .collect();
    assert!(bad.is_empty(), "wrong or refused: {bad:?}");
}
