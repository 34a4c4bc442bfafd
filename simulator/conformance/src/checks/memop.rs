//! Streams that wait for a value in memory, or write one.

use cuda_abi::sys::{self, CUstreamBatchMemOpType as Operation};
use cuda_abi::types::CUstreamBatchMemOpParams;

use crate::check::{Check, Result, check, expect_equal};
use crate::gpu::Flag;
use crate::{gives, gpu, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "memop/wait-kinds",
        "GEQ, EQ, AND and NOR wait for what they say (reference, CUstreamWaitValue_flags)",
        wait_kinds,
    ),
    check("memop/geq-is-cyclic", "GEQ compares the difference as a signed number (reference)", geq_is_cyclic),
    check("memop/write", "a stream writes a value in its order (reference, cuStreamWriteValue32)", write),
    check("memop/device-memory", "a wait on device memory ends by another stream's write", device_memory),
    check("memop/64-bit", "values of 64 bits are waited for and written", wide),
    check(
        "memop/batch",
        "several operations in one call keep their order (reference, cuStreamBatchMemOp)",
        batch,
    ),
    check("memop/alignment", "a misaligned address is CUDA_ERROR_INVALID_VALUE", alignment),
];

const GEQ: u32 = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
const EQ: u32 = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ as u32;
const AND: u32 = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_AND as u32;
const NOR: u32 = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_NOR as u32;

/// Whether a waiting stream continues at `good`, after each of `bad` has kept it waiting.
fn waits(kind: u32, value: u32, bad: &[u32], good: u32) -> Result {
    let (stream, flag) = (gpu::stream()?, Flag::new()?);
    flag.set(bad[0]);
    ok!(cuStreamWaitValue32_v2(stream, flag.address(), value, kind));
    for other in bad {
        flag.set(*other);
        gives!(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
    }
    flag.set(good);
    ok!(cuStreamSynchronize(stream));
    Ok(())
}

fn wait_kinds() -> Result {
    gpu::start()?;
    waits(GEQ, 10, &[0, 9], 10)?;
    waits(GEQ, 10, &[5], 1000)?;
    waits(EQ, 10, &[0, 9, 11], 10)?;
    waits(AND, 0b1100, &[0, 0b0011], 0b0110)?;
    waits(NOR, 0xffff_0000, &[u32::MAX], 0x0000_fffe)
}

fn geq_is_cyclic() -> Result {
    gpu::start()?;
    waits(GEQ, 0xffff_fff0, &[0xffff_ffef, 0x8000_0000], 5)
}

fn write() -> Result {
    gpu::start()?;
    let (stream, held, written) = (gpu::stream()?, Flag::new()?, Flag::new()?);
    held.hold(stream)?;
    ok!(cuStreamWriteValue32_v2(stream, written.address(), 42, 0));
    expect_equal("before the stream continues", written.get(), 0)?;
    held.set(1);
    ok!(cuStreamSynchronize(stream));
    expect_equal("written", written.get(), 42)
}

fn device_memory() -> Result {
    gpu::start()?;
    let (first, second, address) = (gpu::stream()?, gpu::stream()?, gpu::upload(&[0_u32])?);
    ok!(cuStreamWaitValue32_v2(first, address, 3, EQ));
    gives!(CUDA_ERROR_NOT_READY, cuStreamQuery(first));
    ok!(cuStreamWriteValue32_v2(second, address, 3, 0));
    ok!(cuStreamSynchronize(first));
    Ok(())
}

fn wide() -> Result {
    gpu::start()?;
    let (first, second) = (gpu::stream()?, gpu::stream()?);
    let (address, value) = (gpu::upload(&[0_u64])?, 1_u64 << 40);
    ok!(cuStreamWaitValue64_v2(first, address, value, EQ));
    ok!(cuStreamWriteValue64_v2(second, address, value, 0));
    ok!(cuStreamSynchronize(first));
    gpu::expect_content(address, &[value])
}

fn operation(kind: Operation, address: u64, value: u32) -> CUstreamBatchMemOpParams {
    let mut operation = CUstreamBatchMemOpParams { pad: [0; 6] };
    // Both kinds have one layout: what, where, the value, flags, alias.
    operation.writeValue = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st {
        operation: kind,
        address,
        __bindgen_anon_1:
            sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1 { value },
        flags: 0,
        alias: 0,
    };
    operation
}

fn batch() -> Result {
    gpu::start()?;
    let (stream, held, first, second) = (gpu::stream()?, Flag::new()?, Flag::new()?, Flag::new()?);
    let mut operations = [
        operation(Operation::CU_STREAM_MEM_OP_WRITE_VALUE_32, first.address(), 1),
        operation(Operation::CU_STREAM_MEM_OP_WAIT_VALUE_32, held.address(), 1),
        operation(Operation::CU_STREAM_MEM_OP_WRITE_VALUE_32, second.address(), 2),
    ];
    ok!(cuStreamBatchMemOp_v2(stream, 3, operations.as_mut_ptr(), 0));
    gives!(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
    expect_equal("the second write", second.get(), 0)?;
    held.set(1);
    ok!(cuStreamSynchronize(stream));
    expect_equal("both writes", (first.get(), second.get()), (1, 2))
}

fn alignment() -> Result {
    gpu::start()?;
    let (stream, address) = (gpu::stream()?, gpu::alloc(64)?);
    gives!(CUDA_ERROR_INVALID_VALUE, cuStreamWriteValue32_v2(stream, address + 2, 1, 0));
    gives!(CUDA_ERROR_INVALID_VALUE, cuStreamWaitValue64_v2(stream, address + 4, 1, 0));
    gives!(CUDA_ERROR_INVALID_VALUE, cuStreamWaitValue32_v2(stream, address, 1, 17));
    Ok(())
}
