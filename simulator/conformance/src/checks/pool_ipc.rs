//! Pools that processes share. The other process exports, this one imports.

use std::os::fd::AsRawFd;

use cuda_abi::layout::POSIX_DESCRIPTOR;
use cuda_abi::sys::{self, CUmemPool_attribute as A};
use cuda_abi::types::*;

use crate::check::{Check, Result, check, expect_equal, failed, skipped};
use crate::helper::Helper;
use crate::pools::{self, Data};
use crate::{cu, ensure, gives, gpu, ok, refuses, vmm};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "pool-ipc/other-process",
        "another process imports a pool and an allocation of it, and shares the memory (reference, cuMemPoolImportPointer)",
        other_process,
    ),
    check(
        "pool-ipc/free-async",
        "cuMemFreeAsync frees an imported allocation, and the exporting process frees it after that (reference, cuMemPoolImportPointer)",
        free_async,
    ),
    check(
        "pool-ipc/plain-free",
        "cuMemFree frees an imported allocation (reference, cuMemPoolImportPointer)",
        plain_free,
    ),
    check(
        "pool-ipc/without-order",
        "allocations are exported and imported while the allocating stream is still busy (programming guide, Stream-ordered memory)",
        without_order,
    ),
    check(
        "pool-ipc/no-allocation",
        "an imported pool does not allocate and cannot be a device's current pool (reference, cuMemPoolImportFromShareableHandle)",
        no_allocation,
    ),
    check(
        "pool-ipc/access",
        "an imported pool can be accessed by its own device, whatever the exporter has set; others need cuMemPoolSetAccess (programming guide, Stream-ordered memory)",
        access,
    ),
    check(
        "pool-ipc/statistics",
        "an imported pool counts what this process has imported (programming guide, Stream-ordered memory), or does not say (580.159.04); one that can be shared has its handle types as an attribute from CUDA 13.2 on",
        statistics,
    ),
    check(
        "pool-ipc/not-exportable",
        "a pool created without a handle type cannot be exported (reference, cuMemPoolExportToShareableHandle)",
        not_exportable,
    ),
    check("pool-ipc/flags", "flags must be 0 (reference, cuMemPoolExportToShareableHandle)", flags),
    check("pool-ipc/rubbish", "what was not exported cannot be imported", rubbish),
];

fn needs_support() -> Result {
    use cuda_abi::sys::CUdevice_attribute as D;
    let kinds = gpu::device_attribute(D::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES)?;
    if kinds.cast_unsigned() & POSIX_DESCRIPTOR.0 == 0 {
        return skipped("the device has no pools that are shared by descriptors");
    }
    Ok(())
}

/// A pool of another process.
struct Shared {
    helper: Helper,
    pool: CUmemoryPool,
}

impl Shared {
    fn import() -> Result<Self> {
        gpu::start()?;
        needs_support()?;
        let mut helper = Helper::start()?;
        helper.ask("pool-export")?;
        let descriptor = helper.receive()?;
        Ok(Self { helper, pool: pools::import(&descriptor)? })
    }

    /// The address that the other process has allocated, and what it exports of that.
    fn allocate(&mut self, command: &str, bytes: usize) -> Result<(u64, Data)> {
        let answer = self.helper.ask(&format!("{command} {bytes}"))?;
        let Some((address, data)) = answer.split_once(' ') else {
            return failed(format!("an address and data: {answer:?}"));
        };
        let address = address.parse().or_else(|_| failed(format!("not an address: {address:?}")))?;
        Ok((address, pools::data_of(data)?))
    }

    /// An allocation of the other process, at its address there and here.
    fn open(&mut self, bytes: usize) -> Result<(u64, u64)> {
        let (theirs, mut data) = self.allocate("pool-allocate", bytes)?;
        Ok((theirs, pools::open(self.pool, &mut data)?))
    }
}

fn other_process() -> Result {
    let mut shared = Shared::import()?;
    let (small, ours) = shared.open(4096)?;
    let (large, ours_too) = shared.open(5 << 20)?;
    shared.helper.ask(&format!("fill {small} 11 1024"))?;
    shared.helper.ask(&format!("fill {large} 22 1024"))?;
    gpu::expect_content(ours, &[11_u32; 1024])?;
    gpu::expect_content(ours_too, &[22_u32; 1024])?;
    gpu::write(ours, &[33_u32])?;
    gpu::write(ours_too, &[44_u32])?;
    expect_equal("read by the other process", shared.helper.number(&format!("read {small}"))?, 33)?;
    expect_equal("read by the other process", shared.helper.number(&format!("read {large}"))?, 44)
}

fn free_async() -> Result {
    let mut shared = Shared::import()?;
    let (theirs, ours) = shared.open(4096)?;
    let stream = gpu::stream()?;
    ok!(cuMemsetD32Async(ours, 55, 1024, stream));
    ok!(cuMemFreeAsync(ours, stream));
    ok!(cuStreamSynchronize(stream));
    expect_equal("read by the other process", shared.helper.number(&format!("read {theirs}"))?, 55)?;
    shared.helper.ask(&format!("pool-free {theirs}"))?;
    refuses!(cuMemFreeAsync(ours, stream));
    ok!(cuMemPoolDestroy(shared.pool));
    Ok(())
}

fn plain_free() -> Result {
    let mut shared = Shared::import()?;
    let (theirs, ours) = shared.open(4096)?;
    gpu::write(ours, &[66_u32])?;
    ok!(cuMemFree_v2(ours));
    refuses!(cuMemFree_v2(ours));
    expect_equal("read by the other process", shared.helper.number(&format!("read {theirs}"))?, 66)?;
    shared.helper.ask(&format!("pool-free {theirs}"))?;
    Ok(())
}

