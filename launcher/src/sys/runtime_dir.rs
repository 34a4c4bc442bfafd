//! Directories on this machine outside of the store: for files that live as long as a launcher (control sockets), and for
//! the local part of an object store.

use rustix::process::getuid;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// `/run/ckpt-run` for root, `$XDG_RUNTIME_DIR/ckpt-run` or `/tmp/ckpt-run-UID` for others; created if missing.
///
/// # Errors
/// When the directory cannot be created, or belongs to another user.
pub fn runtime_dir() -> io::Result<PathBuf> {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if !getuid().is_root() => private(PathBuf::from(dir).join("ckpt-run")),
        _ => fixed_dir(),
    }
}

/// The directory independent of the environment: `/run/ckpt-run` for root, `/tmp/ckpt-run-UID` for others.
///
/// # Errors
/// When the directory cannot be created, or belongs to another user.
pub fn fixed_dir() -> io::Result<PathBuf> {
    let uid = getuid();
    private(if uid.is_root() {
        PathBuf::from("/run/ckpt-run")
    } else {
        PathBuf::from(format!("/tmp/ckpt-run-{}", uid.as_raw()))
    })
}

/// Creates a directory that only this user may use, if it is missing.
///
/// # Errors
/// When it cannot be created, or belongs to another user.
pub fn private(path: PathBuf) -> io::Result<PathBuf> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
    let meta = std::fs::symlink_metadata(&path)?;
    if !meta.is_dir() || meta.uid() != getuid().as_raw() || meta.mode() & 0o022 != 0 {
        let problem = format!("{} belongs to another user or is writable by others", path.display());
        return Err(io::Error::other(problem));
    }
    Ok(path)
}

/// The directory for state on this machine: `$XDG_STATE_HOME/ckpt-run`, or `~/.local/state/ckpt-run`. Without either
/// variable, [`runtime_dir`].
///
/// # Errors
/// When there is no such directory.
pub fn state_dir() -> io::Result<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    base.map_or_else(runtime_dir, |base| Ok(base.join("ckpt-run")))
}

/// A short name for a directory that fits into the path of a socket.
#[must_use]
pub fn short_name(path: &Path) -> String {
    // FNV-1a, 64 bits: the same in every build; a collision of two stores on one machine is practically impossible.
    let hash = path.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}
