//! What can be asked about addresses.

use std::ffi::c_void;

use cuda_abi::sys::{CUmemorytype as Kind, CUpointer_attribute as A};

use crate::check::{Check, Result, check, expect_equal};
use crate::vmm::{granularity, mapped};
use crate::{ensure, gives, gpu, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "pointer/device",
        "memory type, context, device, addresses of cuMemAlloc's memory (reference)",
        device,
    ),
    check("pointer/range", "RANGE_START_ADDR and RANGE_SIZE are those of the allocation (reference)", range),
    check("pointer/pinned", "pinned memory is host memory that has both addresses (reference)", pinned),
    check("pointer/registered", "registered memory is host memory", registered),
    check("pointer/managed", "managed memory is reported as managed (reference, IS_MANAGED)", managed),
    check("pointer/vmm", "mapped memory is device memory without a legacy IPC handle (reference)", vmm),
    check("pointer/pool", "pool memory names its pool (reference, MEMPOOL_HANDLE)", pool),
    check(
        "pointer/unknown",
        "an address that CUDA does not know is CUDA_ERROR_INVALID_VALUE (reference)",
        unknown,
    ),
    check(
        "pointer/several-unknown",
        "cuPointerGetAttributes of an unknown address succeeds with zeros (reference)",
        several_unknown,
    ),
    check("pointer/several", "cuPointerGetAttributes agrees with single queries (reference)", several),
    check(
        "pointer/buffer-id",
        "every allocation has a buffer ID of its own (reference, BUFFER_ID)",
        buffer_id,
    ),
    check("pointer/sync-memops", "SYNC_MEMOPS can be set on cuMemAlloc's memory (reference)", sync_memops),
    check("pointer/freed", "a freed address is unknown", freed),
];

/// One attribute of a plain type.
fn attribute<T: Default>(attribute: A, address: u64) -> Result<T> {
    let mut value = T::default();
    ok!(cuPointerGetAttribute((&raw mut value).cast(), attribute as u32, address));
    Ok(value)
}

fn device() -> Result {
    let context = gpu::start()?;
    let address = gpu::alloc(1 << 20)? + 100;
    let kind: u32 = attribute(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)?;
    expect_equal("memory type", kind, Kind::CU_MEMORYTYPE_DEVICE as u32)?;
    let its_context: usize = attribute(A::CU_POINTER_ATTRIBUTE_CONTEXT, address)?;
    expect_equal("context", its_context, context as usize)?;
    let ordinal: i32 = attribute(A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)?;
    expect_equal("device", ordinal, 0)?;
    let pointer: u64 = attribute(A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER, address)?;
    expect_equal("device pointer", pointer, address)?;
    let managed: u8 = attribute(A::CU_POINTER_ATTRIBUTE_IS_MANAGED, address)?;
    expect_equal("managed", managed, 0)?;
    let mapped: u8 = attribute(A::CU_POINTER_ATTRIBUTE_MAPPED, address)?;
    expect_equal("mapped", mapped, 1)?;
    let mut host: u64 = 0;
    let code_is = A::CU_POINTER_ATTRIBUTE_HOST_POINTER as u32;
    gives!(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute((&raw mut host).cast(), code_is, address));
    Ok(())
}

fn range() -> Result {
    gpu::start()?;
    let size_bytes = 3 << 20;
    let address = gpu::alloc(size_bytes)?;
    let start: u64 = attribute(A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address + 4097)?;
    let size: usize = attribute(A::CU_POINTER_ATTRIBUTE_RANGE_SIZE, address + 4097)?;
    expect_equal("start", start, address)?;
    expect_equal("size", size, size_bytes)
}

fn expect_host(address: u64) -> Result {
    let kind: u32 = attribute(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)?;
    expect_equal("memory type", kind, Kind::CU_MEMORYTYPE_HOST as u32)?;
    let host: u64 = attribute(A::CU_POINTER_ATTRIBUTE_HOST_POINTER, address)?;
    expect_equal("host pointer", host, address)
}

fn pinned() -> Result {
    gpu::start()?;
    let memory = gpu::pinned(8192)? as u64;
    expect_host(memory + 8)?;
    let device: u64 = attribute(A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER, memory + 8)?;
    expect_equal("device pointer", device, memory + 8)
}

fn registered() -> Result {
    gpu::start()?;
    let mut pages = vec![0_u8; 32768];
    ok!(cuMemHostRegister_v2(pages.as_mut_ptr().cast(), 32768, 0));
    expect_host(pages.as_ptr() as u64 + 5000)?;
    ok!(cuMemHostUnregister(pages.as_mut_ptr().cast()));
    Ok(())
}

