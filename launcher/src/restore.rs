//! Resuming a job from a snapshot.
//!
//! Newest first: manifest, small images, file lengths are checked before anything is touched; then files are rolled
//! back and CRIU restores while the memory pages are compared with their checksums. The processes run only after
//! that comparison. A damaged snapshot is passed over for the next older one, with the reason told; a sound one that
//! cannot be restored is an error: going further back would throw away work for a reason that may be mended.

use crate::checkpoint::RunningJob;
use crate::config::Config;
use crate::criu::{Criu, InheritFd, Options, Session, SessionError, explain};
use crate::device_memory::{self, Load};
use crate::directories;
use crate::host;
use crate::interpose;
use crate::links;
use crate::namespace::Namespace;
use crate::progress::Bar;
use crate::rollback::Rollback;
use crate::saved;
use crate::staging::{StagedDir, Staging};
use crate::stdio::{self, Stdio, terminal_key};
use anyhow::{Context, Result, anyhow, bail};
use ckpt_snapshot::{
    Check, JobDir, Manifest, ReadError, SavedFile, SnapshotId, StdioKind, Store, write_atomically,
};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// A restore may fail for a reason that is gone a moment later.
const TRIES: u32 = 2;
/// The kernel keeps the port of a killed listener for a minute (TIME_WAIT) if the job did not ask otherwise
/// (SO_REUSEADDR).
const PORT_LIMIT: Duration = Duration::from_secs(75);
const BETWEEN_PORT_TRIES: Duration = Duration::from_secs(1);

