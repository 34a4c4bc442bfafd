//! How fast uploads may go: a limit in bytes per second, and pauses while the job itself needs the network.

use crate::traffic::{Decision, PausePolicy, Watch, sent_bytes};
use parking_lot::{Mutex, MutexGuard};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// How often the network is looked at during a pause.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Where the kernel says what each interface has sent.
const INTERFACES: &str = "/sys/class/net";

/// The pace of uploads. One may serve several media; it can be changed while uploads are under way.
#[derive(Debug)]
pub struct Pace {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    limit_bytes_per_s: Option<u64>,
    /// When what was let through so far will have gone out at the limit.
    busy_until: Instant,
    let_through_bytes: u64,
    watch: Option<Watch>,
    is_paused: bool,
    interfaces: PathBuf,
}

impl Default for Pace {
    fn default() -> Self {
        Self::new(None, None)
    }
}

impl Pace {
    /// With a limit (bytes per second) and a policy for pauses, or without.
    #[must_use]
    pub fn new(limit_bytes_per_s: Option<u64>, pauses: Option<PausePolicy>) -> Self {
        let state = State {
            limit_bytes_per_s,
            busy_until: Instant::now(),
            let_through_bytes: 0,
            watch: pauses.map(Watch::new),
            is_paused: false,
            interfaces: INTERFACES.into(),
        };
        Self { state: Mutex::new(state) }
    }

    /// The limit (bytes per second).
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        self.lock().limit_bytes_per_s
    }

    /// When it pauses.
    #[must_use]
    pub fn pauses(&self) -> Option<PausePolicy> {
        self.lock().watch.as_ref().map(|watch| watch.policy().clone())
    }

    /// Changes the limit. What waits already waits for as long as it was told to.
    pub fn set_limit(&self, limit_bytes_per_s: Option<u64>) {
        self.lock().limit_bytes_per_s = limit_bytes_per_s;
    }

    /// From now on without limit and pauses: the snapshot is needed elsewhere before this machine goes away.
    pub fn hurry(&self) {
        let mut state = self.lock();
        state.limit_bytes_per_s = None;
        state.busy_until = Instant::now();
        state.watch = None;
    }

    /// Bytes of uploads that were let through so far, those that were sent again included.
    #[must_use]
    pub fn let_through_bytes(&self) -> u64 {
        self.lock().let_through_bytes
    }

    /// Waits until `bytes` may go out.
    pub(crate) async fn wait(&self, bytes: u64) {
        while self.paused() {
            sleep(LOOK_EVERY).await;
        }
        let begin = self.lock().reserve(Instant::now(), bytes);
        // In steps, so that `hurry` is heard.
        while let Some(left) = begin.checked_duration_since(Instant::now()) {
            if left.is_zero() || self.lock().limit_bytes_per_s.is_none() {
                break;
            }
            sleep(left.min(LOOK_EVERY)).await;
        }
    }

    fn paused(&self) -> bool {
        let mut state = self.lock();
        let State { let_through_bytes, watch: Some(watch), interfaces, .. } = &mut *state else {
            return false;
        };
        match sent_bytes(interfaces) {
            Ok(sent) => {
                let is_paused = watch.look(Instant::now(), sent, *let_through_bytes) == Decision::Pause;
                let job_bytes_per_s = watch.job_bytes_per_s();
                if std::mem::replace(&mut state.is_paused, is_paused) != is_paused {
                    let does = if is_paused { "pause" } else { "go on" };
                    tracing::debug!("uploads {does}: the job sends {job_bytes_per_s} bytes per second");
                }
                is_paused
            }
            Err(error) => {
                tracing::warn!("cannot see how busy the network is, uploads do not pause: {error}");
                state.watch = None;
                false
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    /// When `bytes` may begin to go out: when all that was let through before has gone at the limit.
    fn reserve(&mut self, now: Instant, bytes: u64) -> Instant {
        self.let_through_bytes += bytes;
        let begin = self.busy_until.max(now);
        if let Some(limit) = self.limit_bytes_per_s {
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
        pace.lock().reserve(now, bytes).duration_since(now)
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
    fn time_without_uploads_is_not_saved_up() {
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
        pace.lock().interfaces = interfaces.path().to_owned();
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut sent_bytes = 0;
        while !pace.paused() {
            assert!(Instant::now() < deadline, "the job has sent {sent_bytes} bytes");
            sent_bytes += 1_000_000;
            std::fs::write(statistics.join("tx_bytes"), sent_bytes.to_string()).unwrap();
            std::thread::sleep(Duration::from_millis(10));
        }
        // From now on it sends nothing.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let goes_on =
            runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), pace.wait(7)).await });
        goes_on.expect("it goes on");
        assert_eq!(pace.let_through_bytes(), 7);
        assert!(!pace.lock().is_paused);
    }

    #[test]
    fn those_who_wait_are_let_go_in_a_hurry() {
        let pace = Pace::new(Some(1), None);
        pace.lock().reserve(Instant::now(), 1_000_000);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let waits = pace.wait(1);
            let hurries = async { pace.hurry() };
            let both = futures_util::future::join(waits, hurries);
            tokio::time::timeout(Duration::from_secs(20), both).await.expect("it was let go");
        });
        assert_eq!(reserve(&pace, Instant::now(), 1), Duration::ZERO);
    }
}
