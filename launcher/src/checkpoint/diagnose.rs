//! Names the processes and open files that prevent a checkpoint, for the error message.

use crate::criu::Holder;
use crate::gpu::preload;
use crate::namespace::Survey;
use crate::sys::path_text::read_text;
use crate::sys::privileges::Privileges;
use ckpt_protocol::devices;
use std::borrow::Cow;
use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::path::Path;

/// Devices that are the same on every machine, or that CRIU can restore.
const HARMLESS_DEVICES: &[&str] =
    &["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx"];

const STRANGE_SOCKET: &str = "is a socket of a kind that cannot be saved";

/// (prefix of the descriptor's target, what it is, what to do about it)
const REFUSED: &[(&str, &str, &str)] = &[
    (
        "anon_inode:[perf_event]",
        "a performance counter (perf_event_open)",
        "stop profiling while checkpoints are wanted",
    ),
    ("anon_inode:[userfaultfd]", "a userfaultfd", "it cannot be saved; run the program without it"),
    (
        "anon_inode:[io_uring]",
        "an io_uring",
        "it was opened by a process that ckpt-run did not start, or ckpt-run has no CAP_SYS_ADMIN to forbid it (`ckpt-run docs privileges`)",
    ),
    ("anon_inode:kvm", "a virtual machine", "virtual machines have their own snapshots"),
    ("/dev/kvm", "the virtual machine device /dev/kvm", "virtual machines have their own snapshots"),
    ("/dev/fuse", "a FUSE file system that it serves", "serve the file system from outside of the job"),
    ("/dev/net/tun", "a network tunnel", "set the tunnel up outside of the job"),
    ("/dev/vhost", "a virtual machine's network", "virtual machines have their own snapshots"),
];

/// Prefix of the paths of NVIDIA's devices.
const GPU: &str = "/dev/nvidia";

/// After a failed dump: checks the descriptors of every process of the job. `proc` is the job's /proc, `log` is CRIU's
/// log, `has_agents` is whether any agent of the interposer has connected.
#[must_use]
pub fn unsavable(proc: &Path, pids: &[i32], log: &str, has_agents: bool) -> Vec<String> {
    let mut found: Vec<String> =
        pids.iter().flat_map(|pid| of_process(&proc.join(pid.to_string()), *pid, has_agents)).collect();
    // A TCP socket that is neither bound nor connected is in no table of the kernel either. The guess is reported only if
    // CRIU failed at a socket.
    if !log.lines().any(|line| line.contains("Error (") && line.contains("sock")) {
        found.retain(|one| !one.contains(STRANGE_SOCKET));
    }
    shortened(found)
}

/// Before a dump: finds what CRIU dumps without an error but does not restore. `root_pid` is the root of the job's
/// process tree.
#[must_use]
pub fn broken_by_a_restore(proc: &Path, root_pid: i32, pids: &[i32]) -> Vec<String> {
    let namespaces = |pid: i32| {
        ["mnt", "net"].map(|kind| fs::read_link(proc.join(pid.to_string()).join("ns").join(kind)).ok())
    };
    let ours = namespaces(root_pid);
    let mut found = breaking_leases(proc, pids);
    for &pid in pids {
        let dir = proc.join(pid.to_string());
        let name = read_text(dir.join("comm")).unwrap_or_default();
        let who = format!("process {pid} ({})", name.trim());
        let theirs = namespaces(pid);
        let apart = |kind: usize| theirs[kind].is_some() && theirs[kind] != ours[kind];
        if apart(0) || apart(1) {
            let kind = if apart(0) { "mount" } else { "network" };
            found.push(format!("{who} has a {kind} namespace of its own, which CRIU cannot restore: start it outside of the job"));
        }
        for entry in fs::read_dir(dir.join("fd")).into_iter().flatten().flatten() {
            let is_eventfd =
                fs::read_link(entry.path()).is_ok_and(|target| target.as_os_str() == "anon_inode:[eventfd]");
            let info = || read_text(dir.join("fdinfo").join(entry.file_name())).unwrap_or_default();
            if is_eventfd && info().lines().any(|line| line.replace('\t', " ") == "eventfd-semaphore: 1") {
                let fd = entry.file_name();
                found.push(format!(
                    "{who}, descriptor {} is an eventfd in semaphore mode, which CRIU restores as a plain one",
                    fd.to_string_lossy()
                ));
            }
        }
    }
    found.truncate(3);
    found
}

