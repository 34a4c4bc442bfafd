//! Resuming a job from a snapshot.
//!
//! Newest first: manifest and small images are checked before anything is touched; then files are rolled back and CRIU
//! starts while memory is loaded and compared with its checksums. The processes run only after that comparison. A damaged snapshot is passed over for the next older one, with the reason told; a sound one that
//! cannot be restored is an error: going further back would throw away work for a reason that may be mended.

use crate::checkpoint::running_job::RunningJob;
use crate::criu::{Criu, InheritFd, Options, Session, SessionError, explain};
use crate::files::directories;
use crate::files::links;
use crate::files::saved;
use crate::files::staging::{StagedDir, Staging};
use crate::gpu::device_memory;
use crate::gpu::preload::{self, Interposer};
use crate::job::attempt_logs::forget_old_attempts;
use crate::job::ownership::Ownership;
use crate::job::resume_point::abandon_after;
use crate::namespace::stdio::{self, Stdio, terminal_key};
use crate::namespace::{self, Namespace, Network};
use crate::restore::loading::{self, Loading};
use crate::restore::rollback::{self, Rollback};
use crate::store::tiers::MEMORY;
use crate::sys::deadline::{PORT_RETRY_DELAY, PORT_RETRY_TIMEOUT, RESTORE_FAILURE_WINDOW};
use crate::sys::host;
use crate::sys::privileges::Privileges;
use anyhow::{Context, Result, anyhow, bail};
use ckpt_snapshot::{
    JobDir, Manifest, Marks, ReadError, SavedFile, SnapshotId, StdioKind, Store, Tiers, write_atomically,
};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// A restore may fail for a reason that is gone a moment later.
const TRIES: u32 = 2;
/// What a resume needs to know.
pub struct Resumer<'a> {
    /// The job's place in the store.
    pub dir: &'a JobDir,
    /// Its snapshots.
    pub store: &'a Arc<Tiers>,
    /// Which network the job sees.
    pub network: Network,
    /// Whether the interposer is preloaded into the job's processes.
    pub interposer: &'a Interposer,
    /// Time for the agents to put the GPU state back.
    pub agents_timeout: Duration,
    /// The CRIU to use.
    pub criu: &'a Criu,
    /// The job's record.
    pub ownership: &'a Ownership,
}

/// A resumed job.
pub struct Resumed {
    /// The job; its streams are not relayed yet.
    pub job: RunningJob,
    /// What it was resumed from.
    pub manifest: Manifest,
}

/// One try failed.
enum Failure {
    /// The snapshot is damaged: an older one may do.
    Damaged(ReadError),
    /// A port that the job listens on is taken, perhaps only for the moment.
    PortTaken(anyhow::Error),
    /// It was restored, and the GPU's state could not be brought back: the job was ended.
    Lost(anyhow::Error),
    /// CRIU could not restore it.
    Criu(anyhow::Error),
    /// It is sound and cannot be restored.
    Other(anyhow::Error),
}

