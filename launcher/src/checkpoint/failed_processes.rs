//! Processes of the job that have failed while the job runs. A launcher of ranks may look at its ranks every few seconds
//! only: snapshots in between hold a job that is about to fail. When such a job is resumed, it fails again.

use ckpt_snapshot::FailedProcess;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A job that runs on for this long after a process has failed gets on without it.
const DOUBT: Duration = Duration::from_secs(3600);

/// The failed processes that were seen in this session, by PID.
#[derive(Default)]
pub struct FailedProcesses {
    seen: BTreeMap<u32, (FailedProcess, Instant)>,
}

impl FailedProcesses {
    /// Of a job that was resumed from a snapshot with this one, or begins.
    #[must_use]
    pub fn resumed(failed: Option<FailedProcess>, now: Instant) -> Self {
        Self { seen: failed.map(|failed| (failed.pid, (failed, now))).into_iter().collect() }
    }

    /// Notes those that a snapshot has. Returns the one that makes the snapshot doubtful, if there is one.
    pub fn note(&mut self, found: Vec<FailedProcess>, now: Instant) -> Option<FailedProcess> {
        for failed in found {
            if !self.seen.contains_key(&failed.pid) {
                tracing::info!(
                    "a process of the job ({}, PID {} in the job) has ended with exit code {}: the job may be about to fail. The last snapshot before that is kept",
                    failed.name,
                    failed.pid,
                    failed.code
                );
            }
            self.seen.entry(failed.pid).or_insert((failed, now));
        }
        let newest = self.seen.values().max_by_key(|(_, since)| *since);
        newest.filter(|(_, since)| now.duration_since(*since) < DOUBT).map(|(failed, _)| failed.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(pid: u32) -> FailedProcess {
        FailedProcess { pid, name: "python3".to_owned(), code: 137 }
    }

    #[test]
    fn a_failure_counts_for_a_time() {
        let begun = Instant::now();
        let mut failures = FailedProcesses::default();
        assert_eq!(failures.note(Vec::new(), begun), None);
        assert_eq!(failures.note(vec![failed(7)], begun), Some(failed(7)));
        // Its parent may have waited for it and be about to end.
        assert_eq!(failures.note(Vec::new(), begun + DOUBT / 2), Some(failed(7)));
        // A process that nobody waits for.
        assert_eq!(failures.note(vec![failed(7)], begun + DOUBT), None);
        assert_eq!(failures.note(vec![failed(7), failed(8)], begun + DOUBT), Some(failed(8)));
    }

    #[test]
    fn a_resume_from_a_doubtful_snapshot_makes_more_of_them() {
        let begun = Instant::now();
        let mut failures = FailedProcesses::resumed(Some(failed(7)), begun);
        assert_eq!(failures.note(Vec::new(), begun), Some(failed(7)));
        assert_eq!(FailedProcesses::resumed(None, begun).note(Vec::new(), begun), None);
    }
}
