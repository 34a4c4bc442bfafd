//! Resuming a job from a snapshot.
//!
//! The newest snapshot is tried first. Its manifest and small images are verified before anything is changed. Then files
//! are rolled back, and CRIU starts while memory pages are loaded and verified. The processes run only after that. A
//! damaged snapshot is skipped for the next older one, and reported. An intact snapshot that cannot be restored is an
//! error: an older one would discard work for a reason that can be fixed.

use crate::agents::{Agents, MirrorMode, Placement};
use crate::checkpoint::running_job::RunningJob;
use crate::cluster::{Gate, JobNetwork};
use crate::criu::{
    Criu, Descriptors, InheritFd, Options, Queue, RestoreLimits, Session, SessionError, count_unsent_as_sent,
    explain,
};
use crate::files::directories;
use crate::files::history::FileHistory;
use crate::files::inventory::Inventory;
use crate::files::links;
use crate::files::rules::FileRules;
use crate::files::saved;
use crate::files::staging::{StagedDir, Staging};
use crate::files::tracking;
use crate::gpu::device_memory;
use crate::gpu::placement::{self, GpuMap};
use crate::gpu::preload::{self, Interposer};
use crate::job::alive::{LastAlive, end_put_back};
use crate::job::attempt_logs::prune_attempt_logs;
use crate::job::journal::{Entry, EventKind, Journal};
use crate::job::ownership::Ownership;
use crate::job::resume_point::abandon_after;
use crate::namespace::stdio::{self, Stdio, check_input, terminal_key};
use crate::namespace::{self, Activity, Namespace, Network};
use crate::restore::file_plan::{FilePlan, Present, inventory_of_open_files};
use crate::restore::kept::{self, Kept};
use crate::restore::loading::{self, Loading, Origin, READING};
use crate::restore::put_back::{self, PutBack, temporary_names};
use crate::restore::{limits, queues, read_files, resets, unmounted};
use crate::store::answer::{AnswerWatch, RECORDING};
use crate::store::tiers::{self, DISK, MEMORY, REPLICA};
use crate::sys::deadline::{
    GPU_RELEASE_TIMEOUT, PORT_RETRY_DELAY, PORT_RETRY_TIMEOUT, RESTORE_FAILURE_WINDOW, RESTORE_STALL_TIMEOUT,
};
use crate::sys::error::{BadInput, bad_input};
use crate::sys::gpus::GpuProbe;
use crate::sys::host;
use crate::sys::path_text::{path_text, text_path};
use crate::sys::privileges::Privileges;
use anyhow::{Context, Result, anyhow, bail};
use ckpt_snapshot::{
    JobDir, Manifest, Marks, ReadError, SavedFile, SnapshotId, StdioKind, Store, Tiers, faults,
    write_atomically,
};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// A restore may fail for a transient reason.
const TRIES: u32 = 2;
/// Fewer failed resumes say nothing about a snapshot, however far apart.
const POLICY_TRIES: u32 = 3;

/// Resumes a job.
pub struct Resumer<'a> {
    /// The job's directory in the store.
    pub dir: &'a JobDir,
    /// For what a resume has to wait.
    pub journal: &'a Journal,
    /// The job's snapshots.
    pub store: &'a Arc<Tiers>,
    /// Whether the store answers.
    pub answers: &'a AnswerWatch,
    /// Which network the job sees.
    pub network: Network,
    /// Whether the interposer is preloaded into the job's processes.
    pub interposer: &'a Interposer,
    /// Time for the agents to restore the GPU state.
    pub agents_timeout: Duration,
    /// How long a GPU driver may take beyond that, and how long memory of the GPUs may be short.
    pub gpu_timeout: Duration,
    /// GPUs of the snapshot, and those that take their places.
    pub gpu_map: &'a GpuMap,
    /// Whether device memory is loaded into host memory first.
    pub mirror: MirrorMode,
    /// The CRIU to use.
    pub criu: &'a Criu,
    /// The job's record.
    pub ownership: &'a Ownership,
    /// Which files are the job's.
    pub file_rules: &'a FileRules,
    /// Where images that do not fit into memory may be.
    pub staging_dir: Option<&'a Path>,
    /// How long the newest snapshot is tried before an older one; `None` is for ever.
    pub policy: Option<Duration>,
    /// The steps of all nodes, for a part of a job on several nodes.
    pub gate: Option<&'a Gate>,
    /// The network of the job's own, for the same, if it has one.
    pub job_network: Option<&'a JobNetwork>,
    /// The snapshot whose files an earlier try has put back.
    pub put_back: RefCell<Option<SnapshotId>>,
}