/// Before anything is detached: finds devices with which memory of a GPU may be registered, and a GPU in MIG mode. To take
/// such memory off the GPU and put other memory in its place would have the device write elsewhere.
#[must_use]
pub fn not_to_be_detached(proc: &Path, pids: &[i32]) -> Vec<String> {
    let dev = directory_of_devices();
    let mut found = Vec::new();
    for &pid in pids {
        let dir = proc.join(pid.to_string());
        let fds = fs::read_dir(dir.join("fd")).into_iter().flatten().flatten();
        let open = fds.filter_map(|entry| {
            let target = fs::read_link(entry.path()).ok()?;
            Some((format!("descriptor {}", entry.file_name().display()), target.to_str()?.to_owned()))
        });
        let maps = read_text(dir.join("maps")).unwrap_or_default();
        let mapped = maps.lines().filter_map(|line| {
            let (range, path) = (line.split(' ').next()?, devices::path_of_mapping(line)?);
            Some((format!("the mapping {range}"), path.to_owned()))
        });
        let mut all = open.chain(mapped);
        // A process has several of each device: one is enough.
        if let Some((what, device)) = all.find_map(|(what, path)| Some((what, devices::find(&path, &dev)?))) {
            let name = read_text(dir.join("comm")).unwrap_or_default();
            found.push(format!(
                "process {pid} ({}), {what} is {}: {}",
                name.trim(),
                device.what,
                device.remedy
            ));
        }
    }
    shortened(found)
}

/// The directory of devices, with a slash at its end.
fn directory_of_devices() -> Cow<'static, str> {
    #[cfg(feature = "faults")]
    if let Ok(simulated) = std::env::var("CKPT_TEST_DEVICES") {
        return simulated.into();
    }
    "/dev/".into()
}

/// A hundred workers may have the same: three are enough.
fn shortened(mut found: Vec<String>) -> Vec<String> {
    let more = found.len().saturating_sub(3);
    found.truncate(3);
    if more > 0 {
        found.push(format!("and {more} more"));
    }
    found
}

/// Leases of the job's files for which another program waits. CRIU takes them again and breaks them again, and the holder
/// gets the signal a second time.
fn breaking_leases(proc: &Path, pids: &[i32]) -> Vec<String> {
    let locks = read_text(proc.join("locks")).unwrap_or_default();
    let holder = |line: &str| -> Option<i32> {
        let words: Vec<_> = line.split_whitespace().collect();
        (words.get(1..3)? == ["LEASE", "BREAKING"]).then(|| words.get(4)?.parse().ok())?
    };
    let holders: BTreeSet<i32> = locks.lines().filter_map(holder).filter(|pid| pids.contains(pid)).collect();
    let describe = |pid: i32| {
        let name = read_text(proc.join(format!("{pid}/comm"))).unwrap_or_default();
        let name = name.trim();
        format!(
            "process {pid} ({name}) has a lease of a file that another program is about to open, and would be told so twice: try again when it has given the lease up"
        )
    };
    holders.into_iter().map(describe).collect()
}

/// After a dump: why messages with descriptors keep it from being a snapshot. `sockets` are those of
/// [`crate::criu::UnixQueues::lost`].
#[must_use]
pub fn unreceived(proc: &Path, sockets: &BTreeSet<Option<Holder>>) -> String {
    format!(
        "{}: messages with descriptors (SCM_RIGHTS) wait in the queue of this unix socket, and CRIU would lose them at a resume. The checkpoint succeeds once they are received",
        holders(proc, sockets)
    )
}

/// The same for messages of length zero. `sockets` are those of [`crate::criu::EmptyMessagesError::Lost`].
#[must_use]
pub fn empty_messages(proc: &Path, sockets: &BTreeSet<Option<Holder>>) -> String {
    format!(
        "{}: a message of length zero with descriptors (SCM_RIGHTS), or together with such messages, waits in the queue of this unix socket, and CRIU would lose them at a resume. The checkpoint succeeds once they are received",
        holders(proc, sockets)
    )
}

fn holders(proc: &Path, sockets: &BTreeSet<Option<Holder>>) -> String {
    let describe = |socket: &Option<Holder>| {
        let Some(Holder { pid, fd }) = socket else { return "a socket in a message".to_owned() };
        let name = read_text(proc.join(format!("{pid}/comm"))).unwrap_or_default();
        format!("process {pid} ({}), descriptor {fd}", name.trim())
    };
    shortened(sockets.iter().map(describe).collect()).join("; ")
}

