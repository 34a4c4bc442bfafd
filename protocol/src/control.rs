//! The control protocol: messages between commands (`ckpt-run checkpoint`, `ckpt-run status`, …) and a running launcher
//! over the launcher's control socket. A command sends one [`Call`]; the launcher sends [`Reply`]s until one that is not
//! [`Reply::Progress`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Incremented when a message changes its meaning. A launcher answers calls of another version with [`Reply::Error`].
pub const CONTROL_VERSION: u32 = 1;

/// From a command to the launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// [`CONTROL_VERSION`] of the caller.
    pub version: u32,
    /// The request.
    pub request: Request,
}

/// A request of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Take a snapshot now; answered when the snapshot is durable or has failed.
    Checkpoint,
    /// Report the status of the job.
    Status,
    /// Take a snapshot and stop the job; answered when the job has ended. A job that cannot be saved runs on.
    Stop,
    /// As [`Request::Stop`], but a job that cannot be saved is ended too.
    ForceStop,
    /// Report the last lines that the job has written.
    Output,
    /// Free the space of deleted snapshots; answered when that is done.
    Reclaim,
}

/// From the launcher to the command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// Progress of the checkpoint.
    Progress(Progress),
    /// The snapshot is durable.
    Checkpointed(Box<Saved>),
    /// The status of the job.
    Status(Box<JobStatus>),
    /// The job has ended.
    Stopped(Stopped),
    /// The last lines that the job has written; empty if it has written nothing in this session.
    Output(String),
    /// The space of deleted snapshots is free.
    Reclaimed,
    /// The request failed, with a message for the user.
    Error(String),
}

/// The phase of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// No checkpoint is in progress.
    #[default]
    Idle,
    /// The job is frozen while its memory is copied.
    Dump,
    /// The job runs while its snapshot is stored.
    Persist,
}

/// The progress of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The current phase.
    pub phase: Phase,
    /// Bytes stored so far.
    pub done_bytes: u64,
    /// Bytes to store.
    pub total_bytes: u64,
}

/// A snapshot that was saved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// The snapshot's ID.
    pub id: String,
    /// Its size, bytes.
    pub bytes: u64,
    /// Bytes that it added to the store, if known; the rest was stored already.
    #[serde(default)]
    pub stored_bytes: Option<u64>,
    /// Bytes that were not in the store before, uncompressed, if known.
    #[serde(default)]
    pub changed_bytes: Option<u64>,
    /// Bytes that were not read, since they were known to be unchanged.
    #[serde(default)]
    pub unread_bytes: u64,
    /// How long the job was frozen, seconds.
    pub stall_s: f64,
    /// What that time went into; `None` from older launchers.
    #[serde(default)]
    pub stall_phases: Option<Box<StallPhases>>,
    /// What it took until all ranks of NCCL stood at the same step; `None` if no process had a communicator.
    #[serde(default)]
    pub cut: Option<Box<CutTime>>,
    /// From the beginning of the checkpoint until the snapshot was durable, seconds.
    pub durable_s: f64,
    /// When it was taken, milliseconds since 1970 UTC.
    pub taken_unix_ms: u64,
    /// Whether it is only in the launcher's memory so far.
    #[serde(default)]
    pub in_memory: bool,
    /// Whether a process of the job had failed before: the job may be about to fail.
    #[serde(default)]
    pub is_doubtful: bool,
    /// Files of the job that a resume could not put back, with the reason.
    #[serde(default)]
    pub uncovered_files: BTreeMap<String, String>,
}

/// What the pause of a job for a snapshot consists of, microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StallPhases {
    /// Rounds of the pre-copy, between which the job runs (`--precopy`).
    pub precopy_us: u64,
    /// Ranks of NCCL were parked, until all of them stood at the same step.
    pub cut_us: u64,
    /// The agents took device memory off the GPUs.
    pub detach_us: u64,
    /// CRIU froze the processes and copied their memory.
    pub dump_us: u64,
    /// ckpt-run recorded what CRIU does not save: files, sockets, shared memory.
    pub record_us: u64,
    /// The node waited for the other nodes of the job.
    pub nodes_us: u64,
    /// The agents put device memory back.
    pub attach_us: u64,
}

