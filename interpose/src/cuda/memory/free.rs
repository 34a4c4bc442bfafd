//! cuMemFree, which frees what the arena, a pool or the driver itself has allocated.

use cuda_abi::types::{CUcontext, CUdeviceptr, CUresult};

use super::{arena, ipc, pool};
use crate::cuda::activation::is_started;
use crate::cuda::context;
use crate::cuda::handler::handlers;
use crate::cuda::objects::{self, ObjectKind};
use crate::cuda::result::{INVALID_VALUE, SUCCESS};

/// Frees memory that is not ours.
fn free_foreign(address: CUdeviceptr, free: impl FnOnce() -> CUresult) -> CUresult {
    objects::destroyed(ObjectKind::ForeignMemory, address as usize, free)
}

/// Frees an allocation of another process's pool, which is unmapped at once.
fn free_imported(address: CUdeviceptr) -> CUresult {
    let result = arena::synchronize();
    if result != SUCCESS {
        return result;
    }
    let Some(freed) = ipc::pools::free(address) else { return INVALID_VALUE };
    freed.give_back();
    SUCCESS
}

handlers! {
    fn cuMemFree_v2(address: CUdeviceptr) |call| {
        let starts_here = |found: &arena::Allocation| found.address == address;
        let found = if is_started() { arena::find(address).filter(starts_here) } else { None };
        // Without a usable context the driver has an error of its own for any address.
        let Some((found, (current, _))) = found.and_then(|found| Some((found, context::current()?))) else {
            let is_of_pool = is_started() && pool::is_allocation(address) && context::current().is_some();
            if is_of_pool && pool::free_synchronously(address) {
                return SUCCESS;
            }
            if is_started() && ipc::pools::is_allocation(address) && context::current().is_some() {
                return free_imported(address);
            }
            return free_foreign(address, call);
        };
        let result = if found.context == current as usize {
            arena::synchronize()
        } else {
            let its_context = found.context as CUcontext;
            context::within(its_context, arena::synchronize).unwrap_or_else(|_| arena::synchronize())
        };
        if result != SUCCESS {
            return result;
        }
        let Some(taken) = arena::take(address, found.id) else {
            // Another thread was faster. To the driver the address is none that it gave.
            return free_foreign(address, call);
        };
        arena::reclaim(&taken);
        SUCCESS
    }
}
