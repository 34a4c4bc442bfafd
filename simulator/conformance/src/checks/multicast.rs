//! Multicast objects: one address for the memory of several devices.

use std::sync::Mutex;
use std::sync::mpsc;
use std::time::Duration;

use cuda_abi::types::*;

use crate::check::{Check, Result, check, expect_equal, failed};
use crate::helper::Helper;
use crate::multicast::{Member, Team, add, create, map_object, object, start, unit};
use crate::vmm::{READ_WRITE, create_with, export, granularity, host_properties, map, node, reserve};
use crate::{ensure, gives, gpu, kernels, ok, refuses};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "multicast/properties",
        "a team, a size in multiples of the granularity, no flags (source: reference, cuMulticastCreate)",
        properties,
    ),
    check(
        "multicast/granularity",
        "the recommended granularity is a multiple of the smallest (source: reference, cuMulticastGetGranularity)",
        granularities,
    ),
    check(
        "multicast/add-bad-device",
        "a device that does not exist cannot be added (reference)",
        add_bad_device,
    ),
    check(
        "multicast/bind-waits",
        "binding memory blocks until all devices are added (source: reference 13.1, cuMulticastAddDevice)",
        bind_waits,
    ),
    check(
        "multicast/map-waits",
        "mapping the object blocks until all devices are added (source: reference 13.1, cuMulticastAddDevice)",
        map_waits,
    ),
    check(
        "multicast/bind-rules",
        "offsets and size are multiples of the granularity and within both (source: reference, cuMulticastBindMem)",
        bind_rules,
    ),
    check(
        "multicast/bind-shareable",
        "an object that can be shared takes only memory that can (source: reference, cuMulticastBindMem)",
        bind_shareable,
    ),
    check(
        "multicast/bind-elsewhere",
        "memory of no device of the team cannot be bound (source: reference, cuMulticastBindMem)",
        bind_elsewhere,
    ),
    check(
        "multicast/bind-address",
        "mapped memory is bound by its address (source: reference, cuMulticastBindAddr)",
        bind_address,
    ),
    check(
        "multicast/bind-plain-address",
        "memory of cuMemAlloc cannot be bound (source: reference, cuMulticastBindAddr)",
        bind_plain_address,
    ),
    check(
        "multicast/bind-for-device",
        "the second versions name the device (source: reference 13.1, cuMulticastBindMem_v2, cuMulticastBindAddr_v2)",
        bind_for_device,
    ),
    check("multicast/store", "a store reaches all devices (source: PTX ISA, multimem.st)", store),
    check("multicast/reduce", "a reduction changes all devices (source: PTX ISA, multimem.red)", reduce),
    check("multicast/load", "a load joins all devices (source: PTX ISA, multimem.ld_reduce)", load),
    check(
        "multicast/types",
        "f32 vectors, f16x2 also kept in f32, bf16x2, signed integers (source: PTX ISA, multimem.ld_reduce)",
        types,
    ),
    check(
        "multicast/rebind",
        "unbound memory is no longer reached, and other memory takes its place (source: reference, cuMulticastUnbind)",
        rebind,
    ),
    check(
        "multicast/unbind-rules",
        "what is not bound cannot be unbound, nor on a device that does not exist (reference)",
        unbind_rules,
    ),
    check(
        "multicast/memory-outlives-handle",
        "bound memory stays reachable after its handle is released",
        outlives_handle,
    ),
    check(
        "multicast/export",
        "only an object that was created for it can be exported (source: reference, cuMulticastCreate)",
        export_rules,
    ),
    check(
        "multicast/other-process",
        "processes share an object, each with memory of its own device (source: reference, cuMulticastCreate)",
        other_process,
    ),
    check("multicast/no-host-access", "the host gets no access to a multicast address", no_host_access),
];

fn properties() -> Result {
    start()?;
    let unit = unit()?;
    let mut handle = 0;
    for (devices, size_bytes) in [(0, unit), (2, 0), (2, unit + 1), (2, unit / 2)] {
        let bad = object(devices, size_bytes, false);
        gives!(CUDA_ERROR_INVALID_VALUE, cuMulticastCreate(&raw mut handle, &raw const bad));
    }
    let bad = CUmulticastObjectProp { flags: 1, ..object(2, unit, false) };
    gives!(CUDA_ERROR_INVALID_VALUE, cuMulticastCreate(&raw mut handle, &raw const bad));
    let good = object(2, unit, false);
    gives!(CUDA_ERROR_INVALID_VALUE, cuMulticastCreate(std::ptr::null_mut(), &raw const good));
    ok!(cuMulticastCreate(&raw mut handle, &raw const good));
    ok!(cuMemRelease(handle));
    Ok(())
}

