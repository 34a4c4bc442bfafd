//! The part of a checkpoint during which the job is paused: CRIU dumps the processes, and ckpt-run records what CRIU does
//! not save.

use crate::agents::{Agents, CutCost, GpuState, HeldCut, Prepared, QuiesceError, Quiesced};
use crate::checkpoint::attempt::{AfterDump, Attempt, AttemptError};
use crate::checkpoint::checkpointer::CheckpointerParts;
use crate::checkpoint::diagnose;
use crate::checkpoint::host_memory::HostMemory;
use crate::checkpoint::precopy::{MergedPages, Precopied};
use crate::checkpoint::stall::MeasuredPhases;
use crate::checkpoint::storing::Storing;
use crate::cluster::sockets;
use crate::criu::{
    CRIU_EVERYTHING, CRIU_WARNINGS, Descriptors, EmptyMessagesError, Options, Session, SessionError,
    UnixQueues, arm_expired_timers, end_tcp_repair, injection,
    library::{self, Loaded},
    with_empty_messages,
};
use crate::files::capture::{Capture, CapturedFiles, OpenForWriting};
use crate::files::directories;
use crate::files::leases;
use crate::files::links;
use crate::files::saved;
use crate::files::staging::{StagedDir, Staging};
use crate::files::tracking;
use crate::gpu::device_memory;
use crate::job::attempt_logs::prune_attempt_logs;
use crate::namespace::{DescriptorState, NamespaceError, PeekedQueue, Survey, Tree, inside};
use crate::sys::deadline::{
    CRIU_END_POLL_INTERVAL, CRIU_END_TIMEOUT, CRIU_STOP_TIMEOUT, DUMP_RETRY_DELAY, FROZEN_OUTPUT_TIMEOUT,
    LEFT_LINKS_PATIENCE, SOCKET_OPTIONS_TIMEOUT,
};
use crate::sys::path_text::text_path;
use ckpt_snapshot::{
    AgentsRecord, Directory, FailedProcess, LinkedFile, OpenFile, SavedFile, SnapshotId, StdioRecord,
    TtyRecord, faults, write_atomically,
};
use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Once};
use std::time::{Duration, Instant, SystemTime};

/// Some dumps fail for a transient reason, such as a connection that is being established.
const DUMP_TRIES: u32 = 3;
/// Of the time for which the job may be paused, this part is left to stop a CRIU that is late: milliseconds, mostly.
const CRIU_STOP_PART: u32 = 30;
/// Unlinked files are saved up to 4 GiB, the largest limit that CRIU accepts.
const GHOST_LIMIT_BYTES: u32 = u32::MAX;
/// CRIU's value for "do not lock connections": both ends of the job's connections are frozen.
const NETWORK_LOCK_SKIP: i32 = 3;

/// CRIU's stage at which the job is frozen, and nothing of it is dumped yet.
const FROZEN: &str = "query-ext-files";

/// CRIU's configuration where it may not open the job's files. By default it reads build IDs from them.
const WITHOUT_OPENING_FILES: &str = "file-validation filesize\n";

/// What was recorded while the job was paused.
pub(super) struct Frozen {
    pub(super) taken: SystemTime,
    pub(super) survey: Survey,
    pub(super) descriptors: DescriptorState,
    pub(super) stdio: Vec<StdioRecord>,
    pub(super) tty: Option<TtyRecord>,
    pub(super) open_files: Vec<OpenFile>,
    pub(super) outside_tcp: Vec<SocketAddr>,
    /// Local ports of TCP sockets that reach other machines.
    pub(super) tcp_ports: BTreeSet<u16>,
    /// Addresses of this machine that connections to others use; of a job on several nodes.
    pub(super) addresses: Vec<IpAddr>,
    pub(super) shm_files: Vec<SavedFile>,
    pub(super) files: CapturedFiles,
    pub(super) directories: Vec<Directory>,
    pub(super) links: Vec<LinkedFile>,
}

/// The images of one successful dump.
pub(super) struct Dumped {
    pub(super) images: StagedDir,
    pub(super) shm: StagedDir,
    pub(super) copies: Copies,
    /// The images of pages that are partly in the copies, by their names.
    pub(super) merged: HashMap<String, MergedPages>,
    pub(super) frozen: Frozen,
    pub(super) stall_s: f64,
    /// What that consists of.
    pub(super) phases: MeasuredPhases,
    /// How long this node has waited for others before the dump. The processes ran, but without their agents.
    blocked: Duration,
    pub(super) agents: Option<AgentsRecord>,
    /// What the cut has taken, if a process has a communicator of NCCL.
    pub(super) cut: Option<CutCost>,
    /// State from the GPUs.
    pub(super) gpu: Vec<GpuState>,
    /// A process of the job that has failed.
    pub(super) failed_process: Option<FailedProcess>,
    /// Holds the memory of the images.
    staging: Arc<Staging>,
}

