//! Device memory.
//!
//! | module | does |
//! |---|---|
//! | `arena` | what the program allocates by cuMemAlloc and its kin |
//! | `attributes` | what the program can ask about an address |
//! | `block`, `slab`, `heap` | physical memory with addresses of its own, and small parts of it |
//! | `device` | what has to be known of a device |
//! | `peer` | access of one device to another's memory |
//! | `physical` | each piece of physical memory, where it is mapped, who may access it |
//! | `away` | taking it off the device, bringing it back |
//! | `placement` | where each piece is in the launcher's mirror |
//! | `graph` | room for what graphs allocate, which the driver makes |
//! | `vmm` | programs that manage virtual memory themselves |
//! | `pool` | memory that is allocated and freed in a stream's order |
//! | `ipc` | memory of one process in another |
//! | `origin` | which calls of the program's have made it |
//! | `reservations` | addresses that the program has reserved |
//! | `report` | what a checkpoint tells of it |

pub(in crate::cuda) mod arena;
pub(in crate::cuda) mod attributes;
pub(in crate::cuda) mod away;
pub(in crate::cuda) mod block;
pub(in crate::cuda) mod device;
pub(in crate::cuda) mod graph;
mod heap;
pub(in crate::cuda) mod ipc;
pub(in crate::cuda) mod origin;
pub(in crate::cuda) mod peer;
pub(in crate::cuda) mod physical;
pub(in crate::cuda) mod placement;
pub(in crate::cuda) mod pool;
pub(in crate::cuda) mod report;
pub(in crate::cuda) mod reservations;
mod slab;
pub(in crate::cuda) mod vmm;

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ckpt_protocol::agent::Counts;
use cuda_abi::layout;
use cuda_abi::types::CUcontext;

use super::capture;

/// The numbers of allocations begin here: the driver's own are small.
static LAST_NUMBER: AtomicU64 = AtomicU64::new(0x436b << 40);

/// A number for an allocation, as the driver gives each (`CU_POINTER_ATTRIBUTE_BUFFER_ID`): never the same twice in the
/// life of the process, and none that the driver would give.
fn new_number() -> u64 {
    LAST_NUMBER.fetch_add(1, Relaxed)
}

/// A context is there no more, or has been emptied: its memory is the program's no more.
pub(in crate::cuda) fn context_gone(context: CUcontext) {
    arena::context_gone(context);
    pool::context_gone(context);
    ipc::context_gone(context);
    peer::context_gone(context);
    capture::forget(context);
}

/// Adds the program's allocations to the counts.
pub(in crate::cuda) fn counts(counts: Counts) -> Counts {
    Counts { allocations: arena::count() + pool::count(), ..counts }
}

/// Gives memory back to a device that nobody uses, for somebody who needs it; whether there was any.
fn make_room(device: c_int) -> bool {
    arena::trim(device) | pool::give_back_unused(device)
}

/// All submitted work has ended.
pub(in crate::cuda) fn settle() {
    pool::settle();
}
