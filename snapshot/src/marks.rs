//! Marks of a job's snapshots: tags, pins, failed restores. One small record per job (see
//! `numbered`), which is replaced as a whole.

use crate::checked_json::InvalidRecord;
use crate::numbered::{MARKS, Newest};
use crate::{JobDir, OpenError, SnapshotId, checked_json};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The version that this build writes, and the newest that it reads.
const VERSION: u32 = 1;
/// A snapshot is bad after this many failed restores in a row: one failure may be the machine's fault.
const BAD_AFTER_FAILURES: usize = 2;
/// The maximum length of a stored reason (characters).
const REASON_MAX_CHARS: usize = 1000;
/// The maximum length of a tag (bytes).
const TAG_MAX_BYTES: usize = 100;

/// The text is not a valid tag.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} cannot be a tag: use letters, digits, '.', '_' and '-', at most 100, and not the number or ID of a snapshot, nor a word of --resume (auto, never, required)"
)]
pub struct TagError(String);

/// One failed restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedRestore {
    /// When, milliseconds since 1970 UTC.
    pub unix_ms: u64,
    /// Why.
    pub reason: String,
}

/// Tries to resume a snapshot that have failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unresumed {
    /// When the first of them failed, milliseconds since 1970 UTC.
    pub since_unix_ms: u64,
    /// How many.
    pub tries: u32,
}

fn unix_ms(at: SystemTime) -> u64 {
    let since_1970 = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

/// The marks of one snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Names that the user gave it.
    #[serde(default)]
    pub tags: BTreeSet<String>,
    /// Whether it is exempt from pruning.
    #[serde(default)]
    pub pinned: bool,
    /// The newest restores that failed since the last successful one.
    #[serde(default)]
    pub failed_restores: Vec<FailedRestore>,
    /// Tries to resume it that have failed since the last successful one, whatever the cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unresumed: Option<Unresumed>,
    /// Whether a command (`ckpt-run prune`) is deleting it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_being_deleted: bool,
}

/// The marks of all snapshots of one job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    snapshots: BTreeMap<SnapshotId, Mark>,
}

#[derive(Serialize, Deserialize)]
struct Body {
    version: u32,
    snapshots: BTreeMap<SnapshotId, Mark>,
}

impl Marks {
    /// The marks of `id`.
    #[must_use]
    pub fn of(&self, id: &SnapshotId) -> Option<&Mark> {
        self.snapshots.get(id)
    }

    /// Whether this can be a tag. It needs no quotes in a shell.
    #[must_use]
    pub fn is_tag(text: &str) -> bool {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        !text.is_empty() && text.len() <= TAG_MAX_BYTES && text.bytes().all(fits)
    }

    /// Adds a tag to the snapshot, and removes it from others: a tag names one. Returns the others. A snapshot with a tag is
    /// not pruned.
    ///
    /// # Errors
    /// [`TagError`] if the tag is not valid.
    pub fn tag(&mut self, id: &SnapshotId, tag: &str) -> Result<Vec<SnapshotId>, TagError> {
        // A number is looked for among the snapshots.
        let is_of_snapshot = tag.parse::<u64>().is_ok() || tag.parse::<SnapshotId>().is_ok();
        // So is a word of `--resume`.
        let is_word = ["auto", "never", "required"].contains(&tag);
        if !Self::is_tag(tag) || is_of_snapshot || is_word {
            return Err(TagError(tag.to_owned()));
        }
        let others: Vec<_> = self.tagged(tag).filter(|other| *other != id).cloned().collect();
        for other in &others {
            self.untag(other, tag);
        }
        self.entry(id).tags.insert(tag.to_owned());
        Ok(others)
    }

    /// Removes all tags of the snapshot.
    pub fn untag_all(&mut self, id: &SnapshotId) {
        if let Some(mark) = self.snapshots.get_mut(id) {
            mark.tags.clear();
        }
        self.drop_empty();
    }

    /// Adds the tags in `shared`, marks that several machines have in common. Each tag then names what it names there.
    pub fn add_tags_of(&mut self, shared: &Self) {
        let tags = shared.snapshots.iter().flat_map(|(id, mark)| mark.tags.iter().map(move |tag| (id, tag)));
        for (id, tag) in tags {
            if let Err(error) = self.tag(id, tag) {
                tracing::debug!("a tag of {id} in the object store: {error}");
            }
        }
    }

