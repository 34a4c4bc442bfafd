//! Which launcher owns a job. On one machine, the job's lock prevents two launchers from running it. Where several
//! machines share a store, the job's record does: each launcher writes its name there when it claims the job, and every
//! later change of the record is conditional on that name. A launcher that finds another name changes the record no more.
//!
//! The record fences snapshots, too. The number of a snapshot is reserved in it before the snapshot is taken, and a
//! launcher that claims the job abandons the numbers after the snapshot that it resumes from: what the launcher before it
//! commits late has such a number. The numbers of snapshots that retention deletes are in the record before the first
//! one is deleted: a launcher that claims the job resumes from none of them.
//!
//! ```text
//!   launcher A   begins ── snapshot 1 ── snapshot 2 ────────── refused: the job is B's
//!   launcher B                               begins, resumes 2 ── snapshot 3 ── snapshot 4
//! ```

use ckpt_snapshot::pack::PackId;
use ckpt_snapshot::{JobDir, JobRecord, OpenError, SnapshotId};
use parking_lot::{Mutex, MutexGuard};
use std::io;

/// The job's record, which this launcher may change until another one claims the job.
pub struct Ownership {
    dir: JobDir,
    record: Mutex<JobRecord>,
    /// The record before this launcher claimed the job.
    previous: JobRecord,
}

/// Another launcher has claimed the job.
#[derive(Debug, thiserror::Error)]
#[error(
    "another ckpt-run{by} has claimed the job {job} since this one began: its snapshots count now, and this ckpt-run adds none. End one of the two; whichever is started again resumes from the other's newest snapshot"
)]
pub struct ClaimedElsewhere {
    /// The job.
    pub job: String,
    /// Where that launcher runs, as " (on the machine NAME)"; empty if unknown.
    pub by: String,
}