impl Dumped {
    /// For how long the job was paused, without what other nodes have taken.
    pub(super) fn own_stall_s(&self) -> f64 {
        self.stall_s - self.phases.nodes.as_secs_f64()
    }

    /// Where the copies of the job's memory are, the largest first, if that is in memory.
    pub(super) fn copies_in_memory(&self) -> Vec<&StagedDir> {
        if !self.staging.is_in_memory() {
            return Vec::new();
        }
        self.copies.dirs().into_iter().chain([&self.images, &self.shm]).collect()
    }
}

/// One try failed.
enum DumpError {
    /// The agents could not detach; an immediate retry would not help.
    Agents(QuiesceError),
    /// The memory of the GPUs could not be stored, or the nodes of the job have given up.
    Attempt(AttemptError),
    /// CRIU's dump failed.
    Session(SessionError),
}

/// What is known and recorded at the stages of a dump.
struct Stages<'a> {
    images: &'a StagedDir,
    shm: &'a StagedDir,
    criu_pid: i32,
    deadline: Instant,
    /// Since CRIU has frozen the job.
    state: DescriptorState,
    /// Since its last stage.
    frozen: Option<Frozen>,
    /// What a resume would lack, if the dump was refused for that.
    refusal: Option<String>,
    /// The agents, and the processes that have detached.
    away: Option<(&'a Agents, &'a Quiesced)>,
    /// Where the job's memory is copied to, and the list of what was copied.
    copies: Option<(&'a mut Copies, File)>,
    /// Since its last stage; see [`Dumped`].
    merged: HashMap<String, MergedPages>,
    phases: MeasuredPhases,
}

impl<'a> Stages<'a> {
    fn new(
        images: &'a StagedDir,
        shm: &'a StagedDir,
        criu_pid: i32,
        deadline: Instant,
        away: Option<(&'a Agents, &'a Quiesced)>,
    ) -> Self {
        Self {
            images,
            shm,
            criu_pid,
            deadline,
            state: DescriptorState::default(),
            frozen: None,
            refusal: None,
            away,
            copies: None,
            merged: HashMap::new(),
            phases: MeasuredPhases::default(),
        }
    }
}

/// One try of a dump.
struct Try<'a> {
    number: u32,
    /// Until when the nodes of the job may hold its tasks, in all tries.
    lease_end: Option<Instant>,
    copies: &'a mut Copies,
    /// The agents, and the processes that have detached.
    away: Option<(&'a Agents, &'a Quiesced)>,
}

/// Copies of memory that CRIU need not make.
pub(super) enum Copies {
    /// There are none.
    None,
    /// They were made before the dump.
    Before(Precopied),
    /// They are made while the job is paused.
    Paused(HostMemory),
}

impl Copies {
    /// Deletes what was copied.
    fn discard(&mut self, staging: &Staging) {
        match std::mem::replace(self, Self::None) {
            Self::None => {}
            Self::Before(precopied) => precopied.discard(staging),
            Self::Paused(copied) => copied.discard(staging),
        }
    }

    /// Deletes what was copied if a dump may have failed because of that: the next try is without it. Returns whether that is so.
    fn discard_doubtful(&mut self, staging: &Staging) -> bool {
        let is_doubtful = match self {
            Self::None => false,
            Self::Before(_) => true,
            Self::Paused(copied) => copied.is_doubtful(),
        };
        if is_doubtful {
            self.discard(staging);
        }
        is_doubtful
    }

    /// What was copied before the dump.
    pub(super) fn before(&self) -> Option<&Precopied> {
        if let Self::Before(precopied) = self { Some(precopied) } else { None }
    }

    /// Adds what was copied to the pagemaps of `images`. Returns the images of pages that are not in `images` alone, by their
    /// names.
    fn merge(&self, images: &StagedDir) -> io::Result<HashMap<String, MergedPages>> {
        match self {
            Self::None => Ok(HashMap::new()),
            Self::Before(precopied) => precopied.merge(images),
            Self::Paused(copied) => copied.merge(images),
        }
    }

    /// Nothing is copied any more.
    fn finish(&mut self) {
        if let Self::Paused(copied) = self {
            copied.finish();
        }
    }

    /// Where the copies are, the newest first.
    pub(super) fn dirs(&self) -> Vec<&StagedDir> {
        match self {
            Self::None => Vec::new(),
            Self::Before(precopied) => precopied.dirs().collect(),
            Self::Paused(copied) => vec![copied.dir()],
        }
    }
}

/// What a dump writes to beside CRIU's images.
pub(super) struct Outputs<'a, 'b> {
    pub(super) files: &'a mut Capture<'b>,
    /// Stores the memory of GPUs that has no mirror.
    pub(super) storing: &'a Storing<'a>,
}

impl From<SessionError> for DumpError {
    fn from(error: SessionError) -> Self {
        Self::Session(error)
    }
}

