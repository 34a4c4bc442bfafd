//! Copies all device memory that has an offset in the mirror to the mirror, and back.

use std::ops::Range;

use ckpt_protocol::agent::{Region, RegionFlags};

use super::error::{AttachError, DetachError};
use super::pinned_mirror::contexts_of_devices;
use crate::cuda::capture::{self, Mirror};
use crate::cuda::memory::offload::{AllocationInfo, MappedView};
use crate::cuda::memory::physical::{Id, PhysicalAllocation, registry};
use crate::cuda::memory::placement;

/// What a capture has copied.
pub(super) struct Captured {
    pub regions: Vec<Region>,
    /// The ranges of the mirror that were written.
    pub written: Vec<Range<u64>>,
}

/// Copies the memory that has changed to the mirror.
pub(super) fn capture(mirror: &mut Mirror) -> Result<Captured, DetachError> {
    let seen = place(mirror.bytes());
    let contexts = contexts_of_devices(seen.iter().map(|(seen, _)| seen.device));
    let mut views = Vec::with_capacity(seen.len());
    let mut allocations = Vec::with_capacity(seen.len());
    for (seen, offset) in &seen {
        let device = seen.device;
        let context = contexts.get(&device).ok_or(DetachError::NoContext { device })?;
        let view = MappedView::of(seen)?;
        allocations.push(capture::MappedAllocation {
            context: context.context,
            address: view.address,
            bytes: seen.bytes,
            offset: *offset,
            hashes: take_hashes(seen.id),
        });
        views.push(view);
    }
    let written = mirror.capture(&mut allocations)?;
    drop(views);
    let mut regions = note_captured(&seen, allocations, &written);
    regions.sort_by_key(|region| region.address);
    Ok(Captured { regions, written: capture::joined(written.into_iter().flatten().collect()) })
}

/// Gives each physical allocation an offset in the mirror; returns those that are to be captured.
fn place(mirror_bytes: u64) -> Vec<(AllocationInfo, u64)> {
    let mut registry = registry();
    placement::place(&mut registry);
    let of = |(id, allocation): (&Id, &PhysicalAllocation)| {
        let offset = allocation.mirrored.offset.filter(|offset| offset + allocation.bytes <= mirror_bytes)?;
        placement::is_captured(allocation).then(|| (AllocationInfo::of(*id, allocation, false), offset))
    };
    registry.allocations.iter().filter_map(of).collect()
}

/// The hashes of what the mirror has of a physical allocation. The registry has none meanwhile, even if the capture
/// fails.
fn take_hashes(id: Id) -> Vec<[u64; 2]> {
    registry()
        .allocations
        .get_mut(&id)
        .map_or_else(Vec::new, |allocation| std::mem::take(&mut allocation.mirrored.hashes))
}

/// Stores the new hashes in the registry and describes each region for the report.
fn note_captured(
    seen: &[(AllocationInfo, u64)],
    allocations: Vec<capture::MappedAllocation>,
    written: &[Vec<Range<u64>>],
) -> Vec<Region> {
    let mut registry = registry();
    let mut regions = Vec::with_capacity(seen.len());
    for (((seen, offset), allocation), written) in seen.iter().zip(allocations).zip(written) {
        let Some(known) = registry.allocations.get_mut(&seen.id) else { continue };
        // Memory without hashes was copied whole.
        let changed_bytes = written.iter().map(|range| range.end - range.start).sum();
        let changed_bytes = (!allocation.hashes.is_empty()).then_some(changed_bytes);
        known.mirrored.hashes = allocation.hashes;
        regions.push(Region {
            address: known.mappings.first().map_or(0, |mapping| mapping.address),
            bytes: seen.bytes,
            device: seen.device,
            kind: known.kind,
            allocations: 0,
            offset: *offset,
            changed_bytes,
            flags: RegionFlags::default(),
            origin: None,
        });
    }
    regions
}

/// The physical allocations that are taken off the device: those that the mirror has, and those of other processes.
pub(super) fn leaving(mirror_bytes: u64) -> Vec<Id> {
    let registry = registry();
    let is_leaving = |allocation: &PhysicalAllocation| {
        !placement::is_captured(allocation)
            || allocation.mirrored.offset.is_some_and(|offset| offset + allocation.bytes <= mirror_bytes)
    };
    registry.allocations.iter().filter(|(_, allocation)| is_leaving(allocation)).map(|(id, _)| *id).collect()
}

/// Copies physical allocations back to their devices; returns how many bytes.
pub(super) fn copy_back(mirror: Option<&mut Mirror>, ids: &[Id]) -> Result<u64, AttachError> {
    let seen: Vec<(AllocationInfo, Option<u64>)> = {
        let registry = registry();
        let of = |id: &Id| {
            registry
                .allocations
                .get(id)
                .map(|allocation| (AllocationInfo::of(*id, allocation, true), allocation.mirrored.offset))
        };
        ids.iter().filter_map(of).collect()
    };
    if seen.is_empty() {
        return Ok(0);
    }
    let mirror = mirror.ok_or(AttachError::MirrorMissing)?;
    let contexts = contexts_of_devices(seen.iter().map(|(seen, _)| seen.device));
    let mut views = Vec::with_capacity(seen.len());
    let mut allocations = Vec::with_capacity(seen.len());
    for (seen, offset) in &seen {
        let device = seen.device;
        let context = contexts.get(&device).ok_or(AttachError::NoContext { device })?;
        let view = MappedView::of(seen)?;
        allocations.push(capture::MappedAllocation {
            context: context.context,
            address: view.address,
            bytes: seen.bytes,
            offset: offset.ok_or(AttachError::NoOffset)?,
            hashes: Vec::new(),
        });
        views.push(view);
    }
    mirror.copy_back(&allocations)?;
    Ok(allocations.iter().map(|allocation| allocation.bytes).sum())
}
