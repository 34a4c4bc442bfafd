//! Files that are open under a name that they have lost while they have another (`sem_open` makes such). CRIU gives
//! them a name of its own, `link_remap.N`, beside the lost one; as the job runs on, CRIU removes it again. So the name
//! is made anew for the time of a restore.

use crate::namespace::inside;
use crate::sys::deadline::{NAMES_LOCK_POLL_INTERVAL, NAMES_LOCK_TIMEOUT};
use crate::sys::runtime_dir::runtime_dir;
use anyhow::{Context, Result};
use ckpt_snapshot::LinkedFile;
use rustix::fs::FlockOperation;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

const CRIU_NAME: &str = "link_remap.";
/// CRIU's names are numbers of the job's own: two jobs that have files in one directory (/dev/shm) may use the same
/// ones. So while one job makes such names to be resumed, no other is dumped or resumed.
pub struct NamesLock {
    _file: Option<File>,
}

impl NamesLock {
    /// For a dump: other dumps may go on, CRIU sees to it that names are free.
    #[must_use]
    pub fn shared() -> Self {
        Self::take(FlockOperation::NonBlockingLockShared)
    }

    /// For a restore.
    #[must_use]
    pub fn exclusive() -> Self {
        Self::take(FlockOperation::NonBlockingLockExclusive)
    }

    fn take(operation: FlockOperation) -> Self {
        let open = || -> io::Result<File> {
            let path = runtime_dir()?.join("names.lock");
            let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(path)?;
            let deadline = Instant::now() + NAMES_LOCK_TIMEOUT;
            while let Err(error) = rustix::fs::flock(&file, operation) {
                if error != rustix::io::Errno::WOULDBLOCK {
                    return Err(error.into());
                }
                if Instant::now() > deadline {
                    tracing::warn!(
                        "another job on this machine is being dumped or resumed, and has been for long: this one goes on beside it"
                    );
                    return Ok(file);
                }
                std::thread::sleep(NAMES_LOCK_POLL_INTERVAL);
            }
            Ok(file)
        };
        // A job alone on its machine needs none.
        let file =
            open().inspect_err(|error| tracing::debug!("jobs on this machine cannot be told apart: {error}"));
        Self { _file: file.ok() }
    }
}

/// Finds the other name of each of `paths` (CRIU's names), in the same directory. `root` leads to the job's view of
/// the file system.
///
/// # Errors
/// When one has none there: the file was moved to another directory.
pub fn find(paths: &[String], root: &Path) -> Result<Vec<LinkedFile>, String> {
    paths.iter().map(|path| find_one(path, root)).collect()
}

fn find_one(path: &str, root: &Path) -> Result<LinkedFile, String> {
    let cannot = |error: io::Error| format!("cannot find out which file {path} is: {error}");
    let dir = Path::new(path).parent().unwrap_or(Path::new("/"));
    let wanted = fs::symlink_metadata(inside(root, path)).map_err(cannot)?;
    for entry in fs::read_dir(inside(root, dir)).map_err(cannot)? {
        let entry = entry.map_err(cannot)?;
        let name = entry.file_name();
        let meta = entry.metadata().map_err(cannot)?;
        if (meta.dev(), meta.ino()) == (wanted.dev(), wanted.ino())
            && !name.to_string_lossy().starts_with(CRIU_NAME)
        {
            let target = dir.join(name).to_string_lossy().into_owned();
            return Ok(LinkedFile { path: path.to_owned(), target });
        }
    }
    Err(format!("a file that the job has open was moved out of {}: close it or move it back", dir.display()))
}

/// Removes CRIU's names after a dump that has ended the job; after others CRIU does so itself.
pub fn forget(links: &[LinkedFile], root: &Path) {
    for link in links {
        if let Err(error) = fs::remove_file(inside(root, &link.path)) {
            tracing::debug!("{} stays: {error}", link.path);
        }
    }
}

/// CRIU's names, for as long as a restore takes.
pub struct Links {
    made: Vec<PathBuf>,
    _lock: Option<NamesLock>,
}

impl Links {
    /// Makes the names.
    ///
    /// # Errors
    /// When one cannot be made.
    pub fn put_back(links: &[LinkedFile]) -> Result<Self> {
        let lock = (!links.is_empty()).then(NamesLock::exclusive);
        let mut made = Self { made: Vec::new(), _lock: lock };
        for link in links {
            let path = Path::new(&link.path);
            let ours = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(CRIU_NAME));
            anyhow::ensure!(ours, "the snapshot names {} as one of CRIU's files, which it is not", link.path);
            // One that is there was left by a CRIU that was killed.
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot remove {}", link.path));
                }
                _ => {}
            }
            fs::hard_link(&link.target, path)
                .with_context(|| format!("the job had {} open, and it cannot be found now", link.target))?;
            made.made.push(path.to_owned());
        }
        Ok(made)
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        for path in &self.made {
            // CRIU removes them when the restore succeeds.
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_name_is_found_and_linked() {
        let dir = tempfile::tempdir().unwrap();
        let name = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        fs::write(name("kept"), "x").unwrap();
        fs::hard_link(name("kept"), name("link_remap.7")).unwrap();
        let found = find(&[name("link_remap.7")], Path::new("/")).unwrap();
        assert_eq!(found, [LinkedFile { path: name("link_remap.7"), target: name("kept") }]);
        fs::remove_file(name("link_remap.7")).unwrap();
        let links = Links::put_back(&found).unwrap();
        assert_eq!(fs::read_to_string(name("link_remap.7")).unwrap(), "x");
        drop(links);
        assert!(!Path::new(&name("link_remap.7")).exists());
        assert!(Links::put_back(&[LinkedFile { path: name("other"), target: name("kept") }]).is_err());
    }

    #[test]
    fn a_file_that_moved_away_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("link_remap.1").to_str().unwrap().to_owned();
        fs::write(&path, "").unwrap();
        assert!(find(&[path], Path::new("/")).unwrap_err().contains("moved out of"));
    }
}
