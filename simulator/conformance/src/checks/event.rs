//! Events.

use cuda_abi::sys::CUevent_flags as Flags;

use crate::check::{Check, Result, check};
use crate::gpu::Flag;
use crate::{ensure, gives, gpu, kernels, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "event/never-recorded",
        "an event that was never recorded is complete (reference, cuEventQuery)",
        never_recorded,
    ),
    check(
        "event/query",
        "an event is CUDA_ERROR_NOT_READY until the work before it is done (reference)",
        query,
    ),
    check(
        "event/orders-streams",
        "cuStreamWaitEvent holds up later work of the other stream only until the event",
        orders,
    ),
    check(
        "event/latest-record",
        "a wait is for the record before it, not for later ones (reference, cuStreamWaitEvent)",
        latest_record,
    ),
    check("event/elapsed", "the time between two events is not negative and grows with work", elapsed),
    check(
        "event/elapsed-not-ready",
        "the time of an event that is not complete is CUDA_ERROR_NOT_READY (reference)",
        elapsed_not_ready,
    ),
    check(
        "event/elapsed-no-timing",
        "events without timing or record are CUDA_ERROR_INVALID_HANDLE (reference)",
        elapsed_no_timing,
    ),
    check(
        "event/flags",
        "unknown flags, and INTERPROCESS with timing, are CUDA_ERROR_INVALID_VALUE (reference)",
        flags,
    ),
    check(
        "event/destroy-pending",
        "an event may be destroyed while it is pending (reference, cuEventDestroy)",
        destroy_pending,
    ),
    check("event/blocking-sync", "an event with BLOCKING_SYNC synchronises as well", blocking_sync),
];

fn never_recorded() -> Result {
    gpu::start()?;
    let event = gpu::event(Flags::CU_EVENT_DEFAULT)?;
    ok!(cuEventQuery(event));
    ok!(cuEventSynchronize(event));
    let stream = gpu::stream()?;
    ok!(cuStreamWaitEvent(stream, event, 0));
    ok!(cuStreamSynchronize(stream));
    Ok(())
}

fn query() -> Result {
    gpu::start()?;
    let (stream, flag, event) = (gpu::stream()?, Flag::new()?, gpu::event(Flags::CU_EVENT_DEFAULT)?);
    flag.hold(stream)?;
    ok!(cuEventRecord(event, stream));
    gives!(CUDA_ERROR_NOT_READY, cuEventQuery(event));
    flag.set(1);
    ok!(cuEventSynchronize(event));
    ok!(cuEventQuery(event));
    Ok(())
}

fn orders() -> Result {
    gpu::start()?;
    let affine = gpu::function(kernels::BASIC, "affine")?;
    let (first, second, flag) = (gpu::stream()?, gpu::stream()?, Flag::new()?);
    let (event, address) = (gpu::event(Flags::CU_EVENT_DISABLE_TIMING)?, gpu::upload(&[1_u32])?);
    flag.hold(first)?;
    gpu::launch(affine, 1, 1, first, &[address, 1, 4])?;
    ok!(cuEventRecord(event, first));
    ok!(cuStreamWaitEvent(second, event, 0));
    gpu::launch(affine, 1, 1, second, &[address, 10, 0])?;
    gives!(CUDA_ERROR_NOT_READY, cuStreamQuery(second));
    flag.set(1);
    ok!(cuStreamSynchronize(second));
    gpu::expect_content(address, &[50_u32])
}

fn latest_record() -> Result {
    gpu::start()?;
    let (first, second, flag) = (gpu::stream()?, gpu::stream()?, Flag::new()?);
    let event = gpu::event(Flags::CU_EVENT_DISABLE_TIMING)?;
    ok!(cuEventRecord(event, first));
    ok!(cuStreamWaitEvent(second, event, 0));
    flag.hold(first)?;
    ok!(cuEventRecord(event, first));
    ok!(cuStreamSynchronize(second));
    gives!(CUDA_ERROR_NOT_READY, cuEventQuery(event));
    flag.set(1);
    ok!(cuEventSynchronize(event));
    Ok(())
}

