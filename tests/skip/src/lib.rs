//! How a test reports that it cannot run on this machine.

#![forbid(unsafe_code)]

use std::fmt::Display;
use std::fs::File;
use std::io::Write;

/// Begins each line about a skipped test: `SKIPPED: name of the test: reason`.
pub const PREFIX: &str = "SKIPPED: ";

/// The environment variable with the file that skipped tests are listed in.
pub const FILE_VARIABLE: &str = "CKPT_TEST_SKIPPED";

/// Why a test of `cargo xtask test --full` skips in an ordinary run.
const FULL: &str = "needs `cargo xtask test --full`";

/// The environment variable that a full run sets: how often its tests kill each job.
pub const FULL_VARIABLE: &str = "CKPT_TEST_KILLS";

/// Whether this is `cargo xtask test --full`.
#[must_use]
pub fn is_full_run() -> bool {
    std::env::var_os(FULL_VARIABLE).is_some()
}

/// Whether this is `cargo xtask test --full`. If not, the test of this thread is reported as skipped.
#[must_use]
pub fn is_full_run_or_skip() -> bool {
    let is_full = is_full_run();
    if !is_full {
        needs_full();
    }
    is_full
}

/// Reports that the test of this thread is skipped because it needs what `cargo xtask test --full` installs.
pub fn needs_full() {
    skip(FULL);
}

/// Reports that the test of this thread is skipped, and why. The test returns right after.
///
/// `cargo xtask test` collects these lines and fails unless its list of tests that may skip has the test.
pub fn skip(reason: impl Display) {
    let thread = std::thread::current();
    let line = format!("{PREFIX}{}: {reason}\n", thread.name().unwrap_or("unknown"));
    // Not eprintln!: the test harness shows that of failed tests only.
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os(FILE_VARIABLE) {
        let mut file =
            File::options().create(true).append(true).open(&path).expect("the list of skipped tests");
        file.write_all(line.as_bytes()).expect("a line in the list of skipped tests");
    }
}
