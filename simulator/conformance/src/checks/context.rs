//! Contexts and the stack of them that each thread has.

use cuda_abi::sys;
use cuda_abi::types::*;

use crate::check::{Check, Result, check, expect_equal, failed};
use crate::{cu, ensure, gives, gpu, ok, refuses};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "context/none",
        "without a current context calls give CUDA_ERROR_INVALID_CONTEXT (reference)",
        none,
    ),
    check("context/create-makes-current", "cuCtxCreate pushes, cuCtxDestroy pops what is current", create),
    check("context/stack", "push and pop work as a stack, and set replaces its top (reference)", stack),
    check("context/pop-empty", "popping an empty stack is CUDA_ERROR_INVALID_CONTEXT (reference)", pop_empty),
    check(
        "context/per-thread",
        "a new thread has no current context (programming guide, Context)",
        per_thread,
    ),
    check(
        "context/primary-handle",
        "retaining a primary context gives the same handle each time",
        primary_handle,
    ),
    check(
        "context/primary-count",
        "a primary context is active until released as often as retained; one more is an error (reference)",
        primary_count,
    ),
    check(
        "context/primary-reset",
        "cuDevicePrimaryCtxReset destroys what the context held (reference)",
        reset,
    ),
    check(
        "context/destroyed-elsewhere",
        "a context that is destroyed while current to another thread is an error there (reference, cuCtxDestroy)",
        destroyed_elsewhere,
    ),
    check(
        "context/frees-memory",
        "a context's memory is freed with it (reference, cuCtxDestroy)",
        frees_memory,
    ),
    check(
        "context/flags",
        "flags are as given; unknown ones are CUDA_ERROR_INVALID_VALUE (reference)",
        flags,
    ),
    check("context/limits", "limits can be set and read; an unknown one is an error (reference)", limits),
    check("context/ids", "every context has an ID of its own (reference, cuCtxGetId)", ids),
    check(
        "context/priorities",
        "the lowest stream priority is 0, greater ones are below (reference)",
        priorities,
    ),
    check(
        "context/bad-device",
        "a context on a device that does not exist is CUDA_ERROR_INVALID_DEVICE",
        bad_device,
    ),
];

fn create_context() -> Result<CUcontext> {
    let mut context = std::ptr::null_mut();
    ok!(cuCtxCreate_v2(&raw mut context, 0, 0));
    Ok(context)
}

fn current() -> Result<CUcontext> {
    let mut context = std::ptr::dangling_mut();
    ok!(cuCtxGetCurrent(&raw mut context));
    Ok(context)
}

fn none() -> Result {
    ok!(cuInit(0));
    let (mut address, mut device) = (0, 0);
    expect_equal("the current context", current()?, std::ptr::null_mut())?;
    gives!(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc_v2(&raw mut address, 64));
    gives!(CUDA_ERROR_INVALID_CONTEXT, cuCtxGetDevice(&raw mut device));
    gives!(CUDA_ERROR_INVALID_CONTEXT, cuCtxSynchronize());
    Ok(())
}

fn create() -> Result {
    ok!(cuInit(0));
    let first = create_context()?;
    let second = create_context()?;
    expect_equal("the current context", current()?, second)?;
    ok!(cuCtxDestroy_v2(second));
    expect_equal("the current context after cuCtxDestroy", current()?, first)?;
    ok!(cuCtxDestroy_v2(first));
    expect_equal("the current context at the end", current()?, std::ptr::null_mut())
}

fn stack() -> Result {
    ok!(cuInit(0));
    let (first, second) = (create_context()?, create_context()?);
    let mut popped = std::ptr::null_mut();
    ok!(cuCtxPopCurrent_v2(&raw mut popped));
    expect_equal("popped", popped, second)?;
    expect_equal("below it", current()?, first)?;
    ok!(cuCtxPushCurrent_v2(second));
    ok!(cuCtxSetCurrent(first));
    expect_equal("set", current()?, first)?;
    ok!(cuCtxPopCurrent_v2(&raw mut popped));
    expect_equal("set replaced the top", (popped, current()?), (first, first))?;
    ok!(cuCtxSetCurrent(std::ptr::null_mut()));
    expect_equal("set to NULL pops", current()?, std::ptr::null_mut())
}

fn pop_empty() -> Result {
    ok!(cuInit(0));
    let mut popped = std::ptr::null_mut();
    gives!(CUDA_ERROR_INVALID_CONTEXT, cuCtxPopCurrent_v2(&raw mut popped));
    Ok(())
}

fn per_thread() -> Result {
    gpu::start()?;
    let thread = std::thread::spawn(|| current().map(|context| context as usize));
    match thread.join() {
        Ok(context) => expect_equal("the new thread's context", context?, 0),
        Err(_) => failed("a thread panicked"),
    }
}

fn primary_handle() -> Result {
    let first = gpu::start()?;
    let mut again = std::ptr::null_mut();
    ok!(cuDevicePrimaryCtxRetain(&raw mut again, 0));
    expect_equal("handle", again, first)
}

