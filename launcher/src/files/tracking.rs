//! The files that the job has written since each snapshot: `jobs/KEY/written/ID` in the store, written by the init (see
//! [`crate::namespace::written_files`]). What was written since a snapshot is in its file and in those of later snapshots.

use crate::files::history::FileHistory;
use crate::files::inventory::nanoseconds;
use crate::files::rules::{Coverage, FileRules};
use crate::namespace::Namespace;
use crate::namespace::written_files::{
    DRAIN_INTERVAL, INCOMPLETE, STAMP_INTERVAL, begin_journal, is_ended, read_journal, read_paths,
};
use crate::sys::authentic::{FileKey, sealed};
use ckpt_snapshot::{JobDir, JobKey, SnapshotId, faults, open_regular, read_regular, write_atomically};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// The directory of the records in the job's directory.
const RECORDS: &str = "written";

/// A record that no snapshot needs is kept for this long.
const KEPT_FOR_OTHERS: Duration = Duration::from_secs(600);

/// The init of a job that runs gives a younger time than this to its record.
const ALIVE: Duration = STAMP_INTERVAL.saturating_mul(4);

/// A resume waits for the records of other jobs for this long at most: not all file systems tell times apart.
const OTHERS_WAIT: Duration = Duration::from_secs(10);

/// Watches the files of a job with the working directory `cwd` before its processes run. `from` is the snapshot that it is resumed from. Where the rights
/// for it are missing, snapshots look for changed files instead. Returns the record of a new run, which tells other jobs what
/// this one writes before its first snapshot. It is for [`next`], once the job runs.
pub fn begin(
    namespace: &Namespace,
    dir: &JobDir,
    cwd: &Path,
    rules: &FileRules,
    history: &mut FileHistory,
    from: Option<&SnapshotId>,
) -> Option<Record> {
    let tracked = rules.is_on(true).then(|| namespace.track_files(cwd, rules.own()));
    let is_tracked = matches!(tracked, Some(Ok(_)));
    match tracked {
        None => {}
        Some(Ok(unwatched)) => {
            for (mount, reason) in unwatched {
                tracing::debug!("files on {mount} are not watched: {reason}");
            }
        }
        Some(Err(error)) if rules.coverage == Coverage::Auto => tracing::info!(
            "snapshots cover only those files of the job that are open for writing, since it is not known what the job writes: {error}"
        ),
        Some(Err(error)) => tracing::debug!("the job's files are not watched: {error}"),
    }
    let (is_recorded, first) = match from {
        Some(id) if is_tracked => (next(namespace, open(dir, id).as_ref()).is_some(), None),
        Some(id) => {
            end_record(dir, id);
            (false, None)
        }
        None => {
            // Snapshots of earlier runs may still be resumed.
            let newest = recorded(dir).into_iter().max();
            newest.iter().for_each(|newest| end_record(dir, newest));
            // The records of the run's snapshots come later.
            let number = newest.map_or(0, |newest| newest.sequence());
            (true, is_tracked.then(|| open(dir, &SnapshotId::new(number, SystemTime::now()))).flatten())
        }
    };
    history.track(is_tracked && is_recorded);
    first
}

/// The record of what the job writes since a snapshot.
///
/// The store may be silent for a while. So a record is opened before the job is frozen, and dropped when it runs again.
pub struct Record {
    file: File,
    key: FileKey,
    path: PathBuf,
    /// Whether the init has it. Otherwise it is deleted when this is dropped.
    is_used: Cell<bool>,
}

impl Drop for Record {
    fn drop(&mut self) {
        if !self.is_used.get()
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::debug!("cannot remove a record of written files that is not used: {error}");
        }
    }
}

