//! `ckpt-run report`: what a job's time went into, as text, JSON or a web page.

mod html;
mod memory;

use super::jobs::one_job;
use super::print;
use crate::cli::config::Config;
use crate::job::status::unix_ms;
use crate::job::times::{self, Class, Times, Totals};
use crate::persist::journal_copies;
use crate::sys::error::bad_input;
use anyhow::{Context, Result, anyhow};
use memory::Memory;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::time::SystemTime;

/// Raised when a field changes its meaning or is removed. docs/report.md describes the fields.
const SCHEMA_VERSION: u32 = 1;

#[derive(Serialize)]
struct Report {
    version: u32,
    job: String,
    is_running: bool,
    /// When the report was made, milliseconds since 1970 UTC.
    read_unix_ms: u64,
    whole_ms: u64,
    effective_ratio: Option<f64>,
    #[serde(flatten)]
    times: Times,
    memory: Option<Memory>,
}

/// The part of pauses of which earlier versions have not recorded what it went into.
const UNKNOWN: &str = "unknown";
/// Phases that took less are left out: they would be shown as 0.0 ms.
const LEAST_US: u64 = 50;

/// Prints the report of a job, or writes it `to` a file.
///
/// # Errors
/// Bad input; a journal that cannot be read; a file that cannot be written.
pub fn report(config: &Config, named: Option<&str>, json: bool, to: Option<&Path>) -> Result<i32> {
    let job = one_job(config, named)?;
    let is_running = job.is_locked();
    let read_unix_ms = unix_ms(SystemTime::now());
    let entries = journal_copies::of_all_machines(&config.store, &job)
        .with_context(|| format!("cannot read the journal of the job {}", job.key()))?;
    let is_elsewhere = journal_copies::may_run_elsewhere(&config.store, &job, &entries);
    let times = times::of_entries(&job, is_running, is_elsewhere, &entries)
        .ok_or_else(|| bad_input(anyhow!("nothing is recorded of the job {}", job.key())))?;
    let report = Report {
        version: SCHEMA_VERSION,
        job: job.key().to_string(),
        is_running,
        read_unix_ms,
        whole_ms: times.whole_ms(),
        effective_ratio: times.effective_ratio(),
        memory: Memory::newest(config, &job, &times.snapshots),
        times,
    };
    let text = match (json, to) {
        (true, _) => serde_json::to_string_pretty(&report)? + "\n",
        (false, Some(_)) => html::page(&report),
        (false, None) => summary(&report),
    };
    match to.filter(|path| *path != Path::new("-")) {
        Some(path) => fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?,
        None => io::stdout().lock().write_all(text.as_bytes())?,
    }
    Ok(0)
}

/// What the class is, for people.
fn meaning(class: Class) -> &'static str {
    match class {
        Class::Productive => "work that was done for the first time",
        Class::Stall => "paused by checkpoints, or ended while the last snapshot was stored",
        Class::Redone => "work that was done again, since no snapshot had it",
        Class::Restart => "starting or resuming",
        Class::Waiting => "waiting before a restart",
        Class::Hang => "hung, until the watchdog ended it",
        Class::Away => "no launcher was running",
    }
}

/// The phases of the pauses that took a time worth showing, in microseconds, and what is unknown.
fn phases(totals: &Totals) -> Vec<(&'static str, u64)> {
    let unknown_us = totals.stall_us.saturating_sub(totals.stall_phases.sum_us());
    let all = totals.stall_phases.named().into_iter().chain([(UNKNOWN, unknown_us)]);
    all.filter(|(_, us)| *us >= LEAST_US).collect()
}

/// What happens in a phase of a pause, for people.
fn phase_meaning(phase: &str) -> &'static str {
    match phase {
        "precopy" => "memory was marked for a copy before the dump (--precopy)",
        "cut" => "ranks of NCCL waited until all of them stood at the same step",
        "detach" => "device memory was taken off the GPUs",
        "dump" => "CRIU froze the processes and copied their memory",
        "record" => "ckpt-run recorded files, sockets and shared memory",
        "nodes" => "this node waited for the others",
        "attach" => "device memory was put back on the GPUs",
        _ => "it is not known: an earlier version took these snapshots",
    }
}

