//! File helpers: durable writes, opening below a directory, free space.

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::retry_on_intr;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

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
    open_regular(path, File::options().write(true).create(true).truncate(true).mode(0o600))
}

/// Opens (or creates with mode 0600) a file that is locked.
pub(crate) fn open_lock(path: &Path) -> io::Result<File> {
    open_regular(path, File::options().read(true).write(true).create(true).truncate(false).mode(0o600))
}

/// Opens a regular file. What others have put at its path is neither followed, if it is a symbolic link, nor waited for, if
/// it is a fifo.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] if it is not a regular file; if it cannot be opened.
pub fn open_regular(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = options.custom_flags(flags.bits().cast_signed()).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    Ok(file)
}

/// Reads a regular file of at most `max_bytes` bytes.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if it is longer; those of [`open_regular`].
pub fn read_regular(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let file = open_regular(path, File::options().read(true))?;
    if file.metadata()?.len() > max_bytes {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("it is longer than {max_bytes} bytes"),
        ));
    }
    let mut content = Vec::new();
    file.take(max_bytes).read_to_end(&mut content)?;
    Ok(content)
}

/// Creates a directory and its parents with mode 0700.
pub(crate) fn create_private_dir(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Opens `path` below the directory `dir` for reading. Follows no symbolic link and never leaves `dir`.
pub(crate) fn open_beneath(dir: impl AsFd, path: impl AsRef<Path>) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let fd = retry_on_intr(|| rustix::fs::openat2(&dir, path.as_ref(), flags, Mode::empty(), resolve))?;
    Ok(File::from(fd))
}

/// Bytes available to an unprivileged writer on the file system of `path`, of which only the beginning need exist.
///
/// # Errors
/// If statvfs fails.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let facts = rustix::fs::statvfs(existing(path))?;
    Ok(facts.f_bavail.saturating_mul(facts.f_frsize))
}

/// Whether the file system of `path`, of which only the beginning need exist, is in memory.
///
/// # Errors
/// If statfs fails.
pub fn is_in_memory(path: &Path) -> io::Result<bool> {
    Ok(is_of_memory(&rustix::fs::statfs(existing(path))?))
}

pub(crate) fn is_of_memory(facts: &rustix::fs::StatFs) -> bool {
    // linux/magic.h
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    const RAMFS_MAGIC: u64 = 0x8584_58f6;
    matches!(u64::from_ne_bytes(facts.f_type.to_ne_bytes()), TMPFS_MAGIC | RAMFS_MAGIC)
}

/// The nearest directory above `path` that exists, or `path`. One that cannot be asked counts as one that exists.
fn existing(path: &Path) -> &Path {
    let nonempty = |path: &&Path| !path.as_os_str().is_empty();
    let mut paths = path.ancestors().take_while(nonempty);
    paths.find(|path| path.try_exists().unwrap_or(true)).unwrap_or(Path::new("."))
}
