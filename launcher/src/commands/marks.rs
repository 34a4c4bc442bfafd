//! `ckpt-run tag`, `untag`, `pin`, `unpin`, `unmark`: marks of snapshots.

use super::snapshots::find_to_change;
use crate::cli::config::Config;
use crate::store::marks::{self, TagChange};
use crate::store::tiers::{self, REMOTE};
use crate::sys::error::{EXIT_NEGATIVE, EXIT_OWN, bad_input};
use anyhow::{Context, Result, anyhow, bail};
use ckpt_object_medium::Options;
use ckpt_snapshot::{JobDir, Marks, ReadError, SnapshotId};

/// Adds a tag to a snapshot. It moves from another snapshot of the job: a tag names one.
///
/// # Errors
/// Bad input: no such snapshot, an invalid tag, or a snapshot that is being deleted.
pub fn tag(config: &Config, text: &str, tag: &str) -> Result<i32> {
    let (job, id) = find_to_change(config, text)?;
    let before = marks::known(&config.store, &job)?;
    let moved = job.change_marks(|marks| marks.tag(&id, tag))?.map_err(bad_input)?;
    // Before what may fail: a repeated command finds nothing to move.
    for other in before.tagged(tag).filter(|other| **other != id) {
        tracing::info!(
            "the tag {tag} has moved from {other} to {id}{}",
            if moved.contains(other) {
                format!(", and no longer keeps {other} from being pruned")
            } else {
                format!(
                    ". The machine that had set it keeps {other}, until `ckpt-run unpin --all-machines {other}` there"
                )
            }
        );
    }
    let mut code = 0;
    for other in &moved {
        if let Err(error) = marks::share(&config.store, &job, other, None) {
            tracing::error!(
                "the object store was not told that {tag} no longer keeps {other}: {error:#}. If nothing else is to keep it: `ckpt-run unpin {other}`"
            );
            code = EXIT_OWN;
        }
    }
    share(config, &job, &id, Some(TagChange::Set(tag)))?;
    refuse_deleted(config, &job, &id)?;
    Ok(code)
}

/// Removes a tag; exit code 1 when the snapshot does not have it.
///
/// # Errors
/// Bad input: no such snapshot.
pub fn untag(config: &Config, text: &str, tag: &str) -> Result<i32> {
    let (job, id) = find_to_change(config, text)?;
    if !marks::known(&config.store, &job)?.tagged(tag).any(|tagged| *tagged == id) {
        tracing::error!("the snapshot {id} has no tag {tag:?}");
        return Ok(EXIT_NEGATIVE);
    }
    // Also from another one that had it here before another machine has moved the tag.
    let before = job.change_marks(|marks| {
        let tagged: Vec<_> = marks.tagged(tag).cloned().collect();
        for id in &tagged {
            marks.untag(id, tag);
        }
        tagged
    })?;
    for other in before.iter().filter(|other| **other != id) {
        share(config, &job, other, None)?;
    }
    share(config, &job, &id, Some(TagChange::Removed(tag)))
}

/// Lets `--keep` apply to a snapshot again; with `of_all_machines` also where other machines have marked it.
///
/// # Errors
/// Bad input: no such snapshot.
pub fn unpin(config: &Config, text: &str, of_all_machines: bool) -> Result<i32> {
    let (job, id) = find_to_change(config, text)?;
    job.change_marks(|marks| {
        marks.unpin(&id);
        if of_all_machines {
            marks.untag_all(&id);
        }
    })?;
    if of_all_machines {
        marks::unmark_on_all(&config.store, &job, &id)?;
    }
    share(config, &job, &id, None)?;
    let store = tiers::open(&config.store, &job)?;
    if let Ok(remote) = store.tier(REMOTE)
        && let Some(mut keepers) = remote.store().pins()?.remove(&id)
        && !keepers.is_subset(&[job.keeper()?].into())
    {
        keepers.remove(&job.keeper()?);
        tracing::warn!(
            "{id} stays in the object store: other machines ({}) have pinned or tagged it. If they are gone: `ckpt-run unpin --all-machines {id}`",
            keepers.len()
        );
    }
    Ok(0)
}

/// Exempts a snapshot from `--keep`.
///
/// # Errors
/// Bad input: no such snapshot, or one that is being deleted.
pub fn pin(config: &Config, text: &str) -> Result<i32> {
    let (job, id) = find_to_change(config, text)?;
    job.change_marks(|marks| marks.pin(&id))?;
    let code = share(config, &job, &id, None)?;
    refuse_deleted(config, &job, &id)?;
    Ok(code)
}

/// Says that a mark has come too late. To be called once it is set, see [`tiers::prune`].
fn refuse_deleted(config: &Config, job: &JobDir, id: &SnapshotId) -> Result<()> {
    let is_deleted = |records: &JobDir| -> Result<bool> {
        let by_retention = records.record()?.is_some_and(|record| record.deleted.contains(&id.sequence()));
        Ok(by_retention || records.marks()?.of(id).is_some_and(|mark| mark.is_being_deleted))
    };
    let store = tiers::open(&config.store, job)?;
    let has = |tier: &str| {
        let found = store.tier(tier).map(|tier| tier.store().manifest(id));
        found.is_ok_and(|manifest| !matches!(manifest, Err(ReadError::Missing(_))))
    };
    let uploaded = tiers::uploaded_records(&config.store, job, Options::default())?;
    // The record names what was deleted last. What was deleted before is gone.
    let is_kept_here = !is_deleted(job)? && tiers::kept(&store).iter().any(|tier| has(tier));
    let is_deleted_there = uploaded.as_ref().map(is_deleted).transpose()?.unwrap_or_default();
    let is_kept_there = uploaded.is_some() && !is_deleted_there && has(REMOTE);
    let too_late = "the mark has come too late for --keep, or for the command that deletes it";
    match (is_kept_here, is_kept_there) {
        (false, false) => bail!(bad_input(anyhow!(
            "{id} is being deleted: {too_late}. Make sure with `ckpt-run ls`, and take another snapshot"
        ))),
        (true, false) if is_deleted_there => {
            tracing::warn!(
                "{id} is kept on this machine, but is being deleted from the object store: {too_late}"
            );
        }
        (false, true) => tracing::debug!("{id} is kept in the object store only"),
        _ => {}
    }
    Ok(())
}

/// Changes the marks of a snapshot.
///
/// # Errors
/// Bad input: no such snapshot.
pub fn change(config: &Config, text: &str, change: fn(&mut Marks, &SnapshotId)) -> Result<i32> {
    let (job, id) = find_to_change(config, text)?;
    job.change_marks(|marks| change(marks, &id))?;
    share(config, &job, &id, None)
}

/// Tells the machines that share the object store about the marks of a snapshot.
fn share(config: &Config, job: &JobDir, id: &SnapshotId, change: Option<TagChange<'_>>) -> Result<i32> {
    marks::share(&config.store, job, id, change).context(
        "the mark is set on this machine, but not in the object store, where another machine may delete the snapshot: repeat the command",
    )?;
    Ok(0)
}
