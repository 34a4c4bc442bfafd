//! What waits for what.

use std::time::{Duration, Instant};

use cuda_abi::sys::CUresult;
use cuda_abi::types::CUstream;

use super::super::run::Pace;
use super::super::testing::{Device, Gate, call, pattern, stream};
use crate::testing;

/// Page-locked memory of the host, as a slice.
fn pinned(len: usize) -> &'static mut [u8] {
    let mut start = std::ptr::null_mut();
    call!(cuMemHostAlloc(&raw mut start, len, 0)).unwrap();
    // SAFETY: `len` zeroed bytes that are never freed.
    unsafe { std::slice::from_raw_parts_mut(start.cast(), len) }
}

#[test]
fn pageable_memory_is_read_at_the_call() {
    let _context = testing::context();
    let device = Device::with(&[0; 5000]);
    let stream = stream();
    let gate = Gate::on(stream);
    let mut source = pattern(5000, 1);
    call!(cuMemcpyHtoDAsync_v2(device.address, source.as_ptr().cast(), 5000, stream)).unwrap();
    source.fill(0xee);
    gate.open();
    call!(cuStreamSynchronize(stream)).unwrap();
    assert!(device.read() == pattern(5000, 1));
}

#[test]
fn rows_of_pageable_memory_are_read_at_the_call() {
    let _context = testing::context();
    let device = Device::with(&[0; 40]);
    let stream = stream();
    let gate = Gate::on(stream);
    let mut source = pattern(100, 1);
    let params = cuda_abi::sys::CUDA_MEMCPY2D {
        srcXInBytes: 3,
        srcY: 1,
        srcMemoryType: cuda_abi::sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: source.as_ptr().cast(),
        srcDevice: 0,
        srcArray: std::ptr::null_mut(),
        srcPitch: 20,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: cuda_abi::sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: device.address,
        dstArray: std::ptr::null_mut(),
        dstPitch: 10,
        WidthInBytes: 10,
        Height: 4,
    };
    call!(cuMemcpy2DAsync_v2(&raw const params, stream)).unwrap();
    source.fill(0xee);
    gate.open();
    call!(cuStreamSynchronize(stream)).unwrap();
    let old = pattern(100, 1);
    let model: Vec<u8> = (1..5).flat_map(|row| old[row * 20 + 3..row * 20 + 13].to_vec()).collect();
    assert_eq!(device.read(), model);
}

#[test]
fn pinned_memory_is_read_in_the_stream_s_order() {
    let _context = testing::context();
    let device = Device::with(&[0; 5000]);
    let stream = stream();
    let gate = Gate::on(stream);
    let source = pinned(5000);
    source.copy_from_slice(&pattern(5000, 1));
    call!(cuMemcpyHtoDAsync_v2(device.address, source.as_ptr().cast(), 5000, stream)).unwrap();
    source.fill(0xee);
    gate.open();
    call!(cuStreamSynchronize(stream)).unwrap();
    assert!(device.read().iter().all(|byte| *byte == 0xee));
}

#[test]
fn a_copy_into_pageable_memory_is_done_when_the_call_returns() {
    let _context = testing::context();
    let device = Device::with(&pattern(5000, 1));
    let stream = stream();
    let mut target = vec![0; 5000];
    call!(cuMemcpyDtoHAsync_v2(target.as_mut_ptr().cast(), device.address, 5000, stream)).unwrap();
    assert!(target == pattern(5000, 1));
}

#[test]
fn a_copy_into_pinned_memory_waits_for_its_turn() {
    let _context = testing::context();
    let device = Device::with(&pattern(5000, 1));
    let stream = stream();
    let gate = Gate::on(stream);
    let target = pinned(5000);
    call!(cuMemcpyDtoHAsync_v2(target.as_mut_ptr().cast(), device.address, 5000, stream)).unwrap();
    assert_eq!(call!(cuStreamQuery(stream)), Err(CUresult::CUDA_ERROR_NOT_READY));
    assert!(target.iter().all(|byte| *byte == 0));
    gate.open();
    call!(cuStreamSynchronize(stream)).unwrap();
    assert!(*target == pattern(5000, 1)[..]);
}

/// CU_STREAM_LEGACY.
const LEGACY: CUstream = 1 as CUstream;

#[test]
fn copies_within_the_device_and_fills_do_not_wait() {
    let _context = testing::context();
    let (source, target) = (Device::with(&pattern(64, 1)), Device::with(&[0; 64]));
    let gate = Gate::on(LEGACY);
    // These would not return before the gate is open if they waited.
    call!(cuMemcpyDtoD_v2(target.address, source.address, 32)).unwrap();
    call!(cuMemsetD8_v2(target.address + 32, 7, 32)).unwrap();
    assert_eq!(call!(cuStreamQuery(LEGACY)), Err(CUresult::CUDA_ERROR_NOT_READY));
    gate.open();
    let bytes = target.read();
    assert_eq!(bytes[..32], pattern(64, 1)[..32]);
    assert_eq!(bytes[32..], [7; 32]);
}

#[test]
fn the_speed_of_the_bus_is_held() {
    let start = Instant::now();
    let mut pace = Pace::start(Some(1e6));
    pace.done(10_000);
    pace.done(20_000);
    assert!(start.elapsed() >= Duration::from_millis(30));
    let mut free = Pace::start(None);
    free.done(usize::MAX);
}
