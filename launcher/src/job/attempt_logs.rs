//! Logs of failed checkpoints, failed restores and hangs, in `attempts/` of the job's directory.

use ckpt_snapshot::JobDir;
use std::fs;

/// Failed attempts whose logs are kept.
const ATTEMPTS_KEPT: usize = 10;

/// Removes the oldest of what is kept of failed attempts.
pub fn forget_old_attempts(dir: &JobDir) {
    let Ok(entries) = fs::read_dir(dir.path().join("attempts")) else { return };
    // By age, not by name: an old snapshot may have failed to restore just now.
    let age = |entry: fs::DirEntry| Some((entry.metadata().ok()?.modified().ok()?, entry.path()));
    let mut attempts: Vec<_> = entries.flatten().filter_map(age).collect();
    attempts.sort();
    for (_, old) in attempts.iter().rev().skip(ATTEMPTS_KEPT) {
        match fs::remove_dir_all(old) {
            Ok(()) => tracing::debug!("removed {}", old.display()),
            Err(error) => tracing::warn!("cannot remove {}: {error}", old.display()),
        }
    }
}
