//! The highest numbers of a job's records that this machine has seen, in a file outside of the store. Who can write to a
//! store can put an older state of a job back, whose records have their codes. Their numbers are lower than those that were
//! seen. Only with a key: without one, nothing in a store is authentic.

use crate::files::{create_private_dir, read_regular, write_atomically};
use crate::numbered::Record;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// A longer file is damaged (bytes).
const MAX_BYTES: u64 = 4096;

/// The file of one job in one store.
#[derive(Debug)]
pub(crate) struct Seen {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By the record's name, as this process has last read and written them.
    numbers: BTreeMap<String, u64>,
    /// Whether it was said that the file cannot be used.
    is_reported: bool,
}

impl Seen {
    /// The file in `dir` of the records at this path or address. Its name tells neither that nor the job.
    pub(crate) fn new(dir: &Path, key: &[u8; 32], records: &str) -> Self {
        let name = blake3::keyed_hash(key, records.as_bytes()).to_hex();
        Self { path: dir.join(&name[..32]), state: Mutex::default() }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Notes the number of the newest record that was read, 0 without one. Returns a higher one that was seen before. If the
    /// file cannot be used, says so and forgets.
    pub(crate) fn read(&self, record: Record, number: u64) -> Option<u64> {
        let state = &mut *self.state.lock();
        if number == 0 || number == of(&state.numbers, record) {
            return None;
        }
        // Other processes may have seen more.
        self.update(state, record, number, |seen| number > seen).filter(|seen| number < *seen)
    }

    /// Notes the number of a record that was written. With the first one, the job begins anew, and so does the count.
    pub(crate) fn written(&self, record: Record, number: u64, is_first: bool) {
        self.update(&mut self.state.lock(), record, number, |seen| is_first || number > seen);
    }

    /// Replaces the number in the file by this one, if `counts` says so of the one there, which is returned.
    fn update(
        &self,
        state: &mut State,
        record: Record,
        number: u64,
        counts: impl Fn(u64) -> bool,
    ) -> Option<u64> {
        let update = |numbers: &mut BTreeMap<String, u64>| {
            *numbers = self.load()?;
            let seen = of(numbers, record);
            if counts(seen) {
                numbers.insert(record.label().to_owned(), number);
                create_private_dir(self.path.parent().unwrap_or(Path::new(".")))?;
                write_atomically(&self.path, &serde_json::to_vec(numbers).expect("numbers"))?;
            }
            io::Result::Ok(seen)
        };
        update(&mut state.numbers)
            .inspect_err(|error| {
                if !std::mem::replace(&mut state.is_reported, true) {
                    tracing::warn!(
                        "an older state of the job that somebody puts back will not be noticed: cannot use {}: {error}",
                        self.path.display()
                    );
                }
            })
            .ok()
    }

    fn load(&self) -> io::Result<BTreeMap<String, u64>> {
        match read_regular(&self.path, MAX_BYTES) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
            text => serde_json::from_slice(&text?).map_err(io::Error::other),
        }
    }
}

fn of(numbers: &BTreeMap<String, u64>, record: Record) -> u64 {
    numbers.get(record.label()).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbered::{JOB, MARKS};

    #[test]
    fn lower_numbers_are_told_until_the_job_begins_anew() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("seen");
        let seen = |records: &str| Seen::new(&state, &[7; 32], records);
        let one = seen("/store/jobs/a/job");
        assert_eq!(one.read(JOB, 0), None);
        assert!(!state.exists());
        assert_eq!(one.read(JOB, 3), None);
        seen("/store/jobs/a/job").written(JOB, 5, false);
        assert_eq!(one.read(JOB, 4), Some(5), "another process has seen it");
        assert_eq!(one.read(MARKS, 1), None);
        assert_eq!(seen("/store/jobs/b/job").read(JOB, 1), None);
        assert_eq!(one.read(JOB, 5), None);
        assert_eq!((one.read(JOB, 0), one.read(JOB, 4)), (None, Some(5)), "what was removed can be put back");
        one.written(JOB, 1, true);
        assert_eq!(seen("/store/jobs/a/job").read(JOB, 1), None, "the job has begun anew");
        std::fs::write(one.path(), "no numbers").unwrap();
        assert_eq!(seen("/store/jobs/a/job").read(JOB, 2), None, "nobody else can write it");
    }
}
