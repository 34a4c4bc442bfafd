//! Which library a call of NCCL goes to.
//!
//! NCCL may be a library of its own or part of another one, and there may be several. Each call goes to the library
//! that it would have reached without us, which depends on the caller. Calls arrive here through the dynamic linker
//! or through [`substitute`]. What was found for a caller's library is kept: a collective costs no look-up.

use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use super::calls;
use crate::cuda::thread_word::thread_word;
use crate::cuda::{elf, libc_symbols};

/// What marks NCCL among the loaded libraries.
const LIBRARY: &CStr = c"libnccl.so.2";
/// How the files of NCCL's own libraries begin.
const FILE: &str = "libnccl.so";

thread_word!(
    /// The caller of the current call, of each thread: written by `calls`, in instructions.
    caller_of_thread,
    "ckpt_nccl_caller"
);

/// The caller of the current call: to be read before anything else is called.
#[inline(always)]
pub(super) fn caller() -> usize {
    caller_of_thread::get()
}

/// What a call goes to.
#[derive(Clone, Copy)]
pub(super) struct Target {
    /// NCCL's function; null if there is none.
    pub real: *mut c_void,
    /// Whether NCCL's own code calls.
    pub is_nccls: bool,
}

/// A target for the callers in one library, which stays loaded.
struct Known {
    callers: Range<usize>,
    target: Target,
    next: *const Known,
}

/// A function of NCCL, with the targets that were found so far.
pub(super) struct Function {
    pub name: &'static CStr,
    /// In a further copy of NCCL: where all calls go to.
    real: AtomicPtr<c_void>,
    known: AtomicPtr<Known>,
}

impl Function {
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, real: AtomicPtr::new(null_mut()), known: AtomicPtr::new(null_mut()) }
    }

    /// Has all calls go there, for a further copy of NCCL.
    pub fn set(&self, real: *mut c_void) {
        self.real.store(real, Release);
    }

    #[inline]
    pub fn target(&self, caller: usize) -> Target {
        let mut next = self.known.load(Acquire).cast_const();
        // SAFETY: what is linked was leaked in `find` and is never changed.
        while let Some(known) = unsafe { next.as_ref() } {
            if known.callers.contains(&caller) {
                return known.target;
            }
            next = known.next;
        }
        self.find(caller)
    }

    #[cold]
    fn find(&self, caller: usize) -> Target {
        let code = caller as *const c_void;
        let mut real = self.real.load(Acquire);
        if real.is_null() {
            // A library that contains NCCL uses its own.
            let own = elf::function_beside(code, self.name);
            real = if own.is_null() { usual(self.name) } else { own.cast_mut() };
        }
        let around = elf::library_around(caller, FILE);
        let target = Target { real, is_nccls: around.as_ref().is_some_and(|library| library.is_named) };
        if let Some(library) = around.filter(|library| !real.is_null() && stays(code, library)) {
            let mut known = Box::new(Known { callers: library.addresses, target, next: std::ptr::null() });
            let mut first = self.known.load(Acquire);
            loop {
                known.next = first;
                let fresh = Box::into_raw(known);
                match self.known.compare_exchange(first, fresh, AcqRel, Acquire) {
                    Ok(_) => break,
                    Err(current) => first = current,
                }
                // SAFETY: it was made above and no other thread has seen it.
                known = unsafe { Box::from_raw(fresh) };
            }
        }
        target
    }
}

/// Keeps a caller's library loaded, so that its addresses stay its own. Whether that is so.
fn stays(code: *const c_void, library: &elf::Loaded) -> bool {
    if library.is_program {
        return true;
    }
    let name = elf::library_of(code).map_or(std::ptr::null(), |info| info.dli_fname);
    // SAFETY: the name of a loaded library is NUL-terminated; with NOLOAD no code of a library runs.
    !name.is_null() && !unsafe { libc::dlopen(name, libc::RTLD_LAZY | libc::RTLD_NOLOAD) }.is_null()
}

/// The function of this name for callers that do not contain NCCL; null if there is none.
fn usual(name: &CStr) -> *mut c_void {
    // SAFETY: a pseudo-handle: what comes behind us in the order of the program's libraries.
    let next = unsafe { libc_symbols::find(libc::RTLD_NEXT, name) };
    if !next.is_null() {
        return next;
    }
    // RTLD_NOLOAD: what the program has not loaded is not loaded by us. The handle stays open, so that what may be
    // called through us is not unloaded.
    // SAFETY: dlopen takes a NUL-terminated name; with NOLOAD no code of the library runs.
    let handle = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return null_mut();
    }
    // SAFETY: the handle was opened just now.
    unsafe { libc_symbols::find(handle, name) }
}

/// Whether dlsym is to ask here for a name.
pub(crate) fn concerns_us(name: &CStr) -> bool {
    calls::ours(name).is_some()
}

/// Whether what was found is our own function of that name.
pub(crate) fn is_ours(found: *const c_void, name: &CStr) -> bool {
    calls::ours(name).is_some_and(|ours| ours.cast_const() == found)
}

/// Whether there is an NCCL that is not counted.
static IS_PASSED: AtomicBool = AtomicBool::new(false);

/// Whether the program calls a copy of NCCL that is not intercepted.
pub(super) fn is_passed() -> bool {
    IS_PASSED.load(Relaxed)
}

/// What a program gets that has looked `name` up, in a scope or in one library, and would have got `found`: our
/// function if that is what we pass calls on to.
pub(crate) fn substitute(name: &CStr, found: *mut c_void, is_scope: bool) -> *mut c_void {
    let Some(ours) = calls::ours(name) else { return found };
    // Our own export stands in a scope in which NCCL may be missing, or the scope is the caller's own.
    if found == ours || (found.is_null() && is_scope) {
        return if usual(name).is_null() { null_mut() } else { ours };
    }
    if found.is_null() {
        return found;
    }
    if usual(name) == found {
        return ours;
    }
    // A library in the same scope as the first one calls on to it, and is not counted a second time.
    if is_scope {
        return found;
    }
    // Another one: its functions must not be called on the first one's communicators.
    if let Some(counted) = copy_of(found).and_then(|copy| calls::in_front_of(name, found, copy)) {
        return counted;
    }
    IS_PASSED.store(true, Relaxed);
    found
}

/// Where the further copies of NCCL are loaded, by their numbers less one; 0 for none.
static COPIES: [AtomicUsize; calls::COPIES] = [const { AtomicUsize::new(0) }; calls::COPIES];

/// The number of the copy of NCCL that a function belongs to, which is not the usual one. The copy stays loaded. `None`
/// if there are too many, or if it is in another namespace.
fn copy_of(function: *mut c_void) -> Option<usize> {
    let info = elf::library_of(function)?;
    // SAFETY: the name of a loaded library is NUL-terminated; with NOLOAD no code of a library runs.
    let handle = unsafe { libc::dlopen(info.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return None;
    }
    let base = info.dli_fbase as usize;
    let is_its = |place: &AtomicUsize| {
        place.compare_exchange(0, base, AcqRel, Acquire).map_or_else(|current| current == base, |_| true)
    };
    COPIES.iter().position(is_its).map(|place| place + 1)
}
