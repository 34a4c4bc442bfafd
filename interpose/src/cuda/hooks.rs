//! `dlsym` and `dlvsym`: how most programs find the driver.
//!
//! The C library tells from the return address who asks, which decides what `RTLD_NEXT` and the default scope
//! mean. So a question that does not concern us is passed on by a jump: the C library sees its own caller.
//! Only for names that we export is the answer looked at, and it is exchanged for ours only if it lies in the
//! driver's library. These functions are exported without a version, which serves references to every version.

use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use super::{elf, exports, real};

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// The C library's `dlsym` and `dlvsym`, once they were looked for.
static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// The C library's `dlsym`; found at the first call, without heap or locks of ours.
extern "C" fn libc_dlsym() -> *const c_void {
    of_libc(&DLSYM, c"dlsym")
}

/// The C library's `dlvsym`.
extern "C" fn libc_dlvsym() -> *const c_void {
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

/// Whether a name is one of those that we answer for.
///
/// # Safety
/// `symbol` is NULL or a NUL-terminated string.
unsafe extern "C" fn concerns_us(symbol: *const c_char) -> bool {
    if symbol.is_null() || !super::is_active() {
        return false;
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    exports::index_of(unsafe { CStr::from_ptr(symbol) }.to_bytes()).is_some()
}

/// `dlsym` for a name of ours.
///
/// # Safety
/// As for dlsym.
unsafe extern "C" fn dlsym_of_ours(handle: *mut c_void, symbol: *const c_char) -> *mut c_void {
    // The default scope begins with the program, and has our own symbols in it.
    let handle = if handle == libc::RTLD_DEFAULT { libc::RTLD_NEXT } else { handle };
    // SAFETY: `concerns_us` has seen that it is a name; the caller vouches for the handle.
    let name = unsafe { CStr::from_ptr(symbol) };
    // SAFETY: as above.
    let found = unsafe { find(handle, name) };
    real::substitute(name, found)
}

/// `dlvsym` for a name of ours.
///
/// # Safety
/// As for dlvsym.
unsafe extern "C" fn dlvsym_of_ours(
    handle: *mut c_void,
    symbol: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    let handle = if handle == libc::RTLD_DEFAULT { libc::RTLD_NEXT } else { handle };
    // SAFETY: the address is that of the C library's dlvsym, which has this type.
    let dlvsym: Dlvsym = unsafe { std::mem::transmute(libc_dlvsym()) };
    // SAFETY: the parameters are those of our own caller.
    let found = unsafe { dlvsym(handle, symbol, version) };
    // SAFETY: `concerns_us` has seen that it is a name.
    real::substitute(unsafe { CStr::from_ptr(symbol) }, found)
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
        "mov rdi, rsi",
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
        "mov rdi, rsi",
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
        "jmp {ours}",
        concerns_us = sym concerns_us,
        libc = sym libc_dlvsym,
        ours = sym dlvsym_of_ours,
    )
}
