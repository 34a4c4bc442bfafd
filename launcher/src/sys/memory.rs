//! How much memory is free.

use crate::sys::mounts::{OWN, read_mounts};
use parking_lot::Mutex;
use procfs_core::process::MountInfo;
use procfs_core::{FromRead, Meminfo, ProcessCGroup, ProcessCGroups};
use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// How many cgroups are looked at.
const MOST_CGROUPS: usize = 10_000;

/// What the kernel drops before memory runs out, in the statistics of a cgroup.
const UNUSED_CACHE: [&str; 1] = ["inactive_file"];
/// The same with pages of files that are in use.
const ALL_CACHE: [&str; 3] = ["inactive_file", "active_file", "slab_reclaimable"];

/// Memory to leave free for other processes.
pub const SPARE_BYTES: u64 = 256 << 20;

/// Memory that can still be allocated before the machine, or a cgroup of this process, runs out of memory, bytes.
///
/// # Errors
/// When /proc/meminfo cannot be read.
pub fn available_bytes() -> io::Result<u64> {
    Limits::of_this_process().available_bytes()
}

/// What limits the memory of this process.
pub struct Limits {
    /// See [`memory_cgroups`].
    cgroups: Vec<(PathBuf, PathBuf)>,
}

impl Limits {
    /// Those at present.
    #[must_use]
    pub fn of_this_process() -> Self {
        let cgroups = ProcessCGroups::from_file("/proc/self/cgroup").map_or(Vec::new(), |all| all.0);
        let mounts = read_mounts(OWN).unwrap_or_default();
        Self { cgroups: memory_cgroups(&cgroups, &mounts, with_this_process) }
    }

    /// See [`available_bytes`].
    ///
    /// # Errors
    /// When /proc/meminfo cannot be read.
    pub fn available_bytes(&self) -> io::Result<u64> {
        self.left_bytes(&UNUSED_CACHE)
    }

    /// The same, with all that the kernel could drop instead of killing a process: it would be slow then.
    ///
    /// # Errors
    /// When /proc/meminfo cannot be read.
    pub fn reclaimable_bytes(&self) -> io::Result<u64> {
        self.left_bytes(&ALL_CACHE)
    }

    fn left_bytes(&self, cache: &[&str]) -> io::Result<u64> {
        let meminfo = Meminfo::from_file("/proc/meminfo").map_err(io::Error::other)?;
        let machine = meminfo.mem_available.ok_or(io::ErrorKind::InvalidData)?;
        Ok(self.cgroups.iter().map(|(top, cgroup)| left_bytes(top, cgroup, cache)).fold(machine, u64::min))
    }
}

/// Bytes that files at `path`, which need not exist yet, can take. In a file system in memory (a tmpfs) that is what memory
/// leaves, whatever the size of the file system is.
///
/// # Errors
/// When the file system, or the free memory, cannot be asked.
pub fn free_bytes_at(path: &Path) -> io::Result<u64> {
    let free_bytes = ckpt_snapshot::free_bytes(path)?;
    if !ckpt_snapshot::is_in_memory(path)? {
        return Ok(free_bytes);
    }
    let taken_bytes = SPARE_BYTES.saturating_add(RESERVED_BYTES.load(Ordering::Relaxed));
    Ok(free_bytes.min(available_bytes()?.saturating_sub(taken_bytes)))
}

/// Gives memory that was freed back to the system: the C library keeps the buffers of a checkpoint otherwise, tens of
/// megabytes that the job may need.
#[allow(unsafe_code)]
pub fn give_back_freed() {
    // SAFETY: the call only releases memory that is not allocated.
    unsafe { libc::malloc_trim(0) };
}

/// Memory that is about to be allocated, bytes.
static RESERVED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Memory that [`free_bytes_at`] does not count as free, until this is dropped.
#[must_use]
pub struct Reserved(u64);

/// Reserves memory that is about to be allocated.
pub fn reserve(bytes: u64) -> Reserved {
    RESERVED_BYTES.fetch_add(bytes, Ordering::Relaxed);
    Reserved(bytes)
}

