//! Stream-ordered allocation. The address is known at once; the memory behind it is mapped and unmapped in the
//! stream's order, so that an access out of order meets an illegal address.
//!
//! A pool holds chunks of memory, and allocates blocks from them. A block:
//!
//! ```text
//!          cuMemAllocAsync              activate                release
//!   free ------------------> reserved ------------> active ---------------> free
//!                                ^                     |
//!                                +---------------------+
//!                            release, of a graph's block
//! ```
//!
//! A block becomes free, for any stream, only when its release has run: what real drivers can reuse earlier
//! within one stream is not simulated. A block that a capture or a graph's node allocated stays the graph's, and
//! its address counts as allocated, as long as the graph is there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cuda_abi::sys::CUresult;

use super::heap::Heap;
use super::layout::{DeviceRights, Location};
use super::pool_share::Origin;
use super::segment::Segment;
use super::space::{Access, Mapping, PAGE_BYTES, Reserved, Right, Target};
use super::state::{Allocation, AllocationKind, STATE, State};
use crate::error::Result;
use crate::handle;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Some pool may hold more than its threshold.
static TRIM_IS_DUE: AtomicBool = AtomicBool::new(false);

/// All pools of the process.
pub(super) struct Pools {
    by_handle: BTreeMap<usize, Pool>,
    /// Which pool a chunk belongs to, by the chunk's address.
    owners: BTreeMap<u64, usize>,
    defaults: BTreeMap<i32, usize>,
    current: BTreeMap<i32, usize>,
}

/// A pool of one device's memory.
pub(super) struct Pool {
    pub(super) device: i32,
    pub(super) max_size_bytes: u64,
    /// This much of what is free is kept at synchronisations.
    pub(super) release_threshold_bytes: u64,
    /// `CU_MEMPOOL_ATTR_REUSE_…`, which have no effect here.
    pub(super) reuse: [i32; 3],
    pub(super) rights: DeviceRights,
    pub(super) reserved: Gauge,
    pub(super) used: Gauge,
    /// `CU_MEM_HANDLE_TYPE_…` bits.
    pub(super) handle_types: u32,
    /// Another process may have imported it.
    pub(super) is_exported: bool,
    /// Of an imported one: the pool that it stands for.
    pub(super) origin: Option<Origin>,
    is_destroyed: bool,
    heap: Heap,
    chunks: BTreeMap<u64, Chunk>,
    blocks: BTreeMap<u64, PoolBlock>,
    imports: BTreeMap<u64, Import>,
}

/// An allocation of another process's pool.
struct Import {
    /// Where its segment is mapped, and how long that is.
    base: u64,
    len: u64,
    size_bytes: u64,
}

/// A number of bytes and the highest that it has been.
#[derive(Default, Clone, Copy)]
pub(super) struct Gauge {
    pub(super) current_bytes: u64,
    pub(super) high_bytes: u64,
}

impl Gauge {
    fn add(&mut self, bytes: u64) {
        self.current_bytes += bytes;
        self.high_bytes = self.high_bytes.max(self.current_bytes);
    }
}

/// Addresses with memory behind them that is mapped block by block.
pub(super) struct Chunk {
    pub(super) reserved: Reserved,
    pub(super) segment: Arc<Segment>,
}

#[derive(Clone, Copy)]
struct PoolBlock {
    size_bytes: u64,
    holder: Holder,
}

/// What activates and releases a block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holder {
    Program,
    /// A graph's nodes do, at every launch. What the last launch that was submitted leaves is the program's to
    /// free, once.
    Graph {
        is_left: bool,
    },
}

impl Pool {
    fn new(device: i32, max_size_bytes: u64, handle_types: u32) -> Self {
        Self {
            device,
            max_size_bytes,
            release_threshold_bytes: 0,
            reuse: [1; 3],
            rights: DeviceRights::of_device(device),
            reserved: Gauge::default(),
            used: Gauge::default(),
            handle_types,
            is_exported: false,
            origin: None,
            is_destroyed: false,
            heap: Heap::new(),
            chunks: BTreeMap::new(),
            blocks: BTreeMap::new(),
            imports: BTreeMap::new(),
        }
    }

