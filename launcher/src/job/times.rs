//! What the time of a job went into, over all its sessions and the gaps between them, computed from the journal.
//!
//! ```text
//!   away ──► starting ──► running ──► ending ──► away
//!              ▲  │          │ failed             ▲
//!              │  └► waiting ◄                    │
//!              └────────┴─────────────────────────┘ also when the launcher is killed
//! ```
//!
//! *Work* is time in which the job ran: not paused by a checkpoint, not hung. A snapshot contains the work up to it. A
//! session that is resumed from it does again what earlier sessions had done after it; only work beyond that is
//! productive. So productive time is the furthest point that the job has reached.

use super::alive;
use super::journal::{Entry, EventKind, Journal};
use super::status::unix_ms;
use ckpt_protocol::control::StallPhases;
use ckpt_snapshot::JobDir;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::time::SystemTime;

/// What a stretch of time went into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// The job did work that it had not done before.
    Productive,
    /// The job was paused by a checkpoint, or its last snapshot was being stored.
    Stall,
    /// The job did work again that was in no snapshot when a session ended.
    Redone,
    /// The job was being started or resumed.
    Restart,
    /// The job had failed, and the launcher waited before the restart.
    Waiting,
    /// The job hung, until the watchdog ended it.
    Hang,
    /// No launcher was running.
    Away,
}

impl Class {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Productive, Self::Stall, Self::Redone, Self::Restart, Self::Waiting, Self::Hang, Self::Away];

    /// The name in metrics and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Productive => "productive",
            Self::Stall => "stall",
            Self::Redone => "redone",
            Self::Restart => "restart",
            Self::Waiting => "waiting",
            Self::Hang => "hang",
            Self::Away => "away",
        }
    }
}

/// What the journal cannot say.
#[derive(Clone, Copy, Debug, Default)]
pub struct Live {
    /// When the journal was read, milliseconds since 1970 UTC.
    pub now_unix_ms: u64,
    /// Whether a launcher has the job now.
    pub is_running: bool,
    /// Until when the job is known to have run, milliseconds since 1970 UTC.
    pub alive_unix_ms: Option<u64>,
    /// Whether the newest launcher may run on another machine: what it has not written is not known.
    pub is_elsewhere: bool,
}

/// A stretch of time of one class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Segment {
    /// Its class.
    pub class: Class,
    /// When it began, milliseconds since 1970 UTC.
    pub begun_unix_ms: u64,
    /// When it ended.
    pub ended_unix_ms: u64,
}

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SessionEnding {
    /// The job has ended with 0.
    Complete,
    /// The job failed.
    Failed,
    /// The job hung and was ended.
    Hung,
    /// The job was preempted or stopped.
    Ended,
    /// The launcher was killed, or the machine went down.
    Killed,
    /// The session could not begin.
    NotStarted,
}

/// One session, or one that could not begin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Session {
    /// When the job began to run, milliseconds since 1970 UTC.
    pub begun_unix_ms: u64,
    /// When it ended; none while it runs.
    pub ended_unix_ms: Option<u64>,
    /// How it ended.
    pub ending: Option<SessionEnding>,
    /// What ended it, for people.
    pub what: Option<String>,
    /// What to do about it, for people.
    pub remedy: Option<String>,
    /// The snapshot that it was resumed from; none if it was started from the beginning.
    pub resumed_from: Option<String>,
    /// How long the start or resume took.
    pub restart_ms: u64,
    /// Work of earlier sessions that this one had to do again.
    pub redo_ms: u64,
    /// The machine, if it was recorded.
    pub host: Option<String>,
    /// PID of the launcher.
    pub launcher_pid: u32,
}

/// One snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// Its ID.
    pub id: String,
    /// When it was taken, milliseconds since 1970 UTC.
    pub taken_unix_ms: u64,
    /// How long the job was paused, microseconds.
    pub stall_us: u64,
    /// What that time went into; none of earlier versions.
    pub stall_phases: Option<StallPhases>,
    /// From the begin of the checkpoint until the snapshot was durable, or in memory.
    pub durable_ms: Option<u64>,
    /// Its size.
    pub bytes: Option<u64>,
    /// Bytes that it added to the store, or to memory if it is only there.
    pub stored_bytes: Option<u64>,
    /// The same before compression: what has changed since older snapshots.
    pub changed_bytes: Option<u64>,
    /// Whether it was never copied from memory to the store, as far as is known.
    pub is_in_memory_only: bool,
    /// The work in it.
    pub work_ms: Option<u64>,
}

impl Snapshot {
    fn of(id: String, entry: &Entry) -> Self {
        let measured = &entry.measured;
        Self {
            id,
            taken_unix_ms: measured.taken_unix_ms.unwrap_or(entry.unix_ms),
            stall_us: measured.stall_us.unwrap_or(0),
            stall_phases: measured.stall_phases,
            durable_ms: measured.durable_ms,
            bytes: measured.bytes,
            stored_bytes: measured.stored_bytes,
            changed_bytes: measured.changed_bytes,
            is_in_memory_only: entry.kind == EventKind::InMemory,
            work_ms: None,
        }
    }

    /// What was in memory was copied to the store: from now on, that counts as written.
    fn copied(&mut self, stored_bytes: Option<u64>, changed_bytes: Option<u64>) {
        self.is_in_memory_only = false;
        self.stored_bytes = stored_bytes.or(self.stored_bytes);
        self.changed_bytes = changed_bytes.or(self.changed_bytes);
    }
}

