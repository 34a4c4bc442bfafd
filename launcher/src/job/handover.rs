//! What another machine has to know that takes the job up from the object store that its snapshots are uploaded to
//! (`--upload`): the job's record, beside them. Without it, a job that is complete would be resumed there, and a machine
//! that the job comes back to would go on from the old snapshots on its own disk.

use crate::job::ownership::{Ownership, OwnershipError, TakenUp};
use crate::store::options::StoreOptions;
use crate::store::tiers;
use crate::sys::deadline::RECORD_STALL_TIMEOUT;
use crate::sys::deadline::STORE_RETRY_TIMEOUT;
use anyhow::Result;
use ckpt_object_medium::{Options, Retry};
use ckpt_snapshot::{JobDir, JobRecord, OpenError};
use parking_lot::Mutex;
/// The record of a job beside its uploaded snapshots.
pub struct Handover {
    place: JobDir,
    /// This launcher, and those whose work it goes on with.
    ours: Vec<String>,
    /// How often the job had been taken up by what this machine knew, if it knew of it. A record there that says no
    /// more is of the past, even if nobody could be told.
    known_taken_up: Option<u64>,
    /// The record there before this launcher claimed the job.
    before: Option<JobRecord>,
    /// Held while the record is left.
    leaving: Mutex<()>,
}

impl Handover {
    /// That of the job in `dir`, if its snapshots are uploaded. Nothing is sent yet.
    ///
    /// # Errors
    /// Bad input: an address that does not fit what the environment says of it.
    pub fn of(options: &StoreOptions, dir: &JobDir) -> Result<Option<Self>> {
        let retry =
            Retry { give_up_after: STORE_RETRY_TIMEOUT, stall: RECORD_STALL_TIMEOUT, ..Retry::default() };
        let medium = tiers::uploads(options, dir, Options { retry, ..Options::default() })?;
        let of = |medium| Self {
            place: dir.clone().with_content_in(medium),
            ours: Vec::new(),
            known_taken_up: None,
            before: None,
            leaving: Mutex::new(()),
        };
        Ok(medium.map(of))
    }

    /// The record that another machine has left, if the job has gone on there since it ran here.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn newer_claim(&mut self, ours: Option<&JobRecord>) -> Result<Option<JobRecord>, OpenError> {
        self.known_taken_up = ours.map(|ours| ours.taken_up);
        self.before = self.place.record()?;
        Ok(self.before.clone().filter(|theirs| is_ahead(theirs, ours)))
    }

    /// The job is this launcher's when the record there has one of these names: its own, and those of whom it goes on
    /// from, which stay there until it reaches the place for the first time.
    pub fn begin(&mut self, launchers: Vec<String>) {
        self.ours = launchers;
    }

    /// Whether the job is still this launcher's, as far as other machines have said.
    ///
    /// # Errors
    /// When it is not, or the object store cannot tell.
    pub fn check(&self) -> Result<(), OwnershipError> {
        match self.place.record() {
            Ok(Some(there))
                if !self.ours.contains(&there.launcher)
                    && self.known_taken_up.is_none_or(|known| there.taken_up > known) =>
            {
                Err(TakenUp::by(&self.place, &there.launcher).into())
            }
            Ok(_) | Err(OpenError::Unreadable { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Leaves the record for other machines, unless one of them has taken the job up.
    pub fn leave(&self, ownership: &Ownership) {
        let _one_after_the_other = self.leaving.lock();
        match self.check() {
            Ok(()) => self.claim(&ownership.record()),
            Err(OwnershipError::TakenUp(taken)) => tracing::debug!("the record is not left: {taken}"),
            Err(OwnershipError::Store(error)) => not_noted(&error),
        }
    }

    /// Leaves the record for other machines: the job is this launcher's, whosever it was. What fails is told and no
    /// more: the snapshots are there.
    pub fn claim(&self, record: &JobRecord) {
        // Nothing needs them there, and all could read them who can read the store, encrypted or not.
        let record = JobRecord { cwd: String::new(), argv: Vec::new(), ..record.clone() };
        if let Err(error) = self.place.set_record(&record) {
            not_noted(&error);
        }
    }

    /// Puts the record back that was there before `launcher` claimed the job, unless somebody else has it by now.
    pub fn release(&self, launcher: &str) {
        let there = self.place.record();
        if let (Ok(Some(there)), Some(before)) = (there, &self.before)
            && there.launcher == launcher
        {
            self.claim(before);
        }
    }
}

fn not_noted(error: &OpenError) {
    tracing::warn!(
        "how far the job is was not noted in the object store: {error}. Another machine may go on from an older state"
    );
}

/// Whether their record is of a later time than ours.
fn is_ahead(theirs: &JobRecord, ours: Option<&JobRecord>) -> bool {
    ours.is_none_or(|ours| theirs.taken_up > ours.taken_up)
}
