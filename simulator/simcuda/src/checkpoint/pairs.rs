//! The map of devices that a restore may be given: each old device and the one that takes its place.

use cuda_abi::sys::{CUresult, CUuuid};

use super::wire::Pair;
use crate::error::Result;
use crate::{dispatch, process};

/// Checks that a map names each device of the process once and gives each a place of its own. All simulated devices
/// are of one type, so any device may take the place of any other; which one does is not seen by the process, and its
/// memory stays accounted to the device of the same ordinal.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if not.
pub(super) fn check(pairs: &[Pair]) -> Result {
    if pairs.is_empty() {
        return Ok(());
    }
    let mut devices = Vec::new();
    for device in &process::machine()?.devices {
        devices.push(uuid(device.ordinal)?);
    }
    if is_permutation(pairs, devices) { Ok(()) } else { Err(CUresult::CUDA_ERROR_INVALID_VALUE) }
}

fn is_permutation(pairs: &[Pair], mut devices: Vec<[u8; 16]>) -> bool {
    let side = |index: usize| {
        let mut uuids: Vec<_> = pairs.iter().map(|pair| pair[index]).collect();
        uuids.sort_unstable();
        uuids
    };
    devices.sort_unstable();
    side(0) == devices && side(1) == devices
}

fn uuid(ordinal: i32) -> Result<[u8; 16]> {
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: `uuid` is a local variable.
    unsafe { dispatch::cuDeviceGetUuid_v2(&raw mut uuid, ordinal) }?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: [u8; 16] = [1; 16];
    const B: [u8; 16] = [2; 16];

    #[test]
    fn each_device_once_on_either_side() {
        assert!(is_permutation(&[[A, A], [B, B]], vec![A, B]));
        assert!(is_permutation(&[[B, A], [A, B]], vec![A, B]));
    }

    #[test]
    fn a_device_missing_named_twice_or_unknown() {
        for bad in [
            &[[A, A]][..],
            &[[A, B], [B, B]],
            &[[A, A], [A, B]],
            &[[A, A], [B, [3; 16]]],
            &[[A, A], [B, B], [B, B]],
        ] {
            assert!(!is_permutation(bad, vec![A, B]), "{bad:?}");
        }
    }
}
