//! Surveying the job's processes inside their namespace, and restoring CPU affinity, which CRIU does not.

use super::descriptors;
use super::messages::Reply;
use crate::sys::privileges::Privileges;
use ckpt_snapshot::AffinityGroup;
use rustix::io::ioctl_fionread;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeMap;
use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Surveys all processes but the init and those in `except`; `root_pid` is the root of the job's tree.
pub(super) fn scan(except: &[i32], root_pid: Option<i32>) -> io::Result<Reply> {
    let mut groups: BTreeMap<Vec<u32>, Vec<i32>> = BTreeMap::new();
    let mut memory_bytes = 0;
    let mut parents = BTreeMap::new();
    let mut files = BTreeMap::new();
    for pid in numbers_in("/proc")? {
        if pid == 1 || except.contains(&pid) {
            continue;
        }
        // A process that ends during the survey is skipped.
        let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { continue };
        parents.insert(pid, parent(&status));
        memory_bytes += dumped_bytes(&status);
        files.extend(files_in_memory(pid));
        for tid in numbers_in(format!("/proc/{pid}/task")).unwrap_or_default() {
            if let Ok(cpus) = sched_getaffinity(Pid::from_raw(tid)) {
                groups.entry(cpu_numbers(&cpus)).or_default().push(tid);
            }
        }
    }
    memory_bytes += files.values().sum::<u64>();
    let last_pid = std::fs::read_to_string("/proc/sys/kernel/ns_last_pid")?;
    let last_pid = last_pid.trim().parse().map_err(io::Error::other)?;
    let affinity = groups.into_iter().map(|(cpus, tids)| AffinityGroup { cpus, tids }).collect();
    let pids: Vec<i32> = parents.keys().copied().collect();
    let strays = pids.iter().copied().filter(|&pid| !is_below(pid, root_pid, &parents)).collect();
    Ok(Reply::Surveyed { affinity, last_pid, memory_bytes, pids, strays, lost_ipc: lost_ipc() })
}

/// Number of objects in the IPC namespace of the init. A job of root has a separate IPC namespace, which is in the dump.
fn lost_ipc() -> usize {
    if Privileges::detect().is_root() {
        return 0;
    }
    let kinds = ["shm", "sem", "msg"].map(|kind| std::fs::read_to_string(format!("/proc/sysvipc/{kind}")));
    // The first line is a heading.
    kinds.iter().flatten().map(|table| table.lines().count().saturating_sub(1)).sum()
}

fn parent(status: &str) -> i32 {
    let value = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}

fn is_below(pid: i32, root_pid: Option<i32>, parents: &BTreeMap<i32, i32>) -> bool {
    let mut at = pid;
    while Some(at) != root_pid {
        match parents.get(&at) {
            Some(&parent) => at = parent,
            // An unknown parent is the init, or has just ended and its child will be adopted by the root. Only a child of
            // the init is outside of the tree.
            None => return at != 1,
        }
    }
    true
}

/// Answers [`super::messages::Request::QueuedBytes`].
pub(super) fn queues(sockets: &[(i32, i32)]) -> Reply {
    Reply::QueuedBytes { bytes: sockets.iter().map(|&(pid, fd)| queued_bytes(pid, fd).ok()).collect() }
}

/// Bytes in the queue of a process's socket.
fn queued_bytes(pid: i32, fd: i32) -> io::Result<u64> {
    let socket = descriptors::open(pid, fd)?.ok_or(io::ErrorKind::NotFound)?;
    Ok(ioctl_fionread(&socket)?)
}

pub fn numbers_in(dir: impl AsRef<Path>) -> io::Result<Vec<i32>> {
    let names = std::fs::read_dir(dir)?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    Ok(names.collect())
}

/// The PID namespace of a process, by its inode; `None` for one that has ended or may not be looked at.
pub fn pid_namespace_of(pid: i32) -> Option<u64> {
    std::fs::metadata(format!("/proc/{pid}/ns/pid")).ok().map(|meta| meta.ino())
}

