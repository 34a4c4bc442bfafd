//! Whether files can be put back as planned, as far as the rights to them tell. This is known before anything is changed.

use super::{OpenData, begins_with, inode, open_file};
use crate::files::inventory::Entry;
use crate::namespace::stdio;
use crate::restore::file_plan::{FileAction, FilePlan, first_of};
use anyhow::{Result, bail};
use ckpt_snapshot::RelPath;
use rustix::fs::{Access, AtFlags, CWD, StatxAttributes, StatxFlags, accessat, statx};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Refuses a plan that changes a file which may not be changed, or names in a directory in which they may not be: those of
/// another user, those that are immutable or on a file system that is mounted read-only.
///
/// # Errors
/// All such files and directories.
pub fn check(plan: &FilePlan, open: OpenData<'_>) -> Result<()> {
    let mut check = Check { plan, open, refused: BTreeSet::new(), dirs: BTreeSet::new() };
    plan.files.iter().for_each(|(path, (entry, action))| check.file(path, entry, action));
    let names = plan.symlinks.keys().chain(plan.fifos.keys()).chain(&plan.leftovers);
    names.chain(&plan.extra_links).chain(&plan.aside).for_each(|path| check.name(path));
    for (path, first) in &plan.hard_links {
        if inode(first).is_none() || inode(first) != inode(path) {
            check.name(path);
        }
    }
    plan.directories.keys().filter(|dir| !dir.is_dir()).for_each(|path| check.name(path));
    for dir in &check.dirs {
        if let Err(error) = may_change_names(dir) {
            check.refused.insert(format!("names in {} cannot be changed: {error}", dir.display()));
        }
    }
    if !check.refused.is_empty() {
        bail!(
            "the job has changed files since the snapshot, and ckpt-run may not put them back: {}. No file was changed. Allow it (`chmod`, `chattr -i -a`, a read-write mount), or resume as the user who may write them",
            first_of(&Vec::from_iter(check.refused))
        );
    }
    Ok(())
}

struct Check<'a> {
    plan: &'a FilePlan,
    open: OpenData<'a>,
    refused: BTreeSet<String>,
    /// Directories in which names change.
    dirs: BTreeSet<PathBuf>,
}

impl Check<'_> {
    fn file(&mut self, path: &Path, entry: &Entry, action: &FileAction) {
        if let Some(from) = action.from().filter(|from| *from != path) {
            self.name(from);
            self.name(path);
        }
        match action {
            FileAction::Cut { from } => self.content(path, from, entry, None),
            FileAction::Replace { at: Some(from), data } => self.content(path, from, entry, Some(data)),
            // A file that begins with the content is cut. Without need, nothing is compared twice.
            FileAction::Replace { at: None, data } if !is_free(path) && self.begins_with(path, data) => {
                self.content(path, path, entry, Some(data));
            }
            FileAction::Link(_) | FileAction::Reflink(_) | FileAction::Replace { at: None, .. } => {
                self.name(path);
            }
            FileAction::Attributes | FileAction::Move(_) => {}
        }
    }

    /// The file at `from` is cut, or written if it does not begin with the content in `data`.
    fn content(&mut self, path: &Path, from: &Path, entry: &Entry, data: Option<&RelPath>) {
        let is_cut = || data.is_none_or(|data| self.begins_with(from, data));
        let is_of_length = || fs::symlink_metadata(from).is_ok_and(|now| now.len() == entry.identity.bytes);
        let may_write = match accessat(CWD, from, Access::READ_OK | Access::WRITE_OK, AtFlags::EACCESS) {
            // Its tail is kept.
            Err(Errno::ACCESS) if stdio::own_output(from).is_some() && is_cut() => {
                accessat(CWD, from, Access::READ_OK, AtFlags::EACCESS)
            }
            Ok(()) if is_fixed(from) => Err(Errno::PERM),
            other => other,
        };
        if let Err(error) = may_write
            && !(is_of_length() && is_cut())
        {
            self.refused.insert(format!("{} cannot be written: {error}", path.display()));
        }
    }

    /// A file with this name is made, renamed or deleted.
    fn name(&mut self, path: &Path) {
        // What is moved aside with its directory is not there any more.
        if is_fixed(path) && !path.parent().is_some_and(|dir| self.plan.has_aside_above(dir)) {
            self.refused.insert(format!("{} cannot be moved: {}", path.display(), Errno::PERM));
        }
        let above = path.ancestors().skip(1).find(|above| above.is_dir());
        // One that is moved aside is made again.
        self.dirs.extend(above.filter(|dir| !self.plan.has_aside_above(dir)).map(Path::to_owned));
    }

    fn begins_with(&self, path: &Path, data: &RelPath) -> bool {
        let compared = open_file(path, false).and_then(|now| begins_with(now, (self.open)(data)?));
        compared.unwrap_or(false)
    }
}

/// Whether a file can be written as well as replaced.
fn is_free(path: &Path) -> bool {
    let may_write = accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS).is_ok();
    may_write && !is_fixed(path) && path.parent().is_some_and(|dir| may_change_names(dir).is_ok())
}

fn may_change_names(dir: &Path) -> Result<(), Errno> {
    if is_fixed(dir) {
        return Err(Errno::PERM);
    }
    accessat(CWD, dir, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS)
}

/// Whether a file is immutable or can only be appended to: then it cannot be cut, renamed or deleted either.
fn is_fixed(path: &Path) -> bool {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    let found = statx(CWD, path, flags, StatxFlags::empty());
    found.is_ok_and(|found| {
        found.stx_attributes.intersects(StatxAttributes::IMMUTABLE | StatxAttributes::APPEND)
    })
}
