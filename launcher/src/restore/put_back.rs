//! Puts the job's files back as planned. It may be interrupted at any moment: the next resume plans again, and finds less
//! to do. Nothing that is replaced is lost, see [`Kept`].

use crate::files::capture::reflink;
use crate::files::inventory::{Entry, Identity};
use crate::files::saved::{copy_without_zeroes, next_data};
use crate::restore::file_plan::{FileAction, FilePlan};
use crate::restore::kept::Kept;
use anyhow::{Context, Result};
use ckpt_snapshot::{RelPath, faults};
use rustix::fs::{OFlags, Timespec, Timestamps, UTIME_OMIT};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, fchown, lchown};
use std::path::{Path, PathBuf};

pub use check::check;

/// Begin of the names of files that are not complete.
pub const NEW: &str = ".ckpt-run-new-";
/// Begin of the names of files that are being moved back.
pub const MOVING: &str = ".ckpt-run-moving-";

/// Opens a data file of the snapshot.
pub type OpenData<'a> = &'a dyn Fn(&RelPath) -> io::Result<File>;

/// Files that are being put back.
pub struct PutBack<'a> {
    plan: &'a FilePlan,
    open: OpenData<'a>,
    kept: Kept,
    /// Files on their way back, by their path at the snapshot.
    moving: BTreeMap<PathBuf, PathBuf>,
    /// Directories to make durable.
    changed: BTreeSet<PathBuf>,
}

/// The temporary names that [`PutBack::apply`] uses, for the record of an interrupted resume.
pub fn temporary_names(plan: &FilePlan) -> impl Iterator<Item = PathBuf> {
    let moved = plan.files.keys().enumerate().map(|(number, path)| moving_name(path, number));
    moved.chain(plan.paths().map(|path| new_name(path)))
}

/// The temporary name of a file that is being made.
#[must_use]
pub fn new_name(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new("/")).join(format!("{NEW}0"))
}

/// A temporary name in the nearest directory above `path` that exists.
fn moving_name(path: &Path, number: usize) -> PathBuf {
    let dir = path.ancestors().skip(1).find(|dir| dir.is_dir()).unwrap_or(Path::new("/"));
    dir.join(format!("{MOVING}{number}"))
}

impl<'a> PutBack<'a> {
    /// Begins. Later versions of files go to `kept`.
    #[must_use]
    pub fn new(plan: &'a FilePlan, open: OpenData<'a>, kept: Kept) -> Self {
        Self { plan, open, kept, moving: BTreeMap::new(), changed: BTreeSet::new() }
    }

    /// Puts all files back.
    ///
    /// # Errors
    /// When a step fails: the files before it are put back.
    pub fn apply(mut self) -> Result<()> {
        let plan = self.plan;
        for path in plan.leftovers.iter().chain(&plan.extra_links) {
            step("remove", path, fs::remove_file(path))?;
        }
        self.take_out()?;
        hit("put-back-moving")?;
        for path in &plan.aside {
            if let Some(at) = self.keep(path)? {
                tracing::info!("{}: made after the snapshot, moved to {}", path.display(), at.display());
            }
            hit("put-back-aside")?;
        }
        for (path, entry) in &plan.directories {
            step("restore the directory", path, restore_directory(path, entry))?;
            hit("put-back-directory")?;
        }
        for (path, (entry, action)) in &plan.files {
            self.file(path, entry, action)?;
            hit("put-back-file")?;
        }
        for (path, target) in &plan.symlinks {
            self.install(path, |new| std::os::unix::fs::symlink(target, new))?;
            hit("put-back-symlink")?;
        }
        for (path, entry) in &plan.fifos {
            self.install(path, |new| make_fifo(new, entry))?;
        }
        for (path, first) in &plan.hard_links {
            let is_done = inode(first).is_some_and(|inode_of_first| inode(path) == Some(inode_of_first));
            if !is_done {
                self.install(path, |new| fs::hard_link(first, new))?;
            }
            hit("put-back-link")?;
        }
        self.changed.extend(self.kept.dir().map(Path::to_owned));
        for dir in &self.changed {
            // A directory that was moved aside since is durable there.
            if let Err(error) = ckpt_snapshot::sync_dir(dir) {
                tracing::debug!("cannot sync {}: {error}", dir.display());
            }
        }
        hit("put-back-done")?;
        Ok(())
    }

