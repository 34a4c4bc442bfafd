//! The state of the pools. Nothing here calls the driver.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use cuda_abi::types::CUdeviceptr;

use super::events::Event;
use super::heap::{Heap, Moment, Run, StreamId};
use crate::cuda::shared::Shared;
use cuda_abi::layout::Access;

/// The ID of a pool, unique for the life of the process; a handle may be reused while memory of the former pool is in
/// use.
pub(super) type Id = u64;

/// A number of bytes and its highest value so far.
#[derive(Default, Clone, Copy)]
pub(super) struct Gauge {
    pub current_bytes: u64,
    pub high_bytes: u64,
}

impl Gauge {
    pub fn set(&mut self, bytes: u64) {
        self.current_bytes = bytes;
        self.high_bytes = self.high_bytes.max(bytes);
    }
}

/// A free that may still have to happen.
pub(super) struct Pending {
    pub moment: Moment,
    /// Frees up to this moment precede the event: they have happened if the event has.
    pub covers: Moment,
    pub event: Arc<Event>,
}

pub(super) struct Pool {
    pub handle: usize,
    pub device: c_int,
    /// The maximum size; 0 without a limit.
    pub most_bytes: u64,
    /// Bits of `CUmemAllocationHandleType`.
    pub handle_types: u32,
    /// Other processes may have imported it: its segments stay until its end.
    pub is_exported: bool,
    pub release_threshold_bytes: u64,
    pub is_opportunistic: bool,
    pub may_make_streams_wait: bool,
    pub access: Vec<Access>,
    /// Counts changes of `access`.
    pub access_changes: u64,
    pub reserved: Gauge,
    pub used: Gauge,
    pub heap: Heap,
    /// The frees of each stream, oldest first.
    pub pending: BTreeMap<StreamId, VecDeque<Pending>>,
    pub last_moment: Moment,
    /// Segments that are being given back; the driver may refuse them.
    pub leaving: usize,
    /// It lives until its last allocation is freed.
    pub is_destroyed: bool,
}

/// A segment that was removed from its pool.
pub(super) struct Removed {
    pub start: CUdeviceptr,
    pub bytes: u64,
    /// The pool's count of them at that moment.
    pub access_changes: u64,
}

#[derive(Default)]
pub(super) struct Pools {
    pub by_id: BTreeMap<Id, Pool>,
    pub by_handle: BTreeMap<usize, Id>,
    /// The length and the pool of each segment.
    pub owners: BTreeMap<CUdeviceptr, (u64, Id)>,
    pub last_id: Id,
}

pub(super) static POOLS: Shared<Pools> = Shared::new(Pools {
    by_id: BTreeMap::new(),
    by_handle: BTreeMap::new(),
    owners: BTreeMap::new(),
    last_id: 0,
});

/// Whether a pool may have more memory than it is to keep.
pub(super) static IS_TRIM_DUE: AtomicBool = AtomicBool::new(false);

impl Pool {
    pub fn new(handle: usize, device: c_int, most_bytes: u64) -> Self {
        Self {
            handle,
            device,
            most_bytes,
            handle_types: 0,
            is_exported: false,
            release_threshold_bytes: 0,
            is_opportunistic: true,
            may_make_streams_wait: true,
            access: vec![Access::of(device)],
            access_changes: 0,
            reserved: Gauge::default(),
            used: Gauge::default(),
            heap: Heap::default(),
            pending: BTreeMap::new(),
            last_moment: 0,
            leaving: 0,
            is_destroyed: false,
        }
    }

    pub fn take(&mut self, bytes: u64, stream: StreamId) -> Option<CUdeviceptr> {
        let address = self.heap.take(bytes, stream)?;
        self.used.set(self.heap.used_bytes);
        Some(address)
    }

    /// Frees an allocation in a stream's order, or altogether. Returns whether there was one.
    pub fn free(&mut self, address: CUdeviceptr, order: Option<(StreamId, Moment)>) -> bool {
        let is_freed = self.heap.free(address, order);
        self.used.set(self.heap.used_bytes);
        if is_freed && self.reserved.current_bytes > self.kept_bytes() {
            IS_TRIM_DUE.store(true, Relaxed);
        }
        is_freed
    }

    /// The bytes that it keeps at a synchronisation.
    pub fn kept_bytes(&self) -> u64 {
        match (self.is_destroyed, self.is_exported) {
            (true, _) => 0,
            (false, true) => u64::MAX,
            (false, false) => self.release_threshold_bytes,
        }
    }

    /// The oldest frees of a stream.
    pub fn oldest(&self, stream: StreamId, most: usize) -> Vec<(Moment, Arc<Event>)> {
        let pending = self.pending.get(&stream).into_iter().flatten().take(most);
        pending.map(|pending| (pending.moment, Arc::clone(&pending.event))).collect()
    }

