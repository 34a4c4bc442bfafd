//! `ckpt-run prune`: deletes the snapshots that `--keep` does not keep, in the store and in the object store of `--upload`.

use super::jobs::{each, jobs, last_progress_unix_ms};
use super::print;
use super::remove::reclaim;
use crate::cli::config::Config;
use crate::cluster::NODE;
use crate::job::handover::Handover;
use crate::report::failure::with_remedy;
use crate::store::marks;
use crate::store::root::Root;
use crate::store::tiers::{self, REMOTE};
use crate::sys::error::EXIT_NEGATIVE;
use anyhow::Result;
use ckpt_snapshot::{
    History, JobDir, JobOutcome, Listed, Marks, OpenError, Retention, SnapshotId, Store, Tiers, faults,
};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

/// How many parts of a node of a job are kept at least.
const KEPT_PARTS: usize = 2;

/// A part of a job's store to which `--keep` applies by itself: each keeps its newest snapshots.
struct Place {
    /// For people.
    name: &'static str,
    tiers: &'static [&'static str],
    /// Where it is recorded what is being deleted.
    records: JobDir,
    history: History,
    marks: Marks,
    /// Of the object store.
    handover: Option<Handover>,
    /// Another machine, which may be running the job, prunes here.
    is_of_other_machine: bool,
}

/// What becomes of the snapshots in a place.
struct Outcome {
    place: Place,
    deleted: Vec<SnapshotId>,
    /// Oldest first.
    kept: Vec<Listed>,
    /// Those that machines have pinned or tagged where they share them.
    pinned: BTreeSet<SnapshotId>,
}

/// What becomes of the snapshots of a job.
struct JobOutcomes {
    pruned: Vec<Pruned>,
    /// Lines about what is kept for a reason.
    kept: Vec<String>,
    /// Why the object store was not pruned.
    error: Option<anyhow::Error>,
}

#[derive(Serialize)]
struct Pruned {
    id: SnapshotId,
    job: String,
    removed: bool,
    tiers: Vec<&'static str>,
    /// From where, if it stays elsewhere.
    #[serde(skip)]
    from: Option<&'static str>,
}

/// `ckpt-run prune`.
///
/// # Errors
/// Bad input, or a failed deletion.
pub fn prune(config: &Config, named: Option<&str>, dry_run: bool, json: bool) -> Result<i32> {
    let root = Root::open_to_change(&config.store)?;
    let (done, mut code) = each(&jobs(config, &root, named)?, |job| prune_job(config, job, dry_run))?;
    let (mut pruned, mut kept) = (Vec::new(), Vec::new());
    for done in done {
        pruned.extend(done.pruned);
        kept.extend(done.kept);
        if let Some(error) = done.error {
            tracing::error!("snapshots in the object store are not deleted: {}", with_remedy(&error));
            code = EXIT_NEGATIVE;
        }
    }
    if json {
        return print::json_with(&pruned, code);
    }
    let what = if dry_run { "would remove" } else { "removed" };
    let line = |Pruned { id, job, from, .. }: &Pruned| {
        let from = from.map(|place| format!(" from {place}")).unwrap_or_default();
        format!("{what} {id} of job {job}{from}")
    };
    let mut lines: Vec<_> = pruned.iter().map(line).collect();
    if pruned.is_empty() {
        let why = match kept.is_empty() {
            true => format!(": no job has more than {} valid snapshots", config.keep),
            false => String::new(),
        };
        kept.push(format!("nothing to remove{why}"));
    }
    lines.extend(kept);
    print::printed(writeln!(io::stdout(), "{}", lines.join("\n")), code)
}

/// How many snapshots of a job stay. The newest part of a node may have no global manifest yet, and may never get one.
fn kept_of(config: &Config, job: &JobDir) -> usize {
    let is_part = job.key().as_str().contains(NODE);
    if is_part { config.keep.max(KEPT_PARTS) } else { config.keep }
}

