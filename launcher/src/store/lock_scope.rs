//! How far the locks of a file system reach. The job's lock prevents two launchers on one machine from running a job. On
//! some file systems that several machines mount, a lock holds on its own machine only: there, a launcher that starts
//! must not remove what a launcher on another machine is writing.

use crate::sys::mounts::{OWN, mount_of, read_mounts};
use procfs_core::process::MountInfo;
use std::path::Path;

/// Whether other machines may write to this directory, and not see locks of this one. A mount table that cannot be read
/// tells nothing: `false`.
#[must_use]
pub fn is_one_machine_only(dir: &Path) -> bool {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let mounts = read_mounts(OWN);
    mounts.is_ok_and(|mounts| mount_of(&mounts, &dir).is_some_and(has_local_locks))
}

/// See nfs(5), mount.lustre(8), mount.cifs(8) and gfs2(5). FUSE and BeeGFS have such locks unless they are told otherwise, which the
/// mount table does not show; nor does that of 9p and virtiofs.
fn has_local_locks(mount: &MountInfo) -> bool {
    let has = |name: &str| mount.super_options.contains_key(name) || mount.mount_options.contains_key(name);
    match mount.fs_type.as_str() {
        "nfs" | "nfs4" => {
            let scope = mount.super_options.get("local_lock").and_then(Option::as_deref);
            has("nolock") || matches!(scope, Some("flock" | "all"))
        }
        "lustre" => has("localflock"),
        "gfs2" | "ocfs2" => has("localflocks"),
        "cifs" | "smb3" => has("nobrl"),
        "9p" | "virtiofs" | "beegfs" | "beegfs_nodev" | "fuse" => true,
        // Of one machine by nature.
        "fuse.fuse-overlayfs" | "fuse.lxcfs" => false,
        other => other.starts_with("fuse."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use procfs_core::FromRead;
    use procfs_core::process::MountInfos;

    #[test]
    fn by_file_system_and_options() {
        let table = "\
            21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
            30 21 0:40 / /v4 rw shared:2 - nfs4 nas:/ rw,vers=4.2,local_lock=none,addr=10.0.0.1\n\
            31 21 0:41 / /v3 rw shared:3 - nfs nas:/ rw,vers=3,nolock,local_lock=all\n\
            32 31 8:2 / /v3/disk rw shared:4 - xfs /dev/sdb1 rw\n\
            33 21 0:42 / /l rw shared:5 - lustre mds:/l rw,flock,lazystatfs\n\
            34 21 0:43 / /ll rw shared:6 - lustre mds:/l rw,localflock\n\
            35 21 0:44 / /f rw shared:7 - fuse.sshfs u@h: rw,user_id=0\n\
            36 21 0:45 / /o rw shared:8 - fuse.fuse-overlayfs fuse-overlayfs rw\n\
            37 21 0:46 / /b rw shared:9 - ext4 /dev/sdc1 rw\n\
            38 37 0:47 / /b rw shared:10 - beegfs beegfs_nodev rw\n\
            39 21 0:48 / /c rw shared:11 - cifs //s/c rw,nobrl\n\
            40 21 8:3 / /g rw shared:12 - gfs2 /dev/sdd1 rw,localflocks\n\
            41 21 8:4 / /gg rw shared:13 - gfs2 /dev/sde1 rw\n";
        let mounts = MountInfos::from_read(table.as_bytes()).unwrap().0;
        for (dir, expected) in [
            ("/v4/store", false),
            ("/v3/store", true),
            ("/v3/disk/store", false),
            ("/l/store", false),
            ("/ll", true),
            ("/f/a", true),
            ("/o", false),
            ("/b/store", true),
            ("/c", true),
            ("/g", true),
            ("/gg", false),
            ("/home", false),
        ] {
            let mount = mount_of(&mounts, Path::new(dir)).unwrap();
            assert_eq!(has_local_locks(mount), expected, "{dir}");
        }
        assert!(!is_one_machine_only(Path::new("/proc")));
    }
}
