//! The directories and names below the root of a [`DirMedium`](super::DirMedium). Every file is accessed through the
//! descriptor of its directory, which is opened without following symbolic links below the root. So nothing outside
//! the root is ever read, written or removed.

use crate::files::{create_private_dir, open_beneath, sync_dir};
use crate::medium::dir::Guard;
use crate::medium::record::{Notes, Operation};
use crate::{RelPath, faults};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::{Errno, retry_on_intr};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// The prefix of the names of unfinished files.
pub(super) const TEMPORARY: &str = ".tmp-";

/// The root directory of a medium.
pub(super) struct Root {
    pub(super) directory: PathBuf,
    /// Directories (relative to the root) that this process has made durable.
    durable: Mutex<BTreeSet<PathBuf>>,
    /// The device of its file system, once it has been there.
    device: OnceLock<u64>,
    guard: Option<Guard>,
    notes: Notes,
}

/// The directory of an object, and the object's name in it.
#[derive(Debug)]
pub(super) struct Folder {
    dir: File,
    /// The directory, relative to the root.
    path: PathBuf,
    pub(super) name: OsString,
    pub(super) notes: Notes,
}

impl Root {
    pub(super) fn new(directory: PathBuf, notes: Notes) -> Self {
        Self { directory, durable: Mutex::default(), device: OnceLock::new(), guard: None, notes }
    }

    pub(super) fn with_guard(self, guard: Option<Guard>) -> Self {
        Self { guard, ..self }
    }

    /// Opens the directory of the object `name`.
    pub(super) fn folder_of(&self, name: &RelPath) -> io::Result<Folder> {
        let (parent, name) = split(name)?;
        Ok(self.folder(self.open_dir(parent)?, parent, name))
    }

    /// Opens the directory of the object `name`; creates it, durably, if it is missing.
    pub(super) fn make_folder_of(&self, name: &RelPath) -> io::Result<Folder> {
        let (parent, name) = split(name)?;
        let is_durable = self.durable.lock().contains(parent);
        let dir = match self.open_dir(parent) {
            Ok(dir) if is_durable => dir,
            Ok(_) => self.make_dir(parent)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.make_dir(parent)?,
            Err(error) => return Err(error),
        };
        self.durable.lock().insert(parent.to_owned());
        Ok(self.folder(dir, parent, name))
    }

    fn folder(&self, dir: File, path: &Path, name: &OsStr) -> Folder {
        Folder { dir, path: path.to_owned(), name: name.to_owned(), notes: self.notes.clone() }
    }

    /// Creates the directory `path` and its missing parents, and makes their entries durable.
    fn make_dir(&self, path: &Path) -> io::Result<File> {
        self.check_mounted()?;
        make_root(&self.directory)?;
        let mut dir = self.open_root()?;
        let mut above = PathBuf::new();
        for part in path {
            let below = above.join(part);
            self.notes.note(|| Operation::MakeDir { path: below.clone() });
            match rustix::fs::mkdirat(&dir, part, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            self.notes.sync_dir(&above, &dir)?;
            dir = open_dir_at(&dir, Path::new(part))?;
            above = below;
        }
        Ok(dir)
    }

    /// A root that was there, and whose file system is not mounted any more, is not made on the disk below.
    fn check_mounted(&self) -> io::Result<()> {
        let is_there = std::fs::read_dir(&self.directory).is_ok_and(|mut entries| entries.next().is_some());
        if is_there {
            return Ok(());
        }
        let found = self.directory.ancestors().find_map(|dir| dir.metadata().ok());
        match (self.device.get(), found) {
            (Some(device), Some(found)) if found.dev() != *device => {
                Err(io::Error::other("its file system is not mounted any more"))
            }
            _ => self.guard.as_ref().map_or(Ok(()), |guard| guard()),
        }
    }

    fn open_root(&self) -> io::Result<File> {
        // What is no directory is not waited for, such as a fifo.
        let flags = OFlags::DIRECTORY.bits().cast_signed();
        let root = File::options().read(true).custom_flags(flags).open(&self.directory)?;
        if self.device.get().is_none() {
            let _ = self.device.set(root.metadata()?.dev());
        }
        Ok(root)
    }

    fn open_dir(&self, path: &Path) -> io::Result<File> {
        let root = self.open_root()?;
        if path.as_os_str().is_empty() { Ok(root) } else { open_dir_at(&root, path) }
    }

    /// Name and status of each object directly below `dir`.
    pub(super) fn files(&self, dir: &Path) -> io::Result<Vec<(String, Stat)>> {
        let dir = match self.open_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            dir => dir?,
        };
        let mut found = Vec::new();
        for (name, facts) in entries(&dir)? {
            if is_file(&facts) && !is_temporary(&name) {
                // Names of objects are UTF-8: other files are ignored.
                let Ok(name) = name.into_string() else { continue };
                found.push((name, facts));
            }
        }
        Ok(found)
    }

