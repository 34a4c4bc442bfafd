//! A record of everything that a [`DirMedium`](super::DirMedium) does to its file system, so that a test can play every
//! beginning of it back and look at what a crash there would have left. Kept in builds with the feature `faults` only,
//! for those media that were made with `DirMedium::recorded`.
//!
//! How to play it back: after a crash behind the first N operations, those of them that are covered by a
//! [`Operation::SyncFile`] or [`Operation::SyncDir`] among the N are there. Each other one may be there or not, and
//! an uncovered write in part.

use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One step. All paths are relative to the medium's root (which is empty); a file that is written to has its
/// temporary name, and gets no writes after it was renamed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A directory was made, if it was not there.
    MakeDir {
        /// The directory.
        path: PathBuf,
    },
    /// An empty file was made.
    Create {
        /// The file.
        path: PathBuf,
    },
    /// Bytes were written. Recorded when the write begins; until the file is synced it may be there in part.
    Write {
        /// The file.
        path: PathBuf,
        /// Where (bytes).
        offset: u64,
        /// What.
        content: Vec<u8>,
    },
    /// A file got a length: what is new of it reads as zeroes, what is beyond it is gone.
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
        /// How many operations there were when this began: of those it covers all that are on this file. Recorded when
        /// it has ended.
        begun: usize,
    },
    /// A file got another name; what had that name is gone.
    Rename {
        /// Its name so far.
        from: PathBuf,
        /// Its name from now on.
        to: PathBuf,
    },
    /// A file got a second name.
    Link {
        /// Its name.
        from: PathBuf,
        /// The name that it has as well.
        to: PathBuf,
    },
    /// A file's name was removed.
    Unlink {
        /// The name.
        path: PathBuf,
    },
    /// The entries of a directory were made durable.
    SyncDir {
        /// The directory.
        path: PathBuf,
        /// How many operations there were when this began: of those it covers all that made, removed or changed an
        /// entry of this directory. Recorded when it has ended.
        begun: usize,
    },
    /// Something that the test wants to find again; see [`Recorder::mark`].
    Mark(String),
}

/// Keeps the operations of one or more media, in their order. Its clones share one record.
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    operations: Arc<Mutex<Vec<Operation>>>,
}

impl Recorder {
    /// An empty record.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// All operations so far.
    #[must_use]
    pub fn operations(&self) -> Vec<Operation> {
        self.lock().clone()
    }

    /// Puts a mark into the record, for example that a commit has returned.
    pub fn mark(&self, text: impl Into<String>) {
        self.lock().push(Operation::Mark(text.into()));
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, Vec<Operation>> {
        self.operations.lock()
    }
}

/// Where a medium notes what it does: nowhere, mostly.
#[derive(Clone, Debug, Default)]
pub(super) struct Notes(pub(super) Option<Recorder>);

impl Notes {
    /// Notes an operation: a write just before it begins, anything else when it is done.
    pub(super) fn note(&self, operation: impl FnOnce() -> Operation) {
        if let Some(recorder) = &self.0 {
            recorder.lock().push(operation());
        }
    }

    /// Does `sync` and notes that it covers what was noted before it began.
    pub(super) fn sync_file<E>(&self, path: &Path, sync: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let begun = self.begun();
        sync()?;
        self.note(|| Operation::SyncFile { path: path.to_owned(), begun });
        Ok(())
    }

    /// Does `sync` and notes that it covers what was noted before it began.
    pub(super) fn sync_dir<E>(&self, path: &Path, sync: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let begun = self.begun();
        sync()?;
        self.note(|| Operation::SyncDir { path: path.to_owned(), begun });
        Ok(())
    }

    fn begun(&self) -> usize {
        self.0.as_ref().map_or(0, |recorder| recorder.lock().len())
    }
}
