//! `ckpt-run tag`, `untag`, `pin`, `unpin`, `unmark`: marks of snapshots.

use super::snapshots::find_to_change;
use crate::cli::config::Config;
use crate::store::tiers::{self, REMOTE};
use crate::sys::error::{EXIT_NEGATIVE, bad_input};
use anyhow::{Context, Result};
use ckpt_snapshot::{JobDir, Marks, SnapshotId};

/// Adds a tag to a snapshot.
///
/// # Errors
/// Bad input: no such snapshot, an invalid tag.
pub fn tag(config: &Config, text: &str, tag: &str) -> Result<i32> {
    let (job, id) = find_to_change(config, text)?;
    job.change_marks(|marks| marks.tag(&id, tag))?.map_err(bad_input)?;
    share(config, &job, &id)
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
    let store = tiers::open(&config.store, job)?;
    if let Ok(remote) = store.tier(REMOTE) {
        remote.store().set_pinned(id, job.marks()?.is_kept(id)).context(
            "the mark is set on this machine, but not in the object store, where another machine may delete the snapshot: repeat the command",
        )?;
    }
    Ok(0)
}
