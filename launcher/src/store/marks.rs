//! Marks of snapshots that the machines of a job have in common. With `--upload`, the object store has a pin of each machine
//! that keeps a snapshot, and one record with the tags of all machines.

use super::options::StoreOptions;
use super::tiers::{self, REMOTE};
use crate::sys::deadline::STORE_RETRY_TIMEOUT;
use anyhow::Result;
use ckpt_object_medium::{Options, Retry};
use ckpt_snapshot::{JobDir, Marks, SnapshotId};
use std::collections::BTreeSet;

/// The marks of this machine, with the tags of all. Tags that cannot be read are left out, with a warning.
///
/// # Errors
/// When the marks of this machine cannot be read. Bad input: an address that contradicts the environment.
pub fn with_tags_of_all(options: &StoreOptions, dir: &JobDir) -> Result<Marks> {
    let mut marks = dir.marks()?;
    let retry = Retry { give_up_after: STORE_RETRY_TIMEOUT, ..Retry::default() };
    if let Some(shared) = tiers::uploaded_records(options, dir, Options { retry, ..Options::default() })? {
        match shared.marks() {
            Ok(shared) => marks.add_tags_of(&shared),
            Err(error) => tracing::warn!("tags that other machines have set are not known: {error}"),
        }
    }
    Ok(marks)
}

/// Tells the other machines what this one says of a snapshot: whether to keep it, and its tags. `untagged` is a tag that it
/// does not have any more.
///
/// # Errors
/// When the object store does not answer, or its record is refused.
pub fn share(options: &StoreOptions, dir: &JobDir, id: &SnapshotId, untagged: Option<&str>) -> Result<()> {
    let store = tiers::open(options, dir)?;
    let Ok(remote) = store.tier(REMOTE) else { return Ok(()) };
    let (keeper, marks) = (dir.keeper()?, dir.marks()?);
    if marks.is_kept(id) {
        remote.store().pin(id, &keeper)?;
    } else {
        // The marks of a store at an address are those of all machines.
        remote.store().unpin(id, Some(&*keeper).filter(|_| dir.records_medium().is_none()))?;
    }
    let tags = marks.of(id).map(|mark| &mark.tags);
    let Some(shared) = tiers::uploaded_records(options, dir, Options::default())? else { return Ok(()) };
    if tags.is_none_or(BTreeSet::is_empty) && untagged.is_none() {
        return Ok(());
    }
    shared.change_marks(|shared| {
        for tag in tags.into_iter().flatten() {
            shared.tag(id, tag)?;
        }
        if let Some(untagged) = untagged {
            shared.untag(id, untagged);
        }
        anyhow::Ok(())
    })?
}

/// Lets other machines delete a snapshot that they have marked.
///
/// # Errors
/// As [`share`].
pub fn unmark_on_all(options: &StoreOptions, dir: &JobDir, id: &SnapshotId) -> Result<()> {
    if let Ok(remote) = tiers::open(options, dir)?.tier(REMOTE) {
        remote.store().unpin(id, None)?;
    }
    match tiers::uploaded_records(options, dir, Options::default())? {
        Some(shared) => forget(&shared, [id]),
        None => Ok(()),
    }
}

/// Deletes the marks of snapshots from the record in `dir`, if there are any.
///
/// # Errors
/// When the record cannot be read or written.
pub fn forget<'a>(dir: &JobDir, ids: impl IntoIterator<Item = &'a SnapshotId> + Clone) -> Result<()> {
    let marks = dir.marks()?;
    if ids.clone().into_iter().any(|id| marks.of(id).is_some()) {
        dir.change_marks(|marks| ids.clone().into_iter().for_each(|id| marks.forget(id)))?;
    }
    Ok(())
}
