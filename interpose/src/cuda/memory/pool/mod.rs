//! Stream-ordered allocation (cuMemAllocAsync), served from memory of ours.
//!
//! | module | does |
//! |---|---|
//! | `heap` | which parts of a pool are used, and in which stream's order the others are free |
//! | `events` | events of ours, which tell when a free has happened |
//! | `state` | what is known of the pools |
//! | `freed` | memory of cuMemAlloc that was freed in a stream's order |
//! | `stream` | what has to be known of the stream of a call |
//! | `shared` | pools that processes share |
//! | `calls`, `share_calls` | the entry points |
//!
//! A pool's handle, its properties and its validity are the driver's: the driver has a pool too, which stays empty
//! but for what graphs allocate. Its memory is ours: segments, cut into allocations. What is mapped
//! can be used at once, so an allocation is valid from its place in its stream on.
//!
//! What was freed is used again (CUDA C++ programming guide, "Stream Ordered Memory Allocator"; CUDA driver API
//! reference, `CUmemPool_attribute`):
//!
//! 1. in the stream that has freed it, at once;
//! 2. in any stream, once an event that was recorded at the free has happened; with `REUSE_ALLOW_OPPORTUNISTIC`
//!    an allocation looks for that by itself, else only the program's synchronisations do;
//! 3. when the device has no more memory, in any stream, which then waits for such events
//!    (`REUSE_ALLOW_INTERNAL_DEPENDENCIES`);
//! 4. when all that fails, once the frees that are under way have been waited for.
//!
//! `REUSE_FOLLOW_EVENT_DEPENDENCIES` has no effect: that the program's own events order a free before an allocation is
//! not seen before they have happened.
//!
//! Pools of other memory than one device's, and those that can be exported as other handles than descriptors, are left to
//! the driver.

pub(crate) mod calls;
mod events;
mod freed;
mod heap;
pub(crate) mod share_calls;
pub(crate) mod shared;
mod state;
mod stream;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, MutexGuard};

use ckpt_protocol::agent::RegionKind;
use cuda_abi::types::{CUcontext, CUdeviceptr, CUmemoryPool, CUresult, CUstream};

use super::block::{self, Block};
use super::physical;
use super::reclaim::make_room;
use crate::cuda::activation::is_started;
use crate::cuda::result::{INVALID_VALUE, OUT_OF_MEMORY, SUCCESS};
use crate::cuda::stream_capture::relaxed;
use crate::cuda::{driver, gate};
use cuda_abi::layout::{Access, Properties};
use heap::StreamId;
use state::{IS_TRIM_DUE, Id, POOLS, Pending, Pool, Pools, Removed};

/// The granularity of device memory, in bytes (cuMemGetAllocationGranularity on every part so far).
const GRANULE_BYTES: u64 = 2 << 20;

/// The largest step, in bytes, by which a pool grows. It grows by its own size, so that it has few large segments and
/// at most twice the memory that it needs.
const GROWTH_BYTES: u64 = 32 << 20;

/// How often an allocation that has made its stream wait tries to get what it has waited for.
const TRIES: u32 = 4;

/// The number of frees of a stream that are polled at a time.
const POLL_BATCH: usize = 16;

/// Allocations are counted from here; the driver counts its own from 1, the arena from 2^40.
const FIRST_NUMBER: u64 = 1 << 60;

/// For the numbers of one pool's allocations.
const NUMBER_BITS: u32 = 40;

/// An allocation of a pool.
pub(crate) struct Found {
    pub start: CUdeviceptr,
    /// The requested size.
    pub bytes: u64,
    pub pool: CUmemoryPool,
    /// Never the same twice in the life of the process, and none that the driver or the arena would give.
    pub number: u64,
}

/// The allocation in which an address lies.
pub(crate) fn find(address: CUdeviceptr) -> Option<Found> {
    let mut pools = POOLS.lock();
    let id = pools.owner(address)?;
    let pool = pools.pool(id)?;
    let (start, bytes, number) = pool.heap.allocation_at(address)?;
    let number = FIRST_NUMBER + (id << NUMBER_BITS) + number;
    Some(Found { start, bytes, pool: pool.handle as CUmemoryPool, number })
}

/// Whether an allocation of a pool begins at an address.
pub(crate) fn is_allocation(address: CUdeviceptr) -> bool {
    POOLS.lock().pool_of_allocation(address).is_some()
}

