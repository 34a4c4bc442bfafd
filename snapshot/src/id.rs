//! Names of snapshots.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::SystemTime;

/// A snapshot's name, `000012-20261121T114512Z`: its sequence number in the job, then the time of the checkpoint
/// (UTC). The number decides which snapshot is newer; the time is for people, since clocks can go backwards.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SnapshotId {
    sequence: u64,
    time: String,
}

/// Why a string is not a [`SnapshotId`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not a snapshot ID (they look like 000012-20261121T114512Z)")]
pub struct IdError(pub String);

impl SnapshotId {
    /// The name of the snapshot number `sequence`, taken at `time`.
    #[must_use]
    pub fn new(sequence: u64, time: SystemTime) -> Self {
        let time = humantime::format_rfc3339_seconds(time).to_string().replace(['-', ':'], "");
        Self { sequence, time }
    }

    /// The snapshot's sequence number in its job, from 1.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Whether `text`, typed by a user, matches this snapshot: the full name, the number, or a prefix of the name that
    /// includes the number and its hyphen.
    #[must_use]
    pub fn answers_to(&self, text: &str) -> bool {
        let name = self.to_string();
        name == text
            || text.parse::<u64>() == Ok(self.sequence)
            || (text.contains('-') && name.starts_with(text))
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:06}-{}", self.sequence, self.time)
    }
}

impl FromStr for SnapshotId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let error = || IdError(text.to_owned());
        let (number, time) = text.split_once('-').ok_or_else(error)?;
        let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        let time_fits = time.len() == 16
            && time.is_ascii()
            && digits(&time[..8])
            && &time[8..9] == "T"
            && digits(&time[9..15])
            && time.ends_with('Z');
        if !digits(number) || !time_fits {
            return Err(error());
        }
        let id = Self { sequence: number.parse().map_err(|_| error())?, time: time.to_owned() };
        // Each snapshot has one spelling: "1-…" and "0000001-…" are refused.
        if id.to_string() == text { Ok(id) } else { Err(error()) }
    }
}

impl TryFrom<String> for SnapshotId {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        text.parse()
    }
}

impl From<SnapshotId> for String {
    fn from(id: SnapshotId) -> Self {
        id.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn names_sort_by_number_and_read_back() {
        let older = SnapshotId::new(9, UNIX_EPOCH + Duration::from_secs(2_000_000_000));
        let newer = SnapshotId::new(10, UNIX_EPOCH + Duration::from_secs(1_000_000_000));
        assert!(older < newer);
        assert_eq!(newer.to_string(), "000010-20010909T014640Z");
        assert_eq!(newer.to_string().parse::<SnapshotId>().unwrap(), newer);
    }

    #[test]
    fn refuses_other_names() {
        for bad in [
            "",
            "1",
            "..",
            "1-20010909T014640Z",
            "000010-2001",
            "000010-20010909T014640Z/x",
            "x-20010909T014640Z",
        ] {
            assert!(bad.parse::<SnapshotId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn answers_to_short_forms() {
        let id: SnapshotId = "000010-20010909T014640Z".parse().unwrap();
        for good in ["10", "000010", "000010-", "000010-2001", "000010-20010909T014640Z"] {
            assert!(id.answers_to(good), "{good}");
        }
        for bad in ["1", "00001", "", "000010-2002"] {
            assert!(!id.answers_to(bad), "{bad}");
        }
    }
}
