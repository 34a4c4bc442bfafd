//! One checkpoint of a running job.

pub mod attempt;
pub mod checkpointer;
pub mod diagnose;
pub mod dump;
#[cfg(feature = "faults")]
pub mod injected;
pub mod nodes;
pub mod precopy;
pub mod running_job;
pub mod storing;
