//! File helpers: hashed copies, durable writes, free space.

use rustix::fs::{Mode, OFlags, ResolveFlags};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Bytes copied per step: large enough to amortise the system calls, small enough for progress reports.
const STEP_BYTES: usize = 4 << 20;

/// Copies all of `from` to `to` and calls `progress` with the bytes of each step. Returns (bytes, BLAKE3 in hex).
///
/// # Errors
/// The first failed read or write.
pub fn copy_hashed(
    from: &mut dyn Read,
    to: &mut dyn Write,
    progress: &dyn Fn(u64),
) -> io::Result<(u64, String)> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; STEP_BYTES];
    let mut total_bytes = 0;
    loop {
        let read = match from.read(&mut buffer) {
            Ok(0) => return Ok((total_bytes, hasher.finalize().to_hex().to_string())),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        hasher.update(&buffer[..read]);
        to.write_all(&buffer[..read])?;
        total_bytes += read as u64;
        progress(read as u64);
    }
}

/// Writes a sparse file: long runs of zeroes become holes, so a large memory segment that is mostly untouched stays
/// small.
pub struct SparseWriter<'a> {
    file: &'a mut File,
    length_bytes: u64,
}

impl<'a> SparseWriter<'a> {
    /// Writes to `file`, which must be empty.
    pub fn new(file: &'a mut File) -> Self {
        Self { file, length_bytes: 0 }
    }

    /// Sets the length of the file. Call it after the last write.
    ///
    /// # Errors
    /// If the length cannot be set.
    pub fn finish(self) -> io::Result<()> {
        self.file.set_len(self.length_bytes)
    }
}

impl Write for SparseWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A hole smaller than a page saves nothing.
        if bytes.len() >= 4096 && bytes.iter().all(|&byte| byte == 0) {
            self.file.seek(io::SeekFrom::Current(bytes.len().try_into().map_err(io::Error::other)?))?;
        } else {
            self.file.write_all(bytes)?;
        }
        self.length_bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes the entries of the directory `path` durable (fsync).
///
/// # Errors
/// If the directory cannot be opened or synchronised.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Replaces the file `path` by `content`, atomically, durably and with mode 0600.
///
/// # Errors
/// The first failed step. The old file is unchanged unless the last step, the fsync of the directory, failed.
pub fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    let parent = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let mut temporary = path.to_owned().into_os_string();
    temporary.push(".tmp");
    let mut file = create_private(Path::new(&temporary))?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    sync_dir(parent)
}

/// Creates (or truncates) a file with mode 0600.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(libc_o_nofollow())
        .open(path)
}

fn libc_o_nofollow() -> i32 {
    OFlags::NOFOLLOW.bits().cast_signed()
}

/// Creates a directory and its parents with mode 0700.
pub(crate) fn create_private_dir(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Opens `path` below the directory `dir` for reading. Follows no symbolic link and never leaves `dir`.
pub(crate) fn open_beneath(dir: impl AsFd, path: impl AsRef<Path>) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let fd = rustix::fs::openat2(dir, path.as_ref(), flags, Mode::empty(), resolve)?;
    Ok(File::from(fd))
}

/// Bytes available to an unprivileged writer on the file system of `path`.
///
/// # Errors
/// If statvfs fails.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let facts = rustix::fs::statvfs(path)?;
    Ok(facts.f_bavail.saturating_mul(facts.f_frsize))
}