/// A resumed job.
pub struct Resumed {
    /// The job; its streams are not relayed yet.
    pub job: RunningJob,
    /// The snapshot that it was resumed from.
    pub manifest: Manifest,
    /// Why it is not the newest one, if it is not.
    pub why_older: Option<String>,
}

/// Why one try failed.
pub(super) enum Failure {
    /// The snapshot is damaged: an older one may be intact.
    Damaged(ReadError),
    /// A port that the job listens on, or those of one of its connections, are in use, perhaps only for a moment.
    PortTaken(anyhow::Error),
    /// Other processes use the memory of the GPUs.
    GpuFull(anyhow::Error),
    /// The processes were restored, but not their GPU state: the job was ended.
    Lost(anyhow::Error),
    /// CRIU could not restore it.
    Criu(anyhow::Error),
    /// A resume would be wrong, as another try would be: the reason is in the snapshot.
    Refused(anyhow::Error),
    /// The snapshot is intact and cannot be restored.
    Other(anyhow::Error),
}

/// Which snapshot could not be restored, as the context of the cause.
#[derive(Debug)]
pub enum NotRestored {
    /// On this machine, or in its state.
    Here(SnapshotId),
    /// The memory and the driver's state of its GPUs.
    Gpus(SnapshotId),
}

impl NotRestored {
    /// What to do, after the cause.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Here(_) => {
                "Fix the cause and run the same command again. Alternatives: --resume with an older ID (`ckpt-run ls`), or --resume never"
            }
            Self::Gpus(_) => "Fix the cause and run the same command again",
        }
    }
}

impl std::fmt::Display for NotRestored {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Here(id) => write!(
                out,
                "the snapshot {id} is intact but cannot be restored here; nothing was started, nothing is lost"
            ),
            Self::Gpus(id) => write!(
                out,
                "the snapshot {id} is intact, but the job's GPU state could not be restored from it, and the job was ended; nothing is lost"
            ),
        }
    }
}

impl Failure {
    /// Adds context, except to damage, which is described in full.
    fn context(self, context: NotRestored) -> Self {
        match self {
            Self::Damaged(error) => Self::Damaged(error),
            Self::PortTaken(error) => Self::PortTaken(error.context(context)),
            Self::GpuFull(error) => Self::GpuFull(error.context(context)),
            Self::Lost(error) => Self::Lost(error.context(context)),
            Self::Criu(error) => Self::Criu(error.context(context)),
            Self::Refused(error) => Self::Refused(error.context(context)),
            Self::Other(error) => Self::Other(error.context(context)),
        }
    }
}

impl From<ReadError> for Failure {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Damaged { .. } => Self::Damaged(error),
            other => Self::Other(other.into()),
        }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        match error.downcast::<ReadError>() {
            Ok(error) => error.into(),
            Err(error) => Self::Other(error),
        }
    }
}

