//! How failures become exit codes.

use ckpt_snapshot::{OpenError, ReadError};

/// Something was found or could not be done: `verify` found damage, `checkpoint` failed.
pub const EXIT_NEGATIVE: i32 = 1;
/// Bad input: the command line, a configuration, a store that is not one. Nothing was touched.
pub const EXIT_BAD_INPUT: i32 = 2;
/// `ckpt-run run` itself failed, not the job.
pub const EXIT_OWN: i32 = 125;
/// The command is there and cannot be executed.
pub const EXIT_NOT_EXECUTABLE: i32 = 126;
/// There is no such command.
pub const EXIT_NOT_FOUND: i32 = 127;

/// Marks an error as the user's to mend: exit code 2.
#[derive(Debug)]
struct BadInput(anyhow::Error);

impl std::fmt::Display for BadInput {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(out)
    }
}

impl std::error::Error for BadInput {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

/// Marks an error as the user's to mend.
pub fn bad_input(error: impl Into<anyhow::Error>) -> anyhow::Error {
    anyhow::Error::new(BadInput(error.into()))
}

/// The exit code for an error; `otherwise` is for those that are nobody's input.
#[must_use]
pub fn exit_code(error: &anyhow::Error, otherwise: i32) -> i32 {
    let bad = error.chain().any(|cause| {
        cause.is::<BadInput>()
            || cause.is::<OpenError>()
            || matches!(
                cause.downcast_ref(),
                Some(
                    ReadError::Missing(_)
                        | ReadError::Ambiguous { .. }
                        | ReadError::Newer { .. }
                        | ReadError::Hostile { .. }
                        | ReadError::Id(_)
                        | ReadError::Io { .. }
                )
            )
    });
    if bad { EXIT_BAD_INPUT } else { otherwise }
}

/// Whether whoever read our output has stopped reading.
#[must_use]
pub fn is_closed_output(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let kind = cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        kind == Some(std::io::ErrorKind::BrokenPipe)
    })
}

/// An error with all its causes in one line.
#[must_use]
pub fn in_one_line(error: &anyhow::Error) -> String {
    format!("{error:#}")
}
