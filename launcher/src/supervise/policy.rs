//! Restart policy: after a failure, the job is restarted from the same snapshot, from an older one, or not at all.
//!
//! A *restart point* is the snapshot that the job was resumed from, or its beginning. A job that fails repeatedly before
//! the next snapshot is restarted a few times from the same point, and then from an older snapshot, since the newer one
//! may contain the cause. From a *doubtful* snapshot, which was taken after a process of the job had failed, it is
//! restarted once: a launcher of ranks that looks at its ranks every few seconds fails again when it looks. If that fails
//! too, the policy gives up: restarts without progress would repeat for weeks.
//!
//! A session that cannot begin says nothing about its restart point: the store is unreachable, memory is short, a port
//! is in use. Such failures are counted separately, and retried for longer.

use std::time::Duration;

/// Tries from one restart point.
const TRIES: u32 = 3;
/// Sessions in a row that may fail to begin, at least. With the waits between them, that is more than an hour.
const FAILED_STARTS_MIN: u32 = 30;
/// How many older snapshots are tried.
const STEPS_BACK: u32 = 2;
/// A command that fails this soon after its very first start has a problem with its arguments or the machine, and its
/// user is likely there to see it.
const FIRST_START_FAILURE: Duration = Duration::from_secs(5);
/// Wait before the first restart. The wait doubles with each restart without progress.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// How the job failed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Failure {
    /// It was the first start of this launcher, from the beginning.
    pub is_first_start: bool,
    /// It was resumed from a snapshot.
    pub is_resumed: bool,
    /// It ran, as opposed to a start or resume that failed.
    pub has_run: bool,
    /// How long it ran.
    pub ran_for: Duration,
    /// When its last snapshot was taken that is not doubtful, counted from the begin of the session.
    pub saved_after: Option<Duration>,
    /// Whether it was resumed from a doubtful snapshot, before which a process of the job had failed, and an older one is
    /// not doubtful.
    pub is_doubtful: bool,
    /// How much older the next older snapshot is than the one that it was resumed from; `None` if there is none. Of a
    /// doubtful one: the next that is not.
    pub next_older_by: Option<Duration>,
}

/// What to do after a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Wait, then resume from the newest snapshot.
    Again(Duration),
    /// Wait, then resume from a snapshot older than the one that the job was resumed from.
    StepBack(Duration),
    /// Do not restart, for this reason; `None` if restarts are switched off.
    GiveUp(Option<String>),
}

/// The restart policy, with its state between failures.
#[derive(Debug, Default)]
pub struct Policy {
    max_restarts: u32,
    /// Sessions in a row that may fail to begin.
    max_failed_starts: u32,
    /// Restarts so far.
    pub(super) restarts: u32,
    failures_at_point: u32,
    /// Since the last snapshot, from any restart point.
    failures_in_a_row: u32,
    /// Sessions in a row that could not begin.
    failed_starts: u32,
    steps_back: u32,
    /// How long the job has to run from the older snapshot to pass the point at which it had failed.
    failure_point: Duration,
    /// How much of that is contained in snapshots.
    gained: Duration,
}

impl Policy {
    /// A policy before the first failure. After `older_after`, an older snapshot is tried: a job is not given up before
    /// that, nor before the second one was tried.
    #[must_use]
    pub fn new(max_restarts: u32, older_after: Option<Duration>) -> Self {
        let waits = older_after.unwrap_or_default().as_secs() / (LONGEST_WAIT.as_secs() / 2);
        let waits = u32::try_from(waits).unwrap_or(u32::MAX);
        let max_failed_starts = waits.saturating_mul(2).max(FAILED_STARTS_MIN);
        Self { max_restarts, max_failed_starts, ..Self::default() }
    }

    /// Decides what follows.
    pub fn after(&mut self, failure: &Failure) -> Next {
        if self.max_restarts == 0 {
            return Next::GiveUp(None);
        }
        if failure.has_run {
            self.failed_starts = 0;
            self.count(failure);
        } else {
            self.failed_starts += 1;
        }
        if failure.is_first_start && failure.saved_after.is_none() && failure.ran_for < FIRST_START_FAILURE {
            return Next::GiveUp(Some(format!(
                "it failed {:.1} s after its first start, before there was a snapshot, and would fail again",
                failure.ran_for.as_secs_f64()
            )));
        }
        if self.restarts >= self.max_restarts {
            return Next::GiveUp(Some(format!(
                "it was restarted {} times, which is the limit (--max-restarts)",
                self.restarts
            )));
        }
        if !failure.has_run {
            return self.after_failed_start();
        }
        let wait = wait(self.failures_in_a_row);
        let is_doubtful = failure.is_doubtful && failure.next_older_by.is_some();
        if self.failures_at_point < if is_doubtful { 1 } else { TRIES } {
            self.restarts += 1;
            return Next::Again(wait);
        }
        match failure.next_older_by {
            Some(older_by) if self.steps_back < STEPS_BACK => {
                self.restarts += 1;
                self.step_back(failure, older_by);
                Next::StepBack(wait)
            }
            _ => Next::GiveUp(Some(self.no_progress(failure))),
        }
    }

