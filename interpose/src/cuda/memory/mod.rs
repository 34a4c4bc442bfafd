//! Device memory.
//!
//! | module | does |
//! |---|---|
//! | `arena` | allocations of cuMemAlloc and its variants |
//! | `pool` | stream-ordered allocations (cuMemAllocAsync) |
//! | `vmm` | programs that manage virtual memory themselves (cuMemCreate, cuMemMap) |
//! | `graph` | memory that graphs allocate, which the driver serves |
//! | `ipc` | memory shared between processes |
//! | `multicast` | multicast objects: calls, and how they go down and come back |
//! | `free` | cuMemFree, for memory of all of these |
//! | `reclaim` | gives unused memory back before an allocation fails |
//! | `attributes` | attributes of a pointer |
//! | `block`, `slab`, `heap` | physical memory with its own addresses, and small parts of it |
//! | `device`, `peer` | properties of a device; access of one device to another's memory |
//! | `physical` | the registry of physical allocations, their mappings and access rights |
//! | `reservations` | address ranges that the program has reserved |
//! | `placement` | the offset of each physical allocation in the launcher's mirror |
//! | `host_access` | keeps the program's threads from memory of the host while it is away |
//! | `offload` | takes physical allocations off the device and brings them back |
//! | `backtrace` | the program's call stacks at each allocation |
//! | `error` | why memory cannot be offloaded or restored |
//! | `report` | what a checkpoint reports of device memory |

pub(crate) mod arena;
pub(crate) mod attributes;
pub(crate) mod backtrace;
pub(crate) mod block;
pub(crate) mod device;
mod error;
pub(crate) mod free;
pub(crate) mod graph;
mod heap;
pub(crate) mod host_access;
pub(crate) mod ipc;
pub(crate) mod multicast;
pub(crate) mod offload;
pub(crate) mod peer;
pub(crate) mod physical;
pub(crate) mod placement;
pub(crate) mod pool;
mod reclaim;
pub(crate) mod report;
pub(crate) mod reservations;
mod slab;
pub(crate) mod vmm;

use ckpt_protocol::agent::Counts;
use cuda_abi::types::CUcontext;
pub use error::MemoryError;
pub use host_access::HostAccessError;

use super::capture;

/// Registers this module with the modules below it, and reads the environment: from the constructor only.
pub(crate) fn activate() {
    reclaim::register(|device| {
        let is_freed = arena::trim(device) | pool::give_back_unused(device) | ipc::descriptors::sweep();
        is_freed | ipc::published::send_late()
    });
    physical::register(ipc::descriptors::ended);
    backtrace::activate();
}

/// A context was removed or reset: the program's memory in it is freed.
pub(crate) fn context_removed(context: CUcontext) {
    arena::context_removed(context);
    pool::context_removed(context);
    ipc::context_removed(context);
    peer::context_removed(context);
    capture::forget(context);
}

/// In the child of a fork.
pub(crate) fn after_fork_in_child() {
    ipc::descriptors::after_fork_in_child();
    multicast::after_fork_in_child();
    host_access::after_fork_in_child();
}

/// Adds the program's allocations to the counts.
pub(crate) fn counts(counts: Counts) -> Counts {
    Counts { allocations: arena::count() + pool::count(), ..counts }
}
