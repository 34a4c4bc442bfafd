//! The resume point: whether a job starts from the beginning or from a snapshot, and from which.
//!
//! A *run* of a job lasts from one start at the beginning to the next, and may be resumed any number of times. Snapshots
//! of earlier runs are resumed only on request. So are abandoned ones: when an older snapshot is resumed, the files are
//! rolled back, and newer snapshots do not match them any more.

use crate::store::tiers::{self, REMOTE, REPLICA};
use crate::sys::error::bad_input;
use anyhow::{Result, anyhow, bail};
use ckpt_snapshot::{
    JobDir, JobIdentity, JobOutcome, JobRecord, Listed, Manifest, Marks, ReadError, SnapshotId, Store, Tier,
    Tiers,
};
use std::time::Duration;

/// What `--resume` asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// Resume if there is a snapshot.
    #[default]
    Auto,
    /// Start from the beginning.
    Never,
    /// Resume or fail.
    Required,
    /// Resume this snapshot.
    Snapshot(String),
}

/// Where a run begins.
pub struct Decision {
    /// The job's record from now on.
    pub record: JobRecord,
    /// The snapshots to resume from, oldest first; none means the beginning.
    pub candidates: Vec<SnapshotId>,
}

/// Decides where a run begins. `newer` is the record of another machine that has claimed the job since it ran here.
///
/// # Errors
/// Bad input: nothing to resume, no such snapshot, or a snapshot that this version must not read.
pub fn decide(
    resume: &Resume,
    dir: &JobDir,
    store: &Tiers,
    identity: &JobIdentity,
    newer: Option<JobRecord>,
) -> Result<Decision> {
    let is_claimed_elsewhere = newer.is_some();
    let known = match newer {
        Some(newer) => Some(JobRecord { claims: newer.claims + 1, ..newer }),
        None => dir.record()?,
    };
    let wanted = match resume {
        Resume::Snapshot(text) => Some((store as &dyn Store).find(text)?),
        _ => None,
    };
    let listed = list(store, known.as_ref(), wanted.as_ref(), is_claimed_elsewhere)?;
    if *resume != Resume::Never {
        refuse_unless_damage(&listed)?;
    }
    let mut before = known.unwrap_or_else(|| rebuilt(&listed));
    if is_claimed_elsewhere {
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
        Resume::Snapshot(_) => wanted.iter().cloned().collect(),
    };
    let mut record = record(&before, &listed, &candidates, identity);
    if dir.records_medium().is_some() {
        // Other machines do not need the command, and the record is not encrypted.
        (record.cwd, record.argv) = (String::new(), Vec::new());
    }
    Ok(Decision { record, candidates })
}

/// The snapshots among which to choose. The object store is listed only if the newest of the history may not be here.
fn list(
    store: &Tiers,
    known: Option<&JobRecord>,
    wanted: Option<&SnapshotId>,
    is_claimed_elsewhere: bool,
) -> Result<Vec<Listed>, ReadError> {
    let listed = tiers::list_local(store)?;
    let is_elsewhere = |id: &SnapshotId| listed.iter().all(|one| one.id != *id);
    let is_last_elsewhere = |record: &JobRecord| {
        let last = record.resumed_from.as_ref();
        last.is_some_and(|id| is_elsewhere(id) && of_run(&listed, record).last() < Some(id))
    };
    let old_up_to = known.map_or(0, |record| record.claimed_at_sequence);
    let is_old = |one: &Listed| one.id.sequence() <= old_up_to;
    if is_claimed_elsewhere
        || (old_up_to > 0 && listed.iter().all(is_old))
        || wanted.is_some_and(is_elsewhere)
    {
        // If the others cannot be listed, resuming from an old one would discard work.
        return list_all(store);
    }
    match known {
        // It may be in the object store, or have been in memory only.
        Some(record) if is_last_elsewhere(record) => list_all(store).or_else(|error| {
            if of_run(&listed, record).is_empty() {
                return Err(error);
            }
            tracing::warn!("{error}. The job resumes from an older snapshot of this machine");
            Ok(listed)
        }),
        _ if listed.is_empty() => list_all(store),
        _ => Ok(listed),
    }
}

/// Those of all tiers. Replicas that cannot be listed are left out: node 0 says which snapshot is resumed.
fn list_all(store: &Tiers) -> Result<Vec<Listed>, ReadError> {
    let mut names: Vec<_> = store.tiers().iter().map(Tier::name).collect();
    store.list_in(&names).or_else(|error| {
        if store.tier(REPLICA).is_err() {
            return Err(error);
        }
        tracing::warn!("the replicas of this node may not be usable: {error}");
        names.retain(|name| *name != REPLICA);
        store.list_in(&names)
    })
}

/// The snapshots from which the current run may be resumed, oldest first.
///
/// # Errors
/// When the store cannot be read.
pub fn of_present_run(dir: &JobDir, store: &Tiers) -> Result<Vec<SnapshotId>> {
    let listed = tiers::list_local(store)?;
    let record = dir.record()?.unwrap_or_else(|| rebuilt(&listed));
    Ok(of_history(store, &listed, &record))
}

