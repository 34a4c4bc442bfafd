//! Launches and what they are checked for.

use std::ffi::c_void;

use cuda_abi::sys::{CUdevice_attribute, CUfunction_attribute, CUlaunchAttributeID};
use cuda_abi::types::*;

use crate::check::{Check, Result, check, expect_equal};
use crate::{cu, ensure, gives, gpu, kernels, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "launch/dimensions",
        "a dimension of 0 or beyond the limits is CUDA_ERROR_INVALID_VALUE (reference)",
        dimensions,
    ),
    check("launch/block-size", "more than 1024 threads in a block is CUDA_ERROR_INVALID_VALUE", block_size),
    check("launch/maxntid", "more threads than .maxntid permits are refused (PTX ISA, .maxntid)", maxntid),
    check(
        "launch/parameters-copied",
        "parameters are copied by the call (reference, cuLaunchKernel)",
        parameters_copied,
    ),
    check(
        "launch/extra",
        "parameters can come in one buffer (reference, CU_LAUNCH_PARAM_BUFFER_POINTER)",
        extra,
    ),
    check(
        "launch/both-forms",
        "kernelParams and extra together are CUDA_ERROR_INVALID_VALUE (reference)",
        both_forms,
    ),
    check(
        "launch/no-parameters",
        "a kernel with parameters and no values is CUDA_ERROR_INVALID_VALUE",
        no_parameters,
    ),
    check(
        "launch/mixed-sizes",
        "parameters of 1, 2, 4 and 8 bytes arrive (PTX ISA, parameter alignment)",
        mixed_sizes,
    ),
    check("launch/null-function", "a NULL function is CUDA_ERROR_INVALID_HANDLE (reference)", null_function),
    check(
        "launch/dynamic-shared",
        "dynamic shared memory is there, also beyond 48 KiB by opt-in (programming guide)",
        dynamic_shared,
    ),
    check(
        "launch/too-much-shared",
        "more dynamic shared memory than permitted is CUDA_ERROR_INVALID_VALUE",
        too_much_shared,
    ),
    check(
        "launch/other-context",
        "a function of another context is CUDA_ERROR_INVALID_HANDLE or INVALID_CONTEXT",
        other_context,
    ),
    check("launch/ex", "cuLaunchKernelEx without attributes does what cuLaunchKernel does (reference)", ex),
    check(
        "launch/cooperative",
        "all blocks of a cooperative launch run at a time (reference, cuLaunchCooperativeKernel)",
        cooperative,
    ),
    check(
        "launch/cooperative-ex",
        "the attribute COOPERATIVE does the same (reference, cuLaunchKernelEx)",
        cooperative_ex,
    ),
    check(
        "launch/cooperative-too-large",
        "a cooperative grid that does not fit is COOPERATIVE_LAUNCH_TOO_LARGE (reference)",
        cooperative_too_large,
    ),
    check("launch/many-blocks", "a grid of 100,000 blocks runs whole", many_blocks),
    check(
        "launch/occupancy",
        "occupancy is positive, at most the threads of a multiprocessor (reference)",
        occupancy,
    ),
];

fn code_of(function: CUfunction, grid: [u32; 3], block: [u32; 3], address: u64) -> Result<String> {
    let code = gpu::try_launch(function, grid, block, 0, std::ptr::null_mut(), &[address])?;
    Ok(gpu::name_of(code))
}

fn dimensions() -> Result {
    gpu::start()?;
    let (count, address) = (gpu::function(kernels::BASIC, "count")?, gpu::upload(&[0_u32])?);
    for (grid, block) in [
        ([0, 1, 1], [1, 1, 1]),
        ([1, 0, 1], [1, 1, 1]),
        ([1, 1, 1], [0, 1, 1]),
        ([1, 1, 1], [1, 1, 0]),
        ([1, 65536, 1], [1, 1, 1]),
        ([1, 1, 65536], [1, 1, 1]),
        ([1, 1, 1], [1, 1, 65]),
    ] {
        let got = code_of(count, grid, block, address)?;
        expect_equal(&format!("grid {grid:?}, block {block:?}"), got, "CUDA_ERROR_INVALID_VALUE".into())?;
    }
    gpu::synchronize()?;
    gpu::expect_content(address, &[0_u32])
}

fn block_size() -> Result {
    gpu::start()?;
    let (count, address) = (gpu::function(kernels::BASIC, "count")?, gpu::upload(&[0_u32])?);
    let got = code_of(count, [1; 3], [1025, 1, 1], address)?;
    expect_equal("1025 threads", got, "CUDA_ERROR_INVALID_VALUE".into())?;
    let got = code_of(count, [1; 3], [32, 33, 1], address)?;
    expect_equal("32 x 33 threads", got, "CUDA_ERROR_INVALID_VALUE".into())?;
    gpu::launch(count, 1, 1024, std::ptr::null_mut(), &[address])?;
    gpu::expect_content(address, &[1024_u32])
}

