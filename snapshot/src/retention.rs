//! Retention: which snapshots may be pruned.

use crate::store::Listed;
use crate::{Manifest, Marks, ReadError, SnapshotId};
use std::collections::HashSet;
use std::str::FromStr;
use std::time::Duration;

/// How long a job may run after what makes it fail, before it fails: a launcher of ranks polls them every few seconds. A
/// snapshot that is this much older than the newest one is likely to be from before.
pub const FAILURE_LATENCY: Duration = Duration::from_secs(60);

/// Snapshots to keep permanently, besides the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepEvery {
    /// The first snapshot of each period of this length, counted from 1970 UTC.
    Time(Duration),
    /// The first of every N sequence numbers.
    Nth(u64),
}

/// The text is not a valid [`KeepEvery`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither a duration, such as 6h or 1day, nor a number of snapshots from 1 on, such as 100")]
pub struct KeepEveryError(String);

impl FromStr for KeepEvery {
    type Err = KeepEveryError;

    fn from_str(text: &str) -> Result<Self, KeepEveryError> {
        let wrong = || KeepEveryError(text.to_owned());
        if let Ok(number) = text.parse() {
            return if number == 0 { Err(wrong()) } else { Ok(Self::Nth(number)) };
        }
        match humantime::parse_duration(text) {
            Ok(time) if time.as_millis() > 0 => Ok(Self::Time(time)),
            _ => Err(wrong()),
        }
    }
}

impl KeepEvery {
    /// The period that the snapshot belongs to.
    fn period(self, manifest: &Manifest) -> u128 {
        match self {
            Self::Time(time) => u128::from(manifest.taken_unix_ms) / time.as_millis().max(1),
            Self::Nth(count) => u128::from(manifest.id.sequence() / count.max(1)),
        }
    }
}

/// The retention policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// How many of the newest good snapshots to keep, at least 1.
    pub keep: usize,
    /// Further snapshots to keep permanently.
    pub every: Option<KeepEvery>,
    /// Whether to keep a good one that is [`FAILURE_LATENCY`] older than the newest.
    pub before_failures: bool,
}

impl Retention {
    /// Keeps only the newest `keep` snapshots.
    #[must_use]
    pub fn newest(keep: usize) -> Self {
        Self { keep, every: None, before_failures: false }
    }
}

/// The part of the job's history that decides which snapshots it can resume from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// Ranges (first and last sequence number) of snapshots that were abandoned because the job was resumed from an
    /// older one.
    pub abandoned: Vec<(u64, u64)>,
    /// The snapshot from which the job was resumed last, which is not abandoned.
    pub resumed_from: Option<SnapshotId>,
    /// When the watchdog last saw progress, milliseconds since 1970 UTC; `None` without a watchdog. Later snapshots may
    /// be of a hung job.
    pub last_progress_unix_ms: Option<u64>,
}

impl History {
    /// Whether the job was resumed from an older snapshot, and has not returned to this one.
    #[must_use]
    pub fn is_abandoned(&self, id: &SnapshotId) -> bool {
        let number = id.sequence();
        self.resumed_from.as_ref() != Some(id)
            && self.abandoned.iter().any(|(first, last)| (*first..=*last).contains(&number))
    }
}

