//! The log of a run of the job, in the store of node 0: a file for each record.
//!
//! A record is put by a hard link, which fails if the position has one. So a put is atomic, also on NFS.

use crate::sys::authentic;
use ckpt_cluster::{AttemptId, Log, PutAnswer, Record};
use ckpt_snapshot::{NodePart, sync_dir, write_atomically};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The folder of all logs, in the job's directory.
const FOLDER: &str = "nodes";
/// Marks a log of a job that has ended with 0 on all nodes.
const COMPLETE: &str = "complete";

/// The log of one run.
#[derive(Clone, Debug)]
pub struct LogFiles {
    dir: PathBuf,
    name: String,
}

impl LogFiles {
    /// The log of the present run in the job's directory; a new one if `is_anew`, or if the last run is complete.
    ///
    /// # Errors
    /// When the store cannot be read or written.
    pub fn open(job: &Path, is_anew: bool) -> io::Result<Self> {
        let newest = Self::newest(job)?;
        let is_over = |log: &Self| is_anew || log.dir.join(COMPLETE).exists();
        match newest {
            Some(log) if !is_over(&log) => Ok(log),
            newest => Self::create(job, newest.as_ref()),
        }
    }

    /// The log of the last run, if there is one.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn newest(job: &Path) -> io::Result<Option<Self>> {
        let folder = job.join(FOLDER);
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            entries => entries?,
        };
        let mut names = Vec::new();
        for entry in entries {
            names.extend(entry?.file_name().into_string().ok().filter(|name| number(name).is_some()));
        }
        let newest = names.into_iter().max_by_key(|name| number(name));
        Ok(newest.map(|name| Self { dir: folder.join(&name), name }))
    }

    /// Whether the log has the global manifest of this part; `None` if the log is not in this store, which is then not that
    /// of node 0.
    #[must_use]
    pub fn has_manifest_of(job: &Path, part: &NodePart) -> Option<bool> {
        let log = Self { dir: job.join(FOLDER).join(&part.log), name: part.log.clone() };
        // The name is from a manifest, and must not lead elsewhere.
        number(&log.name).filter(|_| !log.name.contains('/') && log.dir.is_dir())?;
        let log = log.log().ok()?;
        let attempt = AttemptId { epoch: part.epoch, number: part.attempt };
        Some(log.snapshots().any(|(committed, _)| committed == attempt))
    }

    fn create(job: &Path, before: Option<&Self>) -> io::Result<Self> {
        let number = before.and_then(|log| number(&log.name)).unwrap_or(0) + 1;
        let name = format!("{number:06}-{:016x}", fastrand::Rng::new().u64(..));
        let folder = job.join(FOLDER);
        let dir = folder.join(&name);
        fs::create_dir_all(&dir)?;
        sync_dir(&folder)?;
        sync_dir(job)?;
        Ok(Self { dir, name })
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

    fn path(&self, position: u64) -> PathBuf {
        self.dir.join(format!("{position:012}"))
    }

    fn record(&self, position: u64) -> io::Result<Option<Record>> {
        let path = self.path(position);
        let damaged = || io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged", path.display()));
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes?,
        };
        let line = authentic::opened(&Some(CHECK), &bytes).ok_or_else(damaged)?;
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
        let line = serde_json::to_string(record).expect("records have a JSON form");
        let temporary = self.dir.join(format!("new-{}", std::process::id()));
        write_atomically(&temporary, authentic::sealed(&Some(CHECK), &line).as_bytes())?;
        let put = fs::hard_link(&temporary, self.path(position));
        let _ = fs::remove_file(&temporary);
        match put {
            Ok(()) => sync_dir(&self.dir).map(|()| PutAnswer::Done),
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
    pub fn set_complete(&self) -> io::Result<()> {
        write_atomically(&self.dir.join(COMPLETE), b"")
    }
}

/// No secret: the code detects damage only.
const CHECK: [u8; 32] = *b"ckpt-run nodes: record of a log ";

fn number(name: &str) -> Option<u64> {
    name.split_once('-')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_cluster::{NodeId, PartRecord};

    fn epoch(epoch: u64) -> Record {
        Record::Epoch { epoch, coordinator: NodeId { rank: 0, incarnation: 7 } }
    }

    #[test]
    fn a_position_takes_one_record() {
        let job = tempfile::tempdir().unwrap();
        let log = LogFiles::open(job.path(), false).unwrap();
        assert_eq!(log.put(0, &epoch(1)).unwrap(), PutAnswer::Done);
        assert_eq!(log.put(0, &epoch(2)).unwrap(), PutAnswer::Taken(epoch(1)));
        let parts = vec![PartRecord { rank: 0, hash: "ab".to_owned() }];
        let attempt = AttemptId { epoch: 1, number: 2 };
        let snapshot = Record::Snapshot { attempt, session: attempt, parts };
        assert_eq!(log.put(1, &snapshot).unwrap(), PutAnswer::Done);
        let again = LogFiles::open(job.path(), false).unwrap();
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
        };
        let found = |log: &str, attempt| LogFiles::has_manifest_of(job.path(), &part(log, attempt));
        assert_eq!(
            (found(log.name(), 2), found(log.name(), 1), found("000009-a", 2)),
            (Some(true), Some(false), None)
        );
    }

    #[test]
    fn a_complete_run_is_followed_by_a_new_log() {
        let job = tempfile::tempdir().unwrap();
        let names: Vec<_> = [false, true, false]
            .map(|is_anew| LogFiles::open(job.path(), is_anew).unwrap().name().to_owned())
            .into();
        assert!(names[0] != names[1] && names[1] == names[2], "{names:?}");
        LogFiles::open(job.path(), false).unwrap().set_complete().unwrap();
        assert!(LogFiles::open(job.path(), false).unwrap().name().starts_with("000003-"));
    }

    #[test]
    fn a_damaged_record_is_named() {
        let job = tempfile::tempdir().unwrap();
        let log = LogFiles::open(job.path(), false).unwrap();
        log.put(0, &epoch(1)).unwrap();
        let good = fs::read(log.path(0)).unwrap();
        ckpt_test_mutate::mutations(std::slice::from_ref(&good), |bytes| {
            fs::write(log.path(0), bytes).unwrap();
            match log.read(0) {
                // The case of a digit of the code does not matter.
                Ok(records) => assert_eq!(records, [epoch(1)]),
                Err(error) => assert!(error.to_string().contains("is damaged"), "{error}"),
            }
        });
    }
}
