//! Detects network traffic of the job from the byte counters of the interfaces.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// When uploads pause for the job's own traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PausePolicy {
    /// Uploads pause while the job sends more than this on one interface. They resume when it sends less than three
    /// quarters of this (bytes per second).
    pub above_bytes_per_s: u64,
    /// After a pause of this length one part is sent anyway, so that uploads make progress.
    pub longest_pause: Duration,
}

/// Whether to send now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Send.
    Go,
    /// Wait and sample again.
    Pause,
}

/// Monitors the traffic of the interfaces and decides when to pause.
#[derive(Debug)]
pub struct TrafficMonitor {
    pub(crate) policy: PausePolicy,
    last: Option<Sample>,
    /// The job's traffic on the busiest interface at the last sample (bytes per second).
    pub(crate) job_bytes_per_s: u64,
    paused_since: Option<Instant>,
}

#[derive(Debug)]
struct Sample {
    at: Instant,
    sent: InterfaceTraffic,
    own_bytes: u64,
}

/// Bytes that each interface has sent since it came up, by its name.
pub type InterfaceTraffic = BTreeMap<String, u64>;

/// Samples closer together than this are too inaccurate.
const MIN_SAMPLE_INTERVAL: Duration = Duration::from_millis(200);

impl TrafficMonitor {
    /// A monitor without samples: its first decision is [`Decision::Go`].
    #[must_use]
    pub fn new(policy: PausePolicy) -> Self {
        Self { policy, last: None, job_bytes_per_s: 0, paused_since: None }
    }

    /// Adds a sample of the counters and of our own uploaded bytes, and decides.
    pub fn sample(&mut self, now: Instant, sent: InterfaceTraffic, own_bytes: u64) -> Decision {
        match &self.last {
            Some(last) if now.duration_since(last.at) < MIN_SAMPLE_INTERVAL => {}
            last => {
                if let Some(last) = last {
                    self.job_bytes_per_s = job_bytes_per_s(last, now, &sent, own_bytes);
                }
                self.last = Some(Sample { at: now, sent, own_bytes });
            }
        }
        self.decide(now)
    }

    fn decide(&mut self, now: Instant) -> Decision {
        let above = self.policy.above_bytes_per_s;
        let bound = if self.paused_since.is_some() { above / 4 * 3 } else { above };
        if self.job_bytes_per_s <= bound {
            self.paused_since = None;
            return Decision::Go;
        }
        let since = *self.paused_since.get_or_insert(now);
        if now.duration_since(since) < self.policy.longest_pause {
            return Decision::Pause;
        }
        self.paused_since = Some(now);
        Decision::Go
    }
}

/// The traffic of the busiest interface, not the sum: a bond and its members would be counted twice.
fn job_bytes_per_s(last: &Sample, now: Instant, sent: &InterfaceTraffic, own_bytes: u64) -> u64 {
    // A new interface, or one whose counter was reset, counts from the next sample on.
    let since = |(name, bytes): (&String, &u64)| bytes.checked_sub(*last.sent.get(name)?);
    let busiest = sent.iter().filter_map(since).max().unwrap_or(0);
    let own = own_bytes.saturating_sub(last.own_bytes);
    // Our own traffic also has headers, TLS records and retransmissions.
    let job = busiest.saturating_sub(own.saturating_add(own / 10));
    let millis = now.duration_since(last.at).as_millis().max(1);
    u64::try_from(u128::from(job) * 1000 / millis).unwrap_or(u64::MAX)
}

