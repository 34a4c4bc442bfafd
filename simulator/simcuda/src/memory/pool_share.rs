//! Pools that processes share: a descriptor for the pool, 64 bytes for each allocation in it. Rules are those of the CUDA
//! driver API reference, "Stream Ordered Memory Allocator", and of the CUDA programming guide, "Stream-Ordered Memory
//! Allocator", on interprocess communication.
//!
//! A descriptor of a pool is a sealed memfd. All numbers are little-endian.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | magic `SIMPOOL1` (the last byte is the version) |
//! | 8 | 8 | which process exported it, as in an IPC handle |
//! | 16 | 8 | the pool's number in that process |
//! | 24 | 4 | ID of the GPU |
//! | 28 | 4 | handle types it may be exported as |
//! | 32 | 8 | checksum of all that (FNV-1a) |
//!
//! The data of an allocation:
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | magic `SIMPPTR1` (the last byte is the version) |
//! | 8 | 8 | which process exported it |
//! | 16 | 8 | the pool's number in that process |
//! | 24 | 8 | ID of the segment |
//! | 32 | 8 | size of the segment |
//! | 40 | 8 | offset of the allocation in it |
//! | 48 | 8 | size of the allocation |
//! | 56 | 8 | checksum of all that (FNV-1a) |

use std::ffi::c_void;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

use cuda_abi::layout::POSIX_DESCRIPTOR;
use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{CUdeviceptr, CUmemAllocationHandleType, CUmemoryPool};

use super::alloc::Block;
use super::ipc::PROCESS;
use super::ledger;
use super::segment::Segment;
use super::space::{Access, Mapping, PAGE_BYTES, Reserved, Target};
use super::state::{Allocation, AllocationKind, STATE, State};
use super::trailer::{checksum, u64_at};
use super::vmm::duplicate;
use crate::error::{Result, write_out};
use crate::process;

const POOL_MAGIC: &[u8; 8] = b"SIMPOOL1";
const POOL_BYTES: usize = 40;
const POINTER_MAGIC: &[u8; 8] = b"SIMPPTR1";
const POINTER_BYTES: usize = size_of::<sys::CUmemPoolPtrExportData>();
const SEALS: i32 = libc::F_SEAL_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Which pool it is among those of all processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Origin {
    process: u64,
    number: u64,
}

impl Origin {
    fn of_own(pool: usize) -> Self {
        Self { process: *PROCESS, number: pool as u64 }
    }
}

/// What a pool's descriptor says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ExportedPool {
    origin: Origin,
    gpu: i32,
    handle_types: u32,
}

impl ExportedPool {
    fn encode(&self) -> [u8; POOL_BYTES] {
        let mut bytes = [0; POOL_BYTES];
        bytes[..8].copy_from_slice(POOL_MAGIC);
        bytes[8..16].copy_from_slice(&self.origin.process.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.origin.number.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.gpu.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.handle_types.to_le_bytes());
        let sum = checksum(&bytes[..32]);
        bytes[32..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; POOL_BYTES]) -> Option<Self> {
        if &bytes[..8] != POOL_MAGIC || u64_at(bytes, 32) != checksum(&bytes[..32]) {
            return None;
        }
        Some(Self {
            origin: Origin { process: u64_at(bytes, 8), number: u64_at(bytes, 16) },
            gpu: i32::from_le_bytes(bytes[24..28].try_into().ok()?),
            handle_types: u32::from_le_bytes(bytes[28..32].try_into().ok()?),
        })
    }

    fn descriptor(&self) -> io::Result<OwnedFd> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is NUL-terminated; the call makes a new descriptor.
        let made = unsafe { libc::memfd_create(c"simcuda-pool".as_ptr(), flags) };
        if made < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it was just made, and has no other owner.
        let mut file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(made) });
        file.write_all(&self.encode())?;
        // SAFETY: F_ADD_SEALS takes a number.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(file.into())
    }

    fn read(descriptor: OwnedFd) -> Option<Self> {
        // SAFETY: F_GET_SEALS takes any number.
        if unsafe { libc::fcntl(descriptor.as_fd().as_raw_fd(), libc::F_GET_SEALS) } != SEALS {
            return None;
        }
        let mut bytes = [0; POOL_BYTES];
        std::fs::File::from(descriptor).read_exact_at(&mut bytes, 0).ok()?;
        Self::decode(&bytes)
    }
}

