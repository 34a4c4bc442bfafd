//! Snapshots in memory (`--persist-every N`): a tier of the store in memory of this process. It survives the job, but not
//! ckpt-run or the machine. Every Nth snapshot is copied to the store while the job runs, and the newest one before
//! ckpt-run ends.
//!
//! With `--replicas`, the memory survives the start of the launcher in its own place, and each snapshot is also in the memory of
//! the launcher of another node, in the tier [`REPLICA`].

use crate::files::staging;
use crate::job::journal::{Entry, EventKind, Journal, Measured};
use crate::persist::copier::{Copier, CopyControl, CopyParts};
use crate::persist::upload::Uploader;
use crate::store::tiers::{self, MEMORY, REPLICA};
use crate::sys::deadline::LAST_COPY_POLL_INTERVAL;
use crate::sys::{inherited, memory};
use anyhow::{Context, Result, ensure};
use ckpt_protocol::control::Held;
use ckpt_snapshot::medium::{DirMedium, IoFeatures};
use ckpt_snapshot::{
    Listed, Manifest, Marks, Retention, SaveError, SnapshotId, SnapshotWriter, Tiers, faults, size_text,
};
use parking_lot::Mutex;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// Number of snapshots kept in memory: the newest, and one more in case the newest is bad.
const KEPT: usize = 2;

/// The memory that this process passes on when it starts again as the node of this rank.
static PASSED_ON: Mutex<Option<(u32, Arc<OwnedFd>)>> = Mutex::new(None);

/// Memory for snapshots.
pub struct Memory {
    /// A tmpfs that is mounted nowhere. It is never closed, so that its path never refers to another file.
    mount: Arc<OwnedFd>,
    /// Memory that the images of the current checkpoint will need (bytes).
    pub staged_bytes: Arc<AtomicU64>,
}

impl Memory {
    /// Memory that is freed when this process ends: what the launcher has passed on that has started again as this one, or else
    /// new one.
    ///
    /// # Errors
    /// When the kernel refuses: no CAP_SYS_ADMIN, or a kernel older than 5.2.
    pub fn open(passed_on: Option<Arc<OwnedFd>>) -> Result<Self> {
        let mount = match passed_on {
            Some(mount) => mount,
            None => Arc::new(staging::own_memory().context(
                "cannot keep snapshots in memory on this machine (--persist-every): the kernel refuses",
            )?),
        };
        // Until this process ends.
        std::mem::forget(Arc::clone(&mount));
        Ok(Self { mount, staged_bytes: Arc::default() })
    }

    /// Has the memory survive when this process starts again as the node of this rank.
    pub fn survives_as(&self, rank: u32) {
        *PASSED_ON.lock() = Some((rank, Arc::clone(&self.mount)));
    }

    /// A directory in it, which need not exist. The path is valid in this process only.
    #[must_use]
    pub fn directory(&self, name: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{name}", self.mount.as_raw_fd()).into()
    }

    /// Objects in a directory of it.
    #[must_use]
    pub fn medium(&self, name: &str) -> DirMedium {
        let theirs = Arc::clone(&self.staged_bytes);
        let room = move || {
            let reserved = theirs.load(Ordering::Relaxed).saturating_add(memory::SPARE_BYTES);
            Ok(memory::available_bytes()?.saturating_sub(reserved))
        };
        // The files are in the page cache: direct I/O would gain nothing.
        let ways = IoFeatures { direct: false, ring: false };
        DirMedium::new(self.directory(name)).with_io_features(ways).with_free_bytes(room)
    }
}

/// Passes the memory on to the launcher that starts in the place of this one as the node of this rank: the number of its
/// descriptor, if there is memory to pass on.
#[must_use]
pub fn pass_on(rank: u32) -> Option<RawFd> {
    let kept = PASSED_ON.lock();
    let (_, mount) = kept.as_ref().filter(|(of, _)| *of == rank)?;
    inherited::pass_on(mount)
        .inspect_err(|error| tracing::warn!("the snapshots in memory are lost: {error}"))
        .ok()
}

/// The holder of the replicas, another node.
pub trait ReplicaHolder: Send + Sync {
    /// Tells it which replicas it holds.
    ///
    /// # Errors
    /// When it cannot be told, or they cannot be listed.
    fn publish(&self, store: &Tiers) -> Result<()>;