/// The snapshots to remove, oldest first. These are kept:
/// - the newest `keep` good snapshots. A good snapshot has a readable manifest, is not marked bad, and is not abandoned;
/// - abandoned snapshots, until `keep` good ones are newer;
/// - the newest good snapshot from before the last progress, or else the oldest good one: a hung job resumes from it;
/// - the newest good snapshot before a process of the job failed: newer ones may be of a job that is about to fail;
/// - with `before_failures`, a good snapshot that is [`FAILURE_LATENCY`] older than the newest, for the same reason;
/// - all snapshots newer than the newest good one, for inspection. So the last good snapshot is never removed;
/// - snapshots with a tag, and pinned ones;
/// - snapshots that cannot be read for another reason than certain damage: a missing key, a newer version, an I/O error;
/// - the oldest good snapshot of each period of `every`. It stays the oldest whatever comes later.
#[must_use]
pub fn choose_prunable(
    listed: &[Listed],
    retention: &Retention,
    marks: &Marks,
    history: &History,
) -> Vec<SnapshotId> {
    let mut sound: Vec<&Manifest> = listed.iter().filter_map(|one| one.manifest.as_ref().ok()).collect();
    sound.retain(|manifest| !marks.is_bad(&manifest.id));
    sound.sort_by(|one, other| one.id.cmp(&other.id));
    let good: Vec<&Manifest> =
        sound.iter().copied().filter(|manifest| !history.is_abandoned(&manifest.id)).collect();
    let Some(newest) = good.last() else { return Vec::new() };
    let keep = retention.keep.max(1);
    let oldest = &good[good.len().saturating_sub(keep)].id;
    let stays = |id: &&SnapshotId| good.len() < keep || *id >= oldest;
    let mut kept: HashSet<&SnapshotId> = sound.iter().map(|manifest| &manifest.id).filter(stays).collect();
    if let Some(until) = history.last_progress_unix_ms {
        let worked = good.iter().rev().find(|manifest| manifest.taken_unix_ms <= until);
        kept.extend(worked.or(good.first()).map(|manifest| &manifest.id));
    }
    kept.extend(good.iter().rev().find(|manifest| !manifest.is_doubtful()).map(|manifest| &manifest.id));
    if retention.before_failures {
        kept.extend(before_failures(&good, newest));
    }
    if let Some(every) = retention.every {
        let mut periods = HashSet::new();
        let first = sound.iter().filter(|manifest| periods.insert(every.period(manifest)));
        kept.extend(first.map(|manifest| &manifest.id));
    }
    let is_prunable = |id: &&SnapshotId| **id < newest.id && !kept.contains(id) && !marks.is_kept(id);
    // Other unreadable snapshots may be intact.
    let is_sound_or_damaged = |one: &&Listed| match &one.manifest {
        Ok(_) => true,
        Err(ReadError::Damaged { damage, .. }) => damage.is_certain(),
        Err(_) => false,
    };
    let decided = listed.iter().filter(is_sound_or_damaged).map(|one| &one.id);
    let mut prunable: Vec<_> = decided.filter(is_prunable).cloned().collect();
    prunable.sort();
    prunable
}

