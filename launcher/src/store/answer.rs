//! A store that does not answer while nothing of the job runs: at a start, and in a resume until the snapshot is read.
//!
//! Requests of object stores have time limits. A directory has none: a read from a network file system whose server is
//! away does not return, and cannot be cancelled. So a thread watches, says what is waited for, and ends ckpt-run after a
//! time. The next run of the same command begins anew: nothing is lost but snapshots that only this process has in memory, so
//! with such snapshots it waits on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use crate::store::options::StoreOptions;
use crate::sys::deadline::{STORE_ANSWER_POLL_INTERVAL, STORE_ANSWER_REPORT, STORE_ANSWER_TIMEOUT};
use crate::sys::path_text::read_text;
use crate::sys::span::span;

/// What ckpt-run does before the job's processes run, for [`AnswerWatch::during`].
pub const RECORDING: &str = "the records of a run were being written";

/// Watches what is asked of a store in a directory. One thread asks at a time; others may note answers.
#[derive(Clone)]
pub struct AnswerWatch(Arc<Shared>);

struct Shared {
    store: String,
    /// After this time without an answer ckpt-run ends, unless it has snapshots in memory.
    limit: Duration,
    has_memory: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What ckpt-run is doing, for people, while it waits for the store.
    doing: Option<&'static str>,
    /// The thread that asks.
    thread: Option<rustix::thread::Pid>,
    /// How often this thread has begun to wait or was made to wait: with the next time, something has answered.
    waits: u64,
    /// How long the store has not answered. Polls are counted, and not the time: a process or a machine may be stopped.
    silent: Duration,
}

impl AnswerWatch {
    /// Watches a store. `end` ends ckpt-run.
    #[must_use]
    pub fn start(options: &StoreOptions, end: fn()) -> Self {
        let (has_memory, state) = (AtomicBool::new(false), Mutex::default());
        let shared = Arc::new(Shared { store: options.name(), limit: limit(), has_memory, state });
        if options.url.is_none() {
            shared.watch(end);
        }
        Self(shared)
    }

    /// Does `work`, which waits for the store; `doing` says what that is: "while …".
    pub fn during<T>(&self, doing: &'static str, work: impl FnOnce() -> T) -> T {
        let thread = Some(rustix::thread::gettid());
        *self.0.state.lock() = State { doing: Some(doing), thread, ..State::default() };
        let done = work();
        self.0.state.lock().doing = None;
        done
    }

    /// From now on, this process may have snapshots that are nowhere else: it is not ended any more.
    pub fn has_memory(&self) {
        self.0.has_memory.store(true, Ordering::Relaxed);
    }

    /// The store has answered another thread than the one that asks, and the work goes on.
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
        let waits = state.thread.and_then(waits_of).unwrap_or_default();
        if std::mem::replace(&mut state.waits, waits) != waits {
            state.silent = Duration::ZERO;
            return false;
        }
        state.silent += STORE_ANSWER_POLL_INTERVAL;
        let silent = state.silent;
        drop(state);
        let Self { store, limit, .. } = self;
        let has_memory = self.has_memory.load(Ordering::Relaxed);
        if silent >= *limit && !has_memory {
            tracing::error!(
                "the store {store} has not answered for {} while {doing}: ckpt-run ends. Nothing of the job is running, and its snapshots are as they were. Once the store answers, run the same command again",
                span(silent)
            );
            return true;
        }
        if silent == STORE_ANSWER_REPORT {
            let until = if has_memory {
                "waiting for it, since there are snapshots in memory (--persist-every)".to_owned()
            } else {
                format!("waiting up to {} for it", span(*limit))
            };
            tracing::warn!("the store {store} has not answered for {} while {doing}: {until}", span(silent));
        }
        false
    }
}

/// How often a thread of this process has waited, or was made to wait: it does neither in one request that is not answered.
fn waits_of(thread: rustix::thread::Pid) -> Option<u64> {
    let path = format!("/proc/self/task/{}/status", thread.as_raw_nonzero());
    let status = read_text(path).ok()?;
    let counts = status.lines().filter_map(|line| line.split_once("ctxt_switches:"));
    Some(counts.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum())
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

    fn watch(limit: Duration) -> AnswerWatch {
        let (has_memory, state) = (AtomicBool::new(false), Mutex::default());
        AnswerWatch(Arc::new(Shared { store: "/store".to_owned(), limit, has_memory, state }))
    }

    /// Polls while another thread waits for the store.
    fn while_another_waits(watch: &AnswerWatch, polls: impl FnOnce()) {
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (done, is_done) = std::sync::mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                watch.during("testing", || {
                    begun.send(()).unwrap();
                    let _ = is_done.recv();
                });
            });
            has_begun.recv().unwrap();
            polls();
            drop(done);
        });
    }

    #[test]
    fn a_thread_that_waits_on_and_on_is_too_long() {
        let watch = watch(2 * STORE_ANSWER_POLL_INTERVAL);
        assert!((0..3).all(|_| !watch.0.is_over()), "nothing is asked of the store");
        while_another_waits(&watch, || {
            assert!((0..1000).any(|_| watch.0.is_over()));
            watch.answered();
            assert!(!watch.0.is_over(), "the time begins anew");
        });
        assert!((0..3).all(|_| !watch.0.is_over()));
    }

    #[test]
    fn a_thread_that_goes_on_is_not() {
        let watch = watch(2 * STORE_ANSWER_POLL_INTERVAL);
        let poll = || thread::scope(|scope| scope.spawn(|| watch.0.is_over()).join().unwrap());
        watch.during("testing", || assert!((0..100).all(|_| !poll())));
    }

    #[test]
    fn snapshots_in_memory_are_not_given_up() {
        let watch = watch(STORE_ANSWER_POLL_INTERVAL);
        watch.has_memory();
        while_another_waits(&watch, || assert!((0..1000).all(|_| !watch.0.is_over())));
    }
}
