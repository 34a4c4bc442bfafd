//! Small records of a job that several launchers may change without a common lock: objects `job/N.json` and
//! `marks/N.json`, of which the one with the highest N counts. A change creates N + 1, which fails if somebody else has
//! created it since the record was read (compare and swap). So a write that arrives late, even after its writer has given up on it, changes nothing: its number
//! is taken, or is not the highest.
//!
//! Old objects are removed, so a number may be free again. The newest [`KEPT`] are not removed: a writer whose number is
//! one of those when it has created it was the only one to create it. A writer that was stopped in between for as many
//! changes as that does not know, and makes its change once more.

use crate::RelPath;
use crate::authentic::Refusal;
use crate::medium::{Medium, read_all};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

/// Who owns the job, and how its last run ended.
pub(crate) const JOB: Record = Record { folder: "job", unnumbered: "job.json" };
/// Tags, pins and failed restores of its snapshots.
pub(crate) const MARKS: Record = Record { folder: "marks", unnumbered: "marks.json" };
/// A longer record is not read (bytes): it is damaged.
const RECORD_MAX_BYTES: u64 = 16 << 20;
/// Objects that are kept, the newest included.
const KEPT: u64 = 32;
/// How often an object may be gone that was listed just before.
const TRIES: u32 = 20;

/// One of the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Record {
    /// The directory of its objects.
    folder: &'static str,
    /// The file that it was in stores of version 1 and 2.
    unnumbered: &'static str,
}

/// A record as it was read.
#[derive(Default)]
pub(crate) struct Newest {
    /// Its number; 0 if it has none, or does not exist.
    pub(crate) number: u64,
    /// The content of the object of that number.
    pub(crate) content: Option<Vec<u8>>,
    /// Objects of higher numbers that do not count; with number 0 and no content, also that of number 0.
    pub(crate) refused: BTreeMap<u64, Refusal>,
    /// Whether it is no longer there: this process has read or written it before.
    pub(crate) is_gone: bool,
}

impl Newest {
    /// The number of the object that replaces it.
    ///
    /// # Errors
    /// If there is none left.
    pub(crate) fn next_number(&self) -> io::Result<u64> {
        let mut number = self.number;
        loop {
            number = number.checked_add(1).ok_or_else(|| io::Error::other("no number is left for it"))?;
            if !self.refused.contains_key(&number) {
                return Ok(number);
            }
        }
    }
}

/// Why an object of this name with this content, or this error of reading it, does not count.
pub(crate) type RefusalFn<'a> = dyn Fn(&RelPath, io::Result<&[u8]>) -> Option<Refusal> + 'a;

impl Record {
    /// Reads the record: the object with the highest number that `refusal` does not refuse. Numbers in `taken` are tried
    /// whether they are listed or not.
    ///
    /// # Errors
    /// Those of the medium.
    pub(crate) fn read(
        &self,
        medium: &dyn Medium,
        taken: &BTreeSet<u64>,
        refusal: &RefusalFn<'_>,
    ) -> io::Result<Newest> {
        let mut tries = 0;
        'listed: loop {
            let listed = self.list(medium)?;
            let mut numbers: BTreeSet<u64> = listed.iter().chain(taken).copied().collect();
            let mut refused = BTreeMap::new();
            tries += 1;
            loop {
                let number = numbers.pop_last().unwrap_or(0);
                let name = self.name(number);
                let content = match read_all(medium, &name, RECORD_MAX_BYTES) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => match number {
                        0 => return Ok(Newest { refused, ..Newest::default() }),
                        // It is gone since.
                        _ if !listed.contains(&number) => continue,
                        // Newer ones were created since.
                        _ if tries < TRIES => continue 'listed,
                        _ => return Err(error),
                    },
                    content => content,
                };
                let why = refusal(&name, content.as_deref().map_err(copied));
                let Some(why) = why else {
                    return Ok(Newest { number, content: Some(content?), refused, is_gone: false });
                };
                refused.insert(number, why);
                if number == 0 {
                    return Ok(Newest { refused, ..Newest::default() });
                }
            }
        }
    }

    /// Replaces the record that was read. Returns whether that is certain: if there are much newer objects, it is replaced
    /// only if they are no records.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] if somebody else has replaced it; it is unchanged then. After any other error it
    /// may or may not be replaced.
    pub(crate) fn replace(&self, medium: &dyn Medium, read: &Newest, content: &[u8]) -> io::Result<bool> {
        let number = read.next_number()?;
        medium.put_new(&self.name(number), content)?;
        let mut listed = self.list(medium)?;
        listed.retain(|number| !read.refused.contains_key(number));
        let newest = listed.last().copied().unwrap_or(number);
        let oldest_kept = newest.saturating_add(1).saturating_sub(KEPT);
        // Somebody else may have created the number before, and others have removed it since. Or what is newer is no
        // record: then what is old to it may be all that counts.
        if number < oldest_kept {
            return Ok(false);
        }
        let has_unnumbered = read.number == 0 && read.content.is_some();
        let old = listed.into_iter().filter(|old| *old < oldest_kept);
        for name in old.chain(has_unnumbered.then_some(0)).map(|old| self.name(old)) {
            if let Err(error) = medium.remove(&name) {
                tracing::debug!("cannot remove {}: {error}", medium.describe(&name));
            }
        }
        Ok(true)
    }

    /// The numbers of all objects, in order.
    fn list(&self, medium: &dyn Medium) -> io::Result<Vec<u64>> {
        let listed = medium.list(&self.folder())?;
        let mut numbers: Vec<u64> = listed.iter().filter_map(|(name, _)| number_of(name)).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// The directory of its objects.
    pub(crate) fn folder(&self) -> RelPath {
        RelPath::new(self.folder).expect("a plain path")
    }

    /// The name of the object of this number.
    pub(crate) fn name(&self, number: u64) -> RelPath {
        let name = match number {
            0 => self.unnumbered.to_owned(),
            _ => format!("{}/{number}.json", self.folder),
        };
        RelPath::new(name).expect("a plain path")
    }

    /// What it is called.
    pub(crate) fn label(&self) -> &'static str {
        self.folder
    }

    /// Whether a job's directory has this record. One that another user has closed may have it.
    pub(crate) fn exists(&self, dir: &Path) -> bool {
        let exists = |name: &&str| match dir.join(name).try_exists() {
            Err(error) => error.kind() != io::ErrorKind::NotADirectory,
            Ok(exists) => exists,
        };
        [self.folder, self.unnumbered].iter().any(exists)
    }
}

