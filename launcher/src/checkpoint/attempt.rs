//! One checkpoint of a running job: prepare, room, dump, persist, commit, retention.
//!
//! ```text
//!   prepare ──► room ──► dump (the job stands still) ──► persist (the job runs) ──► committed ──► older ones pruned
//!    │           │        │  up to 3 tries                │
//!    └───────────┴────────┴───────────────────────────────┴──► given up: the job runs on, older snapshots are as
//!                                                               they were
//! ```
//!
//! The mirrors of device memory stay as they are while they are stored: one attempt follows the other.

use crate::agents::{Agents, Prepared, QuiesceError};
use crate::checkpoint::diagnose;
use crate::checkpoint::dump::{Dumped, Frozen};
use crate::criu::{Criu, ImageError, Pagemap, chunk_ends};
use crate::files::sources::StagedFile;
use crate::files::staging::{StagedDir, Staging};
use crate::gpu::device_memory;
use crate::job::ownership::{Ownership, OwnershipError, TakenUp};
use crate::job::status::{SharedStatus, unix_ms};
use crate::namespace::stdio::Stdio;
use crate::namespace::{Namespace, NamespaceError};
use crate::persist::memory::Persister;
use crate::persist::upload::Uploader;
use crate::store::tiers;
use crate::sys::host;
use ckpt_protocol::control::{Phase, Saved};
use ckpt_snapshot::{
    AgentsRecord, Cancellable, Input, JobDir, JobIdentity, Manifest, OpenError, ProcessTree, ReadError,
    RelPath, Retention, SaveError, SnapshotId, SnapshotWriter, Source, Tiers, faults,
};
use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

/// A job that runs, as far as checkpoints need it.
pub struct RunningJob {
    /// Its namespaces.
    pub namespace: Namespace,
    /// Its standard streams.
    pub stdio: Stdio,
    /// The root of its tree.
    pub root_pid: i32,
    /// The command.
    pub command_pid: i32,
    /// The agents in its processes, when the interposer is preloaded.
    pub agents: Option<Agents>,
}

