//! One checkpoint attempt of a running job: prepare, check the space, copy memory in advance (`precopy.rs`), dump, persist,
//! commit, prune.
//!
//! ```text
//!   prepare ──► space ──► dump (the job is paused) ──► persist (the job runs) ──► committed ──► older ones pruned
//!    │           │         │  up to 3 tries             │
//!    └───────────┴─────────┴────────────────────────────┴──► failed: the job continues, older snapshots are unchanged
//! ```
//!
//! Attempts run one after another, so that the mirrors of device memory do not change while they are stored.

use crate::agents::{Agents, GpuState, Prepared, QuiesceError};
use crate::checkpoint::checkpointer::{AttemptHistory, CheckpointerParts};
use crate::checkpoint::diagnose;
use crate::checkpoint::dump::{Copies, Dumped, Frozen, Outputs};
use crate::checkpoint::host_memory::HostMemory;
use crate::checkpoint::nodes::PartAttempt;
use crate::checkpoint::precopy::Trials;
use crate::checkpoint::short_memory;
use crate::checkpoint::stall::{self, MeasuredPhases};
use crate::criu::{ImageError, Pagemap, chunk_ends, failed_processes};
use crate::files::capture::Capture;
use crate::files::held;
use crate::files::inventory::{INVENTORY, Inventory};
use crate::files::sources::StagedFile;
use crate::files::staging::{StagedDir, Staging};
use crate::files::tracking;
use crate::gpu::device_memory::{self, StoredProcess};
use crate::job::ownership::{ClaimedElsewhere, OwnershipError};
use crate::job::status::{is_same_reason, unix_ms};
use crate::namespace::{NamespaceError, Survey};
use crate::store::tiers;
use crate::sys::host;
use crate::sys::memory;
use crate::sys::path_text::shown;
use ckpt_protocol::control::{CutTime, Phase, Saved};
use ckpt_snapshot::{
    AgentsRecord, Cancellable, CutRecord, Input, Manifest, OpenError, ProcessMemory, ProcessTree, ReadError,
    RelPath, SaveError, SnapshotId, SnapshotWriter, Source, faults, size_text,
};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// The last reason why a checkpoint was not staged in memory. The same reason is logged as a warning once.
static NOT_IN_MEMORY: Mutex<String> = Mutex::new(String::new());

