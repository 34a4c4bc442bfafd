//! Directories of unix sockets. CRIU binds sockets again on restore and needs their directories. A job that continues
//! after a snapshot may remove such a directory: Python's multiprocessing removes its temporary directories when a worker
//! ends.

use crate::namespace::inside;
use crate::sys::path_text::{shown, text_path};
use anyhow::{Context, Result};
use ckpt_snapshot::Directory;
use rustix::fs::OFlags;
use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;

/// Records owner and mode of the directories `paths` (absolute); missing ones are skipped. `root` is the job's root
/// directory.
#[must_use]
pub fn inspect(paths: &BTreeSet<String>, root: &Path) -> Vec<Directory> {
    let inspect = |path: &String| {
        let meta = fs::metadata(inside(root, text_path(path))).ok()?;
        let (mode, uid, gid) = (meta.mode() & 0o7777, meta.uid(), meta.gid());
        meta.is_dir().then(|| Directory { path: path.clone(), mode, uid, gid })
    };
    paths.iter().filter_map(inspect).collect()
}

/// Creates the directories that are missing.
///
/// # Errors
/// When a directory cannot be created.
pub fn restore(directories: &[Directory]) -> Result<()> {
    for directory in directories.iter().filter(|directory| !text_path(&directory.path).exists()) {
        create(directory).with_context(|| {
            format!("cannot create the directory {} of a socket of the job", shown(&directory.path))
        })?;
        tracing::debug!("created the directory {} again", shown(&directory.path));
    }
    Ok(())
}

/// The parent directory may belong to another user, who can replace the new directory at any time. So owner and mode are
/// set through a descriptor of the directory that was created.
fn create(directory: &Directory) -> io::Result<()> {
    let path = &*text_path(&directory.path);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => return Ok(()),
        created => created?,
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let created = File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    if created.metadata()?.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("another user has replaced the directory"));
    }
    fchown(&created, Some(directory.uid), Some(directory.gid))?;
    created.set_permissions(Permissions::from_mode(directory.mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_restored_with_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gone").join("too");
        fs::create_dir_all(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o710)).unwrap();
        let missing = dir.path().join("never").to_str().unwrap().to_owned();
        let paths = BTreeSet::from([path.to_str().unwrap().to_owned(), missing]);
        let seen = inspect(&paths, Path::new("/"));
        assert_eq!(seen.len(), 1);
        fs::remove_dir_all(dir.path().join("gone")).unwrap();
        restore(&seen).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o710);
        // A dangling link in its place is not followed.
        fs::remove_dir(&path).unwrap();
        let elsewhere = dir.path().join("elsewhere");
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert!(restore(&seen).is_err());
        assert!(!elsewhere.exists());
    }
}
