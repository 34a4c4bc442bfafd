//! Every error message says what happened, to which object, and what to do. There is an example of each variant of the
//! error enums that users see; a variant without one does not compile.

use super::with_remedy;
use crate::agents::{Process, QuiesceError};
use crate::checkpoint::attempt::AttemptError;
use crate::criu::{CriuMissing, ImageError, MIN_VERSION, SessionError};
use crate::job::ownership::{ClaimedElsewhere, OwnershipError};
use crate::namespace::{NamespaceError, StartError};
use crate::restore::resume::NotRestored;
use crate::sys::error::bad_input;
use anyhow::anyhow;
use ckpt_object_medium::StoreUrlError;
use ckpt_protocol::frame::FrameError;
use ckpt_snapshot::codec::KeyError;
use ckpt_snapshot::{
    CopyError, Damage, IdError, OpenError, ReadError, Refusal, RelPathError, SaveError, SnapshotId,
};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The words with which messages begin a remedy.
const REMEDIES: [&str; 33] = [
    "Check ",
    "See ",
    "check ",
    "name another",
    "Name ",
    "Give ",
    "give ",
    "Use ",
    "use ",
    "use:",
    "run ckpt-run",
    "Run ",
    "Mount ",
    "Free ",
    "Look ",
    "look ",
    "look at",
    "Let ",
    "let ",
    "end it",
    "End one",
    "Make ",
    "make one",
    "Take ",
    "report",
    "lists those",
    "lists the",
    "find out who",
    "Install ",
    "it looks like",
    "write it plainly",
    "Remove ",
    "Fix the cause",
];

/// Debug output of Rust, which is not for users.
const NOT_FOR_USERS: [&str; 9] =
    ["Some(", "None", "Err(", "Os {", "Custom {", "Kind(", "PathBuf", " { ", "Error("];

/// Checks the message of `error`, which is about `object`.
fn check(error: impl Into<anyhow::Error>, object: &str) {
    let text = with_remedy(&error.into());
    assert!(text.contains(object), "it does not name {object}: {text}");
    for bad in NOT_FOR_USERS {
        assert!(!text.contains(bad), "{bad:?} is not for users: {text}");
    }
    let is_cut = text.trim() != text || text.ends_with(':') || text.contains(": :") || text.contains("  ");
    assert!(
        !is_cut && !text.contains(".. ") && !text.ends_with("..") && !text.contains(": ."),
        "something is missing in it: {text}"
    );
    assert_eq!(text.matches("the device is on fire").count().max(1), 1, "a cause is repeated: {text}");
    assert!(REMEDIES.iter().any(|words| text.contains(words)), "it does not say what to do: {text}");
}

/// One example for each variant of an enum: a new variant needs one too.
macro_rules! each {
    ($type:ty { $($variant:pat => $example:expr, $object:expr;)* }) => {{
        // This does not compile when a variant is missing.
        let _ = |error: &$type| match error { $($variant => {})* };
        $({
            let example: $type = $example;
            assert!(matches!(&example, $variant), "the example is of another variant: {example:?}");
            check(example, $object);
        })*
    }};
}

/// An I/O error of no kind that has its own remedy.
fn fire() -> io::Error {
    io::Error::other("the device is on fire")
}

/// What the kernel says when a limit of processes is reached.
fn no_process() -> io::Error {
    rustix::io::Errno::AGAIN.into()
}

#[test]
fn of_a_limit_of_processes() {
    let broken = AttemptError::Broken(format!("cannot start CRIU: {}", no_process()));
    let refused = NamespaceError::Refused(format!("cannot start the job: {}", no_process()));
    let in_criu = CriuMissing::NoProcess { path: path(), reason: no_process().to_string() };
    let thread = anyhow::Error::new(no_process()).context("cannot listen for signals");
    let all =
        [broken.into(), refused.into(), NamespaceError::Create(no_process()).into(), in_criu.into(), thread];
    for error in all {
        let said = with_remedy(&error);
        assert!(said.ends_with(super::OF_PROCESSES) && !said.contains("docs limits"), "{said}");
    }
}

fn path() -> PathBuf {
    "/data/store".into()
}

fn process() -> Process {
    Process { pid: Some(7), host_pid: Some(7), exe: "python3".to_owned() }
}

fn text(what: &str) -> String {
    what.to_owned()
}