/// What was written to the store, against what had changed.
fn stored(totals: &Totals) -> String {
    let Totals { snapshots, bytes, changed_bytes, changed_stored_bytes, stored_bytes, .. } = *totals;
    let [bytes, changed, written] = [bytes, changed_bytes, stored_bytes].map(print::bytes);
    let snapshots = print::count(snapshots, "snapshot");
    if changed_bytes == 0 {
        return format!("{snapshots} of {bytes}: {written} were written to the store");
    }
    let ratio = percent(changed_stored_bytes as f64 / changed_bytes as f64);
    format!(
        "{snapshots} of {bytes}: {changed} had changed, {written} were written to the store ({ratio} of what had changed)"
    )
}

/// The classes in one line; `None` without time.
#[must_use]
pub fn effective(time_ms: &BTreeMap<Class, u64>) -> Option<String> {
    let whole_ms = Some(time_ms.values().sum::<u64>()).filter(|whole_ms| *whole_ms > 0)?;
    let share = |ms: u64| percent(ms as f64 / whole_ms as f64);
    let productive = share(time_ms.get(&Class::Productive).copied().unwrap_or(0));
    let others = time_ms.iter().filter(|(class, ms)| **class != Class::Productive && **ms > 0);
    let others: Vec<_> = others.map(|(class, ms)| format!("{} {}", class.name(), share(*ms))).collect();
    let others = if others.is_empty() { String::new() } else { format!("; {}", others.join(", ")) };
    Some(format!("{productive} productive of {}{others}", span(whole_ms)))
}

fn summary(report: &Report) -> String {
    let times = &report.times;
    let rows = Class::ALL.map(|class| {
        let ms = times.of(class);
        let share = percent(ms as f64 / report.whole_ms.max(1) as f64);
        vec![class.name().to_owned(), span(ms), share, meaning(class).to_owned()]
    });
    let mut lines = vec![
        format!("{}: {} since {}", report.job, span(report.whole_ms), print::time(times.begun_unix_ms)),
        format!("effective training time {}", report.effective_ratio.map_or("-".to_owned(), percent)),
        String::new(),
    ];
    lines.extend(print::columns(&["CLASS", "TIME", "SHARE", "THE JOB WAS"], rows.into()));
    lines.push(String::new());
    lines.push(kept(times));
    lines.extend(costs(report));
    if let Some(late) = times.late_ranks.last() {
        let count = print::count(times.late_ranks.len() as u64, "time");
        lines.push(format!("{count}, a rank did nothing while others waited for it; last: {}", late.what));
    }
    if times.is_shortened {
        lines.push(
            "the journal is long, and its oldest entries are deleted: earlier time is not counted".into(),
        );
    }
    lines.push("-o FILE writes a web page with charts".to_owned());
    lines.join("\n") + "\n"
}

/// What the snapshots cost: pauses by phase, bytes in the store, and memory by process.
fn costs(report: &Report) -> Vec<String> {
    let totals = &report.times.totals;
    if totals.snapshots == 0 {
        return Vec::new();
    }
    let row = |(name, us): (&'static str, u64)| {
        let share = percent(us as f64 / totals.stall_us.max(1) as f64);
        vec![name.to_owned(), pause(us), share, phase_meaning(name).to_owned()]
    };
    let rows: Vec<_> = phases(totals).into_iter().map(row).collect();
    let mut lines = vec![stored(totals)];
    if !rows.is_empty() {
        lines.push(String::new());
        lines.extend(print::columns(&["PAUSE", "TIME", "SHARE", "SINCE"], rows));
    }
    if let Some(memory) = &report.memory {
        lines.push(String::new());
        lines.extend(memory.lines());
    }
    lines.push(String::new());
    lines
}

