//! Everything that this process knows about memory, behind one lock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use super::alloc::Block;
use super::heap::Heap;
use super::managed::Advice;
use super::multicast::Binding;
use super::pool::Pools;
use super::segment::Segment;
use super::space::{Mapping, Reserved, Right, Target};
use super::vmm::Handle;

/// Read for every look-up of an address. It is not held while work is waited for, nor while calls of other
/// areas run.
pub(super) static STATE: RwLock<State> = RwLock::new(State::new());

pub(super) struct State {
    /// The page table: what is behind an address now. Entries do not overlap.
    pub(super) mappings: BTreeMap<u64, Mapping>,
    /// What programs have allocated, but for the VMM calls. Entries do not overlap.
    pub(super) allocations: BTreeMap<u64, Allocation>,
    /// Allocations of contexts that cuMemFreeAsync has been called for, until its place in the order comes.
    pub(super) freed_in_order: BTreeMap<u64, Allocation>,
    /// What allocations of contexts lie in.
    pub(super) blocks: BTreeMap<u64, Block>,
    /// The free parts of each context's blocks for small allocations.
    pub(super) heaps: BTreeMap<usize, Heap>,
    pub(super) pools: Pools,
    /// Ranges of cuMemAddressReserve.
    pub(super) reservations: BTreeMap<u64, Reserved>,
    /// Handles of cuMemCreate and its kin.
    pub(super) handles: BTreeMap<u64, Handle>,
    /// What this process has bound to multicast objects, and not unbound.
    pub(super) bindings: Vec<Binding>,
    /// Peer access: (context, the context whose memory it may access) to their devices.
    pub(super) peers: BTreeMap<(usize, usize), (i32, i32)>,
    /// What the driver takes for each context (`SIMCUDA_CONTEXT_MEMORY`).
    pub(super) contexts: BTreeMap<usize, Arc<Segment>>,
}

/// Memory that an allocating call gave, or that was registered or opened.
#[derive(Clone)]
pub(super) struct Allocation {
    /// As it was asked for.
    pub(super) size_bytes: u64,
    /// Unlike addresses, never the same twice (`CU_POINTER_ATTRIBUTE_BUFFER_ID`).
    pub(super) id: u64,
    /// Handle of the context that it was allocated in; it is freed with the context unless it belongs to a pool.
    pub(super) context: usize,
    /// The device that the memory is on, or the context's.
    pub(super) device: i32,
    pub(super) kind: AllocationKind,
    pub(super) sync_memops: bool,
    /// An IPC handle or the like was made of it, and another process may use it.
    pub(super) is_exported: bool,
}

/// What call an allocation comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AllocationKind {
    Device,
    /// A module's variable.
    Internal,
    Pool {
        pool: usize,
    },
    Host {
        flags: u32,
    },
    Registered {
        flags: u32,
    },
    Managed(Advice),
    /// An allocation of another process's pool, from cuMemPoolImportPointer.
    PoolImport {
        pool: usize,
    },
    /// An IPC handle, opened so many times.
    Imported {
        opened: u32,
    },
}

impl Allocation {
    pub(super) fn new(size_bytes: u64, context: usize, device: i32, kind: AllocationKind) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            size_bytes,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            context,
            device,
            kind,
            sync_memops: false,
            is_exported: false,
        }
    }

    /// Whether it is pinned host memory.
    pub(super) fn is_host(&self) -> bool {
        matches!(self.kind, AllocationKind::Host { .. } | AllocationKind::Registered { .. })
    }

    /// Whether the memory is on the device.
    pub(super) fn is_device(&self) -> bool {
        !self.is_host() && !matches!(self.kind, AllocationKind::Managed(_))
    }
}

impl State {
    const fn new() -> Self {
        Self {
            mappings: BTreeMap::new(),
            allocations: BTreeMap::new(),
            freed_in_order: BTreeMap::new(),
            blocks: BTreeMap::new(),
            heaps: BTreeMap::new(),
            pools: Pools::new(),
            reservations: BTreeMap::new(),
            handles: BTreeMap::new(),
            bindings: Vec::new(),
            peers: BTreeMap::new(),
            contexts: BTreeMap::new(),
        }
    }

    /// The mapping around an address, and where it starts.
    pub(super) fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.len).then_some((start, mapping))
    }

    /// The allocation around an address, and where it starts.
    pub(super) fn allocation_at(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (&start, allocation) = self.allocations.range(..=address).next_back()?;
        (address - start < allocation.size_bytes).then_some((start, allocation))
    }

    /// An allocation that shares a byte with the range.
    pub(super) fn allocation_in(&self, start: u64, len: u64) -> Option<&Allocation> {
        let around = self.allocation_at(start).map(|(_, allocation)| allocation);
        around.or_else(|| {
            self.allocations.range(start..start.saturating_add(len)).next().map(|(_, allocation)| allocation)
        })
    }

    /// Whether device `ordinal` may access memory of context-bound allocations on `device`.
    pub(super) fn is_owner_or_peer(&self, ordinal: i32, device: i32) -> bool {
        ordinal == device || self.peers.values().any(|pair| *pair == (ordinal, device))
    }

    /// Whether device `ordinal` may access an allocation.
    pub(super) fn can_access(&self, allocation: &Allocation, ordinal: i32) -> bool {
        match allocation.kind {
            AllocationKind::Pool { pool } | AllocationKind::PoolImport { pool } => {
                self.pools.right(pool, ordinal) > Right::None
            }
            _ if allocation.is_device() => self.is_owner_or_peer(ordinal, allocation.device),
            _ => true,
        }
    }

    /// What device `ordinal` may do with a mapping.
    pub(super) fn right(&self, mapping: &Mapping, ordinal: i32) -> Right {
        mapping.access.of(ordinal, || match &mapping.target {
            Target::Device { segment, .. } => {
                segment.location.device().is_none_or(|device| self.is_owner_or_peer(ordinal, device))
            }
            Target::Host(_) | Target::Multicast(_) => true,
        })
    }
}