fn primary_state() -> Result<i32> {
    let (mut flags, mut active) = (0, -1);
    ok!(cuDevicePrimaryCtxGetState(0, &raw mut flags, &raw mut active));
    Ok(active)
}

fn primary_count() -> Result {
    ok!(cuInit(0));
    expect_equal("active at first", primary_state()?, 0)?;
    let mut context = std::ptr::null_mut();
    ok!(cuDevicePrimaryCtxRetain(&raw mut context, 0));
    ok!(cuDevicePrimaryCtxRetain(&raw mut context, 0));
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    expect_equal("active after one of two releases", primary_state()?, 1)?;
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    expect_equal("active after both", primary_state()?, 0)?;
    gives!(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease_v2(0));
    Ok(())
}

fn reset() -> Result {
    let context = gpu::start()?;
    let address = gpu::alloc(1 << 20)?;
    ok!(cuDevicePrimaryCtxReset_v2(0));
    let mut again = std::ptr::null_mut();
    ok!(cuDevicePrimaryCtxRetain(&raw mut again, 0));
    expect_equal("handle", again, context)?;
    ok!(cuCtxSetCurrent(again));
    refuses!(cuMemFree_v2(address));
    gpu::alloc(1 << 20).map(|_| ())
}

fn destroyed_elsewhere() -> Result {
    ok!(cuInit(0));
    let context = create_context()? as usize;
    let thread = std::thread::spawn(move || -> Result {
        ok!(cuCtxDestroy_v2(context as CUcontext));
        Ok(())
    });
    thread.join().or_else(|_| failed("a thread panicked"))??;
    let mut address = 0;
    gives!(CUDA_ERROR_CONTEXT_IS_DESTROYED | CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc_v2(&raw mut address, 64));
    Ok(())
}

fn frees_memory() -> Result {
    gpu::start()?;
    let before = gpu::free_bytes()?;
    let context = create_context()?;
    gpu::alloc(64 << 20)?;
    ok!(cuCtxDestroy_v2(context));
    let after = gpu::free_bytes()?;
    ensure!(after + (8 << 20) > before, "free before {before}, after {after}");
    Ok(())
}

fn flags() -> Result {
    ok!(cuInit(0));
    let schedule = CUctx_flags::CU_CTX_SCHED_BLOCKING_SYNC as u32;
    let mut context = std::ptr::null_mut();
    ok!(cuCtxCreate_v2(&raw mut context, schedule, 0));
    let mut flags = 0;
    ok!(cuCtxGetFlags(&raw mut flags));
    expect_equal("schedule", flags & CUctx_flags::CU_CTX_SCHED_MASK as u32, schedule)?;
    gives!(CUDA_ERROR_INVALID_VALUE, cuCtxCreate_v2(&raw mut context, 0x4000_0000, 0));
    Ok(())
}

fn limits() -> Result {
    gpu::start()?;
    let limit = sys::CUlimit::CU_LIMIT_STACK_SIZE as u32;
    let mut value = 0;
    ok!(cuCtxGetLimit(&raw mut value, limit));
    ensure!(value >= 1, "stack size {value}");
    ok!(cuCtxSetLimit(limit, 4096));
    ok!(cuCtxGetLimit(&raw mut value, limit));
    ensure!(value >= 4096, "stack size {value} after setting 4096");
    gives!(CUDA_ERROR_UNSUPPORTED_LIMIT | CUDA_ERROR_INVALID_VALUE, cuCtxGetLimit(&raw mut value, 1000));
    gives!(CUDA_ERROR_UNSUPPORTED_LIMIT | CUDA_ERROR_INVALID_VALUE, cuCtxSetLimit(1000, 1));
    Ok(())
}

fn ids() -> Result {
    ok!(cuInit(0));
    let (first, second) = (create_context()?, create_context()?);
    let mut ids = [0, 0];
    ok!(cuCtxGetId(first, &raw mut ids[0]));
    ok!(cuCtxGetId(second, &raw mut ids[1]));
    ensure!(ids[0] != ids[1], "both have the ID {}", ids[0]);
    Ok(())
}

fn priorities() -> Result {
    gpu::start()?;
    let (mut least, mut greatest) = (77, 77);
    ok!(cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest));
    expect_equal("the least", least, 0)?;
    ensure!(greatest <= least, "the greatest is {greatest}");
    Ok(())
}

fn bad_device() -> Result {
    ok!(cuInit(0));
    let mut context = std::ptr::null_mut();
    gives!(CUDA_ERROR_INVALID_DEVICE, cuCtxCreate_v2(&raw mut context, 0, 1000));
    gives!(CUDA_ERROR_INVALID_DEVICE, cuDevicePrimaryCtxRetain(&raw mut context, -1));
    let code = cu!(cuCtxGetCurrent(&raw mut context));
    expect_equal("cuCtxGetCurrent", (code, context), (0, std::ptr::null_mut()))
}
