//! Memory of the host from cuMemCreate: threads of the program read and write it without any call, so that the gate does
//! not hold them.
//!
//! ```text
//!          withhold: only devices have access, a thread that touches the memory sleeps in the signal handler
//!   Given ---------------------------------------------------------------------------------------------> Withheld
//!    ^                                                                                                      |
//!    +------------------------------------------------------------------------------------------------------+
//!          grant: the host has its access again, these threads wake up and repeat their access
//! ```
//!
//! The handler of SIGSEGV stays installed once it was needed. If it were removed when access is granted, a thread that has
//! faulted just before, and has not got its signal yet, would meet the program's own handler. All other faults go to that
//! handler, or end the process as they would have done.

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64};

use cuda_abi::layout::Access;
use cuda_abi::types::CUdeviceptr;

use super::offload;
use super::physical::{Id, Mapping, registry};
use crate::cuda::driver::{self, DriverError, check};

/// 1 while access is withheld; threads sleep on it.
static WITHHELD: AtomicU32 = AtomicU32::new(0);
/// How often access was granted.
static GRANTS: AtomicU32 = AtomicU32::new(0);
/// The range that all withheld memory lies in.
static START: AtomicU64 = AtomicU64::new(0);
static END: AtomicU64 = AtomicU64::new(0);
/// The thread that withholds access, which must not wait for itself.
static AGENT: AtomicI32 = AtomicI32::new(0);

/// How often the program may install another handler over this one. A handler that it installs may call the one that it
/// found, so each has a function of its own here, which knows what comes after it.
const MOST: usize = 4;

/// What was installed before each of the functions.
static BEFORE: [AtomicPtr<libc::sigaction>; MOST] = [const { AtomicPtr::new(null_mut()) }; MOST];

type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
const HANDLERS: [Handler; MOST] = [on_fault::<0>, on_fault::<1>, on_fault::<2>, on_fault::<3>];

/// Threads that have repeated an access since it was granted: the thread, and the number of the grant.
static REPEATED: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

/// The mappings that the host may access, with its rights.
fn of_host() -> Vec<(Id, Mapping, Vec<Access>)> {
    let registry = registry();
    let all = registry.allocations.iter();
    let mappings = all.flat_map(|(id, allocation)| allocation.mappings.iter().map(|one| (*id, one)));
    let with_rights = mappings.map(|(id, mapping)| {
        let rights: Vec<Access> = mapping.access.iter().filter(|one| one.is_for_host()).copied().collect();
        (id, mapping.clone(), rights)
    });
    with_rights.filter(|(.., rights)| !rights.is_empty()).collect()
}

/// Takes the host's access away from all memory: between draining and capturing, before other processes are told that this
/// one is drained.
///
/// # Errors
/// A driver call failed, or the signal cannot be handled; [`grant`] undoes what was done.
pub(crate) fn withhold() -> Result<(), HostAccessError> {
    let mappings = of_host();
    let ends = mappings.iter().map(|(_, mapping, _)| mapping.address + mapping.bytes);
    let (Some(start), Some(end)) = (mappings.iter().map(|(_, one, _)| one.address).min(), ends.max()) else {
        return Ok(());
    };
    install()?;
    // SAFETY: gettid has no arguments.
    AGENT.store(unsafe { libc::gettid() }, Relaxed);
    START.store(start, Relaxed);
    END.store(end, Relaxed);
    WITHHELD.store(1, SeqCst);
    for (id, mapping, _) in mappings.iter().filter(|(_, mapping, _)| mapping.is_mapped) {
        let handle = registry().allocations.get(id).map_or(0, |allocation| allocation.handle);
        // SAFETY: the range is one whole mapping of ours, and no work runs on the devices.
        let unmapped = unsafe { driver::cuMemUnmap(mapping.address, mapping.bytes as usize) };
        check("cuMemUnmap", unmapped)?;
        offload::note(*id, |allocation| offload::set_mapped(allocation, mapping.address, false));
        offload::map_again(*id, handle, mapping)?;
    }
    Ok(())
}

/// Gives the host's access back, once all memory has its content.
///
/// # Errors
/// A driver call failed.
pub(crate) fn grant() -> Result<(), DriverError> {
    if WITHHELD.load(Relaxed) == 0 {
        return Ok(());
    }
    for (_, Mapping { address, bytes, .. }, rights) in of_host() {
        offload::set_exactly(address, bytes, &rights)?;
    }
    GRANTS.fetch_add(1, SeqCst);
    WITHHELD.store(0, SeqCst);
    // SAFETY: futex(2) with FUTEX_WAKE only wakes threads that wait at the address.
    unsafe { libc::syscall(libc::SYS_futex, WITHHELD.as_ptr(), WAKE, i32::MAX) };
    Ok(())
}

const WAIT: c_int = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
const WAKE: c_int = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;