/// The newest good snapshot that is [`FAILURE_LATENCY`] older than `newest`, and the one that will be that next. So its
/// age stays below twice that time, and the time between two snapshots.
fn before_failures<'a>(good: &[&'a Manifest], newest: &Manifest) -> impl Iterator<Item = &'a SnapshotId> {
    let is_later = |one: &Manifest, other: &Manifest| {
        u128::from(other.taken_unix_ms.saturating_sub(one.taken_unix_ms)) >= FAILURE_LATENCY.as_millis()
    };
    let sound = || good.iter().copied().filter(|manifest| !manifest.is_doubtful());
    let present = sound().rfind(|manifest| is_later(manifest, newest));
    let next = sound().find(|manifest| present.is_none_or(|present| is_later(present, manifest)));
    present.into_iter().chain(next).map(|manifest| &manifest.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::tests::sample;
    use crate::store::damaged;
    use crate::{Damage, FailedProcess};

    fn listed(states: &[bool]) -> Vec<Listed> {
        let one = |(index, sound): (usize, &bool)| {
            let sequence = index as u64 + 1;
            let manifest = Manifest { taken_unix_ms: sequence * 3_600_000, ..sample(sequence) };
            let id = manifest.id.clone();
            let broken = || damaged(&id, Damage::Manifest("truncated".into()));
            Listed { manifest: if *sound { Ok(manifest) } else { Err(broken()) }, id: id.clone() }
        };
        states.iter().enumerate().map(one).collect()
    }

    fn pruned_with(states: &[bool], retention: &Retention, marks: &Marks) -> Vec<u64> {
        pruned_after(states, retention, marks, &History::default())
    }

    fn pruned_after(states: &[bool], retention: &Retention, marks: &Marks, history: &History) -> Vec<u64> {
        choose_prunable(&listed(states), retention, marks, history).iter().map(SnapshotId::sequence).collect()
    }

    #[test]
    fn the_last_snapshot_before_a_failure_stays() {
        let mut all = listed(&[true; 8]);
        let failed = FailedProcess { pid: 7, name: "python3".to_owned(), code: 137 };
        for one in &mut all[3..] {
            one.manifest.as_mut().unwrap().failed_process = Some(failed.clone());
        }
        let pruned = |all: &[Listed]| -> Vec<u64> {
            let prunable =
                choose_prunable(all, &Retention::newest(2), &Marks::default(), &History::default());
            prunable.iter().map(SnapshotId::sequence).collect()
        };
        assert_eq!(pruned(&all), [1, 2, 4, 5, 6]);
        // The job gets on without the process.
        all[7].manifest.as_mut().unwrap().failed_process = None;
        assert_eq!(pruned(&all), [1, 2, 3, 4, 5, 6]);
    }

    /// Snapshots are pruned after each of them.
    #[test]
    fn one_that_is_a_minute_old_stays() {
        let left_after = |count: u64, seconds: u64, keep: usize| {
            let mut left: Vec<Listed> = Vec::new();
            for sequence in 1..=count {
                let manifest = Manifest { taken_unix_ms: sequence * seconds * 1000, ..sample(sequence) };
                left.push(Listed { id: manifest.id.clone(), manifest: Ok(manifest) });
                let retention = Retention { before_failures: true, ..Retention::newest(keep) };
                let goes = choose_prunable(&left, &retention, &Marks::default(), &History::default());
                left.retain(|one| !goes.contains(&one.id));
            }
            left.iter().map(|one| one.id.sequence()).collect::<Vec<_>>()
        };
        assert_eq!(left_after(10, 5, 2), [1, 9, 10], "none is a minute old");
        assert_eq!(left_after(13, 5, 2), [1, 12, 13]);
        assert_eq!(left_after(20, 5, 2), [1, 13, 19, 20], "13 is the next");
        assert_eq!(left_after(25, 5, 2), [13, 24, 25]);
        assert_eq!(left_after(1000, 5, 2), [985, 997, 999, 1000]);
        assert_eq!(left_after(25, 5, 1), [13, 25]);
        assert_eq!(left_after(9, 60, 2), [8, 9]);
        assert_eq!(left_after(9, 40, 2), [7, 8, 9]);
    }

    fn pruned(states: &[bool], keep: usize) -> Vec<u64> {
        pruned_with(states, &Retention::newest(keep), &Marks::default())
    }

    #[test]
    fn keeps_the_newest_sound_ones() {
        assert_eq!(pruned(&[true, true, true, true], 2), [1, 2]);
        assert_eq!(pruned(&[true, true], 3), [0; 0]);
        assert_eq!(pruned(&[true, true, true], 0), [1, 2], "never the last one");
    }

    /// Checkpoints continue while a job hangs, until the watchdog detects it.
    #[test]
    fn the_newest_from_before_the_last_progress_stays() {
        let (two, marks) = (Retention::newest(2), Marks::default());
        let after =
            |hours: u64| History { last_progress_unix_ms: Some(hours * 3_600_000), ..History::default() };
        assert_eq!(pruned_after(&[true; 6], &two, &marks, &after(3)), [1, 2, 4]);
        assert_eq!(pruned_after(&[true; 6], &two, &marks, &after(6)), [1, 2, 3, 4], "it works");
        assert_eq!(pruned_after(&[true, true, false, true, true, true], &two, &marks, &after(3)), [1, 3, 4]);
        assert_eq!(pruned_after(&[true; 6], &two, &marks, &after(0)), [2, 3, 4], "all are later");
    }

    #[test]
    fn abandoned_ones_do_not_count_and_go_later() {
        let (three, marks) = (Retention::newest(3), Marks::default());
        let history =
            |abandoned: &[(u64, u64)]| History { abandoned: abandoned.to_vec(), ..History::default() };
        // Resumed from 2 on purpose, then 5 was taken.
        assert_eq!(pruned_after(&[true; 5], &three, &marks, &history(&[(3, 4)])), [0; 0]);
        assert_eq!(pruned_after(&[true; 6], &three, &marks, &history(&[(3, 4)])), [1]);
        assert_eq!(pruned_after(&[true; 7], &three, &marks, &history(&[(3, 4)])), [1, 2, 3, 4]);
        assert_eq!(
            pruned_after(&[true; 4], &three, &marks, &history(&[(1, 4)])),
            [0; 0],
            "there is no other"
        );
    }

    #[test]
    fn damaged_ones_are_not_counted_as_kept() {
        assert_eq!(pruned(&[true, true, false, true], 2), [1, 3], "the old damaged one goes");
        assert_eq!(pruned(&[true, false], 1), [0; 0], "the sound one stays although a newer exists");
        assert_eq!(pruned(&[false, false], 1), [0; 0]);
    }

    #[test]
    fn bad_ones_are_not_counted_as_kept() {
        let mut marks = Marks::default();
        for _ in 0..2 {
            marks.restore_failed(&sample(2).id, "no", std::time::UNIX_EPOCH);
            marks.restore_failed(&sample(4).id, "no", std::time::UNIX_EPOCH);
        }
        let two = Retention::newest(2);
        assert_eq!(pruned_with(&[true; 4], &two, &marks), [2], "1 and 3 are the newest two that are good");
        marks.restore_failed(&sample(1).id, "no", std::time::UNIX_EPOCH);
        assert_eq!(pruned_with(&[true; 4], &two, &marks), [2], "one failure does not make it bad");
        for number in [1, 3] {
            marks.restore_failed(&sample(number).id, "no", std::time::UNIX_EPOCH);
            marks.restore_failed(&sample(number).id, "no", std::time::UNIX_EPOCH);
        }
        assert_eq!(pruned_with(&[true; 4], &two, &marks), [0; 0], "nothing goes when there is no good one");
    }

    #[test]
    fn tagged_and_pinned_ones_stay() {
        let mut marks = Marks::default();
        marks.tag(&sample(1).id, "epoch-1").unwrap();
        marks.pin(&sample(3).id);
        let one = Retention::newest(1);
        assert_eq!(pruned_with(&[true; 5], &one, &marks), [2, 4]);
        assert_eq!(pruned_with(&[true, true, false, true, true], &one, &marks), [2, 4], "a damaged one too");
        marks.untag(&sample(1).id, "epoch-1");
        marks.unpin(&sample(3).id);
        assert_eq!(pruned_with(&[true; 5], &one, &marks), [1, 2, 3, 4]);
    }

    #[test]
    fn one_of_each_period_stays() {
        let nth = Retention { every: Some("3".parse().unwrap()), ..Retention::newest(1) };
        assert_eq!(pruned_with(&[true; 8], &nth, &Marks::default()), [2, 4, 5, 7], "1, 3, 6 and the newest");
        let damaged = [true, true, false, true, true, true, true, true];
        assert_eq!(pruned_with(&damaged, &nth, &Marks::default()), [2, 3, 5, 7], "4 stands in for 3");
        let hours = Retention { every: Some("4h".parse().unwrap()), ..Retention::newest(2) };
        assert_eq!(
            pruned_with(&[true; 10], &hours, &Marks::default()),
            [2, 3, 5, 6, 7],
            "1, 4, 8, and 9, 10"
        );
    }

    #[test]
    fn pruning_often_and_pruning_once_keep_the_same() {
        let retention = Retention { every: Some(KeepEvery::Nth(5)), ..Retention::newest(2) };
        let all = listed(&[true; 40]);
        let mut left: Vec<Listed> = Vec::new();
        for one in listed(&[true; 40]) {
            left.push(one);
            let goes = choose_prunable(&left, &retention, &Marks::default(), &History::default());
            left.retain(|one| !goes.contains(&one.id));
        }
        let goes = choose_prunable(&all, &retention, &Marks::default(), &History::default());
        let once: Vec<_> = all.iter().map(|one| &one.id).filter(|id| !goes.contains(id)).collect();
        assert_eq!(left.iter().map(|one| &one.id).collect::<Vec<_>>(), once);
    }

    #[test]
    fn reads_durations_and_numbers() {
        assert_eq!("6h".parse(), Ok(KeepEvery::Time(Duration::from_secs(6 * 3600))));
        assert_eq!("100".parse(), Ok(KeepEvery::Nth(100)));
        for bad in ["", "0", "0s", "-1", "6 hats", "1.5"] {
            assert!(bad.parse::<KeepEvery>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_io_error_is_no_reason_to_prune() {
        let mut all = listed(&[true, true, true, true]);
        let source = std::io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error());
        all[0].manifest = Err(damaged(&sample(1).id, Damage::Unreadable { path: "1".into(), source }));
        assert_eq!(
            choose_prunable(&all, &Retention::newest(1), &Marks::default(), &History::default()),
            [all[1].id.clone(), all[2].id.clone()]
        );
    }

    #[test]
    fn a_missing_key_is_no_reason_to_prune() {
        let mut all = listed(&[true, true, true, true]);
        all[0].manifest = Err(ReadError::Key { what: "1".into(), reason: "another key" });
        assert_eq!(
            choose_prunable(&all, &Retention::newest(1), &Marks::default(), &History::default()),
            [all[1].id.clone(), all[2].id.clone()]
        );
    }
}
