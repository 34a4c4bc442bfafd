//! `cargo xtask bench`: what a checkpoint costs, as ratios in one run.
//!
//! `host`: a process of a given size under ckpt-run. The same process is dumped by ckpt-run and by CRIU alone, into
//! the same kind of tmpfs, in turns; it is restored by ckpt-run and by CRIU alone, from the same files. How long it
//! was paused is measured by the process itself. Also, the same memory in one process and in eight, and checkpoints after a
//! twentieth of the memory has changed. Rounds are added until
//! the middle half of their ratios is close together. With `--kernel debian` in a virtual machine with a kernel that tracks
//! changes to memory, and there also checkpoints of a process that changes a twentieth of its memory all the time, with copies
//! before the pause and without.
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

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::{process, tools, workspace};
use sandbox::Sandbox;

/// How far the quartiles of rounds' ratios may be apart, of their median.
const RANGE_MAX: f64 = 0.15;
/// What a virtual machine measures by default, GB.
const MACHINE_GB: f64 = 1.0;

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
    /// Rounds per size, at least; the medians are told
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Rounds at most, while the middle half of their ratios differs by more than 15 %
    #[arg(long, default_value_t = 9)]
    most_rounds: usize,
    /// Resident size of one process, and of eight together, GB; 0: leave that out
    #[arg(long, default_value_t = 2.0)]
    processes: f64,
    /// Resident size of the process of which a twentieth is changed, GB; 0: leave that out
    #[arg(long, default_value_t = 2.0)]
    changed: f64,
    /// Resident size of the process that changes a twentieth all the time, where the kernel tracks changes, GB; 0: leave that out
    #[arg(long, default_value_t = 0.0)]
    changing: f64,
    /// Leave the sizes out: idle overhead only
    #[arg(long)]
    idle_only: bool,
    /// Leave the idle overhead out
    #[arg(long)]
    no_idle: bool,
    /// Measure in a virtual machine with this kernel. Only ratios count: its CPUs are emulated
    #[arg(long, value_enum)]
    kernel: Option<Kernel>,
    /// Measure this ckpt-run, instead of building it
    #[arg(long, value_name = "PATH")]
    ckpt_run: Option<PathBuf>,
    /// Also write the JSON to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

/// A kernel of a virtual machine.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Kernel {
    /// Debian's
    Debian,
}

/// The median of the rounds' ratios.
#[derive(Serialize)]
struct Ratio {
    median: f64,
    least: f64,
    most: f64,
    /// Whether the quartiles are apart by at most 15 % of the median: otherwise the median cannot be relied on.
    is_reliable: bool,
}

impl Ratio {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |quarters: usize| values.get(values.len() * quarters / 4).copied().unwrap_or(f64::NAN);
        let (least, median, most) = (at(0), at(2), values.last().copied().unwrap_or(f64::NAN));
        Self { median, least, most, is_reliable: at(3) - at(1) <= RANGE_MAX * median }
    }
}

/// One size. Times are seconds, medians over the rounds.
#[derive(Serialize)]
struct Size {
    resident_gb: f64,
    stall_s: f64,
    criu_alone_s: f64,
    stall_ratio: Ratio,
    durable_s: f64,
    restore_s: f64,
    criu_restore_s: f64,
    restore_ratio: Ratio,
    rounds: Vec<Round>,
}

/// The pause of one process, and that of eight with an eighth of its memory each. Seconds, medians over the rounds.
#[derive(Serialize)]
struct Processes {
    resident_gb: f64,
    stall_one_s: f64,
    stall_8_s: f64,
    stall_8_processes_ratio: Ratio,
    rounds: Vec<[f64; 2]>,
}

/// Checkpoints after all of the memory has changed, and after a twentieth of its pages, side by side and apart. Seconds,
/// medians over the rounds.
#[derive(Serialize)]
struct Changed {
    resident_gb: f64,
    stall_all_s: f64,
    stall_changed5_dense_ratio: Ratio,
    stall_changed5_scattered_ratio: Ratio,
    durable_all_s: f64,
    durable_changed5_ratio: Ratio,
    rounds: Vec<ChangedRound>,
}

/// Each is (stall, time until durable), seconds.
#[derive(Serialize)]
struct ChangedRound {
    all: (f64, f64),
    dense: (f64, f64),
    scattered: (f64, f64),
}

/// A process that changes a twentieth of its pages all the time, side by side or apart: its pauses with `--precopy 1` beside
/// that with `--precopy off`. Seconds, medians over the rounds.
#[derive(Serialize)]
struct Changing {
    resident_gb: f64,
    stall_plain_s: f64,
    /// The longest pause, of that of a plain dump.
    longest_changing5_dense_ratio: Ratio,
    longest_changing5_scattered_ratio: Ratio,
    /// All pauses of a checkpoint together.
    stall_changing5_dense_ratio: Ratio,
    stall_changing5_scattered_ratio: Ratio,
    rounds: Vec<ChangingRound>,
}

