//! A store at an address: the media of its jobs, the list of jobs, and a check of the connection.

use crate::{ObjectMedium, Options, StoreUrl};
use ckpt_snapshot::RelPath;
use ckpt_snapshot::medium::{DirMedium, Medium};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A store at an address. All media below it share its connections.
#[derive(Clone, Debug)]
pub struct Site {
    root: Root,
}

#[derive(Clone, Debug)]
enum Root {
    Directory(PathBuf),
    Objects(ObjectMedium),
}

impl Site {
    /// The store at `url`. Sends no request yet.
    ///
    /// # Errors
    /// See [`ObjectMedium::open`].
    pub fn open(url: &StoreUrl, options: Options) -> io::Result<Self> {
        let root = match url.directory() {
            Some(directory) => Root::Directory(directory),
            None => Root::Objects(ObjectMedium::open(url, options)?),
        };
        Ok(Self { root })
    }

    /// The objects below `path`.
    #[must_use]
    pub fn below(&self, path: &RelPath) -> Arc<dyn Medium> {
        match &self.root {
            Root::Directory(directory) => Arc::new(DirMedium::new(directory.join(path))),
            Root::Objects(medium) => Arc::new(medium.below(path)),
        }
    }

    /// The names directly below `path` that have objects below them, sorted. Empty if `path` is missing.
    ///
    /// # Errors
    /// If they cannot be listed.
    pub fn names(&self, path: &RelPath) -> io::Result<Vec<String>> {
        let mut names = match &self.root {
            Root::Directory(directory) => directories(&directory.join(path))?,
            Root::Objects(medium) => medium.list_dirs(Some(path))?,
        };
        names.sort();
        Ok(names)
    }

    /// Checks the connection to the store, see [`ObjectMedium::check`].
    ///
    /// # Errors
    /// The failed request, or the missing feature.
    pub fn check(&self, retry_timeout: Duration) -> io::Result<()> {
        match &self.root {
            Root::Directory(directory) => DirMedium::new(directory.clone()).list(&jobs()).map(drop),
            Root::Objects(medium) => medium.check(retry_timeout),
        }
    }
}

fn jobs() -> RelPath {
    RelPath::new("jobs").expect("a plain path")
}

fn directories(path: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() && has_objects(&entry.path())? {
            // Names of jobs are UTF-8: other directories are ignored.
            names.extend(entry.file_name().into_string());
        }
    }
    Ok(names)
}

/// Whether there is a file somewhere below a directory. An object store knows no empty directories.
fn has_objects(path: &Path) -> io::Result<bool> {
    let entries = match std::fs::read_dir(path) {
        // It was deleted since it was listed.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        // Whoever wants to read it learns why that is not possible.
        Err(_) => return Ok(true),
        Ok(entries) => entries,
    };
    for entry in entries {
        let entry = entry?;
        if !entry.file_type()?.is_dir() || has_objects(&entry.path())? {
            return Ok(true);
        }
    }
    Ok(false)
}
