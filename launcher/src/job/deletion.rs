//! Deletes all of a complete job: its snapshots in every tier of the store, its marks, journal and logs. What stays is a
//! record that says so, see [`JobRecord::is_removed`].
//!
//! The job's lock keeps launchers of this machine away; it may not reach other machines. So the objects of the job are listed
//! first, and then its record is read: what a launcher elsewhere adds after that is not on the list and stays. Its snapshots
//! use none of the listed packs, which have a tombstone. If the record has changed meanwhile, the deletion stops. The
//! record is replaced when all snapshots are gone: until then, the command can be repeated.

use crate::store::lock_scope::is_one_machine_only;
use crate::store::options::StoreOptions;
use crate::store::tiers;
use crate::sys::error::{EXIT_PREEMPTED, bad_input};
use anyhow::{Context, Result, anyhow, bail};
use ckpt_object_medium::Options;
use ckpt_snapshot::medium::Medium;
use ckpt_snapshot::pack::PackId;
use ckpt_snapshot::packed::{new_tombstone, set_tombstone};
use ckpt_snapshot::{JobDir, JobLock, JobOutcome, JobRecord, Marks, RelPath};
use std::fs;
use std::io;
use std::sync::Arc;

/// Folders of the objects of a job, in the order in which they are deleted: a snapshot exists as long as its manifest.
const FOLDERS: [&str; 6] = ["manifests", "packs", "pins", "nodes", "journals", "tombstones"];
/// What stays in the job's directory: the lock, and the last of the job's records and of its marks, which are emptied. Their
/// numbers stay taken: a launcher that has stood still would write one of them, and take it for its own; and to others,
/// lower numbers would be an older state of the job.
const STAYS: [&str; 3] = ["job", "marks", "lock"];

/// The objects of a job in one place.
struct Objects {
    medium: Arc<dyn Medium>,
    names: Vec<RelPath>,
    /// See [`Self::announce`].
    tombstone: Option<RelPath>,
}

impl Objects {
    fn list(medium: Arc<dyn Medium>) -> Result<Self> {
        let mut names = Vec::new();
        for folder in FOLDERS {
            let mut found = names_in(&*medium, folder)?;
            // A pack without an index is garbage.
            found.sort_by_key(|name| !name.as_str().ends_with(".index"));
            names.extend(found);
        }
        Ok(Self { medium, names, tombstone: None })
    }

    /// Sets a tombstone for the packs. It goes with the other objects, as the last one.
    fn announce(&mut self) -> Result<()> {
        let pack =
            |name: &RelPath| PackId::parse(name.as_str().strip_prefix("packs/")?.strip_suffix(".pack")?);
        let packs: Vec<_> = self.names.iter().filter_map(pack).collect();
        let name = new_tombstone()?;
        self.names.push(name.clone());
        self.tombstone = Some(name.clone());
        let set = set_tombstone(&*self.medium, &name, &packs);
        set.with_context(|| format!("cannot write {}", self.medium.describe(&name)))
    }

    /// Nothing is deleted.
    fn withdraw(&self) {
        if let Some(name) = &self.tombstone
            && let Err(error) = self.medium.remove(name)
        {
            tracing::warn!("cannot delete {}: {error}", self.medium.describe(name));
        }
    }

    fn remove(&self) -> Result<()> {
        self.names.iter().try_for_each(|name| {
            let removed = self.medium.remove(name);
            removed.with_context(|| format!("cannot delete {}", self.medium.describe(name)))
        })
    }
}

/// The objects in a folder. Those whose names are no paths of a store are not of ckpt-run.
fn names_in(medium: &dyn Medium, folder: &str) -> Result<Vec<RelPath>> {
    let path = RelPath::new(folder).expect("a plain path");
    let listed = medium.list(&path);
    let listed = listed.with_context(|| format!("cannot list {}", medium.describe(&path)))?;
    Ok(listed.iter().filter_map(|(name, _)| RelPath::new(format!("{folder}/{name}")).ok()).collect())
}

/// The records of a job.
pub struct Found {
    here: JobRecord,
    /// Beside its uploads.
    remote: Option<JobRecord>,
}