/// Those of `listed`, all of the job's snapshots, from which its next run may be resumed, oldest first.
///
/// # Errors
/// When the job's record cannot be read.
pub fn of_next_run(dir: &JobDir, store: &Tiers, listed: &[Listed]) -> Result<Vec<SnapshotId>> {
    let record = dir.record()?.unwrap_or_else(|| rebuilt(listed));
    let is_over = record.outcome == JobOutcome::Complete;
    Ok(if is_over { Vec::new() } else { of_history(store, listed, &record) })
}

/// A job whose processes fail again and again gets on without them: what is not doubtful would be too old for it.
const DOUBT_REACH: Duration = Duration::from_secs(2 * 3600);

/// The snapshot to which a step back leads.
#[derive(Debug, PartialEq, Eq)]
pub struct OlderSnapshot {
    /// The oldest snapshot that is left out.
    pub left_out: SnapshotId,
    /// How much older the snapshot is than the one that the job was resumed from.
    pub older_by: Duration,
    /// Whether it is doubtful itself.
    pub is_doubtful: bool,
}

/// The next snapshot of `candidates` (oldest first) that is older than `began_from`, by `latency` at least, and is not
/// doubtful if that one is. Without such a snapshot, or where it would be older by more than two hours, the next older
/// one. Where all older ones are bad, they are better than none.
pub fn older_one(
    candidates: &[SnapshotId],
    began_from: &Manifest,
    marks: &Marks,
    latency: Duration,
    manifest: impl Fn(&SnapshotId) -> Option<Manifest>,
) -> Option<OlderSnapshot> {
    let count = candidates.partition_point(|id| id.sequence() < began_from.id.sequence());
    let older = &candidates[..count];
    let is_skipped = |id: &SnapshotId| marks.is_bad(id) && !older.iter().all(|id| marks.is_bad(id));
    let mut next = None;
    for (index, id) in older.iter().enumerate().rev().filter(|(_, id)| !is_skipped(id)) {
        let Some(manifest) = manifest(id) else { continue };
        let older_ms = began_from.taken_unix_ms.saturating_sub(manifest.taken_unix_ms);
        let older_by = Duration::from_millis(older_ms);
        let left_out = older.get(index + 1).unwrap_or(&began_from.id).clone();
        let one = OlderSnapshot { left_out, older_by, is_doubtful: manifest.is_doubtful() };
        if older_by >= latency && !(began_from.is_doubtful() && one.is_doubtful) {
            return if older_by <= DOUBT_REACH { Some(one) } else { next.or(Some(one)) };
        }
        next.get_or_insert(one);
    }
    next
}

/// The snapshots of the current run, oldest first, without those of a machine that lost the job to another one.
fn of_history(store: &Tiers, listed: &[Listed], record: &JobRecord) -> Vec<SnapshotId> {
    let of_run = of_run(listed, record).into_iter();
    of_run.filter(|id| is_of_this_history(store, record, id)).collect()
}

/// Whether the snapshot belongs to the job's history. One that was taken here while another machine owned the job does
/// not. Two snapshots of the same number and second have the same ID.
fn is_of_this_history(store: &Tiers, record: &JobRecord, id: &SnapshotId) -> bool {
    let Ok(remote) = store.tier(REMOTE) else { return true };
    if id.sequence() > record.claimed_at_sequence || record.resumed_from.as_ref() == Some(id) {
        return true;
    }
    let taken = |tier: &Tier| tier.store().manifest(id).map(|manifest| manifest.taken_unix_ms);
    match taken(remote) {
        Ok(there) => {
            let mut others = store.tiers().iter().filter(|tier| tier.name() != REMOTE);
            others.all(|tier| taken(tier).map_or(true, |here| here == there))
        }
        // The error is reported when the snapshot is resumed.
        Err(error) => !matches!(error, ReadError::Missing(_)),
    }
}

/// Whether an error needs the user's decision, since the snapshot is not damaged and skipping it would discard work: a
/// newer version, a path outside of the store, a missing key.
pub fn is_for_the_user(error: &ReadError) -> bool {
    matches!(
        error,
        ReadError::Newer { .. }
            | ReadError::NewerObject { .. }
            | ReadError::Hostile { .. }
            | ReadError::Key { .. }
    )
}

/// Refuses snapshots that cannot be read for another reason than damage: they must not be skipped.
fn refuse_unless_damage(listed: &[Listed]) -> Result<()> {
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

/// A new record for a job whose record is missing or damaged.
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
        deleted: Vec::new(),
        resumed_from: None,
        claims: 0,
        claimed_at_sequence: 0,
        launcher: String::new(),
        outcome: JobOutcome::Unfinished,
        is_removed: false,
    }
}

