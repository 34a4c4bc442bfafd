//! Leases of files (fcntl(2), F_SETLEASE) that an open for reading would break.
//!
//! Who opens such a file waits until its holder gives the lease up, or /proc/sys/fs/lease-break-time is over: 45 s. A
//! holder that is frozen gives up nothing.

use procfs_core::{FromBufRead, Lock, LockKind, Locks};
use std::collections::HashSet;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// The inodes of files with leases for writing, and with leases that are being broken. A mounted procfs, `proc`, lists the
/// locks of the processes that are visible in it.
pub fn broken_by_reading(proc: &Path) -> HashSet<u64> {
    let Ok(file) = File::open(proc.join("locks")) else { return HashSet::new() };
    let Ok(locks) = Locks::from_buf_read(BufReader::new(file)) else { return HashSet::new() };
    let is_broken_by_reading = |lock: &&Lock| {
        let is_for_reading = matches!(lock.kind, LockKind::Read) && lock.mode.as_str() == "ACTIVE";
        lock.lock_type.as_str() == "LEASE" && !is_for_reading
    };
    locks.0.iter().filter(is_broken_by_reading).map(|lock| lock.inode).collect()
}