    /// Ends the requests in progress, with an error.
    fn interrupt(&self);
}

/// Takes snapshots into memory, and copies them from there to the store.
pub struct Persister {
    shared: Arc<Shared>,
    copier: Copier,
    /// Every so many snapshots, one is copied; `None` if none is: of a job on several nodes, node 0 says which snapshots go to the
    /// store instead.
    every: Option<u64>,
    staged_bytes: Arc<AtomicU64>,
    /// A lack of memory was reported.
    is_shortage_reported: AtomicBool,
    /// Why the last snapshot has no replica. The same reason is a warning once.
    no_replica: Mutex<Option<String>>,
}

struct Shared {
    parts: CopyParts,
    /// Receives an entry for each copy.
    journal: Arc<Journal>,
    /// Uploads the snapshots that are copied to the store.
    uploader: Option<Arc<Uploader>>,
    /// Number of snapshots since the last one that was copied to the store; `None` if the next one has to be.
    since: Mutex<Option<u64>>,
    /// With replicas.
    holder: Option<Box<dyn ReplicaHolder>>,
    /// The holder has nothing that an interrupted replica has left. Locked as long as one is in progress.
    is_swept: Mutex<bool>,
    /// Snapshots that count nowhere. The holder may have replicas of them.
    worthless: Mutex<Vec<SnapshotId>>,
}

