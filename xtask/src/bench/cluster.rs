//! What the protocol between the launchers of a job on several nodes costs by itself: up to 1,024 of them in one process, with
//! real messages over loopback, and parts that are captured, stored and restored in no time.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::{process, workspace};

/// Options of `cargo xtask bench cluster`.
#[derive(clap::Args)]
pub struct Args {
    /// Numbers of nodes
    #[arg(long, value_delimiter = ',', default_values_t = [4, 64, 1024], value_parser = clap::value_parser!(u32).range(2..=1024))]
    nodes: Vec<u32>,
    /// Rounds for each; the medians are told
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Also write the JSON to this file
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// One number of nodes. Times are seconds, medians over the rounds.
#[derive(Serialize, Deserialize)]
struct Costs {
    nodes: u32,
    /// From the start of all launchers to the moment when all parts run; once.
    start_s: f64,
    /// From the moment when the first node is told to bring its ranks, of which each has eight, to a cut to that when all ranks
    /// of all nodes are there.
    quiesce_s: f64,
    /// From the moment when the first part is frozen to that when the last one is released.
    cut_overhead_s: f64,
    /// From the request of a snapshot to its commit, as all nodes know it.
    snapshot_s: f64,
    /// From the death of a launcher, through the end of all, to the moment when all parts run again.
    recovery_s: f64,
}

/// What was measured.
#[derive(Serialize)]
pub struct Report {
    cluster: Vec<Costs>,
    cpus: usize,
    kernel: String,
}

/// The measurement: a test of the launcher's, since nobody else sees its insides.
const MEASUREMENT: &str = "cluster::host::measure::costs_by_number_of_nodes";

/// Builds and measures.
///
/// # Errors
/// A build or a measurement that fails.
pub fn measure(args: &Args) -> Result<Report> {
    let mut cluster = Vec::new();
    for nodes in &args.nodes {
        eprintln!("bench: {nodes} nodes");
        cluster.push(of(*nodes, args.rounds)?);
    }
    Ok(Report {
        cluster,
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        kernel: process::capture(Command::new("uname").arg("-r"))?.trim().to_owned(),
    })
}

/// In a process of its own: nothing is left of the launchers before.
fn of(nodes: u32, rounds: usize) -> Result<Costs> {
    let mut test = workspace::cargo();
    test.args(["test", "--release", "--quiet", "-p", "ckpt-run", "--bin", "ckpt-run", "--"]);
    test.args(["--exact", MEASUREMENT, "--ignored", "--nocapture"]);
    test.env("CKPT_BENCH_NODES", nodes.to_string()).env("CKPT_BENCH_ROUNDS", rounds.to_string());
    let text = process::capture(&mut test)?;
    let line = text.lines().find(|line| line.starts_with('{'));
    serde_json::from_str(line.with_context(|| format!("{MEASUREMENT} measured nothing: {text}"))?)
        .with_context(|| format!("{MEASUREMENT} printed {text:?}"))
}
