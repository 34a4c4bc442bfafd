//! `cargo xtask bench`: what a checkpoint costs, as ratios in one run.
//!
//! `host`: a process of a given size under ckpt-run. The same process is dumped by ckpt-run and by CRIU alone, into
//! the same kind of tmpfs, in turns; it is restored by ckpt-run and by CRIU alone, from the same files. How long it
//! stood still is measured by the process itself.
//!
//! `gpu`: what the interposer adds to calls of the CUDA driver, and how fast device memory is captured and brought
//! back, on any machine.
//!
//! `nccl`: what the interposer adds to collectives and to launches of graphs with them, and how long ranks take to a
//! consistent cut.
//!
//! `files`: what the job's files cost: tracking what is written, checkpoints and resumes with changed files.
//!
//! `store`: the store beside fio, and beside torch.save.
//!
//! `cluster`: the protocol between the launchers of a job on several nodes, without a job.

mod cluster;
mod files;
mod gpu;
mod idle;
mod nccl;
mod sandbox;
mod store;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::{process, tools, workspace};
use sandbox::Sandbox;

/// Options of `cargo xtask bench`.
#[derive(clap::Args)]
pub struct Args {
    /// What to measure
    #[command(subcommand)]
    what: What,
}

/// What to measure.
#[derive(clap::Subcommand)]
enum What {
    /// Checkpoint and restore of host memory, beside CRIU alone
    Host(HostArgs),
    /// What the interposer adds to calls of the CUDA driver, and the speed of captures
    Gpu(GpuArgs),
    /// What the interposer adds to collectives of NCCL, and how long ranks take to a consistent cut
    Nccl(nccl::Args),
    /// The job's files: tracking, checkpoints, resumes
    Files(files::Args),
    /// The store beside fio and torch.save
    Store(store::Args),
    /// The protocol of jobs on several nodes, with up to 1,024 simulated launchers
    Cluster(cluster::Args),
}

