//! What a run begins with: the beginning, or a snapshot of the run before.
//!
//! A *run* of a job goes from one start at the beginning to the next; it may be resumed any number of times. Snapshots
//! of earlier runs are never resumed by themselves, and neither are those that were left behind when an older one was
//! resumed, on purpose or for want of a better one: the files have been rolled back past them.

use crate::store::tiers::{self, REMOTE};
use crate::sys::error::bad_input;
use anyhow::{Result, anyhow, bail};
use ckpt_snapshot::{
    JobDir, JobIdentity, JobOutcome, JobRecord, Listed, ReadError, SnapshotId, Store, Tier, Tiers,
};

/// What to do about earlier snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// Resume if there is something to resume.
    #[default]
    Auto,
    /// Start from the beginning.
    Never,
    /// Resume or fail.
    Required,
    /// Resume this one.
    Snapshot(String),
}

/// What a run begins with.
pub struct Decision {
    /// The job's record from now on.
    pub record: JobRecord,
    /// The snapshots it may be resumed from, oldest first; none means the beginning.
    pub candidates: Vec<SnapshotId>,
}

/// Decides from what is in the store and what the user wants; `theirs` is the record of another machine, on which the
/// job has gone on since it ran here.
///
/// # Errors
/// Bad input: nothing to resume, no such snapshot, or one that this version must not read.
pub fn decide(
    resume: &Resume,
    dir: &JobDir,
    store: &Tiers,
    identity: &JobIdentity,
    theirs: Option<JobRecord>,
) -> Result<Decision> {
    let is_taken_up = theirs.is_some();
    let known = match theirs {
        Some(theirs) => Some(JobRecord { claims: theirs.claims + 1, ..theirs }),
        None => dir.record()?,
    };
    let mut listed = tiers::list_local(store)?;
    let old_up_to = known.as_ref().map_or(0, |record| record.claimed_at_sequence);
    let is_old = |one: &Listed| one.id.sequence() <= old_up_to;
    if is_taken_up || (old_up_to > 0 && listed.iter().all(is_old)) {
        // What is here is old. If the rest cannot be listed, going on from it would throw work away.
        let all: Vec<_> = store.tiers().iter().map(Tier::name).collect();
        listed = store.list_in(&all)?;
    } else if listed.is_empty() {
        // What is far away is looked at only if there is nothing here.
        listed = store.list()?;
    }
    if *resume != Resume::Never {
        refuse_what_is_not_damage(&listed)?;
    }
    let mut before = known.unwrap_or_else(|| rebuilt(&listed));
    if is_taken_up {
        before.last_sequence = before.last_sequence.max(newest_sequence(&listed));
        before.claimed_at_sequence = before.last_sequence;
    }
    let candidates = match resume {
        Resume::Never => Vec::new(),
        Resume::Auto if before.outcome == JobOutcome::Complete => Vec::new(),
        Resume::Auto => of_history(store, &listed, &before),
        Resume::Required => {
            let found = of_history(store, &listed, &before);
            if found.is_empty() {
                bail!(bad_input(anyhow!(
                    "there is nothing to resume: the job {} has no snapshot",
                    dir.key()
                )));
            }
            found
        }
        Resume::Snapshot(text) => vec![(store as &dyn Store).find(text)?],
    };
    let mut record = record(&before, &listed, &candidates, identity);
    if dir.records_medium().is_some() {
        // Nothing needs them, and they would be there for all to read who can read the store, encrypted or not.
        (record.cwd, record.argv) = (String::new(), Vec::new());
    }
    Ok(Decision { record, candidates })
}

/// The snapshots from which the present run may go on, oldest first.
///
/// # Errors
/// When the store cannot be read.
pub fn of_present_run(dir: &JobDir, store: &Tiers) -> Result<Vec<SnapshotId>> {
    let listed = tiers::list_local(store)?;
    let record = dir.record()?.unwrap_or_else(|| rebuilt(&listed));
    Ok(of_history(store, &listed, &record))
}

