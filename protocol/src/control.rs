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
    /// End the job with a snapshot; answered when it has ended.
    Stop,
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
    /// The job has ended.
    Stopped(Stopped),
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

/// One snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// The snapshot's ID.
    pub id: String,
    /// Bytes of what it holds.
    pub bytes: u64,
    /// Bytes that it has added to the store, if that is known: what was there already is not stored again.
    #[serde(default)]
    pub stored_bytes: Option<u64>,
    /// Bytes of what it holds that were not read for it, since they were known not to have changed.
    #[serde(default)]
    pub unread_bytes: u64,
    /// How long the job stood still, seconds.
    pub stall_s: f64,
    /// From the beginning of the checkpoint until it was durable, seconds.
    pub durable_s: f64,
    /// When it was taken, milliseconds since 1970 UTC.
    pub taken_unix_ms: u64,
    /// It is in the launcher's memory only so far.
    #[serde(default)]
    pub in_memory: bool,
}

/// A snapshot in the launcher's memory; it may be in the store too.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Held {
    /// The snapshot's ID.
    pub id: String,
    /// The run of the job that it belongs to.
    pub run: u64,
    /// When it was taken, milliseconds since 1970 UTC.
    pub taken_unix_ms: u64,
    /// Bytes of what it holds.
    pub bytes: u64,
    /// Bytes that it has added to what is in memory, if that is known.
    pub stored_bytes: Option<u64>,
    /// How long the job stood still, seconds.
    pub stall_s: f64,
}

/// Snapshots in the launcher's memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct InMemory {
    /// Those that are there, oldest first.
    pub snapshots: Vec<Held>,
    /// The newest one that this launcher has brought to the store.
    pub newest_in_store: Option<String>,
    /// Why the last one could not be copied to the store, unless one has been since.
    pub last_failure: Option<String>,
}

/// What all snapshots of one launcher have cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// How long the job stood still for them, seconds.
    pub stall_s: f64,
    /// From their beginning until they were durable, seconds.
    pub durable_s: f64,
    /// Bytes of what they hold.
    pub bytes: u64,
    /// Bytes that they have added to the store, as far as known.
    pub stored_bytes: u64,
    /// Bytes of what they hold that were not read for them.
    #[serde(default)]
    pub unread_bytes: u64,
}

/// Copies of snapshots in the object store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uploads {
    /// Snapshots uploaded by this launcher.
    pub uploaded: u64,
    /// Uploads that failed.
    pub failed: u64,
    /// Bytes that were new there.
    pub stored_bytes: u64,
    /// The snapshot that is being uploaded.
    pub uploading: Option<String>,
    /// The newest one that was.
    pub newest: Option<String>,
    /// Why the last one failed, unless one has succeeded since.
    pub last_failure: Option<String>,
}

/// A job that was ended on demand.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// The snapshot that was taken for it, durable.
    pub snapshot: Option<String>,
    /// Why there is none, in plain words.
    pub problem: Option<String>,
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
    /// When the newest snapshot of the job's present history was taken, milliseconds since 1970 UTC.
    #[serde(default)]
    pub newest_unix_ms: Option<u64>,
    /// What the snapshots of this launcher have cost.
    #[serde(default)]
    pub totals: Totals,
    /// Copies in the object store; `None` if there is none.
    #[serde(default)]
    pub uploads: Option<Uploads>,
    /// Snapshots in its memory; `None` if all go to the store at once.
    #[serde(default)]
    pub in_memory: Option<InMemory>,
    /// Checkpoints of this launcher that failed.
    pub failed: u64,
    /// Why the last one failed, unless one has succeeded since.
    pub last_failure: Option<String>,
    /// What the last checkpoint did with device memory, if the job has any.
    #[serde(default)]
    pub device_memory: Option<DeviceMemory>,
    /// Until the next checkpoint, seconds; `None` when there is no interval.
    pub next_checkpoint_s: Option<f64>,
    /// How often this launcher has restarted the job.
    #[serde(default)]
    pub restarts: u32,
    /// How the job failed last, under this launcher.
    #[serde(default)]
    pub last_job_failure: Option<String>,
    /// Until the job is restarted, seconds; `None` when it runs.
    #[serde(default)]
    pub restart_s: Option<f64>,
}
