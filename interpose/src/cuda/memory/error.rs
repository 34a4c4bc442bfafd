//! Why device memory cannot be taken off the device or brought back.

use ckpt_protocol::agent::WANTS_MORE_ROOM;
use thiserror::Error;

use crate::cuda::driver::DriverError;

/// Why device memory was not offloaded or restored.
#[derive(Debug, Error)]
pub enum MemoryError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("lost the connection to the launcher")]
    LauncherLost,
    #[error("{WANTS_MORE_ROOM}")]
    SharedTooLate,
    #[error("a process that it shares device memory with was not drained")]
    NotDrained,
    #[error("{0}")]
    Objects(String),
    #[error("this ckpt-run is too old to save multicast objects that processes share")]
    OldLauncher,
    #[error("a process that it shares multicast objects with has not released them")]
    NotDown,
    #[error("a process that it shares multicast objects with did not come back")]
    NotBack,
    #[error("device memory of process {owner}, which it has opened or imported, was not restored")]
    OwnerNotRestored { owner: u32 },
    /// As of NCCL, whose variables leave such memory out.
    #[error(
        "cannot export memory that it shares; if it is NCCL's, run the job with ckpt-run --nccl sockets (NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0)"
    )]
    Export(#[source] DriverError),
    #[error("the launcher does not keep memory that it shares")]
    NotKept,
}

/// Why the launcher does not keep device memory alive over the dump.
#[derive(Debug, Error)]
pub(crate) enum ParkError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("the launcher cannot hold that many descriptors: half of its limit (ulimit -Hn)")]
    TooManyDescriptors,
    #[error("there are no random numbers for keys")]
    NoKey,
    #[error("lost the connection to the launcher")]
    LauncherLost,
}