/// What to do comes after the cause, also if the cause is bad input or has a remedy of its own.
#[test]
fn of_a_resume() {
    let id = || SnapshotId::new(7, std::time::UNIX_EPOCH);
    for example in [NotRestored::Here(id()), NotRestored::Gpus(id())] {
        check(anyhow::Error::new(fire()).context(example), "000007");
    }
    let causes = [bad_input(anyhow!("/x is taken")), SessionError::Timeout.into(), anyhow!("/x is taken.")];
    for cause in causes {
        let said = with_remedy(&cause.context(NotRestored::Here(id())));
        let (_, after) = said.split_once("nothing is lost: ").expect("the cause");
        let (cause, remedy) = after.split_once(". Fix the cause and run").expect("the remedy after it");
        assert!(!cause.is_empty() && remedy.ends_with("or --resume never"), "{said}");
    }
}

#[test]
fn of_the_store() {
    each!(OpenError {
        OpenError::Io { .. } => OpenError::Io { step: "open", path: path(), source: fire() }, "/data/store";
        OpenError::NotAStore(_) => OpenError::NotAStore(path()), "/data/store";
        OpenError::Link(_) => OpenError::Link(path()), "/data/store";
        OpenError::Unreadable { .. } => OpenError::Unreadable { path: path(), reason: text("no JSON") }, "/data/store";
        OpenError::Unauthentic { .. } => OpenError::Unauthentic { path: path(), refusal: Refusal::WrongCode }, "/data/store";
        OpenError::Replayed { .. } => OpenError::Replayed { path: path(), number: 3, seen_number: 9, seen: path() }, "/data/store";
        OpenError::NeedsKey(_) => OpenError::NeedsKey(path()), "/data/store";
        OpenError::Newer { .. } => OpenError::Newer { path: path(), found: 9, known: 2 }, "/data/store";
        OpenError::Locked { .. } => OpenError::Locked { job: text("train"), pid: text("77"), is_maintenance: false }, "process 77";
        OpenError::BadName(_) => OpenError::BadName(text("a/b")), "a/b";
    });
    each!(ReadError {
        ReadError::Missing(_) => ReadError::Missing(text("000007")), "000007";
        ReadError::Ambiguous { .. } => ReadError::Ambiguous { text: text("00"), candidates: text("001, 002") }, "001, 002";
        ReadError::Damaged { .. } => ReadError::Damaged { id: text("000007"), damage: Damage::Checksum { path: text("a") } }, "000007";
        ReadError::Newer { .. } => ReadError::Newer { id: text("000007"), found: 9, known: 2 }, "000007";
        ReadError::NewerObject { .. } => ReadError::NewerObject { what: text("packs/p.index"), found: 9, known: 1 }, "packs/p.index";
        ReadError::Hostile { .. } => ReadError::Hostile { id: text("000007"), source: RelPathError(text("../x")) }, "../x";
        ReadError::Key { .. } => ReadError::Key { what: text("the snapshot 000007"), reason: "it is encrypted" }, "000007";
        ReadError::Target { .. } => ReadError::Target { path: text("images/pages"), source: fire() }, "images/pages";
        ReadError::Id(_) => ReadError::Id(IdError(text("x"))), "\"x\"";
        ReadError::Io { .. } => ReadError::Io { step: "read", path: path(), source: fire() }, "/data/store";
    });
    each!(SaveError {
        SaveError::NoSpace { .. } => SaveError::NoSpace { path: path(), needed_bytes: 9, available_bytes: 1 }, "/data/store";
        SaveError::Source { .. } => SaveError::Source { path: text("images/pages"), source: fire() }, "images/pages";
        SaveError::Taken(_) => SaveError::Taken(text("000007")), "000007";
        SaveError::Overtaken(_) => SaveError::Overtaken(text("000007")), "000007";
        SaveError::Store(_) => ReadError::Missing(text("000007")).into(), "000007";
        SaveError::Io { .. } => SaveError::Io { step: "write", path: path(), source: fire() }, "/data/store";
    });
}

