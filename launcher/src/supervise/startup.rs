//! The start of a run, up to its services: open the job's store, then claim the job.
//!
//! ```text
//!   open: rights, CRIU, store, lock ──► claim: record, decision ──► services.rs ──► the supervisor (mod.rs)
//!     │ the job is unchanged              │ the record names this launcher
//!     └─► error                           └─► error: the claim is released when [`ClaimedJob`] is dropped
//! ```

use super::events::Signals;
use super::{moved, nodes};
use crate::checkpoint::precopy::Precopy;
use crate::cli::config::Config;
use crate::cluster::{self, NODE, Replicas};
use crate::criu::{Criu, CriuMissing};
use crate::job::alive;
use crate::job::claim::ClaimedJob;
use crate::job::earlier_init;
use crate::job::journal::{Entry, EventKind, Journal, Measured};
use crate::job::resume_point::Resume;
use crate::job::started_with;
use crate::job::status::unix_ms;
use crate::job::times;
use crate::namespace::{Namespace, stdio};
use crate::persist::journal_copies::JournalCopies;
use crate::persist::memory::Memory;
use crate::store::answer::AnswerWatch;
use crate::store::marks;
use crate::store::root::Root;
use crate::store::tiers::{self, MEMORY};
use crate::sys::error::{EXIT_OWN, bad_input};
use crate::sys::host;
use crate::sys::path_text::{path_text, shown};
use crate::sys::privileges::Privileges;
use crate::sys::secrets;
use crate::sys::span::span;
use anyhow::{Context, Result, anyhow};
use ckpt_object_medium::Pace;
use ckpt_snapshot::{
    JobDir, JobIdentity, JobKey, JobLock, JobOutcome, JobRecord, ReadError, SnapshotId, Store, Tiers, faults,
};
use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};
use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The lowest hard limit of open files without a warning.
const DESCRIPTORS_MIN: u64 = 256;

/// The job's store, opened and locked. No other launcher on this machine has the job.
pub(super) struct OpenedJob {
    /// Received since the start.
    pub(super) signals: Signals,
    pub(super) identity: JobIdentity,
    pub(super) criu: Criu,
    pub(super) dir: JobDir,
    pub(super) store: Arc<Tiers>,
    pub(super) journal: Arc<Journal>,
    /// Whether the store answers.
    pub(super) answers: AnswerWatch,
    /// The rate of uploads.
    pub(super) pace: Arc<Pace>,
    /// Memory reserved for the images of the current checkpoint (bytes), if snapshots are kept in memory.
    pub(super) staged_bytes: Option<Arc<AtomicU64>>,
    /// Replicas of the snapshots in memory (`--replicas`).
    pub(super) replicas: Option<Arc<Replicas>>,
    /// Shared with what may have to take it again, see [`JobDir::make_again`].
    pub(super) lock: Arc<Mutex<JobLock>>,
}

/// Checks what the run needs, and opens and locks the job's store.
///
/// # Errors
/// Bad input, missing privileges, or a store that cannot be used.
pub(super) fn open(config: &Config, argv: &[OsString]) -> Result<OpenedJob> {
    let signals = Signals::listen(config.on_signal.clone())?;
    let cwd = std::env::current_dir().context("cannot determine the working directory")?;
    check_privileges(config)?;
    let criu = Criu::find(config.criu.as_deref());
    // Without a CRIU, another try is of no use before somebody has changed the machine. One that does not run may run again.
    let is_input = |error: &CriuMissing| match error {
        CriuMissing::NoProcess { .. } => false,
        CriuMissing::Broken { .. } => config.criu.is_some(),
        _ => true,
    };
    let criu = criu.map_err(|error| if is_input(&error) { bad_input(error) } else { error.into() })?;
    if matches!(config.precopy, Precopy::Rounds(_)) && !criu.tracks_memory() {
        return Err(bad_input(anyhow!(
            "--precopy with a number of rounds needs a kernel that tracks changes to memory (CONFIG_MEM_SOFT_DIRTY), and {} says that this one does not: use --precopy auto, or off",
            criu.path.display()
        )));
    }
    let key = job_key(config, argv, config.nodes.rank.filter(|_| config.nodes.several().is_some()))?;
    let pace = config.store.pace();
    let answers = AnswerWatch::start(&config.store, end_without_answer);
    let root = answers.during("it was being opened", || open_root(config, &pace))?;
    let dir = root.job(&key);
    let on_wait = |pid: &str| {
        tracing::info!("job {key}: waiting for `ckpt-run prune` or `ckpt-run rm` to end (process {pid})");
    };
    let lock = dir.lock_to_run(on_wait)?;
    let journal = Arc::new(Journal::of(&dir));
    earlier_init::wait_for_end(&dir, &journal);
    cluster::delete_left_interfaces();
    let open_memory = || Memory::open(config.nodes.memory.clone());
    let memory = (config.persist_every > 1).then(open_memory).transpose()?;
    let replicas = nodes::replicas(config, memory.as_ref())?;
    let at_holder = replicas.as_ref().map(|replicas| replicas.medium());
    let in_memory = memory.as_ref().map(|memory| memory.medium("own"));
    let opened = || tiers::open_at(&config.store, &dir, &pace, in_memory, at_holder);
    let store = answers.during("it was being opened", opened)?;
    if config.nodes.memory.is_some()
        && let Ok(tier) = store.tier(MEMORY)
    {
        // Of a checkpoint that was in progress.
        tier.store().sweep()?;
    }
    let text = |value: &OsString| value.to_string_lossy().into_owned();
    let identity =
        JobIdentity { key: key.to_string(), cwd: path_text(&cwd), argv: argv.iter().map(text).collect() };
    Ok(OpenedJob {
        signals,
        identity,
        criu,
        dir,
        store,
        journal,
        answers,
        pace,
        staged_bytes: memory.map(|memory| memory.staged_bytes),
        replicas,
        lock: Arc::new(Mutex::new(lock)),
    })
}