/// In the child of a fork, which has none of the memory.
pub(super) fn after_fork_in_child() {
    WITHHELD.store(0, Relaxed);
    END.store(0, Relaxed);
}

/// Why the program's threads cannot be kept from memory of the host.
#[derive(Debug, thiserror::Error)]
pub enum HostAccessError {
    #[error("the program has installed handlers of SIGSEGV too often")]
    TooManyHandlers,
    #[error("cannot install a handler of SIGSEGV")]
    Install(#[source] std::io::Error),
    #[error(transparent)]
    Driver(#[from] DriverError),
}

fn action_of_sigsegv() -> Result<libc::sigaction, HostAccessError> {
    // SAFETY: all of its fields may be zero.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes to a local variable.
    let result = unsafe { libc::sigaction(libc::SIGSEGV, null(), &raw mut action) };
    if result == 0 { Ok(action) } else { Err(HostAccessError::Install(std::io::Error::last_os_error())) }
}

/// Installs the handler, unless it is there.
fn install() -> Result<(), HostAccessError> {
    let present = action_of_sigsegv()?;
    if HANDLERS.iter().any(|handler| *handler as usize == present.sa_sigaction) {
        return Ok(());
    }
    // SAFETY: what was stored below is never freed.
    let is_same = |place: &AtomicPtr<libc::sigaction>| match unsafe { place.load(Acquire).as_ref() } {
        Some(before) => before.sa_sigaction == present.sa_sigaction,
        None => true,
    };
    let place = BEFORE.iter().position(is_same).ok_or(HostAccessError::TooManyHandlers)?;
    if BEFORE[place].load(Acquire).is_null() {
        BEFORE[place].store(Box::into_raw(Box::new(present)), Release);
    }
    // What is passed on to the program's handler runs as if that were installed.
    let mut ours = present;
    ours.sa_sigaction = HANDLERS[place] as usize;
    ours.sa_flags = present.sa_flags & !libc::SA_RESETHAND | libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler is a function of this library, which stays mapped for the life of the process.
    let result = unsafe { libc::sigaction(libc::SIGSEGV, &raw const ours, null_mut()) };
    if result == 0 { Ok(()) } else { Err(HostAccessError::Install(std::io::Error::last_os_error())) }
}

/// Runs in a signal handler: no heap, no locks.
extern "C" fn on_fault<const PLACE: usize>(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes the signal's information.
    let information = unsafe { &*info };
    // SAFETY: for a fault it has the address.
    let address = unsafe { information.si_addr() } as CUdeviceptr;
    // SAFETY: the C library's location of the calling thread.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    let is_ours = information.si_code > 0 && (START.load(Relaxed)..END.load(Relaxed)).contains(&address);
    let is_repeated = is_ours && waits_or_may_repeat();
    // SAFETY: as above.
    unsafe { *errno = before };
    if !is_repeated {
        pass_on(PLACE, signal, info, context);
    }
}

/// Waits until access is granted. If it is already, a thread may repeat its access once: it may have faulted before.
fn waits_or_may_repeat() -> bool {
    // SAFETY: gettid has no arguments.
    let thread = unsafe { libc::gettid() };
    if WITHHELD.load(SeqCst) != 0 {
        if thread == AGENT.load(Relaxed) {
            return false;
        }
        while WITHHELD.load(SeqCst) != 0 {
            // SAFETY: futex(2) with FUTEX_WAIT reads a variable that lives for ever; NULL: no time limit.
            unsafe { libc::syscall(libc::SYS_futex, WITHHELD.as_ptr(), WAIT, 1, null::<libc::timespec>()) };
        }
        return true;
    }
    let mark = u64::from(thread.cast_unsigned()) << 32 | u64::from(GRANTS.load(SeqCst));
    let place = &REPEATED[thread.cast_unsigned() as usize % REPEATED.len()];
    GRANTS.load(SeqCst) != 0 && place.swap(mark, SeqCst) != mark
}

/// Does with a signal what would have been done without this module.
fn pass_on(place: usize, signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: what is stored there is never freed.
    let Some(before) = (unsafe { BEFORE[place].load(Acquire).as_ref() }) else { return };
    match before.sa_sigaction {
        // A fault is not ignored: the kernel ends the process in either case, when the access is repeated.
        libc::SIG_DFL | libc::SIG_IGN => {
            let mut default = *before;
            default.sa_sigaction = libc::SIG_DFL;
            // SAFETY: the structure is a local variable.
            unsafe { libc::sigaction(signal, &raw const default, null_mut()) };
            // SAFETY: the information is the signal's.
            if unsafe { (*info).si_code } <= 0 {
                // Sent by a process: nothing would be repeated.
                // SAFETY: raise takes a number.
                unsafe { libc::raise(signal) };
            }
        }
        handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: the program has installed a function of this type.
            let handler: Handler = unsafe { std::mem::transmute::<usize, Handler>(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: as above, of the older type.
            let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(handler) };
            handler(signal);
        }
    }
}
