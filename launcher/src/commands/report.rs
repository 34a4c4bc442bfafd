//! `ckpt-run report`: what a job's time went into, as text, JSON or a web page.

mod html;

use super::jobs::one_job;
use super::print;
use crate::cli::config::Config;
use crate::job::status::unix_ms;
use crate::job::times::{self, Class, Times};
use crate::sys::error::bad_input;
use anyhow::{Context, Result, anyhow};
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
}

/// Prints the report of a job, or writes it `to` a file.
///
/// # Errors
/// Bad input; a journal that cannot be read; a file that cannot be written.
pub fn report(config: &Config, named: Option<&str>, json: bool, to: Option<&Path>) -> Result<i32> {
    let job = one_job(config, named)?;
    let is_running = job.is_locked();
    let read_unix_ms = unix_ms(SystemTime::now());
    let times = times::of_job(&job, is_running)
        .with_context(|| format!("cannot read the journal of the job {}", job.key()))?
        .ok_or_else(|| bad_input(anyhow!("nothing is recorded of the job {} on this machine", job.key())))?;
    let report = Report {
        version: SCHEMA_VERSION,
        job: job.key().to_string(),
        is_running,
        read_unix_ms,
        whole_ms: times.whole_ms(),
        effective_ratio: times.effective_ratio(),
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
            durable_ms: Some(1200),
            bytes: Some(5_000_000),
            stored_bytes: Some(70_000),
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
    fn json_has_the_documented_fields() {
        let json = serde_json::to_value(example()).unwrap();
        let docs = include_str!("../../../docs/report.md");
        let mut fields: Vec<_> = json.as_object().unwrap().keys().collect();
        for (list, name) in [("timeline", 0), ("sessions", 0), ("snapshots", 0), ("late_ranks", 0)] {
            fields.extend(json[list][name].as_object().unwrap().keys());
        }
        for field in fields {
            assert!(docs.contains(&format!("`{field}`")), "docs/report.md does not describe {field}");
        }
        assert_eq!((&json["version"], &json["time_ms"]["redone"]), (&1.into(), &9500.into()));
    }
}
