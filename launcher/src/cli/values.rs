//! The value of an option as text, its origin, and the parsers that several options share.

use crate::cli::config::HangTimeout;
use crate::sys::error::bad_input;
use crate::sys::runtime_dir;
use crate::sys::secrets;
use anyhow::{Context, Result, anyhow};
use ckpt_object_medium::StoreUrl;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// The command line.
    Flag,
    /// An environment variable.
    Variable(String),
    /// A configuration file.
    File(PathBuf),
    /// The default.
    Default,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Flag => out.write_str("command line"),
            Self::Variable(name) => write!(out, "variable {name}"),
            Self::File(path) => out.write_str(&path.display().to_string()),
            Self::Default => out.write_str("default"),
        }
    }
}

/// One option with its value as text.
#[derive(Clone, Debug, Serialize)]
pub struct Resolved {
    /// The option.
    pub name: &'static str,
    /// Its value; empty means none.
    pub value: String,
    /// Where the value comes from.
    pub origin: Origin,
    /// What the value means on this machine, where the value itself does not say so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
}

impl Resolved {
    /// The same without secrets in the value.
    #[must_use]
    pub fn redacted(&self) -> Self {
        Self { value: secrets::hidden_in_text(&self.value), ..self.clone() }
    }

    /// The value as `parse` reads it. `expected` describes valid values.
    ///
    /// # Errors
    /// Bad input: `parse` returns `None`.
    pub fn parse<T>(&self, expected: &str, parse: impl FnOnce(&str) -> Option<T>) -> Result<T> {
        parse(&self.value).ok_or_else(|| {
            let Self { name, value, origin, .. } = self.redacted();
            bad_input(anyhow!("{name} = {value:?} ({origin}): this must be {expected}"))
        })
    }

    /// Puts the value into a field of the configuration.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn put<T>(&self, field: &mut T, expected: &str, parse: impl FnOnce(&str) -> Option<T>) -> Result<()> {
        *field = self.parse(expected, parse)?;
        Ok(())
    }

    /// The value as a path, if there is one.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        (!self.value.is_empty()).then(|| PathBuf::from(&self.value))
    }

    /// The value as the URL of an object store, if there is one.
    ///
    /// # Errors
    /// Bad input.
    pub fn url(&self) -> Result<Option<StoreUrl>> {
        if self.value.is_empty() {
            return Ok(None);
        }
        let invalid = |error| bad_input(anyhow!("{} ({}): {error}", self.name, self.origin));
        self.value.parse::<StoreUrl>().map(Some).map_err(invalid)
    }

    /// The value as the location of a store: its directory on this machine, and its URL if it has one.
    ///
    /// # Errors
    /// Bad input.
    pub fn store(&mut self) -> Result<(PathBuf, Option<StoreUrl>)> {
        if let Some(meant) = StoreUrl::misspelt(&self.value) {
            let Self { value, origin, .. } = self.redacted();
            return Err(bad_input(anyhow!(
                "store = {value:?} ({origin}) would be a directory of that name. Did you mean {}? For the directory: ./{value}",
                secrets::hidden_in_text(&meant)
            )));
        }
        if !StoreUrl::is_address(&self.value) {
            let dir = self.path();
            return Ok((self.parse("a directory, or a URL such as s3://BUCKET/PREFIX", |_| dir)?, None));
        }
        let url = self.url()?;
        let text = url.as_ref().map(ToString::to_string).unwrap_or_default();
        let state = runtime_dir::state_dir()
            .context("there is no directory on this machine for locks and logs")
            .map_err(|error| bad_input(error.context("set XDG_STATE_HOME to a directory")))?;
        let dir = state.join("stores").join(runtime_dir::short_name(Path::new(&text)));
        self.found = Some(format!("on this machine: {}", dir.display()));
        Ok((dir, url))
    }
}

/// A number from 1.
#[must_use]
pub fn positive<T: FromStr + Default + PartialOrd>(text: &str) -> Option<T> {
    text.parse().ok().filter(|number| *number > T::default())
}

