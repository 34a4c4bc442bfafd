//! The GPUs behind the process's devices, by their UUIDs.

use std::ffi::c_int;

use ckpt_protocol::agent::{DriverMemory, GpuPair, GpuUse, Region};
use cuda_abi::sys::CUuuid;
use thiserror::Error;

use super::{context, driver};

/// An old UUID and a new one, as `CUcheckpointGpuPair` has them.
pub(super) type UuidPair = [[u8; 16]; 2];

/// The launcher has sent a UUID that is none.
#[derive(Debug, Error)]
#[error("the launcher names a GPU {0:?}, which is no UUID")]
pub struct InvalidUuid(String);

/// The GPUs on which the process has memory: that of the regions, or the driver's. A device whose UUID the driver does not
/// say is left out.
pub(super) fn in_use(regions: &[Region], driver_memory: &[DriverMemory]) -> Vec<GpuUse> {
    // SAFETY: the call writes to a local variable.
    let count = driver::ask(0, |count| unsafe { driver::cuDeviceGetCount(count) }).unwrap_or(0);
    let with_context = context::devices();
    let of_device = |device: c_int| {
        let uuid = uuid_of(device)?;
        let driver_bytes = driver_memory.iter().find(|memory| memory.uuid == uuid).map(|memory| memory.bytes);
        let is_used = driver_bytes.is_some()
            || with_context.contains(&device)
            || regions.iter().any(|region| region.device == device);
        is_used.then_some(GpuUse { device, uuid, driver_bytes })
    };
    (0..count).filter_map(of_device).collect()
}

pub(super) fn uuid_of(device: c_int) -> Option<String> {
    let none = CUuuid { bytes: [0; 16] };
    // SAFETY: the call writes to a local variable.
    let uuid = driver::ask(none, |uuid| unsafe { driver::cuDeviceGetUuid_v2(uuid, device) }).ok()?;
    Some(text(uuid.bytes.map(|byte| byte as u8)))
}

/// A UUID as NVML writes it.
fn text(uuid: [u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn parse(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text.strip_prefix("GPU-")?.bytes().filter(|byte| *byte != b'-').collect();
    let (pairs, rest) = digits.as_chunks::<2>();
    let byte = |pair: &[u8; 2]| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Vec<u8> = pairs.iter().map(byte).collect::<Option<_>>()?;
    bytes.try_into().ok().filter(|_| rest.is_empty())
}

/// The pairs for the driver.
///
/// # Errors
/// A UUID is none.
pub(super) fn pairs(pairs: &[GpuPair]) -> Result<Vec<UuidPair>, InvalidUuid> {
    let uuid = |text: &String| parse(text).ok_or_else(|| InvalidUuid(text.clone()));
    pairs.iter().map(|pair| Ok([uuid(&pair.old)?, uuid(&pair.new)?])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvml_writes_it() {
        let uuid = std::array::from_fn(|at| 0xf0 + at as u8);
        let written = text(uuid);
        assert_eq!(written, "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff");
        assert_eq!(parse(&written), Some(uuid));
        for bad in ["", "GPU-", "f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff", &written[..39], "MIG-f0"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        let pair = GpuPair { old: written, new: "GPU-x".into() };
        assert!(pairs(&[pair]).unwrap_err().to_string().contains("\"GPU-x\""));
    }
}