/// A checkpoint did not become a snapshot; the job runs on.
#[derive(Debug, thiserror::Error)]
pub enum AttemptError {
    /// The store has no room, or cannot be written.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// The store cannot be read.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// It is not this launcher's job any more.
    #[error(transparent)]
    TakenUp(#[from] TakenUp),
    /// The store's snapshots cannot be listed.
    #[error(transparent)]
    List(#[from] ReadError),
    /// CRIU could not dump the job.
    #[error("the job cannot be saved as it is: {reason}. Look into docs/limits.md for what to do about it. CRIU's log is in {log}", log = log.display())]
    Dump {
        /// In plain words.
        reason: String,
        /// Directory of the logs.
        log: PathBuf,
    },
    /// A process has left the tree.
    #[error(
        "the process {0} is not below the job's root any more, so a snapshot would not have it: end it or start it again"
    )]
    Stray(i32),
    /// CRIU would take it and bring it back wrong.
    #[error("the job cannot be saved as it is: {0}")]
    Broken(String),
    /// The interposer in one of the processes says no, or says nothing; or there is no memory for what is on the GPUs.
    #[error("the job cannot be saved as it is: {0}")]
    Agents(#[from] QuiesceError),
    /// What an agent has told of device memory cannot be.
    #[error(transparent)]
    DeviceMemory(#[from] device_memory::StoreDeviceMemoryError),
    /// It took too long.
    #[error("the job stood still for {}, so the checkpoint was given up: give it more time by --freeze-timeout, or let the job use less memory. CRIU's log is in {log}", humantime::format_duration(*.limit), log = log.display())]
    Frozen {
        /// The limit.
        limit: Duration,
        /// Directory of the logs.
        log: PathBuf,
    },
    /// Staging failed.
    #[error("cannot stage the images: {0}")]
    Staging(#[source] io::Error),
    /// CRIU's images do not read.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A fault of ours.
    #[error("ckpt-run made a mistake; please report what it printed before this")]
    Crashed,
    /// The job ended meanwhile.
    #[error("the job ended during the checkpoint")]
    JobEnded,
    /// It was wanted no more when its turn came.
    #[error("the job was asked to end by itself instead")]
    Withdrawn,
    /// The namespace refuses.
    #[error(transparent)]
    Namespace(NamespaceError),
}

impl From<NamespaceError> for AttemptError {
    fn from(error: NamespaceError) -> Self {
        match error {
            NamespaceError::Gone => Self::JobEnded,
            other => Self::Namespace(other),
        }
    }
}

impl From<OwnershipError> for AttemptError {
    fn from(error: OwnershipError) -> Self {
        match error {
            OwnershipError::TakenUp(taken) => taken.into(),
            OwnershipError::Store(error) => error.into(),
        }
    }
}

/// What becomes of the job once it is dumped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// It runs on.
    RunsOn,
    /// It is ended. The dump has to be over in this time at most.
    Ends(Duration),
}

/// Where a snapshot is brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goes {
    /// To the store: somebody waits for it to be safe.
    ToStore,
    /// To memory, unless all go to the store, and from there to the store in its turn.
    AsItsTurn,
}

/// Takes snapshots of one running job.
pub struct Checkpointer {
    /// The job.
    pub job: Arc<RunningJob>,
    /// Its place in the store.
    pub dir: JobDir,
    /// Its snapshots.
    pub store: Arc<Tiers>,
    /// Its record; the highest snapshot number is kept there.
    pub ownership: Arc<Ownership>,
    /// Who it is.
    pub identity: JobIdentity,
    /// The CRIU to use.
    pub criu: Criu,
    /// The longest that the job may stand still.
    pub freeze_timeout: Duration,
    /// What the attempt under way does to the job.
    pub after: After,
    /// Snapshots to keep.
    pub retention: Retention,
    /// Told of everything.
    pub status: Arc<SharedStatus>,
    /// Set when the job has ended well: what is being stored is not needed any more.
    pub cancelled: Arc<AtomicBool>,
    /// Set when the life of the job ends: what is only tidying is not waited for.
    pub is_over: Arc<AtomicBool>,
    /// Counts attempts, for names.
    pub attempts: u64,
    /// Snapshots were removed, and what only they needed is still there.
    pub is_to_reclaim: bool,
    /// Copies snapshots to the object store, if there is one.
    pub uploader: Option<Arc<Uploader>>,
    /// Keeps snapshots in memory, if it is to.
    pub persister: Option<Arc<Persister>>,
    /// Where the attempt under way brings its snapshot.
    pub goes_to: Goes,
    /// Connections out of the job that were told of.
    pub told_outside: HashSet<String>,
}

impl Checkpointer {
    /// Takes one snapshot.
    ///
    /// # Errors
    /// See [`AttemptError`]: older snapshots are as they were, and the job runs on, unless it was to be ended and what
    /// was dumped could not be stored.
    pub fn attempt(&mut self, after: After, goes_to: Goes) -> Result<Saved, AttemptError> {
        let begun = Instant::now();
        self.attempts += 1;
        (self.after, self.goes_to) = (after, goes_to);
        if let After::Ends(limit) = after {
            // There is no attempt after this one.
            self.freeze_timeout = self.freeze_timeout.min(limit);
        }
        self.status.disturb(true);
        let result = self.attempt_inner(begun);
        self.status.disturb(false);
        self.status.enter(Phase::Idle, 0);
        result
    }

    fn attempt_inner(&mut self, begun: Instant) -> Result<Saved, AttemptError> {
        faults::hit("attempt").map_err(AttemptError::Staging)?;
        let store = Arc::clone(&self.store);
        let survey = self.job.namespace.survey()?;
        if let Some(stray) = survey.strays.first() {
            return Err(AttemptError::Stray(*stray));
        }
        let mut broken = diagnose::broken_by_a_restore(&self.proc(), self.job.root_pid, &survey.pids);
        broken.extend(diagnose::beyond_our_rights(&self.proc(), &survey, self.job.stdio.terminal_path()));
        if !broken.is_empty() {
            return Err(AttemptError::Broken(broken.join("; ")));
        }
        let prepared = self.prepare()?;
        let device_bytes = prepared.as_ref().map_or(0, Prepared::mirror_bytes);
        let id = self.next_id()?;
        let needed_bytes = survey.resident_bytes.saturating_add(device_bytes);
        let (writer, in_memory) = self.begin(&store, &id, needed_bytes, survey.resident_bytes)?;
        let staging = self.staging(survey.resident_bytes)?;
        if let Err(error) = staging.warm(survey.resident_bytes) {
            tracing::debug!("memory for the images could not be fetched ahead: {error}");
        }
        self.status.enter(Phase::Dump, survey.resident_bytes);
        let dumped = self.dump_with_retries(&id, &staging, prepared)?;
        drop(staging);
        self.status.disturb(false);
        self.tell_outside(&dumped.frozen.outside_tcp);
        let (manifest, unread_bytes) = self.persist(id, writer, dumped)?;
        let saved = Saved {
            id: manifest.id.to_string(),
            bytes: manifest.data_bytes(),
            stored_bytes: manifest.stored_bytes,
            unread_bytes,
            stall_s: manifest.stall_s,
            durable_s: begun.elapsed().as_secs_f64(),
            taken_unix_ms: manifest.taken_unix_ms,
            in_memory,
        };
        self.status.saved(&saved);
        self.committed(&manifest.id, in_memory);
        Ok(saved)
    }

