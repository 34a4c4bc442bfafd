//! Structures that programs pass, with plain integers where C has enums and pointers: a program may put any number
//! there. Layouts are those of `cuda.h`, which the assertions below hold against cudarc's.

use std::ffi::c_int;

use cuda_abi::sys;
use cuda_abi::types::{CUmemAllocationHandleType, CUmemLocation};

pub(in crate::cuda) const POSIX_DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

const DEVICE: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32;
const PINNED: u32 = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32;
const NONE: u32 = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE as u32;
const READ_WRITE: u32 = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Properties {
    pub kind: u32,
    pub handle_types: u32,
    pub location: CUmemLocation,
    pub win32: usize,
    pub compression: u8,
    pub is_rdma_capable: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Access {
    pub location: CUmemLocation,
    pub flags: u32,
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct PoolProperties {
    pub kind: u32,
    pub handle_types: u32,
    pub location: CUmemLocation,
    pub win32: usize,
    pub most_bytes: usize,
    pub usage: u16,
    pub reserved: [u8; 54],
}

const _: () = assert!(size_of::<PoolProperties>() == size_of::<sys::CUmemPoolProps>());
const _: () = assert!(size_of::<Properties>() == size_of::<sys::CUmemAllocationProp>());
const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());

impl Properties {
    /// Those of memory as cuMemAlloc gives it.
    pub fn of(device: c_int) -> Self {
        Self {
            kind: PINNED,
            handle_types: 0,
            location: CUmemLocation { type_: DEVICE, id: device },
            win32: 0,
            compression: 0,
            is_rdma_capable: 0,
            usage: 0,
            reserved: [0; 4],
        }
    }

    /// Whether they are of plain memory of a device.
    pub fn is_of_device(&self) -> bool {
        self.kind == PINNED && self.location.type_ == DEVICE
    }
}

impl PoolProperties {
    /// Whether they are of a pool of a device's plain memory, which no other process can use.
    pub fn is_plain(&self) -> bool {
        self.kind == PINNED && self.location.type_ == DEVICE && self.handle_types == 0 && self.usage == 0
    }
}

impl Access {
    /// Read and write for a device.
    pub fn of(device: c_int) -> Self {
        Self { location: CUmemLocation { type_: DEVICE, id: device }, flags: READ_WRITE }
    }

    /// None at all for a device.
    pub fn none_of(device: c_int) -> Self {
        Self { flags: NONE, ..Self::of(device) }
    }

    /// Whether both speak of the same location.
    pub fn is_of_same(&self, other: &Self) -> bool {
        (self.location.type_, self.location.id) == (other.location.type_, other.location.id)
    }

    /// Whether a device may read and write.
    pub fn is_all_for(&self, device: c_int) -> bool {
        self.flags == READ_WRITE && self.is_of_same(&Self::of(device))
    }
}
