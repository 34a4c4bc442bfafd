//! Everything below a directory on the same file system.

use procfs_core::FromRead;
use procfs_core::process::MountInfos;
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use walkdir::{DirEntry, WalkDir};

/// The mount points in a mount namespace. A walk does not even look at them: a file system that does not answer would
/// block it.
pub struct MountPoints(BTreeSet<PathBuf>);

impl MountPoints {
    /// Reads them from the process's `mountinfo`. Without that file, no mount point is known.
    #[must_use]
    pub fn read(mountinfo: &Path) -> Self {
        let mounts = File::open(mountinfo).ok().and_then(|file| MountInfos::from_read(file).ok());
        Self(mounts.into_iter().flat_map(|mounts| mounts.0).map(|mount| mount.mount_point).collect())
    }

    /// Everything below `root`/`top`, `top` included, that `covers` allows; it is called with paths without `root`.
    pub fn walk<'a>(
        &'a self,
        root: &'a Path,
        top: &'a Path,
        depth: usize,
        covers: impl Fn(&Path) -> bool + 'a,
    ) -> impl Iterator<Item = walkdir::Result<(PathBuf, DirEntry)>> + 'a {
        let inner = move |entry: &DirEntry| {
            Path::new("/").join(entry.path().strip_prefix(root).unwrap_or(entry.path()))
        };
        let start = root.join(top.strip_prefix("/").unwrap_or(top));
        let is_wanted = move |entry: &DirEntry| {
            let path = inner(entry);
            (entry.depth() == 0 || !self.0.contains(&path)) && covers(&path)
        };
        let walk = WalkDir::new(start).max_depth(depth).into_iter().filter_entry(is_wanted);
        walk.map(move |entry| entry.map(|entry| (inner(&entry), entry)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a/b", "mounted/inside"] {
            std::fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        let mounts = MountPoints(BTreeSet::from([PathBuf::from("/mounted")]));
        let found = mounts.walk(dir.path(), Path::new("/"), usize::MAX, |path| !path.ends_with("b"));
        let found: Vec<_> = found.map(|entry| entry.unwrap().0).collect();
        assert_eq!(found, ["/", "/a"].map(PathBuf::from));
        assert!(MountPoints::read(Path::new("/proc/self/mountinfo")).0.contains(Path::new("/proc")));
    }
}
