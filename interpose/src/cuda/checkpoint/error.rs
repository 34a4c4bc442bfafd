//! Why the process could not be detached from its GPUs, or not be attached to them again.

use thiserror::Error;

use crate::cuda::address_space::AddressSpaceError;
use crate::cuda::bypass::BypassedDriver;
use crate::cuda::capture::CaptureError;
use crate::cuda::driver::DriverError;
use crate::cuda::driver_support::UnsupportedDriver;
use crate::cuda::init::NotStarted;
use crate::cuda::memory::MemoryError;
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
    #[error("{error}: {reason}")]
    LockUnsupported { error: DriverError, reason: UnsupportedDriver },
    #[error("cuCheckpointProcessLock took longer than it was given")]
    LockTimeout,
    #[error("cannot get a context on device {device} to copy its memory")]
    NoContext { device: i32 },
    #[error("no device has room for the context that the driver needs for a checkpoint")]
    NoRoomForContext,
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
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

/// Why the process's GPU state is lost.
#[derive(Debug, Error)]
pub enum AttachError {
    #[error("its GPU state was lost in an earlier restore")]
    Lost,
    #[error("the driver's restore would overwrite memory that another thread has mapped at its addresses")]
    AddressesTaken,
    #[error("the launcher has not delivered the memory of the GPU")]
    MirrorMissing,
    #[error("cannot get a context on device {device} to copy its memory back")]
    NoContext { device: i32 },
    #[error("device memory has no offset in the mirror")]
    NoOffset,
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
}