/// Why a checkpoint attempt failed. The job continues.
#[derive(Debug, thiserror::Error)]
pub enum AttemptError {
    /// The store has no space, or cannot be written.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// The store cannot be read.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// Another launcher has claimed the job.
    #[error(transparent)]
    ClaimedElsewhere(#[from] ClaimedElsewhere),
    /// The store's snapshots cannot be listed.
    #[error(transparent)]
    List(#[from] ReadError),
    /// CRIU could not dump the job.
    #[error("the job cannot be saved as it is: {reason}. Look at `ckpt-run docs limits` for what to do about it. CRIU's log is in {log}", log = log.display())]
    Dump {
        /// The reason, for people.
        reason: String,
        /// Directory of the logs.
        log: PathBuf,
    },
    /// A process has left the tree.
    #[error(
        "the process {0} is not below the job's root any more, so a snapshot would not have it: end it or start it again"
    )]
    Stray(i32),
    /// CRIU would save the job without an error and restore it wrong, or to detach it would do harm.
    #[error("the job cannot be saved as it is: {0}")]
    Broken(String),
    /// An agent refuses or does not answer, or there is no memory for the GPU state.
    #[error("the job cannot be saved as it is: {0}")]
    Agents(#[from] QuiesceError),
    /// An agent has reported impossible device memory.
    #[error(transparent)]
    DeviceMemory(#[from] device_memory::StoreDeviceMemoryError),
    /// The dump took longer than `--freeze-timeout`.
    #[error("the checkpoint was given up because the job was paused for {}: raise --freeze-timeout, or let the job use less memory. CRIU's log is in {log}", humantime::format_duration(*.limit), log = log.display())]
    Frozen {
        /// The limit.
        limit: Duration,
        /// Directory of the logs.
        log: PathBuf,
    },
    /// The store did not take device memory that has no copy in time.
    #[error("the checkpoint was given up because the store {store} has not taken the memory of the GPUs within {}, while the job was paused. The job continues. Use a faster store, raise --freeze-timeout, or free host memory for --mirror changed", humantime::format_duration(*.limit))]
    SlowStore {
        /// The store's path or address.
        store: String,
        /// The limit.
        limit: Duration,
    },
    /// Staging failed.
    #[error("cannot stage the images: {0}")]
    Staging(#[source] io::Error),
    /// The job would have been killed by the kernel.
    #[error("the checkpoint was given up since memory ran short while the snapshot was being stored: its copy of the job's memory, {}, was freed for the job. Give the job a higher memory limit, or free memory on the machine", size_text(*.bytes))]
    ShortMemory {
        /// What was to be stored.
        bytes: u64,
    },
    /// CRIU's images cannot be read.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Another node of the job could not take its part, or this one not in time.
    #[error("the nodes of the job have taken no snapshot: {0}")]
    Nodes(String),
    /// On several nodes: there is no memory here for a snapshot in memory.
    #[error(
        "the nodes of the job have taken no snapshot: {0} (--persist-every). The next one goes to the store"
    )]
    NoMemory(&'static str),
    /// A bug in ckpt-run.
    #[error("a bug in ckpt-run stopped the checkpoint; please report the messages before this one")]
    Crashed,
    /// The job ended meanwhile.
    #[error("the job ended during the checkpoint")]
    JobEnded,
    /// The request was withdrawn before the attempt began, or before the job was paused.
    #[error("the job is being ended")]
    Withdrawn,
    /// The job's namespace reports an error.
    #[error(transparent)]
    Namespace(NamespaceError),
}

impl AttemptError {
    /// Whether a snapshot that was to be in memory has failed for that memory.
    #[must_use]
    pub fn is_of_memory(&self) -> bool {
        matches!(self, Self::NoMemory(_) | Self::Save(_))
    }
}

impl From<NamespaceError> for AttemptError {
    fn from(error: NamespaceError) -> Self {
        match error {
            NamespaceError::Ended => Self::JobEnded,
            other => Self::Namespace(other),
        }
    }
}

impl From<OwnershipError> for AttemptError {
    fn from(error: OwnershipError) -> Self {
        match error {
            OwnershipError::ClaimedElsewhere(claim) => claim.into(),
            OwnershipError::Store(error) => error.into(),
        }
    }
}

/// What happens to the job after the dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterDump {
    /// The job continues.
    KeepRunning,
    /// The job ends with the dump, which may take this long at most, and no longer than any other.
    End(Duration),
}

/// Where a snapshot is stored first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// In the store: somebody waits until the snapshot is durable.
    Store,
    /// In memory if `--persist-every` allows that, otherwise in the store.
    MemoryOrStore,
    /// In memory, or nowhere: the other nodes of the job have their parts there.
    Memory,
}

/// The number of a try for the agents has the tries before it above this bit, and the number of the attempt below.
const TRY_SHIFT: u32 = 32;

/// One checkpoint attempt.
pub(super) struct Attempt<'a> {
    pub(super) parts: &'a CheckpointerParts,
    /// Counts from 1 within the job session.
    pub(super) number: u64,
    /// How often the agents were prepared.
    pub(super) preparations: AtomicU64,
    pub(super) after_dump: AfterDump,
    pub(super) destination: Destination,
    /// The longest that this attempt may pause the job.
    pub(super) freeze_timeout: Duration,
    pub(super) begun: Instant,
    /// For a part of a job on several nodes.
    pub(super) part: Option<PartAttempt>,
}