    /// Removes all temporary files that are at least `age` old; returns their paths below the root.
    pub(super) fn sweep(&self, age: Duration) -> io::Result<Vec<String>> {
        let now = SystemTime::now();
        let is_old = |facts: &Stat| now.duration_since(written(facts)).unwrap_or_default() >= age;
        let mut removed = Vec::new();
        let mut todo = vec![PathBuf::new()];
        while let Some(path) = todo.pop() {
            let dir = match self.open_dir(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                dir => dir?,
            };
            let before = removed.len();
            for (name, facts) in entries(&dir)? {
                if FileType::from_raw_mode(facts.st_mode).is_dir() {
                    todo.push(path.join(name));
                } else if is_file(&facts) && is_temporary(&name) && is_old(&facts) {
                    faults::hit("sweep")?;
                    let path = path.join(&name);
                    rustix::fs::unlinkat(&dir, &name, AtFlags::empty())?;
                    self.notes.note(|| Operation::Unlink { path: path.clone() });
                    tracing::debug!("removed {}", self.directory.join(&path).display());
                    removed.push(path.display().to_string());
                }
            }
            if removed.len() > before {
                self.notes.sync_dir(&path, &dir)?;
            }
        }
        Ok(removed)
    }
}

impl Folder {
    /// The path of `name`, relative to the root.
    pub(super) fn path_of(&self, name: &OsStr) -> PathBuf {
        self.path.join(name)
    }

    /// Creates an empty temporary file with mode 0600.
    pub(super) fn create_temporary(&self) -> io::Result<(File, OsString)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let mut name = OsString::from(format!("{TEMPORARY}{}-{number}-", std::process::id()));
            name.push(&self.name);
            match retry_on_intr(|| rustix::fs::openat(&self.dir, &name, flags, Mode::RUSR | Mode::WUSR)) {
                Ok(file) => {
                    // Recorded after the fact, but before any other operation on this file.
                    self.notes.note(|| Operation::Create { path: self.path_of(&name) });
                    return Ok((File::from(file), name));
                }
                // Left by an earlier process with the same PID.
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Opens the object for reading.
    pub(super) fn open_file(&self) -> io::Result<File> {
        let file = open_beneath(&self.dir, &self.name)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file"));
        }
        Ok(file)
    }

    /// Renames the file `temporary`, which is open as `file`, to the object's name, unless that name exists.
    pub(super) fn rename_new(&self, temporary: &OsStr, file: &File) -> io::Result<()> {
        let (dir, name) = (&self.dir, &self.name);
        let renamed = rustix::fs::renameat_with(dir, temporary, dir, name, RenameFlags::NOREPLACE);
        match after("rename-done", renamed) {
            // Some file systems, such as NFS, do not support the flag, but they support hard links.
            Err(Errno::INVAL | Errno::NOSYS) => return self.link_new(temporary, file),
            Err(error) if !self.is_object(error, file) => return Err(error.into()),
            _ => {}
        }
        self.note_rename(temporary);
        Ok(())
    }

