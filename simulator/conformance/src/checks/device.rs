//! Devices and what can be asked about them.

use std::ffi::{CStr, c_char};

use cuda_abi::sys::{self, CUdevice_attribute as A};

use crate::check::{Check, Result, check, expect_equal};
use crate::{ensure, gives, gpu, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "device/ordinals",
        "ordinals run from 0 to count - 1; others are CUDA_ERROR_INVALID_DEVICE",
        ordinals,
    ),
    check(
        "device/invariants",
        "attributes that are the same on every part since sm_70 (programming guide)",
        invariants,
    ),
    check(
        "device/unknown-attribute",
        "an unknown attribute is CUDA_ERROR_INVALID_VALUE (reference)",
        unknown,
    ),
    check("device/capability", "cuDeviceComputeCapability agrees with the attributes", capability),
    check(
        "device/name",
        "a name is cut to the buffer and ends with a NUL (reference, cuDeviceGetName)",
        name,
    ),
    check(
        "device/memory",
        "cuDeviceTotalMem and cuMemGetInfo agree, and free is not more than total",
        memory,
    ),
    check("device/uuid", "a UUID is not zero, stays, and differs between devices", uuid),
    check(
        "device/pci-bus-id",
        "a PCI bus ID finds its device again (reference, cuDeviceGetByPCIBusId)",
        bus_id,
    ),
    check("device/properties", "cuDeviceGetProperties agrees with the attributes", properties),
    check(
        "device/vmm-attributes",
        "a device with VMM supports POSIX file descriptors on Linux",
        vmm_attributes,
    ),
];

fn ordinals() -> Result {
    ok!(cuInit(0));
    let (mut count, mut device) = (0, -1);
    ok!(cuDeviceGetCount(&raw mut count));
    ensure!(count > 0, "{count} devices");
    ok!(cuDeviceGet(&raw mut device, count - 1));
    gives!(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&raw mut device, count));
    gives!(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&raw mut device, -1));
    gives!(CUDA_ERROR_INVALID_VALUE, cuDeviceGetCount(std::ptr::null_mut()));
    Ok(())
}

fn invariants() -> Result {
    ok!(cuInit(0));
    let wanted = [
        (A::CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32),
        (A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024),
        (A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024),
        (A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024),
        (A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64),
        (A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, i32::MAX),
        (A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535),
        (A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535),
        (A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10),
        (A::CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 64 << 10),
        (A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536),
        (A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1),
        (A::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1),
        (A::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1),
        (A::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 0),
        (A::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1),
        (A::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1),
        (A::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1),
        (A::CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1),
    ];
    for (attribute, value) in wanted {
        expect_equal(&format!("{attribute:?}"), gpu::device_attribute(attribute)?, value)?;
    }
    let shared = gpu::device_attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    ensure!(shared >= 48 << 10, "shared memory by opt-in: {shared}");
    let processors = gpu::device_attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    ensure!(processors > 0, "{processors} multiprocessors");
    Ok(())
}

fn unknown() -> Result {
    ok!(cuInit(0));
    let mut value = 0;
    gives!(CUDA_ERROR_INVALID_VALUE, cuDeviceGetAttribute(&raw mut value, 100_000, 0));
    let warp = A::CU_DEVICE_ATTRIBUTE_WARP_SIZE as u32;
    gives!(CUDA_ERROR_INVALID_VALUE, cuDeviceGetAttribute(std::ptr::null_mut(), warp, 0));
    gives!(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetAttribute(&raw mut value, warp, 1000));
    Ok(())
}

fn capability() -> Result {
    ok!(cuInit(0));
    let (mut major, mut minor) = (0, 0);
    ok!(cuDeviceComputeCapability(&raw mut major, &raw mut minor, 0));
    let by_attribute = (
        gpu::device_attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        gpu::device_attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    expect_equal("capability", (major, minor), by_attribute)?;
    ensure!(major >= 7, "capability {major}.{minor}: the suite's kernels are for sm_70 and later");
    Ok(())
}

fn name() -> Result {
    ok!(cuInit(0));
    let mut whole = [1_u8; 128];
    ok!(cuDeviceGetName(whole.as_mut_ptr().cast::<c_char>(), 128, 0));
    let whole = CStr::from_bytes_until_nul(&whole).expect("a name is shorter than 128 bytes").to_bytes();
    ensure!(!whole.is_empty(), "the name is empty");
    let mut short = [1_u8; 8];
    ok!(cuDeviceGetName(short.as_mut_ptr().cast::<c_char>(), 4, 0));
    expect_equal("the byte after the fourth", short[4], 1)?;
    expect_equal("the first four", &short[..4], &[whole[0], whole[1], whole[2], 0][..])
}

fn memory() -> Result {
    gpu::start()?;
    let (mut by_device, mut free, mut total) = (0, 0, 0);
    ok!(cuDeviceTotalMem_v2(&raw mut by_device, 0));
    ok!(cuMemGetInfo_v2(&raw mut free, &raw mut total));
    expect_equal("total", total, by_device)?;
    ensure!(free <= total && free > 0, "free {free} of {total}");
    Ok(())
}

fn uuid_of(device: i32) -> Result<Vec<u8>> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    ok!(cuDeviceGetUuid(&raw mut uuid, device));
    Ok(uuid.bytes.iter().map(|byte| byte.cast_unsigned()).collect())
}

fn uuid() -> Result {
    ok!(cuInit(0));
    let first = uuid_of(0)?;
    ensure!(first.iter().any(|byte| *byte != 0), "the UUID is zero");
    expect_equal("asked again", uuid_of(0)?, first.clone())?;
    if gpu::second_device().is_ok() {
        ensure!(uuid_of(1)? != first, "two devices have one UUID");
    }
    Ok(())
}

fn bus_id() -> Result {
    ok!(cuInit(0));
    let mut text = [0_u8; 32];
    ok!(cuDeviceGetPCIBusId(text.as_mut_ptr().cast::<c_char>(), 32, 0));
    let mut device = -1;
    ok!(cuDeviceGetByPCIBusId(&raw mut device, text.as_ptr().cast::<c_char>()));
    expect_equal("device", device, 0)?;
    gives!(
        CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_INVALID_DEVICE,
        cuDeviceGetByPCIBusId(&raw mut device, c"no bus".as_ptr())
    );
    Ok(())
}

fn properties() -> Result {
    ok!(cuInit(0));
    // SAFETY: the structure is integers only.
    let mut properties: sys::CUdevprop = unsafe { std::mem::zeroed() };
    ok!(cuDeviceGetProperties(&raw mut properties, 0));
    expect_equal("warp size", properties.SIMDWidth, 32)?;
    let threads = gpu::device_attribute(A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
    expect_equal("threads per block", properties.maxThreadsPerBlock, threads)
}

fn vmm_attributes() -> Result {
    ok!(cuInit(0));
    let vmm = A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    expect_equal("VMM", gpu::device_attribute(vmm)?, 1)?;
    let descriptors = A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    expect_equal("descriptors", gpu::device_attribute(descriptors)?, 1)
}
