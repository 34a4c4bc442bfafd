//! Memory of the host from cuMemCreate.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};

use cuda_abi::sys::{self, CUmemAccess_flags as Access, CUmemLocationType as Kind};
use cuda_abi::types::*;

use crate::check::{Check, Result, check, expect_equal, skipped};
use crate::helper::Helper;
use crate::vmm::{
    READ_WRITE, access, allow, create, create_with, export, granularity, host_properties, import, map,
    mapped, node, reserve, unmap,
};
use crate::{ensure, gives, gpu, kernels, ok, refuses};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "host-vmm/round-trip",
        "host and device share memory of a NUMA node at one address (source: reference, cuMemCreate, cuMemSetAccess)",
        round_trip,
    ),
    check(
        "host-vmm/no-node",
        "memory of the host without a NUMA node (source: reference, cuMemCreate)",
        no_node,
    ),
    check(
        "host-vmm/no-node-not-shared",
        "CU_MEM_LOCATION_TYPE_HOST with handle types is CUDA_ERROR_INVALID_VALUE (source: reference, cuMemCreate)",
        no_node_not_shared,
    ),
    check(
        "host-vmm/current-node",
        "CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT is CUDA_ERROR_INVALID_VALUE (source: reference, cuMemCreate)",
        current_node,
    ),
    check("host-vmm/bad-node", "a NUMA node that does not exist is an error", bad_node),
    check(
        "host-vmm/not-for-device-memory",
        "the host gets no access to memory of a device (source: reference, cuMemSetAccess)",
        not_for_device_memory,
    ),
    check(
        "host-vmm/node-of-access",
        "the node's number does not matter in cuMemSetAccess (source: reference)",
        node_of_access,
    ),
    check(
        "host-vmm/read-only",
        "cuMemGetAccess gives what cuMemSetAccess set for the host (reference)",
        read_only,
    ),
    check("host-vmm/shared", "another process imports memory of a NUMA node and shares it", shared),
    check("host-vmm/accounting", "memory of the host takes none of the device", accounting),
    check(
        "host-vmm/content-stays",
        "content stays when memory is unmapped and mapped elsewhere",
        content_stays,
    ),
    check("host-vmm/properties", "cuMemGetAllocationPropertiesFromHandle names the node", properties),
];

fn location(kind: Kind, id: i32) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: kind, __bindgen_anon_1: CUmemLocation_st__bindgen_ty_1 { id } }
}

/// Maps memory of the host for device 0 and for the host.
fn map_for_both(handle: u64, size_bytes: usize, host: sys::CUmemLocation) -> Result<u64> {
    let address = reserve(size_bytes)?;
    map(address, size_bytes, handle)?;
    let both = [access(0, READ_WRITE), CUmemAccessDesc { location: host, flags: READ_WRITE }];
    ok!(cuMemSetAccess(address, size_bytes, both.as_ptr(), 2));
    Ok(address)
}

/// The host's view of a word.
fn word<'a>(address: u64) -> &'a AtomicU32 {
    // SAFETY: the check has mapped the address for the host, and everything that touches it does so atomically or while
    // nothing else does.
    unsafe { AtomicU32::from_ptr(address as *mut u32) }
}

fn round_trip() -> Result {
    gpu::start()?;
    let (unit, node) = (granularity()?, node()?);
    let handle = create_with(2 * unit, &host_properties(node, false))?;
    let address = map_for_both(handle, 2 * unit, node)?;
    let last = address + 2 * unit as u64 - 4;
    word(last).store(41, Ordering::SeqCst);
    let (load, out) = (gpu::function(kernels::BASIC, "load")?, gpu::alloc(4)?);
    gpu::launch(load, 1, 1, std::ptr::null_mut(), &[last, out])?;
    gpu::synchronize()?;
    gpu::expect_content(out, &[41_u32])?;
    let store = gpu::function(kernels::BASIC, "store")?;
    gpu::launch(store, 1, 1, std::ptr::null_mut(), &[address, 42])?;
    gpu::synchronize()?;
    expect_equal("read by the host", word(address).load(Ordering::SeqCst), 42)?;
    gpu::write(address + 4, &[43_u32])?;
    expect_equal("copied", word(address + 4).load(Ordering::SeqCst), 43)?;
    unmap(address, 2 * unit, handle)
}

fn no_node() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    if gpu::device_attribute(attribute).unwrap_or(0) == 0 {
        return skipped("no memory of the host without a node");
    }
    let host = location(Kind::CU_MEM_LOCATION_TYPE_HOST, 77);
    let handle = create_with(unit, &host_properties(host, false))?;
    let address = map_for_both(handle, unit, host)?;
    word(address).store(7, Ordering::SeqCst);
    gpu::expect_content(address, &[7_u32])?;
    unmap(address, unit, handle)
}

fn no_node_not_shared() -> Result {
    gpu::start()?;
    node()?;
    let (unit, mut handle) = (granularity()?, 0);
    let properties = host_properties(location(Kind::CU_MEM_LOCATION_TYPE_HOST, 0), true);
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&raw mut handle, unit, &raw const properties, 0));
    Ok(())
}

