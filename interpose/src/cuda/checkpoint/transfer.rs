//! Copies all device memory that has an offset in the mirror to the mirror, and back; finds out how much memory the mirror
//! needs for that.

use std::collections::BTreeMap;
use std::ops::Range;

use ckpt_protocol::agent::{Region, RegionFlags};

use super::error::{AttachError, DetachError, MapError};
use super::pinned_mirror::contexts_of_devices;
use crate::cuda::capture::{self, Hash, MappedAllocation, Mirror};
use crate::cuda::context::OnDevice;
use crate::cuda::memory::ipc::published;
use crate::cuda::memory::offload::{AllocationInfo, MappedView};
use crate::cuda::memory::physical::{Id, Mirrored, PhysicalAllocation, registry};
use crate::cuda::memory::placement;
use crate::link::{Piece, describe};

/// What a capture has copied.
pub(super) struct Captured {
    pub regions: Vec<Region>,
    /// The ranges of the mirror that were written: sorted, without overlaps.
    pub written: Vec<Range<u64>>,
}

/// Physical allocations that are mapped to be copied.
pub(super) struct Mapped {
    pub allocations: Vec<MappedAllocation>,
    _views: Vec<MappedView>,
    _contexts: BTreeMap<i32, OnDevice>,
}

/// An allocation, its offset in the mirror, and the hashes of its content there.
type Placed = (AllocationInfo, u64, Vec<Hash>);

impl Mapped {
    fn of(placed: &mut [Placed]) -> Result<Self, MapError> {
        let contexts = contexts_of_devices(placed.iter().map(|(seen, ..)| seen.device));
        let (mut allocations, mut views) = (Vec::new(), Vec::new());
        for (seen, offset, hashes) in placed {
            let device = seen.device;
            let context = contexts.get(&device).ok_or(MapError::NoContext { device })?.context;
            let view = MappedView::of(seen)?;
            let (address, bytes, hashes) = (view.address, seen.bytes, std::mem::take(hashes));
            allocations.push(MappedAllocation { context, address, bytes, offset: *offset, hashes });
            views.push(view);
        }
        Ok(Self { allocations, _views: views, _contexts: contexts })
    }
}

/// Copies the memory that has changed to the mirror.
pub(super) fn capture(mirror: &mut Mirror) -> Result<Captured, DetachError> {
    let mut placed = place(mirror.bytes());
    let mut mapped = Mapped::of(&mut placed)?;
    let written = mirror.capture(&mut mapped.allocations)?;
    let mut allocations = std::mem::take(&mut mapped.allocations);
    drop(mapped);
    Ok(note_captured(&placed, &mut allocations, written))
}

/// Device memory that is to be read in pieces.
pub(super) struct Readable {
    pub captured: Captured,
    /// What does not hold zeroes only: sorted, without overlaps.
    pub used: Vec<Range<u64>>,
    mapped: Mapped,
}

impl Readable {
    /// Finds what has changed. `window` gets the pieces; `mirror_bytes` is the size of the mirror that there would be.
    ///
    /// # Errors
    /// The memory cannot be accessed.
    pub fn find(window: &mut Mirror, mirror_bytes: u64) -> Result<Self, DetachError> {
        let mut placed = place(mirror_bytes);
        let mut mapped = Mapped::of(&mut placed)?;
        let written = window.find_changed(&mut mapped.allocations);
        let used = capture::used_parts(&mapped.allocations);
        Ok(Self { captured: note_captured(&placed, &mut mapped.allocations, written), used, mapped })
    }

    /// Copies a piece to the window; returns the reason if that fails.
    pub fn read(&self, window: &mut Mirror, piece: Piece) -> Option<String> {
        window.read(&self.mapped.allocations, piece).err().map(|error| describe(&error))
    }
}

