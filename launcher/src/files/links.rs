//! Open files whose name was removed while the file has another name (`sem_open` creates such files). For a dump, CRIU
//! links such a file as `link_remap.N` in the directory of the removed name, and removes the link when the job continues.
//! This module creates the link again for the duration of a restore.

use crate::files::saved::is_shared_memory;
use crate::namespace::{inside, numbers_in, pid_namespace_of};
use crate::sys::deadline::{NAMES_LOCK_POLL_INTERVAL, NAMES_LOCK_TIMEOUT};
use crate::sys::path_text::{path_text, read_maps, shown, text_path};
use crate::sys::runtime_dir::runtime_dir;
use anyhow::{Context, Result};
use ckpt_snapshot::LinkedFile;
use rustix::fs::{FlockOperation, OFlags};
use rustix::io::retry_on_intr;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Prefix of the links that CRIU creates.
const CRIU_LINK_PREFIX: &str = "link_remap.";

/// An open file or directory without a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ghost {
    /// The text of the absolute path that it had.
    pub path: String,
    /// The number that CRIU has given it.
    pub id: u32,
    /// Whether it is a directory.
    pub is_directory: bool,
}

impl Ghost {
    #[cfg(test)]
    pub fn new(path: &str, is_directory: bool) -> Self {
        Self { path: path.to_owned(), id: 1, is_directory }
    }

    /// The name that CRIU gives it in a restore, and deletes at the end of that. A restore finds those that a killed one
    /// has left, and fails.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}.cr.{:x}.ghost", self.path, self.id)
    }
}

/// How the kernel marks the path of an open file whose name was removed (proc_pid_fd(5)).
const REMOVED: &[u8] = b" (deleted)";

/// Whether CRIU gives names like this to links that it makes for a dump.
#[must_use]
pub fn is_criu_link(name: &str) -> bool {
    let number = name.strip_prefix(CRIU_LINK_PREFIX);
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit()))
}

/// Lock on the names of CRIU's links in all directories of this machine. CRIU numbers its links per dump, and fails where a
/// name is taken, so two jobs with such files in one directory (/dev/shm) are in each other's way.
pub struct NamesLock {
    /// None if the lock could not be had.
    file: Option<File>,
    is_exclusive: bool,
}

impl NamesLock {
    /// For a dump beside other dumps, which mostly have no such files. If a name is taken, the next try is
    /// [`Self::exclusive`].
    #[must_use]
    pub fn shared(timeout: Duration) -> Self {
        Self::take(FlockOperation::NonBlockingLockShared, timeout)
    }

    /// For a restore, or a dump beside which nothing else of this user is dumped or restored.
    #[must_use]
    pub fn exclusive(timeout: Duration) -> Self {
        Self::take(FlockOperation::NonBlockingLockExclusive, timeout)
    }

    /// Waits for at most this long, and for at most [`NAMES_LOCK_TIMEOUT`].
    fn take(operation: FlockOperation, timeout: Duration) -> Self {
        let timeout = timeout.min(NAMES_LOCK_TIMEOUT);
        let open = || -> io::Result<Option<File>> {
            let path = runtime_dir()?.join("names.lock");
            // Anything else in its place is an error, and nothing to wait for.
            let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
            let mut options = File::options();
            let file = options
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(flags)
                .open(path)?;
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
                    return Ok(None);
                }
                std::thread::sleep(NAMES_LOCK_POLL_INTERVAL);
            }
            Ok(Some(file))
        };
        // If this is the only job on the machine, no lock is needed.
        let file =
            open().inspect_err(|error| tracing::debug!("cannot lock the names of CRIU's links: {error}"));
        Self {
            file: file.unwrap_or_default(),
            is_exclusive: operation == FlockOperation::NonBlockingLockExclusive,
        }
    }
}

/// The directory in which a dump has found the name of a link taken, from CRIU's log.
#[must_use]
pub fn taken_in(log: &str) -> Option<PathBuf> {
    let failed =
        log.lines().filter_map(|line| line.split_once("Can't link remap to ")?.1.split_once(": File exists"));
    failed.filter_map(|(path, _)| Path::new(path).parent().map(Path::to_owned)).next()
}

