//! The files of a job that is killed and resumed are those of an unbroken run: names, contents, modes, owners, hard
//! links. The programs are in tests/programs/files.

mod attribution;
mod file_systems;
mod habits;
mod mapped;
mod put_back;
mod told;

use ckpt_run_tests::habits::{MAY_REFUSE, MIXED, Outcome, Plan};
use ckpt_run_tests::is_full_run;
use std::time::UNIX_EPOCH;

/// Kills of each job with a group of habits. `cargo xtask test --full` has more.
const KILLS: u32 = 4;
/// As xtask sets it for `--full`.
const KILLS_VARIABLE: &str = "CKPT_TEST_KILLS";

fn number<T: std::str::FromStr>(variable: &str) -> Option<T> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is not a number")))
}

/// The habits or groups that the environment names, to find the cause of a failure.
fn chosen() -> Option<Vec<String>> {
    let names = std::env::var("CKPT_TEST_FILES_HABITS").ok()?;
    Some(names.split(',').map(str::to_owned).collect())
}

/// The chosen habits, or some of all groups.
fn mixed() -> Vec<String> {
    chosen().unwrap_or_else(|| MIXED.iter().map(ToString::to_string).collect())
}

/// The seed in the environment; or else a new one with `--full`, and the same each time without.
fn seed() -> u64 {
    let now = UNIX_EPOCH.elapsed().unwrap().as_nanos();
    let new = if is_full_run() { u64::try_from(now % 1_000_000_007).unwrap() } else { 1 };
    number("CKPT_TEST_FILES_SEED").unwrap_or(new)
}

fn plan<S: ToString>(habits: &[S], kills: u32, options: &[&str]) -> Plan {
    let habits = habits.iter().map(ToString::to_string).collect();
    let options = options.iter().map(ToString::to_string).collect();
    Plan { habits, kills, seed: seed(), options, uid: None, until: None, work: "work".into() }
}

/// Fails unless the files were right, or the resume was refused for a habit that may be refused.
fn check(name: &str, outcome: &Outcome) {
    let Outcome { kills, resumed, events, .. } = outcome;
    println!("{name}: {kills} kills, {resumed} resumed, refused: {:?}", outcome.refused);
    if let Some(wrong) = &outcome.wrong {
        panic!("{name}: {wrong}\nthe sequence was\n{events}");
    }
    if let Some(message) = &outcome.refused {
        let may = MAY_REFUSE.iter().any(|(habit, _)| message.contains(&format!("/{habit}/")));
        assert!(may, "{name}: {message}\nthe sequence was\n{events}");
    }
}
