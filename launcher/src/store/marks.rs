//! Marks of snapshots that the machines of a job have in common. With `--upload`, the object store has a pin of each machine
//! that keeps a snapshot, and one record with the tags of all machines.

use super::options::StoreOptions;
use super::tiers::{self, REMOTE};
use anyhow::Result;
use ckpt_object_medium::Options;
use ckpt_snapshot::{JobDir, Marks, SnapshotId, Store, Tiers};
use std::collections::BTreeSet;

/// A change of a tag of a snapshot.
#[derive(Clone, Copy)]
pub enum TagChange<'a> {
    /// It has the tag, and no other snapshot does.
    Set(&'a str),
    /// It does not have the tag any more.
    Removed(&'a str),
}

/// The marks of this machine, with the tags of all. A tag that another machine has set elsewhere since names what it names
/// there.
///
/// # Errors
/// When the marks of this machine, or the tags of all, cannot be read. Bad input: an address that contradicts the environment.
pub fn of_all_machines(options: &StoreOptions, dir: &JobDir) -> Result<Marks> {
    let mut marks = dir.marks()?;
    let retry = options.short_retry();
    if let Some(shared) = tiers::uploaded_records(options, dir, Options { retry, ..Options::default() })? {
        marks.add_tags_of(&shared.marks()?);
    }
    Ok(marks)
}

/// The snapshots that another machine keeps in the object store, by a pin or a tag of its own.
///
/// # Errors
/// When the object store does not answer.
pub fn kept_elsewhere(store: &Tiers, dir: &JobDir) -> Result<BTreeSet<SnapshotId>> {
    let Ok(remote) = store.tier(REMOTE) else { return Ok(BTreeSet::new()) };
    let pins = remote.store().pins()?;
    if pins.is_empty() {
        return Ok(BTreeSet::new());
    }
    let keeper = dir.keeper()?;
    let is_elsewhere = |keepers: &BTreeSet<String>| keepers.iter().any(|one| *one != keeper);
    Ok(pins.into_iter().filter(|(_, keepers)| is_elsewhere(keepers)).map(|(id, _)| id).collect())
}

/// As [`of_all_machines`]. Tags that cannot be read are left out, with a warning.
///
/// # Errors
/// When the marks of this machine cannot be read.
pub fn known(options: &StoreOptions, dir: &JobDir) -> Result<Marks> {
    of_all_machines(options, dir).or_else(|error| {
        let marks = dir.marks()?;
        tracing::warn!("tags that other machines have set are not known: {error}");
        Ok(marks)
    })
}

/// Tells the other machines what this one says of a snapshot: whether to keep it, and a tag that has changed.
///
/// # Errors
/// When the object store does not answer, or its record is refused.
pub fn share(
    options: &StoreOptions,
    dir: &JobDir,
    id: &SnapshotId,
    change: Option<TagChange<'_>>,
) -> Result<()> {
    let store = tiers::open(options, dir)?;
    let Ok(remote) = store.tier(REMOTE) else { return Ok(()) };
    if dir.marks()?.is_kept(id) {
        remote.store().pin(id, &dir.keeper()?)?;
    } else {
        // The marks of a store at an address are those of all machines.
        let keeper = dir.keeper()?;
        remote.store().unpin(id, Some(&*keeper).filter(|_| dir.records_medium().is_none()))?;
    }
    let Some(shared) = tiers::uploaded_records(options, dir, Options::default())? else { return Ok(()) };
    let Some(change) = change else { return Ok(()) };
    shared.change_marks(|shared| match change {
        TagChange::Set(tag) => shared.tag(id, tag).map(drop),
        TagChange::Removed(tag) => {
            shared.untag(id, tag);
            Ok(())
        }
    })??;
    Ok(())
}

/// Tells the other machines what this one keeps, where it could not tell them before.
///
/// # Errors
/// When the object store does not answer.
pub fn tell_kept(remote: &dyn Store, dir: &JobDir, marks: &Marks) -> Result<()> {
    let (pins, keeper) = (remote.pins()?, dir.keeper()?);
    let is_told = |id: &SnapshotId| pins.get(id).is_some_and(|keepers| keepers.contains(&keeper));
    Ok(marks.kept().filter(|id| !is_told(id)).try_for_each(|id| remote.pin(id, &keeper))?)
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