fn managed() -> Result {
    gpu::start()?;
    let mut address = 0;
    ok!(cuMemAllocManaged(&raw mut address, 65536, 1));
    let managed: u8 = attribute(A::CU_POINTER_ATTRIBUTE_IS_MANAGED, address + 4)?;
    expect_equal("managed", managed, 1)
}

fn vmm() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, _) = mapped(2 * unit, true)?;
    let kind: u32 = attribute(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)?;
    expect_equal("memory type", kind, Kind::CU_MEMORYTYPE_DEVICE as u32)?;
    let legacy: u8 = attribute(A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address)?;
    expect_equal("legacy IPC", legacy, 0)?;
    let types: u64 = attribute(A::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, address)?;
    expect_equal("a POSIX descriptor is allowed", types & 1, 1)?;
    let ordinal: i32 = attribute(A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address + unit as u64)?;
    expect_equal("device", ordinal, 0)
}

fn pool() -> Result {
    gpu::start()?;
    let stream = gpu::stream()?;
    let (mut pool, mut address) = (std::ptr::null_mut(), 0);
    ok!(cuDeviceGetDefaultMemPool(&raw mut pool, 0));
    ok!(cuMemAllocAsync(&raw mut address, 4096, stream));
    ok!(cuStreamSynchronize(stream));
    let its_pool: usize = attribute(A::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address)?;
    expect_equal("pool", its_pool, pool as usize)?;
    let kind: u32 = attribute(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)?;
    expect_equal("memory type", kind, Kind::CU_MEMORYTYPE_DEVICE as u32)
}

fn unknown() -> Result {
    gpu::start()?;
    let word = 0_u64;
    let mut kind = 0_u32;
    gives!(
        CUDA_ERROR_INVALID_VALUE,
        cuPointerGetAttribute(
            (&raw mut kind).cast(),
            A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32,
            &raw const word as u64
        )
    );
    let address = gpu::alloc(64)?;
    gives!(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute((&raw mut kind).cast(), 10_000, address));
    Ok(())
}

fn query_both(address: u64) -> Result<(u32, u64)> {
    let (mut kind, mut pointer) = (77_u32, 77_u64);
    let mut attributes =
        [A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32, A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER as u32];
    let mut places: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut pointer).cast()];
    ok!(cuPointerGetAttributes(2, attributes.as_mut_ptr(), places.as_mut_ptr(), address));
    Ok((kind, pointer))
}

fn several_unknown() -> Result {
    gpu::start()?;
    let word = 0_u64;
    expect_equal("memory type", query_both(&raw const word as u64)?.0, 0)
}

fn several() -> Result {
    gpu::start()?;
    let address = gpu::alloc(4096)?;
    expect_equal("both", query_both(address)?, (Kind::CU_MEMORYTYPE_DEVICE as u32, address))
}

fn buffer_id() -> Result {
    gpu::start()?;
    let (first, second) = (gpu::alloc(4096)?, gpu::alloc(4096)?);
    let first_id: u64 = attribute(A::CU_POINTER_ATTRIBUTE_BUFFER_ID, first)?;
    let second_id: u64 = attribute(A::CU_POINTER_ATTRIBUTE_BUFFER_ID, second)?;
    ensure!(first_id != second_id, "both have the ID {first_id}");
    let inner: u64 = attribute(A::CU_POINTER_ATTRIBUTE_BUFFER_ID, first + 8)?;
    expect_equal("inside the first", inner, first_id)
}

fn sync_memops() -> Result {
    gpu::start()?;
    let address = gpu::alloc(4096)?;
    let on = 1_u32;
    let which = A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS as u32;
    ok!(cuPointerSetAttribute((&raw const on).cast(), which, address));
    let set: u32 = attribute(A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, address)?;
    expect_equal("SYNC_MEMOPS", set & 1, 1)?;
    let kind = A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32;
    gives!(CUDA_ERROR_INVALID_VALUE, cuPointerSetAttribute((&raw const on).cast(), kind, address));
    Ok(())
}

fn freed() -> Result {
    gpu::start()?;
    let address = gpu::alloc(16 << 20)?;
    ok!(cuMemFree_v2(address));
    let mut kind = 0_u32;
    let which = A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32;
    gives!(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute((&raw mut kind).cast(), which, address));
    Ok(())
}