    /// Whether the latest step was one to an older snapshot, which did not help yet.
    pub(super) fn has_stepped_back(&self) -> bool {
        self.steps_back > 0
    }

    /// The cause may be fixed meanwhile; an older snapshot would discard work.
    fn after_failed_start(&mut self) -> Next {
        if self.failed_starts >= self.max_failed_starts {
            let times = self.failed_starts;
            return Next::GiveUp(Some(format!("it could not be started {times} times in a row")));
        }
        self.restarts += 1;
        Next::Again(wait(self.failed_starts))
    }

    fn count(&mut self, failure: &Failure) {
        match failure.saved_after {
            None => {
                self.failures_at_point += 1;
                self.failures_in_a_row += 1;
            }
            Some(saved_after) => {
                (self.failures_at_point, self.failures_in_a_row) = (0, 1);
                self.gained += saved_after;
            }
        }
        if self.gained > self.failure_point {
            self.steps_back = 0;
        }
    }

    fn step_back(&mut self, failure: &Failure, older_by: Duration) {
        // A second step goes back further. The failure point stays where it was, or is a later one.
        let behind =
            if self.steps_back > 0 { self.failure_point.saturating_sub(self.gained) } else { Duration::ZERO };
        self.failure_point = older_by + failure.ran_for.max(behind);
        self.gained = Duration::ZERO;
        self.steps_back += 1;
        self.failures_at_point = 0;
    }

    fn no_progress(&self, failure: &Failure) -> String {
        let from = if failure.is_resumed {
            "it was resumed from the same snapshot"
        } else {
            "it was started from the beginning"
        };
        let back = match self.steps_back {
            0 => String::new(),
            _ => ", after newer snapshots had been tried in the same way".to_owned(),
        };
        format!("{from} and failed before the next snapshot, {} times in a row{back}", self.failures_at_point)
    }
}

