//! Later versions of files that a resume puts back: kept for people, within limits.
//!
//! A later version is renamed into the directory of the resume, `kept/ID-resumed-TIME` in the store. On another file
//! system, a small file or directory is copied there, and a large one is renamed into `.ckpt-run-kept` beside its former place: a resume
//! never waits for a large copy. If there is no space for the end of a file that is cut, the job resumes without keeping
//! that end: a job that cannot be resumed loses more.

use crate::files::capture::reflink;
use crate::files::saved::{copy_bytes, copy_sparse};
use crate::namespace::stdio;
use ckpt_snapshot::{Folder, JobDir, OpenError, SnapshotId};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

/// The files of this many resumes are kept, up to `KEPT_MAX_BYTES`. Those of the newest resume are always kept.
const KEPT: usize = 20;
const KEPT_MAX_BYTES: u64 = 1 << 30;
/// Length of a file's name within the name of what is kept of it (bytes): the result must still be a valid name.
const NAME_MAX_BYTES: usize = 180;
/// Between the snapshot and the time in the name of a directory of kept files.
const RESUMED: &str = "-resumed-";
/// The most that is copied: less than a second.
const COPY_MAX_BYTES: u64 = 64 << 20;
const COPY_MAX_FILES: usize = 1000;
/// A copy that is not complete.
const COPIED: &str = ".ckpt-run-copied";
/// The most of the launcher's messages that stays in its output (bytes).
const MESSAGES_MAX_BYTES: u64 = 1 << 20;
/// The directory for large files of other file systems than that of the store.
pub const BESIDE: &str = ".ckpt-run-kept";

/// The later versions of files of one resume.
pub struct Kept {
    /// The directory in the store; `None` if there is no space for one.
    dir: Option<PathBuf>,
    /// Distinguishes files of the same name.
    resume: String,
    number: usize,
}

impl Kept {
    /// For a resume of `id`. The directory is created if there is space for it.
    ///
    /// # Errors
    /// When it cannot be created for another reason.
    pub fn create(dir: &JobDir, id: &SnapshotId) -> Result<Self, OpenError> {
        let created = match dir.kept_dir(id, std::time::SystemTime::now()) {
            Ok(kept) => Some(kept),
            Err(OpenError::Io { source, .. }) if is_no_space(&source) => None,
            Err(error) => return Err(error),
        };
        Ok(Self::at(created, id.to_string()))
    }

    pub(super) fn at(dir: Option<PathBuf>, resume: String) -> Self {
        Self { dir, resume, number: 0 }
    }

    /// The directory in the store.
    #[must_use]
    pub fn dir(&self) -> Option<&Path> {
        self.dir.as_deref()
    }

    /// Moves a file or directory away. Returns its new path.
    ///
    /// # Errors
    /// When it cannot be renamed or copied.
    pub fn take(&mut self, path: &Path) -> io::Result<PathBuf> {
        let name = self.next_name(path);
        if let Some(to) = self.dir.as_ref().map(|dir| dir.join(&name)) {
            match fs::rename(path, &to) {
                Ok(()) => {
                    unshare(&to);
                    return Ok(self.listed(path, to));
                }
                Err(error) if error.kind() != io::ErrorKind::CrossesDevices => return Err(error),
                Err(_) => {}
            }
            if is_small(path) && copy_tree(path, &to).is_ok() {
                remove_tree(path)?;
                return Ok(self.listed(path, to));
            }
            // A part of a copy is useless, and takes space that the job may need.
            let _ = remove_tree(&to);
        }
        let beside = path.parent().unwrap_or(Path::new("/")).join(BESIDE);
        fs::create_dir_all(&beside)?;
        let to = beside.join(format!("{}-{name}", self.resume));
        fs::rename(path, &to)?;
        unshare(&to);
        Ok(self.listed(path, to))
    }

    /// Copies a file that will be changed in place. `None` if there is no space, or that would take too long.
    ///
    /// # Errors
    /// When it cannot be copied for another reason.
    pub fn copy_before_rewrite(&mut self, path: &Path) -> io::Result<Option<PathBuf>> {
        let name = self.next_name(path);
        let Some(to) = self.dir.as_ref().map(|dir| dir.join(name)) else { return Ok(None) };
        let is_small = data_bytes(&fs::symlink_metadata(path)?) <= COPY_MAX_BYTES;
        match if is_small { copy(path, &to) } else { reflink(path, &to) } {
            Ok(()) => Ok(Some(self.listed(path, to))),
            Err(error) if is_small && !is_no_space(&error) => Err(error),
            Err(_) => {
                // A part of a copy is useless, and takes space that the job may need.
                let _ = fs::remove_file(to);
                Ok(None)
            }
        }
    }

