//! One checkpoint of a running job: room, dump, persist, commit, retention.
//!
//! ```text
//!   room ──► dump (the job stands still) ──► persist (the job runs) ──► committed ──► older ones pruned
//!    │          │  up to 3 tries                │
//!    └──────────┴───────────────────────────────┴──► given up: the job runs on, older snapshots are as they were
//! ```

use crate::agents::{Agents, Quiesced};
use crate::criu::{Criu, Descriptors, ImageError, Options, Session, SessionError, arm_expired_timers};
use crate::diagnose;
use crate::directories;
use crate::host;
use crate::interpose::AGENTS_LIMIT;
use crate::links;
use crate::namespace::{Namespace, NamespaceError, Survey};
use crate::saved;
use crate::staging::{self, StagedDir, Staging};
use crate::status::{SharedStatus, unix_ms};
use crate::stdio::Stdio;
use ckpt_protocol::control::{Phase, Saved};
use ckpt_snapshot::{
    AgentsRecord, Directory, JobDir, JobIdentity, JobRecord, LinkedFile, MANIFEST_VERSION, Manifest,
    OpenError, OpenFile, ProcessTree, ReadError, RelPath, SaveError, SavedFile, SnapshotId, SnapshotWriter,
    StdioRecord, Store, TtyRecord, choose_prunable, faults, write_atomically,
};
use std::collections::HashSet;
use std::fs;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

/// Some dumps fail for reasons that are gone a moment later (a connection that is just being made).
const DUMP_TRIES: u32 = 3;
const BETWEEN_TRIES: Duration = Duration::from_millis(200);
/// How long the frozen job may wait for its last output to reach a regular file.
const OUTPUT_LIMIT: Duration = Duration::from_secs(1);
/// Memory to leave to everybody else when images are staged in memory.
const MEMORY_SPARE_BYTES: u64 = 256 << 20;
/// Failed attempts whose logs are kept.
const ATTEMPTS_KEPT: usize = 10;
/// Unlinked files are saved with the job up to the largest size that CRIU can be given: 4 GiB.
const GHOST_LIMIT_BYTES: u32 = u32::MAX;
/// CRIU's name for "do not lock connections": both ends of ours stand still.
const NETWORK_LOCK_SKIP: i32 = 3;
const CRIU_WARNINGS: i32 = 2;
const CRIU_EVERYTHING: i32 = 4;

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

/// What was noted while the job stood still.
struct Frozen {
    taken: SystemTime,
    survey: Survey,
    stdio: Vec<StdioRecord>,
    tty: Option<TtyRecord>,
    open_files: Vec<OpenFile>,
    outside_tcp: Vec<String>,
    shm_files: Vec<SavedFile>,
    spare_files: Vec<SavedFile>,
    directories: Vec<Directory>,
    links: Vec<LinkedFile>,
}

/// The images of one successful dump.
struct Dumped {
    images: StagedDir,
    shm: StagedDir,
    spare: StagedDir,
    frozen: Frozen,
    stall_s: f64,
    agents: Option<AgentsRecord>,
    /// Keeps the images alive.
    _staging: Arc<Staging>,
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
        let id = self.next_id(&store)?;
        let writer = store.begin(&id, survey.resident_bytes)?;
        let staging = self.staging(survey.resident_bytes)?;
        if let Err(error) = staging.warm(survey.resident_bytes) {
            tracing::debug!("memory for the images could not be fetched ahead: {error}");
        }
        self.status.enter(Phase::Dump, survey.resident_bytes);
        let dumped = self.dump_with_retries(&id, &staging)?;
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
        let fits = needed_bytes + needed_bytes / 8 + MEMORY_SPARE_BYTES <= available_bytes;
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

    fn dump_with_retries(&self, id: &SnapshotId, staging: &Arc<Staging>) -> Result<Dumped, AttemptError> {
        let mut tries = 1;
        loop {
            let name = format!("{id}-{tries}");
            let work = staging.subdir(&format!("work-{name}")).map_err(AttemptError::Staging)?;
            let error = match self.dump_without_agents(staging, &name, &work, tries) {
                Ok(dumped) => return Ok(dumped),
                Err(error) => error,
            };
            for kind in ["images", "shm", "spare"] {
                if let Err(error) = staging.remove_subdir(&format!("{kind}-{name}")) {
                    tracing::debug!("what a failed dump had left stays for now: {error}");
                }
            }
            if tries < DUMP_TRIES && matches!(error, SessionError::Failed(_)) {
                tracing::debug!("try {tries} of the dump failed: {error}");
                tries += 1;
                std::thread::sleep(BETWEEN_TRIES);
                continue;
            }
            return Err(self.explain(id, error, &work));
        }
    }