/// Checks that the job is complete, and runs neither here nor, as far as its records say, elsewhere. Returns its records.
///
/// # Errors
/// Bad input: it is not, or a record is damaged or not that of the holder of the key.
pub fn check(options: &StoreOptions, dir: &JobDir) -> Result<Found> {
    dir.check_records()?;
    let here = dir.record()?.ok_or_else(|| bad_input(anyhow!("the job {} has no record", dir.key())))?;
    if let Some(why) = unfinished(&here) {
        bail!(bad_input(anyhow!(
            "the job {} is not complete ({why}), so nothing of it was deleted: its next run may resume it. To delete its snapshots: `ckpt-run rm --force ID…`",
            dir.key()
        )));
    }
    let Some(remote) = tiers::uploaded_records(options, dir, Options::default())? else {
        return Ok(Found { here, remote: None });
    };
    remote.check_records()?;
    // An older one says nothing: the upload of the last may have failed.
    let remote = remote.record()?;
    let newer = remote.as_ref().filter(|remote| remote.claims > here.claims);
    if let Some(why) = newer.and_then(unfinished) {
        bail!(bad_input(anyhow!(
            "the job {} was started on another machine since it was complete here ({why} there), so nothing of it was deleted",
            dir.key()
        )));
    }
    Ok(Found { here, remote })
}

/// How the last run of the job ended, unless it is complete.
fn unfinished(record: &JobRecord) -> Option<String> {
    match record.outcome {
        JobOutcome::Complete => None,
        JobOutcome::Unfinished => Some("it is running, was preempted, or its launcher was killed".to_owned()),
        JobOutcome::Failed { code: EXIT_PREEMPTED } => Some("it was preempted or stopped".to_owned()),
        JobOutcome::Failed { code } => Some(format!("it ended with exit code {code}")),
    }
}

/// Whether something is left of a job that was deleted: the deletion was interrupted, or a launcher that had stood still has
/// written something afterwards.
///
/// # Errors
/// When the store cannot be read.
pub fn has_rest(options: &StoreOptions, dir: &JobDir) -> Result<bool> {
    let media = tiers::uploads(options, dir, Options::default())?.into_iter().chain([dir.medium()]);
    for medium in media {
        if !Objects::list(medium)?.names.is_empty() {
            return Ok(true);
        }
    }
    let mut entries = fs::read_dir(dir.path()).into_iter().flatten().flatten();
    Ok(entries.any(|entry| !stays(&entry)))
}

fn stays(entry: &fs::DirEntry) -> bool {
    entry.file_name().to_str().is_some_and(|name| STAYS.contains(&name))
}

/// Deletes all of a complete job. After an error, the job may have lost snapshots; the command can be repeated.
///
/// # Errors
/// Those of [`check`]; the job is running; something cannot be deleted.
pub fn delete(options: &StoreOptions, dir: &JobDir) -> Result<()> {
    let lock = dir.lock_for_maintenance()?;
    let mut uploaded = tiers::uploads(options, dir, Options::default())?.map(Objects::list).transpose()?;
    let mut home = Objects::list(dir.medium())?;
    let mut shared: Vec<&mut Objects> = uploaded.iter_mut().collect();
    if dir.records_medium().is_some() || is_one_machine_only(dir.path()) {
        shared.push(&mut home);
    }
    let announced = shared.iter_mut().try_for_each(|objects| objects.announce());
    let found = match announced.and_then(|()| check(options, dir)) {
        Ok(found) => found,
        Err(error) => {
            shared.iter().for_each(|objects| objects.withdraw());
            return Err(error);
        }
    };
    let removed = removed(&found)?;
    if let (Some(uploaded), Some(remote)) =
        (uploaded, tiers::uploaded_records(options, dir, Options::default())?)
    {
        uploaded.remove()?;
        replace(&remote, &removed, found.remote.as_ref())?;
    }
    home.remove()?;
    replace(dir, &removed, Some(&found.here))?;
    let local = remove_local(dir);
    let local =
        if dir.records_medium().is_some() { local.and_then(|()| remove_rest(dir, lock)) } else { local };
    local.map_err(|error| anyhow!("cannot delete the job's directory {}: {error}", dir.path().display()))
}

