//! Logs of failed checkpoints, failed restores and hangs, in `attempts/` of the job's directory.

use ckpt_snapshot::JobDir;
use std::fs;

/// Number of failed attempts whose logs are kept.
const ATTEMPTS_KEPT: usize = 10;

/// Deletes the oldest logs, beyond [`ATTEMPTS_KEPT`].
pub fn prune_attempt_logs(dir: &JobDir) {
    let Ok(Some(folder)) = dir.folder("attempts") else { return };
    let Ok(entries) = folder.entries() else { return };
    // By age, not by name: the restore of an old snapshot may have failed just now.
    let age = |entry: fs::DirEntry| Some((entry.metadata().ok()?.modified().ok()?, entry.path()));
    let mut attempts: Vec<_> = entries.into_iter().filter_map(age).collect();
    attempts.sort();
    for (_, old) in attempts.iter().rev().skip(ATTEMPTS_KEPT) {
        match fs::remove_dir_all(old) {
            Ok(()) => tracing::debug!("removed {}", old.display()),
            Err(error) => tracing::warn!("cannot remove {}: {error}", old.display()),
        }
    }
}
