//! Memory of one process in another, by a handle of 64 bytes.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | magic `SIMCIPC1` (the last byte is the version) |
//! | 8 | 8 | which process exported it: a random number, for PIDs come again |
//! | 16 | 4 | its PID, for the reader of a dump |
//! | 20 | 4 | ID of the GPU |
//! | 24 | 8 | ID of the segment |
//! | 32 | 8 | size of the segment |
//! | 40 | 8 | offset of the allocation in it |
//! | 48 | 8 | size of the allocation |
//! | 56 | 8 | checksum of all that (FNV-1a) |

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, LazyLock};

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{CUdeviceptr, CUipcMemHandle};

use super::alloc::Block;
use super::segment::Segment;
use super::space::{Access, Mapping, PAGE_BYTES, Reserved, Target};
use super::state::{Allocation, AllocationKind, STATE, State};
use super::trailer::{checksum, u64_at};
use crate::context;
use crate::error::{Result, write_out};
use crate::stream;

const MAGIC: &[u8; 8] = b"SIMCIPC1";
const HANDLE_BYTES: usize = 64;
const LAZY_ENABLE_PEER_ACCESS: u32 = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Distinguishes this process from all others.
pub(super) static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(std::process::id()));

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct IpcHandle {
    process: u64,
    pid: u32,
    gpu: i32,
    segment: u64,
    segment_bytes: u64,
    offset: u64,
    size_bytes: u64,
}

impl IpcHandle {
    fn encode(&self) -> [u8; HANDLE_BYTES] {
        let mut bytes = [0; HANDLE_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..16].copy_from_slice(&self.process.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.pid.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.gpu.to_le_bytes());
        let numbers = [self.segment, self.segment_bytes, self.offset, self.size_bytes];
        for (field, number) in bytes[24..56].chunks_exact_mut(8).zip(numbers) {
            field.copy_from_slice(&number.to_le_bytes());
        }
        let sum = checksum(&bytes[..56]);
        bytes[56..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HANDLE_BYTES]) -> Option<Self> {
        if &bytes[..8] != MAGIC || u64_at(bytes, 56) != checksum(&bytes[..56]) {
            return None;
        }
        let handle = Self {
            process: u64_at(bytes, 8),
            pid: u32::from_le_bytes(bytes[16..20].try_into().ok()?),
            gpu: i32::from_le_bytes(bytes[20..24].try_into().ok()?),
            segment: u64_at(bytes, 24),
            segment_bytes: u64_at(bytes, 32),
            offset: u64_at(bytes, 40),
            size_bytes: u64_at(bytes, 48),
        };
        let end = handle.offset.checked_add(handle.size_bytes)?;
        (handle.size_bytes > 0 && end <= handle.segment_bytes).then_some(handle)
    }
}

/// Only for the start of what cuMemAlloc gave.
pub(crate) unsafe fn cuIpcGetMemHandle(out: *mut CUipcMemHandle, address: CUdeviceptr) -> Result {
    context::current()?;
    let mut state = STATE.write();
    let allocation = state
        .allocations
        .get(&address)
        .filter(|found| found.kind == AllocationKind::Device)
        .ok_or(INVALID)?;
    let (segment, offset) = state.place_in_block(address).ok_or(INVALID)?;
    if segment.location.device().is_none() || out.is_null() {
        return Err(INVALID);
    }
    let handle = IpcHandle {
        process: *PROCESS,
        pid: std::process::id(),
        gpu: segment.gpu()?,
        segment: segment.id()?,
        segment_bytes: segment.size_bytes,
        offset,
        size_bytes: allocation.size_bytes,
    };
    if let Some(allocation) = state.allocations.get_mut(&address) {
        allocation.is_exported = true;
    }
    // SAFETY: `out` is the caller's out parameter of as many bytes, checked above.
    unsafe { write_out(out.cast::<[u8; HANDLE_BYTES]>(), handle.encode()) }
}

