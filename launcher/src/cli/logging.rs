//! The messages of ckpt-run: short on stderr, with times and details in `--log-file`.

use crate::sys::error::bad_input;
use anyhow::{Result, anyhow};
use serde::Deserialize;
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
struct Plain;

struct Message<'a>(&'a mut dyn fmt::Write);

/// Escapes control characters, which would change the terminal: names of files may have some.
struct Escaped<'a>(&'a mut dyn fmt::Write);

impl fmt::Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for letter in text.chars() {
            match letter.is_control() && !"\n\t".contains(letter) {
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
        let kind = match *event.metadata().level() {
            Level::ERROR => "error: ",
            Level::WARN => "warning: ",
            _ => "",
        };
        write!(out, "ckpt-run: {kind}")?;
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
pub fn start(verbosity: i32, format: Format, file: Option<&Path>) -> Result<()> {
    let ours = tracing_subscriber::filter::Targets::new().with_target("ckpt", LevelFilter::TRACE);
    // A closed terminal (SIGHUP) is no reason to end: an error about the error would be.
    let stderr = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).log_internal_errors(false);
    let stderr = match format {
        Format::Text => stderr.event_format(Plain).boxed(),
        Format::Json => stderr.json().boxed(),
    };
    let file = match file {
        None => None,
        Some(path) => {
            let mut options = File::options();
            let file = options.append(true).create(true).mode(0o600).open(path);
            let file = file.map_err(|error| {
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
    use super::Escaped;
    use std::fmt::Write as _;

    #[test]
    fn messages_do_not_change_the_terminal() {
        let mut out = String::new();
        write!(Escaped(&mut out), "a\u{1b}[31mb\r\u{9b}2Jc\n\td").unwrap();
        assert_eq!(out, "a\\u{1b}[31mb\\r\\u{9b}2Jc\n\td");
    }
}
