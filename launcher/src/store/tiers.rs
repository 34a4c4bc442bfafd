//! The tiers of a job's store, as the options define them. Either the packed store on disk, with snapshots of version 1
//! behind it and the object store of `--upload`; or an object store alone. The launcher's memory comes before either. That of the
//! launcher of another node, which has replicas, comes last: what is in the store need not be asked for over the network.

use crate::store::lock_scope::is_one_machine_only;
use crate::store::marks;
use crate::store::mounted;
use crate::store::options::StoreOptions;
use crate::sys::error::bad_input;
use crate::sys::memory;
use anyhow::Result;
use ckpt_object_medium::{Options, Pace};
use ckpt_snapshot::medium::{DirMedium, Medium};
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::{
    CopyError, History, JobDir, JobKey, Listed, Marks, ReadError, Reclaimed, RelPath, Retention, SaveError,
    SnapshotId, Store, Tier, Tiers, faults,
};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Snapshots in the launcher's memory (`--persist-every`).
pub const MEMORY: &str = "memory";
/// Copies of snapshots in memory, in the memory of another node's launcher (`--replicas`).
pub const REPLICA: &str = "replica";
/// The store on disk.
pub const DISK: &str = "disk";
/// Snapshots of an older ckpt-run, which are only read and removed.
pub const VERSION_1: &str = "version 1";
/// The object store: the target of uploads, or the whole store.
pub const REMOTE: &str = "remote";

/// The tier in which a snapshot is durable: it survives ckpt-run.
#[must_use]
pub fn home(store: &Tiers) -> &'static str {
    if is_on_disk(store) { DISK } else { REMOTE }
}

/// Whether the store is on disk; otherwise it is an object store alone.
#[must_use]
pub fn is_on_disk(store: &Tiers) -> bool {
    store.tier(DISK).is_ok()
}

/// The name of that tier, for people.
#[must_use]
pub fn home_name(store: &Tiers) -> &'static str {
    if is_on_disk(store) { "the store on disk" } else { "the object store" }
}

/// The tiers to which `--keep` applies. A checkpoint uses no others, which may be slow or unreachable.
#[must_use]
pub fn kept(store: &Tiers) -> &'static [&'static str] {
    match (is_on_disk(store), store.tier(VERSION_1).is_ok()) {
        (true, true) => &[DISK, VERSION_1],
        (true, false) => &[DISK],
        (false, _) => &[REMOTE],
    }
}

/// Opens the snapshots of the job in `dir`. Nothing is read or sent yet.
///
/// # Errors
/// Bad input: an address that contradicts the environment.
pub fn open(options: &StoreOptions, dir: &JobDir) -> Result<Arc<Tiers>> {
    open_at(options, dir, &options.pace(), None, None)
}

/// [`open`] with a shared upload rate, and with a tier in memory and one of replicas, if there are any.
///
/// # Errors
/// As [`open`].
pub fn open_at(
    options: &StoreOptions,
    dir: &JobDir,
    pace: &Arc<Pace>,
    memory: Option<DirMedium>,
    replicas: Option<Arc<dyn Medium>>,
) -> Result<Arc<Tiers>> {
    options.check_trust_of(dir)?;
    let mut tiers = Vec::new();
    let limits = Limits { needs_room: true, ..Limits::default() };
    if let Some(memory) = memory {
        let memory = on_medium(options, dir, Arc::new(memory), limits);
        tiers.push(Tier::new(MEMORY, Box::new(memory), true));
    }
    let replicas =
        replicas.map(|medium| Tier::new(REPLICA, Box::new(on_medium(options, dir, medium, limits)), false));
    if dir.records_medium().is_some() {
        tiers.push(Tier::new(REMOTE, Box::new(packed(options, dir)), true));
        tiers.extend(replicas);
        return Ok(Arc::new(Tiers::new(tiers)));
    }
    tiers.push(Tier::new(DISK, Box::new(packed(options, dir)), true));
    // With a key, only what the key authenticates is read. Version 1 of the store had none.
    match (&options.key, dir.version_1()) {
        (None, old) => tiers.push(Tier::new(VERSION_1, Box::new(old), false)),
        (Some(_), old) if old.list().is_ok_and(|listed| !listed.is_empty()) => tracing::warn!(
            "{} has snapshots that are not encrypted, from an old ckpt-run or put there by somebody else. With --encrypt-key-file they are not used",
            dir.path().join("snapshots").display()
        ),
        _ => {}
    }
    if let Some(medium) = uploads(options, dir, Options { pace: Arc::clone(pace), ..client(options) })? {
        tiers.push(Tier::new(REMOTE, Box::new(on_medium(options, dir, medium, Limits::remote())), true));
    }
    tiers.extend(replicas);
    Ok(Arc::new(Tiers::new(tiers)))
}