    /// As [`Folder::rename_new`], with a hard link.
    pub(super) fn link_new(&self, temporary: &OsStr, file: &File) -> io::Result<()> {
        let linked = rustix::fs::linkat(&self.dir, temporary, &self.dir, &self.name, AtFlags::empty());
        match after("link-done", linked) {
            Err(error) if !self.is_object(error, file) => return Err(error.into()),
            _ => {}
        }
        let (from, to) = (self.path_of(temporary), self.path_of(&self.name));
        self.notes.note(|| Operation::Link { from, to });
        if let Err(error) = self.unlink(temporary) {
            // The object exists; the next sweep removes the temporary name.
            tracing::warn!("cannot remove the temporary name {}: {error}", temporary.display());
        }
        Ok(())
    }

    /// Whether `file` is the object although this error says that it is not: it was interrupted, or a server of a network
    /// file system has answered a repeated request, of which the first one succeeded.
    fn is_object(&self, error: Errno, file: &File) -> bool {
        let object = || rustix::fs::statat(&self.dir, &self.name, AtFlags::SYMLINK_NOFOLLOW).ok();
        let of = |facts: Stat| (facts.st_dev, facts.st_ino);
        matches!(error, Errno::EXIST | Errno::INTR | Errno::NOENT)
            && object().map(of) == rustix::fs::fstat(file).ok().map(of)
    }

    fn note_rename(&self, temporary: &OsStr) {
        let to = || self.path_of(&self.name);
        self.notes.note(|| Operation::Rename { from: self.path_of(temporary), to: to() });
    }

    /// Removes the file `name`.
    pub(super) fn unlink(&self, name: &OsStr) -> io::Result<()> {
        rustix::fs::unlinkat(&self.dir, name, AtFlags::empty())?;
        self.notes.note(|| Operation::Unlink { path: self.path_of(name) });
        Ok(())
    }

    /// Makes the directory's entries durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        faults::hit("sync-dir")?;
        self.notes.sync_dir(&self.path, &self.dir)
    }
}

/// The result of a call, or the error of the fault point that comes after it.
fn after(point: &str, done: rustix::io::Result<()>) -> rustix::io::Result<()> {
    done?;
    faults::hit(point).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

fn is_temporary(name: &OsStr) -> bool {
    name.as_bytes().starts_with(TEMPORARY.as_bytes())
}

fn is_file(facts: &Stat) -> bool {
    FileType::from_raw_mode(facts.st_mode).is_file()
}

/// The directory and the last component of an object's name.
fn split(name: &RelPath) -> io::Result<(&Path, &OsStr)> {
    let path: &Path = name.as_ref();
    let last = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    if is_temporary(last) {
        let message = format!("the name of an object must not begin with {TEMPORARY}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    Ok((path.parent().unwrap_or(Path::new("")), last))
}

fn open_dir_at(dir: &File, path: &Path) -> io::Result<File> {
    let found = open_beneath(dir, path)?;
    if found.metadata()?.is_dir() { Ok(found) } else { Err(io::ErrorKind::NotADirectory.into()) }
}

/// Creates the root and its missing parents, durably.
fn make_root(root: &Path) -> io::Result<()> {
    if root.exists() {
        return Ok(());
    }
    let parent = root.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    make_root(parent)?;
    create_private_dir(root)?;
    sync_dir(parent)
}

/// The modification time of a file.
pub(super) fn written(facts: &Stat) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(facts.st_mtime.try_into().unwrap_or(0))
}

/// Name and status of every entry of `dir`, without entries that are removed concurrently.
fn entries(dir: &File) -> io::Result<Vec<(OsString, Stat)>> {
    let mut found = Vec::new();
    for entry in retry_on_intr(|| Dir::read_from(dir))? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(facts) => found.push((name.to_owned(), facts)),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(found)
}
