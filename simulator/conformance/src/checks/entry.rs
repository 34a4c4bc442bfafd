//! How programs find entry points.

use std::ffi::{CString, c_void};

use cuda_abi::sys::{CUdriverProcAddressQueryResult as Status, CUresult};

use crate::check::{Check, Result, check, expect_equal};
use crate::{cu, ensure, gives, gpu, ok, refuses};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check("entry/symbols", "what every program links or looks up by dlsym is exported", symbols),
    check(
        "entry/per-thread-symbols",
        "_ptsz and _ptds variants are symbols of their own (reference, \"Stream synchronization behavior\")",
        per_thread_symbols,
    ),
    check(
        "entry/found",
        "cuGetProcAddress finds a base name for its version (reference, cuGetProcAddress)",
        found,
    ),
    check(
        "entry/unknown-name",
        "an unknown name is CUDA_SUCCESS, NULL and SYMBOL_NOT_FOUND (reference, cuGetProcAddress)",
        unknown_name,
    ),
    check(
        "entry/too-old",
        "a name that is newer than the version asked for is CUDA_SUCCESS, NULL and VERSION_NOT_SUFFICIENT (reference)",
        too_old,
    ),
    check(
        "entry/newer-than-driver",
        "a version beyond the driver's, or a negative one, counts as the driver's (source: measured with 550.163) or is CUDA_ERROR_INVALID_VALUE (580.159.04, for 99000)",
        newer_than_driver,
    ),
    check("entry/null-status", "the status is optional (reference, cuGetProcAddress)", null_status),
    check(
        "entry/first-form",
        "cuGetProcAddress of CUDA 11 has no status: what it does not find is CUDA_ERROR_NOT_FOUND (source: measured with 550.163)",
        first_form,
    ),
    check(
        "entry/empty-name",
        "the empty name with version 0 is not an error (source: NVIDIA's runtime asks for it first)",
        empty_name,
    ),
    check(
        "entry/per-thread-flag",
        "the per-thread flag gives another function where there is a per-thread variant (source: reference, cuGetProcAddress)",
        per_thread_flag,
    ),
    check(
        "entry/per-thread-without-variant",
        "the per-thread flag gives the plain function where there is no variant (reference)",
        per_thread_without_variant,
    ),
    check("entry/export-table", "a private table that no driver has is refused", export_table),
];

struct Found {
    code: u32,
    address: *mut c_void,
    status: u32,
}

fn look_up(name: &str, version: i32, flags: u64) -> Result<Found> {
    let name = CString::new(name).expect("names of entry points have no NUL");
    // What the call must overwrite.
    let mut address = std::ptr::dangling_mut::<c_void>();
    let mut status = 77;
    let code = cu!(cuGetProcAddress_v2(name.as_ptr(), &raw mut address, version, flags, &raw mut status));
    Ok(Found { code, address, status })
}

fn expect_status(name: &str, version: i32, wanted: Status) -> Result {
    let found = look_up(name, version, 0)?;
    expect_equal("result", gpu::name_of(found.code), "CUDA_SUCCESS".into())?;
    expect_equal("status", found.status, wanted as u32)?;
    let is_null = found.address.is_null();
    expect_equal("the address is NULL", is_null, wanted != Status::CU_GET_PROC_ADDRESS_SUCCESS)
}

fn symbols() -> Result {
    let names = [
        "cuInit",
        "cuDriverGetVersion",
        "cuDeviceGet",
        "cuDeviceGetCount",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuDevicePrimaryCtxRelease_v2",
        "cuCtxCreate_v2",
        "cuCtxDestroy_v2",
        "cuCtxSetCurrent",
        "cuCtxSynchronize",
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuMemcpyHtoD_v2",
        "cuMemcpyDtoH_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemsetD8_v2",
        "cuStreamCreate",
        "cuStreamSynchronize",
        "cuEventCreate",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuLaunchKernel",
        "cuGetProcAddress",
        "cuGetExportTable",
        "cuGetErrorName",
        "cuMemCreate",
        "cuMemMap",
        "cuMemAddressReserve",
        "cuIpcGetMemHandle",
        "cuStreamBeginCapture_v2",
        "cuGraphLaunch",
        "cuMemAllocAsync",
    ];
    let missing: Vec<_> = names.iter().filter(|name| gpu::api().symbol(name).is_null()).collect();
    ensure!(missing.is_empty(), "not exported: {missing:?}");
    Ok(())
}

