//! The structures that programs pass, with plain integers where C has enums: a program may put any number
//! there. Layouts are those of `cuda.h`, which the assertions below hold against cudarc's.

use std::ffi::c_void;

use cuda_abi::sys::{self, CUresult};

use super::ledger;
use super::space::Right;
use crate::error::Result;

const LOCATION_DEVICE: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32;
const LOCATION_HOST: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST as u32;
const LOCATION_LAST: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN as u32;
const ACCESS_NONE: u32 = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE as u32;
const ACCESS_READ: u32 = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ as u32;
const ACCESS_READWRITE: u32 = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Location {
    pub(super) kind: u32,
    pub(super) id: i32,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct AccessDescription {
    pub(super) location: Location,
    pub(super) flags: u32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct AllocationProperties {
    pub(super) kind: u32,
    pub(super) handle_types: u32,
    pub(super) location: Location,
    pub(super) win32: *mut c_void,
    pub(super) compression: u8,
    pub(super) is_rdma_capable: u8,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 4],
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct PoolProperties {
    pub(super) kind: u32,
    pub(super) handle_types: u32,
    pub(super) location: Location,
    pub(super) win32: *mut c_void,
    pub(super) max_size_bytes: usize,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 54],
}

const _: () = assert!(size_of::<Location>() == size_of::<sys::CUmemLocation>());
const _: () = assert!(size_of::<AccessDescription>() == size_of::<sys::CUmemAccessDesc>());
const _: () = assert!(size_of::<AllocationProperties>() == size_of::<sys::CUmemAllocationProp>());
const _: () = assert!(size_of::<PoolProperties>() == size_of::<sys::CUmemPoolProps>());

/// Where memory is, or who accesses it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    Device(i32),
    Host,
}

impl Location {
    pub(super) fn of_device(ordinal: i32) -> Self {
        Self { kind: LOCATION_DEVICE, id: ordinal }
    }

    pub(super) fn of(place: Place) -> Self {
        match place {
            Place::Device(ordinal) => Self::of_device(ordinal),
            Place::Host => Self { kind: LOCATION_HOST, id: 0 },
        }
    }

    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE` for a device that does not exist, `CUDA_ERROR_NOT_SUPPORTED` for what is
    /// not imitated (NUMA nodes of the host), `CUDA_ERROR_INVALID_VALUE` for the rest.
    pub(super) fn place(self) -> Result<Place> {
        match self.kind {
            LOCATION_DEVICE => ledger::device(self.id).map(|_| Place::Device(self.id)),
            LOCATION_HOST => Ok(Place::Host),
            kind if kind > LOCATION_HOST && kind <= LOCATION_LAST => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// The device, where only a device will do.
    ///
    /// # Errors
    /// As [`Location::place`], and `CUDA_ERROR_NOT_SUPPORTED` for the host.
    pub(super) fn device(self) -> Result<i32> {
        match self.place()? {
            Place::Device(ordinal) => Ok(ordinal),
            Place::Host => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        }
    }
}

/// The bits of devices that may read and write. Each is changed by the access descriptions in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct DeviceRights {
    pub(super) readers: u64,
    pub(super) writers: u64,
}

impl DeviceRights {
    pub(super) fn of_device(ordinal: i32) -> Self {
        Self { readers: 1 << ordinal, writers: 1 << ordinal }
    }

    pub(super) fn add(&mut self, ordinal: i32) {
        self.readers |= 1 << ordinal;
        self.writers |= 1 << ordinal;
    }

    /// # Errors
    /// As [`Location::device`], and `CUDA_ERROR_INVALID_VALUE` for unknown flags.
    pub(super) fn apply(&mut self, description: AccessDescription) -> Result {
        let bit = 1 << description.location.device()?;
        let (reads, writes) = match description.flags {
            ACCESS_NONE => (false, false),
            ACCESS_READ => (true, false),
            ACCESS_READWRITE => (true, true),
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        };
        self.readers = if reads { self.readers | bit } else { self.readers & !bit };
        self.writers = if writes { self.writers | bit } else { self.writers & !bit };
        Ok(())
    }

    pub(super) fn right(self, ordinal: i32) -> Right {
        match (self.readers >> ordinal & 1, self.writers >> ordinal & 1) {
            (_, 1) => Right::ReadWrite,
            (1, _) => Right::Read,
            _ => Right::None,
        }
    }

    /// `CU_MEM_ACCESS_FLAGS_…` of a device.
    pub(super) fn flags(self, ordinal: i32) -> u32 {
        match self.right(ordinal) {
            Right::None => ACCESS_NONE,
            Right::Read => ACCESS_READ,
            Right::ReadWrite => ACCESS_READWRITE,
        }
    }
}

/// Reads an array of the caller's.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if it is NULL or empty.
///
/// # Safety
/// `array` is NULL or valid for reads of `count` elements, of any bit pattern that `T` takes.
pub(super) unsafe fn read_array<T: Copy>(array: *const T, count: usize) -> Result<Vec<T>> {
    if array.is_null() || count == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller of this function vouches for the array.
    Ok(unsafe { std::slice::from_raw_parts(array, count) }.to_vec())
}

/// Reads a structure of the caller's.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if it is NULL.
///
/// # Safety
/// `structure` is NULL or valid for a read of `T`, of any bit pattern that it takes.
pub(super) unsafe fn read_structure<T: Copy>(structure: *const T) -> Result<T> {
    if structure.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller of this function vouches for it.
    Ok(unsafe { structure.read() })
}
