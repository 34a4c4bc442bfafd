//! What is mounted where.

use crate::sys::path_text::{bytes_text, text_path};
use procfs_core::FromRead;
use procfs_core::process::{MountInfo, MountInfos};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::{fs, io};

/// The mounts of this process.
pub const OWN: &str = "/proc/self/mountinfo";

/// The mounts in a process's `mountinfo`. Mount points are paths.
///
/// # Errors
/// When the file cannot be read.
pub fn read_mounts(path: impl AsRef<Path>) -> io::Result<Vec<MountInfo>> {
    let text = bytes_text(&fs::read(path)?);
    let mut mounts = MountInfos::from_read(text.as_bytes()).map_err(io::Error::other)?.0;
    for mount in &mut mounts {
        let point = mount.mount_point.to_str().map(text_path).unwrap_or_default();
        mount.mount_point = OsString::from_vec(unescaped(point.as_os_str().as_bytes())).into();
    }
    Ok(mounts)
}

/// Replaces a backslash and three octal digits by the byte that they stand for: the kernel writes spaces, tabs, newlines and
/// backslashes in this way (proc_pid_mountinfo(5)).
fn unescaped(mut bytes: &[u8]) -> Vec<u8> {
    let mut found = Vec::with_capacity(bytes.len());
    while let [first, rest @ ..] = bytes {
        let digits = rest.get(..3).filter(|_| *first == b'\\').and_then(|digits| str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        found.push(byte.unwrap_or(*first));
        bytes = &rest[if byte.is_some() { 3 } else { 0 }..];
    }
    found
}

/// Whether something is mounted at this path.
#[must_use]
pub fn is_mounted(mounts: &[MountInfo], point: &Path) -> bool {
    mounts.iter().any(|mount| mount.mount_point == point)
}

/// The mount with this path: the last of those on the longest mount point.
#[must_use]
pub fn mount_of<'a>(mounts: &'a [MountInfo], dir: &Path) -> Option<&'a MountInfo> {
    let above = mounts.iter().filter(|mount| dir.starts_with(&mount.mount_point));
    above.max_by_key(|mount| mount.mount_point.components().count())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn mount_points_of_any_name_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("mountinfo");
        let lines: [&[u8]; 2] = [
            b"29 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n",
            b"30 29 0:40 / /m\xe9dia/a\\040b\\134040 rw shared:2 - tmpfs none rw\n",
        ];
        fs::write(&file, lines.concat()).unwrap();
        let points: Vec<_> = read_mounts(&file).unwrap().into_iter().map(|mount| mount.mount_point).collect();
        assert_eq!(points, [Path::new("/"), Path::new(OsStr::from_bytes(b"/m\xe9dia/a b\\040"))]);
    }
}
