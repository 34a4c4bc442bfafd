//! GPU state of the job: the preloaded interposer, device memory in snapshots, memory by address.

pub mod device_memory;
#[allow(unsafe_code)]
mod mapped;
pub mod nccl;
pub mod placement;
pub mod preload;
pub mod regions;
