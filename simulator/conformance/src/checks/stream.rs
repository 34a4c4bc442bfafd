//! Streams and what orders work between them.

use cuda_abi::sys::CUstream_flags as Flags;
use cuda_abi::types::*;

use crate::check::{Check, Result, check, expect_equal, failed};
use crate::gpu::Flag;
use crate::{cu, ensure, gives, gpu, kernels, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check("stream/order", "work on one stream runs in its order (programming guide, Streams)", order),
    check("stream/independent", "a stream that is held up does not hold up another", independent),
    check("stream/query", "a stream with work is CUDA_ERROR_NOT_READY, then CUDA_SUCCESS (reference)", query),
    check(
        "stream/legacy-waits",
        "the legacy default stream waits for blocking streams (reference)",
        legacy_waits,
    ),
    check(
        "stream/legacy-is-waited-for",
        "blocking streams wait for the legacy default stream (reference)",
        legacy_is_waited_for,
    ),
    check(
        "stream/non-blocking",
        "a non-blocking stream and the legacy stream do not wait for each other",
        non_blocking,
    ),
    check("stream/per-thread", "each thread has a default stream of its own (reference)", per_thread),
    check(
        "stream/per-thread-and-legacy",
        "the legacy stream waits for per-thread default streams (reference)",
        per_thread_and_legacy,
    ),
    check(
        "stream/special-handles",
        "CU_STREAM_LEGACY and CU_STREAM_PER_THREAD are accepted",
        special_handles,
    ),
    check("stream/context-synchronize", "cuCtxSynchronize waits for all streams", context_synchronize),
    check(
        "stream/destroy",
        "a stream that is destroyed still does its work (reference, cuStreamDestroy)",
        destroy,
    ),
    check("stream/flags", "a stream has the flags that it was made with; others are refused", flags),
    check(
        "stream/priority",
        "a priority outside the range is clamped (reference, cuStreamCreateWithPriority)",
        priority,
    ),
    check("stream/context", "a stream knows its context, and its ID is its own", context_and_id),
    check("stream/many-threads", "16 threads submit to streams of their own", many_threads),
];

fn order() -> Result {
    gpu::start()?;
    let affine = gpu::function(kernels::BASIC, "affine")?;
    let (stream, address) = (gpu::stream()?, gpu::upload(&[1_u32])?);
    let mut wanted = 1_u32;
    for term in 0..200_u32 {
        gpu::launch(affine, 1, 1, stream, &[address, 3, u64::from(term)])?;
        wanted = wanted.wrapping_mul(3).wrapping_add(term);
    }
    ok!(cuStreamSynchronize(stream));
    gpu::expect_content(address, &[wanted])
}

fn independent() -> Result {
    gpu::start()?;
    let (held, free, flag) = (gpu::stream()?, gpu::stream()?, Flag::new()?);
    let address = gpu::alloc(4096)?;
    flag.hold(held)?;
    ok!(cuMemsetD8Async(address, 1, 4096, free));
    ok!(cuStreamSynchronize(free));
    gives!(CUDA_ERROR_NOT_READY, cuStreamQuery(held));
    flag.set(1);
    ok!(cuStreamSynchronize(held));
    Ok(())
}

