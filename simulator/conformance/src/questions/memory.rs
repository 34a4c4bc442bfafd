//! Questions about memory.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Instant;

use cuda_abi::sys::{CUmemPool_attribute, CUpointer_attribute as P};
use cuda_abi::types::*;

use super::copies;
use crate::check::{Result, Stop, failed};
use crate::gpu::Flag;
use crate::helper::Helper;
use crate::vmm::{READ_WRITE, access, granularity, mapped, properties, reserve};
use crate::{cu, gpu, multicast, ok, vmm};

pub(super) fn attributes() -> Result<String> {
    gpu::start()?;
    let unit = granularity()?;
    let (plain, size_bytes) = (gpu::alloc(1000)?, 4 * unit);
    let address = reserve(4 * size_bytes)?;
    let handle = vmm::create(size_bytes, true)?;
    vmm::map(address, size_bytes, handle)?;
    vmm::allow(address, size_bytes, READ_WRITE)?;
    let mut lines = Vec::new();
    for (name, at) in
        [("plain", plain), ("plain+256", plain + 256), ("vmm", address), ("vmm+unit", address + unit as u64)]
    {
        let (mut base, mut size) = (0, 0);
        let range = cu!(cuMemGetAddressRange_v2(&raw mut base, &raw mut size, at));
        let mut line =
            format!("{name}: range {} -{:#x} {size:#x}", gpu::name_of(range), at.wrapping_sub(base));
        for (label, attribute) in [
            ("start", P::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR),
            ("size", P::CU_POINTER_ATTRIBUTE_RANGE_SIZE),
            ("legacy-ipc", P::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE),
            ("type", P::CU_POINTER_ATTRIBUTE_MEMORY_TYPE),
            ("mapped", P::CU_POINTER_ATTRIBUTE_MAPPED),
            ("handle-types", P::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES),
            ("mapping-size", P::CU_POINTER_ATTRIBUTE_MAPPING_SIZE),
            ("pool", P::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE),
        ] {
            let mut value = 0_u64;
            let code = cu!(cuPointerGetAttribute((&raw mut value).cast(), attribute as u32, at));
            if attribute == P::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR {
                value = at.wrapping_sub(value);
            }
            let shown = if code == 0 { format!("{value:#x}") } else { gpu::name_of(code) };
            line += &format!(", {label} {shown}");
        }
        lines.push(line);
    }
    Ok(lines.join("; "))
}

pub(super) fn info() -> Result<String> {
    gpu::start()?;
    let unit = granularity()?;
    let size_bytes = 16 * unit;
    let start = gpu::free_bytes()?;
    let taken = || -> Result<usize> { Ok(start.saturating_sub(gpu::free_bytes()?)) };
    let address = reserve(size_bytes)?;
    let reserved = taken()?;
    let handle = vmm::create(size_bytes, false)?;
    let created = taken()?;
    vmm::map(address, size_bytes, handle)?;
    vmm::allow(address, size_bytes, READ_WRITE)?;
    let mapped = taken()?;
    ok!(cuMemRelease(handle));
    let released = taken()?;
    ok!(cuMemUnmap(address, size_bytes));
    let unmapped = taken()?;
    Ok(format!(
        "of {size_bytes} bytes: reserved {reserved}, created {created}, mapped {mapped}, released {released}, unmapped {unmapped}"
    ))
}

pub(super) fn ipc_on_vmm() -> Result<String> {
    gpu::start()?;
    let (address, _) = mapped(granularity()?, true)?;
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    Ok(gpu::name_of(cu!(cuIpcGetMemHandle(&raw mut handle, address))))
}

pub(super) fn ipc_interior() -> Result<String> {
    gpu::start()?;
    let address = gpu::alloc(4 << 20)?;
    gpu::write(address, &[71_u32])?;
    gpu::write(address + 4096, &[72_u32])?;
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    let code = cu!(cuIpcGetMemHandle(&raw mut handle, address + 4096));
    if code != 0 {
        return Ok(gpu::name_of(code));
    }
    let mut helper = Helper::start()?;
    let theirs = helper.number(&format!("ipc-open {}", crate::roles::hex_of(&handle)))?;
    match helper.number(&format!("read {theirs}"))? {
        71 => Ok("it leads to the allocation's start".into()),
        72 => Ok("it leads to the inner address".into()),
        other => failed(format!("it leads to {other}")),
    }
}

