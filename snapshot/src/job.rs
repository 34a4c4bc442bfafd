//! The store's directory and the jobs in it.
//!
//! ```text
//! .ckpt-run/store.json            {"format":"ckpt-run store","version":3}
//! .ckpt-run/jobs/KEY/job/N.json   the job's command and how its last run ended (see `numbered`)
//! .ckpt-run/jobs/KEY/lock         held by the launcher that runs the job
//! .ckpt-run/jobs/KEY/keeper       the directory's name in pins that machines share
//! .ckpt-run/jobs/KEY/snapshots/   snapshots of version 1 (see `DirStore`)
//! .ckpt-run/jobs/KEY/attempts/    logs of failed checkpoints and restores
//! .ckpt-run/jobs/KEY/kept/        tails of files that a resume truncated
//! ```

use crate::codec::Key;
use crate::files::{create_private_dir, open_lock, read_regular, sync_dir, write_atomically};
use crate::format::PackId;
use crate::medium::{DirMedium, Medium, read_all};
use crate::numbered::JOB;
use crate::records::PassedOver;
use crate::seen::Seen;
use crate::{DirStore, OpenError, RelPath, SnapshotId};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The version of the store's layout that this build writes, and the newest that it reads. Version 1 had no packs; up to
/// version 2, the records of a job had no numbers.
const STORE_VERSION: u32 = 3;
/// A longer `store.json` is not read (bytes): it is damaged.
const STORE_FILE_MAX_BYTES: u64 = 1 << 16;
/// A longer name of a directory is damaged (bytes).
const KEEPER_MAX_BYTES: u64 = 64;
const FORMAT: &str = "ckpt-run store";

#[derive(Serialize, Deserialize)]
struct StoreFile {
    format: String,
    version: u32,
}

/// The directory that `--store` names.
#[derive(Clone, Debug)]
pub struct StoreRoot {
    path: PathBuf,
}

impl StoreRoot {
    /// Opens the store at `path` for writing. Creates the store if `path` does not exist or is empty. Upgrades a store
    /// of an older version; older builds then refuse it.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_or_create(path: &Path) -> Result<Self, OpenError> {
        match Self::read_version(path) {
            Ok(STORE_VERSION) => {}
            Ok(older) => {
                tracing::info!(
                    "upgrading the store {} from version {older} to {STORE_VERSION}",
                    path.display()
                );
                Self::set_version(path, true)?;
            }
            Err(OpenError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Self::create(path, false)?;
            }
            Err(other) => return Err(other),
        }
        Self::open(path)
    }

    /// Makes the directory, and marks it as a store. One that `was_store` may have files.
    fn create(path: &Path, was_store: bool) -> Result<(), OpenError> {
        let made = path.ancestors().take_while(|dir| !dir.as_os_str().is_empty() && !dir.exists());
        let made: Vec<_> = made.collect();
        create_private_dir(path).map_err(failed("create", path))?;
        Self::set_version(path, was_store)?;
        // A store in a working copy is not to be committed. Nothing depends on the file.
        let _ = write_atomically(&path.join(".gitignore"), b"*\n");
        for parent in made.into_iter().filter_map(Path::parent) {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            match sync_dir(parent) {
                // The directory may be writable but not readable.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
                other => other.map_err(failed("sync", parent))?,
            }
        }
        Ok(())
    }

    /// Writes `store.json` with this version. A lock serialises concurrent launchers.
    fn set_version(path: &Path, was_store: bool) -> Result<(), OpenError> {
        let dir = File::open(path).map_err(failed("open", path))?;
        retry_on_intr(|| rustix::fs::flock(&dir, FlockOperation::LockExclusive))
            .map_err(|error| failed("lock", path)(error.into()))?;
        match Self::read_version(path) {
            Ok(STORE_VERSION) => return Ok(()),
            Ok(_) => {}
            Err(OpenError::NotAStore(_)) if was_store => {}
            Err(OpenError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(other) => return Err(other),
        }
        let content = StoreFile { format: FORMAT.to_owned(), version: STORE_VERSION };
        let text = serde_json::to_vec(&content).expect("plain JSON");
        write_atomically(&path.join("store.json"), &text).map_err(failed("create a store in", path))
    }

    /// Opens the store at `path` for reading, without an upgrade.
    ///
    /// # Errors
    /// [`OpenError::Io`] of kind `NotFound` if there is no store; see [`OpenError`] for the others.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        Self::read_version(path)?;
        // The control socket's name is derived from this path, so each store needs one canonical path.
        let path = path.canonicalize().map_err(failed("resolve the path", path))?;
        Ok(Self { path })
    }

    /// The version of the store at `path`, at most [`STORE_VERSION`].
    fn read_version(path: &Path) -> Result<u32, OpenError> {
        let file = path.join("store.json");
        let read = || read_regular(&file, STORE_FILE_MAX_BYTES);
        let is_missing =
            |read: &io::Result<_>| matches!(read, Err(error) if error.kind() == io::ErrorKind::NotFound);
        let mut text = read();
        if is_missing(&text) && has_entries(path)? {
            // Another launcher may have created the store since; `store.json` is always the first entry.
            text = read();
            if is_missing(&text) {
                return Err(OpenError::NotAStore(path.to_owned()));
            }
        }
        let text = match text {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(OpenError::Unreadable { path: file, reason: error.to_string() });
            }
            Err(error) => return Err(failed("read", &file)(error)),
        };
        let content: StoreFile = serde_json::from_slice(&text)
            .map_err(|error| OpenError::Unreadable { path: file.clone(), reason: error.to_string() })?;
        if content.format != FORMAT {
            let reason = format!("its format is {:?}", content.format);
            return Err(OpenError::Unreadable { path: file, reason });
        }
        if content.version > STORE_VERSION {
            let (found, known) = (content.version, STORE_VERSION);
            return Err(OpenError::Newer { path: path.to_owned(), found, known });
        }
        if content.version == 0 {
            return Err(OpenError::Unreadable { path: file, reason: "there is no version 0".to_owned() });
        }
        Ok(content.version)
    }

    /// The store's directory, absolute.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The job `key`, which need not exist yet.
    #[must_use]
    pub fn job(&self, key: &JobKey) -> JobDir {
        JobDir {
            path: self.path.join("jobs").join(&key.0),
            key: key.clone(),
            records: None,
            encryption: None,
            passed_over: None,
            seen_in: None,
            seen: Arc::default(),
        }
    }

    /// All jobs that have a record or a launcher, or of which that cannot be said, sorted by name.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn jobs(&self) -> Result<Vec<JobDir>, OpenError> {
        let jobs = self.path.join("jobs");
        let entries = match std::fs::read_dir(&jobs) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed("read", &jobs)(error)),
        };
        let mut keys = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed("read", &jobs))?.file_name();
            keys.extend(name.to_str().and_then(|name| JobKey::named(name).ok()));
        }
        keys.sort();
        let is_job = |job: &JobDir| JOB.exists(&job.path) || job.is_locked();
        Ok(keys.iter().map(|key| self.job(key)).filter(is_job).collect())
    }
}