/// Each is (longest pause, all pauses together) of the second checkpoint of a job, seconds.
#[derive(Serialize)]
struct ChangingRound {
    plain: (f64, f64),
    dense: (f64, f64),
    scattered: (f64, f64),
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
    #[serde(skip_serializing_if = "Option::is_none")]
    processes: Option<Processes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    changed: Option<Changed>,
    #[serde(skip_serializing_if = "Option::is_none")]
    changing: Option<Changing>,
    #[serde(flatten)]
    idle: Option<idle::Idle>,
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
    let ckpt_run = args.ckpt_run.clone().map_or_else(release, Ok)?;
    if args.kernel.is_some() {
        return in_machine(&criu, &ckpt_run, args);
    }
    let mut sizes = Vec::new();
    for &resident_gb in args.sizes.iter().filter(|_| !args.idle_only) {
        sizes.push(measure(&criu, &ckpt_run, resident_gb, args)?);
    }
    let processes = (!args.idle_only && args.processes > 0.0)
        .then(|| measure_processes(&criu, &ckpt_run, args))
        .transpose()?;
    let changed = (!args.idle_only && args.changed > 0.0)
        .then(|| measure_changed(&criu, &ckpt_run, args))
        .transpose()?;
    let changing = (args.changing > 0.0).then(|| measure_changing(&criu, &ckpt_run, args)).transpose()?;
    let idle = || {
        eprintln!("bench: idle overhead");
        idle::measure(&criu, &ckpt_run)
    };
    let idle = (!args.no_idle).then(idle).transpose()?;
    let report = Report {
        sizes,
        processes,
        changed,
        changing,
        idle,
        criu: process::capture(Command::new(&criu).arg("--version"))?.trim().to_owned(),
        kernel: process::capture(Command::new("uname").arg("-r"))?.trim().to_owned(),
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
    };
    tell(&report, args.json.as_deref())
}

/// Measures the process that changes memory all the time in a virtual machine.
fn in_machine(criu: &Path, ckpt_run: &Path, args: &HostArgs) -> Result<ExitCode> {
    let gb = if args.changing > 0.0 { args.changing } else { MACHINE_GB };
    // The process, its copies, and what else the machine needs.
    let mib = (bytes(gb) >> 20) * 4 + 2048;
    let result = tempfile::NamedTempFile::new()?;
    let mut command = workspace::cargo();
    command.args(["run", "--quiet", "-p", "ckpt-run-tests", "--bin", "in-machine", "--"]);
    command.arg(mib.to_string()).arg(result.path()).arg(std::env::current_exe()?);
    command.args(["bench", "host", "--idle-only", "--no-idle", "--changing", &gb.to_string()]);
    command.args(["--rounds", &args.rounds.to_string(), "--most-rounds", &args.most_rounds.to_string()]);
    command.arg("--ckpt-run").arg(ckpt_run).args(["--json", "result"]);
    command.env(tools::machine::VARIABLE, tools::machine::set_up()?).env("CKPT_CRIU", criu);
    let status = command.status().context("starting the virtual machine")?;
    ensure!(status.success(), "the benchmark in the virtual machine has failed");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(result.path())?)?;
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

/// Rounds until the ratios of each kind are close together, or there are as many as may be.
fn rounds<T>(
    args: &HostArgs,
    what: &str,
    ratios: &[fn(&T) -> f64],
    mut one: impl FnMut(bool) -> Result<T>,
) -> Result<Vec<T>> {
    let mut measured = Vec::new();
    // The first round is not counted: it finds caches cold for whoever comes first.
    for round in 0..=args.rounds.max(args.most_rounds) {
        let is_enough = |ratio: &fn(&T) -> f64| Ratio::of(measured.iter().map(ratio).collect()).is_reliable;
        if round > args.rounds && ratios.iter().all(is_enough) {
            break;
        }
        eprintln!("bench: {what}, round {round}");
        // Who is first takes turns.
        let result = one(round % 2 == 0)?;
        if round > 0 {
            measured.push(result);
        }
    }
    Ok(measured)
}

fn measure(criu: &Path, ckpt_run: &Path, resident_gb: f64, args: &HostArgs) -> Result<Size> {
    let stall_ratio = |round: &Round| round.stall_s / round.criu_alone_s;
    let restore_ratio = |round: &Round| round.restore_s / round.criu_restore_s;
    let measured = rounds(args, &format!("{resident_gb} GB"), &[stall_ratio, restore_ratio], |ours_first| {
        one_round(criu, ckpt_run, bytes(resident_gb), ours_first)
    })?;
    let median = |pick: fn(&Round) -> f64| median(measured.iter().map(pick).collect());
    Ok(Size {
        resident_gb,
        stall_s: median(|round| round.stall_s),
        criu_alone_s: median(|round| round.criu_alone_s),
        stall_ratio: Ratio::of(measured.iter().map(stall_ratio).collect()),
        durable_s: median(|round| round.durable_s),
        restore_s: median(|round| round.restore_s),
        criu_restore_s: median(|round| round.criu_restore_s),
        restore_ratio: Ratio::of(measured.iter().map(restore_ratio).collect()),
        rounds: measured,
    })
}

