//! What the interposer adds to calls of NCCL while no checkpoint is taken, in turns without it and with it, and how long
//! ranks take from the request of a checkpoint to the consistent cut (`docs/design/collectives.md`).
//!
//! Calls go to an NCCL whose functions return at once, launches of graphs to simcuda, and the ranks are of simnccl.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde::Serialize;

use super::gpu::job::Job;
use super::gpu::{Bench, LAUNCH_COUNT, ROUNDS, TIMED_CALLS, succeed};
use crate::{process, tools, workspace};

const HEADER: &str = include_str!("nccl/nccl.h");
const STUB: &str = include_str!("nccl/stub.c");
const COLLECTIVES: &str = include_str!("nccl/collectives.c");
const GRAPHS: &str = include_str!("nccl/graphs.c");
const RANKS: &str = include_str!("nccl/ranks.c");

const LAUNCH_ROUNDS: usize = 40;
/// How many launches a part of `graphs.c` has.
const LAUNCHES_OF_A_PART: f64 = LAUNCH_COUNT as f64 / 40.0;

/// Options of `cargo xtask bench nccl`.
#[derive(clap::Args)]
pub struct Args {
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4, 8], value_parser = clap::value_parser!(u32).range(2..=8))]
    ranks: Vec<u32>,
    /// Checkpoints for each number
    #[arg(long, default_value_t = 20)]
    checkpoints: usize,
    /// Also write the JSON to this file
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// What the interposer adds to a call, or to a group of calls.
#[derive(Serialize)]
struct Counter {
    /// Nanoseconds: the difference of the fastest runs.
    added_ns: f64,
    /// By callgrind.
    added_instructions: Option<f64>,
}

/// A launch of a graph with a kernel and a captured collective.
#[derive(Serialize)]
struct GraphLaunch {
    /// Without the interposer.
    plain_ns: f64,
    added_ns: f64,
    /// Part of the time without it.
    slowdown: f64,
}

/// The way of some ranks to the cut, seconds, over all checkpoints.
#[derive(Serialize)]
struct Latency {
    ranks: u32,
    /// An iteration of the program while no checkpoint is taken, the median.
    iteration_s: f64,
    cut_median_s: f64,
    cut_longest_s: f64,
    /// Two iterations and 50 ms.
    goal_s: f64,
    /// How many of the checkpoints met the goal.
    within_goal: usize,
    checkpoints: usize,
}

/// What was measured.
#[derive(Serialize)]
pub struct Report {
    all_reduce: Counter,
    /// A group of one all-reduce.
    wrapped: Counter,
    /// A group of two all-reduces on two communicators.
    group: Counter,
    /// A group of a send and a receive.
    exchange: Counter,
    graph_launch: GraphLaunch,
    cut: Vec<Latency>,
    /// Why something is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    instructions_missing: Option<&'static str>,
    cpus: usize,
    kernel: String,
}

/// Builds everything and measures.
///
/// # Errors
/// A build or a program that fails.
pub fn measure(args: &Args) -> Result<Report> {
    let criu = tools::criu()?;
    eprintln!("bench: building ckpt-run, the interposer and the simulator (release)");
    let mut build = workspace::cargo();
    build.args(["build", "--release", "--quiet", "-p", "ckpt-run", "-p", "ckpt-interpose", "-p", "simcuda"]);
    succeed(build.args(["-p", "simnccl"]))?;
    let target = workspace::target_dir()?;
    let bench = Bench::new(&target, criu, None)?;
    let captured = set_up(&bench, &target)?;
    let valgrind = process::find_program("valgrind");
    let counter = |kind: &str| counter(&bench, valgrind.as_deref(), kind);
    let (all_reduce, wrapped) = (counter("all-reduce")?, counter("wrapped")?);
    let (group, exchange) = (counter("group")?, counter("exchange")?);
    eprintln!("bench: launches of a graph with a collective");
    let launches = ["graphs", &LAUNCH_COUNT.to_string()];
    let (without_s, with_s) = bench.parts(LAUNCH_ROUNDS, &captured, &launches)?;
    let graph_launch = GraphLaunch {
        plain_ns: without_s / LAUNCHES_OF_A_PART * 1e9,
        added_ns: (with_s - without_s) / LAUNCHES_OF_A_PART * 1e9,
        slowdown: with_s / without_s - 1.0,
    };
    let cut: Result<_> = args.ranks.iter().map(|ranks| latency(&bench, *ranks, args.checkpoints)).collect();
    Ok(Report {
        all_reduce,
        wrapped,
        group,
        exchange,
        graph_launch,
        cut: cut?,
        instructions_missing: valgrind.is_none().then_some("valgrind is not installed"),
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        kernel: process::capture(Command::new("uname").arg("-r"))?.trim().to_owned(),
    })
}

