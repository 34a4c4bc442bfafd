//! A job that is ended before its end: by `ckpt-run stop`, by a signal to any of its launchers, or by a preemption trigger.
//!
//! ```text
//!             a last snapshot is requested          committed
//!   running ───────────────────────────► stopping ─────────────────────────────────────► End, saved
//!      ▲                                    │ not saved ──► Preempt: SIGTERM to all parts ──► all have ended, or the end of
//!      └────────────────────────────────────┴──────────────── Save: RunsOn                    the grace period: End
//! ```
//!
//! A snapshot that was in progress before is followed by another one if it had captured the job, and there is time for it, or
//! if it fails.

use super::{Host, Notice};
use crate::cluster::messages::{End, Message, StopHow};
use crate::sys::error::EXIT_PREEMPTED;
use ckpt_cluster::{AttemptId, Step};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// An attempt that was in progress when the job was to be stopped.
#[derive(Clone, Copy)]
struct Earlier {
    attempt: AttemptId,
    /// It had captured the job.
    has_captured: bool,
    /// Its snapshot is not only in memory.
    is_durable: bool,
}

/// A job that is being stopped.
pub(super) struct Stopping {
    why: String,
    how: StopHow,
    since: Instant,
    grace: Duration,
    /// The attempt that was in progress before.
    earlier: Option<Earlier>,
    /// The last snapshot has failed once.
    is_tried_again: bool,
    /// The job cannot be saved, for this reason. Its parts have the rest of the grace period to end by themselves.
    terminated: Option<String>,
}

impl Stopping {
    /// The end of the grace period, if it has one: who has called `ckpt-run stop` waits.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.is_preemption().then(|| self.since + self.grace)
    }

    /// Whether the job ends within the grace period, saved or not.
    pub(super) fn is_preemption(&self) -> bool {
        self.how != StopHow::Save
    }

    /// Whether there is time for another snapshot.
    fn has_time(&self) -> bool {
        !self.is_preemption() || self.since.elapsed() < self.grace / 2
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
        let _ = self.notices.send(Notice::Stopping);
        let in_progress = self.gate.as_ref().filter(|gate| gate.end().is_none());
        let earlier = in_progress.map(|gate| Earlier {
            attempt: gate.attempt(),
            has_captured: gate.has_done(Step::Dump),
            is_durable: gate.is_durable(),
        });
        let (grace, since) = (self.grace, Instant::now());
        self.stopping =
            Some(Stopping { why, how, since, grace, earlier, is_tried_again: false, terminated: None });
        if !self.ended.is_empty() {
            self.not_saved("a part of it has ended already, so no snapshot can be taken");
        } else if !self.request(true) {
            self.not_saved("no snapshot can be taken yet");
        } else if let Some(earlier) = earlier.filter(|earlier| !earlier.is_durable) {
            // It would be worth nothing, and takes time. The last one is requested again when it is over.
            let why = "the job is to end, and its last snapshot goes to the stores";
            self.peer.give_up(self.now(), earlier.attempt, why);
        }
    }

    /// A snapshot is committed.
    pub(super) fn stop_committed(&mut self, attempt: AttemptId) {
        let Some(stopping) = self.stopping.as_mut().filter(|one| one.terminated.is_none()) else { return };
        let earlier = stopping.earlier.take().filter(|earlier| earlier.attempt == attempt);
        // What is only in memory is lost with the launchers.
        let is_followed =
            |earlier: Earlier| !earlier.is_durable || earlier.has_captured && stopping.has_time();
        if earlier.is_some_and(is_followed) {
            self.request(true);
        } else if let Some(stopping) = self.stopping.take() {
            self.end_stopped(format!("{}; its last snapshot is committed", stopping.why), true);
        }
    }

    /// An attempt was given up.
    pub(super) fn stop_aborted(&mut self, attempt: AttemptId, why: &str) {
        let Some(stopping) = self.stopping.as_mut().filter(|one| one.terminated.is_none()) else { return };
        // What is only in memory would be lost: it is tried twice.
        let is_tried_again = self.every > 1 && stopping.has_time() && !stopping.is_tried_again;
        if stopping.earlier.take().is_some_and(|earlier| earlier.attempt == attempt) {
            self.request(true);
        } else if is_tried_again {
            stopping.is_tried_again = true;
            self.request(true);
        } else {
            self.not_saved(&format!("its last snapshot failed: {why}"));
        }
    }

    /// There is no last snapshot.
    pub(super) fn not_saved(&mut self, why: &str) {
        let Some(mut stopping) = self.stopping.take() else { return };
        if stopping.is_preemption() {
            let is_late = stopping.deadline().is_some_and(|deadline| deadline <= Instant::now());
            // Nothing runs yet that could end by itself.
            if is_late || self.is_resuming || stopping.terminated.is_some() {
                let why = stopping.terminated.unwrap_or_else(|| why.to_owned());
                return self.end_stopped(format!("{}; {why}", stopping.why), false);
            }
            stopping.terminated = Some(why.to_owned());
            self.stopping = Some(stopping);
            self.failing = None;
            self.tell_all(&Message::Terminate { why: why.to_owned() });
            let _ = self.notices.send(Notice::Terminate(why.to_owned()));
            return self.look_for_end();
        }
        tracing::warn!("{}, and runs on: {why}", stopping.why);
        self.aftermath.is_to_stop.store(false, Ordering::SeqCst);
        self.tell_all(&Message::RunsOn { why: why.to_owned() });
        let _ = self.notices.send(Notice::RunsOn(why.to_owned()));
        // It was not looked for meanwhile.
        self.look_for_hang();
    }

    /// Whether the parts of the job have been told to end by themselves.
    pub(super) fn is_terminating(&self) -> bool {
        self.stopping.as_ref().is_some_and(|stopping| stopping.terminated.is_some())
    }

    /// The job is over once all parts have ended, whatever their codes: also with 0, it has not come to its end.
    pub(super) fn look_for_end(&mut self) {
        if self.ended.len() + self.failed.len() == self.settings.nodes as usize
            && let Some(Stopping { why, terminated: Some(reason), .. }) = self.stopping.take()
        {
            self.end_stopped(format!("{why}; {reason}"), false);
        }
    }

    fn end_stopped(&mut self, why: String, is_saved: bool) {
        let end = End::failure(why, EXIT_PREEMPTED);
        self.end(End { is_requested: true, is_saved, ..end });
    }
}

