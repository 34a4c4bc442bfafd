//! `cargo xtask ci`: every check, one line each with its duration.

use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result};

use crate::{process, say, workspace};

/// How a step ended.
enum Outcome {
    Passed,
    Failed(String),
    Skipped(&'static str),
}

/// Runs all steps, a failed one notwithstanding: a person who waits for CI wants to hear of all faults at once.
pub fn run() -> Result<ExitCode> {
    let start = Instant::now();
    let mut lines = Vec::new();
    let mut failed = 0;
    for (name, command) in steps() {
        let (outcome, took) = run_step(name, command)?;
        let took = say::duration(took);
        let line = match outcome {
            Outcome::Passed => format!("ci: {name:<24} ok       {took:>12}"),
            Outcome::Skipped(why) => format!("ci: {name:<24} skipped  {:>12}  {why}", ""),
            Outcome::Failed(how) => {
                failed += 1;
                format!("ci: {name:<24} FAILED   {took:>12}  {how}")
            }
        };
        println!("{line}");
        lines.push(line);
    }
    println!("\nci: summary");
    lines.iter().for_each(|line| println!("{line}"));
    println!("ci: {failed} of {} steps failed, {}", lines.len(), say::duration(start.elapsed()));
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The steps in their order, cheap ones first. One that has no command is skipped, for want of cargo-deny.
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
        ("clippy", Some(cargo(&[&clippy[..], &deny_warnings].concat()))),
        (
            "clippy with faults",
            Some(cargo(&[&clippy[..], &["--features", workspace::FAULTS], &deny_warnings].concat())),
        ),
        ("doc", Some(doc)),
        ("test", Some(cargo(&["xtask", "test"]))),
    ]
}

fn run_step(name: &str, command: Option<Command>) -> Result<(Outcome, std::time::Duration)> {
    let start = Instant::now();
    let Some(mut command) = command else {
        return Ok((Outcome::Skipped("cargo-deny is not installed"), start.elapsed()));
    };
    println!("ci: {name}: {}", process::describe(&command));
    let status = command.status().with_context(|| format!("could not start the step {name}"))?;
    let outcome = if status.success() { Outcome::Passed } else { Outcome::Failed(status.to_string()) };
    Ok((outcome, start.elapsed()))
}