impl Persister {
    /// Starts the thread, which copies every `every`th snapshot, or none. The job's store has a tier in memory; one of replicas
    /// too, with a `holder`.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(
        parts: CopyParts,
        journal: Arc<Journal>,
        uploader: Option<Arc<Uploader>>,
        every: Option<u64>,
        staged_bytes: Arc<AtomicU64>,
        holder: Option<Box<dyn ReplicaHolder>>,
    ) -> Result<Self> {
        let (since, is_swept, worthless) = (Mutex::new(None), Mutex::new(false), Mutex::default());
        let shared = Arc::new(Shared { parts, journal, uploader, since, holder, is_swept, worthless });
        // A launcher before may have left some.
        shared.show_held();
        let its = Arc::clone(&shared);
        let copier = Copier::start("persist", move |id, control| its.copy(id, control))?;
        let (is_shortage_reported, no_replica) = (AtomicBool::new(false), Mutex::default());
        Ok(Self { shared, copier, every, staged_bytes, is_shortage_reported, no_replica })
    }

    /// Begins the snapshot `id` in memory; `None` if there is no space for it and for `staged_bytes` of images.
    #[must_use]
    pub fn begin<'a>(
        &self,
        store: &'a Tiers,
        id: &SnapshotId,
        needed_bytes: u64,
        staged_bytes: u64,
    ) -> Option<Box<dyn SnapshotWriter + 'a>> {
        self.staged_bytes.store(staged_bytes, Ordering::Relaxed);
        let begin = || store.tier(MEMORY).map(|tier| tier.store().begin(id, needed_bytes));
        let begun = match begin() {
            // On one machine, older ones are resumed too, if newer ones are bad.
            Ok(Err(SaveError::NoSpace { .. }))
                if self.every.is_none() && self.shared.drop_older_than_stored() =>
            {
                begin()
            }
            begun => begun,
        };
        let why = match begun {
            _ if faults::hit("memory-begin").is_err() => "injected".to_owned(),
            Ok(Ok(writer)) => return Some(writer),
            Ok(Err(SaveError::NoSpace { needed_bytes, available_bytes, .. })) => format!(
                "it needs about {}, and {} is left beside the images of the checkpoint",
                size_text(needed_bytes),
                size_text(available_bytes)
            ),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        let instead = match self.every {
            Some(_) => format!("this one, and others without space, are written to {}", self.home()),
            None => "it is not taken, and the next one goes to the stores of all nodes".to_owned(),
        };
        if self.is_shortage_reported.swap(true, Ordering::Relaxed) {
            tracing::debug!("no space in memory for the snapshot: {why}");
        } else {
            tracing::warn!(
                "there is no space in memory for the snapshot ({why}): {instead}. To keep snapshots in memory, leave more memory free"
            );
        }
        None
    }

    /// Copies a snapshot in memory to the memory of another node, if the job has replicas. Without its replica, the snapshot still
    /// helps when a process fails.
    pub fn replicate(&self, id: &SnapshotId, cancel: &AtomicBool) {
        let error = match self.shared.replicate(id, cancel) {
            None => return,
            Some(Ok(())) => return *self.no_replica.lock() = None,
            Some(Err(error)) => error,
        };
        if cancel.load(Ordering::Relaxed) {
            return;
        }
        let why = Some(format!("{error:#}"));
        let what = format!("the snapshot {id} has no replica in the memory of another node: {error:#}");
        if std::mem::replace(&mut *self.no_replica.lock(), why.clone()) == why {
            tracing::debug!("{what}");
        } else {
            tracing::warn!("{what}. If this machine is lost, the job resumes from an older snapshot");
        }
    }

    /// Ends the requests of [`Self::replicate`] in progress, with an error.
    pub fn interrupt_replica(&self) {
        self.shared.holder.iter().for_each(|holder| holder.interrupt());
    }

    /// A part was removed, as its snapshot was not committed.
    pub fn is_worthless(&self, id: &SnapshotId) {
        if self.shared.holder.is_some() {
            self.shared.worthless.lock().push(id.clone());
            self.copier.request(id);
        }
    }

    /// A snapshot was committed in memory.
    pub fn committed(&self, id: &SnapshotId) {
        if let Some(every) = self.every {
            let mut since = self.shared.since.lock();
            let is_due = since.is_none_or(|since| since + 1 >= every);
            // A newer snapshot replaces one that waits to be copied, which might be pruned from memory before.
            if is_due || self.copier.has_next() {
                self.copier.request(id);
            }
            *since = if is_due { Some(0) } else { since.map(|since| since + 1) };
        }
        self.shared.prune_memory();
        if self.shared.holder.is_some() {
            if self.no_replica.lock().is_none() {
                self.shared.parts.status.in_memory(|memory| memory.newest_replica = Some(id.to_string()));
            }
            self.copier.request(id);
        }
    }

    fn home(&self) -> &'static str {
        tiers::home_name(&self.shared.parts.store)
    }

    /// A snapshot was written to the store without a stop in memory.
    pub fn is_in_store(&self, id: &SnapshotId) {
        *self.shared.since.lock() = Some(0);
        self.shared.parts.status.in_memory(|memory| memory.newest_in_store = Some(id.to_string()));
        if self.shared.holder.is_some() {
            // What is left at the holder may be why nothing could be taken into its memory.
            self.copier.request(id);
        }
    }

    /// Waits until nothing is left to copy, for `limit` at most. Returns whether that was reached.
    #[cfg(test)]
    pub fn is_idle_within(&self, limit: std::time::Duration) -> bool {
        self.copier.is_idle_within(limit)
    }

    /// ckpt-run is ending: copies get normal priority, and pruning is skipped.
    pub fn hurry(&self) {
        self.copier.hurry();
    }

    /// ckpt-run goes on after all: undoes [`Self::hurry`].
    pub fn relax(&self) {
        self.copier.relax();
    }

    /// The job is about to end without another snapshot: starts to copy the newest one if it is only in memory. Waits for
    /// nothing, not even the store.
    pub fn begin_last_copy(&self) {
        if self.every.is_none() {
            return;
        }
        let Some(held) = self.shared.parts.status.snapshot().in_memory else { return };
        let number = |id: &String| id.parse::<SnapshotId>().ok();
        let newest = held.snapshots.last().and_then(|newest| number(&newest.id));
        let Some(newest) =
            newest.filter(|newest| held.newest_in_store.as_ref().and_then(number).as_ref() < Some(newest))
        else {
            return;
        };
        tracing::info!("snapshot {newest} is in memory only: it is copied to {} now", self.home());
        self.copier.request(&newest);
    }

    /// ckpt-run ends: copies the newest snapshot if it is only in memory. Gives up at `until`, or when `interrupted`
    /// returns a reason.
    pub fn complete_last_copy(&self, until: Instant, mut interrupted: impl FnMut() -> Option<&'static str>) {
        self.hurry();
        let Some(id) = self.shared.newest_in_memory_only() else { return };
        if self.every.is_none() {
            return self.tell_lost(&id, "");
        }
        tracing::info!(
            "snapshot {id} is in memory only: it is copied to {} before ckpt-run ends",
            self.home()
        );
        let mut interruption = None;
        // A copy in progress may fail, and is retried once.
        for _ in 0..2 {
            if interruption.is_some() || self.shared.newest_in_memory_only().is_none() {
                break;
            }
            self.copier.request(&id);
            while !self.copier.is_idle_within(LAST_COPY_POLL_INTERVAL) && interruption.is_none() {
                interruption = interrupted()
                    .or_else(|| (Instant::now() >= until).then_some("the end of the grace period (--grace)"));
            }
        }
        let Some(lost) = self.shared.newest_in_memory_only() else { return };
        let because = interruption.map(|why| format!(": it was not copied before {why}")).unwrap_or_default();
        self.tell_lost(&lost, &because);
    }

    fn tell_lost(&self, lost: &SnapshotId, because: &str) {
        let next = match self.shared.newest_in_store() {
            Some(id) => format!("the snapshot {id}"),
            None => "the beginning".to_owned(),
        };
        tracing::error!(
            "the snapshot {lost} was in memory only, and is lost with this ckpt-run{because}. The next run resumes from {next}"
        );
    }
}

