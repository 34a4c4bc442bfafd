//! Execution: a launch, and how its blocks are spread over threads of the host.
//!
//! A thread takes one cluster of blocks at a time (one block, where there are no clusters) and runs its warps in
//! turn, each until it waits or has used up its time slice. In a cooperative launch every thread holds its share of
//! all blocks from the start, so that blocks can wait for each other.

mod access;
mod barrier;
mod block;
mod call;
mod mbarrier;
mod multimem;
mod print;
mod special;
mod step;
mod together;
mod wait;
mod warp;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use crate::error::Fault;
use crate::memory::{Memory, WindowCache};
use crate::module::{Function, Image, Module};
use block::Unit;

/// Threads per block that any device has (CUDA programming guide, "Technical Specifications").
const MAX_THREADS: u64 = 1024;

/// One launch of a kernel.
pub struct Launch<'a> {
    /// The module and the addresses of its variables.
    pub image: &'a Image,
    /// Name of the kernel.
    pub function: &'a str,
    /// Number of blocks in each dimension.
    pub grid: [u32; 3],
    /// Number of threads of a block in each dimension.
    pub block: [u32; 3],
    /// Size of dynamic shared memory.
    pub dynamic_shared_bytes: u32,
    /// The parameters, laid out by [`crate::Param::offset`].
    pub params: &'a [u8],
    /// Whether all blocks are to be there at once.
    pub cooperative: bool,
    /// Number of blocks of a cluster in each dimension; `[1, 1, 1]` if there are no clusters.
    pub cluster: [u32; 3],
    /// Shared memory that a block may have, static and dynamic.
    pub max_shared_bytes: u32,
}

/// What all blocks of a launch share.
struct Kernel<'a> {
    module: &'a Module,
    image: &'a Image,
    function: &'a Function,
    grid: [u32; 3],
    block: [u32; 3],
    cluster: [u32; 3],
    /// Threads of a block.
    threads: u32,
    warps: usize,
    params: &'a [u8],
    dynamic_shared_bytes: u32,
    shared_bytes: u32,
    grid_id: u64,
    start: Instant,
    memory: &'a dyn Memory,
    /// Set when the launch is to end early.
    stop: AtomicBool,
    fault: Mutex<Option<Fault>>,
}

static NEXT_GRID_ID: AtomicU64 = AtomicU64::new(1);

impl Launch<'_> {
    /// Runs the kernel to its end on up to `workers` threads, the calling one among them.
    ///
    /// # Errors
    /// The first fault that a thread of the kernel ran into. Other blocks may have run on, or never have started.
    pub fn run(&self, memory: &dyn Memory, workers: usize) -> Result<(), Fault> {
        let kernel = self.kernel(memory)?;
        let clusters = (0..3).map(|i| u64::from(self.grid[i] / self.cluster[i])).product::<u64>();
        let workers = u64::try_from(workers).unwrap_or(u64::MAX).clamp(1, clusters);
        let next = AtomicU64::new(0);
        let work = |worker: u64| {
            let mut windows = WindowCache::default();
            let result = if self.cooperative {
                let all = (worker..clusters).step_by(workers as usize);
                Unit::new(&kernel, all).run(&kernel, &mut windows)
            } else {
                run_in_order(&kernel, &mut windows, &next, clusters)
            };
            if let Err(fault) = result {
                kernel.fail(fault);
            }
        };
        if workers == 1 {
            work(0);
        } else {
            std::thread::scope(|scope| {
                for worker in 1..workers {
                    let work = &work;
                    scope.spawn(move || work(worker));
                }
                work(0);
            });
        }
        match kernel.fault.into_inner() {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    fn kernel<'k>(&'k self, memory: &'k dyn Memory) -> Result<Kernel<'k>, Fault> {
        let module: &Module = self.image.module();
        let function =
            module.function(self.function).ok_or_else(|| Fault::NoSuchFunction(self.function.to_owned()))?;
        let product = |dimensions: [u32; 3]| dimensions.iter().map(|d| u64::from(*d)).product::<u64>();
        let threads = product(self.block);
        if product(self.grid) == 0 || threads == 0 || product(self.cluster) == 0 {
            return Err(Fault::InvalidLaunch("a dimension is zero".into()));
        }
        if (0..3).any(|i| !self.grid[i].is_multiple_of(self.cluster[i])) {
            return Err(Fault::InvalidLaunch("the grid is no multiple of the cluster".into()));
        }
        if self.params.len() < function.param_bytes {
            let message = format!("{} bytes of parameters, not {}", self.params.len(), function.param_bytes);
            return Err(Fault::InvalidLaunch(message));
        }
        if function.required_threads.is_some_and(|required| required != self.block) {
            return Err(Fault::InvalidLaunch("the kernel requires another block size (.reqntid)".into()));
        }
        if function.required_cluster.is_some_and(|required| required != self.cluster) {
            return Err(Fault::InvalidLaunch(
                "the kernel requires another cluster (.reqnctapercluster)".into(),
            ));
        }
        let most = function.max_threads.map_or(MAX_THREADS, u64::from);
        if threads > most.min(MAX_THREADS) {
            return Err(Fault::LaunchOutOfResources(format!("{threads} threads per block, at most {most}")));
        }
        let shared_bytes = u64::from(function.static_shared_bytes) + u64::from(self.dynamic_shared_bytes);
        if shared_bytes > u64::from(self.max_shared_bytes) {
            let most = self.max_shared_bytes;
            return Err(Fault::LaunchOutOfResources(format!("{shared_bytes} bytes shared, at most {most}")));
        }
        Ok(Kernel {
            module,
            image: self.image,
            function,
            grid: self.grid,
            block: self.block,
            cluster: self.cluster,
            threads: threads as u32,
            warps: threads.div_ceil(32) as usize,
            params: self.params,
            dynamic_shared_bytes: self.dynamic_shared_bytes,
            shared_bytes: shared_bytes as u32,
            grid_id: NEXT_GRID_ID.fetch_add(1, Ordering::Relaxed),
            start: Instant::now(),
            memory,
            stop: AtomicBool::new(false),
            fault: Mutex::new(None),
        })
    }
}

/// Takes clusters of blocks until there are no more.
fn run_in_order(
    kernel: &Kernel<'_>,
    windows: &mut WindowCache,
    next: &AtomicU64,
    clusters: u64,
) -> Result<(), Fault> {
    let mut unit: Option<Unit> = None;
    loop {
        let cluster = next.fetch_add(1, Ordering::Relaxed);
        if cluster >= clusters || kernel.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        match &mut unit {
            Some(unit) => unit.reuse(kernel, cluster),
            None => unit = Some(Unit::new(kernel, std::iter::once(cluster))),
        }
        if let Some(unit) = &mut unit {
            unit.run(kernel, windows)?;
        }
    }
}

impl Kernel<'_> {
    /// Keeps the first fault and makes everything stop.
    fn fail(&self, fault: Fault) {
        self.fault.lock().get_or_insert(fault);
        self.stop.store(true, Ordering::Relaxed);
    }

    fn cluster_size(&self) -> u32 {
        self.cluster.iter().product()
    }

    /// Index in the grid of the block with rank `rank` in cluster number `cluster`.
    fn block_index(&self, cluster: u64, rank: u32) -> [u32; 3] {
        let mut cluster = cluster;
        let mut rank = rank;
        std::array::from_fn(|i| {
            let clusters = u64::from(self.grid[i] / self.cluster[i]);
            let index = (cluster % clusters) as u32 * self.cluster[i] + rank % self.cluster[i];
            cluster /= clusters;
            rank /= self.cluster[i];
            index
        })
    }
}