#[cfg(test)]
mod tests {
    use super::super::Input;
    use super::*;
    use crate::cluster::messages::{EndedPart, IdlePart};

    const ATTEMPT: AttemptId = AttemptId { epoch: 1, number: 3 };

    /// The job runs.
    fn running() -> (Host, crossbeam_channel::Receiver<Input>, crossbeam_channel::Receiver<Notice>) {
        let (host, inbox, notices) = super::super::tests::host(0);
        (Host { is_resuming: false, ..host }, inbox, notices)
    }

    /// Of what the supervisor learns: why the job gets SIGTERM, and how it has ended.
    fn told(notices: &crossbeam_channel::Receiver<Notice>) -> (Option<String>, Option<End>) {
        let (mut terminated, mut ended) = (None, None);
        for notice in notices.try_iter() {
            match notice {
                Notice::Terminate(why) => terminated = Some(why),
                Notice::End(end) => ended = Some(end),
                _ => {}
            }
        }
        (terminated, ended)
    }

    #[test]
    fn a_preempted_job_that_cannot_be_saved_has_its_grace_to_end_by_itself() {
        let (mut host, _inbox, notices) = running();
        host.stop("SIGTERM".to_owned(), StopHow::Preempt);
        let (terminated, ended) = told(&notices);
        assert!(terminated.is_some() && ended.is_none(), "{ended:?}");
        host.receive(0, Message::PartEnded(EndedPart::own(143)));
        assert!(told(&notices).1.is_none() && host.failing.is_none(), "node 1 has not ended");
        host.receive(1, Message::PartEnded(EndedPart::own(0)));
        assert_preempted(&told(&notices).1.unwrap());
        // A program that saves itself, and ends with 0, has not come to its end.
        let (mut host, _inbox, notices) = running();
        host.stop("SIGTERM".to_owned(), StopHow::Preempt);
        (0..2).for_each(|rank| host.receive(rank, Message::PartEnded(EndedPart::own(0))));
        assert!(!host.is_completing);
        assert_preempted(&told(&notices).1.unwrap());
    }

    fn assert_preempted(end: &End) {
        assert_eq!((end.code, end.is_requested, end.is_saved), (EXIT_PREEMPTED, true, false), "{}", end.why);
    }

    /// A scheduler may signal the processes of the job, too: one of them ends while the last snapshot is taken.
    #[test]
    fn a_part_that_fails_during_the_last_snapshot_leaves_the_others_their_grace() {
        for is_told_first in [true, false] {
            let (mut host, _inbox, notices) = running();
            stopping(&mut host, StopHow::Preempt, None);
            host.receive(1, Message::PartEnded(EndedPart::own(143)));
            if is_told_first {
                let (rank, end, _) = host.failing.take().unwrap();
                host.over(rank, end);
            }
            host.stop_aborted(ATTEMPT, "node 1: its part of the job has ended");
            let (terminated, ended) = told(&notices);
            assert!(terminated.is_some() && ended.is_none() && host.failing.is_none(), "{ended:?}");
            host.receive(0, Message::PartEnded(EndedPart::own(143)));
            assert_preempted(&told(&notices).1.unwrap());
        }
    }

