//! Interception of NCCL: communicators of several ranks cannot be saved yet.
//!
//! One table, as for the driver: a row is an exported function with what is done with the call.
//! Communicators will be destroyed and recreated from here once that is supported. No call here passes the gate,
//! since creating a communicator waits for other processes.
//!
//! NCCL may be a library of its own or part of another one, and there may be several. Each call goes to the library
//! that it would have reached without us, which depends on the caller. Calls arrive here through the dynamic linker
//! or through [`substitute`].
//!
//! Signatures are those of NCCL's public header, `nccl.h` (NCCL user guide, "Communicator Creation and Management
//! Functions").

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::{elf, libc_symbols};

mod communicators;

pub(super) use communicators::obstacle;
use communicators::{Noted, destroyed, made, ranks_of, split};

/// What marks NCCL among the loaded libraries.
const LIBRARY: &CStr = c"libnccl.so.2";

/// `ncclResult_t`.
type Status = c_int;
const SUCCESS: Status = 0;
const SYSTEM_ERROR: Status = 2;
const IN_PROGRESS: Status = 7;

/// `ncclComm_t`.
type Communicator = *mut c_void;
/// `ncclConfig_t *`, which is only passed on.
type Config = *mut c_void;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId {
    internal: [u8; 128],
}

thread_local! {
    /// The caller of the current call.
    static CALLER: Cell<*const c_void> = const { Cell::new(std::ptr::null()) };
}

extern "C" fn note_caller(caller: *const c_void) {
    let _ = CALLER.try_with(|place| place.set(caller));
}

macro_rules! export {
    ($( fn $name:ident ( $($arg:ident : $ty:ty),* ) |$call:ident| $body:block )*) => {
        #[allow(non_camel_case_types, reason = "NCCL's names")]
        #[repr(usize)]
        enum Index { $( $name, )* Count }

        static NAMES: [&CStr; Index::Count as usize] = [
            $( match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name with a NUL"),
            }, )*
        ];

        static ADDRESSES: [Address; Index::Count as usize] = [$( Address($name as *const c_void), )*];

        $(
            #[doc = concat!("In front of NCCL's `", stringify!($name), "`.")]
            ///
            /// # Safety
            /// As for NCCL's.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            #[unsafe(naked)]
            pub unsafe extern "C" fn $name() {
                unsafe extern "C" fn with_parameters($($arg: $ty),*) -> Status {
                    type Function = unsafe extern "C" fn($($ty),*) -> Status;
                    let address = of_caller(NAMES[Index::$name as usize]);
                    if address.is_null() {
                        return SYSTEM_ERROR;
                    }
                    // SAFETY: the address is that of a symbol of this name, which has the type of NCCL's header.
                    let real = unsafe { std::mem::transmute::<*mut c_void, Function>(address) };
                    // SAFETY: the parameters are those of our own caller.
                    let $call = || unsafe { real($($arg),*) };
                    $body
                }
                // The six integer parameters are kept over the call, and the stack is aligned by a seventh push; what
                // is on the stack stays where it is.
                std::arch::naked_asm!(
                    "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                    "mov rdi, [rsp + 56]",
                    "call {note_caller}",
                    "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                    "jmp {with_parameters}",
                    note_caller = sym note_caller,
                    with_parameters = sym with_parameters,
                )
            }
        )*
    };
}

export! {
    fn ncclCommInitRank(out: *mut Communicator, ranks: c_int, id: UniqueId, rank: c_int) |call| {
        made(Noted { ranks, call: "ncclCommInitRank" }, out, 1, call)
    }
    fn ncclCommInitRankConfig(
        out: *mut Communicator, ranks: c_int, id: UniqueId, rank: c_int, config: Config
    ) |call| {
        made(Noted { ranks, call: "ncclCommInitRankConfig" }, out, 1, call)
    }
    fn ncclCommInitRankScalable(
        out: *mut Communicator, ranks: c_int, rank: c_int, id_count: c_int, ids: *mut UniqueId, config: Config
    ) |call| {
        made(Noted { ranks, call: "ncclCommInitRankScalable" }, out, 1, call)
    }
    fn ncclCommInitAll(out: *mut Communicator, count: c_int, devices: *const c_int) |call| {
        made(Noted { ranks: count, call: "ncclCommInitAll" }, out, count, call)
    }
    fn ncclCommSplit(
        of: Communicator, color: c_int, key: c_int, out: *mut Communicator, config: Config
    ) |call| {
        split(of, out, call)
    }
    fn ncclCommShrink(
        of: Communicator, excluded: *mut c_int, excluded_count: c_int, out: *mut Communicator,
        config: Config, flags: c_int
    ) |call| {
        // Less than one would be none of which we know.
        let ranks = ranks_of(of).saturating_sub(excluded_count).max(0);
        made(Noted { ranks, call: "ncclCommShrink" }, out, 1, call)
    }
    fn ncclCommGrow(
        of: Communicator, ranks: c_int, id: *const UniqueId, rank: c_int, out: *mut Communicator,
        config: Config
    ) |call| {
        made(Noted { ranks, call: "ncclCommGrow" }, out, 1, call)
    }
    fn ncclCommDestroy(communicator: Communicator) |call| {
        destroyed(communicator, call)
    }
    fn ncclCommAbort(communicator: Communicator) |call| {
        destroyed(communicator, call)
    }
}

/// The address of a function: nothing is ever read through it.
struct Address(*const c_void);

// SAFETY: it is only used as a number.
unsafe impl Sync for Address {}

fn ours(name: &CStr) -> Option<*mut c_void> {
    // Nearly everything that is looked up in a process has another beginning.
    if !name.to_bytes().starts_with(b"ncclComm") {
        return None;
    }
    let index = NAMES.iter().position(|known| *known == name)?;
    Some(ADDRESSES[index].0.cast_mut())
}

/// The function that the current caller would have called by this name without us; null if there is none.
fn of_caller(name: &CStr) -> *mut c_void {
    let caller = CALLER.try_with(Cell::get).unwrap_or(std::ptr::null());
    // A library that contains NCCL uses its own.
    let own = elf::function_beside(caller, name);
    if own.is_null() { usual(name) } else { own.cast_mut() }
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
pub(super) fn concerns_us(name: &CStr) -> bool {
    ours(name).is_some()
}

/// Whether what was found is our own function of that name.
pub(super) fn is_ours(found: *const c_void, name: &CStr) -> bool {
    ours(name).is_some_and(|ours| ours.cast_const() == found)
}

/// Whether there is an NCCL that is not intercepted.
static IS_PASSED: AtomicBool = AtomicBool::new(false);

/// What a program gets that has looked `name` up, in a scope or in one library, and would have got `found`: our
/// function if that is what we pass calls on to.
pub(super) fn substitute(name: &CStr, found: *mut c_void, is_scope: bool) -> *mut c_void {
    let Some(ours) = ours(name) else { return found };
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
    // Another one: its functions must not be called on the first one's communicators.
    if !is_scope {
        IS_PASSED.store(true, Relaxed);
    }
    found
}
