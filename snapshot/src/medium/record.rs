//! A recorder of all file system operations of a [`DirMedium`](super::DirMedium), for crash tests: a test replays every
//! prefix of the record and inspects the state after a crash at that point. It exists in builds with the feature
//! `faults` only, for media made with `DirMedium::recorded`.
//!
//! Replay rule: after a crash behind the first N operations, an operation is durable if a [`Operation::SyncFile`] or
//! [`Operation::SyncDir`] among the N covers it. Every other operation may or may not be durable, and a write may be
//! partially durable.

use parking_lot::Mutex;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One operation. All paths are relative to the medium's root, which is empty at first. A file has its temporary name
/// while it is written, and gets no writes after it was renamed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A directory was created, unless it existed.
    MakeDir {
        /// The directory.
        path: PathBuf,
    },
    /// An empty file was created.
    Create {
        /// The file.
        path: PathBuf,
    },
    /// Bytes were written. Recorded when the write begins; until the file is synced, the write may be partial.
    Write {
        /// The file.
        path: PathBuf,
        /// The offset (bytes).
        offset: u64,
        /// The bytes.
        content: Vec<u8>,
    },
    /// The length of a file was set: it was truncated, or extended with zeroes.
    SetLength {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
    },
    /// A file's content and length were made durable.
    SyncFile {
        /// The file.
        path: PathBuf,
        /// The number of operations when the sync began: it covers those of them that are on this file. Recorded when
        /// the sync has ended.
        begun: usize,
    },
    /// A file was renamed, replacing any file of the new name.
    Rename {
        /// The old name.
        from: PathBuf,
        /// The new name.
        to: PathBuf,
    },
    /// A hard link was created.
    Link {
        /// The existing name.
        from: PathBuf,
        /// The additional name.
        to: PathBuf,
    },
    /// A name was removed.
    Unlink {
        /// The name.
        path: PathBuf,
    },
    /// The entries of a directory were made durable.
    SyncDir {
        /// The directory.
        path: PathBuf,
        /// The number of operations when the sync began: it covers those of them that created, removed or changed an
        /// entry of this directory. Recorded when the sync has ended.
        begun: usize,
    },
    /// A marker that the test has set; see [`Recorder::mark`].
    Mark(String),
}

/// Records the operations of one or more media in order. Clones share one record.
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    operations: Arc<Mutex<Vec<Operation>>>,
}

impl Recorder {
    /// All operations so far.
    #[must_use]
    pub fn operations(&self) -> Vec<Operation> {
        self.operations.lock().clone()
    }

    /// Adds a marker to the record, for example that a commit has returned.
    pub fn mark(&self, text: impl Into<String>) {
        self.operations.lock().push(Operation::Mark(text.into()));
    }
}

/// The optional recorder of a medium.
#[derive(Clone, Debug, Default)]
pub(super) struct Notes(pub(super) Option<Recorder>);

impl Notes {
    /// Records an operation: a write just before it begins, any other after it.
    pub(super) fn note(&self, operation: impl FnOnce() -> Operation) {
        if let Some(recorder) = &self.0 {
            recorder.operations.lock().push(operation());
        }
    }

    /// Does `sync` and records it, with the number of operations before it began: it covers them.
    pub(super) fn sync<E>(
        &self,
        sync: impl FnOnce() -> Result<(), E>,
        operation: impl FnOnce(usize) -> Operation,
    ) -> Result<(), E> {
        let begun = self.0.as_ref().map_or(0, |recorder| recorder.operations.lock().len());
        sync()?;
        self.note(|| operation(begun));
        Ok(())
    }

    /// As [`Notes::sync`], for the entries of a directory.
    pub(super) fn sync_dir(&self, path: &Path, dir: &File) -> io::Result<()> {
        self.sync(|| dir.sync_all(), |begun| Operation::SyncDir { path: path.to_owned(), begun })
    }
}