fn has_entries(path: &Path) -> Result<bool, OpenError> {
    match std::fs::read_dir(path) {
        // Another launcher may be creating the store, or an interrupted one left this file. A new file system has the directory.
        Ok(entries) => {
            let counts = |name: &OsStr| name != "store.json.tmp" && name != "lost+found";
            Ok(entries.flatten().any(|entry| counts(&entry.file_name())))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed("read", path)(error)),
    }
}

pub(crate) fn failed(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OpenError {
    let path = path.to_owned();
    move |source| OpenError::Io { step, path, source }
}

/// The name of a job's directory: given by the user, or derived from the command line and working directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobKey(String);

impl JobKey {
    /// The key of the job that the user calls `name`.
    ///
    /// # Errors
    /// [`OpenError::BadName`] if it is not a valid directory name.
    pub fn named(name: &str) -> Result<Self, OpenError> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if name.is_empty() || name.len() > 100 || name.starts_with('.') || !name.bytes().all(fits) {
            return Err(OpenError::BadName(name.to_owned()));
        }
        Ok(Self(name.to_owned()))
    }

    /// The key of the job that runs `argv` in `cwd`: the program's name and ten digits of a hash of both.
    #[must_use]
    pub fn derived(cwd: &Path, argv: &[OsString]) -> Self {
        let mut hasher = blake3::Hasher::new();
        for part in std::iter::once(cwd.as_os_str()).chain(argv.iter().map(OsString::as_os_str)) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        let program =
            argv.first().and_then(|first| Path::new(first).file_name()).unwrap_or(OsStr::new("job"));
        let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"_-".contains(byte);
        let program: String = program
            .as_bytes()
            .iter()
            .filter(|byte| plain(byte))
            .take(40)
            .map(|&byte| char::from(byte))
            .collect();
        let program = if program.is_empty() { "job" } else { &program };
        Self(format!("{program}-{}", &hasher.finalize().to_hex()[..10]))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for JobKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// How the last run of a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum JobOutcome {
    /// The job is running, or its launcher was killed.
    Unfinished,
    /// The command exited with 0: the next run starts from the beginning.
    Complete,
    /// The command failed: the next run resumes.
    Failed {
        /// Its exit code, 128 + n for signal n.
        code: i32,
    },
}

/// The record of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// Layout version, 1.
    pub version: u32,
    /// Working directory of the command.
    pub cwd: String,
    /// Its command line.
    pub argv: Vec<String>,
    /// How often the job was started from the beginning. Snapshots of earlier runs are never resumed automatically.
    pub run: u64,
    /// The highest sequence number ever assigned to a snapshot.
    pub last_sequence: u64,
    /// `last_sequence` when this run began: snapshots with higher numbers belong to this run.
    pub sequence_before_run: u64,
    /// Ranges (first and last number) of snapshots that were abandoned because the job was resumed from an older one.
    pub abandoned: Vec<(u64, u64)>,
    /// Numbers of snapshots that retention deletes, or has deleted: no launcher resumes from them.
    #[serde(default)]
    pub deleted: Vec<u64>,
    /// The snapshot from which the job was resumed last. It belongs to the history, whatever else is in this record, since
    /// the user may have named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_from: Option<SnapshotId>,
    /// How often a machine that did not have this record claimed the job from an object store.
    #[serde(default, rename = "taken_up")]
    pub claims: u64,
    /// `last_sequence` when this machine last claimed the job, 0 if it never did. Of the snapshots up to that number,
    /// only those in the object store are valid: the others were taken here while the job ran on another machine.
    #[serde(default, rename = "taken_up_at")]
    pub claimed_at_sequence: u64,
    /// The owner of the job, which is the launcher that started last: 32 hexadecimal digits, '@', its host name.
    #[serde(default)]
    pub launcher: String,
    /// How the last run ended.
    pub outcome: JobOutcome,
    /// Whether all of the job was deleted. The record stays: a launcher that has stood still meanwhile finds that the job is
    /// not its own any more, and the numbers of a job that begins anew go on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_removed: bool,
}