pub(super) fn sync_memops() -> Result<String> {
    gpu::start()?;
    let (address, _) = mapped(granularity()?, true)?;
    let plain = gpu::alloc(4 << 20)?;
    let on = 1_u32;
    let which = P::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS as u32;
    let [on_plain, on_mapped] = [
        cu!(cuPointerSetAttribute((&raw const on).cast(), which, plain)),
        cu!(cuPointerSetAttribute((&raw const on).cast(), which, address)),
    ];
    Ok(format!("plain: {}; mapped: {}", gpu::name_of(on_plain), gpu::name_of(on_mapped)))
}

pub(super) fn in_capture() -> Result<String> {
    gpu::start()?;
    let (unit, stream) = (granularity()?, gpu::stream()?);
    let (properties, access) = (properties(0, false), access(0, READ_WRITE));
    let address = reserve(unit)?;
    let mut lines = Vec::new();
    for (mode, name) in [(0, "global"), (1, "thread-local"), (2, "relaxed")] {
        ok!(cuStreamBeginCapture_v2(stream, mode));
        let (mut handle, mut other, mut graph) = (0, 0, std::ptr::null_mut());
        let created = cu!(cuMemCreate(&raw mut handle, unit, &raw const properties, 0));
        let reserved = cu!(cuMemAddressReserve(&raw mut other, unit, 0, 0, 0));
        let mapped = if created == 0 { cu!(cuMemMap(address, unit, 0, handle, 0)) } else { created };
        let allowed = cu!(cuMemSetAccess(address, unit, &raw const access, 1));
        let unmapped = cu!(cuMemUnmap(address, unit));
        let released = if created == 0 { cu!(cuMemRelease(handle)) } else { created };
        let ended = cu!(cuStreamEndCapture(stream, &raw mut graph));
        let steps = [
            ("create", created),
            ("reserve", reserved),
            ("map", mapped),
            ("set access", allowed),
            ("unmap", unmapped),
            ("release", released),
            ("end", ended),
        ];
        let shown: Vec<_> =
            steps.iter().map(|(step, code)| format!("{step} {}", gpu::name_of(*code))).collect();
        lines.push(format!("{name}: {}; {}", shown.join(", "), plain_in_capture(stream, mode)?));
    }
    Ok(lines.join("; "))
}

/// In a capture of their own, which they may end.
fn plain_in_capture(stream: CUstream, mode: u32) -> Result<String> {
    let (mut address, mut free, mut total, mut graph) = (0, 0, 0, std::ptr::null_mut());
    ok!(cuStreamBeginCapture_v2(stream, mode));
    let asked = cu!(cuMemGetInfo_v2(&raw mut free, &raw mut total));
    let allocated = cu!(cuMemAlloc_v2(&raw mut address, 64));
    let freed = if allocated == 0 { cu!(cuMemFree_v2(address)) } else { allocated };
    let ended = cu!(cuStreamEndCapture(stream, &raw mut graph));
    let steps = [("cuMemGetInfo", asked), ("cuMemAlloc", allocated), ("cuMemFree", freed), ("end", ended)];
    let shown: Vec<_> = steps.iter().map(|(step, code)| format!("{step} {}", gpu::name_of(*code))).collect();
    Ok(shown.join(", "))
}

/// Reserves in one process, then asks a second one for the same addresses.
pub(super) fn fixed_address() -> Result<String> {
    let size_bytes = 64_u64 << 30;
    let mut answers = Vec::new();
    for hint in [0, 0x6000_0000_0000_u64] {
        let mut first = Helper::start()?;
        let address = first.number(&format!("reserve-at {hint} {size_bytes}"))?;
        first.kill()?;
        let mut second = Helper::start()?;
        let again = second.number(&format!("reserve-at {address} {size_bytes}"))?;
        let honoured = if again == address { "the same" } else { "another" };
        answers.push(format!("asked for {hint:#x}, got {address:#x}, in a new process {honoured}"));
    }
    Ok(answers.join("; "))
}