/// The snapshots of the present run that are not of a machine on which it did not go on, oldest first.
fn of_history(store: &Tiers, listed: &[Listed], record: &JobRecord) -> Vec<SnapshotId> {
    let of_run = of_run(listed, record).into_iter();
    of_run.filter(|id| is_of_this_history(store, record, id)).collect()
}

/// Whether the snapshot is not one that was taken here while the job went on elsewhere. Two of the same number and
/// second have the same ID.
fn is_of_this_history(store: &Tiers, record: &JobRecord, id: &SnapshotId) -> bool {
    let Ok(remote) = store.tier(REMOTE) else { return true };
    if id.sequence() > record.claimed_at_sequence {
        return true;
    }
    let taken = |tier: &Tier| tier.store().manifest(id).map(|manifest| manifest.taken_unix_ms);
    match taken(remote) {
        Ok(there) => {
            let mut others = store.tiers().iter().filter(|tier| tier.name() != REMOTE);
            others.all(|tier| taken(tier).map_or(true, |here| here == there))
        }
        // It is told when it is its turn.
        Err(error) => !matches!(error, ReadError::Missing(_)),
    }
}

/// Whether it is no damage, so that going on without the snapshot would throw away work that is there: a newer version,
/// a path that climbs out, a missing key.
pub fn is_for_the_user(error: &ReadError) -> bool {
    matches!(
        error,
        ReadError::Newer { .. }
            | ReadError::NewerObject { .. }
            | ReadError::Hostile { .. }
            | ReadError::Key { .. }
    )
}

/// What is nobody's accident is not passed over.
fn refuse_what_is_not_damage(listed: &[Listed]) -> Result<()> {
    for one in listed {
        if let Err(error) = &one.manifest
            && is_for_the_user(error)
        {
            bail!(bad_input(anyhow!("{error}")));
        }
    }
    Ok(())
}

fn newest_sequence(listed: &[Listed]) -> u64 {
    listed.last().map_or(0, |one| one.id.sequence())
}

fn run_of(one: &Listed) -> Option<u64> {
    one.manifest.as_ref().ok().map(|manifest| manifest.run)
}

/// The record of a job that has lost it.
#[must_use]
pub fn rebuilt(listed: &[Listed]) -> JobRecord {
    JobRecord {
        version: 1,
        cwd: String::new(),
        argv: Vec::new(),
        run: listed.iter().filter_map(run_of).max().unwrap_or(0),
        last_sequence: newest_sequence(listed),
        sequence_before_run: 0,
        abandoned: Vec::new(),
        claims: 0,
        claimed_at_sequence: 0,
        launcher: String::new(),
        outcome: JobOutcome::Unfinished,
    }
}

/// The snapshots of the present run. A damaged manifest does not say which run it belongs to, but its number does.
fn of_run(listed: &[Listed], record: &JobRecord) -> Vec<SnapshotId> {
    let belongs = |one: &&Listed| match run_of(one) {
        Some(run) => run == record.run,
        None => one.id.sequence() > record.sequence_before_run,
    };
    let kept = |one: &&Listed| {
        let number = one.id.sequence();
        !record.abandoned.iter().any(|(first, last)| (*first..=*last).contains(&number))
    };
    listed.iter().filter(belongs).filter(kept).map(|one| one.id.clone()).collect()
}

fn record(
    before: &JobRecord,
    listed: &[Listed],
    candidates: &[SnapshotId],
    identity: &JobIdentity,
) -> JobRecord {
    let last_sequence = before.last_sequence.max(newest_sequence(listed));
    let mut record = JobRecord {
        cwd: identity.cwd.clone(),
        argv: identity.argv.clone(),
        last_sequence,
        outcome: JobOutcome::Unfinished,
        ..before.clone()
    };
    let resumed = candidates.last().and_then(|id| listed.iter().find(|one| &one.id == id));
    match (resumed, resumed.and_then(run_of)) {
        (None, _) => {
            record.run = before.run + 1;
            record.sequence_before_run = last_sequence;
            record.claimed_at_sequence = 0;
            record.abandoned = Vec::new();
        }
        // A snapshot of an earlier run, asked for by name: that run goes on.
        (Some(_), Some(run)) if run != before.run => {
            record.run = run;
            record.sequence_before_run = 0;
            record.abandoned = Vec::new();
        }
        _ => {}
    }
    record
}

