//! `ckpt-run explain`: what happened to a job, why, and what to do.

use super::job_files;
use super::jobs::{each, jobs, newer_claim};
use super::print;
use crate::cli::config::Config;
use crate::files::inventory::Inventory;
use crate::job::journal::{Entry, EventKind, Journal};
use crate::job::resume_point;
use crate::job::times;
use crate::persist::journal_copies;
use crate::store::root::Root;
use crate::store::tiers;
use anyhow::{Context, Result};
use ckpt_snapshot::{JobDir, JobOutcome, SnapshotId, Store};
use serde::Serialize;
use std::io::{self, Write};
use std::time::{Duration, SystemTime};

/// The number of entries shown without --all.
const SHOWN: usize = 40;
/// The number of lines shown of what the job wrote before it failed.
const LINES_SHOWN: usize = 10;

const DIED: &str = "ckpt-run was killed or the machine went down, and the job with it";

#[derive(Serialize)]
struct Story {
    job: String,
    running: bool,
    /// The launcher was killed, which the journal cannot record.
    died_without_a_word: bool,
    /// Whether another machine has continued the job since, as its object store says.
    #[serde(skip)]
    has_moved: bool,
    /// The machine whose launcher has recorded no end, if that is another one: it may run the job.
    #[serde(skip)]
    may_run_on: Option<String>,
    /// Whether the next run starts from a snapshot, if that is known.
    #[serde(skip)]
    can_be_resumed: Option<bool>,
    /// The newest of the snapshots that were lost with the memory of a launcher that died.
    #[serde(skip)]
    lost: Option<LostInMemory>,
    entries: Vec<Entry>,
    /// Files that the newest snapshot on this machine does not cover.
    uncovered_files: Vec<String>,
}

/// Snapshots that were only in the memory of a launcher that died.
struct LostInMemory {
    newest: SnapshotId,
    /// The job had several nodes: another one may have a replica.
    is_of_nodes: bool,
}

/// Prints the latest journal entries of a job, or of all jobs; every entry with `all`.
///
/// # Errors
/// Bad input; a journal that cannot be read.
pub fn explain(config: &Config, named: Option<&str>, all: bool, json: bool) -> Result<i32> {
    let root = Root::open(&config.store)?;
    let (stories, code) = each(&jobs(config, &root, named)?, |job| story(config, job, all))?;
    if json {
        print::json(&stories)?;
        return Ok(code);
    }
    let mut out = io::stdout().lock();
    if stories.is_empty() && code == 0 {
        writeln!(out, "there is no job in {}", root.name())?;
    }
    stories.iter().try_for_each(|story| report(&mut out, story))?;
    Ok(code)
}

fn story(config: &Config, job: &JobDir, all: bool) -> Result<Story> {
    let entries = journal_copies::of_all_machines(&config.store, job).with_context(|| {
        format!(
            "cannot read the journal of the job {}: {}",
            job.key(),
            job.path().join("journal.jsonl").display()
        )
    })?;
    let running = job.is_locked();
    let unfinished = job.record()?.filter(|record| record.outcome == JobOutcome::Unfinished);
    let is_elsewhere = journal_copies::may_run_elsewhere(&config.store, job, &entries);
    let is_open = unfinished.is_some() && !running && is_end_missing(&entries);
    let host = times::newest_host(&entries).map(str::to_owned);
    let may_run_on = host.filter(|_| is_open && is_elsewhere);
    let died = unfinished.filter(|_| is_open && !is_elsewhere);
    let died_without_a_word = died.is_some();
    let has_moved = died.is_some_and(|record| newer_claim(config, job, &record).is_some());
    let lost = if died_without_a_word { lost_in_memory(config, job) } else { None };
    let entries = with_deaths(entries);
    let entries = if all { entries } else { shortened(entries) };
    let uncovered_files = uncovered_files(config, job).unwrap_or_default();
    // Of a store that cannot be read, other commands say so.
    let can_be_resumed = if died_without_a_word { can_be_resumed(config, job).ok() } else { None };
    let job = job.key().to_string();
    Ok(Story {
        job,
        running,
        died_without_a_word,
        has_moved,
        may_run_on,
        can_be_resumed,
        lost,
        entries,
        uncovered_files,
    })
}

/// What was only in the memory of a launcher that died, if the store has nothing that is as new.
fn lost_in_memory(config: &Config, job: &JobDir) -> Option<LostInMemory> {
    let newest = Journal::of(job).newest_in_memory_only()?;
    let store = tiers::open(&config.store, job).ok()?;
    let stored = tiers::list_local(&store).ok()?;
    let is_of_nodes = stored.iter().any(|one| one.manifest.as_ref().is_ok_and(|it| it.part.is_some()));
    let is_newer = stored.last().is_none_or(|stored| stored.id < newest);
    is_newer.then_some(LostInMemory { newest, is_of_nodes })
}