/// Damage is shown as the reason for which a snapshot is skipped.
#[test]
fn of_damage() {
    let damaged = |damage| ReadError::Damaged { id: text("000007"), damage };
    macro_rules! each_damage {
        ($($variant:pat => $example:expr, $object:expr;)*) => {{
            let _ = |damage: &Damage| match damage { $($variant => {})* };
            $(check(damaged($example), "000007"); check(damaged($example), $object);)*
        }};
    }
    each_damage! {
        Damage::Manifest(_) => Damage::Manifest(text("it is cut off")), "cut off";
        Damage::ManifestChecksum { .. } => Damage::ManifestChecksum { found: text("aa"), recorded: text("bb") }, "recorded bb";
        Damage::WrongId(_) => Damage::WrongId(text("000008")), "000008";
        Damage::Unreadable { .. } => Damage::Unreadable { path: text("images/a"), source: fire() }, "images/a: the device";
        Damage::NoChunk { .. } => Damage::NoChunk { path: text("images/a"), chunk: text("c1") }, "c1";
        Damage::Object { .. } => Damage::Object { object: text("packs/p"), reason: text("it is cut off") }, "packs/p";
        Damage::Length { .. } => Damage::Length { path: text("images/a"), found: 1, recorded: 2 }, "images/a";
        Damage::Checksum { .. } => Damage::Checksum { path: text("images/a") }, "images/a";
        Damage::Lacking { .. } => Damage::Lacking { path: text("images/a") }, "`ckpt-run verify`";
    }
}

#[test]
fn of_copies_keys_and_addresses() {
    each!(CopyError {
        CopyError::Cancelled => CopyError::Cancelled, "cancelled";
        CopyError::NoTier { .. } => CopyError::NoTier { name: text("moon"), known: text("disk") }, "moon";
        CopyError::Read(_) => ReadError::Missing(text("000007")).into(), "000007";
        CopyError::Save(_) => SaveError::Taken(text("000007")).into(), "000007";
    });
    each!(KeyError {
        KeyError::Io { .. } => KeyError::Io { path: path(), source: fire() }, "/data/store";
        KeyError::NotPrivate { .. } => KeyError::NotPrivate { path: path(), mode: 0o644 }, "chmod 600 /data/store";
        KeyError::NoKey { .. } => KeyError::NoKey { path: path(), reason: "is empty" }, "/data/store is empty";
    });
    each!(StoreUrlError {
        StoreUrlError::Scheme(_) => StoreUrlError::Scheme(text("ftp")), "ftp://";
        StoreUrlError::Malformed(..) => StoreUrlError::Malformed(text("x"), text("it has no scheme")), "x does not read";
        StoreUrlError::NoBucket(..) => StoreUrlError::NoBucket(text("s3:///"), "s3://BUCKET/PREFIX"), "s3:///";
        StoreUrlError::NoDirectory(_) => StoreUrlError::NoDirectory(text("file://x")), "file://x";
        StoreUrlError::Credentials { .. } => StoreUrlError::Credentials { scheme: text("s3"), instead: "AWS_X" }, "AWS_X";
        StoreUrlError::Query { .. } => StoreUrlError::Query { scheme: text("s3"), instead: "AWS_X" }, "AWS_X";
        StoreUrlError::Prefix(_) => StoreUrlError::Prefix(text("a//b")), "a//b";
    });
}

