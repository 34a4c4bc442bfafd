//! The driver's own functions: where they are, and which of ours stands for each.

use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use super::aside::aside;
use super::exports::{self, COUNT};
use super::{elf, hooks};

/// What marks the driver among the loaded libraries.
const LIBRARY: &CStr = c"libcuda.so.1";
const LIBRARY_STEM: &[u8] = b"libcuda.so";

/// Stands for a symbol that the driver does not have.
const ABSENT: *mut c_void = std::ptr::without_provenance_mut(1);

/// The address of each symbol of the table in the driver; null while it was not looked for.
static REAL: [AtomicPtr<c_void>; COUNT] = [const { AtomicPtr::new(null_mut()) }; COUNT];

/// The driver's function of an index of the table, or null if there is no driver or it has no such symbol.
#[inline(always)]
pub(super) fn address(index: usize) -> *const c_void {
    let known = REAL[index].load(Relaxed);
    // One comparison for the two that are no addresses: every call passes here.
    if known.addr() > ABSENT.addr() {
        return known;
    }
    aside!(find_or_null, index, usize) as *const c_void
}

/// The address of a symbol that is not known yet, or absent.
extern "C" fn find_or_null(index: usize) -> usize {
    if REAL[index].load(Relaxed) == ABSENT { 0 } else { look(index) as usize }
}

/// Looks a symbol up in the loaded driver. One that is only about to be loaded is found the next time.
fn look(index: usize) -> *const c_void {
    let Some(found) = in_loaded_driver(exports::name(index)) else { return null() };
    let found = if lies_in_driver(found) { found } else { ABSENT };
    REAL[index].store(found, Relaxed);
    if found == ABSENT { null() } else { found }
}

/// What a program gets that has looked `name` up and would have got `found`: our function if `found` is the
/// driver's, or ours. Null if there is no driver, although we export the name.
pub(super) fn substitute(name: &CStr, found: *mut c_void) -> *mut c_void {
    let Some(index) = exports::index_of(name.to_bytes()) else { return found };
    let ours = exports::address(index).cast_mut();
    if found == ours {
        // Our own export stands in a scope in which the driver may be missing.
        return if address(index).is_null() { null_mut() } else { ours };
    }
    if found.is_null() || !lies_in_driver(found) {
        return found;
    }
    REAL[index].store(found, Relaxed);
    ours
}

/// Whether what was found is our own function of that name.
pub(super) fn is_ours(found: *const c_void, name: &CStr) -> bool {
    exports::index_of(name.to_bytes()).is_some_and(|index| exports::address(index) == found)
}

/// Our function of that name, if there is a driver that has it.
pub(super) fn ours_if_there(name: &CStr) -> *mut c_void {
    match exports::index_of(name.to_bytes()) {
        Some(index) if !address(index).is_null() => exports::address(index).cast_mut(),
        _ => null_mut(),
    }
}

/// What a program gets instead of an address that cuGetProcAddress has handed out for `symbol`; `None` if it is not
/// in the table.
pub(super) fn substitute_address(found: *mut c_void, symbol: Option<&str>) -> Option<*mut c_void> {
    // The address itself says which symbol it is, if the driver has the same one in its symbol table; where two
    // symbols share an address, the rule says which of them was meant.
    let is_it = |index: &usize| address(*index) == found.cast_const();
    let by_rule = symbol.and_then(|symbol| exports::index_of(symbol.as_bytes()));
    let by_address = || (0..COUNT).find(is_it);
    let index = by_rule.filter(is_it).or_else(by_address).or(by_rule)?;
    if address(index).is_null() {
        REAL[index].store(found, Relaxed);
    }
    Some(exports::address(index).cast_mut())
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

/// What the driver that is loaded has under a name, or null; nothing if none is loaded.
fn in_loaded_driver(name: &CStr) -> Option<*mut c_void> {
    // RTLD_NOLOAD: a driver that the program has not loaded is not loaded by us. The handle stays open: the driver is
    // never unloaded (it marks itself so).
    // SAFETY: dlopen takes a NUL-terminated name; with NOLOAD no code of the library runs.
    let handle = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    // SAFETY: the handle was opened just now.
    (!handle.is_null()).then(|| unsafe { hooks::find(handle, name) })
}