/// One job in a store.
#[derive(Clone, Debug)]
pub struct JobDir {
    path: PathBuf,
    key: JobKey,
    /// The medium with its snapshots and small records, if they are not in this directory.
    records: Option<Arc<dyn Medium>>,
    /// The key that snapshots are encrypted with.
    pub(crate) encryption: Option<Key>,
    /// What a launcher that runs the job knows of its records; `None` if those without a code of the key are refused.
    pub(crate) passed_over: Option<PassedOver>,
    /// The directory for [`Seen`], and the file in it.
    seen_in: Option<PathBuf>,
    seen: Arc<OnceLock<Seen>>,
}

impl JobDir {
    /// The job's name.
    #[must_use]
    pub fn key(&self) -> &JobKey {
        &self.key
    }

    /// The job's directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The same job with its snapshots and small records (`job/N.json`, `marks/N.json`) in `medium`, so that any machine
    /// with access to `medium` can resume the job. The lock, the journal and logs stay in the directory.
    #[must_use]
    pub fn with_content_in(self, medium: Arc<dyn Medium>) -> Self {
        // What is known of records is known of those in the directory.
        let passed_over = self.passed_over.map(|_| Arc::default());
        Self { records: Some(medium), passed_over, seen: Arc::default(), ..self }
    }

    /// The same job, whose snapshots are encrypted with this key.
    #[must_use]
    pub fn with_key(self, key: Option<&Key>) -> Self {
        Self { encryption: key.cloned(), seen: Arc::default(), ..self }
    }

    /// The same job. With a key, the numbers of its records that this machine has seen are kept in the directory `dir`, which
    /// is not in the store, and older records are refused.
    #[must_use]
    pub fn with_seen_in(self, dir: &Path) -> Self {
        Self { seen_in: Some(dir.to_owned()), seen: Arc::default(), ..self }
    }

    pub(crate) fn seen(&self) -> Option<&Seen> {
        let (dir, key) = (self.seen_in.as_ref()?, self.file_key("seen")?);
        let records = || self.medium().describe(&JOB.folder());
        Some(self.seen.get_or_init(|| Seen::new(dir, &key, &records())))
    }

    /// The key for the lines of a file in the job's directory that is not an object of the store; `None` without
    /// encryption.
    #[must_use]
    pub fn file_key(&self, name: &str) -> Option<[u8; 32]> {
        self.encryption.as_ref().map(|key| key.of_file(&self.key.0, name))
    }

    /// Another job in the same store.
    #[must_use]
    pub fn sibling(&self, key: &JobKey) -> Self {
        let passed_over = self.passed_over.as_ref().map(|_| Arc::default());
        let path = self.path.with_file_name(&key.0);
        Self { path, key: key.clone(), passed_over, seen: Arc::default(), ..self.clone() }
    }