/// The packed stores of the job in `dir`, nearest first, with the names of their tiers.
///
/// # Errors
/// Bad input: an address that contradicts the environment.
pub fn pack_stores(options: &StoreOptions, dir: &JobDir) -> Result<Vec<(&'static str, PackStore)>> {
    let home = if dir.records_medium().is_some() { REMOTE } else { DISK };
    let mut stores = vec![(home, packed(options, dir))];
    if home == DISK
        && let Some(medium) = uploads(options, dir, client(options))?
    {
        stores.push((REMOTE, on_medium(options, dir, medium, Limits::remote())));
    }
    Ok(stores)
}

fn client(options: &StoreOptions) -> Options {
    Options { retry: options.retry.clone(), ..Options::default() }
}

/// The object store to which the snapshots of the job in `dir` are uploaded, if any. Nothing is sent yet.
///
/// # Errors
/// Bad input: an address that contradicts the environment.
pub fn uploads(options: &StoreOptions, dir: &JobDir, client: Options) -> Result<Option<Arc<dyn Medium>>> {
    let Some(url) = &options.upload else { return Ok(None) };
    options.check_address(url)?;
    let client = Options { guard: url.directory().map(mounted::guard), ..client };
    ckpt_object_medium::open(&url.below(&place(dir.key())), client).map(Some).map_err(bad_input)
}

/// The job's small records beside the snapshots that are uploaded, if any are. Nothing is sent yet.
///
/// # Errors
/// Bad input: an address that contradicts the environment.
pub fn uploaded_records(options: &StoreOptions, dir: &JobDir, client: Options) -> Result<Option<JobDir>> {
    Ok(uploads(options, dir, client)?.map(|medium| dir.clone().with_content_in(medium)))
}

/// The path of a job in an object store.
#[must_use]
pub fn place(key: &JobKey) -> RelPath {
    RelPath::new(format!("jobs/{key}")).expect("a plain path")
}

/// The packed store of the job in `dir`.
#[must_use]
pub fn packed(options: &StoreOptions, dir: &JobDir) -> PackStore {
    if let Some(medium) = dir.records_medium() {
        return on_medium(options, dir, Arc::clone(medium), Limits::remote());
    }
    let shared = is_one_machine_only(dir.path()).then_some(Limits::remote().shared).flatten();
    let limits = Limits { shared, ..Limits::default() };
    let path = dir.path().to_owned();
    let medium = DirMedium::new(path.clone()).with_free_bytes(move || memory::free_bytes_at(&path));
    on_medium(options, dir, Arc::new(medium), limits)
}

/// The packed store of a job that seems to run on no machine: young packs need not be left for other machines.
#[must_use]
pub fn alone(options: &StoreOptions, dir: &JobDir) -> PackStore {
    match dir.records_medium() {
        Some(medium) => {
            let limits = Limits { shared: Some(Duration::ZERO), ..Limits::remote() };
            on_medium(options, dir, Arc::clone(medium), limits)
        }
        None => packed(options, dir),
    }
}

/// The uploads of a job that seems to run on no machine, as [`alone`].
///
/// # Errors
/// Bad input: an address that contradicts the environment.
pub fn uploads_alone(options: &StoreOptions, dir: &JobDir) -> Result<Option<PackStore>> {
    let limits = Limits { shared: Some(Duration::ZERO), ..Limits::remote() };
    Ok(uploads(options, dir, client(options))?.map(|medium| on_medium(options, dir, medium, limits)))
}

fn on_medium(options: &StoreOptions, dir: &JobDir, medium: Arc<dyn Medium>, limits: Limits) -> PackStore {
    PackStore::new(medium, options.codec(), limits).of_job(dir.key())
}