    /// The newest free of a stream, by the moment up to which it speaks for all.
    pub fn newest(&self, stream: StreamId) -> Option<(Moment, Arc<Event>)> {
        let newest = self.pending.get(&stream)?.back()?;
        Some((newest.covers, Arc::clone(&newest.event)))
    }

    /// The events that have all happened when the frees of a stream up to a moment have.
    pub fn events_until(&self, stream: StreamId, moment: Moment) -> Vec<Arc<Event>> {
        let mut covered = 0;
        let newest_first = self.pending.get(&stream).into_iter().flatten().rev();
        let needed = newest_first.filter(|pending| pending.moment <= moment).take_while(|pending| {
            let is_needed = pending.moment > covered;
            covered = covered.max(pending.covers);
            is_needed
        });
        needed.map(|pending| Arc::clone(&pending.event)).collect()
    }

    /// The frees of a stream up to a moment have happened. Returns their events.
    pub fn settle(&mut self, stream: StreamId, moment: Moment) -> Vec<Arc<Event>> {
        self.heap.settle(stream, moment);
        let Some(pending) = self.pending.get_mut(&stream) else { return Vec::new() };
        let count = pending.iter().take_while(|pending| pending.moment <= moment).count();
        let events = pending.drain(..count).map(|pending| pending.event).collect();
        if pending.is_empty() {
            self.pending.remove(&stream);
        }
        events
    }

    /// All frees have happened. Returns their events.
    pub fn settle_all(&mut self) -> Vec<Arc<Event>> {
        let streams: Vec<StreamId> = self.pending.keys().copied().collect();
        streams.into_iter().flat_map(|stream| self.settle(stream, Moment::MAX)).collect()
    }

    pub fn all_events(&self) -> Vec<Arc<Event>> {
        self.pending.values().flatten().map(|pending| Arc::clone(&pending.event)).collect()
    }
}

impl Pools {
    pub fn pool(&mut self, id: Id) -> Option<&mut Pool> {
        self.by_id.get_mut(&id)
    }

    /// Notes a pool under its handle.
    pub fn add(&mut self, handle: usize, device: c_int, most_bytes: u64) -> Id {
        self.last_id += 1;
        self.by_id.insert(self.last_id, Pool::new(handle, device, most_bytes));
        self.by_handle.insert(handle, self.last_id);
        self.last_id
    }

    pub fn id_of(&self, handle: usize) -> Option<Id> {
        self.by_handle.get(&handle).copied()
    }

    /// A pool whose handle is still valid.
    pub fn named(&mut self, handle: usize) -> Option<&mut Pool> {
        let id = self.id_of(handle)?;
        self.pool(id)
    }

    /// The handle no longer belongs to the pool.
    pub fn unname(&mut self, handle: usize) -> Option<Id> {
        self.by_handle.remove(&handle)
    }

    pub fn name(&mut self, handle: usize, id: Id) {
        self.by_handle.insert(handle, id);
    }

    pub fn destroy(&mut self, id: Id) {
        if let Some(pool) = self.pool(id) {
            pool.is_destroyed = true;
        }
    }

    /// The pool that owns the memory at an address.
    pub fn owner(&self, address: CUdeviceptr) -> Option<Id> {
        let (start, (bytes, id)) = self.owners.range(..=address).next_back()?;
        (address - start < *bytes).then_some(*id)
    }

    /// The pool of an allocation that begins at an address.
    pub fn pool_of_allocation(&mut self, address: CUdeviceptr) -> Option<(Id, &mut Pool)> {
        let id = self.owner(address)?;
        let pool = self.by_id.get_mut(&id)?;
        pool.heap.is_used(address).then_some((id, pool))
    }

    pub fn ids(&self, is_meant: impl Fn(&Pool) -> bool) -> Vec<Id> {
        self.by_id.iter().filter(|(_, pool)| is_meant(pool)).map(|(id, _)| *id).collect()
    }

    pub fn take(&mut self, id: Id, bytes: u64, stream: StreamId) -> Option<CUdeviceptr> {
        self.pool(id)?.take(bytes, stream)
    }

    /// Reserves bytes for a new segment; returns its access rights and their version.
    pub fn begin_growth(&mut self, id: Id, bytes: u64) -> Option<(c_int, Vec<Access>, u64)> {
        let pool = self.pool(id)?;
        let reserved_bytes = pool.reserved.current_bytes.checked_add(bytes)?;
        if pool.most_bytes != 0 && reserved_bytes > pool.most_bytes {
            return None;
        }
        pool.reserved.current_bytes = reserved_bytes;
        Some((pool.device, pool.access.clone(), pool.access_changes))
    }

    pub fn growth_failed(&mut self, id: Id, bytes: u64) {
        if let Some(pool) = self.pool(id) {
            pool.reserved.current_bytes -= bytes;
        }
    }