/// The record that stays. Other machines take the one with more claims for the newer one. No launcher has its name. What it
/// stays for does not need the command.
fn removed(found: &Found) -> Result<JobRecord> {
    let of = |number: fn(&JobRecord) -> u64| found.remote.as_ref().map_or(0, number).max(number(&found.here));
    let last_sequence = of(|record| record.last_sequence);
    Ok(JobRecord {
        is_removed: true,
        launcher: format!("{}@", PackId::random().context("no random numbers")?),
        cwd: String::new(),
        argv: Vec::new(),
        run: of(|record| record.run),
        claims: of(|record| record.claims) + 1,
        last_sequence,
        sequence_before_run: last_sequence,
        abandoned: Vec::new(),
        deleted: Vec::new(),
        resumed_from: None,
        ..found.here.clone()
    })
}

/// Empties the marks of a job, and replaces its record if that is still the one that was found.
fn replace(dir: &JobDir, removed: &JobRecord, found: Option<&JobRecord>) -> Result<()> {
    dir.change_marks(|marks| *marks = Marks::default())?;
    dir.change_record(|present| match present {
        Some(present) if present.is_removed => Ok(None),
        present if present.as_ref() == found => Ok(Some(removed.clone())),
        _ => bail!(
            "the job {} was started on another machine meanwhile: what it has saved since stays",
            dir.key()
        ),
    })
}

