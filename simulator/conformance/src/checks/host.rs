//! Host memory that the device sees: pinned, registered, managed.

use crate::check::{Check, Result, check, expect_equal, failed};
use crate::{ensure, gives, gpu, kernels, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "host/one-address",
        "pinned memory has one address for host and device (reference, unified addressing)",
        one_address,
    ),
    check(
        "host/pinned-mapping",
        "pinned memory is a shared mapping of /dev/zero (source: criu issue 2515)",
        pinned_mapping,
    ),
    check("host/kernel-access", "a kernel reads and writes pinned memory", kernel_access),
    check(
        "host/free-errors",
        "freeing twice, or what is not pinned, is CUDA_ERROR_INVALID_VALUE (reference)",
        free_errors,
    ),
    check("host/flags", "cuMemHostGetFlags gives the flags of an allocation (reference)", flags),
    check(
        "host/zero-bytes",
        "cuMemHostAlloc and cuMemHostRegister of 0 bytes are CUDA_ERROR_INVALID_VALUE, or nothing is to be used (580.159.04, of cuMemHostAlloc)",
        zero_bytes,
    ),
    check("host/register", "registered memory is used by a kernel at its address", register),
    check(
        "host/register-twice",
        "registering twice is CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (reference)",
        register_twice,
    ),
    check(
        "host/unregister-unknown",
        "unregistering what is not registered is CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED (reference)",
        unregister_unknown,
    ),
    check(
        "host/free-waits-or-not",
        "pinned memory that a copy uses is intact until the copy is done",
        free_after_copy,
    ),
    check(
        "host/managed",
        "host and kernels share managed memory (programming guide, Unified memory)",
        managed,
    ),
    check("host/managed-flags", "cuMemAllocManaged needs one of its flags (reference)", managed_flags),
];

fn one_address() -> Result {
    gpu::start()?;
    let memory = gpu::pinned(4096)?;
    let mut address = 0;
    ok!(cuMemHostGetDevicePointer_v2(&raw mut address, memory, 0));
    expect_equal("device address", address, memory as u64)?;
    ok!(cuMemFreeHost(memory));
    Ok(())
}

fn pinned_mapping() -> Result {
    gpu::start()?;
    let memory = gpu::pinned(1 << 20)?;
    let maps = std::fs::read_to_string("/proc/self/maps").or_else(|error| failed(error.to_string()))?;
    let at = |text: &str| u64::from_str_radix(text, 16).ok();
    let holds = |line: &&str| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let range = range.and_then(|(start, end)| Some(at(start)?..at(end)?));
        range.is_some_and(|range| range.contains(&(memory as u64)))
    };
    let line = maps.lines().find(holds).unwrap_or_default();
    let is_shared = line.split(' ').nth(1).is_some_and(|rights| rights.ends_with('s'));
    ensure!(is_shared && line.ends_with("/dev/zero (deleted)"), "it is mapped so: {line:?}");
    ok!(cuMemFreeHost(memory));
    Ok(())
}

fn kernel_access() -> Result {
    gpu::start()?;
    let add = gpu::function(kernels::BASIC, "add")?;
    let memory = gpu::pinned(3 * 256)?.cast::<u32>();
    // SAFETY: the memory is 192 words, and no device work runs on it yet.
    let words = unsafe { std::slice::from_raw_parts_mut(memory, 192) };
    for (index, word) in (0..).zip(&mut words[..128]) {
        *word = index;
    }
    let at = memory as u64;
    gpu::launch(add, 1, 64, std::ptr::null_mut(), &[at, at + 256, at + 512, 64])?;
    gpu::synchronize()?;
    let wanted: Vec<u32> = (0..64).map(|index| 2 * index + 64).collect();
    expect_equal("sums", &words[128..], &wanted[..])
}

fn free_errors() -> Result {
    gpu::start()?;
    let memory = gpu::pinned(4096)?;
    ok!(cuMemFreeHost(memory));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost(memory));
    let mut plain = 0_u64;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost((&raw mut plain).cast()));
    Ok(())
}