    #[test]
    fn a_job_that_is_being_resumed_needs_no_grace() {
        let (mut host, _inbox, notices) = running();
        host.is_resuming = true;
        host.stop("SIGTERM".to_owned(), StopHow::Preempt);
        let (terminated, ended) = told(&notices);
        assert!(terminated.is_none());
        assert_preempted(&ended.unwrap());
        // A resume that fails meanwhile says so.
        let (mut host, _inbox, notices) = super::super::tests::host(0);
        stopping(&mut host, StopHow::Preempt, None);
        host.over(1, End::failure("node 1: a damaged snapshot".to_owned(), 125));
        assert_eq!(told(&notices).1.unwrap().code, 125);
    }

    /// The parts do nothing while `ckpt-run stop` waits for a snapshot.
    #[test]
    fn a_job_that_runs_on_may_hang() {
        let (mut host, _inbox, notices) = running();
        stopping(&mut host, StopHow::Save, None);
        for rank in 0..2 {
            let part = IdlePart { what: "idle".to_owned(), idle_ms: 9000 };
            host.receive(rank, Message::Idle { part: Some(part) });
        }
        let is_over = || notices.try_iter().any(|notice| matches!(notice, Notice::Over(_)));
        assert!(!is_over());
        host.stop_aborted(ATTEMPT, "its ranks do not come to the same collective");
        assert!(is_over());
    }

    fn stopping(host: &mut Host, how: StopHow, earlier: Option<Earlier>) {
        let (why, grace, since) = ("SIGTERM".to_owned(), Duration::from_secs(3600), Instant::now());
        host.stopping =
            Some(Stopping { why, how, since, grace, earlier, is_tried_again: false, terminated: None });
    }

    #[test]
    fn the_grace_of_a_job_that_cannot_be_saved_ends() {
        let (mut host, _inbox, notices) = running();
        host.stop("SIGTERM".to_owned(), StopHow::Preempt);
        let why = told(&notices).0.unwrap();
        host.stopping.as_mut().unwrap().grace = Duration::ZERO;
        host.watch_times();
        let end = told(&notices).1.unwrap();
        assert!(end.code == EXIT_PREEMPTED && end.why.ends_with(&why), "{}", end.why);
    }

    #[test]
    fn a_second_signal_and_a_stop_of_its_user_need_no_grace() {
        let (mut host, _inbox, notices) = running();
        host.stop("SIGTERM".to_owned(), StopHow::Preempt);
        host.stop("SIGTERM".to_owned(), StopHow::Now);
        assert!(told(&notices).1.is_some());
        let (mut host, _inbox, notices) = running();
        host.stop("stop".to_owned(), StopHow::Save);
        let (terminated, ended) = told(&notices);
        assert!(terminated.is_none() && ended.is_none() && host.stopping.is_none(), "it runs on");
    }

    /// A snapshot that was in progress when the signal came is committed. It is the last one, unless it is only in memory.
    #[test]
    fn a_snapshot_in_memory_is_not_the_last_one() {
        for is_durable in [true, false] {
            let (mut host, _inbox, notices) = running();
            let earlier = Earlier { attempt: ATTEMPT, has_captured: false, is_durable };
            stopping(&mut host, StopHow::Preempt, Some(earlier));
            host.stopping.as_mut().unwrap().since = Instant::now() - Duration::from_secs(3000);
            host.stop_committed(ATTEMPT);
            assert_eq!((told(&notices).1.is_some(), host.stopping.is_none()), (is_durable, is_durable));
        }
    }

    /// A snapshot at an interval was in progress when the signal came, and failed for a reason of its own.
    #[test]
    fn an_earlier_attempt_that_fails_does_not_cancel_the_last_snapshot() {
        for has_captured in [true, false] {
            let (mut host, _inbox, notices) = running();
            stopping(
                &mut host,
                StopHow::Preempt,
                Some(Earlier { attempt: ATTEMPT, has_captured, is_durable: true }),
            );
            host.stop_aborted(ATTEMPT, "a connection was being opened");
            assert!(told(&notices).0.is_none() && host.stopping.is_some(), "another one is awaited");
            host.stop_aborted(AttemptId { number: 4, ..ATTEMPT }, "the disk is full");
            assert_eq!(told(&notices).0.as_deref(), Some("its last snapshot failed: the disk is full"));
            // What ends then is not waited for any more.
            host.stop_aborted(ATTEMPT, "a connection was being opened");
            assert!(told(&notices).1.is_none() && host.is_terminating());
        }
    }
}