/// Options of `cargo xtask bench gpu`.
#[derive(clap::Args)]
struct GpuArgs {
    /// Measure device memory on this libcuda.so.1, on its GPU, instead of simcuda
    #[arg(long, value_name = "PATH")]
    driver: Option<PathBuf>,
    /// How much device memory to capture, and to save in checkpoints, MiB
    #[arg(long, default_value_t = 256)]
    mib: usize,
    /// Measure only how long checkpoints pause a job with each `--mirror`
    #[arg(long)]
    mirrors: bool,
    /// Also write the JSON to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Options of `cargo xtask bench host`.
#[derive(clap::Args)]
struct HostArgs {
    /// Resident sizes, GB
    #[arg(long, value_delimiter = ',', default_values_t = [0.5, 2.0, 6.0])]
    sizes: Vec<f64>,
    /// Rounds per size; the medians are told
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Leave the sizes out: idle overhead only
    #[arg(long)]
    idle_only: bool,
    /// Also write the JSON to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

/// One size. Times are seconds, medians over the rounds.
#[derive(Serialize)]
struct Size {
    resident_gb: f64,
    stall_s: f64,
    criu_alone_s: f64,
    stall_ratio: f64,
    durable_s: f64,
    restore_s: f64,
    criu_restore_s: f64,
    restore_ratio: f64,
    rounds: Vec<Round>,
}

/// What one round measured.
#[derive(Serialize)]
struct Round {
    stall_s: f64,
    criu_alone_s: f64,
    durable_s: f64,
    restore_s: f64,
    criu_restore_s: f64,
}

#[derive(Serialize)]
struct Report {
    sizes: Vec<Size>,
    #[serde(flatten)]
    idle: idle::Idle,
    criu: String,
    kernel: String,
    cpus: usize,
}

/// Measures and prints JSON.
pub fn run(args: &Args) -> Result<ExitCode> {
    match &args.what {
        What::Host(args) => host(args),
        What::Gpu(args) if args.mirrors => tell(&gpu::measure_mirrors(args)?, args.json.as_deref()),
        What::Gpu(args) => tell(&gpu::measure(args)?, args.json.as_deref()),
        What::Nccl(args) => tell(&nccl::measure(args)?, args.json.as_deref()),
        What::Files(args) => {
            let (criu, ckpt_run) = (tools::criu()?, release()?);
            tell(&files::measure(&criu, &ckpt_run, args)?, args.json.as_deref())
        }
        What::Store(args) => tell(&store::measure(args)?, args.json.as_deref()),
        What::Cluster(args) => tell(&cluster::measure(args)?, args.json.as_deref()),
    }
}

fn host(args: &HostArgs) -> Result<ExitCode> {
    let criu = tools::criu()?;
    let ckpt_run = release()?;
    let mut sizes = Vec::new();
    for &resident_gb in args.sizes.iter().filter(|_| !args.idle_only) {
        sizes.push(measure(&criu, &ckpt_run, resident_gb, args.rounds)?);
    }
    eprintln!("bench: idle overhead");
    let report = Report {
        sizes,
        idle: idle::measure(&criu, &ckpt_run)?,
        criu: process::capture(Command::new(&criu).arg("--version"))?.trim().to_owned(),
        kernel: process::capture(Command::new("uname").arg("-r"))?.trim().to_owned(),
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
    };
    tell(&report, args.json.as_deref())
}

/// Builds ckpt-run as users do, and returns its path.
fn release() -> Result<PathBuf> {
    eprintln!("bench: building ckpt-run (release)");
    let mut build = workspace::cargo();
    process::capture(build.args(["build", "--release", "--quiet", "-p", "ckpt-run"]))?;
    Ok(workspace::target_dir()?.join("release/ckpt-run"))
}

/// Prints a report, and writes it to a file if one is named.
fn tell(report: &impl Serialize, file: Option<&Path>) -> Result<ExitCode> {
    let text = serde_json::to_string_pretty(report)?;
    if let Some(path) = file {
        std::fs::write(path, &text).with_context(|| format!("writing {}", path.display()))?;
    }
    println!("{text}");
    Ok(ExitCode::SUCCESS)
}

fn measure(criu: &Path, ckpt_run: &Path, resident_gb: f64, rounds: usize) -> Result<Size> {
    let mut measured = Vec::new();
    // The first round is not counted: it finds memory and caches cold for whoever comes first.
    for round in 0..=rounds {
        eprintln!("bench: {resident_gb} GB, round {round} of {rounds}");
        // Who is first takes turns.
        let result = one_round(criu, ckpt_run, (resident_gb * 1e9) as u64, round % 2 == 0)?;
        if round > 0 {
            measured.push(result);
        }
    }
    let median = |pick: fn(&Round) -> f64| median(measured.iter().map(pick).collect());
    let (stall_s, criu_alone_s) = (median(|round| round.stall_s), median(|round| round.criu_alone_s));
    let (restore_s, criu_restore_s) = (median(|round| round.restore_s), median(|round| round.criu_restore_s));
    Ok(Size {
        resident_gb,
        stall_s,
        criu_alone_s,
        stall_ratio: stall_s / criu_alone_s,
        durable_s: median(|round| round.durable_s),
        restore_s,
        criu_restore_s,
        restore_ratio: restore_s / criu_restore_s,
        rounds: measured,
    })
}

fn one_round(criu: &Path, ckpt_run: &Path, bytes: u64, ours_first: bool) -> Result<Round> {
    let sandbox = Sandbox::new(criu, ckpt_run, bytes)?;
    let mut job = sandbox.start()?;
    let (mut stall_s, mut durable_s, mut criu_alone_s) = (0.0, 0.0, 0.0);
    for ours in [ours_first, !ours_first] {
        if ours {
            (stall_s, durable_s) = job.checkpoint()?;
        } else {
            criu_alone_s = job.dump_by_criu_alone()?;
        }
    }
    job.kill()?;
    let (mut restore_s, mut criu_restore_s) = (0.0, 0.0);
    for ours in [ours_first, !ours_first] {
        if ours {
            restore_s = sandbox.restore()?;
        } else {
            criu_restore_s = sandbox.restore_by_criu_alone()?;
        }
    }
    Ok(Round { stall_s, criu_alone_s, durable_s, restore_s, criu_restore_s })
}

/// The middle one.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