    /// The name of this directory in marks that machines share: random, and made when it is first asked for.
    ///
    /// # Errors
    /// If it can be neither read nor written.
    pub fn keeper(&self) -> io::Result<String> {
        let (medium, name) =
            (DirMedium::new(self.path.clone()), RelPath::new("keeper").expect("a plain path"));
        let read = || read_all(&medium, &name, KEEPER_MAX_BYTES);
        let text = match read() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                match medium.put_new(&name, PackId::random()?.to_string().as_bytes()) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    other => other?,
                }
                read()?
            }
            found => found?,
        };
        let keeper = str::from_utf8(&text).ok().and_then(PackId::parse);
        let damaged = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{} is damaged: delete it", medium.describe(&name)),
            )
        };
        keeper.map(|keeper| keeper.to_string()).ok_or_else(damaged)
    }

    /// The medium with its snapshots and small records, if they are not in its directory.
    #[must_use]
    pub fn records_medium(&self) -> Option<&Arc<dyn Medium>> {
        self.records.as_ref()
    }

    /// The medium with its snapshots and small records: [`Self::records_medium`], or else its directory.
    #[must_use]
    pub fn medium(&self) -> Arc<dyn Medium> {
        self.records.clone().unwrap_or_else(|| Arc::new(DirMedium::new(self.path.clone())))
    }

    /// The store of its snapshots of version 1.
    #[must_use]
    pub fn version_1(&self) -> DirStore {
        DirStore::new(self.path.join("snapshots"))
    }

    /// Opens the directory `name` of the job, if it exists.
    ///
    /// # Errors
    /// If it cannot be opened, or is a symbolic link.
    pub fn folder(&self, name: &str) -> io::Result<Option<Folder>> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        match retry_on_intr(|| rustix::fs::open(self.path.join(name), flags, Mode::empty())) {
            Ok(fd) => Ok(Some(Folder { fd })),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Refuses symbolic links in the job's directory. ckpt-run makes none, and one that somebody else has made could lead
    /// it to files outside of the store.
    fn refuse_links(&self) -> Result<(), OpenError> {
        for entry in std::fs::read_dir(&self.path).map_err(failed("read", &self.path))? {
            let entry = entry.map_err(failed("read", &self.path))?;
            if entry.file_type().map_err(failed("look at", &entry.path()))?.is_symlink() {
                return Err(OpenError::Link(entry.path()));
            }
        }
        Ok(())
    }

    /// Creates the directory for the logs of a failed checkpoint or restore.
    ///
    /// # Errors
    /// If it cannot be created.
    pub fn attempt_dir(&self, name: &str) -> Result<PathBuf, OpenError> {
        self.subdir("attempts", name)
    }

    /// Creates the directory for the file tails that a resume from `id` truncates.
    ///
    /// # Errors
    /// If it cannot be created.
    pub fn kept_dir(&self, id: &SnapshotId, now: std::time::SystemTime) -> Result<PathBuf, OpenError> {
        let now = humantime::format_rfc3339_millis(now).to_string().replace(['-', ':'], "");
        self.subdir("kept", &format!("{id}-resumed-{now}"))
    }

    /// The directory of the second names and reflinks of files of the snapshot `id`. It may not exist.
    #[must_use]
    pub fn held_dir(&self, id: &SnapshotId) -> PathBuf {
        self.path.join("held").join(id.to_string())
    }

    fn subdir(&self, parent: &str, name: &str) -> Result<PathBuf, OpenError> {
        let path = self.path.join(parent).join(name);
        create_private_dir(&path).map_err(failed("create", &path))?;
        Ok(path)
    }

    /// Takes the job's lock to run the job: one launcher per job. Creates the job's directory. Waits for maintenance
    /// (`ckpt-run prune`, `ckpt-run rm`) to end; before waiting, calls `on_wait` with its process ID.
    ///
    /// # Errors
    /// [`OpenError::Locked`] if another launcher holds the lock.
    pub fn lock_to_run(&self, on_wait: impl FnOnce(&str)) -> Result<JobLock, OpenError> {
        let mut on_wait = Some(on_wait);
        loop {
            match self.lock(RUN) {
                Err(OpenError::Locked { pid, is_maintenance: true, .. }) => {
                    if let Some(on_wait) = on_wait.take() {
                        on_wait(&pid);
                    }
                    std::thread::sleep(MAINTENANCE_POLL_INTERVAL);
                }
                other => return other,
            }
        }
    }

    /// Takes the job's lock for maintenance of its store.
    ///
    /// # Errors
    /// [`OpenError::Locked`] if the job is running, or another process does maintenance.
    pub fn lock_for_maintenance(&self) -> Result<JobLock, OpenError> {
        self.lock(MAINTENANCE)
    }

    /// Writes the process ID, `purpose` and the machine to the lock file.
    fn lock(&self, purpose: &str) -> Result<JobLock, OpenError> {
        let mut tries = 0;
        loop {
            tries += 1;
            match self.try_lock(purpose) {
                // The job was deleted meanwhile, with its directory and lock (`ckpt-run rm --whole-job`).
                Ok(lock) if !self.has_lock_file(&lock).unwrap_or(false) => {}
                Err(OpenError::Io { source, .. })
                    if source.kind() == io::ErrorKind::NotFound && tries < LOCK_TRIES => {}
                other => return other,
            }
        }
    }

    /// The directory of the store.
    #[must_use]
    pub fn store(&self) -> &Path {
        self.path.ancestors().nth(2).unwrap_or(&self.path)
    }

    /// Makes the store and the lock again that somebody has deleted while this process held the lock. Returns whether
    /// something was made. If another process has the job's lock since, it keeps it.
    ///
    /// # Errors
    /// See [`OpenError`]; the store's file system is not mounted any more.
    pub fn make_again(&self, lock: &mut JobLock) -> Result<bool, OpenError> {
        let store = self.store();
        // What cannot be looked at may be there.
        let is_unmarked = matches!(store.join("store.json").try_exists(), Ok(false));
        if is_unmarked {
            let above = store.ancestors().find_map(|dir| std::fs::metadata(dir).ok());
            if above.is_none_or(|dir| dir.dev() != lock.dev) {
                let gone = io::Error::other("its file system is not mounted any more");
                return Err(failed("find the store in", store)(gone));
            }
            StoreRoot::create(store, true)?;
        }
        match self.has_lock_file(lock) {
            Ok(false) => match self.lock(RUN) {
                Ok(new) => {
                    *lock = new;
                    Ok(true)
                }
                Err(OpenError::Locked { .. }) => Ok(is_unmarked),
                Err(other) => Err(other),
            },
            Ok(true) | Err(_) => Ok(is_unmarked),
        }
    }

    /// Whether the lock is that of the file that others open.
    ///
    /// # Errors
    /// If that cannot be seen.
    fn has_lock_file(&self, lock: &JobLock) -> io::Result<bool> {
        let of = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
        match std::fs::symlink_metadata(self.path.join("lock")) {
            Ok(present) => Ok(of(present) == of(lock.file.metadata()?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn try_lock(&self, purpose: &str) -> Result<JobLock, OpenError> {
        create_private_dir(&self.path).map_err(failed("create", &self.path))?;
        for parent in self.path.ancestors().skip(1).take(2) {
            sync_dir(parent).map_err(failed("sync", parent))?;
        }
        self.refuse_links()?;
        let path = self.path.join("lock");
        let mut file = open_lock(&path).map_err(failed("open", &path))?;
        // `is_locked` holds a shared lock for a moment. In that case a shared lock can be taken here too: try again.
        let lock = |how| retry_on_intr(|| rustix::fs::flock(&file, how));
        let locked = loop {
            match lock(FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) if lock(FlockOperation::NonBlockingLockShared).is_ok() => {
                    // Two processes in this loop would block each other if they kept the shared lock.
                    let _ = lock(FlockOperation::Unlock);
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => break other,
            }
        };
        match locked {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let (pid, is_maintenance) = holder(&mut file);
                return Err(OpenError::Locked { job: self.key.to_string(), pid, is_maintenance });
            }
            Err(error) => return Err(failed("lock", &path)(error.into())),
        }
        // Only for people and for waiting launchers: a failure to write it does not matter.
        let _ = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{} {purpose} {}", std::process::id(), this_machine()));
        let dev = std::fs::metadata(&self.path).map_err(failed("look at", &self.path))?.dev();
        Ok(JobLock { file, dev })
    }

    /// Whether a launcher holds the job's lock.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.launcher().is_some()
    }

    /// The process ID of the launcher that holds the job's lock, if it is on this machine.
    #[must_use]
    pub fn launcher_here(&self) -> Option<u32> {
        self.launcher()?.parse().ok()
    }

    /// The launcher that holds the job's lock, as [`holder`] says.
    fn launcher(&self) -> Option<String> {
        let mut file = File::open(self.path.join("lock")).ok()?;
        let tried = retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared));
        let (launcher, is_maintenance) = (tried == Err(Errno::WOULDBLOCK)).then(|| holder(&mut file))?;
        (!is_maintenance).then_some(launcher)
    }
}