impl Resumer<'_> {
    /// Resumes the newest intact snapshot of `candidates` (oldest first). Snapshots of which two restores have failed are
    /// skipped, unless there are no others. One that could not be resumed for longer than the policy says is tried, and
    /// then an older one. What is newer than the snapshot that is tried is pinned first. Why a snapshot was passed over is
    /// said once, after the last try: what is said before may be cut off with the job's output.
    ///
    /// # Errors
    /// When none is intact, or an intact one cannot be restored.
    pub fn newest_of(&self, candidates: &[SnapshotId]) -> Result<Resumed> {
        let mut passed_over: Vec<String> = Vec::new();
        // The first that is intact, and where its reason is.
        let mut unresumed = None;
        let marks = self.answers.during(READING, || self.dir.marks())?;
        let is_bad = |id: &SnapshotId| self.policy.is_some() && marks.is_bad(id);
        let has_good = !candidates.iter().all(is_bad);
        for (older, id) in candidates.iter().enumerate().rev() {
            if has_good && is_bad(id) {
                passed_over.push(skipped(id, marks.why_bad(id).unwrap_or_default()));
                self.record(id, |marks| marks.pin(id));
                continue;
            }
            let why = match self.resume(id) {
                Ok(resumed) => {
                    self.record(id, |marks| marks.restore_worked(id));
                    return Ok(Resumed { why_older: say_why_older(&passed_over), ..resumed });
                }
                Err(Failure::Damaged(error)) => error.to_string(),
                Err(failure) => {
                    let has_older = candidates[..older].iter().any(|id| !is_bad(id));
                    let error =
                        self.not_resumed(id, failure, has_older).inspect_err(|_| say(&passed_over))?;
                    let why = format!("{error:#}");
                    unresumed.get_or_insert((passed_over.len(), error));
                    why
                }
            };
            tracing::debug!("{why}; trying the next older one");
            passed_over.push(why);
        }
        if let Some((at, error)) = unresumed {
            passed_over.remove(at);
            say(&passed_over);
            return Err(error);
        }
        bail!(
            "none of the {} snapshots of this job is whole: {}. Nothing was started. `ckpt-run repair` writes lost indexes of packs again; then run the same command. To start from the beginning: --resume never",
            candidates.len(),
            passed_over.join("; ")
        )
    }

    /// Records that an intact snapshot could not be resumed. Returns the error if an older one is to be tried now.
    ///
    /// # Errors
    /// The error, if none is.
    fn not_resumed(&self, id: &SnapshotId, failure: Failure, has_older: bool) -> Result<anyhow::Error> {
        let now = SystemTime::now();
        let (error, is_restore) = match failure {
            Failure::Damaged(error) => (error.into(), false),
            Failure::Criu(error) | Failure::Lost(error) => (error, true),
            Failure::Other(error)
            | Failure::Refused(error)
            | Failure::PortTaken(error)
            | Failure::GpuFull(error) => (error, false),
        };
        let reason = error.root_cause().to_string();
        let (mut tries, mut passed) = (0, Duration::ZERO);
        self.record(id, |marks| {
            if is_restore {
                note_failure(marks, id, &reason, now);
            }
            (tries, passed) = marks.not_resumed(id, now);
        });
        let is_overdue = self.policy.is_some_and(|limit| tries >= POLICY_TRIES && passed >= limit);
        if !is_overdue || !has_older || namespace::is_ending() {
            return Err(error);
        }
        self.record(id, |marks| marks.pin(id));
        Ok(error.context(format!(
            "the snapshot {id} could not be resumed for {}: an older one is tried (--resume-policy). The snapshot is pinned. When the cause is fixed: --resume {id}",
            humantime::format_duration(Duration::from_secs(passed.as_secs()))
        )))
    }

    /// Records how a restore of `id` went. An error is only reported: the resume counts.
    fn record(&self, id: &SnapshotId, change: impl FnMut(&mut Marks)) {
        if let Err(error) = self.dir.change_marks(change) {
            tracing::warn!("cannot record how the restore of {id} went: {error}");
        }
    }

    pub(super) fn resume(&self, id: &SnapshotId) -> Result<Resumed, Failure> {
        let begun = Instant::now();
        let manifest = self.answers.during(READING, || self.store.manifest(id))?;
        self.check_machine(&manifest)?;
        self.check_part(&manifest)?;
        let mut tries = 1;
        let mut is_reported = false;
        loop {
            // If that was the reason of a failure, the next try does without it.
            let places = tries == 1 && self.answers.during(READING, || self.is_near(id));
            match self.restore(&manifest, places) {
                Ok(job) => {
                    let age = SystemTime::UNIX_EPOCH + Duration::from_millis(manifest.taken_unix_ms);
                    tracing::info!(
                        "resumed from snapshot {id}{}, taken {}, in {:.1} s",
                        self.place(id),
                        humantime::format_rfc3339_seconds(age),
                        begun.elapsed().as_secs_f64()
                    );
                    return Ok(Resumed { job, manifest, why_older: None });
                }
                Err(Failure::PortTaken(error))
                    if begun.elapsed() < PORT_RETRY_TIMEOUT && self.may_retry() =>
                {
                    if !is_reported {
                        self.journal.waiting(format!(
                            "waiting up to {} s for a port of the job that is still in use",
                            PORT_RETRY_TIMEOUT.as_secs()
                        ));
                        tracing::debug!("{error:#}");
                        is_reported = true;
                    }
                    std::thread::sleep(PORT_RETRY_DELAY);
                }
                Err(Failure::Other(error) | Failure::Criu(error)) if self.may_try_again(&error, tries) => {
                    tracing::warn!("{error:#}; trying once more");
                    tries += 1;
                }
                Err(
                    failure @ (Failure::Other(_)
                    | Failure::Refused(_)
                    | Failure::PortTaken(_)
                    | Failure::GpuFull(_)
                    | Failure::Criu(_)),
                ) => {
                    return Err(failure.context(NotRestored::Here(id.clone())));
                }
                // Restoring GPU state may have taken minutes: the user decides whether to try again.
                Err(Failure::Lost(error)) => {
                    return Err(Failure::Lost(error.context(NotRestored::Gpus(id.clone()))));
                }
                Err(damaged) => return Err(damaged),
            }
        }
    }

    /// Not while processes of the failed try still end: they may hold resources that the next try needs.
    fn may_try_again(&self, error: &anyhow::Error, tries: u32) -> bool {
        tries < TRIES && !namespace::is_ending() && !error.is::<BadInput>() && self.may_retry()
    }

    /// Whether the snapshot is read from memory or the disk. From farther away, all of it is read while CRIU begins.
    fn is_near(&self, id: &SnapshotId) -> bool {
        [MEMORY, DISK]
            .iter()
            .any(|name| self.store.tier(name).is_ok_and(|tier| tier.store().manifest(id).is_ok()))
    }

    /// Where the snapshot is, if it is not in the store.
    fn place(&self, id: &SnapshotId) -> &'static str {
        let has = |name| self.store.tier(name).is_ok_and(|tier| tier.store().manifest(id).is_ok());
        match has(MEMORY) {
            true => ", which is in memory",
            false if !has(tiers::home(self.store)) && has(REPLICA) => {
                ", which is in the memory of another node"
            }
            false => "",
        }
    }

    fn check_machine(&self, manifest: &Manifest) -> Result<()> {
        let (then, now) = (&manifest.host, host::facts());
        if then.arch != now.arch {
            bail!("the snapshot {} was taken on {}, this machine is {}", manifest.id, then.arch, now.arch);
        }
        if then.cpu != now.cpu {
            tracing::warn!(
                "the snapshot was taken on another CPU ({}; this is {}): the job may use instructions that this one lacks",
                then.cpu,
                now.cpu
            );
        }
        let cwd = text_path(&manifest.job.cwd);
        if !cwd.is_dir() {
            bail!("the job's working directory {} does not exist", cwd.display());
        }
        Ok(())
    }

    /// Decides on which GPUs the processes are restored, and waits until these have enough free memory: a restore without
    /// it makes a process unusable (cuda-checkpoint issue 44).
    fn place_on_gpus(&self, manifest: &Manifest) -> Result<BTreeMap<u32, Placement>, Failure> {
        if manifest.gpu.is_empty() {
            return Ok(BTreeMap::new());
        }
        let gpus = GpuProbe::default();
        let placements = placement::plan(&manifest.gpu, self.gpu_map, gpus.look().as_ref())?;
        for pair in placements.values().flat_map(|placement| &placement.pairs) {
            if pair.old != pair.new {
                tracing::info!("{} takes the place of {}", pair.new, pair.old);
            }
        }
        let needs: Vec<_> = placements.values().flat_map(|placement| placement.needs.clone()).collect();
        gpus.await_free_memory(&needs, Instant::now() + self.gpu_timeout, &namespace::is_ending)
            .map_err(|shortage| Failure::GpuFull(shortage.into()))?;
        Ok(placements)
    }

    fn restore(&self, manifest: &Manifest, places: bool) -> Result<RunningJob, Failure> {
        let placements = self.place_on_gpus(manifest)?;
        let (shared, job_bytes) = (Arc::new(manifest.clone()), loading::image_bytes(manifest));
        let loads = device_memory::plan(self.store, &shared, self.mirror, job_bytes)?;
        let adopted = device_memory::adopted(&loads);
        let inventory = self.answers.during(READING, || Inventory::read(&**self.store, manifest))?;
        let inventory = inventory.unwrap_or_else(|| inventory_of_open_files(manifest));
        unmounted::check(manifest, &inventory, self.file_rules).map_err(bad_input)?;
        check_input(&manifest.stdio).map_err(bad_input)?;
        let alive = self.answers.during(READING, || LastAlive::read(self.dir));
        let plan = self.plan_files(manifest, &inventory, &alive).map_err(bad_input)?;
        let shm_files = manifest.shm_files.iter().map(|file| &file.data);
        let saved: Vec<_> = plan.wanted().into_iter().chain(shm_files).collect();
        let mirror_bytes: u64 = loads.iter().map(|load| load.used_bytes).sum();
        let copied = manifest.files.iter().filter(|file| saved.contains(&&file.path)).map(|file| file.bytes);
        let staging = self.staging(manifest, mirror_bytes + copied.sum::<u64>())?;
        let from = Origin { store: Arc::clone(self.store), answers: self.answers.clone() };
        let mut loading = Loading::begin(from, manifest, &staging, &saved, loads, places)?;
        put_back::check(&plan, &|data| loading.open(data)).map_err(bad_input)?;
        check_names(&loading, &plan).map_err(bad_input)?;
        let queues = queues::prepare(loading.images())?;
        if self.put_back.borrow().is_none() {
            limits::warn_of_lower(loading.images());
            let is_here = manifest.host.hostname == host::facts().hostname;
            let taken = SystemTime::UNIX_EPOCH + Duration::from_millis(manifest.taken_unix_ms);
            let taken = Some(taken).filter(|_| is_here);
            if let Some(what) = read_files::changed(loading.images(), &inventory, taken) {
                tracing::warn!("{what}");
                self.journal.add(&Entry::new(EventKind::Noted, what));
            }
        }
        let stdio =
            Stdio::prepare(Some(&manifest.stdio)).context("cannot make the job's standard streams")?;
        directories::restore(&manifest.directories)?;
        let namespace = self.namespace(manifest).context("cannot make the job's namespace")?;
        self.abandon_newer(&manifest.id)?;
        self.put_files_back(manifest, &plan, &alive, &loading)?;
        let mut files = FileHistory::resumed(manifest, inventory);
        self.answers.during(RECORDING, || self.watch_files(&namespace, manifest, &mut files));
        manifest.shm_files.iter().try_for_each(|file| put_back(file, &loading))?;
        // Listening begins before the processes run, since their agents connect at once. Agents in the snapshot wait for
        // the connection, even if --interpose is now off.
        let wanted = self.interposer.library().is_some() || manifest.tree.agents.is_some();
        let listen = || preload::listen(self.dir, manifest.tree.agents.as_ref(), self.gpu_timeout);
        let agents = wanted.then(listen).transpose()?;
        let _links = create_links(manifest, &loading)?;
        let work = staging.subdir("work").context("cannot create a directory for CRIU's log")?;
        if let Some(agents) = agents.as_ref().filter(|_| !manifest.gpu.is_empty()) {
            adopted.give_to(agents, placements);
        }
        self.block_connections(manifest)?;
        // Restored ranks are parked until all processes are back.
        let cut = agents.as_ref().map(Agents::hold_cut);
        let root_pid = self.run_criu(&namespace, &stdio, manifest, &mut loading, &queues, &work)?;
        self.await_agents(agents.as_ref(), manifest, &namespace)?;
        drop(cut);
        let (command_pid, failed_process) = (manifest.tree.command_pid, manifest.failed_process.clone());
        Ok(RunningJob { namespace, stdio, root_pid, command_pid, agents, files, failed_process })
    }

    fn await_agents(
        &self,
        agents: Option<&Agents>,
        manifest: &Manifest,
        namespace: &Namespace,
    ) -> Result<(), Failure> {
        let (Some(agents), Some(record)) = (agents, &manifest.tree.agents) else { return Ok(()) };
        let proc = PathBuf::from(format!("/proc/{}/root/proc", namespace.init_pid()));
        // The processes are ended then.
        let is_over = || self.gate.is_some_and(|gate| gate.end().is_some());
        preload::await_return(agents, record, &proc, self.agents_timeout, &is_over).map_err(|loss| {
            // All are killed, also those whose GPUs the driver has restored.
            agents.release(GPU_RELEASE_TIMEOUT);
            match agents.take_read_error() {
                // The store was intact a moment ago.
                Some(error @ ReadError::Damaged { .. }) => Failure::Damaged(error),
                _ => Failure::Lost(anyhow!("{loss}")),
            }
        })
    }

    /// Where CRIU's images are loaded to: memory if there is enough, otherwise the store's disk. Pages are not in memory
    /// twice, see `auto_dedup`.
    fn staging(&self, manifest: &Manifest, more_bytes: u64) -> Result<Staging> {
        let on_disk = |why: &str| {
            tracing::info!(
                "the snapshot cannot be loaded into memory ({why}): it is copied to the store's disk first"
            );
        };
        Staging::for_images(loading::image_bytes(manifest), more_bytes, self.staging_dir, on_disk)
            .context("cannot create a place for the snapshot")
    }

    /// Records that the job resumes from `id`, before its files are rolled back: newer snapshots do not match the files
    /// after that.
    fn abandon_newer(&self, id: &SnapshotId) -> Result<()> {
        Ok(self.ownership.change(|record| abandon_after(record, id))?)
    }

    fn plan_files(&self, manifest: &Manifest, inventory: &Inventory, alive: &LastAlive) -> Result<FilePlan> {
        let (touched, others) = self.answers.during(READING, || {
            let touched = tracking::written_since(self.dir, &manifest.id).filter(|_| alive.is_recorded());
            (touched, tracking::written_by_others(self.dir, alive.known_until(), alive.until()))
        });
        let present = Present {
            rules: self.file_rules,
            touched: touched.as_ref(),
            cwd: &manifest.job.cwd,
            outputs: &outputs_of(manifest),
            others: &others,
            alive,
            held: &self.dir.held_dir(&manifest.id),
        };
        let mut plan = FilePlan::make(manifest, inventory, &present, &stdio::appended_files())?;
        if self.put_back.borrow().as_ref() == Some(&manifest.id) {
            plan.leave_own_output();
        }
        Ok(plan)
    }

    /// Watches what the job writes from now on.
    fn watch_files(&self, namespace: &Namespace, manifest: &Manifest, files: &mut FileHistory) {
        let cwd = text_path(&manifest.job.cwd);
        tracking::begin(namespace, self.dir, &cwd, self.file_rules, files, Some(&manifest.id));
    }

    fn put_files_back(
        &self,
        manifest: &Manifest,
        plan: &FilePlan,
        alive: &LastAlive,
        loading: &Loading,
    ) -> Result<()> {
        if !plan.is_empty() {
            let temporary = temporary_names(plan);
            let paths = plan.paths().cloned().chain(temporary);
            alive.begin_put_back(self.dir, paths.map(path_text))?;
            let kept = Kept::create(self.dir, &manifest.id)?;
            PutBack::new(plan, &|data| loading.open(data), kept).apply()?;
            kept::prune_kept(self.dir);
        }
        self.put_back.replace(Some(manifest.id.clone()));
        end_put_back(self.dir).context("cannot record that the job's files are restored")
    }

    fn run_criu(
        &self,
        namespace: &Namespace,
        stdio: &Stdio,
        manifest: &Manifest,
        loading: &mut Loading,
        queues: &[Queue],
        work: &StagedDir,
    ) -> Result<i32, Failure> {
        namespace
            .restore_reaper_program(manifest.tree.command_pid)
            .context("cannot prepare the job's namespace")?;
        let are_acknowledged =
            count_unsent_as_sent(loading.images()).context("cannot prepare the job's TCP connections")?;
        let mut no_resets = resets::rule(loading.images(), namespace, are_acknowledged)?;
        let pipes = pipes(manifest, stdio);
        let mut fds: Vec<BorrowedFd> = vec![loading.images().fd().as_fd(), work.fd().as_fd()];
        fds.extend(pipes.iter().map(|(_, fd)| *fd));
        let process = namespace
            .start_criu(&self.criu.swrk(), stdio.terminal_path(), &fds, None)
            .context("cannot start CRIU")?;
        let keys = pipes.iter().map(|(key, _)| key.clone());
        let keys = keys.chain(manifest.tty.as_ref().map(terminal_key));
        let inherit_fd = keys.zip(&process.fds[2..]).map(|(key, &fd)| InheritFd { key, fd }).collect();
        let session = Session::new(process);
        let options = Options {
            images_dir_fd: session.process().fds[0],
            work_dir_fd: Some(session.process().fds[1]),
            inherit_fd,
            // Pages that are restored are freed in the images.
            auto_dedup: Some(true),
            ..Options::common()
        };
        let mut damage = None;
        let mut at_stage = |stage: &str| {
            if stage == "post-restore" {
                queues::check(namespace, queues)?;
            }
            if stage == "pre-resume" {
                drop(no_resets.take());
            }
            self.restore_stage(stage, namespace, manifest, loading, &mut damage)
        };
        let activity = || namespace.activity();
        let result = session.restore(options, limits(manifest, &activity), &mut at_stage);
        match (result, damage) {
            (_, Some(error)) => Err(error.into()),
            (Ok(outcome), None) => Ok(outcome.pid.unwrap_or(manifest.tree.root_pid)),
            (Err(error), None) => Err(self.explain(manifest, &error, work)),
        }
    }

    /// Does what is due when CRIU reaches a stage of the restore. Damage that the loading has found goes to `damage`.
    fn restore_stage(
        &self,
        stage: &str,
        namespace: &Namespace,
        manifest: &Manifest,
        loading: &mut Loading,
        damage: &mut Option<ReadError>,
    ) -> Result<(), String> {
        tracing::trace!("CRIU is at {stage}");
        faults::hit(&format!("restore-{stage}")).map_err(|error| error.to_string())?;
        let mut check =
            |loaded: Result<(), ReadError>| loaded.map_err(|error| damage.insert(error).to_string());
        let tree = &manifest.tree;
        match stage {
            // After this stage, CRIU creates the processes and their memory.
            "post-setup-namespaces" => check(loading.wait_for_pages()),
            // The same, for a job without namespaces that CRIU would restore.
            "pre-restore" if !Privileges::detect().is_root() => check(loading.wait_for_pages()),
            "post-restore" => {
                check(loading.place(namespace.init_pid()).and_then(|()| loading.wait_for_all()))?;
                self.cross_barriers()
            }
            "setup-namespaces" => {
                // A job without a subreaper is complete now; a later checkpoint reports processes outside of the tree.
                if let Err(error) = namespace.make_subreaper(tree.root_pid) {
                    tracing::warn!("{error}");
                }
                Ok(())
            }
            "pre-resume" => {
                // The root must be known before it can exit: the exit of an unknown process is reported to nobody.
                namespace.adopt(tree.root_pid).map_err(|error| error.to_string())?;
                let warnings = namespace.apply(tree).map_err(|error| error.to_string())?;
                warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn explain(&self, manifest: &Manifest, error: &SessionError, work: &StagedDir) -> Failure {
        let text = work.read("criu.log").ok().flatten().unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        // CRIU's log says of the launcher's own reason only that there was one.
        let reason = explain(&text).filter(|_| !matches!(error, SessionError::Stage(_)));
        let reason = reason.unwrap_or_else(|| error.to_string());
        let kept = self.dir.attempt_dir(&format!("{}-restore", manifest.id));
        let kept = kept.and_then(|dir| {
            let path = dir.join("criu.log");
            match write_atomically(&path, text.as_bytes()) {
                Ok(()) => Ok(path),
                Err(source) => Err(ckpt_snapshot::OpenError::Io { step: "write", path, source }),
            }
        });
        prune_attempt_logs(self.dir);
        let error = match kept {
            Ok(path) => anyhow!("the restore failed: {reason}. CRIU's log is in {}", path.display()),
            Err(problem) => anyhow!("the restore failed: {reason} (and {problem})"),
        };
        if is_port_taken(&text) { Failure::PortTaken(error) } else { Failure::Criu(error) }
    }
}

/// Whether CRIU's log says that somebody else has a port of the job, or both ports of one of its connections: another program,
/// or what the kernel keeps of an earlier session for a minute (TIME_WAIT). For the connection, connect(2) gives EADDRNOTAVAIL,
/// as a local address that does not exist would give in bind(2).
fn is_port_taken(log: &str) -> bool {
    [
        ("Can't bind inet socket", "Address already in use"),
        ("Can't connect inet socket back", "Cannot assign requested address"),
    ]
    .iter()
    .any(|(what, why)| log.lines().any(|line| line.contains(what) && line.contains(why)))
}

/// CRIU may be silent for ten minutes, and the time that a very slow disk takes to read the images.
fn limits<'a>(manifest: &Manifest, activity: &'a dyn Fn() -> Option<Activity>) -> RestoreLimits<'a> {
    const LEAST: Duration = Duration::from_secs(600);
    const SLOWEST_BYTES_PER_S: u64 = 20_000_000;
    let silence = LEAST + Duration::from_secs(loading::image_bytes(manifest) / SLOWEST_BYTES_PER_S);
    let limits = RestoreLimits { silence, stall: RESTORE_STALL_TIMEOUT, activity };
    #[cfg(feature = "faults")]
    let limits = crate::checkpoint::injected::shortened(limits);
    limits
}

