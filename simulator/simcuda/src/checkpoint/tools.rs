//! Profilers: the library that cuInit loads for them, and whether one is attached by CUPTI.

use std::ffi::{CStr, CString, c_int};
use std::os::unix::ffi::OsStringExt;

/// The simulated one (`simulator/simcupti`).
const CUPTI: &CStr = c"libcupti.so.13";
/// Names the library that cuInit loads and initialises (CUPTI documentation, "Injection").
const INJECTION: &str = "CUDA_INJECTION64_PATH";

/// Whether CUPTI is attached to the driver.
pub(super) fn cupti_is_attached() -> bool {
    call(CUPTI, c"simcupti_is_attached", libc::RTLD_NOLOAD).is_some_and(|is_attached| is_attached != 0)
}

/// Loads a profiler that wants to be in the process, if there is one.
pub(crate) fn inject() {
    let path = std::env::var_os(INJECTION).and_then(|path| CString::new(path.into_vec()).ok());
    if let Some(path) = path {
        call(&path, c"InitializeInjection", libc::RTLD_NODELETE);
    }
}

/// Calls a function without parameters of a library, if there is one.
fn call(library: &CStr, name: &CStr, flags: c_int) -> Option<c_int> {
    // SAFETY: a NUL-terminated name; whoever names a library to inject wants its constructors to run.
    let library = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | flags) };
    if library.is_null() {
        return None;
    }
    // SAFETY: the handle was opened just now.
    let function = unsafe { libc::dlsym(library, name.as_ptr()) };
    let result = (!function.is_null()).then(|| {
        // SAFETY: functions of these names have this type.
        let function =
            unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> c_int>(function) };
        function()
    });
    // SAFETY: opened above.
    unsafe { libc::dlclose(library) };
    result
}
