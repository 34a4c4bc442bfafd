//! While a snapshot is being stored, the copies of the job's memory take as much memory again, and the job runs and may grow. If
//! memory runs short, the checkpoint is given up and the copies are freed: otherwise the kernel would kill the job.

use crate::files::staging::StagedDir;
use crate::sys::deadline::{LONGEST_MEMORY_POLL_INTERVAL, MEMORY_POLL_INTERVAL};
use crate::sys::memory::{Limits, SPARE_BYTES};
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// With less than this, memory is short. More than that was free when the job was paused.
const LEAST_BYTES: u64 = SPARE_BYTES / 2;
/// A job hardly takes more memory in a millisecond.
const MOST_BYTES_PER_MS: u64 = 10 << 20;

/// Does `work`, which reads the files in `copies` and checks `is_short` before each read. If memory runs short meanwhile, sets
/// `is_short`, and empties the files.
pub(super) fn while_watched<T>(copies: &[&StagedDir], is_short: &AtomicBool, work: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        let (stop, stopped) = bounded::<()>(0);
        let watch = move || {
            if let Some(left_bytes) = runs_short(&stopped) {
                is_short.store(true, Ordering::SeqCst);
                tracing::debug!("{left_bytes} bytes of memory are left: the copies are freed");
                copies.iter().for_each(|dir| empty(dir));
            }
        };
        let watching = thread::Builder::new().name("memory-watch".to_owned()).spawn_scoped(scope, watch);
        if let Err(error) = watching {
            tracing::warn!("it is not watched how much memory is left while the snapshot is stored: {error}");
        }
        let done = work();
        drop(stop);
        done
    })
}

/// Waits until memory is short, and returns what is left, bytes; or until the other end of the channel is dropped.
fn runs_short(stopped: &Receiver<()>) -> Option<u64> {
    let limits = Limits::of_this_process();
    let mut wait = MEMORY_POLL_INTERVAL;
    while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
        let left_bytes = match limits.reclaimable_bytes() {
            Ok(left_bytes) => left_bytes,
            Err(error) => {
                tracing::debug!("it is not known how much memory is left: {error}");
                continue;
            }
        };
        if left_bytes < LEAST_BYTES {
            return Some(left_bytes);
        }
        wait = Duration::from_millis(left_bytes / MOST_BYTES_PER_MS);
        wait = wait.clamp(MEMORY_POLL_INTERVAL, LONGEST_MEMORY_POLL_INTERVAL);
    }
    None
}

/// Files that are stored are deleted meanwhile.
fn empty(dir: &StagedDir) {
    let files = dir.files().unwrap_or_else(|error| {
        tracing::warn!("memory cannot be freed: {error}");
        Vec::new()
    });
    for (name, _) in files {
        match dir.change(&name).and_then(|file| file.set_len(0)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("memory cannot be freed: {error}");
            }
            _ => {}
        }
    }
}