impl Attempt<'_> {
    /// Dumps the job, which has `memory_bytes` of host memory, with retries where these may help. The agents were `prepared`
    /// for the first try.
    pub(super) fn dump_with_retries(
        &self,
        id: &SnapshotId,
        staging: &Arc<Staging>,
        mut prepared: Option<Prepared>,
        mut copies: Copies,
        memory_bytes: u64,
        mut outputs: Outputs<'_, '_>,
    ) -> Result<Dumped, AttemptError> {
        let mut tries = 1;
        let lease_end = self.part.as_ref().map(|_| Instant::now() + self.freeze_timeout);
        // Before anything of the job is paused: a resume of another job may hold it for long.
        let mut names = links::NamesLock::shared(self.freeze_timeout);
        loop {
            let name = format!("{id}-{tries}");
            let work = staging.subdir(&format!("work-{name}")).map_err(AttemptError::Staging)?;
            let this = Try { number: tries, lease_end, copies: &mut copies, away: None };
            let result = self.dump_without_agents(id, staging, &work, this, &mut outputs);
            let error = match result {
                Ok(dumped) => return Ok(Dumped { copies, ..dumped }),
                Err(DumpError::Agents(QuiesceError::Withdrawn)) => return Err(AttemptError::Withdrawn),
                // Memory that is stored through windows is stored once.
                Err(DumpError::Agents(error))
                    if error.wants_more_room()
                        && !prepared.as_ref().is_some_and(Prepared::has_windows)
                        && self.may_retry(tries) =>
                {
                    tracing::debug!("try {tries} of the dump: {error}");
                    tries += 1;
                    copies.discard(staging);
                    prepared = self.prepare_again(prepared, memory_bytes)?;
                    continue;
                }
                Err(DumpError::Agents(error)) => return Err(AttemptError::Agents(error)),
                Err(DumpError::Attempt(error)) => return Err(error),
                Err(DumpError::Session(error)) => error,
            };
            self.remove_failed(staging, &name, &names);
            let may_help = match copies.discard_doubtful(staging) {
                true => !matches!(error, SessionError::Timeout),
                false => matches!(error, SessionError::Failed(_) | SessionError::Refused(_)),
            };
            if may_help && self.may_retry(tries) {
                tracing::debug!("try {tries} of the dump failed: {error}");
                tries += 1;
                std::thread::sleep(DUMP_RETRY_DELAY);
                if let Some(dir) = links::taken_in(&criu_log(&work)) {
                    drop(names);
                    names = links::NamesLock::exclusive(self.freeze_timeout);
                    let until = Instant::now() + LEFT_LINKS_PATIENCE;
                    while self.remove_left(&dir, &names) && Instant::now() < until {
                        std::thread::sleep(DUMP_RETRY_DELAY);
                    }
                }
                prepared = self.prepare_again(prepared, memory_bytes)?;
                continue;
            }
            return Err(self.given_up().unwrap_or_else(|| self.explain(id, error, &work)));
        }
    }

    /// Removes what a failed dump has left, also one that was killed.
    fn remove_failed(&self, staging: &Staging, name: &str, names: &links::NamesLock) {
        for dir in links::dirs_of_unnamed(&self.proc()) {
            self.remove_left(&dir, names);
        }
        for kind in ["images", "shm"] {
            if let Err(error) = staging.remove_subdir(&format!("{kind}-{name}")) {
                tracing::debug!("cannot remove the files of a failed dump: {error}");
            }
        }
    }

    /// Whether there may be another try after so many.
    fn may_retry(&self, tries: u32) -> bool {
        tries < DUMP_TRIES && !self.has_one_try() && self.given_up().is_none()
    }

    /// Prepares the agents for another try.
    fn prepare_again(
        &self,
        before: Option<Prepared>,
        memory_bytes: u64,
    ) -> Result<Option<Prepared>, AttemptError> {
        // The end of the first preparation would undo the next one.
        drop(before);
        self.prepare(memory_bytes)
    }

    /// See [`links::remove_left`].
    fn remove_left(&self, dir: &Path, names: &links::NamesLock) -> bool {
        links::remove_left(dir, &self.root(), self.parts.job.namespace.init_pid(), names)
    }

    /// Dumps while the agents in the job's processes are detached: a dump can contain neither GPU state nor a connection
    /// to the launcher. Work on the GPU is paused from the first request to the agents until the last one is attached.
    fn dump_without_agents(
        &self,
        id: &SnapshotId,
        staging: &Arc<Staging>,
        work: &StagedDir,
        this: Try<'_>,
        outputs: &mut Outputs<'_, '_>,
    ) -> Result<Dumped, DumpError> {
        let Some(agents) = &self.parts.job.agents else {
            let deadline = this.lease_end.unwrap_or_else(|| Instant::now() + self.freeze_timeout);
            return Ok(self.dump(id, staging, work, this, deadline, outputs.files)?);
        };
        agents.set_continues_after_dump(self.after_dump == AfterDump::KeepRunning);
        let called = Instant::now();
        // Whatever happens from here on: the ranks are released when this is dropped.
        let cut = self.reach_cut(agents)?;
        let begun = cut.parked_since;
        // On several nodes, the lease has begun with the wish for a cut.
        let deadline = if self.part.is_some() { called } else { begun } + self.freeze_timeout;
        let (parked, detaching) = (begun.elapsed(), Instant::now());
        let left = deadline.saturating_duration_since(detaching);
        let away = self.detach(agents, left, outputs.storing)?;
        let detach = detaching.elapsed();
        let this = Try { away: Some((agents, &away)), ..this };
        let result = self.dump(id, staging, work, this, deadline, outputs.files);
        let attaching = Instant::now();
        if self.after_dump == AfterDump::KeepRunning || result.is_err() {
            self.call_back(agents, &away);
        } else {
            // The device memory is free before the snapshot is stored.
            agents.forget_parked();
        }
        let pids = away.processes().filter_map(|process| process.pid).collect();
        let socket = agents.path().to_string_lossy().into_owned();
        let record = AgentsRecord { attempt: away.attempt(), pids, socket };
        let attach = attaching.elapsed();
        let stall_s = begun.elapsed().as_secs_f64();
        let gpu = away.gpu().to_vec();
        let cut = cut.cost;
        let dumped = result?;
        let phases = MeasuredPhases {
            cut: parked,
            detach,
            attach,
            nodes: dumped.phases.nodes + dumped.blocked,
            ..dumped.phases
        };
        Ok(Dumped { agents: Some(record), cut, gpu, stall_s, phases, ..dumped })
    }

    /// Detaches all agents. The memory of processes without a mirror is stored meanwhile.
    fn detach(&self, agents: &Agents, limit: Duration, storing: &Storing<'_>) -> Result<Quiesced, DumpError> {
        let away = agents.detach_all(self.number_for_agents(), limit, &mut |offer| storing.store(offer));
        let is_refused = matches!(away, Err(QuiesceError::Refused { .. }));
        let Some(error) = storing.failure(is_refused) else { return away.map_err(DumpError::Agents) };
        if let Ok(away) = away {
            // The process has exited.
            self.call_back(agents, &away);
        }
        Err(DumpError::Attempt(error))
    }

    /// Has all ranks of NCCL stop at the same step, while the rest of the job runs on. A job that is being ended has other
    /// uses for its time than a checkpoint that it has not asked for.
    fn reach_cut<'a>(&self, agents: &'a Agents) -> Result<HeldCut<'a>, DumpError> {
        let is_final = self.after_dump != AfterDump::KeepRunning;
        // The final snapshot has to be taken in the same time, and so has that of several nodes, whose lease has begun.
        let is_short = is_final || self.part.is_some();
        let limit = if is_short { self.freeze_timeout / 2 } else { self.freeze_timeout };
        let CheckpointerParts { cancelled, is_ending, .. } = self.parts;
        let is_over = || {
            cancelled.load(Ordering::Relaxed)
                || !is_final && is_ending.load(Ordering::Relaxed)
                || self.given_up().is_some()
        };
        let cut = agents
            .reach_cut(limit, self.lead(), &is_over)
            .map_err(|error| self.given_up().map_or(DumpError::Agents(error), DumpError::Attempt))?;
        faults::hit("cut").map_err(SessionError::from)?;
        self.has_quiesced().map_err(DumpError::Attempt)?;
        Ok(cut)
    }

    fn call_back(&self, agents: &Agents, away: &Quiesced) {
        if let Err(error) = agents.resume_listening() {
            return tracing::warn!(
                "the interposer in the job's processes cannot be reached any more: {error}"
            );
        }
        // The supervisor receives losses too, and ends the job.
        let back = agents.await_return(away, self.freeze_timeout);
        crate::gpu::preload::log_return(&back);
        self.parts.status.device_memory(device_memory::outcome(away.gpu(), back.copied_bytes));
    }

    fn dump(
        &self,
        id: &SnapshotId,
        staging: &Arc<Staging>,
        work: &StagedDir,
        Try { number: tries, copies, away, .. }: Try<'_>,
        deadline: Instant,
        files: &mut Capture,
    ) -> Result<Dumped, SessionError> {
        let images = staging.subdir(&format!("images-{id}-{tries}"))?;
        let shm = staging.subdir(&format!("shm-{id}-{tries}"))?;
        let blocking = Instant::now();
        self.block_connections()?;
        let blocked = blocking.elapsed();
        // A CRIU that is late is stopped within the job's time, too.
        let deadline = deadline.checked_sub(self.freeze_timeout / CRIU_STOP_PART).unwrap_or(deadline);
        let list = library::page_list()?;
        let (session, options) = self.start_dump(&images, work, tries, deadline, Some(&list))?;
        let parent_img = copies.before().map(Precopied::parent);
        let options = Options { track_mem: parent_img.as_ref().map(|_| true), parent_img, ..options };
        let criu_pid = session.process().pid;
        let mut stages = Stages::new(&images, &shm, criu_pid, deadline, away);
        stages.copies = Some((&mut *copies, list));
        let result = session.dump(options, deadline, &mut |stage| self.at_stage(stage, files, &mut stages));
        let Stages { frozen, refusal, phases, merged, .. } = stages;
        if let Err(SessionError::Timeout | SessionError::Io(_)) = result {
            self.kill_late_criu(criu_pid);
        }
        result.map_err(|error| refusal.map_or(error, SessionError::Refused))?;
        let frozen =
            frozen.ok_or_else(|| SessionError::Stage("CRIU did not stop at its last stage".to_owned()))?;
        if let AfterDump::End(_) = self.after_dump {
            links::remove(&frozen.links, &self.root());
        }
        self.hit("dump-done", criu_pid)?;
        arm_expired_timers(&images)?;
        let stall_s = frozen_s(work)?;
        copies.finish();
        let precopy_s = copies.before().map_or(0.0, Precopied::stall_s);
        Ok(Dumped {
            images,
            shm,
            copies: Copies::None,
            merged,
            frozen,
            stall_s: stall_s + precopy_s,
            phases: MeasuredPhases { precopy: seconds(precopy_s), ..phases },
            blocked,
            agents: None,
            cut: None,
            gpu: Vec::new(),
            failed_process: None,
            staging: Arc::clone(staging),
        })
    }

    /// CRIU has stopped at a stage of the dump.
    fn at_stage(&self, stage: &str, files: &mut Capture, stages: &mut Stages<'_>) -> Result<(), String> {
        tracing::trace!("CRIU is at {stage}");
        self.hit(&format!("dump-{stage}"), stages.criu_pid).map_err(|error| error.to_string())?;
        let begun = Instant::now();
        if stage == FROZEN {
            if let Some((agents, away)) = stages.away {
                agents.note_ended(away);
            }
            refuse_orphans(stages.away, &mut stages.refusal)?;
            self.look_for_library(stages.criu_pid);
            stages.state = self.descriptor_state(stages.deadline)?;
            stages.phases.record = begun.elapsed();
            self.copy_memory(stages)?;
        }
        if stage == "post-dump" {
            let Stages { images, shm, deadline, state, refusal, away, phases, copies, merged, .. } = stages;
            if let Some((copies, _)) = copies {
                *merged = copies.merge(images).map_err(|error| error.to_string())?;
            }
            refuse_orphans(*away, refusal)?;
            self.refuse_lost_messages(images, &state.queues, refusal)?;
            let descriptors =
                Descriptors::read(&|name| images.read(name)).map_err(|error| error.to_string())?;
            self.refuse_lost_data(&descriptors, refusal)?;
            let ghosts = Descriptors::ghosts(&|name| images.read(name)).map_err(|error| error.to_string())?;
            links::check_ghosts(&ghosts, &self.root())?;
            files.touch(tracking::next(&self.parts.job.namespace, files.next_record()));
            let mut record = self.record_frozen(descriptors, shm, state, files, *deadline)?;
            phases.record += begun.elapsed();
            let waiting = Instant::now();
            self.cross_barriers(&mut record)?;
            phases.nodes = waiting.elapsed();
            stages.frozen = Some(record);
        }
        Ok(())
    }

    /// Copies memory, unless that was done before, and has CRIU leave it out.
    fn copy_memory(&self, stages: &mut Stages<'_>) -> Result<(), String> {
        let (copies, list) = match &mut stages.copies {
            Some((Copies::Paused(copies), list)) => (copies, list),
            // It may have been set up since the last round.
            Some((Copies::Before(_), _)) => return self.look_for_aio(),
            _ => return Ok(()),
        };
        if library::loaded(&self.root(), stages.criu_pid) < Loaded::Pages {
            copies.give_up();
            return Ok(());
        }
        // CRIU needs the rest of the time.
        let left = stages.deadline.saturating_duration_since(Instant::now());
        let copied = copies.copy(self.tree(), Instant::now() + left / 2);
        self.hit("copied", stages.criu_pid)
            .and_then(|()| library::leave_out(list, &copied))
            .map_err(|error| format!("the job's memory cannot be copied: {error}"))
    }

    /// What CRIU does not save of the job's descriptors.
    fn descriptor_state(&self, deadline: Instant) -> Result<DescriptorState, String> {
        // CRIU needs the rest of the time.
        let limit = SOCKET_OPTIONS_TIMEOUT.min(deadline.saturating_duration_since(Instant::now()) / 4);
        let begun = Instant::now();
        let state = self.parts.job.namespace.descriptor_state(limit).map_err(|error| error.to_string())?;
        tracing::debug!("looking at the job's descriptors took {} µs", begun.elapsed().as_micros());
        if state.unread_sockets > 0 {
            tracing::warn!(
                "the options of {} sockets of the job could not be read in {limit:?}: a resume from this snapshot loses those that CRIU does not save (`ckpt-run docs limits`)",
                state.unread_sockets
            );
        }
        Ok(state)
    }

    /// Tells once in the life of a launcher that this CRIU does not correct the calls that it interrupts.
    fn look_for_library(&self, criu_pid: i32) {
        static IS_TOLD: Once = Once::new();
        if library::loaded(&self.root(), criu_pid) == Loaded::Nothing {
            IS_TOLD.call_once(|| {
                let criu = self.parts.criu.path.display();
                if cfg!(target_arch = "x86_64") {
                    tracing::warn!(
                        "{criu} is a static program, or has file capabilities, and loads no library of ckpt-run: `poll`, sleeps and waits with a timeout may return EINTR in the job at a checkpoint and after a resume (`ckpt-run docs limits`)"
                    );
                } else {
                    tracing::warn!(
                        "the time limits of `poll`, sleeps and waits begin again in the job at each checkpoint and after a resume (`ckpt-run docs limits`)"
                    );
                }
            });
        }
    }

    /// Stops a CRIU between two of its changes to the processes. When none comes, it is stopped all the same: later than
    /// `--freeze-timeout` says, since a process may end then.
    pub(super) fn stop_criu(&self, criu_pid: i32) {
        let namespace = &self.parts.job.namespace;
        let (proc, end) = (self.proc(), Instant::now() + CRIU_STOP_TIMEOUT);
        let criu = proc.join(criu_pid.to_string());
        while namespace.signal(criu_pid, false, libc::SIGSTOP).is_ok() {
            while !injection::has_stopped(&criu) && Instant::now() < end {
                std::thread::sleep(CRIU_END_POLL_INTERVAL);
            }
            if injection::is_harmless_to_kill(&proc, criu_pid) {
                return;
            }
            if Instant::now() >= end {
                return tracing::warn!(
                    "CRIU does not end in time, and is killed while it changes a process, which may end by SIGTRAP"
                );
            }
            let _ = namespace.signal(criu_pid, false, libc::SIGCONT);
            std::thread::sleep(CRIU_END_POLL_INTERVAL);
        }
    }

    /// Ends a CRIU that takes too long.
    fn kill_late_criu(&self, criu_pid: i32) {
        let namespace = &self.parts.job.namespace;
        // What is undone here must not be done again.
        self.stop_criu(criu_pid);
        let connections = end_tcp_repair(namespace.init_pid());
        tracing::debug!("CRIU is killed; it had {connections} TCP connections of the job in repair mode");
        self.kill_stopped_criu(criu_pid);
    }

    /// Kills CRIU, and the processes that it has forked, for instance to try what the kernel can do: they stop themselves and
    /// wait for it. Waits until all are gone: the next survey, or dump, would find them.
    pub(super) fn kill_stopped_criu(&self, criu_pid: i32) {
        let namespace = &self.parts.job.namespace;
        // CRIU's parasite code notices that CRIU has died, and the job continues.
        let _ = namespace.signal(criu_pid, true, libc::SIGKILL);
        let deadline = Instant::now() + CRIU_END_TIMEOUT;
        while namespace.survey().is_ok_and(|survey| !survey.strays.is_empty()) && Instant::now() < deadline {
            std::thread::sleep(CRIU_END_POLL_INTERVAL);
        }
    }

    /// Starts CRIU for a dump to `images`, with its log in `work`.
    pub(super) fn start_dump(
        &self,
        images: &StagedDir,
        work: &StagedDir,
        tries: u32,
        deadline: Instant,
        list: Option<&File>,
    ) -> Result<(Session, Options), SessionError> {
        let config = self.config_file()?;
        let mut fds = vec![images.fd().as_fd(), work.fd().as_fd()];
        fds.extend(config.iter().map(AsFd::as_fd));
        let options_fds = fds.len();
        fds.extend(list.map(AsFd::as_fd));
        let library = library::library()?;
        let namespace = &self.parts.job.namespace;
        let process = namespace
            .start_criu(&self.parts.criu.swrk(), None, &fds, Some(library.as_fd()))
            .map_err(start_error)?;
        let session = Session::new(process);
        let mut options = self.dump_options(&session.process().fds[..options_fds], tries, deadline);
        if let Some(path) = self.parts.job.stdio.terminal_key() {
            options.external.push(path);
        }
        Ok((session, options))
    }

    /// CRIU's configuration file, if it needs one: a job holds leases that CRIU would break.
    fn config_file(&self) -> io::Result<Option<OwnedFd>> {
        if leases::broken_by_reading(&self.proc()).is_empty() {
            return Ok(None);
        }
        let file = rustix::fs::memfd_create("criu.conf", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::io::write(&file, WITHOUT_OPENING_FILES.as_bytes())?;
        Ok(Some(file))
    }

    fn dump_options(&self, fds: &[i32], tries: u32, deadline: Instant) -> Options {
        let left = deadline.saturating_duration_since(Instant::now());
        Options {
            images_dir_fd: fds[0],
            work_dir_fd: Some(fds[1]),
            config_file: fds.get(2).map(|fd| format!("/proc/self/fd/{fd}")),
            pid: Some(self.parts.job.root_pid),
            leave_running: Some(self.after_dump == AfterDump::KeepRunning),
            ghost_limit: Some(GHOST_LIMIT_BYTES),
            network_lock: Some(NETWORK_LOCK_SKIP),
            log_level: Some(if tries == 1 { CRIU_WARNINGS } else { CRIU_EVERYTHING }),
            timeout: Some(u32::try_from(left.as_secs()).unwrap_or(u32::MAX).max(1)),
            ..Options::common()
        }
    }

    /// Adds the messages of length zero that CRIU leaves out. Those that cannot be added refuse the dump, with the reason
    /// in `refusal` too.
    fn add_empty_messages(
        &self,
        images: &StagedDir,
        queues: &[PeekedQueue],
        refusal: &mut Option<String>,
    ) -> Result<(), String> {
        match with_empty_messages(&|name| images.read(name), queues) {
            Ok(None) => Ok(()),
            Ok(Some(image)) => {
                let written = images.create("sk-queues.img").and_then(|mut file| file.write_all(&image));
                written.map_err(|error| format!("cannot add messages to CRIU's sk-queues.img: {error}"))
            }
            Err(EmptyMessagesError::Lost(sockets)) => {
                Err(refusal.insert(diagnose::empty_messages(&self.proc(), &sockets)).clone())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Refuses a dump of messages that a resume would lose, with the reason in `refusal` too. `empty` are queues with
    /// messages of length zero.
    fn refuse_lost_messages(
        &self,
        images: &StagedDir,
        empty: &[PeekedQueue],
        refusal: &mut Option<String>,
    ) -> Result<(), String> {
        self.add_empty_messages(images, empty, refusal)?;
        let queues = UnixQueues::read(&|name| images.read(name)).map_err(|error| error.to_string())?;
        let lost = queues.lost();
        // A test of resumes has the checkpoint of an older version, which did not look.
        if lost.is_empty() || faults::hit("lost-messages").is_err() {
            return Ok(());
        }
        Err(refusal.insert(diagnose::unreceived(&self.proc(), &lost)).clone())
    }

    /// Refuses a dump without data that is on its way to a process of the job: the other end, mostly another process of the job,
    /// has closed the connection, so that only the kernel has the rest.
    fn refuse_lost_data(
        &self,
        descriptors: &Descriptors,
        refusal: &mut Option<String>,
    ) -> Result<(), String> {
        let init_pid = self.parts.job.namespace.init_pid();
        let closing = sockets::closing(init_pid, &descriptors.tcp_connections)
            .map_err(|error| format!("cannot list the job's connections: {error}"))?;
        let Some(socket) = closing else { return Ok(()) };
        let why = format!(
            "the other end of the job's connection to {}, port {}, is closed, and the job has not received all data yet, which a snapshot would lose. The checkpoint succeeds once it has",
            socket.local.to_canonical(),
            socket.port
        );
        Err(refusal.insert(why).clone())
    }

    /// Records what CRIU does not save, while the job is frozen. `descriptors` are those of the images, `state` is what those
    /// lack.
    fn record_frozen(
        &self,
        descriptors: Descriptors,
        shm: &StagedDir,
        state: &DescriptorState,
        files: &mut Capture,
        deadline: Instant,
    ) -> Result<Frozen, String> {
        let failed = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
        let (stdio, tty) = self
            .parts
            .job
            .stdio
            .record(FROZEN_OUTPUT_TIMEOUT.min(deadline.saturating_duration_since(Instant::now())))
            .map_err(|error| failed("cannot read the job's output", &error))?;
        let root = self.root();
        let links = links::find(&descriptors.links, &root)?;
        let mut writable = descriptors.writable;
        writable.extend(links.iter().map(|link| link.target.clone()));
        writable.sort();
        writable.dedup();
        let shm_paths = writable.iter().filter(|path| saved::is_shared_memory(path));
        let shm_files = saved::save(shm_paths, &root, "shm", shm, deadline)
            .map_err(|error| failed("cannot copy the job's shared memory files", &error))?;
        let open_files = lengths(&writable, &root);
        let survey = self.parts.job.namespace.survey().map_err(|error| error.to_string())?;
        let mut open = OpenForWriting {
            writable: writable.iter().cloned().collect(),
            append_only: descriptors.append_only,
            criu_links: links.iter().map(|link| link.path.clone()).collect(),
            ..OpenForWriting::default()
        };
        open.add_mapped(&self.proc(), &survey.pids);
        let files = files
            .freeze(&open, deadline)
            .map_err(|error| failed("cannot copy the files that the job writes", &error))?;
        let (outside_tcp, tcp_ports) = (descriptors.outside_tcp, descriptors.tcp_ports);
        let directories = directories::inspect(&descriptors.socket_directories, &root);
        Ok(Frozen {
            taken: SystemTime::now(),
            survey,
            descriptors: state.clone(),
            stdio,
            tty,
            open_files,
            outside_tcp,
            tcp_ports,
            addresses: Vec::new(),
            shm_files,
            files,
            directories,
            links,
        })
    }

    /// The root of the job's file system.
    pub(super) fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.parts.job.namespace.init_pid()))
    }

    /// The job's processes.
    pub(super) fn tree(&self) -> Tree {
        self.parts.job.tree()
    }

    /// The job's /proc.
    pub(super) fn proc(&self) -> PathBuf {
        self.root().join("proc")
    }

    /// Passes a fault point whose action may affect CRIU or a process of the job.
    pub(super) fn hit(&self, point: &str, criu_pid: i32) -> io::Result<()> {
        #[cfg(feature = "faults")]
        crate::checkpoint::injected::aim(&self.parts.job, criu_pid);
        #[cfg(not(feature = "faults"))]
        let _ = criu_pid;
        faults::hit(point)
    }

    /// Keeps CRIU's log, and turns the error into a message for the user.
    fn explain(&self, id: &SnapshotId, error: SessionError, work: &StagedDir) -> AttemptError {
        let Ok(survey) = self.parts.job.namespace.survey() else { return AttemptError::JobEnded };
        if !survey.pids.contains(&self.parts.job.root_pid) {
            return AttemptError::JobEnded;
        }
        let log = match self.parts.dir.attempt_dir(&id.to_string()) {
            Ok(log) => log,
            Err(error) => return error.into(),
        };
        let text = criu_log(work);
        if let Err(error) = write_atomically(&log.join("criu.log"), text.as_bytes()) {
            tracing::warn!("cannot keep CRIU's log: {error}");
        }
        prune_attempt_logs(&self.parts.dir);
        if matches!(error, SessionError::Timeout) {
            return AttemptError::Frozen { limit: self.freeze_timeout, log };
        }
        let mut reasons = match &error {
            SessionError::Failed(_) => {
                diagnose::unsavable(&self.proc(), &survey.pids, &text, self.parts.job.agents.is_some())
            }
            _ => Vec::new(),
        };
        let culprit = crate::criu::explain(&text);
        match (&error, culprit) {
            (SessionError::Failed(_), Some(culprit)) => reasons.push(culprit),
            _ => reasons.push(error.to_string()),
        }
        AttemptError::Dump { reason: reasons.join("; "), log }
    }
}

