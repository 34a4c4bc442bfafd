//! One set of checks for any CUDA driver: `conformance --lib libcuda.so.1`.
//!
//! Each check calls the driver API as a small C program would and compares what comes with what CUDA's
//! documentation says. It runs in a process of its own, because cuInit, errors that stay and crashes belong to a
//! process. Checks whose right result is not documented are questions: what comes is their answer, and on a real
//! GPU it settles what the simulated driver has to assume.
//!
//! Exit code: 0, 1 if a check failed, 2 for bad input.

mod areas;
mod check;
mod checks;
mod ckpt;
mod gpu;
mod helper;
mod kernels;
mod multicast;
mod nccl;
mod pools;
mod questions;
mod report;
mod roles;
mod rounding;
mod run;
mod turns;
mod vmm;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use crate::check::{Body, Check, Stop};
use crate::report::Outcome;

/// The command line.
#[derive(Parser)]
#[command(name = "conformance", about = "Checks a CUDA driver against CUDA's documentation")]
struct Cli {
    /// The libcuda.so.1 to check
    #[arg(long, value_name = "PATH", required_unless_present = "list")]
    lib: Option<PathBuf>,
    /// The libnccl.so.2 to check over that driver; without it, the one in the same folder
    #[arg(long, value_name = "PATH")]
    nccl: Option<PathBuf>,
    /// Write all outcomes to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only list the checks, with what each one shows
    #[arg(long)]
    list: bool,
    /// How many checks run at a time; more than one only on a driver that gives each its own device
    #[arg(long, value_name = "N", default_value_t = 1)]
    jobs: usize,
    /// Only these checks; a name that ends with / selects a whole area
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Run one check in this process (used internally)
    #[arg(long, hide = true, value_name = "NAME")]
    check: Option<String>,
    /// Be the second process of a check (used internally)
    #[arg(long, hide = true, num_args = 1.., value_name = "ROLE")]
    role: Option<Vec<String>>,
}

fn main() -> ExitCode {
    match perform(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("conformance: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn perform(cli: Cli) -> Result<ExitCode> {
    let all = areas::all();
    if let Some(name) = cli.check {
        return check_here(&cli.lib.context("--check needs --lib")?, find(&all, &name)?);
    }
    if let Some(words) = cli.role {
        gpu::load(&cli.lib.context("--role needs --lib")?)?;
        return roles::play(&words);
    }
    let chosen = choose(&all, &cli.names)?;
    if cli.list {
        let width = chosen.iter().map(|check| check.name.len()).max().unwrap_or(0);
        let list: String =
            chosen.iter().map(|check| format!("{:width$}  {}\n", check.name, check.shows)).collect();
        // The reader may have closed the pipe.
        let _ = std::io::stdout().write_all(list.as_bytes());
        return Ok(ExitCode::SUCCESS);
    }
    let lib = cli.lib.context("--lib is missing")?;
    // Where the driver is a link, its target's folder is another one.
    let nccl = cli.nccl.unwrap_or_else(|| lib.with_file_name(nccl::FILE_NAME));
    let lib = lib.canonicalize().with_context(|| format!("there is no library {}", lib.display()))?;
    let report = run::all((&lib, &std::path::absolute(nccl)?), &chosen, cli.jobs.max(1))?;
    if let Some(file) = cli.json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(&file, text + "\n").with_context(|| format!("writing {}", file.display()))?;
    }
    report.print_summary();
    Ok(if report.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn find<'a>(all: &[&'a Check], name: &str) -> Result<&'a Check> {
    let found = all.iter().find(|check| check.name == name);
    found.copied().with_context(|| format!("there is no check {name:?}; --list names all"))
}

fn choose<'a>(all: &[&'a Check], names: &[String]) -> Result<Vec<&'a Check>> {
    if names.is_empty() {
        return Ok(all.to_vec());
    }
    let mut chosen = Vec::new();
    for name in names {
        if name.ends_with('/') {
            let area = all.iter().filter(|check| check.name.starts_with(name.as_str()));
            let before = chosen.len();
            chosen.extend(area.copied());
            anyhow::ensure!(chosen.len() > before, "there is no area {name:?}; --list names the checks");
        } else {
            chosen.push(find(all, name)?);
        }
    }
    Ok(chosen)
}

/// Runs one check and prints its outcome as the last line of standard output.
fn check_here(lib: &std::path::Path, check: &Check) -> Result<ExitCode> {
    // Checks end with the suite when it is interrupted.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    gpu::load(lib)?;
    let outcome = match &check.body {
        Body::Check(body) => body().map(|()| Outcome::Pass),
        Body::Question(body) => body().map(Outcome::Answer),
    };
    let outcome = outcome.unwrap_or_else(|stop| match stop {
        Stop::Failed(text) => Outcome::Fail(text),
        Stop::Skipped(why) => Outcome::Skipped(why),
    });
    println!("\n{}{}", run::OUTCOME, serde_json::to_string(&outcome)?);
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_sentences_are_sentences() {
        let all = areas::all();
        let mut names: Vec<_> = all.iter().map(|check| check.name).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
        for check in all {
            assert!(check.name.contains('/') && !check.name.contains(' '), "{}", check.name);
            assert!(check.shows.len() > 20, "{}: {:?}", check.name, check.shows);
        }
    }

    #[test]
    fn checks_are_chosen_by_name_and_by_area() {
        let all = areas::all();
        let pick = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
            choose(&all, &names).map(|chosen| chosen.len())
        };
        assert_eq!(pick(&[]).unwrap(), all.len());
        assert_eq!(pick(&[all[0].name]).unwrap(), 1);
        assert!(pick(&["vmm/"]).unwrap() > 1);
        assert!(pick(&["nothing/of-the-kind"]).is_err());
        assert!(pick(&["nothing/"]).is_err());
    }
}
