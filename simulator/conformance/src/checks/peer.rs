//! One device's access to the memory of another.

use cuda_abi::types::*;

use crate::check::{Check, Result, check, expect_equal, skipped};
use crate::{gives, gpu, kernels, ok, refuses};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "peer/needed",
        "a kernel that touches another device's memory without peer access is CUDA_ERROR_ILLEGAL_ADDRESS",
        needed,
    ),
    check(
        "peer/enabled",
        "with peer access kernels read and write the other device's memory (reference, cuCtxEnablePeerAccess)",
        enabled,
    ),
    check(
        "peer/state",
        "enabling twice and disabling what is not enabled have errors of their own (reference)",
        state,
    ),
    check("peer/itself", "a context cannot be its own peer (reference, cuCtxEnablePeerAccess)", itself),
];

/// Contexts on two devices that can access each other, the second current.
fn two_contexts() -> Result<(CUcontext, CUcontext)> {
    let first = gpu::start()?;
    let device = gpu::second_device()?;
    let mut possible = 0;
    ok!(cuDeviceCanAccessPeer(&raw mut possible, device, 0));
    if possible == 0 {
        return skipped("the devices cannot access each other");
    }
    let mut second = std::ptr::null_mut();
    ok!(cuDevicePrimaryCtxRetain(&raw mut second, device));
    ok!(cuCtxSetCurrent(second));
    Ok((first, second))
}

fn alloc_in(context: CUcontext, word: u32) -> Result<u64> {
    ok!(cuCtxPushCurrent_v2(context));
    let address = gpu::upload(&[word])?;
    ok!(cuCtxPopCurrent_v2(std::ptr::null_mut()));
    Ok(address)
}

fn needed() -> Result {
    let (first, _) = two_contexts()?;
    let address = alloc_in(first, 1)?;
    let store = gpu::function(kernels::BASIC, "store")?;
    gpu::launch(store, 1, 1, std::ptr::null_mut(), &[address, 2])?;
    gives!(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
    Ok(())
}

fn enabled() -> Result {
    let (first, second) = two_contexts()?;
    let before = alloc_in(first, 10)?;
    ok!(cuCtxEnablePeerAccess(first, 0));
    let after = alloc_in(first, 20)?;
    let affine = gpu::function(kernels::BASIC, "affine")?;
    for address in [before, after] {
        gpu::launch(affine, 1, 1, std::ptr::null_mut(), &[address, 2, 1])?;
    }
    ok!(cuCtxSynchronize());
    ok!(cuCtxDisablePeerAccess(first));
    ok!(cuCtxSetCurrent(first));
    gpu::expect_content(before, &[21_u32])?;
    gpu::expect_content(after, &[41_u32])?;
    ok!(cuCtxSetCurrent(second));
    gpu::alloc(64).map(|_| ())
}

fn state() -> Result {
    let (first, second) = two_contexts()?;
    gives!(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, cuCtxDisablePeerAccess(first));
    ok!(cuCtxEnablePeerAccess(first, 0));
    gives!(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, cuCtxEnablePeerAccess(first, 0));
    ok!(cuCtxDisablePeerAccess(first));
    gives!(CUDA_ERROR_INVALID_VALUE, cuCtxEnablePeerAccess(first, 5));
    let mut current = std::ptr::null_mut();
    ok!(cuCtxGetCurrent(&raw mut current));
    expect_equal("the current context", current, second)
}

fn itself() -> Result {
    let context = gpu::start()?;
    refuses!(cuCtxEnablePeerAccess(context, 0));
    Ok(())
}
