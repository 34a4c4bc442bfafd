//! What a checkpoint's report says of device memory, beside its location.

use std::collections::BTreeMap;

use ckpt_protocol::agent::{GpuReport, GraphMemory, Region, RegionFlags, RegionKind};
use cuda_abi::sys::{self, CUgraphMem_attribute as Attribute};
use cuda_abi::types::CUdeviceptr;

use super::physical::{Id, PhysicalAllocation, Source, registry};
use super::{arena, backtrace, ipc, pool};
use crate::cuda::{context, driver};

/// How many of the program's allocations lie in a physical allocation.
fn allocations_in(kind: RegionKind, address: CUdeviceptr, bytes: u64) -> u64 {
    match kind {
        RegionKind::Allocation | RegionKind::Slab => arena::count_in(address, bytes),
        RegionKind::Pool => pool::count_in(address, bytes),
        RegionKind::Program => 1,
    }
}

/// Completes the regions once their memory is parked or parking was refused.
pub(crate) fn complete(report: &mut GpuReport) {
    let registry = registry();
    let placed = |(id, allocation): (&Id, &PhysicalAllocation)| Some((allocation.mirrored.offset?, *id));
    let by_offset: BTreeMap<u64, Id> = registry.allocations.iter().filter_map(placed).collect();
    for Region { offset, flags, .. } in &mut report.regions {
        let id = by_offset.get(offset);
        if let Some((id, allocation)) = id.and_then(|id| registry.allocations.get_key_value(id)) {
            *flags = flags_of(*id, allocation);
        }
    }
    drop(registry);
    for region in &mut report.regions {
        region.allocations = allocations_in(region.kind, region.address, region.bytes);
    }
    backtrace::note(report, &by_offset);
}

fn flags_of(id: Id, allocation: &PhysicalAllocation) -> RegionFlags {
    let mut flags = RegionFlags {
        is_parked: allocation.parked.is_some(),
        is_shared: ipc::published::key_of(id).is_some(),
        aliases: (allocation.mappings.len() as u64).saturating_sub(1),
        peers: peers_of(allocation),
        ..RegionFlags::default()
    };
    if let Source::Created(properties) = &allocation.source {
        // What the arena makes it asks to be exportable itself.
        flags.is_exportable = allocation.kind == RegionKind::Program && properties.handle_types != 0;
        flags.is_of_host = properties.location.is_host();
        flags.is_compressible = properties.compression != 0;
        flags.is_rdma_capable = properties.is_rdma_capable != 0;
    }
    flags
}

/// The devices other than its own that may access any mapping of a physical allocation.
fn peers_of(allocation: &PhysicalAllocation) -> Vec<i32> {
    const DEVICE: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32;
    let access = allocation.mappings.iter().flat_map(|mapping| &mapping.access);
    let is_peer = |device: &i32| *device != allocation.device;
    let may = access.filter(|access| access.flags != 0 && access.location.type_ == DEVICE);
    let mut peers: Vec<i32> = may.map(|access| access.location.id).filter(is_peer).collect();
    peers.sort_unstable();
    peers.dedup();
    peers
}

/// What graphs have allocated, as the driver counts it: its own memory, which it saves itself. Devices without a
/// context have none. To be asked of a driver that is not locked.
pub(crate) fn graph_memory() -> Vec<GraphMemory> {
    let of = |device| GraphMemory {
        device,
        used_bytes: graph_attribute(device, Attribute::CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT),
        reserved_bytes: graph_attribute(device, Attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT),
    };
    context::devices()
        .into_iter()
        .map(of)
        .filter(|memory| memory.used_bytes > 0 || memory.reserved_bytes > 0)
        .collect()
}

/// 0 if the driver does not report it.
fn graph_attribute(device: i32, attribute: Attribute) -> u64 {
    let ask = |bytes: *mut u64| {
        // SAFETY: these attributes are written as 64 bits, which the variable has (CUDA driver API reference,
        // cuDeviceGetGraphMemAttribute).
        unsafe { driver::cuDeviceGetGraphMemAttribute(device, attribute as u32, bytes.cast()) }
    };
    driver::ask(0, ask).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::memory::backtrace::Backtrace;
    use crate::cuda::memory::physical::{Mapping, Mirrored};
    use cuda_abi::layout::{Access, Properties};

    fn allocation(kind: RegionKind, properties: Properties, access: Vec<Access>) -> PhysicalAllocation {
        PhysicalAllocation {
            kind,
            device: 0,
            bytes: 2 << 20,
            source: Source::Created(properties),
            handle: 1,
            mappings: vec![Mapping { address: 1 << 30, bytes: 2 << 20, access, is_mapped: true }],
            references: 1,
            is_exported: false,
            team: None,
            bound: 0,
            obstacle: None,
            mirrored: Mirrored::default(),
            parked: None,
            origin: Backtrace::default(),
        }
    }

    #[test]
    fn the_properties_that_memory_was_asked_for_with_are_flags() {
        let properties =
            Properties { handle_types: 1, compression: 1, is_rdma_capable: 1, ..Properties::of(0) };
        let flags = flags_of(u64::MAX, &allocation(RegionKind::Program, properties, Vec::new()));
        let wanted = RegionFlags {
            is_exportable: true,
            is_compressible: true,
            is_rdma_capable: true,
            ..RegionFlags::default()
        };
        assert_eq!(flags, wanted);
        // Of what we make ourselves the program has not asked that it can be exported.
        let flags = flags_of(u64::MAX, &allocation(RegionKind::Slab, properties, Vec::new()));
        assert_eq!(flags, RegionFlags { is_exportable: false, ..wanted });
    }

    #[test]
    fn peers_are_other_devices_that_may_access_it() {
        let access = vec![Access::of(3), Access::of(0), Access::none_of(2), Access::of(1)];
        let mut allocation = allocation(RegionKind::Allocation, Properties::of(0), access.clone());
        allocation.mappings.push(Mapping { access, ..allocation.mappings[0].clone() });
        let flags = flags_of(u64::MAX, &allocation);
        assert_eq!((flags.peers, flags.aliases), (vec![1, 3], 1));
    }
}
