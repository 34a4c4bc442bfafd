//! The job's own namespaces: a PID and a mount namespace (and, when asked for, a network namespace) with an init of
//! ours as PID 1, the job's tree beside it, and CRIU started in the same namespaces when it is needed.
//!
//! ```text
//! launcher ─── control socket ─── init (PID 1, `ckpt-run __init`)
//!                                   ├─ reaper (10001, a few hundred bytes of machine code: the root of what is dumped)
//!                                   │    └─ the command (10002…) and all its descendants, orphans included
//!                                   └─ criu (only while it works)
//! ```
//!
//! The init never is in a dump; it stays for the next restore. When the launcher dies, however it dies, the control
//! socket closes, the init ends, and the kernel ends everything in the namespace with it.

use crate::sys::runtime_dir::fixed_dir;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

mod client;
mod ending;
#[allow(unsafe_code)]
mod init;
#[allow(unsafe_code)]
mod job_start;
mod messages;
#[allow(unsafe_code)]
mod reaper;
#[allow(unsafe_code)]
mod seccomp;
#[allow(unsafe_code)]
mod spawn;
pub mod stdio;
#[allow(unsafe_code)]
mod subreaper;
mod survey;

pub use client::{CriuProcess, InitEvent, Namespace, NamespaceError, StartError, Survey};
pub use ending::is_ending;
pub use init::init_main;
pub use messages::{Network, StdioSource};

/// The first argument that turns this program into the namespace's init.
pub const INIT_ARGUMENT: &str = "__init";

/// PIDs of a job begin after this number, so that CRIU's own processes, which take the low ones in a fresh
/// namespace, never collide with those that it has to bring back.
pub const FIRST_JOB_PID: i32 = 10_000;

/// Where the init mounts a small private tmpfs: the reaper's program is executed from there. It has to be the same
/// path in the namespace of every later resume, since CRIU puts the (unlinked) program file back at its path. The
/// directory is made if need be.
fn private_dir() -> io::Result<PathBuf> {
    let path = fixed_dir()?.join("private");
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
    Ok(path)
}

/// Where `path` (absolute, as the job names it) is when the job's root directory is `root`.
#[must_use]
pub fn inside(root: &Path, path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    root.join(path.strip_prefix("/").unwrap_or(path))
}
