//! `cargo xtask soak`: the test of that name, ten times as long.

use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::tools::{self, Tool};
use crate::{process, test, workspace};

/// Options of `cargo xtask soak`.
#[derive(clap::Args)]
pub struct Args {
    /// How many checkpoints to take
    #[arg(long, value_name = "N", default_value = "500", value_parser = clap::value_parser!(u64).range(1..))]
    checkpoints: u64,
    /// How often to kill the job, a fifth of it with its launcher
    #[arg(long, value_name = "N", default_value = "100", value_parser = clap::value_parser!(u64).range(5..))]
    kills: u64,
    /// Do at the same moments what a run with this seed did; it is the first thing that a run says
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    seed: Option<u64>,
}

/// Sets up, builds, and soaks. What was counted is the JSON line at the end.
pub fn run(args: &Args) -> Result<ExitCode> {
    let tools = tools::environment(&[Tool::Criu, Tool::Torch])?;
    let mut soak = match test::with_programs(tools)? {
        Ok(test) => test,
        Err(code) => return Ok(code),
    };
    soak.args([
        "--workspace",
        "--features",
        workspace::FAULTS,
        "--test",
        "jobs",
        "soak::",
        "--",
        "--nocapture",
    ]);
    soak.env("CKPT_TEST_SOAK_CHECKPOINTS", args.checkpoints.to_string());
    soak.env("CKPT_TEST_SOAK_KILLS", args.kills.to_string());
    if let Some(seed) = args.seed {
        soak.env("CKPT_TEST_SOAK_SEED", seed.to_string());
    }
    let status = soak.status().context("could not start cargo test")?;
    Ok(process::exit_code(status))
}