impl Shared {
    /// Copies a snapshot to the store, in the thread. With replicas, prunes them instead: no checkpoint waits for the holder.
    fn copy(&self, id: &SnapshotId, control: &CopyControl) {
        if let Some(holder) = &self.holder {
            if let Err(error) = self.prune_replicas(&**holder, &control.cancelled) {
                tracing::debug!("cannot prune the replicas: {error:#}");
            }
            return;
        }
        let home = tiers::home_name(&self.parts.store);
        match self.try_copy(id, control) {
            Ok(()) => {}
            Err(_) if control.cancelled.load(Ordering::Relaxed) => {}
            Err(error) => {
                // The next snapshot is copied whatever its number.
                *self.since.lock() = None;
                self.parts.status.in_memory(|memory| memory.last_failure = Some(error.to_string()));
                tracing::warn!(
                    "the snapshot {id} is in memory only, since it could not be copied to {home}: {error}. The next snapshot will be copied instead"
                );
            }
        }
        self.prune_memory();
    }

    fn try_copy(&self, id: &SnapshotId, control: &CopyControl) -> Result<()> {
        let CopyParts { store, dir, retention, status, ownership } = &self.parts;
        if let Some(claim) = ownership.claimed_elsewhere() {
            return Err(claim.into());
        }
        let begun = Instant::now();
        let manifest = store.copy(id, MEMORY, tiers::home(store), &|_| {}, &control.cancelled)?;
        let what = format!(
            "copied from memory to {} in {:.1} s; {:.1} MB were new there",
            tiers::home_name(store),
            begun.elapsed().as_secs_f64(),
            manifest.stored_bytes.unwrap_or(0) as f64 / 1e6
        );
        tracing::info!("snapshot {id} {what}");
        let measured = Measured {
            stored_bytes: manifest.stored_bytes,
            changed_bytes: manifest.changed_bytes,
            ..Measured::default()
        };
        self.journal.add(&Entry::new(EventKind::Saved, what).snapshot(Some(id)).measured(measured));
        status.in_memory(|memory| {
            memory.newest_in_store = Some(id.to_string());
            memory.last_failure = None;
        });
        if let Some(uploader) = &self.uploader {
            uploader.committed(id, false);
        }
        if !control.is_ending.load(Ordering::Relaxed)
            && tiers::prune(store, dir, retention, status.last_progress_unix_ms(), |ids| {
                Ok(ownership.before_deletion(ids)?)
            })
        {
            // The next one tries again.
            let _ = tiers::reclaim_and_report(store, &control.is_ending);
        }
        Ok(())
    }

    /// Removes the snapshots in memory that are older than the newest one in the store. Returns whether there were any.
    fn drop_older_than_stored(&self) -> bool {
        let Some(stored) = self.newest_in_store() else { return false };
        let older: Vec<_> = self.list(&[MEMORY]).into_iter().filter(|one| one.id < stored).collect();
        let is_removed = older.iter().all(|one| self.parts.store.remove_from(&one.id, MEMORY).is_ok());
        // It reclaims their space.
        self.prune_memory();
        is_removed && !older.is_empty()
    }

