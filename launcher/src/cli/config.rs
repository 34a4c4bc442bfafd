//! The effective options, as the rest of the program uses them.

use crate::agents::MirrorMode;
use crate::checkpoint::precopy::Precopy;
use crate::cli::logging::Format;
use crate::cli::values::Resolved;
use crate::cluster::{NodeOptions, Rejoin};
use crate::files::rules::FileOptions;
use crate::gpu::nccl::Nccl;
use crate::gpu::placement::GpuMap;
use crate::gpu::preload::Interposer;
use crate::job::resume_point::Resume;
use crate::namespace::Network;
use crate::observe::notify::Address;
use crate::store::options::StoreOptions;
use ckpt_snapshot::{JobKey, KeepEvery, Retention};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// When a job that makes no progress is ended (`--hang-timeout`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HangTimeout {
    /// When a rank of NCCL does nothing while others wait for it; any job after a long time.
    Auto,
    /// After this time.
    After(Duration),
}

/// The effective options. [`Config::resolve`] sets every field: `Default` is only what it begins with.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Where snapshots are stored, and how.
    pub store: StoreOptions,
    /// The job's name, if it was given one.
    pub job: Option<JobKey>,
    /// Time between snapshots; `None` is off.
    pub interval: Option<Duration>,
    /// The largest share of the time that snapshots may pause the job for.
    pub overhead: Option<f64>,
    /// Mean time between failures of the job.
    pub mtbf: Option<Duration>,
    /// Every Nth snapshot goes to the store; the others stay in memory.
    pub persist_every: u64,
    /// Snapshots to keep.
    pub keep: usize,
    /// Snapshots to keep in addition, without limit.
    pub keep_every: Option<KeepEvery>,
    /// Every Nth snapshot is uploaded.
    pub upload_every: u64,
    /// What to do about earlier snapshots.
    pub resume: Resume,
    /// How long the newest snapshot is tried before an older one; `None` is for ever.
    pub resume_policy: Option<Duration>,
    /// The job's files.
    pub files: FileOptions,
    /// The CRIU to use.
    pub criu: Option<PathBuf>,
    /// Whether memory is copied while the job runs.
    pub precopy: Precopy,
    /// The longest pause of the job for a checkpoint.
    pub freeze_timeout: Duration,
    /// How long a GPU driver may take beyond that.
    pub gpu_timeout: Duration,
    /// What the copy of device memory in host memory holds between checkpoints.
    pub mirror: MirrorMode,
    /// GPUs of a snapshot, and those that take their places.
    pub gpu_map: GpuMap,
    /// The network of the job.
    pub network: Network,
    /// Whether the interposer is preloaded into the job's processes.
    pub interpose: Interposer,
    /// The nodes of the job.
    pub nodes: NodeOptions,
    /// How NCCL connects the ranks of the job.
    pub nccl: Nccl,
    /// How many times a failed job is restarted.
    pub max_restarts: u32,
    /// Polling interval for preemption triggers and hang detection.
    pub monitor_interval: Duration,
    /// A job without progress for this long hangs; `None` is off.
    pub hang_timeout: Option<HangTimeout>,
    /// The signals that preempt the job.
    pub on_signal: Vec<i32>,
    /// The file whose appearance preempts the job.
    pub preempt_file: Option<PathBuf>,
    /// The shell command whose success preempts the job.
    pub preempt_probe: Option<String>,
    /// Time to save and end a preempted job.
    pub grace: Duration,
    /// The log file.
    pub log_file: Option<PathBuf>,
    /// The format of messages.
    pub log_format: Format,
    /// The address at which metrics are served.
    pub metrics: Option<SocketAddr>,
    /// Where notifications are sent.
    pub notify: Option<Address>,
    /// More (positive) or fewer (negative) messages.
    pub verbosity: i32,
    /// Every option with its origin, for `ckpt-run config`.
    pub resolved: Vec<Resolved>,
}

impl Config {
    /// For a launcher that starts again. A run that has begun is resumed, whatever it was told to begin with.
    pub fn rejoin(&mut self, rejoin: &Rejoin) {
        self.nodes.rejoins_as = Some(rejoin.rank);
        self.nodes.has_begun = rejoin.has_begun;
        if rejoin.has_begun && self.resume != Resume::Required {
            self.resume = Resume::Auto;
        }
    }

    /// The snapshots that a running job keeps.
    #[must_use]
    pub fn retention(&self) -> Retention {
        Retention { keep: self.keep, every: self.keep_every, before_failures: self.keep > 1 }
    }
}
