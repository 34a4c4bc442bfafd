//! `cargo xtask soak`: the test of that name, ten times as long; with `--files`, jobs that write files in many ways; with
//! `--chaos`, faults of all kinds at once.

use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};

use crate::tools::{self, Tool};
use crate::{process, test, workspace};

/// Kills by default.
const KILLS: u64 = 100;
const FILES_KILLS: u64 = 20;

/// Options of `cargo xtask soak`.
#[derive(clap::Args)]
pub struct Args {
    /// How many checkpoints to take
    #[arg(long, value_name = "N", default_value = "500", value_parser = clap::value_parser!(u64).range(1..))]
    checkpoints: u64,
    /// How often to kill the job, a fifth of it with its launcher; with --files, how often to kill each job [default: 100;
    /// with --files 20]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(5..))]
    kills: Option<u64>,
    /// Kill jobs that write files in many ways, one after another, and compare their files with those of unbroken runs
    #[arg(long, conflicts_with = "checkpoints")]
    files: bool,
    /// How long to soak with --files, in seconds
    #[arg(long, value_name = "N", default_value = "3600", requires = "files")]
    seconds: u64,
    /// With --files, only these habits or groups, separated by commas
    #[arg(long, value_name = "NAMES", requires = "files")]
    habits: Option<String>,
    /// For so long, faults of all kinds at once over a torchrun job with device memory on the simulator
    #[arg(long, value_name = "TIME", conflicts_with_all = ["checkpoints", "files", "kills"], value_parser = humantime::parse_duration)]
    chaos: Option<Duration>,
    /// Do at the same moments what a run with this seed did; it is the first thing that a run says
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    seed: Option<u64>,
}

/// Sets up, builds, and soaks. What was counted is the JSON line at the end.
pub fn run(args: &Args) -> Result<ExitCode> {
    let tools = tools::environment(&[Tool::Criu, Tool::Torch, Tool::Lmdb, Tool::CudaPython])?;
    let mut soak = match test::with_programs(tools)? {
        Ok(test) => test,
        Err(code) => return Ok(code),
    };
    let (program, test) = match args.chaos {
        Some(_) => ("gpu", "chaos::"),
        None if args.files => ("jobs", "files::habits::soak"),
        None => ("jobs", "soak::kills"),
    };
    soak.args(["--workspace", "--features", workspace::FAULTS, "--test", program, test]);
    soak.args(["--", "--nocapture", "--include-ignored"]);
    let kills = args.kills.unwrap_or(if args.files { FILES_KILLS } else { KILLS });
    let variables = if args.files {
        [("CKPT_TEST_FILES_SOAK_KILLS", kills), ("CKPT_TEST_FILES_SOAK_S", args.seconds)]
    } else {
        [("CKPT_TEST_SOAK_KILLS", kills), ("CKPT_TEST_SOAK_CHECKPOINTS", args.checkpoints)]
    };
    soak.envs(variables.map(|(name, number)| (name, number.to_string())));
    if let Some(habits) = &args.habits {
        soak.env("CKPT_TEST_FILES_HABITS", habits);
    }
    if let Some(time) = args.chaos {
        soak.env("CKPT_TEST_CHAOS_S", time.as_secs().to_string());
    }
    let seed = match args.chaos {
        Some(_) => "CKPT_TEST_CHAOS_SEED",
        None if args.files => "CKPT_TEST_FILES_SEED",
        None => "CKPT_TEST_SOAK_SEED",
    };
    soak.env(seed, args.seed.unwrap_or_else(new_seed).to_string());
    let status = soak.status().context("could not start cargo test")?;
    Ok(process::exit_code(status))
}

fn new_seed() -> u64 {
    let now = UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
    u64::try_from(now % 1_000_000_007).map_or(1, |seed| seed + 1)
}