#[test]
fn of_criu_and_namespaces() {
    each!(CriuMissing {
        CriuMissing::NotFound => CriuMissing::NotFound, "CRIU";
        CriuMissing::Broken { .. } => CriuMissing::Broken { path: path(), reason: text("it is a directory") }, "/data/store";
        CriuMissing::NoProcess { .. } => CriuMissing::NoProcess { path: path(), reason: no_process().to_string() }, "/data/store";
        CriuMissing::Unsupported { .. } => CriuMissing::Unsupported { reason: text("the CPU has SVE. Use the kernel parameter arm64.nosve") }, "SVE";
        CriuMissing::TooOld { .. } => CriuMissing::TooOld { path: path(), found: MIN_VERSION, needed: MIN_VERSION }, "/data/store";
    });
    each!(SessionError {
        SessionError::Timeout => SessionError::Timeout, "CRIU";
        SessionError::Stalled(_) => SessionError::Stalled(Duration::from_secs(30)), "30 seconds";
        SessionError::Withdrawn => SessionError::Withdrawn, "not wanted";
        SessionError::Died => SessionError::Died, "CRIU";
        SessionError::Failed(_) => SessionError::Failed(Some(text("no such PID"))), "no such PID";
        SessionError::Refused(_) => SessionError::Refused(text("process 7 (python3)")), "process 7 (python3)";
        SessionError::Stage(_) => SessionError::Stage(text("cannot read /dev/shm/a")), "/dev/shm/a";
        SessionError::Io(_) => fire().into(), "CRIU";
    });
    each!(ImageError {
        ImageError::Io { .. } => ImageError::Io { name: text("files.img"), source: fire() }, "files.img";
        ImageError::Format { .. } => ImageError::Format { name: text("files.img"), reason: text("it is cut off") }, "files.img";
    });
    each!(NamespaceError {
        NamespaceError::Create(_) => NamespaceError::Create(fire()), "PID namespace";
        NamespaceError::Rights { .. } => NamespaceError::Rights { uid: 7, missing: text("CAP_SYS_PTRACE (looking)") }, "user ID 7";
        NamespaceError::NoUserNamespace { .. } => NamespaceError::NoUserNamespace { uid: 7, reason: text("no space") }, "user ID 7";
        NamespaceError::PrivateDir(_) => NamespaceError::PrivateDir(fire()), "private directory";
        NamespaceError::Refused(_) => NamespaceError::Refused(text("cannot mount /proc")), "/proc";
        NamespaceError::Ended => NamespaceError::Ended, "namespace";
    });
    each!(StartError {
        StartError::Command(_) => StartError::Command(fire()), "the command";
        StartError::Namespace(_) => NamespaceError::Create(fire()).into(), "PID namespace";
    });
    each!(FrameError {
        FrameError::Closed => FrameError::Closed, "connection";
        FrameError::TooLong { .. } => FrameError::TooLong { bytes: 1 << 40 }, "1099511627776";
        FrameError::Truncated { .. } => FrameError::Truncated { got: 1, want: 2 }, "1 of a frame's 2 bytes";
        FrameError::NotJson(_) => FrameError::NotJson(serde_json::from_str::<u8>("x").unwrap_err()), "JSON";
        FrameError::NotSerialisable(_) => FrameError::NotSerialisable(serde_json::from_str::<u8>("x").unwrap_err()), "JSON";
        FrameError::Io { .. } => FrameError::Io { step: "read", source: fire() }, "failed to read: the device";
    });
}

#[test]
fn of_checkpoints() {
    each!(QuiesceError {
        QuiesceError::Refused { .. } => QuiesceError::Refused { process: process(), reason: text("it uses managed memory"), others: 2 }, "python3";
        QuiesceError::Deadline { .. } => QuiesceError::Deadline { deadline: Duration::from_secs(3), unanswered: vec![process()] }, "python3";
        QuiesceError::Resume { .. } => QuiesceError::Resume { given_up: Box::new(QuiesceError::NotListening), source: fire() }, "interposer";
        QuiesceError::NoCut { .. } => QuiesceError::NoCut { reason: text("process 7 waits after ncclAllReduce"), after: Duration::from_secs(33) }, "ncclAllReduce";
        QuiesceError::Withdrawn => QuiesceError::Withdrawn, "is being ended";
        QuiesceError::NotListening => QuiesceError::NotListening, "agents";
        QuiesceError::NoMemory { .. } => QuiesceError::NoMemory { needed_bytes: 9, available_bytes: 1 }, "9 B";
        QuiesceError::Mirror { .. } => QuiesceError::Mirror { process: process(), source: fire() }, "python3";
    });
    let claimed = || ClaimedElsewhere { job: text("train"), by: text(" (on the machine node7)") };
    each!(OwnershipError {
        OwnershipError::ClaimedElsewhere(_) => claimed().into(), "the job train";
        OwnershipError::Store(_) => OpenError::NotAStore(path()).into(), "/data/store";
    });
    let log = || PathBuf::from("/data/store/attempts/1");
    let report = crate::gpu::device_memory::ReportError::example;
    use crate::gpu::device_memory::StoreDeviceMemoryError;
    each!(AttemptError {
        AttemptError::Save(_) => SaveError::Taken(text("000007")).into(), "000007";
        AttemptError::Store(_) => OpenError::NotAStore(path()).into(), "/data/store";
        AttemptError::ClaimedElsewhere(_) => claimed().into(), "(on the machine node7)";
        AttemptError::List(_) => ReadError::Io { step: "read", path: path(), source: fire() }.into(), "/data/store";
        AttemptError::Dump { .. } => AttemptError::Dump { reason: text("process 7 has a raw socket"), log: log() }, "attempts/1";
        AttemptError::Stray(_) => AttemptError::Stray(7), "process 7";
        AttemptError::Broken(_) => AttemptError::Broken(text("process 7 has a timer")), "process 7";
        AttemptError::Agents(_) => QuiesceError::NotListening.into(), "agents";
        AttemptError::DeviceMemory(_) => StoreDeviceMemoryError::from(report(process())).into(), "python3";
        AttemptError::Frozen { .. } => AttemptError::Frozen { limit: Duration::from_secs(60), log: log() }, "1m";
        AttemptError::ShortMemory { .. } => AttemptError::ShortMemory { bytes: 3 << 30 }, "3.22 GB";
        AttemptError::SlowStore { .. } => AttemptError::SlowStore { store: text("/data/store"), limit: Duration::from_secs(60) }, "/data/store";
        AttemptError::Staging(_) => AttemptError::Staging(fire()), "stage the images";
        AttemptError::Image(_) => ImageError::Format { name: text("files.img"), reason: text("it is cut off") }.into(), "files.img";
        AttemptError::Crashed => AttemptError::Crashed, "a bug in ckpt-run";
        AttemptError::JobEnded => AttemptError::JobEnded, "the job ended";
        AttemptError::Withdrawn => AttemptError::Withdrawn, "is being ended";
        AttemptError::Nodes(_) => AttemptError::Nodes(text("not in time: node 7")), "node 7";
        AttemptError::NoMemory(_) => AttemptError::NoMemory("there is none"), "there is none";
        AttemptError::Namespace(_) => AttemptError::Namespace(NamespaceError::Refused(text("cannot read /proc/7"))), "/proc/7";
    });
}