/// Prunes the places of one job. What is on this machine does not depend on the object store.
fn prune_job(config: &Config, job: &JobDir, dry_run: bool) -> Result<JobOutcomes> {
    let retention = Retention { before_failures: false, keep: kept_of(config, job), ..config.retention() };
    if !dry_run {
        job.check_records()?;
    }
    let store = tiers::open(&config.store, job)?;
    let home = home(job, &store)?;
    let mut outcomes = vec![prune_place(home, &store, &retention, None, dry_run)?];
    // The launcher of a running job is not asked for nothing.
    let is_asked_for = |deleted: &[SnapshotId]| !deleted.is_empty() || !job.is_locked();
    if !dry_run && is_asked_for(&outcomes[0].deleted) {
        reclaim(config, &store, job)?;
    }
    let error = match prune_uploads(config, job, &store, &retention, &outcomes[0], dry_run) {
        Ok(uploads) => {
            outcomes.extend(uploads);
            None
        }
        Err(error) => Some(error),
    };
    let mut pruned = pruned(job, &outcomes, dry_run);
    if error.is_some() {
        // They may be in the object store too.
        pruned.iter_mut().for_each(|one| one.from = Some(tiers::home_name(&store)));
    }
    if !dry_run && error.is_none() {
        let gone: Vec<_> = pruned.iter().filter(|one| one.from.is_none()).map(|one| one.id.clone()).collect();
        marks::forget(job, &gone)?;
    }
    let mut kept = kept_for_a_reason(&outcomes, &retention, job);
    if retention.keep > config.keep && outcomes[0].kept.len() > config.keep {
        kept.push(format!(
            "the newest {} of job {} stay: if it is a node of a job, the newest one may never be a snapshot of all nodes",
            retention.keep,
            job.key()
        ));
    }
    Ok(JobOutcomes { pruned, kept, error })
}

/// The store of this machine, or the one at an address.
fn home(job: &JobDir, store: &Tiers) -> Result<Place> {
    // A job that runs may hang.
    let last_progress = job.is_locked().then(|| last_progress_unix_ms(job)).flatten();
    Ok(Place {
        name: tiers::home_name(store),
        tiers: tiers::kept(store),
        records: job.clone(),
        history: tiers::history(job, last_progress)?,
        marks: job.marks()?,
        handover: None,
        is_of_other_machine: false,
    })
}

/// The object store to which snapshots are uploaded, if any.
fn uploads(config: &Config, job: &JobDir, history: &History) -> Result<Option<Place>> {
    let Some(mut handover) = Handover::of(&config.store, job)? else { return Ok(None) };
    let newer_claim = handover.newer_claim(job.record()?.as_ref())?;
    let is_of_other_machine =
        newer_claim.as_ref().is_some_and(|record| record.outcome == JobOutcome::Unfinished);
    if is_of_other_machine {
        tracing::warn!(
            "the job {} was started on another machine last: its snapshots in the object store stay, that machine deletes them",
            job.key()
        );
    }
    let records = handover.records().clone();
    let history = match newer_claim {
        Some(complete) => {
            handover.begin(vec![complete.launcher]);
            tiers::history(&records, None)?
        }
        None => history.clone(),
    };
    Ok(Some(Place {
        name: "the object store",
        tiers: &[REMOTE],
        records,
        history,
        marks: marks::of_all_machines(&config.store, job)?,
        handover: Some(handover),
        is_of_other_machine,
    }))
}

fn prune_uploads(
    config: &Config,
    job: &JobDir,
    store: &Tiers,
    retention: &Retention,
    home: &Outcome,
    dry_run: bool,
) -> Result<Option<Outcome>> {
    let Some(place) = uploads(config, job, &home.place.history)? else { return Ok(None) };
    if !dry_run && !place.is_of_other_machine {
        marks::tell_kept(store.tier(REMOTE)?.store(), job, &job.marks()?)?;
    }
    // Another machine may have uploaded snapshots with higher numbers.
    let newest = home.kept.iter().rfind(|one| one.manifest.is_ok()).map(|one| &one.id);
    let outcome = prune_place(place, store, retention, newest, dry_run)?;
    if !dry_run && !outcome.place.is_of_other_machine {
        reclaim_uploads(config, job, &outcome)?;
    }
    Ok(Some(outcome))
}