fn can_be_resumed(config: &Config, job: &JobDir) -> Result<bool> {
    let store = tiers::open(&config.store, job)?;
    Ok(!resume_point::of_next_run(job, &store, &store.list()?)?.is_empty())
}

/// Whether the last launcher has not recorded its end. A job without entries here may run on another machine.
fn is_end_missing(entries: &[Entry]) -> bool {
    use EventKind::{Complete, Ended, GaveUp, LauncherEnded, LauncherStarted, NotStarted};
    let is_of_launcher = |entry: &&Entry| matches!(entry.kind, LauncherStarted | LauncherEnded);
    match (entries.iter().rfind(is_of_launcher), entries.last()) {
        (Some(last), _) => last.kind == LauncherStarted,
        // Earlier versions did not record when launchers start and end.
        (None, Some(last)) => !matches!(last.kind, Complete | Ended | GaveUp | NotStarted),
        (None, None) => false,
    }
}

/// The entries that are shown: when launchers started and ended is for `ckpt-run report`, but where the end of one is
/// missing, it died.
pub(super) fn with_deaths(entries: Vec<Entry>) -> Vec<Entry> {
    // The machine of a launcher without an end, and when it has written last.
    let (mut shown, mut open, mut written_ms) = (Vec::new(), None, 0);
    for entry in entries {
        let last_ms = std::mem::replace(&mut written_ms, entry.unix_ms);
        match entry.kind {
            EventKind::LauncherStarted => {
                let died = open.replace(entry.measured.host.clone()).map(|host| {
                    let is_known = host == entry.measured.host;
                    let alive_ms = entry.measured.alive_unix_ms.unwrap_or(entry.unix_ms);
                    let unix_ms = if is_known { alive_ms } else { last_ms };
                    Entry { unix_ms, ..Entry::new(EventKind::Died, DIED) }
                });
                // What the launcher waited for comes before its start.
                let is_own = |one: &&Entry| one.kind == EventKind::Waiting && one.is_of_launcher_of(&entry);
                let at = shown.len() - shown.iter().rev().take_while(is_own).count();
                shown.splice(at..at, died);
            }
            EventKind::LauncherEnded => open = None,
            _ => shown.push(entry),
        }
    }
    shown
}

/// Files that a resume from the newest snapshot could not put back. `None` if there is none, or it cannot be read: other
/// commands say why.
fn uncovered_files(config: &Config, job: &JobDir) -> Option<Vec<String>> {
    let store = tiers::open(&config.store, job).ok()?;
    let newest = tiers::list_local(&store).ok()?.pop()?.manifest.ok()?;
    let inventory = Inventory::read(&*store, &newest).ok()??;
    Some(job_files::uncovered(&inventory).map(|(_, text)| text).collect())
}

/// Only the newest entries, and only the last of consecutive snapshots.
fn shortened(entries: Vec<Entry>) -> Vec<Entry> {
    let mut kept: Vec<Entry> = Vec::new();
    for entry in entries {
        if is_snapshot(entry.kind) {
            // Of consecutive snapshots, the last of each kind is kept.
            let row = kept.iter().rev().take_while(|one| is_snapshot(one.kind)).count();
            let followed = (kept.len() - row..kept.len()).find(|&at| kept[at].kind == entry.kind);
            followed.map(|at| kept.remove(at));
        }
        kept.push(entry);
    }
    kept.split_off(kept.len().saturating_sub(SHOWN))
}

fn is_snapshot(kind: EventKind) -> bool {
    matches!(kind, EventKind::Saved | EventKind::InMemory)
}

fn title(kind: EventKind) -> &'static str {
    match kind {
        EventKind::Started => "started",
        EventKind::Resumed => "resumed",
        EventKind::NotStarted => "not started",
        EventKind::Saved => "saved",
        EventKind::InMemory => "in memory",
        EventKind::NotSaved => "not saved",
        EventKind::Failed => "failed",
        EventKind::Restarting => "restarting",
        EventKind::GaveUp => "given up",
        EventKind::Preempted => "preempted",
        EventKind::Ended => "ended",
        EventKind::Complete => "complete",
        EventKind::Output => "output",
        EventKind::RankLate => "late rank",
        EventKind::Waiting => "waiting",
        EventKind::Noted => "note",
        EventKind::Died => "died",
        EventKind::LauncherStarted | EventKind::LauncherEnded => "launcher",
        EventKind::Other => "(newer)",
    }
}

