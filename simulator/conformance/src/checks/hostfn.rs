//! Host functions in a stream's order.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use cuda_abi::types::*;

use crate::check::{Check, Result, check, expect_equal};
use crate::gpu::Flag;
use crate::{gives, gpu, kernels, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "hostfn/order",
        "a host function runs after earlier and before later work (reference, cuLaunchHostFunc)",
        order,
    ),
    check("hostfn/asynchronous", "cuLaunchHostFunc returns before the function has run", asynchronous),
    check(
        "hostfn/not-permitted",
        "calls inside a host function are CUDA_ERROR_NOT_PERMITTED (reference)",
        not_permitted,
    ),
    check("hostfn/null", "a NULL function is CUDA_ERROR_INVALID_VALUE", null),
    check("hostfn/callback", "cuStreamAddCallback gives the stream and CUDA_SUCCESS (reference)", callback),
];

/// What a host function found; zero until it ran.
static SEEN: AtomicU32 = AtomicU32::new(0);
/// The address of pinned memory that a host function reads.
static LOOK_AT: std::sync::atomic::AtomicPtr<u32> = std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());

unsafe extern "C" fn note_word(_: *mut c_void) {
    let word = LOOK_AT.load(Ordering::SeqCst);
    // SAFETY: the check put the address of a pinned word there, which is never freed.
    let value = unsafe { word.read_volatile() };
    SEEN.store(value, Ordering::SeqCst);
    // SAFETY: as above; the stream's order keeps kernels away from it meanwhile.
    unsafe { word.write_volatile(value + 100) };
}

unsafe extern "C" fn add_data(data: *mut c_void) {
    SEEN.fetch_add(u32::try_from(data as usize).unwrap_or(u32::MAX), Ordering::SeqCst);
}

unsafe extern "C" fn call_driver(_: *mut c_void) {
    let mut address = 0;
    // SAFETY: `address` is a live variable.
    let code = unsafe { gpu::api().cuMemAlloc_v2(&raw mut address, 4096) };
    SEEN.store(code, Ordering::SeqCst);
}

unsafe extern "C" fn note_status(stream: CUstream, status: cuda_abi::sys::CUresult, data: *mut c_void) {
    let fits = status == cuda_abi::sys::CUresult::CUDA_SUCCESS && stream.cast() == data;
    SEEN.store(if fits { 1 } else { 2 }, Ordering::SeqCst);
}

fn order() -> Result {
    gpu::start()?;
    let affine = gpu::function(kernels::BASIC, "affine")?;
    let (stream, word) = (gpu::stream()?, gpu::pinned(4)?.cast::<u32>());
    LOOK_AT.store(word, Ordering::SeqCst);
    gpu::launch(affine, 1, 1, stream, &[word as u64, 1, 5])?;
    ok!(cuLaunchHostFunc(stream, Some(note_word), std::ptr::null_mut()));
    gpu::launch(affine, 1, 1, stream, &[word as u64, 2, 0])?;
    ok!(cuStreamSynchronize(stream));
    expect_equal("seen by the function", SEEN.load(Ordering::SeqCst), 5)?;
    // SAFETY: the pinned word, which no work touches any more.
    let last = unsafe { word.read_volatile() };
    expect_equal("after later work", last, 210)
}

fn asynchronous() -> Result {
    gpu::start()?;
    let (stream, flag) = (gpu::stream()?, Flag::new()?);
    flag.hold(stream)?;
    ok!(cuLaunchHostFunc(stream, Some(add_data), 7 as *mut c_void));
    ok!(cuLaunchHostFunc(stream, Some(add_data), 8 as *mut c_void));
    expect_equal("before the stream continues", SEEN.load(Ordering::SeqCst), 0)?;
    flag.set(1);
    ok!(cuStreamSynchronize(stream));
    expect_equal("the sum of both data", SEEN.load(Ordering::SeqCst), 15)
}

fn not_permitted() -> Result {
    gpu::start()?;
    let stream = gpu::stream()?;
    ok!(cuLaunchHostFunc(stream, Some(call_driver), std::ptr::null_mut()));
    ok!(cuStreamSynchronize(stream));
    expect_equal(
        "cuMemAlloc inside",
        gpu::name_of(SEEN.load(Ordering::SeqCst)),
        "CUDA_ERROR_NOT_PERMITTED".into(),
    )
}

fn null() -> Result {
    gpu::start()?;
    gives!(CUDA_ERROR_INVALID_VALUE, cuLaunchHostFunc(gpu::stream()?, None, std::ptr::null_mut()));
    Ok(())
}

fn callback() -> Result {
    gpu::start()?;
    let stream = gpu::stream()?;
    ok!(cuStreamAddCallback(stream, Some(note_status), stream.cast(), 0));
    ok!(cuStreamSynchronize(stream));
    expect_equal("stream and status fit", SEEN.load(Ordering::SeqCst), 1)?;
    gives!(CUDA_ERROR_INVALID_VALUE, cuStreamAddCallback(stream, Some(note_status), std::ptr::null_mut(), 5));
    Ok(())
}
