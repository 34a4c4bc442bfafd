//! One GPU's memory in use, as all processes on it share it.
//!
//! A GPU is a directory. It has one file for each piece of physical memory in use (a segment), and the ledger, whose
//! exclusive flock guards the directory and which holds the number of bytes in use. Whoever holds a segment, by a mapping
//! or by a descriptor, holds a shared flock on its file: the lock belongs to the open file description, which a mapping
//! keeps after the descriptor is closed and which the kernel drops with the process, however it ends. A file whose
//! exclusive flock can be had is dead.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::retry_on_intr;

use crate::Counters;

/// The file that counts a GPU's memory, see [`Counters`].
const LEDGER: &str = "ledger";
const SEGMENT_PREFIX: &str = "segment-";

/// What a segment's file has behind the segment's data.
pub const TRAILER_BYTES: usize = 64;

/// The directory of a GPU's memory.
pub struct Ledger {
    directory: PathBuf,
}

/// Makes a directory if need be; it must be the user's own, for others' files would be trusted else.
///
/// # Errors
/// The kernel's.
pub fn own_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    // SAFETY: geteuid has no preconditions.
    let user = unsafe { libc::geteuid() };
    let metadata = path.symlink_metadata()?;
    if !metadata.is_dir() || metadata.uid() != user {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is not a directory of this user"));
    }
    Ok(())
}

impl Ledger {
    /// That of a GPU.
    #[must_use]
    pub fn of(machine: &Path, id: usize) -> Self {
        Self { directory: machine.join(format!("device{id}")) }
    }

    /// That of the host's memory.
    #[must_use]
    pub fn of_host(machine: &Path) -> Self {
        Self { directory: machine.join("host") }
    }

    /// Makes the directory if need be.
    ///
    /// # Errors
    /// As [`own_directory`], and the kernel's.
    pub fn prepare(&self) -> io::Result<()> {
        own_directory(&self.directory)?;
        self.used_bytes().map(drop)
    }

    /// Bytes in use by all processes, after the dead are buried.
    ///
    /// # Errors
    /// The kernel's.
    pub fn used_bytes(&self) -> io::Result<u64> {
        self.under_lock(|counters| {
            self.reconcile(counters)?;
            Ok(counters.used_bytes)
        })
    }

    /// Bytes that a process has mapped; 0 if the process has ended or may not be looked at.
    #[must_use]
    pub fn mapped_bytes(&self, pid: u32) -> u64 {
        let prefix = format!("{}/{SEGMENT_PREFIX}", self.directory.display());
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let bytes_of = |line: &str| {
            let (range, rest) = line.split_once(' ')?;
            let (begin, end) = range.split_once('-')?;
            let number = |text| u64::from_str_radix(text, 16).ok();
            rest.contains(&prefix).then_some(number(end)? - number(begin)?)
        };
        maps.lines().filter_map(bytes_of).sum()
    }

    /// The file of a segment.
    #[must_use]
    pub fn path(&self, id: u64) -> PathBuf {
        self.directory.join(format!("{SEGMENT_PREFIX}{id:016x}"))
    }

    /// Opens the file of a segment.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open_file(&self, id: u64) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).open(self.path(id))
    }

    /// Removes all segments, whoever holds them.
    ///
    /// # Errors
    /// The kernel's.
    pub fn clear(&self, counters: &mut Counters) -> io::Result<()> {
        for (_, path) in self.segments()? {
            fs::remove_file(path)?;
        }
        counters.used_bytes = 0;
        Ok(())
    }

    /// Unlinks a segment if it is dead, and says how many bytes that frees.
    ///
    /// # Errors
    /// The kernel's.
    pub fn bury(&self, id: u64) -> io::Result<u64> {
        let file = match self.open_file(id) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            file => file?,
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(0),
            Err(error) => Err(error.into()),
            Ok(()) => {
                let size_bytes = segment_bytes(file.metadata()?.len());
                fs::remove_file(self.path(id))?;
                Ok(size_bytes)
            }
        }
    }

    /// Buries what processes left that ended without freeing, and counts anew.
    ///
    /// # Errors
    /// The kernel's.
    pub fn reconcile(&self, counters: &mut Counters) -> io::Result<()> {
        counters.used_bytes = 0;
        for (id, path) in self.segments()? {
            if self.bury(id)? == 0 {
                counters.used_bytes +=
                    path.symlink_metadata().map_or(0, |metadata| segment_bytes(metadata.len()));
            }
        }
        Ok(())
    }

    fn segments(&self) -> io::Result<Vec<(u64, PathBuf)>> {
        let mut segments = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let name = entry.file_name();
            let id = name.to_str().and_then(|name| name.strip_prefix(SEGMENT_PREFIX));
            let id = id.and_then(|id| u64::from_str_radix(id, 16).ok());
            segments.extend(id.map(|id| (id, entry.path())));
        }
        Ok(segments)
    }

    /// As the function of this name, with the lock of the GPU's ledger.
    ///
    /// # Errors
    /// The kernel's, and those of `body`.
    pub fn under_lock<T>(&self, body: impl FnOnce(&mut Counters) -> io::Result<T>) -> io::Result<T> {
        under_lock(&self.directory, LEDGER, body)
    }
}

/// Runs `body` under the lock of a directory, which is that of a file with the directory's counters.
///
/// The file is opened anew each time: a descriptor that stayed open would be inherited by forked
/// children, who would keep the lock if this process were killed while it holds it; and a checkpoint
/// finds nothing open.
///
/// # Errors
/// The kernel's, and those of `body`.
pub fn under_lock<T>(
    directory: &Path,
    name: &str,
    body: impl FnOnce(&mut Counters) -> io::Result<T>,
) -> io::Result<T> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let path = directory.join(name);
    let file = match options.open(&path) {
        // After a restore on another machine the directory may be missing.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            own_directory(directory)?;
            options.open(&path)?
        }
        file => file?,
    };
    retry_on_intr(|| flock(&file, FlockOperation::LockExclusive))?;
    let result = Counters::read(&file).and_then(|mut counters| {
        let result = body(&mut counters);
        counters.write(&file)?;
        result
    });
    // Not left to the closing: a child that was forked meanwhile has the same lock.
    flock(&file, FlockOperation::Unlock)?;
    result
}

/// The length of a segment's data, by that of its file.
fn segment_bytes(file_bytes: u64) -> u64 {
    file_bytes.saturating_sub(TRAILER_BYTES as u64)
}