fn report(out: &mut impl Write, story: &Story) -> Result<()> {
    writeln!(out, "{}{}", story.job, if story.running { " (running)" } else { "" })?;
    if story.entries.is_empty() {
        writeln!(out, "  nothing is known of it")?;
    }
    for (number, entry) in story.entries.iter().enumerate() {
        if entry.kind == EventKind::Output {
            if is_of_failure(&story.entries[number + 1..]) {
                write_lines(out, "", &entry.what, LINES_SHOWN)?;
            }
        } else {
            write_entry(out, entry)?;
        }
    }
    for text in &story.uncovered_files {
        writeln!(out, "  {:<20}  {:<11}  {}", "newest snapshot", "not covered", print::plain(text))?;
    }
    if let Some(host) = &story.may_run_on {
        writeln!(
            out,
            "  {:<20}  {:<11}  the ckpt-run on the machine {} has not recorded its end: the job runs there, or was killed\n  {:<20}  {:<11}  look there. If that machine is lost, run the same command again here: the job resumes from its newest snapshot",
            "then",
            "unknown",
            print::plain(host),
            "",
            "to do"
        )?;
    }
    if story.died_without_a_word {
        let to_do = if story.has_moved {
            "look on the machine that has continued the job: `ckpt-run status` says whether it has ended"
        } else {
            match story.can_be_resumed {
                Some(true) => "run the same command again: it resumes from the newest snapshot",
                Some(false) => "run the same command again: it starts from the beginning",
                None => "run the same command again: it resumes from the newest snapshot, if there is one",
            }
        };
        let lost = story.lost.as_ref().map_or_else(String::new, |LostInMemory { newest, is_of_nodes }| {
            let unless = if *is_of_nodes { " unless another node has a replica (--replicas)" } else { "" };
            format!("; snapshots up to {newest} were in memory only (--persist-every), and are lost{unless}")
        });
        writeln!(
            out,
            "  {:<20}  {:<11}  {DIED}{lost}\n  {:<20}  {:<11}  {to_do}",
            "then", "died", "", "to do"
        )?;
    }
    Ok(())
}

/// Whether output belongs to a failure, or to an end that is missing, which the entries after it show. Other threads may
/// have recorded something between. What the job wrote before another end is in `ckpt-run logs`.
fn is_of_failure(following: &[Entry]) -> bool {
    use EventKind::{Died, Failed, NotSaved, Noted, RankLate, Waiting};
    let is_between = |kind| is_snapshot(kind) || matches!(kind, NotSaved | RankLate | Waiting | Noted);
    let next = following.iter().map(|entry| entry.kind).find(|kind| !is_between(*kind));
    next.is_none_or(|kind| matches!(kind, Failed | Died))
}

/// An entry in one line, and what to do in a second one.
pub(super) fn write_entry(out: &mut impl Write, entry: &Entry) -> io::Result<()> {
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(entry.unix_ms);
    let snapshot = entry.snapshot.as_ref().map(|id| format!("{id}: ")).unwrap_or_default();
    let at = humantime::format_rfc3339_seconds(at);
    writeln!(out, "  {at}  {:<11}  {snapshot}{}", title(entry.kind), print::plain(&entry.what))?;
    if let Some(remedy) = &entry.remedy {
        writeln!(out, "  {:<20}  {:<11}  {}", "", "to do", print::plain(remedy))?;
    }
    Ok(())
}

