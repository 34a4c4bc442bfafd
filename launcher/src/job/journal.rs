//! What has happened to a job, kept beside its snapshots for `ckpt-run explain` and `ckpt-run report`: one JSON object per line in
//! `jobs/KEY/journal.jsonl`, the newest last. The file is bounded; nothing depends on it.

use crate::job::status::unix_ms;
use ckpt_protocol::control::StallPhases;
use ckpt_snapshot::pack::PackId;
use ckpt_snapshot::{JobDir, SnapshotId, open_regular, read_regular, write_atomically};
use crossbeam_channel::Sender;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::SystemTime;

/// Above this size, the older half of the entries is deleted. An entry of a snapshot takes about 500 bytes.
const LIMIT_BYTES: u64 = 4 << 20;
/// A longer file is not read.
const MAX_BYTES: u64 = 64 << 20;

/// What an entry is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// A launcher has taken the job.
    LauncherStarted,
    /// The launcher has left the job.
    LauncherEnded,
    /// The job was started from its beginning.
    Started,
    /// The job was resumed from a snapshot.
    Resumed,
    /// The job could not be started or resumed.
    NotStarted,
    /// A snapshot is durable.
    Saved,
    /// A snapshot is in memory, and lost with the launcher unless it is saved later.
    InMemory,
    /// A checkpoint failed.
    NotSaved,
    /// The job failed.
    Failed,
    /// The job will be restarted.
    Restarting,
    /// The job is not restarted any more.
    GaveUp,
    /// The job was preempted or stopped.
    Preempted,
    /// The job was ended by its user, or with a last snapshot.
    Ended,
    /// The job exited with 0.
    Complete,
    /// The last lines that the job wrote before it ended. The entry of its end follows.
    Output,
    /// A rank of NCCL does nothing while others wait for it.
    RankLate,
    /// The start or resume waits for something outside of the job.
    Waiting,
    /// Something else that the job's user should know.
    Noted,
    /// The launcher was killed. No journal has this: `ckpt-run explain` finds out.
    Died,
    /// An entry of a newer ckpt-run.
    #[serde(other)]
    Other,
}

/// What was measured, for the times of the job. Entries of earlier versions have nothing of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// When it began: the launcher, a start or resume, or, of a failure, the hang. Milliseconds since 1970 UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begun_unix_ms: Option<u64>,
    /// When the job's command ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_unix_ms: Option<u64>,
    /// Of a launcher: until when the job is known to have run before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alive_unix_ms: Option<u64>,
    /// When the snapshot was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_unix_ms: Option<u64>,
    /// How long the job was paused for the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_us: Option<u64>,
    /// What that time went into.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_phases: Option<StallPhases>,
    /// From the begin of the checkpoint until its snapshot was durable, or in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durable_ms: Option<u64>,
    /// The size of the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Bytes that the snapshot added to the store, or to memory if it is only there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_bytes: Option<u64>,
    /// The same before compression: what has changed since older snapshots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed_bytes: Option<u64>,
    /// The machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The job was started from the beginning since its user asked for that.
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_anew: bool,
}

impl Measured {
    fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

fn is_false(value: &bool) -> bool {
    !value
}

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// When, milliseconds since 1970 UTC.
    pub unix_ms: u64,
    /// PID of the launcher.
    pub launcher_pid: u32,
    /// The launcher: a random name, since in containers each launcher may have the same PID. Empty in entries of earlier versions.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub launcher: String,
    /// What it is about.
    pub kind: EventKind,
    /// What happened, for people.
    pub what: String,
    /// What to do about it, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// The snapshot that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// What was measured.
    #[serde(default, skip_serializing_if = "Measured::is_nothing")]
    pub measured: Measured,
}

impl Entry {
    /// An entry of now.
    #[must_use]
    pub fn new(kind: EventKind, what: impl Into<String>) -> Self {
        Self {
            unix_ms: unix_ms(SystemTime::now()),
            launcher_pid: std::process::id(),
            launcher: THIS_LAUNCHER.clone(),
            kind,
            what: what.into(),
            remedy: None,
            snapshot: None,
            measured: Measured::default(),
        }
    }

