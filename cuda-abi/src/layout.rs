//! Structures of virtual memory management that programs pass, with plain integers where C has enums and pointers: a
//! program may put any number there. Layouts are those of `cuda.h`, which the assertions below hold against cudarc's.

use core::ffi::{c_int, c_uint};

use crate::sys;
use crate::types::{CUmemAllocationHandleType, CUmemLocation};

/// The kind of handle by which physical memory is passed as a file descriptor.
pub const POSIX_DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

const DEVICE: c_uint = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as c_uint;
const HOST: c_uint = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST as c_uint;
const HOST_NODE: c_uint = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA as c_uint;
const PINNED: c_uint = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as c_uint;
const NONE: c_uint = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE as c_uint;
const READ_WRITE: c_uint = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as c_uint;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Properties {
    /// `CUmemAllocationType`.
    pub kind: c_uint,
    /// Bits of `CUmemAllocationHandleType`.
    pub handle_types: c_uint,
    /// Where it is.
    pub location: CUmemLocation,
    /// A pointer, of use on Windows only.
    pub win32: usize,
    /// Whether it may be compressed.
    pub compression: u8,
    /// Whether network cards may read and write it.
    pub is_rdma_capable: u8,
    /// What it is to be used for.
    pub usage: u16,
    /// To be 0.
    pub reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// Who accesses.
    pub location: CUmemLocation,
    /// `CUmemAccess_flags`.
    pub flags: c_uint,
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolProperties {
    /// `CUmemAllocationType`.
    pub kind: c_uint,
    /// Bits of `CUmemAllocationHandleType`.
    pub handle_types: c_uint,
    /// Where it is.
    pub location: CUmemLocation,
    /// A pointer, of use on Windows only.
    pub win32: usize,
    /// As large as it may become; 0 without a limit.
    pub most_bytes: usize,
    /// What it is to be used for.
    pub usage: u16,
    /// To be 0.
    pub reserved: [u8; 54],
}

const _: () = assert!(size_of::<PoolProperties>() == size_of::<sys::CUmemPoolProps>());
const _: () = assert!(size_of::<Properties>() == size_of::<sys::CUmemAllocationProp>());
const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());

impl CUmemLocation {
    /// A device.
    pub fn of(device: c_int) -> Self {
        Self { type_: DEVICE, id: device }
    }

    /// The device; none for the host.
    pub fn device(&self) -> Option<c_int> {
        (self.type_ == DEVICE).then_some(self.id)
    }

    /// Whether it is the host, or one of its NUMA nodes.
    pub fn is_host(&self) -> bool {
        matches!(self.type_, HOST | HOST_NODE)
    }
}

impl Properties {
    /// Those of memory as cuMemAlloc gives it.
    pub fn of(device: c_int) -> Self {
        Self {
            kind: PINNED,
            handle_types: 0,
            location: CUmemLocation::of(device),
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

    /// Whether they are of plain memory of the host.
    pub fn is_of_host(&self) -> bool {
        self.kind == PINNED && self.location.is_host()
    }
}

impl PoolProperties {
    /// Those of a pool of a device's plain memory.
    pub fn of(device: c_int) -> Self {
        Self {
            kind: PINNED,
            handle_types: 0,
            location: CUmemLocation::of(device),
            win32: 0,
            most_bytes: 0,
            usage: 0,
            reserved: [0; 54],
        }
    }

    /// Whether they are of a pool of a device's plain memory, which other processes can use by descriptors at most.
    pub fn is_plain(&self) -> bool {
        let has_only_descriptors = self.handle_types & !POSIX_DESCRIPTOR.0 == 0;
        self.kind == PINNED && self.location.type_ == DEVICE && has_only_descriptors && self.usage == 0
    }
}

impl Access {
    /// Read and write for a device.
    pub fn of(device: c_int) -> Self {
        Self { location: CUmemLocation::of(device), flags: READ_WRITE }
    }

    /// None at all for a device.
    pub fn none_of(device: c_int) -> Self {
        Self { flags: NONE, ..Self::of(device) }
    }

    /// Whether it lets the host access the memory.
    pub fn is_for_host(&self) -> bool {
        self.flags != NONE && self.location.is_host()
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
