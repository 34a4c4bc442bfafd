//! Questions about self-checkpoints.

use std::os::fd::AsFd;
use std::time::Instant;

use crate::check::{Result, Stop, failed};
use crate::ckpt::{checkpoint, lock, me, restore, unlock};
use crate::helper::Helper;
use crate::vmm::{READ_WRITE, allow, create, export, import, map, mapped};
use crate::{gpu, ok, turns};

/// How much memory the questions use: a 16th of what is free, 1 GiB at most, in whole units of 2 MiB.
fn size() -> Result<usize> {
    Ok((gpu::free_bytes()? / 16).min(1 << 30) & !((2 << 20) - 1))
}

fn start() -> Result {
    gpu::needs_driver(12080)?;
    gpu::start().map(|_| ())
}

/// Descriptors and mappings of NVIDIA's devices.
fn held() -> (usize, usize) {
    let links = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let targets = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    let descriptors = targets.filter(|target| target.to_string_lossy().contains("/dev/nvidia")).count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    (descriptors, maps.lines().filter(|line| line.contains("/dev/nvidia")).count())
}

/// One cycle: how long each step took, and what was held before and in between.
fn cycle() -> Result<String> {
    let before = held();
    let mut times_ms = Vec::new();
    let mut between = (0, 0);
    for (name, step) in [
        ("lock", lock as fn(i32) -> Result),
        ("checkpoint", checkpoint),
        ("restore", restore),
        ("unlock", unlock),
    ] {
        let start = Instant::now();
        step(me())?;
        times_ms.push(format!("{name} {:.1} ms", start.elapsed().as_secs_f64() * 1e3));
        if name == "checkpoint" {
            between = held();
        }
    }
    Ok(format!(
        "{}; descriptors and mappings of /dev/nvidia*: {before:?}, while out {between:?}",
        times_ms.join(", ")
    ))
}

fn with(size_bytes: usize, address: u64) -> Result<String> {
    ok!(cuMemsetD32_v2(address, 0x1357_9bdf, size_bytes / 4));
    gpu::synchronize()?;
    let text = cycle()?;
    for at in [address, address + size_bytes as u64 - 4] {
        gpu::expect_content(at, &[0x1357_9bdf_u32])?;
    }
    Ok(format!("{size_bytes} bytes: {text}"))
}

pub(super) fn empty() -> Result<String> {
    start()?;
    cycle()
}

pub(super) fn plain() -> Result<String> {
    start()?;
    let size_bytes = size()?;
    with(size_bytes, gpu::alloc(size_bytes)?)
}

pub(super) fn mapped_memory() -> Result<String> {
    start()?;
    let size_bytes = size()?;
    with(size_bytes, mapped(size_bytes, false)?.0)
}

pub(super) fn exportable() -> Result<String> {
    start()?;
    let size_bytes = size()?;
    with(size_bytes, mapped(size_bytes, true)?.0)
}

pub(super) fn unmapped() -> Result<String> {
    start()?;
    let size_bytes = size()?;
    let (address, handle) = mapped(size_bytes, false)?;
    ok!(cuMemUnmap(address, size_bytes));
    ok!(cuMemRelease(handle));
    let text = cycle()?;
    let start = Instant::now();
    map(address, size_bytes, create(size_bytes, false)?)?;
    allow(address, size_bytes, READ_WRITE)?;
    let again_ms = start.elapsed().as_secs_f64() * 1e3;
    ok!(cuMemsetD32_v2(address, 1, size_bytes / 4));
    gpu::synchronize()?;
    Ok(format!("{text}; {size_bytes} bytes created and mapped again in {again_ms:.1} ms"))
}

pub(super) fn parked() -> Result<String> {
    start()?;
    let size_bytes = size()?;
    let (address, handle) = mapped(size_bytes, true)?;
    ok!(cuMemsetD32_v2(address, 0x0246_8ace, size_bytes / 4));
    gpu::synchronize()?;
    // Keeps the device open too, as the launcher does: see `question/teardown`.
    let keeper = Helper::start()?;
    let descriptor = export(handle)?;
    keeper.send(descriptor.as_fd())?;
    ok!(cuMemUnmap(address, size_bytes));
    ok!(cuMemRelease(handle));
    let text = cycle()?;
    let start = Instant::now();
    let handle = import(std::os::fd::AsRawFd::as_raw_fd(&descriptor))?;
    map(address, size_bytes, handle)?;
    allow(address, size_bytes, READ_WRITE)?;
    let back_ms = start.elapsed().as_secs_f64() * 1e3;
    gpu::expect_content(address, &[0x0246_8ace_u32])?;
    drop(keeper);
    Ok(format!("{size_bytes} bytes: {text}; taken back in {back_ms:.1} ms"))
}

pub(super) fn export_after_restore() -> Result<String> {
    start()?;
    let (address, handle) = mapped(2 << 20, true)?;
    gpu::write(address, &[8_u32])?;
    drop(export(handle)?);
    cycle()?;
    let answer = match export(handle) {
        Ok(_) => "yes".to_owned(),
        Err(Stop::Failed(text) | Stop::Skipped(text)) => format!("no: {text}"),
    };
    let content = gpu::read::<u32>(address, 1)?;
    if content != [8] {
        return failed(format!("the content is {content:?}"));
    }
    Ok(answer)
}

pub(super) fn host_memory() -> Result<String> {
    start()?;
    let (unit, node) = (crate::vmm::granularity()?, crate::vmm::node()?);
    let handle = crate::vmm::create_with(unit, &crate::vmm::host_properties(node, false))?;
    let address = crate::vmm::reserve(unit)?;
    map(address, unit, handle)?;
    let both = [
        crate::vmm::access(0, READ_WRITE),
        cuda_abi::types::CUmemAccessDesc { location: node, flags: READ_WRITE },
    ];
    ok!(cuMemSetAccess(address, unit, both.as_ptr(), 2));
    // SAFETY: the address is mapped for the host, and no work touches it.
    let word = unsafe { std::sync::atomic::AtomicU32::from_ptr(address as *mut u32) };
    word.store(0x55aa, std::sync::atomic::Ordering::SeqCst);
    let text = match cycle() {
        // It may be lost.
        Err(Stop::Failed(text)) => return Ok(text),
        done => done?,
    };
    let of_device = gpu::read::<u32>(address, 1)?[0];
    let of_host = word.load(std::sync::atomic::Ordering::SeqCst);
    Ok(format!("{text}; read by the device {of_device:#x}, by the host {of_host:#x}"))
}

/// In processes of their own: this one does not open the device.
pub(super) fn turns_after_teardown() -> Result<String> {
    gpu::needs_driver(12080)?;
    let are_taken = || turns::are_taken(&mut turns::helper()?, &mut turns::helper()?);
    let before = are_taken()?;
    turns::cycle(&mut turns::helper()?)?;
    let text = |are_taken| if are_taken { "yes" } else { "no" };
    Ok(format!(
        "before: {}; after a restore and the end of all processes: {}",
        text(before),
        text(are_taken()?)
    ))
}
