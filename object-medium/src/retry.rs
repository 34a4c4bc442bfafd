//! Retries: which failures are temporary, how long requests are retried, and the errors of the others. The client
//! library's own retries are off, since it does not know which requests can be repeated safely.

use object_store::Error;
use std::fmt::{self, Display};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};

/// The retry policy: when an attempt times out, and for how long an operation is retried.
#[derive(Clone, Debug)]
pub struct Retry {
    /// An operation fails after this time without progress.
    pub give_up_after: Duration,
    /// The pause after the first failure; it doubles with each further one.
    pub first_pause: Duration,
    /// The longest pause.
    pub longest_pause: Duration,
    /// An attempt times out when nothing was received for this long.
    pub stall: Duration,
    /// An attempt times out when it is slower than this, on average.
    pub slowest_bytes_per_s: u64,
    /// Set once an operation has failed after `give_up_after`. From then on all operations that share it fail at once: where
    /// many questions are asked, only the first waits for a store that does not answer.
    pub has_given_up: Option<Arc<AtomicBool>>,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            give_up_after: Duration::from_secs(300),
            first_pause: Duration::from_millis(200),
            longest_pause: Duration::from_secs(15),
            stall: Duration::from_secs(30),
            slowest_bytes_per_s: 64 << 10,
            has_given_up: None,
        }
    }
}

impl Retry {
    /// The timeout of an attempt to transfer `bytes`.
    pub(crate) fn attempt_limit(&self, bytes: u64) -> Duration {
        self.stall + Duration::from_millis(bytes.saturating_mul(1000) / self.slowest_bytes_per_s.max(1))
    }

    /// Retries `attempt`, which transfers `bytes`, until it succeeds, fails permanently, or the retry timeout expires. The
    /// attempt must be idempotent.
    pub(crate) async fn run<T, F>(
        &self,
        what: &str,
        bytes: u64,
        mut attempt: impl FnMut() -> F,
    ) -> io::Result<T>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let mut backoff = Backoff::new(self);
        loop {
            self.check(what)?;
            let reason = match timeout(self.attempt_limit(bytes), attempt()).await {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(error)) if !is_temporary(&error) => return Err(to_io(what, error)),
                Ok(Err(error)) => error.to_string(),
                Err(_) => self.too_slow(bytes),
            };
            backoff.pause(what, &reason).await?;
        }
    }

    /// Fails if an operation has failed before without an answer, and others are not to wait for one.
    pub(crate) fn check(&self, what: &str) -> io::Result<()> {
        match &self.has_given_up {
            Some(flag) if flag.load(Ordering::Relaxed) => {
                Err(no_answer(what, "the object store has not answered before"))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn too_slow(&self, bytes: u64) -> String {
        format!("no answer within {:?}", self.attempt_limit(bytes))
    }
}

/// The retry state of one operation: exponential backoff with a timeout.
pub(crate) struct Backoff<'a> {
    retry: &'a Retry,
    failing_since: Option<Instant>,
    pause: Duration,
}

impl<'a> Backoff<'a> {
    pub(crate) fn new(retry: &'a Retry) -> Self {
        Self { retry, failing_since: None, pause: retry.first_pause }
    }

    /// Restarts the timeout after progress.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.retry);
    }

    /// Waits after a failure, or returns an error if the timeout has expired.
    pub(crate) async fn pause(&mut self, what: &str, reason: &str) -> io::Result<()> {
        let since = *self.failing_since.get_or_insert_with(Instant::now);
        if since.elapsed() + self.pause > self.retry.give_up_after {
            if let Some(flag) = &self.retry.has_given_up {
                flag.store(true, Ordering::Relaxed);
            }
            let reason = format!("{reason} (retried for {:?})", self.retry.give_up_after);
            return Err(no_answer(what, &reason));
        }
        self.retry.check(what)?;
        tracing::debug!("{what}: {reason}; retrying in {:?}", self.pause);
        sleep(self.pause.mul_f64(jitter())).await;
        self.pause = (self.pause * 2).min(self.retry.longest_pause);
        Ok(())
    }
}

/// A random factor from 0.5 to 1, so that clients that failed together do not retry together.
fn jitter() -> f64 {
    use std::hash::{BuildHasher, RandomState};
    let random = RandomState::new().hash_one(Instant::now());
    f64::from(u16::try_from(random & 0xffff).unwrap_or(0)) / f64::from(u16::MAX) / 2.0 + 0.5
}

/// Whether a retry may succeed: after a connection error, an error of the server, or too many requests.
pub(crate) fn is_temporary(error: &Error) -> bool {
    match error {
        Error::Generic { .. } => match status(error) {
            Some(status) => status >= 500 && status != 501 || matches!(status, 408 | 425 | 429),
            None => true,
        },
        _ => false,
    }
}

