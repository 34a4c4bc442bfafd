//! How much memory is free.

use procfs_core::process::{MountInfo, MountInfos};
use procfs_core::{FromRead, Meminfo, ProcessCGroups};
use std::fs;
use std::io;
use std::path::Path;

/// Memory to leave free for other processes.
pub const SPARE_BYTES: u64 = 256 << 20;

/// Memory that can still be allocated before the machine, or a cgroup of this process, runs out of memory, bytes.
///
/// # Errors
/// When /proc/meminfo cannot be read.
pub fn available_bytes() -> io::Result<u64> {
    let meminfo = Meminfo::from_file("/proc/meminfo").map_err(io::Error::other)?;
    let machine = meminfo.mem_available.ok_or(io::ErrorKind::InvalidData)?;
    let cgroups = ProcessCGroups::from_file("/proc/self/cgroup").ok();
    let mounts = MountInfos::from_file("/proc/self/mountinfo").ok();
    let (cgroups, mounts) = (cgroups.map_or(Vec::new(), |all| all.0), mounts.map_or(Vec::new(), |all| all.0));
    let memory = cgroups
        .iter()
        .filter(|one| one.hierarchy == 0 || one.controllers.iter().any(|name| name == "memory"));
    let left = memory.filter_map(|one| {
        let mount = mounts.iter().find(|mount| is_of(mount, one.hierarchy))?;
        // A container may see a part of the hierarchy only.
        let below = Path::new(&one.pathname).strip_prefix(&mount.root).ok()?;
        Some(left_bytes(&mount.mount_point, &mount.mount_point.join(below)))
    });
    Ok(left.fold(machine, u64::min))
}

/// Whether a mount shows the version 2 hierarchy (number 0), or the memory controller of version 1.
fn is_of(mount: &MountInfo, hierarchy: u32) -> bool {
    match hierarchy {
        0 => mount.fs_type == "cgroup2",
        _ => mount.fs_type == "cgroup" && mount.super_options.contains_key("memory"),
    }
}

/// What the limits of a cgroup and of those above it leave, bytes. Any of them may be the tightest.
fn left_bytes(top: &Path, cgroup: &Path) -> u64 {
    let dirs = cgroup.ancestors().take_while(|dir| dir.starts_with(top));
    dirs.filter_map(left_in).min().unwrap_or(u64::MAX)
}

/// What the limit of one cgroup leaves, if it has one. The kernel drops unused pages of files before memory runs out.
fn left_in(dir: &Path) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
    // Version 2: above `high`, the processes hardly run. Version 1.
    let limits = ["memory.max", "memory.high", "memory.limit_in_bytes"];
    let limit = limits.into_iter().filter_map(number).min()?;
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"))?;
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let value =
        |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    let reclaimed = value("total_inactive_file ").or_else(|| value("inactive_file ")).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(reclaimed)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_can_be_read() {
        assert!(available_bytes().unwrap() > 1 << 20);
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
        assert_eq!(left_bytes(top, &top.join("slurm/job/step")), u64::MAX);
        for (cgroup, limit, used) in
            [("slurm", "max", "900"), ("slurm/job", "1000", "700"), ("slurm/job/step", "800", "100")]
        {
            write(&format!("{cgroup}/memory.max"), limit);
            write(&format!("{cgroup}/memory.current"), used);
        }
        assert_eq!(left_bytes(top, &top.join("slurm/job/step")), 300, "of the job, not of the step");
        write("slurm/job/memory.stat", "anon 500\ninactive_file 150\nactive_file 50\n");
        assert_eq!(left_bytes(top, &top.join("slurm/job/step")), 450);
        write("slurm/job/memory.high", "750\n");
        assert_eq!(left_bytes(top, &top.join("slurm/job/step")), 200);
        write("v1/memory.limit_in_bytes", "500");
        write("v1/memory.usage_in_bytes", "450");
        assert_eq!(left_bytes(top, &top.join("v1/deeper")), 50);
    }
}