fn measure_processes(criu: &Path, ckpt_run: &Path, args: &HostArgs) -> Result<Processes> {
    let stall_s = |processes| -> Result<f64> {
        let sandbox = Sandbox::new(criu, ckpt_run, bytes(args.processes), processes)?;
        let mut job = sandbox.start()?;
        let (stall_s, _) = job.checkpoint()?;
        job.kill()?;
        Ok(stall_s)
    };
    let ratio = |[one_s, eight_s]: &[f64; 2]| eight_s / one_s;
    let what = format!("{} GB in one process and in 8", args.processes);
    let measured = rounds(args, &what, &[ratio], |one_first| {
        let first_s = stall_s(if one_first { 1 } else { 8 })?;
        let second_s = stall_s(if one_first { 8 } else { 1 })?;
        Ok(if one_first { [first_s, second_s] } else { [second_s, first_s] })
    })?;
    Ok(Processes {
        resident_gb: args.processes,
        stall_one_s: median(measured.iter().map(|[one_s, _]| *one_s).collect()),
        stall_8_s: median(measured.iter().map(|[_, eight_s]| *eight_s).collect()),
        stall_8_processes_ratio: Ratio::of(measured.iter().map(ratio).collect()),
        rounds: measured,
    })
}

fn measure_changed(criu: &Path, ckpt_run: &Path, args: &HostArgs) -> Result<Changed> {
    let ratios: [fn(&ChangedRound) -> f64; 3] = [
        |round| round.dense.0 / round.all.0,
        |round| round.scattered.0 / round.all.0,
        |round| round.dense.1 / round.all.1,
    ];
    let what = format!("{} GB, of which a twentieth is changed", args.changed);
    let measured = rounds(args, &what, &ratios, |_| {
        let sandbox = Sandbox::new(criu, ckpt_run, bytes(args.changed), 1)?;
        let mut job = sandbox.start()?;
        job.checkpoint()?;
        let mut after = |what: &str| {
            job.change(what)?;
            job.checkpoint()
        };
        let round =
            ChangedRound { all: after("all")?, dense: after("dense")?, scattered: after("scattered")? };
        job.kill()?;
        Ok(round)
    })?;
    let of = |pick: fn(&ChangedRound) -> f64| measured.iter().map(pick).collect::<Vec<_>>();
    let [dense, scattered, durable] = ratios.map(|ratio| Ratio::of(of(ratio)));
    Ok(Changed {
        resident_gb: args.changed,
        stall_all_s: median(of(|round| round.all.0)),
        stall_changed5_dense_ratio: dense,
        stall_changed5_scattered_ratio: scattered,
        durable_all_s: median(of(|round| round.all.1)),
        durable_changed5_ratio: durable,
        rounds: measured,
    })
}

fn measure_changing(criu: &Path, ckpt_run: &Path, args: &HostArgs) -> Result<Changing> {
    let pauses = |precopy, what: &str| -> Result<(f64, f64)> {
        let sandbox = Sandbox::new(criu, ckpt_run, bytes(args.changing), 1)?.with_precopy(precopy);
        let mut job = sandbox.start()?;
        job.rewrite(what)?;
        job.pauses()?;
        let pauses = job.pauses()?;
        job.kill()?;
        eprintln!("bench: --precopy {precopy}, {what}: {:.2} s, {:.2} s together", pauses.0, pauses.1);
        Ok(pauses)
    };
    let ratios: [fn(&ChangingRound) -> f64; 4] = [
        |round| round.dense.0 / round.plain.0,
        |round| round.scattered.0 / round.plain.0,
        |round| round.dense.1 / round.plain.1,
        |round| round.scattered.1 / round.plain.1,
    ];
    let what = format!("{} GB, of which a twentieth is changed all the time", args.changing);
    let measured = rounds(args, &what, &ratios, |_| {
        Ok(ChangingRound {
            plain: pauses("off", "scattered")?,
            dense: pauses("1", "dense")?,
            scattered: pauses("1", "scattered")?,
        })
    })?;
    let of = |pick: fn(&ChangingRound) -> f64| measured.iter().map(pick).collect::<Vec<_>>();
    let [longest_dense, longest_scattered, dense, scattered] = ratios.map(|ratio| Ratio::of(of(ratio)));
    Ok(Changing {
        resident_gb: args.changing,
        stall_plain_s: median(of(|round| round.plain.1)),
        longest_changing5_dense_ratio: longest_dense,
        longest_changing5_scattered_ratio: longest_scattered,
        stall_changing5_dense_ratio: dense,
        stall_changing5_scattered_ratio: scattered,
        rounds: measured,
    })
}

fn bytes(gb: f64) -> u64 {
    (gb * 1e9) as u64
}

fn one_round(criu: &Path, ckpt_run: &Path, bytes: u64, ours_first: bool) -> Result<Round> {
    let sandbox = Sandbox::new(criu, ckpt_run, bytes, 1)?;
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
