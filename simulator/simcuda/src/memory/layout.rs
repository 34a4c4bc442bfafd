//! Reading the structures that programs pass.

use cuda_abi::layout::Access;
use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::CUmemLocation;

use super::ledger;
use super::space::Right;
use crate::error::Result;

const LOCATION_DEVICE: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32;
const LOCATION_HOST: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST as u32;
const LOCATION_HOST_NUMA: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA as u32;
const LOCATION_HOST_NUMA_CURRENT: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT as u32;
const LOCATION_LAST: u32 = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN as u32;
const ACCESS_NONE: u32 = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE as u32;
const ACCESS_READ: u32 = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ as u32;
const ACCESS_READWRITE: u32 = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32;

/// The host's only NUMA node.
pub(super) const NODE: i32 = 0;

/// The location of memory, or of its accessor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Location {
    Device(i32),
    Host,
    /// The host's NUMA node, which is [`NODE`].
    HostNode,
}

impl Location {
    pub(super) fn location(self) -> CUmemLocation {
        match self {
            Self::Device(ordinal) => CUmemLocation::of(ordinal),
            Self::Host => CUmemLocation { type_: LOCATION_HOST, id: 0 },
            Self::HostNode => CUmemLocation { type_: LOCATION_HOST_NUMA, id: NODE },
        }
    }

    /// The device; none for the host.
    pub(super) fn device(self) -> Option<i32> {
        match self {
            Self::Device(ordinal) => Some(ordinal),
            Self::Host | Self::HostNode => None,
        }
    }

    /// The location of physical memory (CUDA driver API reference, cuMemCreate).
    ///
    /// # Errors
    /// As [`Location::of`]; `CUDA_ERROR_INVALID_VALUE` for a NUMA node that the host does not have, and for "the
    /// current one".
    pub(super) fn of_memory(location: CUmemLocation) -> Result<Self> {
        match location.type_ {
            LOCATION_HOST_NUMA if location.id == NODE => Ok(Self::HostNode),
            LOCATION_HOST_NUMA | LOCATION_HOST_NUMA_CURRENT => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
            _ => Self::of(location),
        }
    }

    /// Who accesses a mapping. The number of a NUMA node does not matter (reference, cuMemSetAccess).
    fn of_accessor(location: CUmemLocation) -> Result<Self> {
        match location.type_ {
            LOCATION_HOST_NUMA => Ok(Self::HostNode),
            LOCATION_HOST_NUMA_CURRENT => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
            _ => Self::of(location),
        }
    }

    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE` for a device that does not exist, `CUDA_ERROR_NOT_SUPPORTED` for what is
    /// not simulated there (NUMA nodes of the host), `CUDA_ERROR_INVALID_VALUE` for the rest.
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
        Location::Host | Location::HostNode => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
    }
}

/// The bits of devices that may read and write, and what the host may do. Each is changed by the access descriptions in
/// order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct DeviceRights {
    pub(super) readers: u64,
    pub(super) writers: u64,
    pub(super) host: Right,
}

impl DeviceRights {
    pub(super) fn of_device(ordinal: i32) -> Self {
        Self { readers: 1 << ordinal, writers: 1 << ordinal, host: Right::None }
    }

    pub(super) fn add(&mut self, ordinal: i32) {
        self.readers |= 1 << ordinal;
        self.writers |= 1 << ordinal;
    }

    /// Changes access to memory that lies at `memory`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for unknown flags, and for the host where the memory is not of that kind (reference,
    /// cuMemSetAccess); `CUDA_ERROR_INVALID_DEVICE` for a device that does not exist.
    pub(super) fn apply(&mut self, description: Access, memory: Location) -> Result {
        let right = match description.flags {
            ACCESS_NONE => Right::None,
            ACCESS_READ => Right::Read,
            ACCESS_READWRITE => Right::ReadWrite,
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        };
        let accessor = Location::of_accessor(description.location)?;
        let Location::Device(ordinal) = accessor else {
            if accessor != memory {
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
            self.host = right;
            return Ok(());
        };
        let bit = 1 << ordinal;
        self.readers = if right >= Right::Read { self.readers | bit } else { self.readers & !bit };
        self.writers = if right == Right::ReadWrite { self.writers | bit } else { self.writers & !bit };
        Ok(())
    }

    pub(super) fn right(self, ordinal: i32) -> Right {
        match (self.readers >> ordinal & 1, self.writers >> ordinal & 1) {
            (_, 1) => Right::ReadWrite,
            (1, _) => Right::Read,
            _ => Right::None,
        }
    }

    /// `CU_MEM_ACCESS_FLAGS_…` of a location.
    ///
    /// # Errors
    /// As [`Location::of`].
    pub(super) fn flags_of(self, location: CUmemLocation) -> Result<u32> {
        Ok(match Location::of_accessor(location)? {
            Location::Device(ordinal) => self.flags(ordinal),
            Location::Host | Location::HostNode => flags(self.host),
        })
    }

    /// `CU_MEM_ACCESS_FLAGS_…` of a device.
    pub(super) fn flags(self, ordinal: i32) -> u32 {
        flags(self.right(ordinal))
    }
}

fn flags(right: Right) -> u32 {
    match right {
        Right::None => ACCESS_NONE,
        Right::Read => ACCESS_READ,
        Right::ReadWrite => ACCESS_READWRITE,
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