fn maxntid() -> Result {
    gpu::start()?;
    let (bounded, address) = (gpu::function(kernels::MODULE, "bounded")?, gpu::upload(&[0_u32])?);
    let code = code_of(bounded, [1; 3], [65, 1, 1], address)?;
    let refused = ["CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"];
    ensure!(refused.contains(&code.as_str()), "65 threads: {code}");
    gpu::launch(bounded, 1, 64, std::ptr::null_mut(), &[address])?;
    gpu::expect_content(address, &[1_u32])
}

fn parameters_copied() -> Result {
    gpu::start()?;
    let store = gpu::function(kernels::BASIC, "store")?;
    let (stream, flag, address) = (gpu::stream()?, gpu::Flag::new()?, gpu::upload(&[0_u32])?);
    flag.hold(stream)?;
    let mut parameters = [address, 5];
    gpu::launch(store, 1, 1, stream, &parameters)?;
    parameters.fill(0);
    std::hint::black_box(&parameters);
    flag.set(1);
    ok!(cuStreamSynchronize(stream));
    gpu::expect_content(address, &[5_u32])
}

/// What `extra` takes.
fn in_buffer(buffer: &mut [u8], size_bytes: &mut usize) -> [*mut c_void; 5] {
    [
        std::ptr::dangling_mut::<c_void>(),
        buffer.as_mut_ptr().cast(),
        2 as *mut c_void,
        std::ptr::from_mut(size_bytes).cast(),
        std::ptr::null_mut(),
    ]
}

fn extra() -> Result {
    gpu::start()?;
    let (affine, address) = (gpu::function(kernels::BASIC, "affine")?, gpu::upload(&[3_u32])?);
    let mut buffer = [0_u8; 16];
    buffer[..8].copy_from_slice(&address.to_le_bytes());
    buffer[8..12].copy_from_slice(&5_u32.to_le_bytes());
    buffer[12..].copy_from_slice(&2_u32.to_le_bytes());
    let mut size_bytes = buffer.len();
    let mut extra = in_buffer(&mut buffer, &mut size_bytes);
    let (stream, none) = (std::ptr::null_mut(), std::ptr::null_mut());
    ok!(cuLaunchKernel(affine, 1, 1, 1, 1, 1, 1, 0, stream, none, extra.as_mut_ptr()));
    gpu::expect_content(address, &[17_u32])
}

fn both_forms() -> Result {
    gpu::start()?;
    let (count, address) = (gpu::function(kernels::BASIC, "count")?, gpu::upload(&[0_u32])?);
    let (mut buffer, mut size_bytes) = (address.to_le_bytes(), 8);
    let mut extra = in_buffer(&mut buffer, &mut size_bytes);
    let parameters = [address];
    let mut pointers = gpu::parameter_pointers(&parameters);
    let stream = std::ptr::null_mut();
    gives!(
        CUDA_ERROR_INVALID_VALUE,
        cuLaunchKernel(count, 1, 1, 1, 1, 1, 1, 0, stream, pointers.as_mut_ptr(), extra.as_mut_ptr())
    );
    Ok(())
}

fn no_parameters() -> Result {
    gpu::start()?;
    let count = gpu::function(kernels::BASIC, "count")?;
    let none = std::ptr::null_mut();
    gives!(
        CUDA_ERROR_INVALID_VALUE,
        cuLaunchKernel(count, 1, 1, 1, 1, 1, 1, 0, std::ptr::null_mut(), none, none)
    );
    Ok(())
}

fn mixed_sizes() -> Result {
    gpu::start()?;
    let (mixed, out) = (gpu::function(kernels::MODULE, "mixed")?, gpu::alloc(8)?);
    // What lies above a small parameter's bytes does not count.
    let parameters = [0xffff_ff05, 0xffff_0700, out, 0xffff_ffff_0009_0000, 0x0b00_0000_0000_0000];
    gpu::launch(mixed, 1, 1, std::ptr::null_mut(), &parameters)?;
    gpu::expect_content(out, &[0x0b00_0000_0009_0705_u64])
}

fn null_function() -> Result {
    gpu::start()?;
    let code = gpu::try_launch(std::ptr::null_mut(), [1; 3], [1; 3], 0, std::ptr::null_mut(), &[])?;
    let refused = ["CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_INVALID_VALUE"];
    ensure!(refused.contains(&gpu::name_of(code).as_str()), "{}", gpu::name_of(code));
    Ok(())
}

fn run_mirror(threads: u32, shared_bytes: u32) -> Result<u32> {
    let mirror = gpu::function(kernels::MODULE, "mirror")?;
    let out = gpu::alloc(4096)?;
    let opt_in = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as u32;
    if shared_bytes > 48 << 10 {
        ok!(cuFuncSetAttribute(mirror, opt_in, i32::try_from(shared_bytes).unwrap_or(i32::MAX)));
    }
    let block = [threads, 1, 1];
    let code = gpu::try_launch(mirror, [1; 3], block, shared_bytes, std::ptr::null_mut(), &[out])?;
    if code == 0 {
        let wanted: Vec<u32> = (0..threads).rev().collect();
        gpu::expect_content(out, &wanted)?;
    }
    Ok(code)
}

