//! The log of a run of the job, in the store of node 0: a file for each record.
//!
//! A record is put by a hard link, which fails if the position has one. So a put is atomic, also on NFS. In an encrypted
//! store, only the holder of its key can write records, and the mark of a complete run: the key of each belongs to the job,
//! the log and the position.

use crate::sys::authentic::{self, FileKey};
use ckpt_cluster::{AttemptId, Log, PutAnswer, Record};
use ckpt_snapshot::pack::PackId;
use ckpt_snapshot::{JobDir, NodePart, faults, sync_dir, write_atomically};
use std::fs;
use std::io;
use std::path::PathBuf;

/// The folder of all logs, in the job's directory.
const FOLDER: &str = "nodes";
/// Marks a log of a job that has ended with 0 on all nodes.
const COMPLETE: &str = "complete";

/// The directory of a log whose run has not begun has its name after this. It does not count.
const NOT_BEGUN: &str = "new-";

/// The log of one run.
#[derive(Clone, Debug)]
pub struct LogFiles {
    job: JobDir,
    name: String,
    has_begun: bool,
    /// The job is resumed from a snapshot of this run, which is not complete any more then.
    is_reopened: bool,
}

impl LogFiles {
    /// The log of the present run in the job's directory; a new one if `is_anew`, or if the last run is complete. The new
    /// run has not begun: until [`Self::begin`], the next launcher goes on with the run before.
    ///
    /// # Errors
    /// When the store cannot be read or written.
    pub fn open(job: &JobDir, is_anew: bool) -> io::Result<Self> {
        let newest = Self::newest(job)?;
        let is_over = |log: &Self| is_anew || log.is_complete();
        match newest {
            Some(log) if !is_over(&log) => Ok(log),
            newest => Self::create(job, newest.as_ref()),
        }
    }