/// Bytes of a process's memory that a dump contains: anonymous, shared and swapped memory in /proc/PID/status.
fn dumped_bytes(status: &str) -> u64 {
    let kilobytes = |line: &str| {
        let value = ["RssAnon:", "RssShmem:", "VmSwap:"].iter().find_map(|name| line.strip_prefix(name))?;
        value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    status.lines().filter_map(kilobytes).sum::<u64>() * 1024
}

/// The open files that a dump copies, by device and inode, with the bytes that they occupy: files in /dev/shm, memory files
/// (memfd), and files without a name. What a process has mapped of them may be counted twice.
fn files_in_memory(pid: i32) -> Vec<((u64, u64), u64)> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let is_copied = |target: &Path| {
        let target = target.as_os_str().as_bytes();
        // A mirror of device memory, which agents close before the dump.
        if target.starts_with(b"/#") || target.starts_with(b"/memfd:ckpt-") {
            return false;
        }
        target.starts_with(b"/dev/shm/") || target.starts_with(b"/memfd:") || target.ends_with(b" (deleted)")
    };
    fds.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|target| is_copied(&target)))
        .filter_map(|fd| std::fs::metadata(fd.path()).ok())
        .filter(Metadata::is_file)
        .map(|meta| ((meta.dev(), meta.ino()), meta.blocks() * 512))
        .collect()
}

fn cpu_numbers(cpus: &CpuSet) -> Vec<u32> {
    let numbers = (0..CpuSet::MAX_CPU).filter(|&cpu| cpus.is_set(cpu));
    numbers.filter_map(|cpu| u32::try_from(cpu).ok()).collect()
}

/// Sets the CPU affinity of each thread; returns warnings for threads that could not be set.
pub(super) fn set_affinity(groups: &[AffinityGroup]) -> Vec<String> {
    let mut warnings = Vec::new();
    for group in groups {
        let mut cpus = CpuSet::new();
        let numbers = group.cpus.iter().map(|&cpu| cpu as usize);
        numbers.filter(|&cpu| cpu < CpuSet::MAX_CPU).for_each(|cpu| cpus.set(cpu));
        let failed = group.tids.iter().filter_map(|&tid| sched_setaffinity(Pid::from_raw(tid), &cpus).err());
        let failed: Vec<_> = failed.collect();
        if let Some(error) = failed.first() {
            let (count, cpus) = (failed.len(), &group.cpus);
            warnings.push(format!("cannot bind {count} threads to the CPUs {cpus:?} again: {error}"));
        }
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_outside_of_the_tree_are_recognized() {
        let parents = BTreeMap::from([(10, 1), (11, 10), (12, 11), (20, 1), (21, 20), (30, 29)]);
        let below = |pid| is_below(pid, Some(10), &parents);
        assert!(below(10) && below(12) && below(30));
        assert!(!below(20) && !below(21));
    }

    #[test]
    fn files_in_memory_are_counted() {
        use std::io::Write;
        let mut file =
            std::fs::File::from(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.write_all(&vec![1; 1 << 20]).unwrap();
        let mut unlinked = tempfile::tempfile().unwrap();
        unlinked.write_all(&vec![1; 1 << 20]).unwrap();
        unlinked.sync_all().unwrap();
        let pid = std::process::id().cast_signed();
        let found: BTreeMap<_, _> = files_in_memory(pid).into_iter().collect();
        for file in [file, unlinked] {
            let meta = file.metadata().unwrap();
            assert!(found[&(meta.dev(), meta.ino())] >= 1 << 20);
        }
    }

    #[test]
    fn counts_anonymous_shared_and_swapped_memory() {
        let status = "VmRSS:\t    9000 kB\nRssAnon:\t    1000 kB\nRssFile:\t 500 kB\nRssShmem:\t  20 kB\nVmSwap:\t 3 kB\n";
        assert_eq!(dumped_bytes(status), 1023 * 1024);
    }
}
