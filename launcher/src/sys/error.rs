//! Errors that the user has to fix, and exit codes.

use std::error::Error;

/// A command failed: `verify` found damage, `checkpoint` saved nothing.
pub const EXIT_NEGATIVE: i32 = 1;
/// Bad input: the command line, the configuration, a path that is no store. Nothing was changed.
pub const EXIT_BAD_INPUT: i32 = 2;
/// The job was preempted or stopped: run the same command again to resume it (EX_TEMPFAIL of sysexits.h, which
/// schedulers read as "try again later").
pub const EXIT_PREEMPTED: i32 = 75;
/// `ckpt-run run` itself failed, not the job.
pub const EXIT_OWN: i32 = 125;
/// The command exists and cannot be executed.
pub const EXIT_NOT_EXECUTABLE: i32 = 126;
/// The command does not exist.
pub const EXIT_NOT_FOUND: i32 = 127;

/// Marks an error as bad input: exit code 2. Its message and its causes are those of the marked error.
#[derive(Debug)]
pub struct BadInput(anyhow::Error);

impl BadInput {
    /// The marked error.
    #[must_use]
    pub fn marked(&self) -> &(dyn Error + 'static) {
        self.0.as_ref()
    }
}

impl std::fmt::Display for BadInput {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(out)
    }
}

impl Error for BadInput {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

/// Marks an error as bad input: the user has to fix it.
pub fn bad_input(error: impl Into<anyhow::Error>) -> anyhow::Error {
    anyhow::Error::new(BadInput(error.into()))
}
