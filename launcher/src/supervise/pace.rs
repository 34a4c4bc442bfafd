//! How often snapshots are taken: at a fixed interval, or as often as a budget allows and failures ask for.
//!
//! With `--overhead`, the job stands still for at most that share of the time. With `--mtbf`, the interval is the one
//! that loses least to snapshots and failures together; both: whatever is longer.

use std::collections::VecDeque;
use std::time::Duration;

/// Until something has been measured, a snapshot is taken after at most so long: the sooner, the sooner it is known.
const FIRST: Duration = Duration::from_secs(60);
/// So many of the last snapshots count: a stall changes with what the job does.
const REMEMBERED: usize = 5;
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// What is wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wanted {
    /// Between two snapshots; `None` is none at all.
    pub interval: Option<Duration>,
    /// The largest share of the time that the job may stand still for snapshots, above 0 and below 1.
    pub overhead: Option<f64>,
    /// Mean time between failures.
    pub mtbf: Option<Duration>,
}

/// Finds the interval.
#[derive(Debug)]
pub struct Pace {
    wanted: Wanted,
    /// How long the job stood still, and how long it took until the snapshot was durable.
    measured: VecDeque<(Duration, Duration)>,
}

impl Pace {
    /// Nothing has been measured yet.
    #[must_use]
    pub fn new(wanted: Wanted) -> Self {
        Self { wanted, measured: VecDeque::new() }
    }

    /// Whether the interval depends on what is measured.
    #[must_use]
    pub fn is_measured(&self) -> bool {
        self.wanted.overhead.is_some() || self.wanted.mtbf.is_some()
    }

    /// One more snapshot is durable.
    pub fn measure(&mut self, stall: Duration, durable: Duration) {
        self.measured.truncate(REMEMBERED - 1);
        self.measured.push_front((stall, durable));
    }

    /// The time from one snapshot to the next; `None` is never.
    #[must_use]
    pub fn interval(&self) -> Option<Duration> {
        if !self.is_measured() {
            return self.wanted.interval;
        }
        let Some(durable) = self.measured.iter().map(|one| one.1).max() else {
            return Some(self.wanted.interval.map_or(FIRST, |interval| interval.min(FIRST)));
        };
        let stalls: Duration = self.measured.iter().map(|one| one.0).sum();
        let stall_s = stalls.as_secs_f64() / self.measured.len() as f64;
        let budget_s = self.wanted.overhead.map(|share| stall_s / share - stall_s);
        let least_lost_s = self.wanted.mtbf.map(|mtbf| daly_s(stall_s, mtbf.as_secs_f64()));
        let wanted_s = budget_s.into_iter().chain(least_lost_s).fold(0.0, f64::max);
        let wanted = Duration::from_secs_f64(wanted_s.min(LONGEST.as_secs_f64()));
        // A snapshot has to be stored before the next one is taken.
        Some(wanted.max(durable).clamp(SHORTEST, LONGEST))
    }
}

/// The interval between checkpoints that loses least: J. T. Daly, "A higher order estimate of the optimum checkpoint
/// interval for restart dumps", Future Generation Computer Systems 22 (2006), equation 37. Its first term is Young's.
fn daly_s(stall_s: f64, mtbf_s: f64) -> f64 {
    if stall_s >= 2.0 * mtbf_s {
        return mtbf_s;
    }
    let ratio = stall_s / (2.0 * mtbf_s);
    (2.0 * stall_s * mtbf_s).sqrt() * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - stall_s
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const HOUR: Duration = Duration::from_secs(3600);
    const FIXED: Wanted = Wanted { interval: Some(Duration::from_secs(600)), overhead: None, mtbf: None };

    fn after(wanted: Wanted, stalls_ms: &[u64]) -> f64 {
        let mut pace = Pace::new(wanted);
        stalls_ms.iter().for_each(|&ms| pace.measure(Duration::from_millis(ms), SECOND));
        pace.interval().unwrap().as_secs_f64()
    }

    #[test]
    fn without_a_budget_the_interval_is_fixed() {
        assert_eq!(after(FIXED, &[9000]), 600.0);
        assert_eq!(Pace::new(Wanted { interval: None, ..FIXED }).interval(), None);
    }

    #[test]
    fn a_budget_is_kept() {
        let wanted = Wanted { overhead: Some(0.01), ..FIXED };
        assert_eq!(after(wanted, &[]), 60.0);
        assert_eq!(after(Wanted { interval: Some(10 * SECOND), ..wanted }, &[]), 10.0);
        let interval = after(wanted, &[2000]);
        assert!((2.0 / (2.0 + interval) - 0.01).abs() < 1e-9, "{interval}");
        // The mean of the last ones: what is long past does not count.
        assert_eq!(after(wanted, &[50_000, 1000, 3000, 1000, 3000, 2000]), interval);
        assert_eq!(after(wanted, &[1]), 1.0, "not more often than they can be stored");
    }

    #[test]
    fn failures_ask_for_dalys_interval() {
        let wanted = Wanted { mtbf: Some(24 * HOUR), ..FIXED };
        // sqrt(2 * 10 * 86400) = 1314.5 (Young), and little more than nothing besides.
        let interval = after(wanted, &[10_000]);
        assert!((1306.0..1310.0).contains(&interval), "{interval}");
        let strict = Wanted { overhead: Some(0.001), ..wanted };
        assert_eq!(after(strict, &[10_000]), after(Wanted { mtbf: None, ..strict }, &[10_000]));
        assert_eq!(daly_s(100.0, 40.0), 40.0);
    }

    #[test]
    fn there_are_bounds() {
        let wanted = Wanted { overhead: Some(0.0001), ..FIXED };
        assert_eq!(after(wanted, &[3_600_000]), LONGEST.as_secs_f64());
    }
}
