//! Everything below a directory on the same file system.

use crate::namespace::inside;
use crate::sys::mounts::read_mounts;
use std::collections::BTreeSet;
use std::fs::{self, Metadata, ReadDir};
use std::io;
use std::path::{Path, PathBuf};

/// What every store of ckpt-run has.
pub const IN_STORE: &[&str] = &["store.json", "jobs"];

/// The mount points in a mount namespace. A walk does not even look at them: a file system that does not answer would
/// block it.
pub struct MountPoints(BTreeSet<PathBuf>);

impl MountPoints {
    /// Reads them from the process's `mountinfo`. Without that file, no mount point is known.
    #[must_use]
    pub fn read(mountinfo: &Path) -> Self {
        let mounts = read_mounts(mountinfo).unwrap_or_default();
        Self(mounts.into_iter().map(|mount| mount.mount_point).collect())
    }

    /// Everything below `root`/`top`, `top` included, that `covers` allows, down to `depth` levels below; paths are without
    /// `root`. walkdir is of no use here: it opens a directory before it asks whether to leave it out.
    pub fn walk<'a>(
        &'a self,
        root: &'a Path,
        top: &Path,
        depth: usize,
        covers: impl Fn(&Path) -> bool + 'a,
    ) -> impl Iterator<Item = io::Result<(PathBuf, Metadata)>> + 'a {
        let mut top = covers(top).then(|| top.to_owned());
        let mut open: Vec<(PathBuf, ReadDir)> = Vec::new();
        std::iter::from_fn(move || {
            loop {
                let path = match top.take() {
                    Some(top) => top,
                    None => loop {
                        let (dir, entries) = open.last_mut()?;
                        match entries.next() {
                            Some(Ok(entry)) => {
                                let path = dir.join(entry.file_name());
                                if !self.0.contains(&path) && covers(&path) {
                                    break path;
                                }
                            }
                            Some(Err(error)) => return Some(Err(error)),
                            None => drop(open.pop()),
                        }
                    },
                };
                let full = inside(root, &path);
                let meta = match fs::symlink_metadata(&full) {
                    Ok(meta) => meta,
                    Err(error) => return Some(Err(error)),
                };
                // Another store of ckpt-run, with what other jobs save.
                if meta.is_dir() && IN_STORE.iter().all(|name| fs::symlink_metadata(full.join(name)).is_ok())
                {
                    continue;
                }
                // What is in a directory that may not be read is not covered.
                if meta.is_dir()
                    && open.len() < depth
                    && let Ok(entries) = fs::read_dir(full)
                {
                    open.push((path.clone(), entries));
                }
                return Some(Ok((path, meta)));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a/b", "mounted/inside"] {
            fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        fs::create_dir_all(dir.path().join("store/jobs")).unwrap();
        fs::write(dir.path().join("store/store.json"), "").unwrap();
        let mounts = MountPoints(BTreeSet::from([PathBuf::from("/mounted")]));
        let found = mounts.walk(dir.path(), Path::new("/"), usize::MAX, |path| !path.ends_with("b"));
        let found: Vec<_> = found.map(|entry| entry.unwrap().0).collect();
        assert_eq!(found, ["/", "/a"].map(PathBuf::from));
        let top = mounts.walk(dir.path(), Path::new("/a"), 1, |_| true).map(|entry| entry.unwrap().0);
        assert_eq!(top.collect::<Vec<_>>(), ["/a", "/a/b"].map(PathBuf::from));
        assert!(MountPoints::read(Path::new("/proc/self/mountinfo")).0.contains(Path::new("/proc")));
    }
}
