//! The checkpoint interval: fixed, or computed from measured pauses.
//!
//! With `--overhead`, the job is paused for at most that share of the time. With `--mtbf`, the interval minimises the time
//! lost to snapshots and failures together. With both, the longer interval is used.

use std::collections::VecDeque;
use std::time::Duration;

/// The longest time to the first snapshot: an early snapshot gives an early measurement.
const FIRST: Duration = Duration::from_secs(60);
/// Number of snapshots over which pauses are averaged: they change with what the job does.
const REMEMBERED: usize = 5;
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// The options that determine the interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PaceOptions {
    /// The fixed interval; `None` takes no snapshots.
    pub interval: Option<Duration>,
    /// The largest share of the time that snapshots may pause the job, above 0 and below 1.
    pub overhead: Option<f64>,
    /// Mean time between failures.
    pub mtbf: Option<Duration>,
}

/// Computes the interval.
#[derive(Debug)]
pub struct Pace {
    options: PaceOptions,
    /// For each snapshot: how long the job was paused, and how long the snapshot took to become durable.
    measured: VecDeque<(Duration, Duration)>,
}

impl Pace {
    /// Before any measurement.
    #[must_use]
    pub fn new(options: PaceOptions) -> Self {
        Self { options, measured: VecDeque::new() }
    }

    /// Whether the interval depends on measurements.
    #[must_use]
    pub fn is_measured(&self) -> bool {
        self.options.overhead.is_some() || self.options.mtbf.is_some()
    }

    /// Adds the measurements of a snapshot.
    pub fn measure(&mut self, stall: Duration, durable: Duration) {
        self.measured.truncate(REMEMBERED - 1);
        self.measured.push_front((stall, durable));
    }

    /// The time from the start of a job to its first snapshot; `None` takes no snapshots. An early one shows early whether
    /// the job can be saved at all.
    #[must_use]
    pub fn first(&self) -> Option<Duration> {
        self.interval().map(|interval| interval.min(FIRST))
    }

    /// The time from one snapshot to the next; `None` takes no snapshots.
    #[must_use]
    pub fn interval(&self) -> Option<Duration> {
        if !self.is_measured() {
            return self.options.interval;
        }
        let Some(durable) = self.measured.iter().map(|one| one.1).max() else {
            return Some(self.options.interval.map_or(FIRST, |interval| interval.min(FIRST)));
        };
        let stalls: Duration = self.measured.iter().map(|one| one.0).sum();
        let stall_s = stalls.as_secs_f64() / self.measured.len() as f64;
        let budget_s = self.options.overhead.map(|share| stall_s / share - stall_s);
        let least_lost_s = self.options.mtbf.map(|mtbf| daly_s(stall_s, mtbf.as_secs_f64()));
        let wanted_s = budget_s.into_iter().chain(least_lost_s).fold(0.0, f64::max);
        let wanted = Duration::from_secs_f64(wanted_s.min(LONGEST.as_secs_f64()));
        // A snapshot has to be stored before the next one is taken.
        Some(wanted.max(durable).clamp(SHORTEST, LONGEST))
    }
}

/// The optimal checkpoint interval: J. T. Daly, "A higher order estimate of the optimum checkpoint
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

    #[test]
    fn the_first_snapshot_comes_early() {
        let pace = |interval| Pace::new(PaceOptions { interval, overhead: None, mtbf: None });
        assert_eq!(pace(Some(10 * FIRST)).first(), Some(FIRST));
        assert_eq!(pace(Some(SECOND)).first(), Some(SECOND));
        assert_eq!(pace(None).first(), None);
    }

    const SECOND: Duration = Duration::from_secs(1);
    const HOUR: Duration = Duration::from_secs(3600);
    const FIXED: PaceOptions =
        PaceOptions { interval: Some(Duration::from_secs(600)), overhead: None, mtbf: None };

    fn after(wanted: PaceOptions, stalls_ms: &[u64]) -> f64 {
        let mut pace = Pace::new(wanted);
        stalls_ms.iter().for_each(|&ms| pace.measure(Duration::from_millis(ms), SECOND));
        pace.interval().unwrap().as_secs_f64()
    }

    #[test]
    fn without_a_budget_the_interval_is_fixed() {
        assert_eq!(after(FIXED, &[9000]), 600.0);
        assert_eq!(Pace::new(PaceOptions { interval: None, ..FIXED }).interval(), None);
    }

    #[test]
    fn a_budget_is_kept() {
        let wanted = PaceOptions { overhead: Some(0.01), ..FIXED };
        assert_eq!(after(wanted, &[]), 60.0);
        assert_eq!(after(PaceOptions { interval: Some(10 * SECOND), ..wanted }, &[]), 10.0);
        let interval = after(wanted, &[2000]);
        assert!((2.0 / (2.0 + interval) - 0.01).abs() < 1e-9, "{interval}");
        // The mean of the last snapshots: older ones do not count.
        assert_eq!(after(wanted, &[50_000, 1000, 3000, 1000, 3000, 2000]), interval);
        assert_eq!(after(wanted, &[1]), 1.0, "not more often than snapshots can be stored");
    }

    #[test]
    fn a_failure_rate_gives_dalys_interval() {
        let wanted = PaceOptions { mtbf: Some(24 * HOUR), ..FIXED };
        // sqrt(2 * 10 * 86400) = 1314.5 (Young), and small corrections.
        let interval = after(wanted, &[10_000]);
        assert!((1306.0..1310.0).contains(&interval), "{interval}");
        let strict = PaceOptions { overhead: Some(0.001), ..wanted };
        assert_eq!(after(strict, &[10_000]), after(PaceOptions { mtbf: None, ..strict }, &[10_000]));
        assert_eq!(daly_s(100.0, 40.0), 40.0);
    }

    #[test]
    fn the_interval_is_bounded() {
        let wanted = PaceOptions { overhead: Some(0.0001), ..FIXED };
        assert_eq!(after(wanted, &[3_600_000]), LONGEST.as_secs_f64());
    }
}