/// Deletes the files in the job's directory, except the record and the lock.
fn remove_local(dir: &JobDir) -> io::Result<()> {
    for entry in fs::read_dir(dir.path())? {
        let entry = entry?;
        if stays(&entry) {
            continue;
        }
        let is_folder_of_objects = entry.file_name().to_str().is_some_and(|name| FOLDERS.contains(&name));
        match entry.file_type()?.is_dir() {
            // What was not listed is newer. Leftovers of writers do not matter.
            true if is_folder_of_objects && !is_emptied(&entry.path())? => {
                return Err(io::Error::other(format!("{} has new files", entry.path().display())));
            }
            true => fs::remove_dir_all(entry.path())?,
            false => fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

/// Whether a folder has no objects: files of interrupted writers are none.
fn is_emptied(folder: &std::path::Path) -> io::Result<bool> {
    for entry in fs::read_dir(folder)? {
        if !entry?.file_name().to_string_lossy().starts_with(".tmp-") {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Deletes what is left of a job whose record is elsewhere: the lock with its directory. Another launcher may make both again
/// at once, and then waits for no one: it notices that the lock that it had opened is gone.
fn remove_rest(dir: &JobDir, lock: JobLock) -> io::Result<()> {
    let ignore_missing = |result: io::Result<()>| match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    ignore_missing(fs::remove_file(dir.path().join("lock")))?;
    drop(lock);
    match fs::remove_dir(dir.path()) {
        // Somebody has started the job again.
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        other => ignore_missing(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::claim::ClaimedJob;
    use crate::job::ownership::{Ownership, OwnershipError};
    use crate::job::resume_point::{Resume, rebuilt};
    use crate::store::root::Root;
    use ckpt_snapshot::codec::Key;
    use ckpt_snapshot::{Input, JobIdentity, JobKey, Manifest, OpenError, SnapshotId, Store};
    use std::os::unix::fs::PermissionsExt;
    use std::path::{Path, PathBuf};
    use std::time::SystemTime;

    fn record(outcome: JobOutcome, claims: u64) -> JobRecord {
        JobRecord {
            version: 1,
            cwd: "/".to_owned(),
            argv: vec!["train".to_owned()],
            run: 1,
            last_sequence: 2,
            sequence_before_run: 0,
            abandoned: Vec::new(),
            deleted: Vec::new(),
            resumed_from: None,
            claims,
            claimed_at_sequence: 0,
            launcher: String::new(),
            outcome,
            is_removed: false,
        }
    }

    fn save(store: &dyn Store, job: &JobDir, number: u64) -> SnapshotId {
        let id = SnapshotId::new(number, SystemTime::UNIX_EPOCH);
        let mut writer = store.begin(&id, 0).unwrap();
        let content = vec![u8::try_from(number).unwrap(); 5000];
        let path = RelPath::new("images/pages-1.img").unwrap();
        writer.put(&[Input { path, from: &content }], &|_| {}).unwrap();
        let identity = JobIdentity { key: job.key().to_string(), cwd: "/".into(), argv: Vec::new() };
        writer.commit(Manifest::new(id.clone(), identity)).unwrap();
        id
    }

    /// The files in a directory, at any depth.
    fn files(dir: &Path) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for entry in fs::read_dir(dir).into_iter().flatten() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => found.extend(files(&path)),
                false => found.push(path),
            }
        }
        found.sort();
        found
    }

    /// Deletes a job that does not run. A program that another test starts has its lock for a moment.
    fn tried(options: &StoreOptions, job: &JobDir) -> Result<()> {
        loop {
            match delete(options, job) {
                Err(error) if matches!(error.downcast_ref(), Some(OpenError::Locked { .. })) => {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                other => return other,
            }
        }
    }

    /// The options of a store of each kind below `dir`.
    fn kinds(dir: &Path) -> [StoreOptions; 3] {
        let url = |name: &str| {
            let path = dir.join(name);
            fs::create_dir_all(&path).unwrap();
            Some(format!("file://{}", path.display()).parse().unwrap())
        };
        let at = |name: &str| StoreOptions { dir: dir.join(name), ..StoreOptions::default() };
        [
            at("plain"),
            StoreOptions { upload: url("uploads"), ..at("uploaded") },
            StoreOptions { url: url("address"), ..at("local") },
        ]
    }

    /// A job with two snapshots, a mark and files of all kinds.
    fn job(options: &StoreOptions, name: &str, outcome: JobOutcome) -> (Root, JobDir) {
        let root = Root::open_or_create(options, &options.pace()).unwrap();
        let job = root.job(&JobKey::named(name).unwrap());
        fs::create_dir_all(job.path()).unwrap();
        fs::write(job.path().join("lock"), "").unwrap();
        job.set_record(&record(JobOutcome::Unfinished, 0)).unwrap();
        job.set_record(&record(outcome, 0)).unwrap();
        let store = tiers::open(options, &job).unwrap();
        for number in [1, 2] {
            let id = save(&*store, &job, number);
            if options.upload.is_some() {
                store.copy(&id, tiers::DISK, tiers::REMOTE, &|_| {}, &Default::default()).unwrap();
            }
            job.change_marks(|marks| marks.pin(&id)).unwrap();
        }
        if let Some(medium) = tiers::uploads(options, &job, Options::default()).unwrap() {
            job.clone().with_content_in(medium).set_record(&record(outcome, 0)).unwrap();
        }
        fs::write(job.path().join("journal.jsonl"), "{}\n").unwrap();
        fs::create_dir_all(job.path().join("kept/a/b")).unwrap();
        fs::write(job.path().join("kept/a/b/log"), "x").unwrap();
        (root, job)
    }

    #[test]
    fn all_of_a_complete_job_is_deleted_and_nothing_of_others() {
        let dir = tempfile::tempdir().unwrap();
        for options in kinds(dir.path()) {
            let (_, other) = job(&options, "other", JobOutcome::Complete);
            let before = files(dir.path());
            let (root, gone) = job(&options, "gone", JobOutcome::Complete);
            assert!(files(dir.path()).len() >= before.len() + 8);
            tried(&options, &gone).unwrap();
            let mut left = files(dir.path());
            left.retain(|path| !before.contains(path));
            let is_of_record = |path: &PathBuf| {
                let dir = path.parent().unwrap();
                path.ends_with("gone/lock") || dir.ends_with("gone/job") || dir.ends_with("gone/marks")
            };
            assert!(left.iter().all(is_of_record), "{left:?}");
            assert!(gone.record().unwrap().unwrap().is_removed);
            assert_eq!(gone.marks().unwrap().kept().count(), 0);
            assert!(!has_rest(&options, &gone).unwrap());
            // Again, as after an interruption: the record is not touched.
            tried(&options, &gone).unwrap();
            assert!(left.iter().filter(|path| path.extension().is_some()).all(|path| path.exists()));
            let names: Vec<_> = root.jobs().unwrap().iter().map(|job| job.key().to_string()).collect();
            assert_eq!(names, ["other"]);
            assert_eq!(tiers::open(&options, &other).unwrap().list().unwrap().len(), 2);
        }
    }

    /// Another machine runs the job to its end and deletes it, while the launcher of this one stands still.
    #[test]
    fn a_launcher_that_has_stood_still_adds_nothing_to_a_deleted_job() {
        let dir = tempfile::tempdir().unwrap();
        let key_file = dir.path().join("key");
        fs::write(&key_file, (1..33).collect::<Vec<u8>>()).unwrap();
        fs::set_permissions(&key_file, fs::Permissions::from_mode(0o600)).unwrap();
        for key in [None, Some(Key::from_file(&key_file).unwrap())] {
            let here = dir.path().join(format!("{}", key.is_some()));
            for options in kinds(&here) {
                let options = StoreOptions { key: key.clone(), ..options };
                let root = Root::open_or_create(&options, &options.pace()).unwrap();
                let job = root.job(&JobKey::named("job").unwrap());
                drop(job.lock_to_run(|_| ()).unwrap());
                let claim = |job: &JobDir| Ownership::claim::<OpenError>(job, || Ok(rebuilt(&[]))).unwrap();
                let is_fenced = |ownership: &Ownership| {
                    matches!(ownership.next_number(0), Err(OwnershipError::ClaimedElsewhere(_)))
                        && ownership.claimed_elsewhere().is_some()
                };
                let still = claim(&job);
                still.change(|record| record.last_sequence = 5).unwrap();
                let elsewhere = job.clone().with_seen_in(&here.join("seen"));
                for number in 1..4 {
                    let id = SnapshotId::new(number, SystemTime::UNIX_EPOCH);
                    job.change_marks(|marks| marks.pin(&id)).unwrap();
                }
                elsewhere.marks().unwrap();
                let second = claim(&elsewhere);
                second.change(|record| record.outcome = JobOutcome::Complete).unwrap();
                if let Some(remote) = tiers::uploaded_records(&options, &job, Options::default()).unwrap() {
                    remote.set_record(&second.record()).unwrap();
                }
                tried(&options, &job).unwrap();
                assert!(root.jobs().unwrap().is_empty(), "it is not listed");
                assert!(is_fenced(&still) && is_fenced(&second));
                drop(job.lock_to_run(|_| ()).unwrap());
                let third = claim(&job);
                third.change(|record| record.is_removed = false).unwrap();
                assert_eq!(third.next_number(0).unwrap(), 6, "numbers go on");
                assert!(is_fenced(&still) && is_fenced(&second));
                third.check().unwrap();
                assert_eq!(elsewhere.record().unwrap().unwrap(), third.record(), "it is no older state");
                third.dir().begin_marks().unwrap();
                assert_eq!(elsewhere.marks().unwrap().kept().count(), 0);
                assert_eq!(root.jobs().unwrap().len(), 1);
            }
        }
    }

    #[test]
    fn a_job_that_may_be_resumed_is_refused_and_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        for options in kinds(dir.path()) {
            for (name, outcome, why) in [
                ("failed", JobOutcome::Failed { code: 7 }, "it ended with exit code 7"),
                ("stopped", JobOutcome::Failed { code: EXIT_PREEMPTED }, "it was preempted or stopped"),
                ("unfinished", JobOutcome::Unfinished, "was preempted"),
            ] {
                let (_, job) = job(&options, name, outcome);
                let before = files(dir.path());
                let error = tried(&options, &job).unwrap_err();
                assert!(error.to_string().contains(why), "{error}");
                assert_eq!(files(dir.path()), before);
            }
            let (_, running) = job(&options, "running", JobOutcome::Complete);
            let lock = running.lock_to_run(|_| {}).unwrap();
            let error = delete(&options, &running).unwrap_err();
            assert!(matches!(error.downcast_ref(), Some(OpenError::Locked { .. })), "{error}");
            drop(lock);
            tried(&options, &running).unwrap();
        }
    }

    #[test]
    fn a_job_that_another_machine_took_up_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let [_, options, _] = kinds(dir.path());
        let (_, job) = job(&options, "moved", JobOutcome::Complete);
        let medium = tiers::uploads(&options, &job, Options::default()).unwrap().unwrap();
        let remote = job.clone().with_content_in(medium);
        remote.set_record(&record(JobOutcome::Unfinished, 1)).unwrap();
        let before = files(dir.path());
        let error = tried(&options, &job).unwrap_err();
        assert!(error.to_string().contains("started on another machine"), "{error}");
        assert_eq!(files(dir.path()), before);
        // An upload that failed says nothing of the job.
        remote.set_record(&record(JobOutcome::Unfinished, 0)).unwrap();
        tried(&options, &job).unwrap();
    }

    /// Another machine has taken the job up and completed it.
    #[test]
    fn a_job_that_another_machine_has_completed_is_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let [_, options, _] = kinds(dir.path());
        let (_, job) = job(&options, "moved", JobOutcome::Complete);
        let remote = tiers::uploaded_records(&options, &job, Options::default()).unwrap().unwrap();
        remote
            .set_record(&JobRecord { last_sequence: 9, run: 3, ..record(JobOutcome::Complete, 1) })
            .unwrap();
        tried(&options, &job).unwrap();
        for records in [&job, &remote] {
            let record = records.record().unwrap().unwrap();
            assert!(record.is_removed);
            assert_eq!((record.claims, record.last_sequence, record.run), (2, 9, 3));
        }
    }

    /// Nothing of the command is in the object store, and the machine that had it there begins anew.
    #[test]
    fn the_record_that_stays_has_no_command() {
        let dir = tempfile::tempdir().unwrap();
        let [plain, uploaded, _] = kinds(dir.path());
        for options in [plain, uploaded] {
            let (_, job) = job(&options, "secret", JobOutcome::Complete);
            tried(&options, &job).unwrap();
            let remote = tiers::uploaded_records(&options, &job, Options::default()).unwrap();
            for records in [Some(job), remote].into_iter().flatten() {
                let record = records.record().unwrap().unwrap();
                assert!(record.is_removed && record.argv.is_empty() && record.cwd.is_empty());
            }
        }
    }

    /// With `--upload`, a machine without a local record knows the job from the object store only.
    #[test]
    fn the_record_that_stays_fences_a_machine_that_knew_uploads_only() {
        let dir = tempfile::tempdir().unwrap();
        let [_, options, _] = kinds(dir.path());
        let elsewhere = StoreOptions { dir: dir.path().join("elsewhere"), ..options.clone() };
        let identity = JobIdentity { key: "job".into(), cwd: "/".into(), argv: Vec::new() };
        let claim = |options: &StoreOptions| {
            let root = Root::open_or_create(options, &options.pace()).unwrap();
            let job = root.job(&JobKey::named("job").unwrap());
            drop(job.lock_to_run(|_| ()).unwrap());
            let store = tiers::open(options, &job).unwrap();
            let (claimed, _) = ClaimedJob::claim(&Resume::Never, options, &job, &store, &identity).unwrap();
            claimed.claim.confirm();
            (job, claimed)
        };
        // The second time, it began on the record of a deleted job.
        for _ in 0..2 {
            let (job, first) = claim(&options);
            let (_, still) = claim(&elsewhere);
            still.handover.as_ref().unwrap().publish(&still.ownership);
            let (_, last) = claim(&options);
            last.ownership.change(|record| record.outcome = JobOutcome::Complete).unwrap();
            last.handover.as_ref().unwrap().publish(&last.ownership);
            assert!(still.handover.as_ref().unwrap().check().is_err());
            drop((first, last));
            tried(&options, &job).unwrap();
            let handover = still.handover.as_ref().unwrap();
            assert!(handover.check().is_err(), "it is fenced still");
            handover.publish(&still.ownership);
            assert!(handover.records().record().unwrap().unwrap().is_removed, "and changes nothing");
            let _ = fs::remove_dir_all(&elsewhere.dir);
        }
    }
}