/// The job is resumed from `id`: what is newer is of a history that did not happen.
pub fn abandon_after(record: &mut JobRecord, id: &SnapshotId) {
    let newer = (id.sequence() + 1, record.last_sequence);
    if newer.0 <= newer.1 && !record.abandoned.contains(&newer) {
        record.abandoned.push(newer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_snapshot::{Damage, Manifest};
    use std::time::SystemTime;

    /// A listing: (number, run); no run means a damaged manifest.
    fn listing(snapshots: &[(u64, Option<u64>)]) -> Vec<Listed> {
        let one = |(number, run): &(u64, Option<u64>)| {
            let id = SnapshotId::new(*number, SystemTime::UNIX_EPOCH);
            let damage =
                || ReadError::Damaged { id: id.to_string(), damage: Damage::Manifest("gone".into()) };
            let manifest = run.map(|run| Manifest {
                run,
                id: id.clone(),
                ..crate::checkpoint::attempt::tests::manifest(vec![])
            });
            Listed { manifest: manifest.ok_or_else(damage), id: id.clone() }
        };
        snapshots.iter().map(one).collect()
    }

    fn numbers(ids: &[SnapshotId]) -> Vec<u64> {
        ids.iter().map(SnapshotId::sequence).collect()
    }

    fn identity() -> JobIdentity {
        JobIdentity { key: "job".into(), cwd: "/".into(), argv: vec![] }
    }

    #[test]
    fn only_snapshots_of_the_run_are_resumed() {
        let listed = listing(&[(1, Some(1)), (2, None), (3, Some(2)), (4, None)]);
        let record = JobRecord { run: 2, sequence_before_run: 2, ..rebuilt(&listed) };
        assert_eq!(numbers(&of_run(&listed, &record)), [3, 4], "a damaged one by its number");
        let fresh = JobRecord { run: 3, sequence_before_run: 4, ..record };
        assert_eq!(numbers(&of_run(&listed, &fresh)), [0; 0]);
    }

    #[test]
    fn what_was_left_behind_stays_behind() {
        let mut listed = listing(&[(1, Some(1)), (2, Some(1)), (3, Some(1))]);
        let mut record = rebuilt(&listed);
        abandon_after(&mut record, &listed[0].id);
        abandon_after(&mut record, &listed[0].id);
        assert_eq!(record.abandoned, [(2, 3)], "once is enough");
        assert_eq!(numbers(&of_run(&listed, &record)), [1]);
        listed.extend(listing(&[(4, Some(1))]));
        assert_eq!(numbers(&of_run(&listed, &record)), [1, 4], "and the new branch goes on");
        record.last_sequence = 4;
        abandon_after(&mut record, &listed[3].id);
        assert_eq!(record.abandoned, [(2, 3)], "the newest leaves nothing behind");
    }

    #[test]
    fn a_start_from_the_beginning_is_a_new_run() {
        let listed = listing(&[(1, Some(1)), (7, Some(1))]);
        let before = JobRecord { abandoned: vec![(2, 3)], ..rebuilt(&listed) };
        let fresh = record(&before, &listed, &[], &identity());
        assert_eq!((fresh.run, fresh.sequence_before_run, fresh.last_sequence), (2, 7, 7));
        assert!(fresh.abandoned.is_empty());
        let resumed = record(&fresh, &listed, &[listed[0].id.clone()], &identity());
        assert_eq!(resumed.run, 1, "a snapshot of an earlier run takes that run up again");
    }
}