impl Attempt<'_> {
    pub(super) fn run(&self, history: &mut AttemptHistory) -> Result<Saved, AttemptError> {
        self.parts.status.disturb(true);
        let result = self.make_store_again().and_then(|()| self.take_snapshot(history));
        self.parts.status.disturb(false);
        self.parts.status.enter(Phase::Idle, 0);
        memory::give_back_freed();
        result
    }

    fn take_snapshot(&self, history: &mut AttemptHistory) -> Result<Saved, AttemptError> {
        faults::hit("attempt").map_err(AttemptError::Staging)?;
        let survey = self.examine()?;
        let prepared = self.prepare(survey.memory_bytes)?;
        let device_bytes = prepared.as_ref().map_or(0, Prepared::device_bytes);
        let id = self.next_id()?;
        let needed_bytes = survey.memory_bytes.saturating_add(device_bytes);
        let has_windows = prepared.as_ref().is_some_and(Prepared::has_windows);
        let (mut writer, in_memory) = self.begin(&id, needed_bytes, survey.memory_bytes, has_windows)?;
        let staging = self.staging(survey.memory_bytes)?;
        let copies = staging.subdir("files").map_err(AttemptError::Staging)?;
        let held = self.parts.dir.held_dir(&id);
        let CheckpointerParts { file_rules, identity, .. } = self.parts;
        let record = history.files.is_tracked().then(|| tracking::open(&self.parts.dir, &id)).flatten();
        let room_bytes = || staging.room_bytes(survey.memory_bytes).map_err(AttemptError::Staging);
        let mut capture =
            Capture::new(file_rules, &mut history.files, self.root(), &identity.cwd, &copies, held)
                .recorded_by(record.as_ref());
        capture.has_room(room_bytes()?);
        capture.touch(self.parts.job.namespace.written_files(None).ok().flatten());
        capture.prepare();
        self.parts.status.enter(Phase::Dump, survey.memory_bytes);
        let memory = self.copies(&id, &staging, survey.memory_bytes, &mut history.precopy)?;
        if memory.before().is_some() {
            capture.has_room(room_bytes()?);
        }
        self.vote()?;
        // The job is paused meanwhile, on all its nodes.
        let raised = self.parts.priority.raise();
        let mut dumped = self.beside_storing(&mut *writer, |storing| {
            let outputs = Outputs { files: &mut capture, storing };
            self.dump_with_retries(&id, &staging, prepared, memory, survey.memory_bytes, outputs)
        })?;
        drop(capture);
        drop((record, staging));
        history.precopy.measure(&dumped, survey.memory_bytes);
        self.parts.status.disturb(false);
        // Connections to the other nodes are part of the snapshot.
        if self.part.is_none() {
            history.warn_of_outside_connections(&dumped.frozen.outside_tcp);
        }
        self.has_thawed()?;
        drop(raised);
        let inventory = dumped.frozen.files.take_inventory(&self.parts.identity.cwd);
        let failed = failed_processes(&|name| dumped.images.read(name));
        let mut failed = failed.map_err(|error| AttemptError::Staging(io::Error::other(error)))?;
        // Those that their parents have waited for.
        failed.extend(self.parts.job.agents.iter().flat_map(Agents::take_failed));
        dumped.failed_process = history.failures.note(failed, Instant::now());
        let phases = dumped.phases;
        let (manifest, device) = self.persist(id, writer, dumped, &copies, &inventory)?;
        self.await_commit(&manifest, in_memory)?;
        let unread_bytes = self.note_stored(&manifest, &device);
        let uncovered = inventory.uncovered.clone();
        history.files.committed(&manifest, inventory);
        let saved = self.saved(&manifest, phases, unread_bytes, in_memory, &uncovered);
        self.parts.status.saved(&saved);
        history.has_garbage |= self.committed(history, &manifest.id, in_memory);
        Ok(saved)
    }

    /// The summary of a saved snapshot.
    fn saved(
        &self,
        manifest: &Manifest,
        phases: MeasuredPhases,
        unread_bytes: u64,
        in_memory: bool,
        uncovered: &BTreeMap<String, String>,
    ) -> Saved {
        Saved {
            id: manifest.id.to_string(),
            bytes: manifest.data_bytes(),
            stored_bytes: manifest.stored_bytes,
            changed_bytes: manifest.changed_bytes,
            unread_bytes,
            stall_s: manifest.stall_s,
            stall_phases: Some(Box::new(stall::phases(phases, manifest.stall_s))),
            cut: cut_time(manifest),
            durable_s: self.begun.elapsed().as_secs_f64(),
            taken_unix_ms: manifest.taken_unix_ms,
            in_memory,
            is_doubtful: manifest.is_doubtful(),
            uncovered_files: uncovered
                .iter()
                .map(|(path, why)| (shown(path).into_owned(), why.clone()))
                .collect(),
        }
    }

    /// Surveys the job, and refuses what cannot be saved before anything is changed.
    fn examine(&self) -> Result<Survey, AttemptError> {
        let survey = self.parts.job.namespace.survey()?;
        if let Some(stray) = survey.strays.first() {
            return Err(AttemptError::Stray(*stray));
        }
        let mut broken = diagnose::broken_by_a_restore(&self.proc(), self.parts.job.root_pid, &survey.pids);
        let terminal = self.parts.job.stdio.terminal_path();
        broken.extend(diagnose::beyond_our_rights(&self.proc(), &survey, terminal));
        broken.extend(diagnose::not_to_be_detached(&self.proc(), &survey.pids));
        if !broken.is_empty() {
            return Err(AttemptError::Broken(broken.join("; ")));
        }
        Ok(survey)
    }

    /// Begins the snapshot: in memory if that is the destination, there is space, and memory of the GPUs is to be copied to
    /// memory at all; otherwise in the store. Also returns whether it is in memory.
    fn begin(
        &self,
        id: &SnapshotId,
        needed_bytes: u64,
        memory_bytes: u64,
        has_windows: bool,
    ) -> Result<(Box<dyn SnapshotWriter + '_>, bool), AttemptError> {
        let store = &*self.parts.store;
        let persister =
            self.parts.persister.as_ref().filter(|_| self.destination != Destination::Store && !has_windows);
        let staged_bytes = memory_bytes.saturating_add(memory_bytes / 8);
        if let Some(writer) =
            persister.and_then(|persister| persister.begin(store, id, needed_bytes, staged_bytes))
        {
            return Ok((writer, true));
        }
        if self.destination == Destination::Memory {
            let why = if has_windows {
                "memory of GPUs without a mirror is not kept in memory"
            } else {
                "there is no memory for a snapshot in memory"
            };
            return Err(AttemptError::NoMemory(why));
        }
        let home = store.tier(tiers::home(store)).expect("every store has it");
        // The images come first.
        let _reserved = memory::reserve(staged_bytes);
        Ok((home.store().begin(id, needed_bytes)?, false))
    }

    /// Hands a committed snapshot to the persister or the uploader, and prunes older ones. Returns whether any were
    /// pruned, or deleted by `ckpt-run rm` since the last commit.
    fn committed(&self, history: &mut AttemptHistory, id: &SnapshotId, in_memory: bool) -> bool {
        let CheckpointerParts { store, dir, retention, status, uploader, persister, ownership, .. } =
            self.parts;
        match persister {
            Some(persister) if in_memory => {
                persister.committed(id);
                return false;
            }
            Some(persister) => persister.is_in_store(id),
            None => {}
        }
        if let Some(uploader) = uploader {
            uploader.committed(id, matches!(self.after_dump, AfterDump::End(_)));
        }
        let before = |ids: &[SnapshotId]| Ok(ownership.before_deletion(ids)?);
        let is_pruned = tiers::prune(store, dir, retention, status.last_progress_unix_ms(), before);
        let listed = tiers::list_local(store);
        let is_deleted = listed.as_ref().is_ok_and(|listed| history.note_stored(listed));
        let present = || -> Result<_, ReadError> {
            let listed = listed?;
            if let Some(oldest) = listed.first() {
                tracking::sweep(dir, &oldest.id);
            }
            Ok(listed.iter().map(|listed| listed.id.to_string()).collect())
        };
        if let Err(error) = held::sweep(dir, present) {
            tracing::debug!("cannot delete files that were held for deleted snapshots: {error}");
        }
        is_pruned || is_deleted
    }

    /// Identifies the present try to the agents: an answer to the one before may come late.
    pub(super) fn number_for_agents(&self) -> u64 {
        let before = self.preparations.load(Ordering::Relaxed).saturating_sub(1);
        self.number | before << TRY_SHIFT
    }

    /// Prepares the agents while the job runs, which has `memory_bytes` of host memory.
    pub(super) fn prepare(&self, memory_bytes: u64) -> Result<Option<Prepared>, AttemptError> {
        let Some(agents) = &self.parts.job.agents else { return Ok(None) };
        faults::hit("prepare").map_err(AttemptError::Staging)?;
        // All tries store device memory in the same way.
        if self.preparations.fetch_add(1, Ordering::Relaxed) == 0 {
            agents.set_mirror_mode(self.parts.mirror);
        }
        let prepared = agents.prepare(self.number_for_agents(), self.freeze_timeout, memory_bytes)?;
        faults::hit("staged").map_err(AttemptError::Staging)?;
        Ok(Some(prepared))
    }

    /// The job is of more worth than the reason why somebody has deleted its store.
    fn make_store_again(&self) -> Result<(), AttemptError> {
        if self.parts.dir.make_again(&mut self.parts.lock.lock())? {
            tracing::warn!(
                "files in {} were deleted while the job runs, or it was moved: what is needed there is made again",
                self.parts.dir.store().display()
            );
        }
        Ok(())
    }

    fn next_id(&self) -> Result<SnapshotId, AttemptError> {
        let newest = tiers::list_local(&self.parts.store)?.last().map_or(0, |listed| listed.id.sequence());
        let number = self.parts.ownership.next_number(newest)?;
        Ok(SnapshotId::new(number, SystemTime::now()))
    }

    /// Copies the job's memory while the job runs, or allocates memory to copy it while the job is paused.
    fn copies(
        &self,
        id: &SnapshotId,
        staging: &Staging,
        memory_bytes: u64,
        trials: &mut Trials,
    ) -> Result<Copies, AttemptError> {
        if let Some(precopied) = self.precopy(id, staging, memory_bytes, trials)? {
            return Ok(Copies::Before(precopied));
        }
        let copied = HostMemory::allocate(staging, &format!("memory-{id}"), self.tree());
        let copied = copied.unwrap_or_else(|error| {
            tracing::debug!("the job's memory is left to CRIU: {error}");
            None
        });
        let left_bytes = memory_bytes.saturating_sub(copied.as_ref().map_or(0, HostMemory::bytes));
        if let Err(error) = staging.warm(left_bytes) {
            tracing::debug!("memory for the images could not be allocated in advance: {error}");
        }
        Ok(copied.map_or(Copies::None, Copies::Paused))
    }

    /// Where CRIU leaves its images: memory if there is enough, otherwise the store's disk.
    fn staging(&self, image_bytes: u64) -> Result<Arc<Staging>, AttemptError> {
        let tell = |why: &str| {
            let before = std::mem::replace(&mut *NOT_IN_MEMORY.lock(), why.to_owned());
            let is_known = is_same_reason(&before, why);
            if is_known {
                tracing::debug!("the checkpoint cannot be staged in memory ({why})");
            } else {
                tracing::warn!(
                    "the checkpoint cannot be staged in memory ({why}): it is written to disk, and the job is paused until that is done"
                );
            }
        };
        let staging = Staging::for_images(image_bytes, 0, self.parts.staging_dir.as_deref(), tell);
        let staging = staging.map_err(AttemptError::Staging)?;
        Ok(Arc::new(staging))
    }

    /// Stores the images and the device memory while the job runs. Also returns what was stored of the latter.
    fn persist(
        &self,
        id: SnapshotId,
        mut writer: Box<dyn SnapshotWriter + '_>,
        dumped: Dumped,
        copies: &StagedDir,
        inventory: &Inventory,
    ) -> Result<(Manifest, Vec<StoredProcess>), AttemptError> {
        let list = serde_json::to_vec(inventory).map_err(|error| AttemptError::Staging(error.into()))?;
        let list_path = RelPath::new(INVENTORY).expect("a plain path");
        let files = dumped.frozen.files.sources(copies);
        let images = staged_files(&dumped).map_err(AttemptError::Staging)?;
        let gpu = device_memory::to_store(&dumped.gpu)?;
        let staged = images.iter().map(|(path, file)| (path, &**file));
        let sources: Vec<_> = staged
            .chain(gpu.iter().flat_map(StoredProcess::sources))
            .chain(files.iter().map(|(path, from)| (*path, &**from)))
            .chain([(&list_path, &list as &dyn Source)])
            .collect();
        self.parts.status.enter(Phase::Persist, sources.iter().map(|(_, source)| source.bytes()).sum());
        let is_short = AtomicBool::new(false);
        let guarded: Vec<_> = sources.iter().map(|(_, from)| Cancellable::new(*from, &is_short)).collect();
        let cancellable: Vec<_> =
            guarded.iter().map(|from| Cancellable::new(from, &self.parts.cancelled)).collect();
        let inputs = sources.iter().zip(&cancellable);
        let inputs: Vec<_> = inputs.map(|((path, _), from)| Input { path: (*path).clone(), from }).collect();
        let mut put = || writer.put(&inputs, &|bytes| self.parts.status.advance(bytes));
        let stored = match dumped.copies_in_memory() {
            copies if copies.is_empty() => put(),
            copies => short_memory::while_watched(&copies, &is_short, put),
        };
        if is_short.into_inner() {
            let bytes = sources.iter().map(|(_, source)| source.bytes()).sum();
            return Err(AttemptError::ShortMemory { bytes });
        }
        stored?;
        drop((files, images));
        let processes: Vec<_> = gpu.iter().map(|stored| stored.process.clone()).collect();
        let cut = dumped
            .cut
            .map(|cut| CutRecord { duration_s: cut.duration.as_secs_f64(), attempts: cut.attempts });
        let (part, failed_process) = (self.part_record(&dumped.frozen), dumped.failed_process);
        let manifest = self.manifest(id, dumped.frozen, dumped.stall_s, dumped.agents, &dumped.gpu);
        let inventory = Some(list_path);
        let manifest = Manifest { part, cut, gpu: processes, inventory, failed_process, ..manifest };
        if let Some(claim) = self.parts.ownership.claimed_elsewhere() {
            return Err(claim.into());
        }
        let manifest = writer.commit(Manifest { version: manifest.least_version(), ..manifest })?;
        Ok((manifest, gpu))
    }

    /// The store has this device memory, and keeps it: mirrors need not. Returns the bytes that were known to be stored
    /// before, and were not read.
    fn note_stored(&self, manifest: &Manifest, device: &[StoredProcess]) -> u64 {
        let manifest = Arc::new(manifest.clone());
        device.iter().for_each(|stored| stored.record_commit(&manifest, &self.parts.store));
        if let Some(agents) = &self.parts.job.agents {
            self.parts.status.mirror_bytes(agents.free_stored());
        }
        device.iter().map(StoredProcess::unread_bytes).sum()
    }

    fn manifest(
        &self,
        id: SnapshotId,
        frozen: Frozen,
        stall_s: f64,
        agents: Option<AgentsRecord>,
        gpu: &[GpuState],
    ) -> Manifest {
        let (survey, descriptors) = (frozen.survey, frozen.descriptors);
        Manifest {
            id: id.clone(),
            job: self.parts.identity.clone(),
            run: self.parts.ownership.record().run,
            taken_unix_ms: unix_ms(frozen.taken),
            stall_s,
            host: host::facts(),
            ckpt_run_version: env!("CARGO_PKG_VERSION").to_owned(),
            criu_version: self.parts.criu.version.to_string(),
            tree: ProcessTree {
                root_pid: self.parts.job.root_pid,
                command_pid: self.parts.job.command_pid,
                last_pid: survey.last_pid,
                threads: survey.affinity.iter().map(|group| group.tids.len() as u64).sum(),
                affinity: survey.affinity,
                event_counters: descriptors.event_counters,
                socket_options: descriptors.socket_options,
                agents,
                processes: with_device_memory(survey.processes, self.parts.job.root_pid, gpu),
                private_dir: Some(self.parts.job.namespace.private_dir().to_owned()),
            },
            stdio: frozen.stdio,
            tty: frozen.tty,
            open_files: frozen.open_files,
            shm_files: frozen.shm_files,
            spare_files: Vec::new(),
            directories: frozen.directories,
            links: frozen.links,
            ..Manifest::new(id, self.parts.identity.clone())
        }
    }
}

