//! The log of a run of the job, in the store of node 0: an object for each record.
//!
//! ```text
//! nodes/LOG.000000000000         record 0
//! nodes/LOG.000000000001         record 1
//! nodes/LOG.begun-000000000001   the run has begun, or has been resumed after its end, before record 1 was put
//! ```
//!
//! A record is put by a conditional put, which fails if the position has one. In an encrypted store, only the holder of its
//! key can write records and marks: the key of each belongs to the job, the log and the object.

use crate::sys::authentic::{self, FileKey};
use ckpt_cluster::{AttemptId, Log, PutAnswer, Record};
use ckpt_snapshot::medium::{Medium, read_all};
use ckpt_snapshot::{JobDir, NodePart, RelPath, faults};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

/// The folder of all logs.
const FOLDER: &str = "nodes";
/// Before the position at which a run began, in the name of the mark.
const BEGUN: &str = "begun-";
/// A longer record is damaged (bytes): a global manifest has some 100 for each node.
const RECORD_MAX_BYTES: u64 = 1 << 20;
/// How many records are read at a time: a long run has thousands, and a request to an object store takes long.
const READERS: u64 = 16;
/// A log whose run has not begun for this long is deleted. A launcher that waits for nothing any more begins its run within
/// minutes.
const NOT_BEGUN_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// The log of one run.
#[derive(Debug)]
pub struct StoredLog {
    job: JobDir,
    medium: Arc<dyn Medium>,
    name: String,
    /// The records that were read or put.
    content: Log,
    /// The position of the last mark that the run has begun.
    begun: Option<u64>,
    /// The job is resumed from a snapshot of this run, which is not complete any more then.
    is_reopened: bool,
}

