//! The file system of a store that is not mounted, such as after a reboot: a new store would be made on the disk below its
//! mount point, and the job would begin again without a word. The mount point of each store is noted on this machine.

use crate::sys::mounts::{OWN, mount_of, read_mounts};
use crate::sys::runtime_dir::{private, short_name, state_dir};
use ckpt_snapshot::write_atomically;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The mount point of the file system on which the directory `dir` was, if `dir` does not exist and nothing is mounted there.
#[must_use]
pub fn missing(dir: &Path) -> Option<PathBuf> {
    // The look at it mounts what is mounted on demand.
    if !matches!(dir.try_exists(), Ok(false)) {
        return None;
    }
    let point = PathBuf::from(OsString::from_vec(fs::read(note(dir).ok()?).ok()?));
    let mounts = read_mounts(OWN).ok()?;
    mounts.iter().all(|mount| mount.mount_point != point).then_some(point)
}

/// Notes where the file system of the existing directory `dir` is mounted, unless it is that of the working directory, without
/// which no job starts. A note that cannot be written is not missed before something else is.
pub fn remember(dir: &Path) {
    let noted = || {
        let mounts = read_mounts(OWN)?;
        let point_of = |dir: &Path| {
            io::Result::Ok(mount_of(&mounts, &dir.canonicalize()?).map(|mount| &mount.mount_point))
        };
        let (point, of_cwd) = (point_of(dir)?, point_of(Path::new("."))?);
        let note = note(dir)?;
        match point.filter(|point| Some(*point) != of_cwd) {
            Some(point) if fs::read(&note).is_ok_and(|known| known == point.as_os_str().as_bytes()) => Ok(()),
            Some(point) => write_atomically(&note, point.as_os_str().as_bytes()),
            None if note.exists() => fs::remove_file(&note),
            None => Ok(()),
        }
    };
    if let Err(error) = noted() {
        tracing::debug!("cannot note where the file system of {} is mounted: {error}", dir.display());
    }
}

/// The file with the mount point of the store in `dir`.
fn note(dir: &Path) -> io::Result<PathBuf> {
    let all = private(state_dir()?.join("mounts"))?;
    Ok(all.join(short_name(&std::path::absolute(dir)?)))
}
