//! Rolls files back to the snapshot: a file that has grown since is truncated, and its tail is kept.
//!
//! A tail is output that the job will write again. Tails are kept for people, within limits. If there is no space for a
//! tail, the job resumes without keeping it: a job that cannot be resumed loses more.

use anyhow::{Context, Result, bail};
use ckpt_snapshot::{JobDir, Manifest, OpenError, OpenFile, SnapshotId};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The tails of this many resumes are kept, up to `KEPT_MAX_BYTES`. The tails of the newest resume are always kept.
const KEPT: usize = 20;
const KEPT_MAX_BYTES: u64 = 1 << 30;
/// Length of a file's name within the name of its tail (bytes): the result must still be a valid name.
const NAME_MAX_BYTES: usize = 180;
/// Between the snapshot and the time in the name of a directory of tails.
const RESUMED: &str = "-resumed-";

/// A file that is longer than it was at the snapshot.
#[derive(Debug, PartialEq, Eq)]
struct Cut {
    path: PathBuf,
    now_bytes: u64,
    then_bytes: u64,
}

/// The files that a resume truncates.
#[derive(Debug, Default)]
pub struct Rollback {
    cuts: Vec<Cut>,
}

impl Rollback {
    /// Compares the files of the snapshot with their present state, and changes nothing. `appended` are the files that
    /// ckpt-run's own output is appended to: they are truncated if the output went to the same files at the snapshot.
    ///
    /// # Errors
    /// When a file that the job needs is missing, is not a regular file, or is shorter than at the snapshot.
    pub fn plan(manifest: &Manifest, appended: &[OpenFile]) -> Result<Self> {
        let mut lengths: BTreeMap<&str, u64> = BTreeMap::new();
        for file in &manifest.open_files {
            lengths.insert(&file.path, file.size_bytes);
        }
        let mut cuts = Vec::new();
        for (path, then_bytes) in lengths {
            let meta = fs::symlink_metadata(path).with_context(|| {
                format!("the job had {path} open for writing, and it is missing now: restore it, or resume an older snapshot")
            })?;
            if !meta.is_file() {
                bail!("the job had {path} open for writing, and it is not a regular file any more");
            }
            if meta.len() < then_bytes {
                bail!(
                    "{path} has {} bytes, at the snapshot it had {then_bytes}: it was truncated or replaced since. Restore the old file, or resume an older snapshot",
                    meta.len()
                );
            }
            if meta.len() > then_bytes {
                cuts.push(Cut { path: path.into(), now_bytes: meta.len(), then_bytes });
            }
        }
        let recorded = manifest.stdio.iter().filter_map(|stream| stream.file.as_ref());
        for then in recorded {
            let now = appended.iter().find(|now| now.path == then.path && now.size_bytes > then.size_bytes);
            let path = PathBuf::from(&then.path);
            if let Some(now) = now
                && !cuts.iter().any(|cut| cut.path == path)
            {
                cuts.push(Cut { path, now_bytes: now.size_bytes, then_bytes: then.size_bytes });
            }
        }
        Ok(Self { cuts })
    }

    /// Whether no file has to be truncated.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cuts.is_empty()
    }

    /// Stores every tail in the directory `kept`, durably, and truncates the files. A tail for which there is no space, or
    /// no directory, is not kept, with a warning.
    ///
    /// # Errors
    /// When a tail cannot be kept for another reason: its file is then not truncated.
    pub fn apply(&self, kept: Option<&Path>) -> Result<()> {
        for (number, cut) in self.cuts.iter().enumerate() {
            let tail = kept.map(|kept| kept.join(tail_name(number, cut)));
            let is_kept = keep(cut, tail.as_deref())
                .with_context(|| format!("cannot keep the end of {}", cut.path.display()))?;
            let file = File::options().write(true).custom_flags(nofollow()).open(&cut.path);
            file.and_then(|file| file.set_len(cut.then_bytes).and_then(|()| file.sync_all())).with_context(
                || format!("cannot truncate {} to its length at the snapshot", cut.path.display()),
            )?;
            let (path, now, then) = (cut.path.display(), cut.now_bytes, cut.then_bytes);
            match tail.filter(|_| is_kept) {
                Some(tail) => tracing::info!(
                    "{path}: rolled back from {now} to {then} bytes; the removed end is in {}",
                    tail.display()
                ),
                None => tracing::warn!(
                    "{path}: rolled back from {now} to {then} bytes; the removed end is lost, since the store's disk has no space for it"
                ),
            }
        }
        Ok(())
    }
}

