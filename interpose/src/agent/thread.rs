//! Starts a thread by the C library's calls: Rust's standard library may not be used before the program's `main`.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

/// The driver's own code runs on the stack. Pages that are not touched cost nothing.
const STACK_BYTES: usize = 2 << 20;

/// The thread's function; it takes any argument and does not unwind.
pub(super) type Main = extern "C" fn(*mut c_void) -> *mut c_void;

/// Starts a thread with all signals blocked: those are for the application's threads.
pub(super) fn spawn(main: Main) -> bool {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset writes the set that it is given room for. It leaves out what the C library needs.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: `all` was filled just now, `before` has room for a set.
    if unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) } != 0 {
        return false;
    }
    let made = make_thread(main);
    // SAFETY: the first call succeeded, so `before` holds the thread's mask; null: the old one is not asked.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut()) };
    made
}

fn make_thread(main: Main) -> bool {
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    // SAFETY: pthread_attr_init writes the attributes that it is given room for.
    if unsafe { libc::pthread_attr_init(attributes.as_mut_ptr()) } != 0 {
        return false;
    }
    // SAFETY: the attributes are initialised. A size that is refused leaves the default in place.
    unsafe { libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK_BYTES) };
    // A program with very much thread-local storage leaves no room on a small stack.
    let made = create(attributes.as_ptr(), main) || create(null(), main);
    // SAFETY: the attributes are initialised, and not used any more.
    unsafe { libc::pthread_attr_destroy(attributes.as_mut_ptr()) };
    made
}

/// Takes initialised attributes, or null for the default ones.
fn create(attributes: *const libc::pthread_attr_t, main: Main) -> bool {
    let mut thread = MaybeUninit::<libc::pthread_t>::uninit();
    // SAFETY: `thread` has room for the ID, the callers pass attributes as promised, and `main` takes
    // any argument and does not unwind.
    unsafe { libc::pthread_create(thread.as_mut_ptr(), attributes, main, null_mut()) == 0 }
}