/// How often a flag is given.
#[must_use]
pub fn count(text: &str) -> Option<i32> {
    text.parse().ok().filter(|&count| count >= 0)
}

/// A time that is not zero.
#[must_use]
pub fn duration(text: &str) -> Option<Duration> {
    humantime::parse_duration(text).ok().filter(|duration| !duration.is_zero())
}

/// A time, or `auto`.
#[must_use]
pub fn hang_timeout(text: &str) -> Option<HangTimeout> {
    if text == "auto" { Some(HangTimeout::Auto) } else { duration(text).map(HangTimeout::After) }
}

/// Another value, or `None` for `off`.
pub fn or_off<T>(parse: impl FnOnce(&str) -> Option<T>) -> impl FnOnce(&str) -> Option<Option<T>> {
    |text| if text == "off" { Some(None) } else { parse(text).map(Some) }
}

/// A value of a type that has a text form.
#[must_use]
pub fn parsed<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

/// One of the names of an enum, as serde knows them.
#[must_use]
pub fn named<T: DeserializeOwned>(text: &str) -> Option<T> {
    serde_json::from_value(text.into()).ok()
}

/// Another value, or `None` for an empty one.
pub fn optional<T>(parse: impl FnOnce(&str) -> Option<T>) -> impl FnOnce(&str) -> Option<Option<T>> {
    |text| if text.is_empty() { Some(None) } else { parse(text).map(Some) }
}

/// A percentage above 0 and up to 50, as a fraction of 1.
#[must_use]
pub fn share(text: &str) -> Option<f64> {
    let share = text.strip_suffix('%')?.trim().parse::<f64>().ok()? / 100.0;
    (share > 0.0 && share <= 0.5).then_some(share)
}

/// A signal that a scheduler may send, with or without the prefix `SIG`.
fn preempting_signal(name: &str) -> Option<i32> {
    Some(match name.strip_prefix("SIG").unwrap_or(name) {
        "TERM" => libc::SIGTERM,
        "USR1" => libc::SIGUSR1,
        "USR2" => libc::SIGUSR2,
        "HUP" => libc::SIGHUP,
        "INT" => libc::SIGINT,
        "QUIT" => libc::SIGQUIT,
        "XCPU" => libc::SIGXCPU,
        _ => return None,
    })
}

/// Signals that a scheduler may send, separated by commas.
#[must_use]
pub fn preempting_signals(names: &str) -> Option<Vec<i32>> {
    names.split(',').map(|name| preempting_signal(name.trim())).collect()
}

/// A port, on the loopback interface unless an address is given.
#[must_use]
pub fn listen_address(text: &str) -> Option<SocketAddr> {
    let port = text.strip_prefix("localhost").unwrap_or(text);
    match port.strip_prefix(':').unwrap_or(port).parse() {
        Ok(port) => Some((Ipv4Addr::LOCALHOST, port).into()),
        Err(_) => text.parse().ok(),
    }
}

/// Bytes per second: `200MiB/s`.
#[must_use]
pub fn rate(text: &str) -> Option<u64> {
    size(text.strip_suffix("/s").unwrap_or(text)).filter(|&rate| rate > 0)
}

/// Bytes: `1GiB`.
#[must_use]
pub fn size(text: &str) -> Option<u64> {
    let amount = text.trim();
    let digits = amount.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(amount.len());
    let (number, unit) = amount.split_at(digits);
    let unit: u64 = match unit.trim() {
        "" | "B" => 1,
        "kB" | "KB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read() {
        assert_eq!(rate("200MiB/s"), Some(200 << 20));
        assert_eq!((rate("5 kB"), rate("7")), (Some(5000), Some(7)));
        for bad in ["", "fast", "0", "-1MB", "1.5GB", "99999999999GiB/s"] {
            assert_eq!(rate(bad), None, "{bad:?}");
        }
    }
}
