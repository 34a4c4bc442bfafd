//! A device's place on the PCI bus: domain 0, a bus of its own, device 0.

use std::ffi::{CStr, c_char, c_int};

use cuda_abi::sys::CUresult;
use cuda_abi::types::CUdevice;

use crate::error::{Result, write_out};
use crate::process;

/// `0000:10:00.0` and its NUL.
const TEXT_BYTES: usize = 13;

pub(crate) unsafe fn cuDeviceGetPCIBusId(out: *mut c_char, len: c_int, ordinal: CUdevice) -> Result {
    let device = process::device(ordinal)?;
    let len = usize::try_from(len).ok().filter(|len| *len >= TEXT_BYTES);
    let len = len.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let text = format!("0000:{:02x}:00.0", device.bus);
    // SAFETY: `out` is NULL or the caller's buffer of `len` bytes.
    unsafe { super::write_text(out, len, &text) }
}

pub(crate) unsafe fn cuDeviceGetByPCIBusId(out: *mut CUdevice, text: *const c_char) -> Result {
    let machine = process::machine()?;
    if text.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not NULL, so that it is the caller's NUL-terminated text.
    let text = unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let asked = parse(text).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let found = machine.devices.iter().find(|device| asked == (0, device.bus, 0, 0));
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, found.ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?.ordinal) }
}

/// Domain, bus, device and function of `[domain]:[bus]:[device].[function]`, `[domain]:[bus]:[device]` or
/// `[bus]:[device].[function]`, all hexadecimal (CUDA driver API reference, cuDeviceGetByPCIBusId).
fn parse(text: &str) -> Option<(i32, i32, i32, i32)> {
    let number = |digits: &str| i32::from_str_radix(digits, 16).ok().filter(|number| *number >= 0);
    let (place, function) = match text.split_once('.') {
        Some((place, function)) => (place, Some(number(function)?)),
        None => (text, None),
    };
    let parts = place.split(':').map(number).collect::<Option<Vec<_>>>()?;
    match (parts.as_slice(), function) {
        ([domain, bus, device], function) => Some((*domain, *bus, *device, function.unwrap_or(0))),
        ([bus, device], Some(function)) => Some((0, *bus, *device, function)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn the_three_documented_forms_are_read() {
        assert_eq!(parse("0000:1a:00.0"), Some((0, 0x1a, 0, 0)));
        assert_eq!(parse("0001:1A:02"), Some((1, 0x1a, 2, 0)));
        assert_eq!(parse("1a:00.0"), Some((0, 0x1a, 0, 0)));
        for bad in ["", "1a", "1a:00", "x:1a:00.0", "0:0:0:0.0", "0000:1a:00.x"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
