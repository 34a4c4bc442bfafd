//! Plain copies.

use cuda_abi::types::{CUdeviceptr, CUstream, c_void};

use super::submit::{SourceAccess, asynchronous, synchronous};
use super::{Copy, Side};
use crate::error::Result;

pub(crate) unsafe fn cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, size_bytes: usize) -> Result {
    synchronous(Copy::linear((to, Side::Unified), (from, Side::Unified), size_bytes))
}

pub(crate) unsafe fn cuMemcpyAsync(
    to: CUdeviceptr,
    from: CUdeviceptr,
    size_bytes: usize,
    stream: CUstream,
) -> Result {
    let copy = Copy::linear((to, Side::Unified), (from, Side::Unified), size_bytes);
    asynchronous(copy, stream, SourceAccess::Stream)
}

pub(crate) unsafe fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, size_bytes: usize) -> Result {
    synchronous(Copy::linear((to, Side::Device), (from as u64, Side::Host), size_bytes))
}

pub(crate) unsafe fn cuMemcpyHtoDAsync_v2(
    to: CUdeviceptr,
    from: *const c_void,
    size_bytes: usize,
    stream: CUstream,
) -> Result {
    let copy = Copy::linear((to, Side::Device), (from as u64, Side::Host), size_bytes);
    asynchronous(copy, stream, SourceAccess::Stream)
}

pub(crate) unsafe fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, size_bytes: usize) -> Result {
    synchronous(Copy::linear((to as u64, Side::Host), (from, Side::Device), size_bytes))
}

pub(crate) unsafe fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: CUdeviceptr,
    size_bytes: usize,
    stream: CUstream,
) -> Result {
    let copy = Copy::linear((to as u64, Side::Host), (from, Side::Device), size_bytes);
    asynchronous(copy, stream, SourceAccess::Stream)
}

pub(crate) unsafe fn cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, size_bytes: usize) -> Result {
    synchronous(Copy::linear((to, Side::Device), (from, Side::Device), size_bytes))
}

pub(crate) unsafe fn cuMemcpyDtoDAsync_v2(
    to: CUdeviceptr,
    from: CUdeviceptr,
    size_bytes: usize,
    stream: CUstream,
) -> Result {
    let copy = Copy::linear((to, Side::Device), (from, Side::Device), size_bytes);
    asynchronous(copy, stream, SourceAccess::Stream)
}
