//! Set-up of this crate's own tests.

use std::sync::{Arc, LazyLock};

use crate::context::{self, Context};
use crate::process;

static DIRECTORY: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory for the simulated devices");
    for (name, value) in [
        ("SIMCUDA_DEVICES", "2"),
        ("SIMCUDA_MEMORY", "1GiB"),
        ("SIMCUDA_DIR", directory.path().to_str().unwrap()),
    ] {
        // SAFETY: the first test to come here holds the lock of the LazyLock, and no other thread of this
        // process reads or writes the environment before it is let go.
        unsafe { std::env::set_var(name, value) };
    }
    // SAFETY: the function is one of this program's and does not unwind.
    unsafe { libc::atexit(remove_directory) };
    directory
});

/// A static is never dropped.
extern "C" fn remove_directory() {
    // It is in memory only and below a name of its own: if it cannot be removed, nothing else suffers.
    let _ = std::fs::remove_dir_all(DIRECTORY.path());
}

/// A fresh context on device 0, current to the calling thread. The machine has 2 devices of 1 GiB.
pub(crate) fn context() -> Arc<Context> {
    context_on(0)
}

/// As [`context`], on a device of choice.
pub(crate) fn context_on(ordinal: i32) -> Arc<Context> {
    LazyLock::force(&DIRECTORY);
    // SAFETY: cuInit has no preconditions.
    unsafe { process::cuInit(0) }.expect("cuInit");
    let mut handle = std::ptr::null_mut();
    // SAFETY: `handle` is a local variable.
    unsafe { context::cuCtxCreate_v2(&raw mut handle, 0, ordinal) }.expect("cuCtxCreate");
    context::by_handle(handle).expect("the context just created")
}
