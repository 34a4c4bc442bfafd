//! Directories of unix sockets. A job that goes on after a snapshot may remove a directory (Python's multiprocessing
//! removes its temporary ones when a worker ends) in which a process of the snapshot has a socket bound: CRIU binds it
//! anew and needs the directory.

use crate::namespace::inside;
use anyhow::{Context, Result};
use ckpt_snapshot::Directory;
use rustix::fs::OFlags;
use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;

/// What the directories `paths` (absolute) look like; one that is gone already is left out. `root` leads to the job's
/// view of the file system.
#[must_use]
pub fn inspect(paths: &BTreeSet<String>, root: &Path) -> Vec<Directory> {
    let inspect = |path: &String| {
        let meta = fs::metadata(inside(root, path)).ok()?;
        let (mode, uid, gid) = (meta.mode() & 0o7777, meta.uid(), meta.gid());
        meta.is_dir().then(|| Directory { path: path.clone(), mode, uid, gid })
    };
    paths.iter().filter_map(inspect).collect()
}

/// Makes those that are not there.
///
/// # Errors
/// When one cannot be made.
pub fn put_back(directories: &[Directory]) -> Result<()> {
    for directory in directories.iter().filter(|directory| !Path::new(&directory.path).exists()) {
        make(directory).with_context(|| {
            format!("cannot make the directory {} of a socket of the job", directory.path)
        })?;
        tracing::debug!("made the directory {} again", directory.path);
    }
    Ok(())
}

/// It may lie in a directory of somebody else's, who may put another thing in its place at any time: owner and mode are
/// given to the directory that was made, and to nothing else.
fn make(directory: &Directory) -> io::Result<()> {
    let path = Path::new(&directory.path);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => return Ok(()),
        made => made?,
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let made = File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    if made.metadata()?.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("somebody else has put another directory in its place"));
    }
    fchown(&made, Some(directory.uid), Some(directory.gid))?;
    made.set_permissions(Permissions::from_mode(directory.mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_comes_back_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gone").join("too");
        fs::create_dir_all(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o710)).unwrap();
        let missing = dir.path().join("never").to_str().unwrap().to_owned();
        let paths = BTreeSet::from([path.to_str().unwrap().to_owned(), missing]);
        let seen = inspect(&paths, Path::new("/"));
        assert_eq!(seen.len(), 1);
        fs::remove_dir_all(dir.path().join("gone")).unwrap();
        put_back(&seen).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o710);
        // A link that leads nowhere is in its place: nothing is made where it leads to.
        fs::remove_dir(&path).unwrap();
        let elsewhere = dir.path().join("elsewhere");
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert!(put_back(&seen).is_err());
        assert!(!elsewhere.exists());
    }
}
