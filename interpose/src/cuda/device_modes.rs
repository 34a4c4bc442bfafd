//! Modes of a GPU in which NVIDIA's driver cannot checkpoint a process, as far as the driver tells them: MIG and MPS. A
//! process is in one of them for good.
//!
//! The driver's errors would not do: on an instance of a GPU in MIG mode the lock succeeds, and the checkpoint fails with
//! CUDA_ERROR_OUT_OF_MEMORY (cuda-checkpoint issue 42), when everything else has been taken off the GPU.

use std::ffi::c_int;

use cuda_abi::sys::{CUdevice_attribute, CUuuid};

use super::driver;

/// The reason why the process cannot be saved, if it is a mode of one of its GPUs. The driver has been initialised.
pub(super) fn obstacle() -> Option<String> {
    // SAFETY: the call writes to a local variable.
    let devices = driver::ask(0, |count| unsafe { driver::cuDeviceGetCount(count) }).unwrap_or(0);
    (0..devices).find_map(|device| {
        let (mode, change) = if is_mig(device) {
            ("an instance of a GPU in MIG mode", "use a whole GPU (nvidia-smi -mig 0)")
        } else if is_mps(device) {
            ("shared by MPS", "run without MPS (CUDA_MPS_PIPE_DIRECTORY of an empty directory)")
        } else {
            return None;
        };
        Some(format!(
            "device {device} is {mode}, where NVIDIA's driver does not support checkpoints: {change}"
        ))
    })
}

/// Only there the second form returns another UUID, that of the instance (CUDA driver API reference,
/// cuDeviceGetUuid_v2).
fn is_mig(device: c_int) -> bool {
    let none = CUuuid { bytes: [0; 16] };
    // SAFETY: the call writes to a local variable.
    let whole = driver::ask(none, |uuid| unsafe { driver::cuDeviceGetUuid(uuid, device) });
    // SAFETY: as above.
    let part = driver::ask(none, |uuid| unsafe { driver::cuDeviceGetUuid_v2(uuid, device) });
    matches!((whole, part), (Ok(whole), Ok(part)) if whole.bytes != part.bytes)
}

fn is_mps(device: c_int) -> bool {
    const ENABLED: CUdevice_attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED;
    let enabled = driver::ask(0, |value| {
        // SAFETY: the call writes to a local variable.
        unsafe { driver::cuDeviceGetAttribute(value, ENABLED as u32, device) }
    });
    // A driver that does not know the attribute is older than those that can checkpoint.
    enabled.is_ok_and(|enabled| enabled != 0)
}
