//! Whether files can be put back as planned, as far as the rights to them tell. This is known before anything is changed.

use super::{OpenData, begins_with, inode, open_file};
use crate::namespace::stdio;
use crate::restore::file_plan::{FileAction, FilePlan, first_of};
use anyhow::{Result, bail};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Refuses a plan that changes a file which may not be changed, or names in a directory in which they may not be: those of
/// another user, those that are immutable or on a file system that is mounted read-only.
///
/// # Errors
/// All such files and directories.
pub fn check(plan: &FilePlan, open: OpenData<'_>) -> Result<()> {
    let (mut refused, mut dirs) = (Vec::new(), BTreeSet::new());
    let mut names = |path: &Path| {
        let above = path.ancestors().skip(1).find(|above| above.is_dir()).map(Path::to_owned);
        // One that is moved aside is made again.
        dirs.extend(above.filter(|dir| !plan.has_aside_above(dir)));
    };
    for (path, (entry, action)) in &plan.files {
        if let Some(from) = action.from().filter(|from| from != path) {
            names(from);
            names(path);
        }
        // Of equal length, a file may be as it was.
        let differs = |at: &Path, data| {
            !open_file(at, false)
                .is_ok_and(|now| open(data).is_ok_and(|then| begins_with(now, then).unwrap_or(false)))
        };
        match action {
            FileAction::Cut { from } | FileAction::Replace { at: Some(from), .. } => {
                let may_write = may_write(from);
                let bytes = fs::symlink_metadata(from).map_or(0, |now| now.len());
                if let Err(error) = may_write
                    && (bytes != entry.identity.bytes
                        || matches!(action, FileAction::Replace { data, .. } if differs(from, data)))
                {
                    refused.push(format!("{} cannot be written: {error}", path.display()));
                }
            }
            FileAction::Link(_) | FileAction::Reflink(_) => names(path),
            FileAction::Replace { at: None, data } => {
                if path.parent().is_none_or(|dir| may_change_names(dir).is_err()) && differs(path, data) {
                    names(path);
                }
            }
            FileAction::Attributes | FileAction::Move(_) => {}
        }
    }
    plan.symlinks.keys().chain(plan.fifos.keys()).for_each(|path| names(path));
    plan.leftovers.iter().chain(&plan.extra_links).chain(&plan.aside).for_each(|path| names(path));
    let is_made = |(path, first): &(&Path, &Path)| inode(first).is_none() || inode(first) != inode(path);
    let links = plan.hard_links.iter().map(|(path, first)| (&**path, &**first));
    links.filter(is_made).for_each(|(path, _)| names(path));
    plan.directories.keys().filter(|dir| !dir.is_dir()).for_each(|path| names(path));
    for dir in &dirs {
        if let Err(error) = may_change_names(dir) {
            refused.push(format!("names in {} cannot be changed: {error}", dir.display()));
        }
    }
    if !refused.is_empty() {
        bail!(
            "the job has changed files since the snapshot, and ckpt-run may not put them back: {}. No file was changed. Make them writable, or resume as the user who may write them",
            first_of(&refused)
        );
    }
    Ok(())
}

fn may_change_names(dir: &Path) -> Result<(), Errno> {
    accessat(CWD, dir, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS)
}

/// Whether a file can be read (what is removed is kept) and written.
fn may_write(path: &Path) -> Result<(), Errno> {
    match accessat(CWD, path, Access::READ_OK | Access::WRITE_OK, AtFlags::EACCESS) {
        Err(Errno::ACCESS) if stdio::own_output(path).is_some() => {
            accessat(CWD, path, Access::READ_OK, AtFlags::EACCESS)
        }
        other => other,
    }
}