/// The snapshots in memory and in the store, oldest first.
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

/// Removes leftovers of interrupted saves from the store.
///
/// # Errors
/// When something cannot be removed.
pub fn sweep_local(store: &Tiers) -> Result<Vec<String>, SaveError> {
    let swept: Result<Vec<_>, _> = each_kept(store).map(Store::sweep).collect();
    Ok(swept?.concat())
}

/// Garbage collection: frees the space of data that no snapshot in the store needs, until `cancel` is set.
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

/// [`reclaim_local`] with the result logged.
///
/// # Errors
/// When a step fails.
pub fn reclaim_and_report(store: &Tiers, cancel: &AtomicBool) -> Result<(), SaveError> {
    let done = reclaim_local(store, cancel)
        .inspect_err(|error| tracing::warn!("garbage collection of the store failed: {error}"))?;
    tracing::debug!(
        "garbage collection freed {} bytes of the store, and rewrote {}",
        done.freed_bytes,
        done.moved_bytes
    );
    Ok(())
}

/// The snapshots in the store that `retention` does not keep, oldest first.
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

/// Removes the snapshots that `retention` does not keep, after `before_deletion` has recorded which. Returns whether
/// there were any. Errors are logged.
///
/// A mark that is set meanwhile counts: who sets one looks at the record afterwards, and here the marks are read again
/// after the record was written, so that one of the two sees the other.
pub fn prune(
    store: &Tiers,
    dir: &JobDir,
    retention: &Retention,
    last_progress_unix_ms: Option<u64>,
    before_deletion: impl Fn(&[SnapshotId]) -> Result<()>,
) -> bool {
    let prunable = || -> Result<_> {
        let prunable = prunable(store, retention, &dir.marks()?, &history(dir, last_progress_unix_ms)?)?;
        if prunable.is_empty() {
            return Ok(prunable);
        }
        before_deletion(&prunable)?;
        faults::hit("deletion-recorded")?;
        let marks = dir.marks()?;
        let (kept, prunable): (Vec<_>, _) = prunable.into_iter().partition(|id| marks.is_kept(id));
        if !kept.is_empty() {
            before_deletion(&prunable)?;
        }
        Ok(prunable)
    };
    let prunable = match prunable() {
        Ok(prunable) => prunable,
        Err(error) => {
            tracing::warn!("cannot prune older snapshots: {error:#}");
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

/// What retention has to know of a running job's past.
///
/// # Errors
/// When its record cannot be read.
pub fn history(dir: &JobDir, last_progress_unix_ms: Option<u64>) -> Result<History> {
    let record = dir.record()?;
    let resumed_from = record.as_ref().and_then(|record| record.resumed_from.clone());
    let abandoned = record.map(|record| record.abandoned).unwrap_or_default();
    Ok(History { abandoned, resumed_from, last_progress_unix_ms })
}

/// Removes the snapshot from the store. Its marks are removed too, unless another tier may have a copy.
///
/// # Errors
/// When the snapshot cannot be removed.
pub fn remove_local(store: &Tiers, dir: &JobDir, id: &SnapshotId) -> Result<()> {
    kept(store).iter().rev().try_for_each(|name| store.remove_from(id, name))?;
    let is_here =
        |tier: &Tier| [MEMORY, REPLICA].contains(&tier.name()) || kept(store).contains(&tier.name());
    let is_all = store.tiers().iter().all(is_here);
    if is_all { marks::forget(dir, [id]) } else { Ok(()) }
}

/// Removes the part of a snapshot from the memory of this launcher, and from the store.
///
/// # Errors
/// When it cannot be removed.
pub fn remove_part(store: &Tiers, dir: &JobDir, id: &SnapshotId) -> Result<()> {
    if let Ok(tier) = store.tier(MEMORY) {
        store.remove_from(id, MEMORY)?;
        tier.store().reclaim()?;
    }
    remove_local(store, dir, id)
}

/// Removes the snapshot from all tiers, and its marks.
///
/// # Errors
/// When the snapshot cannot be removed.
pub fn remove(options: &StoreOptions, store: &Tiers, dir: &JobDir, id: &SnapshotId) -> Result<()> {
    marks::unmark_on_all(options, dir, id)?;
    store.remove(id)?;
    marks::forget(dir, [id])
}