/// Opens the record since the snapshot `id`, which may be one that is about to be taken. `None` if that is not possible, of
/// which the user is told.
#[must_use]
pub fn open(dir: &JobDir, id: &SnapshotId) -> Option<Record> {
    let open = || -> io::Result<Record> {
        faults::hit("record-open")?;
        let (path, key) = (record_path(dir, id), record_key(dir, id));
        DirBuilder::new().recursive(true).mode(0o700).create(path.parent().unwrap_or(&path))?;
        let last = last_recorded(dir).filter(|last| !last.is_end);
        let mut file = open_regular(&path, File::options().append(true).create(true).mode(0o600))?;
        let is_new = file.metadata()?.len() == 0;
        begin_journal(&mut file, &key)?;
        // The time of a record says until when all is recorded. Of a job that runs, that is still the time of the one before.
        if let Some(until) = last.and_then(|last| last.recorded_until).filter(|_| is_new) {
            file.set_modified(until)?;
        }
        Ok(Record { file, key, path, is_used: Cell::new(false) })
    };
    open().inspect_err(|error| tracing::warn!("cannot record what files the job writes: {error}")).ok()
}

/// Returns what the job has written since the last snapshot, if that is known. From now on, what it writes goes to `record`;
/// without one, nothing changes, and nothing is known.
pub fn next(namespace: &Namespace, record: Option<&Record>) -> Option<Vec<String>> {
    let record = record?;
    record.is_used.set(true);
    namespace.written_files(Some((&record.file, record.key))).ok()?
}

/// Records that from now on it is not known what the job writes. `id` is its last snapshot.
fn end_record(dir: &JobDir, id: &SnapshotId) {
    let is_recorded = recorded(dir).into_iter().any(|earlier| earlier <= *id);
    let path = record_path(dir, id);
    let write = || {
        let mut file = open_regular(&path, File::options().append(true).create(true).mode(0o600))?;
        writeln!(file, "{}", sealed(&record_key(dir, id), INCOMPLETE))
    };
    if is_recorded && let Err(error) = write() {
        tracing::warn!("cannot write {}: {error}", path.display());
    }
}

/// Writes the records to the disk, for a resume after the machine has crashed: those with a time since `*durable`, the
/// time of the last record that is on the disk.
///
/// # Errors
/// When that fails.
pub fn make_durable(dir: &JobDir, durable: &mut SystemTime) -> io::Result<()> {
    let times = recorded(dir).into_iter().map(|id| {
        let file = open_regular(&record_path(dir, &id), File::options().read(true))?;
        Ok((file.metadata()?, file))
    });
    let mut until = None;
    for (meta, file) in times.collect::<io::Result<Vec<_>>>()? {
        if meta.modified()? >= *durable {
            file.sync_all()?;
            until = until.max(stamp(&meta));
        }
    }
    if let Some(until) = until {
        write_atomically(&durable_path(dir), nanoseconds(until).to_string().as_bytes())?;
        *durable = until;
    }
    Ok(())
}

/// All that the job wrote until this time is in the records, also after the machine has crashed. Nanoseconds since 1970
/// UTC.
#[must_use]
pub fn durable_until_ns(dir: &JobDir) -> Option<i64> {
    String::from_utf8(read_regular(&durable_path(dir), 100).ok()?).ok()?.parse().ok()
}

/// What other jobs of the store have written, as far as they ran at `since` or later. Waits until those that run have
/// recorded what they have written until `until`, which is in the past.
#[must_use]
pub fn written_by_others(dir: &JobDir, since: SystemTime, until: SystemTime) -> BTreeSet<String> {
    let others = others(dir);
    let limit = Instant::now() + OTHERS_WAIT;
    while Instant::now() < limit && others.iter().any(|other| is_behind(other, until)) {
        thread::sleep(DRAIN_INTERVAL);
    }
    // Lines may be younger than the time of their record.
    let since = since - ALIVE;
    let records = others.iter().flat_map(|other| {
        recorded(other).into_iter().map(move |id| (record_path(other, &id), record_key(other, &id)))
    });
    let is_recent = |path: &Path| fs::symlink_metadata(path)?.modified().map(|at| at >= since);
    let recent = records.filter(|(path, _)| is_recent(path).unwrap_or(false));
    recent.filter_map(|(path, key)| read_paths(&path, &key).ok()).flatten().collect()
}