/// The cost of all snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Number of snapshots.
    pub snapshots: u64,
    /// How long the job was paused for them, microseconds.
    pub stall_us: u64,
    /// What that time went into, as far as it is known.
    pub stall_phases: StallPhases,
    /// Their size.
    pub bytes: u64,
    /// What had changed, before compression, of the snapshots of which it is known; without those that are only in memory.
    pub changed_bytes: u64,
    /// Bytes that were written to the store for the same snapshots.
    pub changed_stored_bytes: u64,
    /// Bytes that were written to the store for all snapshots.
    pub stored_bytes: u64,
}

impl Totals {
    fn of(snapshots: &[Snapshot]) -> Self {
        let mut totals = Self { snapshots: snapshots.len() as u64, ..Self::default() };
        for one in snapshots {
            totals.stall_us += one.stall_us;
            totals.stall_phases.add(&one.stall_phases.unwrap_or_default());
            totals.bytes += one.bytes.unwrap_or(0);
            if one.is_in_memory_only {
                continue;
            }
            let stored_bytes = one.stored_bytes.unwrap_or(0);
            totals.stored_bytes += stored_bytes;
            if let Some(changed_bytes) = one.changed_bytes {
                totals.changed_bytes += changed_bytes;
                totals.changed_stored_bytes += stored_bytes;
            }
        }
        totals
    }
}

/// A rank that did nothing while others waited for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LateRank {
    /// When it was found, milliseconds since 1970 UTC.
    pub found_unix_ms: u64,
    /// What was known of it, for people.
    pub what: String,
}

/// The time of a job since its start from the beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Times {
    /// The first start, milliseconds since 1970 UTC.
    pub begun_unix_ms: u64,
    /// Until when time counts: now, or the end of the last launcher.
    pub ended_unix_ms: u64,
    /// Milliseconds in each class. Their sum is the whole time.
    pub time_ms: BTreeMap<Class, u64>,
    /// Work that was in the snapshots from which sessions were resumed, added up over all resumes: without snapshots, each
    /// of them would have done it again. So it may be more than the job's whole time.
    pub kept_ms: u64,
    /// Work after the newest snapshot: a failure now would lose it.
    pub unsaved_ms: u64,
    /// Whether the oldest entries of the journal have been deleted: the time before is not counted.
    pub is_shortened: bool,
    /// What happened when. Stretches follow each other without a gap.
    pub timeline: Vec<Segment>,
    /// The command of the newest session.
    pub command: String,
    /// The sessions, oldest first.
    pub sessions: Vec<Session>,
    /// The snapshots, oldest first.
    pub snapshots: Vec<Snapshot>,
    /// What they have cost.
    pub totals: Totals,
    /// Ranks that did nothing while others waited for them, oldest first.
    pub late_ranks: Vec<LateRank>,
    /// The most work that the job had done, in whatever session.
    #[serde(skip)]
    pub furthest_ms: u64,
}

impl Times {
    /// All the time.
    #[must_use]
    pub fn whole_ms(&self) -> u64 {
        self.ended_unix_ms - self.begun_unix_ms
    }

    /// The share of the time that was productive: effective training time.
    #[must_use]
    pub fn effective_ratio(&self) -> Option<f64> {
        let whole_ms = Some(self.whole_ms()).filter(|whole_ms| *whole_ms > 0)?;
        Some(self.of(Class::Productive) as f64 / whole_ms as f64)
    }

    /// The work that a resume from this snapshot does again, if it is known how much work is in the snapshot.
    #[must_use]
    pub fn work_after(&self, id: &str) -> Option<u64> {
        let snapshot = self.snapshots.iter().rfind(|snapshot| snapshot.id == id)?;
        Some(self.furthest_ms.saturating_sub(snapshot.work_ms?))
    }

    /// The time of one class, milliseconds.
    #[must_use]
    pub fn of(&self, class: Class) -> u64 {
        self.time_ms.get(&class).copied().unwrap_or(0)
    }
}

/// The times of a job in the store, as far as its journal here says.
///
/// # Errors
/// When its journal cannot be read.
pub fn of_job(job: &JobDir, is_running: bool) -> io::Result<Option<Times>> {
    Ok(of_entries(job, is_running, false, &Journal::of(job).entries()?))
}

/// The times of a job with these entries; `is_elsewhere` is whether its newest launcher may run on another machine.
#[must_use]
pub fn of_entries(job: &JobDir, is_running: bool, is_elsewhere: bool, entries: &[Entry]) -> Option<Times> {
    // The file is of the machine on which the job ran last in this directory.
    let (beat, newest) = (alive::host_of_beat(job), newest_host(entries));
    let is_of_newest = beat.is_none() || newest.is_none() || beat.as_deref() == newest;
    let live = Live {
        now_unix_ms: unix_ms(SystemTime::now()),
        is_running,
        alive_unix_ms: alive::last_beat(job).filter(|_| is_of_newest).map(unix_ms),
        is_elsewhere,
    };
    times(entries, live)
}