impl StallPhases {
    /// The phases with their names, in the order in which they occur.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 7] {
        [
            ("precopy", self.precopy_us),
            ("cut", self.cut_us),
            ("detach", self.detach_us),
            ("dump", self.dump_us),
            ("record", self.record_us),
            ("nodes", self.nodes_us),
            ("attach", self.attach_us),
        ]
    }

    /// The whole pause.
    #[must_use]
    pub fn sum_us(&self) -> u64 {
        self.named().iter().map(|(_, us)| us).fold(0, |sum, us| sum.saturating_add(*us))
    }

    /// Adds another pause.
    pub fn add(&mut self, other: &Self) {
        for (sum_us, us) in [
            (&mut self.precopy_us, other.precopy_us),
            (&mut self.cut_us, other.cut_us),
            (&mut self.detach_us, other.detach_us),
            (&mut self.dump_us, other.dump_us),
            (&mut self.record_us, other.record_us),
            (&mut self.nodes_us, other.nodes_us),
            (&mut self.attach_us, other.attach_us),
        ] {
            *sum_us = sum_us.saturating_add(us);
        }
    }
}

/// What a consistent cut has taken.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CutTime {
    /// From the request to the cut, seconds.
    pub duration_s: f64,
    /// Number of attempts.
    pub attempts: u32,
}

/// A snapshot in the launcher's memory; the store may have it too.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Held {
    /// The snapshot's ID.
    pub id: String,
    /// The run of the job that it belongs to.
    pub run: u64,
    /// When it was taken, milliseconds since 1970 UTC.
    pub taken_unix_ms: u64,
    /// Its size, bytes.
    pub bytes: u64,
    /// Bytes that it added to the snapshots in memory, if known.
    pub stored_bytes: Option<u64>,
    /// How long the job was frozen, seconds.
    pub stall_s: f64,
}

/// Snapshots in the launcher's memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct InMemory {
    /// The snapshots in memory, oldest first.
    pub snapshots: Vec<Held>,
    /// The newest snapshot that this launcher has copied to the store.
    pub newest_in_store: Option<String>,
    /// With `--replicas`: the newest snapshot that is in the memory of another node, too.
    #[serde(default)]
    pub newest_replica: Option<String>,
    /// Why the last copy to the store failed, unless one has succeeded since.
    pub last_failure: Option<String>,
}

/// The total cost of all snapshots of one launcher.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// How long the job was frozen for them, seconds.
    pub stall_s: f64,
    /// From the beginning of each checkpoint until its snapshot was durable, seconds.
    pub durable_s: f64,
    /// Their size, bytes.
    pub bytes: u64,
    /// Bytes that they added to the store, as far as known.
    pub stored_bytes: u64,
    /// Bytes that were not read, since they were known to be unchanged.
    #[serde(default)]
    pub unread_bytes: u64,
}

/// Copies of snapshots in the object store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uploads {
    /// Number of snapshots uploaded by this launcher.
    pub uploaded: u64,
    /// Number of failed uploads.
    pub failed: u64,
    /// Bytes that the uploads added to the object store.
    pub stored_bytes: u64,
    /// The snapshot that is being uploaded.
    pub uploading: Option<String>,
    /// The newest uploaded snapshot.
    pub newest: Option<String>,
    /// Why the last upload failed, unless one has succeeded since.
    pub last_failure: Option<String>,
}

/// The answer to [`Request::Stop`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// The final snapshot, which is durable.
    pub snapshot: Option<String>,
    /// Why there is no snapshot, for the user.
    pub problem: Option<String>,
}

/// The device memory of the job at the last checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// Number of processes with device memory.
    pub processes: u64,
    /// Size of the device memory, bytes.
    pub bytes: u64,
    /// Bytes changed since the checkpoint before; `None` if the change was not determined.
    pub changed_bytes: Option<u64>,
    /// Bytes that were parked, that is, stayed on the GPU.
    pub parked_bytes: u64,
    /// Bytes copied back to the GPU.
    pub copied_back_bytes: u64,
    /// What the copy in host memory holds between checkpoints: `all` device memory, what has `changed` since the last
    /// stored snapshot, or `none` (`--mirror`). Empty from older launchers.
    #[serde(default)]
    pub mirror: String,
    /// Host memory that holds a copy of it between checkpoints, bytes. Chunks of zeroes take none.
    #[serde(default)]
    pub mirror_bytes: u64,
    /// Why not all of it was parked, for the user.
    pub not_parked_because: Option<String>,
}

/// What a rank does that others wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LateDoing {
    /// It calls its GPU.
    GpuWork,
    /// It calls NCCL on other communicators.
    OtherCalls,
    /// It reads or writes files, or a process does that it has started.
    Files,
    /// It uses the CPU, or a process does that it has started.
    Cpu,
    /// It is stopped (SIGSTOP or the like).
    Stopped,
    /// Nothing: it hangs.
    Nothing,
}

/// A rank of NCCL that is late: other ranks wait for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LateRank {
    /// Its number in the largest communicator of the job.
    pub rank: u32,
    /// PID of its process in the job.
    pub pid: i32,
    /// The name of the process.
    pub process: String,
    /// The node of the process, if the job is on several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// A short form of the communicator's name.
    pub communicator: String,
    /// The call that it has not made, if known.
    pub call: Option<String>,
    /// The number of that call on the communicator, from 1.
    pub number: u64,
    /// The ranks that have made it.
    pub waiting: Vec<u32>,
    /// For how long they have waited, seconds. Checkpoints do not count.
    pub late_s: f64,
    /// What it has done meanwhile.
    pub doing: LateDoing,
}

