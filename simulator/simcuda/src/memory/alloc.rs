//! cuMemAlloc and its kin: memory of a context.

use std::sync::Arc;

use cuda_abi::sys::CUresult;
use cuda_abi::types::CUdeviceptr;

use super::heap::GRAIN_BYTES;
use super::layout::Location;
use super::segment::Segment;
use super::space::{Access, Mapping, PAGE_BYTES, Reserved, Target};
use super::state::{Allocation, AllocationKind, STATE, State};
use super::{ledger, pool};
use crate::context::{self, Context};
use crate::error::{Result, write_both, write_if_wanted, write_out};
use crate::stream;

/// Up to this size allocations share blocks of one page.
const SMALL_BYTES: u64 = 1 << 20;
/// Rows of cuMemAllocPitch begin at multiples of this, as on real parts.
const PITCH_BYTES: u64 = 512;

/// Addresses with memory behind them, for one large allocation or for many small ones.
pub(super) struct Block {
    pub(super) reserved: Reserved,
    pub(super) segment: Arc<Segment>,
    /// Its free parts are in the heap of its context.
    shared: bool,
}

impl Block {
    /// A block for one allocation.
    pub(super) fn whole(reserved: Reserved, segment: Arc<Segment>) -> Self {
        Self { reserved, segment, shared: false }
    }
}

impl State {
    fn add_block(&mut self, device: i32, len: u64, shared: bool) -> Result<u64> {
        let segment = Segment::create(Location::Device(device), len, 0)?;
        let reserved = Reserved::new(len, PAGE_BYTES, 0)?;
        let start = reserved.start;
        let target = Target::Device { segment: Arc::clone(&segment), offset: 0 };
        self.mappings.insert(start, Mapping { len, target, access: Access::OwnerAndPeers });
        self.blocks.insert(start, Block { reserved, segment, shared });
        Ok(start)
    }

    fn remove_block(&mut self, start: u64) -> Option<Block> {
        self.mappings.remove(&start);
        self.blocks.remove(&start)
    }