    /// Adds a segment, unless who may access the pool has changed since its growth began: the new list then.
    pub fn add_segment(
        &mut self,
        id: Id,
        start: u64,
        bytes: u64,
        changes: u64,
    ) -> Result<(), (Vec<Access>, u64)> {
        let Some(pool) = self.by_id.get_mut(&id) else { return Ok(()) };
        if pool.access_changes != changes {
            return Err((pool.access.clone(), pool.access_changes));
        }
        pool.reserved.set(pool.reserved.current_bytes);
        pool.heap.add_segment(start, bytes);
        self.owners.insert(start, (bytes, id));
        Ok(())
    }

    /// Removes an unused segment, if the pool has more memory than it is to keep.
    pub fn remove_empty_segment(&mut self, id: Id, keep_bytes: u64) -> Option<Removed> {
        let pool = self.by_id.get_mut(&id)?;
        let is_kept = pool.is_exported && !pool.is_destroyed;
        if is_kept || pool.reserved.current_bytes <= keep_bytes {
            return None;
        }
        let (start, bytes) = pool.heap.remove_empty_segment()?;
        pool.reserved.current_bytes -= bytes;
        pool.leaving += 1;
        self.owners.remove(&start);
        Some(Removed { start, bytes, access_changes: pool.access_changes })
    }

    /// The driver has taken a removed segment back.
    pub fn has_left(&mut self, id: Id) {
        if let Some(pool) = self.pool(id) {
            pool.leaving -= 1;
        }
    }

    /// Accounts again for a segment that the driver has refused to take back.
    pub fn comes_back(&mut self, id: Id, bytes: u64) {
        if let Some(pool) = self.pool(id) {
            pool.leaving -= 1;
            pool.reserved.current_bytes += bytes;
        }
    }

    /// Removes a pool that is destroyed and has no memory left. It must be dropped without the lock, since that calls
    /// the driver.
    pub fn remove_if_done(&mut self, id: Id) -> Option<Pool> {
        let is_done =
            |pool: &Pool| pool.is_destroyed && pool.reserved.current_bytes == 0 && pool.leaving == 0;
        let is_done = self.by_id.get(&id).is_some_and(is_done);
        is_done.then(|| self.by_id.remove(&id))?
    }

    /// Where memory is that a stream could have if it waited, what it would have to wait for, and the events for that.
    pub fn find_run(&mut self, id: Id, bytes: u64, stream: StreamId) -> Option<(Run, Vec<Arc<Event>>)> {
        let pool = self.pool(id)?;
        let run = pool.heap.find_run(bytes, stream)?;
        let events = run.after.iter().flat_map(|(other, moment)| pool.events_until(*other, *moment));
        let events = events.collect();
        Some((run, events))
    }

    /// Takes memory for a stream that has waited for these frees; `None` if what is free now takes others.
    pub fn take_run(
        &mut self,
        id: Id,
        bytes: u64,
        stream: StreamId,
        waited_for: &BTreeMap<StreamId, Moment>,
    ) -> Option<CUdeviceptr> {
        let pool = self.pool(id)?;
        let run = pool.heap.find_run(bytes, stream)?;
        let has_waited = run
            .after
            .iter()
            .all(|(other, moment)| waited_for.get(other).is_some_and(|until| moment <= until));
        let address = if has_waited { pool.heap.take_run(&run, bytes) } else { None };
        pool.used.set(pool.heap.used_bytes);
        address
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exported_pool_keeps_its_segments_until_its_end() {
        const BYTES: u64 = 2 << 20;
        let mut pools = Pools::default();
        let id = pools.add(7, 0, 0);
        let (_, _, changes) = pools.begin_growth(id, BYTES).unwrap();
        assert!(pools.add_segment(id, BYTES, BYTES, changes).is_ok());
        pools.pool(id).unwrap().is_exported = true;
        assert!(pools.remove_empty_segment(id, 0).is_none());
        pools.destroy(id);
        assert!(pools.remove_empty_segment(id, 0).is_some());
    }

    #[test]
    fn what_the_driver_does_not_take_is_the_pools_again() {
        const BYTES: u64 = 2 << 20;
        let mut pools = Pools::default();
        let id = pools.add(7, 0, BYTES);
        let (_, _, changes) = pools.begin_growth(id, BYTES).unwrap();
        assert!(pools.add_segment(id, BYTES, BYTES, changes).is_ok());
        let removed = pools.remove_empty_segment(id, 0).unwrap();
        assert!(pools.owner(BYTES).is_none() && pools.take(id, 512, 1).is_none());
        pools.destroy(id);
        assert!(pools.remove_if_done(id).is_none(), "it may come back");
        pools.comes_back(id, removed.bytes);
        assert!(pools.add_segment(id, removed.start, removed.bytes, removed.access_changes).is_ok());
        assert_eq!((pools.owner(BYTES), pools.pool(id).unwrap().reserved.current_bytes), (Some(id), BYTES));
        assert_eq!(pools.take(id, 512, 1), Some(BYTES));
        assert!(pools.pool(id).unwrap().free(BYTES, None));
        assert!(pools.remove_empty_segment(id, 0).is_some());
        pools.has_left(id);
        assert!(pools.remove_if_done(id).is_some());
    }
}
