//! Set-up of this crate's own tests.

use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

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
        // process reads or writes the environment before it continues.
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

static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    /// Held until the test's thread ends. Tests with a context run one at a time: an address that one of them freed is
    /// the next one's that a parallel test would get.
    static TURN_OF_THREAD: MutexGuard<'static, ()> = TURN.lock().unwrap_or_else(PoisonError::into_inner);
}

/// A fresh context on device 0, current to the calling thread. The machine has 2 devices of 1 GiB.
pub(crate) fn context() -> Arc<Context> {
    context_on(0)
}

/// As [`context`], on a device of choice.
pub(crate) fn context_on(ordinal: i32) -> Arc<Context> {
    TURN_OF_THREAD.with(|_| ());
    LazyLock::force(&DIRECTORY);
    // SAFETY: cuInit has no preconditions.
    unsafe { process::cuInit(0) }.expect("cuInit");
    let mut handle = std::ptr::null_mut();
    // SAFETY: `handle` is a local variable.
    unsafe { context::cuCtxCreate_v2(&raw mut handle, 0, ordinal) }.expect("cuCtxCreate");
    context::by_handle(handle).expect("the context just created")
}

const ALONE: &str = "SIMCUDA_TEST_ALONE";

/// Runs the test that calls this once more, alone in a process of its own, and says whether this is that
/// process: what is counted per process or taken from a whole device must not be disturbed by other tests.
pub(crate) fn is_own_process(test: &str, variables: &[(&str, &str)]) -> bool {
    if std::env::var(ALONE).is_ok_and(|alone| alone == test) {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(ALONE, test).envs(variables.iter().copied());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{test} on its own:\n{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    false
}
