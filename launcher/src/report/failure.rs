//! How failures become exit codes.

use crate::agents::QuiesceError;
use crate::checkpoint::attempt::AttemptError;
use crate::criu::{ImageError, SessionError};
use crate::namespace::{NamespaceError, StartError};
use crate::sys::error::{BadInput, EXIT_BAD_INPUT};
use ckpt_protocol::frame::FrameError;
use ckpt_snapshot::{CopyError, OpenError, ReadError, SaveError};
use std::error::Error;
use std::io::{self, Write as _};

#[cfg(test)]
mod messages;

/// The exit code for an error; `otherwise` is for those that are nobody's input.
#[must_use]
pub fn exit_code(error: &anyhow::Error, otherwise: i32) -> i32 {
    let bad = error.chain().any(|cause| {
        cause.is::<BadInput>()
            || cause.is::<OpenError>()
            || matches!(
                cause.downcast_ref(),
                Some(NamespaceError::Rights { .. } | NamespaceError::NoUserNamespace { .. })
            )
            || matches!(
                cause.downcast_ref(),
                Some(
                    ReadError::Missing(_)
                        | ReadError::Ambiguous { .. }
                        | ReadError::Newer { .. }
                        | ReadError::NewerObject { .. }
                        | ReadError::Key { .. }
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
        let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        kind == Some(io::ErrorKind::BrokenPipe)
    })
}

/// An error with all its causes in one line. What an error says of its cause itself is not said again.
#[must_use]
pub fn in_one_line(error: &anyhow::Error) -> String {
    let mut said = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        if said.contains(&text) {
            continue;
        }
        said.push_str(if said.is_empty() { "" } else { ": " });
        said.push_str(&text);
    }
    said
}

/// An error with its causes, and with what to do about it where it does not say that itself.
#[must_use]
pub fn with_remedy(error: &anyhow::Error) -> String {
    let said = in_one_line(error);
    match error.chain().find_map(remedy) {
        Some(remedy) => format!("{}. {remedy}", said.trim_end_matches('.')),
        None => said,
    }
}

/// Logs an error with its remedy; writes to stderr if logging has not started yet.
pub fn log_error(error: &anyhow::Error) {
    let said = with_remedy(error);
    if tracing::enabled!(tracing::Level::ERROR) {
        tracing::error!("{said}");
    } else {
        let _ = writeln!(io::stderr(), "ckpt-run: error: {said}");
    }
}

/// What to do about errors that do not say it themselves.
fn remedy(error: &(dyn Error + 'static)) -> Option<&'static str> {
    of_store(error)
        .or_else(|| error.downcast_ref().and_then(of_attempt))
        .or_else(|| error.downcast_ref().and_then(of_agents))
        .or_else(|| of_parts(error))
        .or_else(|| of_system(error.downcast_ref::<io::Error>()?.kind()))
}

fn of_store(error: &(dyn Error + 'static)) -> Option<&'static str> {
    if let Some(CopyError::Cancelled | CopyError::NoTier { .. }) = error.downcast_ref() {
        return Some("Look at `ckpt-run ls`: the snapshot is where it was");
    }
    // Enums that pass an error on as it is do not name it as their source.
    let passed_on = || match error.downcast_ref()? {
        SaveError::Store(error) => Some(error),
        _ => None,
    };
    let copied = || match error.downcast_ref()? {
        CopyError::Read(error) => Some(error),
        _ => None,
    };
    match error.downcast_ref().or_else(passed_on).or_else(copied)? {
        ReadError::Missing(_) => Some("`ckpt-run ls` lists those there are"),
        ReadError::Id(_) => Some("`ckpt-run ls` shows them"),
        ReadError::Damaged { .. } => Some(
            "Take an older snapshot (`ckpt-run ls` lists them; a resume does so by itself), and look after the disk",
        ),
        ReadError::Key { .. } => {
            Some("Name the key file with which the job was saved: --encrypt-key-file FILE")
        }
        _ => None,
    }
}

fn of_attempt(error: &AttemptError) -> Option<&'static str> {
    match error {
        AttemptError::Broken(_) => {
            Some("Look into docs/limits.md for what cannot be saved, and let the job do without it")
        }
        AttemptError::JobEnded | AttemptError::Withdrawn => {
            Some("Run the same command again to go on from its newest snapshot")
        }
        AttemptError::Image(_) => Some(OF_CRIU),
        AttemptError::Namespace(_) => Some(OF_NAMESPACE),
        _ => None,
    }
}

fn of_agents(error: &QuiesceError) -> Option<&'static str> {
    match error {
        QuiesceError::Refused { .. } => {
            Some("Look into docs/limits.md for what cannot be saved, and let the job do without it")
        }
        QuiesceError::Deadline { .. } => Some(
            "Look whether the process is stopped or waits for its GPU; the next checkpoint is tried by itself",
        ),
        QuiesceError::Resume { .. } | QuiesceError::NotListening => {
            Some("Let the job run on; if it cannot be saved again, end it and run the same command again")
        }
        QuiesceError::NoMemory { .. } | QuiesceError::Mirror { .. } => None,
    }
}

/// What to do about a command that cannot be executed.
pub const OF_COMMAND: &str = "Look at its path, its permissions, and what its first line names";
const OF_CRIU: &str = "Look at what `ckpt-run doctor` says of CRIU";
const OF_NAMESPACE: &str =
    "Run the same command again; if it comes back, look at what `ckpt-run doctor` says";

/// Programs and processes that ours work with.
fn of_parts(error: &(dyn Error + 'static)) -> Option<&'static str> {
    if error.is::<SessionError>() || error.is::<ImageError>() {
        return Some(OF_CRIU);
    }
    if let Some(NamespaceError::Refused(_) | NamespaceError::Gone) = error.downcast_ref() {
        return Some(OF_NAMESPACE);
    }
    if let Some(StartError::Command(_)) = error.downcast_ref() {
        return Some(OF_COMMAND);
    }
    if error.is::<FrameError>() {
        return Some(
            "Look whether the job still runs, and use one version of ckpt-run for it and for its commands",
        );
    }
    None
}

fn of_system(kind: io::ErrorKind) -> Option<&'static str> {
    use io::ErrorKind;
    Some(match kind {
        ErrorKind::PermissionDenied => {
            "Give the user that runs ckpt-run the rights to it, or run ckpt-run as the user who has them"
        }
        ErrorKind::ReadOnlyFilesystem => "Mount the file system writable, or name another with --store DIR",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "Free some space there (`ckpt-run prune`), or name another place with --store DIR"
        }
        ErrorKind::NotFound => "Look whether the path is right, and its file system is mounted",
        ErrorKind::NotADirectory | ErrorKind::IsADirectory | ErrorKind::AlreadyExists => {
            "Look whether the path is right: something else has that name"
        }
        ErrorKind::OutOfMemory => "Let other programs use less memory, or give the machine more",
        // Who reads our output has gone.
        ErrorKind::BrokenPipe => return None,
        _ => "Look at `dmesg` and at the file system, and try again: nothing was lost",
    })
}