/// Reclaims the space of deleted uploads, unless a machine may be running the job: a snapshot that it is saving may need packs that
/// look unused.
fn reclaim_uploads(config: &Config, job: &JobDir, outcome: &Outcome) -> Result<()> {
    let record = outcome.place.records.record()?;
    let is_over = record.is_some_and(|record| record.outcome != JobOutcome::Unfinished);
    if !is_over && !outcome.deleted.is_empty() {
        tracing::info!(
            "the job {} is not complete: a run of it reclaims the space of the deleted uploads, or the next `ckpt-run prune` after its end",
            job.key()
        );
    } else if is_over
        && let Ok(_lock) = job.lock_for_maintenance()
        && let Some(uploads) = tiers::uploads_alone(&config.store, job)?
    {
        uploads.sweep()?;
        uploads.reclaim()?;
    }
    Ok(())
}

/// Prunes one place. `newest` stays there.
fn prune_place(
    place: Place,
    store: &Tiers,
    retention: &Retention,
    newest: Option<&SnapshotId>,
    dry_run: bool,
) -> Result<Outcome> {
    let mut kept = store.list_checked_in(place.tiers)?;
    let mut deleted = Vec::new();
    if !place.is_of_other_machine {
        deleted = store.prunable(place.tiers, retention, &place.marks, &place.history)?;
        deleted.retain(|id| Some(id) != newest);
        if !dry_run {
            deleted = delete_unless_marked(store, &place, &deleted)?;
        }
    }
    kept.retain(|listed| !deleted.contains(&listed.id));
    let mut pinned = BTreeSet::new();
    for tier in place.tiers {
        pinned.extend(store.tier(tier)?.store().pins()?.into_keys());
    }
    Ok(Outcome { place, deleted, kept, pinned })
}

/// What was deleted, oldest first.
fn pruned(job: &JobDir, outcomes: &[Outcome], dry_run: bool) -> Vec<Pruned> {
    let mut places: BTreeMap<&SnapshotId, Vec<&Place>> = BTreeMap::new();
    for outcome in outcomes {
        outcome.deleted.iter().for_each(|id| places.entry(id).or_default().push(&outcome.place));
    }
    let stays = |id: &SnapshotId| outcomes.iter().flat_map(|one| &one.kept).any(|kept| kept.id == *id);
    let pruned = |(id, places): (&SnapshotId, Vec<&Place>)| Pruned {
        id: id.clone(),
        job: job.key().to_string(),
        removed: !dry_run,
        tiers: places.iter().flat_map(|place| place.tiers).copied().collect(),
        from: places.first().map(|place| place.name).filter(|_| stays(id)),
    };
    places.into_iter().map(pruned).collect()
}

/// Deletes those of the snapshots that have not been marked meanwhile, and returns them. A mark that comes later is refused.
fn delete_unless_marked(store: &Tiers, place: &Place, ids: &[SnapshotId]) -> Result<Vec<SnapshotId>> {
    // Also if there are none: what a killed `prune` has left ends here.
    let begin = |ids: &[SnapshotId]| place.records.change_marks(|marks| marks.begin_deletion(ids));
    let mut made_room = Vec::new();
    let mut deleted = match begin(ids) {
        // The record has no room. One snapshot makes some; it is deleted as by `ckpt-run rm`, without a record.
        Err(OpenError::Io { source, .. })
            if source.kind() == io::ErrorKind::StorageFull && place.handover.is_none() =>
        {
            made_room.extend(ids.iter().find(|id| !place.marks.is_kept(id)).cloned());
            delete_unless_pinned(store, place.tiers, &mut made_room)?;
            let others: Vec<_> = ids.iter().filter(|id| !made_room.contains(id)).cloned().collect();
            begin(&others)?
        }
        begun => begun?,
    };
    if deleted.is_empty() {
        return Ok(made_room);
    }
    if let (Some(handover), Some(record)) = (&place.handover, place.records.record()?) {
        handover.before_deletion(&record, &deleted)?;
    }
    faults::hit("prune-recorded")?;
    let begun = deleted.clone();
    let done = delete_unless_pinned(store, place.tiers, &mut deleted);
    // Not those of a `ckpt-run rm` that has begun meanwhile.
    let ended = place.records.change_marks(|marks| marks.end_deletion(&begun));
    done?;
    ended?;
    made_room.extend(deleted);
    Ok(made_room)
}