/// Compiles the programs, and puts an NCCL beside each driver. Returns the directory with simcuda and the NCCL whose
/// functions return at once.
fn set_up(bench: &Bench, target: &Path) -> Result<PathBuf> {
    std::fs::write(bench.dir.path().join("nccl.h"), HEADER)?;
    let captured = bench.dir.path().join("captured");
    std::fs::create_dir(&captured)?;
    symlink(target.join("release/libsimcuda.so"), captured.join("libcuda.so.1"))?;
    symlink(target.join("release/libsimnccl.so"), bench.simcuda.join("libnccl.so.2"))?;
    let shared = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"];
    for place in [&bench.stub, &captured] {
        bench.compile("nccl-stub", STUB, &shared, &place.join("libnccl.so.2"))?;
    }
    let programs = [
        ("collectives", COLLECTIVES, &bench.stub),
        ("graphs", GRAPHS, &captured),
        ("ranks", RANKS, &bench.simcuda),
    ];
    for (name, source, libraries) in programs {
        let place = format!("-L{}", libraries.display());
        let options = [place.as_str(), "-l:libnccl.so.2", "-l:libcuda.so.1"];
        bench.compile(name, source, &options, &bench.dir.path().join(name))?;
    }
    Ok(captured)
}

fn counter(bench: &Bench, valgrind: Option<&Path>, kind: &str) -> Result<Counter> {
    eprintln!("bench: {kind}");
    let count = TIMED_CALLS.to_string();
    let timed = |preload| bench.timed(&bench.stub, &["collectives", kind, &count], preload);
    let (without_ns, with_ns) = bench.in_turns(ROUNDS, timed)?;
    let counted = |valgrind| bench.instructions(valgrind, &bench.stub, &["collectives", kind]);
    Ok(Counter { added_ns: with_ns - without_ns, added_instructions: valgrind.map(counted).transpose()? })
}

fn latency(bench: &Bench, ranks: u32, checkpoints: usize) -> Result<Latency> {
    eprintln!("bench: {checkpoints} cuts with {ranks} ranks");
    let devices = tempfile::Builder::new().prefix("simcuda-bench-").tempdir_in("/dev/shm")?;
    let mut program = Command::new(bench.dir.path().join("ranks"));
    program.arg(ranks.to_string()).env("LD_LIBRARY_PATH", &bench.simcuda);
    program.env("SIMCUDA_DIR", devices.path()).env("SIMCUDA_DEVICES", ranks.to_string());
    // A release build does not know which files are the simulated devices, so it does not hold them open.
    program.env("SIMCUDA_PERSISTENCE", "1");
    let mut job = Job::start_program(bench, &program, 1)?;
    let (mut iterations, mut cuts) = (Vec::new(), Vec::new());
    for _ in 0..checkpoints {
        iterations.push(job.ask()?);
        cuts.push(job.cut_s()?);
    }
    let iteration_s = super::median(iterations);
    let goal_s = 2.0 * iteration_s + 0.05;
    let within_goal = cuts.iter().filter(|cut_s| **cut_s <= goal_s).count();
    let longest = cuts.iter().copied().reduce(f64::max).context("no checkpoints")?;
    let cut_median_s = super::median(cuts);
    Ok(Latency { ranks, iteration_s, cut_median_s, cut_longest_s: longest, goal_s, within_goal, checkpoints })
}
