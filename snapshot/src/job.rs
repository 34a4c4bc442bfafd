//! The store's directory and the jobs in it.
//!
//! ```text
//! .ckpt-run/store.json            {"format":"ckpt-run store","version":1}
//! .ckpt-run/jobs/KEY/job.json     what the job is and how its last run ended
//! .ckpt-run/jobs/KEY/lock         held by the launcher that runs it
//! .ckpt-run/jobs/KEY/snapshots/   the snapshots (see `DirStore`)
//! .ckpt-run/jobs/KEY/attempts/    logs of checkpoints and restores that failed
//! .ckpt-run/jobs/KEY/kept/        tails that were cut off files when a job was resumed
//! ```

use crate::files::{create_private_dir, sync_dir, write_atomically};
use crate::{DirStore, OpenError, SnapshotId};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The version of the store's layout that this build writes, and the newest that it reads.
const STORE_VERSION: u32 = 1;
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
    /// Opens the store at `path`, making it if `path` does not exist or is empty.
    ///
    /// # Errors
    /// See [`OpenError`]; nothing has been changed then.
    pub fn open_or_create(path: &Path) -> Result<Self, OpenError> {
        match Self::open(path) {
            Err(OpenError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                create_private_dir(path).map_err(failed("create", path))?;
                Self::create(path)?;
                Self::open(path)
            }
            other => other,
        }
    }

    /// Makes an empty directory a store. Several launchers may come here at once: one of them does it.
    fn create(path: &Path) -> Result<(), OpenError> {
        let dir = File::open(path).map_err(failed("open", path))?;
        rustix::fs::flock(&dir, FlockOperation::LockExclusive)
            .map_err(|error| failed("lock", path)(error.into()))?;
        let file = path.join("store.json");
        if file.exists() {
            return Ok(());
        }
        let content = StoreFile { format: FORMAT.to_owned(), version: STORE_VERSION };
        let text = serde_json::to_vec(&content).expect("plain JSON");
        write_atomically(&file, &text).map_err(failed("create a store in", path))
    }

    /// Opens the store at `path`.
    ///
    /// # Errors
    /// [`OpenError::Io`] of kind `NotFound` when there is none; see [`OpenError`] for the others.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let file = path.join("store.json");
        let text = match std::fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound && has_entries(path)? => {
                return Err(OpenError::NotAStore(path.to_owned()));
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(OpenError::Unreadable { path: file, reason: error.to_string() });
            }
            Err(error) => return Err(failed("read", &file)(error)),
        };
        let content: StoreFile = serde_json::from_str(&text)
            .map_err(|error| OpenError::Unreadable { path: file.clone(), reason: error.to_string() })?;
        if content.format != FORMAT {
            let reason = format!("its format is {:?}", content.format);
            return Err(OpenError::Unreadable { path: file, reason });
        }
        if content.version > STORE_VERSION {
            let (found, known) = (content.version, STORE_VERSION);
            return Err(OpenError::Newer { path: path.to_owned(), found, known });
        }
        // One name for the store, by whichever way it is reached: the control socket is found by it.
        let path = path.canonicalize().map_err(failed("name", path))?;
        Ok(Self { path })
    }

    /// The store's directory, absolute.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The job `key`, whether it exists yet or not.
    #[must_use]
    pub fn job(&self, key: &JobKey) -> JobDir {
        JobDir { path: self.path.join("jobs").join(&key.0), key: key.clone() }
    }

    /// All jobs that have a record, by name.
    ///
    /// # Errors
    /// When the directory cannot be read.
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
        Ok(keys.iter().map(|key| self.job(key)).filter(|job| job.path.join("job.json").exists()).collect())
    }
}

fn has_entries(path: &Path) -> Result<bool, OpenError> {
    match std::fs::read_dir(path) {
        // What another launcher is just writing, or an interrupted one has left.
        Ok(entries) => Ok(entries.flatten().any(|entry| entry.file_name() != "store.json.tmp")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed("read", path)(error)),
    }
}

fn failed(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OpenError {
    let path = path.to_owned();
    move |source| OpenError::Io { step, path, source }
}

/// The name of a job's directory: what the user called it, or made from its command line and working directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobKey(String);

impl JobKey {
    /// The job that the user calls `name`.
    ///
    /// # Errors
    /// [`OpenError::BadName`] when it cannot be a directory's name.
    pub fn named(name: &str) -> Result<Self, OpenError> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if name.is_empty() || name.len() > 100 || name.starts_with('.') || !name.bytes().all(fits) {
            return Err(OpenError::BadName(name.to_owned()));
        }
        Ok(Self(name.to_owned()))
    }

    /// The job that runs `argv` in `cwd`: the program's name and ten digits that depend on both.
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
    /// It runs, or its launcher died without a word.
    Unfinished,
    /// The command ended with 0: the next run starts afresh.
    Complete,
    /// The command ended otherwise: the next run resumes.
    Failed {
        /// Its exit code, 128 + n for signal n.
        code: i32,
    },
}