/// Deletes the links that killed dumps and restores have left in a directory of the job, whose root is `root`: those of this
/// user's files that have another name, and that no process outside of the job uses. In `/dev/shm` they need no other
/// name if nothing else is dumped or restored: a job that is resumed puts its files back as new ones, and a snapshot has
/// their content. Nothing may dump the job meanwhile, and without a lock nothing is deleted. Whether there are some that
/// others use: the processes of a job that was killed may be about to end.
pub fn remove_left(dir: &Path, root: &Path, init_pid: i32, lock: &NamesLock) -> bool {
    let Ok(entries) = fs::read_dir(inside(root, dir)) else { return false };
    let is_alone = lock.is_exclusive && is_shared_memory(&path_text(dir.join("any")));
    let least_names = if is_alone { 1 } else { 2 };
    let is_mine = |meta: &Metadata| {
        meta.is_file() && meta.uid() == rustix::process::geteuid().as_raw() && meta.nlink() >= least_names
    };
    let mut left = BTreeMap::<(u64, u64), Vec<PathBuf>>::new();
    for entry in entries.flatten().filter(|_| lock.file.is_some()) {
        let is_link = is_criu_link(&entry.file_name().to_string_lossy());
        if let Ok(meta) = entry.metadata()
            && is_link
            && is_mine(&meta)
        {
            left.entry((meta.dev(), meta.ino())).or_default().push(entry.path());
        }
    }
    let found = left.len();
    if found > 0 {
        keep_unused_outside(&mut left, init_pid);
    }
    let are_used = left.len() < found;
    for path in left.into_values().flatten() {
        match fs::remove_file(&path) {
            Ok(()) => {
                tracing::info!("deleted {}, which a killed checkpoint or resume had left", path.display());
            }
            Err(error) => tracing::debug!("cannot remove {}: {error}", path.display()),
        }
    }
    are_used
}

/// The directories in which a dump makes links: those of open files whose name was removed, and which have another one.
/// `proc` is the job's /proc.
pub fn dirs_of_unnamed(proc: &Path) -> BTreeSet<PathBuf> {
    let mut dirs = BTreeSet::new();
    for pid in numbers_in(proc).unwrap_or_default() {
        for fd in fs::read_dir(proc.join(format!("{pid}/fd"))).into_iter().flatten().flatten() {
            let Ok(target) = fs::read_link(fd.path()) else { continue };
            let is_removed = target.as_os_str().as_bytes().ends_with(REMOVED);
            if is_removed && fs::metadata(fd.path()).is_ok_and(|meta| meta.is_file() && meta.nlink() > 0) {
                dirs.extend(target.parent().map(Path::to_owned));
            }
        }
    }
    dirs
}

/// Keeps the files, known by device and inode, that no process outside of the PID namespace of `init_pid` has open or mapped.
fn keep_unused_outside<T>(files: &mut BTreeMap<(u64, u64), T>, init_pid: i32) {
    let of_job = pid_namespace_of(init_pid);
    let pids = numbers_in("/proc").unwrap_or_default().into_iter();
    for pid in pids.filter(|&pid| of_job.is_none() || pid_namespace_of(pid) != of_job) {
        let of = PathBuf::from(format!("/proc/{pid}"));
        for fd in fs::read_dir(of.join("fd")).into_iter().flatten().flatten() {
            if let Ok(meta) = fs::metadata(fd.path()) {
                files.remove(&(meta.dev(), meta.ino()));
            }
        }
        let maps = read_maps(of.join("maps")).ok();
        for map in maps.into_iter().flat_map(|maps| maps.0).filter(|map| map.inode != 0) {
            files.retain(|&(_, inode), _| inode != map.inode);
        }
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
    let cannot = |error: io::Error| format!("cannot find another name of the file {}: {error}", shown(path));
    let path = text_path(path);
    let dir = path.parent().unwrap_or(Path::new("/"));
    let wanted = fs::symlink_metadata(inside(root, &path)).map_err(cannot)?;
    for entry in fs::read_dir(inside(root, dir)).map_err(cannot)? {
        let entry = entry.map_err(cannot)?;
        let name = entry.file_name();
        let meta = match entry.metadata() {
            // Other programs remove their files meanwhile, in /dev/shm for instance.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            meta => meta.map_err(cannot)?,
        };
        if (meta.dev(), meta.ino()) == (wanted.dev(), wanted.ino()) && !is_criu_link(&name.to_string_lossy())
        {
            let target = path_text(dir.join(name));
            return Ok(LinkedFile { path: path_text(path), target });
        }
    }
    Err(format!("a file that the job has open was moved out of {}: close it or move it back", dir.display()))
}

/// The name of a deleted directory of `ghosts` that something else has now: a restore would delete that, or fail.
#[must_use]
pub fn taken_name<'a>(ghosts: &'a [Ghost], root: &Path) -> Option<Cow<'a, Path>> {
    let mut dirs = ghosts.iter().filter(|ghost| ghost.is_directory).map(|ghost| text_path(&ghost.path));
    dirs.find(|path| fs::symlink_metadata(inside(root, path)).is_ok())
}

