//! Devices and what can be asked about them.

mod attributes;
mod pci;

use std::ffi::{c_char, c_int};

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{CUarray_format, CUatomicOperation, CUdevice, CUdevice_attribute, CUexecAffinityType};

use parking_lot::RwLock;
use simcuda_machine::Gpu;

use crate::context::Primary;
use crate::error::{Result, write_both, write_out};
use crate::process;

pub(crate) use attributes::{
    CONSTANT_BYTES, MAX_BLOCK_DIM, MAX_GRID_DIM, MULTIPROCESSORS, REGISTERS_PER_MULTIPROCESSOR,
    RESERVED_SHARED_BYTES, SHARED_BYTES_PER_BLOCK, SHARED_BYTES_PER_BLOCK_OPTIN,
    SHARED_BYTES_PER_MULTIPROCESSOR, SM_VERSION, THREADS_PER_BLOCK, THREADS_PER_MULTIPROCESSOR, WARP_SIZE,
};
pub(crate) use pci::{cuDeviceGetByPCIBusId, cuDeviceGetPCIBusId};

/// One simulated device: a part with compute capability 9.0.
pub(crate) struct Device {
    pub(crate) ordinal: i32,
    pub(crate) primary: Primary,
    /// A single GPU has no switch to multicast with.
    pub(crate) has_multicast: bool,
    /// As it was at cuInit: a restore on another GPU does not change it (cuda-checkpoint issue 48).
    bus: i32,
    gpu: RwLock<Gpu>,
}

impl Device {
    pub(crate) fn new(ordinal: usize, gpu: &Gpu, has_multicast: bool) -> Self {
        let ordinal = i32::try_from(ordinal).expect("the number of devices is bounded by the configuration");
        let bus = simcuda_machine::bus(gpu.id);
        Self { ordinal, primary: Primary::new(), has_multicast, bus, gpu: RwLock::new(gpu.clone()) }
    }

    /// The GPU that it is now.
    pub(crate) fn gpu(&self) -> Gpu {
        self.gpu.read().clone()
    }

    /// From now on it is this GPU.
    pub(crate) fn become_gpu(&self, gpu: Gpu) {
        *self.gpu.write() = gpu;
    }
}

pub(crate) unsafe fn cuDeviceGet(out: *mut CUdevice, ordinal: i32) -> Result {
    let device = process::device(ordinal)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, device.ordinal) }
}

pub(crate) unsafe fn cuDeviceGetCount(out: *mut i32) -> Result {
    let machine = process::machine()?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, i32::try_from(machine.devices.len()).unwrap_or(i32::MAX)) }
}

pub(crate) unsafe fn cuDeviceGetName(out: *mut c_char, len: c_int, ordinal: CUdevice) -> Result {
    let device = process::device(ordinal)?;
    let instance = if process::machine()?.config.is_mig { " MIG 1g.10gb" } else { "" };
    let len = usize::try_from(len).ok().filter(|len| *len > 0).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    // SAFETY: `out` is NULL or the caller's buffer of `len` bytes.
    unsafe { write_text(out, len, &format!("{}{instance}", device.gpu().name)) }
}

/// Writes a text and its NUL, cut to what fits.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if there is no buffer.
///
/// # Safety
/// `out` is NULL or valid for writes of `len` bytes; `len` is not 0.
unsafe fn write_text(out: *mut c_char, len: usize, text: &str) -> Result {
    if out.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let kept = &text.as_bytes()[..text.len().min(len - 1)];
    // SAFETY: the buffer has room for `len` bytes, of which this takes at most `len - 1`.
    unsafe { out.cast::<u8>().copy_from_nonoverlapping(kept.as_ptr(), kept.len()) };
    // SAFETY: `kept.len()` is below `len`.
    let end = unsafe { out.add(kept.len()) };
    // SAFETY: `end` lies inside of the buffer.
    unsafe { end.write(0) };
    Ok(())
}

pub(crate) unsafe fn cuDeviceGetUuid(out: *mut sys::CUuuid, ordinal: CUdevice) -> Result {
    let device = process::device(ordinal)?;
    let uuid = sys::CUuuid { bytes: device.gpu().uuid.map(u8::cast_signed) };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, uuid) }
}

/// That of the instance where the device is one of a GPU in MIG mode, and otherwise the first version's (CUDA driver API
/// reference, cuDeviceGetUuid_v2).
pub(crate) unsafe fn cuDeviceGetUuid_v2(out: *mut sys::CUuuid, ordinal: CUdevice) -> Result {
    let device = process::device(ordinal)?;
    let is_mig = process::machine()?.config.is_mig;
    let bytes = device.gpu().uuid.map(|byte| (if is_mig { !byte } else { byte }).cast_signed());
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, sys::CUuuid { bytes }) }
}

