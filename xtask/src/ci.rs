//! `cargo xtask ci`: every check, one line each with its duration.

use std::fmt;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::skips::{self, Skip};
use crate::{process, say, workspace};

/// How a step ended.
enum Outcome {
    Passed,
    Failed(String),
    Skipped(&'static str),
}

/// A step that has run, or was skipped.
struct Step {
    name: &'static str,
    outcome: Outcome,
    took: Duration,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, outcome, took } = self;
        let took = say::duration(*took);
        match outcome {
            Outcome::Passed => write!(f, "ci: {name:<24} ok       {took:>12}"),
            Outcome::Skipped(reason) => write!(f, "ci: {name:<24} skipped  {:>12}  {reason}", ""),
            Outcome::Failed(how) => write!(f, "ci: {name:<24} FAILED   {took:>12}  {how}"),
        }
    }
}

/// Runs all steps, even after one that failed: one run of CI shows all faults.
pub fn run() -> Result<ExitCode> {
    let start = Instant::now();
    let skipped_tests = skips::file()?;
    skips::clear(&skipped_tests)?;
    let mut done = Vec::new();
    for (name, command) in steps() {
        let step = run_step(name, command)?;
        println!("{step}");
        done.push(step);
    }
    println!("\nci: summary");
    done.iter().for_each(|step| println!("{step}"));
    let skipped_tests = skips::read(&skipped_tests)?;
    println!("{}", closing_line(&done, &skipped_tests, start.elapsed()));
    let has_failed = done.iter().any(|step| matches!(step.outcome, Outcome::Failed(_)));
    Ok(if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The last line: how many steps failed, which were skipped, and how many tests were.
fn closing_line(steps: &[Step], skipped_tests: &[Skip], took: Duration) -> String {
    let failed = steps.iter().filter(|step| matches!(step.outcome, Outcome::Failed(_))).count();
    let skipped_steps = steps.iter().filter_map(|step| match step.outcome {
        Outcome::Skipped(reason) => Some(format!("step {} ({reason})", step.name)),
        _ => None,
    });
    // Each was named when the tests had run: a long line here would hide what has failed.
    let skipped_tests =
        (!skipped_tests.is_empty()).then(|| format!("{} tests (named above)", skipped_tests.len()));
    let skipped: Vec<_> = skipped_steps.chain(skipped_tests).collect();
    let skipped = if skipped.is_empty() { "nothing".to_owned() } else { skipped.join(", ") };
    format!("ci: {failed} of {} steps failed, {}; skipped: {skipped}", steps.len(), say::duration(took))
}

/// The steps in their order, cheap ones first. A step without a command is skipped: cargo-deny is not installed.
fn steps() -> Vec<(&'static str, Option<Command>)> {
    let cargo = |args: &[&str]| {
        let mut command = workspace::cargo();
        command.args(args);
        command
    };
    let clippy = ["clippy", "--workspace", "--all-targets"];
    let deny_warnings = ["--", "-D", "warnings"];
    let mut doc = cargo(&["doc", "--workspace", "--no-deps"]);
    doc.env("RUSTDOCFLAGS", "-D warnings");
    vec![
        ("fmt", Some(cargo(&["fmt", "--all", "--check"]))),
        ("deny", process::find_program("cargo-deny").map(|_| cargo(&["deny", "check"]))),
        ("structure", Some(cargo(&["xtask", "structure", "--check"]))),
        ("clippy", Some(cargo(&[&clippy[..], &deny_warnings].concat()))),
        (
            "clippy with faults",
            Some(cargo(&[&clippy[..], &["--features", workspace::FAULTS], &deny_warnings].concat())),
        ),
        ("doc", Some(doc)),
        ("test", Some(cargo(&["xtask", "test"]))),
    ]
}

fn run_step(name: &'static str, command: Option<Command>) -> Result<Step> {
    let start = Instant::now();
    let outcome = match command {
        None => Outcome::Skipped("cargo-deny is not installed"),
        Some(mut command) => {
            println!("ci: {name}: {}", process::describe(&command));
            let status = command.status().with_context(|| format!("could not start the step {name}"))?;
            if status.success() { Outcome::Passed } else { Outcome::Failed(status.to_string()) }
        }
    };
    Ok(Step { name, outcome, took: start.elapsed() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_names_what_was_skipped() {
        let step = |name, outcome| Step { name, outcome, took: Duration::ZERO };
        let steps = [
            step("fmt", Outcome::Passed),
            step("deny", Outcome::Skipped("cargo-deny is not installed")),
            step("test", Outcome::Failed("exit status: 1".to_owned())),
        ];
        let skips = [Skip { test: "refused::a_vsock".to_owned(), reason: "no device".to_owned() }];
        let took = Duration::from_secs(3);
        assert_eq!(
            closing_line(&steps, &skips, took),
            "ci: 1 of 3 steps failed, 3.0 s; skipped: step deny (cargo-deny is not installed), 1 tests (named above)"
        );
        assert_eq!(closing_line(&steps[..1], &[], took), "ci: 0 of 1 steps failed, 3.0 s; skipped: nothing");
    }
}