/// Records a failed restore, unless another one failed shortly before.
fn note_failure(marks: &mut Marks, id: &SnapshotId, reason: &str, now: SystemTime) {
    let last = marks.of(id).and_then(|mark| mark.failed_restores.last());
    let last = last.map(|failed| SystemTime::UNIX_EPOCH + Duration::from_millis(failed.unix_ms));
    // After the clock was set back, no failure counts as recent.
    let is_recent =
        last.is_some_and(|last| now.duration_since(last).is_ok_and(|past| past < RESTORE_FAILURE_WINDOW));
    if !is_recent {
        marks.restore_failed(id, reason, now);
    }
}

/// Says why snapshots were passed over.
fn say(passed_over: &[String]) {
    passed_over.iter().for_each(|why| tracing::error!("{why}"));
}

/// Says why an older snapshot than the newest was resumed, and returns it, if there is a reason.
fn say_why_older(passed_over: &[String]) -> Option<String> {
    let (newest, others) = passed_over.split_first()?;
    tracing::error!("this is not the newest snapshot: {newest}");
    say(others);
    Some(passed_over.join("; "))
}

fn skipped(id: &SnapshotId, why: &str) -> String {
    format!(
        "two restores of the snapshot {id} have failed ({why}): it is skipped for an older one, and pinned. When the cause is fixed: `ckpt-run unmark {id}`, or --resume {id}"
    )
}