pub(super) fn parked() -> Result<String> {
    let size_bytes = 64_u64 << 20;
    let mut exporter = Helper::start()?;
    let mut observer = Helper::start()?;
    let before = observer.number("free-bytes")?;
    let address = exporter.number(&format!("create {size_bytes}"))?;
    exporter.ask(&format!("fill {address} 99 {}", size_bytes / 4))?;
    exporter.ask("export")?;
    let descriptor = exporter.receive()?;
    exporter.kill()?;
    let held = before.saturating_sub(observer.number("free-bytes")?);
    let start = Instant::now();
    let mut importer = Helper::start()?;
    importer.send(descriptor.as_fd())?;
    let address = importer.number(&format!("import {size_bytes}"))?;
    let value = importer.number(&format!("read {address}"))?;
    let taken_ms = start.elapsed().as_millis();
    importer.kill()?;
    let number = descriptor.as_raw_fd();
    drop(descriptor);
    let after = before.saturating_sub(observer.number("free-bytes")?);
    if value != 99 {
        return failed(format!("the content of descriptor {number} is {value}"));
    }
    Ok(format!(
        "{held} of {size_bytes} bytes are held, taken back in {taken_ms} ms with the process's start, {after} left after the last close"
    ))
}

pub(super) fn teardown() -> Result<String> {
    let size_bytes = 2_u64 << 20;
    let mut exporter = Helper::start()?;
    exporter.number(&format!("create {size_bytes}"))?;
    exporter.ask("export")?;
    let descriptor = exporter.receive()?;
    exporter.kill()?;
    let mut importer = Helper::start()?;
    importer.send(descriptor.as_fd())?;
    Ok(match importer.number(&format!("import {size_bytes}")) {
        Ok(_) => "it is there".to_owned(),
        Err(Stop::Failed(error)) => format!("gone: {error}"),
        Err(stop) => return Err(stop),
    })
}

pub(super) fn fresh() -> Result<String> {
    gpu::start()?;
    let size_bytes = 8 << 20;
    let zero = |address: u64| -> Result<bool> {
        Ok(gpu::read::<u8>(address, size_bytes)?.iter().all(|byte| *byte == 0))
    };
    let dirty = gpu::alloc(size_bytes)?;
    ok!(cuMemsetD8_v2(dirty, 0xff, size_bytes));
    ok!(cuMemFree_v2(dirty));
    let plain = zero(gpu::alloc(size_bytes)?)?;
    let (address, _) = mapped(size_bytes, false)?;
    Ok(format!("cuMemAlloc after a dirty free: {plain}; cuMemCreate: {}", zero(address)?))
}

/// Speed of one way, best of three.
fn speed(size_bytes: usize, copy: impl Fn() -> Result) -> Result<f64> {
    let mut best: f64 = 0.0;
    for _ in 0..3 {
        gpu::synchronize()?;
        let start = Instant::now();
        copy()?;
        gpu::synchronize()?;
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let rate = size_bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
        best = best.max(rate);
    }
    Ok(best)
}

pub(super) fn bandwidth() -> Result<String> {
    gpu::start()?;
    let (stream, size_bytes) = (gpu::stream()?, (gpu::free_bytes()? / 32).clamp(16 << 20, 1 << 30) & !0xfff);
    let device = gpu::alloc(size_bytes)?;
    let start = Instant::now();
    let pinned = gpu::pinned(size_bytes)?;
    let pinning_ms = start.elapsed().as_millis();
    let start = Instant::now();
    let shared = copies::shared_memory(size_bytes, false)?;
    let touching_ms = start.elapsed().as_millis();
    let start = Instant::now();
    ok!(cuMemHostRegister_v2(shared, size_bytes, 0));
    let registering_ms = start.elapsed().as_millis();
    let mut pageable = vec![1_u8; size_bytes];
    let mut lines = vec![format!("{size_bytes} bytes")];
    for (name, memory) in [
        (format!("cuMemHostAlloc (set up in {pinning_ms} ms)"), pinned),
        (
            format!("registered memfd (touched in {touching_ms} ms, registered in {registering_ms} ms)"),
            shared,
        ),
        ("pageable".into(), pageable.as_mut_ptr().cast()),
    ] {
        let down = speed(size_bytes, || {
            ok!(cuMemcpyDtoHAsync_v2(memory, device, size_bytes, stream));
            Ok(())
        })?;
        let up = speed(size_bytes, || {
            ok!(cuMemcpyHtoDAsync_v2(device, memory, size_bytes, stream));
            Ok(())
        })?;
        lines.push(format!("{name}: to host {down:.2} GB/s, to device {up:.2} GB/s"));
    }
    let start = Instant::now();
    ok!(cuMemHostUnregister(shared));
    lines.push(format!("unregistered in {} ms", start.elapsed().as_millis()));
    let other = gpu::alloc(size_bytes)?;
    let across = speed(size_bytes, || {
        ok!(cuMemcpyDtoDAsync_v2(other, device, size_bytes, stream));
        Ok(())
    })?;
    lines.push(format!("device to device {across:.1} GB/s one way"));
    Ok(lines.join("; "))
}