/// The name of the job; that of one part, if it is on several nodes. Each part has a store of its own, or a place of its own in
/// a shared one.
///
/// # Errors
/// Bad input: it is too long.
pub(super) fn job_key(config: &Config, argv: &[OsString], rank: Option<u32>) -> Result<JobKey> {
    let cwd = std::env::current_dir().context("cannot determine the working directory")?;
    let key = config.job.clone().unwrap_or_else(|| JobKey::derived(&cwd, argv));
    match rank {
        Some(rank) => JobKey::named(&format!("{key}{NODE}{rank}")).map_err(bad_input),
        None => Ok(key),
    }
}

/// Opens the store, or makes a new one.
fn open_root(config: &Config, pace: &Arc<Pace>) -> Result<Root> {
    faults::hit("store-open")?;
    if config.resume != Resume::Never {
        config.store.check_mounted()?;
    }
    // A run that has to resume needs an existing store: a new one would only hide a mistyped path.
    let is_here_only = config.store.url.is_none() && config.store.upload.is_none();
    if matches!(config.resume, Resume::Required | Resume::Snapshot(_)) && is_here_only {
        Root::open(&config.store)?;
    }
    let root = Root::open_or_create(&config.store, pace)?;
    config.store.remember_mounts();
    Ok(root)
}

/// Decides where the job starts (`resume`), and writes this launcher's name into the job's record. Also returns the snapshots to
/// resume from, oldest first; none means that the job starts from the beginning.
///
/// # Errors
/// Bad input: nothing to resume, or no such snapshot; or the record cannot be written.
pub(super) fn claim(
    config: &Config,
    opened: &mut OpenedJob,
    resume: &Resume,
) -> Result<(ClaimedJob, Vec<SnapshotId>)> {
    // Nothing is begun with marks that somebody else has written.
    opened.dir.marks()?;
    moved::refuse(config, opened, resume)?;
    let (claimed, candidates) = {
        let OpenedJob { dir, store, identity, answers, .. } = &*opened;
        let claim = || {
            let resume = match resume {
                Resume::Snapshot(text) => Resume::Snapshot(without_tag(config, dir, store, text)?),
                other => other.clone(),
            };
            ClaimedJob::claim(&resume, &config.store, dir, store, identity)
        };
        let claimed = answers.during("its snapshots were being listed", claim);
        claimed.map_err(|error| naming_its_job(config, dir, error))?
    };
    let (claim, journal) = (Arc::clone(&claimed.claim), Arc::clone(&opened.journal));
    opened.signals.before_end(move || {
        claim.release();
        journal.add(&Entry::new(EventKind::LauncherEnded, "ckpt-run was ended by a signal"));
    });
    opened.dir = claimed.ownership.dir().clone();
    opened.dir.begin_marks()?;
    let key = opened.dir.key();
    match candidates.last() {
        Some(id) => {
            warn_of_lost_memory(&opened.journal, id);
            tracing::info!(
                "job {key}: resuming from snapshot {id}{}",
                lost_since(opened, id).unwrap_or_default()
            );
            keep_command(opened, &claimed, id)?;
        }
        None if claimed.before.is_removed && claimed.ownership.previous().is_removed => {}
        None if claimed.before.is_removed => tracing::info!(
            "job {key}: it was deleted on another machine (`rm --whole-job`), and starts from the beginning"
        ),
        None if *resume == Resume::Auto && claimed.before.outcome == JobOutcome::Complete => {
            tracing::info!(
                "job {key}: it was complete, as it had ended with 0, and starts again from the beginning. `--resume ID` resumes one of its snapshots, if it has any (`ckpt-run ls`)"
            );
        }
        None if *resume == Resume::Auto => warn_of_passed_over(opened, claimed.ownership.previous()),
        None => {}
    }
    Ok((claimed, candidates))
}