fn dynamic_shared() -> Result {
    gpu::start()?;
    expect_equal("4 KiB", run_mirror(1024, 4096)?, 0)?;
    expect_equal("64 KiB", run_mirror(256, 64 << 10)?, 0)
}

fn too_much_shared() -> Result {
    gpu::start()?;
    let (mirror, out) = (gpu::function(kernels::MODULE, "mirror")?, gpu::alloc(4096)?);
    let code = gpu::try_launch(mirror, [1; 3], [1; 3], 64 << 10, std::ptr::null_mut(), &[out])?;
    expect_equal("64 KiB without opt-in", gpu::name_of(code), "CUDA_ERROR_INVALID_VALUE".into())?;
    let opt_in = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as u32;
    gives!(CUDA_ERROR_INVALID_VALUE, cuFuncSetAttribute(mirror, opt_in, 10 << 20));
    Ok(())
}

fn other_context() -> Result {
    gpu::start()?;
    let (count, address) = (gpu::function(kernels::BASIC, "count")?, gpu::upload(&[0_u32])?);
    let mut context = std::ptr::null_mut();
    ok!(cuCtxCreate_v2(&raw mut context, 0, 0));
    let code = code_of(count, [1; 3], [1; 3], address)?;
    let refused =
        ["CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_INVALID_RESOURCE_TYPE"];
    ensure!(refused.contains(&code.as_str()), "{code}");
    Ok(())
}

fn config(blocks: u32, threads: u32, attributes: &mut [CUlaunchAttribute]) -> CUlaunchConfig {
    CUlaunchConfig {
        gridDimX: blocks,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        hStream: std::ptr::null_mut(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: u32::try_from(attributes.len()).unwrap_or(0),
    }
}

fn ex() -> Result {
    gpu::start()?;
    let (count, address) = (gpu::function(kernels::BASIC, "count")?, gpu::upload(&[0_u32])?);
    let parameters = [address];
    let mut pointers = gpu::parameter_pointers(&parameters);
    let config = config(3, 50, &mut []);
    ok!(cuLaunchKernelEx(&raw const config, count, pointers.as_mut_ptr(), std::ptr::null_mut()));
    gpu::expect_content(address, &[150_u32])
}

fn cooperative() -> Result {
    gpu::start()?;
    let (meet, arrived) = (gpu::function(kernels::TOGETHER, "meet")?, gpu::upload(&[0_u32; 9])?);
    let parameters = [arrived, arrived + 4];
    let mut pointers = gpu::parameter_pointers(&parameters);
    let stream = gpu::stream()?;
    ok!(cuLaunchCooperativeKernel(meet, 8, 1, 1, 1, 1, 1, 0, stream, pointers.as_mut_ptr()));
    ok!(cuStreamSynchronize(stream));
    gpu::expect_content(arrived, &[8_u32; 9])
}

fn cooperative_ex() -> Result {
    gpu::start()?;
    let (meet, arrived) = (gpu::function(kernels::TOGETHER, "meet")?, gpu::upload(&[0_u32; 9])?);
    let parameters = [arrived, arrived + 4];
    let mut pointers = gpu::parameter_pointers(&parameters);
    let mut attributes = [CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
        pad: [0; 4],
        value: CUlaunchAttributeValue { cooperative: 1 },
    }];
    let config = config(8, 1, &mut attributes);
    ok!(cuLaunchKernelEx(&raw const config, meet, pointers.as_mut_ptr(), std::ptr::null_mut()));
    gpu::synchronize()?;
    gpu::expect_content(arrived, &[8_u32; 9])
}

fn cooperative_too_large() -> Result {
    gpu::start()?;
    let (meet, arrived) = (gpu::function(kernels::TOGETHER, "meet")?, gpu::alloc(4 << 20)?);
    let parameters = [arrived, arrived + 4];
    let mut pointers = gpu::parameter_pointers(&parameters);
    let stream = std::ptr::null_mut();
    gives!(
        CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
        cuLaunchCooperativeKernel(meet, 1 << 20, 1, 1, 1024, 1, 1, 0, stream, pointers.as_mut_ptr())
    );
    Ok(())
}

fn many_blocks() -> Result {
    gpu::start()?;
    let (count, address) = (gpu::function(kernels::BASIC, "count")?, gpu::upload(&[0_u32])?);
    gpu::launch(count, 100_000, 2, std::ptr::null_mut(), &[address])?;
    gpu::expect_content(address, &[200_000_u32])
}

fn occupancy() -> Result {
    gpu::start()?;
    let (add, mut blocks) = (gpu::function(kernels::BASIC, "add")?, 0);
    ok!(cuOccupancyMaxActiveBlocksPerMultiprocessor(&raw mut blocks, add, 256, 0));
    let threads =
        gpu::device_attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?;
    ensure!(blocks >= 1 && blocks * 256 <= threads, "{blocks} blocks of 256 threads, {threads} threads");
    let code = cu!(cuOccupancyMaxActiveBlocksPerMultiprocessor(&raw mut blocks, add, 0, 0));
    ensure!(code != 0, "blocks of 0 threads are accepted");
    Ok(())
}