impl StoredLog {
    /// The log of the present run of the job; a new one if `is_anew`, or if the last run is complete. The new run has not
    /// begun: until [`Self::begin`], the next launcher goes on with the run before.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn open(job: &JobDir, is_anew: bool) -> io::Result<Self> {
        match Self::newest(job)? {
            Some(log) if !is_anew && !log.is_complete() => Ok(log),
            newest => Self::new(job, newest.as_ref()),
        }
    }

    /// The log of the last run that has begun, if there is one.
    ///
    /// # Errors
    /// When the store cannot be read, or a record is damaged.
    pub fn newest(job: &JobDir) -> io::Result<Option<Self>> {
        let Some((name, begun)) = Self::newest_mark(&*job.medium())? else { return Ok(None) };
        let mut log = Self::named(job, name);
        log.check_mark(begun)?;
        log.begun = Some(begun);
        log.read(0)?;
        Ok(Some(log))
    }

    fn named(job: &JobDir, name: String) -> Self {
        let (job, medium) = (job.clone(), job.medium());
        Self { job, medium, name, content: Log::default(), begun: None, is_reopened: false }
    }

    fn new(job: &JobDir, before: Option<&Self>) -> io::Result<Self> {
        let number = before.and_then(|log| number(&log.name)).unwrap_or(0) + 1;
        let log = Self::named(job, format!("{number:06}-{:016x}", fastrand::Rng::new().u64(..)));
        if let Err(error) = log.remove_not_begun() {
            tracing::warn!("a log of the job's nodes whose run did not begin cannot be removed: {error}");
        }
        Ok(log)
    }

    /// Removes what launchers have left whose run did not begin. Another machine's may be about to begin.
    fn remove_not_begun(&self) -> io::Result<()> {
        let listed = self.medium.list_times(&folder())?;
        let parts = |object: &str| object.split_once('.').map(|(name, of)| (name.to_owned(), of.to_owned()));
        let begun: BTreeSet<_> = listed
            .iter()
            .filter_map(|(object, _)| parts(object))
            .filter(|(_, of)| of.starts_with(BEGUN))
            .map(|(name, _)| name)
            .collect();
        let now = SystemTime::now();
        for (object, written) in &listed {
            let is_old = now.duration_since(*written).is_ok_and(|age| age >= NOT_BEGUN_AGE);
            if is_old && parts(object).is_some_and(|(name, _)| !begun.contains(&name)) {
                self.medium.remove(&in_folder(object))?;
            }
        }
        Ok(())
    }

    /// Whether the run has begun, or goes on.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.begun.is_some() && !self.is_reopened
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
        if self.has_begun() {
            return Ok(());
        }
        self.check_newest()?;
        let position = self.content.end();
        let name = self.mark(position);
        match self.medium.put_new(&in_folder(&name), authentic::sealed(&self.key(&name), &name).as_bytes()) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            put => put?,
        }
        (self.begun, self.is_reopened) = (Some(position), false);
        Ok(())
    }

    /// Of two runs that begin at the same time, one counts.
    fn check_newest(&self) -> io::Result<()> {
        let newest = Self::newest_mark(&*self.medium)?;
        match newest.filter(|(name, _)| number(name) >= number(&self.name) && *name != self.name) {
            Some((name, _)) => {
                Err(io::Error::other(format!("another launcher has begun a run of the job, {name}")))
            }
            None => Ok(()),
        }
    }

    /// The log of the last run that has begun, and the position at which it did last.
    fn newest_mark(medium: &dyn Medium) -> io::Result<Option<(String, u64)>> {
        let listed = medium.list(&folder())?;
        let begun = listed.iter().filter_map(|(object, _)| {
            let (name, mark) = object.split_once('.')?;
            Some((number(name)?, name, mark.strip_prefix(BEGUN)?.parse().ok()?))
        });
        Ok(begun.max().map(|(_, name, begun)| (name.to_owned(), begun)))
    }

    /// The name of the mark that the run began before a position.
    fn mark(&self, position: u64) -> String {
        format!("{}.{BEGUN}{position:012}", self.name)
    }

    /// Somebody without the key could have the job resumed from an earlier run, or from a later one.
    fn check_mark(&self, position: u64) -> io::Result<()> {
        let name = self.mark(position);
        let bytes = read_all(&*self.medium, &in_folder(&name), RECORD_MAX_BYTES)?;
        let is_ours = authentic::opened(&self.key(&name), &bytes) == Some(name.as_bytes());
        if is_ours { Ok(()) } else { Err(self.damaged(&name)) }
    }

    /// The key for the content of an object of the log. Without encryption the code detects damage only.
    fn key(&self, object: &str) -> FileKey {
        Some(self.job.file_key(&format!("{FOLDER}/{object}")).unwrap_or(CHECK))
    }

    fn damaged(&self, object: &str) -> io::Error {
        let name = self.medium.describe(&in_folder(object));
        io::Error::new(io::ErrorKind::InvalidData, format!("{name} is damaged"))
    }

    /// Its name, which is in the manifests of its parts.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The records that were read or put.
    #[must_use]
    pub fn content(&self) -> &Log {
        &self.content
    }

    /// The records from a position to the end. Those that are known are not read again: nobody changes them.
    ///
    /// # Errors
    /// When a record cannot be read, or is damaged.
    pub fn read(&mut self, from: u64) -> io::Result<Vec<Record>> {
        let (mut records, mut at_a_time) = (self.content.records_from(from).to_vec(), 1);
        let position = |records: &Vec<Record>| from + records.len() as u64;
        'all: loop {
            let first = position(&records);
            for record in self.read_several(first, at_a_time)? {
                let Some(record) = record? else { break 'all };
                self.content.add(position(&records), record.clone());
                records.push(record);
            }
            at_a_time = READERS.min(at_a_time * 2);
        }
        Ok(records)
    }

    /// Reads records at the same time, in order.
    fn read_several(&self, first: u64, number: u64) -> io::Result<Vec<io::Result<Option<Record>>>> {
        if number == 1 {
            return Ok(vec![self.record(first)]);
        }
        thread::scope(|scope| {
            let begin = |position| {
                thread::Builder::new()
                    .name("nodes-log-read".to_owned())
                    .spawn_scoped(scope, move || self.record(position))
            };
            let begun: Vec<_> = (first..first + number).map(begin).collect();
            begun.into_iter().map(|one| Ok(one?.join().expect("no panic"))).collect()
        })
    }

    fn record(&self, position: u64) -> io::Result<Option<Record>> {
        let name = self.record_name(position);
        let bytes = match read_all(&*self.medium, &in_folder(&name), RECORD_MAX_BYTES) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes?,
        };
        let line = authentic::opened(&self.key(&name), &bytes).ok_or_else(|| self.damaged(&name))?;
        serde_json::from_slice(line).map(Some).map_err(|_| self.damaged(&name))
    }

    fn record_name(&self, position: u64) -> String {
        format!("{}.{position:012}", self.name)
    }

    /// Puts a record, durably, if the position has none.
    ///
    /// # Errors
    /// When the store cannot be read or written: the record may be there or not.
    ///
    /// # Panics
    /// Never: each record has a JSON form.
    pub fn put(&mut self, position: u64, record: &Record) -> io::Result<PutAnswer> {
        faults::hit("nodes-log-put")?;
        let line = serde_json::to_string(record).expect("records have a JSON form");
        let name = self.record_name(position);
        let sealed = authentic::sealed(&self.key(&name), &line);
        match self.medium.put_new(&in_folder(&name), sealed.as_bytes()) {
            Ok(()) => {
                self.content.add(position, record.clone());
                Ok(PutAnswer::Done)
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match self.record(position)? {
                Some(found) => {
                    self.content.add(position, found.clone());
                    Ok(PutAnswer::Taken(found))
                }
                None => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// Records that the job has ended with 0 on all nodes: the next run begins a new log.
    ///
    /// # Errors
    /// When the store cannot be written, or another launcher has written to the log since: the job is that launcher's.
    pub fn set_complete(&mut self) -> io::Result<()> {
        self.begin()?;
        let epoch = self.content.epoch();
        loop {
            match self.put(self.content.end(), &Record::Complete)? {
                PutAnswer::Done | PutAnswer::Taken(Record::Complete) => return Ok(()),
                // The answer to an earlier put was lost.
                PutAnswer::Taken(Record::Snapshot { attempt, .. }) if attempt.epoch == epoch => {}
                PutAnswer::Taken(_) => {
                    let why = "another launcher has resumed the job since";
                    return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
                }
            }
        }
    }

    /// Whether it has ended with 0, and was not resumed after that.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.begun.is_some_and(|begun| self.content.is_complete_since(begun))
    }
}

/// The snapshots in the logs of a job. Each log is read once.
pub struct GlobalManifests<'a> {
    job: &'a JobDir,
    read: BTreeMap<String, Option<BTreeSet<AttemptId>>>,
}

impl<'a> GlobalManifests<'a> {
    /// Those of this job.
    #[must_use]
    pub fn of(job: &'a JobDir) -> Self {
        Self { job, read: BTreeMap::new() }
    }

    /// Whether this part has a global manifest; `None` if its log is not in this store, which is then not that of node 0.
    pub fn has(&mut self, part: &NodePart) -> Option<bool> {
        let snapshots = || snapshots_of(self.job, &part.log);
        let snapshots = self.read.entry(part.log.clone()).or_insert_with(snapshots);
        Some(snapshots.as_ref()?.contains(&AttemptId { epoch: part.epoch, number: part.attempt }))
    }
}

fn snapshots_of(job: &JobDir, name: &str) -> Option<BTreeSet<AttemptId>> {
    // The name is from a manifest, and must not lead elsewhere.
    number(name).filter(|_| !name.contains(['/', '.']))?;
    let mut log = StoredLog::named(job, name.to_owned());
    log.read(0).ok()?;
    let is_here = log.content.end() > 0;
    is_here.then(|| log.content.snapshots().map(|(committed, _)| committed).collect())
}

/// No secret.
const CHECK: [u8; 32] = *b"ckpt-run nodes: record of a log ";

fn folder() -> RelPath {
    RelPath::new(FOLDER).expect("a plain path")
}

/// The path of an object, whose name was made here or listed.
fn in_folder(object: &str) -> RelPath {
    RelPath::new(format!("{FOLDER}/{object}")).expect("a plain path")
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
    use std::fs::{self, FileTimes};
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

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

    fn path(job: &JobDir, object: &str) -> PathBuf {
        job.path().join(FOLDER).join(object)
    }

    #[test]
    fn only_the_holder_of_the_key_writes_records() {
        let (_store, job) = job(Some(7));
        let mut log = StoredLog::open(&job, false).unwrap();
        log.put(0, &epoch(1)).unwrap();
        log.begin().unwrap();
        log.put(1, &epoch(2)).unwrap();
        assert_eq!(log.read(0).unwrap(), [epoch(1), epoch(2)]);
        let is_damaged = |error: io::Error| assert!(error.to_string().contains("is damaged"), "{error}");
        let [first, third] = [0, 2].map(|position| path(&job, &log.record_name(position)));
        // A record at another position, and those without the key.
        fs::copy(&first, &third).unwrap();
        is_damaged(log.read(0).unwrap_err());
        for record in [epoch(3), Record::Complete] {
            let line = serde_json::to_string(&record).unwrap();
            fs::write(&third, authentic::sealed(&Some(CHECK), &line)).unwrap();
            is_damaged(StoredLog::open(&job, false).unwrap_err());
        }
        fs::remove_file(third).unwrap();
        // The mark of another run, and of a later moment.
        let mark = log.mark(1);
        for planted in [format!("000009-a.{BEGUN}{:012}", 0), log.mark(2)] {
            for content in [planted.clone(), authentic::sealed(&Some(CHECK), &planted)] {
                fs::write(path(&job, &planted), content).unwrap();
                is_damaged(StoredLog::open(&job, false).unwrap_err());
            }
            fs::copy(path(&job, &mark), path(&job, &planted)).unwrap();
            is_damaged(StoredLog::open(&job, false).unwrap_err());
            fs::remove_file(path(&job, &planted)).unwrap();
        }
        assert_eq!(StoredLog::open(&job, false).unwrap().name(), log.name());
        log.set_complete().unwrap();
        assert_ne!(StoredLog::open(&job, false).unwrap().name(), log.name());
    }

    #[test]
    fn a_position_takes_one_record() {
        let (_store, job) = job(None);
        let mut log = StoredLog::open(&job, false).unwrap();
        assert_eq!(log.put(0, &epoch(1)).unwrap(), PutAnswer::Done);
        assert_eq!(log.put(0, &epoch(2)).unwrap(), PutAnswer::Taken(epoch(1)));
        let parts = vec![PartRecord { rank: 0, hash: "ab".to_owned() }];
        let attempt = AttemptId { epoch: 1, number: 2 };
        let snapshot = Record::Snapshot { attempt, session: attempt, parts };
        log.begin().unwrap();
        assert_eq!(log.put(1, &snapshot).unwrap(), PutAnswer::Done);
        let mut again = StoredLog::open(&job, false).unwrap();
        assert_eq!((again.read(0).unwrap(), again.name()), (vec![epoch(1), snapshot], log.name()));
        assert_eq!((again.content().end(), again.read(2).unwrap()), (2, Vec::new()));
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
        let found = |log: &str, attempt| GlobalManifests::of(&job).has(&part(log, attempt));
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
                let mut log = StoredLog::open(&job, is_anew).unwrap();
                log.begin().unwrap();
                log.name().to_owned()
            })
            .into();
        assert!(names[0] != names[1] && names[1] == names[2], "{names:?}");
        StoredLog::open(&job, false).unwrap().set_complete().unwrap();
        assert!(StoredLog::open(&job, false).unwrap().name().starts_with("000003-"));
    }

    #[test]
    fn a_complete_run_may_be_resumed_on_request() {
        let (_store, job) = job(None);
        let mut log = StoredLog::open(&job, false).unwrap();
        log.put(0, &epoch(1)).unwrap();
        log.set_complete().unwrap();
        let is_it = |log: &StoredLog| StoredLog::open(&job, false).unwrap().name() == log.name();
        assert!(!is_it(&log));
        let reopened = || StoredLog::newest(&job).unwrap().unwrap().reopened();
        // A launcher that does not get as far as to begin.
        reopened().put(2, &epoch(2)).unwrap();
        assert!(!is_it(&log));
        let mut second = reopened();
        assert!(!second.has_begun());
        second.put(3, &epoch(3)).unwrap();
        second.begin().unwrap();
        assert!(is_it(&log) && second.has_begun());
        second.set_complete().unwrap();
        assert!(!is_it(&log));
    }

    /// A launcher that has lost the job to another one completes nothing.
    #[test]
    fn the_end_of_a_job_counts_only_for_its_launcher() {
        let (_store, job) = job(None);
        let mut old = StoredLog::open(&job, false).unwrap();
        old.put(0, &epoch(1)).unwrap();
        old.begin().unwrap();
        let mut new = StoredLog::open(&job, false).unwrap();
        new.put(1, &epoch(2)).unwrap();
        assert!(old.set_complete().unwrap_err().to_string().contains("another launcher has resumed the job"));
        assert_eq!(StoredLog::open(&job, false).unwrap().name(), new.name());
        // A put whose answer is lost is repeated, and a snapshot whose put was not answered is there.
        let id = AttemptId { epoch: 2, number: 3 };
        let mut unaware = StoredLog::open(&job, false).unwrap();
        new.put(2, &Record::Snapshot { attempt: id, session: id, parts: Vec::new() }).unwrap();
        unaware.set_complete().unwrap();
        assert_ne!(StoredLog::open(&job, false).unwrap().name(), new.name());
        unaware.set_complete().unwrap();
    }

    #[test]
    fn a_run_that_did_not_begin_leaves_the_one_before() {
        let (_store, job) = job(Some(7));
        let mut first = StoredLog::open(&job, false).unwrap();
        first.put(0, &epoch(1)).unwrap();
        first.begin().unwrap();
        assert_eq!(first.read(0).unwrap(), [epoch(1)]);
        let mut left = Vec::new();
        for _ in 0..2 {
            let mut refused = StoredLog::open(&job, true).unwrap();
            assert_ne!(refused.name(), first.name());
            refused.put(0, &epoch(2)).unwrap();
            left.push(path(&job, &refused.record_name(0)));
            assert_eq!(StoredLog::open(&job, false).unwrap().name(), first.name());
        }
        let written = SystemTime::now() - NOT_BEGUN_AGE;
        for path in [&left[0], &path(&job, &first.record_name(0))] {
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_times(FileTimes::new().set_modified(written)).unwrap();
        }
        let mut second = StoredLog::open(&job, true).unwrap();
        assert_eq!([left[0].exists(), left[1].exists()], [false, true], "another machine's may begin yet");
        second.put(0, &epoch(3)).unwrap();
        second.begin().unwrap();
        let mut again = StoredLog::open(&job, false).unwrap();
        assert_eq!((again.read(0).unwrap(), again.name()), (vec![epoch(3)], second.name()));
        assert_eq!(first.read(0).unwrap(), [epoch(1)], "it is old, and has begun");
    }

    #[test]
    fn a_long_log_is_read_in_order() {
        let (_store, job) = job(None);
        let mut log = StoredLog::open(&job, false).unwrap();
        let records: Vec<_> = (1..=100).map(epoch).collect();
        for (position, record) in (0..).zip(&records) {
            log.put(position, record).unwrap();
        }
        log.begin().unwrap();
        let mut again = StoredLog::open(&job, false).unwrap();
        assert_eq!((again.content().end(), again.content().epoch()), (100, 100));
        assert_eq!(
            (again.read(0).unwrap(), again.read(98).unwrap()),
            (records.clone(), records[98..].to_vec())
        );
        // What follows a gap does not count.
        fs::remove_file(path(&job, &log.record_name(70))).unwrap();
        assert_eq!(StoredLog::open(&job, false).unwrap().content().end(), 70);
    }

    #[test]
    fn any_damaged_record_is_named() {
        let (_store, job) = job(None);
        let mut log = StoredLog::open(&job, false).unwrap();
        log.put(0, &epoch(1)).unwrap();
        let path = path(&job, &log.record_name(0));
        let good = fs::read(&path).unwrap();
        ckpt_test_mutate::mutations(std::slice::from_ref(&good), |bytes| {
            fs::write(&path, bytes).unwrap();
            match StoredLog::named(&job, log.name().to_owned()).read(0) {
                // The case of a digit of the code does not matter.
                Ok(records) => assert_eq!(records, [epoch(1)]),
                Err(error) => assert!(error.to_string().contains("is damaged"), "{error}"),
            }
        });
    }
}
