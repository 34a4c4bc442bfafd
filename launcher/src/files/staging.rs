//! Staging: the launcher's memory in which CRIU writes its images, so that the job is frozen only while memory is copied.
//! It is a detached tmpfs, accessible through a descriptor only. When the launcher ends in any way, the kernel frees the
//! memory.

use crate::sys::memory::{SPARE_BYTES, available_bytes, free_bytes_at};
use ckpt_snapshot::{is_in_memory, size_text};
use rustix::fs::{AtFlags, CWD, MemfdFlags, Mode, OFlags, memfd_create};
use rustix::io::retry_on_intr;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// What a checkpoint or a resume takes beside the images, about: the buffers of the threads that store or load them, and CRIU.
const WORKING_BYTES: u64 = 64 << 20;
/// Huge pages are faster for images of at least this size.
const HUGE_PAGES_FROM_BYTES: u64 = 1 << 30;

/// A detached tmpfs.
fn tmpfs(huge: bool) -> rustix::io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(context.as_fd(), "mode", "0700")?;
    // Room is checked before each checkpoint; the file system itself may use all memory.
    fsconfig_set_string(context.as_fd(), "size", "100%")?;
    if huge {
        fsconfig_set_string(context.as_fd(), "huge", "always")?;
    }
    fsconfig_create(context.as_fd())?;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}

/// An empty directory in memory, freed with its descriptor.
///
/// # Errors
/// When the kernel refuses: no CAP_SYS_ADMIN, or older than 5.2.
pub fn own_memory() -> io::Result<OwnedFd> {
    Ok(tmpfs(false)?)
}

/// An empty file in memory without a name, freed with its last descriptor. It has huge pages if the kernel supports them
/// for tmpfs.
///
/// # Errors
/// When the kernel refuses.
pub fn unnamed_file() -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let huge = tmpfs(true)
        .and_then(|mount| retry_on_intr(|| rustix::fs::openat(&mount, ".", flags, Mode::RUSR | Mode::WUSR)));
    let file = huge.or_else(|_| memfd_create("ckpt-mirror", MemfdFlags::CLOEXEC))?;
    Ok(File::from(file))
}

/// Storage for the images of one checkpoint.
pub struct Staging {
    location: Location,
}

enum Location {
    Memory(OwnedFd),
    Disk(PathBuf),
}