    /// Whether both are of the same launcher.
    #[must_use]
    pub fn is_of_launcher_of(&self, other: &Self) -> bool {
        (self.launcher_pid, &self.launcher) == (other.launcher_pid, &other.launcher)
    }

    /// Entries as lines of text.
    ///
    /// # Panics
    /// Never: an entry has a JSON form.
    #[must_use]
    pub fn lines(entries: &[Self]) -> Vec<u8> {
        let mut lines = Vec::new();
        for entry in entries {
            serde_json::to_writer(&mut lines, entry).expect("an entry has a JSON form");
            lines.push(b'\n');
        }
        lines
    }

    /// The entries in lines of text. Those that are damaged are left out.
    pub fn in_lines(lines: &[u8]) -> impl Iterator<Item = Self> {
        lines.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok())
    }

    /// Adds what was measured.
    #[must_use]
    pub fn measured(self, measured: Measured) -> Self {
        Self { measured, ..self }
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn remedy(self, remedy: Option<impl Into<String>>) -> Self {
        Self { remedy: remedy.map(Into::into), ..self }
    }

    /// Adds the snapshot that it is about.
    #[must_use]
    pub fn snapshot(self, id: Option<impl ToString>) -> Self {
        Self { snapshot: id.map(|id| id.to_string()), ..self }
    }
}

/// The name of this launcher in its entries. Without random numbers, its PID alone has to do.
static THIS_LAUNCHER: LazyLock<String> =
    LazyLock::new(|| PackId::random().map(|id| id.to_string()).unwrap_or_default());

/// Where entries are kept. The job's lock has to be held to write any.
pub struct Journal {
    path: PathBuf,
    /// Whether a failed write was reported. Held while the file is written.
    is_failure_reported: Mutex<bool>,
    /// Who else gets the entries.
    listeners: Mutex<Vec<Sender<Entry>>>,
}

impl Journal {
    /// The journal of a job.
    #[must_use]
    pub fn of(job: &JobDir) -> Self {
        Self::at(job.path().join("journal.jsonl"))
    }

    fn at(path: PathBuf) -> Self {
        Self { path, is_failure_reported: Mutex::default(), listeners: Mutex::default() }
    }

    /// From now on, new entries are sent to `listener` too, until [`Self::end_listening`].
    pub fn listen(&self, listener: Sender<Entry>) {
        self.listeners.lock().push(listener);
    }

    /// No listener gets any more entries.
    pub fn end_listening(&self) {
        self.listeners.lock().clear();
    }

    /// Adds an entry. A failed write is reported once, and has no other effect.
    pub fn add(&self, entry: &Entry) {
        let mut is_reported = self.is_failure_reported.lock();
        if let Err(error) = append(&self.path, entry)
            && !*is_reported
        {
            tracing::warn!(
                "{} cannot be written, so `ckpt-run explain` and `report` cannot report on this run: {error}",
                self.path.display()
            );
            *is_reported = true;
        }
        drop(is_reported);
        self.listeners.lock().retain(|listener| listener.send(entry.clone()).is_ok());
    }

    /// Adds entries of other machines.
    ///
    /// # Errors
    /// When the journal cannot be read or written.
    pub fn add_others(&self, others: Vec<Entry>) -> io::Result<()> {
        let _writing = self.is_failure_reported.lock();
        let here = self.entries()?;
        let had = here.len();
        let merged = with_others(here, others, Some(&Entry::new(EventKind::LauncherStarted, "")));
        if merged.len() == had {
            return Ok(());
        }
        write_atomically(&self.path, &Entry::lines(&merged))
    }

    /// Says for what the start or resume waits, and adds that: `what` begins with "waiting".
    pub fn waiting(&self, what: impl Into<String>) {
        let entry = Entry::new(EventKind::Waiting, what);
        self.add(&entry);
        tracing::info!("{}", entry.what);
    }