/// Deletes the snapshots, but for those that other machines keep where they share them: these leave `deleted`.
fn delete_unless_pinned(store: &Tiers, tiers: &[&str], deleted: &mut Vec<SnapshotId>) -> Result<()> {
    for tier in tiers {
        let pins = store.tier(tier)?.store().pins()?;
        deleted.retain(|id| !pins.contains_key(id));
    }
    // The farthest tier first, so that no interrupted deletion uncovers an older copy.
    let delete = |id| tiers.iter().rev().try_for_each(|tier| store.remove_from(id, tier));
    Ok(deleted.iter().try_for_each(delete)?)
}

/// What is kept besides the newest snapshots of each place, and why.
fn kept_for_a_reason(outcomes: &[Outcome], retention: &Retention, job: &JobDir) -> Vec<String> {
    let mut told = Vec::new();
    let is_deleted = |id: &SnapshotId| outcomes.iter().any(|one| one.deleted.contains(id));
    let mut known = BTreeSet::new();
    for outcome in outcomes {
        let newest = outcome.kept.len().saturating_sub(retention.keep);
        for (index, one) in outcome.kept.iter().enumerate() {
            let is_newest = index >= newest && one.manifest.is_ok();
            if is_newest && !is_deleted(&one.id) || !known.insert(&one.id) {
                continue;
            }
            let reason = match is_newest {
                true => format!("it is one of the newest {} there", retention.keep),
                false => outcome.reason(index, retention),
            };
            let place =
                if is_deleted(&one.id) { format!(" in {}", outcome.place.name) } else { String::new() };
            told.push(format!("kept {} of job {}{place}: {reason}", one.id, job.key()));
        }
    }
    told
}

impl Outcome {
    /// Why a snapshot is kept that is none of the newest.
    fn reason(&self, index: usize, retention: &Retention) -> String {
        let one = &self.kept[index];
        let id = &one.id;
        let mark = self.place.marks.of(id);
        let is_sound =
            |listed: &Listed| listed.manifest.as_ref().is_ok_and(|manifest| !manifest.is_doubtful());
        if mark.is_some_and(|mark| mark.pinned) {
            format!("pinned (`ckpt-run unpin {id}`)")
        } else if let Some(tag) = mark.and_then(|mark| mark.tags.first()) {
            format!("it has the tag {tag} (`ckpt-run untag {id} {tag}`)")
        } else if self.pinned.contains(id) {
            format!("another machine has pinned or tagged it (`ckpt-run unpin --all-machines {id}`)")
        } else if let Err(error) = &one.manifest {
            format!("it cannot be read: {error}")
        } else if self.place.is_of_other_machine {
            "another machine may be running the job".to_owned()
        } else if retention.every.is_some() {
            "--keep-every".to_owned()
        } else if self.place.history.last_progress_unix_ms.is_some() {
            "if the job hangs, it is resumed from this one (--hang-timeout)".to_owned()
        } else if is_sound(one) && !self.kept[index + 1..].iter().any(is_sound) {
            "processes of the job had failed before the newer ones were taken".to_owned()
        } else {
            "the newer ones do not count: they were left behind, failed to restore, or cannot be read"
                .to_owned()
        }
    }
}