/// Says if the job starts from the beginning although it has run before: without a snapshot, or a new run was begun
/// (`--resume never`, or after a complete one), and has none.
fn warn_of_passed_over(opened: &OpenedJob, previous: &JobRecord) {
    let listed = tiers::list_local(&opened.store).unwrap_or_default();
    if listed.is_empty() && previous.run > 0 {
        tracing::info!(
            "job {}: it has run before and has no snapshot, so it starts from the beginning",
            opened.dir.key()
        );
    }
    if let Some(newest) = listed.last() {
        tracing::warn!(
            "job {}: it starts from the beginning, since its newest run has no snapshot yet. There are snapshots of runs before: `--resume {}` resumes the newest one",
            opened.dir.key(),
            newest.id
        );
    }
}

/// The thread that waits for the store cannot be cancelled.
fn end_without_answer() {
    stdio::restore_terminal();
    // The job's namespace, if there is one, ends with this process.
    std::process::exit(EXIT_OWN)
}

/// How much work the job did after the snapshot `id`, as far as that is known.
fn lost_since(opened: &OpenedJob, id: &SnapshotId) -> Option<String> {
    let taken_ms = opened.store.manifest(id).ok()?.taken_unix_ms;
    let lost = times::of_job(&opened.dir, false).ok()??.work_after(&id.to_string())?;
    let lost = Duration::from_millis(Some(lost).filter(|lost_ms| *lost_ms >= 1000)?);
    let at = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(taken_ms));
    Some(format!(", taken at {at}: {} of work after it are done again", span(lost)))
}

/// The snapshot's ID, if it is named by a tag; `text` otherwise.
pub(super) fn without_tag(config: &Config, dir: &JobDir, store: &Tiers, text: &str) -> Result<String> {
    if !matches!((store as &dyn Store).find(text), Err(ReadError::Missing(_))) {
        return Ok(text.to_owned());
    }
    let marks = marks::known(&config.store, dir)?;
    let tagged = marks.tagged(text).next();
    Ok(tagged.map_or_else(|| text.to_owned(), ToString::to_string))
}

/// If the snapshot that is to be resumed is of another job, says of which.
fn naming_its_job(config: &Config, dir: &JobDir, error: anyhow::Error) -> anyhow::Error {
    let (Resume::Snapshot(text), Some(ReadError::Missing(_))) = (&config.resume, error.downcast_ref()) else {
        return error;
    };
    let of_other = |job: JobDir| {
        let store = tiers::open(&config.store, &job).ok()?;
        let id = (&*store as &dyn Store).find(text).ok()?;
        Some((job.key().clone(), id))
    };
    let jobs = Root::open(&config.store).and_then(|root| root.jobs()).unwrap_or_default();
    let others = jobs.into_iter().filter(|job| job.key() != dir.key());
    match others.into_iter().find_map(of_other) {
        Some((other, id)) => bad_input(anyhow!(
            "the snapshot {id} is of the job {other}, and this command is the job {}. To resume {other}: --job {other} --resume {id}",
            dir.key()
        )),
        None => error,
    }
}

