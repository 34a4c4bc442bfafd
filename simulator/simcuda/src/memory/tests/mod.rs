//! Tests of the calls.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "the calls in a block have one reason to be safe")]

mod accounting;
mod allocations;
mod attributes;
mod checkpoint;
mod leaks;
mod pools;
mod sharing;
mod vmm;
mod vmm_model;

use cuda_abi::sys::CUresult;

use super::*;
use crate::testing::{context, context_on, is_own_process};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const PAGE: u64 = 2 << 20;
const INVALID: Result = Err(CUresult::CUDA_ERROR_INVALID_VALUE);

/// Allocates, or says the error.
fn alloc(size_bytes: usize) -> Result<u64> {
    let mut address = 0;
    // SAFETY: `address` is a local variable.
    unsafe { cuMemAlloc_v2(&raw mut address, size_bytes) }.map(|()| address)
}

fn free(address: u64) -> Result {
    // SAFETY: an address is only looked up.
    unsafe { cuMemFree_v2(address) }
}

/// Free memory of the current context's device.
fn free_bytes() -> usize {
    let (mut free, mut total) = (0, 0);
    // SAFETY: both are local variables.
    unsafe { cuMemGetInfo_v2(&raw mut free, &raw mut total) }.unwrap();
    free
}

/// Whether the range is host memory that devices access.
fn is_pinned(address: u64, len: u64) -> bool {
    device_of(address).is_none() && is_accessible(address, len, 0)
}

/// Writes and reads one byte of device memory as a kernel on `ordinal` would.
fn poke(address: u64, ordinal: i32, value: u8) {
    let span = span(address, ordinal).expect("accessible");
    assert!(span.writable);
    // SAFETY: the span covers the address, and `span.keep` keeps it mapped.
    let byte = unsafe { span.host.add((address - span.start) as usize) };
    // SAFETY: as above.
    unsafe { byte.write_volatile(value) };
}

fn peek(address: u64, ordinal: i32) -> u8 {
    let span = span(address, ordinal).expect("accessible");
    // SAFETY: the span covers the address, and `span.keep` keeps it mapped.
    let byte = unsafe { span.host.add((address - span.start) as usize) };
    // SAFETY: as above.
    unsafe { byte.read_volatile() }
}
