//! Trains a small network on the GPU and prints each step's loss. It knows nothing of checkpoints.
//!
//! The loss is printed with all its bits, so that two runs can be compared exactly. The device computes
//! everything, the batches included; the host only counts steps. With several ranks, each trains on batches of its own,
//! and NCCL takes the mean of their gradients.

mod network;
mod ranks;

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use cudarc::driver::CudaContext;

use network::{Network, Shape};
use ranks::Ranks;

/// Train a small network on the GPU.
#[derive(Parser)]
struct Args {
    /// Number of steps
    #[arg(long, default_value_t = 100)]
    steps: u32,
    /// Rows of a batch
    #[arg(long, default_value_t = 64)]
    batch: u32,
    /// Neurons of the hidden layer
    #[arg(long, default_value_t = 64)]
    hidden: u32,
    /// The device to train on; with several ranks, each has its own
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Number of processes that train together, with NCCL. Started by torchrun, each finds its place in the environment;
    /// otherwise the first one starts the others
    #[arg(long, default_value_t = 1)]
    ranks: usize,
    /// Rest after each step, in milliseconds
    #[arg(long, default_value_t = 0)]
    rest_ms: u64,
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.batch > 0 && args.hidden > 0, "--batch and --hidden must not be 0");
    ensure!(args.ranks > 0, "--ranks must not be 0");
    // Before the driver is initialised: rank 0 starts processes.
    let mut ranks = if args.ranks > 1 { Some(Ranks::find(args.ranks)?) } else { None };
    let device = ranks.as_ref().map_or(Ok(args.device), Ranks::device)?;
    let context = CudaContext::new(device).with_context(|| format!("opening device {device}"))?;
    let shape = Shape { batch: args.batch, inputs: 32, hidden: args.hidden, classes: 10 };
    let mut network = Network::new(&context, shape).context("setting the network up")?;
    let rank = ranks.as_ref().map_or(0, |ranks| ranks.rank);
    if let Some(ranks) = &mut ranks {
        network.join(ranks)?;
    }
    let mut out = std::io::stdout().lock();
    for step in 1..=args.steps {
        let loss = network.step(step).with_context(|| format!("step {step}"))?;
        if rank == 0 {
            writeln!(out, "step {step} loss {loss:.6} bits {:08x}", loss.to_bits())?;
            out.flush()?;
        }
        std::thread::sleep(Duration::from_millis(args.rest_ms));
    }
    drop(network);
    if let Some(ranks) = ranks {
        ranks.finish();
    }
    Ok(())
}
