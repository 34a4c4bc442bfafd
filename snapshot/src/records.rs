//! The job's small records (see `numbered`), as a job reads and changes them.
//!
//! With a key, only records with a code of the key count (see `authentic`). One without is refused, since it says what
//! somebody else wants. A launcher whose job runs passes over such records instead: what counts for it is the newest
//! record with a code. So a record that is planted while a job runs neither stops the job nor claims it.

use crate::authentic::{self, Refusal};
use crate::checked_json::{self, InvalidRecord};
use crate::job::failed;
use crate::numbered::{JOB, MARKS, Newest, Record};
use crate::{JobDir, JobRecord, OpenError, RelPath};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// How often others may change a record before a change of it fails.
const CHANGE_TRIES: u32 = 1000;

/// What was passed over and reported, by all clones of a job.
pub(crate) type PassedOver = Arc<Mutex<BTreeSet<PathBuf>>>;

impl JobDir {
    /// The same job, for a launcher that runs it: records without a code of the key are passed over, with a warning for
    /// each.
    #[must_use]
    pub fn passing_over_forgeries(mut self) -> Self {
        self.passed_over.get_or_insert_default();
        self
    }

    /// The path or address of what was read, for messages.
    pub(crate) fn path_of(&self, record: Record, read: &Newest) -> PathBuf {
        self.medium().describe(&record.name(read.number)).into()
    }

    /// Reads one of the job's small records. Numbers in `taken` are read, whether they are listed or not.
    pub(crate) fn read_record(&self, record: Record, taken: &BTreeSet<u64>) -> Result<Newest, OpenError> {
        let medium = self.medium();
        record
            .read(&*medium, taken, &|name, content| self.refusal(name, content))
            .map_err(|error| failed("read", medium.describe(&record.folder()).as_ref())(error))
    }