/// The record cannot be changed or checked.
#[derive(Debug, thiserror::Error)]
pub enum OwnershipError {
    /// Another launcher owns the job.
    #[error(transparent)]
    ClaimedElsewhere(#[from] ClaimedElsewhere),
    /// The store cannot be read or written.
    #[error(transparent)]
    Store(#[from] OpenError),
}

impl ClaimedElsewhere {
    /// The job in `dir` is claimed by `launcher`.
    #[must_use]
    pub fn by(dir: &JobDir, launcher: &str) -> Self {
        let host = launcher.split_once('@').map(|(_, host)| host).filter(|host| !host.is_empty());
        let by = host.map(|host| format!(" (on the machine {host})")).unwrap_or_default();
        Self { job: dir.key().to_string(), by }
    }
}

impl Ownership {
    /// Claims the job for this launcher. `rebuilt` makes a record if there is none.
    ///
    /// # Errors
    /// When the record cannot be read or written.
    pub fn claim<E: From<OpenError>>(
        dir: &JobDir,
        rebuilt: impl FnOnce() -> Result<JobRecord, E>,
    ) -> Result<Self, E> {
        let unnamed = |source: io::Error| {
            let path = dir.path().to_owned();
            OpenError::Io { step: "find a name for the ckpt-run of", path, source }
        };
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let launcher = format!("{}@{host}", PackId::random().map_err(unnamed)?);
        let mut previous = match dir.record()? {
            Some(present) => present,
            None => rebuilt()?,
        };
        // From now on, only another holder of the key can take the job away.
        let dir = dir.clone().passing_over_forgeries();
        dir.change_record(|present| {
            // It is ours if a write had succeeded that was answered with an error.
            previous =
                present.filter(|present| present.launcher != launcher).unwrap_or_else(|| previous.clone());
            Ok::<_, OpenError>(Some(JobRecord { launcher: launcher.clone(), ..previous.clone() }))
        })?;
        let record = Mutex::new(JobRecord { launcher, ..previous.clone() });
        Ok(Self { dir, record, previous })
    }

    /// The job, as its launcher sees it.
    #[must_use]
    pub fn dir(&self) -> &JobDir {
        &self.dir
    }

    /// The record before this launcher claimed the job.
    #[must_use]
    pub fn previous(&self) -> &JobRecord {
        &self.previous
    }

    /// The record as this launcher last wrote it.
    #[must_use]
    pub fn record(&self) -> JobRecord {
        self.lock().clone()
    }

    /// Checks that this launcher still owns the job.
    ///
    /// # Errors
    /// When it does not, or the store cannot be read.
    pub fn check(&self) -> Result<(), OwnershipError> {
        let ours = self.lock().launcher.clone();
        match self.dir.record() {
            Err(OpenError::Unreadable { .. } | OpenError::Unauthentic { .. }) => Ok(()),
            present => self.check_against(present?.as_ref(), &ours),
        }
    }

    /// Changes the record, here and in the store.
    ///
    /// # Errors
    /// As [`Self::check`], and when the record cannot be written. The record is then unchanged.
    pub fn change<T>(&self, change: impl FnOnce(&mut JobRecord) -> T) -> Result<T, OwnershipError> {
        let mut record = self.lock();
        let mut changed = record.clone();
        let result = change(&mut changed);
        self.dir.change_record(|present| {
            self.check_against(present.as_ref(), &record.launcher)?;
            Ok::<_, OwnershipError>((present.as_ref() != Some(&changed)).then(|| changed.clone()))
        })?;
        *record = changed;
        Ok(result)
    }

    /// Reserves the number of the next snapshot. `newest` is the highest number of a snapshot.
    ///
    /// # Errors
    /// As [`Self::change`].
    pub fn next_number(&self, newest: u64) -> Result<u64, OwnershipError> {
        self.change(|record| {
            record.last_sequence = record.last_sequence.max(newest) + 1;
            record.last_sequence
        })
    }

    /// Records that retention deletes these snapshots: no launcher that claims the job from now on resumes from them.
    ///
    /// # Errors
    /// As [`Self::change`]. Nothing may be deleted then.
    pub fn before_deletion(&self, ids: &[SnapshotId]) -> Result<(), OwnershipError> {
        self.change(|record| record.deleted = ids.iter().map(SnapshotId::sequence).collect())
    }

    /// Whether another launcher has claimed the job. A store that cannot be read is no reason to discard work: `None`.
    #[must_use]
    pub fn claimed_elsewhere(&self) -> Option<ClaimedElsewhere> {
        match self.check() {
            Err(OwnershipError::ClaimedElsewhere(claim)) => Some(claim),
            Ok(()) | Err(OwnershipError::Store(_)) => None,
        }
    }

    /// Restores the owner that the record named before this launcher claimed the job, and how the job had ended.
    pub fn release(&self) {
        let JobRecord { launcher, claims, claimed_at_sequence, outcome, is_removed, .. } =
            self.previous.clone();
        let released = self.change(|record| {
            *record =
                JobRecord { launcher, claims, claimed_at_sequence, outcome, is_removed, ..record.clone() };
        });
        if let Err(error) = released {
            tracing::debug!("the claim of the job is not released: {error}");
        }
    }

    /// A missing or damaged record names no other launcher, and is written again.
    fn check_against(&self, present: Option<&JobRecord>, ours: &str) -> Result<(), OwnershipError> {
        match present {
            Some(there) if there.launcher != ours => {
                Err(ClaimedElsewhere::by(&self.dir, &there.launcher).into())
            }
            _ => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, JobRecord> {
        self.record.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::claim::Claim;
    use crate::job::resume_point::rebuilt;
    use ckpt_snapshot::codec::Key;
    use ckpt_snapshot::{JobKey, StoreRoot};
    use std::os::unix::fs::PermissionsExt;
    use std::sync::Arc;

    fn job(dir: &tempfile::TempDir) -> JobDir {
        let root = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = root.job(&JobKey::named("job").unwrap());
        drop(job.lock_to_run(|_| ()).unwrap());
        job
    }

    fn begin(job: &JobDir) -> Ownership {
        Ownership::claim::<OpenError>(job, || Ok(rebuilt(&[]))).unwrap()
    }

    #[test]
    fn the_last_launcher_to_claim_owns_the_job() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(&dir);
        let first = begin(&job);
        first.change(|record| record.last_sequence = 2).unwrap();
        first.check().unwrap();
        let second = begin(&job);
        let refused = first.change(|record| record.last_sequence = 3).unwrap_err();
        let OwnershipError::ClaimedElsewhere(claim) = &refused else { panic!("{refused}") };
        let host = crate::sys::host::facts().hostname;
        assert!(claim.job == "job" && claim.by.contains(&host), "{claim}");
        assert!(matches!(first.check(), Err(OwnershipError::ClaimedElsewhere(_))));
        assert_eq!(first.record().last_sequence, 2, "a refused change has no effect");
        second.change(|record| record.last_sequence += 1).unwrap();
        assert_eq!(job.record().unwrap().unwrap(), second.record());
        assert_eq!(second.record().last_sequence, 3);
    }

    #[test]
    fn a_failed_start_releases_its_claim() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(&dir);
        let first = begin(&job);
        let second = Arc::new(begin(&job));
        let claim = Claim::new(&second, None);
        assert!(first.check().is_err() && first.claimed_elsewhere().is_some());
        claim.release();
        first.check().unwrap();
        assert!(first.claimed_elsewhere().is_none());
        // Released nothing: a claim that another launcher has superseded, and a claim whose job is running.
        let third = Arc::new(begin(&job));
        Claim::new(&second, None).release();
        third.check().unwrap();
        let claim = Claim::new(&third, None);
        claim.confirm();
        claim.release();
        third.check().unwrap();
    }

    fn key() -> Key {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, (1..33).collect::<Vec<u8>>()).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        Key::from_file(&path).unwrap()
    }

    /// Without the key, nobody can claim the job. With it, a claim counts although a record that is none follows it.
    #[test]
    fn only_the_holder_of_the_key_claims_a_job() {
        let (dir, apart) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let job = job(&dir).with_key(Some(&key()));
        let first = begin(&job);
        let theirs = self::job(&apart);
        begin(&theirs);
        let plant = |number: u64| {
            std::fs::copy(theirs.path().join("job/1.json"), job.path().join(format!("job/{number}.json")))
                .unwrap();
        };
        plant(2);
        plant(70);
        first.check().unwrap();
        assert_eq!(first.next_number(0).unwrap(), 1);
        // A launcher that starts now says so. One that has looked before claims the job.
        let refused = Ownership::claim::<OpenError>(&job, || Ok(rebuilt(&[]))).err();
        assert!(matches!(refused, Some(OpenError::Unauthentic { .. })));
        let second = begin(&job.clone().passing_over_forgeries());
        assert!(first.claimed_elsewhere().is_some());
        assert!(matches!(first.next_number(0), Err(OwnershipError::ClaimedElsewhere(_))));
        assert_eq!(second.next_number(0).unwrap(), 2);
        // Whatever is taken away, a running launcher writes its own record again, and takes nobody else's for a claim.
        std::fs::remove_dir_all(job.path().join("job")).unwrap();
        std::fs::create_dir(job.path().join("job")).unwrap();
        plant(70);
        second.check().unwrap();
        assert_eq!(second.dir().record().unwrap().unwrap(), second.record(), "as a restart reads it");
        assert_eq!(second.next_number(0).unwrap(), 3);
        assert!(first.claimed_elsewhere().is_some());
    }

    /// The record of the launcher before, with its code, is no claim when those of the present one are gone.
    #[test]
    fn an_older_claim_does_not_take_the_job_away() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(&dir).with_key(Some(&key()));
        let (first, second) = (begin(&job), begin(&job));
        assert_eq!(second.next_number(0).unwrap(), 1);
        for number in [2, 3] {
            std::fs::remove_file(job.path().join(format!("job/{number}.json"))).unwrap();
        }
        second.check().unwrap();
        assert_eq!(second.next_number(0).unwrap(), 2);
        assert_eq!(job.record().unwrap().unwrap(), second.record());
        std::fs::write(job.path().join("job/4.json"), "{").unwrap();
        second.check().unwrap();
        assert_eq!(second.next_number(0).unwrap(), 3);
        assert!(matches!(first.next_number(0), Err(OwnershipError::ClaimedElsewhere(_))));
        // A launcher that has seen a claim stays fenced.
        for number in 2..=5 {
            let _ = std::fs::remove_file(job.path().join(format!("job/{number}.json")));
        }
        assert!(first.claimed_elsewhere().is_some());
    }

    #[test]
    fn a_missing_or_damaged_record_is_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(&dir);
        let ours = begin(&job);
        std::fs::remove_dir_all(job.path().join("job")).unwrap();
        ours.change(|record| record.last_sequence = 1).unwrap();
        std::fs::write(job.path().join("job/1.json"), "{").unwrap();
        ours.change(|record| record.last_sequence = 2).unwrap();
        assert_eq!(job.record().unwrap().unwrap(), ours.record());
    }
}
