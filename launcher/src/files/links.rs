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

/// CRIU's links, for the duration of a restore.
pub struct Links {
    created: Vec<PathBuf>,
    _lock: Option<NamesLock>,
}

impl Links {
    /// Creates the links.
    ///
    /// # Errors
    /// When a link cannot be created.
    pub fn create(links: &[LinkedFile]) -> Result<Self> {
        let lock = (!links.is_empty()).then(NamesLock::exclusive);
        let mut all = Self { created: Vec::new(), _lock: lock };
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
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot remove {}", link.path));
                }
                _ => {}
            }
            fs::hard_link(&link.target, path)
                .with_context(|| format!("cannot link {}, which the job had open", link.target))?;
            all.created.push(path.to_owned());
        }
        Ok(all)
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        for path in &self.created {
            // CRIU has removed the links if the restore succeeded.
            let _ = fs::remove_file(path);
        }
    }
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
        let links = Links::create(&found).unwrap();
        assert_eq!(fs::read_to_string(name("link_remap.7")).unwrap(), "x");
        drop(links);
        assert!(!Path::new(&name("link_remap.7")).exists());
        assert!(Links::create(&[LinkedFile { path: name("other"), target: name("kept") }]).is_err());
    }

    #[test]
    fn a_file_that_was_moved_to_another_directory_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("link_remap.1").to_str().unwrap().to_owned();
        fs::write(&path, "").unwrap();
        assert!(find(&[path], Path::new("/")).unwrap_err().contains("moved out of"));
    }
}
