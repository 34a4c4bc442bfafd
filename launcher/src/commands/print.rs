//! Printing data: JSON for programs, aligned columns for people.

use crate::sys::letters;
use anyhow::Result;
pub use ckpt_snapshot::size_text as bytes;
use serde::Serialize;
use std::io::{self, Write};
use std::time::{Duration, SystemTime};

/// Prints one JSON value and a new line; returns exit code 0.
///
/// # Errors
/// When stdout cannot be written.
pub fn json(value: &impl Serialize) -> Result<i32> {
    writeln!(io::stdout(), "{}", serde_json::to_string_pretty(value)?)?;
    Ok(0)
}

/// The same for a command whose work is done; returns `code`, also if the reader has closed the output.
///
/// # Errors
/// When stdout cannot be written for another reason.
pub fn json_with(value: &impl Serialize, code: i32) -> Result<i32> {
    let text = serde_json::to_string_pretty(value)?;
    printed(writeln!(io::stdout(), "{text}"), code)
}

/// The exit code of a command whose work is done, and whose result was printed: `code`, also if the reader has closed the
/// output.
///
/// # Errors
/// When stdout cannot be written for another reason.
pub fn printed(result: io::Result<()>, code: i32) -> Result<i32> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(code),
    }
}

/// Prints columns as wide as their widest cell; returns exit code 0.
///
/// # Errors
/// When stdout cannot be written.
pub fn table(head: &[&str], rows: Vec<Vec<String>>) -> Result<i32> {
    let mut out = io::stdout().lock();
    for line in columns(head, rows) {
        writeln!(out, "{line}")?;
    }
    Ok(0)
}

/// A text whose control characters are escaped: a name may have some that change the terminal.
#[must_use]
pub fn plain(text: &str) -> String {
    let one = |letter: char| match letters::is_control(letter) && letter != '\t' {
        true => letter.escape_default().to_string(),
        false => letter.to_string(),
    };
    text.chars().map(one).collect()
}

/// The lines of a table with columns as wide as their widest cell.
#[must_use]
pub fn columns(head: &[&str], rows: Vec<Vec<String>>) -> Vec<String> {
    let mut rows = rows;
    rows.iter_mut().flatten().for_each(|cell| *cell = plain(cell));
    rows.insert(0, head.iter().map(|&name| name.to_owned()).collect());
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..head.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// `1 process`, `2 processes`.
#[must_use]
pub fn count(number: u64, noun: &str) -> String {
    let ending = match number {
        1 => "",
        _ if noun.ends_with('s') => "es",
        _ => "s",
    };
    format!("{number} {noun}{ending}")
}

/// An amount of memory, its holders, and how much of it has changed.
#[must_use]
pub fn sizes(all_bytes: u64, changed_bytes: Option<u64>, holders: &str) -> String {
    format!("{} in {holders}, {}", bytes(all_bytes), changed(changed_bytes))
}

/// The line below a list of which only the first entries are `shown`.
#[must_use]
pub fn more(all: usize, shown: usize) -> Option<String> {
    (all > shown).then(|| format!("… and {} more; --json shows all", all - shown))
}

/// The amount of memory that changed since the previous checkpoint, if known.
fn changed(changed_bytes: Option<u64>) -> String {
    match changed_bytes {
        Some(changed_bytes) => format!("{} changed since the previous checkpoint", bytes(changed_bytes)),
        None => "changes were not tracked".to_owned(),
    }
}

/// `2026-11-21T11:45:12Z`.
#[must_use]
pub fn time(unix_ms: u64) -> String {
    humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + Duration::from_millis(unix_ms)).to_string()
}

/// `3m 20s ago`.
#[must_use]
pub fn ago(unix_ms: u64) -> String {
    let then = SystemTime::UNIX_EPOCH + Duration::from_millis(unix_ms);
    let age = SystemTime::now().duration_since(then).unwrap_or_default();
    format!("{} ago", humantime::format_duration(Duration::from_secs(age.as_secs())))
}
