//! The store of a job, as the options make it: the packed store on disk, with the snapshots of version 1 that are
//! still there behind it, and the object store that snapshots are copied to; or an object store alone. In front of
//! either, the launcher's memory.

use crate::store::options::StoreOptions;
use crate::sys::error::bad_input;
use anyhow::Result;
use ckpt_object_medium::{Options, Pace, StoreUrl};
use ckpt_snapshot::codec::Codec;
use ckpt_snapshot::medium::{DirMedium, Medium};
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::{
    CopyError, History, JobDir, JobKey, Listed, Marks, ReadError, Reclaimed, RelPath, Retention, SaveError,
    SnapshotId, Store, Tier, Tiers,
};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Snapshots in the launcher's own memory, if it keeps any there.
pub const MEMORY: &str = "memory";
/// The store on disk.
pub const DISK: &str = "disk";
/// Snapshots that an older ckpt-run has taken: they are read and removed.
pub const VERSION_1: &str = "version 1";
/// Where snapshots are copied to, or all there is.
pub const REMOTE: &str = "remote";
/// The tier in which a snapshot is safe: it outlives ckpt-run.
#[must_use]
pub fn home(store: &Tiers) -> &'static str {
    if is_on_disk(store) { DISK } else { REMOTE }
}

/// Whether there is a store on disk; otherwise the object store is all there is.
#[must_use]
pub fn is_on_disk(store: &Tiers) -> bool {
    store.tier(DISK).is_ok()
}

/// That tier in plain words.
#[must_use]
pub fn home_name(store: &Tiers) -> &'static str {
    if is_on_disk(store) { "the store on disk" } else { "the object store" }
}

/// The tiers that are the store, of which `--keep` speaks. What a checkpoint does goes no further: others may be slow or away.
#[must_use]
pub fn kept(store: &Tiers) -> &'static [&'static str] {
    if is_on_disk(store) { &[DISK, VERSION_1] } else { &[REMOTE] }
}

/// Opens the snapshots of the job in `dir`. Nothing is read or sent yet.
///
/// # Errors
/// Bad input: an address that does not fit what the environment says of it.
pub fn open(options: &StoreOptions, dir: &JobDir) -> Result<Arc<Tiers>> {
    open_at(options, dir, &options.pace(), None)
}

/// [`open`], with uploads at a pace that can be changed, and with a tier in memory if there is one.
///
/// # Errors
/// As [`open`].
pub fn open_at(
    options: &StoreOptions,
    dir: &JobDir,
    pace: &Arc<Pace>,
    memory: Option<DirMedium>,
) -> Result<Arc<Tiers>> {
    let mut tiers = Vec::new();
    if let Some(memory) = memory {
        let memory = on_medium(options, Arc::new(memory), Limits::default());
        tiers.push(Tier::new(MEMORY, Box::new(memory), true));
    }
    if dir.records_medium().is_some() {
        tiers.push(Tier::new(REMOTE, Box::new(packed(options, dir)), true));
        return Ok(Arc::new(Tiers::new(tiers)));
    }
    tiers.push(Tier::new(DISK, Box::new(packed(options, dir)), true));
    tiers.push(Tier::new(VERSION_1, Box::new(dir.version_1()), false));
    if let Some(medium) = uploads(options, dir, Options { pace: Arc::clone(pace), ..Options::default() })? {
        tiers.push(Tier::new(REMOTE, Box::new(on_medium(options, medium, Limits::remote())), true));
    }
    Ok(Arc::new(Tiers::new(tiers)))
}

/// Where the snapshots of the job in `dir` are uploaded to, if they are. Nothing is sent yet.
///
/// # Errors
/// Bad input: an address that does not fit what the environment says of it.
pub fn uploads(options: &StoreOptions, dir: &JobDir, client: Options) -> Result<Option<Arc<dyn Medium>>> {
    let open = |url: &StoreUrl| ckpt_object_medium::open(&url.below(&place(dir.key())), client);
    options.upload.as_ref().map(open).transpose().map_err(bad_input)
}

/// Where a job is in an object store.
#[must_use]
pub fn place(key: &JobKey) -> RelPath {
    RelPath::new(format!("jobs/{key}")).expect("a plain path")
}

/// The packed store of the job in `dir`.
#[must_use]
pub fn packed(options: &StoreOptions, dir: &JobDir) -> PackStore {
    match dir.records_medium() {
        Some(medium) => on_medium(options, Arc::clone(medium), Limits::remote()),
        None => on_medium(options, Arc::new(DirMedium::new(dir.path().to_owned())), Limits::default()),
    }
}

/// The same for a job that surely runs nowhere: nothing has to wait for another machine.
#[must_use]
pub fn alone(options: &StoreOptions, dir: &JobDir) -> PackStore {
    match dir.records_medium() {
        Some(medium) => on_medium(options, Arc::clone(medium), Limits { shared: None, ..Limits::remote() }),
        None => packed(options, dir),
    }
}