pub(super) fn pool_reuse() -> Result<String> {
    gpu::start()?;
    let (stream, flag) = (gpu::stream()?, Flag::new()?);
    let (mut pool, mut first, mut second, mut most_bytes) = (std::ptr::null_mut(), 0, 0, 0_u64);
    ok!(cuDeviceGetDefaultMemPool(&raw mut pool, 0));
    flag.hold(stream)?;
    ok!(cuMemAllocAsync(&raw mut first, 32 << 20, stream));
    ok!(cuMemFreeAsync(first, stream));
    ok!(cuMemAllocAsync(&raw mut second, 32 << 20, stream));
    let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH as u32;
    ok!(cuMemPoolGetAttribute(pool, attribute, (&raw mut most_bytes).cast()));
    flag.set(1);
    ok!(cuMemFreeAsync(second, stream));
    ok!(cuStreamSynchronize(stream));
    let address = if first == second { "the same address" } else { "another address" };
    Ok(format!("{address}, {} MiB were reserved for one allocation of 32 MiB at a time", most_bytes >> 20))
}

pub(super) fn multicast_bound() -> Result<String> {
    multicast::start()?;
    let size_bytes = multicast::unit()?;
    let before = gpu::free_bytes()?;
    let object = multicast::create(size_bytes, true)?;
    multicast::add(object, 0)?;
    let twice = gpu::name_of(cu!(cuMulticastAddDevice(object, 0)));
    multicast::add(object, 1)?;
    let third = gpu::name_of(cu!(cuMulticastAddDevice(object, 1)));
    let member = multicast::Member::create(0, size_bytes)?;
    member.bind(object, size_bytes)?;
    let overlap = gpu::name_of(cu!(cuMulticastBindMem(object, 0, member.handle, 0, size_bytes, 0)));
    ok!(cuMemUnmap(member.address, size_bytes));
    ok!(cuMemRelease(member.handle));
    let taken = |at: usize| before.saturating_sub(at);
    let bound = taken(gpu::free_bytes()?);
    let released = gpu::name_of(cu!(cuMemRelease(object)));
    let after = taken(gpu::free_bytes()?);
    Ok(format!(
        "added twice {twice}, to a full team {third}, bound twice {overlap}; taken while bound {bound}, release of the \
         object {released}, taken then {after}"
    ))
}

pub(super) fn host_access() -> Result<String> {
    use cuda_abi::sys::{CUmemLocation as Location, CUmemLocationType as Kind};
    gpu::start()?;
    let (unit, node) = (granularity()?, vmm::node()?);
    let host = Location { type_: Kind::CU_MEM_LOCATION_TYPE_HOST, ..node };
    let mut lines = Vec::new();
    for (memory, place) in [("of a node", node), ("of the host", host)] {
        let handle = vmm::create_with(unit, &vmm::host_properties(place, false))?;
        let address = reserve(unit)?;
        vmm::map(address, unit, handle)?;
        for (name, accessor) in [("HOST_NUMA", node), ("HOST", host)] {
            let access = CUmemAccessDesc { location: accessor, flags: READ_WRITE };
            let code = cu!(cuMemSetAccess(address, unit, &raw const access, 1));
            lines.push(format!("memory {memory}, {name}: {}", gpu::name_of(code)));
        }
    }
    Ok(lines.join("; "))
}

pub(super) fn released_handle() -> Result<String> {
    let outcome = |way: &&str| {
        let (signal, outcome) = vmm::end_of_using_released(way)?;
        Ok(format!("{way}: {}", signal.map_or(outcome, |signal| format!("signal {signal}"))))
    };
    Ok(vmm::WAYS.iter().map(outcome).collect::<Result<Vec<_>>>()?.join(", "))
}