/// The machine of the launcher that has begun last, if it is recorded.
#[must_use]
pub fn newest_host(entries: &[Entry]) -> Option<&str> {
    let newest = entries.iter().rfind(|entry| entry.kind == EventKind::LauncherStarted)?;
    newest.measured.host.as_deref()
}

/// The times of the newest run of a job; `None` if the journal has no start of it.
#[must_use]
pub fn times(entries: &[Entry], live: Live) -> Option<Times> {
    let mut ledger = Ledger::default();
    entries.iter().for_each(|entry| ledger.add(entry));
    ledger.close(live)
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Away,
    Starting,
    Running,
    Waiting,
    /// The job is not running any more, and the launcher ends.
    Ending,
}

#[derive(Default)]
struct Ledger {
    /// All time before is counted; 0 before the first entry.
    at_ms: u64,
    phase: Phase,
    /// The work of the job's state.
    work_ms: u64,
    furthest_ms: u64,
    host: Option<String>,
    /// An entry of the launcher that has begun last.
    newest_launcher: Option<Entry>,
    /// When a later one has said that it waits, before it has begun.
    next_waits_ms: Option<u64>,
    /// When the last entry was written.
    written_ms: u64,
    /// The next start begins a new run.
    is_complete: bool,
    /// The first of `times.snapshots` that was taken in the present session.
    first_snapshot: usize,
    times: Times,
}

impl Ledger {
    fn add(&mut self, entry: &Entry) {
        // It says nothing of an earlier launcher, whose end comes only with what this one writes once it has the job.
        if entry.kind == EventKind::Waiting {
            return self.waits(entry);
        }
        let at_ms = entry.unix_ms;
        if self.at_ms == 0 {
            self.begin(entry);
        }
        let begun_ms = entry.measured.begun_unix_ms.unwrap_or(at_ms);
        let ended_ms = entry.measured.ended_unix_ms.unwrap_or(at_ms);
        match entry.kind {
            EventKind::LauncherStarted => self.launcher_started(entry, begun_ms),
            EventKind::Started | EventKind::Resumed => self.session_began(entry, begun_ms),
            EventKind::NotStarted => self.not_started(entry, begun_ms),
            EventKind::Saved | EventKind::InMemory => self.saved(entry),
            EventKind::Failed => {
                let hung_ms = entry.measured.begun_unix_ms;
                let ending = if hung_ms.is_some() { SessionEnding::Hung } else { SessionEnding::Failed };
                self.session_ended(ended_ms, hung_ms, ending, Some(entry));
                self.advance(Class::Restart, at_ms);
                self.phase = Phase::Waiting;
            }
            EventKind::Complete | EventKind::Ended => {
                let is_complete = entry.kind == EventKind::Complete;
                let ending = if is_complete { SessionEnding::Complete } else { SessionEnding::Ended };
                self.session_ended(ended_ms, None, ending, Some(entry));
                self.advance(self.idle_class(), at_ms);
                self.is_complete = is_complete;
                self.phase = Phase::Ending;
            }
            EventKind::GaveUp => {
                self.advance(self.idle_class(), at_ms);
                self.phase = Phase::Ending;
            }
            EventKind::LauncherEnded => {
                self.session_ended(at_ms, None, SessionEnding::Ended, None);
                if !self.is_complete {
                    self.advance(self.idle_class(), at_ms);
                }
                self.phase = Phase::Away;
            }
            EventKind::RankLate => {
                let what = entry.what.clone();
                self.times.late_ranks.push(LateRank { found_unix_ms: at_ms, what });
            }
            EventKind::NotSaved
            | EventKind::Restarting
            | EventKind::Preempted
            | EventKind::Waiting
            | EventKind::Noted
            | EventKind::Output
            | EventKind::Died
            | EventKind::Other => {}
        }
        // Notes are written before the launcher has recorded itself, too.
        if entry.kind != EventKind::Noted {
            self.written_ms = at_ms;
        }
    }

    /// A start or resume waits: that of the launcher that has begun last, or of one that has not begun yet.
    fn waits(&mut self, entry: &Entry) {
        if !self.newest_launcher.as_ref().is_some_and(|newest| newest.is_of_launcher_of(entry)) {
            self.next_waits_ms = Some(entry.unix_ms);
        }
    }

    /// Begins with the first entry of the journal, or of a run.
    fn begin(&mut self, entry: &Entry) {
        let begun_ms = entry.measured.begun_unix_ms.unwrap_or(entry.unix_ms);
        let is_start = matches!(
            entry.kind,
            EventKind::LauncherStarted | EventKind::Started | EventKind::Resumed | EventKind::NotStarted
        );
        self.at_ms = if is_start { begun_ms } else { entry.unix_ms };
        self.times.begun_unix_ms = self.at_ms;
        self.times.is_shortened = !is_start || entry.kind == EventKind::Resumed;
        if matches!(entry.kind, EventKind::Saved | EventKind::InMemory | EventKind::NotSaved) {
            // The entry of the session's begin has been deleted.
            self.open_session(entry, None, 0, 0);
        }
    }

    fn launcher_started(&mut self, entry: &Entry, begun_ms: u64) {
        self.killed(entry.measured.alive_unix_ms, begun_ms);
        if self.is_complete {
            *self = Self { at_ms: begun_ms, ..Self::default() };
            self.times.begun_unix_ms = begun_ms;
        }
        self.advance(self.idle_class(), begun_ms);
        (self.newest_launcher, self.next_waits_ms) = (Some(entry.clone()), None);
        self.host.clone_from(&entry.measured.host);
        self.phase = Phase::Starting;
    }