/// Hashes the physical allocations of which nothing is known: their chunks of zeroes need no memory in the mirror. Nothing
/// may run on the devices meanwhile.
pub(super) fn look() -> Result<(), DetachError> {
    let of = |(id, allocation): (&Id, &PhysicalAllocation)| {
        is_unknown(allocation).then(|| (AllocationInfo::of(*id, allocation, false), 0, Vec::new()))
    };
    let mut unknown: Vec<Placed> = registry().allocations.iter().filter_map(of).collect();
    let mapped = Mapped::of(&mut unknown)?;
    let hashes = capture::hash(&mapped.allocations)?;
    drop(mapped);
    let mut registry = registry();
    for ((seen, ..), hashes) in unknown.iter().zip(hashes) {
        if let Some(allocation) = registry.allocations.get_mut(&seen.id) {
            allocation.mirrored.seen = hashes;
        }
    }
    Ok(())
}

fn is_unknown(allocation: &PhysicalAllocation) -> bool {
    let Mirrored { hashes, seen, .. } = &allocation.mirrored;
    placement::is_captured(allocation) && hashes.is_empty() && seen.is_empty()
}

/// How much device memory there is of which nothing is known, in bytes.
pub(super) fn unknown_bytes() -> u64 {
    let registry = registry();
    let unknown = registry.allocations.values().filter(|allocation| is_unknown(allocation));
    unknown.map(|allocation| allocation.bytes).sum()
}

/// The parts of the mirror that will need memory, as far as is known. The mirror has `mirror_bytes`.
pub(super) fn used(mirror_bytes: u64) -> Vec<Range<u64>> {
    let registry = registry();
    let captured = registry.allocations.values().filter(|allocation| placement::is_captured(allocation));
    let used = captured.flat_map(|allocation| {
        let Mirrored { hashes, seen, .. } = &allocation.mirrored;
        used_by(allocation, if hashes.is_empty() { seen } else { hashes })
    });
    bounded(used.collect(), mirror_bytes)
}

/// The parts of a partial mirror that the next capture will probably write: what the last one has `written`, and memory of
/// which nothing is known. The mirror has `mirror_bytes`.
pub(super) fn expected_changes(written: &[Range<u64>], mirror_bytes: u64) -> Vec<Range<u64>> {
    let registry = registry();
    let captured = registry.allocations.values().filter(|allocation| placement::is_captured(allocation));
    let changes = captured.flat_map(|allocation| {
        let Mirrored { hashes, seen, .. } = &allocation.mirrored;
        if hashes.is_empty() {
            used_by(allocation, seen)
        } else {
            capture::within(&used_by(allocation, hashes), written)
        }
    });
    bounded(changes.collect(), mirror_bytes)
}

/// The parts of the mirror that physical allocations are copied back from.
pub(super) fn used_to_copy_back(ids: &[Id], mirror_bytes: u64) -> Vec<Range<u64>> {
    let registry = registry();
    let allocations = ids.iter().filter_map(|id| registry.allocations.get(id));
    let used = allocations.flat_map(|allocation| used_by(allocation, &allocation.mirrored.hashes));
    bounded(used.collect(), mirror_bytes)
}

fn bounded(used: Vec<Range<u64>>, mirror_bytes: u64) -> Vec<Range<u64>> {
    capture::bounded(used).into_iter().map(|range| range.start..range.end.min(mirror_bytes)).collect()
}

fn used_by(allocation: &PhysicalAllocation, hashes: &[Hash]) -> Vec<Range<u64>> {
    let Some(offset) = allocation.mirrored.offset else { return Vec::new() };
    let used = capture::used_chunks(allocation.bytes, hashes).into_iter();
    used.map(|part| offset + part.start..offset + part.end).collect()
}