    /// For what the launcher with this PID waits before the job runs. It goes on with another entry.
    #[must_use]
    pub fn waits_for(&self, launcher_pid: u32) -> Option<String> {
        let last = self.entries().ok()?.pop()?;
        (last.kind == EventKind::Waiting && last.launcher_pid == launcher_pid).then_some(last.what)
    }

    /// All entries, oldest first. Unreadable lines are skipped: a full disk may have truncated one.
    ///
    /// # Errors
    /// When the file exists and cannot be read.
    pub fn entries(&self) -> io::Result<Vec<Entry>> {
        let content = match read_regular(&self.path, MAX_BYTES) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        Ok(Entry::in_lines(&content).collect())
    }

    /// The newest entry that says whether the job runs, or how it ended.
    #[must_use]
    pub fn last_turn(&self) -> Option<Entry> {
        use EventKind::{Complete, Ended, Failed, NotStarted, Resumed, Started};
        let is_turn =
            |entry: &Entry| matches!(entry.kind, Started | Resumed | NotStarted | Failed | Ended | Complete);
        self.entries().unwrap_or_default().into_iter().rfind(is_turn)
    }

    /// The newest snapshot that was in memory and, as far as is known, nowhere else.
    #[must_use]
    pub fn newest_in_memory_only(&self) -> Option<SnapshotId> {
        let entries = self.entries().unwrap_or_default();
        let of = |kind: EventKind| -> BTreeSet<SnapshotId> {
            let all = entries.iter().filter(|entry| entry.kind == kind);
            all.filter_map(|entry| entry.snapshot.as_ref()?.parse().ok()).collect()
        };
        of(EventKind::InMemory).difference(&of(EventKind::Saved)).last().cloned()
    }
}

/// The entries of this machine and those of others, by time. What the launcher of `own` has added, if there is one, comes last,
/// whatever the clocks of the machines say.
#[must_use]
pub fn with_others(mut here: Vec<Entry>, others: Vec<Entry>, own: Option<&Entry>) -> Vec<Entry> {
    let is_own = |entry: &Entry| {
        entry.kind == EventKind::LauncherStarted && own.is_some_and(|own| entry.is_of_launcher_of(own))
    };
    let own = here.split_off(here.iter().rposition(is_own).unwrap_or(here.len()));
    let mut known: HashSet<(u64, String)> =
        here.iter().chain(&own).map(|entry| (entry.unix_ms, entry.what.clone())).collect();
    let (mut all, had) = (here, known.len());
    all.extend(others.into_iter().filter(|entry| known.insert((entry.unix_ms, entry.what.clone()))));
    if known.len() > had {
        all.sort_by_key(|entry| entry.unix_ms);
    }
    all.extend(own);
    all
}

fn append(path: &Path, entry: &Entry) -> io::Result<()> {
    let mut file = open_regular(path, File::options().append(true).create(true).mode(0o600))?;
    if file.metadata()?.len() > LIMIT_BYTES {
        shorten(path)?;
        file = open_regular(path, File::options().append(true))?;
    }
    // A newline comes first too, so that a truncated line before does not damage this one.
    let mut line = b"\n".to_vec();
    serde_json::to_writer(&mut line, entry)?;
    line.push(b'\n');
    file.write_all(&line)
}

