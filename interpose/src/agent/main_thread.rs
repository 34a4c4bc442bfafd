//! Notices the end of the main thread, after which a process ends with its last thread.

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use crate::socket::Socket;

/// The key whose destructor runs when the main thread ends.
static KEY: OnceLock<libc::pthread_key_t> = OnceLock::new();
static HAS_ENDED: AtomicBool = AtomicBool::new(false);

/// Makes the key: once in the life of the process. Returns whether it was made.
pub(super) fn prepare() -> bool {
    let mut key = 0;
    // SAFETY: `key` is writable; the destructor is a function of this library, which stays mapped.
    if unsafe { libc::pthread_key_create(&raw mut key, Some(ends)) } != 0 {
        return false;
    }
    KEY.set(key).is_ok()
}

/// Watches the calling thread, which is the main thread. Returns whether that is possible.
pub(super) fn watch() -> bool {
    HAS_ENDED.store(false, SeqCst);
    // Any value but null, so that the key's destructor runs for this thread.
    // SAFETY: the key was created and is never deleted; the value is never read through.
    KEY.get().is_some_and(|key| unsafe { libc::pthread_setspecific(*key, (&raw const KEY).cast()) } == 0)
}

/// Whether the main thread has ended.
pub(super) fn has_ended() -> bool {
    HAS_ENDED.load(SeqCst)
}

/// Runs on the main thread when it ends by itself and not with the whole process.
extern "C" fn ends(_: *mut c_void) {
    HAS_ENDED.store(true, SeqCst);
    if let Some(socket) = Socket::noted() {
        socket.hang_up();
        // It is the agent's, which wakes now and closes it.
        socket.keep();
    }
}
