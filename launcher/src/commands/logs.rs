//! `ckpt-run logs`: what a job wrote last in each of its sessions, and the files with more.

use super::explain::{with_deaths, write_entry, write_lines};
use super::jobs::{one_job, output};
use super::print;
use crate::cli::config::Config;
use crate::job::journal::{Entry, EventKind};
use crate::persist::journal_copies;
use crate::store::tiers;
use anyhow::{Context, Result};
use ckpt_snapshot::{JobDir, StdioRecord};
use serde::Serialize;
use std::io::{self, Write};

/// A file or directory with more.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Place {
    path: String,
    what: &'static str,
}

#[derive(Serialize)]
struct Logs {
    job: String,
    running: bool,
    /// Begins and ends of sessions, what was written before, and messages. Oldest first.
    entries: Vec<Entry>,
    /// What the running job has written last. `None` if no launcher says.
    output_now: Option<String>,
    places: Vec<Place>,
}

/// Prints the logs of one job.
///
/// # Errors
/// Bad input; a journal that cannot be read.
pub fn logs(config: &Config, named: Option<&str>, json: bool) -> Result<i32> {
    let job = one_job(config, named)?;
    let entries = journal_copies::of_all_machines(&config.store, &job);
    let entries = entries.with_context(|| format!("cannot read the journal of the job {}", job.key()))?;
    let running = job.is_locked();
    let logs = Logs {
        job: job.key().to_string(),
        running,
        entries: with_deaths(entries).into_iter().filter(is_no_snapshot).collect(),
        output_now: running.then(|| output(&job)).flatten(),
        places: places(config, &job),
    };
    if json {
        return print::json(&logs);
    }
    report(&mut io::stdout().lock(), &logs)?;
    Ok(0)
}

fn is_no_snapshot(entry: &Entry) -> bool {
    !matches!(entry.kind, EventKind::Saved | EventKind::InMemory)
}

fn places(config: &Config, job: &JobDir) -> Vec<Place> {
    let newest = || {
        let store = tiers::open(&config.store, job).ok()?;
        tiers::list_local(&store).ok()?.pop()?.manifest.ok()
    };
    let mut places = newest().map_or_else(Vec::new, |manifest| outputs(&manifest.stdio));
    for (folder, what) in [("attempts", what_failed as fn(&str) -> _), ("kept", |_| KEPT)] {
        let Ok(Some(open)) = job.folder(folder) else { continue };
        let entries = open.entries().unwrap_or_default();
        let mut names: Vec<_> =
            entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        let path = |name: &str| job.path().join(folder).join(name).display().to_string();
        places.extend(names.iter().map(|name| Place { path: path(name), what: what(name) }));
    }
    places
}

const KEPT: &str = "what a resume took from files of the job, such as the end of its log";

/// The files to which the job's output went when the newest snapshot was taken.
fn outputs(streams: &[StdioRecord]) -> Vec<Place> {
    let mut places: Vec<Place> = Vec::new();
    for file in streams.iter().filter(|stream| stream.fd != 0).filter_map(|stream| stream.file.as_ref()) {
        let place = Place { path: file.path.clone(), what: "the output of the job" };
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

/// What is in a directory of `attempts/`, by its name (docs/format.md).
fn what_failed(name: &str) -> &'static str {
    match () {
        () if name.contains("-hang-") => "stacks of the job when it hung",
        () if name.ends_with("-restore") => "CRIU's log of a failed resume",
        () => "CRIU's log of a failed checkpoint",
    }
}

fn report(out: &mut impl Write, logs: &Logs) -> Result<()> {
    writeln!(out, "{}{}", logs.job, if logs.running { " (running)" } else { "" })?;
    for entry in &logs.entries {
        match entry.kind {
            EventKind::Output => write_lines(out, "", &entry.what, usize::MAX)?,
            _ => write_entry(out, entry)?,
        }
    }
    if let Some(text) = logs.output_now.as_ref().filter(|text| !text.is_empty()) {
        write_lines(out, "now", text, usize::MAX)?;
    }
    for Place { path, what } in &logs.places {
        writeln!(out, "{what}: {}", print::plain(path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_snapshot::{OpenFile, StdioKind};

    #[test]
    fn output_is_shown_whole_with_the_files_that_have_more() {
        let place = |path: &str, what| Place { path: path.into(), what };
        let logs = Logs {
            job: "j".into(),
            running: true,
            entries: vec![
                Entry::new(EventKind::Output, "one\ntwo\u{1b}[2J"),
                Entry::new(EventKind::Failed, "it failed"),
            ],
            output_now: Some("three".into()),
            places: vec![place("/w/train.log", "the output of the job")],
        };
        let mut out = Vec::new();
        report(&mut out, &logs).unwrap();
        let out = String::from_utf8(out).unwrap();
        let shown: Vec<_> = out.lines().collect();
        assert_eq!(shown[0], "j (running)");
        assert!(shown[1].ends_with("  output       one") && shown[2].ends_with("  two\\u{1b}[2J"), "{out}");
        assert!(shown[3].ends_with("  failed       it failed"), "{out}");
        assert!(shown[4].starts_with("  now  ") && shown[4].ends_with("  output       three"), "{out}");
        assert_eq!(shown[5..], ["the output of the job: /w/train.log"]);
    }

    #[test]
    fn each_file_is_named_once_and_each_directory_for_what_it_has() {
        let file = |path: &str| Some(OpenFile { path: path.into(), size_bytes: 1 });
        let stream = |fd, file| StdioRecord {
            fd,
            kind: StdioKind::Pipe,
            inode: 1,
            file,
            consumed_bytes: None,
            input: None,
        };
        let streams = [stream(0, file("/in")), stream(1, file("/w/a.log")), stream(2, file("/w/a.log"))];
        let paths: Vec<_> = outputs(&streams).into_iter().map(|place| place.path).collect();
        assert_eq!(paths, ["/w/a.log"]);
        assert!(what_failed("000001-restore").contains("resume"));
        assert!(what_failed("3-hang-1764200000").contains("hung"));
        assert!(what_failed("000001-20261127T000000Z").contains("checkpoint"));
    }
}