    /// Cuts a file to `then_bytes`, and keeps the removed end.
    ///
    /// # Errors
    /// When the end cannot be kept for another reason than a lack of space, or the file cannot be cut. It is then not cut.
    pub fn cut(&mut self, path: &Path, then_bytes: u64, now_bytes: u64) -> io::Result<()> {
        let tail_bytes = now_bytes - then_bytes;
        let kept = match () {
            () if tail_bytes <= COPY_MAX_BYTES => self.copy_tail(path, then_bytes, tail_bytes)?,
            () => self.share(path),
        };
        // The launcher's own output stays the file that it is.
        let own_output = stdio::own_output(path);
        if kept.is_none()
            && own_output.is_none()
            && tail_bytes > COPY_MAX_BYTES
            && then_bytes <= COPY_MAX_BYTES
        {
            return self.replace_by_beginning(path, then_bytes);
        }
        let messages = stdio::messages_from(path).map(|from| read_end(path, from.max(then_bytes)));
        let opened = File::options().append(true).custom_flags(nofollow()).open(path);
        let mut file = match (opened, own_output) {
            (Err(_), Some(output)) => File::from(output.try_clone_to_owned()?),
            (opened, _) => opened?,
        };
        file.set_len(then_bytes)?;
        if let Some(written) = messages.map(|messages| file.write_all(&messages?)) {
            stdio::messages_moved(path, then_bytes);
            if let Err(error) = written {
                tracing::warn!("messages of ckpt-run in {} are lost: {error}", path.display());
            }
        }
        file.sync_all()?;
        let shown = path.display();
        match kept {
            Some(tail) => tracing::info!(
                "{shown}: rolled back from {now_bytes} to {then_bytes} bytes; the removed end is in {}",
                self.listed(path, tail).display()
            ),
            None => tracing::warn!(
                "{shown}: rolled back from {now_bytes} to {then_bytes} bytes; the removed end is lost, since the store's disk has no space for it, or copying it would take too long"
            ),
        }
        Ok(())
    }