/// Stores a tail. Returns whether there was space for it.
fn keep(cut: &Cut, tail: Option<&Path>) -> io::Result<bool> {
    let Some(tail) = tail else { return Ok(false) };
    let kept = keep_tail(cut, tail).and_then(|()| match tail.parent() {
        Some(dir) => ckpt_snapshot::sync_dir(dir),
        None => Ok(()),
    });
    match kept {
        Ok(()) => Ok(true),
        Err(error) if is_no_space(&error) => {
            // A part of the tail is useless, and takes space that the job may need.
            let _ = fs::remove_file(tail);
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Whether the error says that a disk is full, or a quota or limit is reached.
fn is_no_space(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

fn tail_name(number: usize, cut: &Cut) -> String {
    let name = cut.path.file_name().unwrap_or_default().to_string_lossy();
    let end = (0..=name.len().min(NAME_MAX_BYTES)).rev().find(|&end| name.is_char_boundary(end));
    let short = &name[..end.unwrap_or(0)];
    format!("{number}-{short}.from-byte-{}", cut.then_bytes)
}

/// Creates the directory for the tails of a resume of `id`; `None` if there is no space for one.
///
/// # Errors
/// When it cannot be created for another reason.
pub fn create_kept_dir(dir: &JobDir, id: &SnapshotId) -> Result<Option<PathBuf>, OpenError> {
    match dir.kept_dir(id, std::time::SystemTime::now()) {
        Ok(kept) => Ok(Some(kept)),
        Err(OpenError::Io { source, .. }) if is_no_space(&source) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Deletes the oldest tails, beyond those that are kept.
pub fn prune_kept(dir: &JobDir) {
    prune_kept_beyond(dir, KEPT, KEPT_MAX_BYTES);
}

fn prune_kept_beyond(dir: &JobDir, count: usize, max_bytes: u64) {
    let mut all = all_kept(dir);
    // Newest first, by the time in the name and not by the snapshot before it.
    all.sort_by(|(_, one), (_, other)| other.cmp(one));
    let mut bytes = 0_u64;
    for (position, (path, _)) in all.iter().enumerate() {
        bytes = bytes.saturating_add(bytes_in(path));
        if position > 0 && (position >= count || bytes > max_bytes) {
            remove(path);
        }
    }
}

/// Deletes the tails of resumes of `id`.
pub fn delete_kept_of(dir: &JobDir, id: &SnapshotId) {
    let of_it = format!("{id}{RESUMED}");
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    all_kept(dir)
        .iter()
        .filter(|(path, _)| name(path).starts_with(&of_it))
        .for_each(|(path, _)| remove(path));
}

/// The directories of tails, with their times.
fn all_kept(dir: &JobDir) -> Vec<(PathBuf, String)> {
    let entries = fs::read_dir(dir.path().join("kept")).into_iter().flatten().flatten();
    let timed = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        Some((entry.path(), name.split_once(RESUMED)?.1.to_owned()))
    };
    entries.filter_map(timed).collect()
}

fn bytes_in(dir: &Path) -> u64 {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|meta| meta.len()).fold(0, u64::saturating_add)
}

fn remove(path: &Path) {
    match fs::remove_dir_all(path) {
        Ok(()) => tracing::info!("removed {}: the ends of files that a resume had truncated", path.display()),
        Err(error) => tracing::warn!("cannot remove {}: {error}", path.display()),
    }
}

fn nofollow() -> i32 {
    rustix::fs::OFlags::NOFOLLOW.bits().cast_signed()
}

fn keep_tail(cut: &Cut, to: &Path) -> io::Result<()> {
    let mut from = File::options().read(true).custom_flags(nofollow()).open(&cut.path)?;
    from.seek(SeekFrom::Start(cut.then_bytes))?;
    let mut tail = File::options().write(true).create_new(true).mode(0o600).open(to)?;
    io::copy(&mut from.take(cut.now_bytes - cut.then_bytes), &mut tail)?;
    tail.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(files: &[(&Path, u64)]) -> Manifest {
        let files: Vec<_> = files
            .iter()
            .map(|(path, size_bytes)| OpenFile {
                path: path.to_str().unwrap().to_owned(),
                size_bytes: *size_bytes,
            })
            .collect();
        crate::checkpoint::attempt::tests::manifest(files)
    }

    #[test]
    fn cuts_what_grew_and_keeps_the_tail() {
        let dir = tempfile::tempdir().unwrap();
        let (grown, same) = (dir.path().join("grown.log"), dir.path().join("same.log"));
        fs::write(&grown, "old|new").unwrap();
        fs::write(&same, "abc").unwrap();
        let kept = dir.path().join("kept");
        fs::create_dir(&kept).unwrap();
        let plan = Rollback::plan(&manifest(&[(&grown, 4), (&same, 3)]), &[]).unwrap();
        assert_eq!(fs::read_to_string(&grown).unwrap(), "old|new", "planning changes nothing");
        plan.apply(Some(&kept)).unwrap();
        assert_eq!(fs::read_to_string(&grown).unwrap(), "old|");
        assert_eq!(fs::read_to_string(&same).unwrap(), "abc");
        let tail = kept.join("0-grown.log.from-byte-4");
        assert_eq!(fs::read_to_string(tail).unwrap(), "new");
        assert_eq!(fs::read_dir(&kept).unwrap().count(), 1);
    }

    /// A name may have 255 bytes, and the tail's has more in it than that of the file.
    #[test]
    fn long_names_are_shortened() {
        let dir = tempfile::tempdir().unwrap();
        let kept = dir.path().join("kept");
        fs::create_dir(&kept).unwrap();
        let names = ["x".repeat(255), format!("a{}", "é".repeat(127))];
        let paths = names.map(|name| dir.path().join(name));
        for path in &paths {
            fs::write(path, "old|new").unwrap();
        }
        let plan = Rollback::plan(&manifest(&[(&paths[0], 4), (&paths[1], 4)]), &[]).unwrap();
        plan.apply(Some(&kept)).unwrap();
        for path in &paths {
            assert_eq!(fs::read_to_string(path).unwrap(), "old|");
        }
        assert_eq!(fs::read_dir(&kept).unwrap().count(), 2);
    }

    /// A file system of 64 KiB, as long as the test lasts.
    struct Mounted<'a>(&'a Path);

    impl<'a> Mounted<'a> {
        fn small(at: &'a Path) -> Self {
            use rustix::mount::{MountFlags, mount};
            mount("tmpfs", at, "tmpfs", MountFlags::empty(), Some(c"size=64k")).unwrap();
            Self(at)
        }
    }

    impl Drop for Mounted<'_> {
        fn drop(&mut self) {
            rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH).unwrap();
        }
    }

    /// On a disk that is full: the file is cut all the same, and nothing that is cut short is left.
    #[test]
    fn what_there_is_no_space_for_is_not_kept() {
        if !rustix::process::getuid().is_root() {
            eprintln!("skipped: only root can make a small file system");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (log, kept) = (dir.path().join("log"), dir.path().join("kept"));
        fs::write(&log, "x".repeat(1 << 20)).unwrap();
        fs::create_dir(&kept).unwrap();
        let _mounted = Mounted::small(&kept);
        let cut = || Rollback::plan(&manifest(&[(&log, 4)]), &[]).unwrap();
        cut().apply(Some(&kept)).unwrap();
        assert_eq!(fs::read_to_string(&log).unwrap(), "xxxx");
        assert_eq!(fs::read_dir(&kept).unwrap().count(), 0);
        fs::write(&log, "xxxxmore").unwrap();
        cut().apply(None).unwrap();
        assert_eq!(fs::read_to_string(&log).unwrap(), "xxxx");
    }

    #[test]
    fn what_is_kept_has_limits() {
        let dir = tempfile::tempdir().unwrap();
        let root = ckpt_snapshot::StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = root.job(&ckpt_snapshot::JobKey::named("job").unwrap());
        let id = manifest(&[]).id;
        let kept = job.path().join("kept");
        let make = |of: &str, time: u32| {
            let below = kept.join(format!("{of}-resumed-20261122T{time:06}.000Z"));
            fs::create_dir_all(&below).unwrap();
            fs::write(below.join("0-log.from-byte-1"), "12345678").unwrap();
        };
        let there = || {
            let names =
                fs::read_dir(&kept).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<_> = names.collect();
            names.sort();
            names
        };
        // The newest is of the oldest snapshot.
        (1..=4).for_each(|time| make(&format!("00000{}-x", 9 - time), time));
        prune_kept_beyond(&job, 3, 1 << 20);
        assert_eq!(there().len(), 3);
        assert!(there().iter().all(|name| !name.ends_with("T000001.000Z")), "{:?}", there());
        prune_kept_beyond(&job, 3, 16);
        assert_eq!(there().len(), 2);
        prune_kept_beyond(&job, 3, 1);
        assert!(
            there().len() == 1 && there()[0].ends_with("T000004.000Z"),
            "the newest stays: {:?}",
            there()
        );
        make(&id.to_string(), 5);
        delete_kept_of(&job, &id);
        assert_eq!(there().len(), 1);
    }

    #[test]
    fn refuses_files_that_are_missing_or_shorter() {
        let dir = tempfile::tempdir().unwrap();
        let short = dir.path().join("short");
        fs::write(&short, "ab").unwrap();
        let message = |path: &Path| Rollback::plan(&manifest(&[(path, 3)]), &[]).unwrap_err().to_string();
        assert!(message(&short).contains("has 2 bytes, at the snapshot it had 3"));
        assert!(message(&dir.path().join("gone")).contains("it is missing now"));
        assert!(message(dir.path()).contains("not a regular file"));
    }
}