/// The HTTP status of the response, which the client library has only in its messages.
pub(crate) fn status(error: &Error) -> Option<u16> {
    let text = error.to_string();
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// Converts an error that is not retried.
pub(crate) fn to_io(what: &str, error: Error) -> io::Error {
    let kind = match &error {
        Error::NotFound { .. } => io::ErrorKind::NotFound,
        Error::AlreadyExists { .. } | Error::Precondition { .. } => io::ErrorKind::AlreadyExists,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => io::ErrorKind::PermissionDenied,
        Error::NotImplemented { .. } | Error::NotSupported { .. } => io::ErrorKind::Unsupported,
        // The library does not distinguish the errors of a listing.
        other => match status(other) {
            Some(401 | 403) => io::ErrorKind::PermissionDenied,
            Some(404) => io::ErrorKind::NotFound,
            _ => io::ErrorKind::Other,
        },
    };
    failure(kind, what, &error)
}

/// A store does not answer: the error in an [`io::Error`] of the kind `TimedOut`.
#[derive(Debug)]
pub struct NoAnswer(String);

impl Display for NoAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoAnswer {}

fn no_answer(what: &str, reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, NoAnswer(format!("{what}: {}", on_one_line(reason))))
}

pub(crate) fn failure(kind: io::ErrorKind, what: &str, reason: &dyn Display) -> io::Error {
    io::Error::new(kind, format!("{what}: {}", on_one_line(&reason.to_string())))
}

/// Shortens error responses, which may be pages of XML, to one line.
fn on_one_line(text: &str) -> String {
    const LONGEST: usize = 600;
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn quick() -> Retry {
        Retry {
            give_up_after: Duration::from_millis(60),
            first_pause: Duration::from_millis(5),
            longest_pause: Duration::from_millis(10),
            stall: Duration::from_millis(20),
            slowest_bytes_per_s: 1 << 20,
            has_given_up: None,
        }
    }

    /// Many questions to a store that does not answer: the first one waits.
    #[test]
    fn after_one_operation_has_given_up_others_that_share_that_fail_at_once() {
        let retry = Retry { has_given_up: Some(Arc::default()), ..quick() };
        let asked = Cell::new(0);
        let ask = |retry: &Retry, answers: bool| {
            block_on(retry.run("asking", 0, || {
                asked.set(asked.get() + 1);
                async move { if answers { Ok(()) } else { Err(generic("connection reset")) } }
            }))
        };
        ask(&retry, true).unwrap();
        let error = ask(&retry, false).unwrap_err().to_string();
        assert!(error.contains("connection reset (retried for 60ms)"), "{error}");
        let before = asked.get();
        let error = ask(&retry.clone(), true).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(error.to_string(), "asking: the object store has not answered before");
        assert_eq!(asked.get(), before);
        ask(&quick(), true).unwrap();
    }

    fn generic(text: &str) -> Error {
        Error::Generic { store: "test", source: text.to_owned().into() }
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
    }

    #[test]
    fn only_temporary_errors_are_retried() {
        for (text, passes) in [
            ("connection reset", true),
            ("Server returned non-2xx status code: 500 Internal Server Error: ", true),
            ("Server returned non-2xx status code: 503 Service Unavailable: ", true),
            ("Server returned non-2xx status code: 429 Too Many Requests: ", true),
            ("Server returned non-2xx status code: 400 Bad Request: ", false),
            ("Server returned non-2xx status code: 501 Not Implemented: ", false),
        ] {
            assert_eq!(is_temporary(&generic(text)), passes, "{text}");
        }
        let missing = Error::NotFound { path: "a".into(), source: "no such key".into() };
        assert!(!is_temporary(&missing));
        assert_eq!(to_io("reading a", missing).kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn error_pages_become_one_line() {
        let page = format!("<Error>\n  <Code>é</Code>\n{}", "ü".repeat(2000));
        let error = failure(io::ErrorKind::Other, "reading a", &page).to_string();
        assert!(error.starts_with("reading a: <Error> <Code>é</Code> ü") && error.ends_with('…'), "{error}");
        assert!(error.chars().count() < 620, "{error}");
    }

    #[test]
    fn retries_until_success() {
        let retry =
            Retry { give_up_after: Duration::from_secs(300), stall: Duration::from_secs(100), ..quick() };
        let attempts = Cell::new(0);
        let attempt = || {
            attempts.set(attempts.get() + 1);
            let works = attempts.get() == 3;
            async move { if works { Ok(7) } else { Err(generic("connection reset")) } }
        };
        assert_eq!(block_on(retry.run("it", 0, attempt)).unwrap(), 7);
        assert_eq!(attempts.get(), 3);
    }

    #[test]
    fn the_timeout_error_has_the_reason() {
        let retry = quick();
        let error =
            block_on(retry.run("it", 0, || async { Err::<(), _>(generic("connection reset")) })).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains("connection reset"), "{error}");
    }

    #[test]
    fn an_attempt_that_hangs_times_out() {
        let retry = quick();
        let error = block_on(retry.run("it", 0, std::future::pending::<Result<(), Error>>)).unwrap_err();
        assert!(error.to_string().contains("no answer within 20ms"), "{error}");
    }

    #[test]
    fn the_attempt_timeout_grows_with_the_bytes() {
        assert_eq!(quick().attempt_limit(2 << 20), Duration::from_millis(2020));
    }

    #[test]
    fn pauses_differ() {
        let all: Vec<f64> = (0..100).map(|_| jitter()).collect();
        assert!(all.iter().all(|one| (0.5..=1.0).contains(one)));
        assert!(all.iter().any(|one| (one - all[0]).abs() > 0.01), "{all:?}");
    }
}
