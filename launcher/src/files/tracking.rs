//! The files that the job has written since each snapshot: `jobs/KEY/written/ID` in the store, written by the init (see
//! [`crate::namespace::written_files`]). What was written since a snapshot is in its file and in those of later snapshots.

use crate::files::history::FileHistory;
use crate::files::rules::FileRules;
use crate::namespace::Namespace;
use crate::namespace::written_files::{is_ended, read_journal};
use ckpt_snapshot::{JobDir, SnapshotId};
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Watches the files of a job with the working directory `cwd` before its processes run. `from` is the snapshot that it is resumed from. Where the rights
/// for it are missing, snapshots look for changed files instead.
pub fn begin(
    namespace: &Namespace,
    dir: &JobDir,
    cwd: &Path,
    rules: &FileRules,
    history: &mut FileHistory,
    from: Option<&SnapshotId>,
) {
    if !rules.is_on() {
        return history.track(false);
    }
    let tracked = namespace.track_files(cwd, rules.own());
    match &tracked {
        Ok(unwatched) => {
            for (mount, reason) in unwatched {
                tracing::debug!("files on {mount} are not watched: {reason}");
            }
        }
        Err(error) => tracing::debug!("the job's files are not watched: {error}"),
    }
    let is_recorded = match from {
        Some(id) if tracked.is_ok() => next(namespace, dir, id).is_some(),
        _ => true,
    };
    history.track(tracked.is_ok() && is_recorded);
}

/// Returns what the job has written since the last snapshot, if that is known, and begins the record since `id`.
pub fn next(namespace: &Namespace, dir: &JobDir, id: &SnapshotId) -> Option<Vec<String>> {
    let open = || -> io::Result<File> {
        let path = record_path(dir, id);
        DirBuilder::new().recursive(true).mode(0o700).create(path.parent().unwrap_or(&path))?;
        File::options().append(true).create(true).mode(0o600).open(path)
    };
    let journal =
        open().inspect_err(|error| tracing::warn!("cannot record what files the job writes: {error}"));
    namespace.written_files(Some(&journal.ok()?)).ok()?
}

/// What the job has written since the snapshot `id`; `None` if that is not known.
#[must_use]
pub fn written_since(dir: &JobDir, id: &SnapshotId) -> Option<BTreeSet<String>> {
    let mut all = read_journal(&record_path(dir, id)).ok()??;
    for later in recorded(dir).into_iter().filter(|later| later > id) {
        all.extend(read_journal(&record_path(dir, &later)).ok()??);
    }
    Some(all)
}

/// The last record of what the job has written.
pub struct LastRecord {
    /// When it was written.
    pub at: SystemTime,
    /// Whether it says that all processes of the job had ended.
    pub is_end: bool,
}

/// The last record of what the job has written, if there is one.
#[must_use]
pub fn last_recorded(dir: &JobDir) -> Option<LastRecord> {
    let records = recorded(dir).into_iter().filter_map(|id| {
        let path = record_path(dir, &id);
        Some((fs::metadata(&path).ok()?.modified().ok()?, path))
    });
    let (at, newest) = records.max()?;
    Some(LastRecord { at, is_end: is_ended(&newest).ok()? })
}

/// Deletes the records that no snapshot needs; `oldest` is the oldest snapshot.
pub fn sweep(dir: &JobDir, oldest: &SnapshotId) {
    for id in recorded(dir).into_iter().filter(|id| id < oldest) {
        if let Err(error) = fs::remove_file(record_path(dir, &id)) {
            tracing::debug!("cannot remove the record of written files since {id}: {error}");
        }
    }
}

fn recorded(dir: &JobDir) -> Vec<SnapshotId> {
    let entries = fs::read_dir(dir.path().join("written")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn record_path(dir: &JobDir, id: &SnapshotId) -> PathBuf {
    dir.path().join("written").join(id.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_snapshot::{JobKey, StoreRoot};

    #[test]
    fn later_records_count_too() {
        let dir = tempfile::tempdir().unwrap();
        let root = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = root.job(&JobKey::named("job").unwrap());
        let ids = [1, 2, 3].map(|number| SnapshotId::new(number, SystemTime::UNIX_EPOCH));
        assert_eq!(written_since(&job, &ids[0]), None);
        fs::create_dir_all(job.path().join("written")).unwrap();
        for (id, path) in ids.iter().zip(["/a", "/b", "/c"]) {
            fs::write(record_path(&job, id), format!("{path:?}\n")).unwrap();
        }
        let since =
            |id: &SnapshotId| written_since(&job, id).map(|paths| paths.into_iter().collect::<Vec<_>>());
        assert_eq!(since(&ids[1]).unwrap(), ["/b", "/c"]);
        assert!(!last_recorded(&job).unwrap().is_end);
        fs::write(record_path(&job, &ids[2]), "\"/c\"\n{\"ended\":true}\n").unwrap();
        assert!(last_recorded(&job).unwrap().is_end && since(&ids[1]).unwrap() == ["/b", "/c"]);
        fs::write(record_path(&job, &ids[2]), "{\"incomplete\":true}\n").unwrap();
        assert_eq!(since(&ids[1]), None);
        sweep(&job, &ids[1]);
        assert_eq!(recorded(&job).len(), 2);
        assert_eq!(since(&ids[0]), None);
    }
}