/// Before a dump without root: finds what CRIU, for lack of privileges, would restore wrong or not at all, see
/// docs/privileges.md. `terminal` is the terminal that ckpt-run has given to the job.
#[must_use]
pub fn beyond_our_rights(proc: &Path, survey: &Survey, terminal: Option<String>) -> Vec<String> {
    let rights = Privileges::detect();
    let mut found = Vec::new();
    if survey.lost_ipc > 0 {
        found.push(format!(
            "the job has {} SysV semaphores, shared memory segments or message queues, which can be saved by root only: use POSIX ones, or run ckpt-run as root",
            survey.lost_ipc
        ));
    }
    if rights.has_real_rights() {
        return found;
    }
    // CRIU takes a mapped memfd for anonymous shared memory. If the memfd is also open, or mapped privately, the restored
    // memory is not the same.
    let mut open_memfd = false;
    let mut mapped_memfd = None;
    for &pid in &survey.pids {
        let dir = proc.join(pid.to_string());
        let name = read_text(dir.join("comm")).unwrap_or_default();
        let who = format!("process {pid} ({})", name.trim());
        let maps = read_text(dir.join("maps")).unwrap_or_default();
        let mut memfds = maps.lines().filter(|line| line.contains(" /memfd:")).peekable();
        if memfds.peek().is_some() {
            open_memfd |= memfds.any(|line| line.split(' ').nth(1).is_some_and(|mode| mode.ends_with('p')));
            mapped_memfd = Some(who.clone());
        }
        let fds = fs::read_dir(dir.join("fd")).into_iter().flatten().flatten();
        let targets = fds.filter_map(|fd| fs::read_link(fd.path()).ok()?.into_os_string().into_string().ok());
        let targets: Vec<String> = targets.collect();
        open_memfd |= targets.iter().any(|target| target.starts_with("/memfd:"));
        let is_own_terminal = |target: &String| {
            (target.starts_with("/dev/pts/") || target == "/dev/ptmx") && Some(target) != terminal.as_ref()
        };
        if rights.wants_user_namespace() && targets.iter().any(is_own_terminal) {
            found.push(format!("{who} has created a terminal, whose group cannot be restored without CAP_SYS_ADMIN: run ckpt-run as root"));
        }
    }
    if let (Some(who), true) = (mapped_memfd, open_memfd) {
        found.push(format!("{who} has a memfd mapped, which cannot be restored as one without CAP_SYS_ADMIN in the initial user namespace: run ckpt-run as root"));
    }
    found.truncate(3);
    found
}

fn of_process(dir: &Path, pid: i32, has_agents: bool) -> Vec<String> {
    let name = read_text(dir.join("comm")).unwrap_or_default();
    let who = |fd: &str| format!("process {pid} ({}), descriptor {fd}", name.trim());
    let mut known_sockets = None;
    let mut found = Vec::new();
    let mut has_gpu = false;
    for entry in fs::read_dir(dir.join("fd")).into_iter().flatten().flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let (fd, target) = (entry.file_name(), target.to_string_lossy().into_owned());
        let fd = who(&fd.to_string_lossy());
        if let Some(device) = devices::find(&target, "/dev/") {
            found.push(format!("{fd} is {}: {}", device.what, device.remedy));
        } else if let Some((_, what, remedy)) = REFUSED.iter().find(|(start, ..)| target.starts_with(start)) {
            found.push(format!("{fd} is {what}: {remedy}"));
        } else if target.starts_with(GPU) {
            // A process has dozens of them: one is enough.
            if !std::mem::replace(&mut has_gpu, true) {
                found.push(format!("{fd} is the GPU: {}", gpu_remedy(dir, has_agents)));
            }
        } else if let Some(inode) = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')) {
            let known = known_sockets.get_or_insert_with(|| socket_inodes(dir));
            if !known.contains(inode) {
                found.push(format!("{fd} {STRANGE_SOCKET} (vsock, AF_ALG or the like): close it"));
            }
        } else if target.starts_with("/dev/") && is_strange_device(&entry.path(), &target) {
            found.push(format!("{fd} is the device {target}: it cannot be saved"));
        }
    }
    found
}

/// Why the interposer has not detached the process from the GPU, and what to do.
fn gpu_remedy(dir: &Path, has_agents: bool) -> &'static str {
    let maps = read_text(dir.join("maps")).unwrap_or_default();
    if maps.contains(preload::LIBRARY) {
        "the interposer is loaded but has not seen how the process opened the GPU; please report the program"
    } else if has_agents {
        "the interposer is not in this process: it was started without LD_PRELOAD, is statically linked, or is setuid; check /proc/PID/environ and `file PROGRAM`"
    } else {
        "the job runs without the interposer, which saves GPU state; `ckpt-run config` says why (--interpose). It has to be loaded when the job starts"
    }
}

