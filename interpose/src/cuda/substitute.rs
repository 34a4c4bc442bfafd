//! Maps the driver's functions to the exported functions that replace them.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;

use super::entry_points::{self, COUNT};
use super::{exports, real};

/// What a program gets that has looked `name` up and would have got `found`: our function if `found` is the
/// driver's, or ours. Null if there is no driver, although we export the name.
pub(super) fn substitute(name: &CStr, found: *mut c_void) -> *mut c_void {
    let Some(index) = entry_points::index_of(name.to_bytes()) else { return found };
    let ours = exports::address(index).cast_mut();
    if found == ours {
        // Our own export stands in a scope in which the driver may be missing.
        return if real::address(index).is_null() { null_mut() } else { ours };
    }
    if found.is_null() || !real::lies_in_driver(found) {
        return found;
    }
    real::note(index, found);
    ours
}

/// Whether what was found is our own function of that name.
pub(super) fn is_ours(found: *const c_void, name: &CStr) -> bool {
    entry_points::index_of(name.to_bytes()).is_some_and(|index| exports::address(index) == found)
}

/// Our function of that name, if there is a driver that has it.
pub(super) fn ours_if_there(name: &CStr) -> *mut c_void {
    match entry_points::index_of(name.to_bytes()) {
        Some(index) if !real::address(index).is_null() => exports::address(index).cast_mut(),
        _ => null_mut(),
    }
}

/// What a program gets instead of an address that cuGetProcAddress has handed out for `symbol`; `None` if it is not
/// in the table.
pub(super) fn substitute_address(found: *mut c_void, symbol: Option<&str>) -> Option<*mut c_void> {
    // The address itself says which symbol it is, if the driver has the same one in its symbol table; where two
    // symbols share an address, the rule says which of them was meant.
    let is_it = |index: &usize| real::address(*index) == found.cast_const();
    let by_rule = symbol.and_then(|symbol| entry_points::index_of(symbol.as_bytes()));
    let by_address = || (0..COUNT).find(is_it);
    let index = by_rule.filter(is_it).or_else(by_address).or(by_rule)?;
    if real::address(index).is_null() {
        real::note(index, found);
    }
    Some(exports::address(index).cast_mut())
}