    /// Copies a snapshot from memory to that of another node; `None` without replicas.
    fn replicate(&self, id: &SnapshotId, cancel: &AtomicBool) -> Option<Result<()>> {
        let holder = self.holder.as_ref()?;
        let store = &self.parts.store;
        let copied = || -> Result<()> {
            faults::hit("replicate")?;
            let begun = Instant::now();
            tracing::debug!("snapshot {id}: its replica is begun");
            let mut is_swept = self.is_swept.lock();
            if !std::mem::replace(&mut *is_swept, false) {
                store.tier(REPLICA)?.store().sweep()?;
            }
            let replica = store.replicate(id, MEMORY, REPLICA, cancel)?;
            let part = store.tier(MEMORY)?.store().manifest(id)?;
            ensure!(
                replica.content_hash() == part.content_hash(),
                "the replica is another one than the part"
            );
            *is_swept = true;
            holder.publish(store)?;
            tracing::debug!("snapshot {id}: its replica took {:.2} s", begun.elapsed().as_secs_f64());
            Ok(())
        };
        Some(copied())
    }

    /// Prunes memory, except the newest snapshots and the one that is being copied.
    fn prune_memory(&self) {
        if let Err(error) = self.prune(MEMORY, |_| true, &AtomicBool::new(false)) {
            tracing::warn!("cannot prune the snapshots in memory: {error:#}");
        }
        self.show_held();
    }

    fn show_held(&self) {
        let held = self.list(&[MEMORY]).into_iter().filter_map(|one| one.manifest.ok());
        let held = held.map(|manifest| held_of(&manifest)).collect();
        self.parts.status.in_memory(|memory| memory.snapshots = held);
    }

    /// The same with the replicas, except those of snapshots in memory.
    fn prune_replicas(&self, holder: &dyn ReplicaHolder, cancel: &AtomicBool) -> Result<()> {
        let store = &self.parts.store;
        // While a replica is in progress, what is unfinished is its own.
        if let Some(mut is_swept) = self.is_swept.try_lock()
            && !*is_swept
        {
            store.tier(REPLICA)?.store().sweep()?;
            *is_swept = true;
        }
        let worthless = std::mem::take(&mut *self.worthless.lock());
        let removed = worthless.iter().try_for_each(|id| store.remove_from(id, REPLICA));
        removed.inspect_err(|_| self.worthless.lock().extend(worthless))?;
        let own: Vec<_> = self.list(&[MEMORY]).into_iter().map(|one| one.id).collect();
        self.prune(REPLICA, |old| !own.contains(old), cancel)?;
        holder.publish(store)
    }

    /// Prunes a tier of the snapshots of which that may be, and frees their space until `cancel` is set.
    fn prune(&self, tier: &str, may_be: impl Fn(&SnapshotId) -> bool, cancel: &AtomicBool) -> Result<()> {
        let CopyParts { store, dir, status, .. } = &self.parts;
        let history = tiers::history(dir, status.last_progress_unix_ms())?;
        let prunable = store.prunable(&[tier], &Retention::newest(KEPT), &Marks::default(), &history)?;
        for old in prunable.into_iter().filter(may_be) {
            store.remove_from(&old, tier)?;
            tracing::debug!("removed the snapshot {old} from {tier}");
        }
        store.tier(tier)?.store().reclaim_until(cancel)?;
        Ok(())
    }

    fn list(&self, names: &[&str]) -> Vec<Listed> {
        self.parts.store.list_in(names).unwrap_or_else(|error| {
            tracing::warn!("{error}");
            Vec::new()
        })
    }

    fn newest_in_store(&self) -> Option<SnapshotId> {
        let store = &self.parts.store;
        self.list(tiers::kept(store)).pop().map(|newest| newest.id)
    }

    fn newest_in_memory_only(&self) -> Option<SnapshotId> {
        let newest = self.list(&[MEMORY]).pop()?.id;
        self.newest_in_store().is_none_or(|stored| stored < newest).then_some(newest)
    }
}

