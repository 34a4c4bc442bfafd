//! Addresses of the driver's own functions.

use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use super::cold_call::cold_call;
use super::entry_points::{self, COUNT};
use super::{elf, libc_symbols};

/// What marks the driver among the loaded libraries.
const LIBRARY: &CStr = c"libcuda.so.1";
const LIBRARY_STEM: &[u8] = b"libcuda.so";

/// Stands for a symbol that the driver does not have.
const ABSENT: *mut c_void = std::ptr::without_provenance_mut(ABSENT_ADDRESS);
pub(super) const ABSENT_ADDRESS: usize = 1;

/// The address of each symbol of the table in the driver; null while it was not looked for.
pub(super) static REAL: [AtomicPtr<c_void>; COUNT] = [const { AtomicPtr::new(null_mut()) }; COUNT];

/// The driver's function of an index of the table, or null if there is no driver or it has no such symbol.
#[inline(always)]
pub(super) fn address(index: usize) -> *const c_void {
    let known = REAL[index].load(Relaxed);
    // One comparison for the two that are no addresses: every call passes here.
    if known.addr() > ABSENT.addr() {
        return known;
    }
    cold_call!(find_or_null, index, usize) as *const c_void
}

/// The address of a symbol that is not known yet, or absent.
extern "C" fn find_or_null(index: usize) -> usize {
    if REAL[index].load(Relaxed) == ABSENT { 0 } else { resolve(index) as usize }
}

/// Looks a symbol up in the loaded driver. One that is only about to be loaded is found the next time.
fn resolve(index: usize) -> *const c_void {
    let Some(found) = in_loaded_driver(entry_points::name(index)) else { return null() };
    let found = if lies_in_driver(found) { found } else { ABSENT };
    REAL[index].store(found, Relaxed);
    if found == ABSENT { null() } else { found }
}

/// Notes an address that the program has found by itself.
pub(super) fn note(index: usize, found: *mut c_void) {
    REAL[index].store(found, Relaxed);
}

/// Whether an address lies in a library that is called as the driver is. A copy in another namespace (dlmopen) is not
/// the driver that we stand in front of.
pub(super) fn lies_in_driver(address: *const c_void) -> bool {
    if address.is_null() || !elf::is_in_our_namespace(address) {
        return false;
    }
    let Some(library) = elf::library_of(address).filter(|library| !library.dli_fname.is_null()) else {
        return false;
    };
    // SAFETY: the name of a loaded library is a NUL-terminated string that lives as long as the library.
    let path = unsafe { CStr::from_ptr(library.dli_fname) }.to_bytes();
    let file = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    // The file may have any name; the driver's own soname is what dlopen knows it by.
    file.starts_with(LIBRARY_STEM) || is_of_loaded_driver(&library)
}

/// Whether a library is the one that is loaded under the driver's soname, whatever its file is called.
fn is_of_loaded_driver(library: &libc::Dl_info) -> bool {
    let driver = in_loaded_driver(c"cuInit").and_then(|init| elf::library_of(init));
    driver.is_some_and(|driver| driver.dli_fbase == library.dli_fbase)
}

/// Loads the driver, for good; whether that worked.
pub(super) fn load() -> bool {
    // SAFETY: dlopen takes a NUL-terminated name; the driver's constructors expect nothing of a program.
    !unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_LAZY) }.is_null()
}

/// What the driver that is loaded has under a name, or null; nothing if none is loaded.
fn in_loaded_driver(name: &CStr) -> Option<*mut c_void> {
    // RTLD_NOLOAD: a driver that the program has not loaded is not loaded by us. The handle stays open: the driver is
    // never unloaded (it marks itself so).
    // SAFETY: dlopen takes a NUL-terminated name; with NOLOAD no code of the library runs.
    let handle = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    // SAFETY: the handle was opened just now.
    (!handle.is_null()).then(|| unsafe { libc_symbols::find(handle, name) })
}
