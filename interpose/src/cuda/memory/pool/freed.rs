//! Memory of cuMemAlloc, and of imported pools, that was freed in stream order: it is given back once that free has
//! happened.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use cuda_abi::types::{CUcontext, CUdeviceptr, CUresult, CUstream};

use super::super::arena::{self, Allocation};
use super::super::ipc::pools;
use super::events::{self, Event};
use super::state::IS_TRIM_DUE;
use super::stream;
use crate::cuda::driver;
use crate::cuda::result::{INVALID_VALUE, SUCCESS};
use crate::cuda::shared::Shared;

enum Memory {
    Allocated(Allocation),
    Imported(pools::Freed),
}

impl Memory {
    fn give_back(self) {
        match self {
            Self::Allocated(allocation) => arena::reclaim(&allocation),
            Self::Imported(freed) => freed.give_back(),
        }
    }
}

struct Freed {
    memory: Memory,
    event: Arc<Event>,
}

/// Oldest first.
static FREED: Shared<VecDeque<Freed>> = Shared::new(VecDeque::new());

fn find(address: CUdeviceptr) -> Option<Allocation> {
    arena::find(address).filter(|found| found.address == address)
}

/// Whether an allocation of the arena, or of an imported pool, begins at an address.
pub(super) fn is_allocation(address: CUdeviceptr) -> bool {
    find(address).is_some() || pools::is_allocation(address)
}

/// Frees an allocation of the arena, or of an imported pool, in a stream's order; `None` if none begins there.
pub(super) fn free(address: CUdeviceptr, stream: CUstream) -> Option<CUresult> {
    let found = find(address);
    if found.is_none() && !pools::is_allocation(address) {
        return None;
    }
    let recorded = stream::context(stream).and_then(|context| events::record(stream, context));
    if recorded.is_none() {
        // SAFETY: the stream is that of our caller's caller; what is none is an error and not more.
        let waited = unsafe { driver::cuStreamSynchronize(stream) };
        if waited != SUCCESS {
            return Some(waited);
        }
    }
    // From now on it cannot be freed again, whenever the free happens.
    let taken = match found {
        Some(found) => arena::take(address, found.id).map(Memory::Allocated),
        None => pools::free(address).map(Memory::Imported),
    };
    let Some(memory) = taken else { return Some(INVALID_VALUE) };
    match recorded {
        Some(event) => {
            FREED.lock().push_back(Freed { memory, event: Arc::new(event) });
            IS_TRIM_DUE.store(true, Relaxed);
            // Keeps them from accumulating in programs that never synchronise.
            while reclaim_oldest() {}
        }
        None => memory.give_back(),
    }
    Some(SUCCESS)
}

/// Gives the oldest back if its free has happened; whether it has.
fn reclaim_oldest() -> bool {
    let oldest = FREED.lock().front().map(|freed| Arc::clone(&freed.event));
    let Some(event) = oldest.filter(|event| event.has_happened()) else { return false };
    let mut freed = FREED.lock();
    // Another thread may have been faster.
    let is_same = freed.front().is_some_and(|freed| Arc::ptr_eq(&freed.event, &event));
    let done = if is_same { freed.pop_front() } else { None };
    drop(freed);
    // The last owner of an event gives it back.
    drop(event);
    done.map(give_back).is_some()
}

/// Gives back what has been freed by now; whether anything is left.
pub(super) fn reclaim() -> bool {
    // Memory that other threads free meanwhile is polled by them.
    let all = std::mem::take(&mut *FREED.lock());
    let (done, left): (VecDeque<_>, VecDeque<_>) =
        all.into_iter().partition(|freed| freed.event.has_happened());
    done.into_iter().for_each(give_back);
    let mut freed = FREED.lock();
    freed.extend(left);
    !freed.is_empty()
}

/// All work has ended.
pub(super) fn settle() {
    let all = std::mem::take(&mut *FREED.lock());
    all.into_iter().for_each(give_back);
}

/// A context was removed, with our events.
pub(super) fn context_removed(context: CUcontext) {
    let freed = FREED.lock();
    freed
        .iter()
        .filter(|freed| freed.event.is_of(context))
        .for_each(|freed| freed.event.removed_with_context());
}

fn give_back(freed: Freed) {
    freed.memory.give_back();
    events::give_back([freed.event]);
}
