//! What many allocations and many processes cost.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use super::Bench;
use super::job::{Job, Stall, Way, What};
use crate::process;

const SMALL: [usize; 4] = [1, 1_000, 10_000, 100_000];
/// Of 2 MiB each.
const LARGE: [usize; 3] = [1, 100, 1_000];
const CALL_ROUNDS: usize = 5;
/// With the same memory in all: 128 MiB, so that 64 allocations are the most that are each a piece of its own.
const ALLOCATIONS: [usize; 5] = [1, 64, 1_000, 10_000, 100_000];
const BYTES: usize = 128 << 20;
const PROCESSES: [usize; 5] = [1, 2, 4, 8, 16];
const PROCESS_BYTES: usize = 16 << 20;
const PROCESS_ALLOCATIONS: usize = 16;
const STALL_ROUNDS: usize = 5;

/// What was measured.
#[derive(Serialize)]
pub struct AllocScaling {
    /// Replacing an allocation of 1 byte to 64 KiB, with so many live ones.
    small: Vec<OfLive>,
    /// The same of 2 MiB.
    large: Vec<OfLive>,
    /// Bytes of the device that the most live small allocations take, interposed / plain, less one. Both beyond what
    /// a single one takes.
    memory_overhead: f64,
    /// The stall by the number of allocations that the same memory is in. Everything is copied.
    stall_by_allocations: Vec<OfMany>,
    /// The stall by the number of processes that have so much each. Everything is copied.
    stall_by_processes: Vec<OfMany>,
}

/// Time of one cuMemFree and one cuMemAlloc.
#[derive(Serialize)]
struct OfLive {
    live: usize,
    plain_ns: f64,
    interposed_ns: f64,
    ratio: f64,
    /// Interposed, beside what it takes with the fewest: linear growth of the whole is 1.
    growth: f64,
}

#[derive(Serialize)]
struct OfMany {
    count: usize,
    /// Stall / stall with one.
    growth: f64,
    /// The same beside what it would be if it were proportional to the count: linear is 1, better is less.
    beside_linear: f64,
    #[serde(flatten)]
    stall: Stall,
}

/// Measures.
///
/// # Errors
/// A program or a checkpoint that fails.
pub fn measure(bench: &Bench) -> Result<AllocScaling> {
    let small = calls(bench, "small", &SMALL)?;
    let large = calls(bench, "large", &LARGE)?;
    let memory_overhead = taken_bytes(bench, true)? / taken_bytes(bench, false)? - 1.0;
    let of_allocations =
        |allocations| What { processes: 1, bytes: BYTES, allocations, way: Way::All, mirror: None };
    let of_processes = |processes| What {
        processes,
        bytes: PROCESS_BYTES,
        allocations: PROCESS_ALLOCATIONS,
        way: Way::All,
        mirror: None,
    };
    Ok(AllocScaling {
        small,
        large,
        memory_overhead,
        stall_by_allocations: stalls(bench, "allocations", &ALLOCATIONS, of_allocations)?,
        stall_by_processes: stalls(bench, "processes", &PROCESSES, of_processes)?,
    })
}

fn calls(bench: &Bench, kind: &str, counts: &[usize]) -> Result<Vec<OfLive>> {
    let mut measured: Vec<OfLive> = Vec::new();
    for &live in counts {
        eprintln!("bench: {live} {kind} allocations");
        let count = live.to_string();
        let timed = |preload| bench.timed(&bench.driver, &["allocations", kind, &count], preload);
        let (plain_ns, interposed_ns) = bench.in_turns(CALL_ROUNDS, timed)?;
        let ratio = interposed_ns / plain_ns;
        let growth = interposed_ns / measured.first().map_or(interposed_ns, |first| first.interposed_ns);
        measured.push(OfLive { live, plain_ns, interposed_ns, ratio, growth });
    }
    Ok(measured)
}

/// How much more of the device the most small allocations take than one.
fn taken_bytes(bench: &Bench, preload: bool) -> Result<f64> {
    let used = |live: usize| -> Result<f64> {
        let live = live.to_string();
        let mut command = bench.command(&bench.driver, &["allocations", "small", &live], preload);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("no pipe")?).read_line(&mut line)?;
        // Asked by another program, which nobody tells anything but what is.
        let used = bench.timed(&bench.driver, &["allocations", "used"], false);
        drop(child.stdin.take());
        let status = child.wait()?;
        ensure!(status.success(), "{} failed ({status})", process::describe(&command));
        used
    };
    let most = SMALL.into_iter().max().unwrap_or(1);
    Ok(used(most)? - used(1)?)
}

fn stalls(bench: &Bench, kind: &str, counts: &[usize], what: impl Fn(usize) -> What) -> Result<Vec<OfMany>> {
    let mut measured: Vec<OfMany> = Vec::new();
    for &count in counts {
        eprintln!("bench: stall of a job with {count} {kind}");
        let mut job = Job::start(bench, what(count))?;
        job.checkpoint()?;
        let stall = job.shortest_stall(100, STALL_ROUNDS)?;
        let growth = stall.stall_s / measured.first().map_or(stall.stall_s, |first| first.stall.stall_s);
        measured.push(OfMany { count, growth, beside_linear: growth / count as f64, stall });
    }
    Ok(measured)
}