/// For how long CRIU has paused the job, in seconds.
pub(super) fn frozen_s(work: &StagedDir) -> Result<f64, SessionError> {
    let frozen_us = Descriptors::frozen_us(&|name| work.read(name))
        .map_err(|error| SessionError::Stage(error.to_string()))?;
    Ok(Duration::from_micros(frozen_us.unwrap_or(0).into()).as_secs_f64())
}

/// Refuses a dump without a process whose device memory others have, with the reason in `refusal` too. The job is frozen by
/// now.
fn refuse_orphans(away: Option<(&Agents, &Quiesced)>, refusal: &mut Option<String>) -> Result<(), String> {
    let why = away.and_then(|(agents, away)| agents.missed_by_others(away));
    why.map_or(Ok(()), |why| Err(refusal.insert(why).clone()))
}

/// A duration that CRIU has measured.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

/// What CRIU has logged in its working directory.
pub(super) fn criu_log(work: &StagedDir) -> String {
    let log = work.read("criu.log").ok().flatten().unwrap_or_default();
    String::from_utf8_lossy(&log).into_owned()
}

fn start_error(error: NamespaceError) -> SessionError {
    match error {
        NamespaceError::Ended => SessionError::Died,
        other => SessionError::Stage(other.to_string()),
    }
}

/// The lengths of the files that a resume rolls back: not those in memory or of the kernel.
fn lengths(writable: &[String], root: &Path) -> Vec<OpenFile> {
    let on_disk = |path: &&String| {
        !["/dev/", "/proc/", "/sys/", "/run/ckpt-run/"].iter().any(|dir| path.starts_with(dir))
    };
    let length = |path: &String| {
        let meta = fs::symlink_metadata(inside(root, text_path(path))).ok()?;
        meta.is_file().then(|| OpenFile { path: path.clone(), size_bytes: meta.len() })
    };
    writable.iter().filter(on_disk).filter_map(length).collect()
}