impl Staging {
    /// In memory, if there is room for images of this size and `more_bytes`. Otherwise on disk, in the directory `on_disk`,
    /// which is emptied first; `report_fallback` is then called with the reason.
    ///
    /// # Errors
    /// When the directory cannot be created, there is none, or it has no room.
    pub fn for_images(
        image_bytes: u64,
        more_bytes: u64,
        on_disk: Option<&Path>,
        report_fallback: impl FnOnce(&str),
    ) -> io::Result<Self> {
        let parts = [image_bytes, image_bytes / 8, more_bytes, SPARE_BYTES];
        let needed_bytes = parts.into_iter().fold(0, u64::saturating_add);
        let available_bytes = available_bytes();
        let memory = match &available_bytes {
            Ok(available_bytes) if *available_bytes < needed_bytes => {
                Err(format!("{} is free, {} is needed", size_text(*available_bytes), size_text(needed_bytes)))
            }
            Ok(_) => Self::in_memory(image_bytes).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        memory.or_else(|reason| {
            let on_disk = on_disk.ok_or_else(|| {
                io::Error::other(format!(
                    "{reason}, and the job's memory must not be on disk (--staging, --encrypt-key-file). Free memory, give ckpt-run the rights that `ckpt-run doctor` names, or allow it with --staging any"
                ))
            })?;
            // The kernel would kill the job or ckpt-run.
            if available_bytes.is_ok_and(|bytes| bytes < WORKING_BYTES) {
                let what = format!(
                    "{reason}; on disk, ckpt-run and CRIU need {} for their own work",
                    size_text(WORKING_BYTES)
                );
                return Err(io::Error::new(io::ErrorKind::OutOfMemory, what));
            }
            let staging = Self::on_disk(on_disk)?;
            // What is in memory after all needs as much there.
            let wanted_bytes = match is_in_memory(on_disk)? {
                true => needed_bytes.saturating_sub(SPARE_BYTES),
                false => image_bytes,
            };
            let free_bytes = free_bytes_at(on_disk)?;
            if free_bytes < wanted_bytes {
                return Err(io::Error::other(format!(
                    "{reason}. In {} there is room for {}. Free memory or space, or name another place (--store)",
                    on_disk.display(),
                    size_text(free_bytes)
                )));
            }
            report_fallback(&reason);
            Ok(staging)
        })
    }

    /// In memory, for images of about `expected_bytes`. Large images use huge pages if the kernel supports them for tmpfs,
    /// which makes copying about twice as fast. Small images would be slower: each of CRIU's many small files would need a
    /// zeroed huge page.
    ///
    /// # Errors
    /// When the kernel refuses: no CAP_SYS_ADMIN, or older than 5.2.
    pub fn in_memory(expected_bytes: u64) -> io::Result<Self> {
        let huge = expected_bytes >= HUGE_PAGES_FROM_BYTES;
        let mount = tmpfs(huge).or_else(|_| tmpfs(false))?;
        Ok(Self { location: Location::Memory(mount) })
    }

    /// On disk, in the directory `path`, which is emptied first. Used if memory is short. The job is then frozen for as long
    /// as writing to the disk takes.
    ///
    /// # Errors
    /// When the directory cannot be created.
    pub fn on_disk(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        match std::fs::remove_dir_all(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        Ok(Self { location: Location::Disk(path.to_owned()) })
    }

    /// Allocates and frees `bytes` of memory. On a virtual machine, memory that was not used for a while is fetched from
    /// the host page by page, which is slow. Doing that in advance shortens the time for which the job is frozen. On disk
    /// this does nothing.
    ///
    /// # Errors
    /// When the memory cannot be allocated.
    pub fn warm(&self, bytes: u64) -> io::Result<()> {
        let Location::Memory(mount) = &self.location else { return Ok(()) };
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mut file =
            File::from(retry_on_intr(|| rustix::fs::openat(mount, "warm", flags, Mode::RUSR | Mode::WUSR))?);
        rustix::fs::unlinkat(mount, "warm", AtFlags::empty())?;
        io::copy(&mut io::repeat(0).take(bytes), &mut file).map(drop)
    }

    /// Creates the subdirectory `name` and opens it.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn subdir(&self, name: &str) -> io::Result<StagedDir> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let fd = match &self.location {
            Location::Memory(mount) => {
                rustix::fs::mkdirat(mount, name, Mode::RWXU)?;
                retry_on_intr(|| rustix::fs::openat(mount, name, flags, Mode::empty()))?
            }
            Location::Disk(path) => {
                let path = path.join(name);
                rustix::fs::mkdirat(CWD, &path, Mode::RWXU)?;
                retry_on_intr(|| rustix::fs::openat(CWD, &path, flags, Mode::empty()))?
            }
        };
        Ok(StagedDir { fd })
    }
}

impl Staging {
    /// Whether it is in memory.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        matches!(self.location, Location::Memory(_))
    }

    /// How much may be copied to it beside images of this size, bytes.
    ///
    /// # Errors
    /// When it cannot be read how much memory is free. The contents of files would be missing then.
    pub fn room_bytes(&self, image_bytes: u64) -> io::Result<u64> {
        match &self.location {
            Location::Memory(_) => {
                let reserved = image_bytes.saturating_add(image_bytes / 8).saturating_add(SPARE_BYTES);
                Ok(available_bytes()?.saturating_sub(reserved))
            }
            Location::Disk(_) => Ok(u64::MAX),
        }
    }

    /// Removes the subdirectory `name` with its files, which frees their memory.
    ///
    /// # Errors
    /// When a file or the directory cannot be removed.
    pub fn remove_subdir(&self, name: &str) -> io::Result<()> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let remove = |parent: BorrowedFd| -> io::Result<()> {
            let dir = match retry_on_intr(|| rustix::fs::openat(parent, name, flags, Mode::empty())) {
                Err(rustix::io::Errno::NOENT) => return Ok(()),
                other => StagedDir { fd: other? },
            };
            // CRIU leaves a link to an older dump beside its images.
            for entry in rustix::fs::Dir::read_from(&dir.fd)? {
                let entry = entry?;
                if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                    rustix::fs::unlinkat(&dir.fd, entry.file_name(), AtFlags::empty())?;
                }
            }
            Ok(rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)?)
        };
        match &self.location {
            Location::Memory(mount) => remove(mount.as_fd()),
            Location::Disk(path) => remove(File::open(path)?.as_fd()),
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Location::Disk(path) = &self.location
            && let Err(error) = std::fs::remove_dir_all(path)
        {
            tracing::warn!("cannot remove {}: {error}", path.display());
        }
    }
}

