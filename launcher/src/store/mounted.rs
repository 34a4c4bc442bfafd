//! The file system of a store that is not mounted, such as after a reboot: a new store would be made on the disk below its
//! mount point, and the job would begin again without a word. The mount point of each store is noted on this machine.

use crate::files::walk::IN_STORE;
use crate::sys::host;
use crate::sys::mounts::{OWN, is_mounted, mount_of, read_mounts};
use crate::sys::runtime_dir::{private, short_name, state_dir};
use ckpt_snapshot::medium::Guard;
use ckpt_snapshot::write_atomically;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

/// The mount point of the file system on which the store in `dir` was, if there is no store and nothing is mounted there.
#[must_use]
pub fn missing(dir: &Path) -> Option<PathBuf> {
    // The look at it mounts what is mounted on demand.
    // Uploads have one of these.
    if IN_STORE.iter().any(|name| dir.join(name).exists()) {
        return None;
    }
    let point = PathBuf::from(OsString::from_vec(fs::read(note(dir).ok()?).ok()?));
    let mounts = read_mounts(OWN).ok()?;
    (!is_mounted(&mounts, &point)).then_some(point)
}

/// Fails as long as [`missing`] names the mount point of `dir`.
#[must_use]
pub fn guard(dir: PathBuf) -> Guard {
    Arc::new(move || match missing(&dir) {
        Some(point) => {
            Err(io::Error::other(format!("nothing is mounted at {}, where it was", point.display())))
        }
        None => Ok(()),
    })
}

/// Notes where the file system of the store in `dir` is mounted, unless the working directory is below the mount point:
/// without it, the job does not start there. A note that cannot be written is not missed before something else is.
pub fn remember(dir: &Path) {
    let noted = || {
        let mounts = read_mounts(OWN)?;
        let point = mount_of(&mounts, &dir.canonicalize()?).map(|mount| mount.mount_point.clone());
        let (point, note) = (point.unwrap_or_default(), note(dir)?);
        let cwd = Path::new(".").canonicalize()?;
        match point.as_os_str().as_bytes() {
            // It was on another one before.
            b"/" | b"" if note.exists() => fs::remove_file(&note),
            b"/" | b"" => Ok(()),
            _ if cwd.starts_with(&point) && cwd != point => Ok(()),
            known if fs::read(&note).is_ok_and(|before| before == known) => Ok(()),
            bytes => write_atomically(&note, bytes),
        }
    };
    if let Err(error) = noted() {
        tracing::debug!("cannot note where the file system of {} is mounted: {error}", dir.display());
    }
}

/// The file with the mount point of the store in `dir`. Machines may share a home directory.
fn note(dir: &Path) -> io::Result<PathBuf> {
    let all = private(state_dir()?.join("mounts"))?;
    let mut name = host::facts().hostname.into_bytes();
    name.extend(std::path::absolute(dir)?.as_os_str().as_bytes());
    Ok(all.join(short_name(Path::new(OsStr::from_bytes(&name)))))
}