fn query() -> Result {
    gpu::start()?;
    let (stream, flag) = (gpu::stream()?, Flag::new()?);
    ok!(cuStreamQuery(stream));
    flag.hold(stream)?;
    gives!(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
    flag.set(1);
    ok!(cuStreamSynchronize(stream));
    ok!(cuStreamQuery(stream));
    Ok(())
}

fn legacy_waits() -> Result {
    gpu::start()?;
    let (stream, flag) = (gpu::stream_with(Flags::CU_STREAM_DEFAULT)?, Flag::new()?);
    let count = gpu::function(kernels::BASIC, "count")?;
    let address = gpu::pinned(4)? as u64;
    flag.hold(stream)?;
    gpu::launch(count, 1, 1, std::ptr::null_mut(), &[address])?;
    gives!(CUDA_ERROR_NOT_READY, cuStreamQuery(std::ptr::null_mut()));
    flag.set(1);
    ok!(cuStreamSynchronize(std::ptr::null_mut()));
    ok!(cuStreamQuery(stream));
    Ok(())
}

fn legacy_is_waited_for() -> Result {
    gpu::start()?;
    let stream = gpu::stream_with(Flags::CU_STREAM_DEFAULT)?;
    let (flag, address) = (Flag::new()?, gpu::alloc(4096)?);
    flag.hold(std::ptr::null_mut())?;
    ok!(cuMemsetD8Async(address, 1, 4096, stream));
    gives!(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
    flag.set(1);
    ok!(cuStreamSynchronize(stream));
    Ok(())
}

fn non_blocking() -> Result {
    gpu::start()?;
    let (stream, flag, address) = (gpu::stream()?, Flag::new()?, gpu::alloc(4096)?);
    flag.hold(stream)?;
    ok!(cuMemsetD8Async(address, 1, 4096, std::ptr::null_mut()));
    ok!(cuStreamSynchronize(std::ptr::null_mut()));
    gives!(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
    flag.set(1);
    ok!(cuStreamSynchronize(stream));
    Ok(())
}

/// Runs the check's other half in a thread with the same context.
fn in_thread(context: CUcontext, body: impl FnOnce() -> Result + Send + 'static) -> Result {
    let context = context as usize;
    let thread = std::thread::spawn(move || -> Result {
        ok!(cuCtxSetCurrent(context as CUcontext));
        body()
    });
    thread.join().unwrap_or_else(|_| failed("a thread panicked"))
}

fn per_thread() -> Result {
    let context = gpu::start()?;
    let (flag, address) = (Flag::new()?, gpu::alloc(4096)?);
    ok!(cuStreamWaitValue32_v2_ptsz(std::ptr::null_mut(), flag.address(), 1, 0));
    in_thread(context, move || {
        ok!(cuMemsetD8Async_ptsz(address, 1, 4096, std::ptr::null_mut()));
        ok!(cuStreamSynchronize_ptsz(std::ptr::null_mut()));
        Ok(())
    })?;
    gives!(CUDA_ERROR_NOT_READY, cuStreamQuery_ptsz(std::ptr::null_mut()));
    flag.set(1);
    ok!(cuStreamSynchronize_ptsz(std::ptr::null_mut()));
    Ok(())
}

fn per_thread_and_legacy() -> Result {
    gpu::start()?;
    let (flag, address) = (Flag::new()?, gpu::alloc(4096)?);
    ok!(cuStreamWaitValue32_v2_ptsz(std::ptr::null_mut(), flag.address(), 1, 0));
    ok!(cuMemsetD8Async(address, 1, 4096, std::ptr::null_mut()));
    gives!(CUDA_ERROR_NOT_READY, cuStreamQuery(std::ptr::null_mut()));
    flag.set(1);
    ok!(cuStreamSynchronize(std::ptr::null_mut()));
    Ok(())
}

fn special_handles() -> Result {
    gpu::start()?;
    let address = gpu::alloc(4096)?;
    for handle in [1_usize, 2] {
        ok!(cuMemsetD8Async(address, 1, 4096, handle as CUstream));
        ok!(cuStreamSynchronize(handle as CUstream));
    }
    Ok(())
}

fn context_synchronize() -> Result {
    gpu::start()?;
    let affine = gpu::function(kernels::BASIC, "affine")?;
    let addresses = (0..4).map(|_| gpu::upload(&[1_u32])).collect::<Result<Vec<_>>>()?;
    for &address in &addresses {
        let stream = gpu::stream()?;
        for _ in 0..20 {
            gpu::launch(affine, 1, 1, stream, &[address, 2, 0])?;
        }
    }
    gpu::synchronize()?;
    for address in addresses {
        gpu::expect_content(address, &[1_u32 << 20])?;
    }
    Ok(())
}

fn destroy() -> Result {
    gpu::start()?;
    let (stream, flag) = (gpu::stream()?, Flag::new()?);
    let event = gpu::event(CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
    let count = gpu::function(kernels::BASIC, "count")?;
    let address = gpu::upload(&[0_u32])?;
    flag.hold(stream)?;
    gpu::launch(count, 1, 32, stream, &[address])?;
    ok!(cuEventRecord(event, stream));
    ok!(cuStreamDestroy_v2(stream));
    flag.set(1);
    ok!(cuEventSynchronize(event));
    gpu::expect_content(address, &[32_u32])
}

fn flags() -> Result {
    gpu::start()?;
    for flag in [Flags::CU_STREAM_DEFAULT, Flags::CU_STREAM_NON_BLOCKING] {
        let stream = gpu::stream_with(flag)?;
        let mut got = 77;
        ok!(cuStreamGetFlags(stream, &raw mut got));
        expect_equal("flags", got, flag as u32)?;
        ok!(cuStreamDestroy_v2(stream));
    }
    let mut stream = std::ptr::null_mut();
    gives!(CUDA_ERROR_INVALID_VALUE, cuStreamCreate(&raw mut stream, 8));
    gives!(CUDA_ERROR_INVALID_VALUE, cuStreamCreate(std::ptr::null_mut(), 0));
    Ok(())
}

fn priority() -> Result {
    gpu::start()?;
    let (mut least, mut greatest) = (0, 0);
    ok!(cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest));
    for (asked, wanted) in [(greatest, greatest), (greatest - 100, greatest), (least + 100, least)] {
        let (mut stream, mut got) = (std::ptr::null_mut(), 77);
        ok!(cuStreamCreateWithPriority(&raw mut stream, 0, asked));
        ok!(cuStreamGetPriority(stream, &raw mut got));
        expect_equal(&format!("priority {asked}"), got, wanted)?;
    }
    Ok(())
}

fn context_and_id() -> Result {
    let context = gpu::start()?;
    let (first, second) = (gpu::stream()?, gpu::stream()?);
    let mut its_context = std::ptr::null_mut();
    ok!(cuStreamGetCtx(first, &raw mut its_context));
    expect_equal("context", its_context, context)?;
    let mut ids = [0, 0];
    ok!(cuStreamGetId(first, &raw mut ids[0]));
    ok!(cuStreamGetId(second, &raw mut ids[1]));
    ensure!(ids[0] != ids[1], "both have the ID {}", ids[0]);
    Ok(())
}

fn many_threads() -> Result {
    let context = gpu::start()? as usize;
    let affine = gpu::function(kernels::BASIC, "affine")? as usize;
    let threads: Vec<_> = (0..16_u32)
        .map(|index| {
            std::thread::spawn(move || -> Result {
                ok!(cuCtxSetCurrent(context as CUcontext));
                let address = gpu::upload(&[index])?;
                let parameters = [address, 1, 1];
                let mut pointers = gpu::parameter_pointers(&parameters);
                for _ in 0..50 {
                    let code = cu!(cuLaunchKernel_ptsz(
                        affine as CUfunction,
                        1,
                        1,
                        1,
                        1,
                        1,
                        1,
                        0,
                        std::ptr::null_mut(),
                        pointers.as_mut_ptr(),
                        std::ptr::null_mut(),
                    ));
                    expect_equal("cuLaunchKernel_ptsz", code, 0)?;
                }
                ok!(cuStreamSynchronize_ptsz(std::ptr::null_mut()));
                gpu::expect_content(address, &[index + 50])
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap_or_else(|_| failed("a thread panicked"))?;
    }
    Ok(())
}
