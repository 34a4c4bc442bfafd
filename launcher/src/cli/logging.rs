//! The messages of ckpt-run: short on stderr, with times and details in `--log-file`.

use crate::sys::error::bad_input;
use crate::sys::letters;
use crate::sys::progress;
use crate::sys::trust::Trust;
use anyhow::{Result, anyhow};
use serde::Deserialize;
use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

/// `ckpt-run: message`, with `error:` or `warning:` by level.
struct Plain {
    is_colored: bool,
}

/// What a message of this level begins with: bold red and yellow, if colored.
fn mark(level: Level, is_colored: bool) -> &'static str {
    match (level, is_colored) {
        (Level::ERROR, true) => "\x1b[1;31merror:\x1b[0m ",
        (Level::ERROR, false) => "error: ",
        (Level::WARN, true) => "\x1b[1;33mwarning:\x1b[0m ",
        (Level::WARN, false) => "warning: ",
        _ => "",
    }
}

/// Whether a terminal is to have colors. A value of `NO_COLOR` that is not empty forbids them (no-color.org).
fn wants_color(no_color: Option<OsString>, term: Option<OsString>) -> bool {
    no_color.is_none_or(|value| value.is_empty()) && term.is_none_or(|name| name != "dumb")
}

struct Message<'a>(&'a mut dyn fmt::Write);

/// Escapes control characters, which would change the terminal: names of files may have some.
struct Escaped<'a>(&'a mut dyn fmt::Write);

impl fmt::Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for letter in text.chars() {
            match letters::is_control(letter) && !"\n\t".contains(letter) {
                true => write!(self.0, "{}", letter.escape_default())?,
                false => self.0.write_char(letter)?,
            }
        }
        Ok(())
    }
}

impl Visit for Message<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            let _ = write!(Escaped(self.0), "{value:?}");
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>, N: for<'a> FormatFields<'a> + 'static> FormatEvent<S, N>
    for Plain
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        write!(out, "ckpt-run: {}", mark(*event.metadata().level(), self.is_colored))?;
        event.record(&mut Message(&mut out));
        // The carriage return is for terminals in raw mode.
        if rustix::termios::isatty(rustix::stdio::stderr()) { write!(out, "\r\n") } else { writeln!(out) }
    }
}

fn level(verbosity: i32) -> LevelFilter {
    match verbosity {
        ..=-2 => LevelFilter::ERROR,
        -1 => LevelFilter::WARN,
        0 => LevelFilter::INFO,
        1 => LevelFilter::DEBUG,
        2.. => LevelFilter::TRACE,
    }
}

/// The format of messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Plain text.
    #[default]
    Text,
    /// One JSON object per line: `timestamp`, `level`, `target`, and `fields` with `message`.
    Json,
}

/// Starts logging. `verbosity` shifts the level of stderr; the file has at least level debug.
///
/// # Errors
/// Bad input: the file cannot be opened.
pub fn start(verbosity: i32, format: Format, file: Option<&Path>, trust: &Trust) -> Result<()> {
    let ours = tracing_subscriber::filter::Targets::new().with_target("ckpt", LevelFilter::TRACE);
    // A closed terminal (SIGHUP) is no reason to end: an error about the error would be.
    let stderr = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).log_internal_errors(false);
    let is_colored = rustix::termios::isatty(rustix::stdio::stderr())
        && wants_color(std::env::var_os("NO_COLOR"), std::env::var_os("TERM"));
    if verbosity < 0 || format == Format::Json {
        progress::hide();
    }
    let stderr = match format {
        Format::Text => stderr.event_format(Plain { is_colored }).boxed(),
        Format::Json => stderr.json().boxed(),
    };
    let file = match file {
        None => None,
        Some(path) => {
            let mut options = File::options();
            options.append(true).create(true).mode(0o600);
            let file = trust.open_written(path, &options).map_err(|error| {
                bad_input(anyhow!("cannot open the log file {}: {error}", path.display()))
            })?;
            let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(Arc::new(file));
            let layer = match format {
                Format::Text => layer.boxed(),
                Format::Json => layer.json().boxed(),
            };
            Some(layer.with_filter(level(verbosity.max(1))))
        }
    };
    tracing_subscriber::registry().with(ours).with(stderr.with_filter(level(verbosity))).with(file).init();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Escaped, mark, wants_color};
    use std::fmt::Write as _;
    use tracing::Level;

    #[test]
    fn colors_are_for_terminals_that_want_them() {
        let wants = |no_color: Option<&str>, term: Option<&str>| {
            wants_color(no_color.map(Into::into), term.map(Into::into))
        };
        assert!(wants(None, Some("xterm-256color")) && wants(Some(""), None));
        assert!(!wants(Some("1"), Some("xterm")) && !wants(None, Some("dumb")));
        assert_eq!(mark(Level::ERROR, true), "\x1b[1;31merror:\x1b[0m ");
        assert_eq!(
            [Level::ERROR, Level::WARN, Level::INFO].map(|level| mark(level, false)),
            ["error: ", "warning: ", ""]
        );
    }

    #[test]
    fn messages_do_not_change_the_terminal() {
        let mut out = String::new();
        write!(Escaped(&mut out), "a\u{1b}[31mb\r\u{9b}2Jc\n\td").unwrap();
        assert_eq!(out, "a\\u{1b}[31mb\\r\\u{9b}2Jc\n\td");
    }
}
