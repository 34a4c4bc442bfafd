//! The memory of the job's processes, as the newest snapshot in the store says.

use crate::cli::config::Config;
use crate::commands::print;
use crate::job::times::Snapshot;
use crate::store::tiers;
use anyhow::Result;
use ckpt_snapshot::{JobDir, Manifest, ProcessMemory, SnapshotId, Store};
use serde::Serialize;
use std::cmp::Reverse;

/// Older snapshots are not looked for: of those that the journal knows, most may be deleted.
const LOOKED_FOR: usize = 8;
/// The number of processes in a text.
const SHOWN: usize = 10;

/// Memory by process.
#[derive(Serialize)]
pub struct Memory {
    /// The snapshot.
    pub snapshot: String,
    /// Its processes, the largest first.
    pub processes: Vec<ProcessMemory>,
}

/// All memory of a process, bytes.
pub fn sum_bytes(process: &ProcessMemory) -> u64 {
    let sum = process.private_bytes.saturating_add(process.shared_bytes);
    sum.saturating_add(process.device_bytes)
}

impl Memory {
    /// `None` for a snapshot of an earlier version.
    fn of(manifest: Manifest) -> Option<Self> {
        let mut processes = manifest.tree.processes;
        processes.sort_by_key(|process| (Reverse(sum_bytes(process)), process.pid));
        (!processes.is_empty()).then(|| Self { snapshot: manifest.id.to_string(), processes })
    }

    /// The memory in the newest of `snapshots` (oldest first) that the store can read; `None` if there is none. Errors are
    /// logged: a report is about more than memory.
    pub fn newest(config: &Config, job: &JobDir, snapshots: &[Snapshot]) -> Option<Self> {
        let read = || -> Result<Option<Manifest>> {
            let newest = snapshots.iter().rev().filter(|one| !one.is_in_memory_only);
            let ids: Vec<SnapshotId> =
                newest.take(LOOKED_FOR).filter_map(|one| one.id.parse().ok()).collect();
            if ids.is_empty() {
                return Ok(None);
            }
            let store = tiers::open(&config.store, job)?;
            Ok(ids.iter().find_map(|id| store.manifest(id).ok()))
        };
        match read() {
            Ok(manifest) => manifest.and_then(Self::of),
            Err(error) => {
                tracing::warn!("the report does not show the memory of the job's processes: {error:#}");
                None
            }
        }
    }

    /// The lines of a text.
    pub fn lines(&self) -> Vec<String> {
        let row = |process: &ProcessMemory| {
            let bytes = [process.private_bytes, process.shared_bytes, process.device_bytes].map(print::bytes);
            [vec![process.pid.to_string(), process.name.clone()], bytes.into()].concat()
        };
        let rows = self.processes.iter().take(SHOWN).map(row).collect();
        let mut lines = print::columns(&["PID", "PROCESS", "MEMORY", "SHARED", "ON GPUS"], rows);
        lines.extend(print::more(self.processes.len(), SHOWN));
        lines
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use ckpt_snapshot::{JobIdentity, ProcessTree};
    use std::time::SystemTime;

    pub fn process(
        pid: i32,
        name: &str,
        [private_bytes, shared_bytes, device_bytes]: [u64; 3],
    ) -> ProcessMemory {
        ProcessMemory { pid, name: name.to_owned(), private_bytes, shared_bytes, device_bytes }
    }

    #[test]
    fn the_largest_process_is_first() {
        let job = JobIdentity { key: "job".into(), cwd: "/".into(), argv: Vec::new() };
        let id = SnapshotId::new(1, SystemTime::UNIX_EPOCH);
        let small = process(2, "sh", [500, 0, 0]);
        let large = process(3, "python3", [400, 100, 7_000_000]);
        let manifest = |processes| {
            let tree = ProcessTree { processes, ..ProcessTree::default() };
            Manifest { tree, ..Manifest::new(id.clone(), job.clone()) }
        };
        let memory = Memory::of(manifest(vec![small.clone(), large.clone()])).unwrap();
        assert_eq!(memory.processes, [large, small]);
        let lines = memory.lines();
        assert!(lines[1].starts_with("3    python3  400 B   100 B   7.0 MB"), "{lines:?}");
        assert!(Memory::of(manifest(Vec::new())).is_none());
    }
}
