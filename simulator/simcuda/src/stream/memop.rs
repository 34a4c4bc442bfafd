//! Stream-ordered memory operations: waits for a value, and writes of one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use cuda_abi::sys::{CUresult, CUstreamBatchMemOpType, CUstreamMemoryBarrier_flags};
use cuda_abi::sys::{CUstreamWaitValue_flags as WaitFlags, CUstreamWriteValue_flags as WriteFlags};
use cuda_abi::types::{CUdeviceptr, CUstream, CUstreamBatchMemOpParams};

use super::work::Work;
use super::{submit, target_device};
use crate::context::Context;
use crate::error::Result;
use crate::memory;

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryOp {
    Wait { place: Word, value: u64, condition: Condition },
    Write { place: Word, value: u64 },
    Barrier,
}

/// A word of 4 or 8 bytes in memory that the device can access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word {
    address: u64,
    is_wide: bool,
}

/// When a wait ends (`cuda.h`, CUstreamWaitValue_flags).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// The value is reached or passed, where the difference counts as signed.
    Reached,
    Equal,
    /// They have a bit in common.
    And,
    /// There is a bit that neither has.
    Nor,
}

impl Condition {
    pub(super) fn from_flags(flags: u32) -> Result<Self> {
        const GEQ: u32 = WaitFlags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        const EQ: u32 = WaitFlags::CU_STREAM_WAIT_VALUE_EQ as u32;
        const AND: u32 = WaitFlags::CU_STREAM_WAIT_VALUE_AND as u32;
        const NOR: u32 = WaitFlags::CU_STREAM_WAIT_VALUE_NOR as u32;
        if flags & WaitFlags::CU_STREAM_WAIT_VALUE_FLUSH as u32 != 0 {
            // As on a device without CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES.
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        match flags {
            GEQ => Ok(Self::Reached),
            EQ => Ok(Self::Equal),
            AND => Ok(Self::And),
            NOR => Ok(Self::Nor),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    pub(super) fn holds(self, found: u64, value: u64, is_wide: bool) -> bool {
        match self {
            Self::Reached if is_wide => found.wrapping_sub(value).cast_signed() >= 0,
            Self::Reached => (found as u32).wrapping_sub(value as u32).cast_signed() >= 0,
            Self::Equal => found == value,
            Self::And => found & value != 0,
            Self::Nor if is_wide => !(found | value) != 0,
            Self::Nor => !(found as u32 | value as u32) != 0,
        }
    }
}

impl Word {
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the address is not aligned or the device cannot access it.
    fn new(address: u64, is_wide: bool, device: i32) -> Result<Self> {
        let size_bytes = if is_wide { 8 } else { 4 };
        if !address.is_multiple_of(size_bytes) || !memory::is_accessible(address, size_bytes, device) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        Ok(Self { address, is_wide })
    }

    /// The word's memory as it is now.
    fn span(self, device: i32) -> Result<(memory::Span, *mut u8)> {
        let span = memory::span(self.address, device).ok_or(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)?;
        let host = span.host.wrapping_add((self.address - span.start) as usize);
        Ok((span, host))
    }

    fn load(self, device: i32) -> Result<u64> {
        let (_keep, host) = self.span(device)?;
        if self.is_wide {
            // SAFETY: the span, which is kept, backs the aligned word; all access to it here is atomic.
            Ok(unsafe { AtomicU64::from_ptr(host.cast()) }.load(Ordering::Acquire))
        } else {
            // SAFETY: as above.
            Ok(unsafe { AtomicU32::from_ptr(host.cast()) }.load(Ordering::Acquire).into())
        }
    }

    fn store(self, value: u64, device: i32) -> Result {
        let (span, host) = self.span(device)?;
        if !span.writable {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        }
        if self.is_wide {
            // SAFETY: the span, which is kept, backs the aligned word; all access to it here is atomic.
            unsafe { AtomicU64::from_ptr(host.cast()) }.store(value, Ordering::Release);
        } else {
            // SAFETY: as above.
            unsafe { AtomicU32::from_ptr(host.cast()) }.store(value as u32, Ordering::Release);
        }
        Ok(())
    }
}

impl MemoryOp {
    /// The operations of a program's array.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for what no device would accept, `CUDA_ERROR_NOT_SUPPORTED` for what this
    /// one does not.
    ///
    /// # Safety
    /// `params` is NULL or valid for reads of `count` elements.
    pub(crate) unsafe fn from_params(
        params: *const CUstreamBatchMemOpParams,
        count: u32,
        device: i32,
    ) -> Result<Arc<[Self]>> {
        // The limit is documented for cuStreamBatchMemOp.
        if params.is_null() || count >= 256 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        (0..count as usize)
            .map(|index| {
                // SAFETY: the caller vouches for `count` elements.
                let element = unsafe { params.add(index) };
                // SAFETY: the element is the caller's; its 48 bytes are read as integers, of which any is valid.
                let fields = unsafe { element.cast::<Fields>().read() };
                fields.into_op(device)
            })
            .collect()
    }

    /// A write to any address at all.
    #[cfg(test)]
    pub(super) fn write_unchecked(address: u64) -> Self {
        Self::Write { place: Word { address, is_wide: false }, value: 0 }
    }

    pub(super) fn run(self, context: &Arc<Context>) -> Result {
        let device = context.device.ordinal;
        match self {
            Self::Write { place, value } => place.store(value, device),
            Self::Barrier => {
                fence(Ordering::SeqCst);
                Ok(())
            }
            Self::Wait { place, value, condition } => {
                let mut pause = Duration::from_micros(1);
                // A failed context does no more work, and must not wait without an end.
                while context.check().is_ok() && !condition.holds(place.load(device)?, value, place.is_wide) {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_micros(100));
                }
                Ok(())
            }
        }
    }
}

/// The members of `CUstreamBatchMemOpParams` that wait and write have in common, with the enum as an integer.
#[repr(C)]
#[derive(Clone, Copy)]
struct Fields {
    operation: u32,
    /// Of a barrier or a flush these are the flags.
    barrier_flags: u32,
    address: u64,
    value: u64,
    flags: u32,
}

const _: () = assert!(size_of::<Fields>() <= size_of::<CUstreamBatchMemOpParams>());

impl Fields {
    fn into_op(self, device: i32) -> Result<MemoryOp> {
        const WAIT_32: u32 = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_32 as u32;
        const WAIT_64: u32 = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_64 as u32;
        const WRITE_32: u32 = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32 as u32;
        const WRITE_64: u32 = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64 as u32;
        const BARRIER: u32 = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_BARRIER as u32;
        const FLUSH: u32 = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES as u32;
        const ATOMIC: u32 = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_ATOMIC_REDUCTION as u32;
        match self.operation {
            WAIT_32 => wait(self.address, self.value & 0xffff_ffff, self.flags, false, device),
            WAIT_64 => wait(self.address, self.value, self.flags, true, device),
            WRITE_32 => write(self.address, self.value & 0xffff_ffff, self.flags, false, device),
            WRITE_64 => write(self.address, self.value, self.flags, true, device),
            BARRIER
                if self.barrier_flags
                    <= CUstreamMemoryBarrier_flags::CU_STREAM_MEMORY_BARRIER_TYPE_GPU as u32 =>
            {
                Ok(MemoryOp::Barrier)
            }
            FLUSH | ATOMIC => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }
}

fn wait(address: u64, value: u64, flags: u32, is_wide: bool, device: i32) -> Result<MemoryOp> {
    let condition = Condition::from_flags(flags)?;
    Ok(MemoryOp::Wait { place: Word::new(address, is_wide, device)?, value, condition })
}

fn write(address: u64, value: u64, flags: u32, is_wide: bool, device: i32) -> Result<MemoryOp> {
    if flags > WriteFlags::CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER as u32 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(MemoryOp::Write { place: Word::new(address, is_wide, device)?, value })
}

fn submit_one(stream: CUstream, op: impl FnOnce(i32) -> Result<MemoryOp>) -> Result {
    let op = op(target_device(stream)?)?;
    submit(stream, Work::MemoryOps(Arc::new([op])))
}

/// The first versions had to be enabled for a device; their rules were the same.
pub(crate) use {
    cuStreamBatchMemOp_v2 as cuStreamBatchMemOp, cuStreamWaitValue32_v2 as cuStreamWaitValue32,
    cuStreamWaitValue64_v2 as cuStreamWaitValue64, cuStreamWriteValue32_v2 as cuStreamWriteValue32,
    cuStreamWriteValue64_v2 as cuStreamWriteValue64,
};

pub(crate) unsafe fn cuStreamWaitValue32_v2(
    stream: CUstream,
    address: CUdeviceptr,
    value: u32,
    flags: u32,
) -> Result {
    submit_one(stream, |device| wait(address, value.into(), flags, false, device))
}

pub(crate) unsafe fn cuStreamWaitValue64_v2(
    stream: CUstream,
    address: CUdeviceptr,
    value: u64,
    flags: u32,
) -> Result {
    submit_one(stream, |device| wait(address, value, flags, true, device))
}

pub(crate) unsafe fn cuStreamWriteValue32_v2(
    stream: CUstream,
    address: CUdeviceptr,
    value: u32,
    flags: u32,
) -> Result {
    submit_one(stream, |device| write(address, value.into(), flags, false, device))
}

pub(crate) unsafe fn cuStreamWriteValue64_v2(
    stream: CUstream,
    address: CUdeviceptr,
    value: u64,
    flags: u32,
) -> Result {
    submit_one(stream, |device| write(address, value, flags, true, device))
}

pub(crate) unsafe fn cuStreamBatchMemOp_v2(
    stream: CUstream,
    count: u32,
    params: *mut CUstreamBatchMemOpParams,
    flags: u32,
) -> Result {
    let device = target_device(stream)?;
    if flags != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: `params` is the caller's array of `count` elements.
    let ops = unsafe { MemoryOp::from_params(params, count, device) }?;
    submit(stream, Work::MemoryOps(ops))
}
