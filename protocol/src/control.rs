//! What the commands (`ckpt-run checkpoint`, `ckpt-run status`…) and a running launcher say to each other over the
//! launcher's control socket: one [`Call`], then [`Reply`]s until one that is not [`Reply::Progress`].

use serde::{Deserialize, Serialize};

/// Raised when a message changes its meaning. A launcher refuses calls of another version by [`Reply::Error`].
pub const CONTROL_VERSION: u32 = 1;

/// From a command to the launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// [`CONTROL_VERSION`] of the caller.
    pub version: u32,
    /// What is wanted.
    pub request: Request,
}

/// What a command can ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Take a snapshot now; answered when it is durable or has failed.
    Checkpoint,
    /// Say how the job is.
    Status,
}

/// From the launcher to the command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// The checkpoint goes on.
    Progress(Progress),
    /// The snapshot is durable.
    Checkpointed(Saved),
    /// How the job is.
    Status(Box<JobStatus>),
    /// It could not be done, in plain words.
    Error(String),
}

/// What a checkpoint is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Nothing: the job just runs.
    #[default]
    Idle,
    /// The job stands still while its memory is copied.
    Dump,
    /// The job runs; its snapshot is being stored.
    Persist,
}

/// How far a checkpoint is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// Bytes stored so far.
    pub done_bytes: u64,
    /// Bytes to store.
    pub total_bytes: u64,
}

/// One durable snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// The snapshot's ID.
    pub id: String,
    /// Bytes stored.
    pub bytes: u64,
    /// How long the job stood still, seconds.
    pub stall_s: f64,
    /// From the beginning of the checkpoint until it was durable, seconds.
    pub durable_s: f64,
    /// When it was taken, milliseconds since 1970 UTC.
    pub taken_unix_ms: u64,
}

/// What the last checkpoint did with the job's device memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// Processes that have any.
    pub processes: u64,
    /// How much there was, bytes.
    pub bytes: u64,
    /// How much of it had changed since the checkpoint before, bytes; `None` if that was not looked for.
    pub changed_bytes: Option<u64>,
    /// How much was parked: it stayed on the GPU, bytes.
    pub parked_bytes: u64,
    /// How much was copied back to the GPU, bytes.
    pub copied_back_bytes: u64,
    /// Why not all was parked, in plain words.
    pub not_parked_because: Option<String>,
}

/// How a job is that runs now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    /// The job's name in the store.
    pub job: String,
    /// PID of its launcher.
    pub launcher_pid: u32,
    /// When the launcher started it, milliseconds since 1970 UTC.
    pub started_unix_ms: u64,
    /// The snapshot it was resumed from, if it was.
    pub resumed_from: Option<String>,
    /// What the launcher does at the moment.
    pub progress: Progress,
    /// The newest snapshot of this run.
    pub last_snapshot: Option<Saved>,
    /// Snapshots saved by this launcher.
    pub saved: u64,
    /// Checkpoints of this launcher that failed.
    pub failed: u64,
    /// Why the last one failed, unless one has succeeded since.
    pub last_failure: Option<String>,
    /// What the last checkpoint did with device memory, if the job has any.
    #[serde(default)]
    pub device_memory: Option<DeviceMemory>,
    /// Until the next checkpoint, seconds; `None` when there is no interval.
    pub next_checkpoint_s: Option<f64>,
}