/// The snapshots of the current run. With a damaged manifest, the number of the snapshot tells the run.
fn of_run(listed: &[Listed], record: &JobRecord) -> Vec<SnapshotId> {
    let belongs = |one: &&Listed| {
        one.id.sequence() > record.sequence_before_run && run_of(one).is_none_or(|run| run == record.run)
    };
    let kept = |one: &&Listed| {
        let number = one.id.sequence();
        let is_abandoned = record.abandoned.iter().any(|(first, last)| (*first..=*last).contains(&number));
        match &record.resumed_from {
            // Two machines may have taken snapshots of the same number.
            Some(id) if id.sequence() == number => *id == one.id,
            _ => !is_abandoned && !record.deleted.contains(&number),
        }
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
        is_removed: false,
        ..before.clone()
    };
    let resumed = candidates.last().and_then(|id| listed.iter().find(|one| &one.id == id));
    match (resumed, resumed.and_then(run_of)) {
        (None, _) => {
            // The run may have been one to which the job had returned.
            record.run = listed.iter().filter_map(run_of).fold(before.run, u64::max) + 1;
            record.sequence_before_run = last_sequence;
            record.claimed_at_sequence = 0;
            record.abandoned = Vec::new();
            record.resumed_from = None;
        }
        // A snapshot of an earlier run was requested: that run continues.
        (Some(_), Some(run)) if run != before.run => {
            record.run = run;
            record.sequence_before_run = 0;
            record.abandoned = Vec::new();
        }
        _ => {}
    }
    record
}

/// Marks all snapshots newer than `id` as abandoned, since the job is resumed from `id`.
pub fn abandon_after(record: &mut JobRecord, id: &SnapshotId) {
    // It may have been abandoned itself. What continued the snapshot before it follows it in number.
    record.abandoned.retain(|(first, last)| !(*first..=*last).contains(&id.sequence()));
    record.resumed_from = Some(id.clone());
    let newer = (id.sequence() + 1, record.last_sequence);
    if newer.0 <= newer.1 && !record.abandoned.contains(&newer) {
        record.abandoned.push(newer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_snapshot::{Damage, FailedProcess};
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
    fn a_step_back_leads_to_the_next_older_one_that_may_help() {
        // One every 20 s; the second one cannot be read.
        let mut listed =
            listing(&[(1, Some(1)), (2, None), (3, Some(1)), (4, Some(1)), (5, Some(1)), (6, Some(1))]);
        for one in &mut listed {
            let sequence = one.id.sequence();
            if let Ok(manifest) = &mut one.manifest {
                manifest.taken_unix_ms = sequence * 20_000;
            }
        }
        let ids: Vec<_> = listed.iter().map(|one| one.id.clone()).collect();
        let step = |listed: &[Listed], from: usize, bad: &[usize], latency_s: u64| {
            let manifest =
                |id: &SnapshotId| listed.iter().find(|one| one.id == *id)?.manifest.as_ref().ok().cloned();
            let mut marks = Marks::default();
            for number in bad.iter().chain(bad) {
                marks.restore_failed(&ids[number - 1], "no", SystemTime::UNIX_EPOCH);
            }
            let latency = Duration::from_secs(latency_s);
            let older = older_one(&ids, &manifest(&ids[from - 1]).unwrap(), &marks, latency, manifest)?;
            Some((older.left_out.sequence(), older.older_by.as_secs()))
        };
        assert_eq!(step(&listed, 6, &[], 0), Some((6, 20)));
        assert_eq!(step(&listed, 3, &[], 0), Some((2, 40)), "2 is damaged");
        assert_eq!(step(&listed, 6, &[5, 4], 0), Some((4, 60)), "5 and 4 are bad");
        assert_eq!(step(&listed, 6, &[], 60), Some((4, 60)));
        assert_eq!(step(&listed, 4, &[], 60), Some((2, 60)));
        assert_eq!(step(&listed, 4, &[], 90), Some((4, 20)), "none is as old");
        assert_eq!(step(&listed, 3, &[1, 2], 0), Some((2, 40)), "all are bad");
        assert_eq!(step(&listed, 1, &[], 0), None);
        let failed = FailedProcess { pid: 7, name: "python3".to_owned(), code: 137 };
        for one in &mut listed[3..] {
            one.manifest.as_mut().unwrap().failed_process = Some(failed.clone());
        }
        assert_eq!(step(&listed, 6, &[], 0), Some((4, 60)), "5 and 4 are doubtful");
        assert_eq!(step(&listed, 6, &[3, 1], 0), Some((6, 20)), "all that are good are doubtful");
        for one in &mut listed[3..] {
            one.manifest.as_mut().unwrap().taken_unix_ms += 3 * 3_600_000;
        }
        assert_eq!(step(&listed, 6, &[], 0), Some((6, 20)), "processes have failed for hours");
        assert_eq!(step(&listed, 4, &[], 0), Some((4, 3 * 3600 + 20)), "there is no other");
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
        let mut listed = listed;
        listed.extend(listing(&[(8, Some(2))]));
        let again = record(&resumed, &listed, &[], &identity());
        assert_eq!((again.run, again.sequence_before_run), (3, 8), "run 2 is not begun twice");
        assert_eq!(numbers(&of_run(&listed, &JobRecord { run: 2, ..again })), [0; 0], "nor continued by it");
    }
}
