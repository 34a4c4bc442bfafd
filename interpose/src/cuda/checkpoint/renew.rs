//! Replaces memory that has come back by descriptors.
//!
//! The driver does not export memory that it has imported, not even in the process that created it (seen with
//! 580.159.04). Parked memory could therefore be neither parked nor shared again. It is replaced by new memory of the same
//! content: a copy on the device, which is fast. There has to be room for one of the allocations beside all others.
//!
//! Large memory of the host is left as it is: the copy goes over the bus twice, and the machine may lack room for it.

use cuda_abi::types::{CUcontext, CUmemGenericAllocationHandle};

use super::pinned_mirror::contexts_of_devices;
use crate::cuda::context;
use crate::cuda::driver::{self, DriverError, check};
use crate::cuda::memory::offload::{self, AllocationInfo, MappedView};
use crate::cuda::memory::physical::{self, Id, Source, registry};

/// What stays free beside a copy, in bytes: another process may be restored at this moment, and a restore that finds no
/// room for its contexts makes that process unusable. A context takes 0.55 GB of an H200.
const MARGIN_BYTES: usize = 1 << 30;
/// The margin is at most this part of a device.
const MARGIN_PART: usize = 16;

/// Memory of the host is replaced up to this size. NCCL's buffers there have a few MiB.
const MOST_OF_HOST_BYTES: u64 = 64 << 20;

/// Replaces the physical allocations, which are imported and not mapped. One that cannot be replaced stays as it is: the
/// next checkpoint copies it back. After a failed copy no other is tried: the job is paused meanwhile.
pub(super) fn renew(ids: &[Id]) {
    let imported: Vec<_> = {
        let registry = registry();
        ids.iter()
            .filter_map(|id| {
                let allocation = registry.allocations.get(id)?;
                let Source::Created(properties) = allocation.source else { return None };
                Some((*id, allocation.handle, allocation.bytes, allocation.device, properties))
            })
            .collect()
    };
    let contexts = contexts_of_devices(imported.iter().map(|(.., device, _)| *device));
    for (id, old, bytes, device, properties) in imported {
        let Some(context) = contexts.get(&device) else { continue };
        let has_room = if properties.is_of_host() {
            bytes <= MOST_OF_HOST_BYTES
        } else {
            has_room(context.context, bytes)
        };
        if !has_room {
            continue;
        }
        let Ok(new) = physical::create_handle(bytes, &properties) else { continue };
        let view = |handle| AllocationInfo { id, bytes, device, handle, address: None };
        if driver::retry(|| copy(context.context, &view(old), &view(new))).is_err() {
            release(new);
            return;
        }
        offload::note(id, |allocation| allocation.handle = new);
        release(old);
    }
}

/// Whether the device has room for so many bytes more, and the margin.
fn has_room(context: CUcontext, bytes: u64) -> bool {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the call writes to local variables.
    let asked =
        context::within(context, || unsafe { driver::cuMemGetInfo_v2(&raw mut free, &raw mut total) });
    let margin_bytes = MARGIN_BYTES.min(total / MARGIN_PART);
    asked.is_ok_and(|result| check("cuMemGetInfo", result).is_ok())
        && (free as u64) >= bytes.saturating_add(margin_bytes as u64)
}

fn copy(context: CUcontext, from: &AllocationInfo, to: &AllocationInfo) -> Result<(), DriverError> {
    let (source, target) = (MappedView::of(from)?, MappedView::of(to)?);
    let copied = context::within(context, || {
        // SAFETY: both are mappings of so many bytes, and nobody else uses them.
        let copied = unsafe { driver::cuMemcpyDtoD_v2(target.address, source.address, from.bytes as usize) };
        check("cuMemcpyDtoD", copied)?;
        // The copy uses both mappings until it is over.
        driver::retry(|| {
            // SAFETY: the call has no parameters.
            check("cuCtxSynchronize", unsafe { driver::cuCtxSynchronize() })
        })
    });
    copied.unwrap_or_else(|result| Err(DriverError::new("cuCtxPushCurrent", result)))
}

/// There is nothing to do about a failure: the memory stays on the device.
fn release(handle: CUmemGenericAllocationHandle) {
    let _ = driver::retry(|| {
        // SAFETY: the handle is ours, and no longer used.
        driver::checked(unsafe { driver::cuMemRelease(handle) })
    });
}
