//! Taking the process's memory off its devices for a checkpoint, and back.

use std::sync::Arc;

use cuda_abi::sys::CUresult;

use super::segment::Segment;
use super::space::{Access, Reserved, Right, Target, show_to_host};
use super::state::{Allocation, AllocationKind, STATE, State};
use crate::error::Result;
use crate::process;

impl State {
    /// Every segment that is referred to by anything, once.
    fn segments(&self) -> Vec<Arc<Segment>> {
        let mapped = self.mappings.values().filter_map(|mapping| mapping.target.segment());
        let of_handles = self.handles.values().filter_map(|handle| handle.segment());
        let of_pools = self.pools.chunks().map(|chunk| &chunk.segment);
        let mut segments: Vec<_> =
            mapped.chain(of_handles).chain(of_pools).chain(self.contexts.values()).cloned().collect();
        segments.sort_unstable_by_key(|segment| Arc::as_ptr(segment) as usize);
        segments.dedup_by(|a, b| Arc::ptr_eq(a, b));
        segments
    }

    /// Maps what the host may access at the addresses that it knows.
    fn show_all_to_host(&self) -> Result {
        for (start, mapping) in &self.mappings {
            if let (Target::Device { segment, .. }, Access::Devices(rights)) =
                (&mapping.target, mapping.access)
                && rights.host != Right::None
            {
                show_to_host(*start, mapping.len, segment, rights.host)?;
            }
        }
        Ok(())
    }

    fn ranges(&self) -> impl Iterator<Item = &Reserved> {
        let of_blocks = self.blocks.values().map(|block| &block.reserved);
        let of_pools = self.pools.chunks().map(|chunk| &chunk.reserved);
        of_blocks.chain(of_pools).chain(self.reservations.values())
    }

    fn any(&self, of: impl Fn(&Allocation) -> bool) -> bool {
        self.allocations.values().chain(self.freed_in_order.values()).any(of)
    }

    /// Whether something is alive that the driver's checkpoint cannot take away: managed memory, or memory
    /// of another process. An exported descriptor is no obstacle.
    fn cannot_detach(&self, is_as_seen: bool) -> bool {
        let is_obstacle = |allocation: &Allocation| {
            allocation.is_exported && !is_as_seen
                || matches!(allocation.kind, AllocationKind::Managed(_) | AllocationKind::Imported { .. })
        };
        // A pool as such is treated like the memory in it; what the driver does is not known.
        self.pools.is_any_shared()
            || self.any(is_obstacle)
            || self.segments().iter().any(|segment| segment.is_imported)
    }

    /// What the restore will fail with, if the driver takes something away that it does not bring back (seen with
    /// 580.159.04): memory that another process has opened by CUDA IPC, here all for which there is a handle, and memory of
    /// the host from cuMemCreate, here also where it is not mapped.
    fn doom(&self) -> Option<CUresult> {
        if self.any(|allocation| allocation.is_exported) {
            return Some(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let has_host_memory = self.segments().iter().any(|segment| segment.location.device().is_none());
        has_host_memory.then_some(CUresult::CUDA_ERROR_UNKNOWN)
    }
}

/// Whether there is managed memory.
pub(crate) fn has_managed() -> bool {
    STATE.read().any(|allocation| matches!(allocation.kind, AllocationKind::Managed(_)))
}

/// Takes all device memory of the process off the devices: contents go to host memory, mappings are unmapped until
/// [`attach`]. So are the address ranges themselves, or placeholders lie there: release 580 was seen to keep them. All work
/// must be done, and calls locked out. Returns what the restore has to fail with.
///
/// # Errors
/// `CUDA_ERROR_NOT_SUPPORTED` for live IPC or managed memory, `CUDA_ERROR_OUT_OF_MEMORY` if the host has too
/// little; everything is as before then.
pub(crate) fn detach() -> Result<Option<CUresult>> {
    let is_as_seen = process::release()?.is_as_seen();
    let state = STATE.write();
    if state.cannot_detach(is_as_seen) {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    let segments = state.segments();
    let saved: Vec<_> = segments.iter().map(|segment| segment.save()).collect::<Result<_>>()?;
    // The host's view of a segment is a hold on it, which goes with the range.
    match is_as_seen {
        true => state.ranges().try_for_each(Reserved::hold_place)?,
        false => state.ranges().for_each(Reserved::open_hole),
    }
    for (segment, saved) in segments.iter().zip(saved) {
        segment.leave_device(saved);
    }
    Ok(state.doom())
}

/// Undoes [`detach`] at the same addresses, over whatever lies there now.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY` if the devices have too little free memory: the process is of no more use.
pub(crate) fn attach() -> Result {
    let state = STATE.write();
    // The ranges first, or else the kernel would place the library's own mappings there.
    state.ranges().try_for_each(Reserved::close_hole)?;
    state.segments().iter().try_for_each(|segment| segment.return_to_device())?;
    state.show_all_to_host()
}