    /// If a session has not ended, its launcher was killed.
    fn killed(&mut self, alive_ms: Option<u64>, until_ms: u64) {
        let ended_ms = alive_ms.unwrap_or(0).max(self.written_ms).min(until_ms);
        self.session_ended(ended_ms, None, SessionEnding::Killed, None);
        self.phase = Phase::Away;
    }

    fn session_began(&mut self, entry: &Entry, begun_ms: u64) {
        if self.phase == Phase::Running {
            // A journal of an earlier version: nothing says when that launcher was killed.
            self.killed(None, begun_ms);
        }
        if self.is_complete || entry.measured.is_anew {
            let (host, from_ms) = (self.host.take(), if self.is_complete { begun_ms } else { self.at_ms });
            *self = Self { at_ms: from_ms, host, phase: self.phase, ..Self::default() };
            self.times.begun_unix_ms = from_ms;
        }
        self.advance(self.idle_class(), begun_ms);
        self.advance(Class::Restart, entry.unix_ms);
        self.work_ms = match (&entry.snapshot, entry.kind) {
            (Some(id), EventKind::Resumed) => {
                let known = self.times.snapshots.iter().rfind(|snapshot| snapshot.id == *id);
                known.and_then(|snapshot| snapshot.work_ms).unwrap_or(self.furthest_ms)
            }
            _ => 0,
        };
        (self.newest_launcher, self.next_waits_ms) = (Some(entry.clone()), None);
        self.times.kept_ms += self.work_ms;
        self.times.command.clone_from(&entry.what);
        let redo_ms = self.furthest_ms.saturating_sub(self.work_ms);
        self.open_session(entry, entry.snapshot.clone(), entry.unix_ms.saturating_sub(begun_ms), redo_ms);
    }

    fn open_session(&mut self, entry: &Entry, resumed_from: Option<String>, restart_ms: u64, redo_ms: u64) {
        self.phase = Phase::Running;
        self.first_snapshot = self.times.snapshots.len();
        self.times.sessions.push(Session {
            begun_unix_ms: self.at_ms,
            ended_unix_ms: None,
            ending: None,
            what: None,
            remedy: None,
            resumed_from,
            restart_ms,
            redo_ms,
            host: self.host.clone(),
            launcher_pid: entry.launcher_pid,
        });
    }

    fn not_started(&mut self, entry: &Entry, begun_ms: u64) {
        self.advance(self.idle_class(), begun_ms);
        self.advance(Class::Restart, entry.unix_ms);
        self.open_session(entry, None, entry.unix_ms.saturating_sub(begun_ms), 0);
        self.session_ended(entry.unix_ms, None, SessionEnding::NotStarted, Some(entry));
        self.phase = Phase::Waiting;
    }

    fn saved(&mut self, entry: &Entry) {
        let Some(id) = entry.snapshot.clone() else { return };
        let measured = &entry.measured;
        let snapshot = Snapshot::of(id, entry);
        match self.times.snapshots.iter_mut().rfind(|known| known.id == snapshot.id) {
            Some(known) if measured.taken_unix_ms.is_none() => {
                known.copied(measured.stored_bytes, measured.changed_bytes);
            }
            // The entry of the copy was written before.
            Some(known) => {
                let (stored_bytes, changed_bytes) = (known.stored_bytes, known.changed_bytes);
                *known = snapshot;
                known.copied(stored_bytes, changed_bytes);
            }
            None => self.times.snapshots.push(snapshot),
        }
    }

    /// Ends the session, if there is one, and counts its time.
    fn session_ended(
        &mut self,
        ended_ms: u64,
        hung_ms: Option<u64>,
        ending: SessionEnding,
        entry: Option<&Entry>,
    ) {
        if self.phase != Phase::Running {
            return;
        }
        let last = entry.and_then(|entry| entry.snapshot.as_deref());
        self.count_session(ended_ms, hung_ms, last);
        self.phase = Phase::Ending;
        let Some(session) = self.times.sessions.last_mut() else { return };
        session.ended_unix_ms = Some(self.at_ms);
        session.ending = Some(ending);
        session.what = entry.map(|entry| entry.what.clone());
        session.remedy = entry.and_then(|entry| entry.remedy.clone());
    }

    /// Counts the time of the session: its work, its pauses, and its hang. The job did not run after its `last` snapshot.
    fn count_session(&mut self, ended_ms: u64, hung_ms: Option<u64>, last: Option<&str>) {
        let ended_ms = ended_ms.max(self.at_ms);
        let worked_until_ms = hung_ms.unwrap_or(ended_ms).clamp(self.at_ms, ended_ms);
        let mut taken: Vec<_> = (self.first_snapshot..self.times.snapshots.len()).collect();
        taken.sort_by_key(|&at| self.times.snapshots[at].taken_unix_ms);
        for at in taken {
            let Snapshot { taken_unix_ms, stall_us, stall_phases, .. } = self.times.snapshots[at];
            let stall_ms = (stall_us + 500) / 1000;
            // The agents attach after it was taken.
            let attach_ms = stall_phases.map_or(0, |phases| (phases.attach_us + 500) / 1000).min(stall_ms);
            let paused_ms = taken_unix_ms.saturating_sub(stall_ms - attach_ms);
            let paused_ms = paused_ms.clamp(self.at_ms, worked_until_ms);
            self.work_until(paused_ms);
            self.times.snapshots[at].work_ms = Some(self.work_ms);
            let is_last = last == Some(&self.times.snapshots[at].id);
            let continued_ms = if is_last { worked_until_ms } else { paused_ms + stall_ms };
            self.advance(Class::Stall, continued_ms.min(worked_until_ms));
        }
        self.work_until(worked_until_ms);
        self.advance(Class::Hang, ended_ms);
    }

