//! Blocks, and the unit of them that one thread of the host runs.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Kernel;
use super::barrier::{Barriers, ClusterBarrier};
use super::warp::{Outcome, Warp};
use crate::error::Fault;
use crate::memory::WindowCache;

/// How long a unit sleeps when none of its warps can continue. The kernel hangs then, as it would on a device; what is
/// left to do is to see whether it is cancelled.
const HUNG_POLL: Duration = Duration::from_millis(1);
/// How long a unit sleeps when all of its warps wait for memory and say so (`nanosleep`). Without it, kernels that wait for
/// each other take the processors from what they wait for. It doubles up to the longest one.
const PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
/// How often it gives way before it sleeps.
const YIELDS: u32 = 8;

/// A block, without its warps.
pub(super) struct BlockState {
    pub(super) index: [u32; 3],
    /// Rank in its cluster.
    pub(super) rank: u32,
    pub(super) barriers: Barriers,
}

struct Block {
    state: BlockState,
    warps: Vec<Warp>,
}

/// A cluster: its blocks, their shared memory, the barrier that they share.
struct Cluster {
    blocks: Vec<Block>,
    shared: Vec<Vec<u8>>,
    barrier: ClusterBarrier,
    done: bool,
}

/// The clusters that one thread runs at a time.
pub(super) struct Unit {
    clusters: Vec<Cluster>,
}

/// What a warp reaches while it runs.
pub(super) struct Env<'e> {
    pub(super) kernel: &'e Kernel<'e>,
    pub(super) windows: &'e mut WindowCache,
    pub(super) block: &'e mut BlockState,
    /// Shared memory of the cluster's blocks, by rank.
    pub(super) shared: &'e mut [Vec<u8>],
    pub(super) cluster: &'e mut ClusterBarrier,
}

/// What came of a turn of all warps.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
    None,
    /// Those that ran did so until they paused.
    Polled,
    Some,
}

impl Cluster {
    fn new(kernel: &Kernel<'_>, number: u64) -> Cluster {
        let size = kernel.cluster_size();
        let mut cluster = Cluster {
            blocks: (0..size).map(|rank| Block::new(kernel, rank)).collect(),
            shared: (0..size).map(|_| Vec::new()).collect(),
            barrier: ClusterBarrier::default(),
            done: false,
        };
        cluster.start(kernel, number);
        cluster
    }

    fn start(&mut self, kernel: &Kernel<'_>, number: u64) {
        for (rank, block) in self.blocks.iter_mut().enumerate() {
            block.state.index = kernel.block_index(number, rank as u32);
            block.state.barriers.start(kernel.threads);
            for warp in &mut block.warps {
                warp.start(kernel);
            }
        }
        for shared in &mut self.shared {
            shared.clear();
            shared.resize(kernel.shared_bytes as usize, 0);
        }
        self.barrier = ClusterBarrier::new(kernel.threads * kernel.cluster_size());
        self.done = false;
    }

    /// Gives each warp one time slice.
    fn turn(&mut self, kernel: &Kernel<'_>, windows: &mut WindowCache) -> Result<Progress, Fault> {
        let mut progress = Progress::None;
        let mut done = true;
        for block in &mut self.blocks {
            for warp in &mut block.warps {
                if warp.is_done() {
                    continue;
                }
                let mut env = Env {
                    kernel,
                    windows,
                    block: &mut block.state,
                    shared: &mut self.shared,
                    cluster: &mut self.barrier,
                };
                match warp.run(&mut env)? {
                    Outcome::Done => progress = Progress::Some,
                    Outcome::Waiting { ran } => {
                        done = false;
                        progress = progress.max(if ran { Progress::Some } else { Progress::None });
                    }
                    Outcome::SliceUsed => {
                        done = false;
                        progress = Progress::Some;
                        kernel.check_stop()?;
                    }
                    Outcome::Yielded => {
                        done = false;
                        progress = progress.max(Progress::Polled);
                        kernel.check_stop()?;
                    }
                }
            }
        }
        self.done = done;
        Ok(progress)
    }
}

impl Block {
    fn new(kernel: &Kernel<'_>, rank: u32) -> Block {
        let state = BlockState { index: [0; 3], rank, barriers: Barriers::new(kernel.warps) };
        Block { state, warps: (0..kernel.warps).map(|index| Warp::new(kernel, index as u32)).collect() }
    }
}

impl Unit {
    pub(super) fn new(kernel: &Kernel<'_>, clusters: impl Iterator<Item = u64>) -> Unit {
        Unit { clusters: clusters.map(|number| Cluster::new(kernel, number)).collect() }
    }

    /// Makes the one cluster of this unit another one, which saves allocating its registers anew.
    pub(super) fn reuse(&mut self, kernel: &Kernel<'_>, number: u64) {
        for cluster in &mut self.clusters {
            cluster.start(kernel, number);
        }
    }

    pub(super) fn run(&mut self, kernel: &Kernel<'_>, windows: &mut WindowCache) -> Result<(), Fault> {
        let (mut polled, mut pause) = (0, PAUSE);
        loop {
            let mut progress = Progress::None;
            let mut done = true;
            for cluster in self.clusters.iter_mut().filter(|cluster| !cluster.done) {
                progress = progress.max(cluster.turn(kernel, windows)?);
                done &= cluster.done;
            }
            if done || kernel.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            kernel.check_stop()?;
            match progress {
                Progress::None => std::thread::sleep(HUNG_POLL),
                Progress::Polled if polled < YIELDS => {
                    polled += 1;
                    std::thread::yield_now();
                }
                Progress::Polled => {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Progress::Some => (polled, pause) = (0, PAUSE),
            }
        }
    }
}

impl Kernel<'_> {
    fn check_stop(&self) -> Result<(), Fault> {
        if self.memory.cancelled() { Err(Fault::Cancelled) } else { Ok(()) }
    }
}
