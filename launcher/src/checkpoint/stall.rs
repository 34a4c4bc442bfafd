//! What a pause of the job consists of.

use ckpt_protocol::control::StallPhases;
use std::time::Duration;

/// Parts of a pause that ckpt-run has measured. The dump of CRIU is the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MeasuredPhases {
    /// The rounds of the pre-copy.
    pub(super) precopy: Duration,
    /// Ranks were parked, until all of them were.
    pub(super) cut: Duration,
    /// The agents detached.
    pub(super) detach: Duration,
    /// ckpt-run recorded what CRIU does not save, at stages of the dump.
    pub(super) record: Duration,
    /// The node waited for others, while the processes were frozen or their agents detached.
    pub(super) nodes: Duration,
    /// The agents attached.
    pub(super) attach: Duration,
}

/// The phases of a pause of `stall_s` seconds. Their sum is the pause, in microseconds: clocks may differ.
pub(super) fn phases(measured: MeasuredPhases, stall_s: f64) -> StallPhases {
    let mut left_us = stall_us(stall_s);
    let mut take = |part: Duration| {
        let part_us = u64::try_from(part.as_micros()).unwrap_or(u64::MAX).min(left_us);
        left_us -= part_us;
        part_us
    };
    let mut phases = StallPhases {
        precopy_us: take(measured.precopy),
        cut_us: take(measured.cut),
        detach_us: take(measured.detach),
        record_us: take(measured.record),
        nodes_us: take(measured.nodes),
        attach_us: take(measured.attach),
        dump_us: 0,
    };
    phases.dump_us = left_us;
    phases
}

/// The pause in microseconds; 0 for one that no clock can have measured.
pub fn stall_us(stall_s: f64) -> u64 {
    let stall = Duration::try_from_secs_f64(stall_s).unwrap_or_default();
    u64::try_from(stall.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dump_is_the_rest_and_the_sum_is_the_pause() {
        let ms = Duration::from_millis;
        let measured = MeasuredPhases {
            precopy: ms(1),
            cut: ms(2),
            detach: ms(30),
            record: ms(4),
            nodes: ms(5),
            attach: ms(60),
        };
        let found = phases(measured, 0.1125);
        let wanted = StallPhases {
            precopy_us: 1000,
            cut_us: 2000,
            detach_us: 30_000,
            dump_us: 10_500,
            record_us: 4000,
            nodes_us: 5000,
            attach_us: 60_000,
        };
        assert_eq!((found, found.sum_us()), (wanted, 112_500));
        // Another clock says that the pause was shorter than its parts.
        let shorter = phases(measured, 0.04);
        assert_eq!((shorter.sum_us(), shorter.attach_us, shorter.dump_us), (40_000, 0, 0));
        assert_eq!(phases(measured, f64::NAN), StallPhases::default());
    }
}