/// Bytes sent by each interface except the loopback, from a directory such as /sys/class/net (see the kernel's
/// Documentation/ABI/testing/sysfs-class-net-statistics).
///
/// # Errors
/// If the directory cannot be read.
pub fn sent_bytes(interfaces: &Path) -> io::Result<InterfaceTraffic> {
    let mut all = InterfaceTraffic::new();
    for entry in std::fs::read_dir(interfaces)? {
        let entry = entry?;
        let interface = entry.file_name().to_string_lossy().into_owned();
        if interface == "lo" {
            continue;
        }
        // An interface may be removed between listing and reading, and not every entry is an interface.
        let Ok(text) = std::fs::read_to_string(entry.path().join("statistics/tx_bytes")) else { continue };
        if let Ok(bytes) = text.trim().parse() {
            all.insert(interface, bytes);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(all: &[(&str, u64)]) -> InterfaceTraffic {
        all.iter().map(|&(name, bytes)| (name.to_owned(), bytes)).collect()
    }

    /// A monitor that pauses above 1000 bytes per second, for 10 s at most, and a clock.
    struct Scene {
        watch: TrafficMonitor,
        now: Instant,
        eth: u64,
        own: u64,
    }

    impl Scene {
        fn new() -> Self {
            let policy = PausePolicy { above_bytes_per_s: 1000, longest_pause: Duration::from_secs(10) };
            let mut scene =
                Self { watch: TrafficMonitor::new(policy), now: Instant::now(), eth: 1 << 40, own: 0 };
            assert_eq!(scene.second(0, 0), Decision::Go, "nothing is known yet");
            scene
        }

        /// A second in which the interface sent `eth` bytes, `own` of them ours.
        fn second(&mut self, eth: u64, own: u64) -> Decision {
            self.now += Duration::from_secs(1);
            self.eth += eth;
            self.own += own;
            self.watch.sample(self.now, sent(&[("eth0", self.eth)]), self.own)
        }
    }

    #[test]
    fn pauses_while_the_job_sends_and_goes_on_well_below() {
        let mut scene = Scene::new();
        assert_eq!(scene.second(1000, 0), Decision::Go);
        assert_eq!(scene.second(1001, 0), Decision::Pause);
        assert_eq!(scene.second(900, 0), Decision::Pause, "not at once when it falls");
        assert_eq!(scene.second(750, 0), Decision::Go);
        assert_eq!(scene.second(900, 0), Decision::Go);
    }

    #[test]
    fn own_uploads_are_not_the_job() {
        let mut scene = Scene::new();
        assert_eq!(scene.second(1_100_000, 1_000_000), Decision::Go, "a tenth on top is ours too");
        assert_eq!(scene.second(1_102_000, 1_000_000), Decision::Pause);
    }

    #[test]
    fn no_pause_is_for_ever() {
        let mut scene = Scene::new();
        let all: Vec<_> = (0..22).map(|_| scene.second(5000, 0)).collect();
        let sent_at: Vec<_> = (0..22).filter(|&at| all[at] == Decision::Go).collect();
        assert_eq!(sent_at, [10, 20], "{all:?}");
    }

    #[test]
    fn the_busiest_interface_counts_and_new_ones_later() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let before =
            Sample { at: start, sent: sent(&[("bond0", 100), ("eth0", 100), ("eth1", 900)]), own_bytes: 0 };
        let after = sent(&[("bond0", 900), ("eth0", 800), ("eth1", 3), ("ib0", 1 << 50)]);
        assert_eq!(job_bytes_per_s(&before, start + second, &after, 0), 800);
    }

    #[test]
    fn samples_that_are_too_close_are_ignored() {
        let mut scene = Scene::new();
        assert_eq!(scene.second(5000, 0), Decision::Pause);
        let soon = scene.now + Duration::from_millis(1);
        assert_eq!(scene.watch.sample(soon, sent(&[("eth0", scene.eth)]), 0), Decision::Pause);
        assert_eq!(scene.second(0, 0), Decision::Go);
    }

    #[test]
    fn reads_the_counters() {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in [("eth0", "123\n"), ("lo", "9\n"), ("odd", "what\n")] {
            let dir = root.path().join(name).join("statistics");
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join("tx_bytes"), text).unwrap();
        }
        std::fs::write(root.path().join("bonding_masters"), "").unwrap();
        assert_eq!(sent_bytes(root.path()).unwrap(), sent(&[("eth0", 123)]));
        assert!(sent_bytes(&root.path().join("none")).is_err());
    }
}
