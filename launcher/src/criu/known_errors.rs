//! Explanations of CRIU's error messages. To explain another message, add a row to [`KNOWN_ERRORS`].

/// Known errors: a part of CRIU's message, and an explanation with what to do. The first row that matches a line of the
/// log counts, so specific rows come before general ones.
const KNOWN_ERRORS: &[(&str, &str)] = &[
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
        "a process has mapped a file that has been removed (semaphores and shared memory of multiprocessing): CRIU can save that only with CAP_SYS_ADMIN in the initial user namespace, see `ckpt-run docs privileges`",
    ),
    (
        "TCP repair mode",
        "a process has a TCP connection, which CRIU can save only with CAP_NET_ADMIN: run the job with --network private, or give ckpt-run that capability",
    ),
    (
        "Can't get rlimit",
        "a process of the job runs as another user than ckpt-run (setpriv, su), whose limits can be read only with CAP_SYS_RESOURCE: give ckpt-run that capability, also where it is root (a container: --cap-add SYS_RESOURCE), or start all of the job as one user",
    ),
    (
        "Can't dump that handle",
        "a process watches files with inotify or fanotify: CRIU can save that only with CAP_DAC_READ_SEARCH in the initial user namespace, see `ckpt-run docs privileges`",
    ),
    (
        "Can't make VM id",
        "a process shares its memory with another one that is none of its threads (clone with CLONE_VM), and CRIU cannot save that. A child of vfork does so until it has executed its program: another attempt may succeed",
    ),
    ("io_uring", "a process uses io_uring"),
    ("Can't dump file", "a process has a file or device open that cannot be saved"),
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
    ("Can't open file", "a file that the job uses is missing"),
    (
        "Can't bind inet socket",
        "a port that the job listens on is taken by another process: end that one, or run the job with --network private",
    ),
    (
        "Can't connect inet socket back: Cannot assign requested address",
        "the ports of one of the job's connections are taken, by another program or by a connection that has just ended: try again in a minute, or run the job with --network private",
    ),
    (
        "Unable to bind a socket: Cannot assign requested address",
        "the loopback interface is down, and CRIU needs it: `ip link set lo up`",
    ),
    (
        "with specified index",
        "the number of a terminal that the job had made (/dev/pts/N) is in use by another program: end that one, or start the job without a terminal (`< /dev/null 2>&1 | cat`), so that it has terminals of its own",
    ),
    (
        "Can't link remap to",
        "a name that CRIU needs for an open file without its name (link_remap.N in the same directory) is taken by the checkpoint of another job, or was left by one that was killed: if it stays, delete it",
    ),
    (
        "service_fd_base",
        "the limit of open files is too low: CRIU needs some 45 descriptors besides those of the job. Raise the hard limit (`ulimit -Hn`, systemd: LimitNOFILE=), and the snapshot can be resumed",
    ),
    ("Can't fork for", "a PID that the job needs is taken"),
    (
        "fork() failed",
        "no process could be started: check the limits of processes, `ulimit -u` and `pids.max` of the cgroup",
    ),
    ("No space left on device", "not enough disk space or memory for the images"),
    ("Cannot allocate memory", "not enough memory for the images"),
    ("Timeout reached", "the processes did not stop in time"),
    ("Compel injection", "a process could not be stopped at a suitable point (another attempt may succeed)"),
    ("is already being traced", "a debugger or strace is attached to a process of the job: detach it"),
    ("Unable to interrupt task", "a process could not be stopped (a debugger, or a hanging file system)"),
];

/// After an error, CRIU kills what it has restored, and logs that, too: it explains something as the first error only.
const KILLED: (&str, &str) = (
    "killed by signal 9",
    "a process was killed. The kernel does that when the machine, or the memory limit of the cgroup, has no memory left",
);

/// Errors that CRIU logs and recovers from.
const HARMLESS: &[&str] = &["Can't setup RLIMIT_NOFILE for self", "net: Unexpected error"];

/// The first error in CRIU's log, with its explanation if it is known.
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
    let explanation =
        errors.iter().find_map(|line| KNOWN_ERRORS.iter().find(|(part, _)| line.contains(part)));
    let explanation = explanation.or_else(|| Some(&KILLED).filter(|(part, _)| first.contains(part)));
    Some(match explanation {
        Some((_, explanation)) => format!("{explanation} (CRIU: {})", message.trim()),
        None => format!("CRIU: {}", message.trim()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_the_first_error() {
        let log = "(00.1) Warn  (criu/a.c:1): nothing\n(00.2) Error (criu/files-reg.c:2242): File x has bad size 3\n(00.3) Error (criu/cr.c:1): late\n";
        let text = explain(log).unwrap();
        assert!(text.contains("changed its length") && text.contains("File x has bad size 3"), "{text}");
        assert_eq!(explain("(00.1) Error (criu/q.c:1): odd thing\n").unwrap(), "CRIU: odd thing");
        assert_eq!(explain("all well\n"), None);
        let killed = "(00.2) Error (criu/cr-restore.c:1): 10002 killed by signal 9: Killed\n";
        assert!(explain(killed).unwrap().contains("no memory left"));
        let after = format!("(00.1) Error (criu/q.c:1): odd thing\n{killed}");
        assert_eq!(explain(&after).unwrap(), "CRIU: odd thing");
    }
}
