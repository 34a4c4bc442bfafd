//! Files that are stored in the snapshot in addition to CRIU's images.
//!
//! Files in /dev/shm that the job writes to: CRIU expects them to exist on restore with their content, but they are in
//! memory and lost on reboot. They are always restored.

use crate::files::staging::StagedDir;
use crate::namespace::inside;
use crate::sys::path_text::text_path;
use crate::sys::threads::on_all_cores;
use ckpt_snapshot::chunk::is_zeroes;
use ckpt_snapshot::{RelPath, SavedFile};
use parking_lot::Mutex;
use rustix::fs::{SeekFrom, seek};
use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::io::{self, Read, Seek, Write};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const PREFIX: &str = "/dev/shm/";
/// How much is copied between two looks at the clock.
const STEP_BYTES: u64 = 64 << 20;
/// The most segments of a file whose lengths are added up: the job may be frozen meanwhile.
const MOST_SEGMENTS: u32 = 1000;
/// What is a hole if it is zero.
const BLOCK_BYTES: usize = 64 << 10;

/// Whether the file `path` (absolute) is in /dev/shm.
#[must_use]
pub fn is_shared_memory(path: &str) -> bool {
    path.starts_with(PREFIX)
}

/// Copies the files `paths` (absolute) to `to` while the job is frozen, several at a time. `root` is the job's root directory,
/// `kind` the directory of the copies in the snapshot.
///
/// # Errors
/// When a file cannot be copied, or not until `deadline`.
pub fn save<'a>(
    paths: impl IntoIterator<Item = &'a String>,
    root: &Path,
    kind: &str,
    to: &StagedDir,
    deadline: Instant,
) -> io::Result<Vec<SavedFile>> {
    let one = |path: &String, name: &str| {
        let mut from = File::open(inside(root, text_path(path)))?;
        let meta = from.metadata()?;
        copy_sparse(&mut from, &mut to.create(name)?, meta.len(), Some(deadline))?;
        let data = RelPath::new(format!("{kind}/{name}")).map_err(io::Error::other)?;
        let (mode, uid, gid) = (meta.mode() & 0o7777, meta.uid(), meta.gid());
        Ok(SavedFile { path: path.clone(), data, mode, uid, gid })
    };
    let all: Vec<_> = paths.into_iter().enumerate().collect();
    let saved = Mutex::new(BTreeMap::new());
    let has_failed = AtomicBool::new(false);
    on_all_cores(&all, |(number, path)| {
        if !has_failed.load(Ordering::Relaxed) {
            let result = one(path, &number.to_string());
            has_failed.fetch_or(result.is_err(), Ordering::Relaxed);
            saved.lock().insert(*number, result);
        }
    });
    saved.into_inner().into_values().collect()
}

/// Restores one file, replacing an existing one.
///
/// # Errors
/// When the file cannot be written; an existing file is then unchanged.
pub fn restore(file: &SavedFile, mut content: File) -> io::Result<()> {
    let path = &*text_path(&file.path);
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".ckpt-run");
    let temporary = Path::new(&temporary);
    // An existing one was left by an interrupted resume, or is a link planted by another user: it is not written to.
    match std::fs::remove_file(temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut to = File::options().write(true).create_new(true).mode(0o600).open(temporary)?;
    let length_bytes = content.metadata()?.len();
    copy_sparse(&mut content, &mut to, length_bytes, None)?;
    // By descriptor: if another user owns the directory, the name may refer to another file by now.
    fchown(&to, Some(file.uid), Some(file.gid))?;
    to.set_permissions(Permissions::from_mode(file.mode))?;
    std::fs::rename(temporary, path)
}

