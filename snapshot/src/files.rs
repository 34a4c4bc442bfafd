//! Small file work that everything here shares: hashed copies, durable writes, free space.

use rustix::fs::{Mode, OFlags, ResolveFlags};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Bytes moved per step: large enough that the system calls do not count, small enough to report progress.
const STEP_BYTES: usize = 4 << 20;

/// Copies all of `from` to `to`, telling `progress` the bytes of each step. Returns (bytes, BLAKE3 in hex).
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

/// Writes a file without its zeroes: whole steps of them become holes, so that a large segment of which little was
/// touched stays small.
pub struct SparseWriter<'a> {
    file: &'a mut File,
    length_bytes: u64,
}

impl<'a> SparseWriter<'a> {
    /// Writes to `file` from its beginning; it has to be empty.
    pub fn new(file: &'a mut File) -> Self {
        Self { file, length_bytes: 0 }
    }

    /// Gives the file its whole length. To be called at the end.
    ///
    /// # Errors
    /// When that fails.
    pub fn finish(self) -> io::Result<()> {
        self.file.set_len(self.length_bytes)
    }
}

impl Write for SparseWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Small pieces are not worth a hole.
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

/// Makes the entries of the directory `path` durable.
///
/// # Errors
/// When it cannot be opened or synchronised.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Replaces the file `path` by `content`, durably and with mode 0600: readers see the old one or the new one.
///
/// # Errors
/// The first failed step; the old file is then as it was.
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

/// Creates (or empties) a file that only its owner can read.
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

/// Creates a directory that only its owner can enter, with its parents.
pub(crate) fn create_private_dir(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Opens `path` below the directory `dir` for reading, following no symbolic link and never leaving `dir`.
pub(crate) fn open_beneath(dir: impl AsFd, path: impl AsRef<Path>) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let fd = rustix::fs::openat2(dir, path.as_ref(), flags, Mode::empty(), resolve)?;
    Ok(File::from(fd))
}

/// Bytes that an unprivileged writer may still write to the file system of `path`.
///
/// # Errors
/// When the file system cannot be asked.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let facts = rustix::fs::statvfs(path)?;
    Ok(facts.f_bavail.saturating_mul(facts.f_frsize))
}
