//! Whose a job is. The lock keeps two launchers on one machine apart. Where several machines reach a store, only the
//! job's record can do that: each launcher leaves its name there when it begins, and looks for it before it changes
//! the record, commits a snapshot or uploads one. A launcher that finds another's name leaves the store alone from
//! then on, so that two histories of one job do not mix.
//!
//! ```text
//!   launcher A   begins ── snapshot 1 ── snapshot 2 ────────── refused: the job is B's
//!   launcher B                               begins, resumes 2 ── snapshot 3 ── snapshot 4
//! ```

use ckpt_snapshot::pack::PackId;
use ckpt_snapshot::{JobDir, JobRecord, OpenError};
use parking_lot::{Mutex, MutexGuard};
use std::io;

/// The job's record, as long as it is this launcher's to change.
pub struct Ownership {
    dir: JobDir,
    record: Mutex<JobRecord>,
    /// What the record said of whose the job is, before it was this launcher's.
    before: JobRecord,
}

/// Another launcher has the job now.
#[derive(Debug, thiserror::Error)]
#[error(
    "another ckpt-run{by} has gone on with the job {job} since this one began: its snapshots count now, and none of this one are added to them. End one of the two; whichever is started again goes on from the other's newest snapshot"
)]
pub struct TakenUp {
    /// The job.
    pub job: String,
    /// Where, as the end of " on the machine NAME"; empty if it is not known.
    pub by: String,
}

/// The record cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum OwnershipError {
    /// It is another launcher's.
    #[error(transparent)]
    TakenUp(#[from] TakenUp),
    /// The store does not let us.
    #[error(transparent)]
    Store(#[from] OpenError),
}

impl TakenUp {
    /// The job `dir` is that launcher's.
    #[must_use]
    pub fn by(dir: &JobDir, launcher: &str) -> Self {
        let host = launcher.split_once('@').map(|(_, host)| host).filter(|host| !host.is_empty());
        let by = host.map(|host| format!(" (on the machine {host})")).unwrap_or_default();
        Self { job: dir.key().to_string(), by }
    }
}

impl Ownership {
    /// From now on the job is this launcher's, whosever it was by `before`.
    ///
    /// # Errors
    /// When the record cannot be written.
    pub fn begin(dir: &JobDir, record: JobRecord, before: JobRecord) -> Result<Self, OpenError> {
        let unnamed = |source: io::Error| {
            let path = dir.path().to_owned();
            OpenError::Io { step: "find a name for the ckpt-run of", path, source }
        };
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let launcher = format!("{}@{host}", PackId::random().map_err(unnamed)?);
        let record = JobRecord { launcher, ..record };
        dir.set_record(&record)?;
        Ok(Self { dir: dir.clone(), record: Mutex::new(record), before })
    }

    /// The record, as this launcher knows it.
    #[must_use]
    pub fn record(&self) -> JobRecord {
        self.lock().clone()
    }

    /// Whether the job is still this launcher's.
    ///
    /// # Errors
    /// When it is not, or the store cannot tell.
    pub fn check(&self) -> Result<(), OwnershipError> {
        let ours = self.lock().launcher.clone();
        self.check_against(&ours)
    }

    /// Changes the record, here and in the store.
    ///
    /// # Errors
    /// As [`Self::check`], and when it cannot be written; it is as it was then.
    pub fn change<T>(&self, change: impl FnOnce(&mut JobRecord) -> T) -> Result<T, OwnershipError> {
        let mut record = self.lock();
        self.check_against(&record.launcher)?;
        let mut changed = record.clone();
        let result = change(&mut changed);
        if changed != *record {
            self.dir.set_record(&changed)?;
            *record = changed;
        }
        Ok(result)
    }

    /// Whose the job is now, if it is not this launcher's any more. That the store cannot tell is no reason to throw
    /// something away.
    #[must_use]
    pub fn taken_up(&self) -> Option<TakenUp> {
        match self.check() {
            Err(OwnershipError::TakenUp(taken)) => Some(taken),
            Ok(()) | Err(OwnershipError::Store(_)) => None,
        }
    }

    /// Writes back what the record said before this launcher claimed the job.
    pub fn release(&self) {
        let JobRecord { launcher, taken_up, taken_up_at, .. } = self.before.clone();
        let given =
            self.change(|record| *record = JobRecord { launcher, taken_up, taken_up_at, ..record.clone() });
        if let Err(error) = given {
            tracing::debug!("the job's record stays as it is: {error}");
        }
    }

    fn check_against(&self, ours: &str) -> Result<(), OwnershipError> {
        match self.dir.record() {
            Ok(Some(there)) if there.launcher != ours => Err(TakenUp::by(&self.dir, &there.launcher).into()),
            // What is lost or damaged says nothing of others, and is written anew.
            Ok(_) | Err(OpenError::Unreadable { .. }) => Ok(()),
            Err(error) => Err(error.into()),
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
    use ckpt_snapshot::{JobKey, StoreRoot};
    use std::sync::Arc;

    fn job(dir: &tempfile::TempDir) -> JobDir {
        let root = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = root.job(&JobKey::named("job").unwrap());
        drop(job.lock_to_run(|_| ()).unwrap());
        job
    }

    fn begin(job: &JobDir, record: JobRecord) -> Ownership {
        Ownership::begin(job, record.clone(), record).unwrap()
    }

    #[test]
    fn who_began_last_has_the_job() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(&dir);
        let first = begin(&job, rebuilt(&[]));
        first.change(|record| record.last_sequence = 2).unwrap();
        first.check().unwrap();
        let second = begin(&job, job.record().unwrap().unwrap());
        let refused = first.change(|record| record.last_sequence = 3).unwrap_err();
        let OwnershipError::TakenUp(taken) = &refused else { panic!("{refused}") };
        let host = crate::sys::host::facts().hostname;
        assert!(taken.job == "job" && taken.by.contains(&host), "{taken}");
        assert!(matches!(first.check(), Err(OwnershipError::TakenUp(_))));
        assert_eq!(first.record().last_sequence, 2, "what was refused has not happened");
        second.change(|record| record.last_sequence += 1).unwrap();
        assert_eq!(job.record().unwrap().unwrap(), second.record());
        assert_eq!(second.record().last_sequence, 3);
    }

    #[test]
    fn a_start_that_comes_to_nothing_gives_the_job_back() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(&dir);
        let first = begin(&job, rebuilt(&[]));
        let second = Arc::new(begin(&job, first.record()));
        let claim = Claim::new(&second, None);
        assert!(first.check().is_err() && first.taken_up().is_some());
        claim.release();
        first.check().unwrap();
        assert!(first.taken_up().is_none());
        // One that was overtaken itself has nothing to give, and neither has one whose job runs.
        let third = Arc::new(begin(&job, first.record()));
        Claim::new(&second, None).release();
        third.check().unwrap();
        let claim = Claim::new(&third, None);
        claim.confirm();
        claim.release();
        third.check().unwrap();
    }

    #[test]
    fn a_record_that_is_lost_or_damaged_is_written_anew() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(&dir);
        let ours = begin(&job, rebuilt(&[]));
        let file = job.path().join("job.json");
        std::fs::remove_file(&file).unwrap();
        ours.change(|record| record.last_sequence = 1).unwrap();
        std::fs::write(&file, "{").unwrap();
        ours.change(|record| record.last_sequence = 2).unwrap();
        assert_eq!(job.record().unwrap().unwrap(), ours.record());
    }
}
