//! What follows a failure of the job: again from the same snapshot, from an older one, or the end.
//!
//! A *place* is the snapshot that the job was resumed from, or its beginning. A job that fails again and again without
//! getting from there to the next snapshot is tried a few times, then from an older snapshot (what it holds may be
//! what makes the job fail), and then no more: restarts that gain nothing would go on for weeks.
//!
//! A life that cannot even begin says nothing of its place: the store is out of reach, memory is short, a port is
//! taken. That is counted for itself, and waited out for longer.

use std::time::Duration;

/// Tries from one place.
const TRIES: u32 = 3;
/// So many lives in a row may fail to begin: with the waits between them, that is more than an hour.
const BEGINNINGS: u32 = 30;
/// How many times an older snapshot is tried before the end.
const STEPS_BACK: u32 = 2;
/// A command that has failed so soon after its very first start has never got going: what is wrong is in its arguments
/// or on the machine, and its user is likely there to see it.
const NEVER_GOT_GOING: Duration = Duration::from_secs(5);
/// The first restart comes after about so long, each further one without progress after twice the time.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// How the job failed.
#[derive(Clone, Copy, Debug)]
pub struct Failure {
    /// It was the first start of this launcher, from the beginning.
    pub is_first_start: bool,
    /// It was resumed from a snapshot.
    pub is_resumed: bool,
    /// It ran, rather than that it could not be started or resumed.
    pub has_run: bool,
    /// How long it ran.
    pub ran_for: Duration,
    /// When it took its last snapshot, after it had begun.
    pub saved_after: Option<Duration>,
    /// How much older the next older snapshot is than the one that it was resumed from, if there is one.
    pub next_older_by: Option<Duration>,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Wait, then go on from the newest snapshot.
    Again(Duration),
    /// Wait, then go on from a snapshot older than the one that the job was resumed from.
    StepBack(Duration),
    /// It makes no sense any more, for this reason; `None` if that needs no words.
    GiveUp(Option<String>),
}

/// What there is to remember between failures.
#[derive(Debug)]
pub struct Policy {
    max_restarts: u32,
    restarts: u32,
    failures_here: u32,
    /// Since the last snapshot, from wherever.
    failures_in_a_row: u32,
    /// Lives in a row that could not begin.
    failed_beginnings: u32,
    steps_back: u32,
    /// How long the job has to run from the older snapshot to be past the point at which it had failed.
    trouble_after: Duration,
    /// How far it has come since, as far as snapshots have it.
    gained: Duration,
}

impl Policy {
    /// Nothing has happened yet.
    #[must_use]
    pub fn new(max_restarts: u32) -> Self {
        Self {
            max_restarts,
            restarts: 0,
            failures_here: 0,
            failures_in_a_row: 0,
            failed_beginnings: 0,
            steps_back: 0,
            trouble_after: Duration::ZERO,
            gained: Duration::ZERO,
        }
    }

