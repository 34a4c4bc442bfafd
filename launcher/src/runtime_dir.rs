//! The directory for what lives only as long as a launcher: control sockets.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// `/run/ckpt-run` for root, `$XDG_RUNTIME_DIR/ckpt-run` or `/tmp/ckpt-run-UID` for others; made if need be.
///
/// # Errors
/// When it cannot be made, or belongs to somebody else.
pub fn runtime_dir() -> io::Result<PathBuf> {
    let uid = rustix::process::getuid();
    let path = match std::env::var_os("XDG_RUNTIME_DIR") {
        _ if uid.is_root() => PathBuf::from("/run/ckpt-run"),
        Some(dir) => PathBuf::from(dir).join("ckpt-run"),
        None => PathBuf::from(format!("/tmp/ckpt-run-{}", uid.as_raw())),
    };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
    let meta = std::fs::symlink_metadata(&path)?;
    if !meta.is_dir() || meta.uid() != uid.as_raw() || meta.mode() & 0o022 != 0 {
        let said = format!("{} belongs to somebody else or can be written by others", path.display());
        return Err(io::Error::other(said));
    }
    Ok(path)
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
