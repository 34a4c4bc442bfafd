//! Open files whose name was removed while the file has another name (`sem_open` creates such files). For a dump, CRIU
//! links such a file as `link_remap.N` in the directory of the removed name, and removes the link when the job continues.
//! This module creates the link again for the duration of a restore.

use crate::namespace::inside;
use crate::sys::deadline::{NAMES_LOCK_POLL_INTERVAL, NAMES_LOCK_TIMEOUT};
use crate::sys::runtime_dir::runtime_dir;
use anyhow::{Context, Result};
use ckpt_snapshot::LinkedFile;
use rustix::fs::FlockOperation;
use rustix::io::retry_on_intr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Prefix of the links that CRIU creates.
const CRIU_LINK_PREFIX: &str = "link_remap.";

/// Lock on the names of CRIU's links in all directories of this machine. CRIU numbers its links per job, so two jobs with
/// files in one directory (/dev/shm) may use the same names. While one job creates links to be resumed, no other job may
/// be dumped or resumed.
pub struct NamesLock {
    _file: Option<File>,
}

impl NamesLock {
    /// For a dump, which waits for at most this long. Other dumps can run at the same time, because CRIU chooses unused
    /// names.
    #[must_use]
    pub fn shared(timeout: Duration) -> Self {
        Self::take(FlockOperation::NonBlockingLockShared, timeout.min(NAMES_LOCK_TIMEOUT))
    }

    /// For a restore.
    #[must_use]
    pub fn exclusive() -> Self {
        Self::take(FlockOperation::NonBlockingLockExclusive, NAMES_LOCK_TIMEOUT)
    }

    fn take(operation: FlockOperation, timeout: Duration) -> Self {
        let open = || -> io::Result<File> {
            let path = runtime_dir()?.join("names.lock");
            let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(path)?;
            let deadline = Instant::now() + timeout;
            while let Err(error) = retry_on_intr(|| rustix::fs::flock(&file, operation)) {
                if error != rustix::io::Errno::WOULDBLOCK {
                    return Err(error.into());
                }
                if Instant::now() > deadline {
                    tracing::warn!(
                        "another job on this machine has been dumping or resuming for over {} s; no longer waiting for that job",
                        timeout.as_secs()
                    );
                    return Ok(file);
                }
                std::thread::sleep(NAMES_LOCK_POLL_INTERVAL);
            }
            Ok(file)
        };
        // If this is the only job on the machine, no lock is needed.
        let file =
            open().inspect_err(|error| tracing::debug!("cannot lock the names of CRIU's links: {error}"));
        Self { _file: file.ok() }
    }
}

/// Finds another name in the same directory for each of `paths` (CRIU's links). `root` is the job's root directory.
///
/// # Errors
/// When a file has no other name there: the file was moved to another directory.
pub fn find(paths: &[String], root: &Path) -> Result<Vec<LinkedFile>, String> {
    paths.iter().map(|path| find_one(path, root)).collect()
}

fn find_one(path: &str, root: &Path) -> Result<LinkedFile, String> {
    let cannot = |error: io::Error| format!("cannot find another name of the file {path}: {error}");
    let dir = Path::new(path).parent().unwrap_or(Path::new("/"));
    let wanted = fs::symlink_metadata(inside(root, path)).map_err(cannot)?;
    for entry in fs::read_dir(inside(root, dir)).map_err(cannot)? {
        let entry = entry.map_err(cannot)?;
        let name = entry.file_name();
        let meta = entry.metadata().map_err(cannot)?;
        if (meta.dev(), meta.ino()) == (wanted.dev(), wanted.ino())
            && !name.to_string_lossy().starts_with(CRIU_LINK_PREFIX)
        {
            let target = dir.join(name).to_string_lossy().into_owned();
            return Ok(LinkedFile { path: path.to_owned(), target });
        }
    }
    Err(format!("a file that the job has open was moved out of {}: close it or move it back", dir.display()))
}

/// Removes CRIU's links after a dump that has ended the job. After other dumps CRIU removes them itself.
pub fn remove(links: &[LinkedFile], root: &Path) {
    for link in links {
        if let Err(error) = fs::remove_file(inside(root, &link.path)) {
            tracing::debug!("cannot remove {}: {error}", link.path);
        }
    }
}

/// CRIU's links and ghosts, for the duration of a restore.
pub struct Links {
    /// What has to be gone after it.
    temporary: Vec<PathBuf>,
    _lock: Option<NamesLock>,
}

impl Links {
    /// Creates the links, and deletes what a killed restore has left of `ghosts`: files without a name, to which CRIU gives
    /// one until they are open.
    ///
    /// # Errors
    /// When a link cannot be created, or a ghost not be deleted.
    pub fn create(links: &[LinkedFile], ghosts: Vec<String>) -> Result<Self> {
        let lock = (!links.is_empty()).then(NamesLock::exclusive);
        let mut all = Self { temporary: Vec::new(), _lock: lock };
        for ghost in ghosts {
            remove_temporary(Path::new(&ghost)).with_context(|| format!("cannot remove {ghost}"))?;
            all.temporary.push(ghost.into());
        }
        for link in links {
            let path = Path::new(&link.path);
            let is_criu_link =
                path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(CRIU_LINK_PREFIX));
            anyhow::ensure!(
                is_criu_link,
                "the snapshot lists {} as a link of CRIU, which it is not",
                link.path
            );
            // An existing link was left behind by a CRIU that was killed.
            remove_temporary(path).with_context(|| format!("cannot remove {}", link.path))?;
            fs::hard_link(&link.target, path)
                .with_context(|| format!("cannot link {}, which the job had open", link.target))?;
            all.temporary.push(path.to_owned());
        }
        Ok(all)
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        for path in &self.temporary {
            // CRIU has removed them if the restore succeeded.
            let _ = remove_temporary(path);
        }
    }
}

/// Removes a file or an empty directory, if it is there: ghosts are both.
fn remove_temporary(path: &Path) -> io::Result<()> {
    let removed = match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => fs::remove_dir(path),
        removed => removed,
    };
    removed.or_else(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(()),
        _ => Err(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_name_is_found_and_linked() {
        let dir = tempfile::tempdir().unwrap();
        let name = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        fs::write(name("kept"), "x").unwrap();
        fs::hard_link(name("kept"), name("link_remap.7")).unwrap();
        let found = find(&[name("link_remap.7")], Path::new("/")).unwrap();
        assert_eq!(found, [LinkedFile { path: name("link_remap.7"), target: name("kept") }]);
        fs::remove_file(name("link_remap.7")).unwrap();
        let ghosts = ["file.cr.1.ghost", "dir.cr.2.ghost", "none.cr.3.ghost"].map(name);
        fs::write(&ghosts[0], "").unwrap();
        fs::create_dir(&ghosts[1]).unwrap();
        let links = Links::create(&found, ghosts.to_vec()).unwrap();
        assert!(ghosts.iter().all(|ghost| !Path::new(ghost).exists()));
        fs::write(&ghosts[2], "").unwrap();
        assert_eq!(fs::read_to_string(name("link_remap.7")).unwrap(), "x");
        drop(links);
        assert!(!Path::new(&name("link_remap.7")).exists() && !Path::new(&ghosts[2]).exists());
        assert!(
            Links::create(&[LinkedFile { path: name("other"), target: name("kept") }], Vec::new()).is_err()
        );
    }

    #[test]
    fn a_file_that_was_moved_to_another_directory_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("link_remap.1").to_str().unwrap().to_owned();
        fs::write(&path, "").unwrap();
        assert!(find(&[path], Path::new("/")).unwrap_err().contains("moved out of"));
    }
}