impl LateRank {
    /// Whether it hangs: it does nothing.
    #[must_use]
    pub fn hangs(&self) -> bool {
        matches!(self.doing, LateDoing::Stopped | LateDoing::Nothing)
    }

    /// What is known of it, in words.
    #[must_use]
    pub fn describe(&self) -> String {
        let Self { rank, pid, process, communicator, number, late_s, .. } = self;
        let missing = match &self.call {
            Some(call) => format!("has not called {call}, no. {number} on communicator {communicator},"),
            None => format!("has not made call no. {number} on communicator {communicator}"),
        };
        let (who, wait) = match &self.waiting[..] {
            [one] => (format!("rank {one}"), "waits"),
            several => (format!("ranks {}", ranges(several)), "wait"),
        };
        let place = if self.call.is_some() { "in" } else { "for" };
        let node = self.node.map_or_else(String::new, |node| format!(", node {node}"));
        let doing = match self.doing {
            LateDoing::GpuWork => "It still works: it calls its GPU",
            LateDoing::OtherCalls => "It still works: it calls NCCL on other communicators",
            LateDoing::Files => "It still works: it reads or writes files",
            LateDoing::Cpu => "It still works: it uses the CPU",
            LateDoing::Stopped => "It is stopped (SIGSTOP or the like)",
            LateDoing::Nothing => "It does nothing",
        };
        format!(
            "rank {rank} (process {pid}, {process}{node}) {missing} for {late_s:.0} s; {who} {wait} {place} it. {doing}"
        )
    }
}

/// Numbers in order, with ranges: `0-2, 5`.
fn ranges(numbers: &[u32]) -> String {
    let follows = |before: &u32, after: &u32| after.checked_sub(*before) == Some(1);
    let range = |run: &[u32]| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run.first().map(u32::to_string).unwrap_or_default(),
    };
    numbers.chunk_by(follows).map(range).collect::<Vec<_>>().join(", ")
}

/// The status of a running job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    /// The job's name in the store.
    pub job: String,
    /// The store's path or address.
    #[serde(default)]
    pub store: String,
    /// PID of its launcher.
    pub launcher_pid: u32,
    /// When the launcher started it, milliseconds since 1970 UTC.
    pub started_unix_ms: u64,
    /// The snapshot it was resumed from, if it was.
    pub resumed_from: Option<String>,
    /// The current phase and progress of a checkpoint.
    pub progress: Progress,
    /// The newest snapshot of this run.
    pub last_snapshot: Option<Saved>,
    /// Number of snapshots saved by this launcher.
    pub saved: u64,
    /// When the newest snapshot that is not abandoned was taken, milliseconds since 1970 UTC.
    #[serde(default)]
    pub newest_unix_ms: Option<u64>,
    /// The total cost of the snapshots of this launcher.
    #[serde(default)]
    pub totals: Totals,
    /// Copies in the object store; `None` without an object store.
    #[serde(default)]
    pub uploads: Option<Uploads>,
    /// Snapshots in the launcher's memory; `None` if all snapshots are stored immediately.
    #[serde(default)]
    pub in_memory: Option<InMemory>,
    /// Number of failed checkpoints of this launcher.
    pub failed: u64,
    /// Why the last checkpoint failed, unless one has succeeded since.
    pub last_failure: Option<String>,
    /// The job's device memory at the last checkpoint, if it has any.
    #[serde(default)]
    pub device_memory: Option<DeviceMemory>,
    /// Time to the next checkpoint, seconds; `None` without an interval.
    pub next_checkpoint_s: Option<f64>,
    /// How often this launcher has restarted the job.
    #[serde(default)]
    pub restarts: u32,
    /// The last failure of the job under this launcher.
    #[serde(default)]
    pub last_job_failure: Option<String>,
    /// Time to the restart of the job, seconds; `None` while it runs.
    #[serde(default)]
    pub restart_s: Option<f64>,
    /// Ranks of NCCL that others wait for.
    #[serde(default)]
    pub late_ranks: Vec<LateRank>,
    /// When the watchdog last saw the job work, milliseconds since 1970 UTC; `None` without one.
    #[serde(default)]
    pub last_progress_unix_ms: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_a_row_are_a_range() {
        let shown = [&[3][..], &[0, 1, 2, 5, 7, 8], &[0, 2]].map(ranges);
        assert_eq!(shown, ["3", "0-2, 5, 7-8", "0, 2"]);
    }
}