    /// Restarts so far.
    #[must_use]
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// Decides what follows.
    pub fn after(&mut self, failure: &Failure) -> Next {
        if self.max_restarts == 0 {
            return Next::GiveUp(None);
        }
        if failure.has_run {
            self.failed_beginnings = 0;
            self.count(failure);
        } else {
            self.failed_beginnings += 1;
        }
        if failure.is_first_start && failure.saved_after.is_none() && failure.ran_for < NEVER_GOT_GOING {
            return Next::GiveUp(Some(format!(
                "it failed {:.1} s after its first start, before there was a snapshot, and would fail again",
                failure.ran_for.as_secs_f64()
            )));
        }
        if self.restarts >= self.max_restarts {
            return Next::GiveUp(Some(format!(
                "it was restarted {} times, and more is not wanted (--max-restarts)",
                self.restarts
            )));
        }
        if !failure.has_run {
            return self.after_no_beginning();
        }
        let wait = wait(self.failures_in_a_row);
        if self.failures_here < TRIES {
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

    /// What cannot begin may be mended; an older snapshot would throw work away.
    fn after_no_beginning(&mut self) -> Next {
        if self.failed_beginnings >= BEGINNINGS {
            let times = self.failed_beginnings;
            return Next::GiveUp(Some(format!("it could not be started {times} times in a row")));
        }
        self.restarts += 1;
        Next::Again(wait(self.failed_beginnings))
    }

    fn count(&mut self, failure: &Failure) {
        match failure.saved_after {
            None => {
                self.failures_here += 1;
                self.failures_in_a_row += 1;
            }
            Some(saved_after) => {
                (self.failures_here, self.failures_in_a_row) = (0, 1);
                self.gained += saved_after;
            }
        }
        if self.gained > self.trouble_after {
            self.steps_back = 0;
        }
    }

    fn step_back(&mut self, failure: &Failure, older_by: Duration) {
        // A second step goes back further, and the point of trouble stays where it was or is a later one.
        let behind =
            if self.steps_back > 0 { self.trouble_after.saturating_sub(self.gained) } else { Duration::ZERO };
        self.trouble_after = older_by + failure.ran_for.max(behind);
        self.gained = Duration::ZERO;
        self.steps_back += 1;
        self.failures_here = 0;
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
        format!("{from} and failed before the next snapshot, {} times in a row{back}", self.failures_here)
    }
}

/// How long to wait after so many failures in a row: somewhere between half of it and all of it, since many jobs that
/// fail together need not come back together.
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
    fn progress_goes_on_for_as_long_as_restarts_last() {
        let mut policy = Policy::new(1000);
        for _ in 0..1000 {
            assert!(matches!(policy.after(&saved()), Next::Again(_)));
        }
        assert!(reason(policy.after(&saved())).contains("--max-restarts"));
        assert_eq!(policy.restarts(), 1000);
    }

    #[test]
    fn what_never_got_going_is_not_started_again() {
        let first = Failure { is_first_start: true, is_resumed: false, ran_for: SECOND, ..resumed() };
        assert!(reason(Policy::new(9).after(&first)).contains("first start"));
        let later = Failure { ran_for: 6 * SECOND, ..first };
        assert!(matches!(Policy::new(9).after(&later), Next::Again(_)));
        assert_eq!(Policy::new(0).after(&first), Next::GiveUp(None));
    }

    #[test]
    fn the_same_place_is_tried_then_older_ones_then_no_more() {
        let mut policy = Policy::new(1000);
        // The life that took the snapshots ends.
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
    fn without_an_older_snapshot_it_ends_earlier() {
        let mut policy = Policy::new(1000);
        let only = Failure { next_older_by: None, ..resumed() };
        assert!(matches!(policy.after(&only), Next::Again(_)));
        assert!(matches!(policy.after(&only), Next::Again(_)));
        assert!(reason(policy.after(&only)).contains("3 times in a row"));
    }

    /// It is waited out for long enough that a machine in trouble is well again, and no older snapshot is taken.
    #[test]
    fn what_cannot_begin_is_tried_for_an_hour() {
        let mut policy = Policy::new(1000);
        let not = Failure { has_run: false, ..resumed() };
        let mut waited = Duration::ZERO;
        let reason = loop {
            match policy.after(&not) {
                Next::Again(wait) => waited += wait,
                Next::StepBack(_) => panic!("work is thrown away"),
                Next::GiveUp(reason) => break reason.unwrap(),
            }
        };
        assert!(reason.contains("could not be started 30 times in a row"), "{reason}");
        assert!(waited > Duration::from_secs(3600) && waited < Duration::from_secs(3 * 3600), "{waited:?}");
        let mut policy = Policy::new(2);
        assert!(matches!(policy.after(&not), Next::Again(_)));
        assert!(matches!(policy.after(&not), Next::Again(_)));
        let Next::GiveUp(Some(reason)) = policy.after(&not) else { panic!("more than was wanted") };
        assert!(reason.contains("--max-restarts"), "{reason}");
    }

    #[test]
    fn lives_that_fail_and_beginnings_that_fail_are_counted_apart() {
        let not = Failure { has_run: false, ..resumed() };
        let only = Failure { next_older_by: None, ..resumed() };
        let mut policy = Policy::new(1000);
        assert!(matches!(policy.after(&only), Next::Again(_)));
        assert!(matches!(policy.after(&only), Next::Again(_)));
        for _ in 1..BEGINNINGS {
            assert!(matches!(policy.after(&not), Next::Again(_)), "the machine's trouble is not the job's");
        }
        assert!(reason(policy.after(&only)).contains("3 times in a row"), "the third life from there");
        // One that has begun has done away with what was wrong.
        for _ in 1..BEGINNINGS {
            assert!(matches!(policy.after(&not), Next::Again(_)));
        }
    }

    /// A job that fails at the same point for ever takes snapshots between the older one and that point: they must not
    /// count as a way out.
    #[test]
    fn snapshots_before_the_point_of_trouble_are_no_progress() {
        let mut policy = Policy::new(1000);
        let mut restarts = 0;
        loop {
            // It was resumed 600 s before the trouble at the most, and comes to 5 s before it.
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
        // Past it, all is forgotten.
        let mut policy = Policy::new(1000);
        (0..TRIES).for_each(|_| drop(policy.after(&resumed())));
        assert_eq!(policy.steps_back, 1);
        policy.after(&Failure { saved_after: Some(611 * SECOND), ..resumed() });
        assert_eq!(policy.steps_back, 0);
    }

    #[test]
    fn waits_grow_and_have_an_end() {
        let mut longest = Duration::ZERO;
        for failures in 1..40 {
            let wait = wait(failures);
            assert!(wait >= FIRST_WAIT / 2 && wait <= LONGEST_WAIT);
            longest = longest.max(wait);
        }
        assert!(longest >= LONGEST_WAIT / 2);
    }
}
