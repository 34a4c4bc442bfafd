//! Until when the job may have changed files. While the job runs, the launcher touches `jobs/KEY/alive` in the store. A
//! change of a file after that is not the job's: a person may have edited the file after the job died. Where the init
//! records what the job writes, its last record says the same more exactly.

use crate::files::inventory::nanoseconds;
use crate::files::tracking;
use crate::sys::authentic::{opened, sealed};
use crate::sys::deadline::{HEARTBEAT_INTERVAL, RECORD_SYNC_INTERVAL};
use crate::sys::host;
use anyhow::{Context, Result};
use ckpt_snapshot::{JobDir, read_regular, write_atomically};
use rustix::fs::{Timespec, Timestamps, UTIME_NOW};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A job that is killed together with its init and its launcher may have run for this long after the last record of it: on
/// a busy machine a record is late. A change of a file within this time may have been made before the record, too: a write
/// is recorded when it ends. So a person's change within this time counts as the job's.
const UNRECORDED: Duration = Duration::from_secs(2);

/// The record of a resume that changes files, in the job's directory.
const PUT_BACK: &str = "put-back.json";
/// A longer record is not read (bytes): it is damaged.
const RECORD_MAX_BYTES: u64 = 256 << 20;

/// The boot and machine on which a job runs.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Boot {
    hostname: String,
    boot_id: String,
}

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    #[serde(flatten)]
    boot: Boot,
    /// Whether the init records what the job writes.
    is_tracked: bool,
}

impl Boot {
    fn of_this_machine() -> Self {
        let facts = host::facts();
        Self { hostname: facts.hostname, boot_id: facts.boot_id }
    }
}

/// The last time at which the job may have run.
#[derive(Debug, Default)]
pub struct LastAlive {
    /// Changes up to here may be the job's, nanoseconds since 1970 UTC.
    pub until_ns: i64,
    /// What the job has written up to here is recorded; 0 if nothing is.
    pub known_until_ns: i64,
    /// Whether the machine has not been rebooted since. Otherwise data may be lost that was not on disk.
    pub is_same_boot: bool,
    /// Paths that an interrupted resume may have changed.
    pub interrupted: BTreeSet<String>,
}

/// A resume that changes files, for the next one if it is interrupted.
#[derive(Serialize, Deserialize)]
struct PutBack {
    until_ns: i64,
    is_same_boot: bool,
    paths: BTreeSet<String>,
}