fn granularities() -> Result {
    start()?;
    let properties = object(2, granularity()?, false);
    let (mut smallest, mut recommended) = (0, 0);
    ok!(cuMulticastGetGranularity(&raw mut smallest, &raw const properties, 0));
    ok!(cuMulticastGetGranularity(&raw mut recommended, &raw const properties, 1));
    ensure!(smallest.is_power_of_two() && recommended.is_multiple_of(smallest), "{smallest}, {recommended}");
    gives!(
        CUDA_ERROR_INVALID_VALUE,
        cuMulticastGetGranularity(std::ptr::null_mut(), &raw const properties, 0)
    );
    refuses!(cuMulticastGetGranularity(&raw mut smallest, &raw const properties, 2));
    Ok(())
}

fn add_bad_device() -> Result {
    start()?;
    let object = create(unit()?, false)?;
    for device in [-1, 4096] {
        refuses!(cuMulticastAddDevice(object, device));
    }
    Ok(())
}

/// Fails unless `call` blocks until the second device of a new team is added.
fn waits_for_team(call: impl FnOnce(u64, usize) -> Result + Send) -> Result {
    let size_bytes = unit()?;
    let object = create(size_bytes, true)?;
    add(object, 0)?;
    let (say, heard) = mpsc::channel();
    let outcome = Mutex::new(Ok(()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let result = call(object, size_bytes);
            *outcome.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = result;
            let _ = say.send(());
        });
        let is_early = heard.recv_timeout(Duration::from_millis(200)).is_ok();
        // Without this the thread would never end.
        let added = add(object, 1);
        ensure!(!is_early, "the call returned before all devices were added");
        added?;
        match heard.recv_timeout(Duration::from_secs(10)) {
            Ok(()) => Ok(()),
            Err(_) => failed("the call did not return once all devices were added"),
        }
    })?;
    outcome.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn bind_waits() -> Result {
    start()?;
    let member = Member::create(0, unit()?)?;
    waits_for_team(|object, size_bytes| member.bind(object, size_bytes))
}

fn map_waits() -> Result {
    start()?;
    let address = reserve(unit()?)?;
    waits_for_team(|object, size_bytes| map(address, size_bytes, object))
}

/// An object for both devices, without memory.
fn full_team(size_bytes: usize, exportable: bool) -> Result<u64> {
    let object = create(size_bytes, exportable)?;
    add(object, 0)?;
    add(object, 1)?;
    Ok(object)
}

fn bind_rules() -> Result {
    start()?;
    let unit = unit()?;
    let object = full_team(2 * unit, true)?;
    let Member { handle, .. } = Member::create(0, 2 * unit)?;
    for (offset, memory_offset, size_bytes) in [
        (1, 0, unit),
        (0, 1, unit),
        (0, 0, unit - 1),
        (0, 0, 0),
        (0, 0, 3 * unit),
        (2 * unit, 0, unit),
        (0, 2 * unit, unit),
        (unit, 0, 2 * unit),
    ] {
        refuses!(cuMulticastBindMem(object, offset, handle, memory_offset, size_bytes, 0));
    }
    gives!(CUDA_ERROR_INVALID_VALUE, cuMulticastBindMem(object, 0, handle, 0, unit, 1));
    refuses!(cuMulticastBindMem(object, 0, object, 0, unit, 0));
    refuses!(cuMulticastBindMem(handle, 0, handle, 0, unit, 0));
    ok!(cuMulticastBindMem(object, unit, handle, 0, unit, 0));
    ok!(cuMulticastBindMem(object, 0, handle, unit, unit, 0));
    Ok(())
}