    /// Copies the end of a file. `None` if there is no space.
    fn copy_tail(&mut self, path: &Path, then_bytes: u64, tail_bytes: u64) -> io::Result<Option<PathBuf>> {
        let name = format!("{}.from-byte-{then_bytes}", self.next_name(path));
        let Some(to) = self.dir.as_ref().map(|dir| dir.join(name)) else { return Ok(None) };
        let copy = || -> io::Result<()> {
            let mut from = File::options().read(true).custom_flags(nofollow()).open(path)?;
            from.seek(SeekFrom::Start(then_bytes))?;
            let mut tail = File::options().write(true).create_new(true).mode(0o600).open(&to)?;
            copy_bytes(&mut from, &mut tail, tail_bytes)?;
            tail.sync_all()?;
            to.parent().map_or(Ok(()), ckpt_snapshot::sync_dir)
        };
        match copy() {
            Ok(()) => Ok(Some(to)),
            Err(error) if is_no_space(&error) => {
                // A part of the tail is useless, and takes space that the job may need.
                let _ = fs::remove_file(&to);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Keeps a whole file as a reflink.
    fn share(&mut self, path: &Path) -> Option<PathBuf> {
        let name = self.next_name(path);
        let to = self.dir.as_ref()?.join(name);
        reflink(path, &to).is_ok().then_some(to)
    }

    /// Keeps the whole file, and puts a copy of its beginning in its place.
    fn replace_by_beginning(&mut self, path: &Path, then_bytes: u64) -> io::Result<()> {
        let mut from = File::options().read(true).custom_flags(nofollow()).open(path)?;
        let meta = from.metadata()?;
        let name = crate::restore::put_back::new_name(path);
        let mut new = File::options().write(true).create(true).truncate(true).mode(0o600).open(&name)?;
        copy_bytes(&mut from, &mut new, then_bytes)?;
        fchown(&new, Some(meta.uid()), Some(meta.gid()))?;
        new.set_permissions(fs::Permissions::from_mode(meta.mode() & 0o7777))?;
        new.sync_all()?;
        let kept = self.take(path)?;
        fs::rename(&name, path)?;
        tracing::info!(
            "{}: rolled back from {} to {then_bytes} bytes; all of the later version is {}",
            path.display(),
            meta.len(),
            kept.display()
        );
        Ok(())
    }

    fn next_name(&mut self, path: &Path) -> String {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let end = (0..=name.len().min(NAME_MAX_BYTES)).rev().find(|&end| name.is_char_boundary(end));
        let name = format!("{}-{}", self.number, &name[..end.unwrap_or(0)]);
        self.number += 1;
        name
    }

    /// Adds a line to the list of what was kept, for people.
    fn listed(&self, path: &Path, kept: PathBuf) -> PathBuf {
        let list = self.dir.as_ref().map(|dir| dir.join("paths.txt"));
        let add = |list: PathBuf| -> io::Result<()> {
            let mut list = File::options().append(true).create(true).mode(0o600).open(list)?;
            writeln!(list, "{}\t{}", kept.display(), path.display())
        };
        if let Some(Err(error)) = list.map(add) {
            tracing::debug!("cannot list {}: {error}", kept.display());
        }
        kept
    }
}

/// The end of the file at `path`, from an offset on, of which the first [`MESSAGES_MAX_BYTES`].
fn read_end(path: &Path, from_bytes: u64) -> io::Result<Vec<u8>> {
    let mut file = File::options().read(true).custom_flags(nofollow()).open(path)?;
    file.seek(SeekFrom::Start(from_bytes))?;
    let mut end = Vec::new();
    file.take(MESSAGES_MAX_BYTES).read_to_end(&mut end)?;
    Ok(end)
}

/// A file, or a directory with everything below it.
fn tree(path: &Path) -> walkdir::WalkDir {
    walkdir::WalkDir::new(path).follow_root_links(false)
}

/// The length of a file without its holes, which are not copied.
fn data_bytes(meta: &fs::Metadata) -> u64 {
    meta.len().min(meta.blocks().saturating_mul(512))
}

/// Whether a file, or a directory with everything below it, may be copied.
fn is_small(path: &Path) -> bool {
    let mut bytes = 0;
    tree(path).into_iter().enumerate().all(|(count, entry)| {
        let meta = entry.and_then(|entry| entry.metadata());
        bytes += meta.as_ref().map_or(0, |meta| if meta.is_file() { data_bytes(meta) } else { 0 });
        meta.is_ok() && count < COPY_MAX_FILES && bytes <= COPY_MAX_BYTES
    })
}

/// Gives what was taken files of its own: one with another name, which stays with the job, would change with it. Large ones
/// are left as they are.
fn unshare(kept: &Path) {
    let mut names = BTreeMap::<(u64, u64), Vec<PathBuf>>::new();
    let mut shared = BTreeMap::new();
    for entry in tree(kept).into_iter().take(COPY_MAX_FILES).flatten() {
        if let Ok(meta) = entry.metadata()
            && meta.is_file()
            && meta.nlink() > 1
        {
            names.entry((meta.dev(), meta.ino())).or_default().push(entry.into_path());
            shared.insert((meta.dev(), meta.ino()), meta);
        }
    }
    shared.retain(|inode, meta| meta.nlink() > names[inode].len() as u64);
    if shared.values().map(data_bytes).sum::<u64>() > COPY_MAX_BYTES {
        return;
    }
    for path in shared.keys().flat_map(|inode| &names[inode]) {
        if let Err(error) = copy_in_place(path) {
            tracing::debug!("{} is still another name of a file of the job: {error}", path.display());
        }
    }
}

/// Puts a copy in the place of a file.
fn copy_in_place(path: &Path) -> io::Result<()> {
    let copied = path.with_file_name(COPIED);
    let copy = || {
        let (mut from, meta) = (File::open(path)?, fs::symlink_metadata(path)?);
        let mut to = File::options().write(true).create_new(true).mode(0o600).open(&copied)?;
        copy_sparse(&mut from, &mut to, meta.len(), None)?;
        fchown(&to, Some(meta.uid()), Some(meta.gid()))?;
        to.set_permissions(meta.permissions())?;
        to.set_modified(meta.modified()?)?;
        fs::rename(&copied, path)
    };
    copy().inspect_err(|_| drop(fs::remove_file(&copied)))
}

/// Copies a file, or a directory with the files, links and directories below it.
fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    for entry in tree(from) {
        let entry = entry?;
        let below = entry.path().strip_prefix(from).map_err(io::Error::other)?;
        let to = if below.as_os_str().is_empty() { to.to_owned() } else { to.join(below) };
        match entry.file_type() {
            kind if kind.is_dir() => fs::create_dir(to)?,
            kind if kind.is_symlink() => std::os::unix::fs::symlink(fs::read_link(entry.path())?, to)?,
            kind if kind.is_file() => copy(entry.path(), &to)?,
            // Sockets and FIFOs have no content.
            _ => {}
        }
    }
    Ok(())
}

fn remove_tree(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Copies a file.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let mut from = File::options().read(true).custom_flags(nofollow()).open(from)?;
    let meta = from.metadata()?;
    let mut to = File::options().write(true).create_new(true).mode(0o600).open(to)?;
    copy_sparse(&mut from, &mut to, meta.len(), None)?;
    to.sync_all()
}

/// Whether the error says that a disk is full, or a quota or limit is reached.
fn is_no_space(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

fn nofollow() -> i32 {
    rustix::fs::OFlags::NOFOLLOW.bits().cast_signed()
}

/// Deletes the oldest kept files, beyond the limits.
pub fn prune_kept(dir: &JobDir) {
    prune_kept_beyond(dir, KEPT, KEPT_MAX_BYTES);
}

fn prune_kept_beyond(dir: &JobDir, count: usize, max_bytes: u64) {
    let Ok(Some(folder)) = dir.folder("kept") else { return };
    let mut all = all_kept(&folder);
    // Newest first, by the time in the name and not by the snapshot before it.
    all.sort_by(|(_, one), (_, other)| other.cmp(one));
    let mut bytes = 0_u64;
    for (position, (path, _)) in all.iter().enumerate() {
        bytes = bytes.saturating_add(bytes_in(path));
        if position > 0 && (position >= count || bytes > max_bytes) {
            remove(path);
        }
    }
}

/// Deletes the kept files of resumes of `id`.
pub fn delete_kept_of(dir: &JobDir, id: &SnapshotId) {
    let of_it = format!("{id}{RESUMED}");
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Ok(Some(folder)) = dir.folder("kept") else { return };
    all_kept(&folder)
        .iter()
        .filter(|(path, _)| name(path).starts_with(&of_it))
        .for_each(|(path, _)| remove(path));
}

/// The directories of kept files, with their times.
fn all_kept(folder: &Folder) -> Vec<(PathBuf, String)> {
    let entries = folder.entries().into_iter().flatten();
    let timed = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        Some((entry.path(), name.split_once(RESUMED)?.1.to_owned()))
    };
    entries.filter_map(timed).collect()
}

fn bytes_in(dir: &Path) -> u64 {
    let files = walkdir::WalkDir::new(dir).into_iter().flatten();
    let files = files.filter_map(|file| file.metadata().ok()).filter(fs::Metadata::is_file);
    files.map(|meta| data_bytes(&meta)).fold(0, u64::saturating_add)
}

fn remove(path: &Path) {
    match fs::remove_dir_all(path) {
        Ok(()) => {
            let name = path.file_name().unwrap_or_default().display();
            tracing::info!("removed kept/{name}: later versions of files that a resume had put back");
        }
        Err(error) => tracing::warn!("cannot remove {}: {error}", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(dir: &Path) -> Kept {
        fs::create_dir_all(dir).unwrap();
        Kept::at(Some(dir.to_owned()), "000001-x".to_owned())
    }

    #[test]
    fn a_file_is_cut_and_its_end_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let grown = dir.path().join("grown.log");
        fs::write(&grown, "old|new").unwrap();
        kept(&dir.path().join("kept")).cut(&grown, 4, 7).unwrap();
        assert_eq!(fs::read_to_string(&grown).unwrap(), "old|");
        let tail = dir.path().join("kept/0-grown.log.from-byte-4");
        assert_eq!(fs::read_to_string(tail).unwrap(), "new");
    }

    /// A large end is not copied: the beginning is.
    #[test]
    fn of_a_file_that_has_grown_much_the_whole_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let grown = dir.path().join("grown.log");
        fs::write(&grown, "old|").unwrap();
        let bytes = COPY_MAX_BYTES + 10;
        File::options().write(true).open(&grown).unwrap().set_len(bytes).unwrap();
        let mut kept = kept(&dir.path().join("kept"));
        kept.cut(&grown, 4, bytes).unwrap();
        assert_eq!(fs::read_to_string(&grown).unwrap(), "old|");
        let all: Vec<_> = fs::read_dir(dir.path().join("kept")).unwrap().flatten().collect();
        assert!(all.iter().any(|file| file.metadata().unwrap().len() == bytes), "{all:?}");
    }

    /// A name may have 255 bytes, and the tail's has more in it than that of the file.
    #[test]
    fn long_names_are_shortened() {
        let dir = tempfile::tempdir().unwrap();
        let mut kept = kept(&dir.path().join("kept"));
        for name in ["x".repeat(255), format!("a{}", "é".repeat(127))] {
            let path = dir.path().join(name);
            fs::write(&path, "old|new").unwrap();
            kept.cut(&path, 4, 7).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "old|");
            kept.take(&path).unwrap();
            assert!(!path.exists());
        }
        assert_eq!(fs::read_dir(dir.path().join("kept")).unwrap().count(), 5, "and the list");
    }

    /// A file system of 64 KiB, as long as the test lasts.
    struct Mounted<'a>(&'a Path);