impl LastAlive {
    /// Whether it was recorded what the job wrote. The last moments may be missing.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.known_until_ns > 0
    }

    /// What the job has written up to here is recorded.
    #[must_use]
    pub fn known_until(&self) -> SystemTime {
        since_1970(self.known_until_ns)
    }

    /// Changes up to here may be the job's.
    #[must_use]
    pub fn until(&self) -> SystemTime {
        since_1970(self.until_ns)
    }

    /// Reads when the job of this directory last ran. Unknown means now.
    #[must_use]
    pub fn read(dir: &JobDir) -> Self {
        let path = alive_path(dir);
        let now_ns = nanoseconds(SystemTime::now());
        let beat = fs::metadata(&path).and_then(|meta| meta.modified()).ok();
        let record = read_regular(&path, RECORD_MAX_BYTES)
            .ok()
            .and_then(|text| serde_json::from_slice::<Record>(&text).ok());
        let here = Boot::of_this_machine();
        let is_same_boot = record.as_ref().is_some_and(|record| record.boot == here);
        let is_same_machine = record.as_ref().is_some_and(|record| record.boot.hostname == here.hostname);
        let is_tracked = record.is_some_and(|record| record.is_tracked);
        let (until_ns, known_until_ns) = match (beat, tracking::last_recorded(dir).filter(|_| is_tracked)) {
            (Some(_), Some(last)) if is_same_boot && last.is_end => {
                let end_ns = nanoseconds(last.at);
                // All is known: no time counts as unrecorded.
                (end_ns, end_ns.saturating_add(1))
            }
            (Some(_), Some(last)) if is_same_boot => {
                (nanoseconds(last.at + UNRECORDED), nanoseconds(last.at - UNRECORDED))
            }
            (Some(beat), None) if is_same_boot => (nanoseconds(beat + UNRECORDED), 0),
            // The machine went down some time after. The last records were not on the disk.
            (Some(_), last) if is_same_machine => {
                let durable_ns = last.and_then(|_| tracking::durable_until_ns(dir));
                (
                    booted_ns(now_ns),
                    durable_ns.map_or(0, |at_ns| at_ns - nanoseconds(UNIX_EPOCH + UNRECORDED)),
                )
            }
            _ => (now_ns, 0),
        };
        let mut found =
            Self { until_ns: until_ns.min(now_ns), known_until_ns, is_same_boot, ..Self::default() };
        let interrupted = read_regular(&put_back_path(dir), RECORD_MAX_BYTES).ok();
        let key = dir.file_key(PUT_BACK);
        let interrupted =
            interrupted.and_then(|line| serde_json::from_slice::<PutBack>(opened(&key, &line)?).ok());
        if let Some(interrupted) = interrupted {
            found.until_ns = interrupted.until_ns;
            found.is_same_boot &= interrupted.is_same_boot;
            found.interrupted = interrupted.paths;
        }
        found
    }

    /// Records that a resume is about to change these paths, and others that an interrupted one may have changed.
    ///
    /// # Errors
    /// When that cannot be written.
    pub fn begin_put_back(&self, dir: &JobDir, paths: impl Iterator<Item = String>) -> Result<()> {
        let paths = paths.chain(self.interrupted.iter().cloned()).collect();
        let record = PutBack { until_ns: self.until_ns, is_same_boot: self.is_same_boot, paths };
        let path = put_back_path(dir);
        let sealed = sealed(&dir.file_key(PUT_BACK), &serde_json::to_string(&record)?);
        write_atomically(&path, sealed.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Records that all files are put back.
///
/// # Errors
/// When the record cannot be removed.
pub fn end_put_back(dir: &JobDir) -> io::Result<()> {
    match fs::remove_file(put_back_path(dir)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn alive_path(dir: &JobDir) -> PathBuf {
    dir.path().join("alive")
}

fn put_back_path(dir: &JobDir) -> PathBuf {
    dir.path().join(PUT_BACK)
}

fn since_1970(ns: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(ns.try_into().unwrap_or(0))
}

/// When this machine was booted.
fn booted_ns(now_ns: i64) -> i64 {
    let Timespec { tv_sec, .. } = clock_gettime(ClockId::Boottime);
    now_ns.saturating_sub(tv_sec.saturating_mul(1_000_000_000))
}

/// When the job was last known to run; `None` if it never was. The heartbeat is late by half of its interval on average;
/// what the init has recorded at its end is exact.
#[must_use]
pub fn last_beat(dir: &JobDir) -> Option<SystemTime> {
    let beat = fs::metadata(alive_path(dir)).ok()?.modified().ok()?;
    let end = tracking::last_recorded(dir).filter(|last| last.is_end && last.at + UNRECORDED > beat);
    Some(end.map_or(beat + HEARTBEAT_INTERVAL / 2, |last| last.at))
}

/// The machine on which that was.
#[must_use]
pub fn host_of_beat(dir: &JobDir) -> Option<String> {
    let text = read_regular(&alive_path(dir), RECORD_MAX_BYTES).ok()?;
    Some(serde_json::from_slice::<Record>(&text).ok()?.boot.hostname)
}

/// Touches the file while the job runs, until it is dropped.
pub struct Heartbeat {
    _end: Sender<()>,
}

impl Heartbeat {
    /// Begins.
    ///
    /// # Errors
    /// When the file cannot be written, or the thread cannot be started.
    pub fn begin(dir: &JobDir, is_tracked: bool) -> Result<Self> {
        let path = alive_path(dir);
        let failed = || format!("cannot write {}", path.display());
        let record = Record { boot: Boot::of_this_machine(), is_tracked };
        write_atomically(&path, &serde_json::to_vec(&record)?).with_context(failed)?;
        let file = File::options().write(true).open(&path).with_context(failed)?;
        let (end, ended) = channel::<()>();
        let dir = dir.clone();
        let beat = move || {
            let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
            let (mut durable, mut synced) = (UNIX_EPOCH, Instant::now());
            while ended.recv_timeout(HEARTBEAT_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let times = Timestamps { last_access: now, last_modification: now };
                if let Err(error) = rustix::fs::futimens(&file, &times) {
                    tracing::debug!("cannot touch the job's file `alive`: {error}");
                }
                if is_tracked && synced.elapsed() >= RECORD_SYNC_INTERVAL {
                    if let Err(error) = tracking::make_durable(&dir, &mut durable) {
                        tracing::debug!("cannot write to the disk what files the job writes: {error}");
                    }
                    synced = Instant::now();
                }
            }
        };
        std::thread::Builder::new()
            .name("heartbeat".to_owned())
            .spawn(beat)
            .context("cannot start a thread")?;
        Ok(Self { _end: end })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_snapshot::{JobKey, SnapshotId, StoreRoot};

    #[test]
    fn the_last_time_that_a_job_ran_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let root = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = root.job(&JobKey::named("job").unwrap());
        drop(job.lock_to_run(|_| ()).unwrap());
        let before = nanoseconds(SystemTime::now());
        assert!(LastAlive::read(&job).until_ns >= before, "unknown: now");
        drop(Heartbeat::begin(&job, false).unwrap());
        let file = File::options().write(true).open(alive_path(&job)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
        let read = LastAlive::read(&job);
        assert!(read.is_same_boot && read.until_ns < before - 3_000_000_000_000, "{read:?}");
        fs::write(alive_path(&job), r#"{"hostname":"elsewhere","boot_id":"x","is_tracked":true}"#).unwrap();
        let moved = LastAlive::read(&job);
        assert!(!moved.is_same_boot && moved.until_ns >= before);
        // A reboot: what is recorded is what was on the disk.
        let here =
            serde_json::json!({"hostname": host::facts().hostname, "boot_id": "x", "is_tracked": true});
        fs::write(alive_path(&job), here.to_string()).unwrap();
        let unrecorded = LastAlive::read(&job);
        assert!(!unrecorded.is_recorded() && unrecorded.until_ns < before, "{unrecorded:?}");
        let id = SnapshotId::new(1, SystemTime::UNIX_EPOCH);
        fs::create_dir(job.path().join("written")).unwrap();
        let written = job.path().join("written").join(id.to_string());
        // As the init does after a write.
        let at = SystemTime::now() - Duration::from_secs(1);
        File::create(&written).unwrap().set_modified(at).unwrap();
        let mut durable = SystemTime::UNIX_EPOCH;
        tracking::make_durable(&job, &mut durable).unwrap();
        let rebooted = LastAlive::read(&job);
        assert_eq!(rebooted.known_until_ns, nanoseconds(at - UNRECORDED), "{rebooted:?}");
        assert!(rebooted.until_ns < before, "{rebooted:?}");
        // An interrupted resume has changed files long after the job ended.
        read.begin_put_back(&job, ["/a".to_owned()].into_iter()).unwrap();
        let again = LastAlive::read(&job);
        assert_eq!((again.until_ns, again.interrupted.len()), (read.until_ns, 1));
        end_put_back(&job).unwrap();
        end_put_back(&job).unwrap();
        assert!(LastAlive::read(&job).interrupted.is_empty());
    }
}