fn on_medium(options: &StoreOptions, medium: Arc<dyn Medium>, limits: Limits) -> PackStore {
    PackStore::new(medium, Codec::new(options.compression, options.key.as_ref()), limits)
}

/// The snapshots at hand, in memory and in the store, oldest first.
///
/// # Errors
/// When they cannot be listed.
pub fn list_local(store: &Tiers) -> Result<Vec<Listed>, ReadError> {
    store.list_in(&[&[MEMORY], kept(store)].concat())
}

fn each_kept(store: &Tiers) -> impl Iterator<Item = &dyn Store> {
    let tiers = store.tiers().iter().filter(|tier| kept(store).contains(&tier.name()));
    tiers.map(Tier::store)
}

/// Removes what interrupted saves have left in the store.
///
/// # Errors
/// When something stays.
pub fn sweep_local(store: &Tiers) -> Result<Vec<String>, SaveError> {
    let swept: Result<Vec<_>, _> = each_kept(store).map(Store::sweep).collect();
    Ok(swept?.concat())
}

/// Gives the room back of what no snapshot in the store needs, until nobody has time for it any more.
///
/// # Errors
/// When a step fails.
pub fn reclaim_local(store: &Tiers, cancel: &AtomicBool) -> Result<Reclaimed, SaveError> {
    let mut all = Reclaimed::default();
    for tier in each_kept(store) {
        let done = tier.reclaim_until(cancel)?;
        all.freed_bytes += done.freed_bytes;
        all.moved_bytes += done.moved_bytes;
    }
    Ok(all)
}

/// [`reclaim_local`], where nobody waits for it.
pub fn reclaim_and_tell(store: &Tiers, cancel: &AtomicBool) {
    match reclaim_local(store, cancel) {
        Ok(done) => tracing::debug!(
            "{} bytes of the store were given back, {} were copied for that",
            done.freed_bytes,
            done.moved_bytes
        ),
        Err(error) => tracing::warn!("room that no snapshot needs is not given back: {error}"),
    }
}

/// The snapshots in the store that `retention` lets go, oldest first.
///
/// # Errors
/// When they cannot be listed.
pub fn prunable(
    store: &Tiers,
    retention: &Retention,
    marks: &Marks,
    history: &History,
) -> Result<Vec<SnapshotId>, CopyError> {
    store.prunable(kept(store), retention, marks, history)
}

/// Removes the snapshots that `retention` lets go; says whether there were any. What stays is told.
pub fn prune(store: &Tiers, dir: &JobDir, retention: &Retention, last_progress_unix_ms: Option<u64>) -> bool {
    let prunable = || -> Result<_> {
        Ok(prunable(store, retention, &dir.marks()?, &history(dir, last_progress_unix_ms)?)?)
    };
    let prunable = match prunable() {
        Ok(prunable) => prunable,
        Err(error) => {
            tracing::warn!("older snapshots stay: {error:#}");
            return false;
        }
    };
    for id in &prunable {
        match remove_local(store, dir, id) {
            Ok(()) => tracing::debug!("removed the snapshot {id} (--keep {})", retention.keep),
            Err(error) => tracing::warn!("cannot remove the old snapshot {id}: {error:#}"),
        }
    }
    !prunable.is_empty()
}

/// What happened to a job that is running.
///
/// # Errors
/// When its record cannot be read.
pub fn history(dir: &JobDir, last_progress_unix_ms: Option<u64>) -> Result<History> {
    let abandoned = dir.record()?.map(|record| record.abandoned).unwrap_or_default();
    Ok(History { abandoned, last_progress_unix_ms })
}

/// Removes the snapshot from the store. What is known of it goes too, unless there may be a copy elsewhere.
///
/// # Errors
/// When it stays.
pub fn remove_local(store: &Tiers, dir: &JobDir, id: &SnapshotId) -> Result<()> {
    kept(store).iter().rev().try_for_each(|name| store.remove_from(id, name))?;
    let is_all = store.tiers().iter().all(|tier| tier.name() == MEMORY || kept(store).contains(&tier.name()));
    if is_all { forget(dir, id) } else { Ok(()) }
}

fn forget(dir: &JobDir, id: &SnapshotId) -> Result<()> {
    if dir.marks()?.of(id).is_some() {
        dir.change_marks(|marks| marks.forget(id))?;
    }
    Ok(())
}

/// Removes the snapshot from wherever it is, and what is known of it.
///
/// # Errors
/// When it stays.
pub fn remove(store: &Tiers, dir: &JobDir, id: &SnapshotId) -> Result<()> {
    store.remove(id)?;
    forget(dir, id)
}