/// The other jobs of the store.
fn others(dir: &JobDir) -> Vec<JobDir> {
    let jobs = dir.path().parent().and_then(|jobs| fs::read_dir(jobs).ok());
    let names = jobs.into_iter().flatten().flatten().filter_map(|job| job.file_name().into_string().ok());
    let keys = names.filter_map(|name| JobKey::named(&name).ok()).filter(|key| key != dir.key());
    keys.map(|key| dir.sibling(&key)).collect()
}

/// Whether a job runs and has not recorded yet what it has written until then.
fn is_behind(dir: &JobDir, until: SystemTime) -> bool {
    last_recorded(dir).is_some_and(|last| {
        !last.is_end
            && last.at.elapsed().is_ok_and(|age| age < ALIVE)
            && last.recorded_until.is_none_or(|recorded| recorded < until)
    })
}

/// The time that the init has given to a record. `None` after a write, which sets the time to the present although more may
/// be waiting to be written: that of the inode is the same then.
fn stamp(record: &Metadata) -> Option<SystemTime> {
    let is_stamped = (record.mtime(), record.mtime_nsec()) != (record.ctime(), record.ctime_nsec());
    record.modified().ok().filter(|_| is_stamped)
}

/// What the job has written since the snapshot `id`; `None` if that is not known.
#[must_use]
pub fn written_since(dir: &JobDir, id: &SnapshotId) -> Option<BTreeSet<String>> {
    let read = |id: &SnapshotId| read_journal(&record_path(dir, id), &record_key(dir, id)).ok()?;
    let mut all = read(id)?;
    for later in recorded(dir).into_iter().filter(|later| later > id) {
        all.extend(read(&later)?);
    }
    Some(all)
}

/// The last record of what the job has written.
pub struct LastRecord {
    /// When it was written.
    pub at: SystemTime,
    /// All that the job wrote until this time is in the records.
    recorded_until: Option<SystemTime>,
    /// Whether it says that all processes of the job had ended.
    pub is_end: bool,
}

/// The last record of what the job has written, if there is one.
#[must_use]
pub fn last_recorded(dir: &JobDir) -> Option<LastRecord> {
    let look = |id: SnapshotId| {
        let meta = fs::metadata(record_path(dir, &id)).ok()?;
        Some((meta.modified().ok()?, id, stamp(&meta)))
    };
    let records: Vec<_> = recorded(dir).into_iter().filter_map(look).collect();
    let recorded_until = records.iter().filter_map(|(_, _, stamp)| *stamp).max();
    let (at, newest, _) = records.into_iter().max()?;
    let is_end = is_ended(&record_path(dir, &newest), &record_key(dir, &newest)).ok()?;
    Some(LastRecord { at, recorded_until, is_end })
}

/// Deletes the records that no snapshot needs; `oldest` is the oldest snapshot. Those of the last minutes tell another job
/// that was killed meanwhile what it has not written itself.
pub fn sweep(dir: &JobDir, oldest: &SnapshotId) {
    let Ok(Some(folder)) = dir.folder(RECORDS) else { return };
    let is_old = |id: &SnapshotId| {
        let at = fs::symlink_metadata(record_path(dir, id)).and_then(|meta| meta.modified());
        at.is_ok_and(|at| at.elapsed().is_ok_and(|age| age >= KEPT_FOR_OTHERS))
    };
    for id in recorded(dir).into_iter().filter(|id| id < oldest && is_old(id)) {
        if let Err(error) = fs::remove_file(folder.path().join(id.to_string())) {
            tracing::debug!("cannot remove the record of written files since {id}: {error}");
        }
    }
}