fn bind_shareable() -> Result {
    start()?;
    let unit = unit()?;
    let object = full_team(unit, true)?;
    let private = crate::vmm::create(unit, false)?;
    refuses!(cuMulticastBindMem(object, 0, private, 0, unit, 0));
    let object = full_team(unit, false)?;
    ok!(cuMulticastBindMem(object, 0, private, 0, unit, 0));
    Ok(())
}

fn bind_elsewhere() -> Result {
    start()?;
    let unit = unit()?;
    let object = full_team(unit, true)?;
    let of_host = create_with(unit, &host_properties(node()?, true))?;
    refuses!(cuMulticastBindMem(object, 0, of_host, 0, unit, 0));
    Ok(())
}

fn bind_address() -> Result {
    start()?;
    let unit = unit()?;
    let object = full_team(unit, true)?;
    let members = [Member::create(0, 2 * unit)?, Member::create(1, unit)?];
    refuses!(cuMulticastBindAddr(object, 0, members[0].address + 4096, unit, 0));
    refuses!(cuMulticastBindAddr(object, 0, members[0].address, unit, 1));
    ok!(cuMulticastBindAddr(object, 0, members[0].address + unit as u64, unit, 0));
    ok!(cuMulticastBindAddr(object, 0, members[1].address, unit, 0));
    launch("mc_store", &[map_object(object, unit)?, 17])?;
    gpu::expect_content(members[0].address + unit as u64, &[17_u32])?;
    gpu::expect_content(members[1].address, &[17_u32])
}

fn bind_for_device() -> Result {
    gpu::needs_driver(13010)?;
    start()?;
    let unit = unit()?;
    let object = full_team(unit, true)?;
    let [first, second] = [Member::create(0, unit)?, Member::create(1, unit)?];
    gives!(CUDA_ERROR_INVALID_DEVICE, cuMulticastBindMem_v2(object, 99, 0, first.handle, 0, unit, 0));
    gives!(CUDA_ERROR_INVALID_DEVICE, cuMulticastBindAddr_v2(object, -1, 0, second.address, unit, 0));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMulticastBindMem_v2(object, 0, 0, first.handle, 0, unit, 1));
    refuses!(cuMulticastBindAddr_v2(object, 1, 0, second.address + 4096, unit, 0));
    ok!(cuMulticastBindMem_v2(object, 0, 0, first.handle, 0, unit, 0));
    ok!(cuMulticastBindAddr_v2(object, 1, 0, second.address, unit, 0));
    launch("mc_store", &[map_object(object, unit)?, 17])?;
    gpu::expect_content(first.address, &[17_u32])?;
    gpu::expect_content(second.address, &[17_u32])
}

fn bind_plain_address() -> Result {
    start()?;
    let unit = unit()?;
    let object = full_team(unit, false)?;
    let plain = gpu::alloc(4 * unit)?.next_multiple_of(unit as u64);
    refuses!(cuMulticastBindAddr(object, 0, plain, unit, 0));
    Ok(())
}

fn launch(name: &str, parameters: &[u64]) -> Result {
    let kernel = gpu::function(kernels::MULTICAST, name)?;
    gpu::launch(kernel, 1, 1, std::ptr::null_mut(), parameters)?;
    gpu::synchronize()
}

fn store() -> Result {
    start()?;
    let unit = unit()?;
    let team = Team::create(unit)?;
    let last = unit as u64 - 4;
    launch("mc_store", &[team.address + last, 5])?;
    for member in &team.members {
        gpu::expect_content(member.address + last, &[5_u32])?;
    }
    Ok(())
}

fn reduce() -> Result {
    start()?;
    let team = Team::create(unit()?)?;
    gpu::write(team.members[0].address, &[1_u32])?;
    gpu::write(team.members[1].address, &[10_u32])?;
    launch("mc_add", &[team.address, 100])?;
    gpu::expect_content(team.members[0].address, &[101_u32])?;
    gpu::expect_content(team.members[1].address, &[110_u32])
}

fn load() -> Result {
    start()?;
    let team = Team::create(unit()?)?;
    gpu::write(team.members[0].address, &[3_u32])?;
    gpu::write(team.members[1].address, &[4_u32])?;
    let out = gpu::alloc(4)?;
    launch("mc_load", &[team.address, out])?;
    gpu::expect_content(out, &[7_u32])
}