    /// Takes free chunks out while the pool holds more than `keep_bytes`. A pool that can be shared gives nothing back
    /// before its end (programming guide, limitations of IPC pools).
    fn trim(&mut self, keep_bytes: u64) -> Vec<Chunk> {
        let mut removed = Vec::new();
        if self.handle_types != 0 {
            return removed;
        }
        for (start, len) in self.heap.free_chunks() {
            if self.reserved.current_bytes <= keep_bytes {
                break;
            }
            self.heap.remove_chunk(start);
            removed.extend(self.chunks.remove(&start));
            self.reserved.current_bytes -= len;
        }
        removed
    }

    /// Notes an allocation of another process. The gauges count the segment once for each.
    pub(super) fn add_import(&mut self, start: u64, base: u64, len: u64, size_bytes: u64) {
        self.reserved.add(len);
        self.used.add(Heap::rounded(size_bytes));
        self.imports.insert(start, Import { base, len, size_bytes });
    }

    fn forget_import(&mut self, start: u64) {
        if let Some(import) = self.imports.remove(&start) {
            self.reserved.current_bytes -= import.len;
            self.used.current_bytes -= Heap::rounded(import.size_bytes);
        }
    }

    /// The chunk around an address and where in it that lies.
    fn place(&self, address: u64) -> Option<(&Chunk, u64)> {
        let (&start, chunk) = self.chunks.range(..=address).next_back()?;
        (address - start < chunk.reserved.len).then_some((chunk, address - start))
    }
}

impl Pools {
    pub(super) const fn new() -> Self {
        Self {
            by_handle: BTreeMap::new(),
            owners: BTreeMap::new(),
            defaults: BTreeMap::new(),
            current: BTreeMap::new(),
        }
    }

    pub(super) fn create(&mut self, device: i32, max_size_bytes: u64, handle_types: u32) -> usize {
        let handle = handle::fresh();
        self.by_handle.insert(handle, Pool::new(device, max_size_bytes, handle_types));
        handle
    }

    /// A pool that stands for another process's.
    pub(super) fn create_imported(&mut self, device: i32, handle_types: u32, origin: Origin) -> usize {
        let handle = handle::fresh();
        let pool = Pool { origin: Some(origin), ..Pool::new(device, 0, handle_types) };
        self.by_handle.insert(handle, pool);
        handle
    }

    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for an invalid or destroyed handle.
    pub(super) fn get(&mut self, handle: usize) -> Result<&mut Pool> {
        self.by_handle.get_mut(&handle).filter(|pool| !pool.is_destroyed).ok_or(INVALID)
    }

    pub(super) fn default_of(&mut self, device: i32) -> usize {
        if let Some(handle) = self.defaults.get(&device) {
            return *handle;
        }
        let handle = self.create(device, 0, 0);
        self.defaults.insert(device, handle);
        handle
    }

