//! While a snapshot is being stored, the copies of the job's memory take as much memory again, and the job runs and may grow. If
//! memory runs short, the checkpoint is given up and the copies are freed: otherwise the kernel would kill the job.

use crate::files::staging::StagedDir;
use crate::sys::deadline::MEMORY_POLL_INTERVAL;
use crate::sys::memory::{Limits, SPARE_BYTES};
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// With less than this, memory is short. More than that was free when the job was paused.
const LEAST_BYTES: u64 = SPARE_BYTES / 2;

/// Does `work`, which reads the files in `copies` and checks `is_short` before each read. If memory runs short meanwhile, sets
/// `is_short`, and empties the files.
///
/// # Errors
/// When there can be no more threads.
pub(super) fn while_watched<T>(
    copies: &[&StagedDir],
    is_short: &AtomicBool,
    work: impl FnOnce() -> T,
) -> io::Result<T> {
    thread::scope(|scope| {
        let (stop, stopped) = bounded::<()>(0);
        let watch = move || {
            if let Some(left_bytes) = runs_short(&stopped) {
                is_short.store(true, Ordering::SeqCst);
                let freed = copies.iter().try_for_each(|dir| empty(dir));
                tracing::debug!("{left_bytes} bytes of memory are left: the copies are freed, {freed:?}");
            }
        };
        thread::Builder::new().name("memory-watch".to_owned()).spawn_scoped(scope, watch)?;
        let done = work();
        drop(stop);
        Ok(done)
    })
}

/// Waits until memory is short, and returns what is left, bytes; or until the other end of the channel is dropped.
fn runs_short(stopped: &Receiver<()>) -> Option<u64> {
    let limits = Limits::of_this_process();
    while stopped.recv_timeout(MEMORY_POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let left_bytes = limits.available_bytes().ok()?;
        if left_bytes < LEAST_BYTES {
            return Some(left_bytes);
        }
    }
    None
}

fn empty(dir: &StagedDir) -> io::Result<()> {
    dir.files()?.iter().try_for_each(|(name, _)| dir.change(name)?.set_len(0))
}