/// Causes below a context and below the mark of bad input are shown once too.
#[test]
fn of_wrapped_errors() {
    use crate::sys::error::bad_input;
    use anyhow::Context;
    let key = || KeyError::Io { path: path(), source: fire() };
    check(bad_input(key()), "cannot read the key file /data/store: the device is on fire");
    check(
        bad_input(anyhow::Error::from(key()).context("setting up")),
        "setting up: cannot read the key file",
    );
    let nested = Err::<(), _>(fire()).context("cannot list jobs").context("cannot prune").unwrap_err();
    check(nested, "cannot prune: cannot list jobs: the device is on fire. Check `dmesg`");
    // A message that occurs in an outer one by chance is not lost.
    let error = anyhow::anyhow!("read").context("cannot read /data/store");
    assert_eq!(with_remedy(&error), "cannot read /data/store: read");
}

#[test]
fn a_failing_disk_is_no_bad_input() {
    use crate::report::failure::exit_code;
    use io::ErrorKind;
    let code = |error: anyhow::Error| exit_code(&error, 125);
    let open = |kind: ErrorKind| OpenError::Io { step: "open", path: path(), source: kind.into() };
    let read = |kind: ErrorKind| ReadError::Io { step: "read", path: path(), source: kind.into() };
    for kind in [ErrorKind::PermissionDenied, ErrorKind::ReadOnlyFilesystem] {
        assert_eq!((code(open(kind).into()), code(read(kind).into())), (2, 2), "{kind}");
    }
    for kind in [ErrorKind::NotFound, ErrorKind::NotADirectory, ErrorKind::AlreadyExists] {
        assert_eq!((code(open(kind).into()), code(read(kind).into())), (2, 125), "{kind}");
    }
    for kind in
        [ErrorKind::Other, ErrorKind::StorageFull, ErrorKind::TimedOut, ErrorKind::StaleNetworkFileHandle]
    {
        assert_eq!((code(open(kind).into()), code(read(kind).into())), (125, 125), "{kind}");
    }
    assert_eq!(code(OpenError::NotAStore(path()).into()), 2);
    assert_eq!(code(ReadError::Missing(text("7")).into()), 2);
    assert_eq!(code(ReadError::Damaged { id: text("7"), damage: Damage::Manifest(text("x")) }.into()), 125);
}

#[test]
fn only_a_failed_save_promises_that_nothing_was_lost() {
    let save = || SaveError::Io { step: "write", path: path(), source: fire() };
    for error in [save().into(), AttemptError::from(save()).into(), CopyError::from(save()).into()] {
        assert!(with_remedy(&error).ends_with("try again: earlier snapshots are intact"), "{error}");
    }
    let read = anyhow::Error::from(ReadError::Io { step: "read", path: path(), source: fire() });
    assert!(with_remedy(&read).ends_with("the file system, and try again"), "{}", with_remedy(&read));
}