    /// The log of the last run, if there is one.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn newest(job: &JobDir) -> io::Result<Option<Self>> {
        let folder = job.path().join(FOLDER);
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            entries => entries?,
        };
        let mut names = Vec::new();
        for entry in entries {
            names.extend(entry?.file_name().into_string().ok().filter(|name| number(name).is_some()));
        }
        let newest = names.into_iter().max_by_key(|name| number(name));
        Ok(newest.map(|name| Self { job: job.clone(), name, has_begun: true, is_reopened: false }))
    }

    /// Whether the log has the global manifest of this part; `None` if the log is not in this store, which is then not that
    /// of node 0.
    #[must_use]
    pub fn has_manifest_of(job: &JobDir, part: &NodePart) -> Option<bool> {
        let log = Self { job: job.clone(), name: part.log.clone(), has_begun: true, is_reopened: false };
        // The name is from a manifest, and must not lead elsewhere.
        number(&log.name).filter(|_| !log.name.contains('/') && log.dir().is_dir())?;
        let log = log.log().ok()?;
        let attempt = AttemptId { epoch: part.epoch, number: part.attempt };
        Some(log.snapshots().any(|(committed, _)| committed == attempt))
    }

    fn create(job: &JobDir, before: Option<&Self>) -> io::Result<Self> {
        let number = before.and_then(|log| number(&log.name)).unwrap_or(0) + 1;
        let name = format!("{number:06}-{:016x}", fastrand::Rng::new().u64(..));
        let log = Self { job: job.clone(), name, has_begun: false, is_reopened: false };
        if let Err(error) = log.remove_not_begun() {
            tracing::warn!("a log of the job's nodes whose run did not begin cannot be removed: {error}");
        }
        fs::create_dir_all(log.dir())?;
        sync_dir(job.path())?;
        Ok(log)
    }

    /// Removes what launchers have left whose run did not begin.
    fn remove_not_begun(&self) -> io::Result<()> {
        let entries = match fs::read_dir(self.job.path().join(FOLDER)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_name().to_str().is_some_and(|name| name.starts_with(NOT_BEGUN)) {
                fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    }

    /// Whether the run has begun, or goes on.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.has_begun && !self.is_reopened
    }

    /// The same log, of a run that goes on also if it was complete, from [`Self::begin`] on.
    #[must_use]
    pub fn reopened(self) -> Self {
        Self { is_reopened: true, ..self }
    }

    /// Begins the run, durably: from now on, its snapshots are the ones to resume.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub fn begin(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.is_reopened) {
            match fs::remove_file(self.dir().join(COMPLETE)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => sync_dir(&self.dir())?,
            }
        }
        if self.has_begun {
            return Ok(());
        }
        let folder = self.job.path().join(FOLDER);
        fs::rename(self.dir(), folder.join(&self.name))?;
        self.has_begun = true;
        sync_dir(&folder)
    }

    fn dir(&self) -> PathBuf {
        let prefix = if self.has_begun { "" } else { NOT_BEGUN };
        self.job.path().join(FOLDER).join(format!("{prefix}{}", self.name))
    }

    /// The key for the content of a file of the log. Without encryption the code detects damage only.
    fn key(&self, file: &str) -> FileKey {
        Some(self.job.file_key(&format!("{FOLDER}/{}/{file}", self.name)).unwrap_or(CHECK))
    }

    /// Its name, which is in the manifests of its parts.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The records from a position to the end.
    ///
    /// # Errors
    /// When a record cannot be read, or is damaged.
    pub fn read(&self, from: u64) -> io::Result<Vec<Record>> {
        let mut records = Vec::new();
        for position in from.. {
            match self.record(position)? {
                Some(record) => records.push(record),
                None => break,
            }
        }
        Ok(records)
    }

    /// All of it.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn log(&self) -> io::Result<Log> {
        let mut log = Log::default();
        for (position, record) in (0..).zip(self.read(0)?) {
            log.add(position, record);
        }
        Ok(log)
    }

    fn record(&self, position: u64) -> io::Result<Option<Record>> {
        let name = file_name(position);
        let path = self.dir().join(&name);
        let damaged = || io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged", path.display()));
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes?,
        };
        let line = authentic::opened(&self.key(&name), &bytes).ok_or_else(damaged)?;
        serde_json::from_slice(line).map(Some).map_err(|_| damaged())
    }

    /// Puts a record, durably, if the position has none.
    ///
    /// # Errors
    /// When the store cannot be read or written: the record may be there or not.
    ///
    /// # Panics
    /// Never: each record has a JSON form.
    pub fn put(&self, position: u64, record: &Record) -> io::Result<PutAnswer> {
        faults::hit("nodes-log-put")?;
        let line = serde_json::to_string(record).expect("records have a JSON form");
        let (dir, name) = (self.dir(), file_name(position));
        // A launcher in another container may have the same PID.
        let temporary = dir.join(format!("{NOT_BEGUN}{}", PackId::random()?));
        write_atomically(&temporary, authentic::sealed(&self.key(&name), &line).as_bytes())?;
        let put = fs::hard_link(&temporary, dir.join(name));
        let _ = fs::remove_file(&temporary);
        match put {
            Ok(()) => sync_dir(&dir).map(|()| PutAnswer::Done),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match self.record(position)? {
                Some(found) => Ok(PutAnswer::Taken(found)),
                None => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// Records that the job has ended with 0 on all nodes: the next run begins a new log.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub fn set_complete(&mut self) -> io::Result<()> {
        self.begin()?;
        let mark = authentic::sealed(&self.key(COMPLETE), COMPLETE);
        write_atomically(&self.dir().join(COMPLETE), mark.as_bytes())
    }

    fn is_complete(&self) -> bool {
        let Ok(mark) = fs::read(self.dir().join(COMPLETE)) else { return false };
        let is_ours = authentic::opened(&self.key(COMPLETE), &mark) == Some(COMPLETE.as_bytes());
        // Without encryption, an earlier ckpt-run has left it empty.
        is_ours || self.job.file_key(COMPLETE).is_none()
    }
}

/// No secret.
const CHECK: [u8; 32] = *b"ckpt-run nodes: record of a log ";

fn file_name(position: u64) -> String {
    format!("{position:012}")
}

fn number(name: &str) -> Option<u64> {
    name.split_once('-')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_cluster::{NodeId, PartRecord};
    use ckpt_snapshot::codec::Key;
    use ckpt_snapshot::{JobKey, StoreRoot};
    use std::os::unix::fs::PermissionsExt;

    fn epoch(epoch: u64) -> Record {
        Record::Epoch { epoch, coordinator: NodeId { rank: 0, incarnation: 7 } }
    }

    /// A job in a store of its own, with a key of this byte.
    fn job(key: Option<u8>) -> (tempfile::TempDir, JobDir) {
        let store = tempfile::tempdir().unwrap();
        let root = StoreRoot::open_or_create(store.path()).unwrap();
        let key = key.map(|byte| {
            let path = store.path().join("key");
            fs::write(&path, format!("{byte:02x}").repeat(31) + "5c").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            Key::from_file(&path).unwrap()
        });
        let job = root.job(&JobKey::named("job").unwrap()).with_key(key.as_ref());
        fs::create_dir_all(job.path()).unwrap();
        (store, job)
    }

    #[test]
    fn only_the_holder_of_the_key_writes_records() {
        let (_store, job) = job(Some(7));
        let mut log = LogFiles::open(&job, false).unwrap();
        log.put(0, &epoch(1)).unwrap();
        log.begin().unwrap();
        log.put(1, &epoch(2)).unwrap();
        assert_eq!(log.read(0).unwrap(), [epoch(1), epoch(2)]);
        let file = |position| log.dir().join(file_name(position));
        // A record at another position, one without the key, and the mark of a complete run.
        fs::copy(file(0), file(2)).unwrap();
        assert!(log.read(0).unwrap_err().to_string().contains("is damaged"));
        let line = serde_json::to_string(&epoch(3)).unwrap();
        fs::write(file(2), authentic::sealed(&Some(CHECK), &line)).unwrap();
        assert!(log.read(0).unwrap_err().to_string().contains("is damaged"));
        fs::remove_file(file(2)).unwrap();
        for mark in [String::new(), authentic::sealed(&Some(CHECK), COMPLETE)] {
            fs::write(log.dir().join(COMPLETE), mark).unwrap();
            assert_eq!(LogFiles::open(&job, false).unwrap().name(), log.name());
        }
        log.set_complete().unwrap();
        assert_ne!(LogFiles::open(&job, false).unwrap().name(), log.name());
    }

    #[test]
    fn a_position_takes_one_record() {
        let (_store, job) = job(None);
        let mut log = LogFiles::open(&job, false).unwrap();
        assert_eq!(log.put(0, &epoch(1)).unwrap(), PutAnswer::Done);
        assert_eq!(log.put(0, &epoch(2)).unwrap(), PutAnswer::Taken(epoch(1)));
        let parts = vec![PartRecord { rank: 0, hash: "ab".to_owned() }];
        let attempt = AttemptId { epoch: 1, number: 2 };
        let snapshot = Record::Snapshot { attempt, session: attempt, parts };
        log.begin().unwrap();
        assert_eq!(log.put(1, &snapshot).unwrap(), PutAnswer::Done);
        let again = LogFiles::open(&job, false).unwrap();
        assert_eq!((again.name(), again.read(0).unwrap()), (log.name(), vec![epoch(1), snapshot]));
        assert_eq!((again.log().unwrap().end(), again.read(2).unwrap()), (2, Vec::new()));
        let part = |log: &str, attempt| NodePart {
            log: log.to_owned(),
            epoch: 1,
            attempt,
            node: 0,
            nodes: 1,
            addresses: Vec::new(),
            ports: Vec::new(),
            network: None,
        };
        let found = |log: &str, attempt| LogFiles::has_manifest_of(&job, &part(log, attempt));
        assert_eq!(
            (found(log.name(), 2), found(log.name(), 1), found("000009-a", 2)),
            (Some(true), Some(false), None)
        );
    }

    #[test]
    fn a_complete_run_is_followed_by_a_new_log() {
        let (_store, job) = job(None);
        let names: Vec<_> = [false, true, false]
            .map(|is_anew| {
                let mut log = LogFiles::open(&job, is_anew).unwrap();
                log.begin().unwrap();
                log.name().to_owned()
            })
            .into();
        assert!(names[0] != names[1] && names[1] == names[2], "{names:?}");
        LogFiles::open(&job, false).unwrap().set_complete().unwrap();
        assert!(LogFiles::open(&job, false).unwrap().name().starts_with("000003-"));
    }

    #[test]
    fn a_run_that_did_not_begin_leaves_the_one_before() {
        let (_store, job) = job(Some(7));
        let mut first = LogFiles::open(&job, false).unwrap();
        first.put(0, &epoch(1)).unwrap();
        first.begin().unwrap();
        assert_eq!(first.read(0).unwrap(), [epoch(1)]);
        for _ in 0..2 {
            let refused = LogFiles::open(&job, true).unwrap();
            assert_ne!(refused.name(), first.name());
            refused.put(0, &epoch(2)).unwrap();
            assert_eq!(LogFiles::open(&job, false).unwrap().name(), first.name());
        }
        let mut second = LogFiles::open(&job, true).unwrap();
        second.put(0, &epoch(3)).unwrap();
        second.begin().unwrap();
        let again = LogFiles::open(&job, false).unwrap();
        assert_eq!((again.name(), again.read(0).unwrap()), (second.name(), vec![epoch(3)]));
        let names = fs::read_dir(job.path().join(FOLDER)).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.count(), 2, "the others are removed");
        // A file cannot be removed as a directory, which is no reason to refuse a start.
        fs::write(job.path().join(FOLDER).join(NOT_BEGUN), "").unwrap();
        assert_ne!(LogFiles::open(&job, true).unwrap().name(), second.name());
    }

    #[test]
    fn any_damaged_record_is_named() {
        let (_store, job) = job(None);
        let log = LogFiles::open(&job, false).unwrap();
        log.put(0, &epoch(1)).unwrap();
        let path = log.dir().join(file_name(0));
        let good = fs::read(&path).unwrap();
        ckpt_test_mutate::mutations(std::slice::from_ref(&good), |bytes| {
            fs::write(&path, bytes).unwrap();
            match log.read(0) {
                // The case of a digit of the code does not matter.
                Ok(records) => assert_eq!(records, [epoch(1)]),
                Err(error) => assert!(error.to_string().contains("is damaged"), "{error}"),
            }
        });
    }
}
