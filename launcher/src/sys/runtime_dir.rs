//! The directories of this machine that are no store: for what lives only as long as a launcher (control sockets), and
//! for what a store at an address has here.

use rustix::process::getuid;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// `/run/ckpt-run` for root, `$XDG_RUNTIME_DIR/ckpt-run` or `/tmp/ckpt-run-UID` for others; made if need be.
///
/// # Errors
/// When it cannot be made, or belongs to somebody else.
pub fn runtime_dir() -> io::Result<PathBuf> {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if !getuid().is_root() => private(PathBuf::from(dir).join("ckpt-run")),
        _ => fixed_dir(),
    }
}

/// The same whatever the environment says: `/run/ckpt-run` for root, `/tmp/ckpt-run-UID` for others.
///
/// # Errors
/// When it cannot be made, or belongs to somebody else.
pub fn fixed_dir() -> io::Result<PathBuf> {
    let uid = getuid();
    private(if uid.is_root() {
        PathBuf::from("/run/ckpt-run")
    } else {
        PathBuf::from(format!("/tmp/ckpt-run-{}", uid.as_raw()))
    })
}

fn private(path: PathBuf) -> io::Result<PathBuf> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
    let meta = std::fs::symlink_metadata(&path)?;
    if !meta.is_dir() || meta.uid() != getuid().as_raw() || meta.mode() & 0o022 != 0 {
        let said = format!("{} belongs to somebody else or can be written by others", path.display());
        return Err(io::Error::other(said));
    }
    Ok(path)
}

/// The directory for what stays on this machine: `$XDG_STATE_HOME/ckpt-run`, or `~/.local/state/ckpt-run`. Where
/// neither is known, the one of the sockets has to do.
///
/// # Errors
/// When there is none.
pub fn state_dir() -> io::Result<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    base.map_or_else(runtime_dir, |base| Ok(base.join("ckpt-run")))
}

/// A name for a job's directory that fits into a socket's path.
#[must_use]
pub fn short_name(path: &Path) -> String {
    // FNV-1a, 64 bits: the same in every build; a collision of two stores on one machine is out of the question.
    let hash = path.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}
