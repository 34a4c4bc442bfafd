//! Errors as messages with a remedy, and as exit codes.

use crate::agents::QuiesceError;
use crate::checkpoint::attempt::AttemptError;
use crate::criu::{CriuMissing, ImageError, SessionError};
use crate::job::ownership::OwnershipError;
use crate::namespace::{NamespaceError, StartError};
use crate::restore::resume::NotRestored;
use crate::sys::error::{BadInput, EXIT_BAD_INPUT};
use ckpt_object_medium::NoAnswer;
use ckpt_protocol::frame::FrameError;
use ckpt_snapshot::codec::KeyError;
use ckpt_snapshot::{CopyError, OpenError, ReadError, SaveError};
use std::error::Error;
use std::io::{self, Write as _};

#[cfg(test)]
mod messages;

/// The exit code for an error that ends a command; `otherwise` is for errors that are not bad input.
#[must_use]
pub fn exit_code(error: &anyhow::Error, otherwise: i32) -> i32 {
    if error.chain().any(is_bad_input) { EXIT_BAD_INPUT } else { otherwise }
}

/// Whether the user has to change an option, a store or rights. A disk or network that fails is no bad input.
fn is_bad_input(error: &(dyn Error + 'static)) -> bool {
    if let Some(error) = error.downcast_ref() {
        return match error {
            OpenError::Io { source, .. } => is_wrong_path(source.kind()) || is_forbidden(source.kind()),
            OpenError::NotAStore(_)
            | OpenError::Unreadable { .. }
            | OpenError::Unauthentic { .. }
            | OpenError::Replayed { .. }
            | OpenError::NeedsKey(_)
            | OpenError::Link(_)
            | OpenError::Newer { .. }
            | OpenError::Locked { .. }
            | OpenError::BadName(_) => true,
        };
    }
    if let Some(error) = error.downcast_ref() {
        return match error {
            ReadError::Io { source, .. } => is_forbidden(source.kind()),
            ReadError::Damaged { .. } | ReadError::Target { .. } => false,
            ReadError::Missing(_)
            | ReadError::Ambiguous { .. }
            | ReadError::Newer { .. }
            | ReadError::NewerObject { .. }
            | ReadError::Key { .. }
            | ReadError::Hostile { .. }
            | ReadError::Id(_) => true,
        };
    }
    let rights = matches!(
        error.downcast_ref(),
        Some(NamespaceError::Rights { .. } | NamespaceError::NoUserNamespace { .. })
    );
    rights || error.is::<BadInput>()
}

/// Whether the path that the user named cannot be what it should be.
fn is_wrong_path(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{AlreadyExists, InvalidFilename, IsADirectory, NotADirectory, NotFound};
    matches!(kind, AlreadyExists | InvalidFilename | IsADirectory | NotADirectory | NotFound)
}

/// Whether the user of ckpt-run lacks rights.
fn is_forbidden(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

/// Whether the reader of our output has closed it.
#[must_use]
pub fn is_closed_output(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// Names stdout in an error of writing to it, which says nothing of where: the remedy for a full disk would be to delete
/// snapshots.
#[must_use]
pub fn naming_output(error: anyhow::Error) -> anyhow::Error {
    let is_full = |error: &io::Error| error.kind() == io::ErrorKind::StorageFull;
    if error.chain().count() == 1 && error.downcast_ref().is_some_and(is_full) {
        return anyhow::anyhow!("cannot write to stdout: {error}. Write to another place");
    }
    error
}

/// An error with all its causes in one line.
#[must_use]
pub fn in_one_line(error: &anyhow::Error) -> String {
    let mut messages = Vec::new();
    for cause in error.chain() {
        messages.push(cause.to_string());
        if includes_causes(cause) {
            break;
        }
    }
    messages.join(": ")
}

/// Whether the message of an error already contains the messages of its causes. The errors of ours that carry a remedy do:
/// their cause is in the middle of the sentence.
fn includes_causes(error: &(dyn Error + 'static)) -> bool {
    if let Some(error) = error.downcast_ref::<BadInput>() {
        return includes_causes(error.marked());
    }
    if let Some(error) = error.downcast_ref::<AttemptError>() {
        return !matches!(error, AttemptError::DeviceMemory(_));
    }
    error.is::<OpenError>()
        || error.is::<ReadError>()
        || error.is::<SaveError>()
        || error.is::<CopyError>()
        || error.is::<KeyError>()
        || error.is::<OwnershipError>()
        || error.is::<QuiesceError>()
        || error.is::<SessionError>()
        || error.is::<ImageError>()
}

/// An error with its causes, and with a remedy unless the message has one.
#[must_use]
pub fn with_remedy(error: &anyhow::Error) -> String {
    let of_resume = error.downcast_ref().map(NotRestored::remedy);
    // Of a pipe that is full and does not wait, nothing else is known.
    let is_bare = error.is::<io::Error>() && error.chain().count() == 1;
    let of_limit = error.chain().find_map(of_limit).filter(|_| !is_bare);
    let remedies = of_limit.or_else(|| error.chain().find_map(remedy)).into_iter().chain(of_resume);
    remedies
        .fold(in_one_line(error), |message, remedy| format!("{}. {remedy}", message.trim_end_matches('.')))
}

/// Logs an error with its remedy; writes to stderr if logging has not started yet.
pub fn log_error(error: &anyhow::Error) {
    let message = with_remedy(error);
    if tracing::enabled!(tracing::Level::ERROR) {
        tracing::error!("{message}");
    } else {
        let _ = writeln!(io::stderr(), "ckpt-run: error: {message}");
    }
}

/// The remedy for an error whose message has none.
fn remedy(error: &(dyn Error + 'static)) -> Option<&'static str> {
    of_store(error)
        .or_else(|| error.downcast_ref().and_then(of_attempt))
        .or_else(|| error.downcast_ref().and_then(of_agents))
        .or_else(|| of_parts(error))
        .or_else(|| of_object_store(error.downcast_ref()?))
        .or_else(|| of_system(error.downcast_ref::<io::Error>()?.kind()))
}

/// The kernel starts no more processes and threads. Many of the messages come from the init, as text.
fn of_limit(error: &(dyn Error + 'static)) -> Option<&'static str> {
    let is_system = error.is::<io::Error>()
        || error.is::<NamespaceError>()
        || error.is::<AttemptError>()
        || error.is::<CriuMissing>();
    let is_limit = || error.to_string().contains(&rustix::io::Errno::AGAIN.to_string());
    (is_system && is_limit()).then_some(OF_PROCESSES)
}

fn of_store(error: &(dyn Error + 'static)) -> Option<&'static str> {
    if let Some(CopyError::Cancelled | CopyError::NoTier { .. }) = error.downcast_ref() {
        return Some("See `ckpt-run ls`: the snapshot is where it was");
    }
    if let Some(SaveError::Io { source, .. }) = save_error(error)
        && of_system(source.kind()) == Some(OF_DISK)
    {
        return Some("Check `dmesg` and the file system, and try again: earlier snapshots are intact");
    }
    match read_error(error)? {
        ReadError::Missing(_) => Some("`ckpt-run ls` lists the snapshots"),
        ReadError::Id(_) => Some("`ckpt-run ls` lists the IDs of snapshots"),
        ReadError::Damaged { .. } => Some(
            "Use an older snapshot (`ckpt-run ls` lists them; a resume does so automatically), and check the disk",
        ),
        ReadError::Key { .. } => {
            Some("Give the key file with which the job was saved: --encrypt-key-file FILE")
        }
        _ => None,
    }
}

/// The error itself, or the one that a transparent error forwards: that is not among its sources.
fn save_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a SaveError> {
    match (error.downcast_ref(), error.downcast_ref()) {
        (Some(AttemptError::Save(error)), _) | (_, Some(CopyError::Save(error))) => Some(error),
        _ => error.downcast_ref(),
    }
}

/// The same for an error of reading.
fn read_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a ReadError> {
    match (save_error(error), error.downcast_ref(), error.downcast_ref()) {
        (Some(SaveError::Store(error)), _, _)
        | (_, Some(CopyError::Read(error)), _)
        | (_, _, Some(AttemptError::List(error))) => Some(error),
        _ => error.downcast_ref(),
    }
}

fn of_attempt(error: &AttemptError) -> Option<&'static str> {
    match error {
        AttemptError::Broken(_) => {
            Some("See `ckpt-run docs limits` for what cannot be saved, and what to do instead")
        }
        AttemptError::JobEnded | AttemptError::Withdrawn => {
            Some("Run the same command again to resume from its newest snapshot")
        }
        AttemptError::Nodes(_) | AttemptError::NoMemory(_) => {
            Some("Look at the messages of ckpt-run on that node")
        }
        AttemptError::Image(_) => Some(OF_CRIU),
        AttemptError::Namespace(_) => Some(OF_NAMESPACE),
        _ => None,
    }
}

fn of_agents(error: &QuiesceError) -> Option<&'static str> {
    match error {
        QuiesceError::Refused { .. } => {
            Some("See `ckpt-run docs limits` for what cannot be saved, and what to do instead")
        }
        QuiesceError::Deadline { .. } => Some(
            "Check whether the process is stopped or waits for its GPU. The next checkpoint is tried automatically",
        ),
        QuiesceError::NoCut { .. } => Some(
            "Let the job run: the next checkpoint is tried automatically. If each of them fails, a process that is behind waits outside NCCL (gloo, a store, a file, a pipe) for one that is parked: see `ckpt-run docs limits`",
        ),
        QuiesceError::Withdrawn => Some("Run the same command again to resume from its newest snapshot"),
        QuiesceError::Resume { .. } | QuiesceError::NotListening => Some(
            "Let the job run; if the next checkpoint fails too, end the job and run the same command again",
        ),
        QuiesceError::NoMemory { .. } | QuiesceError::Mirror { .. } => None,
    }
}

/// The remedy for a command that cannot be executed.
pub const OF_COMMAND: &str = "Check its path, its permissions, and the interpreter in its first line";
const OF_CRIU: &str = "Run `ckpt-run doctor` and check what it reports about CRIU";
const OF_DISK: &str = "Check `dmesg` and the file system, and try again";
const OF_PROCESSES: &str = "Check the limits of processes and threads: `ulimit -u`, and `pids.max` of the cgroup (Docker: --pids-limit, systemd: TasksMax=)";
const OF_NAMESPACE: &str =
    "Run the same command again; if the error persists, check the output of `ckpt-run doctor`";

/// Programs and processes that ckpt-run works with.
fn of_parts(error: &(dyn Error + 'static)) -> Option<&'static str> {
    if error.is::<SessionError>() || error.is::<ImageError>() {
        return Some(OF_CRIU);
    }
    match error.downcast_ref() {
        Some(NamespaceError::Refused(_) | NamespaceError::Ended) => return Some(OF_NAMESPACE),
        Some(NamespaceError::Create(_)) => {
            return Some(
                "Run ckpt-run as root or give it CAP_SYS_ADMIN; `ckpt-run doctor` lists the other requirements",
            );
        }
        _ => {}
    }
    match error.downcast_ref() {
        Some(StartError::Command(_)) => return Some(OF_COMMAND),
        Some(StartError::Namespace(forwarded)) => return remedy(forwarded),
        None => {}
    }
    if error.is::<FrameError>() {
        return Some(
            "Check whether the job is still running, and use the same version of ckpt-run for it and for its commands",
        );
    }
    None
}

fn of_object_store(error: &io::Error) -> Option<&'static str> {
    let inner = error.get_ref()?;
    inner
        .is::<NoAnswer>()
        .then_some("Check the address of the store, the network and its server, and try again")
}

fn of_system(kind: io::ErrorKind) -> Option<&'static str> {
    use io::ErrorKind;
    Some(match kind {
        ErrorKind::PermissionDenied => {
            "Give the user that runs ckpt-run the permissions, or run ckpt-run as a user that has them"
        }
        ErrorKind::ReadOnlyFilesystem => "Mount the file system writable, or name another with --store DIR",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "Free some space there (`ckpt-run prune`), or name another place with --store DIR"
        }
        ErrorKind::NotFound => "Check whether the path is right and its file system is mounted",
        ErrorKind::NotADirectory | ErrorKind::IsADirectory | ErrorKind::AlreadyExists => {
            "Check whether the path is right: something else has that name"
        }
        ErrorKind::OutOfMemory => {
            "Let other programs use less memory, or give the machine, or the job's container or cgroup, more"
        }
        // The reader of our output has closed it.
        ErrorKind::BrokenPipe => return None,
        _ => OF_DISK,
    })
}
