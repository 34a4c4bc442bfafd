//! A whole store at an address: the places of its jobs, which of them there are, and whether it can be used at all.

use crate::{ObjectMedium, Options, StoreUrl};
use ckpt_snapshot::RelPath;
use ckpt_snapshot::medium::{DirMedium, Medium};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A store at an address. All places below it share its connections.
#[derive(Clone, Debug)]
pub struct Site {
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Directory(PathBuf),
    Objects(ObjectMedium),
}

impl Site {
    /// The store at `url`. Nothing is sent yet.
    ///
    /// # Errors
    /// See [`ObjectMedium::open`].
    pub fn open(url: &StoreUrl, options: Options) -> io::Result<Self> {
        let kind = match url.directory() {
            Some(directory) => Kind::Directory(directory),
            None => Kind::Objects(ObjectMedium::open(url, options)?),
        };
        Ok(Self { kind })
    }

    /// The objects below `path`.
    #[must_use]
    pub fn below(&self, path: &RelPath) -> Arc<dyn Medium> {
        match &self.kind {
            Kind::Directory(directory) => Arc::new(DirMedium::new(directory.join(path))),
            Kind::Objects(medium) => Arc::new(medium.below(path)),
        }
    }

    /// The names directly below `path` that have objects below them, in order. No `path`, no names.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub fn names(&self, path: &RelPath) -> io::Result<Vec<String>> {
        let mut names = match &self.kind {
            Kind::Directory(directory) => directories(&directory.join(path))?,
            Kind::Objects(medium) => medium.list_dirs(Some(path))?,
        };
        names.sort();
        Ok(names)
    }

    /// Whether the store answers, takes the credentials, and can do what a commit needs, see [`ObjectMedium::check`].
    ///
    /// # Errors
    /// What stands in the way.
    pub fn check(&self, patience: Duration) -> io::Result<()> {
        match &self.kind {
            Kind::Directory(directory) => DirMedium::new(directory.clone()).list(&jobs()).map(drop),
            Kind::Objects(medium) => medium.check(patience),
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
        if entry.file_type()?.is_dir() {
            // What is not UTF-8 is not ours.
            names.extend(entry.file_name().into_string());
        }
    }
    Ok(names)
}
