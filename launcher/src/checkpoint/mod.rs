//! One checkpoint of a running job.

pub mod attempt;
pub mod checkpointer;
pub mod diagnose;
pub mod dump;
pub mod failed_processes;
pub mod host_memory;
#[cfg(feature = "faults")]
pub mod injected;
pub mod nodes;
pub mod precopy;
pub mod running_job;
mod short_memory;
pub mod stall;
pub mod storing;