/// What the data of an allocation say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ExportedPointer {
    origin: Origin,
    segment: u64,
    segment_bytes: u64,
    offset: u64,
    size_bytes: u64,
}

impl ExportedPointer {
    fn encode(&self) -> [u8; POINTER_BYTES] {
        let mut bytes = [0; POINTER_BYTES];
        bytes[..8].copy_from_slice(POINTER_MAGIC);
        let Origin { process, number } = self.origin;
        let numbers = [process, number, self.segment, self.segment_bytes, self.offset, self.size_bytes];
        for (field, number) in bytes[8..56].chunks_exact_mut(8).zip(numbers) {
            field.copy_from_slice(&number.to_le_bytes());
        }
        let sum = checksum(&bytes[..56]);
        bytes[56..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; POINTER_BYTES]) -> Option<Self> {
        if &bytes[..8] != POINTER_MAGIC || u64_at(bytes, 56) != checksum(&bytes[..56]) {
            return None;
        }
        let pointer = Self {
            origin: Origin { process: u64_at(bytes, 8), number: u64_at(bytes, 16) },
            segment: u64_at(bytes, 24),
            segment_bytes: u64_at(bytes, 32),
            offset: u64_at(bytes, 40),
            size_bytes: u64_at(bytes, 48),
        };
        let end = pointer.offset.checked_add(pointer.size_bytes)?;
        (pointer.size_bytes > 0 && end <= pointer.segment_bytes).then_some(pointer)
    }
}

/// Only of a pool that was created for it.
pub(crate) unsafe fn cuMemPoolExportToShareableHandle(
    out: *mut c_void,
    pool: CUmemoryPool,
    kind: CUmemAllocationHandleType,
    flags: u64,
) -> Result {
    process::machine()?;
    let mut state = STATE.write();
    let known = state.pools.get(pool as usize)?;
    let is_valid = known.origin.is_none() && known.handle_types & kind.0 != 0;
    if out.is_null() || flags != 0 || kind != POSIX_DESCRIPTOR || !is_valid {
        return Err(INVALID);
    }
    let exported = ExportedPool {
        origin: Origin::of_own(pool as usize),
        gpu: ledger::device(known.device)?.gpu(),
        handle_types: known.handle_types,
    };
    known.is_exported = true;
    let descriptor = exported.descriptor().map_err(ledger::failed)?;
    // SAFETY: the caller passes the address of an int for a descriptor.
    unsafe { write_out(out.cast::<RawFd>(), descriptor.into_raw_fd()) }
}

/// The descriptor itself is passed instead of a pointer, and stays the caller's.
pub(crate) unsafe fn cuMemPoolImportFromShareableHandle(
    out: *mut CUmemoryPool,
    os_handle: *mut c_void,
    kind: CUmemAllocationHandleType,
    flags: u64,
) -> Result {
    process::machine()?;
    if out.is_null() || flags != 0 || kind != POSIX_DESCRIPTOR {
        return Err(INVALID);
    }
    let exported = ExportedPool::read(duplicate(os_handle as usize)?).ok_or(INVALID)?;
    let device = ledger::device_of_gpu(exported.gpu).map_err(|_| INVALID)?;
    let pool = STATE.write().pools.create_imported(device, exported.handle_types, exported.origin);
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, pool as CUmemoryPool) }
}