/// How many allocations of pools begin in a range.
pub(crate) fn count_in(address: CUdeviceptr, bytes: u64) -> u64 {
    let mut pools = POOLS.lock();
    let owner = pools.owner(address);
    owner.and_then(|id| pools.pool(id)).map_or(0, |pool| pool.heap.count_in(address, bytes))
}

/// How many allocations pools have.
pub(crate) fn count() -> u64 {
    POOLS.lock().by_id.values().map(|pool| pool.heap.count_in(0, CUdeviceptr::MAX)).sum()
}

/// Frees an allocation of a pool, by cuMemFree; false if none begins there. As in the original, the program has seen
/// to it that nobody uses it any more: nothing is waited for (CUDA C++ programming guide, "Stream Ordered Memory
/// Allocator").
pub(crate) fn free_synchronously(address: CUdeviceptr) -> bool {
    let mut pools = POOLS.lock();
    pools.pool_of_allocation(address).is_some_and(|(_, pool)| pool.free(address, None))
}

/// All work on all devices has ended, and so have all frees. Pools give back memory beyond their thresholds.
pub(crate) fn settle() {
    let ids = POOLS.lock().ids(|_| true);
    for id in ids {
        let events = POOLS.lock().pool(id).map(Pool::settle_all);
        events::give_back(events.unwrap_or_default());
        trim(id, Pool::kept_bytes);
    }
    freed::settle();
    IS_TRIM_DUE.store(false, Relaxed);
}

/// A context was removed, with its work and our events.
pub(crate) fn context_removed(context: CUcontext) {
    let pools = POOLS.lock();
    let pending = pools.by_id.values().flat_map(|pool| pool.pending.values().flatten());
    pending.filter(|free| free.event.is_of(context)).for_each(|free| free.event.removed_with_context());
    drop(pools);
    freed::context_removed(context);
    events::context_removed(context);
}

/// Gives unused memory of a device's pools back. Returns whether there was any.
pub(crate) fn give_back_unused(device: i32) -> bool {
    let ids = POOLS.lock().ids(|pool| pool.device == device);
    let before = reserved_bytes(&ids);
    freed::reclaim();
    for id in &ids {
        poll_frees(*id);
        trim(*id, |_| 0);
    }
    reserved_bytes(&ids) < before
}

fn reserved_bytes(ids: &[Id]) -> u64 {
    let mut pools = POOLS.lock();
    ids.iter().filter_map(|id| pools.pool(*id).map(|pool| pool.reserved.current_bytes)).sum()
}

/// After the program has waited for a stream, an event or a context: pools give back what they hold beyond their
/// thresholds (CUDA driver API reference, `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`).
fn after_synchronization() {
    if !IS_TRIM_DUE.load(Relaxed) || !is_started() || !IS_TRIM_DUE.swap(false, Relaxed) {
        return;
    }
    let _inside = gate::enter();
    let ids = POOLS.lock().ids(|pool| pool.reserved.current_bytes > pool.kept_bytes());
    for id in ids {
        poll_and_trim(id, Pool::kept_bytes);
    }
    let is_freed_left = relaxed(freed::reclaim);
    // Frees that have not happened yet are polled the next time.
    let is_left = |pool: &Pool| !pool.pending.is_empty() && pool.reserved.current_bytes > pool.kept_bytes();
    if is_freed_left || !POOLS.lock().ids(is_left).is_empty() {
        IS_TRIM_DUE.store(true, Relaxed);
    }
}

/// Gives memory back beyond what a pool is to keep, that of frees which have happened included.
fn poll_and_trim(id: Id, keep_bytes: impl Fn(&Pool) -> u64) {
    relaxed(|| {
        poll_frees(id);
        trim(id, keep_bytes);
    });
}

/// Gives free memory back while a pool has more than it is to keep. Memory that the driver refuses to unmap stays
/// with the pool.
fn trim(id: Id, keep_bytes: impl Fn(&Pool) -> u64) {
    let mut refused = Vec::new();
    loop {
        let keep_bytes = POOLS.lock().pool(id).map(|pool| keep_bytes(pool));
        let removed = keep_bytes.and_then(|keep_bytes| POOLS.lock().remove_empty_segment(id, keep_bytes));
        let Some(removed) = removed else { break };
        if block::give_back(removed.start, removed.bytes) {
            POOLS.lock().has_left(id);
        } else {
            refused.push(removed);
        }
    }
    // Not before: it would be the next one again.
    for Removed { start, bytes, access_changes } in refused {
        POOLS.lock().comes_back(id, bytes);
        drop(add_segment(id, start, bytes, access_changes));
    }
    let done = POOLS.lock().remove_if_done(id);
    drop(done);
}

