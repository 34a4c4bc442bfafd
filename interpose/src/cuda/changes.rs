//! Counts what may change whether the driver supports a checkpoint of the process: contexts and modules that come and
//! go, obstacles that end, calls of a profiler.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static COUNT: AtomicU64 = AtomicU64::new(0);

/// For messages: what is counted.
pub(super) const WHAT: &str =
    "it has created or destroyed a context, loaded or unloaded a module, or its profiler has detached";

/// Counts a change.
pub(super) fn note() {
    COUNT.fetch_add(1, Relaxed);
}

/// The changes so far.
pub(super) fn count() -> u64 {
    COUNT.load(Relaxed)
}