/// A restore would delete what has the name of a deleted directory now, unless that is moved aside.
fn check_names(loading: &Loading, plan: &FilePlan) -> Result<()> {
    let ghosts = Descriptors::ghosts(&|name| loading.images().read(name))?;
    match links::taken_name(&ghosts, Path::new("/")).filter(|path| !plan.has_aside_above(path)) {
        Some(path) => Err(anyhow!(
            "the job needs the name {} for a directory that it had deleted, and something else has it now: move that away. Nothing was changed",
            path.display()
        )),
        None => Ok(()),
    }
}

/// See [`links::Links::create`].
fn create_links(manifest: &Manifest, loading: &Loading) -> Result<links::Links> {
    let ghosts = Descriptors::ghosts(&|name| loading.images().read(name))?;
    links::Links::create(&manifest.links, &ghosts)
}

fn put_back(file: &SavedFile, loading: &Loading) -> Result<()> {
    loading
        .open(&file.data)
        .and_then(|content| saved::restore(file, content))
        .with_context(|| format!("cannot put {} back", file.path))
}

/// The pipes of the snapshot by CRIU's names, with the descriptors that replace them.
fn pipes<'a>(manifest: &Manifest, stdio: &'a Stdio) -> Vec<(String, BorrowedFd<'a>)> {
    let mut found: Vec<(String, BorrowedFd)> = Vec::new();
    for record in manifest.stdio.iter().filter(|record| record.kind == StdioKind::Pipe) {
        let key = format!("pipe:[{}]", record.inode);
        if let (Some(fd), false) = (stdio.job_end(record.fd), found.iter().any(|(known, _)| *known == key)) {
            found.push((key, fd));
        }
    }
    found
}

