//! Reading the structures that programs pass.

use cuda_abi::layout::Access;
use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::CUmemLocation;

use super::ledger;
use super::space::Right;
use crate::error::Result;

const LOCATION_DEVICE: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32;
const LOCATION_HOST: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST as u32;
const LOCATION_LAST: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN as u32;
const ACCESS_NONE: u32 = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE as u32;
const ACCESS_READ: u32 = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ as u32;
const ACCESS_READWRITE: u32 = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32;

/// The location of memory, or of its accessor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Location {
    Device(i32),
    Host,
}

impl Location {
    pub(super) fn location(self) -> CUmemLocation {
        match self {
            Self::Device(ordinal) => CUmemLocation::of(ordinal),
            Self::Host => CUmemLocation { type_: LOCATION_HOST, id: 0 },
        }
    }

    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE` for a device that does not exist, `CUDA_ERROR_NOT_SUPPORTED` for what is
    /// not simulated (NUMA nodes of the host), `CUDA_ERROR_INVALID_VALUE` for the rest.
    pub(super) fn of(location: CUmemLocation) -> Result<Self> {
        match location.type_ {
            LOCATION_DEVICE => ledger::device(location.id).map(|_| Self::Device(location.id)),
            LOCATION_HOST => Ok(Self::Host),
            kind if kind > LOCATION_HOST && kind <= LOCATION_LAST => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }
}

/// The device of a location, where only a device will do.
///
/// # Errors
/// As [`Location::of`], and `CUDA_ERROR_NOT_SUPPORTED` for the host.
pub(super) fn device(location: CUmemLocation) -> Result<i32> {
    match Location::of(location)? {
        Location::Device(ordinal) => Ok(ordinal),
        Location::Host => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
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
    /// As [`device`], and `CUDA_ERROR_INVALID_VALUE` for unknown flags.
    pub(super) fn apply(&mut self, description: Access) -> Result {
        let bit = 1 << device(description.location)?;
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