    /// In memory if it is to go there and there is room, in the store otherwise. Says whether it is in memory.
    fn begin<'a>(
        &self,
        store: &'a Tiers,
        id: &SnapshotId,
        needed_bytes: u64,
        resident_bytes: u64,
    ) -> Result<(Box<dyn SnapshotWriter + 'a>, bool), AttemptError> {
        let persister = self.persister.as_ref().filter(|_| self.goes_to == Goes::AsItsTurn);
        let staged_bytes = resident_bytes.saturating_add(resident_bytes / 8);
        if let Some(writer) =
            persister.and_then(|persister| persister.begin(store, id, needed_bytes, staged_bytes))
        {
            return Ok((writer, true));
        }
        let home = store.tier(tiers::home(store)).expect("every store has it");
        Ok((home.store().begin(id, needed_bytes)?, false))
    }

    /// What follows a snapshot that was taken.
    fn committed(&mut self, id: &SnapshotId, in_memory: bool) {
        if let (Some(persister), true) = (&self.persister, in_memory) {
            return persister.committed(id);
        }
        if let Some(persister) = &self.persister {
            persister.is_in_store(id);
        }
        if let Some(uploader) = &self.uploader {
            uploader.committed(id, matches!(self.after, After::Ends(_)));
        }
        self.is_to_reclaim |=
            tiers::prune(&self.store, &self.dir, &self.retention, self.status.worked_until_unix_ms());
    }

    /// Prepares the agents; the job runs meanwhile.
    pub(crate) fn prepare(&self) -> Result<Option<Prepared>, AttemptError> {
        let Some(agents) = &self.job.agents else { return Ok(None) };
        faults::hit("prepare").map_err(AttemptError::Staging)?;
        let prepared = agents.prepare(self.attempts, self.freeze_timeout)?;
        faults::hit("staged").map_err(AttemptError::Staging)?;
        Ok(Some(prepared))
    }

    /// Says once which connections a resume will not bring back.
    fn tell_outside(&mut self, peers: &[String]) {
        for peer in peers {
            if self.told_outside.insert(peer.clone()) {
                tracing::warn!(
                    "the job has a TCP connection to {peer}, outside of it: the snapshot is taken, but when it is resumed the job will find that connection broken and has to make it again"
                );
            }
        }
    }

    fn next_id(&self) -> Result<SnapshotId, AttemptError> {
        let newest = tiers::list_local(&self.store)?.last().map_or(0, |listed| listed.id.sequence());
        let sequence = self.ownership.change(|record| {
            record.last_sequence = record.last_sequence.max(newest) + 1;
            record.last_sequence
        })?;
        Ok(SnapshotId::new(sequence, SystemTime::now()))
    }

    /// Memory if it is there, the disk of the store otherwise.
    fn staging(&self, image_bytes: u64) -> Result<Arc<Staging>, AttemptError> {
        let tell = |why: &str| {
            tracing::warn!(
                "the checkpoint cannot be staged in memory ({why}): it goes straight to disk, and the job stands still for as long as that takes"
            );
        };
        let staging = Staging::for_images(image_bytes, 0, &self.dir.path().join("staging"), tell);
        staging.map(Arc::new).map_err(AttemptError::Staging)
    }

