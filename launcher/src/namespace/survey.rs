//! Surveying the job's processes inside their namespace, and restoring CPU affinity, which CRIU does not.

use super::descriptors;
use super::messages::Reply;
use crate::sys::privileges::Privileges;
use ckpt_snapshot::{AffinityGroup, ProcessMemory};
use rustix::io::ioctl_fionread;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeMap;
use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Surveys all processes but the init, CRIU's in `criu`, and what these have started for themselves; `root_pid` is the root of
/// the job's tree.
pub(super) fn scan(criu: &[i32], root_pid: Option<i32>) -> io::Result<Reply> {
    let mut groups: BTreeMap<Vec<u32>, Vec<i32>> = BTreeMap::new();
    let mut memory_bytes = 0;
    let mut parents = BTreeMap::new();
    let mut files = BTreeMap::new();
    let mut processes = Vec::new();
    for pid in numbers_in("/proc")? {
        if pid == 1 || criu.contains(&pid) {
            continue;
        }
        // A process that ends during the survey is skipped.
        let Ok(status) = std::fs::read(format!("/proc/{pid}/status")) else { continue };
        let status = String::from_utf8_lossy(&status);
        let parent = parent(&status);
        // A root that is being restored is a child of CRIU's, too.
        if root_pid.is_some_and(|root_pid| root_pid != pid) && criu.contains(&parent) {
            continue;
        }
        parents.insert(pid, parent);
        let process = process_memory(pid, &status);
        memory_bytes += process.private_bytes;
        processes.push(process);
        let (found, is_complete) = files_in_memory(pid);
        files.extend(found);
        if !is_complete {
            memory_bytes += shared_bytes(&status).saturating_sub(mirror_bytes(pid));
        }
        for tid in numbers_in(format!("/proc/{pid}/task")).unwrap_or_default() {
            if let Ok(cpus) = sched_getaffinity(Pid::from_raw(tid)) {
                groups.entry(cpu_numbers(&cpus)).or_default().push(tid);
            }
        }
    }
    memory_bytes += files.values().sum::<u64>();
    memory_bytes += sysv_bytes(&std::fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default());
    let last_pid = std::fs::read_to_string("/proc/sys/kernel/ns_last_pid")?;
    let last_pid = last_pid.trim().parse().map_err(io::Error::other)?;
    let affinity = groups.into_iter().map(|(cpus, tids)| AffinityGroup { cpus, tids }).collect();
    let pids: Vec<i32> = parents.keys().copied().collect();
    let strays = pids.iter().copied().filter(|&pid| !is_below(pid, root_pid, &parents)).collect();
    processes.sort_by_key(|process| process.pid);
    Ok(Reply::Surveyed { affinity, last_pid, memory_bytes, pids, processes, strays, lost_ipc: lost_ipc() })
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

/// The memory of a process, from /proc/PID/status.
fn process_memory(pid: i32, status: &str) -> ProcessMemory {
    let name = status.lines().find_map(|line| line.strip_prefix("Name:")).unwrap_or_default();
    ProcessMemory {
        pid,
        name: name.trim().to_owned(),
        private_bytes: own_bytes(status),
        shared_bytes: shared_bytes(status),
        device_bytes: 0,
    }
}

/// Bytes of a process's own memory that a dump contains: anonymous memory, also swapped or in huge pages that were reserved
/// (hugetlb), from /proc/PID/status.
fn own_bytes(status: &str) -> u64 {
    bytes_of(status, &["RssAnon:", "VmSwap:", "HugetlbPages:"])
}

/// Bytes of shared memory of which a process has pages in its page table.
fn shared_bytes(status: &str) -> u64 {
    bytes_of(status, &["RssShmem:"])
}

/// How much of that is a mirror of device memory, which a process may have mapped while it runs.
fn mirror_bytes(pid: i32) -> u64 {
    std::fs::read(format!("/proc/{pid}/smaps")).map_or(0, |smaps| resident_mirror_bytes(&smaps))
}

/// Bytes of mirrors in /proc/PID/smaps of which there are pages in the page table.
fn resident_mirror_bytes(smaps: &[u8]) -> u64 {
    let (mut bytes, mut is_of_mirror) = (0, false);
    for line in smaps.split(|&byte| byte == b'\n') {
        // A heading has no colon before its first space.
        let word = line.split(|&byte| byte == b' ').next().unwrap_or_default();
        if !word.ends_with(b":") {
            let path = line.iter().position(|&byte| byte == b'/').map_or(&b""[..], |at| &line[at..]);
            is_of_mirror = is_mirror(path);
        } else if is_of_mirror {
            bytes += str::from_utf8(line).map_or(0, |line| bytes_of(line, &["Rss:"]));
        }
    }
    bytes
}

fn bytes_of(status: &str, fields: &[&str]) -> u64 {
    let kilobytes = |line: &str| {
        let value = fields.iter().find_map(|name| line.strip_prefix(name))?;
        value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    status.lines().filter_map(kilobytes).sum::<u64>() * 1024
}

/// Bytes of the SysV shared memory of the IPC namespace, from /proc/sysvipc/shm: all of it is in a dump, attached or not.
fn sysv_bytes(table: &str) -> u64 {
    let Some((heading, rows)) = table.split_once('\n') else { return 0 };
    let columns = ["rss", "swap"].map(|name| heading.split_whitespace().position(|column| column == name));
    let of_row = |row: &str| {
        let values: Vec<&str> = row.split_whitespace().collect();
        let value = |column: &Option<usize>| values.get((*column)?)?.parse::<u64>().ok();
        columns.iter().filter_map(value).sum::<u64>()
    };
    rows.lines().map(of_row).sum()
}

/// A file by device and inode, and the bytes that it occupies.
type Occupied = ((u64, u64), u64);

/// The files of a process that a dump copies, open or mapped: files in /dev/shm, memory files (memfd), shared memory, and
/// files without a name. They count whether their pages are in the process's page table or not: a child may have filled them,
/// or the system swapped them out. Also whether that is all: without CAP_CHECKPOINT_RESTORE, nobody can tell of mapped files.
fn files_in_memory(pid: i32) -> (Vec<Occupied>, bool) {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let is_open =
        |path: &Path| std::fs::read_link(path).is_ok_and(|target| is_copied(target.as_os_str().as_bytes()));
    let open = fds.map(|fd| fd.path()).filter(|path| is_open(path)).filter_map(|path| occupied(&path));
    let mut found: Vec<_> = open.collect();
    let maps = std::fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
    let mut is_complete = true;
    for range in maps.split(|&byte| byte == b'\n').filter_map(copied_range) {
        let mapped = occupied(Path::new(&format!("/proc/{pid}/map_files/{range}")));
        is_complete &= mapped.is_some();
        found.extend(mapped);
    }
    (found, is_complete)
}

/// The address range of a line of /proc/PID/maps, if it is of a file that a dump copies. SysV shared memory is counted by
/// [`sysv_bytes`].
fn copied_range(line: &[u8]) -> Option<&str> {
    // The path begins in column 73, or later if the fields before it are long.
    let path = line.iter().position(|&byte| byte == b'/').map(|at| &line[at..])?;
    let range = line.split(|&byte| byte == b' ').next()?;
    (is_copied(path) && !path.starts_with(b"/SYSV")).then(|| str::from_utf8(range).ok())?
}

/// Whether a dump copies the content of a file that an open descriptor or a mapping shows as this.
fn is_copied(path: &[u8]) -> bool {
    if is_mirror(path) {
        return false;
    }
    path.starts_with(b"/dev/shm/") || path.starts_with(b"/memfd:") || path.ends_with(b" (deleted)")
}

/// Whether this is a mirror of device memory, which agents close before the dump.
fn is_mirror(path: &[u8]) -> bool {
    path.starts_with(b"/#") || path.starts_with(b"/memfd:ckpt-")
}

/// `None` for what is no file of its own, or may not be looked at.
fn occupied(path: &Path) -> Option<Occupied> {
    let meta = std::fs::metadata(path).ok().filter(Metadata::is_file)?;
    Some(((meta.dev(), meta.ino()), meta.blocks() * 512))
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
    use std::io::Write;

    #[test]
    fn processes_outside_of_the_tree_are_recognized() {
        let parents = BTreeMap::from([(10, 1), (11, 10), (12, 11), (20, 1), (21, 20), (30, 29)]);
        let below = |pid| is_below(pid, Some(10), &parents);
        assert!(below(10) && below(12) && below(30));
        assert!(!below(20) && !below(21));
    }

    #[test]
    fn the_memory_of_a_process_is_read() {
        let status = "Name:\tpt main\u{fffd}\nState:\tS (sleeping)\nRssAnon:\t     100 kB\nRssFile:\t   9 kB\n\
            RssShmem:\t      30 kB\nVmSwap:\t       4 kB\nHugetlbPages:\t    2048 kB\n";
        let wanted = ProcessMemory {
            pid: 7,
            name: "pt main\u{fffd}".to_owned(),
            private_bytes: 2152 << 10,
            shared_bytes: 30 << 10,
            device_bytes: 0,
        };
        assert_eq!(process_memory(7, status), wanted);
        // One that has ended and is not waited for.
        assert_eq!(process_memory(8, "Name:\tsh\nState:\tZ (zombie)\n").private_bytes, 0);
    }

    fn counted(file: &std::fs::File) -> u64 {
        let (found, is_complete) = files_in_memory(std::process::id().cast_signed());
        assert!(is_complete || !rustix::process::getuid().is_root());
        let meta = file.metadata().unwrap();
        let found: BTreeMap<_, _> = found.into_iter().collect();
        found.get(&(meta.dev(), meta.ino())).copied().unwrap_or(0)
    }

    fn in_memory() -> std::fs::File {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = std::fs::File::from(file);
        file.write_all(&vec![1; 1 << 20]).unwrap();
        file
    }

    #[test]
    fn files_in_memory_are_counted() {
        let mut unlinked = tempfile::tempfile().unwrap();
        unlinked.write_all(&vec![1; 1 << 20]).unwrap();
        unlinked.sync_all().unwrap();
        for file in [in_memory(), unlinked] {
            assert!(counted(&file) >= 1 << 20);
        }
    }

    /// The memory was filled by a child that has ended: none of it is in the page table of the process that has it mapped.
    #[test]
    fn shared_memory_without_a_descriptor_is_counted() {
        const PROGRAM: &str = "import mmap, os, time\n\
            shared = mmap.mmap(-1, 1 << 20)\n\
            if os.fork() == 0:\n    shared[:] = b'x' * (1 << 20)\n    os._exit(0)\n\
            os.wait()\nprint(flush=True)\ntime.sleep(600)";
        let mut child = std::process::Command::new("python3");
        let mut child = child.args(["-c", PROGRAM]).stdout(std::process::Stdio::piped()).spawn().unwrap();
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        let pid = child.id().cast_signed();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let (found, is_complete) = files_in_memory(pid);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(shared_bytes(&status) < 1 << 20, "{status}");
        let bytes: u64 = found.iter().map(|(_, bytes)| bytes).sum();
        assert_eq!(
            (bytes, is_complete),
            if rustix::process::getuid().is_root() { (1 << 20, true) } else { (0, false) }
        );
    }

    #[test]
    fn resident_pages_of_mirrors_are_found() {
        let mapping = |path: &str, kilobytes: u64| {
            format!(
                "7f10-7f20 rw-s 00000000 00:01 1027                       {path}\nSize: 99 kB\nRss: {kilobytes} kB\nVmFlags: rd\n"
            )
        };
        let all =
            [("/#7 (deleted)", 5), ("/memfd:ckpt-mirror (deleted)", 3), ("/memfd:x (deleted)", 100), ("", 9)];
        let smaps: String = all.iter().map(|(path, kilobytes)| mapping(path, *kilobytes)).collect();
        assert_eq!(resident_mirror_bytes(smaps.as_bytes()), 8 * 1024);
        assert_eq!(resident_mirror_bytes(b""), 0);
    }

    #[test]
    fn only_ranges_of_files_that_a_dump_copies_count() {
        let range = |line: &str| copied_range(line.as_bytes()).map(str::to_owned);
        let of =
            |path: &str| range(&format!("7f10-7f20 rw-s 00000000 00:01 1027                       {path}"));
        for path in ["/dev/zero (deleted)", "/memfd:x (deleted)", "/dev/shm/x", "/tmp/x (deleted)"] {
            assert_eq!(of(path).as_deref(), Some("7f10-7f20"), "{path}");
        }
        for path in
            ["/usr/lib/libc.so.6", "/SYSV00000000 (deleted)", "/memfd:ckpt-mirror (deleted)", "/#7 (deleted)"]
        {
            assert_eq!(of(path), None, "{path}");
        }
        assert_eq!(range("7f10-7f20 rw-p 00000000 00:00 0"), None);
        assert_eq!(range("7f10-7f20 rw-p 00000000 00:00 0                          [heap]"), None);
    }

    #[test]
    fn memory_of_a_process_and_of_sysv_is_counted() {
        let status = "VmRSS:\t    9000 kB\nRssAnon:\t    1000 kB\nRssFile:\t 500 kB\nRssShmem:\t  20 kB\nVmSwap:\t 3 kB\nHugetlbPages:\t 2048 kB\n";
        assert_eq!((own_bytes(status), shared_bytes(status)), (3051 * 1024, 20 * 1024));
        let table = "       key      shmid perms                  size  cpid  lpid nattch   uid   gid  cuid  cgid      atime      dtime      ctime                   rss                  swap\n         0          0   600               8388608     5     5      0     0     0     0     0          0          0 1764167000               4194304                  4096\n";
        assert_eq!(sysv_bytes(table), (4 << 20) + 4096);
        assert_eq!((sysv_bytes(""), sysv_bytes("key shmid\n")), (0, 0));
    }
}
