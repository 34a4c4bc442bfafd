//! How long a checkpoint stalls a job, by how much of its device memory has changed since the one before.

use anyhow::Result;
use serde::Serialize;

use super::Bench;
use super::job::{Job, Stall, Way, What};

const PERCENTS: [u32; 4] = [0, 5, 50, 100];
const ROUNDS: usize = 5;

/// What was measured, with so much memory in one allocation.
#[derive(Serialize)]
pub struct StallByChange {
    mib: usize,
    /// The driver's own way: it does not know what has changed.
    driver: Stall,
    changed: Vec<OfChange>,
    all: Vec<OfChange>,
}

#[derive(Serialize)]
struct OfChange {
    percent: u32,
    /// Stall / stall of the driver's own way.
    ratio: f64,
    #[serde(flatten)]
    stall: Stall,
}

/// Measures.
///
/// # Errors
/// A job or a checkpoint that fails.
pub fn measure(bench: &Bench, mib: usize) -> Result<StallByChange> {
    let job = |way| -> Result<Job<'_>> {
        let job =
            Job::start(bench, What { processes: 1, bytes: mib << 20, allocations: 1, way, mirror: None })?;
        job.checkpoint()?;
        Ok(job)
    };
    eprintln!("bench: stall of a job with {mib} MiB, the driver's own way");
    let driver = job(Way::Driver)?.shortest_stall(100, ROUNDS)?;
    let by_percent = |way, name: &str| -> Result<Vec<OfChange>> {
        let mut job = job(way)?;
        let mut measured = Vec::new();
        for percent in PERCENTS {
            eprintln!("bench: stall of a job with {mib} MiB, {percent} % changed, CKPT_CAPTURE={name}");
            let stall = job.shortest_stall(percent, ROUNDS)?;
            measured.push(OfChange { percent, ratio: stall.stall_s / driver.stall_s, stall });
        }
        Ok(measured)
    };
    Ok(StallByChange {
        mib,
        driver,
        changed: by_percent(Way::Changed, "changed")?,
        all: by_percent(Way::All, "all")?,
    })
}