/// The memory of the job's processes, without the reaper.
fn with_device_memory(
    mut processes: Vec<ProcessMemory>,
    root_pid: i32,
    gpu: &[GpuState],
) -> Vec<ProcessMemory> {
    processes.retain(|process| process.pid != root_pid);
    for state in gpu {
        let pid = state.process.pid.and_then(|pid| i32::try_from(pid).ok());
        if let Some(process) = processes.iter_mut().find(|process| Some(process.pid) == pid) {
            let bytes = state.report.regions.iter().map(|region| region.bytes);
            process.device_bytes = bytes.fold(0, u64::saturating_add);
        }
    }
    processes
}

fn cut_time(manifest: &Manifest) -> Option<Box<CutTime>> {
    let time = |cut: CutRecord| CutTime { duration_s: cut.duration_s, attempts: cut.attempts };
    manifest.cut.map(time).map(Box::new)
}

/// The ends of the chunks of each image with memory pages, by its name in the snapshot.
fn page_chunks(images: &StagedDir) -> io::Result<HashMap<String, Vec<u64>>> {
    let mut found = HashMap::new();
    for (name, _) in images.files()? {
        if name.starts_with("pagemap-")
            && let Some(pagemap) = images.read(&name)?.and_then(|image| Pagemap::parse(&image))
        {
            found.insert(format!("images/pages-{}.img", pagemap.pages_id), chunk_ends(&pagemap.runs));
        }
    }
    Ok(found)
}