    /// Removes a tag. Returns whether the snapshot had it.
    pub fn untag(&mut self, id: &SnapshotId, tag: &str) -> bool {
        let was_there = self.snapshots.get_mut(id).is_some_and(|mark| mark.tags.remove(tag));
        self.drop_empty();
        was_there
    }

    /// The snapshots with this tag, oldest first.
    pub fn tagged<'a>(&'a self, tag: &'a str) -> impl Iterator<Item = &'a SnapshotId> {
        self.snapshots.iter().filter(move |(_, mark)| mark.tags.contains(tag)).map(|(id, _)| id)
    }

    /// Exempts the snapshot from pruning.
    pub fn pin(&mut self, id: &SnapshotId) {
        self.entry(id).pinned = true;
    }

    /// Undoes [`Marks::pin`].
    pub fn unpin(&mut self, id: &SnapshotId) {
        self.entry(id).pinned = false;
        self.drop_empty();
    }

    /// Records a restore that failed at this time. From the second one in a row the snapshot is bad.
    pub fn restore_failed(&mut self, id: &SnapshotId, reason: &str, at: SystemTime) {
        let failures = &mut self.entry(id).failed_restores;
        let reason = reason.chars().take(REASON_MAX_CHARS).collect();
        failures.push(FailedRestore { unix_ms: unix_ms(at), reason });
        let surplus = failures.len().saturating_sub(BAD_AFTER_FAILURES);
        failures.drain(..surplus);
    }

    /// Records that the snapshot could not be resumed at this time. Returns how often that was so, and for how long.
    pub fn not_resumed(&mut self, id: &SnapshotId, at: SystemTime) -> (u32, Duration) {
        let begin = Unresumed { since_unix_ms: unix_ms(at), tries: 0 };
        let unresumed = self.entry(id).unresumed.get_or_insert(begin);
        unresumed.tries = unresumed.tries.saturating_add(1);
        (unresumed.tries, Duration::from_millis(unix_ms(at).saturating_sub(unresumed.since_unix_ms)))
    }

    /// Records a successful restore, or the user's assertion that a restore will succeed: the snapshot is not bad.
    pub fn restore_worked(&mut self, id: &SnapshotId) {
        if let Some(mark) = self.snapshots.get_mut(id) {
            mark.failed_restores.clear();
            mark.unresumed = None;
        }
        self.drop_empty();
    }

    /// Whether automatic resumes skip the snapshot because it could not be restored.
    #[must_use]
    pub fn is_bad(&self, id: &SnapshotId) -> bool {
        self.why_bad(id).is_some()
    }

    /// The reason of the last failed restore, if the snapshot is bad.
    #[must_use]
    pub fn why_bad(&self, id: &SnapshotId) -> Option<&str> {
        let failures = &self.of(id)?.failed_restores;
        if failures.len() < BAD_AFTER_FAILURES {
            None
        } else {
            failures.last().map(|last| last.reason.as_str())
        }
    }

    /// Whether it is exempt from pruning: it has a tag or is pinned.
    #[must_use]
    pub fn is_kept(&self, id: &SnapshotId) -> bool {
        self.of(id).is_some_and(|mark| mark.pinned || !mark.tags.is_empty())
    }

    /// Records that those of `ids` which are not exempt from pruning are being deleted, and returns them: a mark that is set
    /// later is too late. No others are being deleted from now on.
    pub fn begin_deletion(&mut self, ids: &[SnapshotId]) -> Vec<SnapshotId> {
        self.snapshots.values_mut().for_each(|mark| mark.is_being_deleted = false);
        let deleted = self.add_deletion(ids);
        self.drop_empty();
        deleted
    }

    /// As [`Self::begin_deletion`], beside others that are being deleted.
    pub fn add_deletion(&mut self, ids: &[SnapshotId]) -> Vec<SnapshotId> {
        let deleted: Vec<_> = ids.iter().filter(|id| !self.is_kept(id)).cloned().collect();
        deleted.iter().for_each(|id| self.entry(id).is_being_deleted = true);
        deleted
    }

    /// The snapshots are not being deleted any more.
    pub fn end_deletion(&mut self, ids: &[SnapshotId]) {
        for id in ids {
            if let Some(mark) = self.snapshots.get_mut(id) {
                mark.is_being_deleted = false;
            }
        }
        self.drop_empty();
    }