    fn work_until(&mut self, until_ms: u64) {
        let worked_ms = until_ms.saturating_sub(self.at_ms);
        let again_ms = self.furthest_ms.saturating_sub(self.work_ms).min(worked_ms);
        self.advance(Class::Redone, self.at_ms + again_ms);
        self.advance(Class::Productive, until_ms);
        self.work_ms += worked_ms;
        self.furthest_ms = self.furthest_ms.max(self.work_ms);
    }

    /// Counts the time up to `until_ms`. Clocks may jump: no time is counted twice.
    fn advance(&mut self, class: Class, until_ms: u64) {
        if until_ms <= self.at_ms {
            return;
        }
        *self.times.time_ms.entry(class).or_default() += until_ms - self.at_ms;
        match self.times.timeline.last_mut() {
            Some(last) if last.class == class => last.ended_unix_ms = until_ms,
            _ => self.times.timeline.push(Segment {
                class,
                begun_unix_ms: self.at_ms,
                ended_unix_ms: until_ms,
            }),
        }
        self.at_ms = until_ms;
    }

    /// What time without a session counts as.
    fn idle_class(&self) -> Class {
        match self.phase {
            Phase::Away => Class::Away,
            Phase::Starting => Class::Restart,
            Phase::Waiting => Class::Waiting,
            Phase::Running | Phase::Ending => Class::Stall,
        }
    }

    fn close(mut self, live: Live) -> Option<Times> {
        match self.phase {
            Phase::Running if live.is_running => match self.next_waits_ms {
                None => self.count_session(live.now_unix_ms, None, None),
                // The launcher that runs is not the session's.
                Some(waits_ms) => {
                    self.killed(live.alive_unix_ms, waits_ms);
                    self.advance(Class::Away, live.now_unix_ms);
                }
            },
            Phase::Running if live.is_elsewhere => self.count_session(self.written_ms, None, None),
            Phase::Running => self.killed(live.alive_unix_ms, live.now_unix_ms),
            Phase::Starting | Phase::Waiting if live.is_running => {
                self.advance(self.idle_class(), live.now_unix_ms);
            }
            Phase::Ending if live.is_running && !self.is_complete => {
                self.advance(Class::Stall, live.now_unix_ms);
            }
            _ => {}
        }
        if self.at_ms == 0 {
            return None;
        }
        let newest_ms = self.times.snapshots.iter().rev().find_map(|snapshot| snapshot.work_ms);
        let unsaved_ms =
            if self.is_complete { 0 } else { self.work_ms.saturating_sub(newest_ms.unwrap_or(0)) };
        let (ended_unix_ms, furthest_ms) = (self.at_ms, self.furthest_ms);
        let mut times = Times { ended_unix_ms, unsaved_ms, furthest_ms, ..self.times };
        times.totals = Totals::of(&times.snapshots);
        for class in Class::ALL {
            times.time_ms.entry(class).or_default();
        }
        Some(times)
    }
}