/// Gives each physical allocation an offset in the mirror; returns those that are to be captured.
/// The registry has no hashes of them meanwhile, even if the capture fails.
fn place(mirror_bytes: u64) -> Vec<Placed> {
    let mut registry = registry();
    placement::place(&mut registry);
    let of = |(id, allocation): (&Id, &mut PhysicalAllocation)| {
        let offset = allocation.mirrored.offset.filter(|offset| offset + allocation.bytes <= mirror_bytes)?;
        if !placement::is_captured(allocation) {
            return None;
        }
        allocation.mirrored.seen = Vec::new();
        let hashes = std::mem::take(&mut allocation.mirrored.hashes);
        Some((AllocationInfo::of(*id, allocation, false), offset, hashes))
    };
    registry.allocations.iter_mut().filter_map(of).collect()
}

/// Stores the new hashes in the registry and describes each region for the report.
fn note_captured(
    placed: &[Placed],
    allocations: &mut [MappedAllocation],
    written: Vec<Vec<Range<u64>>>,
) -> Captured {
    let mut registry = registry();
    let mut regions = Vec::with_capacity(placed.len());
    for (((seen, offset, _), allocation), written) in placed.iter().zip(allocations).zip(&written) {
        let Some(known) = registry.allocations.get_mut(&seen.id) else { continue };
        // Memory without hashes was copied whole.
        let changed_bytes = (!allocation.hashes.is_empty()).then(|| capture::total_bytes(written));
        known.mirrored.hashes = std::mem::take(&mut allocation.hashes);
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
    regions.sort_by_key(|region| region.address);
    Captured { regions, written: capture::joined(written.into_iter().flatten().collect()) }
}

/// The physical allocations that are taken off the device: those that the mirror has, and those of other processes.
/// Multicast objects have been before.
pub(super) fn leaving(mirror_bytes: u64) -> Vec<Id> {
    let registry = registry();
    let has_room = |allocation: &PhysicalAllocation| {
        allocation.mirrored.offset.is_some_and(|offset| offset + allocation.bytes <= mirror_bytes)
    };
    let is_leaving = |allocation: &PhysicalAllocation| {
        allocation.team.is_none() && (!placement::is_captured(allocation) || has_room(allocation))
    };
    registry.allocations.iter().filter(|(_, allocation)| is_leaving(allocation)).map(|(id, _)| *id).collect()
}

/// Those of the physical allocations that are parked: what is shared with other processes the launcher has already.
pub(super) fn to_park(leaving: &[Id]) -> Vec<Id> {
    let of_this_process: Vec<Id> = {
        let registry = registry();
        let is_own = |id: &&Id| registry.allocations.get(id).is_some_and(placement::is_captured);
        leaving.iter().filter(is_own).copied().collect()
    };
    of_this_process.into_iter().filter(|id| published::key_of(*id).is_none()).collect()
}

/// Maps physical allocations that have an offset in the mirror, to be copied back.
///
/// # Errors
/// One has no offset, or they cannot be mapped.
pub(super) fn map_to_copy_back(ids: &[Id]) -> Result<Mapped, AttachError> {
    let mut placed: Vec<Placed> = {
        let registry = registry();
        let of = |id: &Id| {
            let allocation = registry.allocations.get(id)?;
            let Mirrored { offset, hashes, .. } = &allocation.mirrored;
            let offset = offset.ok_or(AttachError::NoOffset);
            Some(offset.map(|offset| (AllocationInfo::of(*id, allocation, true), offset, hashes.clone())))
        };
        ids.iter().filter_map(of).collect::<Result<_, _>>()?
    };
    Ok(Mapped::of(&mut placed)?)
}

/// Copies physical allocations back to their devices; returns how many bytes.
pub(super) fn copy_back(mirror: Option<&mut Mirror>, ids: &[Id]) -> Result<u64, AttachError> {
    if ids.is_empty() {
        return Ok(0);
    }
    let mirror = mirror.ok_or(AttachError::MirrorMissing)?;
    let mapped = map_to_copy_back(ids)?;
    Ok(mirror.copy_back(&mapped.allocations)?)
}