    fn allocate(&mut self, context: &Context, size_bytes: u64, align: u64) -> Result<u64> {
        let device = context.device.ordinal;
        if size_bytes > ledger::device(device)?.capacity_bytes {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        if size_bytes > SMALL_BYTES || align > GRAIN_BYTES {
            return self.add_block(device, size_bytes.next_multiple_of(PAGE_BYTES), false);
        }
        let heap = self.heaps.entry(context.handle).or_default();
        if let Some(start) = heap.take(size_bytes) {
            return Ok(start);
        }
        let block = self.add_block(device, PAGE_BYTES, true)?;
        let heap = self.heaps.entry(context.handle).or_default();
        heap.add_chunk(block, PAGE_BYTES);
        heap.take(size_bytes).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    }

    /// Takes an allocation of a context away. What comes back is to be dropped after the lock.
    pub(super) fn free(&mut self, start: u64) -> Option<Block> {
        let allocation = self.allocations.remove(&start)?;
        self.free_block_of(start, &allocation)
    }

    fn free_block_of(&mut self, start: u64, allocation: &Allocation) -> Option<Block> {
        if let AllocationKind::PoolImport { pool } = allocation.kind {
            self.pools.forget_import(pool, start);
        }
        let (&block_start, block) = self.blocks.range(..=start).next_back()?;
        if !block.shared {
            return self.remove_block(block_start);
        }
        let heap = self.heaps.get_mut(&allocation.context)?;
        let free_block = heap.give(start, allocation.size_bytes)?;
        heap.remove_chunk(free_block);
        self.remove_block(free_block)
    }

    /// The place of a cuMemFreeAsync of a context's allocation in the order has come.
    pub(super) fn free_in_order(&mut self, start: u64) -> Result<Option<Block>> {
        let allocation = self.freed_in_order.remove(&start).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        Ok(self.free_block_of(start, &allocation))
    }

    /// The segment of a context's allocation and where in it the address lies.
    pub(super) fn place_in_block(&self, address: u64) -> Option<(&Arc<Segment>, u64)> {
        let (&start, block) = self.blocks.range(..=address).next_back()?;
        (address - start < block.reserved.len).then_some((&block.segment, address - start))
    }
}

fn allocate(context: &Arc<Context>, size_bytes: u64, align: u64, kind: AllocationKind) -> Result<u64> {
    let mut state = STATE.write();
    if context.is_destroyed() {
        return Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
    }
    let start = state.trimming_pools(|state| state.allocate(context, size_bytes, align))?;
    let allocation = Allocation::new(size_bytes, context.handle, context.device.ordinal, kind);
    state.allocations.insert(start, allocation);
    Ok(start)
}

/// Device memory for a module's variables: zeroed, freed with [`free_internal`]; not visible as an allocation
/// to cuMemGetInfo's callers other than by the memory that it takes.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY`; `CUDA_ERROR_INVALID_VALUE` for an alignment beyond a page's.
pub(crate) fn allocate_internal(context: &Arc<Context>, size_bytes: usize, align: usize) -> Result<u64> {
    if !align.is_power_of_two() || align as u64 > PAGE_BYTES {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let size_bytes = size_bytes.max(1) as u64;
    let start = allocate(context, size_bytes, align as u64, AllocationKind::Internal)?;
    let place = STATE.read().place_in_block(start).map(|(segment, offset)| (Arc::clone(segment), offset));
    let (segment, offset) = place.ok_or(CUresult::CUDA_ERROR_UNKNOWN)?;
    let backing = segment.backing()?;
    // SAFETY: the allocation lies within the segment.
    let bytes = unsafe { backing.host.add(offset as usize) };
    // SAFETY: the bytes are mapped while `backing` lives, and are of an allocation that no other code knows yet.
    unsafe { bytes.write_bytes(0, size_bytes as usize) };
    Ok(start)
}

/// Frees what [`allocate_internal`] gave.
pub(crate) fn free_internal(address: u64) {
    let removed = STATE.write().free(address);
    drop(removed);
}

pub(crate) unsafe fn cuMemAlloc_v2(out: *mut CUdeviceptr, size_bytes: usize) -> Result {
    let context = context::current()?;
    if out.is_null() || size_bytes == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    stream::forbid_in_capture()?;
    let start = allocate(&context, size_bytes as u64, 1, AllocationKind::Device)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, start) }
}

pub(crate) unsafe fn cuMemAllocPitch_v2(
    out: *mut CUdeviceptr,
    pitch_out: *mut usize,
    width_bytes: usize,
    height: usize,
    element_bytes: u32,
) -> Result {
    let context = context::current()?;
    let is_valid = !out.is_null() && !pitch_out.is_null() && width_bytes > 0 && height > 0;
    if !is_valid || !matches!(element_bytes, 4 | 8 | 16) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    stream::forbid_in_capture()?;
    let pitch = (width_bytes as u64).checked_next_multiple_of(PITCH_BYTES);
    let size_bytes = pitch.and_then(|pitch| pitch.checked_mul(height as u64));
    let (Some(pitch), Some(size_bytes)) = (pitch, size_bytes) else {
        return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    };
    let start = allocate(&context, size_bytes, 1, AllocationKind::Device)?;
    // SAFETY: both are the caller's out parameters.
    unsafe { write_both(pitch_out, out, (pitch as usize, start)) }
}

/// Waits for all work of the context that the memory belongs to, as the real one does.
pub(crate) unsafe fn cuMemFree_v2(address: CUdeviceptr) -> Result {
    let context = context::current()?;
    if address == 0 {
        return Ok(());
    }
    stream::forbid_in_capture()?;
    let allocation = freeable(address)?;
    let owner = context::by_handle(allocation.context as _).unwrap_or(context);
    stream::synchronize_context(&owner)?;
    let mut state = STATE.write();
    // Another thread may have been faster.
    if state.allocations.get(&address).map(|now| now.id) != Some(allocation.id) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    match allocation.kind {
        AllocationKind::Pool { .. } => {
            state.take_pool_block(address)?;
            state.release_pool_block(address)
        }
        AllocationKind::Managed(_) => {
            state.allocations.remove(&address);
            let removed = state.mappings.remove(&address);
            drop(state);
            drop(removed);
            Ok(())
        }
        _ => {
            let removed = state.free(address);
            drop(state);
            drop(removed);
            Ok(())
        }
    }
}

