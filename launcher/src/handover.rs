//! What another machine has to know that takes the job up from the object store that its snapshots are uploaded to
//! (`--upload`): the job's record, beside them. Without it, a job that is complete would be resumed there, and a machine
//! that the job comes back to would go on from the old snapshots on its own disk.

use crate::config::Config;
use crate::ownership::{OwnershipError, TakenUp};
use crate::root::PATIENCE;
use crate::stores;
use anyhow::Result;
use ckpt_object_medium::{Options, Retry};
use ckpt_snapshot::{JobDir, JobRecord, OpenError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A request has failed when nothing was heard for this long: it is a small one.
const STALL: Duration = Duration::from_secs(5);

/// The record of a job beside its uploaded snapshots.
pub struct Handover {
    place: JobDir,
    /// The launchers whose work this one goes on with.
    predecessors: Vec<String>,
}

impl Handover {
    /// That of the job in `dir`, if its snapshots are uploaded. Nothing is sent yet.
    ///
    /// # Errors
    /// Bad input: an address that does not fit what the environment says of it.
    pub fn of(config: &Config, dir: &JobDir) -> Result<Option<Self>> {
        let retry = Retry { give_up_after: PATIENCE, stall: STALL, ..Retry::default() };
        let medium = stores::uploads(config, dir, Options { retry, ..Options::default() })?;
        Ok(medium.map(|medium| Self { place: dir.clone().with_content_in(medium), predecessors: Vec::new() }))
    }

    /// The record that another machine has left, if the job has gone on there since it ran here.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn taken_up_elsewhere(&self, ours: Option<&JobRecord>) -> Result<Option<JobRecord>, OpenError> {
        Ok(self.place.record()?.filter(|theirs| is_ahead(theirs, ours)))
    }

    /// This launcher goes on from what these say.
    pub fn goes_on_from<'a>(&mut self, records: impl Iterator<Item = &'a JobRecord>) {
        self.predecessors = records.map(|record| record.launcher.clone()).collect();
    }

    /// Whether the job is still that of the launcher whose record is `ours`, as far as other machines have said.
    ///
    /// # Errors
    /// When it is not, or the object store cannot tell.
    pub fn check(&self, ours: &JobRecord) -> Result<(), OwnershipError> {
        match self.place.record() {
            Ok(Some(there))
                if there.launcher != ours.launcher && !self.predecessors.contains(&there.launcher) =>
            {
                Err(TakenUp::by(&self.place, &there.launcher).into())
            }
            Ok(_) | Err(OpenError::Unreadable { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Leaves the record for other machines, unless one of them has taken the job up.
    pub fn leave(&self, record: &JobRecord) {
        match self.check(record) {
            Ok(()) => self.claim(record),
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
}

fn not_noted(error: &OpenError) {
    tracing::warn!(
        "how far the job is was not noted in the object store: {error}. Another machine may go on from an older state"
    );
}

/// Leaves the record, and waits for that until then at most.
pub fn leave_until(handover: &Arc<Handover>, record: JobRecord, until: Instant) {
    let (done, is_done) = crossbeam_channel::bounded::<()>(0);
    let handover = Arc::clone(handover);
    let work = move || {
        handover.leave(&record);
        drop(done);
    };
    if let Err(error) = std::thread::Builder::new().name("handover".to_owned()).spawn(work) {
        tracing::warn!("how far the job is was not noted in the object store: {error}");
    }
    let _ = is_done.recv_deadline(until);
}

/// Whether their record is of a later time than ours.
fn is_ahead(theirs: &JobRecord, ours: Option<&JobRecord>) -> bool {
    ours.is_none_or(|ours| theirs.taken_up > ours.taken_up)
}