impl Failure {
    /// The same with more words. What is damaged says enough.
    fn context(self, context: String) -> Self {
        match self {
            Self::Damaged(error) => Self::Damaged(error),
            Self::PortTaken(error) => Self::PortTaken(error.context(context)),
            Self::Lost(error) => Self::Lost(error.context(context)),
            Self::Criu(error) => Self::Criu(error.context(context)),
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
    /// Resumes the newest of `candidates` (oldest first) that is whole. Those that could not be restored twice are
    /// passed over, unless there are no others.
    ///
    /// # Errors
    /// When none is whole, or a whole one cannot be restored.
    pub fn newest_of(&self, candidates: &[SnapshotId]) -> Result<Resumed> {
        let mut reasons = Vec::new();
        let marks = self.dir.marks()?;
        let good: Vec<_> = candidates.iter().filter(|id| !marks.is_bad(id)).collect();
        let tried = if good.is_empty() { candidates.iter().collect() } else { good };
        for id in candidates.iter().rev() {
            if !tried.contains(&id) {
                pass_over(id, marks.why_bad(id).unwrap_or_default());
                continue;
            }
            let error = match self.resume(id) {
                Ok(resumed) => {
                    self.note(id, |marks| marks.restore_worked(id));
                    return Ok(resumed);
                }
                Err(Failure::Other(error) | Failure::PortTaken(error)) => return Err(error),
                Err(Failure::Criu(error) | Failure::Lost(error)) => {
                    let reason = error.root_cause().to_string();
                    self.note(id, |marks| note_failure(marks, id, &reason, SystemTime::now()));
                    return Err(error);
                }
                Err(Failure::Damaged(error)) => error,
            };
            tracing::error!("{error}; trying the next older one");
            reasons.push(error.to_string());
        }
        bail!(
            "none of the {} snapshots of this job is whole: {}. Nothing was started. To start from the beginning: --resume never",
            candidates.len(),
            reasons.join("; ")
        )
    }

    /// Notes how a restore of `id` went: it must not be lost for not being noted.
    fn note(&self, id: &SnapshotId, change: impl FnOnce(&mut Marks)) {
        if let Err(error) = self.dir.change_marks(change) {
            tracing::warn!("how the restore of {id} went is not noted: {error}");
        }
    }

    fn resume(&self, id: &SnapshotId) -> Result<Resumed, Failure> {
        let begun = Instant::now();
        let manifest = self.store.manifest(id)?;
        self.check_machine(&manifest)?;
        let mut tries = 1;
        let mut told = false;
        loop {
            match self.restore(&manifest) {
                Ok(job) => {
                    let age = SystemTime::UNIX_EPOCH + Duration::from_millis(manifest.taken_unix_ms);
                    tracing::info!(
                        "resumed from snapshot {id}{}, taken {}, in {:.1} s",
                        if self.is_in_memory(id) { ", which is in memory" } else { "" },
                        humantime::format_rfc3339_seconds(age),
                        begun.elapsed().as_secs_f64()
                    );
                    return Ok(Resumed { job, manifest });
                }
                Err(Failure::PortTaken(error)) if begun.elapsed() < PORT_RETRY_TIMEOUT => {
                    if !told {
                        tracing::info!(
                            "a port of the job is still taken; waiting for it for up to {} s",
                            PORT_RETRY_TIMEOUT.as_secs()
                        );
                        tracing::debug!("{error:#}");
                        told = true;
                    }
                    std::thread::sleep(PORT_RETRY_DELAY);
                }
                // What is left of the try before could hold what this one needs.
                Err(Failure::Other(error) | Failure::Criu(error))
                    if tries < TRIES && !namespace::is_ending() =>
                {
                    tracing::warn!("{error:#}; trying once more");
                    tries += 1;
                }
                Err(failure @ (Failure::Other(_) | Failure::PortTaken(_) | Failure::Criu(_))) => {
                    let context = format!(
                        "the snapshot {id} is whole but cannot be restored here; nothing was started, nothing is lost. When the reason is mended, run the same command again. Other ways: --resume with an older ID (`ckpt-run ls`), or --resume never"
                    );
                    return Err(failure.context(context));
                }
                // The GPU was tried, which may have taken minutes; whether to try again is for the user to say.
                Err(Failure::Lost(error)) => {
                    let context = format!(
                        "the snapshot {id} is whole, but the job's GPU state could not be brought back from it, and the job was ended; nothing is lost. When the reason is mended, run the same command again"
                    );
                    return Err(Failure::Lost(error.context(context)));
                }
                Err(damaged) => return Err(damaged),
            }
        }
    }

    fn is_in_memory(&self, id: &SnapshotId) -> bool {
        self.store.tier(MEMORY).is_ok_and(|tier| tier.store().manifest(id).is_ok())
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
        if !std::path::Path::new(&manifest.job.cwd).is_dir() {
            bail!("the job's working directory {} is not there", manifest.job.cwd);
        }
        Ok(())
    }

    fn restore(&self, manifest: &Manifest) -> Result<RunningJob, Failure> {
        let loads = device_memory::plan(manifest)?;
        let mirrors: Vec<_> = loads.iter().map(|load| (load.pid, load.mirror.clone())).collect();
        let is_gone = |file: &&SavedFile| std::fs::symlink_metadata(&file.path).is_err();
        let gone: Vec<_> = manifest.spare_files.iter().filter(is_gone).collect();
        let saved: Vec<_> = gone.iter().copied().chain(&manifest.shm_files).collect();
        let mirror_bytes = mirrors.iter().map(|(_, mirror)| mirror.bytes).sum();
        let staging = self.staging(manifest, mirror_bytes)?;
        let mut loading = Loading::begin(self.store, manifest, &staging, &saved, loads)?;
        let stdio =
            Stdio::prepare(Some(&manifest.stdio)).context("cannot make the job's standard streams")?;
        directories::put_back(&manifest.directories)?;
        for file in gone {
            put_back(file, &loading)?;
            tracing::info!("{}: it was gone, and is there again as it was at the snapshot", file.path);
        }
        let rollback = Rollback::plan(manifest, &stdio::appended_files())?;
        let namespace = Namespace::create(self.network).context("cannot make the job's namespace")?;
        self.leave_behind(&manifest.id)?;
        self.roll_back(manifest, &rollback)?;
        for file in &manifest.shm_files {
            put_back(file, &loading)?;
        }
        // Before the processes run: they connect as soon as they do. Those of the snapshot wait for it, whatever is
        // wanted now.
        let wanted = self.interposer.library().is_some() || manifest.tree.agents.is_some();
        let agents = wanted.then(|| preload::listen(self.dir)).transpose()?;
        let _links = links::Links::put_back(&manifest.links)?;
        let work = staging.subdir("work").context("cannot make a place for CRIU's log")?;
        if let Some(agents) = &agents {
            agents.adopt(mirrors);
        }
        let root_pid = self.run_criu(&namespace, &stdio, manifest, &mut loading, &work)?;
        if let (Some(agents), Some(record)) = (&agents, &manifest.tree.agents) {
            let proc = PathBuf::from(format!("/proc/{}/root/proc", namespace.init_pid()));
            preload::welcome_back(agents, record, &proc, self.agents_timeout)
                .map_err(|loss| Failure::Lost(anyhow!("{loss}")))?;
        }
        let command_pid = manifest.tree.command_pid;
        let job = RunningJob { namespace, stdio, root_pid, command_pid, agents };
        Ok(job)
    }

    /// Where CRIU's images are loaded to: memory if it is there, the disk of the store otherwise. What they hold is
    /// not twice in memory, see `auto_dedup`.
    fn staging(&self, manifest: &Manifest, mirror_bytes: u64) -> Result<Staging> {
        let tell = |why: &str| {
            tracing::info!(
                "the snapshot cannot be loaded to memory ({why}): it is copied to the store's disk first"
            );
        };
        Staging::for_images(
            loading::image_bytes(manifest),
            mirror_bytes,
            &self.dir.path().join("staging"),
            tell,
        )
        .context("cannot make a place for the snapshot")
    }

    /// Notes that the job goes back to `id`, before its files do: newer snapshots would not fit them any more.
    fn leave_behind(&self, id: &SnapshotId) -> Result<()> {
        Ok(self.ownership.change(|record| abandon_after(record, id))?)
    }

    fn roll_back(&self, manifest: &Manifest, rollback: &Rollback) -> Result<()> {
        if rollback.is_empty() {
            return Ok(());
        }
        let kept = rollback::place(self.dir, &manifest.id)?;
        rollback.apply(kept.as_deref())?;
        rollback::forget_old(self.dir);
        Ok(())
    }

    fn run_criu(
        &self,
        namespace: &Namespace,
        stdio: &Stdio,
        manifest: &Manifest,
        loading: &mut Loading,
        work: &StagedDir,
    ) -> Result<i32, Failure> {
        namespace.put_back_reaper(manifest.tree.command_pid).context("cannot prepare the job's namespace")?;
        let pipes = pipes(manifest, stdio);
        let mut fds: Vec<BorrowedFd> = vec![loading.images().fd().as_fd(), work.fd().as_fd()];
        fds.extend(pipes.iter().map(|(_, fd)| *fd));
        let process = namespace
            .start_criu(&self.criu.swrk(), stdio.terminal_path(), &fds)
            .context("cannot start CRIU")?;
        let keys = pipes.iter().map(|(key, _)| key.clone());
        let keys = keys.chain(manifest.tty.as_ref().map(terminal_key));
        let inherit_fd = keys.zip(&process.fds[2..]).map(|(key, &fd)| InheritFd { key, fd }).collect();
        let session = Session::new(process);
        let options = Options {
            images_dir_fd: session.process().fds[0],
            work_dir_fd: Some(session.process().fds[1]),
            inherit_fd,
            // What has been restored is not in memory twice.
            auto_dedup: Some(true),
            ..Options::of_every_job()
        };
        let has_namespaces = Privileges::detect().is_root();
        let mut damage = None;
        let mut at_stage = |stage: &str| -> Result<(), String> {
            tracing::trace!("CRIU is at {stage}");
            let mut loaded =
                |outcome: Result<(), ReadError>| outcome.map_err(|error| damage.insert(error).to_string());
            match stage {
                // From here on it makes the processes and their memory. Where a job has no namespace that CRIU would
                // restore, this is the stage before.
                "post-setup-namespaces" => loaded(loading.wait_for_pages()),
                "pre-restore" if !has_namespaces => loaded(loading.wait_for_pages()),
                "post-restore" => loaded(loading.wait_for_all()),
                "setup-namespaces" => {
                    // Without it the job is whole now; a later checkpoint that misses a process says so.
                    if let Err(error) = namespace.make_subreaper(manifest.tree.root_pid) {
                        tracing::warn!("{error}");
                    }
                    Ok(())
                }
                "pre-resume" => {
                    let tree = &manifest.tree;
                    // Now, while it cannot end yet: the end of a root that nobody knows is told to nobody.
                    namespace.adopt(tree.root_pid).map_err(|error| error.to_string())?;
                    let warnings =
                        namespace.apply(&tree.affinity, tree.last_pid).map_err(|error| error.to_string())?;
                    warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
                    Ok(())
                }
                _ => Ok(()),
            }
        };
        let result = session.restore(options, silence(loading::image_bytes(manifest)), &mut at_stage);
        match (result, damage) {
            (_, Some(error)) => Err(error.into()),
            (Ok(outcome), None) => Ok(outcome.pid.unwrap_or(manifest.tree.root_pid)),
            (Err(error), None) => Err(self.explain(manifest, &error, work)),
        }
    }

    fn explain(&self, manifest: &Manifest, error: &SessionError, work: &StagedDir) -> Failure {
        let text = work.read("criu.log").ok().flatten().unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let reason = explain(&text).unwrap_or_else(|| error.to_string());
        let kept = self.dir.attempt_dir(&format!("{}-restore", manifest.id));
        let kept = kept.and_then(|dir| {
            let path = dir.join("criu.log");
            match write_atomically(&path, text.as_bytes()) {
                Ok(()) => Ok(path),
                Err(source) => Err(ckpt_snapshot::OpenError::Io { step: "write", path, source }),
            }
        });
        forget_old_attempts(self.dir);
        let error = match kept {
            Ok(path) => anyhow!("the restore failed: {reason}. CRIU's log is in {}", path.display()),
            Err(problem) => anyhow!("the restore failed: {reason} (and {problem})"),
        };
        let port = text.contains("Can't bind inet socket") && text.contains("Address already in use");
        if port { Failure::PortTaken(error) } else { Failure::Criu(error) }
    }
}

/// How long CRIU may be silent while it restores so much: ten minutes, and what a very slow disk takes to give it.
fn silence(image_bytes: u64) -> Duration {
    const LEAST: Duration = Duration::from_secs(600);
    const SLOWEST_BYTES_PER_S: u64 = 20_000_000;
    #[cfg(feature = "faults")]
    if let Some(limit) = crate::checkpoint::injected::silence() {
        return limit;
    }
    LEAST + Duration::from_secs(image_bytes / SLOWEST_BYTES_PER_S)
}

/// Notes a failed restore, unless one has failed shortly before.
fn note_failure(marks: &mut Marks, id: &SnapshotId, reason: &str, now: SystemTime) {
    let last = marks.of(id).and_then(|mark| mark.failed_restores.last());
    let last = last.map(|failed| SystemTime::UNIX_EPOCH + Duration::from_millis(failed.unix_ms));
    // A clock that was set back makes none of them recent.
    let is_recent =
        last.is_some_and(|last| now.duration_since(last).is_ok_and(|past| past < RESTORE_FAILURE_WINDOW));
    if !is_recent {
        marks.restore_failed(id, reason);
    }
}

fn pass_over(id: &SnapshotId, why: &str) {
    tracing::error!(
        "the snapshot {id} could not be restored twice ({why}) and is passed over for an older one. When the reason is mended: `ckpt-run unmark {id}`, or --resume {id}"
    );
}

fn put_back(file: &SavedFile, loading: &Loading) -> Result<()> {
    loading
        .open(file)
        .and_then(|content| saved::put_back(file, content))
        .with_context(|| format!("cannot put {} back", file.path))
}

/// The pipes of the snapshot by the names that CRIU has for them, with what takes their place.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_trouble_makes_no_snapshot_bad() {
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
