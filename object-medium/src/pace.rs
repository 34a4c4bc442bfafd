//! The rate of uploads: a limit in bytes per second, and pauses while the job uses the network.

use crate::traffic::{Decision, PausePolicy, TrafficMonitor, sent_bytes};
use parking_lot::Mutex;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Polling interval of the network traffic during a pause, and of changes of the limit.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// The kernel's byte counters of each network interface.
const INTERFACES: &str = "/sys/class/net";

/// The rate of uploads. Several media may share it, and it can be changed during uploads.
#[derive(Debug)]
pub struct Pace {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    limit_bytes_per_s: Option<u64>,
    /// When the admitted bytes will have been sent at the rate limit.
    busy_until: Instant,
    let_through_bytes: u64,
    watch: Option<TrafficMonitor>,
    is_paused: bool,
    interfaces: PathBuf,
    /// Neither the limit nor the pauses count.
    is_hurried: bool,
}

impl Default for Pace {
    fn default() -> Self {
        Self::new(None, None)
    }
}

impl Pace {
    /// A rate with an optional limit (bytes per second) and an optional policy for pauses.
    #[must_use]
    pub fn new(limit_bytes_per_s: Option<u64>, pauses: Option<PausePolicy>) -> Self {
        let state = State {
            limit_bytes_per_s,
            busy_until: Instant::now(),
            let_through_bytes: 0,
            watch: pauses.map(TrafficMonitor::new),
            is_paused: false,
            interfaces: INTERFACES.into(),
            is_hurried: false,
        };
        Self { state: Mutex::new(state) }
    }

    /// The limit (bytes per second).
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        self.state.lock().limit_bytes_per_s
    }

    /// The policy for pauses.
    #[must_use]
    pub fn pauses(&self) -> Option<PausePolicy> {
        self.state.lock().watch.as_ref().map(|watch| watch.policy.clone())
    }

    /// Changes the limit. Uploads that are waiting already keep their old start time.
    pub fn set_limit(&self, limit_bytes_per_s: Option<u64>) {
        self.state.lock().limit_bytes_per_s = limit_bytes_per_s;
    }

    /// From now on, neither the limit nor the pauses count: for the last uploads before this machine is preempted.
    pub fn hurry(&self) {
        let mut state = self.state.lock();
        state.is_hurried = true;
        state.busy_until = Instant::now();
    }

    /// Undoes [`Self::hurry`].
    pub fn relax(&self) {
        self.state.lock().is_hurried = false;
    }

    /// Bytes of uploads admitted so far, including retries.
    #[must_use]
    pub fn let_through_bytes(&self) -> u64 {
        self.state.lock().let_through_bytes
    }

    /// Waits until `bytes` may be sent.
    pub(crate) async fn wait(&self, bytes: u64) {
        while self.paused() {
            sleep(POLL_INTERVAL).await;
        }
        let begin = self.state.lock().reserve(Instant::now(), bytes);
        // In steps, to notice a call of `hurry`.
        while let Some(left) = begin.checked_duration_since(Instant::now()) {
            if left.is_zero() || self.state.lock().effective_limit().is_none() {
                break;
            }
            sleep(left.min(POLL_INTERVAL)).await;
        }
    }

    fn paused(&self) -> bool {
        let mut state = self.state.lock();
        if state.is_hurried {
            return false;
        }
        let State { let_through_bytes, watch: Some(watch), interfaces, .. } = &mut *state else {
            return false;
        };
        match sent_bytes(interfaces) {
            Ok(sent) => {
                let is_paused = watch.sample(Instant::now(), sent, *let_through_bytes) == Decision::Pause;
                let job_bytes_per_s = watch.job_bytes_per_s;
                if std::mem::replace(&mut state.is_paused, is_paused) != is_paused {
                    let action = if is_paused { "pausing" } else { "resuming" };
                    tracing::debug!("{action} uploads: the job sends {job_bytes_per_s} bytes per second");
                }
                is_paused
            }
            Err(error) => {
                tracing::warn!(
                    "cannot read the network counters in {}, uploads will not pause for the job: {error}",
                    interfaces.display()
                );
                state.watch = None;
                false
            }
        }
    }
}

