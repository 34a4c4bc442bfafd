//! The job's small records (see `numbered`), as a job reads and changes them.
//!
//! With a key, only records with a code of the key count (see `authentic`). One without is refused, since it says what
//! somebody else wants. A launcher whose job runs passes over such records instead: what counts for it is the newest
//! record with a code. So a record that is planted while a job runs neither stops the job nor claims it. Nor does an older
//! record with a code, if newer ones are removed: the launcher remembers the newest one that it has read or written.

use crate::authentic::{self, Refusal};
use crate::checked_json::{self, InvalidRecord};
use crate::job::failed;
use crate::numbered::{JOB, MARKS, Newest, Record};
use crate::{JobDir, JobRecord, OpenError, RelPath};
use parking_lot::Mutex;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// How often others may change a record before a change of it fails.
const CHANGE_TRIES: usize = 1000;

/// How many records that are passed over are named.
const NAMED: usize = 10;

/// What a launcher that runs a job knows of its records, for all clones of the job.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// What was passed over and reported; one more than are named if there are others.
    reported: BTreeSet<PathBuf>,
    /// Number and content of the newest record of each kind that was read or written.
    newest: BTreeMap<Record, (u64, Vec<u8>)>,
}

pub(crate) type PassedOver = Arc<Mutex<Known>>;