/// What a resume needs to know.
pub struct Resumer<'a> {
    /// The job's place in the store.
    pub dir: &'a JobDir,
    /// The effective options.
    pub config: &'a Config,
    /// The CRIU to use.
    pub criu: &'a Criu,
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
    /// It is sound and cannot be restored.
    Other(anyhow::Error),
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
    /// Resumes the newest of `candidates` (oldest first) that is whole.
    ///
    /// # Errors
    /// When none is whole, or a whole one cannot be restored.
    pub fn newest_of(&self, candidates: &[SnapshotId]) -> Result<Resumed> {
        let mut reasons = Vec::new();
        for id in candidates.iter().rev() {
            let error = match self.resume(id) {
                Ok(resumed) => return Ok(resumed),
                Err(Failure::Other(error) | Failure::PortTaken(error) | Failure::Lost(error)) => {
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

    fn resume(&self, id: &SnapshotId) -> Result<Resumed, Failure> {
        let begun = Instant::now();
        let store = self.dir.store();
        let manifest = store.manifest(id)?;
        self.check_machine(&manifest)?;
        let mut tries = 1;
        let mut told = false;
        loop {
            match self.restore(&store, &manifest) {
                Ok(job) => {
                    let age = SystemTime::UNIX_EPOCH + Duration::from_millis(manifest.taken_unix_ms);
                    tracing::info!(
                        "resumed from snapshot {id}, taken {}, in {:.1} s",
                        humantime::format_rfc3339_seconds(age),
                        begun.elapsed().as_secs_f64()
                    );
                    return Ok(Resumed { job, manifest });
                }
                Err(Failure::PortTaken(error)) if begun.elapsed() < PORT_LIMIT => {
                    if !told {
                        tracing::info!(
                            "a port of the job is still taken; waiting for it for up to {} s",
                            PORT_LIMIT.as_secs()
                        );
                        tracing::debug!("{error:#}");
                        told = true;
                    }
                    std::thread::sleep(BETWEEN_PORT_TRIES);
                }
                Err(Failure::Other(error)) if tries < TRIES => {
                    tracing::warn!("{error:#}; trying once more");
                    tries += 1;
                }
                Err(Failure::Other(error) | Failure::PortTaken(error)) => {
                    let context = format!(
                        "the snapshot {id} is whole but cannot be restored here; nothing was started, nothing is lost. When the reason is mended, run the same command again. Other ways: --resume with an older ID (`ckpt-run ls`), or --resume never"
                    );
                    return Err(Failure::Other(error.context(context)));
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

    fn restore<'a>(&self, store: &dyn Store, manifest: &'a Manifest) -> Result<RunningJob, Failure> {
        let images = store.images(manifest)?;
        let loads = device_memory::plan(manifest)?;
        let gone = manifest.spare_files.iter().filter(|file| std::fs::symlink_metadata(&file.path).is_err());
        let open = |file: &'a SavedFile| Ok((file, store.open(manifest, &file.data)?));
        let gone = gone.map(open).collect::<Result<Vec<_>, ReadError>>()?;
        let shm = manifest.shm_files.iter().map(open).collect::<Result<Vec<_>, ReadError>>()?;
        let stdio =
            Stdio::prepare(Some(&manifest.stdio)).context("cannot make the job's standard streams")?;
        directories::put_back(&manifest.directories)?;
        for (file, content) in gone {
            put_back(file, content)?;
            tracing::info!("{}: it was gone, and is there again as it was at the snapshot", file.path);
        }
        let rollback = Rollback::plan(manifest, &stdio::appended_files())?;
        let namespace = Namespace::create(self.config.network).context("cannot make the job's namespace")?;
        self.roll_back(manifest, &rollback)?;
        for (file, content) in shm {
            put_back(file, content)?;
        }
        // Before the processes run: they connect as soon as they do. Those of the snapshot wait for it, whatever is
        // wanted now.
        let wanted = self.config.interpose.library().is_some() || manifest.tree.agents.is_some();
        let agents = wanted.then(|| interpose::listen(self.dir)).transpose()?;
        let _links = links::Links::put_back(&manifest.links)?;
        let staging = Staging::in_memory(0)
            .or_else(|_| Staging::on_disk(&self.dir.path().join("staging")))
            .context("cannot make a place for CRIU's log")?;
        let work = staging.subdir("work").context("cannot make a place for CRIU's log")?;
        if let Some(agents) = &agents {
            agents.adopt(loads.iter().map(|load| (load.pid, load.mirror.clone())));
        }
        let check = self.start_check(manifest, images.check, images.check_bytes, loads)?;
        let root_pid = self.run_criu(&namespace, &stdio, manifest, &images.dir, &work, check)?;
        if let (Some(agents), Some(record)) = (&agents, &manifest.tree.agents) {
            let proc = PathBuf::from(format!("/proc/{}/root/proc", namespace.init_pid()));
            interpose::welcome_back(agents, record, &proc, self.config.freeze_timeout)
                .map_err(|loss| Failure::Lost(anyhow!("{loss}")))?;
        }
        let command_pid = manifest.tree.command_pid;
        let job = RunningJob { namespace, stdio, root_pid, command_pid, agents };
        Ok(job)
    }

    /// Compares memory pages, and loads and compares device memory, while CRIU restores.
    fn start_check(
        &self,
        manifest: &Manifest,
        check: Check,
        check_bytes: u64,
        loads: Vec<Load>,
    ) -> Result<JoinHandle<Result<(), ReadError>>> {
        let (store, manifest) = (self.dir.store(), manifest.clone());
        let load_bytes: u64 = loads.iter().map(|load| load.bytes).sum();
        let bar = Bar::new("checking the snapshot", check_bytes + load_bytes);
        let work = move || {
            let progress = |bytes| bar.advance(bytes);
            let load = |one| device_memory::load(&store, &manifest, one, &progress);
            std::thread::scope(|scope| {
                let load = &load;
                let loading: Vec<_> = loads.iter().map(|one| scope.spawn(move || load(one))).collect();
                let checked = check(&progress);
                let loaded = loading.into_iter().map(|thread| thread.join().expect("no panic in a load"));
                loaded.fold(checked, Result::and)
            })
        };
        std::thread::Builder::new()
            .name("verify".to_owned())
            .spawn(work)
            .context("cannot start the check of the snapshot")
    }

    fn roll_back(&self, manifest: &Manifest, rollback: &Rollback) -> Result<()> {
        if rollback.is_empty() {
            return Ok(());
        }
        let kept = self.dir.kept_dir(&manifest.id, SystemTime::now())?;
        rollback.apply(&kept)
    }

    fn run_criu(
        &self,
        namespace: &Namespace,
        stdio: &Stdio,
        manifest: &Manifest,
        images: &File,
        work: &StagedDir,
        check: JoinHandle<Result<(), ReadError>>,
    ) -> Result<i32, Failure> {
        let pipes = pipes(manifest, stdio);
        let mut fds: Vec<BorrowedFd> = vec![images.as_fd(), work.fd().as_fd()];
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
            ..Options::of_every_job()
        };
        let mut check = Some(check);
        let mut damage = None;
        let mut at_stage = |stage: &str| -> Result<(), String> {
            tracing::trace!("CRIU is at {stage}");
            match stage {
                "post-restore" => {
                    let outcome = check.take().map(JoinHandle::join);
                    match outcome {
                        None | Some(Ok(Ok(()))) => Ok(()),
                        Some(Ok(Err(error))) => {
                            let said = error.to_string();
                            damage = Some(error);
                            Err(said)
                        }
                        Some(Err(_)) => Err("the check of the snapshot crashed".to_owned()),
                    }
                }
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
        let result = session.restore(options, &mut at_stage);
        // Damage explains any failure of CRIU, so it is looked for before CRIU is blamed.
        if let Some(Ok(Err(error))) = check.take().map(JoinHandle::join) {
            damage = Some(error);
        }
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
        let error = match kept {
            Ok(path) => anyhow!("the restore failed: {reason}. CRIU's log is in {}", path.display()),
            Err(problem) => anyhow!("the restore failed: {reason} (and {problem})"),
        };
        let port = text.contains("Can't bind inet socket") && text.contains("Address already in use");
        if port { Failure::PortTaken(error) } else { Failure::Other(error) }
    }
}

fn put_back(file: &SavedFile, content: File) -> Result<()> {
    saved::put_back(file, content).with_context(|| format!("cannot put {} back", file.path))
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