/// An open directory of a job. Its files are reached through the descriptor, whatever is put at its path meanwhile.
#[derive(Debug)]
pub struct Folder {
    fd: OwnedFd,
}

impl Folder {
    /// A path to it, in this process, as long as it is open.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.fd.as_raw_fd()).into()
    }

    /// What is in it.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn entries(&self) -> io::Result<Vec<std::fs::DirEntry>> {
        std::fs::read_dir(self.path())?.collect()
    }
}

/// How often the directory of a job may be deleted while its lock is being taken.
const LOCK_TRIES: u32 = 100;
/// The purpose in the lock file while a launcher runs the job.
const RUN: &str = "run";
/// The purpose in the lock file during maintenance, such as `ckpt-run prune`.
const MAINTENANCE: &str = "upkeep";
/// Polling interval of a launcher that waits for the end of maintenance.
const MAINTENANCE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// At most this much of the lock file is read.
const HOLDER_MAX_BYTES: u64 = 200;

/// The holder of the lock according to the lock file: its process ID, with the machine if it is another one, and whether it
/// does maintenance.
fn holder(file: &mut File) -> (String, bool) {
    let mut text = String::new();
    let _ = file.take(HOLDER_MAX_BYTES).read_to_string(&mut text);
    let mut words = text.split_whitespace();
    let pid = words.next().unwrap_or_default();
    let is_maintenance = words.next() == Some(MAINTENANCE);
    match words.next() {
        Some(machine) if machine != this_machine() => (format!("{pid} on {machine}"), is_maintenance),
        _ => (pid.to_owned(), is_maintenance),
    }
}