/// What is kept of a job beside its snapshots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// Layout version, 1.
    pub version: u32,
    /// Working directory of the command.
    pub cwd: String,
    /// Its command line.
    pub argv: Vec<String>,
    /// Starts from the beginning so far; snapshots of earlier ones are never resumed by themselves.
    pub run: u64,
    /// The highest number that a snapshot was ever given.
    pub last_sequence: u64,
    /// The highest number that had been given when this run began: later snapshots belong to it.
    pub sequence_before_run: u64,
    /// Numbers of snapshots (first and last) that this run left behind when an older one was resumed: they are of a
    /// history that did not happen.
    pub abandoned: Vec<(u64, u64)>,
    /// How the last run ended.
    pub outcome: JobOutcome,
}

/// One job in a store.
#[derive(Clone, Debug)]
pub struct JobDir {
    path: PathBuf,
    key: JobKey,
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

    /// Its snapshots.
    #[must_use]
    pub fn store(&self) -> DirStore {
        DirStore::new(self.path.join("snapshots"))
    }

    /// A directory for the log of something that failed. Created.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn attempt_dir(&self, name: &str) -> Result<PathBuf, OpenError> {
        self.subdir("attempts", name)
    }

    /// A directory for what resuming `id` cuts off files. Created.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn kept_dir(&self, id: &SnapshotId, now: std::time::SystemTime) -> Result<PathBuf, OpenError> {
        let now = humantime::format_rfc3339_millis(now).to_string().replace(['-', ':'], "");
        self.subdir("kept", &format!("{id}-resumed-{now}"))
    }

    fn subdir(&self, kind: &str, name: &str) -> Result<PathBuf, OpenError> {
        let path = self.path.join(kind).join(name);
        create_private_dir(&path).map_err(failed("create", &path))?;
        Ok(path)
    }

    /// Takes the job's lock: one launcher per job. Creates the job's directory.
    ///
    /// # Errors
    /// [`OpenError::Locked`] when another launcher has it.
    pub fn lock(&self) -> Result<JobLock, OpenError> {
        create_private_dir(&self.path).map_err(failed("create", &self.path))?;
        for parent in self.path.ancestors().skip(1).take(2) {
            sync_dir(parent).map_err(failed("sync", parent))?;
        }
        let path = self.path.join("lock");
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.open(&path).map_err(failed("open", &path))?;
        // Somebody who only looks whether the job runs holds the lock for a moment.
        let mut tries = 20;
        let locked = loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(rustix::io::Errno::WOULDBLOCK) if tries > 0 => {
                    tries -= 1;
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                other => break other,
            }
        };
        match locked {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut pid = String::new();
                let _ = file.read_to_string(&mut pid);
                return Err(OpenError::Locked { job: self.key.to_string(), pid: pid.trim().to_owned() });
            }
            Err(error) => return Err(failed("lock", &path)(error.into())),
        }
        // The number is for people and for error messages only: failing to write it is no reason to stop.
        let _ = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()));
        Ok(JobLock { _file: file })
    }

    /// Whether a launcher holds the job's lock now.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        let Ok(file) = File::open(self.path.join("lock")) else { return false };
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK)
    }

    /// The job's record, if it has one.
    ///
    /// # Errors
    /// When it is there and does not read.
    pub fn record(&self) -> Result<Option<JobRecord>, OpenError> {
        let path = self.path.join("job.json");
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed("read", &path)(error)),
        };
        let record: JobRecord = serde_json::from_slice(&text).map_err(|error| OpenError::Unreadable {
            path: path.clone(),
            reason: format!("{error}; if it is removed, the job's snapshots are still found"),
        })?;
        if record.version > 1 {
            return Err(OpenError::Newer { path, found: record.version, known: 1 });
        }
        Ok(Some(record))
    }

    /// Replaces the job's record, durably.
    ///
    /// # Errors
    /// When it cannot be written; the old one is then still there.
    pub fn set_record(&self, record: &JobRecord) -> Result<(), OpenError> {
        let path = self.path.join("job.json");
        let text = serde_json::to_vec_pretty(record).expect("plain JSON");
        write_atomically(&path, &text).map_err(failed("write", &path))
    }
}

/// Held for as long as a launcher runs the job; the kernel gives it back when the launcher dies.
#[derive(Debug)]
pub struct JobLock {
    _file: File,
}

#[cfg(test)]
mod tests {
    use super::*;

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
        std::fs::write(path.join("store.json"), r#"{"format":"ckpt-run store","version":2}"#).unwrap();
        assert!(matches!(StoreRoot::open_or_create(&path), Err(OpenError::Newer { found: 2, .. })));
        std::fs::write(path.join("store.json"), "{").unwrap();
        assert!(matches!(StoreRoot::open_or_create(&path), Err(OpenError::Unreadable { .. })));
    }

    #[test]
    fn a_directory_of_something_else_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("thesis.tex"), "x").unwrap();
        assert!(matches!(StoreRoot::open_or_create(dir.path()), Err(OpenError::NotAStore(_))));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn one_launcher_per_job() {
        let dir = tempfile::tempdir().unwrap();
        let root = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = root.job(&JobKey::named("a").unwrap());
        let lock = job.lock().unwrap();
        assert!(job.is_locked());
        let error = job.lock().unwrap_err();
        assert!(
            matches!(&error, OpenError::Locked { pid, .. } if *pid == std::process::id().to_string()),
            "{error}"
        );
        drop(lock);
        assert!(!job.is_locked());
        job.lock().unwrap();
    }
}
