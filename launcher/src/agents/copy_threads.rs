//! How a process copies its device memory to the mirror and back.
//!
//! | | |
//! |---|---|
//! | the mirror is pinned | devices copy to it at full speed; it is pinned while the job runs, and unpinned while it is paused |
//! | threads copy through pinned buffers | nothing but these is pinned; it takes several CPUs |
//!
//! On an H200 with 16 CPUs, the first copies 1 GiB in 19 ms and unpins it in 16 ms; 12 threads copy it in 23 ms, 8 in 25 ms,
//! 4 in 40 ms and 2 in 85 ms (docs/measurements.md; the last three with buffers of 4 MiB instead of 2).

/// More threads are not faster.
const MOST_THREADS: u64 = 12;
/// Fewer threads are not faster than a pinned mirror.
const LEAST_THREADS: u64 = 6;
/// A smaller mirror is copied to and unpinned within 35 ms.
const LEAST_BYTES: u64 = 1 << 30;

/// How many threads of a process copy `used_bytes` of device memory, where so many `processes` do that at a time; 0: its
/// mirror is pinned.
pub(super) fn copy_threads(used_bytes: u64, processes: usize) -> u64 {
    #[cfg(feature = "faults")]
    if let Ok(threads) = std::env::var("CKPT_FAULT_COPY_THREADS") {
        return threads.parse().expect("a number of threads");
    }
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    decide(used_bytes, cpus as u64 / processes.max(1) as u64)
}

fn decide(used_bytes: u64, cpus: u64) -> u64 {
    if used_bytes < LEAST_BYTES || cpus < LEAST_THREADS { 0 } else { cpus.min(MOST_THREADS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_mirrors_are_pinned_and_so_are_those_of_processes_with_few_cpus() {
        assert_eq!([1, 5, 6, 8, 12, 100].map(|cpus| decide(LEAST_BYTES, cpus)), [0, 0, 6, 8, 12, 12]);
        assert_eq!(decide(LEAST_BYTES - 1, 100), 0);
    }
}