/// The name of this machine. On a file system with locks that other machines see, the lock's holder may be elsewhere.
fn this_machine() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The job's lock. The kernel releases it when the process dies.
#[derive(Debug)]
pub struct JobLock {
    file: File,
    /// The device number of the job's directory.
    dev: u64,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

    /// A program that one test starts holds the locks of all others from its fork to its exec.
    static STARTS: RwLock<()> = RwLock::new(());

    /// While this lives, no test starts a program.
    fn no_start() -> RwLockReadGuard<'static, ()> {
        STARTS.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// For the start of a program.
    pub(crate) fn start() -> RwLockWriteGuard<'static, ()> {
        STARTS.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock as a launcher that has no maintenance to wait for.
    fn lock(job: &JobDir) -> Result<JobLock, OpenError> {
        job.lock_to_run(|pid| panic!("waits for {pid}"))
    }

    #[test]
    fn keys_depend_on_directory_and_command() {
        let argv: Vec<OsString> = vec!["/usr/bin/tor chrun".into(), "a".into()];
        let key = JobKey::derived(Path::new("/work"), &argv);
        assert!(key.as_str().starts_with("torchrun-"), "{key}");
        assert_eq!(key, JobKey::derived(Path::new("/work"), &argv));
        assert_ne!(key, JobKey::derived(Path::new("/work2"), &argv));
        let split: Vec<OsString> = vec!["/usr/bin/tor chruna".into(), "".into()];
        assert_ne!(key, JobKey::derived(Path::new("/work"), &split));
    }

