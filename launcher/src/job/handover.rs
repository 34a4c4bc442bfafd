//! The job's record beside its uploaded snapshots (`--upload`), for other machines that resume the job from the object
//! store. Without that record, another machine would resume a job that is complete, and a machine to which the job
//! returns would resume from the old snapshots on its own disk.

use crate::job::ownership::{ClaimedElsewhere, Ownership, OwnershipError};
use crate::store::options::StoreOptions;
use crate::store::tiers;
use crate::sys::deadline::RECORD_STALL_TIMEOUT;
use anyhow::Result;
use ckpt_object_medium::{Options, Retry};
use ckpt_snapshot::{JobDir, JobRecord, OpenError, SnapshotId};
use parking_lot::Mutex;

/// The record of a job beside its uploaded snapshots.
pub struct Handover {
    remote: JobDir,
    /// Names of this launcher and of the launchers whose snapshots it resumes.
    own_launchers: Vec<String>,
    /// How many times the job had changed machines, as far as this machine knew; `None` if it did not know the job. A
    /// remote record with no higher number is outdated, even if it names another launcher.
    known_claims: Option<u64>,
    /// The remote record before this launcher claimed the job.
    previous: Option<JobRecord>,
    /// Held while the record is published.
    publishing: Mutex<()>,
}

impl Handover {
    /// The handover of the job in `dir`, if its snapshots are uploaded. Nothing is sent yet.
    ///
    /// # Errors
    /// Bad input: an address that contradicts the environment.
    pub fn of(options: &StoreOptions, dir: &JobDir) -> Result<Option<Self>> {
        let retry = Retry { stall: RECORD_STALL_TIMEOUT, ..options.short_retry() };
        let remote = tiers::uploaded_records(options, dir, Options { retry, ..Options::default() })?;
        let of = |remote| Self {
            remote,
            own_launchers: Vec::new(),
            known_claims: None,
            previous: None,
            publishing: Mutex::new(()),
        };
        Ok(remote.map(of))
    }

    /// The job's records in the object store.
    pub fn records(&self) -> &JobDir {
        &self.remote
    }

    /// The remote record, if another machine has claimed the job since `local` was written here.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn newer_claim(&mut self, local: Option<&JobRecord>) -> Result<Option<JobRecord>, OpenError> {
        self.known_claims = local.map(|local| local.claims);
        let read = self.remote.record();
        // Also if the object store has not answered.
        self.remote = self.remote.clone().passing_over_forgeries();
        self.previous = read?;
        Ok(self.previous.clone().filter(|remote| local.is_none_or(|local| remote.claims > local.claims)))
    }

    /// Sets the launcher names with which the remote record counts as ours: this launcher's, and those of the launchers
    /// it resumes from. The latter stay in the object store until this launcher reaches it for the first time.
    pub fn begin(&mut self, launchers: Vec<String>) {
        // A record that was made up here names none, and is nobody's.
        self.own_launchers = launchers.into_iter().filter(|launcher| !launcher.is_empty()).collect();
    }

    /// Checks that no other machine has claimed the job.
    ///
    /// # Errors
    /// When another machine has, or the object store cannot be read.
    pub fn check(&self) -> Result<(), OwnershipError> {
        match self.remote.record() {
            Err(OpenError::Unreadable { .. } | OpenError::Unauthentic { .. }) => Ok(()),
            present => self.check_against(present?.as_ref()),
        }
    }

    fn check_against(&self, present: Option<&JobRecord>) -> Result<(), OwnershipError> {
        match present {
            Some(remote)
                if !self.own_launchers.contains(&remote.launcher)
                    && self.known_claims.is_none_or(|known| remote.claims > known) =>
            {
                Err(ClaimedElsewhere::by(&self.remote, &remote.launcher).into())
            }
            _ => Ok(()),
        }
    }

    /// Publishes the record for other machines, unless one of them has claimed the job.
    pub fn publish(&self, ownership: &Ownership) {
        let _one_at_a_time = self.publishing.lock();
        let record = ownership.record();
        let published = self.remote.change_record(|present| {
            self.check_against(present.as_ref())?;
            Ok::<_, OwnershipError>(Some(public(&record, present.as_ref())))
        });
        match published {
            Ok(()) => {}
            Err(OwnershipError::ClaimedElsewhere(claim)) => {
                tracing::debug!("the record is not published: {claim}");
            }
            Err(OwnershipError::Store(error)) => warn_not_published(&error),
        }
    }

    /// Publishes the record for other machines, even if another launcher owned the job before. An error is only logged:
    /// the snapshots exist without the record.
    pub fn claim(&self, record: &JobRecord) {
        let claimed = |present: Option<JobRecord>| Ok(Some(public(record, present.as_ref())));
        let written = self.remote.change_record(claimed).and_then(|()| self.remote.begin_marks());
        if let Err(error) = written {
            warn_not_published(&error);
        }
    }

    /// As [`Ownership::before_deletion`], for snapshots in the object store. `record` is this machine's.
    ///
    /// # Errors
    /// When another machine has claimed the job, or the record cannot be written. Nothing may be deleted then.
    pub fn before_deletion(&self, record: &JobRecord, ids: &[SnapshotId]) -> Result<(), OwnershipError> {
        let _one_at_a_time = self.publishing.lock();
        self.remote.change_record(|present| {
            self.check_against(present.as_ref())?;
            let deleted = ids.iter().map(SnapshotId::sequence).collect();
            // Publishing it may have failed.
            let present = present.unwrap_or_else(|| public(record, None));
            Ok(Some(JobRecord { deleted, ..present }))
        })
    }

    /// Restores the record from before `launcher` claimed the job, unless another launcher has claimed it since.
    pub fn release(&self, launcher: &str) {
        let Some(previous) = &self.previous else { return };
        let released = self.remote.change_record(|present| {
            let is_ours = present.is_some_and(|remote| remote.launcher == launcher);
            Ok::<_, OpenError>(is_ours.then(|| previous.clone()))
        });
        if let Err(error) = released {
            tracing::debug!("the claim in the object store is not released: {error}");
        }
    }
}