impl JobDir {
    /// The same job, for a launcher that runs it: records without a code of the key are passed over, with a warning, and
    /// those that it has read or written count although somebody removes them. Its clones have this in common.
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
        let read = |may_be_denied| {
            record.read(&*medium, taken, &|name, content| self.refusal(name, content, may_be_denied))
        };
        let newest = match read(false) {
            // Once more: if the service denies an object twice, and gives the one before it, the object is odd.
            Err(error) if self.passed_over.is_some() && is_denied(&error) => match read(true) {
                Ok(newest) if newest.content.is_some() => Ok(newest),
                _ => Err(error),
            },
            read => read,
        };
        let newest =
            newest.map_err(|error| failed("read", medium.describe(&record.folder()).as_ref())(error))?;
        let newest = self.or_known(record, newest);
        let Some((seen, seen_number)) =
            self.seen().and_then(|seen| Some((seen, seen.read(record, newest.number)?)))
        else {
            return Ok(newest);
        };
        // A network file system may list what was there a while ago.
        let mut taken = taken.clone();
        if taken.insert(seen_number) {
            return self.read_record(record, &taken);
        }
        Err(OpenError::Replayed {
            path: self.path_of(record, &newest),
            number: newest.number,
            seen_number,
            seen: seen.path().to_owned(),
        })
    }

    /// The record that this launcher has read or written before, if what was read now is older.
    fn or_known(&self, record: Record, read: Newest) -> Newest {
        let Some(known) = self.passed_over.as_ref().filter(|_| self.encryption.is_some()) else {
            return read;
        };
        let mut known = known.lock();
        match (known.newest.get(&record), &read.content) {
            (Some((number, content)), _) if *number > read.number => {
                Newest { number: *number, content: Some(content.clone()), is_gone: true, ..read }
            }
            (_, Some(content)) => {
                known.newest.insert(record, (read.number, content.clone()));
                read
            }
            (_, None) => read,
        }
    }

    /// Why this object is no record, if the job has a key: it has no code of it. `may_be_denied`: one that a service denies
    /// is none.
    fn refusal(&self, name: &RelPath, content: io::Result<&[u8]>, may_be_denied: bool) -> Option<Refusal> {
        let key = self.encryption.as_ref()?;
        match content {
            Ok(text) => authentic::refusal(key, self.key().as_str(), name, text),
            Err(error) => {
                // What is no record by its kind: a link, a socket. Other errors say nothing about the object.
                const ODD: [Errno; 2] = [Errno::LOOP, Errno::NXIO];
                let is_file = self.records_medium().is_none();
                match error.kind() {
                    io::ErrorKind::PermissionDenied if is_file => {
                        return Some(Refusal::Unreadable(format!("{error}: check its owner and mode first")));
                    }
                    io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => {}
                    _ if may_be_denied && is_denied(&error) => {}
                    _ if Errno::from_io_error(&error).is_some_and(|errno| ODD.contains(&errno)) => {}
                    _ => return None,
                }
                Some(Refusal::Unreadable(error.to_string()))
            }
        }
    }

    /// Refuses what the key does not authenticate, or passes over it.
    fn check_refused(&self, record: Record, newest: &Newest) -> Result<(), OpenError> {
        if newest.refused.is_empty() {
            return Ok(());
        }
        let has_codes = newest.content.is_some() || self.has_codes(record, newest)?;
        for (number, refusal) in newest.refused.iter().rev() {
            let path = PathBuf::from(self.medium().describe(&record.name(*number)));
            let refusal = match refusal {
                Refusal::NoCode if has_codes => &Refusal::Planted,
                other => other,
            };
            let error = OpenError::Unauthentic { path: path.clone(), refusal: refusal.clone() };
            match &self.passed_over {
                Some(known) if newest.content.is_some() => known.lock().report(path, &error),
                _ => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether another object shows that records of this kind without a code are not from an older build.
    fn has_codes(&self, record: Record, newest: &Newest) -> Result<bool, OpenError> {
        let is_signed = |refusal| matches!(refusal, &Refusal::OtherKey | &Refusal::WrongCode);
        // Marks are signed before the job's record is, and not changed without the key afterwards.
        let is_of_signed_job =
            || Ok(record == MARKS && self.read_record(JOB, &BTreeSet::new())?.content.is_some());
        Ok(newest.refused.values().any(is_signed) || is_of_signed_job()?)
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
        let failed = |error| failed("write", medium.describe(&record.folder()).as_ref())(error);
        // Names that are taken, and what this change has written there, if anything.
        let mut taken: BTreeMap<u64, Option<Vec<u8>>> = BTreeMap::new();
        loop {
            let newest = self.read_record(record, &taken.keys().copied().collect())?;
            // What seemed to be newer is no record.
            if matches!(taken.get(&newest.number), Some(written @ Some(_)) if *written == newest.content) {
                return Ok(());
            }
            let Some(body) = change(&newest)?.or_else(|| newest.gone_body()) else { return Ok(()) };
            self.refuse_without_key(record, &newest)?;
            let number = newest.next_number().map_err(failed)?;
            let content = self.encode(&record.name(number), body);
            match record.replace(&*medium, &newest, &content) {
                Ok(true) => {
                    self.or_known(record, Newest { number, content: Some(content), ..Newest::default() });
                    if let Some(seen) = self.seen() {
                        seen.written(record, number, newest.number == 0);
                    }
                    return Ok(());
                }
                Ok(false) if taken.len() < CHANGE_TRIES => taken.insert(number, Some(content)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && taken.len() < CHANGE_TRIES => {
                    taken.insert(number, None)
                }
                Ok(false) => return Err(failed(io::ErrorKind::AlreadyExists.into()).into()),
                Err(error) => return Err(failed(error).into()),
            };
        }
    }

    /// Without the key, nobody can write a record that the holder of the key accepts.
    fn refuse_without_key(&self, record: Record, newest: &Newest) -> Result<(), OpenError> {
        if self.encryption.is_some() {
            return Ok(());
        }
        if newest.open().is_some_and(authentic::has_code) {
            return Err(OpenError::NeedsKey(self.path_of(record, newest)));
        }
        // There may be no marks yet.
        match record {
            MARKS => self.refuse_without_key(JOB, &self.read_record(JOB, &BTreeSet::new())?),
            _ => Ok(()),
        }
    }

    /// Checks the records before something else of the job is changed that they protect.
    ///
    /// # Errors
    /// If they were written with a key, and none was named; if they are not those of the holder of the key; if they cannot
    /// be read.
    pub fn check_records(&self) -> Result<(), OpenError> {
        [MARKS, JOB].into_iter().try_for_each(|record| {
            let newest = self.read_record(record, &BTreeSet::new())?;
            self.refuse_without_key(record, &newest)?;
            self.check_refused(record, &newest)
        })
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
            reason: error.to_string(),
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
        // What the marks are is not decided any more once the job's record has a code.
        for record in [MARKS, JOB] {
            let newest = self.read_record(record, &BTreeSet::new())?;
            let Some((_, refusal)) = newest.refused.last_key_value() else { continue };
            if newest.content.is_some() || *refusal != Refusal::NoCode || self.has_codes(record, &newest)? {
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
            let medium = self.medium();
            let written = old.next_number().and_then(|number| {
                let name = record.name(number);
                let is_replaced = record.replace(&*medium, &old, &self.encode(&name, body))?;
                if is_replaced { Ok(name) } else { Err(io::ErrorKind::AlreadyExists.into()) }
            });
            let folder = medium.describe(&record.folder());
            let name = written.map_err(|error| failed("write", folder.as_ref())(error))?;
            adopted.push((self.path_of(record, &old), medium.describe(&name).into()));
        }
        Ok(adopted)
    }
}

impl Known {
    /// Reports a record that is passed over, once.
    fn report(&mut self, path: PathBuf, error: &OpenError) {
        if self.reported.len() > NAMED || !self.reported.insert(path) {
            return;
        }
        if self.reported.len() <= NAMED {
            tracing::warn!("{error}. It is passed over while the job runs");
        } else {
            tracing::warn!(
                "there are more records than these {NAMED} that do not count, and are passed over"
            );
        }
    }
}

impl Newest {
    /// The body, if it is there and undamaged.
    fn open(&self) -> Option<&str> {
        checked_json::open(self.content.as_deref()?).ok()
    }

    /// The body of a record that is gone, to be written again.
    fn gone_body(&self) -> Option<String> {
        self.open().filter(|_| self.is_gone).map(authentic::without_code)
    }
}

/// Whether a service has answered that it does not give the object, be it for its rights or its encryption. Without an
/// answer, or after an error of the server, the error is another one.
fn is_denied(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::Other)
}