/// The memory is used once the other process has said that its stream has come to the allocation.
fn without_order() -> Result {
    let mut shared = Shared::import()?;
    let (theirs, mut data) = shared.allocate("pool-allocate-later", 4096)?;
    let ours = pools::open(shared.pool, &mut data)?;
    shared.helper.ask("pool-synchronize")?;
    shared.helper.ask(&format!("fill {theirs} 77 1024"))?;
    gpu::expect_content(ours, &[77_u32; 1024])
}

fn no_allocation() -> Result {
    let shared = Shared::import()?;
    let (stream, mut address) = (gpu::stream()?, 0);
    refuses!(cuMemAllocFromPoolAsync(&raw mut address, 4096, shared.pool, stream));
    refuses!(cuDeviceSetMemPool(0, shared.pool));
    let mut current = std::ptr::null_mut();
    ok!(cuDeviceGetMemPool(&raw mut current, 0));
    ensure!(current != shared.pool, "the imported pool is the device's current one");
    Ok(())
}

fn access() -> Result {
    let mut shared = Shared::import()?;
    let right = |pool, device| {
        let (mut flags, mut location) = (0, vmm::place(device));
        ok!(cuMemPoolGetAccess(&raw mut flags, pool, &raw mut location));
        Ok(flags)
    };
    let all = vmm::READ_WRITE as u32;
    expect_equal("access of the device that it is on", right(shared.pool, 0)?, all)?;
    let mut devices = 0;
    ok!(cuDeviceGetCount(&raw mut devices));
    let mut is_peer = 0;
    if devices > 1 {
        ok!(cuDeviceCanAccessPeer(&raw mut is_peer, 1, 0));
    }
    if is_peer == 0 {
        return Ok(());
    }
    let (_, ours) = shared.open(4096)?;
    shared.helper.ask("pool-allow 1")?;
    expect_equal("access of another device", right(shared.pool, 1)?, 0)?;
    pools::allow(shared.pool, 1)?;
    expect_equal("access of another device, once allowed", right(shared.pool, 1)?, all)?;
    gpu::write(ours, &[88_u32])
}

fn handle_types_are_known() -> Result {
    let (pool, mut types) = (pools::create(true)?, 0_u32);
    let attribute = A::CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES as u32;
    if gpu::needs_driver(13020).is_err() {
        gives!(CUDA_ERROR_INVALID_VALUE, cuMemPoolGetAttribute(pool, attribute, (&raw mut types).cast()));
        return Ok(());
    }
    ok!(cuMemPoolGetAttribute(pool, attribute, (&raw mut types).cast()));
    expect_equal("handle types", types, POSIX_DESCRIPTOR.0)
}

fn statistics() -> Result {
    let mut shared = Shared::import()?;
    handle_types_are_known()?;
    shared.allocate("pool-allocate", 8 << 20)?;
    let (mut bytes, attribute) = (0_u64, A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
    let code = cu!(cuMemPoolGetAttribute(shared.pool, attribute as u32, (&raw mut bytes).cast()));
    if code == sys::CUresult::CUDA_ERROR_INVALID_VALUE as u32 {
        return Ok(());
    }
    let used = |pool| pools::number(pool, attribute);
    expect_equal("used before the import", used(shared.pool)?, 0)?;
    let (_, ours) = shared.open(4 << 20)?;
    let during = used(shared.pool)?;
    ensure!((4 << 20..8 << 20).contains(&during), "{during} bytes used while 4 MiB are imported");
    ok!(cuMemFree_v2(ours));
    expect_equal("used after the free", used(shared.pool)?, 0)
}

fn not_exportable() -> Result {
    gpu::start()?;
    needs_support()?;
    let (mut descriptor, pool) = (-1_i32, pools::create(false)?);
    refuses!(cuMemPoolExportToShareableHandle((&raw mut descriptor).cast(), pool, POSIX_DESCRIPTOR, 0));
    Ok(())
}

fn flags() -> Result {
    gpu::start()?;
    needs_support()?;
    let (mut descriptor, pool) = (-1_i32, pools::create(true)?);
    refuses!(cuMemPoolExportToShareableHandle((&raw mut descriptor).cast(), pool, POSIX_DESCRIPTOR, 1));
    let exported = pools::export(pool)?;
    let (mut imported, handle) = (std::ptr::null_mut(), exported.as_raw_fd() as usize as *mut c_void);
    refuses!(cuMemPoolImportFromShareableHandle(&raw mut imported, handle, POSIX_DESCRIPTOR, 1));
    Ok(())
}

fn rubbish() -> Result {
    gpu::start()?;
    needs_support()?;
    let file = tempfile::tempfile();
    let file = file.or_else(|error| failed(format!("temporary file: {error}")))?;
    let mut pool = std::ptr::null_mut();
    for descriptor in [usize::try_from(file.as_raw_fd()).unwrap_or(0), 9999] {
        let handle = descriptor as *mut c_void;
        refuses!(cuMemPoolImportFromShareableHandle(&raw mut pool, handle, POSIX_DESCRIPTOR, 0));
    }
    let address = gpu::alloc(4096)?;
    let mut data = pools::data_of(&"00".repeat(64))?;
    refuses!(cuMemPoolExportPointer(&raw mut data, address));
    Ok(())
}