fn elapsed() -> Result {
    gpu::start()?;
    let stream = gpu::stream()?;
    let (start, end) = (gpu::event(Flags::CU_EVENT_DEFAULT)?, gpu::event(Flags::CU_EVENT_DEFAULT)?);
    let flag = Flag::new()?;
    ok!(cuEventRecord(start, stream));
    ok!(cuEventSynchronize(start));
    flag.hold(stream)?;
    ok!(cuEventRecord(end, stream));
    let held = std::time::Instant::now();
    // The time that is measured, not a wait for something else.
    std::thread::sleep(std::time::Duration::from_millis(20));
    let held_ms = held.elapsed().as_secs_f32() * 1e3;
    flag.set(1);
    ok!(cuEventSynchronize(end));
    let mut time_ms = -1.0_f32;
    ok!(cuEventElapsedTime(&raw mut time_ms, start, end));
    ensure!(time_ms >= held_ms * 0.9, "{time_ms} ms, the stream was held for {held_ms} ms");
    Ok(())
}

fn elapsed_not_ready() -> Result {
    gpu::start()?;
    let (stream, flag) = (gpu::stream()?, Flag::new()?);
    let (start, end) = (gpu::event(Flags::CU_EVENT_DEFAULT)?, gpu::event(Flags::CU_EVENT_DEFAULT)?);
    ok!(cuEventRecord(start, stream));
    flag.hold(stream)?;
    ok!(cuEventRecord(end, stream));
    let mut time_ms = 0.0;
    gives!(CUDA_ERROR_NOT_READY, cuEventElapsedTime(&raw mut time_ms, start, end));
    flag.set(1);
    ok!(cuEventSynchronize(end));
    Ok(())
}

fn elapsed_no_timing() -> Result {
    gpu::start()?;
    let (timed, untimed) =
        (gpu::event(Flags::CU_EVENT_DEFAULT)?, gpu::event(Flags::CU_EVENT_DISABLE_TIMING)?);
    let mut time_ms = 0.0;
    gives!(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&raw mut time_ms, timed, timed));
    ok!(cuEventRecord(timed, std::ptr::null_mut()));
    ok!(cuEventRecord(untimed, std::ptr::null_mut()));
    gpu::synchronize()?;
    gives!(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&raw mut time_ms, timed, untimed));
    Ok(())
}

fn flags() -> Result {
    gpu::start()?;
    let mut event = std::ptr::null_mut();
    gives!(CUDA_ERROR_INVALID_VALUE, cuEventCreate(&raw mut event, 0x100));
    gives!(CUDA_ERROR_INVALID_VALUE, cuEventCreate(&raw mut event, Flags::CU_EVENT_INTERPROCESS as u32));
    gives!(CUDA_ERROR_INVALID_VALUE, cuEventCreate(std::ptr::null_mut(), 0));
    Ok(())
}

fn destroy_pending() -> Result {
    gpu::start()?;
    let (first, second, flag) = (gpu::stream()?, gpu::stream()?, Flag::new()?);
    let event = gpu::event(Flags::CU_EVENT_DISABLE_TIMING)?;
    flag.hold(first)?;
    ok!(cuEventRecord(event, first));
    ok!(cuStreamWaitEvent(second, event, 0));
    ok!(cuEventDestroy_v2(event));
    gives!(CUDA_ERROR_NOT_READY, cuStreamQuery(second));
    flag.set(1);
    ok!(cuStreamSynchronize(second));
    Ok(())
}

fn blocking_sync() -> Result {
    gpu::start()?;
    let count = gpu::function(kernels::BASIC, "count")?;
    let (stream, address) = (gpu::stream()?, gpu::upload(&[0_u32])?);
    let event = gpu::event(Flags::CU_EVENT_BLOCKING_SYNC)?;
    gpu::launch(count, 4, 64, stream, &[address])?;
    ok!(cuEventRecord(event, stream));
    ok!(cuEventSynchronize(event));
    gpu::expect_content(address, &[256_u32])
}
