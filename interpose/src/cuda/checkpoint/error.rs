//! Why the process could not be detached from its GPUs, or not be attached to them again.

use thiserror::Error;

use crate::cuda::address_space::AddressSpaceError;
use crate::cuda::bypass::BypassedDriver;
use crate::cuda::capture::CaptureError;
use crate::cuda::changes;
use crate::cuda::driver::DriverError;
use crate::cuda::driver_support::UnsupportedDriver;
use crate::cuda::gpus::InvalidUuid;
use crate::cuda::init::NotStarted;
use crate::cuda::memory::{HostAccessError, MemoryError};
use crate::link::describe;

/// Why the process cannot be dumped now.
#[derive(Debug, Error)]
pub enum DetachError {
    #[error(transparent)]
    Bypassed(#[from] BypassedDriver),
    #[error(transparent)]
    Unsupported(#[from] UnsupportedDriver),
    #[error(transparent)]
    NotStarted(#[from] NotStarted),
    #[error("its GPU state was lost in an earlier restore")]
    Lost,
    /// State that cannot be saved, in words for people.
    #[error("{0}")]
    Obstacle(String),
    #[error("a stream capture (cuStreamBeginCapture) did not end")]
    CaptureOpen,
    #[error("membarrier(2) failed")]
    Membarrier,
    #[error("{}", calls_inside(*.threads))]
    CallsInside { threads: usize },
    #[error("work on the GPU did not end in time ({0})")]
    WorkPending(DriverError),
    /// The driver has the calls and does not support them.
    #[error("{error}: {reason}{hint}; this is tried again once {}", changes::WHAT)]
    DriverRefuses { error: DriverError, reason: UnsupportedDriver, hint: &'static str },
    /// As it was in an earlier attempt, in the same words.
    #[error("{0}")]
    StillRefused(String),
    #[error("cuCheckpointProcessLock took longer than it was given")]
    LockTimeout,
    #[error(transparent)]
    Map(#[from] MapError),
    #[error("no device has room for the context that the driver needs for a checkpoint")]
    NoRoomForContext,
    #[error("{0}")]
    NotStored(String),
    /// Without a mirror there would be nothing to copy it back from.
    #[error("its device memory cannot stay on the GPU, which --mirror none needs: {0}. Use --mirror changed")]
    NotParked(String),
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    HostAccess(#[from] HostAccessError),
    #[error(transparent)]
    AddressSpace(#[from] AddressSpaceError),
    /// What had been done could not be undone.
    #[error("{}; and then: {}", describe(.error), describe(.undo))]
    NotUndone { error: Box<DetachError>, undo: AttachError },
}

impl DetachError {
    /// Whether the process cannot run on either: its GPU state is lost.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost | Self::NotUndone { .. })
    }
}

fn calls_inside(threads: usize) -> String {
    match threads {
        1 => "a call of the CUDA driver did not return".to_owned(),
        _ => format!("calls of the CUDA driver in {threads} threads did not return"),
    }
}

/// Why device memory cannot be accessed to be copied.
#[derive(Debug, Error)]
pub enum MapError {
    #[error("cannot get a context on device {device} to copy its memory")]
    NoContext { device: i32 },
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Why the process's GPU state is lost.
#[derive(Debug, Error)]
pub enum AttachError {
    #[error("its GPU state was lost in an earlier restore")]
    Lost,
    #[error("the driver's restore would overwrite memory that another thread has mapped at its addresses")]
    AddressesTaken,
    #[error("the launcher has not delivered the memory of the GPU")]
    MirrorMissing,
    #[error(
        "the driver does not give back memory that was to stay on the GPU, and with --mirror none there is no copy of it"
    )]
    NoCopy,
    #[error("the memory of the GPU cannot be read from the store: {0}")]
    NotFilled(String),
    #[error(transparent)]
    Map(#[from] MapError),
    #[error("device memory has no offset in the mirror")]
    NoOffset,
    #[error(transparent)]
    InvalidUuid(#[from] InvalidUuid),
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
}
