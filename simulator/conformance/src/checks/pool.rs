//! Stream-ordered memory and its pools.

use cuda_abi::sys::{CUmemPool_attribute as A, CUmemPoolProps};
use cuda_abi::types::CUmemoryPool;

use crate::check::{Check, Result, check, expect_equal};
use crate::{ensure, gives, gpu, kernels, ok, refuses, vmm};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "pool/round-trip",
        "memory of cuMemAllocAsync is used in stream order and freed (reference)",
        round_trip,
    ),
    check(
        "pool/zero-bytes",
        "cuMemAllocAsync of 0 bytes is CUDA_ERROR_INVALID_VALUE, or gives nothing to be used (580.159.04)",
        zero_bytes,
    ),
    check("pool/double-free", "freeing twice is CUDA_ERROR_INVALID_VALUE", double_free),
    check("pool/plain-free", "cuMemFree frees memory of cuMemAllocAsync (reference)", plain_free),
    check("pool/free-plain", "cuMemFreeAsync frees memory of cuMemAlloc (reference)", free_plain),
    check(
        "pool/other-stream",
        "memory crosses streams by an event (programming guide, Stream ordered memory)",
        other_stream,
    ),
    check(
        "pool/threshold",
        "above the release threshold memory goes back when the stream is synchronised",
        threshold,
    ),
    check(
        "pool/used",
        "USED_MEM_CURRENT counts what is allocated, and its high mark can be reset (reference)",
        used,
    ),
    check(
        "pool/own",
        "a pool that the program created allocates memory and can be destroyed (reference, cuMemPoolCreate)",
        own,
    ),
    check(
        "pool/device-pool",
        "cuDeviceSetMemPool changes what cuMemAllocAsync takes from (reference)",
        device_pool,
    ),
    check("pool/trim", "cuMemPoolTrimTo gives back what is not used (reference)", trim),
    check(
        "pool/destroy-default",
        "the default pool cannot be destroyed (reference, cuMemPoolDestroy)",
        destroy_default,
    ),
];

fn default_pool() -> Result<CUmemoryPool> {
    let mut pool = std::ptr::null_mut();
    ok!(cuDeviceGetDefaultMemPool(&raw mut pool, 0));
    Ok(pool)
}

fn number(pool: CUmemoryPool, attribute: A) -> Result<u64> {
    let mut value = 0_u64;
    ok!(cuMemPoolGetAttribute(pool, attribute as u32, (&raw mut value).cast()));
    Ok(value)
}

fn own_pool() -> Result<CUmemoryPool> {
    // SAFETY: integers, a pointer and enums that have a value 0; those that matter are set below.
    let mut properties: CUmemPoolProps = unsafe { std::mem::zeroed() };
    properties.allocType = vmm::properties(0, false).type_;
    properties.location = vmm::location(0);
    let mut pool = std::ptr::null_mut();
    ok!(cuMemPoolCreate(&raw mut pool, &raw const properties));
    Ok(pool)
}

fn round_trip() -> Result {
    gpu::start()?;
    let stream = gpu::stream()?;
    let mut address = 0;
    ok!(cuMemAllocAsync(&raw mut address, 4096, stream));
    ok!(cuMemsetD32Async(address, 5, 1024, stream));
    let memory = gpu::pinned(4096)?;
    ok!(cuMemcpyDtoHAsync_v2(memory, address, 4096, stream));
    ok!(cuMemFreeAsync(address, stream));
    ok!(cuStreamSynchronize(stream));
    // SAFETY: 1024 words that no device work touches any more.
    let words = unsafe { std::slice::from_raw_parts(memory.cast::<u32>(), 1024) };
    expect_equal("content", words, &[5; 1024][..])
}

fn zero_bytes() -> Result {
    gpu::start()?;
    let (stream, mut address) = (gpu::stream()?, 0);
    gives!(CUDA_SUCCESS | CUDA_ERROR_INVALID_VALUE, cuMemAllocAsync(&raw mut address, 0, stream));
    ok!(cuMemAllocAsync(&raw mut address, 4096, stream));
    ok!(cuMemFreeAsync(address, stream));
    ok!(cuStreamSynchronize(stream));
    Ok(())
}

fn double_free() -> Result {
    gpu::start()?;
    let (stream, mut address) = (gpu::stream()?, 0);
    ok!(cuMemAllocAsync(&raw mut address, 4096, stream));
    ok!(cuMemFreeAsync(address, stream));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemFreeAsync(address, stream));
    Ok(())
}

fn plain_free() -> Result {
    gpu::start()?;
    let (stream, mut address) = (gpu::stream()?, 0);
    ok!(cuMemAllocAsync(&raw mut address, 4096, stream));
    ok!(cuStreamSynchronize(stream));
    ok!(cuMemFree_v2(address));
    refuses!(cuMemFree_v2(address));
    Ok(())
}

