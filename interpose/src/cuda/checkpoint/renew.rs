//! Replaces memory that has come back by descriptors.
//!
//! The driver does not export memory that it has imported, not even in the process that created it (seen with
//! 580.159.04). Parked memory could so be neither parked nor shared again. It is replaced by new memory of the same
//! content: a copy on the device, which is fast. There has to be room for one of the allocations beside all others.

use cuda_abi::types::{CUcontext, CUmemGenericAllocationHandle};

use super::pinned_mirror::contexts_of_devices;
use crate::cuda::context;
use crate::cuda::driver::{self, DriverError, check};
use crate::cuda::memory::offload::{self, AllocationInfo, MappedView};
use crate::cuda::memory::physical::{self, Id, Source, registry};
use cuda_abi::layout::Properties;

/// Replaces the physical allocations, which are imported and not mapped. One that cannot be replaced stays as it is: the
/// next checkpoint copies it back.
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
        let view = |handle| AllocationInfo { id, bytes, device, handle, address: None };
        if let Some(new) = replaced(context.context, &properties, view, old) {
            offload::note(id, |allocation| allocation.handle = new);
            release(old);
        }
    }
}

/// New memory with the content of the old; `None` if there is no room, or the driver refuses.
fn replaced(
    context: CUcontext,
    properties: &Properties,
    view: impl Fn(CUmemGenericAllocationHandle) -> AllocationInfo,
    old: CUmemGenericAllocationHandle,
) -> Option<CUmemGenericAllocationHandle> {
    let new = physical::create_handle(view(old).bytes, properties).ok()?;
    match driver::retry(|| copy(context, &view(old), &view(new))) {
        Ok(()) => Some(new),
        Err(_) => {
            release(new);
            None
        }
    }
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
