//! The C library's own `dlsym` and `dlvsym`, which this library stands in front of.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use super::elf;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
pub(super) type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// The C library's `dlsym` and `dlvsym`, once they were looked for.
static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// The C library's `dlsym`; found at the first call, without heap or locks of ours.
pub(super) extern "C" fn libc_dlsym() -> *const c_void {
    of_libc(&DLSYM, c"dlsym")
}

/// The C library's `dlvsym`.
pub(super) extern "C" fn libc_dlvsym() -> *const c_void {
    of_libc(&DLVSYM, c"dlvsym")
}

fn of_libc(slot: &AtomicPtr<c_void>, name: &CStr) -> *const c_void {
    let known = slot.load(Relaxed);
    if !known.is_null() {
        return known;
    }
    // They were in libdl before glibc 2.34. Any reference by name, with a version or without, would be bound to
    // our own.
    let found = elf::function(&["libc.so", "libdl.so"], name);
    if found.is_null() {
        // A process has got here through a dynamic loader, which has both.
        std::process::abort();
    }
    slot.store(found.cast_mut(), Relaxed);
    found
}

/// Looks a symbol up as the C library does, with our own place as the caller's.
///
/// # Safety
/// `handle` is a handle of dlopen or a pseudo-handle.
pub(super) unsafe fn find(handle: *mut c_void, symbol: &CStr) -> *mut c_void {
    // SAFETY: the address is that of the C library's dlsym, which has this type.
    let dlsym: Dlsym = unsafe { std::mem::transmute(libc_dlsym()) };
    // SAFETY: the caller vouches for the handle; the symbol is NUL-terminated.
    unsafe { dlsym(handle, symbol.as_ptr()) }
}