fn recorded(dir: &JobDir) -> Vec<SnapshotId> {
    let folder = dir.folder(RECORDS).ok().flatten();
    let entries = folder.and_then(|folder| folder.entries().ok()).unwrap_or_default();
    entries.iter().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn record_path(dir: &JobDir, id: &SnapshotId) -> PathBuf {
    dir.path().join(RECORDS).join(id.to_string())
}

fn record_key(dir: &JobDir, id: &SnapshotId) -> FileKey {
    dir.file_key(&format!("{RECORDS}/{id}"))
}

fn durable_path(dir: &JobDir) -> PathBuf {
    dir.path().join(RECORDS).join("durable")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_snapshot::StoreRoot;

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
        assert_eq!(recorded(&job).len(), 3, "another job may need it");
        let old = File::options().write(true).open(record_path(&job, &ids[0])).unwrap();
        old.set_modified(SystemTime::now() - KEPT_FOR_OTHERS).unwrap();
        sweep(&job, &ids[1]);
        assert_eq!(recorded(&job).len(), 2);
        assert_eq!(since(&ids[0]), None);
    }

    #[test]
    fn records_end_where_nothing_is_watched() {
        let dir = tempfile::tempdir().unwrap();
        let root = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let [job, other] = ["job", "other"].map(|name| root.job(&JobKey::named(name).unwrap()));
        let ids = [1, 2].map(|number| SnapshotId::new(number, SystemTime::UNIX_EPOCH));
        end_record(&job, &ids[0]);
        assert!(recorded(&job).is_empty(), "there was no record");
        fs::create_dir_all(job.path().join(RECORDS)).unwrap();
        fs::write(record_path(&job, &ids[0]), "\"/a\"\n").unwrap();
        let begun = SystemTime::now();
        end_record(&job, &ids[1]);
        // A later run is watched again.
        File::options()
            .append(true)
            .open(record_path(&job, &ids[1]))
            .unwrap()
            .write_all(b"\"/b\"\n")
            .unwrap();
        assert_eq!((written_since(&job, &ids[0]), written_since(&job, &ids[1])), (None, None));
        let hour = Duration::from_secs(3600);
        stamped(&job, &ids[1], begun);
        let by_others = |dir, since| written_by_others(dir, since, begun);
        assert_eq!(by_others(&other, begun - hour), ["/a", "/b"].map(str::to_owned).into());
        assert!(by_others(&other, begun + hour).is_empty());
        assert!(by_others(&job, begun - hour).is_empty(), "its own");
        let mut durable = SystemTime::UNIX_EPOCH;
        make_durable(&job, &mut durable).unwrap();
        assert_eq!(durable_until_ns(&job), Some(nanoseconds(durable)));
        assert!(durable + hour > begun);
    }

    /// The other job runs: what it has just written to its record does not show that there is no more to come.
    #[test]
    fn a_resume_waits_for_what_others_have_written_until_it_began() {
        let dir = tempfile::tempdir().unwrap();
        let root = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let [job, other] = ["job", "other"].map(|name| root.job(&JobKey::named(name).unwrap()));
        let ids = [1, 2].map(|number| SnapshotId::new(number, SystemTime::UNIX_EPOCH));
        fs::create_dir_all(job.path().join(RECORDS)).unwrap();
        let before = SystemTime::now();
        fs::write(record_path(&job, &ids[0]), "\"/a\"\n").unwrap();
        stamped(&job, &ids[0], before);
        let begun = SystemTime::now();
        thread::scope(|scope| {
            let found = scope.spawn(|| written_by_others(&other, before, begun));
            thread::sleep(2 * DRAIN_INTERVAL);
            let second = open(&job, &ids[1]).unwrap();
            let mut first = File::options().append(true).open(record_path(&job, &ids[0])).unwrap();
            first.write_all(b"\"/b\"\n").unwrap();
            let at = |id| stamp(&fs::metadata(record_path(&job, id)).unwrap());
            assert_eq!((at(&ids[0]), at(&ids[1])), (None, Some(before)));
            thread::sleep(2 * DRAIN_INTERVAL);
            assert!(!found.is_finished());
            (&second.file).write_all(b"\"/c\"\n").unwrap();
            stamped(&job, &ids[1], begun);
            assert_eq!(found.join().unwrap(), ["/a", "/b", "/c"].map(str::to_owned).into());
            second.is_used.set(true);
        });
    }

    fn stamped(dir: &JobDir, id: &SnapshotId, at: SystemTime) {
        File::options().append(true).open(record_path(dir, id)).unwrap().set_modified(at).unwrap();
    }
}