fn flags() -> Result {
    gpu::start()?;
    let mut memory = std::ptr::null_mut();
    // CU_MEMHOSTALLOC_PORTABLE
    ok!(cuMemHostAlloc(&raw mut memory, 4096, 1));
    let mut flags = 0;
    ok!(cuMemHostGetFlags(&raw mut flags, memory));
    expect_equal("PORTABLE", flags & 1, 1)?;
    let mut plain = 0_u64;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemHostGetFlags(&raw mut flags, (&raw mut plain).cast()));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemHostAlloc(&raw mut memory, 4096, 0x4000_0000));
    Ok(())
}

fn zero_bytes() -> Result {
    gpu::start()?;
    let mut memory = std::ptr::null_mut();
    gives!(CUDA_SUCCESS | CUDA_ERROR_INVALID_VALUE, cuMemHostAlloc(&raw mut memory, 0, 0));
    let mut page = vec![0_u8; 8192];
    gives!(CUDA_SUCCESS | CUDA_ERROR_INVALID_VALUE, cuMemHostRegister_v2(page.as_mut_ptr().cast(), 0, 0));
    gpu::pinned(4096).map(|_| ())
}

fn register() -> Result {
    gpu::start()?;
    let store = gpu::function(kernels::BASIC, "store")?;
    let mut pages = vec![0_u32; 8192];
    let start = pages.as_mut_ptr();
    ok!(cuMemHostRegister_v2(start.cast(), 32768, 0));
    let mut address = 0;
    ok!(cuMemHostGetDevicePointer_v2(&raw mut address, start.cast(), 0));
    gpu::launch(store, 1, 1, std::ptr::null_mut(), &[address + 400, 123])?;
    gpu::synchronize()?;
    ok!(cuMemHostUnregister(start.cast()));
    let word = start.wrapping_add(100);
    // SAFETY: the vector's word 100, which the device no longer touches.
    let value = unsafe { word.read_volatile() };
    expect_equal("the word", value, 123)?;
    expect_equal("the words around it", (pages[99], pages[101]), (0, 0))
}

fn register_twice() -> Result {
    gpu::start()?;
    let mut pages = vec![0_u8; 32768];
    let start = pages.as_mut_ptr().cast();
    ok!(cuMemHostRegister_v2(start, 32768, 0));
    gives!(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister_v2(start, 32768, 0));
    ok!(cuMemHostUnregister(start));
    ok!(cuMemHostRegister_v2(start, 32768, 0));
    ok!(cuMemHostUnregister(start));
    Ok(())
}

fn unregister_unknown() -> Result {
    gpu::start()?;
    let mut pages = vec![0_u8; 8192];
    gives!(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(pages.as_mut_ptr().cast()));
    Ok(())
}

fn free_after_copy() -> Result {
    gpu::start()?;
    let stream = gpu::stream()?;
    let address = gpu::alloc(1 << 20)?;
    let memory = gpu::pinned(1 << 20)?;
    // SAFETY: the memory is this large and nothing uses it yet.
    unsafe { memory.cast::<u8>().write_bytes(0xab, 1 << 20) };
    ok!(cuMemcpyHtoDAsync_v2(address, memory, 1 << 20, stream));
    ok!(cuMemFreeHost(memory));
    ok!(cuStreamSynchronize(stream));
    gpu::expect_content(address, &vec![0xab_u8; 1 << 20])
}

fn managed() -> Result {
    gpu::start()?;
    let affine = gpu::function(kernels::BASIC, "affine")?;
    let mut address = 0;
    ok!(cuMemAllocManaged(&raw mut address, 4096, 1));
    let word = address as *mut u32;
    // SAFETY: managed memory is the host's while no kernel runs.
    unsafe { word.write_volatile(5) };
    gpu::launch(affine, 1, 1, std::ptr::null_mut(), &[address, 10, 1])?;
    gpu::synchronize()?;
    // SAFETY: as above.
    let value = unsafe { word.read_volatile() };
    expect_equal("the word", value, 51)?;
    ok!(cuMemFree_v2(address));
    Ok(())
}

fn managed_flags() -> Result {
    gpu::start()?;
    let mut address = 0;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemAllocManaged(&raw mut address, 4096, 0));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemAllocManaged(&raw mut address, 0, 1));
    Ok(())
}