    #[test]
    fn one_launcher_gets_the_lock_while_others_poll_it() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let _no_start = no_start();
        let dir = tempfile::tempdir().unwrap();
        let root = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = root.job(&JobKey::named("job").unwrap());
        drop(lock(&job).unwrap());
        let is_over = AtomicBool::new(false);
        let rounds = std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        let _ = job.is_locked();
                        // It holds the lock: without a pause, three of them would hold it all the time.
                        std::thread::sleep(Duration::from_millis(1));
                    }
                });
            }
            let rounds = [(); 20].map(|()| {
                let tries = [(); 3].map(|()| scope.spawn(|| lock(&job)));
                // All locks are held until every thread has its result.
                let tried = tries.map(std::thread::ScopedJoinHandle::join);
                tried.map(|one| match one.expect("no panic") {
                    Ok(_) => "got it",
                    Err(OpenError::Locked { .. }) => "refused",
                    Err(_) => "failed",
                })
            });
            is_over.store(true, Ordering::Relaxed);
            rounds
        });
        for mut round in rounds {
            round.sort_unstable();
            assert_eq!(round, ["got it", "refused", "refused"]);
        }
        assert!(!job.is_locked());
    }

    /// One that was opened before the file was deleted keeps nobody away.
    #[test]
    fn the_lock_of_a_deleted_job_does_not_count() {
        use std::sync::atomic::{AtomicU32, Ordering};
        let _no_start = no_start();
        let dir = tempfile::tempdir().unwrap();
        let root = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = root.job(&JobKey::named("job").unwrap());
        let holders = AtomicU32::new(0);
        let hold = |purpose, is_deleted| {
            let Ok(lock) = job.lock(purpose) else { return };
            assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two hold the lock");
            std::thread::yield_now();
            holders.fetch_sub(1, Ordering::SeqCst);
            if is_deleted {
                std::fs::remove_file(job.path().join("lock")).unwrap();
                let _ = std::fs::remove_dir(job.path());
            }
            drop(lock);
        };
        std::thread::scope(|scope| {
            for number in 0..4 {
                let hold = &hold;
                scope.spawn(move || (0..3000).for_each(|_| hold(RUN, number == 0)));
            }
        });
        drop(lock(&job).unwrap());
    }

    #[test]
    fn refuses_names_that_are_not_a_directory() {
        for bad in ["", ".", "..", "a/b", ".hidden", "a b", "ä"] {
            assert!(JobKey::named(bad).is_err(), "{bad:?}");
        }
        assert!(JobKey::named("run-3_b.2").is_ok());
    }

    #[test]
    fn a_store_is_made_once_and_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        assert!(matches!(StoreRoot::open(&path), Err(OpenError::Io { .. })));
        StoreRoot::open_or_create(&path).unwrap();
        StoreRoot::open_or_create(&path).unwrap();
        std::fs::write(path.join("store.json"), r#"{"format":"ckpt-run store","version":4}"#).unwrap();
        assert!(matches!(StoreRoot::open_or_create(&path), Err(OpenError::Newer { found: 4, .. })));
        std::fs::write(path.join("store.json"), "{").unwrap();
        assert!(matches!(StoreRoot::open_or_create(&path), Err(OpenError::Unreadable { .. })));
    }

    #[test]
    fn a_store_is_made_by_several_at_the_same_time() {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..200 {
            let path = dir.path().join(round.to_string());
            let start = std::sync::Barrier::new(32);
            let make = || {
                start.wait();
                StoreRoot::open_or_create(&path).unwrap();
                std::fs::create_dir_all(path.join("jobs")).unwrap();
            };
            std::thread::scope(|scope| (0..32).for_each(|_| _ = scope.spawn(make)));
        }
    }

    #[test]
    fn an_older_store_is_read_as_it_is_and_upgraded_for_writing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("store.json");
        let text = || std::fs::read_to_string(&file).unwrap();
        let old = r#"{"format":"ckpt-run store","version":1}"#;
        std::fs::write(&file, old).unwrap();
        StoreRoot::open(dir.path()).unwrap();
        assert_eq!(text(), old);
        std::thread::scope(|scope| {
            (0..8).for_each(|_| _ = scope.spawn(|| StoreRoot::open_or_create(dir.path()).unwrap()));
        });
        assert_eq!(text(), r#"{"format":"ckpt-run store","version":3}"#);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    fn record() -> JobRecord {
        JobRecord {
            version: 1,
            cwd: "/work".into(),
            argv: vec!["python3".into()],
            run: 1,
            last_sequence: 7,
            sequence_before_run: 0,
            abandoned: vec![(2, 3)],
            deleted: vec![1],
            resumed_from: Some("000002-20261121T114512Z".parse().unwrap()),
            claims: 1,
            claimed_at_sequence: 5,
            launcher: "0123@node".into(),
            outcome: JobOutcome::Failed { code: 137 },
            is_removed: false,
        }
    }

    #[test]
    fn every_flipped_bit_of_a_jobs_record_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let job = StoreRoot::open_or_create(&dir.path().join("store")).unwrap().job(&JobKey("a".into()));
        let _lock = lock(&job).unwrap();
        job.set_record(&record()).unwrap();
        assert_eq!(job.record().unwrap(), Some(record()));
        let file = job.path().join("job/1.json");
        let whole = std::fs::read(&file).unwrap();
        for position in 0..whole.len() {
            for bit in 0..8 {
                let mut flipped = whole.clone();
                flipped[position] ^= 1 << bit;
                std::fs::write(&file, &flipped).unwrap();
                let read = job.record();
                assert!(matches!(read, Err(OpenError::Unreadable { .. })), "{position}.{bit}: {read:?}");
            }
        }
        // As versions 1 and 2 of the store had it.
        std::fs::remove_file(&file).unwrap();
        let old = job.path().join("job.json");
        std::fs::write(&old, serde_json::to_vec_pretty(&record()).unwrap()).unwrap();
        assert_eq!(job.record().unwrap(), Some(record()));
        std::fs::write(&old, crate::checked_json::encode_body(crate::checked_json::body(&record()))).unwrap();
        assert_eq!(job.record().unwrap(), Some(record()));
        job.set_record(&JobRecord { run: 2, ..record() }).unwrap();
        assert_eq!(job.record().unwrap().unwrap().run, 2);
        assert!(!old.exists());
    }

    #[test]
    fn links_in_the_directory_of_a_job_are_refused() {
        let _no_start = no_start();
        let dir = tempfile::tempdir().unwrap();
        let job = StoreRoot::open_or_create(&dir.path().join("store")).unwrap().job(&JobKey("a".into()));
        drop(lock(&job).unwrap());
        let elsewhere = dir.path().join("elsewhere");
        std::fs::create_dir(&elsewhere).unwrap();
        std::fs::write(elsewhere.join("precious"), "x").unwrap();
        for (name, target) in [("attempts", &elsewhere), ("lock", &elsewhere.join("precious"))] {
            let link = job.path().join(name);
            let _ = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(target, &link).unwrap();
            assert!(matches!(lock(&job), Err(OpenError::Link(path)) if path == link));
            assert!(matches!(job.lock_for_maintenance(), Err(OpenError::Link(_))));
            assert!(job.folder(name).is_err());
            std::fs::remove_file(&link).unwrap();
        }
        assert_eq!(std::fs::read_to_string(elsewhere.join("precious")).unwrap(), "x");
        lock(&job).unwrap();
    }

    /// Each of many threads adds to the record: none of the changes is lost.
    #[test]
    fn concurrent_changes_are_all_kept() {
        let dir = tempfile::tempdir().unwrap();
        let job = StoreRoot::open_or_create(&dir.path().join("store")).unwrap().job(&JobKey("a".into()));
        job.set_record(&JobRecord { run: 0, ..record() }).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10 {
                        let add = |present: Option<JobRecord>| {
                            let present = present.unwrap();
                            Ok::<_, OpenError>(Some(JobRecord { run: present.run + 1, ..present }))
                        };
                        job.change_record(add).unwrap();
                        assert!(job.record().unwrap().is_some());
                    }
                });
            }
        });
        assert_eq!(job.record().unwrap().unwrap().run, 40);
    }

    #[test]
    fn records_may_be_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let there: Arc<dyn Medium> = Arc::new(DirMedium::new(dir.path().join("there")));
        let job = |name: &str| {
            let root = StoreRoot::open_or_create(&dir.path().join(name)).unwrap();
            root.job(&JobKey("a".into())).with_content_in(Arc::clone(&there))
        };
        let here = job("here");
        assert_eq!(here.record().unwrap(), None);
        here.set_record(&record()).unwrap();
        here.change_marks(|marks| marks.pin(&SnapshotId::new(1, std::time::UNIX_EPOCH))).unwrap();
        assert!(!here.path().join("job").exists() && !here.path().join("marks").exists());
        // On another machine.
        assert_eq!(job("other").record().unwrap(), Some(record()));
        assert!(job("other").marks().unwrap().is_kept(&SnapshotId::new(1, std::time::UNIX_EPOCH)));
        std::fs::write(dir.path().join("there/job/1.json"), "{").unwrap();
        let error = here.record().unwrap_err();
        assert!(error.to_string().contains("there/job/1.json"), "{error}");
    }

    #[test]
    fn a_directory_of_something_else_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("thesis.tex"), "x").unwrap();
        assert!(matches!(StoreRoot::open_or_create(dir.path()), Err(OpenError::NotAStore(_))));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        // As a new disk has it.
        std::fs::rename(dir.path().join("thesis.tex"), dir.path().join("lost+found")).unwrap();
        StoreRoot::open_or_create(dir.path()).unwrap();
    }

    #[test]
    fn one_launcher_per_job() {
        let _no_start = no_start();
        let dir = tempfile::tempdir().unwrap();
        let root = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = root.job(&JobKey::named("a").unwrap());
        let held = lock(&job).unwrap();
        assert!(job.is_locked());
        let error = lock(&job).unwrap_err();
        assert!(
            matches!(&error, OpenError::Locked { pid, is_maintenance: false, .. } if *pid == std::process::id().to_string()),
            "{error}"
        );
        assert!(matches!(job.lock_for_maintenance(), Err(OpenError::Locked { is_maintenance: false, .. })));
        std::fs::write(job.path().join("lock"), "77 run elsewhere\n").unwrap();
        let error = lock(&job).unwrap_err();
        assert!(matches!(&error, OpenError::Locked { pid, .. } if pid == "77 on elsewhere"), "{error}");
        drop(held);
        assert!(!job.is_locked());
        lock(&job).unwrap();
    }

    #[test]
    fn a_launcher_waits_for_maintenance() {
        let _no_start = no_start();
        let dir = tempfile::tempdir().unwrap();
        let root = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = root.job(&JobKey::named("a").unwrap());
        let maintenance = std::cell::Cell::new(Some(job.lock_for_maintenance().unwrap()));
        let mut reported_pid = String::new();
        let held = job.lock_to_run(|pid| {
            reported_pid = pid.to_owned();
            assert!(!job.is_locked());
            assert!(matches!(
                job.lock_for_maintenance(),
                Err(OpenError::Locked { is_maintenance: true, .. })
            ));
            drop(maintenance.take());
        });
        assert_eq!(reported_pid, std::process::id().to_string());
        // Now a launcher holds it.
        assert!(matches!(lock(&job), Err(OpenError::Locked { is_maintenance: false, .. })));
        drop(held.unwrap());
    }
}