/// Deletes the older half of the file.
fn shorten(path: &Path) -> io::Result<()> {
    // One that is far too long is not of ckpt-run, and is emptied.
    let content = read_regular(path, MAX_BYTES).unwrap_or_default();
    let middle = content.len() / 2;
    let end =
        content[middle..].iter().position(|&byte| byte == b'\n').map_or(content.len(), |at| middle + at);
    write_atomically(path, &content[end..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journal(dir: &Path) -> Journal {
        Journal::at(dir.join("journal.jsonl"))
    }

    #[test]
    fn entries_are_read_back_and_damage_costs_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let journal = journal(dir.path());
        assert_eq!(journal.entries().unwrap(), []);
        let first =
            Entry::new(EventKind::Failed, "it failed").remedy(Some("fix it")).snapshot(Some("000001"));
        journal.add(&first);
        let mut file = File::options().append(true).open(&journal.path).unwrap();
        file.write_all(b"{\"unix_ms\":1,\"laun").unwrap();
        let second = Entry::new(EventKind::Started, "started");
        journal.add(&second);
        assert_eq!(journal.entries().unwrap(), [first, second]);
    }

    #[test]
    fn snapshots_only_in_memory_are_known() {
        let dir = tempfile::tempdir().unwrap();
        let journal = journal(dir.path());
        let id = |number| SnapshotId::new(number, SystemTime::UNIX_EPOCH);
        let add = |kind, number| journal.add(&Entry::new(kind, "").snapshot(Some(id(number))));
        assert_eq!(journal.newest_in_memory_only(), None);
        // The entry of the copy may come before the entry of the snapshot.
        add(EventKind::Saved, 1);
        add(EventKind::InMemory, 1);
        assert_eq!(journal.newest_in_memory_only(), None);
        add(EventKind::InMemory, 2);
        add(EventKind::InMemory, 3);
        add(EventKind::Saved, 3);
        assert_eq!(journal.newest_in_memory_only(), Some(id(2)));
    }

    #[test]
    fn entries_of_other_machines_come_before_those_of_this_launcher() {
        let entry = |unix_ms, kind, launcher_pid, what: &str| Entry {
            unix_ms,
            launcher_pid,
            ..Entry::new(kind, what)
        };
        let old = entry(10, EventKind::LauncherStarted, 7, "old");
        let own =
            [entry(90, EventKind::LauncherStarted, 1, "own"), entry(91, EventKind::Resumed, 1, "resumed")];
        let others = [entry(5, EventKind::Started, 1, "a"), entry(95, EventKind::Saved, 1, "late clock")];
        let here = [std::slice::from_ref(&old), &own[..]].concat();
        let all = [&others[..1], &[old], &others[1..], &own].concat();
        assert_eq!(with_others(here.clone(), others.to_vec(), Some(&here[1])), all);
        assert_eq!(with_others(all.clone(), others.to_vec(), Some(&here[1])), all, "again");
        let by_time = with_others(here, others.to_vec(), None);
        assert!(by_time.is_sorted_by_key(|entry| entry.unix_ms) && by_time.len() == 5);

        let dir = tempfile::tempdir().unwrap();
        let journal = journal(dir.path());
        let first = Entry::new(EventKind::LauncherStarted, "first");
        journal.add(&first);
        journal.add_others(others.to_vec()).unwrap();
        journal.add_others(others.to_vec()).unwrap();
        let last = Entry::new(EventKind::Started, "last");
        journal.add(&last);
        assert_eq!(journal.entries().unwrap(), [&others[..], &[first, last]].concat());
    }

    #[test]
    fn it_is_bounded_and_keeps_the_newest() {
        let dir = tempfile::tempdir().unwrap();
        let journal = journal(dir.path());
        let long = "x".repeat(40_000);
        for number in 0..400 {
            journal.add(&Entry::new(EventKind::Saved, format!("{number} {long}")));
        }
        let entries = journal.entries().unwrap();
        assert!(std::fs::metadata(&journal.path).unwrap().len() < LIMIT_BYTES + 50_000);
        assert!(entries.len() > 50 && entries.last().unwrap().what.starts_with("399 "));
        let numbers: Vec<u32> =
            entries.iter().map(|entry| entry.what.split(' ').next().unwrap().parse().unwrap()).collect();
        assert!(numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{numbers:?}");
    }

    #[test]
    fn entries_of_earlier_versions_have_no_measurements() {
        let line = r#"{"unix_ms":1,"launcher_pid":2,"kind":"saved","what":"w"}"#;
        let entry: Entry = serde_json::from_str(line).unwrap();
        assert_eq!(entry.measured, Measured::default());
        assert_eq!(serde_json::to_string(&entry).unwrap(), line);
    }

    #[test]
    fn event_kinds_of_a_newer_version_are_accepted() {
        let line = r#"{"unix_ms":1,"launcher_pid":2,"kind":"invented-later","what":"w"}"#;
        assert_eq!(serde_json::from_str::<Entry>(line).unwrap().kind, EventKind::Other);
    }
}