/// The same error once more.
fn copied(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

fn number_of(name: &str) -> Option<u64> {
    let number = name.strip_suffix(".json")?.parse().ok()?;
    (format!("{number}.json") == name && number > 0).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::medium::DirMedium;

    #[test]
    fn one_of_several_writers_wins() {
        let dir = tempfile::tempdir().unwrap();
        let medium = DirMedium::new(dir.path().to_owned());
        let read = || JOB.read(&medium, &BTreeSet::new(), &|_, _| None).unwrap();
        let none = read();
        assert!(none.number == 0 && none.content.is_none());
        JOB.replace(&medium, &none, b"a").unwrap();
        let first = read();
        assert_eq!((first.number, first.content.as_deref()), (1, Some(&b"a"[..])));
        let late = read();
        JOB.replace(&medium, &first, b"b").unwrap();
        assert_eq!(JOB.replace(&medium, &late, b"c").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        for content in 3..=34 {
            JOB.replace(&medium, &read(), &[content]).unwrap();
        }
        // A write of a number that is gone comes late.
        assert_eq!(JOB.list(&medium).unwrap(), (3..=34).collect::<Vec<_>>());
        assert!(!JOB.replace(&medium, &late, b"c").unwrap());
        medium.put_new(&JOB.name(1), b"late").unwrap();
        let newest = read();
        assert_eq!((newest.number, newest.content.as_deref()), (34, Some(&[34][..])));
        JOB.replace(&medium, &newest, b"f").unwrap();
        assert_eq!(JOB.list(&medium).unwrap(), (4..=35).collect::<Vec<_>>());
        for odd in ["05.json", "0.json", "x.json", "6.jso"] {
            assert_eq!(number_of(odd), None, "{odd}");
        }
    }

    #[test]
    fn numbers_end() {
        let mut newest = Newest { number: u64::MAX - 1, ..Newest::default() };
        assert_eq!(newest.next_number().unwrap(), u64::MAX);
        newest.refused.insert(u64::MAX, Refusal::NoCode);
        assert!(newest.next_number().is_err());
        assert!(Newest { number: u64::MAX, ..Newest::default() }.next_number().is_err());
    }

    /// An object that appears while a record is replaced may be no record.
    #[test]
    fn nothing_is_removed_for_what_was_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let medium = DirMedium::new(dir.path().to_owned());
        let read = || JOB.read(&medium, &BTreeSet::new(), &|_, _| None).unwrap();
        for content in 1..=3 {
            JOB.replace(&medium, &read(), &[content]).unwrap();
        }
        let before = read();
        medium.put_new(&JOB.name(99), b"planted").unwrap();
        assert!(!JOB.replace(&medium, &before, &[4]).unwrap());
        assert_eq!(JOB.list(&medium).unwrap(), [1, 2, 3, 4, 99]);
    }
}