    /// Dumps while the agents in the job's processes are disconnected: a dump may not contain a connection to us.
    fn dump_without_agents(
        &self,
        staging: &Arc<Staging>,
        name: &str,
        work: &StagedDir,
        tries: u32,
    ) -> Result<Dumped, SessionError> {
        let Some(agents) = &self.job.agents else { return self.dump(staging, name, work, tries) };
        let away = agents.quiesce(self.attempts, AGENTS_LIMIT);
        let away = away.map_err(|error| SessionError::Stage(error.to_string()))?;
        let result = self.dump(staging, name, work, tries);
        self.call_back(agents, &away);
        let pids = away.processes().filter_map(|process| process.pid).collect();
        let record = AgentsRecord { attempt: away.attempt(), pids };
        result.map(|dumped| Dumped { agents: Some(record), ..dumped })
    }

    fn call_back(&self, agents: &Agents, away: &Quiesced) {
        if let Err(error) = agents.resume_listening() {
            return tracing::warn!(
                "the interposer in the job's processes cannot be reached any more: {error}"
            );
        }
        crate::interpose::tell(&agents.await_back(away, AGENTS_LIMIT));
    }

    fn dump(
        &self,
        staging: &Arc<Staging>,
        name: &str,
        work: &StagedDir,
        tries: u32,
    ) -> Result<Dumped, SessionError> {
        let images = staging.subdir(&format!("images-{name}"))?;
        let shm = staging.subdir(&format!("shm-{name}"))?;
        let spare = staging.subdir(&format!("spare-{name}"))?;
        let fds = [images.fd().as_fd(), work.fd().as_fd()];
        let _names = links::NamesLock::shared();
        let stage_error = |error: NamespaceError| match error {
            NamespaceError::Gone => SessionError::Died,
            other => SessionError::Stage(other.to_string()),
        };
        let process = self.job.namespace.start_criu(&self.criu.swrk(), None, &fds).map_err(stage_error)?;
        let session = Session::new(process);
        let mut options = self.dump_options(&session.process().fds, tries);
        if let Some(path) = self.job.stdio.terminal_key() {
            options.external.push(path);
        }
        let deadline = Instant::now() + self.freeze_timeout;
        let mut frozen = None;
        let criu_pid = session.process().pid;
        let mut at_stage = |stage: &str| -> Result<(), String> {
            tracing::trace!("CRIU is at {stage}");
            self.hit(&format!("dump-{stage}"), criu_pid).map_err(|error| error.to_string())?;
            if stage == "post-dump" {
                frozen = Some(self.note_frozen(&images, &shm, &spare)?);
            }
            Ok(())
        };
        let result = session.dump(options, deadline, &mut at_stage);
        if let Err(SessionError::Timeout | SessionError::Io(_)) = result {
            // Its parasites notice that it is gone, and the job goes on.
            let _ = self.job.namespace.signal(criu_pid, false, libc::SIGKILL);
        }
        result?;
        self.hit("dump-done", criu_pid)?;
        arm_expired_timers(&images)?;
        let frozen =
            frozen.ok_or_else(|| SessionError::Stage("CRIU did not stop at its last stage".to_owned()))?;
        let frozen_us = Descriptors::frozen_us(&|name| work.read(name))
            .map_err(|error| SessionError::Stage(error.to_string()))?;
        let stall_s = Duration::from_micros(frozen_us.unwrap_or(0).into()).as_secs_f64();
        Ok(Dumped { images, shm, spare, frozen, stall_s, agents: None, _staging: Arc::clone(staging) })
    }

    fn dump_options(&self, fds: &[i32], tries: u32) -> Options {
        Options {
            images_dir_fd: fds[0],
            work_dir_fd: Some(fds[1]),
            pid: Some(self.job.root_pid),
            leave_running: Some(true),
            tcp_established: Some(true),
            file_locks: Some(true),
            link_remap: Some(true),
            ghost_limit: Some(GHOST_LIMIT_BYTES),
            network_lock: Some(NETWORK_LOCK_SKIP),
            manage_cgroups_mode: Some(0),
            log_file: Some("criu.log".to_owned()),
            log_level: Some(if tries == 1 { CRIU_WARNINGS } else { CRIU_EVERYTHING }),
            timeout: Some(u32::try_from(self.freeze_timeout.as_secs()).unwrap_or(u32::MAX).max(1)),
            ..Options::default()
        }
    }

