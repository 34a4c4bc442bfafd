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
use crate::criu::{Criu, ImageError};
use crate::device_memory;
use crate::diagnose;
use crate::dump::{Dumped, Frozen};
use crate::host;
use crate::namespace::{Namespace, NamespaceError};
use crate::staging::{self, StagedDir, Staging};
use crate::status::{SharedStatus, unix_ms};
use crate::stdio::Stdio;
use ckpt_protocol::control::{Phase, Saved};
use ckpt_snapshot::{
    AgentsRecord, JobDir, JobIdentity, JobRecord, Manifest, OpenError, ProcessTree, ReadError, RelPath,
    SaveError, SnapshotId, SnapshotWriter, Store, choose_prunable, faults,
};
use std::collections::HashSet;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
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
    /// The store's snapshots cannot be listed.
    #[error(transparent)]
    List(#[from] ReadError),
    /// CRIU could not dump the job.
    #[error("the job cannot be saved as it is: {reason}. CRIU's log is in {log}", log = log.display())]
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
    DeviceMemory(#[from] device_memory::ReportError),
    /// It took too long.
    #[error("the job stood still for {}, so the checkpoint was given up (--freeze-timeout). CRIU's log is in {log}", humantime::format_duration(*.limit), log = log.display())]
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

/// Takes snapshots of one running job.
pub struct Checkpointer {
    /// The job.
    pub job: Arc<RunningJob>,
    /// Its place in the store.
    pub dir: JobDir,
    /// Its record; the highest snapshot number is kept there.
    pub record: Arc<Mutex<JobRecord>>,
    /// Who it is.
    pub identity: JobIdentity,
    /// The CRIU to use.
    pub criu: Criu,
    /// The longest that the job may stand still.
    pub freeze_timeout: Duration,
    /// Snapshots to keep.
    pub keep: usize,
    /// Told of everything.
    pub status: Arc<SharedStatus>,
    /// Set when the job has ended well: what is being stored is not needed any more.
    pub cancelled: Arc<AtomicBool>,
    /// Counts attempts, for names.
    pub attempts: u64,
    /// Connections out of the job that were told of.
    pub told_outside: HashSet<String>,
}

impl Checkpointer {
    /// Takes one snapshot.
    ///
    /// # Errors
    /// See [`AttemptError`]: the job runs on and older snapshots are as they were.
    pub fn attempt(&mut self) -> Result<Saved, AttemptError> {
        let begun = Instant::now();
        self.attempts += 1;
        let result = self.attempt_inner(begun);
        self.status.enter(Phase::Idle, 0);
        result
    }

    fn attempt_inner(&mut self, begun: Instant) -> Result<Saved, AttemptError> {
        faults::hit("attempt").map_err(AttemptError::Staging)?;
        let store = self.dir.store();
        let survey = self.job.namespace.survey()?;
        if let Some(stray) = survey.strays.first() {
            return Err(AttemptError::Stray(*stray));
        }
        let broken = diagnose::broken_by_a_restore(&self.proc(), self.job.root_pid, &survey.pids);
        if !broken.is_empty() {
            return Err(AttemptError::Broken(broken.join("; ")));
        }
        let prepared = self.prepare()?;
        let device_bytes = prepared.as_ref().map_or(0, Prepared::mirror_bytes);
        let id = self.next_id(&store)?;
        let writer = store.begin(&id, survey.resident_bytes.saturating_add(device_bytes))?;
        let staging = self.staging(survey.resident_bytes)?;
        if let Err(error) = staging.warm(survey.resident_bytes) {
            tracing::debug!("memory for the images could not be fetched ahead: {error}");
        }
        self.status.enter(Phase::Dump, survey.resident_bytes);
        let dumped = self.dump_with_retries(&id, &staging, prepared)?;
        drop(staging);
        self.tell_outside(&dumped.frozen.outside_tcp);
        let manifest = self.persist(id, writer, dumped)?;
        let saved = Saved {
            id: manifest.id.to_string(),
            bytes: manifest.data_bytes(),
            stall_s: manifest.stall_s,
            durable_s: begun.elapsed().as_secs_f64(),
            taken_unix_ms: manifest.taken_unix_ms,
        };
        self.status.saved(&saved);
        self.prune(&store);
        Ok(saved)
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

    fn next_id(&self, store: &dyn Store) -> Result<SnapshotId, AttemptError> {
        let newest = store.list()?.last().map_or(0, |listed| listed.id.sequence());
        let mut record = self.record.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let sequence = record.last_sequence.max(newest) + 1;
        let changed = JobRecord { last_sequence: sequence, ..record.clone() };
        self.dir.set_record(&changed)?;
        *record = changed;
        Ok(SnapshotId::new(sequence, SystemTime::now()))
    }

    /// Memory if it is there, the disk of the store otherwise.
    fn staging(&self, needed_bytes: u64) -> Result<Arc<Staging>, AttemptError> {
        let available_bytes = staging::available_bytes().map_err(AttemptError::Staging)?;
        let fits = needed_bytes + needed_bytes / 8 + staging::SPARE_BYTES <= available_bytes;
        let why = match fits.then(|| Staging::in_memory(needed_bytes)) {
            Some(Ok(memory)) => return Ok(Arc::new(memory)),
            Some(Err(error)) => error.to_string(),
            None => format!("{available_bytes} bytes are free, {needed_bytes} are needed"),
        };
        tracing::warn!(
            "the checkpoint cannot be staged in memory ({why}): it goes straight to disk, and the job stands still for as long as that takes"
        );
        Staging::on_disk(&self.dir.path().join("staging")).map(Arc::new).map_err(AttemptError::Staging)
    }

    /// Stores the images; the job runs meanwhile.
    fn persist(
        &self,
        id: SnapshotId,
        mut writer: Box<dyn SnapshotWriter>,
        dumped: Dumped,
    ) -> Result<Manifest, AttemptError> {
        let files = |dir: &StagedDir| dir.files().map_err(AttemptError::Staging);
        let dirs = [("images", &dumped.images), ("shm", &dumped.shm), ("spare", &dumped.spare)];
        let mut all = Vec::new();
        for (kind, dir) in dirs {
            all.push((kind, dir, files(dir)?));
        }
        let image_bytes: u64 = all.iter().flat_map(|(.., files)| files).map(|(_, bytes)| bytes).sum();
        let device_bytes = device_memory::stored_bytes(&dumped.gpu)?;
        self.status.enter(Phase::Persist, image_bytes + device_bytes);
        for (kind, dir, files) in all {
            for (name, _) in files {
                let path = RelPath::new(format!("{kind}/{name}"))
                    .map_err(|error| AttemptError::Staging(io::Error::other(error)))?;
                let from = dir.open(&name).map_err(AttemptError::Staging)?;
                let mut from = Cancellable { from, cancelled: &self.cancelled };
                writer.put(&path, &mut from, &|bytes| self.status.advance(bytes))?;
                // Its memory is free again as soon as it is stored.
                dir.remove(&name).map_err(AttemptError::Staging)?;
            }
        }
        let mut store = |path: &RelPath, from: &mut dyn Read| {
            let mut from = Cancellable { from, cancelled: &self.cancelled };
            Ok(writer.put(path, &mut from, &|bytes| self.status.advance(bytes))?)
        };
        let gpu = device_memory::store(&dumped.gpu, &mut store)?;
        let manifest = self.manifest(id, dumped.frozen, dumped.stall_s, dumped.agents);
        Ok(writer.commit(Manifest { version: Manifest::version_for(&gpu), gpu, ..manifest })?)
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
            run: self.record.lock().unwrap_or_else(std::sync::PoisonError::into_inner).run,
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
        }
    }

    fn prune(&self, store: &dyn Store) {
        let listed = match store.list() {
            Ok(listed) => listed,
            Err(error) => return tracing::warn!("older snapshots stay: {error}"),
        };
        for id in choose_prunable(&listed, self.keep) {
            match store.remove(&id) {
                Ok(()) => tracing::debug!("removed the snapshot {id} (--keep {})", self.keep),
                Err(error) => tracing::warn!("cannot remove the old snapshot {id}: {error}"),
            }
        }
    }
}

/// A reader that stops when nobody needs its content any more.
struct Cancellable<'a, R> {
    from: R,
    cancelled: &'a AtomicBool,
}

impl<R: Read> Read for Cancellable<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(io::Error::other("the job has ended"));
        }
        self.from.read(buffer)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn manifest(open_files: Vec<ckpt_snapshot::OpenFile>) -> Manifest {
        Manifest {
            version: Manifest::version_for(&[]),
            id: SnapshotId::new(1, SystemTime::UNIX_EPOCH),
            job: JobIdentity { key: "job".into(), cwd: "/".into(), argv: Vec::new() },
            run: 1,
            taken_unix_ms: 0,
            stall_s: 0.0,
            host: host::facts(),
            ckpt_run_version: String::new(),
            criu_version: String::new(),
            tree: ProcessTree::default(),
            stdio: Vec::new(),
            tty: None,
            open_files,
            shm_files: Vec::new(),
            spare_files: Vec::new(),
            directories: Vec::new(),
            links: Vec::new(),
            gpu: Vec::new(),
            files: Vec::new(),
        }
    }

    #[test]
    fn a_cancelled_reader_stops() {
        let cancelled = AtomicBool::new(false);
        let mut reader = Cancellable { from: &b"abc"[..], cancelled: &cancelled };
        assert_eq!(reader.read(&mut [0; 2]).unwrap(), 2);
        cancelled.store(true, Ordering::Relaxed);
        assert!(reader.read(&mut [0; 2]).is_err());
    }
}
