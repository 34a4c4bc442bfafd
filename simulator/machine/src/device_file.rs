//! A device's file, which stands for `/dev/nvidiaN`: every process that has initialised the driver or NVML has it open.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// `F_SETSIG` of linux/fcntl.h, which the crate libc lacks.
const F_SETSIG: libc::c_int = 10;

/// Opens the file of a device, for writing: only writers are counted ([`is_only_opener`]).
///
/// # Errors
/// The kernel's.
pub fn open(machine: &Path, ordinal: usize) -> io::Result<File> {
    let path = machine.join(format!("nvidia{ordinal}"));
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Opens the files that stand for `/dev/nvidia-caps/nvidia-cap1` and `nvidia-cap2`, the rights to configure and to watch MIG:
/// every process with a context has them open, on a whole GPU too (seen with 580.159.04).
///
/// # Errors
/// The kernel's.
pub fn open_capabilities(machine: &Path) -> io::Result<[File; 2]> {
    let directory = machine.join("nvidia-caps");
    std::fs::create_dir_all(&directory)?;
    let open = |name| OpenOptions::new().write(true).create(true).truncate(false).open(directory.join(name));
    Ok([open("nvidia-cap1")?, open("nvidia-cap2")?])
}

/// Whether nothing else has the file open: the kernel grants a lease for writing only then (fcntl(2), F_SETLEASE).
///
/// # Errors
/// The kernel's.
pub fn is_only_opener(file: &File) -> io::Result<bool> {
    let number = file.as_raw_fd();
    // SAFETY: the argument is a number. Who opens the file while the lease is held waits, and its holder gets a signal:
    // one that is ignored by default.
    let armed = unsafe { libc::fcntl(number, F_SETSIG, libc::SIGURG) };
    // SAFETY: as above.
    if armed == 0 && unsafe { libc::fcntl(number, libc::F_SETLEASE, libc::F_WRLCK) } == 0 {
        // SAFETY: as above.
        unsafe { libc::fcntl(number, libc::F_SETLEASE, libc::F_UNLCK) };
        return Ok(true);
    }
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_opener_is_noticed() {
        let machine = tempfile::tempdir_in("/dev/shm").unwrap();
        let open = || open(machine.path(), 0).unwrap();
        let first = open();
        assert!(is_only_opener(&first).unwrap());
        let second = open();
        assert!(!is_only_opener(&first).unwrap());
        let copy = second.try_clone().unwrap();
        drop(second);
        assert!(!is_only_opener(&first).unwrap(), "as the child of a fork has it");
        drop(copy);
        assert!(is_only_opener(&first).unwrap());
    }
}
