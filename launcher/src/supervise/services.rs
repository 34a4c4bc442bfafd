//! The threads that serve a run in the background, and what all its job sessions share.

use super::events::Event;
use super::preempt;
use super::startup::OpenedJob;
use crate::cli::config::Config;
use crate::cluster::{Cluster, Replicas};
use crate::files::rules::FileRules;
use crate::job::claim::ClaimedJob;
use crate::job::journal::{Entry, EventKind};
use crate::job::status::SharedStatus;
use crate::job::times;
use crate::namespace::stdio;
use crate::persist::copier::CopyParts;
use crate::persist::memory::{Persister, ReplicaHolder};
use crate::persist::upload::Uploader;
use crate::store::tiers;
use crate::sys::path_text::text_path;
use crate::sys::runtime_dir;
use anyhow::{Context as _, Result};
use ckpt_object_medium::StoreUrl;
use ckpt_snapshot::{JobDir, Tiers};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

/// What stays the same over all sessions of the job.
pub(super) struct RunContext<'a> {
    pub(super) config: &'a Config,
    pub(super) argv: &'a [OsString],
    pub(super) opened: &'a OpenedJob,
    pub(super) claimed: &'a ClaimedJob,
    /// Which files are the job's.
    pub(super) file_rules: Arc<FileRules>,
    pub(super) status: Arc<SharedStatus>,
    pub(super) uploader: Option<Arc<Uploader>>,
    pub(super) persister: Option<Arc<Persister>>,
    pub(super) events: Sender<Event>,
    pub(super) inbox: Receiver<Event>,
    /// The other nodes of the job, if it has several.
    pub(super) nodes: Option<&'a Cluster>,
    _probe: Option<preempt::Probe>,
}

impl<'a> RunContext<'a> {
    /// Starts the uploader, the persister, the preemption triggers and the signal handler.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub(super) fn start(
        config: &'a Config,
        argv: &'a [OsString],
        opened: &'a OpenedJob,
        claimed: &'a ClaimedJob,
        nodes: Option<&'a Cluster>,
    ) -> Result<Self> {
        let status = Arc::new(SharedStatus::new(opened.identity.key.clone()));
        let dir = opened.dir.store();
        let address = config.store.url.as_ref().map(ToString::to_string);
        status.is_in(address.unwrap_or_else(|| dir.display().to_string()));
        let parts = CopyParts {
            store: Arc::clone(&opened.store),
            dir: opened.dir.clone(),
            retention: config.retention(),
            status: Arc::clone(&status),
            ownership: Arc::clone(&claimed.ownership),
        };
        let upload = |_| Uploader::start(parts.clone(), config.upload_every, claimed.handover.clone());
        let uploader = config.store.upload.as_ref().map(upload).transpose()?.map(Arc::new);
        let persist = |staged_bytes: &Arc<AtomicU64>| {
            let (journal, uploader) = (Arc::clone(&opened.journal), uploader.clone());
            let every = nodes.is_none().then_some(config.persist_every);
            let (staged_bytes, holder) = (Arc::clone(staged_bytes), Holder::of(opened, &status));
            Persister::start(parts.clone(), journal, uploader, every, staged_bytes, holder)
        };
        let persister = opened.staged_bytes.as_ref().map(persist).transpose()?.map(Arc::new);
        let (events, inbox) = unbounded();
        preempt::watch_file(config.preempt_file.clone(), config.monitor_interval, events.clone())?;
        let probe =
            preempt::Probe::begin(config.preempt_probe.clone(), config.monitor_interval, events.clone())?;
        // Before a signal ends ckpt-run while the job is being started or resumed.
        let (claim, last_persister, grace) = (Arc::clone(&claimed.claim), persister.clone(), config.grace);
        let journal = Arc::clone(&opened.journal);
        let last_act = move || {
            claim.release();
            if let Some(persister) = &last_persister {
                persister.complete_last_copy(Instant::now() + grace, || None);
            }
            journal.add(&Entry::new(EventKind::LauncherEnded, "ckpt-run was ended by a signal"));
        };
        opened.signals.serve(events.clone(), last_act);
        Ok(Self {
            config,
            argv,
            opened,
            claimed,
            file_rules: Arc::new(file_rules(config)?),
            status,
            uploader,
            persister,
            events,
            inbox,
            nodes,
            _probe: probe,
        })
    }

    /// The snapshot from which the next run would resume, as far as this run knows.
    pub(super) fn good_snapshot(&self) -> Option<String> {
        let status = self.status.snapshot();
        status.last_snapshot.map(|saved| saved.id).or(status.resumed_from)
    }

    /// The work that a resume from the newest snapshot does again, as far as that is known.
    pub(super) fn lost(&self) -> Option<Duration> {
        let times = times::of_job(&self.opened.dir, true).ok()??;
        times.work_after(&self.good_snapshot()?).map(Duration::from_millis)
    }

    /// Removes images of the job's memory that a killed launcher, or an earlier session, left on disk.
    pub(super) fn discard_staging(&self) -> Result<()> {
        let staging = self.opened.dir.path().join("staging");
        match std::fs::remove_dir_all(&staging) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", staging.display()))
            }
            _ => Ok(()),
        }
    }
}

/// The holder of the replicas of this part, if the job has replicas.
struct Holder {
    replicas: Arc<Replicas>,
    dir: JobDir,
    status: Arc<SharedStatus>,
}

impl Holder {
    fn of(opened: &OpenedJob, status: &Arc<SharedStatus>) -> Option<Box<dyn ReplicaHolder>> {
        let replicas = opened.replicas.clone()?;
        Some(Box::new(Self { replicas, dir: opened.dir.clone(), status: Arc::clone(status) }))
    }
}

impl ReplicaHolder for Holder {
    fn publish(&self, store: &Tiers) -> Result<()> {
        self.replicas.publish(store, &tiers::history(&self.dir, self.status.last_progress_unix_ms())?)
    }

    fn interrupt(&self) {
        self.replicas.interrupt();
    }
}

/// The rules for the job's files. Files of ckpt-run itself are not the job's.
fn file_rules(config: &Config) -> Result<FileRules> {
    let absolute = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path)).ok();
    let addresses = [&config.store.url, &config.store.upload].into_iter().flatten();
    let own = [Some(&config.store.dir), config.log_file.as_ref()].into_iter().flatten().cloned();
    let own = own.chain(addresses.filter_map(StoreUrl::directory));
    let output = stdio::own_files().into_iter().map(|file| text_path(&file.path).into_owned());
    let own =
        own.filter_map(|path| absolute(&path)).chain(output).chain(runtime_dir::runtime_dir()).collect();
    FileRules::new(&config.files, own)
}
