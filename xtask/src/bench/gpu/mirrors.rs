//! How long a checkpoint pauses a job, by what ckpt-run keeps of its device memory in host memory (`--mirror`).

use anyhow::Result;
use serde::Serialize;

use super::Bench;
use super::job::{Job, Way, What};
use crate::bench::median;

const MODES: [&str; 3] = ["all", "changed", "none"];
const PERCENTS: [u32; 3] = [0, 5, 100];
const ROUNDS: usize = 9;
const ALLOCATION_BYTES: usize = 4 << 20;

/// What was measured: one process, whose memory is noise, with `CKPT_CAPTURE=changed`.
#[derive(Serialize)]
pub struct Pauses {
    mib: usize,
    rounds: usize,
    /// The machine's load over the last minute, at each round.
    load: Vec<f64>,
    pauses: Vec<Pause>,
}

/// Seconds, over the rounds.
#[derive(Serialize)]
struct Pause {
    mirror: &'static str,
    changed_percent: u32,
    median_s: f64,
    least_s: f64,
    most_s: f64,
    /// Median pause / median pause with `all`.
    ratio: f64,
}

/// Measures. There is a job for each mode; they take turns, and the order changes with each round.
///
/// # Errors
/// A job or a checkpoint that fails.
pub fn measure(bench: &Bench, mib: usize) -> Result<Pauses> {
    let start = |mode| -> Result<Job<'_>> {
        let allocations = ((mib << 20) / ALLOCATION_BYTES).max(1);
        let mirror = Some(mode);
        let what = What { processes: 1, bytes: mib << 20, allocations, way: Way::Changed, mirror };
        let job = Job::start(bench, what)?;
        // The first checkpoint finds everything changed, and the second one has no copy of it yet.
        job.checkpoint()?;
        job.checkpoint()?;
        Ok(job)
    };
    let mut jobs = Vec::new();
    for mode in MODES {
        jobs.push(start(mode)?);
    }
    let (mut load, mut pauses) = (Vec::new(), Vec::new());
    for percent in PERCENTS {
        let mut seconds = [const { Vec::new() }; MODES.len()];
        for round in 0..ROUNDS {
            eprintln!("bench: pauses with {percent} % changed, round {}", round + 1);
            load.push(load_of_last_minute()?);
            for turn in 0..MODES.len() {
                let mode = (turn + round) % MODES.len();
                jobs[mode].change(percent)?;
                seconds[mode].push(jobs[mode].checkpoint()?.stall_s);
            }
        }
        let of_all = median(seconds[0].clone());
        pauses.extend(MODES.into_iter().zip(seconds).map(|(mirror, seconds)| Pause {
            mirror,
            changed_percent: percent,
            least_s: seconds.iter().copied().fold(f64::INFINITY, f64::min),
            most_s: seconds.iter().copied().fold(0.0, f64::max),
            ratio: median(seconds.clone()) / of_all,
            median_s: median(seconds),
        }));
    }
    Ok(Pauses { mib, rounds: ROUNDS, load, pauses })
}

fn load_of_last_minute() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/loadavg")?;
    Ok(text.split(' ').next().unwrap_or_default().parse()?)
}