fn held_of(manifest: &Manifest) -> Held {
    Held {
        id: manifest.id.to_string(),
        run: manifest.run,
        taken_unix_ms: manifest.taken_unix_ms,
        bytes: manifest.data_bytes(),
        stored_bytes: manifest.stored_bytes,
        stall_s: manifest.stall_s,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::ownership::Ownership;
    use crate::job::status::SharedStatus;
    use ckpt_snapshot::codec::Codec;
    use ckpt_snapshot::packed::{Limits, PackStore};
    use ckpt_snapshot::{Input, JobIdentity, JobKey, RelPath, Store, StoreRoot, Tier};
    use std::time::{Duration, SystemTime};

    const ENOUGH: Duration = Duration::from_secs(300);

    struct Scene {
        persister: Persister,
        store: Arc<Tiers>,
        status: Arc<SharedStatus>,
        room_bytes: Arc<AtomicU64>,
        dir: tempfile::TempDir,
    }

    fn packed(medium: DirMedium) -> Box<PackStore> {
        Box::new(PackStore::new(Arc::new(medium), Codec::default(), Limits::default()))
    }

    /// A job with a tier for memory, which in tests is a directory.
    fn scene(every: u64) -> Scene {
        let dir = tempfile::tempdir().unwrap();
        let root = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = root.job(&JobKey::named("job").unwrap());
        let room_bytes = Arc::new(AtomicU64::new(1 << 30));
        let (asked, staged_bytes) = (Arc::clone(&room_bytes), Arc::<AtomicU64>::default());
        let staged = Arc::clone(&staged_bytes);
        let room = move || Ok(asked.load(Ordering::Relaxed).saturating_sub(staged.load(Ordering::Relaxed)));
        let memory = DirMedium::new(dir.path().join("memory")).with_free_bytes(room);
        let store = Arc::new(Tiers::new(vec![
            Tier::new(MEMORY, packed(memory), true),
            Tier::new(tiers::DISK, packed(DirMedium::new(job.path().to_owned())), true),
            Tier::new(tiers::VERSION_1, Box::new(job.version_1()), false),
        ]));
        let status = Arc::new(SharedStatus::new("job".to_owned()));
        drop(job.lock_to_run(|_| ()).unwrap());
        let journal = Arc::new(Journal::of(&job));
        let parts = CopyParts {
            store: Arc::clone(&store),
            ownership: Arc::new(
                Ownership::claim::<ckpt_snapshot::OpenError>(&job, || {
                    Ok(crate::job::resume_point::rebuilt(&[]))
                })
                .unwrap(),
            ),
            dir: job,
            retention: Retention::newest(3),
            status: Arc::clone(&status),
        };
        Scene {
            persister: Persister::start(parts, journal, None, Some(every), staged_bytes, None).unwrap(),
            store,
            status,
            room_bytes,
            dir,
        }
    }

    fn manifest(number: u64) -> Manifest {
        let job = JobIdentity { key: "job".into(), cwd: "/".into(), argv: Vec::new() };
        let id = SnapshotId::new(number, SystemTime::UNIX_EPOCH);
        Manifest { host: crate::sys::host::facts(), run: 1, ..Manifest::new(id, job) }
    }

    impl Scene {
        /// Takes a snapshot, and waits for its copy if it is due. Returns whether it was taken into memory.
        fn take(&self, number: u64) -> bool {
            let manifest = manifest(number);
            let begun = self.persister.begin(&self.store, &manifest.id, 1 << 20, 1 << 20);
            let in_memory = begun.is_some();
            let home = || self.store.tier(tiers::DISK).unwrap().store().begin(&manifest.id, 1 << 20).unwrap();
            let mut writer = begun.unwrap_or_else(home);
            let content = vec![u8::try_from(number).unwrap(); 5000];
            let path = RelPath::new("images/a.img").unwrap();
            writer.put(&[Input { path, from: &content }], &|_| {}).unwrap();
            let id = manifest.id.clone();
            writer.commit(manifest).unwrap();
            if in_memory {
                self.persister.committed(&id);
            } else {
                self.persister.is_in_store(&id);
            }
            assert!(self.persister.copier.is_idle_within(ENOUGH));
            in_memory
        }

        fn numbers(&self, tier: &str) -> Vec<u64> {
            self.store.list_in(&[tier]).unwrap().iter().map(|one| one.id.sequence()).collect()
        }

        fn reported(&self) -> Vec<u64> {
            let held = self.status.snapshot().in_memory.unwrap().snapshots;
            held.iter().map(|one| one.id.parse::<SnapshotId>().unwrap().sequence()).collect()
        }
    }

    #[test]
    fn the_first_and_every_nth_are_copied_and_the_newest_two_stay() {
        let scene = scene(3);
        assert!((1..=6).all(|number| scene.take(number)));
        assert_eq!(scene.numbers(tiers::DISK), [1, 4]);
        assert_eq!(scene.numbers(MEMORY), [5, 6]);
        assert_eq!(scene.reported(), [5, 6]);
        let newest = scene.status.snapshot().in_memory.unwrap().newest_in_store.unwrap();
        assert!(newest.starts_with("000004"), "{newest}");
        let packs = std::fs::read_dir(scene.dir.path().join("memory/packs")).unwrap().count();
        assert_eq!(packs, 4, "the space of the others is freed: a pack and an index for each");
    }

    #[test]
    fn without_space_snapshots_are_written_to_the_store() {
        let scene = scene(3);
        assert!(scene.take(1));
        // Space for the snapshot alone, not for its images.
        scene.room_bytes.store((2 << 20) + (1 << 19), Ordering::Relaxed);
        assert!(!scene.take(2));
        scene.room_bytes.store(1 << 30, Ordering::Relaxed);
        assert!([3, 4, 5].iter().all(|&number| scene.take(number)));
        assert_eq!(
            scene.numbers(tiers::DISK),
            [1, 2, 5],
            "the third after the one that was written to the store"
        );
    }

    #[test]
    fn the_next_snapshot_is_copied_after_a_failed_copy() {
        let scene = scene(100);
        let packs = scene.dir.path().join("store/jobs/job");
        std::fs::create_dir_all(&packs).unwrap();
        std::fs::write(packs.join("packs"), "no directory").unwrap();
        assert!(scene.take(1));
        assert_eq!((scene.numbers(tiers::DISK), scene.numbers(MEMORY)), (vec![], vec![1]));
        assert!(scene.status.snapshot().in_memory.unwrap().last_failure.is_some());
        std::fs::remove_file(packs.join("packs")).unwrap();
        assert!(scene.take(2));
        assert_eq!(scene.numbers(tiers::DISK), [2]);
        assert_eq!(scene.status.snapshot().in_memory.unwrap().last_failure, None);
    }

    #[test]
    fn the_newest_is_copied_before_the_end() {
        let scene = scene(100);
        assert!((1..=4).all(|number| scene.take(number)));
        scene.persister.begin_last_copy();
        assert!(scene.persister.copier.is_idle_within(ENOUGH));
        assert_eq!(scene.numbers(tiers::DISK), [1, 4]);
        assert!(scene.take(5));
        scene.persister.complete_last_copy(Instant::now() + ENOUGH, || None);
        assert_eq!(scene.numbers(tiers::DISK), [1, 4, 5]);
        scene.persister.begin_last_copy();
        // The second time there is nothing to do.
        scene.persister.complete_last_copy(Instant::now(), || panic!("nothing is waited for"));
        assert!(scene.take(6));
        scene.persister.complete_last_copy(Instant::now() + ENOUGH, || Some("a second signal"));
        assert!(scene.persister.copier.is_idle_within(ENOUGH));
    }

    #[test]
    fn a_store_works_in_memory() {
        let Ok(memory) = Memory::open(None) else {
            return eprintln!("skipped: only root can have such memory");
        };
        let store = packed(memory.medium("own"));
        let manifest = manifest(1);
        let content: Vec<u8> =
            (0..9 << 20).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let path = RelPath::new("images/a.img").unwrap();
        let mut writer = store.begin(&manifest.id, content.len() as u64).unwrap();
        writer.put(&[Input { path: path.clone(), from: &content }], &|_| {}).unwrap();
        let manifest = writer.commit(manifest).unwrap();
        assert!((&*store as &dyn Store).read(&manifest, &path).unwrap() == content);
        memory.staged_bytes.store(u64::MAX, Ordering::Relaxed);
        let refused = store.begin(&SnapshotId::new(2, SystemTime::UNIX_EPOCH), 1).map(drop);
        assert!(matches!(refused, Err(SaveError::NoSpace { available_bytes: 0, .. })), "{refused:?}");
        store.remove(&manifest.id).unwrap();
        store.reclaim().unwrap();
        assert!(store.list().unwrap().is_empty());
    }
}
