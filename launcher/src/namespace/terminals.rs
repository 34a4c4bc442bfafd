//! The terminals of the job's namespace.
//!
//! CRIU restores a terminal that the job has made (`/dev/pts/N`) with its number. Where all programs of the machine share
//! their terminals, the number may be in use by then, and the job could not be resumed. So a job gets terminals of its
//! own, unless ckpt-run itself has given it one: that one is the launcher's too.

use crate::sys::mounts::{OWN, read_mounts};
use rustix::fs::{Mode, OFlags};
use rustix::io::retry_on_intr;
use rustix::mount::{MountFlags, mount};
use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

const TERMINALS: &str = "/dev/pts";
const FILE_SYSTEM: &str = "devpts";

/// Opens a terminal in this mount namespace, so that CRIU can resolve its path.
pub(super) fn open(path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(retry_on_intr(|| rustix::fs::open(path, flags, Mode::empty()))?)
}

/// Mounts terminals of this mount namespace's own, with the group and mode of the system's. Does nothing where there are
/// none.
///
/// # Errors
/// When it is not allowed: in a user namespace that lacks the group. The terminals are the system's then.
pub(super) fn separate() -> io::Result<()> {
    let mounts = read_mounts(OWN)?;
    let is_system = |one: &&procfs_core::process::MountInfo| {
        one.fs_type == FILE_SYSTEM && one.mount_point == Path::new(TERMINALS)
    };
    let Some(system) = mounts.iter().rfind(is_system) else { return Ok(()) };
    let mut options = "newinstance,ptmxmode=666".to_owned();
    for name in ["uid", "gid", "mode"] {
        if let Some(Some(value)) = system.super_options.get(name) {
            options += &format!(",{name}={value}");
        }
    }
    let options = CString::new(options)?;
    Ok(mount(
        FILE_SYSTEM,
        TERMINALS,
        FILE_SYSTEM,
        MountFlags::NOSUID | MountFlags::NOEXEC,
        options.as_c_str(),
    )?)
}
