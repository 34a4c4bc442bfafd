use super::*;
use crate::testing;

fn attribute(number: u32, ordinal: i32) -> Result<i32> {
    let mut value = i32::MIN;
    // SAFETY: `value` is a local variable.
    unsafe { cuDeviceGetAttribute(&raw mut value, number, ordinal) }.map(|()| value)
}

#[test]
fn every_attribute_of_the_simulated_driver_has_a_value() {
    testing::context();
    // CUDA 13.0 has 1 to 147, and 148 as its end mark.
    for number in 1..148 {
        assert!(attribute(number, 0).is_ok(), "{number}");
    }
    for unknown in [0, 148, 149, 162, u32::MAX] {
        assert_eq!(attribute(unknown, 0), Err(CUresult::CUDA_ERROR_INVALID_VALUE), "{unknown}");
    }
    assert_eq!(attribute(1, 2), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    assert_eq!(attribute(1, -1), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
}

#[test]
fn attributes_are_those_of_the_part() {
    use sys::CUdevice_attribute as A;
    testing::context();
    for (known, value) in [
        (A::CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32),
        (A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132),
        (A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152),
        (A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232_448),
        (A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233_472),
        (A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9),
        (A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0),
        (A::CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE, 32_768_000),
        (A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1),
        (A::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 1),
    ] {
        assert_eq!(attribute(known as u32, 1), Ok(value), "{known:?}");
    }
}

#[test]
fn a_name_is_cut_to_the_buffer() {
    testing::context();
    let mut buffer = [0x7f; 64];
    // SAFETY: the buffer is as large as is said.
    unsafe { cuDeviceGetName(buffer.as_mut_ptr(), 64, 0) }.unwrap();
    // SAFETY: the call has written a NUL.
    assert_eq!(unsafe { std::ffi::CStr::from_ptr(buffer.as_ptr()) }.to_str(), Ok("SimCUDA Device sm_90"));
    // SAFETY: as above.
    unsafe { cuDeviceGetName(buffer.as_mut_ptr(), 4, 0) }.unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { std::ffi::CStr::from_ptr(buffer.as_ptr()) }.to_str(), Ok("Sim"));
    // SAFETY: no byte is written.
    let refused = unsafe { cuDeviceGetName(buffer.as_mut_ptr(), 0, 0) };
    assert_eq!(refused, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
}

#[test]
fn identities_differ_by_device_and_are_found_again() {
    testing::context();
    for ordinal in 0..2 {
        let mut text = [0; 13];
        // SAFETY: the buffer is as large as is said.
        unsafe { cuDeviceGetPCIBusId(text.as_mut_ptr(), 13, ordinal) }.unwrap();
        let mut found = -1;
        // SAFETY: the call before has written a NUL.
        unsafe { cuDeviceGetByPCIBusId(&raw mut found, text.as_ptr()) }.unwrap();
        assert_eq!(found, ordinal);
        // SAFETY: no byte is written.
        let refused = unsafe { cuDeviceGetPCIBusId(text.as_mut_ptr(), 12, ordinal) };
        assert_eq!(refused, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    }
    let mut found = -1;
    // SAFETY: local variables.
    let refused = unsafe { cuDeviceGetByPCIBusId(&raw mut found, c"0000:7f:00.0".as_ptr()) };
    assert_eq!(refused, Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
}

#[test]
fn no_host_atomic_is_native_and_unknown_ones_are_refused() {
    testing::context();
    let mut capabilities = [u32::MAX; 2];
    let add = sys::CUatomicOperation::CU_ATOMIC_OPERATION_INTEGER_ADD as u32;
    // SAFETY: both arrays have two elements.
    unsafe { cuDeviceGetHostAtomicCapabilities(capabilities.as_mut_ptr(), [add, 12].as_ptr(), 2, 0) }
        .unwrap();
    assert_eq!(capabilities, [0; 2]);
    // SAFETY: as above.
    let refused =
        unsafe { cuDeviceGetHostAtomicCapabilities(capabilities.as_mut_ptr(), [add, 13].as_ptr(), 2, 0) };
    assert_eq!(refused, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
}