    /// Why this object is no record, if the job has a key: it has no code of it.
    fn refusal(&self, name: &RelPath, content: io::Result<&[u8]>) -> Option<Refusal> {
        let key = self.encryption.as_ref()?;
        match content {
            Ok(text) => authentic::refusal(key, self.key().as_str(), name, text),
            Err(error) => {
                // What is no record by its kind. Other errors say nothing about the object.
                let is_directory = self.records_medium().is_none();
                let is_odd = match error.kind() {
                    io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => true,
                    io::ErrorKind::PermissionDenied => is_directory,
                    _ => error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()),
                };
                is_odd.then(|| Refusal::Unreadable(error.to_string()))
            }
        }
    }

    /// Refuses what the key does not authenticate, or passes over it.
    fn check_refused(&self, record: Record, newest: &Newest) -> Result<(), OpenError> {
        for (number, refusal) in newest.refused.iter().rev() {
            let path = PathBuf::from(self.medium().describe(&record.name(*number)));
            let refusal = match refusal {
                Refusal::NoCode if newest.content.is_some() => &Refusal::Planted,
                other => other,
            };
            let error = OpenError::Unauthentic { path: path.clone(), refusal: refusal.clone() };
            match &self.passed_over {
                Some(passed_over) if newest.content.is_some() => {
                    if passed_over.lock().insert(path) {
                        tracing::warn!("{error}. It is passed over while the job runs");
                    }
                }
                _ => return Err(error),
            }
        }
        Ok(())
    }

    /// The checked body of a record that was read.
    pub(crate) fn body_of(
        &self,
        record: Record,
        newest: &Newest,
    ) -> Result<Option<Result<String, InvalidRecord>>, OpenError> {
        self.check_refused(record, newest)?;
        let Some(text) = &newest.content else { return Ok(None) };
        Ok(Some(checked_json::open(text).map(authentic::without_code)))
    }

    /// Replaces one of the job's small records durably by the body that `change` makes of it, unless that is `None`.
    /// `change` is called again if somebody else has replaced the record meanwhile: of several at a time, each sees what
    /// the one before it has written.
    ///
    /// # Errors
    /// If the record cannot be read or written, and those of `change`. After a failed write the record may have been
    /// replaced.
    pub(crate) fn replace_record<E: From<OpenError>>(
        &self,
        record: Record,
        mut change: impl FnMut(&Newest) -> Result<Option<String>, E>,
    ) -> Result<(), E> {
        let medium = self.medium();
        let (mut tries, mut taken) = (0, BTreeSet::new());
        loop {
            tries += 1;
            let newest = self.read_record(record, &taken)?;
            let Some(body) = change(&newest)? else { return Ok(()) };
            self.refuse_without_key(record, &newest)?;
            let number = newest.next_number();
            let content = self.encode(&record.name(number), body);
            match record.replace(&*medium, &newest, &content) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tries < CHANGE_TRIES => {
                    taken.insert(number);
                }
                replaced => {
                    let path = medium.describe(&record.folder());
                    return replaced.map_err(|error| failed("write", path.as_ref())(error).into());
                }
            }
        }
    }

    /// Without the key, nobody can write a record that the holder of the key accepts.
    fn refuse_without_key(&self, record: Record, newest: &Newest) -> Result<(), OpenError> {
        let body = newest.content.as_ref().and_then(|text| checked_json::open(text).ok());
        if self.encryption.is_none() && body.is_some_and(authentic::has_code) {
            return Err(OpenError::NeedsKey(self.path_of(record, newest)));
        }
        Ok(())
    }

    /// The content of the object `name` with this body.
    fn encode(&self, name: &RelPath, body: String) -> Vec<u8> {
        checked_json::encode_body(match &self.encryption {
            Some(key) => authentic::with_code(key, self.key().as_str(), name, &body),
            None => body,
        })
    }

    /// The job's record, if it has one.
    ///
    /// # Errors
    /// If the record exists and cannot be read.
    pub fn record(&self) -> Result<Option<JobRecord>, OpenError> {
        self.decode(&self.read_record(JOB, &BTreeSet::new())?)
    }

    fn decode(&self, newest: &Newest) -> Result<Option<JobRecord>, OpenError> {
        let Some(body) = self.body_of(JOB, newest)? else { return Ok(None) };
        let path = self.path_of(JOB, newest);
        let unreadable = |error: &dyn fmt::Display| OpenError::Unreadable {
            path: path.clone(),
            reason: format!("{error}; without this file the job's snapshots are still found"),
        };
        let record: JobRecord = match body {
            Ok(body) => serde_json::from_str(&body).map_err(|error| unreadable(&error))?,
            // Version 1 of the store wrote the record without a checksum. A damaged record of today does not parse as
            // one of version 1, since it lacks the fields.
            Err(InvalidRecord::Json(_)) => {
                let text = newest.content.as_deref().unwrap_or_default();
                serde_json::from_slice(text).map_err(|error| unreadable(&error))?
            }
            Err(other) => return Err(unreadable(&other)),
        };
        if record.version > 1 {
            return Err(OpenError::Newer { path, found: record.version, known: 1 });
        }
        Ok(Some(record))
    }

    /// Replaces the job's record durably by what `change` makes of it, unless that is `None`. `change` gets `None` if the
    /// record is missing or damaged. It is called again if another launcher has replaced the record meanwhile: of several
    /// at a time, each sees what the one before it has written.
    ///
    /// # Errors
    /// If the record cannot be read or written, and those of `change`. After a failed write the record may have been
    /// replaced.
    pub fn change_record<E: From<OpenError>>(
        &self,
        mut change: impl FnMut(Option<JobRecord>) -> Result<Option<JobRecord>, E>,
    ) -> Result<(), E> {
        self.replace_record(JOB, |newest| {
            let present = match self.decode(newest) {
                Err(OpenError::Unreadable { .. }) => None,
                Err(OpenError::Unauthentic { .. }) if self.passed_over.is_some() => None,
                present => present?,
            };
            Ok(change(present)?.map(|record| checked_json::body(&record)))
        })
    }

    /// Replaces the job's record, durably.
    ///
    /// # Errors
    /// If the record cannot be written.
    pub fn set_record(&self, record: &JobRecord) -> Result<(), OpenError> {
        self.change_record(|_| Ok(Some(record.clone())))
    }

    /// Gives the records a code of the job's key that were written without one, by an older ckpt-run. Their reader
    /// cannot tell them from records of somebody else who can write to the store: the caller's user has to know that
    /// there is nobody. Returns what was signed, and under which name.
    ///
    /// # Errors
    /// [`OpenError::Unauthentic`] if there is a record with a code already, or one of another key: then those without are
    /// from somebody else. If the records cannot be read or written.
    pub fn adopt_records(&self) -> Result<Vec<(PathBuf, PathBuf)>, OpenError> {
        let mut adopted = Vec::new();
        for record in [JOB, MARKS] {
            let newest = self.read_record(record, &BTreeSet::new())?;
            let Some((_, refusal)) = newest.refused.last_key_value() else { continue };
            if newest.content.is_some() || *refusal != Refusal::NoCode {
                self.check_refused(record, &newest)?;
            }
            let as_before = self.clone().with_key(None);
            let old = as_before.read_record(record, &BTreeSet::new())?;
            let body = if record == JOB {
                as_before.decode(&old)?.map(|record| checked_json::body(&record))
            } else {
                Some(as_before.decode_marks(&old)?.body())
            };
            let Some(body) = body else { continue };
            let (medium, name) = (self.medium(), record.name(old.next_number()));
            record
                .replace(&*medium, &old, &self.encode(&name, body))
                .map_err(|error| failed("write", medium.describe(&name).as_ref())(error))?;
            adopted.push((self.path_of(record, &old), medium.describe(&name).into()));
        }
        Ok(adopted)
    }
}