    /// The snapshots that are exempt from pruning.
    pub fn kept(&self) -> impl Iterator<Item = &SnapshotId> {
        self.snapshots.keys().filter(|id| self.is_kept(id))
    }

    /// Drops the marks of a removed snapshot.
    pub fn forget(&mut self, id: &SnapshotId) {
        self.snapshots.remove(id);
    }

    fn entry(&mut self, id: &SnapshotId) -> &mut Mark {
        self.snapshots.entry(id.clone()).or_default()
    }

    fn drop_empty(&mut self) {
        self.snapshots.retain(|_, mark| *mark != Mark::default());
    }

    /// Encodes the record, without a code of a key.
    ///
    /// # Panics
    /// Never: every field has a JSON form.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        checked_json::encode_body(self.body())
    }

    pub(crate) fn body(&self) -> String {
        checked_json::body(&Body { version: VERSION, snapshots: self.snapshots.clone() })
    }

    /// Decodes the record that was read from `path`, for error messages.
    ///
    /// # Errors
    /// [`OpenError::Unreadable`] or [`OpenError::Newer`].
    pub fn decode(path: &Path, text: &[u8]) -> Result<Self, OpenError> {
        Self::from_body(path, checked_json::open(text).map(str::to_owned))
    }

    fn from_body(path: &Path, body: Result<String, InvalidRecord>) -> Result<Self, OpenError> {
        let damaged = |error: &dyn Display| OpenError::Unreadable {
            path: path.to_owned(),
            reason: format!("{error}; without this file tags and pins are lost, but no snapshot"),
        };
        let body = body.map_err(|error| damaged(&error))?;
        let found = checked_json::version(&body).map_err(|error| damaged(&error))?;
        if found > VERSION {
            return Err(OpenError::Newer { path: path.to_owned(), found, known: VERSION });
        }
        let body: Body = serde_json::from_str(&body).map_err(|error| damaged(&error))?;
        Ok(Self { snapshots: body.snapshots })
    }
}

impl JobDir {
    /// The marks of the job's snapshots.
    ///
    /// # Errors
    /// If the record exists and cannot be read. Nothing may be pruned then, since a snapshot may have a tag.
    pub fn marks(&self) -> Result<Marks, OpenError> {
        self.decode_marks(&self.read_record(MARKS, &BTreeSet::new())?)
    }

    pub(crate) fn decode_marks(&self, newest: &Newest) -> Result<Marks, OpenError> {
        match self.body_of(MARKS, newest)? {
            Some(body) => Marks::from_body(&self.path_of(MARKS, newest), body),
            None => Ok(Marks::default()),
        }
    }

    /// With a key, writes a record of no marks if there is none: while the job runs, one that somebody else writes is then
    /// not the only one.
    ///
    /// # Errors
    /// As [`JobDir::change_marks`].
    pub fn begin_marks(&self) -> Result<(), OpenError> {
        if self.encryption.is_none() {
            return Ok(());
        }
        self.replace_record(MARKS, |newest| {
            let marks = self.decode_marks(newest)?;
            Ok(newest.content.is_none().then(|| marks.body()))
        })
    }