fn is_strange_device(path: &Path, target: &str) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let harmless = HARMLESS_DEVICES.contains(&target)
        || target.starts_with("/dev/pts/")
        || target.starts_with("/dev/shm/");
    !harmless
        && fs::metadata(path)
            .is_ok_and(|meta| meta.file_type().is_char_device() || meta.file_type().is_block_device())
}

/// Inode numbers of all sockets of the kinds that CRIU supports, in the network namespace of the process.
fn socket_inodes(dir: &Path) -> HashSet<String> {
    const TABLES: &[(&str, usize)] = &[
        ("tcp", 9),
        ("tcp6", 9),
        ("udp", 9),
        ("udp6", 9),
        ("udplite", 9),
        ("udplite6", 9),
        ("raw", 9),
        ("raw6", 9),
        ("icmp", 9),
        ("icmp6", 9),
        ("unix", 6),
        ("packet", 8),
        ("netlink", 9),
    ];
    let mut inodes = HashSet::new();
    for (table, column) in TABLES {
        let text = read_text(dir.join("net").join(table)).unwrap_or_default();
        inodes.extend(
            text.lines().skip(1).filter_map(|line| Some(line.split_whitespace().nth(*column)?.to_owned())),
        );
    }
    inodes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;

    #[test]
    fn an_ordinary_process_has_nothing_strange() {
        // Not this process: other tests open strange descriptors in it.
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let (end, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut command = std::process::Command::new("sleep");
        command.arg("1000").stdin(OwnedFd::from(end)).stdout(OwnedFd::from(socket));
        command.stderr(std::process::Stdio::null());
        let mut child = command.spawn().unwrap();
        let found = unsavable(Path::new("/proc"), &[child.id().cast_signed()], "", false);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, Vec::<String>::new());
    }

    /// A process in a /proc of our own, with these descriptors and this memory map.
    fn process(descriptors: &[&str], maps: &str) -> tempfile::TempDir {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir_all(proc.path().join("7/fd")).unwrap();
        for (number, target) in descriptors.iter().enumerate() {
            std::os::unix::fs::symlink(target, proc.path().join(format!("7/fd/{number}"))).unwrap();
        }
        fs::write(proc.path().join("7/comm"), "train\n").unwrap();
        fs::write(proc.path().join("7/maps"), maps).unwrap();
        proc
    }

    #[test]
    fn devices_that_memory_is_registered_with_are_found_before_the_detach() {
        let mapped =
            "7f0000000000-7f0000001000 rw-s 00000000 00:06 5                  /dev/infiniband/uverbs0\n";
        for (descriptors, maps, wanted) in [
            (&["/dev/null", "/dev/gdrdrv"][..], "", "process 7 (train), descriptor 1 is GDRCopy's device"),
            (&["/dev/nvidia-fs0"], "", "cuFileDriverClose"),
            (&["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap3"], "", "MIG"),
            (&[], mapped, "the mapping 7f0000000000-7f0000001000 is an RDMA device"),
        ] {
            let proc = process(descriptors, maps);
            let said = not_to_be_detached(proc.path(), &[7]);
            assert!(said.len() == 1 && said[0].contains(wanted), "{wanted}: {said:?}");
        }
        let map = "7f0000000000-7f0000001000 rw-s 00000000 00:06 5                          /dev/nvidia0\n";
        let proc = process(&["/dev/nvidia0", "/dev/nvidia-uvm"], map);
        assert_eq!(not_to_be_detached(proc.path(), &[7]), Vec::<String>::new());
    }

    #[test]
    fn an_open_gpu_is_reported_once_with_the_fitting_remedy() {
        let map = "7f0000000000-7f0000001000 r-xp 00000000 08:01 5 /usr/lib/libckpt_interpose.so\n";
        for (maps, has_agents, wanted) in [
            ("", false, "the job runs without the interposer"),
            ("", true, "is not in this process"),
            (map, true, "please report"),
        ] {
            let proc = process(&["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"], maps);
            let said = unsavable(proc.path(), &[7], "", has_agents);
            assert_eq!(said.len(), 1, "{said:?}");
            assert!(said[0].contains("process 7 (train)") && said[0].contains(wanted), "{said:?}");
        }
    }
}
