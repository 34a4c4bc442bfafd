//! What the arena has to know of a device.

use std::collections::BTreeMap;
use std::ffi::c_int;

use cuda_abi::sys::{CUdevice_attribute as Attribute, CUmemAllocationGranularity_flags as Granularity};
use cuda_abi::types::CUresult;

use crate::cuda::driver;
use crate::cuda::shared::Shared;
use cuda_abi::layout::{POSIX_DESCRIPTOR, Properties};

#[derive(Clone, Copy)]
pub(crate) struct Device {
    pub ordinal: c_int,
    /// Physical memory and addresses come in multiples of this, in bytes.
    pub granularity: u64,
    /// Rows of cuMemAllocPitch begin at multiples of this, in bytes.
    pub pitch: u64,
    /// Network cards may read and write memory of cuMemCreate.
    is_rdma_capable: bool,
}

/// `None`: the driver says that it cannot do with the device what the arena needs.
static KNOWN: Shared<BTreeMap<c_int, Option<Device>>> = Shared::new(BTreeMap::new());

impl Device {
    /// A device; `None` if its memory cannot be served as the arena does it, and the driver's own way has to do.
    pub fn of(ordinal: c_int) -> Option<Self> {
        if let Some(device) = KNOWN.lock().get(&ordinal) {
            return *device;
        }
        let device = Self::ask(ordinal).ok()?;
        KNOWN.lock().insert(ordinal, device);
        device
    }

    fn ask(ordinal: c_int) -> Result<Option<Self>, CUresult> {
        let has = |attribute| attribute_of(ordinal, attribute).map(|value| value != 0);
        if !has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?
            || !has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?
        {
            return Ok(None);
        }
        // Of the two alignments of textures it is this one that cuMemAllocPitch's rows have.
        let pitch = attribute_of(ordinal, Attribute::CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT)?;
        let is_rdma_capable = has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?;
        let mut device =
            Self { ordinal, granularity: 0, pitch: u64::try_from(pitch).unwrap_or(0), is_rdma_capable };
        device.granularity = granularity(&device.properties())?;
        Ok((device.granularity > 0 && device.pitch > 0).then_some(device))
    }

    /// Those of memory that takes the place of cuMemAlloc's.
    pub fn properties(&self) -> Properties {
        let mut properties = Properties::of(self.ordinal);
        properties.handle_types = POSIX_DESCRIPTOR.0;
        properties.is_rdma_capable = u8::from(self.is_rdma_capable);
        properties
    }
}

fn attribute_of(ordinal: c_int, attribute: Attribute) -> Result<c_int, CUresult> {
    // SAFETY: the call writes to a local variable.
    driver::ask(0, |value| unsafe { driver::cuDeviceGetAttribute(value, attribute as u32, ordinal) })
}

fn granularity(properties: &Properties) -> Result<u64, CUresult> {
    let least = Granularity::CU_MEM_ALLOC_GRANULARITY_MINIMUM as u32;
    let properties = (&raw const *properties).cast();
    // SAFETY: the call writes to a local variable, the properties are a whole structure.
    let ask = |bytes| unsafe { driver::cuMemGetAllocationGranularity(bytes, properties, least) };
    driver::ask(0, ask).map(|bytes| bytes as u64)
}