fn types() -> Result {
    start()?;
    let team = Team::create(unit()?)?;
    let floats = |values: [f32; 4]| values.map(f32::to_bits);
    let halves = |low: u32, high: u32| high << 16 | low;
    // 1.0 and 2.0 as f16 and as bf16.
    let (one, two) = (0x3c00, 0x4000);
    let (brain_one, brain_two) = (0x3f80, 0x4000);
    let first = floats([1.0, 2.0, 3.0, 4.0]);
    let second = floats([0.5, 0.25, -3.0, 1.0]);
    let first = [&first[..], &[halves(one, one), halves(brain_one, brain_two), 7]].concat();
    let second = [&second[..], &[halves(one, two), halves(brain_two, brain_one), u32::MAX]].concat();
    gpu::write(team.members[0].address, &first)?;
    gpu::write(team.members[1].address, &second)?;
    let out = gpu::alloc(64)?;
    launch("mc_types", &[team.address, out])?;
    // 2.0 and 3.0 as f16.
    let sums = halves(two, 0x4200);
    let others = [sums, sums, halves(brain_two, brain_two), u32::MAX];
    gpu::expect_content(out, &[&floats([1.5, 2.25, 0.0, 5.0])[..], &others].concat())
}

fn rebind() -> Result {
    start()?;
    let unit = unit()?;
    let team = Team::create(unit)?;
    ok!(cuMulticastUnbind(team.object, 1, 0, unit));
    let other = Member::create(1, unit)?;
    other.bind(team.object, unit)?;
    gpu::write(team.members[1].address, &[1_u32])?;
    launch("mc_store", &[team.address, 8])?;
    gpu::expect_content(team.members[0].address, &[8_u32])?;
    gpu::expect_content(team.members[1].address, &[1_u32])?;
    gpu::expect_content(other.address, &[8_u32])
}

fn unbind_rules() -> Result {
    start()?;
    let unit = unit()?;
    let team = Team::create(unit)?;
    refuses!(cuMulticastUnbind(team.object, 4096, 0, unit));
    refuses!(cuMulticastUnbind(team.members[0].handle, 0, 0, unit));
    refuses!(cuMulticastUnbind(team.object, 0, 0, 2 * unit));
    ok!(cuMulticastUnbind(team.object, 0, 0, unit));
    refuses!(cuMulticastUnbind(team.object, 0, unit, unit));
    Ok(())
}

fn outlives_handle() -> Result {
    start()?;
    let team = Team::create(unit()?)?;
    for member in &team.members {
        ok!(cuMemRelease(member.handle));
    }
    launch("mc_store", &[team.address, 6])?;
    gpu::expect_content(team.members[1].address, &[6_u32])
}

fn export_rules() -> Result {
    start()?;
    let unit = unit()?;
    let mut descriptor = -1_i32;
    let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let private = create(unit, false)?;
    refuses!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), private, kind, 0));
    let shared = create(unit, true)?;
    export(shared).map(drop)
}

fn other_process() -> Result {
    start()?;
    let unit = unit()?;
    let mut helper = Helper::start()?;
    let object = create(unit, true)?;
    helper.send(export(object)?)?;
    let theirs = helper.number("mc-import")?;
    add(object, 0)?;
    // Each process adds its device; which comes first does not matter.
    helper.ask(&format!("mc-add {theirs} 1"))?;
    let mine = Member::create(0, unit)?;
    mine.bind(object, unit)?;
    let their_memory = helper.number(&format!("mc-bind {theirs} 1 {unit}"))?;
    let their_address = helper.number(&format!("mc-map {theirs} {unit}"))?;
    let address = map_object(object, unit)?;
    launch("mc_store", &[address, 12])?;
    expect_equal("in the other process", helper.number(&format!("read {their_memory}"))?, 12)?;
    helper.ask(&format!("mc-store {their_address} 13"))?;
    gpu::expect_content(mine.address, &[13_u32])?;
    let out = gpu::alloc(4)?;
    launch("mc_load", &[address, out])?;
    gpu::expect_content(out, &[26_u32])
}

fn no_host_access() -> Result {
    start()?;
    let unit = unit()?;
    let team = Team::create(unit)?;
    let host = CUmemAccessDesc { location: node()?, flags: READ_WRITE };
    refuses!(cuMemSetAccess(team.address, unit, &raw const host, 1));
    Ok(())
}