    /// With the job standing still: everything that CRIU does not save.
    fn note_frozen(&self, images: &StagedDir, shm: &StagedDir, spare: &StagedDir) -> Result<Frozen, String> {
        let failed = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
        let (stdio, tty) = self
            .job
            .stdio
            .record(OUTPUT_LIMIT)
            .map_err(|error| failed("cannot read the job's output", &error))?;
        let descriptors = Descriptors::read(&|name| images.read(name)).map_err(|error| error.to_string())?;
        let root = self.root();
        let links = links::find(&descriptors.links, &root)?;
        let mut writable = descriptors.writable;
        writable.extend(links.iter().map(|link| link.target.clone()));
        writable.sort();
        writable.dedup();
        let shm_paths = writable.iter().filter(|path| saved::is_shared_memory(path));
        let shm_files = saved::save(shm_paths, &root, "shm", shm)
            .map_err(|error| failed("cannot copy the job's shared memory files", &error))?;
        let open_files = lengths(&writable, &root);
        let spare_files = saved::save(&saved::spare(&open_files), &root, "spare", spare)
            .map_err(|error| failed("cannot copy the job's open files", &error))?;
        let survey = self.job.namespace.survey().map_err(|error| error.to_string())?;
        let outside_tcp = descriptors.outside_tcp;
        let mut directories = descriptors.socket_directories;
        directories.extend(
            spare_files.iter().filter_map(|file| Some(Path::new(&file.path).parent()?.to_str()?.to_owned())),
        );
        let directories = directories::look(&directories, &root);
        Ok(Frozen {
            taken: SystemTime::now(),
            survey,
            stdio,
            tty,
            open_files,
            outside_tcp,
            shm_files,
            spare_files,
            directories,
            links,
        })
    }

    /// The job's view of the file system.
    fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.job.namespace.init_pid()))
    }

    /// The job's /proc.
    fn proc(&self) -> PathBuf {
        self.root().join("proc")
    }

    /// Passes a fault point that may concern CRIU or a process of the job.
    fn hit(&self, point: &str, criu_pid: i32) -> io::Result<()> {
        #[cfg(feature = "faults")]
        crate::injected::aim(&self.job, criu_pid);
        #[cfg(not(feature = "faults"))]
        let _ = criu_pid;
        faults::hit(point)
    }

    /// Keeps CRIU's log and says in plain words what went wrong.
    fn explain(&self, id: &SnapshotId, error: SessionError, work: &StagedDir) -> AttemptError {
        let Ok(survey) = self.job.namespace.survey() else { return AttemptError::JobEnded };
        if !survey.pids.contains(&self.job.root_pid) {
            return AttemptError::JobEnded;
        }
        let log = match self.dir.attempt_dir(&id.to_string()) {
            Ok(log) => log,
            Err(error) => return error.into(),
        };
        let text = work.read("criu.log").ok().flatten().unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        if let Err(error) = write_atomically(&log.join("criu.log"), text.as_bytes()) {
            tracing::warn!("cannot keep CRIU's log: {error}");
        }
        self.forget_old_attempts();
        if matches!(error, SessionError::Timeout) {
            return AttemptError::Frozen { limit: self.freeze_timeout, log };
        }
        let mut reasons = match &error {
            SessionError::Failed(_) => diagnose::unsavable(&self.proc(), &survey.pids, &text),
            _ => Vec::new(),
        };
        let culprit = crate::criu::explain(&text);
        match (&error, culprit) {
            (SessionError::Failed(_), Some(culprit)) => reasons.push(culprit),
            _ => reasons.push(error.to_string()),
        }
        AttemptError::Dump { reason: reasons.join("; "), log }
    }

    fn forget_old_attempts(&self) {
        let Ok(entries) = fs::read_dir(self.dir.path().join("attempts")) else { return };
        let mut attempts: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        attempts.sort();
        for old in attempts.iter().rev().skip(ATTEMPTS_KEPT) {
            match fs::remove_dir_all(old) {
                Ok(()) => tracing::debug!("removed {}", old.display()),
                Err(error) => tracing::warn!("cannot remove {}: {error}", old.display()),
            }
        }
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
        let total_bytes = all.iter().flat_map(|(.., files)| files).map(|(_, bytes)| bytes).sum();
        self.status.enter(Phase::Persist, total_bytes);
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
        Ok(writer.commit(self.manifest(id, dumped.frozen, dumped.stall_s, dumped.agents))?)
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
            version: MANIFEST_VERSION,
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

/// The lengths of the files that are rolled back on a resume: not those in memory or of the kernel.
fn lengths(writable: &[String], root: &Path) -> Vec<OpenFile> {
    let on_disk = |path: &&String| {
        !["/dev/", "/proc/", "/sys/", "/run/ckpt-run/"].iter().any(|dir| path.starts_with(dir))
    };
    let length = |path: &String| {
        let meta = fs::symlink_metadata(root.join(path.trim_start_matches('/'))).ok()?;
        meta.is_file().then(|| OpenFile { path: path.clone(), size_bytes: meta.len() })
    };
    writable.iter().filter(on_disk).filter_map(length).collect()
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

    pub(crate) fn manifest(open_files: Vec<OpenFile>) -> Manifest {
        Manifest {
            version: MANIFEST_VERSION,
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
