//! A job that is ended before its end: by `ckpt-run stop`, by a signal to any of its launchers, or by a preemption trigger.
//!
//! ```text
//!             a last snapshot is requested          committed
//!   running ───────────────────────────► stopping ─────────────────────────────────────► End, saved
//!      ▲                                    │ not saved ──► Preempt, Now: ─────────────► End
//!      └────────────────────────────────────┴──────────────── Save: RunsOn
//! ```
//!
//! A snapshot that was in progress and had captured the job before is followed by another one, if there is time for it.

use super::{Host, Notice};
use crate::cluster::messages::{End, Message, StopHow};
use crate::sys::error::EXIT_PREEMPTED;
use ckpt_cluster::{AttemptId, Step};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A job that is being stopped.
pub(super) struct Stopping {
    why: String,
    how: StopHow,
    since: Instant,
    grace: Duration,
    /// The attempt that had captured the job before.
    earlier: Option<AttemptId>,
}

impl Stopping {
    /// The end of the grace period, if it has one: who has called `ckpt-run stop` waits.
    pub(super) fn deadline(&self) -> Option<Instant> {
        (self.how != StopHow::Save).then(|| self.since + self.grace)
    }

    /// Whether there is time for another snapshot.
    fn has_time(&self) -> bool {
        self.how == StopHow::Save || self.since.elapsed() < self.grace / 2
    }
}

impl Host {
    /// The job is to be ended.
    pub(super) fn stop(&mut self, why: String, how: StopHow) {
        self.aftermath.is_to_stop.store(true, Ordering::SeqCst);
        match &mut self.stopping {
            _ if how == StopHow::Now || self.is_waiting => return self.end_stopped(why, false),
            Some(stopping) => {
                // A scheduler signals the launchers of all nodes.
                if stopping.how == StopHow::Save && how == StopHow::Preempt {
                    (stopping.how, stopping.why, stopping.since) = (how, why, Instant::now());
                }
                return;
            }
            None => {}
        }
        tracing::info!("{why}: a last snapshot of all nodes is taken, then the job ends");
        self.tell_all(&Message::Stopping);
        let has_captured =
            |gate: &&std::sync::Arc<super::Gate>| gate.end().is_none() && gate.has_done(Step::Dump);
        let earlier = self.gate.as_ref().filter(has_captured).map(|gate| gate.attempt());
        let grace = self.grace;
        self.stopping = Some(Stopping { why, how, since: Instant::now(), grace, earlier });
        if !self.ended.is_empty() {
            self.not_saved("a part of it has ended already, so no snapshot can be taken");
        } else if !self.peer.request(self.now()) {
            self.not_saved("no snapshot can be taken yet");
        }
    }

    /// A snapshot is committed.
    pub(super) fn stop_committed(&mut self, attempt: AttemptId) {
        let now = self.now();
        let Some(stopping) = &mut self.stopping else { return };
        if stopping.earlier.take() == Some(attempt) && stopping.has_time() {
            self.peer.request(now);
        } else if let Some(stopping) = self.stopping.take() {
            self.end_stopped(format!("{}; its last snapshot is committed", stopping.why), true);
        }
    }

    /// An attempt was given up.
    pub(super) fn stop_aborted(&mut self, attempt: AttemptId, why: &str) {
        let now = self.now();
        let Some(stopping) = &mut self.stopping else { return };
        if stopping.earlier.take() == Some(attempt) {
            self.peer.request(now);
        } else {
            self.not_saved(&format!("its last snapshot failed: {why}"));
        }
    }

    /// There is no last snapshot.
    pub(super) fn not_saved(&mut self, why: &str) {
        let Some(stopping) = self.stopping.take() else { return };
        if stopping.how != StopHow::Save {
            return self.end_stopped(format!("{}; {why}", stopping.why), false);
        }
        tracing::warn!("{}, and runs on: {why}", stopping.why);
        self.aftermath.is_to_stop.store(false, Ordering::SeqCst);
        self.tell_all(&Message::RunsOn { why: why.to_owned() });
        let _ = self.notices.send(Notice::RunsOn(why.to_owned()));
    }

    fn end_stopped(&mut self, why: String, is_saved: bool) {
        let end = End::failure(why, EXIT_PREEMPTED);
        self.end(End { is_requested: true, is_saved, ..end });
    }
}