    pub(super) fn current_of(&mut self, device: i32) -> usize {
        self.current.get(&device).copied().unwrap_or_else(|| self.default_of(device))
    }

    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a pool of another device, or of another process (reference,
    /// cuMemPoolImportFromShareableHandle).
    pub(super) fn set_current(&mut self, device: i32, handle: usize) -> Result {
        let pool = self.get(handle)?;
        if pool.device != device || pool.origin.is_some() {
            return Err(INVALID);
        }
        self.current.insert(device, handle);
        Ok(())
    }

    /// The pool is destroyed when its last block is returned; a device that used it returns to its default pool.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a default pool.
    pub(super) fn destroy(&mut self, handle: usize) -> Result<Vec<Chunk>> {
        self.get(handle)?;
        if self.defaults.values().any(|default| *default == handle) {
            return Err(INVALID);
        }
        self.get(handle)?.is_destroyed = true;
        self.current.retain(|_, current| *current != handle);
        Ok(self.remove_if_done(handle))
    }

    fn remove_if_done(&mut self, handle: usize) -> Vec<Chunk> {
        let is_done = |pool: &Pool| pool.is_destroyed && pool.blocks.is_empty() && pool.imports.is_empty();
        if !self.by_handle.get(&handle).is_some_and(is_done) {
            return Vec::new();
        }
        let chunks = self.by_handle.remove(&handle).map(|pool| pool.chunks).unwrap_or_default();
        chunks
            .into_iter()
            .map(|(start, chunk)| {
                self.owners.remove(&start);
                chunk
            })
            .collect()
    }

    /// Takes what is free out of a pool while it holds more than `keep_bytes`.
    pub(super) fn trim(&mut self, handle: usize, keep_bytes: u64) -> Result<Vec<Chunk>> {
        let removed = self.get(handle)?.trim(keep_bytes);
        for chunk in &removed {
            self.owners.remove(&chunk.reserved.start);
        }
        Ok(removed)
    }

    fn trim_each(&mut self, keep_bytes: impl Fn(&Pool) -> u64) -> Vec<Chunk> {
        let mut removed = Vec::new();
        for pool in self.by_handle.values_mut() {
            removed.extend(pool.trim(keep_bytes(pool)));
        }
        for chunk in &removed {
            self.owners.remove(&chunk.reserved.start);
        }
        removed
    }

    /// What device `ordinal` may do with the memory of a pool, a destroyed one included.
    pub(super) fn right(&self, handle: usize, ordinal: i32) -> Right {
        self.by_handle.get(&handle).map_or(Right::None, |pool| pool.rights.right(ordinal))
    }

    /// Whether another process shares a pool, or this one another process's.
    pub(super) fn is_any_shared(&self) -> bool {
        self.by_handle.values().any(|pool| pool.is_exported || pool.origin.is_some())
    }

    /// The segment of an allocation, and where in it that is, if the pool was exported.
    pub(super) fn place_for_export(&self, handle: usize, address: u64) -> Option<(&Segment, u64)> {
        let pool = self.by_handle.get(&handle).filter(|pool| pool.is_exported)?;
        pool.place(address).map(|(chunk, offset)| (&*chunk.segment, offset))
    }

    /// An allocation of another process has been freed.
    pub(super) fn forget_import(&mut self, handle: usize, start: u64) {
        if let Some(pool) = self.by_handle.get_mut(&handle) {
            pool.forget_import(start);
        }
        // An imported pool has no chunks.
        let _ = self.remove_if_done(handle);
    }

    pub(super) fn chunks(&self) -> impl Iterator<Item = &Chunk> {
        self.by_handle.values().flat_map(|pool| pool.chunks.values())
    }

    fn owner(&self, address: u64) -> Option<usize> {
        self.owners.range(..=address).next_back().map(|(_, pool)| *pool)
    }

    /// The pool of a block and the block itself.
    fn block(&self, address: u64) -> Option<(usize, &Pool, PoolBlock)> {
        let handle = self.owner(address)?;
        let pool = self.by_handle.get(&handle)?;
        let block = pool.blocks.get(&address)?;
        Some((handle, pool, *block))
    }

    fn block_mut(&mut self, address: u64) -> Option<&mut PoolBlock> {
        let handle = self.owner(address)?;
        self.by_handle.get_mut(&handle)?.blocks.get_mut(&address)
    }

    fn add_chunk(&mut self, handle: usize, len: u64) -> Result {
        let pool = self.get(handle)?;
        if pool.max_size_bytes != 0 && pool.reserved.current_bytes + len > pool.max_size_bytes {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let segment = Segment::create(Location::Device(pool.device), len, pool.handle_types)?;
        let reserved = Reserved::new(len, PAGE_BYTES, 0)?;
        let start = reserved.start;
        pool.heap.add_chunk(start, len);
        pool.reserved.add(len);
        pool.chunks.insert(start, Chunk { reserved, segment });
        self.owners.insert(start, handle);
        Ok(())
    }

    fn take(&mut self, handle: usize, block: PoolBlock) -> Result<u64> {
        let pool = self.get(handle)?;
        if pool.origin.is_some() {
            // Reference, cuMemPoolImportFromShareableHandle.
            return Err(INVALID);
        }
        let mut start = pool.heap.take(block.size_bytes);
        if start.is_none() {
            let len = block.size_bytes.checked_next_multiple_of(PAGE_BYTES);
            self.add_chunk(handle, len.ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?)?;
            start = self.get(handle)?.heap.take(block.size_bytes);
        }
        let start = start.ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let pool = self.get(handle)?;
        pool.used.add(Heap::rounded(block.size_bytes));
        pool.blocks.insert(start, block);
        Ok(start)
    }

    /// Returns a block to the free memory.
    fn give(&mut self, handle: usize, start: u64) -> Vec<Chunk> {
        let Some(pool) = self.by_handle.get_mut(&handle) else { return Vec::new() };
        let Some(block) = pool.blocks.remove(&start) else { return Vec::new() };
        pool.used.current_bytes -= Heap::rounded(block.size_bytes);
        if pool.heap.give(start, block.size_bytes).is_some() {
            TRIM_IS_DUE.store(true, Ordering::Relaxed);
        }
        self.remove_if_done(handle)
    }
}

impl State {
    /// Tries again without what pools hold in store, which is not in use, if memory does not suffice.
    pub(super) fn trimming_pools<T>(&mut self, mut take: impl FnMut(&mut Self) -> Result<T>) -> Result<T> {
        match take(self) {
            Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                let removed = self.pools.trim_each(|_| 0);
                drop(removed);
                take(self)
            }
            result => result,
        }
    }

    /// Reserves a block; it becomes usable by [`pool_activate`].
    pub(super) fn reserve_pool_block(
        &mut self,
        pool: usize,
        size_bytes: u64,
        context: usize,
        is_graphs: bool,
    ) -> Result<u64> {
        let holder = if is_graphs { Holder::Graph { is_left: false } } else { Holder::Program };
        let block = PoolBlock { size_bytes, holder };
        let start = self.trimming_pools(|state| state.pools.take(pool, block))?;
        let device = self.pools.get(pool)?.device;
        self.allocations
            .insert(start, Allocation::new(size_bytes, context, device, AllocationKind::Pool { pool }));
        Ok(start)
    }

    /// The program frees a block: it cannot do so again from now on, whenever the release comes. Gives what
    /// [`Self::untake_pool_block`] undoes it with.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if there is none, or it is a graph's and no launch leaves it allocated.
    pub(super) fn take_pool_block(&mut self, start: u64) -> Result<Option<Allocation>> {
        match &mut self.pools.block_mut(start).ok_or(INVALID)?.holder {
            Holder::Program => self.allocations.remove(&start).map(Some).ok_or(INVALID),
            Holder::Graph { is_left: left @ true } => {
                *left = false;
                Ok(None)
            }
            Holder::Graph { is_left: false } => Err(INVALID),
        }
    }

    pub(super) fn untake_pool_block(&mut self, start: u64, taken: Option<Allocation>) {
        match taken {
            Some(allocation) => drop(self.allocations.insert(start, allocation)),
            None => self.set_graph_left(start, true),
        }
    }

    fn set_graph_left(&mut self, start: u64, left: bool) {
        if let Some(Holder::Graph { is_left }) = self.pools.block_mut(start).map(|block| &mut block.holder) {
            *is_left = left;
        }
    }

    fn activate_pool_block(&mut self, start: u64) -> Result {
        let (_, pool, block) = self.pools.block(start).ok_or(INVALID)?;
        let (chunk, offset) = pool.place(start).ok_or(INVALID)?;
        if self.mappings.contains_key(&start) {
            // A graph that leaves its memory allocated is launched again.
            return Err(INVALID);
        }
        let target = Target::Device { segment: Arc::clone(&chunk.segment), offset };
        let access = Access::Devices(pool.rights);
        let mapping = Mapping { len: Heap::rounded(block.size_bytes), target, access };
        self.mappings.insert(start, mapping);
        Ok(())
    }

    /// Unmaps a block's memory; the block is free then, unless it is a graph's.
    pub(super) fn release_pool_block(&mut self, start: u64) -> Result {
        let (handle, _, block) = self.pools.block(start).ok_or(INVALID)?;
        self.mappings.remove(&start);
        if block.holder == Holder::Program {
            let removed = self.pools.give(handle, start);
            drop(removed);
        }
        Ok(())
    }

    /// Frees a block whose work was never queued.
    pub(super) fn forget_pool_block(&mut self, start: u64) {
        if let Some((handle, ..)) = self.pools.block(start) {
            self.allocations.remove(&start);
            let removed = self.pools.give(handle, start);
            drop(removed);
        }
    }

    /// Frees a graph's block. What a launch left allocated is like any other allocation from now on, and what
    /// the program has freed of that goes at the place of its free.
    fn forget_graphs_pool_block(&mut self, start: u64) {
        if !self.mappings.contains_key(&start) {
            return self.forget_pool_block(start);
        }
        let Some(block) = self.pools.block_mut(start) else { return };
        let before = std::mem::replace(&mut block.holder, Holder::Program);
        if before == (Holder::Graph { is_left: false }) {
            self.allocations.remove(&start);
        }
    }

    /// Changes what devices may do with a pool's memory, that in use included.
    pub(super) fn set_pool_rights(&mut self, handle: usize, rights: DeviceRights) -> Result {
        let pool = self.pools.get(handle)?;
        pool.rights = rights;
        for start in pool.blocks.keys() {
            if let Some(mapping) = self.mappings.get_mut(start) {
                mapping.access = Access::Devices(rights);
            }
        }
        for import in pool.imports.values() {
            if let Some(mapping) = self.mappings.get_mut(&import.base) {
                mapping.access = Access::Devices(rights);
            }
        }
        Ok(())
    }
}

/// Makes the memory of an asynchronous allocation usable: its place in the stream's order has come.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if it is usable already, or no such allocation.
pub(crate) fn pool_activate(address: u64) -> Result {
    STATE.write().activate_pool_block(address)
}

/// Gives the memory of an asynchronous allocation back to its pool, or frees another allocation: the place of
/// its cuMemFreeAsync in the stream's order has come.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if there is no such allocation.
pub(crate) fn pool_release(address: u64) -> Result {
    let mut state = STATE.write();
    if state.freed_in_order.contains_key(&address) {
        let removed = state.free_in_order(address)?;
        drop(state);
        drop(removed);
        return Ok(());
    }
    state.release_pool_block(address)
}

/// Memory for a graph's allocation node, from the device's current pool: the address is the graph's until
/// [`graph_forget`]; the memory behind it is there between [`pool_activate`] and [`pool_release`] of each
/// launch.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY`, `CUDA_ERROR_INVALID_VALUE` for a size of 0.
pub(crate) fn graph_allocate(device: i32, context: usize, size_bytes: u64) -> Result<u64> {
    if size_bytes == 0 {
        return Err(INVALID);
    }
    let mut state = STATE.write();
    let pool = state.pools.current_of(device);
    let start = state.reserve_pool_block(pool, size_bytes, context, true)?;
    Ok(start)
}

/// A launch is submitted that leaves a graph's memory allocated, so that the program may free it from now on;
/// or one that frees what was left.
pub(crate) fn graph_set_left(address: u64, is_left: bool) {
    STATE.write().set_graph_left(address, is_left);
}

/// Whether the launches that were submitted leave a graph's memory allocated, and the program has not freed it
/// since.
pub(crate) fn graph_is_left(address: u64) -> bool {
    let state = STATE.read();
    state.pools.block(address).is_some_and(|(.., block)| block.holder == Holder::Graph { is_left: true })
}

/// The graph whose node [`graph_allocate`] (or a capture) was for is destroyed, with everything created from it. What
/// its last launch left allocated stays until the program frees it.
pub(crate) fn graph_forget(address: u64) {
    STATE.write().forget_graphs_pool_block(address);
}

/// To be called after a stream, an event or a context was waited for: pools give back what they hold beyond
/// their thresholds (CUDA driver API reference, `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`).
pub(crate) fn after_synchronization() {
    if TRIM_IS_DUE.swap(false, Ordering::Relaxed) {
        let removed = STATE.write().pools.trim_each(|pool| pool.release_threshold_bytes);
        drop(removed);
    }
}
