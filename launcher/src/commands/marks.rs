//! `ckpt-run tag`, `untag`, `pin`, `unpin`, `unmark`: marks of snapshots.

use super::snapshots::find;
use crate::cli::config::Config;
use crate::sys::error::{EXIT_NEGATIVE, bad_input};
use anyhow::Result;
use ckpt_snapshot::{Marks, SnapshotId};

/// Adds a tag to a snapshot.
///
/// # Errors
/// Bad input: no such snapshot, an invalid tag.
pub fn tag(config: &Config, text: &str, tag: &str) -> Result<i32> {
    let (job, id) = find(config, text)?;
    job.change_marks(|marks| marks.tag(&id, tag))?.map_err(bad_input)?;
    Ok(0)
}

/// Removes a tag; exit code 1 when the snapshot does not have it.
///
/// # Errors
/// Bad input: no such snapshot.
pub fn untag(config: &Config, text: &str, tag: &str) -> Result<i32> {
    let (job, id) = find(config, text)?;
    if job.change_marks(|marks| marks.untag(&id, tag))? {
        return Ok(0);
    }
    tracing::error!("the snapshot {id} has no tag {tag:?}");
    Ok(EXIT_NEGATIVE)
}

/// Changes the marks of a snapshot.
///
/// # Errors
/// Bad input: no such snapshot.
pub fn change(config: &Config, text: &str, change: fn(&mut Marks, &SnapshotId)) -> Result<i32> {
    let (job, id) = find(config, text)?;
    job.change_marks(|marks| change(marks, &id))?;
    Ok(0)
}