/// One directory of a [`Staging`].
pub struct StagedDir {
    fd: OwnedFd,
}

impl StagedDir {
    /// The directory itself.
    #[must_use]
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Opens the file `name` for reading.
    ///
    /// # Errors
    /// When it does not exist or cannot be opened.
    pub fn open(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(File::from(retry_on_intr(|| rustix::fs::openat(&self.fd, name, flags, Mode::empty()))?))
    }

    /// Opens the file `name` for writing, without truncating it.
    ///
    /// # Errors
    /// When it does not exist or cannot be opened.
    pub fn change(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(File::from(retry_on_intr(|| rustix::fs::openat(&self.fd, name, flags, Mode::empty()))?))
    }

    /// Creates the file `name` for writing.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn create(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(File::from(retry_on_intr(|| rustix::fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR))?))
    }

    /// The file `name` with this length, for reading and writing. It is created if there is none; new pages have no memory yet.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn resize(&self, name: &str, bytes: u64) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let open = || rustix::fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR);
        let file = File::from(retry_on_intr(open)?);
        file.set_len(bytes)?;
        Ok(file)
    }

    /// The content of the file `name`; `None` if it does not exist.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let mut content = Vec::new();
        match self.open(name) {
            Ok(mut file) => file.read_to_end(&mut content).map(|_| Some(content)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Names and lengths of the regular files, sorted by name.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn files(&self) -> io::Result<Vec<(String, u64)>> {
        let mut found = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.fd)? {
            let entry = entry?;
            let stat = match rustix::fs::statat(&self.fd, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
                // Another thread has removed it.
                Err(rustix::io::Errno::NOENT) => continue,
                other => other?,
            };
            let is_file =
                rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::RegularFile;
            if let (true, Ok(name)) = (is_file, entry.file_name().to_str()) {
                found.push((name.to_owned(), stat.st_size.cast_unsigned()));
            }
        }
        found.sort();
        Ok(found)
    }

    /// Removes the file `name`, which frees its memory.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.fd, name, AtFlags::empty())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_nowhere_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |on_disk| {
            let staging = Staging::for_images(u64::MAX / 4, 0, on_disk, |_| panic!("a fallback"));
            staging.err().map(|error| error.to_string()).unwrap_or_default()
        };
        let (nowhere, on_disk) = (refused(None), refused(Some(&dir.path().join("staging"))));
        assert!(nowhere.contains("must not be on disk"), "{nowhere}");
        assert!(on_disk.contains("there is room for") && on_disk.contains("--store"), "{on_disk}");
    }

    #[test]
    fn disk_staging_is_emptied_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("staging");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("left over"), "x").unwrap();
        let staging = Staging::on_disk(&path).unwrap();
        let staged = staging.subdir("images").unwrap();
        io::Write::write_all(&mut staged.create("a.img").unwrap(), b"abc").unwrap();
        assert_eq!(staged.files().unwrap(), [("a.img".to_owned(), 3)]);
        assert_eq!(staged.read("a.img").unwrap().unwrap(), b"abc");
        assert_eq!(staged.read("b.img").unwrap(), None);
        assert!(!path.join("left over").exists());
        rustix::fs::symlinkat("../other", staged.fd(), "parent").unwrap();
        staging.remove_subdir("images").unwrap();
        assert!(path.exists() && !path.join("images").exists());
        drop(staging);
        assert!(!path.exists());
    }
}