    /// Gives files that are moved back a temporary name, so that each is out of the way of the others.
    fn take_out(&mut self) -> Result<()> {
        for (number, (path, (_, action))) in self.plan.files.iter().enumerate() {
            if let Some(from) = action.from().filter(|from| *from != path) {
                let to = moving_name(path, number);
                step("move", from, fs::rename(from, &to))?;
                self.moving.insert(path.clone(), to);
            }
        }
        Ok(())
    }

    fn file(&mut self, path: &Path, entry: &Entry, action: &FileAction) -> Result<()> {
        let bytes = entry.identity.bytes;
        match action {
            FileAction::Attributes => {}
            FileAction::Replace { data, at } => {
                self.arrive(path)?;
                self.replace(path, entry, data, at.is_some())?;
            }
            FileAction::Cut { .. } => {
                self.arrive(path)?;
                self.cut(path, bytes)?;
            }
            FileAction::Move(_) => self.arrive(path)?,
            FileAction::Link(held) => self.install(path, |new| fs::hard_link(held, new))?,
            FileAction::Reflink(held) => self.install(path, |new| reflink(held, new))?,
        }
        step("restore the mode and owner of", path, restore_attributes(path, entry))
    }

    /// Gives a file that was taken out its name again.
    fn arrive(&mut self, path: &Path) -> Result<()> {
        let Some(from) = self.moving.remove(path) else { return Ok(()) };
        self.keep_later(path)?;
        step("move back", path, fs::rename(&from, path))?;
        tracing::info!("{}: moved back to its name at the snapshot", path.display());
        self.touch(path);
        Ok(())
    }

    /// Restores the content from the snapshot: in place if it is the same inode. A file that has only grown is cut.
    fn replace(&mut self, path: &Path, entry: &Entry, data: &RelPath, is_same_inode: bool) -> Result<()> {
        let open = self.open;
        let begins_with = open_file(path, false).and_then(|now| begins_with(now, open(data)?));
        match begins_with {
            Ok(true) => return self.cut(path, entry.identity.bytes),
            Ok(false) if is_same_inode => return self.rewrite(path, data),
            Err(error) if is_same_inode => return step("compare", path, Err(error)),
            _ => {}
        }
        self.install(path, |new| {
            let mut to = File::options().write(true).create_new(true).mode(0o600).open(new)?;
            let mut from = open(data)?;
            let bytes = from.metadata()?.len();
            copy_without_zeroes(&mut from, &mut to, bytes)?;
            fchown(&to, Some(entry.uid), Some(entry.gid))?;
            to.set_permissions(Permissions::from_mode(entry.mode))?;
            to.sync_all()
        })
    }

    /// Writes the content of the snapshot into the file, and keeps a copy of the later version.
    fn rewrite(&mut self, path: &Path, data: &RelPath) -> Result<()> {
        let kept = self.kept.copy_before_rewrite(path);
        let kept = kept.with_context(|| format!("cannot keep the later version of {}", path.display()))?;
        hit("put-back-rewrite")?;
        let write = || -> io::Result<()> {
            let (mut from, mut to) = ((self.open)(data)?, open_file(path, true)?);
            let bytes = from.metadata()?.len();
            // So that there are holes where nothing is written.
            to.set_len(0)?;
            copy_without_zeroes(&mut from, &mut to, bytes)?;
            to.sync_all()
        };
        step("restore", path, write())?;
        let shown = path.display();
        match kept {
            Some(at) => tracing::info!(
                "{shown}: restored as it was at the snapshot; the later version is {}",
                at.display()
            ),
            None => tracing::warn!(
                "{shown}: restored as it was at the snapshot; the later version is lost, since the store's disk has no space for it, or copying it would take too long"
            ),
        }
        Ok(())
    }

    /// Makes a file under a temporary name, and then gives it its name.
    fn install(&mut self, path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
        let new = new_name(path);
        let removed = match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        step("restore", path, removed.and_then(|()| make(&new)))?;
        hit("put-back-made")?;
        let was_there = self.keep_later(path)?;
        step("restore", path, fs::rename(&new, path))?;
        if !was_there {
            tracing::info!(
                "{}: this file was missing, and is restored as it was at the snapshot",
                path.display()
            );
        }
        self.touch(path);
        Ok(())
    }

    /// Cuts a file to its length at the snapshot, and keeps the removed end.
    fn cut(&mut self, path: &Path, then_bytes: u64) -> Result<()> {
        let now_bytes = step("look at", path, fs::symlink_metadata(path))?.len();
        if now_bytes == then_bytes {
            return Ok(());
        }
        self.kept
            .cut(path, then_bytes, now_bytes)
            .with_context(|| format!("cannot cut {} to its length at the snapshot", path.display()))?;
        self.touch(path);
        Ok(())
    }