impl State {
    fn effective_limit(&self) -> Option<u64> {
        self.limit_bytes_per_s.filter(|_| !self.is_hurried)
    }

    /// Admits `bytes` and returns when to send them: when all bytes admitted before were sent at the limit.
    fn reserve(&mut self, now: Instant, bytes: u64) -> Instant {
        self.let_through_bytes += bytes;
        let begin = self.busy_until.max(now);
        if let Some(limit) = self.effective_limit() {
            let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(limit.max(1));
            let takes = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
            self.busy_until = begin.checked_add(takes).unwrap_or(begin);
        }
        begin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reserve(pace: &Pace, now: Instant, bytes: u64) -> Duration {
        pace.state.lock().reserve(now, bytes).duration_since(now)
    }

    #[test]
    fn uploads_take_turns_at_the_limit() {
        let pace = Pace::new(Some(1000), None);
        let now = Instant::now();
        assert_eq!(reserve(&pace, now, 500), Duration::ZERO, "the first goes at once");
        assert_eq!(reserve(&pace, now, 2000), Duration::from_millis(500));
        assert_eq!(reserve(&pace, now, 1), Duration::from_millis(2500));
        assert_eq!(pace.let_through_bytes(), 2501);
    }

    #[test]
    fn idle_time_does_not_accumulate_credit() {
        let pace = Pace::new(Some(1000), None);
        let now = Instant::now();
        reserve(&pace, now, 1000);
        let later = now + Duration::from_secs(60);
        assert_eq!(reserve(&pace, later, 1000), Duration::ZERO);
        assert_eq!(reserve(&pace, later, 1000), Duration::from_secs(1));
    }

    #[test]
    fn without_a_limit_nothing_waits() {
        let pace = Pace::default();
        let now = Instant::now();
        for _ in 0..10 {
            assert_eq!(reserve(&pace, now, 1 << 40), Duration::ZERO);
        }
    }

    #[test]
    fn uploads_pause_while_the_job_sends() {
        let interfaces = tempfile::tempdir().unwrap();
        let statistics = interfaces.path().join("eth0/statistics");
        std::fs::create_dir_all(&statistics).unwrap();
        let policy = PausePolicy { above_bytes_per_s: 1000, longest_pause: Duration::from_secs(1000) };
        let pace = Pace::new(None, Some(policy));
        pace.state.lock().interfaces = interfaces.path().to_owned();
        let deadline = Instant::now() + Duration::from_secs(300);
        let mut sent_bytes = 0;
        while !pace.paused() {
            assert!(Instant::now() < deadline, "the job has sent {sent_bytes} bytes");
            sent_bytes += 1_000_000;
            std::fs::write(statistics.join("tx_bytes"), sent_bytes.to_string()).unwrap();
            std::thread::sleep(Duration::from_millis(10));
        }
        // From now on the job sends nothing.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let resumed =
            runtime.block_on(async { tokio::time::timeout(Duration::from_secs(300), pace.wait(7)).await });
        resumed.expect("uploads resume");
        assert_eq!(pace.let_through_bytes(), 7);
        assert!(!pace.state.lock().is_paused);
    }

    #[test]
    fn hurry_admits_waiting_uploads() {
        let pace = Pace::new(Some(1), None);
        pace.state.lock().reserve(Instant::now(), 1_000_000);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let waits = pace.wait(1);
            let hurries = async { pace.hurry() };
            let both = futures_util::future::join(waits, hurries);
            tokio::time::timeout(Duration::from_secs(300), both).await.expect("it was admitted");
        });
        let at = Instant::now();
        assert_eq!(reserve(&pace, at, 5), Duration::ZERO);
        // The limit counts again.
        pace.relax();
        assert_eq!((reserve(&pace, at, 5), reserve(&pace, at, 1)), (Duration::ZERO, Duration::from_secs(5)));
    }
}
