//! Notifications (`--notify URL`): what happens to the job is sent to a web address, in a thread of its own. Nothing waits
//! for it while the job runs, and no failure of it has an effect on the job.

use crate::job::journal::{Entry, EventKind};
use crate::sys::deadline::{
    NOTIFY_FIRST_RETRY, NOTIFY_GIVE_UP, NOTIFY_LAST_TIMEOUT, NOTIFY_LONGEST_RETRY, NOTIFY_TIMEOUT,
};
use crate::sys::host;
use anyhow::{Context, Result};
use crossbeam_channel::{Receiver, Sender, unbounded};
use reqwest::StatusCode;
use reqwest::header::CONTENT_TYPE;
use serde::Serialize;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use url::Url;

/// Raised when a field of the body is removed or changes its meaning.
const VERSION: u32 = 1;

/// Where notifications go. Its path is often a secret, and never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Address(Url);

impl Address {
    /// Parses an address; `None` if it is not of HTTP.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let url = Url::parse(text).ok()?;
        (matches!(url.scheme(), "http" | "https") && url.has_host()).then_some(Self(url))
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}://{}/***", self.0.scheme(), self.0.host_str().unwrap_or_default())
    }
}

impl std::fmt::Debug for Address {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{self}")
    }
}

/// The body of a notification.
#[derive(Serialize)]
struct Notification<'a> {
    version: u32,
    event: EventKind,
    job: &'a str,
    store: &'a str,
    host: &'a str,
    unix_ms: u64,
    what: &'a str,
    remedy: Option<&'a str>,
    snapshot: Option<&'a str>,
    /// All of it in words: what chat services show.
    text: String,
}

/// Sends notifications until it is dropped. Those that are left are then sent, for a few seconds at most.
pub struct Notifier {
    entries: Option<Sender<Entry>>,
    thread: Option<JoinHandle<()>>,
}

impl Notifier {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the client or the thread cannot be created.
    pub fn start(address: Address, job: String, store: String) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot prepare notifications (--notify)")?;
        let client = reqwest::Client::builder().timeout(NOTIFY_TIMEOUT).pool_max_idle_per_host(0);
        // A redirect would turn the request into one without a body, and may lead to another host.
        let client = client.redirect(reqwest::redirect::Policy::none()).build();
        let client = client.context("cannot prepare notifications (--notify)")?;
        let (sender, entries) = unbounded::<Entry>();
        let work = move || runtime.block_on(serve(&client, &address, &entries, &job, &store));
        let thread = std::thread::Builder::new().name("notify".to_owned()).spawn(work);
        let thread = thread.context("cannot start the thread for notifications (--notify)")?;
        Ok(Self { entries: Some(sender), thread: Some(thread) })
    }

    /// To where entries of the journal are sent.
    #[must_use]
    pub fn entries(&self) -> Option<Sender<Entry>> {
        self.entries.clone()
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        drop(self.entries.take());
        let deadline = Instant::now() + NOTIFY_LAST_TIMEOUT;
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        if self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            tracing::warn!(
                "the last notifications are not sent (--notify): there was no answer within {} s. The job is not affected",
                NOTIFY_LAST_TIMEOUT.as_secs()
            );
        }
    }
}

/// Whether users want to be told.
fn is_news(kind: EventKind) -> bool {
    use EventKind::{Complete, Ended, Failed, GaveUp, NotStarted, RankLate, Resumed, Started};
    matches!(kind, Started | Resumed | NotStarted | Failed | GaveUp | Ended | Complete | RankLate)
}

fn title(kind: EventKind) -> &'static str {
    match kind {
        EventKind::Started => "started",
        EventKind::Resumed => "resumed",
        EventKind::NotStarted => "could not be started",
        EventKind::GaveUp => "is not restarted any more",
        EventKind::Ended => "was ended",
        EventKind::Complete => "is complete",
        EventKind::RankLate => "has a rank that does nothing",
        _ => "failed",
    }
}

async fn serve(client: &reqwest::Client, to: &Address, entries: &Receiver<Entry>, job: &str, store: &str) {
    let host = host::facts().hostname;
    for entry in entries.iter().filter(|entry| is_news(entry.kind)) {
        let notification = Notification {
            version: VERSION,
            event: entry.kind,
            job,
            store,
            host: &host,
            unix_ms: entry.unix_ms,
            what: &entry.what,
            remedy: entry.remedy.as_deref(),
            snapshot: entry.snapshot.as_deref(),
            text: format!("ckpt-run: job {job} on {host} {}: {}", title(entry.kind), entry.what),
        };
        if let Ok(body) = serde_json::to_vec(&notification)
            && let Err(why) = send(client, to, &body).await
        {
            tracing::warn!(
                "a notification cannot be sent to {to} (--notify): {why}. The job is not affected"
            );
        }
    }
}

/// Sends one body, again and again after errors that may pass.
async fn send(client: &reqwest::Client, to: &Address, body: &[u8]) -> Result<(), String> {
    let (begun, mut wait) = (Instant::now(), NOTIFY_FIRST_RETRY);
    loop {
        let request = client.post(to.0.clone()).header(CONTENT_TYPE, "application/json").body(body.to_vec());
        let why = match request.send().await {
            Ok(response) if response.status().is_success() => return Ok(()),
            Ok(response) if response.status().is_redirection() => {
                return Err(format!("{}. Give the address to which it redirects", response.status()));
            }
            Ok(response) if !may_pass(response.status()) => return Err(response.status().to_string()),
            Ok(response) => response.status().to_string(),
            // Its URL may hold a secret.
            Err(error) => error.without_url().to_string(),
        };
        if begun.elapsed() + wait > NOTIFY_GIVE_UP {
            return Err(why);
        }
        tracing::debug!("a notification is sent again in {wait:?}: {why}");
        tokio::time::sleep(wait).await;
        wait = (2 * wait).min(NOTIFY_LONGEST_RETRY);
    }
}

fn may_pass(status: StatusCode) -> bool {
    status.is_server_error() || [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS].contains(&status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_of_http_and_are_not_printed() {
        let address = Address::parse("https://hooks.example/services/T0/SECRET").unwrap();
        assert_eq!(format!("{address} {address:?}"), "https://hooks.example/*** https://hooks.example/***");
        for bad in ["hooks.example/x", "ftp://hooks.example", "https://", "file:///x"] {
            assert!(Address::parse(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn only_errors_of_the_moment_are_retried() {
        assert!(may_pass(StatusCode::BAD_GATEWAY) && may_pass(StatusCode::TOO_MANY_REQUESTS));
        assert!(!may_pass(StatusCode::NOT_FOUND) && !may_pass(StatusCode::UNAUTHORIZED));
    }
}