fn per_thread_symbols() -> Result {
    let pairs = [
        ("cuLaunchKernel", "cuLaunchKernel_ptsz"),
        ("cuStreamSynchronize", "cuStreamSynchronize_ptsz"),
        ("cuMemcpyHtoD_v2", "cuMemcpyHtoD_v2_ptds"),
        ("cuMemsetD8_v2", "cuMemsetD8_v2_ptds"),
        ("cuMemAllocAsync", "cuMemAllocAsync_ptsz"),
    ];
    for (plain, per_thread) in pairs {
        let (plain_at, per_thread_at) = (gpu::api().symbol(plain), gpu::api().symbol(per_thread));
        ensure!(!per_thread_at.is_null(), "{per_thread} is not exported");
        ensure!(plain_at != per_thread_at, "{plain} and {per_thread} are one function");
    }
    Ok(())
}

fn found() -> Result {
    expect_status("cuDriverGetVersion", 12000, Status::CU_GET_PROC_ADDRESS_SUCCESS)?;
    let found = look_up("cuDriverGetVersion", 12000, 0)?;
    // SAFETY: the driver says that this is cuDriverGetVersion, whose signature this is.
    let call: unsafe extern "C" fn(*mut i32) -> u32 = unsafe { std::mem::transmute(found.address) };
    let (mut by_address, mut by_symbol) = (0, 0);
    // SAFETY: the argument is a live variable.
    let code = unsafe { call(&raw mut by_address) };
    expect_equal("the call through the address", code, 0)?;
    ok!(cuDriverGetVersion(&raw mut by_symbol));
    expect_equal("version", by_address, by_symbol)
}

fn unknown_name() -> Result {
    expect_status("cuThereIsNoSuchCall", 12000, Status::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND)
}

fn too_old() -> Result {
    // cuGraphAddNode came with CUDA 12.2.
    expect_status("cuGraphAddNode", 11000, Status::CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT)
}

fn newer_than_driver() -> Result {
    let mut version = 0;
    ok!(cuDriverGetVersion(&raw mut version));
    let newest = look_up("cuMemAlloc", version, 0)?;
    for beyond in [version + 1, 99000, -1] {
        let found = look_up("cuMemAlloc", beyond, 0)?;
        if beyond > 0 && found.code == CUresult::CUDA_ERROR_INVALID_VALUE as u32 {
            continue;
        }
        expect_equal("result", gpu::name_of(found.code), "CUDA_SUCCESS".into())?;
        ensure!(
            found.address == newest.address && !found.address.is_null(),
            "version {beyond}: another function"
        );
    }
    Ok(())
}

fn null_status() -> Result {
    let mut address = std::ptr::null_mut();
    ok!(cuGetProcAddress_v2(c"cuInit".as_ptr(), &raw mut address, 12000, 0, std::ptr::null_mut()));
    ensure!(!address.is_null(), "cuInit was not found");
    Ok(())
}

fn first_form() -> Result {
    let mut address = std::ptr::null_mut();
    ok!(cuGetProcAddress(c"cuInit".as_ptr(), &raw mut address, 11030, 0));
    ensure!(!address.is_null(), "cuInit was not found");
    let found = address;
    gives!(CUDA_ERROR_NOT_FOUND, cuGetProcAddress(c"cuNoSuchCall".as_ptr(), &raw mut address, 11030, 0));
    ensure!(address == found, "the result was written");
    Ok(())
}

fn empty_name() -> Result {
    let found = look_up("", 0, 0)?;
    expect_equal("result", gpu::name_of(found.code), "CUDA_SUCCESS".into())?;
    ensure!(found.address.is_null(), "there is no such function");
    Ok(())
}

fn per_thread_flag() -> Result {
    let (legacy, per_thread) =
        (look_up("cuStreamSynchronize", 12000, 1)?, look_up("cuStreamSynchronize", 12000, 2)?);
    ensure!(!legacy.address.is_null() && !per_thread.address.is_null(), "not found");
    ensure!(legacy.address != per_thread.address, "both flags give one function");
    Ok(())
}

fn per_thread_without_variant() -> Result {
    let (legacy, per_thread) = (look_up("cuDeviceGet", 12000, 1)?, look_up("cuDeviceGet", 12000, 2)?);
    expect_equal("the address", per_thread.address, legacy.address)
}

fn export_table() -> Result {
    let mut table = std::ptr::null();
    let id = cuda_abi::sys::CUuuid { bytes: [0x55; 16] };
    refuses!(cuGetExportTable(&raw mut table, &raw const id));
    Ok(())
}