/// What other machines may know of a record: not the command, since the record is not encrypted. `present` is the one
/// that it replaces, which says what was deleted there.
fn public(record: &JobRecord, present: Option<&JobRecord>) -> JobRecord {
    let deleted = present.map(|present| present.deleted.clone()).unwrap_or_default();
    JobRecord { cwd: String::new(), argv: Vec::new(), deleted, ..record.clone() }
}

fn warn_not_published(error: &OpenError) {
    tracing::warn!(
        "cannot write the job's record to the object store: {error}. Another machine may resume from an older snapshot"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::resume_point::rebuilt;
    use ckpt_snapshot::codec::Key;
    use ckpt_snapshot::medium::DirMedium;
    use ckpt_snapshot::{JobKey, StoreRoot};
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::sync::Arc;

    fn handover(dir: &JobDir, remote: &Path) -> Handover {
        Handover {
            remote: dir.clone().with_content_in(Arc::new(DirMedium::new(remote.to_owned()))),
            own_launchers: Vec::new(),
            known_claims: None,
            previous: None,
            publishing: Mutex::new(()),
        }
    }

    /// An object store that does not answer at the start may have planted records when it does.
    #[test]
    fn what_is_planted_is_passed_over_although_the_start_was_not_answered() {
        let tempdir = tempfile::tempdir().unwrap();
        let (remote, file) = (tempdir.path().join("remote"), tempdir.path().join("key"));
        fs::write(&file, (1..33).collect::<Vec<u8>>()).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let root = StoreRoot::open_or_create(&tempdir.path().join("store")).unwrap();
        let plain = root.job(&JobKey::named("job").unwrap());
        drop(plain.lock_to_run(|_| ()).unwrap());
        let dir = plain.clone().with_key(Some(&Key::from_file(&file).unwrap()));
        let ownership = Ownership::claim::<OpenError>(&dir, || Ok(rebuilt(&[]))).unwrap();
        // Not a directory: nothing in it can be read.
        fs::create_dir(&remote).unwrap();
        fs::write(remote.join("job"), "").unwrap();
        let mut started = handover(&dir, &remote);
        started.newer_claim(None).unwrap_err();
        started.begin(vec![ownership.record().launcher]);
        fs::remove_file(remote.join("job")).unwrap();
        handover(&plain, &remote).claim(&ownership.record());
        assert!(started.remote.record().is_err(), "without one that counts");
        started.publish(&ownership);
        assert_eq!(started.remote.record().unwrap().unwrap().launcher, ownership.record().launcher);
        started.check().unwrap();
    }
}