pub(crate) unsafe fn cuIpcOpenMemHandle_v2(
    out: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    flags: u32,
) -> Result {
    let context = context::current()?;
    if out.is_null() || flags != LAZY_ENABLE_PEER_ACCESS {
        return Err(INVALID);
    }
    // SAFETY: a handle is an array of as many bytes.
    let bytes = unsafe { (&raw const handle).cast::<[u8; HANDLE_BYTES]>().read() };
    let handle = IpcHandle::decode(&bytes).ok_or(INVALID)?;
    if handle.process == *PROCESS {
        // CUDA driver API reference, cuIpcOpenMemHandle.
        return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
    stream::forbid_in_capture()?;
    let mut state = STATE.write();
    if context.is_destroyed() {
        return Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
    }
    let address = match state.open_again(&handle, context.handle) {
        Some(address) => address,
        None => state.open(&handle, context.handle, context.device.ordinal)?,
    };
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, address) }
}

pub(crate) use cuIpcOpenMemHandle_v2 as cuIpcOpenMemHandle;

impl State {
    /// A handle that the context has open already yields the same address.
    fn open_again(&mut self, handle: &IpcHandle, context: usize) -> Option<u64> {
        let blocks = &self.blocks;
        let is_same = |(start, allocation): (&u64, &mut Allocation)| {
            let AllocationKind::Imported { opened } = &mut allocation.kind else { return None };
            let (&base, block) = blocks.range(..=*start).next_back()?;
            let is_same = allocation.context == context
                && block.segment.gpu().is_ok_and(|gpu| gpu == handle.gpu)
                && block.segment.backing().is_ok_and(|backing| backing.id == handle.segment)
                && start - base == handle.offset
                && allocation.size_bytes == handle.size_bytes;
            is_same.then(|| {
                *opened += 1;
                *start
            })
        };
        self.allocations.iter_mut().find_map(is_same)
    }

    fn open(&mut self, handle: &IpcHandle, context: usize, device: i32) -> Result<u64> {
        let segment = Segment::open(handle.gpu, handle.segment, handle.segment_bytes)?;
        let reserved = Reserved::new(segment.size_bytes, PAGE_BYTES, 0)?;
        let (base, len) = (reserved.start, reserved.len);
        let owner = segment.location.device().ok_or(INVALID)?;
        let target = Target::Device { segment: Arc::clone(&segment), offset: 0 };
        let mut rights = super::layout::DeviceRights::of_device(owner);
        rights.add(device);
        self.mappings.insert(base, Mapping { len, target, access: Access::Devices(rights) });
        self.blocks.insert(base, Block::whole(reserved, segment));
        let start = base + handle.offset;
        let kind = AllocationKind::Imported { opened: 1 };
        self.allocations.insert(start, Allocation::new(handle.size_bytes, context, owner, kind));
        Ok(start)
    }
}

pub(crate) unsafe fn cuIpcCloseMemHandle(address: CUdeviceptr) -> Result {
    let current = context::current()?;
    stream::forbid_in_capture()?;
    let found = STATE.read().allocations.get(&address).cloned();
    let owner =
        found.filter(|found| matches!(found.kind, AllocationKind::Imported { .. })).ok_or(INVALID)?.context;
    let owner = context::by_handle(owner as _).unwrap_or(current);
    stream::synchronize_context(&owner)?;
    let mut state = STATE.write();
    let Some(AllocationKind::Imported { opened }) =
        state.allocations.get_mut(&address).map(|found| &mut found.kind)
    else {
        return Err(INVALID);
    };
    *opened -= 1;
    if *opened > 0 {
        return Ok(());
    }
    let removed = state.free(address);
    drop(state);
    drop(removed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_handle_is_refused() {
        let handle = IpcHandle {
            process: 1,
            pid: 2,
            gpu: 0,
            segment: 3,
            segment_bytes: 4096,
            offset: 512,
            size_bytes: 100,
        };
        let bytes = handle.encode();
        assert_eq!(IpcHandle::decode(&bytes), Some(handle));
        for at in 0..HANDLE_BYTES {
            let mut damaged = bytes;
            damaged[at] ^= 1;
            assert_eq!(IpcHandle::decode(&damaged), None, "byte {at}");
        }
        assert_eq!(IpcHandle::decode(&IpcHandle { offset: 4096, ..handle }.encode()), None);
        assert_eq!(IpcHandle::decode(&IpcHandle { offset: u64::MAX, ..handle }.encode()), None);
    }
}
