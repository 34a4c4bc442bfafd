//! `dlsym` and `dlvsym`, by which most programs look up the driver's functions.
//!
//! The C library identifies the caller by the return address, which decides what `RTLD_NEXT` and the default scope
//! mean. So a lookup of any other name is passed on by a jump, and the C library sees the original caller. The result
//! is replaced only for names that we export, and only if it lies in the driver's library, or is of NCCL, NVML or CUPTI. Lookups of
//! names that only a newer driver has are recorded.
//!
//! For exported names, `RTLD_NEXT` is answered from the loader's list of libraries, without this one: a library that
//! wraps the driver and asks for the next definition must not get its own. These functions are exported without a
//! version, which satisfies references to every version. They also work before the constructor has run, since other
//! libraries' constructors may come first.

use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_void};

use super::libc_symbols::{Dlvsym, find, libc_dlsym, libc_dlvsym};
use super::{elf, entry_points, libraries, nccl, real, substitute, unknown_entry_points};

/// Whether a question is one that we answer.
///
/// # Safety
/// `symbol` is NULL or a NUL-terminated string.
unsafe extern "C" fn concerns_us(handle: *mut c_void, symbol: *const c_char) -> bool {
    if symbol.is_null() {
        return false;
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    let name = unsafe { CStr::from_ptr(symbol) };
    let is_exported = entry_points::index_of(name.to_bytes()).is_some();
    if is_exported || nccl::concerns_us(name) || libraries::concerns_us(name) {
        return true;
    }
    // Only what one library has is the same for every caller.
    !matches!(handle, libc::RTLD_DEFAULT | libc::RTLD_NEXT) && unknown_entry_points::may_be(name)
}

/// `dlsym` for a name of ours, asked by the code at `caller`.
///
/// # Safety
/// As for dlsym.
unsafe extern "C" fn dlsym_of_ours(
    handle: *mut c_void,
    symbol: *const c_char,
    caller: *const c_void,
) -> *mut c_void {
    // SAFETY: `concerns_us` has seen that it is a name.
    let name = unsafe { CStr::from_ptr(symbol) };
    let ask = |handle| {
        // SAFETY: it is the caller's handle, or a pseudo-handle.
        unsafe { find(handle, name) }
    };
    answer(handle, name, caller, ask)
}

/// `dlvsym` for a name of ours, asked by the code at `caller`.
///
/// # Safety
/// As for dlvsym.
unsafe extern "C" fn dlvsym_of_ours(
    handle: *mut c_void,
    symbol: *const c_char,
    version: *const c_char,
    caller: *const c_void,
) -> *mut c_void {
    // SAFETY: the address is that of the C library's dlvsym, which has this type.
    let dlvsym: Dlvsym = unsafe { std::mem::transmute(libc_dlvsym()) };
    // SAFETY: `concerns_us` has seen that it is a name.
    let name = unsafe { CStr::from_ptr(symbol) };
    let ask = |handle| {
        // SAFETY: it is the caller's handle, or a pseudo-handle; the strings are the caller's.
        unsafe { dlvsym(handle, symbol, version) }
    };
    answer(handle, name, caller, ask)
}

/// What the code at `caller` gets for a name of ours; `ask` asks the C library, in our own place.
fn answer(
    handle: *mut c_void,
    name: &CStr,
    caller: *const c_void,
    ask: impl Fn(*mut c_void) -> *mut c_void,
) -> *mut c_void {
    let (found, is_scope) = match handle {
        libc::RTLD_NEXT => (elf::next(caller, name).cast_mut(), true),
        libc::RTLD_DEFAULT => {
            // The default scope begins with the program and has our own symbols in it: who would be found if they
            // were not there?
            let first = ask(libc::RTLD_DEFAULT);
            let is_ours = first.is_null()
                || substitute::is_ours(first, name)
                || nccl::is_ours(first, name)
                || libraries::is_ours(first, name);
            (if is_ours { ask(libc::RTLD_NEXT) } else { first }, true)
        }
        handle => (ask(handle), false),
    };
    if nccl::concerns_us(name) {
        return nccl::substitute(name, found, is_scope);
    }
    if libraries::concerns_us(name) {
        return libraries::substitute(name, found, is_scope);
    }
    if unknown_entry_points::may_be(name) {
        if real::lies_in_driver(found) {
            unknown_entry_points::note(name);
        }
        return found;
    }
    if found.is_null() && is_scope {
        // The caller's own scope, which we do not see, may have a driver that no other library sees.
        return substitute::ours_if_there(name);
    }
    substitute::substitute(name, found)
}

/// See dlsym(3).
///
/// # Safety
/// As for dlsym.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void {
    // Two pushed registers and the return address leave the stack 8 bytes off its alignment.
    naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {concerns_us}",
        "test al, al",
        "jnz 2f",
        "call {libc}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        "2:",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "mov rdx, [rsp]",
        "jmp {ours}",
        concerns_us = sym concerns_us,
        libc = sym libc_dlsym,
        ours = sym dlsym_of_ours,
    )
}

/// See dlsym(3).
///
/// # Safety
/// As for dlvsym.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    symbol: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    // Three pushed registers and the return address: the stack is aligned.
    naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "call {concerns_us}",
        "test al, al",
        "jnz 2f",
        "call {libc}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        "2:",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "mov rcx, [rsp]",
        "jmp {ours}",
        concerns_us = sym concerns_us,
        libc = sym libc_dlvsym,
        ours = sym dlvsym_of_ours,
    )
}
