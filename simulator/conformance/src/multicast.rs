//! Multicast objects, as checks and helpers use them.

use cuda_abi::sys::CUdevice_attribute as A;
use cuda_abi::types::*;

use crate::check::{Result, skipped};
use crate::vmm::{self, READ_WRITE, access, map, properties, reserve};
use crate::{gpu, ok};

const POSIX: u64 = 1;

/// Two devices that multicast, the first with a current context; or the check is skipped.
pub fn start() -> Result {
    gpu::needs_driver(12010)?;
    gpu::start()?;
    let second = gpu::second_device()?;
    for device in [0, second] {
        let mut supported = 0;
        ok!(cuDeviceGetAttribute(
            &raw mut supported,
            A::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED as u32,
            device
        ));
        if supported == 0 {
            return skipped("the devices do not multicast");
        }
    }
    Ok(())
}

/// Properties of an object.
pub fn object(devices: u32, size_bytes: usize, exportable: bool) -> CUmulticastObjectProp {
    CUmulticastObjectProp {
        numDevices: devices,
        size: size_bytes,
        handleTypes: if exportable { POSIX } else { 0 },
        flags: 0,
    }
}

/// The smallest unit that suits objects and memory.
pub fn unit() -> Result<usize> {
    let (properties, mut unit) = (object(2, vmm::granularity()?, true), 0);
    ok!(cuMulticastGetGranularity(&raw mut unit, &raw const properties, 0));
    Ok(unit.max(vmm::granularity()?))
}

/// An object for a team of two.
pub fn create(size_bytes: usize, exportable: bool) -> Result<u64> {
    let (properties, mut handle) = (object(2, size_bytes, exportable), 0);
    ok!(cuMulticastCreate(&raw mut handle, &raw const properties));
    Ok(handle)
}

/// Adds a device.
pub fn add(object: u64, device: CUdevice) -> Result {
    ok!(cuMulticastAddDevice(object, device));
    Ok(())
}

/// Memory of a device, mapped for device 0 and for its own.
pub struct Member {
    /// Where it is mapped.
    pub address: u64,
    /// Its handle.
    pub handle: u64,
}

impl Member {
    /// Creates it.
    pub fn create(device: CUdevice, size_bytes: usize) -> Result<Self> {
        let handle = vmm::create_with(size_bytes, &properties(device, true))?;
        let address = reserve(size_bytes)?;
        map(address, size_bytes, handle)?;
        let both = [access(0, READ_WRITE), access(device, READ_WRITE)];
        ok!(cuMemSetAccess(address, size_bytes, both.as_ptr(), if device == 0 { 1 } else { 2 }));
        Ok(Self { address, handle })
    }

    /// Binds it to the beginning of an object.
    pub fn bind(&self, object: u64, size_bytes: usize) -> Result {
        ok!(cuMulticastBindMem(object, 0, self.handle, 0, size_bytes, 0));
        Ok(())
    }
}

/// Maps an object for device 0.
pub fn map_object(object: u64, size_bytes: usize) -> Result<u64> {
    let address = reserve(size_bytes)?;
    map(address, size_bytes, object)?;
    vmm::allow(address, size_bytes, READ_WRITE)?;
    Ok(address)
}

/// An object with memory of both devices, mapped for device 0.
pub struct Team {
    /// The object's handle.
    pub object: u64,
    /// Where it is mapped.
    pub address: u64,
    /// The memory of devices 0 and 1.
    pub members: [Member; 2],
}

impl Team {
    /// Makes one.
    pub fn create(size_bytes: usize) -> Result<Self> {
        let object = create(size_bytes, true)?;
        add(object, 0)?;
        add(object, 1)?;
        let members = [Member::create(0, size_bytes)?, Member::create(1, size_bytes)?];
        for member in &members {
            member.bind(object, size_bytes)?;
        }
        Ok(Self { object, address: map_object(object, size_bytes)?, members })
    }
}