/// A resumed job is what it was: its snapshots keep the command line with which it was started, and its user is told
/// what has changed since without effect.
fn keep_command(opened: &mut OpenedJob, claimed: &ClaimedJob, id: &SnapshotId) -> Result<()> {
    let mut notes = Vec::new();
    // A damaged manifest is reported when the job is resumed.
    let here = opened.identity.clone();
    let started = opened.store.manifest(id).map_or_else(|_| here.clone(), |manifest| manifest.job);
    if !started.argv.is_empty() && started.argv != here.argv {
        let words = |argv: &[String]| secrets::hidden_in(argv).join(" ");
        notes.push(format!(
            "the job was started as `{}`, and resumes as that: what differs in `{}` has no effect",
            words(&started.argv),
            words(&here.argv)
        ));
        opened.identity.argv = started.argv;
    }
    if !started.cwd.is_empty() && started.cwd != here.cwd {
        notes.push(format!(
            "the job was started in {}, and resumes there: nothing of it is done in {}. For a job of its own here, use another name (--job)",
            shown(&started.cwd),
            shown(&here.cwd)
        ));
        opened.identity.cwd = started.cwd;
    }
    if opened.identity != here && opened.dir.records_medium().is_none() {
        claimed.ownership.change(|record| {
            record.argv.clone_from(&opened.identity.argv);
            record.cwd.clone_from(&opened.identity.cwd);
        })?;
    }
    let changed = started_with::changed_scripts(&opened.dir);
    if !changed.is_empty() {
        let have = if changed.len() == 1 { "has" } else { "have" };
        let files = changed.join(", ");
        notes.push(format!(
            "{files} {have} changed since the job was started: a resumed job runs the code that it had loaded"
        ));
    }
    for note in notes {
        let remedy = "To start from the beginning instead: --resume never";
        tracing::warn!("{note}. {remedy}");
        opened.journal.add(&Entry::new(EventKind::Noted, note).remedy(Some(remedy)));
    }
    Ok(())
}

/// This launcher is in the journal. Dropped, its end is, too.
pub(super) struct Recorded<'a> {
    journal: &'a Journal,
    /// Dropped after the end is recorded.
    _copies: Option<JournalCopies>,
}

impl Drop for Recorded<'_> {
    fn drop(&mut self) {
        self.journal.add(&Entry::new(EventKind::LauncherEnded, "ckpt-run has ended"));
        self.journal.end_listening();
    }
}

/// Adds this launcher, which was started at `begun_at`, to the journal, and until when the job ran before. From now on, the
/// journal is copied into the object store, if the job has one.
pub(super) fn record<'a>(
    config: &Config,
    opened: &'a OpenedJob,
    claimed: &ClaimedJob,
    begun_at: SystemTime,
) -> Recorded<'a> {
    let measured = Measured {
        begun_unix_ms: Some(unix_ms(begun_at)),
        alive_unix_ms: alive::last_beat(&opened.dir).map(unix_ms),
        host: Some(host::facts().hostname),
        ..Measured::default()
    };
    opened.journal.add(&Entry::new(EventKind::LauncherStarted, "ckpt-run has started").measured(measured));
    let copies = JournalCopies::start(&config.store, &opened.dir, claimed, &opened.journal);
    Recorded { journal: &opened.journal, _copies: copies }
}

/// Reports snapshots that were only in the memory of an earlier launcher, and are newer than the one to resume.
fn warn_of_lost_memory(journal: &Journal, resumed: &SnapshotId) {
    if let Some(id) = journal.newest_in_memory_only().filter(|id| id > resumed) {
        tracing::warn!(
            "newer snapshots, up to {id}, were in memory only (--persist-every) and are lost with the ckpt-run that had them"
        );
    }
}

/// Warns of a hard limit of open files that is too low for a resume. CRIU has some 45 descriptors of its own in each process
/// that it restores, above those of the process, and raises its own limit only with CAP_SYS_RESOURCE.
fn warn_of_descriptor_limit(rights: Privileges) {
    let limit = getrlimit(Resource::Nofile).maximum;
    if let Some(limit) = limit.filter(|limit| *limit < DESCRIPTORS_MIN)
        && !rights.may_raise_limits()
    {
        tracing::warn!(
            "the hard limit of open files is {limit}: with less than {DESCRIPTORS_MIN}, the job may not be resumed here. Raise it (`ulimit -Hn`, systemd: LimitNOFILE=)"
        );
    }
}

/// Tests whether a user other than root can create what a job needs, before anything is changed.
fn check_privileges(config: &Config) -> Result<()> {
    let rights = Privileges::detect();
    warn_of_descriptor_limit(rights);
    if !rights.is_limited() && rights.missing().is_empty() {
        return Ok(());
    }
    // The namespace ends at once: nothing runs in it.
    Namespace::create(config.network, None)?;
    if rights.wants_user_namespace() {
        tracing::info!(
            "without CAP_SYS_ADMIN the job runs in a user namespace of its own. Not every job can be saved there: see `ckpt-run docs privileges`"
        );
    }
    Ok(())
}