/// The staged files of a dump, by their names in the snapshot.
fn staged_files(dumped: &Dumped) -> io::Result<Vec<(RelPath, Box<dyn Source + '_>)>> {
    let mut all: Vec<(RelPath, Box<dyn Source>)> = Vec::new();
    let mut ends = page_chunks(&dumped.images)?;
    for (kind, dir) in [("images", &dumped.images), ("shm", &dumped.shm)] {
        for (name, bytes) in dir.files()? {
            let path = RelPath::new(format!("{kind}/{name}")).map_err(io::Error::other)?;
            let ends = ends.remove(path.as_str());
            let merged = dumped.merged.get(&name).filter(|_| kind == "images");
            let source: Box<dyn Source> = match merged {
                Some(pages) => {
                    let dirs = std::iter::once(dir).chain(dumped.copies.dirs());
                    Box::new(pages.file(dirs, ends.unwrap_or_default()))
                }
                None => {
                    let ends = ends.filter(|ends| ends.last() == Some(&bytes));
                    Box::new(StagedFile::new(dir, name, bytes).with_ends(ends.unwrap_or_default()))
                }
            };
            all.push((path, source));
        }
    }
    Ok(all)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use ckpt_snapshot::JobIdentity;

    pub(crate) fn manifest(open_files: Vec<ckpt_snapshot::OpenFile>) -> Manifest {
        let job = JobIdentity { key: "job".into(), cwd: "/".into(), argv: Vec::new() };
        let id = SnapshotId::new(1, SystemTime::UNIX_EPOCH);
        Manifest { host: host::facts(), open_files, ..Manifest::new(id, job) }
    }
}
