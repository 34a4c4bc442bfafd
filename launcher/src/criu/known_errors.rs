//! What CRIU's log says, in plain words.

/// What CRIU's first error usually means: (part of the message, what it is, what to do).
const KNOWN: &[(&str, &str)] = &[
    (
        "unix connection",
        "a unix socket is connected to a process outside of the job: close it before the checkpoint, or start that other process inside the job",
    ),
    (
        "External socket is used",
        "a unix socket is connected to a process outside of the job: close it before the checkpoint, or start that other process inside the job",
    ),
    ("Can't dump ghost file", "an unlinked file is too large to be saved"),
    (
        "Can't open mapped",
        "a process has a file mapped that has no name any more (semaphores and shared memory of multiprocessing): CRIU saves that with CAP_SYS_ADMIN in the whole system only, see docs/privileges.md",
    ),
    (
        "TCP repair mode",
        "a process has a TCP connection, which CRIU saves with CAP_NET_ADMIN only: run the job with --network private, or give ckpt-run that capability",
    ),
    (
        "Can't dump that handle",
        "a process watches files with inotify or fanotify: CRIU saves that with CAP_DAC_READ_SEARCH in the whole system only, see docs/privileges.md",
    ),
    ("io_uring", "a process uses io_uring"),
    ("Can't dump file", "a process has something open that cannot be saved"),
    ("Unsupported socket", "a process has a socket of a kind that cannot be saved"),
    (
        "Can't lookup mount",
        "a process has a file open that was opened before the job began, or on a file system that is no longer mounted",
    ),
    ("has bad size", "a file that the job only reads has changed its length since the snapshot"),
    ("has bad mode", "the permissions of a file that the job uses have changed since the snapshot"),
    (
        "has bad build-id",
        "a program or library that the job uses has been replaced by another version since the snapshot",
    ),
    ("Can't open file", "a file that the job uses is not there any more"),
    (
        "Can't bind inet socket",
        "a port that the job listens on is taken by another process: end that one, or run the job with --network private",
    ),
    (
        "Unable to bind a socket: Cannot assign requested address",
        "the loopback interface is down, and CRIU needs it: `ip link set lo up`",
    ),
    ("Can't fork for", "a PID that the job needs is taken"),
    ("No space left on device", "there was no room for the images"),
    ("Cannot allocate memory", "there was not enough memory for the images"),
    ("Timeout reached", "the processes did not stop in time"),
    ("Compel injection", "a process could not be stopped in the right place (another try may do)"),
    ("is already being traced", "a debugger or strace is attached to a process of the job: detach it"),
    ("Unable to interrupt task", "a process could not be stopped (a debugger, or a hanging file system)"),
];

/// Errors that CRIU logs and gets over.
const HARMLESS: &[&str] = &["Can't setup RLIMIT_NOFILE for self", "net: Unexpected error"];

/// The first error in CRIU's log, with what it means where that is known.
#[must_use]
pub fn explain(log: &str) -> Option<String> {
    let counts = |line: &&str| line.contains("Error (") && !HARMLESS.iter().any(|part| line.contains(part));
    let errors: Vec<&str> = log.lines().filter(counts).collect();
    let first = errors.first()?;
    // "(00.012345)  10002: Error (criu/files.c:123): message" → "message"
    let message = first.split_once("): ").map_or(*first, |(_, rest)| rest);
    let message = message
        .rsplit_once("Error (")
        .map_or(message, |(_, rest)| rest.split_once("): ").map_or(rest, |(_, text)| text));
    let meaning = errors.iter().find_map(|line| KNOWN.iter().find(|(part, _)| line.contains(part)));
    Some(match meaning {
        Some((_, meaning)) => format!("{meaning} (CRIU: {})", message.trim()),
        None => format!("CRIU: {}", message.trim()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_the_first_error() {
        let log = "(00.1) Warn  (criu/a.c:1): nothing\n(00.2) Error (criu/files-reg.c:2242): File x has bad size 3\n(00.3) Error (criu/cr.c:1): late\n";
        let said = explain(log).unwrap();
        assert!(said.contains("changed its length") && said.contains("File x has bad size 3"), "{said}");
        assert_eq!(explain("(00.1) Error (criu/q.c:1): odd thing\n").unwrap(), "CRIU: odd thing");
        assert_eq!(explain("all well\n"), None);
    }
}