/// Polls which frees of a pool have happened.
fn poll_frees(id: Id) {
    let streams: Vec<StreamId> =
        POOLS.lock().pool(id).map(|pool| pool.pending.keys().copied().collect()).unwrap_or_default();
    for stream in streams {
        poll_newest(id, stream);
        while poll_stream(id, stream, POLL_BATCH) == POLL_BATCH {}
    }
}

/// Most often all frees of a stream have happened, or none.
fn poll_newest(id: Id, stream: StreamId) {
    let newest = POOLS.lock().pool(id).and_then(|pool| pool.newest(stream));
    let Some((moment, event)) = newest.filter(|(moment, _)| *moment > 0) else { return };
    if event.has_happened() {
        let events = POOLS.lock().pool(id).map(|pool| pool.settle(stream, moment));
        events::give_back(events.unwrap_or_default());
    }
}

/// Polls the oldest frees of a stream; returns how many have happened.
fn poll_stream(id: Id, stream: StreamId, most: usize) -> usize {
    let oldest = POOLS.lock().pool(id).map(|pool| pool.oldest(stream, most)).unwrap_or_default();
    let count = oldest.iter().take_while(|(_, event)| event.has_happened()).count();
    let Some((moment, _)) = count.checked_sub(1).and_then(|last| oldest.get(last)) else { return 0 };
    let events = POOLS.lock().pool(id).map(|pool| pool.settle(stream, *moment));
    // The last owner of an event gives it back.
    drop(oldest);
    events::give_back(events.unwrap_or_default());
    count
}

/// Serves an allocation in a stream.
fn allocate(id: Id, bytes: u64, stream: CUstream, stream_id: StreamId) -> Result<CUdeviceptr, CUresult> {
    let mut pools_now = POOLS.lock();
    let pool = pools_now.pool(id).ok_or(INVALID_VALUE)?;
    if let Some(address) = pool.take(bytes, stream_id) {
        return Ok(address);
    }
    let (device, is_opportunistic, may_wait) =
        (pool.device, pool.is_opportunistic, pool.may_make_streams_wait);
    drop(pools_now);
    if is_opportunistic {
        poll_frees(id);
    }
    let grown = take_or_grow(id, bytes, stream_id);
    if grown != Err(OUT_OF_MEMORY) {
        return grown;
    }
    make_room(device);
    let grown = take_or_grow(id, bytes, stream_id);
    if grown != Err(OUT_OF_MEMORY) {
        return grown;
    }
    if may_wait && let Some(address) = take_by_waiting(id, bytes, stream, stream_id) {
        return Ok(address);
    }
    wait_for_frees(device);
    give_back_unused(device);
    take_or_grow(id, bytes, stream_id)
}

fn take_or_grow(id: Id, bytes: u64, stream: StreamId) -> Result<CUdeviceptr, CUresult> {
    if let Some(address) = POOLS.lock().take(id, bytes, stream) {
        return Ok(address);
    }
    let exact = bytes.checked_next_multiple_of(GRANULE_BYTES).ok_or(OUT_OF_MEMORY)?;
    let has = POOLS.lock().pool(id).map_or(0, |pool| pool.reserved.current_bytes);
    let wanted = exact.max(has.min(GROWTH_BYTES));
    let grown = grow(id, wanted, bytes, stream);
    if grown == Err(OUT_OF_MEMORY) && exact < wanted {
        return grow(id, exact, bytes, stream);
    }
    grown
}

/// Makes a segment and takes an allocation out of it.
fn grow(id: Id, segment_bytes: u64, bytes: u64, stream: StreamId) -> Result<CUdeviceptr, CUresult> {
    make_segment(id, segment_bytes)?.take(id, bytes, stream).ok_or(OUT_OF_MEMORY)
}

/// Makes a segment. Returns the pools as they are with it.
fn make_segment(id: Id, segment_bytes: u64) -> Result<MutexGuard<'static, Pools>, CUresult> {
    let (device, access, changes) = POOLS.lock().begin_growth(id, segment_bytes).ok_or(OUT_OF_MEMORY)?;
    let allow = |block: &Block| physical::set_access(block.address, segment_bytes, &access);
    let made = Block::create(RegionKind::Pool, segment_bytes, &Properties::of(device), allow);
    let start = made.inspect_err(|_| POOLS.lock().growth_failed(id, segment_bytes))?.address;
    Ok(add_segment(id, start, segment_bytes, changes))
}