/// The allocation that starts at `address`, if cuMemFree may free it.
pub(super) fn freeable(address: u64) -> Result<Allocation> {
    let state = STATE.read();
    let allocation = state.allocations.get(&address).cloned();
    allocation
        .filter(|found| {
            matches!(
                found.kind,
                AllocationKind::Device
                    | AllocationKind::Pool { .. }
                    | AllocationKind::PoolImport { .. }
                    | AllocationKind::Managed(_)
            )
        })
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

pub(crate) unsafe fn cuMemGetAddressRange_v2(
    base_out: *mut CUdeviceptr,
    size_out: *mut usize,
    address: CUdeviceptr,
) -> Result {
    context::current()?;
    let state = STATE.read();
    let allocation = state.allocation_at(address).map(|(start, found)| (start, found.size_bytes));
    // Of VMM memory it is the mapping that one cuMemMap made, not the reservation.
    let mapping = || state.mapping_at(address).map(|(start, mapping)| (start, mapping.len));
    let is_vmm = state.reservation_at(address).is_some();
    let range = allocation.or_else(|| if is_vmm { mapping() } else { None });
    let (base, size_bytes) = range.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
    // SAFETY: `base_out` is the caller's out parameter or NULL.
    unsafe { write_if_wanted(base_out, base) };
    // SAFETY: `size_out` is the caller's out parameter or NULL.
    unsafe { write_if_wanted(size_out, size_bytes as usize) };
    Ok(())
}

/// All memory is free in the beginning. What contexts take is `SIMCUDA_CONTEXT_MEMORY`.
pub(crate) unsafe fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Result {
    let context = context::current()?;
    let memory = ledger::device(context.device.ordinal)?;
    pool::after_synchronization();
    let free_bytes = memory.capacity_bytes.saturating_sub(memory.used_bytes()?);
    // SAFETY: both are the caller's out parameters.
    unsafe { write_both(free, total, (free_bytes as usize, memory.capacity_bytes as usize)) }
}

/// Takes what the driver itself needs for a context.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY` if the device has too little memory left.
pub(crate) fn context_created(handle: usize, device: i32, size_bytes: u64) -> Result {
    if size_bytes > 0 {
        let segment = Segment::create(Location::Device(device), size_bytes.next_multiple_of(PAGE_BYTES), 0)?;
        STATE.write().contexts.insert(handle, segment);
    }
    Ok(())
}

/// Frees the memory of a context.
pub(crate) fn context_destroyed(context: &Arc<Context>) {
    let mut blocks = Vec::new();
    let mut mappings = Vec::new();
    let mut of_driver = Vec::new();
    let mut state = STATE.write();
    let state = &mut *state;
    let of_context: Vec<_> = state
        .allocations
        .iter()
        .filter(|(_, allocation)| allocation.context == context.handle)
        .map(|(start, allocation)| (*start, allocation.kind))
        .collect();
    for (start, kind) in of_context {
        match kind {
            AllocationKind::Device | AllocationKind::Internal | AllocationKind::Imported { .. } => {
                blocks.extend(state.free(start));
            }
            AllocationKind::Host { .. } | AllocationKind::Registered { .. } | AllocationKind::Managed(_) => {
                state.allocations.remove(&start);
                mappings.extend(state.mappings.remove(&start));
            }
            // A pool is its device's.
            AllocationKind::Pool { .. } | AllocationKind::PoolImport { .. } => {}
        }
    }
    let freed: Vec<_> = state
        .freed_in_order
        .iter()
        .filter(|(_, allocation)| allocation.context == context.handle)
        .map(|(start, _)| *start)
        .collect();
    for start in freed {
        blocks.extend(state.free_in_order(start).ok().flatten());
    }
    state.heaps.remove(&context.handle);
    of_driver.extend(state.contexts.remove(&context.handle));
    state.peers.retain(|(from, to), _| *from != context.handle && *to != context.handle);
}
