//! `ckpt-run tag`, `untag`, `pin`, `unpin`, `unmark`: marks of snapshots.

use super::snapshots::find_to_change;
use crate::cli::config::Config;
use crate::store::tiers::{self, REMOTE};
use crate::sys::error::{EXIT_NEGATIVE, EXIT_OWN, bad_input};
use anyhow::{Context, Result, anyhow};
use ckpt_snapshot::{JobDir, Marks, SnapshotId, TagError};

/// Adds a tag to a snapshot. It moves from another snapshot of the job: a tag names one.
///
/// # Errors
/// Bad input: no such snapshot, an invalid tag.
pub fn tag(config: &Config, text: &str, tag: &str) -> Result<i32> {
    let (job, id) = find_to_change(config, text)?;
    let moved = job.change_marks(|marks| {
        marks.tag(&id, tag)?;
        let others: Vec<_> = marks.tagged(tag).filter(|other| **other != id).cloned().collect();
        for other in &others {
            marks.untag(other, tag);
        }
        Ok::<_, TagError>(others)
    })?;
    let moved = moved.map_err(bad_input)?;
    // Before what may fail: a repeated command finds nothing to move.
    for other in &moved {
        tracing::info!(
            "the tag {tag} has moved from {other} to {id}, and no longer keeps {other} from being pruned"
        );
    }
    let mut code = 0;
    for other in &moved {
        if let Err(error) = set_shared(config, &job, other) {
            tracing::error!(
                "the object store was not told that {tag} no longer keeps {other}: {error:#}. If nothing else is to keep it: `ckpt-run unpin {other}`"
            );
            code = EXIT_OWN;
        }
    }
    share(config, &job, &id)?;
    refuse_deleted(&job, &id)?;
    Ok(code)
}

/// Removes a tag; exit code 1 when the snapshot does not have it.
///
/// # Errors
/// Bad input: no such snapshot.
pub fn untag(config: &Config, text: &str, tag: &str) -> Result<i32> {
    let (job, id) = find_to_change(config, text)?;
    if job.change_marks(|marks| marks.untag(&id, tag))? {
        return share(config, &job, &id);
    }
    tracing::error!("the snapshot {id} has no tag {tag:?}");
    Ok(EXIT_NEGATIVE)
}

/// Lets `--keep` apply to a snapshot again; with `of_all_machines` also where other machines have marked it.
///
/// # Errors
/// Bad input: no such snapshot.
pub fn unpin(config: &Config, text: &str, of_all_machines: bool) -> Result<i32> {
    let (job, id) = find_to_change(config, text)?;
    job.change_marks(|marks| marks.unpin(&id))?;
    let store = tiers::open(&config.store, &job)?;
    if let Ok(remote) = store.tier(REMOTE)
        && of_all_machines
    {
        remote.store().unpin(&id, None)?;
    }
    share(config, &job, &id)?;
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
    let code = share(config, &job, &id)?;
    refuse_deleted(&job, &id)?;
    Ok(code)
}

/// Says that a mark has come too late. To be called once it is set, see [`tiers::prune`].
fn refuse_deleted(job: &JobDir, id: &SnapshotId) -> Result<()> {
    if job.record()?.is_some_and(|record| record.deleted.contains(&id.sequence())) {
        return Err(bad_input(anyhow!(
            "--keep does not keep {id}, and it is being deleted: the mark has come too late. Make sure with `ckpt-run ls`, and take another snapshot"
        )));
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
    share(config, &job, &id)
}

/// Tells the machines that share the object store whether to keep a snapshot.
fn share(config: &Config, job: &JobDir, id: &SnapshotId) -> Result<i32> {
    set_shared(config, job, id).context(
        "the mark is set on this machine, but not in the object store, where another machine may delete the snapshot: repeat the command",
    )?;
    Ok(0)
}

fn set_shared(config: &Config, job: &JobDir, id: &SnapshotId) -> Result<()> {
    let store = tiers::open(&config.store, job)?;
    if let Ok(remote) = store.tier(REMOTE) {
        let keeper = job.keeper()?;
        if job.marks()?.is_kept(id) {
            remote.store().pin(id, &keeper)?;
        } else {
            // The marks of a store at an address are those of all machines.
            remote.store().unpin(id, Some(&*keeper).filter(|_| job.records_medium().is_none()))?;
        }
    }
    Ok(())
}
