//! How programs find the driver's entry points, and what its errors are called.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::LazyLock;

use cuda_abi::sys::{self, CUdriverProcAddressQueryResult_enum as Status, CUresult};
use cuda_abi::types::CUdriverProcAddressQueryResult;
use cuda_abi::{Lookup, lookup};

use crate::error::{Result, write_if_wanted, write_out};
use crate::{exports, process};

const PER_THREAD: u64 = sys::CUdriverProcAddress_flags::CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM as u64;
const KNOWN_FLAGS: u64 =
    PER_THREAD | sys::CUdriverProcAddress_flags::CU_GET_PROC_ADDRESS_LEGACY_STREAM as u64;

pub(crate) unsafe fn cuDriverGetVersion(out: *mut i32) -> Result {
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, process::release()?.cuda_version) }
}

/// The form of before CUDA 12, without a status: a symbol that is not there is an error, and nothing is written (measured
/// with NVIDIA's driver 550.163).
pub(crate) unsafe fn cuGetProcAddress(
    symbol: *const c_char,
    out: *mut *mut c_void,
    version: i32,
    flags: u64,
) -> Result {
    if out.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's name.
    let (address, _) = unsafe { find(symbol, version, flags) }?;
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, address.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?.cast_mut()) }
}

/// A symbol that is not there is no error: its address is NULL, and the status says why (CUDA driver API reference,
/// cuGetProcAddress).
pub(crate) unsafe fn cuGetProcAddress_v2(
    symbol: *const c_char,
    out: *mut *mut c_void,
    version: i32,
    flags: u64,
    status: *mut CUdriverProcAddressQueryResult,
) -> Result {
    if out.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's name.
    let (address, found) = unsafe { find(symbol, version, flags) }?;
    // SAFETY: `status` is the caller's out parameter or NULL.
    unsafe { write_if_wanted(status, found as u32) };
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, address.map_or(std::ptr::null_mut(), <*const c_void>::cast_mut)) }
}

/// The first release that refuses versions above its own, from 13001 on with 13000 (seen with 580.159.04; 575 and 570 are
/// not known).
const FIRST_WITH_LIMIT: u32 = 580;