    /// Changes the marks of the job's snapshots, durably. `change` is called again if somebody else has changed them
    /// meanwhile.
    ///
    /// # Errors
    /// If the record cannot be read or written.
    pub fn change_marks<T>(&self, mut change: impl FnMut(&mut Marks) -> T) -> Result<T, OpenError> {
        let mut result = None;
        self.replace_record(MARKS, |newest| {
            let before = self.decode_marks(newest)?;
            let mut marks = before.clone();
            result = Some(change(&mut marks));
            Ok::<_, OpenError>((marks != before).then(|| marks.body()))
        })?;
        Ok(result.expect("it was changed"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::tests::sample;
    use crate::{JobKey, StoreRoot};

    fn job(dir: &Path) -> JobDir {
        StoreRoot::open_or_create(dir).unwrap().job(&JobKey::named("job").unwrap())
    }

    #[test]
    fn marks_are_stored() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(&dir.path().join("store"));
        let id = sample(7).id;
        assert_eq!(job.marks().unwrap(), Marks::default());
        job.change_marks(|marks| marks.tag(&id, "best")).unwrap().unwrap();
        job.change_marks(|marks| marks.pin(&sample(8).id)).unwrap();
        let marks = job.marks().unwrap();
        assert!(marks.is_kept(&id) && marks.is_kept(&sample(8).id) && !marks.is_kept(&sample(9).id));
        assert_eq!(marks.tagged("best").collect::<Vec<_>>(), [&id]);
        assert!(job.change_marks(|marks| marks.untag(&id, "best")).unwrap());
        assert!(!job.change_marks(|marks| marks.untag(&id, "best")).unwrap(), "removed already");
        job.change_marks(|marks| marks.forget(&sample(8).id)).unwrap();
        assert_eq!(job.marks().unwrap(), Marks::default());
    }

    #[test]
    fn the_second_failure_in_a_row_makes_it_bad() {
        let mut marks = Marks::default();
        let id = sample(1).id;
        marks.restore_failed(&id, "first", UNIX_EPOCH);
        assert!(!marks.is_bad(&id));
        let minute = Duration::from_secs(60);
        assert_eq!(marks.not_resumed(&id, UNIX_EPOCH + minute), (1, Duration::ZERO));
        assert_eq!(marks.not_resumed(&id, UNIX_EPOCH + 3 * minute), (2, 2 * minute));
        assert_eq!(marks.not_resumed(&id, UNIX_EPOCH), (3, Duration::ZERO), "the clock was set back");
        marks.restore_worked(&id);
        assert_eq!(marks.not_resumed(&id, UNIX_EPOCH + 4 * minute), (1, Duration::ZERO));
        marks.restore_worked(&id);
        marks.restore_failed(&id, "second", UNIX_EPOCH);
        assert!(!marks.is_bad(&id), "one restore succeeded in between");
        marks.restore_failed(&id, &"long".repeat(1000), UNIX_EPOCH);
        marks.restore_failed(&id, "last", UNIX_EPOCH);
        assert_eq!(marks.why_bad(&id), Some("last"));
        assert_eq!(marks.of(&id).unwrap().failed_restores.len(), 2, "no more than are needed");
        assert!(marks.of(&id).unwrap().failed_restores[0].reason.len() <= REASON_MAX_CHARS);
        assert!(!marks.is_kept(&id));
        let read = Marks::decode(Path::new("x"), &marks.encode()).unwrap();
        assert_eq!(read, marks);
        marks.restore_worked(&id);
        assert!(!marks.is_bad(&id));
    }

    #[test]
    fn refuses_invalid_tags() {
        let mut marks = Marks::default();
        let too_long = "x".repeat(101);
        for bad in ["", "7", "000007-20260710T143005Z", "never", "a b", "a/b", "ä", too_long.as_str()] {
            assert!(marks.tag(&sample(1).id, bad).is_err(), "{bad:?}");
        }
        assert_eq!(marks, Marks::default());
    }

    #[test]
    fn finds_every_flipped_bit_and_every_length() {
        let mut marks = Marks::default();
        marks.tag(&sample(1).id, "epoch-1").unwrap();
        marks.restore_failed(&sample(2).id, "no such file", UNIX_EPOCH);
        let text = marks.encode();
        for position in 0..text.len() {
            for bit in 0..8 {
                let mut flipped = text.clone();
                flipped[position] ^= 1 << bit;
                let read = Marks::decode(Path::new("marks.json"), &flipped);
                assert!(matches!(read, Err(OpenError::Unreadable { .. })), "{position} {bit}: {read:?}");
            }
            assert!(Marks::decode(Path::new("marks.json"), &text[..position]).is_err(), "{position}");
        }
    }

    #[test]
    fn a_damaged_record_is_named_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(&dir.path().join("store"));
        job.change_marks(|marks| marks.pin(&sample(1).id)).unwrap();
        let path = job.path().join("marks/1.json");
        let mut text = std::fs::read(&path).unwrap();
        text[100] ^= 1;
        std::fs::write(&path, &text).unwrap();
        let error = job.change_marks(|marks| marks.pin(&sample(2).id)).unwrap_err();
        assert!(error.to_string().contains("marks/1.json"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), text);
    }

    #[test]
    fn concurrent_changes_are_all_stored() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(&dir.path().join("store"));
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let job = &job;
                scope.spawn(move || {
                    for number in 1..=5 {
                        let id = sample(thread * 10 + number).id;
                        job.change_marks(|marks| marks.pin(&id)).unwrap();
                    }
                });
            }
        });
        let marks = job.marks().unwrap();
        let pinned = (0..40).filter(|&number| marks.is_kept(&sample(number).id)).count();
        assert_eq!(pinned, 20);
    }
}