fn current_node() -> Result {
    gpu::start()?;
    node()?;
    let (unit, mut handle) = (granularity()?, 0);
    let properties = host_properties(location(Kind::CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, 0), false);
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&raw mut handle, unit, &raw const properties, 0));
    Ok(())
}

fn bad_node() -> Result {
    gpu::start()?;
    node()?;
    let (unit, mut handle) = (granularity()?, 0);
    for id in [-1, 4096] {
        let properties = host_properties(location(Kind::CU_MEM_LOCATION_TYPE_HOST_NUMA, id), false);
        refuses!(cuMemCreate(&raw mut handle, unit, &raw const properties, 0));
    }
    Ok(())
}

fn not_for_device_memory() -> Result {
    gpu::start()?;
    let (unit, node) = (granularity()?, node()?);
    let (address, _) = mapped(unit, false)?;
    let host = CUmemAccessDesc { location: node, flags: READ_WRITE };
    refuses!(cuMemSetAccess(address, unit, &raw const host, 1));
    gpu::write(address, &[1_u32])?;
    gpu::expect_content(address, &[1_u32])
}

fn node_of_access() -> Result {
    gpu::start()?;
    let (unit, node) = (granularity()?, node()?);
    let handle = create_with(unit, &host_properties(node, false))?;
    let address = map_for_both(handle, unit, location(Kind::CU_MEM_LOCATION_TYPE_HOST_NUMA, 77))?;
    word(address).store(9, Ordering::SeqCst);
    gpu::expect_content(address, &[9_u32])
}

fn read_only() -> Result {
    gpu::start()?;
    let (unit, node) = (granularity()?, node()?);
    let handle = create_with(unit, &host_properties(node, false))?;
    let address = map_for_both(handle, unit, node)?;
    gpu::write(address, &[5_u32])?;
    let place = CUmemLocation { type_: Kind::CU_MEM_LOCATION_TYPE_HOST_NUMA as u32, id: 0 };
    let mut flags = 77;
    for (set, wanted) in [
        (Access::CU_MEM_ACCESS_FLAGS_PROT_READ, 1),
        (Access::CU_MEM_ACCESS_FLAGS_PROT_NONE, 0),
        (READ_WRITE, 3),
    ] {
        let host = CUmemAccessDesc { location: node, flags: set };
        ok!(cuMemSetAccess(address, unit, &raw const host, 1));
        ok!(cuMemGetAccess(&raw mut flags, &raw const place, address));
        expect_equal("the host's access", flags, wanted)?;
    }
    expect_equal("content", word(address).load(Ordering::SeqCst), 5)
}

fn shared() -> Result {
    gpu::start()?;
    let (unit, node) = (granularity()?, node()?);
    let handle = create_with(unit, &host_properties(node, true))?;
    let address = map_for_both(handle, unit, node)?;
    word(address).store(11, Ordering::SeqCst);
    let descriptor = export(handle)?;
    let again = import(descriptor.as_raw_fd())?;
    let second = map_for_both(again, unit, node)?;
    expect_equal("in the same process", word(second).load(Ordering::SeqCst), 11)?;
    let mut helper = Helper::start()?;
    helper.send(descriptor)?;
    let theirs = helper.number(&format!("import {unit}"))?;
    expect_equal("read by the other process", helper.number(&format!("read {theirs}"))?, 11)?;
    helper.ask(&format!("fill {theirs} 22 4"))?;
    expect_equal("written by the other process", word(address).load(Ordering::SeqCst), 22)
}

fn accounting() -> Result {
    gpu::start()?;
    let (unit, node) = (granularity()?, node()?);
    let before = gpu::free_bytes()?;
    let handle = create_with(16 * unit, &host_properties(node, false))?;
    let address = map_for_both(handle, 16 * unit, node)?;
    ensure!(before - gpu::free_bytes()? < 16 * unit, "it is taken from the device");
    unmap(address, 16 * unit, handle)
}

fn content_stays() -> Result {
    gpu::start()?;
    let (unit, node) = (granularity()?, node()?);
    let handle = create_with(unit, &host_properties(node, false))?;
    let first = map_for_both(handle, unit, node)?;
    word(first).store(3, Ordering::SeqCst);
    ok!(cuMemUnmap(first, unit));
    let second = map_for_both(handle, unit, node)?;
    expect_equal("content", word(second).load(Ordering::SeqCst), 3)?;
    // The first range is free again for memory of the device.
    map(first, unit, create(unit, false)?)?;
    allow(first, unit, READ_WRITE)?;
    gpu::write(first, &[4_u32])?;
    gpu::expect_content(first, &[4_u32])
}

fn properties() -> Result {
    gpu::start()?;
    let (unit, node) = (granularity()?, node()?);
    let handle = create_with(unit, &host_properties(node, true))?;
    let mut got = host_properties(node, false);
    ok!(cuMemGetAllocationPropertiesFromHandle(&raw mut got, handle));
    expect_equal("location", got.location.type_, Kind::CU_MEM_LOCATION_TYPE_HOST_NUMA)?;
    // SAFETY: the location is a node, whose number is the integer.
    let id = unsafe { got.location.__bindgen_anon_1.id };
    // SAFETY: as above.
    expect_equal("node", id, unsafe { node.__bindgen_anon_1.id })?;
    let wanted = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    expect_equal("handle types", got.requestedHandleTypes, wanted)
}