/// The wait after this many failures in a row. Between 50% and 100% of it at random, so that many jobs that fail
/// together are not restarted together.
fn wait(failures_in_a_row: u32) -> Duration {
    let doublings = (failures_in_a_row.max(1) - 1).min(16);
    let longest = FIRST_WAIT.saturating_mul(1 << doublings).min(LONGEST_WAIT);
    longest.mul_f64(0.5 + fastrand::f64() / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn resumed() -> Failure {
        Failure {
            is_first_start: false,
            is_resumed: true,
            has_run: true,
            ran_for: 10 * SECOND,
            saved_after: None,
            is_doubtful: false,
            next_older_by: Some(600 * SECOND),
        }
    }

    fn saved() -> Failure {
        Failure { saved_after: Some(5 * SECOND), ..resumed() }
    }

    fn reason(next: Next) -> String {
        match next {
            Next::GiveUp(Some(reason)) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_job_with_progress_is_restarted_up_to_the_limit() {
        let mut policy = Policy::new(1000, None);
        for _ in 0..1000 {
            assert!(matches!(policy.after(&saved()), Next::Again(_)));
        }
        assert!(reason(policy.after(&saved())).contains("--max-restarts"));
        assert_eq!(policy.restarts, 1000);
    }

    #[test]
    fn a_command_that_fails_at_its_first_start_is_not_restarted() {
        let first = Failure { is_first_start: true, is_resumed: false, ran_for: SECOND, ..resumed() };
        assert!(reason(Policy::new(9, None).after(&first)).contains("first start"));
        let later = Failure { ran_for: 6 * SECOND, ..first };
        assert!(matches!(Policy::new(9, None).after(&later), Next::Again(_)));
        assert_eq!(Policy::new(0, None).after(&first), Next::GiveUp(None));
    }

    #[test]
    fn the_same_point_is_tried_then_older_snapshots_then_none() {
        let mut policy = Policy::new(1000, None);
        // The session that took the snapshots ends.
        assert!(matches!(policy.after(&saved()), Next::Again(_)));
        for _ in 0..STEPS_BACK {
            for _ in 1..TRIES {
                assert!(matches!(policy.after(&resumed()), Next::Again(_)));
            }
            assert!(matches!(policy.after(&resumed()), Next::StepBack(_)));
        }
        for _ in 1..TRIES {
            assert!(matches!(policy.after(&resumed()), Next::Again(_)));
        }
        assert!(reason(policy.after(&resumed())).contains("same snapshot"));
    }

    #[test]
    fn a_doubtful_snapshot_is_tried_once() {
        let doubtful = Failure { is_doubtful: true, ..resumed() };
        let mut policy = Policy::new(1000, None);
        // The session in which the process failed.
        assert!(matches!(policy.after(&saved()), Next::Again(_)));
        assert!(matches!(policy.after(&doubtful), Next::StepBack(_)));
        assert!(matches!(policy.after(&resumed()), Next::Again(_)));
        // Where all snapshots are doubtful, as others are.
        let only = Failure { next_older_by: None, ..doubtful };
        let mut policy = Policy::new(1000, None);
        assert!(matches!(policy.after(&only), Next::Again(_)));
        assert!(matches!(policy.after(&only), Next::Again(_)));
        assert!(matches!(policy.after(&only), Next::GiveUp(_)));
    }

    #[test]
    fn without_an_older_snapshot_the_policy_gives_up_earlier() {
        let mut policy = Policy::new(1000, None);
        let only = Failure { next_older_by: None, ..resumed() };
        assert!(matches!(policy.after(&only), Next::Again(_)));
        assert!(matches!(policy.after(&only), Next::Again(_)));
        assert!(reason(policy.after(&only)).contains("3 times in a row"));
    }

    /// Retries last long enough for a machine to recover, and no older snapshot is used.
    #[test]
    fn failed_starts_are_retried_for_an_hour() {
        let mut policy = Policy::new(1000, None);
        let not = Failure { has_run: false, ..resumed() };
        let mut waited = Duration::ZERO;
        let reason = loop {
            match policy.after(&not) {
                Next::Again(wait) => waited += wait,
                Next::StepBack(_) => panic!("work is discarded"),
                Next::GiveUp(reason) => break reason.unwrap(),
            }
        };
        assert!(reason.contains("could not be started 30 times in a row"), "{reason}");
        assert!(waited > Duration::from_secs(3600) && waited < Duration::from_secs(3 * 3600), "{waited:?}");
        let mut policy = Policy::new(2, None);
        assert!(matches!(policy.after(&not), Next::Again(_)));
        assert!(matches!(policy.after(&not), Next::Again(_)));
        let Next::GiveUp(Some(reason)) = policy.after(&not) else { panic!("more restarts than the limit") };
        assert!(reason.contains("--max-restarts"), "{reason}");
    }

    #[test]
    fn failed_sessions_and_failed_starts_are_counted_separately() {
        let not = Failure { has_run: false, ..resumed() };
        let only = Failure { next_older_by: None, ..resumed() };
        let mut policy = Policy::new(1000, None);
        assert!(matches!(policy.after(&only), Next::Again(_)));
        assert!(matches!(policy.after(&only), Next::Again(_)));
        for _ in 1..FAILED_STARTS_MIN {
            assert!(
                matches!(policy.after(&not), Next::Again(_)),
                "a problem of the machine is not the job's"
            );
        }
        assert!(
            reason(policy.after(&only)).contains("3 times in a row"),
            "the third session from that point"
        );
        // A session that has begun resets the count.
        for _ in 1..FAILED_STARTS_MIN {
            assert!(matches!(policy.after(&not), Next::Again(_)));
        }
    }

    /// A job that always fails at the same point takes snapshots between the older one and that point. These must not
    /// count as progress.
    #[test]
    fn snapshots_before_the_failure_point_are_no_progress() {
        let mut policy = Policy::new(1000, None);
        let mut restarts = 0;
        loop {
            // Resumed at most 600 s before the failure point, the job takes snapshots up to 5 s before it.
            let failure = if restarts % 4 == 0 {
                Failure { saved_after: Some(600 * SECOND), ran_for: 605 * SECOND, ..resumed() }
            } else {
                Failure { ran_for: 5 * SECOND, ..resumed() }
            };
            match policy.after(&failure) {
                Next::GiveUp(_) => break,
                _ => restarts += 1,
            }
        }
        assert!(restarts < 20, "{restarts}");
        // Past the failure point, the steps back are reset.
        let mut policy = Policy::new(1000, None);
        (0..TRIES).for_each(|_| drop(policy.after(&resumed())));
        assert_eq!(policy.steps_back, 1);
        policy.after(&Failure { saved_after: Some(611 * SECOND), ..resumed() });
        assert_eq!(policy.steps_back, 0);
    }

    #[test]
    fn waits_grow_up_to_a_limit() {
        let mut longest = Duration::ZERO;
        for failures in 1..40 {
            let wait = wait(failures);
            assert!(wait >= FIRST_WAIT / 2 && wait <= LONGEST_WAIT);
            longest = longest.max(wait);
        }
        assert!(longest >= LONGEST_WAIT / 2);
    }
}