    impl<'a> Mounted<'a> {
        fn small(at: &'a Path) -> Self {
            use rustix::mount::{MountFlags, mount};
            mount("tmpfs", at, "tmpfs", MountFlags::empty(), Some(c"size=64k")).unwrap();
            Self(at)
        }
    }

    impl Drop for Mounted<'_> {
        fn drop(&mut self) {
            rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH).unwrap();
        }
    }

    /// On a disk that is full: the file is cut all the same, and nothing that is cut short is left. A whole file stays on
    /// its own file system.
    #[test]
    fn what_there_is_no_space_for_is_not_copied() {
        if !rustix::process::getuid().is_root() {
            eprintln!("skipped: only root can make a small file system");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (log, place) = (dir.path().join("log"), dir.path().join("kept"));
        fs::write(&log, "x".repeat(1 << 20)).unwrap();
        let mut kept = kept(&place);
        let _mounted = Mounted::small(&place);
        kept.cut(&log, 4, 1 << 20).unwrap();
        assert_eq!(fs::read_to_string(&log).unwrap(), "xxxx");
        assert_eq!(fs::read_dir(&place).unwrap().count(), 0);
        fs::write(&log, "y".repeat(1 << 20)).unwrap();
        let at = kept.take(&log).unwrap();
        assert!(at.starts_with(dir.path().join(BESIDE)) && !log.exists());
        assert_eq!(fs::metadata(at).unwrap().len(), 1 << 20);
        fs::write(&log, "xxxxmore").unwrap();
        Kept::at(None, String::new()).cut(&log, 4, 8).unwrap();
        assert_eq!(fs::read_to_string(&log).unwrap(), "xxxx");
    }

    #[test]
    fn a_small_directory_of_another_file_system_is_copied() {
        if !rustix::process::getuid().is_root() {
            eprintln!("skipped: only root can make a small file system");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (tree, place) = (dir.path().join("tree"), dir.path().join("kept"));
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::write(tree.join("a/b/file"), "content").unwrap();
        std::os::unix::fs::symlink("b/file", tree.join("a/link")).unwrap();
        let mut kept = kept(&place);
        let _mounted = Mounted::small(&place);
        let at = kept.take(&tree).unwrap();
        assert!(at.starts_with(&place) && !tree.exists());
        assert_eq!(fs::read_to_string(at.join("a/link")).unwrap(), "content");
    }

    #[test]
    fn what_is_kept_has_limits() {
        let dir = tempfile::tempdir().unwrap();
        let root = ckpt_snapshot::StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = root.job(&ckpt_snapshot::JobKey::named("job").unwrap());
        let id = crate::checkpoint::attempt::tests::manifest(Vec::new()).id;
        let kept = job.path().join("kept");
        let make = |of: &str, time: u32| {
            let below = kept.join(format!("{of}-resumed-20261122T{time:06}.000Z"));
            fs::create_dir_all(&below).unwrap();
            fs::write(below.join("0-log.from-byte-1"), "12345678").unwrap();
        };
        let there = || {
            let names =
                fs::read_dir(&kept).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<_> = names.collect();
            names.sort();
            names
        };
        // The newest is of the oldest snapshot.
        (1..=4).for_each(|time| make(&format!("00000{}-x", 9 - time), time));
        prune_kept_beyond(&job, 3, 1 << 20);
        assert_eq!(there().len(), 3);
        assert!(there().iter().all(|name| !name.ends_with("T000001.000Z")), "{:?}", there());
        prune_kept_beyond(&job, 3, 16);
        assert_eq!(there().len(), 2);
        prune_kept_beyond(&job, 3, 1);
        assert!(
            there().len() == 1 && there()[0].ends_with("T000004.000Z"),
            "the newest stays: {:?}",
            there()
        );
        make(&id.to_string(), 5);
        delete_kept_of(&job, &id);
        assert_eq!(there().len(), 1);
    }
}