/// Refuses open files and directories without a name that a restore could not make again: see [`taken_name`]; or the
/// directory of a file is another kind of file now.
///
/// # Errors
/// Names the path.
pub fn check_ghosts(ghosts: &[Ghost], root: &Path) -> Result<(), String> {
    if let Some(path) = taken_name(ghosts, root) {
        return Err(format!(
            "a process of the job has the directory {0} open, or as its working directory, which was deleted, and something else has its name now: let the process leave it, or give the new {0} another name",
            path.display()
        ));
    }
    for ghost in ghosts {
        let path = text_path(&ghost.path);
        let found = path.ancestors().skip(1).find_map(|dir| {
            let at = inside(root, dir);
            fs::symlink_metadata(&at).ok()?;
            Some((dir, fs::metadata(&at).is_ok_and(|meta| meta.is_dir())))
        });
        if let Some((dir, false)) = found {
            return Err(format!(
                "the job has a deleted file open whose directory was {}, which is no directory any more: close the file, or give the new one another name",
                dir.display()
            ));
        }
    }
    Ok(())
}

/// Removes CRIU's links after a dump that has ended the job. After other dumps CRIU removes them itself.
pub fn remove(links: &[LinkedFile], root: &Path) {
    for link in links {
        if let Err(error) = fs::remove_file(inside(root, text_path(&link.path))) {
            tracing::debug!("cannot remove {}: {error}", shown(&link.path));
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
    pub fn create(links: &[LinkedFile], ghosts: &[Ghost]) -> Result<Self> {
        let lock = (!links.is_empty()).then(|| NamesLock::exclusive(NAMES_LOCK_TIMEOUT));
        let mut all = Self { temporary: Vec::new(), _lock: lock };
        for ghost in ghosts {
            let ghost = text_path(&ghost.name()).into_owned();
            remove_temporary(&ghost).with_context(|| format!("cannot remove {}", ghost.display()))?;
            all.temporary.push(ghost);
        }
        for link in links {
            let (path, target) = (text_path(&link.path), text_path(&link.target));
            anyhow::ensure!(
                path.file_name().is_some_and(|name| is_criu_link(&name.to_string_lossy())),
                "the snapshot lists {} as a link of CRIU, which it is not",
                path.display()
            );
            // An existing link was left behind by a CRIU that was killed.
            remove_temporary(&path).with_context(|| format!("cannot remove {}", path.display()))?;
            fs::hard_link(&target, &path)
                .with_context(|| format!("cannot link {}, which the job had open", target.display()))?;
            all.temporary.push(path.into_owned());
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
    fn a_deleted_file_needs_a_directory_and_a_deleted_directory_its_name() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("replaced"), "").unwrap();
        fs::create_dir(dir.path().join("again")).unwrap();
        let check = |name: &str, is_directory| {
            check_ghosts(&[Ghost::new(&format!("/{name}"), is_directory)], dir.path())
        };
        for fine in ["f", "gone/below/f", "again", "again/f", "replaced"] {
            assert_eq!(check(fine, false), Ok(()), "{fine}");
        }
        assert_eq!([check("gone", true), check("again/gone", true)], [Ok(()), Ok(())]);
        for lost in ["replaced/f", "replaced/below/f"] {
            assert!(check(lost, false).unwrap_err().contains("was /replaced, which"), "{lost}");
        }
        for taken in ["replaced", "again"] {
            assert!(check(taken, true).unwrap_err().contains("something else has its name"), "{taken}");
        }
    }

    #[test]
    fn another_name_is_found_and_linked() {
        let dir = tempfile::tempdir().unwrap();
        let name = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        fs::write(name("kept"), "x").unwrap();
        fs::hard_link(name("kept"), name("link_remap.7")).unwrap();
        let found = find(&[name("link_remap.7")], Path::new("/")).unwrap();
        assert_eq!(found, [LinkedFile { path: name("link_remap.7"), target: name("kept") }]);
        fs::remove_file(name("link_remap.7")).unwrap();
        let made = ["file", "dir", "none"].map(|of| Ghost::new(&name(of), false));
        let ghosts = made.each_ref().map(Ghost::name);
        fs::write(&ghosts[0], "").unwrap();
        fs::create_dir(&ghosts[1]).unwrap();
        let links = Links::create(&found, &made).unwrap();
        assert!(ghosts.iter().all(|ghost| !Path::new(ghost).exists()));
        fs::write(&ghosts[2], "").unwrap();
        assert_eq!(fs::read_to_string(name("link_remap.7")).unwrap(), "x");
        drop(links);
        assert!(!Path::new(&name("link_remap.7")).exists() && !Path::new(&ghosts[2]).exists());
        assert!(Links::create(&[LinkedFile { path: name("other"), target: name("kept") }], &[]).is_err());
    }

    #[test]
    fn the_directory_of_a_taken_name_is_in_the_log() {
        let log =
            "(00.1) Error (criu/files-reg.c:1159): Can't link remap to /dev/shm/sem.6MhAcB: File exists\n";
        assert_eq!(taken_in(log), Some("/dev/shm".into()));
        assert_eq!(
            taken_in("(00.1) Error (criu/files-reg.c:1159): Can't link remap to /x/y: No space left\n"),
            None
        );
    }

    #[test]
    fn only_links_that_nobody_else_uses_are_deleted() {
        deletes_unused(&tempfile::tempdir().unwrap(), true);
    }

    #[test]
    fn links_in_shared_memory_are_deleted_without_another_name() {
        deletes_unused(&tempfile::tempdir_in("/dev/shm").unwrap(), false);
    }

    /// Of two links that were left, one is in use by a process outside of the job.
    fn deletes_unused(dir: &tempfile::TempDir, keeps_last_name: bool) {
        let path = |name: &str| dir.path().join(name);
        for (name, link) in [("unused", "link_remap.1"), ("used", "link_remap.2"), ("named", "other.3")] {
            fs::write(path(name), "x").unwrap();
            fs::hard_link(path(name), path(link)).unwrap();
        }
        fs::write(path("link_remap.4"), "it has no other name").unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("600")
            .stdin(File::open(path("used")).unwrap())
            .spawn()
            .unwrap();
        let lock = NamesLock { file: Some(tempfile::tempfile().unwrap()), is_exclusive: true };
        // There is no such job: every process is outside.
        let remove = |lock: &NamesLock| remove_left(dir.path(), Path::new("/"), i32::MAX, lock);
        let are_left =
            || ["link_remap.1", "link_remap.2", "other.3", "link_remap.4"].map(|name| path(name).exists());
        assert!(!remove(&NamesLock { file: None, is_exclusive: true }) && are_left() == [true; 4]);
        let (is_used, left) = (remove(&lock), are_left());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((is_used, left), (true, [false, true, true, keeps_last_name]));
        assert!(!remove(&lock) && are_left() == [false, false, true, keeps_last_name]);
    }

    #[test]
    fn a_file_that_was_moved_to_another_directory_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("link_remap.1").to_str().unwrap().to_owned();
        fs::write(&path, "").unwrap();
        assert!(find(&[path], Path::new("/")).unwrap_err().contains("moved out of"));
    }
}
