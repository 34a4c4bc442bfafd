//! A file that is not yet an object.

use super::root::{Folder, Root};
use crate::medium::record::{Notes, Operation};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// A file under a temporary name. It is removed on drop unless it was published.
pub(super) struct Temporary {
    pub(super) file: Arc<File>,
    folder: Folder,
    name: OsString,
    published: bool,
    notes: Notes,
}

impl Temporary {
    pub(super) fn new(root: &Root, folder: Folder) -> io::Result<Self> {
        let (file, name) = folder.create_temporary()?;
        Ok(Self { file: Arc::new(file), folder, name, published: false, notes: root.notes().clone() })
    }

    /// Records an operation on this file, given its path below the root.
    pub(super) fn note(&self, operation: impl FnOnce(PathBuf) -> Operation) {
        self.notes.note(|| operation(self.folder.path_of(&self.name)));
    }

    /// Makes its content and length durable. After an error their state is unknown, and the file must be dropped.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.notes.sync_file(&self.folder.path_of(&self.name), || self.file.sync_data())
    }

    /// Renames it to the object's name, durably, unless that name exists.
    pub(super) fn publish_new(mut self) -> io::Result<()> {
        self.folder.rename_new(&self.name)?;
        self.published = true;
        self.folder.sync()
    }

    /// Renames it to the object's name, durably, and replaces any existing object.
    pub(super) fn publish_over(mut self) -> io::Result<()> {
        self.folder.rename_over(&self.name)?;
        self.published = true;
        self.folder.sync()
    }
}

#[cfg(test)]
impl Temporary {
    pub(super) fn link_new(&self) -> io::Result<()> {
        self.folder.link_new(&self.name)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.published
            && let Err(error) = self.folder.unlink(&self.name)
            && error.kind() != io::ErrorKind::NotFound
        {
            // It is invisible, and the next sweep removes it.
            tracing::warn!("cannot remove the unfinished file {}: {error}", self.name.display());
        }
    }
}
