//! A store that does not answer while nothing of the job runs: at a start, and in a resume until the snapshot is read.
//!
//! Requests of object stores have time limits. A directory has none: a read from a network file system whose server is
//! away does not return, and cannot be cancelled. So a thread watches, says what is waited for, and ends ckpt-run after a
//! time. The next run of the same command begins anew: nothing is lost but snapshots that only this process has in memory, so
//! with such snapshots it waits on.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use crate::store::options::StoreOptions;
use crate::sys::deadline::{STORE_ANSWER_POLL_INTERVAL, STORE_ANSWER_REPORT, STORE_ANSWER_TIMEOUT};
use crate::sys::span::span;

/// Watches what is asked of a store in a directory. One thread asks at a time; others may note answers.
#[derive(Clone)]
pub struct AnswerWatch(Arc<Shared>);

struct Shared {
    store: String,
    /// After this time without an answer ckpt-run ends; `None`: never.
    limit: Option<Duration>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What ckpt-run is doing, for people, while it waits for the store.
    doing: Option<&'static str>,
    /// How long the store has not answered. Polls are counted, and not the time: a process or a machine may be stopped.
    silent: Duration,
}

impl AnswerWatch {
    /// Watches a store. With snapshots in memory (`has_memory`) ckpt-run waits for ever; otherwise `end` ends it.
    #[must_use]
    pub fn start(options: &StoreOptions, has_memory: bool, end: fn()) -> Self {
        let limit = (!has_memory).then(limit);
        let shared = Arc::new(Shared { store: options.name(), limit, state: Mutex::default() });
        if options.url.is_none() {
            shared.watch(end);
        }
        Self(shared)
    }

    /// Does `work`, which waits for the store; `doing` says what that is: "while …".
    pub fn during<T>(&self, doing: &'static str, work: impl FnOnce() -> T) -> T {
        *self.0.state.lock() = State { doing: Some(doing), silent: Duration::ZERO };
        let done = work();
        self.0.state.lock().doing = None;
        done
    }

    /// The store has answered, and the work goes on.
    pub fn answered(&self) {
        self.0.state.lock().silent = Duration::ZERO;
    }
}

impl Shared {
    fn watch(self: &Arc<Self>, end: fn()) {
        let watched = Arc::downgrade(self);
        let watch = move || {
            while let Some(shared) = watched.upgrade() {
                if shared.is_over() {
                    end();
                }
                drop(shared);
                thread::sleep(STORE_ANSWER_POLL_INTERVAL);
            }
        };
        if let Err(error) = thread::Builder::new().name("store-answers".to_owned()).spawn(watch) {
            tracing::warn!("a store that does not answer would not be noticed: {error}");
        }
    }

    /// Counts the time of one poll, and reports a store that is silent. Whether that takes too long.
    fn is_over(&self) -> bool {
        let mut state = self.state.lock();
        let Some(doing) = state.doing else { return false };
        state.silent += STORE_ANSWER_POLL_INTERVAL;
        let silent = state.silent;
        drop(state);
        let Self { store, limit, .. } = self;
        match limit {
            Some(limit) if silent >= *limit => {
                tracing::error!(
                    "the store {store} has not answered for {} while {doing}: ckpt-run ends. Nothing of the job is running, and its snapshots are as they were. Once the store answers, run the same command again",
                    span(silent)
                );
                return true;
            }
            Some(limit) if silent == STORE_ANSWER_REPORT => tracing::warn!(
                "the store {store} has not answered for {} while {doing}: waiting up to {} for it",
                span(silent),
                span(*limit)
            ),
            None if silent == STORE_ANSWER_REPORT => tracing::warn!(
                "the store {store} has not answered for {} while {doing}: waiting for it, since there are snapshots in memory (--persist-every)",
                span(silent)
            ),
            _ => {}
        }
        false
    }
}

/// [`STORE_ANSWER_TIMEOUT`], or as a test sets it.
fn limit() -> Duration {
    #[cfg(feature = "faults")]
    if let Ok(limit_ms) = std::env::var("CKPT_FAULT_STORE_ANSWER_MS") {
        return Duration::from_millis(limit_ms.parse().expect("milliseconds"));
    }
    STORE_ANSWER_TIMEOUT
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(limit: Option<Duration>) -> Shared {
        Shared { store: "/store".to_owned(), limit, state: Mutex::default() }
    }

    #[test]
    fn only_silence_counts() {
        let watch = AnswerWatch(Arc::new(shared(Some(2 * STORE_ANSWER_POLL_INTERVAL))));
        let polled = || watch.0.is_over();
        assert!(!polled() && !polled() && !polled(), "nothing is asked of the store");
        watch.during("testing", || {
            assert!(!polled());
            watch.answered();
            assert!(!polled() && polled());
        });
        watch.during("testing", || assert!(!polled() && polled(), "time begins anew"));
        assert!(!polled());
    }

    #[test]
    fn snapshots_in_memory_are_not_given_up() {
        let watch = AnswerWatch(Arc::new(shared(None)));
        watch.during("testing", || assert!((0..1000).all(|_| !watch.0.is_over())));
    }
}