/// Adds a segment to a pool, once those may access it whom the pool lets by then: so many changes of that were known
/// when its own were set. Returns the pools as they are with it.
fn add_segment(id: Id, start: CUdeviceptr, bytes: u64, mut changes: u64) -> MutexGuard<'static, Pools> {
    loop {
        let mut pools = POOLS.lock();
        match pools.add_segment(id, start, bytes, changes) {
            Ok(()) => return pools,
            Err((access, now)) => {
                drop(pools);
                changes = now;
                // What the driver has accepted for the other segments, it accepts for this one.
                let _ = physical::set_access(start, bytes, &access);
            }
        }
    }
}

/// Makes a stream wait for the frees of others and takes the freed memory.
fn take_by_waiting(id: Id, bytes: u64, stream: CUstream, stream_id: StreamId) -> Option<CUdeviceptr> {
    let mut waited_for = BTreeMap::new();
    for _ in 0..TRIES {
        let (run, events) = POOLS.lock().find_run(id, bytes, stream_id)?;
        if !events.iter().all(|event| event.holds_back(stream)) {
            return None;
        }
        for (other, moment) in run.after {
            let latest = waited_for.entry(other).or_insert(moment);
            *latest = moment.max(*latest);
        }
        let taken = POOLS.lock().take_run(id, bytes, stream_id, &waited_for);
        if taken.is_some() {
            return taken;
        }
    }
    None
}

/// Waits for all frees in pools of a device that are under way.
fn wait_for_frees(device: i32) {
    let ids = POOLS.lock().ids(|pool| pool.device == device);
    for id in ids {
        let all = POOLS.lock().pool(id).map(|pool| pool.all_events()).unwrap_or_default();
        let _ = all.iter().all(|event| event.wait());
    }
}

/// Frees an allocation in a stream's order; `None` if none begins there.
fn free(address: CUdeviceptr, stream: CUstream) -> Option<CUresult> {
    let begun = POOLS.lock().pool_of_allocation(address).map(|(id, pool)| (id, pool.last_moment));
    let (id, covers) = begun?;
    let recorded =
        stream::id(stream).zip(stream::context(stream).and_then(|context| events::record(stream, context)));
    let Some((stream_id, event)) = recorded else {
        return Some(free_after_waiting(address, stream));
    };
    let event = Arc::new(event);
    let mut pools_now = POOLS.lock();
    let freed = pools_now.pool(id).map(|pool| {
        let moment = pool.last_moment + 1;
        // Another thread may have freed it meanwhile.
        let is_freed = pool.free(address, Some((stream_id, moment)));
        if is_freed {
            pool.last_moment = moment;
            let pending = Pending { moment, covers, event: Arc::clone(&event) };
            pool.pending.entry(stream_id).or_default().push_back(pending);
        }
        (is_freed, pool.is_opportunistic)
    });
    drop(pools_now);
    drop(event);
    let (is_freed, is_opportunistic) = freed.unwrap_or_default();
    if is_freed && is_opportunistic {
        // Keeps frees from accumulating where nothing else polls them.
        poll_stream(id, stream_id, 2);
    }
    Some(if is_freed { SUCCESS } else { INVALID_VALUE })
}

/// For a stream in which no event of ours can be recorded.
fn free_after_waiting(address: CUdeviceptr, stream: CUstream) -> CUresult {
    // SAFETY: the stream is that of our caller's caller; what is none is an error and not more.
    let waited = unsafe { driver::cuStreamSynchronize(stream) };
    match waited {
        SUCCESS if free_synchronously(address) => SUCCESS,
        SUCCESS => INVALID_VALUE,
        error => error,
    }
}

/// Sets who may access a pool's memory, what it has now and what it will have.
fn set_access(handle: usize, access: &[Access]) -> CUresult {
    let mut pools_now = POOLS.lock();
    let Some(pool) = pools_now.named(handle) else { return SUCCESS };
    for one in access {
        pool.access.retain(|known| !known.is_of_same(one));
        pool.access.push(*one);
    }
    pool.access_changes += 1;
    let segments: Vec<(CUdeviceptr, u64)> = pool.heap.segments().collect();
    drop(pools_now);
    for (start, bytes) in segments {
        let result = physical::set_access(start, bytes, access);
        // One may have been given back meanwhile.
        if let Err(error) = result
            && POOLS.lock().owner(start).is_some()
        {
            return error;
        }
    }
    SUCCESS
}