#[cfg(test)]
mod truth;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::journal::Measured;
    use proptest::prelude::*;

    fn entry(kind: EventKind, at_ms: u64, measured: Measured) -> Entry {
        Entry { unix_ms: at_ms, ..Entry::new(kind, "what").measured(measured) }
    }

    fn launcher(begun_ms: u64, alive_ms: u64) -> Entry {
        let measured = Measured {
            begun_unix_ms: Some(begun_ms),
            alive_unix_ms: Some(alive_ms).filter(|at| *at > 0),
            host: Some("node-1".to_owned()),
            ..Measured::default()
        };
        entry(EventKind::LauncherStarted, begun_ms + 5, measured)
    }

    fn began(begun_ms: u64, at_ms: u64, from: Option<&str>) -> Entry {
        let kind = if from.is_some() { EventKind::Resumed } else { EventKind::Started };
        let measured = Measured { begun_unix_ms: Some(begun_ms), ..Measured::default() };
        entry(kind, at_ms, measured).snapshot(from)
    }

    fn saved(id: &str, taken_ms: u64, stall_ms: u64) -> Entry {
        let measured = Measured {
            taken_unix_ms: Some(taken_ms),
            stall_us: Some(stall_ms * 1000),
            durable_ms: Some(400),
            bytes: Some(5000),
            ..Measured::default()
        };
        entry(EventKind::Saved, taken_ms + 300, measured).snapshot(Some(id))
    }

    fn ended(kind: EventKind, ended_ms: u64, at_ms: u64) -> Entry {
        entry(kind, at_ms, Measured { ended_unix_ms: Some(ended_ms), ..Measured::default() })
    }

    fn running(now_unix_ms: u64) -> Live {
        Live { now_unix_ms, is_running: true, ..Live::default() }
    }

    /// Productive, stall, redone, restart, waiting, hang, away.
    fn classes(times: &Times) -> [u64; 7] {
        assert_eq!(times.time_ms.values().sum::<u64>(), times.whole_ms());
        assert_eq!(times.timeline.first().map(|first| first.begun_unix_ms), Some(times.begun_unix_ms));
        assert_eq!(times.timeline.last().map(|last| last.ended_unix_ms), Some(times.ended_unix_ms));
        assert!(times.timeline.windows(2).all(|pair| pair[0].ended_unix_ms == pair[1].begun_unix_ms));
        Class::ALL.map(|class| times.of(class))
    }

    /// A job that starts at 1 s, runs from 1.1 s, and is saved at 3 s.
    fn first() -> Vec<Entry> {
        vec![launcher(1000, 0), began(1020, 1100, None), saved("1", 3000, 100)]
    }

    #[test]
    fn a_running_job() {
        let times = times(&first(), running(5000)).unwrap();
        assert_eq!(classes(&times), [3800, 100, 0, 100, 0, 0, 0]);
        assert_eq!((times.begun_unix_ms, times.unsaved_ms, times.kept_ms), (1000, 2000, 0));
        assert_eq!(times.snapshots[0].work_ms, Some(1800));
        assert_eq!(times.sessions[0].host.as_deref(), Some("node-1"));
        assert!((times.effective_ratio().unwrap() - 0.95).abs() < 1e-9);
    }

    #[test]
    fn without_a_start_there_is_nothing_to_tell() {
        assert_eq!(times(&[], running(5)), None);
    }

    #[test]
    fn work_after_the_snapshot_is_done_again_after_a_failure() {
        let mut entries = first();
        // It fails at 4 s, 1000 ms after its snapshot; a snapshot that was in progress is stored until 4.2 s.
        entries.push(ended(EventKind::Failed, 4000, 4200));
        entries.push(entry(EventKind::Restarting, 4200, Measured::default()));
        entries.push(began(5000, 5300, Some("1")));
        let early = times(&entries, running(5800)).unwrap();
        assert_eq!(classes(&early), [2800, 100, 500, 600, 800, 0, 0]);
        let later = times(&entries, running(7300)).unwrap();
        assert_eq!(classes(&later), [3800, 100, 1000, 600, 800, 0, 0]);
        assert_eq!(
            (later.kept_ms, later.sessions[1].redo_ms, later.sessions[1].restart_ms),
            (1800, 1000, 300)
        );
        assert_eq!(later.sessions[0].ending, Some(SessionEnding::Failed));
    }

    /// What is written before a launcher has recorded itself is no sign of life of the one before, nor a start.
    #[test]
    fn a_launcher_that_waits_before_its_start_changes_nothing() {
        let waiting = |at| entry(EventKind::Waiting, at, Measured::default());
        let noted = |at| entry(EventKind::Noted, at, Measured::default());
        let again = || [launcher(90_000, 4000), began(90_010, 90_300, Some("1"))];
        let plain: Vec<_> = first().into_iter().chain(again()).collect();
        let between = [waiting(90_003), noted(90_004)];
        let waited: Vec<_> = first().into_iter().chain(between).chain(again()).collect();
        assert_eq!(times(&waited, running(91_000)), times(&plain, running(91_000)));
        let begun: Vec<_> = [waiting(500)].into_iter().chain(first()).collect();
        assert_eq!(times(&begun, running(5000)), times(&first(), running(5000)));
        assert_eq!(times(&[waiting(500)], running(5000)), None);
    }

    #[test]
    fn a_killed_launcher_was_away() {
        let mut entries = first();
        entries.extend([launcher(9000, 4500), began(9100, 9500, Some("1"))]);
        let times = times(&entries, running(9500)).unwrap();
        assert_eq!(classes(&times), [3300, 100, 0, 600, 0, 0, 4500]);
        assert_eq!(times.sessions[0].ending, Some(SessionEnding::Killed));
        assert_eq!(times.sessions[1].redo_ms, 1500);
    }

    /// The launcher was killed at 4.5 s. Another one waits for other nodes from 5 s on.
    #[test]
    fn time_in_which_the_next_launcher_waits_is_no_work() {
        let mut entries = first();
        let mut waiting = entry(EventKind::Waiting, 5000, Measured::default());
        waiting.launcher_pid += 1;
        entries.push(waiting);
        let live = Live { alive_unix_ms: Some(4500), ..running(9000) };
        let found = times(&entries, live).unwrap();
        assert_eq!(classes(&found), [3300, 100, 0, 100, 0, 0, 4500]);
        assert_eq!(found.sessions[0].ending, Some(SessionEnding::Killed));
        // In another container, it has the same PID.
        entries[3].launcher_pid = entries[0].launcher_pid;
        entries[3].launcher = "other".to_owned();
        assert_eq!(times(&entries, live), Some(found));
        // The session's own launcher waits, such as for a port.
        entries[3].launcher = entries[0].launcher.clone();
        assert_eq!(times(&entries, live).unwrap().of(Class::Away), 0);
    }

    #[test]
    fn time_after_the_last_launcher_does_not_count() {
        let dead = Live { now_unix_ms: 999_000, alive_unix_ms: Some(4500), ..Live::default() };
        let times = times(&first(), dead).unwrap();
        assert_eq!((classes(&times), times.ended_unix_ms), ([3300, 100, 0, 100, 0, 0, 0], 4500));
        assert_eq!((times.unsaved_ms, times.sessions[0].ending), (1500, Some(SessionEnding::Killed)));
    }

    /// Neither the time without the job counts, nor that between the snapshot and a session that began from it later.
    #[test]
    fn work_that_a_resume_does_again() {
        let mut entries = first();
        let dead = |alive_ms| Live { now_unix_ms: 999_000, alive_unix_ms: Some(alive_ms), ..Live::default() };
        assert_eq!(times(&entries, dead(4500)).unwrap().work_after("1"), Some(1500));
        entries.extend([launcher(90_000, 4500), began(90_100, 90_500, Some("1"))]);
        assert_eq!(times(&entries, dead(91_000)).unwrap().work_after("1"), Some(1500));
        assert_eq!(times(&entries, dead(93_500)).unwrap().work_after("1"), Some(3000));
        assert_eq!(times(&entries, dead(93_500)).unwrap().work_after("2"), None);
    }

    #[test]
    fn a_hang_is_neither_work_nor_are_its_snapshots() {
        let mut entries = first();
        let measured =
            Measured { begun_unix_ms: Some(3500), ended_unix_ms: Some(9000), ..Measured::default() };
        entries.extend([saved("2", 5000, 100), entry(EventKind::Failed, 9000, measured)]);
        entries.push(began(9000, 9200, Some("1")));
        let times = times(&entries, running(9700)).unwrap();
        assert_eq!(classes(&times), [2300, 100, 500, 300, 0, 5500, 0]);
        assert_eq!(times.sessions[0].ending, Some(SessionEnding::Hung));
    }

    #[test]
    fn a_preempted_job_stores_its_last_snapshot_and_is_away() {
        let mut entries = first();
        entries.push(entry(EventKind::Preempted, 4000, Measured::default()));
        entries.push(saved("2", 4200, 100));
        entries.push(ended(EventKind::Ended, 4250, 4600).snapshot(Some("2")));
        entries.push(entry(EventKind::LauncherEnded, 4700, Measured::default()));
        let over = Live { now_unix_ms: 50_000, ..Live::default() };
        let stopped = times(&entries, over).unwrap();
        assert_eq!(classes(&stopped), [2900, 700, 0, 100, 0, 0, 0]);
        assert_eq!(stopped.unsaved_ms, 0);
        entries.extend([launcher(10_000, 4300), began(10_000, 10_400, Some("2"))]);
        let resumed = times(&entries, running(10_400)).unwrap();
        assert_eq!(classes(&resumed), [2900, 700, 0, 500, 0, 0, 5300]);
        assert_eq!((resumed.kept_ms, resumed.sessions[1].redo_ms), (2900, 0));
    }

    #[test]
    fn a_complete_job_is_over_and_the_next_start_is_a_new_run() {
        let mut entries = first();
        entries.push(ended(EventKind::Complete, 4000, 4010));
        entries.push(entry(EventKind::LauncherEnded, 4500, Measured::default()));
        let over = Live { now_unix_ms: 50_000, ..Live::default() };
        let complete = times(&entries, over).unwrap();
        assert_eq!((complete.ended_unix_ms, complete.unsaved_ms), (4010, 0));
        entries.extend([launcher(10_000, 4000), began(10_010, 10_100, None)]);
        let again = times(&entries, running(10_600)).unwrap();
        assert_eq!((classes(&again), again.begun_unix_ms), ([500, 0, 0, 100, 0, 0, 0], 10_000));
        assert_eq!((again.sessions.len(), again.snapshots.len()), (1, 0));
    }

    #[test]
    fn a_job_that_its_user_starts_anew_is_a_new_run() {
        let mut entries = first();
        entries.push(launcher(10_000, 4000));
        let mut anew = began(10_010, 10_100, None);
        anew.measured.is_anew = true;
        entries.push(anew);
        let again = times(&entries, running(10_600)).unwrap();
        assert_eq!((classes(&again), again.begun_unix_ms), ([500, 0, 0, 100, 0, 0, 0], 10_000));
    }

    #[test]
    fn a_restart_that_cannot_begin_waits_again() {
        let mut entries = first();
        entries.push(ended(EventKind::Failed, 4000, 4000));
        let measured = Measured { begun_unix_ms: Some(5000), ..Measured::default() };
        entries.push(entry(EventKind::NotStarted, 5500, measured));
        entries.push(began(7500, 7600, Some("1")));
        let times = times(&entries, running(7600)).unwrap();
        assert_eq!(classes(&times), [2800, 100, 0, 700, 3000, 0, 0]);
        assert_eq!(times.sessions[1].ending, Some(SessionEnding::NotStarted));
        assert_eq!(
            [1, 2].map(|at| times.sessions[at].redo_ms),
            [0, 1000],
            "what has not run does nothing again"
        );
    }

    #[test]
    fn snapshots_in_memory_are_durable_once_copied() {
        let mut entries = first();
        entries[2].kind = EventKind::InMemory;
        assert!(times(&entries, running(5000)).unwrap().snapshots[0].is_in_memory_only);
        entries.push(entry(EventKind::Saved, 4000, Measured::default()).snapshot(Some("1")));
        let copied = times(&entries, running(5000)).unwrap();
        assert_eq!((copied.snapshots.len(), copied.snapshots[0].is_in_memory_only), (1, false));
        assert_eq!(copied.snapshots[0].stall_us, 100_000);
    }

    #[test]
    fn what_a_copy_from_memory_wrote_counts_whatever_comes_first() {
        let bytes = |stored_bytes, changed_bytes| Measured {
            stored_bytes: Some(stored_bytes),
            changed_bytes: Some(changed_bytes),
            ..Measured::default()
        };
        let mut in_memory = saved("1", 3000, 100);
        in_memory.kind = EventKind::InMemory;
        in_memory.measured =
            Measured { stored_bytes: Some(900), changed_bytes: Some(900), ..in_memory.measured };
        let copy = entry(EventKind::Saved, 4000, bytes(70, 80)).snapshot(Some("1"));
        let begin = &first()[..2];
        for both in [[in_memory.clone(), copy.clone()], [copy, in_memory.clone()]] {
            let entries = [begin, &both].concat();
            let copied = times(&entries, running(5000)).unwrap();
            let one = &copied.snapshots[0];
            assert_eq!((one.stored_bytes, one.changed_bytes, one.bytes), (Some(70), Some(80), Some(5000)));
            assert_eq!((one.stall_us, one.is_in_memory_only), (100_000, false));
            assert_eq!((copied.totals.stored_bytes, copied.totals.changed_bytes), (70, 80));
        }
        let uncopied = times(&[begin, &[in_memory]].concat(), running(5000)).unwrap();
        assert_eq!((uncopied.totals.stored_bytes, uncopied.totals.changed_bytes), (0, 0));
        assert_eq!((uncopied.totals.snapshots, uncopied.totals.bytes), (1, 5000));
    }

    #[test]
    fn the_cost_of_all_snapshots_is_added_up() {
        let mut entries = first();
        let phases = |dump_us, attach_us| StallPhases { dump_us, attach_us, ..StallPhases::default() };
        for (id, taken_ms) in [("2", 4000), ("3", 5000)] {
            let mut one = saved(id, taken_ms, 100);
            one.measured.stall_phases = Some(phases(70_000, 30_000));
            (one.measured.stored_bytes, one.measured.changed_bytes) = (Some(20), Some(60));
            entries.push(one);
        }
        // Of an earlier version.
        entries[2].measured.stored_bytes = Some(7);
        let totals = times(&entries, running(6000)).unwrap().totals;
        let wanted = Totals {
            snapshots: 3,
            stall_us: 300_000,
            stall_phases: phases(140_000, 60_000),
            bytes: 15_000,
            changed_bytes: 120,
            changed_stored_bytes: 40,
            stored_bytes: 47,
        };
        assert_eq!(totals, wanted);
    }

    #[test]
    fn journals_of_earlier_versions_are_read() {
        let old = |kind, at_ms, id| entry(kind, at_ms, Measured::default()).snapshot(id);
        let entries = [
            old(EventKind::Started, 1000, None),
            old(EventKind::Saved, 3000, Some("1")),
            old(EventKind::Resumed, 9000, Some("1")),
        ];
        let times = times(&entries, running(9500)).unwrap();
        assert_eq!(classes(&times), [2500, 0, 0, 0, 0, 0, 6000]);
    }

    #[test]
    fn a_shortened_journal_begins_where_it_begins() {
        let times = times(&first()[2..], running(5000)).unwrap();
        assert!(times.is_shortened);
        assert_eq!(times.begun_unix_ms, 3300);
        classes(&times);
    }

    proptest! {
        /// Whatever the journal says, no time is lost or counted twice.
        #[test]
        fn classes_sum_up_to_the_whole_time(
            steps in prop::collection::vec((0..13_u8, 0..5000_u64, 0..3000_u64, 0..4_u8), 1..40),
            is_running: bool,
        ) {
            let kinds = [
                EventKind::Started, EventKind::Resumed, EventKind::NotStarted, EventKind::Saved,
                EventKind::InMemory, EventKind::NotSaved, EventKind::Failed, EventKind::Restarting,
                EventKind::GaveUp, EventKind::Ended, EventKind::Complete, EventKind::LauncherStarted,
                EventKind::LauncherEnded,
            ];
            let mut now_ms = 10_000;
            let entries: Vec<_> = steps.iter().map(|&(kind, after_ms, before_ms, id)| {
                now_ms += after_ms;
                let at = Some(now_ms - before_ms);
                let measured = Measured {
                    begun_unix_ms: at.filter(|_| id > 0),
                    ended_unix_ms: at.filter(|_| id > 1),
                    taken_unix_ms: at.filter(|_| id > 0),
                    stall_us: Some(before_ms * 900),
                    alive_unix_ms: at.filter(|_| id > 2),
                    ..Measured::default()
                };
                entry(kinds[usize::from(kind)], now_ms, measured).snapshot(Some(id))
            }).collect();
            let live = Live { now_unix_ms: now_ms + 100, is_running, ..Live::default() };
            let times = times(&entries, live).unwrap();
            prop_assert_eq!(times.time_ms.values().sum::<u64>(), times.whole_ms());
            prop_assert!(times.timeline.windows(2).all(|pair| pair[0].ended_unix_ms == pair[1].begun_unix_ms));
        }
    }
}