/// What the snapshots were worth.
fn kept(times: &Times) -> String {
    let resumed = times.sessions.iter().filter(|session| session.resumed_from.is_some()).count() as u64;
    format!(
        "{} from snapshots avoided {} of repeated work, compared with starting from the beginning each time; {} of work is in no snapshot yet",
        print::count(resumed, "resume"),
        span(times.kept_ms),
        span(times.unsaved_ms)
    )
}

fn percent(ratio: f64) -> String {
    format!("{:.1} %", ratio * 100.0)
}

/// A pause, or a part of one: `0.3 ms`, `1.20 s`.
fn pause(us: u64) -> String {
    match us {
        0..1_000_000 => format!("{:.1} ms", us as f64 / 1000.0),
        _ => span((us + 500) / 1000),
    }
}

/// A duration with the digits that matter: `0.25 s`, `42 s`, `3m 20s`, `2d 4h`.
fn span(ms: u64) -> String {
    let s = ms / 1000;
    match ms {
        0 => "0 s".to_owned(),
        1..10_000 => format!("{:.2} s", ms as f64 / 1000.0),
        10_000..60_000 => format!("{:.1} s", ms as f64 / 1000.0),
        60_000..3_600_000 => format!("{}m {}s", s / 60, s % 60),
        3_600_000..86_400_000 => format!("{}h {}m", s / 3600, s / 60 % 60),
        _ => format!("{}d {}h", s / 86400, s / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::times::{LateRank, Segment, Session, SessionEnding, Snapshot};
    use ckpt_protocol::control::StallPhases;

    /// The phases of as many pauses of 0.25 s.
    fn phases_of(pauses: u64) -> StallPhases {
        let (detach_us, dump_us, attach_us) = (50_000 * pauses, 100_000 * pauses, 100_000 * pauses);
        StallPhases { detach_us, dump_us, attach_us, ..StallPhases::default() }
    }

    fn example_totals() -> Totals {
        Totals {
            snapshots: 2,
            stall_us: 500_000,
            stall_phases: phases_of(2),
            bytes: 10_000_000,
            changed_bytes: 400_000,
            changed_stored_bytes: 140_000,
            stored_bytes: 140_000,
        }
    }

    fn example_memory(name: &str) -> Memory {
        let processes = vec![
            memory::tests::process(12, name, [3_000_000, 1_000_000, 6_000_000]),
            memory::tests::process(11, "sh", [2000, 0, 0]),
        ];
        Memory { snapshot: "000002".to_owned(), processes }
    }

    /// A job of 100 s that was saved twice and failed once, with names that try to be markup.
    pub(super) fn example() -> Report {
        let evil = "<script>alert('\"&')</script>";
        let session = |begun_unix_ms, resumed_from: Option<&str>, redo_ms| Session {
            begun_unix_ms,
            ended_unix_ms: Some(begun_unix_ms + 30_000).filter(|_| resumed_from.is_none()),
            ending: Some(SessionEnding::Failed).filter(|_| resumed_from.is_none()),
            what: Some(format!("killed by {evil}")).filter(|_| resumed_from.is_none()),
            remedy: Some(evil.to_owned()),
            resumed_from: resumed_from.map(str::to_owned),
            restart_ms: 500,
            redo_ms,
            host: Some(evil.to_owned()),
            launcher_pid: 7,
        };
        let snapshot = |id: &str, taken_unix_ms| Snapshot {
            id: id.to_owned(),
            taken_unix_ms,
            stall_us: 250_000,
            stall_phases: Some(phases_of(1)),
            durable_ms: Some(1200),
            bytes: Some(5_000_000),
            stored_bytes: Some(70_000),
            changed_bytes: Some(200_000),
            is_in_memory_only: false,
            work_ms: Some(20_000),
        };
        let segment = |class, begun_unix_ms, ended_unix_ms| Segment { class, begun_unix_ms, ended_unix_ms };
        let times = Times {
            begun_unix_ms: 0,
            furthest_ms: 0,
            ended_unix_ms: 100_000,
            time_ms: [(Class::Productive, 90_000), (Class::Stall, 500), (Class::Redone, 9500)].into(),
            kept_ms: 20_000,
            unsaved_ms: 1000,
            is_shortened: false,
            timeline: vec![
                segment(Class::Productive, 0, 30_000),
                segment(Class::Redone, 30_000, 39_500),
                segment(Class::Stall, 39_500, 40_000),
                segment(Class::Productive, 40_000, 100_000),
            ],
            command: format!("train {evil}"),
            sessions: vec![session(0, None, 0), session(30_000, Some("000001"), 9500)],
            totals: example_totals(),
            snapshots: vec![snapshot("000001", 20_000), snapshot("000002", 39_900)],
            late_ranks: vec![LateRank { found_unix_ms: 25_000, what: format!("rank 3 of {evil}") }],
        };
        Report {
            version: SCHEMA_VERSION,
            job: evil.to_owned(),
            is_running: true,
            read_unix_ms: 100_000,
            whole_ms: 100_000,
            effective_ratio: Some(0.9),
            times,
            memory: Some(example_memory(evil)),
        }
    }

    #[test]
    fn durations_have_the_digits_that_matter() {
        let shown = [0, 250, 42_000, 200_000, 3_600_000, 187_200_000].map(span);
        assert_eq!(shown, ["0 s", "0.25 s", "42.0 s", "3m 20s", "1h 0m", "2d 4h"]);
    }

    #[test]
    fn the_summary_has_every_class() {
        let text = summary(&example());
        assert!(text.contains("effective training time 90.0 %"), "{text}");
        for class in Class::ALL {
            assert!(text.contains(&format!("\n{} ", class.name())), "{text}");
        }
        assert!(text.contains("1 resume from snapshots avoided 20.0 s of repeated work"), "{text}");
        assert!(
            text.contains("1 time, a rank did nothing while others waited for it; last: rank 3"),
            "{text}"
        );
    }

    #[test]
    fn the_summary_has_the_costs_of_snapshots() {
        let text = summary(&example());
        for wanted in [
            "2 snapshots of 10.0 MB: 400.0 kB had changed, 140.0 kB were written to the store (35.0 % of what had changed)",
            "detach  100.0 ms  20.0 %  device memory was taken off the GPUs",
            "3.0 MB  1.0 MB  6.0 MB",
        ] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
        assert!(!text.contains("precopy") && !text.contains(UNKNOWN), "{text}");
        let mut older = example();
        older.times.totals.stall_phases = StallPhases::default();
        older.times.totals.changed_bytes = 0;
        let text = summary(&older);
        assert!(text.contains("unknown  500.0 ms  100.0 %"), "{text}");
        assert!(text.contains("2 snapshots of 10.0 MB: 140.0 kB were written"), "{text}");
        assert_eq!([300, 1_250_000].map(pause), ["0.3 ms", "1.25 s"]);
    }

    #[test]
    fn json_has_the_documented_fields() {
        let json = serde_json::to_value(example()).unwrap();
        let docs = include_str!("../../../docs/report.md");
        let mut fields: Vec<_> = json.as_object().unwrap().keys().collect();
        for (list, name) in [("timeline", 0), ("sessions", 0), ("snapshots", 0), ("late_ranks", 0)] {
            fields.extend(json[list][name].as_object().unwrap().keys());
        }
        for object in [
            &json["totals"],
            &json["totals"]["stall_phases"],
            &json["memory"],
            &json["memory"]["processes"][0],
        ] {
            fields.extend(object.as_object().unwrap().keys());
        }
        for field in fields {
            assert!(docs.contains(&format!("`{field}`")), "docs/report.md does not describe {field}");
        }
        assert_eq!((&json["version"], &json["time_ms"]["redone"]), (&1.into(), &9500.into()));
    }
}
