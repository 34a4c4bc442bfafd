//! How a test reports that it cannot run on this machine.

#![forbid(unsafe_code)]

use std::fmt::Display;
use std::fs::File;
use std::io::Write;

/// Begins each line about a skipped test: `SKIPPED: name of the test: reason`.
pub const PREFIX: &str = "SKIPPED: ";

/// The environment variable with the file that skipped tests are listed in.
pub const FILE_VARIABLE: &str = "CKPT_TEST_SKIPPED";

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