    /// Stores the images and the device memory; the job runs meanwhile. Returns also how much was not read (bytes).
    fn persist(
        &self,
        id: SnapshotId,
        mut writer: Box<dyn SnapshotWriter + '_>,
        dumped: Dumped,
    ) -> Result<(Manifest, u64), AttemptError> {
        let staged = staged_files(&dumped).map_err(AttemptError::Staging)?;
        let gpu = device_memory::to_store(&dumped.gpu)?;
        let staged = staged.iter().map(|(path, file)| (path, file as &dyn Source));
        let sources: Vec<_> = staged.chain(gpu.iter().flat_map(device_memory::Stored::sources)).collect();
        self.status.enter(Phase::Persist, sources.iter().map(|(_, source)| source.bytes()).sum());
        let cancellable =
            sources.into_iter().map(|(path, from)| (path, Cancellable::new(from, &self.cancelled)));
        let cancellable: Vec<_> = cancellable.collect();
        let inputs = cancellable.iter().map(|(path, from)| Input { path: (*path).clone(), from });
        writer.put(&inputs.collect::<Vec<_>>(), &|bytes| self.status.advance(bytes))?;
        let processes: Vec<_> = gpu.iter().map(|stored| stored.process.clone()).collect();
        let manifest = self.manifest(id, dumped.frozen, dumped.stall_s, dumped.agents);
        let version = Manifest::version_for(&processes);
        if let Some(taken) = self.ownership.taken_up() {
            return Err(taken.into());
        }
        let manifest = writer.commit(Manifest { version, gpu: processes, ..manifest })?;
        gpu.iter().for_each(|stored| stored.committed(&manifest));
        Ok((manifest, gpu.iter().map(device_memory::Stored::unread_bytes).sum()))
    }

    fn manifest(
        &self,
        id: SnapshotId,
        frozen: Frozen,
        stall_s: f64,
        agents: Option<AgentsRecord>,
    ) -> Manifest {
        let survey = frozen.survey;
        Manifest {
            version: Manifest::version_for(&[]),
            id,
            job: self.identity.clone(),
            run: self.ownership.record().run,
            taken_unix_ms: unix_ms(frozen.taken),
            stall_s,
            host: host::facts(),
            ckpt_run_version: env!("CARGO_PKG_VERSION").to_owned(),
            criu_version: self.criu.version.to_string(),
            tree: ProcessTree {
                root_pid: self.job.root_pid,
                command_pid: self.job.command_pid,
                last_pid: survey.last_pid,
                threads: survey.affinity.iter().map(|group| group.tids.len() as u64).sum(),
                affinity: survey.affinity,
                agents,
            },
            stdio: frozen.stdio,
            tty: frozen.tty,
            open_files: frozen.open_files,
            shm_files: frozen.shm_files,
            spare_files: frozen.spare_files,
            directories: frozen.directories,
            links: frozen.links,
            gpu: Vec::new(),
            files: Vec::new(),
            stored_bytes: None,
        }
    }

    /// Gives back the room of what no snapshot needs any more. Nobody waits for it. `is_saved` is whether the last
    /// attempt was a success: what a failed one has brought to an object store is the next one's to build upon.
    pub fn reclaim(&mut self, is_saved: bool) {
        let may = self.is_to_reclaim && (is_saved || tiers::is_on_disk(&self.store));
        if may && self.ownership.check().is_ok() {
            self.is_to_reclaim = false;
            tiers::reclaim_and_tell(&self.store, &self.is_over);
        }
    }
}

/// Where chunks of images of pages end, by their names in the snapshot.
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

/// What a dump has left, by its names in the snapshot.
fn staged_files(dumped: &Dumped) -> io::Result<Vec<(RelPath, StagedFile<'_>)>> {
    let mut all = Vec::new();
    let mut ends = page_chunks(&dumped.images)?;
    for (kind, dir) in [("images", &dumped.images), ("shm", &dumped.shm), ("spare", &dumped.spare)] {
        for (name, bytes) in dir.files()? {
            let path = RelPath::new(format!("{kind}/{name}")).map_err(io::Error::other)?;
            let file = StagedFile::new(dir, name, bytes);
            let ends = ends.remove(path.as_str()).filter(|ends| ends.last() == Some(&bytes));
            all.push((path, file.with_ends(ends.unwrap_or_default())));
        }
    }
    Ok(all)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn manifest(open_files: Vec<ckpt_snapshot::OpenFile>) -> Manifest {
        let job = JobIdentity { key: "job".into(), cwd: "/".into(), argv: Vec::new() };
        let id = SnapshotId::new(1, SystemTime::UNIX_EPOCH);
        Manifest { host: host::facts(), open_files, ..Manifest::new(id, job) }
    }
}