/// The last `shown` lines of what the job wrote `when`.
pub(super) fn write_lines(out: &mut impl Write, when: &str, text: &str, shown: usize) -> io::Result<()> {
    let lines: Vec<_> = text.lines().collect();
    for (number, line) in lines[lines.len().saturating_sub(shown)..].iter().enumerate() {
        let (when, title) = if number == 0 { (when, title(EventKind::Output)) } else { ("", "") };
        writeln!(out, "  {when:<20}  {title:<11}  {}", print::plain(line))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_consecutive_snapshots_the_last_is_shown() {
        let entry = |kind, what: &str| Entry::new(kind, what);
        let entries = vec![
            entry(EventKind::Started, "a"),
            entry(EventKind::Saved, "b"),
            entry(EventKind::InMemory, "m"),
            entry(EventKind::Saved, "c"),
            entry(EventKind::InMemory, "n"),
            entry(EventKind::InMemory, "o"),
            entry(EventKind::Failed, "d"),
            entry(EventKind::Saved, "e"),
        ];
        let shown: Vec<_> = shortened(entries).into_iter().map(|entry| entry.what).collect();
        assert_eq!(shown, ["a", "c", "o", "d", "e"]);
        let many = (0..100).map(|number| entry(EventKind::Failed, &number.to_string())).collect();
        assert_eq!(shortened(many)[0].what, "60");
    }

    #[test]
    fn a_launcher_without_an_end_has_died() {
        use EventKind::{Ended, LauncherEnded, LauncherStarted, NotStarted, Started};
        let entries =
            |kinds: &[EventKind]| kinds.iter().map(|kind| Entry::new(*kind, "")).collect::<Vec<_>>();
        for (kinds, is_missing) in [
            (&[LauncherStarted, Started][..], true),
            (&[LauncherStarted, Started, LauncherEnded], false),
            (&[LauncherStarted, Started, LauncherStarted, NotStarted, LauncherEnded], false),
            (&[Started], true),
            (&[Started, Ended], false),
            (&[], false),
        ] {
            assert_eq!(is_end_missing(&entries(kinds)), is_missing, "{kinds:?}");
        }
        let all =
            entries(&[LauncherStarted, Started, LauncherStarted, NotStarted, LauncherEnded, LauncherStarted]);
        let shown: Vec<_> = with_deaths(all).iter().map(|entry| entry.kind).collect();
        assert_eq!(shown, [Started, EventKind::Died, NotStarted]);
        let waits = entries(&[LauncherStarted, Started, EventKind::Waiting, LauncherStarted]);
        let shown: Vec<_> = with_deaths(waits).iter().map(|entry| entry.kind).collect();
        assert_eq!(shown, [Started, EventKind::Died, EventKind::Waiting]);
    }

    #[test]
    fn output_is_of_a_failure_or_a_missing_end() {
        use EventKind::{Complete, Died, Ended, Failed, InMemory, NotSaved, Resumed, Saved};
        for (kinds, is_of) in [
            (&[Failed][..], true),
            (&[Saved, InMemory, NotSaved, Failed], true),
            (&[Saved], true),
            (&[Died, Resumed], true),
            (&[Ended], false),
            (&[Saved, Complete], false),
            (&[Resumed, Failed], false),
        ] {
            let following: Vec<_> = kinds.iter().map(|kind| Entry::new(*kind, "")).collect();
            assert_eq!(is_of_failure(&following), is_of, "{kinds:?}");
        }
    }

    #[test]
    fn reason_and_remedy_are_shown() {
        let written: Vec<_> = (1..=12).map(|number| format!("line {number}")).collect();
        let output = || Entry::new(EventKind::Output, written.join("\n"));
        let complete = Entry::new(EventKind::Complete, "ended with 0");
        let failed =
            Entry::new(EventKind::Failed, "it died").remedy(Some("feed it")).snapshot(Some("000007"));
        let story = Story {
            job: "j".into(),
            running: false,
            can_be_resumed: Some(true),
            died_without_a_word: true,
            has_moved: false,
            may_run_on: None,
            lost: Some(LostInMemory {
                newest: SnapshotId::new(9, SystemTime::UNIX_EPOCH),
                is_of_nodes: true,
            }),
            entries: vec![output(), complete, output(), Entry::new(EventKind::Saved, "saved"), failed],
            uncovered_files: vec!["/work/model: too large".into()],
        };
        let mut out = Vec::new();
        report(&mut out, &story).unwrap();
        let out = String::from_utf8(out).unwrap();
        assert!(
            out.contains("failed       000007: it died") && out.contains("to do        feed it"),
            "{out}"
        );
        assert!(out.contains("the machine went down, and the job with it; snapshots up to 000009-"), "{out}");
        assert!(out.contains("are lost unless another node has a replica"), "{out}");
        assert_eq!(out.matches("output       line 3\n").count(), 1, "of the failure only: {out}");
        assert!(out.contains("line 12\n") && !out.contains("line 2\n"), "{out}");
        assert!(out.contains("not covered  /work/model: too large"), "{out}");
        assert!(out.contains("run the same command again: it resumes"), "{out}");
        let mut out = Vec::new();
        let story = Story { has_moved: true, ..story };
        report(&mut out, &story).unwrap();
        let out = String::from_utf8(out).unwrap();
        assert!(out.contains("look on the machine") && !out.contains("run the same command"), "{out}");
        let may_run_on = Some("there".to_owned());
        let elsewhere = Story { may_run_on, died_without_a_word: false, entries: Vec::new(), ..story };
        let mut out = Vec::new();
        report(&mut out, &elsewhere).unwrap();
        let out = String::from_utf8(out).unwrap();
        assert!(out.contains("on the machine there has not recorded its end"), "{out}");
        assert!(!out.contains("died"), "{out}");
    }
}