/// The files that the job's output goes to.
fn outputs_of(manifest: &Manifest) -> BTreeSet<&str> {
    manifest.stdio.iter().filter_map(|stream| Some(stream.file.as_ref()?.path.as_str())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_others_are_told_from_other_failures() {
        let line = |text: &str| {
            format!("(00.1) 10004: Connecting\n(00.2) 10004: Error (criu/sk-inet.c:1): inet: {text}\n")
        };
        for taken in [
            "Can't bind inet socket (id 5): Address already in use",
            "Can't connect inet socket back: Cannot assign requested address",
        ] {
            assert!(is_port_taken(&line(taken)), "{taken}");
        }
        for other in [
            "Can't bind inet socket (id 5): Cannot assign requested address",
            "Can't connect inet socket back: Network is unreachable",
        ] {
            assert!(!is_port_taken(&line(other)), "{other}");
        }
    }

    #[test]
    fn failures_in_a_short_time_count_once() {
        let (mut marks, id) = (Marks::default(), crate::checkpoint::attempt::tests::manifest(Vec::new()).id);
        let now = SystemTime::now();
        for _ in 0..20 {
            note_failure(&mut marks, &id, "no memory", now);
        }
        assert!(!marks.is_bad(&id));
        note_failure(&mut marks, &id, "no memory", now + RESTORE_FAILURE_WINDOW / 2);
        assert!(!marks.is_bad(&id));
        note_failure(&mut marks, &id, "still none", now + 2 * RESTORE_FAILURE_WINDOW);
        assert_eq!(marks.why_bad(&id), Some("still none"));
    }
}
