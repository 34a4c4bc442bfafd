//! Sticky errors, which leave a context unusable.

use crate::check::{Check, Result, check, expect_equal};
use crate::{cu, ensure, gives, gpu, kernels, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "fault/illegal-address",
        "a store to no memory is CUDA_ERROR_ILLEGAL_ADDRESS at the next synchronisation (reference)",
        illegal_address,
    ),
    check(
        "fault/sticky",
        "after it every call of the context gives the same error (reference, CUDA_ERROR_ILLEGAL_ADDRESS)",
        sticky,
    ),
    check(
        "fault/freed-memory",
        "a load from freed memory of its own is CUDA_ERROR_ILLEGAL_ADDRESS",
        freed_memory,
    ),
    check(
        "fault/host-memory",
        "a load from plain host memory is CUDA_ERROR_ILLEGAL_ADDRESS where pageable access is not supported",
        host_memory,
    ),
    check("fault/misaligned", "a misaligned load is CUDA_ERROR_MISALIGNED_ADDRESS (reference)", misaligned),
    check("fault/trap", "trap is CUDA_ERROR_LAUNCH_FAILED or ILLEGAL_INSTRUCTION (PTX ISA, trap)", trap),
    check("fault/assert", "a failed device assertion is CUDA_ERROR_ASSERT (reference)", assertion),
    check(
        "fault/other-process",
        "another process is not hurt by an error (programming guide)",
        other_process,
    ),
    check(
        "fault/reported-by-query",
        "cuStreamQuery and cuEventQuery report the error as well",
        reported_by_query,
    ),
    check("fault/null", "a store to address 0 is CUDA_ERROR_ILLEGAL_ADDRESS", null),
];

/// Launches a store of one word and gives the result of the synchronisation.
fn store_to(address: u64) -> Result<String> {
    let store = gpu::function(kernels::BASIC, "store")?;
    gpu::launch(store, 1, 1, std::ptr::null_mut(), &[address, 1])?;
    Ok(gpu::name_of(cu!(cuCtxSynchronize())))
}

fn illegal_address() -> Result {
    gpu::start()?;
    expect_equal("cuCtxSynchronize", store_to(0x10_0000_0000_0000)?, "CUDA_ERROR_ILLEGAL_ADDRESS".into())
}

fn sticky() -> Result {
    gpu::start()?;
    let (mut address, known) = (0, gpu::alloc(64)?);
    // What has been allocated in a stream's order and freed could be reused.
    ok!(cuMemAllocAsync(&raw mut address, 64, std::ptr::null_mut()));
    ok!(cuMemFreeAsync(address, std::ptr::null_mut()));
    expect_equal("cuCtxSynchronize", store_to(0x10_0000_0000_0000)?, "CUDA_ERROR_ILLEGAL_ADDRESS".into())?;
    gives!(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemAlloc_v2(&raw mut address, 64));
    gives!(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemAllocAsync(&raw mut address, 64, std::ptr::null_mut()));
    gives!(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemsetD8_v2(known, 0, 64));
    gives!(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
    Ok(())
}

fn freed_memory() -> Result {
    gpu::start()?;
    // Large enough that the driver does not keep it for small allocations.
    let (address, out) = (gpu::alloc(64 << 20)?, gpu::alloc(4)?);
    ok!(cuMemFree_v2(address));
    let load = gpu::function(kernels::BASIC, "load")?;
    gpu::launch(load, 1, 1, std::ptr::null_mut(), &[address, out])?;
    gives!(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
    Ok(())
}

fn host_memory() -> Result {
    gpu::start()?;
    let pageable = cuda_abi::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS;
    if gpu::device_attribute(pageable)? != 0 {
        return crate::check::skipped("the device may access pageable memory");
    }
    let word = Box::new(1_u32);
    let address = &raw const *word as u64;
    expect_equal("cuCtxSynchronize", store_to(address)?, "CUDA_ERROR_ILLEGAL_ADDRESS".into())?;
    expect_equal("the host's word", *word, 1)
}

fn misaligned() -> Result {
    gpu::start()?;
    let (function, address) = (gpu::function(kernels::FAULTS, "misaligned")?, gpu::alloc(64)?);
    gpu::launch(function, 1, 1, std::ptr::null_mut(), &[address])?;
    gives!(CUDA_ERROR_MISALIGNED_ADDRESS, cuCtxSynchronize());
    Ok(())
}

fn trap() -> Result {
    gpu::start()?;
    let function = gpu::function(kernels::FAULTS, "trapped")?;
    gpu::launch(function, 1, 1, std::ptr::null_mut(), &[])?;
    gives!(CUDA_ERROR_LAUNCH_FAILED | CUDA_ERROR_ILLEGAL_INSTRUCTION, cuCtxSynchronize());
    gives!(CUDA_ERROR_LAUNCH_FAILED | CUDA_ERROR_ILLEGAL_INSTRUCTION, cuCtxSynchronize());
    Ok(())
}

fn assertion() -> Result {
    gpu::start()?;
    let function = gpu::function(kernels::FAULTS, "asserted")?;
    gpu::launch(function, 1, 1, std::ptr::null_mut(), &[])?;
    gives!(CUDA_ERROR_ASSERT, cuCtxSynchronize());
    Ok(())
}

fn other_process() -> Result {
    gpu::start()?;
    let mut helper = crate::helper::Helper::start()?;
    let theirs = helper.number("alloc 4096")?;
    helper.ask(&format!("fill {theirs} 3 1024"))?;
    let error = store_to(0x10_0000_0000_0000)?;
    ensure!(error == "CUDA_ERROR_ILLEGAL_ADDRESS", "{error}");
    expect_equal("read by the other process", helper.number(&format!("read {theirs}"))?, 3)
}

fn reported_by_query() -> Result {
    gpu::start()?;
    let store = gpu::function(kernels::BASIC, "store")?;
    let (stream, event) = (gpu::stream()?, gpu::event(cuda_abi::sys::CUevent_flags::CU_EVENT_DEFAULT)?);
    gpu::launch(store, 1, 1, stream, &[0x10_0000_0000_0000, 1])?;
    let recorded = cu!(cuEventRecord(event, stream));
    ensure!(recorded == 0 || recorded == 700, "cuEventRecord: {}", gpu::name_of(recorded));
    gives!(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
    gives!(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamQuery(stream));
    gives!(CUDA_ERROR_ILLEGAL_ADDRESS, cuEventQuery(event));
    Ok(())
}

fn null() -> Result {
    gpu::start()?;
    expect_equal("cuCtxSynchronize", store_to(0)?, "CUDA_ERROR_ILLEGAL_ADDRESS".into())
}
