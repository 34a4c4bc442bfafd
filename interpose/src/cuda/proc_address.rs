//! cuGetProcAddress, the newer way to look up the driver's functions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use cuda_abi::sys::{self, CUuuid};
use cuda_abi::types::{CUdriverProcAddressQueryResult, CUresult};
use cuda_abi::{Lookup, lookup};

use super::handler::handlers;
use super::{substitute, unknown_entry_points};
use crate::cuda::result::SUCCESS;

const PER_THREAD: u64 = sys::CUdriverProcAddress_flags::CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM as u64;

/// Puts our function in the place of the driver's that was handed out. What it is, its address says; where the
/// driver hands out another address than its symbol table has, the driver's own rule does.
///
/// # Safety
/// As for the driver's function, which has been called.
unsafe fn exchange(
    result: CUresult,
    symbol: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> CUresult {
    if result != SUCCESS || symbol.is_null() || out.is_null() {
        return result;
    }
    // SAFETY: the driver has read it as a string.
    let symbol = unsafe { CStr::from_ptr(symbol) };
    let name = symbol.to_str().unwrap_or("");
    // SAFETY: the driver has written it.
    let found = unsafe { *out };
    if !found.is_null() {
        let version = u32::try_from(version).unwrap_or(0);
        let by_rule = match lookup(name, version, flags & PER_THREAD != 0) {
            Lookup::Found(symbol) => Some(symbol),
            _ => None,
        };
        match substitute::substitute_address(found, by_rule) {
            // SAFETY: as above.
            Some(ours) => unsafe { *out = ours },
            None => unknown_entry_points::note(symbol),
        }
    }
    result
}

/// The private tables that the program has asked for, as a diagnostic.
static TABLES: [AtomicPtr<CUuuid>; 32] = [const { AtomicPtr::new(null_mut()) }; 32];

handlers! {
    /// The form of before CUDA 12.
    fn cuGetProcAddress(symbol: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64) |call| {
        // SAFETY: the parameters are those of our own caller.
        unsafe { exchange(call(), symbol, out, version, flags) }
    }

    /// The form with a status.
    fn cuGetProcAddress_v2(
        symbol: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64,
        status: *mut CUdriverProcAddressQueryResult
    ) |call| {
        // SAFETY: the parameters are those of our own caller.
        unsafe { exchange(call(), symbol, out, version, flags) }
    }

    /// Passes the call on, since the tables cannot be replaced; records that the program has asked for them.
    fn cuGetExportTable(table: *mut *const c_void, id: *const CUuuid) |call| {
        let result = call();
        if result == SUCCESS && !id.is_null() {
            // SAFETY: the driver has read it.
            note_table(unsafe { *id });
        }
        result
    }
}

fn note_table(id: CUuuid) {
    let is_known = |slot: &&AtomicPtr<CUuuid>| {
        // SAFETY: what is in a slot was leaked below and is never changed.
        unsafe { slot.load(Relaxed).as_ref() }.is_some_and(|known| known.bytes == id.bytes)
    };
    if TABLES.iter().any(|slot| is_known(&slot)) {
        return;
    }
    let id = Box::into_raw(Box::new(id));
    for slot in &TABLES {
        if slot.compare_exchange(null_mut(), id, Relaxed, Relaxed).is_ok() {
            return;
        }
    }
}

/// Those that were asked for, as UUIDs are written.
pub(super) fn tables() -> Vec<String> {
    let ids = TABLES.iter().map(|slot| slot.load(Relaxed)).take_while(|id| !id.is_null());
    // SAFETY: what is in a slot was leaked in `note_table` and is never changed.
    ids.map(|id| written(unsafe { &*id })).collect()
}

fn written(id: &CUuuid) -> String {
    let mut text = String::new();
    for (at, byte) in id.bytes.iter().enumerate() {
        text += if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" };
        text += &format!("{:02x}", byte.cast_unsigned());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_table_is_told_once_as_uuids_are_written() {
        let byte = |at: usize| u8::try_from(0x0f + 0x10 * at).expect("small").cast_signed();
        let id = CUuuid { bytes: std::array::from_fn(byte) };
        note_table(id);
        note_table(id);
        let told = tables().into_iter().filter(|text| text == "0f1f2f3f-4f5f-6f7f-8f9f-afbfcfdfefff").count();
        assert_eq!(told, 1);
    }
}