pub(crate) unsafe fn cuDeviceTotalMem_v2(out: *mut usize, ordinal: CUdevice) -> Result {
    let device = process::device(ordinal)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, usize::try_from(device.gpu().memory_bytes).unwrap_or(usize::MAX)) }
}

pub(crate) unsafe fn cuDeviceGetAttribute(
    out: *mut c_int,
    attribute: CUdevice_attribute,
    ordinal: CUdevice,
) -> Result {
    let device = process::device(ordinal)?;
    let is_mps = attribute == sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED as u32
        && process::machine()?.config.is_mps;
    let value = if is_mps { Some(1) } else { attributes::value(device, attribute) };
    let value = value.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, value) }
}

pub(crate) unsafe fn cuDeviceComputeCapability(
    major: *mut c_int,
    minor: *mut c_int,
    ordinal: CUdevice,
) -> Result {
    process::device(ordinal)?;
    let version = SM_VERSION.cast_signed();
    // SAFETY: both are the caller's out parameters.
    unsafe { write_both(major, minor, (version / 10, version % 10)) }
}

pub(crate) unsafe fn cuDeviceGetProperties(out: *mut sys::CUdevprop, ordinal: CUdevice) -> Result {
    use sys::CUdevice_attribute as A;
    let device = process::device(ordinal)?;
    let value = |attribute: A| attributes::value(device, attribute as u32).unwrap_or(0);
    let properties = sys::CUdevprop {
        maxThreadsPerBlock: value(A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
        maxThreadsDim: MAX_BLOCK_DIM.map(u32::cast_signed),
        maxGridSize: MAX_GRID_DIM.map(u32::cast_signed),
        sharedMemPerBlock: value(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK),
        totalConstantMemory: value(A::CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY),
        SIMDWidth: value(A::CU_DEVICE_ATTRIBUTE_WARP_SIZE),
        memPitch: value(A::CU_DEVICE_ATTRIBUTE_MAX_PITCH),
        regsPerBlock: value(A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK),
        clockRate: value(A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
        textureAlign: value(A::CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT),
    };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, properties) }
}

pub(crate) unsafe fn cuDeviceGetTexture1DLinearMaxWidth(
    out: *mut usize,
    format: CUarray_format,
    channels: u32,
    ordinal: CUdevice,
) -> Result {
    use sys::CUarray_format as F;
    let device = process::device(ordinal)?;
    let formats = [
        F::CU_AD_FORMAT_UNSIGNED_INT8,
        F::CU_AD_FORMAT_UNSIGNED_INT16,
        F::CU_AD_FORMAT_UNSIGNED_INT32,
        F::CU_AD_FORMAT_SIGNED_INT8,
        F::CU_AD_FORMAT_SIGNED_INT16,
        F::CU_AD_FORMAT_SIGNED_INT32,
        F::CU_AD_FORMAT_HALF,
        F::CU_AD_FORMAT_FLOAT,
    ];
    if !formats.iter().any(|known| *known as u32 == format) || !matches!(channels, 1 | 2 | 4) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LINEAR_WIDTH;
    let width = attributes::value(device, attribute as u32).unwrap_or(0);
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, usize::try_from(width).unwrap_or(0)) }
}

/// Limiting a context to some multiprocessors needs an MPS server, of which there is none.
pub(crate) unsafe fn cuDeviceGetExecAffinitySupport(
    out: *mut c_int,
    kind: CUexecAffinityType,
    ordinal: CUdevice,
) -> Result {
    process::device(ordinal)?;
    if kind >= sys::CUexecAffinityType::CU_EXEC_AFFINITY_TYPE_MAX as u32 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, 0) }
}

/// Over PCIe no atomic operation on host memory is native.
pub(crate) unsafe fn cuDeviceGetHostAtomicCapabilities(
    capabilities: *mut u32,
    operations: *const CUatomicOperation,
    count: u32,
    ordinal: CUdevice,
) -> Result {
    process::device(ordinal)?;
    if capabilities.is_null() || operations.is_null() || count == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller passes `count` operations.
    let operations = unsafe { std::slice::from_raw_parts(operations, count as usize) };
    if operations.iter().any(|operation| *operation >= sys::CUatomicOperation::CU_ATOMIC_OPERATION_MAX as u32)
    {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's out parameter has room for `count` values.
    unsafe { capabilities.write_bytes(0, count as usize) };
    Ok(())
}

/// Profilers attach to the real driver only; starting and stopping one is nothing to do.
pub(crate) unsafe fn cuProfilerStart() -> Result {
    process::machine().map(|_| ())
}

pub(crate) unsafe fn cuProfilerStop() -> Result {
    process::machine().map(|_| ())
}

#[cfg(test)]
mod tests;