    /// Moves the later version of a file to the kept files. Returns whether there was one.
    fn keep_later(&mut self, path: &Path) -> Result<bool> {
        let kept = self.keep(path)?;
        if let Some(at) = &kept {
            tracing::info!(
                "{}: restored as it was at the snapshot; the later version is {}",
                path.display(),
                at.display()
            );
        }
        Ok(kept.is_some())
    }

    fn keep(&mut self, path: &Path) -> Result<Option<PathBuf>> {
        if fs::symlink_metadata(path).is_err() {
            return Ok(None);
        }
        self.touch(path);
        self.kept
            .take(path)
            .map(Some)
            .with_context(|| format!("cannot keep the later version of {}", path.display()))
    }

    fn touch(&mut self, path: &Path) {
        self.changed.extend(path.parent().map(Path::to_owned));
    }
}

fn hit(point: &str) -> Result<()> {
    faults::hit(point).context("cannot put the job's files back")
}

fn step<T>(what: &str, path: &Path, done: io::Result<T>) -> Result<T> {
    done.with_context(|| {
        format!("cannot {what} {}, which the job has changed since the snapshot", path.display())
    })
}

fn inode(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

fn open_file(path: &Path, for_writing: bool) -> io::Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    File::options().read(true).write(for_writing).custom_flags(flags).open(path)
}

/// Whether a file begins with this content. What is a hole in both is not read.
fn begins_with(now: File, then: File) -> io::Result<bool> {
    const STEP: usize = 1 << 16;
    let bytes = then.metadata()?.len();
    if now.metadata()?.len() < bytes {
        return Ok(false);
    }
    let (mut at, mut ours, mut theirs) = (0, vec![0; STEP], vec![0; STEP]);
    loop {
        let found = [next_data(&now, at, bytes)?, next_data(&then, at, bytes)?];
        let Some(data) = found.into_iter().flatten().min_by_key(|data| data.start) else { return Ok(true) };
        at = data.start;
        while at < data.end {
            let part = usize::try_from(data.end - at).unwrap_or(STEP).min(STEP);
            now.read_exact_at(&mut ours[..part], at)?;
            then.read_exact_at(&mut theirs[..part], at)?;
            if ours[..part] != theirs[..part] {
                return Ok(false);
            }
            at += part as u64;
        }
    }
}

fn make_fifo(path: &Path, entry: &Entry) -> io::Result<()> {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0)?;
    lchown(path, Some(entry.uid), Some(entry.gid))?;
    fs::set_permissions(path, Permissions::from_mode(entry.mode))
}

fn restore_directory(path: &Path, entry: &Entry) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => fs::create_dir_all(path)?,
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    chown(path, Some(entry.uid), Some(entry.gid))?;
    fs::set_permissions(path, Permissions::from_mode(entry.mode))
}

/// Restores mode, owner and time of the last change, where they differ.
fn restore_attributes(path: &Path, entry: &Entry) -> io::Result<()> {
    let meta = fs::symlink_metadata(path)?;
    if (meta.uid(), meta.gid()) != (entry.uid, entry.gid) {
        lchown(path, Some(entry.uid), Some(entry.gid))?;
    }
    let file = open_file(path, false);
    if meta.mode() & 0o7777 != entry.mode {
        match &file {
            Ok(file) => file.set_permissions(Permissions::from_mode(entry.mode))?,
            Err(_) => fs::set_permissions(path, Permissions::from_mode(entry.mode))?,
        }
    }
    let modified_ns = entry.identity.modified_ns;
    let Ok(file) = file else { return Ok(()) };
    if modified_ns == 0 || modified_ns == Identity::of(&file.metadata()?).modified_ns {
        return Ok(());
    }
    let (tv_sec, tv_nsec) = (modified_ns.div_euclid(1_000_000_000), modified_ns.rem_euclid(1_000_000_000));
    let unchanged = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    let times = Timestamps { last_access: unchanged, last_modification: Timespec { tv_sec, tv_nsec } };
    match rustix::fs::futimens(file, &times) {
        // Who may write to a file of another user may not set its times.
        Err(Errno::PERM) => {
            tracing::warn!(
                "{}: the time of its last change is not restored: {}",
                path.display(),
                Errno::PERM
            );
            Ok(())
        }
        set => Ok(set?),
    }
}

mod check;
#[cfg(test)]
mod tests;