/// Copies up to so many bytes, from where each file is positioned. [`io::copy`] stops where the kernel's copy of a file
/// to a file is interrupted.
///
/// # Errors
/// When that fails.
pub fn copy_bytes(from: &mut File, to: &mut File, bytes: u64) -> io::Result<()> {
    let mut part = Read::take(from, bytes);
    loop {
        match io::copy(&mut part, to) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Copies the data of a file and skips holes: a large, mostly untouched segment stays small. Returns what the copy takes, in bytes.
///
/// # Errors
/// When that fails, or takes until after the deadline.
pub fn copy_sparse(
    from: &mut File,
    to: &mut File,
    length_bytes: u64,
    deadline: Option<Instant>,
) -> io::Result<u64> {
    let mut copied_bytes = hole_bytes(length_bytes);
    copy_segments(from, to, length_bytes, deadline, |from, to, bytes| {
        copied_bytes += bytes;
        copy_bytes(from, to, bytes)
    })?;
    Ok(copied_bytes)
}

/// Whether the data in the first `length_bytes` bytes of a file, without its holes, are at most so many bytes. A file in more than
/// [`MOST_SEGMENTS`] segments counts as having no more holes after these.
///
/// # Errors
/// When that cannot be found out.
pub fn has_at_most(most_bytes: u64, file: &File, length_bytes: u64) -> io::Result<bool> {
    let (mut found_bytes, mut at) = (hole_bytes(length_bytes), 0);
    for _ in 0..MOST_SEGMENTS {
        let Some(data) = next_data(file, at, length_bytes)? else { return Ok(found_bytes <= most_bytes) };
        found_bytes += data.end - data.start;
        at = data.end;
        if found_bytes > most_bytes {
            return Ok(false);
        }
    }
    Ok(found_bytes.saturating_add(length_bytes.saturating_sub(at)) <= most_bytes)
}

/// What holes take in the list of a snapshot's chunks, at most, of a file of this length.
fn hole_bytes(length_bytes: u64) -> u64 {
    length_bytes / 100_000
}

/// The next data of a file, from `at` on; `None` if there are none before `end`.
///
/// # Errors
/// When that cannot be found out.
pub fn next_data(file: &File, at: u64, end: u64) -> io::Result<Option<Range<u64>>> {
    let data = match seek(file, SeekFrom::Data(at)) {
        Ok(data) if data < end => data,
        Ok(_) | Err(rustix::io::Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    Ok(Some(data..seek(file, SeekFrom::Hole(data))?.min(end)))
}

/// As [`copy_sparse`] to an empty file, with holes where the content is zero: a snapshot does not know which of its zeroes were
/// holes.
///
/// # Errors
/// When that fails.
pub fn copy_without_zeroes(from: &mut File, to: &mut File, length_bytes: u64) -> io::Result<()> {
    let mut block = vec![0; BLOCK_BYTES];
    copy_segments(from, to, length_bytes, None, |from, to, bytes| {
        let mut left = bytes;
        while left > 0 {
            let part = usize::try_from(left).unwrap_or(BLOCK_BYTES).min(BLOCK_BYTES);
            from.read_exact(&mut block[..part])?;
            match is_zeroes(&block[..part]) {
                true => drop(to.seek(io::SeekFrom::Current(part.cast_signed() as i64))?),
                false => to.write_all(&block[..part])?,
            }
            left -= part as u64;
        }
        Ok(())
    })
}

fn copy_segments(
    from: &mut File,
    to: &mut File,
    length_bytes: u64,
    deadline: Option<Instant>,
    mut copy: impl FnMut(&mut File, &mut File, u64) -> io::Result<()>,
) -> io::Result<()> {
    to.set_len(length_bytes)?;
    let mut at = 0;
    while at < length_bytes {
        let Some(data) = next_data(from, at, length_bytes)? else { break };
        from.seek(io::SeekFrom::Start(data.start))?;
        to.seek(io::SeekFrom::Start(data.start))?;
        at = data.end.min(data.start.saturating_add(STEP_BYTES));
        copy(from, to, at - data.start)?;
        if deadline.is_some_and(|deadline| Instant::now() > deadline) {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "there was no time to copy it"));
        }
    }
    to.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_restored_with_its_owner_and_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("below").join("file");
        std::fs::write(dir.path().join("content"), "saved").unwrap();
        let is_root = rustix::process::getuid().is_root();
        let (uid, gid) = if is_root {
            (1234, 5678)
        } else {
            (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
        };
        let data = RelPath::new("shm/0").unwrap();
        let file = SavedFile { path: path.to_str().unwrap().to_owned(), data, mode: 0o640, uid, gid };
        // Existing files are replaced, and a link is not followed.
        std::fs::create_dir(dir.path().join("below")).unwrap();
        let trap = dir.path().join("trap");
        std::fs::write(&trap, "theirs").unwrap();
        std::os::unix::fs::symlink(&trap, dir.path().join("below/file.ckpt-run")).unwrap();
        std::os::unix::fs::symlink(&trap, &path).unwrap();
        restore(&file, File::open(dir.path().join("content")).unwrap()).unwrap();
        let meta = std::fs::symlink_metadata(&path).unwrap();
        assert_eq!((meta.mode(), meta.uid(), meta.gid()), (0o100_640, uid, gid));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "saved");
        assert_eq!(std::fs::read_to_string(&trap).unwrap(), "theirs");
        assert_eq!(std::fs::read_dir(dir.path().join("below")).unwrap().count(), 1);
    }

    #[test]
    fn sparse_files_stay_sparse_and_intact() {
        let dir = tempfile::tempdir().unwrap();
        let mut from = File::create_new(dir.path().join("from")).unwrap();
        from.set_len(64 << 20).unwrap();
        from.seek(io::SeekFrom::Start(20 << 20)).unwrap();
        from.write_all(b"in the middle").unwrap();
        drop(from);
        let mut from = File::open(dir.path().join("from")).unwrap();
        let mut to = File::create_new(dir.path().join("to")).unwrap();
        copy_sparse(&mut from, &mut to, 64 << 20, None).unwrap();
        assert!(
            std::fs::read(dir.path().join("from")).unwrap() == std::fs::read(dir.path().join("to")).unwrap()
        );
        assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20);
        let has_at_most = |most_bytes, length_bytes| has_at_most(most_bytes, &to, length_bytes).unwrap();
        assert!(has_at_most(1 << 20, 64 << 20) && !has_at_most(1000, 64 << 20));
        assert!(has_at_most(1000, 20 << 20) && !has_at_most(0, 20 << 20), "holes take a little");
    }

    /// The job is frozen while its files in /dev/shm are copied.
    #[test]
    fn files_are_copied_until_the_deadline_only() {
        let dir = tempfile::tempdir().unwrap();
        let (path, root) = (dir.path().join("file"), Path::new("/"));
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        let staging = crate::files::staging::Staging::on_disk(&dir.path().join("staging")).unwrap();
        let paths = [path.to_str().unwrap().to_owned()];
        let copy = |name: &str, deadline: Instant| {
            save(&paths, root, name, &staging.subdir(name).unwrap(), deadline)
        };
        let now = Instant::now();
        let late = copy("late", now).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut, "{late}");
        assert_eq!(copy("shm", now + std::time::Duration::from_secs(600)).unwrap().len(), 1);
    }
}
