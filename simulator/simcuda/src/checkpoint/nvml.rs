//! The checkpoint takes NVML's device files away too, and the restore brings them back, as from driver 570 on.
//!
//! NVML is a library of its own. The simulated one (`simulator/simnvml`) exports two functions for this.

use std::ffi::CStr;

const LIBRARY: &CStr = c"libnvidia-ml.so.1";

/// NVML releases its device files.
pub(super) fn let_go() {
    call(c"simnvml_let_go");
}

/// NVML opens its device files again, if it had any.
pub(super) fn take_hold() {
    call(c"simnvml_take_hold");
}

/// Calls a function of the simulated NVML, if it is loaded.
fn call(name: &CStr) {
    // SAFETY: a NUL-terminated name; with RTLD_NOLOAD no code of the library runs.
    let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return;
    }
    // SAFETY: the handle was opened just now.
    let function = unsafe { libc::dlsym(library, name.as_ptr()) };
    if !function.is_null() {
        // SAFETY: the simulated NVML's functions of these names have this type, and no other library has such names.
        let function = unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn()>(function) };
        function();
    }
    // SAFETY: opened above.
    unsafe { libc::dlclose(library) };
}
