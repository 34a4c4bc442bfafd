//! The job's namespaces: a PID and a mount namespace, and a network namespace if requested. The init of ckpt-run is PID 1;
//! the job's process tree and, during a dump or restore, CRIU run in the same namespaces.
//!
//! ```text
//! launcher ─── control socket ─── init (PID 1, `ckpt-run __init`)
//!                                   ├─ reaper (10001, a few hundred bytes of machine code: the root of what is dumped)
//!                                   │    └─ the command (10002…) and all its descendants, orphans included
//!                                   └─ criu (only during a dump or restore)
//! ```
//!
//! The init is never part of a dump. When the launcher ends in any way, the control socket closes, the init ends, and the
//! kernel kills all processes in the namespace.

use crate::sys::runtime_dir::{fixed_dir, private};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, mount};
use std::ffi::CStr;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

mod activity;
mod client;
mod descriptors;
mod ending;
mod event_counters;
#[allow(unsafe_code)]
mod init;
#[allow(unsafe_code)]
mod job_start;
mod messages;
#[allow(unsafe_code)]
mod peek;
#[allow(unsafe_code)]
mod reaper;
mod recorder;
#[allow(unsafe_code)]
mod seccomp;
#[allow(unsafe_code)]
mod socket_options;
#[allow(unsafe_code)]
mod spawn;
pub mod stdio;
#[allow(unsafe_code)]
mod subreaper;
mod survey;
mod terminals;
mod tree;
pub mod written_files;

pub use activity::Activity;
pub use client::{CriuProcess, DescriptorState, InitEvent, Namespace, NamespaceError, StartError, Survey};
pub use ending::{is_ending, remaining_processes};
pub use init::init_main;
pub use messages::{Names, Network, StdioSource};
pub use peek::{PeekedMessage, PeekedQueue};
pub use survey::{numbers_in, pid_namespace_of};
pub use tree::{Tree, processes, processes_of_namespace};

/// The first argument that turns this program into the namespace's init.
pub const INIT_ARGUMENT: &str = "__init";

/// PIDs of a job begin after this number. CRIU's own processes use low PIDs in a new namespace, so they never collide with
/// the PIDs to restore.
pub const FIRST_JOB_PID: i32 = 10_000;

/// Options of small private file systems.
const PRIVATE_TMPFS: &CStr = c"size=1m,mode=0700";

/// The directory where the init mounts a small private tmpfs, from which the reaper's program is executed. CRIU restores
/// the (unlinked) program file at its path, so it is `recorded` in the snapshot and the same in every later resume. It is
/// created if it does not exist. The launcher names it in an argument of the init.
fn private_dir() -> io::Result<PathBuf> {
    let recorded = std::env::args_os().nth(3).filter(|path| !path.is_empty()).map(PathBuf::from);
    let path = match recorded {
        Some(path) => {
            let above = path.parent().unwrap_or(&path);
            if let Err(error) = private(above.to_owned()) {
                cover(above).map_err(|_| error)?;
            }
            path
        }
        None => fixed_dir()?.join("private"),
    };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
    Ok(path)
}

/// Mounts an empty directory over one of another user, in the job's mount namespace. Any user can make the directory of
/// another one in /tmp, and would keep that user's jobs from being resumed.
fn cover(dir: &Path) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let taken = rustix::fs::open(dir, flags, Mode::empty())?;
    let place = format!("/proc/self/fd/{}", taken.as_raw_fd());
    Ok(mount("tmpfs", place, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, PRIVATE_TMPFS)?)
}

/// The path of the job's file `path` (absolute) below the job's root directory `root`.
#[must_use]
pub fn inside(root: &Path, path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    root.join(path.strip_prefix("/").unwrap_or(path))
}
