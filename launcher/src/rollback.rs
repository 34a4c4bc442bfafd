//! Rolling files back with the job: what was appended after the snapshot is cut off, and kept aside first.

use anyhow::{Context, Result, bail};
use ckpt_snapshot::{Manifest, OpenFile};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// One file that is longer than it was at the snapshot.
#[derive(Debug, PartialEq, Eq)]
struct Cut {
    path: PathBuf,
    now_bytes: u64,
    then_bytes: u64,
}

/// What resuming a snapshot does to files; nothing has been done yet.
#[derive(Debug, Default)]
pub struct Rollback {
    cuts: Vec<Cut>,
}

impl Rollback {
    /// Compares the files of the snapshot with what is there now. `appended` are the files that our own output is
    /// appended to: they are cut if they are the ones that it went to then.
    ///
    /// # Errors
    /// When a file that the job needs is gone, is no regular file, or is shorter than it was.
    pub fn plan(manifest: &Manifest, appended: &[OpenFile]) -> Result<Self> {
        let mut lengths: BTreeMap<&str, u64> = BTreeMap::new();
        for file in &manifest.open_files {
            lengths.insert(&file.path, file.size_bytes);
        }
        let mut cuts = Vec::new();
        for (path, then_bytes) in lengths {
            let meta = std::fs::symlink_metadata(path).with_context(|| {
                format!("the job had {path} open for writing, and it cannot be found now: put it back, or resume an older snapshot")
            })?;
            if !meta.is_file() {
                bail!("the job had {path} open for writing, and it is no regular file any more");
            }
            if meta.len() < then_bytes {
                bail!(
                    "{path} has {} bytes, at the snapshot it had {then_bytes}: it was cut or replaced since. Put the old file back, or resume an older snapshot",
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

    /// Whether nothing has to be cut.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cuts.is_empty()
    }

    /// Keeps every tail in the directory `kept`, durably, then cuts the files.
    ///
    /// # Errors
    /// When a tail cannot be kept: its file is then not cut.
    pub fn apply(&self, kept: &Path) -> Result<()> {
        for (number, cut) in self.cuts.iter().enumerate() {
            let name = cut.path.file_name().unwrap_or_default().to_string_lossy();
            let tail = kept.join(format!("{number}-{name}.from-byte-{}", cut.then_bytes));
            keep_tail(cut, &tail)
                .with_context(|| format!("cannot keep the end of {}", cut.path.display()))?;
            ckpt_snapshot::sync_dir(kept)?;
            let file = File::options().write(true).custom_flags(nofollow()).open(&cut.path);
            file.and_then(|file| file.set_len(cut.then_bytes).and_then(|()| file.sync_all())).with_context(
                || format!("cannot cut {} to its length at the snapshot", cut.path.display()),
            )?;
            tracing::info!(
                "{}: rolled back from {} to {} bytes; what was cut off is in {}",
                cut.path.display(),
                cut.now_bytes,
                cut.then_bytes,
                tail.display()
            );
        }
        Ok(())
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
        crate::checkpoint::tests::manifest(files)
    }

    #[test]
    fn cuts_what_grew_and_keeps_the_tail() {
        let dir = tempfile::tempdir().unwrap();
        let (grown, same) = (dir.path().join("grown.log"), dir.path().join("same.log"));
        std::fs::write(&grown, "old|new").unwrap();
        std::fs::write(&same, "abc").unwrap();
        let kept = dir.path().join("kept");
        std::fs::create_dir(&kept).unwrap();
        let plan = Rollback::plan(&manifest(&[(&grown, 4), (&same, 3)]), &[]).unwrap();
        assert_eq!(std::fs::read_to_string(&grown).unwrap(), "old|new", "planning changes nothing");
        plan.apply(&kept).unwrap();
        assert_eq!(std::fs::read_to_string(&grown).unwrap(), "old|");
        assert_eq!(std::fs::read_to_string(&same).unwrap(), "abc");
        let tail = kept.join("0-grown.log.from-byte-4");
        assert_eq!(std::fs::read_to_string(tail).unwrap(), "new");
        assert_eq!(std::fs::read_dir(&kept).unwrap().count(), 1);
    }

    #[test]
    fn refuses_files_that_are_gone_or_shorter() {
        let dir = tempfile::tempdir().unwrap();
        let short = dir.path().join("short");
        std::fs::write(&short, "ab").unwrap();
        let message = |path: &Path| Rollback::plan(&manifest(&[(path, 3)]), &[]).unwrap_err().to_string();
        assert!(message(&short).contains("has 2 bytes, at the snapshot it had 3"));
        assert!(message(&dir.path().join("gone")).contains("cannot be found"));
        assert!(message(dir.path()).contains("no regular file"));
    }
}