/// For an allocation of a pool that has been exported.
pub(crate) unsafe fn cuMemPoolExportPointer(
    out: *mut sys::CUmemPoolPtrExportData,
    address: CUdeviceptr,
) -> Result {
    process::machine()?;
    let mut state = STATE.write();
    let allocation = state.allocations.get(&address).ok_or(INVALID)?;
    let AllocationKind::Pool { pool } = allocation.kind else { return Err(INVALID) };
    let size_bytes = allocation.size_bytes;
    let (segment, offset) = state.pools.place_for_export(pool, address).ok_or(INVALID)?;
    if out.is_null() {
        return Err(INVALID);
    }
    let pointer = ExportedPointer {
        origin: Origin::of_own(pool),
        segment: segment.id()?,
        segment_bytes: segment.size_bytes,
        offset,
        size_bytes,
    };
    if let Some(allocation) = state.allocations.get_mut(&address) {
        allocation.is_exported = true;
    }
    // SAFETY: `out` is the caller's out parameter of as many bytes, checked above.
    unsafe { write_out(out.cast::<[u8; POINTER_BYTES]>(), pointer.encode()) }
}

/// The pool has to be that of the allocation, as it was imported.
pub(crate) unsafe fn cuMemPoolImportPointer(
    out: *mut CUdeviceptr,
    pool: CUmemoryPool,
    data: *mut sys::CUmemPoolPtrExportData,
) -> Result {
    process::machine()?;
    if out.is_null() || data.is_null() {
        return Err(INVALID);
    }
    // SAFETY: the caller passes a structure of as many bytes, checked above.
    let bytes = unsafe { data.cast::<[u8; POINTER_BYTES]>().read() };
    let pointer = ExportedPointer::decode(&bytes).ok_or(INVALID)?;
    let mut state = STATE.write();
    let known = state.pools.get(pool as usize)?;
    if known.origin != Some(pointer.origin) {
        return Err(INVALID);
    }
    let address = state.import_pointer(pool as usize, &pointer)?;
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, address) }
}

impl State {
    /// Maps the segment at addresses of its own. Who may access it is the imported pool's to say.
    fn import_pointer(&mut self, pool: usize, pointer: &ExportedPointer) -> Result<u64> {
        let known = self.pools.get(pool)?;
        let (device, rights) = (known.device, known.rights);
        let gpu = ledger::device(device)?.gpu();
        let segment = Segment::open(gpu, pointer.segment, pointer.segment_bytes)?;
        let reserved = Reserved::new(segment.size_bytes, PAGE_BYTES, 0)?;
        let (base, len) = (reserved.start, reserved.len);
        let start = base + pointer.offset;
        self.pools.get(pool)?.add_import(start, base, len, pointer.size_bytes);
        let target = Target::Device { segment: segment.clone(), offset: 0 };
        self.mappings.insert(base, Mapping { len, target, access: Access::Devices(rights) });
        self.blocks.insert(base, Block::whole(reserved, segment));
        // It belongs to no context, as all memory of pools.
        let kind = AllocationKind::PoolImport { pool };
        self.allocations.insert(start, Allocation::new(pointer.size_bytes, 0, device, kind));
        Ok(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGIN: Origin = Origin { process: 1, number: 2 };

    #[test]
    fn damaged_data_of_an_allocation_are_refused() {
        let pointer =
            ExportedPointer { origin: ORIGIN, segment: 3, segment_bytes: 4096, offset: 512, size_bytes: 100 };
        let bytes = pointer.encode();
        assert_eq!(ExportedPointer::decode(&bytes), Some(pointer));
        for at in 0..POINTER_BYTES {
            let mut damaged = bytes;
            damaged[at] ^= 1;
            assert_eq!(ExportedPointer::decode(&damaged), None, "byte {at}");
        }
        assert_eq!(ExportedPointer::decode(&ExportedPointer { offset: 4096, ..pointer }.encode()), None);
        assert_eq!(ExportedPointer::decode(&ExportedPointer { offset: u64::MAX, ..pointer }.encode()), None);
    }

    #[test]
    fn a_descriptor_says_which_pool_it_is_of() {
        let pool = ExportedPool { origin: ORIGIN, gpu: 3, handle_types: 1 };
        assert_eq!(ExportedPool::read(pool.descriptor().unwrap()), Some(pool));
        let bytes = pool.encode();
        for at in 0..POOL_BYTES {
            let mut damaged = bytes;
            damaged[at] ^= 1;
            assert_eq!(ExportedPool::decode(&damaged), None, "byte {at}");
        }
        assert_eq!(ExportedPool::read(tempfile::tempfile().unwrap().into()), None);
    }
}