impl Drop for Reserved {
    fn drop(&mut self) {
        RESERVED_BYTES.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// The cgroups that limit the memory, each with the directory at which what can be seen of its hierarchy begins. Where both
/// versions are mounted, either may have the limits.
fn memory_cgroups(
    cgroups: &[ProcessCGroup],
    mounts: &[MountInfo],
    search: impl Fn(&Path) -> Option<PathBuf>,
) -> Vec<(PathBuf, PathBuf)> {
    let memory = cgroups
        .iter()
        .filter(|one| one.hierarchy == 0 || one.controllers.iter().any(|name| name == "memory"));
    let found = memory.filter_map(|one| {
        let mounts = || {
            mounts.iter().filter(|mount| is_of(mount, one.hierarchy)).map(|mount| (mount, &mount.mount_point))
        };
        let by_path = mounts().find_map(|(mount, top)| {
            // A container may see a part of the hierarchy only.
            let below = Path::new(&one.pathname).strip_prefix(&mount.root).ok()?;
            Some((top.clone(), top.join(below)))
        });
        // A mount from outside of this process's cgroup namespace begins further up, at directories without a name here.
        by_path.or_else(|| mounts().find_map(|(_, top)| Some((top.clone(), search(top)?))))
    });
    found.collect()
}

/// The cgroup below `top` that this process is in, by the list of processes of each.
fn with_this_process(top: &Path) -> Option<PathBuf> {
    static FOUND: Mutex<BTreeMap<PathBuf, Option<PathBuf>>> = Mutex::new(BTreeMap::new());
    let own = std::process::id().to_string();
    let has_it = |dir: &PathBuf| {
        fs::read_to_string(dir.join("cgroup.procs")).is_ok_and(|pids| pids.lines().any(|pid| pid == own))
    };
    let mut found = FOUND.lock();
    // What is not there is not looked for again: that takes long.
    if let Some(known) = found.get(top).filter(|known| known.as_ref().is_none_or(has_it)) {
        return known.clone();
    }
    let cgroup = search(top, has_it);
    found.insert(top.to_owned(), cgroup.clone());
    cgroup
}

/// The first directory at `top` or below it that is wanted.
fn search(top: &Path, is_wanted: impl Fn(&PathBuf) -> bool) -> Option<PathBuf> {
    let mut dirs = VecDeque::from([top.to_owned()]);
    for _ in 0..MOST_CGROUPS {
        let dir = dirs.pop_front()?;
        if is_wanted(&dir) {
            return Some(dir);
        }
        let below = fs::read_dir(&dir).into_iter().flatten().flatten();
        let below = below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        dirs.extend(below.map(|entry| entry.path()));
    }
    None
}

/// Whether a mount shows the version 2 hierarchy (number 0), or the memory controller of version 1.
fn is_of(mount: &MountInfo, hierarchy: u32) -> bool {
    match hierarchy {
        0 => mount.fs_type == "cgroup2",
        _ => mount.fs_type == "cgroup" && mount.super_options.contains_key("memory"),
    }
}

/// What the limits of a cgroup and of those above it leave, bytes. Any of them may be the tightest.
fn left_bytes(top: &Path, cgroup: &Path, cache: &[&str]) -> u64 {
    let dirs = cgroup.ancestors().take_while(|dir| dir.starts_with(top));
    dirs.filter_map(|dir| left_in(dir, cache)).min().unwrap_or(u64::MAX)
}

/// What the limit of one cgroup leaves, if it has one. The kernel drops unused pages of files before memory runs out.
fn left_in(dir: &Path, cache: &[&str]) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
    // Version 2: above `high`, the processes hardly run. Version 1.
    let limits = ["memory.max", "memory.high", "memory.limit_in_bytes"];
    let limit = limits.into_iter().filter_map(number).min()?;
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"))?;
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let value = |name: &str| {
        let of = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse::<u64>().ok();
        stat.lines().find_map(of)
    };
    let reclaimed = cache.iter().filter_map(|name| value(&format!("total_{name}")).or_else(|| value(name)));
    Some(limit.saturating_sub(used.saturating_sub(reclaimed.sum())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use procfs_core::process::MountInfos;

    #[test]
    fn available_memory_can_be_read() {
        assert!(available_bytes().unwrap() > 1 << 20);
    }

    #[test]
    fn what_is_reserved_counts_until_it_is_dropped() {
        let reserved = [reserve(7), reserve(5)];
        assert_eq!(RESERVED_BYTES.load(Ordering::Relaxed), 12);
        drop(reserved);
        assert_eq!(RESERVED_BYTES.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_tightest_limit_counts() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path();
        let write = |name: &str, content: &str| {
            let path = top.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        };
        assert_eq!(left_bytes(top, &top.join("slurm/job/step"), &UNUSED_CACHE), u64::MAX);
        for (cgroup, limit, used) in
            [("slurm", "max", "900"), ("slurm/job", "1000", "700"), ("slurm/job/step", "800", "100")]
        {
            write(&format!("{cgroup}/memory.max"), limit);
            write(&format!("{cgroup}/memory.current"), used);
        }
        assert_eq!(
            left_bytes(top, &top.join("slurm/job/step"), &UNUSED_CACHE),
            300,
            "of the job, not of the step"
        );
        write("slurm/job/memory.stat", "anon 500\ninactive_file 150\nactive_file 50\n");
        assert_eq!(left_bytes(top, &top.join("slurm/job/step"), &UNUSED_CACHE), 450);
        assert_eq!(left_bytes(top, &top.join("slurm/job/step"), &ALL_CACHE), 500);
        write("slurm/job/memory.high", "750\n");
        assert_eq!(left_bytes(top, &top.join("slurm/job/step"), &UNUSED_CACHE), 200);
        write("v1/memory.limit_in_bytes", "500");
        write("v1/memory.usage_in_bytes", "450");
        assert_eq!(left_bytes(top, &top.join("v1/deeper"), &UNUSED_CACHE), 50);
    }

    /// How systems and containers show a process its cgroup.
    #[test]
    fn the_cgroup_is_found_in_each_version() {
        let found = |cgroups: &str, mounts: &str| {
            let cgroups = ProcessCGroups::from_read(cgroups.as_bytes()).unwrap().0;
            let mounts = MountInfos::from_read(mounts.as_bytes()).unwrap().0;
            let paths = memory_cgroups(&cgroups, &mounts, |_| None);
            let text = |path: PathBuf| path.to_str().unwrap().to_owned();
            paths.into_iter().map(|(top, cgroup)| (text(top), text(cgroup))).collect::<Vec<_>>()
        };
        let pair = |top: &str, cgroup: &str| (top.to_owned(), cgroup.to_owned());
        let v2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let slurm = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n";
        let task = "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/user/task_0";
        assert_eq!(found(slurm, v2), [pair("/sys/fs/cgroup", task)]);
        // A container with a namespace of its own.
        assert_eq!(found("0::/\n", v2), [pair("/sys/fs/cgroup", "/sys/fs/cgroup/")]);
        let v1 = "31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                  32 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let job = "5:cpu:/other\n4:memory:/slurm/uid_7/job_9\n1:name=systemd:/x\n";
        let at = "/sys/fs/cgroup/memory";
        assert_eq!(found(job, v1), [pair(at, "/sys/fs/cgroup/memory/slurm/uid_7/job_9")]);
        // A container without one sees its own part, and perhaps another one, too.
        let part = "32 23 0:28 /other /mnt rw - cgroup cgroup rw,memory\n\
                    33 23 0:28 /kubepods/pod1/c1 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        assert_eq!(found("4:memory:/kubepods/pod1/c1/x\n", part), [pair(at, "/sys/fs/cgroup/memory/x")]);
        // Both versions, of which one has the memory.
        let both = format!("{v1}41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
        assert_eq!(found("4:memory:/a\n0::/b\n", &both).len(), 2);
        assert_eq!(found("", ""), []);
    }
}