/// The address of a name, and the status. A version below 0 counts as the driver's (measured with 550.163 and 580.159.04),
/// and so does one above the driver's (550.163), unless it is refused.
///
/// # Safety
/// `symbol` is NULL or a NUL-terminated name.
unsafe fn find(symbol: *const c_char, version: i32, flags: u64) -> Result<(Option<*const c_void>, Status)> {
    const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
    if symbol.is_null() || flags & !KNOWN_FLAGS != 0 {
        return Err(INVALID);
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    let name = unsafe { CStr::from_ptr(symbol) }.to_str().map_err(|_| INVALID)?;
    let release = process::release()?;
    let driver = release.cuda_version.unsigned_abs();
    let is_newer = u32::try_from(version).is_ok_and(|version| version > driver);
    if release.branch >= FIRST_WITH_LIMIT && is_newer {
        return Err(INVALID);
    }
    let version = u32::try_from(version).map_or(driver, |version| version.min(driver));
    Ok(match lookup(name, version, flags & PER_THREAD != 0) {
        Lookup::Found(symbol) => (exports::address(symbol), Status::CU_GET_PROC_ADDRESS_SUCCESS),
        // Entry points newer than the simulated driver are missing.
        Lookup::VersionNotSufficient if is_newer_than(name, driver) => {
            (None, Status::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND)
        }
        Lookup::VersionNotSufficient => (None, Status::CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT),
        Lookup::NotFound => (None, Status::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND),
    })
}

fn is_newer_than(name: &str, driver: u32) -> bool {
    lookup(name, driver, false) == Lookup::VersionNotSufficient
}

/// Private tables are not simulated (simulator/README.md says why): each is unknown, and NULL, as an unknown one is to
/// NVIDIA's driver 550.163.
pub(crate) unsafe fn cuGetExportTable(table: *mut *const c_void, _id: *const sys::CUuuid) -> Result {
    // SAFETY: the caller's out parameter.
    unsafe { write_out(table, std::ptr::null()) }?;
    Err(CUresult::CUDA_ERROR_INVALID_VALUE)
}

/// Every result that the driver of CUDA 13.4 knows.
const RESULTS: &[CUresult] = &[
    CUresult::CUDA_SUCCESS,
    CUresult::CUDA_ERROR_INVALID_VALUE,
    CUresult::CUDA_ERROR_OUT_OF_MEMORY,
    CUresult::CUDA_ERROR_NOT_INITIALIZED,
    CUresult::CUDA_ERROR_DEINITIALIZED,
    CUresult::CUDA_ERROR_PROFILER_DISABLED,
    CUresult::CUDA_ERROR_PROFILER_NOT_INITIALIZED,
    CUresult::CUDA_ERROR_PROFILER_ALREADY_STARTED,
    CUresult::CUDA_ERROR_PROFILER_ALREADY_STOPPED,
    CUresult::CUDA_ERROR_STUB_LIBRARY,
    CUresult::CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER,
    CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE,
    CUresult::CUDA_ERROR_MULTICAST_RESOURCE_FULL,
    CUresult::CUDA_ERROR_NO_DEVICE,
    CUresult::CUDA_ERROR_INVALID_DEVICE,
    CUresult::CUDA_ERROR_DEVICE_NOT_LICENSED,
    CUresult::CUDA_ERROR_INVALID_IMAGE,
    CUresult::CUDA_ERROR_INVALID_CONTEXT,
    CUresult::CUDA_ERROR_CONTEXT_ALREADY_CURRENT,
    CUresult::CUDA_ERROR_MAP_FAILED,
    CUresult::CUDA_ERROR_UNMAP_FAILED,
    CUresult::CUDA_ERROR_ARRAY_IS_MAPPED,
    CUresult::CUDA_ERROR_ALREADY_MAPPED,
    CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
    CUresult::CUDA_ERROR_ALREADY_ACQUIRED,
    CUresult::CUDA_ERROR_NOT_MAPPED,
    CUresult::CUDA_ERROR_NOT_MAPPED_AS_ARRAY,
    CUresult::CUDA_ERROR_NOT_MAPPED_AS_POINTER,
    CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
    CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT,
    CUresult::CUDA_ERROR_CONTEXT_ALREADY_IN_USE,
    CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
    CUresult::CUDA_ERROR_INVALID_PTX,
    CUresult::CUDA_ERROR_INVALID_GRAPHICS_CONTEXT,
    CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
    CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED,
    CUresult::CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY,
    CUresult::CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC,
    CUresult::CUDA_ERROR_CONTAINED,
    CUresult::CUDA_ERROR_INSUFFICIENT_LOADER_VERSION,
    CUresult::CUDA_ERROR_INVALID_SOURCE,
    CUresult::CUDA_ERROR_FILE_NOT_FOUND,
    CUresult::CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND,
    CUresult::CUDA_ERROR_SHARED_OBJECT_INIT_FAILED,
    CUresult::CUDA_ERROR_OPERATING_SYSTEM,
    CUresult::CUDA_ERROR_INVALID_HANDLE,
    CUresult::CUDA_ERROR_ILLEGAL_STATE,
    CUresult::CUDA_ERROR_LOSSY_QUERY,
    CUresult::CUDA_ERROR_NOT_FOUND,
    CUresult::CUDA_ERROR_NOT_READY,
    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
    CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
    CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
    CUresult::CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING,
    CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
    CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,
    CUresult::CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE,
    CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUresult::CUDA_ERROR_ASSERT,
    CUresult::CUDA_ERROR_TOO_MANY_PEERS,
    CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
    CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
    CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUresult::CUDA_ERROR_INVALID_PC,
    CUresult::CUDA_ERROR_LAUNCH_FAILED,
    CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
    CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK,
    CUresult::CUDA_ERROR_NOT_PERMITTED,
    CUresult::CUDA_ERROR_NOT_SUPPORTED,
    CUresult::CUDA_ERROR_SYSTEM_NOT_READY,
    CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
    CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE,
    CUresult::CUDA_ERROR_MPS_CONNECTION_FAILED,
    CUresult::CUDA_ERROR_MPS_RPC_FAILURE,
    CUresult::CUDA_ERROR_MPS_SERVER_NOT_READY,
    CUresult::CUDA_ERROR_MPS_MAX_CLIENTS_REACHED,
    CUresult::CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED,
    CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED,
    CUresult::CUDA_ERROR_CDP_NOT_SUPPORTED,
    CUresult::CUDA_ERROR_CDP_VERSION_MISMATCH,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
    CUresult::CUDA_ERROR_CAPTURED_EVENT,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
    CUresult::CUDA_ERROR_TIMEOUT,
    CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,
    CUresult::CUDA_ERROR_EXTERNAL_DEVICE,
    CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE,
    CUresult::CUDA_ERROR_FUNCTION_NOT_LOADED,
    CUresult::CUDA_ERROR_INVALID_RESOURCE_TYPE,
    CUresult::CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,
    CUresult::CUDA_ERROR_KEY_ROTATION,
    CUresult::CUDA_ERROR_STREAM_DETACHED,
    CUresult::CUDA_ERROR_GRAPH_RECAPTURE_FAILURE,
    CUresult::CUDA_ERROR_FABRIC_NOT_READY,
    CUresult::CUDA_ERROR_UNKNOWN,
];

/// Code, name and text of each.
static ERRORS: LazyLock<Vec<(CUresult, CString, CString)>> = LazyLock::new(|| {
    RESULTS
        .iter()
        .map(|error| {
            let name = format!("{error:?}");
            let text = describe(&name);
            let as_c = |text: String| CString::new(text).expect("names of errors have no NUL");
            (*error, as_c(name.clone()), as_c(text))
        })
        .collect()
});

/// The driver's texts are its names in plain words, but for a few.
fn describe(name: &str) -> String {
    match name {
        "CUDA_SUCCESS" => "no error".into(),
        "CUDA_ERROR_INVALID_VALUE" => "invalid argument".into(),
        "CUDA_ERROR_NOT_INITIALIZED" => "initialization error".into(),
        "CUDA_ERROR_DEINITIALIZED" => "driver shutting down".into(),
        "CUDA_ERROR_NO_DEVICE" => "no CUDA-capable device is detected".into(),
        "CUDA_ERROR_INVALID_DEVICE" => "invalid device ordinal".into(),
        "CUDA_ERROR_INVALID_CONTEXT" => "invalid device context".into(),
        "CUDA_ERROR_INVALID_HANDLE" => "invalid resource handle".into(),
        "CUDA_ERROR_NOT_FOUND" => "named symbol not found".into(),
        "CUDA_ERROR_NOT_READY" => "device not ready".into(),
        "CUDA_ERROR_ILLEGAL_ADDRESS" => "an illegal memory access was encountered".into(),
        "CUDA_ERROR_LAUNCH_FAILED" => "unspecified launch failure".into(),
        "CUDA_ERROR_NOT_PERMITTED" => "operation not permitted".into(),
        "CUDA_ERROR_NOT_SUPPORTED" => "operation not supported".into(),
        "CUDA_ERROR_UNKNOWN" => "unknown error".into(),
        other => other.trim_start_matches("CUDA_ERROR_").replace('_', " ").to_lowercase(),
    }
}

/// The error of a code, if it is one.
pub(crate) fn error_by_code(code: u32) -> Option<CUresult> {
    ERRORS.iter().map(|(error, _, _)| *error).find(|error| *error as u32 == code)
}

/// The error of a name like `CUDA_ERROR_OUT_OF_MEMORY` or a number.
pub(crate) fn error_by_name_or_number(text: &str) -> Option<CUresult> {
    let by_number = text.parse().ok().and_then(error_by_code);
    by_number
        .or_else(|| {
            ERRORS.iter().find(|(_, name, _)| name.to_bytes() == text.as_bytes()).map(|entry| entry.0)
        })
        .filter(|error| *error != CUresult::CUDA_SUCCESS)
}

pub(crate) unsafe fn cuGetErrorName(code: u32, out: *mut *const c_char) -> Result {
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_text(code, out, |entry| &entry.1) }
}

pub(crate) unsafe fn cuGetErrorString(code: u32, out: *mut *const c_char) -> Result {
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_text(code, out, |entry| &entry.2) }
}

type ErrorEntry = (CUresult, CString, CString);

/// # Safety
/// `out` is NULL or valid for a write.
unsafe fn write_text(code: u32, out: *mut *const c_char, which: impl Fn(&ErrorEntry) -> &CString) -> Result {
    let text = ERRORS.iter().find(|entry| entry.0 as u32 == code).map(|entry| which(entry).as_ptr());
    // SAFETY: the caller vouches for `out`; an unknown code yields NULL, as documented for the entry point.
    unsafe { write_out(out, text.unwrap_or(std::ptr::null())) }?;
    text.map(|_| ()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}