fn free_plain() -> Result {
    gpu::start()?;
    let (stream, address) = (gpu::stream()?, gpu::alloc(4 << 20)?);
    ok!(cuMemFreeAsync(address, stream));
    ok!(cuStreamSynchronize(stream));
    refuses!(cuMemFree_v2(address));
    Ok(())
}

fn other_stream() -> Result {
    gpu::start()?;
    let (first, second) = (gpu::stream()?, gpu::stream()?);
    let event = gpu::event(cuda_abi::sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
    let mut address = 0;
    ok!(cuMemAllocAsync(&raw mut address, 4096, first));
    ok!(cuEventRecord(event, first));
    ok!(cuStreamWaitEvent(second, event, 0));
    let store = gpu::function(kernels::BASIC, "store")?;
    gpu::launch(store, 1, 1, second, &[address, 8])?;
    ok!(cuMemFreeAsync(address, second));
    ok!(cuStreamSynchronize(second));
    Ok(())
}

fn threshold() -> Result {
    gpu::start()?;
    let (stream, pool) = (gpu::stream()?, default_pool()?);
    expect_equal("threshold at first", number(pool, A::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)?, 0)?;
    let mut address = 0;
    ok!(cuMemAllocAsync(&raw mut address, 32 << 20, stream));
    ok!(cuStreamSynchronize(stream));
    let during = number(pool, A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
    ensure!(during >= 32 << 20, "{during} bytes reserved while 32 MiB are allocated");
    ok!(cuMemFreeAsync(address, stream));
    ok!(cuStreamSynchronize(stream));
    expect_equal("reserved at the end", number(pool, A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?, 0)
}

fn used() -> Result {
    gpu::start()?;
    let (stream, pool, mut address) = (gpu::stream()?, default_pool()?, 0);
    ok!(cuMemAllocAsync(&raw mut address, 8 << 20, stream));
    ok!(cuStreamSynchronize(stream));
    let during = number(pool, A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
    ensure!(during >= 8 << 20, "{during} bytes used while 8 MiB are allocated");
    ok!(cuMemFreeAsync(address, stream));
    ok!(cuStreamSynchronize(stream));
    expect_equal("used at the end", number(pool, A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?, 0)?;
    ensure!(number(pool, A::CU_MEMPOOL_ATTR_USED_MEM_HIGH)? >= during, "the high mark is too low");
    let mut zero = 0_u64;
    let high = A::CU_MEMPOOL_ATTR_USED_MEM_HIGH as u32;
    ok!(cuMemPoolSetAttribute(pool, high, (&raw mut zero).cast()));
    expect_equal("the high mark after a reset", number(pool, A::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?, 0)
}

fn own() -> Result {
    gpu::start()?;
    let (stream, pool, mut address) = (gpu::stream()?, own_pool()?, 0);
    ok!(cuMemAllocFromPoolAsync(&raw mut address, 4096, pool, stream));
    ok!(cuMemsetD8Async(address, 1, 4096, stream));
    ok!(cuMemFreeAsync(address, stream));
    ok!(cuStreamSynchronize(stream));
    ok!(cuMemPoolDestroy(pool));
    Ok(())
}

fn device_pool() -> Result {
    gpu::start()?;
    let (stream, pool, mut address) = (gpu::stream()?, own_pool()?, 0);
    ok!(cuDeviceSetMemPool(0, pool));
    let mut current = std::ptr::null_mut();
    ok!(cuDeviceGetMemPool(&raw mut current, 0));
    expect_equal("current pool", current, pool)?;
    ok!(cuMemAllocAsync(&raw mut address, 1 << 20, stream));
    ok!(cuStreamSynchronize(stream));
    ensure!(number(pool, A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)? >= 1 << 20, "the pool was not used");
    expect_equal("used of the default", number(default_pool()?, A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?, 0)
}

fn trim() -> Result {
    gpu::start()?;
    let (stream, pool, mut address) = (gpu::stream()?, default_pool()?, 0);
    let mut keep = u64::MAX;
    let which = A::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as u32;
    ok!(cuMemPoolSetAttribute(pool, which, (&raw mut keep).cast()));
    ok!(cuMemAllocAsync(&raw mut address, 32 << 20, stream));
    ok!(cuMemFreeAsync(address, stream));
    ok!(cuStreamSynchronize(stream));
    let kept = number(pool, A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
    ensure!(kept >= 32 << 20, "{kept} bytes are kept below the threshold");
    ok!(cuMemPoolTrimTo(pool, 0));
    expect_equal("reserved after the trim", number(pool, A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?, 0)
}

fn destroy_default() -> Result {
    gpu::start()?;
    let pool = default_pool()?;
    refuses!(cuMemPoolDestroy(pool));
    Ok(())
}
